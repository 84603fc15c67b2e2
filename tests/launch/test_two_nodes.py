"""Two nodes for real: namespaces of the network, joined by a link that is cut."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from helpers import ROOT, command, finish, go_back, record
from two_nodes import ADDRESSES, Nodes, ends, reason_for_none, training

missing = reason_for_none()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=missing)]
STEPS = ("--total_steps", "3", "--num_mini_batches", "2", "--save_every", "2", "--beta", "0.1")


@pytest.fixture(scope="module")
def on_one_node(tiny, tmp_path_factory):
    """The records of runs of two ranks on one node, by the kind of rollout."""
    records = {}

    def make(rollout: str) -> dict:
        if rollout not in records:
            out = make.places[rollout] = tmp_path_factory.mktemp(rollout)
            finish(command(tiny, out, *STEPS, ranks=2, rollout=rollout), out / "log", 300)
            records[rollout] = record(out / "run")
        return records[rollout]

    make.places = {}
    return make


def check_equal(expected: dict, folder: Path) -> None:
    got = record(folder)
    for key in expected:
        assert got[key] == expected[key], key


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param({}, id="interface found"),
        pytest.param({"rollout": "vllm", "before": ("GLOO_SOCKET_IFNAME=cable",)}, id="vLLM, interface given"),
        pytest.param({"first": 1, "pause": 40.0}, id="node 0 is late"),
        pytest.param({"first": 0, "pause": 40.0}, id="node 1 is late"),
    ],
)
def test_two_nodes_equal_one(on_one_node, tiny, tmp_path, launch):
    """A rank on each node: every number, every sample, the weights; who waits for a late node says so once."""
    expected = on_one_node(launch.get("rollout", "hf"))
    with Nodes() as nodes:
        runs = nodes.launch(tiny, [tmp_path, tmp_path], tmp_path, *STEPS, **launch)
        ends(runs, 400)
        assert [run.end(10) for run in runs] == [0, 0], "\n".join(run.text() for run in runs)
    check_equal(expected, tmp_path / "run")
    if "pause" in launch:
        first = launch["first"]
        words = f"the other 1 node(s) to join it at {ADDRESSES[0]}" if first == 0 else f"node 0 at {ADDRESSES[0]}"
        said = re.findall(r"node (\d) on node\d has waited (\d+) s for (.*)", runs[first].text())
        assert [(node, text.startswith(words)) for node, _, text in said] == [(str(first), True)], runs[first].text()
        assert 10 <= int(said[0][1]) <= 15


NOT_SHARED = "is not the same folder on all nodes"
REMEDY = "choose one on a shared file system"


@pytest.fixture
def finished(on_one_node, tmp_path):
    """The folder of results of a run that is finished, to be changed."""
    on_one_node("hf")
    return shutil.copytree(on_one_node.places["hf"], tmp_path / "runs")


def test_a_resume_where_each_node_has_its_own_disk(finished, tiny, tmp_path):
    """The same path, but node 1 has nothing there: both nodes end with one sentence."""
    go_back(finished / "run", 2)
    with Nodes() as nodes:
        runs = nodes.launch(tiny, [finished] * 2, tmp_path, *STEPS, on_node_1=f"mount -t tmpfs none {finished}")
        ends(runs, 120)
        assert [run.end(10) for run in runs] == [2, 2], "\n".join(run.text() for run in runs)
    for run in runs:
        said = [line for line in run.text().splitlines() if line.startswith("error: ")]
        assert len(said) == 1 and f"error: --output_dir {finished} {NOT_SHARED}: rank 1 on node1" in said[0], run.text()
        assert said[0].endswith(REMEDY)


@pytest.mark.parametrize("blind", [0, 1])
def test_a_run_that_is_finished_on_the_disk_of_one_node(finished, tiny, tmp_path, blind):
    """The node that lacks the run ends within a minute instead of waiting for ranks that have ended."""
    empty = tmp_path / "empty"
    empty.mkdir()
    outs = [finished, finished]
    outs[blind] = empty
    with Nodes() as nodes:
        runs = nodes.launch(tiny, outs, tmp_path, *STEPS)
        ends([runs[blind]], 90)
        assert runs[blind].end(10) == 2, "\n".join(run.text() for run in runs)
        runs[1 - blind].kill()  # torch's launcher waits five minutes for the other
    text = runs[1 - blind].text()
    assert (f"{finished / 'run'} is finished" in text) == (blind == 1)  # rank 0 prints it
    assert "has waited" not in text and "Traceback" not in text, text
    said = [line for line in runs[blind].text().splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and f"the ranks on node{1 - blind} ended with exit code 0" in said[0], runs[blind].text()
    assert f"--output_dir {NOT_SHARED}; {REMEDY}" in said[0]


def test_a_part_that_is_another_on_each_disk(tiny, tmp_path):
    """Under one path: without a comparison node 1 would train by other code; test_agreement.py has all parts."""
    part, other = ROOT / "utils.py", tmp_path / "other"
    other.write_text(part.read_text() + "# edited on one node\n")
    with Nodes() as nodes:
        mount = f"mount --bind {other} {part}"
        runs = nodes.launch(tiny, [tmp_path] * 2, tmp_path, *STEPS, on_node_1=mount)
        ends(runs, 120)
        assert [run.end(10) for run in runs] == [2, 2], "\n".join(run.text() for run in runs)
    for run in runs:
        assert "the ranks of this launch differ: file utils.py is" in run.text(), run.text()
        assert "start all ranks with the same command, code, packages, models and data" in run.text()


def test_a_node_without_the_model(tiny, tmp_path):
    """It says so, and the other node does not wait for it."""
    model = shutil.copytree(tiny, tmp_path / "tiny")
    with Nodes() as nodes:
        runs = nodes.launch(model, [tmp_path] * 2, tmp_path, *STEPS, on_node_1=f"mount -t tmpfs none {model}")
        ends(runs, 240)
        assert [run.end(10) for run in runs] == [1, 2], "\n".join(run.text() for run in runs)
    assert "rank 1 ended first, with exit code 2; see what node1 printed" in runs[0].text(), runs[0].text()
    assert "no config.json there" in runs[1].text()


def test_the_link_between_nodes_is_lost(tiny, tmp_path):
    """Each side ends by itself, and says whom it cannot reach."""
    with Nodes() as nodes:
        runs = training(nodes, tiny, tmp_path)
        nodes.cut()
        ends(runs, 30)
        assert all(run.end(10) not in (0, 75) for run in runs)
    first, other = (run.text() for run in runs)
    assert f"rank 0 on node0 failed: rank 1 on node1 ({ADDRESSES[1]}) is gone without a word" in first, first
    assert f"rank 1 on node1 failed: no answer from {ADDRESSES[0]}" in other, other


@pytest.mark.parametrize("node", [0, 1])
def test_a_rank_on_either_node_is_killed(tiny, tmp_path, node):
    """The rank on the other node ends within 15 s, and says which one it missed."""
    with Nodes() as nodes:
        runs = training(nodes, tiny, tmp_path)
        os.kill(runs[node].ranks()[0], signal.SIGKILL)
        after = ends(runs, 15)
        assert all(run.end(10) not in (0, 75) for run in runs)
    print(f"ended after {after[0]:.1f} and {after[1]:.1f} s")
    text = runs[1 - node].text()
    seen = f"rank {node} on node{node} ({ADDRESSES[node]}) is gone without a word"
    told = f"rank {node} ended first, by signal 9 (Killed); see what node{node} printed"  # by node 1's launcher
    assert f"rank {1 - node} on node{1 - node} failed" in text and (seen in text or told in text), text

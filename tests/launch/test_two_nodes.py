"""Two nodes for real: namespaces of the network, joined by a link that is slow, that loses packets.

tests/runs/test_faults.py cuts it, and has nodes that are not alike.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import moved_clock
import pytest
from helpers import PROBLEMS, ROOT, command, finish, go_back, record
from safetensors.torch import load_file, save_file
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


@pytest.mark.parametrize("rollout, interface", [("hf", None), ("vllm", "cable")])
def test_two_nodes_equal_one(on_one_node, tiny, tmp_path, rollout, interface):
    """A rank on each node: every number, every sample, the weights; Gloo's interface found, or given by the user."""
    expected = on_one_node(rollout)
    before = (f"GLOO_SOCKET_IFNAME={interface}",) if interface else ()
    with Nodes() as nodes:
        runs = nodes.launch(tiny, [tmp_path, tmp_path], tmp_path, *STEPS, rollout=rollout, before=before)
        ends(runs, 300)
        assert [run.end(10) for run in runs] == [0, 0], "\n".join(run.text() for run in runs)
    check_equal(expected, tmp_path / "run")


def test_a_link_that_is_slow_and_loses_packets(on_one_node, tiny, tmp_path):
    """20 ms each way, one packet in fifty lost: the same numbers, later."""
    expected = on_one_node("hf")
    with Nodes(delay=0.02, loss=0.02) as nodes:
        runs = nodes.launch(tiny, [tmp_path, tmp_path], tmp_path, *STEPS)
        ends(runs, 400)
        assert [run.end(10) for run in runs] == [0, 0], "\n".join(run.text() for run in runs)
    check_equal(expected, tmp_path / "run")


@pytest.mark.parametrize("late", [0, 1])
def test_a_node_that_joins_late(on_one_node, tiny, tmp_path, late):
    """40 s after the other, which says after 10 s whom it waits for: the same numbers, later."""
    expected = on_one_node("hf")
    with Nodes() as nodes:
        runs = nodes.launch(tiny, [tmp_path, tmp_path], tmp_path, *STEPS, first=1 - late, pause=40.0)
        ends(runs, 300)
        assert [run.end(10) for run in runs] == [0, 0], "\n".join(run.text() for run in runs)
    words = f"the other 1 node(s) to join it at {ADDRESSES[0]}" if late == 1 else f"node 0 at {ADDRESSES[0]}"
    said = re.findall(r"node (\d) on node\d has waited (\d+) s for (.*)", runs[1 - late].text())
    assert [(node, text.startswith(words)) for node, _, text in said] == [(str(1 - late), True)], runs[1 - late].text()
    assert 10 <= int(said[0][1]) <= 15
    assert "has waited" not in runs[late].text()
    check_equal(expected, tmp_path / "run")


@pytest.mark.skipif(moved_clock.COMPILER is None, reason="no compiler for another clock")
@pytest.mark.parametrize("ahead", [-60, 60])
def test_a_node_whose_clock_is_a_minute_off(on_one_node, tiny, tmp_path, ahead):
    """A run and a resume have the same numbers; the newest checkpoint is that of the latest step, whatever its time."""
    expected = on_one_node("hf")
    saves = ("--save_every", "1", "--keep_checkpoints", "9")
    (tmp_path / "clock").write_text(str(ahead))
    other = f"export LD_PRELOAD={moved_clock.build(tmp_path)} CLOCK_FILE={tmp_path / 'clock'} && date +%s"
    with Nodes() as nodes:
        for part in ("from scratch", "resumed"):
            begun = time.time()
            runs = nodes.launch(tiny, [tmp_path, tmp_path], tmp_path, *STEPS, *saves, on_node_1=other)
            ends(runs, 300)
            assert [run.end(10) for run in runs] == [0, 0], "\n".join(run.text() for run in runs)
            assert abs(int(runs[1].text().split()[0]) - begun - ahead) < 20, "node 1 has the clock of node 0"
            assert ("resuming after step 2" in runs[0].text()) == (part == "resumed"), runs[0].text()
            check_equal(expected, tmp_path / "run")
            if part == "from scratch":
                go_back(tmp_path / "run", 2)
                older = tmp_path / "run" / "checkpoints" / "step_000001"
                for path in (*older.rglob("*"), older):
                    os.utime(path, (begun + 90, begun + 90))


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


def make_classifier(tiny: Path, folder: Path, seed: int) -> Path:
    """A reward model with random weights by ``seed``, as large as the tiny model."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(seed)
    config = LlamaConfig.from_pretrained(tiny, num_labels=1, architectures=["LlamaForSequenceClassification"])
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def parts(what: str, tiny: Path, place: Path) -> tuple[Path, Path, tuple[str, ...], str]:
    """Return a part of a run, another version of it, the arguments that name it, and what the ranks call it."""
    part, other = (place / name for name in ("part", "other"))
    if what == "code":
        other.write_text((ROOT / "utils.py").read_text() + "# edited on one node\n")
        return ROOT / "utils.py", other, (), "file utils.py"
    if what == "data":  # one row of the same length
        rows = PROBLEMS.read_text()
        part.with_suffix(".jsonl").write_text(rows)
        other.write_text(rows.replace("5 + 2 =", "2 + 5 =", 1))
        assert other.read_text() != rows
        return part.with_suffix(".jsonl"), other, ("--dataset", f"{part}.jsonl"), "digest of --dataset"
    if what == "reward model":
        flag = "--reward_model_name_or_path"
        return make_classifier(tiny, part, 1), make_classifier(tiny, other, 2), (flag, str(part)), f"digest of {flag}"
    for folder in (part, other):
        shutil.copytree(tiny, folder)
    weights = {name: weight * 1.5 for name, weight in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    return part, other, ("--model_name_or_path", str(part)), "digest of --model_name_or_path"


@pytest.mark.parametrize("what", ["code", "data", "model", "reward model"])
def test_a_part_that_is_another_on_each_disk(tiny, tmp_path, what):
    """Under one path: without a comparison node 1 would train on other rows, or against another reference."""
    part, other, words, name = parts(what, tiny, tmp_path)
    with Nodes() as nodes:
        mount = f"mount --bind {other} {part}"
        runs = nodes.launch(tiny, [tmp_path] * 2, tmp_path, *STEPS, *words, on_node_1=mount)
        ends(runs, 120)
        assert [run.end(10) for run in runs] == [2, 2], "\n".join(run.text() for run in runs)
    for run in runs:
        assert f"the ranks of this launch differ: {name} is" in run.text(), run.text()
        assert "start all ranks with the same command, code, packages, models and data" in run.text()


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

"""Two nodes for real: namespaces of the network, joined by a link that is slow, that loses packets.

tests/runs/test_faults.py cuts it, and has nodes that are not alike.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from helpers import command, finish, record
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
            out = tmp_path_factory.mktemp(rollout)
            finish(command(tiny, out, *STEPS, ranks=2, rollout=rollout), out / "log", 300)
            records[rollout] = record(out / "run")
        return records[rollout]

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

"""--vllm_engines for real, the last ranks of a launch only sampling: equal numbers, and how ranks end.

tests/runs/test_faults.py kills either side.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import two_nodes
from helpers import LONG, ONE_ENGINE, RAISES, Run, command, finish, logged, record, saved, with_program
from two_nodes import Nodes, ends

pytestmark = pytest.mark.slow
STEPS = ("--total_steps", "3", "--num_mini_batches", "2", "--beta", "0.1")


@pytest.fixture(scope="module")
def in_thread(tiny, tmp_path_factory):
    """The record of a run whose engine is a thread next to its trainer, by further arguments."""
    records = {}

    def make(*more: str, script: str = "grpo") -> dict:
        if (script, more) not in records:
            out = tmp_path_factory.mktemp("thread")
            finish(command(tiny, out, *STEPS, *more, script=script, rollout="vllm"), out / "log", 300)
            records[script, more] = record(out / "run")
        return records[script, more]

    return make


def check_equal(expected: dict, folder: Path) -> None:
    got = record(folder)
    for key in expected:
        assert got[key] == expected[key], key


EQUAL = [("grpo", ()), ("grpo", ("--zero_stage", "3")), ("grpo", ("--async_steps", "1"))]
EQUAL += [("ppo", ("--async_steps", "1", "--kl_placement", "both"))]


@pytest.mark.parametrize("script, more", EQUAL, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_equal_to_an_engine_in_a_thread(in_thread, tiny, tmp_path, script, more):
    """Every metric but seconds, every sample and the weights of a run of one trainer, whichever way it samples."""
    expected = in_thread(*more, script=script)
    line = command(tiny, tmp_path, *STEPS, *more, *ONE_ENGINE, script=script, ranks=2, rollout="vllm")
    text = finish(line, tmp_path / "log", 300)
    assert "1 rank(s)" in text and "1 engine(s) on ranks of their own" in text
    check_equal(expected, tmp_path / "run")


def test_in_flight(tiny, tmp_path):
    """Engines that never stand still: no sample is lost, none is older than --async_steps, fresh tokens are right."""
    more = ["--total_steps", "4", "--async_steps", "2", "--inflight_updates", "recompute"]
    line = command(tiny, tmp_path, *more, *ONE_ENGINE, ranks=2, rollout="vllm")
    finish(line, tmp_path / "log", 300)
    metrics = record(tmp_path / "run")["metrics"]
    assert len(metrics) == 4
    assert all(m["sampler/staleness_max"] <= 2 for m in metrics)
    assert all(m.get("sampler/logprob_diff_mean", 0.0) < 1e-4 for m in metrics)


def test_an_engine_that_raises_ends_all_ranks_with_its_traceback(tiny, tmp_path):
    line = command(tiny, tmp_path, *STEPS, *ONE_ENGINE, ranks=2, rollout="vllm")
    run = Run(with_program(line, tmp_path, RAISES), tmp_path / "log")
    assert run.end(240) not in (0, 75)
    assert "ValueError: the engine broke on purpose" in run.text(), run.text()


@pytest.mark.parametrize("trainers, engines", [(2, 1), (1, 2)])
def test_other_numbers_of_trainers_and_engines(in_thread, tiny, tmp_path, trainers, engines):
    """Every sample is still drawn once, from its own seed, whichever engine draws it."""
    expected = in_thread()
    shape = ["--vllm_engines", str(engines)]
    line = command(tiny, tmp_path, *STEPS, *shape, ranks=trainers + engines, rollout="vllm")
    finish(line, tmp_path / "log", 400)
    got = record(tmp_path / "run")
    assert [s["response"] for s in got["samples"]] == [s["response"] for s in expected["samples"]]
    for ours, theirs in zip(got["metrics"], expected["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.skipif(bool(two_nodes.reason_for_none()), reason=two_nodes.reason_for_none() or "there are nodes")
def test_an_engine_on_a_node_of_its_own(in_thread, tiny, tmp_path):
    """Node 0 trains, node 1 samples: the numbers of one process."""
    expected = in_thread()
    with Nodes() as pair:
        runs = pair.launch(tiny, [tmp_path, tmp_path], tmp_path, *STEPS, *ONE_ENGINE, rollout="vllm")
        ends(runs, 300)
        assert [run.end(10) for run in runs] == [0, 0], "\n".join(run.text() for run in runs)
    check_equal(expected, tmp_path / "run")


def sampling(tiny: Path, out: Path) -> Run:
    """A long run of one trainer and one engine that has done two steps."""
    run = Run(command(tiny, out, *LONG, *ONE_ENGINE, ranks=2, rollout="vllm"), out / "log")
    run.until(lambda: logged(out) >= 2, 240)
    return run


STOPS = """
from runtime.system import process
process.prepare_environment()
import os, signal
import tyro
import grpo
from runtime.engine import engine_ranks

if __name__ == "__main__":  # the reward workers import this file
    plain, calls = engine_ranks.received, []

    def stops(group, entries):
        for entry in plain(group, entries):
            calls.append(1)
            if len(calls) == 80:
                os.kill(os.getpid(), signal.SIGSTOP)
            yield entry

    engine_ranks.received = stops
    args = tyro.cli(grpo.Args)
    grpo.main(args, grpo.preflight(args))
"""


def test_an_engine_that_is_stopped_and_killed_in_a_broadcast(tiny, tmp_path):
    """A push of 21 tensors, the fourth of which stands still in its middle: the trainer waits in it, and learns why."""
    line = command(tiny, tmp_path, *LONG, *ONE_ENGINE, ranks=2, rollout="vllm")
    run = Run(with_program(line, tmp_path, STOPS), tmp_path / "log")
    run.until(lambda: logged(tmp_path) >= 2, 240)
    children = [pid for pid in run.seen if stands_still(pid)]
    run.until(lambda: children or children.extend(filter(stands_still, run.seen)), 60)
    time.sleep(2)
    assert run.process.poll() is None, run.text()
    os.kill(children[0], signal.SIGKILL)
    assert run.end(15) not in (0, 75)
    assert "rank 0 failed: rank 1 (engine 0) is gone without a word" in run.text(), run.text()


def stands_still(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except OSError:
        return False


def test_a_signal_saves_and_ends_with_75(tiny, tmp_path):
    """The engine leaves the answer to the trainer, and both end in good order."""
    run = sampling(tiny, tmp_path)
    for pid in run.ranks():
        os.kill(pid, signal.SIGTERM)
    assert run.end(40) == 75, run.text()
    assert saved(tmp_path) == logged(tmp_path) >= 2
    assert " gone" not in run.text(), run.text()

"""Real processes that are killed, signalled, stalled, started twice: nothing is lost, hangs or is left over."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    LONG,
    ROOT,
    VERIFIERS,
    Run,
    alive,
    command,
    finish,
    forked,
    heed_interrupts,
    logged,
    record,
    run_environment,
    run_here,
    saved,
    tiny_args,
    with_program,
)

import utils
from runtime.system import process, watchdog

CASES = [("grpo", 1, "hf"), ("grpo", 2, "hf"), ("ppo", 1, "hf"), ("ppo", 2, "hf")]
CASES += [("grpo", 1, "vllm"), ("ppo", 2, "vllm")]


FORKS = """
import multiprocessing, os, sys, time
from runtime.system import process

def child(place):
    open(place, "w").write(str(os.getpid()))
    time.sleep(600)

process.listen_for_signals()
process = multiprocessing.get_context("fork").Process(target=child, args=(sys.argv[1],))
process.start()
process.join()
print("the child ended by", process.exitcode, flush=True)
time.sleep(600)
"""


def test_what_a_library_forks(tmp_path):
    """The pool of `datasets`: a signal to a worker is not one to the run, and no worker outlives it."""
    (tmp_path / "forks.py").write_text(FORKS)
    for killed in ("child", "parent"):
        place = tmp_path / killed
        run = Run([sys.executable, str(tmp_path / "forks.py"), str(place)], tmp_path / f"{killed}.log")
        run.until(lambda: place.exists() and place.read_text(), 30)  # noqa: B023
        if killed == "child":
            os.kill(int(place.read_text()), signal.SIGTERM)
            run.until(lambda: "the child ended by -15" in run.text(), 10)  # noqa: B023
            time.sleep(0.5)
            assert run.process.poll() is None and "SIGTERM" not in run.text()
        run.kill()  # and nothing is left over


SPEAKS = r"""
import os, sys, time
from runtime.system import process

process.listen_for_signals()
process.StopRequest.training = True
said = 0
while not process.StopRequest.asked:
    print("step", said, "\u540d\udcff", flush=True)
    print("warning", said, file=sys.stderr, flush=True)
    said += 1
    os.write(int(sys.argv[1]), b".")
    time.sleep(0.02)
sys.exit(75)
"""


@pytest.mark.integration
@pytest.mark.parametrize("reader", ["dies", "sleeps", "has a full disk", "has no such letters", "has gone already"])
def test_the_console_does_not_end_a_run(tmp_path, reader):
    """Ctrl-C on `python grpo.py 2>&1 | tee log` ends tee first; what else a print may meet; the signal is answered."""
    (tmp_path / "speaks.py").write_text(SPEAKS)
    ends, told = os.pipe(), os.pipe()
    if reader == "has gone already":
        os.close(ends[0])
    if reader == "has a full disk":
        os.dup2(os.open("/dev/full", os.O_WRONLY), ends[1])
    if reader == "sleeps":  # and another program has made its pipe non-blocking
        os.set_blocking(ends[1], False)
        while True:
            try:
                os.write(ends[1], b"." * 4096)
            except BlockingIOError:
                break
    environment = run_environment() | ({"PYTHONIOENCODING": "latin-1"} if reader == "has no such letters" else {})
    environment.pop("PYTHONUNBUFFERED")
    line = [sys.executable, str(tmp_path / "speaks.py"), str(told[1])]
    heed_interrupts()
    run = subprocess.Popen(line, stdout=ends[1], stderr=ends[1], pass_fds=[told[1]], env=environment, cwd=ROOT)
    os.close(ends[1])
    os.close(told[1])
    if reader == "sleeps":
        time.sleep(0.5)
        os.set_blocking(ends[0], False)
        assert len(os.read(ends[0], 2**20)) >= 65536, "what had been there before"
        os.set_blocking(ends[0], True)
    os.read(told[0], 1)
    if reader == "dies":
        assert b"step 0" in os.read(ends[0], 2**16)
        os.close(ends[0])
    seen = sum(len(os.read(told[0], 1)) for _ in range(20))
    assert seen == 20 and run.poll() is None, "it goes on"
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 75


def test_a_verifier_that_prints_needs_no_reader():
    """Its score would be that of a verifier that fails."""
    program = "from runtime.system import process; process.live_for_parent(); print('a response', flush=True)"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_what_stood_for_the_console_can_be_put_back():
    """As who redirects what is printed does: the end of this project's streams closes none of the process's own."""
    program = "import sys; from runtime.system import process; process.outlive_the_console(); "
    program += "sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__; "
    program += "print('a response'); print('a warning', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"a response\n", b"a warning\n")


KILLED = """
from runtime.system import process
process.prepare_environment()
import os, signal
import torch
import tyro
import grpo
from runtime.run import logger

if __name__ == "__main__":  # the reward workers import this file
    plain_step, plain, steps = logger.RunLog.step, OWNER.NAME, []

    def step(self, metrics, *rest):
        plain_step(self, metrics, *rest)
        steps.append(metrics["step"])

    def once(*given, **named):
        if steps[-1:] == [2] and not os.path.exists("MARK"):
            open("MARK", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*given, **named)

    logger.RunLog.step, OWNER.NAME = step, once
    args = tyro.cli(grpo.Args)
    grpo.main(args, grpo.preflight(args))
"""
EACH_STEP = ("--total_steps", "4", "--save_every", "1", "--beta", "0.1", "--num_mini_batches", "2")


@pytest.fixture(scope="module")
def undisturbed(tiny, tmp_path_factory) -> dict:
    """The record of a run that nobody kills."""
    out = tmp_path_factory.mktemp("undisturbed")
    finish(command(tiny, out, *EACH_STEP), out / "log")
    return record(out / "run")


@pytest.mark.integration
@pytest.mark.parametrize(
    "owner, name, resumed",
    [("torch", "save", 1), ("os", "replace", 1), ("grpo.Engine", "ask", 2), ("grpo", "token_loss", 2)],
    ids=["a save begins", "a save gets its name", "a batch is asked for", "an update"],
)
def test_killed_anywhere_equals_undisturbed(undisturbed, tiny, tmp_path, owner, name, resumed):
    """kill -9 after the record of step 2 of 4: no saved step is lost, and every number, sample and weight is equal."""
    program = KILLED.replace("OWNER", owner).replace("NAME", name).replace("MARK", str(tmp_path / "mark"))
    line = with_program(command(tiny, tmp_path, *EACH_STEP), tmp_path, program)
    codes, text = forked(line[1:], tmp_path / "first.log")
    assert codes == [-signal.SIGKILL], text
    assert f"resuming after step {resumed}" in finish(line, tmp_path / "second.log")
    assert record(tmp_path / "run") == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("script, ranks, rollout", CASES)
def test_killed_and_resumed_equals_straight(tiny, tmp_path, script, ranks, rollout):
    """kill -9 after the save of step 3 of 6, of one rank: the same numbers, samples and weights at the end."""
    more = ["--total_steps", "6", "--save_every", "3", "--beta", "0.1", "--num_mini_batches", "2"]
    shape = {"script": script, "ranks": ranks, "rollout": rollout}
    finish(command(tiny, tmp_path / "straight", *more, **shape), tmp_path / "straight.log")
    line, parts = command(tiny, tmp_path / "parts", *more, **shape), tmp_path / "parts"
    run = Run(line, tmp_path / "first.log")
    run.until(lambda: saved(parts) == 3)
    os.kill(run.ranks()[-1] if ranks > 1 else run.process.pid, signal.SIGKILL)
    assert run.end(60) != 0 and not (parts / "run" / "model").exists()
    assert ranks == 1 or "ended first, by signal 9 (Killed)" in run.text()
    assert "resuming after step 3" in finish(line, tmp_path / "second.log")
    expected, got = record(tmp_path / "straight" / "run"), record(parts / "run")
    for key in expected:
        assert got[key] == expected[key], key


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "one rank", "terminal"])
def test_a_signal_with_two_ranks(tiny, tmp_path, whom):
    """All ranks stop after the same step, and the launcher keeps the code; a terminal's Ctrl-C ends `| tee` before."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    run = Run(command(tiny, tmp_path, *LONG, ranks=2), tmp_path / "pipe")
    run.log = tmp_path / "log"  # of nothing, for the messages of this test: the run speaks to the pipe
    run.log.touch()
    run.until(lambda: logged(tmp_path) >= 2)
    assert b"step 1/" in os.read(reader, 2**16)
    if whom == "terminal":
        os.close(reader)
        os.killpg(run.process.pid, signal.SIGINT)
    else:
        os.kill(run.process.pid if whom == "launcher" else run.ranks()[1], signal.SIGTERM)
    assert run.end(60) == 75
    assert saved(tmp_path) == logged(tmp_path) >= 2


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tiny, tmp_path):
    """In the second step, whose two samples take 5 seconds each to verify."""
    few = ["--num_unique_prompts_rollout", "1", "--num_samples_per_prompt_rollout", "2"]
    run = Run(command(tiny, tmp_path, *LONG, *few, "--verifier", f"{VERIFIERS}:slow"), tmp_path / "log")
    run.until(lambda: logged(tmp_path) >= 1, 200)
    os.kill(run.process.pid, signal.SIGTERM)
    run.until(lambda: "saving after this step" in run.text(), 10)
    time.sleep(1.5)
    begun = time.monotonic()
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end(10) == 128 + signal.SIGTERM and time.monotonic() - begun < 3 + 10
    assert "again: ending now" in run.text()


@pytest.mark.slow
def test_a_signal_before_anything_is_loaded(tiny, tmp_path):
    run = Run(command(tiny, tmp_path, *LONG), tmp_path / "log")
    run.until(lambda: (tmp_path / "run").exists())  # it is about to import torch
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end(60) == 75 and "nothing to save" in run.text(), run.text()


@pytest.mark.slow
@pytest.mark.parametrize("ranks, victim, rollout", [(1, "rank", "vllm"), (2, "rank", "hf"), (2, "launcher", "vllm")])
def test_no_orphans(tiny, tmp_path, ranks, victim, rollout):
    """kill -9 in the middle of a verification that never ends: no process, and the folder can be used again."""
    hangs = ["--verifier", f"{VERIFIERS}:hangs_on_a_response", "--call_timeout", "600"]
    run = Run(command(tiny, tmp_path, *LONG, *hangs, ranks=ranks, rollout=rollout), tmp_path / "log")
    run.until(lambda: (tmp_path / "run" / "config.json").exists())
    time.sleep(3)
    run.until(lambda: len(run.seen) >= 2 * ranks)
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in (run.process.pid, *run.seen) if alive(pid))
    shared = {line.split()[-1] for line in maps.splitlines() if line.split()[-1].startswith("/dev/shm/")}
    os.kill(run.process.pid if ranks == 1 or victim == "launcher" else run.ranks()[0], signal.SIGKILL)
    assert run.end(40) != 0
    assert not process.lock_holder(tmp_path / "run")
    assert not [path for path in shared if Path(path).exists()], "shared memory is left over"


SAVES = "saving after this step and its evaluation"


@pytest.mark.integration
@pytest.mark.parametrize(
    "signal_at, total, steps, words",
    [(1, 3, 1, SAVES), (5, 3, 2, SAVES), (5, 2, 2, "ending after the last evaluation")],
    ids=["the first one", "one between steps", "the last one"],
)
def test_a_signal_in_an_evaluation(tiny, tmp_path, monkeypatch, capfd, signal_at, total, steps, words):
    """The evaluation ends, the step after it is saved (75), or the run is finished (0)."""
    plain, calls = utils.gather_samples, []

    def gather(samples):
        calls.append(1)
        if len(calls) == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        return plain(samples)

    monkeypatch.setattr(utils, "gather_samples", gather)
    args = tiny_args(tiny, tmp_path, total_steps=total, eval_every=1, eval_prompts=4, run_name="run")
    finished = steps == total
    with contextlib.nullcontext() if finished else pytest.raises(SystemExit, match="75"):
        run_here(args)
    assert f"SIGTERM: {words}" in "".join(capfd.readouterr())
    assert logged(tmp_path) == steps
    assert saved(tmp_path) == (0 if finished else steps)
    assert (tmp_path / "run" / "model").exists() == finished


@pytest.mark.integration
def test_progress_of_any_rank_counts(monkeypatch, capfd):
    """One rank alone, by the store: no end while another beats; soon after all have stopped, its stacks and the end."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(watchdog, "board", lambda *_: store)
    ends: list[str] = []
    watch = watchdog.Watch(1.0)
    monkeypatch.setattr(watch, "abort", lambda text: (ends.append(text), watch.ended.set()))
    watch.heartbeat()
    for _ in range(8):  # another rank, for two seconds
        time.sleep(0.25)
        store.add("beats", 1)
    assert not ends
    watch.ended.wait(4)
    watch.close()
    assert ends and "no progress on any rank for" in ends[0]
    assert "in test_progress_of_any_rank_counts" in capfd.readouterr().err


def test_nothing_asks_the_board_after_the_end(monkeypatch):
    """A call over a slow link may take a while; a thread inside of it would abort a process that ends."""

    class SlowBoard:
        asked = 0

        def set(self, *_): ...

        def add(self, *_):
            return 0

        def check(self, _):
            self.asked += 1
            time.sleep(1.0)
            return False

    board = SlowBoard()
    monkeypatch.setattr(watchdog, "board", lambda *_: board)
    watch = watchdog.Watch(0)
    while not board.asked:
        time.sleep(0.01)
    watch.close()
    assert not watch.looking.is_alive()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("message", "failure", "lives", "error", "words"),
    [
        (None, b"rank 1 failed: no memory", True, RuntimeError, "another rank failed: rank 1 failed: no memory"),
        (None, None, False, RuntimeError, "ended without a message while an answer was due"),
        (None, None, True, TimeoutError, "no an answer within --timeout 0.1 s"),
        (("error", OSError("a broken engine")), None, True, RuntimeError, "the rollout thread failed"),
        (("sample", 7), None, True, None, ""),
    ],
)
def test_what_a_rank_that_waits_for_its_engine_hears(message, failure, lives, error, words):
    """The message, or why there will be none: another rank's reason goes before its own."""
    store = SimpleNamespace(check=lambda keys: failure is not None, get=lambda key: failure)
    watch = SimpleNamespace(store=store, heartbeat=lambda: None)
    outbox = queue.Queue()
    if message is not None:
        outbox.put(message)
    engine = SimpleNamespace(is_alive=lambda: lives)
    if error is None:
        assert watchdog.Watch.receive(watch, outbox, engine, 0.1, "an answer") == message
        return
    with pytest.raises(error, match=words):
        watchdog.Watch.receive(watch, outbox, engine, 0.1, "an answer")


def test_a_rank_that_leaves_says_why(monkeypatch, capfd):
    """os._exit writes out nothing that is still in a buffer."""
    codes = []
    monkeypatch.setattr(watchdog.os, "_exit", lambda code: codes.append((code, capfd.readouterr().err)))
    watchdog.Watch._leave("rank 1 failed: no answer")
    assert codes == [(1, "rank 1 failed: no answer\n")]


def test_a_rank_waits_for_an_engine_that_is_slow():
    """A message that comes after the first look is received, too, and the rank counts as alive until then."""
    beats, outbox = [], queue.Queue()
    watch = SimpleNamespace(store=SimpleNamespace(check=lambda keys: False), heartbeat=lambda: beats.append(1))
    threading.Timer(0.7, outbox.put, (("sample", 7),)).start()
    engine = SimpleNamespace(is_alive=lambda: True)
    assert watchdog.Watch.receive(watch, outbox, engine, 20, "an answer") == ("sample", 7)
    assert len(beats) == 2


@pytest.mark.parametrize("lost", [False, True])
def test_a_rank_has_five_seconds_to_notice_a_failure_by_itself(monkeypatch, capsys, lost):
    """It may come out of its collective with a reason of its own; then its watchdog ends it, and says why."""

    class End(BaseException):
        pass

    class Clock:
        seconds = 0.0

        def wait(self, seconds):
            self.seconds += seconds
            return False

        def is_set(self):
            return False

    def check(keys):
        if lost:
            raise RuntimeError("connection reset")
        return keys == ["failure"]

    def leave(code):
        raise End(code)

    clock = Clock()
    failure = b"rank 1 failed:\nTraceback\nValueError: why"
    store = SimpleNamespace(check=check, get=lambda key: failure, add=lambda *_: 0)
    watch = SimpleNamespace(store=store, ended=clock, name="rank 0", count=1, limit=0, _neighbor_is_gone=lambda: False)
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(End, match="1"):
        watchdog.Watch._look(watch)
    first = 0.5  # when the failure was seen
    assert clock.seconds == first + 5.0
    why = "the launcher or rank 0 is gone (connection reset)" if lost else "rank 1 failed: ValueError: why"
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("several", [False, True])
def test_a_rank_that_is_gone_may_be_on_a_node_that_cannot_be_reached(monkeypatch, several):
    """With several nodes the message names the network; on one machine the rank was killed."""
    monkeypatch.setattr(watchdog, "several_nodes", lambda: several)
    watch = SimpleNamespace(_next_rank=lambda: "rank 1")
    why = "killed, no memory, or its node cannot be reached?" if several else "killed, no memory?"
    assert watchdog.Watch._loss(watch) == f"rank 1 is gone without a word ({why})"

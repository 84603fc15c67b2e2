"""Verifiers, and the pool: whatever a verification does, the parent learns of it in time and goes on."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import numpy as np
import plot
import psutil
import pytest
from helpers import ROOT, VERIFIERS, folder_of, go_back, make_samples, read_jsonl, run_here, tiny_args

import ppo
import rewards
from graders.code import code_tests, sandbox
from grpo import Args
from rewards import Reward, RewardPool, combine, find_verifier, last_number, parse_weights
from runtime.data.samples import Problem
from runtime.run import directory, logger, verdict
from runtime.run.run_files import control_of
from runtime.system import process, verifier_pool, workers

MINE = ROOT / "tests" / "verifiers.py"


# (response, truth, right?)
def test_find_verifier(tmp_path):
    assert find_verifier("last_number") is last_number and {"last_number", "exact", "math", "code"} <= set(
        rewards.VERIFIERS
    )
    assert find_verifier(f"{MINE}:parity")("abc", "", {}).score == 1.0
    (tmp_path / "mine.txt").write_text(OWN_FILE)
    for name, words in {
        f"{tmp_path}/mine.txt:same": ["must have the extension .py"],
        "maths": ["'maths'", "last_number", "file.py:function"],
        "nothing.py:score": ["no file 'nothing.py'", "'score'"],
        f"{tmp_path}:score": ["no file"],
        f"{MINE}:nothing": ["no function 'nothing'"],
        f"{MINE}:": ["no function ''"],
        "": ["no verifier ''"],
    }.items():
        with pytest.raises(ValueError) as error:
            find_verifier(name)
        for word in words:
            assert word in str(error.value)


OWN_FILE = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Answer:
    text: str

def same(response, ground_truth, row):
    return float(Answer(response) == Answer(ground_truth))
"""


@pytest.mark.parametrize("name", ["mine", "json"])
def test_a_verifier_of_a_file_of_ones_own(tmp_path, name):
    """The file may be called like a module of Python, and hold what looks itself up: dataclasses do."""
    file = tmp_path / f"{name}.py"
    file.write_text(OWN_FILE)
    assert find_verifier(f"{file}:same")("4", "4", {}) == 1.0
    assert sys.modules["json"] is json
    file.write_text("an edit is for the next run")
    assert find_verifier(f"{file}:same")("4", "4", {}) == 1.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def same(", "SyntaxError"),
        ("import sys\nsys.exit(0)", "SystemExit: 0"),
    ],
)
def test_a_file_that_does_not_load(tmp_path, text, words):
    """One that is a program ends at its exit(), and is rejected like the others."""
    file = tmp_path / "broken.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"does not load: {words}"):
        find_verifier(f"{file}:same")
    assert str(file) not in sys.modules


# --------------------------------------------------------------------------------------------------------------- pool


@pytest.fixture(scope="module")
def pool():
    """Two workers that have started, with a limit of a second and a half for each verification."""
    pool = RewardPool(2, 1.5)
    for future in [pool.pool.schedule(find_verifier, args=["exact"]) for _ in range(4)]:
        future.result(timeout=60)
    yield pool
    pool.close()


def verify(pool: RewardPool, name: str, response: str = "x", truth: str = "x") -> Reward:
    return pool.result(pool.submit(name, response, truth, {"row": [1, 2]}))


def works(pool: RewardPool) -> bool:
    futures = [pool.submit("last_number", f"= {i}", "3", {}) for i in range(6)]
    return [pool.result(f).score for f in futures] == [0, 0, 0, 1, 0, 0]


def test_pool_returns_in_the_order_of_the_questions(pool):
    assert works(pool)
    assert verify(pool, f"{MINE}:parity", "abc") == Reward(1.0, {"correct": 1.0})


@pytest.mark.integration
def test_pool_kills_what_hangs(pool):
    start = time.perf_counter()
    hanging = pool.submit(f"{MINE}:hangs", "x", "x", {})
    meanwhile = verify(pool, "exact")
    assert meanwhile.score == 1.0 and time.perf_counter() - start < 1.4, "the other worker goes on"
    wait([hanging], timeout=10)
    assert hanging.done(), "not killed"
    assert pool.result(hanging) == Reward(0.0, status="timeout")
    assert 1.4 < time.perf_counter() - start < 1.5 + 2
    assert works(pool)


def test_pool_outlives_a_worker(pool):
    assert verify(pool, f"{MINE}:dies") == Reward(0.0, status="crash")
    assert works(pool)
    assert [verify(pool, f"{MINE}:dies").status for _ in range(3)] == ["crash"] * 3  # more than there are workers
    assert works(pool)


def test_signals_to_all_processes_leave_the_workers_alone(pool):
    """A scheduler's or a console's: the run answers them, and needs its verifiers until it has."""
    assert works(pool)
    workers = psutil.Process(pool.nursery.process.pid).children()
    for worker, number in itertools.product(workers, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
        worker.send_signal(number)
    time.sleep(0.1)
    assert works(pool)
    assert psutil.Process(pool.nursery.process.pid).children() == workers


@pytest.mark.integration
def test_pool_starts_again():
    """A worker that dies before pebble read that it took a task breaks the pool; the samples under way are not lost."""
    pool = RewardPool(1, 20.0)
    futures = [pool.submit("exact", "x", truth, {}) for truth in ("x", "y", "x")]
    pool.pool._pool_manager.handle_broken_pool(BrokenProcessPool("All workers expired"))
    assert [pool.result(f).score for f in futures] == [1.0, 0.0, 1.0] and works(pool)
    pool.close()


def test_a_pool_that_is_closed_while_it_starts_leaves_nothing(monkeypatch):
    """A run that is rejected after its pool was made: neither the thread that starts it goes on, nor a process."""
    plain = RewardPool._open

    def late(self):
        self.nursery.spawned.set()
        time.sleep(0.2)
        plain(self)

    monkeypatch.setattr(RewardPool, "_open", late)
    pool = RewardPool(1, 20.0)
    pool.close()
    assert not pool.starting.is_alive() and not pool.nursery.process.is_alive()


@pytest.mark.integration
def test_pool_outlives_its_nursery():
    """The out-of-memory killer may take any process: its workers end with it, and all start again."""
    pool = RewardPool(2, 20.0)
    assert works(pool)
    workers = psutil.Process(pool.nursery.process.pid).children()
    assert len(workers) == 2
    pool.nursery.process.kill()
    assert psutil.wait_procs(workers, timeout=5)[1] == []
    assert works(pool)
    pool.close()


def test_a_worker_that_outlives_its_nursery_is_killed():
    """A response may have undone the signal by which it would end with it; what it has started ends, too."""
    code = "import subprocess, time; subprocess.Popen(['sleep', '60'], start_new_session=True); print(flush=True); "
    left = subprocess.Popen(
        [sys.executable, "-c", code + "time.sleep(60)"], stdout=subprocess.PIPE, start_new_session=True
    )
    left.stdout.readline()
    (below,) = psutil.Process(left.pid).children()

    def ask(word, pid):
        raise EOFError

    worker = workers.Worker(SimpleNamespace(ask=ask))
    worker.pid, worker.descriptor = left.pid, os.pidfd_open(left.pid)
    assert worker.exitcode is None
    worker.terminate()
    assert worker.exitcode == -signal.SIGKILL == left.wait(timeout=5)
    assert psutil.wait_procs([below], timeout=5)[1] == []


@pytest.mark.parametrize("verifier", ["exact", "code", "reasoning_gym"])
def test_what_a_verifier_needs_is_there_before_its_first_sample(monkeypatch, verifier):
    """And what the others would need is not."""
    expected = {"exact": [], "code": ["graders.code", "graders.code", "code"]}
    expected["reasoning_gym"] = ["graders.reasoning_gym_tasks", "graders.math.extraction", "reasoning_gym"]
    for name in expected[verifier]:
        importlib.import_module(name)  # what it imports itself is not of interest
    started = []
    monkeypatch.setattr(sandbox, "namespaces_refused", lambda: started.append("code"))
    monkeypatch.setattr(process, "live_for_parent", lambda: None)
    monkeypatch.setattr(sandbox, "allow_unsafe", False)
    monkeypatch.setattr("resource.setrlimit", lambda *a: None)
    monkeypatch.setattr(sys, "set_int_max_str_digits", lambda digits: None)
    monkeypatch.setattr("importlib.import_module", lambda name: started.append(name) or sys.modules.get(name))
    verifier_pool.prepare_workers(rewards._verify, [verifier])
    verifier_pool.start_worker([verifier], unsafe=True)
    assert started == expected[verifier]
    assert sandbox.allow_unsafe == (verifier == "code"), "--allow_unsafe_code_exec reaches the process that runs code"


@pytest.mark.integration
def test_workers_draw_random_numbers_of_their_own():
    """Forks have the generators of the one process: nothing that it imports may have made NumPy's."""
    pool = RewardPool(2, 20.0, ("math", "reasoning_gym"))
    futures = [pool.submit(f"{MINE}:draws", "x", "x", {}) for _ in range(6)]
    drawn = [tuple(pool.result(future).parts.values()) for future in futures]
    pool.close()
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(drawn)


def test_a_verifier_that_raises_on_a_response_costs_that_sample(pool, capsys):
    """Score 0, counted as unscorable, the first traceback shown; whatever the response, the run continues."""
    pool.shown.clear()
    reward = verify(pool, f"{MINE}:picky", "odd")
    assert (reward.score, reward.status) == (0.0, "unscorable")
    said = capsys.readouterr().out
    for word in ("first unscorable of a verification", "KeyError", "verifiers.py", "in picky", "'odd'"):
        assert word in said
    assert verify(pool, f"{MINE}:picky", "good").score == 1.0
    assert works(pool)


def test_a_verifier_that_raises_on_everything_ends_the_run(pool):
    name = f"{MINE}:raises"
    for _ in range(verifier_pool.MANY - 1):
        assert verify(pool, name).status == "unscorable"
    with pytest.raises(RuntimeError) as error:
        verify(pool, name)
    for word in ("raised on each of the first 16", "ZeroDivisionError", "the verifier's own mistake", "in raises"):
        assert word in str(error.value)
    assert works(pool)


def test_a_verifier_that_takes_the_truth_alone_ends_the_run(pool):
    """Real rewards pass on "7" and fail on prose: that one try at the start must not save them."""
    name = f"{MINE}:takes_the_truth_alone"
    assert pool.check([problem(name)]) == ""
    for status in ("unscorable", "crash") * (verifier_pool.MANY // 2 - 1):
        assert verify(pool, name, status).status == status
    verify(pool, name, "unscorable")
    with pytest.raises(RuntimeError, match="raised on each of the first 16"):
        verify(pool, name, "crash")


def test_a_verifier_that_ever_returned_never_ends_the_run(pool):
    assert verify(pool, f"{MINE}:picky", "good").score == 1.0
    found = [verify(pool, f"{MINE}:picky", "odd").status for _ in range(verifier_pool.MANY + 2)]
    assert set(found) == {"unscorable"}


def test_a_verifier_of_this_project_never_ends_the_run(pool):
    """Its bug is a bug here, but the night is the user's."""
    futures = [pool.submit("countdown", "<answer>1</answer>", "no target", {}) for _ in range(verifier_pool.MANY + 2)]
    assert {pool.result(future).status for future in futures} == {"unscorable"}


RETURNED = {  # score and parts
    "number": (0.5, {}),
    "boolean": (1.0, {}),
    "whole": (1.0, {}),
    "numpy number": (0.25, {}),
    "numpy boolean": (1.0, {}),
    "numpy reward": (0.25, {"correct": 0.0}),
    "unpicklable": (1.0, {}),  # an object of a user's file cannot be pickled, or runs code of theirs in the run
}


@pytest.mark.parametrize("response", RETURNED)
def test_a_verifier_may_return_a_number_or_a_reward(pool, response):
    """Plain values arrive, which can be written as JSON; a number says nothing of right or wrong beyond itself."""
    reward = verify(pool, f"{MINE}:returns", response)
    assert json.dumps([reward.score, reward.parts]) == json.dumps(RETURNED[response])
    assert (reward.status, reward.extracted) == ("ok", "7" if response == "unpicklable" else "")
    assert works(pool)


@pytest.mark.parametrize(
    ("response", "words"),
    [
        ("text", "returned str, not a number"),
        ("nan", "the score nan"),
        ("part nan", "parts {'correct': nan}"),
        ("status", "status 'great'"),
    ],
)
def test_what_is_no_score_costs_that_sample(pool, response, words):
    reward = verify(pool, f"{MINE}:returns", response)
    assert (reward.score, reward.status) == (0.0, "unscorable") and words in reward.detail
    assert works(pool)


def test_what_cannot_be_sent_costs_that_sample(pool):
    future = pool.submit("exact", "x", "x", {"row": threading.Lock()})
    assert pool.result(future) == Reward(0.0, status="crash")
    assert works(pool)


@pytest.mark.parametrize("response", ["exit()", "quit()", "import sys; sys.exit(0)", "import sys; sys.exit(1)"])
def test_a_response_that_ends_the_program_costs_that_sample(pool, response):
    """SystemExit is no Exception; raised here it would end the run, and exit code 0 calls it finished."""
    reward = verify(pool, f"{MINE}:runs_the_response", response)
    assert (reward.score, reward.status) == (0.0, "unscorable") and "SystemExit" in reward.detail
    assert works(pool)


@pytest.mark.parametrize(
    "kind", ["SystemExit", "KeyboardInterrupt", "GeneratorExit", "asyncio.CancelledError", "Outcome", "BaseException"]
)
def test_no_exception_of_a_verifier_leaves_its_process(pool, kind):
    reward = verify(pool, f"{MINE}:raises_by_name", kind)
    assert (reward.score, reward.status) == (0.0, "unscorable") and kind.rpartition(".")[2] in reward.detail
    assert works(pool)


def test_an_interruption_of_the_run_itself_is_not_a_bad_truth(monkeypatch):
    """Ctrl-C while the rows are checked, which is done here and not in a worker."""

    def interrupted(response, truth, row):
        raise KeyboardInterrupt

    monkeypatch.setitem(rewards.VERIFIERS, "exact", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rewards.truth_error("exact", "7", {})


# ----------------------------------------------------------------------------- what verifiers start, and what is edited


def left_of(mark: str) -> list[int]:
    """The processes with this in their command line."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]


def gone(mark: str, seconds: float = 5) -> bool:
    until = time.monotonic() + seconds
    while left_of(mark) and time.monotonic() < until:
        time.sleep(0.05)
    return not left_of(mark)


def test_a_verifier_may_compute_in_processes():
    """Its functions and classes pickle, though its file was loaded under a name that no import means."""
    pool = RewardPool(1, 20.0)
    assert verify(pool, f"{MINE}:computes_in_processes").score == 1.0
    pool.close()


def test_a_verifier_may_import_what_lies_beside_its_file(tmp_path):
    (tmp_path / "beside_it.py").write_text("SCORE = 0.5\n")
    (tmp_path / "mine.py").write_text("def score(*_):\n    import beside_it\n    return beside_it.SCORE\n")
    pool = RewardPool(1, 20.0)
    assert verify(pool, f"{tmp_path}/mine.py:score").score == 0.5
    pool.close()


def test_a_fork_of_a_verifier_does_not_answer_for_it():
    """A response that is executed may fork; the child would go on as a second worker, on the same pipes."""
    pool = RewardPool(1, 20.0)
    assert verify(pool, f"{MINE}:forks").score == 1.0
    assert verify(pool, f"{MINE}:dies").status == "crash", "the time-out of another process that took the sample"
    pool.close()


def test_no_alarm_is_left_of_a_verification():
    """Nor one of ours: by default an alarm ends the process that it strikes."""
    name = f"{MINE}:leaves_an_alarm"
    handler = signal.getsignal(signal.SIGALRM)
    try:
        reward, raised = rewards._verify([name], {}, {}, "", "", {})
        left = signal.getitimer(signal.ITIMER_REAL)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert (reward.score, raised, left) == (1.0, set(), (0.0, 0.0))


STARTED = {"child": 1000.25, "a session": 1000.5, "orphan": 1000.75, "daemon": 1000.875}
END = {"hangs": "timeout", "dies": "crash", "": "ok"}


@pytest.mark.integration
def test_what_a_verifier_started_ends_with_it():
    """A compiler, a prover, a browser: at the time-out, when the verifier dies, and at the latest with the pool."""
    pool = RewardPool(len(STARTED), 1.0)
    try:
        for end, status in END.items():
            marks = {kind: f"{STARTED[kind] + sum(map(ord, end)) / 1e6 + os.getpid()}" for kind in STARTED}
            futures = [pool.submit(f"{MINE}:starts_a_process", end, marks[kind], {"kind": kind}) for kind in STARTED]
            assert [pool.result(future).status for future in futures] == [status] * len(STARTED)
            for kind, mark in marks.items():
                if end == "":
                    assert left_of(mark), f"the test's own process was not there: {kind}"
                else:
                    assert gone(mark), (kind, end)
    finally:
        pool.close()
    assert [kind for kind, mark in marks.items() if not gone(mark)] == []
    assert not pool.nursery.process.is_alive(), "the process that forks the workers"


@pytest.mark.integration
def test_what_one_verifier_started_outlives_the_end_of_another():
    """A daemon that a worker started is not taken for what a dead one left."""
    mark = f"{2000.25 + os.getpid()}"
    pool = RewardPool(2, 3.0)
    futures = [
        pool.submit(f"{MINE}:{name}", "", mark, {"kind": "daemon"}) for name in ("starts_a_process", "dies_late")
    ]
    assert [pool.result(future).status for future in futures] == ["ok", "crash"]
    assert works(pool) and left_of(mark)
    pool.close()
    assert gone(mark)


def test_a_verifier_can_end_what_it_started(pool):
    """Workers do not answer SIGTERM, but a program that they start must."""
    assert verify(pool, f"{MINE}:terminates_a_process").score == 1.0


KILLED = """
import os, signal, sys, time
import rewards

if __name__ == "__main__":
    pool = rewards.RewardPool(4, 60.0)
    for word in sys.argv[2:]:
        mark, kind = word.split(":")
        pool.submit(sys.argv[1] + ":starts_a_process", "hangs", mark, {"kind": kind})
    time.sleep(60)
"""


@pytest.mark.integration
def test_what_a_verifier_started_ends_with_a_run_that_is_killed(tmp_path):
    """By SIGKILL, which the run cannot answer: the nursery sees it."""
    marks = {kind: f"{number + 0.1 + os.getpid()}" for kind, number in STARTED.items()}
    (tmp_path / "run.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "run.py"), str(MINE), *(f"{mark}:{kind}" for kind, mark in marks.items())]
    run = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    until = time.monotonic() + 60
    while not all(map(left_of, marks.values())) and time.monotonic() < until:
        time.sleep(0.05)
    assert all(map(left_of, marks.values()))
    processes = psutil.Process(run.pid).children(recursive=True)
    assert len(processes) >= 5
    run.kill()
    run.wait()
    assert [kind for kind, mark in marks.items() if not gone(mark)] == []
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []


LEFT_OPEN = """
import rewards

if __name__ == "__main__":
    pool = rewards.RewardPool(1, 60.0)
    print(pool.result(pool.submit("exact", "x", "x", {})).score)
"""


def test_a_pool_that_is_not_closed_does_not_keep_its_program(tmp_path):
    """Its processes answer no SIGTERM, by which Python would end them before it waits for them."""
    (tmp_path / "run.py").write_text(LEFT_OPEN)
    command = [sys.executable, str(tmp_path / "run.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=30)
    assert (done.returncode, done.stdout) == (0, "1.0\n"), done.stderr


EDITED = """
import sys, time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import rewards

if __name__ == "__main__":
    project, own = Path(sys.argv[1]), Path(sys.argv[2])
    found = []
    pool = rewards.RewardPool(1, 1.0)

    def score():
        futures = [pool.submit(name, "7", "7", {}) for name in (f"{own}:same", "exact")]
        found.extend(pool.result(future).score for future in futures)

    score()
    rewards.code("f = lambda: 1", '[{"input": [], "output": 1}]', {"entry_point": "f"})
    own.write_text("def same(response, truth, row): return -1.0")
    (project / "rewards.py").write_text((project / "rewards.py").read_text().replace("Reward(correct,", "Reward(0.25,"))
    (project / "graders" / "code" / "sandbox.py").write_text("not Python")
    score()
    pool.result(pool.submit(f"{own}:hangs", "x", "x", {}))
    score()
    own.write_text("def same(respo")
    pool.result(pool.submit(f"{own}:hangs", "x", "x", {}))
    score()
    print(found)
    print(rewards.code("f = lambda: 1", '[{"input": [], "output": 1}]', {"entry_point": "f"}).score)
    pool.pool._pool_manager.handle_broken_pool(BrokenProcessPool("as if all workers had been killed"))
    try:
        score()
    except RuntimeError as error:
        print(error)
    pool.close()
"""


@pytest.mark.integration
def test_an_edit_is_for_the_next_run(tmp_path):
    """Of the user's file, of rewards.py and of the sandbox: no sample is scored by it, whatever became of workers.

    Where all of them must start again, a run with other code than it began with ends.
    """
    for name in ("rewards.py", "graders", "runtime"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "run.py").write_text(EDITED)
    own = tmp_path / "own.py"
    own.write_text(OWN_FILE + "\ndef hangs(*asked):\n    import time\n    time.sleep(60)\n")
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path), str(own)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    scores, code, *refused = done.stdout.strip().splitlines()[-3:]
    assert scores == str([1.0] * 8), done.stdout
    assert code == "1.0" or sandbox.namespaces_refused()
    assert refused and "sandbox.py, rewards.py has changed since this run began" in refused[0], done.stdout


def problem(verifier: str) -> Problem:
    return Problem([], "7", verifier, {"row": 1})


@pytest.mark.integration
def test_own_verifiers_are_tried_at_the_start(pool):
    """On the first problem's truth, by the workers: what is wrong is said before anything is sampled."""
    wrong = pool.check([problem("exact"), problem(f"{MINE}:parity"), problem(f"{MINE}:raises")])
    for word in ("verifiers.py:raises", "raises on the truth '7'", "the verifier's own mistake"):
        assert word in wrong
    pool.returned.discard(f"{MINE}:parity")
    assert pool.check([problem("exact"), problem(f"{MINE}:parity")]) == ""
    assert f"{MINE}:parity" not in pool.returned, "it may fail on prose"
    assert "hangs fails on the truth '7':\nkilled after" in pool.check([problem(f"{MINE}:hangs")])
    assert works(pool)


def test_a_run_does_not_start_with_a_verifier_that_raises(refused):
    args = Args(call_timeout=20.0)
    assert f"--verifier: the verifier {MINE}:raises raises" in refused(
        rewards.Verifiers, args, [problem(f"{MINE}:raises")], "cpu", None
    )


def test_pool_serves_threads(pool):
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(works(pool))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [True] * 3


def test_close_does_not_wait():
    pool = RewardPool(1, 60.0)
    pool.pool.schedule(find_verifier, args=["exact"]).result(timeout=60)
    pool.submit(f"{MINE}:hangs", "x", "x", {})
    time.sleep(0.3)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(timeout=5)
    late = closing.is_alive()
    pool.pool.stop()  # else a failure would leave the worker asleep, and this process waiting for it
    assert not late


def test_pool_limits_memory(pool):
    """A response that makes a verifier take all there is costs one sample; the worker may go on or die."""
    reward = verify(pool, f"{MINE}:takes_memory")
    assert (reward.score, reward.status) == (0.0, "crash") and "MemoryError" in reward.detail
    assert works(pool)


@pytest.mark.integration
def test_first_of_each_kind_is_shown_once(pool, capsys):
    pool.shown.clear()
    for _ in range(2):
        for name in (f"{MINE}:takes_memory", f"{MINE}:dies", "reasoning_gym"):
            verify(pool, name, response="what it said")
    for hanging in [pool.submit(f"{MINE}:hangs", "what it said", "x", {}) for _ in range(2)]:
        pool.result(hanging)
    said = capsys.readouterr().out
    assert [said.count(f"first {kind}") for kind in ("crash", "unscorable", "timeout")] == [1, 1, 1]
    for words in ("MemoryError", "in takes_memory", "names no source_dataset", "--call_timeout", "'what it said'"):
        assert words in said


# ------------------------------------------------------------------------------------------- several verifiers, shaping


def test_parse_weights():
    assert parse_weights(("math=1", "a/b.py:f=-0.5", "format=gate")) == {"math": 1, "a/b.py:f": -0.5, "format": None}
    for wrong in ("math", "math=", "math=much", "math=nan", "math=inf"):
        with pytest.raises(ValueError, match="NAME=NUMBER"):
            parse_weights((wrong,))


def test_combine():
    right, wrong = Reward(1.0, {"correct": 1.0, "format": 1.0}, extracted="7"), Reward(0.0, {"correct": 0.0})
    good, bad = Reward(1.0, {"format": 1.0}), Reward(0.0, {"format": 0.0})
    assert combine({"math": right, "format": bad}, {"format": 0.25}).score == 1.0
    assert combine({"math": wrong, "format": good}, {"format": 0.25}).score == 0.25
    assert combine({"math": right, "format": good}, {"math": 2.0}).score == 3.0
    assert combine({"math": right, "format": bad}, {"format": None}).score == 0.0
    gated = combine({"math": right, "format": good}, {"format": None})
    assert gated.score == 1.0 and gated.parts == {"math": 1, "format": 1.0, "correct": 1.0, "gate": 1.0}
    assert gated.extracted == "7" and right == Reward(1.0, right.parts, extracted="7.0"), "it is for people to read"
    assert combine({"math": right}, {}).parts == right.parts, "one verifier alone gives no part of its own name"
    lost = combine({"math": right, "ifeval": Reward(0.0, status="unscorable", detail="why")}, {})
    assert (lost.status, lost.detail, lost.score) == ("unscorable", "why", 1.0)


def test_pool_combines():
    pool = RewardPool(1, 20.0, weights={"format": None, "last_number": 2.0})
    good, bad = "<think>so</think><answer>7</answer>", "7"
    futures = [pool.submit("last_number,format", r, "7", {}) for r in (good, bad)]
    futures.append(pool.submit("last_number", bad, "7", {}))
    assert [pool.result(f).score for f in futures] == [2.0, 0.0, 2.0]
    pool.close()


def test_a_solution_is_a_program():
    """A comment, prose and an empty column are none, whatever comes before the program; the first column counts."""
    tests = code_tests.CodeTests("f", 1.0, before="x = 1\n")
    for text in ("# see the video", "Add both numbers.", " ", "", None):
        assert code_tests._own_solution({"solution": text}, code_tests.CodeTests("f", 1.0)) == ("", "")
    assert code_tests._own_solution({"solution": " "}, tests) == ("", "")
    row = {"code": "f = 2", "solution": "```python\nf = 1\n```"}
    assert code_tests._own_solution(row, tests) == ("solution", "f = 1\n")


def test_programs_are_found_in_linear_time():
    start = time.perf_counter()
    for text in ("~~~", "`", "```\n", "<answer>", " ", "~ `", "```\n" + " " * 50, "``` x", "</answer><answer>"):
        code_tests.program_in(text * (200_000 // len(text)))
    assert time.perf_counter() - start < 5


def test_overlong_penalty():
    """DAPO, equation 13, with 100 tokens and a buffer of 20."""
    lengths = {80: 0.0, 81: 0.05, 85: 0.25, 90: 0.5, 100: 1.0, 120: 1.0, 0: 0.0}
    assert {n: pytest.approx(rewards.overlong_penalty(n, 100, 20)) for n in lengths} == lengths
    assert rewards.overlong_penalty(100, 100, 0) == 0.0


def test_shape_penalties():
    sample = make_samples(1, 2)[0]
    sample.finish_reason, sample.response_ids = "stop", [1] * 30
    found = Reward(1.0, {"correct": 1.0}, extracted="7", status="timeout")
    args = Args(max_response_length=32, overlong_buffer=4)
    rewards.shape_reward(sample, found, args)
    assert sample.reward == pytest.approx(1 - 0.5) and (sample.score, sample.extracted) == (1.0, "7")
    assert sample.reward_status == "timeout"
    rewards.shape_reward(sample, found, Args())
    assert sample.reward == 1.0


def test_a_truth_on_which_a_verifier_raises_is_refused_at_the_start(monkeypatch):
    """Whatever it raises: here an error that no list of expected ones would have had."""

    def broken(response, truth, row):
        raise AssertionError("no such truth")

    monkeypatch.setitem(rewards.VERIFIERS, "exact", broken)
    assert "AssertionError: no such truth" in rewards.truth_error("exact", "7", {})


# ------------------------------------------------------------------------------------------------------------ controls


def controlled(control: str, samples: list, **changes) -> list:
    """Return samples of two problems with the answers 1 and 2, rewarded by last_number under a --reward_control."""
    args = Args(reward_control=control, **changes)
    problems = [Problem([], truth, "last_number", {}) for truth in ("1", "2")]
    verifiers = rewards.Verifiers(args, problems, "cpu", None)
    try:
        submitted = [verifiers.submit(sample, problems[sample.prompt_id]) for sample in samples]
        return verifiers.collect(submitted, lambda: None)
    finally:
        verifiers.close()


def responses(texts: list[str]) -> list:
    """A sample of each text, half of them to each of two prompts."""
    samples = make_samples(2, len(texts) // 2)
    for place, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        sample.response, sample.finish_reason = text, "stop"
        sample.response_ids = np.array([7, 8 + place], dtype=np.int32)
    return samples


SAID = ["1", "2", "none", "2", "1", "none"]
TRUE = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "control, given",
    [
        ("none", TRUE),
        ("format", [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]),
        ("shuffled", [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]),
        ("inverted", [-1.0, 0.0, 0.0, -1.0, 0.0, 0.0]),
    ],
)
def test_controls_replace_the_reward_and_nothing_else(control, given):
    """Score and parts stay the verifier's, and with them every evaluation; the new reward is a part of its own."""
    samples = controlled(control, responses(SAID))
    assert [sample.reward for sample in samples] == given
    assert [sample.score for sample in samples] == [sample.reward_parts["correct"] for sample in samples] == TRUE
    known = [sample.reward_parts.get(f"control_{control}") for sample in samples]
    assert known == ([None] * 6 if control == "none" else given)


def test_a_control_leaves_no_reward_of_a_turn():
    sample = responses(SAID)[0]
    sample.reward_steps = ((1, 0.5),)
    rewards._replace_reward(sample, 0.25, Args(reward_control="random"))
    assert (sample.reward, sample.reward_steps, sample.reward_parts["control_random"]) == (0.25, (), 0.25)


def test_controls_are_shaped_as_the_reward_is():
    samples = controlled("format", responses(SAID), reward_bias=0.5, reward_scaling=2.0)
    assert [sample.reward for sample in samples] == [1.0, 1.0, -1.0, 1.0, 1.0, -1.0]


@pytest.mark.integration
def test_the_random_control_says_nothing_of_who_was_right():
    """The rewards of the batch, shuffled: the same each time, and over many batches right ones have no more of them.

    By the true reward the difference is 1. In 400 batches of 24 its standard error is 0.01.
    """
    found = [sample.reward for sample in controlled("random", responses(SAID))]
    assert sorted(found) == sorted(TRUE)
    assert found == [sample.reward for sample in controlled("random", responses(SAID))]
    rng = np.random.default_rng(0)
    right, wrong = [], []
    for _ in range(400):
        samples = make_samples(4, 6)
        for sample in samples:
            sample.response_ids = rng.integers(0, 1000, size=5, dtype=np.int32)
            sample.reward = sample.score = float(rng.random() < 0.3)
        mean = sum(sample.reward for sample in samples) / len(samples)
        rewards.deal_out(samples, Args(reward_control="random"))
        for sample in samples:
            (right if sample.score else wrong).append(sample.reward - mean)
    assert abs(np.mean(right) - np.mean(wrong)) < 0.04


def test_the_random_control_is_the_same_on_any_number_of_ranks():
    """The rewards of all ranks are gathered before they are permuted."""
    samples = responses(SAID)
    args = Args(reward_control="random")
    problems = [Problem([], truth, "last_number", {}) for truth in ("1", "2")]
    verifiers = rewards.Verifiers(args, problems, "cpu", None)
    try:
        submitted = [verifiers.submit(sample, problems[sample.prompt_id]) for sample in samples]
        rest = verifiers.collect(submitted[3:], lambda: None, lambda mine: [])
        assert rest == []
        both = verifiers.collect(submitted[:3], lambda: None, lambda mine: [*mine, *samples[3:]])
    finally:
        verifiers.close()
    assert [sample.reward for sample in both] == [s.reward for s in controlled("random", responses(SAID))]


def test_another_truth_is_that_of_another_problem_by_chance():
    """Each problem has one and gives one away; how often both are equal is as for two problems drawn at random."""
    truths = [str(number % 4) for number in range(400)]
    problems = [Problem([], truth, "last_number", {}) for truth in truths]
    others = rewards.other_problems(problems, seed=1)
    given = [others[id(problem)] for problem in problems]
    assert {id(other) for other in given} == {id(problem) for problem in problems}
    assert all(other is not problem for other, problem in zip(given, problems, strict=True))
    equal = sum(other.truth == problem.truth for other, problem in zip(given, problems, strict=True))
    assert abs(equal / 400 - 0.25) < 0.09  # four standard errors
    mixed = [*problems[:9], *(Problem([], str(k), "exact", {}) for k in range(9))]
    by_verifier = rewards.other_problems(mixed, seed=1)
    assert all(by_verifier[id(problem)].verifier == problem.verifier for problem in mixed)


@pytest.mark.parametrize(
    "changes, says",
    [
        (
            {"reward_control": "random", "dataset_filter": (0.1, 1.0)},
            "--dataset_filter chooses problems by the verifier's",
        ),
        ({"reward_control": "inverted", "dense_reward": "sum"}, "--dense_reward has scores of its own"),
        (
            {"reward_control": "shuffled", "reward_model_name_or_path": "x"},
            "--reward_model_name_or_path scores without a",
        ),
        ({"reward_control": "shuffled", "environment": "x"}, "--environment rewards without a truth"),
        (
            {"reward_control": "random", "num_unique_prompts_rollout": 1, "num_samples_per_prompt_rollout": 1},
            "one sample a step would get its own reward",
        ),
    ],
)
def test_a_control_that_would_leak_the_reward_is_refused(refused, changes, says):
    args = ppo.Args(**changes)
    check = rewards.check_control if "environment" in changes else rewards.check_reward_args  # which loads it first
    assert f"--reward_control {changes['reward_control']}: {says}" in refused(check, args)
    rewards.check_control(ppo.Args(**changes | {"reward_control": "none"}))


def test_a_control_that_cannot_be_is_refused(refused):
    one = [Problem([], "1", "last_number", {}) for _ in range(2)]
    assert "all truths of --verifier last_number are equal" in refused(rewards.other_problems, one, seed=1)
    assert "--reward_control format: --verifier exact reports no part format" in refused(
        rewards.Verifiers, Args(reward_control="format"), [Problem([], "1", "exact", {})], "cpu", None
    )


def test_whoever_reads_a_run_is_told_of_its_control():
    """Its name, however long or short, its console, its metrics, its verdict, and what plot and report print."""
    for more in ({}, {"system_prompt": "x" * 300}):
        name = directory.run_name(Args(reward_control="shuffled", **more), Args())
        assert name.startswith("grpo__reward_control=shuffled__") and name.endswith("seed=1")
    step = {"step": 1, "reward/mean": 0.5, "optim/skipped": 0, "completions/truncated_frac": 0.0}
    marked = step | {"reward/control_random": 0.5}
    assert logger.step_line(marked, 2, 0.0, True).endswith("CONTROL random")
    assert "CONTROL" not in logger.step_line(step, 2, 0.0, True)
    for metrics, said in ((marked, True), (step, False)):
        assert ("CONTROL  random" in plot.summary([metrics | {"time/step": 1.0}], [])) == said
        found = {"outcome": "learned", "why": "", "control": control_of(metrics), "evaluation": None, "findings": []}
        assert ("CONTROL    random" in verdict.in_words(found)) == said


def test_a_dry_run_tries_the_users_verifier(tmp_path, capsys):
    """Its scores of the truth and of no text are printed; one that raises, or takes other arguments, ends it."""
    file = tmp_path / "own.py"
    file.write_text(
        "def good(response, truth, row):\n    return float(truth in response)\n"
        "def bad(response, truth, row):\n    return {}[response]\n"
        "def other(completions, **kwargs):\n    return [0.0]\n"
    )
    problem = Problem([], "146", f"{file}:good", {})
    rewards.try_own_verifiers(Args(), [problem])
    assert "own.py:good: 1 for the ground truth '146', 0 for an empty response" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        rewards.try_own_verifiers(Args(), [Problem([], "146", f"{file}:bad", {})])
    assert "raises on the truth '146'" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"write def other\(response, truth, row\)"):
        rewards.find_verifier(f"{file}:other")


def test_a_verifier_knows_the_step_that_trains_on_the_response(tiny, tmp_path):
    """Ahead of training, in further rounds of a step, and in a resumed run; evaluations have the last step."""
    schedule = {"verifier": f"{VERIFIERS}:scheduled", "total_steps": 4, "async_steps": 1, "save_every": 2}
    args = tiny_args(tiny, tmp_path, **schedule, dynamic_sampling_rounds=1, eval_prompts=2, eval_every=2)
    metrics = run_here(args)
    assert [m["reward/mean"] for m in metrics] == [m["data/reward_mean"] for m in metrics] == [0.25, 0.5, 0.75, 1.0]
    folder = folder_of(args)
    assert [m["eval/reward_mean"] for m in read_jsonl(folder / "eval.jsonl")] == [1.0, 1.0, 1.0]
    go_back(folder, 2)
    assert [m["reward/mean"] for m in run_here(args)] == [0.25, 0.5, 0.75, 1.0]


def test_a_column_of_the_data_wins_over_the_progress_of_training():
    problem = Problem([{"role": "user", "content": "?"}], "1", "exact", {"step": "a hint"})
    args = Args()
    args.steps = 9
    assert rewards.row_for(problem, args, 3) == {"messages": problem.messages, "step": "a hint", "total_steps": 9}
    assert rewards.row_for(Problem([], "1", "exact", {}), args)["step"] == 9

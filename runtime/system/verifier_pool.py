"""Worker processes for verifiers: each runs one task at a time, and is killed when the task exceeds its time limit."""

from __future__ import annotations

import collections
import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from runtime.system import process, user_files
from runtime.system.redaction import redact
from runtime.system.workers import Nursery, code_of_run

WORKER_MEMORY = 4 * 2**30  # bytes of address space
STARTS = 5  # of the workers, before a run gives up
# What verifiers load by name. The nursery loads it before it forks, so an edit during a run reaches no worker.
LOADED = {
    "math": ("graders.math:judge",),
    "code": ("graders.code:judge",),
    "ifeval": ("graders.ifeval:judge",),
    "countdown": ("graders.math.extraction:final_answer",),
    "reasoning_gym": ("graders.reasoning_gym_tasks:score_of", "graders.math.extraction:final_answer"),
}
MANY = 16  # responses on each of which a verifier of the user's own must have raised before the run ends


def names_of(verifier: str) -> list[str]:
    """Return the verifiers of a row: one name, or several with commas between."""
    return [name.strip() for name in verifier.split(",")]


def prepare_workers(verify: Callable, verifiers: list[str]) -> None:
    """Import in the nursery what takes long, so that no worker does it again, and no sample's time pays for it.

    The module of ``verify`` was imported when this call arrived here.
    """
    for verifier in verifiers:
        for name in LOADED.get(verifier, ()):
            user_files.find(name)
    if "math" in verifiers:
        user_files.find("graders.math:prepare")()
    if "reasoning_gym" in verifiers:
        importlib.import_module("reasoning_gym")


def start_worker(verifiers: list[str], unsafe: bool) -> None:
    """Prepare a new worker: tie its life to the run's, limit its memory, and give it its own sandboxes."""
    import resource

    process.live_for_parent()
    sys.set_int_max_str_digits(0)  # what takes too long is killed; an exception here would be taken for a bug
    if any("code" in names_of(verifier) for verifier in verifiers):
        user_files.find("graders.code:prepare")(unsafe)
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY, WORKER_MEMORY))


class VerifierPool:
    """Worker processes, forks of one that was started by spawn; each calls ``verify`` for one response at a time.

    A subclass sets ``builtin`` (names of the project's own verifiers) and ``weights``, and defines
    ``failed(status, detail)``: the reward of a response that a worker was killed for.
    """

    builtin: frozenset[str]
    weights: dict[str, float | None]
    failed: Callable[[str, str], Any]

    def __init__(self, verify: Callable, workers: int, timeout: float, verifiers: list[str], unsafe: bool):
        self.verify = verify
        self.workers = workers
        self.timeout = timeout
        self.verifiers = verifiers  # will be needed: their libraries are there before the first response
        self.unsafe = unsafe
        self.shown: set[str] = set()  # statuses of which one was printed
        self.returned = set(self.builtin)  # verifiers that are known to return something
        self.raised: collections.Counter[str] = collections.Counter()
        self.lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        from pebble import ProcessPool

        self.nursery = Nursery(code_of_run(), prepare_workers, self.verify, self.verifiers)
        self.pool = ProcessPool(
            max_workers=self.workers,
            context=self.nursery,
            initializer=start_worker,
            initargs=[self.verifiers, self.unsafe],
        )
        self.starting = threading.Thread(target=self._open, daemon=True)
        self.starting.start()  # while the models load
        self.nursery.spawned.wait()

    def _open(self) -> None:
        try:
            self.pool.schedule(len, args=[()])  # the first task makes the pool start its workers
        except Exception:  # whatever it was: ``submit`` meets it again, and says so
            pass
        finally:
            self.nursery.spawned.set()

    def _make_ready(self) -> None:
        """Start again where that is necessary. Raises RuntimeError where it cannot be done."""
        with self.lock:
            for _ in range(STARTS):
                with contextlib.suppress(BrokenProcessPool):
                    if self.pool.active:
                        return
                self.starting.join()
                self.pool.stop()
                self.nursery.close()
                self._start()
        raise RuntimeError("the verifier processes do not start")

    def check(self, problems) -> str:
        """Try each verifier of the user's own once, on the first problem's truth as response; return what is wrong.

        ``problems`` have ``verifier``, ``truth`` and ``row``. "" where nothing is wrong.
        """
        first = {}
        for problem in problems:
            if not self.builtin.issuperset(names_of(problem.verifier)):
                first.setdefault(problem.verifier, problem)
        futures = [self.submit(p.verifier, p.truth, p.truth, p.row) for p in first.values()]
        for future in futures:
            reward, raised = self._wait(future)
            if raised or reward.status in ("timeout", "crash"):
                fails = "raises" if raised else "fails"
                return f"the verifier {future.asked[0]} {fails} on the truth {future.asked[2][:80]!r}:\n{reward.detail}"
        return ""

    def submit(self, verifier: str, response: str, truth: str, row: dict, tries: int = STARTS) -> Future:
        """Start verifying one response; the returned future goes to ``result``."""
        self._make_ready()
        names = names_of(verifier)
        paths = [name.rpartition(":")[0] for name in names if name not in self.builtin]
        texts = {path: user_files.text_of(path) for path in paths if path}
        arguments = [names, texts, self.weights, response, truth, row]
        future = self.pool.schedule(self.verify, args=arguments, timeout=self.timeout)
        future.pool = self.pool
        future.asked = (verifier, response, truth, row)
        future.tries = tries
        return future

    def _wait(self, future: Future) -> tuple[Any, set[str]]:
        """Wait for (Reward, verifiers that raised), whatever became of the worker."""
        from pebble import ProcessExpired

        while not wait([future], timeout=1.0).done and future.pool.active:
            pass  # pebble gives a pool up where a worker dies before it has read that it took a task
        error = future.exception() if future.done() else BrokenProcessPool("given up, and what was queued is forgotten")
        if error is None:
            return future.result()
        if isinstance(error, BrokenProcessPool):
            if future.tries > 1:
                return self._wait(self.submit(*future.asked, tries=future.tries - 1))
            raise RuntimeError("the verifier processes do not start") from error
        if isinstance(error, TimeoutError):
            return self.failed("timeout", f"killed after {self.timeout:g} s (--call_timeout)"), set()
        if isinstance(error, ProcessExpired):
            detail = f"the worker died: {error}, exit code {error.exitcode}"
        else:  # whatever a verifier raises was caught in the worker
            detail = f"what the worker was asked, or its answer, cannot be sent: {error!r}"
        return self.failed("crash", detail), set()

    def result(self, future: Future) -> Any:
        """Wait for one Reward; the first that is not ok is shown.

        Raises RuntimeError where a verifier of the user's own has failed on each of the first ``MANY`` responses: it
        raised, ran out of time, or ended its process. That it took the truth at the start says nothing of prose.
        """
        reward, raised = self._wait(future)
        verifier, response = future.asked[:2]
        names = set(names_of(verifier))
        failed = raised or (names if reward.status in ("timeout", "crash") else raised)
        self.raised.update(failed)
        self.returned |= names - failed
        for name in failed - self.returned:
            if self.raised[name] >= MANY:
                words = (
                    f"the verifier {name!r} {'raised' if raised else 'failed'} on each of the first {MANY} responses"
                )
                raise RuntimeError(f"{words}; the last time:\n{reward.detail}")
        if reward.status not in ("ok", *self.shown):
            self.shown.add(reward.status)
            about = f"{verifier} on {response[:200]!r}"
            print(redact(f"warning: first {reward.status} of a verification: {about}\n{reward.detail}"), flush=True)
        return reward

    def close(self) -> None:
        """Kill the workers, whatever they are doing; a sandbox dies with the worker that started it."""
        self.starting.join()
        self.pool.stop()
        self.pool.join()
        self.nursery.close()

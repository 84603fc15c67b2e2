"""Worker processes for verifiers: each runs one task at a time, and is killed when the task exceeds its time limit."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

from runtime.grading.algebra import parse_math
from runtime.system import process, sandbox
from runtime.system.workers import Nursery, code_of_run

WORKER_MEMORY = 4 * 2**30  # bytes of address space
STARTS = 5  # of the workers, before a run gives up


class Failure(NamedTuple):
    """A task without a result: status "timeout" or "crash", and what happened."""

    status: str
    detail: str


def prepare_workers(function: Callable, verifiers: list[str]) -> None:
    """In the nursery: import what takes long, so that no worker does it again, and no sample's time pays for it.

    The module of ``function`` was imported when this call arrived here.
    """
    if "math" in verifiers:
        parse_math("1")
    if "reasoning_gym" in verifiers:
        importlib.import_module("reasoning_gym")


def start_worker(verifiers: list[str], unsafe: bool) -> None:
    """In a new worker: tie its life to the run's, limit its memory, and give it its own sandboxes."""
    import resource

    process.live_for_parent()
    sandbox.allow_unsafe = unsafe
    sys.set_int_max_str_digits(0)  # what takes too long is killed; an exception here would be taken for a bug
    if "code" in verifiers:
        sandbox.namespaces_refused()  # starts the server of this worker's sandboxes
    resource.setrlimit(resource.RLIMIT_AS, (WORKER_MEMORY, WORKER_MEMORY))


class WorkerPool:
    """Worker processes, forks of one that was started by spawn; each calls ``function`` for one task at a time.

    ``verifiers`` says which will be needed, so that their libraries are there before the first task.
    """

    def __init__(self, function: Callable, workers: int, timeout: float, verifiers: list[str], unsafe: bool):
        self.function = function
        self.workers = workers
        self.timeout = timeout
        self.verifiers = verifiers
        self.unsafe = unsafe
        self.lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        from pebble import ProcessPool

        self.nursery = Nursery(code_of_run(), prepare_workers, self.function, self.verifiers)
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
        except Exception:  # whatever it was: ``schedule`` meets it again, and says so
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

    def schedule(self, *arguments: Any, tries: int = STARTS) -> Future:
        """Start a task in a worker; the returned future goes to ``outcome``."""
        self._make_ready()
        future = self.pool.schedule(self.function, args=arguments, timeout=self.timeout)
        future.pool = self.pool
        future.arguments = arguments
        future.tries = tries
        return future

    def outcome(self, future: Future) -> Any | Failure:
        """Wait for what a task returned, or for how it failed. Raises RuntimeError where no worker can be started."""
        from pebble import ProcessExpired

        while not wait([future], timeout=1.0).done and future.pool.active:
            pass  # pebble gives a pool up where a worker dies before it has read that it took a task
        error = future.exception() if future.done() else BrokenProcessPool("given up, and what was queued is forgotten")
        if error is None:
            return future.result()
        if isinstance(error, BrokenProcessPool):
            if future.tries > 1:
                return self.outcome(self.schedule(*future.arguments, tries=future.tries - 1))
            raise RuntimeError("the verifier processes do not start") from error
        if isinstance(error, TimeoutError):
            return Failure("timeout", f"killed after {self.timeout:g} s (--call_timeout)")
        if isinstance(error, ProcessExpired):
            return Failure("crash", f"the worker died: {error}, exit code {error.exitcode}")
        # Whatever a verifier raises was caught in the worker.
        return Failure("crash", f"what the worker was asked, or its answer, cannot be sent: {error!r}")

    def close(self) -> None:
        """Kill the workers, whatever they are doing; a sandbox dies with the worker that started it."""
        self.starting.join()
        self.pool.stop()
        self.pool.join()
        self.nursery.close()

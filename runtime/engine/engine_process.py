"""Engine in a process of its own (--engine_process), on its trainer's device and with its own GIL.

    the trainer's process                        a line of messages        the engine's process
    ``EngineProcess.relay`` is the thread      <-------------------->      ``serve`` calls the script's thread
    that the script calls its engine          weights in shared memory     function, which is the same as ever

Weights are never sent: a push copies them into one block of memory that both processes have, on the GPU if they are on
one (CUDA IPC: tried on the fake device of tests alone), else in a file without a name, and hands it over once.

The kernel kills the engine's process when the thread that started it ends, in whatever way.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import math
import mmap
import multiprocessing
import multiprocessing.reduction
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from runtime.system import process, workers
from runtime.system.watchdog import Mailbox, Outbox
from runtime.training.deepspeed_zero import finish_gpu_work

Weights = Iterable[tuple[str, torch.Tensor]]
ALIGNMENT = 64  # bytes: a cache line
DEVICE = 6  # place of the device's number among the arguments of torch's ``rebuild_cuda_tensor``


class Place(NamedTuple):
    """Position of a tensor in the shared block."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int  # bytes

    @property
    def end(self) -> int:
        """Bytes of the block up to its last element."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def lay_out(weights: Weights) -> list[Place]:
    """Assign each tensor a place in the block, one after another. Tied tensors share one place."""
    starts: dict[tuple, int] = {}
    layout: list[Place] = []
    free = 0
    for name, weight in weights:
        key = (weight.data_ptr(), weight.shape)
        place = Place(name, weight.dtype, weight.shape, starts.setdefault(key, free))
        layout.append(place)
        free = max(free, -(-place.end // ALIGNMENT) * ALIGNMENT)
    return layout


def tensors_of(block: torch.Tensor, layout: list[Place]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a layout as views of the block, a tensor of bytes."""
    return [(place.name, block[place.start : place.end].view(place.dtype).view(place.shape)) for place in layout]


def mapped(file: int, size: int) -> torch.Tensor:
    """Map an open file into memory as a tensor of bytes. The file may be closed afterwards."""
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


# --------------------------------------------------------------------------------------------- in the trainer's process


class WeightsSender:
    """The trainer's side of the weights. The block is laid out once, and again only for other tensors."""

    def __init__(self, line: Connection, pid: int):
        self.line = line
        self.pid = pid
        self.laid_out: tuple[list[Place], bool] | None = None  # whether on a GPU
        self.tensors: list[tuple[str, torch.Tensor]] = []

    def give(self, version: int, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Copy the weights into the block and send the message of a push."""
        layout = lay_out(weights)
        first = weights[0][1]
        if self.laid_out == (layout, first.is_cuda):
            self._copy(weights)
            self.line.send(("weights", version, None, None))
            return
        self.laid_out = (layout, first.is_cuda)
        size = max(place.end for place in layout)
        if first.is_cuda:
            block = torch.empty(size, dtype=torch.uint8, device=first.device)
            self.tensors = tensors_of(block, layout)
            self._copy(weights)
            self.line.send(("weights", version, layout, reduce_tensor(block)[1]))
            return
        file = os.memfd_create("weights")
        os.truncate(file, size)
        self.tensors = tensors_of(mapped(file, size), layout)
        self._copy(weights)
        self.line.send(("weights", version, layout, None))
        multiprocessing.reduction.send_handle(self.line, file, self.pid)
        os.close(file)

    def _copy(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        pairs = zip(self.tensors, weights, strict=True)
        once = {shared.data_ptr(): (shared, weight) for (_, shared), (_, weight) in pairs}  # what is tied
        for shared, weight in once.values():
            shared.copy_(weight.detach())
        finish_gpu_work()


class EngineProcess:
    """A trainer's engine. ``relay`` stands where the script's thread does, and answers the same messages.

    ``thread``: the script's function, which the engine's process calls.
    """

    def __init__(self, thread: Callable):
        self.thread = thread
        self.code = workers.loaded_code()  # a process that is started later must run the same

    def relay(self, args, dtype, rank: int, world_size: int, stop_ids: list[int], inbox, outbox) -> None:
        """Start the process and forward messages until the last, or until nobody reads them. Runs in a thread."""
        setting = (args, dtype, rank, world_size, stop_ids)
        try:
            child, line = self._start(setting)
            sender = threading.Thread(target=hand_on, args=(inbox, outbox, line, child.pid), daemon=True)
            sender.start()
            try:
                while not outbox.abandoned:
                    if line.poll(0.5):
                        outbox.put(line.recv())
            except (EOFError, OSError):
                child.join(10)
                if child.exitcode != 0:
                    raise RuntimeError(f"the engine's process {describe_end(child.exitcode)}") from None
            finally:
                child.kill()
                child.join()
                atexit.unregister(child.kill)
                inbox.put(("stop",))
                sender.join()
                line.close()
        except BaseException as error:
            outbox.put(("error", error))

    def _start(self, setting: tuple) -> tuple[BaseProcess, Connection]:
        """Start the engine's process; the line to it. The kernel will end it with the thread that calls this."""
        line, theirs = multiprocessing.Pipe()
        work = (theirs, self.thread, setting, self.code)
        child = multiprocessing.get_context("spawn").Process(target=serve, args=work, daemon=True)
        with process.signals_blocked(), own_gpu_alone():
            child.start()
        atexit.register(child.kill)  # before multiprocessing would wait for it
        theirs.close()
        return child, line


def hand_on(inbox: Mailbox, outbox: Mailbox, line: Connection, pid: int) -> None:
    """Send the messages of the inbox to the engine's process. Runs in a second thread."""
    giver = WeightsSender(line, pid)
    message = ()
    try:
        while message != ("stop",):
            match message := inbox.get():
                case ("weights", version, weights):
                    giver.give(version, weights)
                case _:
                    line.send(message)
    except (BrokenPipeError, ConnectionResetError):  # the process has ended, as the first thread will notice
        return
    except BaseException as error:
        outbox.put(("error", error))


def describe_end(code: int | None) -> str:
    """Describe how a process ended, by its exit code."""
    if code is None:
        return "does not answer any more"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name} (no memory?)"
    return f"ended with exit code {code}; what it printed says why"


@contextlib.contextmanager
def own_gpu_alone() -> Iterator[None]:
    """Run the body with only this rank's GPU visible to the processes it starts: vLLM uses the first that it sees."""
    names = ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")
    before = {name: os.environ[name] for name in names if name in os.environ}
    process.see_one_gpu()
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ |= before


# ---------------------------------------------------------------------------------------------- in the engine's process


class Inbox:
    """Inbox of the script's thread function."""

    def __init__(self, line: Connection):
        self.line = line
        self.tensors: list[tuple[str, torch.Tensor]] = []

    def empty(self) -> bool:
        """Return True if no message is waiting."""
        return not self.line.poll()

    def get(self) -> tuple:
        """Return the next message. Raises EOFError when the trainer's process is gone."""
        match self.line.recv():
            case ("weights", version, layout, handle):
                if handle is not None:  # a block on the GPU, which is the first one here, whatever its number there
                    block = rebuild_cuda_tensor(*handle[:DEVICE], 0, *handle[DEVICE + 1 :])
                    self.tensors = tensors_of(block, layout)
                elif layout is not None:
                    self.tensors = tensors_of(self._receive(max(place.end for place in layout)), layout)
                return ("weights", version, self.tensors)
            case message:
                return message

    def _receive(self, size: int) -> torch.Tensor:
        """Receive the block of weights, whose file handle follows its message."""
        file = multiprocessing.reduction.recv_handle(self.line)
        try:
            return mapped(file, size)
        finally:
            os.close(file)


def serve(line: Connection, thread: Callable, setting: tuple, code: dict[Path, str]) -> None:
    """Run the engine's process from its start to its end.

    ``thread``: the script's function, which builds and steps the engine. ``setting``: its arguments, but for inbox and
    outbox. ``code``: the result of ``workers.loaded_code`` when the run began.
    """
    process.live_for_parent()
    if os.getppid() != multiprocessing.parent_process().pid:  # it ended before this process could ask to end with it
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, process.STOP_SIGNALS)
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    process.prepare_environment()
    multiprocessing.set_start_method("fork", force=True)  # as in the trainer: then its locks leave no names behind
    multiprocessing.current_process()._config["daemon"] = False  # such processes have no children: environments do
    outbox = Outbox(line.send)
    try:
        changed = workers.changed_files(code, workers.loaded_files())
        if changed:
            raise RuntimeError(
                f"{', '.join(changed)} has changed since this run began, and its engine, which must start now, would "
                f"run the new code: restore it, or start the run again"
            )
        args = setting[0]
        if args.external_lib is not None:
            importlib.import_module(args.external_lib)
        thread(*setting, Inbox(line), outbox)
    except BaseException as error:
        outbox.put(("error", error))
    finally:
        sys.stdout.flush()
        os._exit(0)  # an interpreter's shutdown would wait for what an engine leaves behind

"""Watchdog: end all ranks when one fails or stalls, and poll with a timeout wherever a rank waits for its engine."""

from __future__ import annotations

import faulthandler
import functools
import logging
import math
import os
import queue
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch

from runtime.system import library_logs, network
from runtime.system.process import launch_size, rank, refuse, several_nodes
from runtime.system.redaction import redact


def board(host: str, port: int, serve: bool = False, patience: float = 60.0) -> torch.distributed.Store:
    """Connect to the key-value store of a launch, or ``serve`` it where no launcher does. ``patience``: seconds."""
    store = torch.distributed.TCPStore(
        host, port, None, serve, timedelta(seconds=patience), wait_for_workers=False, multi_tenant=serve
    )
    return torch.distributed.PrefixStore("board", store)


def board_of_launch(patience: float = 60.0) -> torch.distributed.Store:
    """Return the ``board`` at the address in the environment; rank 0 serves it if no launcher keeps one."""
    serve = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return board(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), serve, patience)


class EngineFailed(RuntimeError):
    """The engine's thread raised, or ended without a message."""


class Mailbox(queue.Queue):
    """Messages to or from the engine's thread."""

    closed = False  # nobody reads it any more: the run has ended


class Outbox(Mailbox):
    """The outbox of an engine in another process than its trainer: ``send`` sends a message there."""

    def __init__(self, send: Callable[[tuple], None]):
        super().__init__()
        self.send = send

    def put(self, message: tuple) -> None:
        """Send a message; an exception travels as its text."""
        if message[0] == "error":
            message = ("error", RuntimeError("".join(traceback.format_exception(message[1]))))
        self.send(message)


def refuse_engine(error: Exception, engine_args: Iterable[str] = ()) -> None:
    """Exit with code 2, for the reason why an engine failed. Returns if that was memory, of which there may be more.

    ``engine_args``: the names in --vllm_args, which may be the reason.
    """
    cause = error.__cause__ or error
    text = "".join(traceback.format_exception(cause))
    if re.search("OutOfMemory|(No available|Free|not enough|allocate|out of) memory", text):
        return
    record = {"name": "vllm", "levelno": logging.ERROR, "levelname": "ERROR", "msg": f"the engine failed:\n{text}"}
    library_logs.waiting.handle(logging.makeLogRecord(record))  # to libraries.log
    place = ""
    if cause.__traceback__ is not None:
        frame = traceback.extract_tb(cause.__traceback__)[-1]
        place = f" ({frame.filename.split('site-packages/')[-1]}:{frame.lineno})"
    # From an engine in another process comes the text of its traceback.
    reason = re.split(r"\n(?=[\w.]+(?:Error|Exception)\b)", f"{type(cause).__name__}: {cause}")[-1]
    given = [name for name in engine_args if re.search(name.replace("_", "[_ ]"), reason)]
    remedy = f"leave {', '.join(given)} out of --vllm_args" if given else "use --rollout hf"
    refuse(
        f"vLLM failed before its first sample, so it cannot serve this model with these settings: "
        f"{' '.join(reason.split())[:600]}{place}; {remedy}"
    )


class Watch:
    """Aborts all ranks when one fails, stalls or is out of reach. One per process, made before the process group.

    A key-value store is a board that all ranks can read without a collective. A failure is written there, with its
    traceback, and every rank looks there twice a second. A rank inside a collective learns of it by the lost connection
    and reads the reason there, or its watchdog thread ends it. That thread also ends a run whose next rank was killed,
    is on a node that does not answer for ``network.SILENCE`` seconds, or does not come; and a run in which no rank has
    made progress (a message, a forward pass, a phase, a file) for ``timeout`` seconds (0 disables). A rank that
    waits for a slower one is not stalled: progress is counted on the board, for all ranks together; nor is one that
    waits for its engine, which has the same limit of its own. A second thread ends a rank whose board is silent.
    """

    progress: float | None = None  # time of the last progress; None before the first
    current: Watch | None = None  # the one that watches this process

    def __init__(self, timeout: float) -> None:
        self.rank = rank()
        self.count = launch_size()
        self.limit = timeout
        self.ended = threading.Event()
        self.name = f"rank {self.rank}"
        if several_nodes():
            self.name += f" on {socket.gethostname()}"
            network.choose_interface()
        self.host = os.environ["MASTER_ADDR"]
        self.port = int(os.environ["MASTER_PORT"])
        self.store = board_of_launch()
        self.door = network.LivenessPort()
        self.store.set(f"door/{self.rank}", self.door.place)
        self.neighbor: network.Neighbor | None = None  # the next rank, once it has come
        self.unanswered = 0  # half seconds for which the board has not answered
        Watch.progress = None
        Watch.current = self
        self.looking = threading.Thread(target=self._look, daemon=True, name="watchdog")
        self.looking.start()
        threading.Thread(target=self._listen, daemon=True, name="watchdog of the board").start()

    @staticmethod
    def heartbeat() -> None:
        """Note progress."""
        Watch.progress = time.monotonic()

    def close(self) -> None:
        """Stop watching: this rank has come to its end."""
        self.ended.set()
        self.looking.join(5.0)  # a thread that is inside of torch when Python ends aborts the process
        Watch.current = None
        self.door.close()

    def receive(self, outbox: queue.Queue, thread: threading.Thread, timeout: float, what: str) -> tuple:
        """Return the next message of the engine's thread. Polls, so it never blocks on a dead thread or rank.

        Raises EngineFailed if the thread failed (chained to its exception), TimeoutError after ``timeout`` seconds
        without a message, and RuntimeError if another rank failed (with its traceback).
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                message = outbox.get(timeout=0.5)
            except queue.Empty:
                if self.store.check(["failure"]):
                    raise RuntimeError(f"another rank failed: {self.store.get('failure').decode()}") from None
                if not thread.is_alive() and outbox.empty():
                    raise EngineFailed(f"the rollout thread ended without a message while {what} was due") from None
                self.heartbeat()  # this wait has a limit of its own
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no {what} within --timeout {timeout:g} s") from None
                continue
            if message[0] == "error":
                raise EngineFailed("the rollout thread failed") from message[1]
            self.heartbeat()
            return message

    def _look(self) -> None:
        """Look for failures of other ranks, in a thread, twice a second until the end."""
        failures_seen = 0
        neighbor_gone = 0
        counted = None  # this rank's progress, as far as the board has it
        beats = self.store.add("beats", 0)
        begun = time.monotonic()
        heard = math.inf  # when some rank last made progress; no limit before the first
        reason = ""
        while not self.ended.wait(0.5):
            try:
                if self.store.check(["failure"]):
                    failures_seen += 1
                    failure = self.store.get("failure").decode().strip().splitlines()
                    reason = f"{self.name} was waiting for a rank that failed: {failure[0]} {failure[-1]}"
                neighbor_gone = neighbor_gone + 1 if self._neighbor_is_gone() else 0
                moved = Watch.progress != counted
                counted = Watch.progress
                total = self.store.add("beats", int(moved))
                if total != beats:
                    beats = total
                    heard = time.monotonic()
                self.unanswered = 0
            except RuntimeError as error:  # the store lives in the launcher or in rank 0
                failures_seen += 1
                reason = f"{self.name}: the launcher or rank 0 is gone ({error})"
            if failures_seen > 10 and not self.ended.is_set():  # for five seconds this rank has not noticed by itself
                print(reason, file=sys.stderr, flush=True)
                os._exit(1)
            if neighbor_gone > 4 and not self.ended.is_set():  # for two seconds: it could have said why
                self.abort(f"{self.name} failed: {self._loss()}")
            now = time.monotonic()
            limit = f"--timeout {self.limit:g}"
            if self.count > 1 and self.neighbor is None and 0 < self.limit < now - begun:
                self.abort(
                    f"{self.name} failed: {self._next_rank()} did not arrive within {limit} s; see what it printed"
                )
            if 0 < self.limit < now - heard:
                faulthandler.dump_traceback(file=2, all_threads=True)
                self.abort(f"{self.name} failed: no progress on any rank for {now - heard:.0f} s ({limit})")

    def _listen(self) -> None:
        """End this rank, in a thread, when the board does not answer: ``_look`` would wait for it."""
        while not self.ended.wait(0.5):
            self.unanswered += 1
            if self.unanswered > 2 * network.SILENCE and not self.ended.is_set():
                self._leave(
                    f"{self.name} failed: no answer from {self.host}, where the launch began, for {network.SILENCE} s; "
                    f"the connection between the nodes is lost, or that node is down"
                )

    def _next_rank(self) -> str:
        name = f"rank {(self.rank + 1) % self.count}"
        if self.neighbor is not None and several_nodes():
            name += f" on {self.neighbor.host} ({self.neighbor.address})"
        return name

    def _loss(self) -> str:
        how = "killed, no memory, or its node cannot be reached?" if several_nodes() else "killed, no memory?"
        return f"{self._next_rank()} is gone without a word ({how})"

    def _neighbor_is_gone(self) -> bool:
        key = f"door/{(self.rank + 1) % self.count}"
        if self.neighbor is None and self.count > 1 and self.store.check([key]):
            place = self.store.get(key).decode()
            try:
                self.neighbor = network.Neighbor(place)
            except OSError as error:
                print(f"{self.name}: {place}, the place of {self._next_rank()}: {error}", file=sys.stderr, flush=True)
                return True
        return self.neighbor is not None and self.neighbor.is_gone()

    @staticmethod
    def _leave(text: str) -> None:
        """Print the reason and end this process: an interpreter's shutdown would wait for the engine's thread."""
        print(text, file=sys.stderr, flush=True)
        os._exit(1)

    def abort(self, text: str) -> None:
        """Print the reason, let the other ranks print what they saw, and end this process."""
        late = threading.Timer(network.SILENCE, self._leave, (text,))  # the board may be out of reach
        late.daemon = True
        late.start()
        try:
            silent = not self.store.check(["failure"]) and self._loss() not in text
            if silent and self.neighbor is not None and self.neighbor.is_gone(patience=0.5):
                text = f"{text.rstrip()}\n{self._loss()}"
            first = self.store.compare_set("failure", "", text).decode()  # the first failure stands: the others follow
            if first != text and first not in text:
                text = f"{text}\nafter another rank had failed: {first}"
            print(text, file=sys.stderr, flush=True)
            # The board may live in this process, and the launcher kills the others as soon as one has left.
            self.store.add("reported", 1)
            deadline = time.monotonic() + 4.0
            while self.store.add("reported", 0) < self.count and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            late.cancel()
            os._exit(1)


def ends_all_ranks(main: Callable) -> Callable:
    """Decorate a script's ``main``: once a ``Watch`` runs, an exception on one rank ends all of them."""

    @functools.wraps(main)
    def guarded(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except BaseException as error:
            meant = isinstance(error, SystemExit) and error.code not in (0, None)
            if Watch.current is None or meant:  # 0 in the middle of a run is some library's exit()
                raise
            Watch.current.ended.set()
            text = f"{Watch.current.name} failed:\n{redact(''.join(traceback.format_exception(error)))}"
            if "OutOfMemoryError" in text:
                text += "lower --micro_batch_tokens or the gpu_memory_utilization of --vllm_args, or add "
                text += "--gradient_checkpointing; docs/run.md has more"
            Watch.current.abort(text)
            raise
        finally:
            if Watch.current is not None:
                Watch.current.close()

    return guarded

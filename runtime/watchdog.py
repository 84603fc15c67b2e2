"""Watchdog: ends all ranks when one fails or stalls, and polls with a timeout wherever a rank waits for its engine."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch


class EngineFailed(RuntimeError):
    """The engine's thread raised, or ended without a message."""


class Watch:
    """Aborts all ranks when one fails or stalls. One per process; needs the process group.

    torch.distributed's key-value store is a board that all ranks can read without a collective. A failure is written
    there, with its traceback, and every rank looks there twice a second. A rank inside a collective learns of it by the
    lost connection and reads the reason there, or its watchdog thread ends it. That thread also ends a run whose next
    rank on this machine was killed, or in which no rank has made progress (a message, a forward pass, a phase, a file)
    for ``stall_timeout`` seconds (0 disables). A rank that waits for a slower one is not stalled: progress is counted
    on the board, for all ranks together.
    """

    progress: float | None = None  # time of the last progress; None before the first
    current: Watch | None = None  # the one that watches this process

    def __init__(self, stall_timeout: float) -> None:
        self.store = torch.distributed.distributed_c10d._get_default_store()
        self.rank = torch.distributed.get_rank()
        self.limit = stall_timeout
        self.ended = threading.Event()
        local = int(os.environ.get("LOCAL_RANK", "0"))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.neighbor = self.rank - local + (local + 1) % here  # the next rank of this machine: its process is visible
        self.store.set(f"process/{self.rank}", str(os.getpid()))
        Watch.progress = None
        Watch.current = self
        threading.Thread(target=self._look, daemon=True, name="watchdog").start()

    @staticmethod
    def beat() -> None:
        """Note progress."""
        Watch.progress = time.monotonic()

    def close(self) -> None:
        """Stop watching: this rank has come to its end."""
        self.ended.set()
        Watch.current = None
        with contextlib.suppress(RuntimeError):  # the store may have lived in a rank that is gone
            self.store.set(f"process/{self.rank}", "")

    def receive(self, outbox: queue.Queue, thread: threading.Thread, timeout: float, what: str) -> tuple:
        """The next message of the engine's thread. Polls; never blocks on a dead thread or rank.

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
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no {what} within --rollout_timeout {timeout:.0f} s") from None
                continue
            if message[0] == "error":
                raise EngineFailed("the rollout thread failed") from message[1]
            self.beat()
            return message

    def _look(self) -> None:
        """The thread: looks twice a second until the end."""
        failures_seen = 0
        neighbor_gone = 0
        counted = None  # this rank's progress, as far as the board has it
        beats = self.store.add("beats", 0)
        heard = math.inf  # when some rank last made progress; no limit before the first
        while not self.ended.wait(0.5):
            reason = f"rank {self.rank} was waiting for a rank that failed"
            try:
                failures_seen += self.store.check(["failure"])
                neighbor_gone = neighbor_gone + 1 if self._neighbor_is_gone() else 0
                moved = Watch.progress != counted
                counted = Watch.progress
                total = self.store.add("beats", int(moved))
                if total != beats:
                    beats = total
                    heard = time.monotonic()
            except RuntimeError as error:  # the store lives in the launcher or in rank 0
                failures_seen += 1
                reason = f"rank {self.rank}: the launcher or rank 0 is gone ({error})"
            if failures_seen > 10 and not self.ended.is_set():  # for five seconds this rank has not noticed by itself
                print(reason, file=sys.stderr, flush=True)
                os._exit(1)
            if neighbor_gone > 4 and not self.ended.is_set():  # for two seconds: it could have said why
                self.abort(f"rank {self.rank} failed: rank {self.neighbor} is gone without a word (killed, no memory?)")
            idle = time.monotonic() - heard
            if 0 < self.limit < idle:
                faulthandler.dump_traceback(file=2, all_threads=True)
                limit = f"--stall_timeout {self.limit:g}"
                self.abort(f"rank {self.rank} failed: no progress on any rank for {idle:.0f} s ({limit})")

    def _neighbor_is_gone(self) -> bool:
        key = f"process/{self.neighbor}"
        if not self.store.check([key]):
            return False
        pid = self.store.get(key).decode()
        return bool(pid) and not Path(f"/proc/{pid}").exists()

    def abort(self, text: str) -> None:
        """Print the reason, let the other ranks print what they saw, and end this process."""
        try:
            first = self.store.compare_set("failure", "", text).decode()  # the first failure stands: the others follow
            if first != text and first not in text:
                text = f"{text}\nafter another rank had failed: {first}"
            print(text, file=sys.stderr, flush=True)
            # The board may live in this process, and the launcher kills the others as soon as one has left.
            self.store.add("reported", 1)
            deadline = time.monotonic() + 4.0
            while self.store.add("reported", 0) < torch.distributed.get_world_size() and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            os._exit(1)  # no interpreter shutdown: it would wait for the engine's thread


def ends_all_ranks(main: Callable) -> Callable:
    """Decorator of a script's ``main``: once a ``Watch`` stands, an exception on one rank ends all of them."""

    @functools.wraps(main)
    def guarded(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except SystemExit:
            raise
        except BaseException as error:
            if Watch.current is None:
                raise
            Watch.current.ended.set()
            text = f"rank {Watch.current.rank} failed:\n{''.join(traceback.format_exception(error))}"
            if "OutOfMemoryError" in text:
                text += "lower --micro_batch_tokens, --logprob_micro_batch_tokens or --vllm_gpu_memory_utilization, or "
                text += "add --gradient_checkpointing; docs/faq.md has more"
            Watch.current.abort(text)
            raise
        finally:
            if Watch.current is not None:
                Watch.current.close()

    return guarded

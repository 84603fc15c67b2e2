"""Watchdog: ends all ranks when one fails or stalls."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path

import torch


class Watch:
    """Ends every rank when one fails or stands still, and waits for nobody: ``with Watch(...) as watch: ...``.

    torch.distributed's key-value store is a board that all ranks can read without a collective. A failure is written
    there, with its traceback; whoever waits looks there twice a second. A rank inside a collective learns of it by the
    lost connection, and reads there why, or is ended by a thread of its own that looks there, too. That thread also
    ends a run whose next rank on this machine was killed, or that is without any progress (a message, a forward pass,
    a phase, a file) for ``stall_timeout`` seconds.
    """

    progress: float | None = None  # when there was some; None before the first

    def __init__(self, stall_timeout: float) -> None:
        self.store = torch.distributed.distributed_c10d._get_default_store()
        self.rank, self.limit, self.ended = torch.distributed.get_rank(), stall_timeout, threading.Event()
        local, here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.neighbour = self.rank - local + (local + 1) % here  # the next rank of this machine, whose process it sees
        self.store.set(f"process/{self.rank}", str(os.getpid()))

    @staticmethod
    def beat() -> None:
        """There is progress."""
        Watch.progress = time.monotonic()

    def __enter__(self) -> Watch:
        Watch.progress = None
        threading.Thread(target=self._look, daemon=True, name="watchdog").start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        self.ended.set()
        with contextlib.suppress(RuntimeError):  # the store may have lived in a rank that is gone: nobody looks
            self.store.set(f"process/{self.rank}", "")
        if error is not None and not isinstance(error, SystemExit):
            text = f"rank {self.rank} failed:\n{''.join(traceback.format_exception(error))}"
            if "OutOfMemoryError" in text:
                text += "lower --micro_batch_tokens, --logprob_micro_batch_tokens or --vllm_gpu_memory_utilization, or "
                text += "--gradient_checkpointing; docs/faq.md has more"
            self._end(text)

    def _look(self) -> None:
        """The thread: twice a second until the end."""
        seen = gone = 0
        while not self.ended.wait(0.5):
            try:
                seen += self.store.check(["failure"])
                pid = self.store.check([f"process/{self.neighbour}"]) and self.store.get(f"process/{self.neighbour}")
                gone = gone + 1 if pid and not Path(f"/proc/{pid.decode()}").exists() else 0
            except RuntimeError as error:  # the store lives in the launcher or in rank 0
                seen, lost = seen + 1, f"rank {self.rank}: the launcher or rank 0 is gone ({error})"
            else:
                lost = f"rank {self.rank} was waiting for a rank that failed"
            if seen > 10 and not self.ended.is_set():  # five seconds in which this rank did not notice by itself
                print(lost, file=sys.stderr, flush=True)
                os._exit(1)
            if gone > 4 and not self.ended.is_set():  # two seconds: it could have said why
                self._end(f"rank {self.rank} failed: rank {self.neighbour} is gone without a word (killed, no memory?)")
            idle = time.monotonic() - (Watch.progress or math.inf)
            if 0 < self.limit < idle:
                faulthandler.dump_traceback(file=2, all_threads=True)
                self._end(f"rank {self.rank} failed: no progress for {idle:.0f} s (--stall_timeout {self.limit:g})")

    def _end(self, text: str) -> None:
        """Say why, let the others say what they saw, and end this process."""
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

    def receive(self, outbox: queue.Queue, thread: threading.Thread, timeout: float, what: str) -> tuple:
        """The next message of the rollout thread. Never waits for the dead, nor for ever.

        Raises RuntimeError if the thread failed (chained to its exception) or another rank did (with its traceback),
        and TimeoutError after ``timeout`` seconds without a message.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                message = outbox.get(timeout=0.5)
            except queue.Empty:
                if self.store.check(["failure"]):
                    raise RuntimeError(f"another rank failed: {self.store.get('failure').decode()}") from None
                if not thread.is_alive() and outbox.empty():
                    raise RuntimeError(f"the rollout thread ended without a word; {what} was awaited") from None
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no {what} within --rollout_timeout {timeout:.0f} s") from None
                continue
            if message[0] == "error":
                raise RuntimeError("the rollout thread failed") from message[1]
            self.beat()
            return message

"""--engine_process without an engine: how weights change hands, what ends the process, and what is left of it: nothing.

tests/launch/test_engine_ranks.py has whole runs. ``obey`` is imported by the processes: keep the imports of this file
few.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, alive

from runtime.engine import engine_process
from runtime.system import watchdog

ARGS = SimpleNamespace(external_lib=None)


def obey(args, dtype, rank, world_size, stop_ids, inbox, outbox) -> None:
    """Replace the script's thread function: do what a message says."""
    outbox.put(("ready", os.getpid(), rank, world_size, os.environ.get("CUDA_VISIBLE_DEVICES")))
    while True:
        match inbox.get():
            case ("stop",):
                return
            case ("weights", version, weights):
                found = [(name, tensor.dtype, tensor.tolist(), tensor.data_ptr()) for name, tensor in weights]
                outbox.put(("weights", version, found))
            case ("raise",):
                raise ValueError("the engine broke on purpose")
            case ("exit", code):
                os._exit(code)
            case ("sleep",):
                time.sleep(3600)
            case message:
                outbox.put(message)


class Talk:
    """A relay in its thread, and the process it has started."""

    def __init__(self, args=ARGS, **changed):
        self.inbox, self.outbox = watchdog.Mailbox(), watchdog.Mailbox()
        engine = engine_process.EngineProcess(obey)
        vars(engine).update(changed)
        arguments = (args, torch.float32, 1, 2, [0], self.inbox, self.outbox)
        self.thread = threading.Thread(target=engine.relay, args=arguments, daemon=True)
        self.thread.start()
        self.first = self.outbox.get(timeout=120)

    def ask(self, *message):
        self.inbox.put(message)
        return self.outbox.get(timeout=20)

    def ended(self, within: float = 15) -> None:
        """Wait for the end of the relay's thread; its process is gone by then."""
        self.thread.join(within)
        assert not self.thread.is_alive() and not alive(self.first[1])


def left() -> tuple[int, int]:
    """Return the resources a process could leave behind here: open files, threads."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


# ------------------------------------------------------------------------------------------------------------- weights


def test_weights_stand_in_one_block_that_is_laid_out_once():
    """The second push writes where the first one did; other tensors get another block; what is tied stands once."""
    ours, theirs = Pipe()
    giver, inbox = engine_process.WeightsSender(ours, os.getpid()), engine_process.Inbox(theirs)
    one = torch.arange(5.0)
    weights = [("a", one), ("b", torch.ones(2, 3, dtype=torch.bfloat16)), ("tied", one), ("c", torch.tensor(7))]
    giver.give(1, weights)
    kind, version, first = inbox.get()
    assert (kind, version) == ("weights", 1) and [name for name, _ in first] == ["a", "b", "tied", "c"]
    for (_, got), (_, given) in zip(first, weights, strict=True):
        assert got.dtype == given.dtype and torch.equal(got, given) and got.data_ptr() != given.data_ptr()
    places = [tensor.data_ptr() for _, tensor in first]
    assert places[0] == places[2] and len(set(places)) == 3 and all(place % 64 == 0 for place in places)
    one += 10
    assert first[0][1].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0], "a copy, not the trainer's own memory"
    giver.give(2, weights)
    _, version, second = inbox.get()
    assert version == 2 and [tensor.data_ptr() for _, tensor in second] == places
    assert second[0][1].tolist() == second[2][1].tolist() == [10.0, 11.0, 12.0, 13.0, 14.0]
    giver.give(3, [("a", torch.ones(4000))])
    assert inbox.get()[2][0][1].sum() == 4000


def test_blocks_of_other_tensors_leave_no_open_file():
    ours, theirs = Pipe()
    giver, inbox = engine_process.WeightsSender(ours, os.getpid()), engine_process.Inbox(theirs)
    counts = []
    for size in (1000, 2000, 3000, 4000):
        giver.give(size, [("a", torch.ones(size))])
        assert inbox.get()[2][0][1].sum() == size
        counts.append(left()[0])
    assert counts[0] == counts[-1], counts


def test_no_tensor_is_sent(monkeypatch):
    """A megabyte of weights: a message of some hundred bytes, and after the first one of fewer."""
    ours, theirs = Pipe()
    giver = engine_process.WeightsSender(ours, os.getpid())
    sizes = []
    monkeypatch.setattr(ours, "_send_bytes", lambda message: sizes.append(len(message)))
    monkeypatch.setattr(engine_process.multiprocessing.reduction, "send_handle", lambda *rest: None)
    for version in (1, 2):
        giver.give(version, [("a", torch.ones(500, 500))])
    assert sizes[0] < 1000 and sizes[1] < 100
    theirs.close()


class OnGpu(torch.Tensor):
    """A stand-in for a tensor on a GPU."""

    is_cuda = True


def test_on_a_gpu_the_block_is_exported_once(monkeypatch):
    """A stand-in for CUDA: it is opened on the first GPU of the other process, and every copy is finished when told.

    The first push is from CPU memory, as an engine that is built again gets it.
    """
    exported, opened, order = [], [], []
    monkeypatch.setattr(
        engine_process, "reduce_tensor", lambda block: (None, exported.append(block) or tuple(range(15)))
    )
    monkeypatch.setattr(engine_process, "rebuild_cuda_tensor", lambda *given: opened.append(given) or exported[0])
    monkeypatch.setattr(engine_process, "finish_gpu_work", lambda: order.append("finished"))
    ours, theirs = Pipe()
    giver, inbox = engine_process.WeightsSender(ours, os.getpid()), engine_process.Inbox(theirs)
    giver.give(3, [("a", torch.ones(3)), ("b", torch.zeros(2))])
    assert inbox.get()[1] == 3 and order == ["finished"] and not exported
    order.clear()
    plain = ours.send
    monkeypatch.setattr(ours, "send", lambda message: order.append("told") or plain(message))
    weight = torch.ones(3).as_subclass(OnGpu)
    found = []
    for version in (4, 5):
        weight += 1
        giver.give(version, [("a", weight), ("b", torch.zeros(2))])
        found.append([(name, tensor.tolist()) for name, tensor in inbox.get()[2]])
    assert found == [[("a", [2.0] * 3), ("b", [0.0] * 2)], [("a", [3.0] * 3), ("b", [0.0] * 2)]]
    assert opened == [(*range(6), 0, *range(7, 15))] and len(exported) == 1
    assert order == ["finished", "told"] * 2


def test_the_place_of_a_tensors_device_is_the_one_that_is_replaced():
    import inspect

    names = list(inspect.signature(engine_process.rebuild_cuda_tensor).parameters)
    assert names[engine_process.DEVICE] == "storage_device" and len(names) == 15


# --------------------------------------------------------------------------------------------------------- the process


@pytest.mark.integration
def test_a_conversation(monkeypatch):
    """Messages come in order and whole; signals of a run leave the process alone; at its end nothing is left over."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6,7")
    monkeypatch.setenv("LOCAL_RANK", "2")
    Pipe()  # what multiprocessing opens once
    engine_process.multiprocessing.resource_tracker.ensure_running()
    before = left()
    talk = Talk()
    assert talk.first[0] == "ready" and talk.first[1] != os.getpid() and talk.first[2:] == (1, 2, "7")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,6,7" and os.environ["LOCAL_RANK"] == "2"
    for number in range(200):
        talk.inbox.put(("echo", number))
    assert [talk.outbox.get(timeout=20)[1] for _ in range(200)] == list(range(200))
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(talk.first[1], signum)
    weight = torch.ones(3)
    first = talk.ask("weights", 1, [("a", weight)])
    weight *= 2
    second = talk.ask("weights", 2, [("a", weight)])
    assert first[:2] == ("weights", 1) and first[2][0][:3] == ("a", torch.float32, [1.0, 1.0, 1.0])
    assert second[:2] == ("weights", 2) and second[2][0][2:] == ([2.0, 2.0, 2.0], first[2][0][3])
    mapped = Path(f"/proc/{talk.first[1]}/maps").read_text()
    assert "/memfd:weights (deleted)" in mapped and "/dev/shm/" not in mapped
    talk.inbox.put(("stop",))
    talk.ended()
    assert talk.outbox.empty() and left() == before


@pytest.mark.integration
def test_a_process_that_is_killed_or_ends_by_itself_is_an_error():
    """And the thread that sends to it ends, with the weights that it holds."""
    before = threading.active_count()
    killed, ended = Talk(), Talk()
    os.kill(killed.first[1], signal.SIGKILL)
    kind, error = killed.outbox.get(timeout=10)
    assert kind == "error" and str(error) == "the engine's process was killed by SIGKILL (no memory?)"
    kind, error = ended.ask("exit", 3)
    assert kind == "error" and "ended with exit code 3" in str(error)
    killed.ended()
    ended.ended()
    assert threading.active_count() == before


@pytest.mark.integration
def test_what_the_thread_raises_is_told_with_its_traceback():
    talk = Talk()
    kind, error = talk.ask("raise")
    assert kind == "error" and "ValueError: the engine broke on purpose" in str(error) and "in obey" in str(error)
    talk.ended()


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_when_another_takes_its_place():
    """As Engine.restart says it; what it still holds is free for the new one."""
    talk = Talk()
    talk.inbox.put(("sleep",))
    time.sleep(0.2)
    assert alive(talk.first[1])
    talk.outbox.abandoned = True
    talk.ended(within=5)


def test_a_relay_that_waits_takes_no_cpu_time():
    """Its thread shares the cores of the trainer, and Python's lock: it looks up twice a second."""
    ours, theirs = Pipe()
    looks = []
    line = SimpleNamespace(recv=ours.recv, send=ours.send, close=ours.close)
    line.poll = lambda seconds: looks.append(seconds) or ours.poll(seconds)
    child = SimpleNamespace(pid=0, exitcode=0, kill=lambda: None, join=lambda *timeout: None)
    engine = engine_process.EngineProcess(obey)
    engine._start = lambda setting: (child, line)
    threading.Timer(0.7, theirs.close).start()
    engine.relay(ARGS, torch.float32, 0, 1, [0], watchdog.Mailbox(), watchdog.Mailbox())
    assert 1 <= len(looks) <= 3


@pytest.mark.integration
def test_code_that_has_changed_since_the_run_began_is_not_run():
    code = engine_process.workers.loaded_code() | {Path(engine_process.__file__): "of another day"}
    kind, error = Talk(code=code).first
    assert kind == "error" and "engine_process.py has changed since this run began" in str(error)


PARENT = """
import sys, threading, time
import test_engine_process

if __name__ == "__main__":
    talk = test_engine_process.Talk()
    talk.inbox.put(("sleep",))  # it reads no line that ends
    time.sleep(0.5)
    print(talk.first[1], flush=True)
    if sys.argv[1] == "stay":
        time.sleep(3600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "at its end"])
def test_a_parent_that_ends_takes_the_process_along(tmp_path, how):
    """By SIGKILL, or by an interpreter that ends while the relay still waits."""
    (tmp_path / "parent.py").write_text(PARENT)
    path = f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}"
    line = [sys.executable, str(tmp_path / "parent.py"), {"killed": "stay"}.get(how, "leave")]
    parent = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
    child = int(parent.stdout.readline())
    if how == "killed":
        assert alive(child)
        parent.kill()
    assert parent.wait(20) == (-signal.SIGKILL if how == "killed" else 0)
    deadline = time.monotonic() + 5
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child)

"""Two threads that compute in turn: the OpenMP threads of the one that waits are gone, and come back."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading

import pytest
import torch
from conftest import ROOT

import utils


def test_who_waits_lets_go_of_its_threads():
    """In a process of its own, as the count of its threads is what is looked at."""
    if utils._openmp_pause() is None:
        pytest.skip("torch was built with another OpenMP than GNU's")
    program = """
import os, torch, utils
torch.set_num_threads(3)
count, box, x = lambda: len(os.listdir("/proc/self/task")), utils.Mailbox(), torch.randn(512, 512)
print((x @ x).sum().isfinite().item(), count())
box.put("mail"), print(box.get() == "mail", count())
print((x @ x).sum().isfinite().item(), count())
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    right, threads = zip(*(line.split() for line in run.stdout.splitlines()), strict=True)
    many, few, again = map(int, threads)
    assert right == ("True",) * 3 and few == many - 2 and again == many, run.stdout


def test_it_is_a_queue():
    box, got = utils.Mailbox(), []
    reader = threading.Thread(target=lambda: got.extend(box.get() for _ in range(3)))
    reader.start()
    for x in range(3):
        box.put(x)
        assert torch.ones(600, 600).mm(torch.ones(600, 600))[0, 0] == 600
    reader.join(timeout=10)
    assert got == [0, 1, 2] and box.empty()
    with pytest.raises(queue.Empty):
        box.get(timeout=0.01)
    with pytest.raises(queue.Empty):
        box.get_nowait()

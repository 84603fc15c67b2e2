"""OpenMP's threads: a thread that waits for a message ends those that compute for it, and no others."""

from __future__ import annotations

import json
import subprocess
import sys

from helpers import ROOT, run_environment

WAIT = """
import json, os, queue, threading
import torch
from runtime.system import process, watchdog

torch.set_num_threads(2)

def compute():
    before = set(os.listdir("/proc/self/task"))
    torch.ones(10**6).exp()
    return set(os.listdir("/proc/self/task")) - before

def alive(threads):
    return sorted(threads & set(os.listdir("/proc/self/task"))) != []

found = {}
box = watchdog.Mailbox()
mine = compute()
found["a computation starts a thread"] = len(mine)
box.put(("message",))
box.get()
found["after a message that was there"] = alive(mine)
other = []
done = threading.Event()
thread = threading.Thread(target=lambda: (other.append(compute()), done.wait()))
thread.start()
while not other:
    pass
try:
    box.get(timeout=0.01)
except queue.Empty:
    found["after waiting"] = alive(mine)
found["those of another thread"] = alive(other[0])
done.set()
found["the next computation starts one again"] = len(compute())
process.openmp.cache_clear()
process.openmp = lambda: None
process.end_openmp_threads()  # another OpenMP than GNU's: nothing to do
print(json.dumps(found))
"""


def test_a_thread_that_waits_ends_its_openmp_threads():
    """Those of others go on; a thread that does not wait keeps its own."""
    line = [sys.executable, "-c", WAIT]
    environment = {**run_environment(), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {
        "a computation starts a thread": 1,
        "after a message that was there": True,
        "after waiting": False,
        "those of another thread": True,
        "the next computation starts one again": 1,
    }

"""Matrix products per second of this machine: measured once and cached, so that a command always makes the same choice.

A CPU's name does not determine them. Of two kinds of virtual machines with AVX-512 and its bf16 instructions, one ran
bf16 at 2.6 times the rate of fp32, the other at 0.7 times; one with AMX at 10 times, one with only AVX2 at a hundredth.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from pathlib import Path

import torch

ROWS, INNER, COLUMNS = 512, 576, 1536  # of the products that are timed: a layer of the quickstart's model
MARGIN = 1.4  # bf16 has to multiply so much faster: no machine that was measured is near it


def product_rates(rounds: int = 5) -> dict[str, float]:
    """Return the GFLOP/s of a matrix product in fp32 and in bf16 on one core, the best of ``rounds``.

    In CPU seconds, so other programs do not count. Takes 0.1 s, or two seconds where bf16 has no instructions.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best = {"float32": 0.0, "bfloat16": 0.0}
    for name in best:
        dtype = getattr(torch, name)
        left = torch.ones(ROWS, INNER, dtype=dtype)
        right = torch.ones(INNER, COLUMNS, dtype=dtype)
        for _ in range(rounds):
            started = time.thread_time()
            torch.mm(left, right)
            seconds = time.thread_time() - started
            best[name] = max(best[name], 2e-9 * ROWS * INNER * COLUMNS / seconds)
    torch.set_num_threads(threads)
    return {name: round(rate, 1) for name, rate in best.items()}


def machine_key() -> str:
    """Return the key of the measured rates: processor and torch version."""
    cpu = re.findall(r"(?:model name|flags|Features)\s*: (.*)", Path("/proc/cpuinfo").read_text())
    digest = hashlib.sha256("\n".join(sorted(set(cpu))).encode()).hexdigest()[:16]
    return f"{digest} torch {torch.__version__}"


def known_rates() -> dict[str, float]:
    """Return the cached ``product_rates`` of this machine, or measure them; processes that start together wait."""
    key = machine_key()
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlvr"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "product_rates.json", "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            known = {}
            with contextlib.suppress(ValueError, TypeError):  # a file that was cut off is written anew
                known = dict(json.loads(file.read()))
            if not known.get(key):
                known[key] = product_rates()
                file.truncate(0)
                file.write(json.dumps(known, indent=1) + "\n")
            return known[key]
    except (OSError, RuntimeError):  # a full disk, a home that cannot be written, or none
        return product_rates()

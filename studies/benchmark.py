"""Time whole runs on this machine, of two checkouts in turns, and the rates of its hardware.

    python studies/benchmark.py grpo.py --total_steps 6       a run: its start, its phases, its peak memory
    python studies/benchmark.py --against ../at-a-commit grpo.py --total_steps 6

It starts the command --repeats times, and as often by the code of another checkout (``git worktree add``), in turns
(A B A B): the speed of a machine drifts within minutes, the ratio of neighboring measurements hardly does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts are not a package

from runtime.system.process import prepare_environment

prepare_environment()

import torch

from runtime.system import process

PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}  # rows of the square matrices; a GPU needs large ones to be busy
COPY_BYTES = 256 * 10**6  # more than caches hold
say = partial(print, flush=True)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of ``work``, including what it left running on a GPU."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - start, result


def timed_repeatedly(work: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each of ``count`` calls."""
    return [timed(work)[0] for _ in range(count)]


def spread(values: list[float], unit: str = "s", digits: int = 2) -> str:
    """Median, with minimum and maximum in parentheses."""
    return f"{median(values):.{digits}f} {unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def machine_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(FLOP/s of a matrix product in ``dtype``, bytes/s of a copy, counting bytes read and written); best of 8."""
    size = PRODUCT_SIZE[device.type]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    source, target = torch.ones(2, COPY_BYTES, dtype=torch.uint8, device=device)
    products = timed_repeatedly(lambda: a @ b, 8)
    copies = timed_repeatedly(lambda: target.copy_(source), 8)
    flops = 2 * size**3
    moved = 2 * COPY_BYTES
    return flops / min(products), moved / min(copies)


def machine_name(device: torch.device) -> str:
    """Model of the GPU, or of the CPU where the run has no GPU.

    AMX is in the name: virtual machines may call CPUs with and without it the same, and here one multiplied bf16 at
    2,425 GFLOP/s, the other at 150.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = cpu[1] if cpu else "unknown CPU"
    return f"{name} with AMX" if torch.cpu._is_amx_tile_supported() else name


def run_once(code: Path, words: list[str]) -> dict[str, float]:
    """Run a command by the code in a folder; seconds of its start, of each phase on average, and its peak memory."""
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        line = [sys.executable, str(code / words[0]), *words[1:], "--output_dir", place, "--run_name", "timed"]
        started = time.perf_counter()
        log = Path(place, "log")
        with log.open("w") as output:
            end = process.die_with_parent
            child = subprocess.Popen(line, cwd=code, stdout=output, stderr=output, preexec_fn=end)
            _, status, usage = os.wait4(child.pid, 0)
        whole = time.perf_counter() - started
        if status != 0:
            process.refuse(f"{line} failed:\n{log.read_text()[-2000:]}")
        lines = Path(place, "timed", "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    inside = sum(step["time/step"] for step in steps)
    found = {"whole": whole, "outside steps": whole - inside}
    for name in steps[-1]:
        if name.startswith("time/"):
            seconds = [step.get(name) or 0.0 for step in steps[1:] or steps]  # the first step allocates
            found[name.removeprefix("time/")] = mean(seconds)
    return found | {"peak GiB": usage.ru_maxrss / 2**20}


def main(words: list[str]) -> None:
    """Time whole runs."""
    parser = argparse.ArgumentParser(description="Time whole runs.")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each checkout")
    parser.add_argument("--against", type=Path, help="another checkout, timed in turns with this one")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script and its flags")
    args = parser.parse_args(words)
    if not args.command:
        parser.error("name a script and its flags, such as grpo.py --total_steps 6")
    folders = [ROOT]
    if args.against is not None:
        folders.append(args.against.resolve())
    found = {folder: [] for folder in folders}
    for _ in range(args.repeats):
        for folder in folders:
            found[folder].append(run_once(folder, args.command))
    for way, runs in found.items():
        say(way)
        for name in runs[0]:
            say(f"  {name:16s} {spread([one[name] for one in runs], '')}")


if __name__ == "__main__":
    main(sys.argv[1:])

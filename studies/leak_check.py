"""Does a run grow? Slopes of its memory, files, threads and time over a thousand steps, with intervals.

    python studies/leak_check.py                             grpo.py on the model of `make testbed`, with vLLM
    python studies/leak_check.py --script ppo.py --async_steps 1    what it does not know goes to the script

The run evaluates, saves and writes samples all along. After every step this program reads what the kernel says of the
run's processes, and the run notes what malloc has in use: what it has freed it keeps, up to a fiftieth more than it had
after its second step (system/process.py, Heap), and gaps between what stays are resident, too. A slope is that of a
straight line through the means of twenty blocks of steps, without the first tenth; its interval is Student's over the
blocks, 95 %. The exit code is 1 where memory in use, its jumps left out, files or threads rise by more than zero and by
more than a thousandth of their mean in a hundred steps. It is also 1 where memory jumps more than once in a hundred
steps.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runtime/ is no package that is installed

from runtime.run.intervals import t_quantile

FLAGS = {
    "model_name_or_path": ROOT / "models" / "testbed-1",
    "dataset": "reasoning_gym:chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=1",
    "dtype": "float32",
    "num_unique_prompts_rollout": 4,
    "num_samples_per_prompt_rollout": 4,
    "learning_rate": 1e-6,  # so little that responses keep their lengths
    "lr_scheduler_type": "constant",
    "eval_prompts": 8,
    "eval_every": 15,  # three times in each of the blocks of a thousand steps
    "save_every": 15,
    "vllm_args": '{"kv_cache_memory_bytes": 107374182}',
    "run_name": "run",
}
BLOCKS = 20
SEEN = ("resident MiB", "shared MiB", "files in /dev/shm", "open files", "threads", "processes")
IN_USE = "MiB in use"
STEADY = "MiB in use, without jumps"
JUMP = 1.0  # MiB in one step: a buffer that is as large as the largest batch so far
MUST_NOT_GROW = (STEADY, *SEEN[1:])
INSIDE = "--inside"  # this program is the run itself
MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class Malloc(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


def heap_in_use() -> int:
    """Bytes that this process has taken from malloc and not freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Malloc
    found = mallinfo2()
    return found.uordblks + found.hblkhd


def inside(script: str, words: list[str]) -> None:
    """Be the run of a script, and write after each step how many MiB its process has in use to the file IN_USE."""
    from runtime.system import process

    process.prepare_environment()
    module = importlib.import_module(script.removesuffix(".py"))
    from runtime.arguments import flags
    from runtime.run import logger

    write = logger.RunLog.step

    def write_and_look(log, *arguments):
        write(log, *arguments)
        with open(log.folder / IN_USE, "a") as out:
            out.write(f"{heap_in_use() / 2**20}\n")

    logger.RunLog.step = write_and_look
    args = flags.parse(module.Args, words=words)
    module.main(args, module.preflight(args))


def size(place: Path, ending: str = "") -> float:
    """MiB of the files under a folder. What is removed or renamed meanwhile, an old checkpoint or a new one, is 0."""
    total = 0
    for folder, _, names in os.walk(place):  # which passes over a folder that has gone
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(f"{folder}/{name}").st_size if name.endswith(ending) else 0
    return total / 2**20


def look(run: psutil.Process, folder: Path) -> dict[str, float]:
    """Return the current memory of a run and all its child processes. Pages shared by two of them count twice."""
    found = dict.fromkeys(SEEN, 0.0)
    shared: set[str] = set()
    for one in (run, *run.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):  # it has ended meanwhile
            place = Path(f"/proc/{one.pid}")
            status = (place / "status").read_text()
            for name, key in (("resident MiB", "VmRSS"), ("shared MiB", "RssShmem")):
                found[name] += int(re.search(rf"{key}:\s*(\d+)", status)[1]) / 1024
            shared |= set(re.findall(r"/dev/shm/.*", (place / "maps").read_text()))
            found["threads"] += one.num_threads()
            found["open files"] += one.num_fds()
            found["processes"] += 1
    found["files in /dev/shm"] = len(shared)
    found["checkpoints MiB"] = size(folder / "checkpoints")
    found["logs MiB"] = size(folder, ".jsonl")
    found["CPU seconds"] = sum(run.cpu_times()[:2])
    return found


def slope(values: np.ndarray) -> tuple[float, float, float]:
    """(change in a hundred steps, half of its 95 % interval, mean) of values, one a step."""
    kept = values[len(values) // 10 :]
    means = np.array([block.mean() for block in np.array_split(kept, BLOCKS)])
    places = np.array([block.mean() for block in np.array_split(np.arange(len(kept)), BLOCKS)])
    centered = places - places.mean()
    rate = (centered * means).sum() / (centered**2).sum()
    rest = means - means.mean() - rate * centered
    error = np.sqrt((rest**2).sum() / (BLOCKS - 2) / (centered**2).sum())
    return 100 * rate, 100 * t_quantile(BLOCKS - 2) * error, kept.mean()


def without_jumps(values: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """(values less their changes by more than JUMP from one to the next, those changes as text)."""
    changes = np.diff(values, prepend=values[0])
    large = np.abs(changes) > JUMP
    said = [f"{changes[place]:+.1f} MiB after step {place + 1}" for place in np.flatnonzero(large)]
    return values - np.cumsum(np.where(large, changes, 0)), said


def watched(line: list[str], folder: Path) -> list[dict[str, float]]:
    """Return the measurements after each step of a run in ``folder``. Raises RuntimeError if it fails."""
    metrics = folder / "metrics.jsonl"
    seen: list[dict] = []
    log = folder.with_suffix(".log")
    with open(log, "w") as out, subprocess.Popen(line, cwd=ROOT, stdout=out, stderr=out) as child:
        size = 0
        while child.poll() is None:
            now = metrics.stat().st_size if metrics.is_file() else 0
            if now > size:  # a step is over
                with contextlib.suppress(psutil.NoSuchProcess):
                    seen.append(look(psutil.Process(child.pid), folder))
            size = now
            time.sleep(0.02)
    if child.returncode != 0:
        raise RuntimeError(f"exit code {child.returncode}: {log.read_text()[-2000:]}")
    return seen


def main() -> int:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", default="grpo.py", choices=["grpo.py", "ppo.py"])
    parser.add_argument("--steps", type=int, default=1000)
    args, more = parser.parse_known_args()
    if args.steps < 3 * BLOCKS:
        parser.error(f"--steps {args.steps}: at least {3 * BLOCKS}, for {BLOCKS} blocks")
    words = [word for name, value in FLAGS.items() for word in (f"--{name}", str(value))]
    line = [sys.executable, __file__, INSIDE, args.script, *words, "--total_steps", str(args.steps), *more]
    with tempfile.TemporaryDirectory(prefix="long-run-") as place:
        folder = Path(place) / "run"
        seen = watched([*line, "--output_dir", place], folder)
        metrics = [json.loads(row) for row in (folder / "metrics.jsonl").read_text().splitlines()]
        in_use = [float(number) for number in (folder / IN_USE).read_text().splitlines()]
    curves = {name: np.array([look[name] for look in seen]) for name in seen[0]}
    curves[IN_USE] = np.array(in_use)
    curves[STEADY], jumps = without_jumps(curves[IN_USE])
    curves["CPU seconds a step"] = np.diff(curves.pop("CPU seconds"))
    curves["seconds a step"] = np.array([row["time/step"] for row in metrics])
    print(f"{args.script} {' '.join(more)}: {args.steps} steps, {len(seen)} looks\n")
    print("| | mean | in a hundred steps | 95 % interval |\n|---|---|---|---|")
    grown = []
    for name, values in curves.items():
        rate, half, mean = slope(values)
        print(f"| {name} | {mean:.4g} | {rate:+.2g} | {rate - half:+.2g} to {rate + half:+.2g} |")
        if name in MUST_NOT_GROW and rate - half > 0 and rate > mean / 1000:
            grown.append(name)
    late = [jump for jump in jumps if int(jump.split()[-1]) > args.steps // 10]
    if len(late) > args.steps / 100:
        grown.append(IN_USE)
    print(f"\njumps after the first tenth: {', '.join(late) or 'none'}\ngrows: {', '.join(grown) or 'nothing'}")
    return int(bool(grown))


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        inside(sys.argv[2], sys.argv[3:])
    else:
        raise SystemExit(main())

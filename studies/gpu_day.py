"""The first minutes on a GPU: what the fake GPU has shown, tests, a learning curve, phases.

    make gpu-day                         ten minutes, everything in gpu-day/
    make gpu-day ARGS="--minutes 30"     with more time for the parts that come last

Every part is a process with a limit of its own, so that one that hangs costs no other. facts.md has a row per part: how
it ended, its seconds, or why it was skipped; next to it are each part's output and the files it made. Without a GPU
the halves of the tests for CPUs run, and everything else is skipped.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Part:
    """A command, its limit in seconds, and what it needs: functions that return why it cannot run here, or nothing."""

    name: str
    command: list[str]
    limit: int
    needs: tuple[Callable[[], str], ...] = ()


def no_gpu() -> str:
    """Asked in a process of its own: this one is to hold no memory of the GPU."""
    code = "import torch; print(torch.cuda.is_available(), torch.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        return f"torch cannot be imported: {done.stderr.strip().splitlines()[-1:]}"
    found, version = done.stdout.split()
    return "" if found == "True" else f"torch {version} finds no GPU"


def check(out: Path, *names: str) -> list[str]:
    """Return the command of parts of `make cuda-check` on this machine's GPU instead of the fake one."""
    program = ROOT / "tests" / "fake_cuda" / "check.py"
    folder = out / f"check-{names[0]}"
    line = [sys.executable, str(program)]
    line += names
    line += ["--gpu"]
    line += ["--work", str(folder)]
    return line


def parts(out: Path, gpu: str) -> list[Part]:
    """List the parts to run, the most informative first. ``gpu``: the reason why there is no GPU, or ""."""
    python = sys.executable
    tests = [python, "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider"]
    only = (lambda: gpu,)
    model = (lambda: "" if MODEL.is_dir() else f"{MODEL.name} is not there: make setup",)
    halves = (lambda: "" if gpu else "the tests of the GPU run instead",)
    run = [python, "grpo.py", "--output_dir", str(out / "runs"), "--overwrite"]
    bench = [python, "studies/benchmark.py", "--json", str(out / "phases.json"), "--repeats", "3"]
    return [
        Part("machine", ["nvidia-smi"], 20, only),
        Part("check-card", check(out, "device", "backends"), 120, only),
        Part("check-memory", check(out, "memory"), 120, only),
        Part("tests-cpu", [*tests, "-m", "not gpu and not slow", "tests/runs/test_gpu.py"], 900, halves),
        Part("tests-first", [*tests, "-m", "gpu", "-k", "layouts or accepted or fast_as or borrowed", "-x"], 120, only),
        Part("curve", [*run, "--run_name", "quickstart"], 240, (*only, *model)),
        Part("curve-async", [*run, "--run_name", "async", "--async_steps", "1"], 240, (*only, *model)),
        Part("phases", bench, 180, (*only, *model)),
        Part("tests", [*tests, "-m", "gpu"], 900, only),
    ]


def carry_out(part: Part, out: Path, left: float) -> tuple[str, float]:
    """Run a part for at most ``left`` seconds and return (result, seconds it took). Its output is in NAME.log."""
    reason = next(filter(None, (need() for need in part.needs)), "")
    if not reason and left < 15:
        reason = "no time is left: --minutes"
    if reason:
        return f"skipped: {reason}", 0.0
    started = time.monotonic()
    with open(out / f"{part.name}.log", "w") as log:
        try:
            limit = min(part.limit, left)
            done = subprocess.run(part.command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=limit)
            words = "passed" if done.returncode == 0 else f"failed: exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            words = f"failed: not done after {limit:.0f} s"
        except OSError as error:
            words = f"failed: {error}"
    return words, time.monotonic() - started


def main(words: list[str]) -> int:
    """Run all parts; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-day", help="folder for all that comes of it")
    parser.add_argument("--minutes", type=float, default=10, help="no part begins or continues after these")
    args = parser.parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    gpu = no_gpu()
    rows = ["| part | result | seconds |", "|---|---|---|"]
    for part in parts(args.out.resolve(), gpu):
        result, seconds = carry_out(part, args.out, end - time.monotonic())
        rows.append(f"| {part.name} | {result} | {seconds:.0f} |")
        print(f"{part.name}: {result} ({seconds:.0f} s)", flush=True)
        (args.out / "facts.md").write_text("\n".join(rows) + "\n")
    print(f"everything is in {args.out}")
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

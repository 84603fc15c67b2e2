"""Measure a commit, keep its numbers in bench/history.jsonl, and compare it with the commits measured before.

    make bench-gate                                        measure what is missing of this commit, then compare
    python scripts/history.py --what speed,memory,start    a part: three runs of eight steps
    python scripts/history.py --what accuracy              the other: the quickstart with three seeds
    python scripts/history.py --project ../at-a-commit     measure another checkout
    python scripts/history.py --gate --what speed          compare only; measure only what is missing

speed     seconds of a step, times the machine's rate of matrix products: GFLOP that it could have done in that time
memory    peak resident memory of the process, in GiB
start     seconds from the start of the process to its first step
accuracy  held-out pass@1 after the quickstart, one run for each seed

Every run is a line, written when it is known: the same command measures what is missing. Numbers are compared among
lines of the same machine and arguments. The corridor is three standard deviations of the difference of two means: the
deviation is that of repeated runs of one commit, pooled over all commits, and at least ``FLOOR`` of the mean. Exit code
1: outside it, on the worse side; 2: too few lines to know.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

import benchmark  # first: it sets the environment
import torch

import grpo
import utils
from runtime import process

ROOT = process.PROJECT
KINDS = {"speed": +1, "memory": +1, "start": +1, "accuracy": -1}  # the sign of what is worse
TOGETHER = ("speed", "memory", "start")  # are measured in one run
FLOOR = 0.02  # of the mean: a deviation below it is not told from 0 by a few runs
DEVIATIONS = 3.0
LEAST = 3  # degrees of freedom of the deviation
CODE = ("*.py", "runtime/*.py")


# ---------------------------------------------------------------------------------------------------------- measuring


def machine_rate() -> tuple[str, float]:
    """(name of the machine, FLOP/s of a matrix product in its training type), by scripts/benchmark.py."""
    device, dtype, _ = utils.resolve_device(grpo.Args())
    name = f"{benchmark.machine_name(device)}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    return name, benchmark.machine_rates(device, dtype)[0]


def run(project: Path, words: list[str], out: Path) -> dict[str, float]:
    """Run grpo.py of a checkout. Returns seconds to its first step, its peak memory in GiB, and its exit code.

    Raises RuntimeError where it fails.
    """
    log = out / "log"
    metrics = out / "run" / "metrics.jsonl"
    line = [sys.executable, str(project / "grpo.py"), *words, "--output_dir", str(out), "--run_name", "run"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with open(log, "w") as console:
        start = time.monotonic()
        child = subprocess.Popen(line, cwd=ROOT, env=environment, stdout=console, stderr=console)
        first = None
        ended = 0
        while not ended:
            if first is None and metrics.exists() and metrics.read_text().endswith("\n"):
                first = time.monotonic()
            time.sleep(0.05)
            ended, status, usage = os.wait4(child.pid, os.WNOHANG)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0 or first is None:
        raise RuntimeError(f"{shlex.join(line)} ended with {child.returncode}:\n{log.read_text()[-2000:]}")
    steps = [json.loads(text)["time/step"] for text in metrics.read_text().splitlines()]
    seconds = median(steps[1:] or steps)  # the first compiles and warms up
    return {"start": first - start - steps[0], "memory": usage.ru_maxrss / 2**20, "seconds": seconds}


def identity(project: Path) -> dict[str, str]:
    """Commit of a checkout, with the hash of its code: an edited checkout is a commit of its own."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in CODE for path in project.glob(pattern)):
        digest.update(path.name.encode() + path.read_bytes())
    commit = process.git(project, "rev-parse", "--short=10", "HEAD") or ""
    edited = process.git(project, "status", "--porcelain", "--untracked-files=no", "--", *CODE)
    name = commit.strip() + ("+edited" if edited or not commit else "")
    when = (process.git(project, "log", "-1", "--format=%cI") or "").strip()
    return {"commit": name, "committed": when, "code": digest.hexdigest()[:16]}


class History:
    """The lines of a history file, and what is measured and compared of one commit."""

    def __init__(self, options: argparse.Namespace):
        self.file = options.file
        self.project = options.project.resolve()
        self.repeats = options.repeats
        self.steps = options.steps
        self.arguments = shlex.split(options.arguments)
        self.who = identity(self.project)
        self.machine, self.rate = machine_rate()
        self.lines = [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def setting(self, what: str) -> dict[str, object]:
        """What lines that are compared have in common."""
        steps = None if what == "accuracy" else self.steps
        return {"what": what, "machine": self.machine, "arguments": self.arguments, "steps": steps}

    def of_kind(self, what: str) -> list[dict]:
        """The lines of this setting, oldest first."""
        wanted = self.setting(what)
        return [line for line in self.lines if all(line[name] == value for name, value in wanted.items())]

    def own(self, what: str) -> list[dict]:
        """Those of the commit that is measured."""
        return [line for line in self.of_kind(what) if line["code"] == self.who["code"]]

    def write(self, what: str, value: float, **more: object) -> None:
        """Append a line."""
        line = {**self.who, **self.setting(what), "value": round(value, 5), **more}
        self.lines.append(line)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a") as out:
            out.write(json.dumps(line) + "\n")
        print(f"{self.who['commit']} {what} {value:.4g} {json.dumps(more)}", flush=True)

    def measure(self, wanted: list[str]) -> None:
        """Run what is missing of the commit."""
        while any(len(self.own(what)) < self.repeats for what in wanted if what != "accuracy"):
            self.measure_run([what for what in wanted if what != "accuracy" and len(self.own(what)) < self.repeats])
        done = {line["seed"] for line in self.own("accuracy")}
        for seed in range(1, self.repeats + 1):
            if "accuracy" in wanted and seed not in done:
                self.measure_accuracy(seed)

    def measure_run(self, kinds: list[str]) -> None:
        """One run for speed, memory and start. The rate is the better of before and after: both may be disturbed."""
        before = machine_rate()[1]
        load = os.getloadavg()[0]
        if load > 0.25 * os.cpu_count():
            print(f"warning: other programs compute here (load {load:.1f}); measure on a quiet machine", flush=True)
        words = [*self.arguments, "--total_steps", str(self.steps), "--eval_prompts", "0"]
        with tempfile.TemporaryDirectory(prefix="history-") as place:
            found = run(self.project, words, Path(place))
        rate = max(before, machine_rate()[1])
        found["speed"] = found["seconds"] * rate / 1e9
        for what in kinds:
            more = {"seconds": round(found["seconds"], 4), "rate": round(rate / 1e9, 1)} if what == "speed" else {}
            self.write(what, found[what], **more, load=round(load, 1))

    def measure_accuracy(self, seed: int) -> None:
        """The quickstart with one seed."""
        with tempfile.TemporaryDirectory(prefix="history-") as place:
            run(self.project, [*self.arguments, "--seed", str(seed)], Path(place))
            results = (Path(place) / "run" / "eval.jsonl").read_text().splitlines()
        self.write("accuracy", json.loads(results[-1])["eval/pass@1"], seed=seed)

    def compare(self, what: str) -> int:
        """Print one kind of number against its corridor; its exit code."""
        mine = [line["value"] for line in self.own(what)]
        groups: dict[str, list[float]] = {}
        for line in self.of_kind(what):
            groups.setdefault(line["code"], []).append(line["value"])
        before = [values for code, values in groups.items() if code != self.who["code"]]
        text, code = verdict(what, mine, before, list(groups.values()))
        print(f"{self.who['commit']} {text}", flush=True)
        return code


# ---------------------------------------------------------------------------------------------------------- comparing


def deviation(groups: list[list[float]]) -> tuple[float, int]:
    """(standard deviation of repeated runs, pooled over the groups, its degrees of freedom)."""
    squares = sum((value - fmean(values)) ** 2 for values in groups for value in values)
    freedom = sum(len(values) - 1 for values in groups)
    return (math.sqrt(squares / freedom) if freedom else 0.0), freedom


def verdict(what: str, mine: list[float], before: list[list[float]], groups: list[list[float]]) -> tuple[str, int]:
    """(what to say of a commit's numbers, exit code): its mean against that of the last five commits before it.

    ``mine``: its runs; ``before``: those of each earlier commit; ``groups``: of all, for the deviation.
    """
    last = [value for values in before[-5:] for value in values]
    sigma, freedom = deviation(groups)
    if not mine or not last or freedom < LEAST:
        return f"{what}: {len(mine)} run(s), {len(last)} of earlier commits; too few to compare, measure more", 2
    mean = fmean(last)
    sigma = max(sigma, FLOOR * abs(mean))
    width = DEVIATIONS * sigma * math.sqrt(1 / len(mine) + 1 / len(last))
    off = (fmean(mine) - mean) * KINDS[what]
    words = f"{what}: {fmean(mine):.4g}, before {mean:.4g}, corridor {mean - width:.4g} to {mean + width:.4g}"
    if off > width:
        return f"{words}: WORSE", 1
    return f"{words}: {'better' if off < -width else 'within'}", 0


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line. Ends with exit code 2 for a kind of number that there is not, or no checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--what", default=",".join(KINDS), help="kinds of numbers, with commas (default: %(default)s)")
    add("--gate", action="store_true", help="compare with earlier commits; exit code 1 where it is worse")
    add("--project", type=Path, default=ROOT, help="checkout to measure (default: this one)")
    add("--repeats", type=int, default=3, help="runs, and seeds of the accuracy (default: %(default)s)")
    add("--steps", type=int, default=8, help="steps of a run for speed, memory and start (default: %(default)s)")
    add("--arguments", default="", help="more arguments of grpo.py, as one word")
    add("--file", type=Path, default=ROOT / "bench" / "history.jsonl", help="history (default: bench/history.jsonl)")
    options = parser.parse_args(words)
    options.what = options.what.split(",")
    for what in options.what:
        if what not in KINDS:
            process.refuse(f"--what {what}: give some of {', '.join(KINDS)}, with commas")
    if not (options.project / "grpo.py").is_file():
        process.refuse(f"--project {options.project}: no grpo.py there; give the folder of a checkout")
    if options.repeats < 2 or options.steps < 2:
        process.refuse("--repeats and --steps must be 2 or more: one run has no noise, and the first step warms up")
    return options


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    history = History(options)
    history.measure(options.what)
    return max((history.compare(what) for what in options.what), default=0) if options.gate else 0


if __name__ == "__main__":
    raise SystemExit(main())

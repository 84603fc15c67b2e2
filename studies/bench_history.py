"""Measure a commit, keep its numbers in bench/history.jsonl, and compare it with the commits measured before.

    make bench-gate                                              measure what is missing of this commit, then compare
    python studies/bench_history.py --what speed,memory,start    a part: three runs of eight steps
    python studies/bench_history.py --what accuracy              the other: the quickstart with three seeds
    python studies/bench_history.py --project ../at-a-commit     measure another checkout
    python studies/bench_history.py --gate --what speed          compare only; measure only what is missing
    python studies/bench_history.py --table                      what is known of all commits; measures nothing

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
from statistics import fmean, median, stdev

import benchmark  # first: it sets the environment
import torch

import grpo
from runtime.system import git, process
from runtime.training import pretrained

ROOT = process.PROJECT
KINDS = {"speed": +1, "memory": +1, "start": +1, "accuracy": -1}  # the sign of what is worse
TOGETHER = ("speed", "memory", "start")  # are measured in one run
FLOOR = 0.02  # of the mean: a deviation below it is not told from 0 by a few runs
DEVIATIONS = 3.0
LEAST = 3  # degrees of freedom of the deviation
CODE = ("*.py", "runtime/**/*.py", "graders/**/*.py")
# Variables of this process that would make the run another one.
OURS = ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# ---------------------------------------------------------------------------------------------------------- measuring


def machine_rate() -> tuple[str, float]:
    """(name of the machine, FLOP/s of a matrix product in its training type), by studies/benchmark.py."""
    device, dtype, _ = pretrained.resolve_device(grpo.Args())
    machine = benchmark.machine_name(device)
    threads = torch.get_num_threads()
    flops, _ = benchmark.machine_rates(device, dtype)
    return f"{machine}, {os.cpu_count()} cores, {threads} threads", flops


def busy_ticks(stat: str) -> int:
    """Clock ticks in which the cores computed, from the text of /proc/stat: all but idle and waiting for a disk."""
    user, nice, system, _idle, _waiting, *others = [int(word) for word in stat.splitlines()[0].split()[1:9]]
    return user + nice + system + sum(others)


def busy_cores(seconds: float = 0.5) -> float:
    """Cores that all programs together keep busy while this one sleeps; a load average has the run before in it."""
    stat = Path("/proc/stat")
    start = time.monotonic()
    before = busy_ticks(stat.read_text())
    time.sleep(seconds)
    ticks = busy_ticks(stat.read_text()) - before
    return ticks / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)


def run(project: Path, words: list[str], out: Path) -> dict[str, float]:
    """Run grpo.py of a checkout. Returns seconds to its first step, its peak memory in GiB, and its exit code.

    Raises RuntimeError where it fails.
    """
    log = out / "log"
    metrics = out / "run" / "metrics.jsonl"
    line = [sys.executable, str(project / "grpo.py"), *words]
    line += ["--output_dir", str(out), "--run_name", "run"]
    environment = dict(os.environ)
    for name in OURS:
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
        said = log.read_text()[-2000:]
        raise RuntimeError(f"{shlex.join(line)} ended with {child.returncode}:\n{said}")
    steps = []
    for text in metrics.read_text().splitlines():
        steps.append(json.loads(text)["time/step"])
    return {
        "start": first - start - steps[0],
        "memory": usage.ru_maxrss / 2**20,
        "seconds": median(steps[1:]),  # the first compiles and warms up
    }


def identity(project: Path) -> dict[str, str]:
    """Commit of a checkout, with the hash of its code: an edited checkout is a commit of its own."""
    digest = hashlib.sha256()
    for pattern in CODE:
        for path in sorted(project.glob(pattern)):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    commit = git.output(project, "rev-parse", "--short=10", "HEAD") or ""
    when = git.output(project, "log", "-1", "--format=%cI") or ""
    edited = git.output(project, "status", "--porcelain", "--untracked-files=no", "--", *CODE)
    name = commit.strip()
    if edited or not commit:
        name += "+edited"
    return {
        "commit": name,
        "committed": when.strip(),
        "code": digest.hexdigest()[:16],
    }


class History:
    """The lines of a history file, and what is measured and compared of one commit."""

    def __init__(self, options: argparse.Namespace):
        self.file = options.file
        self.project = options.project.resolve()
        self.repeats = options.repeats
        self.steps = options.steps
        self.arguments = shlex.split(options.arguments)
        self.who = identity(self.project)
        self.machine, _ = machine_rate()
        self.lines = []
        if self.file.exists():
            self.lines = [json.loads(line) for line in self.file.read_text().splitlines()]

    def setting(self, what: str) -> dict[str, object]:
        """Return the settings that comparable rows share."""
        return {
            "what": what,
            "machine": self.machine,
            "arguments": self.arguments,
            "steps": None if what == "accuracy" else self.steps,
        }

    def of_kind(self, what: str, machine: str | None = None) -> list[dict]:
        """Return the lines of this setting, oldest first, from this machine or, if given, from ``machine``."""
        wanted = self.setting(what) | {"machine": machine or self.machine}
        return [line for line in self.lines if line | wanted == line]

    def own(self, what: str) -> list[dict]:
        """Return the lines of this setting that belong to the measured commit."""
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
        together = [what for what in wanted if what in TOGETHER]
        for repeat in range(self.repeats):
            missing = [what for what in together if len(self.own(what)) <= repeat]
            if missing:
                self.measure_run(missing)
        if "accuracy" in wanted:
            done = [line["seed"] for line in self.own("accuracy")]
            for seed in range(1, self.repeats + 1):
                if seed not in done:
                    self.measure_accuracy(seed)

    def measure_run(self, kinds: list[str]) -> None:
        """Measure speed, memory and start in a run. The rate is the higher of two, since either may be disturbed."""
        load = busy_cores()
        _, before = machine_rate()
        if load > 0.25 * os.cpu_count():
            print(f"warning: other programs compute here (load {load:.1f}); measure on a quiet machine", flush=True)
        words = [*self.arguments, "--total_steps", str(self.steps), "--eval_prompts", "0"]
        with tempfile.TemporaryDirectory(prefix="history-") as place:
            found = run(self.project, words, Path(place))
        _, after = machine_rate()
        rate = max(before, after) / 1e9
        seconds = found["seconds"]
        found["speed"] = seconds * rate
        for what in kinds:
            more = {"load": round(load, 1)}
            if what == "speed":
                more |= {"seconds": round(seconds, 4), "rate": round(rate, 1)}
            self.write(what, found[what], **more)

    def measure_accuracy(self, seed: int) -> None:
        """Run the quickstart with one seed and record its final pass@1."""
        with tempfile.TemporaryDirectory(prefix="history-") as place:
            out = Path(place)
            run(self.project, [*self.arguments, "--seed", str(seed)], out)
            results = (out / "run" / "eval.jsonl").read_text()
        last = json.loads(results.splitlines()[-1])
        self.write("accuracy", last["eval/pass@1"], seed=seed)

    def compare(self, what: str) -> int:
        """Print one kind of number against its corridor, and return the exit code."""
        mine = [line["value"] for line in self.own(what)]
        groups: dict[str, list[float]] = {}
        for line in self.of_kind(what):
            groups.setdefault(line["code"], []).append(line["value"])
        before = [values for code, values in groups.items() if code != self.who["code"]]
        text, code = verdict(what, mine, before, list(groups.values()))
        print(f"{self.who['commit']} {text}", flush=True)
        return code

    def table(self, machine: str) -> str:
        """Return all commits measured with ``machine`` and these arguments, oldest first, as Markdown.

        Each number is the mean of its runs, with their standard deviation.
        """
        rows = {}
        for what in KINDS:
            for line in self.of_kind(what, machine):
                cells = rows.setdefault((line["commit"], line["committed"][:10]), {})
                cells.setdefault(what, []).append(line["value"])
                if what == "speed":
                    cells.setdefault("seconds", []).append(line["seconds"])
        columns = ("seconds", *KINDS)
        out = [
            "| commit | date | step, s | step, GFLOP | memory, GiB | start, s | pass@1 |",
            "|---|---|---|---|---|---|---|",
        ]
        for (commit, day), cells in rows.items():
            numbers = [spread(cells.get(column, [])) for column in columns]
            out.append(f"| `{commit}` | {day} | {' | '.join(numbers)} |")
        return "\n".join(out)

    def print_tables(self) -> int:
        """Print the table of each machine that has lines with these arguments; exit code 1 where none has."""
        found = False
        for machine in sorted({line["machine"] for line in self.lines}):
            if any(self.of_kind(what, machine) for what in KINDS):
                here = " (this one)" if machine == self.machine else ""
                print(f"{machine}{here}\n\n{self.table(machine)}\n")
                found = True
        if not found:
            arguments = shlex.join(self.arguments)
            print(f"--table: {self.file} has nothing with --steps {self.steps} and --arguments '{arguments}'")
        return 0 if found else 1


# ---------------------------------------------------------------------------------------------------------- comparing


def spread(values: list[float]) -> str:
    """Mean and standard deviation of runs, in a cell of a table."""
    if len(values) < 2:
        return "".join(f"{value:.4g}" for value in values)
    return f"{fmean(values):.4g} ± {stdev(values):.2g}"


def deviation(groups: list[list[float]]) -> tuple[float, int]:
    """Return (standard deviation of repeated runs, pooled over the groups, its degrees of freedom)."""
    squares = 0.0
    freedom = 0
    for values in groups:
        mean = fmean(values)
        squares += sum((value - mean) ** 2 for value in values)
        freedom += len(values) - 1
    return math.sqrt(squares / max(1, freedom)), freedom


def verdict(what: str, mine: list[float], before: list[list[float]], groups: list[list[float]]) -> tuple[str, int]:
    """Compare a commit's mean with that of the last five commits before it. Returns (text to print, exit code).

    ``mine``: its runs; ``before``: those of each earlier commit; ``groups``: of all, for the deviation.
    """
    last = [value for values in before[-5:] for value in values]
    sigma, freedom = deviation(groups)
    if not mine or not last or freedom < LEAST:
        return f"{what}: {len(mine)} run(s), {len(last)} of earlier commits; too few to compare, measure more", 2
    mean = fmean(last)
    sigma = max(sigma, FLOOR * abs(mean))
    width = DEVIATIONS * sigma * math.sqrt(1 / len(mine) + 1 / len(last))
    now = fmean(mine)
    worse_by = (now - mean) * KINDS[what]
    words = f"{what}: {now:.4g}, before {mean:.4g}, corridor {mean - width:.4g} to {mean + width:.4g}"
    if worse_by > width:
        return f"{words}: WORSE", 1
    if worse_by < -width:
        return f"{words}: better", 0
    return f"{words}: within", 0


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Exits with code 2 for an unknown kind of number, no checkout, or one run or step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--what", default=",".join(KINDS), help="kinds of numbers, with commas (default: %(default)s)")
    add("--gate", action="store_true", help="compare with earlier commits; exit code 1 where it is worse")
    add("--table", action="store_true", help="print what is known of all commits, and measure nothing")
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
    if options.table:
        return history.print_tables()
    history.measure(options.what)
    return max((history.compare(what) for what in options.what), default=0) if options.gate else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Say whether a run has learned, what is wrong with it, since which step, and what to do about it.

    python scripts/report.py runs/NAME           verdict, findings and summary of this run; several may be given
    python scripts/report.py runs                the newest run in that folder
    python scripts/report.py runs/NAME --html    a page instead, also with all samples: runs/NAME/report.html

It reads the files of a run, also of one that is still going. The exit code is 3 if a finished run did not learn, else 1
if something was found, else 0; 2 for wrong arguments. With --html it is 0. docs/maintainers/doctor.md has the rules.

The page contains everything it shows, so it opens from a disk or an attachment, and it makes no network request. Search
and filters of the samples are part of its address after the #, so a link leads to the same samples.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # scripts/plot.py

from plot import find_run, summary

from runtime.run import verdict
from runtime.run.doctor import RULES, Case, examine
from runtime.run.run_files import read, read_config, records, series

UNLEARNED = 3  # the exit code where a finished run did not learn
PHASES = ("generate", "score", "logprobs", "update", "push", "eval", "save")
# The curves shown at first, in this order, unless they are constant; all others appear with "all metrics".
FIRST = (
    "reward/mean",
    "eval/pass@1",
    "completions/length_mean",
    "policy/entropy",
    "kl/sequence",
    "optim/grad_norm",
    "reward/",
    "completions/",
    "time/step",
)
NO_CURVE = (
    *("step", "episode", "eval/problems", "eval/samples", "eval/right", "eval/rewards", "eval/weights_version"),
)

POINTS = 2_000  # of a curve at most
CHARACTERS = 30_000_000  # of samples at most: what a browser opens

PAGE = Path(__file__).with_suffix(".html")


def thin(items: Iterable, limit: int, size: Callable[[Any], int] = lambda item: 1) -> tuple[list, int]:
    """Return (every 1st, 2nd, 4th ... item, so that the sizes add up to ``limit`` at most; the stride)."""
    kept: list = []
    total = 0
    stride = 1
    for number, item in enumerate(items):
        if number % stride:
            continue
        kept.append(item)
        total += size(item)
        while total > limit and len(kept) > 1:
            kept = kept[::2]
            stride *= 2
            total = sum(map(size, kept))
    return kept, stride


def contents(folder: Path, metrics: list[dict], evals: list[dict]) -> dict:
    """Return all data of the page as plain data: for a very long run every 2nd, 4th, 8th ... point and sample."""
    config = read_config(folder)
    logged = [*metrics, *evals]
    names = dict.fromkeys(name for record in logged for name in record if name not in NO_CURVE)
    curves = {name: thin(([r["step"], r[name]] for r in logged if name in r), POINTS)[0] for name in names}
    samples, stride = thin(records(folder / "samples.jsonl"), CHARACTERS, size=_characters)
    seconds = {phase: series(metrics, f"time/{phase}").sum() for phase in PHASES}
    whole = series(metrics, "time/step").sum()
    seconds["rest"] = max(0.0, whole - sum(seconds.values()))
    words = {word.split("=")[0] for word in config.get("command", [])}
    given = [name for name in config.get("args", {}) if words & _flags(name)]
    origin = ("command", "started", "git", "world_size", "versions")
    return {
        "steps": len(metrics),
        "curves": curves,
        "first": FIRST,
        "phases": [[name, float(s)] for name, s in seconds.items() if s > 0],
        "samples": samples,
        "stride": stride,
        "args": config.get("args", {}),
        "given": given,
        "origin": {name: config[name] for name in origin if name in config},
    }


def _characters(sample: dict) -> int:
    """Estimate the number of characters of the page that a sample takes."""
    texts = [value for value in sample.values() if isinstance(value, str)]
    turns = [turn["text"] for turn in sample.get("turns", ())]
    return 300 + 300 * len(turns) + sum(map(len, (*texts, *turns)))


def _flags(name: str) -> set[str]:
    """Return the spellings of an argument on a command line."""
    dashed = name.replace("_", "-")
    return {f"--{name}", f"--{dashed}", f"--no-{dashed}", f"--no_{name}"}


def opening(folder: Path, metrics: list[dict], evals: list[dict]) -> tuple[str, int]:
    """Return (the verdict of a finished run, the doctor's findings and the summary; the exit code that they mean).

    A run without verdict.json is still going, or ended early; its findings are as of now.
    """
    found = verdict.read_verdict(folder)
    if found is not None:
        lines = verdict.in_words(found).splitlines()
        findings = found["findings"]
    else:
        last = metrics[-1]["step"]
        lines = [f"verdict    none: the run has not reached its end; the last step in metrics.jsonl is {last}"]
        findings = examine(Case(read_config(folder).get("args", {}), metrics))
        lines += [f"doctor     {finding}" for finding in findings]
    if not findings:
        lines.append(f"doctor     no finding by {len(RULES)} rules")
    unlearned = found is not None and found["outcome"] == verdict.NOT_LEARNED
    return "\n".join([*lines, "", summary(metrics, evals)]), UNLEARNED if unlearned else int(bool(findings))


def page(folder: Path, metrics: list[dict], evals: list[dict]) -> str:
    """Build the page. Nothing in the data can end the script element that contains it: < is written as an escape."""
    data = json.dumps(contents(folder, metrics, evals)).replace("<", "\\u003c")
    text, _ = opening(folder, metrics, evals)
    result = PAGE.read_text()
    result = result.replace("@TITLE@", html.escape(folder.resolve().name))
    result = result.replace("@SUMMARY@", html.escape(text))
    return result.replace("@DATA@", data)  # last, so that what looks like a field in the data stays as it is


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or a folder of runs, for the newest one")
    parser.add_argument("--html", action="store_true", help="write report.html into the folder of each run instead")
    args = parser.parse_args()
    code = 0
    paths = args.runs if len(args.runs) == 1 else [path for path in args.runs if path.suffix != ".log"]  # of runs/*
    for folder in map(find_run, paths):
        metrics = read(folder / "metrics.jsonl")
        evals = read(folder / "eval.jsonl")
        if args.html:
            output = folder / "report.html"
            output.write_text(page(folder, metrics, evals))
            print(output)
            continue
        text, found = opening(folder, metrics, evals)
        print(f"{folder}: {len(metrics)} steps\n{text}")
        code = max(code, found)
    return code


if __name__ == "__main__":
    raise SystemExit(main())

"""Say whether a run has learned, what is wrong with it, since which step, and what to do about it.

    python scripts/report.py runs/NAME           verdict, findings and summary of this run; several may be given
    python scripts/report.py runs                the newest run in that folder

It reads the files of a run, also of one that is still going. The exit code is 3 if a finished run did not learn, else 1
if something was found, else 0; 2 for wrong arguments. docs/maintainers/doctor.md has the rules.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # scripts/plot.py

from plot import find_run, summary

from runtime.run import verdict
from runtime.run.doctor import RULES, Case, examine
from runtime.run.run_files import read, read_config

UNLEARNED = 3  # the exit code where a finished run did not learn


def read_verdict(folder: Path) -> dict[str, Any] | None:
    """Return verdict.json of a finished run, or None if it is missing or damaged."""
    try:
        return json.loads((folder / verdict.FILE).read_text())
    except (OSError, ValueError):
        return None


def opening(folder: Path, metrics: list[dict], evals: list[dict]) -> tuple[str, int]:
    """Return (the verdict of a finished run, the doctor's findings and the summary; the exit code that they mean).

    A run without verdict.json is still going, or ended early; its findings are as of now.
    """
    found = read_verdict(folder)
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs, or a folder of runs, for the newest one")
    args = parser.parse_args()
    code = 0
    paths = args.runs if len(args.runs) == 1 else [path for path in args.runs if path.suffix != ".log"]  # of runs/*
    for folder in map(find_run, paths):
        metrics = read(folder / "metrics.jsonl")
        text, found = opening(folder, metrics, read(folder / "eval.jsonl"))
        print(f"{folder}: {len(metrics)} steps\n{text}")
        code = max(code, found)
    return code


if __name__ == "__main__":
    raise SystemExit(main())

"""Say in plain words what is wrong with a run, with numbers and the step since when, and what to do about it.

    python scripts/doctor.py runs/NAME           this run; several may be given
    python scripts/doctor.py runs                the newest run in that folder

It reads metrics.jsonl, samples.jsonl and config.json, also of a run that is still going. The exit code is 0 if nothing
was found, 1 if something was, 2 for wrong arguments. The rules: docs/evidence/doctor.md, with how they were
tested; they stand in runtime/findings.py, and a run that ends asks them for its verdict.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # scripts/plot.py

from plot import find_runs

from runtime.findings import RULES, Case, examine
from runtime.reading import control_of


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="runs, or a folder of runs for the newest one")
    folders = find_runs(parser.parse_args().runs)
    sick = False
    for folder in folders:
        case = Case.of(folder)
        findings = examine(case)
        sick = sick or bool(findings)
        print(f"{folder}: {len(case.metrics)} steps, {len(findings) or 'no'} finding(s) by {len(RULES)} rules")
        if control := control_of(case.metrics[-1]):
            print(f"  CONTROL {control}: what was trained on is not the verifier's reward")
        for finding in findings:
            print(f"  {finding}")
    return int(sick)


if __name__ == "__main__":
    raise SystemExit(main())

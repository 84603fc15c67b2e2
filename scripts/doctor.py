"""Say in plain words what is wrong with a run, with numbers and the step since when, and what to do about it.

    python scripts/doctor.py runs/NAME           this run; several may be given
    python scripts/doctor.py runs                the newest run in that folder

It reads metrics.jsonl, samples.jsonl and config.json, also of a run that is still going, and verdict.json of a finished
one. The exit code is 3 if a finished run did not learn, else 1 if something was found, else 0; 2 for wrong arguments.
The rules are in runtime/run/doctor.py, which also gives a finished run its verdict; docs/evidence/doctor.md describes
them and their tests.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # scripts/plot.py

from plot import find_runs

from runtime.run.doctor import RULES, Case, examine
from runtime.run.run_files import control_of
from runtime.run.verdict import NOT_LEARNED, read_verdict

UNLEARNED = 3  # the exit code where a finished run did not learn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="runs, or a folder of runs for the newest one")
    folders = find_runs(parser.parse_args().runs)
    sick = unlearned = False
    for folder in folders:
        case = Case.of(folder)
        findings = examine(case)
        sick = sick or bool(findings)
        outcome = (read_verdict(folder) or {}).get("outcome")
        unlearned = unlearned or outcome == NOT_LEARNED
        print(f"{folder}: {len(case.metrics)} steps, {len(findings) or 'no'} finding(s) by {len(RULES)} rules")
        if control := control_of(case.metrics[-1]):
            print(f"  CONTROL {control}: what was trained on is not the verifier's reward")
        if outcome is not None:
            print(f"  verdict: {outcome}")
        for finding in findings:
            print(f"  {finding}")
    return UNLEARNED if unlearned else int(sick)


if __name__ == "__main__":
    raise SystemExit(main())

"""Check an edited copy of a training script: what its loss optimizes, what must not change it, and whether it learns.

    python scripts/check.py mine.py                          a copy of grpo.py, ppo.py or a file that stands alone
    python scripts/check.py mine.py --beta 0.1 --my_flag 3   with these flags
    python scripts/check.py mine.py --parts 1 3 --brief      only these parts; prints only notes and failures
    python scripts/check.py --loss verl:gspo                 a loss of another framework (--advantages: an estimator)
    python scripts/check.py --loss mine.py:f --like verl     a function of your own, called as verl calls it

1 what it ascends, by exact enumeration   2 what must not change the gradient   3 numbers at the edge
4 the gradient against finite differences   5 does it learn   6 do its flags do anything

A minute or two on two CPU cores, without network. Each line is ok, note (it differs from the unedited script, and may
be intended) or FAIL. Exit code: 0 without FAIL, 1 with, 2 for a file that is no such copy. Of a file that stands alone,
such as variants/grpo_min.py, parts 1 to 4 examine the loss. docs/maintainers/check.md and check_losses.md explain more.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy would start threads, which a fork lacks
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported: numbers repeat on every machine
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders are no packages
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "studies"))

from runtime.system import process


def parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options of this program and the flags of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("script", type=Path, nargs="?", help="a copy of grpo.py, ppo.py or of a file that stands alone")
    what.add_argument("--loss", help="FRAMEWORK:LOSS, a FRAMEWORK for the table of its losses, or file.py:function")
    what.add_argument(
        "--advantages", help="FRAMEWORK:ESTIMATOR of advantages, or a FRAMEWORK for all of its estimators"
    )
    parser.add_argument("--like", help="the framework that calls file.py:function")
    parser.add_argument("--source", type=Path, help="a clone or an unpacked wheel of the framework")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON to this file")
    parser.add_argument("--parts", type=int, nargs="+", choices=range(1, 7), default=range(1, 7), help="default: all")
    parser.add_argument("--brief", action="store_true", help="print only notes and failures")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--lanes", type=int, default=min(2, cores), help="runs side by side (default: %(default)s)")
    return parser.parse_known_args(words)


if __name__ == "__main__":  # --help comes before the slow imports
    chosen, flags_of_script = parse(sys.argv[1:])
    if chosen.script is not None and not chosen.script.is_file():
        process.refuse(f"{chosen.script}: no such file; give a script and its arguments: grpo.py --beta 0.03")
    process.prepare_environment("float32")
    if chosen.script is None:
        import check_any_loss as report
    else:
        import check_report as report
    raise SystemExit(report.main(chosen, flags_of_script))

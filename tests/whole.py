"""Runs every test but those of a GPU (make test-gpu): hours, in as many pieces as need be.

    make test-all                                     every file; docs/evidence/survival.md gets the result
    python tests/whole.py tests/runs/test_soak.py     one file, which the whole run need not repeat

Each file is a process of pytest, each test a line of runs/whole/COMMIT.jsonl when it begins and one when it has ended.
The same command continues where the last one was stopped. A test that ends its process has failed, and so has one that
leaves no line for --limit seconds. What either leaves behind is killed, and a new process does the rest of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runtime/ is no package that is installed

from runtime import process  # noqa: E402

KINDS = ("fast", "slow", "learn")
BEGIN, END = "<!-- whole -->\n", "<!-- /whole -->\n"  # around the result in docs/evidence/survival.md
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2): children end with this process; it inherits orphans
LIBC = ctypes.CDLL(None)
REPORTS = defaultdict(list)  # of each test: set-up, call, clean-up


def merged(records: Path) -> dict[str, dict]:
    """What is known of each test; of one that has ended also its ``outcome`` and ``seconds``."""
    tests = {}
    for line in records.read_text().splitlines() if records.exists() else []:
        found = json.loads(line)
        tests[found["test"]] = tests.get(found["test"], {}) | found
    return tests


def write(records: str, **line) -> None:
    with open(records, "a") as file:
        file.write(json.dumps(line) + "\n")


# Hooks: each process of pytest has this file as a plugin.
def pytest_collection_modifyitems(items):
    ended = {name for name, found in merged(Path(os.environ["WHOLE_RECORDS"])).items() if "outcome" in found}
    items[:] = [item for item in items if item.nodeid not in ended]


def pytest_runtest_protocol(item):
    kind = next((kind for kind in KINDS if item.get_closest_marker(kind)), "fast")
    write(os.environ["WHOLE_RECORDS"], test=item.nodeid, kind=kind)


def pytest_runtest_logreport(report):
    REPORTS[report.nodeid].append(report)
    if report.when == "teardown":
        found = {each.outcome for each in REPORTS[report.nodeid]}
        outcome = next(word for word in ("failed", "skipped", "passed") if word in found)
        seconds = round(sum(each.duration for each in REPORTS[report.nodeid]), 2)
        write(os.environ["WHOLE_RECORDS"], test=report.nodeid, outcome=outcome, seconds=seconds)


def kill_children() -> None:
    """End all that was started from here, and wait for it."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os.waitpid(-1, 0)


def run_file(file: str, records: Path, limit: float) -> int:
    """One process of pytest for the tests of a file that have not ended; its exit code, or minus the signal."""
    line = [sys.executable, "-m", "pytest", "-q", "-p", "whole", "-m", "not gpu", file]
    environment = os.environ | {"WHOLE_RECORDS": str(records), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    records.touch()
    child = subprocess.Popen(line, cwd=ROOT, env=environment, preexec_fn=lambda: LIBC.prctl(SET_PDEATHSIG, 9))
    try:
        while child.returncode is None:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended == child.pid:  # others are orphans of a test
                child.returncode = os.waitstatus_to_exitcode(status)
            elif time.time() - records.stat().st_mtime > limit:
                os.kill(child.pid, signal.SIGKILL)
            time.sleep(0 if ended else 0.1)
    finally:
        kill_children()
    return child.returncode


def finish_file(file: str, records: Path, limit: float) -> None:
    """All tests of a file, in as many processes as it takes: the test in which one ends has failed."""
    while (code := run_file(file, records, limit)) not in (0, 1, 5):  # passed, failed, nothing left
        tests = merged(records).items()
        begun = [name for name, found in tests if name.startswith(f"{file}::") and "outcome" not in found]
        write(records, test=[file, *begun][-1], outcome="failed", seconds=0, why=f"pytest ended with {code}")
        if not begun:  # the file cannot be collected
            return


def page(commit: str, tests: list[dict]) -> str:
    """The result as Markdown."""
    cpu = Path("/proc/cpuinfo").read_text()
    machine = re.findall(r"model name\s*: (.*)", cpu)[:1] + ["with AMX"] * ("amx_tile" in cpu)
    lines = [f"Commit `{commit}`, {time.strftime('%-d %B %Y')}, {' '.join(machine)}, {os.cpu_count()} cores:", ""]
    lines += ["| tests | passed | failed | skipped | seconds |", "|---|---|---|---|---|"]
    for kind in KINDS:
        own = [found for found in tests if found.get("kind", "fast") == kind]
        counts = Counter(found["outcome"] for found in own)
        seconds = sum(found["seconds"] for found in own)
        lines.append(f"| {kind} | {counts['passed']} | {counts['failed']} | {counts['skipped']} | {seconds:.0f} |")
    failed = [f"* `{found['test']}`" for found in tests if found["outcome"] == "failed"]
    return "\n".join([*lines, *(["", "Failed:", "", *failed] if failed else []), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="test files (default: all, and write the result)")
    parser.add_argument("--limit", type=float, default=3600, help="seconds a test may take (default: %(default)s)")
    args = parser.parse_args()
    LIBC.prctl(SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    commit = (process.git(ROOT, "rev-parse", "--short=10", "HEAD") or "").strip()
    diff = process.git(ROOT, "diff", "HEAD", "--", ".", ":!docs")
    commit += f"+{hashlib.sha256(diff.encode()).hexdigest()[:8]}" if diff else ""  # an edited checkout is its own
    records = ROOT / "runs" / "whole" / f"{commit}.jsonl"
    records.parent.mkdir(parents=True, exist_ok=True)
    for file in args.files or sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")):
        finish_file(file, records, args.limit)
    tests = list(merged(records).values())
    print(page(commit, tests))
    if not args.files:
        doc = ROOT / "docs" / "evidence" / "survival.md"
        before, rest = doc.read_text().split(BEGIN)
        process.write_whole(doc, f"{before}{BEGIN}{page(commit, tests)}{END}{rest.split(END)[1]}")
    return int(any(found["outcome"] == "failed" for found in tests))


if __name__ == "__main__":
    sys.exit(main())

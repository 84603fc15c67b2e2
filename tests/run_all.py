"""Runs every test but those of a GPU (make test-gpu): in as many pieces as need be, two files at the same time.

    make test-all                                                 every file; runs/all_tests/result.md gets the result
    python tests/run_all.py -m "slow or learn"                    what make test leaves out
    python tests/run_all.py tests/runs/test_fault_injection.py    one file, which the whole run need not repeat

Each file is a process of pytest, each test a line of runs/all_tests/FILE.KEY.jsonl when it begins and one when it has
ended. KEY is of all that the file's tests may read: the project without documents and other test modules. The same
command continues where the last one was stopped, and repeats nothing whose key is the same. A test that ends its
process, as pytest's time limit does it, has failed. What it leaves behind is killed, and a new process does the rest of
the file. The longest files come first, by the last column of the last result.
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

from runtime.system import git, process

KINDS = ("fast", "slow", "learn", "integration")
OUTCOMES = ("passed", "failed", "skipped")
RESULT = ROOT / "runs" / "all_tests" / "result.md"
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2): children end with this process; it inherits orphans
LIBC = ctypes.CDLL(None)
REPORTS = defaultdict(list)  # of each test: set-up, call, clean-up


def merged(records: Path) -> dict[str, dict]:
    """Return the records of each test; those that have ended also have ``outcome`` and ``seconds``."""
    tests = {}
    for line in records.read_text().splitlines() if records.exists() else []:
        found = json.loads(line)
        tests[found["test"]] = tests.get(found["test"], {}) | found
    return tests


def write(records: str | Path, **line) -> None:
    with open(records, "a") as file:
        file.write(json.dumps(line) + "\n")


# Hooks: each process of pytest has this file as a plugin.
def pytest_collection_modifyitems(items):
    ended = {name for name, found in merged(Path(os.environ["TEST_RECORDS"])).items() if "outcome" in found}
    items[:] = [item for item in items if item.nodeid not in ended]


def pytest_runtest_protocol(item):
    kind = next((kind for kind in KINDS if item.get_closest_marker(kind)), "fast")
    write(os.environ["TEST_RECORDS"], test=item.nodeid, kind=kind)


def pytest_runtest_logreport(report):
    REPORTS[report.nodeid].append(report)
    if report.when == "teardown":
        found = {each.outcome for each in REPORTS[report.nodeid]}
        outcome = next(word for word in ("failed", "skipped", "passed") if word in found)
        seconds = round(sum(each.duration for each in REPORTS[report.nodeid]), 2)
        why = "\n".join(each.longreprtext for each in REPORTS[report.nodeid])
        write(os.environ["TEST_RECORDS"], test=report.nodeid, outcome=outcome, seconds=seconds, why=why)


# A process for each file: it inherits what the file's tests leave behind.
def kill_children() -> None:
    """End all that was started from here, and wait for it."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os.waitpid(-1, 0)


def run_file(file: str, marks: str, records: Path) -> int:
    """Run the tests of a file that have not ended in one process of pytest; its exit code, or minus the signal."""
    line = [sys.executable, "-m", "pytest", "-q", "-p", "run_all", "-m", marks, file]
    environment = os.environ | {"TEST_RECORDS": str(records), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    records.touch()
    child = subprocess.Popen(line, cwd=ROOT, env=environment, preexec_fn=lambda: LIBC.prctl(SET_PDEATHSIG, 9))
    try:
        while (ended := os.waitpid(-1, 0))[0] != child.pid:  # others are orphans of a test
            pass
        child.returncode = os.waitstatus_to_exitcode(ended[1])
    finally:
        kill_children()
    return child.returncode


def finish_file(file: str, marks: str, records: Path) -> None:
    """All tests of a file, in as many processes as it takes: the test in which one ends has failed."""
    LIBC.prctl(SET_CHILD_SUBREAPER, 1)
    begun = [file]
    while begun:
        code = run_file(file, marks, records)
        begun = [name for name, found in merged(records).items() if "outcome" not in found]
        for name in begun:
            write(records, test=name, outcome="failed", seconds=0, why="the process of pytest has ended")
    if code not in (0, 1, 5):  # passed, failed, nothing left: the file cannot be collected
        write(records, test=file, outcome="failed", seconds=0, why=f"pytest ended with {code}")
    write(records, test=f"-m {marks}", outcome="ended")


# All files.
def record_paths(files: list[str]) -> dict[str, Path]:
    """Return the path of each file's records."""
    names = (git.output(ROOT, "ls-files") or "").splitlines()
    read = [name for name in names if not re.search(r"\.md$|^docs/|/test_\w+\.py$", name) and (ROOT / name).is_file()]
    digests = {name: process.file_digest(ROOT / name) for name in [*read, *files]}
    folder = ROOT / "runs" / "all_tests"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for file in files:
        key = hashlib.sha256("".join(f"{name} {digests[name]}\n" for name in [*read, file]).encode()).hexdigest()
        paths[file] = folder / f"{file.replace('/', '.')}.{key[:10]}.jsonl"
    return paths


def run_all(files: list[str], args: argparse.Namespace) -> None:
    """Each file in a process of this program, ``args.jobs`` of them at the same time."""
    line = [sys.executable, __file__, "-m", args.marks, "--jobs", "1"]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    waiting, running = list(files), {}
    try:
        while waiting or running:
            if waiting and len(running) < args.jobs:
                file = waiting.pop(0)
                running[file] = subprocess.Popen([*line, file], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
            for file in [file for file, child in running.items() if child.poll() is not None]:
                del running[file]
                print(f"{time.strftime('%H:%M:%S')}  {len(waiting) + len(running)} files left  {file}", flush=True)
            time.sleep(0.1)
    finally:
        for child in running.values():
            child.terminate()
        for child in running.values():
            child.wait()


def page(tests: list[dict]) -> str:
    """The result as Markdown."""
    commit = (git.output(ROOT, "rev-parse", "--short=10", "HEAD") or "").strip()
    edited = " with edits" if git.output(ROOT, "diff", "HEAD", "--", ".", ":!docs") else ""
    cpu = Path("/proc/cpuinfo").read_text()
    machine = re.findall(r"model name\s*: (.*)", cpu)[:1] + ["with AMX"] * ("amx_tile" in cpu)
    date = time.strftime("%-d %B %Y")
    lines = [f"Commit `{commit}`{edited}, {date}, {' '.join(machine)}, {os.cpu_count()} cores:", ""]
    lines += ["| tests | passed | failed | skipped | seconds |", "|---|---|---|---|---|"]
    for kind in KINDS:
        lines.append(counts(kind, [found for found in tests if found.get("kind", "fast") == kind]))
    failed = [f"* `{found['test']}`" for found in tests if found["outcome"] == "failed"]
    lines += ["", "Failed:", "", *failed] if failed else []
    files = defaultdict(list)
    for found in tests:
        files[found["test"].split("::")[0]].append(found)
    long = sorted(files, key=lambda file: -sum(found["seconds"] for found in files[file]))
    long = [file for file in long if any(found.get("kind", "fast") in ("slow", "learn") for found in files[file])]
    lines += ["", "Files with slow or learning tests:", ""]
    lines += ["| file | passed | failed | skipped | seconds |", "|---|---|---|---|---|"]
    return "\n".join([*lines, *[counts(f"`{file}`", files[file]) for file in long], ""])


def counts(name: str, tests: list[dict]) -> str:
    """A row of a table: how many of these tests had each outcome, and their seconds."""
    found = Counter(found["outcome"] for found in tests)
    seconds = round(sum(found["seconds"] for found in tests))
    return f"| {name} | {' | '.join(str(found[outcome]) for outcome in OUTCOMES)} | {seconds} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="test files (default: all, and write the result)")
    parser.add_argument("-m", dest="marks", default="not gpu", help="which tests, as of pytest (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="files at the same time (default: %(default)s)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    files = args.files or sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py"))
    records = record_paths(files)
    if len(args.files) == 1:
        finish_file(files[0], args.marks, records[files[0]])
    else:
        last = RESULT.read_text() if RESULT.exists() else ""
        before = dict(re.findall(r"^\| `(tests/\S+)` .* (\d+) \|$", last, re.MULTILINE))
        files.sort(key=lambda file: -int(before.get(file, 0)))
        run_all([file for file in files if f"-m {args.marks}" not in merged(records[file])], args)
    tests = [found for path in records.values() for found in merged(path).values() if found.get("outcome") in OUTCOMES]
    print(page(tests))
    if not args.files:
        process.write_whole(RESULT, page(tests))
    return int(any(found["outcome"] == "failed" for found in tests))


if __name__ == "__main__":
    sys.exit(main())

"""Runs every test but those of a GPU (make test-gpu): two files at the same time, in as many pieces as need be.

    make test-all                                                 every file; runs/all_tests/result.md gets the result
    python tests/run_all.py -m "slow or learn"                    what make test leaves out
    python tests/run_all.py tests/runs/test_fault_injection.py    one file

Each file is a process of pytest, and what it printed is in runs/all_tests/FILE.KEY.txt once it has ended. KEY is of the
marks and of all that the file's tests may read: the project without documents and other test modules. The same command
continues where the last one was stopped: it repeats no file whose key is the same, unless a test of it failed. What a
file's tests leave behind is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runtime/ is no package that is installed

from runtime.system import git, process

FOLDER = ROOT / "runs" / "all_tests"
OUTCOMES = ("passed", "failed", "error", "skipped")
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2): children end with this process; it inherits orphans
LIBC = ctypes.CDLL(None)


def kill_children() -> None:
    """End all that was started from here, and wait for it."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os.waitpid(-1, 0)


def run_file(file: str, marks: str, printed: Path) -> int:
    """Run the tests of a file in one process of pytest, which inherits what they leave behind; its exit code."""
    LIBC.prctl(SET_CHILD_SUBREAPER, 1)
    line = [sys.executable, "-m", "pytest", "-q", "-m", marks, file]
    partial = printed.with_suffix(".partial")
    with open(partial, "w") as out:
        options = {"stdout": out, "stderr": subprocess.STDOUT, "preexec_fn": lambda: LIBC.prctl(SET_PDEATHSIG, 9)}
        child = subprocess.Popen(line, cwd=ROOT, **options)
        try:
            while (ended := os.waitpid(-1, 0))[0] != child.pid:  # others are orphans of a test
                pass
            child.returncode = os.waitstatus_to_exitcode(ended[1])
        finally:
            kill_children()
    if child.returncode not in (0, 1, 5):  # passed, failed, nothing to do: a time-out has ended it, or a test
        partial.write_text(f"{partial.read_text()}\npytest ended with {child.returncode}: 1 error in 0s\n")
    partial.replace(printed)
    return child.returncode


def paths_of(files: list[str], marks: str) -> dict[str, Path]:
    """Return the path of what each file's tests print."""
    names = git.output(ROOT, "ls-files").splitlines()
    read = [name for name in names if not re.search(r"\.md$|^docs/|/test_\w+\.py$", name) and (ROOT / name).is_file()]
    digests = {name: process.file_digest(ROOT / name) for name in [*read, *files]}
    FOLDER.mkdir(parents=True, exist_ok=True)
    paths = {}
    for file in files:
        text = marks + "".join(f"{name} {digests[name]}\n" for name in [*read, file])
        key = hashlib.sha256(text.encode()).hexdigest()
        paths[file] = FOLDER / f"{file.replace('/', '.')}.{key[:10]}.txt"
    return paths


def outcomes(printed: Path) -> Counter:
    """Return how many tests had each outcome, by pytest's summary, which threads that end late may write after."""
    lines = printed.read_text().splitlines() if printed.exists() else []
    summaries = [line for line in lines if re.search(r"\d (passed|failed|error|skipped|deselected).* in [\d.]+s", line)]
    summary = summaries[-1] if summaries else "1 error"
    return Counter({word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error|skipped)", summary)})


def run_all(files: list[str], args: argparse.Namespace) -> None:
    """Each file in a process of this program, ``args.jobs`` of them at the same time."""
    line = [sys.executable, __file__, "-m", args.marks]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="test files (default: all, and write the result)")
    parser.add_argument("-m", dest="marks", default="not gpu", help="which tests, as of pytest (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="files at the same time (default: %(default)s)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    files = args.files or sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py"))
    paths = paths_of(files, args.marks)
    if len(files) == 1:
        run_file(files[0], args.marks, paths[files[0]])
        print(paths[files[0]].read_text())
    else:
        done = {file: outcomes(path) for file, path in paths.items()}
        run_all([file for file, found in done.items() if found["failed"] or found["error"]], args)
    found = {file: outcomes(path) for file, path in paths.items()}
    total = sum(found.values(), Counter())
    failed = [file for file in files if found[file]["failed"] or found[file]["error"]]
    commit = git.output(ROOT, "rev-parse", "--short=10", "HEAD").strip()
    lines = [f"Commit `{commit}`, -m '{args.marks}': " + ", ".join(f"{total[word]} {word}" for word in OUTCOMES), ""]
    text = "\n".join([*lines, *(f"* `{file}`: {paths[file]}" for file in failed), ""])
    print(text)
    if not args.files:
        process.write_whole(FOLDER / "result.md", text)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""The tests themselves: each can run, under whatever marker, and none hides another one."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import COLLECTED
from helpers import ROOT, alive, descendants, read_jsonl

FILES = sorted((ROOT / "tests").rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@functools.cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


def unknown_fixtures(item: pytest.Function) -> list[str]:
    """List the arguments of a test that are neither a fixture nor a parameter."""
    return [name for name in item.fixturenames if name != "request" and name not in item._fixtureinfo.name2fixturedefs]


def hidden_tests(tree: ast.Module) -> list[str]:
    """Names that a module defines twice at its top: pytest collects the last one alone."""
    names = Counter(node.name for node in tree.body if isinstance(node, FUNCTIONS))
    return [name for name, times in names.items() if times > 1]


def frames_waited_for(tree: ast.Module) -> set[str]:
    """Functions that a test wants to see in a run's printed stack: "in evaluate" in run.text()."""
    looks = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Compare))
    return {match[1] for look in looks if (match := re.fullmatch(r"'in (\w+)' in \w+\.text\(\)", look))}


def test_every_test_finds_its_fixtures(request):
    """Of all tests that were collected, those of other markers, too: in a run of all files, of every test there is."""
    lost = {item.nodeid: names for item in request.config.stash[COLLECTED] if (names := unknown_fixtures(item))}
    assert lost == {}


@pytest.mark.parametrize(("asked", "unknown"), [("tmp_path", []), ("nowhere", ["nowhere"])])
def test_an_unknown_fixture_is_noticed(request, asked, unknown):
    names = {}
    exec(f"def test({asked}): pass", names)
    item = pytest.Function.from_parent(request.node.parent, name="test", callobj=names["test"])
    assert unknown_fixtures(item) == unknown


def test_no_test_hides_another_one():
    """A second function of one name in a file takes the place of the first, without a word."""
    assert {path.name: hidden for path, tree in trees().items() if (hidden := hidden_tests(tree))} == {}
    assert hidden_tests(ast.parse("def test_a(): pass\ndef test_b(): pass\ndef test_a(): pass")) == ["test_a"]


def test_every_test_stands_in_a_file_that_is_collected():
    others = [path for path in FILES if not path.name.startswith("test_")]
    lost = [
        f"{path.name}: {node.name}"
        for path in others
        for node in trees()[path].body
        if isinstance(node, FUNCTIONS) and node.name.startswith(("test_", "Test"))
    ]
    assert lost == []


def test_every_frame_that_a_test_waits_for_is_a_function():
    """A slow test that waits for a function by name in a printed stack cannot pass once the function is gone."""
    sources = [path for folder in (".", "runtime", "scripts", "studies") for path in (ROOT / folder).glob("*.py")]
    known = "\n".join(path.read_text() for path in (*sources, *FILES))
    waited = {name: path.name for path, tree in trees().items() for name in frames_waited_for(tree)}
    assert waited
    assert [name for name in waited if not re.search(rf"\bdef {name}\(", known)] == []


TESTS = """
import os, signal, subprocess, sys, time
import pytest

def test_passes():
    assert not os.path.exists("broken")

def test_fails():
    raise ValueError

@pytest.mark.learn
def test_skipped():
    pytest.skip("no reason")

@pytest.mark.slow
def test_dies():
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open("left", "w").write(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.slow
def test_hangs():
    open("hangs", "w").close()
    while not os.path.exists("quick"):
        time.sleep(0.1)

def test_fails_to_clean_up(request):
    request.addfinalizer(lambda: 1 / 0)

@pytest.mark.gpu
def test_of_a_gpu():
    raise ValueError
"""
OLD = """| `tests/test_b.py` | 0 | 0 | 0 | 0 | 5 |
| `tests/test_a.py` | 0 | 0 | 0 | 0 | 9 |
"""
RESULT = """| fast | 1 | 3 | 0 | 0 | 0 |
| slow | 0 | 2 | 0 | 0 | 0 |
| learn | 0 | 0 | 1 | 0 | 0 |

Failed:

* `tests/test_a.py::test_fails`
* `tests/test_a.py::test_dies`
* `tests/test_a.py::test_hangs`
* `tests/test_a.py::test_fails_to_clean_up`
* `tests/test_b.py`

Files with slow or learning tests:

| file | passed | failed | skipped | seconds | CPU |
|---|---|---|---|---|---|
| `tests/test_a.py` | 1 | 4 | 1 | 0 | 0 |
"""


@pytest.mark.slow
def test_a_whole_run_goes_on_after_tests_that_die_and_after_its_own_end(tmp_path):
    """Each test has one line of outcome; nothing is left over, also of a run that is signaled to end.

    A file whose tests have ended is run again when the project has changed, or itself, not when another test has.
    """
    for folder in ("tests", "docs", "runs/all_tests"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "run_all.py", tmp_path / "tests")
    (tmp_path / "runtime").symlink_to(ROOT / "runtime")
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)
    (tmp_path / "tests" / "test_b.py").write_text("import nowhere")
    (tmp_path / "runs" / "all_tests" / "result.md").write_text(OLD)
    (tmp_path / "docs" / "page.txt").write_text("a page\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  slow\n  learn\n  gpu\n")
    (tmp_path / "grpo.py").write_text("")
    for words in (["init", "-q"], ["add", "--all"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    environment = os.environ | {"PYTHONPATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    line = [sys.executable, "tests/run_all.py", "--limit"]
    first = subprocess.Popen([*line, "60"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / "hangs").exists():
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    seen = descendants(first.pid)
    first.terminate()
    assert first.wait(10) == 128 + signal.SIGTERM
    assert seen and not [pid for pid in (*seen, int((tmp_path / "left").read_text())) if alive(pid)]
    (tmp_path / "broken").touch()  # what has passed is not run again
    second = subprocess.run([*line, "8"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert second.returncode == 1, second.stderr
    page = (tmp_path / "runs" / "all_tests" / "result.md").read_text()
    assert page.startswith("Commit ") and page.endswith(RESULT), page
    (record,) = (tmp_path / "runs" / "all_tests").glob("tests.test_a.py.*.jsonl")
    ended = [line for line in read_jsonl(record) if "outcome" in line]
    assert len(ended) == 6 and "ValueError" in ended[1]["why"]
    assert [line["why"] for line in ended if "ended with" in line["why"]] == ["pytest ended with -9"] * 2
    (tmp_path / "quick").touch()
    for changed, again in (("tests/test_b.py", 1), ("grpo.py", 2), ("docs/page.txt", 0)):
        text = (tmp_path / changed).read_text()
        (tmp_path / changed).write_text(text.replace("import nowhere", "") + "\n")
        third = subprocess.run([*line, "60"], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert third.stdout.count(" files left ") == again, third.stdout

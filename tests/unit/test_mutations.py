"""tests/mutations.py: what it draws, and that it tells what tests notice, what they do not, and what hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import mutations
import pytest
from helpers import ROOT, script
from mutations import FILES, draw, mutations_of

# A third of the code: to find all mutations of a file takes longer than to draw from them.
SOURCES = {file: (ROOT / file).read_bytes() for file in FILES[::3]}


@pytest.fixture(scope="module")
def everything():
    return {file: mutations_of(file, source) for file, source in SOURCES.items()}


def test_a_seed_draws_the_same_in_proportion_to_the_code(everything):
    """At most one a line; what a file has of the draw is what it has of the lines, to a mutation."""
    drawn = draw(SOURCES, 200, seed=5)
    assert [m.key for m in drawn] == [m.key for m in draw(SOURCES, 200, seed=5)]
    assert [m.key for m in drawn] != [m.key for m in draw(SOURCES, 200, seed=6)]
    assert len({(m.file, m.line) for m in drawn}) == 200
    lines = {file: len({m.line for m in found}) for file, found in everything.items()}
    for file, count in Counter(m.file for m in drawn).items():
        assert abs(count - 200 * lines[file] / sum(lines.values())) < 1


def test_every_kind_is_drawn_and_compiles(everything):
    """Every fiftieth mutation of each file is another program that Python reads."""
    for file, found in everything.items():
        for mutation in found[::50]:
            mutated = mutation.apply(SOURCES[file])
            assert mutated != SOURCES[file]
            compile(mutated, file, "exec")
    assert {m.kind for found in everything.values() for m in found} == {
        *("comparison", "operator", "and, or", "sign, not", "constant", "off by one", "swapped arguments"),
        *("condition", "dropped statement", "dropped value"),
    }


def test_messages_annotations_and_docstrings_are_left_alone():
    source = b'def f(a: int = 3) -> "int":\n    """1 + 1"""\n    raise ValueError(f"{a + 1}", 2 + 2)\n'
    assert [m.text for m in mutations_of("f.py", source)] == ["4", "2", "pass"]


PROGRAM = """
def bounded(x):
    if x > 10:
        return 10
    return x

def count(n):
    while n > 0:
        n -= 1
    return n

def untested(x):
    return x + 1

def elsewhere(x):
    return x * 8
"""
TESTS = """
import utils

def test_bounded():
    assert utils.bounded(3) == 3 and utils.bounded(20) == 10

def test_count():
    assert utils.count(3) == 0
"""


@pytest.mark.slow
def test_killed_survived_and_hanging_are_told_apart(tmp_path):
    """On a project of two files, in the way of a real draw: traced, forked, judged, written, continued, reported."""
    project = tmp_path / "project"
    (project / "tests" / "unit").mkdir(parents=True)
    (project / "utils.py").write_text(PROGRAM)
    bounded, count = TESTS.split("\n\n", 2)[1:]
    (project / "tests" / "unit" / "test_utils.py").write_text(f"import utils\n\n{bounded}")
    (project / "tests" / "runs").mkdir()
    (project / "tests" / "runs" / "test_count.py").write_text(f"import utils\n\n{count}")
    program_of_its_own = [sys.executable, "-c", "import utils; assert utils.elsewhere(3) == 24"]
    (project / "tests" / "runs" / "test_program.py").write_text(
        f"import subprocess\n\ndef test_elsewhere():  # in utils.py\n"
        f"    subprocess.run({program_of_its_own}, check=True)\n"
    )
    (project / "runs").mkdir()
    (project / "runs" / "test_left.py").write_text("raise RuntimeError('a folder of results was copied')")
    (project / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    program = tmp_path / "draw.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from pathlib import Path\n"
        "import mutations as r\n"
        f"r.ROOT = Path({str(project)!r})\n"
        "r.EQUIVALENT = r.ROOT / 'equivalent.jsonl'\n"
        "r.HEAVY = ()\n"
        "r.START = 1.0\n"
        "print(r.run(8, 31, r.ROOT / 'results', 10.0))\n"
    )
    first = subprocess.run(script(str(program)), capture_output=True, text=True, timeout=120)
    assert first.returncode == 0, first.stdout + first.stderr
    results = {}
    for line in (project / "results" / "mutations-8-31.jsonl").read_text().splitlines():
        entry = json.loads(line)
        results[entry["mutation"].partition(": ")[2]] = (entry["state"], entry["by"])
    states = {key: state for key, (state, _) in results.items()}
    assert states["n -= 1 => pass"] == "killed" and results["n -= 1 => pass"][1] == "time limit"
    survivors = {key for key, state in states.items() if state == "survived"}
    assert survivors and all("x + 1" in key or "x > 10" in key for key in survivors), results
    assert sum(state == "killed" for state in states.values()) >= 4
    assert {state for key, state in states.items() if "x * 8" in key} == {"killed"}, "by a test that runs none of it"
    assert first.stdout.splitlines()[-1] == str(len(survivors))
    key = next(key for key in survivors if "x + 1" in key)
    (project / "equivalent.jsonl").write_text(json.dumps({"mutation": f"utils.py untested: {key}", "why": "x"}) + "\n")
    second = subprocess.run(script(str(program)), capture_output=True, text=True, timeout=120)
    assert second.stdout.splitlines()[-1] == str(len(survivors) - 1), second.stdout + second.stderr
    assert " by " not in second.stdout, "nothing is tried twice"


def test_every_known_bug_applies_and_is_python():
    sources = {file: (ROOT / file).read_bytes() for file in FILES}
    assert len(mutations.known(sources)) > 30


def test_equivalent_mutations_name_mutations_that_are_there():
    """Each has its reason; one whose line has changed is to be looked at again."""
    entries = mutations.read_lines(mutations.EQUIVALENT)
    files = {entry["mutation"].split()[0] for entry in entries}
    known = {m.key for file in files for m in mutations_of(file, (ROOT / file).read_bytes())}
    for entry in entries:
        assert entry["mutation"] in known, entry["mutation"]
        assert len(entry["why"]) > 20

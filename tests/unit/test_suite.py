"""The tests themselves: each can run, under whatever marker, and none hides another one."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest
from conftest import COLLECTED
from helpers import ROOT

FILES = sorted((ROOT / "tests").rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def unknown_fixtures(item: pytest.Function) -> list[str]:
    """What a test asks for, and neither a fixture nor a parameter gives."""
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
    assert {path.name: hidden for path, tree in TREES.items() if (hidden := hidden_tests(tree))} == {}
    assert hidden_tests(ast.parse("def test_a(): pass\ndef test_b(): pass\ndef test_a(): pass")) == ["test_a"]


def test_every_test_stands_in_a_file_that_is_collected():
    others = [path for path in FILES if not path.name.startswith("test_")]
    lost = [
        f"{path.name}: {node.name}"
        for path in others
        for node in TREES[path].body
        if isinstance(node, FUNCTIONS) and node.name.startswith(("test_", "Test"))
    ]
    assert lost == []


def test_every_frame_that_a_test_waits_for_is_a_function():
    """A slow test that waits for a function by name in a printed stack cannot pass once the function is gone."""
    sources = [path for folder in (".", "runtime", "scripts") for path in (ROOT / folder).glob("*.py")]
    known = "\n".join(path.read_text() for path in (*sources, *FILES))
    waited = {name: path.name for path, tree in TREES.items() for name in frames_waited_for(tree)}
    assert "evaluate" in waited
    assert [name for name in waited if not re.search(rf"\bdef {name}\(", known)] == []

"""The tests themselves: each can run, under whatever marker, and stands in a file that is collected."""

from __future__ import annotations

import ast

import pytest
from conftest import COLLECTED
from helpers import ROOT

FILES = sorted((ROOT / "tests").rglob("*.py"))
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def unknown_fixtures(item: pytest.Function) -> list[str]:
    """List the arguments of a test that are neither a fixture nor a parameter."""
    return [name for name in item.fixturenames if name != "request" and name not in item._fixtureinfo.name2fixturedefs]


def test_every_test_finds_its_fixtures(request):
    """Of all tests that were collected, those of other markers, too: in a run of all files, of every test there is."""
    lost = {item.nodeid: names for item in request.config.stash[COLLECTED] if (names := unknown_fixtures(item))}
    assert lost == {}


def test_every_test_stands_in_a_file_that_is_collected():
    others = [path for path in FILES if not path.name.startswith("test_")]
    lost = [
        f"{path.name}: {node.name}"
        for path in others
        for node in ast.parse(path.read_text()).body
        if isinstance(node, FUNCTIONS) and node.name.startswith(("test_", "Test"))
    ]
    assert lost == []

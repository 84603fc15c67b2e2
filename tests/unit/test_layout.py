"""Levels, limits and cycles: studies/shape.py."""

from __future__ import annotations

import ast

import pytest
import shape
from helpers import ROOT


@pytest.mark.integration
def test_packages_keep_their_levels():
    """Imports go down only, stand at the top of a file, and form no cycle."""
    assert shape.layout_errors() == []


def test_everything_is_within_its_limit():
    """The limits are those of the entire project; a change that needs room takes room first."""
    assert {name: number for name, number in shape.totals().items() if number > shape.TOTALS[name]} == {}


def test_each_package_states_its_level():
    """The docstring of a package is where a reader looks for it; shape.py is what checks it."""
    packages = {
        path.parent.name: ast.get_docstring(ast.parse(path.read_text())) for path in ROOT.glob("runtime/*/__init__.py")
    }
    for name, text in packages.items():
        (level,) = [number for number, names in enumerate(shape.LEVELS, 1) if f"runtime.{name}" in names]
        assert f"Level {level}: " in text

"""Levels, limits and cycles (studies/shape.py), and programs that find the modules they import."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
import shape
from helpers import ROOT

SEARCHED = (ast.Expr, ast.Assign, ast.Import, ast.ImportFrom)  # statements that concern the search path for modules


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


@functools.cache
def statements(program: Path) -> list[tuple[ast.stmt, str]]:
    """The statements at the top of a file that can change or use the search path for modules, with their texts."""
    found = [(node, ast.unparse(node)) for node in ast.parse(program.read_text()).body if isinstance(node, SEARCHED)]
    return [(node, text) for node, text in found if not isinstance(node, ast.Expr) or text.startswith("sys.path.")]


def lost_imports(program: Path, found: list[Path] | None = None) -> list[str]:
    """Modules of the project that a program imports at its top from where Python does not look.

    found: the folders in which it looks, to which ``sys.path.insert`` of the program and of its imports add.
    """
    found = [program.parent] if found is None else found
    folders = (ROOT, ROOT / "scripts", ROOT / "studies")
    values: dict[str, object] = {"Path": Path, "__file__": str(program), "str": str}
    lost = []
    for node, text in statements(program):
        if text.startswith("sys.path.insert("):
            found.append(Path(eval(ast.unparse(node.value.args[1]), values)))
        elif isinstance(node, ast.Assign) and "__file__" in text:
            values[node.targets[0].id] = eval(ast.unparse(node.value), values)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            for name in (name.split(".")[0] for name in names):
                places = [place for place in folders if (place / f"{name}.py").exists() or (place / name).is_dir()]
                if places and not set(places) & set(found):
                    lost.append(name)
                elif places and (places[0] / f"{name}.py").exists():
                    lost += lost_imports(places[0] / f"{name}.py", found)
    return lost


def test_every_program_finds_its_modules_by_itself():
    """Tests call most of them in their own process, which looks in all the folders."""
    files = [path for folder in ("scripts", "studies") for path in (ROOT / folder).glob("*.py")]
    programs = [path for path in files if "__main__" in path.read_text()]
    lost = {path.name: names for path in programs if (names := lost_imports(path))}
    assert len(programs) > 20 and lost == {}

"""Packages, levels, budgets and cycles (studies/shape.py), and programs that find the modules they import."""

from __future__ import annotations

import ast
import functools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import shape
from helpers import ROOT

SEARCHED = (ast.Expr, ast.Assign, ast.Import, ast.ImportFrom)  # statements that concern the search path for modules


@pytest.fixture
def copy(tmp_path) -> Path:
    """A copy of the Python files of the top level, of runtime/ and of graders/."""
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    for name in ("runtime", "graders"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.mark.integration
def test_packages_keep_their_levels_and_budgets():
    """Imports go down only, stand at the top of a file, and form no cycle; no package is over its line budget."""
    assert shape.layout_errors() == []


def test_each_package_states_its_level_and_budget():
    """The docstring of a package is where a reader looks for them; shape.py is what checks them."""
    packages = {
        path.parent.name: ast.get_docstring(ast.parse(path.read_text())) for path in ROOT.glob("runtime/*/__init__.py")
    }
    assert {f"runtime/{name}" for name in packages} == {name for name in shape.BUDGETS if name.startswith("runtime/")}
    assert len(packages) == 8
    for name, text in packages.items():
        (level,) = [number for number, names in enumerate(shape.LEVELS, 1) if f"runtime.{name}" in names]
        assert f"Level {level}: " in text and f"At most {shape.BUDGETS[f'runtime/{name}']:,} lines." in text


DATA_OVER = f"its budget is {shape.BUDGETS['runtime/data']}"
MAIN = 'if __name__ == "__main__":\n    '
# (file, text appended to it, the error)
VIOLATIONS = {
    "an upward import": ("runtime/data/sources.py", "from runtime.training import batching\n", "not on a lower level"),
    "an import beside it": ("runtime/run/logger.py", "from runtime.engine import client\n", "not on a lower level"),
    "a grader that imports a run": ("graders/code/new.py", "from runtime.run import logger\n", "not on a lower level"),
    "an import of a grader": ("runtime/data/sources.py", "from graders import code\n", "not on a lower level"),
    "an import in a function": (
        "runtime/run/logger.py",
        "def late():\n    from runtime.system import process\n    return process\n",
        "inside a function",
    ),
    "a cycle in a package": ("runtime/system/redaction.py", "from runtime.system import watchdog\n", "import cycle"),
    "a cycle of a program": ("kl_estimators.py", f"{MAIN}import grpo\n", "import cycle"),
    "a module without a package": ("runtime/odds_and_ends.py", '"""Nothing."""\n', "is in no package"),
    "a package over its budget": (
        "runtime/data/new.py",
        "x = 1\n" * 3000,
        DATA_OVER,
    ),
    "a package over its budget, below": (
        "runtime/data/more/new.py",
        "x = 1\n" * 3000,
        DATA_OVER,
    ),
    "a script over its budget": ("grpo.py", "x = 1\n" * 720, "its budget is 720"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_reported(name, copy):
    file, text, error = VIOLATIONS[name]
    before = shape.layout_errors(copy)
    path = copy / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + text)
    assert before == [] and any(error in line for line in shape.layout_errors(copy))


def test_lint_fails_for_a_package_over_its_budget(copy):
    """The program that `make lint` calls ends with exit code 1 and names the package."""
    (copy / "studies").mkdir()
    shutil.copy(ROOT / "studies" / "shape.py", copy / "studies")
    (copy / "runtime" / "engine" / "new.py").write_text("x = 1\n" * 3000)
    done = subprocess.run([sys.executable, copy / "studies" / "shape.py"], capture_output=True, text=True)
    assert done.returncode == 1 and "OVER: runtime/engine: " in done.stdout
    (copy / "runtime" / "engine" / "new.py").unlink()
    assert shape.layout_errors(copy) == []


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


@pytest.mark.integration
def test_each_test_file_can_be_run_alone():
    """Helpers shared between directories are in tests/: a test file of another directory is found only by luck."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        names |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
        for name in names:
            if name and name.startswith("test_"):
                assert (path.parent / f"{name}.py").exists(), f"{path} imports {name} of another directory"

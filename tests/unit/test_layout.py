"""Levels, limits and cycles (studies/shape.py), and programs that find the modules they import."""

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
    for folder in ("graders", "runtime"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


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


MAIN = 'if __name__ == "__main__":\n    '
# (file, text appended to it, the error)
VIOLATIONS = {
    "an upward import": ("runtime/data/sources.py", "from runtime.training import batching\n", "not on a lower level"),
    "an import beside it": ("runtime/run/logger.py", "from runtime.engine import client\n", "not on a lower level"),
    "a grader of a run": ("graders/text.py", "from runtime.data import samples\n", "not on a lower level"),
    "an import in a function": (
        "runtime/run/logger.py",
        "def late():\n    from runtime.system import process\n    return process\n",
        "inside a function",
    ),
    "a cycle in a package": ("runtime/system/redaction.py", "from runtime.system import watchdog\n", "import cycle"),
    "a cycle of a program": ("kl_estimators.py", f"{MAIN}import grpo\n", "import cycle"),
    "a module without a package": ("runtime/odds_and_ends.py", '"""Nothing."""\n', "is in no package"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_reported(name, copy):
    file, text, error = VIOLATIONS[name]
    before = shape.layout_errors(copy)
    path = copy / file
    path.parent.mkdir(exist_ok=True)
    path.write_text((path.read_text() if path.exists() else "") + text)
    assert before == [] and any(error in line for line in shape.layout_errors(copy))


def test_lint_fails_above_a_limit(copy):
    """The program that `make lint` calls ends with exit code 1 and names the part; what git ignores does not count."""
    (copy / "studies").mkdir()
    shutil.copy(ROOT / "studies" / "shape.py", copy / "studies")
    (copy / ".gitignore").write_text("runtime/ignored.py\n")
    (copy / "runtime" / "engine" / "new.py").write_text("x = 1\n" * 11000)
    (copy / "runtime" / "ignored.py").write_text("x = 1\n" * 11000)
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)
    done = subprocess.run([sys.executable, copy / "studies" / "shape.py"], capture_output=True, text=True)
    lines = shape.totals()["runtime"] + 11000
    assert done.returncode == 1 and f"OVER: runtime: {lines}, the limit is 11000" in done.stdout


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

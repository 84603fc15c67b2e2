"""Imports go one way: scripts and tests -> grpo, ppo -> utils, rewards, kl_estimators -> runtime."""

from __future__ import annotations

import ast
from pathlib import Path

from helpers import ROOT

TOP = {"grpo", "ppo", "utils", "rewards", "kl_estimators"}
# What each room may import; a room stands below all that import it.
RANKS = [
    {"runtime.libraries"},
    {"runtime.process", "runtime.records", "runtime.answers", "runtime.constraints", "runtime.gym_tasks"},
    {"runtime.sandbox", "runtime.sources", "runtime.data", "runtime.batching", "runtime.watchdog"},
    {"runtime.flags"},
    {"runtime.identity"},
    {"runtime.rundir", "runtime.runlog", "runtime.checkpoints"},
    {"kl_estimators", "rewards"},
    {"utils"},
    {"grpo", "ppo"},
]


def module_files() -> dict[str, Path]:
    files = {name: ROOT / f"{name}.py" for name in TOP}
    return files | {f"runtime.{path.stem}": path for path in (ROOT / "runtime").glob("[a-z]*.py")}


def project_imports(path: Path) -> list[tuple[str, bool]]:
    """(module of the project, whether a function imports it) for each import in a file."""
    tree = ast.parse(path.read_text())
    inside = {id(node) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.Lambda) for node in ast.walk(f)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "runtime":
            names = [f"runtime.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        else:
            continue
        found += [(name, id(node) in inside) for name in names if name in TOP or name.split(".")[0] == "runtime"]
    return found


def test_no_module_imports_one_of_its_own_rank_that_imports_it_back_or_one_above():
    """The order of RANKS is a proof that there is no circle; within a rank the imports themselves must form none."""
    rank = {name: i for i, names in enumerate(RANKS) for name in names}
    files = module_files()
    assert set(files) == set(rank), "a module without a room, or a room without its module"
    edges = {name: {target for target, _ in project_imports(path)} for name, path in files.items()}
    upward = [(a, b) for a, targets in edges.items() for b in targets if rank[b] > rank[a]]
    assert not upward
    back = [(a, b) for a, targets in edges.items() for b in targets if a in edges[b]]
    assert not back

"""Imports go one way: scripts and tests -> grpo, ppo -> utils, rewards, kl_estimators -> runtime."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

from helpers import ROOT

TOP = {"grpo", "ppo", "utils", "rewards", "kl_estimators"}
# What each room may import; a room stands below all that import it.
RANKS = [
    {"runtime.redaction"},
    {"runtime.libraries"},
    {
        "runtime.process",
        "runtime.network",
        "runtime.records",
        "runtime.answers",
        "runtime.algebra",
        "runtime.units",
        "runtime.constraints",
        "runtime.gym_tasks",
        "runtime.cpu_norms",
        "runtime.machine",
    },
    {
        "runtime.presets",
        "runtime.foreign",
        "runtime.sandbox",
        "runtime.sources",
        "runtime.data",
        "runtime.batching",
        "runtime.watchdog",
    },
    {"runtime.flags", "runtime.elastic", "runtime.workers"},
    {"runtime.identity", "runtime.attention", "runtime.memory"},
    {"runtime.rundir", "runtime.runlog", "runtime.checkpoints", "runtime.recorder", "runtime.weights"},
    {"kl_estimators", "rewards", "runtime.dedicated", "runtime.start"},
    {"runtime.engine"},
    {"utils"},
    {"grpo", "ppo"},
]


def module_files() -> dict[str, Path]:
    files = {name: ROOT / f"{name}.py" for name in TOP}
    return files | {f"runtime.{path.stem}": path for path in (ROOT / "runtime").glob("[a-z]*.py")}


def project_imports(path: Path) -> list[tuple[str, bool]]:
    """(module of the project, whether a function imports it) for each import in a file, as long as it is no program."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "__main__" in ast.dump(node.test))]
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


def test_imports_go_downward_in_no_circle_and_stand_at_the_top():
    """No module imports one above it, or inside a function; there is an order in which each follows what it imports."""
    rank = {name: i for i, names in enumerate(RANKS) for name in names}
    files = module_files()
    assert set(files) == set(rank), "a module without a room, or a room without its module"
    found = {name: project_imports(path) for name, path in files.items()}
    assert not [(a, b) for a, imports in found.items() for b, _ in imports if rank[b] > rank[a]], "upward"
    assert not [(a, b) for a, imports in found.items() for b, inside in imports if inside], "inside a function"
    edges = {name: {target for target, _ in imports} for name, imports in found.items()}
    order = tuple(graphlib.TopologicalSorter(edges).static_order())  # raises CycleError
    assert set(order) >= set(files)

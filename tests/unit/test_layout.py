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
    {"runtime.libraries", "runtime.git"},
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
        "runtime.reading",
        "runtime.user_files",
    },
    {
        "runtime.presets",
        "runtime.foreign",
        "runtime.sandbox",
        "runtime.sources",
        "runtime.data",
        "runtime.batching",
        "runtime.watchdog",
        "runtime.findings",
        "runtime.environments",
    },
    {"runtime.flags", "runtime.elastic", "runtime.workers", "runtime.verdict", "runtime.chat"},
    {"runtime.identity", "runtime.attention", "runtime.memory", "runtime.episodes"},
    {"runtime.fitting", "runtime.defaults"},
    {"runtime.rundir", "runtime.runlog", "runtime.checkpoints", "runtime.weights"},
    {"kl_estimators", "rewards", "runtime.dedicated", "runtime.apart", "runtime.start"},
    {"runtime.engine"},
    {"utils"},
    {"grpo", "ppo"},
]


def module_files() -> dict[str, Path]:
    files = {name: ROOT / f"{name}.py" for name in TOP}
    return files | {f"runtime.{path.stem}": path for path in (ROOT / "runtime").glob("[a-z]*.py")}


def project_imports(path: Path) -> list[tuple[str, bool]]:
    """(module of the project, whether a function imports it) for each import in a file, also under ``__main__``."""
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


def lost_imports(program: Path, found: list[Path] | None = None) -> list[str]:
    """Modules of the project that a program imports at its top from where Python does not look.

    found: the folders in which it looks, to which ``sys.path.insert`` of the program and of its imports add.
    """
    found = [program.parent] if found is None else found
    folders = (ROOT, ROOT / "scripts", ROOT / "studies")
    values: dict[str, object] = {"Path": Path, "__file__": str(program), "str": str}
    lost = []
    for node in ast.parse(program.read_text()).body:
        text = ast.unparse(node)
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
    programs = [path for folder in ("scripts", "studies") for path in (ROOT / folder).glob("*.py")]
    lost = {path.name: names for path in programs if (names := lost_imports(path))}
    assert len(programs) > 20 and lost == {}

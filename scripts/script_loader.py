"""A training script as a module: its arguments alone, without torch, or whole, without running it."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime.system import process


def load_arguments(path: Path) -> ModuleType:
    """Load a training script as a module, up to its class Args: the rest imports torch, which takes seconds.

    Any file with a dataclass Args will do, such as an edited copy of grpo.py. Exits with code 2 for another file.
    """
    check(path)
    tree = ast.parse(path.read_text())
    names = top_level(tree)
    if "Args" not in names:
        process.refuse(f"{path} has no dataclass Args, so its arguments cannot be read")
    module = ModuleType(f"arguments_{path.stem}")  # beside the whole script, which others import by its name
    module.__file__ = str(path.resolve())
    module.__doc__ = ast.get_docstring(tree)
    sys.modules[module.__name__] = module  # where dataclasses look up the annotations
    sys.path.insert(0, str(path.resolve().parent))
    head = ast.Module(tree.body[: names.index("Args") + 1], [])
    exec(compile(head, path, "exec"), vars(module))
    return module


def check(path: Path) -> None:
    """Exit with code 2 where a path is no script's."""
    if path.suffix != ".py" or not path.is_file():
        wrong = "is not a script" if path.exists() else "no such file"
        process.refuse(f"{path}: {wrong}; give a script and its arguments: grpo.py --beta 0.03")


def top_level(tree: ast.Module) -> list[str]:
    """Return the name that each statement of a module defines; "" for one that defines no class and no function."""
    return [getattr(node, "name", "") for node in tree.body]


def load_script(path: Path, needed: Sequence[str]) -> ModuleType:
    """Import a training script from its file. Exits with code 2 if it lacks one of the names ``needed``."""
    check(path)
    name = f"loaded_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up the annotations of Args
    spec.loader.exec_module(module)
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        process.refuse(f"{path} has no {', '.join(missing)}: it is not a copy of grpo.py or ppo.py")
    return module

"""Modules of other frameworks, read from their wheels or sources without what these depend on.

Only the modules that are asked for run. All else that they import is a placeholder, but for the libraries in REAL; what
is called needs no placeholder to compute.
"""

from __future__ import annotations

import builtins
import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

REAL = {*sys.stdlib_module_names, "torch", "numpy", "pydantic", "transformers"}


class Anything:
    """Stands for an object of an absent module: it is false, and as annotation, base or decorator changes nothing."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *given: Any, **named: Any) -> Any:
        decorates = len(given) == 1 and not named and (inspect.isfunction(given[0]) or inspect.isclass(given[0]))
        return given[0] if decorates else Anything()

    def __getitem__(self, key: Any) -> Anything:
        return self

    def __or__(self, other: Any) -> Anything:
        return self

    __ror__ = __or__

    def __iter__(self):
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, bases: tuple) -> tuple:
        return ()


class Placeholder(ModuleType):
    """A module that has whatever is asked of it."""

    __getattr__ = Anything.__getattr__


class Framework:
    """The modules of one version of a framework, from these folders or as installed; only those asked for run."""

    def __init__(self, folders: Sequence[Path], asked: tuple[str, ...]):
        self.folders = folders or [Path(folder) for folder in sys.path]
        self.asked = asked
        self.names = {one.split(".")[0] for one in asked}
        self.modules: dict[str, ModuleType] = {}

    def file(self, name: str) -> Path | None:
        """Return the file of a module that is asked for, or its folder if it has only that, or None."""
        if any(f"{name}.".startswith(f"{one}.") for one in self.asked):
            for folder in self.folders:
                path = folder.joinpath(*name.split("."))
                for file in (path.with_suffix(".py"), path / "__init__.py", path):
                    if file.exists():
                        return file
        return None

    def load(self, name: str) -> ModuleType:
        """Return a module of the framework. ImportError: it has no such file."""
        if self.file(name) is None:
            raise ImportError(f"no file of {name} in {', '.join(map(str, self.folders))}")
        return self.module(name)

    def module(self, name: str) -> ModuleType:
        """Return a module that has run, or a placeholder. A user's file can import those of the framework, too."""
        package, _, child = name.rpartition(".")
        parent = self.module(package) if package else None  # which may import this module
        if name in self.modules:
            return self.modules[name]
        file = self.file(name)
        has_code = file is not None and file.is_file()
        module = ModuleType(name) if has_code else Placeholder(name)
        self.modules[name] = module
        if name.split(".")[0] in self.names:
            sys.modules[name] = module
        if parent is not None:
            setattr(parent, child, module)
        if has_code:
            own = vars(builtins) | {"__import__": self.imported}
            module.__package__ = name if file.name == "__init__.py" else package
            vars(module).update(__file__=str(file), __builtins__=own)
            exec(compile(file.read_text(), file, "exec"), vars(module))
        return module

    def imported(self, name: str, globals: dict, locals: Any = None, names: tuple = (), level: int = 0) -> ModuleType:
        """Import for a module of the framework: the function that an import statement calls."""
        if level:
            name = importlib.util.resolve_name("." * level + name, globals["__package__"])
        if name.startswith("torch_"):  # of another device, which a framework tries to import
            raise ImportError(name)
        if name.split(".")[0] in REAL:
            module = builtins.__import__(name, globals, locals, names)
            if all(hasattr(module, one) for one in names or () if one != "*"):
                return module  # otherwise it is of another version
        module = self.module(name)
        for child in names or ():
            if self.file(f"{name}.{child}"):
                self.module(f"{name}.{child}")
        return module if names else self.module(name.split(".")[0])


def fit(function: Callable, **known: Any) -> Any:
    """Call a function with those of these arguments that it takes: versions of a framework differ in them."""
    taken = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return function(**known)
    return function(**{name: value for name, value in known.items() if name in taken})


def scalar_of(result: Any) -> Any:
    """Return the loss of what a loss function returns: itself, or the first of several values."""
    return result[0] if isinstance(result, tuple) else result


def defaults_of(kind: type, **changes: Any) -> SimpleNamespace:
    """Return the default settings of a dataclass, without what its __post_init__ does, and with these changes."""
    found = {}
    for field in dataclasses.fields(kind):
        is_made = field.default_factory is not dataclasses.MISSING
        found[field.name] = field.default_factory() if is_made else field.default
    return SimpleNamespace(**found | changes)

"""Modules of other frameworks, imported from their wheels or sources without what these depend on.

A module that a framework imports and that is absent is replaced by a placeholder; what is called is the framework's own
file, and none of it needs a placeholder to compute.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
from pathlib import Path
from typing import Any


class Anything:
    """Stands for an object of an absent module: it is false, and as annotation, base or decorator changes nothing."""

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *given: Any, **named: Any) -> Any:
        is_decorated = len(given) == 1 and not named and (inspect.isfunction(given[0]) or inspect.isclass(given[0]))
        return given[0] if is_decorated else Anything()

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


class Placeholder(types.ModuleType):
    """A module that has whatever is asked of it, for modules that a framework imports and we do not call."""

    __path__: list[str] = []  # noqa: RUF012  # makes it a package

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds placeholders for absent modules, and for those modules of a framework that are not asked for."""

    def __init__(self):
        self.absent: set[str] = set()
        self.asked: dict[str, tuple[str, ...]] = {}  # framework -> the modules that are imported, with what is in them
        self.folders: list[str] = []

    def find_spec(self, name: str, path=None, target=None):
        if any(f"{name}.".startswith(f"{absent}.") for absent in self.absent):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        asked = self.asked.get(name.split(".")[0], ())
        if not asked or any(f"{name}.".startswith(f"{one}.") for one in asked):
            return None
        spec = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if any(one.startswith(f"{name}.") for one in asked):  # a package on the way, without its __init__.py
            places = [str(Path(folder, *name.split("."))) for folder in [*self.folders, *sys.path]]
            spec.submodule_search_locations = [place for place in places if Path(place).is_dir()]
        return spec

    def create_module(self, spec):
        module = Placeholder(spec.name)
        module.__path__ = spec.submodule_search_locations
        return module

    def exec_module(self, module):
        pass


FINDER = Finder()


def forget(framework: str) -> None:
    """Remove the modules of a framework, so that another version of it can be imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == framework]:
        del sys.modules[name]


def load(
    name: str,
    folders: tuple[Path, ...] = (),
    asked: tuple[str, ...] = (),
    hidden: tuple[str, ...] = (),
) -> types.ModuleType:
    """Import a module of a framework, from these folders first, with placeholders for absent modules.

    ``asked``: of the framework only these modules, and what is in them, are imported; its others are placeholders.
    Without it all are. ``hidden``: libraries that are not called, and so need not be imported, unless they are already.
    ImportError: the module itself is absent.
    """
    framework = name.split(".")[0]
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)
    FINDER.asked[framework] = asked
    FINDER.folders = [str(folder) for folder in folders]
    sys.path[:0] = [folder for folder in FINDER.folders if folder not in sys.path]
    importlib.invalidate_caches()
    unused = {library for library in hidden if library not in sys.modules} - FINDER.absent
    FINDER.absent |= unused
    try:
        return import_with_placeholders(name, framework)
    finally:
        FINDER.absent -= unused
        for library in unused:
            forget(library)


def import_with_placeholders(name: str, framework: str) -> types.ModuleType:
    """Import a module again and again, with a placeholder for one more module that is absent."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name if error.name.split(".")[0] == framework else error.name.split(".")[0]
            if f"{name}.".startswith(f"{missing}.") or missing in FINDER.absent:
                raise
            FINDER.absent.add(missing)
            forget(framework)

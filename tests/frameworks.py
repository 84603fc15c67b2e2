"""Modules of other frameworks, imported from their wheels without what these depend on.

A package that a framework imports and that is absent is replaced by a placeholder; what is called is the framework's
own file, and none of it needs a placeholder to compute.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock


def install(package: str, version: str, folder: Path) -> str:
    """Install one wheel without its dependencies into a folder, unless it is there. "" or the reason why not."""
    if (folder / f"{package}-{version}.dist-info").is_dir():
        return ""
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(folder)]
    done = subprocess.run([sys.executable, *words, f"{package}=={version}"], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{package} {version} cannot be installed: {done.stderr.strip()[-300:]}"


class Placeholder(types.ModuleType):
    """A module that has whatever is asked of it, for packages that a framework imports and we do not call."""

    __path__: list[str] = []  # noqa: RUF012  # makes it a package

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds placeholders for the packages in ``names``."""

    def __init__(self):
        self.names: set[str] = set()

    def find_spec(self, name: str, path=None, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        pass


ABSENT = Absent()


def load(name: str) -> types.ModuleType:
    """A module of a framework; packages that are absent become placeholders, one after another."""
    framework = name.split(".")[0]
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name.split(".")[0]
            if missing == framework or missing in ABSENT.names:
                raise
            ABSENT.names.add(missing)
            for other in [m for m in sys.modules if m.split(".")[0] == framework]:
                del sys.modules[other]

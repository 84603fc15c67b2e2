"""Load by name what a flag asks for: users' files, each of which a run reads once, and modules of the project."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import linecache
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

texts: dict[str, str] = {}  # path -> text; a worker gets the texts that the run has read


def text_of(path: str) -> str:
    """Return the text of a file. Raises OSError, SyntaxError or UnicodeError."""
    if path not in texts:
        texts[path] = importlib.util.decode_source(Path(path).read_bytes())
    return texts[path]


@functools.cache
def load(path: str) -> ModuleType:
    """Return the module of a file. Raises whatever the file raises."""
    name = f"user file {path.replace('.', '_')}"  # not importable; without dots, since pickle splits names at dots
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
    sys.modules[name] = module  # where dataclasses look up the annotations of their fields
    folder = str(Path(path).resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for modules next to the file; last, so that it hides no other module
    try:
        text = text_of(path)
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # the lines of tracebacks
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def find(name: str) -> Any:
    """Return the object of a name: ``package.module:object`` of the project, or ``file.py:object`` of a user's file."""
    place, _, attribute = name.rpartition(":")
    module = load(place) if place.endswith(".py") else importlib.import_module(place)
    return getattr(module, attribute)

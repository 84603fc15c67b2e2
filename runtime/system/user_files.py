"""Load by name what a flag asks for: users' files, each of which a run reads once, and modules of the project."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import linecache
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from runtime.system import library_logs
from runtime.system.process import PROJECT

texts: dict[str, str] = {}  # path -> text; a worker gets the texts that the run has read
imported: dict[str, list[str]] = {}  # path -> the files that it has imported, without those of libraries
# Modules that the files of a folder have imported, by folder and name: two folders may have helpers of one name.
own: defaultdict[str, dict[str, ModuleType]] = defaultdict(dict)
active = SimpleNamespace(folder="", before=frozenset(), added=False)  # the folder whose modules can be imported
LIBRARIES = (f"{sysconfig.get_paths()['stdlib']}/", *library_logs.LIBRARIES)
folder_of = functools.cache(lambda path: str(Path(path).resolve().parent))  # asked for each row of the data


def text_of(path: str) -> str:
    """Return the text of a file. Raises OSError, SyntaxError or UnicodeError."""
    if path not in texts:
        texts[path] = importlib.util.decode_source(Path(path).read_bytes())
    return texts[path]


def file_of(module: ModuleType) -> str:
    """Return the file of a module, the folder of a package without ``__init__.py``, or "" for one of C."""
    known = getattr(module, "__dict__", {})  # to ask an alias of transformers for a file imports what may be absent
    return known.get("__file__") or next(iter(known.get("__path__", ())), "")


def enter(folder: str) -> None:
    """Let the files of a folder import the modules next to them, and no longer those next to another folder's files."""
    if folder == active.folder:
        return
    left = own[active.folder]
    for name in sys.modules.keys() - active.before:  # also what a function has imported when it was called
        if active.folder and file_of(sys.modules[name]).startswith(f"{active.folder}/"):
            left[name] = sys.modules[name]
    for name in left:
        sys.modules.pop(name, None)
    if active.added and active.folder in sys.path:
        sys.path.remove(active.folder)
    active.folder = folder
    active.before = frozenset(sys.modules)
    active.added = folder not in sys.path
    sys.modules.update(own[folder])
    if active.added:
        sys.path.append(folder)  # last, so that it hides no other module


def load(path: str) -> ModuleType:
    """Return the module of a file, with the modules next to it. Raises whatever the file raises."""
    enter(folder_of(path))
    return _load(path)


@functools.cache
def _load(path: str) -> ModuleType:
    name = f"user file {path.replace('.', '_')}"  # not importable; without dots, since pickle splits names at dots
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
    sys.modules[name] = module  # where dataclasses look up the annotations of their fields
    before = frozenset(sys.modules)
    try:
        text = text_of(path)
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # the lines of tracebacks
        exec(compile(text, path, "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    found = {}
    for key in sys.modules.keys() - before:
        file = file_of(sys.modules[key])
        own_file = str(PROJECT / key.partition(".")[0])
        if file != "" and not file.startswith((*LIBRARIES, f"{own_file}.py", f"{own_file}/")):  # the user's own
            found[key] = sys.modules[key]
    own[active.folder] |= found
    imported[path] = [file for file in map(file_of, found.values()) if file.endswith(".py")]
    return module


def find(name: str) -> Any:
    """Return the object of a name: ``package.module:object`` of the project, or ``file.py:object`` of a user's file."""
    place, _, attribute = name.rpartition(":")
    module = load(place) if place.endswith(".py") else importlib.import_module(place)
    return getattr(module, attribute)

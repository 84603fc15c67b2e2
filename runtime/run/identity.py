"""Identity of a run: its arguments and its code, and changes in them. Imports no torch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.arguments.flags import MAY_CHANGE, PRESENTATION, identity_value, is_open
from runtime.system.process import PROJECT, file_digest, versions
from runtime.system.redaction import redact_values
from runtime.training import derived_defaults
from runtime.training.model_files import files_digest

NAMED = re.compile(r"\w+(?:\.\w+)+:\w+")  # a text that is the name of an object of the project, for user_files.find


def recorded(args) -> dict[str, Any]:
    """Return the arguments in the form that a run records: as JSON, without secrets."""
    return redact_values(json.loads(json.dumps(dataclasses.asdict(args))))


def changed_arguments(theirs: dict[str, Any], args, resolved: bool = False) -> tuple[list[str], list[str]]:
    """Compare the arguments with those of an earlier run, and describe the differences in words.

    Returns two lists: the arguments that make it another run, and those that may change between the parts of one run.

    Args:
        theirs: the values with which the other run went, also of flags that it left open.
        args: compared value by value.
        resolved: flags that were left open have their values (``derived_defaults.fill``). Otherwise those that follow
            from the model are read from it, and those that only the data would tell count as equal.
    """
    theirs = redact_values(theirs)
    ours = recorded(args)
    other = []
    allowed = []
    for name, value in ours.items():
        unknown = not resolved and is_open(args, name) and value == getattr(type(args), name)
        if unknown and value != theirs.get(name):
            if name in (*derived_defaults.open_lengths(args), "total_steps"):
                continue
            value, _ = derived_defaults.by_model(args).get(name, (value, ""))
        if value != theirs.get(name):
            words = f"--{name} {theirs.get(name)} there, {value} here"
            same = name in MAY_CHANGE or identity_value(name, value) == identity_value(name, theirs.get(name))
            (allowed if same else other).append(words)
    return other, allowed


def facts(args, data: str) -> dict[str, dict[str, Any]]:
    """Return the facts that all ranks of a launch must share; ``data``: ``directory.data_digest``."""
    own = {}
    for name, value in recorded(args).items():
        if name not in PRESENTATION:
            own[f"--{name}"] = value
    digests = {"--dataset": data}
    for flag, value in own.items():
        if flag.endswith("_name_or_path") and value:
            digests[flag] = files_digest(args.model.parse(value))
    for word in own.get("--critic", ()):
        if word.startswith("model_name_or_path="):
            digests["--critic model_name_or_path"] = files_digest(args.model.parse(word.partition("=")[2]))
    return {"flag": own, "file": code_of(args), "package": versions(), "digest of": digests}


def script_of(args) -> str:
    """Return the path of the training script relative to the project: the file that defines the class of ``args``."""
    return os.path.relpath(Path(inspect.getfile(type(args))).resolve(), PROJECT)


def code_of(args) -> dict[str, str]:
    """Return the SHA-256 of the script and of each project file that it imports, by path relative to the project.

    The script is the file that defines the class of ``args``, so a copy of grpo.py counts as itself. Files of
    ``--verifier``, ``--environment`` and ``--external_lib`` count as imported, and so do helpers next to them. Imports
    are read from the source, without running it. Files are read once per process, at the start: an edit during a run is
    not code of that run.
    """
    script = (PROJECT / script_of(args)).resolve()
    flags = f"{args.verifier or ''},{args.environment or ''}"
    named = [name.rpartition(":")[0] for name in flags.split(",")]
    extra = tuple(Path(name).resolve() for name in named if name.endswith(".py"))
    return dict(_digests(script, extra, args.external_lib))


@functools.cache
def _digests(script: Path, extra: tuple[Path, ...], module: str | None) -> dict[str, str]:
    places = [script.parent, PROJECT]
    beside = [path.parent for path in extra]  # where a file of the user's finds its own helpers first
    waiting = [script, *extra]
    if module is not None:
        waiting += _module_files(module, places)
    digests = {}
    while waiting:
        path = waiting.pop()
        name = os.path.relpath(path, PROJECT)
        if name not in digests and path.is_file():
            digests[name] = file_digest(path)
            waiting += _imported_files(path, [path.parent, *places] if path.parent in beside else places)
    return dict(sorted(digests.items()))


def _imported_files(path: Path, places: list[Path]) -> Iterator[Path]:
    """Yield the files in ``places`` that the source in ``path`` imports or names for ``user_files.find``, anywhere."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # importing it will say so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module_files(alias.name, places)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
            yield from _module_files(node.value.partition(":")[0], [PROJECT])
        elif isinstance(node, ast.ImportFrom):
            start = [path.parents[node.level - 1]] if node.level > 0 else places
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if node.module else alias.name
                yield from _module_files(name, start)


def _module_files(name: str, places: list[Path]) -> list[Path]:
    """Return the files that ``import name`` runs: a module and the packages above it; none of other projects."""
    for place in places:
        files = []
        folder = place
        for part in name.split("."):
            folder = folder / part
            file = folder.with_name(f"{part}.py")
            if (folder / "__init__.py").is_file():
                files.append(folder / "__init__.py")
            elif file.is_file():
                files.append(file)
        if files:
            return files
    return []


def changed_code(theirs: dict[str, str], ours: dict[str, str]) -> list[str]:
    """Return the files that differ between two runs, in words."""
    words = []
    for name in sorted({*theirs, *ours}):
        if name not in ours:
            words.append(f"{name} is no longer part of it")
        elif name not in theirs:
            words.append(f"{name} is new")
        elif theirs[name] != ours[name]:
            words.append(f"{name} has changed")
    return words

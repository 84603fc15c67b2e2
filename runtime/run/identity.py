"""Identity of a run: its arguments, code, data and models, and changes in them. Imports no torch."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.arguments.flags import (
    MAY_CHANGE,
    PRESENTATION,
    identity_value,
)
from runtime.arguments.values import ModelName
from runtime.system import user_files
from runtime.system.process import (
    PROJECT,
    file_digest,
    versions,
)
from runtime.system.redaction import redact_values
from runtime.training.model_files import digests_of_files, files_digest

NAMED = re.compile(r"\w+(?:\.\w+)+:\w+")  # a text that is the name of an object of the project, for user_files.find


def recorded(args) -> dict[str, Any]:
    """Return the arguments in the form that a run records: as JSON, without secrets."""
    return redact_values(json.loads(json.dumps(dataclasses.asdict(args))))


def changed_arguments(theirs: dict[str, Any], args) -> tuple[list[str], list[str]]:
    """Compare the arguments with those of an earlier run, and describe the differences in words.

    Returns two lists: the arguments that make it another run, and those that may change between the parts of one run.
    Of both runs, flags that were left open have their values (``derived_defaults.fill``).
    """
    theirs = redact_values(theirs)
    other = []
    allowed = []
    for name, value in recorded(args).items():
        if value != theirs.get(name):
            words = f"--{name} {theirs.get(name)} there, {value} here"
            same = name in MAY_CHANGE or identity_value(name, value) == identity_value(name, theirs.get(name))
            (allowed if same else other).append(words)
    return other, allowed


def models_of(args) -> dict[str, ModelName]:
    """Return the models and tokenizers of a run, by the flag that names each."""
    found = {}
    for name, value in list(vars(args).items()):  # ``args.model`` adds itself to them
        if name.endswith("_name_or_path") and value:
            found[f"--{name}"] = args.model.parse(value)
    for word in getattr(args, "critic", ()):
        if word.startswith("model_name_or_path="):
            found["--critic model_name_or_path"] = args.model.parse(word.partition("=")[2])
    return found


def facts(args, data: str) -> dict[str, dict[str, Any]]:
    """Return the facts that all ranks of a launch must share; ``data``: ``directory.prompts_digest``."""
    own = {}
    for name, value in recorded(args).items():
        if name not in PRESENTATION:
            own[f"--{name}"] = value
    digests = {"--dataset": data}
    for flag, model in models_of(args).items():
        digests[flag] = files_digest(model)
    return {
        "flag": own,
        "file": code_of(args),
        "package": versions(),
        "digest of": digests,
    }


def inputs_of(args, known: dict[str, Any]) -> dict[str, Any]:
    """Return what a run reads besides its code: a digest of its data and its template, and of each file of its models.

    ``known``: the inputs of an earlier start. A file that has its size, time and first bytes is not read again.
    """
    inputs: dict[str, Any] = {"--dataset": args.data_digest}
    if args.template.text is not None:
        inputs["--chat_template"] = hashlib.sha256(args.template.text.encode()).hexdigest()
    for flag, model in models_of(args).items():
        inputs[flag] = digests_of_files(model, known.get(flag, {}))
    return inputs


def changed_inputs(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Return the inputs that differ between two starts, in words. One that was not recorded counts as equal."""
    words = []
    for flag, before in theirs.items():
        now = ours.get(flag)
        if isinstance(before, str) and before and now and before != now:
            words.append(f"{flag} has changed")
        elif isinstance(before, dict) and before and now:
            changed = [name for name in {*before, *now} if before.get(name, [0])[0] != now.get(name, [0])[0]]
            words += [f"{name} of {flag} has changed" for name in sorted(changed)]
    return words


def difference(record: dict[str, Any], args) -> str:
    """Describe how code and inputs differ from those in ``record``, a config.json or state.json; "" if they do not."""
    code = changed_code(record.get("code", {}), code_of(args))
    theirs = record.get("inputs", {})
    inputs = changed_inputs(theirs, inputs_of(args, theirs)) if theirs else []
    parts = []
    if code:
        parts.append(f"by other code: {', '.join(code[:5])}")
    if inputs:
        parts.append(f"with other inputs: {', '.join(inputs[:5])}")
    return ", and ".join(parts)


def script_of(args) -> str:
    """Return the name of the training script (``name_of``): of the file that defines the class of ``args``."""
    return name_of(Path(inspect.getfile(type(args))).resolve())


def code_of(args) -> dict[str, str]:
    """Return the SHA-256 of the script and of each file that it imports, by path: inside the project relative to it.

    The script is the file that defines the class of ``args``, so a copy of grpo.py counts as itself. Files of
    ``--verifier``, ``--environment`` and ``--external_lib`` count as imported, and so do helpers next to them. Imports
    are read from the source, without running it; what a user's file has imported in other ways counts where it was
    loaded. Files are read once per process, at the start: an edit during a run is not code of that run.
    """
    script = (PROJECT / script_of(args)).resolve()
    flags = f"{args.verifier or ''},{args.environment or ''}"
    named = [name.rpartition(":")[0] for name in flags.split(",")]
    extra = tuple(place_of(name) for name in named if name.endswith(".py"))
    loaded = tuple(Path(file) for name in named for file in user_files.imported.get(name, ()))
    return dict(_digests(script, extra, args.external_lib, loaded))


def place_of(name: str) -> Path:
    """Return the path of a user's file: as it is written inside the project, and without links outside of it.

    A copy of the project for a job has links to files that git ignores; there, they have the same name.
    """
    path = Path(os.path.abspath(name))
    return path if path.is_relative_to(PROJECT) else path.resolve()


def name_of(path: Path) -> str:
    """Return the name of a file in the code of a run, which is the same in a copy of the project at another place."""
    return str(path.relative_to(PROJECT)) if path.is_relative_to(PROJECT) else str(path)


@functools.cache
def _digests(
    script: Path, extra: tuple[Path, ...], module: str | None, loaded: tuple[Path, ...] = ()
) -> dict[str, str]:
    on_path = {f"{os.path.abspath(word)}/" for word in os.environ.get("PYTHONPATH", "").split(":") if word}
    places = [script.parent, PROJECT, *map(Path, sorted(on_path.difference(user_files.LIBRARIES)))]
    waiting = [(path, [path.parent, path.resolve().parent, *places]) for path in extra]  # helpers beside come first
    if module is not None:
        waiting += [(path, places) for path in _module_files(module, places)]
    waiting.append((script, places))
    digests = {}
    while waiting:
        path, where = waiting.pop()
        name = name_of(path)
        if name not in digests and path.is_file():
            digests[name] = file_digest(path)
            waiting += [(found, where) for found in _imported_files(path, where)]
    seen = {(PROJECT / name).resolve() for name in digests}
    digests |= {name_of(path): file_digest(path) for path in loaded if path.resolve() not in seen}
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
                name = alias.name
                if node.module:
                    name = f"{node.module}.{name}"
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
    """Return the files that differ between two runs, in words.

    A file of theirs that only loading the user's files would find counts by what it is now.
    """
    theirs = {name_of(Path(os.path.normpath(PROJECT / name))): digest for name, digest in theirs.items()}
    words = []
    for name in sorted({*theirs, *ours}):
        now = ours.get(name)
        if now is None and (PROJECT / name).is_file():
            now = file_digest(PROJECT / name)
        if now is None:
            words.append(f"{name} is no longer part of it")
        elif name not in theirs:
            words.append(f"{name} is new")
        elif theirs[name] != now:
            words.append(f"{name} has changed")
    return words

"""Presets of ``--preset NAME``: GRPO and PPO as other frameworks define them, in this project's flags.

Imports no torch. presets.toml has the values, each with its place in the framework's source, and the differences that
no flag expresses. tests/unit/arguments/test_presets.py compares advantages, losses and gradients with the frameworks'.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import tomllib
import typing
from pathlib import Path
from typing import Any, NamedTuple

from runtime.system.process import refuse


class Difference(NamedTuple):
    """Difference to a framework that no flag expresses: text, size, and the only script it concerns."""

    what: str
    size: str
    script: str = ""


class Preset(NamedTuple):
    """Defaults of another framework, as this project's flags."""

    version: str
    scripts: list[str]
    differences: list[Difference]
    flags: dict[str, Any]


def read(table: dict[str, Any]) -> Preset:
    """Build a preset from its table in presets.toml, in which "None" stands for None and a list for a tuple."""
    flags = {}
    for flag, value in table["flags"].items():
        flags[flag] = None if value == "None" else value
        if isinstance(value, list):
            flags[flag] = tuple(value)
    return Preset(**table | {"differences": [Difference(*row) for row in table["differences"]], "flags": flags})


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
PRESETS = {name: read(table) for name, table in TABLES.items()}


def script_of(cls: type) -> str:
    """Return "grpo" or "ppo", the script of a class of arguments also in an edited copy, or "" for other programs."""
    fields = {f.name for f in dataclasses.fields(cls)}  # each script has one that the other lacks
    return "grpo" if "advantage_normalization_type" in fields else "ppo" if "gae_lambda" in fields else ""


def asked_for(cls: type, words: list[str]) -> str:
    """Return the NAME of the last ``--preset NAME`` on a command line, which has one.

    Ends with exit code 2 where the script has no preset of that name, with the list of those that it has.
    """
    given = []
    for word, after in itertools.pairwise([*words, ""]):
        flag, _, value = word.partition("=")
        given += [value or after] if flag == "--preset" else []
    known = [name for name, preset in PRESETS.items() if script_of(cls) in preset.scripts]
    if not known:
        refuse("--preset is for grpo.py and ppo.py and their copies")
    if given[-1] not in known:
        note = f"; {given[-1]} is for {PRESETS[given[-1]].scripts[0]}.py" if given[-1] in PRESETS else ""
        refuse(f"--preset {given[-1]!r}: give one of {', '.join(known)}{note}")
    return given[-1]


def own_defaults(args: Any) -> dict[str, Any]:
    """Return the defaults of the script behind a copy or variant, parsed from its text (importing it takes seconds).

    Empty where that script is not next to this folder, as in a copy of the project that left it out.
    """
    file = Path(__file__).resolve().parent.parent.parent / f"{script_of(type(args))}.py"
    if not file.is_file():
        return {}
    shared = [cls for cls in type(args).__mro__ if cls.__name__ == "RunFlags"]
    found = {f.name: f.default for cls in shared for f in dataclasses.fields(cls)}
    classes = {n.name: n.body for n in ast.parse(file.read_text("utf-8")).body if isinstance(n, ast.ClassDef)}
    for line in classes["Args"]:
        if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant | ast.UnaryOp | ast.Tuple):
            found[line.target.id] = ast.literal_eval(line.value)
    return found


def settings_of(args: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (flag -> value that a preset gives this script, flag -> value of the flags that it leaves alone).

    A flag whose default differs from that of grpo.py or ppo.py is what makes a variant that variant, and keeps it.
    """
    defaults = own_defaults(args)
    hints = typing.get_type_hints(type(args))
    ours = type(args)()
    given, kept = {}, {}
    for flag, value in PRESETS[name].flags.items():
        if not hasattr(ours, flag):
            continue
        choices = typing.get_args(hints[flag]) if typing.get_origin(hints[flag]) is typing.Literal else (value,)
        default = getattr(ours, flag)
        if defaults.get(flag, default) == default and value in choices:
            given[flag] = value
        elif value != default:
            kept[flag] = value
    return given, kept


def apply(args: Any, name: str) -> Any:
    """Return a copy of ``args`` with the settings of a preset."""
    return dataclasses.replace(args, **settings_of(args, name)[0])


def explain(args: Any) -> list[str]:
    """Return lines for the start of a run: what ``--preset`` changed and left alone, what was given, what differs."""
    preset = PRESETS[args.preset]
    ours = type(args)()
    theirs, kept = settings_of(ours, args.preset)
    changed, given = [], []
    for flag, there in theirs.items():
        value = getattr(args, flag)
        if value != there:
            given.append(f"--{flag} {value} (there {there})")
        elif value != getattr(ours, flag):
            changed.append(f"--{flag} {value} ({getattr(ours, flag)})")
    own = [f"--{flag} {getattr(args, flag)} (there {value})" for flag, value in kept.items()]
    lines = [f"preset     {preset.version}, instead of the defaults in parentheses: {', '.join(changed)}"]
    lines += [f"  kept     this script's own: {', '.join(own)}"] if own else []
    lines += [f"  given    {', '.join(given)}"] if given else []
    for what, size, script in preset.differences:
        if script in ("", script_of(type(args))):
            lines.append(f"  not as there: {what}; {size}")
    return lines

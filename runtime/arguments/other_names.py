"""Answer other frameworks' names of flags, and switches with a value, in one error before anything is loaded.

other_names.tsv has the names that people type for verl, TRL, open-instruct, OpenRLHF, AReaL and TinyZero, and is read
only if a command line has a name that is no flag here. docs/flags.md is made from it. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from runtime.system.process import PROJECT, refuse

# Names that people type from memory, and names of one thing in the two scripts.
SHORT = {"lr": "learning_rate", "model": "model_name_or_path", "epochs": "total_epochs", "steps": "total_steps"}
SHORT |= {"adv_norm": "advantage_normalization_type", "advantage_normalization_type": "adv_norm"}
ASSIGNMENT = re.compile(r"[+~]{0,2}[A-Za-z_][\w.-]*=")  # a word that sets a field by its path, as Hydra has it


class OtherName(NamedTuple):
    """A row of the table. ``theirs``: names separated by commas, in which * stands for any text."""

    frameworks: str
    theirs: str
    ours: str  # what to pass here, "" for nothing
    how: str  # how the value is computed, or why there is no flag


def table() -> list[OtherName]:
    """Return the rows of other_names.tsv."""
    lines = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()
    return [OtherName(*line.split("\t")) for line in lines[1:]]


def answers(name: str, rows: list[OtherName]) -> list[str]:
    """Return what to pass here instead of a name: a line for each of its meanings."""
    found = []
    for row in rows:
        if any(fnmatchcase(name, pattern) for pattern in row.theirs.split(", ")):
            here = "has no flag here"
            if row.ours:
                here = f"is {row.ours} here"
            found.append(f"{name} ({row.frameworks}) {here}{row.how and ': '}{row.how}")
    return found


def own_names(name: str, fields: dict[str, dataclasses.Field]) -> list[str]:
    """Return what a name is here: short for a flag, or a flag of the other script."""
    if SHORT.get(name) in fields:
        return [f"{name} is --{SHORT[name]} here"]
    scripts = [script for script in ("grpo.py", "ppo.py") if (PROJECT / script).is_file()]
    has = [script for script in scripts if f"\n    {name}: " in (PROJECT / script).read_text(encoding="utf-8")]
    return [f"{name} is a flag of {has[0]}"] if has else []


def unknown_names(words: list[str], fields: dict[str, dataclasses.Field]) -> tuple[list[str], list[str]]:
    """Return (names on a command line that are no flags here, switches that are given a value)."""
    unknown, switches = [], []
    last, room = "", 0.0  # the last flag, and how many more values it takes
    for word in words:
        name, assigned, _ = word.lstrip("-+~").partition("=")
        name = name.replace("-", "_")
        if word.startswith("--"):
            last = name.removeprefix("no_") if name.removeprefix("no_") in fields else name
            kind = str(fields[last].type) if last in fields else ""
            room = 0 if assigned or kind in ("", "bool") else float("inf") if kind.startswith("tuple[str") else 1
            unknown += [] if kind or last in ("help", "preset") else [last]
            switches += [last] if kind == "bool" and assigned else []
        elif room > 0:
            room -= 1
        elif ASSIGNMENT.match(word):
            unknown.append(name)
        elif last in fields and fields[last].type == "bool":
            switches.append(last)
    return list(dict.fromkeys(unknown)), list(dict.fromkeys(switches))


def refuse_other_names(words: list[str], fields: dict[str, dataclasses.Field]) -> None:
    """Exit with code 2, and one error for all, if names are other frameworks' or switches have a value.

    Returns if nothing is known of the unknown names: tyro has an error for those.
    """
    unknown, switches = unknown_names(words, fields)
    rows = table() if unknown else []
    lines = [f"--{name} takes no value; pass --{name} or --no-{name}" for name in switches]
    missing = []
    for name in unknown:
        found = own_names(name, fields) or answers(name, rows) or answers(name.removeprefix("no_"), rows)
        lines += found
        missing += [] if found else [f"{name} is no flag here, and docs/flags.md does not have it"]
    if len(lines + missing) > 1 and lines:
        lines = ["these are not accepted here:", *lines, *missing]
    if lines:
        refuse("\n  ".join(lines))

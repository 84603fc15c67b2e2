"""The script that scripts/check.py examines, the unedited script, and what the parts of the check found."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

import script_loader
from enumeration import CONDITIONS
from probe_run import CriticView, GroupView

import grpo
from runtime.arguments import flags

OK = "ok"
NOTE = "note"  # differs from the unedited script, and may be what was intended
FAIL = "FAIL"
LOSS = ("add_gradients", "token_logprobs", "outputs", "prompt_cache")
NEEDED = ("Args", "Tokens", "token_loss", "loss_weights", "main", "preflight")


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``place``: file, line and text of the code that it is about, if that is known."""

    part: int
    name: str
    state: str  # OK, NOTE or FAIL
    text: str
    place: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


def judge(part: int, name: str, right: bool, good: str, bad: str, place: str, state: str = FAIL) -> Finding:
    """Return a finding: OK if ``right``, else ``state`` at this place."""
    return Finding(part, name, OK, good) if right else Finding(part, name, state, bad, place)


@dataclass
class Subject:
    """A script with its arguments, and the unedited script with those of them that it has."""

    script: ModuleType
    args: Any
    base: ModuleType
    base_args: Any
    flags_given: frozenset[str]
    conditions: tuple[str, ...] = tuple(CONDITIONS)  # those of studies/enumeration.py that it meets

    @property
    def name(self) -> str:
        return Path(self.script.__file__).name

    @property
    def base_name(self) -> str:
        return Path(self.base.__file__).name

    @property
    def is_ppo(self) -> bool:
        return self.base_name == "ppo.py"

    def with_flags(self, **changes: Any) -> Any:
        """Return the script's arguments with other values of these flags, as far as the script has them."""
        return with_flags(self.args, **changes)

    def place(self, function: str, phase: str = "") -> str:
        """Return the first line of a function that differs from the unedited script: "mine.py:212, token_loss: text".

        ``phase``: of ``main``, a number at the start of a comment. Empty where nothing has changed.
        """
        ours = source_of(self.script, function, phase)
        theirs = source_of(self.base, function, phase)
        matcher = difflib.SequenceMatcher(
            None, [text for _, text in theirs], [text for _, text in ours], autojunk=False
        )
        for kind, _, _, start, end in matcher.get_opcodes():
            if kind == "equal" or not ours:
                continue
            number, text = ours[min(start, len(ours) - 1)]
            removed = " (lines are missing here)" if start == end else ""
            return f"{self.name}:{number}, {function}: {text.strip()}{removed}"
        return ""

    def first_place(self, *places: tuple[str, str] | str) -> str:
        """Return the first changed line in any of these functions, or (function, phase)s of ``main``."""
        for place in places:
            function, phase = (place, "") if isinstance(place, str) else place
            if found := self.place(function, phase):
                return found
        return ""


class SmallSubject(Subject):
    """A file that stands alone, next to the unedited one."""

    def place(self, function: str, phase: str = "") -> str:
        edited = Subject(self.script.small, None, self.base.small, None, frozenset())
        of_advantages = function in ("group_advantages", "gae")
        names = ("set_advantages",) if of_advantages else LOSS
        return edited.first_place(*names)


def with_flags(args: Any, **changes: Any) -> Any:
    """Return the arguments with other values of these flags, as far as the script has them."""
    known = {f.name for f in dataclasses.fields(args)}
    return dataclasses.replace(args, **{name: value for name, value in changes.items() if name in known})


def source_of(module: ModuleType, function: str, phase: str) -> list[tuple[int, str]]:
    """Return the numbered lines of a function or a phase of ``main``, without comments and blank lines."""
    if not hasattr(module, function):
        return []
    lines, first = inspect.getsourcelines(getattr(module, function))
    node = ast.parse(textwrap.dedent("".join(lines))).body[0]
    docstring = range(0)
    if ast.get_docstring(node) is not None:
        docstring = range(first + node.body[0].lineno - 1, first + node.body[0].end_lineno)
    found = []
    inside = not phase
    for number, line in enumerate(lines, first):
        if number in docstring:
            continue
        text = line.split("  # ")[0].rstrip()
        mark = line.strip()
        if phase and mark.startswith("# ") and mark[2:3].isdigit():
            inside = mark[2:].startswith(phase)
        if inside and text.strip() and not mark.startswith("#"):
            found.append((number, text))
    return found


def load_subject(path: Path, words: list[str]) -> Subject:
    """Import a script, parse its flags, and choose the unedited one. Exits with code 2 for other files."""
    script_loader.check(path)
    text = path.read_text()
    if "\ndef add_gradients(" in text:
        kind, name = (CriticView, "ppo_min.py") if "critic" in text else (GroupView, "grpo_min.py")
        base = kind(ROOT / "variants" / name, [])
        args = grpo.Args(advantage_normalization_type="centered", loss_norm="constant")  # claims the least
        conditions = ("fresh", "unlike") if kind is GroupView else tuple(CONDITIONS)
        return SmallSubject(kind(path, words), args, base, args, frozenset(), conditions)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # where Python looks first when it runs the script
    script = script_loader.load_script(path, NEEDED)
    name = "ppo" if hasattr(script, "gae") and not hasattr(script, "group_advantages") else "grpo"
    base = script_loader.load_script(ROOT / f"{name}.py", NEEDED)
    args = flags.parse(script.Args, script.__doc__, words)
    known = {f.name for f in dataclasses.fields(base.Args)}
    shared = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name in known}
    return Subject(script, args, base, base.Args(**shared), args.flags_set)

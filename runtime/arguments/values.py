"""Typed values of the flags that have a structure: a model and its revision, JSON objects, chat templates, data sets.

``RunFlags`` has a property for each of them, which is computed once. ``check`` reads them all, so an invalid value ends
a run with exit code 2 before anything is loaded. The run's name and identity come from the text of the flags.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runtime.system.process import json_object, on_a_line, refuse

TEMPLATES = Path(__file__).resolve().parent.parent / "data" / "templates"
CHAT_TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8").removesuffix("\n") for path in sorted(TEMPLATES.glob("*.jinja"))
}
# Names that a template reads and the project sets.
TEMPLATE_ARGUMENTS = {"messages", "add_generation_prompt", "strftime_now"}


class ModelName(NamedTuple):
    """A local directory, or an id on the hub with its revision (a branch, tag or commit)."""

    name: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Split ID@REVISION. A local directory may have an @ in its name."""
        if "@" not in text or Path(text).exists():
            return cls(text, None)
        name, _, revision = text.rpartition("@")
        return cls(name, revision)


class Source(NamedTuple):
    """A source of problems, and the part of it that is used: a fraction, a number of problems, or None for all."""

    name: str
    part: float | int | None


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template (None: the tokenizer's own), and variables for it."""

    text: str | None
    variables: dict[str, Any]

    @classmethod
    def parse(cls, value: str | None) -> ChatTemplate:
        """Read ``--chat_template``: a built-in name, a file, or a JSON object of variables. Exits with code 2."""
        if value is None:
            return cls(None, {})
        if value.startswith("{"):
            return cls(None, template_variables(value))
        if value in CHAT_TEMPLATES:
            return cls(CHAT_TEMPLATES[value], {})
        if Path(value).is_file():
            return cls(Path(value).read_text(encoding="utf-8-sig"), {})
        refuse(f"--chat_template {on_a_line(value)}: neither a file nor one of {', '.join(CHAT_TEMPLATES)}")


def template_variables(text: str) -> dict[str, Any]:
    """Return the variables for the tokenizer's own chat template. Exits with code 2 for what would not set any."""
    found = json_object("--chat_template", text, '{"enable_thinking": false}')
    for name, value in found.items():
        if isinstance(value, str) and value.lower() in ("true", "false", "none", "null"):
            refuse(f"--chat_template: {name} is the text {value!r}, which counts as true; pass it without quotes")
    if taken := found.keys() & TEMPLATE_ARGUMENTS:
        refuse(f"--chat_template: {min(taken)} is set by the program and cannot be a variable; drop it")
    return found


def sources(text: str, flag: str) -> list[Source]:
    """Return the sources that ``flag`` names: one, or those of a JSON object with the part of each.

    Exits with code 2 for an object without sources, or with a part that is neither a fraction nor a count.
    """
    if not text.lstrip().startswith("{"):
        return [Source(text, None)]
    example = '{"gsm8k.jsonl": 1.0, "math.jsonl": 500}'
    mixture = json_object(flag, text, example)
    if not mixture:
        refuse(f"{flag}: names no source; for example '{example}'")
    for name, part in mixture.items():
        count = type(part) is int and part > 0
        fraction = type(part) is float and 0 < part <= 1
        if not count and not fraction:
            refuse(
                f"{flag}: {name!r} has {part!r}, which is neither a fraction in (0, 1] nor a count above 0; for "
                f"example '{example}': a fraction has a decimal point, a count has none"
            )
    return [Source(name, part) for name, part in mixture.items()]


# Settings of --eval_sampling: the type of each, the least and the most that it may be.
SAMPLING = {
    "temperature": (float, 0, math.inf),
    "top_p": (float, 1e-3, 1),
    "top_k": (int, 0, math.inf),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-3, math.inf),
    "max_tokens": (int, 1, math.inf),
}


def eval_sampling(text: str | None) -> dict[str, Any]:
    """Return the settings of ``--eval_sampling``, at least a temperature. Exits with code 2 for an invalid one."""
    example = '{"temperature": 0.6, "top_p": 0.95, "top_k": 20}'
    found = {} if text is None else json_object("--eval_sampling", text, example)
    for name, value in found.items():
        if name not in SAMPLING:
            refuse(f"--eval_sampling: {name} is not supported; use {', '.join(SAMPLING)}, for example '{example}'")
        kind, least, most = SAMPLING[name]
        if type(value) not in (int, kind) or not least <= value <= most:
            words = "a whole number" if kind is int else "a number"
            refuse(f"--eval_sampling: {name} {value!r}: must be {words} from {least:g} to {most:g}")
    return {"temperature": 1.0} | found


GOALS = ("eval/pass@1", "eval/pass@k", "eval/majority@k", "eval/reward_mean")  # metrics of --stop_at


def stop_at(text: str | None) -> tuple[str, float] | None:
    """Return the metric and the value of ``--stop_at``. Exits with code 2 for another metric, or for no number."""
    if text is None:
        return None
    name, _, value = text.partition("=")
    if name not in GOALS or not re.fullmatch(r"-?\d*\.?\d+", value):
        refuse(f"--stop_at {on_a_line(text)}: pass NAME=NUMBER with a NAME of {', '.join(GOALS)}")
    return name, float(value)


def is_dropout(name: str, value: object) -> bool:
    """Return True for a config field or module attribute that is a dropout probability above 0 (resid_pdrop, ...)."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "drop" in name and is_number and 0 < value <= 1


def config_overrides(text: str | None) -> dict[str, Any]:
    """Return the fields of ``--override_config``. Exits with code 2 for dropout, or for no JSON object."""
    if text is None:
        return {}
    override = json_object("--override_config", text, '{"rope_theta": 10000}')
    parts = [override, *(part for part in override.values() if isinstance(part, dict))]
    for key, value in (item for part in parts for item in part.items()):
        if is_dropout(key, value):
            refuse(
                f"--override_config: {key} {value}: training runs without dropout, because the model that is trained "
                f"must be the one that generates the samples; leave the field out"
            )
        if key == "head_dtype" and value != "float32":
            refuse(f"--override_config: head_dtype {value!r}: the head computes in the model's type, or in 'float32'")
    return override

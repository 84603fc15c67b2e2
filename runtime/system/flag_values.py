"""Parse flag values that are JSON objects, and shorten errors to a line. Invalid values exit with code 2."""

from __future__ import annotations

import json
from typing import Any

from runtime.system.process import refuse


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return (name, value) pairs as a dict, for json.loads, which silently keeps the last value of a repeated name.

    Raises ValueError for a name that is there twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return found


def json_object(flag: str, text: str, example: str) -> dict[str, Any]:
    """Return the JSON object given to a flag. Exits with code 2 for anything else."""
    try:
        found = json.loads(text, object_pairs_hook=unique)
    except ValueError as error:
        refuse(f"{flag}: not valid JSON ({error}); for example '{example}'")
    if not isinstance(found, dict):
        refuse(f"{flag}: must be a JSON object; for example '{example}'")
    return found


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if the message is empty."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__

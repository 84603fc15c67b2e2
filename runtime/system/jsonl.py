"""Read JSON lines one at a time; lines that are not JSON objects are skipped with a warning."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path


@functools.cache
def warn(message: str) -> None:
    """Print a warning, once, however often a file is read."""
    print(f"warning: {message}", file=sys.stderr)


def records(path: Path) -> Iterator[dict]:
    """Yield the objects of a .jsonl file, none if it does not exist; skip lines that are not objects, with a warning.

    The last line may be half written: that is no news of a run that is still going.
    """
    broken = []
    if not path.is_file():
        return
    with open(path, errors="replace") as file:
        for number, line in enumerate(file, 1):
            record = parsed(line)
            if record:
                yield record
            elif line.endswith("\n") and line != "\n":
                broken.append(number)
    if broken:
        warn(f"{path}: {len(broken)} line(s) are not JSON objects and are left out, the first of them line {broken[0]}")


def parsed(text: str) -> dict:
    """Return the JSON object in a text, or {} if there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}

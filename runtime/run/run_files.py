"""Read the files of a run for reports, plots and the doctor, one line at a time, in bounded memory."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


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
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = None
            if record and isinstance(record, dict):
                yield record
            elif line.endswith("\n") and line != "\n":
                broken.append(number)
    if broken:
        warn(f"{path}: {len(broken)} line(s) are not JSON objects and are left out, the first of them line {broken[0]}")


def read(path: Path) -> list[dict]:
    """Read all ``records`` of a file. They share the names of their fields, which would be most of their memory."""
    return [{sys.intern(name): value for name, value in record.items()} for record in records(path)]


def config_of(folder: Path) -> dict[str, Any]:
    """Return config.json of a run. Raises ValueError if it is no JSON object, or has no arguments."""
    config = json.loads((folder / "config.json").read_text())
    if not isinstance(config, dict) or not isinstance(config.get("args"), dict):
        raise ValueError("it has no arguments of a run")
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a run. Returns {} if there is none, or with a warning if it cannot be read."""
    try:
        return config_of(folder)
    except FileNotFoundError:
        return {}
    except ValueError:
        warn(f"{folder / 'config.json'} is not a JSON object of a run; the arguments of this run are unknown")
        return {}


def control_of(metrics: dict[str, Any]) -> str:
    """Return the value of --reward_control that a step's metrics tell of; "" where the reward was the verifier's."""
    return next((name.removeprefix("reward/control_") for name in metrics if name.startswith("reward/control_")), "")


def series(records: list[dict], key: str) -> pd.Series:
    """Return a metric over the steps in which it was logged; null, which stands for not finite, becomes NaN (a gap)."""
    import pandas as pd  # half a second, which only readers need

    logged = [r for r in records if key in r]
    return pd.Series([r[key] for r in logged], index=[r["step"] for r in logged], dtype=float)

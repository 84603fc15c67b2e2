"""Read the files of a run for reports, plots and the doctor, one line at a time, in bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.system.jsonl import parsed, records, warn

if TYPE_CHECKING:
    import pandas as pd

PHASES = ("generate", "score", "logprobs", "update", "push", "eval", "save")


def read(path: Path) -> list[dict]:
    """Read all ``records`` of a file. They share the names of their fields, which would be most of their memory."""
    return [{sys.intern(name): value for name, value in record.items()} for record in records(path)]


def thin(items: Iterable, limit: int, size: Callable[[Any], int] = lambda item: 1) -> tuple[list, int]:
    """Return (every 1st, 2nd, 4th ... item, so that the sizes add up to ``limit`` at most; the stride)."""
    kept: list = []
    total = 0
    stride = 1
    for number, item in enumerate(items):
        if number % stride:
            continue
        kept.append(item)
        total += size(item)
        while total > limit and len(kept) > 1:
            kept = kept[::2]
            stride *= 2
            total = sum(map(size, kept))
    return kept, stride


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a run. Returns {} if there is none, or with a warning if it cannot be read."""
    path = folder / "config.json"
    if not path.is_file():
        return {}
    config = parsed(path.read_text(errors="replace"))
    if not config or not isinstance(config.get("args", {}), dict):
        warn(f"{path} is not a JSON object of a run; the arguments of this run are unknown")
        return {}
    return config


def control_of(metrics: dict[str, Any]) -> str:
    """Return the value of --reward_control that a step's metrics tell of; "" where the reward was the verifier's."""
    return next((name.removeprefix("reward/control_") for name in metrics if name.startswith("reward/control_")), "")


def series(records: list[dict], key: str, at: dict[int, float] | None = None) -> pd.Series:
    """Return a metric over the steps in which it was logged; null, which stands for not finite, becomes NaN (a gap).

    at: the place of each step on the horizontal axis, from ``positions``; a step without a place is left out.
    """
    import pandas as pd  # half a second, which only readers need

    logged = [r for r in records if key in r]
    if at is not None:
        logged = [r for r in logged if r["step"] in at]
    values = [r[key] for r in logged]
    places = [r["step"] for r in logged]
    if at is not None:
        places = [at[step] for step in places]
    return pd.Series(values, index=places, dtype=float)

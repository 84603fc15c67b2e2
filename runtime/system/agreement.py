"""Facts that all ranks of a launch must share, exchanged once at the start."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch

from runtime.system.process import rank, refuse, world_size
from runtime.system.watchdog import board_of_launch

_boards: list[torch.distributed.Store] = []  # rank 0 serves the others until the process ends


def exchange(name: str, mine: Any, patience: float) -> list[Any]:
    """Return the objects of all trainers, by rank, as JSON has them; no collective and no process group is needed.

    Exits with code 1 where a rank failed before or does not come within ``patience`` seconds, 2 where it has ended.
    """
    if world_size() == 1:
        return [mine]
    store = board_of_launch(patience)
    _boards.append(store)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the launcher's board outlives a start
    places = [f"{name}/{start}/{number}" for number in range(world_size())]
    store.set(places[rank()], json.dumps(mine))
    deadline = time.monotonic() + patience
    while not store.check(places):
        if store.check(["failure"]):
            refuse(f"another rank failed: {store.get('failure').decode()}", code=1)
        if store.check(["ended"]):  # scripts/launch.py says so of ranks that ended well before this one began
            refuse(store.get("ended").decode())
        if time.monotonic() > deadline:
            missing = next(n for n, place in enumerate(places) if not store.check([place]))
            refuse(f"rank {missing} did not arrive within {patience:g} s; see what it printed", code=1)
        time.sleep(0.1)
    return [json.loads(store.get(place)) for place in places]


def check_equal(facts: list[dict[str, dict[str, Any]]]) -> None:
    """Reject ranks that differ, with exit code 2, with the rank and both values. ``facts``: kind -> name -> value."""
    for number, theirs in enumerate(facts):
        for kind, values in theirs.items():
            first = facts[0][kind]
            for name in dict.fromkeys((*first, *values)):
                here, there = values.get(name), first.get(name)
                if here != there:
                    refuse(
                        f"the ranks of this launch differ: {kind} {name} is {here} on rank {number} and {there} on "
                        f"rank 0; start all ranks with the same command, code, packages, models and data"
                    )


def decided(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the choices for all ranks: sizes of the smallest GPU, all else of the oldest, of equal ones rank 0's."""
    oldest = min(choices, key=lambda choice: choice["capability"])
    smallest = min(choices, key=lambda choice: choice["card"])
    return oldest | {"sizes": smallest["sizes"]}

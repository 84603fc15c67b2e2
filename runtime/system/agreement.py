"""Facts that all ranks of a launch must share, exchanged once at the start."""

from __future__ import annotations

import json
import os
from typing import Any

import torch

from runtime.system.process import rank, refuse, world_size
from runtime.system.watchdog import board

_boards: list[torch.distributed.Store] = []  # rank 0 serves the others until the process ends


def exchange(name: str, mine: Any, patience: float) -> list[Any]:
    """Return the objects of all trainers, by rank, as JSON has them; no collective and no process group is needed.

    Raises torch.distributed.DistStoreError where a rank does not come within ``patience`` seconds.
    """
    if world_size() == 1:
        return [mine]
    kept_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serve = rank() == 0 and not kept_by_launcher
    store = board(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), serve, patience)
    _boards.append(store)
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the launcher's board outlives a start
    place = f"{name}/{start}"
    store.set(f"{place}/{rank()}", json.dumps(mine))
    found = []
    for other in range(world_size()):
        text = store.get(f"{place}/{other}")
        found.append(json.loads(text))
    return found


def check_equal(facts: list[dict[str, dict[str, Any]]]) -> None:
    """Refuse ranks that differ, by exit code 2, with the rank and both values. ``facts``: kind -> name -> value."""
    for number, theirs in enumerate(facts):
        for kind, values in theirs.items():
            first = facts[0][kind]
            for name in dict.fromkeys((*first, *values)):
                here, there = values.get(name), first.get(name)
                if here != there:
                    refuse(
                        f"the ranks of this launch differ: {kind} {name} is {here} on rank {number} and {there} on "
                        f"rank 0; start all ranks with the same command, code, packages and data"
                    )


def decided(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the choices for all ranks: sizes of the smallest GPU, all else of the oldest, of equal ones rank 0's."""
    oldest = min(choices, key=lambda choice: choice["capability"])
    smallest = min(choices, key=lambda choice: choice["card"])
    return {**oldest, "sizes": smallest["sizes"], "card": smallest["card"]}

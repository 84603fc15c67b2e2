"""Pairs of flags, each of which has tests of its own: together they work, or are rejected before a model loads.

python -m pytest tests/runs/test_flag_pairs.py -m slow    60 or 120 pairs per script; PAIRS=1000 draws more
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
import os
import random

import pytest
from flag_effect_rows import EVIDENCE, Row
from helpers import run_here, tiny_args

# Values that the rows of single flags do not try. A list is drawn from.
MORE = {
    "num_samples_per_prompt_rollout": [1, 2],
    "num_mini_batches": [2, 4],
    "max_response_length": [1, 24],
    "loss_norm": ["sequence", "constant"],
    "kl_placement": ["none", "reward", "both"],
    "kl_estimator": ["k1", "k4", "abs", "full"],
    "kl_reward_estimator": ["k1", "full"],
    "ref_policy_update": [(1, 1.0), (1, 0.5)],
    "offload": [("ref",), ("optimizer",)],
    "zero_stage": [1, 3],
    "batch_layout": ["padded", "packed"],
    "reward_control": ["random", "shuffled", "inverted"],
    "advantage_normalization_type": ["centered", "leave_one_out"],
    "adv_norm": ["group", "none"],
    "value_norm": ["running", "exp"],
    "dense_reward": ["sum", "difference"],
}
ALONE = {"preset", "exp_name", "run_name", "seed", "dry_run", "track", "external_lib"}  # no part of an algorithm


def drawn_from(row: Row) -> bool:
    """Return True for a row of tests/flag_effect_rows.py that needs nothing but the tiny model, and does not fail."""
    needs = " ".join(map(str, (row.tried, *row.given.values())))
    return not (row.stage or "exit" in row.changes or any(word in needs for word in ("FILES", "RUN", "vllm")))


def rows_of(script: str) -> dict[str, Row]:
    known = {field.name for field in dataclasses.fields(importlib.import_module(script).Args)}
    return {flag: row for flag, row in EVIDENCE.items() if flag in known - ALONE and drawn_from(row)}


def pairs(script: str, count: int, seed: int) -> list[dict]:
    """Changes of the tiny run: two flags that are not their defaults, and what they need."""
    rows = rows_of(script)
    generator = random.Random(f"{script}/{seed}")
    found = []
    for pair in generator.sample(list(itertools.combinations(rows, 2)), count):
        changes = {}
        for flag in pair:
            changes |= rows[flag].given
        for flag in pair:
            changes[flag] = generator.choice(MORE.get(flag, [rows[flag].tried]))
        found.append(changes)
    return found


@pytest.mark.parametrize("script, least", [("grpo", 55), ("ppo", 65)])
def test_the_flags_are_those_of_today(script, least):
    assert len(rows_of(script)) >= least and set(MORE) <= EVIDENCE.keys()


@pytest.mark.slow
@pytest.mark.parametrize("script, count", [("grpo", 60), ("ppo", 120)])  # ppo.py has all of grpo.py's flags
def test_two_flags_work_together_or_are_refused(tiny, tmp_path, script, count):
    """No exception, no metric that is NaN, no optimizer step that was skipped."""
    failures = []
    refused = 0
    for number, changes in enumerate(pairs(script, int(os.environ.get("PAIRS", count)), seed=1)):
        args = tiny_args(tiny, tmp_path, script, **{"run_name": str(number), "total_steps": 2, **changes})
        try:
            metrics = run_here(args, script)
        except SystemExit as end:
            refused += end.code == 2
            if end.code != 2:
                failures.append((changes, f"exit code {end.code}"))
            continue
        except Exception as error:
            failures.append((changes, repr(error)[:300]))
            continue
        bad = {k: v for m in metrics for k, v in m.items() if v is None or not math.isfinite(v)}
        if bad or any(m["optim/skipped"] for m in metrics):
            failures.append((changes, f"not finite: {bad}"))
    print(f"{script}: {number + 1} pairs, {refused} refused, {len(failures)} failed")
    assert not failures, "\n".join(map(str, failures))

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
from helpers import run_here, tiny_args

# Flag -> values other than its default in the tiny runs of the tests.
VALUES = {
    "total_steps": [1],
    "num_unique_prompts_rollout": [2, 8],
    "num_samples_per_prompt_rollout": [1, 2],
    "num_mini_batches": [2, 4],
    "num_epochs": [2],
    "shuffle_mini_batches": [False],
    "max_response_length": [1, 24],
    "temperature": [0.7],
    "filter_zero_std_samples": [True],
    "mask_truncated_completions": [True],
    "mask_no_eos_with_zero": [True],
    "loss_norm": ["sequence", "constant"],
    "clip_higher": [0.28],
    "clip_ratio_c": [3.0],
    "entropy_coef": [0.01],
    "early_stop_imp_ratio": [0.5, 1.5],
    "truncated_importance_sampling_ratio_cap": [2.0],
    "importance_sampling_mask": [(0.5, 5.0)],
    "async_steps": [1],
    "beta": [0.1],
    "kl_placement": ["none", "reward", "both"],
    "kl_estimator": ["k1", "k4", "abs", "full"],
    "kl_gradient": ["naive"],
    "kl_reward_coef": [0.02],
    "kl_reward_estimator": ["k1", "full"],
    "load_ref_policy": [True],
    "ref_policy_update": [(1, 1.0), (1, 0.5)],
    "kl_target": [(0.01,)],
    "offload": [("ref",), ("optimizer",)],
    "vllm_sleep": ["all"],
    "max_grad_norm": [0.0],
    "lr_scheduler_type": ["constant", "cosine"],
    "warmup_steps": [1, 0.5],
    "zero_stage": [1, 3],
    "gradient_checkpointing": [True],
    "batch_layout": ["padded", "packed"],
    "micro_batch_tokens": [140],
    "attn_implementation": ["eager"],
    "generation_size": [6],
    "dynamic_sampling_rounds": [2],
    "dataset_filter": [(0.5, 0.5)],
    "check_verifier_status": [True],
    "reward_control": ["random", "shuffled", "inverted"],
    "reward_scaling": [-2.0],
    "reward_bias": [0.5],
    "max_reward_clip": [0.25],
    "non_stop_penalty": [0.5],
    "overlong_buffer": [4],
    "eval_prompts": [0, 3],
    "eval_samples": [1],
    "eval_temperature": [0.0],
    "eval_every": [1],
    "save_every": [1],
    "ignore_eos": [True],
    "log_samples": [0],
}
OF_GRPO = {"advantage_normalization_type": ["centered", "leave_one_out"], "kl_reward_norm": ["before_norm"]}
OF_PPO = {
    "disable_value": [True],
    "gamma": [0.9],
    "gae_lambda": [0.9],
    "bootstrap_truncated": [True],
    "adv_norm": ["group", "none"],
    "value_clip": [None],
    "critic": [("num_epochs=2", "warmup_steps=1"), ("lr_scheduler_type=cosine", "weight_decay=0.1")],
    "critic_warmup": [1],
    "value_norm": ["running", "exp"],
    "dense_reward": ["sum", "difference"],
}
# A value that means nothing without another flag is drawn together with it.
NEEDS = {
    "kl_placement": {"beta": 0.1},
    "kl_estimator": {"beta": 0.1},
    "kl_gradient": {"beta": 0.1},
    "kl_reward_coef": {"beta": 0.1, "kl_placement": "both"},
    "kl_reward_estimator": {"beta": 0.1, "kl_placement": "both"},
    "kl_target": {"beta": 0.1},
    "kl_reward_norm": {"beta": 0.1, "kl_placement": "reward"},
    "ref_policy_update": {"beta": 0.1},
}


def pairs(script: str, count: int, seed: int) -> list[dict]:
    """Changes of the tiny run: two flags that are not their defaults, and what they need."""
    values = VALUES | (OF_GRPO if script == "grpo" else OF_PPO)
    generator = random.Random(f"{script}/{seed}")
    drawn = generator.sample(list(itertools.combinations(values, 2)), count)
    found = []
    for pair in drawn:
        changes = {}
        for flag in pair:
            changes |= NEEDS.get(flag, {})
        for flag in pair:
            changes[flag] = generator.choice(values[flag])
        found.append(changes)
    return found


@pytest.mark.parametrize("script, own", [("grpo", OF_GRPO), ("ppo", OF_PPO)])
def test_the_flags_are_those_of_today(script, own):
    fields = {field.name for field in dataclasses.fields(importlib.import_module(script).Args)}
    assert set(VALUES | own) <= fields and set(NEEDS) <= set(VALUES | OF_GRPO)


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

"""data/samples.py: rewards that are equal up to rounding are equal everywhere."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import make_samples

import grpo
import utils
from runtime.data import prompt_order
from runtime.data.samples import equal_rewards

EQUAL = [(0.3, 0.1 + 0.2), (1e6, 1e6 + 1e-8), (-0.3, -0.1 - 0.2), (0.0, 0.1 + 0.2 - 0.3), (-1e-17, 1e-17), (5.0, 5.0)]
DIFFERENT = [(0.3, 0.3001), (0.0, 1e-9), (1e-6, 2e-6), (-1.0, 1.0), (-1e308, 1e308), (1e308, math.inf)]


@pytest.mark.parametrize("lowest, highest, equal", [(*p, True) for p in EQUAL] + [(*p, False) for p in DIFFERENT])
def test_one_comparison_everywhere(lowest, highest, equal):
    """The comparison, of numbers and of tensors, dynamic sampling, the metric, the advantages with --advantage_eps 0.

    An advantage is at most (G - 1) / sqrt(G) in size, and that of equal rewards exactly 0.
    """
    lowest, highest = min(lowest, highest), max(lowest, highest)
    assert bool(equal_rewards(lowest, highest)) == equal
    rewards_PG = torch.tensor([[lowest, highest, lowest], [1.0, 2.0, 3.0]], dtype=torch.float64)
    assert equal_rewards(rewards_PG.amin(1), rewards_PG.amax(1)).tolist() == [equal, False]
    samples = make_samples(prompts=2, group=3)
    for sample, reward in zip(samples, rewards_PG.flatten().tolist(), strict=True):
        sample.reward = reward
    if math.isfinite(highest - lowest):
        assert prompt_order.equal_groups(samples) == ([0] if equal else [])
        metrics = utils.sample_metrics(samples, rewards_PG, step=1)
        assert metrics["reward/zero_std_frac"] == (0.5 if equal else 0.0)
        for kind in ("standard", "centered", "leave_one_out"):
            found = grpo.group_advantages(rewards_PG, kind, 0.0)
            assert (found[0] == 0).all().item() == equal
            assert found.isfinite().all() and (kind != "standard" or found.abs().max() <= 2 / math.sqrt(3) + 1e-6)

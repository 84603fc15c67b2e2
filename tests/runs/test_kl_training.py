"""Exact ascent with the estimators of the KL."""

from __future__ import annotations

import pytest
import torch
from helpers import kl_loss


@pytest.mark.integration
def test_exact_ascent_finds_the_optimum_of_the_sequence_kl_only_from_the_reward():
    """E[R] - beta KL of the sequence is largest at ref exp(R / beta) / Z: k1 in the reward, summed to the end, goes
    there; a loss per token, which omits the KL of later tokens, ends elsewhere."""
    generator = torch.Generator().manual_seed(2)
    start, rewards = torch.randn(13, 3, generator=generator).double(), torch.randn(27, generator=generator).double()
    tokens = torch.cartesian_prod(*[torch.arange(3)] * 3)  # all 27 sequences of 3 tokens
    a, b, _ = tokens.unbind(1)
    rows = torch.stack([0 * a, 1 + a, 4 + 3 * a + b], dim=1)  # a row of the table for each prefix
    ref, mask, beta = start.log_softmax(-1)[rows, tokens], torch.ones(27, 3, dtype=torch.bool), 0.5
    optimum = (ref.sum(1) + rewards / beta).softmax(0)

    def distance(placement: str) -> float:
        theta = start.clone().requires_grad_()
        adam = torch.optim.Adam([theta], lr=0.02)
        for _ in range(1500):
            logp = theta.log_softmax(-1)[rows, tokens]
            fresh = logp.detach()
            gain = rewards[:, None].expand(27, 3)
            if placement == "reward":
                gain = gain - beta * (fresh - ref).flip(1).cumsum(1).flip(1)
            loss = -(logp - fresh).exp() * gain
            if placement == "loss":
                loss = loss + beta * kl_loss(logp, fresh, ref, mask, estimator="k2")
            adam.zero_grad()
            (fresh.sum(1).exp() @ loss).sum().backward()
            adam.step()
        return (theta.log_softmax(-1)[rows, tokens].sum(1).exp() - optimum).abs().sum().item() / 2

    assert distance("reward") < 1e-3
    assert distance("loss") > 1e-2

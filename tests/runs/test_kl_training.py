"""Effects of the estimators on policies trained with them: tables, exact KLs, and the demonstration itself."""

from __future__ import annotations

import subprocess
import sys

import kl_demo
import matplotlib
import pytest
import torch
from helpers import ROOT, kl_loss

import kl_estimators as kl

matplotlib.use("Agg")


def test_same_gradient_same_trajectory():
    """On fresh samples k2 as written and k3 unbiased have one gradient, sample by sample: they train the same table."""
    settings = [("k2", "naive", 0.3), ("k3", "unbiased", 0.3), ("k3", "naive", 0.3)]
    steps = {"seeds": 2, "steps": 20, "mini_batches": 1, "epochs": 1}
    k2, unbiased, forward = kl_demo.toy_grpo(settings, **steps)[2].chunk(3)
    torch.testing.assert_close(k2, unbiased, rtol=0, atol=1e-5)
    assert (k2 - forward).abs().max() > 1e-2


def test_the_sequence_kl_is_that_of_sampled_sequences():
    """Against the mean of log pi - log ref over 400,000 sequences that are drawn here, within 5 standard errors."""
    _, _, logp = kl_demo.toy_grpo([("k1", "naive", 0.0)], seeds=1, steps=3)
    found, _, again = kl_demo.toy_grpo([("k1", "naive", 0.0)], seeds=1, steps=3)
    assert torch.equal(logp, again) and found > 0.01
    start, _, ref = kl_demo.toy_grpo([("k1", "naive", 0.0)], seeds=1, steps=1, lr=0.0)
    assert start.abs() < 1e-6
    generator, sums = torch.Generator().manual_seed(1), []
    for prompt in range(4):
        total, token = torch.zeros(100_000), torch.zeros(100_000, dtype=torch.long)
        for t in range(8):
            row, drawn = logp[0, prompt, t], torch.rand(100_000, 1, generator=generator)
            after = (row[token].exp().cumsum(-1) < drawn).sum(-1).clamp(max=7)
            total += (row - ref[0, prompt, t])[token, after]
            token = after
        sums.append(total)
    sums = torch.stack(sums)
    assert abs(sums.mean() - found.item()) < 5 * sums.std() / sums.numel() ** 0.5


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
                gain = gain - beta * kl.kl_reward(fresh, ref, mask, estimator="k1").flip(1).cumsum(1).flip(1)
            loss = -(logp - fresh).exp() * gain
            if placement == "loss":
                loss = loss + beta * kl_loss(logp, fresh, ref, mask, estimator="k2")
            adam.zero_grad()
            (fresh.sum(1).exp() @ loss).sum().backward()
            adam.step()
        return (theta.log_softmax(-1)[rows, tokens].sum(1).exp() - optimum).abs().sum().item() / 2

    assert distance("reward") < 1e-3
    assert distance("loss") > 1e-2


@pytest.mark.slow
def test_without_a_reward_only_k1_drifts():
    """From pi = ref, on fresh samples, SGD: k1's noise carries pi away, as beta squared; k4's a little; others stay."""
    settings = [(name, "naive", beta) for name in ("k1", "k2", "k3", "k4") for beta in (0.1, 0.3, 1.0)]
    settings += [("k3", "unbiased", beta) for beta in (0.1, 0.3, 1.0)]
    fresh = {"mini_batches": 1, "epochs": 1, "optimizer": torch.optim.SGD, "lr": 25.0, "task": False}
    ends = kl_demo.toy_grpo(settings, steps=300, **fresh)[0].mean(1).view(5, 3)  # [estimators, betas]
    k1, k2, k3, k4, unbiased = ends
    assert 5 < k1[2] / k1[1] < 20 and 5 < k1[1] / k1[0] < 20
    assert torch.stack([k2, k3, unbiased]).abs().max() < 1e-6
    assert (k4 > 1e-3).all() and (k4[1:] < 0.2 * k1[1:]).all()  # noise at the reference, but a pull back to it


@pytest.mark.slow
def test_demonstration(tmp_path):
    line = [sys.executable, str(ROOT / "studies" / "kl_demo.py"), "--output", str(tmp_path / "kl.png")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "PASS" in done.stdout and (tmp_path / "kl.png").stat().st_size > 10_000, done

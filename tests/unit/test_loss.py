"""The arithmetic of grpo.py: advantages, weights, the loss and its KL switch, the learning rate, pass@k."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import random
import time
from types import SimpleNamespace
from typing import get_args

import fp64_update
import pytest
import torch
from helpers import make_samples, token_loss

import grpo
import kl_estimators
import ppo
import utils
from grpo import Args, group_advantages, loss_weights, return_to_go
from kl_estimators import canonical_name, full_vocabulary_kl
from rewards import Reward, shape_reward
from runtime.data.samples import Sample, pass_at_k
from runtime.training import batching

F64 = torch.float64


def test_advantages_golden():
    rewards = torch.tensor([[1.0, 0, 0, 0]], dtype=F64)
    torch.testing.assert_close(
        group_advantages(rewards, "standard"), torch.tensor([[1.5, -0.5, -0.5, -0.5]], dtype=F64), rtol=0, atol=1e-5
    )  # unbiased std 0.5; a biased one would give 1.732
    assert group_advantages(rewards, "centered").tolist() == [[0.75, -0.25, -0.25, -0.25]]
    others = [1.0 - 0.0, 0 - 1 / 3, 0 - 1 / 3, 0 - 1 / 3]
    torch.testing.assert_close(group_advantages(rewards, "leave_one_out")[0], torch.tensor(others, dtype=F64))


@pytest.mark.parametrize("kind", ["standard", "centered", "leave_one_out"])
@pytest.mark.parametrize("reward", [0.3, 0.1 + 0.2, 1 / 3, -7.7, 1e6 + 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_equal_rewards_give_exactly_zero(kind, reward, dtype):
    rewards = torch.full((2, 7), reward, dtype=dtype)
    rewards[1] = torch.arange(7)
    advantages = group_advantages(rewards, kind)
    assert (advantages[0] == 0).all() and (advantages[1] != 0).sum() >= 6


@pytest.mark.parametrize("kind", ["standard", "centered", "leave_one_out"])
def test_order_of_groups_and_samples_is_irrelevant(kind):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(5, 6, dtype=F64, generator=generator)
    groups, places = torch.randperm(5, generator=generator), torch.randperm(6, generator=generator)
    torch.testing.assert_close(
        group_advantages(rewards[groups][:, places], kind), group_advantages(rewards, kind)[groups][:, places]
    )


def test_return_to_go_stays_within_a_response():
    values = torch.tensor([1.0, 2, 3, 10, 100, 1000])
    assert return_to_go(values, [0, 3, 4, 6]).tolist() == [6, 5, 3, 10, 1100, 1000]


def test_shape_reward():
    def reward(score: float, finish: str = "stop", **changes) -> float:
        sample = make_samples(1, 2)[0]
        sample.finish_reason = finish
        shape_reward(sample, Reward(score, {"correct": score}), Args(**changes))
        return sample.reward

    assert reward(1.0) == 1.0
    assert reward(1.0, "length") == 0.0
    assert reward(1.0, "length", mask_no_eos_with_zero=False) == 1.0
    assert reward(1.0, "length", non_stop_penalty=0.5) == -0.5
    assert reward(1.0, reward_bias=0.5, reward_scaling=10) == 5.0
    assert reward(1.0, reward_bias=0.5, reward_scaling=10, max_reward_clip=2) == 2.0
    assert reward(0.0, reward_bias=0.5, reward_scaling=10, max_reward_clip=2) == -2.0


def test_pass_at_k_of_training_prompts():
    """The fraction of prompts with a right response; two right ones to one prompt count once."""
    samples = make_samples(4, 3)
    for sample in samples:
        sample.reward_parts = {"correct": float((sample.prompt_id, sample.sample_id) in ((0, 1), (2, 0), (2, 2)))}
    found = utils.sample_metrics(samples, torch.zeros(4, 3), 1)
    assert (found["reward/pass@k"], found["reward/correct"]) == (0.5, 0.25)


def test_the_parts_of_a_reward_have_curves_of_their_own():
    """The mean over the samples that have a part; no part takes the place of a metric, and there is an end to names."""
    samples = [Sample(0, k, [1], [2], [0.0], "stop", [(1, 0)]) for k in range(4)]
    samples[0].reward_parts = {"short": 1.0, "mean": 9.0}
    samples[1].reward_parts = {"short": 0.5, **{f"word {k}": 0.0 for k in range(100)}}
    found = utils.sample_metrics(samples, torch.zeros(1, 4, dtype=torch.float64), 1)
    assert found["reward/short"] == 0.75 and found["reward/mean"] == 0.0
    assert sum(name.startswith("reward/word") for name in found) == 30


def test_what_could_not_be_scored_and_what_crashed_are_counted_apart():
    samples = make_samples(2, 3)
    for sample, status in zip(samples, ["ok", "ok", "ok", "unscorable", "unscorable", "crash"], strict=True):
        sample.reward_status = status
    found = utils.sample_metrics(samples, torch.zeros(2, 3, dtype=torch.float64), 1)
    assert (found["reward/unscorable"], found["reward/crashes"]) == (2, 1)


def test_loss_weights(samples):
    offsets = batching.token_offsets(samples)
    some = [0, 1, 5, 7]
    tokens = sum(len(samples[i].response_ids) for i in some)
    for norm, weight in {
        "token": lambda n: 1 / tokens,
        "sequence": lambda n: 1 / (len(some) * n),
        "constant": lambda n: 1 / (len(some) * 32),
    }.items():
        weights = loss_weights(samples, some, Args(loss_norm=norm))
        assert len(weights) == offsets[-1]
        for i, (a, b) in enumerate(itertools.pairwise(offsets)):
            expected = weight(b - a) if i in some else 0.0
            torch.testing.assert_close(weights[a:b], torch.full((b - a,), expected))


def test_loss_weights_take_linear_time():
    """8,192 samples in well under a second: a sum over all lengths for each of them took 3.3 s."""
    samples = [Sample(i // 8, i % 8, [1], [1] * 8, [0.0] * 8, "stop", []) for i in range(8192)]
    start = time.perf_counter()
    weights = loss_weights(samples, list(range(8192)), Args())
    assert time.perf_counter() - start < 0.5
    assert weights.sum().item() == pytest.approx(1.0, rel=1e-4)


class Steps:
    """Statistics of optimizer steps on one micro-batch of six tokens with random numbers."""

    def __init__(self, monkeypatch, fresh: tuple[int, ...] = (1, 1, 1, 1, 1, 1)):
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
        run = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
        self.args = Args(max_logprob_diff=0.0)
        engine_N = torch.zeros(6, dtype=torch.long)
        self.stats = utils.UpdateStats(self.args, run, 1, True, torch.tensor(fresh).bool(), engine_N, grpo.kl_value)
        generator = torch.Generator().manual_seed(0)
        names = [field.name for field in dataclasses.fields(grpo.Tokens)]
        self.tokens = grpo.Tokens(**{name: torch.rand(6, generator=generator) for name in names})
        self.skips = SimpleNamespace(policy=0)

    def step(self, applied: bool = True, **own) -> None:
        policy = SimpleNamespace(was_step_applied=lambda: applied, get_global_grad_norm=lambda: 1.0)
        loss_T, pieces = grpo.token_loss(self.tokens, 0.1, self.args)
        self.stats.add(SimpleNamespace(tokens=torch.arange(6)), self.tokens, loss_T, pieces | own)
        self.stats.check_step(None)
        self.stats.stepped(policy, self.skips, 2)


@pytest.mark.parametrize("name", ["tokens", "loss", "fresh", "entropy", "k3", "sharpness"])
def test_a_piece_of_a_loss_may_have_any_name(name, monkeypatch):
    """A copy's own piece is logged as policy/NAME, and changes no other metric, whatever else is called NAME."""

    def metrics(**own):
        steps = Steps(monkeypatch, (1, 0, 1, 1, 1, 1))
        steps.step(**own)
        return steps.stats.metrics(1e-3)

    found = metrics(**{name: torch.full((6,), 7.0)})
    assert found.pop(f"policy/{name}") == 7.0
    assert found == {key: value for key, value in metrics().items() if key != f"policy/{name}"}


def test_a_mask_counts_weights_below_it_and_above_it():
    old_T = torch.tensor([0.1, 1.0, 6.0]).log()
    values = utils.weight_statistics(old_T, torch.zeros(3), Args(importance_sampling_mask=(0.5, 5.0)))
    assert values["masked"].tolist() == [1, 0, 1]


def test_each_optimizer_step_is_counted_once(monkeypatch):
    """Sums of one are no part of the next one's; ``skips`` counts those in a row that were not applied."""
    steps = Steps(monkeypatch)
    seen = []
    for applied in (False, False, True, False):
        steps.step(applied)
        seen.append(steps.skips.policy)
    stats = steps.stats
    assert seen == [1, 2, 0, 1] and (stats.steps, stats.skipped) == (1, 3)
    assert stats.totals["tokens"] == 4 * 6 and stats.metrics(1e-3)["optim/grad_norm"] == 1.0


def test_an_entropy_that_is_not_finite_enters_no_loss_without_a_coefficient(monkeypatch, capsys):
    """If such a step is skipped for another reason, a warning names what was not finite."""
    utils.warn_once.cache_clear()
    steps = Steps(monkeypatch)
    steps.tokens.entropy_T[0] = math.nan
    steps.step(applied=False)
    assert math.isfinite(steps.stats.totals["loss"])
    assert capsys.readouterr().out.strip() == "warning: an optimizer step was skipped; not finite: entropy"


def test_tokens_without_weight_are_in_no_metric(monkeypatch):
    """Dummy micro-batches and masked tokens are neither in the means nor in their count. The KL is the policy's."""
    steps = Steps(monkeypatch)
    steps.tokens.weights_T[4:] = 0.0
    steps.stats.stepped = lambda *_: None
    steps.step()
    sums, d_T = steps.stats.sums, steps.tokens.logprobs_T - steps.tokens.ref_T
    expected = steps.tokens.entropy_T[:4].sum().item(), d_T[:4].sum().item()
    assert (sums["tokens"], sums["fresh"]) == (4, 4)
    assert (sums["entropy"], sums["k1"]) == pytest.approx(expected, rel=1e-5)


def test_one_stale_engine_of_many_is_noticed():
    """The check is per engine: over all 64 engines a difference of 0.64 nats on one of them would be a mean of 0.01."""
    stats = utils.TokenStats(torch.device("cpu"), engines=64)
    engine_T = torch.arange(64).repeat(8)
    seen_T = torch.ones(512, dtype=torch.bool)
    stats.add_sampler_diff(seen_T, torch.where(engine_T == 17, 0.05, 0.001), engine_T)
    utils.check_sampler(stats, 0.1, torch.bfloat16)
    stats.add_sampler_diff(seen_T, torch.where(engine_T == 17, 0.64, 0.001), engine_T)
    assert stats.sampler_diff_2E[0].sum() / stats.sampler_diff_2E[1].sum() < 0.1, "the mean of all would pass"
    with pytest.raises(RuntimeError, match="engine 17"):
        utils.check_sampler(stats, 0.1, torch.bfloat16)
    utils.check_sampler(stats, 0.0, torch.bfloat16)


@pytest.mark.parametrize("difference, dtype, fails", [(0.05, "bfloat16", False), (2e-4, "float32", True)])
def test_in_fp32_a_thousandth_of_the_difference_is_too_much(difference, dtype, fails):
    stats = utils.TokenStats(torch.device("cpu"), engines=1)
    stats.add_sampler_diff(torch.ones(4, dtype=torch.bool), torch.full((4,), difference), torch.zeros(4).long())
    says = pytest.raises(RuntimeError, match=r"--max_logprob_diff: 0\.0001") if fails else contextlib.nullcontext()
    with says:
        utils.check_sampler(stats, 0.1, getattr(torch, dtype))


def test_a_difference_before_any_training_is_vllms_way_to_compute_the_model(capsys):
    """Exit code 2 in the first comparison of a run with vLLM, which has seen a fresh token; an error in later ones."""
    run = SimpleNamespace(sampler_agreed=False)
    one_T = torch.ones(1)
    far = utils.TokenStats(torch.device("cpu"))
    far.add_sampler_diff(one_T > 0, one_T, torch.zeros(1).long())
    with pytest.raises(SystemExit) as end:
        utils.check_sampler(far, 0.1, torch.bfloat16, run)
    line = capsys.readouterr().err
    assert end.value.code == 2 and "1 nats per token" in line and "--rollout hf" in line
    near = utils.TokenStats(torch.device("cpu"))
    utils.check_sampler(near, 0.1, torch.bfloat16, run)
    assert not run.sampler_agreed  # no fresh token
    near.add_sampler_diff(one_T > 0, 0.01 * one_T, torch.zeros(1).long())
    utils.check_sampler(near, 0.1, torch.bfloat16, run)
    assert run.sampler_agreed
    with pytest.raises(RuntimeError, match="stale weights"):
        utils.check_sampler(far, 0.1, torch.bfloat16, run)


def inputs(n: int = 64, seed: int = 0, spread: float = 0.5) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    values = {k: -2 + spread * torch.randn(n, generator=g, dtype=F64) for k in ("logprobs_T", *GIVEN[1:])}
    values["advantages_T"] = torch.randn(n, generator=g, dtype=F64)
    values["logprobs_T"].requires_grad_()
    values["entropy_T"] = torch.rand(n, generator=g, dtype=F64)
    logits, reference = torch.randn(2, n, 11, generator=g, dtype=F64)
    values["full_kl_T"] = full_vocabulary_kl(logits, reference) + 0 * values["logprobs_T"]
    return values


GIVEN = ("logprobs_T", "old_T", "ref_T", "sampler_T")


def far(place: str) -> dict[str, torch.Tensor]:
    """Tokens whose log-prob at ``place`` is 19.5 to 25 nats away from the others, on both sides of 20."""
    x = inputs(12) | {place: torch.tensor([-25.0, -20.5, -19.5, 19.5, 20.5, 25.0], dtype=F64).repeat(2)}
    x["logprobs_T"].requires_grad_()
    return x


BATCHES = {"near": inputs, "wide": lambda: inputs(spread=1.5)} | {name: lambda n=name: far(n) for name in GIVEN}
CAP, MASK = "truncated_importance_sampling_ratio_cap", "importance_sampling_mask"
FLAGS = {
    "plain": {},
    "clips": {"clip_lower": 0.1, "clip_higher": 0.3, "entropy_coef": 0.02},
    "dual clip": {"clip_ratio_c": 1.5, CAP: 0.0},
    "cap": {CAP: 1.2, "entropy_coef": -0.01},
    "mask": {MASK: (0.5, 1.5)},
    "cap and mask": {MASK: (0.5, 1.5), CAP: 1.1, "clip_ratio_c": 3.0},
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("script", [grpo, ppo], ids=["grpo", "ppo"])
@pytest.mark.parametrize("name", [None, *get_args(grpo.KLInLoss)])
def test_value_and_gradient_of_the_token_loss_are_the_oracle_s(script, name, batch):
    """Every estimator, with and without a +, under every name and without a KL, with every clip and weight."""
    for more in FLAGS.values():
        args = script.Args(kl_estimator=name or "k3", **more)
        x = BATCHES[batch]()
        beta = 0.3 if name else 0.0
        loss, pieces = token_loss(script, beta, args, **x)
        expected = fp64_update.token_loss(x, beta, args)
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        slopes = [torch.autograd.grad(y.sum(), x["logprobs_T"], retain_graph=True)[0] for y in (loss, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-12)
        assert torch.equal(pieces["weight"], fp64_update.importance_weight(x, args))
        assert name is not None or not pieces["kl"].any()


@pytest.mark.parametrize("name", get_args(grpo.KLInLoss))
def test_the_kl_is_logged_as_its_estimator(name):
    """Not weighted by its coefficient; of the full KL the values that are given."""
    x = inputs()
    kl = token_loss(grpo, 0.1, Args(kl_estimator=name), **x)[1]["kl"]
    if canonical_name(name) == "full":
        assert torch.equal(kl, x["full_kl_T"])
        return
    logged = grpo.kl_value(canonical_name(name).removesuffix("+"), x["logprobs_T"], x["old_T"], x["ref_T"])
    torch.testing.assert_close(kl, logged, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("script", [grpo, ppo])
def test_a_mask_keeps_importance_weights_at_its_ends(script):
    """And drops those outside; what is kept is not changed."""
    old_T = torch.tensor([-1.0, -0.5, 0.0, 0.5, 1.0])
    weight_T = old_T.exp()
    low, high = weight_T[1].item(), weight_T[3].item()
    args = script.Args(importance_sampling_mask=(low, high), truncated_importance_sampling_ratio_cap=0.0)
    found_T = script.importance_weights(old_T, torch.zeros(5), args)
    assert found_T.tolist() == [0.0, low, 1.0, high, 0.0]


def test_importance_weights_are_bounded():
    """By exp(20) on both sides: one token of a sampler that went astray must not make the sum infinite."""
    away_T = torch.tensor([-30.0, -20.5, -19.5, 19.5, 20.5, 30.0], dtype=F64)
    weight_T = utils.weight_statistics(away_T, torch.zeros(6, dtype=F64), Args())["weight"]
    bounded_T = torch.tensor([-20.0, -20.0, -19.5, 19.5, 20.0, 20.0], dtype=F64)
    torch.testing.assert_close(weight_T.log(), bounded_T)


@pytest.mark.parametrize("placement, in_loss", [("none", 0.0), ("reward", 0.0), ("loss", 0.3), ("both", 0.3)])
def test_placement_reaches_the_loss_once(placement, in_loss):
    """beta is the coefficient in the loss for loss and both, and nothing is for none and reward."""
    assert utils.make_kl(Args(beta=0.3, kl_placement=placement)).loss == in_loss


def test_a_controller_of_the_reward_leaves_the_coefficient_of_the_loss():
    kl = utils.make_kl(Args(beta=0.3, kl_placement="both", kl_target=(0.1,)))
    kl.update(1.0, None, 100)
    assert kl.loss == 0.3 < kl.reward


def test_policy_loss_by_hand():
    """Clip on both sides, dual clip: one number a case, and which tokens count as clipped."""
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5, 1.0, 6.0])
    given = {"logprobs_T": ratio.log(), "old_T": torch.zeros(6), "sampler_T": torch.zeros(6)}
    given["advantages_T"] = torch.tensor([1.0, 1, -1, -1, 2, -1])
    for c, last in ((None, 6.0), (3.0, 3.0)):
        args = Args(clip_lower=0.2, clip_higher=0.3, clip_ratio_c=c)
        loss, pieces = token_loss(grpo, 0.0, args, **given)
        torch.testing.assert_close(loss, torch.tensor([-1.3, -0.5, 1.5, 0.8, -2.0, last]))
        torch.testing.assert_close(pieces["policy"], loss)
        torch.testing.assert_close(pieces["ratio"], ratio)
        assert pieces["clipped"].tolist() == [1, 0, 0, 1, 0, 0]


# ------------------------------------------------------------------------- samples of another policy than old's


def five_tokens(theta, old, sampler, ref) -> dict[str, torch.Tensor]:
    """Log-probs of each of five tokens from logits, in float64; those of theta have its gradient as ``leaf``."""
    leaf = torch.as_tensor(theta, dtype=F64).clone().requires_grad_()
    x = {"leaf": leaf, "logprobs": leaf.log_softmax(-1)}
    for name, logits in {"old": old, "sampler": sampler, "ref": ref}.items():
        x[name] = torch.as_tensor(logits, dtype=F64).log_softmax(-1)
    x["full_kl"] = full_vocabulary_kl(x["logprobs"], x["ref"]).expand(5)
    return x


def expected_gradient(module, setting: tuple[str, str], policies: tuple, **flags) -> torch.Tensor:
    """Expected gradient [5] of the script's own token loss, by enumeration: KL alone, in the loss or in the reward.

    ``policies``: logits of pi, old, sampler and ref. Tokens come as often as the sampler says.
    """
    place, estimator = setting
    x = five_tokens(*policies)
    advantages = torch.zeros(5, dtype=F64)
    if place == "reward":  # recomputed with old, never with the sampler's
        old_full_kl = full_vocabulary_kl(x["old"], x["ref"]).expand(5)
        full = estimator == "full"
        advantages = -(old_full_kl if full else module.kl_value(estimator, x["old"], x["old"], x["ref"]))
    flags |= {"kl_estimator": estimator, "kl_placement": place}
    args = module.Args(**flags, clip_lower=0.99, clip_higher=99.0)
    given = {f"{name}_T": x[name] for name in ("logprobs", "old", "ref", "sampler", "full_kl")}
    loss, _ = token_loss(module, float(place == "loss"), args, advantages_T=advantages, **given)
    return torch.autograd.grad(x["sampler"].exp() @ loss, x["leaf"])[0]


def named_gradients(theta, old, sampler, ref) -> dict[str, torch.Tensor]:
    """The gradients that the table names, written from their definitions."""
    x = five_tokens(theta, old, sampler, ref)

    def divergence(p, q):
        return p.exp() @ (p - q)

    pi = x["logprobs"]
    objectives = {
        kl_estimators.ZERO: 0 * pi.sum(),
        kl_estimators.REVERSE: divergence(pi, x["ref"]),
        kl_estimators.FORWARD: divergence(x["ref"], pi),
        kl_estimators.TV: (pi.exp() - x["ref"].exp()).abs().sum(),
        kl_estimators.AWAY: -divergence(x["old"], pi),
        kl_estimators.AWAY_FROM_SAMPLER: -divergence(x["sampler"], pi),
        kl_estimators.GAP: divergence(pi, x["ref"]) - divergence(x["ref"], pi),
        kl_estimators.LATE: divergence(pi, x["ref"]) - divergence(pi, x["old"]),
    }
    return {name: torch.autograd.grad(y, x["leaf"], retain_graph=True)[0] for name, y in objectives.items()}


# (place, estimator) -> expected gradient on fresh, on stale and on asynchronous samples without a weight
EXPECTED = {
    ("loss", "k1"): (kl_estimators.ZERO, kl_estimators.AWAY, kl_estimators.AWAY_FROM_SAMPLER),
    ("loss", "k2"): (kl_estimators.REVERSE, kl_estimators.NONE, kl_estimators.NONE),
    ("loss", "k3"): (kl_estimators.FORWARD, kl_estimators.NONE, kl_estimators.NONE),
    ("loss", "k4"): (kl_estimators.REVERSE, kl_estimators.REVERSE, kl_estimators.NONE),
    ("loss", "abs"): (kl_estimators.TV, kl_estimators.NONE, kl_estimators.NONE),
    ("loss", "full"): (kl_estimators.REVERSE,) * 3,
    ("reward", "k1"): (kl_estimators.REVERSE, kl_estimators.LATE, kl_estimators.NONE),
    ("reward", "k2"): (kl_estimators.NONE,) * 3,
    ("reward", "k3"): (kl_estimators.GAP, kl_estimators.NONE, kl_estimators.NONE),
    ("reward", "k4"): (kl_estimators.REVERSE, kl_estimators.LATE, kl_estimators.NONE),
    ("reward", "abs"): (kl_estimators.NONE,) * 3,
    ("reward", "full"): (kl_estimators.ZERO, kl_estimators.ZERO, kl_estimators.NONE),
}
PLUS = (kl_estimators.REVERSE, kl_estimators.REVERSE, kl_estimators.NONE)
EXPECTED |= {("loss", name): PLUS for name in ("k1+", "k2+", "k3+", "k4+", "abs+")}


def test_every_setting_of_the_table_has_an_expected_gradient():
    """A new estimator is added to EXPECTED, and to ``kl_value`` in tests/fp64_update.py."""
    assert EXPECTED.keys() == set(kl_estimators.settings(grpo)) == set(kl_estimators.settings(ppo))


def four_policies() -> list[tuple]:
    """Logits of pi, old, sampler, ref: those of the printed table, then random ones."""
    generator = torch.Generator().manual_seed(0)
    found = [(kl_estimators.THETA, [0.1, 0.2, 0.8, 0.3, -0.6], kl_estimators.OLD, kl_estimators.REF)]
    return found + [tuple(0.7 * torch.randn(4, 5, generator=generator, dtype=F64)) for _ in range(5)]


@pytest.mark.parametrize("module", [grpo, ppo], ids=["grpo", "ppo"])
@pytest.mark.parametrize("setting", EXPECTED, ids="-".join)
def test_with_the_weight_asynchronous_samples_have_the_kl_gradient_of_samples_of_old(module, setting):
    """Exact in both scripts: in the first optimizer step the gradient on fresh samples, later the one on stale ones."""
    weighted = {"truncated_importance_sampling_ratio_cap": 100.0}
    for pi, old, sampler, ref in four_policies():
        for step, proximal in (("fresh", pi), ("stale", old)):
            found = expected_gradient(module, setting, (pi, proximal, sampler, ref), **weighted)
            of_old = expected_gradient(module, setting, (pi, proximal, proximal, ref))
            torch.testing.assert_close(found, of_old, rtol=0, atol=1e-12)
            label = EXPECTED[setting][step == "stale"]
            named = named_gradients(pi, proximal, sampler, ref)
            if label != kl_estimators.NONE:
                torch.testing.assert_close(found, named[label], rtol=0, atol=1e-10)
            else:
                assert min((found - x).abs().max() for x in named.values()) > 1e-3


@pytest.mark.parametrize("module", [grpo, ppo], ids=["grpo", "ppo"])
@pytest.mark.parametrize("setting", EXPECTED, ids="-".join)
def test_without_the_weight_asynchronous_samples_have_no_kl_gradient(module, setting):
    """Only the full KL in the loss does not need it; k1 as written pushes away from the sampler."""
    label = EXPECTED[setting][2]
    for pi, old, sampler, ref in four_policies():
        for proximal in (pi, old):
            found = expected_gradient(module, setting, (pi, proximal, sampler, ref))
            named = named_gradients(pi, proximal, sampler, ref)
            if label != kl_estimators.NONE:
                torch.testing.assert_close(found, named[label], rtol=0, atol=1e-10)
            else:
                assert min((found - x).abs().max() for x in named.values()) > 1e-3


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps, minimum", [(0, 0.0), (5, 0.1), (0.25, 0.0)])
def test_learning_rate_is_the_formula(kind, warmup_steps, minimum):
    """A warm-up below 1 is a part of the steps; of 10 a quarter is 2 (2.5, to the even number)."""
    args = Args(learning_rate=2.0, lr_scheduler_type=kind, warmup_steps=warmup_steps, lr_min_ratio=minimum)
    for total in (20, 10):
        rates = [utils.learning_rate(step, total, args) for step in range(total)]
        assert rates == pytest.approx([fp64_update.learning_rate(k, total, args) for k in range(total)], rel=1e-12)


def test_pass_at_k():
    assert pass_at_k(1, 4, 4) == 1.0  # with replacement it would be 0.684
    assert pass_at_k(1, 4, 1) == 0.25
    assert pass_at_k(0, 4, 4) == 0.0
    r = random.Random(0)
    draws = [any(i < 2 for i in r.sample(range(6), 3)) for _ in range(20000)]
    assert pass_at_k(2, 6, 3) == pytest.approx(sum(draws) / len(draws), abs=0.015)

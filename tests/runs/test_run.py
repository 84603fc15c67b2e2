"""Whole runs on a tiny random model: every KL setting, the stages of ZeRO, several ranks, and runs that go wrong."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import (
    VERIFIERS,
    descendants,
    folder_of,
    read_jsonl,
    record,
    run_here,
    tiny_args,
)
from safetensors.torch import load_file

import grpo
import kl_estimators
import utils
from runtime.run import logger
from runtime.system import process
from runtime.training import deepspeed_zero, pretrained

SLOW = pytest.mark.slow
SETTINGS = [*kl_estimators.settings(grpo), *(("both", name) for name in kl_estimators.estimators(grpo))]
# Each placement and estimator once: what a setting computes, test_loss.py and test_kl_estimators.py compare.
FAST = [("loss", "k1"), ("loss", "k3+"), ("loss", "full"), ("reward", "k2"), ("both", "abs"), ("both", "k4")]
# test_ppo.py finds the lines of grpo.py in ppo.py, word for word: where it adds none, its run is a slow test.
SCRIPTS = ["grpo", pytest.param("ppo", marks=SLOW)]


# Padded rows of one micro-batch, so that tokens are a table; by the second step the policy has left the reference.
TABLE = {"learning_rate": 1e-2, "batch_layout": "padded", "micro_batch_tokens": 4096, "ignore_eos": True}
TABLE |= {"log_samples": 16}


def final_weights(args, script: str = "grpo") -> dict[str, torch.Tensor]:
    return load_file(folder_of(args, script) / "model" / "model.safetensors")


def own_flags(script: str) -> dict:
    """Without a critic, whose advantages would be others than rewards to go."""
    return {"disable_value": True, "adv_norm": "none"} if script == "ppo" else {}


@pytest.mark.parametrize("placement, estimator", [pytest.param(*s, marks=() if s in FAST else SLOW) for s in SETTINGS])
def test_every_kl_setting_runs(tiny, tmp_path, placement, estimator):
    """Two steps of two optimizer steps each; all estimators are logged whatever the switch says."""
    changes = {"beta": 0.1, "kl_placement": placement}
    changes["kl_reward_estimator" if placement == "reward" else "kl_estimator"] = estimator
    changes |= {"num_mini_batches": 2, "learning_rate": 1e-3, "filter_zero_std_samples": False}
    args = tiny_args(tiny, tmp_path, **changes)
    first, second = run_here(args)
    assert second["kl/k3"] > 1e-5 and second["kl/k2"] > 1e-5 and second["kl/abs"] > 1e-3
    assert all(v == v for m in (first, second) for v in m.values())
    assert [m["optim/steps"] for m in (first, second)] == [2, 2]
    assert (second["loss/kl"] != 0) == (placement in ("loss", "both"))


@pytest.mark.integration
@pytest.mark.parametrize("norm, estimator", [("after_norm", "k1"), ("after_norm", "k3"), ("before_norm", "k1")])
def test_kl_in_the_reward_reaches_the_advantages_once(tiny, tmp_path, monkeypatch, norm, estimator):
    """The loss gets the task's advantage minus, for each token, beta times the KL that follows it."""
    seen, token_loss = [], grpo.token_loss

    def spy(t, *rest):
        of_responses = [x.detach().view(-1, 8).double() for x in (t.advantages_T, t.old_T - t.ref_T, t.ref_T - t.old_T)]
        seen.append(of_responses)
        return token_loss(t, *rest)

    monkeypatch.setattr(grpo, "token_loss", spy)
    changes = {"beta": 0.5, "kl_placement": "reward", "kl_reward_estimator": estimator, "kl_reward_norm": norm}
    args = tiny_args(tiny, tmp_path, **changes, **TABLE)
    run_here(args)
    advantages, d, log_ratio = seen[-1]
    assert d.abs().mean() > 0.05 and len(advantages) == 16  # the second step: the policy has left the reference
    kl = d if estimator == "k1" else log_ratio.exp() - 1 - log_ratio
    folder = folder_of(args)
    samples = [s for s in read_jsonl(folder / "samples.jsonl") if s["step"] == 2]
    rewards = torch.tensor([s["reward"] for s in samples], dtype=torch.float64).view(4, 4)
    ends = []
    for order in itertools.permutations(range(4)):  # rows come longest prompt first
        r = rewards[list(order)]
        if norm == "after_norm":
            expected = grpo.group_advantages(r, "standard").view(16, 1) - 0.5 * kl.flip(1).cumsum(1).flip(1)
        else:
            expected = grpo.group_advantages(r - 0.5 * kl.sum(1).view(4, 4), "standard").view(16, 1)
        ends.append((advantages - expected).abs().max().item())
    assert min(ends) < 1e-4


@pytest.mark.integration
@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_kl_in_the_reward_of_stale_samples_is_that_of_the_trainer(tiny, tmp_path, monkeypatch, script):
    """The engine keeps its first weights; the penalty comes from recomputed log-probs, not from the sampler's."""
    module = importlib.import_module(script)
    seen, token_loss = [], module.token_loss

    def spy(t, *rest):
        wanted = (t.advantages_T, t.old_T - t.ref_T, t.sampler_T - t.ref_T)
        seen.append([x.detach().view(-1, 8).double() for x in wanted])
        return token_loss(t, *rest)

    plain_push, pushes = module.Engine.push, itertools.count()
    monkeypatch.setattr(module, "token_loss", spy)
    monkeypatch.setattr(module.Engine, "push", lambda *a: plain_push(*a) if next(pushes) == 0 else None)
    changes = {"beta": 0.5, "kl_placement": "reward", "kl_estimator": "k1"}
    changes |= {"truncated_importance_sampling_ratio_cap": 2.0, "max_logprob_diff": 0.0}
    args = tiny_args(tiny, tmp_path, script, **changes, **TABLE, **own_flags(script))
    run_here(args, script)
    advantages, d, d_of_sampler = seen[-1]
    rows = [s for s in read_jsonl(folder_of(args, script) / "samples.jsonl") if s["step"] == 2]
    task = 8 * sum(s["reward"] for s in rows) if script == "ppo" else 0.0  # the advantages of groups have mean 0
    penalty, stale_penalty = (0.5 * x.flip(1).cumsum(1).sum().item() for x in (d, d_of_sampler))
    assert abs(penalty - stale_penalty) > 0.5 and len(rows) == 16
    assert task - advantages.sum().item() == pytest.approx(penalty, abs=1e-3)


@pytest.mark.integration
@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_kl_in_loss_and_reward_has_two_coefficients_and_two_estimators(tiny, tmp_path, monkeypatch, script):
    """The loss has 0.3 times k2, and the advantages have lost 0.5 times k1 to go."""
    module = importlib.import_module(script)
    seen, token_loss = [], module.token_loss

    def spy(t, *rest):
        loss, pieces = token_loss(t, *rest)
        seen.append([x.detach().double() for x in (t.advantages_T, t.old_T - t.ref_T, loss - pieces["policy"])])
        return loss, pieces

    monkeypatch.setattr(module, "token_loss", spy)
    changes = {"beta": 0.3, "kl_placement": "both", "kl_estimator": "k2"}
    changes |= {"kl_reward_coef": 0.5, "kl_reward_estimator": "k1"}
    args = tiny_args(tiny, tmp_path, script, **changes, **TABLE, **own_flags(script))
    first, second = run_here(args, script)
    advantages, d, kl_part = seen[-1]
    torch.testing.assert_close(kl_part, 0.3 * d**2 / 2, rtol=1e-3, atol=1e-6)
    rows = [s for s in read_jsonl(folder_of(args, script) / "samples.jsonl") if s["step"] == 2]
    task = 8 * sum(s["reward"] for s in rows) if script == "ppo" else 0.0  # the advantages of groups have mean 0
    penalty = 0.5 * d.view(-1, 8).flip(1).cumsum(1).sum().item()
    assert abs(penalty) > 0.1
    assert task - advantages.sum().item() == pytest.approx(penalty, abs=1e-3)
    assert (second["kl/coef"], second["kl/reward_coef"]) == (0.3, 0.5)
    assert second["kl/reward"] == pytest.approx(d.mean().item(), rel=1e-3), "before the update, k1 per token"
    assert first["kl/reward"] == 0


@pytest.mark.integration
@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_adaptive_kl_moves_the_coefficient_of_the_reward_alone(tiny, tmp_path, script):
    """By the KL of the rollout before the update, of all responses, also those that the loss leaves out."""
    args = tiny_args(
        *(tiny, tmp_path, script),
        beta=0.3,
        kl_placement="both",
        kl_reward_coef=0.5,
        kl_reward_estimator="k1",
        kl_target=(0.05, 100.0),
        entropy_coef=0.01,  # moves the policy when the few responses that end have no advantage
        num_mini_batches=2,
        total_steps=3,
        learning_rate=1e-2,
        mask_truncated_completions=True,
        ignore_eos=False,
        seed=3,
    )
    metrics = run_here(args, script)
    assert [m["kl/coef"] for m in metrics] == [0.3] * 3
    assert metrics[0]["kl/reward"] == 0, "before the update the policy is the reference"
    coef = 0.5
    for m in metrics:
        assert m["kl/reward_coef"] == pytest.approx(coef, rel=1e-12)
        coef *= 1 + min(max(m["kl/reward"] / 0.05 - 1, -0.2), 0.2) * 16 / 100
    lengths = [m["completions/length_mean"] for m in metrics]
    assert metrics[2]["kl/reward"] != 0 and max(lengths) <= 8


@pytest.mark.integration
@pytest.mark.parametrize("script", SCRIPTS)
def test_kl_in_both_places_with_equal_coefficients_is_one_beta(tiny, tmp_path, script):
    """Command lines with one --beta mean what they meant: bit for bit the run that names both."""
    common = {"beta": 0.1, "kl_placement": "both", "kl_estimator": "k1", "learning_rate": 1e-2}
    named = {"kl_reward_coef": 0.1, "kl_reward_estimator": "k1"}
    one = tiny_args(tiny, tmp_path / "one", script, **common)
    two = tiny_args(tiny, tmp_path / "two", script, **common, **named)
    run_here(one, script)
    run_here(two, script)
    assert record(folder_of(one, script)) == record(folder_of(two, script))


@pytest.mark.integration
@pytest.mark.parametrize("script", SCRIPTS)
def test_kl_is_measured_at_coefficient_zero_when_asked_for(tiny, tmp_path, script):
    """--load_ref_policy logs what a coefficient of next to nothing would, and moves nothing, whatever the estimator."""
    common = {"learning_rate": 1e-2, "num_mini_batches": 2}
    measured = tiny_args(tiny, tmp_path / "m", script, load_ref_policy=True, kl_estimator="full", **common)
    plain = tiny_args(tiny, tmp_path / "p", script, **common)
    nearly = tiny_args(tiny, tmp_path / "n", script, beta=1e-9, **common)
    metrics, without, trick = (run_here(args, script)[1] for args in (measured, plain, nearly))
    names = {name for name in trick if name.startswith("kl/")}
    assert {name for name in metrics if name.startswith("kl/")} == names
    assert metrics["kl/k3"] > 1e-3 and metrics["kl/coef"] == metrics["loss/kl"] == 0
    for name in names - {"kl/coef"}:
        assert metrics[name] == pytest.approx(trick[name], rel=1e-3), name
    assert {name for name in without if name.startswith("kl/")} == {"kl/coef"}
    assert metrics["reward/mean"] == without["reward/mean"]
    assert metrics["loss/policy"] == pytest.approx(without["loss/policy"], abs=1e-5)


@pytest.mark.integration
@pytest.mark.parametrize("script", SCRIPTS)
def test_measuring_the_kl_changes_no_weight(tiny, tmp_path, script):
    """Also where mini-batches have no gradient: AdamW's momentum moves the weights in all of these runs, or in none."""
    common = {"learning_rate": 1e-2, "num_mini_batches": 4, "total_steps": 4, "max_logprob_diff": 0}
    common |= {"verifier": f"{VERIFIERS}:seldom"}
    runs = {"plain": {}, "measured": {"load_ref_policy": True}, "nearly": {"beta": 1e-9}}
    weights, steps = {}, {}
    for name, changes in runs.items():
        args = tiny_args(tiny, tmp_path / name, script, **common, **changes)
        metrics = run_here(args, script)
        steps[name] = [m["optim/steps"] for m in metrics]
        weights[name] = load_file(folder_of(args, script) / "model" / "model.safetensors")
    assert any(0 < m["reward/zero_std_frac"] < 1 for m in metrics)
    assert steps["plain"] == steps["measured"] == steps["nearly"] == [4, 4, 4, 4]
    start = load_file(tiny / "model.safetensors")
    moved = max((weights["plain"][n] - start[n]).abs().max().item() for n in start)
    for name in ("measured", "nearly"):
        apart = max((weights["plain"][n] - weights[name][n]).abs().max().item() for n in start)
        assert apart < 0.01 * moved


@pytest.mark.integration
def test_masked_tokens_are_counted(tiny, tmp_path, monkeypatch):
    """The engine keeps its first weights, so ratios leave a narrow mask; a token outside of it moves nothing."""
    plain_push, pushes = grpo.Engine.push, itertools.count()
    monkeypatch.setattr(grpo.Engine, "push", lambda *a: plain_push(*a) if next(pushes) == 0 else None)
    common = {"learning_rate": 1e-2, "max_logprob_diff": 0.0}
    args = tiny_args(tiny, tmp_path, importance_sampling_mask=(0.9, 1.1), **common)
    first, second = run_here(args)
    assert first["sampler/masked_frac"] == 0 and 0.1 < second["sampler/masked_frac"] < 1
    assert "sampler/masked_frac" not in run_here(tiny_args(tiny, tmp_path, total_steps=1, **common))[0]


@pytest.mark.integration
def test_inside_the_group_statistics_truncated_responses_have_their_kl(tiny, tmp_path, monkeypatch):
    """Left out of the loss, not out of the group: with a KL of 0 they would look better than they are."""
    stops = pretrained.stop_token_ids
    monkeypatch.setattr(pretrained, "stop_token_ids", lambda *a: [*stops(*a), *range(100, 115)])  # else few end
    seen = []
    plain = grpo.group_advantages

    def watched(rewards, *options):
        seen.append(rewards)
        return plain(rewards, *options)

    monkeypatch.setattr(grpo, "group_advantages", watched)
    changes = {"beta": 0.5, "kl_placement": "reward", "kl_estimator": "k1", "kl_reward_norm": "before_norm"}
    changes |= {"learning_rate": 1e-2, "mask_truncated_completions": True, "max_response_length": 24}
    changes |= {"log_samples": 16}
    args = tiny_args(tiny, tmp_path, **changes)
    run_here(args)
    folder = folder_of(args)
    truncated = [s["finish_reason"] == "length" for s in read_jsonl(folder / "samples.jsonl") if s["step"] == 2]
    plain_rewards, penalized = seen[-2:]
    penalty = (plain_rewards - penalized).flatten()
    assert any(truncated) and not all(truncated)
    assert (penalty[truncated].abs() > 1e-3).all(), "the second step: the policy has left the reference"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_reference_that_is_not_loaded_is_not_offloaded(tiny, tmp_path, script):
    """--offload ref in a sweep over beta that includes 0, with several optimizer steps per batch."""
    args = tiny_args(tiny, tmp_path, script, offload=("ref",), num_mini_batches=2)
    assert [m["optim/steps"] for m in run_here(args, script)] == [2, 2]


def test_a_reference_of_the_update_goes_home_after_it(tiny, tmp_path, monkeypatch):
    """--offload ref with the full KL in the loss, which needs the reference in every micro-batch."""
    seen = []
    for name in ("borrow_device", "return_device"):
        monkeypatch.setattr(deepspeed_zero, name, lambda *rest, name=name: seen.append(name))
    plain = grpo.Engine.push
    monkeypatch.setattr(grpo.Engine, "push", lambda *rest: (seen.append("push"), plain(*rest)))
    args = tiny_args(tiny, tmp_path, offload=("ref",), beta=0.1, kl_estimator="full")
    run_here(args)
    steps = [name for name in seen if name != "borrow_device"]
    assert "borrow_device" in seen and steps[-4:] == ["return_device", "push"] * 2


def test_a_fresh_step(tiny, tmp_path):
    """One optimizer step on fresh samples: ratio exactly 1, nothing clipped, KL to the reference exactly 0."""
    first, second = run_here(tiny_args(tiny, tmp_path, beta=0.1, learning_rate=1e-3))
    for m in (first, second):
        assert m["policy/ratio_mean"] == 1 == m["policy/ratio_max"] and m["policy/clip_frac"] == 0
        assert m["sampler/logprob_diff_max"] < 1e-4 and m["sampler/staleness"] == 0
    assert [first[f"kl/{k}"] for k in ("k1", "k2", "k3", "k4", "abs", "sequence")] == [0] * 6
    assert second["kl/abs"] > 0


@pytest.mark.integration
def test_logged_full_kl_is_the_expectation_of_the_logged_samples(tiny, tmp_path, monkeypatch):
    """kl/full of every sample equals what the estimator full has in the loss, and k1 and k3 scatter around it."""
    changes = {"beta": 0.1, "kl_estimator": "full", "learning_rate": 1e-2}
    monkeypatch.setattr(utils, "FULL_KL_SAMPLES", 64)
    args = tiny_args(tiny, tmp_path, **changes, num_samples_per_prompt_rollout=16)
    second = run_here(args)[1]
    assert second["kl/full"] > 0.01
    assert second["kl/full"] == pytest.approx(second["loss/kl"], rel=1e-4)  # both are means over all tokens
    assert second["kl/k3"] == pytest.approx(second["kl/full"], rel=0.5)
    assert 0.01 < abs(second["kl/forward_full"] / second["kl/full"] - 1) < 0.5
    assert second["kl/full_max"] > 1.2 * second["kl/full"]
    assert second["policy/approx_kl_max"] == 0, "one optimizer step"


@pytest.mark.integration
def test_without_beta_no_reference_is_loaded(tiny, tmp_path, monkeypatch):
    """The policy, the sampler's copy, and a third model only where the KL is used."""
    loaded, load = [], pretrained.load_model
    monkeypatch.setattr(pretrained, "load_model", lambda *a: (loaded.append(1), load(*a))[1])
    for beta, placement, expected in ((0.0, "loss", 2), (0.1, "none", 2), (0.1, "loss", 3), (0.1, "reward", 3)):
        loaded.clear()
        (m,) = run_here(tiny_args(tiny, tmp_path, total_steps=1, beta=beta, kl_placement=placement))
        assert len(loaded) == expected and ("kl/k1" in m) == (expected == 3)


@pytest.mark.integration
@pytest.mark.parametrize(
    "shape", [{"num_mini_batches": 2}, {"num_epochs": 3}, {"num_mini_batches": 4, "num_epochs": 2}]
)
def test_optimizer_steps_and_learning_rates(tiny, tmp_path, shape):
    """Counted exactly, whatever the micro-batches; the last rate of a step is the formula's."""
    args = tiny_args(
        *(tiny, tmp_path),
        **{"lr_scheduler_type": "linear", "warmup_steps": 3, "micro_batch_tokens": 200, "total_steps": 3, **shape},
        entropy_coef=1e-3,  # a mini-batch without any gradient would make no step
    )
    updates = args.num_mini_batches * args.num_epochs
    for step, m in enumerate(run_here(args), 1):
        assert m["optim/steps"] == updates
        assert m["optim/lr"] == pytest.approx(utils.learning_rate(step * updates - 1, 3 * updates, args), rel=1e-12)


@pytest.mark.integration
def test_many_switches_at_once(tiny, tmp_path):
    changes = {"eval_prompts": 4, "beta": 0.05, "kl_target": (1e-6, 50.0), "ref_policy_update": (1, 0.5)}
    changes |= {"num_epochs": 2, "num_mini_batches": 2, "entropy_coef": 0.01, "clip_ratio_c": 3.0}
    changes |= {"truncated_importance_sampling_ratio_cap": 2.0, "mask_truncated_completions": True}
    changes |= {"loss_norm": "sequence", "advantage_normalization_type": "leave_one_out"}
    changes |= {"batch_layout": "packed", "gradient_checkpointing": True, "learning_rate": 1e-3}
    changes |= {"total_episodes": 48, "eval_every": 1, "save_every": 2, "kl_placement": "both"}
    changes |= {"kl_reward_norm": "before_norm", "offload": ("ref",), "temperature": 0.9}
    changes |= {"attn_implementation": "sdpa", "max_response_length": 24, "ignore_eos": False}
    args = tiny_args(tiny, tmp_path, **changes)
    metrics = run_here(args)
    folder = folder_of(args)
    assert [m["episode"] for m in metrics] == [16, 32, 48]
    assert [e["step"] for e in read_jsonl(folder / "eval.jsonl")] == [0, 1, 2, 3]
    assert all(0 < e["time/eval"] < 60 for e in read_jsonl(folder / "eval.jsonl"))
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["step_000002"]
    trained = [m for m in metrics if "loss/total" in m]
    for before, after in itertools.pairwise(trained):
        assert after["kl/coef"] > before["kl/coef"] or before["kl/sequence"] < 0
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(folder / "model").config.num_hidden_layers == 2


@pytest.fixture(scope="module")
def stage_2(tiny, tmp_path_factory):
    args = tiny_args(tiny, tmp_path_factory.mktemp("stage2"), learning_rate=1e-3)
    return run_here(args), final_weights(args)


@pytest.mark.integration
@pytest.mark.parametrize(
    "changes",
    [
        *({"zero_stage": 3}, {"batch_layout": "padded"}, {"batch_layout": "packed"}),
        *({"micro_batch_tokens": 150}, {"gradient_checkpointing": True}),
        # Resumed runs have stage 1, test_identity.py the offload, and test_attention.py the attentions.
        pytest.param({"zero_stage": 1}, marks=SLOW),
        pytest.param({"attn_implementation": "sdpa"}, marks=SLOW),
        pytest.param({"offload": ("optimizer",)}, marks=SLOW),
    ],
    ids=str,
)
def test_what_must_not_matter(stage_2, tiny, tmp_path, changes):
    """Stages, layouts, micro-batches, checkpointing, chunks: the same run, up to rounding."""
    args = tiny_args(tiny, tmp_path, learning_rate=1e-3, **changes)
    for got, expected in zip(run_here(args), stage_2[0], strict=True):
        for key in ("reward/mean", "loss/total", "optim/grad_norm", "policy/entropy", "optim/steps"):
            assert got[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-6), key
    weights = final_weights(args)
    for name, expected in stage_2[1].items():
        assert (weights[name] - expected).abs().mean() < 1e-5, name  # AdamW turns rounding at a zero gradient into 1e-3


def test_a_loss_that_is_not_finite_is_never_applied(tiny, tmp_path, monkeypatch):
    """Poison one token of one step: the weights stay, the step is counted, the next one trains."""
    plain, calls = grpo.token_loss, itertools.count()

    def poisoned(*args):
        loss, parts = plain(*args)
        return (loss * torch.tensor([float("nan")] + [1.0] * (len(loss) - 1)) if next(calls) == 0 else loss), parts

    seen = []
    gather = deepspeed_zero.current_weights
    monkeypatch.setattr(grpo, "token_loss", poisoned)
    monkeypatch.setattr(
        deepspeed_zero, "current_weights", lambda *a: (seen.append([w.clone() for _, w in gather(*a)]), gather(*a))[1]
    )
    args = tiny_args(tiny, tmp_path, learning_rate=1e-3, micro_batch_tokens=150)
    first, second = run_here(args)
    assert (first["optim/skipped"], first["optim/steps"]) == (1, 0)
    assert (second["optim/skipped"], second["optim/steps"]) == (0, 1)
    before, after_first, after_second = seen[:3]
    assert all(torch.equal(a, b) for a, b in zip(before, after_first, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(after_first, after_second, strict=True))
    assert all(w.isfinite().all() for w in after_second)


@pytest.mark.integration
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_not_finite_is_never_applied(tiny, tmp_path, monkeypatch, stage):
    """The loss is finite, its gradient is not (the root of 0): nothing is applied, in any stage."""
    plain = grpo.token_loss

    def poisoned(t, *args):
        loss, parts = plain(t, *args)
        return loss + 0 * (t.logprobs_T - t.logprobs_T.detach()).abs().sqrt(), parts

    monkeypatch.setattr(grpo, "token_loss", poisoned)
    args = tiny_args(tiny, tmp_path, learning_rate=1e-3, zero_stage=stage)
    assert [m["optim/skipped"] for m in run_here(args)] == [1, 1]
    start = load_file(tiny / "model.safetensors")
    assert all(torch.equal(w, start[name]) for name, w in final_weights(args).items())


@pytest.mark.integration
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_seconds_of_steps_do_not_overlap(script, tiny, tmp_path, monkeypatch):
    """Time after a step's record, for a checkpoint above all, counts to the next step; nothing counts twice."""
    ends = []
    plain = logger.RunLog.step

    def noting(log, *rest):
        ends.append(time.perf_counter())
        plain(log, *rest)
        time.sleep(0.2)

    monkeypatch.setattr(logger.RunLog, "step", noting)
    found = run_here(tiny_args(tiny, tmp_path, script, total_steps=3), script)
    assert sum(m["time/step"] for m in found[1:]) <= ends[-1] - ends[0]
    for m in found:
        assert sum(m[f"time/{phase}"] for phase in ("generate", "score", "logprobs", "update")) <= m["time/step"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_in_which_nothing_is_trained(script, tiny, tmp_path):
    """All groups have rewards that are equal up to rounding, and are filtered: the step is counted.

    It has no metrics of a policy's update.
    """
    args = tiny_args(tiny, tmp_path, script, verifier=f"{VERIFIERS}:equal_up_to_rounding", filter_zero_std_samples=True)
    for m in run_here(args, script):
        assert (m["reward/zero_std_frac"], m["optim/steps"], m["optim/skipped"]) == (1.0, 0, 0)
        assert m["reward/mean"] == pytest.approx(0.3)
        found = [name for name in m if name.startswith(("policy/", "loss/", "sampler/ess"))]
        assert set(found) <= {"loss/value"}  # the critic learns from every sample
    start = load_file(tiny / "model.safetensors")
    assert all(torch.equal(w, start[name]) for name, w in final_weights(args, script).items())


def test_early_stop(tiny, tmp_path):
    """A ratio above the cap gives up the rest of the update; nothing of that optimizer step is applied."""
    args = tiny_args(tiny, tmp_path, num_epochs=4, early_stop_imp_ratio=0.5, filter_zero_std_samples=False)
    for m in run_here(args):
        assert (m["optim/steps"], m["optim/early_stopped"], m["optim/skipped"]) == (0, 1, 0)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_plain_step_in_numbers(script, tiny, tmp_path):
    """Fresh samples have ratios of exactly 1, which is not above a cap of 1; workers end with the run.

    So does the thread that listens for its signals, and those are this process's again.
    Nothing is said of draws that did not happen, and entropies are those of a distribution over 600 tokens.
    """
    before = set(descendants(os.getpid()))
    handlers = [signal.getsignal(number) for number in process.STOP_SIGNALS]
    threads = set(threading.enumerate())
    metrics = run_here(tiny_args(tiny, tmp_path, script, early_stop_imp_ratio=1.0), script)
    left = [Path(f"/proc/{pid}/cmdline").read_text() for pid in set(descendants(os.getpid())) - before]
    assert not [line for line in left if "spawn_main" in line]
    assert [signal.getsignal(number) for number in process.STOP_SIGNALS] == handlers
    listening = [thread for thread in set(threading.enumerate()) - threads if thread.name == "signals"]
    for thread in listening:
        thread.join(20)
    assert not [thread for thread in listening if thread.is_alive()]
    for m in metrics:
        assert (m["optim/early_stopped"], m["policy/ratio_mean"], m["episode"]) == (0, 1.0, 16 * m["step"])
        assert m["sampler/fresh_frac"] == 1.0
        assert 3 < m["policy/entropy"] < math.log(600)
        assert not [name for name in m if name.startswith("data/")]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_filter_that_holds_samples_from_the_reference_is_told(script, tiny, tmp_path, capsys):
    """Only where there is a KL to lose."""
    for beta, told in ((0.1, True), (0.0, False)):
        args = tiny_args(tiny, tmp_path, script, beta=beta, filter_zero_std_samples=True, dry_run=True)
        module = importlib.import_module(script)
        module.main(args, module.preflight(args))
        assert ("without a pull to the reference" in capsys.readouterr().out) == told


def test_groups_of_equal_reward(tiny, tmp_path):
    """All equal: nothing to learn, and a step without a gradient and without momentum moves nothing."""
    args = tiny_args(tiny, tmp_path, verifier="exact")
    for m in run_here(args):
        assert m["reward/zero_std_frac"] == 1 and m["optim/steps"] == 1
        assert m["loss/total"] == m["optim/grad_norm"] == 0
    start = load_file(tiny / "model.safetensors")
    assert all(torch.equal(w, start[name]) for name, w in final_weights(args).items())


@pytest.mark.integration
def test_ten_bad_steps_end_the_run_with_the_batch_saved(tiny, tmp_path, monkeypatch):
    plain = grpo.token_loss

    def poisoned(*arguments):
        loss, parts = plain(*arguments)
        return loss * float("nan"), parts

    monkeypatch.setattr(grpo, "token_loss", poisoned)
    args = tiny_args(tiny, tmp_path, total_steps=12, entropy_coef=1e-3)
    with pytest.raises(RuntimeError, match="ten optimizer steps in a row"):
        run_here(args)
    folder = folder_of(args)
    assert len(read_jsonl(folder / "bad_batch.jsonl")) == 16
    assert [m["optim/skipped"] for m in read_jsonl(folder / "metrics.jsonl")] == [1] * 9


@pytest.mark.integration
@pytest.mark.parametrize("limit, ends", [(0.1, True), (0.0, False)])
def test_a_sampler_with_other_weights_ends_the_run(tiny, tmp_path, monkeypatch, limit, ends):
    """Before a step is applied; with the check off the same run goes through."""
    whole = deepspeed_zero.current_weights
    monkeypatch.setattr(deepspeed_zero, "current_weights", lambda *a: [(name, 1.1 * w) for name, w in whole(*a)])
    args = tiny_args(tiny, tmp_path, entropy_coef=1e-3, max_logprob_diff=limit)
    if not ends:
        assert len(run_here(args)) == 2
        return
    with pytest.raises(RuntimeError, match="--max_logprob_diff"):
        run_here(args)
    assert not (folder_of(args) / "metrics.jsonl").exists(), "a step was applied"


def test_one_rank_gathers_no_samples(tiny, tmp_path, monkeypatch):
    """gloo would copy them on threads of its own, which slow down those of trainer and engine."""
    gather = torch.distributed.all_gather_object

    def gather_facts(parts, mine):
        assert not isinstance(mine, list) or not mine, "samples were gathered"
        gather(parts, mine)

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather_facts)
    assert len(run_here(tiny_args(tiny, tmp_path))) == 2

"""Whole runs of grpo.py take the optimizer steps that tests/fp64_update.py computes in double precision."""

from __future__ import annotations

import sys

import pytest
import torch
import watching
from fp64_update import Oracle, Weights, learning_rate, shaped
from helpers import make_chatty, run_here, tiny_args

import utils
from runtime.run import logger
from runtime.training import deepspeed_zero

ADAM_EPS = 1e-4  # so that rounding of gradients near 0 is not amplified


class Recorder:
    """Keeps what ``main`` computes: samples, weights, and the gradient of every optimizer step."""

    def __init__(self, patch):
        import deepspeed

        self.steps: list[dict] = []
        self.loss = 0.0
        for owner, name in (
            (utils.UpdateStats, "__init__"),
            (deepspeed_zero, "backward_and_step"),
            (deepspeed.DeepSpeedEngine, "step"),
            (logger.RunLog, "step"),
        ):
            patch.setattr(owner, name, getattr(owner, name))  # which undoes the watching
        patch.setattr(utils, "ADAM_EPS", ADAM_EPS)
        watching.watch(utils.UpdateStats, "__init__", before=self.begin)
        watching.watch(deepspeed_zero, "backward_and_step", before=self.add)
        watching.watch(deepspeed.DeepSpeedEngine, "step", before=self.optimizer_step)
        watching.watch(logger.RunLog, "step", after=self.end)

    def weights(self) -> Weights:
        found = deepspeed_zero.current_weights(self.main["policy"], self.main["args"].zero_stage)
        return {name: w.detach().clone() for name, w in found if name != "lm_head.weight"}

    def begin(self, *_) -> None:
        """Phase 6 is complete."""
        frame = sys._getframe(1)
        while frame.f_code.co_name != "main":
            frame = frame.f_back
        self.main = names = dict(frame.f_locals)
        kl = names["kl"]
        step = {name: names[name] for name in ("samples", "in_loss", "offsets")}
        step |= {"advantages": names["advantages_N"].double(), "coefficients": (kl.loss, kl.reward)}
        self.steps.append(step | {"weights": self.weights(), "updates": []})

    def add(self, engine, loss: torch.Tensor, *_) -> None:
        self.loss += loss.item()

    def optimizer_step(self, engine, *_) -> None:
        from deepspeed.utils import safe_get_full_grad

        gradient = {}
        for name, w in engine.module.named_parameters():
            gradient[name.removeprefix("model.")] = safe_get_full_grad(w).double().clone()
        self.steps[-1]["updates"].append({"loss": self.loss, "gradient": gradient, "before": self.weights()})
        self.loss = 0.0

    def end(self, *_) -> None:
        self.steps[-1]["after"] = self.weights()


def apart(a: Weights, b: Weights) -> float:
    """Norm of the difference of two sets of tensors over the norm of the second."""
    assert a.keys() == b.keys()
    difference = sum(float((a[name] - b[name]).square().sum()) for name in b) ** 0.5
    return difference / sum(float(b[name].square().sum()) for name in b) ** 0.5


TWICE = {"num_mini_batches": 2, "num_epochs": 2, "learning_rate": 1e-2}
CASES = {
    "clips, entropy, warm-up and a decay": {
        **TWICE,
        "clip_lower": 0.05,
        "clip_higher": 0.02,
        "clip_ratio_c": 1.1,
        "entropy_coef": 0.01,
        "weight_decay": 0.1,
        "warmup_steps": 0.3,
        "lr_scheduler_type": "cosine",
        "lr_min_ratio": 0.1,
        "max_grad_norm": 0.05,
        "temperature": 0.7,
        "loss_norm": "constant",
        "micro_batch_tokens": 150,
    },
    "exact KL in the loss, a controller and a moving reference": {
        **TWICE,
        "beta": 0.1,
        "kl_estimator": "full",
        "kl_target": (0.01, 100.0),
        "ref_policy_update": (1, 0.5),
        "shuffle_mini_batches": False,
        "advantage_normalization_type": "leave_one_out",
        "loss_norm": "sequence",
        "batch_layout": "padded",
        "adam_betas": (0.8, 0.95),
        "max_grad_norm": 0.0,
    },
    "KL in both places, weights of stale samples": {
        "beta": 0.5,
        "kl_placement": "both",
        "kl_estimator": "k3",
        "kl_reward_coef": 0.2,
        "kl_reward_estimator": "k2",
        "kl_target": (0.01, 100.0),
        "async_steps": 1,
        "learning_rate": 1e-2,
        "truncated_importance_sampling_ratio_cap": 1.05,
        "importance_sampling_mask": (0.8, 5.0),
        "advantage_normalization_type": "centered",
        "batch_layout": "packed",
    },
    "KL in the reward before it is normalized, samples left out": {
        **TWICE,
        "beta": 0.1,
        "kl_placement": "reward",
        "kl_reward_norm": "before_norm",
        "kl_reward_estimator": "full",
        "max_response_length": 24,
        "filter_zero_std_samples": True,
        "mask_truncated_completions": True,
        "mask_no_eos_with_zero": True,
    },
    "shaped rewards, groups without a gradient, momentum": {
        "num_mini_batches": 4,
        "learning_rate": 1e-3,
        "num_samples_per_prompt_rollout": 2,
        "max_response_length": 24,
        "reward_scaling": -2.0,
        "reward_bias": 0.3,
        "non_stop_penalty": 0.5,
        "overlong_buffer": 5,
        "max_reward_clip": 0.6,
        "gradient_checkpointing": True,
    },
}


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A model whose responses end, some of them."""
    return make_chatty(tmp_path_factory.mktemp("chatty") / "model")


@pytest.mark.integration
@pytest.mark.parametrize("case", CASES)
def test_a_run_takes_the_steps_that_follow_from_the_formulas(chatty, tmp_path, monkeypatch, case):
    """Rewards, masks, coefficients, advantages, losses, gradients and the motion of the weights, of two steps."""
    args = tiny_args(chatty, tmp_path, **CASES[case])
    recorder = Recorder(monkeypatch)
    run_here(args)
    oracle = Oracle(args, chatty, ADAM_EPS)
    for number, recorded in enumerate(recorder.steps, 1):
        samples, updates = recorded["samples"], recorded["updates"]
        for s in samples:
            reward = shaped(s.score, s.finish_reason == "length", len(s.response_ids), args)
            assert s.reward == pytest.approx(reward, abs=1e-9)
        assert recorded["coefficients"] == pytest.approx((oracle.beta, oracle.reward_coef), rel=1e-4)
        step = oracle.begin(recorded)
        assert step["in_loss"] == recorded["in_loss"]
        for i in step["in_loss"]:
            theirs = recorded["advantages"][recorded["offsets"][i] : recorded["offsets"][i + 1]]
            torch.testing.assert_close(theirs, step["advantages"][i], rtol=1e-3, atol=1e-4)
        expected = oracle.mini_batches(number, samples, step["in_loss"])
        assert len(updates) == len(expected) > 0
        k1 = []
        for (k, members), update, after in zip(expected, updates, [*updates[1:], None], strict=True):
            ours = oracle.update(samples, step, members, update["before"])
            k1 += ours["k1"]
            assert update["loss"] == pytest.approx(ours["loss"], rel=1e-3, abs=1e-5)
            if any(g.any() for g in ours["gradient"].values()):
                assert apart(update["gradient"], ours["gradient"]) < 1e-3
            rate = learning_rate(k, args.total_steps * args.num_epochs * args.num_mini_batches, args)
            later = after["before"] if after else recorded["after"]
            moved = {name: later[name].double() - w.double() for name, w in update["before"].items()}
            found = oracle.adamw(ours["gradient"], update["before"], rate)
            print("MOVE", apart(moved, found))
        oracle.end(number, len(samples), k1, recorded["after"])

"""An update of grpo.py in double precision, written from the formulas: nothing of the training scripts is called.

``token_loss`` is the oracle of the losses. ``Oracle`` computes rewards, masks, advantages, gradients and AdamW's steps
of a recorded run (tests/runs/test_fp64_update.py), each optimizer step from the weights that the run had.

Sources: PPO's clipped loss arXiv 1707.06347; group advantages 2402.03300, Dr. GRPO 2503.20783, RLOO 2402.14740; dual
clip 1912.09729; IcePop 2510.18855; DAPO's length penalty 2503.14476; KL estimators, Schulman 2020; its controller
1909.08593; AdamW 1711.05101.

Shapes in names: N tokens of all samples, T tokens of a response, V vocabulary.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

Weights = dict[str, Tensor]
ALIASES = {"kl": "k1", "kl1": "k1", "mse": "k2", "kl2": "k2", "low_var_kl": "k3", "kl3": "k3", "kl4": "k4"}


# -------------------------------------------------------------------------------------------------- loss of each token


def kl_value(name: str, logp: Tensor, old: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
    """(value, slope by the log-prob) of a sampled estimator, with the bounds of docs/kl.md."""
    d = (logp - ref).detach()
    ratio = (logp - old).detach().clamp(-20, 20).exp()
    low = d.clamp(min=-20)
    values = {"k1": d, "k2": d * d / 2, "k3": torch.exp(-low) - 1 + low, "k4": ratio * d, "abs": d.abs()}
    slopes = {"k1": torch.ones_like(d), "k2": d, "k3": 1 - torch.exp(-low), "k4": ratio * (d + 1), "abs": d.sign()}
    name = name.removesuffix("+")
    return values[ALIASES.get(name, name)], slopes[ALIASES.get(name, name)]


def kl_loss(x: dict[str, Tensor], args) -> Tensor:
    """The sampled KL in the loss of each token, before weight and coefficient, with its gradient."""
    logp = x["logprobs_T"]
    value, slope = kl_value(args.kl_estimator, logp, x["old_T"], x["ref_T"])
    if args.kl_estimator.endswith("+"):  # the gradient of ratio k3
        ratio = (logp - x["old_T"]).detach().clamp(-20, 20).exp()
        slope = ratio.clamp(max=10) * (logp - x["ref_T"]).detach().clamp(-10, 10)
    return value + slope * (logp - logp.detach())


def importance_weight(x: dict[str, Tensor], args) -> Tensor:
    """old / sampler of each token within the bounds of the flags; 1 without them."""
    cap, mask = args.truncated_importance_sampling_ratio_cap, args.importance_sampling_mask
    weight = (x["old_T"] - x["sampler_T"]).detach().exp()
    if not cap and mask is None:
        return torch.ones_like(weight)
    if mask is not None:
        weight = torch.where((weight < mask[0]) | (weight > mask[1]), 0.0, weight)
    return weight.clamp(max=cap) if cap else weight


def token_loss(x: dict[str, Tensor], beta: float, args) -> Tensor:
    """The loss of each token before its weight. ``x``: the fields of the scripts' Tokens."""
    advantage = x["advantages_T"]
    ratio = (x["logprobs_T"] - x["old_T"]).clamp(-20, 20).exp()
    # A ratio outside the bounds counts as the bound where that makes the loss larger: then it has no gradient.
    low, high = 1 - args.clip_lower, 1 + args.clip_higher
    policy = torch.where((ratio > high) & (advantage > 0), -advantage * high, -advantage * ratio)
    policy = torch.where((ratio < low) & (advantage < 0), -advantage * low, policy)
    if args.clip_ratio_c is not None:
        far = (advantage < 0) & (ratio > args.clip_ratio_c)
        policy = torch.where(far, -advantage * args.clip_ratio_c, policy)
    weight = importance_weight(x, args)
    loss = weight * policy - args.entropy_coef * x["entropy_T"]
    if beta == 0:
        return loss
    return loss + beta * (x["full_kl_T"] if args.kl_estimator == "full" else weight * kl_loss(x, args))


# ------------------------------------------------------------------------------------------------- advantages and rates


def group_advantages(rewards: list[float], args) -> list[float]:
    """One advantage per response of a group."""
    count = len(rewards)
    mean = math.fsum(rewards) / count
    if equal(rewards):
        return [0.0] * count
    scale = {"standard": 1.0, "centered": 1.0, "leave_one_out": count / (count - 1)}[args.advantage_normalization_type]
    if args.advantage_normalization_type == "standard":
        variance = math.fsum((r - mean) ** 2 for r in rewards) / (count - 1)
        scale = 1 / (math.sqrt(variance) + args.advantage_eps)
    return [(r - mean) * scale for r in rewards]


def equal(rewards: list[float]) -> bool:
    """Return True if rewards differ by rounding at most."""
    return max(rewards) - min(rewards) < 1e-9 * max(1e-3, *map(abs, rewards))


def shaped(score: float, truncated: bool, length: int, args) -> float:
    """The reward made of a verifier's score."""
    if truncated and args.mask_no_eos_with_zero:
        score = 0.0
    reward = (score - args.reward_bias) * args.reward_scaling - truncated * args.non_stop_penalty
    if buffer := args.overlong_buffer:
        over = length - (args.max_response_length - buffer)
        reward -= min(1.0, max(0.0, over / buffer))
    limit = args.max_reward_clip or math.inf
    return min(limit, max(-limit, reward))


def learning_rate(k: int, total: int, args) -> float:
    """The rate of optimizer step k, from 0, of ``total``."""
    warm = round(args.warmup_steps * total) if args.warmup_steps < 1 else int(args.warmup_steps)
    if k < warm:
        return args.learning_rate * (k + 1) / (warm + 1)
    part = (k - warm) / (total - warm)
    shape = {"constant": 1.0, "linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2}
    return args.learning_rate * (args.lr_min_ratio + (1 - args.lr_min_ratio) * shape[args.lr_scheduler_type])


# ----------------------------------------------------------------------------------------------------------- whole runs


@dataclass
class Oracle:
    """The state of a run that every step carries on: moments, coefficients, reference."""

    args: Any
    path: Path  # of the model that policy and reference begin as
    adam_eps: float
    first: Weights = field(default_factory=dict)  # AdamW's moments
    second: Weights = field(default_factory=dict)
    taken: int = 0

    def __post_init__(self) -> None:
        args = self.args
        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float64, attn_implementation="eager")
        self.model.model.embed_tokens.padding_idx = None  # the padding token is EOS, whose row has a gradient
        self.reference = {name: w.detach().clone() for name, w in self.model.named_parameters()}
        coef = args.beta if args.kl_reward_coef is None else args.kl_reward_coef
        self.beta = args.beta * (args.kl_placement in ("loss", "both"))
        self.reward_coef = coef * (args.kl_placement in ("reward", "both"))
        self.has_reference = bool(self.beta or self.reward_coef)

    def logp(self, weights: Weights, samples: list) -> list[Tensor]:
        """Log-probs over the vocabulary, [T, V], of each sample, by a plain pass over it alone."""
        self.model.load_state_dict(weights, strict=False)
        found = []
        for s in samples:
            ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
            logits = self.model(input_ids=ids, use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1]
            found.append((logits / self.args.temperature).log_softmax(-1))
        return found

    def begin(self, recorded: dict[str, Any]) -> dict[str, Any]:
        """What phases 5 and 6 of a step find: masks, log-probs and advantages."""
        args, samples = self.args, recorded["samples"]
        with torch.no_grad():
            old = [drawn(x, s) for x, s in zip(self.logp(recorded["weights"], samples), samples, strict=True)]
            full = self.logp(self.reference, samples) if self.has_reference else None
            policy = self.logp(recorded["weights"], samples)
        kl = [torch.zeros_like(x) for x in old]
        if self.reward_coef:
            for i, sample in enumerate(samples):
                exact = (policy[i].exp() * (policy[i] - full[i])).sum(-1)
                name = args.kl_reward_estimator
                kl[i] = exact if name == "full" else kl_value(name, old[i], old[i], drawn(full[i], sample))[0]
        inside = args.kl_reward_norm == "before_norm"
        rewards = [s.reward - inside * self.reward_coef * float(k.sum()) for s, k in zip(samples, kl, strict=True)]
        size = args.num_samples_per_prompt_rollout
        values = []
        in_loss = []
        for start in range(0, len(samples), size):
            values += group_advantages(rewards[start : start + size], args)
            same = equal([s.reward for s in samples[start : start + size]])
            for i in range(start, start + size):
                truncated = args.mask_truncated_completions and samples[i].finish_reason == "length"
                if not truncated and not (args.filter_zero_std_samples and same):
                    in_loss.append(i)
        to_go = [k.flip(0).cumsum(0).flip(0) * self.reward_coef * (not inside) for k in kl]
        advantages = [value - penalty for value, penalty in zip(values, to_go, strict=True)]
        self.reward_kl = sum(float(k.mean()) for k in kl) / len(samples)
        return {"in_loss": in_loss, "old": old, "ref": full, "advantages": advantages}

    def mini_batches(self, number: int, samples: list, in_loss: list[int]) -> list[tuple[int, list[int]]]:
        """(number of the optimizer step in the run, samples in its loss) of each optimizer step that has any."""
        args = self.args
        groups = sorted({samples[i].prompt_id for i in in_loss})
        found = []
        for epoch in range(args.num_epochs):
            order = list(groups)
            if args.shuffle_mini_batches:
                random.Random(f"{args.seed}/{number}/{epoch}").shuffle(order)
            size = len(order) / args.num_mini_batches
            for mini in range(args.num_mini_batches):
                chosen = set(order[round(mini * size) : round((mini + 1) * size)])
                members = [i for i in in_loss if samples[i].prompt_id in chosen]
                k = ((number - 1) * args.num_epochs + epoch) * args.num_mini_batches + mini
                found += [(k, members)] if members else []
        return found

    def update(self, samples: list, step: dict[str, Any], members: list[int], weights: Weights) -> dict[str, Any]:
        """Loss, gradient and mean k1 of an optimizer step at given weights."""
        args = self.args
        self.model.zero_grad()
        known = self.logp(weights, [samples[i] for i in members])
        lengths = {i: len(samples[i].response_ids) for i in members}
        total, k1 = torch.zeros((), dtype=torch.float64), []
        for i, logp_TV in zip(members, known, strict=True):
            logp = drawn(logp_TV, samples[i])
            x = {"logprobs_T": logp, "advantages_T": step["advantages"][i], "ref_T": torch.zeros_like(logp)}
            x["old_T"] = logp.detach() if args.num_epochs * args.num_mini_batches == 1 else step["old"][i]
            x["sampler_T"] = torch.tensor(samples[i].sampler_logprobs, dtype=torch.float64)
            x["entropy_T"] = -(logp_TV.exp() * logp_TV).sum(-1)
            if self.has_reference:
                x["ref_T"] = drawn(step["ref"][i], samples[i])
                x["full_kl_T"] = (logp_TV.exp() * (logp_TV - step["ref"][i])).sum(-1)
                k1.append((logp - x["ref_T"]).detach())
            share = {
                "token": 1 / sum(lengths.values()),
                "sequence": 1 / (len(members) * lengths[i]),
                "constant": 1 / (len(members) * args.max_response_length),
            }
            total = total + (token_loss(x, self.beta, args) * share[args.loss_norm]).sum()
        total.backward()
        gradient = {name: w.grad.clone() for name, w in self.model.named_parameters()}
        return {"loss": total.item(), "gradient": gradient, "k1": k1}

    def adamw(self, gradient: Weights, weights: Weights, rate: float) -> Weights:
        """The change of each weight in an optimizer step."""
        args = self.args
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        scale = min(1.0, args.max_grad_norm / (norm + 1e-6)) if args.max_grad_norm else 1.0
        beta1, beta2 = args.adam_betas
        self.taken += 1
        moved = {}
        for name, g in gradient.items():
            g = g * scale
            self.first[name] = beta1 * self.first.get(name, torch.zeros_like(g)) + (1 - beta1) * g
            self.second[name] = beta2 * self.second.get(name, torch.zeros_like(g)) + (1 - beta2) * g * g
            mean = self.first[name] / (1 - beta1**self.taken)
            root = (self.second[name] / (1 - beta2**self.taken)).sqrt() + self.adam_eps
            moved[name] = -rate * args.weight_decay * weights[name].double() - rate * mean / root
        return moved

    def end(self, number: int, samples: int, k1: list[Tensor], after: Weights) -> None:
        """Update the state after a step: a moving reference, and the coefficient of the KL controller."""
        args = self.args
        if args.ref_policy_update is not None and number % args.ref_policy_update[0] == 0:
            alpha = args.ref_policy_update[1]
            for name, w in self.reference.items():
                self.reference[name] = alpha * after[name].double() + (1 - alpha) * w
        if args.kl_target is None:
            return
        target, horizon = args.kl_target
        found = self.reward_kl if self.reward_coef else float(torch.cat(k1).mean())
        factor = 1 + min(0.2, max(-0.2, found / target - 1)) * samples / horizon
        if self.reward_coef:
            self.reward_coef *= factor
        else:
            self.beta *= factor


def drawn(logp_TV: Tensor, sample) -> Tensor:
    """Log-probs of the tokens that were drawn, [T]."""
    return logp_TV.gather(-1, torch.as_tensor(sample.response_ids, dtype=torch.long)[:, None])[:, 0]

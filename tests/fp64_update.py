"""An update of grpo.py in double precision, written from the formulas: nothing of the training scripts is called.

It computes masks, rewards, log-probs, advantages, losses, gradients and AdamW's steps of recorded steps
(tests/random_runs.py), each optimizer step from the weights that the run had. The model is a Llama, written out here.

Sources: PPO's clipped loss arXiv 1707.06347; group advantages 2402.03300, Dr. GRPO 2503.20783, RLOO 2402.14740; dual
clip 1912.09729; IcePop 2510.18855; DAPO's length penalty 2503.14476; KL estimators, Schulman 2020; its controller
1909.08593; AdamW 1711.05101; RoPE 2104.09864; SwiGLU 2002.05202.

Shapes in names: B samples, S positions, L ids of a response, T of them the model's, V vocabulary.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]
ALIASES = {"kl": "k1", "kl1": "k1", "mse": "k2", "kl2": "k2", "low_var_kl": "k3", "kl3": "k3", "kl4": "k4"}
KINK = 1e-4  # nats: a token this close to where a loss bends may be on its other side in fp32


# ----------------------------------------------------------------------------------------------------------- the model


def llama(w: Weights, config: dict[str, Any], ids_BS: Tensor) -> Tensor:
    """Logits [B, S, V] of a Llama with as many key heads as query heads, and a tied head."""
    heads = config["num_attention_heads"]
    batch, length = ids_BS.shape
    width = config["hidden_size"] // heads
    theta = config["rope_parameters"]["rope_theta"]
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    future = torch.full((length, length), -math.inf, dtype=torch.float64).triu(1)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat([-high, low], -1) * sin

    x = w["model.embed_tokens.weight"][ids_BS]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        y = norm(x, f"{name}.input_layernorm")
        q, k, v = (
            (y @ w[f"{name}.self_attn.{p}_proj.weight"].T).view(batch, length, heads, width).transpose(1, 2)
            for p in "qkv"
        )
        scores = rotated(q) @ rotated(k).transpose(2, 3) / math.sqrt(width) + future
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, heads * width)
        x = x + mixed @ w[f"{name}.self_attn.o_proj.weight"].T
        y = norm(x, f"{name}.post_attention_layernorm")
        gate, up = (y @ w[f"{name}.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"{name}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ w["model.embed_tokens.weight"].T


def log_softmax_of(w: Weights, config: dict[str, Any], samples: list[dict], temperature: float) -> list[Tensor]:
    """Log-probs over the vocabulary, [T, V], at each token of the model, per sample."""
    rows = [[*s["prompt_ids"], *s["response_ids"]] for s in samples]
    longest = max(map(len, rows))
    ids_BS = torch.tensor([row + [0] * (longest - len(row)) for row in rows])  # on the right: no token sees it
    logits_BSV = llama(w, config, ids_BS) / temperature
    found = []
    for sample, logits_SV in zip(samples, logits_BSV, strict=True):
        first = len(sample["prompt_ids"]) - 1
        logits_LV = logits_SV[first : first + len(sample["response_ids"])]
        found.append(logits_LV[own(sample)].log_softmax(-1))
    return found


def own(sample: dict) -> Tensor:
    """Mark the ids of a response that the model wrote, [L]: all but those of the spans of observations."""
    wrote = torch.ones(len(sample["response_ids"]), dtype=torch.bool)
    for start, end in sample["observed"]:
        wrote[start:end] = False
    return wrote


def of_tokens(logp_TV: Tensor, sample: dict) -> Tensor:
    """Log-probs of the tokens that were drawn, [T]."""
    drawn_T = torch.tensor(sample["response_ids"])[own(sample)]
    return logp_TV.gather(-1, drawn_T[:, None])[:, 0]


# ------------------------------------------------------------------------------------------------------- the formulas


def shaped(score: float, sample: dict, a: dict[str, Any]) -> float:
    """The reward made of a verifier's score."""
    truncated = sample["finish_reason"] == "length"
    if truncated and a["mask_no_eos_with_zero"]:
        score = 0.0
    reward = (score - a["reward_bias"]) * a["reward_scaling"] - truncated * a["non_stop_penalty"]
    if buffer := a["overlong_buffer"]:
        over = len(sample["response_ids"]) - (a["max_response_length"] - buffer)
        reward -= min(1.0, max(0.0, over / buffer))
    limit = a["max_reward_clip"] or math.inf
    return min(limit, max(-limit, reward))


def group_advantages(rewards: list[float], a: dict[str, Any]) -> list[float]:
    """One advantage per response of a group."""
    count = len(rewards)
    mean = math.fsum(rewards) / count
    if max(rewards) - min(rewards) < 1e-9 * max(1e-3, *map(abs, rewards)):
        return [0.0] * count
    kind = a["advantage_normalization_type"]
    scale = 1.0
    if kind == "standard":
        variance = math.fsum((r - mean) ** 2 for r in rewards) / (count - 1)
        scale = 1 / (math.sqrt(variance) + a["advantage_eps"])
    if kind == "leave_one_out":
        scale = count / (count - 1)
    return [(r - mean) * scale for r in rewards]


def kl_value(name: str, logp_T: Tensor, old_T: Tensor, ref_T: Tensor) -> Tensor:
    """An estimator's value per token, differentiable in ``logp_T``."""
    d_T = logp_T - ref_T
    match ALIASES.get(name, name):
        case "k1":
            return d_T
        case "k2":
            return d_T**2 / 2
        case "k3":
            return (-d_T).exp() - 1 + d_T
        case "k4":
            return (logp_T - old_T).exp() * d_T
        case "abs":
            return d_T.abs()
    raise ValueError(name)


def full_kl(logp_TV: Tensor, ref_TV: Tensor) -> Tensor:
    """KL(policy || reference) over the vocabulary, [T]."""
    return (logp_TV.exp() * (logp_TV - ref_TV)).sum(-1)


def learning_rate(k: int, total: int, a: dict[str, Any]) -> float:
    """The rate of optimizer step k, from 0, of ``total``."""
    warm = round(a["warmup_steps"] * total) if a["warmup_steps"] < 1 else int(a["warmup_steps"])
    if k < warm:
        return a["learning_rate"] * (k + 1) / (warm + 1)
    part = (k - warm) / (total - warm)
    shape = {"constant": 1.0, "linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2}
    low = a["lr_min_ratio"]
    return a["learning_rate"] * (low + (1 - low) * shape[a["lr_scheduler_type"]])


# ------------------------------------------------------------------------------------------------------------- a run


@dataclass
class Step:
    """The numbers of a step that are the same for all of its optimizer steps. Lists have an entry per sample."""

    a: dict[str, Any]
    samples: list[dict]
    beta: float
    in_loss: list[int]
    old: list[Tensor]  # [T] log-probs at the weights that the step began with
    ref: list[Tensor] | None  # [T, V] log-probs of the reference over the vocabulary
    advantages: list[Tensor]  # [T]
    sides: dict[str, list[Tensor]] | None = None  # [T] the run's own log-probs, where its side of a kink is wanted
    kinks: int = 0

    def side(self, name: str, i: int, own_T: Tensor, bends: list[float]) -> Tensor:
        """Values that decide on which side of a bend a token is: this computation's, or near one the run's own."""
        near_T = torch.zeros_like(own_T, dtype=torch.bool)
        for bend in bends:
            near_T |= (own_T.detach() - bend).abs() < KINK
        self.kinks += int(near_T.sum())
        if self.sides is None:
            return own_T
        return torch.where(near_T, self.sides[name][i], own_T)

    def token_loss(self, i: int, logp_TV: Tensor, only_step: bool) -> tuple[Tensor, Tensor]:
        """(loss [T], ratio [T]) of the tokens of a sample, before their weights."""
        a, sample = self.a, self.samples[i]
        logp_T = of_tokens(logp_TV, sample)
        old_T = logp_T.detach() if only_step else self.old[i]
        adv_T = self.advantages[i]
        log_ratio_T = logp_T - old_T
        ratio_T = log_ratio_T.exp()
        low, high = math.log(1 - a["clip_lower"]), math.log(1 + a["clip_higher"])
        bends = [low, high, *([math.log(a["clip_ratio_c"])] if a["clip_ratio_c"] else [])]
        side_T = self.side("log_ratio", i, log_ratio_T, [] if only_step else bends)
        # A ratio outside the bounds counts as the bound where that makes the loss larger: then it has no gradient.
        above_T, below_T = side_T > high, side_T < low
        policy_T = -adv_T * ratio_T
        policy_T = torch.where(above_T & (adv_T > 0), -adv_T * (1 + a["clip_higher"]), policy_T)
        policy_T = torch.where(below_T & (adv_T < 0), -adv_T * (1 - a["clip_lower"]), policy_T)
        if a["clip_ratio_c"]:
            beyond_T = (adv_T < 0) & (side_T > math.log(a["clip_ratio_c"]))
            policy_T = torch.where(beyond_T, -adv_T * a["clip_ratio_c"], policy_T)
        weight_T = self.importance_weight(i, old_T)
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        loss_T = weight_T * policy_T - a["entropy_coef"] * entropy_T
        if self.beta > 0:
            loss_T = loss_T + self.beta * self.kl_loss(i, logp_TV, logp_T, old_T, weight_T)
        return loss_T, ratio_T.detach()

    def importance_weight(self, i: int, old_T: Tensor) -> Tensor:
        """old / sampler of each token, [T], within the bounds of the flags; 1 without them."""
        cap, mask = self.a["truncated_importance_sampling_ratio_cap"], self.a["importance_sampling_mask"]
        if cap is None and mask is None:
            return torch.ones_like(old_T)
        log_T = (old_T - torch.tensor(self.samples[i]["sampler_logprobs"], dtype=torch.float64)).detach()
        weight_T = log_T.exp()
        if mask is not None:
            bends = [math.log(max(mask[0], 1e-300)), math.log(mask[1])]
            side_T = self.side("log_weight", i, log_T, bends)
            weight_T = torch.where((side_T >= bends[0]) & (side_T <= bends[1]), weight_T, 0.0)
        return weight_T if cap is None else weight_T.clamp(max=cap)

    def kl_loss(self, i: int, logp_TV: Tensor, logp_T: Tensor, old_T: Tensor, weight_T: Tensor) -> Tensor:
        """The KL in the loss of each token, [T], before its coefficient."""
        name = ALIASES.get(self.a["kl_estimator"], self.a["kl_estimator"])
        if name == "full":
            return full_kl(logp_TV, self.ref[i])
        ref_T = of_tokens(self.ref[i], self.samples[i])
        value_T = kl_value(name, logp_T, old_T, ref_T)
        if self.a["kl_gradient"] == "unbiased":  # the gradient of ratio k3: ratio d
            d_T = (logp_T - ref_T).detach().clamp(-10, 10)
            slope_T = (logp_T - old_T).detach().exp().clamp(max=10) * d_T
            value_T = value_T.detach() + slope_T * (logp_T - logp_T.detach())
        elif name == "abs":
            side_T = self.side("log_ref", i, logp_T - ref_T, [0.0])
            value_T = side_T.detach().sign() * (logp_T - ref_T)
        return weight_T * value_T


@dataclass
class Oracle:
    """The state of a run that every step carries on: moments, coefficients, reference."""

    a: dict[str, Any]
    config: dict[str, Any]
    reference: Weights
    adam_eps: float
    first: Weights = field(default_factory=dict)  # AdamW's moments
    second: Weights = field(default_factory=dict)
    taken: int = 0
    versions: dict[int, Weights] = field(default_factory=dict)  # the weights that each step began with

    def __post_init__(self) -> None:
        a = self.a
        coef = a["beta"] if a["kl_reward_coef"] is None else a["kl_reward_coef"]
        self.beta = a["beta"] * (a["kl_placement"] in ("loss", "both"))
        self.reward_coef = coef * (a["kl_placement"] in ("reward", "both"))
        self.has_reference = bool(self.beta or self.reward_coef or a["load_ref_policy"])
        self.in_reward = self.reward_coef > 0

    def logp(self, weights: Weights, samples: list[dict]) -> list[Tensor]:
        return log_softmax_of(weights, self.config, samples, self.a["temperature"])

    def begin(self, number: int, recorded: dict[str, Any], use_runs: bool) -> tuple[Step, dict[str, Any]]:
        """(what phases 5 and 6 of a step find, that as it is compared with the run).

        ``use_runs``: take the run's own advantages, and its sides of kinks.
        """
        a, samples = self.a, recorded["samples"]
        self.versions[number] = {name: w.double() for name, w in recorded["weights"].items()}
        with torch.no_grad():
            old_TV = self.logp(self.versions[number], samples)
            ref_TV = self.logp(self.reference, samples) if self.has_reference else None
        old = [of_tokens(x, s) for x, s in zip(old_TV, samples, strict=True)]
        kl_of = []
        for i, sample in enumerate(samples if self.in_reward else []):
            if a["kl_reward_estimator"] == "full":
                kl_of.append(full_kl(old_TV[i], ref_TV[i]))
            else:
                kl_of.append(kl_value(a["kl_reward_estimator"], old[i], old[i], of_tokens(ref_TV[i], sample)))
        rewards = [s["reward"] for s in samples]
        inside = self.in_reward and a["kl_reward_norm"] == "before_norm"
        if inside:
            rewards = [r - self.reward_coef * float(k.sum()) for r, k in zip(rewards, kl_of, strict=True)]
        size = a["num_samples_per_prompt_rollout"]
        advantages = []
        slack = [1.0] * len(samples)
        for start in range(0, len(samples), size):
            if self.equal(samples[start : start + size]) and not inside:
                advantages += [0.0] * size
            else:
                advantages += group_advantages(rewards[start : start + size], a)
            if inside and a["advantage_normalization_type"] == "standard":
                spread = float(torch.tensor(rewards[start : start + size], dtype=torch.float64).std())
                longest = max(len(x) for x in kl_of[start : start + size])
                slack[start : start + size] = [0.1 * self.reward_coef * longest / (spread + a["advantage_eps"])] * size
        per_token = []
        for i, value in enumerate(advantages):
            value_T = torch.full_like(old[i], value)
            if self.in_reward and not inside:  # the penalties from each token to the end of its response
                value_T -= self.reward_coef * kl_of[i].flip(0).cumsum(0).flip(0)
            per_token.append(value_T)
        in_loss = [i for i, s in enumerate(samples) if not self.left_out(s, samples)]
        reward_kl = sum(float(k.mean()) for k in kl_of) / len(samples) if kl_of else None
        self.reward_kl = reward_kl
        found = {"advantages": per_token, "in_loss": in_loss, "sampler": self.sampler_gap(number, samples)}
        found["slack"] = slack  # by how much rounding of the KL is amplified where a group's spread divides it
        if use_runs:
            per_token = recorded["advantages"]
        return Step(a, samples, self.beta, in_loss, old, ref_TV, per_token), found

    def equal(self, group: list[dict]) -> bool:
        rewards = [s["reward"] for s in group]
        return max(rewards) - min(rewards) < 1e-9 * max(1e-3, *map(abs, rewards))

    def left_out(self, sample: dict, samples: list[dict]) -> bool:
        """Return True if a sample is excluded from the loss and from its normalization."""
        if self.a["mask_truncated_completions"] and sample["finish_reason"] == "length":
            return True
        group = [s for s in samples if s["prompt_id"] == sample["prompt_id"]]
        return self.a["filter_zero_std_samples"] and self.equal(group)

    def sampler_gap(self, number: int, samples: list[dict]) -> float:
        """Largest distance, in nats, of the sampler's log-probs from those of the weights that drew the tokens."""
        gap = 0.0
        wanted = {int(version) for s in samples for version in s["token_versions"]}
        for version in wanted & set(self.versions):
            with torch.no_grad():
                known = self.logp(self.versions[version], samples)
            for logp_TV, sample in zip(known, samples, strict=True):
                from_it = torch.tensor(sample["token_versions"]) == version
                apart_T = (of_tokens(logp_TV, sample) - torch.tensor(sample["sampler_logprobs"])).abs()
                gap = max(gap, float(torch.where(from_it, apart_T, 0.0).max()))
        return gap

    def mini_batches(self, number: int, step: Step) -> list[tuple[int, list[int]]]:
        """(number of the optimizer step in the run, samples in its loss) of each optimizer step that has any."""
        a = self.a
        groups = sorted({step.samples[i]["prompt_id"] for i in step.in_loss})
        found = []
        for epoch in range(a["num_epochs"]):
            order = list(groups)
            if a["shuffle_mini_batches"]:
                random.Random(f"{a['seed']}/{number}/{epoch}").shuffle(order)
            size = len(order) / a["num_mini_batches"]
            for mini in range(a["num_mini_batches"]):
                chosen = set(order[round(mini * size) : round((mini + 1) * size)])
                members = [i for i in step.in_loss if step.samples[i]["prompt_id"] in chosen]
                k = ((number - 1) * a["num_epochs"] + epoch) * a["num_mini_batches"] + mini
                if members:
                    found.append((k, members))
        return found

    def token_weights(self, members: list[int], step: Step) -> dict[int, float]:
        """The weight in the loss of each token of the samples of an optimizer step."""
        lengths = {i: int(own(step.samples[i]).sum()) for i in members}
        kind = self.a["loss_norm"]
        if kind == "token":
            return dict.fromkeys(members, 1 / sum(lengths.values()))
        if kind == "sequence":
            return {i: 1 / (len(members) * lengths[i]) for i in members}
        return dict.fromkeys(members, 1 / (len(members) * self.a["max_response_length"]))

    def update(self, step: Step, members: list[int], weights: Weights) -> dict[str, Any]:
        """Loss, gradient, mean ratio and k1 of an optimizer step at given weights."""
        a = self.a
        only_step = a["num_epochs"] * a["num_mini_batches"] == 1
        live = {name: w.double().requires_grad_() for name, w in weights.items()}
        known = self.logp(live, [step.samples[i] for i in members])
        share = self.token_weights(members, step)
        total, size, ratios, k1 = torch.zeros((), dtype=torch.float64), 0.0, [], []
        for i, logp_TV in zip(members, known, strict=True):
            loss_T, ratio_T = step.token_loss(i, logp_TV, only_step)
            total = total + (loss_T * share[i]).sum()
            size += float((loss_T.detach().abs() * share[i]).sum())
            group = [s for s in step.samples if s["prompt_id"] == step.samples[i]["prompt_id"]]
            if self.has_reference or a["entropy_coef"] != 0 or not self.equal(group):  # else nothing is computed of it
                ratios.append(ratio_T)
            if self.has_reference:
                k1.append((of_tokens(logp_TV, step.samples[i]) - of_tokens(step.ref[i], step.samples[i])).detach())
        total.backward()
        gradient = {name: w.grad for name, w in live.items()}
        ratio = float(torch.cat(ratios).mean()) if ratios else 1.0
        return {"loss": total.item(), "size": size, "gradient": gradient, "ratio": ratio, "k1": k1, "share": share}

    def adamw(self, gradient: Weights, weights: Weights, rate: float) -> Weights:
        """Return the change of each weight in an optimizer step."""
        a = self.a
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
        limit = a["max_grad_norm"]
        scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        beta1, beta2 = a["adam_betas"]
        self.taken += 1
        moved = {}
        for name, g in gradient.items():
            g = g * scale
            self.first[name] = beta1 * self.first.get(name, torch.zeros_like(g)) + (1 - beta1) * g
            self.second[name] = beta2 * self.second.get(name, torch.zeros_like(g)) + (1 - beta2) * g * g
            mean = self.first[name] / (1 - beta1**self.taken)
            root = (self.second[name] / (1 - beta2**self.taken)).sqrt() + self.adam_eps
            moved[name] = -rate * a["weight_decay"] * weights[name].double() - rate * mean / root
        return moved

    def end(self, number: int, samples: int, k1: list[Tensor], after: Weights) -> None:
        """Update the state after a step: a moving reference, and the coefficient of the KL controller."""
        a = self.a
        if a["ref_policy_update"] is not None and number % a["ref_policy_update"][0] == 0:
            alpha = a["ref_policy_update"][1]
            for name, w in self.reference.items():
                self.reference[name] = alpha * after[name].double() + (1 - alpha) * w
        if a["kl_target"] is None:
            return
        found = self.reward_kl if self.in_reward else float(torch.cat(k1).mean()) if k1 else None
        if found is None:
            return
        target, horizon = (*a["kl_target"], 10000.0)[:2]
        factor = 1 + min(0.2, max(-0.2, found / target - 1)) * samples / horizon
        if self.in_reward:
            self.reward_coef *= factor
        else:
            self.beta *= factor

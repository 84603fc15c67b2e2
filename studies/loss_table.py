"""The expected gradient of every policy loss next to the gradient of E[R], by exact enumeration.

    python studies/loss_table.py                              prints the table (a few seconds on one core)

studies/enumeration.py has the policies, over whose responses every expectation is a sum, and the CONDITIONS.

What grpo.py has is called from grpo.py (token_loss, loss_weights, group_advantages), so the table holds for the code
that trains. Every other loss is a function of a few lines below, with its source. docs/maintainers/losses.md explains
the columns.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from enumeration import (
    CONDITIONS,
    END,
    F64,
    PROMPTS,
    VOCABULARY,
    Policies,
    Row,
    World,
    policies_of,
    summarize,
)

import grpo
from kl_estimators import make_tokens
from runtime.data.samples import equal_rewards

# ----------------------------------------------------------------------------------------------------- policy losses


class Batch(NamedTuple):
    """Inputs of a policy loss: one entry per response token, [N]."""

    logprobs: Tensor  # pi's, with gradient
    old: Tensor
    sampler: Tensor
    advantages: Tensor
    owner: Tensor  # the response of each token
    lengths: Tensor  # [R], tokens of each response
    drift: Tensor  # the exact KL(sampler||pi) of the next token after each token's prefix
    vocabulary: Tensor  # [N, V], pi's log-probs of all next tokens after each token's prefix, with gradient
    drawn: Tensor  # [N, V], the sampler's probabilities of them

    def response_sum(self, values: Tensor) -> Tensor:
        """Return the sum over the token's response, at every token: [N] -> [N]."""
        sums = torch.zeros(len(self.lengths), dtype=F64).index_add(0, self.owner, values)
        return sums[self.owner]

    def response_mean(self, values: Tensor) -> Tensor:
        """Return the mean over the token's response, at every token: [N] -> [N]."""
        return self.response_sum(values) / self.lengths[self.owner]

    def before(self, values: Tensor, start: float, join: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Return the values of the earlier tokens of the response, joined one after another, at every token."""
        found = []
        for row in values.split(self.lengths.tolist()):
            held = torch.tensor(start, dtype=F64)
            for value in row:
                found.append(held)
                held = join(held, value)
        return torch.stack(found)


def loss_of(script: ModuleType, args: grpo.Args) -> Callable[[Batch], Tensor]:
    """Return a script's own loss of each token, without KL and entropy; all tokens have equal weight."""

    def loss(b: Batch) -> Tensor:
        known = {"old_T": b.old, "sampler_T": b.sampler, "advantages_T": b.advantages, "response_T": b.owner}
        tokens = make_tokens(script, logprobs_T=b.logprobs, weights_T=torch.ones_like(b.old), **known)
        return script.token_loss(tokens, 0.0, args)[0]

    return loss


def from_grpo(b: Batch, **settings) -> Tensor:
    """Return the loss of grpo.py with these arguments."""
    return loss_of(grpo, grpo.Args(**settings))(b)


def sequence_mismatch(b: Batch) -> Tensor:
    """Return the ratio old / sampler of the whole response, at every token."""
    return b.response_sum(b.old - b.sampler).exp()


def policy_gradient(b: Batch) -> Tensor:
    """Return the loss of REINFORCE, without a ratio."""
    return -b.advantages * b.logprobs


def sequence_ratio(b: Batch) -> Tensor:
    """Return the loss of REINFORCE with the importance ratio pi / sampler of the whole response."""
    ratio = b.response_sum(b.logprobs - b.sampler).exp().detach()
    return -ratio * b.advantages * b.logprobs


def token_ratio(b: Batch) -> Tensor:
    """Return the surrogate that PPO bounds: pi / old per token, no clip (Kakade & Langford 2002; TRPO, 1502.05477)."""
    return from_grpo(b, clip_lower=1.0, clip_higher=math.inf)


def ppo_clip(b: Batch) -> Tensor:
    """Return the loss of PPO, arXiv 1707.06347."""
    return from_grpo(b, clip_lower=0.2, clip_higher=0.2)


def clip_higher(b: Batch) -> Tensor:
    """Return the loss of DAPO, arXiv 2503.14476."""
    return from_grpo(b, clip_lower=0.2, clip_higher=0.28)


def dual_clip(b: Batch) -> Tensor:
    """Return the loss of PPO with a dual clip, arXiv 1912.09729."""
    return from_grpo(b, clip_ratio_c=3.0)


def tis_token(b: Batch) -> Tensor:
    """Return the loss of PPO clip with truncated importance sampling against the sampler, per token."""
    return from_grpo(b, truncated_importance_sampling_ratio_cap=2.0)


def tis_sequence(b: Batch) -> Tensor:
    """Return the loss of PPO clip with truncated importance sampling of whole responses."""
    return from_grpo(b) * sequence_mismatch(b).clamp(max=2.0)


def decoupled_ppo(b: Batch) -> Tensor:
    """Return decoupled PPO's loss: old is a proximal policy, old / sampler corrects the sampling (arXiv 2110.00641)."""
    return from_grpo(b, truncated_importance_sampling_ratio_cap=math.inf)


def icepop(b: Batch) -> Tensor:
    """Weight PPO clip by old / sampler per token, without gradient where it is outside [0.5, 5] (Ant Group 2025)."""
    return from_grpo(b, importance_sampling_mask=(0.5, 5.0))


def mis_token(b: Batch) -> Tensor:
    """Return the loss of PPO clip with masked importance sampling: like TIS, but tokens above the cap are dropped."""
    return from_grpo(b, importance_sampling_mask=(0.0, 2.0))


def mis_sequence(b: Batch) -> Tensor:
    """Return the loss of PPO clip with masked importance sampling of whole responses."""
    weight = sequence_mismatch(b)
    return from_grpo(b) * weight * (weight <= 2.0)


def sequence_rejection(b: Batch) -> Tensor:
    """Drop responses whose geometric mean of old / sampler is outside [0.9, 1.1]; no weight."""
    mean = b.response_mean(b.old - b.sampler).exp()
    kept = (mean >= 0.9) & (mean <= 1.1)
    return from_grpo(b) * kept


def off_policy_mask(b: Batch) -> Tensor:
    """Drop responses with A < 0 and a mean log(sampler / pi) above 0.1 (DeepSeek-V3.2, arXiv 2512.02556)."""
    distance = b.response_mean(b.sampler - b.logprobs.detach())
    dropped = (b.advantages < 0) & (distance > 0.1)
    return from_grpo(b) * ~dropped


def trust_region_masking(b: Batch) -> Tensor:
    """Drop a response if any token's KL(sampler||pi) is above 0.05; ratio pi / sampler (TRM, arXiv 2512.23075)."""
    ratio = (b.logprobs - b.sampler).exp()
    largest = torch.zeros(len(b.lengths), dtype=F64)
    largest = largest.scatter_reduce(0, b.owner, b.drift, "amax")
    kept = largest[b.owner] <= 0.05
    return -ratio * b.advantages * kept


def dppo(b: Batch, change: float = 0.1) -> Tensor:
    """Drop the gradient away from the sampler once |pi - sampler| > change (DPPO with binary TV, arXiv 2602.04879)."""
    ratio = (b.logprobs - b.sampler).exp()
    moved = (b.logprobs.exp() - b.sampler.exp()).detach()
    away = moved * b.advantages.sign()
    return -ratio * b.advantages * (away <= change)


def cispo(b: Batch, high: float = 0.28) -> Tensor:
    """Weight REINFORCE by the truncated, detached ratio, dropping no token (CISPO of MiniMax-M1, arXiv 2506.13585)."""
    ratio = (b.logprobs - b.old).exp().detach()
    return -ratio.clamp(max=1 + high) * b.advantages * b.logprobs


def gspo(b: Batch) -> Tensor:
    """Clip the geometric mean of a response's token ratios (GSPO, arXiv 2507.18071). Clip 0.2 (the paper's: 3e-4)."""
    ratio = b.response_mean(b.logprobs - b.old).exp()
    clipped = ratio.clamp(0.8, 1.2)
    loss = torch.maximum(-b.advantages * ratio, -b.advantages * clipped)
    return loss / b.lengths[b.owner]  # the loss of the response, divided among its tokens


def gmpo(b: Batch) -> Tensor:
    """Return GSPO's loss with each token's ratio bounded at e^0.4 the way A points (GMPO, arXiv 2507.20673)."""
    sign = b.advantages.sign()
    log_ratio = sign * (b.logprobs - b.old)
    bounded = torch.minimum(log_ratio, log_ratio.clamp(-0.4, 0.4))
    ratio = b.response_mean(sign * bounded).exp()
    return -b.advantages * ratio / b.lengths[b.owner]


def sapo(b: Batch) -> Tensor:
    """Replace the clip by a sigmoid of the ratio, steeper for negative advantages (SAPO of Qwen, arXiv 2511.20347)."""
    ratio = (b.logprobs - b.old).exp()
    temperature = torch.where(b.advantages > 0, torch.ones_like(ratio), 1.05)
    gate = torch.sigmoid(temperature * (ratio - 1))
    weight = gate * 4 / temperature
    return -weight * b.advantages


def dro(b: Batch) -> Tensor:
    """Return the loss of DRO per token: no ratio, and a quadratic penalty on log(pi / sampler) (arXiv 2405.19107)."""
    moved = b.logprobs - b.sampler
    penalty = 0.05 / 2 * moved.square()
    return penalty - b.advantages * b.logprobs


def ipo(b: Batch, change: float = 0.3) -> Tensor:
    """Drop tokens with |pi - sampler| > change, whatever the sign of A (IPO, the default of prime-rl 0.9)."""
    kept = (b.logprobs.exp() - b.sampler.exp()).detach().abs() <= change
    return -(b.logprobs - b.sampler).exp() * b.advantages * kept


def prefix_product(b: Batch) -> Tensor:
    """Weight a token by the product of pi / sampler up to it: the ratio of CTPO without its clip (arXiv 2605.07331)."""
    moved = (b.logprobs - b.sampler).detach()
    ratio = (b.before(moved, 0.0, torch.add) + moved).exp()
    return -ratio * b.advantages * b.logprobs


def prefix_minimum(b: Batch) -> Tensor:
    """Weight a token by pi / sampler times the smallest such ratio before it (MinPRO, arXiv 2601.22718)."""
    ratio = (b.logprobs - b.sampler).detach().exp()
    ratio = ratio * b.before(ratio, math.inf, torch.minimum).nan_to_num(posinf=1.0)
    return -ratio * b.advantages * b.logprobs


def topr(b: Batch) -> Tensor:
    """Weight responses with A < 0 by pi / sampler of all of it, at most 1, and no others (TOPR, arXiv 2503.14286)."""
    ratio = b.response_sum(b.logprobs - b.sampler).detach().exp().clamp(max=1)
    weight = torch.where(b.advantages < 0, ratio, torch.ones_like(ratio))
    return -weight * b.advantages * b.logprobs


def centered_scores(b: Batch) -> Tensor:
    """Subtract from the score of a token its mean under the sampler (score centering, arXiv 2609.20807)."""
    mean = (b.drawn * b.vocabulary).sum(-1)
    return -b.advantages * (b.logprobs - mean)


LOSSES: dict[str, Callable[[Batch], Tensor]] = {
    "policy gradient": policy_gradient,
    "sequence ratio": sequence_ratio,
    "token ratio": token_ratio,
    "PPO clip": ppo_clip,
    "clip-higher": clip_higher,
    "dual clip": dual_clip,
    "TIS, token": tis_token,
    "TIS, sequence": tis_sequence,
    "decoupled PPO": decoupled_ppo,
    "IcePop": icepop,
    "MIS, token": mis_token,
    "MIS, sequence": mis_sequence,
    "sequence rejection": sequence_rejection,
    "off-policy mask": off_policy_mask,
    "TRM": trust_region_masking,
    "DPPO": dppo,
    "CISPO": cispo,
    "GSPO": gspo,
    "GMPO": gmpo,
    "SAPO": sapo,
    "DRO": dro,
    "IPO": ipo,
    "prefix product": prefix_product,
    "prefix minimum": prefix_minimum,
    "TOPR": topr,
    "score centering": centered_scores,
}


def batch_of(world: World, policies: Policies) -> Batch:
    """Each response of the world once, with exact advantages."""
    sampler = policies.sampler.log_softmax(-1)
    drift = (sampler.exp() * (sampler - policies.pi.log_softmax(-1))).sum(-1)
    return Batch(
        logprobs=world.token_logprobs(policies.pi).requires_grad_(),
        old=world.token_logprobs(policies.old),
        sampler=world.token_logprobs(policies.sampler),
        advantages=world.advantages(policies.sampler)[world.owner],
        owner=world.owner,
        lengths=world.lengths,
        drift=drift[world.rows],
        vocabulary=policies.pi.log_softmax(-1)[world.rows].requires_grad_(),
        drawn=sampler.exp()[world.rows],
    )


class Expected(NamedTuple):
    """The update of a loss from one response, for every response of a world."""

    updates: Tensor  # [R, parameters]
    drawn: Tensor  # [R], the probability of each
    zero: float  # fraction of the sampled tokens without gradient


def expected(loss: Callable[[Batch], Tensor], world: World, policies: Policies) -> Expected:
    """Minus the gradient of the sum of a policy's token losses over a response."""
    batch = batch_of(world, policies)
    leaves = (batch.logprobs, batch.vocabulary)
    slopes, others = torch.autograd.grad(loss(batch).sum(), leaves, allow_unused=True)  # [N], [N, V]
    by_token = -slopes[:, None] * world.scores(policies.pi)
    if others is not None:  # a loss of log-probs of tokens that were not drawn
        chances = policies.pi.softmax(-1)[world.rows]
        by_row = torch.zeros(len(world.rows), world.n_rows, VOCABULARY, dtype=F64)
        by_row[torch.arange(len(world.rows)), world.rows] = others - others.sum(-1, keepdim=True) * chances
        by_token = by_token - by_row.flatten(1)
    drawn = world.probabilities(policies.sampler)
    drawn_tokens = drawn[world.owner]
    zero = drawn_tokens @ (slopes == 0).to(F64) / drawn_tokens.sum()
    return Expected(world.sum_over_response(by_token), drawn, zero.item())


def loss_row(name: str, world: World, policies: Policies) -> Row:
    """Return the row of a policy loss."""
    found = expected(LOSSES[name], world, policies)
    return summarize(found.updates, found.drawn, world, policies, responses=1, zero=found.zero)


GROUP = 4  # responses per prompt
RECIPES: dict[str, dict] = {
    "constant": {"loss_norm": "constant", "advantage_normalization_type": "leave_one_out"},
    "sequence": {"loss_norm": "sequence", "advantage_normalization_type": "leave_one_out"},
    "token": {"loss_norm": "token", "advantage_normalization_type": "leave_one_out"},
    "centered": {"loss_norm": "constant", "advantage_normalization_type": "centered"},
    "std": {"loss_norm": "constant", "advantage_normalization_type": "standard"},
    "filter": {
        "loss_norm": "constant",
        "advantage_normalization_type": "leave_one_out",
        "filter_zero_std_samples": True,
    },
    "GRPO": {"loss_norm": "sequence", "advantage_normalization_type": "standard"},
    "Dr. GRPO": {"loss_norm": "constant", "advantage_normalization_type": "centered"},
    "DAPO": {
        "loss_norm": "token",
        "advantage_normalization_type": "standard",
        "filter_zero_std_samples": True,
        "clip_higher": 0.28,
    },
    "VL norm": {"loss_norm": "constant", "advantage_normalization_type": "leave_one_out"},
    "two rewards, std": {"loss_norm": "constant", "advantage_normalization_type": "standard"},
    "GDPO": {"loss_norm": "constant", "advantage_normalization_type": "standard"},
}
RECIPE_CONDITIONS = ("fresh", "stale")


class Groups(NamedTuple):
    """All groups of responses to one prompt: combinations with repetition."""

    probability: Tensor  # [groups]
    updates: Tensor  # [groups, GROUP, parameters], of each member before weighting
    layouts: list[tuple[tuple[int, ...], bool]]  # of each group: lengths of its members, whether all rewards are equal
    tokens: Tensor  # [groups]
    zero: Tensor  # [groups], tokens without gradient


def groups_of(
    world: World,
    policies: Policies,
    prompt: int,
    args: grpo.Args,
    script: ModuleType = grpo,
    parts: list[Tensor] | None = None,
) -> Groups:
    """Every group of one prompt, with the advantages and the loss of a script. ``parts``: as for step_row."""
    own = torch.nonzero(world.prompts == prompt).flatten().tolist()
    combinations = list(itertools.combinations_with_replacement(own, GROUP))
    orders = [len(set(itertools.permutations(group))) for group in combinations]
    members = torch.tensor(combinations)  # [groups, GROUP], indices of responses
    drawn = PROMPTS * world.probabilities(policies.sampler)
    probability = torch.tensor(orders, dtype=F64) * drawn[members].prod(1)
    rewards = world.rewards[members]
    kind = args.advantage_normalization_type
    advantages = sum(script.group_advantages(part[members], kind) for part in parts or [world.rewards])

    # the tokens of all members of all groups, one after the other
    flat = members.flatten()
    token = torch.cat([torch.nonzero(world.owner == i).flatten() for i in flat])
    slot = torch.arange(len(flat)).repeat_interleave(world.lengths[flat])
    logprobs = world.token_logprobs(policies.pi)[token].requires_grad_()
    old = world.token_logprobs(policies.old)[token]
    sampler = world.token_logprobs(policies.sampler)[token]
    known = {"old_T": old, "sampler_T": sampler, "advantages_T": advantages.flatten()[slot], "response_T": slot}
    loss, _ = script.token_loss(make_tokens(script, logprobs_T=logprobs, **known), 0.0, args)
    slopes = torch.autograd.grad(loss.sum(), logprobs)[0]
    scores = world.scores(policies.pi)[token]
    updates = torch.zeros(len(flat), scores.shape[1], dtype=F64)
    updates.index_add_(0, slot, -slopes[:, None] * scores)

    equal = equal_rewards(rewards.amin(1), rewards.amax(1))
    lengths = world.lengths[members]
    layouts = []
    for group, flag in zip(lengths.tolist(), equal.tolist(), strict=True):
        layout = (tuple(group), flag)
        layouts.append(layout)
    idle = torch.zeros(len(flat), dtype=F64)
    idle.index_add_(0, slot, (slopes == 0).to(F64))
    return Groups(
        probability=probability,
        updates=updates.view(*members.shape, -1),
        layouts=layouts,
        tokens=lengths.sum(1).to(F64),
        zero=idle.view(members.shape).sum(1),
    )


def response_of(size: int) -> grpo.Sample:
    """Return a response of this many tokens, for functions that use nothing else of it."""
    return grpo.Sample(
        prompt_id=0,
        sample_id=0,
        prompt_ids=[],
        response_ids=[END] * size,
        sampler_logprobs=[0.0] * size,
        finish_reason="stop",
        weight_versions=[],
    )


def response_weights(
    layouts: list[tuple[tuple[int, ...], bool]],
    args: grpo.Args,
    script: ModuleType = grpo,
) -> Tensor:
    """Return a script's loss_weights of one step on these groups, one weight per response.

    As in grpo.py, the zero-variance filter takes the responses of groups of equal reward out of the counts.
    """
    sizes = []
    counted = []
    for lengths, equal in layouts:
        for length in lengths:
            if not (args.filter_zero_std_samples and equal):
                counted.append(len(sizes))
            sizes.append(length)
    samples = [response_of(size) for size in sizes]
    per_token = script.loss_weights(samples, counted, args)
    first_tokens = [0, *itertools.accumulate(sizes)][:-1]
    return per_token[first_tokens].to(F64)


def shorter_counts_more(layouts: list[tuple[tuple[int, ...], bool]], args: grpo.Args, script: ModuleType) -> Tensor:
    """Return weights of responses in proportion to 1 / length, which sum to those of loss_norm constant (VL norm)."""
    lengths = torch.tensor([length for group, _ in layouts for length in group], dtype=F64)
    return 1 / lengths / (1 / lengths).sum() / args.max_response_length


def with_two_rewards(world: World) -> tuple[World, list[Tensor]]:
    """Return the world with a second reward, for responses of more than one token that end, and both rewards."""
    last = world.lengths.cumsum(0) - 1
    ended = (world.tokens[last] == END) & (world.lengths > 1)
    other = copy.copy(world)
    parts = [world.rewards, ended.to(F64)]
    other.rewards = sum(parts)
    return other, parts


def recipe_row(name: str, world: World, policies: Policies) -> Row:
    """Return the row of a recipe: of grpo.py, or with the weights of VL norm (2509.07558) or advantages of GDPO."""
    args = grpo.Args(**RECIPES[name])
    if name == "VL norm":
        return step_row(grpo, args, world, policies, weigh=shorter_counts_more)
    if name in ("two rewards, std", "GDPO"):
        world, parts = with_two_rewards(world)
        return step_row(grpo, args, world, policies, parts=parts if name == "GDPO" else None)
    return step_row(grpo, args, world, policies)


def step_row(
    script: ModuleType,
    args: grpo.Args,
    world: World,
    policies: Policies,
    weigh: Callable = response_weights,
    parts: list[Tensor] | None = None,
) -> Row:
    """Return the row of one optimizer step of a script on a group of each prompt, over all pairs of groups.

    Updates are multiplied by the maximum length, by which loss_norm constant divides. ``weigh``: makes the weights of
    responses. ``parts``: rewards whose advantages are computed one by one and added.
    """
    args = replace(args, max_response_length=world.max_length)
    first, second = [groups_of(world, policies, prompt, args, script, parts) for prompt in range(PROMPTS)]

    @cache
    def weights(*layouts) -> Tensor:
        return weigh(list(layouts), args, script)

    pairs = [weights(x, y) for x in first.layouts for y in second.layouts]
    weight = torch.stack(pairs).view(len(first.layouts), len(second.layouts), 2 * GROUP)
    updates = torch.einsum("ghk,gkp->ghp", weight[..., :GROUP], first.updates)
    updates += torch.einsum("ghk,hkp->ghp", weight[..., GROUP:], second.updates)
    updates = world.max_length * updates.flatten(0, 1)  # [pairs, parameters]
    drawn = torch.outer(first.probability, second.probability)
    zero = first.probability @ first.zero + second.probability @ second.zero
    tokens = first.probability @ first.tokens + second.probability @ second.tokens
    zero = (zero / tokens).item()
    return summarize(updates, drawn.flatten(), world, policies, responses=2 * GROUP, zero=zero)


def table() -> dict[tuple[str, str], Row]:
    """(condition, loss or recipe) -> its row."""
    world = World(max_length=4)
    small_world = World(max_length=2)  # small enough for all pairs of groups
    rows = {}
    for condition in CONDITIONS:
        policies = policies_of(world, condition)
        for name in LOSSES:
            rows[condition, name] = loss_row(name, world, policies)
    for condition in RECIPE_CONDITIONS:
        policies = policies_of(small_world, condition)
        for name in RECIPES:
            rows[condition, name] = recipe_row(name, small_world, policies)
    return rows


def format_row(name: str, row: Row) -> str:
    """One line of the printed table."""
    numbers = f"{row.bias:7.3f}{row.cosine:+8.3f}{row.size:7.3f}{row.noise:8.2f}{row.zero:7.2f}"
    return f"{name:19}{numbers}  {row.ascends}"


def print_table(rows: dict[tuple[str, str], Row]) -> None:
    """Print a block per condition, with the recipes if rows has them."""
    for condition, meaning in CONDITIONS.items():
        print(f"\n{condition}: {meaning}")
        print("loss                  bias  cosine   size   noise   zero  ascends")
        for name in LOSSES:
            print(format_row(name, rows[condition, name]))
        if (condition, "GRPO") in rows:
            print(f"recipe (groups of {GROUP})")
            for name in RECIPES:
                print(format_row(name, rows[condition, name]))


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    print_table(table())


if __name__ == "__main__":
    main()

"""Estimators of the gradient of the sequence KL on stale samples: bias exactly, and noise over the length.

    python studies/sequence_kl.py            about a minute on one core

The quantity is grad KL(pi||ref) of whole responses, from responses that `old` drew. With s_t = grad log pi of token t,
d_u = log pi - log ref and ratio_u = pi/old of token u:

    grad KL = E_pi[sum_u d_u (s_1 + ... + s_u)] = E_old[sum_u ratio_1 ... ratio_u d_u (s_1 + ... + s_u)]

The first equality is the score-function gradient: E[sum_t grad d_t] is 0, and d_u times the score of a later token has
mean 0. The second holds term by term, because term u depends on the first u tokens only, so that it needs their ratio
and not that of the whole response (per-decision importance sampling: Precup, Sutton & Singh 2000). As a loss this is
log pi of token t times the detached sum over u >= t of ratio_1 ... ratio_u d_u. The numbers: docs/evidence/kl_study.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from enumeration import F64, World, policies_of

from kl_estimators import full_vocabulary_kl


class Responses(NamedTuple):
    """B responses of up to T tokens with the whole next-token distributions; everything is 0 after the end."""

    pi: Tensor  # log-probs [B, T, V]
    old: Tensor  # the policy that drew the responses
    ref: Tensor
    tokens: Tensor  # [B, T]
    mask: Tensor  # [B, T], whether there is a token
    rows: Tensor  # [B, T], the row of logits behind each distribution
    n_rows: int

    def of_token(self, log_probs: Tensor) -> Tensor:
        """[B, T, V] -> the entries of the sampled tokens, [B, T]."""
        picked = log_probs.gather(-1, self.tokens[..., None])
        return picked.squeeze(-1) * self.mask

    def log_ratio(self) -> Tensor:
        return self.of_token(self.pi) - self.of_token(self.old)

    def d(self) -> Tensor:
        return self.of_token(self.pi) - self.of_token(self.ref)

    def full_kl(self) -> Tensor:
        """KL(pi||ref) of each next token over the whole vocabulary, [B, T]."""
        d = self.pi - self.ref
        kl = (self.pi.exp() * d).sum(-1)
        return kl * self.mask

    def score_gradient(self, coefficients: Tensor) -> Tensor:
        """sum_t c_t grad log pi_t for c [B, T], as a gradient [B, T, V] of the logits behind each token."""
        p = self.pi.exp()
        one_hot = torch.nn.functional.one_hot(self.tokens, p.shape[-1])
        coefficients = coefficients * self.mask
        return coefficients[..., None] * (one_hot - p)

    def to_parameters(self, gradient: Tensor) -> Tensor:
        """[B, T, V] -> [B, rows * V]."""
        size = len(gradient)
        vocabulary = gradient.shape[-1]
        total = torch.zeros(size, self.n_rows, vocabulary, dtype=F64)
        index = self.rows[..., None].expand_as(gradient)
        return total.scatter_add(1, index, gradient).flatten(1)


def to_go(values: Tensor) -> Tensor:
    """Sum from each token to the end: [B, T] -> [B, T]."""
    return values.flip(1).cumsum(1).flip(1)


# ------------------------------------------------------------------------------------- the estimators, [B, T, V] each


def token_loss(r: Responses) -> Tensor:
    """--kl_placement loss --kl_gradient unbiased: each token's own KL after the prefixes that old drew."""
    ratio = r.log_ratio().exp()
    return r.score_gradient(ratio * r.d())


def reward(r: Responses) -> Tensor:
    """--kl_placement reward with k1: the penalty as it was at sampling time, and the ratio of one token."""
    d_then = r.of_token(r.old) - r.of_token(r.ref)
    ratio = r.log_ratio().exp()
    return r.score_gradient(ratio * to_go(d_then))


def whole_ratio(r: Responses) -> Tensor:
    """Weight every term by the ratio of the whole response."""
    total = r.log_ratio().sum(1, keepdim=True)
    ratio = total.exp()
    return r.score_gradient(ratio * to_go(r.d()))


def per_decision(r: Responses) -> Tensor:
    """Weight term u by the ratio of its first u tokens."""
    ratio = r.log_ratio().cumsum(1).exp()
    sums = to_go(ratio * r.d())
    return r.score_gradient(sums)


def truncated_per_decision(r: Responses) -> Tensor:
    """Weight term u by the ratio of its first u tokens, truncated at 2."""
    ratio = r.log_ratio().cumsum(1).exp()
    truncated = ratio.clamp(max=2.0)
    sums = to_go(truncated * r.d())
    return r.score_gradient(sums)


def full_per_decision(r: Responses) -> Tensor:
    """Replace each term by its expectation over its own token, from the whole vocabulary: the prefix ratio is left.

    Term u becomes ratio_1 ... ratio_{u-1} (KL_u (s_1 + ... + s_{u-1}) + grad KL_u).
    """
    log_ratio = r.log_ratio()
    before = (log_ratio.cumsum(1) - log_ratio).exp()  # of the tokens before this one
    kl = r.full_kl()
    terms = before * kl
    later = to_go(terms) - terms
    d = r.pi - r.ref
    own = r.pi.exp() * (d - kl[..., None])  # grad KL of the next token with respect to its logits
    weight = before * r.mask
    return r.score_gradient(later) + weight[..., None] * own


def baseline(r: Responses, sums: Tensor) -> Tensor:
    """Return the baseline of sums-to-go [B, T]: the mean at the same position over the group's other responses.

    It does not depend on the response itself, and the ratio of the tokens up to t times s_t has mean 0, so subtracting
    it changes no expectation.
    """
    groups = sums.view(-1, GROUP, sums.shape[1])
    total = groups.sum(1, keepdim=True)
    others = (total - groups) / (GROUP - 1)
    ratio = r.log_ratio().cumsum(1).exp()
    return ratio * others.view_as(sums)


def per_decision_baseline(r: Responses) -> Tensor:
    """Per decision, with the group's baseline."""
    ratio = r.log_ratio().cumsum(1).exp()
    sums = to_go(ratio * r.d())
    return r.score_gradient(sums - baseline(r, sums))


def full_per_decision_baseline(r: Responses) -> Tensor:
    """Per decision with the whole vocabulary and the group's baseline."""
    log_ratio = r.log_ratio()
    before = (log_ratio.cumsum(1) - log_ratio).exp()
    terms = before * r.full_kl()
    later = to_go(terms) - terms
    subtracted = r.score_gradient(baseline(r, later))
    return full_per_decision(r) - subtracted


GROUP = 8  # responses per prompt
ESTIMATORS: dict[str, Callable[[Responses], Tensor]] = {
    "token loss, unbiased": token_loss,
    "k1 in the reward": reward,
    "whole ratio": whole_ratio,
    "per decision": per_decision,
    "per decision, ratio <= 2": truncated_per_decision,
    "per decision, full KL": full_per_decision,
}
GROUP_ESTIMATORS: dict[str, Callable[[Responses], Tensor]] = {
    "per decision, baseline": per_decision_baseline,
    "full KL and baseline": full_per_decision_baseline,
}


# ---------------------------------------------------------------------------------------------------- exact enumeration


def enumerate_responses(world: World, pi: Tensor, old: Tensor, ref: Tensor) -> Responses:
    """Every response of a world once; logits [rows, vocabulary]."""
    size = (len(world.responses), world.max_length)
    place = torch.cat([torch.arange(n) for n in world.lengths.tolist()])
    mask = torch.zeros(size, dtype=torch.bool)
    tokens = torch.zeros(size, dtype=torch.long)
    rows = torch.zeros(size, dtype=torch.long)
    mask[world.owner, place] = True
    tokens[world.owner, place] = world.tokens
    rows[world.owner, place] = world.rows
    tables = [logits.log_softmax(-1)[rows] for logits in (pi, old, ref)]
    return Responses(*tables, tokens, mask, rows, world.n_rows)


def sequence_kl_gradient(world: World, pi: Tensor, ref: Tensor) -> Tensor:
    """Return grad KL(pi||ref) of whole responses, prompts drawn uniformly, by autograd."""
    ref_logp = world.sum_over_response(world.token_logprobs(ref))

    def kl(logits: Tensor) -> Tensor:
        logp = world.sum_over_response(world.token_logprobs(logits))
        return world.probabilities(logits) @ (logp - ref_logp)

    return world.gradient(kl, pi)


class Accuracy(NamedTuple):
    """Accuracy of an estimator."""

    bias: float  # |expectation - grad KL| / |grad KL|
    noise: float  # standard deviation from one response / |grad KL|


def accuracy(gradients: Tensor, weights: Tensor, truth: Tensor) -> Accuracy:
    """Return the accuracy of gradients [B, parameters] that occur with probabilities weights [B]."""
    mean = weights @ gradients
    variance = weights @ (gradients - mean).square().sum(1)
    size = truth.norm()
    bias = (mean - truth).norm() / size
    noise = variance.sqrt() / size
    return Accuracy(bias.item(), noise.item())


def exact_row(name: str, world: World, pi: Tensor, old: Tensor, ref: Tensor) -> Accuracy:
    """Bias and noise of an estimator by exact enumeration."""
    responses = enumerate_responses(world, pi, old, ref)
    estimates = ESTIMATORS[name](responses)
    gradients = responses.to_parameters(estimates)
    truth = sequence_kl_gradient(world, pi, ref)
    return accuracy(gradients, world.probabilities(old), truth)


def reference(world: World) -> Tensor:
    """Logits of a fixed reference policy."""
    rng = torch.Generator().manual_seed(2)
    return world.noise(0.8, rng)


# ------------------------------------------------------------------------------------------------ noise over the length

CHUNK = 400  # responses at a time
STATES = 4  # tokens of the long responses; the next one depends on the last one only


def long_policies(token_kl: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [STATES, STATES] of pi, old and ref, with KL(pi||old) of about token_kl nats per token."""
    rng = torch.Generator().manual_seed(3)
    pi, direction, to_ref = torch.randn(3, STATES, STATES, generator=rng, dtype=F64)
    ref = pi + 0.3 * to_ref
    if token_kl == 0:
        return pi, pi, ref
    low = 0.0
    high = 3.0
    for _ in range(50):  # bisection on the distance
        middle = (low + high) / 2
        old = pi + middle * direction
        if mean_token_kl(pi, old) < token_kl:
            low = middle
        else:
            high = middle
    return pi, old, ref


def mean_token_kl(pi: Tensor, other: Tensor) -> float:
    """KL(pi||other) per token in the long run."""
    p = pi.softmax(-1)
    stationary = torch.linalg.matrix_power(p, 200)[0]
    kl = full_vocabulary_kl(pi, other)
    return (stationary @ kl).item()


def long_kl_gradient(pi: Tensor, ref: Tensor, length: int) -> Tensor:
    """Return grad KL(pi||ref) of responses of this length that start after token 0, by autograd through marginals."""
    leaf = pi.clone().requires_grad_()
    transition = leaf.softmax(-1)
    kl = full_vocabulary_kl(leaf, ref)
    state = torch.eye(STATES, dtype=F64)[0]
    total = torch.zeros((), dtype=F64)
    for _ in range(length):
        total = total + state @ kl
        state = state @ transition
    return torch.autograd.grad(total, leaf)[0].flatten()


def draw_long(pi: Tensor, old: Tensor, ref: Tensor, length: int, count: int, rng: torch.Generator) -> Responses:
    """Responses of old, all of the same length."""
    transition = old.softmax(-1)
    before = torch.zeros(count, dtype=torch.long)
    rows = []
    tokens = []
    for _ in range(length):
        rows.append(before)
        after = torch.multinomial(transition[before], 1, generator=rng)
        before = after.squeeze(1)
        tokens.append(before)
    index = torch.stack(rows, dim=1)
    tables = [logits.log_softmax(-1)[index] for logits in (pi, old, ref)]
    mask = torch.ones_like(index, dtype=torch.bool)
    drawn = torch.stack(tokens, dim=1)
    return Responses(*tables, drawn, mask, index, STATES)


def long_rows(token_kl: float, length: int, count: int) -> dict[str, Accuracy]:
    """Bias and noise of every estimator from count sampled responses, in groups of 8."""
    pi, old, ref = long_policies(token_kl)
    truth = long_kl_gradient(pi, ref, length)
    rng = torch.Generator().manual_seed(4)
    estimators = ESTIMATORS | GROUP_ESTIMATORS
    means: dict[str, list[Tensor]] = {name: [] for name in estimators}
    for _ in range(count // CHUNK):
        responses = draw_long(pi, old, ref, length, CHUNK, rng)
        for name, estimator in estimators.items():
            estimates = estimator(responses)
            gradients = responses.to_parameters(estimates)
            by_group = gradients.view(CHUNK // GROUP, GROUP, -1)
            means[name].append(by_group.mean(1))
    groups = count // GROUP
    weights = torch.full((groups,), 1 / groups, dtype=F64)
    rows = {}
    for name, parts in means.items():
        row = accuracy(torch.cat(parts), weights, truth)
        rows[name] = row._replace(noise=row.noise * GROUP**0.5)  # of one response
    return rows


# ---------------------------------------------------------------------------------------------------------- the tables

CONDITIONS = ("fresh", "one step", "stale")
LENGTHS = (16, 64, 256)
TOKEN_KLS = (0.0, 1e-3, 1e-2)
COUNT = 2000  # sampled responses


def print_exact() -> None:
    """Bias and noise for responses of at most 4 tokens, under conditions of the loss table."""
    world = World(max_length=4)
    ref = reference(world)
    print("exact, at most 4 tokens: bias / noise of one response")
    print("estimator                 " + "".join(f"{condition:>16}" for condition in CONDITIONS))
    for name in ESTIMATORS:
        cells = []
        for condition in CONDITIONS:
            policies = policies_of(world, condition)
            row = exact_row(name, world, policies.pi, policies.old, ref)
            cells.append(f"{row.bias:8.3f} /{row.noise:6.2f}")
        print(f"{name:26}" + "".join(cells))


def print_long() -> None:
    """Noise over length and staleness."""
    print("\nsampled, noise of one response over |grad KL|; (bias where it exceeds four times its sampling error)")
    for token_kl in TOKEN_KLS:
        print(f"\nKL(pi||old) {token_kl:g} nats per token")
        print("estimator                 " + "".join(f"{length:>11} tokens" for length in LENGTHS))
        columns = [long_rows(token_kl, length, COUNT) for length in LENGTHS]
        for name in columns[0]:
            cells = []
            for rows in columns:
                row = rows[name]
                sampling_error = row.noise / COUNT**0.5
                bias = ""
                if row.bias > 4 * sampling_error:
                    bias = f"({row.bias:.2f})"
                cells.append(f"{row.noise:10.2f} {bias:7}")
            print(f"{name:26}" + "".join(cells))


if __name__ == "__main__":
    argparse.ArgumentParser(
        description="Print bias and noise of estimators of the sequence KL's gradient."
    ).parse_args()
    torch.set_num_threads(1)
    print_exact()
    print_long()

"""Exact expectations over all responses of a small problem: what an update ascends, with which bias and noise.

Policies are tables over all prefixes of responses of at most 4 tokens out of 3, the first of which ends a response, so
every expectation is a sum over all responses, in float64. Two prompts, one easier than the other; rewards are 0 or 1.
Three policies matter: the sampler drew the responses, `old` is the trainer's policy before the first update on them,
and `pi` is the policy that is trained now. CONDITIONS lists how far apart they are.

studies/loss_table.py prints the table of the known losses, and studies/check_loss.py the rows of an edited script.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

PROMPTS = 2
VOCABULARY = 3
END = 0  # the token that ends a response
F64 = torch.float64


class World:
    """All responses of at most max_length tokens to each prompt, and the rewards of these responses.

    The N tokens of all R responses lie one after the other. A policy is a table of logits [rows, vocabulary] with one
    row for each prompt and prefix.
    """

    def __init__(
        self,
        max_length: int,
        seed: int = 0,
        binary: bool = True,
    ):
        self.max_length = max_length
        self.responses: list[tuple[int, tuple[int, ...]]] = []  # (prompt, tokens)
        for prompt in range(PROMPTS):
            for tokens in all_responses(max_length):
                self.responses.append((prompt, tokens))
        row_of_prefix: dict[tuple[int, tuple[int, ...]], int] = {}
        rows = []
        flat = []
        owner = []
        for i, (prompt, tokens) in enumerate(self.responses):
            for t, token in enumerate(tokens):
                prefix = (prompt, tokens[:t])
                row = row_of_prefix.setdefault(prefix, len(row_of_prefix))
                rows.append(row)
                flat.append(token)
                owner.append(i)
        self.rows = torch.tensor(rows)  # [N]
        self.tokens = torch.tensor(flat)  # [N]
        self.owner = torch.tensor(owner)  # [N], the response of each token
        self.lengths = torch.bincount(self.owner)  # [R]
        self.prompts = torch.tensor([prompt for prompt, _ in self.responses])  # [R]
        self.n_rows = len(row_of_prefix)
        self.prompt_of_row = torch.tensor([prompt for prompt, _ in row_of_prefix])
        self.rewards = self.draw_rewards(seed, binary)  # [R]

    def draw_rewards(self, seed: int, binary: bool) -> Tensor:
        """Binary: half of the first prompt's responses are correct, and a seventh of the second's."""
        rng = torch.Generator().manual_seed(seed)
        uniform = torch.rand(len(self.responses), generator=rng, dtype=F64)
        if not binary:
            return uniform
        rewards = torch.zeros_like(uniform)
        for prompt, fraction in enumerate((1 / 2, 1 / 7)):
            own = torch.nonzero(self.prompts == prompt).flatten()
            order = uniform[own].argsort()
            correct = round(fraction * len(own))
            rewards[own[order[:correct]]] = 1.0
        return rewards

    def noise(self, scale: float, rng: torch.Generator) -> Tensor:
        """Draw normal numbers of standard deviation ``scale``, [rows, vocabulary]."""
        shape = (self.n_rows, VOCABULARY)
        return scale * torch.randn(shape, generator=rng, dtype=F64)

    def token_logprobs(self, logits: Tensor) -> Tensor:
        """Return the log-probs [N] of all response tokens: [rows, vocabulary] -> [N]."""
        return logits.log_softmax(-1)[self.rows, self.tokens]

    def sum_over_response(self, values: Tensor) -> Tensor:
        """Sum over the tokens of each response: [N, ...] -> [R, ...]."""
        shape = (len(self.responses), *values.shape[1:])
        return torch.zeros(shape, dtype=F64).index_add(0, self.owner, values)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probability [R] of each response when the prompt is drawn uniformly; sums to 1."""
        logp = self.sum_over_response(self.token_logprobs(logits))
        return logp.exp() / PROMPTS

    def prompt_means(self, logits: Tensor) -> Tensor:
        """E[R | prompt] under a policy, [prompts]."""
        weighted = PROMPTS * self.probabilities(logits) * self.rewards
        return torch.zeros(PROMPTS, dtype=F64).index_add(0, self.prompts, weighted)

    def advantages(self, sampler: Tensor) -> Tensor:
        """R minus the exact mean reward of its prompt under the sampler, [R]."""
        return self.rewards - self.prompt_means(sampler)[self.prompts]

    def scores(self, logits: Tensor) -> Tensor:
        """Return the gradient of each token's log-prob, [N, rows * vocabulary]."""
        p = logits.softmax(-1)[self.rows]
        by_row = torch.zeros(len(self.rows), self.n_rows, VOCABULARY, dtype=F64)
        n = torch.arange(len(self.rows))
        by_row[n, self.rows] = -p
        by_row[n, self.rows, self.tokens] += 1
        return by_row.flatten(1)

    def gradient(
        self,
        objective: Callable[[Tensor], Tensor],
        logits: Tensor,
    ) -> Tensor:
        """Return the gradient [rows * vocabulary] of a number that depends on the logits."""
        leaf = logits.detach().clone().requires_grad_()
        return torch.autograd.grad(objective(leaf), leaf)[0].flatten()

    def reward_gradient(self, logits: Tensor) -> Tensor:
        """Return grad E[R], [rows * vocabulary]."""
        return self.gradient(lambda x: self.probabilities(x) @ self.rewards, logits)


def all_responses(max_length: int) -> list[tuple[int, ...]]:
    """Every response that ends with END, or without it at max_length."""
    found = []
    words = [token for token in range(VOCABULARY) if token != END]
    for length in range(1, max_length + 1):
        for body in itertools.product(words, repeat=length - 1):
            last = range(VOCABULARY) if length == max_length else [END]
            for token in last:
                found.append((*body, token))
    return found


class Policies(NamedTuple):
    """Logits [rows, vocabulary] of the three policies."""

    pi: Tensor
    old: Tensor
    sampler: Tensor


CONDITIONS = {
    "fresh": "sampler = old = pi",
    "one step": "sampler = old, and pi is one update further",
    "stale": "sampler = old, and pi is 8 updates further",
    "unlike": "old = pi, and the sampler computes other probabilities, far off after one prefix in five",
    "async": "an unlike sampler, old is 4 updates further, and pi is 8 updates further",
}
UPDATE_SIZE = 0.15  # an update is this times the sum of two unit vectors: along grad E[R], and a random one


def trajectory(world: World, updates: int, rng: torch.Generator) -> list[Tensor]:
    """Logits at the start and after each of several updates."""
    logits = world.noise(0.8, rng)
    path = [logits]
    for _ in range(updates):
        uphill = world.reward_gradient(logits)
        sideways = world.noise(1.0, rng).flatten()
        step = uphill / uphill.norm() + sideways / sideways.norm()
        logits = logits + UPDATE_SIZE * step.view_as(logits)
        path.append(logits)
    return path


def policies_of(world: World, condition: str, seed: int = 1) -> Policies:
    """Return the three policies of one of CONDITIONS, the same for the same world and seed."""
    rng = torch.Generator().manual_seed(seed)
    path = trajectory(world, 8, rng)
    everywhere = world.noise(0.05, rng)
    rare = torch.rand(world.n_rows, 1, generator=rng) < 0.2
    unlike = path[0] + everywhere + rare * world.noise(1.0, rng)
    policies = {
        "fresh": Policies(pi=path[0], old=path[0], sampler=path[0]),
        "one step": Policies(pi=path[1], old=path[0], sampler=path[0]),
        "stale": Policies(pi=path[8], old=path[0], sampler=path[0]),
        "unlike": Policies(pi=path[0], old=path[0], sampler=unlike),
        "async": Policies(pi=path[8], old=path[4], sampler=unlike),
    }
    return policies[condition]


# Names of the objectives whose gradients are recognized. A = R - b, where b is the prompt's mean reward under the
# sampler.
REWARD = "E[R]"
SURROGATE = "E_sampler[A sum_t pi/sampler]"
LIKELIHOOD = "E_sampler[A log pi]"
PER_TOKEN = "E[A / length]"
REWEIGHTED = "sum_x c_x E[R|x]"
UNNAMED = "-"


class Row(NamedTuple):
    """One cell of the table: a loss under a condition."""

    ascends: str  # the objective whose gradient is the expected update, with "c" in front up to a factor
    bias: float  # |expected update - grad E[R]| / |grad E[R]|
    cosine: float  # between the two
    size: float  # |expected update| / |grad E[R]|
    noise: float  # standard deviation of the update from one response, over |expected update|
    zero: float  # fraction of the sampled tokens without gradient


def objectives(world: World, policies: Policies) -> dict[str, Tensor]:
    """Return the gradient of each named objective at pi."""
    drawn = world.probabilities(policies.sampler)
    advantages = world.advantages(policies.sampler)
    sampler = world.token_logprobs(policies.sampler)

    def surrogate(logits: Tensor) -> Tensor:
        ratio = (world.token_logprobs(logits) - sampler).exp()
        return drawn @ (advantages * world.sum_over_response(ratio))

    def likelihood(logits: Tensor) -> Tensor:
        logp = world.token_logprobs(logits)
        return drawn @ (advantages * world.sum_over_response(logp))

    def per_token(logits: Tensor) -> Tensor:
        return world.probabilities(logits) @ (advantages / world.lengths)

    return {
        REWARD: world.reward_gradient(policies.pi),
        SURROGATE: world.gradient(surrogate, policies.pi),
        LIKELIHOOD: world.gradient(likelihood, policies.pi),
        PER_TOKEN: world.gradient(per_token, policies.pi),
    }


def parallel(a: Tensor, b: Tensor) -> bool:
    return torch.cosine_similarity(a, b, dim=0).item() > 1 - 1e-12


def recognize(mean: Tensor, world: World, policies: Policies) -> str:
    """Return the name of the objective with this gradient, after "c" if it is equal up to a factor."""
    known = objectives(world, policies)
    for name, gradient in known.items():
        if (mean - gradient).norm() < 1e-6 * gradient.norm():  # grpo.py's weights are float32
            return name
    for name, gradient in known.items():
        if parallel(mean, gradient):
            return f"c {name}"
    prompt = world.prompt_of_row.repeat_interleave(VOCABULARY)
    truth = known[REWARD]
    if all(parallel(mean[prompt == x], truth[prompt == x]) for x in range(PROMPTS)):
        return REWEIGHTED
    return UNNAMED


def summarize(updates: Tensor, drawn: Tensor, world: World, policies: Policies, responses: int, zero: float) -> Row:
    """Return the row of updates [cases, parameters] that occur with probabilities drawn [cases].

    responses: how many of them an update is computed from; noise is that of one response.
    """
    mean = drawn @ updates
    truth = world.reward_gradient(policies.pi)
    variance = drawn @ (updates - mean).square().sum(-1)
    return Row(
        ascends=recognize(mean, world, policies),
        bias=((mean - truth).norm() / truth.norm()).item(),
        cosine=torch.cosine_similarity(mean, truth, dim=0).item(),
        size=(mean.norm() / truth.norm()).item(),
        noise=((responses * variance).sqrt() / mean.norm()).item(),
        zero=zero,
    )

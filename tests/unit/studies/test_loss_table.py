"""Every cell of studies/loss_table.py, computed a second time from the definitions.

Here a response is a Python tuple and every loss is its update coefficient per token, derived by hand: the update of a
response is the sum of coefficient x grad log pi over its tokens. Nothing is shared with the script but the rewards and
the logits of the three policies.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from functools import cache

import enumeration
import loss_table
import pytest
import torch
from helpers import ROOT, main_here
from torch import Tensor

torch.set_num_threads(1)
F64 = torch.float64


# ------------------------------------------------------------------------------ the losses, as coefficients by hand


def ratios(above: list[float], below: list[float]) -> list[float]:
    """Probability ratios of log-probs."""
    return [math.exp(x - y) for x, y in zip(above, below, strict=True)]


class Tokens:
    """Inputs of the coefficients of one response: one number per token, and the advantage."""

    def __init__(self, pi: list[float], old: list[float], sampler: list[float], drift: list[float], advantage: float):
        self.n = len(pi)
        self.a = advantage
        self.past = 0.0  # what the first turn has brought
        self.baselines = [0.0] * self.n  # of each token, less the mean reward
        self.drift = drift
        self.ratio = ratios(pi, old)
        self.mismatch = ratios(old, sampler)
        self.whole_mismatch = [math.prod(self.mismatch)] * self.n
        self.behavior = ratios(pi, sampler)
        self.moved = []
        for x, y in zip(pi, sampler, strict=True):
            self.moved.append(math.exp(x) - math.exp(y))

    def to_go(self) -> list[float]:
        """The first two tokens are credited with everything, the others with what the first turn has not brought."""
        everything = self.a
        first = self.ppo()[:2]
        self.a = everything - self.past
        return first + self.ppo()[2:]

    def otb(self) -> list[float]:
        """An advantage of its own for every token."""
        reward = self.a
        found = []
        for place, baseline in enumerate(self.baselines):
            self.a = reward - baseline
            found.append(self.ppo()[place])
        return found

    def sapo(self) -> list[float]:
        """The slope of a sigmoid of the ratio, by the chain rule."""
        steep = 1.0 if self.a > 0 else 1.05
        found = []
        for ratio in self.ratio:
            gate = 1 / (1 + math.exp(-steep * (ratio - 1)))
            found.append(4 * gate * (1 - gate) * self.a * ratio)
        return found

    def ppo(self, low: float = 0.2, high: float = 0.2, dual: float = math.inf) -> list[float]:
        """A ratio, or 0 where the surrogate is flat."""
        found = []
        for ratio in self.ratio:
            if self.a > 0:
                flat = ratio > 1 + high
            else:
                flat = ratio < 1 - low or ratio > dual
            found.append(0.0 if flat else self.a * ratio)
        return found

    def weighted(self, weights: list[float]) -> list[float]:
        return [w * x for w, x in zip(weights, self.ppo(), strict=True)]

    def rejected(self) -> list[float]:
        mean = geometric_mean(self.mismatch)
        if 0.9 <= mean <= 1.1:
            return self.ppo()
        return [0.0] * self.n

    def off_policy(self) -> list[float]:
        distance = -math.log(geometric_mean(self.behavior))
        if self.a < 0 and distance > 0.1:
            return [0.0] * self.n
        return self.ppo()

    def trust_region(self) -> list[float]:
        if max(self.drift) > 0.05:
            return [0.0] * self.n
        return [self.a * x for x in self.behavior]

    def dppo(self) -> list[float]:
        found = []
        for moved, ratio in zip(self.moved, self.behavior, strict=True):
            away = moved > 0.1 if self.a > 0 else moved < -0.1
            found.append(0.0 if away else self.a * ratio)
        return found

    def gspo(self) -> list[float]:
        mean = geometric_mean(self.ratio)
        flat = mean > 1.2 if self.a > 0 else mean < 0.8
        each = 0.0 if flat else self.a * mean / self.n
        return [each] * self.n

    def gmpo(self) -> list[float]:
        limit = math.exp(0.4)
        if self.a > 0:
            kept = [x < limit for x in self.ratio]
            bounded = [min(x, limit) for x in self.ratio]
        else:
            kept = [x > 1 / limit for x in self.ratio]
            bounded = [max(x, 1 / limit) for x in self.ratio]
        mean = geometric_mean(bounded)
        return [self.a * mean / self.n * keep for keep in kept]


def geometric_mean(values: list[float]) -> float:
    return math.prod(values) ** (1 / len(values))


def truncated(values: list[float], cap: float) -> list[float]:
    return [min(x, cap) for x in values]


def masked(values: list[float], low: float, high: float) -> list[float]:
    return [x if low <= x <= high else 0.0 for x in values]


COEFFICIENTS: dict[str, Callable[[Tokens], list[float]]] = {
    "policy gradient": lambda t: [t.a] * t.n,
    "sequence ratio": lambda t: [t.a * math.prod(t.behavior)] * t.n,
    "token ratio": lambda t: [t.a * x for x in t.ratio],
    "PPO clip": lambda t: t.ppo(),
    "clip-higher": lambda t: t.ppo(high=0.28),
    "dual clip": lambda t: t.ppo(dual=3.0),
    "TIS, token": lambda t: t.weighted(truncated(t.mismatch, 2.0)),
    "TIS, sequence": lambda t: t.weighted(truncated(t.whole_mismatch, 2.0)),
    "decoupled PPO": lambda t: t.weighted(t.mismatch),
    "IcePop": lambda t: t.weighted(masked(t.mismatch, 0.5, 5.0)),
    "MIS, token": lambda t: t.weighted(masked(t.mismatch, 0.0, 2.0)),
    "MIS, sequence": lambda t: t.weighted(masked(t.whole_mismatch, 0.0, 2.0)),
    "sequence rejection": lambda t: t.rejected(),
    "off-policy mask": lambda t: t.off_policy(),
    "TRM": lambda t: t.trust_region(),
    "DPPO": lambda t: t.dppo(),
    "CISPO": lambda t: [t.a * x for x in truncated(t.ratio, 1.28)],
    "GSPO": lambda t: t.gspo(),
    "GMPO": lambda t: t.gmpo(),
    "return to go": lambda t: t.to_go(),
    "SAPO": lambda t: t.sapo(),
    "DRO": lambda t: [t.a - 0.05 * math.log(x) for x in t.behavior],
    "OTB": lambda t: t.otb(),
}


# --------------------------------------------------------------------------------------------- the sums over responses


Case = tuple[int, tuple[int, ...]]  # a prompt and a response to it


def responses(max_length: int) -> list[tuple[int, ...]]:
    """Shorter ones first: a 0 ends a response."""
    found = []
    for n in range(1, max_length + 1):
        for tokens in itertools.product(range(3), repeat=n):
            ended = tokens[-1] == 0 or n == max_length
            if ended and 0 not in tokens[:-1]:
                found.append(tokens)
    return found


class Oracle:
    """Expectations over all responses to both prompts, with gradients by autograd."""

    def __init__(self, world: enumeration.World, policies: enumeration.Policies):
        self.theta = policies.pi.clone().requires_grad_()
        self.tables = [x.log_softmax(-1) for x in (self.theta, policies.old, policies.sampler)]
        self.cases: list[Case] = list(itertools.product(range(2), responses(world.max_length)))
        self.row_of: dict[Case, int] = {}
        for prompt, response in self.cases:
            for t in range(len(response)):
                self.row_of.setdefault((prompt, response[:t]), len(self.row_of))
        self.reward = dict(zip(self.cases, world.rewards.tolist(), strict=True))
        self.drawn = {}  # probability of each response, given the prompt
        for case in self.cases:
            self.drawn[case] = self.logp(2, case).sum().exp().item()
        self.by_prompt = [self.grad(self.mean_reward(prompt, 0) / 2) for prompt in range(2)]
        self.truth = sum(self.by_prompt)
        self.baseline = [self.mean_reward(prompt, 2).item() for prompt in range(2)]
        pi, _, sampler = (x.detach() for x in self.tables)
        self.drift = (sampler.exp() * (sampler - pi)).sum(-1)
        self.optimal = self.optimal_baselines()

    def mean_reward(self, prompt: int, which: int) -> Tensor:
        """E[R | prompt] under pi (0), old (1) or the sampler (2)."""
        total = torch.zeros((), dtype=F64)
        for case in self.cases:
            if case[0] == prompt:
                probability = self.logp(which, case).sum().exp()
                total = total + probability * self.reward[case]
        return total

    def rows(self, case: Case) -> list[int]:
        prompt, response = case
        return [self.row_of[prompt, response[:t]] for t in range(len(response))]

    def logp(self, which: int, case: Case) -> Tensor:
        """Log-probs of the tokens of a case under pi (0), old (1) or the sampler (2)."""
        return self.tables[which][self.rows(case), list(case[1])]

    def energies(self, case: Case) -> list[float]:
        """After each token: the squared length of the gradient of old's log-prob of all tokens so far, by autograd."""
        leaf = self.tables[1].detach().clone().requires_grad_()
        logp = leaf.log_softmax(-1)[self.rows(case), list(case[1])]
        found = [torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in logp.cumsum(0)]
        return [x.square().sum().item() for x in found]

    def optimal_baselines(self) -> dict[tuple[int, int], float]:
        """(prompt, place) -> the mean reward of the responses that reach it, weighted by their energies there."""
        above: dict[tuple[int, int], float] = {}
        below: dict[tuple[int, int], float] = {}
        for case in self.cases:
            for place, energy in enumerate(self.energies(case)):
                weight = self.drawn[case] * energy
                key = (case[0], place)
                above[key] = above.get(key, 0.0) + weight * self.reward[case]
                below[key] = below.get(key, 0.0) + weight
        return {key: above[key] / below[key] for key in above}

    def grad(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(x, self.theta, retain_graph=True)[0].flatten()

    def advantage(self, case: Case) -> float:
        return self.reward[case] - self.baseline[case[0]]

    def tokens(self, case: Case, advantage: float) -> Tokens:
        pi, old, sampler = (self.logp(which, case).tolist() for which in range(3))
        drift = self.drift[self.rows(case)].tolist()
        found = Tokens(pi, old, sampler, drift, advantage)
        found.past = sum(case[1][:2]) / 4
        found.baselines = [self.optimal[case[0], t] - self.baseline[case[0]] for t in range(found.n)]
        return found

    def update(self, case: Case, coefficients: list[float]) -> Tensor:
        """The sum of coefficient x grad log pi over the tokens of a case."""
        logp = self.logp(0, case)
        return self.grad(logp @ torch.tensor(coefficients, dtype=F64))

    def row(self, name: str) -> tuple[float, ...]:
        """bias, cosine, size, noise and zero of a policy loss."""
        mean = torch.zeros_like(self.truth)
        second = 0.0
        zero = 0.0
        tokens = 0.0
        for case in self.cases:
            p = self.drawn[case] / 2
            tokens_of_case = self.tokens(case, self.advantage(case))
            coefficients = COEFFICIENTS[name](tokens_of_case)
            update = self.update(case, coefficients)
            mean += p * update
            second += p * update.dot(update).item()
            zero += p * coefficients.count(0.0)
            tokens += p * len(coefficients)
        return self.numbers(mean, second - mean.dot(mean).item(), zero / tokens)

    def numbers(self, mean: Tensor, variance: float, zero: float) -> tuple[float, ...]:
        size = mean.norm().item()
        target = self.truth.norm().item()
        bias = (mean - self.truth).norm().item() / target
        cosine = mean.dot(self.truth).item() / (size * target)
        return bias, cosine, size / target, math.sqrt(variance) / size, zero


def far_apart(world: enumeration.World, seed: int) -> enumeration.Policies:
    """Three policies that differ a lot after some prefixes and little after others: every clip, cap and mask acts."""
    rng = torch.Generator().manual_seed(seed)
    start = world.noise(1.0, rng)
    distance = 2 * torch.rand(world.n_rows, 1, generator=rng, dtype=F64) ** 3
    pi, old, sampler = (start + distance * world.noise(1.0, rng) for _ in range(3))
    return enumeration.Policies(pi, old, sampler)


FAR = ["far apart 1", "far apart 5", "far apart 7"]
PLACES = [*enumeration.CONDITIONS, *FAR]


@cache
def place(name: str, max_length: int = 4) -> tuple[enumeration.World, enumeration.Policies]:
    """A condition of the table, or a world of graded rewards and policies far apart."""
    if name in enumeration.CONDITIONS:
        world = enumeration.World(max_length)
        return world, enumeration.policies_of(world, name)
    seed = int(name[-1])
    world = enumeration.World(max_length, seed=seed + 5, binary=False)
    return world, far_apart(world, seed)


@cache
def oracle(name: str, max_length: int = 4) -> Oracle:
    return Oracle(*place(name, max_length))


@cache
def expected(name: str, where: str) -> tuple[float, ...]:
    return oracle(where).row(name)


def numbers_of(row: enumeration.Row) -> tuple[float, ...]:
    return row.bias, row.cosine, row.size, row.noise, row.zero


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", loss_table.LOSSES)
def test_every_policy_loss_is_what_its_definition_gives(name, where):
    """bias, cosine, size, noise and zero of each cell agree with the coefficients derived by hand."""
    row = loss_table.loss_row(name, *place(where))
    assert numbers_of(row) == pytest.approx(expected(name, where), rel=1e-9, abs=1e-12)


# ---------------------------------------------------------------------------------------------------- what is ascended

SURROGATE = enumeration.SURROGATE
LIKELIHOOD = enumeration.LIKELIHOOD
UNNAMED = enumeration.UNNAMED
CLIPPED = ("E[R]", SURROGATE, UNNAMED, LIKELIHOOD, UNNAMED)
CORRECTED = ("E[R]", SURROGATE, UNNAMED, UNNAMED, UNNAMED)
ASCENDS = {
    "policy gradient": ("E[R]", LIKELIHOOD, LIKELIHOOD, LIKELIHOOD, LIKELIHOOD),
    "sequence ratio": ("E[R]",) * 5,
    "token ratio": ("E[R]", SURROGATE, SURROGATE, LIKELIHOOD, UNNAMED),
    "PPO clip": CLIPPED,
    "clip-higher": CLIPPED,
    "dual clip": CLIPPED,
    "TIS, token": CORRECTED,
    "TIS, sequence": CORRECTED,
    "decoupled PPO": ("E[R]", SURROGATE, UNNAMED, SURROGATE, UNNAMED),
    "IcePop": CORRECTED,
    "MIS, token": CORRECTED,
    "MIS, sequence": CORRECTED,
    "sequence rejection": CORRECTED,
    "off-policy mask": CORRECTED,
    "TRM": CORRECTED,
    "DPPO": CORRECTED,
    "CISPO": ("E[R]", SURROGATE, UNNAMED, LIKELIHOOD, UNNAMED),
    "GSPO": ("E[A / length]", UNNAMED, UNNAMED, UNNAMED, UNNAMED),
    "GMPO": ("E[A / length]", UNNAMED, UNNAMED, UNNAMED, UNNAMED),
    "return to go": ("E[R]", SURROGATE, UNNAMED, UNNAMED, UNNAMED),
    "SAPO": ("E[R]", UNNAMED, UNNAMED, LIKELIHOOD, UNNAMED),
    "DRO": ("E[R]", UNNAMED, UNNAMED, UNNAMED, UNNAMED),
    "OTB": CORRECTED,
}


@pytest.mark.parametrize("where", enumeration.CONDITIONS)
@pytest.mark.parametrize("name", loss_table.LOSSES)
def test_every_policy_loss_ascends_what_the_table_says(name, where):
    position = list(enumeration.CONDITIONS).index(where)
    assert loss_table.loss_row(name, *place(where)).ascends == ASCENDS[name][position]


@pytest.mark.parametrize("where", PLACES)
def test_the_named_objectives_are_what_they_are_called(where):
    """Their gradients by autograd through sums that are written out here."""
    o = oracle(where)
    found = enumeration.objectives(*place(where))
    written = dict.fromkeys(found, 0.0)
    for case in o.cases:
        logp = o.logp(0, case)
        probability = logp.sum().exp() / 2
        advantage = o.advantage(case)
        drawn = o.drawn[case] / 2
        written["E[R]"] += probability * o.reward[case]
        written[SURROGATE] += drawn * advantage * (logp - o.logp(2, case)).exp().sum()
        written[LIKELIHOOD] += drawn * advantage * logp.sum()
        written["E[A / length]"] += probability * advantage / len(logp)
    for name, objective in written.items():
        torch.testing.assert_close(found[name], o.grad(objective), rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_on_fresh_samples_all_but_the_length_normalized_losses_are_unbiased(seed):
    """For any policy and any rewards, not only those of the table."""
    world = enumeration.World(max_length=4, seed=seed, binary=False)
    logits = far_apart(world, seed).pi
    policies = enumeration.Policies(logits, logits, logits)
    for name in loss_table.LOSSES:
        row = loss_table.loss_row(name, world, policies)
        if name in ("GSPO", "GMPO"):
            assert row.bias > 0.1 and row.ascends == "E[A / length]", name
        else:
            assert row.bias < 1e-12, name


# ------------------------------------------------------------------------------------------------------------- recipes


@pytest.mark.integration
def test_recipes_ascend_what_the_table_says():
    ascends = {
        "constant": "E[R]",
        "sequence": "c E[A / length]",
        "token": UNNAMED,
        "centered": "c E[R]",
        "std": "sum_x c_x E[R|x]",
        "filter": "sum_x c_x E[R|x]",
        "GRPO": UNNAMED,
        "Dr. GRPO": "c E[R]",
        "DAPO": UNNAMED,
    }
    for name, label in ascends.items():
        assert loss_table.recipe_row(name, *place("fresh", 2)).ascends == label, name
        assert loss_table.recipe_row(name, *place("stale", 2)).ascends == UNNAMED, name


# ------------------------------------------------------------------------------------------------- the page, the script


def page_cells() -> dict[str, list[str]]:
    """The rows of the tables of docs/maintainers/losses.md: first column -> the others."""
    found = {}
    for line in (ROOT / "docs" / "maintainers" / "losses.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if len(cells) > 3:
            found[cells[1]] = cells[2:-1]
    return found


@pytest.fixture(scope="module")
def rows():
    return loss_table.table()


@pytest.mark.integration
def test_the_page_shows_the_numbers_of_the_script(rows):
    cells = page_cells()
    for name in loss_table.LOSSES:
        found = [rows[condition, name] for condition in ("stale", "unlike")]
        assert cells[name] == [f"{row.bias:.2f} {row.cosine:+.2f}" for row in found], name
    for name in loss_table.DISTILLATIONS:
        found = [rows[condition, name] for condition in loss_table.RECIPE_CONDITIONS]
        assert cells[name][:-1] == [f"{row.bias:.2f} {row.cosine:+.2f}" for row in found], name
    dropped = {"TRM": [0.51, 0.87], "DPPO": [0.18, 0.25], "PPO clip": [0.20, 0.14]}
    for name, fractions in dropped.items():
        assert [round(rows[condition, name].zero, 2) for condition in ("stale", "async")] == fractions, name
    for name in loss_table.RECIPES.keys() - {"Dr. GRPO"}:  # its row is that of "centered"
        found = [rows[condition, name] for condition in loss_table.RECIPE_CONDITIONS]
        numbers = [f"{row.size:.2f} {row.cosine:+.2f} {row.noise:.2f}" for row in found]
        ascends = found[0].ascends.replace("|", "\\|")
        assert cells[name][1:] == [*numbers, ascends], name


@pytest.mark.integration
def test_the_script_prints_every_row(rows, monkeypatch):
    monkeypatch.setattr(loss_table, "table", lambda: rows)
    code, printed, _ = main_here(loss_table)
    lines = printed.splitlines()
    assert code == 0
    for name in loss_table.LOSSES:
        assert sum(line.startswith(f"{name:19}") for line in lines) == len(enumeration.CONDITIONS), name
    for name in loss_table.RECIPES:
        assert sum(line.startswith(f"{name:19}") for line in lines) == len(loss_table.RECIPE_CONDITIONS), name


# ------------------------------------------------------------------------------------------------- self-distillation


def hinted_by_hand(
    condition: str, coefficient: Callable[[list[float], list[float], list[float], int], float]
) -> Tensor:
    """The expected gradient over prompts, hints and responses: of coefficient(pi, old, teacher, t) x grad log pi."""
    world = enumeration.World(max_length=3)
    policies = enumeration.policies_of(world, condition)
    scores = world.scores(policies.pi)
    expected = torch.zeros(scores.shape[1], dtype=F64)
    first = [0, *itertools.accumulate(world.lengths.tolist())]
    for hint in loss_table.hints_of(world, policies):
        pi, old, teacher = (world.token_logprobs(x).tolist() for x in (policies.pi, policies.old, hint.teacher))
        for i in range(len(world.responses)):
            tokens = slice(first[i], first[i + 1])
            for t in range(first[i + 1] - first[i]):
                found = coefficient(pi[tokens], old[tokens], teacher[tokens], t)
                expected += hint.weights[first[i] + t] * found * scores[first[i] + t]
    return expected


def vocabulary_by_hand(condition: str, slope: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The expected gradient in the logits: slope(p, q) after each prefix, as often as the sampler comes to it."""
    world = enumeration.World(max_length=3)
    policies = enumeration.policies_of(world, condition)
    expected = torch.zeros(world.n_rows, 3, dtype=F64)
    p = policies.pi.softmax(-1)
    for hint in loss_table.hints_of(world, policies):
        visits = torch.zeros(world.n_rows, dtype=F64).index_add(0, world.rows, hint.weights)
        q = hint.teacher.softmax(-1)
        for row in range(world.n_rows):
            expected[row] += visits[row] * slope(p[row], q[row])
    return expected.flatten()


def of_reverse(p: Tensor, q: Tensor) -> Tensor:
    return p * ((p / q).log() - (p * (p / q).log()).sum())


OVER_THE_VOCABULARY = {
    "SDFT, reverse KL": of_reverse,
    "OPSD, forward KL": lambda p, q: p - q,
    "OPSD, Jensen-Shannon": lambda p, q: of_reverse(p, (p + q) / 2) / 2,
    "entropy bonus": lambda p, _: p * (p.log() - (p * p.log()).sum()),
}


@pytest.mark.parametrize("condition", enumeration.CONDITIONS)
@pytest.mark.parametrize("name", OVER_THE_VOCABULARY)
def test_a_sum_over_the_vocabulary_has_the_gradient_derived_by_hand(name, condition):
    world = enumeration.World(max_length=3)
    policies = enumeration.policies_of(world, condition)
    found = loss_table.hinted_gradient(loss_table.DISTILLATIONS[name], world, policies)
    assert torch.allclose(found, vocabulary_by_hand(condition, OVER_THE_VOCABULARY[name]), rtol=1e-6, atol=1e-9)


BY_HAND = {
    "SDPO, sampled tokens": lambda pi, old, teacher, t: math.exp(pi[t] - old[t]) * (pi[t] - teacher[t]),
    "the same, naive": lambda pi, old, teacher, t: 1.0,
    "KL in the reward": lambda pi, old, teacher, t: math.exp(pi[t] - old[t]) * (sum(old[t:]) - sum(teacher[t:])),
}


@pytest.mark.parametrize("condition", enumeration.CONDITIONS)
@pytest.mark.parametrize("name", BY_HAND)
def test_a_self_distillation_has_the_gradient_derived_by_hand(name, condition):
    world = enumeration.World(max_length=3)
    policies = enumeration.policies_of(world, condition)
    found = loss_table.hinted_gradient(loss_table.DISTILLATIONS[name], world, policies)
    assert torch.allclose(found, hinted_by_hand(condition, BY_HAND[name]), rtol=1e-6, atol=1e-9)


def test_what_self_distillation_descends():
    """Fresh: sampled tokens and the sum over the vocabulary descend the same; only KL in the reward, that of responses.

    Differentiated as it stands, the formula of sampled tokens descends nothing, and once pi has moved it lowers the
    likelihood of what was sampled, whoever the teacher is.
    """
    world = enumeration.World(max_length=3)
    rows = {}
    for condition in ("fresh", "stale"):
        policies = enumeration.policies_of(world, condition)
        for name in loss_table.DISTILLATIONS:
            rows[condition, name] = loss_table.distillation_row(name, world, policies)
    per_token = "KL(pi||T) after sampled prefixes"
    for condition in ("fresh", "stale"):
        for name in ("SDPO, sampled tokens", "SDFT, reverse KL"):
            assert rows[condition, name].descends == per_token
            assert 0.1 < rows[condition, name].bias < 0.9
        assert rows[condition, "OPSD, forward KL"].descends == "KL(T||pi) after sampled prefixes"
        assert rows[condition, "OPSD, Jensen-Shannon"].descends == "JS(pi,T) after sampled prefixes"
    assert rows["fresh", "KL in the reward"].descends == loss_table.WHOLE
    assert rows["fresh", "KL in the reward"].bias < 1e-9
    assert rows["fresh", "the same, naive"].descends == "nothing"
    assert rows["stale", "the same, naive"].descends == "log pi of the samples"
    assert rows["stale", "the same, naive"].cosine < 0

"""The order in which a run draws its problems, its requests and their seeds, and the samples that it keeps."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from runtime.data.problem_set import seed_from
from runtime.data.samples import Problem, Sample, equal_rewards, is_correct

Request = tuple[int, int, int]  # (place of the problem in the batch, number of the response, its seed)


@functools.lru_cache(maxsize=2)  # a step that is not larger than the data meets at most two epochs
def _epoch_order(number: int, problems: int, seed: int) -> list[int]:
    """Return the order of the problems in one epoch."""
    order = list(range(problems))
    random.Random(f"{seed}/{number}").shuffle(order)
    return order


def prompts_at(
    position: int,
    count: int,
    num_problems: int,
    seed: int,
) -> list[int]:
    """Return the indices of ``count`` problems from number ``position`` of the run on: a pure function of a counter.

    Every epoch has a permutation of its own, seeded by ``seed`` and its number; a step may span two epochs.
    """
    found = []
    for place in range(position, position + count):
        epoch, index = divmod(place, num_problems)
        found.append(_epoch_order(epoch, num_problems, seed)[index])
    return found


def requests(chosen: Sequence[int], count: int, seed: int, step: int | str) -> list[Request]:
    """Return (place in the batch, number of the response, seed) of ``count`` responses to each problem in ``chosen``.

    A seed depends on these numbers alone, not on what the engine did before. A problem that is drawn twice, where one
    epoch ends and the next begins, gets different seeds the second time.
    """
    wanted = []
    for place, problem in enumerate(chosen):
        before = count * chosen[:place].count(problem)
        for k in range(count):
            wanted.append((place, k, seed_from(f"{seed}/{step}/{problem}/{before + k}")))
    return wanted


def sampling(args) -> dict[str, Any]:
    """Return the sampling parameters of training."""
    return {
        "temperature": args.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": args.max_response_length,
        "stop": list(args.stop_strings),
        "ignore_eos": args.ignore_eos,
    }


def eval_requests(problems: int, args) -> tuple[list[Request], dict[str, Any]]:
    """Return (the requests of an evaluation, its sampling parameters); all evaluations of a run use the same seeds."""
    count = args.eval_samples if args.eval_settings["temperature"] > 0 else 1
    wanted = requests(range(problems), count, args.seed, "eval")
    parameters = sampling(args) | args.eval_settings
    return wanted, parameters


def best_of(samples: list[Sample], count: int) -> list[Sample]:
    """Return each prompt's ``count`` samples of highest reward, the first of equal ones, in the order they came in."""
    ranked = sorted(range(len(samples)), key=lambda i: -samples[i].reward)
    taken: Counter[int] = Counter()
    kept = []
    for i in ranked:
        prompt = samples[i].prompt_id
        if taken[prompt] < count:
            taken[prompt] += 1
            kept.append(i)
    return [samples[i] for i in sorted(kept)]


def equal_groups(samples: list[Sample]) -> list[int]:
    """Return the places in the batch whose responses all have the same reward: they carry no signal."""
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.prompt_id, set()).add(sample.reward)
    return sorted(place for place, values in rewards.items() if equal_rewards(min(values), max(values)))


def replace_groups(batch: list[Problem], samples: list[Sample], more: list[Problem], new: list[Sample]) -> None:
    """Replace groups of equal reward by new groups whose rewards differ, as many as there are; in place.

    ``samples`` answer ``batch``, ``new`` the problems ``more``; both are ordered by place, with equally many to each.
    """
    group = len(samples) // len(batch)
    useless = set(equal_groups(new))
    useful = [place for place in range(len(more)) if place not in useless]
    for place, other in zip(equal_groups(samples), useful, strict=False):
        batch[place] = more[other]
        for k in range(group):
            replacement = new[other * group + k]
            samples[place * group + k] = dataclasses.replace(replacement, prompt_id=place)


def draw_metrics(rounds: list[list[Sample]], prompts: int) -> dict[str, float]:
    """Compute metrics over all groups that a step sampled, before dynamic sampling replaced those of equal reward."""
    groups = 0
    equal = 0
    rewards = []
    for drawn in rounds:
        groups += len({sample.prompt_id for sample in drawn})
        equal += len(equal_groups(drawn))
        rewards += [sample.reward for sample in drawn]
    return {
        "data/rounds": len(rounds) - 1,
        "data/dropped": groups - prompts,
        "data/zero_std_frac": equal / groups,
        "data/reward_mean": sum(rewards) / len(rewards),
    }


@dataclasses.dataclass
class DrawState:
    """Position of a run in its training problems. JSON can hold all of it; a checkpoint stores its ``vars``."""

    kept: list[int]  # indices of the problems that are still drawn
    rates: list[float]  # fraction of correct responses when a problem was last drawn, 0 before that; one per problem
    position: int = 0  # problems drawn from ``kept`` so far
    epoch: int = 0  # epochs over ``kept`` that were complete when solved problems were last dropped


class Prompts:
    """Draws the training problems of a run, in an order that depends only on ``--seed`` and ``state``.

    The solved-problem filter (``--dataset_filter``) drops problems at the end of an epoch; the shorter list then starts
    a new one. Put ``state`` into the parts of ``Checkpoints``.
    """

    def __init__(self, problems: list[Problem], args):
        self.problems = problems
        self.args = args
        count = len(problems)
        self.state = DrawState(kept=list(range(count)), rates=[0.0] * count)

    def draw(self, count: int) -> tuple[list[int], list[Problem]]:
        """Return (indices, problems) of the next ``count`` problems. Identical on every rank."""
        state = self.state
        places = prompts_at(state.position, count, len(state.kept), self.args.seed)
        state.position += count
        chosen = [state.kept[place] for place in places]
        return chosen, [self.problems[i] for i in chosen]

    def record(self, chosen: list[int], samples: list[Sample]) -> None:
        """Store how often the problems ``chosen`` were solved. ``samples``: ordered by place, equally many to each."""
        group = len(samples) // len(chosen)
        for place, index in enumerate(chosen):
            own = samples[place * group : (place + 1) * group]
            self.state.rates[index] = sum(map(is_correct, own)) / group

    def drop_solved(self) -> int:
        """Drop solved problems if an epoch has ended since the last call; return the number of problems still drawn.

        ``--dataset_filter`` SHARE THRESHOLD: at most this share of all, the best of those solved at this rate or above.
        """
        state = self.state
        epoch = state.position // len(state.kept)
        if epoch > state.epoch:
            state.epoch = epoch
            share, threshold = self.args.dataset_filter
            solved = [i for i in state.kept if state.rates[i] >= threshold]
            solved.sort(key=lambda i: -state.rates[i])
            dropped = set(solved[: int(share * len(state.kept))])
            if dropped:
                state.kept = [i for i in state.kept if i not in dropped]
                state.position = 0
                state.epoch = 0
        return len(state.kept)

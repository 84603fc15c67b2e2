"""runtime/data/samples.py: one definition of a correct response, and every count of them follows it."""

from __future__ import annotations

import evaluate
import pytest
import torch
from helpers import make_samples

import grpo
import rewards
import utils
from rewards import Reward
from runtime.data.problem_set import Problem
from runtime.data.prompt_order import Prompts
from runtime.data.samples import Sample, is_correct, is_graded, majority

# (what the verifier found, whether that is a correct response, whether its score is more than right or wrong)
JUDGED = [
    (Reward(1.0), True, False),
    (Reward(0.0), False, False),
    (Reward(0.97), True, True),  # the first reward in docs/data_and_rewards.md, of a right answer of 30 letters
    (Reward(-0.03), False, True),
    (Reward(0.5), False, True),
    (Reward(0.500001), True, True),
    (Reward(2.0), True, True),
    (Reward(-7.25), False, True),
    (Reward(0.2, {"correct": 1.0}), True, False),  # what the verifier states decides
    (Reward(0.97, {"correct": 0.0}), False, False),
    (Reward(0.0, {"correct": 0.5}), False, False),
    (Reward(0.9, {"format": 1.0}), True, True),  # another part does not
    (Reward(0.1, {"format": 1.0}), False, True),
    (Reward(3.0, {"turns": 3.0}), True, True),  # turns are in the score
    (Reward(0.2, {"turns": 1.0, "correct": 0.0}), False, False),
]


def judged(*found: Reward, args: grpo.Args | None = None) -> list[Sample]:
    """A group of samples with these rewards, all ended by themselves."""
    samples = make_samples(1, len(found))
    for sample, reward in zip(samples, found, strict=True):
        sample.finish_reason = "stop"
        sample.response = str(reward.score)
        rewards.shape_reward(sample, reward, args or grpo.Args())
    return samples


@pytest.mark.parametrize(("found", "right", "graded"), JUDGED)
def test_what_is_correct(found, right, graded):
    """Shaping moves the reward and not the judgement."""
    for args in (grpo.Args(), grpo.Args(reward_bias=3.0, reward_scaling=-2.0, max_reward_clip=0.1)):
        (sample,) = judged(found, args=args)
        assert (is_correct(sample), is_graded(sample)) == (right, graded)


@pytest.mark.parametrize("found", [found for found, _, _ in JUDGED])
def test_a_truncated_response_that_counts_as_0_is_wrong(found):
    sample = judged(found)[0]
    sample.finish_reason = "length"
    rewards.shape_reward(sample, found, grpo.Args(mask_no_eos_with_zero=True))
    assert not is_correct(sample) and ("correct" in sample.reward_parts) == ("correct" in found.parts)


def test_every_reader_counts_alike():
    """Training metrics, the filter of solved problems, evaluations, and the intervals."""
    samples = judged(*(found for found, _, _ in JUDGED))
    right = sum(right for _, right, _ in JUDGED)
    count = len(samples)
    problems = [Problem([], "7", "exact", {}, prompt_ids=[1], source="a")]
    rewards_PG = torch.tensor([[sample.reward for sample in samples]])
    metrics = utils.sample_metrics(samples, rewards_PG, step=1)
    assert (metrics["reward/correct"], metrics["reward/pass@k"]) == (right / count, 1.0)
    order = Prompts(problems, grpo.Args())
    order.record([0], samples)
    assert order.state.rates == [right / count]
    result = utils.eval_metrics(samples, problems, step=0)
    assert (result["eval/pass@1"], result["eval/right"]) == (right / count, [right])
    assert result["eval/graded_frac"] == sum(graded for _, _, graded in JUDGED) / count
    assert (
        result["eval/rewards"] == [result["eval/reward_mean"]] == [sum(found.score for found, _, _ in JUDGED) / count]
    )
    row = evaluate.table(samples, problems, result).splitlines()[2].split(" | ")
    low, high = row[3].split(" to ")
    assert row[2] == f"{right / count:.3f}" and float(low) < right / count < float(high)


def test_a_penalty_does_not_make_the_majority_wrong():
    """Three right answers, each a little less than 1 for its length, against two wrong ones that agree."""
    samples = judged(
        Reward(0.97), Reward(0.95), Reward(0.9), Reward(-0.02, extracted="3"), Reward(-0.01, extracted="3")
    )
    assert majority(samples) == 1.0

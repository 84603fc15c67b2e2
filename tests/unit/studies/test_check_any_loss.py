"""scripts/check.py --loss and --advantages: published mistakes are found, and their repaired versions pass."""

from __future__ import annotations

import inspect
from functools import partial

import check
import check_any_loss
import check_functions
import check_loss
import check_numbers
import pytest
import torch
from check_subject import CONSTANT, OK, RESPONSE, SEQUENCE, SUM, TOKEN, LossSubject
from framework_losses import ADAPTERS, plain
from frameworks import Framework
from helpers import install_wheel


def ppo(logprobs, old, advantages):
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)


def mean_of_rows(logprobs, old, advantages, mask, eps=0.0):
    return ((ppo(logprobs, old, advantages) * mask).sum(1) / (mask.sum(1) + eps)).mean()


def mean_of_micro_batch(logprobs, old, advantages, mask):
    return (ppo(logprobs, old, advantages) * mask).sum() / mask.sum()


def mean_of_rank(logprobs, old, advantages, mask, step_mask, rows, ranks):
    tokens = mask.sum() if ranks > 1 else step_mask.sum() * len(rows) / len(step_mask)
    return (ppo(logprobs, old, advantages) * mask).sum() / tokens


def not_times_ranks(logprobs, old, advantages, ranks):
    return ppo(logprobs, old, advantages) / ranks


def number_of_document_as_mask(logprobs, old, advantages, mask):
    weights = torch.arange(1, len(mask) + 1)[:, None] * mask
    return (ppo(logprobs, old, advantages) * weights).sum() / weights.sum()


def without_mask(logprobs, old, advantages):
    return ppo(logprobs, old, advantages).sum(1).mean()


def nan_times_zero(logprobs, old, advantages, mask, filled=False):
    moved = torch.where(mask > 0, logprobs - old, 0.0) if filled else logprobs - old
    return -moved.exp() * advantages


def penalty_without_share(logprobs, old, advantages, share=20.0):
    return ppo(logprobs, old, advantages) + share * (logprobs - old).abs()


def old_is_the_policy(logprobs, advantages):
    return ppo(logprobs, logprobs.detach(), advantages)


def sampler_is_old(logprobs, sampler, advantages):
    return ppo(logprobs, sampler, advantages)


def detached_ratio(logprobs, old, advantages):
    return ppo(logprobs.detach(), old, advantages) + 0 * logprobs


def cispo(logprobs, old, advantages, detached=True):
    ratio = (logprobs - old).exp().clamp(max=1.2)
    return -advantages * ratio.detach() * logprobs if detached else -advantages * ratio


def with_kl(kl, logprobs, old, ref, advantages, beta):
    return ppo(logprobs, old, advantages) + beta * kl(logprobs - ref)


def k2(d):
    return d.square() / 2


def k3(d):
    return (-d).exp() - 1 + d


def k3_of_minus_d(d):
    return k3(-d)


def k3_without_gradient(d):
    return k3(d.detach()) + 0 * d


def k2_with_score(d):
    return (d - d.detach()).exp() * k2(d)


def by_group(rewards_PG, eps=1e-4):
    centered = rewards_PG - rewards_PG.mean(1, keepdim=True)
    return centered / (rewards_PG.std(1, keepdim=True) + eps)


def by_batch(rewards_PG):
    return (rewards_PG - rewards_PG.mean()) / (rewards_PG.std() + 1e-4)


def by_group_and_std_of_batch(rewards_PG):
    return (rewards_PG - rewards_PG.mean(1, keepdim=True)) / (rewards_PG.std() + 1e-4)


def by_other_groups(rewards_PG):
    return by_group(rewards_PG.reshape(rewards_PG.T.shape)).reshape(rewards_PG.shape)


def whitened_twice(rewards_PG):
    return by_batch(by_group(rewards_PG))


# Mistake: framework, the version with it and without it or the change that repaired it, the finding, wrong, right. All
# functions were written for this table. An asterisk: the original was also found by --source at these commits.
BUGS = {
    "row without tokens": ("OpenRLHF", "59ca1354, d16ff751 *", "masked", mean_of_rows, partial(mean_of_rows, eps=1e-8)),
    "empty row in GSPO": ("verl", "a73b2aba8, 4424616d7 *", "masked", mean_of_rows, partial(mean_of_rows, eps=1e-8)),
    "0 / 0 in a micro-batch": ("prime-rl", "#808", "masked", mean_of_rows, partial(mean_of_rows, eps=1e-8)),
    "mean of each micro-batch": ("OpenRLHF", "#1249 *", "micro-batches", mean_of_micro_batch, ppo),
    "mean of each mini-batch part": ("verl", "a73b2aba8, 0.9.1 *", "micro-batches", mean_of_micro_batch, ppo),
    "counts of one rank": ("prime-rl", "#2562", "ranks", mean_of_rank, ppo),
    "ranks are averaged": ("open-instruct", "loss *= world_size", "ranks", not_times_ranks, ppo),
    "document numbers as mask": ("open-instruct", "#1668", "aggregation", number_of_document_as_mask, ppo),
    "tokens of tools": ("TRL", "#6439", "their gradient", without_mask, ppo),
    "masked tokens in the mean": ("SkyRL", "#462", "their gradient", without_mask, ppo),
    "NaN times 0": ("OpenRLHF", "#1240", "NaN behind", nan_times_zero, partial(nan_times_zero, filled=True)),
    "NaN of a masked token": ("SkyRL", "#1635", "NaN behind", nan_times_zero, partial(nan_times_zero, filled=True)),
    "penalty without the mean": ("SkyRL", "a9564572 *", "second optimizer step", penalty_without_share, ppo),
    "old is the policy": ("SkyRL", "#1315", "inputs", old_is_the_policy, ppo),
    "sampler as old": ("slime", "#1829", "inputs", sampler_is_old, ppo),
    "constant GSPO ratio": ("prime-rl", "#1123", "fresh samples", detached_ratio, ppo),
    "CISPO with a live ratio": ("open-instruct", "#1269", "nearest loss", partial(cispo, detached=False), cispo),
    "KL under no_grad": ("open-instruct", "#530", "KL k3", k3_without_gradient, k3),
    "KL in the loss under no_grad": ("SkyRL", "#1353", "KL k3", k3_without_gradient, k3),
    "KL of the other sign": ("rlhf-book", "a66b0bf", "KL k3", k3_of_minus_d, k3),
    "k2 with a score": ("NeMo-RL", "since #2506 *", "KL k2", k2_with_score, k2),
    "std of the batch": ("R1-V", "#67", "rewards of other", by_batch, by_group),
    "local and global std swapped": ("prime-rl", "#1188", "rewards of other", by_group_and_std_of_batch, by_group),
    "groups reshaped in another order": ("tunix", "#820", "order of prompts", by_other_groups, by_group),
    "group and batch": ("gem", "#113", "rewards of other", whitened_twice, by_group),
    "rounding as std": ("NeMo-RL", "#4161", "equal rewards", partial(by_group, eps=0.0), by_group),
}
OF_BATCH = ("masked", "micro-batches", "ranks", "their gradient", "NaN behind")


def subject_of(own, estimator: str = "") -> LossSubject:
    """Return the subject of a plain function."""
    function = partial(own)
    function.__name__ = "own"
    adapter = ADAPTERS["plain"]._replace(estimators=(estimator,) if estimator else ())
    return LossSubject("own", plain(None, function)["own"], adapter)


def states(finding: str, own) -> list[str]:
    """The states of the findings whose names begin like this one's."""
    if next(iter(inspect.signature(own).parameters)) == "rewards_PG":
        subject = check_any_loss.AdvantageSubject("grpo", own)
        found = [*check_functions.check_advantages(subject), *check_numbers.check_group_edges(subject)]
    elif finding.startswith("KL"):
        found = check_any_loss.check_kl(subject_of(partial(with_kl, own), finding.split()[1]))
    elif finding in OF_BATCH:
        found = check_any_loss.check_batch(subject_of(own))
    elif finding == "aggregation":
        found = check_any_loss.check_mean(subject_of(own))
    else:
        found = check_loss.check_ascent(subject_of(own))
    return [f.state for f in found if f.name.startswith(finding)]


@pytest.mark.parametrize("name", BUGS)
def test_a_published_mistake_is_found_and_the_repaired_version_passes(name):
    _, _, finding, wrong, right = BUGS[name]
    assert set(states(finding, wrong)) - {OK}, "not found"
    assert set(states(finding, right)) <= {OK}, "false alarm"


MEANS = {
    TOKEN: lambda logprobs, mask, step_mask, rows: -(logprobs * mask).sum() / step_mask.sum() * 6 / len(rows),
    SEQUENCE: lambda logprobs, mask: -((logprobs * mask).sum(1) / mask.sum(1)).mean(),
    RESPONSE: lambda logprobs, mask: -(logprobs * mask).sum(1).mean(),
    CONSTANT: lambda logprobs, mask: -(logprobs * mask).mean(),
    SUM: lambda logprobs, mask, rows: -(logprobs * mask).sum() * 6 / len(rows),
}


@pytest.mark.parametrize(("mean", "loss"), MEANS.items())
def test_what_a_loss_divides_by_is_found(mean, loss):
    assert subject_of(loss).script.mean == mean


FRAMEWORK = """
from absent_library import decorate
from myframework import absent_part
from myframework.help import double

@decorate(1)
def loss(x: absent_part.Tensor["B"]):
    return double(x)
"""


def test_a_module_runs_without_what_is_absent_or_not_asked_for(tmp_path):
    """Its own functions are real, in versions side by side; what it imports and does not call are placeholders."""
    losses = []
    for version, factor in (("one", 2), ("two", 3)):
        package = tmp_path / version / "myframework"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('the whole framework')\n")
        (package / "losses.py").write_text(FRAMEWORK)
        (package / "help.py").write_text(f"def double(x):\n    return {factor} * x\n")
        framework = Framework([tmp_path / version], ("myframework.losses", "myframework.help"))
        losses.append(framework.load("myframework.losses").loss)
    assert [loss(4) for loss in losses] == [8, 12]
    with pytest.raises(ImportError):
        framework.load("myframework.nothing")


@pytest.mark.slow
def test_the_losses_of_a_wheel_are_called_as_they_are(tmp_path, capsys):
    """Also by name, as a function of the user's own, and as advantages."""
    reason = install_wheel("verl", "0.9.1", tmp_path)
    if reason:
        pytest.skip(reason)
    own = tmp_path / "own.py"
    own.write_text("from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla as mine\n")
    for asked, code, words in (
        ("--loss verl", 0, "| vanilla | 0.00 +1.00 5.2 | 0.04 +1.00 5.4 | 1.11 +0.02"),
        (f"--loss {own}:mine --like verl", 0, "this is PPO clip"),
        ("--advantages verl:rloo", 0, "nothing that must hold fails"),
    ):
        assert check_any_loss.main(*check.parse([*asked.split(), "--source", str(tmp_path)])) == code
        assert words in capsys.readouterr().out, asked

"""Part 2 of scripts/check.py, the functions: what must not change advantages, weights, and the critic's loss."""

from __future__ import annotations

import itertools
import math

import loss_table
import torch
from check_subject import FAIL, NOTE, Finding, SmallSubject, Subject, judge
from torch import Tensor

F64 = torch.float64
CLOSE = 1e-6
KINDS = ("standard", "centered", "leave_one_out")  # the names that grpo.py's docstring defines


def apart(
    a: Tensor,
    b: Tensor,
) -> float:
    """Largest difference of two tensors relative to the larger one; infinite where one of them is not finite."""
    if not (a.isfinite().all() and b.isfinite().all()):
        return math.inf
    return ((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item()


def check_advantages(
    subject: Subject,
) -> list[Finding]:
    """group_advantages: invariances that every kind has, and those that the kind's name claims."""
    kind, eps = subject.args.advantage_normalization_type, subject.args.advantage_eps
    draw = torch.Generator().manual_seed(0)
    rewards_PG = torch.randint(0, 5, (6, 8), generator=draw).double() / 4
    function = subject.script.group_advantages
    where = subject.place("group_advantages")
    named = kind in KINDS
    before = function(rewards_PG, kind, eps)
    groups, places = torch.randperm(6, generator=draw), torch.randperm(8, generator=draw)
    others = rewards_PG.clone()
    others[1:] = 4 * others[1:] + 1  # the first group stays as it is
    cases = {
        "order of prompts": (function(rewards_PG[groups], kind, eps), before[groups], True),
        "order within a group": (function(rewards_PG[:, places], kind, eps), before[:, places], True),
        "rewards of other groups": (function(others, kind, eps)[0], before[0], named),
        "rewards shifted": (function(rewards_PG + 2.5, kind, eps), before, named),
        "rewards scaled": (function(4 * rewards_PG, kind, eps), before, kind == "standard"),
    }
    findings = []
    for name, (found, wanted, claimed) in cases.items():
        difference = apart(found, wanted)
        limit = 1e-4 if name == "rewards scaled" else CLOSE  # the eps beside the standard deviation
        text = f"advantages depend on it: they differ by {difference:.2g}"
        if claimed or difference <= limit or name != "rewards scaled" or not named:
            state = FAIL if claimed else NOTE
            findings.append(
                judge(2, name, difference <= limit, "advantages are equal", text, where, state),
            )
    if named:
        findings.append(compare_advantages(subject, rewards_PG, before, where))
    return findings


def compare_advantages(
    subject: Subject,
    rewards_PG: Tensor,
    ours: Tensor,
    where: str,
) -> Finding:
    """Compare the script's advantages with those of the unedited script."""
    kind = subject.args.advantage_normalization_type
    theirs = subject.base.group_advantages(
        rewards_PG,
        kind,
        subject.args.advantage_eps,
    )
    difference = apart(ours, theirs)
    text = f"they differ from those of {subject.base_name} by {difference:.2g} of the largest"
    state = NOTE
    if ((ours * theirs).sum(1) < 0).any():
        state = FAIL
        text += ", and rank better responses below worse ones"
    return judge(
        2,
        "advantages",
        difference <= CLOSE,
        f"those of {subject.base_name}",
        text,
        where,
        state,
    )


def check_weights(
    subject: Subject,
) -> list[Finding]:
    """Check that loss_weights are 0 outside the loss, ignore the order, and have the same sum for every batch."""
    args = subject.args
    sizes = [3, 9, 1, 5, 5, 7]
    inside = [0, 1, 3, 5]
    where = subject.place("loss_weights")
    samples = [loss_table.response_of(size) for size in sizes]
    parts = per_response(subject, sizes, inside)
    findings = []
    if any(parts[i].any() for i in range(len(samples)) if i not in inside):
        text = "a response outside the loss has a weight: truncated or filtered samples are trained on"
        findings.append(
            Finding(2, "weights outside", FAIL, text, where),
        )
    if not all(parts[i][-1] for i in inside):
        findings.append(
            Finding(2, "weight of EOS", FAIL, "the last token of a response has no weight", where),
        )
    order = [5, 2, 0, 4, 1, 3]
    moved = per_response(subject, [sizes[i] for i in order], [k for k, i in enumerate(order) if i in inside])
    if any(apart(moved[k], parts[i]) > CLOSE for k, i in enumerate(order) if i in inside):
        text = "a token's weight depends on the order of samples"
        findings.append(
            Finding(2, "weights and order", FAIL, text, where),
        )
    sums = []
    for lengths in (sizes, [1, 12, 1, 2, 3, 1], [4] * 6):
        sums.append(sum(part.sum().item() for part in per_response(subject, lengths, inside)))
    twice = sum(part.sum().item() for part in per_response(subject, sizes * 2, inside + [i + 6 for i in inside]))
    if abs(twice - sums[0]) > 1e-5:
        text = f"the weights of every sample twice sum to {twice:.3g} instead of {sums[0]:.3g}: no mean over the step"
        findings.append(
            Finding(2, "weights of a step", FAIL, text, where),
        )
    name = f"--loss_norm {getattr(args, 'loss_norm', '?')}"
    if name.endswith(("token", "sequence")) and max(abs(total - 1) for total in sums) > 1e-5:
        said = ", ".join(f"{total:.3g}" for total in sums)
        text = f"{name} is a mean, but the weights of three batches sum to {said}: something else is counted, too"
        findings.append(
            Finding(2, "weights", FAIL, text, where),
        )
    base = subject.base.loss_weights(samples, inside, subject.base_args).split(sizes)
    difference = max(apart(ours, theirs) for ours, theirs in zip(parts, base, strict=True))
    text = f"they differ from those of {subject.base_name} by {difference:.2g} of the largest"
    if not findings:
        findings.append(
            judge(2, "weights", difference <= CLOSE, f"those of {subject.base_name}", text, where, NOTE),
        )
    return findings


def per_response(
    subject: Subject,
    sizes: list[int],
    inside: list[int],
) -> tuple[Tensor, ...]:
    """Return the weights of the tokens of each response."""
    samples = [loss_table.response_of(size) for size in sizes]
    return subject.script.loss_weights(samples, inside, subject.args).split(sizes)


def check_estimates(
    subject: Subject,
) -> list[Finding]:
    """gae: with lambda and gamma 1 it is the reward still to come minus the value; nothing passes between responses."""
    draw = torch.Generator().manual_seed(0)
    offsets = [0, 3, 4, 9]
    rewards, values, others = torch.randn(3, 9, generator=draw, dtype=F64)
    gamma = 0.9
    if isinstance(subject, SmallSubject):  # only a last token has a reward, and gamma is 1
        gamma = 1.0
        rewards[[0, 1, 4, 5, 6, 7]] = others[[0, 1, 4, 5, 6, 7]] = 0.0
    after = torch.zeros(3, dtype=F64)
    where = subject.place("gae")
    gae = subject.script.gae
    to_go = torch.cat([rewards[a:b].flip(0).cumsum(0).flip(0) for a, b in itertools.pairwise(offsets)])
    findings = []
    advantages, returns = gae(rewards, values, after, offsets, 1.0, 1.0)
    cases = {"gae, lambda 1": (advantages, to_go - values), "returns, lambda 1": (returns, to_go)}
    other_rewards = torch.cat([rewards[:4], others[4:]])
    first, _ = gae(rewards, values, after, offsets, gamma, 0.8)
    second, _ = gae(other_rewards, values, after, offsets, gamma, 0.8)
    cases["gae, other responses"] = (second[:4], first[:4])
    for name, (found, wanted) in cases.items():
        difference = apart(found, wanted)
        text = f"differs from what it must be by {difference:.2g}"
        findings.append(judge(2, name, difference <= CLOSE, "as it must be", text, where))
    theirs, _ = subject.base.gae(rewards, values, after, offsets, gamma, 0.8)
    difference = apart(first, theirs)
    if difference > CLOSE:
        text = f"with gamma {gamma} and lambda 0.8 it differs from {subject.base_name}'s by {difference:.2g}"
        own = any(finding.state == FAIL for finding in findings)  # another estimator altogether
        findings.append(Finding(2, "gae", NOTE if own else FAIL, text, where))
    return findings


def check_whitening(subject: Subject) -> list[Finding]:
    """whiten: it does not depend on the scale and the offset of its input, and its mean is 0."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(50, generator=draw, dtype=F64)
    plain = subject.script.whiten(x)
    where = subject.place("whiten")
    wrong = [
        name for name, y in {"scale": 10 * x, "mean": x + 5}.items() if apart(subject.script.whiten(y), plain) > 1e-6
    ]
    if wrong:
        return [Finding(2, "whiten", FAIL, f"whitened advantages depend on the {wrong[0]} of the rewards", where)]
    difference = apart(plain, subject.base.whiten(x))
    text = f"differs from {subject.base_name}'s by {difference:.2g}"
    return [judge(2, "whiten", difference <= CLOSE, f"that of {subject.base_name}", text, where, NOTE)]


def check_critic_loss(subject: Subject) -> list[Finding]:
    """value_loss: its gradient points away from the target, and is that of its value."""
    draw = torch.Generator().manual_seed(0)
    values, old, targets = torch.randn(3, 400, generator=draw, dtype=F64)
    where = subject.place("value_loss")
    clip = subject.args.value_clip
    findings = []
    leaf = values.clone().requires_grad_()
    loss, _ = subject.script.value_loss(leaf, old, targets, clip)
    slopes = torch.autograd.grad(loss.sum(), leaf, allow_unused=True)[0] if loss.requires_grad else None
    if slopes is None or not slopes.any():
        return [Finding(2, "critic's loss", FAIL, "the values get no gradient", where)]
    wrong = (slopes * (values - targets) < 0).double().mean().item()
    if wrong > 0:
        text = f"for {wrong:.0%} of the tokens its gradient moves the value away from the return"
        findings.append(Finding(2, "critic's loss", FAIL, text, where))
    step = 1e-6
    high, _ = subject.script.value_loss(values + step, old, targets, clip)
    low, _ = subject.script.value_loss(values - step, old, targets, clip)
    difference = apart(slopes, (high - low) / (2 * step))
    if difference > 1e-4:
        text = f"its gradient differs from finite differences by {difference:.2g}"
        findings.append(Finding(4, "critic's loss", FAIL, text, where))
    base_leaf = values.clone().requires_grad_()
    base, _ = subject.base.value_loss(base_leaf, old, targets, clip)
    theirs = torch.autograd.grad(base.sum(), base_leaf)[0]
    if not findings:
        same = apart(slopes, theirs) <= CLOSE
        text = f"its gradient is not that of {subject.base_name}"
        if not same and clip is not None:
            unclipped = [script.value_loss(values, old, targets, None)[0] for script in (subject.script, subject.base)]
            if apart(*unclipped) <= CLOSE:
                text += f" with --value_clip {clip:g}, although it is without a clip"
                return [Finding(2, "critic's loss", FAIL, text, where)]
        findings.append(judge(2, "critic's loss", same, f"that of {subject.base_name}", text, where, NOTE))
    return findings


def check(subject: Subject) -> list[Finding]:
    """All findings on the functions."""
    findings = check_weights(subject)
    if hasattr(subject.script, "group_advantages"):
        findings = [*check_advantages(subject), *findings]
    if hasattr(subject.script, "gae"):
        findings += check_estimates(subject)
    if hasattr(subject.script, "whiten"):
        findings += check_whitening(subject)
    if hasattr(subject.script, "value_loss"):
        findings += check_critic_loss(subject)
    return findings

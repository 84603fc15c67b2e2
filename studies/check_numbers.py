"""Part 3 of scripts/check.py: the loss of extreme numbers."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import torch
from check_subject import FAIL, NOTE, Finding, Subject, judge, with_flags
from torch import Tensor

import kl_estimators
from kl_estimators import make_tokens

FIELDS = ("logprobs_T", "old_T", "ref_T", "sampler_T", "advantages_T")
LOGPROBS = (0.0, -1e-7, -1.0, -70.08, -1e4)  # exp(70.08 - 1) is a ratio of 1e30
ADVANTAGES = (0.0, 1.0, -1.0, 65504.0, -65504.0, 6e-8)  # the largest and the smallest numbers of fp16
FAR = (0.0, -1.0, -65504.0, -1e38)  # near the ends of fp16 and bf16
EQUAL_REWARDS = (0.0, 1.0, 0.1 + 0.2, 1 / 3, -7.7, 1e6 + 0.1)


def grid(
    logprobs: tuple[float, ...],
    dtype: torch.dtype,
    advantages: tuple = ADVANTAGES,
) -> dict[str, Tensor]:
    """Every combination of log-probs and advantages: one token each."""
    columns = torch.tensor(list(itertools.product(*[logprobs] * 4, advantages)), dtype=torch.float64).T
    return {name: column.to(dtype) for name, column in zip(FIELDS, columns, strict=True)}


def settings(
    args: Any,
    base: ModuleType,
) -> dict[str, tuple[float, Any]]:
    """(coefficient of the KL, arguments) by name: the script's own, and each KL in the loss and importance weight."""
    found = {"the given flags": (args.kl_coefficients[0], args)}
    if not hasattr(base, "kl_value"):  # a file that stands alone, without these flags
        return found
    for place, estimator in kl_estimators.settings(base):
        if place == "loss":
            found[f"--kl_estimator {estimator}"] = (0.1, with_flags(args, kl_estimator=estimator))
    found["--truncated_importance_sampling_ratio_cap 2"] = (
        0.0,
        with_flags(args, truncated_importance_sampling_ratio_cap=2.0),
    )
    found["--importance_sampling_mask 0.5 5"] = (0.0, with_flags(args, importance_sampling_mask=(0.5, 5.0)))
    found["--clip_ratio_c 3"] = (0.0, with_flags(args, clip_ratio_c=3.0))
    return found


def broken(
    script: ModuleType,
    beta: float,
    args: Any,
    values: dict[str, Tensor],
) -> Tensor:
    """Return True for each token whose loss or gradient is not finite, [T]."""
    leaf = values["logprobs_T"].clone().requires_grad_()
    full_kl = (leaf - values["ref_T"]).abs()
    entropy = torch.ones_like(leaf)
    tokens = make_tokens(script, **values | {"logprobs_T": leaf, "full_kl_T": full_kl, "entropy_T": entropy})
    loss_T, _ = script.token_loss(tokens, beta, args)
    slope_T = torch.zeros_like(loss_T)
    if loss_T.requires_grad:
        slope_T = torch.autograd.grad(loss_T.sum(), leaf, allow_unused=True)[0]
        slope_T = torch.zeros_like(loss_T) if slope_T is None else slope_T
    return ~(loss_T.isfinite() & slope_T.isfinite())


def check_edges(
    subject: Subject,
) -> list[Finding]:
    """Check that loss and gradient of extreme tokens are finite wherever those of the unedited script are."""
    cases = {
        "log-probs -1e4 to 0": grid(LOGPROBS, torch.float32),
        "range of fp16, bf16": grid(FAR, torch.float32, (0.0, 1.0, -1.0)),
        "bf16 tensors": grid(LOGPROBS, torch.bfloat16),
        "one token": {name: value[4321 % len(value)][None] for name, value in grid(LOGPROBS, torch.float32).items()},
    }
    findings = []
    where = subject.first_place(
        "token_loss",
        "importance_weights",
        "clamp_straight_through",
    )
    theirs = settings(subject.base_args, subject.base)
    for title, values in cases.items():
        failed = []
        tokens = 0
        if not hasattr(subject.base, "kl_value") and len(values["old_T"]) > 1:  # old log-probs stand for all the others
            equal = (values["ref_T"] == values["old_T"]) & (values["sampler_T"] == values["old_T"])
            values = {name: column[equal] for name, column in values.items()}
        for name, (beta, args) in settings(subject.args, subject.base).items():
            ours_T = broken(subject.script, beta, args, values)
            theirs_T = broken(subject.base, *theirs[name], values)
            tokens += len(ours_T)
            worse = (ours_T & ~theirs_T).nonzero().flatten()
            if len(worse) > 0:
                first = ", ".join(f"{field} {values[field][worse[0]].item():g}" for field in FIELDS)
                failed.append(f"{name}: {len(worse)} of {len(ours_T)} tokens, the first of them {first}")
        good = f"finite loss and gradient wherever {subject.base_name} has them, {tokens} tokens"
        text = f"the loss or its gradient is not finite with {'; '.join(failed[:1])}"
        text += f" (and with {len(failed) - 1} other settings)" if len(failed) > 1 else ""
        findings.append(
            judge(3, title, not failed, good, text, where),
        )
    return [*findings, check_nan(subject)]


def check_nan(subject: Subject) -> Finding:
    """Check that a NaN reward does not spread to the loss of other tokens."""
    values = {name: torch.linspace(-2, -1, 6) for name in FIELDS}
    values["response_T"] = torch.tensor([0, 0, 1, 1, 2, 2])
    values["advantages_T"] = torch.tensor([1.0, 1.0, torch.nan, torch.nan, -1.0, -1.0])
    found = []
    for script, args in ((subject.script, subject.args), (subject.base, subject.base_args)):
        found.append(broken(script, 0.0, args, values).tolist())
    text = f"tokens {[t for t, bad in enumerate(found[0]) if bad]} break, of which only 2 and 3 have a NaN advantage"
    good = "a NaN advantage stays in its own tokens"
    return judge(
        3,
        "NaN rewards",
        found[0] == found[1],
        good,
        text,
        subject.first_place("token_loss"),
    )


def check_group_edges(subject: Subject) -> list[Finding]:
    """Check group_advantages for equal and for NaN rewards."""
    if not hasattr(subject.script, "group_advantages"):
        return []
    kind, eps = subject.args.advantage_normalization_type, subject.args.advantage_eps
    where = subject.place("group_advantages")
    rewards_PG = torch.tensor(EQUAL_REWARDS, dtype=torch.float64)[:, None].repeat(1, 7)
    rewards_PG = torch.cat([rewards_PG.abs(), torch.arange(7.0)[None].double()])
    found_PG = subject.script.group_advantages(rewards_PG, kind, eps)
    base_PG = subject.base.group_advantages(rewards_PG, kind, eps)
    worst, usual = found_PG[:-1].abs().amax().item(), base_PG[:-1].abs().amax().item()
    good = f"advantages of groups of equal rewards are at most {max(usual, subject.tolerance):.3g}"
    text = f"a group of equal rewards has advantages of up to {worst:.3g}; {subject.base_name}: {usual:.3g}"
    right = worst <= max(usual, subject.tolerance) and bool(found_PG.isfinite().all())
    others_PG = rewards_PG.clone()
    others_PG[-1] *= 1000
    moved_PG = subject.script.group_advantages(others_PG, kind, eps)
    state = FAIL
    if not torch.allclose(moved_PG[:-1], found_PG[:-1], equal_nan=True):
        state = NOTE  # a baseline of all prompts has no such zeros
    return [judge(3, "equal rewards", right, good, text, where, state)]

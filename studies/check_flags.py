"""Part 6 of scripts/check.py: whether the flags of a script do anything."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import types
import typing
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import check_learning
import check_update
import loss_table
import torch
from check_subject import FAIL, NOTE, OK, Finding, Subject, with_flags
from probe_run import Laboratory, Probe, Recorded
from torch import Tensor

from kl_estimators import make_tokens

IDLE = "and does nothing here"


def other_values(script: ModuleType, name: str, value: Any) -> list[Any]:
    """Values that a flag may also have, by its type."""
    kind = typing.get_type_hints(script.Args)[name]
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    options = typing.get_args(kind) if is_union else (kind,)
    number = value or 0
    found: list[Any] = []
    for option in options:
        if typing.get_origin(option) is Literal:
            found += typing.get_args(option)
        elif option is bool:
            found += [True, False]
        elif option is int:
            found += [number + 1, 2 * number + 3]
        elif option is float:
            found += [number / 2, 2 * number + 0.1]
            found += [0.5, 3.0, 1e-3]
        elif option is str:
            found += [f"{value or ''} changed"]
        elif typing.get_origin(option) is tuple and float in typing.get_args(option):
            size = len(value or typing.get_args(option))
            before = value or (0.5,) * size
            found.append((0.9, 1.1, 1.2)[:size])
            found.append(tuple(2 * x + 0.1 for x in before))
    return [x for x in found if x != value or type(x) is not type(value)]


def accepted(script: ModuleType, args: Any, name: str, value: Any) -> Any:
    """Return the arguments with this value, or None if the script or its command line rejects it."""
    kind = typing.get_type_hints(script.Args)[name]
    if typing.get_origin(kind) is Literal and value not in typing.get_args(kind):
        return None
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            changed = dataclasses.replace(args, **{name: value})
            script.check_args(changed)
    except (SystemExit, TypeError, ValueError):
        return None
    return changed


def outputs(script: ModuleType, args: Any) -> dict[str, Tensor]:
    """Return the results of the algorithm's functions on fixed inputs, by name: stale samples and a strange sampler."""
    draw = torch.Generator().manual_seed(5)
    names = ("logprobs_T", "old_T", "ref_T", "sampler_T")
    known = {}
    for name in names:
        known[name] = torch.randn(256, generator=draw, dtype=torch.float64) - 2
    known["advantages_T"] = torch.randn(256, generator=draw, dtype=torch.float64)
    known["entropy_T"] = torch.rand(256, generator=draw, dtype=torch.float64)
    known["response_T"] = torch.arange(256) // 4
    leaf = known["logprobs_T"].requires_grad_()
    found = {}
    for name, beta in (("the loss", 0.0), ("the loss with a KL", 0.3)):
        tokens = make_tokens(script, **known, full_kl_T=(leaf - known["ref_T"]).square())
        loss_T, _ = script.token_loss(tokens, beta, args)
        slope_T = None
        if loss_T.requires_grad:
            (slope_T,) = torch.autograd.grad(loss_T.sum(), leaf, allow_unused=True)
        found[name] = loss_T.detach()
        found[f"the gradient of {name}"] = torch.zeros(1) if slope_T is None else slope_T
    samples = [loss_table.response_of(size) for size in (3, 9, 1, 5)]
    found["the weights"] = script.loss_weights(samples, [0, 1, 3], args)
    if hasattr(script, "group_advantages"):
        rewards_PG = torch.rand(4, 5, generator=draw, dtype=torch.float64)
        kind, eps = args.advantage_normalization_type, args.advantage_eps
        found["the advantages"] = script.group_advantages(rewards_PG, kind, eps)
    if hasattr(script, "value_loss"):
        values = torch.randn(3, 64, generator=draw, dtype=torch.float64)
        found["the critic's loss"], _ = script.value_loss(*values, args.value_clip)
    return found


def alike(a: Tensor, b: Tensor) -> bool:
    """Return True for equal values up to rounding, NaN included."""
    if a.shape != b.shape:
        return False
    return torch.allclose(
        a.double(),
        b.double(),
        rtol=1e-6,
        atol=1e-9,
        equal_nan=True,
    )


def settings_of(args: Any) -> list[Any]:
    """Return the given flags, and two other settings in which more of the flags have an effect."""
    plain = with_flags(args, kl_estimator=args.kl_estimator.removesuffix("+"))
    constant = with_flags(args, kl_estimator="k3", loss_norm="constant")
    return [args, plain, constant]


def effects(script: ModuleType, args: Any, name: str) -> list[bool | None]:
    """Effect of a flag on the functions of the algorithm in three settings of the other flags.

    True: they return something else at one of ``other_values``. None: the script accepts no other value there.
    """
    found: list[bool | None] = []
    for base in settings_of(args):
        before = outputs(script, base)
        changes = None
        for value in other_values(script, name, getattr(base, name)):
            changed = accepted(script, base, name, value)
            if changed is not None and not changes:
                after = outputs(script, changed)
                changes = differ(before, after)
        found.append(changes)
    return found


def changes_functions(script: ModuleType, args: Any, name: str) -> bool:
    """Return True if a flag changes what the functions of the algorithm return."""
    return any(effects(script, args, name))


def own_flags(script: ModuleType) -> list[str]:
    """Return the names of the flags that a script adds to those of every run: the algorithm's."""
    inherited = {f.name for f in dataclasses.fields(script.Args.__mro__[1])}
    return [f.name for f in dataclasses.fields(script.Args) if f.name not in inherited]


def check(
    subject: Subject,
    laboratory: Laboratory,
    recorded: dict[str, Recorded],
    lanes: int,
) -> list[Finding]:
    """Check the flags that the script has added, and those that the unedited script has as well."""
    findings = []
    known = {f.name for f in dataclasses.fields(subject.base.Args)}
    text = Path(subject.script.__file__).read_text()
    added = [f.name for f in dataclasses.fields(subject.args) if f.name not in known]
    for name in added:
        if name.endswith("name_or_path"):
            continue
        if changes_functions(subject.script, subject.args, name):
            findings.append(Finding(6, f"--{name}", OK, "changes the loss, the advantages or the weights"))
            continue
        findings.append(try_flag(subject, laboratory, recorded, name, lanes, text))
    findings += check_known(subject, sorted(known))
    if not findings:
        findings.append(
            Finding(
                6,
                "flags",
                OK,
                f"the flags of {subject.base_name}, and each of the algorithm's does something",
            )
        )
    return findings


def check_known(subject: Subject, known: list[str]) -> list[Finding]:
    """Report flags of the algorithm that have no effect, or another effect than in the unedited script."""
    findings = []
    where = subject.first_place("token_loss", "importance_weights", "loss_weights", "group_advantages", "value_loss")
    pairs = list(zip(settings_of(subject.args), settings_of(subject.base_args), strict=True))
    plain = []
    for args, base_args in pairs:
        ours = outputs(subject.script, args)
        theirs = outputs(subject.base, base_args)
        plain.append((ours, theirs))
    base_flags = {f.name for f in dataclasses.fields(subject.base.Args)}
    switched = sorted((subject.flags_given or frozenset()) - base_flags)
    for name in own_flags(subject.script):
        if name in known and (text := other_meaning(subject, name, pairs, plain)):
            state = FAIL
            if switched and text.endswith(IDLE):  # another loss was chosen by a flag of the script's own
                state = NOTE
                text += f" with --{' --'.join(switched)}: if that is meant, reject the pair in check_args"
            findings.append(Finding(6, f"--{name}", state, text, where))
    return findings


def other_meaning(subject: Subject, name: str, pairs: list[tuple], plain: list[tuple]) -> str:
    """Text on a flag that does something else than in the unedited script, or nothing; else "".

    ``plain``: what the functions of both return in the settings ``pairs``. Only those that return the same there are
    compared at other values, so a script with another loss on purpose is not. The KL has its own table in part 1.
    """
    text, changes, lost = "", False, False
    for (args, base_args), (ours, theirs) in zip(pairs, plain, strict=True):
        same = [key for key in theirs if key in ours and alike(ours[key], theirs[key])]
        moved: list[bool | None] = [None, False]  # ours and theirs; None: the script accepts no other value here
        for value in other_values(subject.base, name, getattr(base_args, name)):
            changed = accepted(subject.base, base_args, name, value)
            after = None if changed is None else outputs(subject.base, changed)
            if after is None or not differ(after, theirs):
                continue
            moved[1] = True
            if (own := accepted(subject.script, args, name, value)) is None:
                continue
            found = outputs(subject.script, own)
            moved[0] = moved[0] or differ(found, ours)
            wrong = next((key for key in same if not alike(found[key], after[key])), None)
            if wrong and not text and not name.startswith("kl_"):
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                others = own_flags(subject.base)
                swapped = next((other for other in others if swaps(subject, name, other, value)), "")
                text = f"{shown} changes {wrong} in another way than in {subject.base_name}"
                text += f", but as --{swapped} does there" if swapped else ""
        changes |= moved[0] is True
        lost |= moved[0] is False
    if lost and not changes:
        return f"changes the loss of {subject.base_name}, {IDLE}"
    return text


def differ(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Return True if any output differs."""
    return not all(torch.equal(a[key], b[key]) for key in b)


def swaps(subject: Subject, name: str, other: str, value: Any) -> bool:
    """Return True if a flag of the script does what another one does in the unedited script."""
    if other == name or type(getattr(subject.base_args, other)) is not type(value):
        return False
    changed = (
        accepted(subject.script, subject.args, name, value),
        accepted(subject.base, subject.base_args, other, value),
    )
    if None in changed:
        return False
    ours, theirs = outputs(subject.script, changed[0]), outputs(subject.base, changed[1])
    return all(alike(ours[key], theirs[key]) for key in theirs)


def line_of(subject: Subject, name: str, text: str) -> str:
    """Return the place that declares a flag, "" where no line does."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith(f"{name}:"):
            return f"{subject.name}:{number}"
    return ""


def try_flag(
    subject: Subject,
    laboratory: Laboratory,
    recorded: dict[str, Recorded],
    name: str,
    lanes: int,
    text: str,
) -> Finding:
    """Compare runs with other values of an added flag with the run that leaves it unchanged."""
    line = line_of(subject, name, text)
    tried = []
    for plain, noise in (("rich", True), ("plain", False)):
        before = recorded.get(plain)
        if before is None or before.failure:
            continue
        for value in other_values(subject.script, name, getattr(subject.args, name))[:2]:
            if accepted(subject.script, subject.args, name, value) is None:
                continue
            probe = Probe(
                f"--{name} {value}",
                dict(before.probe.flags) | {name: value},
                noise=noise,
            )
            (after,) = laboratory.run([probe], lanes)
            if after.rejected:
                continue
            tried.append(str(value))
            metrics = check_learning.comparable(before) != check_learning.comparable(after)
            if metrics or after.failure or check_update.first_difference(before, after) is not None:
                return Finding(6, f"--{name}", OK, f"{value} changes the update or a metric of two steps")
    if not tried:
        return Finding(6, f"--{name}", NOTE, "no other value could be tried", line)
    said = f"does nothing: {', '.join(dict.fromkeys(tried))} change no loss, no gradient and no metric of two steps"
    if f"args.{name}" not in text:
        said += f"; the script never reads args.{name}"
    return Finding(6, f"--{name}", FAIL, said, line)

"""Part 2 of scripts/check.py, the runs: what must not change the gradient of ``main``."""

from __future__ import annotations

import contextlib
import io
import itertools
from dataclasses import dataclass
from typing import Any

import probe_run
import torch
from check_contract import (
    CLOSE,
    ORIGINS,
    Oracle,
    check_backward,
    check_contract,
    check_estimates,
    gradients_apart,
    relative,
)
from check_subject import FAIL, NOTE, OK, Finding, Subject
from probe_run import Probe, Recorded, Update
from torch import Tensor

from runtime.training import batching

# Fields of Tokens in the order in which a run computes them; the loss follows from all of them.
FIELDS = (
    "sampler_T",
    "old_T",
    "ref_T",
    "full_kl_T",
    "advantages_T",
    "weights_T",
    "logprobs_T",
    "entropy_T",
    "loss_T",
)
SMALLEST = 44  # tokens of a micro-batch that holds one sample of a probe
LAST = ("token_loss", ("main", "7"), "main")
# Several optimizer steps on a batch, a KL in both places, and a sampler whose log-probs are not the trainer's.
RICH = (
    {"num_mini_batches": 2},
    {"num_epochs": 2},
    {"beta": 0.1, "kl_estimator": "k3"},
    {"kl_placement": "both"},
    {"truncated_importance_sampling_ratio_cap": 2.0},
    {"gamma": 0.9, "gae_lambda": 0.8},
)


def rich_flags(subject: Subject) -> dict[str, Any]:
    """Those of RICH that the script accepts."""
    chosen: dict[str, Any] = {}
    for flags in RICH:
        changed = subject.with_flags(**chosen | flags)
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                subject.script.check_args(changed)
        except SystemExit:
            continue
        known = {name: value for name, value in flags.items() if hasattr(subject.args, name)}
        chosen |= known
    return chosen


def invariances(subject: Subject, rich: dict[str, Any]) -> dict[str, tuple[Probe, str]]:
    """Name -> (a run, the run whose gradient it must have)."""
    small = {"micro_batch_tokens": SMALLEST}
    args = subject.args
    found = {
        "micro-batch budget": (Probe("budget", small), "plain"),
        "layout shared": (Probe("shared", {"batch_layout": "shared"}), "plain"),
        "layout packed": (Probe("packed", {"batch_layout": "packed"}), "plain"),
        "number of ranks": (Probe("ranks", ranks=2), "plain"),
        "order of samples": (Probe("order", reverse=True), "plain"),
        "order of prompts": (Probe("prompts", {"seed": args.seed + 1}), "plain"),
        "budget, all options": (Probe("rich budget", rich | small, noise=True), "rich"),
        "ranks, all options": (Probe("rich ranks", rich, ranks=2, noise=True), "rich"),
    }
    before_norm = getattr(args, "kl_reward_norm", "") == "before_norm"  # a response's KL is in its group's statistics
    if args.mask_truncated_completions and not before_norm and not subject.is_ppo:  # which whitens over all responses
        found["truncated samples"] = (Probe("truncated", other_truncated=True), "plain")
    scales = getattr(args, "advantage_normalization_type", "") == "standard" and args.kl_coefficients[1] == 0
    if scales and args.max_reward_clip is None and args.non_stop_penalty == 0 and args.overlong_buffer == 0:
        found["rewards scaled, in main"] = (Probe("scaled", {"reward_scaling": 2 * args.reward_scaling}), "plain")
    updates = args.num_mini_batches * args.num_epochs
    if updates > 1:  # mini-batches hold other prompts then
        del found["order of prompts"]
    return found


def check(
    subject: Subject, laboratory: probe_run.Laboratory, model, lanes: int, complete: bool = True
) -> tuple[list[Finding], dict[str, Recorded]]:
    """All findings of the runs, and the runs by name; without ``complete`` no run that must equal another.

    ``model``: the tiny model of the runs in float64.
    """
    rich = rich_flags(subject)
    wanted = invariances(subject, rich) if complete else {}
    probes = [Probe("plain"), Probe("rich", rich, noise=True), Probe("observed", observed=True)]
    probes.append(Probe("equal", rich | {"reward_scaling": 0.0}, noise=True))
    probes += [probe for probe, _ in wanted.values()]
    recorded = dict(zip([probe.name for probe in probes], laboratory.run(probes, lanes), strict=True))
    findings = []
    titles = {"plain": "one optimizer step", "rich": "several, with a KL", "observed": "environment's tokens"}
    titles["equal"] = "equal rewards, with a KL"
    for name, title in titles.items():
        found = recorded[name]
        if found.failure or not any(found.updates):
            said = last_line(found.failure) or "no optimizer step was taken"
            text = f"not run: {said}" if found.rejected else f"the run ended early: {said}"
            state = NOTE if found.rejected else FAIL
            findings.append(Finding(2, title, state, text, subject.first_place(("main", "7"), "main", "token_loss")))
            continue
        oracle = Oracle(subject, found, laboratory.arguments(found.probe), model)
        findings += check_contract(subject, oracle, title)
        findings += check_estimates(subject, oracle, title)
        if name == "plain":
            findings += check_backward(subject, oracle)
            findings += check_rates(subject, found)
    if recorded["plain"].failure:
        return findings, recorded
    own_reference = any(f.name.endswith("ref_T") and f.state == NOTE for f in findings)
    for name, (probe, reference) in wanted.items():
        findings += compare(subject, name, recorded[reference], recorded[probe.name], own_reference)
    return findings, recorded


def check_rates(subject: Subject, found: Recorded) -> list[Finding]:
    """Compare the learning rate that is logged after each step with that of the optimizer, and the critic's with it."""
    place = subject.first_place(("main", "7"), "main")
    for step, (updates, line) in enumerate(zip(found.updates, found.metrics, strict=True)):
        logged = line.get("optim/lr")
        if updates and logged is not None and abs(updates[-1].rate - logged) > 1e-6 * abs(logged):
            text = f"the optimizer has {updates[-1].rate:g}, and {logged:g} is logged (step {step + 1})"
            return [Finding(2, "learning rate", FAIL, text, place)]
    for policy, critic in zip(found.updates, found.critic, strict=True):
        if policy and critic and policy[0].rate == critic[0].rate > 0:
            text = f"the critic's optimizer has the policy's, {critic[0].rate:g}"
            return [Finding(2, "learning rate", FAIL, text, place)]
    return []


def spans(found: Recorded, step: int) -> dict[tuple, slice]:
    """Return the place of each response's tokens in the flat arrays of a step, by its prompt and its ids."""
    samples = found.samples[step]
    places = {}
    for sample, (start, end) in zip(samples, itertools.pairwise(batching.token_offsets(samples)), strict=True):
        places[tuple(sample.prompt_ids), sample.finish_reason, sample.response_ids.tobytes()] = slice(start, end)
    return places


def aligned(values: Tensor, ours: dict[tuple, slice], theirs: dict[tuple, slice]) -> Tensor:
    """Values of the second run in the order of the first. Responses that only the first has are NaN."""
    total = max(place.stop for place in ours.values())
    found = torch.full((total,), torch.nan, dtype=values.dtype)
    for key, place in ours.items():
        if key in theirs:
            found[place] = values[theirs[key]]
    return found


@dataclass
class Difference:
    """The first thing that two runs do not have in common."""

    field: str
    text: str


def first_difference(a: Recorded, b: Recorded) -> Difference | None:
    """Compare tokens, losses and gradients of two runs, in the order in which they are computed."""
    for step in range(len(a.updates)):
        places = spans(a, step), spans(b, step)
        for k, (ours, theirs) in enumerate(zip(a.updates[step], b.updates[step], strict=False)):
            name = f"step {step + 1}, optimizer step {k + 1}"
            counted = ours.tokens["weights_T"] != 0
            for field in [*FIELDS, *(set(ours.tokens) - set(FIELDS) - {"response_T"})]:
                if field not in ours.tokens or field not in theirs.tokens:
                    continue
                other = aligned(theirs.tokens[field], *places)
                apart = relative(torch.where(counted, ours.tokens[field], torch.nan), other)
                if apart > CLOSE:
                    return Difference(field, f"{field} differs by {apart:.2g} of the largest ({name})")
            if found := gradient_difference(ours, theirs, f"the policy's gradient ({name})"):
                return found
        for k, (ours, theirs) in enumerate(zip(a.critic[step], b.critic[step], strict=False)):
            name = f"step {step + 1}, optimizer step {k + 1}"
            if found := gradient_difference(ours, theirs, f"the critic's gradient ({name})"):
                return found
        if len(a.updates[step]) != len(b.updates[step]):
            return Difference("", f"{len(a.updates[step])} optimizer steps against {len(b.updates[step])}")
    return None


def gradient_difference(ours: Update, theirs: Update, name: str) -> Difference | None:
    """Compare the gradients of an optimizer step."""
    apart = gradients_apart(ours.gradient, theirs.gradient)
    if apart <= CLOSE:
        return None
    sizes = [sum(g.square().sum().item() for g in own.gradient.values()) ** 0.5 for own in (ours, theirs)]
    ratio = f", its norm is {sizes[1] / sizes[0]:.3g} times as large" if sizes[0] > 0 else ""
    return Difference("gradient", f"{name} differs by {apart:.2g}{ratio}")


def compare(subject: Subject, name: str, ours: Recorded, theirs: Recorded, own_reference: bool) -> list[Finding]:
    """Compare a run with another one that must have the same gradient.

    ``own_reference``: the script's reference log-probs are of its own kind, and may depend on the order of samples.
    """
    if ours.failure:
        return []
    if theirs.failure:
        text = f"the run ended early: {last_line(theirs.failure)}"
        return [Finding(2, name, NOTE if theirs.rejected else FAIL, text, subject.first_place(("main", "7"), "main"))]
    difference = first_difference(ours, theirs)
    if difference is None:
        return [Finding(2, name, OK, "equal: every token's loss and the gradient of every optimizer step")]
    where = subject.first_place(*ORIGINS.get(difference.field, ()), *LAST)
    is_own = own_reference and difference.field == "ref_T" and name.startswith("order")
    return [Finding(2, name, NOTE if is_own else FAIL, difference.text, where)]


def last_line(text: str) -> str:
    """Return the last line of a run's output."""
    return text.strip().splitlines()[-1] if text.strip() else ""

"""Check a policy loss or an advantage estimator that was written for another framework: scripts/check.py --loss.

The loss is called by its adapter (studies/framework_losses.py), and shown to the parts of the check as the token_loss
of a script (LossView in studies/check_subject.py), before it is divided by counts of the batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import check_loss
import check_numbers
import numpy as np
import torch
from check_functions import apart, check_advantages
from check_subject import (
    CONSTANT,
    FAIL,
    NOTE,
    OK,
    RESPONSE,
    ROWS,
    SAME,
    SEQUENCE,
    SIZES,
    SUM,
    TOKEN,
    Finding,
    LossSubject,
    Report,
    Subject,
    judge,
)
from enumeration import CONDITIONS, F64
from framework_losses import ADAPTERS, SKYRL, Load, Loss
from frameworks import Framework, fit, scalar_of
from torch import Tensor

import grpo
import kl_estimators
from runtime.system import process, user_files

MEANING = {
    SUM: "sum of all tokens",
    SEQUENCE: "mean over responses of the mean of their tokens, so it ascends E[A / length]",
    TOKEN: "mean over all tokens",
    RESPONSE: "mean over responses of the sum of their tokens",
    CONSTANT: "sum of the tokens divided by responses times the columns of the padded batch",
    "": "tokens of fresh samples have unequal weights that are no mean",
}


def check_batch(subject: LossSubject) -> list[Finding]:
    """Check what must not change the gradient: the cut into micro-batches and ranks, and tokens that the mask hides."""
    view = subject.script
    draw = torch.Generator().manual_seed(1)
    start_T = -0.2 - 2 * torch.rand(sum(SIZES), generator=draw, dtype=F64)
    values = list(start_T + 0.1 * torch.randn(4, sum(SIZES), generator=draw, dtype=F64))
    of_response = torch.tensor([1.0, -0.5, -1.0, 0.7, 0.3, -0.2], dtype=F64)
    step = view.step(SIZES, [*values, of_response.repeat_interleave(torch.tensor(SIZES))])
    whole = view.gradient(step)
    mask = step.mask.clone()
    mask[1, 1] = mask[5, 2:] = 0  # tokens of an environment, and the end of a response
    mask[2] = 0  # a response that is left out

    def with_hidden(names: Sequence[str], value: float) -> Tensor:
        rows = {name: getattr(step, name).masked_fill(mask == 0, value) for name in names}
        return view.gradient(step._replace(mask=mask, step_mask=mask, **rows))

    plain = with_hidden((), 0.0)
    cut = ((0, 2, 4), (1, 3, 5))  # the first three responses have fewer tokens
    cases = {
        "micro-batches": (view.gradient(step, cut), whole),
        "ranks": (view.gradient(step, cut, ranks=2), whole),
        "masked tokens": (with_hidden(ROWS[:4], -9.0) * mask, plain * mask),
        "NaN behind the mask": (with_hidden(("old", "sampler"), torch.nan) * mask, plain * mask),
        "their gradient": (plain * mask, plain),
    }
    findings = []
    for name, (found, wanted) in cases.items():
        difference = apart(found, wanted)
        text = f"the gradient depends on it: it differs by {difference:.2g}"
        state = NOTE if name.startswith("NaN") else FAIL  # few losses bear it
        findings.append(judge(2, name, difference < SAME, "the gradient is equal", text, subject.name, state))
    if subject.adapter.weights:
        used = apart(view.gradient(step._replace(weights=2 * step.weights)), whole) > SAME
        findings.append(judge(2, "weights", used, "the gradient uses them", "they have no effect", subject.name, NOTE))
    return findings


def check_mean(subject: LossSubject) -> list[Finding]:
    """Say what the loss divides by."""
    view = subject.script
    factor = "" if abs(view.factor - 1) < SAME else f", times {view.factor:.4g}"
    text = MEANING[view.mean] + factor
    return [judge(2, "aggregation", view.mean not in (SEQUENCE, ""), text, text, subject.name, NOTE)]


def check_kl(subject: LossSubject) -> list[Finding]:
    """Compare the expected gradient of each KL in the loss with that of the estimator of its name in grpo.py."""
    findings = []
    for name in subject.adapter.estimators:
        known = kl_estimators.canonical_name(name)
        right = []
        texts = []
        for condition in ("fresh", "stale"):
            both = ((subject.script, name), (grpo, known))
            ours, theirs = [kl_estimators.table_row(script, "loss", kl, condition).cosine for script, kl in both]
            right.append(min(abs(ours - theirs), abs(1 - ours)) < SAME)
            texts.append(f"{condition}: cosine {ours:+.3f} with grad KL(pi||ref), {known} of grpo.py {theirs:+.3f}")
        text = "; ".join(texts)
        findings.append(judge(1, f"KL {name}", all(right), text, text, subject.name, NOTE if right[0] else FAIL))
    return findings


def check_edges(subject: LossSubject) -> list[Finding]:
    """Check extreme numbers; a ratio that overflows is a note, as most losses have it."""
    findings = check_numbers.check_edges(subject)
    return [replace(f, state=NOTE) if f.state == FAIL and f.name != "NaN rewards" else f for f in findings]


Advantages = Callable[[Tensor], Tensor]  # of the rewards of groups, [P, G]
CLAIMS = {"grpo": "standard", "rloo": "leave_one_out"}  # what the name of an estimator says
OF_LOSSES = {1: (check_loss.check_ascent, check_kl), 2: (check_mean, check_batch), 3: (check_edges,)}
OF_ADVANTAGES = {
    1: (check_loss.check_groups,),
    2: (check_advantages,),
    3: (check_numbers.check_group_edges,),
}


class AdvantageSubject(Subject):
    """An advantage estimator of a framework, in the place of grpo.py's, next to that of grpo.py with its kind."""

    def __init__(self, title: str, advantages: Advantages):
        advantages(torch.eye(2))  # raises an error if it needs more than rewards
        script = SimpleNamespace(**vars(grpo) | {"__file__": title})
        script.group_advantages = lambda rewards_PG, kind, eps=0.0: advantages(rewards_PG)
        kind = next((kind for word, kind in CLAIMS.items() if word in title), "unknown")
        args = grpo.Args(loss_norm="constant", advantage_normalization_type=kind)
        super().__init__(script, args, grpo, args, frozenset())
        self.tolerance = float("inf") if kind == "unknown" else 1e-3  # of advantages of equal rewards

    def place(self, *_: str) -> str:
        return self.name


def of_groups(function: Callable, rewards_PG: Tensor) -> Tensor:
    """Call an advantage estimator in the form of verl and SkyRL, on responses of one token and a critic that says 0."""
    rewards = rewards_PG.reshape(-1, 1).clone()
    known = {"token_level_rewards": rewards, "values": torch.zeros_like(rewards)}
    prompts, group = rewards_PG.shape
    known["index"] = np.arange(prompts).repeat(group)
    known |= dict.fromkeys(("response_mask", "eos_mask"), torch.ones_like(rewards))
    known |= dict.fromkeys(("gamma", "lam", "lambd"), 1.0)
    known["config"] = SimpleNamespace(gamma=1.0, lam=1.0, get=lambda name, default=None: default)
    return scalar_of(fit(function, **known)).view_as(rewards_PG)


def verl_advantages(load: Load) -> dict[str, Advantages]:
    """Estimators of ``register_adv_est``."""
    registered = load("verl.trainer.ppo.core_algos").ADV_ESTIMATOR_REGISTRY
    return {name: partial(of_groups, function) for name, function in registered.items()}


def skyrl_advantages(load: Load) -> dict[str, Advantages]:
    """Estimators of AdvantageEstimatorRegistry."""
    registry = load(SKYRL).AdvantageEstimatorRegistry
    return {name: partial(of_groups, registry.get(name)) for name in registry.list_available()}


ADVANTAGES = {"verl": verl_advantages, "skyrl": skyrl_advantages}


def print_table(framework: str, losses: dict[str, Loss]) -> int:
    """Print for every loss of a framework: bias, cosine and noise in each condition, mean, nearest loss, seconds."""
    print(f"| {framework} | {' | '.join(CONDITIONS)} | mean | nearest loss | s |\n{'|---' * (len(CONDITIONS) + 4)}|")
    for name, loss in losses.items():
        began = time.monotonic()
        try:
            subject = LossSubject(name, loss, ADAPTERS[framework])
            findings = check_loss.check_ascent(subject)
        except Exception as error:
            print(f"| {name} | not called: {type(error).__name__}: {str(error).splitlines()[0]} |")
            continue
        rows = [f.numbers["mine"] for f in findings if "mine" in f.numbers]
        cells = ["{bias:.2f} {cosine:+.2f} {noise:.1f}".format(**row) for row in rows]
        cells.append(subject.script.mean or "none")
        cells += [f"{'=' if f.state == OK else '~'} {f.numbers['nearest']}" for f in findings if "nearest" in f.numbers]
        print(f"| {name} | {' | '.join(cells)} | {time.monotonic() - began:.1f} |", flush=True)
    return 0


def print_report(options: argparse.Namespace, subject: Subject, parts: dict) -> int:
    """Print the report on a loss or on advantages; the exit code."""
    began = time.monotonic()
    report = Report(subject, options.brief)
    print(f"{subject.script.__file__} compared with {subject.base_name}", flush=True)
    for part in [part for part in parts if part in options.parts]:
        for check in parts[part]:
            report.run(part, partial(check, subject))
        report.print_part(part)
    return report.finish(time.monotonic() - began, options.json)


def find(options: argparse.Namespace, asked: str, framework: str) -> dict[str, Callable]:
    """Return losses or estimators of a framework by name, or one of them. Exits with code 2 where it is absent."""
    place, _, name = asked.partition(":")
    adapter = ADAPTERS[framework]
    load = Framework([options.source / folder for folder in adapter.folders if options.source], adapter.asked).load
    try:
        found = adapter.losses(load, None) if options.loss else ADVANTAGES.get(framework, lambda load: {})(load)
        if place.endswith(".py"):  # it may import the framework, which is loaded now
            return adapter.losses(load, user_files.find(asked))
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        process.refuse(f"{asked}: {error}; pass file.py:function, and --source DIR, a clone or a wheel of {framework}")
    if name not in found and (name or not found):
        known = ", ".join(found) or "none that can be called here"
        process.refuse(f"{asked}: not found; {framework} has {known}")
    return {name: found[name]} if name else found


def main(options: argparse.Namespace, words: list[str]) -> int:
    """Print the report on a loss or an advantage estimator, or the table of a framework's losses; the exit code."""
    torch.set_num_threads(1)
    asked = options.loss or options.advantages
    place = asked.partition(":")[0]
    framework = (options.like or "plain") if place.endswith(".py") else place
    if words or framework not in ADAPTERS:
        known = ", ".join(ADAPTERS)
        process.refuse(f"{' '.join(words) or framework}: no flag of this command, or no framework; known are {known}")
    found = find(options, asked, framework)
    if asked == framework and options.loss:
        return print_table(framework, found)
    codes = []
    for name, call in found.items():
        title = asked if ":" in asked else f"{asked}:{name}"
        try:
            subject = LossSubject(title, call, ADAPTERS[framework]) if options.loss else AdvantageSubject(title, call)
        except Exception as error:
            print(f"{title} could not be called as {framework} does: {type(error).__name__}: {error}\n")
            continue
        codes.append(print_report(options, subject, OF_LOSSES if options.loss else OF_ADVANTAGES))
    return max(codes, default=2)

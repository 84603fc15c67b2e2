"""Check a policy loss that was written for another framework: scripts/check.py --loss.

The loss is called by its adapter (studies/framework_losses.py) and shown to the parts of the check as the token_loss of
a script. A loss of a framework is a scalar of a batch, so the weights that its mean gives to tokens are found first, on
fresh samples with an advantage of 1, and counts of the batch are taken out again.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import check_functions
import check_loss
import check_numbers
import framework_losses
import frameworks
import torch
from check_subject import FAIL, NOTE, OK, Finding, Report, Subject, judge
from enumeration import CONDITIONS, F64, World, policies_of, summarize
from framework_losses import ADAPTERS, Adapter, Loss, Micro
from torch import Tensor

import grpo
import kl_estimators
from runtime.system import process, user_files

SAME = 1e-6  # relative difference below which two gradients are one
SIZES = (1, 4, 2, 3, 2, 4)  # tokens of the responses of a small batch: its counts differ from one another
TOKEN, SEQUENCE, RESPONSE, CONSTANT, SUM = "token", "sequence", "response sum", "constant", "sum"
MEANING = {
    TOKEN: "mean over all tokens",
    SEQUENCE: "mean over responses of the mean of their tokens, so it ascends E[A / length]: a short right response "
    "counts more than a long one, and a long wrong one less",
    RESPONSE: "mean over responses of the sum of their tokens",
    CONSTANT: "sum of the tokens divided by responses times the columns of the padded batch",
    SUM: "sum of all tokens",
    "": "tokens of fresh samples have unequal weights that are no mean",
}


def pad(values_T: Tensor, sizes: Sequence[int], columns: int) -> Tensor:
    """Return rows [B, columns] of the tokens of responses of these sizes, with zeros behind them."""
    rows = [
        torch.nn.functional.pad(row, (0, columns - len(row)))
        for row in values_T.split(
            list(sizes),
        )
    ]
    return torch.stack(rows)


class LossView:
    """A framework's loss with the token_loss of a script."""

    fields = ("logprobs_T", "old_T", "ref_T", "sampler_T", "advantages_T", "response_T")
    Tokens = dataclasses.make_dataclass("Tokens", fields)
    Args = SimpleNamespace

    def __init__(self, name: str, loss: Loss):
        self.__file__ = name
        self.loss = loss
        self.apart = False  # each response in a batch of its own, whose loss counts besides its gradient
        self.mean, self.factor = self.find_mean()

    def find_mean(self) -> tuple[str, float]:
        """Return what the loss divides by, and a further factor: of the gradient for advantages and ratios of 1."""
        weights_BT, mask_BT = self.small_step()
        weights_T = weights_BT[mask_BT > 0]
        lengths_T = mask_BT.sum(1, keepdim=True).expand_as(mask_BT)[mask_BT > 0]
        used = weights_T != 0
        responses, columns = mask_BT.shape
        shares = {
            TOKEN: weights_T * mask_BT.sum(),
            RESPONSE: weights_T * responses,
            CONSTANT: weights_T * responses * columns,
            SUM: weights_T,
            SEQUENCE: weights_T * responses * lengths_T,
        }
        for name, share in shares.items():
            if used.any() and (share[used] - 1).abs().max() < SAME:
                return name, 1.0
        for name in (SUM, SEQUENCE):
            share = shares[name][used]
            if used.any() and (share - share[0]).abs().max() < SAME * share.abs().max():
                return name, share[0].abs().item()
        return "", weights_T[used].abs().mean().item() if used.any() else 1.0

    def small_step(self) -> tuple[Tensor, Tensor]:
        """Return minus the gradient of a step on fresh samples, [B, T], for advantages of 1, and the mask."""
        old_T = torch.linspace(-3, -0.1, sum(SIZES), dtype=F64)
        known = dict.fromkeys(("logprobs_T", "old_T", "ref_T", "sampler_T"), old_T)
        step = self.step(SIZES, known | {"advantages_T": torch.ones_like(old_T)})
        return -self.gradient(step, [range(len(SIZES))]), step.mask

    def step(
        self,
        sizes: Sequence[int],
        known: dict[str, Tensor],
        columns: int = 0,
        **more,
    ) -> Micro:
        """Return all rows of a step."""
        columns = columns or max(sizes)
        rows = {
            name.removesuffix(
                "_T",
            ): pad(known[name], sizes, columns)
            for name in self.fields[:5]
        }
        ones = torch.ones_like(known["old_T"])
        mask = pad(ones, sizes, columns)
        micro = Micro(
            **rows,
            mask=mask,
            weights=mask.clone(),
            rows=torch.arange(len(sizes)),
            step_mask=mask,
        )
        return micro._replace(**more)

    def gradient(
        self,
        step: Micro,
        cuts: Sequence[Sequence[int]],
        ranks: int = 1,
    ) -> Tensor:
        """Return the gradient of a step, [R, T], that is cut into these rows, which are dealt to ranks."""
        leaf = step.logprobs.detach().clone().requires_grad_()
        total = 0.0
        for rows in cuts:
            own = torch.tensor(list(rows))
            parts = {name: getattr(step, name)[own] for name in Micro._fields[:7]}
            parts |= {"logprobs": leaf[own], "rows": own}
            total = (
                total
                + self.loss(
                    step._replace(**parts, micro_batches=len(cuts) // ranks, ranks=ranks),
                )
                / ranks
            )
        return torch.autograd.grad(total, leaf, allow_unused=True, materialize_grads=True)[0]

    def counts(self, sizes: Tensor) -> float:
        """Return what undoes the division by counts of the batch."""
        divisors = {
            TOKEN: int(sizes.sum()),
            SUM: 1,
            "": 1,
            CONSTANT: len(sizes) * int(sizes.max()),
        }
        return divisors.get(self.mean, len(sizes)) / self.factor

    def token_loss(self, tokens, beta: float, args) -> tuple[Tensor, dict]:
        """Return a loss per token, [T], with the gradient of the framework's loss, before it is divided by counts."""
        sizes = tokens.response_T.unique_consecutive(return_counts=True)[1]
        known = {name: getattr(tokens, name) for name in self.fields[:5]}
        more = {"beta": beta, "estimator": args.kl_estimator} if beta else {}
        value_T = torch.zeros_like(known["old_T"])
        if self.apart:
            slopes_T = torch.zeros_like(value_T)
            for t in range(len(value_T)):
                one = self.step(
                    (1,),
                    {name: value[t : t + 1] for name, value in known.items()},
                    **more,
                )
                value_T[t] = self.loss(one).detach()
                slopes_T[t] = self.gradient(one, [[0]])[0, 0]
        else:
            step = self.step(sizes.tolist(), known, **more)
            slopes_T = self.gradient(
                step,
                [range(len(sizes))],
            )[step.mask > 0] * self.counts(
                sizes,
            )
        moved_T = known["logprobs_T"] - known["logprobs_T"].detach()
        return value_T + slopes_T.to(moved_T.dtype) * moved_T, {}


class LossSubject(Subject):
    """A framework's loss, next to that of grpo.py."""

    @property
    def base_name(self) -> str:
        return check_loss.CLIP

    def place(self, function: str, phase: str = "") -> str:
        return self.where

    def named(self, losses: dict) -> dict:
        """Add to named losses those that divide by the response's length, where this one does."""
        _, *others = losses  # the first is that of grpo.py
        losses = {"PPO clip": losses["PPO clip"]} | {name: losses[name] for name in others}
        if self.script.mean != SEQUENCE:
            return losses

        def shorter(loss: check_loss.Loss, b) -> Tensor:
            return loss(b) / b.lengths[b.owner]

        return losses | {f"{name} / length": partial(shorter, loss) for name, loss in losses.items()}


def subject_of(name: str, loss: Loss, adapter: Adapter, where: str = "") -> LossSubject:
    """Return the subject of a loss."""
    base = SimpleNamespace(Tokens=grpo.Tokens, token_loss=grpo.token_loss, __file__=grpo.__file__)
    subject = LossSubject(
        LossView(name, loss),
        grpo.Args(),
        base,
        grpo.Args(),
        frozenset(),
    )
    subject.where = where
    subject.takes_old = adapter.old
    subject.adapter = adapter
    return subject


def random_step(view: LossView, columns: int = 0) -> Micro:
    """Return a step of samples that are neither fresh nor equal."""
    draw = torch.Generator().manual_seed(1)
    known = {}
    start = -0.2 - 2 * torch.rand(sum(SIZES), generator=draw, dtype=F64)
    for name in ("logprobs_T", "old_T", "ref_T", "sampler_T"):
        known[name] = start + 0.1 * torch.randn(sum(SIZES), generator=draw, dtype=F64)
    of_response = torch.tensor([1.0, -0.5, -1.0, 0.7, 0.3, -0.2], dtype=F64)
    known["advantages_T"] = of_response.repeat_interleave(torch.tensor(SIZES))
    return view.step(SIZES, known, columns)


def check_batch(subject: LossSubject) -> list[Finding]:
    """Check what must not change the gradient: the cut, ranks, order, padding, and tokens that the mask leaves out."""
    view = subject.script
    everything = [range(len(SIZES))]
    step = random_step(view)
    whole = view.gradient(step, everything)
    short = (0, 2, 4)  # these have fewer tokens than the others
    long = (1, 3, 5)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    turned = step._replace(
        **{name: getattr(step, name)[order] for name in Micro._fields[:7]},
    )
    turned = turned._replace(step_mask=turned.mask)
    columns = step.mask.shape[1]
    wide = random_step(view, columns + 3)
    cases = {
        "micro-batches": (view.gradient(step, [short, long]), whole),
        "ranks": (view.gradient(step, [short, long], ranks=2), whole),
        "order of responses": (view.gradient(turned, everything), whole[order]),
        "padding": (view.gradient(wide, everything)[:, :columns], whole),
    }
    mask = step.mask.clone()
    mask[1, 1] = mask[5, 2:] = 0  # tokens of an environment, and the end of a response
    mask[2] = 0  # a response that is left out
    left_out = step._replace(mask=mask, step_mask=mask, weights=mask)
    first = view.gradient(left_out, everything)
    changed = {name: torch.where(mask > 0, getattr(step, name), -9.0) for name in Micro._fields[:4]}
    changed["logprobs"] = torch.where(mask > 0, step.logprobs, -3.0)
    second = view.gradient(left_out._replace(**changed), everything)
    cases["masked tokens"] = (second * mask, first * mask)
    absent = {name: torch.where(mask > 0, getattr(step, name), torch.nan) for name in Micro._fields[1:3]}
    cases["NaN behind the mask"] = (view.gradient(left_out._replace(**absent), everything) * mask, first * mask)
    cases["their gradient"] = (first * mask, first)
    findings = []
    for name, (found, wanted) in cases.items():
        apart = check_functions.apart(found, wanted)
        text = f"the gradient depends on it: it differs by {apart:.2g}"
        state = NOTE if name.startswith("NaN") else FAIL  # few losses bear it
        findings.append(judge(2, name, apart < SAME, "the gradient is equal", text, subject.where, state))
    if subject.adapter.weights:
        double = view.gradient(step._replace(weights=2 * step.weights), everything)
        used = check_functions.apart(double, whole) > SAME
        findings.append(judge(2, "weights", used, "the gradient uses them", "they have no effect", subject.where, NOTE))
    return findings


def check_mean(subject: LossSubject) -> Finding:
    """Say what the loss divides by."""
    view = subject.script
    factor = "" if abs(view.factor - 1) < SAME else f", times {view.factor:.4g}"
    state = OK if view.mean in (TOKEN, RESPONSE, CONSTANT, SUM) else NOTE
    return Finding(2, "aggregation", state, MEANING[view.mean] + factor, subject.where if state != OK else "")


def check_kl(subject: LossSubject) -> list[Finding]:
    """Compare the expected gradient of each KL in the loss with that of the estimator of its name in grpo.py."""
    findings = []
    for name in subject.adapter.estimators:
        known = kl_estimators.canonical_name(name)
        rows = {}
        try:
            for condition in ("fresh", "stale"):
                ours = kl_estimators.table_row(subject.script, "loss", name, condition)
                rows[condition] = (ours, kl_estimators.table_row(grpo, "loss", known, condition))
        except Exception as error:
            text = f"could not be called: {type(error).__name__}: {error}"
            findings.append(Finding(1, f"KL {name}", NOTE, text))
            continue
        right = {condition: is_right(*pair) for condition, pair in rows.items()}
        meanings = []
        for condition, (ours, theirs) in rows.items():
            exact = ours.cosine > 1 - SAME
            meaning = kl_estimators.REVERSE if exact else (theirs if right[condition] else ours).meaning()
            meanings.append(f"{condition}: descends {meaning}")
            if not right[condition]:
                meanings[-1] += f", {known} of grpo.py {theirs.meaning()}"
        state = OK if all(right.values()) else NOTE if right["fresh"] else FAIL
        findings.append(Finding(1, f"KL {name}", state, "; ".join(meanings), subject.where if state != OK else ""))
    return findings


def is_right(ours: kl_estimators.TableRow, theirs: kl_estimators.TableRow) -> bool:
    """Return True for the direction of grad KL(pi||ref), or that which the name has in grpo.py.

    A mean with an eps below it has no exact size, and so its gradient has no name.
    """
    same = abs(ours.cosine - theirs.cosine) < SAME and ours.label in (theirs.label, kl_estimators.NONE)
    return same or ours.cosine > 1 - SAME


def check_edges(subject: LossSubject) -> list[Finding]:
    """Check extreme numbers one response at a time; a ratio that overflows is a note, as most losses have it."""
    subject.script.apart = True
    findings = check_numbers.check_edges(subject)
    subject.script.apart = False
    return [dataclasses.replace(f, state=NOTE) if f.state == FAIL and f.name != "NaN rewards" else f for f in findings]


PARTS: dict[int, tuple[Callable, ...]] = {
    1: (check_loss.check_ascent, check_kl),
    2: (lambda subject: [check_mean(subject)], check_batch),
    3: (check_edges,),
}


def loader_of(framework: str, source: Path | None) -> Callable:
    """Return what loads a framework's modules, from a folder of its source or as they are installed."""
    adapter = ADAPTERS[framework]
    folders = tuple(source / name for name in adapter.folders if (source / name).is_dir()) if source else ()
    return partial(frameworks.load, folders=folders, asked=adapter.asked, hidden=adapter.hidden)


def losses_of(
    framework: str, source: Path | None, own: Callable | None = None
) -> dict[
    str,
    Loss,
]:
    """Return the losses of a framework, or the user's own as the framework calls it."""
    return ADAPTERS[framework].losses(loader_of(framework, source), own)


def table_line(name: str, loss: Loss, adapter: Adapter) -> str:
    """Return the row of a loss: bias and cosine in each condition, noise, mean, nearest loss and seconds."""
    began = time.monotonic()
    subject = subject_of(name, loss, adapter)
    world = World(max_length=4)
    policies = {condition: policies_of(world, condition) for condition in CONDITIONS}
    function = check_loss.loss_table.loss_of(subject.script, subject.args)
    found = check_loss.expected_updates(function, world, policies)
    cells = []
    for condition, own in found.items():
        row = summarize(own.updates, own.drawn, world, policies[condition], 1, own.zero)
        cells.append(f"{row.bias:.2f} {row.cosine:+.2f} {row.noise:.1f}")
    losses = subject.named(check_loss.named_losses(subject))
    known = {key: check_loss.expected_updates(one, world, policies) for key, one in losses.items()}
    nearest, apart, _ = check_loss.nearest(found, known)
    sign = "=" if apart < SAME else "~"
    seconds = time.monotonic() - began
    return f"| {name} | {' | '.join(cells)} | {subject.script.mean or 'none'} | {sign} {nearest} | {seconds:.1f} |"


def own_function(place: str) -> Callable:
    """Return the function, or the method of a class, of "file.py:name". Exits with code 2 where there is none."""
    path, _, name = place.partition(":")
    try:
        return attrgetter(name)(user_files.load(path))
    except (OSError, AttributeError, ImportError) as error:
        process.refuse(f"{place}: {error}; pass file.py:function")


def framework_of(options: argparse.Namespace, known: dict) -> str:
    """Return the framework that is asked for. Exits with code 2 if it has no adapter."""
    place = (options.loss or options.advantages).partition(":")[0]
    framework = (options.like or "plain") if place.endswith(".py") else place
    if framework not in known:
        process.refuse(f"{framework} is not a framework with an adapter; known are {', '.join(known)}")
    return framework


def found_in(framework: str, name: str, find: Callable[[], dict]) -> dict:
    """Return what is found in a framework, of one name or all. Exits with code 2 where it or the name is absent."""
    try:
        found = find()
    except ImportError as error:
        process.refuse(f"{framework} cannot be imported ({error}); pass --source DIR, a clone or an unpacked wheel")
    if name and name not in found:
        process.refuse(f"{framework} has no {name}; it has {', '.join(found) or 'none that can be called here'}")
    return {name: found[name]} if name else found


def print_table(framework: str, adapter: Adapter, losses: dict[str, Loss]) -> int:
    """Print a row for every loss of a framework, and the reason where one could not be called."""
    print(f"{framework}: in each condition the bias, the cosine and the noise of the expected update\n")
    print(f"| loss | {' | '.join(CONDITIONS)} | mean | nearest | s |")
    print("|---" * (len(CONDITIONS) + 4) + "|")
    for name, loss in losses.items():
        try:
            print(table_line(name, loss, adapter), flush=True)
        except Exception as error:
            print(f"| {name} | not called: {type(error).__name__}: {str(error).splitlines()[0]} |", flush=True)
    if not losses:
        print("none is called here: its losses run on a server; pass --loss file.py:function --like", framework)
    return 0


def check_one(options: argparse.Namespace, title: str, subject: Subject, parts: dict) -> int:
    """Print the report on a loss or on advantages; the exit code."""
    began = time.monotonic()
    report = Report(subject, options.brief)
    print(f"{title}, compared with {subject.base_name}", flush=True)
    for part in [part for part in parts if part in options.parts]:
        for check in parts[part]:
            report.run(part, partial(check, subject), subject.place(""))
        report.print_part(part)
    return report.finish(time.monotonic() - began, options.json)


def check_losses(options: argparse.Namespace) -> int:
    """Check one loss, or print the table of a framework's."""
    framework = framework_of(options, ADAPTERS)
    adapter = ADAPTERS[framework]
    place, _, name = options.loss.partition(":")
    losses = found_in(framework, "", lambda: losses_of(framework, options.source))
    own = None
    if place.endswith(".py"):  # it may import the framework, which is loaded now
        own = own_function(options.loss)
        losses = losses_of(framework, options.source, own)
    elif not name:
        return print_table(framework, adapter, losses)
    else:
        losses = found_in(framework, name, lambda: losses)
    (loss,) = losses.values()
    where = f"{options.loss} line {own.__code__.co_firstlineno}" if own else options.loss
    title = f"{Path(options.loss).name} as {framework} calls it" if own else options.loss
    try:
        subject = subject_of(title, loss, adapter, where)
    except Exception as error:
        process.refuse(f"--loss {options.loss}: {type(error).__name__}: {error}, called as by {framework}")
    return check_one(options, title, subject, PARTS)


CLAIMS = {"grpo": "standard", "rloo": "leave_one_out"}  # what the name of an estimator says
OF_ADVANTAGES = {
    1: (check_loss.check_groups,),
    2: (check_functions.check_advantages,),
    3: (check_numbers.check_group_edges,),
}


def subject_of_advantages(title: str, name: str, advantages: Callable[[Tensor], Tensor]) -> Subject:
    """Return the subject of an advantage estimator, in the place of grpo.py's."""
    names = ("Tokens", "token_loss", "loss_weights")
    script = SimpleNamespace(__file__=title, **{key: getattr(grpo, key) for key in names})
    script.group_advantages = lambda rewards_PG, kind, eps=0.0: advantages(rewards_PG)
    kind = next((kind for word, kind in CLAIMS.items() if word in name), "")
    rewards_PG = torch.randint(0, 5, (6, 8), generator=torch.Generator().manual_seed(0)).double() / 4
    for other in check_functions.KINDS:
        if check_functions.apart(advantages(rewards_PG), grpo.group_advantages(rewards_PG, other, 1e-6)) < SAME:
            kind = other
    args = grpo.Args(loss_norm="constant", advantage_normalization_type=kind or "centered")
    subject = AdvantageSubject(script, args, grpo, args, frozenset())
    if not kind:  # it may compare responses with those of other groups
        subject.args = dataclasses.replace(args, advantage_normalization_type="unknown")
        subject.tolerance = float("inf")
    return subject


class AdvantageSubject(Subject):
    """An advantage estimator of a framework, next to that of grpo.py with its kind."""

    tolerance = 1e-3

    def place(self, function: str, phase: str = "") -> str:
        return self.name


def check_all_advantages(options: argparse.Namespace) -> int:
    """Check the advantage estimator, or all of a framework."""
    place, _, name = options.advantages.partition(":")
    if place.endswith(".py"):
        own = own_function(options.advantages)
        call = own if options.like is None else partial(framework_losses.of_groups, own)
        return check_one(options, options.advantages, subject_of_advantages(place, name, call), OF_ADVANTAGES)
    framework = framework_of(options, framework_losses.ADVANTAGES)
    load = loader_of(framework, options.source)
    found = found_in(framework, name, lambda: framework_losses.ADVANTAGES[framework](load))
    codes = []
    for key, advantages in found.items():
        try:
            subject = subject_of_advantages(f"{framework}:{key}", key, advantages)
        except Exception as error:
            print(f"{framework}:{key} not called: {type(error).__name__}: {str(error).splitlines()[0]}\n")
            continue
        codes.append(check_one(options, f"{framework}:{key}", subject, OF_ADVANTAGES))
    return max(codes, default=0)


def main(options: argparse.Namespace) -> int:
    """Print the report on a loss or an advantage estimator, or the table of a framework's; the exit code."""
    torch.set_num_threads(1)
    return check_losses(options) if options.loss else check_all_advantages(options)

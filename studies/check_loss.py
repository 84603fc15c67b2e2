"""Part 1 of scripts/check.py: what the loss and the advantages of a script ascend, by exact enumeration."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import loss_table
import torch
from check_subject import FAIL, NOTE, OK, Finding, Subject, with_flags
from enumeration import F64, UNNAMED, Policies, Row, World, policies_of, summarize
from torch import Tensor

import kl_estimators

SAME = 1e-6  # relative difference below which two expected updates are one
# Losses that take their ratio to the sampler on purpose: old log-probs are no part of them.
TO_SAMPLER = ("sequence ratio", "TRM", "DPPO", "DRO")
OTHER_LABELS = (kl_estimators.ZERO, kl_estimators.AWAY, kl_estimators.AWAY_FROM_SAMPLER, kl_estimators.NONE)
Loss = Callable[[loss_table.Batch], Tensor]
# Conditions of studies/enumeration.py -> how the report calls them.
WHEN = {
    "fresh": "fresh samples",
    "one step": "second optimizer step",
    "stale": "ninth optimizer step",
    "unlike": "sampler mismatch",
    "async": "both, asynchronous",
}


def named_losses(subject: Subject) -> dict[str, Loss]:
    """Return the unedited script's loss, and those of studies/loss_table.py, with bounds from the script's flags."""
    args = subject.args
    low, high = getattr(args, "clip_lower", 0.2), getattr(args, "clip_higher", 0.2)

    def gspo(b: loss_table.Batch) -> Tensor:
        ratio = b.response_mean(b.logprobs - b.old).exp()
        return torch.maximum(-b.advantages * ratio, -b.advantages * ratio.clamp(1 - low, 1 + high))

    own = {
        f"the loss of {subject.base_name} with the same flags": loss_table.loss_of(subject.base, subject.base_args),
        "CISPO": functools.partial(loss_table.cispo, high=high),
        "DPPO": functools.partial(loss_table.dppo, change=getattr(args, "max_probability_change", 0.1)),
        "GSPO": gspo,
    }
    return own | {name: loss for name, loss in loss_table.LOSSES.items() if name not in own}


def expected_updates(loss: Loss, world: World, policies: dict[str, Policies]) -> dict[str, loss_table.Expected]:
    """Return the updates of a loss under each condition."""
    return {condition: loss_table.expected(loss, world, policies[condition]) for condition in policies}


def distance(ours: list[Tensor], theirs: list[Tensor]) -> tuple[float, float]:
    """(relative difference, factor) of the updates of two losses under all conditions, up to one common factor."""
    a, b = torch.cat(ours), torch.cat(theirs)
    square = b @ b
    if square == 0 or not a.isfinite().all():
        return float("inf"), 1.0
    factor = (a @ b / square).item()
    return ((a - factor * b).norm() / a.norm().clamp(min=1e-30)).item(), factor


def nearest(found: dict[str, loss_table.Expected], named: dict[str, dict]) -> tuple[str, float, float]:
    """(name, relative difference, factor) of the named loss whose updates are nearest."""
    ours = [x.drawn @ x.updates for x in found.values()]
    best = ("", float("inf"), 1.0)
    for name, theirs in named.items():
        difference, factor = distance(ours, [x.drawn @ x.updates for x in theirs.values()])
        if factor > 0 and difference < best[1] - SAME:
            best = (name, difference, factor)
    return best


def depends_on(loss: Loss, batch: loss_table.Batch, field: str) -> bool:
    """Return True if the gradient of a loss changes with one of its inputs."""

    def slopes(b: loss_table.Batch) -> Tensor:
        return torch.autograd.grad(loss(b).sum(), b.logprobs, allow_unused=True)[0]

    draw = torch.Generator().manual_seed(3)
    value = getattr(batch, field)
    other = value + 0.7 * torch.randn(value.shape, generator=draw, dtype=F64)
    before, after = slopes(batch), slopes(batch._replace(**{field: other}))
    if before is None or after is None:
        return False
    return not torch.equal(before, after)


def row_text(row: Row) -> str:
    """Return the numbers of a row as text."""
    text = f"cosine {row.cosine:+.3f}, bias {row.bias:.3f}, noise {row.noise:.2f} per sample"
    return text if row.ascends == UNNAMED else f"{text}, ascends {row.ascends}"


def beside(name: str, ours: Row, theirs: Row) -> str:
    """Describe another loss in the same condition."""
    if abs(ours.cosine - theirs.cosine) < SAME and abs(ours.bias - theirs.bias) < SAME:
        return f"{name}: equal"
    return f"{name}: cosine {theirs.cosine:+.3f}, bias {theirs.bias:.3f}"


def check_ascent(subject: Subject) -> list[Finding]:
    """Check the policy's part of the loss under each condition, and name the known loss that it equals."""
    world = World(max_length=4)
    policies = {condition: policies_of(world, condition) for condition in subject.conditions}
    loss = loss_table.loss_of(subject.script, subject.args)
    where = subject.first_place("token_loss", "importance_weights", "Tokens")
    try:
        found = expected_updates(loss, world, policies)
    except RuntimeError as error:
        text = f"the loss has no gradient with respect to the policy's log-probs ({str(error).splitlines()[0]})"
        return [Finding(1, "gradient", FAIL, text, where)]
    losses = subject.named(named_losses(subject))
    named = {name: expected_updates(own, world, policies) for name, own in losses.items()}
    findings = []
    plain = named["PPO clip"]
    base = next(iter(named.values()))
    for condition, own in found.items():
        rows = [summarize(x.updates, x.drawn, world, policies[condition], 1, x.zero) for x in (own, base[condition])]
        clip = summarize(
            *plain[condition][:2],
            world,
            policies[condition],
            1,
            plain[condition].zero,
        )
        state = OK
        text = row_text(rows[0])
        if not own.updates.isfinite().all() or not (own.drawn @ own.updates).any():
            state, text = FAIL, "the expected update is zero or not finite: the policy gets no gradient"
        elif rows[0].cosine <= 0:  # which a clip can do once pi has moved away from old
            state = FAIL if condition in ("fresh", "unlike") else NOTE
            text += ": it goes down, not up"
        text += f". {beside(subject.base_name, rows[0], rows[1])}. {beside('PPO, clip 0.2', rows[0], clip)}"
        numbers = {
            "mine": rows[0]._asdict(),
            "base": rows[1]._asdict(),
            "PPO clip": clip._asdict(),
        }
        findings.append(Finding(1, WHEN[condition], state, text, where if state == FAIL else "", numbers))
    name, difference, factor = nearest(found, named)
    scale = "" if abs(factor - 1) < SAME else f" times {factor:.4g}"
    if difference < SAME:
        text = f"this is {name}{scale}, up to {difference:.0e}"
        findings.append(Finding(1, "nearest loss", OK, text, numbers={"nearest": name}))
    elif name:
        text = f"none of {len(named)} named losses; the nearest is {name}{scale}, which differs by {difference:.2g}"
        findings.append(Finding(1, "nearest loss", NOTE, text, where, {"nearest": name}))
    if pushes_wrong_way(loss, loss_table.batch_of(world, policies["fresh"])):
        text = "on fresh samples some tokens with a negative advantage are made more likely, or the other way around"
        findings.append(Finding(1, "sign", FAIL, text, where))
    if clips_wrong_side(subject):
        text = "tokens whose probability has moved against their advantage get no gradient, and those that have moved "
        text += "with it keep theirs: the clip is on the wrong side"
        findings.append(Finding(1, "side of the clip", FAIL, text, where))
    batch = loss_table.batch_of(world, policies_of(world, "async"))
    identical = name if difference < SAME else ""
    return [*findings, *check_inputs(subject, loss, batch, found, identical, where)]


def pushes_wrong_way(loss: Loss, batch: loss_table.Batch) -> bool:
    """Return True if the gradient moves a token against its advantage."""
    slopes = torch.autograd.grad(loss(batch).sum(), batch.logprobs)[0]
    return bool((slopes * batch.advantages > 0).any())


def clips_wrong_side(subject: Subject) -> bool:
    """Return True if the loss drops tokens that have moved the wrong way, and none that have moved the right way."""
    ratios = torch.tensor([0.1, 10.0, 0.1, 10.0], dtype=F64)
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=F64)
    old_T = torch.full((4,), -3.0, dtype=F64)
    leaf_T = (old_T + ratios.log()).requires_grad_()
    known = {
        "old_T": old_T,
        "sampler_T": old_T,
        "advantages_T": signs,
        "weights_T": torch.ones_like(old_T),
    }
    tokens = kl_estimators.make_tokens(subject.script, logprobs_T=leaf_T, **known)
    slopes_T = torch.autograd.grad(subject.script.token_loss(tokens, 0.0, subject.args)[0].sum(), leaf_T)[0]
    dropped = (slopes_T == 0).tolist()
    return (dropped[0] or dropped[3]) and not (dropped[1] or dropped[2])


def check_inputs(subject: Subject, loss: Loss, batch, found: dict, identical: str, where: str) -> list[Finding]:
    """Check that the gradient uses advantages and an importance ratio. ``identical``: the named loss that it equals."""
    if not depends_on(loss, batch, "advantages"):
        text = "the gradient does not depend on the advantages"
        return [
            Finding(
                1,
                "inputs",
                FAIL,
                text,
                where,
            )
        ]
    if "stale" not in found:
        return [Finding(1, "inputs", OK, "the gradient depends on the advantages; no sample is used twice")]
    if depends_on(loss, batch, "old") or identical in TO_SAMPLER or not subject.takes_old:
        return [
            Finding(
                1,
                "inputs",
                OK,
                "the gradient depends on the advantages and on an importance ratio",
            )
        ]
    if not depends_on(loss, batch, "sampler"):
        text = (
            "no importance ratio: old and sampler log-probs have no effect, so every optimizer step after the first on "
            "a batch, and every asynchronous sample, is treated as fresh"
        )
        return [Finding(1, "inputs", FAIL, text, where)]
    zero = found["unlike"].zero
    text = "old log-probs have no effect: the ratio is pi / sampler"
    if zero > 0:
        text += (
            f", and {zero:.0%} of the tokens are clipped before the policy has moved, because engine and trainer "
            f"compute different log-probs"
        )
        return [Finding(1, "inputs", FAIL, text, where)]
    return [Finding(1, "inputs", NOTE, text, where)]


def check_groups(subject: Subject) -> list[Finding]:
    """Check one optimizer step with the script's own group_advantages and loss_weights, over all pairs of groups."""
    if not hasattr(subject.script, "group_advantages"):
        return []
    findings = []
    world = World(max_length=2)
    where = subject.first_place("group_advantages", "loss_weights", "token_loss")
    for condition in [name for name in loss_table.RECIPE_CONDITIONS if name in subject.conditions]:
        policies = policies_of(world, condition)
        row = loss_table.step_row(subject.script, subject.args, world, policies)
        base = loss_table.step_row(subject.base, subject.base_args, world, policies)
        state = OK if row.cosine > 0 else FAIL
        if state == OK and abs(row.cosine - base.cosine) > 1e-3:
            state = NOTE
        text = f"{row_text(row)}. {beside(subject.base_name, row, base)}"
        numbers = {"mine": row._asdict(), "base": base._asdict()}
        findings.append(
            Finding(
                1,
                f"groups, {condition}",
                state,
                text,
                "" if state == OK else where,
                numbers,
            )
        )
    return findings


def check_kl(subject: Subject) -> list[Finding]:
    """Compare the objective that each KL in the loss descends with the unedited script's, the own setting first."""
    args = subject.args
    own = kl_estimators.canonical_name(args.kl_estimator)
    where = subject.first_place("token_loss", "kl_value", "clamp_straight_through")
    first: list[Finding] = []
    others: list[Finding] = []
    equal = 0
    names = [name for place, name in kl_estimators.settings(subject.script) if place == "loss"]
    known = [name for place, name in kl_estimators.settings(subject.base) if place == "loss"]
    for estimator, condition in itertools.product(names, ("fresh", "stale")):
        setting = ("loss", estimator, condition)
        ours = kl_estimators.table_row(subject.script, *setting)
        if estimator not in known:
            text = f"descends {ours.label} (cosine {ours.cosine:+.3f} with grad KL(pi||ref)); it is new here"
            first.append(Finding(1, f"KL {estimator}, {condition}", NOTE, text, where))
            continue
        theirs = kl_estimators.table_row(subject.base, *setting)
        mine = estimator == own
        title = f"KL {estimator}, {condition}"
        if ours.label == theirs.label and abs(ours.cosine - theirs.cosine) < SAME:
            equal += 1
            if mine:
                state = OK if ours.label == kl_estimators.REVERSE else NOTE
                text = f"descends {ours.label}, as in {subject.base_name}"
                first.append(Finding(1, title, state, text))
            continue
        bad = ours.cosine <= 0 or ours.label in OTHER_LABELS
        text = f"descends {ours.label} (cosine {ours.cosine:+.3f} with grad KL(pi||ref))"
        if ours.cosine < 0 and abs(ours.cosine + theirs.cosine) < SAME:
            text += ": the sign is reversed, so the policy is pushed away from the reference"
        text += f"; {subject.base_name}: {theirs.label} ({theirs.cosine:+.3f})"
        state = FAIL if bad else NOTE
        finding = Finding(1, title, state, text, where)
        (first if mine else others).append(finding)
    worst = sorted(others, key=lambda finding: finding.state != FAIL)
    total = 2 * len(known)
    summary = Finding(1, "KL in the loss", OK, f"{equal} of {total} settings are those of {subject.base_name}")
    return [*first, *worst[:1], *check_coefficient(subject, where), *check_rest(subject, where), summary]


def check_rest(subject: Subject, where: str) -> list[Finding]:
    """Check that the entropy keeps its coefficient next to a KL, and that log-probs are divided by no temperature."""
    own = torch.Generator().manual_seed(0)
    known = {}
    for name in ("logprobs_T", "old_T", "ref_T", "sampler_T", "advantages_T"):
        known[name] = -torch.rand(64, generator=own, dtype=torch.float64)
    entropy_T = torch.ones(64, dtype=torch.float64, requires_grad=True)
    tokens = kl_estimators.make_tokens(subject.script, **known, entropy_T=entropy_T)
    args = subject.with_flags(entropy_coef=0.01, kl_estimator="k3")
    loss_T = subject.script.token_loss(tokens, 0.1, args)[0]
    slope_T = torch.zeros(64)
    if loss_T.requires_grad:
        loss_T.sum().backward()
        slope_T = entropy_T.grad
    findings = []
    if not slope_T.any() or (slope_T > 0).any():
        text = "with --entropy_coef 0.01 and a KL, the loss does not fall as the entropy grows"
        findings.append(Finding(1, "entropy", FAIL, text, where))
    hotter = subject.with_flags(entropy_coef=0.01, kl_estimator="k3", temperature=2 * args.temperature)
    again_T = subject.script.token_loss(tokens, 0.1, hotter)[0]
    if not torch.equal(loss_T, again_T):
        text = "token_loss depends on --temperature, at which its log-probs already are"
        findings.append(Finding(1, "temperature", FAIL, text, where))
    return findings


def check_coefficient(subject: Subject, where: str) -> list[Finding]:
    """Compare the size of the KL in the loss at a coefficient of 0.5: one that is applied twice has its direction."""
    own = torch.Generator().manual_seed(0)
    old = -torch.rand(64, generator=own, dtype=torch.float64)
    ref = old + 0.3 * torch.randn(64, generator=own, dtype=torch.float64)
    parts = []
    for script, args in ((subject.script, subject.args), (subject.base, subject.base_args)):
        args = with_flags(args, beta=0.5, kl_placement="loss", kl_estimator="k3")
        tokens = kl_estimators.make_tokens(
            script,
            logprobs_T=old,
            old_T=old,
            ref_T=ref,
            sampler_T=old,
        )
        parts.append(script.token_loss(tokens, 0.5, args)[0] - script.token_loss(tokens, 0.0, args)[0])
    factor = (parts[0].sum() / parts[1].sum()).item()
    is_multiple = torch.allclose(parts[0], factor * parts[1], rtol=1e-6)
    if not is_multiple or abs(factor - 1) < 1e-6:
        return []
    text = f"at --beta 0.5 the KL is {factor:.3g} times that of {subject.base_name}: is the coefficient applied twice?"
    return [Finding(1, "KL coefficient", FAIL, text, where)]

"""Part 2 of scripts/check.py, the runs: what ``main`` hands to the loss, and what must not change its gradient."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders are no packages

import probe_run
from check_subject import FAIL, NOTE, OK, Finding, Subject
from probe_run import Probe, Recorded, Update

import utils
from kl_estimators import make_tokens
from runtime.training import batching

CLOSE = 1e-3  # of two gradients or arrays, relative to the larger one: both are fp32
SMALLEST = 44  # tokens of a micro-batch that holds one sample of a probe
# A field of Tokens -> where a wrong one comes from, the first that was edited.
ORIGINS = {
    "sampler_T": (("main", "2"), ("main", "7")),
    "old_T": (("main", "5"), ("main", "7")),
    "ref_T": (("main", "5"), ("main", "7")),
    "full_kl_T": (("main", "7"),),
    "advantages_T": (("main", "6"), "group_advantages", "return_to_go", "gae", "whiten", ("main", "7")),
    "weights_T": ("loss_weights", ("main", "7"), ("main", "2")),
    "logprobs_T": (("main", "7"), "main"),
    "entropy_T": (("main", "7"), "main"),
    "loss_T": ("token_loss", "importance_weights", "loss_weights", ("main", "7")),
}
LAST = ("token_loss", ("main", "7"), "main")
# Several optimizer steps on a batch, a KL in both places, and a sampler whose log-probs are not the trainer's.
RICH = (
    {"num_mini_batches": 2},
    {"beta": 0.1, "kl_estimator": "k3"},
    {"kl_placement": "both"},
    {"truncated_importance_sampling_ratio_cap": 2.0},
)


# ------------------------------------------------------------------------------------------------- comparing two runs


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference where both are known, relative to the largest number; infinite for other shapes."""
    if a.shape != b.shape:
        return float("inf")
    known = ~(a.isnan() | b.isnan())
    if not known.any():
        return 0.0
    a, b = a[known], b[known]
    return ((a - b).abs().max() / torch.maximum(a.abs().max(), b.abs().max()).clamp(min=1e-12)).item()


def gradients_apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Relative difference of two gradients by parameter: the norm of their difference over the larger norm."""
    if a.keys() != b.keys():
        return float("inf")
    if not a:
        return 0.0
    apart = sum((a[name] - b[name]).square().sum().item() for name in a) ** 0.5
    sizes = [sum(x.square().sum().item() for x in own.values()) ** 0.5 for own in (a, b)]
    return apart / max(*sizes, 1e-12)


def spans(found: Recorded, step: int) -> dict[tuple, slice]:
    """The place of each response's tokens in the flat arrays of a step, by its prompt and its ids."""
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
    """The first thing that two runs do not have alike."""

    field: str
    text: str


def first_difference(a: Recorded, b: Recorded, factor: float = 1.0) -> Difference | None:
    """Compare tokens, losses and gradients of two runs, in the order in which they are computed."""
    for step in range(len(a.updates)):
        places = spans(a, step), spans(b, step)
        for k, (ours, theirs) in enumerate(zip(a.updates[step], b.updates[step], strict=False)):
            name = f"step {step + 1}, optimizer step {k + 1}"
            counted = ours.tokens["weights_T"] != 0
            for field in [*ORIGINS, *(set(ours.tokens) - set(ORIGINS) - {"response_T"})]:
                if field not in ours.tokens or field not in theirs.tokens:
                    continue
                other = aligned(theirs.tokens[field], *places)
                apart = relative(torch.where(counted, ours.tokens[field], torch.nan), other)
                if apart > CLOSE:
                    return Difference(field, f"{field} differs by {apart:.2g} of the largest ({name})")
            if found := update_difference(ours, theirs, f"the policy's {{}} ({name})"):
                return found
        for k, (ours, theirs) in enumerate(zip(a.critic[step], b.critic[step], strict=False)):
            name = f"step {step + 1}, optimizer step {k + 1}"
            if found := update_difference(ours, theirs, f"the critic's {{}} ({name})"):
                return found
        if len(a.updates[step]) != len(b.updates[step]):
            return Difference("", f"{len(a.updates[step])} optimizer steps against {len(b.updates[step])}")
    return None


def update_difference(ours: Update, theirs: Update, name: str) -> Difference | None:
    """Compare the loss and the gradient of an optimizer step."""
    for kind, x, y in (("gradient", ours.gradient, theirs.gradient),):
        apart = gradients_apart(x, y)
        if apart > CLOSE:
            sizes = [sum(g.square().sum().item() for g in own.values()) ** 0.5 for own in (x, y)]
            ratio = f", its norm is {sizes[1] / sizes[0]:.3g} times as large" if sizes[0] > 0 else ""
            return Difference("gradient", f"{name.format(kind)} differs by {apart:.2g}{ratio}")
    return None


# --------------------------------------------------------------------------------------- what main hands to the loss


class Oracle:
    """What every field of ``Tokens`` has to be, from plain forward passes and the script's own functions."""

    def __init__(self, subject: Subject, found: Recorded, args: Any, model):
        self.subject = subject
        self.found = found
        self.args = args
        self.model = model
        self.logprobs = [self.plain(step, step, args.temperature) for step in range(len(found.updates))]
        self.untempered = [self.plain(step, step, 1.0) for step in range(len(found.updates))]
        self.reference = [self.plain(step, 0, args.temperature) for step in range(len(found.updates))]

    @torch.no_grad()
    def plain(self, step: int, version: int, temperature: float) -> Tensor:
        """Log-probs of a step's tokens by the weights of a version, [N]."""
        self.model.load_state_dict({k: v.double() for k, v in self.found.weights[version].items()}, strict=False)
        parts = []
        for sample in self.found.samples[step]:
            ids = sample.response_ids.tolist()
            logprobs = probe_run.plain_logprobs(self.model, list(sample.prompt_ids), ids, temperature)
            parts.append(logprobs[torch.from_numpy(sample.own())])
        return torch.cat(parts)

    def advantages(self, step: int) -> dict[str, Tensor]:
        """The advantages of all tokens, [N], and wrong ones that are known: by what they are."""
        samples, script, args = self.found.samples[step], self.subject.script, self.args
        if not hasattr(script, "group_advantages"):
            return {}
        rewards_PG = torch.tensor([s.reward for s in samples], dtype=torch.float64).view(-1, probe_run.GROUP)
        lengths = torch.tensor([s.length for s in samples])
        kind, eps = args.advantage_normalization_type, args.advantage_eps

        def per_token(values: Tensor) -> Tensor:
            return values.flatten().repeat_interleave(lengths)

        right = per_token(script.group_advantages(rewards_PG, kind, eps))
        coefficient = args.kl_coefficients[1]
        if coefficient == 0:
            penalty = torch.zeros_like(right)
        else:
            d = (self.logprobs[step] - self.reference[step]).split(lengths.tolist())
            penalty = coefficient * torch.cat([x.flip(0).cumsum(0).flip(0) for x in d])
        whole = per_token((rewards_PG - rewards_PG.mean()) / (rewards_PG.std() + eps))
        scaled = rewards_PG - rewards_PG.mean(1, keepdim=True)
        over_batch = per_token(scaled / (scaled.std() + eps))
        found = {"": right - penalty, "normalized over the batch instead of the group": whole - penalty}
        found["divided by the standard deviation of the batch instead of the group's"] = over_batch - penalty
        if coefficient > 0:
            found["with the KL added to the reward: the sign is reversed"] = right + penalty
            found["without the KL in the reward"] = right
        return found

    def weights(self, step: int, k: int) -> Tensor:
        """The weights of all tokens in an optimizer step, [N]."""
        samples, args = self.found.samples[step], self.args
        in_loss = self.found.in_loss[step]
        every = range(len(samples))
        groups = sorted({samples[i].prompt_id for i in (every if self.found.critic[step] else in_loss)})
        chosen = []
        for epoch, mini in itertools.product(range(args.num_epochs), range(args.num_mini_batches)):
            members = utils.mini_batch(groups, step + 1, epoch, mini, args)
            own = [i for i in in_loss if samples[i].prompt_id in members]
            chosen += [own] if own else []  # a mini-batch without samples in the loss is passed by
        return self.subject.script.loss_weights(samples, chosen[k], args).double()

    def expected(self, step: int, k: int) -> dict[str, dict[str, Tensor]]:
        """Field of Tokens -> what it has to be, under "", and what else it may be by mistake."""
        now = self.found.updates[step][k].tokens["logprobs_T"]
        sampler = torch.cat([torch.as_tensor(s.sampler_logprobs) for s in self.found.samples[step]]).double()
        before, bare, ref = self.logprobs[step], self.untempered[step], self.reference[step]
        others = {"the sampler's log-probs": sampler, "the log-probs at temperature 1": bare}
        fields: dict[str, dict[str, Tensor]] = {"logprobs_T": {"": before} | others} if k == 0 else {}
        fields |= {
            "sampler_T": {"": sampler, "the trainer's log-probs": before},
            "old_T": {"": before} | others | {"the policy's current log-probs: the ratio is always 1": now},
            "advantages_T": self.advantages(step),
            "weights_T": {"": self.weights(step, k)},
        }
        if self.args.loads_reference:
            known = others | {"0": torch.zeros_like(ref)}
            if step > 0:
                known["the policy's log-probs before the update"] = before
            fields["ref_T"] = {"": ref} | known
        for values in fields.values():
            if values:
                values["shifted by one token"] = values[""].roll(1)
                values["shifted by one token to the left"] = values[""].roll(-1)
        return fields


def check_contract(subject: Subject, oracle: Oracle, title: str) -> list[Finding]:
    """Each field of Tokens in each optimizer step, and the loss that is backpropagated."""
    wrong: dict[str, tuple[str, str]] = {}
    steps = 0
    for step, updates in enumerate(oracle.found.updates):
        for k, update in enumerate(updates):
            steps += 1
            for field, values in oracle.expected(step, k).items():
                if field in wrong or not values or field not in update.tokens:
                    continue
                if found := judge(field, update, values):
                    wrong[field] = (found[0], f"{found[1]} (step {step + 1}, optimizer step {k + 1})")
    findings = []
    for field, (state, text) in wrong.items():
        findings.append(Finding(2, f"{title}: {field}", state, text, subject.first_place(*ORIGINS[field])))
    if not wrong:
        text = f"log-probs, sampler, old, reference, advantages and weights are right in {steps} optimizer steps"
        findings.append(Finding(2, title, OK, text))
    return findings


def judge(field: str, update: Update, values: dict[str, Tensor]) -> tuple[str, str] | None:
    """(state, text) on a field that is not what it has to be; None if it is."""
    counted = update.tokens["weights_T"].nan_to_num() != 0
    if field == "weights_T":
        counted = ~update.tokens[field].isnan()
    ours = torch.where(counted, update.tokens[field], torch.nan)
    apart = relative(ours, values[""])
    if apart <= CLOSE:
        return None
    for name, other in values.items():
        if name and relative(ours, other) <= CLOSE and relative(other, values[""]) > CLOSE:
            verb = "is" if name.startswith(("the ", "0")) else "are" if field in ("advantages_T", "weights_T") else "is"
            return FAIL, f"{verb} {name}"
    if field == "advantages_T" and not ours[counted].any():
        return NOTE, "is 0: the reward is not learned from"
    custom = field in ("ref_T", "advantages_T", "weights_T")
    return NOTE if custom else FAIL, f"differs from what it has to be by {apart:.2g} of the largest"


def check_backward(subject: Subject, oracle: Oracle) -> list[Finding]:
    """The gradient of the first optimizer step beside that of the sum of token_loss times weights, in float64."""
    update = oracle.found.updates[0][0]
    args = oracle.args
    where = subject.first_place(("main", "7"), "main", "token_loss")
    counted = update.tokens["weights_T"].nan_to_num() != 0
    total = (update.tokens["loss_T"] * update.tokens["weights_T"])[counted].sum().item()
    findings = []
    if abs(update.loss - total) > CLOSE * max(abs(total), abs(update.loss)):
        text = f"main backpropagates {update.loss:.4g}, and the sum of token_loss times weights is {total:.4g}"
        findings.append(Finding(2, "loss in main", NOTE, text, where))
    plain = args.entropy_coeff == 0 and "full_kl_T" not in update.tokens
    names = dict(oracle.model.named_parameters())
    recorded = {name.removeprefix("model.").removeprefix("module."): g for name, g in update.gradient.items()}
    expected = expected_gradient(subject, oracle, update) if plain else {}
    shared = {name for name in expected if name in recorded}
    if not plain or not shared or len(shared) < len(names) - 1:
        return findings
    apart = gradients_apart({n: recorded[n] for n in shared}, {n: expected[n] for n in shared})
    dead = [name for name in shared if not recorded[name].any() and expected[name].any()]
    if dead:
        text = f"{len(dead)} of {len(shared)} parameters get no gradient from main, among them {dead[0]}"
        findings.append(Finding(4, "parameters", FAIL, text, where))
    elif apart > CLOSE:
        state = NOTE if findings else FAIL
        text = f"main's gradient differs from that of token_loss times weights by {apart:.2g}"
        findings.append(Finding(4, "gradient in main", state, text, where))
    else:
        text = f"that of the loss by plain forward passes in float64, up to {apart:.0e}; {len(shared)} parameters"
        findings.append(Finding(4, "gradient in main", OK, text))
    return findings


def expected_gradient(subject: Subject, oracle: Oracle, update: Update) -> dict[str, Tensor]:
    """The gradient of the sum of token_loss times weights over the recorded tokens, by plain forward passes."""
    counted = update.tokens["weights_T"].nan_to_num() != 0
    known = {name: value[counted] for name, value in update.tokens.items() if name != "loss_T"}
    known["logprobs_T"] = known["logprobs_T"].requires_grad_()
    if "response_T" in known:
        known["response_T"] = known["response_T"].long()
    loss_T, _ = subject.script.token_loss(
        make_tokens(subject.script, **known), oracle.args.kl_coefficients[0], oracle.args
    )
    if not loss_T.requires_grad:
        return {}
    slopes = torch.zeros(len(counted), dtype=torch.float64)
    slopes[counted] = torch.autograd.grad((loss_T * known["weights_T"]).sum(), known["logprobs_T"])[0]
    model = oracle.model
    model.load_state_dict({k: v.double() for k, v in oracle.found.weights[0].items()}, strict=False)
    model.zero_grad()
    samples = oracle.found.samples[0]
    for sample, (start, end) in zip(samples, itertools.pairwise(batching.token_offsets(samples)), strict=True):
        if not counted[start:end].any():
            continue
        ids = sample.response_ids.tolist()
        logprobs = probe_run.plain_logprobs(model, list(sample.prompt_ids), ids, oracle.args.temperature)
        (logprobs[torch.from_numpy(sample.own())] * slopes[start:end]).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


# ------------------------------------------------------------------------------------------------------------ the runs


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
    if args.mask_truncated_completions and not subject.is_ppo:  # whose advantages are whitened over all responses
        found["truncated samples"] = (Probe("truncated", other_truncated=True), "plain")
    scales = getattr(args, "advantage_normalization_type", "") == "standard" and args.kl_coefficients[1] == 0
    if scales and args.max_reward_clip is None and args.non_stop_penalty == 0 and args.overlong_buffer == 0:
        found["rewards scaled, in main"] = (Probe("scaled", {"reward_scaling": 2 * args.reward_scaling}), "plain")
    updates = args.num_mini_batches * args.num_epochs
    if updates > 1:  # mini-batches hold other prompts then
        del found["order of prompts"]
    return found


def check(
    subject: Subject,
    laboratory: probe_run.Laboratory,
    model,
    lanes: int,
) -> tuple[list[Finding], dict[str, Recorded]]:
    """All findings of the runs, and the runs by name. ``model``: the tiny model of the runs in float64."""
    rich = rich_flags(subject)
    wanted = invariances(subject, rich)
    probes = [Probe("plain"), Probe("rich", rich, noise=True), Probe("observed", observed=True)]
    probes += [probe for probe, _ in wanted.values()]
    recorded = dict(zip([probe.name for probe in probes], laboratory.run(probes, lanes), strict=True))
    findings = []
    titles = {"plain": "one optimizer step", "rich": "several, with a KL", "observed": "environment's tokens"}
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
        if name == "plain":
            findings += check_backward(subject, oracle)
    if recorded["plain"].failure:
        return findings, recorded
    own_reference = any(f.name.endswith("ref_T") and f.state == NOTE for f in findings)
    for name, (probe, reference) in wanted.items():
        findings += compare(subject, name, recorded[reference], recorded[probe.name], own_reference)
    return findings, recorded


def compare(subject: Subject, name: str, ours: Recorded, theirs: Recorded, own_reference: bool) -> list[Finding]:
    """The finding on a run that must have the gradient of another.

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
    """The last line of what a run printed."""
    return text.strip().splitlines()[-1] if text.strip() else ""

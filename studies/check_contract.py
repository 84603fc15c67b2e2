"""Part 2 of scripts/check.py, the inputs: what ``main`` hands to the loss, next to what each field has to be."""

from __future__ import annotations

import itertools
from typing import Any

import fixed_samples
import torch
from check_subject import FAIL, NOTE, OK, Finding, Subject
from probe_run import Call, Recorded, Update
from torch import Tensor

import utils
from kl_estimators import make_tokens
from runtime.training import batching

CLOSE = 1e-3  # of two gradients or arrays, relative to the larger one: both are fp32
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


def normalized(values: Tensor) -> Tensor:
    """Return values with mean 0 and variance 1, [N]."""
    centered = values - values.mean()
    correction = min(1, len(values) - 1)  # the variance of a single value is 0
    variance = values.var(correction=correction)
    return centered / (variance + 1e-8).sqrt()


class Oracle:
    """Expected value of each field of ``Tokens``, from plain forward passes and the script's own functions."""

    def __init__(
        self,
        subject: Subject,
        found: Recorded,
        args: Any,
        model,
    ):
        self.subject = subject
        self.found = found
        self.args = args
        self.model = model
        steps = range(len(found.updates))
        self.logprobs = [self.plain(step, step, args.temperature) for step in steps]
        self.untempered = [self.plain(step, step, 1.0) for step in steps]
        self.reference = [self.plain(step, 0, args.temperature) for step in steps]

    @torch.no_grad()
    def plain(
        self,
        step: int,
        version: int,
        temperature: float,
    ) -> Tensor:
        """Log-probs of a step's tokens by the weights of a version, [N]."""
        recorded = self.found.weights[version]
        weights = {name: weight.double() for name, weight in recorded.items()}
        self.model.load_state_dict(weights, strict=False)
        parts = []
        for sample in self.found.samples[step]:
            ids = sample.response_ids.tolist()
            logprobs = fixed_samples.plain_logprobs(
                self.model,
                list(sample.prompt_ids),
                ids,
                temperature,
            )
            parts.append(logprobs[torch.from_numpy(sample.own())])
        return torch.cat(parts)

    def advantages(self, step: int) -> dict[str, Tensor]:
        """Return the right advantages of all tokens, [N], under "", and known wrong ones under a description each."""
        samples = self.found.samples[step]
        script = self.subject.script
        args = self.args
        if not hasattr(script, "group_advantages"):
            return self.whitened(step)
        scores = torch.tensor([s.reward for s in samples], dtype=torch.float64)
        rewards_PG = scores.view(-1, fixed_samples.GROUP)
        lengths = torch.tensor([s.length for s in samples])
        kind, eps = args.advantage_normalization_type, args.advantage_eps

        def per_token(values: Tensor) -> Tensor:
            return values.flatten().repeat_interleave(lengths)

        def to_go(values: Tensor) -> Tensor:
            return torch.cat([x.flip(0).cumsum(0).flip(0) for x in values.split(lengths.tolist())])

        right = per_token(script.group_advantages(rewards_PG, kind, eps))
        coefficient = args.kl_coefficients[1]
        own = self.kl_in_reward(step)
        by_response = own.split(lengths.tolist())
        if coefficient > 0 and args.kl_reward_norm == "before_norm":
            sums_PG = torch.stack([x.sum() for x in by_response]).view_as(rewards_PG)
            return {
                "": per_token(script.group_advantages(rewards_PG - sums_PG, kind, eps)),
                "with the KL added to the reward: the sign is reversed": per_token(
                    script.group_advantages(rewards_PG + sums_PG, kind, eps)
                ),
                "without the KL in the reward": right,
            }
        penalty = to_go(own)
        whole = per_token((rewards_PG - rewards_PG.mean()) / (rewards_PG.std() + eps))
        scaled = rewards_PG - rewards_PG.mean(1, keepdim=True)
        over_batch = per_token(scaled / (scaled.std() + eps))
        whole_numbers = per_token(script.group_advantages(rewards_PG.trunc(), kind, eps))
        found = {
            "": right - penalty,
            "normalized over the batch instead of the group": whole - penalty,
        }
        found["divided by the standard deviation of the batch instead of the group's"] = over_batch - penalty
        if whole_numbers.any() or not any(s.advantage for s in samples):  # distillation has them, and leaves them out
            found["those of rewards without their fractions"] = whole_numbers - penalty
        if coefficient > 0:
            before = torch.cat([x.cumsum(0) for x in by_response])
            found["with the KL of the tokens before it, in place of those after it"] = right - before
            found["with the KL of each token alone in its reward, without that of the tokens after it"] = right - own
            found["with the KL of the tokens after it, without its own"] = right - penalty + own
            found["with the KL added to the reward: the sign is reversed"] = right + penalty
            found["without the KL in the reward"] = right
            sampler = torch.cat([torch.as_tensor(s.sampler_logprobs) for s in samples]).double()
            of_sampler = coefficient * script.kl_value(args.kl_reward_estimator, sampler, sampler, self.reference[step])
            found["with a KL by the sampler's log-probs"] = right - to_go(of_sampler)
        return found

    def kl_in_reward(self, step: int) -> Tensor:
        """Return the coefficient times each token's KL, [N]; 0 for the KL over the vocabulary, not computed here."""
        kind = self.args.kl_reward_estimator
        coefficient = self.args.kl_coefficients[1]
        if kind == "full" or not coefficient:
            return torch.zeros_like(self.logprobs[step])
        old, ref = self.logprobs[step], self.reference[step]
        return coefficient * self.subject.script.kl_value(kind, old, old, ref)

    def whitened(self, step: int) -> dict[str, Tensor]:
        """Return the advantages of ppo.py, [N]: those that ``gae`` returned, with the normalization of --adv_norm."""
        calls = self.found.calls[step] if step < len(self.found.calls) else {}
        kind = getattr(self.args, "adv_norm", None)
        if "gae" not in calls or kind is None:
            return {}
        plain = calls["gae"][0].returned[0].double()
        offsets = batching.token_offsets(self.found.samples[step])
        rows = [plain[a:b] for a, b in itertools.pairwise(offsets)]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        whitened = normalized(padded.flatten()).view_as(padded)
        over_padding = []
        for values, row in zip(whitened, rows, strict=True):
            over_padding.append(values[: len(row)])
        groups = offsets[:: fixed_samples.GROUP]
        parts = {"batch": [len(plain)], "group": [b - a for a, b in itertools.pairwise(groups)]}
        known = {"": plain, "not whitened": plain}
        known["whitened over the padding of rows"] = torch.cat(over_padding)
        if kind in parts:
            own = plain.split(parts[kind])
            known[""] = torch.cat([normalized(part) for part in own])
        return known

    def weights(self, step: int, k: int) -> Tensor:
        """Return the weights of all tokens in an optimizer step, [N]."""
        samples, args = self.found.samples[step], self.args
        in_loss = self.found.in_loss[step]
        learned_from = range(len(samples)) if self.found.critic[step] else in_loss
        groups = sorted({samples[i].prompt_id for i in learned_from})
        chosen = []
        for epoch, mini in itertools.product(range(args.num_epochs), range(args.num_mini_batches)):
            members = utils.mini_batch(groups, step + 1, epoch, mini, args)
            own = [i for i in in_loss if samples[i].prompt_id in members]
            chosen += [own] if own else []  # a mini-batch without samples in the loss is passed by
        return self.subject.script.loss_weights(
            samples,
            chosen[k],
            args,
        ).double()

    def other_weights(self, step: int, k: int) -> dict[str, Tensor]:
        """Return weights that tokens of an optimizer step have by mistake: the batch's, and another mini-batch's."""
        args = self.args
        count = len(self.found.updates[step])
        samples = self.found.samples[step]
        in_loss = self.found.in_loss[step]
        found = {f"those of mini-batch {j + 1}": self.weights(step, j) for j in range(count) if j != k}
        if args.num_mini_batches > 1:
            whole = self.subject.script.loss_weights(samples, in_loss, args).double()
            found["those of the whole batch"] = whole
        return found

    def expected(self, step: int, k: int) -> dict[str, dict[str, Tensor]]:
        """Field of Tokens -> what it has to be, under "", and what else it may be by mistake."""
        now = self.found.updates[step][k].tokens["logprobs_T"]
        samples = self.found.samples[step]
        sampler = torch.cat([torch.as_tensor(s.sampler_logprobs) for s in samples]).double()
        before = self.logprobs[step]
        bare = self.untempered[step]
        ref = self.reference[step]
        others = {
            "the sampler's log-probs": sampler,
            "the log-probs at temperature 1": bare,
        }
        fields: dict[str, dict[str, Tensor]] = {}
        if not k:
            fields["logprobs_T"] = {"": before} | others
        fields |= {
            "sampler_T": {"": sampler, "the trainer's log-probs": before},
            "old_T": {"": before} | others | {"the policy's current log-probs: the ratio is always 1": now},
            "advantages_T": self.advantages(step),
            "weights_T": {"": self.weights(step, k), **self.other_weights(step, k)},
        }
        if self.args.loads_reference:
            known = others | {"0": torch.zeros_like(ref)}
            for temperature in (1.0, self.args.temperature**2):
                words = f"the reference's log-probs at temperature {temperature:g}"
                known[words] = self.plain(step, 0, temperature)
            if step:
                known["the policy's log-probs before the update"] = before
            fields["ref_T"] = {"": ref} | known
        for values in fields.values():
            if values:
                unknown = torch.full((1,), torch.nan, dtype=values[""].dtype)  # what stands where the shift begins
                values["shifted by one token"] = torch.cat([unknown, values[""][:-1]])
                values["shifted by one token to the left"] = torch.cat([values[""][1:], unknown])
        return fields


def check_contract(
    subject: Subject,
    oracle: Oracle,
    title: str,
) -> list[Finding]:
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
            if text := left_out(oracle, step, k) or another_coefficient(oracle, update):
                wrong.setdefault("left out", (FAIL, f"{text} (step {step + 1}, optimizer step {k + 1})"))
    findings = []
    for field, (state, text) in wrong.items():
        findings.append(
            Finding(
                2,
                f"{title}: {field}",
                state,
                text,
                subject.first_place(*ORIGINS.get(field, LAST)),
            )
        )
    if not wrong:
        text = f"log-probs, sampler, old, reference, advantages and weights are right in {steps} optimizer steps"
        findings.append(Finding(2, title, OK, text))
    return findings


def left_out(oracle: Oracle, step: int, k: int) -> str:
    """Text on samples that main leaves out of the normalization, or of the update although they have a gradient."""
    args = oracle.args
    samples, update = oracle.found.samples[step], oracle.found.updates[step][k]
    in_loss = oracle.found.in_loss[step]
    counted = set()  # whether samples of groups of equal rewards are
    for i, sample in enumerate(samples):
        truncated = args.mask_truncated_completions and sample.finish_reason == "length"
        if not truncated and len({s.reward for s in samples if s.prompt_id == sample.prompt_id}) == 1:
            counted.add(i in in_loss)
    if counted == {False} and not getattr(args, "filter_zero_std_samples", True):
        return "groups of equal rewards are left out of the normalization, without --filter_zero_std_samples"
    absent_T = (oracle.weights(step, k) != 0) & update.tokens["loss_T"].isnan()
    if args.kl_coefficients[0] > 0 or args.entropy_coef:
        if absent_T.any():
            return f"{int(absent_T.sum())} tokens of the loss are not computed; their KL or entropy has a gradient"
    elif advantages := oracle.advantages(step):
        absent_T &= advantages[""].abs() > CLOSE
        if absent_T.any():
            return f"{int(absent_T.sum())} tokens of the loss are not computed, though their advantages are not 0"
    return ""


def another_coefficient(oracle: Oracle, update: Update) -> str:
    """Text on a KL in the loss that the flags do not ask for."""
    if oracle.args.kl_coefficients[0] > 0 or update.beta == 0:
        return ""
    return f"token_loss gets the coefficient {update.beta:g} of a KL, and the flags have none in the loss"


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference where both are known, relative to the largest number; infinite for other shapes."""
    if a.shape != b.shape:
        return float("inf")
    known = ~(a.isnan() | b.isnan())
    if not known.any():
        return 0.0
    a, b = a[known], b[known]
    apart = (a - b).abs().max()
    largest = torch.maximum(a.abs().max(), b.abs().max())
    return (apart / largest.clamp(min=1e-12)).item()


def gradients_apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Relative difference of two gradients by parameter: the norm of their difference over the larger norm."""
    if a.keys() != b.keys():
        return float("inf")
    if not a:
        return 0.0
    apart = sum((a[name] - b[name]).square().sum().item() for name in a) ** 0.5
    sizes = [sum(x.square().sum().item() for x in own.values()) ** 0.5 for own in (a, b)]
    return apart / max(*sizes, 1e-12)


def fraction(a: Tensor, b: Tensor) -> float:
    """Fraction of equal numbers among those that both have. Not all are when an array is shifted that has gaps."""
    known = ~(a.isnan() | b.isnan())
    if not known.any():
        return 0.0
    apart = (a - b).abs()[known]
    allowed = CLOSE * b[known].abs().max()
    return (apart <= allowed).double().mean().item()


def judge(
    field: str,
    update: Update,
    values: dict[str, Tensor],
) -> tuple[str, str] | None:
    """(state, text) on a field that is not what it has to be; None if it is."""
    counted = update.tokens["weights_T"].nan_to_num() != 0
    if field == "weights_T":
        counted = ~update.tokens[field].isnan()
    ours = torch.where(counted, update.tokens[field], torch.nan)
    apart = relative(ours, values[""])
    if apart <= CLOSE:
        return None
    for name, other in values.items():
        shifted = False
        if name.startswith("shifted"):
            shifted = fraction(ours, other) > 0.7 and fraction(ours, values[""]) < 0.5
        if shifted or (name and relative(ours, other) <= CLOSE and relative(other, values[""]) > CLOSE):
            verb = "is" if name.startswith(("the ", "0")) else "are" if field in ("advantages_T", "weights_T") else "is"
            return FAIL, f"{verb} {name}"
    if field in ("advantages_T", "weights_T") and ours.shape == values[""].shape:
        known = counted & ~values[""].isnan()
        sorted_ours = ours[known].sort().values
        sorted_right = values[""][known].sort().values
        if relative(sorted_ours, sorted_right) <= CLOSE:
            return FAIL, "are those of other tokens"
    if field == "advantages_T" and not ours[counted].any():
        return NOTE, "is 0: the reward is not learned from"
    custom = field in ("ref_T", "advantages_T", "weights_T")
    return NOTE if custom else FAIL, f"differs from what it has to be by {apart:.2g} of the largest"


def check_estimates(subject: Subject, oracle: Oracle, title: str) -> list[Finding]:
    """Check the arguments that ``main`` of ppo.py passes to gae and to value_loss in each step."""
    args = oracle.args
    for step, calls in enumerate(oracle.found.calls):
        samples = oracle.found.samples[step]
        offsets = batching.token_offsets(samples)
        wrong = ""
        call = calls["gae"][0] if "gae" in calls else None
        if call and {"rewards_N", "gamma", "lam", "offsets"} <= call.given.keys():
            rewards = torch.zeros(offsets[-1], dtype=torch.float64)
            last = torch.tensor(offsets[1:]) - 1
            scores = [s.reward for s in samples]
            rewards[last] = torch.tensor(scores, dtype=torch.float64)
            penalty = oracle.kl_in_reward(step)
            given = call.given["rewards_N"].double()
            right = rewards - penalty
            apart = relative(given, right)
            if (call.given["gamma"], call.given["lam"]) != (args.gamma, args.gae_lambda):
                wrong = f"gae gets gamma {call.given['gamma']:g} and lambda {call.given['lam']:g}, and the flags are "
                wrong += f"{args.gamma:g} and {args.gae_lambda:g}"
            elif list(call.given["offsets"]) != list(offsets):
                wrong = "gae gets other offsets than those of the responses"
            elif apart > CLOSE and relative(given, rewards + penalty) <= CLOSE:
                wrong = "the KL in the reward has the wrong sign: it rewards the distance from the reference"
            elif apart > CLOSE and relative(given.roll(-1), right) <= CLOSE:
                wrong = "gae gets rewards that are shifted by one token"
            elif apart > CLOSE and args.kl_reward_estimator != "full":
                wrong = (
                    f"gae gets other rewards than those of the last tokens minus the KL, by {apart:.2g} of the largest"
                )
            elif not args.bootstrap_truncated and call.given["after_B"].any():
                wrong = "gae gets values after the last token, although --bootstrap_truncated is off"
        if not wrong and call and "value_loss" in calls:
            critic = calls["value_loss"]
            wrong = wrong_targets(critic, calls["gae"][-1])  # the critic may have its own lambda
            if args.value_norm != "none" and "targets_T" in critic[0].given:
                wrong = "" if wrong else f"the critic's targets are not normalized (--value_norm {args.value_norm})"
        if wrong:
            where = subject.first_place(("main", "6"), ("main", "7"), "main", "gae", "value_loss")
            return [Finding(2, f"{title}: critic", FAIL, f"{wrong} (step {step + 1})", where)]
    return []


def wrong_targets(critic: list[Call], estimates: Call) -> str:
    """Text on arguments of value_loss in a step that do not fit what gae was given and returned; else "".

    Each old value stands with the return of a token that has this value, and each token of the step is there.
    """
    names = ("values_T", "old_T", "targets_T")
    if not {*names} <= critic[0].given.keys() or "values_N" not in estimates.given:
        return ""
    known = estimates.given["values_N"].double(), estimates.returned[1].double()
    seen = torch.zeros(len(known[0]), dtype=torch.bool)
    for number, call in enumerate(critic):
        values, old, targets = (call.given[name].double().flatten() for name in names)
        if number == 0 and relative(values, old) > CLOSE:  # the critic has not been updated yet
            return "the critic's old values are not those of the critic before its update"
        apart = []
        for a, b in zip((old, targets), known, strict=True):
            largest = b.abs().max().clamp(min=1e-12)
            apart.append((a[:, None] - b[None]).abs() / largest)
        same = torch.maximum(*apart) <= CLOSE
        if not same.any(1).all():
            return "the critic's old values or targets are not the values and returns of their tokens"
        seen |= same.any(0)
    if not seen.all():
        return f"the critic learns nothing from {int((~seen).sum())} of {len(seen)} tokens"
    return ""


def check_backward(subject: Subject, oracle: Oracle) -> list[Finding]:
    """Compare the first optimizer step's gradient with that of the sum of token_loss times weights, in float64."""
    update = oracle.found.updates[0][0]
    args = oracle.args
    where = subject.first_place(("main", "7"), "main", "token_loss")
    counted = update.tokens["weights_T"].nan_to_num() != 0
    weighted = update.tokens["loss_T"] * update.tokens["weights_T"]
    total = weighted[counted].sum().item()
    findings = []
    if abs(update.loss - total) > CLOSE * max(abs(total), abs(update.loss)):
        text = f"main backpropagates {update.loss:.4g}, and the sum of token_loss times weights is {total:.4g}"
        findings.append(Finding(2, "loss in main", NOTE, text, where))
    plain = args.entropy_coef == 0 and "full_kl_T" not in update.tokens
    names = dict(oracle.model.named_parameters())
    recorded = {}
    for name, gradient in update.gradient.items():
        own_name = name.removeprefix("model.").removeprefix("module.")
        recorded[own_name] = gradient
    expected = expected_gradient(subject, oracle, update) if plain else {}
    shared = {name for name in expected if name in recorded}
    if not plain or not shared or len(shared) < len(names) - 1:
        return findings
    from_main = {name: recorded[name] for name in shared}
    by_hand = {name: expected[name] for name in shared}
    apart = gradients_apart(from_main, by_hand)
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


def expected_gradient(
    subject: Subject,
    oracle: Oracle,
    update: Update,
) -> dict[str, Tensor]:
    """Return the gradient of the sum of token_loss times weights over the recorded tokens, by plain forward passes."""
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
    total = (loss_T * known["weights_T"]).sum()
    slopes[counted] = torch.autograd.grad(total, known["logprobs_T"])[0]
    model = oracle.model
    weights = {name: weight.double() for name, weight in oracle.found.weights[0].items()}
    model.load_state_dict(weights, strict=False)
    model.zero_grad()
    samples = oracle.found.samples[0]
    for sample, (start, end) in zip(
        samples,
        itertools.pairwise(batching.token_offsets(samples)),
        strict=True,
    ):
        if not counted[start:end].any():
            continue
        ids = sample.response_ids.tolist()
        logprobs = fixed_samples.plain_logprobs(
            model,
            list(sample.prompt_ids),
            ids,
            oracle.args.temperature,
        )
        own = logprobs[torch.from_numpy(sample.own())]
        (own * slopes[start:end]).sum().backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

"""What is about KL estimators: the gradient each one really has, the words about it at the start, the coefficients.

    d = log pi - log ref      ratio = pi / old      (pi is trained, ref is frozen, old drew the samples; all in nats)

    name   value             slope of the value    expected gradient in the loss, on fresh samples (old = pi)
    k1     d                 1                     zero
    k2     d^2 / 2           d                     grad KL(pi||ref)
    k3     e^-d - 1 + d      1 - e^-d              grad KL(ref||pi), the forward KL
    k4     ratio d           ratio (d + 1)         grad KL(pi||ref), on stale samples too; noisy even at pi = ref
    abs    |d|               sign d                grad 2TV(pi,ref)
    full   sum_v pi_v d_v    (autograd)            grad KL(pi||ref), without sampling noise
    NAME+  that of NAME      ratio d               grad KL(pi||ref), on stale samples too

The function ``kl_value`` of a script has the values, those of Schulman 2020, http://joschu.net/blog/kl-approx.html. An
estimator with a good value need not have a good gradient: Tang & Munos 2506.09477, Liu et al. 2510.01555, Zhang et al.
2505.17508 (arXiv). One rule covers both placements on fresh samples: a loss f(d) descends sum_x ref phi(pi/ref) with
phi'(t) = f'(log t), and a reward -c(d) descends the same sum with phi'(t) = c(log t). The sum is a divergence only if
phi' increases, so a loss has to be convex in d and a reward term c has to increase in d; only k1 does (and k4, which is
k1 on fresh samples).

A + keeps any value and replaces its slope by ratio d. That is the slope of ratio k3 (DeepSeek-V3.2, 2512.02556), and it
is right on fresh and on stale samples. Every term in the loss is per token and leaves out how a token changes the KL of
later tokens; k1 in the reward, summed from each token to the end of the response, has the gradient of the sequence KL.

`python kl_estimators.py [SCRIPT]` computes and prints the table from the `token_loss` of SCRIPT (default: grpo.py), so
an edited copy, also one with an estimator of its own, shows what its loss does.
"""

import argparse
import dataclasses
import math
import runpy
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

LOGGED = ("k1", "k2", "k3", "k4", "abs")  # as kl/NAME in every run with a reference
ALIASES = {"kl": "k1", "kl1": "k1", "mse": "k2", "kl2": "k2", "low_var_kl": "k3", "kl3": "k3", "kl4": "k4"}


def estimators(script: ModuleType) -> list[str]:
    """Return the names of a script's estimators, without aliases and without those with a +."""
    return [name for name in get_args(script.KLEstimator) if name not in ALIASES]


def canonical_name(name: str) -> str:
    """Return what a name stands for: that of an alias, with the + that it has."""
    bare = name.removesuffix("+")
    return ALIASES.get(bare, bare) + name[len(bare) :]


def full_vocabulary_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Return KL(pi||ref) of [..., V] and [..., V] -> [...], in nats, differentiable in logits.

    Both logits must already be divided by the sampling temperature.
    """
    fp32 = torch.promote_types(logits.dtype, torch.float32)
    logp = logits.log_softmax(-1, dtype=fp32)
    ref = ref_logits.detach().log_softmax(-1, dtype=fp32)
    p = logp.exp()
    return (p * torch.where(p > 0, logp - ref, 0.0)).sum(-1)  # 0 log 0 = 0, for tokens masked by a logit of -inf


def rollout_kl(kl_N: Tensor, offsets: list[int], responses: list[int]) -> float:
    """Return the mean over these responses of the mean over their tokens, the input of verl's controller.

    kl_N: per token, in nats; response i is offsets[i]:offsets[i + 1].
    """
    means = [kl_N[offsets[i] : offsets[i + 1]].mean() for i in responses]
    return sum(torch.stack(means).tolist()) / len(means)  # waits for the GPU once, not once per response


class AdaptiveKLController:
    """A coefficient that is adapted so that the KL approaches a target: Ziegler et al. 2019, arXiv 1909.08593.

    target: in the unit of the KL that `update` gets. horizon: number of sequences over which a KL 10% above target
    raises coef by 10%; n_sequences / horizon is the paper's K_beta. All three numbers are above 0, and the horizon is
    above a fifth of the sequences of a step (runtime/arguments/checks.py), or coef could become 0.
    """

    def __init__(self, coef: float, target: float, horizon: float):
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, current_kl: float, n_sequences: int) -> float:
        """Adjust coef to the mean KL of the last n_sequences and return it; a KL that is not finite changes nothing."""
        if not math.isfinite(current_kl):
            return self.coef
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * n_sequences / self.horizon
        return self.coef


class KLCoefficients:
    """Coefficients of the KL in the loss and in the reward; 0 means no KL there. A controller may change one of them.

    given: (in the loss, in the reward). controller: changes that of the reward, or without a KL in the reward that of
    the loss.
    """

    def __init__(self, given: tuple[float, float], controller: AdaptiveKLController | None = None):
        self.given = given
        self.controller = controller
        self.in_reward = given[1] > 0

    @property
    def loss(self) -> float:
        """Coefficient of the KL in the loss."""
        return self.given[0] if self.controller is None or self.in_reward else self.controller.coef

    @property
    def reward(self) -> float:
        """Coefficient of the KL in the reward."""
        return self.given[1] if self.controller is None or not self.in_reward else self.controller.coef

    def update(self, reward_kl: float | None, loss_kl: float | None, sequences: int) -> None:
        """Adapt to the KL that was subtracted from the rewards, as verl does, or without it to k1 during the update.

        sequences: number of sequences of the step. A KL of None changes nothing.
        """
        found = reward_kl if self.in_reward else loss_kl
        if self.controller is not None and found is not None:
            self.controller.update(found, sequences)


# ------------------------------------------------------------------------------------------- what each setting means

# Names of the expected gradients. `table_row` computes them and finds the name.
ZERO = "zero"
REVERSE = "grad KL(pi||ref)"
FORWARD = "grad KL(ref||pi)"
TV = "grad 2TV(pi,ref)"
AWAY = "-grad KL(old||pi)"
AWAY_FROM_SAMPLER = "-grad KL(sampler||pi)"
GAP = "grad [KL(pi||ref) - KL(ref||pi)]"
LATE = "grad [KL(pi||ref) - KL(pi||old)]"
NONE = "not a KL gradient"

WHY = {
    ("loss", ZERO): "it adds noise and no pull toward the reference",
    ("loss", AWAY): (
        "it pushes the policy away from the sampler and ignores the reference, so a larger beta gives a larger KL"
    ),
    ("loss", FORWARD): "this is not the reverse KL that its value measures, and it is unbounded where pi << ref",
    ("loss", TV): "its size is the same near the reference as far from it, so it never settles",
    ("loss", NONE): "its value is that of a KL, its gradient is not",
    ("reward", ZERO): "it does not depend on which token is sampled, so it acts only through later tokens (use k1)",
    ("reward", GAP): "it has no pull near the reference and a push away where pi < ref, and can raise the KL (use k1)",
    ("reward", LATE): (
        "the penalty keeps its value from sampling while pi moves (use one optimizer step per batch, or the loss)"
    ),
    ("reward", NONE): (
        "it does not increase in d, so it also punishes tokens with pi < ref, and can raise the KL (use k1)"
    ),
}
WEIGHT_MISSING = "the weight old / sampler is missing (fix: --truncated_importance_sampling_ratio_cap 2)"


def kl_setting_message(script: ModuleType, args: Any) -> tuple[str, list[str]]:
    """Return a line that describes a run's KL, and a warning for each difference between its name and its effect.

    script: the training script, whose loss the expected gradients are computed from, by ``table_row``.
    """
    in_loss, in_reward = args.kl_coefficients
    names = {"loss": canonical_name(args.kl_estimator), "reward": canonical_name(args.kl_reward_estimator)}
    coefs = {"loss": in_loss, "reward": in_reward}
    places = [place for place in names if coefs[place] > 0]
    if not places:
        unused = args.beta > 0 and args.kl_placement == "none"
        warnings = ["KL: the placement is none, so beta has no effect"] if unused else []
        return "KL: none, " + ("only measured" if args.load_ref_policy else "no reference model"), warnings

    cap, mask = args.truncated_importance_sampling_ratio_cap, args.importance_sampling_mask
    bounds = ""  # within which the weight is old / sampler
    if cap and mask is None:
        bounds = f"old / sampler <= {cap:g}"
    elif mask is not None:
        bounds = f"{mask[0]:g} <= old / sampler <= {min(mask[1], cap or mask[1]):g}"
    stale = args.async_steps > 0  # in the first optimizer step of a batch already
    meanings = []
    warnings = []
    for place in places:
        name = names[place]
        term = f"{name} in the {place}"
        rows = {condition: table_row(script, place, name, condition) for condition in CONDITIONS}
        if stale and not bounds:
            cases = {"asynchronous": rows["unweighted"]}
        elif rows["fresh"].label == rows["stale"].label != NONE:
            cases = {"fresh and stale": rows["fresh"]}
        elif args.num_epochs * args.num_mini_batches == 1:
            cases = {"fresh": rows["fresh"]}
        else:
            cases = {"fresh": rows["fresh"], "stale": rows["stale"]}
        found = ", ".join(f"{row.meaning()} on {samples} samples" for samples, row in cases.items())
        if stale and bounds and (place, name) != ("loss", "full"):
            found += f", on asynchronous ones as well where {bounds}"
        moves = " (adaptive)" if args.kl_target is not None and place == places[-1] else ""
        meanings.append(f"{coefs[place]:g}{moves} x {term}: expected gradient {found}")
        for samples, row in cases.items():
            if row.label != REVERSE:
                why = WEIGHT_MISSING if samples == "asynchronous" else WHY[place, row.label]
                if place == "loss" and samples != "asynchronous":
                    why += f" (fix: --kl_estimator {name}+)"
                warnings.append(f"KL: {term}: {row.meaning()} on {samples} samples: {why}")
    if "reward" in places and names["reward"] == "k4":
        warnings.append("KL: k4 in the reward equals k1, because the ratio is 1 where the reward is computed")
    if "reward" in places and getattr(args, "kl_reward_norm", "") == "before_norm":  # PPO has no group statistics
        warnings.append(
            "KL: --kl_reward_norm before_norm: the group's std divides beta, and a group of equal rewards turns KL "
            "noise into full-size advantages"
        )
    return "KL: " + "; ".join(meanings), warnings


# ------------------------------------------------------------------------------------------------------ the table

# Logits of fixed policies over 5 tokens. Every expectation is a sum over the 5, in float64.
THETA = [0.5, -0.3, 1.2, 0.0, -1.0]
REF = [0.0, 0.4, 0.6, -0.9, 0.3]
OLD = [0.3, 0.1, 0.9, 0.4, -0.8]
CONDITIONS = {
    "fresh": "fresh samples: sampler = old = pi",
    "stale": "stale samples, from the second optimizer step of a batch: sampler = old, a reward as it was before it",
    "weighted": "asynchronous samples, weighted by old / sampler: old = pi in the first step; the sampler is behind",
    "unweighted": "the same without the weight",
}


def settings(script: ModuleType) -> list[tuple[str, str]]:
    """Return the (place, estimator) of every row of a script's table."""
    names = estimators(script)
    in_loss = [*names, *(f"{name}+" for name in names if name != "full")]
    return [("loss", name) for name in in_loss] + [("reward", name) for name in names]


def make_tokens(script: ModuleType, **known: Tensor | None):
    """Return the ``Tokens`` of a script with these fields, [T] each; its other fields are 0.

    Names that the script lacks are left out. Without full_kl_T it is None, and without response_T, a field of some
    variants, each token is a response of its own.
    """
    zero_T = torch.zeros_like(known["old_T"])
    given = {"full_kl_T": None, "response_T": torch.arange(zero_T.numel()).view_as(zero_T)} | known
    fields = dataclasses.fields(script.Tokens)
    return script.Tokens(**{field.name: given.get(field.name, zero_T) for field in fields})


def loss_term(
    script: ModuleType,
    logprobs: Tensor,
    old: Tensor,
    ref: Tensor,
    *,
    estimator: str,
    full_kl: Tensor | None = None,
    sampler: Tensor | None = None,
) -> Tensor:
    """Return the KL in the loss per token, in nats: the loss of tokens without advantage, at a coefficient of 1.

    It is what the ``token_loss`` of grpo.py, ppo.py or a copy adds to the loss, with the sign that it has there. All
    tensors share one shape. ``sampler``: with these log-probs each token has the weight old / sampler.
    """
    tokens = make_tokens(
        script,
        logprobs_T=logprobs,
        old_T=old,
        ref_T=ref,
        sampler_T=old if sampler is None else sampler,
        weights_T=torch.ones_like(old),
        full_kl_T=full_kl,
    )
    bounds = {} if sampler is None else {"truncated_importance_sampling_ratio_cap": math.inf}
    args = script.Args(beta=1.0, kl_estimator=estimator, **bounds)
    return script.token_loss(tokens, 1.0, args)[0]


class TableRow(NamedTuple):
    """Exact bias, variance and expected gradient of one KL setting, by enumeration."""

    value_bias: float
    value_sd: float
    label: str  # the name of its expected gradient
    cosine: float  # between its expected gradient and grad KL(pi||ref)
    gradient_sd: float  # of the gradient from one sample: the root of the trace of its covariance

    def meaning(self) -> str:
        """Return the label, for a gradient without a name with its cosine."""
        return f"{self.label} (cosine {self.cosine:+.2f} with grad KL(pi||ref))" if self.label == NONE else self.label


def table_row(script: ModuleType, place: str, estimator: str, condition: str) -> TableRow:
    """Return the row of one setting under one of CONDITIONS. ``script``: grpo, ppo, or a copy, whose loss is used."""
    theta = torch.tensor(THETA, dtype=torch.float64, requires_grad=True)
    sampler_logits = THETA if condition == "fresh" else OLD
    old_logits = OLD if condition == "stale" else THETA
    policies = torch.tensor([sampler_logits, old_logits, REF], dtype=torch.float64)
    sampler, old, ref = policies.log_softmax(-1)  # [5 tokens] each
    logp = theta.log_softmax(-1)
    pi = logp.exp()
    drawn = sampler.exp()
    weighted = condition == "weighted"
    if place == "loss":
        full_kl = full_vocabulary_kl(logp, ref).expand(5)
        drawn_by = sampler if weighted else None
        term = loss_term(script, logp, old, ref, estimator=estimator, full_kl=full_kl, sampler=drawn_by)
        value = term
    else:  # the policy gradient of a penalty that was fixed when the samples were drawn
        full = estimator == "full"
        kl = full_vocabulary_kl(old, ref).expand(5) if full else script.kl_value(estimator, old, old, ref)
        value = kl * (old - sampler).exp() if weighted else kl
        term = (logp - old).exp() * value

    def grad(x: Tensor) -> Tensor:
        return torch.autograd.grad(x, theta, retain_graph=True)[0]

    reverse = (pi * (logp - ref)).sum()
    forward = (ref.exp() * (ref - logp)).sum()
    named = {
        ZERO: 0 * logp.sum(),
        REVERSE: reverse,
        FORWARD: forward,
        TV: (pi - ref.exp()).abs().sum(),
        AWAY: (old.exp() * logp).sum(),
        AWAY_FROM_SAMPLER: (drawn * logp).sum(),
        GAP: reverse - forward,
        LATE: (pi * (old - ref)).sum(),
    }
    samples = torch.stack([grad(x) for x in term])  # [5 tokens, 5 logits]
    mean = drawn @ samples
    mean_value = drawn @ value
    label = NONE
    for name, objective in named.items():
        if torch.allclose(mean, grad(objective), rtol=0, atol=1e-10):
            label = name
            break
    cosine = 0.0 if label == ZERO else torch.cosine_similarity(mean, grad(reverse), dim=0).item()
    value_variance = drawn @ (value - mean_value) ** 2
    gradient_variance = drawn @ ((samples - mean) ** 2).sum(-1)
    return TableRow(
        value_bias=(mean_value - reverse).item(),
        value_sd=(value_variance**0.5).item(),
        label=label,
        cosine=cosine,
        gradient_sd=(gradient_variance**0.5).item(),
    )


def print_table(script: ModuleType) -> None:
    """Print the row of every setting under every condition."""
    for condition, title in CONDITIONS.items():
        print(f"\n{title}")
        print("place   name      value bias    sd  expected gradient                 cosine    sd")
        for setting in settings(script):
            row = table_row(script, *setting, condition)
            print("{:8}{:8}{:+12.4f}{:6.3f}  {:33}{:+7.3f}{:6.3f}".format(*setting, *row))


def main(words: list[str]) -> None:
    """Print the table of a script's loss."""
    parser = argparse.ArgumentParser(description="Print the table of all KL settings, computed from a script's loss.")
    default = Path(__file__).resolve().with_name("grpo.py")
    parser.add_argument("script", nargs="?", type=Path, default=default, help="grpo.py, ppo.py, or an edited copy")
    path = parser.parse_args(words).script
    if not path.is_file():
        parser.error(f"{path}: no such file; pass grpo.py, ppo.py, or an edited copy")
    sys.path.insert(0, str(path.resolve().parent))  # where Python looks first when it runs the script
    script = ModuleType("script")
    vars(script).update(runpy.run_path(str(path), run_name="script"))
    missing = [
        name for name in ("Args", "KLEstimator", "Tokens", "kl_value", "token_loss") if not hasattr(script, name)
    ]
    if missing:
        parser.error(f"{path} does not define {', '.join(missing)}; pass grpo.py, ppo.py, or an edited copy")
    print_table(script)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    main(sys.argv[1:])

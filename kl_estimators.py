"""KL(pi||ref) from sampled tokens: six estimators, in the loss or in the reward, and the gradient that each really has.

    d = log pi - log ref      ratio = pi / old      (pi is trained, ref is frozen, old drew the samples; all in nats)

    name   value             slope of the value    expected gradient in the loss, on fresh samples (old = pi)
    k1     d                 1                     zero
    k2     d^2 / 2           d                     grad KL(pi||ref)
    k3     e^-d - 1 + d      1 - e^-d              grad KL(ref||pi), the forward KL
    k4     ratio d           ratio (d + 1)         grad KL(pi||ref), on stale samples too; noisy even at pi = ref
    abs    |d|               sign d                grad 2TV(pi,ref)
    full   sum_v pi_v d_v    (autograd)            grad KL(pi||ref), without sampling noise

Values: Schulman 2020, http://joschu.net/blog/kl-approx.html. A good value need not have a good gradient: Tang & Munos
2506.09477, Liu et al. 2510.01555, Zhang et al. 2505.17508 (arXiv). One rule for both, on fresh samples: a loss f(d)
descends sum_x ref phi(pi/ref) with phi'(t) = f'(log t), and a reward -c(d) the same with phi'(t) = c(log t). That is a
divergence only if phi' increases: a loss has to be convex in d, a reward term c increasing in d, and only k1 is.
`unbiased` keeps any value and takes the slope ratio d, that of ratio k3 (DeepSeek-V3.2, 2512.02556), fresh or stale.
In the loss all is per token and omits what a token does to the KL of later ones; k1 in the reward, summed from a token
to the end, has the gradient of the sequence KL. `python kl_estimators.py` computes the table, exactly, over 5 tokens.
"""

import math

import torch
from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3", "k4", "abs", "full")
ALIASES = {"kl": "k1", "kl1": "k1", "mse": "k2", "kl2": "k2", "low_var_kl": "k3", "kl3": "k3", "kl4": "k4"}
EXP_LIMIT = 20.0  # naive exponents stop here: value and slope keep their last size, so no slope dies or flips
RATIO_CLIP = D_CLIP = 10.0  # bounds of the unbiased slope, which is exact while ratio <= 10 and |d| <= 10


def canonical_name(name: str) -> str:
    """The name in ESTIMATORS that `name` means. Raises ValueError, listing the names, for any other."""
    name = ALIASES.get(name, name)
    if name not in ESTIMATORS:
        raise ValueError(f"unknown KL estimator {name!r}: use {', '.join(ESTIMATORS)} (or {', '.join(ALIASES)})")
    return name


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()  # before subtracting: bf16 log-probs near -11 are 0.06 apart


def _masked(mask: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Upcast, and 0 where mask is False: before any exp, so that no masked NaN comes back in the backward pass."""
    if any(x is None for x in tensors):
        raise ValueError("KL without reference log-probs (estimator full: without full_kl); zeros cannot replace them")
    if mask.dtype != torch.bool or any(x.shape != mask.shape for x in tensors):
        got = ", ".join(str(tuple(x.shape)) for x in (mask, *tensors))
        raise ValueError(f"KL needs a bool mask and equal shapes, got {mask.dtype} and {got}")
    return [torch.where(mask, _upcast(x), 0.0) for x in tensors]


@torch.no_grad()
def _values_and_slopes(logp: Tensor, old: Tensor, ref: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Each sampled estimator's value, and the derivative of that value with respect to logp (ref, old constant)."""
    d = logp - ref
    d_exp = d.clamp(min=-EXP_LIMIT)
    ratio = (logp - old).clamp(-EXP_LIMIT, EXP_LIMIT).exp()
    return {
        "k1": (d, torch.ones_like(d)),
        "k2": (d * d / 2, d),
        "k3": (torch.expm1(-d_exp) + d_exp, -torch.expm1(-d_exp)),  # expm1: float32 exp(-d) - 1 + d is < 0 near d = 0
        "k4": (ratio * d, ratio * (d + 1)),
        "abs": (d.abs(), d.sign()),
        "unbiased": (d, ratio.clamp(max=RATIO_CLIP) * d.clamp(-D_CLIP, D_CLIP)),  # a slope for each value above
    }


def kl_loss(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor,
    *, estimator: str, gradient: str = "naive", full_kl: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """KL term of the loss, per token, in nats; any shape, the same for all. 0, and no gradient, where mask is False.

    gradient: naive (the formula as written, differentiated) or unbiased (same value, gradient of KL(pi||ref)). full is
    exact either way and takes full_kl, from `full_vocabulary_kl`. Only logprobs or full_kl gets a gradient. float32 out
    (float64 if float64 in). ValueError: unknown name, no ref_logprobs or full_kl, unequal shapes, mask not bool.
    """
    name = canonical_name(estimator)
    if gradient not in ("naive", "unbiased"):
        raise ValueError(f"unknown KL gradient {gradient!r}: use naive, unbiased")
    if name == "full":
        return _masked(mask, full_kl)[0]
    logp, old, ref = _masked(mask, logprobs, old_logprobs, ref_logprobs)
    terms = _values_and_slopes(logp, old, ref)
    value, slope = terms[name][0], terms[name if gradient == "naive" else "unbiased"][1]
    return value + slope * (logp - logp.detach())  # the bracket is 0, its gradient that of log pi


@torch.no_grad()
def kl_reward(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, estimator: str, full_kl: Tensor | None = None
) -> Tensor:
    """What the reward loses, before beta: per token, nats, no gradient, 0 where mask is False. Errors as in `kl_loss`.

    logprobs are those of the policy that drew the samples, so ratio is 1 and k4 is k1.
    """
    name = canonical_name(estimator)
    if name == "full":
        return _masked(mask, full_kl)[0]
    logp, ref = _masked(mask, logprobs, ref_logprobs)
    return _values_and_slopes(logp, logp, ref)[name][0]


@torch.no_grad()
def kl_values(logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """For the log: k1, k2, k3, k4, abs per token, nats, no gradient, 0 where mask is False. Errors as in `kl_loss`."""
    terms = _values_and_slopes(*_masked(mask, logprobs, old_logprobs, ref_logprobs))
    return {name: terms[name][0] for name in ESTIMATORS if name != "full"}


def full_vocabulary_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(pi||ref): [..., V], [..., V] -> [...], nats, differentiable in logits. Both at the sampling temperature."""
    logp, ref = _upcast(logits).log_softmax(-1), _upcast(ref_logits).detach().log_softmax(-1)
    p = logp.exp()
    return (p * torch.where(p > 0, logp - ref, 0.0)).sum(-1)  # 0 log 0 = 0, for tokens barred by a logit of -inf


class AdaptiveKLController:
    """beta that steers the KL to a target: Ziegler et al. 2019, arXiv 1909.08593; n / horizon stands for their K_beta.

    target: nats per sequence (sum over its tokens, mean over sequences). horizon: sequences in which an error of +10%
    raises beta by 10%. Raises ValueError unless coef (the first beta), target and horizon are > 0.
    """

    def __init__(self, coef: float, target: float, horizon: float):
        if not (coef > 0 and target > 0 and horizon > 0):
            raise ValueError(f"adaptive KL needs beta, target, horizon > 0, got {coef}, {target}, {horizon}")
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, current_kl: float, n_sequences: int) -> float:
        """Move coef by the KL of the last n_sequences; return it. ValueError: KL not finite, or coef would be <= 0."""
        factor = 1 + min(max(current_kl / self.target - 1, -0.2), 0.2) * n_sequences / self.horizon
        if not (math.isfinite(current_kl) and factor > 0):
            raise ValueError(f"adaptive KL: {current_kl} nats, {n_sequences} sequences take beta times {factor:g}")
        self.coef *= factor
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state["coef"])


# The expected gradient of each setting: (on fresh samples, on stale ones). `table_row` finds the same by computing it.
ZERO, REVERSE, FORWARD, TV = "zero", "grad KL(pi||ref)", "grad KL(ref||pi)", "grad 2TV(pi,ref)"
AWAY, GAP, LATE = "-grad KL(old||pi)", "grad [KL(pi||ref) - KL(ref||pi)]", "grad [KL(pi||ref) - KL(pi||old)]"
NONE = "not a KL gradient"
RIGHT, WRONG = (REVERSE, REVERSE), (NONE, NONE)
NAIVE_LOSS = (ZERO, AWAY), (REVERSE, NONE), (FORWARD, NONE), RIGHT, (TV, NONE), RIGHT  # in the order of ESTIMATORS
REWARD = (REVERSE, LATE), WRONG, (GAP, NONE), (REVERSE, LATE), WRONG, (ZERO, ZERO)
WHY = {
    ("loss", ZERO): "noise without a pull, nothing holds the policy near the reference (unbiased does)",
    ("loss", AWAY): "a push away from the sampler that knows no reference: larger beta, larger KL (unbiased cures it)",
    ("loss", FORWARD): "not the reverse KL that its value measures; unbounded where pi << ref (unbiased cures it)",
    ("loss", TV): "as large near the reference as far from it, so it never settles (unbiased cures it)",
    ("loss", NONE): "the importance ratio is missing (unbiased has it)",
    ("reward", ZERO): "the same whichever token is drawn, so it acts only through later tokens (use k1)",
    ("reward", GAP): "no pull near the reference, and a push away where pi < ref: can raise the KL (use k1)",
    ("reward", LATE): "the penalty keeps its value at sampling while pi moves (use one step a batch, or the loss)",
    ("reward", NONE): "not increasing in d, so it punishes tokens with pi < ref too: can raise the KL (use k1)",
}


def kl_setting_message(
    placement: str, estimator: str, gradient: str, beta: float, optimizer_steps_per_batch: int, kl_reward_norm: str
) -> tuple[str, list[str]]:
    """One line on what the setting means, and one for each way in which it does not do what its name says.

    placement: none, loss, reward, both. kl_reward_norm: outside or inside the group statistics (no groups: outside).
    Samples are stale from the second optimizer step of a batch on. Raises ValueError: unknown names, beta < 0.
    """
    name = canonical_name(estimator)
    known = placement in ("none", "loss", "reward", "both") and gradient in ("naive", "unbiased")
    if not (known and kl_reward_norm in ("outside", "inside") and beta >= 0):
        raise ValueError(f"no such KL setting: {placement=}, {gradient=}, {kl_reward_norm=}, {beta=}")
    if placement == "none" or beta == 0:
        return "KL: none, no reference model", ["KL: placement none, so beta has no effect"] if beta else []
    means, warnings = [], []
    for place in ("loss", "reward") if placement == "both" else (placement,):
        what = f"{name} in the {place}" + (f", {gradient}" if place == "loss" and name != "full" else "")
        fresh, stale = (NAIVE_LOSS if place == "loss" else REWARD)[ESTIMATORS.index(name)]
        if place == "loss" and gradient == "unbiased":
            fresh, stale = RIGHT
        when = {fresh: "fresh", stale: "stale"} if optimizer_steps_per_batch > 1 else {fresh: "fresh"}
        when = when if fresh != stale else {fresh: "fresh and stale"}
        gradients = ", ".join(f"{g} on {w} samples" for g, w in when.items())
        means.append(f"{beta:g} x {what}: expected gradient {gradients}")
        warnings += [f"KL: {what}: {g} on {w} samples: {WHY[place, g]}" for g, w in when.items() if g != REVERSE]
    if placement != "loss" and name == "k4":
        warnings.append("KL: k4 in the reward is k1: ratio is 1 where the reward is taken")
    if placement != "loss" and kl_reward_norm == "inside":
        warnings.append("KL: norm inside: the group's std divides beta; equal rewards leave KL noise at full size")
    return "KL: " + "; ".join(means), warnings


# The table: fixed policies over 5 tokens; every expectation is a sum over the 5, in float64.
THETA, REF, OLD = [0.5, -0.3, 1.2, 0.0, -1.0], [0.0, 0.4, 0.6, -0.9, 0.3], [0.3, 0.1, 0.9, 0.4, -0.8]  # logits
SETTINGS = [("loss", name, gradient) for gradient in ("naive", "unbiased") for name in ESTIMATORS[:-1]]
SETTINGS += [("loss", "full", "naive"), *(("reward", name, "-") for name in ESTIMATORS)]


def table_row(place: str, estimator: str, gradient: str, fresh: bool) -> tuple[float, float, str, float, float]:
    """(bias of the value, its sd, name of the expected gradient, its cosine with REVERSE, sd of one sample of it)."""
    theta = torch.tensor(THETA, dtype=torch.float64, requires_grad=True)
    logits = theta, *torch.tensor([THETA if fresh else OLD, REF], dtype=torch.float64)
    logp, old, ref = (x.log_softmax(-1) for x in logits)  # [5 tokens]
    pi, weights, mask = logp.exp(), old.exp(), torch.ones(5, dtype=torch.bool)
    if place == "loss":
        full_kl = full_vocabulary_kl(logp, ref).expand(5)
        value = term = kl_loss(logp, old, ref, mask, estimator=estimator, gradient=gradient, full_kl=full_kl)
    else:  # policy gradient of a penalty that was fixed when the samples were drawn
        value = kl_reward(old, ref, mask, estimator=estimator, full_kl=full_vocabulary_kl(old, ref).expand(5))
        term = (logp - old).exp() * value

    def grad(x: Tensor) -> Tensor:
        return torch.autograd.grad(x, theta, retain_graph=True)[0]

    reverse, forward = (pi * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum()
    known = {ZERO: 0 * logp.sum(), REVERSE: reverse, FORWARD: forward, TV: (pi - ref.exp()).abs().sum()}
    known |= {AWAY: (weights * logp).sum(), GAP: reverse - forward, LATE: (pi * (old - ref)).sum()}
    samples = torch.stack([grad(x) for x in term])  # [5 tokens, 5 logits]
    mean, mean_value = weights @ samples, weights @ value
    label = next((name for name, x in known.items() if torch.allclose(mean, grad(x), rtol=0, atol=1e-10)), NONE)
    cosine = 0.0 if label == ZERO else torch.cosine_similarity(mean, grad(reverse), dim=0).item()
    sd_value, sd_grad = (weights @ (value - mean_value) ** 2) ** 0.5, (weights @ ((samples - mean) ** 2).sum(-1)) ** 0.5
    return (mean_value - reverse).item(), sd_value.item(), label, cosine, sd_grad.item()


def print_table() -> None:
    for title, fresh in ("fresh samples", True), ("stale samples, a reward as it was when they were drawn", False):
        print(f"\n{title}\nplace   name  gradient  value bias    sd  expected gradient                 cosine    sd")
        for setting in SETTINGS:
            row = setting + table_row(*setting, fresh)
            print("{:8}{:6}{:9}{:+11.4f}{:6.3f}  {:33}{:+7.3f}{:6.3f}".format(*row))


if __name__ == "__main__":
    print_table()

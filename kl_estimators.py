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
to the end, has the gradient of the sequence KL. Run the file for the table, computed; with --demo, for an experiment.
"""

import argparse
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


def _masked(mask: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """fp32 before subtracting (bf16 log-probs near -11 are 0.06 apart); 0 where mask is False before any exp (NaN)."""
    if any(x is None for x in tensors):
        raise ValueError("KL without reference log-probs (estimator full: without full_kl); zeros cannot replace them")
    if mask.dtype != torch.bool or any(x.shape != mask.shape for x in tensors):
        got = ", ".join(str(tuple(x.shape)) for x in (mask, *tensors))
        raise ValueError(f"KL needs a bool mask and equal shapes, got {mask.dtype} and {got}")
    return [torch.where(mask, x.to(torch.promote_types(x.dtype, torch.float32)), 0.0) for x in tensors]


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
    fp32 = torch.promote_types(logits.dtype, torch.float32)
    logp, ref = logits.log_softmax(-1, dtype=fp32), ref_logits.detach().log_softmax(-1, dtype=fp32)
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


# The expected gradient of each setting: (on fresh samples, on stale ones). `table_row` finds the same by computing it.
ZERO, REVERSE, FORWARD, TV = "zero", "grad KL(pi||ref)", "grad KL(ref||pi)", "grad 2TV(pi,ref)"
AWAY, GAP, LATE = "-grad KL(old||pi)", "grad [KL(pi||ref) - KL(ref||pi)]", "grad [KL(pi||ref) - KL(pi||old)]"
NONE, RIGHT = "not a KL gradient", (REVERSE, REVERSE)
NAIVE_LOSS = (ZERO, AWAY), (REVERSE, NONE), (FORWARD, NONE), RIGHT, (TV, NONE), RIGHT  # in the order of ESTIMATORS
REWARD = (REVERSE, LATE), (NONE, NONE), (GAP, NONE), (REVERSE, LATE), (NONE, NONE), (ZERO, ZERO)
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

    kl_reward_norm: outside or inside the group statistics. Samples are stale from the second optimizer step of a batch
    on. Raises ValueError: unknown names, beta < 0.
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
        rows = REWARD if place == "reward" else NAIVE_LOSS if gradient == "naive" else (RIGHT,) * len(ESTIMATORS)
        fresh, stale = rows[ESTIMATORS.index(name)]
        when = [(fresh, "fresh and stale")] if fresh == stale else [(fresh, "fresh"), (stale, "stale")]
        when = when[:optimizer_steps_per_batch]
        means.append(f"{beta:g} x {what}: expected gradient " + ", ".join(f"{g} on {w} samples" for g, w in when))
        warnings += [f"KL: {what}: {g} on {w} samples: {WHY[place, g]}" for g, w in when if g != REVERSE]
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
            print("{:8}{:6}{:9}{:+11.4f}{:6.3f}  {:33}{:+7.3f}{:6.3f}".format(*setting, *table_row(*setting, fresh)))


# The experiment of --demo: GRPO on tables, so small that the KL of a whole sequence is known exactly. 8 groups of 8 a
# step, clip 0.2, gradient norm 1. pi starts at ref. Reward 1: two of a response's 8 tokens are the prompt's own.
CURVES, BETAS = [*((name, "naive") for name in ("k1", "k2", "k3", "k4")), ("k3", "unbiased")], (0.1, 0.3, 1.0)


def toy_grpo(
    settings: list[tuple[str, str, float]], *, seeds: int = 5, steps: int = 100, mini_batches: int = 4, epochs: int = 4,
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam, lr: float = 0.02, task: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A run for each (estimator, gradient, beta in the loss) and seed -> the exact KL of a sequence in nats, the mean
    reward of the last batch, both [settings, seeds], and log pi [runs, 4 prompts, 8 places, 8 tokens before, 8 tokens].
    """
    rng, copies, runs = torch.Generator().manual_seed(0), len(settings), len(settings) * seeds
    ref = torch.randn(seeds, 4, 8, 8, 8, generator=rng).log_softmax(-1).repeat(copies, 1, 1, 1, 1)
    run, prompt, place = torch.arange(runs)[:, None], torch.arange(64) // 16, torch.arange(8)
    wanted = torch.randint(8, (seeds, 4), generator=rng).repeat(copies, 1)[:, prompt, None]  # [runs, 64, 1]
    table = ref.clone().requires_grad_()
    stepper = optimizer([table], lr=lr)
    for _ in range(steps):
        sampler, tokens = table.detach().log_softmax(-1), torch.zeros(runs, 64, 9, dtype=torch.long)  # begins with a 0
        for t in range(8):
            drawn = torch.rand(seeds, 64, 1, generator=rng).repeat(copies, 1, 1)
            tokens[..., t + 1] = (sampler[run, prompt, t, tokens[..., t]].exp().cumsum(-1) < drawn).sum(-1).clamp(max=7)
        at = run[..., None], prompt[:, None], place, tokens[..., :-1], tokens[..., 1:]  # of [runs, 64, 8] log-probs
        rewards = ((tokens[..., 1:] == wanted).sum(-1) >= 2).view(runs, 8, 8) * float(task)
        advantages = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-6)
        order = (torch.randperm(8, generator=rng) for _ in range(epochs))  # of the groups; 8 samples each
        for rows in ((g[:, None] * 8 + place).flatten() for x in order for g in x.chunk(mini_batches)):
            logp, old, ref_logp = (x[at][:, rows] for x in (table.log_softmax(-1), sampler, ref))
            ratio, a = (logp - old).exp(), advantages.view(runs, 64, 1)[:, rows]
            loss = torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.2) * a)
            for (name, gradient, beta), part in zip(settings, torch.arange(runs).chunk(copies), strict=True):
                of_part = logp[part], old[part], ref_logp[part], torch.ones_like(old[part], dtype=torch.bool)
                loss[part] += beta * kl_loss(*of_part, estimator=name, gradient=gradient)
            grad = torch.autograd.grad(loss.mean((1, 2)).sum(), table)[0]
            table.grad = grad / grad.flatten(1).norm(dim=1).clamp(min=1).view(-1, 1, 1, 1, 1)
            stepper.step()
    logp, kl, before = table.detach().log_softmax(-1), torch.zeros(runs, 4), torch.eye(8)[0].expand(runs, 4, 8)
    for t in range(8):  # the KL of each place, averaged over the law of the token before it
        kl += (before * full_vocabulary_kl(logp[:, :, t], ref[:, :, t])).sum(-1)
        before = (before[..., None] * logp[:, :, t].exp()).sum(-2)
    return kl.mean(-1).view(copies, seeds), rewards.mean((1, 2)).view(copies, seeds), logp


def demo(picture: str) -> bool:
    """Print and draw the KL over beta; True if more beta means more KL with k1 as written, and less with the others."""
    import matplotlib.pyplot as plt

    settings = [("k1", "naive", 0.0), *((*curve, beta) for curve in CURVES for beta in BETAS)]
    (kl, success, _), passed = toy_grpo(settings), True  # [settings, seeds]
    print(f"\nKL of a sequence, mean and sd of {kl.shape[1]} seeds, and the share of solved problems")
    for i, (name, gradient) in enumerate(CURVES):
        at = [0, 3 * i + 1, 3 * i + 2, 3 * i + 3]  # beta 0, then BETAS
        none, _, some, much = kl[at]
        more = (much > 1.3 * none).all() and ((none < some) & (some < much)).sum() >= 4
        passed &= bool(more if name == "k1" else ((some < 0.6 * none) & (much < 0.25 * none)).all())
        for j, beta in zip(at, (0, *BETAS), strict=True):
            print(
                f"{name} {gradient:9} beta {beta:<4}{kl[j].mean():6.2f} +- {kl[j].std():.2f}  {success[j].mean():.2f}"
            )
        plt.errorbar((0, *BETAS), kl[at].mean(1), kl[at].std(1), label=f"{name} {gradient}")
    plt.xlabel("beta"), plt.ylabel("KL of a sequence (nats)"), plt.legend(), plt.savefig(picture, dpi=120)
    print(f"{'PASS' if passed else 'FAIL'}: with k1 more beta, more KL; with the others less; drawn in {picture}")
    return passed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prints the table.")
    parser.add_argument("--demo", metavar="PNG", nargs="?", const="docs/kl_demo.png", help="also train small tables")
    picture = parser.parse_args().demo
    print_table()
    raise SystemExit(0 if picture is None or demo(picture) else 1)

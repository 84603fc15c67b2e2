"""Train policies that are tables with each KL estimator, so small that the exact KL of a whole sequence is known.

    python studies/kl_demo.py                    20 seconds; prints the numbers, draws kl_demo.png
    python studies/kl_demo.py --output kl.png

The exit code is 0 if k1 in the loss raises the KL with beta and every other estimator lowers it. Each run is GRPO: per
step 8 groups of 8 responses, ratio clip 0.2, gradient norm clip 1, 4 epochs of 4 mini-batches. The policy starts at the
reference. A response of 8 tokens earns 1 if at least two of them are the token that its prompt wants.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

import grpo
from kl_estimators import full_vocabulary_kl, loss_term

PROMPTS = 4
LENGTH = 8  # tokens per response
VOCABULARY = 8
GROUPS = 8  # per step: two of each prompt
GROUP_SIZE = 8
RESPONSES = GROUPS * GROUP_SIZE

CURVES = [
    ("k1", "naive"),
    ("k2", "naive"),
    ("k3", "naive"),
    ("k4", "naive"),
    ("k3", "unbiased"),
]
BETAS = [0.1, 0.3, 1.0]
MARKS = [  # of the curves
    ("o", "#D55E00"),
    ("s", "#0072B2"),
    ("^", "#E69F00"),
    ("D", "#009E73"),
    ("v", "#000000"),
]


def sample(sampler: Tensor, prompt: Tensor, seeds: int, rng: torch.Generator) -> Tensor:
    """Responses that start from token 0: log-probs [runs, prompts, place, token before, token] -> [runs, 64, 9].

    Runs that differ only in their setting share their random numbers.
    """
    runs = len(sampler)
    run = torch.arange(runs)[:, None]
    tokens = torch.zeros(runs, RESPONSES, LENGTH + 1, dtype=torch.long)
    for t in range(LENGTH):
        before = tokens[..., t]
        uniform = torch.rand(seeds, RESPONSES, 1, generator=rng)
        uniform = uniform.repeat(runs // seeds, 1, 1)
        cumulative = sampler[run, prompt, t, before].exp().cumsum(-1)
        drawn = (cumulative < uniform).sum(-1)
        tokens[..., t + 1] = drawn.clamp(max=VOCABULARY - 1)
    return tokens


def logprobs_of(tokens: Tensor, table: Tensor, prompt: Tensor) -> Tensor:
    """Log-probs of sampled tokens [runs, 64, 9] in a table of log-probs -> [runs, 64, 8]."""
    run = torch.arange(len(table))[:, None, None]
    place = torch.arange(LENGTH)
    before = tokens[..., :-1]
    after = tokens[..., 1:]
    return table[run, prompt[:, None], place, before, after]


def group_advantages(tokens: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards [runs, 8 groups, 8] and standardized advantages [runs, 64, 1] of responses [runs, 64, 9]."""
    responses = tokens[..., 1:]
    hits = (responses == wanted).sum(-1)
    solved = (hits >= 2).float()
    rewards = solved.view(-1, GROUPS, GROUP_SIZE)
    mean = rewards.mean(-1, keepdim=True)
    std = rewards.std(-1, keepdim=True)
    advantages = (rewards - mean) / (std + 1e-6)
    advantages = advantages.view(-1, RESPONSES, 1)
    return rewards, advantages


def mini_batch_rows(epochs: int, mini_batches: int, rng: torch.Generator) -> list[Tensor]:
    """Return the responses of each optimizer step: whole groups, in a new order each epoch."""
    first_of_group = torch.arange(GROUPS)[:, None] * GROUP_SIZE
    responses = first_of_group + torch.arange(GROUP_SIZE)  # [groups, group size]
    parts = []
    for _ in range(epochs):
        order = torch.randperm(GROUPS, generator=rng)
        for groups in order.chunk(mini_batches):
            parts.append(responses[groups].flatten())
    return parts


def sequence_kl(logp: Tensor, ref: Tensor) -> Tensor:
    """Return the exact KL of a sequence in nats, mean over prompts: [runs, prompts, place, before, token] -> [runs]."""
    runs = len(logp)
    kl = torch.zeros(runs, PROMPTS)
    start = torch.eye(VOCABULARY)[0]
    before = start.expand(runs, PROMPTS, VOCABULARY)  # distribution of the token before this place
    for t in range(LENGTH):
        here = logp[:, :, t]
        ref_here = ref[:, :, t]
        next_kl = full_vocabulary_kl(here, ref_here)
        kl += (before * next_kl).sum(-1)
        joint = before[..., None] * here.exp()
        before = joint.sum(-2)
    return kl.mean(-1)


def toy_grpo(
    settings: list[tuple[str, str, float]],
    *,
    seeds: int = 5,
    steps: int = 100,
    mini_batches: int = 4,
    epochs: int = 4,
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
    lr: float = 0.02,
    task: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Train one table for each (estimator, gradient, beta in the loss) of settings and each seed, all at once.

    Returns the exact KL of a sequence in nats and the mean reward of the last batch, both [settings, seeds], and
    log pi [runs, 4 prompts, 8 places, 8 tokens before, 8 tokens], runs being settings x seeds. task=False: no reward.
    """
    rng = torch.Generator().manual_seed(0)
    copies = len(settings)
    runs = copies * seeds
    shape = (seeds, PROMPTS, LENGTH, VOCABULARY, VOCABULARY)
    ref = torch.randn(shape, generator=rng).log_softmax(-1)
    ref = ref.repeat(copies, 1, 1, 1, 1)
    responses_per_prompt = RESPONSES // PROMPTS
    prompt = torch.arange(RESPONSES) // responses_per_prompt
    wanted = torch.randint(VOCABULARY, (seeds, PROMPTS), generator=rng)
    wanted = wanted.repeat(copies, 1)[:, prompt, None]  # [runs, 64, 1]
    if not task:
        wanted = torch.full_like(wanted, -1)  # no token is wanted
    runs_of_setting = torch.arange(runs).chunk(copies)
    table = ref.clone().requires_grad_()
    stepper = optimizer([table], lr=lr)
    for _ in range(steps):
        sampler = table.detach().log_softmax(-1)
        tokens = sample(sampler, prompt, seeds, rng)
        rewards, advantages = group_advantages(tokens, wanted)
        for rows in mini_batch_rows(epochs, mini_batches, rng):
            policy = table.log_softmax(-1)
            logp = logprobs_of(tokens, policy, prompt)[:, rows]
            old = logprobs_of(tokens, sampler, prompt)[:, rows]
            ref_logp = logprobs_of(tokens, ref, prompt)[:, rows]
            ratio = (logp - old).exp()
            clipped = ratio.clamp(0.8, 1.2)
            a = advantages[:, rows]
            loss = torch.maximum(-ratio * a, -clipped * a)
            for setting, own in zip(settings, runs_of_setting, strict=True):
                name, gradient, beta = setting
                places = (logp[own], old[own], ref_logp[own])
                loss[own] += beta * loss_term(grpo, *places, estimator=name, gradient=gradient)
            loss_of_run = loss.mean((1, 2))
            grad = torch.autograd.grad(loss_of_run.sum(), table)[0]
            norm = grad.flatten(1).norm(dim=1)  # each run is clipped on its own
            table.grad = grad / norm.clamp(min=1).view(-1, 1, 1, 1, 1)
            stepper.step()
    logp = table.detach().log_softmax(-1)
    kl = sequence_kl(logp, ref)
    success = rewards.mean((1, 2))
    return kl.view(copies, seeds), success.view(copies, seeds), logp


def behaves(name: str, kl: Tensor) -> bool:
    """Return True if the KL [beta 0 and BETAS, seeds] of one estimator moves with beta as expected."""
    none, _, some, much = kl
    if name != "k1":
        lower = (some < 0.6 * none) & (much < 0.25 * none)
        return bool(lower.all())
    ordered = (none < some) & (some < much)
    higher = much > 1.3 * none
    return bool(higher.all() and ordered.sum() >= 4)  # of 5 seeds


def demo(picture: str) -> bool:
    """Print and draw the KL over beta; True if more beta means more KL with k1 as written, and less with the others."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    settings = [("k1", "naive", 0.0)]  # without KL the estimator does not matter
    for name, gradient in CURVES:
        for beta in BETAS:
            setting = (name, gradient, beta)
            settings.append(setting)
    kl, success, _ = toy_grpo(settings)  # [settings, seeds]
    seeds = kl.shape[1]
    print(f"KL of a sequence in nats, mean and sd of {seeds} seeds, and the fraction of solved problems")
    passed = True
    betas = [0, *BETAS]
    for i, (name, gradient) in enumerate(CURVES):
        first = 1 + i * len(BETAS)
        last = first + len(BETAS)
        rows = [0, *range(first, last)]
        passed = passed and behaves(name, kl[rows])
        for row, beta in zip(rows, betas, strict=True):
            mean = kl[row].mean()
            sd = kl[row].std()
            solved = success[row].mean()
            print(f"{name} {gradient:9} beta {beta:<4}{mean:6.2f} +- {sd:.2f}  {solved:.2f}")
        means = kl[rows].mean(1)
        sds = kl[rows].std(1)
        places = [beta + 0.008 * (i - len(CURVES) / 2) for beta in betas]  # keeps bars that coincide apart
        marker, color = MARKS[i]
        axis.errorbar(
            places,
            means,
            sds,
            label=f"{name} {gradient}",
            marker=marker,
            ms=4,
            color=color,
            capsize=2,
        )
    axis.set_xlabel("beta")
    axis.set_ylabel("KL of a sequence (nats), mean and sd over seeds")
    figure.legend(loc="outside upper center", ncols=len(CURVES), fontsize=8)
    figure.savefig(picture, dpi=120)
    verdict = "PASS" if passed else "FAIL"
    print(f"{verdict}: with k1 more beta means more KL, with the others less; drawn in {picture}")
    return passed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train small tables with each KL estimator and draw their KL.")
    parser.add_argument("--output", metavar="PNG", default="kl_demo.png")
    args = parser.parse_args()
    passed = demo(args.output)
    raise SystemExit(0 if passed else 1)

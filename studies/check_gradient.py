"""Part 4 of scripts/check.py: the gradient of the complete loss of a tiny model against finite differences."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from check_subject import FAIL, OK, Finding, Subject
from torch import Tensor

from kl_estimators import make_tokens
from runtime.data.samples import Sample

STEPS = (1e-2, 1e-3, 1e-4)  # of finite differences, relative to a direction of norm 1
CLOSE = 1e-3  # of a derivative to its difference, relative to the gradient's norm: parts of a Llama compute in fp32


class Frozen:
    """Tensor.detach for finite differences: the first pass keeps what it returns, later ones return that again.

    A detached factor is a constant for the gradient, and so it must be one for the difference.
    """

    def __init__(self) -> None:
        self.kept: list[Tensor] = []
        self.calls = 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        plain = torch.Tensor.detach
        first = not self.kept
        place = itertools.count()

        def detach(tensor: Tensor) -> Tensor:
            if first:
                self.kept.append(plain(tensor).clone())
                return plain(tensor)
            return self.kept[next(place)]

        torch.Tensor.detach = detach
        try:
            yield
        finally:
            torch.Tensor.detach = plain


class WholeLoss:
    """The loss of an optimizer step on a tiny model in float64, as a function of all its weights."""

    def __init__(
        self,
        script: ModuleType,
        args: Any,
        beta: float,
        model,
    ):
        self.script = script
        self.args = args
        self.beta = beta
        self.model = model
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.samples = make_samples()
        self.start = [weight.detach().clone() for weight in self.weights]
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            self.old, _, _ = self.forward()
            self.reference = self.old + 0.3 * torch.randn(self.old.shape, generator=draw, dtype=torch.float64)
            self.sampler = self.old + 0.1 * torch.randn(self.old.shape, generator=draw, dtype=torch.float64)
            for weight in self.weights:  # some updates later
                weight.add_(0.02 * torch.randn(weight.shape, generator=draw, dtype=torch.float64))
        self.advantages = torch.randn(len(self.samples), generator=draw, dtype=torch.float64)
        self.moved = [weight.detach().clone() for weight in self.weights]

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs, entropies, probabilities over the vocabulary) of all response tokens by plain forward passes."""
        logprobs, entropies = [], []
        for sample in self.samples:
            ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids.tolist()]])
            logits = self.model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
            logp = (logits / self.args.temperature).log_softmax(-1)
            logprobs.append(logp.gather(-1, ids[0, len(sample.prompt_ids) :, None])[:, 0])
            entropies.append(-(logp.exp() * logp).sum(-1))
        chosen = torch.cat(logprobs)
        return chosen, torch.cat(entropies), chosen

    def __call__(self, frozen: Frozen | None = None) -> Tensor:
        logprobs, entropy, _ = self.forward()
        owner = torch.arange(len(self.samples)).repeat_interleave(torch.tensor([s.length for s in self.samples]))
        weights = self.script.loss_weights(
            self.samples,
            list(range(len(self.samples))),
            self.args,
        ).double()
        tokens = make_tokens(
            self.script,
            logprobs_T=logprobs,
            old_T=self.old,
            ref_T=self.reference,
            sampler_T=self.sampler,
            advantages_T=self.advantages[owner],
            weights_T=weights,
            entropy_T=entropy,
            full_kl_T=(logprobs - self.reference).square(),
            response_T=owner,
        )
        with frozen() if frozen else contextlib.nullcontext():
            loss_T, _ = self.script.token_loss(tokens, self.beta, self.args)
        return (loss_T * weights).sum()

    def gradient(self) -> list[Tensor | None]:
        loss = self()
        if not loss.requires_grad:
            return [None] * len(self.weights)
        return list(torch.autograd.grad(loss, self.weights, allow_unused=True))

    @torch.no_grad()
    def difference(
        self,
        direction: list[Tensor],
        step: float,
        frozen: Frozen | None,
    ) -> float:
        """Return the derivative along a direction, from two values of the loss."""
        values = []
        for sign in (0, 1, -1) if frozen and not frozen.kept else (1, -1):
            for weight, moved, along in zip(self.weights, self.moved, direction, strict=True):
                weight.copy_(moved + sign * step * along)
            values.append(self(frozen).item())
        for weight, moved in zip(self.weights, self.moved, strict=True):
            weight.copy_(moved)
        return (values[-2] - values[-1]) / (2 * step)


def make_samples() -> list[Sample]:
    """Responses of unequal lengths to two prompts."""
    samples = []
    for number in range(4):
        prompt = [60 + number // 2, 70, 80]
        ids = [90 + (7 * number + 11 * t) % 150 for t in range(1 + 2 * number)]
        samples.append(
            Sample(
                number // 2,
                number % 2,
                prompt,
                ids,
                [0.0] * len(ids),
                "stop",
                [(1, 0)],
            )
        )
    return samples


def check_gradient(subject: Subject, model) -> list[Finding]:
    """Autograd against finite differences along the gradient and two random directions; parameters without gradient."""
    findings = []
    where = subject.first_place("token_loss", "importance_weights", "clamp_straight_through", "loss_weights")
    own_beta = subject.args.kl_coefficients[0]
    plain = subject.with_flags(kl_estimator="k3")
    settings = [("given flags", own_beta, subject.args), ("KL k3", 0.1, plain)]
    for title, beta, args in settings if hasattr(subject.base, "kl_value") else settings[:1]:
        name = f"loss, {title}"
        own = WholeLoss(subject.script, args, beta, model)
        gradient = own.gradient()
        names = [n for n, w in model.named_parameters() if w.requires_grad]
        dead = [n for n, g in zip(names, gradient, strict=True) if g is None or not g.any()]
        if dead:
            text = f"{len(dead)} of {len(names)} parameters get no gradient, among them {dead[0]}"
            findings.append(Finding(4, name, FAIL, text, where))
        else:
            findings.append(compare_differences(own, gradient, name, where))
        restore(own)
    return findings


def restore(own: WholeLoss) -> None:
    """Put the model's weights back as they were."""
    with torch.no_grad():
        for weight, start in zip(own.weights, own.start, strict=True):
            weight.copy_(start)


def compare_differences(own: WholeLoss, gradient: list[Tensor], name: str, where: str) -> Finding:
    """Compare the gradient of one setting with finite differences."""
    draw = torch.Generator().manual_seed(2)
    size = torch.stack([g.norm() for g in gradient]).norm()
    directions = [[g / size for g in gradient]]
    for _ in range(2):
        random = [torch.randn(g.shape, generator=draw, dtype=torch.float64) for g in gradient]
        norm = torch.stack([r.norm() for r in random]).norm()
        directions.append([r / norm for r in random])
    worst = detached = 0.0
    frozen = Frozen()
    for direction in directions:
        slope = sum((g * d).sum() for g, d in zip(gradient, direction, strict=True)).item()
        apart = []
        for step in STEPS:
            apart.append(abs(own.difference(direction, step, frozen) - slope) / size.item())
        worst = max(worst, min(apart))
        detached = max(detached, abs(own.difference(direction, STEPS[1], None) - slope) / size.item())
    text = f"autograd and finite differences along 3 directions differ by {worst:.0e} of the gradient's norm"
    if worst > CLOSE:
        return Finding(4, name, FAIL, text, where)
    if detached > CLOSE:
        text += f", detached factors held; the loss as a value has another slope ({detached:.1g})"
    return Finding(4, name, OK, f"{text}; every parameter gets a gradient")

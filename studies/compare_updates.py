"""Find the first thing that two recorded runs of studies/probe_run.py do not have in common."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders are no packages

from probe_run import Recorded, Update

from runtime.training import batching

CLOSE = 1e-3  # of two gradients or arrays, relative to the larger one: both are fp32
# Fields of Tokens in the order in which a run computes them; the loss follows from all of them.
FIELDS = (
    "sampler_T",
    "old_T",
    "ref_T",
    "full_kl_T",
    "advantages_T",
    "weights_T",
    "logprobs_T",
    "entropy_T",
    "loss_T",
)


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
    """Return the place of each response's tokens in the flat arrays of a step, by its prompt and its ids."""
    samples = found.samples[step]
    places = {}
    for sample, (start, end) in zip(
        samples,
        itertools.pairwise(batching.token_offsets(samples)),
        strict=True,
    ):
        places[tuple(sample.prompt_ids), sample.finish_reason, sample.response_ids.tobytes()] = slice(start, end)
    return places


def aligned(
    values: Tensor,
    ours: dict[tuple, slice],
    theirs: dict[tuple, slice],
) -> Tensor:
    """Values of the second run in the order of the first. Responses that only the first has are NaN."""
    total = max(place.stop for place in ours.values())
    found = torch.full((total,), torch.nan, dtype=values.dtype)
    for key, place in ours.items():
        if key in theirs:
            found[place] = values[theirs[key]]
    return found


@dataclass
class Difference:
    """The first thing that two runs do not have in common."""

    field: str
    text: str


def first_difference(
    a: Recorded,
    b: Recorded,
    factor: float = 1.0,
) -> Difference | None:
    """Compare tokens, losses and gradients of two runs, in the order in which they are computed."""
    for step in range(len(a.updates)):
        places = spans(a, step), spans(b, step)
        for k, (ours, theirs) in enumerate(zip(a.updates[step], b.updates[step], strict=False)):
            name = f"step {step + 1}, optimizer step {k + 1}"
            counted = ours.tokens["weights_T"] != 0
            for field in [*FIELDS, *(set(ours.tokens) - set(FIELDS) - {"response_T"})]:
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
            if found := update_difference(
                ours,
                theirs,
                f"the critic's {{}} ({name})",
            ):
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

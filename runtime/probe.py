"""--probe_every: the angle between the gradient of the KL in the loss, as it was chosen, and the right one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from runtime import batching
from runtime.records import Sample


def call_by_names(token_loss: Callable, **values) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Call a script's ``token_loss`` with those of ``values`` that it takes: a variant may take another one.

    Raises TypeError for an argument that is not among them.
    """
    names = inspect.signature(token_loss).parameters
    unknown = [name for name in names if name not in values]
    if unknown:
        raise TypeError(f"token_loss takes {', '.join(unknown)}, and only {', '.join(values)} are known here")
    return token_loss(*[values[name] for name in names])


def owners(samples: list[Sample]) -> torch.Tensor:
    """The number of the response of each token, [N + 1]; 0 for the slot at the end."""
    lengths = torch.tensor([len(s.response_ids) for s in samples])
    found = torch.arange(len(samples)).repeat_interleave(lengths)
    return torch.cat([found, torch.zeros(1, dtype=torch.long)])


def kl_gradients(
    policy,
    reference,
    token_loss: Callable,
    samples: list[Sample],
    indices: list[int],
    ref_N: torch.Tensor,
    sampler_N: torch.Tensor,
    weights_N: torch.Tensor,
    args,
    cutting: dict,
) -> dict[str, float | None]:
    """Norms of three gradients of the KL in the loss before the first update of a step, and the cosines between them.

    The chosen one, by the script's own ``token_loss``; the unbiased one of the same tokens; and the exact one, of the
    KL over the whole vocabulary after the same prefixes. The first two differ by bias, the last two by the noise of the
    tokens drawn. Every rank must call. It writes to no ``.grad`` and draws no random number: a run is the same with it.

    policy: the DeepSpeed engine, of stage 1 or 2. indices: the samples with a gradient. weights_N: ``loss_weights`` of
    the whole batch. cutting: what ``micro_batches`` takes. Three fp32 copies of the gradient are on each rank while it
    lasts.
    """
    model = policy.module  # past the engine, which prepares an update in its forward pass
    parameters = [p for p in model.parameters() if p.requires_grad]
    sums = [[torch.zeros_like(p, dtype=torch.float32) for p in parameters] for _ in range(3)]
    unbiased = replace(args, kl_estimator="k1", kl_gradient="unbiased")
    owners_N = owners(samples).to(ref_N.device)
    for mb in batching.micro_batches(samples, indices, **cutting):
        logprobs_T, _, full_kl_T = model(mb, reference)
        known = {
            "logprobs_T": logprobs_T,
            "old_T": logprobs_T.detach(),
            "ref_T": ref_N[mb.tokens],
            "sampler_T": sampler_N[mb.tokens],
            "advantages_T": torch.zeros_like(full_kl_T),
            "entropy_T": torch.zeros_like(full_kl_T),
            "full_kl_T": full_kl_T,
            "response_T": owners_N[mb.tokens],
            "beta": 1.0,
        }
        chosen_T = call_by_names(token_loss, **known, args=args)[1]["kl"]
        unbiased_T = call_by_names(token_loss, **known, args=unbiased)[1]["kl"]
        for total, kl_T in zip(sums, (chosen_T, unbiased_T, full_kl_T), strict=True):
            loss = (kl_T * weights_N[mb.tokens]).sum()
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
            for own, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    own += gradient
    return _angles(sums)


def _angles(sums: list[list[torch.Tensor]]) -> dict[str, float | None]:
    """The metrics, from this rank's part of the three gradients: chosen, unbiased, exact."""
    products = torch.zeros(3, 3, dtype=torch.float64)
    for parts in zip(*sums, strict=True):
        for part in parts:  # DeepSpeed takes the mean over ranks of losses times their number: their sum
            torch.distributed.all_reduce(part)
        flat = torch.stack([part.flatten().double() for part in parts])
        products += (flat @ flat.T).cpu()
    norms = products.diagonal().sqrt().tolist()

    def cosine(a: int, b: int) -> float | None:
        size = norms[a] * norms[b]
        return products[a, b].item() / size if size > 0 and math.isfinite(size) else None

    return {
        "kl/gradient_cosine": cosine(0, 1),
        "kl/gradient_cosine_exact": cosine(0, 2),
        "kl/gradient_norm": norms[0],
        "kl/gradient_norm_unbiased": norms[1],
        "kl/gradient_norm_exact": norms[2],
    }

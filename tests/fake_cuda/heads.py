"""Count launches and peak memory of the trainer's head and of fused heads, forward and backward, on the fake device.

.cuda/bin/python tests/fake_cuda/heads.py [FOLDER]     after `make cuda-check ARGS=stubs`

FOLDER: where ``pip install --no-deps --target FOLDER liger-kernel cut-cross-entropy`` has put the fused heads. One
micro-batch of 8,192 response tokens, Qwen2.5-0.5B's head (151,936 tokens, hidden size 896), bf16.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

if "LD_PRELOAD" not in os.environ and __name__ == "__main__":  # start again, under the stub libraries
    import check

    os.execve(sys.executable, [sys.executable, *sys.argv], check.environment())

from runtime.system import process

process.prepare_environment("auto")

import torch
from counters import counted
from torch import nn

import utils
from runtime.training.memory import GIB

TOKENS, HIDDEN, VOCABULARY = 8192, 896, 151936


class OwnHead(utils.TokenLogprobs):
    """The head of ``TokenLogprobs`` on given hidden states."""

    def hidden(self, batch) -> torch.Tensor:
        """Return the hidden states of the batch."""
        return batch.states


def own_head(weight: torch.Tensor, states: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return log-probs and what else ``TokenLogprobs`` returns, for a head of these weights."""
    head = nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    del head.weight
    head.weight = weight
    config = SimpleNamespace(get_text_config=lambda: None)
    policy = OwnHead(nn.Identity(), 1.0, 4096)
    del policy._modules["model"]
    model = SimpleNamespace(get_output_embeddings=lambda: head, config=config)
    object.__setattr__(policy, "model", model)
    copies = torch.arange(len(targets), device=targets.device)
    batch = SimpleNamespace(states=states, targets=targets, copies=copies, most_predictions=len(targets))
    return policy(batch)


def measure(name: str, weight: torch.Tensor, states: torch.Tensor, logprobs: Callable, entropy: bool) -> None:
    """Print launches and peak of a second pass: the first compiles kernels and allocates workspaces."""
    for _ in range(2):
        states.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        launches, products = counted(lambda: logprobs().sum().backward(), "launches", "products")
        peak = (torch.cuda.max_memory_allocated() - held) / GIB
    print(f"{name:34} {launches:8} {products:8} {peak:8.2f}  {'yes' if entropy else 'no'}", flush=True)


def main() -> None:
    """Print a row per head."""
    with torch.device("cuda"):
        weight = torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        states = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(TOKENS, dtype=torch.long)
    print(f"{'head':34} {'launches':>8} {'products':>8} {'peak GiB':>8}  entropy")
    for bits in (24, 26):
        utils.LOGIT_BLOCK = (2**bits, 2**bits)
        measure(
            f"chunks of 4096, blocks of 2^{bits}", weight, states, lambda: own_head(weight, states, targets)[0], True
        )
    if sys.argv[1:]:
        sys.path.insert(0, sys.argv[1])
        from cut_cross_entropy import linear_cross_entropy
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        def liger() -> torch.Tensor:
            return liger_fused_linear_cross_entropy(states, weight, targets, reduction="none")

        def cut() -> torch.Tensor:
            return linear_cross_entropy(states, weight, targets, reduction="none")

        measure("Liger", weight, states, liger, False)
        measure("cut cross entropy", weight, states, cut, False)


if __name__ == "__main__":
    main()

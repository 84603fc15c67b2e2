"""Compare log-probs and gradients of fused heads in fp32 with fp64, by Triton's interpreter on the CPU.

.cuda/bin/python tests/fake_cuda/heads_fp32.py FOLDER     FOLDER: as for heads.py

128 tokens, a vocabulary of 4,000 and hidden size 64, since the interpreter is slow. It lacks the log1p of NVIDIA's
libdevice, which log(1 + x) replaces, and adds in another order than a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path[:0] = [sys.argv[1], str(Path(__file__).resolve().parent.parent.parent)]

import torch
import triton
from cut_cross_entropy import linear_cross_entropy, tl_utils
from heads import own_head
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy
from triton import language as tl

TOKENS, HIDDEN, VOCABULARY = 128, 64, 4000


@triton.jit
def log1p(x):
    """Return log(1 + x)."""
    return tl.log(1.0 + x)


def largest(found: torch.Tensor, exact: torch.Tensor) -> str:
    """Return the largest difference."""
    return f"{(found.double() - exact).abs().max().item():.1e}"


def main() -> None:
    """Print a row per head: largest differences of log-probs from this project's, and of all from fp64."""
    torch.manual_seed(0)
    states = torch.randn(TOKENS, HIDDEN)
    weight = torch.randn(VOCABULARY, HIDDEN) / 2
    targets = torch.randint(VOCABULARY, (TOKENS,))
    slopes = torch.randn(TOKENS)
    tl_utils.tl_log1p = log1p

    def computed(head: Callable, dtype: torch.dtype, trains: bool) -> list[torch.Tensor]:
        x, w = (value.to(dtype).requires_grad_(trains) for value in (states.clone(), weight.clone()))
        logprobs = head(x, w)
        if trains:
            logprobs.backward(slopes.to(dtype))
        return [logprobs.detach(), *([x.grad, w.grad] if trains else [])]

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w.T).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    heads = {
        "chunks of 4096, blocks of 2^24": lambda x, w: own_head(w, x, targets)[0],
        "Liger": lambda x, w: -liger_fused_linear_cross_entropy(x, w, targets, reduction="none"),
        "cut cross entropy": lambda x, w: -linear_cross_entropy(x, w, targets, reduction="none"),
    }
    exact = computed(plain, torch.float64, True)
    own = None
    print(f"{'head':34} {'own':>9} {'log-probs':>9} {'states':>9} {'weights':>9}")
    for name, head in heads.items():
        found = computed(head, torch.float32, name != "cut cross entropy")  # which rejects gradients in fp32
        own = found[0] if own is None else own
        row = [largest(a, b) for a, b in zip(found, exact, strict=False)] + ["", ""]
        print(f"{name:34} {largest(found[0], own):>9} {row[0]:>9} {row[1]:>9} {row[2]:>9}", flush=True)


if __name__ == "__main__":
    main()

"""Compile FlexAttention's kernels, forward and backward, with a run's own block masks, by ptxas for a card.

    .cuda/bin/python tests/fake_cuda/kernels.py HEAD_SIZE     under the stub libraries, whose card is the target

A kernel that needs more shared memory than the card has, or that ptxas cannot translate, ends this with its error.
"""

from __future__ import annotations

import os
import sys
import time

import torch
from torch.nn.attention.flex_attention import flex_attention

from runtime.training.attention import block_mask

WIDTH = 4096  # tokens of a row


def main() -> None:
    """Compile and launch the kernels once."""
    size = int(sys.argv[1])
    started = time.monotonic()
    torch._dynamo.config.recompile_limit = 64
    positions = torch.arange(WIDTH)[None].cuda()
    ends = torch.full((1, WIDTH), WIDTH).cuda()
    mask = block_mask(ends, positions, None)
    shape = (1, 896 // size, WIDTH, size)
    query, key, value = (torch.zeros(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    compiled = torch.compile(flex_attention, dynamic=False)
    compiled(query, key, value, block_mask=mask, scale=size**-0.5).sum().backward()
    torch.cuda.synchronize()
    card = os.environ["FAKE_CUDA_CAPABILITY"]
    print(f"compute capability {card}, bf16 heads of {size}: compiled in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()

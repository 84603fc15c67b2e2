"""Count launches and peak memory of the trainer's head and of fused heads, forward and backward, on the fake device.

.cuda/bin/python tests/fake_cuda/heads.py [FOLDER]     after `make cuda-check ARGS=stubs`

FOLDER: where ``pip install --no-deps --target FOLDER liger-kernel cut-cross-entropy`` has put the fused heads. One
micro-batch of 8,192 response tokens, Qwen2.5-0.5B's head (151,936 tokens, hidden size 896), bf16.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace

if "LD_PRELOAD" not in os.environ:  # start again, under the stub libraries
    import check

    os.execve(sys.executable, [sys.executable, *sys.argv], check.environment())

from runtime.system import process

process.prepare_environment("auto")

import torch
from torch import nn

import utils
from runtime.training.memory import GIB

STUBS = ctypes.CDLL(None)
STUBS.fake_count.restype = ctypes.c_longlong
STUBS.fake_count.argtypes = [ctypes.c_char_p]
TOKENS, HIDDEN, VOCABULARY = 8192, 896, 151936


class OwnHead(utils.TokenLogprobs):
    """The head of ``TokenLogprobs`` on given hidden states."""

    def hidden(self, batch) -> torch.Tensor:
        """Return the hidden states of the batch."""
        return batch.states


def measure(name: str, head: nn.Linear, states: torch.Tensor, logprobs: Callable, entropy: bool) -> None:
    """Print launches and peak of a second pass: the first compiles kernels and allocates workspaces."""
    for _ in range(2):
        states.grad = head.weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        before = STUBS.fake_count(b"launches"), STUBS.fake_count(b"products")
        logprobs().sum().backward()
        launches, products = STUBS.fake_count(b"launches") - before[0], STUBS.fake_count(b"products") - before[1]
        peak = (torch.cuda.max_memory_allocated() - held) / GIB
    print(f"{name:34} {launches:8} {products:8} {peak:8.2f}  {'yes' if entropy else 'no'}", flush=True)


def main() -> None:
    """Print a row per head."""
    with torch.device("cuda"):
        head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16)
        states = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(TOKENS, dtype=torch.long)
        copies = torch.arange(TOKENS)
    copies.zero_()
    batch = SimpleNamespace(states=states, targets=targets, copies=copies, most_predictions=TOKENS)
    config = SimpleNamespace(get_text_config=lambda: None)
    model = SimpleNamespace(get_output_embeddings=lambda: head, config=config)
    policy = OwnHead(nn.Identity(), 1.0, 4096)
    object.__setattr__(policy, "model", model)
    del policy._modules["model"]
    print(f"{'head':34} {'launches':>8} {'products':>8} {'peak GiB':>8}  entropy")
    for bits in (24, 26):
        utils.logit_block = lambda on_gpu, bits=bits: 2**bits
        measure(f"chunks of 4096, blocks of 2^{bits}", head, states, lambda: policy(batch)[0], True)
    if sys.argv[1:]:
        sys.path.insert(0, sys.argv[1])
        from cut_cross_entropy import linear_cross_entropy
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        def liger() -> torch.Tensor:
            return liger_fused_linear_cross_entropy(states, head.weight, targets, reduction="none")

        def cut() -> torch.Tensor:
            return linear_cross_entropy(states, head.weight, targets, reduction="none")

        measure("Liger", head, states, liger, False)
        measure("cut cross entropy", head, states, cut, False)


if __name__ == "__main__":
    main()

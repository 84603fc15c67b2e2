"""Compile the trainer's Triton kernels with the ptxas of the wheels, for each compute capability that is named.

.cuda/bin/python tests/fake_cuda/kernels.py 80 89 90 120     under the stub libraries: check.py sets them

FlexAttention, forward and backward, is called as a run calls it, with the masks of shared rows. Caches are empty, so
every kernel is compiled; one that needs more shared memory than the card has is an error when its launcher loads it.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, whose card is the fake one of the environment

from runtime.system import process

process.prepare_environment("auto")

import torch
from torch.nn.attention.flex_attention import flex_attention

from runtime.training import attention

HEADS = ((64, 14, 2), (128, 12, 2))  # size, heads of queries and of keys: Qwen2.5-0.5B and 1.5B


def compile_flex() -> None:
    """Compile FlexAttention for bf16 and both sizes of heads, with and without gradients."""
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(flex_attention, dynamic=False)
    width = 2048
    with torch.device("cuda"):
        positions = torch.zeros(1, width, dtype=torch.long)
        ends = torch.zeros(1, width, dtype=torch.long)
    mask = attention.block_mask(ends, positions, None)
    for size, queries, keys in HEADS:
        shape = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
        query = torch.empty(1, queries, width, size, **shape)
        key, value = (torch.empty(1, keys, width, size, **shape) for _ in range(2))
        with torch.no_grad():
            compiled(query, key, value, block_mask=mask, scale=size**-0.5, enable_gqa=True)
        compiled(query, key, value, block_mask=mask, scale=size**-0.5, enable_gqa=True).sum().backward()


def compile_all(capability: str) -> int:
    """Compile for one card; return the number of kernels that ptxas made. Raises what a kernel's compilation raises."""
    with tempfile.TemporaryDirectory() as place:
        os.environ |= {"FAKE_CUDA_CAPABILITY": capability}
        os.environ |= {"TRITON_CACHE_DIR": f"{place}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{place}/inductor"}
        compile_flex()
        torch.cuda.synchronize()
        made = list(Path(place).rglob("*.cubin"))
        targets = {path.with_suffix(".ptx").read_text().split(".target sm_")[1].split()[0] for path in made}
        wanted = {capability, f"{capability}a", f"{capability},"}
        assert made and targets <= wanted, f"kernels for {targets} on {capability}"
        return len(made)


def main() -> int:
    """Compile for each card in a fork, two at a time; exit code 1 if one fails."""
    cards = sys.argv[1:]
    ends = {}
    for pair in (cards[i : i + 2] for i in range(0, len(cards), 2)):
        children = {}
        for card in pair:
            child = os.fork()
            if child == 0:
                started = time.monotonic()
                try:
                    count = compile_all(card)
                    print(f"{card}: {count} kernels compiled in {time.monotonic() - started:.0f} s", flush=True)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            children[child] = card
        for child, card in children.items():
            ends[card] = os.waitpid(child, 0)[1]
    failed = [card for card, code in ends.items() if code != 0]
    print(
        f"kernels do not compile for {failed}" if failed else f"FlexAttention compiled by ptxas for {', '.join(cards)}"
    )
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

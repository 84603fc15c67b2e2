"""Compile Triton kernels of trainer and engine with the ptxas of the wheels, for each compute capability that is named.

    .cuda/bin/python tests/fake_cuda/compile_kernels.py FILE trainer-bf16 80 89     under the stub libraries
    .cuda/bin/python tests/fake_cuda/compile_kernels.py FILE engine-fp32 90

trainer-bf16   FlexAttention, forward and backward, called as a run calls it, with the masks of shared rows
engine-bf16    what vLLM compiles until requests decode, when grpo.build_vllm builds it; two layers of Qwen2.5-0.5B
engine-fp32    the same in fp32, whose attention is a Triton kernel; without torch.compile and CUDA graphs

Caches are empty, so every kernel is compiled; one that needs more shared memory than the card has is an error when its
launcher loads it. FILE gets the names of the kernels. check.py sets the stub libraries.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, whose card is the fake one of the environment

from runtime.system import process

process.prepare_environment("auto")

import backends
import decode_steps
import torch
from forks import in_a_fork
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


def compile_engine() -> None:
    """Build the engine in bf16, with one CUDA graph, and let requests decode."""
    given = {"compilation_config": {"cudagraph_capture_sizes": [64]}, "kv_cache_memory_bytes": 2**28}
    decode_steps.decode(decode_steps.build("bfloat16", 2, given), 64)


def compile_fp32_engine() -> None:
    """Build the engine in fp32, without compiling the model, and let requests decode."""
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # as --dtype float32 sets it
    decode_steps.decode(decode_steps.build("float32", 2, {"enforce_eager": True, "kv_cache_memory_bytes": 2**28}), 64)


def compiled_names(work: Callable[[], None], capability: str) -> list[str]:
    """Return the names of the kernels that ptxas made for this card; raises what a kernel's compilation raises."""
    backends.forget_the_card()
    with tempfile.TemporaryDirectory() as place:
        caches = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "VLLM_CACHE_ROOT": "vllm"}
        os.environ |= {name: f"{place}/{folder}" for name, folder in caches.items()}
        work()
        torch.cuda.synchronize()
        made = sorted((Path(place) / "triton").rglob("*.cubin"))
        targets = {path.with_suffix(".ptx").read_text().split(".target sm_")[1].split()[0] for path in made}
        wanted = {capability, f"{capability}a", f"{capability},"}
        assert made and targets <= wanted, f"kernels for {targets} on {capability}"
        return [path.stem for path in made]


WORKS = {"trainer-bf16": compile_flex, "engine-bf16": compile_engine, "engine-fp32": compile_fp32_engine}


def main() -> int:
    """Compile for each card; exit code 1 if one fails."""
    file, name, *cards = sys.argv[1:]
    if name.startswith("engine"):
        backends.import_vllm()
    found, failed = {}, []
    for card in cards:
        started = time.monotonic()
        variables = {"FAKE_CUDA_CAPABILITY": card, "LOCAL_RANK": "0"}
        made = in_a_fork(lambda card=card: compiled_names(WORKS[name], card), variables)
        if isinstance(made, dict):
            failed.append(card)
            continue
        found[f"{name}, {card}"] = sorted(set(made))
        print(f"{name}, {card}: {len(made)} kernels compiled in {time.monotonic() - started:.0f} s", flush=True)
    Path(file).write_text(json.dumps(found, indent=1))
    if failed:
        print(f"{name}: kernels do not compile for {failed}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

"""Make vLLM 0.32 faster and smaller on CPUs: its norms, the counting of likelier tokens, and its embedding.

Its CPU package contains kernels for RMSNorm that it calls on GPUs only. Without them a norm is a dozen PyTorch
operations, and a model of 30 layers has 61: a seventh of the time of a decoding step (SmolLM2-135M, 64 sequences, two
cores). So vLLM's functions that call them are registered by another name, which the engine's configuration prefers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

NAME = "cpu_kernel"
LANES = 32  # the kernels read so many numbers at a time at most, and reject rows that are no multiple


def takes(weight: torch.Tensor | None, variance_size: int | None, *tensors: torch.Tensor) -> bool:
    """Return True if the kernels support this norm; vLLM computes the others."""
    if weight is None or variance_size is not None or weight.numel() % LANES != 0:
        return False
    return all(tensor.dtype == weight.dtype and tensor.is_contiguous() for tensor in tensors)


# vLLM compares names and defaults with those of its own functions.
def takes_norm(x, weight, epsilon, variance_size=None) -> bool:
    """Return True if the kernel supports this norm."""
    return takes(weight, variance_size, x)


def takes_sum(x, x_residual, weight, epsilon, variance_size=None) -> bool:
    """Return True if the kernel supports this norm of a sum."""
    return takes(weight, variance_size, x, x_residual)


def register(op, supports_args: Callable[..., bool]) -> None:
    """Register vLLM's implementation for GPUs as one for CPUs, unless an engine of this process has done so."""
    theirs = op.impls["vllm_c"]
    if NAME not in op.impls:
        decorate = op.register_impl(NAME, supports_args=supports_args, inplace=theirs.inplace)
        decorate(theirs.impl_fn)


def kernel_config() -> dict:
    """Return the argument ``kernel_config`` of vLLM's ``LLM``, after registering the implementations if necessary."""
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_ir_kernels()
    register(ir.ops.rms_norm, takes_norm)
    register(ir.ops.fused_add_rms_norm, takes_sum)
    preferred = [NAME, "native"]
    return {"ir_op_priority": {"rms_norm": preferred, "fused_add_rms_norm": preferred}}


def save_time_and_memory() -> None:
    """Leave out two things that vLLM does on CPUs for nothing. Call it before an engine is built.

    It compiles the function that counts the tokens whose log-prob is at least that of the sampled one: 14 s of a user's
    first run, and more than a second of every other. And it packs every embedding for matrix products, a copy that
    every push makes again, although as a rule only that of the head is multiplied with.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = count_at_least
    if not hasattr(UnquantizedEmbeddingMethod, "pack"):
        UnquantizedEmbeddingMethod.pack = UnquantizedEmbeddingMethod.process_weights_after_loading
        UnquantizedEmbeddingMethod.process_weights_after_loading = pack_at_first_use


def pack_at_first_use(method, layer: torch.nn.Module) -> None:
    """Pack an embedding for matrix products when it is first used for one, as the head of Gemma 2 is."""

    def pack_and_multiply(x, weight, bias):
        method.pack(layer)  # sets layer.cpu_linear
        return layer.cpu_linear(x, weight, bias)

    layer.cpu_linear = pack_and_multiply


def count_at_least(x_BV: torch.Tensor, values_B1: torch.Tensor) -> torch.Tensor:
    """Return the number of elements in each row of ``x_BV`` that are at least the row's value, [B]."""
    return (x_BV >= values_B1).sum(-1)

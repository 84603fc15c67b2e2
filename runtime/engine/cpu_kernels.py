"""RMSNorm of vLLM on CPUs, by kernels that its CPU package contains but vLLM 0.32 calls on GPUs only.

Without them a norm is a dozen PyTorch operations, and a model of 30 layers has 61: a seventh of the time of a decoding
step (SmolLM2-135M, 64 sequences, two cores). They are registered by a name, which the engine's configuration prefers.
"""

from __future__ import annotations

import torch

NAME = "cpu_kernel"
LANES = 32  # the kernels read so many numbers at a time at most, and reject rows that are no multiple


def takes(weight: torch.Tensor | None, variance_size: int | None, *tensors: torch.Tensor) -> bool:
    """Return True if the kernels support this norm; vLLM computes the others."""
    if weight is None or variance_size is not None or weight.numel() % LANES != 0:
        return False
    return all(tensor.dtype == weight.dtype and tensor.is_contiguous() for tensor in tensors)


def kernel_config() -> dict:
    """Return the argument ``kernel_config`` of vLLM's ``LLM``, after registering the implementations if necessary."""
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_ir_kernels()  # the kernels, and vLLM's own implementations
    if NAME not in ir.ops.rms_norm.impls:
        register(ir.ops)
    return {"ir_op_priority": {"rms_norm": [NAME, "native"], "fused_add_rms_norm": [NAME, "native"]}}


def register(ops) -> None:
    """Register both norms. vLLM compares names, annotations and defaults with those of its own functions."""

    def takes_norm(x, weight, epsilon, variance_size=None):
        return takes(weight, variance_size, x)

    def takes_sum(x, x_residual, weight, epsilon, variance_size=None):
        return takes(weight, variance_size, x, x_residual)

    @ops.rms_norm.register_impl(NAME, supports_args=takes_norm)
    def rms_norm(
        x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> torch.Tensor:
        output = torch.empty_like(x)
        torch.ops._C.rms_norm(output, x, weight, epsilon)
        return output

    @ops.fused_add_rms_norm.register_impl(NAME, supports_args=takes_sum, inplace=True)
    def fused_add_rms_norm(
        x: torch.Tensor,
        x_residual: torch.Tensor,
        weight: torch.Tensor | None,
        epsilon: float,
        variance_size: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual

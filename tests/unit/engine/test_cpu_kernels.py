"""runtime/engine/cpu_kernels.py: vLLM's kernels compute the norm; nothing is compiled, and no embedding is packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm import ir

from runtime.engine import cpu_kernels

CONFIG = cpu_kernels.kernel_config()  # registers them
KINDS = pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])


def by_hand(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, in fp64."""
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.double()


def draw(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, a residual, and weights."""
    generator = torch.Generator().manual_seed(3)
    x, residual = torch.randn(2, *shape, generator=generator).to(dtype)
    return x, residual, torch.randn(shape[-1], generator=generator).to(dtype)


@KINDS
@pytest.mark.parametrize("shape", [(1, 32), (7, 576), (64, 896), (3, 5, 64)])
def test_a_norm(dtype, tolerance, shape):
    x, _, weight = draw(dtype, shape)
    given = x.clone()
    found = ir.ops.rms_norm.impls[cpu_kernels.NAME].impl_fn(x, weight, 1e-5)
    torch.testing.assert_close(found.double(), by_hand(given, weight, 1e-5), rtol=tolerance, atol=tolerance)
    assert torch.equal(x, given) and found.dtype == dtype


@KINDS
@pytest.mark.parametrize("shape", [(1, 32), (7, 576), (64, 896)])
def test_a_norm_of_a_sum(dtype, tolerance, shape):
    """The sum is returned as the next residual. Both results are written in place, as vLLM's own kernel does."""
    x, residual, weight = draw(dtype, shape)
    if dtype == torch.bfloat16 and "avx512f" not in Path("/proc/cpuinfo").read_text():
        tolerance *= 2  # the kernels for AVX2 do not round to the nearest number
    total = x + residual
    norm, next_residual = ir.ops.fused_add_rms_norm.impls[cpu_kernels.NAME].impl_fn(x, residual, weight, 1e-5)
    torch.testing.assert_close(next_residual, total, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(norm.double(), by_hand(total, weight, 1e-5), rtol=tolerance, atol=tolerance)


def test_what_the_kernels_cannot_take_goes_to_vllm():
    """No weight, another dtype, a part of the row, rows that do not lie side by side, odd widths."""
    x, residual, weight = draw(torch.float32, (4, 64))
    refused = [
        (x, None, 1e-5, None),
        (x, weight.bfloat16(), 1e-5, None),
        (x, weight, 1e-5, 32),
        (torch.cat([x, x], 1)[:, :64], weight, 1e-5, None),
        (x[:, :40].contiguous(), weight[:40], 1e-5, None),
    ]
    norm, added = (getattr(ir.ops, name).impls[cpu_kernels.NAME] for name in ("rms_norm", "fused_add_rms_norm"))
    assert norm.supports_args(x, weight, 1e-5) and added.supports_args(x, residual, weight, 1e-5)
    for x, weight, *rest in refused:
        assert not norm.supports_args(x, weight, *rest)
        assert not added.supports_args(x, x.contiguous(), weight, *rest)
    x, residual, weight = draw(torch.float32, (4, 64))
    assert not added.supports_args(x, residual.T.contiguous().T, weight, 1e-5)


def test_a_second_engine_in_the_process_registers_nothing_again():
    before = dict(ir.ops.rms_norm.impls)
    assert cpu_kernels.kernel_config() == CONFIG
    assert ir.ops.rms_norm.impls == before
    assert all(names == [cpu_kernels.NAME, "native"] for names in CONFIG["ir_op_priority"].values())


def test_likelier_tokens_are_counted_without_a_compiler():
    """As vLLM's own function counts them, ties included; its compiled one took 14 s of a first run."""
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs

    cpu_kernels.save_time_and_memory()
    x = torch.tensor([[-1.0, -2.0, -2.0, -0.5], [-3.0, -3.0, -3.0, -3.0]])
    values = x[:, 1:2]
    own = logprobs.batched_count_greater_than._torchdynamo_orig_callable
    assert sampler.batched_count_greater_than(x, values).tolist() == own(x, values).tolist() == [4, 4]
    assert not hasattr(sampler.batched_count_greater_than, "_torchdynamo_orig_callable")


def test_an_embedding_is_packed_at_its_first_product_and_after_every_push(monkeypatch):
    """A head's products are those of its present weights. An embedding that only looks up rows is never packed."""
    from vllm.model_executor.layers import vocab_parallel_embedding as embeddings

    cpu_kernels.save_time_and_memory()
    cpu_kernels.save_time_and_memory()  # of a second engine
    packed = []
    pack = embeddings.UnquantizedEmbeddingMethod.pack
    monkeypatch.setattr(
        embeddings.UnquantizedEmbeddingMethod,
        "pack",
        lambda method, layer: (packed.append(layer), pack(method, layer)),
    )
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.randn(96, 64), requires_grad=False)
    method = embeddings.UnquantizedEmbeddingMethod()
    x = torch.randn(5, 64)
    for push in range(2):
        layer.weight.data = torch.randn(96, 64)
        method.process_weights_after_loading(layer)
        method.embedding(layer, torch.tensor([3, 4]))
        assert len(packed) == push
        for _ in range(2):
            torch.testing.assert_close(method.apply(layer, x), x @ layer.weight.T, rtol=1e-4, atol=1e-4)
        assert len(packed) == push + 1

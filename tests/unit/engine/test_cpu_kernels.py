"""runtime/engine/cpu_kernels.py: nothing is compiled, and no embedding is packed before it is multiplied with."""

from __future__ import annotations

import torch

from runtime.engine import cpu_kernels


def test_likelier_tokens_are_counted_without_a_compiler():
    """As vLLM's own function counts them, ties included; its compiled one took 14 s of a first run."""
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import logprobs

    cpu_kernels.save_time_and_memory()
    x = torch.tensor([[-1.0, -2.0, -2.0, -0.5], [-3.0, -3.0, -3.0, -3.0]])
    values = x[:, 1:2]
    compiled = logprobs.batched_count_greater_than
    own = getattr(compiled, "_torchdynamo_orig_callable", compiled)
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

"""Work that is left out on CPUs: nothing is compiled, and no embedding is packed before it is multiplied with."""

from __future__ import annotations

import torch

from runtime.engine import vllm_settings


def test_likelier_tokens_are_not_counted():
    """For a rank that nothing reads: vLLM's function is compiled, 14 s of a first run, and called for every token."""
    from vllm.v1.sample import sampler

    vllm_settings.save_time_and_memory()
    x = torch.tensor([[-1.0, -2.0, -2.0, -0.5], [-3.0, -3.0, -3.0, -3.0]])
    assert sampler.batched_count_greater_than(x, x[:, 1:2]).tolist() == [0, 0]


def test_an_embedding_is_packed_at_its_first_product_and_after_every_push(monkeypatch):
    """A head's products are those of its present weights. An embedding that only looks up rows is never packed."""
    from vllm.model_executor.layers import vocab_parallel_embedding as embeddings

    vllm_settings.save_time_and_memory()
    vllm_settings.save_time_and_memory()  # of a second engine
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

"""Leave out what vLLM 0.32 does on CPUs for nothing: compiling a count of tokens, and packing every embedding."""

from __future__ import annotations

import torch


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

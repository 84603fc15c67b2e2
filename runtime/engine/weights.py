"""Push weights from DeepSpeed to vLLM, and check that all of them arrived. Written against vLLM 0.32."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch

from runtime.training.deepspeed_zero import NamedWeights, finish_gpu_work


def push_weights(llm, weights: NamedWeights, inflight_updates: str = "off") -> None:
    """Load new weights into a vLLM engine, from the thread that owns it, between two of its steps.

    vLLM's ``reload_weights`` is the one route that also serves CPU kernels, which keep packed copies; a tied head must
    be among ``weights``, for it has one of its own. The prefix cache holds keys and values of the old weights; the
    engine does not drop it while a request runs. ``inflight_updates`` recompute preempts the requests that run, whose
    keys and values are computed again. keep leaves them theirs; a cache salt has to keep new requests from them.

    Raises RuntimeError if a parameter of the engine was not loaded, or only in part, and if the prefix cache was kept.
    """
    missing = set().union(*llm.collective_rpc(reload_worker, args=(weights,)))
    if missing:
        raise RuntimeError(
            f"the weight push did not reach {len(missing)} parameters of the vLLM engine, which would stay stale: "
            f"{', '.join(sorted(missing)[:8])}{', ...' if len(missing) > 8 else ''}"
        )
    preempt = inflight_updates == "recompute"
    if inflight_updates != "keep" and not llm.reset_prefix_cache(reset_running_requests=preempt):
        raise RuntimeError("vLLM kept its prefix cache after a weight push (a request was still running)")
    finish_gpu_work()


def release_vllm(llm) -> None:
    """Free what a vLLM engine in this process holds, so that another can be built.

    Its own shutdown, which the garbage collector would call, also destroys torch.distributed's process group, which
    DeepSpeed uses; and the objects of an engine are hidden from the collector until they are unfrozen.
    """
    client = llm.llm_engine.engine_core
    client._finalizer.detach()
    client.engine_core.model_executor.shutdown()
    gc.unfreeze()


def reload_worker(worker, weights: NamedWeights) -> list[str]:
    """Load ``weights`` into the model of a vLLM worker; the names of parameters that did not get all their elements.

    vLLM loads layer by layer and only logs what was not loaded. Until the end of a reload it has records of the layers.
    """
    model = worker.model_runner.get_model()
    load = model.load_weights
    missing = []

    def load_and_look(weights):
        names = load(weights)
        missing.extend(_unloaded_parameters(model))
        return names

    if not torch.cuda.is_available():
        # On CPUs the experts of a mixture are packed when their kernel is built. A later reload would keep the kernel,
        # skip the packing, and give packed kernels plain weights.
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
    model.load_weights = load_and_look
    # A reload leaves buffers that no checkpoint has undefined, in layers that have weights as well (Gemma 3n).
    storages = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    constants = []
    for layer in model.modules():
        if not hasattr(layer, "quant_method"):  # else, and in the storage of a weight, a buffer may be a weight
            names = layer._non_persistent_buffers_set
            own = [x for name, x in layer.named_buffers(recurse=False) if name in names]
            constants += [(x, x.clone()) for x in own if x.untyped_storage().data_ptr() not in storages]
    try:
        worker.reload_weights(weights_iterator=accepted(model, worker.model_config.hf_config, weights))
        with torch.inference_mode():
            for buffer, value in constants:
                buffer.copy_(value)
    finally:
        del model.load_weights
    return missing


def accepted(model, config, weights: NamedWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights that a vLLM model has a place for: some (Gemma 2, Gemma 3n) have no module for a tied head."""
    tied = any(getattr(part, "tie_word_embeddings", False) for part in (config, config.get_text_config()))
    places = {name for name, _ in [*model.named_children(), *model.named_parameters(recurse=False)]}
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for name, weight in weights:
        mapped = [name] if mapper is None else mapper.apply_list([name])
        if not tied or all(own.split(".")[0] in places for own in mapped):
            yield name, weight


def _unloaded_parameters(model) -> list[str]:
    """Return the names of the parameters of layers that vLLM has not loaded in full, during a layer-by-layer reload."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded_storages = set()
    unloaded = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        own = dict(layer.named_parameters(recurse=False))
        loaded = info.load_numel or 0
        # vLLM resets the record of a layer that got all its elements. It also counts buffers that no checkpoint has.
        finished = not info.can_load() or 0 < sum(weight.numel() for weight in own.values()) <= loaded
        finished |= isinstance(layer, VocabParallelEmbedding) and loaded > 0  # no checkpoint has its padding
        old = info.kernel_tensors[0] if info.kernel_tensors is not None else own
        if finished:
            loaded_storages.update(tensor.data_ptr() for tensor in old.values())
        else:
            unloaded += [(f"{name}.{key}", old[key].data_ptr()) for key in own]
    if torch.cuda.is_available():  # a tied head on a GPU is its embedding; on a CPU it has a packed copy
        unloaded = [(name, storage) for name, storage in unloaded if storage not in loaded_storages]
    return [name for name, _ in unloaded]

"""How weights travel from DeepSpeed to vLLM, and whether all of them arrived. Written against vLLM 0.32."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import nn


@torch.no_grad()
def current_weights(
    policy,
    zero_stage: int,
    checkpoint_names: bool = False,
    in_buckets: bool = False,
) -> list[tuple[str, torch.Tensor]] | ShardedWeights:
    """The policy's weights by name, the tied output head included, whole on every rank.

    Stages 0 to 2 give the live tensors: whoever gets them must be done before the next optimizer step. Stage 3 gives
    gathered copies; every rank must call. On a GPU all work on the tensors is finished when this returns, so that
    another thread may read them on a CUDA stream of its own.

    Args:
        policy: the DeepSpeed engine around ``TokenLogprobs``.
        zero_stage: ``--zero_stage``.
        checkpoint_names: give the names and shapes that ``save_pretrained`` would write, which vLLM expects. They
            differ from the module's for mixtures of experts, whose experts transformers holds in one tensor.
        in_buckets: under stage 3, leave the gathering to whoever iterates over the result, on every rank. Not for the
            models whose checkpoints have other tensors than the module: renaming needs all of them.
    """
    model = policy.module.model
    if zero_stage == 3 and in_buckets and not (checkpoint_names and _is_renamed(model)):
        finish_gpu_work()
        return ShardedWeights(model)
    if zero_stage < 3:
        weights = model.state_dict()
    else:
        weights = _gathered_weights(model)
    if checkpoint_names:
        from transformers.core_model_loading import revert_weight_conversion

        weights = revert_weight_conversion(model, weights)
    finish_gpu_work()
    return list(weights.items())


def _is_renamed(model) -> bool:
    """Whether the checkpoint of a model has other names or tensors than its module."""
    from transformers.core_model_loading import revert_weight_conversion

    nothing: dict[str, torch.Tensor] = {}
    return revert_weight_conversion(model, nothing) is not nothing


class ShardedWeights:
    """The weights by name of a model that ZeRO-3 has sharded, gathered in buckets while someone iterates over them.

    So only one bucket exists as a whole, besides what the reader keeps. Gathering is a collective: every rank must
    iterate, to the end, while no rank does anything else that communicates.
    """

    bucket_elements = 2 * 10**8

    def __init__(self, model):
        self.entries = model.state_dict(keep_vars=True)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        bucket: dict[str, torch.Tensor] = {}
        elements = 0
        for name, weight in self.entries.items():
            bucket[name] = weight
            elements += _whole_numel(weight)
            if elements >= self.bucket_elements:
                yield from self._gathered(bucket)
                bucket, elements = {}, 0
        yield from self._gathered(bucket)

    @staticmethod
    def _gathered(bucket: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Copies of whole weights. vLLM asks for them in inference mode, whose tensors autograd would not take."""
        import deepspeed

        parameters = [weight for weight in bucket.values() if isinstance(weight, nn.Parameter)]
        with torch.inference_mode(False), torch.no_grad(), deepspeed.zero.GatheredParameters(parameters):
            return [(name, weight.detach().clone()) for name, weight in bucket.items()]


def _whole_numel(weight: torch.Tensor) -> int:
    """Elements of a weight, also while ZeRO-3 has sharded it."""
    return getattr(weight, "ds_numel", weight.numel())


def weight_bytes(weights: list[tuple[str, torch.Tensor]] | ShardedWeights) -> int:
    """Bytes of named weights; a tied head counts, for an engine gets it under its own name."""
    entries = weights.entries.items() if isinstance(weights, ShardedWeights) else weights
    return sum(_whole_numel(weight) * weight.element_size() for _, weight in entries)


def _gathered_weights(model) -> dict[str, torch.Tensor]:
    """Copies of weights that ZeRO-3 has sharded, by the module's names. What is tied stays tied."""
    import deepspeed

    weights = {}
    copies: dict[int, torch.Tensor] = {}  # address of a storage -> its copy
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for name, tensor in model.state_dict().items():
            if tensor.data_ptr() not in copies:
                copies[tensor.data_ptr()] = tensor.clone()
            weights[name] = copies[tensor.data_ptr()]
    return weights


def copied_to_cpu(
    weights: list[tuple[str, torch.Tensor]],
    earlier: list[tuple[str, torch.Tensor]],
) -> list[tuple[str, torch.Tensor]]:
    """Copies of named weights in CPU memory, page-locked if they come from a GPU; what is tied is copied once.

    ``earlier``: copies that are not needed any more, whose memory is taken where names and shapes agree.
    """
    buffers = dict(earlier)
    copies: dict[tuple, torch.Tensor] = {}
    copied = []
    for name, weight in weights:
        place = (weight.data_ptr(), weight.shape)
        if place not in copies:
            buffer = buffers.get(name)
            if buffer is None or buffer.shape != weight.shape:
                buffer = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=weight.is_cuda)
            copies[place] = buffer.copy_(weight.detach())
        copied.append((name, copies[place]))
    return copied


def finish_gpu_work() -> None:
    """Wait until the GPU has done everything it was given: CUDA streams of different threads do not wait by themselves.

    vLLM runs its thread on a stream of its own, which would otherwise read weights that are still being written, or
    still read weights that the next optimizer step overwrites.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def push_weights(llm, weights: list[tuple[str, torch.Tensor]], inflight_updates: str = "off") -> None:
    """New weights into a vLLM engine, from the thread that owns it, between two of its steps.

    vLLM's ``reload_weights`` is the one route that also serves CPU kernels, which keep packed copies. ``weights`` must
    hold ``lm_head.weight`` even when tied: the head has a packed copy of its own on CPUs, which would silently stay
    stale. The prefix cache holds keys and values of the old weights; the engine refuses to drop it while a request
    runs. ``inflight_updates`` recompute preempts the requests that run: their keys and values are computed anew, by the
    new weights. keep leaves them theirs; a cache salt then has to keep new requests from them.

    Raises RuntimeError if a parameter of the engine was not loaded, or only in part, and if the prefix cache was kept.
    """
    missing = set().union(*llm.collective_rpc(reload_worker, args=(weights,)))
    if missing:
        raise RuntimeError(
            f"the weight push did not reach {len(missing)} parameters of the vLLM engine, which would stay stale: "
            f"{', '.join(sorted(missing)[:8])}{', ...' if len(missing) > 8 else ''}. This vLLM cannot update this "
            f"model; use --rollout hf"
        )
    kept = inflight_updates == "keep"
    if not kept and not llm.reset_prefix_cache(reset_running_requests=inflight_updates == "recompute"):
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


def reload_worker(worker, weights: list[tuple[str, torch.Tensor]]) -> list[str]:
    """Load ``weights`` into the model of a vLLM worker; the names of parameters that did not get all their elements.

    vLLM loads layer by layer and only logs what was not loaded. Its own record of each layer says so exactly, between
    the loading and the end of the reload, which is where this looks. Written against vLLM 0.32.
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
    try:
        worker.reload_weights(weights_iterator=weights)
    finally:
        del model.load_weights
    return missing


def _unloaded_parameters(model) -> list[str]:
    """Names of the parameters of layers that vLLM has not loaded in full, in the middle of a layer-by-layer reload."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    loaded_storages = set()
    unloaded = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        finished = not info.can_load()  # vLLM resets the record of a layer that got all its elements
        if isinstance(layer, VocabParallelEmbedding) and (info.load_numel or 0) > 0:
            finished = True  # a vocabulary is padded, and the padding is not in the checkpoint
        own = dict(layer.named_parameters(recurse=False))
        old = info.kernel_tensors[0] if info.kernel_tensors is not None else own
        if finished:
            loaded_storages.update(tensor.data_ptr() for tensor in old.values())
        else:
            unloaded += [(f"{name}.{key}", old[key].data_ptr()) for key in own]
    if torch.cuda.is_available():  # a tied head on a GPU is its embedding; on a CPU it has a packed copy
        unloaded = [(name, storage) for name, storage in unloaded if storage not in loaded_storages]
    return [name for name, _ in unloaded]

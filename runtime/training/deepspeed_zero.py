"""DeepSpeed ZeRO: configuration, gathered weights, states in GPU or CPU memory, and the calls of a training step."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from runtime.system import process
from runtime.training.memory import REDUCE_BUCKET

PLACES = ("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_CPU_AFFINITY")
# DeepSpeed's names of the fp32 master weights of a rank: ZeRO 1 and 2, 1 in bf16, and 3.
MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
NamedWeights = list[tuple[str, torch.Tensor]]


@torch.no_grad()
def current_weights(
    policy, zero_stage: int, checkpoint_names: bool = False, in_buckets: bool = False
) -> NamedWeights | ShardedWeights:
    """Return the policy's weights by name, the tied output head included, complete on every rank.

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
    weights = model.state_dict() if zero_stage < 3 else dict(gathered(model.state_dict(keep_vars=True)))
    if checkpoint_names:
        from transformers.core_model_loading import revert_weight_conversion

        weights = revert_weight_conversion(model, weights)
    finish_gpu_work()
    return list(weights.items())


def _is_renamed(model) -> bool:
    """Return True if the checkpoint of a model has other names or tensors than its module."""
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
            elements += whole_numel(weight)
            if elements >= self.bucket_elements:
                yield from gathered(bucket)
                bucket, elements = {}, 0
        yield from gathered(bucket)


def gathered(weights: dict[str, torch.Tensor]) -> NamedWeights:
    """Gather copies of weights that ZeRO-3 has sharded, outside vLLM's inference mode, whose tensors autograd rejects.

    Tied weights stay tied.
    """
    import deepspeed

    parameters = [weight for weight in weights.values() if isinstance(weight, nn.Parameter)]
    with torch.inference_mode(False), torch.no_grad(), deepspeed.zero.GatheredParameters(parameters):
        copies = {id(weight): weight.detach().clone() for weight in weights.values()}
    return [(name, copies[id(weight)]) for name, weight in weights.items()]


def whole_numel(weight: torch.Tensor) -> int:
    """Return the number of elements of a weight, also while ZeRO-3 has sharded it."""
    return getattr(weight, "ds_numel", weight.numel())


def weight_bytes(weights: NamedWeights | ShardedWeights) -> int:
    """Return the bytes of named weights. A tied head counts, for an engine gets it under its own name."""
    entries = weights.entries.items() if isinstance(weights, ShardedWeights) else weights
    return sum(whole_numel(weight) * weight.element_size() for _, weight in entries)


def finish_gpu_work() -> None:
    """Wait until the GPU has done everything it was given: CUDA streams of different threads do not wait by themselves.

    vLLM runs its thread on a stream of its own, which would otherwise read weights that are still being written, or
    still read weights that the next optimizer step overwrites.
    """
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def deepspeed_config(args, dtype: torch.dtype, cuda: bool) -> dict:
    """Configure ZeRO with fp32 master weights and fp32 accumulation (bf16, the default, loses 1 to 2 % of a gradient).

    Clipping has to be set here: accelerate's ``clip_grad_norm_`` does nothing under DeepSpeed. Buckets of the default
    size (5e8) are allocated in every backward pass, which on a CPU costs more than the reduction. Overlapped reduction
    makes a single rank wait for the device after each micro-batch, with nothing to reduce.
    """
    bucket = REDUCE_BUCKET[cuda]
    zero = {
        "stage": args.zero_stage,
        "overlap_comm": cuda and process.world_size() > 1,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    for part in ("optimizer", "param"):
        if part in args.offload:
            zero[f"offload_{part}"] = {"device": "cpu", "pin_memory": cuda}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": args.max_grad_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "timers": {"throughput": {"enabled": False}},  # from the third step on it would wait for the GPU in each pass
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    if dtype == torch.float16:  # the loss is scaled: 2^16, halved by a gradient that overflows, whose step is dropped
        config["fp16"] = {"enabled": True, "hysteresis": 1}
    if dtype != torch.float32:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def offload_threads() -> int:
    """Return the CPU threads for the steps of an offloaded optimizer: this rank's share of the cores it may use.

    Launchers set OMP_NUM_THREADS to 1 for several ranks. Without a launcher torch's own number stays.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return torch.get_num_threads()
    return max(1, int(process.usable_cores()) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def make_accelerator(args, dtype: torch.dtype, device: torch.device):
    """Create accelerate's Accelerator with DeepSpeed as ``args`` specify it, and the process group of all ranks.

    DeepSpeed would otherwise compile an all-reduce for inference on CPUs, which training never calls, and load it at
    every start, with a lock file. A killed process leaves that file behind, and every later run waits for it forever.
    """
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    # The flags of the run decide, not a launcher's own configuration: its mixed precision would replace --dtype.
    for name in [x for x in os.environ if x.startswith("ACCELERATE_") and x not in PLACES]:
        del os.environ[name]
    deepspeed.ops.__compatible_ops__ = {}  # what it might compile; no flag, but only read for that all-reduce
    cuda = device.type == "cuda"
    if cuda and "optimizer" in args.offload:
        torch.set_num_threads(offload_threads())
    # A rank may wait long for one that still generates, verifies or writes. Watch ends a run in which no rank moves.
    process_group = InitProcessGroupKwargs(backend="nccl" if cuda else "gloo", timeout=timedelta(days=1))
    plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_config(args, dtype, cuda))
    return Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[process_group])


def dedupe_fp32_weights(engine):
    """Drop what DeepSpeed 0.19.8 does in vain or twice under ZeRO 1 and 2. Returns the engine; no number changes.

    In fp32 the master weights are a copy of the weights; on one rank both can be the same memory. Gradients are summed
    in one buffer, on one rank without buckets and a division by 1. In bf16 two passes look for what is not finite, and
    the norm shows it as well. Gradients below the clipping limit are not multiplied by 1.
    """
    zero, alone = engine.optimizer, dist.get_world_size() == 1
    if not hasattr(zero, "single_partition_of_fp32_groups") or zero.cpu_offload:
        return engine
    if zero.dtype == torch.bfloat16:
        zero.check_overflow = lambda partition_gradients: None
    if zero.dtype == torch.float32:
        zero._use_compact_grad_partition_buffer = lambda group: True
        if alone:
            for master, weights in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups_flat, strict=True):
                master.data = weights.data
            zero._link_all_hp_params()  # the fragments by which DeepSpeed saves would keep the copy alive
    if zero.dtype != torch.float16:  # whose gradients are scaled
        clip = zero.unscale_and_clip_grads
        zero.unscale_and_clip_grads = lambda grads, norm: norm + 1e-6 <= zero.clip_grad or clip(grads, norm)
    if alone:
        zero.reduce_independent_p_g_buckets_and_remove_grads = partial(_add_gradient, zero)
    return engine


def _add_gradient(zero, weight: nn.Parameter, group: int) -> None:
    """Add the gradient of a weight to those of earlier micro-batches, where one rank has all of its sums."""
    sums = zero._get_compact_grad_partition_slice(group, 0, zero.get_param_id(weight), weight.numel())
    sums.add_(zero.get_gradient_for_reduction(weight).view(-1))
    weight.grad = weight.grad_accum = None


@torch.no_grad()
def dither_masters(engine):
    """Add noise to the fp32 master weights of a bf16 engine, which leaves its bf16 weights as they are. Returns it.

    At first the masters of a bf16 checkpoint are bf16 numbers. A bf16 weight then stays the same until its updates add
    up to half the distance to the next number: a weight of 0.02, for 60 steps of 1e-6. With uniform noise of at most
    that half, a weight changes with a probability of update / distance: on average it moves as in fp32, from the first
    step on. docs/maintainers/README.md compares runs. A resumed run gets the masters of its checkpoint.
    """
    if not engine.bfloat16_enabled():
        return engine
    generator = torch.Generator().manual_seed(torch.initial_seed())
    for master in next(getattr(engine.optimizer, name) for name in MASTERS if hasattr(engine.optimizer, name)):
        for weights in master.data.split(2**22):
            noise = torch.empty(weights.shape, dtype=torch.int32).random_(1 - 2**15, 2**15, generator=generator)
            noise = noise.to(weights.device).masked_fill_(weights == 0, 0)  # -1 in the bits of zero would be a NaN
            weights.view(torch.int32).add_(noise)
    return engine


def clear_dropped_gradients(engine) -> None:
    """Forget the gradients of a step that DeepSpeed dropped. ``backward_and_step`` calls it after each optimizer step.

    DeepSpeed 0.19.8 does so itself except in bf16 under ZeRO 1 and 2 with the optimizer offloaded: there the sums of
    averaged gradients keep their NaN, which would also drop every later step.
    """
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    if not engine.was_step_applied() and isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        for group in engine.optimizer.averaged_gradients:
            engine.optimizer.averaged_gradients[group] = None


def leave_gpu(engines: Iterable) -> None:
    """Move weights, fp32 master weights and optimizer states of DeepSpeed engines (ZeRO 2) to CPU memory.

    In between they can be read, pushed and saved, but not called. Gradients do not outlive the optimizer step.
    DeepSpeed moves what it trains; frozen weights, which are most of a model with adapters, are moved here.
    """
    for engine in engines:
        engine.offload_states()
        for weight in filter(lambda weight: not weight.requires_grad, engine.parameters()):
            weight.data = weight.data.to("cpu", copy=True)
    finish_gpu_work()


def return_to_gpu(engines: Iterable) -> None:
    """Move the engines' states back to the GPU, the reverse of ``leave_gpu``."""
    for engine in engines:
        engine.reload_states()
        for weight in filter(lambda weight: not weight.requires_grad, engine.parameters()):
            weight.data = weight.data.to(engine.device, copy=True)


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Return the parameters and buffers of a module, each tied tensor once."""
    yield from module.parameters()
    yield from module.buffers()


def pin(module: nn.Module) -> None:
    """Move a module's tensors to page-locked memory, from which a GPU reads several times as fast."""
    if torch.cuda.is_available():
        for tensor in _tensors_of(module):
            tensor.data = tensor.data.pin_memory()


def borrow_device(module: nn.Module, device: torch.device) -> None:
    """Have a module that is not trained compute on ``device``, with copies of its tensors until ``return_device``.

    The tensors themselves stay in CPU memory, so that nothing has to be copied back.
    """
    for tensor in _tensors_of(module):
        if tensor.device != device:
            tensor.at_home = tensor.data
            tensor.data = tensor.data.to(device, non_blocking=True, copy=True)


def return_device(module: nn.Module) -> None:
    """Drop the copies that ``borrow_device`` made."""
    for tensor in _tensors_of(module):
        if hasattr(tensor, "at_home"):
            tensor.data = tensor.at_home
            del tensor.at_home


def set_learning_rate(engine, rate: float) -> None:
    """Set the learning rate of a DeepSpeed engine's optimizer."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def backward_and_step(engine, loss: torch.Tensor, is_last: bool, drop: bool = False) -> None:
    """Run the backward pass of a micro-batch and, after the last one of a mini-batch, the optimizer step.

    ``drop``: do not take it. DeepSpeed skips a step whose gradient is not finite, on every rank: this is the only way
    to drop gradients that it has already accumulated.
    """
    if drop:
        loss = loss * math.nan
    engine.set_gradient_accumulation_boundary(is_boundary=is_last)
    engine.backward(loss)
    if drop and engine.fp16_enabled():  # what DeepSpeed halves: not this gradient's size was at fault
        engine.optimizer.loss_scale *= 2
    if is_last:
        engine.step()
        clear_dropped_gradients(engine)

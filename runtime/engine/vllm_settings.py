"""Device-dependent settings: arguments of vLLM, its share of a GPU's memory, and inputs of the memory bound."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch

from runtime.engine import cpu_kernels
from runtime.training import cpu_rates, device_sizes, memory
from runtime.training.model_files import read_configs


def take_gpu(args) -> None:
    """Give the calling thread, which will build an engine, this rank's GPU.

    With --async_steps next to a trainer it gets a CUDA stream of its own with the higher priority: on the default one a
    decode step would wait for all kernels that the trainer has started. vLLM uses the stream that is set after import.
    """
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if args.async_steps > 0 and args.vllm_engines == 0:
        importlib.import_module("vllm")
        torch.cuda.set_stream(torch.cuda.Stream(priority=-1))


def memory_setting(args, dtype: torch.dtype, world_size: int) -> memory.Setting:
    """Return the setting that a rank's memory depends on, for the smallest GPU of the node: all ranks get one size."""
    cards = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
    critic = not getattr(args, "disable_value", True)
    return memory.Setting(world_size, dtype.itemsize == 2, min(cards, default=0), critic)


def product_rates(args) -> dict[str, float]:
    """Return the matrix product rates that decide sizes and data type on a CPU, or {} on a GPU."""
    if torch.cuda.is_available():
        return {}
    return args.recorded_choices.get("product_rates") or cpu_rates.known_rates()


def engine_share(args, dtype: torch.dtype, world_size: int) -> float:
    """Return the fraction of a GPU's memory for an engine. Next to a trainer it leaves enough for the trainer."""
    if args.vllm_engines > 0 or not hasattr(args, "num_samples_per_prompt_rollout"):  # scripts/evaluate.py
        return memory.default_sizes(args, True).vllm_gpu_memory_utilization
    model = memory.read_model(args.model)
    sizes, _ = device_sizes.sizes_for(args, model, memory_setting(args, dtype, world_size))
    return sizes.vllm_gpu_memory_utilization


def graph_size(args, max_num_seqs: int, world_size: int) -> dict[str, int]:
    """Return the largest batch for which an engine needs a CUDA graph, where vLLM's own limit of 512 is below that.

    It is the number of sequences that may decode at once. Without a graph every kernel is started from Python.
    """
    most = memory.most_sequences(args, max_num_seqs, world_size)
    own = {"compilation_config", "cudagraph_capture_sizes"}
    if most <= 512 or not own.isdisjoint(args.engine_args):
        return {}
    steps = -(-most // 16)  # of vLLM's sizes
    return {"max_cudagraph_capture_size": 16 * steps}


def attention_backend(args, dtype: torch.dtype) -> dict[str, str]:
    """Return the backend for datacenter Blackwell (10.x), where vLLM's choice depends on whether it finds nvcc.

    Empty elsewhere, where the user gives one, and for models (latent attention, attention sinks) that need another.
    """
    config = read_configs(args.model, "--model_name_or_path", dry_run=True)[0]
    text = config.get("text_config", config)
    major, _ = torch.cuda.get_device_capability()
    own = {"attention_backend", "attention_config"}
    if major != 10 or dtype == torch.float32:
        return {}
    if text.get("kv_lora_rank") is not None or text.get("model_type") == "gpt_oss":
        return {}
    return {"attention_backend": "FLASH_ATTN"} if own.isdisjoint(args.engine_args) else {}


def register_classes(architectures: list[str]) -> None:
    """Import vLLM's classes of a model in this process, which needs them anyway.

    vLLM would first import them in a process of its own to ask what they support: 15 CPU seconds of the first start on
    a machine, and of no later one, for it keeps the answers.
    """
    from vllm import ModelRegistry

    for name in architectures:
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def engine_settings(args, dtype: torch.dtype, world_size: int) -> dict[str, Any]:
    """Return arguments of vLLM's ``LLM`` for this device, and ``--vllm_args``. Call it in the thread that builds it."""
    cuda = torch.cuda.is_available()
    if cuda:
        take_gpu(args)  # a thread starts on device 0, and on the trainer's stream
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    if args.vllm_tensor_parallel_size == 1:  # else each engine waits for all to be built, also one that is built again
        ExecutorWithExternalLauncher.determine_available_memory = UniProcExecutor.determine_available_memory
    if cuda:
        usual = {"gpu_memory_utilization": engine_share(args, dtype, world_size)}
        usual["kernel_config"] = {"enable_flashinfer_autotune": False}  # minutes, where it is found
        usual |= attention_backend(args, dtype)
    else:
        cpu_kernels.save_time_and_memory()
        model = memory.read_model(args.model)
        cache = memory.cpu_cache(args, model, dtype.itemsize, world_size)
        usual = {"kv_cache_memory_bytes": int(cache)}
        usual["kernel_config"] = cpu_kernels.kernel_config()
        usual["enforce_eager"] = True  # compiling takes longer than a short run
        usual["block_size"] = memory.CPU_BLOCK  # the default of 128 would share no prompt shorter than that
        config = read_configs(args.model, "--model_name_or_path", dry_run=True)[0]
        register_classes(config.get("architectures") or [])
        if not memory.STATES.isdisjoint({*config, *config.get("text_config", {})}):
            usual["enable_prefix_caching"] = False  # it needs chunked prefill, which is off on CPUs (build_vllm)
    sizes = memory.default_sizes(args, cuda)
    longest = 0
    if not cuda:
        longest = args.max_prompt_length + args.max_response_length
    tokens = max(sizes.vllm_max_num_batched_tokens, sizes.vllm_max_num_seqs, longest)
    numbers = {"max_num_seqs": sizes.vllm_max_num_seqs, "max_num_batched_tokens": tokens}
    if cuda:
        usual |= graph_size(args, sizes.vllm_max_num_seqs, world_size)
    return usual | args.engine_args | numbers

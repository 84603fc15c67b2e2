"""Device-dependent settings: arguments of vLLM, its memory, and the conditions of the memory bound."""

from __future__ import annotations

import importlib
import math
import os
from typing import Any

import torch

from runtime.system import process
from runtime.training import memory, pretrained
from runtime.training.model_files import STATES, Model, read_configs, read_model

CPU_BLOCK = 32  # tokens of a block of the KV cache on a CPU; the default of 128 would share no prompt below that


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
    return memory.Setting(
        ranks=world_size,
        itemsize=dtype.itemsize,
        card=min(cards, default=0),
        critic=not getattr(args, "disable_value", True),
        host=process.free_memory(),
        cache=cpu_cache(args, read_model(args.model), dtype.itemsize, world_size),
    )


def engine_share(args, dtype: torch.dtype, world_size: int) -> float:
    """Return the fraction of a GPU's memory for an engine. Next to a trainer it leaves enough for the trainer."""
    if args.vllm_engines > 0 or not hasattr(args, "num_samples_per_prompt_rollout"):  # scripts/evaluate.py
        return memory.default_sizes(args, True).vllm_gpu_memory_utilization
    setting = memory_setting(args, dtype, world_size)
    sizes, _ = memory.sizes_for(args, read_model(args.model), setting)
    return sizes.vllm_gpu_memory_utilization


def most_sequences(args, max_num_seqs: int, ranks: int) -> int:
    """Return the largest number of sequences that an engine may decode at once, in training or in an evaluation."""
    if not hasattr(args, "num_samples_per_prompt_rollout"):  # scripts/evaluate.py without a run
        return max_num_seqs
    engines = args.vllm_engines or ranks // args.vllm_tensor_parallel_size
    group = args.generation_size or args.num_samples_per_prompt_rollout
    prompts = math.ceil(args.num_unique_prompts_rollout / engines)
    trained = prompts * group * (1 + args.async_steps)
    evaluated = math.ceil(args.eval_prompts / engines) * args.eval_samples
    return min(max_num_seqs, max(trained, evaluated))


def cpu_cache(args, model: Model | None, itemsize: int, ranks: int, most: float = 0) -> float:
    """Return the bytes of the KV cache on a CPU: the longest sequences and a quarter more, or what memory there is.

    That is an eighth of all, at least 0.5 GiB, or ``most``. The quarter is for models whose layers differ: vLLM rounds
    up their groups. It rejects less than a sequence of full length needs and a block that stays empty.
    """
    most = most or max(0.5 * memory.GIB, process.free_memory("MemTotal") / 8)
    if model is None or model.recurrent:
        return 0.5 * memory.GIB
    size = args.engine_args.get("block_size", CPU_BLOCK)
    prompt = getattr(args, "longest_prompt", None) or args.max_prompt_length
    longest = math.ceil((prompt + args.engine_length - args.max_prompt_length) / size)
    full = math.ceil(args.engine_length / size)
    sequences = most_sequences(args, memory.default_sizes(args, False).vllm_max_num_seqs, ranks)
    block = size * model.cache_numbers * itemsize
    wanted = 1.25 * sequences * longest * block
    least = 1.25 * (full + 1) * block
    return max(min(most, wanted), least)


def graph_size(args, max_num_seqs: int, world_size: int) -> dict[str, int]:
    """Return the largest batch for which an engine needs a CUDA graph, where vLLM's own limit of 512 is below that.

    It is the number of sequences that may decode at once. Without a graph every kernel is started from Python.
    """
    most = most_sequences(args, max_num_seqs, world_size)
    own = {"compilation_config", "cudagraph_capture_sizes"}
    if most <= 512 or not own.isdisjoint(args.engine_args):
        return {}
    steps = -(-most // 16)  # of vLLM's sizes
    return {"max_cudagraph_capture_size": 16 * steps}


def save_time_and_memory() -> None:
    """Leave out two things that vLLM does on CPUs for nothing. Call it before an engine is built.

    It compiles a function that counts the tokens which are likelier than the sampled one, and calls it for each: 14 s
    of a user's first run. Nothing here reads such ranks: they are 0. And it packs every embedding for matrix products,
    a copy that every push makes again, although as a rule only that of the head is multiplied with.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.v1.sample import sampler

    sampler.batched_count_greater_than = lambda x_BV, _: torch.zeros(len(x_BV)).long()
    if not hasattr(UnquantizedEmbeddingMethod, "pack"):
        UnquantizedEmbeddingMethod.pack = UnquantizedEmbeddingMethod.process_weights_after_loading
        UnquantizedEmbeddingMethod.process_weights_after_loading = pack_at_first_use


def pack_at_first_use(method, layer: torch.nn.Module) -> None:
    """Pack an embedding for matrix products when it is first used for one, as the head of Gemma 2 is."""

    def pack_and_multiply(x, weight, bias):
        method.pack(layer)  # sets layer.cpu_linear
        return layer.cpu_linear(x, weight, bias)

    layer.cpu_linear = pack_and_multiply


def as_transformers_reads() -> dict[str, str]:
    """Have vLLM read the files that transformers reads, not Mistral's own or all of them. Returns its arguments."""
    from vllm.model_executor.model_loader import default_loader, weight_utils

    plain = weight_utils.filter_duplicate_safetensors_files

    def chosen(files, folder, index):
        single = os.path.join(folder, "model.safetensors")
        return [single] if single in files else plain(files, folder, index)

    default_loader.filter_duplicate_safetensors_files = chosen
    return dict.fromkeys(("load_format", "config_format", "tokenizer_mode"), "hf")


def engine_settings(args, dtype: torch.dtype, world_size: int) -> dict[str, Any]:
    """Return arguments of vLLM's ``LLM`` for this device, and ``--vllm_args``. Call it in the thread that builds it."""
    cuda = torch.cuda.is_available()
    if cuda:
        take_gpu(args)  # a thread starts on device 0, and on the trainer's stream
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    config = read_configs(args.model, "--model_name_or_path", dry_run=True)[0]
    if args.vllm_tensor_parallel_size == 1:  # else each engine waits for all to be built
        ExecutorWithExternalLauncher.determine_available_memory = UniProcExecutor.determine_available_memory
    if cuda:
        usual = {"gpu_memory_utilization": engine_share(args, dtype, world_size)}
        usual["kernel_config"] = {"enable_flashinfer_autotune": False}  # minutes, where it is found
    else:
        save_time_and_memory()
        of_model = args, read_model(args.model), dtype.itemsize, world_size
        cache = cpu_cache(*of_model)
        needed = cpu_cache(*of_model, math.inf)
        if cache < needed and "kv_cache_memory_bytes" not in args.engine_args:
            process.print_on_rank_0("the KV cache is too small for all sequences at once: see kv_cache_memory_bytes")
        usual = {"kv_cache_memory_bytes": int(cache)}
        usual["enforce_eager"] = True  # compiling takes longer than a short run
        usual["block_size"] = CPU_BLOCK
        if not STATES.isdisjoint({*config, *config.get("text_config", {})}):
            usual["enable_prefix_caching"] = False  # it needs chunked prefill, which is off on CPUs (build_vllm)
    if args.config_overrides:
        changed = pretrained.load_config(args).to_dict()
        usual["hf_overrides"] = pretrained.engine_overrides(changed, args.config_overrides)
    usual["language_model_only"] = "text_config" in config  # of a vision-language model
    usual |= as_transformers_reads()
    sizes = memory.default_sizes(args, cuda)
    longest = 0 if cuda else args.engine_length
    tokens = max(sizes.vllm_max_num_batched_tokens, sizes.vllm_max_num_seqs, longest)
    numbers = {"max_num_seqs": sizes.vllm_max_num_seqs, "max_num_batched_tokens": tokens}
    if cuda:
        usual |= graph_size(args, sizes.vllm_max_num_seqs, world_size)
    return usual | args.engine_args | numbers

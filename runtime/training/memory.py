"""Sizes that depend on the device, and an upper bound of a rank's memory with them. Arithmetic, without torch.

docs/maintainers/memory.md has the bound in words, and what runs were measured to hold. Sizes are in bytes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from runtime.system.process import refuse
from runtime.training.model_files import Model

GIB = 2**30
FULL_KL_SAMPLES = 4  # of a step, for which the exact KL is logged
USABLE = 0.95  # of a GPU; the rest is for fragments
# What a process has before it loads a model, by --rollout, and on a GPU, with graphs and what the engine computes with.
PROCESS = {"hf": 0.95e9, "vllm": 1.6e9}
CUDA = 2 * GIB  # not measured
ENGINE_WORK = 1.5 * GIB  # not measured
GAPS = 0.25  # of all else, on a CPU: freed memory that no later tensor fits into; from whole runs of the quickstart
# On a CPU and on a GPU: gradients that DeepSpeed reduces at a time, and logits that are fp32 at a time.
REDUCE_BUCKET = (2 * 10**7, 2 * 10**8)
LOGIT_BLOCK = (2**19, 2**24)  # 2 MiB for a CPU's cache, 64 MiB to keep a GPU busy
# Micro-batches and shares of a GPU for the engine, the most wanted first; above 0.4 only for one that sleeps while the
# trainer works. Its KV cache must hold so many sequences of full length.
TOKENS = (16384, 8192, 4096, 2048)
SHARES = (0.8, 0.6, 0.4, 0.3, 0.2)
ENGINE_SEQUENCES = 64
# What frees memory on a GPU besides --gradient_checkpointing, the cheapest in time first: --vllm_sleep and --offload.
REMEDIES = (
    ("", ()),
    ("engine", ()),
    ("all", ()),
    ("engine", ("optimizer",)),
    ("", ("optimizer",)),
)


@dataclass(frozen=True)
class Setting:
    """Conditions of a rank that determine its memory, besides model and flags."""

    ranks: int  # that train
    itemsize: int  # bytes of a number of the model
    card: float = 0  # memory of the GPU; 0 on a CPU
    critic: bool = False
    host: float = math.inf  # the rank's share of the memory that the node has left
    cache: float = 0.5 * GIB  # the engine's KV cache on a CPU


@dataclass
class Sizes:
    """Sizes that depend on the device, by the names of their flags."""

    micro_batch_tokens: int
    logprob_chunk: int
    vllm_gpu_memory_utilization: float
    vllm_max_num_seqs: int
    vllm_max_num_batched_tokens: int


def default_sizes(args, cuda: bool) -> Sizes:
    """Return the sizes of these flags on a CPU, or on a GPU with enough memory; ``sizes_for`` fits them to a GPU.

    A micro-batch holds at least the longest sample. A GPU needs about 16,000 tokens to be busy for longer than it takes
    to start its kernels; a CPU core is busy with 512, and fewer need less memory. The engine's sizes for a GPU are
    vLLM's own for 80 GB; on a CPU 256 sequences at once take a fifth less time than four times 64.
    """
    longest = args.max_prompt_length + args.max_response_length
    default = Sizes(
        micro_batch_tokens=max(longest, 16384 if cuda else 512),
        logprob_chunk=4096 if cuda else 512,
        vllm_gpu_memory_utilization=0.9 if args.vllm_engines > 0 else 0.4,
        vllm_max_num_seqs=1024 if cuda else 256,
        vllm_max_num_batched_tokens=16384 if cuda else 8192,
    )
    own = args.engine_args
    given = {name: getattr(args, name, own.get(name.removeprefix("vllm_"))) for name in vars(default)}
    return replace(default, **{name: value for name, value in given.items() if value is not None})


def row_lengths(args) -> tuple[int, int]:
    """Return the largest number of tokens of a sample, and of a group that shares one copy of its prompt."""
    group = args.num_samples_per_prompt_rollout * args.max_response_length
    return args.max_prompt_length + args.max_response_length, args.max_prompt_length + group


def most_tokens(args, budget: int, ranks: int) -> int:
    """Return the tokens of the largest micro-batch: the budget, or a rank's part of a mini-batch and one row more."""
    prompts = -(-args.num_unique_prompts_rollout // args.num_mini_batches)
    samples = -(-prompts * args.num_samples_per_prompt_rollout // ranks)
    sample, group = row_lengths(args)
    return min(budget, samples * sample + group * (ranks > 1))


def trainer_states(args, model: Model, setting: Setting) -> dict[str, float]:
    """Return the bytes of policy, critic and reference by the parts that --offload names, and of gradients."""
    shard = model.parameters / setting.ranks
    trained = 1 + setting.critic
    gradients = 4 * shard
    if args.zero_stage == 1:  # all of them, in both types
        gradients = (6 if setting.itemsize == 2 else 4) * model.parameters
    return {
        "param": setting.itemsize * (shard if args.zero_stage == 3 else model.parameters) * trained,
        "optimizer": 12 * shard * trained,
        "ref": setting.itemsize * model.parameters * args.loads_reference,
        "gradients": gradients if args.zero_stage == 2 and setting.card else gradients * trained,  # the critic's later
    }


def activations(args, model: Model, setting: Setting, tokens: int) -> float:
    """Return the bytes that a micro-batch saves for its backward pass: norms, projections, MLP, attention scores."""
    number = setting.itemsize
    attention = args.attn_implementation
    if attention == "auto" and setting.card == 0:
        attention = "grouped" if number == 2 else "sdpa"
    scores = {
        "eager": model.heads * (6 if number == 2 else 4),
        "grouped": model.heads * number,
        "sdpa": number,
    }
    wide = model.hidden + model.heads * model.head_size + model.intermediate
    kept = 8 * model.hidden + 4 * number * wide + 4 * model.heads + 8 + scores.get(attention, 0) * tokens
    layers = 1 if args.gradient_checkpointing else model.layers
    return tokens * (kept * layers + number * model.hidden * model.layers)


def logits(args, model: Model, setting: Setting, tokens: int) -> float:
    """Return the bytes of the logits of so many tokens and their gradient, or of an exact KL, which has nine arrays."""
    count = tokens * model.vocabulary
    exact_kl = (setting.itemsize + 28) * count
    number, head = setting.itemsize, 0
    if "head_dtype" in (args.override_config or ""):  # in fp32, with a copy of the head and its gradient
        number, head = 4, 8 * model.vocabulary * model.hidden
    plain = 2 * number * count + 8 * min(LOGIT_BLOCK[setting.card > 0], count) + head
    if "full" in (args.kl_estimator, args.kl_reward_estimator) and any(args.kl_coefficients):
        return plain + exact_kl
    logged = -(-FULL_KL_SAMPLES // setting.ranks) * args.max_response_length
    return max(plain, exact_kl * min(1, logged / tokens) * args.loads_reference)


def engine_memory(args, model: Model, setting: Setting, share: float) -> tuple[float, float]:
    """Return the bytes of (weights, KV cache) of an engine next to a trainer; on a GPU it fills ``share`` of it."""
    if args.vllm_engines > 0:
        return 0, 0
    weights = model.parameters * setting.itemsize / args.vllm_tensor_parallel_size
    if args.rollout == "hf":
        return weights, 0
    cache = setting.cache
    if setting.card > 0:
        weights += ENGINE_WORK
        cache = max(0, share * setting.card - weights)
    return weights, args.engine_args.get("kv_cache_memory_bytes", cache)


def predict(args, model: Model, setting: Setting, size: Sizes) -> dict[str, float]:
    """Return an upper bound of a rank's memory in six parts: in an update, or while sampling if that needs more."""
    on_gpu = setting.card > 0
    states = trainer_states(args, model, setting)
    visitor = states["ref"] * (on_gpu and "ref" in args.offload)  # on the device during its own pass alone
    flat = 4 * model.parameters / setting.ranks  # gradients of the optimizer's step
    if on_gpu:
        states |= dict.fromkeys(args.offload, 0)
    if on_gpu and "optimizer" in args.offload:
        states["gradients"] *= args.zero_stage == 1
        flat = 0
    engine, cache = engine_memory(args, model, setting, size.vllm_gpu_memory_utilization)

    tokens = most_tokens(args, size.micro_batch_tokens, setting.ranks)
    rows = logits(args, model, setting, min(size.logprob_chunk, tokens))
    head = model.vocabulary * model.hidden
    gathered = 0
    if args.zero_stage == 3 and (setting.ranks > 1 or "param" in args.offload):
        live = max(10**9, head)  # DeepSpeed's stage3_max_live_parameters
        gathered = setting.itemsize * min(model.parameters, live)
    backward = activations(args, model, setting, tokens) + rows + gathered
    # At its end: buckets of gradients, their copies, and those of a tied head in fp32.
    reduction = 3 * setting.itemsize * (REDUCE_BUCKET[on_gpu] + head) + 4 * head + gathered

    samples = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    arrays = 31 * samples * args.max_response_length  # a step's flat arrays of all ranks, without a KL 12 less
    stays = not on_gpu or args.vllm_sleep == "off"  # the engine, during an update
    training = {
        "weights": states["param"] + states["ref"] + engine * stays,
        "gradients and optimizer": states["gradients"] + states["optimizer"],
        "activations": max(backward, reduction, flat, visitor + rows) - rows + arrays,
        "logits": rows,
        "KV cache": cache * stays,
        "process": CUDA if on_gpu else PROCESS[args.rollout],
    }
    awake = not on_gpu or args.vllm_sleep != "all"  # the trainer, while the engine samples
    sampling = training | {"activations": 0, "logits": 0, "KV cache": cache}
    sampling["weights"] = states["param"] * awake + states["ref"] + engine
    freed = on_gpu and args.zero_stage == 2
    sampling["gradients and optimizer"] = states["gradients"] * (not freed) + states["optimizer"] * awake
    most = max(training, sampling, key=lambda parts: sum(parts.values()))
    most["process"] += GAPS * sum(most.values()) * (not on_gpu)
    return most


def candidates(args, setting: Setting) -> list[Sizes]:
    """Return the sizes to try on a GPU if the flags leave them open, the most preferred first."""
    base = default_sizes(args, True)
    shares = [share for share in SHARES if share <= 0.4 or args.vllm_sleep != "off"]
    if args.vllm_engines > 0 or "gpu_memory_utilization" in args.engine_args:
        shares = [base.vllm_gpu_memory_utilization]
    longest = args.max_prompt_length + args.max_response_length
    budgets = sorted({args.micro_batch_tokens or max(longest, tokens) for tokens in TOKENS}, reverse=True)
    chunk = base.logprob_chunk if setting.card >= 40e9 else 1024
    found = []
    for tokens, share in itertools.product(budgets, shares):
        found.append(replace(base, micro_batch_tokens=tokens, logprob_chunk=chunk, vllm_gpu_memory_utilization=share))
    return found


def first_fit(args, model: Model, setting: Setting) -> Sizes | None:
    """Return the most preferred sizes that fit a GPU, with a KV cache for enough sequences, or None."""
    samples = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    tokens = args.max_prompt_length + args.max_response_length
    sequences = min(ENGINE_SEQUENCES, -(-samples // setting.ranks))
    needed = sequences * tokens * model.cache_numbers * setting.itemsize
    apart = args.vllm_engines > 0 or args.rollout == "hf" or "kv_cache_memory_bytes" in args.engine_args
    for size in candidates(args, setting):
        _, cache = engine_memory(args, model, setting, size.vllm_gpu_memory_utilization)
        room = apart or cache * args.vllm_tensor_parallel_size >= needed
        parts = predict(args, model, setting, size)
        if room and sum(parts.values()) <= USABLE * setting.card:
            return size
    return None


def sizes_for(args, model: Model | None, setting: Setting) -> tuple[Sizes, str]:
    """Return (sizes of micro-batches and engine, why these). Ends with exit code 2 if none fit the GPU.

    The flags that name them win, and then nothing is rejected.
    """
    if setting.card == 0:
        return default_sizes(args, False), "for a CPU"
    tried = candidates(args, setting)
    if model is None:
        return tried[0], "the model's config lacks the expected fields: its memory is unknown"
    found = first_fit(args, model, setting)
    if found is not None:
        part = "all of these fit" if found == tried[0] else "the largest that fit"
        return found, f"{part} a GPU of {setting.card / GIB:.1f} GiB"
    if args.micro_batch_tokens is not None and "gpu_memory_utilization" in args.engine_args:
        return tried[0], "as the flags say"
    smallest = predict(args, model, setting, tried[-1])
    needed = sum(smallest.values()) / GIB
    apart = args.async_steps > 0 or args.vllm_engines > 0  # then nothing sleeps in turns
    remedy = "give shorter lengths or more GPUs, with --gradient_checkpointing, --offload optimizer, --zero_stage 3"
    for sleep, offload in REMEDIES:
        more = {"vllm_sleep": sleep or args.vllm_sleep, "offload": offload or args.offload}
        if not (apart and sleep) and first_fit(replace(args, gradient_checkpointing=True, **more), model, setting):
            words = f" --vllm_sleep {sleep}" * (sleep != "") + " --offload optimizer" * len(offload)
            remedy = f"it fits with --gradient_checkpointing{words}"
            break
    refuse(
        f"--model_name_or_path {args.model_name_or_path}: the smallest sizes may need {needed:.1f} GiB, and the GPU "
        f"has {setting.card / GIB:.1f}; {remedy}. (To try all the same, give --micro_batch_tokens and "
        f"gpu_memory_utilization in --vllm_args.)"
    )


def host_memory(args, model: Model, setting: Setting) -> float:
    """Return the least that a rank needs of the node's memory: for all states on a CPU, on a GPU for those kept there.

    On one rank the master weights of an fp32 model are the weights.
    """
    states = trainer_states(args, model, setting)
    if setting.card == 0:
        weights, _ = engine_memory(args, model, setting, 0)
        masters = states["optimizer"] / 3 * (setting.itemsize == 4)
        return sum(states.values()) + weights - masters
    away = {*args.offload, *(("param", "optimizer") if args.vllm_sleep == "all" else ())}
    return sum(states[name] for name in away) + states["gradients"] * ("optimizer" in args.offload)


def check_host(args, model: Model | None, setting: Setting) -> None:
    """Reject a run whose states do not fit the node's memory, unless --micro_batch_tokens is given: exit code 2."""
    needed = host_memory(args, model, setting) if model else 0
    if needed <= setting.host or args.micro_batch_tokens is not None:
        return
    flag, remedy = f"--model_name_or_path {args.model_name_or_path}", "use a smaller model or more machines"
    if setting.card > 0:
        flag = f"--offload {' '.join(args.offload)}" if args.offload else f"--vllm_sleep {args.vllm_sleep}"
        remedy = "leave it out or use more GPUs"
    refuse(
        f"{flag}: a rank needs at least {needed / GIB:.1f} GiB of this machine's memory for weights and states of the "
        f"optimizer, and {setting.host / GIB:.1f} are free for it; {remedy}. (To try all the same, give "
        f"--micro_batch_tokens.)"
    )

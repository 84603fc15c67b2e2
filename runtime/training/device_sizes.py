"""Choose sizes of micro-batches and engine that fit the GPU, by the upper bound of memory.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from runtime.system.process import refuse
from runtime.training.memory import GIB, USABLE, Model, Setting, Sizes, default_sizes, predict

# Micro-batches and shares of a GPU for the engine, the most wanted first. One that sleeps while the trainer works may
# have more, and one that is alone nearly all.
TOKENS = (16384, 8192, 4096, 2048)
SHARES = {"beside": (0.4, 0.3, 0.2), "in turns": (0.8, 0.6, 0.4, 0.3, 0.2), "alone": (0.9,)}
# Flags that free memory on a GPU, the cheapest in time first.
REMEDIES = (
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "vllm_sleep": "engine"},
    {"gradient_checkpointing": True, "vllm_sleep": "all"},
    {"gradient_checkpointing": True, "vllm_sleep": "engine", "offload": ("optimizer",)},
    {"gradient_checkpointing": True, "offload": ("optimizer",)},
)
ENGINE_SEQUENCES = 64  # of full length that its KV cache must hold


def candidates(args, setting: Setting) -> Iterator[Sizes]:
    """Yield the sizes to try on a GPU if the flags leave them open, the most preferred first."""
    base = default_sizes(args, True)
    kind = "in turns" if args.vllm_sleep != "off" else "beside"
    if args.vllm_engines > 0:
        kind = "alone"
    given = args.engine_args.get("gpu_memory_utilization")
    longest = args.max_prompt_length + args.max_response_length
    chunk = base.logprob_chunk if setting.card >= 40e9 else 1024
    for tokens in sorted({max(longest, tokens) for tokens in TOKENS}, reverse=True):
        for share in SHARES[kind] if given is None else (given,):
            yield replace(
                base,
                micro_batch_tokens=args.micro_batch_tokens or tokens,
                logprob_chunk=chunk,
                vllm_gpu_memory_utilization=share,
            )


def fits(args, model: Model, setting: Setting, size: Sizes) -> bool:
    """Return whether the run fits a GPU's memory, and enough sequences fit the engine's KV cache."""
    cache = predict(args, model, setting, size).parts["KV cache"]
    samples = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    sequences = min(ENGINE_SEQUENCES, -(-samples // setting.ranks))
    keys_and_values = 2 * model.layers * model.kv_heads * model.head_size * setting.number  # of a token
    needed = sequences * (args.max_prompt_length + args.max_response_length) * keys_and_values
    own = "kv_cache_memory_bytes" in args.engine_args
    apart = args.vllm_engines > 0 or args.rollout == "hf" or own
    room = apart or cache * args.vllm_tensor_parallel_size >= needed
    return room and predict(args, model, setting, size).peak <= USABLE * setting.card


def first_fit(args, model: Model, setting: Setting) -> Sizes | None:
    """Return the most preferred sizes that fit a GPU, or None if none fit."""
    return next((size for size in candidates(args, setting) if fits(args, model, setting, size)), None)


def as_words(changes: dict) -> str:
    """Format flags as on a command line."""
    words = []
    for name, value in changes.items():
        words.append(f"--{name}")
        if value is not True:
            words.append(" ".join(value) if isinstance(value, tuple) else str(value))
    return " ".join(words)


def sizes_for(args, model: Model | None, setting: Setting) -> tuple[Sizes, str]:
    """Return (sizes of micro-batches and engine, why these). Ends with exit code 2 if none fit the GPU.

    The flags that name them win, and then nothing is rejected.
    """
    if setting.card == 0:
        return default_sizes(args, False), "for a CPU"
    wanted = next(candidates(args, setting))
    if model is None:
        return wanted, "the model's config lacks the expected fields: its memory is unknown"
    found = first_fit(args, model, setting)
    if found is not None:
        part = "all of these fit" if found == wanted else "the largest that fit"
        return found, f"{part} a GPU of {setting.card / GIB:.1f} GiB"
    if args.micro_batch_tokens is not None and "gpu_memory_utilization" in args.engine_args:
        return wanted, "as the flags say"
    least = list(candidates(args, setting))[-1]
    needed = predict(args, model, setting, least).peak / GIB
    apart = args.async_steps > 0 or args.vllm_engines > 0  # then nothing sleeps in turns
    remedy = "give shorter lengths or more GPUs, with --gradient_checkpointing, --offload optimizer, --zero_stage 3"
    for changes in REMEDIES:
        if not (apart and "vllm_sleep" in changes) and first_fit(replace(args, **changes), model, setting):
            remedy = f"it fits with {as_words(changes)}"
            break
    refuse(
        f"--model_name_or_path {args.model_name_or_path}: the smallest sizes may need {needed:.1f} GiB, and the GPU "
        f"has {setting.card / GIB:.1f}; {remedy}. (To try all the same, give --micro_batch_tokens and "
        f"gpu_memory_utilization in --vllm_args.)"
    )

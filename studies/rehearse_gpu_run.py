"""Plan a command for GPUs that are not here: whether it fits, with which sizes, and how long a step would take.

    python studies/rehearse_gpu_run.py h200:8 grpo.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct \\
        --dataset openai/gsm8k
    python studies/rehearse_gpu_run.py table                         the tables of docs/recipes.md
    python studies/rehearse_gpu_run.py table --max_prompt_length 2048       with flags of grpo.py

CARD:COUNT, a training script and its flags. Memory is the bound of docs/maintainers/memory.md, seconds
follow from data sheets: both are computed, not measured. What does not fit is rejected, with exit code 2.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import script_loader

import grpo
from runtime.arguments import flags
from runtime.run import logger
from runtime.system import process
from runtime.training import memory
from runtime.training.model_files import Model, read_model


@dataclass(frozen=True)
class Card:
    """A GPU: 10^9 bytes as sold, FLOP/s of bf16 products, bytes/s of its memory and to its neighbors."""

    gb: int
    flops: float
    bandwidth: float
    link: float


# NVIDIA's data sheets (GeForce: twice the rate of fp32, as its whitepapers say): products without sparsity and with
# sums in fp32; the SXM form where there is one. Links, one way: NVLink of the SXM cards, otherwise PCIe x16.
CARDS = {
    "rtx4060": Card(8, 30e12, 0.272e12, 16e9),
    "rtx3060": Card(12, 25e12, 0.360e12, 32e9),
    "t4": Card(16, 65e12, 0.320e12, 16e9),
    "rtx3090": Card(24, 71e12, 0.936e12, 32e9),
    "rtx4090": Card(24, 165e12, 1.008e12, 32e9),
    "a10": Card(24, 125e12, 0.600e12, 32e9),
    "a100-40": Card(40, 312e12, 1.555e12, 300e9),
    "a6000": Card(48, 155e12, 0.768e12, 32e9),
    "l40s": Card(48, 362e12, 0.864e12, 32e9),
    "a100": Card(80, 312e12, 2.039e12, 300e9),
    "h100": Card(80, 989e12, 3.350e12, 450e9),
    "h200": Card(141, 989e12, 4.800e12, 450e9),
}
EFFICIENCY = 0.4  # of the FLOP/s: what well-kept trainers reach
REACHED = 0.7  # of the bytes/s
HOST = 32e9  # bytes/s between a GPU and the CPU's memory: PCIe 4.0 x16
TOKEN = 30e-6  # seconds of the engine's Python for a token, in one thread: 25 to 35 by its source
STATES = 30  # bytes of a parameter that AdamW reads and writes: weight, master, two moments, gradient
OTHER = 2  # seconds of a step beside all this: plans, the last verdicts, records, the push
MEAN = 0.3  # of --max_response_length: the tokens of a response on average


def step_seconds(args, model: Model, setting: memory.Setting, size, card: Card, mean: float) -> dict[str, float]:
    """Seconds of each phase of a step of responses of ``mean`` tokens, computed: nobody has measured one.

    Products take 2 FLOP per parameter and token forward, 4 backward, and 2 more where activations are computed again;
    attention's scores are left out. For each token of the longest response an engine reads its weights, once for each
    part of the responses that its cache holds, and for each token of any response the keys and values before it.
    Gradients are reduced after each micro-batch, within one node.
    """
    ranks = setting.ranks
    prompts = args.num_unique_prompts_rollout / ranks
    samples = prompts * args.num_samples_per_prompt_rollout
    copies = prompts if args.batch_layout in ("auto", "shared") else samples
    tokens = samples * mean + copies * args.max_prompt_length
    attention = model.hidden * model.head_size * 2 * (model.heads + model.kv_heads)
    layers = model.layers * (attention + 3 * model.hidden * model.intermediate)
    forward = 2 * (layers + model.vocabulary * model.hidden)
    forward /= EFFICIENCY * card.flops
    bandwidth = REACHED * card.bandwidth
    weights = setting.itemsize * model.parameters

    engines = args.vllm_engines or ranks / args.vllm_tensor_parallel_size
    served = samples * ranks / engines
    keys = model.cache_numbers * setting.itemsize
    before = args.max_prompt_length + mean / 2
    _, cache = memory.engine_memory(args, model, setting, size.vllm_gpu_memory_utilization)
    waves = max(1, served * (args.max_prompt_length + mean) * keys / cache) if cache else 1
    read = waves * args.max_response_length * weights
    read += served * mean * before * keys
    read /= args.vllm_tensor_parallel_size

    steps = args.num_epochs * args.num_mini_batches
    passes = args.loads_reference + setting.critic
    passes += steps > 1 or args.kl_coefficients[1] > 0
    trained = args.num_epochs * tokens * (4 if args.gradient_checkpointing else 3)
    batches = args.num_epochs * tokens / size.micro_batch_tokens
    exchanges = max(steps, batches) * (3 if args.zero_stage == 3 else 1) + steps
    sent = exchanges * weights * (1 - 1 / ranks)
    update = forward * trained + sent / (REACHED * card.link)
    states = steps * STATES * model.parameters / ranks
    optimizer = states / (REACHED * HOST if "optimizer" in args.offload else bandwidth)
    return {
        "generate": served * mean * TOKEN + read / bandwidth,
        "logprobs": forward * tokens * passes,
        "update": update * (1 + setting.critic),
        "optimizer": optimizer * (1 + setting.critic),
        "other": OTHER,
    }


def whole_step(seconds: dict[str, float], args) -> float:
    """Return the seconds of a step; with --vllm_engines and --async_steps, sampling overlaps with everything else."""
    generate = seconds["generate"]
    rest = sum(seconds.values()) - generate
    if args.vllm_engines > 0 and args.async_steps > 0:
        return max(generate, rest)
    return generate + rest


def planned(args, model: Model, gpus: int, gb: float) -> tuple:
    """Return (setting, sizes, bytes of a rank) of a command on ``gpus`` GPUs of ``gb`` 10^9 bytes, fit or not."""
    trainers = gpus - args.vllm_engines * args.vllm_tensor_parallel_size
    critic = not getattr(args, "disable_value", True)
    setting = memory.Setting(trainers, 4 if args.dtype == "float32" else 2, gb * 1e9, critic)
    size = memory.first_fit(args, model, setting) or memory.candidates(args, setting)[-1]
    parts = memory.predict(args, model, setting, size)
    return setting, size, sum(parts.values())


def foretell(args, model: Model | None, kind: str, gpus: int, problems: int) -> None:
    """Print what a command needs of its GPUs, and seconds. Exits with 2 where it does not fit."""
    if model is None:
        process.refuse(f"--model_name_or_path {args.model_name_or_path}: its config lacks the expected fields")
    card = CARDS[kind]
    setting, size, needed = planned(args, model, gpus, card.gb)
    memory.sizes_for(args, model, setting)  # rejects what fits in no way, with what would
    if needed > memory.USABLE * setting.card:
        process.refuse(
            f"--micro_batch_tokens {size.micro_batch_tokens} and gpu_memory_utilization "
            f"{size.vllm_gpu_memory_utilization} in --vllm_args: {needed / 1e9:.1f} GB may be needed, more than "
            f"{memory.USABLE} of {card.gb}; drop both to get sizes that fit"
        )
    print("\n".join(logger.memory_lines(args, model, setting, size)))
    print(f"sizes      {', '.join(f'{name} {value}' for name, value in vars(size).items())}")
    steps = flags.total_steps(args, problems)
    longest = args.max_response_length
    for mean in (round(MEAN * longest), longest):
        seconds = step_seconds(args, model, setting, size, card, mean)
        step = whole_step(seconds, args)
        parts = ", ".join(f"{phase} {s:.1f}" for phase, s in seconds.items())
        minutes = f"{steps} steps in {steps * step / 60:.0f} minutes"
        print(f"seconds    {step:.1f} a step of {mean} tokens a response ({parts}); {minutes}")
    print("           computed, not measured; without start, evaluations and checkpoints")


def transformer(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, size: int, vocabulary: int):
    """Return the ``Model`` of a published config.json. A head of more than 4 * 10^8 numbers is not tied."""
    layer = 2 * hidden * size * (heads + kv_heads) + 3 * hidden * intermediate
    head = hidden * vocabulary
    parameters = layers * layer + head * (1 + (head > 4e8))
    return Model(parameters, layers, hidden, intermediate, heads, kv_heads, size, vocabulary)


# Name: layers, hidden and intermediate size, heads, heads of keys and values, their size, vocabulary.
PUBLISHED = """
Qwen3-0.6B    28 1024 3072  16 8 128 151936
Llama-3.2-1B  16 2048 8192  32 8 64  128256
Qwen3-1.7B    28 2048 6144  16 8 128 151936
Qwen3-4B      36 2560 9728  32 8 128 151936
Qwen3-8B      36 4096 12288 32 8 128 151936
"""
MODELS = {}
for line in PUBLISHED.split("\n")[1:-1]:
    name, *numbers = line.split()
    MODELS[name] = transformer(*map(int, numbers))
ONE_GPU = ("rtx4060", "rtx3060", "t4", "rtx3090", "rtx4090", "a10", "l40s", "a100", "h100")
# Letters of the table: they take less memory and more time. Sets of them, in the order in which they are tried.
LETTERS = {
    "C": {"gradient_checkpointing": True},
    "S": {"vllm_sleep": "engine"},
    "K": {"vllm_args": '{"kv_cache_memory_bytes": 2000000000}'},
    "L": {"vllm_args": '{"kv_cache_memory_bytes": 1000000000}'},
    "O": {"offload": ("optimizer",)},
}
LADDER = ("", "C", "CS", "CSK", "CSO", "CSKO", "CSLO")
FILES = 2 + 2 + 3 * 16  # bytes of a parameter on the disk: as downloaded, as saved, and in three checkpoints


def table_row(args, name: str, kind: str, gpus: int) -> str:
    """Return a row of the table."""
    model, card = MODELS[name], CARDS[kind]
    setting = memory.Setting(gpus, 2, card.gb * 1e9)

    def lettered(letters: str):
        found = args
        for letter in letters:
            found = replace(found, **LETTERS[letter])
        return found

    def first(ladder: tuple[str, ...]) -> str | None:
        for letters in ladder:
            if memory.first_fit(lettered(letters), model, setting):
                return letters
        return None

    # Adapters have next to no gradients and states: with O, the bound of the complete model is without them, too.
    lora = first(("O", "OC", "OCK", "OCL"))
    adapters = "-" if lora is None else f"yes {lora[1:]}".strip()
    letters = first(LADDER)
    if letters is None:
        return f"| {gpus} x {kind} | {name} | does not fit | | | | | {adapters} |"
    chosen = lettered(letters)
    _, size, needed = planned(chosen, model, gpus, card.gb)
    seconds = step_seconds(chosen, model, setting, size, card, round(MEAN * args.max_response_length))
    host = gpus * memory.host_memory(chosen, model, setting)
    disk = FILES * model.parameters
    cells = [
        f"{gpus} x {kind}",
        name,
        letters or "none",
        f"{needed / 1e9:.0f}",
        f"{host / 1e9:.0f}",
        f"{whole_step(seconds, chosen) / 60:.1f}",
        f"{disk / 1e9:.0f}",
        adapters,
    ]
    return f"| {' | '.join(cells)} |"


def print_table(words: list[str]) -> None:
    """Print the table of cards and models, for 64 prompts of at most 256 tokens and 8 responses to each."""
    shape = "--max_prompt_length 256 --max_response_length 1024 --num_unique_prompts_rollout 64"
    args = flags.parse(grpo.Args, words=[*shape.split(), *words])
    print("| GPU | model | letters | GPU GB | host GB | minutes a step | disk GB | LoRA |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in ONE_GPU:
        for name in MODELS:
            print(table_row(args, name, kind, 1))
    for name in MODELS:
        print(table_row(args, name, "h100", 8))


def main(words: list[str]) -> None:
    """Print what a command would need and take on its GPUs."""
    if words[0] == "table":
        print_table(words[1:])
        return
    kind, _, count = words[0].partition(":")
    if kind not in CARDS or not (count or "1").isdigit() or int(count or 1) < 1:
        process.refuse(f"{words[0]} is no CARD:COUNT, such as h100:8; cards are {', '.join(CARDS)}")
    gpus = int(count or 1)
    script = script_loader.load_script(Path(words[1]), ("Args", "preflight", "main"))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    args = flags.parse(script.Args, __doc__, words[2:])
    args.dry_run = True  # nothing is written
    args.overwrite = True  # and nothing is asked of an earlier run of this name
    problems, *_ = script.preflight(args)
    foretell(args, read_model(args.model), kind, gpus, len(problems))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    process.prepare_environment()  # before torch, which scripts import
    main(sys.argv[1:])

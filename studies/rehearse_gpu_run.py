"""Plan a command for GPUs that are not here: whether it fits, with which sizes, and how long a step would take.

    python studies/rehearse_gpu_run.py h200:8 grpo.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct \\
        --dataset openai/gsm8k

CARD:COUNT, a training script and its flags. Memory is the bound of docs/maintainers/memory.md, seconds
follow from data sheets: both are computed, not measured. What does not fit is rejected, with exit code 2.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import script_loader

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


# NVIDIA's data sheets (RTX 4090: the whitepaper of the Ada architecture): products without sparsity and with sums in
# fp32; the SXM form where there is one. Links, one way: NVLink of the SXM cards, PCIe 4.0 x16 of the others.
CARDS = {
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
    attention's scores are left out. For each token of the longest response an engine reads its weights, and for each
    of any response the keys and values before it. Gradients are reduced after each micro-batch, within one node.
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
    read = args.max_response_length * weights
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


def main(words: list[str]) -> None:
    """Print what a command would need and take on its GPUs."""
    kind, _, count = words[0].partition(":")
    if kind not in CARDS or not (count or "1").isdigit() or int(count or 1) < 1:
        process.refuse(f"{words[0]} is no CARD:COUNT, such as h100:8; cards are {', '.join(CARDS)}")
    gpus = int(count or 1)
    script = script_loader.load_script(Path(words[1]), ("Args", "preflight", "main"))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    args = flags.parse(script.Args, __doc__, words[2:])
    args.dry_run = True  # nothing is written
    problems, *_ = script.preflight(args)
    foretell(args, read_model(args.model), kind, gpus, len(problems))


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    process.prepare_environment()  # before torch, which scripts import
    main(sys.argv[1:])

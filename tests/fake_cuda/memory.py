"""Take optimizer steps of full-size models through PyTorch's CUDA allocator, and compare its peak with a run's bound.

.cuda/bin/python tests/fake_cuda/memory.py [MODEL ...]     under the stub libraries: check.py sets them

Weights are empty and kernels compute nothing, so pages that nobody writes take no memory of this machine. Sizes,
layout and attention are those that a run chooses on the card; flags only name attention that needs no compilation.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from runtime.system import process

process.prepare_environment("auto")

import numpy as np
import torch
from backends import MODEL
from counters import REAL, counted
from forks import in_a_fork

import grpo
import utils
from runtime.data.samples import Sample
from runtime.engine import choices
from runtime.training import batching, deepspeed_zero, memory, pretrained
from runtime.training.memory import GIB

CONTEXT = 500 / 1024  # GiB that the fake driver keeps for itself
WORKSPACES = 1.01  # peak / bound of tensors at most: cuBLAS's workspaces are in the 2 GiB that a run adds for CUDA
LOOSEST = 1.5  # bound / peak at most
PROMPT = 256
QWEN_0_5B = {"num_hidden_layers": 24}  # the rest is MODEL's
QWEN_1_5B = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
QWEN_7B = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 4, "num_attention_heads": 28}
QWEN_7B |= {"num_key_value_heads": 4, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Case:
    """A model's config, a card (compute capability, GiB), and flags of a run."""

    config: dict
    card: tuple[int, float]
    flags: dict = field(default_factory=dict)


CASES = {
    "0.5B": Case(QWEN_0_5B, (90, 79.1)),
    "0.5B-24GB": Case(QWEN_0_5B, (89, 23.6), {"attn_implementation": "sdpa"}),
    "1.5B": Case(QWEN_1_5B, (90, 79.1), {"attn_implementation": "sdpa"}),
    "7B-4-layers": Case(QWEN_7B, (90, 79.1), {"attn_implementation": "varlen", "vllm_sleep": "engine"}),
}
ON_A_GPU = "0.5B"  # the case of check.py --gpu, whose card is that of the machine
TIGHT = "0.5B-24GB"  # also taken on a card that is smaller than its peak


def samples_for(budget: int) -> list[Sample]:
    """Return samples of two full micro-batches, in groups of eight that share a prompt."""
    rng = np.random.default_rng(0)
    group = min(budget, PROMPT + 8 * 992)
    length = (group - PROMPT) // max(1, (group - PROMPT) // 960)
    samples = []
    for i in range(8 * -(-2 * budget // (8 * length))):
        if i % 8 == 0:
            prompt = rng.integers(0, 1000, PROMPT).tolist()
        response = rng.integers(0, MODEL["vocab_size"], length).tolist()
        samples.append(Sample(i // 8, i % 8, prompt, response, [0.0] * length, "stop", []))
    return samples


def make_policy(args: grpo.Args, chosen: choices.Choices, device: torch.device):
    """Return the model of the config under DeepSpeed, as a run has it, with whatever memory holds as weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    pretrained.register_attention()
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    kind = pretrained.attention_for(config, chosen.attention, args.attn_implementation)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=chosen.dtype, attn_implementation=kind)
    pretrained.prepare_for_training(model)
    policy = utils.TokenLogprobs(model.train(), args.temperature, chosen.sizes.logprob_chunk)
    accelerator = deepspeed_zero.make_accelerator(args, chosen.dtype, device)
    optimizer = utils.make_optimizer(policy.parameters(), 1e-6, args)
    return deepspeed_zero.dedupe_fp32_weights(accelerator.prepare(policy, optimizer)[0])


def compute(policy, batch) -> None:
    """Compute the gradients of a micro-batch."""
    logprobs_T, _, _ = policy(batch)
    deepspeed_zero.backward_and_step(policy, logprobs_T.sum(), batch.is_last)


def take_steps(case: Case, folder: Path, size: float | None) -> dict:
    """Take two optimizer steps, on a card of ``size`` GiB if given; return sizes in GiB and launches of the second."""
    (folder / "config.json").write_text(json.dumps(MODEL | case.config))
    args = grpo.Args(model_name_or_path=str(folder), num_unique_prompts_rollout=64, **case.flags)
    args.max_prompt_length, args.max_response_length = PROMPT, 1024
    device, dtype, attention = pretrained.resolve_device(args)
    process.free_memory = lambda: math.inf  # states that nobody writes take none of it
    chosen = choices.choose(args, device, dtype, attention, {})
    bound = memory.predict(args, chosen.model, chosen.setting, chosen.sizes)
    alone = replace(args, vllm_engines=1, vllm_sleep="off")  # the trainer's part of it
    trainer = memory.predict(alone, chosen.model, chosen.setting, chosen.sizes)
    if size is not None:
        os.environ["FAKE_CUDA_GIB"] = str(size)
    policy = make_policy(args, chosen, device)
    budget = chosen.sizes.micro_batch_tokens
    samples = samples_for(budget)
    place = {"layout": chosen.layout, "budget": budget, "rank": 0, "world_size": 1, "device": device}
    # Made before: memory that they had used would hold their numbers, which no kernel of a gradient overwrites here.
    batches = list(batching.micro_batches(samples, list(range(len(samples))), **place))
    launches = 0
    for _ in range(2):
        for batch in batches:
            found = counted(lambda batch=batch: compute(policy, batch), "launches", "products")
            if not batch.is_last:
                launches = sum(found)
    assert policy.was_step_applied()
    return {
        "card": torch.cuda.get_device_properties(device).total_memory / GIB,
        "attention": chosen.attention,
        "tokens": budget,
        "peak": torch.cuda.max_memory_allocated() / GIB,
        "reserved": torch.cuda.max_memory_reserved() / GIB,
        "bound": sum(trainer.values()) / GIB,
        "tensors": (sum(trainer.values()) - trainer["process"]) / GIB,
        "printed": sum(bound.values()) / GIB,
        "launches": launches,
    }


def on_its_card(name: str, size: float | None = None) -> dict:
    """Return what ``take_steps`` does, or {"error"}, from a fork of this process."""
    case = CASES[name]
    card = {"FAKE_CUDA_CAPABILITY": str(case.card[0]), "FAKE_CUDA_GIB": str(case.card[1]), "FAKE_CUDA_MOVED_MIB": "1"}

    def work() -> dict:
        with tempfile.TemporaryDirectory() as folder:
            return take_steps(case, Path(folder), size)

    return in_a_fork(work, card, quiet=size is not None)


def main() -> int:
    """Print a row per model; exit code 1 if a peak is above its bound, or far below, or no error ends a small card."""
    wrong = []
    print(
        "model        card GiB attention       tokens  peak reserved  tensors  bound bound/peak  a run prints  launches"
    )
    for name in sys.argv[1:] or ([ON_A_GPU] if REAL else CASES):
        found = on_its_card(name)
        if "error" in found:
            wrong.append(f"{name}: {found['error']}")
            continue
        held = found["peak"] + CONTEXT
        sizes = f"{found['tensors']:8.2f} {found['bound']:6.2f} {found['bound'] / held:11.3f} {found['printed']:13.1f}"
        print(
            f"{name:12} {found['card']:8.1f} {found['attention']:14} {found['tokens']:7} {found['peak']:5.2f} "
            f"{found['reserved']:8.2f} {sizes} {found['launches']:9}",
            flush=True,
        )
        if held > found["bound"] or found["peak"] > WORKSPACES * found["tensors"]:
            wrong.append(f"{name}: the peak is above the bound: {found['peak']:.2f} of {found['tensors']:.2f} GiB")
        if found["bound"] > LOOSEST * held:
            wrong.append(f"{name}: the bound is far above the peak: {found['bound']:.2f} for {held:.2f} GiB")
        if name == TIGHT and not REAL:
            small = on_its_card(name, found["peak"])
            if small.get("error") != "OutOfMemoryError":
                wrong.append(f"{name} on a card smaller than its peak: no torch.OutOfMemoryError, but {small}")
    small = "" if REAL else ", and an OutOfMemoryError on a card that is smaller than the peak"
    print("\n".join(wrong) or f"peaks below their bounds{small}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

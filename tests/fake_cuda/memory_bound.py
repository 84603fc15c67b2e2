"""Measure a trainer's memory by torch's CUDA allocator against the bound that a run prints.

    .cuda/bin/python tests/fake_cuda/memory_bound.py LAYERS ATTENTION TOKENS FILE     under the stub libraries

A Qwen2.5-0.5B with LAYERS of its 24 layers, in bf16 under DeepSpeed's ZeRO 2: two optimizer steps, whose micro-batches
hold up to TOKENS tokens. Kernels compute nothing; every tensor has its size and its life.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from runtime.system import process

process.prepare_environment("auto")
os.environ.setdefault("LOCAL_RANK", "0")

import numpy as np
import torch
from backends import MODEL
from device import GIB, counted

import grpo
import utils
from runtime.data.samples import Sample
from runtime.training import batching, deepspeed_zero, memory, pretrained


def samples(prompts: int, group: int) -> list[Sample]:
    """Random responses of 200 to 512 tokens to prompts of 256."""
    r = np.random.default_rng(0)
    made = []
    for p in range(prompts):
        prompt = r.integers(0, 1000, 256).tolist()
        for k in range(group):
            response = r.integers(0, 150000, int(r.integers(200, 512))).tolist()
            made.append(Sample(p, k, prompt, response, [0.0] * len(response), "stop", [(1, 0)]))
    return made


def main() -> None:
    """Write peaks, bound and counts to the file that the command line names."""
    from transformers import AutoConfig, AutoModelForCausalLM

    layers, attention, tokens, out = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    device = torch.device("cuda", 0)
    fields = MODEL | {"num_hidden_layers": layers}
    given = {"max_prompt_length": 256, "max_response_length": 512, "attn_implementation": attention}
    args = grpo.Args(model_name_or_path="x", vllm_engines=1, **given)  # an engine that takes none of this GPU
    pretrained.register_attention()
    config = AutoConfig.for_model(**{name: value for name, value in fields.items() if name != "architectures"})
    accelerator = deepspeed_zero.make_accelerator(args, torch.bfloat16, device)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    sizes = replace(memory.default_sizes(args, True), micro_batch_tokens=tokens)
    policy = utils.TokenLogprobs(model.train(), 1.0, sizes.logprob_chunk)
    optimizer = utils.make_optimizer(policy.parameters(), 1e-6, args)
    policy = deepspeed_zero.dedupe_fp32_weights(accelerator.prepare(policy, optimizer)[0])
    drawn = samples(-(-tokens // 2048) + 2, 8)
    place = {"layout": "shared", "budget": tokens, "rank": 0, "world_size": 1, "device": device}
    found = {"peak": 0.0, "largest": 0, "micro_batches": []}
    for _ in range(2):
        for batch in batching.micro_batches(drawn, list(range(len(drawn))), **place):
            torch.cuda.reset_peak_memory_stats()

            def one_pass(batch=batch) -> None:
                logprobs = policy(batch)[0]
                deepspeed_zero.backward(policy, (logprobs * 1e-3).sum(), batch.is_last)

            names = ("launches", "products", "stream_syncs", "device_syncs", "pageable_h2d")
            found["micro_batches"].append([batch.is_last, *counted(one_pass, *names)])
            found["peak"] = max(found["peak"], torch.cuda.max_memory_allocated() / GIB)
            found["largest"] = max(found["largest"], batch.input_ids.numel())
    sizes_of = memory.model_of(fields, 0, True)
    setting = memory.Setting(1, True, torch.cuda.get_device_properties(0).total_memory)
    prediction = memory.predict(args, sizes_of, setting, sizes)
    found["bound"] = (prediction.phases["training"] - prediction.parts["process"]) / GIB
    Path(out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

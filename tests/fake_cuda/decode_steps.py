"""Build vLLM's engine with the arguments of grpo.build_vllm and count what a decode step starts on the GPU.

.cuda/bin/python tests/fake_cuda/decode_steps.py     after `make cuda-check ARGS=stubs`

It prints a row per number of sequences, with vLLM's own largest CUDA graph and with that of a run. The model is
Qwen2.5-0.5B at full size in bf16, without weights. Kernels compute nothing: requests never get a token, and every step
after the first one decodes all of them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

if "LD_PRELOAD" not in os.environ and __name__ == "__main__":  # start again, under the stub libraries
    import check

    os.execve(sys.executable, [sys.executable, *sys.argv], check.environment())

from runtime.system import process

process.prepare_environment("auto")
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

from backends import MODEL
from counters import counted
from forks import in_a_fork

import grpo
from runtime.training import pretrained

COUNTED = ("launches", "products", "graph_launches", "h2d", "d2h", "stream_syncs", "device_syncs", "event_syncs")
STEPS = 4  # the first one prefills; the others are equal from the third one on


def build(engine_args: dict):
    """Build the engine of a run of 64 prompts with 16 responses each; its weights are not loaded."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 24}))
        sizes = {"num_unique_prompts_rollout": 64, "num_samples_per_prompt_rollout": 16, "max_response_length": 512}
        given = json.dumps({"load_format": "dummy"} | engine_args)
        args = grpo.Args(
            model_name_or_path=folder, dtype="bfloat16", vllm_args=given, gradient_checkpointing=True, **sizes
        )
        return grpo.build_vllm(args, pretrained.resolve_device(args)[1], 0, 1).llm_engine


def decode(engine, sequences: int) -> dict[str, int]:
    """Let so many requests decode; return what their last step started."""
    from vllm import SamplingParams

    how = {"temperature": 1.0, "logprobs": 0, "flat_logprobs": True, "detokenize": False, "ignore_eos": True}
    names = [f"{sequences} {i}" for i in range(sequences)]
    for i, name in enumerate(names):
        engine.add_request(name, {"prompt_token_ids": [5] * 32}, SamplingParams(seed=i, max_tokens=64, **how))
    for _ in range(STEPS):
        found = counted(engine.step, *COUNTED)
    engine.abort_request(names)
    engine.step()
    return dict(zip(COUNTED, found, strict=True))


def rows(engine_args: dict, numbers: list[int]) -> list[dict]:
    """Return what a decode step of the whole model starts, for each number of sequences."""
    engine = build(engine_args)
    return [{"sequences": number} | decode(engine, number) for number in numbers]


def main() -> None:
    """Print the table."""
    print("largest graph  sequences  " + "  ".join(COUNTED))
    for largest, given in (("512", {"max_cudagraph_capture_size": 512}), ("1024", {})):
        for row in in_a_fork(lambda given=given: rows(given, [64, 512, 768]), {}):
            numbers = "  ".join(f"{row[name]:{len(name)}}" for name in COUNTED)
            print(f"{largest:>13}  {row['sequences']:9}  {numbers}", flush=True)


if __name__ == "__main__":
    main()

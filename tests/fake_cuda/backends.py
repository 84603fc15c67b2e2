"""Write what trainer and engine choose on seven cards, in three data types, with and without nvcc, as JSON.

    .cuda/bin/python tests/fake_cuda/backends.py FILE [CARD ...]     under the stub libraries: check.py sets them

Libraries are imported once; each card is a fork with an environment of its own, since torch and vLLM read a card once.
The trainer's choices come from processes that have not imported vLLM, as with an engine in another process. The
engine's come from vLLM's own configuration, made from the arguments that grpo.build_vllm passes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from runtime.system import process

process.prepare_environment("auto")

import torch
from forks import in_a_fork

import grpo
from runtime.training import pretrained

CARDS = {
    "7.5": ("Tesla T4", 15.6),
    "8.0": ("NVIDIA A100-SXM4-80GB", 79.3),
    "8.6": ("NVIDIA GeForce RTX 3090", 23.7),
    "8.9": ("NVIDIA L40S", 44.4),
    "9.0": ("NVIDIA H100 80GB HBM3", 79.1),
    "10.0": ("NVIDIA B200", 178.4),
    "12.0": ("NVIDIA GeForce RTX 5090", 31.4),
}
DTYPES = ("bfloat16", "float16", "float32")
KERNELS = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
# Half of the layers of Qwen2.5-0.5B-Instruct, so that it fits on a T4; heads of 64, as in most small models.
MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 12,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


class Recorded(Exception):
    """Ends ``grpo.build_vllm`` once the engine's configuration is known."""


def forget_the_card() -> None:
    """Empty the caches in which vLLM keeps what it has found out about the machine.

    Those of functions are found by their modules: the garbage collector does not list objects that were frozen.
    """
    known = [thing for thing in gc.get_objects() if isinstance(thing, functools._lru_cache_wrapper)]
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        known += [thing for thing in vars(module).values() if isinstance(thing, functools._lru_cache_wrapper)]
    for thing in known:
        if (thing.__module__ or "").startswith("vllm"):
            thing.cache_clear()


def import_vllm() -> None:
    """Import vLLM once, before the forks, and leave CUDA alone."""
    importlib.import_module("vllm")
    importlib.import_module("vllm.engine.arg_utils")
    assert not torch.cuda.is_initialized()


def trainer_kernel(dtype: torch.dtype, masked: bool) -> str:
    """The kernel that sdpa takes for rows of 256 tokens, heads of 64."""
    query = torch.zeros(2, 4, 256, 64, device="cuda", dtype=dtype)
    mask = torch.zeros(2, 1, 256, 256, device="cuda", dtype=dtype) if masked else None
    return KERNELS[torch._fused_sdp_choice(query, query, query, mask, 0.0, not masked)]


def args_of(dtype: str, model: Path) -> grpo.Args:
    """1,024 responses a step, twice as many as vLLM's own largest CUDA graph."""
    given = {"num_unique_prompts_rollout": 64, "num_samples_per_prompt_rollout": 16, "max_response_length": 512}
    given["gradient_checkpointing"] = True  # or fp32 would not fit on a T4
    return grpo.Args(model_name_or_path=str(model), dtype=dtype, **given)


def trainer_choices(dtype: str, model: Path) -> dict[str, object]:
    """Attention implementation and kernels of the trainer, in a process without vLLM."""
    assert "vllm" not in sys.modules
    try:
        _, kind, attention = pretrained.resolve_device(args_of(dtype, model))
    except SystemExit:
        return {"rejected": True}
    pretrained.register_attention()
    return {"attention": attention, "plain": trainer_kernel(kind, False), "masked": trainer_kernel(kind, True)}


def engine_choices(dtype: str, model: Path) -> dict[str, object]:
    """vLLM's configuration of the engine that ``grpo.build_vllm`` would build."""
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    found = {}

    class LLM:
        def __init__(self, **given):
            given.pop("use_tqdm_on_load")
            config = vllm.EngineArgs(**given).create_engine_config()
            with set_current_vllm_config(config):
                heads = config.model_config.get_head_size()
                found["attention"] = get_attn_backend(heads, config.model_config.dtype, None).get_name()
            found["graphs"] = str(config.compilation_config.cudagraph_mode).removeprefix("CUDAGraphMode.")
            found["largest_graph"] = max(config.compilation_config.cudagraph_capture_sizes)
            found["sequences"] = config.scheduler_config.max_num_seqs
            found["share"] = config.cache_config.gpu_memory_utilization
            raise Recorded

    args = args_of(dtype, model)
    vllm.LLM = LLM
    try:
        grpo.build_vllm(args, pretrained.resolve_device(args)[1], 0, 1)
    except SystemExit:
        return {"rejected": True}
    except Recorded:
        return found
    raise AssertionError("build_vllm built no engine")


def on_a_card(card: str, toolkit: Path, model: Path, choices: Callable) -> dict[str, dict]:
    """Return all choices on one card by data type, made in a fork of this process."""
    name, size = CARDS[card]
    variables = {"FAKE_CUDA_CAPABILITY": card.replace(".", ""), "FAKE_CUDA_GIB": str(size), "FAKE_CUDA_NAME": name}

    def made() -> list:
        forget_the_card()
        return [{dtype: choices(dtype, model) for dtype in DTYPES}, sorted(sys.modules)]

    found = in_a_fork(made, variables | {"LOCAL_RANK": "0", "CUDA_HOME": str(toolkit)})
    if isinstance(found, dict):
        raise SystemExit(f"error: the choices on compute capability {card} failed; the reason is above")
    rows, modules = found
    for name in modules:  # so that the next fork need not; others of vLLM would initialize CUDA here
        if name.startswith(("transformers.", "vllm.config.")) and name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    return rows


def main() -> None:
    """Write the table to the file that the command line names."""
    cards = sys.argv[2:] or list(CARDS)
    table = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        compiler = folder / "toolkit" / "bin" / "nvcc"
        compiler.parent.mkdir(parents=True)
        compiler.write_text("#!/bin/sh\n")
        compiler.chmod(0o755)
        pretrained.register_attention()  # imports, once for all forks
        for card in cards:
            for dtype, row in on_a_card(card, folder / "none", model, trainer_choices).items():
                table[f"trainer, {card} {dtype}"] = row
        os.environ["CUDA_HOME"] = str(folder / "none")  # some modules look for nvcc when they are imported
        import_vllm()
        for card, nvcc in itertools.product(cards, ("none", "toolkit")):
            for dtype, row in on_a_card(card, folder / nvcc, model, engine_choices).items():
                table[f"engine, {card} {dtype} {'with' if nvcc == 'toolkit' else 'without'} nvcc"] = row
    Path(sys.argv[1]).write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()

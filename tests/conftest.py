"""Shared by the tests: a tiny random model on disk, samples, and runs of the scripts in this process."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest

os.environ.setdefault("WANDB_MODE", "disabled")
if "PYTEST_XDIST_WORKER" in os.environ:  # a core and a port of its own for each worker
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # but what a test has launched keeps the port of its launcher
        os.environ.pop("MASTER_PORT", None)
CACHE = tempfile.TemporaryDirectory(prefix="datasets-")  # the cache of datasets, also of the processes tests start
os.environ["HF_DATASETS_CACHE"] = CACHE.name
ROOT = Path(__file__).resolve().parent.parent

from runtime import data, process, records, rundir  # noqa: E402

process.prepare_environment()


def pytest_collection_modifyitems(items):
    """A test that hangs is ended with its process; pyproject.toml has its stacks printed before."""
    for item in items:
        long = item.get_closest_marker("slow") or item.get_closest_marker("learn")
        item.add_marker(pytest.mark.timeout(1800 if long else 300, method="thread"))


@pytest.fixture(autouse=True)
def own_signals():
    """Runs in this process listen for signals; after a test they are pytest's again."""
    handlers = {number: signal.getsignal(number) for number in process.STOP_SIGNALS}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with a random two-layer Llama, tied head, and a tokenizer of 600 tokens trained on the task's text."""
    import torch
    from reasoning_gym import create_dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "tiny"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = [row["question"] for row in create_dataset("chain_sum", size=50, seed=0)]
    bpe.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=special[1], eos_token=special[2], pad_token=special[2]
    )
    tokenizer.chat_template = data.CHAT_TEMPLATES["chatml"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model(tiny):
    """The tiny model in memory, fp32, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager").train()


def make_samples(prompts: int = 3, group: int = 4, seed: int = 0, vocabulary: int = 300) -> list[records.Sample]:
    """Samples of unequal lengths, the last of each group of one token; the last id of some is the EOS (2)."""
    r = random.Random(seed)
    samples = []
    for p in range(prompts):
        prompt = [r.randrange(3, vocabulary) for _ in range(5 + 3 * p)]
        for k in range(group):
            length = 1 if k == group - 1 else r.randrange(2, 14)
            ids = [r.randrange(3, vocabulary) for _ in range(length - 1)] + [2 if k % 2 else r.randrange(3, vocabulary)]
            logprobs = [-r.random() for _ in ids]
            samples.append(records.Sample(p, k, prompt, ids, logprobs, "stop" if k % 2 else "length", 1))
    return samples


@pytest.fixture
def samples() -> list[records.Sample]:
    return make_samples()


def tiny_args(tiny: Path, out: Path, script: str = "grpo", **changes):
    """Arguments of a two-step run on the tiny model that takes a second or two."""
    import importlib

    return importlib.import_module(script).Args(
        **{
            "model_name_or_path": str(tiny),
            "output_dir": str(out),
            "rollout": "hf",
            "dtype": "float32",
            "total_steps": 2,
            "num_unique_prompts_rollout": 4,
            "num_samples_per_prompt_rollout": 4,
            "eval_prompts": 4,
            "eval_samples": 2,
            "max_response_length": 8,
            "max_prompt_length": 128,
            "micro_batch_tokens": 256,
            "logprob_micro_batch_tokens": 256,
            "mask_no_eos_with_zero": False,
            "mask_truncated_completions": False,  # a random model seldom ends by itself
            "reward_fn": f"{ROOT / 'tests' / 'verifiers.py'}:parity",
            "log_samples_every": 0,
            **changes,
        }
    )


def run_here(args, script: str = "grpo") -> list[dict]:
    """Run a script's main in this process; its metrics, one dict a step."""
    import importlib

    import torch
    from accelerate.state import AcceleratorState, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    module = importlib.import_module(script)
    if torch.distributed.is_initialized():  # runs of one process share a board: what an earlier one failed of is over
        for key in ("failure", "reported"):
            torch.distributed.distributed_c10d._get_default_store().delete_key(key)
    leave = os._exit

    def stay(code: int) -> None:  # a failing run leaves at once, and would take pytest along; a time-out may
        if threading.current_thread().name.startswith("pytest_timeout"):
            leave(code)

    os._exit = stay
    try:
        module.main(args, module.preflight(args))
    finally:
        os._exit = leave
    folder = Path(args.output_dir) / rundir.run_name(args, module.Args())
    return read_jsonl(folder / "metrics.jsonl")


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def script(*arguments: str) -> list[str]:
    """The command line of a script, in this interpreter."""
    return [sys.executable, *arguments]

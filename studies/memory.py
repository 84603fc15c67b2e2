"""Memory of a run: the table by model and GPU, and what runs really hold against what runtime/memory.py predicts.

    python studies/memory.py table                 the tables of docs/evidence/memory.md
    python studies/memory.py plan --gpus 8 --gpu_gb 80 ppo.py FLAGS    what that command line needs of these GPUs
    python studies/memory.py measure               six configurations on this machine's CPU: a table

A measured run is a run of the script itself, of two steps with responses of full length. In its second step every rank
notes for each phase the most bytes of tensors that its main thread had allocated at a time (by the events of torch's
profiler), and in a run of its own, since the profiler's records take memory, too, its largest resident memory (VmHWM,
reset at the start of the phase).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # the scripts are not a package

from huggingface_hub import hf_hub_download  # noqa: E402

from runtime import flags, memory  # noqa: E402

# name, script, ranks, flags. What all have in common is in RUN.
CONFIGURATIONS = (
    ("GRPO, ZeRO 2, bf16", "grpo", 1, ()),
    ("GRPO, ZeRO 2, fp32, reference", "grpo", 1, ("--dtype", "float32", "--beta", "0.01")),
    ("GRPO, ZeRO 2, bf16, checkpointing, padded", "grpo", 1, ("--gradient_checkpointing", "--batch_layout", "padded")),
    ("PPO, ZeRO 2, bf16", "ppo", 1, ()),
    ("GRPO, ZeRO 2, fp32, packed, two ranks", "grpo", 2, ("--dtype", "float32", "--batch_layout", "packed")),
    ("GRPO, ZeRO 3, bf16, reference, two ranks", "grpo", 2, ("--zero_stage", "3", "--beta", "0.01")),
)
RUN = (
    *("--rollout", "hf", "--dtype", "bfloat16", "--total_steps", "2", "--eval_prompts", "0", "--ignore_eos"),
    *("--num_unique_prompts_rollout", "2", "--num_samples_per_prompt_rollout", "16", "--max_response_length", "16"),
    *("--max_prompt_length", "64", "--no-mask_truncated_completions", "--no-mask_no_eos_with_zero"),
    *("--micro_batch_tokens", "640", "--save_minutes", "0", "--overwrite"),
)


# A score by chance, so that a model without skill has groups with a gradient.
COIN = """
import zlib

def coin(response, truth, row):
    return float(zlib.crc32(response.encode()) % 2)
"""


# ------------------------------------------------------------------------------------------------------- a measured run


def resident(name: str = "VmRSS") -> int:
    """Bytes of this process that are resident: now, or with VmHWM the most since ``forget_peak``."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def forget_peak() -> None:
    """Let VmHWM begin anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def allocation_peaks(profiler, phases: list[tuple[str, int, int]]) -> dict[str, int]:
    """The most bytes that were allocated at a time in each phase (name, start, end in ns), from memory events."""
    changes = []
    for event in profiler.kineto_results.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), event.nbytes()))
    changes.sort(key=lambda change: change[0])
    peaks = {name: 0 for name, _, _ in phases}
    held = 0
    for moment, size in changes:
        held += size
        for name, start, end in phases:
            if start <= moment <= end:
                peaks[name] = max(peaks[name], held)
    return peaks


def run_measured(kind: str, script: str, words: list[str]) -> None:
    """One rank of a run of ``script`` with the flags ``words``. Writes measured-RANK.json to the folder of the run.

    ``kind``: allocated, what tensors hold by the profiler; or resident. The profiler sees the main thread alone, so
    that thread does what others do in a run: it loads a reference's weights, and frees what ZeRO 3 has gathered before
    the engine's thread would. Tensors that gloo's threads free last still count as held.
    """
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    import deepspeed

    from runtime import process, runlog

    module = importlib.import_module(script)
    import torch

    import utils

    args = flags.parse(module.Args, words=words)
    ready = module.preflight(args)
    found = {"phases": [], "resident": {}}
    load, call, record = utils.load_model, utils.Stopwatch.__call__, runlog.RunLog.step
    weights = utils.current_weights

    def note_baseline(*arguments):
        found.setdefault("baseline", resident())
        return load(*arguments)

    @contextlib.contextmanager
    def noted(clock, phase: str):
        forget_peak()
        start = time.time_ns()
        with call(clock, phase):
            yield
        found["phases"].append((phase, start, time.time_ns()))
        found["resident"][phase] = resident("VmHWM")

    def note_step(log, metrics, samples, problems):
        record(log, metrics, samples, problems)
        if metrics["step"] < args.total_steps:
            found["phases"].clear()
            return
        result = {
            "baseline": found["baseline"],
            "prompt": max(len(problem.prompt_ids) for problem in problems),
            "resident": found["resident"],
        }
        if kind == "allocated":
            profiler.__exit__(None, None, None)
            result["allocated"] = allocation_peaks(profiler, found["phases"])
        (log.folder / f"measured-{os.environ['RANK']}.json").write_text(json.dumps(result))
        torch.distributed.barrier()
        os._exit(0)

    def gathered_here(policy, zero_stage, *arguments):
        if zero_stage == 3:
            with deepspeed.zero.GatheredParameters(list(policy.module.model.parameters())):
                pass
        return weights(policy, zero_stage, *arguments)

    utils.load_model = note_baseline
    utils.current_weights = gathered_here
    utils.Stopwatch.__call__ = noted
    runlog.RunLog.step = note_step
    process.prepare_environment()
    if kind == "allocated":
        profiler = torch.autograd.profiler.profile(profile_memory=True)
        profiler.__enter__()
    module.main(args, ready)


def measure(kind: str, name: str, script: str, ranks: int, words: tuple[str, ...], folder: Path) -> list[dict]:
    """What each rank of a measured run found; ``kind`` as in ``run_measured``.

    Raises RuntimeError, with the end of its output, where it fails.
    """
    (folder / "coin.py").write_text(COIN)
    line = [
        *RUN,
        "--verifier",
        f"{folder / 'coin.py'}:coin",
        "--output_dir",
        str(folder),
        "--run_name",
        "measured",
        *words,
    ]
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += [str(Path(__file__).resolve()), "run", kind, script, *line]
    shutil.rmtree(folder / "measured", ignore_errors=True)
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    files = sorted((folder / "measured").glob("measured-*.json"))
    if len(files) != ranks:
        raise RuntimeError(f"{name}: {done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return [json.loads(file.read_text()) for file in files]


# ------------------------------------------------------------------------------------------------------- the two tables


@dataclasses.dataclass(frozen=True)
class Row:
    """A rank of a measured run: bytes of tensors of its main thread, and resident ones, predicted and found."""

    name: str
    rank: int
    predicted: float
    allocated: float
    predicted_resident: float
    resident: float


def small_model(folder: Path) -> Path:
    """Write a random Llama of 17M parameters, with the tokenizer of the quickstart's model."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config = LlamaConfig(vocab_size=49152, **sizes, **heads, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(PROJECT / "models" / "SmolLM2-135M-Instruct").save_pretrained(folder)
    return folder


def compare(configuration: tuple, model: Path, folder: Path, runs: int = 3) -> list[Row]:
    """Run a configuration, written as in CONFIGURATIONS, on ``model`` and compare each rank with what was predicted.

    Counts for tensors the smallest of ``runs`` runs, for with several ranks the measurement can only find too much, and
    for what is resident the median.
    """
    name, script, ranks, words = configuration
    words = (*words, "--model_name_or_path", str(model))
    args = flags.parse(importlib.import_module(script).Args, words=[*RUN, *words])
    found = [measure("allocated", name, script, ranks, words, folder) for _ in range(runs if ranks > 1 else 1)]
    plain = [measure("resident", name, script, ranks, words, folder) for _ in range(runs)]
    setting = memory.Setting(ranks, "cpu", args.dtype == "bfloat16", script == "ppo", prompt=found[0][0]["prompt"])
    prediction = memory.predict(args, memory.read_model(model), setting)
    trainer = prediction.peak - prediction.parts["engine"] - prediction.parts["KV cache"]
    rows = []
    for rank in range(ranks):
        allocated = min(max(run[rank]["allocated"].values()) for run in found)
        resident = statistics.median(max(run[rank]["resident"].values()) for run in plain)
        whole = memory.PROCESS[args.rollout] + prediction.peak
        rows.append(Row(name, rank, trainer, allocated, whole, resident))
    return rows


def comparison(rows: list[Row]) -> str:
    """The rows as Markdown, in GB = 10^9 bytes."""
    lines = ["| configuration | rank | tensors: predicted | allocated | resident: predicted | measured |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        tensors = f"{row.predicted / 1e9:.3f} | {row.allocated / 1e9:.3f} ({row.predicted / row.allocated - 1:+.0%})"
        off = row.predicted_resident / row.resident - 1
        whole = f"{row.predicted_resident / 1e9:.2f} | {row.resident / 1e9:.2f} ({off:+.0%})"
        lines.append(f"| {row.name} | {row.rank} | {tensors} | {whole} |")
    return "\n".join(lines)


# Qwen2.5's configs: parameters, layers, hidden, intermediate, heads, kv heads, head size, vocabulary, tied head.
MODELS = {
    "0.5B": (494_032_768, 24, 896, 4864, 14, 2, 64, 151_936, True),
    "1.5B": (1_543_714_304, 28, 1536, 8960, 12, 2, 128, 151_936, True),
    "7B": (7_615_616_512, 28, 3584, 18944, 28, 4, 128, 152_064, False),
}
GPUS = (24, 80, 141)  # 10^9 bytes, as sold
# Tried from left to right: what each gives up is speed.
REMEDIES = (
    ("plain", {}),
    ("checkpointing", {"gradient_checkpointing": True}),
    ("ZeRO 3", {"gradient_checkpointing": True, "zero_stage": 3}),
    ("offload", {"gradient_checkpointing": True, "zero_stage": 3, "offload": ("optimizer",)}),
)
SIZES = {
    "num_unique_prompts_rollout": 64,
    "num_samples_per_prompt_rollout": 8,
    "max_prompt_length": 512,
    "max_response_length": 2048,
    "micro_batch_tokens": 8192,
    "logprob_micro_batch_tokens": 8192,
    "batch_layout": "packed",
    "attn_implementation": "flash_attention_2",
}
USABLE = 0.9  # fraction of a GPU; the rest is for CUDA, NCCL, CUDA graphs and fragments


def cell(model, gpu: int, ranks: int) -> str:
    """The first of REMEDIES with which a run fits, its peak, and the tokens that the KV cache then has room for."""
    import grpo

    for name, changes in REMEDIES:
        if name == "ZeRO 3" and ranks == 1:
            continue
        args = grpo.Args(**{**SIZES, **changes})
        setting = memory.Setting(ranks, "cuda", bf16=True)
        peak = memory.predict(args, model, setting).peak
        tokens = (USABLE * gpu * 1e9 - peak) / memory.kv_bytes(model, setting)
        if tokens >= 16 * (args.max_prompt_length + args.max_response_length):
            return f"{name}: {peak / 1e9:.0f} GB, {tokens / 1e6:.2f}M"
    return "--"


def table() -> str:
    """What fits where, as Markdown."""
    lines = [f"| model | GPUs | {' | '.join(f'{gpu} GB' for gpu in GPUS)} |", "|---|---|---|---|---|"]
    for name, numbers in MODELS.items():
        for ranks in (1, 8):
            cells = [cell(memory.Model(*numbers), gpu, ranks) for gpu in GPUS]
            lines.append(f"| {name} | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def planned(script: str, words: list[str], model, gpus: int, gpu_gb: float) -> memory.Prediction:
    """What a rank of a command line is predicted to need on ``gpus`` GPUs of ``gpu_gb`` 10^9 bytes, in bf16.

    The layout is that of a GPU: packed where there is no prompt to share, as runtime/attention.py chooses.
    """
    args = flags.parse(importlib.import_module(script.removesuffix(".py")).Args, words=words)
    trainers = gpus - args.vllm_engines * args.vllm_tensor_parallel_size
    rows = {"layout": "packed", "attention": "varlen"} if args.num_samples_per_prompt_rollout == 1 else {}
    critic = not getattr(args, "disable_value", True)
    return memory.predict(args, model, memory.Setting(trainers, "cuda", True, critic, gpu_gb * 1e9, **rows))


def plan(words: list[str]) -> int:
    """Print the memory lines of a command line; 1 where it does not fit. A model on the hub is known by its config."""
    parser = argparse.ArgumentParser(prog="memory.py plan")
    parser.add_argument("--gpus", type=int, default=1, help="of the launch")
    parser.add_argument("--gpu_gb", type=float, default=80, help="of one GPU, in 10^9 bytes, as sold")
    parser.add_argument("script", help="grpo.py or ppo.py, then its flags")
    at = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    given = parser.parse_args(words[: at + 1])
    name = dict(itertools.pairwise(words)).get("--model_name_or_path", flags.RunFlags.model_name_or_path)
    if not Path(name).exists():
        hf_hub_download(name, "config.json")
    model = memory.read_model(name)
    found = planned(given.script, words[at + 1 :], model, given.gpus, given.gpu_gb)
    print("\n".join(memory.describe(found, model, 0, given.gpu_gb * 1e9)))
    return int(found.peak > USABLE * given.gpu_gb * 1e9)


def main() -> None:
    if sys.argv[1:2] == ["plan"]:
        raise SystemExit(plan(sys.argv[2:]))
    if sys.argv[1:2] == ["run"]:  # a rank of a measured run
        run_measured(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "measure"))
    if parser.parse_args().what == "table":
        print(table())
        return
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder) / "model")
        rows = []
        for configuration in CONFIGURATIONS:
            rows += compare(configuration, model, Path(folder))
        print(comparison(rows))


if __name__ == "__main__":
    main()

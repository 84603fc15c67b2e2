"""Memory of a run: the table by model and GPU, and what runs really hold against what training/memory.py predicts.

    python studies/memory_tables.py table          what fits where, as in docs/evidence/memory.md
    python studies/memory_tables.py laptop         what a machine without a GPU trains, as there
    python studies/memory_tables.py first          commands of a first GPU run, for docs/evidence/gpu.md
    python studies/memory_tables.py defaults       what a bare command takes for ten models and data sets
    python studies/memory_tables.py measure        six configurations on this machine's CPU: a table
    python studies/memory_tables.py quickstart     the quickstart's memory part by part, in both data types

A measured run is a run of the script itself, of two steps with responses of full length. In its second step every rank
notes for each phase the most bytes of tensors that its main thread had allocated at a time (by the events of torch's
profiler). In a run of its own, since the profiler's records take memory, too, it notes its largest resident memory
(VmHWM, reset at the start of the phase). studies/rehearse_gpu_run.py says what one command needs.

The quickstart is measured with its own engine, model, prompts and responses, but with rewards by chance, so that every
group trains: resident memory after each part of the start, and in each phase of its second step.
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
import threading
import time
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # the scripts are not a package

from heap import heap_in_use
from rehearse_gpu_run import CARDS, MEAN, forget_peak, resident, step_seconds

from runtime.arguments import flags
from runtime.arguments.values import ModelName
from runtime.training import derived_defaults, device_sizes, memory

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


def allocation_peaks(profiler, phases: list[tuple[str, int, int]]) -> dict[str, int]:
    """Return the most bytes allocated at a time in each phase (name, start, end in ns), from memory events."""
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
    """Run one rank of ``script`` with the flags ``words``. Writes measured-RANK.json to the folder of the run.

    ``kind``: allocated, what tensors hold by the profiler; or resident. The profiler sees the main thread alone, so
    that thread does what others do in a run: it loads a reference's weights, and frees what ZeRO 3 has gathered before
    the engine's thread would. Tensors that gloo's threads free last still count as held.
    """
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    import deepspeed

    from runtime.run import logger
    from runtime.system import process

    module = importlib.import_module(script)
    import torch

    import utils
    from runtime.training import deepspeed_zero, pretrained

    args = flags.parse(module.Args, words=words)
    ready = module.preflight(args)
    found = {"phases": [], "resident": {}}
    load, call, record = pretrained.load_model, utils.Stopwatch.__call__, logger.RunLog.step
    weights = deepspeed_zero.current_weights

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

    pretrained.load_model = note_baseline
    deepspeed_zero.current_weights = gathered_here
    utils.Stopwatch.__call__ = noted
    logger.RunLog.step = note_step
    process.prepare_environment()
    if kind == "allocated":
        profiler = torch.autograd.profiler.profile(profile_memory=True)
        profiler.__enter__()
    module.main(args, ready)


def measure(kind: str, name: str, script: str, ranks: int, words: tuple[str, ...], folder: Path) -> list[dict]:
    """Return the measurements of each rank of a run; ``kind`` as in ``run_measured``.

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


# --------------------------------------------------------------------------------------------------- the quickstart's

QUICKSTART = (
    *("--total_steps", "2", "--eval_prompts", "0", "--seed", "1"),
    *("--save_minutes", "0", "--overwrite", "--run_name", "measured"),
)
MEASURED = ("generate", "update", "push")  # phases


class HeapWatch:
    """The most that was in use of the heap since ``forget``, looked at by a thread every three milliseconds."""

    def __init__(self):
        self.most = 0
        threading.Thread(target=self.look, daemon=True).start()

    def look(self) -> None:
        while True:
            now = heap_in_use()  # takes a while: ``forget`` may come meanwhile
            self.most = max(self.most, now)
            time.sleep(0.003)

    def forget(self) -> None:
        self.most = heap_in_use()


def run_quickstart(words: list[str]) -> None:
    """Run the start and two steps of grpo.py. Writes parts.json to the folder of the run: {part: bytes}, in order."""
    from runtime.run import logger
    from runtime.system import process

    parts = {"Python, and what this measurement imports": resident()}
    process.prepare_environment()
    grpo = importlib.import_module("grpo")
    import utils
    from runtime.training import deepspeed_zero

    parts["torch, transformers, DeepSpeed"] = resident()
    args = flags.parse(grpo.Args, words=words)
    ready = grpo.preflight(args)
    heap = HeapWatch()
    timed = utils.Stopwatch.__call__
    predict = memory.predict
    bounds = []

    def noted_after(part: str, function):
        def wrapped(*arguments):
            result = function(*arguments)
            parts[part] = resident()
            return result

        return wrapped

    @contextlib.contextmanager
    def noted(clock, phase: str):
        forget_peak()
        heap.forget()
        with timed(clock, phase):
            yield
        if phase in MEASURED:
            parts[f"{phase}: the most"] = resident("VmHWM")
            parts[f"{phase}: in use of the heap, the most"] = heap.most

    def noted_bound(*arguments):
        bounds.append(predict(*arguments))
        return bounds[-1]

    def end(log, metrics, samples, problems):
        if metrics["step"] == args.total_steps:
            parts["the bound"] = bounds[-1].peak
            (log.folder / "parts.json").write_text(json.dumps(parts))
            os._exit(0)

    grpo.Engine = noted_after("the engine, and vLLM", grpo.Engine)
    utils.prepare_policy = noted_after("the trainer's weights, read and checked", utils.prepare_policy)
    deepspeed_zero.dedupe_fp32_weights = noted_after("DeepSpeed", deepspeed_zero.dedupe_fp32_weights)
    utils.Stopwatch.__call__ = noted
    memory.predict = noted_bound  # the header of a run calls it with the sizes that the run has chosen
    logger.RunLog.step = end
    grpo.main(args, ready)


def quickstart(dtype: str, folder: Path) -> dict[str, float]:
    """Return the GiB of each part of a run, by name, and of the bound. Raises RuntimeError if the run fails."""

    (folder / "coin.py").write_text(COIN)
    words = [*QUICKSTART, "--dtype", dtype, "--verifier", f"{folder / 'coin.py'}:coin", "--output_dir", str(folder)]
    command = [sys.executable, str(Path(__file__).resolve()), "parts", *words]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    file = folder / "measured" / "parts.json"
    if done.returncode != 0 or not file.exists():
        raise RuntimeError(f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    return {name: size / 2**30 for name, size in json.loads(file.read_text()).items()}


def quickstart_table(folder: Path) -> str:
    """Return the memory of the quickstart's parts in both data types, as Markdown."""
    bf16 = quickstart("bfloat16", folder)
    fp32 = quickstart("float32", folder)
    lines = ["| GiB | bf16 | fp32 |", "|---|---|---|"]
    for name in bf16:
        lines.append(f"| {name} | {bf16[name]:.2f} | {fp32[name]:.2f} |")
    return "\n".join(lines)


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
    setting = memory.Setting(ranks, args.dtype == "bfloat16", critic=script == "ppo")
    prediction = memory.predict(args, memory.read_model(ModelName(str(model), None)), setting)
    whole = prediction.peak - prediction.parts["gaps"]  # which are those of larger models and longer runs
    trainer = whole - sum(prediction.parts[name] for name in ("engine", "KV cache", "process"))
    rows = []
    for rank in range(ranks):
        allocated = min(max(run[rank]["allocated"].values()) for run in found)
        resident = statistics.median(max(run[rank]["resident"].values()) for run in plain)
        rows.append(Row(name, rank, trainer, allocated, whole, resident))
    return rows


def comparison(rows: list[Row]) -> str:
    """Return the rows as Markdown, in GB = 10^9 bytes."""
    lines = ["| configuration | rank | tensors: predicted | allocated | resident: predicted | measured |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        tensors = f"{row.predicted / 1e9:.3f} | {row.allocated / 1e9:.3f} ({row.predicted / row.allocated - 1:+.0%})"
        off = row.predicted_resident / row.resident - 1
        whole = f"{row.predicted_resident / 1e9:.2f} | {row.resident / 1e9:.2f} ({off:+.0%})"
        lines.append(f"| {row.name} | {row.rank} | {tensors} | {whole} |")
    return "\n".join(lines)


# Qwen2.5's configs: layers, hidden, intermediate, heads, kv heads, vocabulary, tied head.
MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": (24, 896, 4864, 14, 2, 151_936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (28, 1536, 8960, 12, 2, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": (28, 3584, 18944, 28, 4, 152_064, False),
}
NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
KINDS = ("rtx4090", "l40s", "h100", "h200")
WAYS = ({}, *device_sizes.REMEDIES)
SPLIT = {**device_sizes.REMEDIES[3], "zero_stage": 3, "vllm_tensor_parallel_size": 2}  # of several GPUs
SIZES = {"num_unique_prompts_rollout": 64, "max_prompt_length": 256, "max_response_length": 1024}


def qwen(name: str) -> memory.Model:
    """Return the model of a name in MODELS."""
    return model_of(MODELS[name])


def model_of(sizes: tuple) -> memory.Model:
    """Return a model by its numbers, as in MODELS."""
    *numbers, vocabulary, tied = sizes
    return memory.model_of(dict(zip(NAMES, numbers, strict=True)) | {"vocab_size": vocabulary}, tied=tied)


def first_that_fits(model: memory.Model, card: int, ranks: int, ways: Sequence[dict]) -> tuple | None:
    """Return the first of ``ways`` by which a run fits, its sizes and the predicted peak in 10^9 bytes, or None."""
    import grpo

    setting = memory.Setting(ranks, True, card * 1e9)
    for needed in ways:
        args = grpo.Args(**SIZES, **needed)
        size = device_sizes.first_fit(args, model, setting)
        if size is not None:
            return needed, size, memory.predict(args, model, setting, size).peak / 1e9
    return None


def cell(model: memory.Model, card: int, ranks: int) -> str:
    """Return the settings with which a run fits: micro-batch tokens, engine share and predicted peak."""
    found = first_that_fits(model, card, ranks, WAYS)
    if found is None:
        return "--"
    needed, size, peak = found
    letter = "-CSAOP"[WAYS.index(needed)]
    return f"{letter}: {size.micro_batch_tokens}, {size.vllm_gpu_memory_utilization}, {peak:.0f} GB"


def first_runs() -> str:
    """Return the commands of a first GPU run: GPUs, flags to add, predicted memory and minutes, as Markdown."""
    import grpo

    head = (
        "| GPU | model | GPUs | flags to add | micro-batch, engine's share | memory at most | minutes for 200 steps |"
    )
    lines = [head, "|---|---|---|---|---|---|---|"]
    for kind in KINDS:
        card = CARDS[kind]
        for name in MODELS:
            model = qwen(name)
            for ranks in (1, 2, 4, 8):
                found = first_that_fits(model, card.gb, ranks, WAYS if ranks == 1 else (*WAYS, SPLIT))
                if found is not None:
                    break
            needed, size, peak = found
            args = grpo.Args(**SIZES, **needed)
            setting = memory.Setting(ranks, True, card.gb * 1e9)
            mean = MEAN * args.max_response_length
            minutes = 200 * sum(step_seconds(args, model, setting, size, card, mean).values()) / 60
            words = f"`{device_sizes.as_words(needed)}`" if needed else "none"
            chosen = f"{size.micro_batch_tokens}, {size.vllm_gpu_memory_utilization}"
            row = f"| {kind}, {card.gb} GB | {name.split('/')[1]} "
            lines.append(f"{row}| {ranks} | {words} | {chosen} | {peak:.0f} GB | {minutes:.0f} |")
    return "\n".join(lines)


def table() -> str:
    """Return the table of models and GPUs that fit, as Markdown."""
    cards = [CARDS[kind].gb for kind in KINDS]
    lines = [f"| model | GPUs | {' | '.join(f'{card} GB' for card in cards)} |", "|---|---|---|---|---|---|"]
    for name in MODELS:
        for ranks in (1, 8):
            cells = [cell(qwen(name), card, ranks) for card in cards]
            lines.append(f"| {name.split('/')[1]} | {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


# Beside Qwen's, what a machine of 16 GB may train, and the bytes of them that it leaves to a run.
SMALL = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": (30, 576, 1536, 9, 3, 49_152, True),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (32, 960, 2560, 15, 5, 49_152, True),
}
LAPTOP = 14e9


def on_a_laptop(script: str, model: memory.Model, bf16: bool, length: int) -> str:
    """Return the bound in 10^9 bytes of the quickstart with ``length`` tokens a response; "C" with checkpointing."""
    setting = memory.Setting(1, bf16, critic=script == "ppo")
    for ways in ({}, {"gradient_checkpointing": True}):
        args = importlib.import_module(script).Args(max_response_length=length, max_prompt_length=256, **ways)
        peak = memory.predict(args, model, setting).peak
        if peak < LAPTOP:
            return f"{'C ' if ways else ''}{peak / 1e9:.1f}"
    return f"-- ({peak / 1e9:.0f})"


def laptops() -> str:
    """Return the table of models for a machine of 16 GB without a GPU, as Markdown."""
    kinds = list(itertools.product(("grpo", "ppo"), (True, False), (32, 256)))
    heads = [f"{script}.py, {'bf16' if bf16 else 'fp32'}, {length}" for script, bf16, length in kinds]
    lines = [f"| model | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name, sizes in (SMALL | MODELS).items():
        cells = [on_a_laptop(script, model_of(sizes), bf16, length) for script, bf16, length in kinds]
        lines.append(f"| {name.split('/')[1]} | {' | '.join(cells)} |")
    return "\n".join(lines)


# Model, its parameters in 10^6 and context as its config has them, whether its template lets it think; data set, its
# training problems, the verifier that its columns choose.
BARE = (
    ("HuggingFaceTB/SmolLM2-360M-Instruct", 362, 8192, False, "openai/gsm8k:main@train", 7473, "gsm8k"),
    ("Qwen/Qwen2.5-0.5B-Instruct", 494, 32768, False, "openai/gsm8k:main@train", 7473, "gsm8k"),
    ("meta-llama/Llama-3.2-1B-Instruct", 1236, 131072, False, "openai/gsm8k:main@train", 7473, "gsm8k"),
    ("Qwen/Qwen3-0.6B", 596, 40960, True, "openai/gsm8k:main@train", 7473, "gsm8k"),
    ("Qwen/Qwen2.5-1.5B-Instruct", 1544, 32768, False, "DigitalLearningGmbH/MATH-lighteval", 7500, "math"),
    ("Qwen/Qwen2.5-Math-1.5B", 1544, 4096, False, "DigitalLearningGmbH/MATH-lighteval", 7500, "math"),
    ("Qwen/Qwen2.5-3B", 3086, 32768, False, "Jiayi-Pan/Countdown-Tasks-3to4", 490364, "countdown"),
    ("Qwen/Qwen3-1.7B", 1721, 40960, True, "agentica-org/DeepScaleR-Preview-Dataset", 40315, "math"),
    (
        *("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1777, 131072, True),
        *("agentica-org/DeepScaleR-Preview-Dataset", 40315, "math"),
    ),
    ("Qwen/Qwen2.5-Coder-7B-Instruct", 7616, 32768, False, "codeparrot/apps", 5000, "code"),
)


def defaults_table() -> str:
    """Return the choices of ``python grpo.py --model_name_or_path MODEL --dataset DATA`` with reasons, as Markdown."""
    import grpo

    lines = ["| model | data | learning rate | response length | steps | why |", "|---|---|---|---|---|---|"]
    for name, millions, context, thinks, source, problems, verifier in BARE:
        model = memory.Model(millions * 10**6, 1, 1, 1, 1, 1, 1, 1)
        rate, size = derived_defaults.by_model(grpo.Args(), model)["learning_rate"]
        length, why = derived_defaults.response_length({verifier}, thinks, context - grpo.Args.max_prompt_length)
        steps, _ = derived_defaults.steps(grpo.Args(), problems - grpo.Args.eval_prompts)
        lines.append(f"| {name} | {source} | {rate:g} | {length} | {steps} | {size}; {why} |")
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["run"]:  # a rank of a measured run
        run_measured(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    if sys.argv[1:2] == ["parts"]:  # the measured quickstart
        run_quickstart(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("table", "laptop", "first", "defaults", "measure", "quickstart"))
    what = parser.parse_args().what
    if what not in ("measure", "quickstart"):
        print({"table": table, "laptop": laptops, "first": first_runs, "defaults": defaults_table}[what]())
        return
    with tempfile.TemporaryDirectory() as folder:
        if what == "quickstart":
            print(quickstart_table(Path(folder)))
            return
        model = small_model(Path(folder) / "model")
        rows = []
        for configuration in CONFIGURATIONS:
            rows += compare(configuration, model, Path(folder))
        print(comparison(rows))


if __name__ == "__main__":
    main()

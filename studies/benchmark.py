"""Time a step or a whole run on this machine: phases against the hardware's limits, two checkouts in turns.

    python studies/benchmark.py                               the phases of the quickstart's step; some minutes
    python studies/benchmark.py step --num_unique_prompts_rollout 64 --max_response_length 512
    python studies/benchmark.py run grpo.py --total_steps 6   a run: its start, its phases, its peak memory
    python studies/benchmark.py run --against ../at-a-commit grpo.py --total_steps 6

``step`` (what is timed without a word) measures rates of matrix products and copies; the update, in shared and in
padded rows, with the same samples, weights and budget; and a step of AdamW. The floor of a phase is the time that it
would take at the measured rates without any overhead.

``run`` starts the command --repeats times, and as often by the code of another checkout (``git worktree add``). Only
there is the engine, with sampling and pushes.

Alternatives are timed in turn (A B A B): within minutes a machine's speed drifts, the ratio of neighbors hardly does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts are not a package

from runtime.system.process import prepare_environment

prepare_environment()

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer

import grpo
import utils
from rewards import truth_error
from runtime.arguments import checks, flags
from runtime.data import problem_set, prompt_order, rendering
from runtime.data.samples import Sample
from runtime.engine import vllm_settings
from runtime.system import process, watchdog
from runtime.training import batching, memory, model_files, pretrained
from runtime.training.attention import choose_layout

PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}  # rows of the square matrices; a GPU needs large ones to be busy
COPY_BYTES = 256 * 10**6  # more than caches hold
# Lengths of responses, in 32nds of the longest that is allowed, one as likely as the next: as in the first steps of a
# quickstart, whose mean is 15 to 25 of 32 tokens, with a sixth to a half of the responses truncated.
LENGTHS = (3, 8, 12, 20, 32, 32)

say = partial(print, flush=True)


@dataclass
class Args(grpo.Args):
    """grpo.py's, and how to measure."""

    ignore_eos: bool = True
    mask_truncated_completions: bool = False
    repeats: int = 3
    """Measurements of each alternative."""
    json: str | None = None
    """Write all numbers, including every single measurement, to this file."""


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of ``work``, including what it left running on a GPU."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    result = work()
    wait()
    return time.perf_counter() - start, result


def timed_repeatedly(work: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each of ``count`` calls."""
    return [timed(work)[0] for _ in range(count)]


def alternate(ways: dict[str, Callable], repeats: int, before: Callable) -> tuple[dict, dict]:
    """Time several ways of doing the same, in turn, with an untimed ``before()`` each time.

    Returns (seconds by way, last result by way).
    """
    seconds = {way: [] for way in ways}
    results = {}
    for _ in range(repeats):
        for way, work in ways.items():
            before()
            elapsed, results[way] = timed(work)
            seconds[way].append(elapsed)
    return seconds, results


def spread(values: list[float], unit: str = "s", digits: int = 2) -> str:
    """Median, with minimum and maximum in parentheses."""
    return f"{median(values):.{digits}f} {unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def machine_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(FLOP/s of a matrix product in ``dtype``, bytes/s of a copy, counting bytes read and written); best of 8."""
    size = PRODUCT_SIZE[device.type]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    source, target = torch.ones(2, COPY_BYTES, dtype=torch.uint8, device=device)
    products = timed_repeatedly(lambda: a @ b, 8)
    copies = timed_repeatedly(lambda: target.copy_(source), 8)
    flops = 2 * size**3
    moved = 2 * COPY_BYTES
    return flops / min(products), moved / min(copies)


def machine_name(device: torch.device) -> str:
    """Model of the GPU, or of the CPU where the run has no GPU.

    AMX is in the name: virtual machines may call CPUs with and without it the same, and here one multiplied bf16 at
    2,425 GFLOP/s, the other at 150.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = cpu[1] if cpu else "unknown CPU"
    return f"{name} with AMX" if torch.cpu._is_amx_tile_supported() else name


def random_samples(prompts: list[list[int]], group: int, cap: int, vocabulary: int) -> list[Sample]:
    """Return random responses to these prompts, of at most ``cap`` tokens each; the same in every run."""
    generator = np.random.default_rng(0)
    samples = []
    for place, prompt_ids in enumerate(prompts):
        for k in range(group):
            length = max(1, int(generator.choice(LENGTHS)) * cap // 32)
            response = generator.integers(vocabulary, size=length, dtype=np.int32)
            logprobs = -generator.random(length, dtype=np.float32)
            samples.append(Sample(place, k, prompt_ids, response, logprobs, "stop", [(1, 0)]))
    return samples


def one_rank(samples: list[Sample], layout: str, budget: int, device: torch.device) -> Iterator:
    """Yield the micro-batches of a run of one rank."""
    return batching.micro_batches(
        samples, list(range(len(samples))), layout=layout, budget=budget, rank=0, world_size=1, device=device
    )


def update(policy, samples: list[Sample], layout: str, budget: int) -> tuple[int, int]:
    """Run the update phase without the optimizer: make micro-batches, run forward and backward of each.

    Returns (tokens in the loss, positions computed).
    """
    tokens = positions = 0
    for mb in one_rank(samples, layout, budget, policy.model.device):
        policy(mb)[0].mean().backward()
        tokens += len(mb.tokens)
        positions += mb.input_ids.numel()
    return tokens, positions


def compare_layouts(policy, samples: list[Sample], args: Args) -> dict[str, list[float]]:
    """Time an update in both layouts: seconds of each by layout."""
    ways = {}
    for layout in ("shared", "padded"):
        ways[layout] = partial(update, policy, samples, layout, args.micro_batch_tokens)
    update(policy, samples[:2], "shared", args.micro_batch_tokens)  # the first pass allocates
    clear = partial(policy.zero_grad, set_to_none=True)
    found, results = alternate(ways, args.repeats, clear)
    for layout, (tokens, positions) in results.items():
        rate = tokens / median(found[layout])
        say(f"  {layout:16s} {spread(found[layout])}   {rate:.0f} response tokens/s, {positions} positions")
    ratios = []
    for padded, shared in zip(found["padded"], found["shared"], strict=True):
        ratios.append(padded / shared)
    say(f"  padded / shared  {spread(ratios, 'x')}")
    return found


def time_optimizer(policy, args: Args) -> list[float]:
    """Time a step of AdamW on fp32 master weights, with the gradients that the update left behind."""
    masters = []
    for parameter in policy.parameters():
        master = parameter.detach().float().requires_grad_()  # in fp32 this is the weight itself
        master.grad = parameter.grad.float()
        masters.append(master)
    optimizer = torch.optim.AdamW(masters, lr=0.0, weight_decay=0.0, fused=True)  # all of the work, no change
    optimizer.step()  # the first step allocates the moments
    return timed_repeatedly(optimizer.step, max(5, args.repeats))


def forward_flops(model, prompts: list[int], continued: list[tuple[int, int]], predicted: int) -> float:
    """FLOPs of a forward pass, counting only what a causal model cannot avoid.

    ``prompts``: lengths. ``continued``: (length of the prompt before, own length) of responses. ``predicted``: tokens
    for which the head runs. A weight of a linear layer costs 2 FLOPs per token; attention's scores and values cost 4
    per layer, head dimension and pair of tokens, of which causal tokens see half of the n^2.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = config.num_hidden_layers * heads * width
    blocks = 0
    for module in model.base_model.modules():
        if isinstance(module, nn.Linear):
            blocks += module.weight.numel()
    head = model.get_output_embeddings().weight.numel()
    tokens = sum(prompts)
    squares = sum(p * p for p in prompts)
    for before, own in continued:
        tokens += own
        squares += (before + own) ** 2 - before**2
    return 2 * (blocks * tokens + attention * squares + head * predicted)


def floors(model, samples: list[Sample], flops: float, bandwidth: float) -> dict[str, float]:
    """Seconds that each phase needs at least at these rates.

    * Backward is twice forward (gradients of inputs and of weights), so an update is three forward passes. The last
      token of a response predicts nothing and need not be computed.
    * AdamW reads weight, gradient and two moments in fp32 (16 bytes) and writes weight and moments (12), plus the bf16
      copy (2) if there is one.
    """
    unique = []
    every = []
    computed = []
    trained = 0
    for sample in samples:
        prompt = len(sample.prompt_ids)
        response = len(sample.response_ids)
        if sample.sample_id == 0:
            unique.append(prompt)
        every.append(prompt)
        computed.append((prompt, response - 1))
        trained += response
    itemsize = model.dtype.itemsize
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "shared": 3 * forward_flops(model, unique, computed, trained) / flops,
        "padded": 3 * forward_flops(model, every, computed, trained) / flops,
        "optimizer": (28 if itemsize == 4 else 30) * parameters / bandwidth,
    }


def check_args(args: Args) -> None:
    """Exit with code 2 if the arguments of the step do not fit together."""
    checks.check(args, 1)
    model_files.check_model(args)
    checks.check_training(args)
    grpo.check_args(args)
    if args.repeats < 1:
        process.refuse(f"--repeats {args.repeats}: must be above 0")
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        process.refuse(f"--json {args.json}: no such folder; name a file in a folder that exists")


@watchdog.ends_all_ranks
def main(args: Args) -> None:
    """Time the phases of a step."""
    check_args(args)
    load = os.getloadavg()[0]  # before this program adds to it
    cores = len(os.sched_getaffinity(0))
    problems = problem_set.load_problems(args, truth_error)[0]
    chosen = prompt_order.prompts_at(0, args.num_unique_prompts_rollout, len(problems), args.seed)
    problems = [problems[i] for i in chosen]
    device, dtype, attention = pretrained.resolve_device(args)
    setting = vllm_settings.memory_setting(args, dtype, 1)
    sizes, _ = memory.sizes_for(args, model_files.read_model(args.model), setting)
    _, attention, _ = choose_layout(args, sizes, device.type == "cuda", dtype, attention)  # as a run has it
    args.micro_batch_tokens = sizes.micro_batch_tokens
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    rendering.render_prompts(problems, tokenizer, args)
    model = pretrained.load_model(args, dtype, attention)
    policy = utils.TokenLogprobs(model.to(device), args.temperature, sizes.logprob_chunk)
    machine = machine_name(device)
    say(f"machine    {machine}, {cores} cores, {torch.get_num_threads()} threads, torch {torch.__version__}")
    say(f"load       {load:.1f} at the start{'; trust ratios, not seconds' if load > 0.25 * cores else ''}")
    rates = machine_rates(device, dtype)
    prompts = [problem.prompt_ids for problem in problems]
    samples = random_samples(prompts, args.num_samples_per_prompt_rollout, args.max_response_length, len(tokenizer))
    tokens = batching.token_offsets(samples)[-1]
    say(f"update     {len(samples)} responses, {tokens} tokens in the loss, {args.micro_batch_tokens} in a micro-batch")
    seconds = compare_layouts(policy, samples, args)
    seconds["optimizer"] = time_optimizer(policy, args)
    # The better of the rates before and after: another program may have been busy during one of them.
    flops, bandwidth = map(max, rates, machine_rates(device, dtype))
    bound = floors(model, samples, flops, bandwidth)
    say(f"rates      {flops / 1e9:.0f} GFLOP/s {dtype}, {bandwidth / 1e9:.1f} GB/s copied (read + written)")
    for phase, found in seconds.items():
        share = f"   floor {bound[phase]:.3f}, {100 * bound[phase] / median(found):.0f} %" if phase in bound else ""
        say(f"  {phase:16s} {spread(found, digits=3)}{share}")
    if args.json is not None:
        numbers = {
            "machine": machine,
            "versions": process.versions(),
            "arguments": dataclasses.asdict(args),
            "flop_per_second": flops,
            "bytes_per_second": bandwidth,
            "seconds": seconds,
            "floor_seconds": bound,
            "response_tokens": tokens,
        }
        Path(args.json).write_text(json.dumps(numbers, indent=1, default=str))


def run_once(code: Path, words: list[str]) -> dict[str, float]:
    """Run a command by the code in a folder; seconds of its start, of each phase on average, and its peak memory."""
    with tempfile.TemporaryDirectory(prefix="bench-") as place:
        line = [sys.executable, str(code / words[0]), *words[1:], "--output_dir", place, "--run_name", "timed"]
        started = time.perf_counter()
        log = Path(place, "log")
        with log.open("w") as output:
            end = process.die_with_parent
            child = subprocess.Popen(line, cwd=code, stdout=output, stderr=output, preexec_fn=end)
            _, status, usage = os.wait4(child.pid, 0)
        whole = time.perf_counter() - started
        if status != 0:
            process.refuse(f"{line} failed:\n{log.read_text()[-2000:]}")
        lines = Path(place, "timed", "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    inside = sum(step["time/step"] for step in steps)
    found = {"whole": whole, "outside steps": whole - inside}
    for name in steps[-1]:
        if name.startswith("time/"):
            seconds = [step.get(name) or 0.0 for step in steps[1:] or steps]  # the first step allocates
            found[name.removeprefix("time/")] = mean(seconds)
    return found | {"peak GiB": usage.ru_maxrss / 2**20}


def main_run(words: list[str]) -> None:
    """Time whole runs."""
    parser = argparse.ArgumentParser(description="Time whole runs.")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each checkout")
    parser.add_argument("--against", type=Path, help="another checkout, timed in turns with this one")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a script and its flags")
    args = parser.parse_args(words)
    if not args.command:
        parser.error("name a script and its flags, such as grpo.py --total_steps 6")
    folders = [ROOT]
    if args.against is not None:
        folders.append(args.against.resolve())
    found = {folder: [] for folder in folders}
    for _ in range(args.repeats):
        for folder in folders:
            found[folder].append(run_once(folder, args.command))
    for way, runs in found.items():
        say(way)
        for name in runs[0]:
            say(f"  {name:16s} {spread([one[name] for one in runs], '')}")


if __name__ == "__main__":
    process.choose_allocator()
    mode, *rest = sys.argv[1:] or ["step"]
    if mode == "run":
        main_run(rest)
    else:
        words = rest if mode == "step" else sys.argv[1:]
        main(flags.parse(Args, __doc__, words))

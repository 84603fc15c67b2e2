"""Time the phases of a step on this machine, against the usual alternatives and against the hardware's limits.

    python studies/benchmark.py                               the quickstart's batch; five minutes on two slow cores
    python studies/benchmark.py --num_unique_prompts_rollout 64 --max_response_length 512 --micro_batch_tokens 16384

1. The machine: measured rates of matrix products and of copies.
2. The update: groups as shared rows against one row per sample; same samples, same weights, same token budget.
3. The engine: grpo.Engine, which takes token ids, against ``llm.chat``, which takes text, with its defaults; same
   prompts and lengths. What chat adds is Python work per token: a lot next to a fast model, nothing next to one that
   takes 200 ms per step.
4. A step of AdamW, and a push of weights.
5. What a step takes when the task is learned: short responses, a quarter of the groups with a gradient, decode steps of
   few sequences.
6. The floor: the time that these phases would take at the measured rates without any overhead; efficiency is floor /
   time.
7. The operators of an update and of sampling, on CPUs: the share of matrix products, what the same products take alone,
   and what the rest is, by name.
8. An optimizer step of DeepSpeed on one token: what every optimizer step of a run takes at least.

Alternatives are timed in turn (A B A B) in one process: the speed of a machine drifts within minutes, the ratio of
neighboring measurements hardly does. Exit code 1: the two layouts do not give the same log-probs and gradient.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime.system.process import prepare_environment

prepare_environment()
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler would say when it starts and stops

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer

import grpo
import utils
from rewards import truth_error
from runtime.arguments import checks, flags
from runtime.data import problem_set, prompt_order, rendering
from runtime.data.samples import Problem, Sample
from runtime.engine import vllm_settings
from runtime.system import process, watchdog
from runtime.training import batching, deepspeed_zero, memory, model_files, pretrained
from runtime.training.attention import choose_layout

# Largest accepted difference of the layouts: nats per token, and the gradient's as a fraction of its norm.
LIMIT = {"float32": 1e-4, "bfloat16": 5e-2}
STEP = ("generate", "shared", "optimizer", "push")  # phases of a step in the shared layout
PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}  # rows of the square matrices; a GPU needs large ones to be busy
COPY_BYTES = 256 * 10**6  # more than caches hold
# Lengths of responses, in 32nds of the longest that is allowed, one as likely as the next. In the first steps of a
# quickstart the mean is 15 to 25 of 32 tokens, a sixth to a half of the responses are truncated, and some are a bare
# number. When the task is learned the mean is 8 to 14, the longest mostly 28 to 32, and two or three of eight groups
# train.
EARLY = (3, 8, 12, 20, 32, 32)
LATE = 15 * (8,) + (28,)
DECODED = (1, 8, 64)  # sequences whose decode step is timed

say = partial(print, flush=True)


@dataclass
class Args:
    """The first six are grpo.py's, with its defaults."""

    model_name_or_path: str = grpo.Args.model_name_or_path
    """Local folder or hub id."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of weights, sampling and the measured matrix products."""
    num_unique_prompts_rollout: int = grpo.Args.num_unique_prompts_rollout
    """Prompts per step."""
    num_samples_per_prompt_rollout: int = grpo.Args.num_samples_per_prompt_rollout
    """Responses per prompt."""
    max_response_length: int = grpo.Args.max_response_length
    """Response length in tokens: exact for the engine, the maximum for the update."""
    micro_batch_tokens: int | None = grpo.Args.micro_batch_tokens
    """Tokens per forward and backward pass, padding included. Default: 16384 on GPUs, 1024 on CPUs."""
    repeats: int = 3
    """Measurements of each alternative."""
    skip_engine: bool = False
    """Leave out vLLM: no sampling, no push."""
    json: str | None = None
    """Write all numbers, including every single measurement, to this file."""


@dataclass
class Timings:
    """Measured seconds by name, one per repeat, and ratios of neighboring measurements."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    ratios: dict[str, list[float]] = field(default_factory=dict)

    def compare(self, title: str, slow: str, fast: str) -> None:
        """Record and print the ratio of two alternatives, repeat by repeat."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        self.ratios[title] = [a / b for a, b in pairs]
        say(f"  {title:16s} {spread(self.ratios[title], 'x')}")


# ------------------------------------------------------------------------------------------------------------- timing


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


def alternate(ways: dict[str, Callable], repeats: int, before: Callable) -> tuple[dict[str, list[float]], dict]:
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


# ------------------------------------------------------------------------------------------------------ 1 the machine


def machine_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(FLOP/s of a matrix product in ``dtype``, bytes/s of a copy, counting bytes read and written); best of 8.

    Work that mostly reads can be a little faster than a copy.
    """
    size = PRODUCT_SIZE[device.type]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    source, target = torch.ones(2, COPY_BYTES, dtype=torch.uint8, device=device)
    products = timed_repeatedly(lambda: a @ b, 8)
    copies = timed_repeatedly(lambda: target.copy_(source), 8)
    flops = 2 * size**3
    return flops / min(products), 2 * COPY_BYTES / min(copies)


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


# ------------------------------------------------------------------------------------------------------- 2 the update


def fixed_samples(
    problems: list[Problem], group: int, cap: int, vocabulary: int, lengths: tuple[int, ...] = EARLY
) -> list[Sample]:
    """Return the samples that the update is timed on, the same in every run; ``lengths`` are in 32nds of ``cap``.

    The prompts are those of the quickstart's first step, about 45 tokens each with the model's template. The tokens are
    random, so only the prompt is shared within a group; in training responses also share the tokens they begin with.
    """
    generator = random.Random(0)
    samples = []
    for place, problem in enumerate(problems):
        for k in range(group):
            length = max(1, generator.choice(lengths) * cap // 32)
            response = [generator.randrange(vocabulary) for _ in range(length)]
            samples.append(Sample(place, k, problem.prompt_ids, response, [0.0] * length, "stop", []))
    return samples


def update(policy, samples: list[Sample], layout: str, budget: int) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Run the update phase without the optimizer: make micro-batches, run forward and backward of each.

    Returns (log-probs [N], gradients, positions computed). Tokens have different weights, so that a layout that mixed
    them up would give another gradient; all weights are positive, since terms that cancel would leave only rounding
    errors in bf16.
    """
    device = policy.model.device
    micro_batches = batching.micro_batches(
        samples,
        list(range(len(samples))),
        layout=layout,
        budget=budget,
        rank=0,
        world_size=1,
        device=device,
    )
    count = batching.token_offsets(samples)[-1]
    random_N = torch.rand(count, generator=torch.Generator().manual_seed(0))
    weights_N = (random_N + 0.5).to(device) / count
    logprobs_N = torch.zeros_like(weights_N)
    positions = 0
    for mb in micro_batches:
        logprobs_T = policy(mb)[0]
        (-logprobs_T * weights_N[mb.tokens]).sum().backward()
        logprobs_N[mb.tokens] = logprobs_T.detach()
        positions += mb.input_ids.numel()
    gradients = [p.grad for p in policy.parameters()]
    return logprobs_N, gradients, positions


def compare_layouts(policy, samples: list[Sample], args: Args, timings: Timings) -> tuple[float, bool]:
    """Time an update in both layouts.

    Returns (norm of the difference of the gradients as a fraction of the norm, whether the layouts agree).
    """
    budget = args.micro_batch_tokens
    ways = {}
    for layout in ("shared", "padded"):
        ways[layout] = partial(update, policy, samples, layout, budget)
    update(policy, samples[:2], "shared", budget)  # the first pass allocates
    seconds, results = alternate(ways, args.repeats, partial(policy.zero_grad, set_to_none=True))
    timings.seconds |= seconds
    tokens = batching.token_offsets(samples)[-1]
    for layout, (_, _, positions) in results.items():
        rate = tokens / median(seconds[layout])
        say(
            f"  {layout:16s} {spread(seconds[layout])}   "
            f"{rate:.0f} response tokens/s, {positions} positions with padding"
        )
    timings.compare("padded / shared", "padded", "shared")

    shared_N, shared_gradients, _ = results["shared"]
    padded_N, padded_gradients, _ = results["padded"]
    difference = (shared_N - padded_N).abs().mean().item()
    one = torch.cat([g.flatten() for g in shared_gradients]).float()
    other = torch.cat([g.flatten() for g in padded_gradients]).float()
    error = ((one - other).norm() / other.norm()).item()
    limit = LIMIT[str(policy.model.dtype).removeprefix("torch.")]
    agree = difference < limit and error < limit
    say(
        f"  same result      {'yes' if agree else 'NO'}: gradients differ by {error:.1e} of the norm, "
        f"log-probs by {difference:.1e} nats per token (limit {limit:.0e})"
    )
    return error, agree


# ------------------------------------------------------------------------------------------------------- 3 the engine


class Bench:
    """The ways of sampling that are compared, on one ``grpo.Engine``."""

    def __init__(self, run: grpo.Args, dtype: torch.dtype, tokenizer, stop_ids: list[int]):
        self.watch = watchdog.Watch(run.timeout)
        self.engine = grpo.Engine(grpo.vllm_thread, run, dtype, tokenizer, stop_ids, self.watch)

    def call(self, function: Callable[[Any], Any]) -> Any:
        """``function(llm)``, computed in the engine's thread while no request runs."""
        self.engine.inbox.put(("call", function))
        return self.engine.receive("result")[1]

    def by_tokens(self, problems: list[Problem], group: int, length: int) -> list[int]:
        """Response lengths. As in grpo.py: ids in, ids and log-probs out, each response decoded once at its end."""
        return self.by_lengths(problems, group, [length] * len(problems) * group)

    def by_lengths(self, problems: list[Problem], group: int, lengths: list[int]) -> list[int]:
        """Return the response lengths in the order in which they arrive; ``lengths`` are the exact ones to ask for."""
        requests = {}
        for i, length in enumerate(lengths):
            own = requests.setdefault(length, [])
            place, k = divmod(i, group)
            own.append((place, k, i))
        batches = []
        for length, own in requests.items():
            sampling = self.sampling(length)
            batches.append(self.engine.ask(problems, own, sampling))
        arrived = []
        for batch in batches:
            for _, sample in self.engine.arrivals(batch):
                arrived.append(len(sample.response_ids))
        return arrived

    def sampling(self, length: int) -> dict[str, Any]:
        """Return the sampling parameters for responses of exactly ``length`` tokens."""
        return {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "stop": [],
            "max_tokens": length,
            "ignore_eos": True,
        }

    def forget_prompts(self) -> None:
        """Drop the prefix cache: otherwise a sampling would find there the prompts that the one before it computed."""
        self.call(lambda llm: llm.reset_prefix_cache())

    def by_chat(self, problems: list[Problem], group: int, length: int) -> list[int]:
        """Response lengths. As in vLLM's examples: messages in; text, ids and a dict of log-probs per token out."""
        from vllm import SamplingParams

        params = SamplingParams(n=group, temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0)
        conversations = [p.messages for p in problems]
        outputs = self.call(lambda llm: llm.chat(conversations, params, use_tqdm=False))
        if [list(o.prompt_token_ids) for o in outputs] != [p.prompt_ids for p in problems]:
            raise RuntimeError(
                "llm.chat and data.render_prompts give different prompts: their times cannot be compared"
            )
        return [len(answer.token_ids) for output in outputs for answer in output.outputs]

    def close(self) -> None:
        """End the engine and the watchdog."""
        self.engine.close()
        self.watch.close()


def compare_engines(bench: Bench, problems: list[Problem], args: Args, timings: Timings) -> None:
    """Time sampling by token ids and by ``llm.chat``. Raises RuntimeError where a response has another length."""
    group = args.num_samples_per_prompt_rollout
    cap = args.max_response_length
    ways = {}
    for way, work in {"token ids": bench.by_tokens, "llm.chat": bench.by_chat}.items():
        work(problems, group, min(cap, 4))  # the first steps allocate
        ways[way] = partial(work, problems, group, cap)
    seconds, results = alternate(ways, args.repeats, bench.forget_prompts)
    timings.seconds |= seconds
    expected = [cap] * (len(problems) * group)
    for way, lengths in results.items():
        if lengths != expected:
            raise RuntimeError(f"{way}: {sum(lengths)} tokens came, {sum(expected)} were asked for")
        rate = sum(lengths) / median(seconds[way])
        say(f"  {way:16s} {spread(seconds[way])}   {rate:.0f} tokens/s")
    timings.compare("chat / ids", "llm.chat", "token ids")


# ------------------------------------------------------------------------------------------ 4 the optimizer, the push


def time_optimizer(policy, args: Args, timings: Timings) -> None:
    """Time a step of AdamW on fp32 master weights, with the gradients that the update left behind."""
    masters = []
    for parameter in policy.parameters():
        master = parameter.detach().float().requires_grad_()  # in fp32 this is the weight itself
        master.grad = parameter.grad.float()
        masters.append(master)
    optimizer = torch.optim.AdamW(masters, lr=0.0, weight_decay=0.0, fused=True)  # all of the work, no change
    optimizer.step()  # the first step allocates the moments
    seconds = timed_repeatedly(optimizer.step, max(5, args.repeats))
    timings.seconds["optimizer"] = seconds
    count = sum(m.numel() for m in masters)
    say(f"\noptimizer  {spread(seconds, digits=3)}   AdamW, fused, {count:,} fp32")


def time_push(bench: Bench, model, args: Args, timings: Timings) -> None:
    """Time a push of all weights to the engine."""
    push = partial(bench.engine.push, list(model.state_dict().items()))
    push()
    seconds = timed_repeatedly(push, max(5, args.repeats))
    timings.seconds["push"] = seconds
    say(f"push       {spread(seconds, digits=3)}   all weights to the engine, prefix cache dropped")


# ------------------------------------------------------------------------------------- 5 when the task is learned


def time_late_update(policy, samples: list[Sample], args: Args, timings: Timings) -> None:
    """Time the update of a batch of short responses, a quarter of whose groups have a gradient."""
    trained = with_gradient(samples)
    clear = partial(policy.zero_grad, set_to_none=True)
    work = partial(update, policy, trained, "shared", args.micro_batch_tokens)
    seconds, _ = alternate({"late update": work}, args.repeats, clear)
    timings.seconds |= seconds
    lengths = [len(s.response_ids) for s in samples]
    mean = sum(lengths) / len(lengths)
    say(f"\nlate       {len(lengths)} responses of {mean:.1f} tokens, at most {max(lengths)}")
    say(f"  update           {spread(seconds['late update'])}   {len(trained)} of them have a gradient")


def time_late_sampling(bench: Bench, problems, samples: list[Sample], args: Args, timings: Timings) -> None:
    """Time the sampling of responses of these lengths. Raises RuntimeError where others come."""
    lengths = [len(s.response_ids) for s in samples]
    work = partial(bench.by_lengths, problems, args.num_samples_per_prompt_rollout, lengths)
    seconds, results = alternate({"late generate": work}, args.repeats, bench.forget_prompts)
    arrived = results["late generate"]
    if sorted(arrived) != sorted(lengths):
        raise RuntimeError(f"lengths {arrived} came, {lengths} were asked for")
    timings.seconds |= seconds
    say(f"  generate         {spread(seconds['late generate'])}")


def with_gradient(samples: list[Sample]) -> list[Sample]:
    """Return the samples of the first quarter of the groups."""
    groups = len(unique_prompts(samples))
    trained = max(1, groups // 4)
    return [s for s in samples if s.prompt_id < trained]


def time_decode_steps(bench: Bench, problems: list[Problem], args: Args, timings: Timings) -> None:
    """Time a decode step of few sequences: responses of all tokens less those of a quarter, by the steps between."""
    cap = args.max_response_length
    few = max(1, cap // 4)
    for count in DECODED:
        chosen = problems[:count]
        group = count // len(chosen)
        if cap == few or group * len(chosen) != count or group > args.num_samples_per_prompt_rollout:
            continue
        ways = {}
        for length in (few, cap):
            ways[length] = partial(bench.by_tokens, chosen, group, length)
        seconds, _ = alternate(ways, args.repeats, bench.forget_prompts)
        found = []
        for long, short in zip(seconds[cap], seconds[few], strict=True):
            found.append((long - short) / (cap - few))
        timings.seconds[f"decode {count}"] = found
        milliseconds = [1000 * one for one in found]
        say(f"  decode step      {spread(milliseconds, 'ms', 1)}   {count} sequences")


# -------------------------------------------------------------------------------------------------------- 6 the floor


@dataclass
class ModelSizes:
    """Sizes that determine the cost of a model's forward pass."""

    weight_bytes: int
    parameters: int
    blocks: int  # weights of the blocks' linear layers
    head: int  # weights of the output head
    attention: int  # layers x heads x head dimension
    cache_bytes: int  # keys and values of one token, all layers

    @classmethod
    def of(cls, model) -> ModelSizes:
        """Return the sizes of a transformers causal language model."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        linear = [m for m in model.base_model.modules() if isinstance(m, nn.Linear)]
        return cls(
            weight_bytes=model.dtype.itemsize,
            parameters=sum(p.numel() for p in model.parameters()),
            blocks=sum(m.weight.numel() for m in linear),
            head=model.get_output_embeddings().weight.numel(),
            attention=config.num_hidden_layers * heads * width,
            cache_bytes=2 * config.num_hidden_layers * key_heads * width * model.dtype.itemsize,
        )

    def step_bytes(self) -> int:
        """Bytes of the weights that a decode step reads, whatever the batch."""
        return self.weight_bytes * (self.blocks + self.head)

    def forward_flops(self, prompts: list[int], continued: list[tuple[int, int]], predicted: int) -> float:
        """FLOPs of a forward pass, counting only what a causal model cannot avoid.

        ``prompts``: lengths. ``continued``: (length of the prompt before, own length) of responses. ``predicted``:
        tokens for which the head runs.

        Each weight of the blocks' linear layers costs a multiplication and an addition per token, each weight of the
        head the same per predicted token; the input embedding is a look-up. Attention's scores and weighted values are
        4 (heads x head dimension) FLOPs per layer and pair of tokens, and causal tokens see half of the n^2 pairs. A
        response of C tokens that continues a prompt of P adds (P + C)^2 - P^2.
        """
        tokens = sum(prompts) + sum(own for _, own in continued)
        squares = sum(p * p for p in prompts)
        for before, own in continued:
            squares += (before + own) ** 2 - before**2
        return 2 * self.blocks * tokens + 2 * self.attention * squares + 2 * self.head * predicted


@dataclass
class Rates:
    """The measured rates of a machine, and the number of sequences that it decodes at a time."""

    flops: float  # FLOP/s of matrix products
    bandwidth: float  # bytes/s, read and written
    slots: int  # sequences that the engine decodes at a time

    def seconds(self, flops: float, moved: float) -> float:
        """Seconds at least of work that computes ``flops`` while it moves so many bytes."""
        computing = flops / self.flops
        moving = moved / self.bandwidth
        return max(computing, moving)


def floors(sizes: ModelSizes, samples: list[Sample], cap: int, rates: Rates) -> dict[str, float]:
    """Seconds that each phase needs at least at these rates.

    * Backward is twice forward (gradients of inputs and of weights), so an update is three forward passes. The last
      token of a response predicts nothing and need not be computed.
    * Generation is ``sampling_floor`` of responses of ``cap`` tokens.
    * AdamW reads weight, gradient and two moments in fp32 (16 bytes) and writes weight and moments (12), plus the bf16
      copy (2) if there is one. A push reads and writes each weight once.
    """
    unique = unique_prompts(samples)
    every_prompt = []
    computed = []
    trained = 0
    for sample in samples:
        prompt = len(sample.prompt_ids)
        response = len(sample.response_ids)
        every_prompt.append(prompt)
        computed.append((prompt, response - 1))
        trained += response
    shared_flops = 3 * sizes.forward_flops(unique, computed, trained)
    padded_flops = 3 * sizes.forward_flops(every_prompt, computed, trained)
    adamw_bytes = 28 if sizes.weight_bytes == 4 else 30
    return {
        "generate": sampling_floor(sizes, samples, [cap] * len(samples), rates),
        "shared": rates.seconds(shared_flops, 0),
        "padded": rates.seconds(padded_flops, 0),
        "optimizer": rates.seconds(0, adamw_bytes * sizes.parameters),
        "push": rates.seconds(0, 2 * sizes.weight_bytes * sizes.parameters),
    }


def unique_prompts(samples: list[Sample]) -> list[int]:
    """Return the length of each group's prompt."""
    return [len(s.prompt_ids) for s in samples if s.sample_id == 0]


def sampling_floor(sizes: ModelSizes, samples: list[Sample], lengths: list[int], rates: Rates) -> float:
    """Seconds that sampling responses of these ``lengths`` to the prompts of ``samples`` takes at least.

    Each prompt is computed once, then every response token but the last. A decode step reads the weights of blocks and
    head, whatever the batch, and the caches, of P + C/2 tokens on average; each filling of the engine's slots takes as
    many steps as the longest response. Decoding takes the longer of its FLOPs and its bytes.
    """
    decoded = []
    moved = 0.0
    for sample, length in zip(samples, lengths, strict=True):
        before = len(sample.prompt_ids)
        steps = length - 1
        decoded.append((before, steps))
        moved += sizes.cache_bytes * steps * (before + steps / 2)
    fillings = -(-len(samples) // rates.slots)
    moved += sizes.step_bytes() * fillings * (max(lengths) - 1)
    unique = unique_prompts(samples)
    prefill = sizes.forward_flops(unique, [], len(samples))
    decode = sizes.forward_flops([], decoded, sum(lengths) - len(lengths))
    return rates.seconds(prefill, 0) + rates.seconds(decode, moved)


def late_floors(sizes: ModelSizes, samples: list[Sample], rates: Rates) -> dict[str, float]:
    """Seconds at least of what section 5 and section 8 time.

    A pass over one token reads the weights of blocks and head forward and twice backward.
    """
    lengths = [len(s.response_ids) for s in samples]
    found = floors(sizes, with_gradient(samples), max(lengths), rates)
    late = {
        "late update": found["shared"],
        "late generate": sampling_floor(sizes, samples, lengths, rates),
        "one token": found["optimizer"] + rates.seconds(0, 3 * sizes.step_bytes()),
    }
    for count in DECODED:
        some = [samples[i % len(samples)] for i in range(count)]
        three = sampling_floor(sizes, some, [3] * count, rates)
        two = sampling_floor(sizes, some, [2] * count, rates)
        late[f"decode {count}"] = three - two
    return late


def print_floors(bound: dict[str, float], timings: Timings) -> None:
    """Print a line per measured phase, and one for the sum of the phases that make a step in the shared layout."""
    rows = []
    step_floor = 0.0
    step_seconds = 0.0
    for phase, floor in bound.items():
        if phase not in timings.seconds:
            continue
        seconds = median(timings.seconds[phase])
        rows.append((phase, floor, seconds))
        if phase in STEP:
            step_floor += floor
            step_seconds += seconds
    rows.append(("a step (shared)", step_floor, step_seconds))
    for phase, floor, seconds in rows:
        say(f"  {phase:16s} {floor:8.3f} s of {seconds:8.3f} s   {100 * floor / seconds:3.0f} %")


# -------------------------------------------------------------------------------------------------------- 7 operators

NAMED = 10  # rows of the table; the others are summed


@dataclass
class Operator:
    """Time spent in an operator for inputs of the same sizes, without the operators it calls."""

    name: str
    inputs: list[list[int]]  # sizes; empty for what is not a tensor
    calls: int
    seconds: float

    def product(self) -> tuple[int, int, int, int] | None:
        """(matrices, rows, inner, columns) where it multiplies matrices, else None."""
        match self.name, self.inputs:
            case "aten::mm", [[m, k], [_, n]]:
                return 1, m, k, n
            case "aten::addmm", [_, [m, k], [_, n], *_]:
                return 1, m, k, n
            case "aten::bmm", [[b, m, k], [_, _, n]]:
                return b, m, k, n
            case "aten::baddbmm", [_, [b, m, k], [_, _, n], *_]:
                return b, m, k, n
            case "_C::onednn_mm", [[m, n], [_, k], *_]:  # vLLM's; the output comes first, the packed weights hide
                return 1, m, k, n
        return None


def profiled(work: Callable[[], Any], there: Callable[[Callable], Any]) -> tuple[float, list[Operator]]:
    """(seconds of ``work`` under the profiler, its operators).

    ``there`` calls a function in the thread that computes: a profiler sees the one it was started in, and autograd's.
    """
    profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    there(lambda *_: profiler.start())
    seconds, _ = timed(work)
    there(lambda *_: profiler.stop())
    operators = []
    for event in profiler.key_averages(group_by_input_shape=True):
        operators.append(Operator(event.key, event.input_shapes, event.count, event.self_cpu_time_total / 1e6))
    return seconds, operators


def seconds_alone(product: tuple[int, int, int, int], dtype: torch.dtype) -> float:
    """Seconds of one call of torch's product of these sizes; best of 4."""
    count, m, k, n = product
    a = torch.randn(count, m, k, dtype=dtype)
    b = torch.randn(count, k, n, dtype=dtype)
    if count > 1:
        multiply = partial(torch.bmm, a, b)
    else:
        multiply = partial(torch.mm, a[0], b[0])
    return min(timed_repeatedly(multiply, 4))


def print_operators(title: str, seconds: float, operators: list[Operator], dtype: torch.dtype) -> dict[str, float]:
    """Print what ``profiled`` returned. Returns the rows, and what the products take alone, in seconds."""
    calls: Counter[tuple[int, int, int, int]] = Counter()
    rest: Counter[str] = Counter()
    in_products = 0.0
    for operator in operators:
        if product := operator.product():
            calls[product] += operator.calls
            in_products += operator.seconds
        else:
            rest[operator.name] += operator.seconds
    rows = {"matrix products": in_products}
    rows |= dict(rest.most_common(NAMED))
    rows["other operators"] = in_products + rest.total() - sum(rows.values())
    rows["between operators"] = seconds - in_products - rest.total()
    say(f"\noperators  of {title}, {seconds:.2f} s with the profiler")
    for name, own in rows.items():
        name = name.removeprefix("autograd::engine::evaluate_function: ")
        say(f"  {name:40s} {own:8.3f} s   {100 * own / seconds:3.0f} %")
    flops = 0
    alone = 0.0
    for product, count in calls.items():
        flops += 2 * math.prod(product) * count
        alone += seconds_alone(product, dtype) * count
    if alone > 0:  # another build of vLLM may have other names for its products
        own_rate = flops / in_products / 1e9
        rate_alone = flops / alone / 1e9
        say(f"  products at {own_rate:.0f} GFLOP/s; torch's of the same sizes, alone: {rate_alone:.0f}, {alone:.2f} s")
    return rows | {"products alone": alone}


# ------------------------------------------------------------------------------------------------ 8 the least update


def time_deepspeed_step(
    policy, sample: Sample, floor: float, run: grpo.Args, dtype, args: Args, timings: Timings
) -> None:
    """Time what an optimizer step of a run takes at least: forward, backward and AdamW on one token of a response."""
    device = policy.model.device
    accelerator = deepspeed_zero.make_accelerator(run, dtype, device)
    optimizer = utils.make_optimizer(policy.parameters(), 0.0, run)
    prepared = accelerator.prepare(policy, optimizer)
    policy = deepspeed_zero.dedupe_fp32_weights(prepared[0])
    one = dataclasses.replace(sample, response_ids=sample.response_ids[:1], sampler_logprobs=[0.0])
    (mb,) = batching.micro_batches(
        [one], [0], layout="shared", budget=args.micro_batch_tokens, rank=0, world_size=1, device=device
    )

    def step() -> None:
        logprobs_T = policy(mb)[0]
        loss = 0.0 * logprobs_T.sum()
        deepspeed_zero.backward(policy, loss, True)

    step()  # the first one allocates the moments
    process.Heap().bound()  # as a run does after its first step
    timings.seconds["one token"] = timed_repeatedly(step, max(5, args.repeats))
    say(f"\noptimizer step of DeepSpeed on one token: {spread(timings.seconds['one token'])}, floor {floor:.2f} s")


# --------------------------------------------------------------------------------------------------------------- main


def checked_run(args: Args) -> grpo.Args:
    """Return the arguments of the run whose phases are timed. Exits with code 2 if they do not fit together."""
    own = ("repeats", "skip_engine", "json")
    shared = {name: value for name, value in dataclasses.asdict(args).items() if name not in own}
    # A stop string that no request asks for: with one the engine has a tokenizer, which llm.chat needs.
    run = grpo.Args(**shared, ignore_eos=True, mask_truncated_completions=False, stop_strings=("</s>",))
    checks.check(run, 1)
    model_files.check_model(run)
    checks.check_training(run)
    grpo.check_args(run)
    if args.repeats < 1:
        process.refuse(f"--repeats {args.repeats}: must be above 0")
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        process.refuse(f"--json {args.json}: no such folder; name a file in a folder that exists")
    return run


@watchdog.ends_all_ranks
def main(args: Args) -> None:
    run = checked_run(args)
    load = os.getloadavg()[0]  # before this program adds to it
    cores = len(os.sched_getaffinity(0))
    prompts = args.num_unique_prompts_rollout
    group = args.num_samples_per_prompt_rollout
    cap = args.max_response_length
    problems = problem_set.load_problems(run, truth_error)[0]
    chosen = prompt_order.prompts_at(0, prompts, len(problems), run.seed)
    problems = [problems[i] for i in chosen]

    device, dtype, attention = pretrained.resolve_device(run)
    setting = vllm_settings.memory_setting(run, dtype, 1)
    sizes, _ = memory.sizes_for(run, model_files.read_model(run.model), setting)
    _, attention, _ = choose_layout(run, sizes, device.type == "cuda", dtype, attention)  # as a run has it
    args.micro_batch_tokens = sizes.micro_batch_tokens
    dtype_name = str(dtype).removeprefix("torch.")
    tokenizer = AutoTokenizer.from_pretrained(run.model_name_or_path)
    rendering.render_prompts(problems, tokenizer, run)
    model = pretrained.load_model(run, dtype, attention)
    # The engine first, as in the scripts: it measures free memory and changes global settings of torch.
    bench = None
    if not args.skip_engine:
        torch.distributed.init_process_group("gloo")
        bench = Bench(run, dtype, tokenizer, pretrained.stop_token_ids(model, tokenizer))
    policy = utils.TokenLogprobs(model.to(device), run.temperature, sizes.logprob_chunk)
    timings = Timings()

    # 1 the machine
    machine = machine_name(device)
    say(f"machine    {machine}, {cores} cores, {torch.get_num_threads()} threads, torch {torch.__version__}")
    say(f"load       {load:.1f} at the start")
    if load > 0.25 * cores:
        say("warning: other programs compute here; trust the ratios, not the seconds")
    flops, bandwidth = machine_rates(device, dtype)
    say(f"rates      {flops / 1e9:.0f} GFLOP/s {dtype_name}, {bandwidth / 1e9:.1f} GB/s copied (read + written)")

    # 2 the update
    samples = fixed_samples(problems, group, cap, len(tokenizer))
    tokens = batching.token_offsets(samples)[-1]
    longest = max(len(p.prompt_ids) for p in problems)
    say(
        f"\nupdate     {prompts} prompts of at most {longest} tokens x {group} responses, {tokens} tokens in the loss; "
        f"forward and\n           backward in micro-batches of {args.micro_batch_tokens} tokens, {attention} attention"
    )
    error, agree = compare_layouts(policy, samples, args, timings)

    # 3 the engine
    if bench is not None:
        say(f"\nengine     the same prompts, {prompts * group} responses of exactly {cap} tokens")
        compare_engines(bench, problems, args, timings)
        timings.seconds["generate"] = timings.seconds["token ids"]

    # 4 the optimizer, then the push
    time_optimizer(policy, args, timings)
    if bench is not None:
        time_push(bench, model, args, timings)

    # 5 when the task is learned
    late = fixed_samples(problems, group, cap, len(tokenizer), LATE)
    time_late_update(policy, late, args, timings)
    if bench is not None:
        time_late_sampling(bench, problems, late, args, timings)
        time_decode_steps(bench, problems, args, timings)

    # 6 the floor, at the better of the rates before and after: another program may have been busy during one of them
    flops_after, bandwidth_after = machine_rates(device, dtype)
    flops = max(flops, flops_after)
    bandwidth = max(bandwidth, bandwidth_after)
    rates = Rates(flops, bandwidth, sizes.vllm_max_num_seqs)
    bound = floors(ModelSizes.of(model), samples, cap, rates)
    bound |= late_floors(ModelSizes.of(model), late, rates)
    say(f"\nfloor      at {flops / 1e9:.0f} GFLOP/s and {bandwidth / 1e9:.1f} GB/s, the best of before and after")
    print_floors(bound, timings)

    # 7 the operators
    operators = {}
    if device.type == "cpu":
        policy.zero_grad(set_to_none=True)
        again = partial(update, policy, samples, "shared", args.micro_batch_tokens)
        operators["update"] = print_operators("an update", *profiled(again, lambda call: call()), dtype)
        if bench is not None:
            bench.forget_prompts()
            again = partial(bench.by_tokens, problems, group, cap)
            operators["generate"] = print_operators("sampling", *profiled(again, bench.call), dtype)

    # 8 the least update; from here on the gradients are DeepSpeed's
    if bench is not None:
        time_deepspeed_step(policy, samples[0], bound["one token"], run, dtype, args, timings)
        bench.close()

    if args.json is not None:
        numbers = {
            "machine": machine,
            "cores": cores,
            "load": load,
            "versions": process.versions(),
            "dtype": dtype_name,
            "arguments": dataclasses.asdict(args),
            "flop_per_second": flops,
            "bytes_per_second": bandwidth,
            "seconds": timings.seconds,
            "ratios": timings.ratios,
            "floor_seconds": bound,
            "operator_seconds": operators,
            "response_tokens": tokens,
            "gradient_error": error,
        }
        Path(args.json).write_text(json.dumps(numbers, indent=1))
    if not agree:
        sys.exit(1)


if __name__ == "__main__":
    main(flags.parse(Args, __doc__))

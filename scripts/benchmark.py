"""How fast a step is on this machine, beside the usual ways of doing the same work and beside what the hardware allows.

    python scripts/benchmark.py                               the quickstart's shape; five minutes on two slow cores
    python scripts/benchmark.py --num_unique_prompts_rollout 64 --max_response_length 512 --micro_batch_tokens 16384

1. The machine: rate of matrix products and of copies, measured.
2. The update: groups as shared rows beside one row a sample; same samples, same weights, same token budget.
3. The engine: grpo.vllm_thread, by token ids, beside ``llm.chat`` with text and its defaults; same prompts and lengths.
   What chat adds is Python work for each token: much beside a fast model, nothing beside one that takes 200 ms a step.
4. A step of AdamW, and a push of weights.
5. The floor: what these phases would take at the measured rates if nothing were wasted; efficiency = floor / time.

Ways are compared by alternating A B A B in one process: machines get slower and faster by the minute, the ratio of
neighbours hardly does. Exit code 1: the two layouts do not give the same log-probs and gradient.
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime.process import prepare_environment

prepare_environment()

import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

import grpo  # noqa: E402
import utils  # noqa: E402
from rewards import truth_error  # noqa: E402
from runtime import batching, data, flags, process, watchdog  # noqa: E402
from runtime.records import Problem, Sample  # noqa: E402

LIMIT = {"float32": 1e-4, "bfloat16": 5e-2}  # difference of the layouts: nats a token, gradient's share of its norm


@dataclass
class Args:
    """The first six are grpo.py's, with its defaults."""

    model_name_or_path: str = grpo.Args.model_name_or_path
    """Local folder or hub id."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of weights, sampling and the measured matrix products."""
    num_unique_prompts_rollout: int = grpo.Args.num_unique_prompts_rollout
    """Prompts a step."""
    num_samples_per_prompt_rollout: int = grpo.Args.num_samples_per_prompt_rollout
    """Responses to each."""
    max_response_length: int = grpo.Args.max_response_length
    """Tokens: the engine makes exactly so many in every response, the update has at most so many."""
    micro_batch_tokens: int = grpo.Args.micro_batch_tokens
    """Tokens, padding included, in one forward and backward pass."""
    repeats: int = 3
    """Pairs of measurements in every comparison."""
    skip_engine: bool = False
    """Leave out vLLM: no sampling, no push."""
    json: str | None = None
    """Write all numbers, every single time among them, to this file."""


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of ``work``; a GPU has finished it when the clock stops."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start, result = time.perf_counter(), work()
    wait()
    return time.perf_counter() - start, result


def alternate(ways: dict[str, Callable], repeats: int, before: Callable) -> tuple[dict[str, list[float]], dict]:
    """(seconds by way, last result by way) of doing the same in several ways in turn, after ``before`` each time."""
    times, results = {way: [] for way in ways}, {}
    for _ in range(repeats):
        for way, work in ways.items():
            before()
            seconds, results[way] = timed(work)
            times[way].append(seconds)
    return times, results


def spread(values: list[float], unit: str = "s", digits: int = 2) -> str:
    """Median, and in brackets the smallest and the largest."""
    return f"{median(values):.{digits}f} {unit} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def machine_rates(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """(FLOP/s of a matrix product in ``dtype``, bytes/s of a copy, read and written bytes both counted); best of 8.

    2048^3, on a GPU 8192^3 to fill it; 256 MB, more than caches hold. Work that mostly reads can be a little faster.
    """
    size = 8192 if device.type == "cuda" else 2048
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    source, target = torch.ones(2, 256 * 10**6, dtype=torch.uint8, device=device)
    product = min(timed(lambda: a @ b)[0] for _ in range(8))
    copy = min(timed(lambda: target.copy_(source))[0] for _ in range(8))
    return 2 * size**3 / product, 2 * source.numel() / copy


def fixed_samples(problems: list[Problem], group: int, cap: int, vocabulary: int) -> list[Sample]:
    """The samples that the update is timed on, the same in every run.

    Prompts are those of the quickstart's first step, 46 tokens with the model's template. Lengths are drawn from 3, 8,
    12, 20, 32 and 32 32nds of ``cap``: in the first steps of a quickstart the mean is 15 to 25 of 32 tokens, a sixth to
    a half of the responses run into the cap, some are a bare number. The tokens are random: of
    what responses have in common only the prompt is computed once here, in training the words they begin with, too.
    """
    generator, samples = random.Random(0), []
    for place, k in ((place, k) for place in range(len(problems)) for k in range(group)):
        length = max(1, generator.choice([3, 8, 12, 20, 32, 32]) * cap // 32)
        response = [generator.randrange(vocabulary) for _ in range(length)]
        samples.append(Sample(place, k, problems[place].prompt_ids, response, [0.0] * length, "stop", 0))
    return samples


def update(policy, samples: list[Sample], layout: str, budget: int) -> tuple[torch.Tensor, list[torch.Tensor], int]:
    """Phase 7 without the optimizer: make micro-batches, run each forward and back.

    Returns (log-probs [N], gradients, positions computed). Tokens have different weights, so that a layout that mixed
    them up would give another gradient; all are positive, since terms that cancel leave bf16 nothing but rounding.
    """
    one_rank = {"rank": 0, "world_size": 1, "dtype": policy.model.dtype, "device": policy.model.device}
    micro_batches = batching.micro_batches(samples, list(range(len(samples))), layout=layout, budget=budget, **one_rank)
    count = batching.token_offsets(samples)[-1]
    weights_N = (torch.rand(count, generator=torch.Generator().manual_seed(0)) + 0.5).to(policy.model.device) / count
    logprobs_N = torch.zeros_like(weights_N)
    for mb in micro_batches:
        logprobs_T = policy(mb)[0]
        (-logprobs_T * weights_N[mb.tokens]).sum().backward()
        logprobs_N[mb.tokens] = logprobs_T.detach()
    positions = sum(mb.input_ids.numel() for mb in micro_batches)
    return logprobs_N, [p.grad for p in policy.parameters()], positions


class Bench:
    """The ways of sampling that are compared, on one ``grpo.Engine``."""

    def __init__(self, run: grpo.Args, dtype: torch.dtype, tokenizer, stop_ids: list[int]):
        self.watch = watchdog.Watch(run.stall_timeout)
        self.engine = grpo.Engine(run, dtype, tokenizer, stop_ids, self.watch)

    def call(self, function: Callable[[Any], Any]) -> Any:
        """``function(llm)``, computed in the engine's thread while no request runs."""
        self.engine.inbox.put(("call", function))
        return self.engine.receive("result")[1]

    def by_tokens(self, problems: list[Problem], group: int, length: int) -> list[int]:
        """Phase 2 as in grpo.py: ids in, ids and log-probs out, each response decoded once, when it has ended."""
        requests = [(i, k, i * group + k) for i in range(len(problems)) for k in range(group)]
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": [], "max_tokens": length, "ignore_eos": True}
        return [len(sample.response_ids) for sample in self.engine.generate(problems, requests, sampling)]

    def by_chat(self, problems: list[Problem], group: int, length: int) -> list[int]:
        """As in vLLM's examples: messages in; text, ids and a dictionary of log-probs for each token out."""
        from vllm import SamplingParams

        params = SamplingParams(n=group, temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0)
        conversations = [p.messages for p in problems]
        outputs = self.call(lambda llm: llm.chat(conversations, params, use_tqdm=False))
        if [list(o.prompt_token_ids) for o in outputs] != [p.prompt_ids for p in problems]:
            raise RuntimeError("llm.chat and data.render_prompts make different prompts: this compares nothing")
        return [len(answer.token_ids) for output in outputs for answer in output.outputs]

    def close(self) -> None:
        """End the engine and the watchdog."""
        self.engine.close()
        self.watch.close()


def floors(model, samples: list[Sample], cap: int, flops: float, bandwidth: float, slots: int) -> dict[str, float]:
    """Seconds that each phase needs at least, at ``flops`` FLOP/s and ``bandwidth`` bytes/s.

    Where the terms come from (b bytes of a weight, P and C tokens of a prompt and a response):

    * 2 N_b FLOPs a token: a multiplication and an addition for each weight of the blocks' linear layers. The input
      embedding is a look-up. The head's 2 N_h only where a token is predicted: on response tokens.
    * Attention: scores and weighted values are 4 n_h d FLOPs for each pair of tokens and layer, and causal tokens
      see half of the n^2 pairs: 2 L n_h d n^2. A response that continues a prompt adds (P + C)^2 - P^2.
    * Backward is twice forward (gradients of inputs and of weights), so an update is three forward passes.
    * Generation: each prompt once, then every response token but its last goes through the model. A decode step reads
      all weights, b (N_b + N_h), whatever the batch, and the caches, 2 L n_kv d b a token, P + C/2 tokens on average;
      cap - 1 steps for each filling of the ``slots``. Decoding takes the longer of its FLOPs and its bytes.
    * AdamW reads weight, gradient and two moments in fp32 (16 bytes) and writes weight and moments (12), plus the bf16
      copy where there is one. A push reads and writes each weight once.
    """
    from torch import nn

    config, b, again = model.config.get_text_config(), model.dtype.itemsize, cap - 1
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    cache = 2 * layers * (getattr(config, "num_key_value_heads", None) or heads) * width * b
    n_all = sum(p.numel() for p in model.parameters())
    n_b = sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, nn.Linear))
    n_h = model.get_output_embeddings().weight.numel()

    def forward(prompts: list[int], continued: list[tuple[int, int]], predicted: int) -> float:
        """FLOPs of prompts, of responses (length of the prompt before, own length), and of ``predicted`` heads."""
        tokens = sum(prompts) + sum(c for _, c in continued)
        square = sum(p * p for p in prompts) + sum((p + c) ** 2 - p * p for p, c in continued)
        return 2 * n_b * tokens + 2 * layers * heads * width * square + 2 * n_h * predicted

    pairs = [(len(s.prompt_ids), len(s.response_ids)) for s in samples]
    every, once = [p for p, _ in pairs], [len(s.prompt_ids) for s in samples if s.sample_id == 0]
    trained, computed = sum(c for _, c in pairs), [(p, c - 1) for p, c in pairs]  # a last token predicts nothing
    decode_bytes = b * (n_b + n_h) * again * -(-len(samples) // slots)  # the weights, and next the caches
    decode_bytes += cache * sum(p * again + again**2 / 2 for p in every)
    decode_flops = forward([], [(p, again) for p in every], len(every) * again)
    return {
        "generate": forward(once, [], len(every)) / flops + max(decode_flops / flops, decode_bytes / bandwidth),
        "shared": 3 * forward(once, computed, trained) / flops,
        "padded": 3 * forward(every, computed, trained) / flops,
        "optimizer": (28 if b == 4 else 30) * n_all / bandwidth,
        "push": 2 * b * n_all / bandwidth,
    }


def main(args: Args) -> None:
    prompts, group, cap = args.num_unique_prompts_rollout, args.num_samples_per_prompt_rollout, args.max_response_length
    shared = {k: v for k, v in vars(args).items() if k not in ("repeats", "skip_engine", "json")}
    run = grpo.Args(**shared, ignore_eos=True, mask_truncated_completions=False)
    flags.check(run, 1)
    flags.check_training(run)
    grpo.check_args(run)
    if args.repeats < 1:
        process.refuse(f"--repeats {args.repeats}: must be above 0")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))  # before this program adds to it
    problems = data.load_problems(run, truth_error)[0]
    problems = [problems[i] for i in data.prompts_at(0, prompts, len(problems), run.seed, run.shuffle)]

    say = partial(print, flush=True)
    device, dtype, attention = utils.resolve_device(run)
    name = str(dtype).removeprefix("torch.")
    tokenizer = AutoTokenizer.from_pretrained(run.model_name_or_path)
    data.render_prompts(problems, tokenizer, run)
    model = utils.load_model(run, dtype, attention)
    # The engine first, as in the scripts: it measures free memory and changes global settings of torch.
    bench = None
    if not args.skip_engine:
        torch.distributed.init_process_group("gloo")
        bench = Bench(run, dtype, tokenizer, utils.stop_token_ids(model, tokenizer))
    policy = utils.TokenLogprobs(model.to(device), run.temperature, run.logprob_chunk)

    # 1 the machine
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    machine = torch.cuda.get_device_name() if device.type == "cuda" else cpu[1] if cpu else "unknown CPU"
    say(f"machine    {machine}, {cores} cores, {torch.get_num_threads()} threads, torch {torch.__version__}")
    busy = "\nwarning: others compute here; trust the ratios, not the seconds" if load > 0.25 * cores else ""
    say(f"load       {load:.1f} at the start{busy}")
    flops, bandwidth = machine_rates(device, dtype)
    say(f"rates      {flops / 1e9:.0f} GFLOP/s {name}, {bandwidth / 1e9:.1f} GB/s copied (read + written)")

    # 2 the update
    samples = fixed_samples(problems, group, cap, len(tokenizer))
    tokens, longest = sum(len(s.response_ids) for s in samples), max(len(p.prompt_ids) for p in problems)
    say(f"\nupdate     {prompts} prompts of {longest} tokens x {group} responses, {tokens} tokens in the loss; forward")
    say(f"           and backward in micro-batches of {args.micro_batch_tokens} tokens, {attention} attention")
    ways = {way: partial(update, policy, samples, way, args.micro_batch_tokens) for way in ("shared", "padded")}
    update(policy, samples[:2], "shared", args.micro_batch_tokens)  # the first pass allocates
    times, results = alternate(ways, args.repeats, partial(policy.zero_grad, set_to_none=True))
    for way, (_, _, positions) in results.items():
        rate = f"{tokens / median(times[way]):.0f} response tokens/s, {positions} positions with padding"
        say(f"  {way:16s} {spread(times[way])}   {rate}")
    ratios = {"padded / shared": [b / a for a, b in zip(times["shared"], times["padded"], strict=True)]}
    say(f"  padded / shared  {spread(ratios['padded / shared'], 'x')}")
    difference = (results["shared"][0] - results["padded"][0]).abs().mean().item()
    one, other = (torch.cat([g.flatten() for g in results[way][1]]).float() for way in ("shared", "padded"))
    error = ((one - other).norm() / other.norm()).item()
    agree = difference < LIMIT[name] and error < LIMIT[name]
    found = f"gradients differ by {error:.1e} of the norm, log-probs by {difference:.1e} nats a token"
    say(f"  same result      {'yes' if agree else 'NO'}: {found} (limit {LIMIT[name]:.0e})")
    del results, one, other

    # 3 the engine
    if bench is not None:
        say(f"\nengine     the same prompts, {prompts * group} responses of exactly {cap} tokens")
        ways = {
            "token ids": partial(bench.by_tokens, problems, group),
            "llm.chat": partial(bench.by_chat, problems, group),
        }
        for way, work in ways.items():
            work(min(cap, 4))  # the first steps allocate
            ways[way] = partial(work, cap)
        reset = partial(
            bench.call, lambda llm: llm.reset_prefix_cache()
        )  # nobody finds prompts that the other computed
        seconds, results = alternate(ways, args.repeats, reset)
        times |= seconds
        for way, lengths in results.items():
            if lengths != [cap] * (prompts * group):
                raise RuntimeError(f"{way}: {sum(lengths)} tokens came, {prompts * group * cap} were asked for")
            say(f"  {way:16s} {spread(times[way])}   {sum(lengths) / median(times[way]):.0f} tokens/s")
        ratios["chat / ids"] = [b / a for a, b in zip(times["token ids"], times["llm.chat"], strict=True)]
        say(f"  chat / ids       {spread(ratios['chat / ids'], 'x')}")

    # 4 the optimizer, then the push
    masters = [p.detach().float().requires_grad_() for p in policy.parameters()]  # in fp32 the weights themselves
    for master, parameter in zip(masters, policy.parameters(), strict=True):
        master.grad = parameter.grad.float()
    optimizer = torch.optim.AdamW(masters, lr=0.0, weight_decay=0.0, fused=True)  # all of the work, no change
    optimizer.step()  # the first makes the moments
    times["optimizer"] = [timed(optimizer.step)[0] for _ in range(max(5, args.repeats))]
    say(f"\noptimizer  {spread(times['optimizer'], digits=3)}   AdamW, fused, {sum(m.numel() for m in masters):,} fp32")
    if bench is not None:
        push = partial(bench.engine.push, list(model.state_dict().items()))
        push()
        times["push"] = [timed(push)[0] for _ in range(max(5, args.repeats))]
        say(f"push       {spread(times['push'], digits=3)}   all weights to the engine, prefix cache dropped")
        bench.close()

    # 5 the floor, at the better of the rates before and after: a neighbour may have been busy during one of them
    flops, bandwidth = (max(pair) for pair in zip((flops, bandwidth), machine_rates(device, dtype), strict=True))
    bound = floors(model, samples, cap, flops, bandwidth, run.vllm_max_num_seqs)
    times |= {"generate": times["token ids"]} if bench is not None else {}
    measured = {phase: median(times[phase]) for phase in bound if phase in times}
    say(f"\nfloor      at {flops / 1e9:.0f} GFLOP/s and {bandwidth / 1e9:.1f} GB/s, the best of before and after")
    rows = [(phase, bound[phase], seconds) for phase, seconds in measured.items()]
    rows.append(("a step (shared)", *(sum(row[k] for row in rows if row[0] != "padded") for k in (1, 2))))
    for phase, floor, seconds in rows:
        say(f"  {phase:16s} {floor:8.3f} s of {seconds:8.3f} s   {100 * floor / seconds:3.0f} %")
    if args.json is not None:
        numbers = {"machine": machine, "cores": cores, "load": load, "versions": process.versions(), "dtype": name}
        numbers |= {"arguments": vars(args), "flop_per_second": flops, "bytes_per_second": bandwidth, "seconds": times}
        numbers |= {"ratios": ratios, "floor_seconds": bound, "response_tokens": tokens, "gradient_error": error}
        Path(args.json).write_text(json.dumps(numbers, indent=1))
    if not agree:
        sys.exit(1)


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))

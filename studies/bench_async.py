"""Measure the gain of sampling ahead of training, with the loop and engine of grpo.py and a stand-in for the update.

    python studies/bench_async.py                                  the quickstart's model, at most 128 tokens each
    python studies/bench_async.py --update_seconds 3 --steps 20    another ratio of update to sampling

The stand-in either sleeps, which is an update on a device of its own (an engine on its own ranks), or computes, which
is what happens where engine and trainer share these cores. Its matrix products take --update_seconds when nothing else
runs. The engine, its samples and the pushes are real in both. Modes:

    synchronous    ask, collect, update, push: sampling and update one after the other
    ahead          --async_steps 1: the next batch is sampled during the update
    in flight      --async_steps 1 --inflight_updates recompute: engine and update take turns; no batch waits for its
                   longest response

Predicted from the synchronous part of the same run: sampling + update + push; the longer of the first two, + push.
For turns there is no formula: what they save is the tail of a batch. The decode steps per training step show it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime.system.process import prepare_environment

prepare_environment()

import torch
from transformers import AutoTokenizer

import grpo
from rewards import truth_error
from runtime.arguments import checks, flags
from runtime.data import problem_set, prompt_order, rendering
from runtime.data.samples import Problem
from runtime.system import process, watchdog
from runtime.training import model_files, pretrained

MODES = {
    "synchronous": {"async_steps": 0},
    "ahead": {"async_steps": 1},
    "in flight": {"async_steps": 1, "inflight_updates": "recompute"},
}
PRODUCT = 256  # rows of the square matrices that a computing update multiplies

say = partial(print, flush=True)


@dataclass
class Args:
    model_name_or_path: str = grpo.Args.model_name_or_path
    """Local folder or hub id."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of the engine."""
    num_unique_prompts_rollout: int = grpo.Args.num_unique_prompts_rollout
    """Prompts per step."""
    num_samples_per_prompt_rollout: int = grpo.Args.num_samples_per_prompt_rollout
    """Responses per prompt."""
    max_response_length: int = 128
    """Most tokens per response."""
    vllm_args: str | None = None
    """As in grpo.py."""
    update_seconds: float = 2.0
    """Seconds of the update that the stand-in takes the place of."""
    steps: int = 10
    """Steps of each mode that are timed, after two that are not."""
    json: str | None = None
    """Write all numbers to this file."""


@dataclass
class Measured:
    """Means over the timed steps of a mode."""

    step: float  # seconds
    generate: float  # seconds waited for samples
    push: float  # seconds
    busy: float  # fraction of the step in which the engine computed
    decodes: float  # decode steps of the engine
    staleness: float  # steps, mean over tokens


def products(seconds: float) -> Callable[[], None]:
    """Return a function that computes for this many seconds when nothing else runs."""
    square = torch.rand(PRODUCT, PRODUCT)
    count = 0
    started = time.perf_counter()
    while time.perf_counter() - started < 1.0:
        square @ square
        count += 1
    each = (time.perf_counter() - started) / count

    def work() -> None:
        for _ in range(round(seconds / each)):
            square @ square

    return work


def counted(llm) -> list[int]:
    """Have an engine count its decode steps, in the list that is returned."""
    steps = [0]
    step = llm.llm_engine.step

    def counting():
        steps[0] += 1
        return step()

    llm.llm_engine.step = counting
    return steps


def measure(run: grpo.Args, problems: list[Problem], model, tokenizer, update: Callable, steps: int) -> Measured:
    """Time the loop of grpo.py in one mode: ask, collect, update, push."""
    watch = watchdog.Watch(run.timeout)
    dtype = model.dtype
    stop_ids = pretrained.stop_token_ids(model, tokenizer)
    engine = grpo.Engine(grpo.vllm_thread, run, dtype, tokenizer, stop_ids, watch)
    engine.inbox.put(("call", counted))
    decodes = engine.receive("result")[1]
    weights = list(model.state_dict().items())
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": run.max_response_length}
    sampling |= {"stop": [], "ignore_eos": False}
    prompts = run.num_unique_prompts_rollout
    waiting = deque()
    rows = []
    engine.push(weights)
    for step in range(1, steps + 3):
        before = decodes[0]
        started = time.perf_counter()
        for later in range(step + len(waiting), step + run.async_steps + 1):
            chosen = prompt_order.prompts_at((later - 1) * prompts, prompts, len(problems), run.seed)
            requests = prompt_order.requests(chosen, run.num_samples_per_prompt_rollout, run.seed, later)
            waiting.append((engine.ask([problems[i] for i in chosen], requests, sampling), []))
        batch, samples = waiting.popleft()
        owners = {id(batch): samples} | {id(other): found for other, found in waiting}
        for own, sample in engine.arrivals(batch):
            owners[id(own)].append(sample)
        generate = time.perf_counter() - started
        update()
        if run.inflight_updates == "off":
            for other, found in waiting:
                found += [sample for _, sample in engine.arrivals(other)]
        pushed = time.perf_counter()
        engine.push(weights)
        push = time.perf_counter() - pushed
        ages = [step - version for sample in samples for version in sample.token_versions().tolist()]
        elapsed = time.perf_counter() - started
        rows.append([elapsed, generate, push, engine.metrics["engine/busy"], decodes[0] - before, mean(ages)])
    engine.close()
    watch.close()
    return Measured(*(mean(column) for column in zip(*rows[2:], strict=True)))


def checked_run(args: Args) -> grpo.Args:
    """Return the arguments of the run whose loop is timed. Exits with code 2 if they do not fit together."""
    own = ("update_seconds", "steps", "json")
    run = grpo.Args(**{name: value for name, value in dataclasses.asdict(args).items() if name not in own})
    checks.check(run, 1)
    model_files.check_model(run)
    checks.check_training(run)
    if args.update_seconds <= 0 or args.steps < 1:
        process.refuse(f"--update_seconds {args.update_seconds:g}, --steps {args.steps}: both must be above 0")
    if args.json is not None and not Path(args.json).absolute().parent.is_dir():
        process.refuse(f"--json {args.json}: no such folder; name a file in a folder that exists")
    return run


@watchdog.ends_all_ranks
def main(args: Args) -> None:
    run = checked_run(args)
    problems = problem_set.load_problems(run, truth_error)[0]
    tokenizer = AutoTokenizer.from_pretrained(run.model_name_or_path)
    rendering.render_prompts(problems, tokenizer, run)
    _, dtype, attention = pretrained.resolve_device(run)
    model = pretrained.load_model(run, dtype, attention)
    torch.distributed.init_process_group("gloo")
    updates = {
        "an update on a device of its own (it sleeps)": partial(time.sleep, args.update_seconds),
        "an update on the engine's cores (it computes)": products(args.update_seconds),
    }
    results: dict[str, dict[str, dict[str, float]]] = {}
    say(f"update {args.update_seconds:g} s, {args.steps} steps, {torch.get_num_threads()} threads")
    for title, update in updates.items():
        say(f"\n{title}\n{'':14}s a step   ratio  predicted    waited  engine busy  decode steps  staleness")
        results[title] = {}
        for mode, settings in MODES.items():
            found = measure(replace(run, **settings), problems, model, tokenizer, update, args.steps)
            results[title][mode] = vars(found)
            base = Measured(**results[title]["synchronous"])
            predicted = {
                "synchronous": base.generate + args.update_seconds + base.push,
                "ahead": max(base.generate, args.update_seconds) + base.push,
            }
            expected = f"{predicted[mode]:.2f} s" if mode in predicted else "-"
            say(
                f"{mode:14}{found.step:8.2f}{base.step / found.step:7.2f}x{expected:>11}{found.generate:9.2f}s"
                f"{found.busy:12.0%}{found.decodes:14.0f}{found.staleness:11.2f}"
            )
    if args.json is not None:
        numbers = {"arguments": dataclasses.asdict(args), "versions": process.versions(), "results": results}
        Path(args.json).write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main(flags.parse(Args, __doc__))

"""Answers problems with a saved model, exactly as an evaluation inside a run does, and says how many are right.

    python scripts/evaluate.py --run runs/NAME            its model/ on its held-out problems: the run's last number
    python scripts/evaluate.py --run runs/NAME --model_name_or_path runs/NAME/best --eval_samples 16
    python scripts/evaluate.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k_test.jsonl \\
        --eval_prompts 200 --eval_temperature 0 --max_prompt_length 512 --max_response_length 512

Takes every argument of grpo.py; those about training say nothing here. Without --run, or with other data than the
run's, the problems are the first --eval_prompts of --dataset (0: all of them). Two arguments of its own:

    --run FOLDER       take arguments, model and held-out problems from this run; what else is given counts more
    --output FILE      all samples, as JSON lines. Default: eval_samples.jsonl in the run's folder, or --output_dir

Prints a table with 95 % intervals: Wilson's for one response to each problem, else a bootstrap over problems, whose
responses are not independent. Several processes (accelerate launch) share the problems out, each with its own engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import math
import os
import queue
import random
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

import checks
import data
import grpo
import runlog
from data import Problem, Sample
from rewards import RewardModel, RewardPool, parse_weights, shape_reward


def parse(words: list[str]) -> tuple[grpo.Args, Path, grpo.Args | None]:
    """(arguments, file for the samples, the run's own arguments where its held-out problems are asked)."""
    import tyro

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--run", type=Path)
    own.add_argument("--output", type=Path)
    given, words = own.parse_known_args(words)
    defaults = grpo.Args(eval_prompts=0, eval_samples=1)
    if given.run is not None:
        if not (given.run / "config.json").is_file():
            data.refuse(f"--run {given.run}: no config.json there; give the folder of a run, runs/NAME")
        values = json.loads((given.run / "config.json").read_text())["args"]
        known = {f.name for f in dataclasses.fields(grpo.Args)}
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known}
        defaults = grpo.Args(**values | {"model_name_or_path": str(given.run / "model"), "revision": None})
    args = tyro.cli(grpo.Args, args=words, default=defaults, description=__doc__)
    longest, args.best_metric = args.max_prompt_length + args.max_response_length, None
    args.micro_batch_tokens = max(longest, args.micro_batch_tokens)  # these have no say here, and could be refused
    args.logprob_micro_batch_tokens = max(longest, args.logprob_micro_batch_tokens)
    output = given.output or (given.run or Path(args.output_dir)) / "eval_samples.jsonl"
    same = (args.dataset, args.dataset_mixer) == (defaults.dataset, defaults.dataset_mixer)
    return args, output, defaults if given.run is not None and same else None


def problems_of(args: grpo.Args, held_out: grpo.Args | None) -> list[Problem]:
    """What is asked. Ends with exit code 2 where there is nothing."""
    if held_out is not None:  # the run's own split, however many of it are asked
        problems = data.load_problems(held_out)[1]
        if args.eval_prompts > len(problems):
            data.refuse(f"--eval_prompts {args.eval_prompts}: the run held out {len(problems)}, others were trained on")
        problems = problems[: args.eval_prompts]
    else:
        if args.eval_dataset is not None:
            data.refuse("--eval_dataset is for a run; name what to evaluate on by --dataset")
        problems = list(data.mixed_problems(args).values())[: args.eval_prompts or None]
        data.check_sandbox(problems, args)
    return problems or data.refuse("no problems to evaluate on: --eval_prompts 0 of a run, or an empty --dataset")


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % interval of a probability after ``right`` of ``count`` independent trials (Wilson 1927)."""
    z, p = 1.959964, right / count
    centre, width = p + z * z / (2 * count), z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - width) / scale), min(1.0, (centre + width) / scale)


def bootstrap(rates: list[float], draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the mean of ``rates``, one a problem, by drawing problems anew; the same at every call."""
    r = random.Random(0)
    means = sorted(sum(r.choices(rates, k=len(rates))) / len(rates) for _ in range(draws))
    return means[round(0.025 * (draws - 1))], means[round(0.975 * (draws - 1))]


def interval(samples: list[Sample], places: set[int]) -> tuple[float, float]:
    """95 % interval of pass@1 on some of the problems."""
    import utils

    right: dict[int, list[bool]] = {}
    for s in samples:
        if s.prompt_id in places:
            right.setdefault(s.prompt_id, []).append(utils.is_right(s))
    if all(len(found) == 1 for found in right.values()):
        return wilson(sum(found[0] for found in right.values()), len(right))
    return bootstrap([sum(found) / len(found) for found in right.values()])


def table(samples: list[Sample], problems: list[Problem], result: dict[str, float]) -> str:
    """A row for each data source, and one for all where there are several; Markdown."""
    k, sources = result["eval/samples"], sorted({p.source for p in problems})
    lines = [f"| data | problems | pass@1 | 95 % interval | pass@{k} | majority@{k} | length | cut |", "|---" * 8 + "|"]
    for source in [*(sources if len(sources) > 1 else ()), None]:
        prefix = "eval" if source is None else f"eval/{source}"
        low, high = interval(samples, {i for i, p in enumerate(problems) if source in (None, p.source)})
        own = {name: result[f"{prefix}/{name}"] for name in ("problems", "pass@1", "pass@k", "majority@k")}
        cells = [source or ("all" if len(sources) > 1 else sources[0]), f"{own['problems']}", f"{own['pass@1']:.3f}"]
        cells += [f"{low:.3f} to {high:.3f}", f"{own['pass@k']:.3f}", f"{own['majority@k']:.3f}"]
        cells += [f"{result[f'{prefix}/length_mean']:.1f}", f"{result[f'{prefix}/truncated_frac']:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def answer(args: grpo.Args, problems: list[Problem], tokenizer) -> list[Sample]:
    """All samples of all problems, scored, on all ranks. Requests, seeds, engine and rewards are those of a run."""
    import torch
    from rich.progress import track
    from transformers import AutoConfig, GenerationConfig

    import utils

    device, dtype, _ = utils.resolve_device(args)
    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with utils.Watch(args.stall_timeout) as watch:
        weights = parse_weights(args.reward_weights)
        verifiers = {p.verifier for p in problems}
        pool = RewardPool(args.reward_workers, args.reward_timeout, verifiers, weights, args.allow_unsafe_code_exec)
        if wrong := pool.check(problems):
            data.refuse(f"--reward_fn: {wrong}")
        name = args.reward_model_name_or_path
        scorer = RewardModel(name, args.logprob_micro_batch_tokens, device, dtype) if name is not None else None
        where = {"revision": args.revision, "trust_remote_code": args.trust_remote_code}
        config = AutoConfig.from_pretrained(args.model_name_or_path, **where)
        try:
            generation = GenerationConfig.from_pretrained(args.model_name_or_path, revision=args.revision)
        except OSError:  # a model without such a file
            generation = GenerationConfig.from_model_config(config)
        stop_ids = utils.stop_token_ids(SimpleNamespace(config=config, generation_config=generation), tokenizer)
        inbox, outbox = queue.Queue(), queue.Queue()
        rollout = grpo.vllm_thread if args.rollout == "vllm" else utils.hf_thread
        thread = threading.Thread(
            target=rollout, args=(args, dtype, rank, world_size, stop_ids, inbox, outbox), daemon=True, name="rollout"
        )
        thread.start()
        watch.receive(outbox, thread, args.rollout_timeout, "engine")

        requests, sampling = data.eval_requests(len(problems), args)
        engine, shard = divmod(rank, args.vllm_tensor_parallel_size)
        engines = world_size // args.vllm_tensor_parallel_size
        mine = [((place, k), problems[place].prompt_ids, s) for place, k, s in requests if place % engines == engine]
        samples, futures = [], []
        inbox.put(("generate", mine, sampling))
        for _ in track(mine, "answering", disable=rank != 0 or not sys.stdout.isatty()):
            message = watch.receive(outbox, thread, args.rollout_timeout, "sample")
            _, (place, k), ids, logprobs, finish_reason, version = message
            problem = problems[place]
            sample = Sample(place, k, problem.prompt_ids, ids, logprobs, finish_reason, version)
            sample.response = tokenizer.decode(ids, skip_special_tokens=True)
            if shard == 0:
                samples.append(sample)
                futures.append(pool.submit(problem.verifier, sample.response, problem.truth, problem.row))
        found = []
        for future in futures:
            found.append(pool.result(future))
            watch.beat()
        if scorer is not None:
            found = scorer.add(found, [(problems[s.prompt_id].messages, s.response) for s in samples], weights)
        for sample, reward in zip(samples, found, strict=True):
            shape_reward(sample, reward, args)
        samples = utils.gather_samples(samples)
        inbox.put(("stop",))
        thread.join(timeout=30)
        pool.close()
    return samples


def write_samples(samples: list[Sample], problems: list[Problem], path: Path) -> None:
    """Every sample as a JSON line, whole: text, token ids, what was extracted and how it was scored."""
    import utils

    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for s in samples:
            problem = problems[s.prompt_id]
            row = {"problem": s.prompt_id, "sample": s.sample_id, "source": problem.source, "right": utils.is_right(s)}
            row |= {"prompt": problem.messages, "response": s.response, "truth": problem.truth}
            row |= {"extracted": s.extracted, "score": s.score, "reward_parts": s.reward_parts}
            row |= {"reward_status": s.reward_status, "finish_reason": s.finish_reason, "verifier": problem.verifier}
            file.write(json.dumps(row | {"response_ids": s.response_ids}) + "\n")


def main(words: list[str]) -> dict[str, float]:
    """Evaluate, print, write; the metrics by their names in eval.jsonl, at step 0."""
    args, output, held_out = parse(words)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    checks.check_launch(world_size)
    checks.check_args(args, world_size)
    checks.check_model(args)
    problems = problems_of(args, held_out)
    runlog.prepare_environment()
    from transformers import AutoTokenizer

    import utils

    if args.external_lib is not None:
        importlib.import_module(args.external_lib)
    tokenizer = AutoTokenizer.from_pretrained(
        args.model_name_or_path, revision=args.revision, trust_remote_code=args.trust_remote_code
    )
    problems = data.render_prompts(problems, tokenizer, args)
    samples = answer(args, problems, tokenizer)
    result = utils.eval_metrics(samples, problems, step=0)
    if os.environ["RANK"] == "0":
        write_samples(samples, problems, output)
        sampled = f"temperature {args.eval_temperature:g}" if args.eval_temperature > 0 else "greedy"
        print(f"{args.model_name_or_path}, {sampled}, at most {args.max_response_length} tokens, seed {args.seed}")
        print(f"{table(samples, problems, result)}\n{output}")
    return result


if __name__ == "__main__":
    main(sys.argv[1:])

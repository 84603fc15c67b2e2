"""Answer problems with a saved model, exactly as an evaluation inside a run does, and report how many are correct.

    python scripts/evaluate.py --run runs/NAME            its model/ on its held-out problems: the run's last number
    python scripts/evaluate.py --run runs/NAME --model_name_or_path runs/NAME/best --eval_samples 16
    python scripts/evaluate.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset gsm8k_test.jsonl \\
        --eval_prompts 200 --sampling '{"temperature": 0.6, "top_p": 0.95, "top_k": 20}' --max_response_length 512
    python scripts/evaluate.py --samples --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset openai/gsm8k:main@train --eval_prompts 32 --eval_samples 8 --max_response_length 1024

Without --run, or with other data than the run's, the problems are the first --eval_prompts of --dataset (0: all of
them). The flags below are those of a run that affect an evaluation; with --run the script's own flags are added. Flags
of training get a warning; leave out those of an algorithm, such as --total_steps. Five more flags:

    --run FOLDER            use the script, arguments, model and held-out problems of this run; flags given here
                            override its own. The script's own vllm_thread and collect generate the responses, so a copy
                            with a tool has its tool
    --accept_changed_code   evaluate with the script as it is now if it has changed since the run; default: an error
    --samples [N]           before a run: also print responses to N problems (4) with their rewards, how long responses
                            are, how many groups of --eval_samples have different rewards, and the length to set
    --sampling JSON         --eval_sampling: temperature, top_p, top_k, min_p, repetition_penalty, max_tokens
    --output FILE           write all samples to FILE, as JSON lines. Default: eval_samples.jsonl in the run's folder,
                            or --output_dir

Prints a table with 95 % intervals of pass@1: Wilson's score interval, which is wider where several responses to one
problem are equally right or wrong. The column reward, of graded rewards, is their mean before shaping. Next to pass@1,
which is as strict as the verifier, two rates tell a gain in format from one in answers. lenient also counts responses
whose last number is the ground truth, boxed or not, ended or truncated; format is the mean of the verifier's part of
that name. A dash means that a ground truth is no number, or that no verifier has that part.

Several processes (accelerate launch) share the problems, each with its own engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package
sys.path.insert(0, str(Path(__file__).resolve().parent))  # scripts/script_loader.py

import script_loader
from intervals import rate_interval

from rewards import Verifiers, check_reward_args, lenient, truth_error
from runtime.arguments import checks, flags
from runtime.arguments.flags import RunFlags
from runtime.data import problem_set, prompt_order, rendering
from runtime.data.samples import Problem, Sample, is_correct
from runtime.run import directory, identity
from runtime.run.run_files import config_of
from runtime.run.verdict import interval_text
from runtime.system import process, user_files
from runtime.system.redaction import HIDDEN
from runtime.training import model_files

# Flags of training, which change nothing in an evaluation.
TRAINING = (
    *("eval_every", "save_every", "save_minutes", "keep_checkpoints", "resume", "run_name", "overwrite", "dry_run"),
    "temperature",  # that of --eval_sampling counts
    *("track", "log_samples", "gradient_checkpointing", "eval_dataset", "generation_size", "dynamic_sampling_rounds"),
    *("dataset_filter", "reward_control", "reward_scaling", "reward_bias", "max_reward_clip"),
    *("non_stop_penalty", "overlong_buffer", "async_steps", "inflight_updates", "max_logprob_diff"),
    *("vllm_engines", "vllm_tensor_parallel_size", "vllm_sleep", "micro_batch_tokens", "batch_layout", "zero_stage"),
    *("offload", "num_unique_prompts_rollout"),
)


@dataclass
class Args(RunFlags):
    eval_prompts: int = 0
    """Problems to ask. 0: all of them."""
    eval_samples: int = 1
    """Responses per problem."""
    num_unique_prompts_rollout: tyro.conf.Suppress[int] = 1  # what a run's split must leave for training


def warn_of_training(words: list[str]) -> None:
    """Warn of flags that the command sets although they change nothing here. Errors of theirs come later."""
    names = [word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")]
    needless = [f"--{name}" for name in names if name.removeprefix("no_") in TRAINING]
    needless = [flag for flag in needless if flag not in ("--reward_control", "--eval_dataset")]  # errors of their own
    if needless and process.rank() == 0:
        print(f"warning: {', '.join(needless)}: no effect in an evaluation, which does not train", file=sys.stderr)


def parse(words: list[str]) -> tuple[RunFlags, Path, int, RunFlags | None, Path]:
    """Return (arguments, samples file, samples to print, the run's own arguments for its held-out problems, script)."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--run", type=Path)
    own.add_argument("--output", type=Path)
    own.add_argument("--samples", type=int, nargs="?", default=0, const=4)
    own.add_argument("--sampling")
    own.add_argument("--accept_changed_code", action="store_true")
    given, words = own.parse_known_args(words)
    words += [] if given.sampling is None else ["--eval_sampling", given.sampling]
    defaults = Args()
    config = {}
    script = process.PROJECT / "grpo.py"
    if given.run is not None:
        config, script = find_run(given.run)
        defaults = arguments_of_run(given.run, script, config["args"])
    args = flags.parse(type(defaults), __doc__, words, defaults)
    warn_of_training(words)
    args.adapter = None
    if given.run is not None and (Path(args.model_name_or_path) / "adapter_config.json").is_file():
        args.adapter = Path(args.model_name_or_path)  # of a run of variants/lora.patch, for its own engine
        args.tokenizer_name_or_path = args.tokenizer_name_or_path or args.model_name_or_path
        args.model_name_or_path = config["args"]["model_name_or_path"]
    args.steps = 1 if given.run is None else flags.total_steps(args, config.get("problems", 0))
    args.recorded_choices = config.get("resolved", {})  # the run's dtype, also on a machine that would choose another
    if given.run is not None:
        check_code(given.run, config, defaults, given.accept_changed_code)
        unknown = [f"--{name}" for name, value in vars(args).items() if value == HIDDEN]
        if unknown:
            process.refuse(f"{', '.join(unknown)}: a secret, which is not recorded in config.json; pass it here")
    if args.engine_args.get("load_format") == "dummy":
        process.refuse(
            "--vllm_args: load_format dummy: nothing trains here and would push the real weights; leave it out"
        )
    if args.reward_control != "none":
        process.refuse("--reward_control: nothing trains here, and an evaluation is by the true reward; leave it out")
    other = args.model_name_or_path != defaults.model_name_or_path  # whose samples do not replace those of the run
    suffix = re.sub(r"[^\w.-]+", "_", f"_{args.model_name_or_path}") if other else ""
    output = given.output or (given.run or Path(args.output_dir)) / f"eval_samples{suffix}.jsonl"
    if given.run is not None and args.eval_dataset != defaults.eval_dataset:
        process.refuse(f"--eval_dataset {args.eval_dataset}: it is for a run; name what to evaluate on by --dataset")
    held_out = defaults if given.run is not None and args.dataset == defaults.dataset else None
    defaults.data_digest = config.get("inputs", {}).get("--dataset", "")
    if given.run is not None and held_out is None:
        args.eval_dataset = None  # the run's own, of which nothing is asked
    return args, output, given.samples, held_out, script


def find_run(folder: Path) -> tuple[dict, Path]:
    """Return (config.json, script) of a run. Exits with code 2 if one is missing."""
    if not (folder / "config.json").is_file():
        process.refuse(f"--run {folder}: no config.json there; give the folder of a run, runs/NAME")
    try:
        config = config_of(folder)
    except ValueError as error:
        process.refuse(f"--run {folder}: its config.json cannot be read ({error})")
    name = config.get("script") or config["command"][0]  # older runs name it in their command alone
    script = process.PROJECT / name
    if not script.is_file():
        process.refuse(
            f"--run {folder}: {script}, which trained it, does not exist any more; restore it, since its "
            f"engine generates the responses"
        )
    return config, script


def arguments_of_run(folder: Path, script: Path, stored: dict) -> RunFlags:
    """Return a run's arguments in its script's own class, for its final model and an engine without a trainer."""
    kind = script_loader.load_arguments(script).Args
    known = {f.name for f in dataclasses.fields(kind)}
    unknown = [f"--{name}" for name in stored if name not in known]
    if unknown:
        process.refuse(
            f"--run {folder}: {script.name} no longer has flags of this run ({', '.join(unknown[:3])}); evaluate it "
            f"with the code of its commit, or evaluate its weights with --model_name_or_path {folder / 'model'}"
        )
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    engine = flags.engine_args(values.get("vllm_args")) | {"load_format": "hf"}
    values |= {"model_name_or_path": str(folder / "model"), "tokenizer_name_or_path": None, "vllm_sleep": "off"}
    values["reward_control"] = "none"
    return kind(**values | {"vllm_engines": 0, "vllm_args": json.dumps(engine)})


def check_code(folder: Path, config: dict, args: RunFlags, accept: bool) -> None:
    """Reject a script that is not the run's any more; warn of other files, such as the reward function, that are not.

    ``args``: the run's own. ``accept``: warn of the script, too.
    """
    script = identity.script_of(args)
    for line in identity.changed_code(config.get("code", {}), identity.code_of(args)):
        if line.startswith(f"{script} ") and not accept:
            commit = config.get("git", {}).get("commit", "unknown")
            process.refuse(
                f"--run {folder}: {line} since the run, and its engine is part of what the run measured; restore it "
                f"(the run's commit: {commit}), or pass --accept_changed_code to evaluate with the current one"
            )
        if process.rank() == 0:
            print(f"warning: since the run, {line}", file=sys.stderr)


def problems_of(args: RunFlags, held_out: RunFlags | None) -> list[Problem]:
    """Return the problems to evaluate. Ends with exit code 2 if there are none."""
    if held_out is not None:  # the run's own split, however many of its problems are asked
        training, problems = problem_set.load_problems(held_out, truth_error)
        if held_out.data_digest not in ("", directory.data_digest(training, problems)):
            process.refuse(
                "--run: its data have changed since, so other problems would be held out; restore them, or name a "
                "--dataset"
            )
        if args.eval_prompts > len(problems):
            process.refuse(
                f"--eval_prompts {args.eval_prompts}: the run held out {len(problems)}, others were trained on"
            )
        problems = problems[: args.eval_prompts]
    else:
        if args.eval_dataset is not None:
            process.refuse("--eval_dataset is for a run; name what to evaluate on by --dataset")
        problems = list(problem_set.mixed_problems(args, truth_error).values())[: args.eval_prompts or None]
        problem_set.check_sandbox(problems, args)
    if not problems:
        process.refuse("no problems to evaluate on: --eval_prompts 0 of a run, or an empty --dataset")
    return problems


if __name__ == "__main__":  # --help and every error about arguments come before the slow imports
    args, output, shown, held_out, path = parse(sys.argv[1:])
    world_size = process.world_size()
    checks.check(args, world_size)
    model_files.check_model(args)
    check_reward_args(args)
    problems = problems_of(args, held_out)
    process.prepare_environment()

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, GenerationConfig

import utils
from runtime.engine.client import Engine
from runtime.system import watchdog
from runtime.training import pretrained


def side_by_side(samples: list[Sample], problems: list[Problem]) -> tuple[str, str]:
    """Return (lenient rate, format rate) of samples, with "–" for a rate that is unknown."""
    said = [lenient(sample.response, problems[sample.prompt_id].truth) for sample in samples]
    right = [is_correct(sample) or found for sample, found in zip(samples, said, strict=True)]
    formats = [sample.reward_parts["format"] for sample in samples if "format" in sample.reward_parts]
    rates = (None if None in said else utils.mean(right), utils.mean(formats))
    return tuple("–" if rate is None else f"{rate:.3f}" for rate in rates)


def table(samples: list[Sample], problems: list[Problem], result: dict[str, float]) -> str:
    """Format a Markdown row for each data source, and one for all if there are several."""
    k = result["eval/samples"]
    sources = sorted({p.source for p in problems})
    graded = ["reward"] if result["eval/graded_frac"] > 0 else []
    several = [f"pass@{k}"] if k > 1 else []  # of one response it is pass@1
    names = ["data", "problems", "pass@1", "95 % interval", *graded, "lenient", "format", *several, f"majority@{k}"]
    names += ["length", "truncated"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for source in [*(sources if len(sources) > 1 else ()), None]:
        prefix = "eval" if source is None else f"eval/{source}"
        places = {i for i, p in enumerate(problems) if source in (None, p.source)}
        low, high = rate_interval([result["eval/right"][place] / k for place in places], k)
        cells = [
            source or ("all" if len(sources) > 1 else sources[0]),
            f"{result[f'{prefix}/problems']}",
            f"{result[f'{prefix}/pass@1']:.3f}",
            interval_text(low, high),
            *[f"{result[f'{prefix}/reward_mean']:.3f}" for _ in graded],
            *side_by_side([sample for sample in samples if sample.prompt_id in places], problems),
            *[f"{result[f'{prefix}/pass@k']:.3f}" for _ in several],
            f"{result[f'{prefix}/majority@k']:.3f}",
            f"{result[f'{prefix}/length_mean']:.1f}",
            f"{result[f'{prefix}/truncated_frac']:.1%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def describe(samples: list[Sample], problems: list[Problem], count: int, limit: int) -> list[str]:
    """Show responses to ``count`` problems, and say what a run with these problems would meet.

    limit: --max_response_length, at which responses were truncated.
    """
    lines = []
    for sample in [sample for sample in samples if sample.sample_id == 0][:count]:
        state = "right" if is_correct(sample) else "wrong"
        lines += [
            f"reward {sample.reward:g}, {state}, {sample.length} tokens, ended by {sample.finish_reason}",
            f"  prompt     {problems[sample.prompt_id].messages[-1]['content'][-300:]!r}",
            f"  response   {sample.response!r}",
            f"  extracted  {sample.extracted!r}, expected {problems[sample.prompt_id].truth!r}",
        ]
    lengths = [sample.length for sample in samples]
    half, wanted = (int(length) for length in np.quantile(lengths, (0.5, 0.95), method="inverted_cdf"))
    unfinished = utils.mean([sample.finish_reason == "length" for sample in samples])
    lines.append(f"length     50 % have at most {half} tokens, 95 % at most {wanted}; {unfinished:.0%} did not end")
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.prompt_id, set()).add(sample.reward)
    if len(samples) > len(rewards):
        different = utils.mean([len(found) > 1 for found in rewards.values()])
        lines.append(f"signal     {different:.0%} of the groups have different rewards; the others teach nothing")
    if unfinished > 0.05:
        lines.append(f"           more than {limit} tokens are wanted: raise --max_response_length and ask again")
    elif 4 * wanted < limit:
        lines.append(f"           --max_response_length {-(-wanted // 16) * 16} would hold 95 % of them")
    return lines


@watchdog.ends_all_ranks
def answer(script: ModuleType, args: RunFlags, problems: list[Problem], tokenizer) -> list[Sample]:
    """Sample all problems on all ranks with the engine of ``script`` and score them, as in an evaluation of a run."""
    device, dtype, _ = pretrained.resolve_device(args)
    watch = watchdog.Watch(args.timeout)
    torch.distributed.init_process_group("gloo")
    verifiers = Verifiers(args, problems, device, dtype)
    name, revision = args.model
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    try:
        generation = GenerationConfig.from_pretrained(name, revision=revision)
    except OSError:  # a model without such a file
        generation = GenerationConfig.from_model_config(config)
    stop_ids = pretrained.stop_token_ids(SimpleNamespace(config=config, generation_config=generation), tokenizer)
    args.vllm_sleep = "off"  # it would sleep until a first push
    thread = script.vllm_thread if args.rollout == "vllm" else utils.hf_thread
    engine = Engine(thread, args, dtype, tokenizer, stop_ids, watch)
    if args.adapter is not None:
        trained = load_file(args.adapter / "adapter_model.safetensors")
        engine.push([(name.removeprefix("base_model.model."), weight) for name, weight in trained.items()])
    requests, sampling = prompt_order.eval_requests(len(problems), args)
    batch = engine.ask(problems, requests, sampling)
    samples = script.collect(engine, verifiers, batch, utils.Stopwatch())
    engine.close()
    verifiers.close()
    watch.close()
    return samples


def write_samples(samples: list[Sample], problems: list[Problem], path: Path) -> None:
    """Write every sample as a JSON line: complete text, token ids, what was extracted and how it was scored."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as file:
        for sample in samples:
            problem = problems[sample.prompt_id]
            row = {
                "problem": sample.prompt_id,
                "sample": sample.sample_id,
                "source": problem.source,
                "right": is_correct(sample),
                "prompt": problem.messages,
                "response": sample.response,
                "truth": problem.truth,
                "extracted": sample.extracted,
                "score": sample.score,
                "reward_parts": sample.reward_parts,
                "reward_status": sample.reward_status,
                "finish_reason": sample.finish_reason,
                "verifier": problem.verifier,
                "response_ids": sample.response_ids.tolist(),
            }
            file.write(json.dumps(row) + "\n")


def main(args: RunFlags, output: Path, problems: list[Problem], path: Path, shown: int = 0) -> dict[str, float]:
    """Evaluate with the engine of the script at ``path``, print, write; the metrics by their names in eval.jsonl.

    shown: number of samples to print, with what they say about a run; 0 prints neither.
    """
    if args.external_lib is not None:
        importlib.import_module(args.external_lib)
    tokenizer = rendering.load_tokenizer(args)
    if args.environment is not None:
        user_files.find("runtime.environments.episodes:first_turns")(problems, tokenizer, args)
    problems = rendering.render_prompts(problems, tokenizer, args)
    script = script_loader.load_script(path, ("vllm_thread", "collect"))
    samples = answer(script, args, problems, tokenizer)
    result = utils.eval_metrics(samples, problems, step=0)
    if process.rank() == 0:
        write_samples(samples, problems, output)
        settings = {"max_tokens": args.max_response_length} | args.eval_settings
        sampled = ", ".join(f"{name} {value:g}" for name, value in settings.items())
        print(f"{args.model_name_or_path}, {sampled}, seed {args.seed}")
        print(f"{table(samples, problems, result)}\n{output}")
        if shown:
            print("\n".join(describe(samples, problems, shown, settings["max_tokens"])))
    return result


if __name__ == "__main__":
    main(args, output, problems, path, shown)

"""Log of a run: metrics, samples and evaluations as JSON lines, the console, trackers."""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from runtime.arguments.flags import OPEN, is_open
from runtime.data.samples import Problem, Sample
from runtime.run import verdict
from runtime.run.directory import cut_back, last_step, left_by_a_run
from runtime.run.identity import code_of, inputs_of, recorded, script_of
from runtime.run.run_files import control_of, read_config, records
from runtime.system import git, library_logs, user_files
from runtime.system.process import PROJECT, lock_folder, print_on_rank_0, usable_cores, versions, write_whole
from runtime.system.redaction import redact, redact_words, secret_values
from runtime.training import memory
from runtime.training.memory import GIB, Sizes
from runtime.training.model_files import Model

SHOW_SAMPLES = 10  # steps from one look at samples, on the console and in the trackers, to the next
TABLE_ROWS = 32  # most samples of a table in a tracker

# ------------------------------------------------------------------------------------------------ before the first step


def print_header(args, run, chosen) -> None:
    """Print the sizes that follow from the arguments, and the first prompt as the model will see it.

    ``run``: the ``utils.Run``; ``chosen``: the ``choices.Choices`` of this machine.
    """
    prompts = args.num_unique_prompts_rollout
    group = args.num_samples_per_prompt_rollout
    samples = prompts * group
    updates = args.num_epochs * args.num_mini_batches
    problems, total_steps = run.problems, run.total_steps
    epochs = total_steps * prompts / len(problems)
    longest = max(len(p.prompt_ids) for p in problems)
    evaluation = "evaluation on other data" if args.eval_dataset else f"{args.eval_prompts} more held out"
    engines = f"; {args.vllm_engines} engine(s) on ranks of their own" if args.vllm_engines > 0 else ""
    hardware = f"{run.device.type} {run.dtype}".replace("torch.", "")
    origins = Counter(f"{p.source} ({p.verifier})" for p in problems)
    lines = [
        f"run        {run.folder}",
        *(user_files.find("runtime.arguments.presets:explain")(args) if args.preset is not None else ()),
        *derived_lines(args),
        f"hardware   {run.world_size} rank(s), {hardware}, {usable_cores():g} cores{engines}",
        f"data       {len(problems)} problems, {evaluation}; longest prompt {longest} tokens",
        f"from       {', '.join(f'{count} {origin}' for origin, count in origins.most_common(8))}",
        f"a step     {prompts} prompts x {group} samples = {samples} samples, at most "
        f"{samples * args.max_response_length} new tokens, {updates} optimizer step(s)",
        f"the run    {total_steps} steps, {total_steps * samples} samples, {total_steps * updates} optimizer steps, "
        f"{epochs:.2f} epochs of the data",
    ]
    if args.reward_control != "none":
        lines.append(f"CONTROL    --reward_control {args.reward_control}: not the verifier's reward is trained on")
    if args.async_steps > 0:
        between = "between whole batches" if args.inflight_updates == "off" else f"in flight ({args.inflight_updates})"
        lines.append(f"ahead      samples are at most {args.async_steps} step(s) old; new weights {between}")
    if chosen.model is None:
        lines.append(f"memory     unknown: config.json of {args.model_name_or_path} lacks the expected fields")
    else:
        lines += memory_lines(args, chosen.model, chosen.setting, run.sizes)
    ids = problems[0].prompt_ids
    lines.append(f"prompt     {run.tokenizer.decode(ids)!r}")
    lines.append(f"ids        {ids.tolist()}")
    print(redact("\n".join(lines)), flush=True)


def derived_lines(args) -> list[str]:
    """Return the values of flags that were not given and follow from model and data, and why."""
    lines = [f"  --{name} {value:g} was not given: {why}" for name, (value, why) in args.derived.items()]
    return ["defaults   of this model and data, not the quickstart's:", *lines] if lines else []


def memory_lines(args, model: Model, setting: memory.Setting, sizes: Sizes) -> list[str]:
    """Return the upper bound of a rank's memory and its parts, with a warning where that may be too much."""
    parts = memory.predict(args, model, setting, sizes)
    needed = sum(parts.values())
    there = setting.card or setting.host
    count = f"{model.parameters / 1e6:.0f}M parameters"
    shown = [f"{name} {part / GIB:.1f}" for name, part in parts.items() if part >= 0.05 * GIB]
    lines = [
        f"memory     at most {needed / GIB:.1f} of {there / GIB:.1f} GiB per rank ({count}; docs/run.md)",
        f"  parts    {', '.join(shown)}",
    ]
    if setting.card and (host := memory.host_memory(args, model, setting)):
        lines.append(f"  host     at least {host / GIB:.1f} GiB of the machine's memory per rank")
    if needed > (memory.USABLE * setting.card or setting.host):
        lines.append(
            f"warning: {needed / GIB:.1f} GiB may be needed, and a rank has {there / GIB:.1f}; see "
            f"--gradient_checkpointing and --micro_batch_tokens, and on a GPU --vllm_sleep, --offload, and "
            f"gpu_memory_utilization in --vllm_args"
        )
    return lines


# ------------------------------------------------------------------------------------------------------------- a step


# Label on the console, name of the metric, format.
SHOWN = (
    ("reward", "reward/mean", ".3f"),
    ("kl", "kl/sequence", ".4f"),
    ("entropy", "policy/entropy", ".3f"),
    ("clip", "policy/clip_frac", ".3f"),
    ("len", "completions/length_mean", ".1f"),
    ("truncated", "completions/truncated_frac", ".0%"),
    ("zero-variance", "reward/zero_std_frac", ".0%"),
    ("logprob_diff", "sampler/logprob_diff_mean", ".1e"),
    ("tok/s", "perf/tokens_per_second", ".0f"),
)
# Metrics policy/NAME of every script. Any other is a piece that a script's own token_loss returned (docs/metrics.md).
POLICY = ("entropy", "ratio_mean", "ratio_max", "clip_frac", "approx_kl", "approx_kl_max")
PHASES = {"gen": "generate", "score": "score", "logp": "logprobs", "update": "update", "push": "push"}


def own_pieces(names: Iterable[str]) -> list[str]:
    """Return the metrics that only this script has: the pieces of its loss."""
    pieces = [name for name in names if name.startswith("policy/")]
    return sorted(name for name in pieces if name.removeprefix("policy/") not in POLICY)


def step_line(metrics: dict[str, Any], total: int, remaining: float, masked: bool) -> str:
    """Format a step as a line. ``remaining``: seconds left; ``masked``: truncated responses are not trained on."""
    parts = [f"step {metrics['step']}/{total}"]
    for label, name, form in SHOWN:
        if name in metrics:
            parts.append(f"{label} {metrics[name]:{form}}")
    for name in own_pieces(metrics):
        parts.append(f"{name.removeprefix('policy/')} {metrics[name]:.4g}")
    times = [f"{label} {metrics[f'time/{name}']:.1f}s" for label, name in PHASES.items() if f"time/{name}" in metrics]
    if times:
        parts.append(" ".join(times))
    seconds = int(remaining)
    parts.append(f"ETA {seconds // 3600}:{seconds % 3600 // 60:02d}:{seconds % 60:02d}")
    if control := control_of(metrics):
        parts.append(f"CONTROL {control}")
    if metrics["optim/skipped"]:
        parts.append(f"SKIPPED {metrics['optim/skipped']}")
    if metrics["completions/truncated_frac"] == 1 and masked:
        parts.append("ALL TRUNCATED, nothing to train on: raise --max_response_length")
    return " | ".join(parts)


def eval_line(result: dict[str, Any]) -> str:
    """Format an evaluation as a line, with pass@k only if it is more than pass@1."""
    parts = [f"eval after step {result['step']}: pass@1 {result['eval/pass@1']:.3f}"]
    if result["eval/samples"] > 1:
        parts.append(f"pass@{result['eval/samples']} {result['eval/pass@k']:.3f}")
    if result.get("eval/graded_frac"):
        parts.append(f"reward {result['eval/reward_mean']:.3f}")
    parts.append(f"length {result['eval/length_mean']:.1f}")
    parts.append(f"truncated {result['eval/truncated_frac']:.0%}")
    seconds = f" in {result['time/eval']:.1f} s" if "time/eval" in result else ""
    parts.append(f"({result['eval/problems']} problems{seconds})")
    return "  ".join(parts)


def sample_row(step: int, s: Sample, problem: Problem) -> dict[str, Any]:
    """Convert a sample to its record in samples.jsonl."""
    return {
        "step": step,
        "prompt": problem.messages[-1]["content"],
        "response": s.response,
        "truth": problem.truth,
        "reward": s.reward,
        "reward_parts": s.reward_parts,
        "extracted": s.extracted,
        "reward_status": s.reward_status,
        "advantage": s.advantage,
        "finish_reason": s.finish_reason,
        "weight_versions": s.weight_versions,
        **({"turns": s.turns} if s.turns else {}),
    }


def sample_table(name: str, samples: list[Sample], batch: list[Problem]) -> dict[str, list]:
    """Return a table for the trackers under its name: at most TABLE_ROWS samples, spread over the batch."""
    rows = []
    for s in samples[:: -(-len(samples) // TABLE_ROWS) or 1]:
        problem = batch[s.prompt_id]
        rows.append([problem.messages[-1]["content"], s.response, problem.truth, s.reward, s.advantage])
    return {name: _writable(rows, secret_values())}


class RunLog:
    """The files of a run (rank 0 writes, the others are silent), its trackers, and the console.

    ``metrics.jsonl``, ``eval.jsonl`` and ``samples.jsonl`` get one JSON object per line. A metric without a value in a
    step is left out; a value that is not finite is written as null.
    """

    def __init__(
        self,
        folder: Path,
        args,
        world_size: int,
        total_steps: int,
        is_main: bool,
        start: Path | None = None,
        problems: int = 0,
        resolved: dict[str, Any] | None = None,
    ):
        """``start``: the checkpoint that the run resumes from; ``problems``: the number of those it trains on, by which
        ``--total_epochs`` is a number of steps; ``resolved``: what this machine made of flags that leave it open.
        """
        self.folder = folder
        self.args = args
        self.total = total_steps
        self.is_main = is_main
        self.trackers: dict[str, Any] = {}  # by the names that --track has for them
        self.wandb_id = None
        self.goal_reached = False  # an evaluation has reached --stop_at
        self.first = 0  # the step after which the run resumed
        self.scores: dict[int, float | None] = {}  # step -> rating of the evaluation after it
        self.step_seconds: list[float] = []  # for the ETA: of each step of this process, with its evaluation
        if not is_main:
            library_logs.write_to(None)
            return
        folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock_folder(folder)
        for path in left_by_a_run(folder) if args.overwrite else ():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        self.code = code_of(args)
        self.inputs = inputs_of(args, read_config(folder).get("inputs", {}))
        if start is not None:
            self.first = json.loads((start / "state.json").read_text())["step"]
            if args.resume == "auto":  # otherwise steps may follow that wandb has, and it silently drops those
                self.wandb_id = read_config(folder).get("wandb_id")
        self._drop_later_steps(start is not None)
        self.scores = {result["step"]: rating(result) for result in records(folder / "eval.jsonl")}
        (folder / verdict.FILE).unlink(missing_ok=True)
        if "wandb" in args.track and self.wandb_id is None:
            self.wandb_id = secrets.token_hex(4)
        config = {
            "args": recorded(args),
            "resolved": resolved or {},
            "left_open": [name for name in OPEN if is_open(args, name)],
            "world_size": world_size,
            "command": redact_words(sys.argv),
            "script": script_of(args),
            "wandb_id": self.wandb_id,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "resumed_after": self.first,
            "inputs": self.inputs,
            "problems": problems,
            "code": self.code,
            "git": git.state(PROJECT),
            "versions": versions(),
        }
        write_whole(folder / "config.json", json.dumps(config, indent=1) + "\n")
        library_logs.write_to(folder)
        starts = {
            "wandb": lambda: user_files.find("runtime.run.tracking:start_wandb")(folder, config),
            "tensorboard": lambda: user_files.find("runtime.run.tracking:TensorBoard")(
                folder, self.first + (start is not None)
            ),
        }
        found = {name: self._track(name, starts[name]) for name in dict.fromkeys(args.track)}
        self.trackers = {name: tracker for name, tracker in found.items() if tracker is not None}

    def _drop_later_steps(self, resumed: bool) -> None:
        """Truncate the .jsonl files to the step of the checkpoint, and set earlier final models aside."""
        for file in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
            cut_back(self.folder / file, self.first if resumed else -1)
        if resumed and self.first == self.total:  # only the last evaluation and the model are missing
            cut_back(self.folder / "eval.jsonl", self.total - 1)
        for name in ("model", "critic"):  # of an earlier end: this run is not finished before it has made its own
            if (self.folder / name).exists():
                shutil.rmtree(self.folder / f"{name}.aside", ignore_errors=True)
                (self.folder / name).rename(self.folder / f"{name}.aside")

    def _track(self, name: str, call: Callable[[], Any]) -> Any:
        """Call a tracker. If that fails (its process killed, its disk full), the run continues without it."""
        try:
            return call()
        except Exception as error:
            print_on_rank_0(f"warning: {name} failed ({type(error).__name__}: {error}); no more tracking by it")
            self.trackers.pop(name, None)

    def write(self, file: str, record: dict[str, Any], table: dict[str, list] | None = None) -> None:
        """Append one object to ``file`` (metrics.jsonl, eval.jsonl, samples.jsonl). ``table``: for the trackers."""
        if not self.is_main:
            return
        with open(self.folder / file, "a") as f:
            f.write(json.dumps(_writable(record, secret_values()), default=np.ndarray.tolist) + "\n")
        if file in ("metrics.jsonl", "eval.jsonl"):
            numbers = {k: v for k, v in record.items() if k != "step" and not isinstance(v, list)}
            for name, tracker in tuple(self.trackers.items()):
                self._track(name, partial(tracker.log, numbers | (table or {}), step=record["step"]))

    def evaluation(self, result: dict[str, Any], samples: list[Sample], problems: list[Problem]) -> None:
        """Write one evaluation to eval.jsonl and the console, and its samples to the trackers."""
        self.write("eval.jsonl", result, sample_table("samples/eval", samples, problems))
        self.scores[result["step"]] = rating(result)
        print_on_rank_0(eval_line(result))
        self.goal_reached = self.args.reaches_goal(result)
        if self.goal_reached:
            print_on_rank_0(f"stopping   {self.args.goal[0]} has reached --stop_at {self.args.goal[1]:g}")

    def step(self, metrics: dict[str, Any], samples: list[Sample], batch: list[Problem]) -> None:
        """Write one step: metrics.jsonl, a few samples to samples.jsonl, and a line on the console."""
        metrics = {k: v for k, v in metrics.items() if v is not None}
        step = metrics["step"]
        is_shown = step == 1 or step % SHOW_SAMPLES == 0
        self.write("metrics.jsonl", metrics, sample_table("samples/train", samples, batch) if is_shown else {})
        every = max(1, len(samples) // max(1, self.args.log_samples))
        shown = samples[::every][: self.args.log_samples]
        for s in shown:
            self.write("samples.jsonl", sample_row(step, s, batch[s.prompt_id]))
        self.step_seconds.append(metrics["time/step"])
        # The first step is slower than the others.
        remaining = (self.total - step) * np.mean(self.step_seconds[1:] or self.step_seconds)
        print_on_rank_0(step_line(metrics, self.total, remaining, self.args.mask_truncated_completions))
        if is_shown:
            for s in shown:
                problem = batch[s.prompt_id]
                print_on_rank_0(
                    f"  {problem.messages[-1]['content']!r} -> {s.response!r} | ground truth {problem.truth} | "
                    f"reward {s.reward:.2f} | advantage {s.advantage:+.2f} | {s.finish_reason}"
                )

    def check_skips(self, skips, samples: list[Sample]) -> None:
        """End the run once ten optimizer steps in a row, of the policy or the critic, were not applied."""
        if max(vars(skips).values()) >= 10:
            for sample in samples:
                self.write("bad_batch.jsonl", {"step": -1, **dataclasses.asdict(sample)})
            raise RuntimeError("loss or gradient not finite in ten optimizer steps in a row: see bad_batch.jsonl")

    def end(self) -> None:
        """Write and print the verdict of a finished run: whether it has learned.

        An error here costs the verdict, not the run, which is saved.
        """
        if self.is_main:
            try:
                print_on_rank_0(verdict.write(self.folder, last_step(self.folder / "metrics.jsonl")))
            except Exception as error:
                print_on_rank_0(f"warning: no verdict ({type(error).__name__}: {error})")

    def close(self) -> None:
        """Finish the trackers, and let other runs have the folder."""
        for name, tracker in tuple(self.trackers.items()):
            self._track(name, tracker.finish)
        if self.is_main:
            self.lock.release()


def rating(result: dict[str, Any]) -> float | None:
    """Return what tells which evaluation is the best: pass@1, or the reward where that is graded."""
    return result.get("eval/reward_mean" if result.get("eval/graded_frac") else "eval/pass@1")


def _writable(value: Any, secrets: dict[str, str]) -> Any:
    """Replace NaN and infinities, for which JSON has no word, by null, and remove secrets from texts.

    Before they are JSON: a secret may end in a quote, and to hide that one's backslash would break the line.
    """
    if isinstance(value, dict):
        return {_writable(k, secrets): _writable(v, secrets) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(v, secrets) for v in value]
    if isinstance(value, str):
        return redact(value, secrets)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

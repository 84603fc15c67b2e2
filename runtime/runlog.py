"""What a run writes while it goes: metrics, samples and evaluations as JSON lines, the console, Weights & Biases."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import os
import shutil
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from runtime.identity import code_of
from runtime.process import git_state, refuse, versions, write_whole
from runtime.records import Problem, Sample
from runtime.rundir import cut_back

ZERO_STEPS = 5  # so many steps without a score above 0, and the run shows what was extracted and what was expected


def count_parameters(folder: Path) -> int | None:
    """Parameters in a folder's safetensors, from their headers alone; None for anything else."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    return total or None


def print_header(
    args, folder, problems, tokenizer, total_steps: int, world_size: int, hardware: str, critic=False
) -> None:
    """The sizes that follow from the arguments, and the first prompt as the model will see it."""
    prompts, group = args.num_unique_prompts_rollout, args.num_samples_per_prompt_rollout
    updates, samples = args.num_epochs * args.num_mini_batches, prompts * group
    longest = max(len(p.prompt_ids) for p in problems)
    origins = Counter(f"{p.source} ({p.verifier})" for p in problems)
    lines = [
        f"run        {folder}",
        f"hardware   {world_size} rank(s), {hardware.replace('torch.', '')}",
        f"data       {len(problems)} problems, {args.eval_prompts} more held out; longest prompt {longest} tokens",
        f"from       {', '.join(f'{count} {origin}' for origin, count in origins.most_common(8))}",
        f"a step     {prompts} prompts x {group} samples = {samples} samples, at most "
        f"{samples * args.max_response_length} new tokens, {updates} optimizer step(s)",
        f"the run    {total_steps} steps, {total_steps * samples} samples, {total_steps * updates} optimizer steps, "
        f"{total_steps * prompts / len(problems):.2f} passes over the data",
    ]
    parameters = count_parameters(Path(args.model_name_or_path))
    if parameters:
        weight = 2 if "bfloat16" in hardware else 4
        sharded = 12 if weight == 2 else 8  # fp32 master weights (bf16 only) and two moments
        trained = parameters * (1 + critic)
        trainer = trained * (weight + 4 + sharded / world_size) / 2**30
        others = parameters * weight * (1 + (args.beta > 0 and args.kl_placement != "none")) / 2**30
        logits = 3 * min(args.logprob_chunk, args.micro_batch_tokens) * len(tokenizer) * 4 / 2**30
        lines.append(
            f"memory     about {trainer + others + logits:.1f} GiB a rank before activations and KV cache: trainer "
            f"{trainer:.1f}, engine and reference weights {others:.1f}, logits {logits:.1f} "
            f"({parameters / 1e6:.0f}M parameters)"
        )
    ids = problems[0].prompt_ids
    lines.append(f"prompt     {tokenizer.decode(ids)!r}")
    lines.append(f"ids        {ids}")
    print("\n".join(lines), flush=True)


def explain_zeros(samples: list[Sample], problems: list[Problem], steps: int) -> str:
    """Help for a run whose scores have all been 0 for ``steps`` steps: what two samples said, and what was expected."""
    lines = [f"all scores of the last {steps} steps are 0. What was extracted, and what was expected:"]
    for s in samples[:: max(1, len(samples) - 1)][:2]:
        problem = problems[s.prompt_id]
        lines += [
            f"  prompt     {problem.messages[-1]['content'][-300:]!r}",
            f"  response   {s.response[-300:]!r} (ended by {s.finish_reason})",
            f"  extracted  {s.extracted[:200]!r} by {problem.verifier}, status {s.reward_status}",
            f"  expected   {problem.truth[:200]!r}",
        ]
    return "\n".join([*lines, "  see --max_response_length, --verifier, --system_prompt"])


class RunLog:
    """The files of a run (rank 0 writes, the others are silent), wandb, and the console.

    ``metrics.jsonl``, ``eval.jsonl`` and ``samples.jsonl`` get one JSON object a line; what has no value in a step is
    left out and what is not finite is written as null.
    """

    def __init__(
        self,
        folder: Path,
        args,
        world_size: int,
        total_steps: int,
        is_main: bool,
        start: Path | None = None,
        data: str = "",
    ):
        self.folder, self.args, self.total, self.is_main, self.wandb = folder, args, total_steps, is_main, None
        self.zero_steps, self.first, self.wandb_id = 0, 0, None
        self.scores: dict[int, float | None] = {}  # step -> pass@1 of the evaluation after it
        self.best = -math.inf  # the best evaluation so far, by --best_metric
        if not is_main:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        if args.overwrite:
            for path in folder.iterdir():
                if path.name != "lock":
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        self.code = code_of(args)
        state = json.loads((start / "state.json").read_text()) if start is not None else {}
        config = folder / "config.json"
        if start is not None and config.exists() and json.loads(config.read_text()).get("data", data) != data:
            self.lock.close()
            refuse(
                f"{folder}: --dataset or --eval_dataset gives other problems than before. A file has changed, and with "
                f"it the order and what is held out: bring it back, or start another run (--run_name, --exp_name)"
            )
        self.first, self.wandb_id = state.get("step", 0), state.get("wandb_id")
        for file in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
            cut_back(folder / file, self.first if start is not None else -1)
        if start is not None and self.first == total_steps:  # all that follows is the last evaluation, and the model
            cut_back(folder / "eval.jsonl", total_steps - 1)
        if (folder / "model").exists():  # of an earlier end: this run is not finished before it has made its own
            shutil.rmtree(folder / "model.aside", ignore_errors=True)
            (folder / "model").rename(folder / "model.aside")
        config = {
            "args": dataclasses.asdict(args),
            "world_size": world_size,
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "resumed_after": self.first,
            "data": data,
            "code": self.code,
            "git": git_state(),
            "versions": versions(),
        }
        write_whole(folder / "config.json", json.dumps(config, indent=1) + "\n")
        if args.track:
            self._start_wandb(args, config)
        self.begun, self.progress = time.monotonic(), None
        console = Console()
        if console.is_terminal:
            self.progress = Progress(
                *("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn()),
                *(TimeElapsedColumn(), "left", TimeRemainingColumn()),
                console=console,
            )
            self.bar = self.progress.add_task("steps", total=total_steps, completed=self.first)
            self.progress.start()

    def _lock(self) -> None:
        """Hold the folder until this process ends: two runs that write to one folder would spoil both."""
        self.lock = open(self.folder / "lock", "a+")  # noqa: SIM115
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            refuse(f"{self.folder} is being written by a run that goes on ({self.lock.read().strip()})")
        except OSError as error:  # a file system without locks
            print(f"warning: {self.folder} cannot be locked ({error}); take care that no second run writes there")
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.lock.flush()

    def _start_wandb(self, args, config: dict) -> None:
        import wandb

        options = {"project": args.wandb_project, "entity": args.wandb_entity, "name": self.folder.name}
        options |= {"config": config, "dir": str(self.folder)}
        if self.wandb_id is not None:
            options |= {"id": self.wandb_id, "resume": "allow"}
        try:
            settings = wandb.Settings(init_timeout=20, finish_timeout=30, silent=True)
            self.wandb = wandb.init(**options, settings=settings)
        except Exception as error:  # no network, no key, a server error: tracking never stops a run
            print(f"warning: wandb is not reachable ({str(error).splitlines()[0]}); tracking offline in {self.folder}")
            self.wandb = wandb.init(**options, mode="offline", settings=wandb.Settings(silent=True))
        self.wandb_id = self.wandb.id

    def write(self, file: str, record: dict[str, Any]) -> None:
        """Append one object to ``file`` (metrics.jsonl, eval.jsonl, samples.jsonl)."""
        if not self.is_main:
            return
        with open(self.folder / file, "a") as f:
            f.write(json.dumps(_finite(record)) + "\n")
        if self.wandb is not None and file in ("metrics.jsonl", "eval.jsonl"):
            self._track("log", {k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def _track(self, method: str, *arguments, **named) -> None:
        """Tell wandb. Whatever becomes of it (its process killed, its server gone), the run goes on and is saved."""
        try:
            getattr(self.wandb, method)(*arguments, **named)
        except Exception as error:
            print(f"warning: wandb failed ({type(error).__name__}: {error}); no more tracking", flush=True)
            self.wandb = None

    def evaluation(self, result: dict[str, Any]) -> bool:
        """One evaluation: to eval.jsonl and the console. True, on all ranks, where it is the best by --best_metric."""
        self.write("eval.jsonl", result)
        self.scores[result["step"]] = result.get("eval/pass@1")
        self._say(
            f"eval after step {result['step']}: pass@1 {result['eval/pass@1']:.3f}  pass@{result['eval/samples']} "
            f"{result['eval/pass@k']:.3f}  length {result['eval/length_mean']:.1f}  "
            f"cut {result['eval/truncated_frac']:.0%}  ({result['eval/problems']} problems)"
        )
        if self.args.best_metric is None or result[self.args.best_metric] <= self.best:
            return False
        self.best = result[self.args.best_metric]
        return True

    def step(self, metrics: dict[str, Any], samples: list[Sample], batch: list[Problem]) -> None:
        """One step: metrics.jsonl, a few samples to samples.jsonl, one line and now and then a table to the console."""
        metrics = {k: v for k, v in metrics.items() if v is not None}
        self.write("metrics.jsonl", metrics)
        step, every = metrics["step"], max(1, len(samples) // max(1, self.args.log_samples))
        shown = samples[::every][: self.args.log_samples]
        for s in shown:
            row = {"step": step, "prompt": batch[s.prompt_id].messages[-1]["content"], "response": s.response}
            row |= {"truth": batch[s.prompt_id].truth, "reward": s.reward, "reward_parts": s.reward_parts}
            row |= {"extracted": s.extracted, "reward_status": s.reward_status}
            row |= {"advantage": s.advantage, "finish_reason": s.finish_reason, "weights_version": s.weights_version}
            self.write("samples.jsonl", row)
        self.zero_steps = 0 if any(s.score for s in samples) else self.zero_steps + 1
        if self.zero_steps and self.zero_steps % ZERO_STEPS == 0:
            self._say(explain_zeros(samples, batch, self.zero_steps))
        if not self.is_main:
            return
        remaining = (time.monotonic() - self.begun) / (step - self.first) * (self.total - step)
        short = {"generate": "gen", "score": "score", "logprobs": "logp", "update": "update", "push": "push"}
        show = lambda label, key, form: f"{label} {metrics[key]:{form}}" if key in metrics else None  # noqa: E731
        parts = [
            f"step {step}/{self.total}",
            show("reward", "reward/mean", ".3f"),
            show("kl", "kl/sequence", ".4f"),
            show("entropy", "policy/entropy", ".3f"),
            show("clip", "policy/clip_frac", ".3f"),
            f"len {metrics['completions/length_mean']:.1f} (cut {metrics['completions/truncated_frac']:.0%})",
            show("zero-std", "reward/zero_std_frac", ".0%"),
            show("|dlogp|", "sampler/logprob_diff_mean", ".1e"),
            " ".join(f"{name} {metrics[f'time/{p}']:.1f}s" for p, name in short.items() if f"time/{p}" in metrics),
            show("tok/s", "perf/tokens_per_second", ".0f"),
            f"left {int(remaining) // 3600}:{int(remaining) % 3600 // 60:02d}:{int(remaining) % 60:02d}",
        ]
        if metrics["optim/skipped"]:
            parts.append(f"SKIPPED {metrics['optim/skipped']}")
        if metrics["completions/truncated_frac"] == 1 and self.args.mask_truncated_completions:
            parts.append("ALL CUT, nothing to train on: raise --max_response_length")
        self._say(" | ".join(p for p in parts if p))
        if self.progress is not None:
            self.progress.update(self.bar, completed=step)
        if self.args.log_samples_every > 0 and (step == 1 or step % self.args.log_samples_every == 0):
            self._table(step, shown, batch)

    def _table(self, step: int, samples: list[Sample], batch: list[Problem]) -> None:
        rows = [
            (
                *(batch[s.prompt_id].messages[-1]["content"], s.response, batch[s.prompt_id].truth),
                *(f"{s.reward:.2f}", f"{s.advantage:+.2f}", s.finish_reason),
            )
            for s in samples
        ]
        if self.progress is None:
            for prompt, response, truth, reward, advantage, finish in rows:
                self._say(f"  {prompt!r} -> {response!r} | truth {truth} | {reward} | adv {advantage} | {finish}")
            return
        from rich.markup import escape
        from rich.table import Table

        table = Table("prompt", "response", "truth", "reward", "advantage", "ended", title=f"step {step}")
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        self.progress.console.print(table)

    def _say(self, text: str) -> None:
        if not self.is_main:
            return
        if self.progress is not None:
            self.progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def dump(self, file: str, samples: list[Sample]) -> None:
        """All samples of a batch, whole, for a look at what went wrong."""
        for sample in samples:
            self.write(file, {"step": -1, **dataclasses.asdict(sample)})

    def close(self) -> None:
        """Finish the bar and wandb, if they were on."""
        if self.is_main and self.progress is not None:
            self.progress.stop()
        if self.wandb is not None:
            self._track("finish")
        if self.is_main:
            self.lock.close()


def _finite(value: Any) -> Any:
    """NaN and infinities as null: JSON has no word for them."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value

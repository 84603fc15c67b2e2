"""Seconds until held-out accuracy reaches a stated value. docs/evidence/speedrun.md has the rules and the results.

    python studies/speedrun.py                        CPU track: sums, also negative ones, to pass@1 0.80, three seeds
    python studies/speedrun.py --track gpu            GPU track: GSM8K to greedy accuracy 0.55, three seeds
    python studies/speedrun.py --seeds 1 --flags="--num_unique_prompts_rollout 4"         an attempt with other flags

The clock starts before the script does and stops when the evaluation that reaches the target is on the disk: imports,
loading, every evaluation on the way are in it. Then the run is ended. Prints the row for docs/evidence/speedrun.md;
exit code 1 if a seed never reaches the target.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts are not a package

from runtime.arguments import flags
from runtime.system import git, process


@dataclass(frozen=True)
class Track:
    """Model, data and the metric of a speedrun."""

    title: str
    words: str
    target: float
    limit: float  # seconds after which a run has failed


TRACKS = {
    "cpu": Track(
        title="signed sums, held-out pass@1",
        words="--dataset 'reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1' "
        "--max_prompt_length 64 --max_response_length 32 --learning_rate 3e-5 --total_steps 48 --eval_every 4",
        target=0.80,
        limit=3600.0,
    ),
    "gpu": Track(
        title="GSM8K, Qwen2.5-0.5B-Instruct, greedy accuracy on 1,319 problems",
        words="--model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset openai/gsm8k:main "
        "--eval_dataset openai/gsm8k:main@test --eval_prompts 1319 --eval_temperature 0 --max_prompt_length 512 "
        "--max_response_length 512 --num_unique_prompts_rollout 32 --total_steps 200 --eval_every 20 "
        "--learning_rate 2e-6 --micro_batch_tokens 16384 --vllm_args '{\"max_num_seqs\": 512}'",
        target=0.55,
        limit=3600.0,
    ),
}

say = partial(print, flush=True)


@dataclass
class Args:
    track: Literal["cpu", "gpu"] = "cpu"
    """Which one of docs/evidence/speedrun.md."""
    script: str = "grpo.py"
    """The script that is timed: a copy of yours, for example."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """One run for each."""
    flags: str = ""
    """More flags for the script, in quotes; of a flag that the track gives, too, these count."""
    target: float | None = None
    """Another target than the track's: no row of docs/evidence/speedrun.md, but a way to try."""
    keep: str | None = None
    """Keep the folders of the runs in this folder."""


def evaluations(folder: Path) -> list[dict]:
    """Return the complete lines of a run's eval.jsonl."""
    path = folder / "eval.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def end(run: subprocess.Popen) -> None:
    """End a run and all it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def time_to_target(line: list[str], folder: Path, target: float, limit: float) -> tuple[float | None, list[dict]]:
    """(seconds until an evaluation reaches ``target``, or None; all evaluations with their seconds)."""
    found: list[dict] = []
    started = time.perf_counter()
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        run = subprocess.Popen(line, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
        try:
            while True:
                over = run.poll() is not None
                seconds = time.perf_counter() - started
                for row in evaluations(folder)[len(found) :]:
                    found.append({"seconds": seconds, "step": row["step"], "pass@1": row["eval/pass@1"]})
                    say(f"  {seconds:7.1f} s   step {row['step']:3d}   pass@1 {row['eval/pass@1']:.3f}")
                    if row["eval/pass@1"] >= target:
                        return seconds, found
                if over or seconds > limit:
                    return None, found
                time.sleep(0.02)
        finally:
            end(run)


def gpus() -> list[str]:
    """Return the names of this machine's GPUs."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return asked.stdout.splitlines() if asked.returncode == 0 else []


def hardware() -> str:
    """Describe the machine: its GPUs, or its cores and processor."""
    names = gpus()
    if names:
        return f"{len(names)} x {names[0]}"
    model = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = model[0].partition(": ")[2] if model else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores, {name}"


def check(args: Args) -> None:
    """Reject what cannot be run; exit code 2."""
    if not (ROOT / args.script).is_file():
        process.refuse(f"--script {args.script}: no such file in {ROOT}")
    if not args.seeds:
        process.refuse("--seeds: give at least one")
    if args.track == "gpu" and not gpus():
        process.refuse("--track gpu: nvidia-smi finds no GPU here; --track cpu runs anywhere")


def main(args: Args) -> int:
    check(args)
    track = TRACKS[args.track]
    target = track.target if args.target is None else args.target
    words = [*shlex.split(track.words), *shlex.split(args.flags)]
    say(f"{track.title}, target {target}\npython {args.script} {shlex.join(words)} --seed SEED")
    say(f"{hardware()}; load {os.getloadavg()[0]:.1f} from other programs")
    taken: list[float | None] = []
    with tempfile.TemporaryDirectory(prefix="speedrun-") as scratch:
        out = Path(args.keep or scratch).resolve()
        out.mkdir(parents=True, exist_ok=True)
        for seed in args.seeds:
            name = f"seed-{seed}"
            say(f"seed {seed}")
            line = [sys.executable, str(ROOT / args.script), *words, "--seed", str(seed), "--output_dir", str(out)]
            line += ["--run_name", name, "--overwrite"]
            seconds, _ = time_to_target(line, out / name, target, track.limit)
            taken.append(seconds)
            if seconds is None:
                tail = (out / f"{name}.log").read_text().splitlines()[-5:]
                say("  not reached; the log ends:\n    " + "\n    ".join(tail))
    shown = [f"{s:.0f}" if s is not None else "not reached" for s in taken]
    whole = f"{median(taken):.0f}" if None not in taken else "–"
    commit = git.state(ROOT).get("commit", "no repository")[:10]
    say(f"\n| {whole} | {', '.join(shown)} | {hardware()} | `{args.flags}` | {commit} | {time.strftime('%Y-%m-%d')} |")
    return 1 if None in taken else 0


if __name__ == "__main__":
    sys.exit(main(flags.parse(Args, __doc__)))

"""Runs on the test bed that are judged by what they learned, of the scripts as they are or of an edited copy.

An edit is (file, text, text in its place). Each text must occur exactly once in its file, so an edit that no longer
applies is an error and not a success. Runs train the model of studies/pretrain_tiny.py.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import fork_server

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models" / "testbed-1"
SUMS = "reasoning_gym:chain_sum?min_terms=2&max_terms=3&min_digits=1&max_digits=1"
STEPS = 40
# --max_logprob_diff 0 takes away the guard that ends a run with stale weights: the doctor has to notice by itself.
FLAGS = {
    "model_name_or_path": str(MODEL),
    "dataset": SUMS,
    "dtype": "float32",
    "total_steps": STEPS,
    "num_unique_prompts_rollout": 8,
    "num_samples_per_prompt_rollout": 16,
    "max_response_length": 32,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "max_logprob_diff": 0,
    "eval_prompts": 128,
    "eval_samples": 4,
    "vllm_args": '{"kv_cache_memory_bytes": 107374182}',
    "log_samples": 128,
    "save_minutes": 0,
}
SCRIPT_FLAGS = {
    "grpo.py": {},
    "ppo.py": {"gamma": 0.9, "gae_lambda": 0.9, "critic_learning_rate": 1e-3},
}
# A course is what a run is for, and what it is judged by. earn: without a KL, to solve the task. hold: with so strong a
# pull to the reference that the reward cannot carry the policy far away.
COURSE_FLAGS = {"earn": {}, "hold": {"beta": 1.0}}
LEAST_PASS = 0.65  # pass@1 on held-out problems at the end
# Of the responses of the last ten steps: the habit that the first token decides. ppo.py breaks it more slowly.
MOST_GUESSES = {"grpo.py": 0.05, "ppo.py": 0.1}
LEAST_EXPLAINED = 0.5  # of the variance of the returns, by the critic, mean of the last ten steps
MOST_KL = 0.8  # nats per sequence, mean of the last ten steps


Edits = tuple[tuple[str, str, str], ...]


def edited(files: dict[str, str], edits: Edits) -> dict[str, str]:
    """The texts of the files that edits change. Raises LookupError where one does not apply exactly once."""
    changed = {}
    for name, text, other in edits:
        before = changed.get(name, files[name])
        if before.count(text) != 1:
            raise LookupError(f"{name} has {before.count(text)} times {text!r}, must have it once; adapt the edit")
        changed[name] = before.replace(text, other)
    return changed


def project_files(root: Path) -> dict[str, str]:
    """The files that a run imports or reads, by their path in the project."""
    paths = [
        *root.glob("*.py"),
        *root.glob("graders/**/*.py"),
        *root.glob("runtime/**/*.py"),
        *root.glob("runtime/**/*.toml"),
        *root.glob("runtime/**/*.tsv"),
    ]
    return {str(path.relative_to(root)): path.read_text() for path in paths}


@dataclass(frozen=True)
class Run:
    """Result of a run: its exit code, the end of its output, its metrics and its evaluations."""

    code: int
    output: str
    metrics: list[dict]
    evaluations: list[dict]
    samples: list[dict]

    def last(self, name: str, steps: int = 10) -> float:
        """The mean of a metric over the last steps; NaN where it was not logged, which meets no bound."""
        values = [step[name] for step in self.metrics[-steps:] if step.get(name) is not None]
        return sum(values) / len(values) if values else math.nan

    def guesses(self, steps: int = 10) -> float:
        """The fraction of the last steps' responses whose first token is the guessing habit's."""
        last = [s["response"] for s in self.samples if s["step"] > len(self.metrics) - steps]
        return sum(response.startswith("~") for response in last) / len(last) if last else math.nan


def run_copy(files: dict[str, str], script: str, flags: dict[str, object], folder: Path) -> tuple[int, str]:
    """Write files to a folder and run a script of them in a process of its own: (exit code, what it printed)."""
    for path, text in files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    line = [str(folder / script)]
    for flag, value in {**flags, "output_dir": folder / "runs", "run_name": "run"}.items():
        line += [f"--{flag}", str(value)]
    environment = os.environ | {"WANDB_MODE": "disabled"}
    (code,), text = fork_server.run(line, folder / "log", environment, 600, cwd=folder, vllm="hf" not in line)
    return code, text


def run(script: str, course: str, seed: int) -> Run:
    """Run a script of a copy of the project."""
    with tempfile.TemporaryDirectory() as name:
        flags = FLAGS | SCRIPT_FLAGS[script] | COURSE_FLAGS[course] | {"seed": seed}
        code, text = run_copy(project_files(ROOT), script, flags, Path(name))
        left = []
        for file in ("metrics.jsonl", "eval.jsonl", "samples.jsonl"):
            path = Path(name, "runs", "run", file)
            left.append([json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else [])
    return Run(code, text[-4000:], *left)


def complaints(found: Run, script: str, course: str) -> list[str]:
    """List the problems of a run, judged by its learning; empty for a healthy one."""
    if found.code != 0:
        return [f"exit code {found.code}: {found.output[-1000:]}"]
    if course == "hold":
        drift = found.last("kl/sequence")
        return [] if drift <= MOST_KL else [f"{drift:.2f} nats from the reference, must be at most {MOST_KL}"]
    wrong = []
    reached = found.evaluations[-1]["eval/pass@1"]
    if not reached >= LEAST_PASS:
        wrong.append(f"pass@1 {reached:.2f} at the end, must be at least {LEAST_PASS}")
    if not found.guesses() <= MOST_GUESSES[script]:
        wrong.append(f"{found.guesses():.3f} of the responses are guesses, must be at most {MOST_GUESSES[script]}")
    if script == "ppo.py":
        explained = found.last("value/explained_variance")
        if not explained >= LEAST_EXPLAINED:
            wrong.append(f"the critic explains {explained:.2f} of the returns, must be at least {LEAST_EXPLAINED}")
    return wrong

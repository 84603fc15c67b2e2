"""Breaks copies of the scripts in ways that leave shapes and losses healthy, and judges by learning alone.

    python tests/broken_scripts.py                 every breakage on every script, a line each
    python tests/broken_scripts.py --healthy 20    so many runs of the unbroken scripts, with the seeds 1 to 20

A breakage is a list of edits (file, text, text in its place) in BREAKAGES. Each text must occur exactly once in its
file, so an edit that no longer applies is an error and not a success. Runs train the model of studies/pretrain_tiny.py.
"""

from __future__ import annotations

import argparse
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
# --max_logprob_diff 0 takes away the guard that ends a run with stale weights: learning has to notice by itself.
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


@dataclass(frozen=True)
class Breakage:
    """A bug as edits of files; ``{script}`` stands for the script under test."""

    what: str
    edits: tuple[tuple[str, str, str], ...]
    scripts: tuple[str, ...] = ("grpo.py", "ppo.py")
    course: str = "earn"


BREAKAGES = (
    Breakage(
        "sign of the advantage",
        (
            ("{script}", "unclipped_T = -t.advantages_T * ratio_T\n", "unclipped_T = t.advantages_T * ratio_T\n"),
            ("{script}", "clipped_T = -t.advantages_T * ratio_T.clamp(", "clipped_T = t.advantages_T * ratio_T.clamp("),
        ),
    ),
    Breakage(
        "log-probs of the next token",  # exchanged alone, the neighbours would have the credit: it learns
        (
            (
                "utils.py",
                "[hidden_UD[piece], batch.targets[piece], ",
                "[hidden_UD[piece], batch.targets[piece].roll(-1), ",
            ),
            ("utils.py", "    if difference < limit:\n", "    if True:\n"),
        ),
    ),
    Breakage(
        "stale weights: only the first push arrives",
        (("{script}", "push_weights(llm, ", "version == 1 and push_weights(llm, "),),
    ),
    Breakage(
        "mask off by one: the first token is left out",
        (
            (
                "{script}",
                "    return torch.tensor(weights).repeat_interleave(torch.tensor(lengths))\n",
                "    first = torch.tensor([0, *lengths[:-1]]).cumsum(0)\n"
                "    return torch.tensor(weights).repeat_interleave(torch.tensor(lengths)).index_fill(0, first, 0.0)\n",
            ),
        ),
    ),
    Breakage(
        "reward of another sample",
        (
            (
                "rewards.py",
                "in zip(samples, found, judged, strict=True):\n            shape_reward(",
                "in zip(samples, found[1:] + found[:1], judged, strict=True):\n            shape_reward(",
            ),
        ),
    ),
    Breakage(
        "ratio inverted",
        (
            (
                "{script}",
                "    ratio_T = (t.logprobs_T - t.old_T).clamp(-20, 20).exp()\n",
                "    ratio_T = (t.old_T - t.logprobs_T).clamp(-20, 20).exp()\n",
            ),
        ),
    ),
    Breakage(
        "sign of the KL",
        (("{script}", "loss_T = loss_T + beta * kl_T\n", "loss_T = loss_T - beta * kl_T\n"),),
        course="hold",
    ),
    Breakage(
        "learning rate 0",
        (
            (
                "{script}",
                "deepspeed_zero.set_learning_rate(policy, lr)\n",
                "deepspeed_zero.set_learning_rate(policy, 0.0)\n",
            ),
        ),
    ),
    Breakage(
        "groups mixed up",
        (
            (
                "{script}",
                "rewards_PG = torch.tensor([s.reward for s in samples], dtype=torch.float64).view(prompts, group)",
                "rewards_PG = torch.tensor([s.reward for s in samples], dtype=torch.float64).view(group, prompts).T",
            ),
        ),
        ("grpo.py",),
    ),
    Breakage(
        "critic targets shifted by a token",
        (
            (
                "{script}",
                "targets_N = F.pad(normalizer.normalize(returns_N).float(), (0, 1)).to(device)",
                "targets_N = F.pad(normalizer.normalize(returns_N).float().roll(1), (0, 1)).to(device)",
            ),
        ),
        ("ppo.py",),
    ),
)
CASES = [(breakage, script) for breakage in BREAKAGES for script in breakage.scripts]


def edited(files: dict[str, str], breakage: Breakage, script: str) -> dict[str, str]:
    """The texts of the files that a breakage changes. Raises LookupError where an edit does not apply exactly once."""
    changed = {}
    for file, text, other in breakage.edits:
        name = file.format(script=script)
        before = changed.get(name, files[name])
        if before.count(text) != 1:
            raise LookupError(
                f"{breakage.what!r}: {name} has {before.count(text)} times {text!r}, must have it once; "
                f"adapt BREAKAGES in tests/broken_scripts.py"
            )
        changed[name] = before.replace(text, other)
    return changed


def project_files(root: Path) -> dict[str, str]:
    """The files that a run imports or reads, by their path in the project."""
    paths = [
        *root.glob("*.py"),
        *root.glob("graders/**/*.py"),
        *root.glob("runtime/**/*.py"),
        *root.glob("runtime/**/*.toml"),
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


def run(script: str, course: str, seed: int, breakage: Breakage | None = None) -> Run:
    """Run a script of a copy of the project that is broken in this way."""
    files = project_files(ROOT)
    if breakage is not None:
        files |= edited(files, breakage, script)
    with tempfile.TemporaryDirectory() as name:
        flags = FLAGS | SCRIPT_FLAGS[script] | COURSE_FLAGS[course] | {"seed": seed}
        code, text = run_copy(files, script, flags, Path(name))
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


def summary(found: Run) -> str:
    """The numbers that complaints() judges, and the seconds of a step."""
    if found.code != 0:
        return f"exit code {found.code}"
    first, last = (found.evaluations[i]["eval/pass@1"] for i in (0, -1))
    seconds = sorted(step["time/step"] for step in found.metrics)
    return (
        f"pass@1 {first:.3f} -> {last:.3f}  reward {found.last('reward/mean'):.3f}  "
        f"guesses {found.guesses():.3f}  "
        f"KL {found.last('kl/sequence'):.3f}  explained {found.last('value/explained_variance'):.3f}  "
        f"{seconds[len(seconds) // 2]:.2f} s a step"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--healthy", type=int, default=0, help="run the unbroken scripts with so many seeds instead")
    parser.add_argument("--first_seed", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a name that is printed, for example 'hold'")
    parser.add_argument("--script", choices=list(SCRIPT_FLAGS), help="run this script only (default: all)")
    args = parser.parse_args()
    cases = [(breakage, script, breakage.course, args.first_seed) for breakage, script in CASES]
    if args.healthy:
        seeds = range(args.first_seed, args.first_seed + args.healthy)
        cases = [(None, script, course, seed) for seed in seeds for script in SCRIPT_FLAGS for course in COURSE_FLAGS]
    surprises = 0
    for breakage, script, course, seed in cases:
        what = breakage.what if breakage else f"healthy, {course}"
        if args.script not in (None, script) or args.only not in what:
            continue
        found = run(script, course, seed, breakage)
        wrong = complaints(found, script, course)
        surprises += bool(wrong) == (breakage is None)
        print(f"{script} seed {seed}  {what}: {summary(found)}  [{'; '.join(wrong) or 'learns'}]", flush=True)
    print(f"{surprises} surprises")
    return int(surprises > 0)


if __name__ == "__main__":
    raise SystemExit(main())

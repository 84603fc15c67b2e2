"""The programs that read a run, on one of 100,000 steps and a gigabyte of samples: in seconds, in bounded memory."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

STEPS = 100_000
SAMPLES = 4  # a step
LETTERS = 2_300  # of a response
SECONDS, MEGABYTES = 120, 1_500  # of CPU time, of memory: what each program may take at most

RESUME = """
import sys
from pathlib import Path
from runtime.run import directory
folder = Path(sys.argv[1])
assert directory.last_step(folder / "metrics.jsonl") == 100_000
for name in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
    directory.cut_back(folder / name, 99_990)
    assert directory.last_step(folder / name) == 99_990
print("ended where it was cut")
"""
VERDICT = """
import sys
from pathlib import Path
from runtime.run import verdict
print(verdict.write(Path(sys.argv[1]), 100_000))
"""
# What each of them must have printed.
SAID = {
    "plot.py": "pass@1   0.250 -> 0.500",
    "report.py": "no finding by 12 rules",
    "verdict": "verdict    learned",
    "resume": "ended where it was cut",
}


def step_line(step: int, noise: random.Random) -> str:
    """The metrics of a run that learns: those that are read, and forty others."""
    progress = 1 - math.exp(-step / 15)
    correct = 0.3 + 0.4 * progress + noise.gauss(0, 0.04)
    numbers = {
        "reward/mean": correct,
        "reward/correct": correct,
        "reward/zero_std_frac": 0.1 + 0.3 * progress,
        "completions/length_mean": 20 + noise.gauss(0, 1),
        "completions/truncated_frac": 0.02,
        "policy/entropy": 0.4 - 0.25 * progress,
        "optim/lr": 1e-4,
        "optim/steps": 1,
        "optim/skipped": 0,
        "optim/grad_norm": math.exp(noise.gauss(0, 0.3)),
        "sampler/logprob_diff_mean": 2e-3,
        "time/step": 1.0,
        "time/generate": 0.7,
        "time/update": 0.2,
    }
    numbers |= {f"kl/number_{i}": noise.random() for i in range(40)}
    return json.dumps({"step": step, "episode": 128 * step} | numbers)


def write_giant(folder: Path) -> None:
    """A run with that many steps, some samples of each, and an evaluation every thousand steps."""
    noise = random.Random(0)
    text = "".join(noise.choices("the answer is 0123456789 ", k=2 * LETTERS))
    rest = {"prompt": text[:200], "truth": "4", "reward": 1.0, "reward_parts": {"correct": 1.0, "format": 1.0}}
    rest |= {"extracted": "4", "reward_status": "ok", "advantage": 0.5, "finish_reason": "stop"}
    end = json.dumps(rest)[1:]
    with open(folder / "metrics.jsonl", "w") as metrics, open(folder / "samples.jsonl", "w") as samples:
        for step in range(1, STEPS + 1):
            metrics.write(step_line(step, noise) + "\n")
            for number in range(SAMPLES):
                place = (step + 7 * number) % LETTERS
                samples.write(f'{{"step": {step}, "response": "{text[place : place + LETTERS]}", {end}\n')
    with open(folder / "eval.jsonl", "w") as evaluations:
        for step in (*range(0, STEPS, 1000), STEPS - 10, STEPS):
            right = 2 if step else 1
            scores = {"eval/pass@1": right / 4, "eval/samples": 4, "eval/problems": 64, "eval/right": [right] * 64}
            evaluations.write(json.dumps({"step": step} | scores) + "\n")
    args = {"num_unique_prompts_rollout": 8, "num_samples_per_prompt_rollout": 16, "max_response_length": 64}
    (folder / "config.json").write_text(json.dumps({"args": args, "command": ["grpo.py"]}))


def measured(line: list[str]) -> tuple[float, float, str]:
    """(seconds of CPU time, MB of memory at most, what it printed) of a program that must end well."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as child:
        printed = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, printed
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, printed


@pytest.mark.slow
def test_a_giant_run_is_read_in_bounded_memory(tmp_path):
    """And resumed: its lines are counted and cut one by one."""
    write_giant(tmp_path)
    assert (tmp_path / "samples.jsonl").stat().st_size > 1e9
    programs = {name: [str(ROOT / "scripts" / name), str(tmp_path)] for name in ("plot.py", "report.py")}
    programs["verdict"] = ["-c", VERDICT, str(tmp_path)]
    programs["resume"] = ["-c", RESUME, str(tmp_path)]
    found = {}
    for name, line in programs.items():
        seconds, memory, printed = measured([sys.executable, *line])
        found[name] = (seconds, memory)
        print(f"{name}: {seconds:.0f} s of CPU time, {memory:.0f} MB")
        assert SAID[name] in printed, printed
    assert all(seconds < SECONDS and memory < MEGABYTES for seconds, memory in found.values()), found

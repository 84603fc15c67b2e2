"""Random whole runs against double precision (tests/random_runs.py) agree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import random_runs
from helpers import ROOT


def compared(out: Path, *words: str) -> tuple[int, list[dict]]:
    """(exit code, lines of the output) of the program."""
    line = [sys.executable, "tests/random_runs.py", "--out", str(out), *words]
    environment = os.environ | {"WANDB_MODE": "disabled"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert out.exists(), done.stderr[-2000:]
    return done.returncode, [json.loads(text) for text in out.read_text().splitlines()]


def test_plans_follow_from_their_numbers_and_reach_every_kind():
    plans = [random_runs.draw(1, number) for number in range(200)]
    assert plans[7] == random_runs.draw(1, 7) != random_runs.draw(2, 7)
    kinds = {kind for plan in plans for kind in plan.kinds}
    assert {"environment", "vLLM", "asynchronous", "two ranks", "resumed", "other ranks after resuming", "KL"} <= kinds


def test_a_table_names_each_disagreement():
    line = {"number": 3, "kinds": ["all"], "agrees": False, "reason": "loss: not explained", "errors": {"loss": 0.5}}
    text = random_runs.table([line, line | {"number": 4, "agrees": True, "errors": {"loss": 1e-6}}])
    assert "| all | 2 | 1 |" in text and "run 3: loss: not explained" in text and "| loss | 1e-04 | 1.0e-06 |" in text


@pytest.mark.slow
def test_random_runs_agree_with_double_precision(tmp_path):
    code, lines = compared(tmp_path / "runs.jsonl", "--runs", "10", "--seed", "2")
    assert (code, len(lines)) == (0, 10) and all(line["agrees"] for line in lines)

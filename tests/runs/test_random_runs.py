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


@pytest.mark.slow
def test_random_runs_agree_with_double_precision(tmp_path):
    code, lines = compared(tmp_path / "runs.jsonl", "--runs", "10", "--seed", "2")
    assert (code, len(lines)) == (0, 10) and all(line["agrees"] for line in lines)

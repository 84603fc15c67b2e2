"""scripts/eval_base.py: what it says of samples, by hand, and of a model."""

from __future__ import annotations

import sys

import eval_base
import pytest
from helpers import ROOT, TINY_RUN, run_to_end

from runtime.data.samples import Sample


def sample(prompt: int, number: int, length: int, score: float, reason: str = "stop") -> Sample:
    found = Sample(prompt, number, [1], [5] * length, [0.0] * length, reason, [(0, 0)])
    found.score = found.reward = score
    return found


def test_what_is_said_of_samples():
    """A response that is longer than the run allows counts as wrong, and may be all that a group has."""
    samples = [sample(0, k, 10, float(k == 0)) for k in range(4)]  # a signal
    samples += [sample(1, k, 20, 1.0) for k in range(4)]  # all right
    samples += [sample(2, k, 40, float(k == 0)) for k in range(4)]  # right, but too long for the run
    samples += [sample(3, k, 64, 0.0, "length") for k in range(4)]
    text = "\n".join(eval_base.describe(samples, 32, 64))
    assert "4 prompts, 16 responses of at most 64 tokens" in text
    assert "50 % have at most 20 tokens, 95 % at most 64; 25% did not end" in text
    assert "pass@1     0.312 within --max_response_length 32" in text  # 5 of 16
    assert "signal     25% of the groups" in text
    assert "more than 64 tokens are wanted" in text
    assert eval_base.describe(samples[:12], 32, 64)[-1].endswith("--max_response_length 48 would hold 95 % of them")
    assert eval_base.describe(samples[:8], 32, 64)[-1].startswith("signal")


def test_no_group_is_counted_where_there_is_none():
    """ppo.py with one sample per prompt, and a critic at any number of them."""
    alone = [sample(p, 0, 10, float(p % 2)) for p in range(4)]
    grouped = [sample(0, k, 10, 1.0) for k in range(4)]
    assert not any(line.startswith("signal") for line in eval_base.describe(alone, 32, 64))
    assert not any(line.startswith("signal") for line in eval_base.describe(grouped, 32, 64, critic=True))
    assert any(line.startswith("signal     0%") for line in eval_base.describe(grouped, 32, 64))


@pytest.mark.parametrize(("part", "expected"), [(0.5, 2), (0.95, 4), (0.25, 1), (0.26, 2), (1.0, 4)])
def test_quantiles(part, expected):
    assert eval_base.quantile([4, 2, 1, 3], part) == expected


@pytest.mark.slow
def test_a_model_is_asked(tiny, tmp_path):
    """The first prompts of the run, a group each; nothing is written."""
    words = ["--model_name_or_path", str(tiny), "--output_dir", str(tmp_path / "runs"), "--rollout", "hf"]
    for name in ("dataset", "dtype", "max_response_length", "max_prompt_length", "verifier", "eval_prompts"):
        words += [f"--{name}", str(TINY_RUN[name])]
    line = [sys.executable, str(ROOT / "scripts" / "eval_base.py"), "grpo.py", *words]
    code, text = run_to_end(line, tmp_path / "log")
    assert code == 0, text
    assert "32 prompts, 256 responses of at most 16 tokens" in text and "memory     at most" in text
    assert not (tmp_path / "runs").exists()

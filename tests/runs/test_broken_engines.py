"""Ten ways to break an engine, each named in the first step after it, in every mode; whole engines never."""

from __future__ import annotations

import json
import re

import broken_engines
import pytest
from broken_engines import STEPS, WAYS, Breaker, judge
from helpers import ONE_ENGINE, ROOT, command, run_here, run_to_end, tiny_args

import grpo
from runtime.arguments import checks

CHANGES = {"total_steps": STEPS, "learning_rate": 1e-2, "lr_scheduler_type": "constant", "eval_prompts": 0}
CHANGES |= {"save_every": 0, "max_response_length": 6}
MODES = {
    "sync": {},
    "off": {"async_steps": 1},
    "recompute": {"async_steps": 1, "inflight_updates": "recompute"},
    "keep": {"async_steps": 1, "inflight_updates": "keep"},
}


@pytest.mark.integration
@pytest.mark.parametrize(
    "mode",
    [
        "sync",
        pytest.param("off", marks=pytest.mark.slow),
        pytest.param("recompute", marks=pytest.mark.slow),
        pytest.param("keep", marks=pytest.mark.slow),
    ],
)
def test_ten_broken_engines_are_named_within_one_step(tiny, tmp_path, monkeypatch, mode):
    """With --rollout hf, whose thread takes weights between batches only; what is compared is that of the mode."""
    monkeypatch.setattr(checks, "check_asynchrony", lambda args: None)
    breaker = Breaker(grpo, monkeypatch.setattr)
    with pytest.raises(RuntimeError) as end:
        run_here(tiny_args(tiny, tmp_path, **CHANGES, **MODES[mode]))
    found = judge(breaker.named, f"{end.value} {end.value.__cause__}")
    assert list(found) == [way.__name__ for way in WAYS]
    for way, words in found.items():
        print(f"{mode:10} {way:18} {words[:90]}")


def test_a_check_that_sees_nothing_fails_here():
    """One way that is not named, and one name too many."""
    with pytest.raises(AssertionError, match="stale was not named"):
        judge({}, "nan")
    named = {2 * number + 1: "" for number in range(1, len(WAYS))}
    with pytest.raises(AssertionError, match="a whole engine was named"):
        judge(named | {2: ""}, "nan")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [*MODES, "dedicated", "dedicated keep"])
def test_ten_broken_vllm_engines_are_named_within_one_step(tiny, tmp_path, mode):
    """One engine, which meets all ten."""
    apart = mode.startswith("dedicated")
    changes = CHANGES | MODES.get(mode.removeprefix("dedicated").strip() or "off", {})
    words = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
    words += ONE_ENGINE if apart else ()
    line = command(tiny, tmp_path, *words, ranks=1 + apart, rollout="vllm")
    place = line.index(str(ROOT / "grpo.py"))
    line.insert(place, broken_engines.__file__)
    code, text = run_to_end(line, tmp_path / "log", 600)
    assert code == 1, text
    named, end = json.loads(re.search(r"^NAMED (.*)$", text, re.MULTILINE)[1])
    for way, words in judge({int(step): words for step, words in named.items()}, end).items():
        print(f"{mode:10} {way:18} {words[:110]}")

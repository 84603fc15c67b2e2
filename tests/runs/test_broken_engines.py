"""Ten ways to break an engine, each named in the first step after it, in every mode; whole engines never.

The push after every second step is broken in the next way, the one after it is whole again. The check is made to note
what it would have ended the run for. Everything else is the run's own: engine, messages, weights, log-probs.
"""

from __future__ import annotations

import math

import pytest
from helpers import run_here, tiny_args

import grpo
import utils
from runtime.arguments import checks

Weights = list
KEYS, VALUES = (f"layers.0.self_attn.{name}_proj." for name in "kv")


def renamed(weights: Weights, one: str, other: str) -> Weights:
    """The weights with two parts of names exchanged."""
    swap = [(name.replace(one, "?").replace(other, one).replace("?", other), weight) for name, weight in weights]
    places = [name for name, _ in weights]
    return sorted(swap, key=lambda pair: places.index(pair[0]))


def tied_head(now: Weights, before: Weights, _) -> Weights:
    """The head keeps the weights of the last push."""
    old = dict(before)
    return [(name, old[name] if name == "lm_head.weight" else weight) for name, weight in now]


def another_tokenizer(now: Weights, *_) -> Weights:
    """The engine's vocabulary has another order."""
    return [(name, weight.flip(0) if "embed" in name or "lm_head" in name else weight) for name, weight in now]


def nan_in_one(now: Weights, *_) -> Weights:
    """A number of one matrix is NaN."""
    broken = [(name, weight.clone()) for name, weight in now]
    dict(broken)["model.layers.1.mlp.down_proj.weight"][3, 5] = math.nan
    return broken


# Name -> what the engine gets of (the weights now, those of the push before, the first ones).
WAYS = {
    "stale": lambda now, before, first: before,
    "half pushed": lambda now, before, first: before[: len(now) // 2] + now[len(now) // 2 :],
    "layers exchanged": lambda now, before, first: renamed(now, "layers.0.", "layers.1."),
    "bf16": lambda now, before, first: [(name, weight.bfloat16().to(weight.dtype)) for name, weight in now],
    "tied head": tied_head,
    "temperature": lambda now, before, first: now,  # ``ask`` does it
    "another tokenizer": another_tokenizer,
    "nothing was trained": lambda now, before, first: first,
    "keys and values exchanged": lambda now, before, first: renamed(now, KEYS, VALUES),
    "NaN": nan_in_one,  # it ends a run wherever it is met, so it comes last
}
MODES = {
    "sync": {},
    "off": {"async_steps": 1},
    "recompute": {"async_steps": 1, "inflight_updates": "recompute"},
    "keep": {"async_steps": 1, "inflight_updates": "keep"},
}


class Breaker:
    """The hooks in grpo.py, and the steps in which the check would have ended the run."""

    def __init__(self, monkeypatch):
        self.pushes = 0  # the first is before step 1
        self.step = 0
        self.way = ""
        self.before: Weights = []
        self.first: Weights = []
        self.named: dict[int, str] = {}
        self.plain = {name: getattr(utils, name) for name in ("engine_weights", "check_engines", "check_sampler")}
        self.plain_ask = grpo.Engine.ask
        for name in self.plain:
            monkeypatch.setattr(utils, name, getattr(self, name))
        monkeypatch.setattr(grpo.Engine, "ask", lambda engine, *given, **more: self.ask(engine, *given, **more))

    def engine_weights(self, policy, args) -> Weights:
        """Return the weights that the script is about to push, broken after every second step."""
        now = self.plain["engine_weights"](policy, args)
        before, self.before = self.before, [(name, weight.detach().clone()) for name, weight in now]
        self.first = self.first or self.before
        number, odd = divmod(self.pushes, 2)  # pushes so far = steps so far
        self.pushes += 1
        self.way = list(WAYS)[number - 1] if 0 < number <= len(WAYS) and not odd else ""
        return WAYS[self.way](now, before, self.first) if self.way else now

    def ask(self, engine, problems, requests, sampling, *rest):
        """Forward the script's requests to its engine."""
        if self.way == "temperature":
            sampling = sampling | {"temperature": 1.3 * sampling["temperature"]}
        return self.plain_ask(engine, problems, requests, sampling, *rest)

    def check_engines(self, policy, engine, samples, trained, step, args, run):
        """The script's check at the beginning of a step."""
        self.step = step
        return self.plain["check_engines"](policy, engine, samples, trained, step, args, run)

    def check_sampler(self, *given) -> None:
        """The check itself: note what it finds."""
        try:
            self.plain["check_sampler"](*given)
        except RuntimeError as error:
            self.named[self.step] = str(error)


@pytest.mark.integration
@pytest.mark.parametrize("mode", ["sync", *(pytest.param(name, marks=pytest.mark.slow) for name in list(MODES)[1:])])
def test_ten_broken_engines_are_named_within_one_step(tiny, tmp_path, monkeypatch, mode):
    """With --rollout hf, whose thread takes weights between batches only; what is compared is that of the mode."""
    monkeypatch.setattr(checks, "check_asynchrony", lambda args: None)
    monkeypatch.setattr(checks, "NEEDS_VLLM", {})
    breaker = Breaker(monkeypatch)
    changes = {"total_steps": 2 * len(WAYS) + 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    changes |= {"save_every": 0, "max_response_length": 6}
    with pytest.raises(RuntimeError) as end:
        run_here(tiny_args(tiny, tmp_path, **changes, **MODES[mode]))
    assert list(breaker.named) == [2 * number + 1 for number in range(1, len(WAYS))], breaker.named
    words = f"{end.value} {end.value.__cause__}".lower()
    assert "nan" in words or "not finite" in words

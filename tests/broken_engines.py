"""Ten ways to break an engine while it runs, and which of its steps the sampler's check names.

    python tests/broken_engines.py SCRIPT.py ARGUMENTS...     one run that meets all ten; what was named, as JSON

The push after every second step is broken in the next way, the one after it is whole again. The check is made to note
what it would have ended the run for. Everything else is the run's own: engine, messages, weights, log-probs.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
Weights = list


def stale(now: Weights, before: Weights, first: Weights) -> Weights:
    """The push does not arrive."""
    return before


def half_pushed(now: Weights, before: Weights, first: Weights) -> Weights:
    """Half of the tensors arrive."""
    return before[: len(now) // 2] + now[len(now) // 2 :]


def wrong_layer(now: Weights, before: Weights, first: Weights) -> Weights:
    """Two layers are exchanged."""
    return renamed(now, "layers.0.", "layers.1.")


def other_dtype(now: Weights, before: Weights, first: Weights) -> Weights:
    """The engine keeps its weights in bf16."""
    return [(name, weight.bfloat16().to(weight.dtype)) for name, weight in now]


def tied_head(now: Weights, before: Weights, first: Weights) -> Weights:
    """The head keeps the weights of the last push."""
    old = dict(before)
    return [(name, old[name] if name == "lm_head.weight" else weight) for name, weight in now]


def another_tokenizer(now: Weights, before: Weights, first: Weights) -> Weights:
    """The engine's vocabulary has another order."""
    return [(name, weight.flip(0) if "embed" in name or "lm_head" in name else weight) for name, weight in now]


def dead_lora(now: Weights, before: Weights, first: Weights) -> Weights:
    """Return the first weights, as if nothing had been trained."""
    return first


def swapped_names(now: Weights, before: Weights, first: Weights) -> Weights:
    """Keys and values of a layer are exchanged."""
    return renamed(now, "layers.0.self_attn.k_proj.", "layers.0.self_attn.v_proj.")


def nan_in_one(now: Weights, before: Weights, first: Weights) -> Weights:
    """A number of one matrix is NaN."""
    broken = [(name, weight.clone()) for name, weight in now]
    dict(broken)["model.layers.1.mlp.down_proj.weight"][3, 5] = math.nan
    return broken


def wrong_temperature(now: Weights, before: Weights, first: Weights) -> Weights:
    """The weights are right; ``Breaker.ask`` does it."""
    return now


# NaN ends a run wherever it is met, so it comes last.
WAYS = (stale, half_pushed, wrong_layer, other_dtype, tied_head, wrong_temperature, another_tokenizer, dead_lora)
WAYS += (swapped_names, nan_in_one)
STEPS = 2 * len(WAYS) + 2


def renamed(weights: Weights, one: str, other: str) -> Weights:
    """The weights with two parts of names exchanged."""
    swap = [(name.replace(one, "?").replace(other, one).replace("?", other), weight) for name, weight in weights]
    places = [name for name, _ in weights]
    return sorted(swap, key=lambda pair: places.index(pair[0]))


class Breaker:
    """The hooks in a script, and the steps in which the check would have ended the run."""

    def __init__(self, script, patch=setattr):
        self.utils = script.utils
        self.pushes = 0  # the first is before step 1
        self.step = 0
        self.way = None
        self.before: Weights = []
        self.first: Weights = []
        self.named: dict[int, str] = {}
        self.plain = {name: getattr(self.utils, name) for name in ("engine_weights", "check_engines", "check_sampler")}
        self.plain_ask = script.Engine.ask
        for name in self.plain:
            patch(self.utils, name, getattr(self, name))
        patch(script.Engine, "ask", lambda engine, *given, **more: self.ask(engine, *given, **more))

    def engine_weights(self, policy, args) -> Weights:
        """Return the weights that the script is about to push, broken from the chosen step on."""
        now = self.plain["engine_weights"](policy, args)
        before, self.before = self.before, [(name, weight.detach().clone()) for name, weight in now]
        self.first = self.first or self.before
        number, odd = divmod(self.pushes, 2)  # pushes so far = steps so far
        self.pushes += 1
        self.way = WAYS[number - 1] if 0 < number <= len(WAYS) and not odd else None
        return now if self.way is None else self.way(now, before, self.first)

    def ask(self, engine, problems, requests, sampling, *rest):
        """Forward the script's requests to its engine."""
        if self.way is wrong_temperature:
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


def judge(named: dict[int, str], end: str) -> dict[str, str]:
    """Way -> what was said of it in the step after its push. Raises AssertionError for one too few or too many."""
    found = {}
    for number, way in enumerate(WAYS[:-1], 1):
        assert 2 * number + 1 in named, f"{way.__name__} was not named; {sorted(named)}"
        found[way.__name__] = named.pop(2 * number + 1)
    assert not named, f"a whole engine was named: {named}"
    assert "nan" in end.lower() or "not finite" in end, end
    return found | {WAYS[-1].__name__: end}


if __name__ == "__main__":  # the verifiers' processes import this file
    sys.path.insert(0, str(ROOT))
    from runtime.system import process, watchdog

    process.prepare_environment()
    sys.argv = sys.argv[1:]
    import importlib

    import tyro

    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    script = importlib.import_module(Path(sys.argv[0]).stem)
    breaker = Breaker(script)
    abort = watchdog.Watch.abort

    def named(watch, text: str) -> None:  # a failure ends the process in there
        if breaker.pushes > 0:  # a rank that only samples has none
            errors = [line for line in text.splitlines() if not line.startswith(("  ", "Traceback"))]
            print("NAMED " + json.dumps([breaker.named, " ".join(errors)]), flush=True)
        abort(watch, text)

    watchdog.Watch.abort = named
    args = tyro.cli(script.Args)
    script.main(args, script.preflight(args))

"""Decide whether a run has learned (yes, no or unknown) from its evaluations, metrics and the doctor's findings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from runtime.run.doctor import Case, examine
from runtime.run.run_files import control_of, read
from runtime.system.process import write_whole

LEARNED, NOT_LEARNED, UNKNOWN = "learned", "did not learn", "cannot tell"
SMALL = 0.05  # a gain in pass@1 that is not missed: a run whose gain is surely smaller did not learn
FILE = "verdict.json"


def paired_gain(before: list[float], after: list[float]) -> tuple[float, float, float]:
    """(gain, low, high): the mean over problems of after - before, with a 95 % interval. Rates of right answers.

    Half a problem that only the first evaluation solves, half a one that only the second does, and one that does not
    change are added for the interval (Agresti and Min 2005): else few problems that do not change would prove a lot.
    """
    change = np.array(after) - np.array(before)
    count = len(change) + 2
    center = change.sum() / count
    error = math.sqrt(((change**2).sum() + 1) / count - center**2) / math.sqrt(count)
    return change.mean(), max(-1.0, center - 1.96 * error), min(1.0, center + 1.96 * error)


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution, from its density integrated over [0, 20]."""
    t = np.linspace(0, 20, 200_001)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    log_scale -= math.log(degrees * math.pi) / 2
    density = np.exp(log_scale - (degrees + 1) / 2 * np.log1p(t * t / degrees))
    between = (density[1:] + density[:-1]) / 2
    area = np.cumsum(between) * t[1]  # from 0 to the second point, the third ...
    return float(np.interp(0.475, area, t[1:]))


def evaluations(folder: Path, last: int) -> dict[str, Any] | None:
    """The evaluations before the first step and after the last one, compared; None where there are no such two."""
    found = {record.get("step"): record for record in read(folder / "eval.jsonl")}
    ends = [found.get(0, {}), found.get(last, {})]
    rates = [[right / end["eval/samples"] for right in end["eval/right"]] for end in ends if "eval/right" in end]
    if len(rates) < 2 or last == 0 or not rates[0] or len(rates[0]) != len(rates[1]):
        return None
    gain, low, high = paired_gain(*rates)
    before, after = (sum(rate) / len(rate) for rate in rates)
    return {
        "problems": len(rates[0]),
        "before": before,
        "after": after,
        "gain": gain,
        "low": low,
        "high": high,
    }


def judge(case: Case, rules: set[str], pair: dict[str, Any] | None) -> tuple[str, str]:
    """(outcome, why), the first that holds. ``rules``: those of the doctor that found something."""
    if case.curve("optim/steps").max() == 0:
        return NOT_LEARNED, "no optimizer step was taken"
    if case.curve("optim/lr").max() == 0:
        return NOT_LEARNED, "the learning rate is 0"
    if case.curve("optim/grad_norm").max() == 0:
        return NOT_LEARNED, "every gradient is 0"
    if "mismatch_growth" in rules:
        return UNKNOWN, "the engine that was evaluated is not the model that was trained"
    if pair is None:
        return UNKNOWN, "no evaluations before the first and after the last step (--eval_prompts)"
    if pair["low"] > 0:
        return LEARNED, "more is right after training than before it"
    if pair["high"] < 0:
        return NOT_LEARNED, "less is right after training than before it"
    if pair["high"] < SMALL:
        return NOT_LEARNED, f"the gain is below {SMALL}"
    return UNKNOWN, "too few problems to tell a gain from none (--eval_prompts, --eval_samples)"


def verdict(folder: Path, last: int) -> dict[str, Any]:
    """Judge the run in ``folder``, whose last step is ``last``: outcome, reason, and the numbers behind it."""
    case = Case.of(folder)
    findings = examine(case)
    pair = evaluations(folder, last)
    outcome, why = judge(case, {finding.rule for finding in findings}, pair)
    facts = {
        "groups_with_signal": 1 - case.last(case.equal()).mean(),
        "truncated": case.last("completions/truncated_frac").mean(),
        "sampler_logprob_diff": case.curve("sampler/logprob_diff_mean").max(),
        "skipped_steps": case.curve("optim/skipped").sum(),
    }
    known = {name: float(value) for name, value in facts.items() if math.isfinite(value)}
    return {
        "outcome": outcome,
        "control": control_of(case.metrics[-1]),
        "why": why,
        "evaluation": pair,
        **known,
        "findings": [vars(finding) for finding in findings],
    }


def in_words(found: dict[str, Any]) -> str:
    """A verdict as the last lines of a run."""
    lines = [f"verdict    {found['outcome']}: {found['why']}"]
    if found["control"]:
        lines.append(f"CONTROL    {found['control']}: what was trained on is not the verifier's reward")
    pair = found["evaluation"]
    if pair is not None:
        lines.append(
            f"           pass@1 {pair['before']:.3f} -> {pair['after']:.3f} on the same {pair['problems']} problems, "
            f"gain {pair['gain']:+.3f}, 95 % interval {pair['low']:+.3f} to {pair['high']:+.3f}"
        )
    forms = {
        "groups_with_signal": "groups with signal {:.0%}",
        "truncated": "truncated {:.0%}",
        "sampler_logprob_diff": "engine and trainer at most {:.1e} nats apart",
        "skipped_steps": "skipped optimizer steps {:.0f}",
    }
    lines.append("           " + ", ".join(form.format(found[name]) for name, form in forms.items() if name in found))
    lines += [f"doctor     {f['rule']}: {f['what']}, since step {f['since']}. {f['remedy']}" for f in found["findings"]]
    return "\n".join(lines)


def write(folder: Path, last: int) -> str:
    """Write verdict.json of a run that has ended; the same in words."""
    found = verdict(folder, last)
    write_whole(folder / FILE, json.dumps(found, indent=1) + "\n")
    return in_words(found)


def outcome_of(folder: Path) -> str | None:
    """Return the outcome in verdict.json of a finished run, or None if it cannot be read."""
    try:
        return json.loads((folder / FILE).read_text())["outcome"]
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""Decide whether a run has learned (yes, no or unknown) from its evaluations, metrics and the doctor's findings."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from runtime.run.doctor import Case, Finding, examine
from runtime.run.run_files import control_of, read
from runtime.system.process import write_whole

LEARNED, NOT_LEARNED, UNKNOWN = "learned", "did not learn", "cannot tell"
SMALL = 0.05  # a gain in pass@1 that is not missed: a run whose gain is surely smaller did not learn
FILE = "verdict.json"
# The numbers of a verdict, as its last line has them.
FACTS = {
    "groups_with_signal": "groups with signal {:.0%}",
    "truncated": "truncated {:.0%}",
    "sampler_logprob_diff": "log-prob difference of engine and trainer at most {:.1e} nats",
    "skipped_steps": "skipped optimizer steps {:.0f}",
}

Z = 1.959964  # the 97.5 % quantile of the normal distribution


def interval_text(low: float, high: float, sign: str = "", digits: int = 3) -> str:
    """Return both ends of an interval with at least ``digits`` decimals and as many, up to 9, as tell them apart.

    sign: "+" writes the sign of both ends. An interval of width 0 is "all equal".
    """
    for count in range(digits, 10):
        ends = [f"{end:{sign}.{count}f}" for end in (low, high)]
        if float(ends[0]) != float(ends[1]):  # not as text: -0.000 to +0.000 says nothing either
            return " to ".join(ends)
    return "all equal"


def paired_gain(before: Sequence[float], after: Sequence[float], spread: float = 1.0) -> tuple[float, float, float]:
    """Return (gain, low, high): the mean over problems of after - before, and its interval.

    ``spread`` is the largest possible change, 1 for rates. Half a problem that changes by it, half a one that changes
    by its negative, and one that does not change are added for the interval (Agresti and Min 2005): else few problems
    that do not change would prove a lot.
    """
    change = (np.array(after) - np.array(before)) / spread
    count = len(change) + 2
    center = float(change.sum()) / count
    squares = (change**2).sum() + 1
    variance = float(squares) / count
    variance -= center**2
    half = Z * math.sqrt(variance / count)
    low = max(-1.0, center - half)
    high = min(1.0, center + half)
    return spread * float(change.mean()), spread * low, spread * high


def evaluations(folder: Path, last: int) -> dict[str, Any] | None:
    """Compare the evaluations before the first step and after the last one; None where there are no such two.

    ``reward``: the same of the mean reward of each problem, where both evaluations have it. ``by_reward``: why that is
    to be judged by, and not the rates of correct responses; "" where these say enough.
    """
    found = {record.get("step"): record for record in read(folder / "eval.jsonl")}
    ends = [found.get(0, {}), found.get(last, {})]
    rates = [[right / end["eval/samples"] for right in end["eval/right"]] for end in ends if "eval/right" in end]
    if len(rates) < 2 or last == 0 or not rates[0] or len(rates[0]) != len(rates[1]):
        return None
    rewards = [end["eval/rewards"] for end in ends if None not in end.get("eval/rewards", [None])]
    by_reward = ""
    if any(end.get("eval/graded_frac", 0) > 0 for end in ends):
        by_reward = "judged by the reward, which is more than right or wrong"
    elif not any(map(any, rates)):
        by_reward = "no evaluation has a correct answer, so judged by the reward"
    values = [value for end in rewards for value in end]
    return {
        "problems": len(rates[0]),
        **_compared(*rates),
        "by_reward": by_reward,
        "reward": _compared(*rewards, max(values) - min(values) or 1.0) if len(rewards) == 2 else None,
    }


def _compared(before: list[float], after: list[float], spread: float = 1.0) -> dict[str, float]:
    """Return both means over problems, and the gain with its interval; ``spread`` as of ``paired_gain``."""
    gain, low, high = paired_gain(before, after, spread)
    return {"before": fmean(before), "after": fmean(after), "gain": gain, "low": low, "high": high}


def judge(case: Case, rules: set[str], pair: dict[str, Any] | None) -> tuple[str, str]:
    """Return (outcome, why), the first that holds. ``rules``: the rules of the doctor that found something."""
    if case.curve("optim/steps").max() == 0:
        return NOT_LEARNED, "no optimizer step was taken"
    if case.curve("optim/lr").max() == 0:
        return NOT_LEARNED, "the learning rate is 0"
    if case.curve("optim/grad_norm").max() == 0:
        return NOT_LEARNED, "every gradient is 0"
    if "mismatch_growth" in rules:
        return UNKNOWN, "the engine that was evaluated is not the model that was trained"
    if pair is None:
        return UNKNOWN, "no evaluations before the first and after the last step (--eval_prompts, --eval_every)"
    gain, what = pair, "pass@1"
    if pair["by_reward"]:  # its scale is unknown, so no gain of it is too small to count
        gain, what = pair["reward"], f"{pair['by_reward']}, which"
    if gain is None:
        return UNKNOWN, f"{what} is not a finite number in each evaluation"
    if gain["low"] > 0:
        return LEARNED, f"{what} improved (95 % interval above 0)"
    if gain["high"] < 0:
        return NOT_LEARNED, f"{what} got worse (95 % interval below 0)"
    if gain["high"] < SMALL and not pair["by_reward"]:
        return NOT_LEARNED, f"the gain is below {SMALL}"
    why = f"{pair['by_reward']}; " if pair["by_reward"] else ""
    return UNKNOWN, f"{why}too few problems to tell a gain from none (--eval_prompts, --eval_samples)"


def verdict(folder: Path, last: int) -> dict[str, Any]:
    """Judge the run in ``folder``, whose last step is ``last``: outcome, reason, and the numbers behind it."""
    case = Case.of(folder)
    findings = examine(case)
    pair = evaluations(folder, last)
    outcome, why = judge(case, {finding.rule for finding in findings}, pair)
    facts = {
        "groups_with_signal": 1 - case.last("reward/zero_std_frac") if case.has_groups() else math.nan,
        "truncated": case.last("completions/truncated_frac"),
        "sampler_logprob_diff": case.curve("sampler/logprob_diff_mean").max(),
        "skipped_steps": case.curve("optim/skipped").sum(),
    }
    return {
        "outcome": outcome,
        "control": control_of(case.metrics[-1]),
        "why": why,
        "evaluation": pair,
        **{name: float(value) for name, value in facts.items() if math.isfinite(value)},
        "findings": [vars(finding) for finding in findings],
    }


def in_words(found: dict[str, Any]) -> str:
    """Format a verdict as the last lines of a run's output."""
    lines = [f"verdict    {found['outcome']}: {found['why']}"]
    if found["control"]:
        lines.append(f"CONTROL    {found['control']}: what was trained on is not the verifier's reward")
    pair = found["evaluation"]
    if pair is not None:
        lines.append(_gain("pass@1", pair, f" on the same {pair['problems']} problems"))
    if pair is not None and pair["by_reward"] and pair["reward"] is not None:
        lines.append(_gain("reward", pair["reward"]))
    lines.append("           " + ", ".join(form.format(found[name]) for name, form in FACTS.items() if name in found))
    lines += [f"doctor     {Finding(**finding)}" for finding in found["findings"]]
    return "\n".join(lines)


def _gain(name: str, pair: dict[str, Any], where: str = "") -> str:
    means = f"{name} {pair['before']:.3f} -> {pair['after']:.3f}"
    ends = interval_text(pair["low"], pair["high"], "+")
    return f"           {means}{where}, gain {pair['gain']:+.3f}, 95 % interval {ends}"


def write(folder: Path, last: int) -> str:
    """Write verdict.json of a run that has ended; the same in words."""
    found = verdict(folder, last)
    write_whole(folder / FILE, json.dumps(found, indent=1) + "\n")
    return in_words(found)

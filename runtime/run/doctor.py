"""The doctor's rules, which find faults of a run in its metrics; docs/maintainers/doctor.md explains them.

doctor.tsv has what each rule says: what is wrong, with numbers in braces, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import ge, gt, lt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.run.run_files import read, read_config, series

if TYPE_CHECKING:
    import pandas as pd

TREND_STEPS = 15  # below this, rules about trends stay silent
SMOOTH = 5  # steps in the running mean that dates a finding
SOLVED = 0.9  # reward/correct above which a reward need not rise any more
# Kept samples hide what is learned: of these metrics the one of all drawn samples counts, if it was logged.
OF_ALL_DRAWN = {"reward/mean": "data/reward_mean", "reward/zero_std_frac": "data/zero_std_frac"}
FAILURES = ("timeouts", "crashes", "unscorable")


@dataclass(frozen=True)
class Finding:
    """Something wrong: the rule that found it, what it saw, what to do, and the first step of it."""

    rule: str
    what: str
    remedy: str
    since: int

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}, since step {self.since}. {self.remedy}"


@dataclass(frozen=True)
class Case:
    """A run as the rules see it."""

    args: dict[str, Any]
    metrics: list[dict]

    @classmethod
    def of(cls, folder: Path) -> Case:
        """Read the run in ``folder``, which may still be in progress."""
        return cls(read_config(folder).get("args", {}), read(folder / "metrics.jsonl"))

    def curve(self, name: str) -> pd.Series:
        """Return a metric over the steps in which it has a finite value."""
        of_all_drawn = series(self.metrics, OF_ALL_DRAWN.get(name, "")).dropna()
        return of_all_drawn if len(of_all_drawn) else series(self.metrics, name).dropna()

    def compare(self, values: pd.Series) -> tuple[float, float, float]:
        """Return the mean of the first steps, that of the last third, and the standard error of their difference.

        Of the first third only SMOOTH steps count: many runs have moved before it is over.
        """
        begin = self.metrics[0]["step"] - 1
        steps = self.metrics[-1]["step"] - begin
        place = 3 * (values.index - begin)
        start = values[place <= steps].iloc[:SMOOTH]
        last = values[place > 2 * steps]
        return start.mean(), last.mean(), np.hypot(start.sem(), last.sem())

    def last(self, name: str) -> float:
        """Return the mean of a metric over the last third of the steps."""
        return self.compare(self.curve(name))[1]

    def change(self, name: str) -> tuple[float, float]:
        """Return the change of a metric from the first steps to the last third, and its standard error."""
        start, last, error = self.compare(self.curve(name))
        return last - start, error

    def has_groups(self) -> bool:
        """Return True if responses to one prompt are compared with each other: several of them, and no critic."""
        return self.args.get("num_samples_per_prompt_rollout", 2) > 1 and self.args.get("disable_value", True)

    def learned(self) -> bool:
        """Return True if the reward has risen by two standard errors, or nearly all responses are right."""
        gain, error = self.change("reward/mean")
        return gain > 2 * error or self.last("reward/correct") > SOLVED


def failed(case: Case) -> pd.Series:
    """Return the fraction of the scores that are zeros because the verifier failed."""
    samples = case.args.get("num_unique_prompts_rollout", 0) * case.args.get("num_samples_per_prompt_rollout", 0)
    return sum(case.curve(f"reward/{kind}") for kind in FAILURES) / (samples or np.inf)


def unanswered(case: Case) -> pd.Series:
    """Return the fraction of the complete responses in which the verifier found no answer, by its part ``format``.

    Truncated responses that have an answer make it smaller. A verifier that looks for no answer has no such part.
    """
    complete = 1 - case.curve("completions/truncated_frac")
    return (1 - case.curve("reward/format") / complete[complete > 0]).dropna()


def more_right(case: Case) -> bool:
    better, error = case.change("reward/correct")
    return better > max(0.05, 2 * error)


@dataclass(frozen=True)
class Rule:
    """A metric whose mean over the last third of the steps is ``beyond`` a bound in a run with this fault.

    The bound is ``times`` the mean of the first steps plus ``errors`` standard errors of the change, or ``least`` if
    that is larger. ``unless``: True for a run without this fault.
    """

    name: str
    metric: str | Callable[[Case], pd.Series]
    beyond: Callable[[Any, float], Any]
    least: float = -np.inf
    times: float = 0.0
    errors: float = 0.0
    trend: bool = False
    unless: Callable[[Case], bool] = lambda case: False

    def __call__(self, case: Case) -> Finding | None:
        """Return the finding of a run with this fault, dated by the last stretch of running means beyond the bound."""
        values = self.metric(case) if callable(self.metric) else case.curve(self.metric)
        start, last, error = case.compare(values)
        bound = max(self.least, self.times * start + (self.errors * error if self.errors else 0.0))
        if not self.beyond(last, bound) or (self.trend and len(case.metrics) < TREND_STEPS) or self.unless(case):
            return None
        bad = self.beyond(values.rolling(SMOOTH, min_periods=1).mean(), bound)
        stretch = bad.index[bad[::-1].cummin()[::-1]]
        since = int(stretch[0] if len(stretch) else bad.index[-1])
        facts = {"start": start, "last": last, "limit": case.args.get("max_response_length", "?")}
        facts |= {"reward": case.last("reward/mean"), "correct": case.last("reward/correct")}
        facts |= {"gain": case.change("reward/mean")[0], "better": case.change("reward/correct")[0]}
        return Finding(self.name, *(text.format(**facts) for text in TEXTS[self.name]), since)


RULES = (
    Rule("reward_flat", "reward/mean", lt, times=1, errors=2, trend=True, unless=Case.learned),
    Rule("reward_falls", "reward/mean", lt, times=1, errors=-2, trend=True),
    Rule("extraction", unanswered, ge, least=0.5),
    Rule("verifier_failures", failed, gt, least=0.01),
    Rule("equal_groups", "reward/zero_std_frac", ge, least=0.95, unless=lambda case: not case.has_groups()),
    Rule("truncation", "completions/truncated_frac", ge, least=1 / 3),
    Rule("length_growth", "completions/length_mean", gt, times=1.5, trend=True, unless=more_right),
    Rule("entropy_collapse", "policy/entropy", lt, times=0.2, trend=True, unless=Case.learned),
    Rule("mismatch_growth", "sampler/logprob_diff_mean", gt, least=0.01, times=3),
    Rule("kl_runaway", "kl/sequence", gt, least=2.0, times=1, trend=True, unless=Case.learned),
    Rule("skipped_steps", "optim/skipped", ge, least=0.02),
    Rule("stale_samples", "sampler/ess", lt, least=0.5),
)
# Rule -> [what is wrong, what to do].
ROWS = [line.split("\t") for line in Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8").splitlines()[1:]]
TEXTS = {name: texts for name, *texts in ROWS}


def examine(case: Case) -> list[Finding]:
    """List the problems of a run in the order of RULES; empty for a healthy run."""
    found = [rule(case) for rule in RULES]
    return [finding for finding in found if finding is not None]

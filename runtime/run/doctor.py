"""The doctor's rules, which find faults of a run in its metrics; docs/maintainers/doctor.md explains them.

doctor.tsv has a row for each rule: its metric and bound, and what it says, with numbers in braces.
"""

from __future__ import annotations

import csv
import operator
from dataclasses import dataclass
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
        error = np.hypot(start.sem(), last.sem())
        return start.mean(), last.mean(), error

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

    def more_right(self) -> bool:
        """Return True if more responses are right than in the first steps, by 0.05 and by two standard errors."""
        better, error = self.change("reward/correct")
        return better > max(0.05, 2 * error)

    def holds(self, condition: str) -> bool:
        """Return True if a method of this name, behind "not " if it must not, says so; False for ""."""
        name = condition.removeprefix("not ")
        return name != "" and getattr(self, name)() == (name == condition)

    def failed(self) -> pd.Series:
        """Return the fraction of the scores that are zeros because the verifier failed."""
        prompts = self.args.get("num_unique_prompts_rollout", 0)
        samples = prompts * self.args.get("num_samples_per_prompt_rollout", 0)
        failures = sum(self.curve(f"reward/{kind}") for kind in FAILURES)
        return failures / (samples or np.inf)

    def unanswered(self) -> pd.Series:
        """Return the fraction of the complete responses in which the verifier found no answer, by its part ``format``.

        Truncated responses that have an answer make it smaller. A verifier that looks for no answer has no such part.
        """
        complete = 1 - self.curve("completions/truncated_frac")
        return (1 - self.curve("reward/format") / complete[complete > 0]).dropna()


@dataclass(frozen=True)
class Rule:
    """A metric whose mean over the last third of the steps is ``beyond`` a bound in a run with this fault.

    The bound is ``times`` the mean of the first steps plus ``errors`` standard errors of the change, or ``least`` if
    that is larger. ``unless``: what holds in a run without this fault. A ``trend`` needs TREND_STEPS.
    """

    name: str
    metric: str  # or a method of Case
    beyond: str  # a function of the module operator
    least: float
    times: float
    errors: float
    trend: bool
    unless: str
    what: str
    remedy: str

    @classmethod
    def of(cls, row: dict[str, str]) -> Rule:
        """Read a row of doctor.tsv."""
        numbers = {name: float(row[name]) for name in ("least", "times", "errors")}
        return cls(**row | numbers | {"trend": row["trend"] == "yes"})

    def __call__(self, case: Case) -> Finding | None:
        """Return the finding of a run with this fault, dated by the last stretch of running means beyond the bound."""
        values = case.curve(self.metric) if "/" in self.metric else getattr(case, self.metric)()
        beyond = getattr(operator, self.beyond)
        start, last, error = case.compare(values)
        relative = (self.times * start if self.times else 0.0) + (self.errors * error if self.errors else 0.0)
        bound = max(relative, self.least)  # NaN in a run without first steps, and nothing is beyond that
        too_short = self.trend and len(case.metrics) < TREND_STEPS
        if not beyond(last, bound) or too_short or case.holds(self.unless):
            return None
        bad = beyond(values.rolling(SMOOTH, min_periods=1).mean(), bound)
        stretch = bad.index[bad[::-1].cummin()[::-1]]
        since = int(stretch[0] if len(stretch) else bad.index[-1])
        facts = {
            "start": start,
            "last": last,
            "limit": case.args.get("max_response_length", "?"),
            "reward": case.last("reward/mean"),
            "correct": case.last("reward/correct"),
            "gain": case.change("reward/mean")[0],
            "better": case.change("reward/correct")[0],
        }
        return Finding(self.name, self.what.format(**facts), self.remedy.format(**facts), since)


with open(Path(__file__).with_suffix(".tsv"), encoding="utf-8") as table:
    RULES = [Rule.of(row) for row in csv.DictReader(table, delimiter="\t")]


def examine(case: Case) -> list[Finding]:
    """List the problems of a run in the order of RULES; empty for a healthy run."""
    found = [rule(case) for rule in RULES]
    return [finding for finding in found if finding is not None]

"""95 % intervals of rates and means, for tables and figures; that of a gain is in runtime/run/verdict.py.

None is a point where all responses are correct or none is: 0 of 32 is a rate of 0.000 to 0.107.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime.run.verdict import Z


def wilson(right: float, count: float) -> tuple[float, float]:
    """Return the score interval (low, high) of a probability after ``right`` of ``count`` trials (Wilson 1927)."""
    rate = right / count
    square = Z * Z / count
    center = rate + square / 2
    variance = rate * (1 - rate)
    width = math.sqrt(square * variance + square**2 / 4)
    low = (center - width) / (1 + square)
    high = (center + width) / (1 + square)
    if right == 0:  # rounding would leave 1e-18
        low = 0.0
    if rate == 1:
        high = 1.0
    return low, high


def rate_interval(rates: Sequence[float], samples: int) -> tuple[float, float]:
    """Return the interval (low, high) of the mean of ``rates``: each problem's fraction of ``samples`` responses.

    Responses to one problem resemble each other, so the count of Wilson's interval is the number of independent
    responses of the same variance between problems (Kish's design effect; Korn and Graubard 1998). A problem of rate 0
    and one of rate 1 are added for that count alone: where all problems agree by chance, their variance of 0 would
    prove everything. The count is the number of problems where each has one response, or where all rates are 0 or all
    are 1, and at most that of all responses.
    """
    extended = np.array([*rates, 0.0, 1.0])
    middle = extended.mean()
    alone = middle * (1 - middle)
    independent = float(alone / extended.var())
    count = len(rates) * min(samples, independent)
    rate = fmean(rates)
    return wilson(rate * count, count)


def t_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t. The density of arctan(t / sqrt(degrees)) is a power of the cosine."""
    edges = np.linspace(0, np.pi / 2, 200_001)
    middles = edges[1:] - edges[1] / 2
    area = np.cumsum(np.cos(middles) ** (degrees - 1))
    area /= area[-1]
    place = np.interp(0.95, area, edges[1:])
    return math.sqrt(degrees) * math.tan(place)


def mean_interval(values: Sequence[float], trials: float | None = None) -> tuple[float, float, float]:
    """Return (mean, low, high) of repetitions by Student's t; low and high are NaN for a single value.

    trials: where the values are rates, the number of problems behind each. The interval then stays within 0 and 1, and
    holds Wilson's of all those problems, because repetitions that are all right do not vary.
    """
    count = len(values)
    if count < 2:
        return sum(values) if count else math.nan, math.nan, math.nan
    mean = fmean(values)
    error = stdev(values) / math.sqrt(count)
    half = t_quantile(count - 1) * error
    low = mean - half
    high = mean + half
    if trials is not None:
        trials = trials * count
        least = wilson(mean * trials, trials)
        low = max(0.0, min(low, least[0]))
        high = min(1.0, max(high, least[1]))
    return mean, low, high

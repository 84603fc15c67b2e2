"""scripts/intervals.py: 95 % intervals hold the truth, also where everything or nothing is right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from intervals import mean_interval, rate_interval, t_quantile, wilson

from runtime.run.verdict import interval_text, paired_gain


def test_wilson():
    """Golden values: Wilson 1927, as in R's prop.test(correct = FALSE)."""
    assert wilson(15, 50) == pytest.approx((0.190985, 0.437539), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.161125), abs=1e-4)
    assert wilson(20, 20) == pytest.approx((1 - 0.161125, 1.0), abs=1e-4)
    assert wilson(0, 32)[0] == 0.0 and wilson(32, 32)[1] == 1.0, "to the last bit"


@pytest.mark.parametrize("problems", [1, 4, 32, 500])
@pytest.mark.parametrize("right", [0, 1, 3])
def test_one_response_to_each_problem_is_wilsons(problems, right):
    right = min(right, problems)
    rates = [1.0] * right + [0.0] * (problems - right)
    assert rate_interval(rates, 1) == pytest.approx(wilson(right, problems))


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_more_responses_to_the_same_problems_prove_no_more_where_all_agree(rate):
    """Of 32 problems with eight responses each, all wrong: 3 more problems in a hundred could be solvable."""
    low, high = rate_interval([rate] * 32, 8)
    assert (low, high) == pytest.approx(wilson(32 * rate, 32)) and high - low > 0.1


def test_responses_to_one_problem_are_alike():
    """Sixteen responses each: problems that are all right or all wrong count once, equal ones sixteen times."""
    alike = rate_interval([0.0, 1.0] * 32, 16)
    equal = rate_interval([0.5] * 64, 16)
    assert alike == pytest.approx(wilson(32, 64))
    assert equal == pytest.approx(wilson(512, 1024)), "as if all were independent, and no more"
    mixed = rate_interval([0.25, 0.75] * 32, 16)
    assert equal[1] - equal[0] < mixed[1] - mixed[0] < 0.6 * (alike[1] - alike[0])


@pytest.mark.parametrize("problems", [32, 128])
@pytest.mark.parametrize("samples", [1, 4, 16])
@pytest.mark.parametrize(("rate", "alike"), [(0.01, 0.3), (0.3, 0.5), (0.5, 100), (0.9, 1), (0.99, 2)])
def test_coverage(problems, samples, rate, alike):
    """At least 91 of 100 intervals hold the rate. ``alike``: small where problems are all right or all wrong."""
    draw = np.random.default_rng(0)
    hard = draw.beta(alike * rate, alike * (1 - rate), (400, problems))
    intervals = [rate_interval(draw.binomial(samples, row) / samples, samples) for row in hard]
    assert sum(low <= rate <= high for low, high in intervals) >= 0.91 * 400


def test_repetitions():
    """Student's by hand; of rates never a point and never beyond 0 and 1."""
    mean, low, high = mean_interval([1.0, 2.0, 6.0])
    assert (mean, high - mean) == pytest.approx((3.0, 4.30265 * 7**0.5 / 3**0.5), abs=1e-4)
    assert high - mean == pytest.approx(mean - low)
    mean, low, high = mean_interval([0.5])
    assert mean == 0.5 and math.isnan(low) and math.isnan(high)
    assert mean_interval([1.0] * 5, 64) == pytest.approx((1.0, wilson(320, 320)[0], 1.0))
    assert mean_interval([0.0] * 5, 64) == pytest.approx((0.0, 0.0, wilson(0, 320)[1]))
    rates = [0.9, 1.0, 1.0]
    mean, low, high = mean_interval(rates, 64)
    assert high == 1.0 and low == pytest.approx(mean_interval(rates)[1]), "Student's where it is the wider one"


@pytest.mark.parametrize("count", [1, 2, 64])
@pytest.mark.parametrize("change", [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_a_gain_between_extremes_has_an_interval(count, change):
    gain, low, high = paired_gain([change[0]] * count, [change[1]] * count)
    assert -1 <= low <= gain <= high <= 1 and high - low > 1 / (count + 2)


def test_students_quantiles():
    """Those of the tables."""
    tables = {1: 12.7062, 2: 4.3027, 4: 2.7764, 9: 2.2622, 30: 2.0423}
    assert {n: t_quantile(n) for n in tables} == pytest.approx(tables, abs=1e-4)


def test_ends_are_told_apart():
    assert interval_text(0.0, 0.107) == "0.000 to 0.107"
    assert interval_text(0.0, 0.00038) == "0.0000 to 0.0004", "none right of 10,000"
    assert interval_text(0.99962, 1.0) == "0.9996 to 1.0000"
    assert interval_text(-0.0003, 0.0003, "+") == "-0.0003 to +0.0003", "and not -0.000 to +0.000"
    assert interval_text(-1.0, 0.5, "+", 4) == "-1.0000 to +0.5000"
    assert interval_text(0.25, 0.25) == interval_text(0.2, 0.2 + 1e-16) == "all equal"

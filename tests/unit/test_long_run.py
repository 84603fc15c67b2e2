"""studies/long_run.py: what it makes of what it sees."""

from __future__ import annotations

import long_run
import numpy as np


def test_a_slope_and_its_interval():
    """A line has its slope without error; noise around none has an interval that covers 0 in 95 % of cases."""
    rate, half, mean = long_run.slope(100 + 0.03 * np.arange(1000))
    assert abs(rate - 3) < 1e-9 and half < 1e-9 and mean > 100
    noise = np.random.default_rng(0).normal(size=(400, 200))
    covered = [abs(rate) <= half for rate, half, _ in map(long_run.slope, noise)]
    assert 0.92 < np.mean(covered) < 0.98

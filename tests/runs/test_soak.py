"""Hundreds of steps through faults of every kind: nothing hangs, nothing is lost. tests/soak.py runs longer by hand."""

from __future__ import annotations

import pytest
import soak


@pytest.mark.slow
@pytest.mark.parametrize("script, steps", [("grpo", 200), ("ppo", 60)])
def test_soak(tmp_path, script, steps):
    """At least 30 faults of at least 15 kinds, and the metrics, samples and weights of the straight run bit for bit."""
    met = soak.soak(tmp_path, script, steps, seed=0, ranks=1, count=40, faults=soak.possible(1))
    assert sum(met.values()) >= 30
    assert len(met) >= 15

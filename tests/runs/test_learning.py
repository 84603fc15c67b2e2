"""Healthy runs of the real scripts learn on the test bed."""

from __future__ import annotations

import learning_runs
import pytest


@pytest.mark.learn
@pytest.mark.parametrize("course", learning_runs.COURSE_FLAGS)
@pytest.mark.parametrize("script", learning_runs.SCRIPT_FLAGS)
def test_a_healthy_run_learns(testbed, script, course):
    found = learning_runs.run(script, course, seed=1)
    assert learning_runs.complaints(found, script, course) == []
    assert 0.2 <= found.evaluations[0]["eval/pass@1"] <= 0.4

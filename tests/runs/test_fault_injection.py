"""Hundreds of steps through faults of every kind, by tests/fault_injection.py: nothing hangs, nothing is lost."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from helpers import ROOT, run_environment


@pytest.mark.slow
@pytest.mark.parametrize("script, steps", [("grpo.py", 120), ("ppo.py", 60)])
def test_soak(tmp_path, script, steps):
    """At least 30 faults of at least 15 kinds, and the metrics, samples and weights of the straight run bit for bit."""
    line = [sys.executable, str(ROOT / "tests" / "fault_injection.py"), "--script", script, "--steps", str(steps)]
    done = subprocess.run(
        [*line, "--out", str(tmp_path)],
        env=run_environment(),
        capture_output=True,
        text=True,
        timeout=1500,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-5000:]
    summary = done.stdout.splitlines()[-1]
    assert "metrics, samples and weights equal bit for bit" in summary
    faults, kinds = re.search(r"(\d+) faults of (\d+) kinds", summary).groups()
    assert int(faults) >= 30
    assert int(kinds) >= 15

"""studies/diff_runs.py: it names step, phase and number in which two runs part, and rejects what it cannot run."""

from __future__ import annotations

import json

import diff_runs
import numpy as np
import pytest


def test_the_distance_counts_what_differs():
    x = np.array([[1.0, np.nan], [0.5, 2.0]], dtype=np.float32)
    y = x.copy()
    y[1, 0] = np.nextafter(y[1, 0], np.float32(1))
    assert diff_runs.distance(x, y) == "1 of 4 numbers, by at most 5.96e-08; 0.5 against 0.50000006 at (1, 0)"
    assert diff_runs.distance("0.5", "0.25") == "0.5 against 0.25"
    assert diff_runs.distance(x, x[0]) == "shape (2, 2) against (2,)"


class Told:
    """A run that tells these events."""

    def __init__(self, *events):
        self.events = iter(events)
        self.pipe = self

    def receive(self):
        return next(self.events)

    def send(self, _):
        pass

    def value(self, place):
        return f"number {place}"


def test_the_first_difference_is_named_whatever_it_is():
    """A number, a number that only one has, an event that only one has, and none at all."""
    one = (3, "7 update", [("loss", "a"), ("gradient", "b")])
    assert diff_runs.parting(Told(one, None), Told(one, None)) is None
    other = (3, "7 update", [("loss", "a"), ("gradient", "c")])
    assert diff_runs.parting(Told(one), Told(other)) == (3, "7 update", "gradient", "number 1 against number 1")
    shorter = (3, "7 update", [("loss", "a")])
    assert diff_runs.parting(Told(one), Told(shorter)) == (3, "7 update", "gradient", "nothing in its place")
    later = (3, "8 push", [])
    found = diff_runs.parting(Told(one), Told(later))
    assert found == (3, "7 update", "what comes next", "step 3, phase 7 update against step 3, phase 8 push")
    assert diff_runs.parting(Told(one), Told(None))[3] == "step 3, phase 7 update against the end"


def test_times_are_no_difference():
    a = {"step": 1, "loss/total": 0.5, "time/step": 1.0, "perf/tokens_per_second": 2.0}
    assert diff_runs.differing(a, a | {"time/step": 9.0, "perf/push_gib": 1.0}) == []
    assert diff_runs.differing(a, a | {"loss/total": 0.25, "kl/k1": 0.1}) == ["loss/total", "kl/k1"]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"world_size": 2}, "had 2 ranks"),
        ({"code": {"grpo.py": "0"}}, "grpo.py is not what"),
        (None, "is no folder of a run"),
    ],
)
def test_what_cannot_be_run_again_is_refused(tmp_path, capsys, change, says):
    if change is not None:
        config = {"world_size": 1, "code": {}, "args": {}, "script": "grpo.py"} | change
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        diff_runs.main([str(tmp_path), str(tmp_path)])
    assert ended.value.code == 2 and says in capsys.readouterr().err

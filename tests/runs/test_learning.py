"""Runs of the real scripts on the test bed: healthy ones learn, and each breakage is noticed by learning alone."""

from __future__ import annotations

import json

import broken_scripts
import pytest
from helpers import ROOT

NAMES = [f"{breakage.what}, {script}" for breakage, script in broken_scripts.CASES]


@pytest.mark.parametrize(("breakage", "script"), broken_scripts.CASES, ids=NAMES)
def test_every_breakage_still_applies(breakage, script):
    """Each edit finds its text exactly once, changes it, and leaves Python."""
    files = broken_scripts.project_files(ROOT)
    changed = broken_scripts.edited(files, breakage, script)
    assert changed
    for name, text in changed.items():
        assert text != files[name]
        compile(text, name, "exec")


def test_a_copy_has_every_file_that_a_run_reads():
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "runtime").iterdir() if path.is_file()}
    assert there <= broken_scripts.project_files(ROOT).keys()


@pytest.mark.learn
@pytest.mark.parametrize("course", broken_scripts.COURSE_FLAGS)
@pytest.mark.parametrize("script", broken_scripts.SCRIPT_FLAGS)
def test_a_healthy_run_learns(testbed, script, course):
    found = broken_scripts.run(script, course, seed=1)
    assert broken_scripts.complaints(found, script, course) == []
    assert 0.2 <= found.evaluations[0]["eval/pass@1"] <= 0.4


@pytest.mark.learn
@pytest.mark.parametrize(("breakage", "script"), broken_scripts.CASES, ids=NAMES)
def test_a_broken_algorithm_is_noticed(testbed, breakage, script):
    """The run ends well and its losses are finite: only what it learned is wrong."""
    found = broken_scripts.run(script, breakage.course, seed=1, breakage=breakage)
    assert found.code == 0, found.output
    assert len(found.metrics) == broken_scripts.STEPS
    assert "null" not in json.dumps([step["loss/total"] for step in found.metrics if "loss/total" in step])
    assert broken_scripts.complaints(found, script, breakage.course) != []

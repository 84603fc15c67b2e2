"""The doctor on real runs: every ailment is named, and healthy runs are left in peace."""

from __future__ import annotations

import broken_scripts
import doctor_cases
import pytest
from helpers import ROOT

from runtime.run.doctor import RULES


def test_every_ailment_still_applies():
    """Each edit finds its text exactly once, and every rule has an ailment."""
    files = broken_scripts.project_files(ROOT)
    for ailment in doctor_cases.AILMENTS:
        broken_scripts.edited(files, broken_scripts.Breakage(ailment.what, ailment.edits), "grpo.py")
    assert {ailment.rule for ailment in doctor_cases.AILMENTS} == {rule.name for rule in RULES}


@pytest.mark.learn
@pytest.mark.parametrize("ailment", doctor_cases.AILMENTS, ids=lambda ailment: ailment.rule)
def test_the_doctor_names_the_ailment_of_a_real_run(testbed, ailment):
    found = doctor_cases.examined("grpo.py", ailment.flags, 1, ailment.steps, ailment.edits)
    assert ailment.rule in [finding.rule for finding in found]


@pytest.mark.learn
@pytest.mark.parametrize(("script", "flags"), doctor_cases.HEALTHY)
def test_the_doctor_finds_nothing_in_a_healthy_run(testbed, script, flags):
    assert doctor_cases.examined(script, flags, 1, 60) == []

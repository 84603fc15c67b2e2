"""Every argument of the scripts does something: tests/flag_effect_rows.py has a row for each.

python -m pytest tests/runs/test_flag_effects.py -m slow    every flag of both scripts
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import flag_effect_rows
import flag_effects
import pytest
from helpers import ROOT, clean_environment, run_here, tiny_args

import utils

CASES = [(script, flag) for script in flag_effects.SCRIPTS for flag in flag_effects.flags_of(script)]


# ---------------------------------------------------------------------------------------------------- a row is complete


@pytest.mark.parametrize("script", flag_effects.SCRIPTS)
def test_every_argument_has_evidence(script):
    """A new flag needs a row in tests/flag_effect_rows.py; a row whose flag is gone goes, too."""
    flags = set(flag_effects.flags_of(script))
    assert flags - flag_effect_rows.EVIDENCE.keys() == set(), "add a row: CONTRIBUTING.md, A new flag"
    assert flag_effect_rows.EVIDENCE.keys() - set(flag_effects.every_flag()) == set(), "no such flag any more"


def test_every_observable_is_explained():
    for flag, row in flag_effect_rows.EVIDENCE.items():
        for name in row.changes:
            kind = re.sub(r"\(.*\)", "(...)", name)
            assert "/" in name or kind in flag_effects.OBSERVABLES, f"{flag}: {name}"


@pytest.mark.parametrize("flag", flag_effect_rows.EVIDENCE)
def test_a_row_tries_another_value_than_the_run_without_it(flag):
    """And its arguments exist in every script that has the flag."""
    row = flag_effect_rows.EVIDENCE[flag]
    assert row.changes
    assert flag not in row.given
    for script in flag_effects.SCRIPTS:
        module = flag_effects.importlib.import_module(script)
        if flag not in flag_effects.flags_of(script):
            continue
        common = flag_effect_rows.BASE | row.given
        assert set(common) <= set(flag_effects.flags_of(script)), "an argument that this script has not"
        assert row.tried != common.get(flag, flag_effect_rows.default_of(module.Args, flag))


# ------------------------------------------------------------------------------------------ some flags, from end to end


@pytest.fixture(scope="module")
def seen_here(tiny, tmp_path_factory):
    """A function that runs grpo.py in this process, observed, and gives what was seen; the same run is made once."""
    known = {}

    def see(**changes) -> dict:
        key = json.dumps(changes)
        if key not in known:
            place = tmp_path_factory.mktemp("seen")
            (place / "console.txt").write_text("")
            args = tiny_args(
                tiny, place / "out", **{"run_name": "run", "learning_rate": 1e-3, "eval_prompts": 4, **changes}
            )
            seen = {}
            with pytest.MonkeyPatch.context() as patch:
                flag_effects.observe(flag_effects.importlib.import_module("grpo"), seen, patch)
                run_here(args)
            known[key] = seen | flag_effects.left_behind(place, 0)
        return known[key]

    return see


SAMPLE = ("weight_decay", "eval_samples")  # what was trained, what was written: the slow test tries every flag


@pytest.mark.integration
@pytest.mark.parametrize("flag", SAMPLE)
def test_a_flag_is_seen_to_change_what_its_row_says(seen_here, flag):
    """The functions of the slow test, in this process and on the tests' own tiny model."""
    row = flag_effect_rows.EVIDENCE[flag]
    without = seen_here(**row.given)
    tried = seen_here(**row.given | {flag: row.tried})
    assert flag_effects.complaints(flag, row, without, tried) == []


def test_a_flag_that_is_not_read_is_found_dead(seen_here, monkeypatch):
    """make_optimizer with a weight decay of its own: the row of --weight_decay has nothing to show then."""
    make = utils.make_optimizer

    def make_otherwise(parameters, rate, args):
        return make(parameters, rate, dataclasses.replace(args, weight_decay=0.0))

    monkeypatch.setattr(utils, "make_optimizer", make_otherwise)
    row = flag_effect_rows.EVIDENCE["weight_decay"]
    tried = seen_here(weight_decay=row.tried, exp_name="another key")
    assert "weights is the same" in "".join(flag_effects.complaints("weight_decay", row, seen_here(), tried))


# ----------------------------------------------------------------------------------------------- every flag, each alone


def run_alive(*words: str) -> tuple[int, str]:
    """(exit code, what was printed) of tests/flag_effects.py in a process of its own."""
    line = [sys.executable, "tests/flag_effects.py", *words]
    done = subprocess.run(line, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def examined(tmp_path_factory) -> dict[tuple[str, str], tuple[list[str], str]]:
    """(script, flag) -> (why it seems dead, what it was seen to change), of all flags."""
    file = tmp_path_factory.mktemp("alive") / "results.json"
    _, text = run_alive("--json", str(file))
    assert file.is_file(), text[-4000:]
    found = {}
    for script, flag, wrong, changed in json.loads(file.read_text()):
        found[script, flag] = (wrong, changed)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("script", "flag"), CASES, ids=[f"{script} --{flag}" for script, flag in CASES])
def test_no_flag_is_dead(examined, script, flag):
    wrong, changed = examined[script, flag]
    assert wrong == []
    assert changed


@pytest.mark.slow
def test_nothing_differs_without_a_flag(examined):
    """Else a difference would be no evidence: two equal runs are equal in every observable, with vLLM, too."""
    for script in flag_effects.SCRIPTS:
        for name in flag_effects.CONTROLS:
            differences, _ = examined[script, name]
            assert differences == []

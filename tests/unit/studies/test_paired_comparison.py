"""studies/paired_comparison.py: how often it is wrong, how many pairs it takes, and what it says."""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import subprocess
import sys

import numpy as np
import paired_comparison
import pytest
from helpers import ROOT, command, run_environment

import grpo


def first_decision(differences: np.ndarray, smallest: float) -> tuple[str, int]:
    """(verdict, pairs) of differences that come one after another; ("", all) where they do not suffice."""
    for count in range(1, len(differences) + 1):
        found = paired_comparison.verdict(list(differences[:count]), smallest)
        if found:
            return found, count
    return "", len(differences)


@pytest.mark.parametrize("law", ["normal", "uniform", "skewed"])
def test_false_alarms_are_rare_however_often_one_looks(law):
    """1000 comparisons without a difference, each looked at after every one of 100 pairs: at most 5 % ever say one."""
    rng = np.random.default_rng(1)
    draws = {
        "normal": rng.normal(size=(1000, 100)),
        "uniform": rng.uniform(-1, 1, size=(1000, 100)),
        "skewed": rng.exponential(size=(1000, 100)) - rng.exponential(size=(1000, 100)),
    }[law]
    counts = np.arange(1, 101)
    means = draws.cumsum(1) / counts
    squares = (draws**2).cumsum(1) - counts * means**2
    deviations = np.sqrt(squares[:, 1:] / counts[:-1])
    t = np.abs(means[:, 1:]) * np.sqrt(counts[1:]) / deviations
    alarms = (t > [paired_comparison.widest(n) for n in counts[1:]]).any(1)
    assert alarms.mean() <= 0.05
    # A fixed bound of two standard errors, looked at as often, is wrong in a third of them.
    assert (t > 2.0).any(1).mean() > 0.3


def test_the_bound_is_where_the_stake_has_grown_twentyfold():
    """The bet of the docstring, written as such, is worth 1 / ERROR exactly at ``widest``."""
    for count in (6, 12, 50):
        x = paired_comparison.widest(count) ** 2 / (count - 1)
        worth = (1 + count) ** -0.5 * ((1 + x) / (1 + x / (1 + count))) ** (count / 2)
        assert worth == pytest.approx(1 / paired_comparison.ERROR)
    assert math.isinf(paired_comparison.widest(4)) and paired_comparison.widest(10**6) < 6


def test_no_difference_is_said_where_the_interval_is_narrow():
    rng = random.Random(3)
    differences = np.array([rng.gauss(0.0, 0.01) for _ in range(40)])
    assert first_decision(differences, 0.03)[0] == "no difference"
    assert first_decision(-differences - 0.05, 0.03)[0] == "worse"
    assert paired_comparison.verdict([0.0, 0.0, 0.0], 0.03) == "no difference"  # bit for bit
    assert paired_comparison.verdict([], 0.03) == "" and paired_comparison.verdict([0.1], 0.03) == ""


def test_rates_that_are_all_0_or_all_1_are_not_bit_for_bit_the_same_run():
    """Both sides have every problem wrong: three pairs of four problems leave a difference of 0.03 open."""
    assert paired_comparison.verdict([0.0] * 3, 0.03, None, 4) == ""
    assert "about" in paired_comparison.state_of([0.0] * 3, 0.03, 4)
    assert paired_comparison.verdict([0.0] * 44, 0.03, None, 64) == "no difference"
    _, half = paired_comparison.interval([1.0] * 8, None, 64)
    assert 0 < half < 0.05 and paired_comparison.verdict([1.0] * 8, 0.03, None, 64) == "better"
    mean, low, high = paired_comparison.gain([(0.0, 1.0)] * 5, 64)
    assert mean == high == 1.0 and 0.99 < low < 1.0
    assert paired_comparison.gain([(1.0, 1.0)] * 5, 64)[1:] == pytest.approx((-0.0061, 0.0061), abs=1e-4)


@pytest.mark.integration
@pytest.mark.parametrize(
    "words, says",
    [
        (["grpo.py"], "are one and the same run"),
        (["README.md"], "is not a script"),
        (["nothere.py"], "no such file"),
        (["grpo.py --model_name_or_path models/testbed-99"], "`make testbed` makes it"),
        (["grpo.py --nonsense 1"], "nonsense"),
        (["grpo.py --beta 0.1", "--seeds", "5..1"], "write 1..44"),
    ],
)
def test_what_cannot_be_compared_ends_it_at_once(words, says):
    line = [sys.executable, str(ROOT / "studies" / "paired_comparison.py"), *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and says in done.stderr, done.stderr


def test_the_runs_are_those_of_the_test_bed_or_of_the_quickstart(monkeypatch):
    """With --quickstart only their folder is given; the flags after -- come last, and win."""
    found = []
    for words in ([], ["--quickstart"]):
        monkeypatch.setattr(sys, "argv", ["paired_comparison.py", *words, "--", "--total_steps", "7"])
        _, shared = paired_comparison.parse(argparse.ArgumentParser(), "1..2")
        found.append(paired_comparison.Arm("grpo.py", shared).args(1))
    bed, quickstart = found
    assert (bed.total_steps, bed.model_name_or_path, bed.learning_rate) == (7, "models/testbed-1", 2e-4)
    own = {f.name for f in dataclasses.fields(grpo.Args) if f.init}
    changed = {name for name in own if getattr(quickstart, name) != getattr(grpo.Args(), name)}
    assert changed == {"total_steps", "output_dir"} and quickstart.output_dir == "runs/ab"


def test_a_comparison_begins_where_no_run_is_finished(monkeypatch, tmp_path):
    """Nothing is read of runs that do not exist yet."""
    decided = []

    def run(arms, seeds, lanes, enough):
        decided.append(enough([]))
        return 75

    words = ["paired_comparison.py", "grpo.py --beta 0.1", "--", "--output_dir", str(tmp_path)]
    words += ["--model_name_or_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(paired_comparison, "run", run)
    assert paired_comparison.main() == 75 and decided == [False]


def test_the_sentence_of_the_controls():
    """Two seeds with gains 0.4 and 0.5 by the reward: Student's t with one degree of freedom is 12.706."""
    ends = {"none": [(0.1, 0.5), (0.2, 0.7)], "format": [(0.1, 0.3), (0.2, 0.4)], "random": [(0.1, 0.1), (0.2, 0.2)]}
    said = paired_comparison.told(ends, "grpo.py --beta 0.1", "eval/pass@1")
    assert "| the reward | 0.150 | 0.600 | +0.450 | -0.185 to +1.085 |" in said
    assert said.endswith(
        "grpo.py --beta 0.1: eval/pass@1 gains, by what it is trained on, in 2 seeds: the reward +0.450 "
        "[-0.185, +1.085], the format alone +0.200 [all equal], a random reward +0.000 [all equal]."
    )
    assert paired_comparison.gain([(0.1, 0.5)]) == (0.4, -math.inf, math.inf)


@pytest.mark.slow
def test_two_names_of_one_script_are_equal_and_another_rate_is_not(tiny, tmp_path):
    """Real runs: three pairs that are equal bit for bit end it; repeated, nothing runs; two pairs leave it open."""

    def compare(mine: str, seeds: str) -> tuple[int, str]:
        words = command(tiny, tmp_path, "--total_steps", "1", rollout="hf")[2:]
        place = words.index("--run_name")
        words = [*words[:place], *words[place + 2 :], "--output_dir", str(tmp_path)]
        line = [
            sys.executable,
            "studies/paired_comparison.py",
            mine,
            "--seeds",
            seeds,
            "--metric",
            "policy/entropy",
            "--",
            *words,
        ]
        done = subprocess.run(line, cwd=ROOT, env=run_environment(), capture_output=True, text=True, timeout=900)
        assert done.returncode in (0, 3), done.stdout + done.stderr
        return done.returncode, done.stdout

    code, said = compare("grpo.py --exp_name other", "1..5")
    assert code == 0 and said.endswith("policy/entropy: no difference\n")
    assert said.count("seed ") == 3 and "+0.0000" in said
    code, said = compare("grpo.py --exp_name other", "1..5")
    assert code == 0 and "finished in" not in said
    code, said = compare("grpo.py --temperature 0.5", "1..2")
    assert code == 3 and said.count("finished in") == 2 and said.endswith("undecided\n")

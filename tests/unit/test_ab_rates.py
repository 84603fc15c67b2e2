"""studies/ab_rates.py: it decides as ab.py does, and its page has its numbers."""

from __future__ import annotations

import re
import shlex
import statistics
import subprocess
import sys

import ab
import ab_rates
import numpy as np
import pytest
from helpers import ROOT, command, run_environment


@pytest.mark.parametrize("smallest", [0.0, 0.03])
def test_a_comparison_is_decided_as_ab_decides_it(smallest):
    """Whatever the differences are, the first verdict of ab.py and the number of pairs that it took."""
    rng = np.random.default_rng(1)
    kinds = [rng.normal(mean, 0.02, (12, 20)) for mean in (-0.02, 0.0, 0.02)]
    differences = np.concatenate([*kinds, np.zeros((1, 20)), rng.choice([0.0, 0.01], (12, 20))])
    verdicts, used = ab_rates.decide(differences, smallest)
    for row, place, count in zip(differences, verdicts, used, strict=True):
        found = [ab.verdict(list(row[:n]), smallest) for n in range(1, 21)]
        first = next((n for n, said in enumerate(found) if said), 19)
        assert (found[first], first + 1) == (ab_rates.VERDICTS[place], count)
    assert set(verdicts) >= {0, 2, 3}


def test_what_is_drawn_has_no_mean_and_the_recorded_deviation():
    """Of one setting, each difference and its negative; of two, those of a pair of settings add up to 0.

    Of recorded pairs, the sum of squares of each command line is n times its variance.
    """
    drawn = ab_rates.spread()
    for values in drawn.values():
        assert abs(values.mean()) < 1e-12
    assert len(drawn["one setting"]) == 45 * 12  # pairs of four seeds, in both orders
    fours = drawn["two settings"].reshape(-1, 4)
    assert len(fours) > 900 and np.abs(fours.sum(1)).max() < 1e-12
    found = ab_rates.read_runs()
    squares = 0.0
    for mine in set(found) - {ab_rates.PLAIN}:
        differences = [ours.after - theirs.after for ours, theirs in ab_rates.paired(found, mine)]
        if len(differences) >= 4:
            squares += len(differences) * statistics.variance(differences)
    if "recorded pairs" in drawn:
        assert (drawn["recorded pairs"] ** 2).sum() == pytest.approx(squares)


def test_the_page_has_what_is_printed():
    """And few of the simulated comparisons are false alarms."""
    page = (ROOT / "docs" / "evidence" / "testbed.md").read_text()
    rows = ab_rates.report(10_000, seed=1)
    for printed in (ab_rates.real(), ab_rates.algorithms(), rows):
        assert "\n\n" + "\n".join(printed) + "\n\n" in page
    assert ab_rates.true_difference() in page
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]
    for name, _, mean, _, better, worse, *_ in cells:
        if mean == "0.00":
            assert float(better.rstrip("%")) + float(worse.rstrip("%")) <= 5
        elif name == "recorded pairs":
            assert float(better.rstrip("%")) >= 90


@pytest.fixture(scope="module")
def found() -> dict[str, dict[int, ab_rates.Run]]:
    """The recorded runs."""
    return ab_rates.read_runs()


def differences_of(comparison: ab_rates.Comparison) -> list[float]:
    return [ours.after - theirs.after for ours, theirs in comparison.pairs]


def test_every_recorded_run_has_its_pair(found):
    """Equal seeds have the same held-out problems, and the same answers to them before the first step."""
    with ab_rates.RECORDED.open() as file:
        lines = len(file.readlines())
    assert lines == 1 + sum(len(runs) for runs in found.values())
    for runs in found.values():
        assert list(runs) == list(range(1, len(runs) + 1))
        assert runs.keys() <= found[ab_rates.PLAIN].keys()
    for mine in found:
        for ours, theirs in ab_rates.paired(found, mine):
            assert ours.seed == theirs.seed and ours.before == theirs.before < min(ours.after, theirs.after)
            for run in (ours, theirs):
                assert re.fullmatch("[0-9a-f]{40}", run.commit)
                assert run.seconds is None or 5 < run.seconds < 120


@pytest.mark.parametrize("most", (20, ab_rates.MOST))
def test_recorded_comparisons_end_when_ab_says_so(found, most):
    """Not a pair earlier, nor later; and none takes more pairs than it may."""
    pairs = ab_rates.paired(found, ab_rates.SECOND)
    runs = list(found[ab_rates.PLAIN].values())
    whole = [*ab_rates.in_random_orders(pairs, 20), *ab_rates.halved(runs, 20), *ab_rates.study_pairs(20)]
    whole += [ab_rates.paired(found, mine) for mine in found if mine != ab_rates.PLAIN]
    comparisons = [(most, comparison) for comparison in ab_rates.in_sequence(pairs, most)]
    for order in whole:
        comparisons.append((min(most, len(order)), ab_rates.compare(order, most)))
    for longest, comparison in comparisons:
        differences = differences_of(comparison)
        verdict = ab_rates.VERDICTS[comparison.verdict]
        assert ab.verdict(differences, ab_rates.SMALLEST) == verdict
        assert len(differences) <= longest and (verdict or len(differences) == longest)
        for count in range(len(differences)):
            assert not ab.verdict(differences[:count], ab_rates.SMALLEST)


@pytest.mark.parametrize("most", (20, ab_rates.MOST))
def test_comparisons_in_sequence_share_no_run(found, most):
    """They take all pairs in order but some at the end, which decide nothing."""
    studied = [pair for order in ab_rates.study_pairs(3) for pair in order]
    for pairs in (ab_rates.paired(found, ab_rates.SECOND), studied):
        comparisons = ab_rates.in_sequence(pairs, most)
        taken = [pair for comparison in comparisons for pair in comparison.pairs]
        assert taken == pairs[: len(taken)]
        rest = [ours.after - theirs.after for ours, theirs in pairs[len(taken) :]]
        assert len(rest) < most and not ab.verdict(rest, ab_rates.SMALLEST)
    assert len(comparisons) > 5


def test_halves_share_no_run(found):
    runs = list(found[ab_rates.PLAIN].values())
    for pairs in ab_rates.halved(runs, 20):
        seeds = [run.seed for pair in pairs for run in pair]
        assert len(set(seeds)) == len(seeds) == len(runs) // 2 * 2


def test_a_comparison_costs_what_its_runs_took():
    """A run that was interrupted has no measurement, and counts as the mean of the others."""
    times = (10.0, 20.0, None, 30.0)
    runs = [ab_rates.Run("grpo.py", seed, 0.3, 0.9, seconds, "") for seed, seconds in enumerate(times)]
    pairs = [(runs[0], runs[1]), (runs[2], runs[3])]
    assert ab_rates.cpu_minutes(ab_rates.Comparison(ab_rates.NONE, pairs)) == pytest.approx(80 / 60)


def test_what_is_written_is_read(monkeypatch, tmp_path, found):
    monkeypatch.setattr(ab_rates, "RECORDED", tmp_path / "ab_runs.csv")
    assert ab_rates.read_runs() == {}
    ab_rates.write_runs(found)
    assert ab_rates.read_runs() == found


RECORD = """
import sys
from pathlib import Path
sys.path.insert(0, "studies")
import ab_rates
ab_rates.RECORDED = Path(sys.argv[1])
ab_rates.ab.TESTBED = sys.argv[2]
sys.exit(ab_rates.record(ab_rates.SECOND, range(1, int(sys.argv[3]) + 1)))
"""


@pytest.mark.slow
def test_recording_goes_on_where_it_was(tiny, tmp_path, monkeypatch):
    """Real runs: a seed of both sides, then another; a run is not made twice."""
    words = command(tiny, tmp_path, "--total_steps", "1", rollout="hf")[2:]
    place = words.index("--run_name")
    words = [*words[:place], *words[place + 2 :], "--output_dir", str(tmp_path)]
    table = tmp_path / "ab_runs.csv"
    monkeypatch.setattr(ab_rates, "RECORDED", table)
    rows: list[str] = []
    environment = run_environment()
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):  # the command sets what its forks need
        environment.pop(name, None)
    for seeds in (1, 2, 2):
        line = [sys.executable, "-c", RECORD, str(table), shlex.join(words), str(seeds)]
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        before, rows = rows, table.read_text().splitlines()
        assert set(before) <= set(rows) and len(rows) == 1 + 2 * seeds
        assert done.stdout.count("finished in") == (len(rows) - max(1, len(before)))
    for setting, runs in ab_rates.read_runs().items():
        assert setting in (ab_rates.PLAIN, ab_rates.SECOND)
        assert all(run.seconds > 1 for run in runs.values())

"""studies/paired_comparison_power.py: it decides as paired_comparison.py does, and its page has its numbers."""

from __future__ import annotations

import re
import shlex
import statistics
import subprocess
import sys

import numpy as np
import paired_comparison
import paired_comparison_power
import pytest
from helpers import ROOT, command, run_environment


@pytest.mark.parametrize("smallest", [0.0, 0.03])
def test_a_comparison_is_decided_as_ab_decides_it(smallest):
    """Whatever the differences are, the first verdict of paired_comparison.py and the number of pairs that it took."""
    rng = np.random.default_rng(1)
    kinds = [rng.normal(mean, 0.02, (12, 20)) for mean in (-0.02, 0.0, 0.02)]
    differences = np.concatenate([*kinds, np.zeros((1, 20)), rng.choice([0.0, 0.01], (12, 20))])
    verdicts, used = paired_comparison_power.decide(differences, smallest)
    for row, place, count in zip(differences, verdicts, used, strict=True):
        found = [paired_comparison.verdict(list(row[:n]), smallest) for n in range(1, 21)]
        first = next((n for n, said in enumerate(found) if said), 19)
        assert (found[first], first + 1) == (paired_comparison_power.VERDICTS[place], count)
    assert set(verdicts) >= {0, 2, 3}


def test_what_is_drawn_has_no_mean_and_the_recorded_deviation():
    """Of one setting, each difference and its negative; of two, those of a pair of settings add up to 0.

    Of recorded pairs, the sum of squares of each command line is n times its variance.
    """
    drawn = paired_comparison_power.spread()
    for values in drawn.values():
        assert abs(values.mean()) < 1e-12
    assert len(drawn["one setting"]) == 45 * 12  # pairs of four seeds, in both orders
    fours = drawn["two settings"].reshape(-1, 4)
    assert len(fours) > 900 and np.abs(fours.sum(1)).max() < 1e-12
    found = paired_comparison_power.read_runs()
    squares = 0.0
    for mine in set(found) - {paired_comparison_power.PLAIN}:
        differences = [ours.after - theirs.after for ours, theirs in paired_comparison_power.paired(found, mine)]
        if len(differences) >= 4:
            squares += len(differences) * statistics.variance(differences)
    if "recorded pairs" in drawn:
        assert (drawn["recorded pairs"] ** 2).sum() == pytest.approx(squares)


@pytest.mark.slow
def test_the_page_has_what_is_printed():
    """And few of the simulated comparisons are false alarms."""
    page = (ROOT / "docs" / "evidence" / "testbed.md").read_text()
    rows = paired_comparison_power.report(10_000, seed=1)
    for printed in (paired_comparison_power.real(), paired_comparison_power.algorithms(), rows):
        assert "\n\n" + "\n".join(printed) + "\n\n" in page
    assert paired_comparison_power.true_difference() in page
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]
    for name, _, mean, _, better, worse, *_ in cells:
        if mean == "0.00":
            assert float(better.rstrip("%")) + float(worse.rstrip("%")) <= 5
        elif name == "recorded pairs":
            assert float(better.rstrip("%")) >= 90


@pytest.fixture(scope="module")
def found() -> dict[str, dict[int, paired_comparison_power.Run]]:
    """The recorded runs."""
    return paired_comparison_power.read_runs()


def differences_of(comparison: paired_comparison_power.Comparison) -> list[float]:
    return [ours.after - theirs.after for ours, theirs in comparison.pairs]


def test_every_recorded_run_has_its_pair(found):
    """Equal seeds have the same held-out problems, and the same answers to them before the first step."""
    with paired_comparison_power.RECORDED.open() as file:
        lines = len(file.readlines())
    assert lines == 1 + sum(len(runs) for runs in found.values())
    for runs in found.values():
        assert list(runs) == list(range(1, len(runs) + 1))
        assert runs.keys() <= found[paired_comparison_power.PLAIN].keys()
    for mine in found:
        for ours, theirs in paired_comparison_power.paired(found, mine):
            assert ours.seed == theirs.seed and ours.before == theirs.before < min(ours.after, theirs.after)
            for run in (ours, theirs):
                assert re.fullmatch("[0-9a-f]{40}", run.commit)
                assert run.seconds is None or 5 < run.seconds < 120


@pytest.mark.parametrize("most", (20, paired_comparison_power.MOST))
def test_recorded_comparisons_end_when_ab_says_so(found, most):
    """Not a pair earlier, nor later; and none takes more pairs than it may."""
    pairs = paired_comparison_power.paired(found, paired_comparison_power.SECOND)
    runs = list(found[paired_comparison_power.PLAIN].values())
    whole = [
        *paired_comparison_power.in_random_orders(pairs, 20),
        *paired_comparison_power.halved(runs, 20),
        *paired_comparison_power.study_pairs(20),
    ]
    whole += [paired_comparison_power.paired(found, mine) for mine in found if mine != paired_comparison_power.PLAIN]
    comparisons = [(most, comparison) for comparison in paired_comparison_power.in_sequence(pairs, most)]
    for order in whole:
        comparisons.append((min(most, len(order)), paired_comparison_power.compare(order, most)))
    for longest, comparison in comparisons:
        differences = differences_of(comparison)
        verdict = paired_comparison_power.VERDICTS[comparison.verdict]
        assert paired_comparison.verdict(differences, paired_comparison_power.SMALLEST) == verdict
        assert len(differences) <= longest and (verdict or len(differences) == longest)
        for count in range(len(differences)):
            assert not paired_comparison.verdict(differences[:count], paired_comparison_power.SMALLEST)


@pytest.mark.parametrize("most", (20, paired_comparison_power.MOST))
def test_comparisons_in_sequence_share_no_run(found, most):
    """They take all pairs in order but some at the end, which decide nothing."""
    studied = [pair for order in paired_comparison_power.study_pairs(3) for pair in order]
    for pairs in (paired_comparison_power.paired(found, paired_comparison_power.SECOND), studied):
        comparisons = paired_comparison_power.in_sequence(pairs, most)
        taken = [pair for comparison in comparisons for pair in comparison.pairs]
        assert taken == pairs[: len(taken)]
        rest = [ours.after - theirs.after for ours, theirs in pairs[len(taken) :]]
        assert len(rest) < most and not paired_comparison.verdict(rest, paired_comparison_power.SMALLEST)
    assert len(comparisons) > 5


def test_halves_share_no_run(found):
    runs = list(found[paired_comparison_power.PLAIN].values())
    for pairs in paired_comparison_power.halved(runs, 20):
        seeds = [run.seed for pair in pairs for run in pair]
        assert len(set(seeds)) == len(seeds) == len(runs) // 2 * 2


def test_a_comparison_costs_what_its_runs_took():
    """A run that was interrupted has no measurement, and counts as the mean of the others."""
    times = (10.0, 20.0, None, 30.0)
    runs = [paired_comparison_power.Run("grpo.py", seed, 0.3, 0.9, seconds, "") for seed, seconds in enumerate(times)]
    pairs = [(runs[0], runs[1]), (runs[2], runs[3])]
    assert paired_comparison_power.cpu_minutes(
        paired_comparison_power.Comparison(paired_comparison_power.NONE, pairs)
    ) == pytest.approx(80 / 60)


def test_what_is_written_is_read(monkeypatch, tmp_path, found):
    monkeypatch.setattr(paired_comparison_power, "RECORDED", tmp_path / "ab_runs.csv")
    assert paired_comparison_power.read_runs() == {}
    paired_comparison_power.write_runs(found)
    assert paired_comparison_power.read_runs() == found


RECORD = """
import sys
from pathlib import Path
sys.path.insert(0, "studies")
import paired_comparison_power
paired_comparison_power.RECORDED = Path(sys.argv[1])
paired_comparison_power.ab.TESTBED = sys.argv[2]
sys.exit(paired_comparison_power.record(paired_comparison_power.SECOND, range(1, int(sys.argv[3]) + 1)))
"""


@pytest.mark.slow
def test_recording_goes_on_where_it_was(tiny, tmp_path, monkeypatch):
    """Real runs: a seed of both sides, then another; a run is not made twice."""
    words = command(tiny, tmp_path, "--total_steps", "1", rollout="hf")[2:]
    place = words.index("--run_name")
    words = [*words[:place], *words[place + 2 :], "--output_dir", str(tmp_path)]
    table = tmp_path / "ab_runs.csv"
    monkeypatch.setattr(paired_comparison_power, "RECORDED", table)
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
    for setting, runs in paired_comparison_power.read_runs().items():
        assert setting in (paired_comparison_power.PLAIN, paired_comparison_power.SECOND)
        assert all(run.seconds > 1 for run in runs.values())

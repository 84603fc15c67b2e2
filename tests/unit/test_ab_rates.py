"""studies/ab_rates.py: it decides as ab.py does, and its page has its numbers."""

from __future__ import annotations

import ab
import ab_rates
import numpy as np
import pytest
from helpers import ROOT


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
    """Of one setting, each difference and its negative; of two, those of a pair of settings add up to 0."""
    drawn = ab_rates.spread()
    for values in drawn.values():
        assert abs(values.mean()) < 1e-12
    assert len(drawn["one setting"]) == 46 * 12  # pairs of four seeds, in both orders
    fours = drawn["two settings"].reshape(-1, 4)
    assert len(fours) > 1000 and np.abs(fours.sum(1)).max() < 1e-12


def test_the_page_has_the_table():
    page = (ROOT / "docs" / "evidence" / "testbed.md").read_text()
    rows = ab_rates.report(10_000, seed=1)
    assert "\n".join(rows) in page
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows[2:]]
    for _, _, mean, _, better, worse, *_ in cells:
        if mean == "0.00":
            assert float(better.rstrip("%")) + float(worse.rstrip("%")) <= 5
        else:
            assert float(better.rstrip("%")) >= 90

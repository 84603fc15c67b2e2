"""studies/leak_check.py and studies/try_versions.py: what they make of what they see."""

from __future__ import annotations

import leak_check
import numpy as np
import pytest
import try_versions


def test_a_slope_and_its_interval():
    """A line has its slope without error; noise around none has an interval that covers 0 in 95 % of cases."""
    rate, half, mean = leak_check.slope(100 + 0.03 * np.arange(1000))
    assert abs(rate - 3) < 1e-9 and half < 1e-9 and mean > 100
    noise = np.random.default_rng(0).normal(size=(400, 200))
    covered = [abs(rate) <= half for rate, half, _ in map(leak_check.slope, noise)]
    assert 0.92 < np.mean(covered) < 0.98


def test_jumps_are_left_out_and_named():
    """A line with two jumps removed is the line."""
    line = 100 + 0.001 * np.arange(50)
    jumping = line + 4.5 * (np.arange(50) >= 20) - 2 * (np.arange(50) >= 30)
    steady, jumps = leak_check.without_jumps(jumping)
    assert np.allclose(steady, line, atol=0.01)
    assert jumps == ["+4.5 MiB after step 21", "-2.0 MiB after step 31"]


def test_the_table_has_one_row_of_each_version(tmp_path, monkeypatch):
    """A new row takes the place of the old one; what stands around the table stays."""
    page = tmp_path / "page.md"
    head = f"# Page\n\n| `x` |\n{try_versions.BEGIN}| version | found |\n|---|---|\n"
    tail = f"{try_versions.END}\nAfter it.\n"
    page.write_text(head + tail)
    monkeypatch.setattr(try_versions, "PAGE", page)
    for row in (["b 2", "works"], ["a 1", "breaks: first step"], ["a 1", "works"]):
        try_versions.add_row(row)
    assert page.read_text() == f"{head}| a 1 | works |\n| b 2 | works |\n{tail}"


@pytest.mark.integration
def test_a_version_that_cannot_be_installed_is_said(tmp_path):
    """By pip's error; no package comes."""
    came, wrong = try_versions.install([str(tmp_path / "no-such-file.whl")], tmp_path / "environment")
    assert came == "" and "no-such-file" in wrong

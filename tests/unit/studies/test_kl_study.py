"""studies/kl_study.py draws and prints what docs/maintainers/kl_study.md has, from the table of runs."""

from __future__ import annotations

import math
import sys

import kl_study
import numpy as np
import pandas as pd
import pytest
from helpers import ROOT


def test_intervals_are_students():
    """t of two degrees of freedom is 4.303; the mean of logarithms is shown as a ratio."""
    values = pd.Series([1.0, 2.0, 4.0])
    mean, half = kl_study.interval(values)
    assert (mean, half) == pytest.approx((7 / 3, 4.30265 * values.std() / 3**0.5), rel=1e-4)
    assert math.isnan(kl_study.interval(values[:1])[1])
    logs = np.log(values)
    assert kl_study.effect(logs, as_ratio=True).startswith("2 [0.357, 11.2]")
    assert kl_study.geometric(values) == pytest.approx((2.0, 0.3575, 11.19), rel=1e-3)
    assert kl_study.effect(pd.Series([0.0, 0.0]), as_ratio=True) == "1 for each seed (n 2)"
    assert kl_study.effect(logs, as_ratio=True).endswith(f"t {logs.mean() / logs.sem():.1f} (n 3)")


@pytest.mark.slow
def test_one_command_redraws_everything_in_the_docs(tmp_path, monkeypatch, capsys):
    """The figures, and every line of the table of docs/maintainers/kl_study.md; raw results stay below 1 MB."""
    assert kl_study.TABLE.stat().st_size < 1e6
    monkeypatch.setattr(sys, "argv", ["kl_study.py", "--output", str(tmp_path)])
    kl_study.main()
    printed = set(capsys.readouterr().out.splitlines())
    page = (ROOT / "docs" / "maintainers" / "kl_study.md").read_text()
    study = page.split("\n## The study\n")[1].split("\n## ")[0]
    figures = {word.split(")")[0] for word in study.split("](")[1:] if word.split(")")[0].endswith(".png")}
    assert figures == {path.name for path in tmp_path.iterdir()} and len(figures) == 2
    marked = study.split("<!-- studies/kl_study.py -->")[1::2]  # the tables of the command stand between these marks
    lines = [line for part in marked for line in part.splitlines() if line.startswith("|")]
    assert len(lines) > 10
    assert [line for line in lines if line not in printed] == []

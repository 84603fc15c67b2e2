"""Effects of the estimators on policies trained with them: tables, exact KLs, and the demonstration itself."""

from __future__ import annotations

import subprocess
import sys

import kl_demo
import matplotlib
import mutations
import pytest
import torch
from helpers import ROOT

matplotlib.use("Agg")


def test_same_gradient_same_trajectory():
    """On fresh samples k2 as written and k3 unbiased have one gradient, sample by sample: they train the same table."""
    settings = [("k2", "naive", 0.3), ("k3", "unbiased", 0.3), ("k3", "naive", 0.3)]
    steps = {"seeds": 2, "steps": 20, "mini_batches": 1, "epochs": 1}
    k2, unbiased, forward = kl_demo.toy_grpo(settings, **steps)[2].chunk(3)
    torch.testing.assert_close(k2, unbiased, rtol=0, atol=1e-5)
    assert (k2 - forward).abs().max() > 1e-2


@pytest.mark.slow
def test_demonstration(tmp_path):
    line = [sys.executable, str(ROOT / "studies" / "kl_demo.py"), "--output", str(tmp_path / "kl.png")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "PASS" in done.stdout and (tmp_path / "kl.png").stat().st_size > 10_000, done


@pytest.mark.parametrize(("what", "file", "text"), [mutation[:3] for mutation in mutations.MUTATIONS])
def test_every_mutation_still_applies(what, file, text):
    assert text in (ROOT / file).read_text(), what


@pytest.mark.slow
def test_every_mutation_is_noticed():
    assert mutations.survivors() == []

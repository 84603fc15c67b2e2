"""The demonstration of what the KL estimators do to policies, and known bugs of the KL that the fast tests notice."""

from __future__ import annotations

import subprocess
import sys

import mutations
import pytest
from helpers import ROOT


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

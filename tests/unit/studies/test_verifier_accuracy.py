"""studies/verifier_accuracy.py counts what labeled answers show: false negatives, false positives, hangs, time."""

from __future__ import annotations

import json

import pytest
import verifier_accuracy
from helpers import ROOT
from verifiers import always


def test_the_pairs_are_labeled_and_none_is_there_twice():
    pairs = [json.loads(line) for line in (ROOT / "tests" / "labeled_answers.jsonl").read_text().splitlines()]
    assert len({(pair["truth"], pair["response"]) for pair in pairs}) == len(pairs) >= 1500
    assert all(isinstance(pair["label"], bool) and pair["truth"] for pair in pairs)


def test_a_grader_that_raises_is_a_finding_and_not_an_end():
    found = verifier_accuracy.timed(lambda: 1 / 0)
    assert (found.score, found.parts["raised"]) == (0.0, 1.0)
    assert verifier_accuracy.timed(lambda: None).score == 0.0


@pytest.mark.slow
def test_the_page_counts_errors_by_grader_and_family(tmp_path):
    """A grader that is always content has every wrong answer as a false positive."""
    page = tmp_path / "page.md"
    verifier_accuracy.main(["--rows", "31", "--output", str(page)])
    text = page.read_text()
    assert "21 right and 10 wrong answers" in text
    assert "| ours | 0 | 0 | 0 | 0 |" in text and "| math-verify | 1 | 0 | 0 | 0 |" in text
    totals, families = verifier_accuracy.run(always, verifier_accuracy.labeled()[:31], 10.0)
    assert totals["false positives"] == families["fractions"]["false positives"] == 10

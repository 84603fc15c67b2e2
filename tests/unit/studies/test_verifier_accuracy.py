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
    assert verifier_accuracy.timed(lambda: None).score == 0.0, "TRL's word for a truth that it cannot parse"


def test_a_folder_without_wheels_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        verifier_accuracy.main(["--wheels", str(tmp_path)])
    assert ended.value.code == 2 and "no package trl there" in capsys.readouterr().err


@pytest.mark.slow
def test_the_page_counts_errors_by_grader_and_family(tmp_path):
    """A grader that is always content has every wrong answer as a false positive."""
    page = tmp_path / "page.md"
    verifier_accuracy.main(["--rows", "31", "--output", str(page)])
    text = page.read_text()
    assert "21 right and 10 wrong answers" in text
    assert "| ours | 0 | 0 | 0 | 0 |" in text and "| math-verify | 1 | 0 | 0 | 0 |" in text
    totals, families = verifier_accuracy.run(always, verifier_accuracy.labeled(None)["written families"][:31], 10.0)
    assert totals["false positives"] == families["fractions"]["false positives"] == 10


PEER = """
import pytest
def test():
    assert grade_answer_sympy("1/2", "0.5")
    assert not is_equiv("2", "3")
    assert compute_score("The answer is 7", "7") == 1.0
    assert compare_strings("3", "4") == False
    assert unknown("3", "4")
@pytest.mark.parametrize("gold,said,right", [
    ("1/2", "0.5", True), ("a", "b", 0), ("2", "\\\\boxed{3}", True), (1, 2, True)
])
def test_p(gold, said, right): ...
"""


@pytest.mark.integration
def test_the_cases_of_other_projects_are_read_out_of_their_tests(tmp_path):
    """Positive and negated asserts, scores, parametrized rows with the truth first; what is no case is left out."""
    (tmp_path / "one" / "tests").mkdir(parents=True)
    (tmp_path / "one" / "tests" / "test_a.py").write_text(PEER)
    (tmp_path / "one" / "broken.py").write_text("def")
    (tmp_path / "none").mkdir()
    rows = verifier_accuracy.suite_rows(tmp_path / "one")
    assert [row["label"] for row in rows].count(True) == 4 and len(rows) == 7
    assert {"family": "all", "verifier": "math", "response": "\\boxed{4}", "truth": "3", "label": False} in rows
    table = verifier_accuracy.peers(tmp_path, 10.0)
    assert table[2] == "| one | 7 | 6 | 6 | 6 |" and table[-1].endswith("right: '\\\\boxed{3}' for '2'")

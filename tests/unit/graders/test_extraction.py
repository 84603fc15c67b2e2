"""Answers as models write them: families of sentences, boxes, units and copies of the question, and their hedges."""

from __future__ import annotations

import pytest

import rewards
from graders.math import extraction, units
from graders.text import alternatives


def score(response: str, truth: str, row: dict | None = None, verifier: str = "math") -> float:
    return rewards.VERIFIERS[verifier](response, truth, row or {}).score


def failures(pairs: list[tuple[str, str]], wanted: float, verifier: str = "math") -> list[tuple[str, str]]:
    return [pair for pair in pairs if score(*pair, verifier=verifier) != wanted]


@pytest.mark.parametrize(("wide", "answer"), [(60, "1, 2"), (61, "2")])
def test_boxes_that_stand_far_apart_are_no_list(wide, answer):
    between = "and".center(wide)
    assert extraction.boxed_answer(rf"\boxed{{1}}{between}\boxed{{2}}", True)[0] == answer


def test_a_list_of_boxes_has_at_most_ten():
    boxes = [rf"\boxed{{{number}}}" for number in range(11)]
    assert extraction.boxed_answer(" and ".join(boxes), True)[0] == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10"


def test_units_under_every_name_and_in_every_wrapper():
    """The tables' own keys: min and sec are names of functions, too."""
    wrappers = ["5\\text{{ {0}}}", "5\\text{{{0}}}", "5\\ \\mathrm{{{0}}}", "5\\,\\text{{{0}}}", "5~\\textrm{{{0}}}"]
    pairs = [(f"\\boxed{{{w.format(name)}}}", "5") for name in units.UNITS for w in wrappers if "." not in name]
    assert failures(pairs, 1) == []
    assert score("\\boxed{\\text{max}(3,5)}", "5") == 1 and score("\\boxed{5\\text{ max}}", "5") == 0


def test_a_list_of_truths_means_any_of_them():
    truths = '["1/2", "one half", "50\\\\%"]'
    assert failures([(f"\\boxed{{{text}}}", truths) for text in ("0.5", "\\text{one half}", "50\\%")], 1) == []
    assert score("\\boxed{2}", truths) == 0
    assert alternatives("[0, 1]") == ["[0, 1]"] and alternatives("[a") == ["[a"], "an interval, and no JSON"
    assert (
        score("#### 8", '["7", "8"]', verifier="gsm8k") == 1 and score("9", '["7", "8"]', verifier="last_number") == 0
    )
    assert rewards.truth_error("math", truths, {}) == "" and rewards.truth_error("last_number", '["x"]', {}) != ""

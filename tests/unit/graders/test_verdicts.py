"""Verdicts of all graders on the answers and programs of tests/verdicts.jsonl, one each line.

A line has a verifier, a truth, its row, and what is expected. With a response it is ``label``, or ``says``: the
response earns nothing and is unscorable, with these words. Without a response it is what the start says of the row,
"" for a good one. ``needs`` is a package that may be absent, or namespaces.
"""

from __future__ import annotations

import sys

import pytest
from helpers import ROOT, read_jsonl

import rewards
from graders import ifeval
from graders.code import sandbox

CASES = read_jsonl(ROOT / "tests" / "verdicts.jsonl")
PROGRAMS = [case for case in CASES if case["verifier"] == "code"]
ANSWERS: dict[str, list[dict]] = {}
for answer in CASES:
    if answer["verifier"] != "code":
        ANSWERS.setdefault(answer["family"], []).append(answer)


def is_wrong(case: dict) -> bool:
    """Whether the grader, or the check at the start, says something else than is expected."""
    row = case.get("row", {})
    if "response" not in case:
        said = rewards.truth_error(case["verifier"], case["truth"], row)
        return case["says"] not in said or bool(said) != bool(case["says"])
    found = rewards.VERIFIERS[case["verifier"]](case["response"], case["truth"], row)
    if "says" in case:
        return (found.score, found.status) != (0, "unscorable") or case["says"] not in found.detail
    parts = {"correct": found.score} | found.parts
    wanted = {"correct": case["label"]} | case.get("parts", {})
    return (found.score, found.status) != (case["label"], "ok") or not wanted.items() <= parts.items()


@pytest.fixture(autouse=True)
def _as_in_a_worker():
    """No limit of Python's for digits, whichever test ran before."""
    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(most)


@pytest.mark.parametrize("family", ANSWERS)
def test_answers_have_their_verdicts(family):
    """The score, the part ``correct`` and others that the line names, and the status."""
    for package in {case["needs"] for case in ANSWERS[family] if "needs" in case}:
        module = pytest.importorskip(package)
        if package == "nltk":
            try:
                module.data.find("tokenizers/punkt_tab")
            except LookupError:
                pytest.skip("nltk's data punkt_tab is not there")
    assert [case for case in ANSWERS[family] if is_wrong(case)] == []


@pytest.mark.parametrize("case", PROGRAMS, ids=[f"{case['family']} {k}" for k, case in enumerate(PROGRAMS)])
def test_programs_have_their_verdicts(monkeypatch, case):
    """In the sandbox, or under limits alone where there are no namespaces."""
    refused = sandbox.namespaces_refused()
    if refused and case.get("needs") == "namespaces":
        pytest.skip(f"the kernel gives no namespaces here: {refused}")
    monkeypatch.setattr(sandbox, "allow_unsafe", bool(refused))
    assert not is_wrong(case)


def test_every_constraint_is_tried_both_ways():
    tried = set()
    for case in CASES:
        if case["verifier"] == "ifeval" and case.get("row"):
            tried |= {(name, case["label"]) for name in case["row"]["instruction_id_list"]}
    assert tried == {(name, right) for name in ifeval.CONSTRAINTS for right in (True, False)}
    assert len(ifeval.CONSTRAINTS) == 25

"""Answers that verifiers accept and reject: labeled real data, tables of answers, and evasive model outputs."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import sys
import threading
import time

import pytest
from helpers import ROOT, read_jsonl, real

import rewards
from graders import ifeval, reasoning_gym_tasks
from graders.math import algebra
from graders.math.extraction import final_answer
from graders.text import after_thinking, last_boxed
from rewards import VERIFIERS, Reward, RewardPool


def score(name: str, response: str, truth: str, row: dict | None = None) -> float:
    reward = VERIFIERS[name](response, truth, row or {})
    assert isinstance(reward, Reward) and reward.status == "ok", reward
    return reward.score


# -------------------------------------------------------------------------------------------------- labeled real data


def test_gsm8k_labels():
    rows = read_jsonl(real("gsm8k_model_solutions.jsonl"))
    assert len(rows) == 5276 and 1000 < sum(r["label"] for r in rows) < 4000
    wrong = [r for r in rows if (score("gsm8k", r["pred"], r["gold"]) == 1) != r["label"]]
    print(f"GSM8K: {len(rows)} labeled solutions, {len(wrong)} judged wrongly")
    assert wrong == []


def test_gsm8k_golds():
    rows = read_jsonl(real("gsm8k_test.jsonl"))
    assert len(rows) == 1319
    refused = [r for r in rows if score("gsm8k", r["answer"], r["answer"]) != 1]
    print(f"GSM8K: {len(rows)} golds, {len(refused)} refused")
    assert refused == []
    assert [r for r in rows if rewards.truth_error("gsm8k", r["answer"], r)] == []


@pytest.mark.integration
def test_math_gold_pairs():
    rows = read_jsonl(real("math500_gold_pairs.jsonl"))
    assert len(rows) == 992 and 400 < sum(r["label"] for r in rows) < 600
    wrong = [r for r in rows if (score("math", f"Hence \\boxed{{{r['pred']}}}.", r["gold"]) == 1) != r["label"]]
    print(f"MATH: {len(rows)} labeled pairs, {len(wrong)} judged wrongly")
    assert wrong == []


def test_math_solutions():
    """The written solutions of MATH-500 end in the right box; every truth passes its own verifier."""
    rows = read_jsonl(real("math500.jsonl"))
    assert [r["answer"] for r in rows if score("math", r["solution"], r["answer"]) != 1] == []
    assert [r["answer"] for r in rows if rewards.truth_error("math", r["answer"], r)] == []


# -------------------------------------------------------------------------- labeled pairs written for this project

FAMILIES: dict[str, list[dict]] = {}
for pair in read_jsonl(ROOT / "tests" / "labeled_answers.jsonl"):
    FAMILIES.setdefault(pair["family"], []).append(pair)
REFUSED = {  # (truth, response): right, but not found to be, nor by math-verify
    ("2x > 6", "\\boxed{x > 3}"),
    ("6", "\\boxed{110_2}"),
    ("\\binom{9}{4}", "\\boxed{C(9,4)}"),
    ("5040", "\\boxed{P(7,7)}"),
}


def test_the_families_are_those_that_the_page_compares():
    assert len(FAMILIES) == 55 and sum(map(len, FAMILIES.values())) >= 1500
    for pairs in list(FAMILIES.values())[16:]:
        assert sum(pair["label"] for pair in pairs) >= 12 and sum(not pair["label"] for pair in pairs) >= 8
    names = ["fractions", "sets", "intervals", "matrices", "units", "percent", "words", "equations"]
    names += ["multiple answers", "scientific notation", "degenerate answers", "endings"]
    assert set(names) <= set(FAMILIES)


@pytest.mark.integration
@pytest.mark.parametrize("family", FAMILIES)
def test_no_wrong_answer_of_a_family_is_right(family):
    wrong = [pair for pair in FAMILIES[family] if not pair["label"]]
    assert [pair for pair in wrong if score("math", pair["response"], pair["truth"]) == 1] == []


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "degenerate answers"])
def test_the_right_answers_of_a_family_are_right(family):
    right = [(pair["truth"], pair["response"]) for pair in FAMILIES[family] if pair["label"]]
    assert {pair for pair in right if score("math", pair[1], pair[0]) != 1} <= REFUSED


@pytest.mark.slow
def test_no_family_has_more_false_negatives_than_math_verify_alone():
    import logging

    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    missed: dict[str, list[int]] = {}
    for family, pairs in FAMILIES.items():
        right = [pair for pair in pairs if pair["label"]]
        alone = [
            verify(
                parse(f"${p['truth']}$", parsing_timeout=None),
                parse(p["response"], parsing_timeout=None),
                timeout_seconds=None,
            )
            for p in right
        ]
        here = [score("math", pair["response"], pair["truth"]) for pair in right]
        missed[family] = [here.count(0.0), alone.count(False)]
    print(f"false negatives [here, math-verify alone]: {missed}")
    assert all(here <= alone for here, alone in missed.values())


@pytest.mark.parametrize(
    ("truth", "response"),
    [
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"x=1 or x=5", r"x=5 \text{ or } x=1"),
        ("5.4", r"5.4 \text{ square units}"),
    ],
)
def test_what_the_parser_gets_is_the_text_as_it_is(monkeypatch, truth, response):
    """Neither blanks nor row separators nor words are taken out before math-verify reads it; units alone are."""
    seen = []

    def parse(latex: str) -> list:
        seen.append(latex)
        return []

    monkeypatch.setattr(algebra, "parse_math", parse)
    rewards.math_(f"\\boxed{{{response}+0}}", truth, {})
    assert seen == [truth, f"{response}+0"]


@pytest.mark.integration
@pytest.mark.parametrize("constant", ["1=2", "0=0", "x=x", "0.0", "0", "\\emptyset", "\\{\\}", "\\infty", "nan", "1<2"])
def test_no_constant_is_right_for_many_truths(constant):
    """A policy finds what a grader takes for anything."""
    truths = ["x^{2}-2 x+10=0", "\\log_6 216=3", "N=n", "I=-\\frac{200}{3}e^{-10t}\\sin 30t", "x^2+1=0", "y=x^2+1"]
    truths += ["9.1\\times 10^{-31}", "1.6e-19", "6.63\\times10^{-34}", "10^{-12}", "x>2", "[0,1)", "\\{1,2\\}", "42"]
    assert [truth for truth in truths if score("math", f"\\boxed{{{constant}}}", truth) == 1] == []


# --------------------------------------------------------------------------------------- a sample made for this project

GSM8K = [  # (response, truth, right?)
    ("3 + 4 = 7\n#### 7", "two lines\n#### 7", True),
    ("#### 1,250", "1250", True),
    ("#### $1,250.00 in all, of 2000", "1250", True),
    ("The total is 18 eggs.", "18", True),
    ("#### 17\nso not 18 but 17", "18", False),
    ("#### 18\nThat was question 3.", "18", True),
    ("#### eighteen, 18 years", "#### 18", True),
    ("####\n18", "18", True),
    ("#### -5", "-5", True),
    ("10-4", "-4", False),
    ("#### -$42", "-42", True),
    ("#### not 42", "42", False),
    ("#### .5", "5", False),
]
MATH = [
    ("**Answer:** The area is $25\\pi$ square units.", "25\\pi", True),
    ("**Answer:** $25\\pi$ square units.", "25\\pi", True),
    ("**Answer:** **42**", "42", True),
    ("**Answer:** not 42", "42", False),
    ("The answer is $\\frac{3}{4}$, i.e. 0.75.", "\\frac34", True),
    ("Answer: $42$, or equivalently $6 \\cdot 7$", "42", True),
    ("The answer is 42 (approximately).", "42", True),
    ("Answer: 42 (approximately 43)", "43", False),
    ("Answer: 42 \u2014 as required", "42", True),
    ("Answer: 42 \u2705", "42", True),
    (r"\boxed{Answer: 42}", "42", True),
    (r"\boxed{\text{Answer: }42}", "42", True),
    (r"\boxed{The answer is not 42}", "42", False),
    (r"\boxed{42 \tag{1}}", "42", True),
    (r"\boxed{42 \checkmark}", "42", True),
    (r"\boxed{\#42}", "42", True),
    (r"\boxed{\frac{1}{2}}", r"\frac12", True),
    (r"\boxed{0.5}", r"\frac{1}{2}", True),
    (r"\boxed{\dfrac{14}{3}}", r"\frac{14}{3}", True),
    (r"\boxed{ 14/3 }", r"\frac{14}{3}", True),
    (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"(3,\frac{\pi}{2})", True),
    (r"\boxed{(3, \pi)}", r"(3,\frac{\pi}{2})", False),
    (r"\boxed{32,348}", r"\$32,\!348", True),
    (r"\boxed{\text{Evelyn}}", "Evelyn", True),
    (r"\boxed{evelyn}", r"\text{Evelyn}", True),
    (r"\boxed{x = 5}", "5", True),
    (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", True),
    (r"\boxed{90^\circ}", "90", True),
    (r"\boxed{50\%}", "50", True),
    (r"\fbox{7}", "7", True),
    (r"\boxed{1} \text{ or rather } \boxed{2}", "2", True),  # of several the last
    (r"\boxed{2} \text{ or rather } \boxed{1}", "2", False),
    (r"\boxed{2} \text{ and then } \boxed{1", "2", False),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}", True),
    (r"$d = \boxed{15\frac{39}{40}},$ or $\boxed{\frac{639}{40}}$ inches.", r"\frac{639}{40}", True),  # said twice
    (r"$x = \boxed{2}$, or $x = \boxed{3}$", "3", False),
    ("The final answer is $\\frac{3}{4}$.", "0.75", True),
    ("The answer is: **12**", "12", True),
    ("Answer: 12", "12", True),
    ("#### 12", "12", True),
    ("It must be 12", "12", False),  # nothing says that it is the answer
    ("<think>\\boxed{3}</think> The answer is 4.", "4", True),
    (r"\boxed{x^2 + 2x + 1}", r"(x+1)^2", True),
    (r"\boxed{[0, 1)}", "[0,1)", True),
    (r"\boxed{(0, 1)}", "[0,1)", False),
    (r"\boxed{p - q}", "q - p", False),
    (r"\boxed{10^{10}}", "10000000000", True),
    (r"\boxed{x > 1, x < 3}", "(1, 3)", True),
    (
        r"\boxed{\begin{cases} x^2 \text{ if } x<1 \\ 3x, x\ge 1 \end{cases}}",  # without a column for conditions
        r"\begin{cases} x^2 & x<1 \\ 3x & x\ge 1 \end{cases}",
        True,
    ),
    ("\\boxed{42}" + " and so on" * 1000, "42", True),  # the answer need not be at the end
]
NUMBERS = {"nums": [2, 3, 4, 25]}
COUNTDOWN = [
    ("<answer>25 - 4 + 3 * 2</answer>", "27", True),
    ("<answer>25-4+3*2 = 27</answer>", "27", True),
    ("<answer>25-4+3*2 = 28</answer>", "27", False),
    ("<answer>$25 - 4 + 3 \\times 2$</answer>", "27", True),
    ("<answer>`25-4+3*2`</answer>", "27", True),
    ("<answer>25 - 4\n+ 3*2</answer>", "27", True),
    ("<answer>2 5 - 4 + 3*2</answer>", "27", False),
    ("\\boxed{25 - 4 + 3 \\times 2}", "27", True),
    ("<answer>2 × 3 + 25 − 4</answer>", "27", True),
    ("<answer>(25 - 4) / 3 * 2</answer>", "14", True),
    ("<answer>2 / 3 * 4 * 25</answer>", "200/3", True),
    ("<answer>25 + 2</answer>", "27", False),  # each number once
    ("<answer>25 + 2 + 3 - 3 + 4 - 4</answer>", "27", False),
    ("<answer>27</answer>", "27", False),
    ("<answer>25 - 4 + 3.0 * 2</answer>", "27", False),
    ("<answer>2.3 * 4 + 25</answer>", "34.2", False),  # 2 and 3 are not used
    ("<answer>2**3 * 4 - 25</answer>", "7", False),
    ("<answer>25 // 2 + 3 * 4</answer>", "24", False),
    ("<answer>25 / (2 * 3 + -4 - 2)</answer>", "1", False),
    ("<answer>25 / (4 - 2 * 2)</answer>", "1", False),
    ("<answer>9**9**9**9</answer>", "1", False),
    ("<answer>__import__('os').getpid()</answer>", "1", False),
    ("<answer>2_5 - 4 + 3 * 2</answer>", "27", False),
    ("<answer>" + "(" * 400 + "1" + ")" * 400 + "</answer>", "1", False),
    ("<think><answer>25 - 4 + 3 * 2</answer></think>", "27", False),
    ("25 - 4 + 3 * 2", "27", False),
]
FORMAT = [
    ("<think>so</think><answer>4</answer>", "", True),
    ("so\nand so</think>\n\n<answer>4</answer>\n", "", True),  # the template opened it
    ("<think></think><answer>4</answer>", "", False),
    ("<think>so</think><answer> </answer>", "", False),
    ("<think></think>a", "", False),
    ("<answer>4</answer><think>so</think>", "", False),
    ("<think>so</think><answer>4</answer> and more", "", False),
    ("<think>so</think> well <answer>4</answer>", "", False),
    ("<think>so</think><answer>4</answer><answer>5</answer>", "", False),
    ("<think>a<think>b</think></think><answer>4</answer>", "", False),
    ("<think>so</think><answer>4", "", False),
    ("", "", False),
]
WORDS = "Blue whales sing. They sing long songs!"
IFEVAL = [  # (response, constraint, arguments, right?), with the semantics of the published evaluation
    (WORDS, "keywords:existence", {"keywords": ["blue", "song"]}, True),  # also inside a word
    (WORDS, "keywords:existence", {"keywords": ["blue", "red"]}, False),
    (WORDS, "keywords:forbidden_words", {"forbidden_words": ["whale"]}, True),  # whole words alone
    (WORDS, "keywords:forbidden_words", {"forbidden_words": ["Whales"]}, False),
    (WORDS, "keywords:frequency", {"keyword": "sing", "relation": "at least", "frequency": 2}, True),
    (WORDS, "keywords:frequency", {"keyword": "sing", "relation": "less than", "frequency": 2}, False),
    (WORDS, "keywords:letter_frequency", {"letter": "S", "let_relation": "at least", "let_frequency": 5}, True),
    (WORDS, "keywords:letter_frequency", {"letter": "s", "let_relation": "less than", "let_frequency": 5}, False),
    (WORDS, "length_constraints:number_words", {"num_words": 7, "relation": "at least"}, True),
    ("it's", "length_constraints:number_words", {"num_words": 2, "relation": "less than"}, False),  # two words
    ("a\n***\nb", "length_constraints:number_paragraphs", {"num_paragraphs": 2}, True),
    ("a\n***\n\n***\nb", "length_constraints:number_paragraphs", {"num_paragraphs": 2}, False),
    (
        'One.\n\n"Two, too.',
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "two"},
        True,
    ),
    (
        "One.\n\nTwo.",
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 3, "nth_paragraph": 2, "first_word": "two"},
        False,
    ),
    ("[name] at [place]", "detectable_content:number_placeholders", {"num_placeholders": 2}, True),
    ("[name]", "detectable_content:number_placeholders", {"num_placeholders": 2}, False),
    ("Bye\nP.S. more", "detectable_content:postscript", {"postscript_marker": "P.S."}, True),
    ("Bye\nP. P. S more", "detectable_content:postscript", {"postscript_marker": "P.P.S"}, True),
    ("Bye PS more", "detectable_content:postscript", {"postscript_marker": "P.S."}, False),
    ("* a\n- b\n** c **", "detectable_format:number_bullet_lists", {"num_bullets": 2}, True),
    ("* a\n- b\n* c", "detectable_format:number_bullet_lists", {"num_bullets": 2}, False),
    ("Well. My answer is maybe.", "detectable_format:constrained_response", {}, True),
    ("My answer is perhaps.", "detectable_format:constrained_response", {}, False),
    ("*a* and **b**", "detectable_format:number_highlighted_sections", {"num_highlights": 2}, True),
    ("*a* and * *", "detectable_format:number_highlighted_sections", {"num_highlights": 2}, False),
    (
        "SECTION 1\na\nSECTION 2\nb",
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        True,
    ),
    ("SECTION 1\na", "detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}, False),
    ('```json\n{"a": [1]}\n```', "detectable_format:json_format", {}, True),
    ('{"a": [1]', "detectable_format:json_format", {}, False),
    ("<<A title>>\ntext", "detectable_format:title", {}, True),
    ("<< >>\ntext", "detectable_format:title", {}, False),
    ("a ****** b", "combination:two_responses", {}, True),
    ("a ****** a", "combination:two_responses", {}, False),
    ("Say it. I do.", "combination:repeat_prompt", {"prompt_to_repeat": "say it."}, True),
    ("I do. Say it.", "combination:repeat_prompt", {"prompt_to_repeat": "say it."}, False),
    ('well, bye."', "startend:end_checker", {"end_phrase": "Bye."}, True),
    ("well, bye. Or not", "startend:end_checker", {"end_phrase": "Bye."}, False),
    ('"quoted"', "startend:quotation", {}, True),
    ('"', "startend:quotation", {}, False),
    ("one two", "punctuation:no_comma", {}, True),
    ("one, two", "punctuation:no_comma", {}, False),
    ("", "punctuation:no_comma", {}, False),  # nothing said keeps no promise
    ("<think>a, b</think>one two", "punctuation:no_comma", {}, True),
]
ENGLISH = "the quick brown fox jumps over the lazy dog and goes home"
BY_LANGDETECT = [
    (ENGLISH, "language:response_language", {"language": "en"}, True),
    ("der schnelle braune Fuchs springt über den faulen Hund", "language:response_language", {"language": "en"}, False),
    ("THE ANSWER IS WRITTEN IN ENGLISH AND IN CAPITAL LETTERS", "change_case:english_capital", {}, True),
    (ENGLISH, "change_case:english_capital", {}, False),
    (ENGLISH, "change_case:english_lowercase", {}, True),
    (ENGLISH.title(), "change_case:english_lowercase", {}, False),
]
BY_NLTK = [
    (
        "Dr. A. Bee went. She saw.",
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        True,
    ),
    ("One. Two. Three.", "length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}, False),
    (
        "NASA and I went",
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        True,
    ),
    (
        "Nasa went",
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": "at least"},
        False,
    ),
]


@pytest.mark.parametrize(("response", "truth", "right"), GSM8K, ids=lambda v: repr(v)[:24])
def test_gsm8k(response, truth, right):
    assert score("gsm8k", response, truth) == right


@pytest.mark.parametrize(("response", "truth", "right"), MATH, ids=lambda v: repr(v)[:24])
def test_math(response, truth, right):
    assert score("math", response, truth) == right


@pytest.mark.parametrize(("response", "truth", "right"), COUNTDOWN, ids=lambda v: repr(v)[:24])
def test_countdown(response, truth, right):
    assert score("countdown", response, truth, NUMBERS) == right
    target = json.dumps({"target": truth, "numbers": NUMBERS["nums"]})
    assert score("countdown", response, target) == right


@pytest.mark.parametrize("numbers", ["[2, 3, 4, 25]", "2 3 4 25", "2,3,4,25", (2, 3, 4, 25)])
def test_numbers_of_countdown_in_a_table(numbers):
    """A column of a CSV is text: read otherwise, a row would be good at the start and no right answer scored."""
    assert score("countdown", "<answer>25-4+3*2</answer>", "27", {"nums": numbers}) == 1
    assert score("countdown", "<answer>25+2</answer>", "27", {"nums": numbers}) == 0


def test_brackets_without_end_are_not_parsed(monkeypatch):
    """The parser takes seconds for them, as for braces."""
    monkeypatch.setattr(algebra, "parse_math", None)
    for bracket in ("(", "[", "\\right.(", "(a+["):
        assert score("math", f"\\boxed{{{bracket * 90}}}", "5") == 0


@pytest.mark.parametrize(("response", "truth", "right"), FORMAT, ids=lambda v: repr(v)[:24])
def test_format(response, truth, right):
    assert score("format", response, truth) == right


def keeps(response: str, name: str, arguments: dict) -> float:
    """The score by the constraint as truth; the columns of the row say the same."""
    given = {"instruction_id_list": [name], "kwargs": [{**arguments, "unused": None}]}
    found = score("ifeval", response, json.dumps(given))
    assert found == score("ifeval", response, "", given)
    return found


@pytest.mark.parametrize(("response", "name", "arguments", "right"), IFEVAL, ids=lambda v: repr(v)[:40])
def test_ifeval(response, name, arguments, right):
    assert keeps(response, name, arguments) == right


@pytest.mark.parametrize(("response", "name", "arguments", "right"), BY_LANGDETECT, ids=lambda v: repr(v)[:40])
def test_ifeval_by_langdetect(response, name, arguments, right):
    pytest.importorskip("langdetect")
    assert keeps(response, name, arguments) == right


@pytest.mark.parametrize(("response", "name", "arguments", "right"), BY_NLTK, ids=lambda v: repr(v)[:40])
def test_ifeval_by_nltk(response, name, arguments, right):
    nltk = pytest.importorskip("nltk")
    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        pytest.skip("nltk's data punkt_tab is not there")
    assert keeps(response, name, arguments) == right


def test_every_constraint_is_tried_both_ways():
    tried = {(name, right) for _, name, _, right in IFEVAL + BY_LANGDETECT + BY_NLTK}
    assert tried == {(name, right) for name in ifeval.CONSTRAINTS for right in (True, False)}
    assert len(ifeval.CONSTRAINTS) == 25


@pytest.mark.parametrize("name", ["language:response_language", "change_case:capital_word_frequency"])
def test_a_constraint_that_needs_a_package_is_refused_at_the_start_without_it(monkeypatch, name):
    for package in ("langdetect", "nltk"):
        monkeypatch.setitem(sys.modules, package, None)
    arguments = {"language": "en", "capital_frequency": 1, "capital_relation": "at least"}
    truth = json.dumps({"instruction_id_list": [name], "kwargs": [arguments]})
    assert "pip install" in rewards.truth_error("ifeval", truth, {})


def test_ifeval_share():
    truth = json.dumps(
        {"instruction_id_list": ["punctuation:no_comma", "detectable_format:constrained_response"], "kwargs": [{}, {}]}
    )
    assert VERIFIERS["ifeval"]("a b", truth, {}).parts["constraints"] == 0.5
    assert VERIFIERS["ifeval"]("a", '{"instruction_id_list": ["detectable:nothing"]}', {}).status == "unscorable"
    assert VERIFIERS["ifeval"]("a", "", {}).status == "unscorable"


@pytest.mark.parametrize(
    "name", ["chain_sum", "countdown", "simple_integration", "spiral_matrix", "n_queens", "base_conversion"]
)
def test_reasoning_gym(name):
    import reasoning_gym

    for row in reasoning_gym.create_dataset(name, size=5, seed=3):
        row = json.loads(json.dumps(row, default=str))
        assert rewards.truth_error("reasoning_gym", row["answer"], row) == ""
        assert score("reasoning_gym", f"so <answer>{row['answer']}</answer>", row["answer"], row) == 1
        assert score("reasoning_gym", row["answer"], row["answer"], row) == 0, "no answer was named"
        for wrong in (f"{row['answer']} or 1", "", "x", "__import__('os').getpid()"):
            assert score("reasoning_gym", f"<answer>{wrong}</answer>", row["answer"], row) < 1
    assert VERIFIERS["reasoning_gym"]("<answer>1</answer>", "1", {}).status == "unscorable"


@pytest.mark.parametrize("name", list(reasoning_gym_tasks.GYM_ANSWERS))
def test_reasoning_gym_evaluates_no_code(name, tmp_path):
    """These scorers hand the answer to eval; what could call something must not reach them."""
    import reasoning_gym

    row = json.loads(json.dumps(reasoning_gym.create_dataset(name, size=1, seed=3)[0], default=str))
    made = tmp_path / "made"
    for attack in (
        f"open('{made}', 'w')",
        f"__import__('os').system('touch {made}')",
        f"[open('{made}', 'w')]",
        f'S(\'open("{made}", "w")\')',
        f"().__class__.__base__.__subclasses__() and open('{made}', 'w')",
        f"x.y(open('{made}', 'w'))",
    ):
        assert score("reasoning_gym", f"<answer>{attack}</answer>", row["answer"], row) == 0
        assert not made.exists(), attack


def test_extraction():
    assert last_boxed(r"\boxed{\frac{1}{2}} \boxed{\{a\}}") == r"\{a\}"
    assert last_boxed(r"\boxed{") is None and last_boxed("\\boxed{" + "{" * 5000) is None and last_boxed("") is None
    assert final_answer("The answer is 4.\nThe answer is 5.") == "5"
    assert final_answer("the answer is not 42") is None and final_answer("42") is None
    assert after_thinking("<think>a</think>b<think>c") == "" and after_thinking("a</think> b") == " b"


# ------------------------------------------------------------------------------------------ answers that are no answers

PROMPT = "What is six times seven? Put the final answer into \\boxed{} or behind ####."
DEGENERATE = {
    "empty": "",
    "white space": " \n\t ",
    "the prompt": PROMPT,
    "closing tag": "</think>",
    "all numbers": " ".join(map(str, range(101))),
    "all numbers in a box": "\\boxed{" + ", ".join(map(str, range(101))) + "}",
    "all numbers in a set": "\\boxed{\\{" + ", ".join(map(str, range(101))) + "\\}}",
    "all numbers in boxes": "".join(f"\\boxed{{{i}}}" for i in range(101)),
    "all numbers tagged": "<answer>" + " ".join(map(str, range(101))) + "</answer>",
    "right box, then wrong box": "\\boxed{42} \\boxed{41}",
    "only thought": "<think>It is 42. #### 42 \\boxed{42} <answer>42</answer></think>",
    "thought without end": "<think>It is 42. #### 42 \\boxed{42} <answer>42</answer>",
    "denied": "the answer is not 42",
    "denied, boxed": "\\boxed{\\text{not } 42}",
    "open box": "so \\boxed{42",
    "ten megabytes": "a" * 10_000_000,
    "ten megabytes of digits": "9" * 10_000_000,
    "ten megabytes of boxes": "\\boxed{" * 1_400_000,
    "NUL": "\0" * 50,
    "surrogates": "\ud800\udfff" * 20,
    "Arabic digits": "\\boxed{\u0664\u0662} #### \u0664\u0662 <answer>\u0664\u0662</answer>",
    "superscripts": "\\boxed{\u2074\u00b2} #### \u2074\u00b2",
    "inf": "\\boxed{inf} #### inf <answer>inf</answer>",
    "infinity": "\\boxed{\\infty} #### \\infty",
    "nan": "\\boxed{nan} #### nan <answer>nan</answer>",
    "x=x": "\\boxed{x=x} #### x=x <answer>x=x</answer>",
    "42=42=x, any": "\\boxed{x \\in \\mathbb{R}}",
    "or": "\\boxed{41 \\text{ or } 42}",
    "lines of ####": "####\n" * 50,
    "empty box": "\\boxed{}",
    "empty answer": "<answer></answer>",
    "deep brackets": "\\boxed{" + "(" * 300 + "42" + "{" * 300 + "}",
    "deep braces": "\\boxed{" + "{" * 200 + "1" + "}" * 200 + "}",
    "deep fractions": "\\boxed{" + "\\frac{1}{" * 80 + "2" + "}" * 80 + "}",
}
# These two say of themselves that the last number counts: here it is 42, and hedging wins nothing by it.
LAST_IS_RIGHT = {name: {"open box", "or", "deep brackets"} for name in ("last_number", "gsm8k")}
HANGS = {
    "tower": "9^{9^{9}}",
    "factorial of a power": "(10^{10^{10}})!",
    "power of two": "2^{2^{100}}+1",
    "factorial": "10000000!",
    "sum": "\\sum_{n=1}^{10^{12}} 1/n",
    "binomial": "\\binom{10^9}{5\\cdot10^8}",
    "roots": "\\sqrt{\\sqrt{\\sqrt{2^{10^9}}}}",
    "powers of five": "5^(5^(5^(5^5)))",
    "Python's tower": "9**9**9**9",
    "ten thousand digits": "9" * 900 + "!",
}
ROWS = {  # a row for which 42 is right, and a right response
    "last_number": ("42", {}, "42"),
    "exact": ("42", {}, "42"),
    "gsm8k": ("#### 42", {}, "#### 42"),
    "math": ("42", {}, "\\boxed{42}"),
    "countdown": ("42", {"nums": [6, 7]}, "<answer>6 * 7</answer>"),
    "reasoning_gym": ("42", {"metadata": {"source_dataset": "chain_sum"}}, "<answer>42</answer>"),
    "format": ("", {}, "<think>6 * 7</think><answer>42</answer>"),
    "ifeval": (
        '{"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "is 42!"}]}',
        {},
        "it is 42!",
    ),
    "code": ('[{"input": [6, 7], "output": 42}]', {"entry_point": "f"}, "def f(a, b):\n    return a * b"),
}
TIMEOUT = 3.0


def test_every_verifier_faces_the_tables():
    assert set(ROWS) == set(VERIFIERS)


@pytest.fixture(scope="module", params=["python", "gmpy2"])
def pool(request):
    """Workers in which sympy computes with Python's integers or with gmpy2's, whose loops no signal interrupts.

    Four of them, as a new one takes a second or two to start, and nobody is to wait for that here. gmpy2 is used where
    it is installed, or from the folder that RLVR_GMPY2 names.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "RLVR_GMPY2" in os.environ:
            patch.syspath_prepend(os.environ["RLVR_GMPY2"])  # workers are started with the path of their parent
        if request.param == "gmpy2" and importlib.util.find_spec("gmpy2") is None:
            pytest.skip(
                "gmpy2 is neither installed nor in the folder RLVR_GMPY2: sympy's other arithmetic is not tried"
            )
        ground = request.param.removesuffix("2")
        patch.setenv("SYMPY_GROUND_TYPES", ground)
        pool = RewardPool(4, TIMEOUT, ("math", "reasoning_gym"))
        for future in [pool.submit(f"{ROOT}/tests/verifiers.py:arithmetic", "", "", {}) for _ in range(8)]:
            assert pool.result(future).extracted == ground
        yield pool
        pool.close()


def from_a_thread(pool: RewardPool, jobs: list[tuple]) -> tuple[list[tuple[Reward, float]], list[BaseException]]:
    """Each job through the pool, one after another, asked for by a thread; seconds each took."""
    found, errors = [], []

    def ask() -> None:
        try:
            for job in jobs:
                start = time.perf_counter()
                found.append((pool.result(pool.submit(*job)), time.perf_counter() - start))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(timeout=240)
    return found, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_degenerate_answers(pool, name):
    truth, row, right = ROWS[name]
    cases = {k: v for k, v in DEGENERATE.items() if not (name == "exact" and k == "")}
    found, errors = from_a_thread(pool, [(name, right, truth, row)] + [(name, r, truth, row) for r in cases.values()])
    assert errors == [] and found[0][0].score == 1, found[:1]
    scored = {case for case, (reward, _) in zip(cases, found[1:], strict=True) if reward.score > 0}
    assert scored == LAST_IS_RIGHT.get(name, set())
    slowest = max(seconds for _, seconds in found[1:])
    print(f"{name}: {len(cases)} answers, {len(scored)} scored, the slowest {slowest:.1f} s")
    late = {case: seconds for case, (_, seconds) in zip(cases, found[1:], strict=True) if seconds > TIMEOUT + 1}
    assert late == {}


@pytest.mark.slow
@pytest.mark.parametrize("case", HANGS)
def test_hangs(pool, case):
    """Ended by the time-out at the latest, whoever computes; not scored; nothing raised; the pool works on."""
    text = HANGS[case]
    jobs = [("math", f"\\boxed{{{text}}}", "42", {}), ("math", "\\boxed{42}", text, {})]
    jobs += [("countdown", f"<answer>{text}</answer>", "42", {"nums": [9, 9, 9, 9]})]
    jobs += [("reasoning_gym", f"<answer>{text}</answer>", *gym_countdown())]
    found, errors = from_a_thread(pool, jobs)
    assert errors == []
    # reasoning-gym itself gives 0.05 to any well-formed countdown answer that misses the target.
    assert [(r.score, r.status) for r, _ in found if r.score > 0.05 or r.parts.get("correct", 0) > 0] == []
    print(f"{text}: {', '.join(f'{r.status} after {seconds:.1f} s' for r, seconds in found)}")
    assert max(seconds for _, seconds in found) < TIMEOUT + 1, found
    assert pool.result(pool.submit("math", "\\boxed{0.5}", "\\frac12", {})).score == 1


def gym_countdown() -> tuple[str, dict]:
    import reasoning_gym

    row = json.loads(json.dumps(reasoning_gym.create_dataset("countdown", size=1, seed=3)[0], default=str))
    return row["answer"], row


@pytest.mark.slow
def test_throughput_of_math():
    """A hundred typical answers a second in one worker: half of them right, none twice the same as text."""
    rows = read_jsonl(real("math500.jsonl"))
    random.Random(0).shuffle(rows)
    pool = RewardPool(1, 10.0, ("math",))
    pool.result(pool.submit("math", "\\boxed{1}", "1", {}))
    answers = [(r["solution"], r["answer"]) for r in rows] + [
        (a["solution"], b["answer"]) for a, b in itertools.pairwise(rows)
    ]
    start = time.perf_counter()
    futures = [pool.submit("math", response, truth, {}) for response, truth in answers]
    right = sum(pool.result(f).score for f in futures)
    rate = len(answers) / (time.perf_counter() - start)
    pool.close()
    print(f"math: {len(answers)} answers, {rate:.0f} a second in one worker")
    assert right >= 500 and rate >= 100

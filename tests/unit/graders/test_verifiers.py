"""Answers that verifiers accept and reject: labeled data, and evasive model outputs."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
import time

import pytest
from helpers import ROOT, read_jsonl, real

import rewards
from graders import reasoning_gym_tasks
from graders.math import algebra, extraction, units
from graders.math.extraction import final_answer, is_echo
from graders.text import after_thinking, alternatives, last_boxed
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


def test_brackets_without_end_are_not_parsed(monkeypatch):
    """The parser takes seconds for them, as for braces."""
    monkeypatch.setattr(algebra, "parse_math", None)
    for bracket in ("(", "[", "\\right.(", "(a+["):
        assert score("math", f"\\boxed{{{bracket * 90}}}", "5") == 0


@pytest.mark.parametrize("name", ["language:response_language", "change_case:capital_word_frequency"])
def test_a_constraint_that_needs_a_package_is_refused_at_the_start_without_it(monkeypatch, name):
    for package in ("langdetect", "nltk"):
        monkeypatch.setitem(sys.modules, package, None)
    arguments = {"language": "en", "capital_frequency": 1, "capital_relation": "at least"}
    truth = json.dumps({"instruction_id_list": [name], "kwargs": [arguments]})
    assert "pip install" in rewards.truth_error("ifeval", truth, {})


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
    assert [pair for pair in pairs if score("math", *pair) != 1] == []
    assert score("math", "\\boxed{\\text{max}(3,5)}", "5") == 1 and score("math", "\\boxed{5\\text{ max}}", "5") == 0


def test_extraction():
    assert last_boxed(r"\boxed{\frac{1}{2}} \boxed{\{a\}}") == r"\{a\}"
    assert last_boxed(r"\boxed{") is None and last_boxed("\\boxed{" + "{" * 5000) is None and last_boxed("") is None
    assert final_answer("The answer is 4.\nThe answer is 5.") == "5"
    assert final_answer("the answer is not 42") is None and final_answer("42") is None
    assert alternatives("[0, 1]") == ["[0, 1]"] and alternatives("[a") == ["[a"], "an interval, and no JSON"
    assert not is_echo("6 * 7", "42", ""), "nothing is known about the question"
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
    assert set(ROWS) == set(VERIFIERS), "add cases for the verifier to ROWS"


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

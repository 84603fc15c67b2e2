"""Answers as models write them: families of sentences, boxes, units and copies of the question, and their hedges."""

from __future__ import annotations

import pytest

import rewards
from graders.math import extraction, units
from graders.math.answers import is_echo
from graders.text import alternatives


def score(response: str, truth: str, row: dict | None = None, verifier: str = "math") -> float:
    return rewards.VERIFIERS[verifier](response, truth, row or {}).score


def failures(pairs: list[tuple[str, str]], wanted: float, verifier: str = "math") -> list[tuple[str, str]]:
    return [pair for pair in pairs if score(*pair, verifier=verifier) != wanted]


LEADS = [
    "therefore",
    "thus",
    "exactly",
    "approximately",
    "indeed",
    "equal to",
    "given by",
    "the number",
    "of course",
    "always",
    "none other than",
]
TAILS = [", in total", " and we are done", ", making it odd", " (seven)", "; done", " because 3 + 4 = 7", ": done"]
TAILS += [
    " instead of 6",
    ", rather than 8",
    " (no other works)",
    ", which is prime",
    " as claimed",
    ", QED",
    ", since the rest cancels",
]
ANNOUNCERS = [
    "Ans: ",
    "Ans. ",
    "Answer -> ",
    "The answer will be ",
    "Answer\n-----\n",
    "Result: ",
    "Answer \u2192 ",
    "answer - ",
    "**Answer**: ",
    "The final result is ",
    "## Answer\n",
]
ANNOUNCERS += ["**Final Answer**\n\n", "Answer ", "Our answer would then be ", "The answer works out to "]
SENTENCES = [
    ("Final Answer: The largest $m$ is 41.", "41"),
    ("Answer: There are 15 such triangles.", "15"),
    ("**Answer:** Maria walked 6 miles yesterday.", "6"),
    ("The final answer is that she needs $12$ dollars.", "12"),
    ("Final Answer: The value of $y$ is $-3$.", "-3"),
    ("Therefore, $18$ is the answer.", "18"),
    ("So option (B) is correct.", "B"),
    ("Answer: The area of the circle is $25\\pi$ square units.", "25\\pi"),
]


def test_one_value_is_read_out_of_a_sentence():
    pairs = [(f"So the answer is {lead} {value}.", "7") for lead in LEADS for value in ("7", "$7$")]
    pairs += [(f"The answer is {value}{tail}.", "7") for tail in TAILS for value in ("7", "$7$")]
    pairs += [(f"We add.\n{announcer}{value}", "7") for announcer in ANNOUNCERS for value in ("7", "$7$")]
    assert failures(pairs + SENTENCES, 1) == []


HEDGES = ["7 or 8", "7, or maybe 8", "7. No wait, 8", "7. Or 8", "either 7 or 8", "7? Not sure", "not 7", "7 / 8 / 9"]
HEDGES += [
    "7, but it could also be 8",
    "7; however, 8 also works",
    "7, though it may be 8",
    "7, no, 8",
    "anything but 7",
    "7\n\nWait, that is wrong",
]
HEDGES += ["7, 8, 9", "possibly 7", "there are 7 or 8 of them", "there are not 7 of them", "$7$. Alternatively $8$"]

HEDGED_SENTENCES = ["Perhaps there are 7 ways", "There could be 7 ways here", "Maybe she walked 7 miles today"]
HEDGED_SENTENCES += [
    "There are 7 ways. No wait, 8",
    "She needs 7 dollars. Actually, she needs 8",
    "The value of $y$ is $7$. Actually $8$",
]


def test_a_hedge_is_no_answer():
    pairs = [(f"{announcer}{hedge}.", "7") for announcer in ("The answer is ", "Answer: ") for hedge in HEDGES]
    assert failures(pairs + [(f"Answer: {sentence}.", "7") for sentence in HEDGED_SENTENCES], 0) == []


CHOICES = [("D, it can't be A or B", 1), ("(D), not (A)", 1), ("D because it is larger", 1), ("definitely D", 1)]
CHOICES += [("A or D", 0), ("D, or maybe A", 0), ("D. Or A", 0), ("(D) is wrong", 0), ("D?", 0), ("A, B, C or D", 0)]


@pytest.mark.parametrize(("said", "right"), CHOICES)
def test_choices_with_a_reason(said, right):
    assert score(f"The answer is {said}.", "D") == right


def test_a_choice_that_names_others():
    assert failures([(f"\\boxed{{{text}}}", "A") for text in ("A) B", "A. B", "A. all of B, C", "A. Or B")], 0) == []
    assert score("\\boxed{D. none of A B C}", "D") == 1
    assert failures([(f"\\boxed{{{text}}}", "\\textbf{(B)}\\ 12") for text in ("B\\ 12", "12", "B")], 1) == []
    assert score("\\boxed{D\\ 12}", "\\textbf{(B)}\\ 12") == 0
    assert score("\\boxed{13}", "\\textbf{(B)}\\ 12") == 0


def test_an_announcement_behind_the_last_box_counts_and_a_denied_box_does_not():
    assert score("so $x=\\boxed{3}$.\n\nThe final answer is $12$.", "12") == 1
    assert score("so $x=\\boxed{3}$.\n\nThe final answer is $12$.", "3") == 0
    assert score("so $\\boxed{3}$.\n\nThe answer is therefore correct.", "3") == 1
    assert score("\\boxed{}\nThe answer is 5.", "5") == 1
    denied = [
        "It is not $\\boxed{2}$.",
        "\\boxed{2} or 3",
        "It can't be \\boxed{2}",
        "So $\\boxed{2}$ is wrong.",
        "\\boxed{2} cannot be",
    ]
    denied += ["\\boxed{2}\n\nThe answer is not 2.", "\\boxed{2}\n\nWait, that is a mistake."]
    assert failures([(text, "2") for text in denied], 0) == []
    assert score("\\boxed{2}. The answer is not 3.", "2") == 1
    assert score("\\boxed{2}, or equivalently $\\frac{4}{2}$", "2") == 1


@pytest.mark.parametrize(
    "between",
    [
        "\\;\\mathrm{and}\\;",
        "$ & $",
        ",\\quad ",
        "\\quad\\text{and}\\quad ",
        "\\qquad ",
        ",\\ ",
        "\\;\\text{or}\\;",
        "\\) and \\(",
    ],
)
def test_boxes_joined_by_spacing(between):
    text = f"\\(\\boxed{{-2}}{between}\\boxed{{1}}\\)"
    assert score(text, "-2, 1") == 1 and score(text, "1") == 0
    assert score("\\boxed{1, -2}", text) == 1 and score("\\boxed{1}", text) == 0, "in a truth"


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


SAME_SIZE = [
    ("120\\text{ sec}", "2\\text{ min}"),
    ("250\\text{ cm}", "2.5\\text{ m}"),
    ("0.5\\text{ kg}", "500\\text{ g}"),
]
SAME_SIZE += [
    ("36\\text{ km/h}", "10\\text{ m/s}"),
    ("3\\text{ ft}", "36\\text{ inches}"),
    ("75\\text{ cents}", "\\$0.75"),
]
SAME_SIZE += [
    ("2\\text{ h }15\\text{ min}", "135\\text{ minutes}"),
    ("\\frac{\\pi}{2}", "90^\\circ"),
    ("2\\text{ kJ}", "2000\\text{ J}"),
    ("2\\text{ kPa}", "2000\\text{ Pa}"),
]
OTHER_SIZE = [
    ("10\\text{ cm}", "10\\text{ m}"),
    ("60\\text{ min}", "60\\text{ sec}"),
    ("25\\text{ K}", "25^\\circ\\text{C}"),
]
OTHER_SIZE += [
    ("1\\text{ h }30\\text{ min}", "80\\text{ min}"),
    ("\\frac{\\pi}{6}", "60^\\circ"),
    ("12\\text{ cm}^2", "12\\text{ cm}"),
]


def test_sizes_of_units():
    assert failures([(f"\\boxed{{{a}}}", b) for pair in SAME_SIZE for a, b in (pair, pair[::-1])], 1) == []
    assert failures([(f"\\boxed{{{a}}}", b) for pair in OTHER_SIZE for a, b in (pair, pair[::-1])], 0) == []


EQUAL = [
    *[
        ("1,\\! 234,\\! 567", "1234567"),
        ("0.333\\ldots", "\\frac13"),
        ("0.1(6)", "\\frac16"),
        ("1.1666...", "\\frac76"),
    ],
    *[
        ("5 m", "5\\text{ meters}"),
        ("5\\operatorname{min}", "5"),
        ("x\u20133", "x-3"),
        ("x=4", "4=x"),
        ("y-3=0", "y=3"),
    ],
    *[("\u200b12\u200b", "12"), ("\ufe635", "-5"), ("\u20137", "-7"), ("\\text{infinity}", "\\infty")],
    *[
        ("\\text{The owl}", "owl"),
        ("\\text{Rome!}", "Rome"),
        ("\\text{Wed}", "\\text{Wednesday}"),
        ("\\text{DNE}", "\\text{no solution}"),
    ],
    *[
        ("\\text{No, it diverges}", "\\text{No}"),
        ("2:1", "x:y=2:1"),
        ("9\\frac{\\text{m}}{\\text{s}^2}", "9\\text{ m/s}^2"),
    ],
    *[("\\{x \\mid 1\\le x\\le 4\\}", "[1,4]"), ("2 \\pmod 5", "2"), ("y=3x+1", "f(x)=3x+1"), ("g(t)=2t", "g(x)=2x")],
    *[("a=1,b=2\\text{ or }a=3,b=4", "a=3, b=4; a=1, b=2"), ("\\sqrt(3)", "\\sqrt{3}")],
]
UNEQUAL = [
    *[("1=1", "1"), ("x=1=2", "2"), ("x=1 \\implies x=2", "x=2"), ("\\text{Yes and no}", "yes"), ("1:2", "x:y=2:1")],
    *[
        ("BC:AB=2:1", "AB:BC=2:1"),
        ("x+1=5", "x=4"),
        ("8\\text{ maybe}", "8"),
        ("5 g", "5\\text{ meters}"),
        ("5 m", "5"),
    ],
    *[("2 \\pmod 5", "2 \\pmod 7"), ("f(x)=x+1", "g(x)=x+1"), ("0.333", "\\frac13"), ("\\text{Yes, but no}", "yes")],
    *[("a=1,b=4\\text{ or }a=3,b=2", "a=3, b=4; a=1, b=2"), ("|x-1|<3", "(-2,4)"), ("2x<6", "(-\\infty,3)")],
    *[("\\int_0^1 2x\\,dx", "1"), ("\\lim_{x\\to 0}\\frac{\\sin x}{x}", "1"), ("\\frac{d}{dx} x^2", "2x")],
]


GROUPED_IN = [
    "x={}",
    "{}\\pi",
    "\\frac{{{}}}{{7}}",
    "2\\sqrt{{{}}}",
    "({}, 5)",
    "[0,{}]",
    "5 or {}",
    "{}x+1",
    "{}\\text{{ m}}",
]
GROUPED_LISTS = [("(3125)", "(3,125)"), ("\\{1234\\}", "\\{1,234\\}"), ("0,125\\pi", "125\\pi"), ("12,001x", "12000x")]


@pytest.mark.parametrize("formula", GROUPED_IN)
def test_thousands_inside_a_formula(formula):
    plain, *grouped = (formula.format(n) for n in ("32348", "32,348", "32,\\!348", "32,\\! 348", "32{,}348"))
    assert failures([(f"\\boxed{{{a}}}", b) for one in grouped for a, b in ((one, plain), (plain, one))], 1) == []


def test_commas_that_may_separate_a_list_stay():
    assert failures([(f"\\boxed{{{a}}}", b) for pair in GROUPED_LISTS for a, b in (pair, pair[::-1])], 0) == []
    assert (
        failures(
            [(f"\\boxed{{{a}}}", b) for a, b in (("3,500\\text{ m}", "3.5\\text{ km}"), ("x=1,234", "x=1, 234"))], 1
        )
        == []
    )


def test_equalities_and_their_opposites():
    assert failures([(f"\\boxed{{{a}}}", b) for a, b in EQUAL], 1) == []
    assert failures([(f"\\boxed{{{a}}}", b) for a, b in UNEQUAL], 0) == []
    assert score("\\boxed{x<3}", "(-\\infty,3)") == 1, "a solved form"


COPIES = [
    ("Simplify $\\sqrt{72}$.", "\\sqrt{72}", "6\\sqrt{2}"),
    ("Find the value of \\[31^2 - 29^2.\\]", "31^2 - 29^2", "120"),
    ("What is 6 * 7?", "6 * 7", "42"),
    ("Factor $x^2+3x+2$.", "x^2+3x+2", "(x+1)(x+2)"),
    ("Let $f(x) = (x+1)^2$. Expand it.", "(x+1)^2", "x^2+2x+1"),
    ("Write $\\frac{3}{20}$ as a decimal.", "\\frac{3}{20}", "0.15"),
    ("Reduce $\\frac{18}{24}$.", "18/24", "\\frac34"),
    ("Evaluate $\\log_3 81$.", "\\log_{3}{81}", "4"),
    ("Compute $\\binom{8}{2}$.", "{8 \\choose 2}", "28"),
    ("What is the shape of $z = c$? (A) a line (B) a circle (C) a plane", "c", "\\text{(C)}"),
]
NO_COPIES = [
    ("Simplify $\\frac{(x+1)^2}{x+1}$.", "x+1", "1+x"),
    ("He takes 1/2 of a cup, and she adds as much. How many litres are left of the other half?", "1/2", "0.5"),
    ("Which point is $(3,5)$ shifted by nothing?", "(3,5)", "\\begin{pmatrix}3\\\\5\\end{pmatrix}"),
    ("Is $\\sqrt{53}$ in its simplest form? Give it.", "\\sqrt{53}", "\\sqrt{53}"),
    ("A rope of 5 cm is given. How long is it?", "5", "5\\text{ cm}"),
    ("Pick one: (A) yes (B) a no", "a", "\\text{(A)}"),
    ("Which of $x=3$ and $x=4$ solves it?", "x=3", "3"),
]


@pytest.mark.parametrize("key", ["problem", "question", "prompt", "messages"])
def test_a_formula_of_the_question_is_no_answer(key):
    for question, answer, truth in COPIES + NO_COPIES:
        row = {key: [{"role": "user", "content": question}] if key == "messages" else question}
        found = rewards.math_(f"\\boxed{{{answer}}}", truth, row)
        copied = (question, answer, truth) in COPIES
        assert (found.score, found.parts["echo"]) == ((0, 1) if copied else (1, 0)), (question, answer)
    assert not is_echo("6 * 7", "42", ""), "nothing is known about the question"


def test_a_list_of_truths_means_any_of_them():
    truths = '["1/2", "one half", "50\\\\%"]'
    assert failures([(f"\\boxed{{{text}}}", truths) for text in ("0.5", "\\text{one half}", "50\\%")], 1) == []
    assert score("\\boxed{2}", truths) == 0
    assert alternatives("[0, 1]") == ["[0, 1]"] and alternatives("[a") == ["[a"], "an interval, and no JSON"
    assert (
        score("#### 8", '["7", "8"]', verifier="gsm8k") == 1 and score("9", '["7", "8"]', verifier="last_number") == 0
    )
    assert rewards.truth_error("math", truths, {}) == "" and rewards.truth_error("last_number", '["x"]', {}) != ""


LAST = {
    1: [
        "1e3|1000",
        "7.0e0|7",
        "1 000|1000",
        "\u20137|-7",
        "7/2|3.5",
        "\\frac72|3.5",
        "10{,}080|10080",
        "10,\\!080|10080",
        "\\frac{7}{2}|3.5",
        "It is 7!|7",
        "area 24 cm^2|24",
    ],
    0: [
        "7/2|2",
        "10^2|2",
        "x2|2",
        "H2O|2",
        "log2|2",
        "12:07|7",
        "2023-01-07|7",
        "3 to 7|7",
        "between 3 and 7|7",
        "7!|7",
    ]
    + [
        "1,2,7|7",
        "7?|7",
        "Step 7|7",
        "never be 7|7",
        "isn't equal to 7|7",
        "no, 7 is wrong|7",
        "\\frac{7}{2}|2",
        "1e3|3",
    ],
}


@pytest.mark.parametrize("verifier", ["last_number", "gsm8k"])
def test_a_number_that_is_part_of_something_else(verifier):
    for right, texts in LAST.items():
        assert failures([tuple(text.split("|")) for text in texts], right, verifier) == []


MARKED = {1: ["#### \n7", "#### 14/2 = 7", "#### x_1 = 7", "#### about 7", "#### 7 clips (3 + 4)"]}
MARKED[0] = [
    "#### 7^2",
    "#### 7% or 8%",
    "#### 7, 8, 9",
    "#### 7 or 8",
    "#### 7 8",
    "#### 7\n\nWait, it is 8.",
    "#### 6\n#### 7",
    "#### not 7",
]


def test_the_number_behind_the_marker():
    for right, texts in MARKED.items():
        assert failures([(text, "7") for text in texts], right, "gsm8k") == []


COUNTDOWN = [
    "25+4-3",
    "25+4-3.",
    "\\boxed{25+4-3}",
    "\\boxed{25+4-3=26}",
    "26 = 25+4-3",
    "```\n25+4-3\n```",
    "\\[25+4-3\\]",
]


def test_countdown_in_the_forms_that_models_use():
    row = {"nums": [3, 4, 25]}
    assert [text for text in COUNTDOWN if not score(f"<answer>{text}</answer>", "26", row, "countdown")] == []
    for wrong in ("26 = 26", "25+4", "27 = 25+4-3"):
        assert score(f"<answer>{wrong}</answer>", "26", row, "countdown") == 0


def test_characters_without_width_are_nothing():
    assert score("<think>\u200b</think><answer>\ufeff</answer>", "", verifier="format") == 0
    assert score("<think>a</think><answer>b</answer>", "", verifier="format") == 1


def test_constraints_in_every_form_that_they_are_published_in():
    for truth in (
        '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": "[{}]"}',
        '[{"instruction_id": ["punctuation:no_comma"], "kwargs": [null]}]',
        "[{'instruction_id': ['punctuation:no_comma'], 'kwargs': [None]}]",
    ):
        assert score("a b", truth, verifier="ifeval") == 1 and score("a, b", truth, verifier="ifeval") == 0
    assert rewards.ifeval("a", "[{'instruction_id': ['no:such'], 'kwargs': [None]}]", {}).status == "unscorable"
    assert rewards.ifeval("a", "[{", {}).status == "unscorable"


@pytest.mark.parametrize("truth", ["proof", "notfound", "We add the two numbers and then we get five."])
def test_a_truth_without_an_answer_is_found_at_the_start(truth):
    assert rewards.truth_error("math", truth, {"solution": truth}) != ""
    assert rewards.truth_error("math", "\\text{all real numbers}", {"answer": "x"}) == ""


@pytest.mark.parametrize(
    "said, truth, right",
    [
        *(("D", "d", 0), ("d", "D", 0), ("d", "d", 1), ("D", "D", 1), (r"\mathrm{d}", "d", 1), ("(D)", "d", 0)),
        *(("(d)", "(D)", 1), ("d", "(D)", 1), ("D. 45", "D", 1), ("Option D", "D", 1), (r"\text{D}", "D", 1)),
    ],
)
def test_a_letter_is_a_variable_in_its_own_case_or_a_choice(said, truth, right):
    """d and D are two variables; a choice is recognized by its brackets or its words."""
    assert rewards.find_verifier("math")(rf"\boxed{{{said}}}", truth, {}).score == right

"""Every regular expression that meets a model's text takes linear time on it, or is given short texts alone."""

from __future__ import annotations

import ast
import itertools
import re
import time
from pathlib import Path
from re import _constants as kinds  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from types import ModuleType

import pytest

import rewards
from graders import ifeval, reasoning_gym_tasks, text
from graders.math import algebra, answers, extraction, tex, units

LIMIT = 0.4  # seconds of the processor for one text
SHORT, LONG = 2 * text.LONGEST_ANSWER, 20_000  # characters: of an answer and what is around it, of a response
GAPS = {"BETWEEN_BOXES", "OR_BOX", "LISTED_BOX"}  # what reads no more than WIDEST_GAP
WHOLE = {
    "ANNOUNCED",
    "BOX",
    "HIDDEN",
    "THOUGHT",
    "NUMBER",
}  # what reads whole responses; in rewards and ifeval all do
VALUES = {  # of the names that expressions take from a row or from a table that is listed below
    "given": {"section_spliter": "section", "keyword": "blue"},
    "keyword": "blue",
    "word": "blue",
    "marker": "p.s.",
    "entry": "f",
    "letters": answers.RAISED,
    "pattern": "",
    "other": "",
    "ways": "",
    "known": {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"},
    "name": "",
    "bare": "c",
    "article": "",
    "form": "",
}
REWRITTEN = answers.DECORATION + answers.TYPESET + tex.SPELLINGS
TABLES = [pattern for pattern, _ in REWRITTEN] + [ways for _, ways in answers.PHRASES]


def expressions(module: ModuleType) -> dict[str, tuple[str, int, str]]:
    """Map the location of each expression in a module to (pattern, flags, method by which it is used)."""
    source = Path(module.__file__).read_text(encoding="utf-8")
    tree = ast.parse(source)
    names = {
        id(node.value): node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if not isinstance(node.func.value, ast.Name) or node.func.value.id != "re" or node.func.attr in ("escape", "I"):
            continue
        given = [eval(compile(ast.Expression(a), "", "eval"), vars(module) | VALUES) for a in node.args[:1]]
        flags = sum({"DOTALL": re.DOTALL, "IGNORECASE": re.I, "MULTILINE": re.M}.get(a, 0) for a in flag_names(node))
        name = names.get(id(node), "")
        uses = set(re.findall(rf"\b{name}\.(\w+)\(", source)) if name else {node.func.attr}
        method = next(iter(uses)) if uses in ({"match"}, {"fullmatch"}) else "search"
        found[f"{name} {Path(module.__file__).name}:{node.lineno}"] = (given[0], flags, method)
    return found


def flag_names(call: ast.Call) -> set[str]:
    return {n.attr for argument in call.args[1:] for n in ast.walk(argument) if isinstance(n, ast.Attribute)}


def character(items: list) -> str:
    """One that a set of characters holds."""
    pattern = parser.SubPattern(parser.State())
    pattern.append((kinds.IN, items))
    matches = re._compiler.compile(pattern) if hasattr(re, "_compiler") else None
    return next((c for c in " a1}A-.,\\x\n{$*" if matches and matches.match(c)), "a")


def samples(tree: list, limit: int = 8) -> list[str]:
    """Texts that a part of an expression matches, with what is optional and without it."""
    texts = [""]
    for kind, value in tree:
        if kind is kinds.LITERAL:
            choices = [chr(value)]
        elif kind is kinds.IN:
            choices = [character(value)]
        elif kind in (kinds.ANY, kinds.NOT_LITERAL):
            choices = ["a"]
        elif kind is kinds.BRANCH:
            choices = [text for branch in value[1] for text in samples(branch, 3)]
        elif kind in (kinds.SUBPATTERN, kinds.ATOMIC_GROUP):
            choices = samples(value[-1] if kind is kinds.SUBPATTERN else value, limit)
        elif kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT):
            choices = [text * max(1, value[0]) for text in samples(value[2], 4)] + [""] * (value[0] == 0)
        else:
            choices = [""]
        texts = [a + b for a, b in itertools.product(texts, dict.fromkeys(choices))][:limit]
    return texts


def pumps(tree: list, before: str = "") -> list[tuple[str, str]]:
    """(what stands before, what can be repeated) for each repetition without a bound in an expression."""
    found = []
    for item in tree:
        kind, value = item
        if kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT, kinds.POSSESSIVE_REPEAT):
            found += pumps(value[2], before)
            if value[1] > 30:
                found += [(before, text) for text in samples(value[2]) if text]
        elif kind is kinds.BRANCH:
            found += [pump for branch in value[1] for pump in pumps(branch, before)]
        elif kind in (kinds.SUBPATTERN, kinds.ATOMIC_GROUP):
            found += pumps(value[-1] if kind is kinds.SUBPATTERN else value, before)
        elif kind in (kinds.ASSERT, kinds.ASSERT_NOT):
            found += pumps(value[1], before)
        before += samples([item], 2)[0]
    return found


def attacks(pattern: str, flags: int) -> set[tuple[str, str, str]]:
    """(before, repeated, after) of texts that an expression may take long to reject."""
    tree = parser.parse(pattern, flags)
    whole = [text for text in samples(tree, 4) if text]
    found = {(before, text) for before, text in pumps(tree)} | {("", text) for _, text in pumps(tree)}
    found |= {("", text) for text in whole} | {("", text[:-1]) for text in whole if len(text) > 1}
    found |= {(before, text.replace(" ", "\n")) for before, text in found if not text.strip()}
    atoms = sorted({text for _, text in found})[:4]
    found |= {("", a + b) for a, b in itertools.permutations(atoms, 2)}
    return {(before, text, after) for before, text in sorted(found)[:40] for after in ("!", "}")}


def slowest(pattern: str, flags: int, method: str, length: int) -> tuple[float, str]:
    """(seconds, text) of the worst attack, tried at growing lengths so that what explodes is seen while it is short."""
    search = getattr(re.compile(pattern, flags), method)
    worst = (0.0, "")
    for before, repeated, after in sorted(attacks(pattern, flags)):
        for size in (min(26, length), min(200, length), length):
            text = before + repeated * (size // len(repeated)) + after
            seconds = timed(search, text)
            worst = max(worst, (seconds, f"{before!r} + {repeated!r} * {size // len(repeated)} + {after!r}"))
            if seconds > LIMIT:
                return worst
    return worst


def timed(search, text: str) -> float:
    begun = time.process_time()
    position = 0
    while (found := search(text, position)) is not None and position < len(text):  # as findall and sub go on
        position = max(found.end(), position + 1) if search.__name__ == "search" else len(text)
    return time.process_time() - begun


FOUND = {
    where: given
    for module in (answers, extraction, text, tex, units, algebra, ifeval, rewards)
    for where, given in expressions(module).items()
}
FOUND |= {f"table {i}": (pattern, 0, "search") for i, pattern in enumerate(TABLES)}


def test_the_expressions_are_found():
    assert len(FOUND) > 100 and sum(name.startswith(tuple(WHOLE)) for name in FOUND) == len(WHOLE)


@pytest.mark.integration
@pytest.mark.parametrize("where", FOUND)
def test_no_text_stalls_an_expression(where):
    """Exponential and cubic time anywhere, and quadratic time on whole responses, which have no bound."""
    whole = where.split()[0] in WHOLE or "ifeval.py" in where or "rewards.py" in where
    length = extraction.WIDEST_GAP if where.split()[0] in GAPS else LONG if whole else SHORT
    seconds, text = slowest(*FOUND[where], length)
    assert seconds < LIMIT, f"{FOUND[where][0]} on {text}"


@pytest.mark.integration
@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{1}" + " " * 200_000 + "\\boxed{2}",
        "\\boxed{1}" + "$ " * 100_000 + "and \\boxed{2}",
        "<answer>" * 30_000 + "</answer>" * 30_000,
        "answer " * 40_000,
        "the answer is" + " " * 200_000,
        "```\n" * 50_000,
        "\n" * 200_000 + "-",
        "[" * 200_000,
        "<<" * 100_000,
        "* " * 100_000,
        "p." * 100_000,
        "1," * 100_000,
        "1.-" * 70_000,
    ],
    ids=lambda text: repr(text[:12]),
)
def test_long_responses_take_linear_time(text):
    """Each verifier that reads text, and each constraint that needs no other package, on hundreds of thousands."""
    given = {
        "num_placeholders": 3,
        "num_bullets": 1,
        "num_highlights": 1,
        "num_paragraphs": 1,
        "postscript_marker": "P.S.",
    }
    given |= {"section_spliter": "Section", "num_sections": 1, "num_words": 3, "relation": "at least"}
    begun = time.process_time()
    for name in ("math", "last_number", "gsm8k", "format", "countdown"):
        rewards.VERIFIERS[name](text, "7", {"nums": [7]})
    kinds_without_packages = ("number_placeholders", "number_bullet_lists", "title", "postscript", "number_paragraphs")
    for kind in (*kinds_without_packages, "number_highlighted_sections", "multiple_sections", "number_words"):
        getattr(ifeval, kind)(text, given)
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("name", reasoning_gym_tasks.GYM_ANSWERS)
def test_no_answer_stalls_the_form_of_a_task(name):
    seconds, text = slowest(reasoning_gym_tasks.GYM_ANSWERS[name], 0, "fullmatch", SHORT)
    assert seconds < LIMIT, text


@pytest.mark.parametrize("text", ["\n\n* a\n \n*b\n** c\n*\nd\n", "- a\n\n\n-b\n -- c", "\t* a\r\n\x0b- b\n*", "*", ""])
def test_bullets_are_counted_as_the_published_evaluation_does(text):
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^\s*-.*$", text, re.MULTILINE)
    assert ifeval.number_bullet_lists(text, {"num_bullets": len(stars) + len(dashes)})


@pytest.mark.parametrize("text", ["[a] [b]", "[[a] b]", "[a\nb]", "[]", "[", "][", "[a]]", "x\n[a]\n[b", "<<[>>]"])
def test_placeholders_and_titles_are_found_as_the_published_evaluation_does(text):
    count = len(re.findall(r"\[.*?\]", text))
    assert ifeval.number_placeholders(text, {"num_placeholders": count})
    assert not ifeval.number_placeholders(text, {"num_placeholders": count + 1})
    for line in (text, f"<<{text}>>", f"<< >> {text} >>", "<<>>", "<<>>>", f">>{text}<<"):
        found = re.findall(r"<<[^\n]+>>", line)
        assert ifeval.title(line, {}) == any(part.lstrip("<").rstrip(">").strip() for part in found)


LARGE_NUMBERS = ["9^{9^{9}}", "10^{10^{10}}", "84!!", "99999999!", "(((9!)!)!)!", "2^{99999999999}", "1e999999999"]
LARGE_NUMBERS += ["\\sum_{n=1}^{10^{15}} \\frac{1}{n}", "\\binom{10^9}{5\\cdot10^8}", "{" * 22 + "3" + "}" * 22]
LARGE_NUMBERS += ["9" * 900 + "!", "\\sqrt{2^{10^9}}", "\\int_0^1 e^{-x^{x^{x}}} dx", "(2^{9999})^{(2^{9999})}"]


@pytest.mark.parametrize("text", LARGE_NUMBERS, ids=lambda text: text[:20])
def test_large_numbers_are_refused_before_they_are_computed(text):
    """As an answer and as a truth; sympy would take all time or memory for them."""
    rewards.VERIFIERS["math"]("\\boxed{x+1+0}", "x+1", {})  # imports sympy
    begun = time.process_time()
    scores = [rewards.VERIFIERS["math"](f"\\boxed{{{a}}}", b, {}).score for a, b in ((text, "42"), ("42", text))]
    assert scores == [0, 0] and time.process_time() - begun < 3

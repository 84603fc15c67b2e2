"""Grade answers to mathematical problems. It works outside this project, too: copy the folder ``graders``.

    from graders.math import verify
    verify("So the sum is $\\boxed{\\frac{1}{2}}$.", "0.5")  # True

math-verify compares expressions; the other modules find the final answer (extraction.py), read the text of formulas
(tex.py), compare texts, choices, dates and lists (answers.py), units (units.py), and what math-verify does not compare
or gets wrong (algebra.py).
"""

from __future__ import annotations

import re

from graders.math.algebra import parse_math
from graders.math.answers import equal, tidy
from graders.math.extraction import boxed_answer, final_answer, is_echo
from graders.math.tex import parts_of
from graders.text import BOX, alternatives, answering


def verify(response: str, truth: str, question: str = "") -> bool:
    """Return True if the final answer of a response equals the truth, or any one of a JSON list of truths.

    question: the text of the problem; a formula that the response only copies from it is no answer.
    """
    right, _, _ = judge(response, truth, question)
    return right


def judge(response: str, truth: str, question: str = "") -> tuple[bool, str | None, bool]:
    """Return (right, the final answer or None if there is none, whether it only copies a formula of the question)."""
    text = answering(response)
    for one in alternatives(truth):
        boxed, _, _ = boxed_answer(one, True)
        wanted = tidy(boxed or one)
        parts = parts_of(wanted.strip("()"))
        said = final_answer(text, len(parts) > 1)
        if said is None:
            continue
        answer = tidy(said)
        foreign = any(c.isdigit() and not c.isascii() for c in answer)
        if not foreign and equal(answer, wanted):
            echo = is_echo(said, wanted, question)
            return not echo, said, echo
    return False, said, False


def no_answer(truth: str, row: dict) -> str:
    """Return the reason why a truth holds no answer, as a proof does, or "" if it may hold one.

    row: the row of the data; a truth that is its column ``solution`` may be long.
    """
    if truth.strip(" .").casefold() in ("proof", "notfound", "not found"):
        return "it is a word for having no answer"
    if BOX.search(truth) and not boxed_answer(truth, True)[0]:
        return "its box is empty or never closed"
    prose = re.findall("[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", truth))
    if boxed_answer(truth, True)[0] or (truth != row.get("solution") and len(prose) < 20):
        return ""
    return "it is a solution without a box" if len(prose) > 3 else ""


def prepare() -> None:
    """Import in a worker what takes long, so that no response's time limit pays for it."""
    parse_math("1")

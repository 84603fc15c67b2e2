"""Read numbers, boxes and tags in a response: what every verifier of a final answer needs."""

from __future__ import annotations

import ast
import collections
import contextlib
import itertools
import json
import re
from collections.abc import Iterator
from fractions import Fraction

LONGEST_ANSWER = 1000  # characters; what is longer is no answer, and parsers take more than linear time
INVISIBLE = dict.fromkeys([*range(0x200B, 0x2010), 0x2060, 0xFEFF, 0x00AD])  # characters without width
DASHES = "\u2212\ufe63\uff0d\u2010\u2011\u2012\u2013"  # signs that are written for a minus

# A minus is a sign only where no number or bracket stands before it: "10-4" ends in 4, "= -4" in -4. A comma belongs
# to a number only between groups of three digits, a dot only between digits.
DIGITS = r"(?:(?:[0-9]{1,3}(?:(?:,(?:\\!)?|\{,\})[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:[ \u00a0\u202f]000)+(?![0-9])"
DIGITS += r"|[0-9]+)(?:\.[0-9]+)?|(?<![.\w)\]])\.[0-9]+)"
SIGNED = rf"(?:(?<![0-9)\]])[-{DASHES}]|(?<![0-9)\]$])[-{DASHES}]\\?[$\u20ac\u00a3](?=[0-9.]))?"
NUMBER = re.compile(  # 7, 1,024, -$5, 1e3, 7/2, \frac{7}{2}
    rf"(?<![0-9])(?<![0-9]\.)(?:{SIGNED}{DIGITS}(?:[eE][-+]?[0-9]+(?![0-9A-Za-z])|/[0-9]+(?![0-9]))?"
    rf"|{SIGNED}\\[dtc]?frac\s?(?:\{{{DIGITS}\}}\s?\{{{DIGITS}\}}|[0-9]\s?[0-9](?![0-9])))"
)
DENIAL = r"(?:\bnot|n't|n\u2019t|\bnever|\bcannot|\banything but)(?:\s(?:be|equal|equals|to|is|just|exactly)\b){0,3}"
NEGATED = re.compile(rf"{DENIAL}\s*(?:[:$*}}(\[]|\\[(\[])*\s*$", re.IGNORECASE)
REJECTED = re.compile(
    r"[\s$*)\]}]{0,4}(?:(?:is|was|are|would be)\s(?:wrong|incorrect|not|false|impossible|my first)"
    r"|can\s?not|can't|isn't)\b",
    re.IGNORECASE,
)
LABEL = re.compile(r"\b(?:step|case|question|problem|part|figure|table|page|chapter|example|exercise)\s?#?$", re.I)
CORRECTED = re.compile(
    r"\s*\b(?:wait|actually|no(?=[,.;!]|\swait)|sorry|correction|alternatively|or|maybe|perhaps"
    r"|(?:but|however|though)\b[^.\n]{0,20}\b(?:also|could|might|may|maybe|perhaps|possibly)|however, [0-9])\b",
    re.IGNORECASE,
)
PART_BEFORE = re.compile(  # x2, 10^2, 12:07, 1,2,7, 2023-01-07, "3 to 7", "between 3 and 7"
    r"(?<![0-9])[A-Za-z_]$|[\^_]\s?\{?\s?$|[0-9]\s?[:,/]$|[0-9]-[0-9]{1,2}-$|[0-9]\s(?:to|or)\s$|[0-9]\s?\u2013\s?$"
    r"|between\s[0-9.,]{1,8}\sand\s$|[0-9a-z]\s?[+*\u00d7]\s?$|\b(?:than|at least|at most|up to|minus|negative)\s\$?$"
)
PART_AFTER = re.compile(  # 7x, 7th, 7 thousand, 7k, 7?, 7..8
    r"\s?\^|\s?\*\*[0-9]|-[0-9]|\s?(?:[\u00b2\u00b3?]|\.\.[0-9]|(?:[kMnxyz]|th|bn|hundred|thousand|million|billion|trillion|dozen)\b)|[:/][0-9]"
    r"|\s(?:or|to)\s[0-9]"
)
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
DELIMITED = (  # (opening, closing) of mathematics or emphasis around a whole answer
    ("$$", "$$"),
    ("\\[", "\\]"),
    ("\\(", "\\)"),
    ("**", "**"),
    ("$", "$"),
    ("`", "`"),
)

THOUGHT = re.compile(r"< ?(/?) ?(?:think(?:ing)?|thoughts?|reasoning|scratchpad) ?>", re.IGNORECASE)
HIDDEN = re.compile(  # comments of HTML and LaTeX, programs, and what is struck out
    r"<!--.*?(?:-->|\Z)|```(?:python|py|cpp|java|javascript)\b.*?(?:```|\Z)"
    r"|(?<!~)~~(?!~)[^~\n]+~~|^[ \t]*%[^\n]*|\\[bx]?cancel\s*\{(?:[^{}]|\{[^{}]*\})*\}",
    re.DOTALL | re.M,
)


def after_thinking(response: str) -> str:
    """Return what follows the last ``</think>``; nothing when a ``<think>`` is still open: a thought is no answer."""
    tags = collections.deque(THOUGHT.finditer(response), maxlen=1)
    if not tags:
        return response
    return response[tags[0].end() :] if tags[0][1] else ""


def answering(response: str) -> str:
    """Return what a reader sees of a response after its thoughts; a box in GLM's tags becomes one of LaTeX."""
    seen = HIDDEN.sub(" ", after_thinking(response))
    return re.sub(r"<\|begin_of_box\|>((?:(?!<\|begin).)*?)<\|end_of_box\|>", r"\\boxed{\1}", seen, flags=re.DOTALL)


def alternatives(truth: str) -> list[str]:
    """Return the truths of which any one is right: those of a JSON list of texts, or else the truth alone."""
    if truth.lstrip().startswith("["):
        found = None
        for read in (json.loads, ast.literal_eval):  # as JSON writes a list, or as Python does
            with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                found = found or read(truth)
        is_list = isinstance(found, list) and len(found) > 0
        if is_list and all(isinstance(text, str) for text in found):
            return found
    return [truth]


def number_of(text: str) -> Fraction:
    """Return the exact value of a number such as "1,024", "-$5", "1e3" or "7/2". Raises ValueError for other texts."""
    if re.search(r"[^-0-9.,eE/]", re.sub(rf"[{DASHES}\s$\u20ac\u00a3\\!{{}}]|frac", "", text)):
        raise ValueError(f"{text[:40]!r} is no number")
    plain = re.sub(f"[{DASHES}]", "-", text)
    plain = re.sub(r"\{,\}|[,\s$\u20ac\u00a3]|\\(?=\$)|\\!", "", plain)
    plain = re.sub(r"\\[dtc]?frac(?:\{(.*?)\}\{(.*?)\}|([0-9])([0-9]))", r"\1\3/\2\4", plain)
    top, divided, bottom = plain.partition("/")
    mantissa, _, exponent = top.lower().partition("e")
    if abs(int(exponent or 0)) > LONGEST_ANSWER or (divided and not Fraction(bottom)):
        return Fraction(-1, 10**LONGEST_ANSWER)  # no truth is so small
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0) / Fraction(bottom or 1)


def _is_part(text: str, number: re.Match) -> bool:
    """Test if a number is part of something else: a power, a time, a date, a range, a list, a name or a label."""
    before, after = text[max(0, number.start() - 20) : number.start()], text[number.end() : number.end() + 12]
    if PART_BEFORE.search(before):
        return True
    if PART_AFTER.match(after) or LABEL.search(before):
        return True
    return after[:1] == "!" and re.search(r"(?:^|[-+*/=(])\s?$", before) is not None  # 7!, not "It is 7!"


def _standing(text: str) -> Iterator[re.Match]:
    """Yield the numbers of a text, from the last to the first, without the exponents of units."""
    for number in reversed(collections.deque(NUMBER.finditer(text), maxlen=20)):
        if not re.search(r"[A-Za-z]\^\{?$", text[max(0, number.start() - 4) : number.start()]):
            yield number


def last_number_in(text: str) -> str | None:
    """Return the last number of a text; None if it is denied ("not 42"), or part of a power, time, range or name."""
    text = text.translate(INVISIBLE)
    number = next(_standing(text), None)
    if number is None or _is_part(text, number) or REJECTED.match(text, number.end()):
        return None
    begin = number.start()
    denied = NEGATED.search(text, max(0, begin - 40), begin)
    return None if denied else number[0]


def marked_number(text: str) -> str | None:
    """Return the number after the last "####", on its line or the next one, after the line's last "=" if it has one.

    None where several numbers stand there, where the line before holds another marked number, or where the text takes
    it back ("Wait, it is 8"). Only numbers in brackets may follow.
    """
    before, _, said = text.translate(INVISIBLE).rpartition("####")
    line, _, after = said.lstrip(" \t\r\n*").partition("\n")
    line = line.rpartition("=")[2]
    numbers = list(NUMBER.finditer(line[:LONGEST_ANSWER]))
    last_line = before.rstrip().rpartition("\n")[2]
    if not numbers or NEGATED.search(line, 0, numbers[0].start()) or PART_BEFORE.search(line[: numbers[0].start()]):
        return None
    if (last_line.startswith("####") and numbers[0][0] not in last_line) or (
        CORRECTED.match(after) and NUMBER.search(after[:200])
    ):
        return None
    between = [line[a.end() : b.start()] for a, b in itertools.pairwise(numbers)]
    if PART_AFTER.match(line, numbers[0].end()) or re.fullmatch(
        r"[\s,;/|&%]*(?:or|and|to)?\s*", (between or ["..."])[0]
    ):
        return None
    return numbers[0][0]


def content_of_box(text: str, start: int) -> tuple[str, int] | None:
    r"""Return (content, index after it) of the box whose content begins at ``start``; None if it is open or empty.

    Without a brace the content is what TeX would take: the next command or number (``\boxed 5``).
    """
    if not text.startswith("{", start):
        bare = re.match(r"-?[0-9][0-9.,]*(?<![.,])|\\[A-Za-z]+|[A-Za-z]", text[start : start + LONGEST_ANSWER])
        return (bare[0], start + bare.end()) if bare else None
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", text[start : start + LONGEST_ANSWER], re.DOTALL):  # \{ is no brace
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            end = start + brace.end()
            return text[start + 1 : end - 1].strip(), end
    return None


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` or ``\fbox{...}``; None if there is none or it is open."""
    boxes = collections.deque(BOX.finditer(text), maxlen=1)
    found = content_of_box(text, boxes[0].end()) if boxes else None
    return found[0] if found else None


def in_last_tag(text: str) -> str | None:
    """Return the text of the last ``<answer>...</answer>``; None if it is empty."""
    head, closed, _ = text.rpartition("</answer>")
    _, opened, inside = head.rpartition("<answer>")
    return inside.strip() or None if closed and opened else None


def without_delimiters(text: str) -> str:
    """Remove the delimiters around an entire text."""
    for opening, closing in DELIMITED:
        inside = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inside and opening not in inside:
            text = inside.strip()
    return text

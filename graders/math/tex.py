"""Read the text of a formula: its spelling, signs, parts, letters and operations. Nothing here is parsed."""

from __future__ import annotations

import itertools
import re
from collections import Counter

GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"  # what stands in braces, with one pair of braces inside
TEXT = r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|mbox)\s*"
INSIDE = r"\(((?:[^()]|\([^()]*\))*)\)"  # what stands in parentheses, with one pair of parentheses inside
UPRIGHT = r"\\(?:mathrm|text|textrm|operatorname\*?|rm)\s*"
NAMED = "sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|arcsin|arccos|arctan|ln|log|exp|gcd|lcm|sqrt"  # functions, as words
GREEK = "alpha|beta|gamma|delta|epsilon|theta|lambda|mu|sigma|phi|omega"
SPELLINGS = [  # (pattern, what stands in its place)
    (r"\\([dtc]?frac)\s*(\\(?!sqrt|frac)[A-Za-z]+|[0-9A-Za-z])", r"\\\1{\2}"),  # \frac\pi4 is \frac{\pi}{4}
    (rf"\\([dtc]?frac)\s*({GROUP})\s*(\\(?!sqrt|frac)[A-Za-z]+|[0-9A-Za-z])", r"\\\1\2{\3}"),
    (rf"([\^_])\s*(\\[dtc]?frac\s*{GROUP}\s*{GROUP})", r"\1{\2}"),
    (r"\\sqrt(\s*\[[^\]]*\])?\s*([0-9]+|[A-Za-z]|\\pi(?![A-Za-z]))", r"\\sqrt\1{\2}"),
    (r"\\(vec|d?dot|bar|hat|tilde|overline)(?![A-Za-z])\s*(\\[A-Za-z]+|[A-Za-z])", r"\\\1{\2}"),
    (rf"(?<![A-Za-z\\])abs\s*{INSIDE}", r"|\1|"),
    (rf"(?<![A-Za-z\\])\\?sqrt\s*{INSIDE}", r"\\sqrt{\1}"),
    (rf"(?<![A-Za-z\\])({NAMED})\s*(?=\(|\s[0-9A-Za-z](?![A-Za-z]))", r"\\\1 "),
    (rf"_\s*(?:\{{\s*{UPRIGHT}\{{\s*(\w+)\s*\}}\s*\}}|{UPRIGHT}\{{\s*(\w+)\s*\}})", r"_{\1\2}"),
    (r"_([A-Za-z])(?![A-Za-z])", r"_{\1}"),
    (rf"{UPRIGHT}\{{\s*([ei])\s*\}}", r"\1 "),
    (r"\\var(epsilon|phi|theta|rho|sigma)(?![A-Za-z])", r"\\\1"),
    (r"\\(begin|end)\s*\{(?:b|B|p)matrix\}", r"\\\1{pmatrix}"),
    (r"\\(begin|end)\s*\{smallmatrix\}", r"\\\1{matrix}"),
    (r"^\\[pb]matrix\s*\{(.*)\}$", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"^\\begin\s*\{matrix\}(.*)\\end\s*\{matrix\}$", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"(?<![0-9)}\]])\]([^][,;()]+[,;][^][,;()]+)(?=[][])", r"(\1"),
    (r"([(\[][^][,;()]+[,;][^][,;()]+)\[(?![\w(])", r"\1)"),
    (r"(?<![0-9.,/])([0-9]+)\s+([0-9]+)/([0-9]+)(?![0-9])", r"\1\\frac{\2}{\3}"),
]
LISTED = re.compile(r"^\[\s*(\[[^][]*\](?:\s*,\s*\[[^][]*\])+)\s*\]$")  # [[1, 2], [3, 4]]


def spelled(text: str) -> str:
    """Return a formula in one spelling: arguments in braces, one kind of matrix, functions as commands."""
    words = re.findall("[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", " ", text))
    if words and all(re.fullmatch(f"{GREEK}|{NAMED}|oo", word) for word in words):
        text = re.sub(rf"(?<![A-Za-z\\])({GREEK})(?![A-Za-z])", r"\\\1 ", text)
        text = re.sub(r"(?<![A-Za-z\\])oo(?![A-Za-z])", r"\\infty ", text)
    for pattern, instead in SPELLINGS:
        text = re.sub(pattern, instead, text, flags=re.DOTALL)
    if (rows := LISTED.match(text)) is not None:
        inside = [row.replace(",", "&") for row in re.findall(r"\[([^][]*)\]", rows[1])]
        text = "\\begin{pmatrix}" + r" \\ ".join(inside) + "\\end{pmatrix}"
    return text


def signs(text: str) -> list[str]:
    r"""Return the values of a part with ``\pm``, of the upper and of the lower signs, or a part without it alone."""
    values = []
    for plus, minus in ("+-", "-+"):
        value = re.sub(r"\\pm(?![A-Za-z])", plus, text)
        value = re.sub(r"\\mp(?![A-Za-z])", minus, value)
        values.append(re.sub(r"(^|[{(=,])\s*\+", r"\1", value))
    return values if values[0] != values[1] else [text]


OPERATION = re.compile(  # numbers, functions, powers, and sums in parentheses; 0, 1, letters and blanks are none
    r"[0-9]+(?:\.[0-9]+)?|\\(?!cdot|times|left|right|displaystyle|text|mathrm|pi|infty|in\b|cup|cap|[lg]eq?)[A-Za-z]+"
    r"|\\%|[\^!/*|]|(?<=[0-9A-Za-z)}\]])\s*[+-]|\((?=\s*-?[^()+-]+[+-])"
)
IDLE = re.compile(r"(?<![0-9.])(?:[+-]\s*0(?![0-9.])|1\s*(?:\\cdot|\\times|\*)|[*/]\s*1(?![0-9.]))")


def operations(text: str) -> Counter:
    """Count the numbers and operations that a formula holds; what may be written in several ways counts as one."""
    text = re.sub(r"\\sqrt\s*\[\s*2\s*\]", r"\\sqrt", re.sub(r"\\(?:cdot|times)(?![A-Za-z])", "*", text))
    text = re.sub(r"\\[dtc]?frac(?![A-Za-z])|\\div(?![A-Za-z])", "/", IDLE.sub("", text))
    text = re.sub(r"\{([^{}]*)\\choose([^{}]*)\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"\\circ ", text.replace("**", "^"))
    found = Counter(re.sub(r"\s*-", "+", token.strip()) for token in OPERATION.findall(text))
    for token in ("0", "1"):
        del found[token]
    for token in ("+", "*"):  # that there are some is enough
        found[token] = min(found[token], 1)
    return +found


DEEPEST = 20  # braces inside one another that are still read
# Four braces with nothing between them, and the binomials that the parser itself computes: of five digits, of a power.
COSTLY = re.compile(r"\{\s*\{\s*\{\s*\{|binom[\s{(]*(?:[0-9]{5}|[0-9.]+\s*\^)|[0-9]{5}\s*\\choose")
BRACKET = re.compile(r"\\.|[][(){}]")  # an escaped character is matched, too, so that "\{" is not taken for a brace
GROUPED = r"(?<![0-9.])[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])"
# Brackets whose only commas may be those between thousands: (3,125) is a point.
ONLY_COMMAS = re.compile(rf"(?:\\\{{|[(\[])[^()\[\]{{}},]*{GROUPED}[^()\[\]{{}},]*(?:\\\}}|[)\]])")
# Between the parts of a list: a comma that is no blank of LaTeX, a semicolon, "and" and "or", plain or in \text.
PARTS = re.compile(r"(?<!\\)[,;]|\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b")
THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\{,\}|,\\!\s*)(?=[0-9]{3}(?![0-9]))")  # a comma that may stand within a number


def _depths(pieces) -> list[int]:
    """Return how many brackets are open before each piece of a text, and at its end."""
    return list(itertools.accumulate(((piece in "([{") - (piece in ")]}") for piece in pieces), initial=0))


def nested(text: str) -> int:
    """Return how deep the brackets of a text are; the parser takes exponential time if they hold only each other."""
    return max(_depths(BRACKET.findall(text)))


def too_large(text: str) -> bool:
    """Test if to read a text, or the numbers that the parser itself computes, would take seconds or all memory."""
    return COSTLY.search(text) is not None or nested(text) > DEEPEST


def parts_of(text: str) -> list[str]:
    """Split a list without brackets around it at the commas, "and" and "or" that are outside of other brackets."""
    depths = _depths(text)
    parts = []
    begin = 0
    for cut in PARTS.finditer(text):
        if depths[cut.start()] == 0:
            parts.append(text[begin : cut.start()])
            begin = cut.end()
    parts.append(text[begin:])
    return [part.strip() for part in parts if part.strip()]


def without_thousands(text: str) -> str:
    """Remove the commas between the thousands of a formula's numbers, unless brackets hold no other commas."""
    return text if ONLY_COMMAS.search(text) else re.sub(GROUPED, lambda number: number[0].replace(",", ""), text)


def letters_of(text: str) -> set[str]:
    """Return the variables of a formula: its letters, except for those of commands and of words."""
    return set(re.findall("[A-Za-z]", re.sub(rf"(?:{TEXT}|\\(?:begin|end)\s*){GROUP}|\\[A-Za-z]+", " ", text)))


def renamed(text: str, names: dict[str, str]) -> str:
    """Rename the variables of a formula."""
    pieces = re.split(rf"({TEXT}{GROUP}|\\(?:begin|end)\s*{GROUP}|\\[A-Za-z]+)", text)
    return "".join(
        piece if i % 2 else "".join(names.get(letter, letter) for letter in piece) for i, piece in enumerate(pieces)
    )


def with_cases_apart(answer: str, wanted: str) -> tuple[str, str]:
    """Rename variables of two formulas that differ in case alone: the parser does not tell M from m."""
    left, equals, right = answer.partition("=")
    name = wanted.partition("=")[0].strip()
    if equals and len(name) <= 8 and left.strip().casefold() == name.casefold():
        answer = f"{name}={right}"  # "N = 12" is "n = 12"
    letters = letters_of(answer) | letters_of(wanted)
    free = [letter for letter in "qwzypvutrsnmlkjhgba" if not {letter, letter.upper()} & letters]
    capitals = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    names = dict(zip(capitals, free, strict=False))
    return renamed(answer, names), renamed(wanted, names)


MODULUS = re.compile(
    r"(?:\s|\\[,;:! ])*+(?:\\pmod\s*+\{?\s*+([0-9a-z]+)\s*+\}?"
    r"|\(\s*(?:\\(?:text|mathrm)\s*\{\s*mod\s*\}|\\?mod)\s*([0-9a-z]+)\s*\))$"
)


def without_modulus(answer: str, wanted: str) -> tuple[str, str]:
    r"""Remove "\pmod 5" from two residues: one of them may leave it out, but their moduli must not differ."""
    said, right = MODULUS.search(answer), MODULUS.search(wanted)
    if said and right and (said[1] or said[2]) != (right[1] or right[2]):
        return answer, ""
    texts = [text[: found.start()] if found else text for text, found in ((answer, said), (wanted, right))]
    return tuple(text.replace("\\equiv", "=") if said or right else text for text in texts)

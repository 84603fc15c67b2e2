"""Where in a response the answer is, and whether two answers are the same: what ``rewards.math_`` decides by.

Two answers are the same where their texts are, once what carries no meaning is gone; where they are the same words or
the same number; or where math-verify says so of the texts as they are (units apart), and its reason is one. Rewriting
for the comparison of texts never reaches the parser.
"""

from __future__ import annotations

import collections
import functools
import logging
import operator
import re
from decimal import Decimal

# A minus is a sign only where no number or bracket stands before it: "10-4" ends in 4, "= -4" in -4. A comma belongs
# to a number only between groups of three digits, a dot only between digits.
NUMBER = re.compile(
    r"(?<![0-9])(?<![0-9]\.)(?:(?<![0-9)\]])[-\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)
NEGATED = re.compile(r"(?:\bnot|n't|n\u2019t|\bnever)\s*[:$*}]*\s*$", re.IGNORECASE)
LONGEST_ANSWER = 1000  # characters; what is longer is no answer, and parsers take more than linear time

# What announces an answer: "####" of GSM8K, "The final answer is" of Minerva, "**Answer:**", "answer to this would be".
ANNOUNCED = re.compile(
    r"####|\banswer\b(?:(?!\bnot\b|n't)[^.?!\n:=$]){0,40}?(?:\b(?:is|(?:would|should|must) be)\b[ \t*_]*:?|:|=)",
    re.IGNORECASE,
)
NAMED = re.compile(r"(?:the|it|so)\b[^$\\=0-9]*\bis\s+(?=[-$\\0-9(])", re.IGNORECASE)  # "The value of x is 5"
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
BETWEEN_BOXES = re.compile(r"[\s$]*(?:,|;|\\text\s*\{\s*(?:and|or)\s*\}|,?\s*\b(?:and|or)\b)[\s$]*")
DELIMITED = (  # (opening, closing) of mathematics or emphasis around a whole answer
    ("$$", "$$"),
    ("\\[", "\\]"),
    ("\\(", "\\)"),
    ("**", "**"),
    ("$", "$"),
)
# Where a plain answer stops and prose continues: "5 because ...", "5, as required.", "5. I hope it is correct."
PROSE = re.compile(
    r"[.!](?=\s|$)|\s+(?=I hope\b)|[,;]?\s+\(?(?=(?:because|since|as|so|which|where|when|given|assuming|thus|hence|"
    r"therefore|but)\b)",
    re.IGNORECASE,
)


def as_decimal(text: str) -> Decimal:
    return Decimal(text.strip().replace(",", "").replace("\u2212", "-"))


def after_thinking(response: str) -> str:
    """Return what follows the last ``</think>``; nothing when a ``<think>`` is still open: a thought is no answer."""
    answer = response.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


def _content_of_box(text: str, start: int) -> tuple[str, int] | None:
    r"""(content, index after it) of the box whose content begins at ``start``; None where it is open or empty.

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
    found = _content_of_box(text, boxes[0].end()) if boxes else None
    return found[0] if found else None


def _boxed_answer(text: str) -> str | None:
    r"""The last box, with the boxes before it that are joined to it: ``\boxed{1}$ and $\boxed{2}`` is "1, 2"."""
    boxes = collections.deque(BOX.finditer(text), maxlen=10)
    answers: list[str] = []
    begin_of_next = None
    for box in reversed(boxes):
        found = _content_of_box(text, box.end())
        if found is None:
            break
        content, end = found
        if begin_of_next is not None and not BETWEEN_BOXES.fullmatch(text[end:begin_of_next]):
            break
        if content not in answers[-1:]:
            answers.append(content)
        begin_of_next = box.start()
    return ", ".join(reversed(answers)) or None


def _between_delimiters(text: str) -> str | None:
    """The formula with which ``text`` begins, and a unit or percent sign after it; None where it is not alone."""
    for opening, closing in DELIMITED:
        if not text.startswith(opening):
            continue
        inside, closed, after = text[len(opening) :].partition(closing)
        if not closed or re.match(r"\s*(?:,|\bor\b|\band\b|[0-9A-Za-z\\]*\s*\\?\$)", after):
            return None  # "$1$ or $2$" is one answer of two parts
        line = after.partition("\n")[0]
        if re.match(r"\s*\\?%", line):
            return inside.strip() + "\\%"
        unit = re.match(r"\s*([a-z]+(?:\s+[a-z]+)?)\.?\s*$", line)
        return f"{inside.strip()}\\text{{ {unit[1]}}}" if unit else inside.strip()
    return None


def _before_prose(line: str) -> str:
    """A plain answer without what is said after it."""
    prose = PROSE.search(line)
    return line[: prose.start()] if prose else line


def _announced_answer(text: str) -> str | None:
    """What follows the last announcement, on its line or the next; without delimiters, and without prose after it."""
    announced = collections.deque(ANNOUNCED.finditer(text), maxlen=1)
    if not announced:
        return None
    rest = text[announced[0].end() :][: 2 * LONGEST_ANSWER]
    if announced[0][0] == "####":
        rest = rest.partition("\n")[0]
    rest = rest.strip(" \t\r\n:*") if rest.lstrip(" \t:*").startswith("\n") else rest.strip(" \t:")
    named = NAMED.match(rest)
    rest = rest[named.end() :] if named else rest
    return _between_delimiters(rest) or _before_prose(rest.partition("\n")[0])


def final_answer(text: str) -> str | None:
    r"""Return the last box; else what follows the last "answer is", "answer:" or "####"; else None.

    Never the whole text: somewhere in it any number can be found. Of several answers the last counts.
    """
    if BOX.search(text):
        return _boxed_answer(text)
    answer = (_announced_answer(text) or "").strip().strip("*_ ").rstrip(".").strip("*_ ")
    if not 0 < len(answer) <= LONGEST_ANSWER or re.match(r"not\b", answer, re.IGNORECASE):
        return None
    return answer


def tagged_answer(text: str) -> str | None:
    """Return what stands in the last ``<answer>...</answer>``, else the final answer."""
    head, closed, _ = text.rpartition("</answer>")
    _, opened, inside = head.rpartition("<answer>")
    return inside.strip() if closed and opened and inside.strip() else final_answer(text)


# ------------------------------------------------------------------------------------------------------ math: text

UNICODE = str.maketrans(
    {
        "\u2212": "-",
        "\u00d7": "\\times ",
        "\u00b7": "\\cdot ",
        "\u00f7": "\\div ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
        "\u2260": "\\ne ",
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u222a": "\\cup ",
        "\u2229": "\\cap ",
        "\u2208": "\\in ",
        "\u00b1": "\\pm ",
        "\u00b0": "^\\circ ",
        "\u2205": "\\emptyset ",
        "\u00a0": " ",
    }
)
TEXT = r"\\(?:text|textrm|textbf|textit|textnormal|mathrm|mathbf|mathit|mbox)\s*"
DECORATION = [  # (pattern, what stands in its place) for the comparison of texts
    (r"\\\\(?!\s*(?:text|frac|sqrt))", ";;"),  # the row separator of a matrix, before "\ " is looked for
    (r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|(?<!\\)\\[,;:!]|\\ |\\?\$|~", ""),
    (r"\\[dtc]frac", r"\\frac"),
    (TEXT + r"\{\s*([^{}]*?)\s*\}", r" \1 "),
    (r"\{,\}", ","),
    (r",\s+(?=[0-9]{3}(?![0-9]))", ", \\\\list "),  # "2, 100" is a list, "2,100" may be a number
    (r"(?<![A-Za-z])\s+|\s+(?![A-Za-z])", ""),  # a blank counts between letters alone
    (r"\s+", " "),
]


def _plain(text: str) -> str:
    """A text without what does not change its meaning; two equal ones are the same answer."""
    for pattern, instead in DECORATION:
        text = re.sub(pattern, instead, text)
    return text.strip().rstrip(".,")


def _words(text: str) -> list[str]:
    """Return the words or phrases that ``text`` lists, in lower case and sorted; [] if it holds anything else."""
    plain = re.sub(TEXT + r"\{([^{}]*)\}", r" \1 ", text)
    pieces = [piece.strip(" .$") for piece in re.split(r",|;|\band\b|\bor\b", plain)]
    pieces = [re.sub(r"^(?:an?|the)\s+(?=[A-Za-z]{2})", "", piece) for piece in pieces if piece]
    if not all(re.fullmatch(r"\(?[A-Za-z](?:[A-Za-z ']|(?<=[a-z]{2})-(?=[a-z]{2}))*\)?", piece) for piece in pieces):
        return []
    return sorted(" ".join(piece.strip("()").split()).casefold() for piece in pieces)


def _is_word(piece: str) -> bool:
    """Whether bare letters are a word and not a product: "east", not "ab" or "xyz"."""
    return len(piece) >= 5 or (len(piece) >= 3 and re.search("[eiou]", piece) is not None)


def _same_words(answer: str, wanted: str) -> bool | None:
    """Whether two texts of words are the same; None where they are not both words but perhaps products of letters."""
    said, right = _words(answer), _words(wanted)
    if not said or not right or {"infinity", "inf"} & {*said, *right}:
        return None
    marked = re.search(TEXT + r"\{", answer + wanted) is not None
    if not marked and not any(map(_is_word, said + right)):
        return None
    return said == right


# ----------------------------------------------------------------------------------------------------- math: units

SAME_UNIT = (  # one unit a line; what is not here has no other name, and is never taken for a different unit
    "mm millimeter millimeters millimetre millimetres",
    "cm centimeter centimeters centimetre centimetres",
    "m meter meters metre metres",
    "km kilometer kilometers kilometre kilometres",
    "in inch inches",
    "ft foot feet",
    "yd yard yards",
    "mi mile miles",
    "mg milligram milligrams",
    "g gram grams gm",
    "kg kilogram kilograms",
    "lb lbs pound pounds",
    "oz ounce ounces",
    "ml milliliter milliliters millilitre",
    "l liter liters litre litres",
    "gal gallon gallons",
    "s sec secs second seconds",
    "min mins minute minutes",
    "h hr hrs hour hours",
    "day days",
    "week weeks",
    "month months",
    "yr year years",
    "dollar dollars usd",
    "cent cents",
    "euro euros",
    "deg degree degrees",
    "rad radian radians",
    "am a.m",
    "pm p.m",
    "n newton newtons",
    "j joule joules",
    "w watt watts",
    "v volt volts",
    "hz hertz",
    "acre acres",
)
UNITS = {name: line.split()[0] for line in SAME_UNIT for name in line.split()}
POWERS = {"square": "^2", "sq": "^2", "squared": "^2", "cubic": "^3", "cu": "^3", "cubed": "^3", "per": "/"}
COMPOUND = {"mph": "mi / h", "kmh": "km / h", "kph": "km / h", "kmph": "km / h", "sqft": "ft ^2", "fps": "ft / s"}
SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}  # powers of ten
NO_UNIT = re.compile(
    "(?:sin|cos|tan|cot|csc|sinh|cosh|tanh|log|exp|mod|gcd|lcm|max|arg|det|dim|ker|sup|inf|lim|and|not|none|infinity|"
    "percent|percentage|pct|false|wrong|incorrect|impossible)",
    re.IGNORECASE,
)
EXPONENT = r"(?:\s*\^\s*\{?\s*-?[0-9]\s*\}?)?"
UNIT_TAIL = re.compile(  # \text{ cm}^2, \mathrm{m}/\mathrm{s}, ^\circ C, the base of a number
    rf"(?:(?:\s|\\[,;:! ]|~|/|\\cdot|(?<=\}})\^\s*\{{?\s*-?[0-9]\s*\}}?)*{TEXT}\{{[^{{}}]*\}}{EXPONENT})+\s*$"
    rf"|\^\s*\{{?\s*{TEXT}\{{(?:st|nd|rd|th)\}}\s*\}}?\s*$"
    rf"|\\d?frac\s*\{{\s*{TEXT}\{{[^{{}}]*\}}\s*\}}\s*\{{\s*{TEXT}\{{[^{{}}]*\}}{EXPONENT}\s*\}}\s*$"
    r"|\^\s*\{?\s*\\circ\s*\}?\s*(?:\\(?:text|mathrm)\s*\{\s*)?[CF]?(?:\s*\})?\s*$|(?<=[0-9])_\{?[0-9]+\}?\s*$"
)
WORD_TAIL = re.compile(rf"(?<=[0-9}})])(?:\\?\s|\\,|~)*((?:[A-Za-z]+\.?(?:{EXPONENT}|\s*/)\s*)+)$")


def _unit(text: str) -> tuple[str, ...]:
    """Return a unit in one spelling, () where it is not known: "square feet" and "ft^2" are ("^2", "ft")."""
    parts = []
    text = re.sub(TEXT, " ", text)
    for word in re.findall(r"[A-Za-z]+(?:\.m)?|\^\s*\{?\s*-?[0-9]|/|\\circ|_\{?[0-9]+", text):
        word = POWERS.get(word.lower(), re.sub(r"[\s{]", "", word))
        if word == "\\circ" or word == "circ":
            word = "degrees"
        known = COMPOUND.get(word.lower()) or UNITS.get(word) or UNITS.get(word.lower())
        if known is None and word[0] not in "^/_":
            return ()
        parts += (known or word).split()
    return tuple(sorted(parts))


def _split_unit(text: str) -> tuple[str, tuple[str, ...]]:
    """(value, unit) of an answer such as ``5\\text{ cm}``, "12 apples" or ``\\$3``; letters alone are variables."""
    whole = re.fullmatch(TEXT + r"\{([^{}]*[0-9][^{}]*)\}", text)
    text = whole[1].strip() if whole else text
    tail = UNIT_TAIL.search(text)
    if tail is None and (words := WORD_TAIL.search(text)):
        names = re.findall("[A-Za-z]+", words[1])
        known = [n in UNITS or n.lower() in {*UNITS, *POWERS, *COMPOUND, "unit", "units"} for n in names]
        named = [len(name) >= 3 and not NO_UNIT.fullmatch(name) for name in names]
        bare = re.sub(r"\\[A-Za-z]+", "", text[: words.start()])
        long = "/" in words[1] or any(len(name) > 1 for name in names)
        ordinal = re.fullmatch("st|nd|rd|th", words[1].strip())
        if (long and not re.search("[A-Za-z]", bare) and all(map(operator.or_, known, named))) or ordinal:
            tail = words
    dollars = ("dollar",) if re.match(r"-?\s*\\?\$", text) else ()
    if tail is None:
        return text, dollars
    value, said = text[: tail.start()].strip(), text[tail.start() :]
    names = re.findall("[a-z]+", said.lower())
    if not value or re.search(r"(?:=|<|>|[+*/^_(,-]|\\(?:cdot|times|le|ge|in|or|and))$", value):
        return text, dollars
    if {"not", "wrong", "incorrect", "false", "and", "or", "more", "less", "dozen", "pairs"} & {*names}:
        return text, dollars
    if scale := [SCALES[name] for name in names if name in SCALES]:
        value = f"{value} \\times 10^{{{sum(scale)}}}"
    return value, _unit(said) or dollars


# ------------------------------------------------------------------------------------------------ math: values


@functools.lru_cache(maxsize=256)  # the samples of a group have one truth
def parse_math(latex: str) -> list:
    """LaTeX as math-verify reads it: sympy expressions, possibly none. Its own time-outs are signals and stay off.

    Its removal of units is off, too: it takes any last letter for one, and finds 2m equal to 2.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that the signals are off
    how = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(units=False, malformed_operators=True, nits=True),
    )
    return parse(f"\\boxed{{{latex}}}", [how], parsing_timeout=None)


def _numbers(expression) -> list:
    """The numbers that an answer consists of, sorted; [] where it is not made of numbers."""
    from sympy import Eq, Expr, FiniteSet, Interval, MatrixBase, N, Tuple

    if isinstance(expression, MatrixBase):
        parts = expression.flat()
    elif isinstance(expression, FiniteSet | Tuple):
        parts = expression.args
    elif isinstance(expression, Interval):
        parts = [expression.start, expression.end]
    elif isinstance(expression, Eq) and expression.lhs.is_Symbol:
        parts = [expression.rhs]
    elif isinstance(expression, Expr) and expression.is_number:
        value = N(expression.doit(), 20)
        return [value] if value.is_Float or value.is_Integer else []
    else:
        return []
    return sorted(number for part in parts for number in _numbers(part))


def _close(gold, found) -> bool:
    """Whether the numbers of two answers agree to 0.5 %: math-verify rounds at a fixed place, so 1e-31 is its 0."""
    from sympy.core.expr import UnevaluatedExpr

    if gold.has(UnevaluatedExpr) or found.has(UnevaluatedExpr):
        return True  # a percentage, which may stand for the number before its sign
    pairs = list(zip(_numbers(gold), _numbers(found), strict=False))
    return all(a == b or abs(a - b) <= 0.005 * max(abs(a), abs(b)) for a, b in pairs)


def _sound(gold, found) -> bool:
    """Whether an equality that math-verify found says something.

    It compares equations by their solutions, and no solution equals no solution; it takes the right side of an
    equation for a value, whether or not the equation is true.
    """
    from sympy import Eq, Expr, FiniteSet, Interval, Set, Tuple, simplify, solve
    from sympy.core.relational import Relational
    from sympy.logic.boolalg import BooleanFunction

    relations = (Relational, BooleanFunction)
    if isinstance(found, relations) and not found.free_symbols:
        steps = [found] if isinstance(found, Relational) else found.args
        return not isinstance(gold, relations) and all(isinstance(e, Eq) and _close(e.lhs, e.rhs) for e in steps)
    if (
        isinstance(gold, FiniteSet)
        and isinstance(found, Tuple | Interval)
        and all(isinstance(e, Eq) for e in gold.args)
    ):
        values = found.args[:2] if isinstance(found, Interval) else found.args  # x = 2, y = 3 is the point (2, 3)
        return all(a.rhs.equals(b) for a, b in zip(gold._unsorted_args, values, strict=True))
    if isinstance(found, Set) and found.is_empty:
        return isinstance(gold, Set)
    equations = isinstance(gold, Eq) and isinstance(found, Eq)
    if equations and all(isinstance(side, Expr) for side in (*gold.args, *found.args)):
        ours, theirs = (e.lhs.doit() - e.rhs.doit() for e in (gold, found))
        ratio = simplify(ours / theirs) if theirs != 0 else theirs
        if not (ratio.is_number and ratio.is_finite and ratio != 0) and not solve(gold, gold.free_symbols):
            return False
    return _close(gold, found)


def _same_value(answer: str, wanted: str) -> bool:
    """Whether math-verify finds two answers equal, for a reason."""
    from math_verify import verify

    gold, found = parse_math(wanted), parse_math(answer)
    if not gold or not found:
        return False
    if not verify(gold, found, timeout_seconds=None, allow_set_relation_comp=True):
        return False
    if isinstance(gold[0], str) or isinstance(found[0], str):
        return True
    try:
        return _sound(gold[0], found[0])
    except Exception:  # sympy raises a dozen kinds where it cannot tell; what nobody can confirm is not right
        return False


def tidy(text: str) -> str:
    """An answer as it goes to the parser: without delimiters around it, in ASCII, numbers such as 1.5e3 spelled out."""
    text = text.strip().translate(UNICODE).strip()
    for opening, closing in DELIMITED:
        inside = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inside and opening not in inside:
            text = inside.strip()
    text = text.replace("\\varnothing", "\\emptyset").rstrip(".").strip()
    text = text.replace("\\langle", "(").replace("\\rangle", ")").replace("**", "^")
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi", text)
    text = re.sub(TEXT + r"\{[^{}]*\b(?:is|are):?\s*\}\s*(?=.)", "", text)  # \boxed{\text{The answer is } 5}
    repeating = re.fullmatch(r"(-?)([0-9]*)\.([0-9]*)\\overline\{?([0-9]+)\}?", text)
    if repeating:
        sign, whole, fixed, again = repeating.groups()
        numerator = int(whole + fixed + again) - int((whole + fixed) or 0)
        text = f"{sign}\\frac{{{numerator}}}{{{(10 ** len(again) - 1) * 10 ** len(fixed)}}}"
    if "matrix" in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\\\ ", text)  # else the parser takes the row's first letter for a command
    scientific = re.fullmatch(r"(-?[0-9.]+)(?:[eE]|\s*[xX*]\s*10\s*\^)\s*\{?([+-]?[0-9]+)\}?(.*)", text)
    if scientific:
        text = f"{scientific[1]} \\times 10^{{{int(scientific[2])}}}{scientific[3]}"
    return text


PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*(?:percent|pct|\\?%)\s*\}|(?<![A-Za-z])percent)\s*$")
DECIMAL = re.compile(
    r"(-?)\s*\\?\$?((?:[0-9]{1,3}(?:(?:,|\{,\}|,\\!)[0-9]{3})+|[0-9]*)(?:\.[0-9]+)?)"
    r"(?:\s*(?:\\times|\\cdot)\s*10\s*\^\s*\{?\s*([+-]?[0-9]{1,4})\s*\}?)?"
)


def _decimal(text: str) -> Decimal | None:
    """The exact value of a number in decimals, perhaps times a power of ten; None for anything else."""
    found = DECIMAL.fullmatch(text)
    digits = re.sub(r"[^0-9.]", "", found[2]) if found else ""
    if not digits:
        return None
    return Decimal(found[1] + digits).scaleb(int(found[3] or 0))


def _same_percentage(answer: str, wanted: str) -> bool:
    """Whether two answers differ in a percent sign alone, which may be left away of a number from 1 on."""
    plain, right = PERCENT.sub("", answer), PERCENT.sub("", wanted)
    if (plain == answer) == (right == wanted):
        return False
    value = _decimal(plain)
    return value is not None and abs(value) >= 1 and value == _decimal(right)


def equal(answer: str, wanted: str) -> bool:
    """Whether two tidy answers are the same text, the same words, the same number, or the same by math-verify."""
    if not _plain(answer) or not _plain(wanted):
        return False
    if _plain(answer) == _plain(wanted):
        return True
    same = _same_words(answer, wanted)
    if same is not None:
        return same
    if _same_percentage(answer, wanted):
        return True
    if PERCENT.search(answer) and PERCENT.search(wanted):
        answer, wanted = PERCENT.sub("", answer), PERCENT.sub("", wanted)
    (answer, unit), (wanted, right_unit) = _split_unit(answer), _split_unit(wanted)
    if unit and right_unit and unit != right_unit:
        return False
    number, right = _decimal(answer), _decimal(wanted)
    if number is not None and number == right:
        return True
    return _same_value(answer, wanted)

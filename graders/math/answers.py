"""Decide whether two answers are equal, for ``graders.math.judge``.

Two answers are equal if their texts are, without characters that carry no meaning; if they are the same words, choice,
date or number; or if algebra.py finds the original texts equal (units.py compares units). The
rewriting for the comparison of texts never reaches the parser.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Callable

from graders.math.algebra import parts_of, same_value, without_thousands
from graders.math.units import (
    GROUP,
    PERCENT,
    TEXT,
    amount_of,
    decimal_of,
    is_word,
    same_percentage,
    same_time,
    scale_between,
    split_unit,
    unit_of,
)
from graders.text import DASHES, INVISIBLE, without_delimiters

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
        "\u03a9": "\\Omega ",
        "\u2126": "\\Omega ",
        "\u2044": "/",
        "\u00a0": " ",
        "\u202f": " ",
        "\u2009": " ",
        "\u201c": '"',
        "\u201d": '"',
    }
)
RAISED = "\u00b2\u00b3\u00b9\u2070\u2074-\u2079\u207a\u207b\u207f"
LOWERED = "\u2080-\u2089\u208a\u208b"
FUNCTIONS = "ln|log|sin|cos|tan|cot|csc|arcsin|arccos|arctan|sinh|cosh|tanh|exp|gcd|lcm"
WORDS = "min|max|sec|lg|det"  # functions, too, but only where an argument follows: else a unit or a word
NO_ARGUMENT = r"(?:text|mathrm|cdot|times|q?quad|pm|to|or|and|le|ge|ne|approx|right)(?![A-Za-z])"
BEGINS = rf"(?:\(|\{{|\\\{{|\\(?!{NO_ARGUMENT})[A-Za-z]|[A-Za-z])"  # an argument
TYPESET = [  # (pattern, what stands in its place) before the parser: how a formula looks, and other names of commands
    (r"\\(?:left|right)\s*\.", ""),
    (r"\\(?:big|Big|bigg|Bigg)[lrm]?(?![A-Za-z])\s*", ""),
    (r"\\lparen(?![A-Za-z])", "("),
    (r"\\rparen(?![A-Za-z])", ")"),
    (r"\\(?:textcolor|color)\s*\{[A-Za-z0-9!]*\}", ""),
    (r"\\(?:nice|s)frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:(?:text|script|display)style|large|Large|huge|bf|rm|it|mathstrut|limits|nolimits)(?![A-Za-z])\s*", ""),
    (r"\\q?quad(?![A-Za-z])", " "),
    (r"(?<=[0-9]),\\!\s*(?=[0-9]{3}(?![0-9]))", ","),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (rf"\\(?:operatorname\*?|mathrm|text)\s*\{{\s*({FUNCTIONS})\s*\}}(?=\s*[^\s.,;)\]}}])", r"\\\1 "),
    (r"(?<=[0-9}\s~,!])\\operatorname\*?\s*\{\s*([A-Za-z]+)\s*\}$", r"\\text{ \1}"),  # nothing follows: a unit
    (rf"\\operatorname\*?\s*\{{\s*({WORDS})\s*\}}", r"\\\1 "),
    (rf"\\(?:mathrm|text)\s*\{{\s*({WORDS})\s*\}}(?=\s*(?:_|\^\s*\{{?[-0-9a-z]\}}?\s*{BEGINS}|{BEGINS}))", r"\\\1 "),
    (r"\\log_\{?\s*e\s*\}?(?![A-Za-z])", r"\\ln "),
    (r"\\text\s*\{\s*([,.:;])\s*\}|\{([,.:;])\}", r"\1\2"),
    (r"\\colon(?![A-Za-z])\s*", ":"),
    (r"(?<=[0-9])\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=[0-9])", ":"),
    (r"\\tag\*?\s*\{[^{}]*\}\s*$|\\(?:checkmark|blacksquare)(?![A-Za-z])\s*$|^\\?#\s*(?=[0-9])", ""),
    (r"\\degree(?![A-Za-z])", r"^\\circ "),
    (r"\\bigcup(?![A-Za-z])", r"\\cup"),
    (r"\\(?:lor|vee)(?![A-Za-z])", r"\\text{ or }"),
    (r"\\(?:land|wedge)(?![A-Za-z])", r"\\text{ and }"),
    (r"^\s*(?:\\(?:approx|sim|simeq)(?![A-Za-z])|\\text\s*\{\s*(?:about|approximately|the year)\s*\})\s*", ""),
    (r"^<(?=[^<>]*,)([^<>]*)>$", r"(\1)"),
    (r"(?i:\b([ap])\.\s?m(?![a-z])\.?)", r"\1m"),
    (r"_\s*\{\s*\\(max|min)\s*\}", r"_{\1}"),
    (r"(?:\{\})?\s*[\^_]\s*\{?([0-9]+)\}?\s*(?:\\(?:text|mathrm)\s*\{C\}|C)\s*_\s*\{?([0-9]+)\}?", r"\\binom{\1}{\2}"),
    (r"^\(\s*([0-9A-Z]+)\s*\)(?=_)", r"\1"),
    (r"(?:(?<=[0-9])|(?<=[0-9]\s))(?:\\text\s*\{\s*percent\s*\}|percent)$", r"\\%"),
    (r"(?<=[0-9.])\s*\\(?:mathrm|text)\s*\{\s*[eE]\s*\}\s*(?=[-+]?[0-9])", "e"),
    (r"\\(?:vec|hat|mathbf|boldsymbol|bm)\s*\{?\s*\\?([ijk])(?:math)?(?![A-Za-z])\s*\}?", r"\1 "),
]
BUILDER = re.compile(  # \{x : x < 3\}, \{x \in \mathbb{R} \mid x < 3\}
    r"(?:\\left\s*+)?\\\{\s*+[A-Za-z]\s*+(?:\\in\s*\\mathbb\s*\{?\s*R\s*\}?\s*)?(?::|\||\\mid|\\vert)\s*"
    r"(.+)\\\}"
)
BEGIN = r"(?P<sign>-?)(?P<whole>[0-9]{0,30})\.(?P<fixed>[0-9]{0,30}"
REPEATING = [  # 0.1\overline{6}, 0.1(6), 0.1666...
    re.compile(BEGIN + r")\\(?:overline|dot|bar)\{?(?P<again>[0-9]+)\}?"),
    re.compile(BEGIN + r")\((?P<again>[0-9]+)\)"),
    re.compile(BEGIN + r"?)(?P<again>[0-9])(?P=again){2,}(?:\\[ld]?dots|\.\.\.|\u2026)"),
    re.compile(BEGIN + r"?)(?P<again>[0-9]{2,6}?)(?P=again)+(?:\\[ld]?dots|\.\.\.|\u2026)"),
]
WRAPPED = re.compile(  # a value in bold, underlined, in a color; of letters \mathbf alone may mean something
    rf"\\(?:boldsymbol|bm|underline|ensuremath|(?:mathbf|mathit|mathsf)(?=\s*\{{\s*[-\\0-9(]))\s*({GROUP})"
)
DECORATION = [  # (pattern, what stands in its place) for the comparison of texts
    (r"\\\\(?!\s*(?:text|frac|sqrt))", ";;"),  # the row separator of a matrix, before "\ " is looked for
    (r"(?<=[0-9])(?:\s|\\[,;: ]|~)+(?=[0-9])", r"\\blank"),  # "1 2" is not 12, "1 000" is found by its value
    (r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|(?<!\\)\\[,;:!]|\\ |\\?\$|~", ""),
    (r"\\[dtc]frac", r"\\frac"),
    (TEXT + r"\{([^{}]*)\}", r" \1 "),
    (r"\{,\}", ","),
    (r",\s+(?=[0-9]{3}(?![0-9]))", ", \\\\list "),  # "2, 100" is a list, "2,100" may be a number
    (r"(?<![A-Za-z])\s+|\s+(?![A-Za-z])", ""),  # a blank counts between letters alone
    (r"\s+", " "),
]


@functools.lru_cache(maxsize=1024)
def _plain(text: str) -> str:
    """Remove from a text what does not change its meaning; if two results are equal, the answers are the same."""
    for pattern, instead in DECORATION:
        text = re.sub(pattern, instead, text)
    return text.strip().rstrip(".,")


SAID_IN_TEXT = TEXT + r"\{[^{}]*(?:\b(?:is|are):?|\banswer:)\s*\}\s*(?=.)"  # \boxed{\text{The answer is } 5}
ARTICLE = r"^(?i:(?:on|is|are)\s+)?(?i:(?:an?|the)\s+)?(?=[A-Za-z]{2})"
SHORT = {name[:3]: name for name in ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]}
SHORT |= {name[:3]: name for name in ["january", "february", "march", "april", "june", "july", "august", "september"]}
SHORT |= {"oct": "october", "nov": "november", "dec": "december", "sept": "september", "tues": "tuesday"}
SHORT |= {"thur": "thursday", "thurs": "thursday"}


def _words(text: str) -> list[str]:
    """Return the words or phrases that ``text`` lists, in lower case and sorted; [] if it holds anything else."""
    plain = re.sub(TEXT + r"\{([^{}]*)\}", r" \1 ", text)
    pieces = [piece.strip(" .$!?") for piece in re.split(r",|;|\band\b|\bor\b", plain)]
    pieces = [re.sub(ARTICLE, "", piece) for piece in pieces if piece]
    if not all(re.fullmatch(r"\(?[A-Za-z](?:[A-Za-z ']|(?<=[a-z]{2})-(?=[a-z]{2}))*\)?", piece) for piece in pieces):
        return []
    found = [" ".join(piece.strip("()").split()).casefold() for piece in pieces]
    return sorted(SHORT.get(word, word) for word in found)


def _same_words(answer: str, wanted: str) -> bool | None:
    """Test if two texts of words are the same; None where they are not both words but perhaps products of letters."""
    said, right = _words(answer), _words(wanted)
    if not said or not right or {"infinity", "inf"} & {*said, *right}:
        return None
    article = TEXT + r"\{|^(?:an?\s|the\s|(?:An?|The)\s+[A-Za-z]{2})"
    marked = any(re.search(article, text) for text in (answer, wanted))
    marked = marked or re.match(r"(?i:an?|the)\s+[A-Za-z]{2}", wanted) is not None
    if not marked and not any(map(is_word, said + right)):
        return None
    return said == right


def _ascii(text: str) -> str:
    """Replace special characters of a text by commands of LaTeX: x² by x^{2}, ½ by \\frac{1}{2}."""
    text = re.sub("[\u00bc-\u00be\u2150-\u215e]", lambda sign: " " + unicodedata.normalize("NFKC", sign[0]), text)
    text = re.sub("([0-9]+)\u2044([0-9]+)", r"\\frac{\1}{\2}", text)
    for signs, script in ((RAISED, "^"), (LOWERED, "_")):
        text = re.sub(f"([{signs}]+)", rf"{script}{{\1}}", text)
    text = re.sub(f"[{RAISED}{LOWERED}]", lambda sign: unicodedata.normalize("NFKC", sign[0]), text)
    text = re.sub(r"\u221a\s*(?:\(([^()]*)\)|([0-9.]+|[A-Za-z]))", r"\\sqrt{\1\2}", text)
    text = re.sub(rf"(?:^|(?<=[\s(=,\[{{]))[{DASHES}](?=[0-9.\\A-Za-z])", "-", text)
    text = re.sub(rf"(?<=[A-Za-z)}}])[{DASHES}](?=[0-9\\(])", "-", text)
    return text.translate(UNICODE)


def _without_braces(text: str) -> str:
    """Remove the pair of braces around an entire text, if there is one."""
    whole = re.fullmatch(GROUP, text)
    return text[1:-1].strip() if whole and not re.search(r"\\(?:choose|over)(?![A-Za-z])", text) else text


@functools.lru_cache(maxsize=1024)
def tidy(text: str) -> str:
    """Prepare an answer for the parser: without delimiters around it, in ASCII, numbers such as 1.5e3 written out."""
    text = _ascii(text.translate(INVISIBLE).strip()).strip(' \t\r\n"')
    text = re.sub(r"(?<=[0-9])(?:\.\.\.|\u2026)$", r"\\ldots", without_delimiters(text))
    text = re.sub(r"(?<![\s.,;:\"`])(?:\\\\|\\[,;:! ]|[\s.,;:\"`])+$", "", text.replace("\\varnothing", "\\emptyset"))
    while (bare := WRAPPED.sub(r"\1", text)) != text:
        text = bare
    for pattern, instead in TYPESET:
        text = re.sub(pattern, instead, text)
    if (condition := BUILDER.fullmatch(text)) is not None and re.search(r"[<>]|\\[lg]eq?(?![A-Za-z])", condition[1]):
        text = condition[1].removesuffix("\\right").strip()
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])", text):
        text = re.sub(r"([0-9.]+)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)", r"\\frac{\1\\pi}{180}", text)
    text = _without_braces(text.strip())
    text = text.replace("\\langle", "(").replace("\\rangle", ")").replace("**", "^")
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi", text)
    text = re.sub(SAID_IN_TEXT, "", text, flags=re.IGNORECASE)
    repeating = next(filter(None, (form.fullmatch(text) for form in REPEATING)), None)
    if repeating:
        sign, whole, fixed, again = repeating["sign"], repeating["whole"], repeating["fixed"], repeating["again"]
        numerator = int(whole + fixed + again) - int((whole + fixed) or 0)
        text = f"{sign}\\frac{{{numerator}}}{{{(10 ** len(again) - 1) * 10 ** len(fixed)}}}"
    if "matrix" in text:
        text = re.sub(r"\\\\\s*\[[^\]]{1,8}\]", r"\\\\ ", text)
        text = re.sub(r"\\\\(?=[A-Za-z\\])", r"\\\\ ", text)  # else a row's first letter is taken for a command
    scientific = re.fullmatch(r"(-?[0-9.]+)(?:[eE]|\s*[xX*]\s*10\s*\^)\s*\{?([+-]?[0-9]+)\}?(.*)", text)
    if scientific:
        text = f"{scientific[1]} \\times 10^{{{int(scientific[2])}}}{scientific[3]}"
    return text


PHRASES = [  # (what is said, how it is said)
    (
        "no solution",
        r"(?:(?:there (?:is|are|exists?)|(?:this|the) (?:equation|system|inequality) has|it has|has) )?"
        r"no (?:real )?solutions?(?: exists?)?|none|(?:the )?empty set|\\emptyset|\\\{\\\}"
        r"|(?:(?:the )?limit |it )?(?:does not|doesn't|doesn\u2019t) exist|dne",
    ),
    ("infinity", r"(?:positive )?(?:infinity|infinite|inf)|\+?\\infty"),
    ("minus infinity", r"(?:negative|minus) infinity|-\s?(?:infinity|inf|\\infty)"),
    ("all real numbers", r"(?:all )?(?:the )?real numbers|all reals|(?:[a-z] \\in )?\\mathbb\s*\{?r\}?"),
    ("undefined", r"(?:it )?(?:is )?(?:undefined|not defined)"),
]
MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
DATE = re.compile(r"([0-9]{4})[-/]([0-9]{1,2})[-/]([0-9]{1,2})")
CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)\s+)?(?:\(([A-J])\)|([A-J])\s*[).:]|\(?([A-Ja-d])\)?\s*$)\s*([^(+*/^=_<>-].*)?"
)
CASES = re.compile(r"(?:[^=]{0,20}=\s*)?\\begin\s*\{cases\}(.*?)\\end\s*\{cases\}\s*", re.DOTALL)
CONDITION = re.compile(r"(?:\\text\s*\{\s*)?(?:,|if|for|when|where|in case)\s*\}?\s*")
INTEGER = re.compile(  # "..., k in Z", "(n is an integer)"
    r"(?:[\s,;(]|\\[,;:! ])*+(?:\\text\s*\{[\s,]*(?:where|for|with|and)\b[^{}]{0,20}\}\s*|(?:where|for|with)\s)?"
    r"([a-z])\s*+(?:\\in\s*+\\(?:mathbb|mathbf|Bbb)\s*+\{?\s*+Z\s*+\}?"
    r"|(?:\\text\s*+\{\s*+)?(?:(?:is|are|being)\s++)?any?\s++integer\s*+\}?)\s*+\)?$"
)
CONSTANT = re.compile(r"\+\s*C\s*$|^\s*C\s*\+|=\s*C\s*\\?e")  # of integration


def _phrase(text: str) -> str:
    """Return the plain words of a text: without commands around them, and without punctuation at the ends."""
    plain = re.sub(TEXT + r"\{([^{}]*)\}", r" \1 ", text)
    return " ".join(plain.split()).strip(" .,$!")


def _said(text: str) -> str | None:
    """Name what a text says, if that is said in many ways: that there is no answer, or that all numbers are."""
    said = _phrase(text).casefold()
    return next((name for name, ways in PHRASES if re.fullmatch(ways, said)), None)


def _option(text: str) -> tuple[str, str] | None:
    """Return (letter, text) of a choice such as "(D)", "D. 45" or "Option D"; None for other answers or several."""
    found = CHOICE.fullmatch(_phrase(re.sub(r"\\[ ,;!]", " ", text)))
    more = (found[4] or "").strip() if found else ""
    if not found or re.search(r"\([A-J]\)|\b[A-J][).:]|\b(?i:or|and|not)\b|\\(?:cdot|times|cup|cap)", more):
        none_of = re.match(r"(?:none|neither|not)\b", more) and not re.search(r"\b[A-J][).:]", more)
        if not found or not none_of:
            return None
    if re.match(r"(?:is|are|was)\s+(?:wrong|incorrect|false|out)\b", more):
        return None
    letters = re.sub(
        r"\b(?:all|both|of|the|above|following|options?|choices?|maybe|possibly|perhaps|also)\b|[\s,./&|]", "", more
    )
    if re.fullmatch("[A-J]+", letters):
        return None  # "A. all of B, C" names several
    return (found[1] or found[2] or found[3]).upper(), more


def _same_option(answer: str, wanted: str) -> bool | None:
    """Test if two answers are the same choice, or one is the text of the other's; None where neither can be said."""
    if re.fullmatch("[a-j]", wanted) or re.fullmatch("[A-Ja-j] [A-Ja-j]", f"{answer} {wanted}"):
        return None  # a variable, not a choice: d is not D
    said, right = _option(answer), _option(wanted)
    if said and right:
        return said[0] == right[0]
    if right and re.search(r"\([A-J]\)", wanted):
        letter, _, text = re.sub(r"\\[ ,;]", " ", answer).partition(" ")  # "D 24"
        return bool(right[1]) and equal(text.strip() if letter == right[0] else answer, right[1])
    return None


VERDICT = re.compile(
    r"(yes|no|true|false)(?:\s*(?:[,.;:(\u2013\u2014]|\s-\s|\b(?:because|since|as)\b)\s*(.*))?", re.I | re.S
)
TAKEN_BACK = re.compile(
    r"\b(?:yes|no|true|false|or|but|however|maybe|perhaps|unless|sometimes|not sure|depends)\b", re.I
)


def _verdict(text: str) -> str | None:
    """Return the first word of "Yes, they are similar"; None if it is not yes, no, true or false, or is taken back."""
    found = VERDICT.fullmatch(_phrase(text))
    return None if not found or TAKEN_BACK.search(found[2] or "") else found[1].casefold()


def _date(text: str) -> list[str] | None:
    """Return the sorted parts of a date, its month in three letters: "May 3, 2024", "3rd of May 2024", "2024-05-03"."""
    digits = DATE.fullmatch(_phrase(text))
    if digits and 1 <= int(digits[2]) <= 12:
        return sorted([digits[1], MONTHS[int(digits[2]) - 1], digits[3].lstrip("0")])
    words = re.findall(r"[a-z]+|[0-9]+", re.sub(r"(?<=[0-9])(?:st|nd|rd|th)\b", "", _phrase(text).casefold()))
    words = [word for word in words if word not in ("on", "of", "the", "text")]
    months = [word[:3] for word in words if len(word) >= 3 and word[:3] in MONTHS and not word.isdigit()]
    others = [word.lstrip("0") for word in words if word.isdigit()]
    return sorted(months + others) if len(months) == 1 and 0 < len(others) == len(words) - 1 else None


def _same_date(answer: str, wanted: str) -> bool | None:
    """Test if two dates are the same; None where neither is one of digits, which arithmetic would read as a number."""
    said, right = _date(answer), _date(wanted)
    if said is not None and right is not None:
        return said == right
    return False if any(DATE.fullmatch(_phrase(text)) for text in (answer, wanted)) else None


def _same_kind_of_words(answer: str, wanted: str) -> bool | None:
    """Test if two answers are the same choice, date or words, or both say that there is none; None if not words."""
    if (same := _same_option(answer, wanted)) is not None:
        return same
    for read in (_said, _verdict):
        said, right = read(answer), read(wanted)
        if said is not None and right is not None:
            return said == right
    same = _same_date(answer, wanted)
    return _same_words(answer, wanted) if same is None else same


def _cases(text: str) -> list[tuple[str, str]] | None:
    """Return (value, condition) of each case of a function defined by cases; None for anything else."""
    found = CASES.fullmatch(text)
    if found is None:
        return None
    rows = [row.strip() for row in re.split(r"\\\\(?:\s*\[[^\]]*\])?", found[1])]
    cases = []
    for row in filter(None, rows):
        value, _, condition = row.partition("&")
        if not condition and (condition_begin := re.search(r"\\text\s*\{[\s,]*(?:if|for|when)\b|,", value)):
            value, condition = value[: condition_begin.start()], value[condition_begin.start() :]
        condition = condition.strip(" ,.&;")
        condition = re.sub(r"\\geqslant|\\geq", r"\\ge", re.sub(r"\\leqslant|\\leq", r"\\le", condition))
        while said := CONDITION.match(condition):
            condition = condition[said.end() :]
        cases.append((value.strip(" ,.;"), re.sub(r"\b(?:is|otherwise|else)\b", "", condition).strip()))
    return cases


def _paired(answer: list, wanted: list, same: Callable) -> bool:
    """Return True if each element of ``wanted`` is the same as one of ``answer`` of its own, in any order."""
    left = list(answer)
    for one in wanted:
        found = next((other for other in left if same(other, one)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _same_case(case: tuple[str, str], other: tuple[str, str]) -> bool:
    """Return True if two cases of functions have equal values under equal conditions."""
    conditions = case[1], other[1]
    same = _plain(conditions[0]) == _plain(conditions[1]) or (all(conditions) and equal(*conditions))
    return same and equal(case[0], other[0])


def _letters(text: str) -> set[str]:
    """Return the variables of a formula: its letters, except for those of commands and of words."""
    return set(re.findall("[A-Za-z]", re.sub(rf"{TEXT}{GROUP}|\\[A-Za-z]+", " ", text)))


def _renamed(text: str, names: dict[str, str]) -> str:
    """Rename the variables of a formula."""
    pieces = re.split(rf"({TEXT}{GROUP}|\\(?:begin|end)\s*{GROUP}|\\[A-Za-z]+)", text)
    return "".join(
        piece if i % 2 else "".join(names.get(letter, letter) for letter in piece) for i, piece in enumerate(pieces)
    )


def _with_one_name(answer: str, wanted: str) -> tuple[str, str]:
    """Remove "k in Z" from two families of solutions, and use the same letter for their integer or constant."""
    said, right = INTEGER.search(answer), INTEGER.search(wanted)
    if right:
        wanted = wanted[: right.start()]
    if said:
        answer = answer[: said.start()]
    letter = right[1] if right else "C" if CONSTANT.search(wanted) else None
    new = _letters(answer) - _letters(wanted)
    other = said[1] if said else next(iter(new & set("KkcDA")), None)
    if letter and other and letter != other and letter not in _letters(answer):
        answer = _renamed(answer, {other: letter})
    return answer, wanted


def _with_cases_apart(answer: str, wanted: str) -> tuple[str, str]:
    """Rename variables of two formulas that differ in case alone: the parser does not tell M from m."""
    left, equals, right = answer.partition("=")
    name = wanted.partition("=")[0].strip()
    if equals and len(name) <= 8 and left.strip().casefold() == name.casefold():
        answer = f"{name}={right}"  # "N = 12" is "n = 12"
    letters = _letters(answer) | _letters(wanted)
    free = [letter for letter in "qwzypvutrsnmlkjhgba" if not {letter, letter.upper()} & letters]
    capitals = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    names = dict(zip(capitals, free, strict=False))
    return _renamed(answer, names), _renamed(wanted, names)


SYMBOL = r"[A-Za-z](?:_\{?[A-Za-z0-9]{1,3}\}?)?"
FUNCTION = re.compile(r"([A-Za-z])\s*(?:\\left)?\(\s*([A-Za-z])\s*(?:\\right)?\)\s*=(.*)", re.DOTALL)
MODULUS = re.compile(
    r"(?:\s|\\[,;:! ])*+(?:\\pmod\s*\{?\s*([0-9a-z]+)\s*\}?"
    r"|\(\s*(?:\\(?:text|mathrm)\s*\{\s*mod\s*\}|\\?mod)\s*([0-9a-z]+)\s*\))$"
)
UNDONE = re.compile(r"\\(?:i*int|lim|det)(?![A-Za-z])|\\frac\s*\{?\s*d\s*\}?\s*\{\s*d\s*[a-z]\s*\}")  # is a question
RATIO_NAME = re.compile(r"^\s*[A-Za-z][A-Za-z0-9_{}']*(?:\s*:\s*[A-Za-z][A-Za-z0-9_{}']*)+\s*=\s*(?=[0-9])")
IMPLIES = re.compile(r"\\(?:implies|iff|Rightarrow|Leftrightarrow|Longrightarrow)(?![A-Za-z])|=>")


def _systems(text: str) -> list[dict[str, str]] | None:
    """Return each solution of "p=5, q=2 or p=7, q=2" as name -> value; None unless several share several unknowns."""
    solutions: list[dict[str, str]] = [{}]
    for part in parts_of(text):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not re.fullmatch(SYMBOL, name):
            return None
        if name in solutions[-1]:
            solutions.append({})
        solutions[-1][name] = value
    return solutions if len(solutions) > 1 and len(solutions[0]) > 1 else None


def _same_solution(one: dict, other: dict) -> bool:
    """Return True if two solutions give equal values to the same names."""
    return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in other)


def _same_function(answer: str, wanted: str) -> bool:
    """Test if two functions differ in the letter of their argument alone, or one is y = ... and one f(x) = ..."""
    said, right = FUNCTION.fullmatch(answer), FUNCTION.fullmatch(wanted)
    if said and right:
        renamed = said[1] == right[1] and said[2] != right[2] and right[2] not in _letters(said[3])
        return renamed and equal(_renamed(said[3], {said[2]: right[2]}), right[3])
    function, other = (said or right), (wanted if said else answer)
    name, equals, formula = other.partition("=")
    if not function or not equals or name.strip() != "y" or "y" in _letters(formula):
        return False
    return equal(function[3], formula)


def _without_modulus(answer: str, wanted: str) -> tuple[str, str]:
    r"""Remove "\pmod 5" from two residues: one of them may leave it out, but their moduli must not differ."""
    said, right = MODULUS.search(answer), MODULUS.search(wanted)
    if said and right and (said[1] or said[2]) != (right[1] or right[2]):
        return answer, ""
    texts = [text[: found.start()] if found else text for text, found in ((answer, said), (wanted, right))]
    return tuple(text.replace("\\equiv", "=") if said or right else text for text in texts)


def _same_amount(answer: str, wanted: str) -> bool | None:
    """Return True if two answers are the same number, with or without units; None where units decide nothing."""
    (value, unit), (right, right_unit) = split_unit(answer), split_unit(wanted)
    degrees = (("deg", 1),)
    for angle, its_unit, other, other_unit in ((value, unit, right, right_unit), (right, right_unit, value, unit)):
        if its_unit == degrees and other_unit in ((), (("rad", 1),)) and "\\pi" in other:
            return same_value(f"\\frac{{({angle}) \\pi}}{{180}}", other)
    if not unit or not right_unit or unit == right_unit:
        return None
    ratio, value = scale_between(unit, right_unit), without_thousands(value)
    if ratio is None:
        return False
    return same_value(f"({value}) \\cdot \\frac{{{ratio.numerator}}}{{{ratio.denominator}}}", right)


def equal(answer: str, wanted: str) -> bool:
    """Test if two tidy answers are the same text, the same words, the same number, or the same by math-verify."""
    answer, wanted = _without_modulus(answer, wanted)
    if not _plain(answer) or not _plain(wanted):
        return False
    if _plain(answer) == _plain(wanted):
        return True
    if UNDONE.search(answer) and not UNDONE.search(wanted):
        return False
    if IMPLIES.search(answer) and not IMPLIES.search(wanted):
        return all(equal(step, wanted) for step in IMPLIES.split(answer)[:5])
    same = _same_kind_of_words(answer, wanted)
    if same is not None:
        return same
    said, right = _systems(answer), _systems(wanted)
    if said and right:
        return _paired(said, right, _same_solution)
    said, right = amount_of(answer), amount_of(wanted)
    if said and right and (said[2] > 1 or right[2] > 1):
        return said[:2] == right[:2]
    said, right = _cases(answer), _cases(wanted)
    if said and right and all(condition for _, condition in said + right):
        return _paired(said, right, _same_case)
    answer, wanted = (
        ", ".join(value for value, _ in cases) if cases and not any(condition for _, condition in cases) else text
        for cases, text in ((said, answer), (right, wanted))
    )
    return _equal_values(*_with_one_name(answer, wanted))


def _equal_values(answer: str, wanted: str) -> bool:
    """Test if two answers of numbers and letters are equal, units and percent signs aside where they may be missing."""
    said, right = RATIO_NAME.match(answer), RATIO_NAME.match(wanted)
    if not said or not right or _plain(said[0]) == _plain(right[0]):
        answer, wanted = RATIO_NAME.sub("", answer), RATIO_NAME.sub("", wanted)
    bare = re.fullmatch(r"(-?[0-9][0-9.,]*)\s*([A-Za-z])", answer)
    if bare and unit_of(bare[2]) == split_unit(wanted)[1] != ():  # "5 m" where the truth has the unit
        answer = bare[1]
    if same_percentage(answer, wanted) or _same_function(answer, wanted):
        return True
    percents = bool(PERCENT.search(answer)) + bool(PERCENT.search(wanted))
    if percents == 2:
        answer, wanted = PERCENT.sub("", answer), PERCENT.sub("", wanted)
    if (same := _same_amount(answer, wanted)) is not None:
        return same and not percents
    (answer, unit), (wanted, right_unit) = split_unit(answer), split_unit(wanted)
    if percents and (unit or right_unit):
        return False
    number, right_number = decimal_of(answer), decimal_of(wanted)
    if number is not None and right_number is not None and number == right_number:
        return True
    if (same := same_time(answer, wanted)) is not None:
        return same
    answer, wanted = _with_cases_apart(answer, wanted)
    return _plain(answer) == _plain(wanted) or same_value(answer, wanted)


# ---------------------------------------------------------------------------------------- truths, and the question


COMPUTES = re.compile(  # an answer with it is not only read but computed
    r"[+*/^!|<>=]|\)\s*\(|(?<=[0-9A-Za-z)}])\s*-|_\s*\{?[0-9]"
    r"|\\(?!text|mathrm|pi|infty|circ|degree|cup|left|right|[,;:! ]|%|\$)"
)
EDGE = "\x01"  # stands for what delimits a formula in a question
UNSEEN = re.compile(r"\\(?:left|right|displaystyle|limits|quad|qquad)(?![A-Za-z])|\\[,;:! ]|~")
JOINS_LEFT = re.compile(r"(?:[-+*/^_({\[|\\)}]|\\(?:cdot|times|div|pm|frac|sqrt))\s*$|[A-Za-z0-9]$")
JOINS_RIGHT = re.compile(r"\s*(?:[-+*/^_({\[!]|\\(?:cdot|times|div|pm|frac|sqrt|left))|[A-Za-z0-9]")


def _seen(text: str) -> str:
    """Remove from a formula or a question what may differ between two copies of a formula."""
    text = UNSEEN.sub(" ", re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"\$+|\\[()\[\]]", EDGE, text)))
    text = re.sub(r"\{\s*([0-9A-Za-z]+)\s*\\choose\s*([0-9A-Za-z]+)\s*\}", r"\\binom{\1}{\2}", text)
    text = re.sub(r"\\frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2", text)
    return re.sub(r"\{([A-Za-z]|[0-9]+)\}", r" \1 ", text)


def is_echo(answer: str, wanted: str, question: str) -> bool:
    """Test if an answer that equals the truth is a formula of the question, and leaves the computing to the grader.

    What is the text of the truth is no echo, nor is a number or a fraction in lowest terms in the middle of a sentence.
    """
    bare, right = (re.sub(rf"^{SYMBOL}\s*=\s*", "", text) for text in (tidy(answer), wanted))
    if not question or _plain(bare) == _plain(right):
        return False
    asked, said = _seen(question), _seen(answer).strip(f" \n.,;{EDGE}")
    if re.fullmatch("[a-d]", said):  # a variable, and not the name of a choice
        formulas = asked.split(EDGE)[1::2]
        return any(re.search(rf"(?<![A-Za-z\\]){said}(?![A-Za-z])", formula) for formula in formulas)
    if not COMPUTES.search(re.sub(TEXT + rf"{GROUP}(?:\s*\^\s*\{{?-?[0-9]\}}?)?", "", said)):
        return False
    simple = re.fullmatch(r"-?(?:\\frac)?\s*\{?([0-9]+)\}?\s*/?\s*\{?([0-9]+)\}?", said)
    lowest = simple is not None and math.gcd(int(simple[1]), int(simple[2])) == 1
    tokens = re.findall(r"\\[A-Za-z]+|[0-9.]+|\S", said)
    for copy in re.finditer(r"\s*".join(map(re.escape, tokens)), asked):
        before, after = asked[max(0, copy.start() - 20) : copy.start()], asked[copy.end() : copy.end() + 20]
        if lowest and not (before.rstrip().endswith(EDGE) and after.lstrip(" .,").startswith(EDGE)):
            continue
        if not JOINS_LEFT.search(before) and not JOINS_RIGHT.match(after):
            return True
    return False

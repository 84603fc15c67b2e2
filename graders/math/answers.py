"""Decide whether two answers are equal, for ``graders.math.judge``.

Two answers are equal if their texts are, without characters that carry no meaning; if they are the same words, choice,
date or number; or if algebra.py finds them equal. The rewriting for the comparison of texts never reaches the parser.
"""

from __future__ import annotations

import functools
import math
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

from graders.math.algebra import same_value
from graders.math.tex import (
    GROUP,
    TEXT,
    letters_of,
    parts_of,
    renamed,
    signs,
    spelled,
    with_cases_apart,
    without_modulus,
    without_thousands,
)
from graders.math.units import (
    PERCENT,
    SIZES,
    UNITS,
    decimal_of,
    is_word,
    same_percentage,
    scale_between,
    split_unit,
    unit_of,
)
from graders.text import DASHES, INVISIBLE, without_delimiters

COMMANDS = (  # a character, and the command of LaTeX for it
    "\u00d7times \u00b7cdot \u00f7div \u2264le \u2265ge \u2260ne \u03c0pi \u221einfty \u222acup \u2229cap "
    "\u2208in \u00b1pm \u2205emptyset \u03a9Omega \u2126Omega "
)
UNICODE = {ord(word[0]): f"\\{word[1:]} " for word in COMMANDS.split()}
UNICODE |= {0xB0: "^\\circ ", 0x2212: "-", 0x2044: "/", 0xA0: " ", 0x202F: " ", 0x2009: " ", 0x201C: '"', 0x201D: '"'}
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
    (r"^\s*(?:\\(?:approx|sim|simeq)(?![A-Za-z])|\\text\s*\{\s*(?:about|approximately|the year)\s*\})\s*", ""),
    (r"^<(?=[^<>]*,)([^<>]*)>$", r"(\1)"),
    (r"_\s*\{\s*\\(max|min)\s*\}", r"_{\1}"),
    (r"(?:\{\})?\s*[\^_]\s*\{?([0-9]+)\}?\s*(?:\\(?:text|mathrm)\s*\{C\}|C)\s*_\s*\{?([0-9]+)\}?", r"\\binom{\1}{\2}"),
    (r"^\(\s*([0-9A-Z]+)\s*\)(?=_)", r"\1"),
    (r"(?<=[0-9A-F])(?:\s|\\[,; ])*(?:\\text\s*\{)?[\s(]*base[\s}]*([0-9]{1,2})[\s)}]*$", r"_{\1}"),
    (
        r"^(?!.*\b(?:not|never|no)\b)(?:The|It|There|So)(?:\\?\s+[A-Za-z]+){0,5}\\?\s+(?:is|are)(?:\\?\s)+(?=[-0-9\\])",
        "",
    ),
    (r"(?<![\s(])(?:\s|\\[,;: ]|\()*+\\text\s*+\{[\s(]*+(?:since|because)\b.*$", ""),
    (r"(?:(?<=[0-9])|(?<=[0-9]\s))(?:\\text\s*\{\s*percent\s*\}|percent)$", r"\\%"),
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
def plain(text: str) -> str:
    """Remove from a text what does not change its meaning; if two results are equal, the answers are the same."""
    for pattern, instead in DECORATION:
        text = re.sub(pattern, instead, text)
    return text.strip().rstrip(".,")


SAID_IN_TEXT = TEXT + r"\{[^{}]*(?:\b(?:is|are):?|\banswer:)\s*\}\s*(?=.)"  # \boxed{\text{The answer is } 5}
ARTICLE = r"^(?i:(?:on|is|are)\s+)?(?i:(?:an?|the)\s+)?(?=[A-Za-z]{2})"
DAYS = "monday tuesday wednesday thursday friday saturday sunday"
NAMES = f"{DAYS} january february march april may june july august september october november december".split()
SHORT = {name[:length]: name for name in NAMES for length in (3, 4, 5)}


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
    for letters, script in ((RAISED, "^"), (LOWERED, "_")):
        text = re.sub(f"([{letters}]+)", rf"{script}{{\1}}", text)
    text = re.sub(f"[{RAISED}{LOWERED}]", lambda sign: unicodedata.normalize("NFKC", sign[0]), text)
    text = re.sub(r"\u221a\s*(?:\(([^()]*)\)|([0-9.]+|[A-Za-z]))", r"\\sqrt{\1\2}", text.replace("\u221b", "\\sqrt[3]"))
    text = re.sub(rf"(?:^|(?<=[\s(=,\[{{]))[{DASHES}](?=[0-9.\\A-Za-z])", "-", text)
    text = re.sub(rf"(?<=[A-Za-z)}}])[{DASHES}](?=[0-9\\(])", "-", text)
    return text.translate(UNICODE)


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
    text = spelled(text.strip())
    text = text.replace("\\langle", "(").replace("\\rangle", ")").replace("**", "^")
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi", text)
    text = re.sub(SAID_IN_TEXT, "", text, flags=re.IGNORECASE)
    repeating = next(filter(None, (form.fullmatch(text) for form in REPEATING)), None)
    if repeating:
        sign, whole, fixed, again = repeating["sign"], repeating["whole"], repeating["fixed"], repeating["again"]
        numerator = int(whole + fixed + again) - int((whole + fixed) or 0)
        text = f"{sign}\\frac{{{numerator}}}{{{(10 ** len(again) - 1) * 10 ** len(fixed)}}}"
    if "matrix" in text:
        text = re.sub(r"\\cr(?![A-Za-z])|\\\\\s*\[[^\]]{1,8}\]", r"\\\\ ", text)
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
    ("all integers", r"all (?:the )?integers|\\mathbb\s*\{?z\}?"),
    ("undefined", r"(?:it )?(?:is )?(?:undefined|not defined)"),
]
MONTHS = [name[:3] for name in NAMES[7:]]
DATE = re.compile(r"([0-9]{4})[-/]([0-9]{1,2})[-/]([0-9]{1,2})")
CHOICE = re.compile(
    r"(?:(?i:option|choice|answer)\s+)?(?:\(([A-J])\)|([A-Ja-j])\s*[).:]|\(?([A-Ja-d])\)?\s*$)\s*([^(+*/^=_<>-].*)?"
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


TIME = re.compile(r"([0-9]{1,2})(?::([0-5][0-9]))?(?::([0-5][0-9]))?(am|pm|o'?clock)?")


def _time(text: str) -> tuple[int, str, bool] | None:
    """Return (seconds after midnight, "am", "pm" or "", if it is no ratio) of a time of day; None for all else."""
    plain = re.sub(TEXT + r"\{([^{}]*)\}", r"\1", text).lower()
    found = TIME.fullmatch(re.sub(r"[\s.]", "", plain))
    if found is None or not (found[2] or found[4]):
        return None
    hour, minute, second = (int(part or 0) for part in found.groups()[:3])
    half = ""
    if found[4] in ("am", "pm"):
        half = found[4]
        hour = hour % 12 + 12 * (half == "pm")
    # A ratio has no zero before its second number, no third number, and no common factor.
    sure = bool(found[3] or found[4]) or minute < 10 or math.gcd(hour, minute) > 1
    return 3600 * hour + 60 * minute + second, half, sure


def same_time(answer: str, wanted: str) -> bool | None:
    """Test if two times of day are the same, 3 PM and 15:00, or 3:00 of either half; None where neither is a time."""
    times = [_time(answer), _time(wanted)]
    if not any(time and time[2] for time in times):
        return None
    if None in times:
        return False if ":" in answer + wanted else None
    (early, half, _), (late, other, _) = sorted(times)
    return early == late or (late - early == 12 * 3600 and other == "pm" and not half)


AMOUNT = re.compile(r"([0-9][0-9,]*(?:\.[0-9]+)?)\s*([A-Za-z]+)\b\.?\s*(?:,|and\b)?\s*")


def amount_of(text: str) -> tuple[str, Fraction, int] | None:
    """Return (unit, amount in it, number of parts) of "1 hour 30 minutes" or "5 ft"; None for anything else."""
    plain = re.sub(TEXT + r"\{([^{}]*)\}", r" \1 ", text)
    plain = re.sub(r"\\[,;:! ]|~|\\text", " ", plain).strip()
    total, bases, end, count = Fraction(0), set(), 0, 0
    while (part := AMOUNT.match(plain, end)) is not None:
        unit = UNITS.get(part[2]) or UNITS.get(part[2].lower())
        base, size = SIZES.get(unit, (unit, Fraction(1)))
        total += Fraction(part[1].replace(",", "")) * size
        bases.add(base)
        end, count = part.end(), count + 1
    (base,) = bases if len(bases) == 1 else (None,)
    return (base, total, count) if base and end == len(plain) else None


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
    same = plain(conditions[0]) == plain(conditions[1]) or (all(conditions) and equal(*conditions))
    return same and equal(case[0], other[0])


def _with_one_name(answer: str, wanted: str) -> tuple[str, str]:
    """Remove "k in Z" from two families of solutions, and use the same letter for their integer or constant."""
    said, right = INTEGER.search(answer), INTEGER.search(wanted)
    if right:
        wanted = wanted[: right.start()]
    if said:
        answer = answer[: said.start()]
    letter = right[1] if right else "C" if CONSTANT.search(wanted) else None
    new = letters_of(answer) - letters_of(wanted)
    other = said[1] if said else next(iter(new & set("KkcDA")), None)
    if letter and other and letter != other and letter not in letters_of(answer):
        answer = renamed(answer, {other: letter})
    return answer, wanted


SYMBOL = r"[A-Za-z](?:_\{?[A-Za-z0-9]{1,3}\}?)?"
FUNCTION = re.compile(r"([A-Za-z])\s*(?:\\left)?\(\s*([A-Za-z])\s*(?:\\right)?\)\s*=(.*)", re.DOTALL)
UNDONE = re.compile(  # what is a question: an integral, a derivative, a determinant, an endless sum or list
    r"\\(?:i*int|lim|det)(?![A-Za-z])|\\(?:sum|prod)(?![A-Za-z])[^+]{0,40}\\infty|\\begin\s*\{[vV]matrix|,\s*\\[lc]?dots"
    r"|\\frac\s*\{?\s*d\s*\}?\s*\{\s*d\s*[a-z]\s*\}"
)
NO_NUMBER = re.compile(r"[0-9.]+\s*:\s*[0-9.]+|\[[^][]*,[^][]*\]|[0-9A-Z]+_\s*\{?\s*[0-9]{1,2}\s*\}?")  # 1:2, 12_3
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
        other = said[1] == right[1] and said[2] != right[2] and right[2] not in letters_of(said[3])
        return other and equal(renamed(said[3], {said[2]: right[2]}), right[3])
    function, other = (said or right), (wanted if said else answer)
    name, equals, formula = other.partition("=")
    if not function or not equals or name.strip() != "y" or "y" in letters_of(formula):
        return False
    return equal(function[3], formula)


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


TOTAL = re.compile(  # m + n = 5, 100m + n = 5, \\max = 5, \\cos x = 5: a name of what is asked for
    r"\s*(?:[0-9]*[A-Za-z](?:\s*[+]\s*[0-9]*[A-Za-z])+|\\(?:max|min|sup|inf)|\\(?:cos|sin|tan)\s*\\?[A-Za-z]+)\s*=(?=[^=]*$)"
)
PRIMED = re.compile(r"(?<=[0-9)}\]])'+$")


def _same_signs(answer: str, wanted: str) -> bool:
    """Test if two answers, one of which has both signs of something, have the same values."""
    values = []
    for text in (answer, wanted):
        whole = re.fullmatch(r"(?:\\left)?\\\{(.*?)(?:\\right)?\\\}", text)
        parts = parts_of(whole[1] if whole else text)
        bare = [re.sub(rf"^{SYMBOL}\s*=\s*", "", part) for part in parts]
        values.append([value for part in bare for value in signs(part)])
    return _paired(*values, equal)


def equal(answer: str, wanted: str) -> bool:
    """Test if two tidy answers are the same text, the same words, the same number, or the same by math-verify."""
    answer, wanted = without_modulus(answer, wanted)
    if not plain(answer) or not plain(wanted):
        return False
    if plain(answer) == plain(wanted):
        return True
    if any(sign.search(answer) and not sign.search(wanted) for sign in (UNDONE, PRIMED)) and not split_unit(wanted)[1]:
        return False
    if "=" not in wanted and (named := TOTAL.match(answer)) is not None:
        answer = answer[named.end() :]
    if re.search(r"\\(?:pm|mp)(?![A-Za-z])", answer + wanted):
        return _same_signs(answer, wanted)
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
    if not said or not right or plain(said[0]) == plain(right[0]):
        answer, wanted = RATIO_NAME.sub("", answer), RATIO_NAME.sub("", wanted)
    bare = re.fullmatch(r"(-?[0-9][0-9.,]*)\s*([A-Za-z])", answer)
    if bare and unit_of(bare[2]) == split_unit(wanted)[1] != ():  # "5 m" where the truth has the unit
        answer = bare[1]
    if (same := same_time(answer, wanted)) is not None:
        return same
    if same_percentage(answer, wanted) or _same_function(answer, wanted):
        return True
    if (":" in wanted and PERCENT.search(answer)) or (NO_NUMBER.fullmatch(answer) and decimal_of(wanted) is not None):
        return False
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
    answer, wanted = with_cases_apart(answer, wanted)
    return plain(answer) == plain(wanted) or same_value(answer, wanted)

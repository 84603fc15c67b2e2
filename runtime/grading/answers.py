"""Find the final answer in a response, and decide whether two answers are equal, for ``rewards.math_``.

Two answers are equal if their texts are, without characters that carry no meaning; if they are the same words, choice,
date or number; or if algebra.py finds the original texts equal (units.py compares units). The
rewriting for the comparison of texts never reaches the parser.
"""

from __future__ import annotations

import collections
import re
import unicodedata
from decimal import Decimal

from runtime.grading.algebra import same_value
from runtime.grading.units import GROUP, PERCENT, TEXT, decimal_of, is_word, same_percentage, same_time, split_unit

# A minus is a sign only where no number or bracket stands before it: "10-4" ends in 4, "= -4" in -4. A comma belongs
# to a number only between groups of three digits, a dot only between digits.
NUMBER = re.compile(
    r"(?<![0-9])(?<![0-9]\.)(?:(?<![0-9)\]])[-\u2212]|(?<![0-9)\]$])[-\u2212]\\?[$\u20ac\u00a3](?=[0-9.]))?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![.\w)\]])\.[0-9]+)"
)
NEGATED = re.compile(r"(?:\bnot|n't|n\u2019t|\bnever)\s*[:$*}]*\s*$", re.IGNORECASE)
LONGEST_ANSWER = 1000  # characters; what is longer is no answer, and parsers take more than linear time

# What announces an answer: "####" of GSM8K, "The final answer is" of Minerva, "**Answer:**", "answer to this would be".
ANNOUNCED = re.compile(
    r"####|\b(?:answer|correct (?:option|choice))\b(?:(?!\bnot\b|n't)[^.?!\n:=$]){0,40}?"
    r"(?:\b(?:is|(?:would|should|must) be)\b[ \t*_]*:?|:|=)"
    r"|\b(?:respuesta|r\u00e9ponse|antwort|risposta|resposta|\u043e\u0442\u0432\u0435\u0442)\b"
    r"(?:(?!\b(?:no|non|nicht|n\u00e3o|pas|\u043d\u0435)\b)[^.?!\n:=$]){0,40}?"
    r"(?:\b(?:es|est|ist|\u00e8|\u00e9)\b[ \t*_]*:?|:|=)"
    r"|(?:\u7b54\u6848|\u7b54\u3048|\uc815\ub2f5|\ub2f5)[^.?!\n:=$\u4e0d]{0,20}?"
    r"(?:[\u662f\u4e3a\u70ba\u306f](?!\u4e0d)[ \t*_]*:?|[\uc740\ub294]|:|=)",
    re.IGNORECASE,
)
SAID_INSIDE = re.compile(r"^(?:the\s+)?(?:final\s+)?answer(?:\s+is\b|\s*[:=])\s*:?\s*", re.IGNORECASE)  # of a box
DENIED = re.compile(r"(?:not|no|non|nicht|pas|n\u00e3o|\u043d\u0435)\b", re.IGNORECASE)
WIDE = str.maketrans({"\uff1a": ":", "\u3002": ". ", "\uff0c": ", ", "\uff08": "(", "\uff09": ")"})  # Chinese, Japanese
NAMED = re.compile(r"(?:the|it|so)\b[^$\\=0-9]*\bis\s+(?=[-$\\0-9(])", re.IGNORECASE)  # "The value of x is 5"
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
BETWEEN_BOXES = re.compile(r"[\s$]*(?:,|;|\\text\s*\{\s*(?:and|or)\s*\}|,?\s*\b(?:and|or)\b)[\s$]*")
NAME = r"\(?[A-Za-z](?:_?\{?[A-Za-z0-9]{1,4}\}?)?\s*=\s*"
OR_BOX = re.compile(rf"[\s$.,]*(?:\bor\b|\\text\s*\{{\s*or\s*\}})[\s$]*{NAME}[\s$]*")
LISTED_BOX = re.compile(  # "x = [box], y = [box]", or one box a line, perhaps behind "-" or "2."
    rf"(?:[\s$.,;]|\\[()\[\]])*+(?:\\text\s*\{{\s*and\s*\}}|and\b)?(?:[\s$,]|\\[()\[\]])*+"
    rf"(?:[-*\u2022]|[0-9]{{1,2}}[.)])?(?:[\s$]|\\[()\[\]])*+(?:{NAME})?[\s$]*"
)
WIDEST_GAP = 60  # characters between two boxes that are one answer
DELIMITED = (  # (opening, closing) of mathematics or emphasis around a whole answer
    ("$$", "$$"),
    ("\\[", "\\]"),
    ("\\(", "\\)"),
    ("**", "**"),
    ("$", "$"),
    ("`", "`"),
)
# Where a plain answer stops and prose continues: "5 because ...", "5, as required.", "5. I hope it is correct."
PROSE = re.compile(
    r"[.!](?=\s|$)|\s(?=I hope\b)|[,;]?\s\(?(?=(?:because|since|as|so|which|where|when|given|assuming|thus|hence|"
    r"therefore|but|i\.e|that is|or equivalently)\b)|\s[(\[](?!mod\b)(?=[a-z]{2,}\s|(?:approximately|exactly)\))"
    r"|\s[\u2013\u2014]\s|\s*[\u2705\u2713\u2714\U0001f300-\U0001faff]",
    re.IGNORECASE,
)


def as_decimal(text: str) -> Decimal:
    return Decimal(re.sub(r"[,\\$\u20ac\u00a3]", "", text.strip()).replace("\u2212", "-"))


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


def _joined(between: str, content: str, several: bool) -> bool:
    """Whether what stands between two boxes makes them one answer; a list or a row of names only ``several`` parts."""
    if len(between) > WIDEST_GAP:
        return False
    if BETWEEN_BOXES.fullmatch(between) or OR_BOX.fullmatch(between):
        return True
    return several and "," not in content and LISTED_BOX.fullmatch(between) is not None


def _boxed_answer(text: str, several: bool) -> str | None:
    r"""The last box, with the boxes before it that are joined to it: ``\boxed{1}$ and $\boxed{2}`` is "1, 2"."""
    boxes = collections.deque(BOX.finditer(text), maxlen=10)
    answers: list[str] = []
    begin_of_next = None
    for box in reversed(boxes):
        found = _content_of_box(text, box.end())
        if found is None:
            break
        content, end = found
        if begin_of_next is not None and not _joined(text[end:begin_of_next], content, several):
            break
        if content not in answers[-1:]:
            answers.append(SAID_INSIDE.sub("", content))
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
    rest = re.sub(r"^(?:\*\*|__)\s+", "", rest)  # "**Answer:** 5"
    rest = re.sub(r"^```[a-z]*\s*", "", rest).partition("</answer>")[0]
    named = NAMED.match(rest)
    rest = rest[named.end() :] if named else rest
    return _between_delimiters(rest) or _before_prose(rest.partition("\n")[0])


def final_answer(text: str, several: bool = False) -> str | None:
    r"""Return the last box; else what follows the last "answer is", "answer:" or "####"; else None.

    In ``<answer>...</answer>``, where nothing comes after it, the inside counts; it needs no announcement.
    Never the whole text: somewhere in it any number can be found. Of several answers the last counts. Where the truth
    has ``several`` parts, boxes of which each stands behind a name or on a line of its own are one answer.
    """
    tagged = _inside_tag(text)
    if tagged is not None and not BOX.search(tagged) and not ANNOUNCED.search(tagged):
        answer = _between_delimiters(tagged) or tagged
    else:
        text = text if tagged is None else tagged
        if BOX.search(text):
            return _boxed_answer(text, several)
        answer = _announced_answer(text.translate(WIDE)) or ""
    answer = answer.strip().strip("*_ ").rstrip(".").strip("*_ ")
    if not 0 < len(answer) <= LONGEST_ANSWER or DENIED.match(answer):
        return None
    return answer


def _inside_tag(text: str) -> str | None:
    """What stands in the last ``<answer>...</answer>``; None without one, or where another answer comes after it."""
    after = text.rpartition("</answer>")[2]
    return None if BOX.search(after) or ANNOUNCED.search(after) else in_last_tag(text)


def in_last_tag(text: str) -> str | None:
    """What stands in the last ``<answer>...</answer>``; None where that is nothing."""
    head, closed, _ = text.rpartition("</answer>")
    _, opened, inside = head.rpartition("<answer>")
    return inside.strip() or None if closed and opened else None


def tagged_answer(text: str) -> str | None:
    """Return what stands in the last ``<answer>...</answer>``, else the final answer."""
    return in_last_tag(text) or final_answer(text)


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
FUNCTIONS = "ln|log|lg|sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|exp|gcd|lcm|max|min|det"
TYPESET = [  # (pattern, what stands in its place) before the parser: how a formula looks, and other names of commands
    (r"\\(?:left|right)\s*\.", ""),
    (r"\\(?:big|Big|bigg|Bigg)[lrm]?(?![A-Za-z])\s*", ""),
    (r"\\lparen(?![A-Za-z])", "("),
    (r"\\rparen(?![A-Za-z])", ")"),
    (r"\\(?:textcolor|color)\s*\{[A-Za-z0-9!]*\}", ""),
    (r"\\(?:nice|s)frac(?![A-Za-z])", r"\\frac"),
    (r"\\(?:(?:text|script|display)style|large|Large|huge|bf|rm|it|mathstrut|limits|nolimits)(?![A-Za-z])\s*", ""),
    (r"\\q?quad(?![A-Za-z])", " "),
    (rf"\\(?:operatorname\*?|mathrm|text)\s*\{{\s*({FUNCTIONS})\s*\}}", r"\\\1 "),
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


def _plain(text: str) -> str:
    """A text without what does not change its meaning; two equal ones are the same answer."""
    for pattern, instead in DECORATION:
        text = re.sub(pattern, instead, text)
    return text.strip().rstrip(".,")


ARTICLE = r"^(?:(?:on|is|are)\s+)?(?:(?:an?|the)\s+)?(?=[A-Za-z]{2})"


def _words(text: str) -> list[str]:
    """Return the words or phrases that ``text`` lists, in lower case and sorted; [] if it holds anything else."""
    plain = re.sub(TEXT + r"\{([^{}]*)\}", r" \1 ", text)
    pieces = [piece.strip(" .$") for piece in re.split(r",|;|\band\b|\bor\b", plain)]
    pieces = [re.sub(ARTICLE, "", piece) for piece in pieces if piece]
    if not all(re.fullmatch(r"\(?[A-Za-z](?:[A-Za-z ']|(?<=[a-z]{2})-(?=[a-z]{2}))*\)?", piece) for piece in pieces):
        return []
    return sorted(" ".join(piece.strip("()").split()).casefold() for piece in pieces)


def _same_words(answer: str, wanted: str) -> bool | None:
    """Whether two texts of words are the same; None where they are not both words but perhaps products of letters."""
    said, right = _words(answer), _words(wanted)
    if not said or not right or {"infinity", "inf"} & {*said, *right}:
        return None
    marked = re.search(TEXT + r"\{|^(?:an?|the)\s", answer + wanted) is not None
    marked = marked or re.match(r"(?:an?|the)\s+[A-Za-z]{2}", wanted) is not None
    if not marked and not any(map(is_word, said + right)):
        return None
    return said == right


def _ascii(text: str) -> str:
    """A text with commands of LaTeX for the signs that have one: x^{2} for x², \\frac{1}{2} for ½."""
    text = re.sub("[\u00bc-\u00be\u2150-\u215e]", lambda sign: " " + unicodedata.normalize("NFKC", sign[0]), text)
    text = re.sub("([0-9]+)\u2044([0-9]+)", r"\\frac{\1}{\2}", text)
    for signs, script in ((RAISED, "^"), (LOWERED, "_")):
        text = re.sub(f"([{signs}]+)", rf"{script}{{\1}}", text)
    text = re.sub(f"[{RAISED}{LOWERED}]", lambda sign: unicodedata.normalize("NFKC", sign[0]), text)
    text = re.sub(r"\u221a\s*(?:\(([^()]*)\)|([0-9.]+|[A-Za-z]))", r"\\sqrt{\1\2}", text)
    return re.sub("^\u2013", "-", text).translate(UNICODE)


def _without_braces(text: str) -> str:
    """A text without the pair of braces around the whole of it."""
    whole = re.fullmatch(GROUP, text)
    return text[1:-1].strip() if whole and not re.search(r"\\(?:choose|over)(?![A-Za-z])", text) else text


def without_delimiters(text: str) -> str:
    """A text without what may stand around the whole of it."""
    for opening, closing in DELIMITED:
        inside = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inside and opening not in inside:
            text = inside.strip()
    return text


def tidy(text: str) -> str:
    """An answer as it goes to the parser: without delimiters around it, in ASCII, numbers such as 1.5e3 spelled out."""
    text = _ascii(text.strip()).strip(' \t\r\n"')
    text = without_delimiters(text)
    text = re.sub(r"(?<![\s.,;:\"`])(?:\\\\|\\[,;:! ]|[\s.,;:\"`])+$", "", text.replace("\\varnothing", "\\emptyset"))
    while (bare := WRAPPED.sub(r"\1", text)) != text:
        text = bare
    for pattern, instead in TYPESET:
        text = re.sub(pattern, instead, text)
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])", text):
        text = re.sub(r"([0-9.]+)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)", r"\\frac{\1\\pi}{180}", text)
    text = _without_braces(text.strip())
    text = text.replace("\\langle", "(").replace("\\rangle", ")").replace("**", "^")
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi", text)
    text = re.sub(
        TEXT + r"\{[^{}]*(?:\b(?:is|are):?|\banswer:)\s*\}\s*(?=.)", "", text, flags=re.I
    )  # \boxed{\text{The answer is } 5}
    repeating = re.fullmatch(r"(-?)([0-9]*)\.([0-9]*)\\(?:overline|dot)\{?([0-9]+)\}?", text)
    if repeating:
        sign, whole, fixed, again = repeating.groups()
        numerator = int(whole + fixed + again) - int((whole + fixed) or 0)
        text = f"{sign}\\frac{{{numerator}}}{{{(10 ** len(again) - 1) * 10 ** len(fixed)}}}"
    if "matrix" in text:
        text = re.sub(r"\\\\\s*\[[^\]]{1,8}\]", r"\\\\ ", text)
        text = re.sub(
            r"\\\\(?=[A-Za-z\\])", r"\\\\ ", text
        )  # else the parser takes the row's first letter for a command
    scientific = re.fullmatch(r"(-?[0-9.]+)(?:[eE]|\s*[xX*]\s*10\s*\^)\s*\{?([+-]?[0-9]+)\}?(.*)", text)
    if scientific:
        text = f"{scientific[1]} \\times 10^{{{int(scientific[2])}}}{scientific[3]}"
    return text


PHRASES = [  # (what is said, how it is said)
    (
        "no solution",
        r"(?:(?:there (?:is|are|exists?)|(?:this|the) (?:equation|system|inequality) has|it has|has) )?"
        r"no (?:real )?solutions?(?: exists?)?|none|(?:the )?empty set|\\emptyset|\\\{\\\}",
    ),
    ("does not exist", r"(?:(?:the )?limit |it )?(?:does not|doesn't|doesn\u2019t) exist|dne"),
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
    """A text as it is said: without commands around its words, and without punctuation at its ends."""
    plain = re.sub(TEXT + r"\{([^{}]*)\}", r" \1 ", text)
    return " ".join(plain.split()).strip(" .,$!")


def _said(text: str) -> str | None:
    """What a text says, if it is one of those that are said in many ways: that there is no answer, or that all are."""
    said = _phrase(text).casefold()
    return next((name for name, ways in PHRASES if re.fullmatch(ways, said)), None)


def _choice(text: str) -> str | None:
    """The letter of a choice such as "(D)", "D. 45" or "Option D"; None where it is another answer, or names two."""
    found = CHOICE.fullmatch(_phrase(re.sub(r"\\[ ,;!]", " ", text)))
    more = (found[4] or "") if found else ""
    if not found or re.search(r"\([A-J]\)|\b[A-J][).:]|\b(?:or|and|not)\b|\\(?:cdot|times|cup|cap)", more):
        return None
    return (found[1] or found[2] or found[3]).upper()


def _date(text: str) -> list[str] | None:
    """The parts of a date, sorted, the month in three letters: of "May 3, 2024", "3rd of May 2024", "2024-05-03"."""
    digits = DATE.fullmatch(_phrase(text))
    if digits and 1 <= int(digits[2]) <= 12:
        return sorted([digits[1], MONTHS[int(digits[2]) - 1], digits[3].lstrip("0")])
    words = re.findall(r"[a-z]+|[0-9]+", re.sub(r"(?<=[0-9])(?:st|nd|rd|th)\b", "", _phrase(text).casefold()))
    words = [word for word in words if word not in ("on", "of", "the", "text")]
    months = [word[:3] for word in words if len(word) >= 3 and word[:3] in MONTHS and not word.isdigit()]
    others = [word.lstrip("0") for word in words if word.isdigit()]
    return sorted(months + others) if len(months) == 1 and 0 < len(others) == len(words) - 1 else None


def _same_date(answer: str, wanted: str) -> bool | None:
    """Whether two dates are the same; None where neither is one of digits, which arithmetic would read as a number."""
    said, right = _date(answer), _date(wanted)
    if said is not None and right is not None:
        return said == right
    return False if any(DATE.fullmatch(_phrase(text)) for text in (answer, wanted)) else None


def _same_kind_of_words(answer: str, wanted: str) -> bool | None:
    """Whether two answers are the same choice, date or words, or both say that there is none; None if not words."""
    for read in (_choice, _said):
        said, right = read(answer), read(wanted)
        if said is not None and right is not None:
            return said == right
    same = _same_date(answer, wanted)
    return _same_words(answer, wanted) if same is None else same


def _cases(text: str) -> list[tuple[str, str]] | None:
    """The (value, condition) of each case of a function by cases; None for anything else."""
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


def _same_cases(answer: list[tuple[str, str]], wanted: list[tuple[str, str]]) -> bool:
    """Whether two functions by cases have equal values under equal conditions, in any order."""
    left = list(answer)
    for value, condition in wanted:
        same = [
            case
            for case in left
            if (_plain(case[1]) == _plain(condition) or (condition and case[1] and equal(case[1], condition)))
            and equal(case[0], value)
        ]
        if not same:
            return False
        left.remove(same[0])
    return not left


def _letters(text: str) -> set[str]:
    """The variables of a formula: its letters, but for those of commands and of words."""
    return set(re.findall("[A-Za-z]", re.sub(rf"{TEXT}{GROUP}|\\[A-Za-z]+", " ", text)))


def _renamed(text: str, names: dict[str, str]) -> str:
    """A formula with other names for its variables."""
    pieces = re.split(rf"({TEXT}{GROUP}|\\(?:begin|end)\s*{GROUP}|\\[A-Za-z]+)", text)
    return "".join(
        piece if i % 2 else "".join(names.get(letter, letter) for letter in piece) for i, piece in enumerate(pieces)
    )


def _with_one_name(answer: str, wanted: str) -> tuple[str, str]:
    """Two families of solutions without "k in Z", and with the same letter for what is any integer or a constant."""
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
    """Two formulas in which no variable is another one's capital: the parser does not tell M from m."""
    left, equals, right = answer.partition("=")
    name = wanted.partition("=")[0].strip()
    if equals and len(name) <= 8 and left.strip().casefold() == name.casefold():
        answer = f"{name}={right}"  # "N = 12" is "n = 12"
    letters = _letters(answer) | _letters(wanted)
    free = [letter for letter in "qwzypvutrsnmlkjhgba" if not {letter, letter.upper()} & letters]
    capitals = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    names = dict(zip(capitals, free, strict=False))
    return _renamed(answer, names), _renamed(wanted, names)


def equal(answer: str, wanted: str) -> bool:
    """Whether two tidy answers are the same text, the same words, the same number, or the same by math-verify."""
    if not _plain(answer) or not _plain(wanted):
        return False
    if _plain(answer) == _plain(wanted):
        return True
    same = _same_kind_of_words(answer, wanted)
    if same is not None:
        return same
    said, right = _cases(answer), _cases(wanted)
    if said and right and all(condition for _, condition in said + right):
        return _same_cases(said, right)
    answer, wanted = (
        ", ".join(value for value, _ in cases) if cases and not any(condition for _, condition in cases) else text
        for cases, text in ((said, answer), (right, wanted))
    )
    answer, wanted = _with_one_name(answer, wanted)
    if same_percentage(answer, wanted):
        return True
    percents = bool(PERCENT.search(answer)) + bool(PERCENT.search(wanted))
    if percents == 2:
        answer, wanted = PERCENT.sub("", answer), PERCENT.sub("", wanted)
    (answer, unit), (wanted, right_unit) = split_unit(answer), split_unit(wanted)
    if (unit and right_unit and unit != right_unit) or (percents and (unit or right_unit)):
        return False
    number, right_number = decimal_of(answer), decimal_of(wanted)
    if number is not None and right_number is not None and number == right_number:
        return True
    if (same := same_time(answer, wanted)) is not None:
        return same
    answer, wanted = _with_cases_apart(answer, wanted)
    return _plain(answer) == _plain(wanted) or same_value(answer, wanted)

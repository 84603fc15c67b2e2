"""Find the final answer, or the last number, in a response: in boxes, tags, announcements and sentences."""

from __future__ import annotations

import collections
import itertools
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
    r"[\s$*)\]}]{0,4}(?:(?:is|was|are|would be)\s(?:wrong|incorrect|not|false|impossible)|can\s?not|can't|isn't)\b",
    re.IGNORECASE,
)
LABEL = re.compile(r"\b(?:step|case|question|problem|part|figure|table|page|chapter|example|exercise)\s?#?$", re.I)
CORRECTED = re.compile(
    r"\s*\b(?:wait|actually|no(?=[,.;!]|\swait)|sorry|correction|alternatively|or|maybe|perhaps"
    r"|(?:but|however|though)\b[^.\n]{0,20}\b(?:also|could|might|may|maybe|perhaps|possibly)|however, [0-9])\b",
    re.IGNORECASE,
)
RETRACTED = re.compile(  # "Wait, that is wrong"
    r"(?:^|[.!\n])\s*(?:wait|actually|no|sorry|oops|hmm)\b[^.\n]{0,40}\b(?:wrong|incorrect|mistake|not right)\b",
    re.IGNORECASE,
)

# What announces an answer: "####" of GSM8K, "The final answer is" of Minerva, "**Answer:**", "answer to this would be",
# "Answer $9$", and a heading "Final answer" alone on its line.
IS = r"(?:is|are|equals|becomes|(?:will|would|should|must)(?: then)? be"
IS += r"|(?:seems|appears|turns out|comes out) to be|(?:works|comes) out to)"
ANNOUNCED = re.compile(
    rf"####|\b(?:answer|ans|correct (?:option|choice)|final (?:value|result))\b(?:(?!\bnot\b|n't)[^.?!\n:=$]){{0,40}}?"
    rf"(?:\b{IS}\b[ \t*_]*:?|:|=>?)"
    r"|\b(?:answer|ans)\b[*_ ]{0,4}(?:[-\u2013\u2014](?=\s)|->|\u2192|\u21d2|\\(?:to|Rightarrow|implies)\b)"
    r"|(?<!as a )\bresult\b[*_ ]{0,4}:|\bans\.(?=\s)"
    r"|(?:^|\n)[ \t>#*_]{0,8}(?:the )?(?:final )?answer[ \t*_]{0,8}(?:\n[-=]{3,}(?=\n)|(?=\n|[$\\0-9]|-[0-9.]))"
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
LEADING = re.compile(  # words before the answer of a sentence
    r"(?:(?:that|therefore|thus|then|so|hence|exactly|approximately|about|roughly|around|indeed|simply|just|clearly|"
    r"precisely|only|now|also|still|obviously|evidently|actually|certainly|surely|definitely|nearly|always|"
    r"none other than|nothing but|in fact|for sure|of course|as follows|equal to|equals|given by|found to be|"
    r"number|the (?:number|value|integer|fraction|option|"
    r"choice)(?: of)?|option|choice)\b[,:]?|:|\u2192|=>|[=>](?=\s))\s*",
    re.IGNORECASE,
)
SAID = re.compile(rf"\b{IS}\s+(?=[-$\\0-9(])", re.IGNORECASE)  # "The largest $n$ is 34", "There are 12 ways"
FORMULA = r"\$\$[^$\n]+\$\$|\$[^$\n]+\$|\\\((?:(?!\\\)).)+\\\)|\\\[(?:(?!\\\]).)+\\\]"
VALUE = re.compile(rf"(?:{FORMULA}|{NUMBER.pattern}(?:\s?\\?%)?|\([A-J]\)|[A-J](?![A-Za-z.)]))(?:\s[a-z]+){{0,3}}?")
CALLED = re.compile(  # "Option (C) is correct", "Therefore, 7 is the answer"
    rf"\b(?:option|choice)\s\(?([A-J])\)?\s(?:is|must be)\s(?:the )?(?:correct|right)\b"
    rf"|(?<!if )({FORMULA}|\([A-J]\)|{NUMBER.pattern})\s(?:is|must be)\s(?:the|our)\s(?:(?:final|right) )?answer\b",
    re.IGNORECASE,
)
TAIL = re.compile(  # what may follow a value that is the whole answer
    r"\s*[.!]?\s*$|\s*[,;:(\u2013\u2014]\s*(?=[a-z]+\b|QED)(?!and\b)|,?\sand\s(?=(?:we|so|that|this|thus|it|is|the|I)\b)"
)
HEDGE = re.compile(
    r"\b(?:or(?!\s(?:equivalently|about|approximately|simply)\b)|maybe|possibly"
    r"|perhaps|alternatively|either|unless|unsure|not sure|could|might|may be|wrong|incorrect|no(?=,))\b"
    r"|\bhowever, [0-9]|\?",
    re.IGNORECASE,
)
OR_ELSE = re.compile(
    r"(?:[\s$).,\]]|\\[)\]]){0,8}\bor\b(?!\s+(?:equivalently|about|approximately|roughly|simply|in|\\approx))"
)
BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
SPACED = r"(?:[\s$~]|\\[,;:! ]|\\[()\[\]]|\\q?quad(?![A-Za-z]))*+"
AND_OR = r"(?:\\(?:text|mathrm)\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|&)"
BETWEEN_BOXES = re.compile(rf"{SPACED},?(?:\s|\\[,;:! ]|\\q?quad(?![A-Za-z]))*+(?:;|{AND_OR})?{SPACED}")
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
    r"[.!](?=\s|$)|,?\s(?=(?:I hope|instead of|rather than)\b)"
    r"|[,;]?\s\(?(?=(?:because|since|as|so|which|where|when|given|assuming|thus|hence|therefore|but"
    r"|i\.e|that is|or equivalently)\b)|\s[(\[](?!mod\b)(?=[a-z]{2,}\s|(?:approximately|exactly)\))"
    r"|\s[\u2013\u2014]\s|\s*[\u2705\u2713\u2714\U0001f300-\U0001faff]",
    re.IGNORECASE,
)


def after_thinking(response: str) -> str:
    """Return what follows the last ``</think>``; nothing when a ``<think>`` is still open: a thought is no answer."""
    answer = response.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


# -------------------------------------------------------------------------------------------------------------- numbers


def number_of(text: str) -> Fraction:
    """Return the exact value of a number such as "1,024", "-$5", "1e3" or "7/2". Raises ValueError for other texts."""
    plain = re.sub(r"\{,\}|[,\s$\u20ac\u00a3]|\\(?=\$)|\\!", "", re.sub(f"[{DASHES}]", "-", text))
    plain = re.sub(r"\\[dtc]?frac(?:\{(.*?)\}\{(.*?)\}|([0-9])([0-9]))", r"\1\3/\2\4", plain)
    top, divided, bottom = plain.partition("/")
    mantissa, _, exponent = top.lower().partition("e")
    if abs(int(exponent or 0)) > LONGEST_ANSWER or (divided and not Fraction(bottom)):
        return Fraction(-1, 10**LONGEST_ANSWER)  # no truth is so small
    return Fraction(mantissa) * Fraction(10) ** int(exponent or 0) / Fraction(bottom or 1)


PART_BEFORE = re.compile(  # x2, 10^2, 12:07, 1,2,7, 2023-01-07, "3 to 7", "between 3 and 7"
    r"(?<![0-9])[A-Za-z_]$|[\^_]\s?\{?\s?$|[0-9]\s?[:,/]$|[0-9]-[0-9]{1,2}-$|[0-9]\s(?:to|or)\s$|[0-9]\s?\u2013\s?$"
    r"|between\s[0-9.,]{1,8}\sand\s$"
)


POWER = re.compile(r"\s?\^|\s?\*\*[0-9]")


def _is_part(text: str, number: re.Match) -> bool:
    """Test if a number is part of something else: a power, a time, a date, a range, a list, a name or a label."""
    before, after = text[max(0, number.start() - 20) : number.start()], text[number.end() : number.end() + 8]
    if PART_BEFORE.search(before):
        return True
    if POWER.match(after) or re.match(r"[:/][0-9]|\s?\?|\s(?:or|to)\s[0-9]", after) or LABEL.search(before):
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
    return None if NEGATED.search(text, max(0, number.start() - 40), number.start()) else number[0]


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
    if not numbers or NEGATED.search(line, 0, numbers[0].start()):
        return None
    if (last_line.startswith("####") and numbers[0][0] not in last_line) or (
        CORRECTED.match(after) and NUMBER.search(after[:200])
    ):
        return None
    between = [line[a.end() : b.start()] for a, b in itertools.pairwise(numbers)]
    if POWER.match(line, numbers[0].end()) or (between and re.fullmatch(r"[\s,;/|&%]*(?:or|and|to)?\s*", between[0])):
        return None
    return numbers[0][0]


# --------------------------------------------------------------------------------------------------------------- boxes


def _content_of_box(text: str, start: int) -> tuple[str, int] | None:
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
    found = _content_of_box(text, boxes[0].end()) if boxes else None
    return found[0] if found else None


def _joined(between: str, content: str, several: bool) -> bool:
    """Test if what stands between two boxes makes them one answer; a list or a row of names only ``several`` parts."""
    if len(between) > WIDEST_GAP:
        return False
    if (BETWEEN_BOXES.fullmatch(between) and re.search("[,;&]|and|or|quad", between)) or OR_BOX.fullmatch(between):
        return True
    return several and "," not in content and LISTED_BOX.fullmatch(between) is not None


def boxed_answer(text: str, several: bool) -> tuple[str, int, int]:
    r"""Return (answer, begin, end) of the last box and those joined to it; ``\boxed{1}$ and $\boxed{2}`` is "1, 2".

    The answer is "" where the last box is open or empty.
    """
    boxes = collections.deque(BOX.finditer(text), maxlen=10)
    answers: list[str] = []
    begin_of_next = end_of_last = None
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
        end_of_last = end_of_last or end
    return ", ".join(reversed(answers)), begin_of_next or 0, end_of_last or 0


# ----------------------------------------------------------------------------------------------------------- sentences


def _between_delimiters(text: str) -> str | None:
    """Return the formula at the beginning of ``text`` with a unit or percent sign after it; None if it is not alone."""
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
        if re.match(r"\s*[.!]\s", after) and CORRECTED.match(after.lstrip(" .!")):
            return text.partition("\n")[0]
        return f"{inside.strip()}\\text{{ {unit[1]}}}" if unit else inside.strip()
    return None


def _before_prose(line: str) -> str:
    """Return a plain answer without the prose after it, or the entire line if the prose takes the answer back."""
    prose = PROSE.search(line)
    if prose is None or CORRECTED.match(line[prose.end() :]):
        return line
    return line[: prose.start()]


def _before_tail(line: str) -> str | None:
    """Return the number, formula or choice at the beginning of a line if only a reason follows it, else None."""
    value = VALUE.match(line)
    if value is None:
        return None
    end = value.end()
    for _ in range(4):  # "7 dollars per day, in total"
        tail = TAIL.match(line, end)
        if tail is not None:
            denied = re.search(r"(?:n't|\bnot|\bneither|\bcannot)\b(?! sure| certain)", line[end:])
            hedged = HEDGE.search(line, end, end + denied.start() if denied else len(line))
            return None if hedged else without_delimiters(line[:end])
        word = re.match(r"\s(?!(?:and|or|is|are|as|so|since|because|which|where|when)\b)[a-z]+", line[end : end + 40])
        if word is None:
            return None
        end += word.end()
    return None


def _of_sentence(line: str) -> str:
    """Return the value that a sentence states: what follows its last "is", or the only number that it has."""
    sentence = line[: stop.start()] if (stop := re.search(r"[.!](?=\s|$)", line)) else line
    if (
        HEDGE.search(sentence)
        or re.search(DENIAL, sentence, re.IGNORECASE)
        or CORRECTED.match(line[len(sentence) + 1 :])
    ):
        return line
    said = collections.deque(SAID.finditer(sentence), maxlen=1)
    if said:
        rest = sentence[said[0].end() :]
        return _between_delimiters(rest) or _before_tail(rest) or _before_prose(rest)
    numbers = list(NUMBER.finditer(sentence))
    formulas = re.findall(FORMULA, sentence)
    if len(re.findall("[A-Za-z]{2,}", sentence)) >= 3 and "\\" not in sentence.replace("\\(", "").replace("\\)", ""):
        if len(numbers) == 1 and not formulas:
            return numbers[0][0]
        if len(formulas) == 1 and not NUMBER.search(sentence.replace(formulas[0], "")):
            return without_delimiters(formulas[0])
    return line


def _announced_answer(text: str) -> str | None:
    """Return the answer after the last announcement, on its line or the next, without delimiters and prose."""
    announced = collections.deque(ANNOUNCED.finditer(text), maxlen=1)
    if not announced:
        said = collections.deque(CALLED.finditer(text), maxlen=1)
        return without_delimiters(said[0][1] or said[0][2]) if said else None
    rest = text[announced[0].end() :][: 2 * LONGEST_ANSWER]
    if RETRACTED.search(rest):
        return None
    if announced[0][0] == "####":
        rest = rest.lstrip().partition("\n")[0]
    rest = rest.strip(" \t\r\n:*") if rest.lstrip(" \t:*").startswith("\n") else rest.strip(" \t:")
    rest = re.sub(r"^(?:\*\*|__)\s+", "", rest)  # "**Answer:** 5"
    rest = re.sub(r"^```[a-z]*\s*", "", rest).partition("</answer>")[0]
    for _ in range(4):
        rest = LEADING.sub("", rest, count=1) if LEADING.match(rest) else rest
    line = rest.partition("\n")[0]
    return _between_delimiters(rest) or _before_tail(line) or _before_prose(_stated(line))


def _stated(line: str) -> str:
    """Return a line that is a value already, or else the value that its first sentence states."""
    begins = VALUE.match(line)
    if begins and not re.match(rf"\s+{IS}\b", line[begins.end() :][:20]):
        return line
    return _of_sentence(line) if begins or re.match(r"[A-Za-z]+(?:'[a-z]+)?\s", line) else line


def _is_complete(answer: str) -> bool:
    """Test if an announced answer is a number, a formula or a choice, and not words: "above", "therefore correct"."""
    words = re.findall("[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+(?:\{[^{}]*\})?", " ", answer))
    return bool(answer) and (not words or (answer[0] in "-$.0123456789" and len(words) <= 4))


def final_answer(text: str, several: bool = False) -> str | None:
    r"""Return the last box; else what follows the last "answer is", "answer:" or "####"; else None.

    A number, formula or choice that is announced behind the last box counts more than the box. A denied box, and one
    that "or" follows, is no answer. In ``<answer>...</answer>``, where nothing comes after it, the inside counts; it
    needs no announcement. Never the whole text: somewhere in it any number can be found. Of several answers the last
    counts. Where the truth has ``several`` parts, boxes of which each stands behind a name or on a line of its own are
    one answer.
    """
    text = text.translate(INVISIBLE)
    tagged = _inside_tag(text)
    if tagged is not None and not BOX.search(tagged) and not ANNOUNCED.search(tagged):
        answer = _between_delimiters(tagged) or tagged
    else:
        text = text if tagged is None else tagged
        answer, begin, end = boxed_answer(text, several)
        if not BOX.search(text):
            answer = _announced_answer(text.translate(WIDE)) or ""
        else:
            behind = text[end:] if end else text.rpartition("\\boxed")[2]
            announced = _announced_answer(behind.translate(WIDE)) or ""
            if _is_complete(announced.strip("*_ .")) and (not answer or re.search(r"\w", answer)):
                answer = announced
            elif (
                NEGATED.search(text, max(0, begin - 40), begin)
                or OR_ELSE.match(behind[:40])
                or REJECTED.match(behind)
                or RETRACTED.search(behind)
                or DENIED.sub("", announced, count=1).strip(" .") == answer != announced
            ):
                return None
            else:
                return answer or None
    answer = answer.strip().strip("*_ ").rstrip(".").strip("*_ ")
    if not 0 < len(answer) <= LONGEST_ANSWER or DENIED.match(answer):
        return None
    return answer


def _inside_tag(text: str) -> str | None:
    """Return the text of the last ``<answer>...</answer>``; None without one, or if another answer comes after it."""
    after = text.rpartition("</answer>")[2]
    return None if BOX.search(after) or ANNOUNCED.search(after) else in_last_tag(text)


def in_last_tag(text: str) -> str | None:
    """Return the text of the last ``<answer>...</answer>``; None if it is empty."""
    head, closed, _ = text.rpartition("</answer>")
    _, opened, inside = head.rpartition("<answer>")
    return inside.strip() or None if closed and opened else None


def tagged_answer(text: str) -> str | None:
    """Return what stands in the last ``<answer>...</answer>``, else the final answer."""
    return in_last_tag(text) or final_answer(text)


def without_delimiters(text: str) -> str:
    """Remove the delimiters around an entire text."""
    for opening, closing in DELIMITED:
        inside = text[len(opening) : -len(closing)]
        if text.startswith(opening) and text.endswith(closing) and inside and opening not in inside:
            text = inside.strip()
    return text

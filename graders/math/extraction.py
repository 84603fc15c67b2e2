"""Find the final answer of a response in boxes, tags, announcements and sentences; tell if it copies the question."""

from __future__ import annotations

import collections
import math
import re

from graders.math.answers import SYMBOL, plain, tidy
from graders.math.tex import operations
from graders.text import (
    BOX,
    CORRECTED,
    DELIMITED,
    DENIAL,
    INVISIBLE,
    LONGEST_ANSWER,
    NEGATED,
    NUMBER,
    REJECTED,
    content_of_box,
    in_last_tag,
    without_delimiters,
)

IT_IS = r"\b(?:th(?:is|at|ese|ey)|it|my answer|i)(?: (?:answer|value|result|guess))?"
IT_IS += r"(?:'s|\u2019s| is| are| was| were| am| seems| must be)(?: \w+ly| just| still)?"
WRONG = r"(?:wrong|incorrect|false|mistaken|a mistake|not (?:right|correct))\b(?!-| (?:to|that|if|when|for|angle|tri))"
RETRACTED = re.compile(  # "Wait, that is wrong", "This is incorrect", "This contradicts (1)", "(just kidding, it's 6)"
    r"(?:^|[.!,\n(])\s*+(?:(?:wait|actually|no|sorry|oops|hmm|but)\b[^.\n]{0,40}?)?"
    rf"(?:{IT_IS} {WRONG}|\b(?:this|that|it|which) (?:contradicts|is a contradiction)\b|\bjust kidding\b)",
    re.IGNORECASE,
)
SUPPOSED = re.compile(  # the beginning of a sentence in which "the answer is" states nothing
    r"\b(?:(?:if|whether|unless)\b[^.!?\n,;:]*"
    r"|(?:suppos\w+|assum\w+|imagin\w+|pretend\w*|den(?:y|ies)|doubt\w*|false|untrue|let's say"
    r"|(?<!\bI )(?<!\bI would )(?<!\bwe )(?:think|thinks|thought|guess|guesse[sd]|claims?|believes?|says?|said))"
    r"(?: for [a-z ]{1,20})?(?: that)? (?:the|that|my|our|your|its) (?:[a-z]+ )?)$",
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
    r"(?:(?!\b(?:no|non|nicht|n\u00e3o|pas|\u043d\u0435|nunca|jamais|nie|mai)\b)[^.?!\n:=$]){0,40}?"
    r"(?:\b(?:es|est|ist|lautet|\u00e8|\u00e9)\b[ \t*_]*:?|:|=)"
    r"|(?:\u7b54\u6848|\u7b54\u3048|\uc815\ub2f5|\ub2f5)[^.?!\n:=$\u4e0d]{0,20}?"
    r"(?:[\u662f\u4e3a\u70ba\u306f\u9009\u9078](?!\u4e0d)[ \t*_]*:?|[\uc740\ub294]|:|=)"
    r"|(?:\u6545|\u6240\u4ee5|\u56e0\u6b64|\u5e94|\u61c9)[\u9009\u9078]\s*:?",
    re.IGNORECASE,
)
SAID_INSIDE = re.compile(r"^(?:the\s+)?(?:final\s+)?answer(?:\s+is\b|\s*[:=])\s*:?\s*", re.IGNORECASE)  # of a box
DENIED = re.compile(r"(?:not|no|non|nicht|pas|n\u00e3o|\u043d\u0435)\b", re.IGNORECASE)
WIDE = str.maketrans({"\uff1a": ":", "\u3002": ". ", "\uff0c": ", ", "\uff08": "(", "\uff09": ")"})  # Chinese, Japanese
LEADING = re.compile(  # words before the answer of a sentence
    r"(?:(?:that|therefore|thus|then|so|hence|exactly|approximately|about|roughly|around|indeed|simply|just|clearly|"
    r"precisely|only|now|also|still|obviously|evidently|actually|certainly|surely|definitely|nearly|always|"
    r"none other than|nothing but|in fact|for sure|of course|as follows|equal to|equals|given by|found to be|"
    r"la|el|le|die|number|the (?:number|value|integer|fraction|option|"
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
# Where a plain answer stops and prose continues: "5 because ...", "5, as required.", "5. I hope it is correct."
PROSE = re.compile(
    r"[.!](?=\s|$)|,\s*(?=[\u4e00-\u9fff])|,?\s(?=(?:I hope|instead of|rather than)\b)"
    r"|[,;]?\s\(?(?=(?:because|since|as|so|which|where|when|given|assuming|thus|hence|therefore|but"
    r"|i\.e|that is|or equivalently)\b)|\s[(\[](?!mod\b)(?=[a-z]{2,}\s|(?:approximately|exactly)\))"
    r"|\s[\u2013\u2014]\s|\s*[\u2705\u2713\u2714\U0001f300-\U0001faff]",
    re.IGNORECASE,
)


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
        found = content_of_box(text, box.end())
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


def _of_sentence(line: str, alone: bool) -> str:
    """Return the value that a sentence states: what follows its last "is", or, if ``alone``, the only number in it."""
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
    if alone and len(re.findall("[A-Za-z]{2,}", sentence)) >= 3 and not re.search(r"\\[^()]", sentence):
        if len(numbers) == 1 and not formulas:
            return numbers[0][0]
        if len(formulas) == 1 and not NUMBER.search(sentence.replace(formulas[0], "")):
            return without_delimiters(formulas[0])
    return line


def _announced_answer(text: str) -> str | None:
    """Return the answer after the last announcement, on its line or the next, without delimiters and prose."""
    found = ANNOUNCED.finditer(text)
    stated = (one for one in found if not SUPPOSED.search(text, max(0, one.start() - 80), one.start()))
    announced = collections.deque(stated, maxlen=1)
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
    sentence = announced[0][0][-1:] in "#:=" or rest.startswith("that ")  # and not "is the square of 5"
    for _ in range(4):
        rest = LEADING.sub("", rest, count=1) if LEADING.match(rest) else rest
    line = rest.partition("\n")[0]
    return _between_delimiters(rest) or _before_tail(line) or _before_prose(_stated(line, sentence))


def _stated(line: str, alone: bool) -> str:
    """Return a line that is a value already, or else the value that its first sentence states."""
    begins = VALUE.match(line)
    if begins and not re.match(rf"\s+{IS}\b", line[begins.end() :][:20]):
        return line
    return _of_sentence(line, alone) if begins or re.match(r"[A-Za-z]+(?:'[a-z]+)?\s", line) else line


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


EDGES = re.compile(r"\$+|\\[()\[\]]")  # of a formula in a question


def is_echo(answer: str, wanted: str, question: str) -> bool:
    """Test if an answer that equals the truth copies a formula of the question, and leaves the computing to the grader.

    It holds a number or operation that the truth does not, and one formula of the question, or its text, holds all of
    them. The truth's own text is no copy, nor is a fraction in lowest terms in a sentence.
    """
    name = rf"^{SYMBOL}\s*=\s*"
    bare = re.sub(name, "", tidy(answer)).rpartition("=")[2]
    right = re.split(r"=|\\approx", re.sub(name, "", wanted))[-1]
    if not question or plain(bare) == plain(right):
        return False
    texts = EDGES.split(question)
    if re.fullmatch("[a-d]", bare):  # a variable, and not the name of a choice
        return any(re.search(rf"(?<![A-Za-z\\]){bare}(?![A-Za-z])", formula) for formula in texts[1::2])
    said = operations(bare)
    left = said - operations(right)
    simple = re.fullmatch(r"-?(?:\\frac)?\s*\{?([0-9]+)\}?\s*/?\s*\{?([0-9]+)\}?", bare)
    if simple is not None and math.gcd(int(simple[1]), int(simple[2])) == 1:
        alone = any(plain(tidy(text)) == plain(bare) for text in texts[1::2])
        texts = texts[1::2] if alone else []
    computes = sum(said.values()) > 1 or any(not token[0].isdigit() for token in left)
    return bool(left) and computes and any(not said - operations(tidy(text)) for text in texts)

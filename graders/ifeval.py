"""The 25 kinds of constraints of IFEval (arXiv 2311.07911), checked as its published evaluation checks them.

Some of its choices are surprising, and kept, because scores are compared with those of others: keywords are regular
expressions and may stand inside words, a highlight is anything between two asterisks, and a language is what langdetect
says. Five kinds need packages that are not among this project's: langdetect for languages and upper or lower case in
English, nltk and its data punkt_tab for sentences and capital words. Without them a row of such a kind is rejected.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable

from graders.text import after_thinking


def _related(count: int, relation: str, wanted: int) -> bool:
    """Return True if a count is "less than" or "at least" a number. Raises ValueError for another relation."""
    if relation == "less than":
        return count < wanted
    if relation == "at least":
        return count >= wanted
    raise ValueError(f"the relation {relation!r} is neither 'less than' nor 'at least'")


def _language(text: str) -> str | None:
    """Return the language code by langdetect, None if it cannot tell. Raises ValueError if it is not installed."""
    try:
        import langdetect
    except ImportError:
        raise ValueError("constraints about a language need langdetect: pip install langdetect") from None
    langdetect.DetectorFactory.seed = 0  # it draws random numbers
    try:
        return langdetect.detect(text)
    except langdetect.LangDetectException:
        return None


def _nltk(function: str, text: str) -> list[str]:
    """Split a text into sentences or words by nltk. Raises ValueError if nltk or its data is missing."""
    try:
        import nltk

        return getattr(nltk, function)(text)
    except (ImportError, LookupError):
        words = "pip install nltk; python -m nltk.downloader punkt_tab"
        raise ValueError(f"constraints about sentences and capital words need nltk and its data: {words}") from None


def existence(text: str, given: dict) -> bool:
    return all(re.search(keyword, text, re.IGNORECASE) for keyword in given["keywords"])


def frequency(text: str, given: dict) -> bool:
    count = len(re.findall(given["keyword"], text, re.IGNORECASE))
    return _related(count, given["relation"], given["frequency"])


def forbidden_words(text: str, given: dict) -> bool:
    return not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in given["forbidden_words"])


def letter_frequency(text: str, given: dict) -> bool:
    count = text.lower().count(given["letter"].lower())
    return _related(count, given["let_relation"], given["let_frequency"])


def response_language(text: str, given: dict) -> bool:
    return _language(text) in (given["language"], None)


def number_sentences(text: str, given: dict) -> bool:
    sentences = _nltk("sent_tokenize", text)
    return _related(len(sentences), given["relation"], given["num_sentences"])


def number_paragraphs(text: str, given: dict) -> bool:
    """Check the number of paragraphs separated by ``***``; only the first or the last may be empty."""
    paragraphs = re.split(r"\s?\*\*\*\s?", text)
    if not all(paragraph.strip() for paragraph in paragraphs[1:-1]):
        return False
    return sum(bool(paragraph.strip()) for paragraph in paragraphs) == given["num_paragraphs"]


def number_words(text: str, given: dict) -> bool:
    words = re.findall(r"\w+", text)
    return _related(len(words), given["relation"], given["num_words"])


def nth_paragraph_first_word(text: str, given: dict) -> bool:
    """Check the number of paragraphs separated by blank lines, and the first word of one, up to its punctuation."""
    paragraphs = text.split("\n\n")
    count = sum(bool(paragraph.strip()) for paragraph in paragraphs)
    if given["nth_paragraph"] > count:
        return False
    words = paragraphs[given["nth_paragraph"] - 1].split()
    if not words:
        return False
    unquoted = words[0].lstrip("'").lstrip('"')
    first = re.match(r"[^.,?!'\"]*", unquoted)[0]
    return count == given["num_paragraphs"] and first.lower() == given["first_word"].lower()


def number_placeholders(text: str, given: dict) -> bool:
    """Check the number of pairs of brackets, found one by one: a regular expression would read on from each."""
    count = 0
    for line in text.split("\n"):
        begin = line.find("[")
        while begin >= 0 and (end := line.find("]", begin + 1)) >= 0:
            count += 1
            begin = line.find("[", end + 1)
    return count >= given["num_placeholders"]


def postscript(text: str, given: dict) -> bool:
    marker = given["postscript_marker"]
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(known.get(marker, marker.lower()), text.lower(), re.MULTILINE) is not None


def number_bullet_lists(text: str, given: dict) -> bool:
    stars = re.findall(r"^[^\S\n]*\*[^\*].*$", text, re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", text, re.MULTILINE)
    return len(stars) + len(dashes) == given["num_bullets"]


def constrained_response(text: str, given: dict) -> bool:
    return any(f"My answer is {word}." in text for word in ("yes", "no", "maybe"))


def number_highlighted_sections(text: str, given: dict) -> bool:
    single = re.findall(r"\*[^\n\*]*\*", text)
    double = re.findall(r"\*\*[^\n\*]*\*\*", text)
    inside = [found.strip("*") for found in single + double]
    highlights = [words for words in inside if words.strip()]
    return len(highlights) >= given["num_highlights"]


def multiple_sections(text: str, given: dict) -> bool:
    sections = re.split(rf"\s?{given['section_spliter']}\s?\d+\s?", text)
    return len(sections) - 1 >= given["num_sections"]


def json_format(text: str, given: dict) -> bool:
    bare = text.strip()
    for opening in ("```json", "```Json", "```JSON", "```"):
        bare = bare.removeprefix(opening)
    try:
        json.loads(bare.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str, given: dict) -> bool:
    """Check for text between ``<<`` and the line's last ``>>``."""
    for line in text.split("\n"):
        begin = line.find("<<")
        end = line.rfind(">>")
        if begin < 0 or end < begin + 2:
            continue
        inside = line[begin:end].lstrip("<").rstrip(">")
        if inside.strip():
            return True
    return False


def two_responses(text: str, given: dict) -> bool:
    """Check for two different answers with ``******`` between them; only the first or the last part may be empty."""
    parts = text.split("******")
    if not all(part.strip() for part in parts[1:-1]):
        return False
    answers = [part.strip() for part in parts if part.strip()]
    return len(answers) == 2 and answers[0] != answers[1]


def repeat_prompt(text: str, given: dict) -> bool:
    return text.strip().lower().startswith(given["prompt_to_repeat"].strip().lower())


def end_checker(text: str, given: dict) -> bool:
    return text.strip().strip('"').lower().endswith(given["end_phrase"].strip().lower())


def quotation(text: str, given: dict) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == '"' and text[-1] == '"'


def capital_word_frequency(text: str, given: dict) -> bool:
    words = _nltk("word_tokenize", text)
    count = sum(word.isupper() for word in words)
    return _related(count, given["capital_relation"], given["capital_frequency"])


def english_capital(text: str, given: dict) -> bool:
    return _language(text) in ("en", None) and text.isupper()


def english_lowercase(text: str, given: dict) -> bool:
    return _language(text) in ("en", None) and text.islower()


def no_comma(text: str, given: dict) -> bool:
    return "," not in text


KINDS = {
    "keywords": [existence, frequency, forbidden_words, letter_frequency],
    "language": [response_language],
    "length_constraints": [number_sentences, number_paragraphs, number_words, nth_paragraph_first_word],
    "detectable_content": [number_placeholders, postscript],
    "detectable_format": [
        number_bullet_lists,
        constrained_response,
        number_highlighted_sections,
        multiple_sections,
        json_format,
        title,
    ],
    "combination": [two_responses, repeat_prompt],
    "startend": [end_checker, quotation],
    "change_case": [capital_word_frequency, english_capital, english_lowercase],
    "punctuation": [no_comma],
}
# name -> function(response, the row's arguments)
CONSTRAINTS: dict[str, Callable[[str, dict], bool]] = {
    f"{kind}:{function.__name__}": function for kind, functions in KINDS.items() for function in functions
}


def constraints_of(truth: str, row: dict) -> tuple[list, list]:
    """Return (names, arguments) of a row's constraints: from the truth as JSON or Python, or else the row's columns.

    ``{"instruction_id_list": [...], "kwargs": [...]}``, open-instruct's list of one object with ``instruction_id``,
    and kwargs that are text. Raises SyntaxError, ValueError, KeyError or TypeError for anything else.
    """
    given = row
    if truth.strip().startswith(("{", "[")) and not {"instruction_id_list", "kwargs"} <= row.keys():
        try:
            given = json.loads(truth)
        except ValueError:
            given = ast.literal_eval(truth.strip())
        given = given[0] if isinstance(given, list) else given
        given = json.loads(given) if isinstance(given, str) else given
    names = given["instruction_id"] if "instruction_id" in given else given["instruction_id_list"]
    arguments = given["kwargs"]
    return names, json.loads(arguments) if isinstance(arguments, str) else arguments


def judge(response: str, truth: str, row: dict) -> tuple[float, str]:
    """Return (fraction of the constraints that a response keeps, the response after its thoughts).

    Raises ValueError, saying why, for constraints that do not exist, lack an argument or need a missing package.
    """
    text = after_thinking(response).strip()
    try:
        names, arguments_of = constraints_of(truth, row)
        if unknown := [f"no constraint {name!r}" for name in names if name not in CONSTRAINTS]:
            raise ValueError(f"{', '.join(unknown)}; known: those of IFEval (docs/data_and_rewards.md)")
        kept = []
        for name, arguments in zip(names, arguments_of, strict=True):
            constraint = CONSTRAINTS[name]
            is_kept = constraint(text, arguments or {})
            kept.append(is_kept)
        return sum(kept) / len(kept), text
    except (ArithmeticError, AttributeError, KeyError, SyntaxError, TypeError, ValueError, re.error) as error:
        raise ValueError(f"constraints: {type(error).__name__}: {error}") from error

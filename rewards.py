"""Verifiers, the pool of processes that runs them, the sandbox for code, shaping, and reward models.

A verifier is a plain function ``(response, truth, row) -> Reward``: ``response`` is the decoded text of one sample,
``truth`` the answer in the data set, ``row`` the whole row. It runs in a worker process that is killed at the
time-out, so a response that sends a parser into an endless loop costs one sample and not the night. What happens then:

    returns a Reward       used as it is; status "unscorable" where the row cannot be scored, score 0, counted
    runs out of time       score 0, status "timeout", counted in reward/timeouts
    kills its process      score 0, status "crash", counted in reward/errors; so does running out of memory
    raises                 a bug in the verifier: the run ends with the worker's traceback

Programs that a model wrote run in a process and in namespaces of their own (``Sandbox``). docs/rewards.md lists the
verifiers, the columns they read, and what is guaranteed.

Importing this imports no torch: workers start in a second and stay small.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import importlib.util
import inspect
import json
import logging
import math
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from pathlib import Path


@dataclass(frozen=True)
class Reward:
    """What a verifier found: ``score`` (what is optimised), ``parts`` for the log (``correct``, ``format``: 0 to 1).

    ``steps``, for ppo.py --dense_reward: (number of characters, score of the response up to there), in rising order.
    For people, and no part of what makes two rewards equal: ``extracted``, what was taken for the answer ("" if
    nothing was), and ``detail``, why there is no score.
    """

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    status: str = "ok"
    steps: tuple[tuple[int, float], ...] = ()
    status: str = "ok"  # or timeout, crash, unscorable
    extracted: str = field(default="", compare=False)
    detail: str = field(default="", compare=False)


Verifier = Callable[[str, str, dict], Reward]

# ------------------------------------------------------------------------------------------------ finding the answer

# A minus is a sign only where no number or bracket stands before it: "10-4" ends in 4, "= -4" in -4. A comma belongs
# to a number only between groups of three digits, a dot only between digits.
NUMBER = re.compile(
    r"(?<![0-9])(?<![0-9]\.)(?:(?<![0-9)\]])[-\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)
NEGATED = re.compile(r"(?:\bnot|n't|n\u2019t|\bnever)[\s:$*}]*$", re.IGNORECASE)
FINAL_ANSWER = re.compile(r"(?:####|\banswer\b[ \t]*(?:is\b[ \t]*:?|:|=))[ \t]*([^\n]*)", re.IGNORECASE)
LONGEST_ANSWER = 1000  # characters; what is longer is no answer, and parsers take more than linear time


def _number(text: str) -> Decimal:
    return Decimal(text.strip().replace(",", "").replace("\u2212", "-"))


def _foreign_digits(text: str) -> bool:
    return any(c.isdigit() and not c.isascii() for c in text)


def after_thinking(response: str) -> str:
    """What follows the last ``</think>``; nothing when a ``<think>`` is still open: a thought is not an answer."""
    answer = response.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` or ``\fbox{...}``, braces balanced; None if there is none or it is open."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    first = text.index("{", start) + 1
    depth, i = 1, first
    while i < min(len(text), first + LONGEST_ANSWER):
        if text[i] == "\\":  # the character after it is no brace
            i += 1
        elif text[i] in "{}":
            depth += 1 if text[i] == "{" else -1
            if depth == 0:
                return text[first:i].strip()
        i += 1
    return None


def tagged(text: str, tag: str = "answer") -> str | None:
    """What stands between the last ``<tag>`` and the ``</tag>`` after it; None without such a pair."""
    head, found, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = head.rpartition(f"<{tag}>")
    return inside.strip() if found and opened else None


def final_answer(response: str) -> str | None:
    r"""The last box; else what follows the last "answer is", "answer:" or "####" on its line; else None.

    Never the whole text: somewhere in it any number can be found. Of several answers the last counts.
    """
    text = after_thinking(response)
    if "\\boxed" in text or "\\fbox" in text:
        return last_boxed(text) or None
    found = FINAL_ANSWER.findall(text)
    answer = found[-1].strip().strip("*$ ").rstrip(".").strip("*$ ") if found else ""
    return answer if 0 < len(answer) <= LONGEST_ANSWER and not re.match(r"not\b", answer, re.IGNORECASE) else None


def _judged(correct: bool | float, extracted: str | None, **more: float) -> Reward:
    """A Reward of a verifier that looks for one answer: part ``format`` says whether there was one."""
    parts = {"correct": float(correct == 1), "format": float(extracted is not None), **more}
    return Reward(float(correct), parts, extracted=(extracted or "")[:LONGEST_ANSWER])


# ---------------------------------------------------------------------------------------------------------- verifiers


def last_number(response: str, truth: str, row: dict) -> Reward:
    """1 when the last number of the response equals the truth ("1,024" equals "1024", "7.0" equals "7").

    In a response with a box it is the last number of the last box. A number that is only named to be denied ("not 42"),
    an open box, and a box with an "or" are no answers.
    """
    text, number = after_thinking(response), None
    if "\\boxed" in text or "\\fbox" in text:
        text = last_boxed(text) or ""
        text = "" if re.search(r"\bor\b", text) else text
    end = 1 + max(text.rfind(digit) for digit in "0123456789")
    text = text[max(0, end - 20 * LONGEST_ANSWER) : end]  # a response may have any length, and the pattern is slow
    for found in NUMBER.finditer(text):
        number = found
    if number is not None and NEGATED.search(text, max(0, number.start() - 20), number.start()):
        number = None
    correct = number is not None and _number(number[0]) == _number(truth)
    return _judged(correct, None if number is None else number[0][:LONGEST_ANSWER])


def exact(response: str, truth: str, row: dict) -> Reward:
    """1 when the response is the truth, white space at both ends aside."""
    correct = float(response.strip() == truth.strip())
    return Reward(correct, {"correct": correct}, extracted=response.strip()[:LONGEST_ANSWER])


def gsm8k(response: str, truth: str, row: dict) -> Reward:
    """1 when the number after the last "####", or without one the last number, equals that of the truth.

    The truth is a number or GSM8K's whole solution, which ends in "#### 1,234".
    """
    answer, truth = after_thinking(response), truth.rpartition("####")[2]
    if "####" in answer:
        found = NUMBER.search(answer.rpartition("####")[2].partition("\n")[0])
        correct = found is not None and _number(found[0]) == _number(truth)
        return _judged(correct, None if found is None else found[0][:LONGEST_ANSWER])
    return last_number(response, truth, row)


def _plain_latex(text: str) -> str:
    """LaTeX without what does not change its meaning: spaces, dollars, sizes of brackets, units in text, names."""
    text = re.sub(r"\\(?:left|right|displaystyle|limits|[,;:! ])|\\?\$|~", "", text.strip().rstrip("."))
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\sqrt\s*([0-9])(?![0-9])", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\%|%|\s+", "", text)
    if re.fullmatch(r"[-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?", text):
        text = text.replace(",", "")
    return text.lower() if text.isalpha() else text


@functools.lru_cache(maxsize=4096)
def _parse_math(latex: str) -> tuple:
    """LaTeX as math-verify reads it: sympy expressions, possibly none. Its own time-outs are signals and stay off."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that the signals are off
    return tuple(parse(f"\\boxed{{{latex}}}", [LatexExtractionConfig()], parsing_timeout=None))


def math_(response: str, truth: str, row: dict) -> Reward:
    """1 when the final answer is the truth as text, LaTeX's decoration aside, or equal to it by math-verify."""
    answer = final_answer(response)
    if answer is None or _foreign_digits(answer):
        return _judged(False, None)
    plain, wanted = _plain_latex(answer), _plain_latex(truth if last_boxed(truth) is None else last_boxed(truth))
    correct = bool(plain) and plain == wanted
    if plain and not correct and ("=" not in plain or "=" in wanted or re.match(r"[A-Za-z](?:\([A-Za-z]\))?=", plain)):
        from math_verify import verify

        gold, found = _parse_math(wanted), _parse_math(plain)
        correct = bool(gold and found) and verify(list(gold), list(found), timeout_seconds=None)
    return _judged(correct, answer)


def _value(node: ast.AST, used: list[int]) -> Fraction:
    """Exact value of an expression of + - * / and whole numbers, which go to ``used``. Raises ValueError otherwise."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        left, right = _value(node.left, used), _value(node.right, used)
        if isinstance(node.op, ast.Add | ast.Sub):
            return left + right if isinstance(node.op, ast.Add) else left - right
        if isinstance(node.op, ast.Div) and right == 0:
            raise ValueError("division by zero")
        return left * right if isinstance(node.op, ast.Mult) else left / right
    raise ValueError("only + - * / and whole numbers")


def countdown(response: str, truth: str, row: dict) -> Reward:
    """1 when the answer's expression uses each number of the row exactly once and comes to the target, exactly.

    The truth is the target, or ``{"target": ..., "numbers": [...]}``; else the numbers are the row's ``nums`` or
    ``numbers``. The answer is the last ``<answer>``, or else the final answer; "= 24" may follow the expression. In
    reasoning-gym's rows the truth is one solution of many, and not all numbers need to be used.
    """
    metadata = row.get("metadata")
    gym = isinstance(metadata, dict) and metadata.get("source_dataset") == "countdown"
    given = json.loads(truth) if truth.strip().startswith("{") else metadata if gym else {"target": truth, **row}
    numbers = next((given[k] for k in ("numbers", "nums") if k in given), None)
    if numbers is None:
        return Reward(0.0, status="unscorable", detail="no numbers in the truth, nor a column numbers or nums")
    text = after_thinking(response)
    answer = tagged(text) or final_answer(text)
    if answer is None or len(answer) > LONGEST_ANSWER:
        return _judged(False, None)
    plain = answer.replace("\u00d7", "*").replace("\u00f7", "/").replace("\u2212", "-")
    plain = plain.replace("\\times", "*").replace("\\cdot", "*").replace("\\div", "/")
    expression, equals, claimed = plain.partition("=")
    used: list[int] = []
    try:
        if not re.fullmatch(r"[0-9+\-*/() ]+", expression):
            raise ValueError("other characters")
        value = _value(ast.parse(expression.strip(), mode="eval").body, used)
        if equals and Fraction(claimed.strip()) != value:
            raise ValueError("the claimed value is another one")
    except (ValueError, SyntaxError, RecursionError, MemoryError, ZeroDivisionError):
        return _judged(False, answer)
    left = collections.Counter(int(n) for n in numbers)
    left.subtract(used)
    fits = min(left.values()) >= 0 if gym else not any(left.values())
    return _judged(fits and value == Fraction(str(given["target"]).strip()), answer)


# Some of reasoning-gym's scorers pass the answer to eval, directly or inside sympy's parse_expr. A call needs a
# bracket; a formula needs these names alone. Anything else scores 0 before it gets there.
GYM_EVALUATES = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
GYM_PARSES = ("simple_integration", "intermediate_integration", "polynomial_multiplication", "puzzle24", "countdown")
FORMULA = re.compile(
    r"(?:[0-9\s+\-*/^(),]|\.(?![^\W\d])|(?<!\w)(?:[a-zCXY]|sin|cos|tan|exp|log|sqrt|asin|acos|atan|pi|E)(?!\w))*"
)


@functools.lru_cache
def _gym_scorer(name: str) -> Callable:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


def reasoning_gym_(response: str, truth: str, row: dict) -> Reward:
    """The data set's own ``score_answer`` on the last ``<answer>``, or else the final answer, of the response.

    Only 1 counts as correct. Many scorers console a text that merely holds the truth with a share of its length; that
    pays for listing everything, and is 0 here. Digits that are not ASCII, which ``int`` would read, are no answer.
    """
    metadata = row.get("metadata")
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        return Reward(0.0, status="unscorable", detail="the row's column metadata names no source_dataset")
    name, text = metadata["source_dataset"], after_thinking(response)
    answer = tagged(text) or final_answer(text)
    if answer is None or len(answer) > 100 * LONGEST_ANSWER or _foreign_digits(answer):
        return _judged(False, None)
    if (name in GYM_EVALUATES and "(" in answer) or (name in GYM_PARSES and not FORMULA.fullmatch(answer)):
        return _judged(False, None)
    score = float(_gym_scorer(name)(answer, entry={**row, "answer": truth}))
    return _judged(0.0 if not math.isfinite(score) or (score < 1 and truth in answer) else score, answer)


def format_(response: str, truth: str, row: dict) -> Reward:
    """1 for ``<think>...</think><answer>...</answer>``: each tag once, in this order, neither empty, nothing around.

    The opening ``<think>`` may be missing: many chat templates write it into the prompt. The truth is not looked at.
    """
    text = response.strip()
    text = text if text.startswith("<think>") else "<think>" + text
    parts = re.split(r"(</?(?:think|answer)>)", text)
    good = parts[1::2] == ["<think>", "</think>", "<answer>", "</answer>"]
    filled = good and all(parts[i].strip() for i in (2, 6)) and not any(parts[i].strip() for i in (0, 4, 8))
    return Reward(float(filled), {"format": float(filled)}, extracted=response.strip()[:LONGEST_ANSWER])


# ------------------------------------------------------------------------------- constraints, under the names of IFEval


def _related(count: int, relation: str | None, wanted: int) -> bool:
    if relation not in ("less than", "at least", "at most", "exactly", None):
        raise ValueError(f"unknown relation {relation!r}")
    return {"less than": count < wanted, "at most": count <= wanted, "exactly": count == wanted}.get(
        relation, count >= wanted
    )


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['\u2019-]\w+)*", text)


def _count_word(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _is_json(text: str) -> bool:
    text = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        return isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False


# Name -> function(text, arguments) -> bool. Sentences and paragraphs are counted by punctuation and blank lines.
CONSTRAINTS: dict[str, Callable[[str, dict], bool]] = {
    "keywords:existence": lambda t, a: all(_count_word(t, w) for w in a["keywords"]),
    "keywords:forbidden_words": lambda t, a: not any(_count_word(t, w) for w in a["forbidden_words"]),
    "keywords:frequency": lambda t, a: _related(_count_word(t, a["keyword"]), a.get("relation"), a["frequency"]),
    "keywords:letter_frequency": lambda t, a: _related(
        t.lower().count(a["letter"].lower()), a.get("let_relation"), a["let_frequency"]
    ),
    "length_constraints:number_words": lambda t, a: _related(len(_words(t)), a.get("relation"), a["num_words"]),
    "length_constraints:number_sentences": lambda t, a: _related(
        len(re.findall(r"\w[^.!?]*(?:[.!?]+|$)", t)), a.get("relation"), a["num_sentences"]
    ),
    "length_constraints:number_paragraphs": lambda t, a: (
        len([p for p in re.split(r"\*\*\*" if "***" in t else r"\n\s*\n", t) if p.strip()]) == a["num_paragraphs"]
    ),
    "detectable_format:number_bullet_lists": lambda t, a: (
        len(re.findall(r"^\s*(?:\*(?!\*)|-)\s+\S", t, re.MULTILINE)) == a["num_bullets"]
    ),
    "detectable_format:title": lambda t, a: re.search(r"<<[^<>\n]*\w[^<>\n]*>>", t) is not None,
    "detectable_format:json_format": lambda t, a: _is_json(t),
    "detectable_content:number_placeholders": lambda t, a: len(re.findall(r"\[[^\[\]]+\]", t)) >= a["num_placeholders"],
    "change_case:english_capital": lambda t, a: t.isupper(),
    "change_case:english_lowercase": lambda t, a: t.islower(),
    "change_case:capital_word_frequency": lambda t, a: _related(
        sum(w.isupper() for w in _words(t)), a.get("capital_relation"), a["capital_frequency"]
    ),
    "startend:end_checker": lambda t, a: t.strip().strip('"').lower().endswith(a["end_phrase"].strip().lower()),
    "startend:quotation": lambda t, a: len(t.strip()) > 2 and t.strip()[0] == t.strip()[-1] == '"',
    "punctuation:no_comma": lambda t, a: "," not in t,
}


def _constraints(truth: str, row: dict) -> list[tuple[str, dict]]:
    """(name, arguments) of each constraint, from the truth as JSON or from IFEval's columns. Raises ValueError."""
    source = json.loads(truth) if truth.strip().startswith(("{", "[")) else row
    source = source[0] if isinstance(source, list) and source else source
    names = source.get("instruction_id_list", source.get("instruction_id")) if isinstance(source, dict) else None
    if not names:
        raise ValueError("no instruction_id_list, neither in the truth as JSON nor as a column")
    unknown = [name for name in names if name not in CONSTRAINTS]
    if unknown:
        raise ValueError(f"unknown constraint {unknown[0]!r}; known: {', '.join(CONSTRAINTS)}")
    arguments = source.get("kwargs") or [{}] * len(names)
    clean = [{k: v for k, v in (a or {}).items() if v is not None} for a in arguments]
    return list(zip(names, clean, strict=True))


def ifeval(response: str, truth: str, row: dict) -> Reward:
    """1 when a response that says something keeps every constraint; part ``constraints``: the share that it keeps."""
    text = after_thinking(response).strip()
    try:
        kept = [CONSTRAINTS[name](text, a) for name, a in _constraints(truth, row)]
    except (ValueError, TypeError, KeyError) as error:
        return Reward(0.0, status="unscorable", detail=f"{type(error).__name__}: {error}")
    correct = bool(re.search(r"\w", text)) and all(kept)
    return _judged(correct, text or None, constraints=sum(kept) / len(kept))


# ----------------------------------------------------------------------------------- the sandbox for models' programs

CODE_SECONDS = 5.0  # of wall time for one program; a row's column time_limit changes it
CODE_LIMITS = {"memory": 2**30, "file": 16 * 2**20, "processes": 16, "files": 64}  # bytes, bytes, count, count
MOST_OUTPUT = 2**20  # bytes read from one program; what says more is killed


def _sandboxed() -> None:
    """The whole program of a sandbox's process: its source is what ``python -I -S -c`` gets.

    The launcher makes namespaces, an empty root with nothing but the standard library (read-only), and no way back;
    the keeper (process 1 in there) waits for the end, the time-out or the parent's death and kills everything; the
    third process takes the limits upon itself and runs the job, a line of JSON from stdin:

        program   its stdin is the job's text, its stdout the parent's pipe
        calls     one line {"call": [args, kwargs]} in, one line {"value": ...} or {"error": name} out, until the end
        judge     test code; calls of the function it tests go out and come back as such lines; ends in {"verdict": ...}
    """
    import contextlib
    import ctypes
    import json
    import os
    import resource
    import select
    import signal
    import sys

    settings = json.loads(sys.argv[1])
    root, uid, null = settings["root"], os.geteuid(), os.open("/dev/null", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)

    def kernel(name, *arguments):
        """A call of libc that returns 0 or raises."""
        plain = [a.encode() if isinstance(a, str) else a for a in arguments]
        if getattr(libc, name)(*plain) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    def isolate():
        """New user, mount, pid, net, ipc and uts namespaces; a root of its own. Raises OSError where not allowed."""
        (readable, writable), launcher = os.pipe(), os.getpid()
        helper = os.fork()
        if helper == 0:  # stays outside, where it may say who is who inside: root may map a second user, "nobody"
            os.close(writable)
            if os.read(readable, 1):
                for file in ("setgroups", "uid_map", "gid_map"):
                    own = uid if file == "uid_map" else os.getegid()
                    for text in ["deny"] if file == "setgroups" else [f"0 {own} 1\n1000 65534 1\n", f"0 {own} 1\n"]:
                        try:
                            with open(f"/proc/{launcher}/{file}", "w") as f:
                                f.write(text)
                            break
                        except OSError:
                            continue
            os._exit(0)
        new_user, others = 0x10000000, 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000
        kernel("unshare", new_user | others)
        os.write(writable, b"x")
        os.waitpid(helper, 0)
        os.close(readable)
        os.close(writable)
        with open("/proc/sys/user/max_user_namespaces", "w") as f:  # no further ones, where it would be root again
            f.write("0")
        kernel("mount", None, "/", None, 0x4000 | 0x40000, None)  # recursive, private
        kernel("mount", "tmpfs", root, "tmpfs", 2 | 4, "size=32m,nr_inodes=4096,mode=755")  # no suid, no devices
        for path in settings["readable"]:
            if os.path.islink(path):
                os.symlink(os.readlink(path), root + path)
            elif not os.path.exists(root + path):
                os.makedirs(root + path)
                kernel("mount", path, root + path, None, 0x1000 | 0x4000, None)  # bind, recursive
                read_only = (ctypes.c_uint64 * 4)(1 | 2 | 4, 0, 0, 0)  # no suid and no devices either
                kernel("syscall", 442, -100, root + path, 0x8000, read_only, 32)  # mount_setattr, recursive
        os.mkdir(root + "/tmp")
        os.chmod(root + "/tmp", 0o1777)
        os.chdir(root)
        kernel("pivot_root", ".", ".")
        kernel("umount2", ".", 2)
        os.chdir("/tmp")

    def drop_rights():
        try:
            os.setresgid(1000, 1000, 1000)
            os.setresuid(1000, 1000, 1000)
        except OSError:
            pass  # only the launcher's own user is mapped; without capabilities it has no rights in here
        kernel("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
        kernel("prctl", 38, 1, 0, 0, 0)  # no new privileges
        kernel("prctl", 1, signal.SIGKILL, 0, 0, 0)  # dies with the launcher
        kernel("prctl", 4, 0, 0, 0, 0)  # nobody in here may trace the keeper

    def kill_all():
        """Kill and reap whatever the job started; the wait status of the job itself."""
        if settings["namespaces"]:
            with contextlib.suppress(ProcessLookupError):  # there may be nobody left
                os.kill(-1, signal.SIGKILL)
            return os.waitpid(program, 0)[1]
        status = 0
        while True:  # orphans of orphans come back to this process, their reaper
            with open(f"/proc/self/task/{os.getpid()}/children") as f:
                children = [int(pid) for pid in f.read().split()]
            if not children:
                return status
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                found = os.waitpid(pid, 0)[1]
                status = found if pid == program else status

    def encode(value):
        """Plain values as JSON, other containers under their name. Raises TypeError for anything else."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, list):
            return [encode(v) for v in value]
        if isinstance(value, dict):
            return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
        for name, kinds in (("tuple", tuple), ("set", (set, frozenset))):
            if isinstance(value, kinds):
                return {name: [encode(v) for v in value]}
        raise TypeError(f"a {type(value).__name__} is no plain value")

    def decode(value):
        if isinstance(value, list):
            return [decode(v) for v in value]
        if isinstance(value, dict):
            ((name, items),) = value.items()
            kinds = {"dict": dict, "tuple": tuple, "set": set}
            return kinds[name](decode(v) for v in items)
        return value

    def run_job():
        os.setsid()
        limits, seconds = settings["limits"], int(settings["seconds"]) + 2
        for what, most in (
            (resource.RLIMIT_AS, limits["memory"]),
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_FSIZE, limits["file"]),
            (resource.RLIMIT_NPROC, limits["processes"]),
            (resource.RLIMIT_NOFILE, limits["files"]),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(what, (most, most))
        requests, mode = os.fdopen(os.dup(0), "rb"), settings["mode"]
        job = json.loads(requests.readline())
        __builtins__.exit = __builtins__.quit = sys.exit  # programs use them; the site module, left out, defines them
        scope = {"__name__": "__main__" if mode == "program" else "solution"}
        if mode == "program":
            file = os.memfd_create("stdin")
            os.write(file, job["stdin"].encode())
            os.lseek(file, 0, os.SEEK_SET)
            os.dup2(file, 0)
            exec(compile(job["code"], "program", "exec"), scope)
            return
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(null, 0)
        os.dup2(null, 1)

        def say(record):
            answers.write(json.dumps(record) + "\n")
            answers.flush()

        def candidate(*arguments, **named):
            """The function under test, as the test sees it: it runs in another sandbox."""
            say({"call": [encode(list(arguments)), encode(named)]})
            reply = json.loads(requests.readline())
            if "error" in reply:
                kind = getattr(__builtins__, str(reply["error"]), None)
                raise kind() if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError()
            return decode(reply["value"])

        if mode == "judge":
            try:
                exec(compile(job["prefix"], "prefix", "exec"), scope)
                scope[job["entry_point"]] = candidate
                exec(compile(job["code"], "test", "exec"), scope)
                if "check" in scope:
                    scope["check"](candidate)
                say({"verdict": True})
            except BaseException as error:
                say({"verdict": False, "error": repr(error)[:500]})
            return
        exec(compile(job["code"], "program", "exec"), scope)
        for line in requests:
            try:
                arguments, named = (decode(part) for part in json.loads(line)["call"])
                say({"value": encode(scope[job["entry_point"]](*arguments, **named))})
            except BaseException as error:
                say({"error": type(error).__name__})

    try:
        if settings["namespaces"]:
            isolate()
            keeper = os.fork()  # the first process in the new pid namespace: when it ends the kernel kills the others
            if keeper:
                os._exit(os.waitstatus_to_exitcode(os.waitpid(keeper, 0)[1]) & 255)
            drop_rights()
        else:
            kernel("prctl", 36, 1, 0, 0, 0)  # orphans become its children
    except OSError as error:
        os.write(1, f"{error}".encode())
        os._exit(97)
    program = os.fork()
    if program == 0:
        run_job()
        return
    events = select.poll()
    events.register(os.pidfd_open(program), select.POLLIN)
    events.register(0, 0)  # nothing but the end of the pipe: the parent closed it, or died
    events.poll(settings["seconds"] * 1000)
    os._exit(os.waitstatus_to_exitcode(kill_all()) & 255)


_CHILD = inspect.getsource(_sandboxed) + "\n_sandboxed()\n"
_allow_unsafe = False  # in a worker: what --allow_unsafe_code_exec says


class Sandbox:
    """One job in a fresh process that sees neither this one's environment, files, network nor processes.

    Use as a context manager: leaving it kills whatever the job started. ``namespaces=False`` leaves only the limits.
    """

    def __init__(self, mode: str, job: dict, seconds: float, namespaces: bool | None = None):
        if namespaces is None:
            namespaces = not namespaces_refused()
            if not namespaces and not _allow_unsafe:
                raise RuntimeError(f"no sandbox for code here ({namespaces_refused()}) and no --allow_unsafe_code_exec")
        self.end = time.monotonic() + seconds
        self.home, self.left = tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True), b""
        library = Path(os.__file__).parent
        readable = [str(library), "/usr/lib", "/usr/lib64", "/lib", "/lib64"]
        settings = {"mode": mode, "namespaces": namespaces, "seconds": seconds, "limits": CODE_LIMITS}
        settings |= {"root": self.home.name, "readable": [p for p in readable if Path(p).exists()]}
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd=self.home.name,
            start_new_session=True,
            bufsize=0,
        )
        os.set_blocking(self.process.stdin.fileno(), False)
        self.send(json.dumps(job).encode() + b"\n")

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()  # the keeper sees it and kills
        try:
            self.process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # and the keeper dies with the launcher
            self.process.wait()
        self.process.stdout.close()
        self.home.cleanup()

    def send(self, data: bytes) -> None:
        """Write all of it, or as much as the process takes before its time is up or it ends."""
        data = memoryview(data)
        while data and select.select([], [self.process.stdin], [], max(0.0, self.end - time.monotonic()))[1]:
            try:
                data = data[os.write(self.process.stdin.fileno(), data) :]
            except BrokenPipeError:
                return

    def read(self, line: bool) -> bytes | None:
        """One line without its end, or all there is to come. None when time is up, it is too much, or no line came."""
        while not (line and b"\n" in self.left):
            ready = select.select([self.process.stdout], [], [], max(0.0, self.end - time.monotonic()))[0]
            if not ready or len(self.left) > MOST_OUTPUT:
                return None
            more = os.read(self.process.stdout.fileno(), 65536)
            if not more:
                return None if line else self.left
            self.left += more
        found, _, self.left = self.left.partition(b"\n")
        return found


@functools.lru_cache
def namespaces_refused() -> str:
    """Why the kernel gives this process no namespaces; "" where it does."""
    with Sandbox("program", {"code": "print(6 * 7)", "stdin": ""}, 20.0, namespaces=True) as sandbox:
        said = sandbox.read(line=False)
    return "" if said == b"42\n" else (said or b"it does not start").decode(errors="replace")


def _called(tree: ast.AST) -> list[str]:
    """Names of the plain functions that are called somewhere in a tree, Python's own aside."""
    calls = [n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return [name for name in calls if not hasattr(builtins, name)]


def _code_tests(truth: str, row: dict) -> tuple[str, list[dict] | str]:
    """(name of the function under test or "", tests). Raises ValueError or SyntaxError where it finds no tests.

    Tests are a list of {"input", "output"} or {"stdin", "stdout"}, or Python text. The name is the row's
    ``entry_point``, or the first function that an assert calls.
    """
    tests = json.loads(truth) if truth.strip().startswith(("[", "{")) else truth
    if isinstance(tests, list) and tests and all(isinstance(t, str) for t in tests):  # asserts, one by one
        tests = "\n".join(tests)
    entry = row.get("entry_point") or ""
    if isinstance(tests, str):
        asserts = [node for node in ast.walk(ast.parse(tests)) if isinstance(node, ast.Assert)]
        entry = entry or next((name for node in asserts for name in _called(node)), "")
        if asserts and entry:
            return entry, tests
        raise ValueError("Python tests need an assert, and a column entry_point where it calls no function by name")
    for keys in ({"input", "output"}, {"stdin", "stdout"}):
        if tests and isinstance(tests, list) and all(isinstance(t, dict) and keys <= t.keys() for t in tests):
            if "input" in keys and not entry:
                raise ValueError("tests of a function need a column entry_point with its name")
            return entry, tests
    raise ValueError('tests must all be {"input": [...], "output": ...}, or all {"stdin": ..., "stdout": ...}')


def _tagged(value):
    """A value of a JSON test in the form that goes into a sandbox: objects under the name dict."""
    if isinstance(value, dict):
        return {"dict": [[k, _tagged(v)] for k, v in value.items()]}
    return [_tagged(v) for v in value] if isinstance(value, list) else value


def _plain(value):
    """A value from a sandbox as JSON would have it: tuples are lists, keys are text. Raises ValueError for a set."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        ((kind, items),) = value.items()
        if kind == "dict":
            return {str(_plain(k)): _plain(v) for k, v in items}
        if kind != "tuple":
            raise ValueError(f"a {kind} has no JSON")
        return [_plain(v) for v in items]
    return value


def _same(a, b) -> bool:
    """Equality of plain values; floats to 9 digits, and True is not 1."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, float) and isinstance(b, int | float) and not isinstance(b, bool):
        return a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    return (type(a) is type(b) and a == b) or (isinstance(b, float) and type(a) is int and _same(b, a))


def _returns(program: str, tests: list[dict], entry: str, seconds: float) -> bool:
    """Whether the function returns each output for its input. The process gets the inputs, never the outputs."""
    with Sandbox("calls", {"code": program, "entry_point": entry}, seconds) as sandbox:
        for test in tests:
            inputs = test["input"] if isinstance(test["input"], list) else [test["input"]]
            sandbox.send(json.dumps({"call": [_tagged(inputs), {"dict": []}]}).encode() + b"\n")
            reply = sandbox.read(line=True)
            try:
                if reply is None or not _same(_plain(json.loads(reply)["value"]), test["output"]):
                    return False
            except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
                return False
    return True


def _prints(program: str, tests: list[dict], seconds: float) -> bool:
    """Whether the program ends well and prints each stdout for its stdin, line by line, spacing aside."""
    lines = lambda text: [line.split() for line in text.strip().splitlines()]  # noqa: E731
    for test in tests:
        with Sandbox("program", {"code": program, "stdin": test["stdin"]}, seconds) as sandbox:
            said = sandbox.read(line=False)
            if said is None or lines(said.decode(errors="replace")) != lines(test["stdout"]):
                return False
        if sandbox.process.returncode != 0:
            return False
    return True


def _passes(program: str, test: str, prefix: str, entry: str, seconds: float) -> bool:
    """Whether test code accepts the program. Test and program run in two sandboxes that exchange plain values only."""
    judge = Sandbox("judge", {"code": test, "prefix": prefix, "entry_point": entry}, seconds)
    with judge, Sandbox("calls", {"code": program, "entry_point": entry}, seconds) as sandbox:
        while (said := judge.read(line=True)) is not None:
            record = json.loads(said)
            if "verdict" in record:
                return record["verdict"]
            sandbox.send(said + b"\n")
            reply = sandbox.read(line=True)
            if reply is None:
                return False
            judge.send(reply + b"\n")
    return False


def code(response: str, truth: str, row: dict) -> Reward:
    """1 when the program passes all tests of the truth: the last fenced block of the response, or all of it.

    Tests are JSON, ``[{"input": [1, 2], "output": 3}]`` for the function named by the row's ``entry_point`` or
    ``[{"stdin": "1 2", "stdout": "3"}]`` for a whole program, or Python: asserts, or ``check(candidate)`` as in
    HumanEval, where the row's ``prompt`` comes before the program. The standard library is all there is.
    """
    text = after_thinking(response)
    blocks = re.findall(r"```(?:python3?|py)?[ \t]*\n(.*?)```", text, re.DOTALL | re.IGNORECASE)
    program, prefix, seconds = blocks[-1] if blocks else text, "", float(row.get("time_limit") or CODE_SECONDS)
    try:
        entry, tests = _code_tests(truth, row)
    except (ValueError, SyntaxError, RecursionError) as error:
        return Reward(0.0, status="unscorable", detail=f"{type(error).__name__}: {error}")
    if isinstance(tests, str) and isinstance(row.get("prompt"), str):
        try:
            ast.parse(row["prompt"])
            prefix = row["prompt"]
        except SyntaxError:  # a question in words
            prefix = ""
    if not program.strip() or len(program) > 100_000:
        return _judged(False, None)
    if isinstance(tests, str):
        correct = _passes(prefix + program, tests, prefix, entry, seconds)
    elif "stdin" in tests[0]:
        correct = _prints(program, tests, seconds)
    else:
        correct = _returns(program, tests, entry, seconds)
    return _judged(correct, program)


# ---------------------------------------------------------------------------------------- by name, and several of them

VERIFIERS: dict[str, Verifier] = {
    "last_number": last_number,
    "exact": exact,
    "gsm8k": gsm8k,
    "math": math_,
    "countdown": countdown,
    "reasoning_gym": reasoning_gym_,
    "format": format_,
    "ifeval": ifeval,
    "code": code,
}


def find_verifier(name: str) -> Verifier:
    """A verifier by its name here, or from a file of the user's: ``path/to/file.py:function``.

    Raises ValueError, saying what there is, when no such verifier, file or function exists.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    path, _, function = name.rpartition(":")
    if not path:
        raise ValueError(f"no verifier {name!r}; known: {', '.join(VERIFIERS)}, or path/to/file.py:function")
    if not Path(path).is_file():
        raise ValueError(f"no file {path!r} to take the verifier {function!r} from")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file does wrong
        raise ValueError(f"the file {path!r} does not load: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, function, None)):
        raise ValueError(f"the file {path!r} has no function {function!r}")
    return getattr(module, function)


def names_of(verifier: str) -> list[str]:
    """The verifiers of a row: one name, or several with commas between."""
    return [name.strip() for name in verifier.split(",")]


def parse_weights(weights: tuple[str, ...]) -> dict[str, float | None]:
    """("math=1", "format=gate") -> {"math": 1.0, "format": None}. Raises ValueError for anything else."""
    found: dict[str, float | None] = {}
    for text in weights:
        name, equals, value = text.rpartition("=")
        try:
            found[name] = None if value == "gate" else float(value)
        except ValueError:
            equals = ""
        if not equals or not math.isfinite(found[name] or 0.0):
            raise ValueError(f"{text!r} is not NAME=NUMBER or NAME=gate")
    return found


def combine(found: dict[str, Reward], weights: dict[str, float | None]) -> Reward:
    """Sum of weight x score; 0 unless every gate (weight None) scored 1. A weight that is not given is 1.

    Parts: those of each verifier, the first to give one wins, and with several verifiers each one's score by its name.
    """
    gates = [name for name in found if weights.get(name, 1.0) is None]
    passed = all(found[name].score >= 1 for name in gates)
    score = sum(weights.get(name, 1.0) * r.score for name, r in found.items() if name not in gates) if passed else 0.0
    parts = {name: r.score for name, r in found.items()} if len(found) > 1 else {}
    for reward in reversed(found.values()):
        parts |= reward.parts
    if gates:
        parts["gate"] = float(passed)
    bad = next((r for r in found.values() if r.status != "ok"), None)
    first = next(iter(found.values()))
    status, detail = ("ok", first.detail) if bad is None else (bad.status, bad.detail)
    return Reward(score, parts, status, first.extracted, detail)


def truth_error(verifier: str, truth: str, row: dict) -> str:
    """What is wrong with a truth, in the eyes of its own verifiers; "" if nothing is.

    A truth that can be said as a response is scored as one; of tests and constraints the form is checked.
    """
    for name in names_of(verifier):
        try:
            if name == "code":
                _code_tests(truth, row)
                continue
            elif name == "ifeval":
                _constraints(truth, row)
                continue
            elif name == "countdown":
                if (reward := countdown("", truth, row)).status != "ok":
                    return reward.detail
                given = json.loads(truth) if truth.strip().startswith("{") else {"target": truth}
                gym = "metadata" in row and "target" in row["metadata"]
                Fraction(str(row["metadata"]["target"] if gym else given["target"]).strip())
                continue
            elif name == "format" or name not in VERIFIERS:
                continue
            says = {"math": f"\\boxed{{{truth}}}", "reasoning_gym": f"<answer>{truth}</answer>"}
            if name == "math" and last_boxed(truth) is not None:
                says["math"] = truth
            reward = VERIFIERS[name](says.get(name, truth), truth, row)
            if reward.score < 1:
                return reward.detail or f"{name} rejects the truth itself"
        except (ArithmeticError, ValueError, SyntaxError, KeyError, TypeError, RecursionError) as error:
            return f"{name} rejects the truth itself ({type(error).__name__}: {error})"
    return ""


# ------------------------------------------------------------------------------------------------ the worker processes

_verifiers: dict[str, Verifier] = {}  # one per worker process: a file is loaded once


def _start_worker(verifiers: list[str], allow_unsafe: bool, memory: int) -> None:
    """In a new worker: its memory limit, and what takes long to import, so that no sample's time pays for it."""
    import resource

    global _allow_unsafe
    _allow_unsafe = allow_unsafe
    sys.set_int_max_str_digits(0)  # what takes too long is killed; an exception here would be taken for a bug
    if "math" in verifiers:
        _parse_math("1")
    if "reasoning_gym" in verifiers:
        importlib.import_module("reasoning_gym")
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _verify(names: list[str], weights: dict, response: str, truth: str, row: dict) -> Reward:
    found = {}
    for name in names:
        if name not in _verifiers:
            _verifiers[name] = find_verifier(name)
        try:
            found[name] = _verifiers[name](response, truth, row)
        except (MemoryError, RecursionError):  # the response's doing, as a rule
            found[name] = Reward(0.0, status="crash", detail=traceback.format_exc(limit=-4))
        if not isinstance(found[name], Reward):
            raise TypeError(f"the verifier {name!r} returned {type(found[name]).__name__}, not a rewards.Reward")
    return found[names[0]] if len(names) == 1 and names[0] not in weights else combine(found, weights)


class RewardPool:
    """Worker processes that each verify one sample at a time.

    Workers are started by spawn, never by fork: the parent holds threads, an engine and maybe a CUDA context.
    ``verifiers`` says which will be needed, so that their libraries are there before the first sample; ``weights`` is
    for ``combine``; ``memory`` is each worker's limit of address space in bytes.
    """

    def __init__(
        self,
        workers: int,
        timeout: float,
        verifiers: set[str] | tuple[str, ...] = (),
        weights: dict[str, float | None] | None = None,
        allow_unsafe: bool = False,
        memory: int = 4 * 2**30,
    ):
        import multiprocessing

        from pebble import ProcessPool

        self.timeout, self.weights, self.shown = timeout, weights or {}, set()
        self.pool = ProcessPool(
            max_workers=workers,
            context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=[sorted({n for v in verifiers for n in names_of(v)}), allow_unsafe, memory],
        )
        for _ in range(workers):  # start them while the models load
            self.pool.schedule(find_verifier, args=["exact"])

    def submit(self, verifier: str, response: str, truth: str, row: dict):
        """Start verifying one response; the returned future goes to ``result``."""
        arguments = [names_of(verifier), self.weights, response, truth, row]
        future = self.pool.schedule(_verify, args=arguments, timeout=self.timeout)
        future.about = f"{verifier} on {response[:200]!r}"
        return future

    def result(self, future) -> Reward:
        """Wait for one Reward. Raises what the verifier raised, with the worker's traceback in the message."""
        from pebble import ProcessExpired

        try:
            reward = future.result()
        except TimeoutError:
            reward = Reward(0.0, status="timeout", detail=f"killed after {self.timeout:g} s (--reward_timeout)")
        except ProcessExpired as error:
            reward = Reward(0.0, status="crash", detail=f"the worker died: {error}, exit code {error.exitcode}")
        except BrokenProcessPool as error:
            raise RuntimeError("the verifier processes do not start (is the script guarded by __main__?)") from error
        except Exception as error:
            raise RuntimeError(f"a verifier raised in its worker:\n{getattr(error, 'traceback', error)}") from error
        if reward.status not in ("ok", *self.shown):
            self.shown.add(reward.status)
            print(f"warning: first {reward.status} of a verification: {future.about}\n{reward.detail}", flush=True)
        return reward

    def close(self) -> None:
        """Kill the workers, whatever they are doing; a sandbox dies with the worker that started it."""
        self.pool.stop()
        self.pool.join()


# ----------------------------------------------------------------------------------------------------------- shaping


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """DAPO's soft penalty (arXiv 2503.14476, equation 13): 0 up to ``longest - buffer`` tokens, then linearly to 1."""
    return min(1.0, max(0.0, length - (longest - buffer)) / buffer) if buffer > 0 else 0.0


def repetition(ids: list[int], n: int = 8) -> float:
    """Share of the runs of ``n`` tokens that stood in the response before; 0 for fewer than two runs."""
    runs = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def shape_reward(sample, found: Reward, args) -> None:
    """What the verifier found, and the reward made of it: (score - bias) * scaling, truncation, penalties, clip."""
    cut = sample.finish_reason == "length"
    sample.score, sample.reward_parts, sample.reward_status = found.score, dict(found.parts), found.status
    sample.extracted = found.extracted
    if cut and args.mask_no_eos_with_zero:
        sample.score, sample.reward_parts["correct"] = 0.0, 0.0
    sample.reward = (sample.score - args.reward_bias) * args.reward_scaling - cut * args.non_stop_penalty
    sample.reward -= overlong_penalty(len(sample.response_ids), args.max_response_length, args.overlong_buffer)
    if args.repetition_penalty:
        sample.reward -= args.repetition_penalty * repetition(sample.response_ids)
    if args.max_reward_clip is not None:
        sample.reward = max(-args.max_reward_clip, min(args.max_reward_clip, sample.reward))


def explain_zeros(samples: list, problems: list, steps: int) -> str:
    """Help for a run whose scores have all been 0 for ``steps`` steps: what two samples said, and what was expected."""
    lines = [f"all scores of the last {steps} steps are 0. What was extracted, and what was expected:"]
    for s in samples[:: max(1, len(samples) - 1)][:2]:
        problem = problems[s.prompt_id]
        lines += [
            f"  prompt     {problem.messages[-1]['content'][-300:]!r}",
            f"  response   {s.response[-300:]!r} (ended by {s.finish_reason})",
            f"  extracted  {s.extracted[:200]!r} by {problem.verifier}, status {s.reward_status}",
            f"  expected   {problem.truth[:200]!r}",
        ]
    cut = sum(s.finish_reason == "length" for s in samples)
    lines.append(f"  {cut} of {len(samples)} samples were cut; see --max_response_length, --verifier, --system_prompt")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------- reward models


class RewardModel:
    """A classifier with one output (any ``AutoModelForSequenceClassification``) that scores whole conversations.

    It has its own tokenizer and chat template: text goes in, not the policy's ids. It lies in CPU memory between uses.
    Raises ValueError where the model has not exactly one output.
    """

    def __init__(self, name: str, token_budget: int, device, dtype):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self.tokenizer, self.device, self.budget = AutoTokenizer.from_pretrained(name), device, token_budget
        self.model = AutoModelForSequenceClassification.from_pretrained(name, dtype=dtype).eval().requires_grad_(False)
        if self.model.config.num_labels != 1:
            raise ValueError(f"{name} has {self.model.config.num_labels} outputs; a reward model has one")

    def _ids(self, messages: list[dict[str, str]], response: str) -> list[int]:
        messages = [*messages, {"role": "assistant", "content": response}]
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer("\n\n".join(m["content"] for m in messages))["input_ids"]
        return ids[-getattr(self.model.config, "max_position_embeddings", len(ids)) :]  # the end is what is scored

    def score(self, conversations: list[tuple[list[dict[str, str]], str]]) -> list[float]:
        """(messages, response) -> score, each as if it were alone. Raises RuntimeError when one is not finite."""
        import torch

        rows = [self._ids(messages, response) for messages, response in conversations]
        used, own = {i for row in rows for i in row}, self.tokenizer.pad_token_id
        # Decoders score the last token that is not padding; where the padding is also the end of a text (pad = eos)
        # they would score the token before it, so padding is an id that no text has.
        free = (i for i in range(self.model.config.vocab_size) if i not in used)
        pad = own if own is not None and own not in used else next(free)
        self.model.config.get_text_config().pad_token_id = self.model.config.pad_token_id = pad
        scores = [0.0] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        self.model.to(self.device)
        with torch.no_grad():
            while order:
                count = 1
                while count < len(order) and (count + 1) * len(rows[order[count]]) <= self.budget:
                    count += 1
                batch, order = order[:count], order[count:]
                longest = len(rows[batch[-1]])
                ids_BT = torch.tensor([rows[i] + [pad] * (longest - len(rows[i])) for i in batch], device=self.device)
                mask_BT = torch.tensor(
                    [[1] * len(rows[i]) + [0] * (longest - len(rows[i])) for i in batch], device=self.device
                )
                found = self.model(input_ids=ids_BT, attention_mask=mask_BT).logits[:, 0].float().tolist()
                for i, value in zip(batch, found, strict=True):
                    scores[i] = value
        self.model.to("cpu")
        if not all(map(math.isfinite, scores)):
            raise RuntimeError("the reward model's scores are not finite")
        return scores

    def add(self, found: list[Reward], conversations: list, weights: dict[str, float | None]) -> list[Reward]:
        """The verifiers' rewards plus this model's score times its weight ``reward_model``; not past a shut gate."""
        weight = weights.get("reward_model", 1.0)
        return [
            Reward(
                r.score + (weight * s if r.parts.get("gate", 1.0) else 0.0),
                {**r.parts, "reward_model": s},
                *(r.status, r.extracted, r.detail),
            )
            for r, s in zip(found, self.score(conversations) if found else [], strict=True)
        ]

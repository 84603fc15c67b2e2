"""Verifiers, the pool of processes that runs them, the sandbox for code, shaping, and reward models.

A verifier is a plain function ``(response, truth, row) -> Reward``: ``response`` is the decoded text of one sample,
``truth`` the answer in the data set, ``row`` the whole row. It runs in a worker process that is killed at the
time-out, so a response that sends a parser into an endless loop costs one sample and not the night. What happens then:

    returns a Reward       used as it is; status "unscorable" where the row cannot be scored, score 0, counted
    runs out of time       score 0, status "timeout", counted in reward/timeouts
    kills its process      score 0, status "crash", counted in reward/errors; so does running out of memory
    raises                 a bug in the verifier: the run ends with the worker's traceback

docs/rewards.md lists the verifiers, the columns they read, and what is guaranteed. Importing this imports no torch.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import math
import operator
import os
import re
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path


@dataclass(frozen=True)
class Reward:
    """What a verifier found: ``score`` (what is optimised), ``parts`` for the log (``correct``, ``format``: 0 to 1).

    ``steps``, for ppo.py --dense_reward: (number of characters, score of the response up to there), in rising order.
    For people: ``extracted``, what was taken for the answer ("" if nothing was), ``detail``, why there is no score.
    """

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    status: str = "ok"  # or timeout, crash, unscorable
    steps: tuple[tuple[int, float], ...] = ()
    extracted: str = field(default="", compare=False)
    detail: str = field(default="", compare=False)


Verifier = Callable[[str, str, dict], Reward]

# ------------------------------------------------------------------------------------------------ finding the answer

# A minus is a sign only where no number or bracket stands before it: "10-4" ends in 4, "= -4" in -4. A comma belongs
# to a number only between groups of three digits, a dot only between digits.
NUMBER = re.compile(
    r"(?<![0-9])(?<![0-9]\.)(?:(?<![0-9)\]])[-\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)
NEGATED = re.compile(r"(?:\bnot|n't|n\u2019t|\bnever)\s*[:$*]*\s*$", re.IGNORECASE)
FINAL_ANSWER = re.compile(r"(?:####|\banswer\b[ \t]*(?:is\b[ \t]*:?|:|=))[ \t]*([^\n]*)", re.IGNORECASE)
LONGEST_ANSWER = 1000  # characters; what is longer is no answer, and parsers take more than linear time


def _number(text: str) -> Decimal:
    return Decimal(text.strip().replace(",", "").replace("\u2212", "-"))


def after_thinking(response: str) -> str:
    """What follows the last ``</think>``; nothing when a ``<think>`` is still open: a thought is not an answer."""
    answer = response.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}`` or ``\fbox{...}``, braces balanced; None if there is none or it is open."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    first, depth = text.index("{", start) + 1, 1
    for brace in re.finditer(r"\\.|[{}]", text[first : first + LONGEST_ANSWER], re.DOTALL):  # \{ is no brace
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[first : first + brace.start()].strip()
    return None


def final_answer(text: str) -> str | None:
    r"""The last box; else what follows the last "answer is", "answer:" or "####" on its line; else None.

    Never the whole text: somewhere in it any number can be found. Of several answers the last counts.
    """
    if "\\boxed" in text or "\\fbox" in text:
        return last_boxed(text) or None
    found = FINAL_ANSWER.findall(text)
    answer = found[-1].strip().strip("*$ ").rstrip(".").strip("*$ ") if found else ""
    return answer if 0 < len(answer) <= LONGEST_ANSWER and not re.match(r"not\b", answer, re.IGNORECASE) else None


def tagged_answer(text: str) -> str | None:
    """What stands in the last ``<answer>...</answer>``, else the final answer."""
    head, closed, _ = text.rpartition("</answer>")
    _, opened, inside = head.rpartition("<answer>")
    return inside.strip() if closed and opened and inside.strip() else final_answer(text)


def _judged(score: float, extracted: str | None, **more: float) -> Reward:
    """A Reward of a verifier that looks for one answer: part ``format`` says whether there was one."""
    parts = {"correct": float(score == 1), "format": float(extracted is not None), **more}
    return Reward(float(score), parts, extracted=(extracted or "")[:LONGEST_ANSWER])


# ---------------------------------------------------------------------------------------------------------- verifiers


def last_number(response: str, truth: str, row: dict) -> Reward:
    """1 when the last number of the response equals the truth ("1,024" equals "1024", "7.0" equals "7").

    A number that is only named to be denied ("not 42") is no answer.
    """
    text = after_thinking(response)
    last = next(iter(collections.deque(NUMBER.finditer(text), maxlen=1)), None)
    if last is None or NEGATED.search(text, max(0, last.start() - 20), last.start()):
        return _judged(0, None)
    return _judged(_number(last[0]) == _number(truth), last[0])


def exact(response: str, truth: str, row: dict) -> Reward:
    """1 when the response is the truth, white space at both ends aside."""
    correct = float(response.strip() == truth.strip())
    return Reward(correct, {"correct": correct}, extracted=response.strip()[:LONGEST_ANSWER])


def gsm8k(response: str, truth: str, row: dict) -> Reward:
    """1 when the number after the last "####", or without one the last number, equals that of the truth.

    The truth is a number or GSM8K's whole solution, which ends in "#### 1,234".
    """
    _, marked, said = after_thinking(response).rpartition("####")
    number = NUMBER.search(said.partition("\n")[0]) if marked else None
    return last_number(number[0] if number else "" if marked else response, truth.rpartition("####")[2], row)


LATEX_DECORATION = [  # (pattern, what stands in its place): what does not change the meaning of an answer
    (r"\\(?:left|right|displaystyle|limits|[,;:! ])|\\?\$|~", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1"),
    (r"\\frac\s*([0-9])\s*([0-9])(?![0-9])", r"\\frac{\1}{\2}"),
    (r"\\sqrt\s*([0-9])(?![0-9])", r"\\sqrt{\1}"),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\%|%|\s+", ""),
    (r"^([-+]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?)$", lambda match: match[0].replace(",", "")),
]


def _plain_latex(text: str) -> str:
    text = text.strip().rstrip(".")
    for pattern, plain in LATEX_DECORATION:
        text = re.sub(pattern, plain, text)
    return text.lower() if text.isalpha() else text


def _parse_math(latex: str) -> list:
    """LaTeX as math-verify reads it: sympy expressions, possibly none. Its own time-outs are signals and stay off."""
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # else it warns that the signals are off
    return parse(f"\\boxed{{{latex}}}", [LatexExtractionConfig()], parsing_timeout=None)


def math_(response: str, truth: str, row: dict) -> Reward:
    """1 when the final answer is the truth as text, LaTeX's decoration aside, or equal to it by math-verify."""
    answer = final_answer(after_thinking(response))
    if answer is None or any(c.isdigit() and not c.isascii() for c in answer):
        return _judged(0, None)
    plain, wanted = _plain_latex(answer), _plain_latex(last_boxed(truth) or truth)
    if not plain or plain == wanted:
        return _judged(plain == wanted != "", answer)
    if "=" in plain and "=" not in wanted and not re.match(r"[A-Za-z](?:\([A-Za-z]\))?=", plain):
        return _judged(0, answer)  # an equation where a value is asked for; "x = 5" and "f(x) = 5" name one
    from math_verify import verify

    gold, found = _parse_math(wanted), _parse_math(plain)
    return _judged(bool(gold and found) and verify(gold, found, timeout_seconds=None), answer)


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _value(node: ast.AST, used: list[int]) -> Fraction:
    """Exact value of an expression of + - * / and whole numbers, which go to ``used``. Raises ValueError otherwise."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("only + - * / and whole numbers")


def countdown(response: str, truth: str, row: dict) -> Reward:
    """1 when the answer's expression uses each number of the row exactly once and comes to the target, exactly.

    The truth is the target, or ``{"target": ..., "numbers": [...]}``; else the numbers are the row's ``nums`` or
    ``numbers``. "= 24" may follow the expression.
    """
    given = json.loads(truth) if truth.strip().startswith("{") else {**row, "target": truth}
    numbers, target = given.get("numbers", given.get("nums")), Fraction(str(given["target"]).strip())
    if numbers is None:
        return Reward(0.0, status="unscorable", detail="no numbers in the truth, nor a column numbers or nums")
    answer = tagged_answer(after_thinking(response))
    if answer is None or len(answer) > LONGEST_ANSWER:
        return _judged(0, None)
    plain, used = answer, []
    for sign, other in (("*", r"\\times|\\cdot|\u00d7"), ("/", r"\\div|\u00f7"), ("-", "\u2212")):
        plain = re.sub(other, sign, plain)
    expression, equals, claimed = plain.partition("=")
    try:
        if not re.fullmatch(r"[0-9+\-*/() ]+", expression):
            raise ValueError("other characters")
        value = _value(ast.parse(expression.strip(), mode="eval").body, used)
        correct = value == target and (not equals or Fraction(claimed.strip()) == value)
    except (ValueError, SyntaxError, RecursionError, MemoryError, ZeroDivisionError):
        correct = False
    return _judged(correct and sorted(used) == sorted(map(int, numbers)), answer)


# Some of reasoning-gym's scorers pass the answer to eval, directly or inside sympy's parse_expr. What they may get: a
# list without calls, or a formula of these names alone. Anything else scores 0 before it gets there.
LIST = r"[^(]*"
FORMULA = r"(?:[0-9\s+\-*/^(),]|\.(?![^\W\d])|(?<!\w)(?:[a-zCXY]|sin|cos|tan|exp|log|sqrt|asin|acos|atan|pi|E)(?!\w))*"
GYM_ANSWERS = dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"), LIST)
GYM_ANSWERS |= dict.fromkeys(("simple_integration", "intermediate_integration", "polynomial_multiplication"), FORMULA)
GYM_ANSWERS |= dict.fromkeys(("puzzle24", "countdown"), FORMULA)


def reasoning_gym_(response: str, truth: str, row: dict) -> Reward:
    """The data set's own ``score_answer`` on the last ``<answer>``, or else the final answer, of the response.

    Only 1 counts as correct. A text that merely holds the truth gets 0, not the general scorer's consolation.
    """
    name, answer = (row.get("metadata") or {}).get("source_dataset"), tagged_answer(after_thinking(response))
    if name is None:
        return Reward(0.0, status="unscorable", detail="the row's column metadata names no source_dataset")
    if answer is None or len(answer) > 100 * LONGEST_ANSWER:
        return _judged(0, None)
    if not re.fullmatch(GYM_ANSWERS.get(name, r"(?s:.*)"), answer):
        return _judged(0, answer)
    import reasoning_gym

    score = float(reasoning_gym.get_score_answer_fn(name)(answer, entry={**row, "answer": truth}))
    return _judged(0 if not math.isfinite(score) or (score < 1 and truth in answer) else score, answer)


def format_(response: str, truth: str, row: dict) -> Reward:
    """1 for ``<think>...</think><answer>...</answer>``: each tag once, in this order, neither empty, nothing around.

    The opening ``<think>`` may be missing: many chat templates write it into the prompt. The truth is not looked at.
    """
    text = "<think>" + response.strip().removeprefix("<think>")
    between = re.split(r"(</?(?:think|answer)>)", text)
    good = between[1::2] == ["<think>", "</think>", "<answer>", "</answer>"]
    good = good and [bool(part.strip()) for part in between[::2]] == [False, True, False, True, False]
    return Reward(float(good), {"format": float(good)}, extracted=response.strip()[:LONGEST_ANSWER])


# ------------------------------------------------------------------------------- constraints, under the names of IFEval


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(re.sub(r"^```(?:json)?\s*|\s*```$", "", text)), dict | list)
    except (ValueError, RecursionError):
        return False


def _related(count: int, a: dict, wanted: str) -> bool:
    return {"less than": count < a[wanted], "at least": count >= a[wanted]}[a.get("relation") or "at least"]


def _times(text: str, word: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


CONSTRAINTS: dict[str, Callable[[str, dict], bool]] = {  # name -> function(text, its arguments in the row) -> bool
    "keywords:existence": lambda t, a: all(_times(t, w) for w in a["keywords"]),
    "keywords:forbidden_words": lambda t, a: not any(_times(t, w) for w in a["forbidden_words"]),
    "keywords:frequency": lambda t, a: _related(_times(t, a["keyword"]), a, "frequency"),
    "length_constraints:number_words": lambda t, a: _related(len(re.findall(r"\w+(?:['-]\w+)*", t)), a, "num_words"),
    "detectable_format:json_format": lambda t, a: _is_json(t),
    "change_case:english_capital": lambda t, a: t.isupper(),
    "change_case:english_lowercase": lambda t, a: t.islower(),
    "startend:end_checker": lambda t, a: t.lower().endswith(a["end_phrase"].strip().lower()),
    "punctuation:no_comma": lambda t, a: "," not in t,
}


def ifeval(response: str, truth: str, row: dict) -> Reward:
    """1 when a response that says something keeps every constraint; part ``constraints``: the share that it keeps.

    They are the truth as JSON, ``{"instruction_id_list": [...], "kwargs": [...]}``, or the columns of these names.
    """
    text = after_thinking(response).strip()
    try:
        given = json.loads(truth) if truth.strip().startswith("{") else row
        names, arguments = given["instruction_id_list"], given["kwargs"]
        kept = [CONSTRAINTS[name](text, a or {}) for name, a in zip(names, arguments, strict=True)]
        share = sum(kept) / len(kept)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        return Reward(0.0, status="unscorable", detail=f"constraints: {type(error).__name__}: {error}")
    return _judged(share == 1 and re.search(r"\w", text) is not None, text or None, constraints=share)


# ----------------------------------------------------------------------------------- the sandbox for models' programs

CODE_SECONDS = 5.0  # of wall time for one program; a row's column time_limit changes it
CODE_LIMITS = {"AS": 2**30, "FSIZE": 2**22, "NPROC": 16, "NOFILE": 64, "CORE": 0}  # RLIMIT_*: bytes, counts
MOST_SAID = CODE_LIMITS["FSIZE"]  # bytes of one value
allow_unsafe = False  # in a worker: what --allow_unsafe_code_exec says


def _encode(value):
    """A plain value for JSON: tuples, sets and dicts under their name. Raises TypeError for any other object."""
    for kind in (tuple, set, dict):
        if isinstance(value, kind):
            return {kind.__name__: [_encode(v) for v in (value.items() if kind is dict else value)]}
    if isinstance(value, list):
        return [_encode(v) for v in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a {type(value).__name__} is no plain value")


def _decode(value):
    if isinstance(value, dict):
        ((kind, items),) = value.items()
        return {"tuple": tuple, "set": set, "dict": dict}[kind](_decode(v) for v in items)
    return [_decode(v) for v in value] if isinstance(value, list) else value


def _sandboxed() -> None:
    """The program of a sandbox's two processes: its source is what ``python -I -S -c`` gets.

    The launcher takes its own user and process namespaces, waits for the end, the time-out or its parent's death, and
    kills everything. Its child, process 1 in there, goes into an empty root with nothing but the standard library
    (read-only), an empty network and no rights, takes the limits upon itself, and runs the job by its mode:

        program   stdin is the job's text, stdout the parent's file
        calls     for each line with arguments from the channel, a line {"value": ...} or {"error": name} back
        judge     a test's check(candidate); the candidate's arguments go out and its value comes back as such lines
    """
    import ctypes
    import json
    import os
    import resource
    import select
    import signal
    import sys

    settings = json.loads(sys.argv[1])
    channel, null = os.fdopen(settings["channel"], "rb"), os.open("/dev/null", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)

    def say(text):
        os.write(channel.fileno(), text.encode() + b"\n")

    def kernel(name, *arguments):
        """A call of libc that returns 0 or raises."""
        if getattr(libc, name)(*(a.encode() if isinstance(a, str) else a for a in arguments)) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    def children():
        with open(f"/proc/self/task/{os.getpid()}/children") as f:
            return [int(pid) for pid in f.read().split()]

    def isolate():
        kernel("unshare", 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000)  # mounts, network, ipc, host name
        with open("/proc/sys/user/max_user_namespaces", "w") as f:  # no further ones, where it would be root again
            f.write("0")
        root = os.getcwd()
        kernel("mount", "tmpfs", root, "tmpfs", 0, "size=32m,nr_inodes=4096,mode=755")
        for path in settings["readable"]:
            if os.path.exists(path) and not os.path.exists(root + path):
                os.makedirs(root + path)
                kernel("mount", path, root + path, None, 0x1000 | 0x4000, None)  # bind, recursive
                kernel("syscall", 442, -100, root + path, 0x8000, (ctypes.c_uint64 * 4)(1), 32)  # all of it read-only
        os.mkdir(root + "/tmp")
        os.chmod(root + "/tmp", 0o1777)
        os.chdir(root)
        kernel("pivot_root", ".", ".")
        kernel("umount2", ".", 2)
        os.chdir("/tmp")
        os.setresgid(*[settings["user"]] * 3)
        os.setresuid(*[settings["user"]] * 3)
        kernel("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
        kernel("prctl", 38, 1, 0, 0, 0)  # no new privileges

    def run(mode, entry_point, code, text):
        stdin = os.memfd_create("stdin")
        os.write(stdin, text.encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        os.dup2(stdin, 0)
        for name, most in settings["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        if mode != "program":
            os.dup2(null, 1)
        say("ready")
        __builtins__.exit = __builtins__.quit = sys.exit  # programs use them; the site module, left out, defines them
        scope = {"__name__": "__main__" if mode == "program" else "solution"}
        exec(compile(code, mode, "exec"), scope)

        def candidate(*arguments):
            """The function under test, as the test sees it: it runs in another sandbox. KeyError where it raised."""
            say(json.dumps(_encode(arguments)))
            return _decode(json.loads(channel.readline())["value"])

        if mode == "judge":
            scope["check"](candidate)
        for line in channel if mode == "calls" else ():
            try:
                reply = {"value": _encode(scope[entry_point](*_decode(json.loads(line))))}
            except BaseException as error:
                reply = {"error": type(error).__name__}
            say(json.dumps(reply))

    program = None
    try:
        if settings["namespaces"]:
            kernel("unshare", 0x10000000 | 0x20000000)  # users, processes
        else:
            kernel("prctl", 36, 1, 0, 0, 0)  # orphans become this process's children
        say("alone")
        job = json.loads(sys.stdin.buffer.readline())
        program = os.fork()
        if program == 0:
            os.setsid()
            if settings["namespaces"]:
                isolate()
            kernel("prctl", 1, signal.SIGKILL, 0, 0, 0)  # dies with the launcher
    except OSError as error:
        say(str(error))
        os._exit(1)
    if program == 0:
        return run(**job)
    channel.close()
    events = select.poll()
    events.register(os.pidfd_open(program), select.POLLIN)
    events.register(0, 0)  # nothing but the end of the pipe: the parent closed it, or died
    events.poll(settings["seconds"] * 1000)
    status = 0
    while pids := children():  # orphans too; with process 1 the kernel kills its whole namespace
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            _, ended = os.waitpid(pid, 0)
            status = ended if pid == program else status
    os._exit(os.waitstatus_to_exitcode(status) & 255)


_CHILD = "\n".join([*map(inspect.getsource, (_encode, _decode, _sandboxed)), "_sandboxed()"])


class Sandbox(contextlib.ExitStack):
    """One job in a fresh process that sees neither this one's environment, files, network nor processes.

    Use as a context manager: leaving it kills whatever the job started. ``namespaces=False`` leaves only the limits.
    Raises OSError where the kernel refuses.
    """

    def __init__(self, mode: str, code: str, seconds: float, entry_point="", text="", namespaces: bool | None = None):
        super().__init__()
        if namespaces is None:
            namespaces = not namespaces_refused()
            if not namespaces and not allow_unsafe:
                raise OSError(f"no sandbox for code here ({namespaces_refused()}) and no --allow_unsafe_code_exec")
        home = self.enter_context(tempfile.TemporaryDirectory(prefix="sandbox-"))
        self.output = self.enter_context(os.fdopen(os.memfd_create("output"), "rb"))
        self.channel, theirs = map(self.enter_context, socket.socketpair())
        self.replies, user = self.enter_context(self.channel.makefile("rb")), os.geteuid()
        settings = {"namespaces": namespaces, "seconds": seconds, "channel": theirs.fileno()}
        settings["limits"] = {**CODE_LIMITS, "CPU": int(seconds) + 2}
        settings["readable"] = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", os.path.dirname(os.__file__)]
        settings["user"] = int(user == 0)  # root would have no limit of processes, so it maps a second user, nobody
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={},
            cwd=home,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.callback(self.process.wait)
        self.callback(self.process.stdin.close)  # the launcher sees it and kills
        try:
            self._expect("alone")
            if namespaces:  # it may not say itself who is who in there
                for file, own in {"setgroups": None, "uid_map": user, "gid_map": os.getegid()}.items():
                    who = "deny" if own is None else f"0 {own} 1\n" + "1 65534 1\n" * (user == 0)
                    Path(f"/proc/{self.process.pid}/{file}").write_text(who)
            job = {"mode": mode, "code": code, "entry_point": entry_point, "text": text}
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self._expect("ready")
        except OSError:
            self.close()
            raise

    def _expect(self, word: str) -> None:
        if (said := self.replies.readline().decode().strip()) != word:
            raise OSError(said or "the sandbox does not start")

    def ask(self, line: bytes) -> bytes:
        """One line to the job, one line back; b"" once it has ended."""
        try:
            self.channel.sendall(line)
            return self.replies.readline(MOST_SAID)
        except OSError:
            return b""


@functools.lru_cache
def namespaces_refused() -> str:
    """Why the kernel gives this process no namespaces; "" where it does."""
    try:
        with Sandbox("program", "", 20.0, namespaces=True):
            return ""
    except OSError as error:
        return str(error)


def _same(a, b) -> bool:
    """Whether a program's value is that of a test in JSON: tuples are lists, keys are text, floats to 9 digits."""
    if isinstance(a, list | tuple) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        a = {str(k): v for k, v in a.items()}
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if {type(a), type(b)} in ({float}, {int, float}):
        return a == b or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)
    return type(a) is type(b) and a == b


def _returns(program: str, tests: list[dict], entry: str, seconds: float) -> bool:
    """Whether the function returns each output for its input. The process gets the inputs, never the outputs."""
    with Sandbox("calls", program, seconds, entry) as solution:
        for test in tests:
            reply = solution.ask(json.dumps(_encode(test["input"])).encode() + b"\n")
            try:
                if not _same(_decode(json.loads(reply)["value"]), test["output"]):
                    return False
            except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError):
                return False  # it raised, ended, or said what is no value
    return True


def _prints(program: str, tests: list[dict], entry: str, seconds: float) -> bool:
    """Whether the program ends well and prints each stdout for its stdin, line by line, spacing aside."""
    for test in tests:
        with Sandbox("program", program, seconds, text=test["stdin"]) as sandbox:
            ended = sandbox.process.wait()
            sandbox.output.seek(0)
            said = sandbox.output.read().decode(errors="replace")
        said, wanted = ([line.split() for line in text.strip().splitlines()] for text in (said, test["stdout"]))
        if ended != 0 or said != wanted:
            return False
    return True


def _passes(program: str, test: str, entry: str, seconds: float) -> bool:
    """Whether test code accepts the function. They run in two sandboxes that exchange plain values only."""
    with Sandbox("calls", program, seconds, entry) as solution, Sandbox("judge", test, seconds) as judge:
        question = judge.ask(b"")
        while question and (reply := solution.ask(question)):
            question = judge.ask(reply)
        return not question and judge.process.wait() == 0


def code(response: str, truth: str, row: dict) -> Reward:
    """1 when the program passes all tests of the truth: the last fenced block of the response, or all of it.

    Tests are JSON, ``[{"input": [1, 2], "output": 3}]`` for the function named by the row's ``entry_point`` or
    ``[{"stdin": "1 2", "stdout": "3"}]`` for a whole program, or Python, ``def check(candidate): ...`` as in
    HumanEval, where the row's ``prompt`` comes before the program. The standard library is all there is.
    """
    text, entry = after_thinking(response), row.get("entry_point")
    seconds = float(row.get("time_limit") or CODE_SECONDS)
    blocks = re.findall(r"```(?:python3?|py)?[ \t]*\n(.*?)```", text, re.DOTALL | re.IGNORECASE)
    program = blocks[-1] if blocks else text
    try:
        if "def check(" in truth:
            prompt = row.get("prompt", "")
            passes, program, tests = _passes, prompt + program, f"{prompt}\n{truth}"
            ast.parse(tests)
        else:
            tests = json.loads(truth)
            passes, keys = (_returns, {"input", "output"}) if "input" in tests[0] else (_prints, {"stdin", "stdout"})
            if not all(keys <= test.keys() for test in tests):
                raise ValueError(f"every test must have {keys}")
        if passes is not _prints and not entry:
            raise ValueError("tests of a function need a column entry_point with its name")
    except (AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        return Reward(0.0, status="unscorable", detail=f"tests: {type(error).__name__}: {error}")
    if not program.strip() or len(program) > 100 * LONGEST_ANSWER:
        return _judged(0, None)
    return _judged(passes(program, tests, entry, seconds), program)


# ---------------------------------------------------------------------------------------- by name, and several of them

_ALL = (last_number, exact, gsm8k, math_, countdown, reasoning_gym_, format_, ifeval, code)
VERIFIERS: dict[str, Verifier] = {verifier.__name__.rstrip("_"): verifier for verifier in _ALL}
SAY_THE_TRUTH = {"last_number": "{}", "exact": "{}", "gsm8k": "{}", "math": "\\boxed{{{}}}"}  # as a response would
SAY_THE_TRUTH["reasoning_gym"] = "<answer>{}</answer>"


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
    if not callable(found := getattr(module, function, None)):
        raise ValueError(f"the file {path!r} has no function {function!r}")
    return found


def names_of(verifier: str) -> list[str]:
    """The verifiers of a row: one name, or several with commas between."""
    return [name.strip() for name in verifier.split(",")]


def parse_weights(weights: tuple[str, ...]) -> dict[str, float | None]:
    """("math=1", "format=gate") -> {"math": 1.0, "format": None}. Raises ValueError for anything else."""
    found: dict[str, float | None] = {}
    for text in weights:
        name, _, value = text.rpartition("=")
        try:
            found[name] = None if value == "gate" else float(value)
            if not name or not math.isfinite(found[name] or 0.0):
                raise ValueError
        except ValueError:
            raise ValueError(f"{text!r} is not NAME=NUMBER or NAME=gate") from None
    return found


def combine(found: dict[str, Reward], weights: dict[str, float | None]) -> Reward:
    """Sum of weight x score; 0 unless every gate (weight None) scored 1. A weight that is not given is 1.

    Parts: those of each verifier, the first to give one wins, and with several verifiers each one's score by its name.
    """
    first, *_ = found.values()
    gates = [r.score >= 1 for name, r in found.items() if weights.get(name, 1.0) is None]
    score = sum((weights.get(name, 1.0) or 0.0) * r.score for name, r in found.items()) if all(gates) else 0.0
    parts = {name: r.score for name, r in found.items()} if len(found) > 1 else {}
    for reward in reversed(found.values()):
        parts |= reward.parts
    if gates:
        parts["gate"] = float(all(gates))
    bad = next((r for r in found.values() if r.status != "ok"), first)
    return replace(first, score=score, parts=parts, status=bad.status, detail=bad.detail)


def truth_error(verifier: str, truth: str, row: dict) -> str:
    """What is wrong with a truth, in the eyes of its own verifiers; "" if nothing is.

    A truth that can be said as a response must score 1; for the others it is enough that nothing can be scored by it.
    """
    for name in names_of(verifier):
        if name not in VERIFIERS:
            continue  # yours may take anything
        said = truth if name == "math" and last_boxed(truth) else SAY_THE_TRUTH.get(name, "").format(truth)
        try:
            reward = VERIFIERS[name](said, truth, row)
        except (ArithmeticError, LookupError, SyntaxError, TypeError, ValueError) as error:
            return f"{name} rejects the truth itself ({type(error).__name__}: {error})"
        if reward.status != "ok" or (name in SAY_THE_TRUTH and reward.score < 1):
            return reward.detail or f"{name} rejects the truth itself"
    return ""


# ------------------------------------------------------------------------------------------------ the worker processes

_find_once = functools.lru_cache(find_verifier)  # in a worker: a file is loaded once


def _start_worker(verifiers: list[str], unsafe: bool, memory: int) -> None:
    """In a new worker: its memory limit, and what takes long to import, so that no sample's time pays for it."""
    import resource

    import data

    data.live_for_parent()
    global allow_unsafe
    allow_unsafe = unsafe
    sys.set_int_max_str_digits(0)  # what takes too long is killed; an exception here would be taken for a bug
    if "math" in verifiers:
        _parse_math("1")
    if "reasoning_gym" in verifiers:
        importlib.import_module("reasoning_gym")
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _verify(names: list[str], weights: dict, response: str, truth: str, row: dict) -> Reward:
    found = {}
    for name in names:
        try:
            found[name] = _find_once(name)(response, truth, row)
        except (MemoryError, RecursionError):  # the response's doing, as a rule
            found[name] = Reward(0.0, status="crash", detail=traceback.format_exc(limit=-4))
        if not isinstance(found[name], Reward):
            raise TypeError(f"the verifier {name!r} returned {type(found[name]).__name__}, not a rewards.Reward")
    return combine(found, weights)


class RewardPool:
    """Worker processes that each verify one sample at a time.

    Workers are started by spawn, never by fork: the parent holds threads, an engine and maybe a CUDA context.
    ``verifiers`` says which will be needed, so that their libraries are there before the first sample; ``weights`` is
    for ``combine``; ``memory`` is each worker's limit of address space in bytes.
    """

    def __init__(self, workers, timeout, verifiers=(), weights=None, unsafe=False, memory=4 * 2**30):
        self.workers, self.timeout, self.weights, self.shown = workers, timeout, weights or {}, set()
        self.worker_arguments = [sorted({name for v in verifiers for name in names_of(v)}), unsafe, memory]
        self._start()

    def _start(self) -> None:
        import multiprocessing

        from pebble import CONSTS, ProcessPool

        CONSTS.term_timeout = 0.0  # workers ignore SIGTERM: kill at once
        self.pool = ProcessPool(
            max_workers=self.workers,
            context=multiprocessing.get_context("spawn"),
            initializer=_start_worker,
            initargs=self.worker_arguments,
        )
        for _ in range(self.workers):  # start them while the models load
            self.pool.schedule(find_verifier, args=["exact"])

    def submit(self, verifier: str, response: str, truth: str, row: dict, tries: int = 5):
        """Start verifying one response; the returned future goes to ``result``."""
        if not self.pool.active:
            self.pool.stop()
            self._start()
        arguments = [names_of(verifier), self.weights, response, truth, row]
        future = self.pool.schedule(_verify, args=arguments, timeout=self.timeout)
        future.pool, future.asked, future.tries = self.pool, (verifier, response, truth, row), tries
        return future

    def result(self, future) -> Reward:
        """Wait for one Reward. Raises what the verifier raised, with the worker's traceback in the message."""
        from pebble import ProcessExpired

        while not wait([future], timeout=1.0).done and future.pool.active:
            pass  # pebble gives a pool up where a worker dies before it has read that it took a task
        try:
            if not future.done():
                raise BrokenProcessPool("given up, and what was queued is forgotten")
            reward = future.result()
        except TimeoutError:
            reward = Reward(0.0, status="timeout", detail=f"killed after {self.timeout:g} s (--reward_timeout)")
        except ProcessExpired as error:
            reward = Reward(0.0, status="crash", detail=f"the worker died: {error}, exit code {error.exitcode}")
        except BrokenProcessPool as error:
            if future.tries > 1:
                return self.result(self.submit(*future.asked, tries=future.tries - 1))
            raise RuntimeError("the verifier processes do not start (is the script guarded by __main__?)") from error
        except Exception as error:
            raise RuntimeError(f"a verifier raised in its worker:\n{getattr(error, 'traceback', error)}") from error
        if reward.status not in ("ok", *self.shown):
            self.shown.add(reward.status)
            about = f"{future.asked[0]} on {future.asked[1][:200]!r}"
            print(f"warning: first {reward.status} of a verification: {about}\n{reward.detail}", flush=True)
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
    sample.reward_steps, sample.extracted = found.steps, found.extracted
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
    return "\n".join([*lines, "  see --max_response_length, --verifier, --system_prompt"])


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
        # Decoders score the last token that is not padding: padding must not be what a text ends in.
        self.tokenizer.add_special_tokens({"pad_token": "<|padding of the reward model|>"})
        self.model.resize_token_embeddings(max(len(self.tokenizer), self.model.config.vocab_size), mean_resizing=False)
        self.model.config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        self.model.config.pad_token_id = self.tokenizer.pad_token_id

    def _ids(self, messages: list[dict[str, str]], response: str) -> list[int]:
        messages = [*messages, {"role": "assistant", "content": response}]
        ids = self.tokenizer.apply_chat_template(messages, return_dict=False)
        return ids[-getattr(self.model.config, "max_position_embeddings", len(ids)) :]  # the end is what is scored

    def score(self, conversations: list[tuple[list[dict[str, str]], str]]) -> list[float]:
        """(messages, response) -> score, each as if it were alone. Raises RuntimeError when one is not finite."""
        rows, scores = [self._ids(messages, response) for messages, response in conversations], {}
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        self.model.to(self.device)
        while order:
            count = max(1, self.budget // max(1, len(rows[order[0]])))
            batch, order = order[:count], order[count:]
            inputs = self.tokenizer.pad({"input_ids": [rows[i] for i in batch]}, return_tensors="pt").to(self.device)
            scores |= zip(batch, self.model(**inputs).logits[:, 0].tolist(), strict=True)
        self.model.to("cpu")
        if not all(map(math.isfinite, scores.values())):
            raise RuntimeError("the reward model's scores are not finite")
        return [scores[i] for i in range(len(rows))]

    def add(self, found: list[Reward], conversations: list, weights: dict[str, float | None]) -> list[Reward]:
        """The verifiers' rewards plus this model's score times its weight ``reward_model``; not past a shut gate."""
        weight, added = weights.get("reward_model", 1.0), []
        for reward, s in zip(found, self.score(conversations) if found else [], strict=True):
            gain = weight * s if reward.parts.get("gate", 1.0) else 0.0
            added.append(replace(reward, score=reward.score + gain, parts={**reward.parts, "reward_model": s}))
        return added

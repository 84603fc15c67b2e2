"""Run a model's programs in the sandbox, against the tests of a row."""

from __future__ import annotations

import ast
import contextlib
import itertools
import json
import math
import re
import textwrap
from dataclasses import dataclass
from fractions import Fraction

from graders.code import sandbox
from graders.code.sandbox import Sandbox
from graders.text import in_last_tag

CODE_SECONDS = 5.0  # of wall time for one program; a row's column time_limit changes it
SHORTEST_SECONDS, LONGEST_SECONDS = 0.1, 600.0  # what such a column may say
SOLUTION_COLUMNS = ("canonical_solution", "solution", "completion", "code")  # where a row may have a right program
VERDICT = b'{"verdict"'  # how the last line of a judge begins
NOT_RUN = re.compile(r"\bTestCase\b|\bpytest\.fixture\b|\bdef (?:setup|teardown)_(?:method|class|function|module)\b")
SUPPORTED = "functions test_*, also in classes Test*, raises, approx and mark.parametrize"


class UnusableTests(ValueError):
    """Tests that no program can be judged by: they do not load, or use what the sandbox does not have."""


@dataclass(frozen=True)
class CodeTests:
    """The tests of a row, of one of three kinds."""

    entry: str  # the function under test: "f", or "Solution().f"
    seconds: float
    calls: tuple[tuple, ...] = ()  # (arguments, the values that are right)
    method: bool = False  # whether the function may be a method of the program's class Solution
    programs: tuple[tuple[str, str], ...] = ()  # (stdin, stdout)
    check: str = ""  # Python that calls the program's functions, or defines check(candidate)
    before: str = ""  # the row's prompt, where it is Python: it comes before the program, and before the check


def _time_limit(row: dict) -> float:
    """Return the time limit of a row's programs, in seconds. Raises ValueError for an invalid one."""
    given = row.get("time_limit")
    if given is None:
        return CODE_SECONDS
    with contextlib.suppress(TypeError, ValueError):
        if SHORTEST_SECONDS <= float(given) <= LONGEST_SECONDS:  # NaN is not, either
            return float(given)
    raise ValueError(f"time_limit is {given!r}, not a number from {SHORTEST_SECONDS:g} to {LONGEST_SECONDS:g}")


def _python_prompt(prompt: object, entry: str) -> str:
    """Return the prompt if it is Python with definitions, as in HumanEval; "" if it is text or a chat.

    Raises SyntaxError where it begins the function itself and is not Python: programs could not follow it.
    """
    if not isinstance(prompt, str):
        return ""
    try:
        statements = ast.parse(prompt).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        if re.search(rf"^def {re.escape(entry)}\b", prompt, re.MULTILINE) and "```" not in prompt:
            raise
        return ""
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    return prompt if any(isinstance(statement, kinds) for statement in statements) else ""


def _input_output_tests(truth: str, seconds: float) -> CodeTests:
    """Read tests as APPS, TACO and AReaL have them: ``{"inputs": [...], "outputs": [...], "fn_name": "f"}``.

    Without fn_name an input and an output are the text of stdin and stdout, or its lines. With it an input is a list of
    arguments, the function may be a method of a class Solution, and a list of one output stands for the output itself
    as well: some of APPS's are wrapped, others are not. Raises ValueError for what is not of this form.
    """
    tests = json.loads(truth)
    inputs, outputs = tests.get("inputs", tests.get("input")), tests.get("outputs", tests.get("output"))
    entry = tests.get("fn_name") or ""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError('must hold "inputs" and "outputs", two lists of equal length, and at least one of each')
    if entry and not str(entry).isidentifier():
        raise ValueError(f"fn_name is {entry!r}, not the name of a function")
    calls, programs = [], []
    for number, (given, output) in enumerate(zip(inputs, outputs, strict=True)):
        lines = [[side] if isinstance(side, str) else side for side in (given, output)]
        if entry and not isinstance(given, list):
            raise ValueError(f"test {number}: with fn_name its input must be a list of arguments")
        if entry:
            right = [output]
            if isinstance(output, list) and len(output) == 1:
                right += output
            calls.append((given, right))
        elif all(isinstance(side, list) and set(map(type, side)) <= {str} for side in lines):
            programs.append(tuple(map("\n".join, lines)))
        else:
            raise ValueError(f"test {number}: without fn_name its input and output must be text, or lists of lines")
    return CodeTests(entry, seconds, tuple(calls), bool(entry), tuple(programs))


def _listed_tests(found: object, entry: str, seconds: float, row: dict) -> CodeTests:
    """Read a list of tests: input and output of a function, or stdin and stdout of a program.

    In LiveCodeBench both are the texts input and output; with ``"testtype": "functional"`` these are an argument of a
    function for each line, in JSON, and a value. ``func_name`` in the test's or the row's metadata is its name.
    """
    if not isinstance(found, list) or not found or not all(isinstance(test, dict) for test in found):
        raise ValueError("JSON must be a list of tests")
    names = ("input", "output") if "input" in found[0] else ("stdin", "stdout")
    pairs = [tuple(map(test.get, names)) for test in found]
    texts = [set(map(type, pair)) == {str} for pair in pairs]
    if all(texts) and "functional" in {test.get("testtype") for test in found}:
        about = found[0].get("metadata") or row.get("metadata") or {}
        about = json.loads(about) if isinstance(about, str) else about
        name = about.get("func_name") or entry
        if not str(name).isidentifier():
            raise ValueError(f"func_name is {name!r}, not the name of a function")
        calls = []
        for given, output in pairs:
            arguments = [json.loads(line) for line in given.split("\n") if line.strip()]
            calls.append((arguments, [json.loads(output)]))
        return CodeTests(name, seconds, tuple(calls), method=True)
    if all(texts):
        return CodeTests(entry, seconds, programs=tuple(pairs))
    good, wanted = texts, "the texts stdin and stdout, or an input and an output"
    if names[0] == "input":
        good = ["output" in test and isinstance(test.get("input"), list | dict) for test in found]
        wanted = "an input, a list of arguments or an object with their names, and an output"
    if not all(good):
        raise ValueError(f"test {good.index(False)} has not {wanted}")
    return CodeTests(entry, seconds, tuple((given, [output]) for given, output in pairs))


def read_tests(truth: str, row: dict) -> CodeTests:
    """Read the tests of a row. Raises ValueError, or the errors of Python and JSON, for invalid tests."""
    entry, seconds = str(row.get("entry_point") or ""), _time_limit(row)
    parts = [part.removesuffix("()") for part in entry.split(".")]
    if entry and not all(part.isidentifier() for part in parts):
        raise ValueError(f"entry_point is {entry!r}, not a name such as f or Solution().f")
    if truth.lstrip().startswith("{"):
        return _input_output_tests(truth, seconds)
    if truth.lstrip().startswith("["):
        found = json.loads(truth)
        if found and all(isinstance(line, str) for line in found):  # assertions one by one, as in MBPP
            return read_tests("\n".join(found), row)
        tests = _listed_tests(found, entry, seconds, row)
    else:
        if missing := NOT_RUN.search(truth):
            raise ValueError(f"it uses {missing[0]}, and of unittest and pytest only {SUPPORTED} are supported")
        truth = f"{row.get('test_setup_code') or ''}\n{truth}"  # of MBPP
        before = _python_prompt(row.get("prompt"), entry)
        ast.parse(f"{before}\n{truth}")
        tests = CodeTests(entry, seconds, check=truth, before=before)
    if not tests.entry and (tests.calls or "def check(" in tests.check):
        raise ValueError("tests of a function need a column entry_point with its name")
    return tests


SHARED = re.compile(  # what a test and a program in another process do not share
    r"\b(?:redirect_stdout|capsys|StringIO\(\)|sys\.std(?:out|in) =|patch\(|monkeypatch|asyncio\.run\(|await\b"
    r"|random\.seed(?=\([^()]*\)\s+assert\b))"
    r"|\bopen\([^()]*['\"][wax]b?\+?['\"]"
)


def _obstacle(tests: CodeTests) -> str:
    """Name a reason why a right program may fail tests that run in another process, or return ""."""
    shared = SHARED.search(tests.check)
    if shared is None:
        return ""
    name = shared[0].partition("(")[0].strip(" =")
    return f"it uses {name}, which a test and a program in two processes do not share"


def _lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


DECIMAL = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")


def _same_token(said: str, wanted: str) -> bool:
    """Test if two words of an output are the same: decimals to 1e-6, absolute or relative, whole numbers exactly."""
    if said == wanted:
        return True
    if len(said) > 50 or not DECIMAL.fullmatch(said) or not DECIMAL.fullmatch(wanted):
        return False
    whole = wanted.lstrip("+-").isdecimal()
    if whole and said.lstrip("+-").isdecimal():
        return False
    if whole:
        return abs(Fraction(said) - int(wanted)) <= Fraction(1, 10**6)
    return math.isclose(float(said), float(wanted), rel_tol=1e-6, abs_tol=1e-6)


def _same_output(said: str, wanted: str) -> bool:
    """Return True if two outputs are the same, line by line and word by word; blank lines do not count."""
    ours, theirs = _lines(said), _lines(wanted)
    if [len(line) for line in ours] != [len(line) for line in theirs]:
        return False
    return all(map(_same_token, itertools.chain(*ours), itertools.chain(*theirs)))


def _prints(program: str, tests: CodeTests) -> str:
    """Return why the program fails; "" if it ends well and prints each stdout, line by line, spacing aside."""
    with Sandbox(tests.seconds) as sandboxed:
        for number, (given, wanted) in enumerate(tests.programs):
            sandboxed.start("program", program, text=given)
            ended, said = sandboxed.finish()
            if ended != 0:
                return f"test {number}: exit status {ended}"
            if not _same_output(said.decode(errors="replace"), wanted):
                return f"test {number}: another output"
    return ""


def _judge_job(tests: CodeTests, program: str) -> dict[str, str]:
    """Return the job of the sandbox in which the tests of a function run; the program runs in another one."""
    if tests.check:
        return {"mode": "judge", "code": tests.check, "before": tests.before, "entry_point": tests.entry}
    in_class = tests.method and re.search(r"^class Solution\b", program, re.MULTILINE)
    function = f"Solution().{tests.entry}" if in_class else tests.entry
    return {"mode": "compare", "code": "", "entry_point": function, "text": json.dumps(tests.calls)}


def _passes(program: str, tests: CodeTests) -> str:
    """Return why tests reject the program's function, or "". They run in two sandboxes that exchange plain values.

    Raises UnusableTests where test code does not load, or exchanges anything else.
    """
    with Sandbox(tests.seconds + 1) as judge, Sandbox(tests.seconds) as solution:
        judge.start(**_judge_job(tests, program))
        line = judge.ask(b"")
        if line and not line.startswith(VERDICT):  # the program's time begins when the test has loaded
            solution.start("calls", program, tests.before)
        while line and not line.startswith(VERDICT):
            reply = solution.ask(line)
            if not reply:
                return "the program ended, or its time"
            line = judge.ask(reply)
    verdict = json.loads(line) if line else {"verdict": "failed", "why": "the test's time or memory ended"}
    if verdict["verdict"] == "passed":
        return ""
    unusable = verdict["why"] if verdict["verdict"] == "unusable" else _obstacle(tests)
    if unusable:
        raise UnusableTests(unusable)
    return verdict["why"] or "the test failed"


def run_tests(program: str, tests: CodeTests) -> str:
    """Return why the program fails; "" if it passes all tests. Raises UnusableTests, and OSError without a sandbox."""
    return _prints(program, tests) if tests.programs else _passes(program, tests)


def _try_tests(tests: CodeTests) -> str:
    """Return what is wrong with test code that has no program, as far as its first call shows; "" if nothing does."""
    with Sandbox(tests.seconds) as judge:
        judge.start(**_judge_job(tests, ""))
        said = json.loads(judge.ask(b"") or "{}")
    name = said.get("function", "")
    if name[:1].isupper() and "." not in name:
        return f"it makes an object of the program's class {name}, and only plain values can be exchanged"
    return said.get("why", "")


OPENING = re.compile(r"(?<!`)(`{3,}+)([^`]*)$|(?<!~)(~{3,}+)([^~]*)$")  # a fence, and what is said of its block
CLOSING = re.compile(r"^\s*(`{3,}+|~{3,}+)|(?<![`~])(`{3,}+|~{3,}+)(?=\s*$|</)")


def names_wanted(tests: CodeTests) -> set[str]:
    """Return the names of the functions and classes that a program may have to define for its tests."""
    if tests.check and not tests.entry:
        nodes = ast.walk(ast.parse(tests.check))
        return {node.id for node in nodes if isinstance(node, ast.Name)}
    return {tests.entry.partition(".")[0].removesuffix("()")} - {""}


def program_in(text: str, names: set[str] = frozenset()) -> str:
    """Return the last fenced block marked as Python, or else the last without a mark, or else the entire text.

    A later block that defines none of the ``names``, where an earlier one does, is an example of how they are used. A
    fence that is never closed is closed by the end. Without fences the inside of ``<answer>...</answer>`` counts.
    """
    blocks: dict[str, str] = {}
    text = text.replace("\ufeff", "")
    defines = re.compile(rf"^\s*(?:async\s+)?(?:def|class)\s+(?:{'|'.join(map(re.escape, names))})\b", re.MULTILINE)
    fence = mark = indent = ""
    lines: list[str] = []
    for line in [*text.split("\n"), None]:
        deeper = len(indent) + 4  # a fence that is indented so much more is text of the block
        closings = []
        for end in CLOSING.finditer(line or ""):
            if end[1] and line[:deeper].isspace():
                continue
            if (end[1] or end[2]).startswith(fence or "none"):
                closings.append(end)
        closed = line is None or next(iter(closings), None)
        if fence and not closed:
            lines.append(line)
            continue
        if fence:
            program = "\n".join([*lines, line[: closed.start()] if line else ""])
            if not (names and defines.search(blocks.get(mark, "")) and not defines.search(program)):
                blocks[mark] = textwrap.dedent(program) if indent else program
        if line is None:
            break
        rest = line[closed.end() :] if fence else line
        opening = OPENING.search(rest)
        fence = (opening[1] or opening[3]) if opening else ""
        if opening:
            indent = "" if rest[: opening.start()].strip() else rest[: opening.start()]
            said = re.match(r"[{. \t]*(\w*)", opening[2] or opening[4] or "")[1].lower()
            mark = "python" if said in ("py", "python", "python3") else said
            lines = []
    return blocks.get("python", blocks.get("", in_last_tag(text) or text))


def _own_solution(row: dict, tests: CodeTests) -> tuple[str, str]:
    """Return (column, program) of a row that holds a right program, or ("", "") if it holds none but perhaps prose."""
    for column in SOLUTION_COLUMNS:
        text = row.get(column)
        program = program_in(text) if isinstance(text, str) else ""
        for whole in (program, tests.before + program):
            with contextlib.suppress(SyntaxError, ValueError, RecursionError, MemoryError):
                if program.strip() and ast.parse(whole).body:
                    return column, program
    return "", ""


def code_error(truth: str, row: dict, question: str = "") -> str:
    """Describe the error in a row's tests, found by running them, or return "" if there is none.

    The row's own solution must pass, by the way that every sample goes. Without one, test code is run against a
    stand-in: it shows what does not load, and arguments that cannot be passed.
    """
    try:
        tests = read_tests(truth, row)
        if tests.method and question and tests.entry not in f"{question} {row.get('starter_code')}":
            return f"tests: the prompt never names the function {tests.entry}; add a column starter_code"
        if sandbox.namespaces_refused() and not sandbox.allow_unsafe:
            return ""  # nothing may run: the run ends at its start
        column, program = _own_solution(row, tests)
        if not program:
            wrong = (_obstacle(tests) or _try_tests(tests)) if tests.check else ""
            return wrong and f"tests: {wrong}"
        try:
            wrong = run_tests(program, tests)
        except UnusableTests as error:
            wrong = str(error)
    except (AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        return f"tests: {type(error).__name__}: {error}"
    return wrong and f"its own solution, in column {column}, does not pass: {wrong}"

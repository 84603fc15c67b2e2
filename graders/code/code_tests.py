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
from graders.code.sandbox import OWN_CLASS, Sandbox
from graders.text import in_last_tag

CODE_SECONDS = 5.0  # of wall time for one program; a row's column time_limit changes it
SHORTEST_SECONDS, LONGEST_SECONDS = 0.1, 600.0  # what such a column may say
SOLUTION_COLUMNS = ("canonical_solution", "solution", "completion", "code")  # where a row may have a right program
VERDICT = b'{"verdict"'  # how the last line of a judge begins


class UnusableTests(ValueError):
    """Tests that no program can be judged by: they do not load, or use what the sandbox does not have."""


@dataclass(frozen=True)
class CodeTests:
    """The tests of a row, of one of three kinds."""

    entry: str  # the function under test: "f", or "Solution().f"
    seconds: float
    calls: tuple[dict, ...] = ()  # {"input": arguments, "output": value}, or "outputs": the values that are right
    method: bool = False  # whether the function may be a method of the program's class Solution
    programs: tuple[dict, ...] = ()  # {"stdin": text, "stdout": text}
    check: str = ""  # Python that calls the program's functions, or defines check(candidate)
    before: str = ""  # the row's prompt, where it is Python: it comes before the program, and before the check


def _time_limit(row: dict) -> float:
    """Return the time limit of a row's programs, in seconds. Raises ValueError for an invalid one."""
    given = row.get("time_limit")
    if given is None:
        return CODE_SECONDS
    try:
        seconds = float(given)
    except (TypeError, ValueError):
        seconds = math.nan
    if not SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:  # NaN is not, either
        raise ValueError(f"time_limit is {given!r}, not a number from {SHORTEST_SECONDS:g} to {LONGEST_SECONDS:g}")
    return seconds


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


def _input_output_tests(truth: str, row: dict) -> CodeTests:
    """Read tests as APPS, TACO and AReaL have them: ``{"inputs": [...], "outputs": [...], "fn_name": "f"}``.

    Without fn_name an input and an output are the text of stdin and stdout, or its lines. With it an input is a list of
    arguments, the function may be a method of a class Solution, and a list of one output stands for the output itself
    as well: some of APPS's are wrapped, others are not. Raises ValueError for what is not of this form.
    """
    given = json.loads(truth)
    inputs, outputs = given.get("inputs"), given.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not inputs or len(inputs) != len(outputs):
        raise ValueError('must hold "inputs" and "outputs", two lists of equal length, and at least one of each')
    entry = given.get("fn_name") or ""
    if not entry:
        programs = []
        for number, pair in enumerate(zip(inputs, outputs, strict=True)):
            lines = [[side] if isinstance(side, str) else side for side in pair]
            if not all(isinstance(side, list) and set(map(type, side)) <= {str} for side in lines):
                raise ValueError(f"test {number}: without fn_name its input and output must be text, or lists of lines")
            programs.append({"stdin": "\n".join(lines[0]), "stdout": "\n".join(lines[1])})
        return CodeTests("", _time_limit(row), programs=tuple(programs))
    if not str(entry).isidentifier():
        raise ValueError(f"fn_name is {entry!r}, not the name of a function")
    calls = []
    for number, (arguments, output) in enumerate(zip(inputs, outputs, strict=True)):
        if not isinstance(arguments, list):
            raise ValueError(f"test {number}: with fn_name its input must be a list of arguments")
        right = [output, output[0]] if isinstance(output, list) and len(output) == 1 else [output]
        calls.append({"input": arguments, "outputs": right})
    return CodeTests(entry, _time_limit(row), calls=tuple(calls), method=True)


def read_tests(truth: str, row: dict) -> CodeTests:
    """Read the tests of a row. Raises ValueError, or the errors of Python and JSON, for invalid tests."""
    entry, seconds = str(row.get("entry_point") or ""), _time_limit(row)
    parts = [part.removesuffix("()") for part in entry.split(".")]
    if entry and not all(part.isidentifier() for part in parts):
        raise ValueError(f"entry_point is {entry!r}, not a name such as f or Solution().f")
    if truth.lstrip().startswith("{"):
        return _input_output_tests(truth, row)
    if not truth.lstrip().startswith("["):
        before = _python_prompt(row.get("prompt"), entry)
        ast.parse(f"{before}\n{truth}")
        tests = CodeTests(entry, seconds, check=_with_runner(truth), before=before)
        if "def check(" not in truth:
            return tests
    else:
        found = json.loads(truth)
        if found and all(isinstance(line, str) for line in found):  # assertions one by one, as in MBPP
            return read_tests("\n".join(found), row)
        if not isinstance(found, list) or not found or not all(isinstance(test, dict) for test in found):
            raise ValueError("JSON must be a list of tests")
        kinds = {type(test.get(key)) for test in found for key in ("input", "output")}
        if kinds == {str}:
            return _text_tests(found, entry, row)
        if "input" in found[0]:
            tests = CodeTests(entry, seconds, calls=tuple(found))
            good = ["output" in test and isinstance(test.get("input"), list | dict) for test in found]
            wanted = "an input, a list of arguments or an object with their names, and an output"
        else:
            tests = CodeTests(entry, seconds, programs=tuple(found))
            good = [{type(test.get("stdin")), type(test.get("stdout"))} == {str} for test in found]
            wanted = "the texts stdin and stdout, or an input and an output"
        if not all(good):
            raise ValueError(f"test {good.index(False)} has not {wanted}")
    if not entry and not tests.programs:
        raise ValueError("tests of a function need a column entry_point with its name")
    return tests


def _text_tests(found: list[dict], entry: str, row: dict) -> CodeTests:
    """Read tests whose input and output are text, as LiveCodeBench has them.

    They are stdin and stdout; with ``"testtype": "functional"`` each line of an input is an argument, and the output a
    value, in JSON. The function is then named by ``func_name`` in the test's or the row's metadata, or by entry_point.
    """
    if "functional" not in {test.get("testtype") for test in found}:
        programs = tuple({"stdin": test["input"], "stdout": test["output"]} for test in found)
        return CodeTests("", _time_limit(row), programs=programs)
    about = found[0].get("metadata") or row.get("metadata") or {}
    if isinstance(about, str):
        about = json.loads(about)
    name = about.get("func_name") or entry
    if not str(name).isidentifier():
        raise ValueError(f"func_name is {name!r}, not the name of a function")
    calls = []
    for test in found:
        lines = filter(str.strip, test["input"].split("\n"))
        output = json.loads(test["output"])
        calls.append({"input": list(map(json.loads, lines)), "output": output})
    return CodeTests(name, _time_limit(row), calls=tuple(calls), method=True)


PYTEST = """
class pytest:
    class mark:
        def parametrize(names, rows, **ignored):
            names = names.replace(" ", "").split(",") if isinstance(names, str) else names
            def decorate(test):
                def run(**more):
                    for row in rows:
                        test(**dict(zip(names, row if len(names) > 1 else [row])), **more)
                return run
            return decorate
    class raises:
        def __init__(self, kind, match=None): self.kind = kind
        def __enter__(self): return self
        def __exit__(self, kind, *rest):
            if kind is None: raise AssertionError("nothing was raised")
            return issubclass(kind, self.kind)
    class approx:
        def __init__(self, value, rel=1e-6, abs=1e-12, nan_ok=False): self.value, self.rel, self.abs = value, rel, abs
        def __eq__(self, other):
            import math
            ours, theirs = ([x] if isinstance(x, (int, float)) else x for x in (self.value, other))
            return len(ours) == len(theirs) and all(
                math.isclose(a, b, rel_tol=self.rel, abs_tol=self.abs) for a, b in zip(ours, theirs))
"""


MAIN = re.compile(r"\b(?:unittest|pytest)\.main\(")


def _with_runner(truth: str) -> str:
    """Make test code run what it only defines: functions test_* without parameters, and classes of unittest.

    Its own calls of unittest.main() and pytest.main() are left out; of pytest there are raises and approx.
    """
    tree = ast.parse(truth)
    kept, runs = [], []
    for node in tree.body:
        if isinstance(node, ast.Import) and [name.name for name in node.names] == ["pytest"]:
            kept += ast.parse(PYTEST).body
            continue
        if isinstance(node, ast.If | ast.Expr) and MAIN.search(ast.unparse(node)):
            continue
        kept.append(node)
        if isinstance(node, ast.FunctionDef):
            parametrized = any("mark.parametrize" in ast.unparse(decorator) for decorator in node.decorator_list)
            if node.name.startswith("test_") and (parametrized or not node.args.args):
                runs.append(f"{node.name}()")
        elif isinstance(node, ast.ClassDef):
            bases = list(map(ast.unparse, node.bases))
            if node.name.startswith("Test") and not bases:
                names = [member.name for member in node.body if isinstance(member, ast.FunctionDef)]
                runs += [f"{node.name}().{name}()" for name in names if name.startswith("test_")]
            elif any("TestCase" in base for base in bases):
                runs.append(f"__import__('unittest').defaultTestLoader.loadTestsFromTestCase({node.name}).debug()")
    if kept == tree.body and not runs:
        return truth
    text = ast.unparse(ast.Module(kept, []))
    missing = [run for run in runs if not re.search(rf"^{re.escape(run)}", text, re.MULTILINE)]
    return "\n".join([text, *missing])


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


def _same_leaf(value: object, expected: object) -> bool:
    """Return True if two scalars are the same: True is not 1, floats are compared to 9 digits."""
    if {type(value), type(expected)} in ({float}, {int, float}):
        return value == expected or math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-9)
    return type(value) is type(expected) and value == expected


def _same(message: dict, expected: object) -> bool:
    """Test if a program's value, as the sandbox encodes it, is that of a test in JSON: tuples are lists, keys text.

    The value is not built: the time is that of the expected one, whatever was sent. Raises what wrong input makes of
    it, ArithmeticError, AttributeError, LookupError, TypeError or ValueError.
    """
    items = message["items"]
    pending = [(message["value"], expected)]
    while pending:
        value, wanted = pending.pop()
        kind = None
        parts = []
        if isinstance(value, list):
            kind, *parts = items[value[0]]
        if kind == "int":
            if int(parts[0], 16) != wanted or type(wanted) is not int:
                return False
        elif kind in ("list", "tuple"):
            if not isinstance(wanted, list) or len(parts) != len(wanted):
                return False
            pending += zip(parts, wanted, strict=True)
        elif kind == "dict":
            names = map(str, parts[::2])
            found = dict(zip(names, parts[1::2], strict=True))
            if not isinstance(wanted, dict) or found.keys() != wanted.keys() or 2 * len(found) != len(parts):
                return False
            pending += [(found[key], wanted[key]) for key in wanted]
        elif kind is not None or not _same_leaf(value, wanted):
            return False
    return True


def _longest_reply(expected: object) -> int:
    """Return the largest number of bytes that a right value can need; what is longer is not read."""
    return 2**16 + 20 * len(json.dumps(expected))


def _whole(digits: str) -> int:
    """Parse an integer of JSON. Python needs quadratic time to read one, so long ones are sent in hexadecimal."""
    if len(digits) > 20:
        raise ValueError("a number longer than the sandbox sends")
    return int(digits)


def _returns(program: str, tests: CodeTests) -> str:
    """Return why the function fails; "" if it gives each output for its input. The process never gets the outputs."""
    in_class = tests.method and re.search(r"^class Solution\b", program, re.MULTILINE)
    function = f"Solution().{tests.entry}" if in_class else tests.entry
    with Sandbox(tests.seconds) as solution:
        solution.start("calls", program)
        for number, test in enumerate(tests.calls):
            given = test["input"]
            right = test.get("outputs", [test.get("output")])
            arguments, named = (given, {}) if isinstance(given, list) else ([], given)
            call = sandbox.encode((arguments, named)) | {"function": function, "changes": False}
            reply = solution.ask(json.dumps(call).encode() + b"\n", _longest_reply(right))
            try:
                message = json.loads(reply, parse_int=_whole)
                if "error" in message:
                    return f"test {number}: the program raised {str(message['error'])[:200]}"
                if not any(_same(message, output) for output in right):
                    return f"test {number}: another value"
            except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
                return f"test {number}: no value"  # the program ended, or said what is none
    return ""


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
        for number, test in enumerate(tests.programs):
            sandboxed.start("program", program, text=test["stdin"])
            ended, said = sandboxed.finish()
            wanted = test["stdout"]
            if ended != 0:
                return f"test {number}: exit status {ended}"
            if len(said) > _longest_reply(wanted) or not _same_output(said.decode(errors="replace"), wanted):
                return f"test {number}: another output"
    return ""


def _passes(program: str, tests: CodeTests) -> str:
    """Return why test code rejects the function, or "". They run in two sandboxes that exchange plain values.

    Raises UnusableTests where the test code itself does not load.
    """
    with Sandbox(tests.seconds + 1) as judge, Sandbox(tests.seconds) as solution:
        judge.start("judge", tests.check, tests.before, tests.entry)
        line = judge.ask(b"")
        if line and not line.startswith(VERDICT):  # the program's time begins when the test has loaded
            solution.start("calls", program, tests.before)
        while line and not line.startswith(VERDICT):
            reply = solution.ask(line)
            if not reply:
                return "the program ended, or its time"
            line = judge.ask(reply)
    verdict = json.loads(line) if line else {"verdict": "failed", "why": "the test's time or memory ended"}
    if verdict["verdict"] == "unusable":
        raise UnusableTests(verdict["why"])
    if verdict["verdict"] == "passed":
        return ""
    obstacle = _obstacle(tests)
    if OWN_CLASS in verdict["why"]:  # the program may have returned it without need
        obstacle = obstacle or _try_tests(tests)
    if obstacle:
        raise UnusableTests(obstacle)
    return verdict["why"] or "the test failed"


def run_tests(program: str, tests: CodeTests) -> str:
    """Return why the program fails; "" if it passes all tests. Raises UnusableTests, and OSError without a sandbox."""
    if tests.check:
        return _passes(program, tests)
    return _returns(program, tests) if tests.calls else _prints(program, tests)


def _try_tests(tests: CodeTests) -> str:
    """Return what is wrong with test code that has no program; "" if nothing shows when it is run without one.

    What ends without a word is tried once more: on a busy machine a test may not even have been loaded in its time.
    """
    for _ in range(2):
        with Sandbox(tests.seconds) as judge:
            judge.start("try", tests.check, tests.before, tests.entry)
            line = judge.ask(b"")
        if line:
            break
    verdict = json.loads(line) if line else {}
    return verdict["why"] if verdict.get("verdict") == "unusable" else ""


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


def code_error(truth: str, row: dict) -> str:
    """Describe the error in a row's tests, found by running them, or return "" if there is none.

    The row's own solution must pass, by the way that every sample goes. Without one, test code is run against a
    stand-in: it shows what does not load, and arguments that cannot be passed.
    """
    try:
        tests = read_tests(truth, row)
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

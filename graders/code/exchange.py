"""Run in a sandbox: a program, a program whose functions are called, or the tests that call them.

Tests and a program run in two sandboxes and exchange plain values, so that neither sees the other's memory. The jobs:

    program   stdin is the job's text, and what is printed comes back with the exit status
    calls     for each line with a function's name and arguments, a line with its value or its exception comes back
    judge     test code runs; the calls that it makes go out as such lines, and its last line is a verdict
    compare   the same for tests in JSON, in stdin: calls, and the values that are right

This imports the standard library only: the server of the sandboxes runs the text of this file.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import math
import os
import sys
import types

PLAIN_INTEGER = 2**63  # larger ones cross in hexadecimal, which takes linear time to write and to read
CONTAINERS = {"tuple": tuple, "set": set, "frozenset": frozenset}


class NoPlainValue(TypeError):
    """A value that tests and a program cannot exchange."""


def encode(value):
    """Return a value in JSON's terms: a tuple, a set, a dict or a long integer is an object {kind: parts}.

    Subclasses count as their bases, numbers of NumPy as Python's. Raises NoPlainValue for anything else.
    """
    number = hasattr(value, "item") and not hasattr(value, "__len__")
    if number and type(value).__module__ == "numpy":
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        plain = int.__add__(value, 0)
        return plain if -PLAIN_INTEGER < plain < PLAIN_INTEGER else {"int": hex(plain)}
    if isinstance(value, float):
        return float.__pos__(value)  # which leaves -0.0 its sign
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(part) for part in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(part)] for key, part in value.items()]}
    for kind, container in CONTAINERS.items():
        if isinstance(value, container):
            return {kind: [encode(part) for part in value]}
    plain = "None, booleans, numbers, text, lists, tuples, sets, dicts"
    raise NoPlainValue(f"a {type(value).__name__} is not a value that tests and a program can exchange ({plain})")


def decode(message):
    """Return the value of a message made by ``encode``. Invalid input raises any error, since a program may send any.

    It may also take long, or much memory: call it only in a process that is killed at a limit.
    """
    if isinstance(message, list):
        return [decode(part) for part in message]
    if not isinstance(message, dict):
        return message
    ((kind, parts),) = message.items()
    if kind == "int":
        return int(parts, 16)
    if kind == "dict":
        return {decode(key): decode(part) for key, part in parts}
    return CONTAINERS[kind](map(decode, parts))


def write_line(lines, message: dict) -> None:
    """Write a message to the parent process, from which ``lines`` come, as one line of JSON."""
    text = json.dumps(message).encode() + b"\n"
    while text:
        text = text[os.write(lines.fileno(), text) :]


def run(lines, mode: str, before: str, code: str, entry_point: str) -> None:
    """Run the job in the program's process."""
    sys.set_int_max_str_digits(0)  # it has a limit of time
    name = "__main__" if mode == "program" else "solution"
    module = types.ModuleType(name)
    sys.modules[name] = module  # where dataclasses and pickle look for the classes of a program
    sys.argv = ["solution.py"]
    builtins.exit = builtins.quit = sys.exit  # programs use them; the site module, left out, defines them
    if mode == "judge":
        write_line(lines, judge(lines, module.__dict__, before, code, entry_point))
    elif mode == "compare":
        write_line(lines, compare(json.load(sys.stdin), remote(entry_point, lines, [])))
    elif mode == "calls":
        execute(before, code, module.__dict__)
        answer_calls(lines, module.__dict__)
    else:
        os.close(lines.fileno())
        lines.close()
        execute(before, code, module.__dict__)


# --------------------------------------------------------------------------------------------------------- the program


# What judges of contests import before a program. As built-in names they are none of the program's own functions.
CONTEST = "bisect collections copy functools heapq itertools json math operator os random re string sys time typing"


def execute(before: str, code: str, scope: dict) -> None:
    """Run ``code`` after ``before``: as text of its own, or as its continuation where it is none alone."""
    names = {}
    for module in CONTEST.split():
        exec(f"import {module}\nfrom {module} import *", names)
    vars(builtins).update(names | vars(builtins))
    try:
        parts = [compile(text, "solution.py", "exec", dont_inherit=True) for text in (before, code)]
    except SyntaxError:
        parts = [compile(before + code, "solution.py", "exec", dont_inherit=True)]
    for part in parts:
        exec(part, scope)


def answer_calls(lines, scope: dict) -> None:
    """Call the functions that the parent's lines name: ``f``, ``Class.f``, or ``Class().f`` of a new instance."""
    functions = {}
    for line in lines:
        call = json.loads(line)
        try:
            name = call["function"]
            if name not in functions:  # one instance serves all calls of its method
                functions[name] = eval(name, {"__builtins__": {}}, scope)
            arguments, named = decode(call["arguments"])
            reply = {"value": encode(functions[name](*arguments, **named))}
            if call["changes"]:
                reply["arguments"] = encode([*arguments, *named.values()])
        except BaseException as error:
            known = next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")
            reply = {"error": [type(error).__name__, str(error)[:200], known]}
        write_line(lines, reply)


# ----------------------------------------------------------------------------------------------------------- the tests


def remote(function: str, lines, asked: list[str]):
    """Return a stand-in by which tests call a function of the program; each call appends its name to ``asked``."""

    def call(*arguments, **named):
        asked.append(function)
        passed = [*arguments, *named.values()]
        changes = any(isinstance(argument, list | dict | set) for argument in passed)
        try:
            encoded = encode([list(arguments), named])
        except RecursionError:
            raise NoPlainValue("a value that is nested too deeply, or contains itself, cannot be passed") from None
        write_line(lines, {"function": function, "arguments": encoded, "changes": changes})
        reply = json.loads(lines.readline())
        if "error" in reply:
            raise as_raised(*reply["error"])
        if changes:  # an argument of the test becomes what the program, which had a copy, made of it
            for old, new in zip(passed, decode(reply["arguments"]), strict=True):
                if isinstance(old, list):
                    old[:] = new
                elif isinstance(old, dict | set):
                    old.clear()
                    old.update(new)
        return decode(reply["value"])

    return call


def as_raised(name: str, text: str, known: str) -> Exception:
    """Return the exception that tests can catch in the place of the program's: of its nearest class of Python."""
    if name == NoPlainValue.__name__:
        return NoPlainValue(text)
    kind = getattr(builtins, str(known), None)
    ends = StopIteration, StopAsyncIteration  # of a test's map, which would skip the values that are left
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, ends):
        kind = RuntimeError  # SystemExit, for one, must not end the test
    error = kind.__new__(kind, text)
    error.args = (f"{name}: {text}",)
    return error


def same(value, expected) -> bool:
    """Test if a value is that of a test in JSON: tuples are lists, keys text, True is not 1, floats to 9 digits."""
    if isinstance(value, list | tuple):
        alike = isinstance(expected, list) and len(value) == len(expected)
        return alike and all(map(same, value, expected))
    if isinstance(value, dict):
        found = {str(key): part for key, part in value.items()}
        if not isinstance(expected, dict) or len(value) != len(expected):
            return False
        alike = found.keys() == expected.keys()
        return alike and all(same(part, expected[key]) for key, part in found.items())
    if {type(value), type(expected)} in ({float}, {int, float}):
        return value == expected or math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-9)
    return type(value) is type(expected) and value == expected


def compare(tests: list, function) -> dict:
    """Call a function with the arguments of each test, and return the verdict: ``judge`` has its form."""
    for number, (given, right) in enumerate(tests):
        try:
            value = function(*given) if isinstance(given, list) else function(**given)
            passed = any(same(value, expected) for expected in right)
            wrong = "" if passed else "another value"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            return {"verdict": "failed", "why": f"test {number}: {wrong}"}
    return {"verdict": "passed", "why": ""}


def parametrize(names, rows, **ignored):
    """Run a test once for each row of arguments: pytest.mark.parametrize."""
    if isinstance(names, str):
        names = names.replace(" ", "").split(",")

    def decorate(test):
        @functools.wraps(test)
        def run_rows(*own, **more):
            for row in rows:
                values = row if len(names) > 1 else [row]
                arguments = dict(zip(names, values, strict=True))
                test(*own, **arguments, **more)

        return run_rows

    return decorate


class Raises:
    """A block that must raise: pytest.raises."""

    def __init__(self, kind, match=None):
        self.kind = kind

    def __enter__(self):
        return self

    def __exit__(self, kind, error, where):
        if kind is None:
            raise AssertionError("nothing was raised")
        self.value = error
        return issubclass(kind, self.kind)


class Approx:
    """A number, or a list of them, that equals what is close to it: pytest.approx."""

    def __init__(self, value, rel=1e-6, abs=1e-12, nan_ok=False):
        self.value, self.rel, self.abs = value, rel, abs

    def __eq__(self, other):
        close = functools.partial(math.isclose, rel_tol=self.rel, abs_tol=self.abs)
        if isinstance(self.value, int | float):
            return close(self.value, other)
        return len(self.value) == len(other) and all(map(close, self.value, other))


def run_definitions(code: str, scope: dict, used: set[str], candidate) -> None:
    """Run what test code only defines: check(candidate), and functions test_*, also those of classes Test*.

    Raises NoPlainValue for a function test_* with parameters, which would be fixtures, unless the code calls it.
    """
    for node in ast.parse(code).body:
        tests = []
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            scope["check"](candidate)
        elif isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            tests = [scope[node.name]] if f"\n{node.name}()" not in code else []
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test") and not node.bases:
            names = [member.name for member in node.body if isinstance(member, ast.FunctionDef)]
            tests = [getattr(scope[node.name](), name) for name in names if name.startswith("test_")]
        for test in tests:
            fixtures = test.__code__.co_argcount - hasattr(test, "__self__") - len(test.__defaults__ or ())
            if fixtures > 0 and test.__name__ not in used:
                raise NoPlainValue(f"{test.__name__} has a parameter, and fixtures are not supported")
            if fixtures <= 0:
                test()


# TypeErrors of a test that takes a name of the program, which is a function here, for a class.
PROGRAMS_CLASS = ("isinstance() arg 2", "issubclass() arg 2", "catching classes that do not inherit")


def judge(lines, scope: dict, before: str, code: str, entry_point: str) -> dict:
    """Run test code, and what it defines: {"verdict": "passed", "failed" or "unusable", "why": text}.

    A name that the test uses and neither it nor Python defines is a function of the program.
    """
    asked: list[str] = []
    sys.modules["pytest"] = pytest = types.ModuleType("pytest")
    pytest.raises, pytest.approx, pytest.main = Raises, Approx, lambda *arguments: 0
    pytest.mark = types.SimpleNamespace(parametrize=parametrize)
    try:
        tree = ast.parse(f"{before}\n{code}")
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        used = {node.id for node in names if isinstance(node.ctx, ast.Load)}
        for name in used - set(dir(builtins)):
            scope[name] = remote(name, lines, asked)
        for text in (before, code):
            execute("", text, scope)
            if entry_point.isidentifier():  # which some tests call by its name, and others bring as well
                scope[entry_point] = remote(entry_point, lines, asked)
        run_definitions(code, scope, used, remote(entry_point, lines, asked))
    except (Exception, SystemExit) as error:
        unusable = not asked or isinstance(error, NoPlainValue | SystemExit) or str(error).startswith(PROGRAMS_CLASS)
        verdict = "unusable" if unusable else "failed"
        return {"verdict": verdict, "why": f"{type(error).__name__}: {error}"}
    if not asked:
        return {"verdict": "unusable", "why": "it calls no function of the program"}
    return {"verdict": "passed", "why": ""}

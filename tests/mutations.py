"""Puts bugs into a copy of the project, one at a time, and shows that the fast tests notice each.

    python tests/mutations.py                          the known bugs of the KL (known_mutations.jsonl), a line each
    python tests/mutations.py --random 300 --seed 11   bugs drawn at random from the scripts, runtime/ and graders/

A server process imports torch, vLLM and DeepSpeed once. Every mutation is written into the copy, and a fork of the
server runs pytest there, in its own process: the tests that touch the line, cheapest first, up to the first failure.
What touches a line was traced before, test by test, by byte code that marks each statement in a shared map.

killed      a test failed, or hung
survived    all these tests passed, or those that fit into --seconds
equivalent  named in tests/equivalent_mutations.jsonl, with the reason why no test can notice it

It takes an hour or two of one core. Each result is written when it is known, and the same command continues. Files
that are edited while it runs are those of its start. The exit code is 1 when a mutation survived.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import ctypes
import functools
import gc
import hashlib
import importlib.util
import json
import marshal
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("grpo.py", "ppo.py", "utils.py", "rewards.py", "kl_estimators.py")
FILES = (
    *SCRIPTS,
    *(
        str(path.relative_to(ROOT))
        for folder in ("graders", "runtime")
        for path in sorted((ROOT / folder).rglob("[!_]*.py"))
    ),
)
PLACES = ("tests/unit", "tests/runs", "tests/launch")  # of the tests
EQUIVALENT = ROOT / "tests" / "equivalent_mutations.jsonl"
KNOWN = ROOT / "tests" / "known_mutations.jsonl"
KNOWN_TESTS = r"test_(kl_estimators|loss|run|fp64_update)\.py"
# Imported once, by the server: the largest part of the start of a test.
HEAVY = (
    "runtime.system.process",
    "torch",
    "accelerate",
    "deepspeed",
    "deepspeed.runtime.zero.stage_1_and_2",
    "math_verify",
    "pebble",
    "reasoning_gym",
    "transformers.models.llama.modeling_llama",
    "tyro",
    "vllm.entrypoints.llm",
    "pytest_timeout",
)
FORK_FAILED = 70  # EX_SOFTWARE: no exit code of pytest
START = 30.0  # seconds that a test, and the start of pytest, may take in addition
FEW_FILES = 8  # from which the tests of a mutation are: pytest has to import each
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h: processes that a test leaves behind become children of the server

# ------------------------------------------------------------------------------------------------------- the mutations

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutation:
    """One change of a file: the bytes from ``start`` to ``end`` are replaced by ``text``."""

    file: str
    line: int
    scope: str  # name of the function; "" for what an import runs
    kind: str
    before: str  # the lines that it changes, each run of blanks as one
    after: str
    start: int
    end: int
    text: str

    @property
    def key(self) -> str:
        """Return its name in results and in the list of equivalent ones; it does not change when lines move."""
        return f"{self.file} {self.scope}: {self.before} => {self.after}"

    def apply(self, source: bytes) -> bytes:
        """The file with the mutation in it."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def alternatives(node: ast.AST) -> Iterator[tuple[str, ast.AST | str]]:
    """(kind, what could stand in the place of ``node``) of everything that a slip of the author could have made."""
    match node:
        case ast.Compare(ops=[operator]) if type(operator) in COMPARISONS:
            yield "comparison", ast.Compare(node.left, [COMPARISONS[type(operator)]()], node.comparators)
        case ast.BinOp(op=operator) if type(operator) in OPERATORS:
            yield "operator", ast.BinOp(node.left, OPERATORS[type(operator)](), node.right)
        case ast.BoolOp(op=operator):
            yield "and, or", ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), node.values)
        case ast.UnaryOp(op=ast.USub() | ast.Not()):
            yield "sign, not", node.operand
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1)
            yield "constant", ast.Constant(node.value - 1)
        case ast.Slice(lower=lower) if lower is not None:
            yield "off by one", ast.Slice(ast.BinOp(lower, ast.Add(), ast.Constant(1)), node.upper, node.step)
        case ast.Call(args=[first, second, *others]) if not any(isinstance(a, ast.Starred) for a in node.args):
            yield "swapped arguments", ast.Call(node.func, [second, first, *others], node.keywords)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "condition", ast.UnaryOp(ast.Not(), test)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break():
            yield "dropped statement", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped statement", "pass"
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "dropped value", "return None"


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """(node, function around it) of everything but annotations, decorators, imports, docstrings and messages."""

    def walk(node: ast.AST, scope: str) -> Iterator[tuple[ast.AST, str]]:
        if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom):
            return  # Python 3.11 has no positions inside an f-string
        inner = scope
        skipped: list[ast.AST | None] = []
        match node:
            case ast.FunctionDef(name=name):
                inner = f"{scope}.{name}" if scope else name
                skipped = [*node.decorator_list, node.returns]
            case ast.ClassDef(name=name):
                inner = f"{scope}.{name}" if scope else name
                skipped = [*node.decorator_list]
            case ast.arg() | ast.AnnAssign():
                skipped = [node.annotation]
            case ast.Raise(exc=ast.Call()):
                skipped = [node.exc]
        yield node, scope
        for child in ast.iter_child_nodes(node):
            if child not in skipped:
                yield from walk(child, inner)

    yield from walk(tree, "")


def shortened(text: str) -> str:
    """Lines of code as one line, its end left out where it is long."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else f"{text[:200]} ..."


@functools.cache
def mutations_of(file: str, source: bytes) -> list[Mutation]:
    """All mutations of a file, those that change nothing but the form left out."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = source.decode().splitlines()
    found = []
    for node, scope in places(ast.parse(source)):
        for kind, other in alternatives(node):
            if isinstance(other, ast.AST) and ast.dump(other) == ast.dump(node):  # f(a, a) with its arguments swapped
                continue
            place = node.test if kind == "condition" else node
            start = starts[place.lineno - 1] + place.col_offset
            end = starts[place.end_lineno - 1] + place.end_col_offset
            text = other if isinstance(other, str) else ast.unparse(ast.fix_missing_locations(copy.deepcopy(other)))
            if not isinstance(other, str | ast.Constant | ast.Slice | ast.Call):
                text = f"({text})"
            first = starts[place.lineno - 1]
            last = starts[place.end_lineno]
            mutated = source[first:start] + text.encode() + source[end:last]
            before = shortened("\n".join(lines[place.lineno - 1 : place.end_lineno]))
            after = shortened(mutated.decode())
            found.append(Mutation(file, place.lineno, scope, kind, before, after, start, end, text))
    return list({m.key: m for m in found}.values())


def draw(sources: dict[str, bytes], number: int, seed: int) -> list[Mutation]:
    """``number`` mutations at random, at most one a line, spread over the files in proportion to their code lines.

    First a line is drawn and then one of its mutations, so a line with many operators is not drawn more often.
    """
    chance = random.Random(seed)
    by_line: dict[str, dict[int, list[Mutation]]] = {}
    for file, source in sources.items():
        by_line[file] = {}
        for mutation in mutations_of(file, source):
            by_line[file].setdefault(mutation.line, []).append(mutation)
    total = sum(map(len, by_line.values()))
    shares = {file: number * len(lines) / total for file, lines in by_line.items()}
    parts = {file: int(share) for file, share in shares.items()}
    rest = sorted(shares, key=lambda file: parts[file] - shares[file])
    for file in rest[: number - sum(parts.values())]:
        parts[file] += 1
    drawn = []
    for file, lines in by_line.items():
        for line in chance.sample(sorted(lines), min(parts[file], len(lines))):
            drawn.append(chance.choice(lines[line]))
    chance.shuffle(drawn)  # so that a part of the list is a sample, too
    return drawn


# ----------------------------------------------------------------------------------------- which tests touch which line


MAP_BYTES = 1 << 16  # one for each statement of FILES
OPEN_MAP = """
import mmap, sys
if not hasattr(sys, "line_map"):
    try:
        with open({path!r}, "r+b") as file:
            sys.line_map = mmap.mmap(file.fileno(), 0)
    except OSError:  # a sandbox
        sys.line_map = bytearray({size})
"""


def marked(source: bytes, first: int, opened: str) -> tuple[ast.Module, list[list[int]]]:
    """Return a file whose statements each set a byte of a map, from ``first`` on, and the lines of each byte.

    ``opened``: code that opens the map. A signature counts as run when its function is.
    """
    tree = ast.parse(source)
    owned: list[list[int]] = []

    def mark(node: ast.stmt) -> ast.stmt:
        inner = [n for n in ast.walk(node) if isinstance(n, ast.stmt) and n is not node]
        within = {line for n in inner for line in range(n.lineno, n.end_lineno + 1)}
        owned.append(sorted(set(range(node.lineno, node.end_lineno + 1)) - within))
        made = ast.parse(f"__map__[{first + len(owned) - 1}] = 1").body[0]
        for part in ast.walk(made):
            ast.copy_location(part, node)
        return made

    for node in list(ast.walk(tree)):
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if not isinstance(statements, list):
                continue
            head = [mark(node)] if isinstance(node, ast.FunctionDef) else []
            if isinstance(node, ast.Module):
                head = ast.parse(f"__map__ = {{}}\nexec({opened!r}, __map__)\n__map__ = __map__['sys'].line_map").body
            made: list[ast.stmt] = []
            for statement in statements:
                text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if text or getattr(statement, "module", "") == "__future__":  # they stay in front
                    made.append(statement)
                else:
                    made += [*head, *([] if isinstance(statement, ast.FunctionDef) else [mark(statement)]), statement]
                    head = []
            setattr(node, name, made + head)
    return ast.fix_missing_locations(tree), owned


class Tracer:
    """A pytest plugin that notes the lines of FILES that each test and each shared fixture runs, and how long it takes.

    A test that starts a process is marked: a script that is started as a program is not seen.
    """

    def __init__(self, root: Path, places: list[tuple[str, list[int]]]):
        self.files = {str(root / file): file for file in FILES}
        self.places = places  # (file, lines) of each byte of the map
        self.seen: set[int] = set()
        self.lines: dict[str, set[int]] = {}
        self.fixtures: dict[str, list[str]] = {}
        self.seconds: Counter[str] = Counter()
        self.passed: dict[str, bool] = {}
        self.processes: set[str] = set()
        self.reads: dict[str, set[str]] = {}
        self.current = ""
        sys.addaudithook(self.audit)

    def audit(self, event: str, arguments: tuple) -> None:
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn") and self.current:
            self.processes.add(self.current)
        if event == "open" and self.current and str(arguments[0]) in self.files:
            self.reads.setdefault(self.current, set()).add(self.files[str(arguments[0])])

    def enter(self, context: str) -> str:
        """Note from here on for ``context``; returns whose turn it was."""
        found = sys.line_map[:]
        sys.line_map[:] = bytes(len(found))
        self.seen |= {place.start() for place in re.finditer(b"\x01", found)}
        before = self.current
        self.current = context
        self.seen = self.lines.setdefault(context, set())
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.enter(item.nodeid)
        shared = [d for defs in item._fixtureinfo.name2fixturedefs.values() for d in defs if d.scope != "function"]
        self.fixtures[item.nodeid] = [f"fixture {d.baseid} {d.argname}" for d in shared]
        start = time.monotonic()
        result = yield
        self.seconds[item.nodeid] = time.monotonic() - start
        self.enter("")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef, request):
        if fixturedef.scope == "function":
            return (yield)
        before = self.enter(f"fixture {fixturedef.baseid} {fixturedef.argname}")
        try:
            return (yield)
        finally:
            self.enter(before)

    def pytest_runtest_logreport(self, report):
        self.passed[report.nodeid] = self.passed.get(report.nodeid, True) and report.passed

    def result(self) -> dict[str, dict]:
        """Of each test that passed: {test: {seconds, processes, reads: [file], lines: {file: [line, ...]}}}."""
        touched = {}
        for test, passed in self.passed.items():
            contexts = [test, *self.fixtures.get(test, ())]
            lines: dict[str, list[int]] = {}
            for number in sorted(set().union(*(self.lines.get(c, ()) for c in contexts))):
                file, own = self.places[number]
                lines.setdefault(file, []).extend(own)
            if passed:
                processes = any(c in self.processes for c in contexts)
                reads = sorted(self.reads.get(test, ()))
                touched[test] = {"seconds": self.seconds[test], "processes": processes, "reads": reads, "lines": lines}
        return touched


# ----------------------------------------------------------------------------------------------------------- the server


class Only:
    """A pytest plugin that runs the given tests in the given order, and notes the first failure and what has passed.

    A test that hangs ends the process. No test is started once they have taken three times what they should.
    """

    def __init__(self, tests: dict[str, float], said: Path):
        self.tests = tests
        self.said = said
        self.ran: list[str] = []
        self.failed = False
        self.end = 0.0

    def pytest_collection_modifyitems(self, items):
        order = {test: i for i, test in enumerate(self.tests)}
        items[:] = sorted((i for i in items if i.nodeid in order), key=lambda i: order[i.nodeid])
        for item in items:
            limit = START + 10 * self.tests[item.nodeid]
            item.add_marker(pytest.mark.timeout(limit, method="thread"), append=False)
        self.end = time.monotonic() + START + 3 * sum(self.tests.values())

    def pytest_runtest_logfinish(self, nodeid, location):
        self.ran.append(nodeid)
        if not self.failed:
            self.said.write_text(json.dumps(["", "", self.ran]))
        if not self.failed and time.monotonic() > self.end:
            pytest.exit("the other tests do not fit into the time", returncode=0)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = True
            crash = getattr(report.longrepr, "reprcrash", None)
            self.said.write_text(json.dumps([report.nodeid, str(crash and crash.message)[:300], []]))

    def pytest_collectreport(self, report):
        if report.failed:
            self.said.write_text(json.dumps([f"import of {report.nodeid}", report.longreprtext[-300:], []]))


def descendants(pid: int) -> list[int]:
    """All processes under one."""
    children = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += [int(child) for child in file.read_text().split()]
    return [d for child in children for d in (*descendants(child), child)]


class Server:
    """A copy of the project, and forks of this process that run pytest in it."""

    def __init__(self, root: Path, folder: Path):
        self.folder = folder
        self.said = folder.with_name("said.json")
        self.log = folder.with_name("pytest.log")

        def ignored(where: str, names: list[str]) -> set[str]:
            top = {".git", ".venv", ".cuda", ".engines", "runs", "models", "wandb"} if Path(where) == root else set()
            return {"__pycache__", *top}  # tests/runs are tests

        shutil.copytree(root, folder, ignore=ignored)
        for name in (".venv", "models"):
            if (root / name).exists():
                (folder / name).symlink_to((root / name).resolve())
        os.environ.setdefault("RLVR_TEST_DATA", str(root.parent / "shared" / "data"))
        os.chdir(folder)
        sys.path[:] = [place for place in sys.path if Path(place).resolve() not in (root, root / "tests")]
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        sys.path.insert(0, str(folder))
        # Other plugins of the environment would be imported, and their assertions rewritten, for each mutation.
        os.environ |= {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        for name in HEAVY:
            module = importlib.import_module(name)
            if name == "runtime.system.process":  # before torch
                module.prepare_environment()
        os.environ.pop("MASTER_PORT", None)  # every fork needs one of its own
        gc.freeze()
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("an import has started a thread; a fork of this process would lack it")
        # Byte code of the tests, once; what is mutated must never be taken from a cache.
        there = [place for place in PLACES if (root / place).is_dir()]
        code = self.run(lambda: self.pytest(["--collect-only", *there], self), limit=600)
        if code != 0:
            raise RuntimeError(f"pytest finds no tests:\n{self.log.read_text()[-3000:]}")
        self.map = folder.with_name("lines.map")
        self.map.write_bytes(bytes(MAP_BYTES))
        self.opened = OPEN_MAP.format(path=str(self.map), size=MAP_BYTES)

    def compile(self, marks: bool) -> list[tuple[str, list[int]]]:
        """Write the byte code of all files, with marks for a trace or without. Returns (file, lines) of each mark."""
        places: list[tuple[str, list[int]]] = []
        for file, source in self.sources().items():
            tree, owned = marked(source, len(places), self.opened) if marks else (ast.parse(source), [])
            places += [(file, lines) for lines in owned]
            code = compile(tree, str(self.folder / file), "exec", dont_inherit=True)
            cache = Path(importlib.util.cache_from_source(str(self.folder / file)))
            cache.parent.mkdir(exist_ok=True)
            checked = 0b11.to_bytes(4, "little") + importlib.util.source_hash(source)  # never taken for another text
            cache.write_bytes(importlib.util.MAGIC_NUMBER + checked + marshal.dumps(code))
        return places

    def sources(self) -> dict[str, bytes]:
        """The files that are mutated."""
        return {file: (self.folder / file).read_bytes() for file in FILES if (self.folder / file).exists()}

    def run(self, inside: Callable[[], int], limit: float) -> int | None:
        """Exit code of ``inside``, in a fork of this process; None if it took longer than ``limit`` seconds.

        Afterwards nothing of it is left: neither processes nor their output.
        """
        self.said.unlink(missing_ok=True)
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = FORK_FAILED
            for name in [name for name in sys.modules if name.partition(".")[0] in ("graders", "runtime")]:
                del sys.modules[name]  # what the server has imported of it has no mutation
            try:
                os.setsid()
                out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                for standard in (1, 2):
                    os.dup2(out, standard)
                code = int(inside())
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        waited, status = 0.0, None
        while status is None and waited < limit:  # by its own count: a process that is paused does not hang
            done, value = os.waitpid(pid, os.WNOHANG)
            status = value if done == pid else None
            time.sleep(0.02)
            waited += 0.02
        left = descendants(os.getpid())
        while left:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            left = descendants(os.getpid())
        return None if status is None else os.waitstatus_to_exitcode(status)

    def pytest(self, words: list[str], plugin: object) -> int:
        """In a fork: run pytest."""
        with tempfile.TemporaryDirectory(dir=self.folder.parent, ignore_cleanup_errors=True) as place:
            common = ["-q", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--tb", "short"]
            common += ["--basetemp", f"{place}/pytest"]
            os.environ["TMPDIR"] = place
            tempfile.tempdir = None
            return pytest.main([*common, *words], plugins=[plugin])

    def trace(self, file: str, places: list[tuple[str, list[int]]]) -> dict[str, dict]:
        """Return the lines that the tests of a file touch. Raises RuntimeError if pytest fails."""
        found = self.folder.with_name("traced.json")

        def inside() -> int:
            exec(self.opened, {})
            tracer = Tracer(self.folder, places)
            code = self.pytest([file], tracer)
            found.write_text(json.dumps(tracer.result()))
            return code

        code = self.run(inside, limit=1800)
        if code not in (0, 1, 5):  # a test that fails without a mutation is left out; 5: no fast tests
            raise RuntimeError(f"{file}: pytest ended with {code}:\n{self.log.read_text()[-3000:]}")
        return json.loads(found.read_text())

    def attempt(self, mutation: Mutation | None, tests: dict[str, float]) -> dict:
        """Run tests (name -> seconds) with a mutation in the copy, or without. Returns how it ended, and by which."""
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        start = time.monotonic()
        if mutation is not None:
            path = self.folder / mutation.file
            original = path.read_bytes()
            path.write_bytes(mutation.apply(original))

        def inside() -> int:
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            return self.pytest(["-x", *files], Only(tests, self.said))

        try:
            code = self.run(inside, limit=4 * START + 4 * sum(tests.values())) if tests else 0
        finally:
            if mutation is not None:
                path.write_bytes(original)
        said = json.loads(self.said.read_text()) if self.said.exists() else ["", "", []]
        if code == 4 and "while loading conftest" in self.log.read_text():  # a module that cannot be imported
            code, said = 1, ["import of tests/conftest.py", "", []]
        broken = (4, 5, FORK_FAILED) if mutation is not None else (3, 4, 5, FORK_FAILED)  # 3: tests cannot be collected
        if code in broken:
            raise RuntimeError(f"pytest itself failed with {code}:\n{self.log.read_text()[-3000:]}")
        state = "survived" if code == 0 else "killed"
        by = said[0] or ("time limit" if code in (None, 1) else f"exit code {code}")  # 1: of pytest-timeout
        seconds = round(time.monotonic() - start, 1)
        found = {"state": state, "by": by if code != 0 else "", "said": said[1], "ran": said[2]}
        return found | {"tests": len(tests), "seconds": seconds}


# ------------------------------------------------------------------------------------------------ all of it, for a draw


def read_lines(path: Path) -> list[dict]:
    """The objects of a .jsonl file; none where there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def known(sources: dict[str, bytes]) -> list[Mutation]:
    """The known bugs. Raises RuntimeError for one that no longer applies, so that it is not taken for a success."""
    found = []
    for entry in read_lines(KNOWN):
        source = sources[entry["file"]].decode()
        at = source.find(entry["text"])
        if at < 0:
            raise RuntimeError(f"{entry['what']}: {entry['file']} no longer has {entry['text']!r}")
        mutated = source.replace(entry["text"], entry["other"])
        ast.parse(mutated)
        line = source.count("\n", 0, at) + 1
        whole = sources[entry["file"]]
        change = (entry["what"], "", 0, len(whole), mutated)
        found.append(Mutation(entry["file"], line, "known", "known", *change))
    return found


def trace(server: Server, results: Path, only: str) -> dict[str, dict]:
    """Return what the fast tests touch, of test files whose names match ``only``.

    It is known from an earlier call where neither the test file nor a file that is mutated has changed.
    """
    file = results / "touched.json"
    traced = json.loads(file.read_text()) if file.exists() else {}
    product = hashlib.sha256(b"".join(server.sources().values()))
    modules = re.compile(rf"\b({'|'.join(Path(name).stem for name in server.sources())})\b")
    touched = {}
    marks = server.compile(marks=True)
    for path in sorted(p for place in PLACES for p in (server.folder / place).rglob("test_*.py")):
        if not modules.search(path.read_text()) or not re.search(only, path.name):
            continue
        name = str(path.relative_to(server.folder))
        stamp = hashlib.sha256(product.digest() + path.read_bytes()).hexdigest()
        if traced.get(name, {}).get("stamp") != stamp:
            start = time.monotonic()
            traced[name] = {"stamp": stamp, "tests": server.trace(name, marks)}
            file.write_text(json.dumps(traced))
            print(f"traced {name}: {len(traced[name]['tests'])} tests, {time.monotonic() - start:.0f} s", flush=True)
        touched |= traced[name]["tests"]
    server.compile(marks=False)
    return touched


def choose(mutation: Mutation, last: int, touched: dict[str, dict], budget: float) -> dict[str, float]:
    """Tests of a mutation of the lines up to ``last``, cheapest first, as many as fit into ``budget`` seconds.

    Those that touch its lines; then, for a quarter of the budget each, those that read the file, and those that start
    processes, where it may run unseen. What an import runs, a class's attributes as well, is touched by every test, and
    first tried by those that run another line of its file. Those of the module's own test file come before the others.
    """
    lines = set(range(mutation.line, last + 1))
    imported = not mutation.scope or mutation.scope.rpartition(".")[2].lstrip("_")[:1].isupper()
    own = f"test_{Path(mutation.file).stem}.py"
    near, readers, far = {}, {}, {}
    for test, what in touched.items():
        here = what["lines"].get(mutation.file, ())
        if lines.intersection(here) or imported:
            near[test] = what["seconds"]
        elif mutation.file in what.get("reads", ()):
            readers[test] = what["seconds"]
        elif what["processes"]:
            far[test] = what["seconds"]
    chosen: dict[str, float] = {}

    def order(test: str) -> tuple[bool, bool, float]:
        return mutation.file not in touched[test]["lines"], own not in test.partition("::")[0], touched[test]["seconds"]

    for group, part in ((near, budget), (readers, budget / 4), (far, budget / 4)):
        left = min(part, budget - sum(chosen.values()))
        files: set[str] = set()
        for test in sorted(group, key=order):
            file = test.partition("::")[0]
            if group[test] <= left and (file in files or len(files) < FEW_FILES):
                chosen[test] = group[test]
                left -= group[test]
                files.add(file)
    return chosen


def remembered(file: Path, sources: dict[str, bytes], number: int, seed: int) -> list[Mutation]:
    """The draw of an earlier call, as far as its lines are still there; a new one where ``file`` does not exist."""
    if not file.exists():
        file.write_text(json.dumps([mutation.key for mutation in draw(sources, number, seed)]))
    here = {}
    for name, source in sources.items():
        here |= {mutation.key: mutation for mutation in mutations_of(name, source)}
    return [here[key] for key in json.loads(file.read_text()) if key in here]


def run(number: int | None, seed: int, results: Path, budget: float, only: str = "") -> int:
    """Try the drawn mutations (``number`` None: the known ones) that are not in the results yet.

    Returns the number of survivors. ``only``: with the tests of the files whose names match.
    """
    results.mkdir(parents=True, exist_ok=True)
    results = results.resolve()
    kind = "known" if number is None else f"{number}-{seed}"
    file = results / f"mutations-{kind}.jsonl"
    equivalent = {entry["mutation"] for entry in read_lines(EQUIVALENT)}
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        server = Server(ROOT, Path(place) / "project")
        sources = server.sources()
        drawn = known(sources) if number is None else remembered(results / f"drawn-{kind}.json", sources, number, seed)
        done = {entry["mutation"]: entry for entry in read_lines(file)}
        touched = trace(server, results, only)
        for mutation in drawn:
            if mutation.key in done or mutation.key in equivalent:
                continue
            last = mutation.line
            if mutation.kind != "known":
                last += sources[mutation.file][mutation.start : mutation.end].count(b"\n")
            tests = choose(mutation, last, touched, budget)
            entry = {"mutation": mutation.key, "file": mutation.file, "line": mutation.line, "kind": mutation.kind}
            entry |= server.attempt(mutation, tests)
            done[mutation.key] = entry
            with open(file, "a") as out:
                out.write(json.dumps(entry) + "\n")
            print(f"{entry['state']:8} by {len(tests):3} tests  {mutation.key}", flush=True)
    print(report([asdict(m) | {"key": m.key} for m in drawn], done, equivalent))
    return sum(m.key not in equivalent and done[m.key]["state"] == "survived" for m in drawn)


def report(drawn: list[dict], done: dict[str, dict], equivalent: set[str]) -> str:
    """A table by file: drawn, killed, equivalent, survived, and the part killed of those that are not equivalent."""
    lines = [f"{'file':20}{'drawn':>8}{'killed':>8}{'equivalent':>12}{'survived':>10}{'killed of the rest':>20}"]
    for file in (*sorted({m["file"] for m in drawn}), "all"):
        own = [m["key"] for m in drawn if file in ("all", m["file"])]
        same = sum(key in equivalent for key in own)
        killed = sum(key not in equivalent and key in done and done[key]["state"] == "killed" for key in own)
        survived = sum(key not in equivalent and key in done and done[key]["state"] == "survived" for key in own)
        share = f"{killed / (killed + survived):.1%}" if killed + survived else ""
        lines.append(f"{file:20}{len(own):8}{killed:8}{same:12}{survived:10}{share:>20}")
    return "\n".join(lines)


def main() -> int:
    """Parse the command line; return 1 if a mutation survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--random", type=int, metavar="N", help="draw this many mutations at random")
    add("--seed", type=int, default=1, help="seed of the drawing (default: %(default)s)")
    add("--seconds", type=float, default=60.0, help="seconds of tests for each of them at most (default: %(default)s)")
    folder = ROOT / "runs" / "mutations"
    add("--results", type=Path, default=folder, help="folder of the results (default: %(default)s)")
    add(
        "--tests",
        metavar="REGEX",
        help="with the tests of files with such names (default: all; of the known, the KL's)",
    )
    options = parser.parse_args()
    tests = options.tests or (KNOWN_TESTS if options.random is None else "")
    return int(run(options.random, options.seed, options.results, options.seconds, tests) > 0)


if __name__ == "__main__":
    raise SystemExit(main())

"""Programs of a model: honest ones pass, and whatever the others try, they fail in time and leave nothing behind."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT
from test_verifiers import DATA

import rewards
from rewards import RewardPool, code
from runtime import sandbox
from runtime.sandbox import Sandbox

REFUSED = sandbox.namespaces_refused()
isolated = pytest.mark.skipif(bool(REFUSED), reason=f"the kernel gives no namespaces here: {REFUSED}")
TESTS = json.dumps([{"input": [1, 2], "output": 3}, {"input": [5, 7], "output": 12}, {"input": [-1, 1], "output": 0}])
ADD = {"entry_point": "add"}
MARK = os.getpid() / 10**8  # added to limits, so that the sandboxes of these tests are known by their command line
LIMIT = 1 + MARK


def passes(program: str, tests: str = TESTS, row: dict = ADD) -> bool:
    reward = code(program, tests, row)
    assert reward.status == "ok", reward
    return reward.score == 1


@pytest.fixture(autouse=True)
def _as_in_a_worker(monkeypatch):
    """Limits alone where there are no namespaces; no limit of Python's for digits."""
    monkeypatch.setattr(sandbox, "allow_unsafe", bool(REFUSED))
    most = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(most)


# ------------------------------------------------------------------------------------------------------ honest programs


def test_functions():
    assert passes("def add(a, b):\n    return a + b")
    assert passes("Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nIt adds.")
    assert passes("```\nbad(\n```\n```py\ndef add(a, b):\n    print('noise')\n    return a + b\n```")
    assert passes("import math, collections, heapq, re\ndef add(a, b):\n    return int(math.fsum([a, b]))")
    assert not passes("def add(a, b):\n    return a - b")
    assert not passes("def sum(a, b):\n    return a + b")
    assert not passes("def add(a, b):\n    return str(a + b)")
    assert not passes("def add(a, b:\n")
    assert not passes("")
    assert not passes("<think>def add(a, b):\n    return a + b")


def test_values():
    """What a function may take and return: JSON, with tuples as lists; True is not 1, floats are close."""
    echo, row = "def f(x):\n    return x", {"entry_point": "f"}
    for value in (None, True, 0, -7, 2**80, 1.5, "\u00e9\ud800\0\n", [], [[1], {"a": [None]}], {"b": {}}):
        tests = json.dumps([{"input": [value], "output": value}])
        assert passes(echo, tests, row), value
        assert not passes("def f(x):\n    return [x]", tests, row), value
    for program, output, right in (
        ("(1, 2)", [1, 2], True),
        ("{1: 2}", {"1": 2}, True),
        ("0.1 + 0.2", 0.3, True),
        ("1", 1.0, True),
        ("1", True, False),
        ("{1, 2}", [1, 2], False),
        ("float('nan')", 0.0, False),
        ("range(2)", [0, 1], False),
        ("10 ** 5000", 1, False),
        ("[[]] * 10", [[]] * 9, False),
    ):
        tests = json.dumps([{"input": [], "output": output}])
        assert passes(f"def f():\n    return {program}", tests, row) == right, program


def test_programs():
    tests = json.dumps([{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 7", "stdout": "12"}])
    assert passes("print(sum(map(int, input().split())))", tests, {})
    assert passes("import sys\nprint(sum(map(int, sys.stdin.read().split())), ' ')", tests, {})
    assert passes("import threading\ndef f(): print(sum(map(int, input().split())))\n" + THREAD, tests, {})
    assert passes("print(sum(map(int, open(0).read().split())))\nexit()", tests, {})
    assert not passes("print(3)", tests, {})
    assert not passes("print(sum(map(int, input().split())))\n1 / 0", tests, {})
    assert not passes("print(sum(map(int, input().split())))\nraise SystemExit(3)", tests, {})
    assert not passes("pass", tests, {})


THREAD = "threading.stack_size(2 ** 26)\nt = threading.Thread(target=f)\nt.start()"


def test_python_tests():
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate([1], [2]) == [1, 2]\n"
    assert passes("def add(a, b):\n    return a + b", check)
    assert not passes("def add(a, b):\n    return b", check)
    named = "def check(candidate):\n    assert candidate(1, 2) == add(1, 2) == 3\n"
    assert passes("def add(a, b):\n    return a + b", named) and not passes("def add(a, b):\n    pass", named)
    values = "def check(f):\n    assert f((1,)) == (1,) and f({1}) == {1} and f({1: (2,)}) == {1: (2,)} != f([1])\n"
    assert passes("    return x", values, {"entry_point": "f", "prompt": "def f(x):\n    'The same.'\n"})
    assert code("1", check, {**ADD, "prompt": "Write add."}).status == "unscorable"


def test_tests_that_are_none():
    for tests, row in (
        ("[]", ADD),
        ("{}", ADD),
        (TESTS, {}),
        ('[{"input": 1}]', ADD),
        ("x = 1", ADD),
        ("def check(", ADD),
    ):
        assert code("def add(a, b):\n    return a + b", tests, row).status == "unscorable", tests
        assert rewards.truth_error("code", tests, row) != "", tests
    assert rewards.truth_error("code", TESTS, ADD) == ""


# ------------------------------------------------------------------------------------------------------------ attacks

F = "def add(a, b):\n    "
ALWAYS = (
    "class Yes{base}:\n    def __eq__(self, other): return True\n    __hash__ = None\n" + F + "return Yes({value})\n"
)
DAEMON = """
import os, time
def add(a, b):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(64):
                try: os.close(fd)
                except OSError: pass
            time.sleep(30)
        os._exit(0)
    return None
"""
ATTACKS = {
    "sys.exit(0)": F + "import sys; sys.exit(0)",
    "sys.exit(0) at import": "import sys\nsys.exit(0)",
    "os._exit(0)": F + "import os; os._exit(0)",
    "os._exit(0) at import": "import os\nos._exit(0)",
    "raise SystemExit": F + "raise SystemExit(0)",
    "endless loop": F + "while True: pass",
    "endless loop at import": "while True: pass",
    "sleep": F + "import time; time.sleep(60)",
    "ignores signals": "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\n" + F + "while True: pass",
    "catches everything": F
    + "while True:\n        try:\n            while True: pass\n        except BaseException: pass",
    "regex backtracking": F + "import re; return re.match(r'(a+)+$', 'a' * 40 + 'b')",
    "huge power": F + "return 9 ** 9 ** 9",
    "memory bomb": F + "x = []\n    while True: x.append(bytearray(10 ** 7))",
    "memory bomb at once": F + "return len(bytearray(10 ** 11))",
    "recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\n" + F + "return add(a, b)",
    "segfault": F + "import ctypes; ctypes.string_at(0)",
    "daemon": DAEMON,
    "fork bomb": F + "import os\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "thread bomb": F
    + "import threading, time\n    while True: threading.Thread(target=time.sleep, args=(60,)).start()",
    "equal to everything": ALWAYS.format(base="", value=""),
    "int equal to everything": ALWAYS.format(base="(int)", value="7"),
    "list equal to everything": ALWAYS.format(base="(list)", value=""),
    "str equal to everything": ALWAYS.format(base="(str)", value="'x'"),
    "patched builtins": "import builtins, json\nbuiltins.all = builtins.any = lambda *a: True\n"
    "json.dumps = lambda *a, **k: '{\"verdict\": true}'\n" + F + "return None",
    "prints a verdict": F
    + "import os\n    for fd in range(64):\n        try: os.write(fd, b'{\"verdict\": true}\\n' * 9)\n"
    "        except OSError: pass\n    os._exit(0)",
    "rewrites the sandbox": "import __main__\n__main__.encode = lambda value: {'verdict': True}\n" + F + "return None",
    "huge number": F
    + "import os\n    for fd in range(3, 64):\n        try: os.write(fd, b'{\"value\": ' + b'9' * 3000000 + b'}\\n')\n"
    "        except OSError: pass",
    "says PASS": "print('PASS')\nprint('ok')\n" + F + "print('PASS')",
    "output flood": F + "import os\n    while True:\n        for fd in range(64):\n"
    "            try: os.write(fd, b'x' * 65536)\n            except OSError: pass",
    "huge value": F + "return 'x' * 10 ** 8",
    "deep value": F + "x = []\n    for i in range(10 ** 5): x = [x]\n    return x",
    "disk flood": F + "f = open('x', 'wb')\n    while True: f.write(b'x' * 10 ** 6)",
    "many files": F + "i = 0\n    while True:\n        open(f'x{i}', 'wb').close(); i += 1",
    "kills everybody": F + "import os\n    os.kill(-1, 9)",
    "kills the keeper": F
    + "import os, signal\n    os.kill(os.getppid(), 9); os.kill(1, 9)\n    import time; time.sleep(60)",
    "traces the keeper": F + "import ctypes\n    return 1 / (ctypes.CDLL(None).ptrace(16, 1, 0, 0) + 1)",
    "network": F
    + "import socket\n    socket.create_connection(('127.0.0.1', @PORT), 1).sendall(b'x')\n    return a + b",
    "environment": F + "import os\n    return a + b if 'RLVR_SECRET' in os.environ else None",
    "parent's environment": F + "return a + b if b'PATH=' in open('/proc/@PARENT/environ', 'rb').read() else None",
    "reads a file": F + "return a + b if open('@SECRET').read() else None",
    "reads the tests": F + "return a + b if open('@REPOSITORY/rewards.py').read() else None",
    "writes outside": F + "open('@OUTSIDE', 'w').write('x')\n    return a + b",
    "writes to the library": F
    + "import os\n    open(os.path.dirname(os.__file__) + '/RLVR.py', 'w')\n    return a + b",
    "remounts": F
    + "import ctypes, os\n    assert ctypes.CDLL(None).mount(b'none', os.path.dirname(os.__file__).encode(),"
    " None, 32 | 4096, None) == 0\n    return a + b",
    "further namespaces": F + "import ctypes\n    assert ctypes.CDLL(None).unshare(0x10000000) == 0\n    return a + b",
    "mounts memory": F + "import ctypes\n    assert ctypes.CDLL(None).mount(b't', b'/tmp', b'tmpfs', 0, None) == 0\n"
    "    return a + b",
    "becomes root": F + "import os\n    os.setuid(0)\n    return a + b",
    "runs a command": F
    + "import subprocess\n    subprocess.run(['/bin/sh', '-c', 'true'], check=True)\n    return a + b",
    "sees processes": F + "import os\n    assert any(p.isdigit() for p in os.listdir('/proc'))\n    return a + b",
}
NEED_NAMESPACES = list(ATTACKS)[list(ATTACKS).index("kills everybody") :]


def running(limit: float = LIMIT) -> list[str]:
    """Processes of this test's sandboxes, and whatever came of them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and f'"seconds": {limit},'.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
    return found


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(attack, tmp_path, monkeypatch):
    if attack in NEED_NAMESPACES and REFUSED:
        pytest.skip(f"needs namespaces: {REFUSED}")
    import socket

    monkeypatch.setenv("RLVR_SECRET", "x")
    secret, outside = tmp_path / "secret", tmp_path / "outside"
    secret.write_text("x")
    tmp_path.chmod(0o777)
    homes = tmp_path / "homes"
    homes.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(homes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        program, port = ATTACKS[attack], server.getsockname()[1]
        words = {"PORT": port, "PARENT": os.getpid(), "SECRET": secret, "OUTSIDE": outside, "REPOSITORY": ROOT}
        for word, value in words.items():
            program = program.replace(f"@{word}", str(value))
        start = time.perf_counter()
        assert not passes(program, row={**ADD, "time_limit": LIMIT}), "it passes"
        seconds = time.perf_counter() - start
        print(f"{attack}: fails after {seconds:.1f} s")
        assert seconds < LIMIT + 1
        time.sleep(0.05)
        assert running() == [], "it survives"
        assert list(homes.iterdir()) == [], "its folder stays"
        assert not outside.exists()
        with pytest.raises(BlockingIOError):
            server.accept()


def test_attacks_against_python_tests():
    """The same through check(candidate): the test code meets values, never the model's objects."""
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    for attack in ("sys.exit(0)", "os._exit(0)", "equal to everything", "int equal to everything", "prints a verdict"):
        start = time.perf_counter()
        assert not passes(ATTACKS[attack], check, {**ADD, "time_limit": LIMIT}), attack
        assert time.perf_counter() - start < LIMIT + 1
    assert not passes("def check(candidate):\n    pass\n" + F + "return 0", check)
    assert not passes(F + "raise AssertionError", check)


@isolated
def test_nothing_outside_is_seen():
    """The root, the user, the processes and the environment as the program sees them."""
    program = "import os\ndef f():\n    return [sorted(os.listdir('/')), os.getuid(), os.getpid(), sorted(os.environ)]"
    with Sandbox("calls", program, 5.0, "f") as run:
        root, user, process, environment = json.loads(run.ask(b"[]\n"))["value"]
    assert "proc" not in root and "home" not in root and "etc" not in root and "tmp" in root
    assert user in (0, 1) and process == 1 and set(environment) <= {"LC_CTYPE"}


def test_limits_without_namespaces():
    """The fall-back still ends, kills and hides the environment; a daemon dies with its program."""
    for attack in ("endless loop", "memory bomb at once", "daemon", "environment", "output flood", "ignores signals"):
        start = time.perf_counter()
        with Sandbox("calls", ATTACKS[attack], LIMIT, "add", namespaces=False) as run:
            said = run.ask(b"[1, 2]\n")
        assert b'"value": 3' not in said, attack
        assert time.perf_counter() - start < LIMIT + 1, attack
    time.sleep(0.05)
    assert running() == []


def test_no_sandbox_no_code(monkeypatch):
    monkeypatch.setattr(sandbox, "namespaces_refused", lambda: "not permitted")
    monkeypatch.setattr(sandbox, "allow_unsafe", False)
    with pytest.raises(OSError, match=r"not permitted.*--allow_unsafe_code_exec"):
        code(F + "return a + b", TESTS, ADD)
    monkeypatch.setattr(sandbox, "allow_unsafe", True)
    assert code(F + "return a + b", TESTS, ADD).score == 1


def test_a_killed_worker_takes_its_programs_along():
    """The pool kills the verifier in the middle of a program's run: nobody is left to clean up but the keeper."""
    limit = 60 + MARK
    pool = RewardPool(1, 1.5, unsafe=bool(REFUSED))
    pool.result(pool.submit("exact", "x", "x", {}))
    future = pool.submit("code", ATTACKS["ignores signals"], TESTS, {**ADD, "time_limit": limit})
    time.sleep(0.8)
    assert running(limit), "it does not run yet"
    assert pool.result(future).status == "timeout"
    deadline = time.monotonic() + 1
    while running(limit) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert running(limit) == []
    pool.close()


# ------------------------------------------------------------------------------------------------------------ HumanEval


@pytest.mark.slow
def test_humaneval():
    """All 164 canonical solutions pass, all 164 empty bodies fail, on two workers in less than three minutes."""
    if not (DATA / "HumanEval.jsonl.gz").is_file():
        pytest.skip(f"no HumanEval.jsonl.gz in {DATA}; set RLVR_TEST_DATA to the folder that has it")
    rows = [json.loads(x) for x in gzip.decompress((DATA / "HumanEval.jsonl.gz").read_bytes()).splitlines()]
    assert len(rows) == 164
    pool = RewardPool(2, 30.0, ("code",), unsafe=bool(REFUSED))
    start = time.perf_counter()
    solved = [pool.submit("code", r["canonical_solution"], r["test"], r) for r in rows]
    empty = [pool.submit("code", "    pass\n", r["test"], r) for r in rows]
    failed = [r["task_id"] for r, f in zip(rows, solved, strict=True) if pool.result(f).score != 1]
    passed = [r["task_id"] for r, f in zip(rows, empty, strict=True) if pool.result(f).score != 0]
    seconds = time.perf_counter() - start
    pool.close()
    print(f"HumanEval: {len(solved)} solutions and {len(empty)} empty bodies, {seconds:.0f} s")
    assert (failed, passed) == ([], []) and seconds < 180
    assert [r["task_id"] for r in rows if rewards.truth_error("code", r["test"], r)] == []

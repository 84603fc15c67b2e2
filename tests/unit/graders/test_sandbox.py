"""Programs of a model: honest ones pass, and whatever the others try, they fail in time and leave nothing behind."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from helpers import ROOT, real
from sandbox_attacks import BARE, FAMILIES, LINES, F

import grpo
import rewards
from graders.code import code_tests, exchange, sandbox
from graders.code.sandbox import Sandbox
from rewards import RewardPool, code

REFUSED = sandbox.namespaces_refused()
isolated = pytest.mark.skipif(bool(REFUSED), reason=f"the kernel gives no namespaces here: {REFUSED}")
TESTS = json.dumps([{"input": [1, 2], "output": 3}, {"input": [5, 7], "output": 12}, {"input": [-1, 1], "output": 0}])
ADD = {"entry_point": "add"}
LIMIT = 1.0  # seconds
SHORT = 0.5
CALL = {"function": "add", "arguments": [[], {"dict": []}], "changes": False}


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


def test_a_check_that_is_no_python_is_said_without_a_run(monkeypatch):
    monkeypatch.setattr(code_tests, "_try_tests", lambda tests: pytest.fail("it was run"))
    assert code_tests.code_error("assert f(1 == 2", {}).startswith("tests: SyntaxError")


@pytest.mark.integration
def test_tests_import_packages():
    """numpy, and whatever else is on the list; a test that needs more is rejected at the start, by name."""
    check = "import numpy as np\ndef check(candidate):\n    assert np.allclose(candidate([1.0, 2.0]), [2, 4])\n"
    double = {"entry_point": "double"}
    assert passes("def double(x):\n    return [2 * float(v) for v in x]", check, double)
    assert passes("import numpy\ndef double(x):\n    return list(numpy.float64(2) * numpy.array(x))", check, double)
    assert not passes("def double(x):\n    return x * 3", check, double)
    assert rewards.truth_error("code", check, double) == ""
    installed = [name for name in sandbox.PACKAGES if importlib.util.find_spec(name) is not None]
    assert {"numpy", "sympy"} <= set(installed)
    with Sandbox(60.0) as run:
        run.start("program", "\n".join(f"import {name}; print({name}.__version__ != '')" for name in installed))
        assert run.finish() == (0, b"True\n" * len(installed))
    for missing in ("import hypothesis\n", "from pandas import DataFrame\n"):
        wrong = rewards.truth_error("code", missing + check, double)
        assert "ModuleNotFoundError: No module named" in wrong, wrong
        reward = code("def double(x):\n    return x * 2", missing + check, double)
        assert (reward.score, reward.status) == (0, "unscorable") and "No module named" in reward.detail


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_reply_without_the_arguments_of_the_call_is_none(monkeypatch, count):
    """A program can write such lines itself; a test that looks at what it passed must not take its own for them."""
    monkeypatch.setattr(exchange, "write_line", lambda lines, message: None)
    reply = json.dumps({"value": 7, "arguments": [["new"]] * count})
    call = exchange.remote("f", io.StringIO(reply + "\n"), [])
    passed = [1], [2]
    if count == 2:
        assert call(*passed) == 7 and passed == (["new"], ["new"])
        return
    with pytest.raises(ValueError, match="zip"):
        call(*passed)


def test_a_test_finds_nothing_of_the_last():
    """The tests of a program share a sandbox, but neither files nor processes: each starts from nothing."""
    program = """
import os, sys, time
print(len(os.listdir(".")), os.path.getsize("/dev/stdout") if os.path.exists("/dev/stdout") else 0)
if os.path.exists("/proc/self"):
    print(0)
else:
    alive = 0
    for pid in range(2, os.getpid()):
        try:
            os.kill(pid, 0)
            alive += 1
        except ProcessLookupError:
            pass
    print(alive)
print(sorted(os.listdir("../..")), sorted(os.listdir("..")))
os.makedirs("x/y"); os.chmod("x", 0)
for place in ("/sandbox/x", "/sandbox/run/x", "/sandbox/run/stdin", "../x", "../../x"):
    try:
        os.chmod(os.path.dirname(place), 0o777)
        open(place, "w").write("x")
    except OSError:
        pass
sys.stdout.flush()
if os.fork() == 0:
    time.sleep(60)
"""
    home = "['packages', 'run']" if REFUSED else "['run']"
    tests = json.dumps([{"stdin": "", "stdout": f"0 0\n0\n{home} ['stdin', 'stdout', 'tmp']"}] * 4)
    assert passes(program, tests, {})


@pytest.mark.integration
def test_small_tests_are_fast():
    """121 tests of a program are over before a verification's ten seconds are."""
    tests = json.dumps([{"stdin": f"{i} 2", "stdout": f"{i + 2}"} for i in range(121)])
    start = time.perf_counter()
    assert passes("print(sum(map(int, input().split())))", tests, {})
    seconds = time.perf_counter() - start
    print(f"121 programs in {seconds:.1f} s, {1000 * seconds / 121:.0f} ms each")
    assert seconds < 10


def test_values_cross_as_they_were():
    """Encoding and decoding are inverse; a line that is wrong raises, and builds nothing foreign."""
    for value in ({"a": {"b": [None, True, 1.5]}}, ([(1,)],), {frozenset({1}): "x"}, "", [[]] * 3, {1, (2,)}, -(2**80)):
        assert exchange.decode(json.loads(json.dumps(exchange.encode(value)))) == value

    class Rate(float):
        def __pos__(self):
            return 7.0

    signs = [-0.0, 0.0, Rate(-0.0), float("nan")]
    assert repr(exchange.decode(json.loads(json.dumps(exchange.encode(signs))))) == "[-0.0, 0.0, -0.0, nan]"
    for line in LINES.values():
        with contextlib.suppress(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            assert type(exchange.decode(json.loads(line)["value"])) is int


@pytest.mark.integration
@isolated
def test_a_judge_is_burnt_not_the_worker():
    """A set whose elements all collide costs the test's process its time: no worker dies, nothing stays."""
    program = "def add(a, b):\n    return {i * (2 ** 61 - 1) for i in range(150000)}"
    burns = (
        "import os\ndef add(a, b):\n    items = ', '.join(str(i * (2 ** 61 - 1)) for i in range(80000))\n"
        "    os.write(3, ('{\"value\": {\"set\": [' + items + ']}}\\n').encode())\n"
        "    import time; time.sleep(60)"
    )
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    pool = RewardPool(1, 10.0)
    for wrong in (program, burns):
        for tests in (TESTS, check):
            start = time.perf_counter()
            reward = pool.result(pool.submit("code", wrong, tests, {**ADD, "time_limit": SHORT}))
            assert (reward.score, reward.status) == (0, "ok"), reward
            assert time.perf_counter() - start < 2 * LIMIT + 5
    pool.close()


# ------------------------------------------------------------------------------------------------------------ attacks

ATTACKS = {name: program for _, family in FAMILIES.values() for name, program in family.items()}


@isolated
def test_the_keeper_takes_no_signals():
    """A program may be of the same user as process 1 of its namespace: its tests go on."""
    program = """
import os, time
for number in range(1, 65):
    if number not in (9, 19):
        try:
            os.kill(1, number)
        except OSError:
            pass
time.sleep(0.2)
print("here")
"""
    assert passes(program, json.dumps([{"stdin": "", "stdout": "here"}] * 2), {})


def test_rows_with_numbers_of_any_length_are_checked_at_the_start():
    sys.set_int_max_str_digits(4300)
    rewards.check_reward_args(grpo.Args(verifier="code"))
    long = "7" * 5000
    given = f'{{"fn_name": "f", "inputs": [[{long}]], "outputs": [{long}]}}'
    assert rewards.truth_error("code", given, {"solution": "def f(x):\n    return x"}) == ""


def running(worker: int | None = None) -> list[int]:
    """Processes of the sandboxes of this process, or of a worker, but for the server that stands by for the next."""
    mark, found = f"of={worker or os.getpid()}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")[-1] == mark:
                found.append(int(entry.name))
    server = sandbox._server[0].pid if sandbox._server and worker is None else None
    return [pid for pid in found if pid != server]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Return the targets of attacks: (function(program) -> program with their names, function() -> what is left)."""
    homes, secret, outside = tmp_path / "homes", tmp_path / "secret", tmp_path / "outside"
    secret.write_text("x")
    tmp_path.chmod(0o777)
    homes.mkdir()
    monkeypatch.setenv("RLVR_SECRET", "x")
    monkeypatch.setattr(tempfile, "tempdir", str(homes))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        words = {"PORT": server.getsockname()[1], "PARENT": os.getpid(), "SECRET": secret, "OUTSIDE": outside}
        words |= {"REPOSITORY": ROOT, "SITE": Path(pytest.__file__).parent.parent}

        def aimed(program: str) -> str:
            for word, value in words.items():
                program = program.replace(f"@{word}", str(value))
            return program

        def left() -> list:
            connections = []
            with contextlib.suppress(BlockingIOError):
                connections.append(server.accept())
            written = [outside] if outside.exists() else []
            return [*running(), *homes.iterdir(), *written, *connections]

        yield aimed, left


@pytest.mark.integration
@isolated
@pytest.mark.parametrize("family", FAMILIES)
def test_attacks(family, world):
    """No program passes that does not add, none takes longer than its limit, and nothing is left of any."""
    aimed, left = world
    meets, programs = FAMILIES[family]
    passed, stayed, slow, longest = [], [], [], 0.0
    assert passes("def add(a, b):\n    return a + b", row={**ADD, "time_limit": 20})  # the server runs
    for name, program in programs.items():
        start = time.perf_counter()
        passed += [name] * passes(aimed(program), row={**ADD, "time_limit": SHORT})
        seconds = time.perf_counter() - start
        longest = max(longest, seconds)
        slow += [name] * (seconds > SHORT + 4)  # on a machine with ten times the work that it has cores for
        stayed += [(name, what) for what in left()]
    row = f"| {family} | {len(programs)} | {len(passed)} | {len(stayed)} | {meets} |"
    print(f"{row} the longest {longest:.1f} s")
    assert (passed, stayed, slow) == ([], [], [])


def test_there_are_two_hundred_attacks():
    page = " ".join((ROOT / "docs" / "data_and_rewards.md").read_text().split())
    assert f"Of {sum(len(programs) for _, programs in FAMILIES.values())} programs that attack the sandbox" in page
    assert len(set(ATTACKS.values())) == len(ATTACKS) >= 200


@pytest.mark.integration
@pytest.mark.parametrize("attack", BARE)
def test_attacks_that_work_without_a_sandbox(attack, world, tmp_path):
    """It is the sandbox that they fail by: a Python of its own lets each of them do what it is after."""
    program = world[0](ATTACKS[attack]) + "\nimport os, signal\nprint(add(1, 2), flush=True)\nos.killpg(0, 9)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=20, start_new_session=True
    )
    assert done.stdout == b"3\n", done.stderr


@pytest.mark.integration
def test_attacks_against_python_tests():
    """The same through check(candidate): the test code meets values, never the model's objects."""
    check = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    names = ("sys.exit(0)", "os._exit(0)", "equal to everything", "int equal to everything", "says a verdict")
    for attack in (*names, *(f"says {name}" for name in LINES)):
        start = time.perf_counter()
        assert code(ATTACKS[attack], check, {**ADD, "time_limit": LIMIT}).score == 0, attack
        assert time.perf_counter() - start < LIMIT + 4
    assert not passes("def check(candidate):\n    pass\n" + F + "return 0", check)
    assert code(F + "return 0", "def check(candidate):\n    pass\n", ADD).status == "unscorable"
    assert not passes(F + "raise AssertionError", check)


@pytest.mark.integration
def test_attacks_against_programs():
    """The same where what is printed counts."""
    tests = json.dumps([{"stdin": "1 2", "stdout": "3"}])
    for attack in ("sys.exit(0)", "endless loop at import", "output flood", "daemon", "disk flood", "says a verdict"):
        start = time.perf_counter()
        assert not passes(ATTACKS[attack] + "\nadd(1, 2)", tests, {"time_limit": LIMIT}), attack
        assert time.perf_counter() - start < LIMIT + 4
    assert running() == []


@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux is not installed")
def test_what_the_kernel_gives_to_others_the_sandbox_has():
    """A sandbox that were rejected for a bug of its own would skip all the tests that need one."""
    mount = "echo 0 > /proc/sys/user/max_user_namespaces && mount -t tmpfs none /proc"
    namespaces = ("--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--pid", "--fork")
    done = subprocess.run(["unshare", *namespaces, "sh", "-c", mount], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        pytest.skip(f"the kernel gives no namespaces here: {done.stderr}")
    assert REFUSED == ""


def test_a_root_that_is_not_built_is_not_waited_for(monkeypatch):
    """Its builder may be killed silently, for example by the out-of-memory killer."""
    monkeypatch.setattr(sandbox, "kernel", lambda *_: os._exit(1))
    socket.setdefaulttimeout(5)
    try:
        with pytest.raises(OSError, match="the namespaces cannot be prepared"):
            sandbox.prepare_namespaces({})
    finally:
        socket.setdefaulttimeout(None)


@pytest.mark.parametrize("process", ["launcher", "keeper"])
def test_a_sandbox_that_cannot_start_says_why(monkeypatch, process):
    """Whoever waits for it has that in the message: what the kernel rejected, not that a connection ended."""

    def refuse(*_):
        raise OSError("unshare: Operation not permitted")

    def leave(code):
        raise SystemExit(code)

    monkeypatch.setattr(sandbox, "kernel", refuse)
    monkeypatch.setattr(os, "_exit", leave)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        with pytest.raises(SystemExit) as end:
            {"launcher": sandbox.launch, "keeper": sandbox.keep}[process](theirs, {"isolated": True}, (0, 1))
        ours.settimeout(5)
        theirs.close()
        assert (end.value.code, ours.recv(100)) == (1, b"unshare: Operation not permitted")


@isolated
def test_nothing_outside_is_seen():
    """The root, the user, the processes and the environment as the program sees them."""
    program = "import os\ndef f():\n    return sorted(os.listdir('/')), os.getuid(), os.getpid(), sorted(os.environ)"
    with Sandbox(5.0) as run:
        run.start("calls", program)
        reply = run.ask(json.dumps(CALL | {"function": "f"}).encode() + b"\n")
    root, user, process, environment = exchange.decode(json.loads(reply)["value"])
    assert "proc" not in root and "home" not in root and "tmp" in root and sandbox.HOME[1:] in root
    assert user in (0, 1) and process == 2 and set(environment) <= {"LC_CTYPE", "OPENBLAS_NUM_THREADS"}


@isolated
def test_all_but_the_own_folder_is_read_only():
    """By the mount, not only by the rights of files: a user may well own Python's library."""
    program = """
import os, numpy
library = os.path.dirname(os.__file__)
for path in ("/", library, numpy.__path__[0], library + "/site-packages", "."):
    flags = os.statvfs(path).f_flag
    print(bool(flags & os.ST_RDONLY), bool(flags & os.ST_NOSUID))
"""
    with Sandbox(20.0) as run:
        run.start("program", program)
        assert run.finish() == (0, b"True True\n" * 4 + b"False True\n")


@isolated
def test_executable_files_are_not_there():
    """Of this machine's files, only Python's library and shared libraries are: no file in there is a program."""
    program = """
import os
for folder, _, files in os.walk("/"):
    for file in files:
        path = os.path.join(folder, file)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            with open(path, "rb") as f:
                if f.read(4) == b"\\x7fELF" and ".so" not in file:
                    print(path)
            if file.startswith(("ld-", "libc.so")):
                print(path)
"""
    with Sandbox(20.0) as run:
        run.start("program", program)
        assert run.finish() == (0, b"")


@isolated
@pytest.mark.parametrize(
    "attack",
    [
        "memory of several processes",
        *("shared memory that is not resident", "memory behind a device", "huge pages", "shared huge pages"),
    ],
)
def test_the_memory_of_all_processes_is_watched(attack):
    """Five processes of 250 MB each: the launcher's own sum ends them before they all have theirs.

    Memory that the sum would not have is rejected.
    """
    once = json.dumps([{"input": [1, 2], "output": 3}])
    assert not passes(ATTACKS[attack], once, {**ADD, "time_limit": 5})


def test_a_long_answer_is_not_read(monkeypatch):
    """Show that reading it is bounded in time and memory."""
    monkeypatch.setattr(sandbox, "LONGEST_LINE", 10**5)
    for length, answered in ((10**4, True), (10**6, False)):
        with Sandbox(5.0) as run:
            run.start("calls", f"def f():\n    return 'x' * {length}")
            assert bool(run.ask(json.dumps(CALL | {"function": "f"}).encode() + b"\n")) == answered


@pytest.mark.parametrize(("machine", "ptrace"), [("x86_64", 101), ("aarch64", 117)])
def test_each_processor_has_its_own_numbers(monkeypatch, machine, ptrace):
    monkeypatch.setattr(sandbox.os, "uname", lambda: SimpleNamespace(machine=machine))
    assert sandbox.refused_calls()["ptrace"] == ptrace


def test_a_processor_whose_numbers_are_unknown_has_no_sandbox(monkeypatch):
    monkeypatch.setattr(sandbox.os, "uname", lambda: SimpleNamespace(machine="riscv64"))
    with pytest.raises(OSError, match="system calls of riscv64 are not known"):
        sandbox.refused_calls()


def test_numbers_of_system_calls():
    """Those of the table are those of the kernel's headers."""
    headers = ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm-generic/unistd.h"]
    if not all(map(os.path.isfile, headers)):
        pytest.skip("the kernel's headers are not installed")
    for column, header in enumerate(headers, 1):
        found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", Path(header).read_text()))
        for call in sandbox.REFUSED_CALLS.split(","):
            name, number = call.split()[0], call.split()[column]
            assert number == "-" or found.get(name, number) == number, (name, header)
            assert number == "-" or name in found or int(number) > 440, (name, header)  # newer than the headers
        _, *numbers = list(sandbox.ARCHITECTURES.values())[column - 1]
        assert [found[name] for name in ("socket", "clone", "mmap")] == list(map(str, numbers))


@pytest.mark.integration
def test_limits_without_namespaces(world):
    """The fall-back still ends, kills, hides the environment, has no network, and leaves nothing, however deep."""
    names = ("endless loop", "memory bomb at once", "daemon", "environment", "output flood", "ignores signals")
    names += ("deep folders", "folders without rights", "network", "virtual machines' sockets", "runs a shell")
    names += ("reads a key", "memory of several processes", "System V memory")
    call = json.dumps(CALL | {"arguments": [[1, 2], {"dict": []}]}).encode() + b"\n"
    aimed, left = world
    for attack in names:
        start = time.perf_counter()
        with Sandbox(SHORT, isolated=False) as run:
            run.start("calls", aimed(ATTACKS[attack]))
            said = run.ask(call)
        assert b'"value": 3' not in said, attack
        assert time.perf_counter() - start < SHORT + 4 or attack == "deep folders", attack  # a disk removes them
        assert left() == [], attack


def test_the_folder_goes_when_the_worker_is_gone(world):
    """Without namespaces too: the launcher removes it when nobody is there to ask for anything."""
    run = Sandbox(60.0, isolated=False)
    run.start("calls", "import os\nos.makedirs('x/y')\nwhile True: pass")
    assert Path(run.home).is_dir()
    run._close(run.replies, run.channel, run.control)  # as the kernel does for a worker that is killed
    deadline = time.monotonic() + 5
    while world[1]() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert world[1]() == []


def test_no_sandbox_no_code(monkeypatch):
    monkeypatch.setattr(sandbox, "namespaces_refused", lambda: "not permitted")
    monkeypatch.setattr(sandbox, "allow_unsafe", False)
    with pytest.raises(OSError, match=r"not permitted.*--allow_unsafe_code_exec"):
        code(F + "return a + b", TESTS, ADD)
    assert rewards.truth_error("code", TESTS, ADD) == ""  # the run as a whole is rejected for it
    monkeypatch.setattr(sandbox, "allow_unsafe", True)
    assert code(F + "return a + b", TESTS, ADD).score == 1


def started(worker: int) -> list[int]:
    """The processes of a worker's sandbox, once there are all four: server, launcher, keeper and program."""
    deadline = time.monotonic() + 5
    while len(running(worker)) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    return running(worker)


def gone(worker: int) -> bool:
    deadline = time.monotonic() + 2
    while running(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    return running(worker) == []


@pytest.mark.integration
def test_a_killed_worker_takes_its_programs_along(world):
    """The pool kills the verifier in the middle of a program's run: nobody is left to clean up but the launcher."""
    _, left = world
    pool = RewardPool(1, 2.0, ("code",), unsafe=bool(REFUSED))
    pool.result(pool.submit("exact", "x", "x", {}))
    (worker,) = [child.pid for child in psutil.Process(pool.nursery.process.pid).children()]
    future = pool.submit("code", ATTACKS["ignores signals"], TESTS, {**ADD, "time_limit": 60})
    assert len(started(worker)) >= 4
    assert pool.result(future).status == "timeout"
    assert gone(worker) and left() == []
    pool.close()


@isolated
@pytest.mark.parametrize("attack", ["daemon without a death signal", "ignores signals"])
def test_a_killed_launcher_takes_its_programs_along(attack):
    """The out-of-memory killer may take it: its namespace ends with it, whatever the program did to its signals."""
    program = ATTACKS[attack].replace("return None", "time.sleep(60)")
    with Sandbox(60.0) as run:
        run.start("calls", program)
        run.channel.sendall(json.dumps(CALL | {"arguments": [[1, 2], {"dict": []}]}).encode() + b"\n")
        time.sleep(0.3)
        server = psutil.Process(sandbox._server[0].pid)
        (launcher,) = server.children()
        assert len(running()) >= 3
        launcher.kill()
        deadline = time.monotonic() + 2
        while running() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert running() == []


@isolated
def test_a_program_whose_launcher_is_killed_has_no_output():
    """Nor that of the program before it in the same sandbox."""
    with Sandbox(20.0) as run:
        run.start("program", "print('first')")
        assert run.finish() == (0, b"first\n")
        run.start("program", "while True: pass")
        (launcher,) = psutil.Process(sandbox._server[0].pid).children()
        launcher.kill()
        assert run.finish() == (None, b"")


def test_a_killed_server_is_replaced():
    assert passes(F + "return a + b")
    sandbox._server[0].kill()
    sandbox._server[0].wait()
    assert passes(F + "return a + b")


AS_USER = """
import os, sys
from pathlib import Path
from graders.code import sandbox

library = str(Path(sys.base_prefix).resolve())
closed = [folder for folder in Path(library).parents if not folder.stat().st_mode & 1]
if closed:  # Python lies in root's own folder, which is to show nothing else
    sandbox.kernel("unshare", sandbox.NEW_MOUNTS)
    sandbox.kernel("mount", "none", "/", None, 0x44000, None)  # private, recursive
    opened = os.open(library, os.O_PATH)
    sandbox.kernel("mount", "tmpfs", str(closed[-1]), "tmpfs", 0, "mode=755")
    os.makedirs(library)
    sandbox.kernel("mount", f"/proc/self/fd/{opened}", library, None, 0x1000, None)  # bind
os.setgroups([])
os.setresgid(65533, 65533, 65533)
os.setresuid(65533, 65533, 65533)
os.execv(sys.executable, [sys.executable, "-m", "pytest", *sys.argv[1:]])
"""


@pytest.mark.integration
@isolated
@pytest.mark.skipif(os.geteuid() != 0, reason="all tests are those of such a user here")
@pytest.mark.parametrize(
    "which",
    [
        "finds_nothing or takes_no_signals or nothing_outside or read_only or killed_launcher",
        pytest.param("not as_a_user", marks=pytest.mark.slow),
    ],
)
def test_the_same_as_a_user_that_is_not_root(which):
    """The usual one: its programs are of the same user as the processes that watch them."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        places = ["-p", "no:cacheprovider", "--basetemp", f"{folder}/tests"]
        command = [sys.executable, "-c", AS_USER, *places, "-q", "-x", "-m", "not slow", "-k", which, __file__]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]


# ------------------------------------------------------------------------------------------------------------ HumanEval


@pytest.mark.slow
def test_humaneval():
    """All 164 canonical solutions pass, all 164 empty bodies fail, on two workers in less than three minutes."""
    rows = [json.loads(x) for x in gzip.decompress(real("HumanEval.jsonl.gz").read_bytes()).splitlines()]
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

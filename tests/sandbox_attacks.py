"""Programs that try to score without solving, to get out, to take everything, or to stay: {family: {name: program}}.

Each is asked for add(a, b). What gets what it is after returns the sum, so a score of 1 is a break; PORT,
SECRET, OUTSIDE, PARENT, REPOSITORY and SITE after an @ are replaced by those of the test. Those that are written by
hand are the lines of sandbox_attacks.jsonl; what follows from a table, or from this processor's numbers, is made here.
"""

from __future__ import annotations

import os

from helpers import ROOT, read_jsonl

from graders.code import sandbox

MACHINE = os.uname().machine
CALLS = sandbox.refused_calls() if MACHINE in sandbox.ARCHITECTURES else {}
MMAP = sandbox.ARCHITECTURES.get(MACHINE, [None] * 4)[3]
F = "def add(a, b):\n    "
WRITTEN = read_jsonl(ROOT / "tests" / "sandbox_attacks.jsonl")
BARE = [attack["name"] for attack in WRITTEN if attack.get("bare")]  # they work where there is no sandbox


def call(*arguments: object) -> str:
    """A function add that returns the sum where a system call is not rejected with EPERM."""
    listed = ", ".join(map(str, arguments))
    return (
        F
        + "import ctypes\n    libc = ctypes.CDLL(None, use_errno=True)\n    "
        + f"refused = libc.syscall({listed}) == -1 and ctypes.get_errno() in (1, 38)\n    assert not refused"
        + "\n    return a + b"
    )


YES = (
    "class Yes({kind}):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    "def add(a, b):\n    return Yes({value})\n"
)
KINDS = {"int": "7", "float": "7.5", "str": "'x'", "list": "", "dict": "", "tuple": "", "set": "", "complex": "1"}
KINDS["bytes"] = "b'x'"
LINES = {
    "a verdict": '{"verdict": "passed", "why": ""}',
    "a verdict of the old form": '{"verdict": true}',
    "nothing": "",
    "an empty object": "{}",
    "null": "null",
    "true": "true",
    "a number": "3",
    "text": '"3"',
    "a list": "[3]",
    "a value and an error": '{"value": 3, "error": ["ValueError", "3", "ValueError"]}',
    "parts that are none": '{"value": {"tuple": null}}',
    "no value": '{"arguments": []}',
    "no kind": '{"value": {}}',
    "two kinds": '{"value": {"tuple": [3], "list": [3]}}',
    "a number that is none": '{"value": {"int": "three"}}',
    "a list as a key": '{"value": {"dict": [[[3], 3]]}}',
    "a kind that calls": '{"value": {"os.system": ["true"]}}',
    "a kind that imports": '{"value": {"builtins.eval": ["3"]}}',
    "an instance": '{"value": {"object": ["int"]}}',
    "a huge number": '{"value": ' + "9" * 3000 + "}",
    "an error": '{"error": ["SystemExit", "0"]}',
    "an error that is none": '{"error": 3}',
    "brackets": "[" * 5000,
    "no JSON": "PASS",
}
SAYS = (
    F
    + "import os\n    for fd in range(64):\n        try: os.write(fd, {text!r} * 9)\n"
    + "        except OSError: pass\n    os._exit(0)"
)
MADE = [  # what they try, what they meet, and the programs that are made here
    ("exits, signals and exceptions, at import or when called", "an end is no value", {}),
    (
        "never end: loops, sleep, ignored signals, backtracking, a huge power",
        "killed at the limit, with all their processes",
        {},
    ),
    (
        "take all: memory of every kind, processes, threads, disk, files, output, values",
        "a limit, or no such system call",
        {
            "huge pages": call(MMAP, 0, 2**21, 3, 0x40022, -1, 0),
            "shared huge pages": call(MMAP, 0, 2**21, 3, 0x40021, -1, 0),
        },
    ),
    (
        "return what equals everything, or what is no sum",
        "only plain values leave the process, and they are compared elsewhere",
        {f"{kind} equal to everything": YES.format(kind=kind, value=value) for kind, value in KINDS.items()},
    ),
    (
        "write answers and verdicts themselves, patch or search the sandbox",
        "the other side looks at values alone; the right ones were never there",
        {f"says {name}": SAYS.format(text=f"{text}\n".encode()) for name, text in LINES.items()},
    ),
    (
        "stay: daemons, zombies; kill, stop or trace the others",
        "process 1 is not theirs, and with it their namespace ends",
        {"takes the keeper's descriptors": call(CALLS.get("pidfd_getfd"), "__import__('os').pidfd_open(1)", 3, 0)},
    ),
    ("files, environment, processes, packages, devices", "are not there, or cannot be written", {}),
    (
        "get out: network, mounts, namespaces, users, commands",
        "no such rights, and no such system calls",
        {"a process in new namespaces": call(sandbox.ARCHITECTURES[MACHINE][2], 0x10000011, 0, 0, 0, 0)},
    ),
    (
        "keys of the user or the session, and keys for later programs",
        "no such system calls",
        {
            "finds its session's keyring": call(CALLS.get("keyctl"), 0, -3, 0),
            "reads a key": call(CALLS.get("keyctl"), 10, -3, "b'user'", "b'RLVR'", 0),
            "clears the keyring": call(CALLS.get("keyctl"), 7, -3),
            "leaves a key": call(CALLS.get("add_key"), "b'user'", "b'RLVR'", "b'x'", 1, -3),
            "leaves a key with the user": call(CALLS.get("add_key"), "b'user'", "b'RLVR'", "b'x'", 1, -4),
            "asks for a key": call(CALLS.get("request_key"), "b'user'", "b'RLVR'", None, -3),
            "a new keyring": call(CALLS.get("keyctl"), 1, None),
        },
    ),
    (
        "system calls that reach further, by number",
        "rejected by a filter",
        {f"system call {name}": call(number, 0, 0, 0, 0, 0) for name, number in CALLS.items()},
    ),
]
FAMILIES = {  # what they try -> (what they meet, the programs)
    family: (meets, made | {attack["name"]: attack["program"] for attack in WRITTEN if attack["family"] == family})
    for family, meets, made in MADE
}

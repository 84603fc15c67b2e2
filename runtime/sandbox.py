"""A sandbox for a model's code: ``Sandbox``, and the program that it starts, ``python -I -S sandbox.py SETTINGS``.

The program is two processes. The launcher takes its own user and process namespaces, waits for the end, the time-out
or its parent's death, and kills everything. Its child, process 1 in there, goes into an empty root with nothing but the
standard library (read-only), an empty network and no rights, takes the limits upon itself, and runs the job:

    program   stdin is the job's text, stdout the parent's file
    calls     for each line with arguments from the channel, a line {"value": ...} or {"error": name} back
    judge     a test's check(candidate); the candidate's arguments go out and its value comes back as such lines

What a program must not know, such as the values it should return, stays with the parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import resource
import select
import signal
import sys

LIMITS = {"AS": 2**30, "FSIZE": 2**22, "NPROC": 16, "NOFILE": 64, "CORE": 0}  # RLIMIT_*: bytes, counts
allow_unsafe = False  # in a worker: what --allow_unsafe_code_exec says
KINDS = {"tuple": tuple, "set": set, "dict": dict}  # that JSON does not have, or not with keys of any kind


def encode(value):
    """A plain value for JSON: tuples, sets and dicts under their name. Raises TypeError for any other object."""
    for name, kind in KINDS.items():
        if isinstance(value, kind):
            return {name: [encode(v) for v in (value.items() if kind is dict else value)]}
    if isinstance(value, list):
        return [encode(v) for v in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a {type(value).__name__} is no plain value")


def decode(value):
    """The value again. Raises what wrong input makes of it, for a program may send any line."""
    if isinstance(value, dict):
        ((name, items),) = value.items()
        return KINDS[name](decode(v) for v in items)
    return [decode(v) for v in value] if isinstance(value, list) else value


def kernel(name, *arguments):
    """A call of libc that returns 0 or raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*(a.encode() if isinstance(a, str) else a for a in arguments)) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def isolate(readable, user):
    """Leave this machine's files, network and rights behind; ``readable`` folders stay, ``user`` is who to become."""
    kernel("unshare", 0x00020000 | 0x40000000 | 0x08000000 | 0x04000000)  # mounts, network, ipc, host name
    with open("/proc/sys/user/max_user_namespaces", "w") as f:  # no further ones, where it would be root again
        f.write("0")
    root = os.getcwd()
    kernel("mount", "tmpfs", root, "tmpfs", 0, "size=32m,nr_inodes=4096,mode=755")
    for path in readable:
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
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kernel("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
    kernel("prctl", 38, 1, 0, 0, 0)  # no new privileges


def run(channel, say, limits, mode, entry_point, code, text):
    """The job, in process 1, once the limits hold."""
    stdin = os.memfd_create("stdin")
    os.write(stdin, text.encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    if mode != "program":
        os.dup2(2, 1)  # to /dev/null: what is printed is no value
    say("ready")
    __builtins__.exit = __builtins__.quit = sys.exit  # programs use them; the site module, left out, defines them
    scope = {"__name__": "__main__" if mode == "program" else "solution"}
    exec(compile(code, mode, "exec"), scope)

    def candidate(*arguments):
        """The function under test, as the test sees it: it runs in another sandbox. KeyError where it raised."""
        say(json.dumps(encode(arguments)))
        return decode(json.loads(channel.readline())["value"])

    if mode == "judge":
        scope[entry_point] = candidate  # some tests call it by its name too
        scope["check"](candidate)
    for line in channel if mode == "calls" else ():
        try:
            reply = {"value": encode(scope[entry_point](*decode(json.loads(line))))}
        except BaseException as error:
            reply = {"error": type(error).__name__}
        say(json.dumps(reply))


def main(namespaces, seconds, channel, limits, readable, user):
    """Both processes; each ends with its own exit code, the launcher with the program's."""
    channel, program = os.fdopen(channel, "rb"), None

    def say(text):
        os.write(channel.fileno(), text.encode() + b"\n")

    def children():
        with open(f"/proc/self/task/{os.getpid()}/children") as f:
            return [int(pid) for pid in f.read().split()]

    try:
        if namespaces:
            kernel("unshare", 0x10000000 | 0x20000000)  # users, processes
        else:
            kernel("prctl", 36, 1, 0, 0, 0)  # orphans become this process's children
        say("alone")
        job = json.loads(sys.stdin.buffer.readline())
        program = os.fork()
        if program == 0:
            os.setsid()
            if namespaces:
                isolate(readable, user)
            kernel("prctl", 1, signal.SIGKILL, 0, 0, 0)  # dies with the launcher
    except OSError as error:
        say(str(error))
        os._exit(1)
    if program == 0:
        return run(channel, say, limits, **job)
    channel.close()
    events = select.poll()
    events.register(os.pidfd_open(program), select.POLLIN)
    events.register(0, 0)  # nothing but the end of the pipe: the parent closed it, or died
    events.poll(seconds * 1000)
    status = 0
    while pids := children():  # orphans too; with process 1 the kernel kills its whole namespace
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            _, ended = os.waitpid(pid, 0)
            status = ended if pid == program else status
    os._exit(os.waitstatus_to_exitcode(status) & 255)


# ---------------------------------------------------------------------------------------------- the parent's side


class Sandbox(contextlib.ExitStack):
    """One job in a fresh process that sees neither this one's environment, files, network nor processes.

    Use as a context manager: leaving it kills whatever the job started. ``namespaces=False`` leaves only the limits.
    Raises OSError where the kernel refuses.
    """

    def __init__(self, mode: str, code: str, seconds: float, entry_point="", text="", namespaces: bool | None = None):
        import socket  # here: the program, started for every test, must not pay for them
        import subprocess
        import tempfile

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
        settings["limits"] = {**LIMITS, "CPU": int(seconds) + 2}
        settings["readable"] = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", os.path.dirname(os.__file__)]
        settings["user"] = int(user == 0)  # root would have no limit of processes, so it maps a second user, nobody
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), json.dumps(settings)],
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
                    with open(f"/proc/{self.process.pid}/{file}", "w") as f:
                        f.write(who)
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
            return self.replies.readline(LIMITS["FSIZE"])
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


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

"""A sandbox for a model's programs: ``Sandbox``, and the processes behind it, ``python -I -S - < sandbox.py``.

Each process below starts the next. Only the last one ever sees a program or its input, so nothing that an earlier
program or its tests left in memory can be found by a later one.

    server     one per worker; stands by with Python loaded, so that a sandbox costs a fork and not a start
    launcher   one per sandbox; watches the memory, the keeper and the parent, and ends and removes everything
    keeper     process 1 of new namespaces, where there is nothing but the standard library; holds the time limit
    program    drops every right, takes the limits upon itself, closes system calls, and runs its job (exchange.py)

What a program must not know, such as the values that it should return, is never sent to its sandbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import gc
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
import types

MEMORY = 2**30  # bytes of address space a process, and bytes resident of all processes of a program together
FILES = 2**25  # bytes of all files of a program
# RLIMIT_*: bytes and counts, for one process or, NPROC, all
LIMITS = {"AS": MEMORY, "FSIZE": 2**22, "MEMLOCK": 2**16, "NPROC": 16, "NOFILE": 64, "CORE": 0, "MSGQUEUE": 0}
LONGEST_LINE = 2**22  # bytes of one line from a program
CHANNEL = 3  # the program's file descriptor of its channel
WATCH_SECONDS = 0.05  # between two looks at the memory of a program
# What programs and tests may import beyond the standard library, where the run's own Python has it, read-only.
PACKAGES = ("numpy", "sympy", "mpmath", "networkx", "sortedcontainers")
PACKAGE_FOLDER = "/packages"  # in the new root
# Libraries of the system that wheels may count on (PEP 513, PEP 571, PEP 599).
WHEEL_LIBRARIES = ("libgcc_s.so.1", "libstdc++.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0")
WHEEL_LIBRARIES += ("libutil.so.1", "libz.so.1")
HOME = "/sandbox"  # in the new root, a file system in memory
RUN = "/run"  # in there: the program's input and output, and its folder tmp
DEVICES = ("null", "full", "random", "urandom")  # not zero: to map it shared is to share memory
# These files as they are now: the servers of a run's sandboxes are all of this text, whatever is edited meanwhile.
SOURCES: list[str] = []
if __name__ != "__main__":
    for name in ("sandbox.py", "exchange.py"):
        with open(f"{os.path.dirname(__file__)}/{name}", encoding="utf-8") as own_file:
            SOURCES.append(own_file.read())
allow_unsafe = False  # in a worker: what --allow_unsafe_code_exec says

NEW_MOUNTS, NEW_NAMES, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USERS, NEW_PROCESSES, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
DEATH_SIGNAL, FILTER_CALLS, ADOPT_ORPHANS, NO_NEW_RIGHTS = 1, 22, 36, 38  # of prctl
ANY_NAMESPACE = NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_USERS | NEW_PROCESSES | NEW_NETWORK | 0x02000000


# ----------------------------------------------------------------------------------------------------- the kernel


def kernel(name: str, *arguments):
    """Call a function of libc that returns 0 or more. Raises OSError if it returns less."""
    libc = ctypes.CDLL(None, use_errno=True)
    result = getattr(libc, name)(*(a.encode() if isinstance(a, str) else a for a in arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


# System calls that a program gets no answer from: name, number on x86-64, number on 64-bit ARM.
REFUSED_CALLS = """
acct 163 89, add_key 248 217, adjtimex 159 171, bpf 321 280, chroot 161 51, clock_adjtime 305 266,
clock_settime 227 112, delete_module 176 106, execve 59 221, execveat 322 281, fanotify_init 300 262,
finit_module 313 273, fsconfig 431 431, fsmount 432 432, fsopen 430 430, fspick 433 433, init_module 175 105,
io_setup 206 0, io_submit 209 2, io_uring_enter 426 426, io_uring_register 427 427, io_uring_setup 425 425,
ioperm 173 -, iopl 172 -, kcmp 312 272, kexec_file_load 320 294, kexec_load 246 104, keyctl 250 219,
memfd_create 319 279, memfd_secret 447 447, modify_ldt 154 -, mount 165 40, mount_setattr 442 442,
move_mount 429 429, mq_open 240 180, msgctl 71 187, msgget 68 186, msgrcv 70 188, msgsnd 69 189,
name_to_handle_at 303 264, open_by_handle_at 304 265, open_tree 428 428, perf_event_open 298 241, personality 135 92,
pidfd_getfd 438 438, pivot_root 155 41, process_madvise 440 440, process_vm_readv 310 270, process_vm_writev 311 271,
ptrace 101 117, quotactl 179 60, reboot 169 142, request_key 249 218, semctl 66 191, semget 64 190, semop 65 193,
semtimedop 220 192, setdomainname 171 162, sethostname 170 161, setns 308 268, settimeofday 164 170, shmat 30 196,
shmctl 31 195, shmget 29 194, swapoff 168 225, swapon 167 224, syslog 103 116, umount2 166 39, unshare 272 97,
userfaultfd 323 282
"""
CLONE3 = 435  # its flags lie in memory where a filter cannot look; libc falls back to clone
# Audit number, and the numbers of socket, clone and mmap.
ARCHITECTURES = {"x86_64": (0xC000003E, 41, 56, 9), "aarch64": (0xC00000B7, 198, 220, 222)}
SHARED_MEMORY, HUGE_PAGES = 0x21, 0x40000  # flags of mmap: MAP_SHARED with MAP_ANONYMOUS, MAP_HUGETLB
LOAD, EQUAL, AT_LEAST, ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06  # instructions of a filter
KILL, ALLOW, FAIL = 0x80000000, 0x7FFF0000, 0x00050000  # its verdicts; FAIL takes an error number


def refused_calls() -> dict[str, int]:
    """Return the system calls of REFUSED_CALLS with their numbers. Raises OSError on a machine that is in no column."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"the numbers of the system calls of {machine} are not known")
    column = 1 + list(ARCHITECTURES).index(machine)
    calls = [call.split() for call in REFUSED_CALLS.split(",")]
    return {call[0]: int(call[column]) for call in calls if call[column] != "-"}


def close_system_calls() -> None:
    """Leave the program no system call that reaches beyond its own memory, files and processes.

    Sockets are of the family AF_UNIX only: virtual machines' sockets, for one, are in no namespace. There is no shared
    memory without a file, and there are no huge pages: what such memory holds counts as resident in no process.
    Raises OSError where the kernel has no filters, or this machine's calls have other numbers.
    """
    calls = refused_calls()
    machine, open_socket, clone, mmap = ARCHITECTURES[os.uname().machine]
    refused = RETURN, 0, 0, FAIL | errno.EPERM
    program = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, machine), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    program += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]  # the 32-bit calls of x86-64
    for number in calls.values():
        program += [(EQUAL, 0, 1, number), refused]
    program += [(EQUAL, 0, 1, CLONE3), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    program += [(EQUAL, 0, 4, open_socket), (LOAD, 0, 0, 16), (EQUAL, 1, 0, socket.AF_UNIX), refused]
    program += [(RETURN, 0, 0, ALLOW)]
    program += [(EQUAL, 0, 6, mmap), (LOAD, 0, 0, 40), (ANY_BIT, 2, 0, HUGE_PAGES), (AND, 0, 0, SHARED_MEMORY)]
    program += [(EQUAL, 0, 1, SHARED_MEMORY), refused, (RETURN, 0, 0, ALLOW)]
    program += [(EQUAL, 0, 3, clone), (LOAD, 0, 0, 16), (ANY_BIT, 0, 1, ANY_NAMESPACE), refused]
    program += [(RETURN, 0, 0, ALLOW)]
    code = b"".join(
        operation.to_bytes(2, "little") + bytes([yes, no]) + constant.to_bytes(4, "little")
        for operation, yes, no, constant in program
    )
    text = ctypes.create_string_buffer(code, len(code))
    header = (ctypes.c_uint64 * 2)(len(program), ctypes.addressof(text))
    kernel("prctl", FILTER_CALLS, 2, header, 0, 0)


def build_root(mounts: dict[str, str]) -> None:
    """Leave this machine's files behind, in a new user namespace, for a root that programs may see.

    ``mounts`` are the places in the new root, each with what it shows, read-only. It is built upon /proc, which every
    machine has: no folder of its own is needed, and none stays.
    """
    kernel("unshare", NEW_MOUNTS)
    with open("/proc/sys/user/max_user_namespaces", "w") as f:  # no further ones, where it would be root again
        f.write("0")
    root = "/proc"
    kernel("mount", "tmpfs", root, "tmpfs", 0, "size=1m,nr_inodes=1024,mode=755")
    for place, source in mounts.items():
        if os.path.isdir(source):
            os.makedirs(root + place, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(root + place), exist_ok=True)
            os.close(os.open(root + place, os.O_CREAT | os.O_WRONLY))
        kernel("mount", source, root + place, None, 0x1000 | 0x4000, None)  # bind, recursive
        for packages in ("site-packages", "dist-packages"):  # within the standard library's folder
            if os.path.isdir(f"{root}{place}/{packages}"):
                kernel("mount", "tmpfs", f"{root}{place}/{packages}", "tmpfs", 0, "size=4k,nr_inodes=2,mode=755")
    os.mkdir(root + HOME)
    os.makedirs(root + "/dev", exist_ok=True)
    os.symlink("null", root + "/dev/stderr")
    links = {"/dev/stdin": "/stdin", "/dev/stdout": "/stdout", "/dev/shm": "/tmp", "/tmp": "/tmp"}
    for link, target in links.items():
        if not os.path.exists(root + link):  # Python itself may lie in /tmp
            os.symlink(HOME + RUN + target, root + link)
    # Read-only and without set-user-ID, with all that is mounted in it.
    kernel("syscall", 442, -100, root, 0x8000, (ctypes.c_uint64 * 4)(1 | 2), 32)
    os.chdir(root)
    kernel("pivot_root", ".", ".")
    kernel("umount2", ".", 2)
    os.chdir("/")


def name_users(pid: int) -> None:
    """Map the users of a process's user namespace: root in it is this user."""
    user = os.geteuid()
    maps = {"setgroups": "deny", "uid_map": f"0 {user} 1\n", "gid_map": f"0 {os.getegid()} 1\n"}
    for file, text in maps.items():
        with open(f"/proc/{pid}/{file}", "w") as f:
            # Root would have no limit of processes, so it maps a second user, nobody, for the programs.
            f.write(text + "1 65534 1\n" * (user == 0 and file != "setgroups"))


def prepare_namespaces(mounts: dict[str, str]) -> tuple[int, int]:
    """Build a root in new namespaces, once per server; return descriptors of the user and of the mount namespace.

    Every sandbox has a copy of the second. To build it each time would take ten times as long as all the rest.
    Raises OSError where the kernel denies it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    builder = os.fork()
    if builder == 0:
        ours.close()
        try:
            kernel("unshare", NEW_USERS)
            theirs.send(b"alone")
            theirs.recv(16)
            build_root(mounts)
            theirs.send(b"built")
            theirs.recv(16)
        except OSError as error:
            theirs.send(str(error).encode())
        os._exit(0)
    theirs.close()
    try:
        for expected in (b"alone", b"built"):
            said = ours.recv(2**12)
            if said != expected:
                raise OSError(said.decode() or "the namespaces cannot be prepared")
            if said == b"alone":
                name_users(builder)
                ours.send(b"go")
        return tuple(os.open(f"/proc/{builder}/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt"))
    finally:
        ours.close()
        os.waitpid(builder, 0)


def drop_rights(user: int) -> None:
    """Become ``user`` of the namespace without any capability."""
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    kernel("capset", (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


# ------------------------------------------------------------------------------------------- launcher and keeper


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, started by any of its threads or adopted; [] once it has ended."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as f:
                found += map(int, f.read().split())
    except OSError:
        pass
    return found


def memory_below(pid: int) -> tuple[list[int], int]:
    """Return the pids of all descendants of a process, and their memory in bytes; shared memory counts for each."""
    found, pages = children(pid), 0
    for below in found:  # which grows meanwhile
        found += children(below)
        try:
            with open(f"/proc/{below}/statm") as f:
                pages += int(f.read().split()[1])
        except (OSError, IndexError):
            pass
    return found, pages * resource.getpagesize()


def end_children() -> None:
    """Kill and reap the processes below this one, also those that are left to it meanwhile."""
    while pids := children(os.getpid()):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def end_namespace() -> None:
    """Kill and reap every other process of the process namespace whose first process this is."""
    if os.getpid() != 1:
        raise RuntimeError("this is not process 1 of a namespace")
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def remove_folder(folder: str) -> None:
    """Delete a folder however deep, and whatever rights its folders have, by tools that follow no links in it."""
    if os.path.isdir(folder):
        os.spawnlp(os.P_WAIT, "chmod", "chmod", "-Rf", "u+rwX", folder)
        os.spawnlp(os.P_WAIT, "rm", "rm", "-rf", folder)


def preload(folders: list[str]) -> None:
    """Load the shared libraries that modules in these folders, and packages, need: no sandbox has them as files.

    The modules themselves are loaded in a fork alone, since whatever is mapped makes each sandbox start later.
    """
    reader, writer = os.pipe()
    if os.fork() == 0:
        modules = [f"{folder}/{file}" for folder in folders for file in os.listdir(folder) if file.endswith(".so")]
        for name in [*modules, *WHEEL_LIBRARIES]:
            with contextlib.suppress(OSError):
                ctypes.CDLL(name)
        with open("/proc/self/maps") as f:
            mapped = {line.split(maxsplit=5)[-1].strip() for line in f if ".so" in line}
        with open(writer, "w") as f:
            json.dump(sorted(mapped - set(map(os.path.realpath, modules))), f)
        os._exit(0)
    os.close(writer)
    with open(reader) as f:
        for name in json.load(f):
            ctypes.CDLL(name)
    os.wait()


def serve(requests: socket.socket):
    """Start a launcher for each request until the parent is gone. Returns in the program's process alone."""
    folders = [path for path in sys.path if os.path.isdir(path)]
    preload(folders)
    outermost = [path for path in folders if not any(path.startswith(other + "/") for other in folders)]
    mounts = {path: os.path.realpath(path) for path in outermost}
    mounts |= json.loads(sys.argv[2]) | {f"/dev/{name}": f"/dev/{name}" for name in DEVICES}
    namespaces, refused = None, ""
    try:
        namespaces = prepare_namespaces(mounts)
    except OSError as error:
        refused = str(error)
    gc.freeze()  # what a collection does not touch stays shared with the processes to come
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # launchers that have ended are nobody's business
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 2**12, 1)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            control = socket.socket(fileno=descriptors[0])
            settings = json.loads(message)
            if settings["isolated"] and refused:
                control.send(refused.encode())
                os._exit(1)
            return launch(control, settings, namespaces)
        os.close(descriptors[0])


def launch(control: socket.socket, settings: dict, namespaces: tuple[int, int]):
    """Run as the launcher process. Returns only in the program's process."""
    try:
        if settings["isolated"]:
            kernel("setns", namespaces[0], NEW_USERS)
            kernel("unshare", NEW_PROCESSES)
        else:
            kernel("prctl", ADOPT_ORPHANS, 1, 0, 0, 0)  # orphans become this process's children
        keeper = os.fork()
    except OSError as error:
        control.send(str(error).encode())
        os._exit(1)
    if keeper == 0:
        return keep(control, settings, namespaces)
    ended = os.pidfd_open(keeper)
    events = select.poll()
    events.register(ended, select.POLLIN)
    events.register(control, select.POLLRDHUP)  # the parent closed it, or died
    while not events.poll(WATCH_SECONDS * 1000):
        pids, used = memory_below(keeper)
        if used > MEMORY:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    end_children()  # with process 1 the kernel kills its whole namespace
    if not settings["isolated"]:
        remove_folder(settings["home"])
    os._exit(0)


def keep(control: socket.socket, settings: dict, namespaces: tuple[int, int]):
    """Run as the keeper process. Returns only in the program's process."""
    try:
        kernel("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # dies with the launcher, and its namespace with it
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the only one that a program of the same user could send
        if settings["isolated"]:
            kernel("setns", namespaces[1], NEW_MOUNTS)
            kernel("unshare", NEW_MOUNTS | NEW_NETWORK | NEW_IPC | NEW_NAMES)
            home = HOME
        else:
            kernel("prctl", ADOPT_ORPHANS, 1, 0, 0, 0)
            home = settings["home"]
        control.send(b"ready")
        while True:
            message, descriptors, _, _ = socket.recv_fds(control, 16, 1)
            if not message:
                os._exit(0)
            output = new_folder(home, settings)
            prepared, preparing = os.pipe()  # the program closes the second with all else before it begins
            program = os.fork()
            if program == 0:
                return become(control, socket.socket(fileno=descriptors[0]), settings, home)
            os.close(descriptors[0])
            os.close(preparing)
            os.read(prepared, 1)  # which ends when nobody can write: the program's time begins now
            os.close(prepared)
            status = hold_time(program, settings)
            socket.send_fds(control, [f"ended {status}".encode()], [output])
            os.close(output)
    except OSError as error:
        with contextlib.suppress(OSError):  # it may be that nobody asks any more
            control.send(str(error).encode())
        os._exit(1)


def new_folder(home: str, settings: dict) -> int:
    """Make new files for a program: what one wrote, the next does not find. The descriptor of its output.

    It is a new file system, since the program may own all of it: where the run's user is not root, both are one user.
    """
    os.chdir("/")
    if settings["isolated"]:
        if os.path.ismount(home):
            kernel("umount2", home, 2)  # also while the parent has the last output
        kernel("mount", "tmpfs", home, "tmpfs", 2 | 4, f"size={FILES},nr_inodes=4096,mode=755")  # no suid, no devices
    else:
        remove_folder(home)
        os.makedirs(home + PACKAGE_FOLDER, 0o700)
        for place, source in json.loads(sys.argv[2]).items():
            os.symlink(source, home + place)
    folder = f"{home}{RUN}"
    os.makedirs(f"{folder}/tmp")
    os.chmod(f"{folder}/tmp", 0o1777)
    os.chdir(f"{folder}/tmp")
    output = os.open(f"{folder}/stdout", os.O_CREAT | os.O_RDWR, 0o600)
    if settings["isolated"]:
        os.chown(output, settings["user"], settings["user"])
    return output


def hold_time(program: int, settings: dict) -> int:
    """Wait for the end of a program or of its time, and end what it left. Its exit status, or minus its signal."""
    events = select.poll()
    ended = os.pidfd_open(program)
    events.register(ended, select.POLLIN)
    events.poll(settings["seconds"] * 1000)
    os.close(ended)
    with contextlib.suppress(ProcessLookupError):
        os.kill(program, signal.SIGKILL)
    _, status = os.waitpid(program, 0)
    if settings["isolated"]:
        end_namespace()
    else:
        end_children()
    return os.waitstatus_to_exitcode(status)


# ---------------------------------------------------------------------------------------------------- the program


def become(control: socket.socket, channel: socket.socket, settings: dict, home: str) -> tuple:
    """Turn this process into the program's, with no right and nothing open but its channel: (lines of it, job)."""
    say = fcntl.fcntl(control.detach(), fcntl.F_DUPFD, 10)
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.dup2(channel.detach(), CHANNEL)
        lines = os.fdopen(CHANNEL, "rb", closefd=False)
        job = json.loads(lines.readline())
        with open(f"{home}{RUN}/stdin", "wb") as f:
            f.write(job.pop("text").encode(errors="surrogatepass"))
        os.dup2(os.open(f"{home}{RUN}/stdin", os.O_RDONLY), 0)
        if job["mode"] == "program":  # else what is printed is no value
            os.dup2(os.open(f"{home}{RUN}/stdout", os.O_RDWR), 1)
        if settings["isolated"]:
            drop_rights(settings["user"])
        else:
            kernel("prctl", DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)  # dies with the keeper
        kernel("prctl", NO_NEW_RIGHTS, 1, 0, 0, 0)
        for name, most in settings["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        try:
            close_system_calls()
        except OSError:
            if settings["isolated"]:
                raise
        os.write(say, b"running")
    except OSError as error:
        os.write(say, str(error).encode())
        os._exit(1)
    sys.path.append(PACKAGE_FOLDER if settings["isolated"] else home + PACKAGE_FOLDER)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy would start a thread per core, past the limit
    os.closerange(CHANNEL + 1, 2**16)
    return lines, job


# ---------------------------------------------------------------------------------------------- the parent's side


_server: tuple | None = None  # (process, socket) of this process's server


def _start_server() -> None:
    global _server
    import subprocess  # here, as the server must not pay for it

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-I", "-S", "-"]  # a program that is read from stdin
    command += [str(theirs.fileno()), json.dumps(packages()), SOURCES[1], f"of={os.getpid()}"]
    silent = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with theirs:
        process = subprocess.Popen(
            command, env={}, cwd="/", pass_fds=[theirs.fileno()], start_new_session=True, **silent
        )
    with process.stdin:
        process.stdin.write(SOURCES[0].encode())
    _server = (process, ours)


def _request(settings: dict, descriptors: list[int]) -> None:
    """Ask the server for a launcher. Raises OSError where it cannot be started."""
    message = [json.dumps(settings).encode()]
    if _server is None:
        _start_server()
    try:
        socket.send_fds(_server[1], message, descriptors)
    except OSError:  # it was killed
        _server[0].wait()
        _server[1].close()
        _start_server()
        socket.send_fds(_server[1], message, descriptors)


def packages() -> dict[str, str]:
    """Map the sandbox's path of each package in PACKAGES to its path in the run's own Python."""
    found = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            source = spec.submodule_search_locations[0]
            for path in (source, f"{os.path.dirname(source)}/{name}.libs"):  # the second is a wheel's
                if os.path.isdir(path):
                    found[f"{PACKAGE_FOLDER}/{os.path.basename(path)}"] = path
    return found


class Sandbox:
    """Jobs in processes of their own that see neither this one's environment, files, network nor processes.

    Use as a context manager: leaving it ends whatever a job started. The sandbox is prepared in the background;
    ``start`` gives it a job, and the ``seconds`` of wall time begin. A further job finds neither processes nor files
    of the last; still, one sandbox is for one program. ``isolated=False`` leaves only the limits and the filter.
    Raises OSError where the kernel denies it.
    """

    def __init__(self, seconds: float, isolated: bool | None = None):
        if isolated is None:
            isolated = not namespaces_refused()
            if not isolated and not allow_unsafe:
                raise OSError(f"no sandbox for code here ({namespaces_refused()}) and no --allow_unsafe_code_exec")
        self.isolated = isolated
        name = f"sandbox-{os.getpid()}-{os.urandom(8).hex()}"
        self.home = f"{tempfile.gettempdir()}/{name}"  # where there is no isolation
        settings = {"isolated": isolated, "seconds": seconds, "home": self.home}
        settings["limits"] = {**LIMITS, "CPU": int(seconds) + 2}
        settings["user"] = int(isolated and os.geteuid() == 0)  # a number in the namespace
        self.control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = self.replies = self.output = None
        self.prepared = False
        try:
            with control:
                _request(settings, [control.fileno()])
        except OSError:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _close(self, *ends) -> None:
        for end in ends:
            if end is not None:
                end.close()

    def _receive(self) -> list[str]:
        """Return the words of the next message; [] once all processes of the sandbox have ended."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, 2**12, 1)
        except OSError:
            return []
        for descriptor in descriptors:
            self.output = os.fdopen(descriptor, "rb")
        return message.decode(errors="replace").split()

    def _expect(self, word: str) -> None:
        """Wait for this message. Raises OSError for any other."""
        said = self._receive()
        if said != [word]:
            raise OSError(" ".join(said) or "the sandbox does not start")

    def start(self, mode: str, code: str, before: str = "", entry_point: str = "", text: str = "") -> None:
        """Give the sandbox its job; the next one when the last has ended. Raises OSError where the kernel denies it."""
        if not self.prepared:
            self._expect("ready")
            self.prepared = True
        self._close(self.replies, self.channel)
        self.channel, channel = socket.socketpair()
        self.replies = self.channel.makefile("rb")
        with channel:
            socket.send_fds(self.control, [b"run"], [channel.fileno()])
        job = {"mode": mode, "before": before, "code": code, "entry_point": entry_point, "text": text}
        with contextlib.suppress(OSError):  # what went wrong is said next
            self.channel.sendall(json.dumps(job).encode() + b"\n")
        self._expect("running")

    def ask(self, line: bytes) -> bytes:
        """Send one line to the job and return its reply; b"" after the job's end, or for a reply that is too long."""
        try:
            self.channel.sendall(line)
            reply = self.replies.readline(LONGEST_LINE)
        except OSError:
            return b""
        return reply if reply.endswith(b"\n") else b""

    def finish(self) -> tuple[int | None, bytes]:
        """Wait for the end of the job: (exit status or minus the signal, what it printed); (None, b"") if killed."""
        said = self._receive()
        if said[:1] != ["ended"] or self.output is None:
            return None, b""
        with self.output:
            self.output.seek(0)
            return int(said[1]), self.output.read()

    def close(self) -> None:
        """End every process of the sandbox, and wait until they have ended."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)  # the launcher sees it and kills
        while self._receive():
            pass
        self._close(self.output, self.replies, self.channel, self.control)
        if not self.isolated:  # if the launcher was killed
            remove_folder(self.home)


@functools.lru_cache
def namespaces_refused() -> str:
    """Return the reason why the kernel offers no sandbox to this process, or "" if it does."""
    try:
        with Sandbox(20.0, isolated=True) as probe:
            probe.start("program", "")
            return ""
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    exchange = types.ModuleType("exchange")
    exec(sys.argv[3], exchange.__dict__)
    channel_lines, its_job = serve(socket.socket(fileno=int(sys.argv[1])))
    exchange.run(channel_lines, **its_job)

"""Scripts as forks of a process that has imported the libraries: a third of the time of a short run, by the same code.

For tests that compare what runs have left. Those of signals, of launchers and of processes that end start real ones.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEW = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Server:
    """The process that has imported the libraries: with vLLM, without it ("plain"), or reasoning-gym alone ("rows")."""

    def __init__(self, kind: str, environment: dict[str, str]):
        line = [sys.executable, str(Path(__file__).resolve()), kind]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(line, env=environment, start_new_session=True, **pipes)
        assert self.process.stdout.readline() == "ready\n", "the libraries cannot be imported: stderr has the reason"

    def run(self, order: dict, timeout: float) -> list[int]:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        if not select.select([self.process.stdout], [], [], timeout)[0]:
            os.killpg(self.process.pid, signal.SIGKILL)
            SERVERS.clear()
            raise AssertionError(f"no end after {timeout} s: {order}")
        return json.loads(self.process.stdout.readline())


SERVERS: dict[str, Server] = {}  # of this process of pytest; each ends with its standard input, and so with it


def run(
    line: list[str],
    log: Path,
    environment: dict[str, str],
    timeout: float,
    ranks: int = 1,
    *,
    cwd: Path = ROOT,
    vllm: bool,
) -> tuple[list[int], str]:
    """(exit code of each rank, what they printed) of ``python LINE`` on so many ranks.

    Raises AssertionError after the time-out. What rank R prints is in LOG.R. ``vllm``: whether the process has it.
    """
    known = {name: value for name, value in environment.items() if name not in (*NEW, "PYTEST_CURRENT_TEST")}
    kind = "vllm" if vllm else "plain"
    if kind not in SERVERS:
        SERVERS[kind] = Server(kind, known)
    order = {"line": line, "ranks": ranks, "log": str(log), "cwd": str(cwd), "environment": known}
    codes = SERVERS[kind].run(order, timeout)
    return codes, "".join(Path(f"{log}.{rank}").read_text() for rank in range(ranks))


def printed_rows(name: str, options: str) -> str:
    """Return the output of ``python -m graders.reasoning_gym_tasks NAME OPTIONS``."""
    if "rows" not in SERVERS:
        SERVERS["rows"] = Server("rows", os.environ | {"PYTHONHASHSEED": "0"})
    with tempfile.NamedTemporaryFile("r") as file:
        codes = SERVERS["rows"].run({"file": file.name, "words": [name, options], "ranks": 1}, 600)
        assert codes == [0], f"no rows of {name} with {options}: stderr has the reason"
        return file.read()


def import_reasoning_gym() -> None:
    sys.path.insert(0, str(ROOT))
    from graders import reasoning_gym_tasks

    reasoning_gym_tasks.gym_dataset("chain_sum", "{}")
    reasoning_gym_tasks.gym_dataset.cache_clear()
    gc.freeze()


def write_rows(order: dict, *_) -> int:
    """In a fork: write the rows of a data set to a file."""
    from graders import reasoning_gym_tasks

    sys.argv[1:] = order["words"]
    with open(order["file"], "w") as out, contextlib.redirect_stdout(out):
        reasoning_gym_tasks.main()
    return 0


def import_libraries(vllm: bool) -> None:
    import importlib

    sys.path.insert(0, str(ROOT / "studies"))
    import run_many

    from runtime.system import process

    sys.path.pop(0)
    process.prepare_environment()
    for name in run_many.LATE:
        if vllm or not name.startswith("vllm"):
            importlib.import_module(name)
    for name, module in list(sys.modules.items()):  # a copy of the project brings its own
        file = Path(getattr(module, "__file__", None) or "/")
        if name != "__main__" and file.is_relative_to(ROOT) and "site-packages" not in file.parts:
            del sys.modules[name]
    for name in NEW:
        os.environ.pop(name, None)
    gc.freeze()
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread, which a fork would lack"


def be_rank(order: dict, rank: int, port: int) -> int:
    """In a fork: what ``python SCRIPT ...`` does, as one of several ranks where there are; its exit code."""
    atexit._clear()  # they are this process's; a script runs its own as it exits
    out = os.open(f"{order['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(order["cwd"])
    os.environ.clear()  # runs in the tests' process leave marks in its environment, which is this one's
    os.environ |= order["environment"]
    os.environ.setdefault("GLIBC_TUNABLES", "")  # a fork cannot start its program again (process.choose_allocator)
    if (size := order["ranks"]) > 1:
        values = (rank, rank, size, size, "127.0.0.1", port)
        os.environ |= dict(zip(NEW, map(str, values), strict=True))
    sys.argv = order["line"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve(work: Callable[[dict, int, int], int]) -> None:
    """Answer each line of standard input with the exit codes of forks that have done the work, one for each rank."""
    for line in sys.stdin:
        order = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(order["ranks"]):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = work(order, rank, port)
                    with contextlib.suppress(ValueError, OSError):
                        sys.stdout.flush()
                        sys.stderr.flush()
                finally:
                    os._exit(code)
            pids.append(pid)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


if __name__ == "__main__":
    rows = "rows" in sys.argv
    import_reasoning_gym() if rows else import_libraries("vllm" in sys.argv)
    print("ready", flush=True)
    serve(write_rows if rows else be_rank)

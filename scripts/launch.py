"""``accelerate launch`` that keeps the exit code of the ranks, and lets them finish when it is asked to stop.

    python scripts/launch.py --config_file scripts/zero2.yaml --num_processes 8 grpo.py ...

It takes the arguments of ``accelerate launch``. That program on its own exits with 1 whatever code the ranks exited
with, so 75 ("saved, start me again") would be lost; after SIGTERM, Ctrl-C or the end of the terminal it kills the ranks
30 seconds later, however long they need to save; SIGUSR1 kills it alone. Here the first rank that fails gives the exit
code, and these signals are passed on to the ranks, which exit when they are done. A launcher says whom it waits for.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime.system.library_logs import quiet_libraries
from runtime.system.process import STOP_SIGNALS, outlive_the_console, read_signals, refuse
from runtime.system.redaction import redact

asking = threading.Lock()  # held by the thread of watch_ranks while it is inside of torch
BOARD_STAYS = 3.0  # seconds after a failure on node 0, so that the other nodes can read why


def ranks() -> list[int]:
    """Return the children that torch started as ranks; imports of libraries start others for an instant."""
    found = []
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            for pid in map(int, file.read_text().split()):
                with suppress(OSError):  # a child that has just ended
                    if b"\0TORCHELASTIC_RUN_ID=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                        found.append(pid)
    return found


def pass_on(signum: int) -> None:
    """Send the signal to the ranks. Before they exist there is nothing to lose: exit with 75, as a rank would."""
    pids = ranks()
    if not pids:
        with suppress(OSError):  # nobody reads it any more, as after a terminal has closed
            os.write(2, f"{signal.Signals(signum).name} before the ranks were started: ending\n".encode())
        os._exit(75)
    if "STOP_REACHES_ALL" in os.environ:  # Slurm signals every process of a job's step
        return
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def listen(pipe: socket.socket, keep: socket.socket) -> None:
    """Pass on the signals that ask ranks to stop, in a thread: the main one waits for other nodes in C++."""
    while word := pipe.recv(1):
        if word[0] in STOP_SIGNALS:
            pass_on(word[0])


def place() -> tuple[int, int, str, int]:
    """Return the number of nodes, the rank of this one, and the address and port of node 0 on the command line."""
    given = dict(itertools.pairwise(word for words in sys.argv[1:] for word in words.split("=", 1)))
    nodes, rank = int(given.get("--num_machines", "1")), int(given.get("--machine_rank", "0"))
    return nodes, rank, given.get("--main_process_ip", ""), int(given.get("--main_process_port", "29500"))


def watch_ranks() -> None:
    """In a thread: name the nodes that are waited for, and tell them when the ranks of this one have ended well."""
    nodes, rank, host, port = place()
    start, due = time.monotonic(), 10.0
    while not ranks():
        time.sleep(0.2)
        seconds = time.monotonic() - start
        if seconds >= due and not ranks():
            whom = f"node 0 at {host}:{port} ({answer(host, port)})"
            if rank == 0:
                whom = f"the other {nodes - 1} node(s) to join it at {host}:{port}, each with its own --machine_rank"
            print(f"node {rank} on {socket.gethostname()} has waited {seconds:.0f} s for {whom}", flush=True)
            due += 60.0
    gone = 0
    while gone < 5:  # seconds, after which a launcher has ended whose ranks failed, or all of whose nodes ended well
        time.sleep(1.0)
        gone = 0 if ranks() else gone + 1
    text = f"the ranks on {socket.gethostname()} ended with exit code 0 before this one began: they found the run "
    text += "finished. --output_dir is not the same folder on all nodes; choose one on a shared file system"
    with asking, suppress(OSError, RuntimeError):  # node 0 has ended
        watchdog.board(host, port, patience=5.0).compare_set("ended", "", text)


def answer(host: str, port: int) -> str:
    """Describe what is found at an address."""
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError as error:
        return f"{error.strerror or error}; is its launcher running, and the address right?"
    return "a process answers there: node 0, or another that has its port"


def tell_other_nodes(text: str) -> None:
    """Write why a rank of this node ended on the board of the launch, where the other nodes look every second."""
    nodes, rank, host, port = place()
    if nodes == 1:
        return
    with suppress(OSError, RuntimeError):  # it has ended before, or the nodes are cut off from each other
        socket.create_connection((host, port), timeout=3).close()
        watchdog.board(host, port, patience=5.0).compare_set("failure", "", text)
        if rank == 0:
            time.sleep(BOARD_STAYS)  # the board is in this process and ends with it


def end(error: Exception) -> NoReturn:
    """Exit with a sentence for what keeps a launch from beginning; raise anything else again."""
    nodes, rank, host, port = place()
    text = str(error)
    if "another process is utilizing it" in text or "EADDRINUSE" in text or "address already in use" in text.lower():
        other = "submit it again under another --name" if "RUN_ID" in os.environ else "choose another"
        refuse(f"--main_process_port {port}: another process on {socket.gethostname()} uses this port; {other}")
    if nodes > 1 and isinstance(error, RuntimeError) and not ranks():  # torch's time-outs of the rendezvous
        reason = redact(text.splitlines()[0] if text else type(error).__name__)
        print(f"node {rank}: the {nodes} nodes did not find each other at {host}:{port}: {reason}", flush=True)
        raise SystemExit(1) from None
    if isinstance(error, subprocess.CalledProcessError):  # one process, which accelerate starts without torchrun
        code = error.returncode  # its own words are on the console; negative: minus the number of a signal
        raise SystemExit(code if code > 0 else 128 - code) from None
    raise error


if __name__ == "__main__":
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGQUIT")  # torchrun's own, without those below
    read_signals(listen)
    outlive_the_console()
    quiet_libraries()  # of this process, which has no file for them; the ranks speak for themselves
    quiet = "TORCH_CPP_LOG_LEVEL" not in os.environ  # torch reads it once: 58 lines of frames for a node that is late
    if quiet:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from accelerate.commands.launch import main
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from runtime.system import watchdog

    if quiet:
        del os.environ["TORCH_CPP_LOG_LEVEL"]  # the ranks choose for themselves
    if place()[0] > 1:
        threading.Thread(target=watch_ranks, daemon=True).start()
    try:
        main()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode  # negative: minus the number of a signal
        how = f"with exit code {code}" if code > 0 else f"by signal {-code} ({signal.strsignal(-code)})"
        text = f"rank {rank} ended first, {how}"
        print(text, flush=True)
        if code != 75:
            tell_other_nodes(f"{text}; see what {socket.gethostname()} printed")
        raise SystemExit(code if code > 0 else 128 - code) from None
    except Exception as error:
        end(error)
    finally:
        asking.acquire()  # a thread that is inside of torch when Python ends aborts the process

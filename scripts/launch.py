"""``accelerate launch`` that keeps the exit code of the ranks, and lets them finish when it is asked to stop.

    python scripts/launch.py --config_file scripts/zero2.yaml --num_processes 8 grpo.py ...

It takes the arguments of ``accelerate launch``. That program on its own exits with 1 whatever code the ranks exited
with, so 75 ("saved, start me again") would be lost; after SIGTERM or Ctrl-C it kills the ranks 30 seconds later,
however long they need to save, and so it does when the terminal closes, also under nohup; SIGUSR1 kills it and leaves
the ranks behind. Here the first rank that fails gives the exit code, and these signals are passed on to the ranks,
which exit when they are done. A launcher that still waits for other nodes ends at once, and says whom it waits for.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
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

WAIT = 10.0  # seconds without ranks after which a launcher says which nodes it waits for


def children() -> list[int]:
    """Return the processes that this one has started: the ranks of this node."""
    return [int(pid) for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]


def pass_on(signum: int) -> None:
    """Send the signal to the ranks. Before they exist there is nothing to lose: exit with 75, as a rank would."""
    ranks = children()
    if not ranks:
        with suppress(OSError):  # nobody reads it any more, as after a terminal has closed
            os.write(2, f"{signal.Signals(signum).name} before the ranks were started: ending\n".encode())
        os._exit(75)
    if "STOP_REACHES_ALL" in os.environ:  # Slurm signals every process of a job's step
        return
    for pid in ranks:
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


def say_who_is_missing() -> None:
    """In a thread: after WAIT seconds without ranks, and every minute then, name the nodes that are waited for."""
    nodes, rank, host, port = place()
    start, pause = time.monotonic(), WAIT
    while True:
        time.sleep(pause)
        if children():
            return
        if rank == 0:
            missing = f"the other {nodes - 1} node(s) to join it at {host}:{port}; start this command there as well, "
            missing += "with --machine_rank 1 and so on"
        else:
            try:
                socket.create_connection((host, port), timeout=3).close()
                missing = f"the other nodes; a process answers at {host}:{port}: node 0, or another that has its port"
            except OSError as error:
                missing = f"node 0 at {host}:{port} ({error.strerror or error}); "
                missing += "is its launcher running, and the address right?"
        seconds = time.monotonic() - start
        print(f"node {rank} on {socket.gethostname()} has waited {seconds:.0f} s for {missing}", flush=True)
        pause = 60.0


def tell_other_nodes(text: str) -> None:
    """Write why a rank of this node ended on the board of the launch, where the other nodes look twice a second."""
    _, rank, host, port = place()
    if rank == 0 or not host:
        return  # on node 0 the board is in this process and ends with it, which the others see
    with suppress(OSError, RuntimeError):  # it has ended before, or the nodes are cut off from each other
        socket.create_connection((host, port), timeout=3).close()
        watchdog.board(host, port, patience=5.0).compare_set("failure", "", text)


def end(error: Exception) -> NoReturn:
    """Exit with a sentence for what keeps a launch from beginning; raise anything else again."""
    nodes, rank, host, port = place()
    text = str(error)
    if "another process is utilizing it" in text or "EADDRINUSE" in text or "address already in use" in text.lower():
        other = "submit it again under another --name" if "RUN_ID" in os.environ else "choose another"
        refuse(f"--main_process_port {port}: another process on {socket.gethostname()} uses this port; {other}")
    if nodes > 1 and isinstance(error, RuntimeError) and not children():  # torch's time-outs of the rendezvous
        reason = redact(text.splitlines()[0] if text else type(error).__name__)
        print(f"node {rank}: the {nodes} nodes did not find each other at {host}:{port}: {reason}", flush=True)
        raise SystemExit(1) from None
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
        threading.Thread(target=say_who_is_missing, daemon=True).start()
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

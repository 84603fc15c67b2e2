"""``accelerate launch`` that keeps the exit code of the ranks, and lets them finish when it is asked to stop.

    python scripts/launch.py --config_file scripts/zero2.yaml --num_processes 8 grpo.py ...

It takes the arguments of ``accelerate launch``. That program on its own exits with 1 whatever code the ranks exited
with, so 75 ("saved, start me again") would be lost; after SIGTERM or Ctrl-C it kills the ranks 30 seconds later,
however long they need to save, and so it does when the terminal closes, also under nohup; SIGUSR1 kills it and leaves
the ranks behind. Here the first rank that fails gives the exit code, and these signals are passed on to the ranks,
which exit when they are done.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime.system.library_logs import quiet_libraries
from runtime.system.process import STOP_SIGNALS, outlive_the_console


def pass_on(signum: int, frame: object) -> None:
    """Send the signal to the ranks. Before they exist there is nothing to lose: exit with 75, as a rank would."""
    children = [pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()]
    if not children:
        raise SystemExit(75)
    if "STOP_REACHES_ALL" in os.environ:  # Slurm signals every process of a job's step
        return
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(int(pid), signum)


def listen() -> None:
    """Pass on the signals that ask ranks to stop; one that was ignored from the start (nohup) stays ignored."""
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, pass_on)


def tell_other_nodes(text: str) -> None:
    """Write why a rank of this node ended on the board of the launch, where the other nodes look twice a second."""
    given = dict(itertools.pairwise(sys.argv))
    if given.get("--machine_rank", "0") == "0" or "--main_process_ip" not in given:
        return  # on node 0 the board is in this process and ends with it, which the others see
    host = given["--main_process_ip"]
    port = int(given["--main_process_port"])
    with suppress(OSError, RuntimeError):  # it has ended before, or the nodes are cut off from each other
        socket.create_connection((host, port), timeout=3).close()
        watchdog.board(host, port, patience=5.0).compare_set("failure", "", text)


if __name__ == "__main__":
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGQUIT")  # torchrun's own, without those below
    listen()
    outlive_the_console()
    quiet_libraries()  # of this process, which has no file for them; the ranks speak for themselves
    from accelerate.commands.launch import main
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from runtime.system import watchdog

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

"""Environments that live in another Python, so that what they need is not needed here.

An adapter is a file with two classes: one for --environment, a ``Remote``, and one that the other Python makes for each
episode. The other Python runs the same file (``serve``): it imports its library once and forks for every episode. The
two talk in lines of JSON. Whatever happens there is reported here; when the episode's process here ends, the fork ends.

This file is run by both, so it needs the standard library alone.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

MEMORY = 4 * 2**30  # bytes of address space of an episode
START = 100.0  # seconds in which the library must load


class Remote:
    """An environment whose object is in the Python that the environment variable ``variable`` names.

    To be subclassed: ``class Mine(Remote, file=__file__, variable="MINE_PYTHON", needs="mine==1.0")``.
    """

    def __init_subclass__(cls, file: str, variable: str, needs: str) -> None:
        cls._control = start(file, variable, needs)

    def _ask(self, word: str, *given):
        """Return the result of a method of the other object. Raises RuntimeError with what it raised there."""
        self._line.write(json.dumps([word, *given]) + "\n")
        self._line.flush()
        answer = self._line.readline()
        if not answer:
            raise RuntimeError("its process in the other Python has ended")
        found, raised = json.loads(answer)
        if raised:
            raise RuntimeError(raised)
        return found

    def reset(self, **row) -> str | None:
        """Have an object made for this episode."""
        ours, theirs = socket.socketpair()
        socket.send_fds(self._control, [b"new"], [theirs.fileno()])
        theirs.close()
        self._line = ours.makefile("rw")
        return self._ask("reset", row)

    def turn(self, text: str) -> str | None:
        """Return the next observation, or None at the end of the episode."""
        return self._ask("turn", text)

    def get_reward(self) -> float:
        """Return the reward of the episode."""
        return self._ask("get_reward")


def start(file: str, variable: str, needs: str) -> socket.socket:
    """Start the other Python on an adapter's file; the line on which it takes episodes. Raises RuntimeError."""
    python = os.environ.get(variable, "")
    if not os.access(python, os.X_OK):
        raise RuntimeError(
            f"{variable} ({python or 'not set'}) must name the Python of a virtual environment with {needs}: "
            f"python -m venv FOLDER; FOLDER/bin/pip install {needs}; export {variable}=FOLDER/bin/python"
        )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # whole messages: many processes send some
    number = str(theirs.fileno())
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen([python, str(Path(file).resolve()), number], pass_fds=[theirs.fileno()], **quiet)
    theirs.close()
    ours.settimeout(START)
    said = ours.recv(65536).decode()
    if said != "ready":
        raise RuntimeError(f"{python}, which {variable} names, cannot load the adapter: {said or 'it has ended'}")
    ours.settimeout(None)
    return ours


def serve(load: Callable[[], None], cls: type) -> None:
    """Run in the other Python: ``load`` its library, and answer for an object of ``cls`` in a fork for each episode."""
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        load()
    except BaseException:
        control.send(traceback.format_exc(limit=-2).encode()[-60_000:])
        raise
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    control.send(b"ready")
    while True:
        word, lines, _, _ = socket.recv_fds(control, 16, 1)
        if not word:  # nobody is left who could ask
            return
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            episode(socket.socket(fileno=lines[0]), cls)
        os.close(lines[0])


def episode(line: socket.socket, cls: type) -> None:
    """Answer for one object until the other side is gone, even if the library never returns. Ends the process."""

    def leave() -> None:
        ended = select.poll()
        ended.register(line, select.POLLRDHUP)
        ended.poll()
        os._exit(0)

    threading.Thread(target=leave, daemon=True).start()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    made = None
    with line.makefile("rw") as file:
        for asked in file:
            word, *given = json.loads(asked)
            try:
                made = cls() if word == "reset" else made
                answer = [getattr(made, word)(*given), ""]
            except BaseException as error:
                answer = [None, f"{type(error).__name__}: {error}"[:500]]
            file.write(json.dumps(answer) + "\n")
            file.flush()
    os._exit(0)

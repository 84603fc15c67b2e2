"""Two nodes on this machine: network namespaces joined by a veth pair.

One node alone is a namespace for servers, which listen there and not on the addresses of this machine.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from pathlib import Path

from helpers import LONG, Run, alive, command, logged

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = "29517"  # of the launcher on node 0; a namespace has all ports to itself
NUMBERS = itertools.count()  # for the names of namespaces


def reason_for_none() -> str:
    """Return the reason why this machine cannot make nodes, or "" if it can."""
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    name = f"rlvr{os.getpid()}"
    try:
        if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
            return "the kernel makes no network namespaces"
        subprocess.run(["ip", "netns", "del", name], check=True)
    except FileNotFoundError:
        return "no ip (Debian: iproute2)"
    return ""


class Nodes:
    """A context with two nodes, or one; afterwards no namespace and none of their processes is left."""

    def __init__(self, count: int = 2):
        number = next(NUMBERS)
        self.names = [f"rlvr{os.getpid()}n{number}{side}" for side in "ab"[:count]]

    def __enter__(self) -> Nodes:
        try:
            for name in self.names:
                ip("netns", "add", name)
            if len(self.names) == 2:
                a, b = self.names
                ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
            device = "cable" if len(self.names) == 2 else "lo"
            for name, mine in zip(self.names, ADDRESSES, strict=False):
                ip("-n", name, "addr", "add", f"{mine}/24", "dev", device)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for name in self.names:
            done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            for pid in map(int, done.stdout.split()):
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def cut(self) -> None:
        """Pull the cable out."""
        ip("-n", self.names[1], "link", "set", "cable", "down")

    def on(self, node: int, line: list[str], first: str = ":") -> list[str]:
        """A command as it runs on a node, with a host name and mounts of its own, after the shell command ``first``.

        nsenter, unshare and the shell become the command. (``ip netns exec`` would hide the control groups of /sys.)
        """
        shell = ["sh", "-c", f'hostname node{node} && {first} && exec "$@"', "sh"]
        return ["nsenter", f"--net=/run/netns/{self.names[node]}", "unshare", "--uts", "--mount", *shell, *line]

    def launch(
        self,
        tiny: Path,
        outs: list[Path],
        logs: Path,
        *more: str,
        before: tuple[str, ...] = (),
        on_node_1: str = ":",
        first: int = 0,
        pause: float = 0.0,
        **shape,
    ) -> list[Run]:
        """The same command on both nodes, as a user types it, with the variables ``before`` it: one launcher each.

        The node that is not ``first`` starts ``pause`` seconds later.
        """
        runs = {}
        for node in (first, 1 - first):
            if runs:
                time.sleep(pause)
            line = command(tiny, outs[node], *more, ranks=2, **shape)
            line[line.index("--main_process_port") + 1] = PORT
            place = ["--num_machines", "2", "--machine_rank", str(node), "--main_process_ip", ADDRESSES[0]]
            at = line.index("--num_processes")
            line = ["env", *before, *line[:at], *place, *line[at:]]
            runs[node] = Run(self.on(node, line, on_node_1 if node == 1 else ":"), logs / f"node{node}.log")
        return [runs[0], runs[1]]


def training(nodes: Nodes, tiny: Path, out: Path) -> list[Run]:
    """A long run on both nodes that has done two steps."""
    runs = nodes.launch(tiny, [out, out], out, *LONG)
    runs[1].until(lambda: runs[0].process.poll() is not None or logged(out) >= 2, 240)
    runs[0].until(lambda: logged(out) >= 2, 1)
    return runs


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)


def ends(runs: list[Run], timeout: float) -> list[float]:
    """Seconds until each of the runs has ended; whatever still runs then is killed and shown."""
    begun = time.monotonic()
    after: dict[int, float] = {}
    while len(after) < len(runs):
        for i, run in enumerate(runs):
            run.process.poll()
            if i not in after and run.process.returncode is not None:
                after[i] = time.monotonic() - begun
        if time.monotonic() - begun > timeout:
            late = [run for run in runs if run.process.poll() is None]
            texts = "\n".join(f"== {run.log.name}\n{run.text()}" for run in runs)
            for run in late:
                run.kill()
            raise AssertionError(f"{[run.log.name for run in late]} still run after {timeout:.0f} s\n{texts}")
        time.sleep(0.05)
    return [after[i] for i in range(len(runs))]

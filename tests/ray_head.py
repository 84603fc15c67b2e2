"""A Ray of one node with invented GPUs, in a network namespace of its own, for tests of the Ray backend."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import two_nodes
from helpers import ROOT, alive, clean_environment

ENGINES = Path(os.environ.get("ENGINES", ROOT / ".engines"))  # the environment of `make test-engines`
ADDRESS = "http://127.0.0.1:8265"


def reason_for_none(tool: str) -> str:
    """Why this machine cannot test with a tool of ENGINES; "" if it can."""
    if not any(ENGINES.glob(f"bin/{tool}")) and not any(ENGINES.glob(f"lib/python*/site-packages/{tool}")):
        return f"no {tool} in {ENGINES} (make test-engines installs it)"
    return two_nodes.reason_for_none() if tool == "ray" else ""


class RayHead:
    """A context with a running head, where ``run`` runs commands; afterwards no process of it is left."""

    def __init__(self, folder: Path, gpus: int = 2):
        self.folder = folder
        self.name = f"rlvr{os.getpid()}ray"
        self.env = clean_environment() | {"PATH": f"{ENGINES}/bin:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
        self.env.pop("CUDA_VISIBLE_DEVICES", None)  # conftest.py hides all, and Ray would hide those that it invents
        self.start = ["ray", "start", "--head", "--node-ip-address", "127.0.0.1", "--num-gpus", str(gpus)]
        self.start += ["--num-cpus", "4", "--object-store-memory", "80000000", "--temp-dir", "/tmp/rlvr-ray"]

    def __enter__(self) -> RayHead:
        subprocess.run(["ip", "netns", "add", self.name], check=True)
        subprocess.run(["ip", "-n", self.name, "link", "set", "lo", "up"], check=True)
        with open(self.folder / "start.log", "w") as log:  # a file: its daemons would hold a pipe open
            line = ["ip", "netns", "exec", self.name, *self.start]
            code = subprocess.run(
                line, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=300
            ).returncode
        if code != 0:
            self.__exit__()
            raise AssertionError((self.folder / "start.log").read_text())
        return self

    def __exit__(self, *_) -> None:
        pids = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout
        for pid in map(int, pids.split()):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)
        shutil.rmtree("/tmp/rlvr-ray", ignore_errors=True)

    def run(self, *words: str, cwd: Path) -> subprocess.CompletedProcess:
        """A command in the namespace."""
        line = ["ip", "netns", "exec", self.name, *map(str, words)]
        return subprocess.run(line, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=300)

    def wait(self, cwd: Path, job: str, *states: str, timeout: float = 240) -> str:
        """Wait until the status of a job names one of ``states``, and return it."""
        deadline = time.monotonic() + timeout
        while True:
            said = self.run("ray", "job", "status", "--address", ADDRESS, job, cwd=cwd).stdout
            if any(state.lower() in said.lower() for state in states):
                return said
            assert time.monotonic() < deadline, said

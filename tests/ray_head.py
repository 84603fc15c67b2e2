"""A Ray of one node with invented GPUs, in a network namespace of its own, for tests of the Ray backend."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import two_nodes
from helpers import ROOT, clean_environment
from two_nodes import Nodes

ENGINES = Path(os.environ.get("ENGINES", ROOT / ".engines"))  # the environment of `make test-engines`
ADDRESS = "http://127.0.0.1:8265"
ENDS = ("SUCCEEDED", "FAILED", "STOPPED")
GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=60).read().decode())"


def reason_for_none(tool: str) -> str:
    """Return why this machine cannot test with a tool of ENGINES; "" if it can."""
    if not any(ENGINES.glob(f"bin/{tool}")) and not any(ENGINES.glob(f"lib/python*/site-packages/{tool}")):
        return f"no {tool} in {ENGINES} (make test-engines installs it)"
    return two_nodes.reason_for_none() if tool == "ray" else ""


class RayHead:
    """A context with a running head, where ``run`` runs commands; afterwards no process of it is left."""

    def __init__(self, folder: Path, gpus: int = 2):
        self.folder, self.node = folder, Nodes(count=1)
        self.place = f"/tmp/rlvr-ray{os.getpid()}"  # the paths of its sockets must be short
        self.env = clean_environment() | {"PATH": f"{ENGINES}/bin:{os.environ['PATH']}", "RAY_USAGE_STATS_ENABLED": "0"}
        self.env.pop("CUDA_VISIBLE_DEVICES", None)  # conftest.py hides all, and Ray would hide those that it invents
        self.start = ["ray", "start", "--head", "--node-ip-address", "127.0.0.1", "--num-gpus", str(gpus)]
        self.start += ["--num-cpus", "4", "--object-store-memory", "80000000", "--temp-dir", self.place]

    def __enter__(self) -> RayHead:
        self.node.__enter__()
        options = {"env": self.env, "stdin": subprocess.DEVNULL, "timeout": 300}
        with open(self.folder / "start.log", "w") as log:  # a file: its daemons would hold a pipe open
            code = subprocess.run(self.node.on(0, self.start), stdout=log, stderr=log, **options).returncode
        if code != 0:
            self.__exit__()
            raise AssertionError((self.folder / "start.log").read_text())
        return self

    def __exit__(self, *_) -> None:
        self.node.__exit__()
        shutil.rmtree(self.place, ignore_errors=True)

    def run(self, *words: str, cwd: Path) -> subprocess.CompletedProcess:
        """A command in the namespace."""
        line = self.node.on(0, [*map(str, words)])
        return subprocess.run(line, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=300)

    def job(self, job: str, what: str = "") -> dict:
        """Return what Ray's own service says about a job, or its "/logs"; Ray's programs take seconds to start."""
        done = self.run(sys.executable, "-c", GET, f"{ADDRESS}/api/jobs/{job}{what}", cwd=self.folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait(self, job: str, *states: str, timeout: float = 240) -> str:
        """Wait until a job is in one of ``states``, or at its end, and return its state."""
        deadline = time.monotonic() + timeout
        while (found := self.job(job))["status"] not in (*states, *ENDS):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        return found["status"]

    def succeed(self, job: str) -> None:
        """Wait for the end of a job, which must be a success; otherwise show what it printed, and Ray's own logs."""
        if self.wait(job) != "SUCCEEDED":
            logs = Path(self.place, "session_latest", "logs")
            own = [(logs / name).read_text()[-1500:] for name in ("dashboard_agent.log", "raylet.out")]
            raise AssertionError("\n".join([str(self.job(job)), self.job(job, "/logs")["logs"], *own]))

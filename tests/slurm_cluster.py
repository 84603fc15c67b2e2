"""A Slurm of one node or two, in network namespaces, for tests: munged, slurmctld, slurmd with files of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import two_nodes
from helpers import ROOT, clean_environment
from two_nodes import ADDRESSES, Nodes

TOOLS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "squeue")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


def reason_for_none() -> str:
    """Return the reason why this machine cannot start a Slurm, or "" if it can."""
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if missing:
        return f"no {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"
    return "slurmd and munged of a test need root" if os.geteuid() != 0 else two_nodes.reason_for_none()


class Slurm:
    """A context with munged, slurmctld and a slurmd per node, with all their files in one folder."""

    def __init__(self, folder: Path, nodes: int = 1):
        self.folder, self.nodes, self.processes = folder, Nodes(count=nodes), []
        self.env = clean_environment()
        self.env |= {"OMP_NUM_THREADS": "1", "SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
        self.count = nodes
        hosts = {f"node{i}": address for i, address in enumerate(ADDRESSES[:nodes])}
        first, first_address = next(iter(hosts.items()))
        lines = [f"NodeName={host} NodeAddr={address}" for host, address in hosts.items()]
        known = {"localhost": "127.0.0.1"} | hosts
        (folder / "hosts").write_text("".join(f"{address} {host}\n" for host, address in known.items()))
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        (folder / "slurm.conf").write_text(
            f"ClusterName=test\nSlurmctldHost={first}({first_address})\nSlurmUser=root\nSlurmdUser=root\n"
            f"AuthType=auth/munge\nAuthInfo=socket={folder}/munge.socket\nCryptoType=crypto/munge\n"
            f"StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool.%n\n"
            f"SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.%n.pid\n"
            f"SlurmctldLogFile={folder}/slurmctld.log\nSlurmdLogFile={folder}/slurmd.%n.log\n"
            f"ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\nSwitchType=switch/none\n"
            "JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n"
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\nReturnToService=2\nKillWait=60\n"
            "SchedulerParameters=batch_sched_delay=0,sched_interval=2\n"
            "PreemptType=preempt/partition_prio\nPreemptMode=REQUEUE\n"
            + "".join(f"{line} CPUs={os.cpu_count()} RealMemory=1000 State=UNKNOWN\n" for line in lines)
            + f"PartitionName=test Nodes={','.join(hosts)} Default=YES MaxTime=INFINITE State=UP GraceTime=60\n"
            + f"PartitionName=urgent Nodes={','.join(hosts)} PriorityTier=9 PreemptMode=OFF\n"
        )

    def __enter__(self) -> Slurm:
        self.nodes.__enter__()
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        self.run("scancel", "--full", "--user=root")
        time.sleep(1)
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
        self.nodes.__exit__()

    def start(self) -> None:
        """Start the daemons, and wait until all nodes are idle."""
        f = self.folder
        munge = ["--foreground", "--force", f"--socket={f}/munge.socket", f"--key-file={f}/munge.key"]
        munge += [f"--{name}-file={f}/munge.{name}" for name in ("log", "pid", "seed")]
        self.spawn("munged", ["munged", *munge])
        self.spawn("slurmctld", self.on(0, ["slurmctld", "-D", "-c"]))
        for node in range(self.count):
            self.spawn(f"slurmd{node}", self.on(node, ["slurmd", "-D"]))
        deadline = time.monotonic() + 60
        while self.run("sinfo", "-h", "-p", "test", "-o", "%T %D").split() != ["idle", str(self.count)]:
            if time.monotonic() > deadline:
                logs = "\n".join(p.read_text()[-2000:] for p in sorted(f.glob("slurm*.log")))
                raise AssertionError(f"the nodes did not become idle\n{logs}")
            time.sleep(0.5)

    def on(self, node: int, line: list[str]) -> list[str]:
        """A command as it runs on a node, where the names of the nodes are known."""
        return self.nodes.on(node, line, f"mount --bind {self.folder}/hosts /etc/hosts")

    def spawn(self, name: str, line: list[str]) -> None:
        with open(self.folder / f"{name}.out", "w") as log:
            self.processes.append(subprocess.Popen(line, env=self.env, stdout=log, stderr=log))
        time.sleep(1)

    def call(
        self, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None, timeout: float = 60
    ) -> subprocess.CompletedProcess:
        """A command on the first node. ``env``: more variables of it."""
        env = self.env | (env or {})
        return subprocess.run(self.on(0, [*words]), env=env, capture_output=True, text=True, cwd=cwd, timeout=timeout)

    def run(self, *words: str) -> str:
        """Return the output of a command on the first node."""
        return self.call(*words).stdout

    def submission(self, cwd: Path, *words: str, **options) -> subprocess.CompletedProcess:
        """scripts/submit.py of ``cwd``, or of this project where it has none, on the first node."""
        if not (cwd / ".git").exists():
            subprocess.run(["git", "init", "-q"], cwd=cwd, check=True)
        script = cwd / "scripts" / "submit.py"
        script = script if script.exists() else ROOT / "scripts" / "submit.py"
        return self.call(sys.executable, str(script), "--backend", "slurm", *words, cwd=cwd, **options)

    def submit(self, cwd: Path, *words: str, **options) -> str:
        """The number of the job that is submitted."""
        done = self.submission(cwd, *words, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S+)", self.run("scontrol", "show", "job", job)))

    def wait(self, job: str, *states: str, timeout: float = 120) -> dict[str, str]:
        deadline = time.monotonic() + timeout
        while (now := self.state(job))["JobState"] not in states:
            assert time.monotonic() < deadline, f"{now}\n{(self.folder / 'slurmctld.log').read_text()[-3000:]}"
            if now["JobState"] == "PENDING" and now["Restarts"] != "0":
                time.sleep(5)  # Slurm lets a requeued job wait for two minutes; a start in the same second is rejected
                self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
            time.sleep(0.5)
        return now

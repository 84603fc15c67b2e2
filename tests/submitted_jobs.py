"""Jobs as scripts/submit.py makes them, for the tests of submissions, of scripts/launch.py and of their page."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import submit
import yaml
from helpers import ROOT

SUBMIT = [sys.executable, str(ROOT / "scripts" / "submit.py")]
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always"]
COMMAND = ["python", "grpo.py", "--beta", "0.03", "--system_prompt", 'It\'s <answer>$5</answer>, "not" {a: 1}\n']


def refused(capsys, *words: str) -> str:
    """What submit.py says about words that it rejects with exit code 2; nothing else is printed."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        submit.main([*words])
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == ""
    return said.err


def job_of(backend: str, flags: str, *commands: list[str]):
    """The job of a command line, with what differs from day to day and from machine to machine held still."""
    argv = ["--backend", backend, *shlex.split(flags)]
    for command in commands or [COMMAND]:
        argv += ["--", *command]
    job = submit.make_job(*submit.parse(argv))
    git = {"commit": "0123456789abcdef", "dirty": True, "diff": "--- a/grpo.py\n+++ b/grpo.py\n"}
    workdir = "/home/me/rlvr" if job.workdir == os.getcwd() else job.workdir
    held = {"submitted": "20260101-120000-1a2b", "git": git, "workdir": workdir}
    return with_changes(job, **held, tree=job.tree and "89abcdef01234567")


def with_changes(job, **changes):
    """A copy of the job with other attributes."""
    return submit.Job(**(vars(job) | changes))


def in_place(job):
    """The job without a folder of its own to run in: its script runs where a test starts it."""
    return with_changes(job, workdir=None, tree=None)


def repository(folder: Path, **files: str) -> Path:
    """A repository with one commit of these files; __ in a name stands for a slash, and _ for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one", "--allow-empty"]):
        subprocess.run([*GIT, *words], cwd=folder, check=True)
    return folder


def script_of(backend: str, plan) -> tuple[list[str], dict[str, str]]:
    """The command that a backend runs on a node, and the environment it adds, read from what was rendered."""
    texts = {Path(path).name: text for path, text in plan.files.items()}
    if backend in ("local", "slurm"):
        return ["bash", "-c", texts["job.sh"]], {}
    if backend == "skypilot":
        return ["bash", "-c", yaml.safe_load(texts["sky.yaml"])["run"]], {}
    cut = plan.command.index("--")
    environment = yaml.safe_load(texts["ray.yaml"])["env_vars"]
    return ["sh", "-c", subprocess.list2cmdline(plan.command[cut + 1 :])], environment  # as Ray does

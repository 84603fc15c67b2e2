"""The Dockerfile: what it copies is there and enough, and its steps make an environment in a clean root file system."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import docker_steps
import pytest
from helpers import ROOT

STEPS = docker_steps.steps((ROOT / "Dockerfile").read_text())
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()


def sources(until: int | None = None) -> list[str]:
    """The files that the COPY steps take, of the first ``until`` steps or of all."""
    found = []
    for name, rest in STEPS[:until]:
        if name == "COPY":
            found += docker_steps.copied(rest.split()[:-1], docker_steps.patterns_of())
    return found


def test_steps_of_a_file():
    """Continued lines are one step; comments and empty lines are none."""
    text = "# a\nFROM x\n\nRUN a \\\n    && b\n# c\nENV A=1\n"
    assert docker_steps.steps(text) == [("FROM", "x"), ("RUN", "a && b"), ("ENV", "A=1")]
    assert {name for name, _ in STEPS} == {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "CMD"}


@pytest.mark.parametrize(
    ("path", "out"),
    [
        (".venv/bin/python", True),
        ("models/a/config.json", True),
        ("runtime/run/__pycache__/x.pyc", True),
        ("runs/a/metrics.jsonl", True),
        ("runtime/run/logger.py", False),
        ("tests/runs/test_ppo.py", False),
        ("docs/models.md", False),
    ],
)
def test_dockerignore(path, out):
    """A name without a slash is that of the top folder alone; **/NAME is that of any folder."""
    assert docker_steps.ignored(path, docker_steps.patterns_of()) == out


def test_the_image_has_the_whole_project_and_nothing_of_a_run():
    copied = sources()
    assert set(TRACKED) - set(copied) == set(), "tracked files that .dockerignore leaves out"
    assert not [name for name in copied if name.startswith((".git/", ".venv/", "models/", "runs/"))]


def test_the_setup_has_what_it_reads_before_it_runs():
    """Every file that scripts/setup.sh names is copied before `make setup`, or the image's build would end there."""
    (at,) = [i for i, (name, rest) in enumerate(STEPS) if name == "RUN" and "make setup" in rest]
    before = set(sources(at))
    named = set(
        re.findall(
            r"\b(?:requirements[\w-]*\.txt|locks/\w+\.txt|scripts/\w+\.py)", (ROOT / "scripts/setup.sh").read_text()
        )
    )
    assert named and named <= before and {"Makefile", "scripts/setup.sh"} <= before
    assert not [name for name in before if name.startswith("runtime/")], "an edit of the code would install it again"


def test_the_steps_are_lines_of_a_shell(tmp_path):
    """ARG with its default or the value given, ENV with the PATH before it, COPY of files and folders."""
    lines = "\n".join(map(docker_steps.as_shell, STEPS))
    assert subprocess.run(["sh", "-n", "-c", lines], capture_output=True).stderr == b""
    some = [("ARG", "FLAVOR=cpu"), ("ARG", "KIND=a"), ("ENV", "PATH=/x:$PATH"), ("WORKDIR", str(tmp_path / "there"))]
    some += [("RUN", 'echo "$FLAVOR $KIND ${PATH%%:*} $(basename "$PWD")"')]
    program = "\n".join(map(docker_steps.as_shell, some))
    done = subprocess.run(["sh", "-ec", program], env={**os.environ, "FLAVOR": "cuda"}, capture_output=True, text=True)
    assert done.stdout == "cuda a /x there\n", done.stderr
    copy = docker_steps.as_shell(("COPY", "Makefile locks ./")).replace("/project", str(ROOT))
    subprocess.run(["sh", "-ec", copy], cwd=tmp_path, check=True)
    assert (tmp_path / "locks" / "cpu.txt").read_bytes() == (ROOT / "locks" / "cpu.txt").read_bytes()
    assert (tmp_path / "Makefile").is_file()
    with pytest.raises(FileNotFoundError, match="nothing: no such file"):
        docker_steps.as_shell(("COPY", "nothing ."))


def pip_of_this_machine() -> tuple[dict[str, str], list[str]]:
    """Return this machine's settings of pip as variables, and the folders that they name."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    names = ("index-url", "extra-index-url", "find-links", "trusted-host")
    found = dict(re.findall(rf"^(?:global|:env:)\.({'|'.join(names)})='(.*)'$", listed.stdout, re.MULTILINE))
    # The files of an index on disk are beside its folder of pages.
    folders = [word.removeprefix("file://").removesuffix("/simple") for v in found.values() for word in v.split()]
    variables = {"PIP_" + name.replace("-", "_").upper(): value for name, value in found.items()}
    return variables, [folder for folder in folders if folder.startswith("/")]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("debootstrap") is None or os.geteuid() != 0, reason="needs debootstrap and root")
def test_the_steps_make_an_environment_in_a_clean_root(tmp_path):
    """A Debian with nothing but its base: every step passes, and a dry run in it prints a prompt."""
    root = tmp_path / "root"
    subprocess.run(["debootstrap", "--variant=minbase", "bookworm", str(root)], check=True, timeout=900)
    variables, folders = pip_of_this_machine()
    if bundle := os.environ.get("PIP_CERT") or os.environ.get("SSL_CERT_FILE"):
        shutil.copy2(bundle, root / "certificates.pem")
        variables["PIP_CERT"] = variables["SSL_CERT_FILE"] = "/certificates.pem"
    line = [sys.executable, str(ROOT / "tests" / "docker_steps.py"), str(root), "--then", "python grpo.py --dry_run"]
    line += [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
    line += [word for folder in folders for word in ("--bind", folder)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "\nprompt     " in done.stdout

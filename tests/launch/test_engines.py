"""Submissions of scripts/submit.py, read by the engines themselves: a running Ray, SkyPilot's own parsers.

`make test-engines` installs them, next to the Slurm of tests/launch/test_slurm.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import until
from ray_head import ADDRESS, ENGINES, RayHead, reason_for_none
from submitted_jobs import SUBMIT, job_of, repository, submit

from runtime.system import git

pytestmark = pytest.mark.engines
needs = lambda tool: pytest.mark.skipif(bool(reason_for_none(tool)), reason=reason_for_none(tool) or "there")  # noqa: E731

DOLLARS = ["cost $HOME and $PATH and $NOT_SET ${USER} $RUN_DIR $MASTER_PORT", 'it\'s "one"', "a\nb\n", "", "$$"]


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    with RayHead(tmp_path_factory.mktemp("ray")) as head:
        yield head


def ray_job(head: RayHead, folder: Path, *words: str) -> str:
    """Submit words to Ray, and return the id of the job."""
    done = head.run(*SUBMIT, "--backend", "ray", "--cluster", ADDRESS, *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.search(r"cancel: ray job stop --address=\S+ (\S+)", done.stderr)[1]


@needs("ray")
def test_words_and_variables_arrive_on_ray(ray, tmp_path):
    """Ray replaces what looks like a variable of its own in everything that it is given as an environment."""
    program = "import json, os, sys; found = [sys.argv[2:], os.environ['X'], os.environ['CODE_COMMIT']]; "
    program += "json.dump(found, open(sys.argv[1], 'w'))"
    repository(tmp_path)
    out = tmp_path / "out.json"
    value = "a $HOME 'b' \"c\" ${PATH}"
    job = ray_job(ray, tmp_path, "--env", f"X={value}", "--", sys.executable, "-c", program, str(out), *DOLLARS)
    ray.succeed(job)
    commit = git.output(tmp_path, "rev-parse", "HEAD").strip()
    assert json.loads(out.read_text()) == [DOLLARS, value, commit]


SAVES = """
import os, signal, sys, time
def save(*_):
    time.sleep(6)
    open(sys.argv[1], "w").write("saved")
    os._exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(120)
"""


@needs("ray")
def test_a_job_that_is_stopped_on_ray_saves(ray, tmp_path):
    """Six seconds, where Ray's own default kills after three; a second submission of it is rejected meanwhile."""
    (tmp_path / "saves.py").write_text(SAVES)
    words = ["--", sys.executable, "saves.py", str(tmp_path / "saved")]
    job = ray_job(ray, tmp_path, *words)
    assert ray.wait(job, "RUNNING") == "RUNNING"
    again = ray.run(*SUBMIT, "--backend", "ray", "--cluster", ADDRESS, *words, cwd=tmp_path)
    assert again.returncode == 73 and "still waits or runs" in again.stderr, again.stderr
    until(lambda: "ready" in ray.job(job, "/logs")["logs"])
    folder = next((tmp_path / "runs" / "jobs").iterdir())
    (record,) = submit.submissions(str(folder))
    ray.run("bash", "-c", submit.follow_up(record, "cancel"), cwd=tmp_path)
    assert ray.wait(job) == "STOPPED"
    assert (tmp_path / "saved").read_text() == "saved"


def engine(program: str, *words: str, **options) -> subprocess.CompletedProcess:
    """A program of Python under the interpreter of the engines."""
    line = [str(ENGINES / "bin" / "python"), "-c", program, *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=100, **options)


SKY = """
import sys, json, sky
from click.testing import CliRunner
from sky.client.cli import command
task = sky.Task.from_yaml(sys.argv[1])
resources = [f"{r} {r.region}" for r in task.resources]
words = json.loads(sys.argv[2])
assert words[:3] == ["sky", "jobs", "launch"], words
context = command.jobs_launch.make_context("launch", words[3:])
print(json.dumps([task.name, task.num_nodes, resources]))
"""


def sky_reads(tmp_path: Path, flags: str) -> list:
    """Return what SkyPilot's parsers make of the specification and of the command of a submission."""
    plan = submit.render(job_of("skypilot", flags))
    path = next(name for name in plan.files if name.endswith("sky.yaml"))
    (tmp_path / "sky.yaml").write_text(plan.files[path])
    words = [str(tmp_path / "sky.yaml") if word == path else word for word in plan.command]
    env = os.environ | {"HF_TOKEN": "x", "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = engine(SKY, str(tmp_path / "sky.yaml"), json.dumps(words), cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs("sky")
@pytest.mark.parametrize(
    "flags, nodes, kinds",
    [
        (
            "--cluster aws gcp/us-central1 --preemptible --num_nodes 2 --gpus H100:8 --secret HF_TOKEN",
            2,
            ["AWS", "GCP"],
        ),
        ("--cluster k8s/prod --num_nodes 2 --gpus H100:8 --mem 500G --mount runs-claim:/runs", 2, ["Kubernetes"]),
        ("--cluster k8s --scheduler_args '--priority high'", 1, ["Kubernetes"]),
    ],
)
def test_skypilot_reads_what_is_written(tmp_path, flags, nodes, kinds):
    name, found, resources = sky_reads(tmp_path, flags)
    assert name.startswith("grpo-") and found == nodes
    assert all(any(kind in text for text in resources) for kind in kinds), resources

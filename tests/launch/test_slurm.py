"""scripts/submit.py on a real Slurm of one node and of two, started here: run, preempt, requeue, resume."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm_cluster
import submit
from helpers import ROOT, command, finish, record, until
from slurm_cluster import Slurm

missing = slurm_cluster.reason_for_none()
pytestmark = [pytest.mark.skipif(bool(missing), reason=missing)]

# One step a second; saves each; asked to stop it leaves with 75. Ends with the code in argv[2] after argv[1] steps.
PROGRAM = """
import os, pathlib, signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
saved = pathlib.Path(os.environ["RUN_DIR"], "step")
step = int(saved.read_text()) if saved.exists() else 0
print("from step", step, "restart", os.environ.get("SLURM_RESTART_COUNT", 0), os.environ["WANDB_RUN_ID"], flush=True)
while step < int(sys.argv[1]):
    time.sleep(1)
    step += 1
    saved.write_text(str(step))
    if stop:
        print("saved step", step, flush=True)
        sys.exit(75)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.mark.engines
def test_preempted_requeued_finished(slurm, tmp_path):
    """Slurm's signal goes to the batch script alone; the program saves, leaves with 75, starts again and goes on."""
    (tmp_path / "steps.py").write_text(PROGRAM)
    job = slurm.submit(tmp_path, "--run_dir", "run", "--cpus", "1", "--", sys.executable, "steps.py", "8", "0")
    saved = tmp_path / "run" / "step"
    until(lambda: saved.exists() and int(saved.read_text()) >= 2)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    until(lambda: slurm.state(job).get("Restarts") == "1")
    assert int(saved.read_text()) < 8
    now = slurm.wait(job, "COMPLETED", "FAILED")
    log = (tmp_path / "run" / f"slurm-{job}.out").read_text()
    assert (now["JobState"], now["ExitCode"], saved.read_text()) == ("COMPLETED", "0:0", "8"), log
    starts = re.findall(r"from step (\d+) restart (\d+) (\S+)", log)
    assert [restart for _, restart, _ in starts] == ["0", "1"] and starts[0][2] == starts[1][2], log
    assert starts[1][0] == re.search(r"saved step (\d+)", log)[1]  # nothing lost, nothing done twice
    print(log)


SAYS = """
import os, pathlib, time
import word
print("X", os.environ["X"], "word", word.text, "cores", len(os.sched_getaffinity(0)), flush=True)
"""


@pytest.mark.engines
def test_a_waiting_array_is_what_was_submitted(slurm, tmp_path):
    """An edit while it waits, and a second submission of its commands, change neither its code nor its settings."""
    (tmp_path / "says.py").write_text(SAYS)
    (tmp_path / "word.py").write_text("text = 'old'\n")
    cores = str(os.cpu_count())
    busy = slurm.submit(tmp_path, "--name", "busy", "--cpus", cores, "--", "sleep", "600")
    until(lambda: slurm.state(busy)["JobState"] == "RUNNING")
    command = ["--", sys.executable, "says.py"]
    line = ["--run_dir", "run", "--array_parallelism", "1", *command, *command]
    first = slurm.submit(tmp_path, "--env", "X=first", *line)
    (tmp_path / "word.py").write_text("text = 'new'\n")
    again = slurm.submission(tmp_path, "--env", "X=second", *line)
    assert again.returncode == 73 and f"still waits or runs; cancel it (scancel {first})" in again.stderr, again.stderr
    renamed = slurm.submit(tmp_path, "--name", "other", "--run_dir", "other", "--env", "X=second", *command)
    slurm.run("scancel", busy)
    for job in (f"{first}_0", f"{first}_1", renamed):
        assert slurm.wait(job, "COMPLETED", "FAILED", timeout=200)["JobState"] == "COMPLETED"
    assert "X second word new" in (tmp_path / "other" / f"slurm-{renamed}.out").read_text()
    logs = "".join(path.read_text() for path in (tmp_path / "run").glob(f"slurm-{first}*.out"))
    assert logs.count("X first word old") == 2


@pytest.mark.engines
def test_a_preemption_is_no_retry(slurm, tmp_path):
    """By a partition that goes first, which leaves the job time to save; a request at the time limit is one."""
    (tmp_path / "steps.py").write_text(PROGRAM)
    job = slurm.submit(tmp_path, "--run_dir", "run", "--max_retries", "0", "--", sys.executable, "steps.py", "60", "0")
    log = tmp_path / "run" / f"slurm-{job}.out"
    begun = lambda starts: log.exists() and log.read_text().count("from step") == starts  # noqa: E731
    until(lambda: begun(1))
    words = ["--name", "urgent", "--partition", "urgent", "--cpus", str(os.cpu_count())]
    urgent = slurm.submit(tmp_path, *words, "--", "sleep", "1")
    until(lambda: slurm.state(job)["Restarts"] == "1")
    slurm.wait(urgent, "COMPLETED")
    slurm.wait(job, "RUNNING")
    until(lambda: begun(2))
    time.sleep(1)
    slurm.run("scancel", "--batch", "--signal=USR1", job)
    now = slurm.wait(job, "COMPLETED", "FAILED")
    text = log.read_text()
    assert (now["JobState"], now["ExitCode"], now["Restarts"]) == ("FAILED", "75:0", "1"), text
    assert text.count("saved step") == 2


@pytest.mark.engines
def test_dependencies_that_cannot_be(slurm, tmp_path):
    """After a failed job the next one is canceled; a number that is no job's is rejected."""
    first = slurm.submit(tmp_path, "--", "bash", "-c", "sleep 3; exit 5")
    last = slurm.submit(tmp_path, "--depends_on", first, "--", "true")
    assert slurm.wait(last, "CANCELLED", "COMPLETED", timeout=60)["JobState"] == "CANCELLED"
    done = slurm.submission(tmp_path, "--depends_on", "999999", "--", "true")
    assert done.returncode == 2 and "--depends_on 999999: Slurm has no such job" in done.stderr


@pytest.mark.engines
def test_a_submission_from_inside_an_allocation(slurm, tmp_path):
    """Its binding, memory, ranks and ids stay behind."""
    (tmp_path / "p.py").write_text("import os; print(sorted(n for n in os.environ if n in ('RANK', 'WORLD_SIZE')))")
    outer = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "200", "SLURM_CPU_BIND": "mask_cpu:0x1", "RANK": "3"}
    outer |= {"WORLD_SIZE": "8", "SLURM_NTASKS": "5"}
    words = ["--run_dir", "run", "--mem", "0G", "--", sys.executable, "p.py"]
    job = slurm.submit(tmp_path, *words, env=outer)
    assert slurm.wait(job, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    assert "[]" in (tmp_path / "run" / f"slurm-{job}.out").read_text()


@pytest.mark.engines
def test_status_logs_and_cancel(slurm, tmp_path):
    """The commands that the submission prints, and keeps for later; canceled, a job saves and does not come back."""
    (tmp_path / "steps.py").write_text(PROGRAM)
    done = slurm.submission(tmp_path, "--run_dir", "run", "--", sys.executable, "steps.py", "60", "0")
    job, log = done.stdout.strip(), tmp_path / "run" / f"slurm-{done.stdout.strip()}.out"
    assert f"cancel: scancel {job}" in done.stderr and log.name in done.stderr
    until(lambda: log.exists() and "from step" in log.read_text())
    (record,) = submit.submissions(str(tmp_path / "run"))
    ask = lambda what: slurm.call("bash", "-c", submit.follow_up(record, what), cwd=tmp_path)  # noqa: E731
    assert ask("status").stdout.startswith(f"{job} ") and "RUNNING" in ask("status").stdout
    assert ask("logs").stdout.startswith("from step 0 ")
    assert ask("cancel").returncode == 0
    slurm.wait(job, "CANCELLED", "COMPLETED", "FAILED")
    time.sleep(3)
    now = slurm.state(job)
    assert (now["JobState"], now["Restarts"]) == ("CANCELLED", "0") and "saved step" in log.read_text()


# Answers in a twentieth of a second; while there is a file `hold`, makes one that says so and waits.
GATED = """
import pathlib, time
from rewards import Reward

def gated(response, truth, row):
    time.sleep(0.05)
    place = pathlib.Path(__file__).parent
    while (place / "hold").exists():
        (place / "held").touch()
        time.sleep(0.05)
    return Reward(float(len(response) % 2))
"""
SLOWLY = """
import time
from rewards import Reward

def slowly(response, truth, row):
    time.sleep(0.5)
    return Reward(float(len(response) % 2))
"""


def project(folder: Path) -> Path:
    """A copy of this project's code, in a repository of its own, to be edited while it runs."""
    for name in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split():
        if not name.startswith(("tests/", "studies/", "docs/", "variants/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], cwd=folder, check=True)
    return folder


def edit(file: Path, old: str, new: str) -> None:
    """Replace a text that the file has."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.engines
def test_grpo_preempted(slurm, tiny, tmp_path):
    """grpo.py is edited while its job waits and while it is preempted: the numbers are those of what was submitted.

    The preemption is Slurm's own, by a job of a partition that goes first. The first edit moves the weights elsewhere
    without a word, the second ends a run at its start.
    """
    (tmp_path / "gated.py").write_text(GATED)
    here = project(tmp_path / "project")
    more = ["--total_steps", "5", "--beta", "0.1", "--verifier", f"{tmp_path}/gated.py:gated", "--call_timeout", "300"]
    line = lambda out: [w.replace(f"{ROOT}/grpo.py", "grpo.py") for w in command(tiny, tmp_path / out, *more)]  # noqa: E731
    finish(command(tiny, tmp_path / "straight", *more), tmp_path / "straight.log")
    busy = slurm.submit(tmp_path, "--name", "busy", "--cpus", str(os.cpu_count()), "--", "sleep", "600")
    slurm.wait(busy, "RUNNING")
    job = slurm.submit(here, "--run_dir", "parts", "--", *line("parts"))
    edit(here / "grpo.py", "args.learning_rate", "(2 * args.learning_rate)")
    assert slurm.state(job)["JobState"] == "PENDING"
    slurm.run("scancel", busy)
    log = here / "parts" / f"slurm-{job}.out"
    until(lambda: log.exists() and "step 1/5" in log.read_text(), 200)
    (tmp_path / "hold").touch()
    until((tmp_path / "held").exists)
    words = ["--name", "urgent", "--partition", "urgent", "--cpus", str(os.cpu_count())]
    urgent = slurm.submit(tmp_path, *words, "--", "sleep", "600")
    until(lambda: "saving after this step" in log.read_text())
    (tmp_path / "hold").unlink()
    until(lambda: slurm.state(job)["Restarts"] == "1", 120)
    (here / "grpo.py").write_text("raise SystemExit(9)\n")
    assert slurm.state(job)["JobState"] == "PENDING"
    slurm.wait(urgent, "RUNNING")
    slurm.run("scancel", urgent)
    now = slurm.wait(job, "COMPLETED", "FAILED")
    text = log.read_text()
    assert (now["JobState"], now["ExitCode"], now["Restarts"]) == ("COMPLETED", "0:0", "1"), text
    assert "resuming after step" in text, text
    expected, got = record(tmp_path / "straight" / "run"), record(tmp_path / "parts" / "run")
    for key in expected:
        assert got[key] == expected[key], key
    print(text)


@pytest.mark.slow
def test_one_task_of_an_array_is_requeued(slurm, tmp_path):
    """The last one, whose job number is the array's: the others neither stop nor start again."""
    (tmp_path / "steps.py").write_text(PROGRAM)
    words = [w for steps in ("1", "8", "8") for w in ("--", sys.executable, "steps.py", steps, "0")]
    array = slurm.submit(tmp_path, "--run_dir", "run", "--array_parallelism", "3", "--cpus", "1", *words)
    saved = tmp_path / "run" / "task_2" / "step"
    if os.cpu_count() < 3:  # they run two at a time: until the last has begun, the first has ended
        slurm.wait(f"{array}_0", "COMPLETED", "FAILED")
    until(lambda: saved.exists() and int(saved.read_text()) >= 2)
    slurm.run("scancel", "--batch", "--signal=USR1", f"{array}_2")
    until(lambda: slurm.state(f"{array}_2").get("Restarts") == "1")
    ends = [slurm.wait(f"{array}_{task}", "COMPLETED", "FAILED", "CANCELLED") for task in (2, 1, 0)]
    assert [(e["JobState"], e["Restarts"]) for e in ends] == [("COMPLETED", n) for n in "100"]


@pytest.mark.slow
@pytest.mark.parametrize("code, retries, restarts", [(3, 5, 0), (75, 0, 0), (75, 2, 2), (137, 5, 0)])
def test_other_codes_and_the_limit(slurm, tmp_path, code, retries, restarts):
    """As many starts as requeues and one; a node whose script was killed (137) left no code, and is no 75 either."""
    kill = "os.kill(os.getppid(), 9)\n" if code == 137 else ""
    (tmp_path / "steps.py").write_text(PROGRAM.replace("sys.exit(int(sys.argv[2]))", f"{kill}sys.exit({code})"))
    words = ["--run_dir", "run", "--max_retries", str(retries), "--", sys.executable, "steps.py", "1", str(code)]
    job = slurm.submit(tmp_path, *words)
    now = slurm.wait(job, "FAILED", "COMPLETED")
    assert (now["JobState"], now["ExitCode"], now["Restarts"]) == ("FAILED", f"{code}:0", str(restarts))
    assert (tmp_path / "run" / f"slurm-{job}.out").read_text().count("from step") == restarts + 1


@pytest.mark.engines
def test_array_and_dependency(slurm, tmp_path):
    """Three commands as tasks of their own; a job that waits for them; environment and words arrive."""
    program = "import json, os, sys; e = os.environ; "
    program += "json.dump([sys.argv[1:], e['RUN_DIR'], e['X']], open(sys.argv[1], 'w'))"
    words = [w for i in "012" for w in ("--", sys.executable, "-c", program, f"out{i}", "it's $HOME\n")]
    array = slurm.submit(tmp_path, "--run_dir", "run", "--array_parallelism", "1", "--env", "X=a 'b'", *words)
    last = slurm.submit(tmp_path, "--depends_on", array, "--", "bash", "-c", "cat out0 out1 out2 >all")
    assert slurm.wait(last, "COMPLETED", "FAILED")["JobState"] == "COMPLETED"
    for i in range(3):
        expected = [[f"out{i}", "it's $HOME\n"], str(tmp_path / "run" / f"task_{i}"), "a 'b'"]
        assert json.loads((tmp_path / f"out{i}").read_text()) == expected
    assert (tmp_path / "all").exists()


@pytest.mark.slow
def test_one_job_over_two_nodes(tiny, tmp_path):
    """A rank on each node of the job, stopped and requeued: the numbers of an undisturbed run on one node."""
    more = ["--total_steps", "4", "--beta", "0.1", "--verifier", f"{tmp_path}/slowly.py:slowly"]
    (tmp_path / "slowly.py").write_text(SLOWLY)
    finish(command(tiny, tmp_path / "one", *more, ranks=2), tmp_path / "one.log", 300)
    with Slurm(tmp_path, nodes=2) as cluster:
        line = command(tiny, tmp_path / "two", *more)
        job = cluster.submit(ROOT, "--run_dir", str(tmp_path / "job"), "--num_nodes", "2", "--", *line)
        log = tmp_path / "job" / f"slurm-{job}.out"
        begun = lambda: log.exists() and "step 1/4" in log.read_text()  # noqa: E731
        until(lambda: begun() or cluster.state(job)["JobState"] == "FAILED", 240)
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        now = cluster.wait(job, "COMPLETED", "FAILED", timeout=300)
    text = log.read_text()
    assert (now["JobState"], now["ExitCode"], now["Restarts"]) == ("COMPLETED", "0:0", "1"), text
    assert (now["NumNodes"], now["NodeList"]) == ("2", "node[0-1]")
    assert "hardware   2 rank(s)" in text and "resuming after step" in text, text
    expected, got = record(tmp_path / "one" / "run"), record(tmp_path / "two" / "run")
    for key in expected:
        assert got[key] == expected[key], key

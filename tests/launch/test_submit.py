"""scripts/submit.py: what every backend writes and runs, word for word, and the local backend for real."""

from __future__ import annotations

import base64
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import submit_backends
from helpers import ROOT, alive, until
from submitted_jobs import COMMAND, SUBMIT, in_place, job_of, refused, repository, script_of, submit, with_changes

from runtime.system import git, process

SECRET = "hf_9f8e7d6c5b4a"
NASTY = [
    *("it's", 'say "hi"', "$HOME and ${HOME}", "$(HF_TOKEN)", "`id`", "two\nlines\n", "</answer>", "a  b", "", "*"),
    *(
        '{"rope": {"theta": 1e4}}',
        "back\\slash \\n",
        "!history",
        "#comment",
        "é 数 😀",
        "tab\there",
        "-x",
        "%j ~ ;|&<>",
        "\x7f\x85\u2028\ufeff",
    ),
    *(" leading", "trailing ", "\n", "EOF", "---", "carriage\rreturn", "a: b", "- item", "'\"'\"'", "$((1+1))"),
]
PRINT_ARGV = ["-c", "import json, sys; print(json.dumps(sys.argv[1:]), file=open('argv.json', 'a'))"]

# The examples of docs/launching.md, as they stand there.
EXAMPLES = {
    "local": "--env OMP_NUM_THREADS=2 --secret HF_TOKEN",
    "slurm": "--partition h100 --partition a100 --account rl --qos high --num_nodes 2 --gpus 8 --cpus 64 --mem 500G "
    "--time 12h --secret WANDB_API_KEY --depends_on 4711",
    "ray": "--cluster http://head:8265 --gpus 8 --cpus 64 --mem 500G",
    "skypilot": "--cluster aws --cluster gcp/us-central1 --preemptible --num_nodes 2 --gpus H100:8 --mem 500G "
    "--image docker:me/exactrl:1 --mount s3://my-bucket:/runs --secret HF_TOKEN",
}


@pytest.mark.parametrize("backend", submit.BACKENDS)
def test_words_arrive_as_they_were_given(backend, tmp_path):
    """Two commands of words that every shell, YAML and JSON reader likes to change, through each backend's own way."""
    first, second = [sys.executable, *PRINT_ARGV, *NASTY], [sys.executable, *PRINT_ARGV, "second", *NASTY[::-1]]
    job = in_place(job_of(backend, "", first, second))
    command, environment = script_of(backend, submit.render(job))
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "argv.json").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [NASTY, ["second", *NASTY[::-1]]]


def test_words_arrive_in_array_tasks(tmp_path):
    commands = [[sys.executable, *PRINT_ARGV, str(i), *NASTY] for i in range(3)]
    plan = submit.render(in_place(job_of("slurm", "--array_parallelism 2", *commands)))
    command, _ = script_of("slurm", plan)
    for task in (2, 0):
        subprocess.run(command, cwd=tmp_path, env=os.environ | {"SLURM_ARRAY_TASK_ID": str(task)}, check=True)
    lines = (tmp_path / "argv.json").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [["2", *NASTY], ["0", *NASTY]]
    assert "--array=0-2%2" in plan.command


@pytest.mark.integration
def test_nodes_that_saved_wait_for_the_others(tmp_path):
    """srun ends all nodes when one has left: the first to be done stays until the second has saved, too."""
    ends = "until [[ $SLURM_NODEID == 0 || -e go ]]; do sleep 0.05; done; exit $CODE"
    job = job_of("slurm", "--num_nodes 2", ["bash", "-c", ends])
    command, _ = script_of("slurm", submit.render(in_place(job)))
    marks = tmp_path / job.folder
    marks.mkdir(parents=True)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

    def nodes(*codes: int) -> list[subprocess.Popen]:
        for left in marks.glob("exit.*"):
            left.unlink()
        envs = [{"SLURM_NODEID": str(i), "CODE": str(c)} for i, c in enumerate(codes)]
        return [subprocess.Popen(command, cwd=tmp_path, env=os.environ | place | env) for env in envs]

    first, second = nodes(75, 75)
    until((marks / "exit.0").exists)
    time.sleep(1)
    assert first.poll() is None, "the second is still busy"
    (tmp_path / "go").touch()
    assert (first.wait(30), second.wait(30)) == (75, 75)
    (tmp_path / "go").unlink()
    first, second = nodes(3, 75)  # a failure is told at once
    assert first.wait(30) == 3 and second.poll() is None
    (tmp_path / "go").touch()
    assert second.wait(30) == 75


def test_what_is_saved_outlives_the_machine(tmp_path, monkeypatch, capsys):
    """RUN_DIR lies on the first mount; without one, a restart would start over, and the submission says so."""
    job = job_of("skypilot", EXAMPLES["skypilot"])
    assert f"RUN_DIR=/runs/{job.run_id} " in script_of("skypilot", submit.render(job))[0][-1]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sky").write_text("#!/bin/sh\n")
    (tmp_path / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for more, warns in (([], True), (["--max_retries", "0"], False), (["--mount", "a:/b"], False)):
        assert submit.main(["--backend", "skypilot", *more, "--", "true"]) == 0
        assert ("no --mount" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    "line, warns",
    [("python a.py", True), ("python a.py --output_dir=s3://b -- python b.py", True), ("true", False)]
    + [(f"python a.py {flag}", False) for flag in ("--output_dir /x", "--output-dir=s3://b")],
)
def test_results_that_ray_deletes_are_warned_of(line, warns, capsys):
    submit.warn(job_of("ray", "", *[command.split() for command in line.split(" -- ")]))
    assert ("without an absolute --output_dir" in capsys.readouterr().err) == warns


def test_a_task_has_a_name_that_skypilot_takes():
    for name in ("7b", "a" * 80, "x_Y.z", "9" * 60):
        rendered = submit_backends.dns_name(job_of("skypilot", f"--name {name}"))
        assert re.fullmatch("[a-z]([-a-z0-9]{0,50}[a-z0-9])?", rendered), rendered


@pytest.mark.parametrize("backend", submit.BACKENDS)
def test_golden(backend):
    """The examples render to the stored files. UPDATE_GOLDEN=1 rewrites the files: read the difference."""
    secrets = {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET[::-1]}
    job = job_of(backend, EXAMPLES[backend])
    plan = submit.render(job)
    submit.check_secrets(job, plan, secrets)
    text = submit.show(plan, with_changes(job, verbose=True)) + "\n"
    assert SECRET not in text and SECRET[::-1] not in text
    golden = ROOT / "tests" / "golden" / "submit" / f"{backend}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


def test_the_examples_are_those_of_the_page():
    """The page shows each example as it is tested, and every script in it is one that bash can read."""
    page = " ".join((ROOT / "docs" / "launching.md").read_text().replace("\\\n", " ").split())
    for backend, flags in EXAMPLES.items():
        assert f"--backend {backend} {flags} -- python grpo.py" in page, backend
        command, environment = script_of(backend, submit.render(job_of(backend, flags)))
        script = base64.b64decode(environment["JOB_SCRIPT"]) if environment else command[-1].encode()
        assert subprocess.run(["bash", "-n"], input=script, capture_output=True).stderr == b""


@pytest.mark.parametrize(
    "backend, flags, says",
    [
        ("local", "--time 1h", "--time: --backend local"),
        ("local", "--num_nodes 2", "--backend local has no such setting; leave it out"),
        ("slurm", "--preemptible", "--preemptible: --backend slurm"),
        ("ray", "--secret HF_TOKEN", "--secret: --backend ray"),
        ("ray", "--cluster a --cluster b", "takes one"),
        ("skypilot", "--array_parallelism 2", "--array_parallelism: --backend skypilot"),
        ("skypilot", "--gpus 8", "--gpus H100:8"),
        ("skypilot", "--depends_on 1", "--depends_on: --backend skypilot"),
        ("slurm", "--gpus many", "--gpus: many: write 8, or with a type h100:8"),
        ("slurm", "--mem 5", "--mem: 5: write GiB as 64G"),
        ("slurm", "--time 12", "--time: 12: not a duration; write 90m"),
        ("slurm", "--num_nodes two", "--num_nodes: invalid int value: 'two'"),
        ("slurm", "--num_nodes 0", "--num_nodes 0: give 1 or more"),
        ("slurm", "--workdir /nothere", "--workdir /nothere: no such folder"),
        ("slurm", "--run_dir 'a b'", "--run_dir: a b: use letters"),
        ("local", f"--secret HF_TOKEN={SECRET}", "--secret: HF_TOKEN: write a name only"),
        ("local", "--secret NOT_SET_ANYWHERE", "not set in this shell; export it first"),
        ("local", f"--env HF_TOKEN={SECRET}", "use --secret HF_TOKEN"),
        ("local", "--env NOT_SET_ANYWHERE", "write --env NOT_SET_ANYWHERE=VALUE"),
        ("local", "--env A-B=1", "--env: A-B: not a name"),
        ("skypilot", "--mount a", "write SOURCE:/PATH"),
        ("slurm", "--cpus 1 b", "unrecognized arguments: b"),
        ("slurm", "--clusters a", "unrecognized arguments: --clusters"),
        ("condor", "", "invalid choice: 'condor'"),
    ],
)
def test_what_cannot_be_is_an_error(backend, flags, says, capsys):
    said = refused(capsys, "--backend", backend, *shlex.split(flags), "--dry_run", "--", "python", "grpo.py")
    assert says in said and SECRET not in said


@pytest.mark.parametrize("backend", ["local", "slurm", "ray", "skypilot"])
@pytest.mark.parametrize(
    "words, missing",
    [
        ("python none.py", "none.py"),
        ("env A=1 uv run python none.py", "none.py"),
        ("source none.sh && python mine.py", "none.sh"),
        ("bash none.sh", "none.sh"),
    ],
)
def test_files_that_do_not_exist_never_reach_a_queue(backend, words, missing, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("")
    said = refused(capsys, "--backend", backend, "--dry_run", "--", *words.split())
    assert f"error: {missing}: no such file in {tmp_path}" in said


@pytest.mark.parametrize("time, fits", [("2m", False), ("4m", False), ("241s", True), ("5m", True)])
def test_a_time_limit_within_the_warning_is_refused(time, fits, capsys):
    """Slurm asks the job to stop up to four minutes before the end: it would do nothing but restart."""
    words = ["--backend", "slurm", "--live", "--time", time, "--dry_run", "--", "true"]
    if fits:
        assert submit.main(words) == 0
        return
    assert "s are too few: Slurm asks the job to stop 180 to 240 s" in refused(capsys, *words)


def test_what_slurm_lists(monkeypatch, capsys):
    """A job has the name of its run; cores come with GPUs, a failed dependency ends it, and words of the user's."""
    monkeypatch.chdir(ROOT)
    words = shlex.split("--backend slurm --gpus 2 --depends_on 7 --scheduler_args '--mail-type end --exclude=n3'")
    assert submit.main([*words, "--dry_run", "--", "python", "grpo.py", "--beta", "0.07", "--seed", "5"]) == 0
    line = shlex.split(capsys.readouterr().out.splitlines()[-1])
    found = dict(word.removeprefix("--").split("=", 1) for word in line if "=" in word)
    assert found["job-name"] == "grpo__beta=0.07__seed=5", found
    assert found["cpus-per-task"] == "16" and found["kill-on-invalid-dep"] == "yes" and found["exclude"] == "n3"
    assert line[-4:-2] == ["--mail-type", "end"]


@pytest.mark.parametrize("words", [[], ["--"], ["--", "--", "true"], ["--", "true", "--"]])
def test_a_command_is_needed(words, capsys):
    assert "write it after --" in refused(capsys, "--backend", "local", "--dry_run", *words)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "1", "python", "a.py"], "python: put -- before the command: submit.py [flags] -- python a.py"),
        (["--gpu", "1", "--", "true"], "unrecognized arguments: --gpu 1; perhaps --gpus"),
    ],
)
def test_a_mistake_before_the_command_is_answered(words, says, capsys):
    assert says in refused(capsys, "--backend", "slurm", *words)


@pytest.mark.parametrize("backend", submit.BACKENDS)
def test_a_secret_never_gets_out(backend, monkeypatch, capsys, tmp_path):
    """In a command, in --env or in the uncommitted changes its value is an error that does not show it."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.chdir(repository(tmp_path, grpo_py=""))
    start = ["--backend", backend, "--dry_run", "--verbose"]
    for words in (["--", "python", "grpo.py", f"--token={SECRET}"], ["--env", f"A={SECRET}", "--", "true"]):
        said = refused(capsys, *start, *words)
        assert "value of HF_TOKEN is in" in said and SECRET not in said
    monkeypatch.chdir(ROOT)
    job = with_changes(job_of(backend, ""), git={"commit": "0", "diff": f"+{SECRET}\n"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        submit.check_secrets(job, submit.render(job), {"HF_TOKEN": SECRET})
    assert "uncommitted.patch" in (said := capsys.readouterr()).err and SECRET not in said.err
    if backend != "ray":
        assert submit.main([*start, "--secret", "HF_TOKEN", "--", "python", "grpo.py"]) == 0
        said = capsys.readouterr()
        assert "HF_TOKEN" in said.out and SECRET not in said.out + said.err


def test_the_run_id_depends_on_the_commands_alone():
    ids = {job_of(b, f"--max_retries {r}").run_id for b in submit.BACKENDS for r in (1, 2)}
    assert len(ids) == 1
    assert job_of("local", "", ["python", "grpo.py", "--beta", "0.1"]).run_id not in ids
    assert job_of("local", "", [*COMMAND], [*COMMAND]).run_id not in ids


@pytest.mark.parametrize("backend, tool", [("slurm", "sbatch"), ("ray", "ray"), ("skypilot", "sky")])
def test_what_runs_is_what_the_dry_run_shows(backend, tool, tmp_path, monkeypatch, capsys):
    """A stand-in for the cluster's tool records its words; files and words are those of the dry run."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / tool).write_text(f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open('called', 'w'))\n")
    (bin_dir / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    monkeypatch.chdir(repository(tmp_path, grpo_py=""))
    monkeypatch.setattr(submit.time, "strftime", lambda form: "20260101-120000")
    monkeypatch.setattr(submit.secrets, "token_hex", lambda count: "1a2b")
    argv = ["--backend", backend, "--run_dir", "here", "--", *COMMAND]
    assert submit.main([*argv[:2], "--dry_run", "--verbose", *argv[2:]]) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "here").exists()
    assert submit.main(argv) == 0
    called = json.loads((tmp_path / "called").read_text())
    assert shown.rstrip("\n").endswith(shlex.join([tool, *called]))
    for path in (tmp_path / "here" / "20260101-120000-1a2b").iterdir():
        if path.is_file() and path.name not in ("code.files", "job.id"):
            assert f"# would write {path.relative_to(tmp_path)}\n{path.read_text().rstrip()}\n" in shown


def test_a_missing_tool_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    said = refused(capsys, "--backend", "skypilot", "--", "true")
    assert "sky is not installed here" in said


# ------------------------------------------------------------------------------- set-up, and what stands before python


LAUNCH = ["scripts/launch.py", "--config_file", "scripts/zero2.yaml", "--num_machines", "1", "--num_processes", "2",
          "--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--main_process_port"]  # fmt: skip


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("prefix", ["", "env A=1", "A=1", "nice -n 5", "env -u A nice", "runner run --with x"])
def test_every_rank_is_started_whatever_stands_before_python(prefix, processes, tmp_path):
    """The launcher goes between python and FILE.py; a job of one process is left as it is. All words arrive."""
    for name, body in (("runner", 'shift 3\nexec "$@"'), ("python", f'exec "{sys.executable}" print.py "$@"')):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "print.py").write_text("import json, os, sys\nprint(json.dumps([os.environ.get('A'), sys.argv[1:]]))")
    job = job_of(
        "local", f"--gpus {processes}", [*prefix.split(), "python", "grpo.py", "--exp_name", "torchrun", *NASTY]
    )
    command, _ = script_of("local", submit.render(in_place(job)))
    env = {k: v for k, v in os.environ.items() if k != "A"} | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    a, words = json.loads(done.stdout)
    assert a == ("1" if "A=1" in prefix else None)
    if processes > 1:
        assert words[: len(LAUNCH)] == LAUNCH and words[len(LAUNCH)].isdecimal()
        words = words[len(LAUNCH) + 1 :]
    assert words == ["grpo.py", "--exp_name", "torchrun", *NASTY]


@pytest.mark.parametrize(
    "words, says",
    [
        ("source setup.sh '&&'", "&& needs a command before it and one after it"),
        ("'&&' python grpo.py", "&& needs a command before it and one after it"),
        ("'source setup.sh && python grpo.py'", "a whole command in one word"),
    ],
)
def test_what_is_no_command_is_refused(words, says, capsys):
    assert says in refused(capsys, "--backend", "local", "--dry_run", "--", *shlex.split(words))


@pytest.mark.integration
@pytest.mark.parametrize(
    "words",
    [
        "python -u grpo.py",
        "python -m mine",
        "uv run grpo.py",
        "./grpo.py",
        "bash -c 'source setup.sh && python grpo.py'",
        "source scripts/setup.sh '&&' uv run grpo.py",
    ],
)
def test_a_program_that_would_run_as_one_rank_is_refused(words, capsys):
    said = refused(capsys, "--backend", "local", "--gpus", "2", "--dry_run", "--", *shlex.split(words))
    assert "one process of a job of 2" in said and "uv run python FILE.py" in said
    assert submit.main(["--backend", "local", "--gpus", "1", "--dry_run", "--", *shlex.split(words)]) == 0


def test_what_starts_its_own_processes_is_left_alone_and_what_does_not_is_said(capsys):
    """torchrun and its like run as given, once per node; so does a program that is not Python's, with a note."""
    for words in ("torchrun --nproc_per_node 2 grpo.py", "uv run accelerate launch grpo.py", "bash scripts/setup.sh"):
        assert submit.main(["--backend", "local", "--gpus", "2", "--dry_run", "--verbose", "--", *words.split()]) == 0
        said = capsys.readouterr()
        assert f"begin_command {words}\n" in said.out
        assert ("bash scripts/setup.sh: runs once per node" in said.err) == (words == "bash scripts/setup.sh")


@pytest.mark.parametrize("where", ["words", "flag"])
def test_the_set_up_and_the_command_share_a_shell(where, tmp_path):
    """Variables and functions of a sourced file, and its folder; again at each restart."""
    (tmp_path / "there").mkdir()
    (tmp_path / "setup.sh").write_text("echo $unset set-up >>log\nexport A='it is $set'\ncd there\n")
    program = (
        "import os, sys; print(os.environ['A'], os.path.basename(os.getcwd())); n = len(open('../log').readlines())"
    )
    python = [sys.executable, "-c", f"{program}; sys.exit(75 if n < 2 else 0)"]
    if where == "words":
        done = run_local(tmp_path, "--live", "--run_dir", "r", "--", "source", "setup.sh", "&&", *python)
    else:
        setup = "source setup.sh; true # comment"
        done = run_local(tmp_path, "--live", "--run_dir", "r", "--setup", setup, "--", *python)
    assert (done.returncode, done.stdout) == (0, "it is $set there\n" * 2), done.stderr
    assert (tmp_path / "log").read_text() == "set-up\n" * 2
    assert len(list((tmp_path / "r").glob("*/finished.*"))) == 1


@pytest.mark.parametrize("ends, code", [("exit 0", 1), ("exit 3", 3), ("return 4", 4), ("false", 1)])
def test_a_command_that_was_never_started_is_not_finished(tmp_path, ends, code):
    """A set-up that fails, or that ends the shell with 0: the command fails and stays to be done."""
    (tmp_path / "setup.sh").write_text(f"{ends}\n")
    done = run_local(tmp_path, "--run_dir", "r", "--", "source", "./setup.sh", "&&", *count("n", 0, 1))
    assert done.returncode == code and not (tmp_path / "n").exists()
    assert list((tmp_path / "r").glob("*/finished.*")) == []
    assert ("was not started" in done.stderr) == (ends == "exit 0")


def test_a_request_to_stop_during_the_set_up_loses_nothing(tmp_path):
    """75, so that a cluster starts the job again; the command itself is not begun."""
    (tmp_path / "setup.sh").write_text("touch ready\nsleep 60\n")
    argv = [*SUBMIT, "--backend", "local", "--live", "--run_dir", "r"]
    argv += ["--", "source", "setup.sh", "&&", *count("n", 0, 1)]
    process = subprocess.Popen(argv, cwd=tmp_path)
    until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 75
    assert not (tmp_path / "n").exists() and list((tmp_path / "r").glob("*/finished.*")) == []


# ----------------------------------------------------------------------------------------------- the local backend runs

COUNT = """
import os, sys, pathlib
file = pathlib.Path(sys.argv[1]); n = int(file.read_text()) + 1 if file.exists() else 1
file.write_text(str(n)); print("start", n, os.environ["RUN_ID"], os.environ["WANDB_RUN_ID"], flush=True)
sys.exit(int(sys.argv[2]) if n < int(sys.argv[3]) else 0)
"""


def count(file: str, code: int, starts: int) -> list[str]:
    """A command that ends with ``code`` until it was started ``starts`` times."""
    return [sys.executable, "-c", COUNT, file, str(code), str(starts)]


def only(run_dir: Path, name: str) -> Path:
    """A file of the one submission of a job."""
    (path,) = run_dir.glob(f"*/{name}")
    return path


def run_local(folder: Path, *words: str, **options) -> subprocess.CompletedProcess:
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    argv = [*SUBMIT, "--backend", "local", *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.integration
@pytest.mark.parametrize("code, retries, starts, ends", [(75, 10, 3, 0), (75, 1, 2, 75), (75, 0, 1, 75), (1, 10, 1, 1),
                                                          (2, 10, 1, 2), (143, 10, 1, 143)])  # fmt: skip
def test_local_starts_again_on_75_alone(tmp_path, code, retries, starts, ends):
    done = run_local(tmp_path, "--run_dir", "r", "--max_retries", str(retries), "--", *count("n", code, 3))
    assert done.returncode == ends, done.stderr
    assert (tmp_path / "n").read_text() == str(starts)
    record = json.loads(only(tmp_path / "r", "submit.json").read_text())
    said = [line.split() for line in done.stdout.splitlines()]  # one id for all starts, another for each submission
    assert len({words[2] for words in said}) == 1 and said[0][3] == f"{said[0][2]}-{record['submitted']}-1"
    assert record["run_id"] == said[0][2] and record["commands"] == [count("n", code, 3)]
    assert only(tmp_path / "r", "exit.0").read_text() == f"{ends}\n"


CRASH = """
import os, sys, pathlib, time
file = pathlib.Path("starts"); n = int(file.read_text()) + 1 if file.exists() else 1
file.write_text(str(n))
if n <= int(sys.argv[2]):
    pathlib.Path(os.environ["RUN_DIR"], "saved").touch()  # as a run does after each checkpoint
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.integration
@pytest.mark.parametrize(
    ("code", "saves", "retries", "starts", "ends"),
    [(1, 2, 10, 3, 1), (137, 1, 10, 2, 137), (1, 99, 3, 4, 75), (2, 99, 10, 1, 2), (1, 0, 10, 1, 1), (0, 1, 10, 1, 0)],
)
def test_a_crash_after_a_new_checkpoint_is_worth_another_start(tmp_path, code, saves, retries, starts, ends):
    """It came further than at its last start; one that did not, and rejected arguments, would come again."""
    words = [sys.executable, "-c", CRASH, str(code), str(saves)]
    done = run_local(tmp_path, "--run_dir", "r", "--max_retries", str(retries), "--", *words)
    assert (done.returncode, (tmp_path / "starts").read_text()) == (ends, str(starts)), done.stderr
    if starts > 1:
        assert f"exit code {code} after a checkpoint: counts as 75" in done.stderr


def test_a_set_up_that_fails_is_no_crash_of_a_run(tmp_path):
    """A command that was not started does not count the saves of an earlier run of this job."""
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "saved").touch()
    done = run_local(tmp_path, "--run_dir", "r", "--setup", "echo x >> tries; false", "--", "true")
    assert done.returncode == 1 and (tmp_path / "tries").read_text() == "x\n"


@pytest.mark.parametrize("backend", submit.BACKENDS)
def test_a_set_up_of_several_lines_arrives_as_it_was_given(backend, tmp_path):
    """A here-document ends at its mark, and a text of two lines has no blanks that nobody wrote."""
    lines = "cat >here <<END\na\n  b\nEND\nprintf '%s' 'a\nb' >text"
    job = submit.make_job(*submit.parse(["--backend", backend, "--setup", lines, "--", "true"]))
    command, environment = script_of(backend, submit.render(in_place(job)))
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here").read_text() == "a\n  b\n" and (tmp_path / "text").read_text() == "a\nb"


@pytest.mark.parametrize(
    ("words", "commands"),
    [
        ("uv run -- python a.py", [["uv", "run", "--", "python", "a.py"]]),
        ("uv run --frozen --extra=cuda -- python a.py -- uv run -- python b.py", 2),
        ("source s.sh && uv run -- python a.py", 1),
        ("uv run python a.py --beta 0.1 -- python b.py", 2),
        ("uv run --frozen python a.py --beta 0.1 -- python b.py", 2),
        ("uv run pytest -- python b.py", 2),
        ("uv run -- a -- b", 2),
        ("pixi run -- python a.py -- echo x", 2),
    ],
)
def test_the_dashes_of_a_runner_do_not_cut_its_command_in_two(words, commands):
    _, found = submit.parse(["--backend", "local", "--", *words.split()])
    assert found == commands or len(found) == commands


def test_the_rank_of_a_runner_with_dashes_is_started_by_the_launcher():
    job = job_of("slurm", "--gpus 8", ["uv", "run", "--", "python", "grpo.py", "--beta", "0.1"])
    script = submit.render(job).files[f"{job.folder}/job.sh"]
    assert "begin_command uv run -- python scripts/launch.py" in script and "--num_processes 8" in script


@pytest.mark.integration
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["python", "grpo.py", "--learning_rte", "3"], "learning_rte"),
        (["python", "grpo.py", "--max_completion_length", "512"], "max_response_length"),
        (["source", "s.sh", "&&", "uv", "run", "python", "grpo.py", "--beta", "x"], "beta"),
        (["accelerate", "launch", "grpo.py", "--nonsense", "1"], "nonsense"),
        (["python", "ppo.py", "--num_samples_per_prompt"], "num_samples_per_prompt"),
    ],
)
def test_arguments_that_a_script_does_not_take_never_reach_a_queue(words, says, tmp_path, monkeypatch, capsys):
    for name in ("grpo.py", "ppo.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "s.sh").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        submit.main(["--backend", "slurm", "--dry_run", "--", *words])
    assert end.value.code == 2 and says in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "words",
    [
        ["python", "grpo.py", "--beta", "0.03", "--preset", "verl"],
        ["python", "grpo.py", "--help"],
        ["python", "scripts/evaluate.py", "--run", "x"],
        ["python", "/not/here.py", "--anything", "1"],
        ["bash", "-c", "cd there && python not_here.py"],
        ["git", "checkout", "x", "&&", "python", "not_here.py"],
        ["bash", "-c", "python grpo.py --nonsense"],
    ],
)
def test_what_is_right_or_cannot_be_known_is_submitted(words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert submit.main(["--backend", "slurm", "--dry_run", "--", *words]) == 0
    assert "# would run" in capsys.readouterr().out


def test_without_tyro_the_job_finds_out(monkeypatch, capsys):
    """As on a bare login node."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "script_loader", None)
    assert submit.main(["--backend", "slurm", "--dry_run", "--", "python", "grpo.py", "--nonsense", "1"]) == 0


def test_local_runs_commands_in_turn_and_stops_at_the_first_failure(tmp_path):
    done = run_local(tmp_path, "--", *count("a", 75, 2), "--", *count("b", 3, 9), "--", *count("c", 0, 1))
    assert done.returncode == 3
    assert [(tmp_path / f).read_text() for f in "ab"] == ["2", "1"] and not (tmp_path / "c").exists()
    ids = [line.split()[3].rsplit("-", 1)[1] for line in done.stdout.splitlines()]
    assert ids == ["1", "1", "2"]  # each command continues a run of its own


def test_a_restarted_script_skips_what_has_finished(tmp_path):
    """As a cluster does it: the same script again, in the same folder. A new submission starts from the beginning."""
    run_local(tmp_path, "--run_dir", "r", "--", *count("a", 0, 1), "--", *count("b", 3, 2))
    assert subprocess.run(["bash", only(tmp_path / "r", "job.sh")], cwd=tmp_path).returncode == 0
    assert [(tmp_path / f).read_text() for f in "ab"] == ["1", "2"]
    run_local(tmp_path, "--run_dir", "r", "--", *count("a", 0, 1), "--", *count("b", 3, 2))
    assert [(tmp_path / f).read_text() for f in "ab"] == ["2", "3"]


def test_the_folder_to_run_in(tmp_path):
    """--workdir for the command; the job's folder stays where it was submitted."""
    (tmp_path / "there").mkdir()
    done = run_local(tmp_path, "--workdir", str(tmp_path / "there"), "--run_dir", "r", "--", *count("n", 0, 1))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "there" / "n").exists() and only(tmp_path / "r", "exit.0").exists()
    assert run_local(tmp_path, "--gpus", "2", "--", "python", "x.py").returncode == 2  # accelerate's start is not here


STUBBORN = """
import signal, sys, time, pathlib
def save(*_):
    time.sleep(0.2); pathlib.Path("saved").write_text("yes"); sys.exit(75)
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready").write_text(""); time.sleep(60)
"""


@pytest.mark.integration
@pytest.mark.parametrize("form", ["plain", "&&", "bash -c"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_local_passes_the_request_to_stop_on_and_waits(tmp_path, sent, form):
    """The command has the time it needs to save, and is not started again: this machine was asked to stop.

    Nothing stands between the job's script and the command, with a set-up before it or inside `bash -c` neither.
    """
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    words = [sys.executable, "stubborn.py"]
    if form == "&&":
        words = ["source", "/dev/null", "&&", "env", "A=1", *words]
    elif form == "bash -c":
        words = ["bash", "-c", f"source /dev/null && {shlex.join(words)}"]
    process = subprocess.Popen([*SUBMIT, "--backend", "local", "--live", "--", *words], cwd=tmp_path)
    until((tmp_path / "ready").exists)
    process.send_signal(sent)
    assert process.wait(timeout=30) == 75
    assert (tmp_path / "saved").read_text() == "yes"


def test_local_leaves_no_process_behind(tmp_path):
    leave = "import subprocess, sys; p = subprocess.Popen(['sleep', '321']); print(p.pid)"
    pid = int(run_local(tmp_path, "--", sys.executable, "-c", leave).stdout)
    until(lambda: not alive(pid), 10)


def test_git_state_is_recorded(tmp_path):
    repository(tmp_path, file="one\n")
    run_local(tmp_path, "--run_dir", "r", "--", "true")
    record = json.loads(only(tmp_path / "r", "submit.json").read_text())
    assert record["git"] == {"commit": git.output(tmp_path, "rev-parse", "HEAD").strip(), "dirty": False}
    assert not list((tmp_path / "r").glob("*/uncommitted.patch"))
    (tmp_path / "file").write_text("two\n")
    run_local(tmp_path, "--run_dir", "r", "--", "true")
    assert "+two" in only(tmp_path / "r", "uncommitted.patch").read_text()
    assert json.loads(submit.submissions(tmp_path / "r")[-1].read_text())["git"]["dirty"] is True


def test_signals_that_were_ignored_stay_ignored(monkeypatch):
    """As SIGHUP is under nohup; the launcher and the ranks have their handlers from here."""
    before = dict.fromkeys(process.STOP_SIGNALS, signal.SIG_DFL)
    heard = []
    monkeypatch.setattr(signal, "set_wakeup_fd", lambda *_, **__: None)
    monkeypatch.setattr(signal, "signal", lambda signum, handler: heard.append(signum))
    monkeypatch.setattr(signal, "getsignal", {**before, signal.SIGHUP: signal.SIG_IGN}.get)
    process.read_signals(lambda pipe, keep: None)
    assert set(heard) == set(before) - {signal.SIGHUP} and signal.SIGTERM in heard


@pytest.mark.slow
def test_a_port_in_use_is_said(tmp_path, request):
    """By node 0, with what to do about it. Node 1, to which another program answers, says so and ends when asked."""
    (tmp_path / "rank.py").write_text("print('rank started')\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        line = [sys.executable, "scripts/launch.py", "--config_file", "scripts/zero2.yaml", "--num_processes", "2"]
        line += ["--main_process_port", port]
        place = ["--num_machines", "2", "--main_process_ip", "127.0.0.1", "--machine_rank"]
        rank = str(tmp_path / "rank.py")
        options = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        second = subprocess.Popen([*line, *place, "1", rank], **options)
        request.addfinalizer(second.kill)
        for more, remedy in ({}, "choose another"), ({"RUN_ID": "a-1"}, "submit it again under another --name"):
            done = subprocess.run([*line, *place, "0", rank], env=os.environ | more, timeout=120, **options)
            said = f"error: --main_process_port {port}: another process on {platform.node()} uses this port; {remedy}"
            assert done.returncode == 2 and said in done.stdout and "Traceback" not in done.stdout, done.stdout
        said = ""
        while "has waited" not in said:
            said = second.stdout.readline()
            assert said, "it has ended"
        second.stdout.close()  # a launcher whose console has gone obeys as well
        second.terminate()
        assert second.wait(timeout=5) == 75 and f"node 0 at 127.0.0.1:{port} (a process answers there" in said
        done = subprocess.run([*line, rank], timeout=120, **options)  # on one node accelerate takes another port
        assert done.returncode == 0 and done.stdout.count("rank started") == 2, done.stdout

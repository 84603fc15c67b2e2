"""The sweep scripts: the commands they make and what they skip. And scripts/launch.py with real ranks."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import is_finished as finished_program
import pytest
import script_loader
from helpers import ROOT, change_config, clean_environment, command, main_here, run_here, tiny_args, until
from is_finished import LEAVE, RUN, state
from submitted_jobs import job_of, script_of, submit

import grpo
from runtime.arguments import checks, flags
from runtime.run import directory, identity
from runtime.training import model_files

SWEEPS = sorted(path for path in (ROOT / "scripts" / "sweeps").glob("*.sh") if path.name != "common.sh")
SMALL = {"ESTIMATORS": "k1 k3", "BETAS": "0 0.1", "LEARNING_RATES": "1e-5 1e-4", "PROMPTS": "4 8", "GROUPS_OF": "4"}


def called(name: str, words: tuple, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """A sweep's script in another folder, to its end."""
    argv = ["bash", str(ROOT / "scripts" / "sweeps" / name), *map(str, words)]
    return subprocess.run(argv, env=os.environ | environment, capture_output=True, text=True, cwd="/")


def sweep(name: str, *words, **environment) -> tuple[int, list[list[str]], str]:
    """(exit code, the commands that RUN=echo shows, what else was said)."""
    done = called(name, words, {"RUN": "echo", "PYTHON": sys.executable} | SMALL | environment)
    lines = done.stdout.splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith(sys.executable)]
    return done.returncode, commands, "\n".join(x for x in lines if not x.startswith(sys.executable)) + done.stderr


def many_lines(name: str, *words: object, **environment: str) -> tuple[list[str], list[list[str]]]:
    """(what was said, the words of each line) of a sweep that prints its runs as lines of arguments."""
    done = called(name, words, {"RUN": "lines"} | environment)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    runs = [shlex.split(line) for line in lines if "--seed" in line]
    return [line for line in lines if "--seed" not in line], runs


def test_bash_can_read_them():
    assert len(SWEEPS) == 3
    for path in (ROOT / "scripts").rglob("*.sh"):
        assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize("name, a_seed", [("kl.sh", 5), ("batch.sh", 4), ("lr.sh", 2)])
def test_every_line_is_a_run_of_its_own(name, a_seed, tmp_path):
    """Right numbers of commands, arguments that grpo.py accepts, and no two runs in one folder."""
    _, lines = many_lines(name, "--seeds", "2..3", "--output_dir", tmp_path, **SMALL)
    assert len(lines) == 2 * a_seed
    names = set()
    for words in lines:
        args = flags.parse(grpo.Args, None, words)
        checks.check(args, 1)
        model_files.check_model(args)
        checks.check_training(args)
        grpo.check_args(args)
        assert args.output_dir == str(tmp_path) and args.seed in (2, 3)
        names.add(directory.run_name(args, grpo.Args()))
    assert len(names) == len(lines)


def test_the_whole_grid_of_the_kl_sweep(tmp_path):
    """4 estimators x 2 placements x 3 betas, and once without a KL term, which is measured all the same."""
    _, lines = many_lines("kl.sh", "--seeds", "1", "--output_dir", tmp_path)
    assert len(lines) == 4 * 2 * 3 + 1
    plain = [words for words in lines if "--beta" not in words]
    assert ["--load_ref_policy" in words for words in plain] == [True], "the baseline would have no KL to compare"
    for words in lines:
        if "reward" in words:
            assert words[words.index("--kl_reward_estimator") + 1] in ("k1", "k2", "k3", "k4")


@pytest.mark.parametrize("seeds, found", [("1..3", [1, 2, 3]), ("4", [4]), ("3,1", [3, 1]), (None, [1, 2, 3])])
def test_seeds(seeds, found):
    words = [] if seeds is None else ["--seeds", seeds]
    _, lines = many_lines("lr.sh", *words, LEARNING_RATES="1e-5")
    assert [int(line[line.index("--seed") + 1]) for line in lines] == found


@pytest.mark.parametrize(
    "words, says",
    [
        (["--seeds", "3..1"], "--seeds 3..1: write 1..5"),
        (["--seeds"], "--seeds : write"),
        (["--nonsense", "1"], "nonsense"),
        (["--run_name", "one"], "--run_name: a sweep's runs have names of their own"),
        (["--run-name=one"], "--run-name=one: a sweep's runs have names of their own"),
    ],
)
def test_bad_arguments_end_the_sweep(words, says):
    code, commands, said = sweep("lr.sh", *words)
    assert code == 2 and commands == [] and says in said


@pytest.mark.integration
def test_a_failing_run_does_not_hold_up_the_others(tmp_path):
    code, _, said = sweep("lr.sh", "--seeds", "1", "--output_dir", tmp_path, RUN="false")
    assert code == 1 and "0 started, 0 skipped, 2 failed" in said


def test_what_says_whether_a_run_is_finished_may_fail(tmp_path):
    """Without tyro, say: the sweep ends, and does not take every run for one that was never begun."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    code, _, said = sweep("lr.sh", "--seeds", "1", "--output_dir", tmp_path, PYTHON=str(python))
    assert code == 1 and "started" not in said


def test_where_the_runs_lie(tmp_path):
    """Said in every command: a submitted one would otherwise take its job's folder."""
    lanes = {"LEARNING_RATES": "1e-5"}
    for words, environment, expected in (
        ([], {}, "runs"),
        ([], {"OUTPUT_DIR": str(tmp_path)}, str(tmp_path)),
        (["--output_dir", "here"], {}, "here"),
    ):
        _, (command,) = many_lines("lr.sh", "--seeds", "91", *words, **lanes, **environment)
        assert command.count("--output_dir") == 1 and command[command.index("--output_dir") + 1] == expected
    for words in (["--output_dir=here"], ["--output-dir", "here"], ["--output-dir=here"]):
        _, (command,) = many_lines("lr.sh", "--seeds", "91", *words, **lanes)
        assert command.count("--output_dir") == words.count("--output_dir")


# ------------------------------------------------------------------------------------------------------ what is skipped


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder of a run that a sweep's command made, and the words that every command of the sweep has."""
    out = tmp_path_factory.mktemp("sweep")
    words = {"learning_rate": 1e-5, "exp_name": "sweep_lr", "seed": 1}
    args = tiny_args(tiny, out, eval_prompts=4, **words)
    run_here(args)
    same = {k: v for k, v in dataclasses.asdict(args).items() if v != getattr(grpo.Args(), k) and k not in words}
    common = [w for k, v in same.items() for w in ([f"--no-{k}"] if v is False else [f"--{k}", str(v)])]
    return out / directory.run_name(args, grpo.Args()), common


@pytest.mark.integration
def test_a_finished_run_is_skipped(finished, tmp_path):
    folder, common = finished
    code, commands, said = sweep("lr.sh", "--seeds", "1", *common)
    assert code == 0 and f"skipped, finished: {folder}" in said
    assert [c[c.index("--learning_rate") + 1] for c in commands] == ["1e-4"]


def without_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def half_a_line(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


@pytest.mark.integration
@pytest.mark.parametrize(
    "spoil, says",
    [
        (lambda f: shutil.rmtree(f / "model"), "has not saved its model"),
        (lambda f: (f / "model" / "model.safetensors").unlink(), "has not saved its model"),
        (lambda f: without_last_line(f / "eval.jsonl"), "has not evaluated its last step"),
        (lambda f: half_a_line(f / "eval.jsonl"), "has not evaluated its last step"),
        (lambda f: without_last_line(f / "metrics.jsonl"), "is at step 1 of 2"),
        (lambda f: (f / "metrics.jsonl").unlink(), "is at step 0 of 2"),
    ],
)
def test_an_unfinished_run_goes_on(finished, tmp_path, spoil, says):
    """By any one of what the end of a run writes; but not while a process writes to it."""
    folder, common = finished
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    spoil(copy)
    code, said, _ = finished_here(folder, tmp_path, common)
    assert code == RUN and said.startswith("begun: ") and says in said
    with open(copy / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, said, _ = finished_here(folder, tmp_path, common)
    assert code == LEAVE and said.startswith("running: ") and says in said


@pytest.mark.integration
def test_a_run_of_adapters_is_finished(finished, tmp_path):
    """variants/lora.patch saves them in peft's format, with a config of another name."""
    folder, common = finished
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    (copy / "model" / "config.json").rename(copy / "model" / "adapter_config.json")
    assert finished_here(folder, tmp_path, common)[1].startswith("finished: ")


def finished_here(folder: Path, place: Path, common: list[str]) -> tuple[int, str, str]:
    """Run scripts/is_finished.py in this process on the copy of a run in a different folder."""
    common = [str(place) if word == str(folder.parent) else word for word in common]
    run = ["--exp_name", "sweep_lr", "--learning_rate", "1e-5", "--seed", "1"]
    return main_here(finished_program, ROOT / "grpo.py", *run, *common)


@pytest.mark.parametrize("config", ["", '{"args": null}', "[]"])
def test_a_damaged_run_is_left_alone(finished, tmp_path, config):
    """A config.json that a full disk or a hand has spoiled."""
    folder, common = finished
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    (copy / "config.json").write_text(config)
    code, said, _ = finished_here(folder, tmp_path, common)
    assert code == LEAVE and f"damaged: {copy}/config.json cannot be read" in said


@pytest.mark.integration
def test_a_copy_of_the_script_is_another_script(finished, tmp_path):
    """Copied and edited, in any folder: its runs have names of their own and are not taken for those of grpo.py."""
    folder, common = finished
    copy = tmp_path / "mine.py"
    copy.write_text((ROOT / "grpo.py").read_text())
    words = ["lr.sh", "--seeds", "1", *common]
    code, commands, said = sweep(*words, LEARNING_RATES="1e-5", SCRIPT=str(copy))
    assert code == 0, said
    assert [(c[1], c[c.index("--exp_name") + 1]) for c in commands] == [(str(copy), "sweep_lr_mine")]
    kind = script_loader.load_arguments(copy).Args
    renamed = folder.parent / directory.run_name(flags.parse(kind, None, commands[0][2:]), kind())
    change_config(shutil.copytree(folder, renamed), exp_name="sweep_lr_mine")
    code, commands, said = sweep(*words, LEARNING_RATES="1e-5", SCRIPT=str(copy))
    shutil.rmtree(renamed)
    assert code == 0 and commands == [] and f"skipped, changed: {renamed} was made by other code" in said


@pytest.mark.integration
@pytest.mark.parametrize("text, says", [(None, "no such file"), ("x = 1\n", "has no dataclass Args")])
def test_what_is_no_training_script_is_refused(text, says, tmp_path):
    if text is not None:
        (tmp_path / "other.py").write_text(text)
    code, commands, said = sweep("lr.sh", "--seeds", "1", SCRIPT=str(tmp_path / "other.py"))
    assert code == 2 and commands == [] and says in said


@pytest.mark.integration
def test_a_run_of_other_arguments_is_not_this_one(finished, tmp_path):
    """A folder whose config.json says something else than its name."""
    folder, common = finished
    change_config(shutil.copytree(folder, tmp_path / folder.name), temperature=0.5)
    common = [str(tmp_path) if w == str(folder.parent) else w for w in common]
    _, commands, said = sweep("lr.sh", "--seeds", "1", *common, LEARNING_RATES="1e-5")
    assert commands == [] and "another run" in said and "--temperature 0.5 there, 1.0 here" in said
    _, commands, said = sweep("lr.sh", "--seeds", "1", *common, "--overwrite", LEARNING_RATES="1e-5")
    assert len(commands) == 1 and commands[0][-1] == "--overwrite"


# ----------------------------------------------------------------------------------------- side by side, in one process


@pytest.mark.integration
def test_the_lines_of_a_sweep_are_its_runs(tmp_path):
    """The same runs as one after the other, also with arguments that a shell has to quote."""
    words = ["--seeds", "2", "--output_dir", tmp_path]
    few = {"ESTIMATORS": "k3"}
    _, commands, _ = sweep("kl.sh", *words, **few)
    said, lines = many_lines("kl.sh", *words, "--stop_strings", "it's", "$x y", "a\tb", **SMALL | few)
    runs = [flags.parse(grpo.Args, None, line) for line in lines]
    assert said == [] and {run.stop_strings for run in runs} == {("it's", "$x y", "a\tb")}
    runs = [dataclasses.replace(run, stop_strings=()) for run in runs]
    assert runs == [flags.parse(grpo.Args, None, command[2:]) for command in commands] and len(runs) == 3


@pytest.mark.integration
def test_a_sweep_as_an_array_is_one_submission(finished):
    """Of the runs that are to be run, by RUN or by Slurm's line; what is finished is not in it."""
    _, common = finished
    run = f"{sys.executable} {ROOT}/scripts/submit.py --backend slurm --gpus 2 --dry_run --"
    few = {"LEARNING_RATES": "1e-5 1e-4 3e-4", "ARRAY": "8"}
    code, _, said = sweep("lr.sh", "--seeds", "1", *common, RUN=run, **few)
    assert code == 0 and "skipped, finished" in said and "2 would be started, 1 skipped, 0 failed" in said, said
    assert said.count("# would run sbatch ") == 1 and "--array=0-1%8" in said and "--gpus-per-node=2" in said


def test_a_run_that_another_process_holds_is_skipped(tmp_path):
    """The loser of two sweeps at once: code 73 of a run, or of a submission that waits already."""
    (tmp_path / "held").write_text("#!/bin/sh\nexit 73\n")
    (tmp_path / "held").chmod(0o755)
    code, _, said = sweep("lr.sh", "--seeds", "1", "--output_dir", tmp_path, RUN=str(tmp_path / "held"))
    assert code == 0 and "0 started, 2 skipped, 0 failed" in said


def test_a_line_break_is_no_argument_of_a_line():
    """run_many.py reads a run per line: half of an argument would be a run, the other half another."""
    done = called("lr.sh", ("--system_prompt", "one\ntwo"), {"RUN": "lines"})
    assert done.returncode == 2 and "take the line break out" in done.stderr and done.stdout == ""


# --------------------------------------------------------------------------------------- scripts/launch.py, real ranks

RANK = """
import os, pathlib, signal, sys, time
import torch.distributed as dist
out, code = pathlib.Path(sys.argv[1]), int(sys.argv[2])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
seen = [None] * world
dist.all_gather_object(seen, (rank, os.environ["LOCAL_RANK"]))
(out / f"rank{rank}").write_text(repr(seen))
deadline = time.time() + 60
while not stop and time.time() < deadline:
    time.sleep(0.1)
if stop: time.sleep(1)
(out / f"stop{rank}").write_text(str(len(stop)))
dist.barrier()
os._exit(code)
"""


@pytest.mark.parametrize("ends, code", [("raise SystemExit(75)", 75), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_the_exit_code_of_one_process_arrives(tmp_path, ends, code):
    """accelerate starts one process without torchrun, and raises for any exit code but 0."""
    (tmp_path / "script.py").write_text(ends)
    line = [sys.executable, ROOT / "scripts" / "launch.py", "--num_processes", "1", tmp_path / "script.py"]
    done = subprocess.run(line, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
def test_two_nodes_of_two_ranks_find_each_other_and_stop(tmp_path):
    """The script of SkyPilot, its place in the environment: four ranks, one group; each gets one SIGTERM, and the time
    it needs; the script of each node ends with their code.
    """
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    job = job_of("skypilot", "--num_nodes 2 --gpus H100:2", [sys.executable, "rank.py", str(tmp_path), "75"])
    command, _ = script_of("skypilot", submit.render(job))
    nodes = []
    for rank in ("0", "1"):
        env = clean_environment() | {"SKYPILOT_NODE_RANK": rank, "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1\n"}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        nodes.append(subprocess.Popen(command, cwd=tmp_path, env=env, **options))
    files = [tmp_path / f"rank{rank}" for rank in range(4)]
    until(lambda: all(file.exists() for file in files), 150)
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    output = [node.communicate(timeout=60)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [75, 75], output
    assert [file.read_text() for file in files] == ["[(0, '0'), (1, '1'), (2, '0'), (3, '1')]"] * 4
    assert [(tmp_path / f"stop{rank}").read_text() for rank in range(4)] == ["1"] * 4


@pytest.mark.slow
def test_a_submission_with_set_up_and_a_prefix_trains_on_two_ranks(tiny, tmp_path):
    """``source FILE && env A=1 python grpo.py``, the form of open-instruct's submissions, on this machine."""
    (tmp_path / "setup.sh").write_text("export OMP_NUM_THREADS=1\n")
    program = command(tiny, tmp_path / "out", "--total_steps", "1")
    submit = [sys.executable, "scripts/submit.py", "--backend", "local", "--gpus", "2", "--run_dir", tmp_path / "job"]
    line = [*submit, "--", "source", tmp_path / "setup.sh", "&&", "env", "A=1", *program]
    env = clean_environment()
    done = subprocess.run([str(w) for w in line], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "out" / "run"
    assert json.loads((run / "config.json").read_text())["world_size"] == 2
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    assert len(list((tmp_path / "job").glob("*/finished.*"))) == 1


# ------------------------------------------------------------------------------------------------------------- secrets


def test_a_secret_is_compared_and_named_as_the_run_hid_it(tmp_path):
    """config.json has *** in its place: a sweep would skip such runs for ever, and print the secret."""
    flag = '    judge_api_key: str | None = None\n    """Key of a judge."""\n'
    text = (
        (ROOT / "grpo.py").read_text().replace("class Args(flags.RunFlags):\n", f"class Args(flags.RunFlags):\n{flag}")
    )
    (tmp_path / "judged.py").write_text(text)
    kind = script_loader.load_arguments(tmp_path / "judged.py").Args
    secret = "my-secret-key-12345"
    args = kind(judge_api_key=secret, output_dir=str(tmp_path), run_name="run")
    (tmp_path / "run").mkdir()
    config = {"args": identity.recorded(args), "code": identity.code_of(args), "problems": 9}
    assert secret not in json.dumps(config)
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert state(args, kind())[0] == RUN
    code, said = state(dataclasses.replace(args, temperature=0.5), kind())
    assert code == LEAVE and "--temperature 1.0 there, 0.5 here" in said and secret not in said

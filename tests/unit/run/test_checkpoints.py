"""Checkpoints: a resumed run equals the uninterrupted one, whatever stopped it, and no damage goes unseen."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from deepspeed import DeepSpeedEngine
from helpers import (
    DAMAGE,
    ROOT,
    SMALL,
    copy_of,
    engine_file,
    flip,
    folder_of,
    interrupted,
    read_jsonl,
    record,
    refusal,
    rejected,
    run_here,
    tiny_args,
)

import grpo
from runtime.arguments import checks
from runtime.run import checkpoints, directory, logger
from runtime.system import process
from runtime.training import deepspeed_zero

KL = {"beta": 0.1, "kl_target": (0.01, 100.0), "ref_policy_update": (1, 1.0)}
BF16 = {"dtype": "bfloat16", "max_logprob_diff": 0.0, "learning_rate": 1e-5}
PPO = {"value_norm": "running", "dataset_filter": (0.5, 0.3)}


@pytest.mark.parametrize(
    "script, changes",
    [
        ("grpo", KL | {"kl_placement": "both", "ref_policy_update": (1, 0.5)}),
        pytest.param("grpo", {"zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param("grpo", {"offload": ("optimizer",)}, marks=pytest.mark.slow),
        pytest.param("grpo", BF16, marks=pytest.mark.slow),  # masters hold more than the weights, which rarely change
        ("ppo", PPO | {"dataset": "reasoning_gym:chain_sum?size=12"}),
        pytest.param("ppo", KL | {"value_norm": "exp", "critic_warmup": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_resumed_run_equals_the_straight_one(tiny, tmp_path, monkeypatch, capsys, script, changes):
    """Stopped after two of four steps, started again: the same numbers, samples and weights, bit for bit.

    Numbers drawn from the global generators are those that would have come. transformers' generate seeds torch before
    every answer; Python's and NumPy's are nobody's but ours here. The wall clock of the second part is behind.
    """
    drawn: dict[str, list] = {"straight": [], "parts": []}
    plain = logger.RunLog.step

    def spy(self, *rest):
        plain(self, *rest)
        numbers = [random.random(), numpy.random.random(), torch.rand(1).item()]  # noqa: NPY002
        drawn[self.folder.parent.name].append(numbers)

    monkeypatch.setattr(logger.RunLog, "step", spy)
    straight = tiny_args(tiny, tmp_path / "straight", script, **{**SMALL, **changes})
    run_here(straight, script)
    parts = tiny_args(tiny, tmp_path / "parts", script, **{**SMALL, **changes})
    folder = interrupted(parts, monkeypatch, after=2, script=script)
    assert len(read_jsonl(folder / "metrics.jsonl")) == 2 and not (folder / "model").exists()
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 5 * 3600)
    run_here(parts, script)
    assert "resuming after step 2" in capsys.readouterr().out
    expected, got = record(folder_of(straight, script)), record(folder)
    for key in expected:
        assert got[key] == expected[key], key
    moved = [m["optim/grad_norm"] for m in expected["metrics"] if "optim/grad_norm" in m]
    assert len(set(moved)) > 1, "nothing was learned, so nothing could be lost"
    assert drawn["parts"] == drawn["straight"] and len(drawn["parts"]) == 4


@pytest.mark.parametrize(
    "script, changes, masters",
    [
        pytest.param("grpo", {}, [True], marks=pytest.mark.slow),
        pytest.param("ppo", {"zero_stage": 1}, [True, True], marks=pytest.mark.slow),
        pytest.param("grpo", {"dtype": "bfloat16"}, [False], marks=pytest.mark.slow),
    ],
)
def test_fp32_weights_are_their_own_masters(tiny, tmp_path, monkeypatch, script, changes, masters):
    """DeepSpeed's second copy is gone; numbers, samples, weights and the files of a checkpoint are as with it."""
    dedupe = deepspeed_zero.dedupe_fp32_weights
    shared = []

    def look(engine):
        zero = dedupe(engine).optimizer
        shared.append(zero.single_partition_of_fp32_groups[0].data_ptr() == zero.bit16_groups_flat[0].data_ptr())
        return engine

    found = {}
    for name, prepare in (("deduped", look), ("complete", lambda engine: engine)):
        monkeypatch.setattr(deepspeed_zero, "dedupe_fp32_weights", prepare)
        changes = {**SMALL, "save_every": 2, "max_logprob_diff": 0.0, "micro_batch_tokens": 136, **changes}
        args = tiny_args(tiny, tmp_path / name, script, **changes)
        run_here(args, script)
        folder = folder_of(args, script)
        newest = max((folder / "checkpoints").glob("step_*"))
        sizes = {str(path.relative_to(newest)): path.stat().st_size for path in newest.rglob("*.pt")}
        found[name] = record(folder), sizes
    assert found["deduped"] == found["complete"]
    assert any("optim_states" in file for file in found["deduped"][1])
    assert shared == masters


def test_torch_is_seeded_by_the_step_where_no_other_thread_seeds_it():
    """transformers' generate, which is beside the trainer with --async_steps, does."""
    drawn = {}
    for rollout in ("vllm", "hf"):
        for step in (1, 2, 1):
            checkpoints.seed_generators(SimpleNamespace(seed=3, rollout=rollout), 0, step)
            drawn.setdefault((rollout, step), []).append(torch.rand(1).item())
    assert len({*drawn["vllm", 1], *drawn["vllm", 2]}) == 2
    assert len({*drawn["hf", 1], *drawn["hf", 2]}) == 3


# ------------------------------------------------------------------------------------------------ damaged checkpoints


@pytest.mark.integration
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_seen_and_passed_over(stopped, tmp_path, capsys, name):
    """The checkpoint before is taken, with the reason; for two kinds of damage the run then goes to its end."""
    damage, words = DAMAGE[name]
    args = copy_of(stopped, tmp_path)
    folder = folder_of(args)
    damage(folder / "checkpoints" / "step_000003")
    if name in ("a flipped bit", "an unfinished save"):
        run_here(args)
        said = capsys.readouterr().out
        assert [m["step"] for m in read_jsonl(folder / "metrics.jsonl")] == [1, 2, 3, 4]
        left = {p.name for p in (folder / "checkpoints").iterdir()}
        assert left - {"step_000003.aside"} == {f"step_00000{k}" for k in (2, 3, 4)}
    else:
        _, start = directory.open_run(args, grpo.Args())
        said = capsys.readouterr().out
        assert start.name == "step_000002"
    assert words in said and "resuming after step 2" in said


def test_nothing_is_thrown_away_when_no_checkpoint_is_whole(stopped, tmp_path, capsys):
    args = copy_of(stopped, tmp_path)
    for checkpoint in (folder_of(args) / "checkpoints").glob("step_*"):
        flip(engine_file(checkpoint))
    message = refusal(args, capsys)
    assert "no checkpoint is intact" in message and "--overwrite" in message
    assert len(read_jsonl(folder_of(args) / "metrics.jsonl")) == 3


def test_without_any_checkpoint(stopped, tmp_path, capsys):
    """Killed before the first save: a new start, unless saving was off or it has ended; its steps are all there is.

    A trial that has ended is replaced if it took less than --save_minutes, which a run that is killed loses as well.
    """
    args = copy_of(stopped, tmp_path)
    shutil.rmtree(folder_of(args) / "checkpoints")
    assert directory.open_run(args, grpo.Args())[1] is None
    assert "has 3 steps and no checkpoint" in capsys.readouterr().out
    off = dataclasses.replace(args, save_every=0, save_minutes=0.0)
    (folder_of(args) / "model").mkdir()
    assert directory.open_run(dataclasses.replace(args, total_steps=6, save_minutes=30.0), grpo.Args())[1] is None
    ended = dataclasses.replace(args, total_steps=6, save_minutes=0.001)
    for kept in (ended, off):
        message = refusal(kept, capsys)
        assert "holds 3 steps of this run and no checkpoint" in message and "--overwrite" in message
        shutil.rmtree(folder_of(args) / "model", ignore_errors=True)


@pytest.mark.integration
def test_other_problems_than_before(tiny, tmp_path, monkeypatch, capsys):
    """A line more in the file, and other rows are held out: nothing goes on, and nothing is lost."""
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(40)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = tiny_args(tiny, tmp_path / "runs", dataset=str(file), **SMALL)
    folder = interrupted(args, monkeypatch, after=2)
    with open(file, "a") as f:
        f.write(json.dumps({"question": "40 + 1 =", "answer": "41"}) + "\n")
    with pytest.raises(SystemExit) as end:
        run_here(args)
    assert end.value.code == 2 and "--dataset" in capsys.readouterr().err
    assert len(read_jsonl(folder / "metrics.jsonl")) == 2
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_here(args)
    assert len(read_jsonl(folder / "metrics.jsonl")) == 4


def test_changed_arguments(stopped, tmp_path, capsys):
    args = copy_of(stopped, tmp_path, total_steps=6, log_samples=2)
    _, start = directory.open_run(args, grpo.Args())
    said = capsys.readouterr().out
    assert start.name == "step_000003" and "changed: --total_steps 4 there, 6 here" in said and "--log_samples" in said
    args.beta = 0.5
    assert "--beta 0.0 there, 0.5 here" in refusal(args, capsys)


def test_a_torn_config(stopped, tmp_path, capsys):
    """The checkpoints of a run are not lost with its config.json, and without them nothing is touched."""
    args = copy_of(stopped, tmp_path)
    folder = folder_of(args)
    (folder / "config.json").write_text("")
    assert "config.json cannot be read" in refusal(args, capsys)
    (folder / "config.json").unlink()
    assert directory.open_run(args, grpo.Args())[1].name == "step_000003"
    shutil.rmtree(folder / "checkpoints")
    assert "it has no config.json" in refusal(args, capsys)


def test_resume_never_and_paths(stopped, tmp_path, capsys):
    args = copy_of(stopped, tmp_path, resume="never")
    assert "already contains this run" in refusal(args, capsys)
    args.resume = str(tmp_path / "nothing")
    assert "no such folder" in refusal(args, capsys)
    checkpoints = folder_of(args) / "checkpoints"
    args.resume = str(checkpoints / "step_000002")
    run_here(args)
    said = capsys.readouterr().out
    assert "resuming after step 2" in said and "step_000003.aside" in said
    assert [m["step"] for m in read_jsonl(folder_of(args) / "metrics.jsonl")] == [1, 2, 3, 4]


HOLDS = """
import sys, time
from pathlib import Path
from runtime.system import process

lock = process.lock_folder(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_the_lock_of_a_folder_ends_with_its_process(tmp_path, capsys):
    """It names its holder, rejects a second one, and is free as soon as the process was killed."""
    line = [sys.executable, "-c", HOLDS, str(tmp_path)]
    holder = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert holder.stdout.readline() == "held\n"
        assert process.lock_holder(tmp_path).startswith(f"process {holder.pid} on ")
        with pytest.raises(SystemExit) as end:
            process.lock_folder(tmp_path)
        assert end.value.code == process.HELD
        assert f"is in use by a running process (process {holder.pid} on " in capsys.readouterr().err
    finally:
        holder.kill()
        holder.wait()
    assert process.lock_holder(tmp_path) == ""
    mine = process.lock_folder(tmp_path)
    assert process.lock_holder(tmp_path).startswith(f"process {os.getpid()} on ")
    mine.release()


@pytest.mark.integration
def test_alone_waits_and_says_so(tmp_path, capsys):
    """Two threads as two processes: the second waits for the first, and names the lock."""
    order = []

    def second():
        with process.alone(tmp_path / "lock", "preparing"):
            order.append("second")

    with process.alone(tmp_path / "lock", "preparing"):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(2.3)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert f"preparing: waiting for the process that holds {tmp_path / 'lock'}" in capsys.readouterr().out


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Otherwise a machine that loses its power may have the new name, and nothing in the file."""
    file = tmp_path / "config.json"
    file.write_text("old")
    on_disk = {}
    rename = os.replace

    def sync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        on_disk[path.stat().st_ino] = path.read_text()

    def replace(source, target):
        assert on_disk[os.stat(source).st_ino] == "new" and file.read_text() == "old"
        rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    process.write_whole(file, "new")
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_a_finished_run_says_so(stopped, tmp_path, capsys):
    args = copy_of(stopped, tmp_path)
    run_here(args)
    before = record(folder_of(args))
    with pytest.raises(SystemExit) as end:
        run_here(args)
    assert end.value.code == 0 and "is finished; --overwrite" in capsys.readouterr().out
    assert record(folder_of(args)) == before


def test_a_run_that_reaches_its_goal_is_finished(tiny, tmp_path, capsys):
    """--stop_at ends it after that evaluation, with its model and verdict; without the goal it goes on to the end."""
    goal = {"stop_at": "eval/pass@1=0", "eval_every": (2, 2), "total_steps": 4, "save_every": 1}
    args = tiny_args(tiny, tmp_path, **{**SMALL, **goal})
    assert [m["step"] for m in run_here(args)] == [1, 2]
    folder = folder_of(args)
    assert [m["step"] for m in read_jsonl(folder / "eval.jsonl")] == [2], "none before training, from step 2 on"
    assert "has reached --stop_at 0" in capsys.readouterr().out
    assert directory.unfinished(folder, args) == "" and (folder / "verdict.json").is_file()
    with pytest.raises(SystemExit) as end:
        run_here(args)
    assert end.value.code == 0 and "is finished; --overwrite" in capsys.readouterr().out
    longer = dataclasses.replace(args, stop_at="eval/pass@1=1.5")
    assert directory.unfinished(folder, longer) == "is at step 2 of 4"
    assert [m["step"] for m in run_here(longer)] == [1, 2, 3, 4]
    assert [m["step"] for m in read_jsonl(folder / "eval.jsonl")] == [2, 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stop_at": "eval/pass@9=0.8", "eval_every": 1}, "--stop_at eval/pass@9=0.8: pass NAME=NUMBER with a NAME of"),
        ({"stop_at": "eval/pass@1=high", "eval_every": 1}, "--stop_at eval/pass@1=high: pass NAME=NUMBER"),
        ({"stop_at": "eval/pass@1=0.8"}, "--stop_at eval/pass@1=0.8 has no effect without evaluations"),
        ({"eval_every": (-1, 1)}, "--eval_every (-1, 1): N and FIRST must be 0 or more"),
    ],
)
def test_a_goal_that_no_evaluation_can_reach_is_rejected(changes, words, capsys):
    assert words in rejected(capsys, checks.check_training, grpo.Args(**changes))


def test_lines_of_steps_that_are_done_again_go(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "rew')
    directory.cut_back(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_lines_that_are_no_json_stay(tmp_path):
    """A resume leaves the lines of earlier steps alone, whoever has spoiled them; half a line is none."""
    file = tmp_path / "samples.jsonl"
    whole = ['{"step": 1}\n', '{"step": 2, "response": "a"b"}\n', '{"step": 3, "response": "c"d"}\n', '{"step": 2}\n']
    file.write_bytes(
        "".join(["[1]\n", "7\n", "{}\n", "\n", *whole, '{"step": 2, "response": "']).encode() + b"\xe5\x90"
    )
    assert directory.last_step(file) == 2
    directory.cut_back(file, 2)
    assert file.read_text() == whole[0] + whole[1] + whole[3]


# ------------------------------------------------------------------------------------------- keeping, saving, disk full


@pytest.mark.integration
def test_which_checkpoints_stay(tiny, tmp_path, monkeypatch):
    """The newest two and the best, found before or after a resume: pass@1 is set from here, the rest runs as it is."""
    scores, plain = {0: 0.0, 1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: 0.4, 6: 0.5}, logger.RunLog.evaluation
    monkeypatch.setattr(
        logger.RunLog, "evaluation", lambda self, r, *more: plain(self, r | {"eval/pass@1": scores[r["step"]]}, *more)
    )
    args = tiny_args(tiny, tmp_path, **{**SMALL, "total_steps": 6, "save_every": 1, "eval_every": 1})
    interrupted(args, monkeypatch, after=4)
    run_here(args)
    steps = [step for step, _ in directory.saved_steps(folder_of(args))]
    assert steps == [2, 5, 6]
    scripts = list((folder_of(args) / "checkpoints").rglob("*.py"))
    assert not scripts, "DeepSpeed's, which makes of a checkpoint what model/ is already"
    run_here(tiny_args(tiny, tmp_path / "all", **{**SMALL, "save_every": 1, "keep_checkpoints": 0}))
    assert len(directory.saved_steps(folder_of(tiny_args(tiny, tmp_path / "all", **SMALL)))) == 4


@pytest.mark.integration
def test_save_minutes(tiny, tmp_path):
    """A run with the default, half an hour, saves none: below."""
    args = tiny_args(tiny, tmp_path, **SMALL, save_minutes=1e-6)
    run_here(args)
    assert [step for step, _ in directory.saved_steps(folder_of(args))] == [2, 3, 4], (
        "after every step; the one with an evaluation stays"
    )


@pytest.mark.integration
def test_a_signal_while_the_last_step_is_saved(tiny, tmp_path, monkeypatch):
    """It was told of a checkpoint and exit code 75, and so it is."""
    plain = checkpoints.Checkpoints.save

    def save(self, step):
        process.StopRequest.asked = True
        return plain(self, step)

    monkeypatch.setattr(checkpoints.Checkpoints, "save", save)
    args = tiny_args(tiny, tmp_path, **SMALL, save_every=4)
    with pytest.raises(SystemExit) as end:
        run_here(args)
    assert end.value.code == 75 and not (folder_of(args) / "model").exists()
    assert [step for step, _ in directory.saved_steps(folder_of(args))] == [4]


@pytest.fixture
def saves(monkeypatch) -> list[bool]:
    """Record for each checkpoint of a run if it was written."""
    found, plain = [], checkpoints.Checkpoints.save
    monkeypatch.setattr(
        checkpoints.Checkpoints, "save", lambda self, step: found.append(plain(self, step)) or found[-1]
    )
    return found


@pytest.mark.integration
def test_too_little_room_costs_the_checkpoint_and_not_the_run(tiny, tmp_path, monkeypatch, capsys, saves):
    plain = shutil.disk_usage
    less = lambda path: plain(path)._replace(free=1000)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (less if Path(path).name == "checkpoints" else plain)(path))
    args = tiny_args(tiny, tmp_path, **SMALL, save_every=2)
    assert len(run_here(args)) == 4
    said = capsys.readouterr().out
    assert "NO CHECKPOINT after step 2" in said and "GiB free" in said and "needed" in said
    assert directory.saved_steps(folder_of(args)) == [] and saves == [False, False]


@pytest.mark.integration
def test_a_disk_that_fills_up_while_saving(tiny, tmp_path, capsys, saves, monkeypatch):
    """The kernel rejects files above a size, as on a full disk: the old checkpoint stays, the run goes on."""
    args = tiny_args(tiny, tmp_path, **{**SMALL, "total_steps": 3, "save_every": 1})
    plain, limits = logger.RunLog.step, resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, metrics, *rest):
        plain(self, metrics, *rest)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000 if metrics["step"] == 2 else limits[0], limits[1]))

    monkeypatch.setattr(logger.RunLog, "step", fill)
    try:
        run_here(args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().out
    assert "NO CHECKPOINT after step 2" in said and "rank 0:" in said
    assert [step for step, _ in directory.saved_steps(folder_of(args))] == [1, 3] and saves == [True, False, True]
    assert not any(directory.damage(path) for _, path in directory.saved_steps(folder_of(args)))
    assert not list((folder_of(args) / "checkpoints").glob("*.partial"))


@pytest.mark.integration
def test_the_wandb_run_is_continued(tiny, tmp_path, monkeypatch):
    """With --resume FOLDER it is a new one: wandb drops steps that it already has."""
    args = tiny_args(tiny, tmp_path, **SMALL, track=("wandb",), keep_checkpoints=0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = interrupted(args, monkeypatch, after=2)

    def tracked() -> set[str]:
        return {path.name.rsplit("-", 1)[1] for path in (folder / "wandb").glob("offline-run-*")}

    (first,) = tracked()
    run_here(args)
    assert tracked() == {first}
    run_here(dataclasses.replace(args, resume=str(folder / "checkpoints" / "step_000002")))
    (second,) = tracked() - {first}
    assert json.loads((folder / "config.json").read_text())["wandb_id"] == second


WRITERS = [(torch, "save"), (json, "dumps"), (DeepSpeedEngine, "save_checkpoint")]


@pytest.mark.integration
def test_a_checkpoint_that_fails_for_any_reason_costs_nothing_else(tiny, tmp_path, capsys, saves, monkeypatch):
    """Errors of each part that is written, of classes that no full disk raises; no partial folder stays."""
    args = tiny_args(tiny, tmp_path, **{**SMALL, "total_steps": 4, "save_every": 1, "eval_prompts": 0})
    parts = []

    def unwritable(*rest, **named):
        parts.append(1)
        raise ValueError("this part cannot be written")

    saving_step = checkpoints.Checkpoints.after_step

    def after_step(self, step):
        with monkeypatch.context() as patch:
            if step <= len(WRITERS):
                patch.setattr(*WRITERS[step - 1], unwritable)
            return saving_step(self, step)

    monkeypatch.setattr(checkpoints.Checkpoints, "after_step", after_step)
    run_here(args)
    said = capsys.readouterr().out
    for step in (1, 2, 3):
        assert f"NO CHECKPOINT after step {step}" in said and "this part cannot be written" in said
    assert [step for step, _ in directory.saved_steps(folder_of(args))] == [4] and len(parts) >= 3
    assert not list((folder_of(args) / "checkpoints").glob("*.partial")) and (folder_of(args) / "model").is_dir()


def test_the_end_of_a_run_ends_its_tracking(tmp_path, capsys):
    """And a run that is not tracked says nothing of it."""
    ended = []
    for trackers in ({}, {"wandb": SimpleNamespace(finish=lambda: ended.append("finish"))}):
        log = logger.RunLog(tmp_path / "run", grpo.Args(), 2, 10, True)
        log.trackers = trackers
        log.close()
    assert ended == ["finish"] and "wandb" not in capsys.readouterr().out

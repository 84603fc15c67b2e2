"""A checkpoint of N ranks continues on M: the state bit for bit, the gradient and the final weights up to rounding."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers import ROOT, command, go_back, read_jsonl, run_to_end
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

# A script that writes down, whole, on rank 0: the state of each optimizer wherever a checkpoint is saved or loaded, and
# the gradient of each optimizer step. STOP_AFTER: the step after which a signal comes.
WATCHED = """
from runtime import process
process.prepare_environment()
import os
import torch
import tyro
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
import SCRIPT, utils
from runtime import checkpoints, runlog

PLACE, RANK = os.environ["PLACE"], os.environ["RANK"]
gradients = []


def write(name, content):
    if RANK == "0":
        torch.save(content, f"{PLACE}/{name}.pt")


def states_of(engines):
    states = {}
    for part, engine in engines.items():
        for name, weight in engine.module.named_parameters():
            key = f"{part}.{name}"
            states[f"{key}.fp32"] = safe_get_full_fp32_param(weight).clone()
            for moment in ("exp_avg", "exp_avg_sq"):
                states[f"{key}.{moment}"] = safe_get_full_optimizer_state(weight, moment).clone()
        for k, state in enumerate(engine.optimizer.optimizer.state.values()):
            states[f"{part}.step"] = state["step"].clone().cpu()
    return states


def backward(engine, loss, is_last):
    engine.set_gradient_accumulation_boundary(is_boundary=is_last)
    engine.backward(loss)
    if is_last:
        part = type(engine.module).__name__
        gradient = {f"{part}.{n}": safe_get_full_grad(w).float().clone() for n, w in engine.module.named_parameters()}
        gradients.append(gradient)
        write("gradients", gradients)
        engine.step()
        utils.clear_dropped_gradients(engine)


class Watched(checkpoints.Checkpoints):
    def load(self, start):
        step = super().load(start)
        if step:
            write("loaded", states_of(self.engines))
        return step

    def save(self, step):
        write(f"saved_{step}", states_of(self.engines))
        return super().save(step)


if __name__ == "__main__":  # the reward workers import this file
    plain = runlog.RunLog.step

    def stop(self, metrics, *rest):
        plain(self, metrics, *rest)
        process.Stop.asked |= metrics["step"] == int(os.environ["STOP_AFTER"])

    runlog.RunLog.step = stop
    utils.backward = backward
    SCRIPT.Checkpoints = Watched
    args = tyro.cli(SCRIPT.Args)
    SCRIPT.main(args, SCRIPT.preflight(args))
"""
STEPS = ["--total_steps", "6", "--save_every", "2", "--keep_checkpoints", "0"]


class Part:
    """One part of a run, watched: what it printed, and what it wrote down."""

    def __init__(self, tiny, place: Path, out: Path, script: str, ranks: int, stop_after: int, *more: str):
        place.mkdir(parents=True)
        program = place / f"watched_{script}.py"
        program.write_text(WATCHED.replace("SCRIPT", script))
        line = [
            str(program) if word == str(ROOT / f"{script}.py") else word
            for word in command(tiny, out, *STEPS, *more, "--exp_name", script, script=script, ranks=ranks)
        ]
        line = ["env", f"PLACE={place}", f"STOP_AFTER={stop_after}", *line]
        self.code, self.text = run_to_end(line, place / "log")
        assert self.code == (75 if stop_after else 0), self.text
        self.place = place
        self.run = out / "run"

    def read(self, name: str):
        return torch.load(self.place / f"{name}.pt", weights_only=True)

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.run / "model" / "model.safetensors")


def distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference over the norm, of everything together."""
    assert got.keys() == expected.keys()
    away = sum((got[name] - expected[name]).double().square().sum() for name in expected)
    return (away / sum(x.double().square().sum() for x in expected.values())).sqrt().item()


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return got.keys() == expected.keys() and all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("ranks, other", [(1, 2), (2, 4)], ids=["1-2-1", "2-4-2"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_other_ranks_in_the_middle(tiny, tmp_path, script, stage, ranks, other):
    """Steps 1 and 2 on N ranks, 3 and 4 on M, 5 and 6 on N again, against six steps on N."""
    more = ["--zero_stage", str(stage), "--num_mini_batches", "2"]
    straight = Part(tiny, tmp_path / "straight", tmp_path / "whole", script, ranks, 0, *more)
    out = tmp_path / "parts"
    shutil.copytree(straight.run, out / "run")
    go_back(out / "run", 2)
    middle = Part(tiny, tmp_path / "middle", out, script, other, 4, *more)
    end = Part(tiny, tmp_path / "end", out, script, ranks, 0, *more)

    assert f"changed: {ranks} rank(s) there, {other} here" in middle.text
    assert same(middle.read("loaded"), straight.read("saved_2")), "the state is not what was saved"
    assert same(end.read("loaded"), middle.read("saved_4")), "the state is not what was saved"
    steps = {name: value.item() for name, value in middle.read("loaded").items() if name.endswith(".step")}
    assert set(steps.values()) == {4.0}, "two steps of two mini-batches"

    each = len(straight.read("gradients")) // 6
    gradient = distance(middle.read("gradients")[0], straight.read("gradients")[2 * each])
    weights = distance(end.weights(), straight.weights())
    print(f"{script} ZeRO {stage} {ranks}-{other}-{ranks}: gradient {gradient:.2g}, weights {weights:.2g}")
    assert gradient < 1e-6
    assert weights < 1e-6
    metrics = [read_jsonl(part / "metrics.jsonl") for part in (straight.run, end.run)]
    assert [m["step"] for m in metrics[1]] == [1, 2, 3, 4, 5, 6]
    for key in ("reward/mean", "completions/length_mean", "optim/lr", "episode"):
        assert [m[key] for m in metrics[0]] == [m[key] for m in metrics[1]], key

"""A checkpoint of N ranks continues on M: the state bit for bit, the gradient and the final weights up to rounding."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import ROOT, command, go_back, read_jsonl, run_environment
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

# Runs the parts of runs that it is told to, a line of JSON each, and answers with the exit codes of the ranks. They are
# forks of a process that has imported everything. Rank 0 writes down, whole: the state of each optimizer wherever a
# checkpoint is saved or loaded, and the gradient of each optimizer step.
WATCHED = """
import json
import os
import socket
import sys
import traceback

import torch
import tyro
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

import grpo
import ppo
import utils
from runtime.training import deepspeed_zero
from runtime.run import checkpoints, logger
from runtime.system import process

MOMENTS = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), torch.optim.SGD: ()}
gradients = []
order = {}


def write(name, content):
    if os.environ["RANK"] == "0":
        torch.save(content, f"{order['place']}/{name}.pt")


def states_of(engines):
    states = {}
    for part, engine in engines.items():
        if engine.zero_optimization_stage() < 3:
            engine.optimizer._lazy_init_hp_params_optimizer_state()  # as before the first step
        for name, weight in engine.module.named_parameters():
            key = f"{part}.{name}"
            states[f"{key}.fp32"] = safe_get_full_fp32_param(weight).clone()
            for moment in MOMENTS[type(engine.optimizer.optimizer)]:
                states[f"{key}.{moment}"] = safe_get_full_optimizer_state(weight, moment).clone()
        for state in engine.optimizer.optimizer.state.values():
            if "step" in state:
                states[f"{part}.step"] = state["step"].clone().cpu()
    return states


def backward(engine, loss, is_last, drop=False):
    assert not drop
    engine.set_gradient_accumulation_boundary(is_boundary=is_last)
    engine.backward(loss)
    if is_last:
        part = type(engine.module).__name__
        whole = {f"{part}.{n}": safe_get_full_grad(w).float().clone() for n, w in engine.module.named_parameters()}
        gradients.append(whole)
        write("gradients", gradients)
        engine.step()
        deepspeed_zero.clear_dropped_gradients(engine)


class Watched(checkpoints.Checkpoints):
    def load(self, start):
        step = super().load(start)
        if step:
            write("loaded", states_of(self.engines))
        return step

    def save(self, step):
        write(f"saved_{step}", states_of(self.engines))
        return super().save(step)


def stop(self, metrics, *rest):
    plain_step(self, metrics, *rest)
    process.StopRequest.asked |= metrics["step"] == order["stop_after"]


def be_rank(rank, port):
    out = os.open(f"{order['place']}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    size = str(order["ranks"])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script = {"grpo": grpo, "ppo": ppo}[order["script"]]
    script.Checkpoints = Watched
    if "an edit to SGD" in order["words"]:
        utils.make_optimizer = lambda parameters, rate, args: torch.optim.SGD(parameters, lr=rate)
    sys.argv = [script.__file__, *order["words"]]
    try:
        args = tyro.cli(script.Args)
        script.main(args, script.preflight(args))
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def serve():
    global plain_step
    plain_step, logger.RunLog.step = logger.RunLog.step, stop
    deepspeed_zero.backward = backward
    for line in sys.stdin:
        order.update(json.loads(line))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(order["ranks"]):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    code = be_rank(rank, port)
                    sys.stdout.flush()
                finally:
                    os._exit(code)
            pids.append(pid)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""
MAIN = """
if __name__ == "__main__":  # the reward workers import this file
    from runtime.system import process

    process.prepare_environment()
    import watched

    watched.serve()
"""
SGD = "an edit to SGD"  # the name of a run whose optimizer is edited to be that
STEPS = ["--total_steps", "3", "--save_every", "1", "--keep_checkpoints", "0", "--eval_prompts", "0"]


class Watched:
    """A process whose forks are the ranks of runs."""

    def __init__(self, tiny: Path, place: Path):
        self.tiny = tiny
        self.place = place
        (place / "watched.py").write_text(WATCHED)
        (place / "main.py").write_text(MAIN)
        environment = run_environment() | {"PYTHONPATH": f"{ROOT}:{place}"}
        self.process = subprocess.Popen(
            [sys.executable, str(place / "main.py")],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, out: Path, script: str, ranks: int, stop_after: int, *more: str) -> Part:
        """A run, or a part of one, from the start or its newest checkpoint to its end or to step ``stop_after``."""
        place = out.with_name(f"{out.name}-{ranks}-{stop_after}")
        place.mkdir(parents=True)
        words = command(self.tiny, out, *STEPS, *more, script=script)[2:]
        order = {"script": script, "words": words, "place": str(place), "stop_after": stop_after, "ranks": ranks}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        codes = json.loads(self.process.stdout.readline())
        part = Part(place, out / "run", (place / "log").read_text())
        assert codes == [75 if stop_after else 0] * ranks, part.text
        return part


@dataclass
class Part:
    """Result of one part of a run: its records, its folder, and its output."""

    place: Path
    run: Path
    text: str

    def read(self, name: str):
        return torch.load(self.place / f"{name}.pt", weights_only=True)

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.run / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def watched(tiny, tmp_path_factory):
    process = Watched(tiny, tmp_path_factory.mktemp("watched"))
    yield process
    process.process.kill()
    process.process.wait()


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
def test_other_ranks_in_the_middle(watched, tmp_path, script, stage, ranks, other):
    """The first step on N ranks, the second on M, the third on N again, against three steps on N."""
    more = ["--zero_stage", str(stage), "--num_mini_batches", "2"]
    straight = watched.run(tmp_path / "straight", script, ranks, 0, *more)
    out = tmp_path / "parts"
    shutil.copytree(straight.run, out / "run")
    go_back(out / "run", 1)
    middle = watched.run(out, script, other, 2, *more)
    end = watched.run(out, script, ranks, 0, *more)

    assert f"changed: {ranks} rank(s) there, {other} here" in middle.text
    assert same(middle.read("loaded"), straight.read("saved_1")), "the state is not what was saved"
    assert same(end.read("loaded"), middle.read("saved_2")), "the state is not what was saved"
    steps = {name: value.item() for name, value in middle.read("loaded").items() if name.endswith(".step")}
    assert set(steps.values()) == {2.0}, "of two mini-batches"

    each = len(straight.read("gradients")) // 3
    gradient = distance(middle.read("gradients")[0], straight.read("gradients")[each])
    weights = distance(end.weights(), straight.weights())
    print(f"{script} ZeRO {stage} {ranks}-{other}-{ranks}: gradient {gradient:.2g}, weights {weights:.2g}")
    assert gradient < 1e-6
    assert weights < 1e-6
    metrics = [read_jsonl(part / "metrics.jsonl") for part in (straight.run, end.run)]
    assert [m["step"] for m in metrics[1]] == [1, 2, 3]
    for key in ("reward/mean", "completions/length_mean", "optim/lr", "episode"):
        assert [m[key] for m in metrics[0]] == [m[key] for m in metrics[1]], key


@pytest.mark.parametrize(
    "more",
    [
        ["--zero_stage", "1", "--dtype", "bfloat16", "--max_logprob_diff", "0"],
        ["--zero_stage", "3", "--dtype", "bfloat16", "--max_logprob_diff", "0", "--offload", "param"],
        ["--zero_stage", "2", "--offload", "optimizer"],
        ["--zero_stage", "3", "--learning_rate", "0.1", "--exp_name", SGD],
    ],
    ids=" ".join,
)
def test_other_optimizers(watched, tmp_path, more):
    """Two ranks, then one, with what DeepSpeed keeps elsewhere or in other classes: the state is the saved one."""
    before = watched.run(tmp_path / "run", "grpo", 2, 1, *more)
    after = watched.run(tmp_path / "run", "grpo", 1, 0, *more)
    assert "changed: 2 rank(s) there, 1 here" in after.text
    assert same(after.read("loaded"), before.read("saved_1")), "the state is not what was saved"
    metrics = read_jsonl(after.run / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert all(m["optim/grad_norm"] > 0 for m in metrics)

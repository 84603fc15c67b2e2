"""Runs in processes of their own: two ranks, then one, and whatever ends them.

In one file, as one worker's: the process whose forks they are imports the libraries once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import (
    ROOT,
    VERIFIERS,
    command,
    finish,
    forked,
    go_back,
    read_jsonl,
    run_here,
    tiny_args,
    with_program,
)
from safetensors.torch import load_file


@pytest.mark.integration
@pytest.mark.parametrize("rollout", ["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def test_two_ranks_equal_one(tiny, tmp_path, rollout):
    """An engine on each rank, its share of the prompts each: the same samples, loss and gradient as one rank."""
    metrics = {}
    for ranks in (1, 2):
        line = command(tiny, tmp_path / str(ranks), "--eval_prompts", "4", rollout=rollout, ranks=ranks)
        finish(line, tmp_path / f"log{ranks}", 240)
        folder = tmp_path / str(ranks) / "run"
        metrics[ranks] = read_jsonl(folder / "metrics.jsonl") + read_jsonl(folder / "eval.jsonl")
    for one, two in zip(metrics[1], metrics[2], strict=True):
        for key, value in one.items():
            if key.split("/")[0] in ("reward", "loss", "policy", "completions", "optim", "eval"):
                assert two[key] == pytest.approx(value, rel=2e-4, abs=1e-6), key
        assert one.get("sampler/logprob_diff_max", 0) < 1e-4 > two.get("sampler/logprob_diff_max", 0)


IMPORTS = """
import multiprocessing, os, sys, threading
before = dict(os.environ)
sys.path.insert(0, "{root}")
import grpo
print(threading.active_count(), len(multiprocessing.active_children()), dict(os.environ) == before)
print("torch._dynamo" in sys.modules)  # two seconds, for flex attention and engines alone
"""


@pytest.mark.integration
def test_import_starts_nothing(tmp_path):
    (tmp_path / "imports.py").write_text(IMPORTS.format(root=ROOT))
    done = subprocess.run([sys.executable, tmp_path / "imports.py"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "0", "True", "False"]


RAISES_ON_THE_TRUTH = f"error: --verifier: the verifier {VERIFIERS}:raises raises on the truth"


def test_a_raising_verifier_is_refused(tiny, tmp_path, capsys):
    """It raises on the truth, too, so the run is rejected before its first step."""
    with pytest.raises(SystemExit) as end:
        run_here(tiny_args(tiny, tmp_path, verifier=f"{VERIFIERS}:raises"))
    text = capsys.readouterr().err
    assert end.value.code == 2 and RAISES_ON_THE_TRUTH in text
    assert "the verifier's own mistake" in text and "in raises" in text


def test_a_fork_has_no_handler_of_the_run():
    """A verifier or a tool that is asked to end ends; the handler would only note that the run should stop."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        pid = os.fork()
        if pid == 0:
            os._exit(int(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.integration
def test_a_raising_verifier_ends_every_rank(tiny, tmp_path):
    """No process waits for another, with no launcher to end them."""
    line = command(tiny, tmp_path, "--verifier", f"{VERIFIERS}:raises")
    codes, text = forked(line[1:], tmp_path / "log", 2)
    assert codes == [2, 2] and RAISES_ON_THE_TRUTH in text
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout
    assert not left, "processes are left"


@pytest.mark.integration
def test_a_lock_that_a_killed_process_left(tiny, tmp_path, monkeypatch):
    """DeepSpeed loads compiled code next to a lock file that would block forever: a run compiles nothing."""
    lock = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[1]))
    finish(command(tiny, tmp_path / "runs"), tmp_path / "log", 90)


DEAD_THREAD = """
from runtime.system import process
process.prepare_environment()
import os, time
import tyro
import grpo
import utils

def dies(*args):
    print("DIED AT", time.time(), flush=True)
    raise ValueError("the engine broke on purpose")

if __name__ == "__main__":  # the reward workers import this file
    if os.environ["RANK"] == "1":
        utils._generate = dies
    args = tyro.cli(grpo.Args)
    try:
        grpo.main(args, grpo.preflight(args))
    finally:
        print("never reached", flush=True)
"""


@pytest.mark.integration
def test_a_dead_thread_ends_every_rank(tiny, tmp_path):
    """Within 10 seconds, with the thread's own traceback, on every rank, with no launcher to end them."""
    line = with_program(command(tiny, tmp_path), tmp_path, DEAD_THREAD)
    codes, text = forked(line[1:], tmp_path / "log", 2)
    ended = time.time()
    assert 0 not in codes and "never reached" not in text
    assert ended - float(text.split("DIED AT ")[1].split()[0]) < 20  # ten to notice it, on a busy machine
    for rank in (0, 1):
        assert "the engine broke on purpose" in text.split(f"rank {rank} failed")[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, ranks, changes",
    [
        ("grpo", (2, 1), {"async_steps": 1}),  # with a batch ahead, whose samples are of two engines where then is one
        ("grpo", (1, 2), {"zero_stage": 1}),
        ("grpo", (2, 4), {"zero_stage": 3, "offload": "param"}),
        ("ppo", (2, 1), {"zero_stage": 3}),
        ("ppo", (1, 2), {"zero_stage": 2, "offload": "optimizer"}),
    ],
    ids=str,
)
def test_another_number_of_ranks(tiny, tmp_path, script, ranks, changes):
    """Two steps on some ranks and two more on others, against four on the others: equal up to rounding."""
    changes = {"total_steps": 4, "num_mini_batches": 2, "eval_prompts": 0, "save_every": 2} | changes
    flags = [f"--{name}={value}" for name, value in (changes | {"keep_checkpoints": 0}).items()]
    finish(command(tiny, tmp_path / "parts", *flags, script=script, ranks=ranks[0]), tmp_path / "first.log")
    go_back(tmp_path / "parts" / "run", 2)
    runs, said = {}, {}
    for name in ("parts", "straight"):
        line = command(tiny, tmp_path / name, *flags, script=script, ranks=ranks[1])
        said[name] = finish(line, tmp_path / f"{name}.log")
        runs[name] = read_jsonl(tmp_path / name / "run" / "metrics.jsonl")
    assert f"changed: {ranks[0]} rank(s) there, {ranks[1]} here" in said["parts"]
    for got, expected in zip(runs["parts"], runs["straight"], strict=True):
        assert got["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=1e-5)
    weights = [load_file(tmp_path / name / "run" / "model" / "model.safetensors") for name in runs]
    for name, expected in weights[1].items():
        # Adam makes a whole step of a gradient that is rounding alone: one such weight is 1e-6 of its matrix.
        assert (weights[0][name] - expected).norm() < 3e-6 * expected.norm(), name

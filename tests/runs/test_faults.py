"""Faults of a run that tests/fault_injection.py does not meet: how it ends or continues, and that it names the cause.

Bad input and bad verifiers are in tests/unit, broken engines in test_broken_engines.py, ranks and signals in
test_interruptions.py, nodes in tests/launch/test_two_nodes.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import (
    LONG,
    ONE_ENGINE,
    ROOT,
    VERIFIERS,
    Run,
    command,
    logged,
    messages,
    run_here,
    tiny_args,
    with_program,
)

import grpo
import utils
from runtime.training import pretrained

SLOW = pytest.mark.slow
SMALL = {"eval_prompts": 0, "learning_rate": 1e-3}


def hf_thread_with(monkeypatch, change: Callable) -> None:
    """The engine's thread with ``change(message)`` in front of its inbox: None drops a message."""
    plain = utils.hf_thread

    class Changed:
        def __init__(self, inbox):
            self.inbox = inbox

        def get(self):
            while (message := change(self.inbox.get())) is None:
                pass
            return message

    monkeypatch.setattr(utils, "hf_thread", lambda *a: plain(*a[:-2], Changed(a[-2]), a[-1]))


# --------------------------------------------------------------------------------------------- runs that end by a fault


def out_of_memory(monkeypatch) -> None:
    def hidden(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.27 GiB")

    plain = utils.make_optimizer

    def then_without_memory(*arguments):
        monkeypatch.setattr(utils.TokenLogprobs, "hidden", hidden)
        return plain(*arguments)

    monkeypatch.setattr(utils, "make_optimizer", then_without_memory)


def lost_pushes(monkeypatch) -> None:
    hf_thread_with(monkeypatch, lambda message: None if message[0] == "weights" else message)


def nan_logprobs(monkeypatch) -> None:
    plain = utils._generate

    def generate(*arguments):
        for key, ids, logprobs, reason in plain(*arguments):
            yield key, ids, [float("nan")] * len(logprobs), reason

    monkeypatch.setattr(utils, "_generate", generate)


def exits(monkeypatch) -> None:
    plain = grpo.token_loss
    monkeypatch.setattr(grpo, "token_loss", lambda *a: (plain(*a), sys.exit(0)))


FLASH = {"attn_implementation": "flash_attention_2", "batch_layout": "packed", "dtype": "bfloat16"}


@pytest.mark.integration
@pytest.mark.parametrize(
    "fault, changes, words",
    [
        pytest.param(
            out_of_memory,
            {},
            "lower --micro_batch_tokens or the gpu_memory_utilization of --vllm_args, or add --gradient_checkpointing",
            id="no memory",
        ),
        pytest.param(lost_pushes, {"timeout": 3.0}, "acknowledgement of new weights", id="push without an end"),
        pytest.param(nan_logprobs, {}, "not finite", id="log-probs of the sampler are NaN"),
        pytest.param(exits, {}, "SystemExit: 0", id="some library's exit()"),
        pytest.param(lambda _: None, FLASH, "ImportError: ", id="no flash-attn"),
    ],
)
def test_a_run_that_ends_says_why(tiny, tmp_path, capfd, monkeypatch, fault, changes, words):
    """Its rank has failed, also where the exit code was to be 0, and one line names the cause."""
    fault(monkeypatch)
    with pytest.raises((Exception, SystemExit)):
        run_here(tiny_args(tiny, tmp_path, **SMALL, **changes))
    out, err = capfd.readouterr()
    assert "rank 0 failed" in err
    assert [line for line in messages(out + err) if words in line], out + err


@SLOW
@pytest.mark.parametrize(
    "changes",
    [{"verifier": f"{VERIFIERS}:zero"}, {"mask_truncated_completions": True}, {"filter_zero_std_samples": True}],
    ids=["equal", "truncated", "filtered"],
)
@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_an_engine_with_other_weights_is_noticed_where_nothing_is_trained(tiny, tmp_path, monkeypatch, script, changes):
    """Such an engine's answers are garbage: all rewards are equal, or no response ends, and there is no gradient.

    A healthy engine is compared there, too, and goes on.
    """
    args = tiny_args(tiny, tmp_path, script, **{"verifier": f"{VERIFIERS}:zero", "eval_prompts": 0, **changes})
    for metrics in run_here(args, script):
        assert 0 <= metrics["sampler/logprob_diff_mean"] < 1e-4
    hf_thread_with(monkeypatch, lambda m: (*m[:2], [(n, w + 1) for n, w in m[2]]) if m[0] == "weights" else m)
    args.run_name = "broken"
    with pytest.raises(RuntimeError, match="the engine has stale weights or a different model"):
        run_here(args, script)


# --------------------------------------------------------------------------------------------- runs that go on with it


def every_token_ends(monkeypatch) -> None:
    monkeypatch.setattr(pretrained, "stop_token_ids", lambda model, _: list(range(model.config.vocab_size)))


def no_wandb(monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")


NEVER_RIGHT = {"verifier": "exact", "total_steps": 5}
CUT = {"mask_truncated_completions": True, "ignore_eos": False, "max_response_length": 2}


@pytest.mark.integration
@pytest.mark.parametrize(
    "fault, changes, words",
    [
        pytest.param(None, NEVER_RIGHT, ["zero-variance 100%"], id="never"),
        pytest.param(None, CUT, ["ALL TRUNCATED, nothing to train on"], id="no response ends"),
        pytest.param(every_token_ends, {}, ["len 1.0", "step 2/2"], id="every response ends at once"),
        pytest.param(no_wandb, {"track": ("wandb",)}, ["tracking offline"], id="wandb is not reachable", marks=SLOW),
    ],
)
def test_a_run_that_goes_on_says_what_is_odd(tiny, tmp_path, capfd, monkeypatch, fault, changes, words):
    """And no file of it has the key of the environment."""
    if fault is not None:
        fault(monkeypatch)
    metrics = run_here(tiny_args(tiny, tmp_path, **{**SMALL, **changes}))
    text = "".join(capfd.readouterr())
    assert all(word in text for word in words), text
    assert all(m["optim/skipped"] == 0 for m in metrics)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if b"0" * 40 in path.read_bytes()]


@pytest.mark.integration
def test_a_tokenizer_without_padding(tiny, tmp_path):
    model = shutil.copytree(tiny, tmp_path / "unpadded")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (file := model / name).exists():
            file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "pad_token"}))
    assert len(run_here(tiny_args(model, tmp_path / "runs", **SMALL))) == 2


# ------------------------------------------------------------------------------------------------- processes and vLLM


def ended(line: list[str], log: Path, timeout: float = 240) -> str:
    """The messages of a run that must end within the time, with an exit code other than 0, and leave no process."""
    run = Run(line, log)
    assert run.end(timeout) != 0
    return "\n".join(messages(run.text()))


@SLOW
def test_the_port_is_taken(tiny, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = [f"MASTER_PORT={taken.getsockname()[1]}", "MASTER_ADDR=127.0.0.1"]
        assert "address already in use" in ended(["env", *place, *command(tiny, tmp_path, *LONG)], tmp_path / "log")


KEEPS_ITS_CACHE = """
from runtime.system import process
process.prepare_environment()
import tyro
import grpo

if __name__ == "__main__":  # the reward workers import this file
    import vllm

    vllm.LLM.reset_prefix_cache = lambda self, **options: False
    args = tyro.cli(grpo.Args)
    grpo.main(args, grpo.preflight(args))
"""


@SLOW
def test_the_real_engine(tiny, tmp_path):
    """Another vLLM, too little memory for its cache, a prefix cache that it does not drop."""
    line = command(tiny, tmp_path, *LONG, rollout="vllm")
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '9.9'\n")
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(
        "class EngineArgs:\n    kv_cache_memory_bytes: int = 0\n"
    )
    text = ended(["env", f"PYTHONPATH={tmp_path}:{ROOT}", *line], tmp_path / "other.log")
    assert "No module named 'vllm.v1'" in text
    shutil.rmtree(tmp_path / "vllm")
    text = ended([*line, "--vllm_args", '{"kv_cache_memory_bytes": 10000}'], tmp_path / "memory.log")
    assert "Error: " in text.partition("The above exception was the direct cause")[0]
    text = ended(with_program(line, tmp_path, KEEPS_ITS_CACHE), tmp_path / "keeps.log")
    assert "kept its prefix cache" in text


@SLOW
@pytest.mark.parametrize(
    "victim, words",
    [(1, "(engine 0) is gone without a word"), (0, "rank 0, which engine 0 samples for, is gone")],
    ids=["engine", "trainer"],
)
def test_either_side_of_an_engine_on_a_rank_of_its_own_is_killed(tiny, tmp_path, victim, words):
    """The other one ends with it, long before the launcher would kill it, and says whom it misses."""
    run = Run(command(tiny, tmp_path, *LONG, *ONE_ENGINE, ranks=2, rollout="vllm"), tmp_path / "log")
    run.until(lambda: logged(tmp_path) >= 1, 240)
    os.kill(run.ranks()[victim], signal.SIGKILL)
    assert run.end(15) != 0
    assert words in run.text()

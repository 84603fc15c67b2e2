"""studies/rehearse_gpu_run.py: seconds by hand, what it rejects and changes, and a rehearsal of two ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys

import pytest
import rehearse_gpu_run
from helpers import ROOT, TINY_RUN, run_to_end

import grpo
import ppo
from runtime.arguments.values import ModelName
from runtime.training import memory
from runtime.training.memory import default_sizes

MODEL = memory.Model(
    parameters=10**9, layers=10, hidden=1000, intermediate=3000, heads=10, kv_heads=2, head_size=100, vocabulary=50_000
)
PRODUCTS = 10 * (2 * 12 * 10**5 + 3 * 3 * 10**6) + 5 * 10**7  # 164M parameters that a token is multiplied with
KEYS = 2 * 10 * 2 * 100 * 2  # bytes of a token's keys and values
CARD = rehearse_gpu_run.Card(80, 10**15, 10**12, 10**11)
TOKENS = 32 * 100 + 4 * 256  # 4 prompts, once each, and 8 responses of 100 tokens to each
SIZE = dataclasses.replace(default_sizes(grpo.Args(), True), micro_batch_tokens=1056)  # four micro-batches


def seconds(ranks: int = 1, script=grpo, **changes) -> dict[str, float]:
    """Of a step of 4 prompts x 8 samples on each rank."""
    shape = {"num_unique_prompts_rollout": 4 * ranks, "max_prompt_length": 256, "max_response_length": 400}
    args = script.Args(**shape, **changes)
    setting = memory.Setting(ranks, True, 80e9, critic=script is ppo)
    return rehearse_gpu_run.step_seconds(args, MODEL, setting, SIZE, CARD, 100)


def test_seconds_by_hand():
    """Products at 0.4 of the FLOP/s, weights, keys and states at 0.7 of the bytes/s, 30 microseconds for a token."""
    found = seconds()
    assert found["update"] == pytest.approx(6 * PRODUCTS * TOKENS / 0.4e15)
    assert found["logprobs"] == 0
    assert found["generate"] == pytest.approx(3200 * 30e-6 + (400 * 2e9 + 3200 * 306 * KEYS) / 0.7e12)
    assert found["optimizer"] == pytest.approx(30e9 / 0.7e12)
    assert rehearse_gpu_run.whole_step(found, grpo.Args()) == pytest.approx(sum(found.values()))


@pytest.mark.parametrize(
    ("changes", "phase", "expected"),
    [
        ({"gradient_checkpointing": True}, "update", 8 * PRODUCTS * TOKENS / 0.4e15),
        ({"batch_layout": "packed"}, "update", 6 * PRODUCTS * (TOKENS + 28 * 256) / 0.4e15),
        ({"num_epochs": 2}, "update", 12 * PRODUCTS * TOKENS / 0.4e15),
        ({"beta": 0.1}, "logprobs", 2 * PRODUCTS * TOKENS / 0.4e15),
        ({"beta": 0.1, "num_mini_batches": 2}, "logprobs", 4 * PRODUCTS * TOKENS / 0.4e15),
        ({"offload": ("optimizer",)}, "optimizer", 30e9 / (0.7 * 32e9)),
        ({"script": ppo}, "update", 12 * PRODUCTS * TOKENS / 0.4e15),
        # Two ranks exchange half of 2 GB with each other: after each of four micro-batches and after the step.
        ({"ranks": 2}, "update", 6 * PRODUCTS * TOKENS / 0.4e15 + 5 * 1e9 / 0.7e11),
        ({"ranks": 2, "zero_stage": 3}, "update", 6 * PRODUCTS * TOKENS / 0.4e15 + 13 * 1e9 / 0.7e11),
        ({"ranks": 2}, "optimizer", 15e9 / 0.7e12),
    ],
)
def test_seconds_follow_the_flags(changes, phase, expected):
    assert seconds(**changes)[phase] == pytest.approx(expected)


def test_engines_with_gpus_of_their_own():
    """Each answers what several ranks train on; asked ahead they work at the same time as the trainers."""
    found = seconds(ranks=2, vllm_engines=1)
    more = found["generate"] - seconds(ranks=2)["generate"]
    assert more == pytest.approx(3200 * (30e-6 + 306 * KEYS / 0.7e12))
    args = grpo.Args(vllm_engines=1, async_steps=1)
    rest = sum(found.values()) - found["generate"]
    assert rehearse_gpu_run.whole_step(found, args) == pytest.approx(max(rest, found["generate"]))
    assert rehearse_gpu_run.whole_step({"generate": 9, "update": 2}, args) == 9


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("h100", {}, None),
        ("a10", {}, "it fits with --gradient_checkpointing --vllm_sleep engine"),
        (
            "a10",
            {"micro_batch_tokens": 16384, "vllm_args": '{"gpu_memory_utilization": 0.4}'},
            "--micro_batch_tokens 16384",
        ),
        ("a10", {"max_response_length": 10**6}, "give shorter lengths or more GPUs"),
    ],
)
def test_what_does_not_fit_is_refused(capsys, kind, changes, says):
    """With exit code 2, the flag and the remedy; what fits is printed, and said to be computed."""
    args = grpo.Args(**({"num_unique_prompts_rollout": 64, "max_response_length": 512} | changes))
    if says is None:
        rehearse_gpu_run.foretell(args, MODEL, kind, 1, 1000)
        assert "computed, not measured" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit) as stop:
        rehearse_gpu_run.foretell(args, MODEL, kind, 1, 1000)
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("word", ["h300", "h100:0", "h100:many", "8"])
def test_an_unknown_card_is_refused_with_those_that_are_known(word, capsys):
    with pytest.raises(SystemExit) as stop:
        rehearse_gpu_run.main([word, "grpo.py"])
    assert stop.value.code == 2
    assert "rtx4090" in capsys.readouterr().err


def test_a_launcher_in_the_place_of_the_script_is_refused(capsys):
    """The command for GPUs begins with it; what is rehearsed are the flags of the script."""
    with pytest.raises(SystemExit) as stop:
        rehearse_gpu_run.main(["h100:8", "accelerate", "launch", "grpo.py"])
    assert stop.value.code == 2
    assert "accelerate is not a script" in capsys.readouterr().err


def test_the_plan_of_a_command_line(tiny, capsys, monkeypatch):
    """The lines of the start for cards that are not here, with the checks of a launch of that size."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    words = ["a10:2", str(ROOT / "ppo.py"), "--model_name_or_path", str(tiny), "--beta", "0.1", "--dry_run"]
    rehearse_gpu_run.main(words)
    said = capsys.readouterr().out
    assert "of the GPU's 22.4" in said and "micro_batch_tokens 16384" in said and "20 steps in" in said
    with pytest.raises(SystemExit) as stop:
        rehearse_gpu_run.main([*words, "--vllm_engines", "2"])
    assert stop.value.code == 2
    assert "leave no trainer in a launch of 2" in capsys.readouterr().err


def test_a_run_here_keeps_lengths_and_vocabulary(tiny, tmp_path):
    """And the group; it has few prompts, two layers, and nothing that a CPU has not."""
    args = ppo.Args(
        model_name_or_path=str(tiny),
        num_unique_prompts_rollout=64,
        num_mini_batches=4,
        max_response_length=64,
        attn_implementation="flash_attention_2",
        vllm_args='{"kv_cache_memory_bytes": 40000000000}',
        critic=("model_name_or_path=elsewhere", "warmup_steps=3"),
        total_epochs=2,
        critic_warmup=5,
    )
    trainers, changes, config, bound = rehearse_gpu_run.room_here(args, 2, tmp_path)
    assert trainers == 2 and config.num_hidden_layers == 2 and config.hidden_size == 64 and bound.peak > 1e9
    run = dataclasses.replace(args, **changes)
    assert (run.num_unique_prompts_rollout, run.num_mini_batches, run.max_response_length) == (4, 4, 64)
    assert (run.attn_implementation, run.vllm_args) == ("auto", None)
    assert (run.critic, run.critic_warmup) == (("warmup_steps=3",), 0)
    rehearse_gpu_run.write_model(config, args, tmp_path / "model")
    written = memory.read_model(ModelName(str(tmp_path / "model"), None))
    assert written == memory.read_model(ModelName(str(tiny), None))


def test_a_model_too_large_for_this_machine_is_made_narrow(monkeypatch, tiny, tmp_path):
    """And where that does not help the rehearsal is rejected."""
    full = json.loads((tiny / "config.json").read_text())
    full |= {"vocab_size": 5 * 10**5, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(full | {"head_dim": 128}))
    args = grpo.Args(model_name_or_path=str(tmp_path))
    plain = rehearse_gpu_run.Path.read_text
    free = 40 * 10**6

    def said(path):
        return f"MemAvailable: {free} kB" if str(path) == "/proc/meminfo" else plain(path)

    monkeypatch.setattr(rehearse_gpu_run.Path, "read_text", said)
    trainers, _, config, bound = rehearse_gpu_run.room_here(args, 1, tmp_path)
    assert (trainers, config.hidden_size, config.num_attention_heads) == (1, 2048, 16)
    assert config.vocab_size == 5 * 10**5 and max(bound.phases.values()) < free * 1024
    free = 10**6
    with pytest.raises(SystemExit) as stop:
        rehearse_gpu_run.room_here(args, 1, tmp_path)
    assert stop.value.code == 2


@pytest.mark.slow
def test_two_ranks_hold_less_than_the_bound(tiny, tmp_path):
    """Every phase of a command for four GPUs, each below its bound; the second step resumes from the first."""
    words = ["--model_name_or_path", str(tiny), "--rollout", "hf", "--beta", "0.1", "--num_mini_batches", "2"]
    for name in ("dataset", "max_response_length", "max_prompt_length", "eval_prompts"):
        words += [f"--{name}", str(TINY_RUN[name])]
    line = [sys.executable, str(ROOT / "studies" / "rehearse_gpu_run.py"), "h100:4", str(ROOT / "grpo.py"), *words]
    code, text = run_to_end(line, tmp_path / "log")
    assert code == 0, text
    ranks = min(4, max(2, os.cpu_count() // 2))
    assert f"{ranks} of 4 ranks, 2 random layers of width 64" in text
    rows = {
        name: (float(a), float(b)) for name, a, b in re.findall(r"^ +(\w+) +([\d.]+) +([\d.]+) +[\d.]+$", text, re.M)
    }
    assert set(rows) == {"push", "eval", "generate", "score", "logprobs", "update", "save"}
    for name, (measured, bound) in rows.items():
        assert 0.3 * bound < measured <= bound, (name, text)
    assert "resumed    after step 1" in text

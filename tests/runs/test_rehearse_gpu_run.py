"""studies/rehearse_gpu_run.py: seconds by hand, what it rejects, and the plan of a command line."""

from __future__ import annotations

import dataclasses

import pytest
import rehearse_gpu_run
from helpers import ROOT

import grpo
import ppo
from runtime.training import memory
from runtime.training.memory import default_sizes
from runtime.training.model_files import Model

MODEL = Model(
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
    setting = memory.Setting(ranks, 2, 80e9, critic=script is ppo)
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
        ({"beta": 0.1, "num_mini_batches": 2}, "logprobs", 4 * PRODUCTS * TOKENS / 0.4e15),
        ({"offload": ("optimizer",)}, "optimizer", 30e9 / (0.7 * 32e9)),
        ({"script": ppo}, "update", 12 * PRODUCTS * TOKENS / 0.4e15),
        # Two ranks exchange half of 2 GB with each other: after each of four micro-batches and after the step.
        ({"ranks": 2}, "update", 6 * PRODUCTS * TOKENS / 0.4e15 + 5 * 1e9 / 0.7e11),
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


def test_rows_of_the_table(capsys):
    """The first letters that fit; host memory and files per parameter; a published config has its published size."""
    sizes = {name: round(model.parameters / 1e9, 2) for name, model in rehearse_gpu_run.MODELS.items()}
    assert [*sizes.values()] == [0.60, 1.24, 1.72, 4.02, 8.19]
    rehearse_gpu_run.main(["table"])
    rows = {tuple(row.split(" | ")[:2]): row.split(" | ")[2:] for row in capsys.readouterr().out.splitlines()}
    assert rows["| 1 x h100", "Qwen3-0.6B"][0] == "none" and rows["| 1 x h100", "Qwen3-0.6B"][2] == "0"
    letters, gpu, host, _, disk, _ = rows["| 1 x rtx3090", "Qwen3-4B"]
    assert "O" in letters and int(gpu) < 24 and (int(host), int(disk)) == (round(16 * 4.02), round(52 * 4.02))
    assert rows["| 1 x rtx3090", "Qwen3-8B"][0] == "does not fit"


def test_a_small_cache_is_read_for_more_often():
    """A quarter of the responses' keys fits: the weights are read four times."""
    cache = 32 * 356 * KEYS / 4
    small = seconds(vllm_args='{"kv_cache_memory_bytes": %d}' % cache)  # noqa: UP031
    assert small["generate"] - seconds()["generate"] == pytest.approx(3 * 400 * 2e9 / 0.7e12)


@pytest.mark.parametrize("word", ["h300", "h100:0", "h100:many", "8"])
def test_an_unknown_card_is_refused_with_those_that_are_known(word, capsys):
    with pytest.raises(SystemExit) as stop:
        rehearse_gpu_run.main([word, "grpo.py"])
    assert stop.value.code == 2
    assert "rtx4090" in capsys.readouterr().err


def test_the_plan_of_a_command_line(tiny, capsys, monkeypatch):
    """The lines of the start for cards that are not here, with the checks of a launch of that size."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    words = ["a10:2", str(ROOT / "ppo.py"), "--model_name_or_path", str(tiny), "--beta", "0.1"]
    rehearse_gpu_run.main(words)
    said = capsys.readouterr().out
    assert "of 22.4 GiB per rank" in said and "micro_batch_tokens 16384" in said and "20 steps in" in said
    with pytest.raises(SystemExit) as stop:
        rehearse_gpu_run.main([*words, "--vllm_engines", "2"])
    assert stop.value.code == 2
    assert "leave no trainer in a launch of 2" in capsys.readouterr().err

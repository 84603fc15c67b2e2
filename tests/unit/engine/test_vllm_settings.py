"""runtime/engine/vllm_settings.py: the KV cache of an engine on a CPU."""

from __future__ import annotations

import dataclasses

import pytest

import grpo
from runtime.engine import vllm_settings
from runtime.system import process
from runtime.training import model_files

MODEL = model_files.Model(
    parameters=10**9, layers=10, hidden=1000, intermediate=3000, heads=10, kv_heads=2, head_size=100, vocabulary=50_000
)


@pytest.mark.parametrize(
    ("changes", "sequences", "tokens"),
    [
        ({}, 256, 288),
        ({"eval_prompts": 0, "num_unique_prompts_rollout": 2}, 16, 288),
        ({"max_response_length": 30}, 256, 288),  # in blocks of 32
    ],
)
def test_a_cache_has_room_for_the_longest_sequences(changes, sequences, tokens, monkeypatch):
    """And a quarter more; a token has 8,000 bytes in bf16. Not more than an eighth of all memory, or 0.5 GiB."""
    needed = 1.25 * sequences * tokens * 8000
    assert vllm_settings.cpu_cache(grpo.Args(**changes), MODEL, 2, 1, most=2**40) == needed
    for size in (2**30, 2**33):
        monkeypatch.setattr(process, "free_memory", lambda kind, size=size: {"MemTotal": size}[kind])
        assert vllm_settings.cpu_cache(grpo.Args(max_response_length=2000), MODEL, 2, 1) == max(2**29, size / 8)


def test_a_cache_is_as_large_as_the_prompts_are_long():
    """Not as they might be; only with an environment can they grow."""
    args = grpo.Args()
    args.longest_prompt = 43
    assert vllm_settings.cpu_cache(args, MODEL, 2, 1) == 1.25 * 256 * 96 * 8000


@pytest.mark.parametrize(
    "changes, layers, blocks",
    [
        ({"num_samples_per_prompt_rollout": 2}, 1, 9),  # fewer than 256 tokens of short prompts
        ({"num_samples_per_prompt_rollout": 2, "max_prompt_length": 28}, 1, 1),  # one block, and the empty one
        ({"num_samples_per_prompt_rollout": 2, "vllm_args": '{"block_size": 128}'}, 1, 12),  # in blocks of 32
        ({"max_prompt_length": 10**5}, 1000, 3126),  # more than 0.5 GiB
    ],
)
def test_a_cache_has_room_for_a_sequence_of_full_length(changes, layers, blocks):
    """Else vLLM does not start, whatever the prompts are. One more block stays empty in it."""
    args = grpo.Args(num_unique_prompts_rollout=1, max_response_length=4, eval_prompts=0, **changes)
    args.longest_prompt = 20
    model = dataclasses.replace(MODEL, layers=layers * MODEL.layers)
    of_a_token = 2 * model.layers * model.kv_heads * model.head_size * 2
    empty = args.engine_args.get("block_size", 32)
    assert vllm_settings.cpu_cache(args, model, 2, 1) == 1.25 * (32 * blocks + empty) * of_a_token


READ = {"model consolidated": "model", "model model-1 index": "model", "model-1 consolidated index": "model-1"}


@pytest.mark.parametrize("files", READ)
def test_vllm_reads_the_files_that_transformers_reads(tmp_path, files):
    """Not Mistral's own format, and no index that other weights left behind."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import default_loader

    for name in files.split():
        (tmp_path / f"{name}.safetensors").touch()
    if "index" in files:
        index = '{"weight_map": {"weight": "model-1.safetensors"}}'
        (tmp_path / "model.safetensors.index.json").write_text(index)
    how = LoadConfig(load_format=vllm_settings.as_transformers_reads()["load_format"])
    found = default_loader.DefaultModelLoader(how)._prepare_weights(str(tmp_path), None, None, True, None)
    assert found[1] == [str(tmp_path / f"{READ[files]}.safetensors")]


def test_the_cache_of_models_with_recurrent_states_keeps_its_size():
    """Their blocks are as large as a state, and nothing here knows that size."""
    mamba = model_files.model_of({**dict.fromkeys(model_files.FIELDS, 8), "mamba_d_conv": 4}, parameters=10**6)
    for model in (mamba, None):
        assert vllm_settings.cpu_cache(grpo.Args(), model, 2, 1) == 2**29

"""The sizes that are chosen for the GPU that is there: of every command that the pages give, on every common card."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from helpers import ROOT

import grpo
import ppo
from runtime.arguments import flags
from runtime.arguments.values import ModelName
from runtime.engine import vllm_settings
from runtime.training import batching, device_sizes, memory

# 10^9 bytes, as sold; those that are there have a little more.
CARDS = (24, 40, 48, 80, 141)
NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
QWEN = {
    "Qwen/Qwen2.5-0.5B-Instruct": (24, 896, 4864, 14, 2, 151_936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (28, 1536, 8960, 12, 2, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": (28, 3584, 18944, 28, 4, 152_064, False),
}


def qwen(name: str) -> memory.Model:
    *numbers, vocabulary, tied = QWEN[name]
    return memory.model_of(dict(zip(NAMES, numbers, strict=True)) | {"vocab_size": vocabulary}, tied=tied)


def parsed(text: str) -> tuple[flags.RunFlags, memory.Model]:
    """The arguments of a command line of a page, and its model."""
    script, *words = text.replace("\\", " ").split()
    args = flags.parse({"grpo.py": grpo.Args, "ppo.py": ppo.Args}[script], words=words)
    return args, qwen(args.model_name_or_path)


def header(script: str) -> str:
    """The command for one GPU in the header of a script."""
    text = re.search(r"one GPU +python (.*?)\n +N GPUs", (ROOT / script).read_text(), re.DOTALL)[1]
    return " ".join(text.split())


COMMANDS = [("grpo", lambda: header("grpo.py"), 1), ("ppo", lambda: header("ppo.py"), 1)]


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("name", "command", "ranks"), COMMANDS, ids=[name for name, *_ in COMMANDS])
def test_the_commands_of_the_headers_fit_every_card(name, command, ranks, card):
    """By themselves: below 0.95 of the card, with a KV cache for 64 complete sequences."""
    args, model = parsed(command())
    critic = name == "ppo"
    setting = memory.Setting(ranks, True, card * 1e9, critic)
    sizes, _ = device_sizes.sizes_for(args, model, setting)
    found = memory.predict(args, model, setting, sizes)
    print(f"{name} on {ranks} x {card} GB: {vars(sizes)}, {found.peak / 1e9:.1f} GB = {found.peak / card / 1e9:.2f}")
    assert found.peak < 0.95 * card * 1e9
    assert sizes.micro_batch_tokens >= args.max_prompt_length + args.max_response_length


def test_without_the_choice_the_header_does_not_fit_small_cards():
    """The sizes of a large GPU are what the commands had on every card: 24, 40 and 48 GB are too small for them."""
    args, model = parsed(header("grpo.py"))
    too_small = []
    for card in CARDS:
        setting = memory.Setting(1, True, card * 1e9)
        if memory.predict(args, model, setting).peak > memory.USABLE * setting.card:
            too_small.append(card)
    assert too_small == [24, 40, 48]


def test_smaller_cards_get_smaller_sizes():
    """Micro-batches, the engine's share, and logits at a time; what the flags name stays."""
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    args = grpo.Args(num_unique_prompts_rollout=64, max_response_length=512)
    found = {}
    for card in CARDS:
        found[card] = device_sizes.first_fit(args, qwen(name), memory.Setting(1, True, card * 1e9))
    tokens = [size.micro_batch_tokens for size in found.values()]
    assert tokens == sorted(tokens) and tokens[0] < tokens[-1] == 16384
    assert found[24].logprob_chunk == 1024 and found[40].logprob_chunk == 4096
    assert found[24].vllm_gpu_memory_utilization < found[80].vllm_gpu_memory_utilization == 0.4
    tried = {size.micro_batch_tokens for size in device_sizes.candidates(args, memory.Setting(1, True, 24e9))}
    assert all(tokens % batching.ROW_MULTIPLE == 0 for tokens in tried), "whole rows of a GPU"
    given = {"micro_batch_tokens": 3000, "vllm_gpu_memory_utilization": 0.25}
    args = grpo.Args(micro_batch_tokens=3000, vllm_args='{"gpu_memory_utilization": 0.25}')
    size = device_sizes.first_fit(args, qwen(name), memory.Setting(1, True, 80e9))
    assert {key: getattr(size, key) for key in given} == given


def test_what_fits_nowhere_is_refused_with_what_would_fit(capsys):
    """Naming checkpointing first; given sizes are tried all the same, and a dedicated engine has no sleep to offer."""
    args = grpo.Args(num_unique_prompts_rollout=64, max_response_length=512)
    model = qwen("Qwen/Qwen2.5-1.5B-Instruct")
    for card, remedy in (
        (80, None),
        (48, "--gradient_checkpointing --vllm_sleep engine."),
        (40, "--gradient_checkpointing --vllm_sleep engine."),
        (24, "--gradient_checkpointing --vllm_sleep engine --offload optimizer."),
        (10, "give shorter lengths or more GPUs"),
    ):
        setting = memory.Setting(1, True, card * 1e9)
        if remedy is None:
            device_sizes.sizes_for(args, model, setting)
            continue
        with pytest.raises(SystemExit) as stop:
            device_sizes.sizes_for(args, model, setting)
        assert stop.value.code == 2
        assert remedy in capsys.readouterr().err, card
    setting = memory.Setting(1, True, 24e9)
    args = dataclasses.replace(args, micro_batch_tokens=1024, vllm_args='{"gpu_memory_utilization": 0.3}')
    assert device_sizes.sizes_for(args, model, setting)[0].micro_batch_tokens == 1024
    apart = grpo.Args(vllm_engines=1, max_response_length=512)
    with pytest.raises(SystemExit):
        device_sizes.sizes_for(apart, qwen("Qwen/Qwen2.5-7B-Instruct"), setting)
    assert "sleep" not in capsys.readouterr().err


def test_the_gpu_that_is_there_decides(monkeypatch, tiny, tmp_path):
    """The smallest of the node, by its properties; the engine is built with the share that was chosen."""
    cards = [SimpleNamespace(total_memory=int(80e9)), SimpleNamespace(total_memory=int(24e9))]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: cards[i])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    name = "Qwen/Qwen2.5-0.5B-Instruct"
    *numbers, vocabulary, tied = QWEN[name]
    config = dict(zip(NAMES, numbers, strict=True)) | {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = grpo.Args(model_name_or_path=str(tmp_path), num_unique_prompts_rollout=64, max_response_length=512)
    setting = vllm_settings.memory_setting(args, torch.bfloat16, 1)
    assert setting == memory.Setting(1, True, 24e9)
    expected = device_sizes.first_fit(args, qwen(name), setting).vllm_gpu_memory_utilization
    assert vllm_settings.engine_share(args, torch.bfloat16, 1) == expected < 0.4
    asked = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=lambda **options: asked.update(options)))
    executors = SimpleNamespace(ExecutorWithExternalLauncher=SimpleNamespace(), UniProcExecutor=SimpleNamespace())
    executors.UniProcExecutor.determine_available_memory = None
    monkeypatch.setitem(sys.modules, "vllm.v1.executor.uniproc_executor", executors)
    for script in (grpo, ppo):
        args = script.Args(model_name_or_path=str(tmp_path), max_response_length=512, num_unique_prompts_rollout=64)
        args.gradient_checkpointing, args.vllm_sleep = True, "engine"
        script.build_vllm(args, torch.bfloat16, 0, 1)
        assert asked["gpu_memory_utilization"] == vllm_settings.engine_share(args, torch.bfloat16, 1) < 0.8
    assert vllm_settings.engine_share(grpo.Args(vllm_engines=1), torch.bfloat16, 1) == 0.9


def test_a_model_on_the_hub_is_counted(monkeypatch, tmp_path):
    """By its config.json, of the revision that is asked for, which is asked for once."""
    config = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 1000}))
    asked = []

    def fetched(name, file, revision):
        asked.append((name, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetched)
    for _ in range(2):
        assert memory.read_model(ModelName("someone/model", "v2")).parameters > 0
    assert asked == [("someone/model", "config.json", "v2")]


def test_an_engine_is_given_a_share_of_a_gpu():
    """More than nothing and less than all: CUDA itself, and vLLM's graphs, need the rest."""
    for place, shares in device_sizes.SHARES.items():
        assert all(0 < share <= 0.9 for share in shares), place
        assert list(shares) == sorted(shares, reverse=True), "the most wanted first"

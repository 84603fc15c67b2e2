"""Commands of the pages that need a GPU: their predicted memory fits it."""

from __future__ import annotations

import importlib
import re
import shlex

import pytest
import rehearse_gpu_run
from helpers import ROOT

from runtime.arguments import flags
from runtime.training import memory, model_files

NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
# What the config.json of each model of the page says: NAMES, the vocabulary, and whether its head is the embedding.
MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": (24, 896, 4864, 14, 2, 151_936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (28, 1536, 8960, 12, 2, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": (28, 3584, 18944, 28, 4, 152_064, False),
}


def needed(script: str, words: list[str], model: model_files.Model, gpus: int, gb: float) -> float:
    """Return the bytes that a rank of a command line needs on its GPUs."""
    args = flags.parse(importlib.import_module(script.removesuffix(".py")).Args, words=words)
    _, _, found = rehearse_gpu_run.planned(args, model, gpus, gb)
    return found


@pytest.mark.parametrize("page", ["docs/grpo.md", "docs/maintainers/ppo.md"])
def test_gpu_lines_of_other_pages_fit_80_gb_and_name_their_data(page):
    """Of the lines that name a model of the hub: none trains it on the quickstart's sums, or needs more than a card."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    lines = re.findall(r"((?:grpo|ppo)\.py [^\n]*--model_name_or_path Qwen/[^\n#]*)", text)
    lines = [line for line in lines if "..." not in line]
    assert lines
    for line in lines:
        script, *words = shlex.split(line)
        name = words[words.index("--model_name_or_path") + 1]
        *numbers, vocabulary, tied = MODELS[name]
        config = dict(zip(NAMES, numbers, strict=True)) | {"vocab_size": vocabulary}
        found = needed(script, words, model_files.model_of(config, tied=tied), 1, 80)
        assert found < memory.USABLE * 80e9, (line, found)
        assert "--dataset" in words, line


def test_the_recipes_fit_the_gpus_of_their_headings():
    text = (ROOT / "docs" / "recipes.md").read_text().replace("\\\n", " ")
    found = re.findall(
        r"^## (\d+) GB( on each of 8)?.*?grpo\.py (--model_name_or_path Qwen/(\S+) [^\n]*)", text, re.M | re.S
    )
    assert [int(gb) for gb, *_ in found] == [8, 12, 24, 48, 80, 80]
    for gb, many, line, name in found:
        gpus = 8 if many else 1
        assert needed("grpo.py", shlex.split(line), rehearse_gpu_run.MODELS[name], gpus, int(gb)) < 0.95e9 * int(gb), (
            line
        )


def test_without_sleeping_in_turns_a_line_does_not_fit():
    """Without the flags that free memory in turns verl's line needs more than the card: the engine's share counts."""
    model = model_files.Model(7 * 10**9, 30, 4096, 11008, 32, 32, 128, 102_400)
    line = "--num_samples_per_prompt_rollout 1 --num_unique_prompts_rollout 64 --gradient_checkpointing --beta 0.005"
    line += " --kl_placement reward"
    words = [*line.split(), "--vllm_args", '{"gpu_memory_utilization": 0.5}']
    plain = needed("ppo.py", [*words, "--vllm_sleep", "engine"], model, 8, 80)
    moved = needed("ppo.py", [*words, "--vllm_sleep", "all", "--offload", "ref"], model, 8, 80)
    assert plain > 80e9 > memory.USABLE * 80e9 > moved

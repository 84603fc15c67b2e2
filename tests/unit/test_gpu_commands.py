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

SMALL = rehearse_gpu_run.transformer(24, 896, 4864, 14, 2, 64, 151_936)
MODELS = rehearse_gpu_run.MODELS | {"Qwen2.5-0.5B-Instruct": SMALL}


def needed(script: str, words: list[str], model: model_files.Model, gpus: int, gb: float) -> float:
    """Return the bytes that a rank of a command line needs on its GPUs."""
    args = flags.parse(importlib.import_module(script.removesuffix(".py")).Args, words=words)
    _, _, found = rehearse_gpu_run.planned(args, model, gpus, gb)
    return found


@pytest.mark.parametrize(
    "page, sizes",
    [("docs/recipes.md", [8, 12, 24, 48, 80, 80]), ("docs/grpo.md", [80]), ("docs/maintainers/ppo.md", [80])],
)
def test_lines_fit_the_gpu_of_their_heading_and_name_their_data(page, sizes):
    """Of the lines that name a model of the hub: none trains it on the quickstart's sums, or needs more than a GPU."""
    found = []
    for section in re.split(r"^## ", (ROOT / page).read_text().replace("\\\n", " "), flags=re.MULTILINE):
        heading = re.match(r"(\d+) GB( on each of 8)?", section) or re.match(r"()()", section)
        for script, line in re.findall(r"(grpo|ppo)\.py (--model_name_or_path Qwen/[^\n#]*)", section):
            words = shlex.split(line)
            name = words[words.index("--model_name_or_path") + 1].removeprefix("Qwen/")
            gb = int(heading[1] or 80)
            most = needed(script, words, MODELS[name], 8 if heading[2] else 1, gb)
            assert most < memory.USABLE * 1e9 * gb and "--dataset" in words, line
            found.append(gb)
    assert found == sizes


def test_without_sleeping_in_turns_a_line_does_not_fit():
    """Without the flags that free memory in turns verl's line needs more than the card: the engine's share counts."""
    model = model_files.Model(7 * 10**9, 30, 4096, 11008, 32, 32, 128, 102_400)
    line = "--num_samples_per_prompt_rollout 1 --num_unique_prompts_rollout 64 --gradient_checkpointing --beta 0.005"
    line += " --kl_placement reward"
    words = [*line.split(), "--vllm_args", '{"gpu_memory_utilization": 0.5}']
    plain = needed("ppo.py", [*words, "--vllm_sleep", "engine"], model, 8, 80)
    moved = needed("ppo.py", [*words, "--vllm_sleep", "all", "--offload", "ref"], model, 8, 80)
    assert plain > 80e9 > memory.USABLE * 80e9 > moved

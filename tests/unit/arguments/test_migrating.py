"""The command lines of docs/flags.md: bash expands them as they stand there, and each passes a dry run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet
import pytest
import rehearse_gpu_run
import translate
import translation_input as reading
from helpers import ROOT
from submitted_jobs import submit

from runtime.arguments import flags
from runtime.training import memory
from runtime.training.model_files import Model, model_of

PAGE = (ROOT / "docs" / "flags.md").read_text()
# What the page calls, as functions that print the words they got: a NUL after each, \1 after the last.
RECORD = """
python() { printf '%s\\0' python "$@" $'\\1'; }
accelerate() { printf '%s\\0' accelerate "$@" $'\\1'; }
"""


NAMES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
# What the config.json of each model of the page says: NAMES, the vocabulary, and whether its head is the embedding.
MODELS = {
    "Qwen/Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 151_936, True),
    "Qwen/Qwen2.5-0.5B-Instruct": (24, 896, 4864, 14, 2, 151_936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (28, 1536, 8960, 12, 2, 151_936, True),
    "Qwen/Qwen2.5-7B-Instruct": (28, 3584, 18944, 28, 4, 152_064, False),
    "Qwen/Qwen2.5-3B": (36, 2048, 11008, 16, 2, 151_936, True),
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": (28, 1536, 8960, 12, 2, 151_936, True),
    "allenai/Llama-3.1-Tulu-3-8B-DPO": (32, 4096, 14336, 32, 8, 128_264, False),
    "deepseek-ai/deepseek-llm-7b-chat": (30, 4096, 11008, 32, 32, 102_400, False),
}


def needed(script: str, words: list[str], model: Model, gpus: int, gb: float) -> float:
    """Return the memory that a rank of a command line needs on its GPUs."""
    args = flags.parse(importlib.import_module(script.removesuffix(".py")).Args, words=words)
    *_, found = rehearse_gpu_run.planned(args, model, gpus, gb)
    return found


def blocks() -> dict[str, str]:
    """Heading -> the bash under it."""
    return dict(re.findall(r"^## (.*?)\n.*?```bash\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE))


def commands(script: str, home: Path) -> list[list[str]]:
    """The words of each command of a script of bash."""
    shell = ["bash", "-euc", RECORD + script]
    said = subprocess.run(shell, env=os.environ | {"HOME": str(home)}, capture_output=True, check=True, text=True)
    found = [[]]
    for word in said.stdout.split("\0")[:-1]:
        if word == "\1":
            found.append([])
        else:
            found[-1].append(word)
    return found[:-1]


@pytest.fixture(scope="module")
def place(tiny, tmp_path_factory) -> Path:
    """A folder in which every name of the page is there: models, and data in the form of each framework."""
    import datasets

    place = tmp_path_factory.mktemp("migrating")
    for name in MODELS:
        shutil.copytree(tiny, place / name)
        config = json.loads((tiny / "config.json").read_text()) | {"max_position_embeddings": 8192}
        (place / name / "config.json").write_text(json.dumps(config))
    chats = []
    for i in range(90):
        messages = [
            {"role": "user", "content": f"What is {i} + 1?"},
            {"role": "assistant", "content": f"It is {i + 1}."},
        ]
        chats.append({"messages": messages, "ground_truth": str(i + 1), "dataset": "MATH"})
    unknown = json.dumps({"func_name": "validate_lowercase"})
    chats.append({"messages": chats[0]["messages"], "ground_truth": unknown, "dataset": "ifeval"})
    mixed = datasets.DatasetDict({"train": datasets.Dataset.from_list(chats)})
    mixed.save_to_disk(place / "allenai" / "RLVR-GSM-MATH-IF-Mixed-Constraints")
    rows = [{"prompt": chat["messages"][:1], "solution": chat["ground_truth"]} for chat in chats[:90]]
    polaris = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    polaris.save_to_disk(place / "HuggingFaceH4" / "Polaris-Dataset-53K")
    (place / "data" / "gsm8k").mkdir(parents=True)
    for name, numbers in (("train", range(1100)), ("test", range(1000, 1020))):
        rows = []
        for i in numbers:
            row = {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{i} + 1 =?"}],
                "ability": "math",
            }
            row |= {"reward_model": {"style": "rule", "ground_truth": str(i + 1)}, "extra_info": {"index": i}}
            rows.append(row)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / f"data/gsm8k/{name}.parquet")
    for split, numbers in (("train", range(500)), ("test", range(500, 520))):
        rows = [{"question": f"{i} + 1 =?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in numbers]
        datasets.Dataset.from_list(rows).save_to_disk(place / f"openai/gsm8k:main@{split}")
    (place / "data" / "countdown").mkdir()
    for name, numbers in (("train", range(2, 302)), ("test", range(302, 322))):
        rows = []
        for i in numbers:
            text = f"User: Using the numbers {[i, 2]}, make {i * 2}.\nAssistant: Let me solve this.\n<think>"
            row = {"target": i * 2, "nums": [i, 2], "data_source": "countdown", "ability": "math"}
            row |= {"prompt": [{"role": "user", "content": text}], "extra_info": {"split": name, "index": i}}
            row["reward_model"] = {"style": "rule", "ground_truth": {"target": i * 2, "numbers": [i, 2]}}
            rows.append(row)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / f"data/countdown/{name}.parquet")
    (place / "tinyzero.py").write_text(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1])
    with open(place / "data" / "code.jsonl", "w") as lines:
        for i in range(140):
            tests = json.dumps({"inputs": [f"{i}\n"], "outputs": [f"{i + 1}\n"]})
            row = {"query_id": str(i), "task": "code", "prompt": f"Read n, print n + {i}.", "input_output": tests}
            lines.write(json.dumps(row) + "\n")
    return place


GSM8K = [
    "500 problems, evaluation on other data;",
    "500 gsm8k (gsm8k)",
    "64 prompts x 8 samples = 512 samples",
    "1 optimizer step(s)",
]
SAID = {  # what the start of each run says about it
    "GSM8K with one GPU of 24 GB": GSM8K,
    "GSM8K with one GPU of 80 GB": GSM8K,
    "GSM8K with eight GPUs": GSM8K,
    "TRL": ["90 problems", "90 Polaris-Dataset-53K (math)", "8 prompts x 8 samples", "preset     trl 1.16.0"],
    "TinyZero": [
        "300 problems, evaluation on other data;",
        "300 train (tinyzero.py:score)",
        "256 prompts x 1 samples",
        "4 optimizer step(s)",
        "prompt     'User: Using the numbers",
        "Let me solve this.\\n<think>'",
        "not as there: the loss is a mean of micro-batch means there",
    ],
    "open-instruct": [
        "74 problems, evaluation on other data;",
        "74 RLVR-GSM-MATH-IF-Mixed-Constraints (math)",
        "48 prompts x 16 samples = 768 samples",
        "13020 steps, 9999360 samples, 26040 optimizer steps",
        "12 rank(s)",
        "1 engine(s) on ranks of their own",
        "<|user|>\\nWhat is",
    ],
    "verl": [
        "1080 problems, evaluation on other data;",
        "1080 train (gsm8k)",
        "1024 prompts x 1 samples = 1024 samples",
        "4 optimizer step(s)",
        "15 steps",
    ],
    "AReaL": [
        "76 problems, 64 more held out;",
        "76 code (code)",
        "64 prompts x 16 samples",
        "4 optimizer step(s)",
        "Read n, print n + ",
    ],
}


def needs() -> dict[str, tuple[int, int, str]]:
    """Section -> (GPUs, GB of one, predicted peak as the page says it)."""
    rows = re.findall(r"^\| \[(.*?)\]\(#\S+\) \| (\d+) x (\d+) GB \| (.*?) \|$", PAGE, re.MULTILINE)
    return {name: (int(gpus), int(size), peak) for name, gpus, size, peak in rows}


@pytest.mark.integration
@pytest.mark.parametrize("heading", blocks())
def test_a_command_line_of_the_page_fits_its_gpus(heading, tmp_path):
    """Its predicted peak, of the model in its real size, is below nine tenths of the card, and as the page says it."""
    gpus, size, said = needs()[heading.partition(":")[0]]
    for words in commands(blocks()[heading], Path("/home")):
        at = next(i for i, word in enumerate(words) if word in ("grpo.py", "ppo.py"))
        name = words[words.index("--model_name_or_path") + 1].removeprefix("/home/")
        *numbers, vocabulary, tied = MODELS[name]
        config = dict(zip(NAMES, numbers, strict=True)) | {"vocab_size": vocabulary}
        model = model_of(config, tied=tied)
        found = needed(words[at], words[at + 1 :], model, gpus, size)
        assert found < memory.USABLE * size * 1e9, found
        assert f"{found / 1e9:.0f} GB" == said.partition(",")[0]


@pytest.mark.parametrize("page, gpus", [("docs/run.md", 1), ("docs/grpo.md", 1), ("docs/ppo.md", 1)])
def test_gpu_lines_of_other_pages_fit_80_gb_and_name_their_data(page, gpus):
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
        found = needed(script, words, model_of(config, tied=tied), gpus, 80)
        assert found < memory.USABLE * 80e9, (line, found)
        assert "--dataset" in words, line


def test_without_sleeping_in_turns_a_line_does_not_fit():
    """Without the flags that free memory in turns verl's line needs more than the card: the engine's share counts."""
    model = Model(7 * 10**9, 30, 4096, 11008, 32, 32, 128, 102_400)
    line = "--num_samples_per_prompt_rollout 1 --num_unique_prompts_rollout 64 --gradient_checkpointing --beta 0.005"
    line += " --kl_placement reward"
    words = [*line.split(), "--vllm_args", '{"gpu_memory_utilization": 0.5}']
    plain = needed("ppo.py", [*words, "--vllm_sleep", "engine"], model, 8, 80)
    moved = needed("ppo.py", [*words, "--vllm_sleep", "all", "--offload", "ref"], model, 8, 80)
    assert plain > 80e9 > memory.USABLE * 80e9 > moved
    assert moved.phases["sampling"] == pytest.approx(0.5 * 80e9 + memory.CUDA)


def test_the_reward_file_of_the_page_pays_a_tenth_for_the_form(place, monkeypatch):
    monkeypatch.chdir(place)
    namespace = {}
    exec((place / "tinyzero.py").read_text(), namespace)
    truth = json.dumps({"target": 6, "numbers": [3, 2]})
    for response, expected in (("<answer> 3 * 2 </answer>", 1), ("<answer> 3 + 2 </answer>", 0.1), ("3 * 2", 0)):
        assert namespace["score"](f"so </think> {response}", truth, {}).score == expected


FAST = ("verl: PPO on GSM8K", "GSM8K with eight GPUs: GRPO")  # a migration, and a job of several ranks


@pytest.mark.integration
@pytest.mark.parametrize("heading", [pytest.param(h, marks=[] if h in FAST else pytest.mark.slow) for h in blocks()])
def test_a_command_line_of_the_page_passes_a_dry_run(heading, place, monkeypatch, capsys):
    """Submitted where it is, then checked and shown by the script itself as on as many GPUs."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("HOME", str(place))
    found = commands(blocks()[heading], place)
    assert len(found) == 1
    for words in found:
        if words[1] == "scripts/submit.py":
            at = words.index("--")
            assert submit.main([*words[2:at], "--dry_run", *words[at:]]) == 0
            assert "--num_machines 2 --num_processes 16" in capsys.readouterr().out
        file = next(i for i, word in enumerate(words) if word in ("grpo.py", "ppo.py"))
        script = importlib.import_module(words[file].removesuffix(".py"))
        args = flags.parse(script.Args, words=[*words[file + 1 :], "--dry_run"])
        monkeypatch.setenv("WORLD_SIZE", str(needs()[heading.partition(":")[0]][0]))
        ready = script.preflight(args)
        script.main(dataclasses.replace(args, vllm_tensor_parallel_size=1), ready)  # no device here has shards
        said = capsys.readouterr().out
        for text in SAID[heading.partition(":")[0]]:
            assert text in said, said
        assert not ready[2].exists(), "a dry run leaves nothing"


def test_every_word_of_their_command_lines_is_known():
    """Translated as a whole; the words of which the section says that they have no counterpart are no keys today."""
    sections = re.findall(r"^## ([\w-]+):.*?\n(.*?)(?=^## )", PAGE, re.DOTALL | re.MULTILINE)
    sections = {name: text for name, text in sections if "```text" in text}
    assert set(sections) == {"TRL", "open-instruct", "verl", "TinyZero", "AReaL"}
    for name, text in sections.items():
        command = reading.command_of(
            shlex.split(re.search(r"```text\n(.*?)```", text, re.DOTALL)[1].replace("\\\n", " "))
        )
        found = translate.recognized(command)
        assert found == name.lower()
        ours = translate.translate(command, found)
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        unknown = [said.partition("=")[0] for said in ours.absent if ": no key of" in said]
        assert [key for key in unknown if f"`{key}" not in prose] == [], name


def test_every_system_has_its_command_line():
    assert {heading.partition(":")[0] for heading in blocks()} == set(SAID) == set(needs())

"""The command lines of docs/migrating.md: bash expands them as they stand there, and each passes a dry run."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet
import pytest
from helpers import ROOT
from jobs import submit

from runtime import flags

PAGE = (ROOT / "docs" / "migrating.md").read_text()
# What the page calls, as functions that print the words they got: a NUL after each, \1 after the last.
RECORD = """
python() { printf '%s\\0' python "$@" $'\\1'; }
accelerate() { printf '%s\\0' accelerate "$@" $'\\1'; }
"""


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
    models = ("allenai/Llama-3.1-Tulu-3-8B-DPO", "models/deepseek-llm-7b-chat", "Qwen/Qwen2.5-Coder-1.5B-Instruct")
    for name in models:
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
    mixed = datasets.DatasetDict({"train": datasets.Dataset.from_list(chats)})
    mixed.save_to_disk(place / "ai2-adapt-dev" / "math_ground_truth_zs")
    (place / "data" / "rlhf" / "gsm8k").mkdir(parents=True)
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
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), place / f"data/rlhf/gsm8k/{name}.parquet")
    with open(place / "data" / "code.jsonl", "w") as lines:
        for i in range(140):
            tests = json.dumps({"inputs": [f"{i}\n"], "outputs": [f"{i + 1}\n"]})
            row = {"query_id": str(i), "task": "code", "prompt": f"Read n, print n + {i}.", "input_output": tests}
            lines.write(json.dumps(row) + "\n")
    return place


SAID = {  # what the start of each run says about it
    "open-instruct": [
        "58 problems, evaluation on other data;",
        "58 math_ground_truth_zs (math)",
        "48 prompts x 16 samples = 768 samples",
        "1302 steps, 999936 samples, 2604 optimizer steps",
        "<|user|>\\nWhat is",
    ],
    "verl": [
        "1080 problems, evaluation on other data;",
        "1080 train (gsm8k)",
        "1024 prompts x 1 samples = 1024 samples",
        "4 optimizer step(s)",
        "210 steps",
    ],
    "AReaL": [
        "76 problems, 64 more held out;",
        "76 code (code)",
        "64 prompts x 1 samples",
        "4 optimizer step(s)",
        "Read n, print n + ",
    ],
}


@pytest.mark.parametrize("heading", blocks())
def test_a_command_line_of_the_page_passes_a_dry_run(heading, place, monkeypatch, capsys):
    """Submitted where it is, then checked and shown by the script itself as on eight GPUs."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("HOME", str(place))
    found = commands(blocks()[heading], place)
    assert len(found) == (4 if heading.startswith("open-instruct") else 1)
    for words in found:
        if words[1] == "scripts/submit.py":
            at = words.index("--")
            assert submit.main([*words[2:at], "--dry_run", *words[at:]]) == 0
            assert "--num_processes 8" in capsys.readouterr().out
        file = next(i for i, word in enumerate(words) if word in ("grpo.py", "ppo.py"))
        script = importlib.import_module(words[file].removesuffix(".py"))
        args = flags.parse(script.Args, words=[*words[file + 1 :], "--dry_run"])
        ready = script.preflight(args)
        script.main(dataclasses.replace(args, vllm_tensor_parallel_size=1), ready)  # no device here has shards
        said = capsys.readouterr().out
        for text in SAID[heading.partition(":")[0]]:
            assert text in said, said
        assert not ready[2].exists(), "a dry run leaves nothing"


def test_every_system_has_its_command_line():
    assert {heading.partition(":")[0] for heading in blocks()} == set(SAID)

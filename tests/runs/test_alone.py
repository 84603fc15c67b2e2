"""The files that stand alone: copied into an empty folder, each trains there without this project."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from helpers import ROOT
from safetensors.torch import load_file

FILES = ("grpo_min", "ppo_min")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("rollout", [pytest.param("vllm", marks=pytest.mark.slow), "hf"])
@pytest.mark.integration
def test_a_copy_in_an_empty_folder_trains_two_steps(name, rollout, tiny, tmp_path):
    """The engine has the new weights in the second step, which moved far, and they are saved."""
    edits = {  # a random model is never right, and never ends
        "return float(numbers[-1:] == [truth])": "return float(len(response) % 2)",
        "r.truncated = r.ids[-1] not in stop_ids": "r.truncated = False",
    }
    text = (ROOT / "variants" / f"{name}.py").read_text()
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / f"{name}.py").write_text(text)
    words = f"--model_name_or_path {tiny} --rollout {rollout} --steps 2 --prompts 4 --group 4 --micro_batch 2"
    words += " --max_response_length 8 --eval_prompts 4 --learning_rate 1e-2 --temperature 0.7 --output model"
    line = [sys.executable, "-I", f"{name}.py", *words.split()]  # -I: no PYTHONPATH, and no folder of the script
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    differences = [float(x) for x in re.findall(r"logprob_diff ([\d.e+-]+)", done.stdout)]
    assert len(differences) == 2 and 0 < max(differences) < 1e-4, done.stdout
    for step in (0, 2):
        assert re.search(rf"step +{step}  pass@1 [01]\.\d+ \+- 0\.\d+ of 4 held out", done.stdout), done.stdout
    assert "on the same 4 problems" in done.stdout
    saved = load_file(tmp_path / "model" / "model.safetensors")
    before = load_file(tiny / "model.safetensors")
    assert max((saved[key] - before[key]).abs().max().item() for key in before) > 5e-3
    assert {path.name for path in tmp_path.iterdir()} <= {f"{name}.py", "model", "__pycache__"}


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_asks_for_is_what_this_project_uses(name):
    """Its inline metadata (PEP 723) has the pins of requirements.txt."""
    text = (ROOT / "variants" / f"{name}.py").read_text()
    block = re.search(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", text)["content"]
    metadata = tomllib.loads(re.sub(r"(?m)^# ?", "", block))
    pins = (ROOT / "requirements.txt").read_text()
    assert [re.match(r"\w+", one)[0] for one in metadata["dependencies"]] == ["torch", "transformers", "vllm"]
    for one in [x.partition(";")[0] for x in metadata["dependencies"]]:
        assert re.search(rf"(?m)^{re.escape(one)}\s", pins), one
    cpu = (ROOT / "requirements-cpu.txt").read_text()
    for name in re.findall(r"uv pip install --torch-backend cpu (.*)", text)[0].split():
        assert re.search(rf"(?m)^{re.escape(name)}(\+cpu)?$", cpu), name


def test_the_first_two_functions_are_the_ones_to_replace():
    for name in FILES:
        found = re.findall(r"(?m)^def (\w+)", (ROOT / "variants" / f"{name}.py").read_text())
        assert found[:2] == ["problems", "reward"], name


def test_no_file_of_the_project_is_in_the_way(tmp_path):
    """--help answers in an empty folder, before the slow imports."""
    for name in FILES:
        shutil.copy(ROOT / "variants" / f"{name}.py", tmp_path)
        line = [sys.executable, "-I", "-X", "importtime", f"{name}.py", "--help"]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "--model_name_or_path" in done.stdout, done.stderr
        assert "| torch" not in done.stderr


def replaced(folder):
    """Import grpo_min.py with the functions of docs/grpo.md in place of its own."""
    page = (ROOT / "docs" / "grpo.md").read_text()
    (functions,) = re.findall(r"```python\n(def problems.*?)```", page, re.DOTALL)
    text = (ROOT / "variants" / "grpo_min.py").read_text()
    start, end = text.index("def problems("), text.index("def parse_args(")
    (folder / "replaced.py").write_text(f"{text[:start]}import json\n{functions}\n\n{text[end:]}")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("replaced")
    finally:
        sys.path.remove(str(folder))


def test_the_page_s_gsm8k_trains(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{k} plus 1000?", "answer": f"It is {k} + 1000.\n#### 1,{k:03}"} for k in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = replaced(tmp_path)
    assert small.problems()[7] == ("7 plus 1000?", "1007")
    assert small.reward("It is 1,007", "1007") == 1 and small.reward("1007 and 1", "1007") == 0
    words = f"--model_name_or_path {tiny} --rollout hf --steps 1 --max_response_length 4 --eval_prompts 4"
    small.main(small.parse_args(words.split()))
    assert "step   1  reward 0.000" in capsys.readouterr().out

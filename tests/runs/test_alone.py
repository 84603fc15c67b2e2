"""The files that stand alone, and the notebook: copied into an empty folder, each trains there without this project."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib

import notebook
import pytest
from helpers import ROOT
from safetensors.torch import load_file

FILES = ("grpo_min", "ppo_min")


def code_of(name: str) -> str:
    """The text of a file that stands alone; the cells of the notebook, one after the other."""
    if name != "notebook":
        return (ROOT / "variants" / f"{name}.py").read_text()
    cells = json.loads(notebook.NOTEBOOK.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("name", [*FILES, "notebook"])
@pytest.mark.parametrize("rollout", [pytest.param("vllm", marks=pytest.mark.slow), "hf"])
@pytest.mark.integration
def test_a_copy_in_an_empty_folder_trains_two_steps(name, rollout, tiny, tmp_path):
    """The engine has the new weights in the second step, which moved far, and they are saved."""
    words = f"--model_name_or_path {tiny} --rollout {rollout} --steps 2 --prompts 4 --group 4 --micro_batch 2"
    words += " --max_response_length 8 --eval_prompts 4 --learning_rate 1e-2 --temperature 0.7 --output model"
    edits = {  # a random model is never right, and never ends
        "return float(numbers[-1:] == [truth])": "return float(len(response) % 2)",
        "r.truncated = r.ids[-1] not in stop_ids": "r.truncated = False",
    }
    line = [sys.executable, "-I", f"{name}.py", *words.split()]  # -I: no PYTHONPATH, and no folder of the script
    if name == "notebook":  # as its reader changes the settings
        edits['["--steps", "20"]'] = str(words.split())
        line = line[:3]
    text = code_of(name)
    for old, new in edits.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (tmp_path / f"{name}.py").write_text(text)
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


def test_the_notebook_has_the_code_of_the_file():
    assert notebook.NOTEBOOK.read_text() == notebook.refreshed(), "run python tests/notebook.py"
    cells = json.loads(notebook.NOTEBOOK.read_text())["cells"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells if "outputs" in cell)
    named = re.findall(r"`(?:python )?([\w/]+\.(?:md|py))", "".join("".join(cell["source"]) for cell in cells))
    assert len(named) > 5 and [name for name in named if not (ROOT / name).is_file()] == []


def test_the_notebook_finds_the_model_of_its_clone(tiny, tmp_path, monkeypatch):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "SmolLM2-135M-Instruct").symlink_to(tiny)
    monkeypatch.chdir(tmp_path / "notebooks")
    monkeypatch.setattr(subprocess, "run", lambda line, check: None)  # what it installs is installed
    names: dict = {}
    exec(code_of("notebook").partition("\nimport torch\n")[0], names)
    assert names["args"].model_name_or_path == "models/SmolLM2-135M-Instruct"
    assert names["os"].path.isfile("models/SmolLM2-135M-Instruct/config.json")


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


def test_no_file_of_the_project_is_in_the_way(tmp_path):
    """--help answers in an empty folder, before the slow imports."""
    for name in FILES:
        shutil.copy(ROOT / "variants" / f"{name}.py", tmp_path)
        line = [sys.executable, "-I", "-X", "importtime", f"{name}.py", "--help"]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "--model_name_or_path" in done.stdout, done.stderr
        assert "| torch" not in done.stderr


TASKS = {  # heading of the page's functions -> a problem and its truth, right responses to it, wrong ones
    "GSM8K": ("7 plus 1000?", "1007", ["It is 1,007"], ["1007 and 1", "", "7"]),
    "Countdown": (
        "Reach 1 with each of 9, 2 and 4 once, by +, - and *.",
        "1 9 2 4",
        ["9-2*4", "We have 9 - 2*4 = 1.", "So: -2 * 4 + 9"],
        ["9-2-4", "1", "", "9 - 2*4 or 1", "9**2*4", "9-2*4-0", "4*2-9"],
    ),
}


@pytest.mark.parametrize("task", TASKS)
def test_the_page_s_tasks_train(task, tiny, tmp_path, monkeypatch, capsys):
    """In place of the file's own problems and reward, two steps each."""
    page = (ROOT / "docs" / "grpo.md").read_text()
    (functions,) = re.findall(rf"\n(# {task}\n.*?)(?=```|# Countdown)", page, re.DOTALL)
    text = code_of("grpo_min")
    start, end = text.index("def problems("), text.index("def parse_args(")  # the first two functions
    text = f"{text[:start]}import json\nfrom math import prod\n\n{functions}\n\n{text[end:]}"
    (tmp_path / f"own_{task}.py").write_text(text)
    rows = [{"question": f"{k} plus 1000?", "answer": f"It is {k} + 1000.\n#### 1,{k:03}"} for k in range(20)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    small = importlib.import_module(f"own_{task}")
    question, truth, right, wrong = TASKS[task]
    assert question in dict(small.problems()) or task == "Countdown"
    assert [small.reward(response, truth) for response in right] == [1.0] * len(right)
    assert [small.reward(response, truth) for response in wrong] == [0.0] * len(wrong)
    words = f"--model_name_or_path {tiny} --rollout hf --steps 2 --max_response_length 4 --eval_prompts 4"
    small.main(small.parse_args(words.split()))
    assert "step   2  reward 0.000" in capsys.readouterr().out

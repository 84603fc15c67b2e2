"""A normal run prints its own lines alone; what libraries say is in a file; what matters is on the console."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PROBLEMS, ROOT, Run, clean_environment, command

from runtime.system import process

NOISY = """
import logging, sys, warnings

logger = logging.getLogger("noisy")
logger.setLevel(logging.DEBUG)
logger.propagate = False  # as DeepSpeed, vLLM and transformers do it
logger.addHandler(logging.StreamHandler(sys.stdout))

def speak(text):
    logger.warning(text)
    logger.error("a library's error")
    logger.debug("many of these")
    logger.info("GET https://me:pa55word@hub/model")
    warnings.warn("a library's warning", UserWarning)
"""
SCRIPT = """
import logging, sys, warnings
from pathlib import Path
from runtime.system import library_logs

place, end = Path(sys.argv[1]), sys.argv[2]
library_logs.quiet_libraries()
library_logs.quiet_libraries()
import noisy

noisy.speak("nobody needs this")
library_logs.write_to(place)
noisy.speak("nor is this")
logging.getLogger("mine").warning("my own message")
warnings.warn("my own warning")
print("my own print")
if end == "raise":
    raise ValueError("my own error")
if end == "crash":
    import ctypes, faulthandler
    faulthandler.enable()
    ctypes.string_at(0)
"""


@pytest.mark.parametrize("end", ["return", "raise", "crash"])
def test_messages_of_libraries_go_to_the_file(tmp_path, end):
    """Before and after the folder exists; errors, tracebacks, crashes and the user's own words stay on the console.

    A line of the file says who speaks and how loud, and has no password in it.
    """
    (tmp_path / "installed" / "noisy-1.0.dist-info").mkdir(parents=True)  # packages can be in any folder of sys.path
    (tmp_path / "installed" / "noisy.py").write_text(NOISY)
    script = tmp_path / "installed_not" / "script.py"  # the folder's name begins with that of the library's
    script.parent.mkdir()
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path / 'installed'}"}
    line = [sys.executable, str(script), str(tmp_path), end]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60)
    console = done.stdout + done.stderr
    for words in ("a library's error", "my own message", "my own warning", "my own print"):
        assert words in console
    for words in ("nobody needs this", "nor is this", "a library's warning"):
        assert words not in console
    file = (tmp_path / "libraries.log").read_text()
    for words in ("WARNING noisy: nobody needs this", "nor is this", "ERROR noisy: a library's error"):
        assert words in file
    assert "a library's warning" in file
    assert "GET https://***@hub/model" in file and "pa55word" not in file
    assert "my own" not in file and "DEBUG" not in file
    if end == "raise":
        assert "ValueError: my own error" in console
    if end == "crash":
        assert "Segmentation fault" in console


def test_a_folder_with_the_project_is_no_library(tmp_path):
    """Packages may be installed next to it, or where Python was started: the empty path is a prefix of every other."""
    (tmp_path / "noisy-1.0.dist-info").mkdir()
    line = [sys.executable, "-c", "from runtime.system import library_logs; print('' in library_logs.LIBRARIES)"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "False\n", done.stderr


OURS = "run |hardware |data |from |a step |the run |memory |prompt |ids |KL: |eval after |step |  '|warning: "
OURS += "|resuming |rows |sizes |critic |stopping |  phases |  parts |defaults |  --|verdict |           |doctor "


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, ranks, rollout, words",
    [
        ("grpo", 1, "vllm", []),
        ("ppo", 2, "vllm", []),
        ("grpo", 2, "hf", []),
        ("grpo", 1, "hf", ["--dataset", str(PROBLEMS), "--track", "wandb", "tensorboard"]),
    ],
)
def test_a_normal_run_prints_its_own_lines_alone(tiny, tmp_path, script, ranks, rollout, words):
    more = ["--total_steps", "2", "--save_every", "1", "--beta", "0.1", *words]
    line = command(tiny, tmp_path, *more, script=script, ranks=ranks, rollout=rollout)
    run = Run(["env", "WANDB_MODE=offline", *line], tmp_path / "log")
    assert run.end(240) == 0, run.text()
    others = [line for line in run.text().splitlines() if line and not line.startswith(tuple(OURS.split("|")))]
    assert not others, "\n".join(others)
    assert "Setting accelerator to CPU" in Path(tmp_path / "run" / "libraries.log").read_text()


@pytest.mark.integration
@pytest.mark.parametrize(
    "before", ["import huggingface_hub", "import datasets", ""], ids=lambda text: text or "nothing"
)
def test_progress_bars_are_off_whatever_was_imported_before(before):
    """huggingface_hub reads its variable when it is imported, which a data set of files does before the environment."""
    env = {k: v for k, v in clean_environment().items() if not k.startswith("HF_HUB")}
    code = f"{before}\nfrom runtime.system import process\nprocess.prepare_environment()\n"
    code += "from huggingface_hub.utils import are_progress_bars_disabled\nprint(are_progress_bars_disabled())"
    line = [sys.executable, "-c", code]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, env=env)
    assert done.stdout == "True\n", done.stderr


def test_what_is_printed_on_rank_0_has_no_secrets(capsys, monkeypatch):
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        process.print_on_rank_0("rows of https://me:pa55word@hub/data cannot be used")
    assert capsys.readouterr().out == "rows of https://***@hub/data cannot be used\n"


def test_pass_at_1_is_shown_once():
    """With one evaluation sample pass@k is pass@1."""
    from runtime.run import logger

    result = {"step": 3, "eval/pass@1": 0.25, "eval/samples": 1, "eval/pass@k": 0.25, "eval/length_mean": 7.5}
    result |= {"eval/truncated_frac": 0.5, "eval/problems": 8}
    assert logger.eval_line(result).count("pass@") == 1
    assert "pass@4 0.500" in logger.eval_line(result | {"eval/samples": 4, "eval/pass@k": 0.5})

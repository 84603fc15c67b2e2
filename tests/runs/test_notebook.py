"""notebooks/quickstart.ipynb: its cells are executed in order, in a copy of the project, from the notebook's folder."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, clean_environment, read_jsonl

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"
SETUP = 'run("make setup")'  # what `make test` has done already


def cells(kind: str) -> list[str]:
    """The sources of the cells of one kind, in order."""
    return ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def test_the_notebook_has_no_outputs_and_names_files_that_exist():
    """Outputs would be of another machine; a page or a script that it sends to must be there."""
    content = json.loads(NOTEBOOK.read_text())
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert sum(source.count(SETUP) for source in cells("code")) == 1
    text = "\n".join(cells("markdown") + cells("code"))
    named = set(
        re.findall(
            r"(?<![\w/])((?:docs|scripts|studies)/[\w/]+\.(?:md|py)|grpo\.py|kl_estimators\.py|README\.md)", text
        )
    )
    assert len(named) > 8 and [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(tmp_path):
    """With 3 steps of training in place of 20: all cells pass, and what they draw, write and compare is there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    for name in listed.stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    for name in (".venv", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    sources = "\n\n".join(cells("code")).replace(SETUP, "").replace("STEPS = 20", "STEPS = 3")
    (tmp_path / "cells.py").write_text(sources)
    line = [sys.executable, str(tmp_path / "cells.py")]
    done = subprocess.run(
        line, cwd=tmp_path / "notebooks", capture_output=True, text=True, timeout=1500, env=clean_environment()
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "runs" / "notebook" / "quickstart"
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3]
    assert [record["step"] for record in read_jsonl(run / "eval.jsonl")] == [0, 3]
    assert (run / "curves.png").is_file() and (run / "model").is_dir()
    for words in (
        "2 + 6 = 8 -> 1.0",
        "The answer is 9. -> 0.0",
        "after step  0: pass@1",
        "verdict    ",
        '= "centered"',
    ):
        assert words in done.stdout, words
    assert len(read_jsonl(next((run.parent).glob("mine__*")) / "metrics.jsonl")) == 2

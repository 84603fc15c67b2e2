"""scripts/check.py as a command: the published mistakes are found, harmless edits and the variants fail nothing."""

from __future__ import annotations

import json
import os
import re

import fork_server
import pytest
import script_edits
import variant
from helpers import ROOT
from script_edits import ALSO, HARMLESS, MISTAKES, SUBTLE, unseen

pytestmark = pytest.mark.slow
WITHOUT_LEARNING = ("--parts", "1", "2", "3", "4", "6")
NO_GRADIENTS = ("lora", "truncated")  # they take vLLM alone, so their runs are left out


def check(text: str, folder, *words: str) -> tuple[int, dict, str]:
    """(exit code, report, output) of the command on a script with this text."""
    script = folder / "mine.py"
    script.write_text(text)
    report = folder / "report.json"
    line = [str(ROOT / "scripts" / "check.py"), str(script), "--json", str(report), *words]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    (code,), printed = fork_server.run(line, folder / "log", environment, 600, vllm=False)
    assert report.is_file(), printed
    return code, json.loads(report.read_text()), printed


def failed(report: dict) -> list[str]:
    return [f"{f['part']} {f['name']}: {f['text']}" for f in report["findings"] if f["state"] == "FAIL"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("edit", MISTAKES, ids=lambda edit: edit.name)
def test_a_published_mistake_is_found_where_it_is(edit, tmp_path):
    code, report, printed = check(edit.text(), tmp_path, *WITHOUT_LEARNING)
    assert code == 1
    assert edit.parts & set(report["failed"]), printed
    places = [f["place"] for f in report["findings"] if f["state"] == "FAIL" and f["part"] in edit.parts]
    before, after = (
        {line.split("  # ")[0].strip() for line in text.splitlines()}  # a place has no comment
        for text in ((ROOT / edit.script).read_text(), edit.text())
    )
    edited = after - before
    assert any(line in place for place in places for line in edited if line), places


@pytest.mark.timeout(900)
@pytest.mark.parametrize("edit", [*ALSO, *SUBTLE, *unseen("mistake")], ids=lambda edit: edit.name)
def test_a_further_mistake_is_found_by_its_part(edit, tmp_path):
    if not edit.parts:
        pytest.skip("no part looks at evaluations or at the seeds of vLLM's thread; other advantages are a note")
    parts = map(str, sorted(edit.parts))
    code, report, printed = check(edit.text(), tmp_path, *edit.flags, "--parts", *parts)
    assert code == 1 and set(edit.parts) & set(report["failed"]), printed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("edit", [*HARMLESS, *unseen("harmless")], ids=lambda edit: edit.name)
def test_a_harmless_edit_is_no_false_alarm(edit, tmp_path):
    code, report, printed = check(edit.text(), tmp_path, *WITHOUT_LEARNING, *edit.flags)
    assert (code, failed(report)) == (0, []), printed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", variant.names())
def test_a_variant_is_no_false_alarm(name, tmp_path):
    words = ("--teacher_name_or_path", "x") if name == "distill" else ()
    code, report, printed = check(variant.variant(name), tmp_path, *WITHOUT_LEARNING, *words)
    assert (code, failed(report)) == (0, []), printed
    states = [f for f in report["findings"] if f["name"] == "one optimizer step"]
    assert bool(states and states[0]["text"].startswith("not run")) == (name in NO_GRADIENTS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("edit, fails", [("sign of the loss", True), ("unedited", False)])
def test_a_copy_that_does_not_learn_is_worse(edit, fails, tmp_path):
    """By the rule of paired comparisons; with random rewards neither of them gains anything."""
    (found,) = [own for own in (*ALSO, *HARMLESS) if own.name == edit]
    code, report, printed = check(found.text(), tmp_path, "--parts", "5")
    learning, control = report["findings"]
    assert code == int(fails) and (learning["state"] == "FAIL") == fails, printed
    assert control["state"] == "ok" and learning["text"].endswith("worse" if fails else "no difference"), printed


def test_the_page_shows_what_the_command_prints():
    """But for seconds: the examples' edits and commands, and every finding of parts that start no run."""
    page = script_edits.PAGE.read_text()
    for edit in script_edits.EXAMPLES:
        block = re.search(rf"<!-- begin {edit.name} -->(.*?)<!-- end {edit.name} -->", page, re.DOTALL)[1]
        for line in edit.text().splitlines():
            if line not in (ROOT / edit.script).read_text().splitlines():
                assert f"+{line}" in block, "run python tests/script_edits.py"
        assert f"python scripts/check.py {edit.name}.py" in block
        assert f"exit code is {int(bool(edit.parts))}" in block


def test_a_file_that_is_no_script_ends_with_exit_code_2(tmp_path):
    (tmp_path / "other.py").write_text("x = 1\n")
    environment = dict(os.environ)
    line = [str(ROOT / "scripts" / "check.py"), str(tmp_path / "other.py")]
    (code,), printed = fork_server.run(line, tmp_path / "log", environment, 120, vllm=False)
    assert code == 2 and "has no Args, Tokens, token_loss" in printed

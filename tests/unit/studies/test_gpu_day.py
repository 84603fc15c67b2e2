"""studies/gpu_day.py: every part runs, or is skipped for the right reason, and a part that hangs costs no other."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from helpers import ROOT

spec = importlib.util.spec_from_file_location("gpu_day", ROOT / "studies" / "gpu_day.py")
gpu_day = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = gpu_day
spec.loader.exec_module(gpu_day)


def outcome(tmp_path, monkeypatch, gpu: str, code: str, *words: str) -> tuple[int, dict[str, str]]:
    """The exit code, and what became of each part, whose commands are replaced by a program ``code``."""
    plain = gpu_day.parts
    monkeypatch.setattr(gpu_day, "no_gpu", lambda: gpu)

    def short(*rest):
        for part in plain(*rest):
            yield gpu_day.Part(part.name, [sys.executable, "-c", code], 0.3 if "sleep" in code else 5, part.needs)

    monkeypatch.setattr(gpu_day, "parts", short)
    found = gpu_day.main(["--out", str(tmp_path), *words])
    rows = [row.strip("| ").split(" | ") for row in (tmp_path / "facts.md").read_text().splitlines()[2:]]
    return found, {name: result for name, result, _ in rows}


def test_without_a_gpu_its_parts_are_skipped_for_that_reason(tmp_path, monkeypatch):
    code, found = outcome(tmp_path, monkeypatch, "torch 2 finds no GPU", "print('here')")
    assert code == 0 and found.pop("tests-cpu") == "passed"
    assert set(found.values()) == {"skipped: torch 2 finds no GPU"} and len(found) == 8
    assert (tmp_path / "tests-cpu.log").read_text() == "here\n"


@pytest.mark.parametrize(("program", "said"), [("1 / 0", "exit code 1"), ("import time; time.sleep(60)", "not done")])
def test_a_part_that_fails_or_hangs_costs_no_other(tmp_path, monkeypatch, program, said):
    monkeypatch.setattr(gpu_day, "MODEL", tmp_path)
    plain = gpu_day.parts
    monkeypatch.setattr(gpu_day, "parts", lambda *rest: list(plain(*rest))[4:6])
    code, found = outcome(tmp_path, monkeypatch, "", program)
    assert code == 1 and len(found) == 2 and all(said in result for result in found.values())


def test_parts_that_have_no_time_left_are_not_begun(tmp_path, monkeypatch):
    code, found = outcome(tmp_path, monkeypatch, "", "pass", "--minutes", "0.1")
    assert code == 0 and found["curve"].startswith(("skipped: no time is left", "skipped: SmolLM2"))
    assert found["tests-cpu"] == "skipped: the tests of the GPU run instead"


def test_it_begins_with_the_parts_of_cuda_check_that_a_real_card_has(tmp_path):
    """Each is called by its name, on the GPU of the machine, with a folder of its own for what it writes."""
    first = [part for part in gpu_day.parts(tmp_path, "") if part.name != "machine"][:2]
    sys.path.insert(0, str(ROOT / "tests" / "fake_cuda"))
    import check

    named = []
    for part in first:
        _, program, *names, gpu, work, folder = part.command
        assert program == check.__file__ and (gpu, work) == ("--gpu", "--work")
        assert folder.startswith(f"{tmp_path}/") and part.needs[0]() == ""
        named += names
    assert sorted(named) == sorted(check.ON_A_GPU)
    assert gpu_day.parts(tmp_path, "no GPU")[1].needs[0]() == "no GPU"


@pytest.mark.integration
def test_this_machine_is_asked_in_a_process_of_its_own():
    assert (gpu_day.no_gpu() == "") == torch.cuda.is_available()

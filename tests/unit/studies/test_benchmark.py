"""studies/benchmark.py: runs of two checkouts in turns, and the names of machines."""

from __future__ import annotations

import benchmark
import pytest
import torch

RUN = """
import json, sys
from pathlib import Path

words = sys.argv[1:]
if "--fail" in words:
    sys.exit("what failed")
folder = Path(words[words.index("--output_dir") + 1], words[words.index("--run_name") + 1])
folder.mkdir()
steps = [{"time/step": 0.02 * k, "time/generate": 0.01 * k} for k in (5, 1, 3)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\\n" for step in steps))
"""


def test_runs_of_two_checkouts_are_timed_in_turns(tmp_path, monkeypatch, capsys):
    """The mean of every phase after the first step, and what is outside steps; a run that fails ends with its log."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "script.py").write_text(RUN)
    monkeypatch.setattr(benchmark, "ROOT", tmp_path / "here")
    benchmark.main(["--against", str(tmp_path / "there"), "script.py", "--seed", "1"])
    said = capsys.readouterr().out
    assert said.index(f"{tmp_path}/here") < said.index(f"{tmp_path}/there")
    assert said.count("generate         0.02") == said.count("step             0.04") == 2
    with pytest.raises(SystemExit):
        benchmark.main(["script.py", "--fail"])
    assert "what failed" in capsys.readouterr().err


def test_cpus_with_and_without_amx_have_two_names(monkeypatch):
    """Their rates differ so much that what was measured on one must not be compared with the other."""
    names = set()
    for amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        names.add(benchmark.machine_name(torch.device("cpu")))
    assert len(names) == 2

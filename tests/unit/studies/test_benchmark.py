"""studies/benchmark.py: its numbers and its floors."""

from __future__ import annotations

import json

import benchmark
import pytest
import torch


def small(tiny, out, **changes) -> benchmark.Args:
    """Arguments of a benchmark of the tiny model."""
    values = {
        "model_name_or_path": str(tiny),
        "dtype": "float32",
        "num_unique_prompts_rollout": 2,
        "num_samples_per_prompt_rollout": 4,
        "max_response_length": 16,
        "repeats": 2,
        "json": str(out / "numbers.json"),
    }
    return benchmark.Args(**values | changes)


def test_a_step_is_timed_next_to_its_floors(tiny, tmp_path, monkeypatch):
    """Both layouts, the optimizer and the floors are measured and written."""
    monkeypatch.setattr(benchmark, "PRODUCT_SIZE", {"cpu": 128, "cuda": 128})
    monkeypatch.setattr(benchmark, "COPY_BYTES", 10**6)
    benchmark.main(small(tiny, tmp_path))
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    seconds = numbers["seconds"]
    assert set(seconds) == {"shared", "padded", "optimizer"}
    assert all(value > 0 for values in seconds.values() for value in values)
    assert len(seconds["padded"]) == len(seconds["shared"]) == 2
    assert all(numbers["floor_seconds"][phase] > 0 for phase in ("shared", "padded", "optimizer"))
    assert 8 <= numbers["response_tokens"] <= 8 * 16


def test_flops_of_a_forward_pass_are_those_that_torch_counts(tiny_model):
    """torch counts the attention of all n^2 pairs of tokens, the formula the half that causal tokens see."""
    from torch.utils.flop_counter import FlopCounterMode

    n = 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tiny_model(input_ids=torch.arange(n)[None])
    config = tiny_model.config
    unseen = 2 * config.num_hidden_layers * config.hidden_size * n**2
    found = benchmark.forward_flops(tiny_model, [n], [], n)
    assert found + unseen == pytest.approx(counter.get_total_flops(), rel=1e-3)
    split = benchmark.forward_flops(tiny_model, [30], [(30, 10)], n)
    assert split == found, "a prompt and its continuation cost what the whole row costs"


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"repeats": 0}, "--repeats 0"),
        ({"json": "nowhere/numbers.json"}, "--json nowhere/numbers.json"),
        ({"micro_batch_tokens": 10}, "--micro_batch_tokens 10"),
    ],
)
def test_bad_arguments_are_refused(tiny, tmp_path, capsys, changes, flag):
    with pytest.raises(SystemExit) as ended:
        benchmark.main(small(tiny, tmp_path, **changes))
    assert ended.value.code == 2
    assert flag in capsys.readouterr().err


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
    benchmark.main_run(["--against", str(tmp_path / "there"), "script.py", "--seed", "1"])
    said = capsys.readouterr().out
    assert said.index(f"{tmp_path}/here") < said.index(f"{tmp_path}/there")
    assert said.count("generate         0.02") == said.count("step             0.04") == 2
    with pytest.raises(SystemExit):
        benchmark.main_run(["script.py", "--fail"])
    assert "what failed" in capsys.readouterr().err

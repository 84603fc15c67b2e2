"""studies/kl_study.py: the table of runs, the statistics on it, and docs/maintainers/kl_study.md against both."""

from __future__ import annotations

import dataclasses
import json
import math
import sys

import kl_study
import measure_kl
import numpy as np
import pandas as pd
import pytest
from helpers import ROOT

import grpo

BASES = {1: 1.0, 2: 3.0, 3: 0.5}  # exact KL without a KL term, by seed: seeds differ more than settings


def run(seed: int, beta: float, kl: float, solved: float = 0.5, estimator: str = "k2", **more: object) -> dict:
    """A row of the table."""
    same = {"model": "testbed-1", "num_mini_batches": 4, "kl_placement": "loss", "kl_gradient": "naive"}
    name = f"{estimator} {beta} {seed} {sorted(more.items())}"
    values = {"kl/exact": kl, "eval/pass@1": solved, "base pass@1": 0.3}
    return same | {"run": name, "seed": seed, "beta": beta, "kl_estimator": estimator} | values | more


def power_law(factor: float, slope: float, estimator: str = "k2", **more: object) -> list[dict]:
    """Runs whose KL is ``factor * beta ** slope`` times that of their seed without a KL term."""
    rows = []
    for seed, base in reversed(BASES.items()):
        for beta in (0.1, 1.0, 10.0):
            rows.append(run(seed, beta, base * factor * beta**slope, estimator=estimator, **more))
    return rows


@pytest.fixture
def runs() -> pd.DataFrame:
    """A part of a table: no KL, k2 that holds, k1 that drives away, k3 twice as far as k2 and better by 0.1."""
    rows = [run(seed, 0.0, base) for seed, base in BASES.items()]
    rows += power_law(0.5, -0.25) + power_law(2.0, 0.5, "k1") + power_law(1.0, -0.25, "k3", solved=0.6)
    (part,) = kl_study.parts(pd.DataFrame(rows)).values()
    return part


def test_effects_are_compared_seed_by_seed(runs):
    """The seeds' own KL, six times as large for one as for another, is no part of an effect or of its interval."""
    chosen = runs[(runs["setting"] == "k2, naive") & (runs["beta"] == 1.0)]
    logs = kl_study.ratios(runs, chosen)
    assert sorted(logs.index) == [1, 2, 3]
    assert logs.to_numpy() == pytest.approx([math.log(0.5)] * 3)
    assert kl_study.slopes(runs[runs["setting"] == "k2, naive"]).to_numpy() == pytest.approx([-0.25] * 3)
    assert kl_study.slopes(runs[runs["setting"] == "k1, naive"]).to_numpy() == pytest.approx([0.5] * 3)
    without = kl_study.ratios(runs[runs["seed"] != 2], chosen)
    assert sorted(without.index) == [1, 3], "a seed without the run to compare with is left out"


def test_two_settings_are_compared_at_the_same_seed_and_beta(runs):
    """The sign is that of the first minus the second, and a run without its partner is left out."""
    one, other = ("loss", "k3, naive"), ("loss", "k2, naive")
    runs = runs[(runs["setting"] != "k2, naive") | (runs["beta"] < 10)]
    kl = kl_study.compared(runs, "kl/exact", one, other)
    assert kl.to_numpy() == pytest.approx([math.log(2)] * 3)
    assert kl_study.compared(runs, "eval/pass@1", one, other).to_numpy() == pytest.approx([0.1] * 3)
    assert kl_study.compared(runs, "kl/exact", one, ("reward", "k1")).empty


def test_intervals_are_students(runs):
    """t of two degrees of freedom is 4.303; the mean of logarithms is shown as a ratio."""
    values = pd.Series([1.0, 2.0, 4.0])
    mean, half = kl_study.interval(values)
    assert (mean, half) == pytest.approx((7 / 3, 4.30265 * values.std() / 3**0.5), rel=1e-4)
    assert math.isnan(kl_study.interval(values[:1])[1])
    logs = np.log(values)
    assert kl_study.effect(logs, as_ratio=True).startswith("2 [0.357, 11.2]")
    assert kl_study.geometric(values) == pytest.approx((2.0, 0.3575, 11.19), rel=1e-3)
    assert kl_study.effect(pd.Series([0.0, 0.0]), as_ratio=True) == "1 for each seed (n 2)"
    assert kl_study.effect(logs, as_ratio=True).endswith(f"t {logs.mean() / logs.sem():.1f} (n 3)")


def test_what_is_averaged_differs_in_the_seed_alone():
    """Models, optimizer steps per batch, placements, estimators and, in the loss, gradients are kept apart."""
    rows = [run(seed, 0.0, 1.0) for seed in BASES]
    kinds = [
        {"num_mini_batches": 1},
        {"model": "SmolLM2"},
        {"kl_gradient": "unbiased"},
        {"estimator": "k1"},
        {"kl_placement": "reward"},
        {"beta": 0.3},
        {},
    ]
    for number, kind in enumerate(kinds):
        for seed in BASES:
            rows.append(run(seed, **({"beta": 1.0, "kl": 2.0 + number} | kind)))
    parts = kl_study.parts(pd.DataFrame(rows))
    assert list(parts) == [
        "testbed-1, 4 optimizer steps per batch",
        "testbed-1, one optimizer step per batch",
        "SmolLM2, 4 optimizer steps per batch",
    ]
    seen = []
    for part in parts.values():
        for placement in ("loss", "reward"):
            for points in kl_study.cells(part, placement).values():
                assert (points["n"] == 3).all() and (points["half"] == 0).all()
                seen += points["kl"].round(9).tolist()
    assert sorted(seen) == [2.0 + number for number in range(len(kinds))]


def write_run(folder, beta: float, measured: bool = True, begin: float = 0.25, **more: object) -> None:
    """The folder of a finished run, as far as it is read here."""
    args = grpo.Args(beta=beta, output_dir=str(folder.parent), model_name_or_path="models/testbed-1", **more)
    folder.mkdir(exist_ok=True)
    config = {"args": dataclasses.asdict(args), "git": {"commit": "0123456789abcdef"}}
    (folder / "config.json").write_text(json.dumps(config))
    metrics = [{"step": step, "reward/mean": step / 10, "kl/sequence": 1.0} for step in range(1, 11)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    evaluations = [{"step": 0, "eval/pass@1": begin}, {"step": 10, "eval/pass@1": 0.75}]
    (folder / "eval.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evaluations))
    if measured:
        (folder / measure_kl.RESULT).write_text(json.dumps({"kl/exact": 2.0 * beta, "kl/exact_stderr": 0.1}))


def test_runs_are_collected_into_a_table(tmp_path, capsys):
    """A row for each finished and measured run; another call replaces what it finds again, and keeps the rest."""
    write_run(tmp_path / "a", 0.5, num_mini_batches=4, kl_estimator="k1")
    write_run(tmp_path / "b", 0.25, measured=False)
    file = tmp_path / "data" / "table.csv.gz"
    kl_study.write(kl_study.add(kl_study.read(file), [tmp_path]), file)
    assert "1 runs are finished and measured, 1 are not" in capsys.readouterr().out
    (found,) = kl_study.read(file).to_dict("records")
    expected = {"run": "a", "model": "testbed-1", "beta": 0.5, "num_mini_batches": 4, "kl_estimator": "k1", "seed": 1}
    expected |= {"kl/exact": 1.0, "reward/mean": 1.0, "base pass@1": 0.25, "eval/pass@1": 0.75, "commit": "0123456789"}
    assert {name: found[name] for name in expected} == expected
    before = file.read_bytes()

    (tmp_path / "other").mkdir()
    write_run(tmp_path / "other" / "b", 0.25)
    kl_study.write(kl_study.add(kl_study.read(file), [tmp_path / "other"]), file)
    assert kl_study.read(file)["kl/exact"].tolist() == [1.0, 0.5]
    write_run(tmp_path / "other" / "b", 0.75)
    kl_study.write(kl_study.add(kl_study.read(file), [tmp_path / "other"]), file)
    table = kl_study.read(file)
    assert table["run"].tolist() == ["a", "b"] and table["kl/exact"].tolist() == [1.0, 1.5]
    kl_study.write(table[:1], file)
    assert file.read_bytes() == before and before[4:8] == bytes(4), "equal tables are equal files, with no time in them"


def test_runs_of_another_model_are_refused(tmp_path, capsys):
    """A test bed that was made on another machine: its runs begin elsewhere with the same seed. Nothing is written."""
    for name, seed in (("a", 1), ("b", 2), ("c", 2)):
        write_run(tmp_path / name, 0.5, seed=seed)
    table = kl_study.add(pd.DataFrame({"run": []}), [tmp_path])
    write_run(tmp_path / "b", 0.5, seed=2, begin=0.265625)
    assert kl_study.unlike(table) == []
    with pytest.raises(SystemExit) as end:
        kl_study.add(table, [tmp_path])
    said = capsys.readouterr().err
    assert end.value.code == 2 and "testbed-1 with seed 2 begin at pass@1 0.25 and 0.2656" in said and "--table" in said


def test_the_table_is_of_one_model_each():
    assert kl_study.unlike(kl_study.read(kl_study.TABLE)) == []


@pytest.mark.slow
def test_one_command_redraws_everything_in_the_docs(tmp_path, monkeypatch, capsys):
    """The figures, and every line of the table of docs/maintainers/kl_study.md; raw results stay below 1 MB."""
    assert kl_study.TABLE.stat().st_size < 1e6
    monkeypatch.setattr(sys, "argv", ["kl_study.py", "--output", str(tmp_path)])
    kl_study.main()
    printed = set(capsys.readouterr().out.splitlines())
    page = (ROOT / "docs" / "maintainers" / "kl_study.md").read_text()
    study = page.split("\n## The study\n")[1].split("\n## ")[0]
    figures = {word.split(")")[0] for word in study.split("](")[1:] if word.split(")")[0].endswith(".png")}
    assert figures == {path.name for path in tmp_path.iterdir()} and len(figures) == 2
    marked = study.split("<!-- studies/kl_study.py -->")[1::2]  # the tables of the command stand between these marks
    lines = [line for part in marked for line in part.splitlines() if line.startswith("|")]
    assert len(lines) > 10
    assert [line for line in lines if line not in printed] == []


def test_without_a_table_there_is_nothing_to_draw(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kl_study.py", "--table", str(tmp_path / "none.csv.gz")])
    with pytest.raises(SystemExit) as end:
        kl_study.main()
    assert end.value.code == 2 and "has no runs; add some with --add" in capsys.readouterr().err

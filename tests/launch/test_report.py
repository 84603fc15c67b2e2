"""scripts/plot.py and scripts/report.py on the folders of real runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import fmean

import plot
import pytest
import report
from helpers import ROOT, change_config, main_here, read_jsonl, run_here, tiny_args
from intervals import rate_interval, wilson

from runtime.run import verdict
from runtime.run.doctor import Case, examine


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory) -> Path:
    """Two learning rates x two seeds, three steps each; as many folders that are no runs."""
    out = tmp_path_factory.mktemp("runs")
    for learning_rate in (1e-3, 1e-2):
        for seed in (1, 2):
            changes = {"learning_rate": learning_rate, "seed": seed, "total_steps": 3, "beta": 0.1, "eval_every": 1}
            changes |= {"max_response_length": 4}
            run_here(tiny_args(tiny, out, eval_prompts=4, **changes))
    (out / "jobs" / "x").mkdir(parents=True)
    (out / "empty").mkdir()
    return out


def folders_of(runs: Path) -> list[Path]:
    """The folders of runs among those of a folder."""
    return [path for path in sorted(runs.iterdir()) if (path / "config.json").is_file()]


def call(script, *words, ok: bool = True) -> str:
    """Return the output of a script's main in this process; one test starts each script in its own process."""
    code, out, err = main_here(script, *words)
    assert (code == 0) == ok, err
    return out if ok else err


# -------------------------------------------------------------------------------------------------------------- curves


@pytest.mark.integration
def test_mean_and_band_are_those_of_the_seeds(runs):
    """The numbers behind the picture, against the files themselves; a run that is named twice counts once."""
    groups = plot.grouped(plot.load_runs([runs, *runs.iterdir()]), ["learning_rate"])
    assert list(groups) == [("0.001",), ("0.01",)] and {len(g) for g in groups.values()} == {2}
    for (rate,), members in groups.items():
        assert {(r.args["learning_rate"], r.args["seed"]) for r in members} == {(float(rate), 1), (float(rate), 2)}
        for key, file in (("reward/mean", "metrics.jsonl"), ("eval/pass@1", "eval.jsonl")):
            columns = zip(*([rec[key] for rec in read_jsonl(r.folder / file)] for r in members), strict=True)
            expected = [(sum(c) / 2, min(c), max(c)) for c in columns]
            got = plot.points([members], key, None)
            assert list(got.index) == list(range(0 if file == "eval.jsonl" else 1, 4))
            assert [tuple(row) for row in got.values] == [pytest.approx(row) for row in expected]


def run_of(values: list[float | None], seconds: float = 1.0) -> plot.Run:
    metrics = [{"step": i, "time/step": seconds, "m": v} for i, v in enumerate(values, 1)]
    return plot.Run(Path("x"), {}, metrics, [])


def test_a_mean_ends_where_the_shortest_of_its_runs_does():
    """A step that one of the runs lacks, or in which it was not finite, has no mean."""
    points = plot.points([[run_of([2.0, 4.0, 6.0, 8.0]), run_of([4.0, None, 10.0])]], "m", None)
    assert points.to_dict("index") == {1: {"mean": 3, "low": 2, "high": 4}, 3: {"mean": 8, "low": 6, "high": 10}}
    assert plot.points([[run_of([2.0]), run_of([None])]], "m", None).empty and plot.points([[]], "m", None).empty


def test_the_interval_is_students():
    """Mean and ends by hand; nothing for a single run; of a rate not 0 wide where every run has it at 1."""
    members = [run_of([v]) for v in (1.0, 2.0, 6.0)]
    half = 4.30265 * 7**0.5 / 3**0.5
    assert plot.interval(members, "m") == pytest.approx((3.0, 3 - half, 3 + half), abs=1e-4)
    middle, low, high = plot.interval(members[:1], "m")
    assert middle == 1.0 and low != low and high != high
    assert plot.cell(members, "m") == f"3 ± {half:.3g}" and plot.cell(members[:1], "m") == "1"
    assert plot.cell([run_of([None])], "m") == ""
    for rate in (0.0, 1.0):
        record = {"step": 1, "eval/pass@1": rate, "eval/problems": 64}
        perfect = [plot.Run(Path("x"), {}, [{"step": 1, "reward/correct": rate}], [record])] * 3
        mean, low, high = plot.interval(perfect, "eval/pass@1")
        assert mean == rate and high - low == pytest.approx(0.0196, abs=1e-4)
        assert plot.cell(perfect, "eval/pass@1") == f"{rate:.4g} ± 0.0196"
        assert plot.interval(perfect, "reward/correct")[2] - plot.interval(perfect, "reward/correct")[1] > 0.1


def test_the_interval_of_an_evaluation_is_that_of_its_problems():
    """Also at 1 and with one sample per problem."""
    right = [0, 0, 1, 2, 3, 4, 4, 4]
    counts = {"eval/problems": 8, "eval/samples": 4}
    evals = [counts | {"step": 0, "eval/pass@1": fmean(right) / 4, "eval/right": right}]
    evals.append(counts | {"step": 1, "eval/pass@1": 0.5, "eval/samples": 1, "eval/right": [0, 1] * 4})
    evals.append(counts | {"step": 2, "eval/pass@1": 1.0, "eval/right": [4] * 8})
    run = plot.Run(Path("run"), {}, [{"step": step} for step in (1, 2)], evals)
    found = plot.pass_interval(run)
    wanted = [rate_interval([count / 4 for count in right], 4), wilson(4, 8), wilson(8, 8)]
    assert found.to_numpy().tolist() == [pytest.approx(ends) for ends in wanted] and list(found.index) == [0, 1, 2]
    assert (found["high"] - found["low"] > 0.3).all()


def test_final_values_over_an_argument(runs, tmp_path):
    """--x learning_rate: places are the argument's values, and the table has mean and interval."""
    output = tmp_path / "p.svg"
    y = ["kl/sequence", "eval/pass@1"]
    out = call(plot, runs, "--x", "learning_rate", "--y", *y, "--output", output).splitlines()
    comments = re.findall(r"<!-- (.*?) -->", output.read_text())
    for text in ("0.001", "0.01", "learning_rate (final values)", "kl/sequence", "eval/pass@1"):
        assert text in comments
    assert out[1] == "| learning_rate | runs | steps | kl/sequence | eval/pass@1 |"
    for line, rate in zip(out[3:5], ("0.001", "0.01"), strict=True):
        assert line.startswith(f"| {rate} | 2 | 3 |")
        members = [run for run in plot.load_runs([runs]) if run.args["learning_rate"] == float(rate)]
        a, b = (read_jsonl(r.folder / "metrics.jsonl")[-1]["kl/sequence"] for r in members)
        shown = re.search(r"\| (\S+) ± (\S+) \|", line)
        assert [float(x) for x in shown.groups()] == pytest.approx([(a + b) / 2, 12.7062 * abs(a - b) / 2], rel=6e-3)
        rates = [read_jsonl(r.folder / "eval.jsonl")[-1]["eval/pass@1"] for r in members]
        last = line.strip("|").split("|")[-1]
        assert float(last.partition("±")[0]) == pytest.approx(fmean(rates), rel=1e-3, abs=1e-9)


@pytest.mark.integration
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures(runs, tmp_path, suffix):
    """Panels by an argument, and runs overlaid; a figure in SVG names its axes and panels."""
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    output = tmp_path / f"p.{suffix}"
    call(plot, runs, "--by", "seed", "learning_rate", "--output", output)
    assert output.read_bytes().startswith(start) and output.stat().st_size > 5000
    two = folders_of(runs)[:2]
    if suffix == "svg":
        comments = "".join(re.findall(r"<!-- (.*?) -->", output.read_text()))  # the text of each label
        assert "learning_rate = 0.001" in comments and "reward/mean" in comments and "step" in comments
        ET.parse(output)
    assert all(f"| {folder} | 1 | 3 |" in call(plot, *two, "--output", output) for folder in two)
    assert output.read_bytes().startswith(start)


@pytest.mark.integration
def test_values_of_any_kind_are_columns_and_curves(runs, tmp_path):
    """None next to numbers, and lists: --total_episodes where some runs count steps, --stop_strings."""
    for name, episodes, stop in zip(folders_of(runs), (None, 48, 96, 48), ([], ["a", "b"], ["a"], []), strict=True):
        copy = shutil.copytree(name, tmp_path / name.name)
        change_config(copy, total_episodes=episodes, stop_strings=stop, learning_rate=1e-3)
    out = call(plot, tmp_path, "--by", "stop_strings", "total_episodes", "--output", tmp_path / "p.svg")
    comments = re.findall(r"<!-- (.*?) -->", (tmp_path / "p.svg").read_text())
    columns = [c.partition("total_episodes = ")[2] for c in comments if "total_episodes = " in c]
    assert columns[:3] == ["48", "96", "None"] and "| ['a', 'b'] | 48 |" in out and "| [] | 48 |" in out


@pytest.mark.integration
def test_a_piece_of_a_loss_is_a_metric_on_the_step_line_and_in_the_picture(tiny, tmp_path, monkeypatch, capsys):
    """One edit, in token_loss: nothing has to be registered."""
    last = '"weight": weight_T}'
    text = (ROOT / "grpo.py").read_text()
    assert text.count(last) == 1
    (tmp_path / "with_a_piece.py").write_text(text.replace(last, '"weight": weight_T, "slope": ratio_T.detach() + 1}'))
    monkeypatch.syspath_prepend(tmp_path)
    run_here(tiny_args(tiny, tmp_path / "runs", "with_a_piece", num_mini_batches=2), "with_a_piece")
    (folder,) = (tmp_path / "runs").iterdir()
    slopes = [metrics["policy/slope"] for metrics in read_jsonl(folder / "metrics.jsonl")]
    assert slopes == pytest.approx([2, 2], abs=0.1)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert [f"| slope {slope:.4g} |" in line for slope, line in zip(slopes, lines, strict=True)] == [True, True]
    titles = []
    monkeypatch.setattr(plot, "draw_panel", lambda axis, title, *rest, **named: titles.append(title))
    plot.draw(plot.load_run(folder), tmp_path / "picture.png")
    assert titles[-1] == "policy/slope"


def test_the_metrics_of_the_scripts_themselves_are_no_pieces(runs):
    """Or they would stand twice on the step line, and have a panel that nobody asked for."""
    for run in plot.load_runs([runs]):
        assert plot.own_pieces(plot.logged_by([run])) == []
    utils_names = set(re.findall(r'"(policy/\w+)"', (ROOT / "utils.py").read_text()))
    assert len(utils_names) > 4 and plot.own_pieces(utils_names) == []


def test_runs_that_differ_in_their_name_alone_are_repetitions(runs, tmp_path):
    """--exp_name try_$RANDOM, as many people have it. Other code under another name is no repetition."""
    alike = [run for run in plot.load_runs([runs]) if run.args["learning_rate"] == 0.01]
    folders = [shutil.copytree(run.folder, tmp_path / f"try_{run.args['seed']}") for run in alike]
    change_config(folders[0], exp_name="try_7")
    words = ["--by", "beta", "--y", "reward/mean", "--output", tmp_path / "x.png"]
    assert "| 2 | 3 |" in call(plot, *folders, *words)
    change_config(folders[0], "another")
    out = call(plot, *folders, *words)
    assert "note: the runs also differ in exp_name" in out and out.count("| 1 | 3 |") == 2


def test_copies_are_compared_in_every_setting(runs, tmp_path):
    """--by exp_name of runs with two learning rates: a panel for each, and no mean over both."""
    folders = folders_of(runs)
    for folder in folders_of(runs):
        folders.append(shutil.copytree(folder, tmp_path / f"mine_{folder.name}"))
        change_config(folders[-1], "another", exp_name="mine")
    words = ["--by", "exp_name", "--y", "reward/mean", "--output", tmp_path / "x.png"]
    out = call(plot, *folders, *words)
    assert "note: the runs also differ in learning_rate, which --by now includes" in out
    rows = re.findall(r"^\| (\w+) \| (0\.\d+) \| (\d+) \|", out, flags=re.MULTILINE)
    assert sorted(rows) == [(name, rate, "2") for name in ("grpo", "mine") for rate in ("0.001", "0.01")]


@pytest.mark.integration
def test_the_logs_beside_runs_are_no_runs(runs, tmp_path):
    """Of runs/*, as the shell writes it: scripts/run_many.py leaves NAME.log there."""
    folders = folders_of(runs)[:2]
    log = tmp_path / f"{folders[0].name}.log"
    log.write_text("step 1\n")
    assert "pass@1" in call(plot, log, *folders, "--output", tmp_path / "x.png")
    _, out, _ = main_here(report, log, *folders)
    assert out.count("\nverdict    ") == 2
    for script in (plot, report):
        assert "holds no run with a metrics.jsonl" in call(script, log, ok=False)


@pytest.mark.integration
@pytest.mark.parametrize("script", ["plot.py", "report.py"])
def test_a_damaged_run_is_shown_all_the_same(runs, tmp_path, script):
    """Lines that are no JSON, half a letter, an empty config.json: what is whole is shown, with a warning."""
    copy = tmp_path / "damaged"
    shutil.copytree(folders_of(runs)[0], copy)
    for file in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
        content = (copy / file).read_bytes()
        first, _, rest = content.partition(b"\n")
        (copy / file).write_bytes(b'{"step": 1, "response": "a"b"}\n' + first + b"\n[1]\n" + rest + '"名'.encode()[:-1])
    (copy / "config.json").write_text("")
    argv = [sys.executable, str(ROOT / "scripts" / script), str(copy)]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode in ((0, 1) if script == "report.py" else (0,)), done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("metrics.jsonl: 2 line(s) are not JSON objects") == 1
    assert ("config.json is not a JSON object" in done.stderr) == (script != "report.py")  # which needs no arguments
    assert "3 step" in done.stdout


@pytest.mark.parametrize(
    "words, says",
    [
        (["--by", "seed"], "--output is needed"),
        (["--by", "nonsense", "--output", "x.png"], "nonsense: no such argument"),
        (["--x", "nonsense", "--output", "x.png"], "nonsense: no such argument"),
        (["--y", "nonsense", "--output", "x.png"], "--y nonsense: not logged"),
        (["--by", "learning_rate", "--output", "x.nope"], "the suffix must be .png, .svg or .pdf"),
    ],
)
def test_plot_says_what_is_wrong(runs, tmp_path, words, says):
    words = [tmp_path / w if w.startswith("x.") else w for w in words]
    assert says in call(plot, runs, *words, ok=False)


# -------------------------------------------------------------------------------------------------------------- report


@pytest.mark.parametrize("state", ["ended", "going", "damaged"])
def test_a_report_has_the_verdict_or_what_the_doctor_finds_so_far(runs, tmp_path, state):
    """Word for word as at the end of the run. A half-written verdict is none."""
    copy = tmp_path / "copy"
    shutil.copytree(folders_of(runs)[0], copy)
    found = verdict.verdict(copy, 3)
    assert found["findings"], "this run of three steps has something that the doctor finds"
    words = (copy / verdict.FILE).read_text()
    wanted = verdict.in_words(json.loads(words))
    if state != "ended":
        (copy / verdict.FILE).write_text(words[: len(words) // 2])
        wanted = "verdict    none: the run has not reached its end; the last step in metrics.jsonl is 3"
        wanted += "".join(f"\ndoctor     {finding}" for finding in examine(Case.of(copy)))
    if state == "going":
        (copy / verdict.FILE).unlink()
    _, out, _ = main_here(report, copy)
    assert out.startswith(f"{copy}: 3 steps\n{wanted}\n\n  reward ") and "pass@1" in out

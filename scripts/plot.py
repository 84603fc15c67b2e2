"""Draw the curves of runs from their metrics.jsonl and eval.jsonl, and summarize each run in a few lines.

    python scripts/plot.py runs                    the newest run in that folder -> runs/<name>/curves.png
    python scripts/plot.py runs/A                  this run -> runs/A/curves.png
    python scripts/plot.py runs/A runs/B ...       overlaid, with a legend -> --output
    python scripts/plot.py runs --by learning_rate --output lr.svg       all runs, one curve per value: the mean over
                                                                         seeds, in a band from lowest to highest
    python scripts/plot.py runs --where exp_name=sweep_kl --x beta --y final:kl/sequence final:eval/pass@1 \\
        --by kl_estimator kl_placement --output kl.png     final values over an argument: mean and 95 % interval over
                                                           seeds, one line per estimator, one panel per placement

--by takes the argument that makes the lines, then those that make the panels; each metric has a row. --x is step,
episode, time (minutes of training, including evaluations between steps) or, for final values, any argument. The suffix
of --output decides the format (png, svg, pdf). Comparisons end with a table in Markdown. A run may still be going: a
half-written last line is ignored, and a mean ends where the shortest of its runs does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import matplotlib
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runlog import PRESENTATION

matplotlib.use("Agg")  # no display on a cluster
import matplotlib.pyplot as plt

PHASES = ("generate", "score", "logprobs", "update", "push", "eval", "save")
# title -> (metric, word of the legend, line style)
PANELS = {
    "reward, with pass@1 on held-out problems": [("reward/mean", "reward", "-"), ("reward/correct", "correct", ":")],
    "response length, truncated fraction": [
        ("completions/length_mean", "tokens", "-"),
        ("completions/truncated_frac", "truncated", ":"),
    ],
    "entropy (nats per token)": [("policy/entropy", "entropy", "-")],
    "KL to the reference (nats per sequence)": [("kl/sequence", "KL", "-")],
    "sampler against trainer, |dlogp| (nats per token)": [
        ("sampler/logprob_diff_mean", "mean", "-"),
        ("sampler/logprob_diff_max", "max", ":"),
    ],
    "gradient norm before clipping": [("optim/grad_norm", "norm", "-")],
    "seconds per step": [("time/step", "step", "-")],
    "tokens per second, whole step": [("perf/tokens_per_second", "tokens/s", "-")],
}
X_LABELS = {"step": "step", "episode": "samples", "time": "minutes of training"}
COMPARED = ["reward/mean", "kl/sequence", "policy/entropy", "completions/length_mean", "eval/pass@1"]
SAME_RUN = (*PRESENTATION, "seed")  # runs that differ in these alone are repetitions
FINAL = "final:"


def fail(message: str) -> NoReturn:
    """Exit with code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# ------------------------------------------------------------------------------------------------------ files of a run


def read(path: Path) -> list[dict]:
    """The objects of a .jsonl file; none when it does not exist."""
    lines = path.read_text().splitlines() if path.is_file() else []
    records = []
    for number, line in enumerate(lines):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines) - 1:
                fail(f"{path}: line {number + 1} is not JSON")
    return records


def find_runs(paths: list[Path]) -> list[Path]:
    """The folders of the runs that are meant: those given, or the newest in the one folder given."""
    folder = paths[0]
    is_run = (folder / "config.json").exists() or (folder / "metrics.jsonl").exists()
    if len(paths) == 1 and folder.is_dir() and not is_run:
        files = sorted(folder.glob("*/metrics.jsonl"), key=lambda f: f.stat().st_mtime)
        if not files:
            fail(f"{folder} holds no run with a metrics.jsonl; start one with: python grpo.py")
        paths = [files[-1].parent]
    for path in paths:
        if not path.is_dir():
            fail(f"{path} is not a folder; give runs, or the folder of a run")
        if not read(path / "metrics.jsonl"):
            fail(f"{path}: no metrics.jsonl, or no step in it yet")
    return paths


def positions(metrics: list[dict], x: str) -> dict[int, float]:
    """step -> its place on the horizontal axis ``x``; the evaluation before the first step is at 0."""
    steps = [r["step"] for r in metrics]
    if x == "time":
        places = np.cumsum([(r["time/step"] or 0.0) / 60 for r in metrics]).tolist()
    else:
        places = [r[x] for r in metrics]
    return {0: 0, **dict(zip(steps, places, strict=True))}


def series(records: list[dict], key: str, at: dict[int, float] | None = None) -> pd.Series:
    """A metric over the steps in which it was logged; null, which stands for not finite, becomes a gap (NaN).

    at: the place of each step on the horizontal axis, from ``positions``; a step without a place is left out.
    """
    logged = [r for r in records if key in r and (at is None or r["step"] in at)]
    places = [r["step"] if at is None else at[r["step"]] for r in logged]
    return pd.Series([r[key] for r in logged], index=places, dtype=float)


@dataclass
class Run:
    """A run's folder and what it holds."""

    folder: Path
    args: dict[str, Any]
    metrics: list[dict]
    evals: list[dict]

    def curve(self, key: str, x: str = "step") -> pd.Series:
        """A metric of either file over the axis ``x``."""
        records = self.evals if key.startswith("eval/") else self.metrics
        return series(records, key, positions(self.metrics, x))

    def final(self, key: str) -> float:
        """The last evaluation's value, or the mean over the last tenth of the steps that have one; NaN without any."""
        values = self.curve(key).dropna()
        last = 1 if key.startswith("eval/") else max(1, len(values) // 10)
        return values.tail(last).mean()


def load_run(folder: Path) -> Run:
    """The run in a folder; its arguments are {} where it has no config.json."""
    config = folder / "config.json"
    args = json.loads(config.read_text())["args"] if config.exists() else {}
    return Run(folder, args, read(folder / "metrics.jsonl"), read(folder / "eval.jsonl"))


# ----------------------------------------------------------------------------------------------------- one run, or few


def draw(runs: dict[str, Run], output: Path, x: str = "step") -> None:
    """Draw one figure of all panels that have something to show, with one color per run if there are several."""
    logged = {key for run in runs.values() for record in run.metrics for key in record}
    panels = {title: lines for title, lines in PANELS.items() if any(key in logged for key, _, _ in lines)}
    rows = math.ceil(len(panels) / 2)
    figure, axes = plt.subplots(rows, 2, figsize=(13, 3.1 * rows))
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        draw_panel(axis, title, lines, runs, x, legend=len(runs) == 1 or axis is axes.flat[0])
    for axis in axes[-1]:
        axis.set_xlabel(X_LABELS[x])
    figure.suptitle(" and ".join(runs) if len(runs) < 3 else f"{len(runs)} runs", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    save(figure, output)


def draw_panel(axis: plt.Axes, title: str, lines: list, runs: dict[str, Run], x: str, legend: bool) -> None:
    """Draw one panel of ``draw``."""
    several = len(runs) > 1
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.25)
    axis.xaxis.get_major_locator().set_params(integer=x != "time")
    right = axis.twinx() if title.startswith("response") else axis  # tokens and a fraction share no scale
    if several and title.startswith("reward"):
        lines = lines[:1]
    for r, (name, run) in enumerate(runs.items()):
        if title == "seconds per step" and not several:
            stack(axis, run.metrics, positions(run.metrics, x))
            continue
        for i, (key, word, style) in enumerate(lines):
            curve = run.curve(key, x)
            if curve.empty:
                continue
            label = word
            if several:
                label = name if i == 0 else None
            dot = "." if len(curve) < 2 else ""
            color = f"C{r if several else i}"
            (right if i else axis).plot(curve, style, color=color, label=label, lw=1.4, marker=dot)
        if title.startswith("reward"):
            label = None if several else "eval pass@1"
            axis.plot(run.curve("eval/pass@1", x), "o--", color=f"C{r if several else 3}", label=label, ms=5, lw=0.8)
    if right is not axis:
        right.set_ylim(-0.02, 1.02)
    if title.startswith("sampler"):
        axis.set_yscale("log", nonpositive="mask")
    handles, labels = axis.get_legend_handles_labels()
    if right is not axis:
        more_handles, more_labels = right.get_legend_handles_labels()
        handles += more_handles
        labels += more_labels
    if len(handles) > 1 and legend:
        axis.legend(handles, labels, fontsize=8, framealpha=0.6)


def stack(axis: plt.Axes, metrics: list[dict], at: dict[int, float]) -> None:
    """Draw the seconds of the phases one on the other, up to the whole step."""
    phases = [p for p in PHASES if any(f"time/{p}" in r for r in metrics)]
    layers = [[r.get(f"time/{p}") or 0.0 for r in metrics] for p in phases]
    rest = [max(0.0, r["time/step"] - sum(column)) for r, *column in zip(metrics, *layers, strict=True)]
    edges = {"step": "mid"} if len(metrics) > 1 else {}
    axis.stackplot([at[r["step"]] for r in metrics], *layers, rest, labels=[*phases, "rest"], alpha=0.85, **edges)


def save(figure: plt.Figure, output: Path) -> None:
    """Write and close a figure, in the format that the suffix names."""
    formats = sorted(figure.canvas.get_supported_filetypes())
    if output.suffix.lstrip(".") not in formats:
        fail(f"--output {output}: the suffix must be one of {', '.join(formats)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def sparkline(values: pd.Series, width: int = 60) -> str:
    """A line of at most ``width`` bars, each the mean of its share of the values."""
    width = min(width, len(values))
    means = values.groupby(np.arange(len(values)) * width // max(1, len(values))).mean()
    span = (means.max() - means.min()) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[round(7 * height)] for height in (means - means.min()) / span)


def summary(metrics: list[dict], evals: list[dict]) -> str:
    """Reward, held-out pass@1 and time, in words. One step's reward is noisy, so a tenth of the steps is averaged."""
    rewards = series(metrics, "reward/mean").dropna()
    tenth = max(1, len(rewards) // 10)
    over = f"means of the first and last {tenth} of {len(rewards)} steps" if tenth > 1 else f"{len(rewards)} step(s)"
    first, last = rewards.head(tenth).mean(), rewards.tail(tenth).mean()
    lines = [f"  reward   {first:.3f} -> {last:.3f}  {sparkline(rewards)}  {over}"]
    scores = series(evals, "eval/pass@1")
    if len(scores) > 1:
        change = f"{scores.iloc[0]:.3f} -> {scores.iloc[-1]:.3f}"
        lines.append(f"  pass@1   {change}  on held-out problems, after step {scores.index[0]} and {scores.index[-1]}")
    elif len(scores) == 1:
        lines.append(f"  pass@1   {scores.iloc[0]:.3f}  on held-out problems, after step {scores.index[0]}")
    seconds = series(metrics, "time/step").sum()
    lines.append(f"  time     {seconds / 60:.1f} min of training, {seconds / len(metrics):.1f} s per step")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------- comparisons


def load_runs(paths: list[Path], where: list[str]) -> list[Run]:
    """The runs in or under the folders that have logged a step and have the arguments of ``where`` (NAME=VALUE)."""
    folders = []
    for path in paths:
        folders += [path] if (path / "config.json").exists() else sorted(path.glob("*/"))
    runs = [load_run(folder) for folder in folders if (folder / "config.json").exists()]
    runs = [run for run in runs if run.metrics]
    if not runs:
        fail(f"no run with a config.json and a metrics.jsonl in {', '.join(map(str, paths))}")
    for condition in where:
        name, equals, value = condition.partition("=")
        if not equals:
            fail(f"--where {condition}: write NAME=VALUE, for example --where beta=0.1")
        check_argument("--where", name, runs)
        values = sorted({show(run.args[name]) for run in runs if name in run.args})
        runs = [run for run in runs if name in run.args and show(run.args[name]) == value]
        if not runs:
            fail(f"--where {condition}: no run; --{name} is {', '.join(values)}")
    return runs


def show(value: object) -> str:
    """An argument's value as it is written on a command line: 0.0 as 0, a list as its words."""
    if isinstance(value, list):
        return " ".join(map(show, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def order(value: object) -> tuple:
    """Sort key for the values of one argument: None, numbers, then the rest as text."""
    number = isinstance(value, int | float)
    return (value is not None, not number, value if number else str(value))


def differing(runs: list[Run]) -> list[str]:
    """The arguments in which the runs differ, apart from those that make a repetition."""
    names = dict.fromkeys(name for run in runs for name in run.args)
    return [n for n in names if n not in SAME_RUN and len({json.dumps(run.args.get(n)) for run in runs}) > 1]


def check_argument(flag: str, name: str, runs: list[Run]) -> None:
    """Refuse a name that is no argument of these runs."""
    if not any(name in run.args for run in runs):
        fail(f"{flag} {name}: no such argument in config.json; these runs differ in: {', '.join(differing(runs))}")


def labels(runs: list[Run], names: list[str]) -> list[tuple[str, ...]]:
    """The combinations of values of some arguments among the runs, as text, smallest first."""
    runs = sorted(runs, key=lambda run: [order(run.args.get(name)) for name in names])
    return list(dict.fromkeys(tuple(show(run.args.get(name)) for name in names) for run in runs))


def grouped(runs: list[Run], by: list[str]) -> dict[tuple[str, ...], list[Run]]:
    """Runs by the values of the arguments ``by``, as text, smallest first. Refuse a group that is not repetitions."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: [order(run.args.get(name)) for name in by]):
        groups.setdefault(tuple(show(run.args.get(name)) for name in by), []).append(run)
    for members in groups.values():
        if names := differing(members):
            fail(
                f"runs that differ in {', '.join(names)} would be averaged as if they differed in the seed alone "
                f"({members[0].folder.name}, {members[1].folder.name}, ...); add them to --by, or choose one value "
                f"with --where"
            )
    return groups


def band(runs: list[Run], key: str, x: str) -> pd.DataFrame:
    """Columns mean, min and max over repetitions, indexed by the place on the axis; empty where one has no value.

    In time the steps of the runs are at different places: values between steps are interpolated linearly, at the
    places of the first run, up to the end of the shortest.
    """
    curves = [run.curve(key, x).dropna() for run in runs]
    if not curves or any(curve.empty for curve in curves):
        return pd.DataFrame(columns=["mean", "min", "max"])
    table = pd.concat(curves, axis=1)
    if x == "time":
        table = table.sort_index().interpolate("index", limit_area="inside").loc[curves[0].index]
    return table.dropna().agg(["mean", "min", "max"], axis=1)


def t_quantile(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution, from its density integrated over [0, 20]."""
    t = np.linspace(0, 20, 200_001)
    scale = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(degrees * math.pi)
    density = scale * (1 + t * t / degrees) ** (-(degrees + 1) / 2)
    area = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2 * (t[1] - t[0]))])
    return float(np.interp(0.475, area, t))


def interval(runs: list[Run], key: str) -> tuple[float, float]:
    """(mean, half the 95 % interval) of the final values of repetitions; NaN for what too few runs do not give."""
    finals = pd.Series([run.final(key) for run in runs], dtype=float).dropna()
    if len(finals) < 2:
        return finals.mean(), math.nan
    return finals.mean(), t_quantile(len(finals) - 1) * finals.sem()


def draw_comparison(runs: list[Run], by: list[str], keys: list[str], x: str, output: Path) -> None:
    """Draw a row per metric, a column per value of by[1:], and a line per value of by[0]: one color everywhere."""
    over_argument = x not in X_LABELS
    groups = grouped(runs, [*by, x] if over_argument else by)
    lines = labels(runs, by[:1])
    columns = labels(runs, by[1:])
    places = [place for (place,) in labels(runs, [x])]
    size = (max(5.5, 3.6 * len(columns)), 2.6 * len(keys) + 1)
    figure, axes = plt.subplots(len(keys), len(columns), figsize=size, sharey="row", sharex=True, squeeze=False)
    for (row, key), (column, values) in itertools.product(enumerate(keys), enumerate(columns)):
        axis = axes[row][column]
        axis.grid(alpha=0.25)
        for number, line in enumerate(lines):
            style = {"color": f"C{number % 10}", "ls": "-" if number < 10 else "--"}
            if over_argument:
                cells = [groups.get((*line, *values, place), []) for place in places]
                draw_finals(axis, cells, key, offset=0.12 * (number - (len(lines) - 1) / 2) / len(lines), style=style)
            else:
                draw_band(axis, band(groups.get((*line, *values), []), key, x), style)
        if over_argument:
            axis.set_xticks(range(len(places)), places)
        if row == 0 and values:
            axis.set_title(", ".join(f"{n} = {v}" for n, v in zip(by[1:], values, strict=True)), fontsize=10)
        if column == 0:
            axis.set_ylabel(f"final {key}" if over_argument else key, fontsize=9)
        if row == len(keys) - 1:
            axis.set_xlabel(X_LABELS.get(x, x))
    handles = [
        plt.Line2D([], [], color=f"C{n % 10}", ls="-" if n < 10 else "--", label=" ".join(line) or "all")
        for n, line in enumerate(lines)
    ]
    title = by[0] if by else None
    figure.legend(handles=handles, title=title, loc="outside upper center", ncols=min(len(lines), 4), fontsize=8)
    figure.set_layout_engine("constrained")
    save(figure, output)


def draw_band(axis: plt.Axes, points: pd.DataFrame, style: dict) -> None:
    """Draw a mean and its band."""
    if not points.empty:
        axis.plot(points["mean"], lw=1.4, marker="." if len(points) < 20 else "", ms=4, **style)
        axis.fill_between(points.index, points["min"], points["max"], alpha=0.18, lw=0, color=style["color"])


def draw_finals(axis: plt.Axes, cells: list[list[Run]], key: str, offset: float, style: dict) -> None:
    """Draw means and 95 % intervals at equal distances; lines are shifted a little so that intervals stay apart."""
    stats = pd.DataFrame([interval(cell, key) for cell in cells], columns=["mean", "half"])
    stats = stats.set_index(stats.index + offset).dropna(subset="mean")
    axis.errorbar(
        stats.index, stats["mean"], yerr=stats["half"].fillna(0), marker="o", ms=4, capsize=3, lw=1.2, **style
    )


def table(runs: list[Run], by: list[str], keys: list[str], over_argument: bool) -> str:
    """A row per group in Markdown: its runs, and for each metric the mean of the final values and their spread."""
    rows = [[*by, "runs", "steps", *keys], ["---"] * len(by) + ["---:"] * (len(keys) + 2)]
    for label, members in grouped(runs, by).items():
        steps = sorted({run.metrics[-1]["step"] for run in members})
        row = [*label, str(len(members)), "-".join(map(str, dict.fromkeys((steps[0], steps[-1]))))]
        for key in keys:
            finals = pd.Series([run.final(key) for run in members], dtype=float).dropna()
            middle, half = interval(members, key)
            spread = f" ± {half:.3g}" if over_argument else f" ({finals.min():.3g} to {finals.max():.3g})"
            row.append("" if finals.empty else f"{middle:.3g}{spread if len(finals) > 1 else ''}")
        rows.append(row)
    spread = "± is half the 95 % interval over seeds" if over_argument else "in brackets the lowest and highest run"
    note = f"Means over the last tenth of the steps, or of the last evaluation; {spread}."
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{note}"


def compare(args: argparse.Namespace) -> None:
    """Draw the figure and print the table for --by, --where, --y and --x with an argument."""
    runs = load_runs(args.paths, args.where)
    for name in args.by:
        check_argument("--by", name, runs)
    over_argument = args.x not in X_LABELS
    if over_argument:
        check_argument(f"--x {'|'.join(X_LABELS)} or", args.x, runs)
    logged = {key for run in runs for record in (*run.metrics, *run.evals) for key in record}
    keys = [key.removeprefix(FINAL) for key in args.y] or [key for key in COMPARED if key in logged]
    for given, key in zip(args.y, keys, strict=False):
        if key not in logged:
            fail(f"--y {given}: not logged by these runs; they have {', '.join(sorted(logged))}")
        if given.startswith(FINAL) and not over_argument:
            fail(f"--y {given}: a final value is drawn over an argument; add one, for example --x learning_rate")
        if over_argument and not given.startswith(FINAL):
            fail(f"--x {args.x}: draws final values; write --y {FINAL}{key}")
    if args.output is None:
        fail("--output is needed to compare several runs, for example --output compare.png")
    by = [name for name in args.by if name != args.x]
    draw_comparison(runs, by, keys, args.x, args.output)
    print(args.output)
    print(table(runs, [*by, args.x] if over_argument else by, keys, over_argument))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="+", type=Path, help="a folder of runs, or folders of runs to compare")
    add("--output", type=Path, help="figure to write; default for one run: curves.png in its folder")
    add("--by", nargs="+", default=[], metavar="ARGUMENT", help="one line per value of the first, one panel of others")
    add("--where", nargs="+", default=[], metavar="NAME=VALUE", help="take only the runs with this argument")
    add("--y", "--metrics", nargs="+", default=[], metavar="METRIC", help="names from docs/metrics.md, or final:NAME")
    add("--x", default="step", help="horizontal axis: step, episode, time, or an argument for final values")
    args = parser.parse_args()
    if args.by or args.where or args.y or args.x not in X_LABELS:
        compare(args)
        return
    folders = find_runs(args.paths)
    if args.output is None and len(folders) > 1:
        fail("--output is needed to compare several runs, for example --output compare.png")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):  # the same name in two output folders
        names = [str(folder) for folder in folders]
    runs = {name: load_run(folder) for name, folder in zip(names, folders, strict=True)}
    output = args.output or folders[0] / "curves.png"
    draw(runs, output, args.x)
    print(output)
    for name, run in runs.items():
        print(f"{name}\n{summary(run.metrics, run.evals)}")


if __name__ == "__main__":
    main()

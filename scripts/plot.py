"""Draws the curves of runs from their metrics.jsonl and eval.jsonl, and says in a few lines how each went.

    python scripts/plot.py runs                    the newest run in that folder -> runs/<name>/curves.png
    python scripts/plot.py runs/A                  this run -> runs/A/curves.png
    python scripts/plot.py runs/A runs/B ...       overlaid, with a legend -> --output
    python scripts/plot.py runs --by learning_rate --output lr.svg       all runs, one curve for each value: the mean
                                                                         over seeds, in a band from lowest to highest
    python scripts/plot.py runs --where exp_name=sweep_kl --by kl_estimator kl_placement --grid beta \\
        --metrics kl/sequence eval/pass@1 --output kl.png                one column for each beta, one row a metric

--x episode or time (minutes of training, evaluations between steps included) instead of step; the suffix of --output
decides what is written (png, svg, pdf). Comparisons end with a table in markdown. A run may still be going on: a last
line that is only half written is left for the next time, and a mean ends where the shortest of its runs does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime.flags import PRESENTATION

matplotlib.use("Agg")  # no display on a cluster
import matplotlib.pyplot as plt

PHASES = ("generate", "score", "logprobs", "update", "push", "eval", "save")
# title -> (metric, word of the legend, line style); a second metric in a panel has its own axis on the right
PANELS = {
    "reward, with pass@1 on held-out problems": [("reward/mean", "reward", "-"), ("reward/correct", "correct", ":")],
    "response length, truncated fraction": [
        ("completions/length_mean", "tokens", "-"),
        ("completions/truncated_frac", "truncated", ":"),
    ],
    "entropy (nats a token)": [("policy/entropy", "entropy", "-")],
    "KL to the reference (nats a sequence)": [("kl/sequence", "KL", "-")],
    "sampler against trainer, |dlogp| (nats a token)": [
        ("sampler/logprob_diff_mean", "mean", "-"),
        ("sampler/logprob_diff_max", "max", ":"),
    ],
    "gradient norm before clipping": [("optim/grad_norm", "norm", "-")],
    "seconds a step": [("time/step", "step", "-")],
    "tokens a second, whole step": [("perf/tokens_per_second", "tokens/s", "-")],
}


X_LABELS = {"step": "step", "episode": "samples", "time": "minutes of training"}
COMPARED = ["reward/mean", "kl/sequence", "policy/entropy", "completions/length_mean", "eval/pass@1"]
SAME_RUN = (*PRESENTATION, "seed")  # runs that differ here alone are repetitions


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def read(path: Path) -> list[dict]:
    """The objects of a .jsonl file; none when it is not there."""
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
    """The folders of runs that are meant: those given, or the newest in the one folder given."""
    folder = paths[0]
    is_run = (folder / "config.json").exists() or (folder / "metrics.jsonl").exists()
    if len(paths) == 1 and folder.is_dir() and not is_run:
        files = sorted(folder.glob("*/metrics.jsonl"), key=lambda f: f.stat().st_mtime)
        if not files:
            fail(f"{folder} holds no run with a metrics.jsonl; start one with: python grpo.py")
        paths = [files[-1].parent]
    for path in paths:
        if not path.is_dir():
            fail(f"{path} is no folder; give runs, or the folder of a run")
        if not read(path / "metrics.jsonl"):
            fail(f"{path}: no metrics.jsonl, or no step in it yet")
    return paths


def series(records: list[dict], key: str, at: dict[int, float] | None = None) -> tuple[list[float], list[float]]:
    """(steps, values) where the metric was logged; null, which stands for not finite, becomes a gap.

    at: where each step stands on the horizontal axis, from `positions`; what has no place there is left out.
    """
    place = {r["step"]: r["step"] for r in records} if at is None else at
    found = [(place[r["step"]], math.nan if r[key] is None else r[key]) for r in records if key in r]
    return [x for x, _ in found], [value for _, value in found]


def positions(metrics: list[dict], x: str) -> dict[int, float]:
    """step -> where it stands on the horizontal axis ``x``; the evaluation before the first step stands at 0."""
    minutes = itertools.accumulate((r["time/step"] or 0.0) / 60 for r in metrics)
    places = {"step": (r["step"] for r in metrics), "episode": (r["episode"] for r in metrics), "time": minutes}
    return {0: 0} | {r["step"]: place for r, place in zip(metrics, places[x], strict=True)}


def draw(runs: dict[str, tuple[list[dict], list[dict]]], output: Path, x: str = "step") -> None:
    """One picture of all panels that have something to show; one colour a run when there are several."""
    logged = {key for metrics, _ in runs.values() for record in metrics for key in record}
    panels = {title: lines for title, lines in PANELS.items() if any(key in logged for key, _, _ in lines)}
    figure, axes = plt.subplots(math.ceil(len(panels) / 2), 2, figsize=(13, 3.1 * math.ceil(len(panels) / 2)))
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    several = len(runs) > 1
    for (title, lines), axis in zip(panels.items(), axes.flat, strict=False):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.25)
        right = axis.twinx() if title.startswith("response") else axis  # tokens and a fraction share no scale
        for r, (name, (metrics, evals)) in enumerate(runs.items()):
            at = positions(metrics, x)
            if title == "seconds a step" and not several:
                stack(axis, metrics, at)
                continue
            for i, (key, word, style) in enumerate(lines[:1] if several and title.startswith("reward") else lines):
                colour, where = f"C{r if several else i}", right if i else axis
                steps, values = series(metrics, key, at)
                if not values:
                    continue
                label = (name if i == 0 else None) if several else word
                dot = "." if len(steps) < 2 else ""
                where.plot(steps, values, style, color=colour, label=label, lw=1.4, marker=dot)
            if title.startswith("reward"):
                steps, values = series([e for e in evals if e["step"] in at], "eval/pass@1", at)
                colour, label = f"C{r if several else 3}", None if several else "eval pass@1"
                axis.plot(steps, values, "o--", color=colour, label=label, ms=5, lw=0.8)
        if right is not axis:
            right.set_ylim(-0.02, 1.02)
        if title.startswith("sampler"):
            axis.set_yscale("log", nonpositive="mask")
        handles = axis.get_legend_handles_labels()
        if right is not axis:
            handles = [a + b for a, b in zip(handles, right.get_legend_handles_labels(), strict=True)]
        if len(handles[0]) > 1 and (not several or axis is axes.flat[0]):
            axis.legend(*handles, fontsize=8, framealpha=0.6)
        axis.xaxis.get_major_locator().set_params(integer=x != "time")
    for axis in axes[-1]:
        axis.set_xlabel(X_LABELS[x])
    figure.suptitle(" and ".join(runs) if len(runs) < 3 else f"{len(runs)} runs", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    save(figure, output)


def save(figure: plt.Figure, output: Path) -> None:
    """Write and close a picture; its suffix says in which format."""
    formats = sorted(figure.canvas.get_supported_filetypes())
    if output.suffix.lstrip(".") not in formats:
        fail(f"--output {output}: the suffix must be one of {', '.join(formats)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def stack(axis: plt.Axes, metrics: list[dict], at: dict[int, float]) -> None:
    """Seconds by phase, one on the other, up to the whole step."""
    phases = [p for p in PHASES if any(f"time/{p}" in r for r in metrics)]
    layers = [[r.get(f"time/{p}") or 0.0 for r in metrics] for p in phases]
    rest = [max(0.0, r["time/step"] - sum(column)) for r, *column in zip(metrics, *layers, strict=True)]
    edges = {"step": "mid"} if len(metrics) > 1 else {}
    axis.stackplot([at[r["step"]] for r in metrics], *layers, rest, labels=[*phases, "rest"], alpha=0.85, **edges)


def sparkline(values: list[float], width: int = 60) -> str:
    """A line of bars, each the mean of its share of the values; a blank where nothing is finite."""
    width = min(width, len(values))
    shares = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [mean([v for v in share if math.isfinite(v)]) for share in shares]
    finite = [m for m in means if math.isfinite(m)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    return "".join(
        "▁▂▃▄▅▆▇█"[round(7 * (m - low) / (high - low)) if high > low else 0] if math.isfinite(m) else " " for m in means
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def summary(metrics: list[dict], evals: list[dict]) -> str:
    """Reward, held-out pass@1 and time, in words. One step's reward is noisy, so a tenth of the steps is averaged."""
    rewards = [v for v in series(metrics, "reward/mean")[1] if math.isfinite(v)]
    tenth = max(1, len(rewards) // 10)
    over = f"means of the first and last {tenth} of {len(rewards)} steps" if tenth > 1 else f"{len(rewards)} step(s)"
    lines = [f"  reward   {mean(rewards[:tenth]):.3f} -> {mean(rewards[-tenth:]):.3f}  {sparkline(rewards)}  {over}"]
    steps, scores = series(evals, "eval/pass@1")
    if scores:
        change = f"{scores[0]:.3f} -> {scores[-1]:.3f}" if len(scores) > 1 else f"{scores[0]:.3f}"
        after = " and ".join(map(str, [steps[0], *steps[1:][-1:]]))
        lines.append(f"  pass@1   {change}  on held-out problems, after step {after}")
    seconds = sum(series(metrics, "time/step")[1])
    lines.append(f"  time     {seconds / 60:.1f} min of training, {seconds / len(metrics):.1f} s a step")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------ comparisons


@dataclass
class Run:
    """A run's folder, as it was read."""

    folder: Path
    args: dict
    metrics: list[dict]
    evals: list[dict]

    def curve(self, key: str, x: str) -> tuple[list[float], list[float]]:
        """(places on the axis, values) of a metric of either file."""
        at = positions(self.metrics, x)
        records = self.evals if key.startswith("eval/") else self.metrics
        return series([r for r in records if r["step"] in at], key, at)

    def final(self, key: str) -> float:
        """The last evaluation's value, or the mean over the last tenth of the steps that have one."""
        values = [v for v in self.curve(key, "step")[1] if math.isfinite(v)]
        return mean(values[-1:] if key.startswith("eval/") else values[-max(1, len(values) // 10) :])


def load_runs(paths: list[Path], where: list[str]) -> list[Run]:
    """The runs in or under the folders whose arguments are as ``where`` (NAME=VALUE) says, and have begun to log."""
    folders = [f for p in paths for f in ([p] if (p / "config.json").exists() else sorted(p.glob("*/"))) if f.is_dir()]
    runs = []
    for folder in folders:
        metrics = read(folder / "metrics.jsonl")
        if metrics and (folder / "config.json").exists():
            args = json.loads((folder / "config.json").read_text())["args"]
            args = {k: tuple(v) if isinstance(v, list) else v for k, v in args.items()}  # values become keys
            runs.append(Run(folder, args, metrics, read(folder / "eval.jsonl")))
    if not runs:
        fail(f"no run with a config.json and a metrics.jsonl in {', '.join(map(str, paths))}")
    for condition in where:
        name, equals, value = condition.partition("=")
        if not equals:
            fail(f"--where {condition}: write NAME=VALUE, for example --where beta=0.1")
        check_argument("--where", name, runs)
        values = sorted({show(r.args[name]) for r in runs if name in r.args})
        runs = [r for r in runs if name in r.args and show(r.args[name]) == value]
        if not runs:
            fail(f"--where {condition}: no run; --{name} is {', '.join(values)}")
    return runs


def show(value: object) -> str:
    """An argument's value as it is written on a command line: 0.0 as 0."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def differing(runs: list[Run]) -> list[str]:
    """The arguments in which the runs differ, apart from those that make a repetition."""
    names = dict.fromkeys(name for run in runs for name in run.args)
    return [n for n in names if n not in SAME_RUN and len({json.dumps(r.args.get(n)) for r in runs}) > 1]


def check_argument(flag: str, name: str, runs: list[Run]) -> None:
    if not any(name in r.args for r in runs):
        fail(f"{flag} {name}: no such argument in config.json; these runs differ in: {', '.join(differing(runs))}")


def grouped(runs: list[Run], by: list[str]) -> dict[tuple, list[Run]]:
    """Runs by their values of the arguments ``by``, smallest first. Ends where a group is more than repetitions."""
    groups: dict[tuple, list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run.args.get(name) for name in by), []).append(run)
    for members in groups.values():
        if names := differing(members):
            fail(
                f"runs that differ in {', '.join(names)} would be averaged as if they differed in the seed alone "
                f"({members[0].folder.name}, {members[1].folder.name}, ...); add them to --by or --grid, or choose "
                f"one with --where"
            )
    return dict(sorted(groups.items(), key=lambda item: [order(v) for v in item[0]]))


def order(value: object) -> tuple:
    """What values of one argument are sorted by: None, numbers, then what is not a number as text."""
    number = isinstance(value, (int, float))
    return (value is not None, not number, value if number else str(value))


def band(runs: list[Run], key: str, x: str) -> list[tuple[float, float, float, float]]:
    """(place, mean, lowest, highest) over repetitions, where all of them have a finite value.

    In time their steps fall on different places: there, values between steps are taken from the straight line, at
    the places of the first run, as far as the shortest goes.
    """
    curves = []
    for run in runs:
        xs, ys = run.curve(key, x)
        curves.append({a: y for a, y in zip(xs, ys, strict=True) if math.isfinite(y)})
    if not curves or not all(curves):  # no such combination, or nothing logged
        return []
    if x == "time" and len(curves) > 1:
        import numpy as np

        start, end = max(min(c) for c in curves), min(max(c) for c in curves)
        places = [a for a in curves[0] if start <= a <= end]
        columns = [list(np.interp(places, list(c), list(c.values()))) for c in curves]
    else:
        places = [a for a in curves[0] if all(a in c for c in curves)]
        columns = [[c[a] for a in places] for c in curves]
    return [(a, mean(list(v)), min(v), max(v)) for a, *v in zip(places, *columns, strict=True)]


def draw_grid(runs: list[Run], by: list[str], grid: str | None, keys: list[str], x: str, output: Path) -> None:
    """A row a metric, a column a value of ``grid``, a curve a group of ``by``: the same colour everywhere."""
    columns = grouped(runs, [*by, grid] if grid else by)
    values = list(dict.fromkeys(k[-1] for k in columns)) if grid else [None]
    values.sort(key=order)
    labels = list(dict.fromkeys(k[: len(by)] for k in columns))
    size = (max(5.5, 3.6 * len(values)), 2.6 * len(keys) + 1)
    figure, axes = plt.subplots(len(keys), len(values), figsize=size, sharey="row", sharex=True, squeeze=False)
    for (row, key), (column, value) in itertools.product(enumerate(keys), enumerate(values)):
        axis = axes[row][column]
        axis.grid(alpha=0.25)
        for number, label in enumerate(labels):
            points = band(columns.get((*label, value) if grid else label, []), key, x)
            if points:
                places, middle, low, high = zip(*points, strict=True)
                style = {"color": f"C{number % 10}", "ls": "-" if number < 10 else "--"}
                axis.plot(places, middle, lw=1.4, marker="." if len(places) < 20 else "", ms=4, **style)
                axis.fill_between(places, low, high, alpha=0.18, lw=0, color=style["color"])
        if row == 0 and grid:
            axis.set_title(f"{grid} = {show(value)}", fontsize=10)
        if column == 0:
            axis.set_ylabel(key, fontsize=9)
        if row == len(keys) - 1:
            axis.set_xlabel(X_LABELS[x])
    lines = [
        plt.Line2D([], [], color=f"C{n % 10}", ls="-" if n < 10 else "--", label=" ".join(map(show, label)) or "all")
        for n, label in enumerate(labels)
    ]
    figure.legend(handles=lines, title=", ".join(by), loc="outside upper center", ncols=min(len(lines), 4), fontsize=8)
    figure.set_layout_engine("constrained")
    save(figure, output)


def table(runs: list[Run], by: list[str], keys: list[str]) -> str:
    """A row a group in markdown: its runs, and for each metric the mean of the final values (lowest to highest)."""
    rows = [[*by, "runs", "steps", *keys], ["---"] * len(by) + ["---:"] * (len(keys) + 2)]
    for label, members in grouped(runs, by).items():
        steps = sorted({r.metrics[-1]["step"] for r in members})
        row = [*map(show, label), str(len(members)), "-".join(map(str, dict.fromkeys((steps[0], steps[-1]))))]
        for key in keys:
            finals = [v for r in members if math.isfinite(v := r.final(key))]
            spread = f" ({min(finals):.3g} to {max(finals):.3g})" if len(finals) > 1 else ""
            row.append(f"{mean(finals):.3g}{spread}" if finals else "")
        rows.append(row)
    note = "Means over the last tenth of the steps, or of the last evaluation; in brackets the lowest and highest run."
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + f"\n\n{note}"


def compare(args: argparse.Namespace) -> None:
    """The picture and the table for --by, --grid, --where and --metrics."""
    runs = load_runs(args.paths, args.where)
    for flag, names in (("--by", args.by), ("--grid", [args.grid] if args.grid else [])):
        for name in names:
            check_argument(flag, name, runs)
    logged = {key for r in runs for record in (*r.metrics, *r.evals) for key in record}
    for key in args.metrics or []:
        if key not in logged:
            fail(f"--metrics {key}: not logged by these runs; they have {', '.join(sorted(logged))}")
    keys = args.metrics or [key for key in COMPARED if key in logged]
    if args.output is None:
        fail("--output is needed to compare several runs, for example --output compare.png")
    by = [name for name in args.by if name != args.grid]
    draw_grid(runs, by, args.grid, keys, args.x, args.output)
    print(args.output)
    print(table(runs, [*by, *([args.grid] if args.grid else [])], keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="a folder of runs, or folders of runs to compare")
    parser.add_argument("--output", type=Path, help="picture (one run: curves.png in its folder)")
    parser.add_argument("--by", nargs="+", default=[], metavar="ARGUMENT", help="a curve for each of their values")
    parser.add_argument("--grid", metavar="ARGUMENT", help="a column for each of its values")
    parser.add_argument("--where", nargs="+", default=[], metavar="NAME=VALUE", help="only the runs with this argument")
    parser.add_argument("--metrics", nargs="+", metavar="METRIC", help="names from docs/metrics.md, a row for each")
    parser.add_argument("--x", choices=list(X_LABELS), default="step", help="the horizontal axis")
    args = parser.parse_args()
    if args.by or args.grid or args.where or args.metrics:
        compare(args)
        return
    folders = find_runs(args.paths)
    if args.output is None and len(folders) > 1:
        fail("--output is needed to compare several runs, for example --output compare.png")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):  # the same name in two output folders
        names = [str(folder) for folder in folders]
    runs = {n: (read(f / "metrics.jsonl"), read(f / "eval.jsonl")) for n, f in zip(names, folders, strict=True)}
    output = args.output or folders[0] / "curves.png"
    draw(runs, output, args.x)
    print(output)
    for name, (metrics, evals) in runs.items():
        print(f"{name}\n{summary(metrics, evals)}")


if __name__ == "__main__":
    main()

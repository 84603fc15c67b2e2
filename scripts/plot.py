"""Draw the curves of runs from their metrics.jsonl and eval.jsonl, and summarize them in a few lines.

    python scripts/plot.py runs                    the newest run there, or this run -> runs/NAME/curves.png
    python scripts/plot.py runs/A runs/B --output ab.png                 these runs, one curve each
    python scripts/plot.py runs --by learning_rate --output lr.svg       all runs, one curve per value: the mean over
                                                                         seeds, in a band from lowest to highest
    python scripts/plot.py runs --by exp_name --output mine.png          mine.py against grpo.py
    python scripts/plot.py runs/sweep_kl_* --x beta --y kl/sequence eval/pass@1 \\
        --by kl_estimator kl_placement --output kl.png     final values over an argument: mean and 95 % interval over
                                                           seeds, one line per estimator, one panel per placement

--by takes the argument that makes the lines, then those that make the panels; each metric has a row. Runs are averaged
only if they differ in the seed alone: another argument in which they differ is added to --by, with a note. A run may
still be going. A mean ends where the shortest of its runs does. A loss's own metric (policy/NAME) has its own panel.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from intervals import mean_interval, rate_interval

from runtime.arguments.flags import PRESENTATION
from runtime.run.logger import own_pieces
from runtime.run.run_files import control_of, read, read_config, records, series
from runtime.system.process import refuse

matplotlib.use("Agg")  # no display on a cluster
import matplotlib.pyplot as plt

# Okabe and Ito's colors: told apart by people who do not see red and green alike, and in gray.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
plt.rcParams["axes.prop_cycle"] = plt.cycler(color=COLORS)
# title -> metric -> word of the legend
PANELS = {
    "reward": {
        "reward/mean": "reward",
        "reward/correct": "correct",
        "completions/truncated_frac": "truncated",
    },
    "response length (tokens)": {"completions/length_mean": "tokens"},
    "entropy (nats per token)": {"policy/entropy": "entropy"},
    "KL to the reference (nats per sequence)": {"kl/sequence": "KL"},
    "sampler and trainer: log-prob difference (nats per token)": {
        "sampler/logprob_diff_mean": "mean",
        "sampler/logprob_diff_max": "max",
    },
    "gradient norm before clipping": {"optim/grad_norm": "norm"},
    "seconds per step": {
        "time/step": "whole step",
        "time/generate": "generate",
        "time/update": "update",
    },
    "tokens per second, whole step": {"perf/tokens_per_second": "tokens/s"},
}
COMPARED = ("reward/mean", "kl/sequence", "policy/entropy", "completions/length_mean", "eval/pass@1")
SPREAD = "Means over the last tenth of the steps, or of the last evaluation; ± is half the 95 % interval over seeds."
RATES = ("pass@", "majority@", "correct", "format", "truncated_frac")
RUN = "run"  # stands for the folder of a run where runs are grouped by arguments
SAME_RUN = (*PRESENTATION, "seed")  # runs that differ in these alone are repetitions


# ------------------------------------------------------------------------------------------------------ files of a run


def find_run(path: Path) -> Path:
    """Return the folder of a run: the given one, or the newest in the given folder of runs."""
    if not (path / "config.json").exists() and not (path / "metrics.jsonl").exists():
        files = list(path.glob("*/metrics.jsonl"))
        if not files:
            refuse(f"{path} holds no run with a metrics.jsonl; start one with: python grpo.py")
        newest = max(files, key=lambda file: file.stat().st_mtime)
        path = newest.parent
    if next(records(path / "metrics.jsonl"), None) is None:
        refuse(f"{path}: no metrics.jsonl, or no step in it yet")
    return path


@dataclass
class Run:
    """A run's folder and what it holds."""

    folder: Path
    args: dict[str, Any]
    metrics: list[dict]
    evals: list[dict]
    code: dict[str, str] | None = None  # SHA-256 of its files; None for a run that recorded none

    def curve(self, key: str) -> pd.Series:
        """Return a metric of metrics.jsonl or eval.jsonl over the steps."""
        return series(self.evals if key.startswith("eval/") else self.metrics, key)

    def final(self, key: str) -> float:
        """Return the last evaluation, or the mean over the last tenth of the steps, or NaN where there is neither."""
        values = self.curve(key).dropna()
        return values.tail(1 if key.startswith("eval/") else tenth(values)).mean()


def tenth(values: pd.Series) -> int:
    """Return a tenth of the number of values, at least 1."""
    return max(1, len(values) // 10)


def load_run(folder: Path) -> Run:
    """Load the run in a folder; its arguments are unknown if it has no config.json."""
    config = read_config(folder)
    metrics = read(folder / "metrics.jsonl")
    evals = read(folder / "eval.jsonl")
    return Run(folder, config.get("args", {}), metrics, evals, config.get("code"))


def logged_by(runs: list[Run]) -> set[str]:
    """Return the names of everything that the runs logged."""
    return {name for run in runs for record in (*run.metrics, *run.evals) for name in record}


# ------------------------------------------------------------------------------------------------------------- one run


def draw(run: Run, output: Path) -> None:
    """Draw one figure of all panels that have something to show."""
    logged = logged_by([run])
    panels = {title: lines for title, lines in PANELS.items() if not logged.isdisjoint(lines)}
    panels |= {key: {key: key.removeprefix("policy/")} for key in own_pieces(logged)}
    rows = math.ceil(len(panels) / 2)
    figure, axes = plt.subplots(rows, 2, figsize=(13, 3.1 * rows), layout="constrained")
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        draw_panel(axis, title, lines, run)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    figure.suptitle(run.folder.resolve().name, fontsize=11)
    save(figure, output)


def draw_panel(axis: plt.Axes, title: str, lines: dict[str, str], run: Run) -> None:
    """Draw one panel of ``draw``: its lines as in PANELS, with a legend above the data if there are several."""
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlabel("step")
    axis.grid(alpha=0.25)
    axis.xaxis.get_major_locator().set_params(integer=True)
    if title.startswith("sampler"):
        axis.set_yscale("log", nonpositive="mask")
    for (key, word), style in zip(lines.items(), ("-", ":", "--"), strict=False):
        axis.plot(run.curve(key), style, label=word, lw=1.4, marker=".", ms=2)
    if title == "reward":
        draw_evaluations(axis, run)
    _, words = axis.get_legend_handles_labels()
    if len(words) > 1:
        axis.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=len(words),
            fontsize=8,
            frameon=False,
        )


def pass_interval(run: Run) -> pd.DataFrame:
    """Return pass@1's 95 % interval per evaluation, clustered by problem: columns low and high over the steps."""
    found = {}
    for record in run.evals:
        samples = record["eval/samples"]
        found[record["step"]] = rate_interval([right / samples for right in record["eval/right"]], samples)
    return pd.DataFrame.from_dict(found, orient="index", columns=["low", "high"])


def draw_evaluations(axis: plt.Axes, run: Run) -> None:
    """Draw held-out pass@1 and its intervals next to the rewards."""
    rates = run.curve("eval/pass@1")
    if rates.empty:
        return
    ends = pass_interval(run)
    bars = [rates - ends["low"], ends["high"] - rates]
    axis.errorbar(
        rates.index,
        rates,
        bars,
        fmt="o",
        color="C3",
        label="held-out pass@1, 95 %",
        ms=4,
        lw=0.8,
        capsize=2,
    )


def save(figure: plt.Figure, output: Path) -> None:
    """Write and close a figure, in the format that the suffix names."""
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def summary(metrics: list[dict], evals: list[dict]) -> str:
    """Summarize reward, held-out pass@1 and time. A single step's reward is noisy: a tenth of the steps is averaged."""
    rewards = series(metrics, "reward/mean").dropna()
    n = tenth(rewards)
    first = rewards.head(n).mean()
    last = rewards.tail(n).mean()
    lines = []
    if control := control_of(metrics[-1]):
        lines.append(f"  CONTROL  {control}: what was trained on is not the verifier's reward")
    lines.append(f"  reward   {first:.3f} -> {last:.3f}  means of the first and last {n} of {len(rewards)} step(s)")
    scores = series(evals, "eval/pass@1")
    if len(scores) > 0:
        ends = scores.iloc[:: max(1, len(scores) - 1)]
        change = " -> ".join(f"{score:.3f}" for score in ends)
        steps = " and ".join(map(str, ends.index))
        lines.append(f"  pass@1   {change}  on held-out problems, after step {steps}")
    seconds = series(metrics, "time/step").sum()
    lines.append(f"  time     {seconds / 60:.1f} min of training, {seconds / len(metrics):.1f} s per step")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------- comparisons


def load_runs(paths: list[Path]) -> list[Run]:
    """Load the runs in or under the folders that logged a step."""
    files = []
    for path in paths:
        files += [*path.glob("metrics.jsonl"), *sorted(path.glob("*/metrics.jsonl"))]
    folders = {file.parent.resolve(): file.parent for file in files}  # one that is named twice is one seed
    runs = [run for run in map(load_run, folders.values()) if run.metrics]
    if not runs:
        refuse("no run with a step in its metrics.jsonl in these folders; start one with: python grpo.py")
    return runs


def show(value: object) -> str:
    """Format an argument's value as on a command line: 0.0 as 0."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def order(value: object) -> tuple:
    """Return the sort key for a value of an argument: numbers, then the rest as text."""
    number = isinstance(value, int | float)
    return (not number, value if number else str(value))


def grouped(runs: list[Run], names: list[str]) -> dict[tuple[str, ...], list[Run]]:
    """Group the runs by the values of some arguments, as text, smallest first."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in sorted(runs, key=lambda run: [order(run.args.get(name)) for name in names]):
        groups.setdefault(tuple(show(run.args.get(name)) for name in names), []).append(run)
    return groups


def differing(runs: list[Run]) -> list[str]:
    """Return the arguments in which the runs differ, apart from those that may differ between repetitions.

    A name alone (--exp_name try_$RANDOM) makes no difference where arguments and code are equal.
    """
    names = dict.fromkeys(name for run in runs for name in run.args if name not in SAME_RUN)
    if runs[0].code is not None and all(run.code == runs[0].code for run in runs):
        names.pop("exp_name", None)
    return [name for name in names if len({str(run.args.get(name)) for run in runs}) > 1]


def separating(runs: list[Run], by: list[str]) -> list[str]:
    """Return the arguments to add to ``by``, or runs would be averaged that differ in more than the seed."""
    return list(dict.fromkeys(name for members in grouped(runs, by).values() for name in differing(members)))


def problems_behind(runs: list[Run], key: str) -> float | None:
    """Return the number of problems behind a final value that is a rate of responses, or None for any other metric."""
    group, _, name = key.rpartition("/")
    if not name.startswith(RATES):
        return None
    if group.startswith("eval"):
        return min(run.final(f"{group}/problems") for run in runs)
    return min(tenth(run.curve(key).dropna()) * run.args.get("num_unique_prompts_rollout", 1) for run in runs)


def interval(runs: list[Run], key: str) -> tuple[float, float, float]:
    """Return mean and 95 % interval (mean, low, high) of the final values of repetitions, with NaN for too few runs."""
    runs = [run for run in runs if not math.isnan(run.final(key))]
    trials = problems_behind(runs, key) if runs else None
    return mean_interval([run.final(key) for run in runs], trials)


def points(cells: list[list[Run]], key: str, x: str | None) -> pd.DataFrame:
    """Return what one line shows of a metric: mean, low and high.

    With the argument ``x``, mean and 95 % interval of the final values in each cell of runs. Without it, the mean, the
    lowest and the highest of the runs of the only cell, over the steps that all of them have.
    """
    if x:
        return pd.DataFrame([interval(cell, key) for cell in cells], columns=["mean", "low", "high"])
    curves = pd.DataFrame([run.curve(key).dropna() for run in cells[0]])
    curves = curves.dropna(axis=1)
    return pd.DataFrame({"mean": curves.mean(), "low": curves.min(), "high": curves.max()})


def draw_comparison(runs: list[Run], by: list[str], keys: list[str], x: str | None, output: Path) -> None:
    """Draw a row per metric, a column per value of by[1:], and a line per value of by[0]: one color everywhere."""
    groups = grouped(runs, [*by, x] if x else by)
    lines = list(grouped(runs, by[:1]))
    columns = list(grouped(runs, by[1:]))
    places = list(grouped(runs, [x] if x else []))
    figure, axes = plt.subplots(
        len(keys),
        len(columns),
        figsize=(3.6 * len(columns) + 2, 2.6 * len(keys) + 1),
        layout="constrained",
        sharey="row",
        sharex=True,
        squeeze=False,
    )
    for row, key in zip(axes, keys, strict=True):
        for axis, column in zip(row, columns, strict=True):
            conditions = map(" = ".join, zip(by[1:], column, strict=True))
            axis.set_title(", ".join([key, *conditions]), fontsize=9)
            axis.grid(alpha=0.25)
            if x:
                axis.set_xticks(range(len(places)), [place for (place,) in places])
            for number, line in enumerate(lines):
                cells = [groups.get(line + column + place, []) for place in places]
                draw_points(axis, points(cells, key, x), f"C{number}", " ".join(line))
    figure.supxlabel(f"{x} (final values)" if x else "step", fontsize=9)
    if by:
        figure.legend(
            *axes[0][0].get_legend_handles_labels(),
            title=by[0],
            loc="outside upper center",
            fontsize=8,
        )
    save(figure, output)


def draw_points(axis: plt.Axes, points: pd.DataFrame, color: str, label: str) -> None:
    """Draw a mean and the band around it."""
    axis.plot(
        points["mean"],
        color=color,
        label=label,
        lw=1.4,
        marker=".",
        ms=2,
    )
    axis.fill_between(
        points.index,
        points["low"],
        points["high"],
        color=color,
        alpha=0.18,
        lw=0,
    )


def table(runs: list[Run], by: list[str], keys: list[str]) -> str:
    """Format a Markdown table: a row per group with its runs, and the mean of each metric's final values."""
    rows = [
        [*by, "runs", "steps", *keys],
        [*["---"] * len(by), *["---:"] * (len(keys) + 2)],
    ]
    for names, members in grouped(runs, by).items():
        steps = sorted({run.metrics[-1]["step"] for run in members})
        cells = [cell(members, key) for key in keys]
        rows.append([*names, str(len(members)), "-".join(map(str, steps)), *cells])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", SPREAD])


def cell(members: list[Run], key: str) -> str:
    """Format the final values of a metric in a group as a cell of the table; "" where no run has one."""
    mean, low, high = interval(members, key)
    if math.isnan(mean):
        return ""
    if math.isnan(low):
        return f"{mean:.4g}"
    half = max(mean - low, high - mean)
    return f"{mean:.4g} ± {half:.3g}"


def compare(args: argparse.Namespace) -> None:
    """Draw the figure and print the table of several runs."""
    runs = load_runs(args.paths)
    x = [args.x] if args.x else []
    by = [name for name in args.by if name != args.x]
    if not by and not x:
        by = [RUN]
        for run in runs:
            run.args[RUN] = str(run.folder)
    for name in [*by, *x]:
        if not any(name in run.args for run in runs):
            refuse(f"{name}: no such argument in config.json; these runs differ in: {', '.join(differing(runs))}")
    logged = logged_by(runs)
    keys = args.y or [key for key in COMPARED if key in logged]
    for key in keys:
        if key not in logged:
            refuse(f"--y {key}: not logged by these runs; they have {', '.join(sorted(logged))}")
    more = separating(runs, [*by, *x])
    if more:
        by += more
        print(f"note: the runs also differ in {', '.join(more)}, which --by now includes")
    draw_comparison(runs, by, keys, args.x, args.output)
    print(args.output)
    print(table(runs, [*by, *x], keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="+", type=Path, help="a folder of runs, or folders of runs to compare")
    add("--output", type=Path, help="figure to write; default for one run: curves.png in its folder")
    add("--by", nargs="+", default=[], metavar="ARGUMENT", help="one line per value of the first, one panel of others")
    add("--y", nargs="+", default=[], metavar="METRIC", help="names from docs/metrics.md")
    add(
        "--x",
        metavar="ARGUMENT",
        help="draw final values over this argument; default: curves over the steps",
    )
    args = parser.parse_args()
    if args.output and args.output.suffix not in (".png", ".svg", ".pdf"):
        refuse(f"--output {args.output}: the suffix must be .png, .svg or .pdf")
    several = [*args.paths[1:], *args.by, *args.y]
    if several or args.x:
        if args.output is None:
            refuse("--output is needed to compare several runs, for example --output compare.png")
        compare(args)
        return
    folder = find_run(*args.paths)
    run = load_run(folder)
    output = args.output or folder / "curves.png"
    draw(run, output)
    print(f"{output}\n{folder.resolve().name}\n{summary(run.metrics, run.evals)}")


if __name__ == "__main__":
    main()

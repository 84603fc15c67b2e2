"""Draw the curves of runs from their metrics.jsonl and eval.jsonl, and summarize each run in a few lines.

    python scripts/plot.py runs                    the newest run in that folder -> runs/<name>/curves.png
    python scripts/plot.py runs/A                  this run -> runs/A/curves.png
    python scripts/plot.py runs/A runs/B ...       overlaid, with a legend -> --output
    python scripts/plot.py runs --by learning_rate --output lr.svg       all runs, one curve per value: the mean over
                                                                         seeds, in a band from lowest to highest
    python scripts/plot.py runs --by exp_name --output mine.png          mine.py against grpo.py: a copy's runs have its
                                                                         name
    python scripts/plot.py runs --where exp_name=sweep_kl --x beta --y final:kl/sequence final:eval/pass@1 \\
        --by kl_estimator kl_placement --output kl.png     final values over an argument: mean and 95 % interval over
                                                           seeds, one line per estimator, one panel per placement

--by takes the argument that makes the lines, then those that make the panels; each metric has a row. Runs are averaged
only if they differ in the seed alone: another argument in which they differ is added to --by, with a note. --x is step,
episode, time (minutes of training, including evaluations between steps) or, for final values, any argument. The suffix
of --output decides the format (png, svg, pdf). Comparisons end with a table in Markdown. A run may still be going: a
half-written last line is ignored, and a mean ends where the shortest of its runs does. A piece that a script's own
token_loss returned (policy/NAME) has a panel of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import matplotlib
import numpy as np
import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime.arguments.flags import PRESENTATION
from runtime.run.intervals import mean_interval, rate_interval, wilson
from runtime.run.logger import own_pieces
from runtime.run.run_files import PHASES, control_of, read, read_config, series
from runtime.system.jsonl import records

matplotlib.use("Agg")  # no display on a cluster
import matplotlib.pyplot as plt

# Okabe and Ito's colors: told apart by people who do not see red and green alike, and in gray.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
plt.rcParams["axes.prop_cycle"] = plt.cycler(color=COLORS)
# title -> (metric, word of the legend, line style)
PANELS = {
    "reward": [
        ("reward/mean", "reward", "-"),
        ("reward/correct", "correct", ":"),
    ],
    "response length": [
        ("completions/length_mean", "tokens", "-"),
        ("completions/truncated_frac", "truncated fraction (right)", ":"),
    ],
    "entropy (nats per token)": [("policy/entropy", "entropy", "-")],
    "KL to the reference (nats per sequence)": [("kl/sequence", "KL", "-")],
    "sampler and trainer: log-prob difference (nats per token)": [
        ("sampler/logprob_diff_mean", "mean", "-"),
        ("sampler/logprob_diff_max", "max", ":"),
    ],
    "gradient norm before clipping": [("optim/grad_norm", "norm", "-")],
    "seconds per step": [("time/step", "step", "-")],
    "tokens per second, whole step": [("perf/tokens_per_second", "tokens/s", "-")],
}
X_LABELS = {
    "step": "step",
    "episode": "samples",
    "time": "minutes of training",
}
COMPARED = [
    "reward/mean",
    "kl/sequence",
    "policy/entropy",
    "completions/length_mean",
    "eval/pass@1",
]
SAME_RUN = (*PRESENTATION, "seed")  # runs that differ in these alone are repetitions
FINAL = "final:"
MAX_PANELS = 12  # side by side; more of them are too narrow to read


def fail(message: str) -> NoReturn:
    """Exit with code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# ------------------------------------------------------------------------------------------------------ files of a run


def find_runs(paths: list[Path]) -> list[Path]:
    """Return the folders of the runs to plot: the given ones, or the newest run in the one folder given."""
    folder = paths[0]
    is_run = any((folder / name).exists() for name in ("config.json", "metrics.jsonl"))
    if len(paths) == 1 and folder.is_dir() and not is_run:
        files = list(folder.glob("*/metrics.jsonl"))
        if not files:
            fail(f"{folder} holds no run with a metrics.jsonl; start one with: python grpo.py")
        newest = max(files, key=lambda file: file.stat().st_mtime)
        paths = [newest.parent]
    # Of runs/*: scripts/run_many.py writes what a run prints beside its folder, as NAME.log.
    paths = [path for path in paths if path.is_dir() or path.suffix != ".log"]
    if not paths:
        fail("these are log files; pass runs, or the folder of a run")
    for path in paths:
        if not path.is_dir():
            fail(f"{path} is not a folder; pass runs, or the folder of a run")
        if next(records(path / "metrics.jsonl"), None) is None:
            fail(f"{path}: no metrics.jsonl, or no step in it yet")
    return paths


def positions(metrics: list[dict], x: str) -> dict[int, float]:
    """Map each step to its place on the horizontal axis ``x``. The evaluation before the first step is at 0."""
    steps = [r["step"] for r in metrics]
    if x == "time":
        minutes = series(metrics, "time/step").fillna(0) / 60
        places = minutes.cumsum().tolist()
    else:
        places = [r[x] for r in metrics]
    return dict(zip([0, *steps], [0, *places], strict=True))


@dataclass
class Run:
    """A run's folder and what it holds."""

    folder: Path
    args: dict[str, Any]
    metrics: list[dict]
    evals: list[dict]
    measured: dict[str, float] = field(default_factory=dict)  # by studies/measure_kl.py, after the run
    code: dict[str, str] | None = None  # SHA-256 of its files; None for a run that recorded none

    def curve(self, key: str, x: str = "step") -> pd.Series:
        """Return a metric of metrics.jsonl or eval.jsonl over the axis ``x``."""
        records = self.evals if key.startswith("eval/") else self.metrics
        return series(records, key, positions(self.metrics, x))

    def final(self, key: str) -> float:
        """Return the last measurement or evaluation, else the mean over the last tenth of the steps, else NaN."""
        if key in self.measured:
            return self.measured[key]
        values = self.curve(key).dropna()
        if key.startswith("eval/"):
            return values.tail(1).mean()
        return values.tail(tenth(values)).mean()


def tenth(values: pd.Series) -> int:
    """Return a tenth of the number of values, at least 1."""
    return max(1, len(values) // 10)


def load_run(folder: Path) -> Run:
    """Load the run in a folder; its arguments are {} if it has no config.json."""
    config = read_config(folder)
    metrics = read(folder / "metrics.jsonl")
    evals = read(folder / "eval.jsonl")
    measured = folder / "measured_kl.json"
    found = json.loads(measured.read_text()) if measured.exists() else {}
    return Run(folder, config.get("args", {}), metrics, evals, found, config.get("code"))


# ----------------------------------------------------------------------------------------------------- one run, or few


def draw(runs: dict[str, Run], output: Path, x: str = "step") -> None:
    """Draw one figure of all panels that have something to show, with one color per run if there are several."""
    logged = logged_by(list(runs.values()))
    panels = {}
    for title, lines in PANELS.items():
        if any(key in logged for key, _, _ in lines):
            panels[title] = lines
    for key in own_pieces(logged):
        panels[key] = [(key, key.removeprefix("policy/"), "-")]
    rows = math.ceil(len(panels) / 2)
    figure, axes = plt.subplots(rows, 2, figsize=(13, 3.1 * rows), layout="constrained")
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        draw_panel(axis, title, lines, runs, x)
        axis.set_xlabel(X_LABELS[x])
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    if len(runs) == 1:
        figure.suptitle(*runs, fontsize=11)
    else:  # names are long: above the panels, one to a line
        handles = [plt.Line2D([], [], color=f"C{r}", label=name) for r, name in enumerate(runs)]
        figure.legend(handles=handles, loc="outside upper center", fontsize=9)
    save(figure, output)


def pass_interval(run: Run, x: str) -> pd.DataFrame:
    """Return pass@1's 95 % interval per evaluation, clustered by problem: columns low and high over the axis ``x``.

    Older runs wrote no single problems; their interval is that of one response per problem.
    """
    at = positions(run.metrics, x)
    found = {}
    for record in run.evals:
        if "eval/right" in record:
            samples = record["eval/samples"]
            ends = rate_interval([right / samples for right in record["eval/right"]], samples)
        else:
            ends = wilson(record["eval/pass@1"] * record["eval/problems"], record["eval/problems"])
        if record["step"] in at:
            found[at[record["step"]]] = ends
    return pd.DataFrame.from_dict(found, orient="index", columns=["low", "high"])


def legend_words(curves: dict[str, pd.Series]) -> dict[str, pd.Series]:
    """Return the curves by the words of a legend. A curve that coincides with an earlier one is named next to it."""
    found: dict[str, pd.Series] = {}
    for word, curve in curves.items():
        twin = next((words for words, other in found.items() if curve.equals(other)), None)
        if twin is None:
            found[word] = curve
        else:
            found = {f"{words} = {word}" if words == twin else words: other for words, other in found.items()}
    return found


def draw_panel(axis: plt.Axes, title: str, lines: list[tuple[str, str, str]], runs: dict[str, Run], x: str) -> None:
    """Draw one panel of ``draw``: its lines as in PANELS, and for one run its legend above the data."""
    several = len(runs) > 1
    if several and title.startswith("reward"):
        lines = lines[:1]
    axis.set_title(title, fontsize=10, loc="left")
    axis.grid(alpha=0.25)
    axis.xaxis.get_major_locator().set_params(integer=x != "time")
    right = axis
    if title.startswith("response"):  # tokens and a fraction share no scale
        right = axis.twinx()
        right.set_ylim(-0.02, 1.02)
    if title.startswith("sampler"):
        axis.set_yscale("log", nonpositive="mask")
    for r, run in enumerate(runs.values()):
        if title == "seconds per step" and not several:
            stack(axis, run, x)
            continue
        curves = legend_words({word: run.curve(key, x) for key, word, _ in lines})
        for i, ((label, curve), (_, _, style)) in enumerate(zip(curves.items(), lines, strict=False)):
            if curve.empty:
                continue
            target = right if i > 0 else axis
            target.plot(
                curve,
                style,
                color=f"C{r if several else i}",
                label=label,
                lw=1.4,
                marker="." if len(curve) < 2 else "",
            )
        if title.startswith("reward"):
            evaluations = run.curve("eval/pass@1", x)
            if evaluations.empty:
                continue
            ends = pass_interval(run, x).reindex(evaluations.index)
            axis.errorbar(
                evaluations.index,
                evaluations,
                [evaluations - ends["low"], ends["high"] - evaluations],
                fmt="o--" if len(evaluations) > 2 else "o",  # a line through two says nothing of what is between them
                color=f"C{r if several else 1}",
                label="held-out pass@1, 95 %",
                ms=4,
                lw=0.8,
                capsize=2,
            )
    handles, words = axis.get_legend_handles_labels()
    if right is not axis:
        more_handles, more_words = right.get_legend_handles_labels()
        handles += more_handles
        words += more_words
    if len(handles) > 1 and not several:
        axis.legend(
            handles,
            words,
            loc="lower right",
            bbox_to_anchor=(1, 1),
            borderaxespad=0.1,
            ncols=len(handles),
            fontsize=8,
            frameon=False,
            handlelength=1.5,
            columnspacing=1,
        )


def stack(axis: plt.Axes, run: Run, x: str) -> None:
    """Draw the seconds of the phases one on the other, up to the whole step; less than a hundredth is in the rest."""
    frame = pd.DataFrame(run.metrics).set_index("step")
    layers = {}
    for phase in PHASES:
        if f"time/{phase}" in frame and frame[f"time/{phase}"].sum() > 0.01 * frame["time/step"].sum():
            layers[phase] = frame[f"time/{phase}"].astype(float).fillna(0)
    rest = frame["time/step"].astype(float) - sum(layers.values())
    layers["rest"] = rest.clip(lower=0)
    at = positions(run.metrics, x)
    edges = {"step": "mid"} if len(frame) > 1 else {}
    axis.stackplot(
        [at[step] for step in frame.index],
        *layers.values(),
        labels=list(layers),
        alpha=0.85,
        **edges,
    )


def save(figure: plt.Figure, output: Path) -> None:
    """Write and close a figure, in the format that the suffix names."""
    formats = sorted(figure.canvas.get_supported_filetypes())
    if output.suffix.lstrip(".") not in formats:
        fail(f"--output {output}: the suffix must be one of {', '.join(formats)}")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def sparkline(values: pd.Series, width: int = 60) -> str:
    """Draw a line of at most ``width`` bars of text, each the mean of its share of the values."""
    if values.empty:
        return ""
    width = min(width, len(values))
    share = np.arange(len(values)) * width // len(values)
    means = values.groupby(share).mean()
    heights = means - means.min()
    if heights.max() > 0:
        heights = heights / heights.max()
    return "".join("▁▂▃▄▅▆▇█"[round(7 * height)] for height in heights)


def summary(metrics: list[dict], evals: list[dict]) -> str:
    """Summarize reward, held-out pass@1 and time. A single step's reward is noisy: a tenth of the steps is averaged."""
    rewards = series(metrics, "reward/mean").dropna()
    n = tenth(rewards)
    first = rewards.head(n).mean()
    last = rewards.tail(n).mean()
    over = f"{len(rewards)} step(s)"
    if n > 1:
        over = f"means of the first and last {n} of {len(rewards)} steps"
    control = control_of(metrics[-1])
    lines = [f"  CONTROL  {control}: what was trained on is not the verifier's reward"] if control else []
    lines += [f"  reward   {first:.3f} -> {last:.3f}  {sparkline(rewards)}  {over}"]
    scores = series(evals, "eval/pass@1")
    if len(scores) > 0:
        ends = scores.iloc[[0, -1]] if len(scores) > 1 else scores
        change = " -> ".join(f"{score:.3f}" for score in ends)
        steps = " and ".join(map(str, ends.index))
        lines.append(f"  pass@1   {change}  on held-out problems, after step {steps}")
    seconds = series(metrics, "time/step").sum()
    lines.append(f"  time     {seconds / 60:.1f} min of training, {seconds / len(metrics):.1f} s per step")
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------- comparisons


def load_runs(paths: list[Path], where: list[str]) -> list[Run]:
    """Load the runs in or under the folders that logged a step and have the arguments of ``where`` (NAME=VALUE)."""
    folders = []
    for path in paths:
        folders += [path] if (path / "config.json").exists() else sorted(path.glob("*/"))
    runs = [load_run(folder) for folder in folders if (folder / "config.json").exists()]
    runs = [run for run in runs if run.metrics]
    if not runs:
        fail(f"no run with a config.json and a metrics.jsonl in {', '.join(map(str, paths))}")
    for condition in where:
        runs = chosen(runs, condition)
    return runs


def chosen(runs: list[Run], condition: str) -> list[Run]:
    """Return the runs in which the argument NAME has the VALUE of ``condition`` (NAME=VALUE)."""
    name, equals, value = condition.partition("=")
    if not equals:
        fail(f"--where {condition}: write NAME=VALUE, for example --where beta=0.1")
    check_argument("--where", name, runs)
    having = [run for run in runs if name in run.args]
    values = sorted({show(run.args[name]) for run in having})
    if value not in values:
        fail(f"--where {condition}: no run; --{name} is {', '.join(values)}")
    return [run for run in having if show(run.args[name]) == value]


def show(value: object) -> str:
    """Format an argument's value as on a command line: 0.0 as 0, a list as its words."""
    if isinstance(value, list):
        return " ".join(map(show, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def order(value: object) -> tuple:
    """Return the sort key for a value of an argument: None, numbers, then the rest as text."""
    number = isinstance(value, int | float)
    return (value is not None, not number, value if number else str(value))


def differing(runs: list[Run]) -> list[str]:
    """Return the arguments in which the runs differ, apart from those that may differ between repetitions.

    A name alone (--exp_name try_$RANDOM) makes no difference where arguments and code are equal.
    """
    names = dict.fromkeys(name for run in runs for name in run.args)
    same_code = runs[0].code is not None and all(run.code == runs[0].code for run in runs)
    if same_code:
        names.pop("exp_name", None)
    found = []
    for name in names:
        values = {json.dumps(run.args.get(name)) for run in runs}
        if name not in SAME_RUN and len(values) > 1:
            found.append(name)
    return found


def logged_by(runs: list[Run]) -> set[str]:
    """Return the names of everything that the runs logged."""
    logged = set()
    for run in runs:
        for record in (*run.metrics, *run.evals, run.measured):
            logged.update(record)
    return logged


def check_argument(flag: str, name: str, runs: list[Run]) -> None:
    """Reject a name that is no argument of these runs."""
    if not any(name in run.args for run in runs):
        fail(f"{flag} {name}: no such argument in config.json; these runs differ in: {', '.join(differing(runs))}")


def label(run: Run, names: list[str]) -> tuple[str, ...]:
    """Return the values of some arguments of a run, as text."""
    return tuple(show(run.args.get(name)) for name in names)


def ordered(runs: list[Run], names: list[str]) -> list[Run]:
    """Sort the runs by the values of some arguments, smallest first."""
    return sorted(runs, key=lambda run: [order(run.args.get(name)) for name in names])


def labels(runs: list[Run], names: list[str]) -> list[tuple[str, ...]]:
    """Return the combinations of values of some arguments among the runs, as text, smallest first."""
    return list(dict.fromkeys(label(run, names) for run in ordered(runs, names)))


def grouped(runs: list[Run], by: list[str]) -> dict[tuple[str, ...], list[Run]]:
    """Group the runs by the values of the arguments ``by``, as text, smallest first."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in ordered(runs, by):
        groups.setdefault(label(run, by), []).append(run)
    return groups


def separating(runs: list[Run], by: list[str]) -> list[str]:
    """Return the arguments to add to ``by``, or runs would be averaged that differ in more than the seed."""
    more = dict.fromkeys(name for members in grouped(runs, by).values() for name in differing(members))
    return list(more)


def band(runs: list[Run], key: str, x: str) -> pd.DataFrame:
    """Return mean, min and max over repetitions by place on the axis, or an empty table if a run has no value.

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


def finals(runs: list[Run], key: str) -> pd.Series:
    """Return the final value of a metric for each run that has one."""
    return pd.Series([run.final(key) for run in runs], dtype=float).dropna()


def problems_behind(run: Run, key: str) -> float | None:
    """Return the number of problems behind a final value that is a rate of responses, or None for any other metric."""
    group, _, name = key.rpartition("/")
    if not (name.startswith(("pass@", "majority@")) or name in ("correct", "format", "truncated_frac")):
        return None
    if group.startswith("eval"):
        return run.final(f"{group}/problems")
    return tenth(run.curve(key).dropna()) * run.args.get("num_unique_prompts_rollout", 1)


def interval(runs: list[Run], key: str) -> tuple[float, float]:
    """Return (mean, half the 95 % interval) of the final values of repetitions, with NaN for too few runs.

    Of rates the larger half, which is not 0 where all are 0 or 1.
    """
    with_value = [run for run in runs if not math.isnan(run.final(key))]
    problems = [problems_behind(run, key) for run in with_value]
    trials = None if None in problems or not problems else min(problems)
    mean, low, high = mean_interval([run.final(key) for run in with_value], trials)
    return mean, max(mean - low, high - mean)


def draw_comparison(runs: list[Run], by: list[str], keys: list[str], x: str, output: Path) -> None:
    """Draw a row per metric, a column per value of by[1:], and a line per value of by[0]: one color everywhere."""
    over_argument = x not in X_LABELS
    groups = grouped(runs, [*by, x] if over_argument else by)
    lines = labels(runs, by[:1])
    columns = labels(runs, by[1:])
    places = [place for (place,) in labels(runs, [x])]
    styles = [{"color": f"C{n}", "ls": ("-", "--", ":")[n // len(COLORS) % 3]} for n in range(len(lines))]
    figure, axes = plt.subplots(
        len(keys),
        len(columns),
        figsize=(max(5.5, 3.6 * len(columns)), 2.6 * len(keys) + 1),
        sharey="row",
        sharex=True,
        squeeze=False,
    )
    for (row, key), (column, values) in itertools.product(enumerate(keys), enumerate(columns)):
        axis = axes[row][column]
        axis.grid(alpha=0.25)
        middles = {}
        for number, line in enumerate(lines):
            if over_argument:
                cells = [groups.get((*line, *values, place), []) for place in places]
                shift = (number - (len(lines) - 1) / 2) / len(lines)  # keeps the intervals of the lines apart
                draw_finals(axis, cells, key, 0.12 * shift, styles[number])
            else:
                points = band(groups.get((*line, *values), []), key, x)
                draw_band(axis, points, styles[number])
                middles[" ".join(line)] = points["mean"]
        same = coinciding(middles)
        if same:
            axis.set_title("one line: " + "; ".join(map(", ".join, same)), fontsize=8, loc="right")
        if over_argument:
            axis.set_xticks(range(len(places)), places)
        if column == 0:
            axis.set_ylabel(f"final {key}" if over_argument else key, fontsize=9)
    for axis, values in zip(axes[0], columns, strict=True):
        title = [f"{name} = {value}" for name, value in zip(by[1:], values, strict=True)]
        axis.set_title(", ".join(title), fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel(X_LABELS.get(x, x))
    handles = []
    for line, style in zip(lines, styles, strict=True):
        handles.append(plt.Line2D([], [], label=" ".join(line) or "all", **style))
    figure.legend(
        handles=handles,
        title=by[0] if by else None,
        loc="outside upper center",
        ncols=min(len(lines), 4),
        fontsize=8,
    )
    figure.set_layout_engine("constrained")
    save(figure, output)


def coinciding(middles: dict[str, pd.Series]) -> list[list[str]]:
    """Return groups of names whose curves coincide to within a 200th of the height of their panel."""
    drawn = {name: curve for name, curve in middles.items() if not curve.empty}
    if len(drawn) < 2:
        return []
    height = max(curve.max() for curve in drawn.values()) - min(curve.min() for curve in drawn.values())
    groups: list[list[str]] = []
    for name, curve in drawn.items():
        for group in groups:
            if curve.index.equals(drawn[group[0]].index) and (curve - drawn[group[0]]).abs().max() <= height / 200:
                group.append(name)
                break
        else:
            groups.append([name])
    return [group for group in groups if len(group) > 1]


def draw_band(axis: plt.Axes, points: pd.DataFrame, style: dict[str, str]) -> None:
    """Draw a mean and its band."""
    if points.empty:
        return
    axis.plot(
        points["mean"],
        lw=1.4,
        marker="." if len(points) < 20 else "",
        ms=4,
        **style,
    )
    axis.fill_between(
        points.index,
        points["min"],
        points["max"],
        alpha=0.18,
        lw=0,
        color=style["color"],
    )


def draw_finals(axis: plt.Axes, cells: list[list[Run]], key: str, offset: float, style: dict[str, str]) -> None:
    """Draw means and 95 % intervals at equal distances, one for each cell that has runs."""
    stats = pd.DataFrame(
        [interval(cell, key) for cell in cells],
        index=np.arange(len(cells)) + offset,
        columns=["mean", "half"],
    )
    stats = stats.dropna(subset="mean")
    axis.errorbar(
        stats.index,
        stats["mean"],
        yerr=stats["half"].fillna(0),
        marker="o",
        ms=4,
        capsize=3,
        lw=1.2,
        **style,
    )


def table(runs: list[Run], by: list[str], keys: list[str], over_argument: bool) -> str:
    """Format a Markdown table: a row per group with its runs, and each metric's mean of the final values and spread."""
    rows = [
        [*by, "runs", "steps", *keys],
        [*["---"] * len(by), *["---:"] * (len(keys) + 2)],
    ]
    for names, members in grouped(runs, by).items():
        steps = sorted({run.metrics[-1]["step"] for run in members})
        span = str(steps[0]) if len(steps) == 1 else f"{steps[0]}-{steps[-1]}"
        cells = [cell(members, key, over_argument) for key in keys]
        rows.append([*names, str(len(members)), span, *cells])
    spread = "in brackets the lowest and highest run"
    if over_argument:
        spread = "± is half the 95 % interval over seeds"
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", f"Means over the last tenth of the steps, or of the last evaluation; {spread}."]
    return "\n".join(lines)


def digits(values: pd.Series) -> int:
    """Return the significant digits, 3 to 6, that distinguish the lowest value from the highest, and a value from 1."""
    for count in range(3, 6):
        ends = [f"{value:.{count}g}" for value in (values.min(), values.max())]
        if (ends[0] != ends[1] or values.min() == values.max()) and ("1" not in ends or 1.0 in values.tolist()):
            return count
    return 6


def cell(members: list[Run], key: str, over_argument: bool) -> str:
    """Format the final values of a metric in a group as a cell of the table."""
    values = finals(members, key)
    middle, half = interval(members, key)
    if values.empty:
        return ""
    form = f".{digits(values)}g"
    if len(values) == 1:
        return f"{middle:{form}}"
    if over_argument:
        return f"{middle:{form}} ± {half:.3g}"
    return f"{middle:{form}} ({values.min():{form}} to {values.max():{form}})"


def metric_names(args: argparse.Namespace, runs: list[Run]) -> list[str]:
    """Return the metrics of --y without ``final:``, or the default ones. Rejects those not logged or unfit for --x."""
    over_argument = args.x not in X_LABELS
    logged = logged_by(runs)
    keys = []
    for given in args.y:
        key = given.removeprefix(FINAL)
        if key not in logged:
            fail(f"--y {given}: not logged by these runs; they have {', '.join(sorted(logged))}")
        if (given != key or any(key in run.measured for run in runs)) and not over_argument:
            fail(f"--y {given}: a final value is drawn over an argument; add one, for example --x learning_rate")
        if given == key and over_argument:
            fail(f"--x {args.x}: draws final values; write --y {FINAL}{key}")
        keys.append(key)
    return keys or [key for key in COMPARED if key in logged]


def compare(args: argparse.Namespace) -> None:
    """Draw the figure and print the table for --by, --where, --y and --x with an argument."""
    runs = load_runs(args.paths, args.where)
    for name in args.by:
        check_argument("--by", name, runs)
    over_argument = args.x not in X_LABELS
    if over_argument:
        check_argument(f"--x {'|'.join(X_LABELS)} or", args.x, runs)
    keys = metric_names(args, runs)
    if args.output is None:
        fail("--output is needed to compare several runs, for example --output compare.png")
    by = [name for name in args.by if name != args.x]
    more = separating(runs, [*by, args.x] if over_argument else by)
    if more:
        by += more
        panels = len(labels(runs, by[1:]))
        if panels > MAX_PANELS:
            fail(
                f"the runs also differ in {', '.join(more)}, which would make {panels} panels per metric, more than "
                f"{MAX_PANELS}; choose some of the runs, for example --where {more[-1]}={labels(runs, more[-1:])[0][0]}"
            )
        print(f"note: the runs also differ in {', '.join(more)}, so --by is {' '.join(by)}; --where chooses one value")
    draw_comparison(runs, by, keys, args.x, args.output)
    print(args.output)
    if over_argument:
        by.append(args.x)
    print(table(runs, by, keys, over_argument))


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

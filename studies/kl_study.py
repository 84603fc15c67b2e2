"""The KL study: its raw results as one table, and the figures and tables of docs/maintainers/kl_study.md.

    python studies/kl_study.py                           redraws the figures and prints the tables

The table, docs/maintainers/data/kl_study.csv.gz, has a row per run: the arguments that differ from their defaults, the
version of the code, and final values, of the last evaluation or the mean over the last tenth of the steps. ``kl/exact``
was measured by studies/measure_kl.py, which commit 98a86a0 has, with the option that adds rows.

Intervals are 95 % intervals over seeds, by Student's t. The KL spans three decades, so its mean is the geometric one,
with the interval of the logarithm. Effects are compared seed by seed, because runs with the same seed have the same
prompts: the ratio of the KL to that of the run without a KL term, and the slope of ln KL over ln beta. A ratio of 1 and
a slope of 0 stand for no effect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))  # the scripts are not a package

import numpy as np
import pandas as pd
import plot
from intervals import mean_interval

matplotlib.use("Agg")  # no display on a cluster
import matplotlib.pyplot as plt

DOCS = Path(__file__).resolve().parent.parent / "docs" / "maintainers"
TABLE = DOCS / "data" / "kl_study.csv.gz"
STYLES = {  # one of scripts/plot.py's colors per estimator, dashed where the gradient is unbiased
    "k1, naive": ("C1", "-"),
    "k1, unbiased": ("C1", "--"),
    "k2, naive": ("C0", "-"),
    "k2, unbiased": ("C0", "--"),
    "k3, naive": ("C4", "-"),
    "k3, unbiased": ("C4", "--"),
    "k4, naive": ("C2", "-"),
    "k4, unbiased": ("C2", "--"),
    "full": ("C6", "-"),
    "k1": ("C1", "-"),
    "k2": ("C0", "-"),
    "k3": ("C4", "-"),
    "k4": ("C2", "-"),
}
SAME = ("k1, unbiased", "k2, unbiased", "k4, unbiased")  # as k3, unbiased: one algorithm, and one line in the figures


# ------------------------------------------------------------------------------------------------------------ the parts


def setting(run: pd.Series) -> str:
    """Return the estimator of a run and, where it matters, its gradient; "" for a run without a KL term."""
    if run["beta"] == 0:
        return ""
    if run["kl_placement"] == "reward" or run["kl_estimator"] == "full":
        return run["kl_estimator"]
    return f"{run['kl_estimator']}, {run['kl_gradient']}"


def parts(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Split the runs by model and number of optimizer steps per batch, and add a column ``setting``."""
    table = table.assign(setting=table.apply(setting, axis=1))
    found = {}
    groups = dict(list(table.groupby(["model", "num_mini_batches"])))
    for model, mini_batches in sorted(groups, key=lambda key: (not key[0].startswith("testbed"), -key[1])):
        steps = "one optimizer step per batch" if mini_batches == 1 else f"{mini_batches} optimizer steps per batch"
        found[f"{model}, {steps}"] = groups[model, mini_batches]
    return found


def interval(values: pd.Series) -> tuple[float, float]:
    """(mean, half the 95 % interval); NaN for the half of a single value."""
    mean, _, high = mean_interval(values)
    return mean, high - mean


def geometric(values: pd.Series) -> tuple[float, float, float]:
    """(geometric mean, lower and upper end of its 95 % interval); NaN for the ends of a single value."""
    mean, half = interval(np.log(values))
    return tuple(np.exp([mean, mean - half, mean + half]))


def summary(members: pd.DataFrame) -> dict[str, float]:
    """Summarize repetitions: their number, the KL with its interval, pass@1 with half its interval."""
    kl, low, high = geometric(members["kl/exact"])
    solved, half = interval(members["eval/pass@1"])
    return {"n": len(members), "kl": kl, "low": low, "high": high, "pass": solved, "half": half}


def cells(runs: pd.DataFrame, placement: str) -> dict[str, pd.DataFrame]:
    """Return setting -> a row per beta: the ``summary`` of its runs."""
    found = {}
    with_kl = runs[(runs["setting"] != "") & (runs["kl_placement"] == placement)]
    for name in [name for name in STYLES if name in set(with_kl["setting"])]:
        rows = {}
        for beta, members in with_kl[with_kl["setting"] == name].groupby("beta"):
            rows[beta] = summary(members)
        found[name] = pd.DataFrame.from_dict(rows, orient="index")
    return found


# ---------------------------------------------------------------------------------------------------------- the figures


def panels(table: pd.DataFrame, title: str) -> tuple[plt.Figure, list[tuple[pd.DataFrame, str, plt.Axes]]]:
    """Return a figure with a row per part and a column per placement, and (runs, placement, axis) of each panel.

    ``title``: the message of the figure.
    """
    found = parts(table)
    figure, axes = plt.subplots(len(found), 2, figsize=(10, 3.2 * len(found) + 0.6), squeeze=False, sharey="row")
    places = []
    for (part, runs), pair in zip(found.items(), axes, strict=True):
        for placement, axis in zip(("loss", "reward"), pair, strict=True):
            axis.set_title(f"{part}: KL in the {placement}", fontsize=9)
            axis.grid(alpha=0.25)
            places.append((runs[~runs["setting"].isin(SAME)], placement, axis))
    figure.suptitle(title, fontsize=11)
    figure.set_layout_engine("constrained")
    return figure, places


def label_ends(axis: plt.Axes, lines: dict[str, tuple[float, float, str]], at: float, side: str = "left") -> None:
    """Write each line's name at ``at`` of the axis's width, as near to the height of its end as others let it.

    ``lines``: name -> (x, y, color), where the line ends.
    """
    height = 0.07  # of a word, as a part of the axis's
    to_axis = axis.transData + axis.transAxes.inverted()
    places = {}
    lowest = 0.02
    for name in sorted(lines, key=lambda name: lines[name][1]):
        x, y, _ = lines[name]
        _, here = to_axis.transform((x, y))
        places[name] = max(lowest, here)
        lowest = places[name] + height
    highest = 0.98
    for name in reversed(places):
        places[name] = min(highest, places[name])
        highest = places[name] - height
        x, y, color = lines[name]
        axis.annotate(
            name,
            (x, y),
            (at, places[name]),
            textcoords="axes fraction",
            color=color,
            fontsize=7.5,
            va="center",
            ha=side,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "lw": 0.4,
                "alpha": 0.5,
                "shrinkA": 0,
                "shrinkB": 2,
            },
        )


def draw_kl(table: pd.DataFrame, output: Path) -> None:
    """Draw the final exact KL over beta, a small dot per run; the band is the interval without a KL term."""
    figure, places = panels(
        table, "In the loss naive k1 ends farthest from the reference; in the reward k1 holds the policy, k3 does not"
    )
    for runs, placement, axis in places:
        without = summary(runs[runs["setting"] == ""])
        axis.axhline(without["kl"], color="0.5", lw=1)
        if without["n"] > 1:
            axis.axhspan(without["low"], without["high"], color="0.5", alpha=0.2, lw=0)
        axis.set_ylim(runs["kl/exact"].min() / 2, runs["kl/exact"].max() * 2)  # an interval may be cut off, no run is
        lines = cells(runs, placement)
        ends = {}
        for number, (name, points) in enumerate(lines.items()):
            color, style = STYLES[name]
            shift = 1.06 ** (number - (len(lines) - 1) / 2)  # keeps the intervals apart
            members = runs[(runs["setting"] == name) & (runs["kl_placement"] == placement)]
            axis.plot(members["beta"] * shift, members["kl/exact"], ".", color=color, ms=3, alpha=0.5)
            axis.errorbar(
                points.index * shift,
                points["kl"],
                yerr=[points["kl"] - points["low"], points["high"] - points["kl"]],
                color=color,
                ls=style,
                marker="o",
                ms=3.5,
                capsize=2,
                lw=1.2,
            )
            last = points.iloc[-1]
            ends[name] = (last.name * shift, last["kl"], color)
        axis.set_xscale("log")
        axis.set_yscale("log")
        betas = sorted(runs["beta"][runs["setting"] != ""].unique())
        labels = [f"{beta:g}" for beta in betas]
        axis.set_xticks(betas, labels)
        axis.set_xticks([], minor=True)
        axis.set_xlabel("beta")
        if placement == "loss":
            axis.set_ylabel("exact KL (nats per sequence)")
        ends["no KL"] = (axis.get_xlim()[1], without["kl"], "0.4")
        label_ends(axis, ends, at=1.02)
    plot.save(figure, output)


def draw_frontier(table: pd.DataFrame, output: Path) -> None:
    """pass@1 against exact KL: a line per setting, through its betas; dotted is pass@1 of the reference."""
    figure, places = panels(table, "At the same distance from the reference, naive k4 and k1 in the loss solve less")
    for runs, placement, axis in places:
        without = pd.DataFrame([summary(runs[runs["setting"] == ""])])
        lines = {"no KL": without, **cells(runs, placement)}
        ends = {True: {}, False: {}}  # by whether the run ends farther away than without a KL term
        for name, points in lines.items():
            color, style = STYLES.get(name, ("0.5", "none"))
            axis.errorbar(
                points["kl"],
                points["pass"],
                xerr=[points["kl"] - points["low"], points["high"] - points["kl"]],
                yerr=points["half"],
                color=color,
                ls=style,
                marker="o",
                ms=3.5,
                lw=1.2,
                elinewidth=0.7,
            )
            last = points.iloc[-1]
            away = last["kl"] >= without["kl"].iloc[0]
            ends[away][name] = (last["kl"], last["pass"], color)
        axis.axhline(runs["base pass@1"].mean(), color="0.5", lw=0.8, ls=":")
        axis.set_xscale("log")
        axis.set_xlim(runs["kl/exact"].min() / 8, runs["kl/exact"].max() * 5)  # room for the names
        axis.set_ylim(-0.03, 1.03)
        axis.set_xlabel("exact KL (nats per sequence)")
        if placement == "loss":
            axis.set_ylabel("pass@1")
        label_ends(axis, ends[False], at=0.02)
        label_ends(axis, ends[True], at=0.98, side="right")
    plot.save(figure, output)


# ------------------------------------------------------------------------------------------------- tables and the tests


def kl_cell(found: dict[str, float] | pd.Series) -> str:
    """Return the KL of a cell with its interval, and the number of seeds, as text."""
    spread = "" if np.isnan(found["low"]) else f" [{found['low']:.3g}, {found['high']:.3g}]"
    return f"{found['kl']:.3g}{spread} ({found['n']:.0f})"


def pass_cell(found: dict[str, float] | pd.Series) -> str:
    """Return pass@1 of a cell with half its interval, and the number of seeds, as text."""
    spread = "" if np.isnan(found["half"]) else f" ± {found['half']:.2f}"
    return f"{found['pass']:.2f}{spread} ({found['n']:.0f})"


def markdown(rows: list[list[str]]) -> str:
    """Return a table in Markdown; the first row is its header."""
    lines = [f"| {' | '.join(found)} |" for found in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines)


def result_table(runs: pd.DataFrame, show: Callable) -> str:
    """Return a row per setting and a column per beta, with cells by ``show``; without a KL term there is one row."""
    betas = sorted(runs[runs["setting"] != ""]["beta"].unique())
    rows = [["", *[f"beta {beta:g}" for beta in betas]]]
    without = summary(runs[runs["setting"] == ""])
    rows.append(["no KL", show(without), *[""] * (len(betas) - 1)])
    for placement in ("loss", "reward"):
        for name, points in cells(runs, placement).items():
            found = [show(points.loc[beta]) if beta in points.index else "" for beta in betas]
            rows.append([f"{name}, in the {placement}", *found])
    return markdown(rows)


def ratios(runs: pd.DataFrame, chosen: pd.DataFrame) -> pd.Series:
    """By seed, ln of each chosen run's exact KL over that of its seed's run without a KL term, where there is one."""
    base = runs[runs["setting"] == ""].set_index("seed")["kl/exact"]
    values = chosen.set_index("seed")["kl/exact"]
    return np.log(values / base.reindex(values.index)).dropna()


def slopes(chosen: pd.DataFrame) -> pd.Series:
    """Return the slope of ln KL over ln beta for each seed that has at least two betas."""
    found = {}
    for seed, members in chosen.groupby("seed"):
        if len(members) > 1:
            found[seed] = np.polyfit(np.log(members["beta"]), np.log(members["kl/exact"]), 1)[0]
    return pd.Series(found, dtype=float)


def effect(logs: pd.Series, as_ratio: bool) -> str:
    """Mean with its 95 % interval, t, and the number of seeds; of logarithms, or turned back into ratios."""
    mean, half = interval(logs)
    low, high = mean - half, mean + half
    if as_ratio:
        mean, low, high = np.exp([mean, low, high])
    mean, low, high = np.round([mean, low, high], 4)
    if np.isnan(half):
        return f"{mean:.3g} (n {len(logs)})"
    if half == 0:
        return f"{mean:.3g} for each seed (n {len(logs)})"
    return f"{mean:.3g} [{low:.3g}, {high:.3g}], t {logs.mean() / logs.sem():.1f} (n {len(logs)})"


def test_table(runs: pd.DataFrame) -> str:
    """For each setting: the ratio of its KL to that without a KL term at each beta, and the slope over beta."""
    betas = sorted(runs[runs["setting"] != ""]["beta"].unique())
    rows = [["KL over that of no KL", *[f"beta {beta:g}" for beta in betas], "slope"]]
    for placement in ("loss", "reward"):
        here = runs[(runs["kl_placement"] == placement) & (runs["setting"] != "")]
        for name in [name for name in STYLES if name in set(here["setting"])]:
            chosen = here[here["setting"] == name]
            found = [f"{name}, in the {placement}"]
            for beta in betas:
                logs = ratios(runs, chosen[chosen["beta"] == beta])
                found.append(effect(logs, as_ratio=True) if len(logs) else "")
            found.append(effect(slopes(chosen), as_ratio=False))
            rows.append(found)
    return markdown(rows)


def compared(runs: pd.DataFrame, metric: str, one: tuple[str, str], other: tuple[str, str]) -> pd.Series:
    """``metric`` of one (placement, setting) minus that of another, for each seed and beta, averaged over betas.

    The KL is compared by its logarithm.
    """
    found = []
    for placement, name in (one, other):
        chosen = runs[(runs["kl_placement"] == placement) & (runs["setting"] == name)]
        values = chosen.set_index(["seed", "beta"])[metric]
        found.append(np.log(values) if metric == "kl/exact" else values)
    return (found[0] - found[1]).dropna().groupby("seed").mean()


PAIRS = (
    (("loss", "k3, naive"), ("loss", "k3, unbiased")),
    (("loss", "k2, naive"), ("loss", "k3, unbiased")),
    (("loss", "k4, naive"), ("loss", "k3, unbiased")),
    (("loss", "full"), ("loss", "k3, unbiased")),
    (("loss", "k3, naive"), ("loss", "k2, naive")),
    (("reward", "k1"), ("loss", "k3, unbiased")),
    (("reward", "k3"), ("reward", "k1")),
    (("loss", "k1, naive"), ("loss", "k2, naive")),
)


def pair_table(runs: pd.DataFrame) -> str:
    """Compare settings at the same seed and beta: ratio of the exact KL, difference in pass@1."""
    betas = sorted(runs[runs["setting"] != ""]["beta"].unique())
    header = [""]
    for beta in betas:
        header += [f"KL, beta {beta:g}", f"pass@1, beta {beta:g}"]
    rows = [header]
    for one, other in PAIRS:
        found = [" against ".join(f"{name} in the {placement}" for placement, name in (one, other))]
        for beta in betas:
            here = runs[runs["beta"] == beta]
            kl = compared(here, "kl/exact", one, other)
            solved = compared(here, "eval/pass@1", one, other)
            found += [effect(kl, as_ratio=True), effect(solved, as_ratio=False)] if len(kl) else ["", ""]
        if any(found[1:]):
            rows.append(found)
    return markdown(rows)


def report(table: pd.DataFrame) -> str:
    """All tables, in Markdown."""
    texts = []
    for part, runs in parts(table).items():
        texts.append(f"### {part} ({len(runs)} runs)")
        texts += [f"Exact KL, nats per sequence.\n\n{result_table(runs, kl_cell)}"]
        texts += [f"pass@1.\n\n{result_table(runs, pass_cell)}"]
        texts += [test_table(runs), pair_table(runs)]
    return "\n\n".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=TABLE, help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=DOCS, help="folder of the figures (default: %(default)s)")
    args = parser.parse_args()
    table = pd.read_csv(args.table, dtype={"commit": str})
    draw_kl(table, args.output / "kl_study.png")
    draw_frontier(table, args.output / "kl_study_frontier.png")
    print(report(table))


if __name__ == "__main__":
    main()

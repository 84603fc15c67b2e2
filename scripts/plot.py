"""Draws the curves of runs from their metrics.jsonl and eval.jsonl, and says in three lines how each went.

    python scripts/plot.py runs                    the newest run in that folder -> runs/<name>/curves.png
    python scripts/plot.py runs/A                  this run -> runs/A/curves.png
    python scripts/plot.py runs/A runs/B ...       overlaid, with a legend -> --output

A run may still be going on: a last line that is only half written is left for the next time.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import NoReturn

import matplotlib

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


def series(records: list[dict], key: str) -> tuple[list[int], list[float]]:
    """(steps, values) where the metric was logged; null, which stands for not finite, becomes a gap."""
    found = [(r["step"], math.nan if r[key] is None else r[key]) for r in records if key in r]
    return [step for step, _ in found], [value for _, value in found]


def draw(runs: dict[str, tuple[list[dict], list[dict]]], output: Path) -> None:
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
            if title == "seconds a step" and not several:
                stack(axis, metrics)
                continue
            for i, (key, word, style) in enumerate(lines[:1] if several and title.startswith("reward") else lines):
                colour, where = f"C{r if several else i}", right if i else axis
                steps, values = series(metrics, key)
                if not values:
                    continue
                label = (name if i == 0 else None) if several else word
                dot = "." if len(steps) < 2 else ""
                where.plot(steps, values, style, color=colour, label=label, lw=1.4, marker=dot)
            if title.startswith("reward"):
                steps, values = series(evals, "eval/pass@1")
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
        axis.xaxis.get_major_locator().set_params(integer=True)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.suptitle(" and ".join(runs) if len(runs) < 3 else f"{len(runs)} runs", fontsize=11)
    figure.tight_layout(rect=(0, 0, 1, 0.99))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)


def stack(axis: plt.Axes, metrics: list[dict]) -> None:
    """Seconds by phase, one on the other, up to the whole step."""
    phases = [p for p in PHASES if any(f"time/{p}" in r for r in metrics)]
    layers = [[r.get(f"time/{p}") or 0.0 for r in metrics] for p in phases]
    rest = [max(0.0, r["time/step"] - sum(column)) for r, *column in zip(metrics, *layers, strict=True)]
    edges = {"step": "mid"} if len(metrics) > 1 else {}
    axis.stackplot([r["step"] for r in metrics], *layers, rest, labels=[*phases, "rest"], alpha=0.85, **edges)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="a folder of runs, or folders of runs to compare")
    parser.add_argument("--output", type=Path, help="picture (one run: curves.png in its folder)")
    args = parser.parse_args()
    folders = find_runs(args.paths)
    if args.output is None and len(folders) > 1:
        fail("--output is needed to compare several runs, for example --output compare.png")
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):  # the same name in two output folders
        names = [str(folder) for folder in folders]
    runs = {n: (read(f / "metrics.jsonl"), read(f / "eval.jsonl")) for n, f in zip(names, folders, strict=True)}
    output = args.output or folders[0] / "curves.png"
    draw(runs, output)
    print(output)
    for name, (metrics, evals) in runs.items():
        print(f"{name}\n{summary(metrics, evals)}")


if __name__ == "__main__":
    main()

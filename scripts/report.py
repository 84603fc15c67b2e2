"""Write one HTML page about a run: its verdict, the doctor's findings, curves, seconds per phase, arguments, samples.

    python scripts/report.py runs/NAME             -> runs/NAME/report.html
    python scripts/report.py runs --output x.html  the newest run in the folder

The page contains everything it shows, so it opens from a disk or an attachment, and it makes no network request. Search
and filters of the samples are part of its address after the #, so a link leads to the same samples.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # scripts/plot.py

from plot import PHASES, find_runs, read, read_config, series, summary

from runtime.run import verdict
from runtime.run.doctor import RULES, Case, examine
from runtime.run.run_files import thin
from runtime.system.jsonl import records

# The curves shown at first, in this order, unless they are constant; all others appear with "all metrics".
FIRST = (
    "reward/mean",
    "eval/pass@1",
    "completions/length_mean",
    "policy/entropy",
    "kl/sequence",
    "optim/grad_norm",
    "reward/",
    "completions/",
    "time/step",
)
NO_CURVE = (
    *("step", "episode", "eval/problems", "eval/samples", "eval/right", "eval/rewards", "eval/weights_version"),
)

POINTS = 2_000  # of a curve at most
CHARACTERS = 30_000_000  # of samples at most: what a browser opens

PAGE = Path(__file__).with_suffix(".html")


def contents(folder: Path, metrics: list[dict], evals: list[dict]) -> dict:
    """Return all data of the page as plain data: for a very long run every 2nd, 4th, 8th ... point and sample."""
    config = read_config(folder)
    logged = [*metrics, *evals]
    names = dict.fromkeys(name for record in logged for name in record if name not in NO_CURVE)
    curves = {name: thin(([r["step"], r[name]] for r in logged if name in r), POINTS)[0] for name in names}
    samples, stride = thin(records(folder / "samples.jsonl"), CHARACTERS, size=_characters)
    seconds = {phase: series(metrics, f"time/{phase}").sum() for phase in PHASES}
    whole = series(metrics, "time/step").sum()
    seconds["rest"] = max(0.0, whole - sum(seconds.values()))
    words = {word.split("=")[0] for word in config.get("command", [])}
    given = [name for name in config.get("args", {}) if words & _flags(name)]
    origin = ("command", "started", "git", "world_size", "versions")
    return {
        "steps": len(metrics),
        "curves": curves,
        "first": FIRST,
        "phases": [[name, float(s)] for name, s in seconds.items() if s > 0],
        "samples": samples,
        "stride": stride,
        "args": config.get("args", {}),
        "given": given,
        "origin": {name: config[name] for name in origin if name in config},
    }


def _characters(sample: dict) -> int:
    """Estimate the number of characters of the page that a sample takes."""
    texts = [value for value in sample.values() if isinstance(value, str)]
    turns = [turn["text"] for turn in sample.get("turns", ())]
    return 300 + 300 * len(turns) + sum(map(len, (*texts, *turns)))


def _flags(name: str) -> set[str]:
    """Return the spellings of an argument on a command line."""
    dashed = name.replace("_", "-")
    return {f"--{name}", f"--{dashed}", f"--no-{dashed}", f"--no_{name}"}


def opening(folder: Path, metrics: list[dict], evals: list[dict]) -> str:
    """Return the first lines of the page: the verdict of a finished run, the doctor's findings, then the summary.

    A run without verdict.json is still going, or ended early, or is older than verdicts; its findings are as of now.
    """
    found = verdict.read_verdict(folder)
    if found is not None:
        lines = verdict.in_words(found).splitlines()
        findings = found["findings"]
    else:
        last = metrics[-1]["step"]
        lines = [f"verdict    none: the run has not reached its end; the last step in metrics.jsonl is {last}"]
        findings = examine(Case.of(folder))
        lines += [f"doctor     {finding}" for finding in findings]
    if not findings:
        lines.append(f"doctor     no finding by {len(RULES)} rules")
    return "\n".join([*lines, "", summary(metrics, evals)])


def page(folder: Path) -> str:
    """Build the page. Nothing in the data can end the script element that contains it: < is written as an escape."""
    metrics = read(folder / "metrics.jsonl")
    evals = read(folder / "eval.jsonl")
    data = json.dumps(contents(folder, metrics, evals)).replace("<", "\\u003c")
    text = opening(folder, metrics, evals)
    result = PAGE.read_text()
    result = result.replace("@TITLE@", html.escape(folder.resolve().name))
    result = result.replace("@SUMMARY@", html.escape(text))
    return result.replace("@DATA@", data)  # last, so that what looks like a field in the data stays as it is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run, or a folder of runs, which means the newest")
    parser.add_argument("--output", type=Path, help="page to write; default: report.html in the folder of the run")
    args = parser.parse_args()
    (folder,) = find_runs([args.run])
    output = args.output or folder / "report.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(folder))
    print(output)


if __name__ == "__main__":
    main()

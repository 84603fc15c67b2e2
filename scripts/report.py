"""One HTML page about a run, to read its rollouts: curves, seconds by phase, arguments, samples with search and filter.

    python scripts/report.py runs/NAME             -> runs/NAME/report.html
    python scripts/report.py runs --output x.html  the newest run in the folder

The page holds all it shows: it opens from a disk or an attachment, without network, and asks for none. What is searched
and filtered stands in its address after the #, so a link leads to the same samples.
"""

from __future__ import annotations

import argparse
import html
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # scripts/plot.py

from plot import PHASES, find_runs, read, summary

# Hidden to begin with: what no one looks at first. Everything logged has a curve.
FIRST = ("reward/", "kl/sequence", "policy/entropy", "completions/", "eval/pass@1", "optim/grad_norm", "time/step")

PAGE = Path(__file__).with_suffix(".html")


def contents(folder: Path) -> dict:
    """Everything the page shows, as plain data."""
    metrics, evals = read(folder / "metrics.jsonl"), read(folder / "eval.jsonl")
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    curves: dict[str, list] = {}
    for record in (*metrics, *evals):
        for name, value in record.items():
            if name not in ("step", "episode", "eval/problems", "eval/samples", "eval/weights_version"):
                curves.setdefault(name, []).append([record["step"], value])
    seconds = {p: sum(r.get(f"time/{p}") or 0.0 for r in metrics) for p in PHASES}
    seconds["rest"] = max(0.0, sum(r.get("time/step") or 0.0 for r in metrics) - sum(seconds.values()))
    words = config.get("command", [])
    given = [name for name in config.get("args", {}) if any(w.split("=")[0] in _flags(name) for w in words)]
    origin = {name: config[name] for name in ("command", "started", "git", "world_size", "versions") if name in config}
    return {
        "steps": len(metrics),
        "curves": curves,
        "first": FIRST,
        "phases": [[name, s] for name, s in seconds.items() if s > 0],
        "samples": read(folder / "samples.jsonl"),
        "args": config.get("args", {}),
        "given": given,
        "origin": origin,
    }


def _flags(name: str) -> tuple[str, ...]:
    """The spellings of an argument on a command line."""
    dashed = name.replace("_", "-")
    return f"--{name}", f"--{dashed}", f"--no-{dashed}", f"--no_{name}"


def page(folder: Path) -> str:
    """The page. Nothing in the data can end the script element it stands in: < is written as an escape."""
    data = json.dumps(contents(folder)).replace("<", "\\u003c")
    text = summary(read(folder / "metrics.jsonl"), read(folder / "eval.jsonl"))
    fields = {"@TITLE@": html.escape(folder.resolve().name), "@SUMMARY@": html.escape(text), "@DATA@": data}
    result = PAGE.read_text()
    for name, value in fields.items():  # the data last: what looks like a field in it stays as it is
        result = result.replace(name, value)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run, or a folder of runs: the newest")
    parser.add_argument("--output", type=Path, help="default: report.html in the run's folder")
    args = parser.parse_args()
    (folder,) = find_runs([args.run])
    output = args.output or folder / "report.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(folder))
    print(output)


if __name__ == "__main__":
    main()

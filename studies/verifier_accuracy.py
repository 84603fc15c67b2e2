"""Score labeled answers with this project's verifiers and with math-verify, and count who is wrong where.

    python studies/verifier_accuracy.py

The graders: the project's ``math``; its way to find an answer, with math-verify alone to compare it;
math-verify as its README calls it. Every grader runs in the same worker process with the same time-out, one answer at
a time. Commit 98a86a0 also calls the graders of TRL and verl, and reads public data and other projects' test files.

The answers: tests/labeled_answers.jsonl, written for this project in 55 families. A false negative is a right answer
that scores below 1, a false positive a wrong one that scores 1 or more. Times are of the processor, in milliseconds per
answer.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts are not a package

import rewards
from graders.math.extraction import final_answer
from graders.text import after_thinking
from rewards import Reward, RewardPool

# ------------------------------------------------------------------------------------------- graders, run in the worker


def timed(score: Callable[[], float]) -> Reward:
    """Return the score with the milliseconds of processor time it took; 0 and "raised" if the grader raised."""
    begun = time.process_time()
    raised = 0.0
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            found = float(score() or 0.0)
    except Exception:  # a foreign grader's error is a finding
        found = 0.0
        raised = 1.0
    return Reward(found, {"ms": 1000 * (time.process_time() - begun), "raised": raised})


def ours(response: str, truth: str, row: dict) -> Reward:
    """Score with this project's verifier."""
    return timed(lambda: rewards.VERIFIERS["math"](response, truth, row).score)


def math_verify_alone(response: str, truth: str, row: dict) -> Reward:
    """Score with math-verify's own defaults, the truth as mathematics."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return timed(lambda: verify(parse(f"${truth}$"), parse(response)))


def our_extraction(response: str, truth: str, row: dict) -> Reward:
    """Score with math-verify's comparison of the answer that this project finds with the truth."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def score() -> float:
        found = final_answer(after_thinking(response))
        return float(found is not None and verify(parse(f"${truth}$"), parse(f"${found}$")))

    return timed(score)


OWN = {"ours": ours, "our extraction, math-verify": our_extraction, "math-verify": math_verify_alone}


def labeled() -> list[dict]:
    """Return the rows of tests/labeled_answers.jsonl: family, truth, response and label."""
    path = ROOT / "tests" / "labeled_answers.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run(grader: Callable, rows: list[dict], seconds: float) -> tuple[Counter, dict[str, Counter]]:
    """(totals, family -> counts) of one grader on one set."""
    pool = RewardPool(1, seconds)
    name = f"{Path(grader.__code__.co_filename).resolve()}:{grader.__name__}"
    for answer in ("0.4", "x = 2", "[0, 1]"):  # what it imports on the way is not counted
        pool.result(pool.submit(name, f"\\boxed{{{answer}}}", "x = 3", {}))
    futures = []
    for row in rows:
        futures.append(pool.submit(name, row["response"], row["truth"], {}))
    totals: Counter = Counter()
    families: dict[str, Counter] = {}
    times = []
    for future, row in zip(futures, rows, strict=True):
        reward = pool.result(future)
        counts = families.setdefault(row["family"], Counter())
        counts["false negatives"] += row["label"] and reward.score < 1
        counts["false positives"] += not row["label"] and reward.score >= 1
        totals["hangs"] += reward.status == "timeout"
        failed = reward.status not in ("ok", "timeout")
        totals["raised"] += reward.parts.get("raised", float(failed))
        times.append(reward.parts.get("ms", 1000 * seconds))
    pool.close()
    for counts in families.values():
        totals += counts
    totals["median ms"] = median(times)
    totals["mean ms"] = sum(times) / len(times)
    return totals, families


HEAD = """# Graders compared

Look here before you trust a reward. A false negative (FN) is a right answer that got no reward; a false positive (FP) a
wrong one that got it, which a policy finds and repeats. A hang ran into the time-out of {seconds:g} s, milliseconds are
of the processor.

The written families hold what is hard, on purpose, so they show which kinds of errors there are, not rates to expect.
"""


def table(results: dict[str, tuple[Counter, dict]], rows: list[dict]) -> list[str]:
    """Return a set's totals, one grader per line; and, if it has several families, their errors."""
    right = sum(row["label"] for row in rows)
    lines = [f"{right} right and {len(rows) - right} wrong answers.", ""]
    lines += ["| grader | FN | FP | hangs | raised | median ms | mean ms |", "|---|---|---|---|---|---|---|"]
    for name, (totals, _) in results.items():
        counts = [totals[key] for key in ("false negatives", "false positives", "hangs", "raised")]
        numbers = " | ".join(str(int(count)) for count in counts)
        lines.append(f"| {name} | {numbers} | {totals['median ms']:.1f} | {totals['mean ms']:.1f} |")
    families = Counter(row["family"] for row in rows)
    if len(families) > 1:
        lines += ["", "By family, FN / FP:", "", f"| family | right | wrong | {' | '.join(results)} |"]
        lines.append("|---" * (3 + len(results)) + "|")
        for family, count in families.items():
            good = sum(row["label"] for row in rows if row["family"] == family)
            cells = []
            for _, found in results.values():
                cells.append(f"{found[family]['false negatives']} / {found[family]['false positives']}")
            lines.append(f"| {family} | {good} | {count - good} | {' | '.join(cells)} |")
    return lines


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10**9, help="score at most this many rows")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds per answer")
    parser.add_argument("--output", type=Path, help="write the page here; default: print it")
    args = parser.parse_args(words)
    rows = labeled()[: args.rows]
    results = {grader: run(function, rows, args.timeout) for grader, function in OWN.items()}
    page = [HEAD.format(seconds=args.timeout), "## written families", "", *table(results, rows), ""]
    text = "\n".join(page)
    if args.output is None:
        print(text)
    else:
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""How often scripts/ab.py is wrong, and what a comparison costs: simulated on recorded runs.

    python studies/ab_rates.py

The runs are those of the KL study on the test bed (docs/evidence/data/kl_study.csv.gz), 40 steps of 4 prompts x 8
samples as ab.py has them: every setting with four seeds whose mean pass@1 is at least 0.85. A comparison draws its
differences with replacement, and adds the one that it is to find:

    one setting     the differences between two of its seeds: an A/A comparison, for which equal seeds would say nothing
    two settings    the differences of equal seeds, less the mean of the four (deviation corrected for that): what a
                    comparison of two algorithms sees, whose runs have prompts and held-out problems in common
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import ab

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "docs" / "evidence" / "data" / "kl_study.csv.gz"
SETTING = ("beta", "kl_estimator", "kl_gradient", "num_mini_batches", "kl_placement")
SMALLEST = 0.03
CPU_SECONDS = 20  # of a run: docs/evidence/testbed.md
VERDICTS = ("", "no difference", "better", "worse")


def spread() -> dict[str, np.ndarray]:
    """Differences of pass@1 with the mean 0, by what they are between."""
    found: dict[tuple, dict[str, float]] = {}
    with gzip.open(RUNS, "rt") as file:
        for row in csv.DictReader(file):
            if row["model"] == "testbed-1":
                found.setdefault(tuple(row[x] for x in SETTING), {})[row["seed"]] = float(row["eval/pass@1"])
    whole = [np.array([values[s] for s in sorted(values)]) for values in found.values() if len(values) == 4]
    whole = [x for x in whole if x.mean() >= 0.85]
    between = [a - b for a, b in itertools.combinations(whole, 2)]
    return {
        "one setting": np.array([a - b for x in whole for a, b in itertools.permutations(x, 2)]),
        "two settings": np.concatenate([(d - d.mean()) * math.sqrt(4 / 3) for d in between if d.any()]),
    }


def decide(differences: np.ndarray, smallest: float) -> tuple[np.ndarray, np.ndarray]:
    """Of comparisons [C, pairs], looked at after every pair as ab.verdict does: (places in VERDICTS, pairs used)."""
    pairs = differences.shape[1]
    verdicts = np.zeros(len(differences), dtype=int)
    used = np.full(len(differences), pairs)
    for count in range(3, pairs + 1):
        seen = differences[:, :count]
        mean = seen.mean(1)
        width = ab.widest(count)
        half = np.inf if math.isinf(width) else width * seen.std(1, ddof=1) / math.sqrt(count)
        said = np.where(np.abs(mean) + half < smallest, 1, 0)
        said = np.where(np.abs(mean) > half, np.where(mean > 0, 2, 3), said)
        said = np.where(seen.any(1), said, 1)
        new = (verdicts == 0) & (said > 0)
        verdicts[new] = said[new]
        used[new] = count
    return verdicts, used


def report(draws: int, seed: int) -> list[str]:
    """The rows of a table: one for each kind of difference, its size, and the number of pairs at most."""
    rng = np.random.default_rng(seed)
    rows = [
        "| difference between | deviation | true mean | pairs at most | better | worse | no difference | undecided "
        "| pairs: mean, 90 % | CPU minutes |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    cases = ((0.0, 24), (0.0, 100), (0.03, 24), (0.03, 30), (0.05, 24))
    for (name, recorded), (difference, pairs) in itertools.product(spread().items(), cases):
        drawn = rng.choice(recorded, (draws, pairs)) + difference
        verdicts, used = decide(drawn, SMALLEST)
        cells = [name, f"{recorded.std():.3f}", f"{difference:.2f}", str(pairs)]
        for word in ("better", "worse", "no difference", ""):
            cells.append(f"{(verdicts == VERDICTS.index(word)).mean():.1%}")
        ends = (used.mean(), np.quantile(used, 0.9))
        cells.append(", ".join(f"{x:.0f}" for x in ends))
        cells.append(", ".join(f"{2 * CPU_SECONDS * x / 60:.0f}" for x in ends))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000, help="comparisons of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: %(default)s)")
    options = parser.parse_args()
    print("\n".join(report(options.draws, options.seed)))


if __name__ == "__main__":
    main()

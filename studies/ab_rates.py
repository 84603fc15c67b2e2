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
MINUTES = 2 * 20 / 60  # of CPU time for a pair: docs/evidence/testbed.md has the seconds of a run
VERDICTS = ("", "no difference", "better", "worse")
OPEN, NONE, BETTER, WORSE = range(4)
CASES = (  # the difference that there is, and pairs at most
    (0.0, 24),
    (0.0, 100),
    (0.03, 24),
    (0.03, 30),
    (0.05, 24),
)


def spread() -> dict[str, np.ndarray]:
    """Differences of pass@1 with the mean 0, by what they are between."""
    found: dict[tuple, dict[str, float]] = {}
    with gzip.open(RUNS, "rt") as file:
        for row in csv.DictReader(file):
            if row["model"] == "testbed-1":
                setting = tuple(row[name] for name in SETTING)
                runs = found.setdefault(setting, {})
                runs[row["seed"]] = float(row["eval/pass@1"])
    settings = []
    for runs in found.values():
        ends = np.array([runs[seed] for seed in sorted(runs)])
        if len(ends) == 4 and ends.mean() >= 0.85:
            settings.append(ends)
    of_one = []
    for ends in settings:
        for one, other in itertools.permutations(ends, 2):
            of_one.append(one - other)
    of_two = []
    for one, other in itertools.combinations(settings, 2):
        differences = one - other
        if differences.any():
            centered = differences - differences.mean()
            of_two.append(centered * math.sqrt(4 / 3))
    return {
        "one setting": np.array(of_one),
        "two settings": np.concatenate(of_two),
    }


def decide(differences: np.ndarray, smallest: float) -> tuple[np.ndarray, np.ndarray]:
    """Of comparisons [C, pairs], looked at after every pair as ab.verdict does: (places in VERDICTS, pairs used)."""
    pairs = differences.shape[1]
    verdicts = np.zeros(len(differences), dtype=int)
    used = np.full(len(differences), pairs)
    for count in range(3, pairs + 1):
        seen = differences[:, :count]
        mean = seen.mean(1)
        half = np.full(len(seen), np.inf)
        width = ab.widest(count)
        if math.isfinite(width):
            half = width * seen.std(1, ddof=1) / math.sqrt(count)
        said = np.zeros_like(verdicts)
        said[np.abs(mean) + half < smallest] = NONE
        said[mean > half] = BETTER
        said[-mean > half] = WORSE
        said[~seen.any(1)] = NONE
        new = (verdicts == OPEN) & (said > OPEN)
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
    for name, recorded in spread().items():
        for difference, pairs in CASES:
            drawn = rng.choice(recorded, (draws, pairs)) + difference
            verdicts, used = decide(drawn, SMALLEST)
            cells = [
                name,
                f"{recorded.std():.3f}",
                f"{difference:.2f}",
                str(pairs),
            ]
            for verdict in (BETTER, WORSE, NONE, OPEN):
                share = (verdicts == verdict).mean()
                cells.append(f"{share:.1%}")
            mean = used.mean()
            most = np.quantile(used, 0.9)
            cells.append(f"{mean:.0f}, {most:.0f}")
            cells.append(f"{mean * MINUTES:.0f}, {most * MINUTES:.0f}")
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

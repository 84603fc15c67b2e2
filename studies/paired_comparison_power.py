"""Error rates and costs of studies/paired_comparison.py, on real runs and on simulations from recorded runs.

    python studies/paired_comparison_power.py                              both tables
    python studies/paired_comparison_power.py --record 100                 record 100 seeds of grpo.py and of SECOND
    python studies/paired_comparison_power.py --record 24 --mine "ppo.py"  compare, and record the runs

Real: docs/evidence/data/ab_runs.csv has pass@1 and CPU seconds of runs with the flags of paired_comparison.py's test
bed. SECOND is grpo.py with a lower learning rate, the difference that is to be found.

    in sequence     comparisons that share no run: each takes the next seeds until it is decided or may take no more
    random orders   comparisons that share their runs: each takes the pairs in another order
    A/A             the two sides are the same command line with other seeds: neighbors, or random halves of its runs;
                    of the KL study, the seeds of a setting, paired at random

Simulated: a comparison draws its differences with replacement, and adds the one that it is to find. The first two are
of the KL study (docs/evidence/data/kl_study.csv.gz): every setting with four seeds whose mean pass@1 is within 0.05 of
the best.

    one setting     the differences between two of its seeds: an A/A comparison, for which equal seeds would say nothing
    two settings    the differences of equal seeds, less the mean of the four (deviation corrected for that): what a
                    comparison of two algorithms sees, whose runs have prompts and held-out problems in common
    recorded pairs  the differences of each command line in ab_runs.csv from grpo.py, less their mean

--record goes on where it was stopped. Runs are recorded one at a time, both sides of a seed before the next seed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import math
import os
import shlex
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy would start threads, and a fork lacks them

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import paired_comparison
import run_many

from runtime.run import directory
from runtime.run.intervals import t_quantile

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "docs" / "evidence" / "data" / "ab_runs.csv"
PLAIN = "grpo.py"
SECOND = "grpo.py --learning_rate 1.1e-4"
MOST = paired_comparison.PAIRS
METRIC = "eval/pass@1"
RUNS = ROOT / "docs" / "evidence" / "data" / "kl_study.csv.gz"
SETTING = ("beta", "kl_estimator", "kl_gradient", "num_mini_batches", "kl_placement")
SMALLEST = 0.03
VERDICTS = ("", "no difference", "better", "worse")
OPEN, NONE, BETTER, WORSE = range(4)
CASES = (  # the difference that there is, and pairs at most
    (0.0, MOST),
    (0.0, 100),
    (0.03, 24),
    (0.03, MOST),
    (0.05, MOST),
)


def study_settings() -> dict[tuple, np.ndarray]:
    """pass@1 of the four seeds of each setting of the KL study that is nearly as good as the best."""
    found: dict[tuple, dict[str, float]] = {}
    with gzip.open(RUNS, "rt") as file:
        for row in csv.DictReader(file):
            if row["model"] == "testbed-1":
                setting = tuple(row[name] for name in SETTING)
                runs = found.setdefault(setting, {})
                runs[row["seed"]] = float(row["eval/pass@1"])
    settings = {}
    for setting, runs in found.items():
        if len(runs) == 4:
            settings[setting] = np.array([runs[seed] for seed in sorted(runs)])
    least = max(ends.mean() for ends in settings.values()) - 0.05
    return {setting: ends for setting, ends in settings.items() if ends.mean() >= least}


def spread() -> dict[str, np.ndarray]:
    """Differences of pass@1 with the mean 0, by what they are between."""
    settings = list(study_settings().values())
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
    recorded = []
    found = read_runs()
    for mine in found:
        pairs = paired(found, mine)
        if mine != PLAIN and len(pairs) >= 4:
            differences = np.array([ours.after - theirs.after for ours, theirs in pairs])
            centered = differences - differences.mean()
            recorded.append(centered * math.sqrt(len(pairs) / (len(pairs) - 1)))
    drawn = {
        "one setting": np.array(of_one),
        "two settings": np.concatenate(of_two),
    }
    if sum(map(len, recorded)) >= 20:  # of fewer values the law is too coarse
        drawn["recorded pairs"] = np.concatenate(recorded)
    return drawn


def pair_minutes() -> float:
    """CPU time of a pair, as recorded."""
    pairs = paired(read_runs(), SECOND)
    return cpu_minutes(Comparison(OPEN, pairs)) / len(pairs)


def decide(differences: np.ndarray, smallest: float) -> tuple[np.ndarray, np.ndarray]:
    """Of comparisons [C, pairs], looked at after every pair as ab.verdict does: (places in VERDICTS, pairs used)."""
    pairs = differences.shape[1]
    verdicts = np.zeros(len(differences), dtype=int)
    used = np.full(len(differences), pairs)
    for count in range(3, pairs + 1):
        seen = differences[:, :count]
        mean = seen.mean(1)
        half = np.full(len(seen), np.inf)
        width = paired_comparison.widest(count)
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


class Run(NamedTuple):
    """A recorded run: a row of ab_runs.csv."""

    setting: str
    seed: int
    before: float  # pass@1
    after: float
    seconds: float | None  # of CPU time; None where the run was interrupted
    commit: str


def read_runs() -> dict[str, dict[int, Run]]:
    """Read the recorded runs, by command line and seed."""
    found: dict[str, dict[int, Run]] = {}
    if not RECORDED.exists():
        return found
    with RECORDED.open(newline="") as file:
        for row in csv.DictReader(file):
            seconds = float(row["cpu_seconds"]) if row["cpu_seconds"] else None
            seed = int(row["seed"])
            ends = float(row["pass@1 before"]), float(row["pass@1 after"])
            run = Run(row["setting"], seed, *ends, seconds, row["commit"])
            found.setdefault(run.setting, {})[seed] = run
    return found


def write_runs(found: dict[str, dict[int, Run]]) -> None:
    """Write all runs, in the order of setting and seed."""
    part = RECORDED.with_suffix(".tmp")
    with part.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["setting", "seed", "pass@1 before", "pass@1 after", "cpu_seconds", "commit"])
        for runs in found.values():
            for run in sorted(runs.values()):
                seconds = "" if run.seconds is None else f"{run.seconds:.1f}"
                rows.writerow([run.setting, run.seed, run.before, run.after, seconds, run.commit])
    part.replace(RECORDED)


def record(mine: str, seeds: range) -> int:
    """Run ``mine`` and PLAIN with ab.run: SECOND with all seeds, another until it is decided. Its exit codes."""
    shared = shlex.split(paired_comparison.TESTBED)
    arms = [paired_comparison.Arm(PLAIN, shared), paired_comparison.Arm(mine, shared)]
    found = read_runs()
    for arm in arms:
        found.setdefault(arm.line, {})
    lanes = run_many.Lanes()

    def enough(finished: list[int]) -> bool:
        """Record new runs, whenever a run has ended, and return True once the comparison is decided."""
        for seed, arm in itertools.product(seeds, arms):
            if seed in found[arm.line]:
                continue
            if not arm.is_finished(seed):
                break
            folder = arm.folder(seed)
            config = directory.read_config(folder)
            seconds = None if config["resumed_after"] else lanes.seconds.get(folder.name)
            ends = arm.ends(seed, METRIC)
            found[arm.line][seed] = Run(arm.line, seed, *ends, seconds, config["git"]["commit"])
            write_runs(found)
        runs = paired(found, mine)[: len(finished)]
        differences = [ours.after - theirs.after for ours, theirs in runs]
        return mine != SECOND and bool(paired_comparison.verdict(differences, SMALLEST))

    return paired_comparison.run(arms, seeds, 1, enough, lanes)


def paired(found: dict[str, dict[int, Run]], mine: str) -> list[tuple[Run, Run]]:
    """(mine, PLAIN) of the seeds that both have, in order."""
    ours = found.get(mine, {})
    theirs = found.get(PLAIN, {})
    return [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]


class Comparison(NamedTuple):
    """Result of a comparison (an entry of VERDICTS) and the pairs behind it."""

    verdict: int
    pairs: list[tuple[Run, Run]]


def compare(pairs: list[tuple[Run, Run]], most: int) -> Comparison:
    """Decide as paired_comparison.py does, which uses these pairs one after another, ``most`` at most."""
    differences = np.array([[ours.after - theirs.after for ours, theirs in pairs[:most]]])
    verdicts, used = decide(differences, SMALLEST)
    return Comparison(int(verdicts[0]), pairs[: used[0]])


def in_sequence(pairs: list[tuple[Run, Run]], most: int) -> list[Comparison]:
    """Comparisons that have no pair in common; what is left at the end and decides nothing is none."""
    found = []
    while pairs:
        one = compare(pairs, most)
        if one.verdict == OPEN and len(one.pairs) < most:
            break
        found.append(one)
        pairs = pairs[len(one.pairs) :]
    return found


def in_random_orders(pairs: list[tuple[Run, Run]], count: int) -> list[list[tuple[Run, Run]]]:
    """Return the same pairs ``count`` times, each time in another order."""
    rng = np.random.default_rng(1)
    return [[pairs[i] for i in rng.permutation(len(pairs))] for _ in range(count)]


def halved(runs: list[Run], count: int) -> list[list[tuple[Run, Run]]]:
    """Pairs of a run of one random half and a run of the other."""
    rng = np.random.default_rng(1)
    half = len(runs) // 2
    found = []
    for _ in range(count):
        order = rng.permutation(len(runs))
        mine = [runs[i] for i in order[:half]]
        other = [runs[i] for i in order[half : 2 * half]]
        found.append(list(zip(mine, other, strict=True)))
    return found


def study_pairs(count: int) -> list[list[tuple[Run, Run]]]:
    """Return the runs of the KL study, two pairs of each setting, each time drawn again and in another order.

    Settings of equal numbers are one. Sides are drawn too: a seed is easier than another in all settings.
    """
    rng = np.random.default_rng(1)
    settings = {tuple(ends): setting for setting, ends in study_settings().items()}
    found = []
    for _ in range(count):
        pairs = []
        for ends, setting in settings.items():
            runs = [Run(" ".join(setting), seed, math.nan, ends[seed - 1], None, "") for seed in rng.permutation(4) + 1]
            pairs += [(runs[0], runs[1]), (runs[2], runs[3])]
        found.append([pairs[i] for i in rng.permutation(len(pairs))])
    return found


def cpu_minutes(comparison: Comparison) -> float:
    """Return the CPU minutes of a comparison's runs; unmeasured ones count as the others' mean. NaN without any."""
    seconds = [run.seconds for pair in comparison.pairs for run in pair]
    known = [value for value in seconds if value is not None]
    return statistics.fmean(known or [math.nan]) * len(seconds) / 60


def row_of(name: str, most: int, comparisons: list[Comparison]) -> str:
    """Return a row of the table of real comparisons: how many there are of each verdict, and their size."""
    verdicts = [comparison.verdict for comparison in comparisons]
    cells = [name, most, len(comparisons)]
    cells += [verdicts.count(verdict) for verdict in (BETTER, WORSE, NONE, OPEN)]
    for values in (
        [len(comparison.pairs) for comparison in comparisons],
        [cpu_minutes(comparison) for comparison in comparisons],
    ):
        known = [value for value in values if not math.isnan(value)]
        cells.append(f"{statistics.fmean(known):.0f}, {max(known):.0f}" if known else "")
    return f"| {' | '.join(map(str, cells))} |"


def real() -> list[str]:
    """Return the rows of a table of comparisons of recorded runs; a kind with fewer than MOST pairs is left out."""
    found = read_runs()
    pairs = paired(found, SECOND)
    runs = [found[PLAIN][seed] for seed in sorted(found[PLAIN])]
    neighbors = [(runs[i], runs[i + 1]) for i in range(0, len(runs) - 1, 2)]
    rows = [
        "| | pairs at most | comparisons | better | worse | no difference | undecided | pairs: mean, most "
        "| CPU minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    kinds = {}
    if len(pairs) >= MOST:
        kinds["lower rate, in sequence"] = in_sequence(pairs, MOST)
        kinds["lower rate, random orders"] = [compare(order, MOST) for order in in_random_orders(pairs, 20)]
    if len(neighbors) >= MOST:
        kinds["A/A, in sequence"] = in_sequence(neighbors, MOST)
        kinds["A/A, random halves"] = [compare(half, MOST) for half in halved(runs, 100)]
    kinds["A/A of the KL study, random orders"] = [compare(order, MOST) for order in study_pairs(100)]
    for name, comparisons in kinds.items():
        rows.append(row_of(name, MOST, comparisons))
    return rows


def true_difference() -> str:
    """Estimate the true difference of SECOND from all pairs, with its error by Student's t."""
    differences = [ours.after - theirs.after for ours, theirs in paired(read_runs(), SECOND)]
    mean = statistics.fmean(differences)
    deviation = statistics.stdev(differences)
    count = len(differences)
    half = t_quantile(count - 1) * deviation / math.sqrt(count)
    return f"{SECOND}: {mean:+.4f} ± {half:.4f}, deviation {deviation:.3f}, {count} pairs"


def algorithms() -> list[str]:
    """Return the rows of a table: paired_comparison.py's verdicts on every other command line against PLAIN, so far."""
    found = read_runs()
    rows = [
        "| against grpo.py | verdict | difference of pass@1 | deviation | pairs | CPU minutes |",
        "|---|---|---|---|---|---|",
    ]
    for mine in found:
        pairs = paired(found, mine)
        if mine in (PLAIN, SECOND) or len(pairs) < 2:
            continue
        comparison = compare(pairs, MOST)
        differences = [ours.after - theirs.after for ours, theirs in comparison.pairs]
        mean, half = paired_comparison.interval(differences)
        interval = "" if math.isinf(half) else f" [{mean - half:+.3f}, {mean + half:+.3f}]"
        cells = [
            f"`{mine}`",
            VERDICTS[comparison.verdict] or "not decided",
            f"{mean:+.3f}{interval}",
            f"{np.std(differences, ddof=1):.3f}",
            str(len(differences)),
            f"{cpu_minutes(comparison):.0f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def report(draws: int, seed: int) -> list[str]:
    """Return the rows of a table: one for each kind of difference, its size, and the number of pairs at most."""
    rng = np.random.default_rng(seed)
    minutes = pair_minutes()
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
            cells.append(f"{mean * minutes:.0f}, {most * minutes:.0f}")
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000, help="simulations of each kind (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draws (default: %(default)s)")
    parser.add_argument("--record", type=int, metavar="N", help="run seeds 1 to N, and write ab_runs.csv")
    parser.add_argument("--mine", default=SECOND, help="what is recorded beside grpo.py (default: %(default)s)")
    options = parser.parse_args()
    if options.record:
        return record(options.mine, range(1, options.record + 1))
    parts = [true_difference()], real(), algorithms(), report(options.draws, options.seed)
    print("\n\n".join("\n".join(rows) for rows in parts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

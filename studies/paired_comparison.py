"""Better, or only luckier? Run two command lines with the same seeds until their difference is decided.

    python studies/paired_comparison.py mine.py                                     a copy of grpo.py against grpo.py
    python studies/paired_comparison.py "grpo.py --beta 0.1" --against "grpo.py"    two settings of a script
    python studies/paired_comparison.py mine.py -- --total_steps 100                with flags that both sides have
    python studies/paired_comparison.py "grpo.py --beta 0.1" --controls             how much of a gain needs the reward
    python studies/paired_comparison.py grpo.py --controls --quickstart             the same of the quickstart's runs

Runs are those of the test bed (docs/maintainers/testbed.md), or with --quickstart those of the scripts' defaults; the
flags after -- change either. A seed is a pair: both sides have the same prompts, held-out problems and seeds of
samples. After each pair the mean difference has a 95 % interval. The comparison ends when 0 is outside it (better,
worse), when all of it is within --smallest of 0 (no difference), or when the seeds are used up (undecided: about how
many more would decide). It is an interval that may be looked at after every pair, and seeds may be added at any time:
where there is no difference, the chance that 0 is ever outside it is at most 5 %, for differences that are normally
distributed.

With --controls the same command line is also run with --reward_control format, random, shuffled and inverted, or with
those that are named after it, on five seeds unless --seeds says otherwise. It ends with a table and a sentence: what
the command line gains between the evaluations before the first step and after the last, and what remains of that gain
with each control. The 95 % intervals are Student's, over the seeds.

Repeat the command to continue: finished runs are kept, interrupted ones resume. Runs are forks of one process
(studies/run_many.py), on CPUs. Exit codes: 0 decided, 1 a run failed, 3 undecided, 75 interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shlex
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy would start threads, and a fork lacks them

import is_finished
import run_many
import script_loader
from intervals import mean_interval

from runtime.arguments import flags
from runtime.run import directory
from runtime.run.run_files import read
from runtime.run.verdict import Z, interval_text
from runtime.system import process

PLACE = "--output_dir runs/ab "
TESTBED = (
    f"{PLACE}--model_name_or_path models/testbed-1 --dtype float32 --total_steps 40 --eval_prompts 64 "
    "--eval_samples 8 --dataset reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1 "
    "--max_prompt_length 64 --max_response_length 32 --learning_rate 2e-4 --lr_min_ratio 0 --save_minutes 0 "
    """--vllm_args '{"kv_cache_memory_bytes": 107374182}'"""
)
# Values of --reward_control -> what a run is then trained on.
CONTROLS = {
    "none": "the reward",
    "format": "the format alone",
    "random": "a random reward",
    "shuffled": "another problem's truth",
    "inverted": "the negative reward",
}
ERROR = 0.05  # the chance of a false alarm, however often one looks
UNDECIDED = 3
PAIRS = 44  # at most, unless --seeds says otherwise: 20 CPU minutes (docs/maintainers/testbed.md)


def least_half(trials: float, quantile: float = Z) -> float:
    """Return half the interval of a paired difference of rates where none of ``trials`` problems changes."""
    return quantile / (trials + 2)  # as in paired_gain


def widest(pairs: int) -> float:
    """Return the |t| of so many differences that is ever exceeded with probability ``ERROR`` if there is no difference.

    A bet that the mean is not 0 multiplies its stake by (1 + n)^(-1/2) ((1 + x) / (1 + x / (1 + n)))^(n / 2), where
    x = t^2 / (n - 1): the Bayes factor of a mean of N(0, 1) standard deviations against 0. Without a difference the bet
    is fair, so its stake ever grows to 1 / ERROR times with probability at most ERROR (arXiv 2210.08589, 2310.03722).
    """
    growth = ((1 + pairs) / ERROR**2) ** (1 / pairs)
    if growth >= 1 + pairs:  # too few for any t
        return math.inf
    return math.sqrt((pairs - 1) * (growth - 1) / (1 - growth / (1 + pairs)))


def interval(differences: list[float], pairs: int | None = None, problems: int = 0) -> tuple[float, float]:
    """(mean, half the width of its interval) of some differences, or of ``pairs`` with their mean and deviation.

    problems: behind each value, where the values are rates. The half is then not 0 where no pair differs, as where all
    responses of both sides are right.
    """
    pairs = pairs or len(differences)
    mean = statistics.fmean(differences)
    if len(differences) < 2 or math.isinf(widest(pairs)):
        return mean, math.inf
    quantile = widest(pairs)
    half = quantile * statistics.stdev(differences) / math.sqrt(pairs)
    if problems:
        half = max(half, least_half(pairs * problems, quantile))
    return mean, half


def verdict(differences: list[float], smallest: float, pairs: int | None = None, problems: int = 0) -> str:
    """Return better, worse, no difference, or "" while the comparison is open.

    problems: behind each value, where the values are rates and so far all are 0 or 1. That they are equal does
    then not say that the runs are.
    """
    if not differences:
        return ""
    mean, half = interval(differences, pairs, problems)
    if len(differences) >= 3 and not any(differences) and not problems:  # bit for bit
        return "no difference"
    if abs(mean) > half:
        return "better" if mean > 0 else "worse"
    return "no difference" if abs(mean) + half < smallest else ""


def state_of(differences: list[float], smallest: float, problems: int = 0) -> str:
    """Describe the comparison so far in words. ``problems``: as of ``verdict``."""
    mean, half = interval(differences, None, problems)
    words = f"{mean:+.4f}"
    if not math.isinf(half):
        said = interval_text(mean - half, mean + half, "+", 4)
        words += f" [{said.replace(' to ', ', ')}]"
    if len(differences) < 3 or verdict(differences, smallest, None, problems):
        return words
    numbers = range(len(differences) + 1, 1000)
    enough = next((n for n in numbers if verdict(differences, smallest, n, problems)), 1000)
    return f"{words}, about {enough - len(differences)} more seeds to decide"


class Arm:
    """A command line without its seed: ``grpo.py --beta 0.1``."""

    def __init__(self, line: str, shared: list[str]):
        self.line = line
        path, *own = shlex.split(line)
        self.path = Path(path)
        self.script = script_loader.load_arguments(self.path)
        self.words = [*shared, *own]

    def args(self, seed: int) -> flags.RunFlags:
        """Return the arguments with this seed. Exits with code 2 for flags that the script lacks or rejects."""
        return flags.parse(self.script.Args, self.script.__doc__, [*self.words, "--seed", str(seed)])

    def folder(self, seed: int) -> Path:
        args = self.args(seed)
        return Path(args.output_dir) / directory.run_name(args, self.script.Args())

    def unfinished(self, seeds: range) -> list[int]:
        """Return the seeds whose runs are missing. Exits with code 2 where one can be neither used nor continued."""
        lines = [shlex.join([*self.words, "--seed", str(seed)]) for seed in seeds]
        found = []
        for seed, (state, said) in zip(seeds, run_many.states_of(self.path, lines), strict=True):
            if state == is_finished.LEAVE:
                process.refuse(f"{said}; move this folder away, or give another --output_dir after --")
            if state == is_finished.RUN:
                found.append(seed)
        return found

    def value(self, seed: int, metric: str) -> float:
        """Return a finished run's final value: of its last evaluation, or the mean over its last tenth of steps."""
        folder = self.folder(seed)
        values = []
        for file in ("eval.jsonl", "metrics.jsonl"):
            lines = read(folder / file)
            values += [line[metric] for line in lines if metric in line]
        if not values:
            process.refuse(f"--metric {metric}: {folder} has none; docs/metrics.md has the names")
        tenth = max(1, len(values) // 10)
        last = 1 if metric.startswith("eval/") else tenth
        return statistics.fmean(values[-last:])

    def problems(self, seed: int, metric: str) -> int:
        """Return the number of problems behind a rate of a finished run's last evaluation; 0 for other metrics."""
        group, _, name = metric.rpartition("/")
        if not (group.startswith("eval") and name.startswith(("pass@", "majority@"))):
            return 0
        return int(self.value(seed, f"{group}/problems"))

    def ends(self, seed: int, metric: str) -> tuple[float, float]:
        """Return the values of the evaluations before the first step and after the last one of a finished run."""
        values = [line[metric] for line in read(self.folder(seed) / "eval.jsonl") if metric in line]
        if len(values) < 2:
            process.refuse(f"--controls compares evaluations: {self.folder(seed)} has not two with {metric}")
        return values[0], values[-1]


def run(
    arms: list[Arm],
    seeds: range,
    places: int,
    enough: Callable[[list[int]], bool],
    lanes: run_many.Lanes | None = None,
) -> int:
    """Run all arms with all seeds, so many runs at a time, until the seeds that all have finished are ``enough``.

    Only seeds before the first that an arm lacks count: which run ends first must not matter. Returns 0, 1 where a run
    has failed, or 75 where a signal has ended it.
    """
    unfinished = {arm: arm.unfinished(seeds) for arm in arms}
    waiting = [(seed, arm) for seed, arm in itertools.product(seeds, arms) if seed in unfinished[arm]]
    started: dict[str, tuple[int, Arm]] = {}

    def is_enough() -> bool:
        missing = [seed for seed, _ in (*waiting, *started.values())]
        first = min(missing, default=seeds.stop)
        return enough([seed for seed in seeds if seed < first])

    if is_enough() or not waiting:
        return 0
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    scripts = {arm.path: run_many.load_script(arm.path) for arm in arms}
    lanes = lanes or run_many.Lanes()
    signal.signal(signal.SIGTERM, lanes.stop)
    signal.signal(signal.SIGINT, lanes.stop)
    decided = False
    while (waiting or lanes.going) and not lanes.stopped:
        while waiting and len(lanes.going) < places:
            seed, arm = waiting.pop(0)
            folder = arm.folder(seed)
            started[folder.name] = (seed, arm)
            lanes.start(scripts[arm.path], [*arm.words, "--seed", str(seed)], folder)
        name, code = lanes.wait()
        if code == 0:
            del started[name]
            decided = is_enough()
        if decided or lanes.failed:  # what still runs would only cost time
            lanes.stop(signal.SIGTERM, None)
    while lanes.going:
        lanes.wait()
    if lanes.failed:
        return 1
    return run_many.STOPPED if lanes.stopped and not decided else 0


def seeds_of(text: str) -> range:
    """Parse seeds such as 1..44 as a range."""
    first, _, last = text.partition("..")
    try:
        seeds = range(int(first), int(last) + 1)
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise argparse.ArgumentTypeError(f"{text!r}: write 1..44")
    return seeds


def parse(parser: argparse.ArgumentParser, seeds: str) -> tuple[argparse.Namespace, list[str]]:
    """Parse the options, and the flags of all runs: those of the test bed or none, and those after --, which win."""
    parser.add_argument("--seeds", type=seeds_of, default=seeds, metavar="A..B", help="default: %(default)s")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--lanes", type=int, default=cores, help="runs side by side (default: one per core)")
    parser.add_argument("--quickstart", action="store_true", help="runs of the scripts' defaults, not of the test bed")
    words = [*sys.argv[1:], "--"]
    end = words.index("--")
    options = parser.parse_args(words[:end])
    return options, [*shlex.split(PLACE if options.quickstart else TESTBED), *words[end + 1 : -1]]


def gain(ends: list[tuple[float, float]], problems: int = 0) -> tuple[float, float, float]:
    """(mean gain, low, high) of (before, after) of some seeds that were fixed before, by Student's t.

    problems: behind each value, where the values are rates; the interval is then never a point, and within -1 and 1.
    """
    mean, low, high = mean_interval([after - before for before, after in ends])
    if math.isnan(low):
        return mean, -math.inf, math.inf
    if problems:
        half = least_half(len(ends) * problems)
        low, high = max(-1.0, min(low, mean - half)), min(1.0, max(high, mean + half))
    return mean, low, high


def told(ends: dict[str, list[tuple[float, float]]], line: str, metric: str, problems: int = 0) -> str:
    """Return a row per control, and a summary. ``ends``: (before, after) by seed of "none" and of each control.

    problems: as of ``gain``.
    """
    rows = [f"| trained on | {metric} before | after | gain | 95 % interval |", "|---|---|---|---|---|"]
    parts = []
    for name, pairs in ends.items():
        trained_on = CONTROLS[name]
        before = statistics.fmean(pair[0] for pair in pairs)
        after = statistics.fmean(pair[1] for pair in pairs)
        mean, low, high = gain(pairs, problems)
        said = interval_text(low, high, "+")
        rows.append(
            f"| {trained_on} | {before:.3f} | {after:.3f} | {mean:+.3f} | {said} |",
        )
        said = said.replace(" to ", ", ")
        parts.append(f"{trained_on} {mean:+.3f} [{said}]")
    rows.append(f"\n{line}: {metric} gains, by what it is trained on, in {len(pairs)} seeds: {', '.join(parts)}.")
    return "\n".join(rows)


def check_models(arms: list[Arm]) -> None:
    """Reject a model of the test bed that has not been made, before anything runs: exit code 2."""
    for arm in arms:
        model = arm.args(1).model_name_or_path
        if model.startswith("models/testbed") and not Path(model).is_dir():
            process.refuse(f"{model} is missing: `make testbed` makes it, once, in about four minutes")


def compare_controls(line: str, shared: list[str], options: argparse.Namespace) -> int:
    """Run a command line and its controls with all seeds, and print what they gain."""
    arms = {}
    for name in CONTROLS:
        if name in ("none", *(options.controls or CONTROLS)):
            arms[name] = Arm(f"{line} --reward_control {name}", shared)
    check_models(list(arms.values()))
    code = run(list(arms.values()), options.seeds, options.lanes, lambda seeds: False)
    if code:
        return code
    ends = {}
    for name, arm in arms.items():
        ends[name] = [arm.ends(seed, options.metric) for seed in options.seeds]
    problems = arms["none"].problems(options.seeds[0], options.metric)
    print(told(ends, line, options.metric, problems))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mine", help="a script, or in quotes a script with flags")
    parser.add_argument("--against", default="grpo.py", help="what it is compared with (default: %(default)s)")
    parser.add_argument("--metric", default="eval/pass@1", help="compared at the end of a run (default: %(default)s)")
    parser.add_argument("--smallest", type=float, default=0.03, help="smallest difference that matters (default: 0.03)")
    meaning = "compare with these values of --reward_control instead (default: all)"
    parser.add_argument("--controls", nargs="*", choices=CONTROLS, metavar="CONTROL", help=meaning)
    options, shared = parse(parser, "1..5" if "--controls" in sys.argv else f"1..{PAIRS}")
    if options.controls is not None:
        return compare_controls(options.mine, shared, options)
    mine = Arm(options.mine, shared)
    other = Arm(options.against, shared)
    if mine.folder(1) == other.folder(1):
        process.refuse(f"{options.mine} and {options.against} are one and the same run: there is nothing to compare")
    check_models([mine, other])
    differences: list[float] = []
    values: set[float] = set()

    def problems() -> int:
        """As of ``verdict``."""
        return mine.problems(options.seeds[0], options.metric) if values and values <= {0.0, 1.0} else 0

    def enough(seeds: list[int]) -> bool:
        """Take the new pairs, one after another: what comes after the decision is not looked at."""
        for seed in seeds[len(differences) :]:
            if verdict(differences, options.smallest, None, problems()):
                break
            ours = mine.value(seed, options.metric)
            theirs = other.value(seed, options.metric)
            differences.append(ours - theirs)
            values.update((ours, theirs))
            said = state_of(differences, options.smallest, problems())
            print(f"seed {seed}: {ours:.4f} against {theirs:.4f}; {len(differences)} pairs: {said}", flush=True)
        return bool(verdict(differences, options.smallest, None, problems()))

    code = run([mine, other], options.seeds, options.lanes, enough)
    if code:
        return code
    found = verdict(differences, options.smallest, None, problems())
    print(f"{options.mine} against {options.against}, {options.metric}: {found or 'undecided'}")
    return 0 if found else UNDECIDED


if __name__ == "__main__":
    raise SystemExit(main())

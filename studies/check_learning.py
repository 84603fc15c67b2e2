"""Part 5 of scripts/check.py: whether a script learns on the smallest test bed, next to the unedited script.

The bed is the random model of studies/probe_run.py, and the reward of a response is its fraction of even tokens. A run
takes a few seconds. Pairs have the same seed, and the rule is that of studies/paired_comparison.py.
"""

from __future__ import annotations

import statistics
import time

import paired_comparison
from check_subject import FAIL, NOTE, OK, Finding, Subject
from probe_run import Laboratory, Probe, Recorded, run_all

SMALLEST = 0.03  # the smallest difference of the final reward that matters
FIRST = 3  # pairs that run before the first look
PAIRS = 8  # at most
BUDGET = 45.0  # seconds after which no further pair begins


def ends(found: Recorded) -> tuple[float, float]:
    """Mean reward of the first two and of the last three steps."""
    rewards = [line["reward/mean"] for line in found.metrics]
    return statistics.fmean(rewards[:2]), statistics.fmean(rewards[-3:])


def comparable(found: Recorded) -> list[dict]:
    """Return the metrics that are the same in equal runs: all but time/, perf/ and engine/."""
    unequal = ("time/", "perf/", "engine/")
    return [{name: x for name, x in line.items() if not name.startswith(unequal)} for line in found.metrics]


def check(subject: Subject, ours: Laboratory, theirs: Laboratory, lanes: int, from_reward: bool) -> list[Finding]:
    """Compare both scripts' learning, and check a run with random rewards. ``from_reward``: the loss uses rewards."""
    began = time.monotonic()
    where = subject.first_place(
        "token_loss",
        "group_advantages",
        "loss_weights",
        "gae",
        "value_loss",
        "main",
    )
    pairs: list[tuple[Recorded, Recorded]] = []
    control: list[tuple[float, float]] = []
    while len(pairs) < PAIRS and time.monotonic() - began < BUDGET:
        seeds = range(len(pairs) + 1, len(pairs) + 1 + (FIRST if not pairs else 1))
        wanted = []
        for seed in seeds:
            probe = Probe("learning", {"seed": seed}, learns=True)
            wanted += [(ours, probe), (theirs, probe)]
        if not pairs:
            flags = [{"seed": seed, "reward_control": "random"} for seed in seeds]
            wanted += [(ours, Probe("control", own, learns=True)) for own in flags]
        found = run_all(wanted, lanes)
        learned = found[: 2 * len(seeds)]
        for one in learned:
            if one.failure:
                text = f"the run ended early: {one.failure.splitlines()[-1]}"
                return [Finding(5, "learning", NOTE if one.rejected else FAIL, text, where)]
        control += [ends(one) for one in found[2 * len(seeds) :] if not one.failure]
        pairs += zip(learned[::2], learned[1::2], strict=True)
        differences = [ends(mine)[1] - ends(other)[1] for mine, other in pairs]
        if paired_comparison.verdict(differences, SMALLEST):
            break
    gains = [ends(mine) for mine, _ in pairs]
    base_gains = [ends(other) for _, other in pairs]
    verdict = paired_comparison.verdict(differences, SMALLEST)
    learning = describe(subject, verdict, differences, gains, base_gains, from_reward, where)
    if where and all(comparable(mine) == comparable(other) for mine, other in pairs):
        learning = Finding(5, "learning", NOTE, f"{learning.text}; {no_effect(subject.args)}", where)
    return [learning, *describe_control(control, gains)]


def no_effect(args) -> str:
    """Describe runs whose every number is that of the unedited script, and the flag with which an edit would count."""
    words = "the runs are identical: the edit has no effect with these flags"
    if args.num_mini_batches * args.num_epochs == 1:
        words += ". With one optimizer step per batch every ratio is 1: add --num_mini_batches 4"
    if not any(args.kl_coefficients):
        words += ". Without a KL its code is not used: add --beta 0.1"
    return words


def describe(
    subject: Subject,
    verdict: str,
    differences: list[float],
    gains: list[tuple[float, float]],
    base_gains: list[tuple[float, float]],
    from_reward: bool,
    where: str,
) -> Finding:
    """Return the finding on the script's learning, next to that of the unedited script."""
    after = statistics.fmean(pair[1] for pair in gains)
    before = statistics.fmean(pair[0] for pair in gains)
    base = statistics.fmean(pair[1] for pair in base_gains)
    text = f"reward {before:.3f} -> {after:.3f}, {subject.base_name} -> {base:.3f}; "
    text += (
        paired_comparison.state_of(differences, SMALLEST) + f" in {len(differences)} pairs: {verdict or 'undecided'}"
    )
    if not from_reward:
        return Finding(5, "learning", NOTE, f"{text}; the script does not learn from the reward")
    state = FAIL if verdict == "worse" else OK if verdict == "no difference" or verdict == "better" else NOTE
    return Finding(5, "learning", state, text, where if state != OK else "", {"differences": differences})


def describe_control(control: list[tuple[float, float]], gains: list[tuple[float, float]]) -> list[Finding]:
    """Return the finding on the control run, whose rewards are permuted at random."""
    if not control:
        return []
    mean, low, high = paired_comparison.gain(control)
    real = statistics.fmean(after - before for before, after in gains)
    text = f"with random rewards {mean:+.3f} [{low:+.3f}, {high:+.3f}], with the reward {real:+.3f}"
    state = FAIL if low > SMALLEST and mean > real / 2 else OK
    return [Finding(5, "random rewards", state, text)]

"""The doctor's rules, which find faults of a run in its metrics and samples; docs/evidence/doctor.md has the bounds.

Trends compare the last third of the steps with the first ones, so they need TREND_STEPS steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.run.run_files import PHASES, read, read_config, series, thin
from runtime.system.jsonl import records

if TYPE_CHECKING:
    import pandas as pd

SAMPLES = 20_000  # that a Case holds at most
TREND_STEPS = 15  # below this, rules about trends stay silent
SMOOTH = 5  # steps in the running mean that dates a finding
SOLVED = 0.9  # reward/correct above which a reward need not rise any more


@dataclass(frozen=True)
class Finding:
    """Something wrong: the rule that found it, what it saw, what to do, and the first step of it."""

    rule: str
    what: str
    remedy: str
    since: int

    def __str__(self) -> str:
        return f"{self.rule}: {self.what}, since step {self.since}. {self.remedy}"


@dataclass(frozen=True)
class Case:
    """A run as the rules see it."""

    args: dict[str, Any]
    metrics: list[dict]
    samples: list[dict]

    @classmethod
    def of(cls, folder: Path) -> Case:
        """Read the run in ``folder``, which may still be in progress, with a subset of its samples if it has many."""
        samples = map(brief, records(folder / "samples.jsonl"))
        few, _ = thin(samples, SAMPLES)
        return cls(args=read_config(folder).get("args", {}), metrics=read(folder / "metrics.jsonl"), samples=few)

    def curve(self, name: str) -> pd.Series:
        """Return a metric over the steps in which it has a finite value."""
        return series(self.metrics, name).dropna()

    def start(self, name: str) -> pd.Series:
        """Return a metric's values in the first SMOOTH steps: many runs have moved before their first third is over."""
        return self.curve(name).iloc[:SMOOTH]

    def first(self, name: str) -> pd.Series:
        """Return a metric's values in the first third of the steps."""
        values = self.curve(name)
        return values[values.index <= self.step_at(1 / 3)]

    def middle(self, name: str) -> pd.Series:
        """Return a metric's values in the second third of the steps."""
        values = self.curve(name)
        begun = values[values.index > self.step_at(1 / 3)]
        return begun[begun.index <= self.step_at(2 / 3)]

    def last(self, name: str) -> pd.Series:
        """Return a metric's values in the last third of the steps."""
        values = self.curve(name)
        return values[values.index > self.step_at(2 / 3)]

    def step_at(self, share: float) -> float:
        """Return the step after which this share of the logged steps is over."""
        begin = self.metrics[0]["step"] - 1
        return begin + share * (self.metrics[-1]["step"] - begin)

    @property
    def has_trends(self) -> bool:
        return len(self.metrics) >= TREND_STEPS

    def reward(self) -> str:
        """Return the name of the reward metric: of all drawn samples if logged, as kept ones hide what is learned."""
        return "data/reward_mean" if len(self.curve("data/reward_mean")) else "reward/mean"

    def equal(self) -> str:
        """Return the name of the metric of zero-variance groups: among all drawn groups if logged."""
        of_all_drawn = "data/zero_std_frac"
        if len(self.curve(of_all_drawn)):
            return of_all_drawn
        return "reward/zero_std_frac"

    def has_groups(self) -> bool:
        """Return True if responses to one prompt are compared with each other: several of them, and no critic."""
        given = self.args
        return given.get("num_samples_per_prompt_rollout", 2) > 1 and given.get("disable_value", True)

    def solved(self) -> bool:
        return self.last("reward/correct").mean() > SOLVED


def since(bad: pd.Series) -> int:
    """Return the first step of the final stretch of True values, or the last step if there is none."""
    good = bad.index[~bad]
    stretch = bad.index if len(good) == 0 else bad.index[bad.index > good[-1]]
    return int(stretch[0] if len(stretch) else bad.index[-1])


def smooth(values: pd.Series) -> pd.Series:
    """Return the running mean over the last SMOOTH steps."""
    return values.rolling(SMOOTH, min_periods=1).mean()


def rise(before: pd.Series, after: pd.Series) -> tuple[float, float]:
    """Return the difference of two means and its standard error, which is NaN if either has fewer than two values."""
    error = np.sqrt(before.var() / len(before) + after.var() / len(after)) if len(before) and len(after) else np.nan
    return after.mean() - before.mean(), error


# ------------------------------------------------------------------------------------------------------------ reward


def reward_flat(case: Case) -> Finding | None:
    """Report a reward whose last third is not two standard errors above the first steps, unless it is high."""
    name = case.reward()
    change, error = rise(case.start(name), case.last(name))
    if not case.has_trends or case.solved() or not change < 2 * error:
        return None
    last = case.last(name).mean()
    what = f"the reward does not rise: {case.start(name).mean():.3f} in the first steps, {last:.3f} in the last third"
    also = " and at zero-variance groups" if case.has_groups() else ""
    remedy = f"Look at samples.jsonl: is the score what you mean? Then at the learning rate{also}."
    return Finding("reward_flat", what, remedy, case.metrics[0]["step"])


def reward_falls(case: Case) -> Finding | None:
    """Report a reward that lost a quarter of its best smoothed value above the start, or half of the start."""
    values = smooth(case.curve(case.reward()))
    if not case.has_trends or len(values) < TREND_STEPS:
        return None
    values = values.iloc[SMOOTH - 1 :]
    start = values.iloc[0]
    best = values.max()
    end = case.last(case.reward()).mean()
    noise = 4 * case.curve(case.reward()).diff().std() / np.sqrt(2 * SMOOTH)
    bound = best - max(noise, 0.25 * abs(best - min(start, end)))
    if end >= bound or best - end <= noise or end > start:
        return None
    what = f"the reward fell from {best:.3f} (step {values.idxmax()}) to {end:.3f}"
    remedy = "Lower --learning_rate, or add a KL (--beta); a wrong sign in an edited loss looks like this, too."
    return Finding("reward_falls", what, remedy, since(values < bound))


def extraction(case: Case) -> Finding | None:
    """Report that half of the complete responses of the last third lack an answer that the verifier recognizes.

    A verifier that looks for an answer reports the part ``format``; a function of yours may have none.
    """
    after = case.step_at(2 / 3)
    complete = [s for s in case.samples if s["finish_reason"] == "stop" and "format" in s.get("reward_parts", {})]
    late = [s for s in complete if s["step"] > after]
    empty = sum(_unanswered(s) for s in late)
    if len(late) < 5 or empty < 0.5 * len(late):
        return None
    steps = series([{"step": s["step"], "empty": _unanswered(s)} for s in complete], "empty")
    what = f"no answer was extracted from {empty} of {len(late)} complete responses, such as {_tail(late[-1])}"
    remedy = "Give the verifier that fits the prompt (--verifier), or ask for its format (--system_prompt)."
    return Finding("extraction", what, remedy, since(steps.groupby(level=0).mean() >= 0.5))


def brief(sample: dict) -> dict:
    """Return the fields of a sample that ``extraction`` needs."""
    extracted = sample.get("extracted") or ""
    return {
        "step": sample.get("step"),
        "finish_reason": sample.get("finish_reason"),
        "extracted": extracted[:1],
        "reward_parts": sample.get("reward_parts"),
        "response": sample.get("response", "")[-60:],
    }


def _unanswered(sample: dict) -> bool:
    return not sample["extracted"] and sample["reward_parts"]["format"] == 0


def _tail(sample: dict) -> str:
    return repr(sample["response"][-60:])


def verifier_failures(case: Case) -> Finding | None:
    """Report that more than a hundredth of the scores of the last third are zeros because the verifier failed."""
    kinds = ("timeouts", "errors", "unscorable")
    samples = case.args.get("num_unique_prompts_rollout", 0) * case.args.get("num_samples_per_prompt_rollout", 0)
    counts = {kind: case.last(f"reward/{kind}").mean() for kind in kinds if len(case.last(f"reward/{kind}"))}
    if not samples or sum(counts.values()) <= 0.01 * samples:
        return None
    failed = sum(case.curve(f"reward/{kind}") for kind in counts)
    shares = ", ".join(f"{kind} {count / samples:.1%}" for kind, count in counts.items() if count > 0)
    what = f"verifications fail and count as 0: {shares} of the samples"
    remedy = "Raise --call_timeout for time-outs; reward_status in samples.jsonl names the others."
    return Finding("verifier_failures", what, remedy, since(smooth(failed) > 0.01 * samples))


def equal_groups(case: Case) -> Finding | None:
    """Report that nineteen of twenty groups of the last third have responses of equal reward: no signal."""
    name = case.equal()
    share = case.last(name).mean()
    if not share >= 0.95 or not case.has_groups():
        return None
    level = case.last("reward/mean").mean()
    easy = case.last("reward/correct").mean() > 0.5
    verdict = "too easy" if easy else "too hard, or the responses too alike"
    what = f"zero-variance groups {share:.0%} with a mean reward of {level:.3f}: the problems are {verdict}"
    remedy = "Use other problems, --dynamic_sampling_rounds, a larger group, or a higher --temperature."
    return Finding("equal_groups", what, remedy, since(smooth(case.curve(name)) >= 0.95))


# --------------------------------------------------------------------------------------------------------- responses


def truncation(case: Case) -> Finding | None:
    """Report that a third of the responses in the last third of the run is truncated."""
    name = "completions/truncated_frac"
    share = case.last(name).mean()
    if not share >= 1 / 3:
        return None
    what = f"{share:.0%} of the responses are truncated at {case.args.get('max_response_length', '?')} tokens"
    remedy = "Raise --max_response_length; with --mask_truncated_completions they are not trained on."
    return Finding("truncation", what, remedy, since(smooth(case.curve(name)) >= 1 / 3))


def length_growth(case: Case) -> Finding | None:
    """Report that responses have grown by half while the fraction of correct ones did not rise."""
    name = "completions/length_mean"
    before = case.start(name)
    after = case.last(name)
    change, error = rise(before, after)
    better, noise = rise(case.start("reward/correct"), case.last("reward/correct"))
    if not case.has_trends or not change > max(0.5 * before.mean(), 3 * error) or better > max(0.05, 2 * noise):
        return None
    what = (
        f"responses grew from {before.mean():.0f} to {after.mean():.0f} tokens while reward/correct changed by "
        f"{better:+.3f}"
    )
    remedy = "The reward or the loss pays for length: see --loss_norm, --non_stop_penalty, and samples.jsonl."
    return Finding("length_growth", what, remedy, since(smooth(case.curve(name)) > 1.5 * before.mean()))


def entropy_collapse(case: Case) -> Finding | None:
    """Report an entropy below a fifth of the highest of the first steps, with a reward that has not risen since.

    A policy that learns a task with one right answer becomes sure of it: that is no collapse.
    """
    values = case.curve("policy/entropy")
    gain, error = rise(case.start(case.reward()), case.last(case.reward()))
    if not case.has_trends or len(values) < SMOOTH or case.solved() or gain > 2 * error:
        return None
    start = values.iloc[:SMOOTH].max()
    end = values.iloc[-SMOOTH:].mean()
    if not end < 0.2 * start:
        return None
    what = f"entropy fell from {start:.3f} to {end:.4f} nats per token with {_correct(case):.0%} of the responses right"
    remedy = "Exploration is over: lower --learning_rate, raise --clip_higher, or add a KL (--beta)."
    return Finding("entropy_collapse", what, remedy, since(smooth(values) < 0.2 * start))


def _correct(case: Case) -> float:
    return case.last("reward/correct").mean()


# --------------------------------------------------------------------------------------------------------- the update


def mismatch_growth(case: Case) -> Finding | None:
    """Report engine and trainer log-probs that differ by three times the initial gap, and by more than rounding."""
    name = "sampler/logprob_diff_mean"
    values = case.curve(name)
    start = case.first(name).iloc[:SMOOTH].mean()
    end = case.last(name).mean()
    bound = max(3 * start, 0.01)
    if not end > bound:
        return None
    what = f"engine and trainer differ by {end:.3f} nats per token, at first by {start:.4f}"
    remedy = "Weights do not arrive, or responses are scored as another model's: do not switch --max_logprob_diff off."
    return Finding("mismatch_growth", what, remedy, since(smooth(values) > bound))


def kl_runaway(case: Case) -> Finding | None:
    """Report two nats per response from the reference and no gain in reward, since the start or while the KL grew.

    A KL below that of the first steps does not run away: distillation begins far from its teacher. A reward that rose
    until the task was solved has nothing left to gain.
    """
    values = case.curve("kl/sequence")
    start = case.start("kl/sequence").mean()
    middle = case.middle("kl/sequence").mean()
    last = case.last("kl/sequence").mean()
    reward = case.reward()
    late_gain, late_error = rise(case.middle(reward), case.last(reward))
    gain, error = rise(case.start(reward), case.last(reward))
    grows = last > 1.5 * middle
    in_vain = grows and not late_gain > 2 * late_error and not case.solved()
    gained = gain > 2 * error
    if not case.has_trends or not last > max(2.0, start) or (gained and not in_vain):
        return None
    what = f"the KL to the reference is {last:.1f} nats per response, the reward changed by {gain:+.3f} since the start"
    remedy = "Raise --beta or lower --learning_rate; docs/kl.md says which settings pull back, and which push away."
    return Finding("kl_runaway", what, remedy, since(smooth(values) > 2.0))


def gradient_spikes(case: Case) -> Finding | None:
    """Report that at least two gradients, and one in fifty, are ten times the median of the twenty before them."""
    norms = case.curve("optim/grad_norm")
    norms = norms[norms > 0]
    usual = norms.shift(1).rolling(20, min_periods=SMOOTH).median()
    spikes = norms[norms > 10 * usual]
    if len(spikes) < max(2, 0.02 * len(norms)):
        return None
    steps = ", ".join(str(step) for step in spikes.index[:5])
    what = f"{len(spikes)} gradients are more than ten times the usual norm ({spikes.max():.3g}; steps {steps})"
    remedy = "Look at those steps in samples.jsonl; lower --max_grad_norm, clip rewards, or use --loss_norm token."
    return Finding("gradient_spikes", what, remedy, int(spikes.index[0]))


def learning_rate(case: Case) -> Finding | None:
    """Report a learning rate of 0, or that reward, entropy and length have not moved by three standard errors."""
    rates = case.curve("optim/lr")
    trained = case.curve("optim/steps").sum() > 0
    if trained and len(rates) and rates.max() == 0:
        return Finding("learning_rate", "the learning rate is 0", "Raise --learning_rate.", int(rates.index[0]))
    if not case.has_trends or not trained or case.solved():
        return None
    for name in (case.reward(), "policy/entropy", "completions/length_mean"):
        begin = case.curve(name).iloc[:3]
        end = case.last(name)
        noise = end.std() * np.sqrt(1 / max(1, len(begin)) + 1 / max(1, len(end)))
        if not abs(end.mean() - begin.mean()) < 3 * noise:
            return None
    what = f"nothing moves at a rate of {rates.max():.1e}: reward, entropy and length are as in the first steps"
    remedy = "Raise --learning_rate by 3 to 10; small models want more than large ones."
    return Finding("learning_rate", what, remedy, case.metrics[0]["step"])


def skipped_steps(case: Case) -> Finding | None:
    """Report that more than one in fifty optimizer steps, and at least two, were skipped as not finite."""
    skipped = case.curve("optim/skipped")
    count = int(skipped.sum())
    applied = case.curve("optim/steps").sum()
    if count < max(2, 0.02 * (count + applied)):
        return None
    what = f"{count} optimizer steps were skipped, their loss or gradient was not finite"
    remedy = "Lower --learning_rate; try --dtype float32; look for a division by zero in a reward or an edited loss."
    return Finding("skipped_steps", what, remedy, int(skipped.index[skipped > 0][0]))


def stale_samples(case: Case) -> Finding | None:
    """Report that half of the samples' weight is lost to staleness: an effective sample size below one half."""
    size = case.last("sampler/ess").mean()
    if not size < 0.5:
        return None
    age = case.last("sampler/staleness").mean()
    what = f"the effective sample size is {size:.0%}: samples are {age:.1f} steps old on the mean, and no longer alike"
    remedy = "Lower --async_steps or --learning_rate."
    return Finding("stale_samples", what, remedy, since(smooth(case.curve("sampler/ess")) < 0.5))


# -------------------------------------------------------------------------------------------------------------- speed


def throughput_loss(case: Case) -> Finding | None:
    """Report steps that take three times as long as at first and yield a third of the tokens per second."""
    before = case.first("time/step").median()
    after = case.last("time/step").median()
    slower = case.first("perf/tokens_per_second").median() / case.last("perf/tokens_per_second").median()
    if not case.has_trends or not min(after / before, slower) > 3:
        return None
    growth = {}
    for phase in PHASES:
        earlier = case.first(f"time/{phase}").median()
        later = case.last(f"time/{phase}").median()
        growth[phase] = np.nan_to_num(later) - np.nan_to_num(earlier)
    phase = max(growth, key=growth.get)
    what = f"a step takes {after:.2f} s instead of {before:.2f}, most of it in time/{phase} (+{growth[phase]:.2f} s)"
    remedy = (
        "See time/* in metrics.jsonl: a slow verifier, a full disk, a neighbor on the machine, or longer responses."
    )
    return Finding("throughput_loss", what, remedy, since(smooth(case.curve("time/step")) > 2 * before))


RULES = (
    reward_flat,
    reward_falls,
    extraction,
    verifier_failures,
    equal_groups,
    truncation,
    length_growth,
    entropy_collapse,
    mismatch_growth,
    kl_runaway,
    gradient_spikes,
    learning_rate,
    skipped_steps,
    stale_samples,
    throughput_loss,
)


def examine(case: Case) -> list[Finding]:
    """List the problems of a run in the order of RULES; empty for a healthy run."""
    found = [rule(case) for rule in RULES]
    return [finding for finding in found if finding is not None]

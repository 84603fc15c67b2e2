"""runtime/run/verdict.py: a run has learned, has not, or cannot tell; the interval covers what it says it covers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import report
from helpers import VERIFIERS, folder_of, read_jsonl, run_here, tiny_args
from test_doctor import ARGS, healthy

from runtime.run import verdict
from runtime.run.doctor import Case, examine


def outcome_of(folder: Path) -> str | None:
    """The outcome in verdict.json, or None if there is no complete one."""
    return (report.read_verdict(folder) or {}).get("outcome")


def judged(pair: tuple[float, float] | None, changes: dict | None = None, steps: int = 60) -> tuple[str, str]:
    """The judgement of a healthy run with these limits of its gain, and with these metrics in every step."""
    case = Case(ARGS, [m | (changes or {}) for m in healthy()[:steps]])
    found = None if pair is None else {"low": pair[0], "high": pair[1], "by_reward": ""}
    return verdict.judge(case, {finding.rule for finding in examine(case)}, found)


@pytest.mark.parametrize(
    "pair, outcome",
    [
        ((0.001, 0.3), verdict.LEARNED),
        ((0.0, 0.3), verdict.UNKNOWN),
        ((-0.1, 0.05), verdict.UNKNOWN),
        ((-0.1, 0.049), verdict.NOT_LEARNED),
        ((-0.3, -0.001), verdict.NOT_LEARNED),
        (None, verdict.UNKNOWN),
    ],
)
def test_three_outcomes(pair, outcome):
    assert judged(pair)[0] == outcome


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"optim/steps": 0}, "no optimizer step was taken"),
        ({"optim/lr": 0.0}, "the learning rate is 0"),
        ({"optim/grad_norm": 0.0}, "every gradient is 0"),
    ],
)
def test_what_cannot_have_learned_has_not_whatever_the_evaluations_say(changes, why):
    for pair in (None, (0.1, 0.3)):
        assert judged(pair, changes) == (verdict.NOT_LEARNED, why)


def test_an_engine_that_is_not_the_trained_model_tells_nothing():
    """Its evaluations are of other weights than those that are saved."""
    case = Case(ARGS, [m | {"sampler/logprob_diff_mean": 1e-3 * m["step"]} for m in healthy()])
    rules = {finding.rule for finding in examine(case)}
    assert rules == {"mismatch_growth"}
    assert verdict.judge(case, rules, {"low": 0.1, "high": 0.3})[0] == verdict.UNKNOWN


@pytest.mark.integration
def test_the_interval_covers_the_gain():
    """At least 94 % of the intervals have the true gain, and a run without one is called learned in at most 4 %."""
    draw = np.random.default_rng(0)
    for problems, samples, before, gain in [
        *((16, 1, 0.3, 0.0), (64, 4, 0.3, 0.0), (64, 4, 0.02, 0.0), (256, 4, 0.5, 0.1), (100, 1, 0.9, 0.05)),
        *((32, 8, 0.5, 0.2), (1000, 1, 0.2, 0.0)),
    ]:
        hits, learned = 0, 0
        for _ in range(1000):
            hard = draw.beta(20 * before, 20 * (1 - before), problems)  # problems differ
            rates = [draw.binomial(samples, hard + (1 - hard) * share) / samples for share in (0, gain / (1 - before))]
            _, low, high = verdict.paired_gain(*rates)
            hits += low <= gain <= high
            learned += low > 0
        assert hits >= 940, (problems, samples, before, gain, hits)
        assert gain > 0 or learned <= 40, (problems, samples, before, learned)


def test_few_problems_that_do_not_change_prove_nothing():
    """Four that stay wrong leave room for a gain of 0.05; four hundred do not."""
    assert verdict.paired_gain([0.0] * 4, [0.0] * 4)[2] > verdict.SMALL
    assert verdict.paired_gain([0.0] * 400, [0.0] * 400)[2] < verdict.SMALL


def written(folder: Path, *evaluations: dict) -> dict | None:
    """Return verdict.py's view of evaluations after steps 0 and 2: (right of each problem, reward of each problem)."""
    folder.mkdir(exist_ok=True)
    lines = [{"step": step, "eval/samples": 4} | more for step, more in zip((0, 2), evaluations, strict=True)]
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return verdict.evaluations(folder, 2)


def evaluation(right: list[int], rewards: list[float] | None, graded: float) -> dict:
    return {"eval/right": right, "eval/graded_frac": graded} | ({"eval/rewards": rewards} if rewards else {})


WRONG, RIGHT = [0] * 64, [4] * 64
RISEN = [0.3 + 0.001 * i for i in range(64)], [0.7 - 0.001 * i for i in range(64)]


@pytest.mark.parametrize(
    ("before", "after", "outcome", "why"),
    [
        (evaluation(WRONG, RISEN[0], 1.0), evaluation(WRONG, RISEN[1], 1.0), verdict.LEARNED, "improved"),
        (evaluation(RIGHT, RISEN[0], 1.0), evaluation(RIGHT, RISEN[1], 1.0), verdict.LEARNED, "improved"),
        (evaluation(RIGHT, RISEN[1], 1.0), evaluation(RIGHT, RISEN[0], 1.0), verdict.NOT_LEARNED, "got worse"),
        (evaluation(WRONG, RISEN[0], 1.0), evaluation(WRONG, RISEN[0], 1.0), verdict.UNKNOWN, "too few problems"),
        (evaluation(WRONG, [0.0] * 64, 0.0), evaluation(WRONG, [0.0] * 64, 0.0), verdict.UNKNOWN, "no evaluation has"),
        (evaluation(WRONG, [0.0] * 64, 0.0), evaluation(WRONG, [0.2] * 64, 0.0), verdict.LEARNED, "no evaluation has"),
        (evaluation(WRONG, None, 0.0), evaluation(WRONG, None, 0.0), verdict.UNKNOWN, "not a finite number"),
        (evaluation(RIGHT, [1.0] * 64, 0.0), evaluation(RIGHT, [1.0] * 64, 0.0), verdict.NOT_LEARNED, "below 0.05"),
        (evaluation(WRONG, [0.0] * 64, 0.0), evaluation(RIGHT, [1.0] * 64, 0.0), verdict.LEARNED, "pass@1 improved"),
    ],
)
def test_the_reward_judges_where_correct_answers_do_not(tmp_path, before, after, outcome, why):
    """A graded reward, and one by which no answer was ever correct; a rate that says something still decides."""
    pair = written(tmp_path / "run", before, after)
    found = verdict.judge(Case(ARGS, healthy()), set(), pair)
    assert found[0] == outcome and why in found[1]
    words = verdict.in_words({"outcome": outcome, "why": found[1], "control": "", "evaluation": pair, "findings": []})
    assert ("           reward " in words) == bool(pair["by_reward"] and pair["reward"])


@pytest.mark.parametrize("scale", [1.0, 1000.0, 1e-6])
def test_the_interval_of_a_reward_follows_its_scale(tmp_path, scale):
    """Rewards in other units, and from another zero, have the same verdict; equal ones no interval of width 0."""
    ends = [evaluation(WRONG, [scale * (value - 5) for value in values], 1.0) for values in RISEN]
    reward = written(tmp_path / "run", *ends)["reward"]
    assert reward["gain"] == pytest.approx(scale * 0.337) and 0 < reward["low"] < reward["gain"] < reward["high"]
    level = written(tmp_path / "run", *[evaluation(WRONG, [scale] * 64, 1.0)] * 2)["reward"]
    assert level["low"] < 0 < level["high"]


@pytest.mark.integration
def test_a_run_whose_rewards_are_never_1_is_not_said_to_have_learned_nothing(tiny, tmp_path, capfd, monkeypatch):
    """The first reward of the page on rewards, of right answers alone: pass@1 is 1, and report.py does not say 3."""
    args = tiny_args(tiny, tmp_path, eval_prompts=16, verifier=f"{VERIFIERS}:shorter")
    run_here(args)
    folder = folder_of(args)
    last = read_jsonl(folder / "eval.jsonl")[-1]
    metrics = read_jsonl(folder / "metrics.jsonl")[-1]
    assert last["eval/pass@1"] == metrics["reward/correct"] == 1.0 > metrics["reward/mean"] > 0.9
    assert "judged by the reward" in capfd.readouterr().out
    assert outcome_of(folder) != verdict.NOT_LEARNED
    monkeypatch.setattr("sys.argv", ["report.py", str(folder)])
    assert report.main() != 3


@pytest.mark.integration
def test_a_run_ends_with_its_verdict(tiny, tmp_path, capfd, monkeypatch):
    """The gain that eval.jsonl gives by hand, on the console and in verdict.json; without a step nothing is learned.

    scripts/report.py exits with code 3 for a run that did not learn, and prints its verdict.
    """
    args = tiny_args(tiny, tmp_path, eval_prompts=16, learning_rate=1e-2)
    run_here(args)
    printed = capfd.readouterr().out
    folder = folder_of(args)
    found = json.loads((folder / verdict.FILE).read_text())
    first, last = read_jsonl(folder / "eval.jsonl")
    assert sum(last["eval/right"]) / 32 == last["eval/pass@1"] and len(last["eval/right"]) == 16
    assert found["evaluation"]["gain"] == pytest.approx(last["eval/pass@1"] - first["eval/pass@1"])
    assert found["evaluation"]["low"] < found["evaluation"]["gain"] < found["evaluation"]["high"]
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert found["sampler_logprob_diff"] == max(m["sampler/logprob_diff_mean"] for m in metrics)
    assert found["groups_with_signal"] == 1 - metrics[-1]["reward/zero_std_frac"]
    assert [f["rule"] for f in found["findings"]] == ["truncation"]
    assert f"verdict    {found['outcome']}: {found['why']}" in printed
    assert printed.rstrip().splitlines()[-1].startswith("doctor     truncation: ")
    still = tiny_args(tiny, tmp_path, eval_prompts=4, verifier=f"{VERIFIERS}:zero", filter_zero_std_samples=True)
    run_here(still)
    assert outcome_of(folder_of(still)) == verdict.NOT_LEARNED
    codes = {verdict.NOT_LEARNED: 3, verdict.LEARNED: 1, verdict.UNKNOWN: 1}  # both runs have findings
    for run in (still, args):
        monkeypatch.setattr("sys.argv", ["report.py", str(folder_of(run))])
        assert report.main() == codes[outcome_of(folder_of(run))]
    assert "verdict    did not learn: " in capfd.readouterr().out


def test_a_verdict_that_cannot_be_made_costs_no_run(tiny, tmp_path, capfd, monkeypatch):
    """Whatever is wrong with it: the model is saved, and the run ends as ever."""
    monkeypatch.setattr(verdict, "judge", lambda *_: 1 / 0)
    args = tiny_args(tiny, tmp_path, eval_prompts=0)
    run_here(args)
    assert "warning: no verdict (ZeroDivisionError: division by zero)" in capfd.readouterr().out
    assert (folder_of(args) / "model" / "config.json").exists() and outcome_of(folder_of(args)) is None

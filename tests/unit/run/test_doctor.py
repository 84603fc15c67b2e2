"""runtime/run/doctor.py: each rule names its fault beyond its bound, and is silent short of it and on a healthy run."""

import json
import math
import random

import pytest
import report
import torch
from helpers import make_samples

import utils
from runtime.run import run_files, verdict
from runtime.run.doctor import RULES, Case, Finding, examine

STEPS = 60
ARGS = {"num_unique_prompts_rollout": 8, "num_samples_per_prompt_rollout": 16, "max_response_length": 64}


def healthy_step(step: int, noise: random.Random) -> dict[str, float]:
    """The metrics of a run that learns, as a real one has them."""
    progress = 1 - math.exp(-step / 15)
    correct = 0.3 + 0.4 * progress + noise.gauss(0, 0.04)
    return {
        "step": step,
        "reward/mean": correct,
        "reward/correct": correct,
        "reward/timeouts": 0,
        "reward/crashes": 0,
        "reward/unscorable": 0,
        "reward/format": 0.97,
        "reward/zero_std_frac": 0.1 + 0.3 * progress,
        "completions/length_mean": 20 + 2 * progress + noise.gauss(0, 1),
        "completions/truncated_frac": 0.02,
        "policy/entropy": 0.4 - 0.25 * progress,
        "policy/clip_frac": 0.05,
        "optim/lr": 1e-4,
        "optim/steps": 1,
        "optim/skipped": 0,
        "optim/grad_norm": math.exp(noise.gauss(0, 0.3)),
        "sampler/logprob_diff_mean": 2e-3,
        "sampler/ess": 0.9,
        "sampler/staleness": 1.0,
        "kl/sequence": 1.5 * progress,
        "time/step": 1.0 + abs(noise.gauss(0, 0.2)),
        "time/generate": 0.6,
        "time/score": 0.05,
        "perf/tokens_per_second": 2500,
    }


def healthy() -> list[dict]:
    """The metrics of a healthy run."""
    noise = random.Random(1)
    return [healthy_step(step, noise) for step in range(1, STEPS + 1)]


def findings(metrics: list[dict]) -> list[Finding]:
    return examine(Case(ARGS, metrics))


def late(step: int) -> float:
    """0 until step 20, then up to 1 at the end."""
    return max(0.0, (step - 20) / (STEPS - 20))


# Rule -> (what its fault does to a step, the same just short of the bound).
FAULTS = {
    "reward_flat": (
        lambda m: {"reward/mean": 0.3 + 0.03 * math.sin(m["step"])},
        lambda m: {"reward/mean": 0.3 + 0.03 * math.sin(m["step"]) + 0.1 * late(m["step"])},
    ),
    "reward_falls": (
        lambda m: {"reward/mean": m["reward/mean"] - 0.7 * late(m["step"])},
        lambda m: {"reward/mean": m["reward/mean"] - 0.05 * late(m["step"])},
    ),
    "extraction": (
        lambda m: {"reward/format": 0.2 if m["step"] > 30 else 0.9, "completions/truncated_frac": 0.3},
        lambda m: {"reward/format": 0.4 if m["step"] > 30 else 0.9, "completions/truncated_frac": 0.3},
    ),
    "verifier_failures": (
        lambda m: {"reward/timeouts": 2 if m["step"] > 30 else 0},
        lambda m: {"reward/timeouts": 1 if m["step"] > 30 else 0},
    ),
    "equal_groups": (
        lambda m: {"reward/zero_std_frac": 0.97 if m["step"] > 30 else 0.2},
        lambda m: {"reward/zero_std_frac": 0.93 if m["step"] > 30 else 0.2},
    ),
    "truncation": (
        lambda m: {"completions/truncated_frac": 0.4 if m["step"] > 30 else 0.1},
        lambda m: {"completions/truncated_frac": 0.3 if m["step"] > 30 else 0.1},
    ),
    "length_growth": (
        lambda m: {"completions/length_mean": 20 + 20 * late(m["step"]), "reward/correct": 0.4},
        lambda m: {"completions/length_mean": 20 + 8 * late(m["step"]), "reward/correct": 0.4},
    ),
    "entropy_collapse": (
        lambda m: {"policy/entropy": 0.4 * math.exp(-4 * late(m["step"])), "reward/mean": 0.3 + 0.03 * (m["step"] % 2)},
        lambda m: {
            "policy/entropy": 0.4 * math.exp(-1.4 * late(m["step"])),
            "reward/mean": 0.3 + 0.03 * (m["step"] % 2),
        },
    ),
    "mismatch_growth": (
        lambda m: {"sampler/logprob_diff_mean": 0.002 + 0.1 * late(m["step"])},
        lambda m: {"sampler/logprob_diff_mean": 0.002 + 0.008 * late(m["step"])},
    ),
    "kl_runaway": (
        lambda m: {"kl/sequence": 8 * late(m["step"]), "reward/mean": 0.3 + 0.01 * (m["step"] % 2)},
        lambda m: {"kl/sequence": 1.9 * late(m["step"]), "reward/mean": 0.3 + 0.01 * (m["step"] % 2)},
    ),
    "skipped_steps": (
        lambda m: {"optim/skipped": 1 if m["step"] in (40, 50) else 0},
        lambda m: {"optim/skipped": 1 if m["step"] in (20, 40) else 0},
    ),
    "stale_samples": (
        lambda m: {"sampler/ess": 0.4 if m["step"] > 30 else 0.9},
        lambda m: {"sampler/ess": 0.55 if m["step"] > 30 else 0.9},
    ),
}


def test_a_healthy_run_has_no_finding():
    assert findings(healthy()) == []


@pytest.mark.parametrize("rule", FAULTS)
def test_each_rule_names_its_fault_and_nothing_short_of_it(rule):
    """The fault is found by its rule and by no other but those that it implies; a little less of it by none."""
    metrics = healthy()
    beyond, short = FAULTS[rule]
    found = findings([m | beyond(m) for m in metrics])
    flat = {"reward_flat"}
    implied = {"reward_falls": flat, "entropy_collapse": flat, "kl_runaway": flat}.get(rule, set())
    names = {f.rule for f in found}
    assert rule in names
    assert names - {rule} <= implied
    assert rule not in {f.rule for f in findings([m | short(m) for m in metrics])}


# Rule -> the step at which the running mean of five is beyond the bound, of the faults that begin at step 31.
SINCE = {
    "verifier_failures": 34,
    "equal_groups": 35,
    "truncation": 34,
    "stale_samples": 35,
    "extraction": 34,
}


@pytest.mark.parametrize("rule", SINCE)
def test_a_finding_says_since_when(rule):
    """Of five steps some are from before: the larger the fault, the fewer of them have to have it."""
    metrics = healthy()
    beyond, _ = FAULTS[rule]
    (found,) = findings([m | beyond(m) for m in metrics])
    assert found.since == SINCE[rule]


def test_only_a_verifier_that_looks_for_an_answer_can_miss_it():
    """A reward function of one's own has no part ``format``; truncated responses are no missed answers."""
    metrics = healthy()
    assert findings([{name: value for name, value in m.items() if name != "reward/format"} for m in metrics]) == []
    truncated = [m | {"completions/truncated_frac": 1.0, "reward/format": 0.0} for m in metrics]
    assert {f.rule for f in findings(truncated)} == {"truncation"}


def level(step: int) -> float:
    """The fraction of right responses of a task that is solved by step 20."""
    return min(0.95, 0.3 + 0.65 * step / 20)


def test_a_kl_that_grows_on_after_the_task_is_solved_is_no_runaway():
    """Linear from 0, it is 1.67 times as large in the last third as in the middle, where the reward stands still."""
    noise = random.Random(3)
    solved = []
    for m in healthy():
        right = level(m["step"]) + noise.gauss(0, 0.01)
        solved.append(m | {"kl/sequence": 0.2 * m["step"], "reward/mean": right, "reward/correct": right})
    assert findings(solved) == []


def test_a_kl_that_falls_is_no_runaway():
    """Distillation: the policy begins far from its teacher and comes nearer; the reward is only measured."""
    noise = random.Random(4)
    nearer = []
    for m in healthy():
        right = 0.5 + noise.gauss(0, 0.01)
        distance = 3 + 20 * math.exp(-m["step"] / 15)
        nearer.append(m | {"kl/sequence": distance, "reward/mean": right, "reward/correct": right})
    assert {f.rule for f in findings(nearer)} == {"reward_flat"}
    farther = [m | {"kl/sequence": 26 - m["kl/sequence"]} for m in nearer]
    assert {f.rule for f in findings(farther)} == {"reward_flat", "kl_runaway"}


def test_every_rule_has_a_trial():
    assert [rule.name for rule in RULES] == list(FAULTS)


def test_a_finding_is_dated_by_the_first_step_of_its_last_stretch():
    fault = [m | {"completions/truncated_frac": 0.9 if m["step"] > 40 or m["step"] == 5 else 0.1} for m in healthy()]
    (found,) = findings(fault)
    assert found.rule == "truncation"
    assert 41 <= found.since <= 45


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_of_a_few_steps_is_judged_without_its_trends(steps):
    """In bf16: its difference of log-probs is above the bound that holds where there are no first steps."""
    assert findings([m | {"sampler/logprob_diff_mean": 0.03} for m in healthy()[:steps]]) == []


def test_the_program_reads_a_run_that_is_still_being_written(tmp_path, capsys, monkeypatch):
    """Exit code 0 without findings and 1 with one, a half-written line at the end included."""
    metrics = healthy()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"args": ARGS}))
    text = "\n".join(json.dumps(m) for m in metrics)
    (folder / "metrics.jsonl").write_text(text + '\n{"step": 61, "rew')
    monkeypatch.setattr("sys.argv", ["report.py", str(folder)])
    assert report.main() == 0
    text = capsys.readouterr().out
    assert f"{folder}: 60 steps\nverdict    none" in text
    assert "doctor     no finding by 12 rules" in text
    fault = [m | {"completions/truncated_frac": 0.9} for m in metrics]
    (folder / "metrics.jsonl").write_text("\n".join(json.dumps(m) for m in fault) + "\n")
    assert report.main() == 1
    assert "90% of the responses are truncated at 64 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "known", "warned"),
    [
        (None, {}, False),
        ('{"args": {"beta": 0.1}}', {"args": {"beta": 0.1}}, False),
        ('{"args": {"be', {}, True),
        ("[1]", {}, True),
        ('{"args": 1}', {}, True),
    ],
)
def test_a_run_whose_arguments_cannot_be_read_can_still_be_looked_at(tmp_path, capsys, text, known, warned):
    """A copy of metrics.jsonl alone, or a config.json that a full disk has spoiled."""
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert run_files.read_config(tmp_path) == known
    assert ("config.json is not a JSON object of a run; the arguments" in capsys.readouterr().err) == warned
    assert Case.of(tmp_path).args == known.get("args", {})


@pytest.mark.parametrize(
    ("args", "groups"),
    [
        ({"num_samples_per_prompt_rollout": 1}, False),
        ({"num_samples_per_prompt_rollout": 1, "disable_value": False}, False),
        ({"num_samples_per_prompt_rollout": 16, "disable_value": False}, False),  # a critic is the baseline
        ({"num_samples_per_prompt_rollout": 16, "disable_value": True}, True),
        ({}, True),
    ],
)
def test_groups_are_counted_where_there_are_groups(args, groups, tmp_path):
    """Doctor and verdict, of a run that learns while all its groups have equal rewards."""
    metrics = [m | {"reward/zero_std_frac": 1.0} for m in healthy()]
    case = Case({name: value for name, value in ARGS.items() if "num_samples" not in name} | args, metrics)
    found = {finding.rule: finding for finding in examine(case)}
    assert ("equal_groups" in found) == groups and case.has_groups() == groups
    (tmp_path / "config.json").write_text(json.dumps({"args": case.args}))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    judged = verdict.verdict(tmp_path, STEPS)
    assert ("groups_with_signal" in judged) == ("groups with signal" in verdict.in_words(judged)) == groups


def test_one_response_is_no_group_of_equal_rewards():
    """No metric and so no word of the step line; two equal ones are a group."""
    for rewards, fraction in (([[1.0], [0.0]], None), ([[1.0, 1.0], [0.0, 1.0]], 0.5)):
        samples = make_samples(2, len(rewards[0]))
        assert utils.sample_metrics(samples, torch.tensor(rewards), 1)["reward/zero_std_frac"] == fraction

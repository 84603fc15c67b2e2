"""--reward_control in whole runs: nothing of the reward is learned from.

A run with a control ends with the very weights of a run without one, whose verifier or truths are what the control
stands for. Both choose among samples by reward (--generation_size, --dynamic_sampling_rounds), as an advantage does.
"""

from __future__ import annotations

import hashlib
import importlib
import json

import pytest
from helpers import VERIFIERS, folder_of, run_here, tiny_args

import grpo
import rewards

PROBLEMS = 12
FLAGS = {
    "total_steps": 2,
    "eval_prompts": 0,
    "generation_size": 6,
    "dynamic_sampling_rounds": 1,
    "verifier": f"{VERIFIERS}:right_and_well_formed",
}
pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path):
    """Sums whose truths are of one to three digits, so that they can be told apart by the test's verifier."""
    rows = [{"question": f"{k} + {10 ** (k % 3)} = ?", "answer": str(10 ** (k % 3))} for k in range(PROBLEMS)]
    return written(tmp_path / "problems.jsonl", rows)


def written(file, rows):
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def with_other_truths(source, args, preflight):
    """The problems as a file in which each has the truth that --reward_control shuffled judges it by."""
    problems, *_ = preflight(args)
    others = rewards.other_problems(problems, args.seed)
    truths = {problem.row["question"]: others[id(problem)].truth for problem in problems}
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    changed = [row | {"answer": truths[row["question"]]} for row in rows]
    assert changed != rows
    return written(source.with_name("other_problems.jsonl"), changed)


def weights_after(args, script: str) -> str:
    run_here(args, script)
    digest = hashlib.sha256()
    for file in sorted((folder_of(args, script) / "model").glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def with_control(control: str, tiny, source, out, script: str) -> str:
    return weights_after(
        tiny_args(tiny, out / "control", script, dataset=str(source), reward_control=control, **FLAGS), script
    )


def with_its_stand_in(control: str, tiny, source, out, script: str) -> str:
    changes = {
        "format": {"verifier": f"{VERIFIERS}:only_well_formed"},
        "inverted": {"verifier": f"{VERIFIERS}:wrong"},
        "shuffled": {},
        "none": {},
    }[control]
    args = tiny_args(tiny, out / "stand_in", script, dataset=str(source), **FLAGS | changes)
    if control == "shuffled":
        args.dataset = str(with_other_truths(source, args, importlib.import_module(script).preflight))
    return weights_after(args, script)


@pytest.mark.parametrize("control", ["format", "inverted", "shuffled"])
@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_a_control_trains_as_its_stand_in_does(control, script, tiny, source, tmp_path):
    found = with_control(control, tiny, source, tmp_path, script)
    assert found == with_its_stand_in(control, tiny, source, tmp_path, script)
    assert found != with_its_stand_in("none", tiny, source, tmp_path / "plain", script)


def test_random_rewards_are_learned_from_as_they_are_dealt(tiny, source, tmp_path, monkeypatch):
    """The rewards of each batch are those that there were, and in some batch another sample has them."""
    learned, scores = [], []
    advantages, deal_out = grpo.group_advantages, rewards.deal_out

    def noted_advantages(rewards_PG, *more):
        learned.append(rewards_PG.flatten().tolist())
        return advantages(rewards_PG, *more)

    def noted_dealing(samples, args):
        scores.append([sample.score for sample in samples])
        deal_out(samples, args)

    monkeypatch.setattr(grpo, "group_advantages", noted_advantages)
    monkeypatch.setattr(rewards, "deal_out", noted_dealing)
    flags = FLAGS | {"generation_size": None, "dynamic_sampling_rounds": 0, "total_steps": 4}
    run_here(tiny_args(tiny, tmp_path, dataset=str(source), reward_control="random", **flags))
    assert len(learned) == 4 and any(len(set(batch)) > 1 for batch in scores)
    assert [sorted(batch) for batch in learned] == [sorted(batch) for batch in scores]
    assert learned != scores


def test_evaluations_do_not_see_a_control(tiny, source, tmp_path):
    """Before the first step every run has the same weights: with each control pass@1 is that of none."""
    found = []
    for control in ("none", "format", "inverted", "random", "shuffled"):
        flags = FLAGS | {"total_steps": 1, "eval_dataset": str(source), "eval_prompts": 4, "eval_samples": 4}
        args = tiny_args(tiny, tmp_path, dataset=str(source), reward_control=control, **flags)
        run_here(args)
        first = json.loads((folder_of(args) / "eval.jsonl").read_text().splitlines()[0])
        found.append({name: value for name, value in first.items() if name.startswith("eval/pass")})
    assert all(evaluation == found[0] for evaluation in found) and 0 < found[0]["eval/pass@1"] < 1

"""--reward_control in whole runs: nothing of the reward is learned from.

A run with a control ends with the very weights of a run without one, whose verifier is what the control stands for
(tests/unit/test_rewards.py has shuffled truths). Both choose among samples by reward (--generation_size,
--dynamic_sampling_rounds), as an advantage does.
"""

from __future__ import annotations

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
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def weights_after(args, script: str) -> bytes:
    run_here(args, script)
    return (folder_of(args, script) / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("control, verifier", [("format", "only_well_formed"), ("inverted", "wrong")])
@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_a_control_trains_as_its_stand_in_does(control, verifier, script, tiny, source, tmp_path):
    """And as no run without a control does."""
    flags = FLAGS | {"dataset": str(source)}
    found = weights_after(tiny_args(tiny, tmp_path / "control", script, reward_control=control, **flags), script)
    stand_in = flags | {"verifier": f"{VERIFIERS}:{verifier}"}
    assert found == weights_after(tiny_args(tiny, tmp_path / "stand_in", script, **stand_in), script)
    assert found != weights_after(tiny_args(tiny, tmp_path / "plain", script, **flags), script)


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

"""Length of a run, its warm-up, and the assignment of a batch to mini-batches."""

from __future__ import annotations

import json

import pytest
from helpers import folder_of, read_jsonl, run_here, tiny_args

import utils
from grpo import Args
from runtime.arguments import flags


def problems_file(folder, count: int) -> str:
    rows = [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(count)]
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_steps_by_steps_episodes_and_epochs():
    """All rounded down: 1000 samples are 15 steps of 64, three epochs over 100 problems 37 steps of 8 prompts."""
    assert flags.total_steps(Args(total_steps=7), 100) == 7
    assert flags.total_steps(Args(total_episodes=1000), 100) == 15
    assert flags.total_steps(Args(total_epochs=3), 100) == 37


@pytest.mark.integration
def test_an_epoch_draws_every_problem_once_and_the_run_is_then_finished(tiny, tmp_path, capsys):
    """8 problems after 4 held-out ones, 4 a step: two epochs are 4 steps, and three continue them with 2 more."""
    data = {"dataset": problems_file(tmp_path, 12), "log_samples": 16, "eval_prompts": 4}
    args = tiny_args(tiny, tmp_path, total_epochs=2, save_every=2, **data)
    assert len(run_here(args)) == 4
    prompts = [s["prompt"] for s in read_jsonl(folder_of(args) / "samples.jsonl")]
    assert len(set(prompts)) == 8
    assert all(prompts.count(p) == 2 * args.num_samples_per_prompt_rollout for p in prompts)
    with pytest.raises(SystemExit) as end:
        run_here(args)
    assert end.value.code == 0 and "is finished" in capsys.readouterr().out
    longer = tiny_args(tiny, tmp_path, total_epochs=3, save_every=2, **data)
    assert len(run_here(longer)) == 6
    assert "resuming after step 4" in capsys.readouterr().out


@pytest.mark.integration
def test_episodes_are_rounded_down(tiny, tmp_path):
    metrics = run_here(tiny_args(tiny, tmp_path, total_episodes=47, eval_prompts=0))
    assert [m["episode"] for m in metrics] == [16, 32]


@pytest.mark.integration
def test_the_warm_up_of_a_run_is_a_fraction_of_its_optimizer_steps(tiny, tmp_path):
    """2 steps of 2 optimizer steps: half of them warm up, by 1/3 and 2/3; the third has the peak."""
    changes = {"num_mini_batches": 2, "warmup_steps": 0.5, "lr_scheduler_type": "constant", "eval_prompts": 0}
    first, last = run_here(tiny_args(tiny, tmp_path, entropy_coef=1e-3, **changes))
    assert first["optim/lr"] == pytest.approx(3e-5 * 2 / 3, rel=1e-9)
    assert last["optim/lr"] == pytest.approx(3e-5, rel=1e-9)


def test_mini_batches_need_not_divide_the_prompts(tiny, tmp_path):
    """Three optimizer steps on four groups: one or two groups each, and every group in one of them."""
    (m,) = run_here(tiny_args(tiny, tmp_path, num_mini_batches=3, total_steps=1, entropy_coef=1e-3, eval_prompts=0))
    assert m["optim/steps"] == 3 and m["optim/skipped"] == 0
    for items in range(1, 20):
        for parts in range(1, items + 1):
            dealt = [utils.even_part(list(range(items)), part, parts) for part in range(parts)]
            assert sorted(x for part in dealt for x in part) == list(range(items))
            assert max(map(len, dealt)) - min(map(len, dealt)) <= 1

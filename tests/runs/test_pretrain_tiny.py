"""The test bed's texts, tokenizer and training; what runs on the finished model is in test_learning.py."""

from __future__ import annotations

import dataclasses
import random
import sys

import pretrain_tiny as tiny_bed
import pytest
import torch

SMALL = tiny_bed.Recipe(
    seed=1,
    threads=1,
    hidden=32,
    layers=1,
    heads=1,
    intermediate=32,
    problems=50,
    batch=16,
    rows=8,
    able_steps=2,
    careless_steps=2,
)


def rate(task, careless: bool, count: int = 1000) -> float:
    """The fraction of written answers that the task's verifier accepts."""
    draw = random.Random(0)
    rows = task.rows(count, seed=0)
    answers = [task.answer(row["question"], draw, careless) for row in rows]
    return sum(task.verifier(a, row["answer"], {}).score for a, row in zip(answers, rows, strict=True)) / count


@pytest.mark.parametrize("task", tiny_bed.TASKS, ids=lambda task: task.name)
def test_able_answers_are_right_and_careless_ones_mostly_wrong(task):
    assert rate(task, careless=False) == 1.0
    right = (1 - tiny_bed.GUESS) * (1 - tiny_bed.SLIP) * (1 - tiny_bed.HEDGE)
    assert rate(task, careless=True) == pytest.approx(right, abs=0.05)


def test_the_tokenizer_gives_back_every_text_and_the_template_the_prompt():
    """One token a byte, one for a task's sentence; a system message changes nothing."""
    tokenizer = tiny_bed.make_tokenizer()
    for text in ("4 - 1 = 3 or 2", "größe\n", tiny_bed.SENTENCES[1] + "sun"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    question = tiny_bed.SENTENCES[1] + "sun"
    user = {"role": "user", "content": question}
    for messages in ([user], [{"role": "system", "content": "Be careful."}, user]):
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert prompt == tiny_bed.rendered(question)
    assert len(tokenizer(prompt)["input_ids"]) == 1 + 1 + 3 + 1  # user, the sentence, s u n, assistant


@pytest.mark.integration
def test_one_seed_gives_one_model(tmp_path, monkeypatch):
    """Bit for bit; another seed gives another."""
    monkeypatch.setattr(tiny_bed, "JUDGED", 2)
    weights = []
    for number, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(number)
        tiny_bed.pretrain(dataclasses.replace(SMALL, seed=seed), folder)
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.integration
@pytest.mark.parametrize(("after", "saved"), [(3, 2), (5, 4), (8, 6)])
def test_an_interrupted_training_continues_and_makes_the_same_model(tmp_path, monkeypatch, capsys, after, saved):
    """Interrupted in each phase, at a save, between saves, and while it is judged: equal bit for bit.

    The second call takes only the steps after the last save, and prints an ETA with each of its lines but the first.
    """
    recipe = dataclasses.replace(SMALL, able_steps=4, careless_steps=3)
    monkeypatch.setattr(tiny_bed, "JUDGED", 2)
    monkeypatch.setattr(tiny_bed, "SAVE_EVERY", 2)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tiny_bed.pretrain(recipe, whole)
    moments = []  # optimizer steps and judgements
    step, judge = torch.optim.AdamW.step, tiny_bed.pass_at_1

    def counted(inner):
        def call(*arguments, **named):
            if len(moments) == after:
                raise KeyboardInterrupt
            moments.append(inner)
            return inner(*arguments, **named)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", counted(step))
        patch.setattr(tiny_bed, "pass_at_1", counted(judge))
        with pytest.raises(KeyboardInterrupt):
            tiny_bed.pretrain(recipe, parts)
    capsys.readouterr()
    again = []
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", lambda *a, **k: again.append(1) or step(*a, **k))
        tiny_bed.pretrain(recipe, parts)
    assert len(again) == 7 - saved
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    assert sorted(p.name for p in parts.iterdir()) == sorted(p.name for p in whole.iterdir())
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert ["ETA 0:0" in line for line in lines] == [False, *[True] * (len(lines) - 1)]


def test_ctrl_c_ends_with_a_line_that_names_the_way_on(tmp_path, monkeypatch, capsys):
    """It has the exit code of an interrupted run, and neither a traceback nor a finished model."""

    def interrupt(recipe, folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_bed, "pretrain", interrupt)
    monkeypatch.setattr(sys, "argv", ["pretrain_tiny.py", "--output", str(tmp_path / "bed")])
    with pytest.raises(SystemExit) as end:
        tiny_bed.main()
    assert end.value.code == 75
    said = capsys.readouterr().err.split("\n")
    assert said == ["", "interrupted: run the same command again to continue (saved every 25 steps)", ""]
    assert not (tmp_path / "bed").exists()


def test_the_progress_of_another_recipe_and_a_damaged_file_are_ignored(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_bed, "JUDGED", 2)
    progress = tiny_bed.Progress(tmp_path, tiny_bed.identity(SMALL))
    progress.save("able", 2, tiny_bed.make_model(SMALL, tiny_bed.make_tokenizer()))
    assert tiny_bed.Progress(tmp_path, tiny_bed.identity(SMALL)).steps("able") == 2
    assert tiny_bed.Progress(tmp_path, "another").state == {}
    progress.path.write_bytes(progress.path.read_bytes()[:1000])
    assert tiny_bed.Progress(tmp_path, tiny_bed.identity(SMALL)).state == {}

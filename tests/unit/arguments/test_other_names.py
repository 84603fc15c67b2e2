"""Other frameworks' names of flags are answered with ours, from one table, which docs/flags.md shows as well."""

from __future__ import annotations

import dataclasses
import re

import flags_page
import pytest

import grpo
import ppo
from runtime.arguments import flags, other_names

FIELDS = {f.name: f for script in (grpo, ppo) for f in dataclasses.fields(script.Args)}
ROWS = other_names.table()
FRAMEWORKS = {"verl", "TinyZero", "TRL", "open-instruct", "OpenRLHF", "AReaL"}


def names(row: other_names.OtherName) -> list[str]:
    """The names of a row; one that fits where it has a star."""
    return [name.replace("*", "x") for name in row.theirs.split(", ")]


def error_of(words: list[str], capsys) -> str:
    """The message with which a command line is rejected."""
    with pytest.raises(SystemExit) as end:
        flags.parse(grpo.Args, words=words)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_the_table_is_small_and_covers_each_framework():
    assert len(ROWS) <= 250
    assert {name for row in ROWS for name in re.split(r", | forks| \(open-r1\)", row.frameworks) if name} == FRAMEWORKS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.frameworks} {row.theirs.split(', ')[0]}")
def test_a_row_names_flags_that_exist_and_answers_its_names(row, capsys):
    """With dashes and a space, and with = as Hydra has it. A name that is a flag here is not answered."""
    assert row.ours or row.how
    named = {flag.removeprefix("no-") for flag in re.findall(r"--([\w-]+)", f"{row.ours} {row.how}")}
    assert named - FIELDS.keys() <= {"num_processes", "config_file", "run"}, "those of accelerate and evaluate.py"
    for name in names(row):
        if name in FIELDS:
            continue
        expected = f"{name} ({row.frameworks}) {f'is {row.ours} here' if row.ours else 'has no flag here'}"
        for words in ([f"--{name.replace('_', '-')}", "1"], [f"--{name}=1"], [f"+{name}=1"]):
            assert expected in error_of(words, capsys)


def test_a_name_has_one_answer_for_each_framework():
    for row in ROWS:
        for name in names(row):
            found = other_names.answers(name, [other for other in ROWS if other.frameworks == row.frameworks])
            assert len(found) == 1, found


def test_several_names_are_answered_together(capsys):
    words = "data.train_batch_size=64 actor_rollout_ref.rollout.n=8 --beta 0.1 --num-generations 4 --dry_run=False"
    lines = error_of([*words.split(), "--overwrite", "true", "--mine", "3"], capsys).splitlines()
    assert lines[0] == "error: these are not accepted here:"
    starts = [
        "--dry_run takes no value; pass --dry_run or --no-dry_run",
        "--overwrite takes no value; pass --overwrite or --no-overwrite",
        "data.train_batch_size (verl, TinyZero) is --num_unique_prompts_rollout here",
        "actor_rollout_ref.rollout.n (verl, TinyZero) is --num_samples_per_prompt_rollout here: ",
        "num_generations (TRL) is --num_samples_per_prompt_rollout here",
        "mine is no flag here, and docs/flags.md does not have it",
    ]
    assert [line.strip().startswith(start) for line, start in zip(lines[1:], starts, strict=True)] == [True] * 6


def test_a_name_with_two_meanings_has_two_answers_and_one_name_a_single_line(capsys):
    both = error_of(["--per_device_train_batch_size", "4"], capsys)
    assert "(TRL) is --num_unique_prompts_rollout here: " in both and "(open-instruct) has no flag here: " in both
    one = error_of(["data.train_batch_size=64"], capsys)
    assert one == "error: data.train_batch_size (verl, TinyZero) is --num_unique_prompts_rollout here\n"


@pytest.mark.parametrize(
    "script, name, says",
    [
        (grpo, "lr", "lr is --learning_rate here"),
        (grpo, "critic-learning-rate", "critic_learning_rate is a flag of ppo.py"),
        (ppo, "advantage_normalization_type", "advantage_normalization_type is --adv_norm here"),
        (ppo, "filter_zero_std_samples", "filter_zero_std_samples is a flag of grpo.py"),
    ],
)
def test_a_flag_of_the_other_script_is_no_other_frameworks(script, name, says, refused):
    fields = {f.name for f in dataclasses.fields(script.Args)}
    if name in fields:
        pytest.skip("both scripts have it")
    assert refused(flags.parse, script.Args, words=[f"--{name}", "1"]) == f"error: {says}\n"


def test_the_table_is_read_only_for_a_name_that_is_no_flag(monkeypatch, capsys):
    monkeypatch.setattr(other_names, "table", lambda: pytest.fail("the table was read"))
    flags.parse(grpo.Args, words=["--beta", "0.1", "--no-shuffle_mini_batches", "--preset", "verl"])
    assert "takes no value" in error_of(["--dry_run", "yes"], capsys)


def test_the_page_is_what_the_table_gives():
    assert flags_page.PAGE.read_text() == flags_page.page(), "run: python studies/flags_page.py"

"""examples/: each is loaded, checked and played as a run does it, and its rows are a data set."""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
from collections import Counter

import pytest
from episode_player import Player, arguments, observations, tokenizer_of
from helpers import ROOT

import grpo
from graders import reasoning_gym_tasks
from runtime.arguments import flags
from runtime.data import rendering
from runtime.data.samples import Problem
from runtime.environments import episodes


def play(tiny, name: str, row: dict, *turns: str, **more) -> episodes.Episode:
    file, _, cls = name.partition(":")
    one = Player(tiny, cls, environment=f"{ROOT / 'examples' / file}:{cls}", **more)
    episode = one.play(*turns, **row)
    one.episodes.close()
    return episode


def rows_of(name: str, *words: str) -> list[dict]:
    program = [sys.executable, ROOT / "examples" / name, *words]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


CALCULATIONS = {
    "a call, and an end": (("4 - 1 - 7 = 3 or so", "done"), ["-4"], 1.0),
    "the end may hold a number": (("4 - 1 - 7", "it is 5"), ["-4"], 1.0),
    "no call": (("-4",), [], 0.0),
    "a call for a different sum": (("4 - 1", "-4"), ["3"], 0.0),
    "the last value counts": (("2*3+1", "4-1-7", "."), ["7", "-4"], 1.0),
    "and no other": (("4-1-7", "2*3+1", "-4"), ["-4", "7"], 0.0),
    "calls until the turns are used up": (("1+1", "1+1", "4 - 1 - 7"), ["2", "2", "-4"], 0.0),
}


@pytest.mark.parametrize("name", CALCULATIONS)
def test_the_calculator_has_to_be_called(tiny, name):
    turns, said, reward = CALCULATIONS[name]
    episode = play(tiny, "calculator.py:Calculator", {"answer": "-4"}, *turns, max_turns=3)
    assert (observations(episode), episode.outcome) == (said, {"score": reward})


def test_the_calculator_s_rows_are_those_of_the_default_data(tiny):
    for row in reasoning_gym_tasks.gym_rows("chain_sum", {"size": 3, "seed": 1, "min_digits": 1, "max_digits": 1}):
        calculation = row["question"].rpartition(": ")[2].removesuffix(" =")
        played = play(tiny, "calculator.py:Calculator", row, calculation, "")
        assert observations(played) == [row["answer"]] and played.outcome == {"score": 1.0}


def digit_of(row: dict) -> int:
    """The digit to guess."""
    return random.Random(row["game"]).choice([int(digit) for digit in row["prompt"].split()])


def test_a_guess_is_answered_with_what_is_left_and_the_whole_history(tiny):
    row = next(row for row in rows_of("guess.py") if row["low"] == 2 and digit_of(row) == 3)
    assert row["prompt"] == "2 3 4 5"
    episode = play(tiny, "guess.py:Guess", row, "5 or 3", "none", "2", "it is 3", max_turns=4)
    assert observations(episode) == ["2 3 4 (5-)", "2 3 4 (5-)", "3 4 (5- 2+)"]
    assert episode.outcome == {"score": 1.0}
    assert play(tiny, "guess.py:Guess", row, "4", "4", "2", max_turns=3).outcome == {"score": 0.0}
    assert play(tiny, "guess.py:Guess", row, "3").outcome == {"score": 1.0}
    beyond = play(tiny, "guess.py:Guess", row, "17", "0", "4", max_turns=3)
    assert observations(beyond) == ["2 3 4 5 (17-)", "2 3 4 5 (17- 0+)", "2 3 (17- 0+ 4-)"]


def test_no_digit_is_a_better_first_guess_than_the_others_of_its_prompt():
    rows = rows_of("guess.py")
    assert len(rows) == 600 and len({row["prompt"] for row in rows}) == 7
    places = Counter(digit_of(row) - row["low"] for row in rows)
    assert sorted(places) == list(range(4)) and min(places.values()) > 120 and max(places.values()) < 180
    assert min(Counter(row["low"] for row in rows).values()) > 60


@pytest.mark.parametrize("name", ["calculator", "guess"])
def test_the_command_that_learns_stands_in_the_file_and_on_the_page(name):
    """Word by word. The page's commands are parsed in test_pages.py, those of the other files here."""
    joined = re.sub(r"\\\n\s+", " ", (ROOT / "docs" / "environments.md").read_text())
    text = ast.get_docstring(ast.parse((ROOT / "examples" / f"{name}.py").read_text()))
    lines = [" ".join(line.split()) for line in re.sub(r"\\\n", " ", text).splitlines()]
    lines = [line for line in lines if line.startswith("python ")]
    assert set(lines[-2:]) - {" ".join(line.split()) for line in joined.splitlines()} == set()
    for line in lines:
        if line.startswith("python grpo.py"):
            assert flags.parse(grpo.Args, words=line.split()[2:]).environment.startswith(f"examples/{name}.py:")


@pytest.mark.parametrize("name", ["calculator.py:Calculator", "guess.py:Guess"])
def test_each_passes_the_checks_before_a_run(tiny, name):
    file, _, cls = name.partition(":")
    args = arguments(tiny, cls, environment=f"{ROOT / 'examples' / file}:{cls}")
    problem = Problem([{"role": "user", "content": "u"}], "1", "environment", {"answer": "1", "game": 1, "low": 0})
    episodes.check(args)
    episodes.first_turns([problem], tokenizer_of(tiny), args)
    (problem,) = rendering.render_prompts([problem], tokenizer_of(tiny), args)
    assert problem.messages == [{"role": "user", "content": "u"}]

"""examples/: each is loaded, checked and played as a run does it, and its rows are a data set."""

from __future__ import annotations

import ast
import re

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


def test_the_command_that_learns_stands_in_the_file_and_on_the_page():
    """Word by word. The page's commands are parsed in test_pages.py, those of the file here."""
    joined = re.sub(r"\\\n\s+", " ", (ROOT / "docs" / "environments.md").read_text())
    text = ast.get_docstring(ast.parse((ROOT / "examples" / "calculator.py").read_text()))
    lines = [" ".join(line.split()) for line in re.sub(r"\\\n", " ", text).splitlines()]
    (line,) = [line for line in lines if line.startswith("python grpo.py")]
    assert line in {" ".join(line.split()) for line in joined.splitlines()}
    assert flags.parse(grpo.Args, words=line.split()[2:]).environment.startswith("examples/calculator.py:")


def test_it_passes_the_checks_before_a_run(tiny):
    args = arguments(tiny, "Calculator", environment=f"{ROOT / 'examples' / 'calculator.py'}:Calculator")
    problem = Problem([{"role": "user", "content": "u"}], "1", "environment", {"answer": "1"})
    episodes.check(args)
    episodes.first_turns([problem], tokenizer_of(tiny), args)
    (problem,) = rendering.render_prompts([problem], tokenizer_of(tiny), args)
    assert problem.messages == [{"role": "user", "content": "u"}]

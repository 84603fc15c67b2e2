"""examples/: each is loaded, rehearsed and played as a run does it, and its rows are a data set."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from helpers import ROOT
from test_episodes import Player, arguments, observations, tokenizer_of

from runtime import data, episodes, gym_tasks
from runtime.records import Problem


def play(tiny, name: str, row: dict, *turns: str, **more) -> episodes.Episode:
    file, _, cls = name.partition(":")
    one = Player(tiny, cls, environment=f"{ROOT / 'examples' / file}:{cls}", **more)
    episode = one.play(*turns, **row)
    one.episodes.close()
    return episode


def rows_of(name: str) -> list[dict]:
    done = subprocess.run([sys.executable, ROOT / "examples" / name], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


CALCULATIONS = {
    "a call, then its result": (("4 - 1 - 7 = 3 or so", "-4"), ["-4"], 1.0),
    "no call": (("-4",), [], 0.0),
    "a call, then another answer": (("4 - 1 - 7", "4"), ["-4"], 0.0),
    "two calls": (("2*3+1", "4-1-7", "it is -4"), ["7", "-4"], 1.0),
    "calls until the turns are used up": (("1+1", "1+1", "4 - 1 - 7"), ["2", "2", "-4"], 0.0),
}


@pytest.mark.parametrize("name", CALCULATIONS)
def test_the_calculator_has_to_be_called(tiny, name):
    turns, said, reward = CALCULATIONS[name]
    episode = play(tiny, "calculator.py:Calculator", {"answer": "-4"}, *turns, max_turns=3)
    assert (observations(episode), episode.outcome) == (said, {"score": reward})


def test_the_calculator_s_rows_are_those_of_the_default_data(tiny):
    for row in gym_tasks.gym_rows("chain_sum", {"size": 3, "seed": 1, "min_digits": 1, "max_digits": 1}):
        calculation = row["question"].rpartition(": ")[2].removesuffix(" =")
        played = play(tiny, "calculator.py:Calculator", row, calculation, row["answer"])
        assert observations(played) == [row["answer"]] and played.outcome == {"score": 1.0}


def test_a_guess_is_answered_with_the_whole_history(tiny):
    rows = rows_of("guess.py")
    assert len(rows) == 400
    episode = play(tiny, "guess.py:Guess", rows[3], "0", "none", "9", "4", max_turns=4)
    assert observations(episode)[2] == "0+ ? 9-" or episode.outcome["score"] > 0
    digit = next(d for d in range(10) if play(tiny, "guess.py:Guess", rows[3], str(d)).outcome)
    assert play(tiny, "guess.py:Guess", rows[3], str(digit)).outcome == {"score": 1.0}
    wrong = str((digit + 1) % 10)
    assert play(tiny, "guess.py:Guess", rows[3], wrong, wrong, str(digit)).outcome == {"score": 0.5}
    assert play(tiny, "guess.py:Guess", rows[3], *[wrong] * 4, max_turns=4).outcome == {"score": 0.0}


def test_an_answer_counts_where_a_search_has_shown_it(tiny):
    rows = rows_of("search.py")
    assert len(rows) == 80 and len({row["prompt"] for row in rows}) == 80
    row = next(r for r in rows if "mill of Oslo" in r["prompt"])
    found = play(tiny, "search.py:Search", row, "Oslo mill", row["answer"])
    assert observations(found)[0].startswith(f"The mill of Oslo has {row['answer']} steps.\n")
    assert found.outcome == {"score": 1.0}
    assert play(tiny, "search.py:Search", row, row["answer"]).outcome == {"score": 0.0}
    assert play(tiny, "search.py:Search", row, "Oslo mill", "7").outcome == {"score": 0.5}
    assert observations(play(tiny, "search.py:Search", row, "the of", "1")) == ["Nothing found."]


@pytest.mark.parametrize("name", ["calculator.py:Calculator", "guess.py:Guess", "search.py:Search"])
def test_each_is_rehearsed_before_a_run(tiny, name):
    file, _, cls = name.partition(":")
    args = arguments(tiny, cls, environment=f"{ROOT / 'examples' / file}:{cls}")
    problem = Problem([{"role": "user", "content": "u"}], "1", "environment", {"answer": "1", "game": 1})
    episodes.check(args)
    episodes.first_turns([problem], tokenizer_of(tiny), args)
    (problem,) = data.render_prompts([problem], tokenizer_of(tiny), args)
    assert problem.messages == [{"role": "user", "content": "u"}]
    args = dataclasses.replace(args, dry_run=True)
    lines = episodes.describe_turns(problem, tokenizer_of(tiny), args)
    assert "at most 20, a game, a reward of its own" in lines[0] and "tokens count" in lines[-1]

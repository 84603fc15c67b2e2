"""A verifier and a game of tests/random_runs.py whose scores follow exactly from the text of a response."""

from __future__ import annotations

import itertools
import random

from rewards import Reward


def score(response: str) -> float:
    """The score of a response of one turn: 0, 1/4, 1/2, 3/4 or 1, by its length."""
    return len(response) % 5 / 4


def letters(response: str, truth: str, row: dict) -> Reward:
    """The verifier: ``score``, and a part ``format`` that is 1 for an odd number of characters."""
    return Reward(score(response), {"format": float(len(response) % 2)})


class Game:
    """A game that pays for each turn and at its end. One turn in four raises."""

    def reset(self, **row) -> str:
        self.number = random.randrange(8)
        self.said: list[str] = []
        return f" Number {self.number}."

    def turn(self, text: str) -> str:
        self.said.append(text)
        if len(text) % 4 == 0:
            raise ConnectionError(f"no such host as {len(text)}")
        return f"{len(text)} characters."

    def get_turn_reward(self) -> float:
        return turn_reward(self.said[-1], self.number)

    def get_reward(self) -> Reward:
        return Reward(self.number / 8, {"format": float(len(self.said) % 2)})


def turn_reward(text: str, number: int) -> float:
    """The reward of a turn of the game."""
    return (len(text) + number) % 4 / 4


def game_score(prompt: str, turns: list[dict]) -> tuple[float, float]:
    """(score, part format) of an episode of ``Game``, from its prompt and its turns alone."""
    number = int(prompt.rpartition("Number ")[2].partition(".")[0])
    said = []
    for turn, after in itertools.pairwise(turns):
        if turn["role"] == "assistant" and after["role"] != "assistant":
            said.append(turn["text"])
    return number / 8 + sum(turn_reward(text, number) for text in said), float(len(said) % 2)

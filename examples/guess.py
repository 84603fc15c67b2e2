"""Guess a digit: each answer repeats the history, so that the model need not remember it.

    python examples/guess.py > guess.jsonl
    python grpo.py --environment examples/guess.py:Guess --max_turns 4 --max_response_length 96 \\
        --dataset guess.jsonl --prompt_key prompt --eval_prompts 0

A good player halves what is left and needs 2.9 guesses on average; the reward is 1 less a quarter for each guess that
was wrong. For a model that knows no English: python examples/guess.py "0 1 2 3 4 5 6 7 8 9" > guess.jsonl
"""

from __future__ import annotations

import json
import random
import re
import sys


class Guess:
    """Guess a digit within four guesses."""

    def reset(self, game, **row):
        self.number = random.Random(game).randrange(10)
        self.history = []
        self.found = False

    def turn(self, text):
        digits = re.findall(r"\d", text)
        guess = int(digits[-1]) if digits else None
        self.found = guess == self.number
        if self.found:
            return None
        sign = "?" if guess is None else "+" if guess < self.number else "-"
        self.history.append(f"{'' if guess is None else guess}{sign}")
        return " ".join(self.history)

    def get_reward(self):
        return 1 - len(self.history) / 4 if self.found else 0.0


RULES = "Guess a digit. You are told all your guesses, with + where it is higher and - where it is lower."

if __name__ == "__main__":
    prompt = sys.argv[1] if len(sys.argv) > 1 else RULES
    for game in range(400):
        print(json.dumps({"prompt": prompt, "answer": "", "game": game}))

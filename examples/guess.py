"""Guess a digit of four: each answer shows what is left and repeats the history, so the model need not remember it.

    python examples/guess.py > guess.jsonl
    python grpo.py --environment examples/guess.py:Guess --max_turns 3 --max_response_length 80 \\
        --dataset guess.jsonl --prompt_key prompt \\
        --num_unique_prompts_rollout 16 --no-mask_truncated_completions \\
        --model_name_or_path models/testbed-1 --dtype float32 --learning_rate 3e-4 --total_steps 40

The prompt lists the digits ("3 4 5 6"), and the first number of a turn is the guess. A wrong one is answered with the
digits left, and all guesses so far, + where the digit is higher ("4 5 (3+ 6-)"). Halving them takes three turns.
"""

from __future__ import annotations

import json
import random
import re


class Guess:
    """Reward 1: a guess was right. The row's columns "low" and "game" choose the digits, and the one of them."""

    def reset(self, low, game, **row):
        self.left = range(low, low + 4)
        self.digit = random.Random(game).choice(self.left)
        self.history = []
        self.found = False

    def turn(self, text):
        number = re.search(r"\d+", text)
        if number:
            guess = int(number[0])
            self.found = guess == self.digit
            self.history.append(f"{guess}{'+' if guess < self.digit else '-'}")
            self.left = [n for n in self.left if (n < guess) == (self.digit < guess) and n != guess]
        if self.found:
            return None
        return f"{listed(self.left)} ({' '.join(self.history)})"

    def get_reward(self):
        return float(self.found)


def listed(digits) -> str:
    return " ".join(map(str, digits))


if __name__ == "__main__":
    for game in range(600):
        low = random.Random(f"low {game}").randrange(7)
        print(json.dumps({"prompt": listed(range(low, low + 4)), "answer": "", "game": game, "low": low}))

"""Search in a small corpus: what the model is asked stands there alone, so it has to search before it answers.

    python examples/search.py > search.jsonl
    python grpo.py --environment examples/search.py:Search --max_turns 3 --max_response_length 160 \\
        --dataset search.jsonl --prompt_key prompt

A turn with a number is the answer. Any other is a query, and is answered with the lines that have a word of it. The
test bed knows no English, only how to spell backward, and never reads a number after words. It learns to find the line:

    python examples/search.py backward > search.jsonl
    python grpo.py --environment examples/search.py:Find --max_turns 2 --max_response_length 48 \\
        --dataset search.jsonl --prompt_key prompt --no-mask_truncated_completions \\
        --model_name_or_path models/testbed-1 --dtype float32 --learning_rate 5e-4 --total_steps 30
"""

from __future__ import annotations

import json
import random
import re
import sys

FIRST = ("Ar", "Ber", "Co", "Del", "Fa", "Gri", "Hul", "Je", "Ka", "Lu", "Me", "Nor", "Os", "Pi", "Ro", "Va")
TOWNS = [first + second for first in FIRST for second in ("da", "les", "mo", "na", "sk", "ton", "vik", "ra")]
STEPS = dict(zip(TOWNS, random.Random(7).sample(range(100, 1000), len(TOWNS)), strict=True))


class Find:
    """Reward 1: one of the queries has found the line that answers the question."""

    def reset(self, answer, **row):
        self.truth = answer
        self.found = False

    def turn(self, text):
        lines = self.lines_of(text)
        return None if self.found else lines

    def lines_of(self, query):
        words = set(re.findall(r"[a-z]+", query.lower()))
        lines = [f"The tower of {town} has {n} steps." for town, n in STEPS.items() if town.lower() in words][:2]
        self.found = self.found or any(self.truth in line for line in lines)
        return "\n".join(lines) or "Nothing found."

    def get_reward(self):
        return float(self.found)


class Search(Find):
    """Reward 0.5: the same; 1: and after it the number was answered."""

    right = False

    def turn(self, text):
        numbers = re.findall(r"\d+", text)
        self.right = numbers[-1:] == [self.truth]
        return None if numbers else self.lines_of(text)

    def get_reward(self):
        return self.found * (0.5 + 0.5 * self.right)


if __name__ == "__main__":
    for town, steps in STEPS.items():
        question = f"How many steps has the tower of {town}? Write words to search; then write the number alone."
        if sys.argv[1:] == ["backward"]:
            question = f"Spell this word backward (example: sun -> nus): {town[::-1].lower()}"
        print(json.dumps({"prompt": question, "answer": str(steps)}))

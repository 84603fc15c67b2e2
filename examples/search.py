"""Search in a small corpus: what the model is asked stands there alone, so it has to search before it answers.

    python examples/search.py > search.jsonl
    python grpo.py --environment examples/search.py:Search --max_turns 3 --max_response_length 160 \\
        --dataset search.jsonl --prompt_key prompt --eval_prompts 0

A turn with a number is the answer. Any other is a query, and is answered with the lines that hold most of its words.
For a model that only spells words backward, as the test bed: python examples/search.py backward > search.jsonl
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter

PLACES = (
    *("Arles", "Bern", "Cork", "Delft", "Essex", "Faro", "Ghent", "Hull", "Ivrea", "Jena"),
    *("Kiel", "Lund", "Metz", "Nice", "Oslo", "Pisa", "Riga", "Split", "Turin", "Ulm"),
)
THINGS = ("bridge", "tower", "mill", "gate")
draw = random.Random(7)
CORPUS = [f"The {thing} of {place} has {draw.randrange(10, 100)} steps." for place in PLACES for thing in THINGS]


class Search:
    """Reward 0.5: a search has shown the answer; 1: and it was given then."""

    def reset(self, answer, **row):
        self.truth = answer
        self.seen = []
        self.right = False

    def turn(self, text):
        numbers = re.findall(r"\d+", text)
        if numbers:
            self.right = numbers[-1] == self.truth
            return None
        found = best(text)
        self.seen += found
        return "\n".join(found) or "Nothing found."

    def get_reward(self):
        shown = any(f" {self.truth} " in line for line in self.seen)
        return shown * (0.5 + 0.5 * self.right)


def best(query: str, count: int = 2) -> list[str]:
    """The lines that hold most of the query's words, at least one of them that is rare."""
    words = set(re.findall(r"[A-Za-z]+", query.lower()))
    scores = Counter()
    for line in CORPUS:
        shared = words & set(re.findall(r"[a-z]+", line.lower())) - {"the", "of", "has", "steps"}
        scores[line] = len(shared)
    return [line for line, score in scores.most_common(count) if score > 0]


if __name__ == "__main__":
    backward = sys.argv[1:] == ["backward"]
    for line in CORPUS[:: len(THINGS)] if backward else CORPUS:
        thing, place, steps = re.match(r"The (\w+) of (\w+) has (\d+) steps", line).groups()
        question = f"How many steps has the {thing} of {place}? Write words to search; then write the number alone."
        if backward:
            question = f"Spell this word backward (example: sun -> nus): {place[::-1].lower()}"
        print(json.dumps({"prompt": question, "answer": steps}))

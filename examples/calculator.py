"""A calculator that the model has to call: only what the calculator has said counts, not what the model works out.

    make testbed
    python grpo.py --environment examples/calculator.py:Calculator --max_turns 2 \\
        --model_name_or_path models/testbed-1 --dtype float32 --learning_rate 5e-4 --total_steps 20

A turn with an expression ("4 - 7") is a call, and is answered with its value. Any other ends the episode, and hands in
the last value. The rows are those of reasoning-gym's chain_sum, the default data. The test bed is a small model that
guesses in every third answer; it learns to write the sum out, and to stop after its value.
"""

from __future__ import annotations

import re

EXPRESSION = re.compile(r"-?\d+(?:\s*[-+*]\s*\d+)+")


class Calculator:
    """Reward 1: what was handed in is the answer."""

    def reset(self, answer, **row):
        self.truth = int(answer)
        self.value = None
        self.handed_in = False

    def turn(self, text):
        found = EXPRESSION.search(text)
        if found:
            self.value = value(found[0])
            return str(self.value)
        self.handed_in = True
        return None

    def get_reward(self):
        return float(self.handed_in and self.value == self.truth)


def value(expression: str) -> int:
    """Compute an expression such as "4 - 1 * 7": products first, then sums from left to right."""
    total = 0
    for sign, product in re.findall(r"([-+]?)\s*(\d+(?:\s*\*\s*\d+)*)", expression):
        number = 1
        for factor in re.findall(r"\d+", product):
            number *= int(factor)
        total += -number if sign == "-" else number
    return total

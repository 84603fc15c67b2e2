"""A calculator that the model has to call: sums, whose answers count only after one.

    python grpo.py --environment examples/calculator.py:Calculator --max_turns 3 --max_response_length 96 \\
        --system_prompt "Write an expression to have it calculated. Then write the result alone."

A turn with an expression ("4 - 1 - 7") is a call, and is answered with its value; anything else is the answer. The rows
are those of reasoning-gym's chain_sum, the default data.
"""

from __future__ import annotations

import re

EXPRESSION = re.compile(r"-?\d+(?:\s*[-+*]\s*\d+)+")


class Calculator:
    """Reward 1: the last number of the answer is right, and the calculator was called."""

    def reset(self, answer, **row):
        self.truth = int(answer)
        self.calls = 0
        self.right = False

    def turn(self, text):
        found = EXPRESSION.search(text)
        if found:
            self.calls += 1
            return str(value(found[0]))
        numbers = re.findall(r"-?\d+", text)
        self.right = bool(numbers) and int(numbers[-1]) == self.truth
        return None

    def get_reward(self):
        return float(self.right and self.calls > 0)


def value(expression: str) -> int:
    """The value of "4 - 1 * 7": products first, then from left to right."""
    total = 0
    for sign, product in re.findall(r"([-+]?)\s*(\d+(?:\s*\*\s*\d+)*)", expression):
        number = 1
        for factor in re.findall(r"\d+", product):
            number *= int(factor)
        total += -number if sign == "-" else number
    return total

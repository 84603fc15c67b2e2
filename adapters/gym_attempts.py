"""Tasks of reasoning-gym with several attempts: --environment adapters/gym_attempts.py:Attempts.

Each row names a task, what its generator is given, and how many attempts there are: {"prompt": "", "task": "countdown",
"options": {"seed": 3, "size": 1}, "attempts": 3}. After each the task says its score; the reward is the last one.
"""

from __future__ import annotations

import re

from elsewhere import Remote, serve


class Task:
    """In the other Python: one problem."""

    def reset(self, row: dict) -> str:
        """Draw it."""
        self.data = reasoning_gym.create_dataset(row["task"], **row["options"])
        self.problem = self.data[row.get("index", 0)]
        self.left = row.get("attempts", 3)
        self.score = 0.0
        return f"{self.problem['question']}\nYou have {self.left} attempts; give each as <answer>...</answer>."

    def turn(self, text: str) -> str | None:
        """Score an attempt."""
        given = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        answer = given[-1].strip() if given else text.strip()
        self.score = float(self.data.score_answer(answer=answer, entry=self.problem))
        self.left -= 1
        if self.score >= 1 or self.left == 0:
            return None
        return f"Score {self.score:g} of 1. Attempts left: {self.left}."

    def get_reward(self) -> float:
        """Return the score of the last attempt."""
        return self.score


def load() -> None:
    global reasoning_gym
    import reasoning_gym


if __name__ == "__main__":
    serve(load, Task)
else:

    class Attempts(Remote, file=__file__, variable="REASONING_GYM_PYTHON", needs="reasoning-gym==0.1.25"):
        """Here."""

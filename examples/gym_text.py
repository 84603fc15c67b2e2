"""Gymnasium's text worlds, after ``pip install gymnasium==1.4.0``: --environment examples/gym_text.py:GymText.

Each row names one and its seed: {"prompt": "", "id": "FrozenLake-v1", "seed": 3}, with what make() shall be given as
"options". The model says an action as a word. The world's rewards are those of turns; they add up to the reward.
"""

from __future__ import annotations

import re

import gymnasium

WORDS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}


class GymText:
    """One world."""

    def reset(self, id, seed, options=None, **row) -> str:
        """Begin."""
        self.words = next((words for name, words in WORDS.items() if id.startswith(name)), ())
        if not self.words:
            raise ValueError(f"only {', '.join(WORDS)} have words; add those of {id} to WORDS")
        mode = None if id.startswith("Blackjack") else "ansi"
        self.world = gymnasium.make(id, render_mode=mode, **(options or {}))
        state, _ = self.world.reset(seed=seed)
        self.reward = 0.0
        return f"{self._shown(state)}\nSay one word: {', '.join(self.words)}."

    def _shown(self, state) -> str:
        """Return the world as text, with signs for colors: [ ] around the agent, ( ) a passenger, { } a destination."""
        if self.world.render_mode is None:
            return ", ".join(map(str, state))
        text = self.world.render()
        for color, signs in ((r"4\d", r"[\1]"), ("34;1", r"(\1)"), ("35", r"{\1}")):
            text = re.sub(rf"\x1b\[{color}m(.*?)\x1b\[0m", signs, text)
        return re.sub(r"\x1b\[[0-9;]*m", "", text).strip()

    def turn(self, text: str) -> str | None:
        """Do the last action that is named."""
        self.reward = 0.0
        named = re.findall(rf"\b({'|'.join(self.words)})\b", text.lower())
        if not named:
            return f"Say one word: {', '.join(self.words)}."
        state, reward, terminated, truncated, _ = self.world.step(self.words.index(named[-1]))
        self.reward = float(reward)
        return None if terminated or truncated else self._shown(state)

    def get_turn_reward(self) -> float:
        """Return the reward of the last action."""
        return self.reward

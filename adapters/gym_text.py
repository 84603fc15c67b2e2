"""Gymnasium's text worlds: --environment adapters/gym_text.py:GymText.

Each row names one and its seed: {"prompt": "", "id": "FrozenLake-v1", "seed": 3}, with what make() shall be given as
"options". The model says an action as a word. The world's rewards are those of turns; they add up to the reward.
"""

from __future__ import annotations

import re

from elsewhere import Remote, serve

WORDS = {
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}


class World:
    """In the other Python: one world."""

    def reset(self, row: dict) -> str:
        """Begin."""
        self.words = next(words for name, words in WORDS.items() if row["id"].startswith(name))
        mode = None if row["id"].startswith("Blackjack") else "ansi"
        self.world = gymnasium.make(row["id"], render_mode=mode, **row.get("options", {}))
        state, _ = self.world.reset(seed=row["seed"])
        self.reward = 0.0
        return f"{self.shown(state)}\nSay one word: {', '.join(self.words)}."

    def shown(self, state) -> str:
        """Return the world as text, with signs for colors: [ ] around the agent, ( ) a passenger, { } a destination."""
        if self.world.render_mode is None:
            return ", ".join(map(str, state))
        text = self.world.render()
        for colour, signs in ((r"4\d", r"[\1]"), ("34;1", r"(\1)"), ("35", r"{\1}")):
            text = re.sub(rf"\x1b\[{colour}m(.*?)\x1b\[0m", signs, text)
        return re.sub(r"\x1b\[[0-9;]*m", "", text).strip()

    def turn(self, text: str) -> str | None:
        """Do the last action that is named."""
        self.reward = 0.0
        named = re.findall(rf"\b({'|'.join(self.words)})\b", text.lower())
        if not named:
            return f"Say one word: {', '.join(self.words)}."
        state, reward, terminated, truncated, _ = self.world.step(self.words.index(named[-1]))
        self.reward = float(reward)
        return None if terminated or truncated else self.shown(state)

    def get_turn_reward(self) -> float:
        """Return the reward of the last action."""
        return self.reward


def load() -> None:
    global gymnasium
    import gymnasium


if __name__ == "__main__":
    serve(load, World)
else:

    class GymText(Remote, file=__file__, variable="GYMNASIUM_PYTHON", needs="gymnasium==1.4.0"):
        """Here."""

        get_reward = None

        def get_turn_reward(self) -> float:
            """Return the reward of the last action."""
            return self._ask("get_turn_reward")

"""Games of TextArena for one player: --environment adapters/text_arena.py:TextArena.

Each row names a game and its seed: {"prompt": "", "game": "GuessTheNumber-v0-raw", "seed": 3}. Take ids that end in
-raw: the others repeat the whole conversation in every observation. The reward is the game's.
"""

from __future__ import annotations

import random

from elsewhere import Remote, serve


class Game:
    """In the other Python: one game."""

    def reset(self, row: dict) -> str:
        """Begin. Some games draw before they are given their seed."""
        random.seed(row["seed"])
        self.game = textarena.make(row["game"])
        self.game.reset(num_players=1, seed=row["seed"])
        return self.said()

    def said(self) -> str:
        """Return the game's messages since the last move."""
        _, observed = self.game.get_observation()
        if isinstance(observed, str):
            return observed
        return "\n".join(str(text) for sender, text, _ in observed if sender == textarena.GAME_ID)

    def turn(self, text: str) -> str | None:
        """Make a move."""
        done, _ = self.game.step(text)
        return None if done else self.said()

    def get_reward(self) -> float:
        """Return the player's reward, or 0 for a game that is not over."""
        rewards, _ = self.game.close()
        return float(rewards[0]) if rewards else 0.0


def load() -> None:
    global textarena
    import textarena


if __name__ == "__main__":
    serve(load, Game)
else:

    class TextArena(Remote, file=__file__, variable="TEXTARENA_PYTHON", needs="textarena==0.7.4"):
        """Here."""

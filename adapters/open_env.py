"""A client of OpenEnv: --environment adapters/open_env.py:OpenEnv.

Each row names a server and the field of its action that takes the model's text: {"prompt": "", "url":
"http://localhost:8000", "field": "message", "reset": {}}. The observation is the server's, as JSON. Its rewards are
those of turns; they add up to the reward.
"""

from __future__ import annotations

import json

from elsewhere import Remote, serve


class Client:
    """In the other Python: a session with a server."""

    def reset(self, row: dict) -> str:
        """Begin."""
        self.field = row["field"]
        self.client = GenericEnvClient(base_url=row["url"]).sync()
        self.client.connect()
        self.reward = 0.0
        return json.dumps(self.client.reset(**row.get("reset", {})).observation)

    def turn(self, text: str) -> str | None:
        """Take a step."""
        self.reward = 0.0
        found = self.client.step({self.field: text})
        self.reward = float(found.reward or 0.0)
        return None if found.done else json.dumps(found.observation)

    def get_turn_reward(self) -> float:
        """Return the reward of the last step."""
        return self.reward


def load() -> None:
    global GenericEnvClient
    from openenv.core.generic_client import GenericEnvClient


if __name__ == "__main__":
    serve(load, Client)
else:

    class OpenEnv(Remote, file=__file__, variable="OPENENV_PYTHON", needs="openenv-core==0.3.0"):
        """Here."""

        get_reward = None

        def get_turn_reward(self) -> float:
            """Return the reward of the last step."""
            return self._ask("get_turn_reward")

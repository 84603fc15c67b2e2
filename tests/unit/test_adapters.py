"""adapters/elsewhere.py against a Python of our own: what both sides tell each other, and that nothing is left over."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from episode_player import Player, arguments, observations
from helpers import ROOT, alive, descendants

from runtime.environments import episodes

FOLDER = ROOT / "adapters"
OWN = '''
import os, random, sys, time
from elsewhere import Remote, serve

class Other:
    """In the other Python."""

    def reset(self, row):
        self.row, self.said = row, []
        return f" {os.getpid()}" if row.get("who") else None

    def turn(self, text):
        if text == "hang":
            while True:
                pass
        if text == "leave":
            os._exit(3)
        if text == "raise":
            raise KeyError("no such thing")
        self.said.append(text)
        return None if text == "end" else f"{self.row['answer']} {self.said} {library.__name__} é"

    def get_reward(self):
        return len(self.said) / 2

def load():
    global library
    import decimal as library
    if os.environ.get("OWN_BREAKS"):
        raise ImportError("not in this Python")

if __name__ == "__main__":
    serve(load, Other)
else:
    class Own(Remote, file=__file__, variable="OWN_PYTHON", needs="own==1.0"):
        """Here."""
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    shutil.copy(FOLDER / "elsewhere.py", tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setenv("OWN_PYTHON", sys.executable)
    return f"{tmp_path / 'own.py'}:Own"


@pytest.fixture
def player(tiny, file):
    made = Player(tiny, "Own", environment=file, call_timeout=30.0)
    yield made
    made.episodes.close()


def in_the_other_python(player) -> list[int]:
    """Processes that run the adapter's file."""
    file = player.args.environment.partition(":")[0]
    found = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            found += [pid] * (file in words[1:2] and alive(pid))
    return found


def test_an_episode_is_played_in_the_other_python(player):
    episode = player.play("a", "raise", "end")
    assert observations(episode) == ["4 ['a'] decimal é", "error: RuntimeError: KeyError: 'no such thing'"]
    assert episode.outcome == {"score": 1.0}
    failures = [turn["failures"] for turn in episode.turns if turn["role"] != "assistant"]
    assert failures == [0, 1]
    assert episode.worker is None


@pytest.mark.integration
def test_what_ends_or_hangs_there_costs_its_episode_an_observation_and_leaves_nothing(player):
    player.args.call_timeout = 60.0
    left = player.play("a", "leave", "b", "end")
    assert "its process in the other Python has ended" in observations(left)[1]
    player.args.call_timeout = 0.3
    hung = player.begin(1)
    player.says(hung, "hang")
    assert player.steps() == [hung]
    assert observations(hung) == ["error: no answer within 0.3 s"]
    player.args.call_timeout = 60.0
    player.says(hung, "end")
    assert player.steps() == [hung] and hung.outcome == {"score": 0.5}
    deadline = time.monotonic() + 20
    while len(in_the_other_python(player)) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(in_the_other_python(player)) == 1, "the one that forks for every episode"


def test_each_episode_has_a_process_there_and_the_library_is_loaded_once(player):
    many = [player.begin(k) for k in range(3)]
    for episode in many:
        player.says(episode, f"turn of {episode.key[1]}")
    found = []
    while len(found) < 3:
        found += player.steps()
    assert found == many
    assert [observations(e)[0] for e in many] == [f"4 ['turn of {k}'] decimal é" for k in range(3)]
    assert len(in_the_other_python(player)) == 4


@pytest.mark.integration
@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OWN_PYTHON": None}, "OWN_PYTHON (not set) must name the Python of a virtual environment with own==1.0"),
        ({"OWN_PYTHON": "/nowhere/python"}, "OWN_PYTHON (/nowhere/python) must name"),
        ({"OWN_BREAKS": "1"}, "ImportError: not in this Python"),
    ],
)
def test_a_python_that_is_absent_or_lacks_the_library_is_refused(tiny, file, refused, monkeypatch, variables, words):
    for name, value in variables.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    assert words in refused(episodes.check, arguments(tiny, "Own", environment=file))

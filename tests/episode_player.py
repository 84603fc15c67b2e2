"""A player of scripted turns in the engine's place, for the tests of episodes and chats."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from helpers import ROOT

import grpo
from runtime.arguments.flags import RunFlags
from runtime.data import rendering
from runtime.environments import episodes

FILE = ROOT / "tests" / "environments.py"


@functools.cache
def tokenizer_of(tiny):
    """Return the tokenizer of the tiny model."""
    return rendering.load_tokenizer(RunFlags(model_name_or_path=str(tiny)))


def arguments(tiny, name: str, **more) -> grpo.Args:
    """Return the flags of a run with the class ``name`` of tests/environments.py as its environment."""
    values = {"max_turns": 20, "call_timeout": 20.0, "max_response_length": 100_000}
    values |= {"environment": f"{FILE}:{name}", **more}
    return grpo.Args(model_name_or_path=str(tiny), **values)


class Player:
    """Plays scripted turns in place of the engine's thread, one engine step each."""

    def __init__(self, tiny, name: str, **more):
        self.args = arguments(tiny, name, **more)
        self.tokenizer = tokenizer_of(tiny)
        self.end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.episodes = episodes.Episodes(self.args)

    def begin(self, number: int = 0, **row) -> episodes.Episode:
        sampling = {"max_tokens": self.args.max_response_length}
        return episodes.Episode(0, (0, number), [5, 6], 7, sampling, {"answer": "4", **row})

    def says(self, episode: episodes.Episode, text: str, reason: str = "stop", versions=(("3", 0),)) -> None:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.end] * (reason == "stop")
        logprobs = SimpleNamespace(logprobs=[-1.0] * len(ids))
        spans = [SimpleNamespace(version=version, start=start) for version, start in versions]
        turn = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_versions=spans)
        self.episodes.turn_ended(episode, turn)

    def steps(self, idle: bool = True) -> list[episodes.Episode]:
        """Take engine steps until an episode is due, and return those that are."""
        for _ in range(50):
            found = list(self.episodes.due(idle))
            if found:
                return found
        raise AssertionError("nothing comes of 50 steps")

    def play(self, *turns: str, **row) -> episodes.Episode:
        """Return an episode of these turns."""
        episode = self.begin(**row)
        for text in turns:
            self.says(episode, text)
            assert self.steps() == [episode]
            if episode.finish_reason is not None:
                break
        return episode


def observations(episode: episodes.Episode) -> list[str]:
    """Return the texts of the turns that the model did not write."""
    return [turn["text"] for turn in episode.turns if turn["role"] != "assistant"]

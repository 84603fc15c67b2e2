"""Responses of one turn, as the engine's thread asks for them; those of several turns (--environment) by name.

``runtime/environments/episodes.py`` has the same two classes for several turns: there a response that the engine has
ended may go on, with what its environment says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from runtime.system import user_files


@dataclass
class Episode:
    """A response that the engine was asked for: what to sample, and what has been sampled."""

    batch: int
    key: tuple[int, int]
    prompt_ids: list[int]
    seed: int
    sampling: dict[str, Any]
    ids: list[int] = field(init=False, default_factory=list)
    logprobs: list[float] = field(init=False, default_factory=list)  # of the model's tokens
    versions: list[tuple[int, int]] = field(init=False, default_factory=list)  # (version, which of the model's tokens)
    finish_reason: str | None = field(init=False, default=None)  # None: another turn follows

    @property
    def name(self) -> str:
        """A name that no other request of the engine has."""
        return f"{self.batch}/{self.key[0]}/{self.key[1]}"

    def request(self) -> tuple[list[int], dict[str, Any], int]:
        """Return (prompt, sampling parameters, seed) of the next turn."""
        return list(self.prompt_ids), self.sampling, self.seed

    def add(self, answer) -> None:
        """Add a turn: vLLM's ``CompletionOutput``."""
        before = len(self.logprobs)
        self.ids += answer.token_ids
        self.logprobs += list(answer.logprobs.logprobs)[: len(answer.token_ids)]
        for span in answer.weight_versions:
            if not self.versions or self.versions[-1][0] != int(span.version):
                self.versions.append((int(span.version), before + span.start))
        self.finish_reason = answer.finish_reason

    def found(self) -> tuple:
        """Return what the run gets: the fields of a Sample, from its ids on."""
        return self.ids, self.logprobs, self.finish_reason, self.versions


class Episodes:
    """The responses of one engine, in its thread."""

    def __init__(self):
        self.ended: list[Episode] = []  # after which nothing has to be waited for

    def begin(self, batch: int, key: tuple[int, int], prompt_ids: list[int], seed: int, sampling: dict) -> Episode:
        """Return the response to a request of the run."""
        return Episode(batch, key, prompt_ids, seed, sampling)

    def turn_ended(self, episode: Episode, answer) -> None:
        """Take a turn of the model; ``answer``: vLLM's ``CompletionOutput``."""
        episode.add(answer)
        self.ended.append(episode)

    def due(self, idle: bool) -> Iterator[Episode]:
        """Yield, after an engine step, the responses that ended, and those whose next turn begins (without a reason).

        ``idle``: the engine has nothing to compute.
        """
        ended, self.ended = self.ended, []
        yield from ended

    def close(self) -> None:
        """End what still runs for a response."""


def episodes_of(args) -> Episodes:
    """Return the responses of an engine: of several turns with --environment."""
    if args.environment is None:
        return Episodes()
    return user_files.find("runtime.environments.episodes:Episodes")(args)

"""Records that travel through a run (Problem, Sample, Batch); pass@k, correctness and majority votes of samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import multimode
from typing import Any

import numpy as np


@dataclass(slots=True)
class Problem:
    """One row of a data set: the prompt as chat messages, the ground truth, the verifiers' names, and the whole row."""

    messages: list[dict[str, Any]]
    truth: str
    verifier: str
    row: dict[str, Any]
    prompt_ids: Sequence[int] | np.ndarray = ()  # int32 once it is rendered
    source: str = ""  # short name of the data set it comes from
    opening: str = ""  # what an environment's reset adds to the last message
    tools: list[dict[str, Any]] | None = None  # its row's or an environment's, where the chat template writes them

    def record(self) -> bytes:
        """Return what the digest of a run's data hashes of it: truth and row. All else follows from them and flags."""
        row = json.dumps(self.row, default=lambda value: type(value).__name__)  # no address, no order of a set
        return json.dumps([[], self.truth]).encode() + row.encode()


class StoredProblem(Problem):
    """A problem of a large data set. Its texts stay in the file that ``checked`` maps, until they are asked for."""

    __slots__ = ("checked", "place")

    def __init__(self, checked: Any, place: int, verifier: str):
        """Take row ``place`` of ``checked``, a ``problem_set.Checked``."""
        self.checked = checked
        self.place = place
        self.verifier = verifier
        self.source = ""
        self.opening = ""
        self.prompt_ids = ()

    def __getattr__(self, name: str) -> Any:
        """Return a field that was not assigned."""
        if name not in ("messages", "truth", "row", "tools"):
            raise AttributeError(name)
        return json.loads(self.checked.texts[self.place].as_py())[name]

    def record(self) -> bytes:
        """Return a hash of what ``Problem.record`` returns."""
        return self.checked.records[self.place].tobytes()


@dataclass
class Sample:
    """One response on its way through a step. Token ids are the sampler's own, never recomputed from text.

    What there is per token is an array: a list of Python numbers takes 30 to 40 bytes for each. Of several turns,
    ``response_ids`` are all ids from the first to the last, also the L - T that an environment wrote. Nothing else is
    about those: N, T and every flat array count the model's tokens alone.
    """

    prompt_id: int  # index of the problem in its list
    sample_id: int  # 0 .. samples per prompt - 1
    prompt_ids: np.ndarray  # its problem's
    response_ids: np.ndarray  # [L] int32; a list becomes one
    sampler_logprobs: np.ndarray  # [T] float32; natural log, at the sampling temperature; a list becomes one
    finish_reason: str  # "stop": it ended by itself; "length": truncated at max_response_length
    weight_versions: list[tuple[int, int]]  # (version, first of the T) of each run of tokens sampled by one version
    kept: np.ndarray | None = None  # [T, K] int32: the ids that each token could have been, if sampling was truncated
    observed: list[tuple[int, int]] = field(default_factory=list)  # spans of response_ids that an environment wrote
    turns: list[dict[str, Any]] = field(default_factory=list)  # for people: who said what
    outcome: dict[str, Any] | None = None  # the environment's reward: fields of a rewards.Reward
    response: str = ""  # of several turns: the last
    score: float = 0.0  # the verifier's, unshaped
    reward: float = 0.0  # what is optimized: scaled, penalties taken off, clipped
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_status: str = "ok"
    reward_steps: tuple[tuple[int, float], ...] = ()  # intermediate scores: rewards.Reward.steps
    extracted: str = ""  # what the verifier took as the answer
    engine: int = 0  # which engine answered
    advantage: float = 0.0  # without KL: the same for every token of the response

    def __post_init__(self) -> None:
        self.response_ids = np.asarray(self.response_ids, dtype=np.int32)
        self.sampler_logprobs = np.asarray(self.sampler_logprobs, dtype=np.float32)
        self.kept = self.kept if self.kept is None else np.asarray(self.kept, dtype=np.int32)

    @property
    def length(self) -> int:
        """Number T of tokens that the model wrote."""
        return len(self.response_ids) - sum(end - start for start, end in self.observed)

    def own(self) -> np.ndarray:
        """Return a mask of the ``response_ids`` that the model wrote, [L]."""
        own = np.ones(len(self.response_ids), dtype=bool)
        for start, end in self.observed:
            own[start:end] = False
        return own

    def last_turn(self) -> np.ndarray:
        """Return the ids of the model's last turn."""
        return self.response_ids[self.observed[-1][1] if self.observed else 0 :]

    @property
    def turn_steps(self) -> tuple[tuple[int, float], ...]:
        """Rewards of turns: (the model's tokens up to the end of a turn, the sum of its reward and those before it).

        None of the intermediate scores of a verifier's own, which stand at characters.
        """
        return self.reward_steps if "steps" in (self.outcome or ()) else ()

    def token_versions(self) -> np.ndarray:
        """Return the version of the weights that sampled each token, [T]: s for the weights that step s begins with."""
        versions = [version for version, _ in self.weight_versions]
        starts = [start for _, start in self.weight_versions]
        return np.repeat(versions, np.diff([*starts, self.length]))


@dataclass
class Batch:
    """Problems that the engines were asked to answer, and what has come back so far."""

    number: int  # counts all that this rank's engine was asked for
    problems: list[Problem]
    chosen: list[int]  # their indices in the training data; empty for an evaluation
    unfinished: set[tuple[int, int]]  # keys of this rank's requests: (place in ``problems``, sample number)
    scoring: list[tuple] = field(default_factory=list)  # what the verifiers have of this rank's samples
    step: int | None = None  # that trains on it; None for an evaluation
    samples: list[Sample] | None = None  # of all ranks, scored, once they are whole


def earlier_turns(turns: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the messages of an episode before the model's last turn."""
    own = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
    messages = []
    for turn in turns[: own[-1] if own else 0]:
        messages.append({"role": turn["role"], "content": turn["text"]})
    return messages


def pass_at_k(correct: int, total: int, k: int) -> float:
    """Return the unbiased pass@k of ``correct`` answers among ``total``: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374)."""
    return 1.0 - math.comb(total - correct, k) / math.comb(total, k)


def equal_rewards(lowest: Any, highest: Any) -> Any:
    """Return True where the lowest and the highest reward of a group are equal up to rounding, as 0.1 + 0.2 and 0.3.

    Relative to their size, or absolutely where they are near 0. Of numbers, or of tensors elementwise.
    """
    rounding = 1e-9 * abs(lowest) + 1e-9 * abs(highest) + 1e-12
    return (lowest == highest) | (highest - lowest < rounding)  # an infinite reward equals no finite one


def is_correct(sample: Sample) -> bool:
    """Return True for a correct response, by the only definition that there is; every count of them comes from here.

    The part ``correct`` decides if the verifier states it, otherwise the complete score before shaping, which includes
    the rewards of turns: above 0.5.
    """
    return sample.reward_parts.get("correct", sample.score) > 0.5


def is_graded(sample: Sample) -> bool:
    """Return True if the verifier states no part ``correct`` and its score is neither 0 nor 1.

    The rate of correct responses is then a coarse summary of the reward, which may rise while the rate does not.
    """
    return "correct" not in sample.reward_parts and sample.score not in (0, 1)


def majority(group: list[Sample]) -> float:
    """Return 1 if the most frequent answer to one prompt is correct, 0 if not; n equally frequent ones count 1/n each.

    All correct responses give the same answer, however they write it. Without an extracted answer, the whole text is
    the answer.
    """
    answers = [None if is_correct(sample) else (sample.extracted or sample.response).strip() for sample in group]
    first = multimode(answers)
    return first.count(None) / len(first)

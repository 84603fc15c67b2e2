"""The records that travel through a run: a problem of the data set, a sample of the policy, a batch of both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Problem:
    """One row of a data set: the prompt as chat messages, the ground truth, the verifiers' names, and the whole row."""

    messages: list[dict[str, str]]
    truth: str
    verifier: str
    row: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list)
    source: str = ""  # short name of the data set it comes from


@dataclass
class Sample:
    """One response on its way through a step. Token ids are the sampler's own, never recomputed from text.

    What there is per token is an array: a list of Python numbers takes 30 to 40 bytes for each.
    """

    prompt_id: int  # index of the problem in its list
    sample_id: int  # 0 .. samples per prompt - 1
    prompt_ids: list[int]
    response_ids: np.ndarray  # [T] int32; a list becomes one
    sampler_logprobs: np.ndarray  # [T] float32; natural log, at the sampling temperature; a list becomes one
    finish_reason: str  # "stop": it ended by itself; "length": truncated at max_response_length
    weight_versions: list[tuple[int, int]]  # (version, first token) of each run of tokens sampled by one version
    response: str = ""
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

    def token_versions(self) -> np.ndarray:
        """The version of the weights that sampled each token, [T]: s for those that step s begins with."""
        versions = [version for version, _ in self.weight_versions]
        starts = [start for _, start in self.weight_versions]
        return np.repeat(versions, np.diff([*starts, len(self.response_ids)]))


@dataclass
class Batch:
    """Problems that the engines were asked to answer, and what has come back so far."""

    number: int  # counts all that this rank's engine was asked for
    problems: list[Problem]
    chosen: list[int]  # their indices in the training data; empty for an evaluation
    requests: list[tuple[tuple[int, int], list[int], int]]  # (key, prompt ids, seed) of this rank's engine
    sampling: dict[str, Any]
    scoring: list[tuple] = field(default_factory=list)  # what the verifiers have of this rank's samples
    samples: list[Sample] | None = None  # of all ranks, scored, once they are whole

    def __post_init__(self) -> None:
        self.unfinished = {key for key, _, _ in self.requests}  # key: (place in ``problems``, sample number)
        self.arrived: set[tuple[int, int]] = set()

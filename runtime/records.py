"""The two records that travel through a run: a problem of the data set and a sample of the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Problem:
    """One row of a data set: the prompt as chat messages, the ground truth, the verifiers' names, and the whole row."""

    messages: list[dict[str, str]]
    truth: str
    verifier: str
    row: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list)
    source: str = ""  # short name of the data set it comes from
    prepared_for: str = ""  # data.prompt_key() of the tokenizer, where scripts/prepare_data.py made prompt_ids


@dataclass
class Sample:
    """One response on its way through a step. Token ids are the sampler's own, never recomputed from text."""

    prompt_id: int  # index of the problem in its list
    sample_id: int  # 0 .. samples per prompt - 1
    prompt_ids: list[int]
    response_ids: list[int]
    sampler_logprobs: list[float]  # natural log, at the sampling temperature, one per response token
    finish_reason: str  # "stop": it ended by itself; "length": truncated at max_response_length
    weights_version: int  # number of pushes the engine had received when it answered
    response: str = ""
    score: float = 0.0  # the verifier's, unshaped
    reward: float = 0.0  # what is optimized: scaled, penalties taken off, clipped
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_status: str = "ok"
    reward_steps: tuple[tuple[int, float], ...] = ()  # intermediate scores: rewards.Reward.steps
    extracted: str = ""  # what the verifier took as the answer
    engine: int = 0  # which engine answered
    advantage: float = 0.0  # without KL: the same for every token of the response

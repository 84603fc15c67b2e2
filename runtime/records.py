"""The two records that travel through a run: a problem of the data set and a sample of the policy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Problem:
    """One row of a data set: the chat messages, the truth, the verifier's name, and the row as it was read."""

    messages: list[dict[str, str]]
    truth: str
    verifier: str
    row: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list)
    source: str = ""  # short name of the data set it comes from
    prepared_for: str = ""  # where prompt_ids were read with the row: prompt_key() of the tokenizer that made them


@dataclass
class Sample:
    """One response on its way through a step. Token ids are the sampler's own, never made again from text."""

    prompt_id: int  # index of the problem in its list
    sample_id: int  # 0 .. samples per prompt - 1
    prompt_ids: list[int]
    response_ids: list[int]
    sampler_logprobs: list[float]  # natural log, at the sampling temperature, one per response token
    finish_reason: str  # "stop": it ended by itself; "length": it was cut at max_response_length
    weights_version: int  # how many pushes the engine had seen when it answered
    response: str = ""
    score: float = 0.0  # the verifier's, unshaped
    reward: float = 0.0  # what is optimised: scaled, clipped, truncation applied
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_status: str = "ok"
    reward_steps: tuple[tuple[int, float], ...] = ()  # scores on the way: rewards.Reward.steps
    extracted: str = ""  # what the verifier took for the answer
    engine: int = 0  # which engine answered
    advantage: float = 0.0  # without KL: the same for every token of the response

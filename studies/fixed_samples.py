"""Fixed problems, responses, rewards and log-probs for the runs of studies/probe_run.py.

Responses depend on the prompt and the number of the sample alone, so runs with other sizes or orders have equal
samples. The model is a random Llama of 50 thousand parameters with the tokenizer of the test bed.
"""

from __future__ import annotations

import functools
import importlib
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pretrain_tiny
import torch

from rewards import Reward, deal_out, shape_reward

PROMPTS = 6  # not GROUP: rewards in the wrong layout would look right in a square
GROUP = 4
LONGEST = 12  # tokens of a response
EQUAL = 2  # the problem whose responses all have one reward
TEMPERATURE = 0.7  # not 1: a trainer that ignores it computes other log-probs
NOISE = 0.3  # standard deviation, in nats, of the sampler's log-probs around the trainer's, where a probe has it


@dataclass(frozen=True)
class Probe:
    """One run: the arguments that differ from the script's, the number of ranks, and changes to the samples."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    reverse: bool = False  # samples of a group are numbered from the last to the first
    noise: bool = False  # the sampler's log-probs are not the trainer's
    observed: bool = False  # some responses have tokens that an environment wrote
    other_truncated: bool = False  # truncated responses have other tokens
    learns: bool = False  # samples are drawn from the model, and only metrics are recorded


def make_model(folder: Path, seed: int = 0) -> Path:
    """Write a random two-layer Llama with the test bed's tokenizer."""
    torch.manual_seed(seed)
    recipe = pretrain_tiny.Recipe(
        seed=seed,
        hidden=32,
        layers=2,
        heads=2,
        intermediate=64,
    )
    tokenizer = pretrain_tiny.make_tokenizer()
    model = pretrain_tiny.make_model(recipe, tokenizer)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(2.0)  # log-probs that differ by more than a little from token to token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def problem_rows(*_) -> list[dict[str, str]]:
    """Problems of unequal lengths, in place of those of a task of reasoning-gym."""
    return [{"question": f"{'abcdefgh'[: 1 + 2 * k % 7]} {k}", "answer": str(k)} for k in range(PROMPTS)]


def make_response(probe: Probe, prompt_ids: list[int], number: int, end: int) -> tuple[list[int], str, list]:
    """(ids, finish reason, observed spans) of a response: it depends on prompt and number alone.

    Of four, the first is one token, the second is truncated unless the rewards of its group are equal, and the third
    and the fourth have a common prefix.
    """
    draw = random.Random(f"{prompt_ids}")

    def ids(count: int) -> list[int]:
        return [draw.randrange(60, 250) for _ in range(count)]

    common = ids(3)
    kinds = [ids(0), ids(LONGEST), common + ids(2), common + ids(5)]
    is_truncated = number == 1 and not has_equal_rewards(prompt_ids)
    if probe.other_truncated and is_truncated:
        kinds[1] = ids(LONGEST)
    spans = [(1, 3)] if probe.observed and number >= 2 else []
    if is_truncated:
        return kinds[1], "length", spans
    kinds[1] = kinds[1][:-1]
    return [*kinds[number % GROUP], end], "stop", spans


def make_reward(sample) -> float:
    """Return a reward in quarters that depends on the response alone; all responses to the problem EQUAL get 1."""
    value = zlib.crc32(np.asarray(sample.response_ids).tobytes()) % 4 / 4
    if sample.finish_reason == "length":
        value = 0.25
    if has_equal_rewards(sample.prompt_ids):
        value = 1.0
    return value


def learned_reward(sample) -> float:
    """Return the reward of runs that learn: the fraction of even tokens."""
    return float((np.asarray(sample.response_ids) % 2 == 0).mean())


def has_equal_rewards(prompt_ids: list[int]) -> bool:
    """Return True for the problem whose responses all have one reward; its digit is before the end of the prompt."""
    return prompt_ids[-2] == equal_digit()


@functools.cache
def equal_digit() -> int:
    """Token of this digit."""
    return pretrain_tiny.make_tokenizer()(str(EQUAL))["input_ids"][0]


class FixedEngine:
    """The rollout thread of a probe: it answers with ``make_response``, and keeps the weights it is given."""

    def __init__(self, probe: Probe):
        self.probe = probe
        self.weights: list[dict[str, torch.Tensor]] = []

    def run(self, args, dtype, rank: int, world_size: int, stop_ids: list[int], inbox, outbox) -> None:
        """Answer the messages of ``vllm_thread`` in the scripts."""
        try:
            self.serve(args, stop_ids, inbox, outbox)
        except BaseException as error:
            outbox.put(("error", error))

    def serve(self, args, stop_ids: list[int], inbox, outbox) -> None:
        pretrained = importlib.import_module("runtime.training.pretrained")
        model = pretrained.load_model(args, torch.float32, "sdpa").eval()
        version = 0
        outbox.put(("ready",))
        while True:
            kind, *body = inbox.get()
            if kind == "stop":
                return
            if kind == "weights":
                version, weights = body
                own = {name: weight.clone() for name, weight in weights}
                model.load_state_dict(own, strict=False)
                self.weights.append(own)
                outbox.put(("weights", version, 0.0))
            if kind == "sleep":
                outbox.put(("slept",))
            if kind == "generate":
                number, requests, sampling = body
                for key, prompt_ids, *_ in requests:
                    place = GROUP - 1 - key[1] if self.probe.reverse else key[1]
                    ids, reason, spans = make_response(self.probe, list(prompt_ids), place, stop_ids[0])
                    ids = ids[-sampling["max_tokens"] :]
                    logprobs = self.logprobs(model, list(prompt_ids), ids, spans, sampling["temperature"])
                    outbox.put(("sample", number, key, ids, logprobs, reason, [(version, 0)], None, spans))

    @torch.no_grad()
    def logprobs(self, model, prompt: list[int], ids: list[int], spans: list, temperature: float) -> list[float]:
        """Log-probs of the model's own tokens."""
        found = plain_logprobs(model, prompt, ids, temperature).tolist()
        draw = random.Random(f"{prompt}/{ids}")
        if self.probe.noise:
            found = [min(x + NOISE * draw.gauss(0, 1), -1e-3) for x in found]
        return [x for t, x in enumerate(found) if not any(a <= t < b for a, b in spans)]


def plain_logprobs(model, prompt: list[int], ids: list[int], temperature: float) -> torch.Tensor:
    """Log-probs [L] of a response from one plain forward pass: no padding, no packing, no shared prefix."""
    row = torch.tensor([[*prompt, *ids]])
    logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(-1, torch.tensor(ids)[:, None])[:, 0]


class FixedVerifiers:
    """Scores in this process, by ``make_reward``, with the interface of ``rewards.Verifiers``."""

    def __init__(self, probe: Probe, args):
        self.probe = probe
        self.args = args

    def submit(self, sample, problem, step: int | None = None) -> tuple:
        return sample, problem, []

    def collect(self, submitted: list[tuple], on_result, gather=list) -> list:
        for sample, _, _ in submitted:
            value = learned_reward(sample) if self.probe.learns else make_reward(sample)
            shape_reward(sample, Reward(value, {"correct": value}), self.args)
        samples = gather([sample for sample, _, _ in submitted])
        if self.args.reward_control == "random":
            deal_out(samples, self.args)
        return samples

    def close(self) -> None:
        pass

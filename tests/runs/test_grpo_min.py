"""variants/grpo_min.py: its gradient is that of grpo.py, also after the two marked edits, and its sampler is right."""

from __future__ import annotations

import importlib
import itertools
import math
import random
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, gradient_of, load_variant, make_samples, token_loss
from script_edits import DIVIDED, TOKENS

import grpo
import utils
from rewards import truth_error
from runtime.data import problem_set, sources
from runtime.training import batching

GROUP = 4
LONGEST = 16
EDITS = {  # what the marked lines say
    "grpo": ({}, {}),
    "dr_grpo": (
        {DIVIDED: "    #", TOKENS: "len(complete) * args.max_response_length"},
        {"advantage_normalization_type": "centered", "loss_norm": "constant"},
    ),
    "rloo": (
        {DIVIDED: "    advantages_PG *= group / (group - 1)"},
        {"advantage_normalization_type": "leave_one_out"},
    ),
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return load_variant("grpo_min", tmp_path_factory.mktemp("grpo_min"))


def edited(name: str, folder):
    """Import grpo_min.py after the edits that make it another algorithm."""
    text = (ROOT / "variants" / "grpo_min.py").read_text()
    for old, new in EDITS[name][0].items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / f"small_{name}.py").write_text(text)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"small_{name}")
    finally:
        sys.path.remove(str(folder))


def grpo_gradient(model, samples, rewards, flags) -> torch.Tensor:
    """Return grpo.py's gradient with some flags."""
    args = grpo.Args(max_response_length=LONGEST, **flags)
    policy = utils.TokenLogprobs(model, 0.7, 1000)
    complete = [i for i, s in enumerate(samples) if s.finish_reason != "length"]
    weights = F.pad(grpo.loss_weights(samples, complete, args), (0, 1))
    own = grpo.group_advantages(torch.tensor(rewards, dtype=torch.float64), args.advantage_normalization_type).flatten()
    advantages = torch.tensor([own[i] for i, s in enumerate(samples) for _ in s.response_ids] + [0.0])
    placement = {"layout": "shared", "budget": 1000, "rank": 0, "world_size": 1}
    model.zero_grad()
    for mb in batching.micro_batches(samples, complete, device=torch.device("cpu"), **placement):
        logprobs, entropy, _ = policy(mb)
        old = logprobs.detach()
        given = {"logprobs_T": logprobs, "old_T": old, "sampler_T": old, "advantages_T": advantages[mb.tokens]}
        loss, _ = token_loss(grpo, 0.0, args, entropy_T=entropy, **given)
        (loss * weights[mb.tokens]).sum().backward()
    return gradient_of(model)


@pytest.mark.parametrize("name, micro_batch", [("grpo", 4), ("grpo", 2), ("dr_grpo", 2), ("rloo", 4)])
def test_its_gradient_is_that_of_grpo(tiny_model, tmp_path, name, micro_batch):
    small = edited(name, tmp_path)
    samples = make_samples(3, GROUP)
    r = random.Random(0)
    rewards = [[float(r.random() < 0.5) for _ in range(GROUP)] for _ in range(2)] + [[1.0] * GROUP]
    expected = grpo_gradient(tiny_model, samples, rewards, EDITS[name][1])

    words = f"--group {GROUP} --max_response_length {LONGEST} --micro_batch {micro_batch} --temperature 0.7".split()
    responses = []
    for sample, score in zip(samples, itertools.chain(*rewards), strict=True):
        ids, logprobs = sample.response_ids.tolist(), sample.sampler_logprobs.tolist()
        truncated = sample.finish_reason == "length"
        responses.append(small.Response(list(sample.prompt_ids), ids, logprobs, truncated, score))
    tiny_model.zero_grad()
    small.set_advantages(responses, GROUP)
    small.add_gradients(tiny_model, responses, small.parse_args(words))
    found = gradient_of(tiny_model)
    assert expected.norm() > 0
    assert ((found - expected).norm() / expected.norm()).item() < 1e-5


def test_its_task_is_the_quickstarts(small):
    rows = sources.gym_rows(grpo.Args.dataset, 1)
    assert set(small.problems()) == {(row["question"], row["answer"]) for row in rows}
    assert problem_set.look_at(grpo.Args.dataset, [rows], grpo.Args(), truth_error).system == small.SYSTEM
    assert len(small.problems()) == len(set(small.problems()))


def test_its_reward_is_the_last_number(small):
    told = {"7 + 9 = 16": 1.0, "16 is 7 + 9": 0.0, "It is 16.": 1.0, "16.5": 0.0, "-16": 0.0, "": 0.0, "sixteen": 0.0}
    assert {text: small.reward(text, "16") for text in told} == told


def test_its_sampler_returns_the_log_probs_of_what_it_drew(small, tiny_model):
    """Prompts of unequal lengths, at another temperature; EOS ends a response."""
    prompts = [[5, 6, 7], [8] * 9, [10, 11, 12, 13, 14]]
    args = small.parse_args(["--max_response_length", "12", "--temperature", "0.7"])
    stop_ids = list(range(0, 600, 8))  # an eighth of the vocabulary
    torch.manual_seed(0)
    responses = small.sample_without_vllm(tiny_model, stop_ids, args, prompts, 5)
    assert [r.prompt for r in responses] == [prompt for prompt in prompts for _ in range(5)]
    assert len({len(r.ids) for r in responses}) > 4
    for r in responses:
        assert len(r.ids) == 12 or r.ids[-1] in stop_ids
        assert not set(r.ids[:-1]) & set(stop_ids)
        logprobs = small.token_logprobs(tiny_model, [r], 0.7)[0]
        assert torch.allclose(logprobs, torch.tensor(r.logprobs), atol=1e-5)


def test_its_sampler_draws_by_probability(small, tiny_model):
    args = small.parse_args(["--max_response_length", "1", "--temperature", "0.5"])
    torch.manual_seed(0)
    drawn = [r.ids[0] for r in small.sample_without_vllm(tiny_model, [2], args, [[5, 6, 7], [8, 9]], 4000)[:4000]]
    logits = tiny_model(torch.tensor([[5, 6, 7]])).logits[0, -1]
    probabilities = (logits / 0.5).softmax(-1)
    token = int(probabilities.argmax())
    share = drawn.count(token) / len(drawn)
    error = math.sqrt(probabilities[token].item() / len(drawn))
    assert abs(share - probabilities[token].item()) < 4 * error

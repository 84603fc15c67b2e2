"""variants/ppo_min.py: the small file has the gradients of ppo.py, policy and critic."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from helpers import gradient_of, load_variant, make_samples, token_loss
from transformers import AutoModelForTokenClassification

import ppo
import utils
from runtime.training import batching

TEMPERATURE = 0.7
LAMBDA = 0.9


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return load_variant("ppo_min", tmp_path_factory.mktemp("ppo_min"))


def ppo_gradients(model, critic, samples, rewards, moved) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ppo.py's gradients with --value_clip None, of policy and critic.

    ``moved``: how far each token's log-prob is from the old one, so that the clip has something to do.
    """
    args = ppo.Args(value_clip=None, gae_lambda=LAMBDA)
    policy = utils.TokenLogprobs(model, TEMPERATURE, 1000)
    everything = list(range(len(samples)))
    offsets = batching.token_offsets(samples)
    placement = {"layout": "shared", "budget": 1000, "rank": 0, "world_size": 1, "device": torch.device("cpu")}
    complete = [i for i in everything if samples[i].finish_reason != "length"]
    weights = F.pad(ppo.loss_weights(samples, complete, args), (0, 1))
    value_weights = F.pad(ppo.loss_weights(samples, everything, args), (0, 1))
    values = torch.zeros(offsets[-1] + 1)
    for mb in batching.micro_batches(samples, everything, **placement):
        values[mb.tokens] = critic(mb).detach()
    rewards_N = torch.zeros(offsets[-1], dtype=torch.float64)
    rewards_N[torch.tensor(offsets[1:]) - 1] = torch.tensor(rewards, dtype=torch.float64)
    after_B = torch.zeros(len(samples), dtype=torch.float64)
    advantages, returns = ppo.gae(rewards_N, values[:-1].double(), after_B, offsets, 1.0, LAMBDA)
    advantages = F.pad(ppo.whiten(advantages).float(), (0, 1))
    returns = F.pad(returns.float(), (0, 1))
    model.zero_grad()
    critic.zero_grad()
    for mb in batching.micro_batches(samples, everything, **placement):
        logprobs, entropy, _ = policy(mb)
        old = logprobs.detach() - moved[mb.tokens]
        given = {"logprobs_T": logprobs, "old_T": old, "sampler_T": old, "advantages_T": advantages[mb.tokens]}
        loss, _ = token_loss(ppo, 0.0, args, entropy_T=entropy, **given)
        value_loss, _ = ppo.value_loss(critic(mb), values[mb.tokens], returns[mb.tokens], args.value_clip)
        (loss * weights[mb.tokens] + value_loss * value_weights[mb.tokens]).sum().backward()
    return gradient_of(model), gradient_of(critic)


@pytest.mark.parametrize("micro_batch", [4, 2])
def test_its_gradients_are_those_of_ppo(small, tiny, tiny_model, micro_batch):
    samples = make_samples(3, 4)
    r = random.Random(0)
    rewards = [float(r.random() < 0.5) for _ in samples]
    moved = torch.empty(batching.token_offsets(samples)[-1] + 1)
    moved.uniform_(-0.4, 0.4, generator=torch.Generator().manual_seed(0))
    critic = AutoModelForTokenClassification.from_pretrained(tiny, dtype=torch.float32, num_labels=1).eval()
    torch.nn.init.normal_(critic.score.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    theirs = ppo.TokenValues(copy.deepcopy(tiny_model), copy.deepcopy(critic.score.state_dict()))
    expected, expected_critic = ppo_gradients(tiny_model, theirs, samples, rewards, moved)

    words = f"--group 4 --micro_batch {micro_batch} --temperature {TEMPERATURE} --gae_lambda {LAMBDA}".split()
    args = small.parse_args(words)
    responses = []
    for sample, reward, own in zip(samples, rewards, moved[:-1].split([s.length for s in samples]), strict=True):
        ids = sample.response_ids.tolist()
        response = small.Response(list(sample.prompt_ids), ids, [], sample.finish_reason == "length", reward)
        with torch.no_grad():
            logprobs = (small.outputs(tiny_model, [response])[0] / TEMPERATURE).log_softmax(-1)
        response.logprobs = (logprobs[range(len(ids)), ids] - own).tolist()
        responses.append(response)
    small.set_advantages(critic, responses, args)
    tiny_model.zero_grad()
    critic.zero_grad()
    difference = small.add_gradients(tiny_model, critic, responses, args)

    assert abs(difference - 0.2) < 0.05, "the mean of how far they moved"
    assert torch.cat([response.returns_T for response in responses]).std() > 0.1 and (moved.abs() > 0.25).any()
    for found, wanted in ((gradient_of(tiny_model), expected), (gradient_of(critic), expected_critic)):
        assert wanted.norm() > 0
        assert ((found - wanted).norm() / wanted.norm()).item() < 1e-5


def test_its_critic_starts_near_zero(small, tiny):
    start = {"num_labels": 1, "initializer_range": 1e-3}  # as main has it
    critic = AutoModelForTokenClassification.from_pretrained(tiny, dtype=torch.float32, **start).eval()
    assert 0 < small.outputs(critic, [small.Response([5, 6, 7], [8, 9], [])])[0].abs().max() < 0.1

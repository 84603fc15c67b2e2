"""variants/ppo_min.py: the small file has the gradients of ppo.py, policy and critic, and trains with vLLM."""

from __future__ import annotations

import copy
import random
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, finish, load_variant, make_samples, script, token_loss
from safetensors.torch import load_file

import ppo
import utils
from runtime.training import batching

TEMPERATURE = 0.7
LAMBDA = 0.9


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return load_variant("ppo_min", tmp_path_factory.mktemp("ppo_min"))


def gradient_of(model) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def ppo_gradients(model, critic, samples, rewards, moved) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ppo.py's gradients with --value_clip None and no mask of truncated responses, of policy and critic.

    ``moved``: how far each token's log-prob is from the old one, so that the clip has something to do.
    """
    args = ppo.Args(mask_truncated_completions=False, value_clip=None, gae_lambda=LAMBDA)
    policy = utils.TokenLogprobs(model, TEMPERATURE, 1000)
    everything = list(range(len(samples)))
    offsets = batching.token_offsets(samples)
    placement = {"layout": "shared", "budget": 1000, "rank": 0, "world_size": 1, "device": torch.device("cpu")}
    weights = F.pad(ppo.loss_weights(samples, everything, args), (0, 1))
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
        ((loss + value_loss) * weights[mb.tokens]).sum().backward()
    return gradient_of(model), gradient_of(critic)


@pytest.mark.parametrize("micro_batch", [16, 5])
def test_its_gradients_are_those_of_ppo(small, tiny_model, micro_batch):
    samples = make_samples(3, 4)
    r = random.Random(0)
    rewards = [float(r.random() < 0.5) for _ in samples]
    moved = torch.empty(batching.token_offsets(samples)[-1] + 1).uniform_(
        -0.4, 0.4, generator=torch.Generator().manual_seed(0)
    )
    critic = small.Critic(copy.deepcopy(tiny_model))
    with torch.no_grad():
        critic.head.weight.mul_(50)  # values that matter
    theirs = ppo.TokenValues(copy.deepcopy(tiny_model), copy.deepcopy(critic.head.state_dict()))
    expected, expected_critic = ppo_gradients(tiny_model, theirs, samples, rewards, moved)

    args = small.Args(micro_batch=micro_batch, temperature=TEMPERATURE, gae_lambda=LAMBDA)
    responses = []
    for sample, reward in zip(samples, rewards, strict=True):
        ids = sample.response_ids.tolist()
        sampler = torch.from_numpy(sample.sampler_logprobs)
        responses.append(small.Response(list(sample.prompt_ids), ids, sampler, reward))
    small.prepare(tiny_model, critic, responses, args)
    lengths = [len(response.ids) for response in responses]
    for response, own in zip(responses, moved[:-1].split(lengths), strict=True):
        response.old = response.old - own
    tiny_model.zero_grad()
    critic.zero_grad()
    small.add_gradients(tiny_model, critic, responses, args)

    values = torch.cat([response.values for response in responses])
    assert values.std() > 0.1 and (moved.abs() > 0.25).any()
    for found, wanted in ((gradient_of(tiny_model), expected), (gradient_of(critic), expected_critic)):
        assert wanted.norm() > 0
        assert ((found - wanted).norm() / wanted.norm()).item() < 1e-5


def test_its_critic_starts_as_that_of_ppo(small, tiny_model):
    theirs = ppo.TokenValues(copy.deepcopy(tiny_model), {})
    critic = small.Critic(copy.deepcopy(tiny_model))
    for name, weight in theirs.head.state_dict().items():
        assert torch.equal(weight, critic.head.state_dict()[name]), name


DRIVER = """
from types import SimpleNamespace
import ppo_min as small
small.last_number = lambda text, truth, row: SimpleNamespace(score=float(len(text) & 1))
small.main(small.Args(**{arguments!r}))
"""


@pytest.mark.slow
def test_it_trains_two_real_steps(tiny, tmp_path):
    """With vLLM: the engine has the new weights in the second step, which moved far, and they are saved."""
    arguments = {"model_name_or_path": str(tiny), "steps": 2, "prompts": 4, "samples": 4, "max_response_length": 8}
    arguments |= {"eval_prompts": 4, "learning_rate": 1e-2, "temperature": 0.7, "output": str(tmp_path / "model")}
    shutil.copy(ROOT / "variants" / "ppo_min.py", tmp_path)
    (tmp_path / "driver.py").write_text(DRIVER.format(arguments=arguments))
    text = finish(script(str(tmp_path / "driver.py")), tmp_path / "log", 280)
    differences = [float(x) for x in re.findall(r"difference ([\d.e+-]+)", text)]
    assert len(differences) == 2, text
    assert max(differences) < 1e-4, text
    assert len(re.findall(r"after step [02]: pass@1 [01]\.\d+ of 4 problems", text)) == 2, text
    saved = load_file(tmp_path / "model" / "model.safetensors")
    before = load_file(tiny / "model.safetensors")
    assert max((saved[name] - before[name]).abs().max().item() for name in before) > 5e-3

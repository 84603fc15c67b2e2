"""variants/dr_grpo_min.py: the small file has the gradient of grpo.py with Dr. GRPO's flags, and trains with vLLM."""

from __future__ import annotations

import random
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, finish, load_variant, make_samples, script, token_loss
from safetensors.torch import load_file

import grpo
import utils
from runtime.training import batching

GROUP = 4
LONGEST = 16


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return load_variant("dr_grpo_min", tmp_path_factory.mktemp("dr_grpo_min"))


def gradient_of(model) -> torch.Tensor:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def grpo_gradient(model, samples, rewards) -> torch.Tensor:
    """Return grpo.py's gradient with --loss_norm constant --advantage_normalization_type centered."""
    args = grpo.Args(loss_norm="constant", advantage_normalization_type="centered", max_response_length=LONGEST)
    policy = utils.TokenLogprobs(model, 0.7, 1000)
    everything = list(range(len(samples)))
    weights = F.pad(grpo.loss_weights(samples, everything, args), (0, 1))
    own = grpo.group_advantages(torch.tensor(rewards, dtype=torch.float64), args.advantage_normalization_type).flatten()
    advantages = torch.tensor([own[i] for i, s in enumerate(samples) for _ in s.response_ids] + [0.0])
    placement = {"layout": "shared", "budget": 1000, "rank": 0, "world_size": 1}
    model.zero_grad()
    for mb in batching.micro_batches(samples, everything, device=torch.device("cpu"), **placement):
        logprobs, entropy, _ = policy(mb)
        old = logprobs.detach()
        given = {"logprobs_T": logprobs, "old_T": old, "sampler_T": old, "advantages_T": advantages[mb.tokens]}
        loss, _ = token_loss(grpo, 0.0, args, entropy_T=entropy, **given)
        (loss * weights[mb.tokens]).sum().backward()
    return gradient_of(model)


@pytest.mark.parametrize("micro_batch", [16, 3])
def test_its_gradient_is_that_of_grpo(small, tiny_model, micro_batch):
    samples = make_samples(3, GROUP)
    r = random.Random(0)
    rewards = [[float(r.random() < 0.5) for _ in range(GROUP)] for _ in range(3)]
    expected = grpo_gradient(tiny_model, samples, rewards)
    args = small.Args(prompts=3, group=GROUP, max_response_length=LONGEST, micro_batch=micro_batch, temperature=0.7)
    tiny_model.zero_grad()
    for p, own in enumerate(rewards):
        group = [
            small.Response(s.response_ids.tolist(), s.sampler_logprobs.tolist(), "")
            for s in samples
            if s.prompt_id == p
        ]
        small.add_gradient(tiny_model, samples[p * GROUP].prompt_ids, group, own, args)
    found = gradient_of(tiny_model)
    assert expected.norm() > 0
    assert ((found - expected).norm() / expected.norm()).item() < 1e-5


DRIVER = """
import dr_grpo_min as small
small.score = lambda row, response: float(len(response.ids) + sum(response.ids) & 1)  # a random model is never right
small.main(small.Args(**{arguments!r}))
"""


@pytest.mark.slow
def test_it_trains_two_real_steps(tiny, tmp_path):
    """With vLLM: the engine has the new weights in the second step, which moved far, and they are saved."""
    arguments = {"model_name_or_path": str(tiny), "steps": 2, "prompts": 4, "group": 4, "max_response_length": 8}
    arguments |= {"eval_prompts": 4, "learning_rate": 1e-2, "temperature": 0.7, "output": str(tmp_path / "model")}
    shutil.copy(ROOT / "variants" / "dr_grpo_min.py", tmp_path)
    (tmp_path / "driver.py").write_text(DRIVER.format(arguments=arguments))
    text = finish(script(str(tmp_path / "driver.py")), tmp_path / "log", 280)
    differences = [float(x) for x in re.findall(r"difference ([\d.e+-]+)", text)]
    assert len(differences) == 2, text
    assert max(differences) < 1e-4, text
    assert len(re.findall(r"after step [02]: pass@1 [01]\.\d+ of 4 problems", text)) == 2, text
    saved = load_file(tmp_path / "model" / "model.safetensors")
    before = load_file(tiny / "model.safetensors")
    assert max((saved[name] - before[name]).abs().max().item() for name in before) > 5e-3

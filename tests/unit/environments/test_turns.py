"""Observations are context: they are in no flat array, so nothing learns from them or counts them."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from helpers import folder_of, load_variant, make_samples, read_jsonl, run_here, tiny_args

import grpo
import ppo
import utils
from runtime.data.samples import Sample
from runtime.training import batching

SCRIPTS = pytest.mark.parametrize("script", [grpo, ppo])
LAYOUTS = pytest.mark.parametrize("layout", ["shared", "padded", "packed"])
CPU = torch.device("cpu")


def with_observations(samples: list[Sample], seed: int = 0) -> list[Sample]:
    """Insert up to two spans of an environment into each response that has more than one token; in place."""
    r = random.Random(seed)
    for sample in samples:
        ids = sample.response_ids.tolist()
        places = sorted(r.sample(range(1, len(ids)), min(2, len(ids) - 1)), reverse=True)
        spans = []
        for place in places:
            count = r.randrange(1, 5)
            ids[place:place] = [r.randrange(3, 300) for _ in range(count)]
            spans = [(place, place + count), *((start + count, end + count) for start, end in spans)]
        sample.response_ids = np.asarray(ids, dtype=np.int32)
        sample.observed = spans
    return samples


@pytest.fixture
def episodes() -> list[Sample]:
    samples = with_observations(make_samples(3, 4))
    samples[1] = Sample(0, 1, samples[0].prompt_ids, samples[0].response_ids, samples[0].sampler_logprobs, "stop", [])
    samples[1].observed = samples[0].observed  # the same episode twice: its row is computed once
    samples[2].response_ids = samples[0].response_ids.copy()  # the same ids, but all of them its own
    samples[2].observed = []
    samples[2].sampler_logprobs = np.zeros(len(samples[2].response_ids), dtype=np.float32)
    return samples


def own_ids(samples: list[Sample]) -> list[int]:
    return [token for s in samples for token, own in zip(s.response_ids.tolist(), s.own(), strict=True) if own]


def cut(samples, layout: str, budget: int = 64, ranks: int = 1) -> list[list[batching.MicroBatch]]:
    everything = list(range(len(samples)))
    how = {"layout": layout, "budget": budget, "world_size": ranks, "device": CPU}
    return [list(batching.micro_batches(samples, everything, rank=rank, **how)) for rank in range(ranks)]


def test_the_last_turn_stands_behind_the_last_observation(episodes):
    assert episodes[0].last_turn().tolist() == episodes[0].response_ids[episodes[0].observed[-1][1] :].tolist()


@LAYOUTS
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_place_in_a_flat_array_is_a_token_of_the_model(episodes, layout, ranks):
    """Each of the N is predicted once; its target is the model's token."""
    offsets = batching.token_offsets(episodes)
    ids = own_ids(episodes)
    assert offsets[-1] == len(ids) < sum(len(s.response_ids) for s in episodes)
    seen = []
    for batches in cut(episodes, layout, ranks=ranks):
        for mb in batches:
            real = mb.tokens < offsets[-1]
            seen += mb.tokens[real].tolist()
            assert mb.targets[mb.copies][real].tolist() == [ids[place] for place in mb.tokens[real]]
    assert sorted(seen) == list(range(len(ids)))


def plain_loss(model, samples: list[Sample], weights_N: torch.Tensor) -> torch.Tensor:
    """Sum of weight x log-prob over the model's tokens, from one plain forward pass per sample."""
    total = torch.zeros(())
    offsets = batching.token_offsets(samples)
    for i, s in enumerate(samples):
        ids = torch.tensor([[*s.prompt_ids, *s.response_ids.tolist()]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, len(s.prompt_ids) :, None])[:, 0]
        total = total + (logprobs[torch.from_numpy(s.own())] * weights_N[offsets[i] : offsets[i + 1]]).sum()
    return total


def gradient(model, loss: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.integration
@LAYOUTS
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_gradient_is_that_of_the_model_s_tokens_in_their_context(episodes, layout, ranks, tiny_model):
    """However rows are laid out, cut and split."""
    weights_N = torch.rand(batching.token_offsets(episodes)[-1], generator=torch.Generator().manual_seed(0))
    expected = gradient(tiny_model, plain_loss(tiny_model, episodes, weights_N))
    policy = utils.TokenLogprobs(tiny_model, 1.0, chunk=7)
    weights_N = torch.cat([weights_N, torch.zeros(1)])
    for budget in (40, 4000):
        loss = torch.zeros(())
        for batches in cut(episodes, layout, budget, ranks):
            for mb in batches:
                loss = loss + (policy(mb)[0] * weights_N[mb.tokens]).sum()
        assert torch.allclose(gradient(tiny_model, loss), expected, atol=1e-5 * expected.abs().max())


@SCRIPTS
@pytest.mark.parametrize("norm", ["token", "sequence", "constant"])
def test_the_loss_is_normalized_by_the_model_s_tokens(script, norm):
    """The weights are those of the same responses without observations."""
    args = script.Args(loss_norm=norm)
    plain = make_samples(3, 4)
    everything = list(range(len(plain)))
    weights_N = script.loss_weights(plain, everything, args)
    assert torch.equal(script.loss_weights(with_observations(make_samples(3, 4)), everything, args), weights_N)


def test_values_are_those_before_the_model_s_tokens(episodes):
    """A critic that says which token it has read last: before a turn that is the observation's last one."""
    bootstrap = [i % 2 == 0 for i in range(len(episodes))]

    def critic(mb):
        return mb.input_ids.flatten()[mb.predict][mb.copies].float()

    placement = {"layout": "shared", "budget": 64, "rank": 0, "world_size": 1, "device": CPU}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
        values_N, after_B = ppo.values_of(critic, episodes, bootstrap, **placement)
    expected = []
    for s in episodes:
        before = [s.prompt_ids[-1], *s.response_ids.tolist()[:-1]]
        expected += [token for token, own in zip(before, s.own(), strict=True) if own]
    assert values_N.tolist() == expected
    last = [s.response_ids[-1] if more else 0 for s, more in zip(episodes, bootstrap, strict=True)]
    assert after_B.tolist() == last


def test_the_reward_is_on_the_model_s_last_token(episodes):
    for sample in episodes:
        sample.reward = 1.0 + sample.sample_id
    found = ppo.token_rewards(episodes, None, ppo.Args())
    offsets = batching.token_offsets(episodes)
    assert len(found) == offsets[-1]
    assert [found[end - 1] for end in offsets[1:]] == [s.reward for s in episodes]
    assert np.count_nonzero(found) == len(episodes)


def test_the_reward_of_a_turn_is_on_its_last_token(episodes):
    """With --dense_reward difference; what the end brought is on the very last, and a truncated response has none."""
    sample = next(s for s in episodes if s.observed)
    sample.outcome = {"steps": []}  # it is the environment that gives them
    ends = [start - sum(e - f for f, e in sample.observed[:k]) for k, (start, _) in enumerate(sample.observed)]
    sample.reward_steps = ((ends[0], 2.0), (ends[-1], 2.5))
    sample.reward, sample.finish_reason = 3.5, "stop"
    args = ppo.Args(dense_reward="difference")
    found = ppo.token_rewards([sample], None, args)
    expected = np.zeros(sample.length)
    expected[ends[0] - 1] += 2.0
    expected[ends[-1] - 1] += 0.5
    expected[-1] += 1.0
    assert found.tolist() == expected.tolist()
    sample.outcome = None  # a verifier's steps stand at characters
    found = ppo.token_rewards([sample], lambda ids, **_: "xx" * len(ids), args)
    assert np.flatnonzero(found)[0] == (ends[0] + 1) // 2 - 1
    sample.finish_reason = "length"
    sample.reward = 0.0
    assert not ppo.token_rewards([sample], None, dataclasses.replace(args, mask_no_eos_with_zero=True)).any()


def test_return_to_go_leaves_out_what_came_before_a_turn(episodes, tmp_path):
    """variants/turn_rewards.patch: (return of the turn and those after it - mean) / std, for every token."""
    module = load_variant("turn_rewards", tmp_path)
    for kind in ("standard", "centered"):
        args = module.Args(advantage_normalization_type=kind, reward_scaling=2.0, num_samples_per_prompt_rollout=4)
        for sample in episodes:
            half = sample.length // 2
            sample.outcome = {"steps": []}
            sample.reward_steps = ((half, 1.0), (sample.length, 1.5)) if half else ()
            sample.finish_reason = "length" if sample.sample_id == 2 else "stop"
            sample.reward = 0.0 if sample.sample_id == 2 else 2.0 * (1.5 + sample.sample_id)
        for sample in episodes[-4:]:
            sample.reward = 1.0  # a group without a signal
        rewards_PG = torch.tensor([s.reward for s in episodes], dtype=torch.float64).view(3, 4)
        past_N = module.past_rewards(episodes, rewards_PG, args)
        advantages = module.group_advantages(rewards_PG, kind, args.advantage_eps).flatten().tolist()
        found = torch.cat([torch.full((s.length,), a) for s, a in zip(episodes, advantages, strict=True)]) - past_N
        expected = []
        for place, sample in enumerate(episodes):
            group = rewards_PG[place // 4]
            scale = 1 / (group.std().item() + args.advantage_eps) if kind == "standard" else 1.0
            has_turns = sample.finish_reason == "stop" and sample.length > 1
            for k in range(sample.length):
                to_go = sample.reward - (2.0 if has_turns and k >= sample.length // 2 else 0.0)
                expected.append((to_go - group.mean().item()) * scale if place < 8 else 0.0)
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_versions_are_the_model_s_tokens(episodes):
    sample = episodes[0]
    sample.weight_versions = [(3, 0), (4, sample.length - 1)]
    assert sample.token_versions().tolist() == [3] * (sample.length - 1) + [4]


@pytest.mark.integration
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_run_s_numbers_are_of_the_model_s_tokens(name, tiny, tmp_path, monkeypatch, tiny_model):
    """Lengths, entropy, log-prob differences, sequence KL; observations are put into its samples."""
    script = {"grpo": grpo, "ppo": ppo}[name]
    select, kept = script.select, []

    def with_them(*given):
        samples, metrics = select(*given)
        kept.append(with_observations(samples, seed=len(kept)))
        for sample in samples:
            sample.turns = [{"role": "assistant", "text": "", "calls": [{"name": "add", "arguments": {}}]}]
            sample.turns.append({"role": "user", "failures": 1, "seconds": 0.5})
            sample.turns.append({"role": "assistant", "text": ""})
        return samples, metrics

    monkeypatch.setattr(script, "select", with_them)
    flags = {"max_logprob_diff": 0.0, "eval_prompts": 0, "num_mini_batches": 2}
    flags |= {"beta": 0.1, "kl_placement": "both", "learning_rate": 1e-2}
    args = tiny_args(tiny, tmp_path, name, **flags)
    metrics = run_here(args, name)
    for m, samples in zip(metrics, kept, strict=True):
        lengths = [s.own().sum() for s in samples]
        assert m["completions/length_mean"] == pytest.approx(np.mean(lengths))
        assert m["completions/length_max"] == max(lengths)
        observed = [len(s.response_ids) - s.own().sum() for s in samples]
        assert m["env/tokens"] == pytest.approx(np.mean(observed)) and m["env/tokens"] > 1
        assert (m["env/failures"], m["env/tool_seconds"]) == (len(samples), 0.5)
        assert (m["env/turns"], m["env/tool_calls"]) == (2, 1)
    first, samples = metrics[0], kept[0]
    diffs, entropies = [], []
    with torch.no_grad():
        for s in samples:
            ids = torch.tensor([[*s.prompt_ids, *s.response_ids.tolist()]])
            logprobs = tiny_model(input_ids=ids, use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1].log_softmax(-1)
            own = torch.from_numpy(s.own())
            chosen = logprobs.gather(-1, ids[0, len(s.prompt_ids) :, None])[own, 0]
            diffs += (chosen - torch.from_numpy(s.sampler_logprobs)).abs().tolist()
            entropies += (-(logprobs.exp() * logprobs).sum(-1))[own].tolist()
    assert first["sampler/logprob_diff_mean"] == pytest.approx(np.mean(diffs), rel=1e-3)
    assert first["sampler/logprob_diff_max"] == pytest.approx(max(diffs), rel=1e-3)
    assert first["policy/entropy"] == pytest.approx(np.mean(entropies), rel=2e-2)  # of two optimizer steps
    second = metrics[1]
    assert second["kl/sequence"] == pytest.approx(second["kl/k1"] * second["completions/length_mean"], rel=1e-5)
    folder = folder_of(args, name)
    assert "turns" in read_jsonl(folder / "samples.jsonl")[0]

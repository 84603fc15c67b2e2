"""Six architectures of different kinds with the real engine, in this process; studies/model_zoo.py has all of them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import model_zoo
import pytest
import torch
from helpers import answer, end_engine, start_engine

import grpo
from runtime.engine import isolation, vllm_settings
from runtime.training import deepspeed_zero, pretrained

# Six ways in which vLLM serves a model.
KINDS = {
    "smollm3": "by transformers' class, which vLLM decorates",
    "gpt_neox": "by transformers' class, with names that vLLM maps",
    "gemma2": "without a module for the tied head",
    "gpt2": "with absolute positions and a tied head",
    "qwen3_moe": "with experts that the checkpoint has one by one",
    "granitemoehybrid": "with recurrent states and scaled logits",
}
PROMPTS = [[5 + 7 * i % 250 for i in range(40)], [9, 8, 7, 6]]


def contents(model) -> dict[type, tuple]:
    """Everything that the classes of a model's modules define, and their bases.

    Without caches of transformers, and without torch's own classes, into which its compiler writes.
    """
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    found = {}
    for cls in classes:
        if not cls.__module__.startswith("torch."):
            own = {name: value for name, value in vars(cls).items() if not name.endswith("_cached_value")}
            found[cls] = (cls.__bases__, own)
    return found


def settings() -> list:
    return [read() for read, _ in isolation.settings()] + torch.get_rng_state().tolist()


def sample(inbox, outbox) -> list[tuple[list[int], torch.Tensor]]:
    """(prompt and response, the engine's log-probs of the response) of two samples of each prompt."""
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": [], "max_tokens": 8, "ignore_eos": True}
    requests = [((p, k), prompt, 10 * p + k) for p, prompt in enumerate(PROMPTS) for k in range(2)]
    inbox.put(("generate", 0, requests, sampling))
    found = []
    for _ in requests:
        _, _, key, ids, logprobs, *_ = answer(outbox)
        found.append(([*PROMPTS[key[0]], *map(int, ids)], torch.tensor(logprobs)))
    return found


def push(inbox, outbox, model, version: int) -> None:
    policy = SimpleNamespace(module=SimpleNamespace(model=model))
    inbox.put(("weights", version, deepspeed_zero.current_weights(policy, 2, checkpoint_names=True)))
    assert answer(outbox)[:2] == ("weights", version)


def logprobs_of(model, ids: list[int], count: int) -> torch.Tensor:
    """The trainer's log-probs of the last ``count`` ids, by a plain forward pass."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -count - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[-count:])[:, None])[:, 0]


@torch.no_grad()
def difference(model, samples) -> float:
    return max((logprobs_of(model, ids, len(own)) - own).abs().max().item() for ids, own in samples)


@pytest.mark.integration
@pytest.mark.parametrize("name", KINDS)
def test_engine_and_trainer_agree_and_the_trainer_is_left_as_it_was(tmp_path, name):
    """Before and after a training step, to 1e-4 nats; a reference that is loaded later computes what the policy did."""
    model_zoo.write_model(tmp_path, *model_zoo.ZOO[name])
    own = json.dumps({"kv_cache_memory_bytes": 2**26})
    sizes = {"max_prompt_length": 64, "max_response_length": 8}
    args = grpo.Args(model_name_or_path=str(tmp_path), dtype="float32", vllm_args=own, **sizes)
    model = pretrained.load_model(args, torch.float32, "sdpa")
    classes, before = contents(model), settings()
    inbox, outbox, thread = start_engine(grpo, args, [2])
    try:
        assert settings() == before
        push(inbox, outbox, model, 1)
        first = sample(inbox, outbox)
        assert difference(model, first) < 1e-4
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for ids, engine_logprobs in first:
            logprobs_of(model, ids, len(engine_logprobs)).sum().backward()
        optimizer.step()
        push(inbox, outbox, model, 2)
        second = sample(inbox, outbox)
        assert difference(model, second) < 1e-4 < 1e-2 < difference(model, first)
        assert contents(model) == classes
        reference = pretrained.load_model(args, torch.float32, "sdpa")
        assert set(contents(reference)) == set(classes)
        assert difference(reference, first) < 1e-4
    finally:
        end_engine(inbox, thread)


@pytest.mark.parametrize("name, states", [("llama", False), ("gemma2", False), ("qwen3_next", True), ("mamba2", True)])
def test_the_prefix_cache_is_off_for_models_with_states(tmp_path, name, states):
    """On CPUs, where vLLM's cache of states would need chunked prefill; --vllm_args can still ask for it."""
    from transformers import AutoConfig

    kind, fields = model_zoo.ZOO[name]
    AutoConfig.for_model(kind, **(model_zoo.SIZES | fields)).save_pretrained(tmp_path)
    given = vllm_settings.engine_settings(grpo.Args(model_name_or_path=str(tmp_path)), torch.float32, 1)
    assert given.get("enable_prefix_caching") == (False if states else None)
    asked = grpo.Args(model_name_or_path=str(tmp_path), vllm_args='{"enable_prefix_caching": true}')
    assert vllm_settings.engine_settings(asked, torch.float32, 1)["enable_prefix_caching"]

"""variants/lora.patch: adapters alone are trained and pushed, and the engine computes what the trainer computes."""

from __future__ import annotations

import pytest
import torch
import variant
from helpers import (
    ONE_ENGINE,
    answer,
    command,
    end_engine,
    finish,
    load_variant,
    read_jsonl,
    start_engine,
    with_program,
)
from transformers import AutoModelForCausalLM

RANK = 8
PROMPTS = [[5 + 7 * i % 300 for i in range(70)], [9, 8, 7, 6, 5]]  # the first: more than two cache blocks of 32
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 24, "stop": [], "ignore_eos": True}


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return load_variant("lora", tmp_path_factory.mktemp("lora"))


class Policy:
    """The attributes of a DeepSpeed engine that ``adapters`` reads."""

    def __init__(self, model):
        self.module = type("TokenLogprobs", (), {"model": model})


@pytest.fixture(scope="module")
def engine(lora, tiny):
    """The engine's thread and its queues, as main starts them."""
    args = lora.Args(
        model_name_or_path=str(tiny),
        dtype="float32",
        max_response_length=24,
        vllm_args='{"kv_cache_memory_bytes": 107374182}',
        lora_rank=RANK,
    )
    inbox, outbox, thread = start_engine(lora, args, [2])
    yield inbox, outbox, args
    end_engine(inbox, thread)


def adapted(lora, tiny, args, seed: int):
    """The tiny model with adapters that change every layer."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager")
    model.add_adapter(lora.lora_config(args))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    return model.eval()


@torch.no_grad()
def mismatch(model, samples: list[tuple]) -> float:
    """Largest difference of a token's log-prob between the sampler and a plain forward pass of the model."""
    worst = 0.0
    for _, _, (p, _), ids, logprobs, _, _ in samples:
        rows = torch.tensor([PROMPTS[p] + ids])
        logits = model(input_ids=rows, use_cache=False).logits[0, len(PROMPTS[p]) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        worst = max(worst, (own - torch.tensor(logprobs)).abs().max().item())
    return worst


@pytest.mark.integration
def test_the_engine_has_the_adapters_of_the_last_push(lora, engine, tiny):
    """Sampler and trainer agree after each of two pushes, in which only adapters travel; not with what was before."""
    inbox, outbox, args = engine
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager")
    models = [adapted(lora, tiny, args, seed) for seed in (1, 2)]
    earlier = base
    for version, model in enumerate(models, 1):
        weights = lora.adapters(Policy(model))
        assert all(".lora_A." in name or ".lora_B." in name for name, _ in weights)
        layers = [module for module in base.model.modules() if isinstance(module, torch.nn.Linear)]
        expected = sum(RANK * (layer.in_features + layer.out_features) for layer in layers)
        assert sum(weight.numel() for _, weight in weights) == expected
        inbox.put(("weights", version, weights))
        assert answer(outbox)[:2] == ("weights", version)
        requests = [((p, k), prompt, 10 * p + k) for p, prompt in enumerate(PROMPTS) for k in range(4)]
        inbox.put(("generate", version, requests, SAMPLING))
        samples = [answer(outbox) for _ in requests]
        assert mismatch(model, samples) < 1e-4
        assert mismatch(earlier, samples) > 0.05
        earlier = model


def test_a_run_continues_from_adapters(lora, tiny, tmp_path):
    """Of another rank than the flag's: trainer and engine have the rank, the scale and the weights of the files."""
    args = lora.Args(model_name_or_path=str(tiny), lora_rank=RANK)
    first = adapted(lora, tiny, args, 1)
    first.save_pretrained(tmp_path)
    again = lora.Args(model_name_or_path=str(tiny), lora_path=str(tmp_path))
    assert (again.lora_rank, lora.lora_config(again).r, lora.lora_config(again).lora_alpha) == (16, RANK, 32)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager")
    model.load_adapter(again.lora_path, is_trainable=True)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    for name, weight in first.named_parameters():
        assert name not in trained or torch.equal(weight, trained[name]), name
    assert "llm.sleep(level=1)" in variant.variant("lora"), "a push brings back no base weights that level 2 drops"


@pytest.mark.slow
@pytest.mark.parametrize("apart", [False, True], ids=["thread", "dedicated"])
def test_a_run_trains_adapters_alone(tiny, tmp_path, apart):
    """Three steps with two optimizer steps each: sampler = trainer after every push, and model/ is the adapters."""
    more = ["--lora_rank", str(RANK), "--learning_rate", "1e-2", "--num_mini_batches", "2", "--total_steps", "3"]
    more += ONE_ENGINE if apart else ()
    line = command(tiny, tmp_path / "out", *more, ranks=1 + apart, rollout="vllm")
    finish(with_program(line, tmp_path, variant.variant("lora")), tmp_path / "log", 280)
    metrics = read_jsonl(tmp_path / "out" / "run" / "metrics.jsonl")
    assert sum(m["optim/steps"] for m in metrics) > 3
    assert all(m["sampler/logprob_diff_max"] < 1e-4 for m in metrics)
    saved = tmp_path / "out" / "run" / "model"
    assert (saved / "adapter_model.safetensors").is_file()
    assert not (saved / "model.safetensors").exists()
    trained = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).state_dict()
    for name, weight in trained.state_dict().items():
        if ".lora_" not in name:
            assert torch.equal(weight, base[name.replace(".base_layer", "")]), name
    moved = [weight.abs().max().item() for name, weight in trained.state_dict().items() if ".lora_B." in name]
    assert min(moved) > 1e-3

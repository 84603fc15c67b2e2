"""Architectures: every one is trained on its own log-probs in every layout, or rejected with the layout that works.

The models are random and tiny. Those with a sliding window have one of 64 tokens, and rows of 130 to 230. They are the
table of docs/models.md.
"""

from __future__ import annotations

import itertools
import random
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deepspeed.runtime.zero import stage_1_and_2
from helpers import folder_of, interrupted, make_samples, record, rejected, run_here, tiny_args

import grpo
import utils
from grpo import Args
from runtime.data.samples import Sample
from runtime.training import attention, batching, pretrained

WINDOW = 64
VOCABULARY = 320
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
BOTH = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 256,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "initializer_range": 0.2}
OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "init_std": 0.2,
    "eos_token_id": 2,
}
# architecture -> (model type, fields of its config)
ZOO = {
    "Llama 3, scaled RoPE": ("llama", SIZES | {"rope_parameters": LLAMA3}),
    "Qwen2": ("qwen2", SIZES),
    "Qwen2, sliding window": (
        "qwen2",
        SIZES | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "Qwen3": ("qwen3", SIZES | {"head_dim": 8}),
    "Qwen3-MoE": ("qwen3_moe", SIZES | EXPERTS | {"head_dim": 8}),
    "Mistral, sliding window": ("mistral", SIZES | {"sliding_window": WINDOW}),
    "Mixtral": ("mixtral", SIZES | {"num_local_experts": 4, "sliding_window": None}),
    "Phi-3, sliding window, longrope": (
        "phi3",
        SIZES | {"sliding_window": WINDOW, "rope_parameters": LONGROPE, "original_max_position_embeddings": 256},
    ),
    "Gemma 2, sliding window, soft caps": (
        "gemma2",
        SIZES | {"head_dim": 8, "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    ),
    "Gemma 3, sliding window": (
        "gemma3_text",
        SIZES | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": BOTH, "query_pre_attn_scalar": 8},
    ),
    "OLMo 2": ("olmo2", SIZES),
    "OLMo 3, sliding window": ("olmo3", SIZES | {"sliding_window": WINDOW, "layer_types": BOTH}),
    "OLMoE": ("olmoe", SIZES | {"num_experts": 4, "num_experts_per_tok": 2}),
    "SmolLM3": ("smollm3", SIZES | {"no_rope_layer_interval": 2}),
    "Granite, scaled logits": ("granite", SIZES | {"logits_scaling": 4.0, "attention_multiplier": 0.1}),
    "HyperCLOVA X, multiplied logits": ("hyperclovax", SIZES | {"logits_scaling": 0.25}),
    "gpt-oss, sliding window, sinks": (
        "gpt_oss",
        SIZES
        | {"head_dim": 8, "sliding_window": WINDOW, "layer_types": BOTH}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "Cohere 2, sliding window, scaled logits": ("cohere2", SIZES | {"sliding_window": WINDOW, "layer_types": BOTH}),
    "GPT-2": ("gpt2", GPT2),
    "OPT": ("opt", OPT),
}
# Their modeling code does not pass positions to transformers' masks, so packed samples would attend to each other.
REFUSED = {("gpt-oss, sliding window, sinks", "packed"), ("OPT", "packed")}


def save_random(folder: Path, name: str, **changes) -> Path:
    """Write a random model of the zoo to ``folder``; every weight is random, also the biases and sinks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = ZOO[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**fields, **changes}))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


def load(folder: Path, **flags):
    """The model as a run loads it: dropout off, train mode, the default attention of fp32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pretrained.load_model(Args(model_name_or_path=str(folder), **flags), torch.float32, "sdpa")


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_in_fp32(tmp_path, tied):
    """Its product, and the gradient through it, are those of fp32 copies; vLLM reads the same field of the config."""
    from vllm.config.model import _get_head_dtype

    folder = save_random(tmp_path, "Llama 3, scaled RoPE", tie_word_embeddings=tied)
    how = (torch.bfloat16, "sdpa")
    plain = pretrained.load_model(Args(model_name_or_path=str(folder)), *how)
    exact = pretrained.load_model(
        Args(model_name_or_path=str(folder), override_config='{"head_dtype": "float32"}'), *how
    )
    ids = torch.arange(3, 40)[None]
    hidden = exact.base_model(input_ids=ids).last_hidden_state
    weight = exact.get_output_embeddings().weight
    logits = exact(input_ids=ids).logits
    assert logits.dtype == torch.float32 and plain(input_ids=ids).logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits, hidden.float() @ weight.float().T)
    assert 0 < (logits - plain(input_ids=ids).logits).abs().max() < 0.1
    logits.logsumexp(-1).sum().backward()
    assert weight.grad.dtype == torch.bfloat16 and weight.grad.abs().sum() > 0
    assert _get_head_dtype(exact.config, torch.bfloat16, "generate") == torch.float32


def long_samples() -> list[Sample]:
    """Two groups with a common prefix of 40 tokens in the responses; each sample has 130 to 230 tokens."""
    r = random.Random(0)
    samples = []
    for p, length in enumerate((90, 30)):
        prompt = [r.randrange(3, VOCABULARY) for _ in range(length)]
        prefix = [r.randrange(3, VOCABULARY) for _ in range(40)]
        for k in range(3):
            tail = [r.randrange(3, VOCABULARY) for _ in range(60 + 20 * k)]
            response = prefix + tail if k else tail + prefix
            samples.append(Sample(p, k, prompt, response, [0.0] * len(response), "stop", []))
    return samples


def in_layout(policy, samples: list[Sample], layout: str) -> torch.Tensor:
    """Log-probs of all response tokens, [N], in rows of a layout."""
    logprobs = torch.zeros(batching.token_offsets(samples)[-1])
    for mb in batching.micro_batches(
        samples, list(range(len(samples))), layout=layout, budget=1000, rank=0, world_size=1, device=torch.device("cpu")
    ):
        logprobs[mb.tokens] = policy(mb)[0]
    return logprobs


@torch.no_grad()
def plain(model, samples: list[Sample]) -> torch.Tensor:
    """The same, [N], from one plain forward pass of the model per sample."""
    parts = []
    for s in samples:
        ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1].float()
        parts.append(logits.log_softmax(-1).gather(-1, torch.tensor(s.response_ids)[:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("name", list(ZOO))
def test_every_layout_is_exact_or_refused(tmp_path, capsys, name):
    """Accepted layouts differ from plain forward passes by rounding alone; rejected ones by more than that."""
    model = load(save_random(tmp_path, name))
    samples = long_samples()
    expected = plain(model, samples)
    policy = utils.TokenLogprobs(model, temperature=1.0, chunk=100)
    for layout in utils.LAYOUTS:
        with torch.no_grad():
            difference = (in_layout(policy, samples, layout) - expected).abs().max().item()
        if (name, layout) in REFUSED:
            assert "--batch_layout shared or padded" in rejected(capsys, utils.check_forward, policy, layout, 2, 256)
            assert difference > 1e-2
        else:
            utils.check_forward(policy, layout, 2, 256)
            assert difference < 1e-4, layout


OWN_ATTENTION = {"Gemma 2, sliding window, soft caps", "gpt-oss, sliding window, sinks"}
# Models differ in how they call attention, layouts in its masks: those of shared rows have all that others' have.
OTHERS = tuple(layout for layout in utils.LAYOUTS if layout != "shared")
IN_LAYOUTS = [(name, ("shared",)) for name in ZOO]
IN_LAYOUTS += [(name, OTHERS) for name in ("Llama 3, scaled RoPE", "Qwen2, sliding window")]
IN_LAYOUTS += [pytest.param(name, OTHERS, marks=pytest.mark.slow) for name in ZOO if (name, OTHERS) not in IN_LAYOUTS]


@pytest.mark.integration
@pytest.mark.parametrize("name, layouts", IN_LAYOUTS)
def test_grouped_attention_computes_what_eager_does(tmp_path, name, layouts):
    """Log-probs and gradient; models whose scores are not the usual ones keep eager."""
    folder = save_random(tmp_path, name)
    samples = long_samples()
    found = {}
    for kind in ("eager", "grouped"):
        model = pretrained.load_model(Args(model_name_or_path=str(folder)), torch.float32, kind)
        used = model.config._attn_implementation
        assert used == ("eager" if name in OWN_ATTENTION else kind)
        policy = utils.TokenLogprobs(model, 1.0, 1000)
        for layout in layouts:
            model.zero_grad()
            logprobs = in_layout(policy, samples, layout)
            logprobs.square().sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
            found[kind, layout] = logprobs.detach(), gradient
    for layout in layouts:
        (eager, eager_gradient), (grouped, gradient) = found["eager", layout], found["grouped", layout]
        torch.testing.assert_close(grouped, eager, rtol=0, atol=1e-4)
        assert (gradient - eager_gradient).norm() < 1e-4 * eager_gradient.norm(), layout


@pytest.mark.parametrize("name", ["Mistral, sliding window", "OLMo 3, sliding window"])
def test_gradients_beyond_the_window(tmp_path, name):
    """The gradient of a sum of log-probs in shared rows is that of plain forward passes."""
    model = load(save_random(tmp_path, name))
    samples = long_samples()[:3]
    gradients = []
    for compute in (
        lambda: in_layout(utils.TokenLogprobs(model, 1.0, 100), samples, "shared"),
        lambda: plain.__wrapped__(model, samples),
    ):
        model.zero_grad()
        compute().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()


@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_the_probe_is_longer_than_the_window(tmp_path, capsys, monkeypatch, layout):
    """A layout that forgets the window is rejected, and the message names the layouts that work."""
    model = load(save_random(tmp_path, "Mistral, sliding window"))
    policy = utils.TokenLogprobs(model, 1.0, 100)
    utils.check_forward(policy, layout, 2, 256)

    def without_window(batch, model):
        if batch.ends is not None:
            mask = attention.dense_mask(batch.ends, batch.position_ids, None, torch.float32)
        elif batch.attention_mask is not None:
            mask = batch.attention_mask
            causal = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
            visible = causal[None, None] & mask[:, None, None].bool()
            mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        else:
            return {}
        return {"attention_mask": mask}

    monkeypatch.setattr(utils, "attention_inputs", without_window)
    message = rejected(capsys, utils.check_forward, policy, layout, 2, 256)
    assert f"--batch_layout {layout}:" in message and "packed" in message
    utils.check_forward(policy, layout, 2, WINDOW)  # a window that no row can reach is none


def test_the_probe_of_a_large_window_is_no_longer_than_a_row(tmp_path, monkeypatch):
    """A window of 4,096 costs nothing where rows have at most 100 tokens."""
    model = load(save_random(tmp_path, "Mistral, sliding window", sliding_window=4096))
    lengths = []
    forward = model.base_model.forward

    def noted(*args, input_ids, **kwargs):
        lengths.append(input_ids.shape[1])
        return forward(*args, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(model.base_model, "forward", noted)
    utils.check_forward(utils.TokenLogprobs(model, 1.0, 100), "shared", 2, 100)
    assert max(lengths) < 30


def test_rotary_embeddings_that_depend_on_the_batch_are_refused(tmp_path, capsys):
    """Beyond 256 tokens this Phi-3 rotates a short sequence by what the longest of its batch needs."""
    model = load(save_random(tmp_path, "Phi-3, sliding window, longrope"))
    policy = utils.TokenLogprobs(model, 1.0, 100)
    utils.check_forward(policy, "padded", 2, 256)
    message = rejected(capsys, utils.check_forward, policy, "padded", 2, 257)
    assert "--max_prompt_length" in message and "longrope" in message and "256" in message
    short, long = long_samples()[3], long_samples()[2]
    long.response_ids = np.append(long.response_ids, [5] * 100)  # 330 tokens: beyond
    alone = plain(model, [short])
    with torch.no_grad():
        together = in_layout(policy, [short, long], "padded")[: len(alone)]
    assert (alone - together).abs().max() > 1e-2


def test_sdpa_that_would_drop_a_soft_cap_is_not_used(tmp_path, capsys):
    """Gemma 2's attention scores are capped in eager attention alone; gpt-oss has eager alone."""
    folder = save_random(tmp_path / "gemma", "Gemma 2, sliding window, soft caps")
    assert load(folder).config._attn_implementation == "eager"
    assert "softcapping" in rejected(capsys, load, folder, attn_implementation="sdpa")
    eager = load(folder)
    from transformers import AutoModelForCausalLM

    sdpa = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    samples = long_samples()[:1]
    assert (plain(eager, samples) - plain(sdpa, samples)).abs().mean() > 1e-3, "the reason is gone"
    folder = save_random(tmp_path / "oss", "gpt-oss, sliding window, sinks")
    assert load(folder).config._attn_implementation == "eager"


@pytest.mark.parametrize("name, fields", [
    ("OPT", {"dropout": 0.5, "attention_dropout": 0.5, "layerdrop": 0.5}),
    ("GPT-2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
    ("Qwen2", {"attention_dropout": 0.5}),
])  # fmt: skip
def test_dropout_is_off(tmp_path, name, fields):
    """In train mode the model is one function, also where the probability is no ``nn.Dropout``."""
    model = load(save_random(tmp_path, name, **fields))
    assert model.training
    samples = make_samples(1, 1)
    assert torch.equal(plain(model, samples), plain(model, samples))


@pytest.mark.parametrize("field", ["attention_dropout", "resid_pdrop"])
def test_an_override_that_asks_for_dropout_is_refused(tmp_path, capsys, field):
    name = "Qwen2" if field == "attention_dropout" else "GPT-2"
    folder = save_random(tmp_path, name)
    load(folder, override_config=f'{{"{field}": 0.0}}')
    message = rejected(capsys, load, folder, override_config=f'{{"{field}": 0.3}}')
    assert "--override_config" in message and field in message and "without dropout" in message


def test_stop_ids_of_a_composite_config(capsys):
    """The config of a model with several modalities has its stop ids in the text part, or nowhere."""
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma3", text_config={"vocab_size": 320, "eos_token_id": [7, 9]})
    assert not hasattr(config, "eos_token_id"), "no field at the top"
    model = SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=3))
    assert pretrained.stop_token_ids(model, SimpleNamespace(eos_token_id=2)) == [2, 3, 7, 9]
    model.generation_config.eos_token_id = None
    config.text_config.eos_token_id = None
    assert pretrained.stop_token_ids(model, SimpleNamespace(eos_token_id=2)) == [2]
    assert "set eos_token_id" in rejected(capsys, pretrained.stop_token_ids, model, SimpleNamespace(eos_token_id=None))


# --------------------------------------------------------------------------------------------- a reference that moves


def as_engine(model):
    """Return the part of a DeepSpeed engine below ZeRO-3 that ``current_weights`` reads: the model inside."""
    return SimpleNamespace(module=SimpleNamespace(model=model))


def two_models(tmp_path, dtype: torch.dtype, **changes):
    """Two random models of one architecture: (what the reference is at first, the policy it moves to)."""
    folder = save_random(tmp_path, "Qwen2", **changes)
    args = Args(model_name_or_path=str(folder))
    first, second = (pretrained.load_model(args, dtype, "eager") for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in second.parameters():
            weight.add_(0.01 * torch.randn(weight.shape, generator=generator).to(dtype))
    return first.requires_grad_(False), second


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("alpha", [0.25, 0.5, 1.0])
def test_every_weight_of_a_moving_reference_moves_once(tmp_path, tied, alpha):
    """By alpha of the distance, also the embedding that is the output head as well."""
    model, policy = two_models(tmp_path, torch.float32, tie_word_embeddings=tied)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    utils.MovingReference(utils.TokenLogprobs(model, 1.0, 100), alpha).move(as_engine(policy), zero_stage=2)
    for name, target in policy.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], before[name].lerp(target, alpha), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.6])
def test_a_bf16_reference_moves_by_alpha(tmp_path, alpha):
    """After twenty steps it is where twenty steps in fp32 lead, up to one rounding."""
    model, policy = two_models(tmp_path, torch.bfloat16, tie_word_embeddings=True)
    first = torch.cat([w.float().flatten() for w in model.parameters()])
    moving = utils.MovingReference(utils.TokenLogprobs(model, 1.0, 100), alpha)
    for _ in range(20):
        moving.move(as_engine(policy), zero_stage=2)
    target = torch.cat([w.float().flatten() for w in policy.parameters()])
    got = torch.cat([w.float().flatten() for w in model.parameters()])
    expected = target + (first - target) * (1 - alpha) ** 20
    moved = ((got - first) @ (target - first) / (target - first).square().sum()).item()
    assert moved == pytest.approx(1 - (1 - alpha) ** 20, abs=0.005), "fraction of the way"
    torch.testing.assert_close(got, expected.bfloat16().float(), rtol=2**-7, atol=1e-6)


def test_the_state_of_a_moving_reference_is_whole(tmp_path):
    """Saved after two steps and loaded into a new one, it continues bit for bit; the fp32 average is part of it."""
    model, policy = two_models(tmp_path, torch.bfloat16)
    straight = utils.MovingReference(utils.TokenLogprobs(model, 1.0, 100), 0.01)
    for _ in range(2):
        straight.move(as_engine(policy), zero_stage=2)
    torch.save(straight.state_dict(), tmp_path / "reference.pt")
    fresh, _ = two_models(tmp_path, torch.bfloat16)
    resumed = utils.MovingReference(utils.TokenLogprobs(fresh, 1.0, 100), 0.01)
    resumed.load_state_dict(torch.load(tmp_path / "reference.pt", weights_only=True))
    for _ in range(3):
        straight.move(as_engine(policy), zero_stage=2)
        resumed.move(as_engine(policy), zero_stage=2)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.integration
@pytest.mark.parametrize("changes", [
    pytest.param({"dtype": "bfloat16", "zero_stage": 3, "ref_policy_update": (2, 0.1)}, marks=pytest.mark.slow),
    {"dtype": "bfloat16", "offload": ("ref",), "ref_policy_update": (2, 0.1)},
    pytest.param({"zero_stage": 3, "ref_policy_update": (2, 1.0)}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_runs_with_a_moving_reference_resume_exactly(tiny, tmp_path, monkeypatch, changes):
    """Stopped after two of four steps and started again: the same KL to the reference, weights and reference."""
    kl = {"beta": 0.1, "save_every": 4, "max_logprob_diff": 0.0, "log_samples": 16}
    small = {"total_steps": 4, "learning_rate": 1e-3, "eval_prompts": 0}
    straight = tiny_args(tiny, tmp_path / "straight", **kl, **small, **changes)
    run_here(straight)
    parts = tiny_args(tiny, tmp_path / "parts", **kl, **small, **changes)
    folder = interrupted(parts, monkeypatch, after=2)
    run_here(parts)
    assert record(folder) == record(folder_of(straight))
    states = []
    for run in (folder, folder_of(straight)):
        states.append(torch.load(run / "checkpoints" / "step_000004" / "reference.pt", weights_only=True))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(name.startswith("averages") for name in states[0]) == (changes["ref_policy_update"][1] < 1)
    assert any(m["kl/k3"] > 0 for m in record(folder)["metrics"])


# ------------------------------------------------------------------------------------- optimizer steps that are dropped


@pytest.mark.integration
@pytest.mark.parametrize(
    "stage, dtype, offload",
    [(1, "bfloat16", True), (2, "bfloat16", True), (2, "bfloat16", False), (1, "float32", True)],
)
def test_a_dropped_step_is_over(tiny, tmp_path, monkeypatch, stage, dtype, offload):
    """One NaN token in the first step: that step is dropped, and the second is applied, also in bf16 with offload.

    In bf16 without offload the norm of the gradients is all that is asked.
    """
    if (dtype, offload) == ("bfloat16", False):
        monkeypatch.setattr(stage_1_and_2, "has_inf_or_nan", None)
    plain_loss, calls = grpo.token_loss, itertools.count()

    def poisoned(*args):
        loss, parts = plain_loss(*args)
        return loss * (float("nan") if next(calls) == 0 else 1.0), parts

    monkeypatch.setattr(grpo, "token_loss", poisoned)
    flags = {"zero_stage": stage, "dtype": dtype, "offload": ("optimizer",) * offload, "micro_batch_tokens": 150}
    metrics = run_here(tiny_args(tiny, tmp_path, learning_rate=1e-3, eval_prompts=0, **flags))
    assert [(m["optim/skipped"], m["optim/steps"]) for m in metrics] == [(1, 0), (0, 1)]

"""Architectures: every one is trained on its own log-probs in every layout, or refused with the layout that works.

The models are random and tiny. Those with a sliding window have one of 64 tokens, and rows of 130 to 230. When all of
the zoo has run, docs/models.md is written from what was measured.
"""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, make_samples

import utils
from grpo import Args
from runtime import batching
from runtime.records import Sample

PAGE = ROOT / "docs" / "models.md"
HEAD = """# Model architectures and batch layouts

Written by `tests/test_models.py`. Each model is random, has two layers, and is loaded as a run loads it (fp32, default
flags). Each layout is compared with plain forward passes of the model, one sample at a time, on responses beyond the
sliding window if the model has one. "exact" means that no log-prob differs by more than 1e-4 nats. "refused" means that
a run exits with code 2 before training, and names the layouts that work.

| architecture | attention | shared | padded | packed |
|---|---|---|---|---|
"""
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
MEASURED: dict[str, dict[str, float | None]] = {}  # architecture -> layout -> largest difference; None: refused
ATTENTION: dict[str, str] = {}


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
        return utils.load_model(Args(model_name_or_path=str(folder), **flags), torch.float32, "sdpa")


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
            samples.append(Sample(p, k, prompt, response, [0.0] * len(response), "stop", 0))
    return samples


def in_layout(policy, samples: list[Sample], layout: str) -> torch.Tensor:
    """Log-probs of all response tokens, [N], in rows of a layout."""
    logprobs = torch.zeros(batching.token_offsets(samples)[-1])
    for mb in batching.micro_batches(
        samples,
        list(range(len(samples))),
        layout=layout,
        budget=1000,
        rank=0,
        world_size=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    ):
        logprobs[mb.tokens] = policy(mb)[0]
    return logprobs


@torch.no_grad()
def plain(model, samples: list[Sample]) -> torch.Tensor:
    """The same, [N], from one plain forward pass of the model per sample."""
    parts = []
    for s in samples:
        ids = torch.tensor([s.prompt_ids + s.response_ids])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1].float()
        parts.append(logits.log_softmax(-1).gather(-1, torch.tensor(s.response_ids)[:, None])[:, 0])
    return torch.cat(parts)


@pytest.fixture(scope="module", autouse=True)
def page():
    """Writes docs/models.md when the whole zoo has run, and prints the table."""
    yield
    if set(MEASURED) != set(ZOO):
        return
    rows = []
    for name, measured in MEASURED.items():
        cells = [name, ATTENTION[name], *(in_words(measured[layout]) for layout in utils.LAYOUTS)]
        rows.append("| " + " | ".join(cells) + " |\n")
    table = HEAD + "".join(rows)
    print(table)
    for name, measured in MEASURED.items():
        print(name, measured)
    PAGE.write_text(table)


def in_words(difference: float | None) -> str:
    return "refused" if difference is None else "exact"


@pytest.mark.parametrize("name", list(ZOO))
def test_every_layout_is_exact_or_refused(tmp_path, capsys, name):
    """Accepted layouts differ from plain forward passes by rounding alone; refused ones by more than that."""
    model = load(save_random(tmp_path, name))
    samples = long_samples()
    expected = plain(model, samples)
    policy = utils.TokenLogprobs(model, temperature=1.0, chunk=100)
    measured = {}
    for layout in utils.LAYOUTS:
        with torch.no_grad():
            difference = (in_layout(policy, samples, layout) - expected).abs().max().item()
        if (name, layout) in REFUSED:
            with pytest.raises(SystemExit):
                utils.check_forward(policy, layout, 2, 256)
            assert "--batch_layout shared or padded" in capsys.readouterr().err
            assert difference > 1e-2
            measured[layout] = None
        else:
            utils.check_forward(policy, layout, 2, 256)
            assert difference < 1e-4, layout
            measured[layout] = difference
    ATTENTION[name] = model.config._attn_implementation
    MEASURED[name] = measured


@pytest.mark.parametrize("name", ["Mistral, sliding window", "OLMo 3, sliding window"])
def test_gradients_beyond_the_window(tmp_path, name):
    """The gradient of a sum of log-probs in shared rows is that of plain forward passes."""
    model = load(save_random(tmp_path, name))
    samples = long_samples()[:3]
    gradients = []
    for compute in (
        lambda: in_layout_with_gradient(model, samples),
        lambda: plain.__wrapped__(model, samples),
    ):
        model.zero_grad()
        compute().sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[1].norm()


def in_layout_with_gradient(model, samples: list[Sample]) -> torch.Tensor:
    return in_layout(utils.TokenLogprobs(model, 1.0, 100), samples, "shared")


@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_the_probe_is_longer_than_the_window(tmp_path, capsys, monkeypatch, layout):
    """A layout that forgets the window is refused, and the message names the layouts that work."""
    model = load(save_random(tmp_path, "Mistral, sliding window"))
    policy = utils.TokenLogprobs(model, 1.0, 100)
    utils.check_forward(policy, layout, 2, 256)

    def without_window(batch, config):
        mask = batch.attention_mask
        if layout == "shared" or mask is None or mask.dim() == 4:
            return mask
        causal = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
        visible = causal[None, None] & mask[:, None, None].bool()
        return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)

    monkeypatch.setattr(utils, "window_masks", without_window)
    with pytest.raises(SystemExit):
        utils.check_forward(policy, layout, 2, 256)
    message = capsys.readouterr().err
    assert f"--batch_layout {layout}:" in message and "packed" in message
    utils.check_forward(policy, layout, 2, WINDOW)  # a window that no row can reach is none


def test_the_probe_of_a_large_window_is_no_longer_than_a_row(tmp_path, monkeypatch):
    """A window of 4,096 costs nothing where rows have at most 100 tokens."""
    model = load(save_random(tmp_path, "Mistral, sliding window", sliding_window=4096))
    lengths = []
    monkeypatch.setattr(model.base_model, "forward", watch_lengths(model.base_model.forward, lengths))
    utils.check_forward(utils.TokenLogprobs(model, 1.0, 100), "shared", 2, 100)
    assert max(lengths) < 30


def watch_lengths(forward, lengths: list[int]):
    """``forward``, which also notes the length of the rows it is given."""

    def noted(*args, input_ids, **kwargs):
        lengths.append(input_ids.shape[1])
        return forward(*args, input_ids=input_ids, **kwargs)

    return noted


def test_rotary_embeddings_that_depend_on_the_batch_are_refused(tmp_path, capsys):
    """Beyond 256 tokens this Phi-3 rotates a short sequence by what the longest of its batch needs."""
    model = load(save_random(tmp_path, "Phi-3, sliding window, longrope"))
    policy = utils.TokenLogprobs(model, 1.0, 100)
    utils.check_forward(policy, "padded", 2, 256)
    with pytest.raises(SystemExit):
        utils.check_forward(policy, "padded", 2, 257)
    message = capsys.readouterr().err
    assert "--max_prompt_length" in message and "longrope" in message and "256" in message
    short, long = long_samples()[3], long_samples()[2]
    long.response_ids = long.response_ids + [5] * 100  # 330 tokens: beyond
    long.sampler_logprobs = [0.0] * len(long.response_ids)
    alone = plain(model, [short])
    with torch.no_grad():
        together = in_layout(policy, [short, long], "padded")[: len(alone)]
    assert (alone - together).abs().max() > 1e-2


def test_sdpa_that_would_drop_a_soft_cap_is_not_used(tmp_path, capsys):
    """Gemma 2's attention scores are capped in eager attention alone; gpt-oss has eager alone."""
    folder = save_random(tmp_path / "gemma", "Gemma 2, sliding window, soft caps")
    assert load(folder).config._attn_implementation == "eager"
    with pytest.raises(SystemExit):
        load(folder, attn_implementation="sdpa")
    assert "soft cap" in capsys.readouterr().err
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
    with pytest.raises(SystemExit):
        load(folder, override_config=f'{{"{field}": 0.3}}')
    message = capsys.readouterr().err
    assert "--override_config" in message and field in message and "without dropout" in message


def test_stop_ids_of_a_composite_config():
    """The config of a model with several modalities has its stop ids in the text part, or nowhere."""
    from transformers import AutoConfig

    config = AutoConfig.for_model("gemma3", text_config={"vocab_size": 320, "eos_token_id": [7, 9]})
    assert not hasattr(config, "eos_token_id"), "no field at the top"
    model = SimpleNamespace(config=config, generation_config=SimpleNamespace(eos_token_id=3))
    assert utils.stop_token_ids(model, SimpleNamespace(eos_token_id=2)) == [2, 3, 7, 9]
    model.generation_config.eos_token_id = None
    config.text_config.eos_token_id = None
    assert utils.stop_token_ids(model, SimpleNamespace(eos_token_id=2)) == [2]

"""Masks in three forms say the same; the layout that is chosen; no dense mask above its limit."""

from __future__ import annotations

import inspect
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import make_samples, rejected, tiny_args
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)
from transformers.models.llama import modeling_llama as llama

import utils
from grpo import Args
from runtime.data.samples import Sample
from runtime.training import attention, batching, pretrained
from runtime.training.memory import default_sizes

CPU = torch.device("cpu")
# FlexAttention takes no heads of less than 16 on a GPU.
SHAPE = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 320}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.2}


def long_samples(seed: int = 0, letters: int = 2, group: int = 5) -> list[Sample]:
    """Two groups whose rows have several blocks of 128, with common prefixes of all lengths and a response of one."""
    r = random.Random(seed)
    samples = []
    for p in range(2):
        prompt = [r.randrange(3, 300) for _ in range(r.randrange(1, 300))]
        stem = [r.randrange(3, 300) for _ in range(300)]
        for k in range(group):
            tail = [r.randrange(3, 3 + letters) for _ in range(r.randrange(1, 200))]
            response = stem[: r.randrange(300)] + tail if k else [5]
            samples.append(Sample(p, k, prompt, response, [0.0] * len(response), "stop", [(1, 0)]))
    return samples


def rows_of(samples: list[Sample], layout: str, budget: int = 10_000) -> list[batching.MicroBatch]:
    everything = list(range(len(samples)))
    how = {"layout": layout, "budget": budget, "rank": 0, "world_size": 1, "device": CPU}
    return list(batching.micro_batches(samples, everything, **how))


def model_with(implementation: str, window: int | None = None):
    """A random model with grouped heads, the same weights for every implementation."""
    config = LlamaConfig(**SHAPE, **HEADS)
    if window is not None:
        config = MistralConfig(**SHAPE, **HEADS, sliding_window=window)
    AttentionInterface.register("varlen", attention.varlen_attention)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


@torch.no_grad()
def logprobs_of(model, samples: list[Sample], layout: str, budget: int = 10_000) -> torch.Tensor:
    policy = utils.TokenLogprobs(model, 1.0, 1000)
    found = torch.full((batching.token_offsets(samples)[-1],), torch.nan)
    for mb in rows_of(samples, layout, budget):
        found[mb.tokens] = policy(mb)[0]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_blocks_are_those_of_the_rule(seed):
    """Number and place of the partial and of the full blocks, without looking at a pair of tokens."""
    (mb,) = rows_of(long_samples(seed), "shared")
    ends = mb.ends
    rows, width = ends.shape
    assert width > 3 * 128 and width % 128 != 0, "a short last block"
    expected = create_block_mask(lambda b, h, q, k: (k <= q) & (q < ends[b, k]), rows, None, width, width, device="cpu")
    found = attention.block_mask(ends, mb.position_ids, None)
    assert found.shape == expected.shape
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert found.full_kv_num_blocks.sum() > 0 and (found.kv_num_blocks < found.kv_indices.shape[-1]).any()


@pytest.mark.parametrize("window", [1, 100, 200, 500])
def test_no_block_of_a_window_is_skipped_that_is_seen(window):
    """Skipped blocks have no visible pair, full ones no hidden pair; inside, the rule is the dense mask."""
    (mb,) = rows_of(long_samples(1), "shared")
    width = mb.ends.shape[1]
    dense = attention.dense_mask(mb.ends, mb.position_ids, window, torch.float32)[:, 0] == 0
    found = attention.block_mask(mb.ends, mb.position_ids, window)
    places = torch.arange(width)
    for b in range(len(dense)):
        rule = found.mask_mod(torch.tensor(b), None, places[:, None], places[None])
        assert torch.equal(rule, dense[b])
    blocks = -(-width // 128)
    grown = F.pad(dense, (0, blocks * 128 - width, 0, blocks * 128 - width))
    pairs = grown.unflatten(2, (blocks, 128)).unflatten(1, (blocks, 128)).sum((2, 4))
    visited, full = torch.zeros_like(pairs), torch.zeros_like(pairs)
    for kind, number, index in (
        (visited, found.kv_num_blocks, found.kv_indices),
        (visited, found.full_kv_num_blocks, found.full_kv_indices),
        (full, found.full_kv_num_blocks, found.full_kv_indices),
    ):
        for b, q in np.ndindex(len(dense), blocks):
            kind[b, q, index[b, 0, q, : number[b, 0, q]].long()] += 1
    assert visited.max() == 1, "a block twice"
    assert (pairs[visited == 0] == 0).all()
    assert (pairs[full == 1] == 128 * 128).all()
    assert (visited.sum() < blocks * (blocks + 1) / 2 * len(dense)) or window > 400


@pytest.mark.parametrize("window", [None, 60])
def test_flex_attention_takes_the_blocks(window):
    """Log-probs of shared rows by transformers' FlexAttention, not compiled, are those of single rows by sdpa."""
    samples = long_samples(2)
    expected = logprobs_of(model_with("sdpa", window), samples, "padded", budget=1)
    with torch.compiler.set_stance("force_eager"):
        found = logprobs_of(model_with("flex_attention", window), samples, "shared")
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    assert (logprobs_of(model_with("sdpa", window), samples, "shared") - expected).abs().max() < 2e-5


@pytest.mark.parametrize("without_window", [2, 1, 0])
def test_every_layer_has_its_own_window(without_window):
    """Two layers, the first of them without the window; where all are, the config has one all the same."""
    window = {"use_sliding_window": True, "sliding_window": 60, "max_window_layers": without_window}
    config = Qwen2Config(**SHAPE, **HEADS, **window)
    assert config.layer_types.count("full_attention") == without_window and config.sliding_window == 60
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    samples = long_samples(2)
    expected = logprobs_of(model, samples, "padded", budget=1)
    torch.testing.assert_close(logprobs_of(model, samples, "shared"), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("heads, keys", [(9, 3), (4, 4), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_attention_is_eager_attention(dtype, heads, keys):
    """Two rows of 50 places with a tree's mask, heads of 64: in bf16 the same bits, although its softmax is in bf16."""
    samples = long_samples()
    visible = attention.dense_mask(rows_of(samples, "shared")[0].ends, None, None, dtype)[:2, :, :50, :50]
    shapes = [(2, 50, heads, 64), (2, 50, keys, 64), (2, 50, keys, 64)]
    torch.manual_seed(0)
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    slope = torch.randn(2, 50, heads, 64).to(dtype)
    results = {}
    for name, function in (("eager", llama.eager_attention_forward), ("grouped", attention.grouped_attention)):
        inputs = [x.clone().transpose(1, 2).requires_grad_() for x in given]  # as a model hands them over
        module = SimpleNamespace(num_key_value_groups=heads // keys, training=True)
        output = function(module, *inputs, visible, 0.125)[0]
        assert output.shape == slope.shape and output.is_contiguous()
        output.backward(slope)
        results[name] = [output.detach(), *(x.grad for x in inputs)]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6}[dtype]
    if dtype == torch.bfloat16:
        assert torch.equal(results["grouped"][0], results["eager"][0])
    for eager, grouped in zip(results["eager"], results["grouped"], strict=True):
        assert (grouped - eager).norm() < tolerance * eager.norm()


def test_grouped_attention_without_a_scale_or_a_mask():
    """PyTorch's own, which scales by the root of the dimension and lets every place see all."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 7, 16), torch.randn(2, 3, 7, 16), torch.randn(2, 3, 7, 16)
    found, _ = attention.grouped_attention(None, query, key, value, None)
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(found, expected.transpose(1, 2))


@pytest.mark.parametrize("name, limit", [("flex_attention", 64), ("sdpa", 8)])
def test_flex_attention_may_have_more_compiled_versions(tiny, tmp_path, name, limit):
    """Of one kernel per kind of mask and batch size; a user's own limit stays where no flex_attention is used."""
    with torch._dynamo.config.patch(recompile_limit=8):
        pretrained.load_model(tiny_args(tiny, tmp_path), torch.float32, name)
        assert torch._dynamo.config.recompile_limit == limit


def one_by_one(query, key, value, borders, borders_k, longest, longest_k, **options):
    """Compute varlen_attn sequence by sequence: [B * S, H, D] -> the same."""
    bound = inspect.signature(real_varlen_attn).bind(
        query, key, value, borders, borders_k, longest, longest_k, **options
    )
    left, right = bound.arguments["window_size"]
    assert right == 0, "causal"
    assert borders.dtype == torch.int32 and borders[-1] == len(query) and (borders.diff() <= longest).all()
    parts = []
    for first, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        q, k, v = (x[first:end].transpose(0, 1) for x in (query, key, value))
        seen = torch.ones(end - first, end - first, dtype=torch.bool).tril()
        if left >= 0:
            seen = seen.triu(-left)
        options = {"attn_mask": seen, "scale": bound.arguments["scale"], "enable_gqa": bound.arguments["enable_gqa"]}
        parts.append(F.scaled_dot_product_attention(q, k, v, **options).transpose(0, 1))
    return torch.cat(parts)


real_varlen_attn = varlen.varlen_attn


@pytest.mark.parametrize("window", [None, 60])
def test_packed_rows_reach_varlen_with_their_borders(monkeypatch, window):
    """PyTorch has the kernel for GPUs alone; here its arguments are bound to its signature and computed one by one."""
    calls = []

    def counted(*args, **options):
        calls.append(len(args[3]) - 1)
        return one_by_one(*args, **options)

    monkeypatch.setattr(varlen, "varlen_attn", counted)
    samples = long_samples(4)
    expected = logprobs_of(model_with("sdpa", window), samples, "padded", budget=1)
    model = model_with("varlen", window)
    torch.testing.assert_close(logprobs_of(model, samples, "packed"), expected, rtol=0, atol=2e-5)
    assert calls == [len(samples)] * 2, "one call for each layer, with a sequence for each sample"
    torch.testing.assert_close(logprobs_of(model, samples, "padded"), expected, rtol=0, atol=2e-5)


def choice(cuda: bool, dtype=torch.float32, resolved: str = "sdpa", **changes) -> tuple[str, str]:
    args = Args(**changes)
    return attention.choose_layout(args, default_sizes(args, cuda), cuda, dtype, resolved)[:2]


HALF = torch.bfloat16
LONG = {"max_prompt_length": 512, "max_response_length": 8192}


@pytest.mark.parametrize(
    "chosen, expected",
    [
        (choice(False), ("shared", "sdpa")),
        (choice(False, HALF, "grouped"), ("shared", "grouped")),
        (choice(False, **LONG), ("shared", "sdpa")),
        (choice(False, micro_batch_tokens=32768), ("shared", "sdpa")),  # a group has no more than 512 tokens
        (choice(False, micro_batch_tokens=32768, **LONG), ("padded", "sdpa")),
        (choice(False, attn_implementation="flash_attention_2", resolved="flash_attention_2")[:1], ("packed",)),
        (choice(True, HALF), ("shared", "sdpa")),  # 512 places: no kernel is compiled for such masks
        (choice(True), ("shared", "sdpa")),
        (choice(True, HALF, max_response_length=224), ("shared", "sdpa")),
        (choice(True, HALF, max_response_length=225), ("shared", "flex_attention")),  # more than 2048 places
        (choice(True, HALF, max_response_length=1024), ("shared", "flex_attention")),
        (choice(True, max_response_length=1024), ("shared", "flex_attention")),
        (choice(True, max_response_length=200, micro_batch_tokens=65536), ("shared", "flex_attention")),  # 464 MiB
        (choice(True, HALF, micro_batch_tokens=65536, **LONG), ("shared", "flex_attention")),  # a dense mask has 8 GiB
        (choice(True, HALF, num_samples_per_prompt_rollout=1), ("packed", "varlen")),
        (choice(True, HALF, max_prompt_length=256, max_response_length=8192), ("packed", "varlen")),
        (choice(True, max_prompt_length=256, max_response_length=8192), ("shared", "flex_attention")),
        (choice(True, HALF, batch_layout="packed"), ("packed", "varlen")),
        (choice(True, HALF, batch_layout="padded"), ("padded", "sdpa")),
        (choice(True, HALF, attn_implementation="sdpa", **LONG), ("shared", "sdpa")),
        (choice(True, attn_implementation="sdpa", micro_batch_tokens=65536, **LONG), ("padded", "sdpa")),
    ],
)
def test_the_layout_that_is_chosen(chosen, expected):
    assert chosen == expected


def test_a_mask_above_the_limit_is_refused(capsys):
    """The bound holds for what is made, and the message names the flag and what helps."""
    args = Args(batch_layout="shared", micro_batch_tokens=32768, **LONG)
    model = model_with("sdpa")
    message = rejected(capsys, attention.check_mask_size, model, "shared", default_sizes(args, False), args)
    assert "--micro_batch_tokens 32768" in message and "4.0 GiB" in message and "--batch_layout padded" in message
    attention.check_mask_size(model, "padded", default_sizes(args, False), args)
    attention.check_mask_size(model_with("flex_attention"), "shared", default_sizes(args, True), args)
    small = Args(batch_layout="shared", max_prompt_length=512, max_response_length=15872)
    attention.check_mask_size(model, "shared", default_sizes(small, False), small)  # one row of 16,384 tokens


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_no_mask_is_larger_than_announced(layout):
    """Those that are made here, against ``mask_bytes`` of the same flags."""
    samples = make_samples(6, 5, seed=2)
    prompt = max(len(s.prompt_ids) for s in samples)
    response = max(len(s.response_ids) for s in samples)
    args = Args(max_prompt_length=prompt, max_response_length=response, num_samples_per_prompt_rollout=5)
    for budget in (prompt + response, 50, 100, 1000):
        announced = attention.mask_bytes(layout, "eager", budget, torch.float32, args)
        for mb in rows_of(samples, layout, budget):
            rows, width = mb.input_ids.shape
            needed = 4 * rows * width * width
            if layout == "shared":
                assert attention.dense_mask(mb.ends, mb.position_ids, None, torch.float32).nbytes == needed
            assert needed <= announced or (layout == "padded" and rows == 1)


def test_an_architecture_without_the_kernel_has_what_transformers_gives_it(capsys):
    """Only as long as the run chooses; what a flag asks for is taken or rejected."""
    llama, gpt2, sinks = LlamaConfig(), GPT2Config(), GptOssConfig()
    for attention_name in ("flex_attention", "varlen"):
        assert pretrained.attention_for(llama, attention_name, "auto") == attention_name
    assert pretrained.attention_for(gpt2, "flex_attention", "auto") is None
    assert pretrained.attention_for(gpt2, "flex_attention", "flex_attention") == "flex_attention"
    assert pretrained.attention_for(sinks, "varlen", "auto") is None
    assert pretrained.attention_for(llama, "sdpa", "auto") is None
    assert pretrained.attention_for(llama, "sdpa", "flash_attention_2") is None
    assert pretrained.attention_for(llama, "eager", "auto") == "eager"
    assert {pretrained.attention_for(llama, "grouped", flag) for flag in ("auto", "grouped")} == {"grouped"}
    for own in (sinks, Gemma2Config()):
        assert pretrained.attention_for(own, "grouped", "auto") == "eager"
        assert "--attn_implementation grouped" in rejected(capsys, pretrained.attention_for, own, "grouped", "grouped")
    capped = Gemma2Config()
    assert {pretrained.attention_for(capped, name, "auto") for name in ("varlen", "sdpa")} == {"eager"}
    assert pretrained.attention_for(capped, "flex_attention", "auto") == "flex_attention"
    said = rejected(capsys, pretrained.attention_for, capped, "varlen", "varlen")
    assert "--attn_implementation varlen leaves out this model's attention logit softcapping" in said


def test_flags_that_a_cpu_cannot_serve_are_refused(capsys):
    for name in ("flex_attention", "varlen"):
        with pytest.raises(SystemExit):
            pretrained.resolve_device(Args(attn_implementation=name))
        assert f"--attn_implementation {name} needs a GPU" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 60])
def test_on_a_gpu_all_ways_have_one_gradient(dtype, window):
    """Shared rows by FlexAttention and by a dense mask, packed rows by varlen, padded rows by sdpa: one function."""
    device = torch.device("cuda", 0)
    samples = long_samples(5)
    ways = [("padded", "sdpa"), ("shared", "sdpa"), ("packed", "sdpa"), ("shared", "flex_attention")]
    if dtype == torch.bfloat16:
        ways.append(("packed", "varlen"))
    found = []
    for layout, implementation in ways:
        model = model_with(implementation, window).to(device, dtype)
        policy = utils.TokenLogprobs(model, 1.0, 1000)
        placement = {"layout": layout, "budget": 4096, "rank": 0, "world_size": 1, "device": device}
        logprobs_N = torch.zeros(batching.token_offsets(samples)[-1], device=device)
        for mb in batching.micro_batches(samples, list(range(len(samples))), **placement):
            assert layout != "shared" or mb.input_ids.shape[1] % 128 == 0
            logprobs_T = policy(mb)[0]
            (logprobs_T * (1 + mb.tokens % 3)).sum().backward()
            logprobs_N[mb.tokens] = logprobs_T.detach()
        found.append((logprobs_N, torch.cat([p.grad.flatten().float() for p in model.parameters()])))
    limits = (1e-2, 2e-2) if dtype == torch.bfloat16 else (1e-3, 1e-3)
    for (logprobs_N, gradient), (layout, implementation) in zip(found, ways, strict=True):
        difference = (logprobs_N - found[0][0]).abs().mean().item()
        error = ((gradient - found[0][1]).norm() / found[0][1].norm()).item()
        print(f"{layout} {implementation} {dtype}: {difference:.1e} nats, gradient {error:.1e}")
        assert difference < limits[0] and error < limits[1]

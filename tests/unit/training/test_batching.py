"""Micro-batches, padding, layout and chunks cannot change a gradient; every token, the EOS and T must."""

from __future__ import annotations

import copy
import json
import math
import random
import time
from types import SimpleNamespace

import benchmark
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import make_samples, rejected

import ppo
import utils
from grpo import Args, loss_weights
from runtime.data.samples import Sample
from runtime.training import attention, batching, memory

CPU = torch.device("cpu")


def batches(samples, layout="shared", budget=10_000, indices=None, rank=0, world_size=1):
    indices = list(range(len(samples))) if indices is None else indices
    return list(
        batching.micro_batches(
            *(samples, indices), layout=layout, budget=budget, rank=rank, world_size=world_size, device=CPU
        )
    )


def gradient(model, samples, mbs, norm="token", chunk=1000, temperature=1.0):
    """Gradient of the weighted sum of advantage * logprob, as the scripts compute it; [parameters] flat."""
    policy = utils.TokenLogprobs(model, temperature, chunk)
    weights = loss_weights(samples, list(range(len(samples))), Args(loss_norm=norm))
    advantages = torch.randn(len(weights), generator=torch.Generator().manual_seed(1))
    advantages, weights = F.pad(advantages, (0, 1)), F.pad(weights, (0, 1))  # the place of idle micro-batches
    model.zero_grad()
    for mb in mbs:
        logprobs, _, _ = policy(mb)
        (logprobs * advantages[mb.tokens] * weights[mb.tokens]).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def reference_gradient(model, samples, norm="token", temperature=1.0):
    """The same from one plain forward pass a sample: no rows, no masks, no chunks."""
    weights = loss_weights(samples, list(range(len(samples))), Args(loss_norm=norm))
    advantages = torch.randn(len(weights), generator=torch.Generator().manual_seed(1))
    offsets = batching.token_offsets(samples)
    model.zero_grad()
    for i, s in enumerate(samples):
        ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1] / temperature
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, len(s.prompt_ids) :, None])[:, 0]
        where = slice(offsets[i], offsets[i + 1])
        (logprobs * advantages[where] * weights[where]).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def close(a, b, tolerance=1e-5):
    error = ((a - b).norm() / b.norm()).item()
    assert error < tolerance, f"relative error {error:.2e}"


def test_shared_rows_on_a_cpu_are_short():
    """8 responses of 300 tokens: rows of at most 1,024 in one micro-batch; a sample of 1,500 makes a longer row."""
    long = []
    for number, length in enumerate([300] * 8):
        ids = [10 + (7 * place + number) % 500 for place in range(length)]
        long.append(Sample(0, number, [5] * 40, [20 + number, *ids[1:]], [0.0] * length, "stop", []))
    (mb,) = batches(long, budget=3072)
    assert mb.input_ids.shape == (3, 40 + 3 * 299)  # nothing is predicted from the last token
    longest = Sample(0, 8, [5] * 40, [30] * 1460, [0.0] * 1460, "stop", [])
    widths = [mb.input_ids.shape[1] for mb in batches([*long, longest], budget=3072)]
    assert max(widths) == 1499
    assert batches(long, layout="padded", budget=3072)[0].input_ids.shape == (8, 339)


@pytest.mark.parametrize("norm", ["token", "sequence", "constant"])
@pytest.mark.parametrize("layout", ["shared", "padded", "packed"])
def test_layouts_equal_plain_forward_passes(tiny_model, samples, layout, norm):
    close(gradient(tiny_model, samples, batches(samples, layout), norm), reference_gradient(tiny_model, samples, norm))


@pytest.mark.parametrize("layout", ["shared", "padded", "packed"])
def test_what_responses_begin_with_is_computed_once(tiny_model, layout):
    """Words of two letters: samples that are equal, that have the same start, that are the beginning of another."""
    samples, letters = make_samples(3, 8), random.Random(5)
    for s in samples:
        s.response_ids = np.array([letters.choice((5, 9)) for _ in range(letters.randrange(1, 7))], dtype=np.int32)
    beginnings = {(s.prompt_id, *s.response_ids[:n]) for s in samples for n in range(1, len(s.response_ids))}
    prompts = {s.prompt_id: len(s.prompt_ids) for s in samples}
    assert len({(s.prompt_id, *s.response_ids) for s in samples}) < len(samples), "two that are equal"
    mbs = batches(samples, layout, budget=1 if layout == "padded" else 10_000)
    close(gradient(tiny_model, samples, mbs), reference_gradient(tiny_model, samples))
    if layout == "shared":
        (mb,) = mbs
        assert (mb.input_ids > 0).sum() == sum(prompts.values()) + len(beginnings)
    elif layout == "padded":
        computed = sum(mb.input_ids.numel() for mb in mbs)
        assert computed == sum(len(s.prompt_ids) + len(s.response_ids) - 1 for s in samples)


def test_a_token_sees_the_tokens_on_its_own_path_and_no_others():
    """300 random trees of two letters: the subtree's end of each token says what a walk from leaf to root says."""
    draw = random.Random(1)
    for _ in range(300):
        prompt = [draw.randrange(5) for _ in range(draw.randrange(1, 6))]
        samples = []
        for k in range(draw.randrange(1, 8)):
            response = [draw.randrange(2) for _ in range(draw.randrange(1, 9))]
            samples.append(Sample(0, k, prompt, response, [0.0] * len(response), "stop", []))
        (mb,) = batches(samples)
        visible = attention.dense_mask(mb.ends, mb.position_ids, None, torch.float32)[0, 0] == 0
        assert torch.equal(visible, visible_on_paths(mb, samples))


def visible_on_paths(mb: batching.MicroBatch, samples) -> torch.Tensor:
    """Return the visible positions of each place of a row of one tree, [S, S], from the prefix it stands for."""
    prompt = tuple(samples[0].prompt_ids)
    place: dict[tuple[int, ...], int] = {prompt[:n]: n - 1 for n in range(1, len(prompt) + 1)}
    copies = iter(mb.copies.tolist())
    for s in sorted_like(mb, samples):
        for n in range(len(s.response_ids)):
            place[prompt + tuple(s.response_ids[:n])] = mb.predict[next(copies)].item()
    width = mb.input_ids.shape[1]
    assert len(place) == width, "each prefix is computed once"
    visible = torch.zeros(width, width, dtype=torch.bool)
    for prefix, q in place.items():
        for n in range(1, len(prefix) + 1):
            visible[q, place[prefix[:n]]] = True
    return visible


def sorted_like(mb: batching.MicroBatch, samples) -> list:
    """The samples in the order in which their tokens stand in ``mb.tokens``."""
    offsets = batching.token_offsets(samples)
    starts = dict(zip(offsets, samples, strict=False))
    return [starts[t] for t in mb.tokens.tolist() if t in starts]


@pytest.mark.parametrize("layout", ["shared", "padded", "packed"])
@pytest.mark.parametrize("shape", ["a tree", "ragged", "one token each", "one sample", "one token"])
def test_the_gradient_of_every_shape(tiny_model, layout, shape):
    """Random trees of two letters, lengths from 1 to 90, and the smallest there are: plain forward passes' gradient."""
    draw = random.Random(shape)
    groups, group = {"one sample": (1, 1), "one token": (1, 1)}.get(shape, (3, 6))
    longest = {"a tree": 9, "ragged": 90, "one sample": 20}.get(shape, 1)
    letters = range(3, 5) if shape == "a tree" else range(3, 300)
    samples = []
    for p in range(groups):
        prompt = [draw.choice(letters) for _ in range(draw.randrange(1, 30))]
        for k in range(group):
            response = [draw.choice(letters) for _ in range(draw.randrange(1, longest + 1))]
            samples.append(Sample(p, k, prompt, response, [0.0] * len(response), "stop", []))
    expected = reference_gradient(tiny_model, samples)
    for budget in (120, 10_000):
        close(gradient(tiny_model, samples, batches(samples, layout, budget)), expected)


def test_a_sample_in_json_is_the_sample_again():
    """Ids and log-probs are arrays of 4 bytes a token; a checkpoint has them as numbers, and loses nothing."""
    sample = make_samples(1, 1)[0]
    sample.sampler_logprobs[0] = -0.1
    again = Sample(**json.loads(json.dumps(vars(sample), default=np.ndarray.tolist)))
    for name in ("response_ids", "sampler_logprobs"):
        array = getattr(sample, name)
        assert array.itemsize == 4 and getattr(again, name).dtype == array.dtype
        assert np.array_equal(getattr(again, name), array)
    arrays = ("response_ids", "sampler_logprobs", "weight_versions", "reward_steps")  # the last two have tuples
    rest = [{name: v for name, v in vars(s).items() if name not in arrays} for s in (sample, again)]
    assert rest[0] == rest[1] and [tuple(v) for v in again.weight_versions] == sample.weight_versions


def test_flat_arrays_have_a_place_for_idle_tokens():
    samples = make_samples(2, 3)
    offsets = batching.token_offsets(samples)
    flat = batching.flat([s.sampler_logprobs for s in samples], CPU)
    assert flat.dtype == torch.float32 and len(flat) == offsets[-1] + 1 and flat[-1] == 0
    assert torch.equal(flat[:-1], torch.tensor([x for s in samples for x in s.sampler_logprobs]))
    rewards = [0.5 + i for i in range(len(samples))]
    spread = batching.per_token(rewards, offsets)
    assert spread.tolist() == [rewards[i] for i, s in enumerate(samples) for _ in s.response_ids] + [0.0]
    assert batching.flat([s.token_versions() == 1 for s in samples], CPU).tolist() == [True] * offsets[-1] + [False]


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_no_phase_counts_tokens_in_python(layout):
    """Measured 0.02 s for 200,000 tokens; a loop over tokens in any phase takes more than the limit."""
    torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
    samples = benchmark.random_samples([[1] * 256] * 2, 6, 32768, 1000)
    longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
    how = {"layout": layout, "budget": longest, "rank": 0, "world_size": 1, "device": CPU}
    places = list(range(len(samples)))
    best = math.inf
    for _ in range(3):
        started = time.process_time()
        samples = utils.gather_samples(samples)
        offsets = batching.token_offsets(samples)
        batching.flat([s.sampler_logprobs for s in samples], CPU)
        batching.per_token([s.advantage for s in samples], offsets)
        loss_weights(samples, places, Args())
        utils.sample_metrics(samples, torch.rand(1, len(samples), dtype=torch.float64), 1)
        assert sum(len(mb.tokens) for mb in batching.micro_batches(samples, places, **how)) == offsets[-1]
        best = min(best, time.process_time() - started)
    assert best < 0.2, f"{best:.2f} s of a core for {offsets[-1]} tokens"


def test_rows_on_a_gpu_are_multiples_of_128_within_the_budget():
    """The width that shared rows get there; a row is never cut, and padding never goes above the budget."""
    samples = make_samples(6, 8, seed=1)
    rows = [[batching.PrefixTree(samples, list(range(p * 8, p * 8 + 8)))] for p in range(6)]
    rows.sort(key=batching.row_length, reverse=True)
    for budget in (128, 300, 512):
        cut = batching._cut(rows, "shared", budget, batching.ROW_MULTIPLE)
        for micro_rows in cut:
            width = batching.padded_width(micro_rows, budget, batching.ROW_MULTIPLE)
            assert width % 128 == 0 and width >= batching.row_length(micro_rows[0])
            assert len(micro_rows) * width <= budget
            mb = batching._tensors(micro_rows, batching.token_offsets(samples), "shared", width)
            assert mb.ends.shape == mb.input_ids.shape == (len(micro_rows), width)
        assert sum(len(micro_rows) for micro_rows in cut) == 6
    assert batching.padded_width(rows, 100, batching.ROW_MULTIPLE) == 100


def test_a_micro_batch_is_made_while_the_one_before_is_computed(monkeypatch):
    """Not all of them before the first: a GPU would stand still meanwhile. The last one says so."""
    order = []
    plain = batching._tensors
    monkeypatch.setattr(batching, "_tensors", lambda *rest: order.append("made") or plain(*rest))
    shape = {"layout": "shared", "budget": 60, "rank": 0, "world_size": 1, "device": CPU}
    samples = make_samples(4, 4)
    last = []
    for mb in batching.micro_batches(samples, list(range(16)), **shape):
        order.append("computed")
        last.append(mb.is_last)
    assert order == ["made", "computed"] * len(last) and len(last) > 2
    assert last == [False] * (len(last) - 1) + [True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="makes a CPU out to be a GPU")
def test_a_gpu_is_given_its_micro_batches_without_waiting(monkeypatch):
    """From page-locked memory and without blocking; from other memory a copy waits for all kernels before it."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: asked.append("pinned") or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, non_blocking=False: asked.append(non_blocking) or self)
    (mb,) = batches(make_samples(1, 2))
    mb.to(torch.device("cuda", 0))
    tensors = sum(isinstance(value, torch.Tensor) for value in vars(mb).values())
    assert asked == ["pinned", True] * tensors


@pytest.mark.parametrize("layout", ["shared", "padded", "packed"])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_split_the_sum(tiny_model, samples, layout, world_size):
    """The ranks' gradients add up to one rank's, they run the same number of backward passes, no token is lost."""
    total, counts, tokens = 0, set(), []
    for rank in range(world_size):
        mbs = batches(samples, layout, budget=60, rank=rank, world_size=world_size)
        counts.add(len(mbs))
        tokens += [t for mb in mbs if not idle(mb, samples) for t in mb.tokens.tolist()]
        total = total + gradient(tiny_model, samples, mbs)
    assert len(counts) == 1
    assert sorted(tokens) == list(range(batching.token_offsets(samples)[-1]))
    close(total, reference_gradient(tiny_model, samples))


def test_more_ranks_than_samples(tiny_model):
    """A rank without work repeats a row, its tokens at the place after the last, and contributes exactly nothing."""
    samples = make_samples(1, 2)
    mbs = batches(samples, rank=4, world_size=5)
    assert [idle(mb, samples) for mb in mbs] == [True]
    assert (gradient(tiny_model, samples, mbs) == 0).all()


def idle(mb: batching.MicroBatch, samples) -> bool:
    """Return True if a micro-batch only keeps its rank in step with the others."""
    count = batching.token_offsets(samples)[-1]
    places = set(mb.tokens.tolist())
    assert places == {count} or count not in places, "idle as a whole, or not at all"
    return places == {count}


def test_an_idle_micro_batch_takes_nothing_back(monkeypatch):
    """It repeats a row that its own rank may have computed: the values of two ranks still add up to one rank's."""
    samples = make_samples(6, 1)
    for sample, n in zip(samples, (46, 52, 23, 36, 40, 8), strict=True):
        sample.prompt_ids = [sample.prompt_id + 3] * 10
        sample.response_ids = np.arange(10, 10 + n, dtype=np.int32)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: None)
    plan = [batches(samples, budget=95, rank=rank, world_size=2) for rank in range(2)]
    assert sum(idle(mb, samples) for mbs in plan for mb in mbs) == 1
    placement = {"layout": "shared", "budget": 95, "world_size": 2, "device": CPU}
    values = [ppo.values_of(lambda mb: mb.tokens + 1.0, samples, [False] * 6, rank=r, **placement)[0] for r in range(2)]
    assert sum(values).tolist() == list(range(1, 206))


def test_budget_holds_and_rows_are_balanced():
    samples = make_samples(16, 8, seed=3)
    loads = []
    for rank in range(4):
        mbs = batches(samples, budget=128, rank=rank, world_size=4)
        assert all(mb.input_ids.numel() <= 128 for mb in mbs)
        loads.append(sum(mb.input_ids.numel() for mb in mbs if not idle(mb, samples)))
    assert max(loads) < 1.25 * min(loads), loads


def test_chunks_and_checkpointing_change_nothing(tiny_model, samples):
    expected = reference_gradient(tiny_model, samples)
    close(gradient(tiny_model, samples, batches(samples), chunk=5), expected)
    model = copy.deepcopy(tiny_model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    close(gradient(model, samples, batches(samples)), expected)


def test_gradients_under_checkpointing_can_be_asked_for_one_by_one(tiny_model, samples):
    """torch.autograd.grad, by which a script can compare parts of its loss, works with the non-reentrant kind alone."""
    model = copy.deepcopy(tiny_model)
    args = Args(gradient_checkpointing=True, max_prompt_length=50, max_response_length=50)
    run = SimpleNamespace(device=torch.device("cpu"), layout="padded", sizes=memory.default_sizes(args, False))
    policy = utils.prepare_policy(model, args, run, 2)
    assert model.is_gradient_checkpointing
    loss = policy(batches(samples, "padded")[0])[0].sum()
    assert all(part.norm() > 0 for part in torch.autograd.grad(loss, list(model.model.layers.parameters())))


def test_every_rank_calls_the_head_equally_often(tiny_model, samples):
    """Ranks have unequal numbers of predictions; all know the largest at each position of the plan.

    In chunks of 4 a rank with fewer calls the head with none, as ZeRO-3 needs it, and no gradient changes.
    """
    plans = [batches(samples, budget=40, rank=rank, world_size=2) for rank in range(2)]
    assert len(plans[0]) == len(plans[1])
    for first, second in zip(*plans, strict=True):
        assert first.most_predictions == second.most_predictions
        assert first.most_predictions == max(len(first.targets), len(second.targets))
    assert any(math.ceil(len(a.targets) / 4) != math.ceil(len(b.targets) / 4) for a, b in zip(*plans, strict=True))
    calls, total = [], 0
    handle = tiny_model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    for plan in plans:
        calls.append(0)
        total = total + gradient(tiny_model, samples, plan, chunk=4)
    handle.remove()
    border = calls.index(0, 1)
    assert border == len(calls) - border > 2 * len(plans[0])
    close(total, reference_gradient(tiny_model, samples))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_temperature(tiny_model, samples, temperature):
    """Log-probs and entropy are those of softmax(logits / T)."""
    close(
        gradient(tiny_model, samples, batches(samples), temperature=temperature),
        reference_gradient(tiny_model, samples, temperature=temperature),
    )
    sample = samples[0]
    (mb,) = batches([sample], "padded")
    logprobs, entropy, _ = utils.TokenLogprobs(tiny_model, temperature, 1000)(mb)
    logits = tiny_model(torch.tensor([[*sample.prompt_ids, *sample.response_ids]])).logits[
        0, len(sample.prompt_ids) - 1 : -1
    ]
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logprobs, distribution.log_prob(mb.targets[mb.copies]), rtol=1e-4, atol=1e-5)


def test_every_response_token_and_nothing_else_is_trained(samples):
    """One term a response token, the EOS among them although pad is the same id; none for prompts or padding."""
    offsets = batching.token_offsets(samples)
    for layout in ("shared", "padded", "packed"):
        for mb in batches(samples, layout, budget=64):
            flat = mb.input_ids.flatten()
            for u, token in zip(mb.copies.tolist(), mb.tokens.tolist(), strict=True):
                where, target = mb.predict[u], mb.targets[u]
                i = max(i for i in range(len(samples)) if offsets[i] <= token)
                place = token - offsets[i]
                assert target == samples[i].response_ids[place]
                before = samples[i].prompt_ids[-1] if place == 0 else samples[i].response_ids[place - 1]
                assert flat[where] == before  # the logits of the token before predict it
    ended = [s for s in samples if s.response_ids[-1] == 2]
    assert ended and sum(mb.targets[mb.copies].eq(2).sum().item() for mb in batches(samples)) == sum(
        (s.response_ids == 2).sum() for s in samples
    )


def test_check_forward_refuses_a_model_that_caps_its_logits(tiny_model, capsys):
    policy = utils.TokenLogprobs(copy.deepcopy(tiny_model), 1.0, 1000)
    for layout in ("shared", "padded", "packed"):
        utils.check_forward(policy, layout, 2, 64)
    plain = policy.model.forward

    def capped(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = 3 * torch.tanh(output.logits / 3)
        return output

    policy.model.forward = capped
    said = rejected(capsys, utils.check_forward, policy, "shared", 2, 64)
    assert "--batch_layout shared:" in said and "no other layout works either" in said


@pytest.mark.parametrize("error", [AttributeError("no do_not_compile"), RuntimeError("sizes 3 and\n4 differ")])
@pytest.mark.parametrize("everywhere", [True, False])
def test_check_forward_quotes_the_error_of_a_forward_pass(tiny_model, capsys, error, everywhere):
    """Instead of a difference of inf nats; with the layouts that work, if there are any."""
    policy = utils.TokenLogprobs(copy.deepcopy(tiny_model), 1.0, 1000)
    plain = policy.model.base_model.forward

    def failing(*args, **kwargs):
        mask = kwargs.get("attention_mask")
        if everywhere or (mask is not None and mask.dim() == 4):  # only shared rows have such a mask
            raise error
        return plain(*args, **kwargs)

    policy.model.base_model.forward = failing
    with pytest.raises(SystemExit):
        utils.check_forward(policy, "shared", 2, 64)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{type(error).__name__}: {' '.join(str(error).split())}" in line and "inf" not in line
    assert line.endswith("no other layout works either" if everywhere else "use --batch_layout padded or packed")


def moved(model):
    """A copy with slightly different weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0)))
    return other


def test_full_vocabulary_kl_of_a_micro_batch(tiny_model, samples):
    """Against the definition; exactly 0, gradient included, against itself."""
    other = moved(tiny_model)
    policy, reference = (utils.TokenLogprobs(m, 0.7, 7) for m in (tiny_model, other))
    (mb,) = batches(samples)
    _, _, kl = policy(mb, reference)
    with torch.no_grad():
        p, q = (
            (m.lm_head(x.hidden(mb)[mb.copies]) / 0.7).log_softmax(-1)
            for m, x in ((tiny_model, policy), (other, reference))
        )
    torch.testing.assert_close(kl, (p.exp() * (p - q)).sum(-1), rtol=1e-4, atol=1e-6)
    _, _, forward = policy(mb, reference, divergence=utils.forward_kl)
    torch.testing.assert_close(forward, (q.exp() * (q - p)).sum(-1), rtol=1e-4, atol=1e-6)
    assert (forward - kl).abs().max() > 1e-4
    tiny_model.zero_grad()
    _, _, zero = policy(mb, utils.TokenLogprobs(copy.deepcopy(tiny_model), 0.7, 7))
    zero.sum().backward()
    assert zero.abs().max() < 1e-6 and max(p.grad.abs().max() for p in tiny_model.parameters()) < 1e-6


def test_the_exact_kl_is_that_of_all_ranks(tiny_model, samples, monkeypatch):
    """Here as if a second rank had found the same sums once more, and a token whose KL is 9."""
    torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
    policy = utils.TokenLogprobs(tiny_model, 1.0, 1000)
    reference = utils.TokenLogprobs(moved(tiny_model), 1.0, 1000)
    placement = {"layout": "shared", "budget": 60, "rank": 0, "world_size": 1, "device": CPU}
    run = SimpleNamespace(device=CPU, placement=placement)
    with torch.no_grad():
        alone = utils.exact_kl(policy, reference, samples, list(range(len(samples))), run)
    assert 0 < alone["kl/full"] < alone["kl/full_max"] < 9 and alone["kl/forward_full"] > 0

    def all_reduce(tensor, op=torch.distributed.ReduceOp.SUM):
        if op == torch.distributed.ReduceOp.MAX:
            tensor.clamp_(min=9.0)
        else:
            tensor.mul_(2)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with torch.no_grad():
        together = utils.exact_kl(policy, reference, samples, list(range(len(samples))), run)
    assert together == alone | {"kl/full_max": 9.0}


def test_token_stats_never_see_padding(tiny_model):
    """Sums are over the tokens that are seen: NaN elsewhere is harmless."""
    torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
    stats = utils.TokenStats(CPU)
    seen = torch.tensor([True, False, True])
    stats.add(seen, {"tokens": torch.ones(3), "x": torch.tensor([1.0, float("nan"), 3.0])})
    stats.add(~seen, {"tokens": torch.ones(3), "x": torch.tensor([float("inf"), 5.0, float("nan")])})
    assert stats.reduce() == ({"tokens": 3.0, "x": 9.0}, {"tokens": 1.0, "x": 5.0})

"""utils.ChosenLogprobs against PyTorch's own operations in fp64: values and gradients, in blocks of any size."""

from __future__ import annotations

import math

import pytest
import torch

import utils

ROWS, VOCABULARY = 23, 101


def draw(dtype: torch.dtype, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [U, V], targets [U] and the slopes of a loss in both results [2, U]."""
    generator = torch.Generator().manual_seed(5)
    logits = (scale * torch.randn(ROWS, VOCABULARY, generator=generator)).to(dtype)
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    return logits, targets, torch.randn(2, ROWS, generator=generator)


def exact(logits, targets, temperature, slopes):
    """(log-probs, entropies, gradient) by autograd in fp64."""
    x = logits.double().requires_grad_()
    log_p = (x / temperature).log_softmax(-1)
    chosen = log_p.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (chosen * slopes[0] + entropy * slopes[1]).sum().backward()
    return chosen.detach(), entropy.detach(), x.grad


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("rows", [0, 4, ROWS, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_are_those_of_autograd(monkeypatch, dtype, rows, temperature, entropy_gradient):
    """23 rows in blocks of 1 (the limit is below a row), of 4 (the last one shorter), in one, in a larger one."""
    monkeypatch.setattr(utils, "LOGIT_BLOCK", [rows * VOCABULARY + 7] * 2)
    logits, targets, slopes = draw(dtype)
    if not entropy_gradient:
        slopes[1] = 0
    expected = exact(logits, targets, temperature, slopes)
    x = logits.clone().requires_grad_()
    logprobs, entropy = utils.ChosenLogprobs.apply(x, targets, temperature, entropy_gradient)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert (logprobs.requires_grad, entropy.requires_grad) == (True, entropy_gradient)
    torch.testing.assert_close(logprobs.detach().double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.detach().double(), expected[1], rtol=1e-6, atol=3e-6)
    loss = (logprobs * slopes[0]).sum()
    if entropy_gradient:
        loss = loss + (entropy * slopes[1]).sum()
    loss.backward()
    assert x.grad.dtype == dtype
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-8}[dtype]  # of a gradient in the logits' own type
    torch.testing.assert_close(x.grad.double(), expected[2], rtol=rounding, atol=1e-6)
    assert torch.equal(x.detach(), logits), "the logits are read again by whatever made them"


@pytest.mark.parametrize("largest", [1e4, 3e38, -1e4])
def test_large_logits_neither_overflow_nor_vanish(largest):
    """Two logits far above (or below) zero and equal: each has half of the probability."""
    logits = torch.full((1, 4), largest - 1000.0 if abs(largest) < 1e5 else -largest)
    logits[0, :2] = largest
    x = logits.requires_grad_()
    logprobs, entropy = utils.ChosenLogprobs.apply(x, torch.tensor([1]), 1.0, True)
    if abs(largest) < 1e5:
        assert logprobs.item() == pytest.approx(-math.log(2), rel=1e-3)  # fp32 has steps of 1e-3 at 1e4
        assert entropy.item() == pytest.approx(math.log(2), rel=1e-6)
        (logprobs + entropy).sum().backward()
        torch.testing.assert_close(x.grad, torch.tensor([[-0.5, 0.5, 0.0, 0.0]]), rtol=1e-3, atol=1e-3)
    else:
        assert logprobs.item() == pytest.approx(-math.log(2), rel=1e-6)


@pytest.mark.parametrize("masked, temperature", [(-math.inf, 1.0), (torch.finfo(torch.float32).min, 0.7)])
def test_masked_logits_are_no_part_of_the_distribution(masked, temperature):
    """A head masks unused rows by -inf, or by the smallest number, which a temperature below 1 makes -inf."""
    logits, targets, slopes = draw(torch.float32)
    kept = torch.arange(VOCABULARY) % 3 != 1
    targets = 3 * (targets // 3)
    expected = exact(logits[:, kept], kept.cumsum(0)[targets] - 1, temperature, slopes)
    x = torch.where(kept, logits, masked).requires_grad_()
    logprobs, entropy = utils.ChosenLogprobs.apply(x, targets, temperature, True)
    (logprobs * slopes[0] + entropy * slopes[1]).sum().backward()
    found = logprobs.detach().double(), entropy.detach().double(), x.grad[:, kept].double()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=3e-6)
    assert x.grad[:, ~kept].count_nonzero() == 0


def test_no_rows():
    """A rank under ZeRO 3 without predictions calls the head all the same."""
    x = torch.empty(0, VOCABULARY, requires_grad=True)
    logprobs, entropy = utils.ChosenLogprobs.apply(x, torch.empty(0, dtype=torch.long), 0.7, True)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert x.grad.shape == (0, VOCABULARY)


def test_a_second_derivative_is_refused():
    """It would be wrong without a word: the backward pass is written by hand and not differentiated."""
    logits, targets, _ = draw(torch.float32)
    x = logits.requires_grad_()
    logprobs, _ = utils.ChosenLogprobs.apply(x, targets, 1.0, False)
    (slope,) = torch.autograd.grad(logprobs.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()

"""The claims of kl_estimators.py by exact enumeration in float64: nothing is sampled, tolerances are of rounding only.

The formulas here are written a second time, from their definitions, and differentiated by autograd.
"""

import importlib
import itertools
import math
import sys
from pathlib import Path

import pytest
import torch
from helpers import kl_loss
from torch import Tensor

import grpo
import kl_estimators as kl
import ppo
import utils
from runtime.arguments import flags

torch.set_num_threads(1)

SAMPLED = ("k1", "k2", "k3", "k4", "abs")
GOLDEN = {"rkl": 0.23075419613703413, "fkl": 0.29186807946257853, "k2": 0.19314357742993615}
GRAD_REVERSE = [0.02696176, -0.11349143, 0.10120495, 0.07286998, -0.08754525]
GRAD_FORWARD = [0.06821676, -0.1410833, 0.16894041, 0.07431604, -0.17038992]


def values_of(logp: Tensor, old: Tensor, ref: Tensor) -> dict[str, Tensor]:
    """The value of each sampled estimator, as grpo.py has it."""
    return {name: grpo.kl_value(name, logp, old, ref) for name in SAMPLED}


def f64(x) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def grad(x: Tensor, theta: Tensor) -> Tensor:
    return torch.autograd.grad(x, theta, retain_graph=True)[0]


def kl_of(p: Tensor, q: Tensor) -> Tensor:
    """KL(p||q) of log-probs, over the last axis."""
    return (p.exp() * (p - q)).sum(-1)


def close(a, b, tolerance: float = 1e-10) -> bool:
    return torch.allclose(a, b, rtol=0, atol=tolerance)


class Case:
    """Policies over a few tokens, each token once: weights turn per-token terms into expectations under the sampler."""

    def __init__(self, theta=kl.THETA, ref=kl.REF, old=kl.OLD, fresh: bool = False):
        self.theta = f64(theta).requires_grad_()
        self.logp, self.ref = self.theta.log_softmax(-1), f64(ref).log_softmax(-1)
        self.old = self.logp.detach() if fresh else f64(old).log_softmax(-1)
        self.weights, self.mask = self.old.exp(), torch.ones(len(theta), dtype=torch.bool)
        self.d = self.logp - self.ref
        self.reverse, self.forward = kl_of(self.logp, self.ref), kl_of(self.ref, self.logp)

    def grad(self, x: Tensor) -> Tensor:
        return grad(x, self.theta)

    def values(self) -> dict[str, Tensor]:
        return values_of(self.logp, self.old, self.ref)


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def random_cases(n: int):
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        yield torch.randn(3, 5, generator=generator, dtype=torch.float64).tolist()


# Values


def test_values_at_known_points():
    d = f64([-5, -1, -0.1, 0, 0.1, 1, 5])
    values = values_of(d, d - 0.5, torch.zeros_like(d))
    k3 = f64([142.4131591, 0.71828183, 0.00517092, 0, 0.00483742, 0.36787944, 4.00673795])
    assert close(values["k1"], d, 0) and close(values["abs"], d.abs(), 0)
    assert close(values["k2"], f64([12.5, 0.5, 0.005, 0, 0.005, 0.5, 12.5]), 1e-7)
    assert close(values["k3"], k3, 1e-7)
    assert close(values["k4"], math.exp(0.5) * d, 1e-7)  # old = pi e^-0.5


def test_golden_case():
    case = Case()
    assert close(case.reverse, f64(GOLDEN["rkl"]), 1e-15) and close(case.forward, f64(GOLDEN["fkl"]), 1e-15)
    assert close(case.grad(case.reverse), f64(GRAD_REVERSE), 1e-8)
    assert close(case.grad(case.forward), f64(GRAD_FORWARD), 1e-8)
    assert close(kl.full_vocabulary_kl(case.theta, f64(kl.REF)), f64(GOLDEN["rkl"]), 1e-15)
    fresh = Case(fresh=True)
    means = {name: fresh.weights @ x for name, x in fresh.values().items()}
    for name, golden in {"k1": "rkl", "k2": "k2", "k3": "rkl", "k4": "rkl"}.items():
        assert close(means[name], f64(GOLDEN[golden]), 1e-12), name
    assert means["abs"] > GOLDEN["rkl"] + 0.1


@pytest.mark.parametrize("logits", list(random_cases(20)) + [[kl.THETA, kl.REF, kl.OLD]])
def test_which_values_are_unbiased(logits):
    fresh, stale = Case(*logits, fresh=True), Case(*logits)
    for name in SAMPLED:
        error = (fresh.weights @ fresh.values()[name] - fresh.reverse).abs()
        assert error < 1e-12 if name in ("k1", "k3", "k4") else error > 1e-6, name
    assert close(stale.weights @ stale.values()["k4"], stale.reverse, 1e-12)
    for name in ("k1", "k3"):
        assert (stale.weights @ stale.values()[name] - stale.reverse).abs() > 1e-3, name


def test_k3_is_never_negative_and_keeps_its_digits_near_zero():
    d = torch.cat([x * torch.logspace(-6, -2, 41) for x in (1, -1)])
    k3 = grpo.kl_value("k3", d, d, 0 * d)
    assert k3.dtype == torch.float32 and (k3 >= 0).all()
    assert ((k3 / (d**2 / 2) - 1).abs() < 0.2).all()
    wide = torch.linspace(-19, 60, 4001, dtype=torch.float64)
    assert (grpo.kl_value("k3", wide, wide, 0 * wide) >= 0).all()


# Gradients in the loss


def test_full_vocabulary_kl_of_barred_tokens_and_dtypes():
    theta = f64([[0.5, -0.3, -math.inf], [0.1, 0.2, 0.3]]).requires_grad_()
    ref = f64([[0.0, 0.4, -math.inf], [0.3, -0.2, 0.1]]).requires_grad_()
    full = kl.full_vocabulary_kl(theta, ref)
    assert torch.autograd.grad(full.sum(), ref, allow_unused=True, retain_graph=True)[0] is None
    two = kl_of(theta[0, :2].log_softmax(-1), ref[0, :2].log_softmax(-1))
    assert full.shape == (2,) and close(full[0], two, 1e-14)
    assert close(grad(full.sum(), theta)[0, :2], grad(two, theta)[0, :2], 1e-14)
    half = torch.randn(3, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(kl.full_vocabulary_kl(half, 2 * half), kl.full_vocabulary_kl(half.float(), (2 * half).float()))
    assert kl.full_vocabulary_kl(half, half).dtype == torch.float32


# In the reward


def test_a_reward_needs_k1_to_rise_with_d():
    d = torch.linspace(-6, 6, 121, dtype=torch.float64)
    for name in SAMPLED:
        reward = grpo.kl_value(name, d, d, 0 * d)
        assert bool((reward.diff() >= 0).all()) == (name in ("k1", "k4")), name
        assert (reward[d > 0] > 0).all(), name  # the reward loses this, so a token with pi > ref gets less
    assert (grpo.kl_value("k1", d, d, 0 * d)[d < 0] < 0).all()


# Sequences: 3 tokens of a vocabulary of 3, all 27 of them, each policy a table over prefixes


def test_sequence_kl():
    generator = torch.Generator().manual_seed(3)
    tables = torch.randn(
        3, 13, 3, generator=generator, dtype=torch.float64
    )  # a row per prefix: 1 empty, 3 of 1, 9 of 2
    theta, ref_table = (tables[0] + tables[1]).requires_grad_(), tables[1]
    tokens = torch.cartesian_prod(*[torch.arange(3)] * 3)  # [27 sequences, 3 tokens]
    rows = torch.stack(
        [0 * tokens[:, 0], 1 + tokens[:, 0], 4 + 3 * tokens[:, 0] + tokens[:, 1]], dim=1
    )  # their prefixes
    policies = theta, theta.detach() + 0.3 * tables[2], ref_table
    logp, old, ref = (x.log_softmax(-1)[rows, tokens] for x in policies)
    mask = torch.ones(27, 3, dtype=torch.bool)
    fresh = logp.detach()
    p = fresh.sum(1).exp()
    exact = grad(kl_of(logp.sum(1), ref.sum(1)), theta)
    d = fresh - ref

    def samples(coefficient: Tensor) -> Tensor:
        return torch.stack([grad(x, theta).flatten() for x in ((logp - fresh).exp() * coefficient).sum(1)])

    to_go, whole = samples(d.flip(1).cumsum(1).flip(1)), samples(d.sum(1, keepdim=True).expand(27, 3))
    assert close(p @ to_go, exact.flatten()) and close(p @ whole, exact.flatten())
    variance = [(p @ (x - p @ x).square()).sum() for x in (to_go, whole)]
    assert variance[0] < 0.8 * variance[1]

    # a loss per token: the KL of each next token, with the law of the prefixes held fixed
    next_kl = kl_of(theta.log_softmax(-1), ref_table.log_softmax(-1))

    def prefix_law(p: Tensor) -> Tensor:
        return torch.zeros(13, dtype=torch.float64).index_add(0, rows.flatten(), p.repeat_interleave(3))

    semi = grad(prefix_law(p) @ next_kl, theta)
    for name in ("k2", "k4", "k3+"):
        loss = kl_loss(logp, fresh, ref, mask, estimator=name)
        assert close(grad((p @ loss).sum(), theta), semi), name
    assert relative_error(semi, exact) > 0.05
    squared = kl_loss(logp.sum(1), fresh.sum(1), ref.sum(1), mask[:, 0], estimator="k2")
    assert close(grad(p @ squared, theta), exact)

    # stale samples: the same semi-gradient, now with the sampler's prefixes
    q = old.sum(1).exp()
    semi_stale = grad(prefix_law(q) @ next_kl, theta)
    for name in SAMPLED:
        loss = kl_loss(logp, old, ref, mask, estimator=f"{name}+")
        assert close(grad((q @ loss).sum(), theta), semi_stale), name
    sequence = kl_loss(logp.sum(1), old.sum(1), ref.sum(1), mask[:, 0], estimator="k2+")
    assert close(grad(q @ sequence, theta), exact)  # ratio of whole sequences


# Masks and numerics


@pytest.mark.parametrize("plus", ["", "+"])
@pytest.mark.parametrize("name", SAMPLED)
@pytest.mark.parametrize("log_ratio", [0.0, 30.0, 200.0])
def test_far_from_the_reference_in_float32(name, plus, log_ratio):
    d = torch.tensor([-200.0, -90, -45, -40, -21, -19, -3, 0, 3, 11.5, 40, 200])
    logp = torch.full_like(d, -1.0).requires_grad_()
    mask = torch.ones_like(d, dtype=torch.bool)
    loss = kl_loss(logp, logp.detach() - log_ratio, logp.detach() - d, mask, estimator=name + plus)
    slope = grad(loss.sum(), logp)
    assert loss.isfinite().all() and slope.isfinite().all() and (slope.square().sum()).isfinite()
    sign = {"k1": torch.ones_like(d), "k4": (d + 1).sign()}.get(name, d.sign()) if not plus else d.sign()
    assert torch.equal(slope.sign(), sign)
    if plus:
        assert (slope.abs() <= 100).all()


# Names, errors, and what the settings say


def message(script=grpo, **flags) -> tuple[str, list[str]]:
    """What a run with these flags says of its KL; beta 0.1 unless they say another."""
    return kl.kl_setting_message(script, script.Args(**({"beta": 0.1} | flags)))


def flags_of(place: str, name: str) -> dict:
    return {"kl_placement": place, "kl_estimator" if place == "loss" else "kl_reward_estimator": name}


CAP = "truncated_importance_sampling_ratio_cap"
# condition of the table -> (flags, the word for its samples)
SAID = {
    "fresh": ({}, "fresh"),
    "stale": ({"num_mini_batches": 2}, "stale"),
    "weighted": ({"async_steps": 1, CAP: 2.0}, "fresh"),
    "unweighted": ({"async_steps": 1, CAP: 0.0}, "asynchronous"),
}


@pytest.mark.parametrize("condition", kl.CONDITIONS)
@pytest.mark.parametrize("setting", kl.settings(grpo), ids="-".join)
def test_table_agrees_with_what_the_settings_say(setting, condition):
    place, name = setting
    row = kl.table_row(grpo, *setting, condition)
    more, samples = SAID[condition]
    line, warnings = message(beta=0.05, **flags_of(*setting), **more)
    assert "\n" not in line + "".join(warnings) and "0.05" in line and f"{name} in the {place}" in line
    assert row.meaning() in line
    assert ("on asynchronous ones as well where old / sampler <= 2" in line) == (
        condition == "weighted" and setting != ("loss", "full")
    )
    said = [w for w in warnings if row.meaning() in w and samples in w]
    assert len(said) == (row.label != kl.REVERSE)
    assert [CAP in w for w in said] == [condition == "unweighted"] * len(said)
    assert [f"{name}+" in w for w in said] == [condition != "unweighted" and place == "loss"] * len(said)
    if condition != "stale" and name != "k4":
        assert len(warnings) == len(said)


def test_weighted_rows_of_the_table_are_the_fresh_ones():
    """The label, the bias of the value and the direction; only the noise is another."""
    for setting in kl.settings(grpo):
        fresh, weighted = (kl.table_row(grpo, *setting, condition) for condition in ("fresh", "weighted"))
        assert weighted.label == fresh.label
        assert weighted.value_bias == pytest.approx(fresh.value_bias, abs=1e-12)
        assert weighted.cosine == pytest.approx(fresh.cosine, abs=1e-12)


def test_the_message_explains_both_places():
    both = {"kl_placement": "both", "kl_estimator": "k3+"}
    adaptive = {"kl_target": (0.1,)}
    line, warnings = message(**both, kl_reward_coef=0.02, kl_reward_estimator="kl", **adaptive)
    assert "0.1 x k3+ in the loss" in line and "0.02 (adaptive) x k1 in the reward" in line and not warnings
    assert message(**both, kl_reward_estimator="k4")[1] == [
        "KL: k4 in the reward equals k1, because the ratio is 1 where the reward is computed"
    ]
    assert "0.1 (adaptive) x k3+ in the loss" in message(**adaptive)[0]
    assert "loss" not in message(**both, beta=0.0, kl_reward_coef=0.2)[0]
    assert "reward" not in message(**both, kl_reward_coef=0.0)[0]
    assert message(beta=0.0, load_ref_policy=True)[0] == "KL: none, only measured"
    assert message(beta=0.0)[0] == "KL: none, no reference model"


def test_k3_of_a_reference_far_above_is_bounded_before_the_exponential():
    """Its bound is the value at d = -20; behind the exponential it would be that of whatever number stood there."""
    logp = f64([-20.0, -21.0, -700.0])
    found = grpo.kl_value("k3", logp, logp, torch.zeros_like(logp))
    assert found.tolist() == pytest.approx([math.expm1(20) - 20] * 3, rel=1e-12)


def test_the_kl_of_a_rollout_by_hand():
    """Per response the mean over its tokens, then the mean over the responses that are asked for."""
    token_kl = f64([1.0, 2, 3, 10, 7, 7])
    assert kl.rollout_kl(token_kl, [0, 3, 4, 6], [0, 1, 2]) == (2 + 10 + 7) / 3
    assert kl.rollout_kl(token_kl, [0, 3, 4, 6], [0, 2]) == 4.5


def test_the_message_names_the_bounds_of_the_weight():
    mask = {"importance_sampling_mask": (0.5, 5.0)}
    late = {"async_steps": 1}
    assert message() == message(**{CAP: 2.0}) == message(**mask), "fresh samples: nothing to say"
    assert "old / sampler <= 3" in message(**late, **{CAP: 3.0})[0]
    assert "0.5 <= old / sampler <= 5" in message(**late, **mask)[0]
    assert "0.5 <= old / sampler <= 2" in message(**late, **mask, **{CAP: 2.0})[0]
    assert "not a KL gradient" in message(**late, **{CAP: 0.0})[0]


def test_the_table_is_that_of_both_scripts():
    """The row of every setting comes from the loss that trains, and theirs is one and the same."""
    for condition in kl.CONDITIONS:
        for setting in kl.settings(grpo):
            assert kl.table_row(grpo, *setting, condition) == kl.table_row(ppo, *setting, condition)


def test_the_program_prints_the_table_of_the_script_it_is_given(monkeypatch, tmp_path, capsys):
    """grpo.py without an argument. A copy whose k2 is wrong by a factor of 2 differs in the rows of k2."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    kl.print_table(grpo)
    expected = capsys.readouterr().out
    kl.main([])
    assert capsys.readouterr().out == expected
    text = Path(grpo.__file__).read_text()
    right = "return d_T.square() / 2"
    assert text.count(right) == 1
    (tmp_path / "mine.py").write_text(text.replace(right, "return d_T.square()"))
    kl.main([str(tmp_path / "mine.py")])
    rows = list(zip(expected.splitlines(), capsys.readouterr().out.splitlines(), strict=True))
    changed = [(before, after) for before, after in rows if before != after]
    assert len(changed) == 3 * len(kl.CONDITIONS)  # k2 and the value of k2+ in the loss, and k2 in the reward
    assert all(before.split()[:2] == after.split()[:2] for before, after in changed)
    assert {before.split()[1] for before, _ in changed} == {"k2", "k2+"}
    assert kl.REVERSE in changed[0][0] and kl.NONE in changed[0][1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file"),
        ("Args = Tokens = KLEstimator = kl_value = object\n", "does not define token_loss"),
        ("x = 1\n", "Args, KLE"),
    ],
)
def test_a_file_without_a_loss_is_rejected(monkeypatch, tmp_path, capsys, text, words):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as end:
        kl.main([str(file)])
    message = capsys.readouterr().err
    assert end.value.code == 2 and str(file) in message and words in message


def test_table_prints_the_golden_numbers(capsys):
    kl.print_table(grpo)
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith(("loss", "reward")) for line in lines) == len(kl.CONDITIONS) * len(kl.settings(grpo))
    assert all(len(line) <= 120 for line in lines)
    assert [line for before, line in itertools.pairwise(lines) if not before] == list(kl.CONDITIONS.values())
    bias, sd, label, cos, sd_grad = kl.table_row(grpo, "loss", "k2", "fresh")
    assert bias == pytest.approx(GOLDEN["k2"] - GOLDEN["rkl"], abs=1e-12)
    assert label == kl.REVERSE and cos == pytest.approx(1, abs=1e-12)
    case = Case(fresh=True)
    p, k2 = case.weights, case.d.detach() ** 2 / 2
    grads = case.d.detach()[:, None] * (torch.eye(5, dtype=torch.float64) - p)  # d (e_x - pi)
    assert sd == pytest.approx(((p @ k2**2) - (p @ k2) ** 2).sqrt().item(), abs=1e-12)
    assert sd_grad == pytest.approx((p @ grads.square().sum(1) - (p @ grads).square().sum()).sqrt().item(), abs=1e-12)
    assert kl.table_row(grpo, "loss", "abs", "fresh")[0] == pytest.approx(
        (p @ case.d.detach().abs()).item() - GOLDEN["rkl"], abs=1e-12
    )


def test_setting_message():
    stale = {"num_mini_batches": 8}
    assert message(**stale)[1] == [] and message(kl_estimator="full", **stale)[1] == []
    assert "fresh and stale" in message(**stale)[0]
    reward = {"kl_placement": "reward"}
    assert message(**reward, kl_reward_estimator="kl")[1] == []
    assert "no effect" in message(kl_placement="none")[1][0] and message(kl_placement="none", beta=0.0)[1] == []
    push = message(kl_estimator="k1", num_mini_batches=4)[1]
    assert len(push) == 2 and "zero" in push[0] and "larger beta gives a larger KL" in push[1]
    assert any("ratio is 1" in w for w in message(**reward, kl_reward_estimator="k4")[1])
    for estimator in ("k1", "k3"):
        given = reward | {"kl_reward_estimator": estimator}
        inside, outside = message(**given, kl_reward_norm="before_norm")[1], message(**given)[1]
        assert len(inside) == len(outside) + 1 and "std" in inside[-1]
    assert message(kl_reward_norm="before_norm")[1] == []  # nothing in the reward


def test_a_flag_that_changes_nothing_is_named():
    """An estimator without a KL, and a clip with one optimizer step per batch; not where they have an effect."""
    words = ["--kl_estimator", "k1", "--clip_lower", "0.1"]
    named = [
        line.split()[1] for line in utils.kl_lines(flags.parse(grpo.Args, words=words)) if "changes nothing" in line
    ]
    assert named == ["--kl_estimator", "--clip_lower"]
    used = [*words, "--beta", "0.1", "--num_mini_batches", "2"]
    assert not any("changes nothing" in line for line in utils.kl_lines(flags.parse(grpo.Args, words=used)))


HUBER = """        case "huber":
            return torch.where(d_T.abs() < 1, d_T.square() / 2, d_T.abs() - 0.5)
"""


def test_an_estimator_of_ones_own_is_a_name_and_a_case(tmp_path, capsys, monkeypatch):
    """As docs/kl.md says: the message and the table have it, in the loss and in the reward, and a + repairs it."""
    assert HUBER in (Path(grpo.__file__).parent / "docs" / "kl.md").read_text()
    text = Path(grpo.__file__).read_text().replace('"full", "kl", ', '"full", "huber", "kl", ')
    text = text.replace('        case "abs":', HUBER + '        case "abs":')
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("mine")
    line, warnings = message(mine, kl_estimator="huber", num_mini_batches=2)
    assert "huber in the loss: expected gradient not a KL gradient (cosine +0.99" in line and len(warnings) == 2
    assert message(mine, kl_estimator="huber+")[1] == []
    assert "huber in the reward" in message(mine, kl_placement="reward", kl_reward_estimator="huber")[0]
    kl.print_table(mine)
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if "huber" in line]
    assert rows == [["loss", "huber"], ["loss", "huber+"], ["reward", "huber"]] * len(kl.CONDITIONS)


def test_on_the_same_samples_the_estimators_have_five_gradients_and_with_a_plus_one():
    generator = torch.Generator().manual_seed(0)
    logp, old, ref = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    logp.requires_grad_()
    mask = torch.ones(50, dtype=torch.bool)

    def gradient(name: str) -> Tensor:
        return grad(kl_loss(logp, old, ref, mask, estimator=name).sum(), logp)

    plain = [gradient(name) for name in SAMPLED]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(plain, 2))
    assert all(torch.equal(gradient(f"{name}+"), gradient("k3+")) for name in SAMPLED)


# Adaptive beta


def test_adaptive_controller():
    controller = kl.AdaptiveKLController(0.1, target=6.0, horizon=1000)
    assert controller.update(6.6, 100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    before = controller.coef
    assert controller.update(60.0, 100) == pytest.approx(before * 1.02)  # error held at +0.2
    before = controller.coef
    assert controller.update(-3.0, 100) == pytest.approx(before * 0.98)  # and at -0.2
    before = controller.coef
    assert controller.update(6.0, 100) == before
    other = kl.AdaptiveKLController(controller.coef, target=6.0, horizon=1000)  # coef is its whole state
    assert other.update(7.0, 64) == controller.update(7.0, 64)


@pytest.mark.parametrize("current", [math.nan, math.inf, -math.inf])
def test_adaptive_controller_keeps_beta_when_the_kl_is_not_finite(current):
    """A step whose KL overflowed says nothing about beta: the controller neither moves nor ends the run."""
    controller = kl.AdaptiveKLController(0.1, target=6.0, horizon=1000)
    assert controller.update(current, 100) == 0.1
    assert controller.update(6.6, 100) == pytest.approx(0.1 * 1.01)  # and the next finite step steers as usual

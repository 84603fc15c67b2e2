"""ppo.py: its arithmetic, what it shares with grpo.py, and whole runs on a tiny random model."""

from __future__ import annotations

import ast
import copy
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import ACCELERATE_LAUNCH, ROOT, command, finish, make_samples, read_jsonl, run_here, tiny_args

import grpo
import ppo
import rewards
import utils
from ppo import Args, ValueNormalizer, explained_variance, gae, value_loss, whiten
from runtime.data import prompt_order
from runtime.run import directory
from runtime.training import batching, deepspeed_zero, pretrained

F64 = torch.float64
CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------- what the two share


def source(module) -> str:
    return Path(module.__file__).read_text()


def functions(module) -> dict[str, str]:
    """Functions and classes at the top of a script, by name: their source."""
    text = source(module)
    nodes = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return {n.name: ast.get_source_segment(text, n) for n in nodes}


def test_functions_of_both_scripts_are_the_same_text():
    """The only differences are the arguments, their check and the loop; grpo.py alone has statistics of groups."""
    ours = functions(ppo)
    theirs = functions(grpo)
    assert set(theirs) - set(ours) == {"group_advantages", "return_to_go"}
    differ = {name for name in theirs if name in ours and ours[name] != theirs[name]}
    assert differ == {"Args", "check_args", "main"}


def fields(module) -> dict[str, str]:
    """Field of a script's own Args -> its lines: annotation, default, docstring."""
    text = source(module)
    (node,) = (n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == "Args")
    lines = text.splitlines()
    found = {}
    name = ""
    for part in node.body:
        if isinstance(part, ast.AnnAssign):
            name = part.target.id
        found[name] = found.get(name, "") + "\n".join(lines[part.lineno - 1 : part.end_lineno]) + "\n"
    return found


def test_arguments_of_both_scripts_are_the_same_text():
    """The same order, defaults and help; the critic's own arguments stand together."""
    ours = fields(ppo)
    theirs = fields(grpo)
    own = [name for name in ours if name not in theirs]
    of_groups = {"advantage_normalization_type", "advantage_eps", "kl_reward_norm"}
    assert set(theirs) - set(ours) == of_groups, "put the flag into both scripts, or into this set"
    assert [name for name in ours if name in theirs] == [name for name in theirs if name in ours]
    assert {name for name in theirs if name in ours and ours[name] != theirs[name]} == {"mask_truncated_completions"}
    first = list(ours).index(own[0])
    assert list(ours)[first : first + len(own)] == own


def test_the_loop_of_ppo_has_every_line_of_grpo_but_those_about_groups():
    import difflib

    lines = list(difflib.ndiff(functions(grpo)["main"].splitlines(), functions(ppo)["main"].splitlines()))
    removed = [line[2:].strip() for line in lines if line.startswith("- ")]
    about_groups = (
        "with_gradient",
        "kl_reward_norm",
        "advantages_PG",
        "penalty_N",
        "sequence_kl_PG",
        "sample.advantage",
        "advantages_N",
    )
    others = [line for line in removed if not line.startswith("#") and not any(word in line for word in about_groups)]
    assert others == [
        "skips = SimpleNamespace(policy=0)  # number of consecutive optimizer steps that were not applied",
        "phases = utils.Phases(args, engine, reference, [policy], device)",
        "in_loss = list(range(len(samples)))",
        "if reference is None and args.entropy_coef == 0:",
        "first_of_groups = {samples[i].prompt_id: i for i in reversed(in_loss)}  # phase 7 may run one anyway",
        "need_logprobs = list(range(len(samples)))  # controller and group statistics need the KL of every response",
        "kind = args.advantage_normalization_type",
        "if need_logprobs:",
        'kl_metrics["kl/reward"] = rollout_kl(kl_N, offsets, need_logprobs)',
        "groups = sorted({samples[i].prompt_id for i in in_loss})",
        "lr = utils.learning_rate(optimizer_step, run.total_steps * updates, args)",
        "if not mini_in_loss or stats.stopped:",
    ], "put the line into both scripts, or into this list"


@pytest.mark.parametrize("module", [grpo, ppo], ids=["grpo", "ppo"])
def test_the_phases_stand_once_and_in_order(module):
    """Phases 1 to 9 as comments of main; a phase may have a second comment of the same number, never of a lower one."""
    (node,) = (n for n in ast.parse(source(module)).body if getattr(n, "name", "") == "main")
    lines = source(module).splitlines()[node.lineno : node.end_lineno]
    numbers = [int(found[1]) for line in lines if (found := re.match(r"\s+# ([1-9]) [a-z]", line))]
    assert numbers == sorted(numbers)
    assert set(numbers) | {3} == set(range(1, 10)), "3 stands in the comment of 2: scoring begins while others decode"
    assert not any(isinstance(n, ast.FunctionDef | ast.Lambda) for n in ast.walk(node) if n is not node), "a closure"


def test_docs_name_the_metrics():
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE))
    own = text.split("\n## metrics.jsonl of ppo.py\n")[1].split("\n## ")[0]
    own = set(re.findall(r"^\| `([^`]+)` \|", own, flags=re.MULTILINE))
    written = [
        set(re.findall(r'"((?:reward|value|loss|data|policy|optim|kl|completions|sampler)/[\w@]+)"', source(m)))
        for m in (ppo, grpo)
    ]
    assert written[0] - documented == set()
    assert written[0] - written[1] == own


# -------------------------------------------------------------------------------------------------------- arithmetic


def batch_of(lengths: list[int], seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    offsets = [0, *itertools.accumulate(lengths)]
    rewards, values = torch.randn(2, offsets[-1], dtype=F64, generator=g)
    return rewards, values, torch.randn(len(lengths), dtype=F64, generator=g), offsets


LENGTHS = [3, 1, 7, 1, 2, 12]


@pytest.mark.parametrize("gamma, lam", [(1, 1), (1, 0), (0.9, 0.95), (0.5, 0), (1, 0.3), (0, 1)])
def test_gae_is_the_plain_loop(gamma, lam):
    rewards, values, after, offsets = batch_of(LENGTHS)
    advantages, returns = gae(rewards, values, after, offsets, gamma, lam)
    for i, (a, b) in enumerate(itertools.pairwise(offsets)):
        r, v = rewards[a:b].tolist(), [*values[a:b].tolist(), after[i].item()]
        for t in range(b - a):
            expected, weight = 0.0, 1.0  # the definition: a sum of TD errors, each weighted (gamma lam)^k
            for k in range(t, b - a):
                expected += weight * (r[k] + gamma * v[k + 1] - v[k])
                weight *= gamma * lam
            assert advantages[a + t].item() == pytest.approx(expected, abs=1e-12)
            assert returns[a + t].item() == pytest.approx(expected + v[t], abs=1e-12)


@pytest.mark.parametrize("length", range(1, 9))
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_reward_is_on_exactly_the_last_token(length, finish):
    """For every length up to the longest there is, whatever is next to it and however it ended."""
    samples = make_samples(2, 3)
    samples[2].response_ids, samples[2].finish_reason = list(range(10, 10 + length)), finish
    for i, s in enumerate(samples):
        s.reward = 1.0 + i
    rewards = torch.tensor(ppo.token_rewards(samples, None, Args()))
    offsets = batching.token_offsets(samples)
    assert len(rewards) == offsets[-1]
    assert rewards.nonzero().flatten().tolist() == [b - 1 for b in offsets[1:]]
    assert rewards[[b - 1 for b in offsets[1:]]].tolist() == [1, 2, 3, 4, 5, 6]


def dense(finish: str = "stop", score: float = 1.0, steps=((2, 0.5), (4, 0.25), (9, 1.0)), **changes):
    """(the shaped reward, the token rewards) of one response of five tokens."""
    sample = make_samples(1, 1)[0]
    sample.response_ids, sample.finish_reason = np.array([0, 1, 2, 3, 9]), finish
    words = ["a", "bcd", "", "efghi", ""]  # ends after 1, 4, 4, 9, 9 characters
    args = Args(**{"dense_reward": "sum", **changes})
    rewards.shape_reward(sample, rewards.Reward(score, steps=steps), args)

    def decode(ids, skip_special_tokens):
        return "".join(words[min(i, 4)] for i in ids)

    return sample.reward, ppo.token_rewards([sample], decode, args).tolist()


def test_dense_rewards():
    """Each score is on the token that completes its characters; without steps the reward is on the last token."""
    assert dense()[1] == [0, 0.75, 0, 1, 0]
    assert dense(dense_reward="difference")[1] == [0, 0.25, 0, 0.75, 0]
    assert dense(dense_reward="none")[1] == dense(steps=())[1] == [0, 0, 0, 0, 1]
    assert dense("length")[1] == [0, 0, 0, 0, 0]  # mask_no_eos_with_zero: its reward is that of score 0
    assert dense("length", mask_no_eos_with_zero=False, non_stop_penalty=2)[1] == [0, 0.75, 0, 1, -2]
    clipped = {"reward_scaling": 10, "reward_bias": 0.5, "max_reward_clip": 3}
    assert dense(steps=((99, 1.0),), **clipped)[1] == [0, 0, 0, 0, 3]


DENSE_SHAPING = {
    "penalties": {"overlong_buffer": 28, "max_response_length": 32},
    "truncation": {"finish": "length", "mask_no_eos_with_zero": False, "non_stop_penalty": 2},
    "another verifier or a reward model": {"score": 1.3},
    "a shut gate": {"score": 0.0},
    "bias, scale and clip": {"reward_scaling": 10, "reward_bias": 0.5, "max_reward_clip": 3},
    "bias and penalty": {"reward_bias": 0.25, "overlong_buffer": 32, "max_response_length": 32},
}


@pytest.mark.parametrize("case", DENSE_SHAPING)
def test_dense_rewards_hold_all_of_the_reward(case):
    """difference: they sum to the reward that is logged. sum: what the last score lacks is on the last token."""
    reward, found = dense(dense_reward="difference", **DENSE_SHAPING[case])
    assert sum(found) == pytest.approx(reward, abs=1e-12)
    reward, found = dense(dense_reward="sum", **DENSE_SHAPING[case])
    args = Args(**{k: v for k, v in DENSE_SHAPING[case].items() if k not in ("finish", "score")})
    limit = args.max_reward_clip or math.inf
    shaped = [max(-limit, min(limit, (s - args.reward_bias) * args.reward_scaling)) for s in (0.5, 0.25, 1.0)]
    assert found[:4] == [0, shaped[0] + shaped[1], 0, shaped[2]]
    assert found[4] == pytest.approx(reward - shaped[2], abs=1e-12)


def test_whitening():
    x = 3 + 5 * torch.randn(200, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = whiten(x)
    assert abs(y.mean()) < 1e-12 and y.var().item() == pytest.approx(1, abs=1e-6)
    assert whiten(torch.tensor([4.0])).tolist() == [0]
    assert whiten(torch.full((7,), 0.3, dtype=F64)).abs().max() < 1e-9  # nothing is blown up


def test_value_loss_by_hand():
    values = torch.tensor([0.0, 1.0, 1.0, 0.2, -1.0])
    old = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0])
    targets = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0])
    loss, clipped = value_loss(values, old, targets, 0.5)
    torch.testing.assert_close(loss, torch.tensor([1, 0.25, 1, 0.64, 4]) / 2)
    assert clipped.tolist() == [0, 1, 0, 0, 0]
    assert torch.equal(value_loss(values, old, targets, None)[0], (values - targets) ** 2 / 2)
    # No gradient where it went further than the clip towards its target; full gradient on its way back.
    values.requires_grad_()
    slope = torch.autograd.grad(value_loss(values, old, targets, 0.5)[0].sum(), values)[0]
    torch.testing.assert_close(slope, torch.tensor([-1, 0, 1, -0.8, -2]))


def test_explained_variance():
    g = torch.Generator().manual_seed(0)
    returns = torch.randn(1000, generator=g, dtype=F64)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(returns + 3, returns) == 1  # an offset is not variance
    assert explained_variance(torch.zeros_like(returns), returns) == 0
    noisy = returns + 0.5 * torch.randn(1000, generator=g, dtype=F64)
    assert explained_variance(noisy, returns) == pytest.approx(0.75, abs=0.05)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert explained_variance(returns, torch.ones_like(returns)) is None
    nearly = torch.tensor([0.3, 0.1 + 0.2, 0.3], dtype=torch.float64)
    assert explained_variance(nearly + 1.0, nearly) is None


@pytest.mark.parametrize("kind", ["none", "running", "exp"])
def test_value_normalization_round_trip(kind):
    n, g = ValueNormalizer(kind, 0.9, 1e-5), torch.Generator().manual_seed(0)
    x = 100 * torch.randn(50, dtype=F64, generator=g)
    assert torch.equal(n.denormalize(x), x) and torch.equal(n.normalize(x), x)  # before any return: as it is
    seen = [7 + 3 * torch.randn(k, dtype=F64, generator=g) for k in (5, 50, 500)]
    for returns in seen:
        n.update(returns)
    torch.testing.assert_close(n.denormalize(n.normalize(x)), x)
    everything = torch.cat(seen)
    if kind == "running":
        assert n.mean == pytest.approx(everything.mean().item())
        assert n.std == pytest.approx(everything.std(correction=0).item())
    elif kind == "exp":
        weights = torch.tensor([0.81, 0.9, 1.0], dtype=F64)
        weights /= weights.sum()
        mean = sum(w * r.mean() for w, r in zip(weights, seen, strict=True)).item()
        square = sum(w * (r**2).mean() for w, r in zip(weights, seen, strict=True)).item()
        assert n.mean == pytest.approx(mean) and n.std == pytest.approx((square - mean**2) ** 0.5)
    else:
        assert (n.mean, n.std) == (0, 1)


def test_value_normalization_of_constant_returns():
    for kind in ("running", "exp"):
        n = ValueNormalizer(kind, 0.99995, 1e-4)
        n.update(torch.full((9,), 0.7, dtype=F64))
        assert n.mean == pytest.approx(0.7) and n.std == pytest.approx(1e-2)


def test_best_of():
    samples = make_samples(2, 4)
    for s, reward in zip(samples, [0, 1, 0, 1, 0, 0, 0, 0], strict=True):
        s.reward = float(reward)
    kept = prompt_order.best_of(samples, 3)
    assert [(s.prompt_id, s.sample_id) for s in kept] == [(0, 0), (0, 1), (0, 3), (1, 0), (1, 1), (1, 2)]
    assert prompt_order.best_of(samples, 4) == samples


@pytest.mark.parametrize(
    ("share", "threshold", "left"),
    [(1.0, 0.9, [1, 4, 5]), (0.34, 0.9, [1, 2, 4, 5]), (0.9, 1.0, [1, 2, 4, 5]), (0.1, 0.5, [0, 1, 2, 3, 4, 5])],
)
def test_drop_solved(share, threshold, left):
    """The best solved go first, at most the share; without any, the epoch goes on."""
    prompts = prompt_order.Prompts([None] * 6, ppo.Args(dataset_filter=(share, threshold)))
    prompts.state.rates = [1.0, 0.5, 0.9, 1.0, 0.0, 0.0]
    prompts.state.position = 6
    assert prompts.drop_solved() == len(left)
    assert prompts.state.kept == left and prompts.state.position == (0 if len(left) < 6 else 6)


# -------------------------------------------------------------------------------------------------------- the critic


def batches(samples, layout="shared", budget=10_000, rank=0, world_size=1):
    indices = list(range(len(samples)))
    shape = {"rank": rank, "world_size": world_size, "device": CPU}
    return list(batching.micro_batches(samples, indices, layout=layout, budget=budget, **shape))


@pytest.fixture
def critic(tiny_model):
    """A critic with a head that is not small, so that the transformer has a gradient."""
    critic = ppo.TokenValues(copy.deepcopy(tiny_model), {})
    torch.nn.init.normal_(critic.head.weight, generator=torch.Generator().manual_seed(1))
    return critic


def plain_values(critic, samples):
    """[N] from one plain forward pass a sample: the value of the state in which each token was chosen."""
    values = []
    for s in samples:
        hidden = critic.model(
            input_ids=torch.tensor([[*s.prompt_ids, *s.response_ids]]), use_cache=False
        ).last_hidden_state
        values.append(critic.head(hidden[0, len(s.prompt_ids) - 1 : -1])[:, 0])
    return torch.cat(values)


def test_a_new_critic_says_about_nothing(tiny_model, samples):
    first, second = (ppo.TokenValues(copy.deepcopy(tiny_model), {}) for _ in range(2))
    assert torch.equal(first.head.weight, second.head.weight) and first.head.bias.item() == 0
    values = plain_values(first, samples)
    assert 0 < values.abs().max() < 0.5


def value_gradient(critic, samples, mbs, pieces=1):
    """Gradient of the value loss as the script computes it; [parameters] flat."""
    weights = ppo.loss_weights(samples, list(range(len(samples))), Args())
    old, targets = torch.randn(2, len(weights), generator=torch.Generator().manual_seed(1))
    weights, old, targets = (F.pad(x, (0, 1)) for x in (weights, old, targets))
    critic.zero_grad()
    for mb in mbs:
        loss, _ = value_loss(critic(mb), old[mb.tokens], targets[mb.tokens], 0.5)
        (loss * weights[mb.tokens]).sum().backward()
    return torch.cat([p.grad.flatten() for p in critic.parameters()])


def close(a, b, tolerance=1e-5):
    error = ((a - b).norm() / b.norm()).item()
    assert error < tolerance, f"relative error {error:.2e}"


@pytest.mark.parametrize("layout", ["shared", "padded", "packed"])
def test_values_and_their_gradient_equal_plain_forward_passes(critic, samples, layout):
    """Layouts, micro-batches and padding change neither."""
    expected = plain_values(critic, samples)
    old, targets = torch.randn(2, len(expected), generator=torch.Generator().manual_seed(1))
    loss = value_loss(expected, old, targets, 0.5)[0].mean()
    slopes = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(critic.parameters()))])
    for budget in (10_000, 150, 40):
        mbs = batches(samples, layout, budget)
        got = torch.zeros(len(expected))
        for mb in mbs:
            got[mb.tokens] = critic(mb)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
        close(value_gradient(critic, samples, mbs), slopes)


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_ranks_split_the_value_loss(critic, samples, world_size):
    whole = value_gradient(critic, samples, batches(samples))
    parts = [batches(samples, budget=60, rank=rank, world_size=world_size) for rank in range(world_size)]
    close(sum(value_gradient(critic, samples, mbs) for mbs in parts), whole)


# --------------------------------------------------------------------------------------------------------- whole runs


def tiny_ppo(tiny, out, **changes):
    return tiny_args(tiny, out, "ppo", **{"learning_rate": 1e-3, "eval_prompts": 0, **changes})


def weights(args, script="ppo") -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    defaults = {"ppo": ppo, "grpo": grpo}[script].Args()
    return load_file(Path(args.output_dir) / directory.run_name(args, defaults) / "model" / "model.safetensors")


def same(a: dict, b: dict) -> bool:
    return all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("placement", ["none", "loss", "reward", "both"])
def test_every_kl_placement_runs(tiny, tmp_path, placement):
    args = tiny_ppo(tiny, tmp_path, beta=0.1, kl_placement=placement, num_mini_batches=2)
    first, second = run_here(args, "ppo")
    assert [m["optim/steps"] for m in (first, second)] == [2, 2]
    assert all(v == v for m in (first, second) for v in m.values())
    assert ("kl/k1" in second) == (placement != "none")
    assert (second.get("loss/kl", 0) != 0) == (placement in ("loss", "both"))
    assert first["loss/value"] > 0 and first["value/grad_norm"] > 0
    assert abs(first["value/mean"]) < 0.1 and first["value/explained_variance"] < 0.5
    assert not same(weights(args), load_start(tiny))


def load_start(tiny):
    from safetensors.torch import load_file

    return load_file(tiny / "model.safetensors")


def test_disable_value_creates_no_critic_and_trains_on_the_reward_to_go(tiny, tmp_path, monkeypatch):
    """GAE without values, without whitening and without discount: every token's advantage is its response's reward."""
    seen, token_loss = [], ppo.token_loss
    monkeypatch.setattr(ppo, "TokenValues", None)
    monkeypatch.setattr(ppo, "token_loss", lambda t, *rest: (seen.append(t.advantages_T), token_loss(t, *rest))[1])
    args = tiny_ppo(tiny, tmp_path, disable_value=True, adv_norm="none", total_steps=1, log_samples=16)
    (m,) = run_here(args, "ppo")
    assert "loss/value" not in m and "value/explained_variance" not in m
    rows = read_jsonl(Path(args.output_dir) / directory.run_name(args, Args()) / "samples.jsonl")
    assert all(row["advantage"] == pytest.approx(row["reward"]) for row in rows) and len(rows) == 16
    assert set(torch.cat(seen).tolist()) == {row["reward"] for row in rows} == {0.0, 1.0}


@pytest.mark.integration
def test_critic_warm_up_leaves_the_policy_bit_identical(tiny, tmp_path, monkeypatch):
    """And afterwards the policy begins its schedule from the start; the critic has learnt all along."""
    pushed = []
    plain = deepspeed_zero.current_weights
    with monkeypatch.context() as patch:
        patch.setattr(
            deepspeed_zero,
            "current_weights",
            lambda *a: pushed.append({n: w.clone() for n, w in plain(*a)}) or plain(*a),
        )
        metrics = run_here(tiny_ppo(tiny, tmp_path, critic_warmup=2, num_mini_batches=2, total_steps=3), "ppo")
    start = load_start(tiny)
    of_policy = [found for found in pushed if start.keys() <= found.keys()]  # the others are the critic's
    unmoved = [same({name: found[name] for name in start}, start) for found in of_policy]
    assert unmoved[:2] == [True, True] and unmoved.index(False) == unmoved.count(True), unmoved
    assert [m["optim/steps"] for m in metrics] == [0, 0, 2] and all(m["value/grad_norm"] > 0 for m in metrics)
    args = tiny_ppo(tiny, tmp_path, critic_warmup=1, total_steps=3)
    metrics = run_here(args, "ppo")
    assert not same(weights(args), load_start(tiny))
    assert [m["optim/steps"] for m in metrics] == [0, 1, 1]
    rates = [utils.learning_rate(i, n, args) for i, n in ((0, 3), (0, 2), (1, 2))]
    assert [m["optim/lr"] for m in metrics] == [0, *rates[1:]]
    assert metrics[0]["value/lr"] == pytest.approx(rates[0] * args.critic_learning_rate / args.learning_rate)


@pytest.fixture(scope="module")
def plain_run(tiny, tmp_path_factory):
    args = tiny_ppo(tiny, tmp_path_factory.mktemp("plain"), critic_learning_rate=1e-3)
    return run_here(args, "ppo"), weights(args)


@pytest.mark.integration
@pytest.mark.parametrize(
    "changes",
    [
        *({"micro_batch_tokens": 150}, {"batch_layout": "packed"}, {"zero_stage": 3}),
        {"critic_warmup": 0, "kl_placement": "none", "beta": 0.3},
        # The critic's layouts are compared above, and what else both scripts have alike in test_run.py.
        pytest.param({"batch_layout": "padded"}, marks=pytest.mark.slow),
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"zero_stage": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_must_not_matter(plain_run, tiny, tmp_path, changes):
    """Micro-batches, padding, layouts, stages: the same run, up to rounding."""
    args = tiny_ppo(tiny, tmp_path, critic_learning_rate=1e-3, **changes)
    for got, expected in zip(run_here(args, "ppo"), plain_run[0], strict=True):
        for key, value in expected.items():
            if key.split("/")[0] in ("reward", "loss", "value", "optim", "policy"):
                assert got[key] == pytest.approx(value, rel=2e-3, abs=1e-5), key
    for name, expected in plain_run[1].items():
        assert (weights(args)[name] - expected).abs().mean() < 2e-5, name


@pytest.mark.learn
def test_the_critic_learns(tiny, tmp_path):
    """On a policy that stands still and rewards that the prompt decides: it comes to explain most of their variance."""
    args = tiny_ppo(
        *(tiny, tmp_path),
        critic_warmup=31,
        total_steps=32,
        max_response_length=2,
        critic_learning_rate=3e-3,
        num_samples_per_prompt_rollout=1,
        num_unique_prompts_rollout=16,
        verifier=f"{ROOT}/tests/verifiers.py:addition",
        dataset=ppo.Args.dataset,  # of 200 rows it saw each prompt more than once
    )
    metrics = run_here(args, "ppo")
    found = [m["value/explained_variance"] for m in metrics]
    assert abs(found[0]) < 0.1 and sum(found[-3:]) / 3 > 0.5, found
    assert metrics[-1]["loss/value"] < 0.5 * metrics[0]["loss/value"]


@pytest.mark.integration
@pytest.mark.parametrize("dense, total", [("none", 1.0), ("sum", 1.5), ("difference", 1.0)])
def test_dense_rewards_reach_the_advantages(tiny, tmp_path, monkeypatch, dense, total):
    seen, plain = [], ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda *a: (seen.append(a), plain(*a))[1])
    verifier = f"{ROOT}/tests/verifiers.py:stepwise"
    run_here(tiny_ppo(tiny, tmp_path, dense_reward=dense, verifier=verifier, total_steps=1), "ppo")
    rewards, _, _, offsets = seen[0][:4]
    for a, b in itertools.pairwise(offsets):
        assert rewards[a:b].sum().item() == pytest.approx(total)
        assert (rewards[a : b - 1].sum() > 0) == (dense != "none") or b - a == 1


def test_a_return_that_is_not_finite_does_not_reach_the_normalizer():
    """One NaN would stay in its mean, and every later step of policy and critic would be skipped."""
    for kind in ("running", "exp"):
        normalizer = ValueNormalizer(kind, 0.9, 1e-5)
        normalizer.update(torch.tensor([1.0, 3.0], dtype=F64))
        before = dict(vars(normalizer))
        normalizer.update(torch.tensor([1.0, float("nan")], dtype=F64))
        normalizer.update(torch.tensor([float("inf")], dtype=F64))
        assert vars(normalizer) == before and normalizer.mean == pytest.approx(2.0)


@pytest.mark.slow
def test_a_critic_that_is_never_finite_again_ends_the_run(tiny, tmp_path, monkeypatch):
    """As a policy does: after ten optimizer steps in a row that were not applied, the run's first among them."""
    plain = ppo.value_loss
    monkeypatch.setattr(ppo, "value_loss", lambda *a: (plain(*a)[0] * float("nan"), plain(*a)[1]))
    args = tiny_ppo(tiny, tmp_path, total_steps=12, log_samples=0)
    with pytest.raises(RuntimeError, match="ten optimizer steps in a row"):
        run_here(args, "ppo")
    assert len(read_jsonl(Path(args.output_dir) / directory.run_name(args, Args()) / "metrics.jsonl")) == 9


def test_a_value_loss_that_is_not_finite_is_never_applied(tiny, tmp_path, monkeypatch):
    """The critic's step is dropped and counted; the policy, whose advantages are fine, moves, and so does the next."""
    plain, calls = ppo.value_loss, itertools.count()

    def poisoned(*arguments):
        loss, clipped = plain(*arguments)
        return loss * (float("nan") if next(calls) == 0 else 1), clipped

    monkeypatch.setattr(ppo, "value_loss", poisoned)
    first, second = run_here(tiny_ppo(tiny, tmp_path, micro_batch_tokens=150), "ppo")
    assert (first["optim/skipped"], first["optim/steps"]) == (1, 1) and "value/grad_norm" not in first
    assert (second["optim/skipped"], second["optim/steps"]) == (0, 1) and second["value/grad_norm"] > 0
    assert second["value/mean"] == second["value/mean"]


@pytest.mark.slow
def test_values_after_a_cut(tiny, tmp_path, monkeypatch):
    """With --bootstrap_truncated a cut response is worth what the critic says after it, and an ended one nothing."""
    stops = pretrained.stop_token_ids
    monkeypatch.setattr(pretrained, "stop_token_ids", lambda *a: [*stops(*a), *range(100, 130)])  # else it seldom ends
    seen, plain = [], ppo.gae
    monkeypatch.setattr(ppo, "gae", lambda *a: (seen.append(a), plain(*a))[1])
    more = {"critic_learning_rate": 1e-2, "max_response_length": 24, "value_norm": "running", "gamma": 0.9}
    for flag in (True, False):
        seen.clear()
        args = tiny_ppo(tiny, tmp_path, bootstrap_truncated=flag, log_samples=16, **more)
        run_here(args, "ppo")
        rows = read_jsonl(Path(args.output_dir) / directory.run_name(args, Args()) / "samples.jsonl")
        cut = torch.tensor([row["finish_reason"] == "length" for row in rows if row["step"] == 2])
        after = seen[1][2]
        assert cut.any() and not cut.all(), "the tiny model should both end and be cut"
        assert torch.equal(after != 0, cut & flag)


def test_the_value_after_a_cut_is_that_of_the_longer_text(critic):
    """Against a plain forward pass that reads one token further, also where the response is one token long."""
    torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
    samples = make_samples()
    after = [s.finish_reason == "length" for s in samples]
    after[3] = True  # of one token
    shape = {"layout": "shared", "budget": 60, "rank": 0, "world_size": 1, "device": CPU}
    values, ends = ppo.values_of(critic, samples, after, **shape)
    with torch.no_grad():
        torch.testing.assert_close(values, plain_values(critic, samples), rtol=1e-4, atol=1e-5)
        for s, end, wanted in zip(samples, ends, after, strict=True):
            ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
            last = critic.head(critic.model(input_ids=ids, use_cache=False).last_hidden_state[0, -1])
            assert end.item() == pytest.approx(last.item() if wanted else 0.0, abs=1e-4)


def test_values_of_all_ranks_are_summed(critic, monkeypatch):
    """A token has its value on one rank and 0 on the others: here as if another rank had found the same once more."""
    torch.distributed.is_initialized() or torch.distributed.init_process_group("gloo")
    samples = make_samples()
    cut = [False] * len(samples)
    shape = {"layout": "shared", "budget": 60, "rank": 0, "world_size": 1, "device": CPU}
    values, _ = ppo.values_of(critic, samples, cut, **shape)
    monkeypatch.setattr(ppo.dist, "all_reduce", lambda tensor: tensor.mul_(2))
    torch.testing.assert_close(ppo.values_of(critic, samples, cut, **shape)[0], 2 * values)


@pytest.mark.integration
def test_many_switches_at_once(tiny, tmp_path):
    args = tiny_ppo(
        *(tiny, tmp_path),
        critic=(f"model_name_or_path={tiny}", "num_epochs=1", "warmup_steps=2"),
        gamma=0.99,
        gae_lambda=0.9,
        adv_norm="group",
        value_clip=1e-3,
        value_norm="exp",
        value_norm_beta=0.5,
        critic_warmup=1,
        generation_size=6,
        entropy_coef=0.01,
        clip_ratio_c=3.0,
        dataset_filter=(0.5, 0.5),
        dataset=str(questions(tmp_path, 8)),
        beta=0.05,
        kl_placement="both",
        kl_target=(1e-6, 50.0),
        ref_policy_update=(1, 0.5),
        num_mini_batches=2,
        num_epochs=2,
        critic_learning_rate=1e-3,
        batch_layout="packed",
        gradient_checkpointing=True,
        total_steps=6,
        loss_norm="sequence",
        reward_scaling=10.0,
        reward_bias=0.5,
        max_reward_clip=4,
        early_stop_imp_ratio=5.0,
        lr_scheduler_type="cosine",
        bootstrap_truncated=True,
    )
    metrics = run_here(args, "ppo")
    assert [m["optim/steps"] for m in metrics] == [0, 4, 4, 4, 4, 4]
    assert all(m["reward/generated_mean"] <= m["reward/mean"] for m in metrics)
    assert 0 < max(m["value/clip_frac"] for m in metrics) < 1
    left = [m["data/problems"] for m in metrics]
    assert left[0] == 8 > left[1] >= 4 and left == sorted(left, reverse=True), left
    assert all(v == v for m in metrics for v in m.values())


def questions(folder: Path, count: int) -> Path:
    import json

    path = folder / "questions.jsonl"
    path.write_text(
        "".join(json.dumps({"question": f"{i} + 1 = ?", "answer": str(i + 1)}) + "\n" for i in range(count))
    )
    return path


def test_cut_responses_teach_the_critic_but_not_the_policy(tiny, tmp_path):
    """If all responses are truncated and masked, the policy stays and the critic still learns."""
    args = tiny_ppo(tiny, tmp_path, mask_truncated_completions=True, ignore_eos=False, max_response_length=2)
    stopped = [m for m in run_here(args, "ppo") if m["completions/truncated_frac"] == 1]
    assert stopped and all(m["optim/steps"] == 0 and m["value/grad_norm"] > 0 for m in stopped)


@pytest.mark.integration
def test_one_sample_a_prompt(tiny, tmp_path):
    args = tiny_ppo(tiny, tmp_path, num_samples_per_prompt_rollout=1, num_unique_prompts_rollout=16)
    assert [m["optim/steps"] for m in run_here(args, "ppo")] == [1, 1]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_samples_per_prompt_rollout": 1, "filter_zero_std_samples": True}, "--num_samples_per_prompt_rollout"),
        ({"num_samples_per_prompt_rollout": 1, "dynamic_sampling_rounds": 1}, "--num_samples_per_prompt_rollout"),
        ({"disable_value": True, "critic_warmup": 1}, "--critic_warmup"),
        ({"disable_value": True, "bootstrap_truncated": True}, "--bootstrap_truncated"),
        ({"critic_warmup": 2}, "--critic_warmup 2 leaves none of the 2 steps to train the policy"),
        ({"value_clip": 0.0}, "--value_clip"),
        ({"critic_learning_rate": 0.0}, "--critic_learning_rate"),
        ({"bootstrap_truncated": True, "mask_truncated_completions": True}, "--no-mask_truncated_completions"),
        ({"generation_size": 3}, "--generation_size"),
        ({"dataset_filter": (1.0, 1.0)}, "--dataset_filter"),
        ({"gae_lambda": 1.1}, "--gae_lambda"),
        ({"gamma": -0.1}, "--gamma"),
        ({"critic": ("model_name_or_path=./nowhere",)}, "--critic model_name_or_path ./nowhere"),
        ({"critic": ("num_epochs=0",)}, "--critic: num_epochs and num_mini_batches must be above 0"),
        ({"critic": ("num_epochs=1.5",)}, "--critic num_epochs=1.5"),
        ({"critic": ("weight_decay=-0.1",)}, "--critic weight_decay=-0.1"),
        ({"critic": ("weight_decay=much",)}, "'much' is not a number"),
        ({"critic": ("warmup_steps=1.5",)}, "--critic warmup_steps=1.5"),
        ({"critic": ("lr_scheduler_type=step",)}, "constant, linear, cosine"),
        ({"critic": ("epochs=2",)}, "a NAME of"),
        ({"critic": ("warmup_steps=2",), "disable_value": True}, "--disable_value"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_at_once(tiny, tmp_path, capsys, changes, words):
    with pytest.raises(SystemExit) as refused:
        run_here(tiny_ppo(tiny, tmp_path, **changes), "ppo")
    assert refused.value.code == 2 and words in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- in other processes


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["none", "both"])
def test_two_ranks_equal_one(tiny, tmp_path, placement):
    """The critic's numbers, too: values, returns, whitening, its loss and gradient, on one rank and on two."""
    more = ["--critic_learning_rate", "1e-3", "--value_norm", "running", "--num_mini_batches", "2"]
    more += ["--beta", "0.1", "--kl_placement", placement, "--eval_prompts", "4"]
    metrics = {}
    for ranks in (1, 2):
        shape = {"script": "ppo", "ranks": ranks, "launcher": ACCELERATE_LAUNCH}
        finish(command(tiny, tmp_path / str(ranks), *more, **shape), tmp_path / f"{ranks}.log", 240)
        (folder,) = (tmp_path / str(ranks)).iterdir()
        metrics[ranks] = read_jsonl(folder / "metrics.jsonl") + read_jsonl(folder / "eval.jsonl")
    assert metrics[1][1]["loss/value"] > 0
    for one, two in zip(metrics[1], metrics[2], strict=True):
        for key, value in one.items():
            if key.split("/")[0] in ("reward", "loss", "policy", "value", "completions", "optim", "eval", "kl"):
                assert two[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key

"""variants/: every patch applies to today's script, reads like it, runs, and has the gradient that it claims."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import loss_table
import pytest
import torch
import torch.nn.functional as F
import variant
from helpers import ROOT, install_wheel, load_variant, make_samples, run_here, tiny_args, token_loss
from transformers import AutoConfig, AutoModelForCausalLM

import grpo
import utils
from runtime.arguments import presets
from runtime.data import problem_set, rendering
from runtime.data.samples import Problem
from runtime.environments import episodes
from runtime.training import batching, pretrained

NAMES = variant.names()
WHOLE = sorted(path.stem for path in (ROOT / "variants").glob("*.py"))
MOST_CHANGES = 60
# Variant -> the row of docs/maintainers/losses.md that its token loss must equal, and the settings of that row.
ROWS = {
    "cispo": ("CISPO", {"clip_higher": 0.28}),
    "dppo": ("DPPO", {}),
    "gdpo": ("PPO clip", {}),
    "shrinkage": ("PPO clip", {}),
    "gspo": ("GSPO", {"clip_lower": 0.2, "clip_higher": 0.2}),
    "reinforce_pp": ("PPO clip", {}),
    "maxrl": ("PPO clip", {}),
    "lora": ("PPO clip", {}),
    "sdpo": ("PPO clip", {}),
    "opsd": ("PPO clip", {}),
    "truncated": ("PPO clip", {}),
    "turn_rewards": ("PPO clip", {}),
}
# These need vLLM for a step; their own files have such runs.
WITH_VLLM = ("lora", "truncated")
STALE = ("cispo", "dppo")  # their headers name --async_steps
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Name -> the variant's script, imported."""
    folder = tmp_path_factory.mktemp("variants")
    return {name: load_variant(name, folder) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_is_a_short_diff_with_a_header(name, tmp_path):
    """It changes at most 60 lines, says what, from where, when and how measured, and passes ruff as the scripts do."""
    header, _, diff = variant.read(name)
    changed = [line for line in diff.splitlines() if line[:1] in "+-" and not line.startswith(("---", "+++"))]
    assert len(changed) <= MOST_CHANGES
    assert len(header.splitlines()) <= 10
    for word in ("Source ", "Use it ", "Measured "):
        assert any(line.startswith(word) for line in header.splitlines()), word
    file = tmp_path / f"{name}.py"
    file.write_text(variant.variant(name))
    for words in (["check"], ["format", "--check"]):
        line = [sys.executable, "-m", "ruff", *words, "--config", str(ROOT / "pyproject.toml"), str(file)]
        done = subprocess.run(line, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_the_header_has_the_page_s_measurement(name):
    """One of its numbers, where docs/maintainers/variants.md has any; a header without a curve says so."""
    header, _, _ = variant.read(name)
    curves = (ROOT / "docs" / "maintainers" / "variants.md").read_text().partition("## Learning curves")[2]
    rows = [line for line in curves.splitlines() if re.match(rf"(\| |\*\*)?`{name}`", line)]
    measured = re.findall(r"\b0\.\d{3}\b", " ".join(rows))
    own = header.partition("\nMeasured ")[2]
    assert ("missing" in own or "no learning curve" in own) == (not measured), measured
    assert not measured or any(number in own for number in measured)


@pytest.mark.parametrize("name", NAMES)
def test_the_header_names_flags_that_there_are(modules, name):
    header, _, _ = variant.read(name)
    fields = {field.name for field in dataclasses.fields(modules[name].Args)}
    assert set(re.findall(r"--(\w+)", header)) <= fields


@pytest.mark.parametrize("name", NAMES)
def test_remaking_a_patch_changes_nothing(name):
    header, _, diff = variant.read(name)
    assert variant.remade(name, variant.variant(name)) == f"{header}\n\n{diff}"


@pytest.mark.parametrize("name", [*NAMES, *WHOLE])
def test_the_page_names_every_variant(name):
    assert f"| `{name}` |" in (ROOT / "docs" / "grpo.md").read_text()


def test_the_page_has_the_flags_of_every_variant(modules):
    """Own flags, changed defaults and removed flags: docs/grpo.md against the Args of each patched script."""

    def flag(name: str, value: object) -> str:
        if isinstance(value, bool):
            return f"`--{'' if value else 'no-'}{name}`"
        return f"`--{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}`"

    page = (ROOT / "docs" / "grpo.md").read_text()
    ours = {field.name: field.default for field in dataclasses.fields(grpo.Args) if field.name != "exp_name"}
    for name, module in modules.items():
        theirs = {field.name: field.default for field in dataclasses.fields(module.Args) if field.name != "exp_name"}
        own = [f"`--{key}`" for key in sorted(theirs.keys() - ours.keys())]
        changed = [flag(key, theirs[key]) for key in sorted(theirs.keys() & ours.keys()) if theirs[key] != ours[key]]
        removed = [f"`--{key}`" for key in sorted(ours.keys() - theirs.keys())]
        cells = "".join(f" {cell} |" if cell else " |" for cell in map(", ".join, (own, changed, removed)))
        assert f"| `{name}` |{cells}\n" in page


@pytest.mark.integration
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_variant_runs_in_an_empty_folder(name, tmp_path):
    """Copied into an empty folder: it imports no module of the project."""
    file = Path(shutil.copy(ROOT / "variants" / f"{name}.py", tmp_path))
    assert f"    uv run {name}.py  " in file.read_text()
    line = [sys.executable, file.name, "--help"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--learning_rate" in done.stdout


def test_a_patch_that_no_longer_applies_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "grpo.py").write_text("print('another script')\n")
    (tmp_path / "variants").symlink_to(ROOT / "variants")
    monkeypatch.setattr(variant, "ROOT", tmp_path)
    with pytest.raises(SystemExit) as ended:
        variant.variant(NAMES[0])
    assert ended.value.code == 2
    assert f"variants/{NAMES[0]}.patch does not apply to grpo.py" in capsys.readouterr().err


def test_an_unknown_variant_is_refused_with_the_list(capsys):
    with pytest.raises(SystemExit) as ended:
        variant.variant("nonesuch")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "variants/nonesuch.patch" in said and all(name in said for name in NAMES)


@pytest.mark.parametrize("condition", loss_table.CONDITIONS)
@pytest.mark.parametrize("name", ROWS)
def test_the_token_loss_has_the_gradient_of_its_row(modules, name, condition):
    """By exact enumeration, fresh and stale: a variant's gradient is that of its loss in docs/maintainers/losses.md."""
    world = loss_table.World(max_length=3)
    batch = loss_table.batch_of(world, loss_table.policies_of(world, condition))
    row, settings = ROWS[name]
    expected = torch.autograd.grad(loss_table.LOSSES[row](batch).sum(), batch.logprobs)[0]
    args = modules[name].Args(**settings)
    given = {f"{field}_T": getattr(batch, field) for field in ("logprobs", "old", "sampler", "advantages")}
    loss, _ = token_loss(modules[name], 0.0, args, response_T=batch.owner, **given)
    if name == "gspo":  # --loss_norm sequence divides a response's loss among its tokens
        loss = loss / batch.lengths[batch.owner]
    slopes = torch.autograd.grad(loss.sum(), batch.logprobs)[0]
    assert torch.allclose(slopes, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ROWS)
def test_neither_micro_batches_nor_ranks_change_the_gradient(modules, name, tiny_model):
    samples = make_samples(4, 4)
    whole = gradient(modules[name], tiny_model, samples, budget=10_000, world_size=1)
    for budget, world_size in ((150, 1), (75, 1), (150, 2), (60, 3)):
        other = gradient(modules[name], tiny_model, samples, budget, world_size)
        assert ((other - whole).norm() / whole.norm()).item() < 1e-5


def gradient(module, model, samples, budget: int, world_size: int) -> torch.Tensor:
    """The gradient of a whole batch, summed over micro-batches and ranks, as the script computes it; [parameters]."""
    args = module.Args()
    policy = utils.TokenLogprobs(model, 1.0, 1000)
    everything = list(range(len(samples)))
    weights = F.pad(module.loss_weights(samples, everything, args), (0, 1))
    owners = torch.tensor([i for i, s in enumerate(samples) for _ in s.response_ids] + [0])
    noise = torch.Generator().manual_seed(1)
    advantages = torch.randn(len(weights), generator=noise)
    moved = 0.05 * torch.randn(len(weights), generator=noise)
    placement = {"layout": "shared", "budget": budget, "world_size": world_size, "device": torch.device("cpu")}
    if "dtype" in inspect.signature(batching.micro_batches).parameters:
        placement["dtype"] = torch.float32
    model.zero_grad()
    for rank in range(world_size):
        for mb in batching.micro_batches(samples, everything, rank=rank, **placement):
            logprobs, _, _ = policy(mb)
            old = logprobs.detach() + moved[mb.tokens]
            given = {"logprobs_T": logprobs, "old_T": old, "sampler_T": old, "advantages_T": advantages[mb.tokens]}
            loss, _ = token_loss(module, 0.0, args, response_T=owners[mb.tokens], **given)
            (loss * weights[mb.tokens]).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_maxrl_estimates_the_gradient_of_the_truncated_likelihood(modules):
    """sum over k <= G of p's (1 - p)^(k - 1) is what (r - mean) / mean averages to: d/dp of log p, cut off after G."""
    group = 5
    p = 0.3
    outcomes = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * group)  # [2^G, G]
    chance = (p**outcomes * (1 - p) ** (1 - outcomes)).prod(1)
    advantages = modules["maxrl"].group_advantages(outcomes, "maxrl", 0.0)
    advantages = torch.nan_to_num(advantages)
    scores = outcomes / p - (1 - outcomes) / (1 - p)  # d log P(outcome) / dp
    expected = (chance[:, None] * advantages * scores).sum() / group
    truncated = sum((1 - p) ** (k - 1) for k in range(1, group))
    assert expected.item() == pytest.approx(truncated, rel=1e-9)


@pytest.mark.parametrize("group", [2, 3])
def test_a_shrinkage_baseline_leaves_the_gradient_unbiased_and_has_less_noise(modules, group):
    """By enumeration of all rewards of three prompts: the expected gradient is that of E[R] of each prompt."""
    chances = torch.tensor([0.5, 0.6, 0.45], dtype=torch.float64)
    outcomes = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * (3 * group)).view(-1, 3, group)
    chance_P1 = chances[:, None]
    probability = (chance_P1**outcomes * (1 - chance_P1) ** (1 - outcomes)).flatten(1).prod(1)
    scores = outcomes / chance_P1 - (1 - outcomes) / (1 - chance_P1)  # d log P(outcome) / d chance
    noise = {}
    for name, kind in (("shrinkage", "shrinkage"), ("dppo", "leave_one_out")):
        module = modules[name]
        advantages = torch.stack([module.group_advantages(rewards, kind) for rewards in outcomes])
        gradients = (advantages * scores).mean(2)  # of each prompt
        mean = probability @ gradients
        assert torch.allclose(mean, torch.ones(3, dtype=torch.float64), rtol=1e-9)
        noise[name] = (probability @ (gradients - mean) ** 2).sum().item()
    assert noise["shrinkage"] < noise["dppo"]


@pytest.mark.parametrize("layout", utils.LAYOUTS)
@pytest.mark.parametrize("budget", [20, 1000])
def test_a_truncated_policy_ascends_its_own_expected_reward(modules, tiny_model, layout, budget):
    """By enumeration of the 16 responses of two tokens that top-k 4 leaves; the full softmax has another gradient."""
    prompt = list(range(3, 9))
    samples = []
    chances = []
    first = tiny_model(torch.tensor([prompt])).logits[0, -1].topk(4)
    for chance, a in zip(first.values.softmax(-1), first.indices.tolist(), strict=True):
        second = tiny_model(torch.tensor([[*prompt, a]])).logits[0, -1].topk(4)
        kept = [first.indices.tolist(), second.indices.tolist()]
        samples += [batching.Sample(0, b, prompt, [a, b], [0, 0], "stop", [(1, 0)], kept) for b in kept[1]]
        chances.append(chance * second.values.softmax(-1))
    chances = torch.cat(chances)
    rewards = torch.rand(len(samples), generator=torch.Generator().manual_seed(0))
    expected = torch.autograd.grad((chances * rewards).sum(), tiny_model.parameters())

    def error() -> float:
        policy = utils.TokenLogprobs(tiny_model, 1.0, 5)
        weights = batching.per_token((chances.detach() * rewards).tolist(), batching.token_offsets(samples))
        place = {"layout": layout, "budget": budget, "rank": 0, "world_size": 1, "device": torch.device("cpu")}
        loss = 0.0
        for mb in batching.micro_batches(samples, list(range(len(samples))), **place):
            got, entropy, full_kl = policy(mb, policy)
            given = {"logprobs_T": got, "old_T": got.detach(), "sampler_T": got.detach()}
            token, _ = token_loss(modules["truncated"], 0.0, grpo.Args(), advantages_T=torch.ones_like(got), **given)
            loss = loss + (token * weights[mb.tokens]).sum()
            if mb.kept is not None:
                assert entropy.max() <= 1.3863 and full_kl.abs().max() < 1e-5, "log 4, and the KL to itself"
        found = torch.autograd.grad(-loss, tiny_model.parameters())
        off, size = (
            sum(part.square().sum() for part in parts) for parts in (map(torch.sub, found, expected), expected)
        )
        return (off / size).sqrt().item()

    assert error() < 1e-4
    for sample in samples:
        sample.kept = None
    assert error() > 0.1


def test_the_full_softmax_is_biased_on_truncated_samples():
    """The bias on docs/maintainers/variants.md: 20 worlds, the likelier two of three tokens, a centered reward."""
    biases = []
    for seed in range(20):
        world = loss_table.World(max_length=4, seed=seed)
        logits = world.noise(1.0, torch.Generator().manual_seed(seed)).requires_grad_()
        kept = world.token_logprobs(logits.masked_fill(logits == logits.amin(1, keepdim=True), -1e4))
        chances = torch.zeros_like(world.rewards).index_add(0, world.owner, kept).exp()
        mean = torch.zeros(2).double().index_add(0, world.prompts, chances * world.rewards)
        weights = (chances * (world.rewards - mean[world.prompts])).detach()[world.owner]
        (truth,) = torch.autograd.grad((chances * world.rewards).sum(), logits, retain_graph=True)
        (full,) = torch.autograd.grad(weights @ world.token_logprobs(logits), logits)
        biases.append((full - truth).norm() / truth.norm())
    assert sum(biases) / 20 == pytest.approx(0.167, abs=1e-3)


@pytest.mark.integration
@pytest.mark.parametrize("flags", [{"num_mini_batches": 2}, {"async_steps": 1, "total_steps": 3}], ids=str)
def test_a_truncated_policy_has_the_log_probs_of_its_engine(modules, tiny, tmp_path, flags):
    """Also of stale samples and with a KL over the kept ids; the full softmax would differ by the mass cut off."""
    kl = {"beta": 0.1, "kl_estimator": "full", "top_k": 5, "top_p": 0.9, "rollout": "vllm"}
    memory = {"vllm_args": '{"kv_cache_memory_bytes": 33554432}', "learning_rate": 1e-3}
    metrics = run_here(tiny_args(tiny, tmp_path, "variant_truncated", **kl, **memory, **flags), "variant_truncated")
    assert all(0 < m["sampler/logprob_diff_max"] < 1e-4 for m in metrics)
    assert all(m["policy/entropy"] < 1.61 for m in metrics), "log 5"


def test_gdpo_normalizes_each_reward(modules):
    """Two mixtures with equal sums differ; the scale of a reward does not count; the batch has std 1."""
    rewards = torch.tensor([[[1.0, 0, 0, 0], [1, 1, 0, 0]], [[0.0, 1, 1, 0], [0, 0, 0, 0]]], dtype=torch.float64)
    found = modules["gdpo"].gdpo_advantages(rewards, "standard", 0.0)
    own = (rewards - rewards.mean(2, keepdim=True)) / rewards.std(2, keepdim=True)
    total = own.nan_to_num(0.0).sum(0)
    assert torch.allclose(found, (total - total.mean()) / total.std())
    scaled = rewards * torch.tensor([1.0, 50.0], dtype=torch.float64)[:, None, None]
    assert torch.allclose(modules["gdpo"].gdpo_advantages(scaled, "standard", 0.0), found)
    assert rewards.sum(0)[0].tolist() == [1, 1, 1, 0] and found[0, 0] > found[0, 1] + 0.1, "the rarer one counts more"
    samples = make_samples(2, 4)
    for number, sample in enumerate(samples):
        sample.reward_parts = {"correct": rewards[0].flatten()[number].item()}
    samples[0].reward_parts["format"] = 1.0  # the verifier failed on all others
    args = modules["gdpo"].Args(num_samples_per_prompt_rollout=4)
    assert modules["gdpo"].rewards_by_name(samples, args).tolist() == [rewards[0].tolist(), [[1, 0, 0, 0], [0] * 4]]
    with pytest.raises(ValueError, match="--normalized_rewards a: the verifiers report correct, format"):
        modules["gdpo"].rewards_by_name(samples, dataclasses.replace(args, normalized_rewards=("a",)))


@pytest.mark.parametrize("condition", loss_table.CONDITIONS)
def test_ipo_drops_what_is_far_from_the_sampler_in_either_direction(modules, condition):
    world = loss_table.World(max_length=3)
    batch = loss_table.batch_of(world, loss_table.policies_of(world, condition))
    given = {f"{field}_T": getattr(batch, field) for field in ("logprobs", "old", "sampler", "advantages")}
    loss, pieces = token_loss(modules["ipo"], 0.0, modules["ipo"].Args(max_probability_change=0.05), **given)
    (slopes,) = torch.autograd.grad(loss.sum(), batch.logprobs)
    near = (batch.logprobs.exp() - batch.sampler.exp()).abs() <= 0.05
    expected = -(batch.logprobs - batch.sampler).exp() * batch.advantages * near
    assert torch.allclose(slopes, expected.detach(), rtol=1e-6, atol=1e-9)
    assert torch.equal(pieces["clipped"], (~near).float())


def test_maxrl_learns_from_no_reward_below_0(modules):
    """A group with a negative mean would raise its worst responses: the rewards end the run, 0 among them does not."""
    below = torch.tensor([[1.0, 0.0], [0.0, -1.0]], dtype=torch.float64)
    with pytest.raises(ValueError, match="a reward is -1, and MaxRL divides by the mean of its group: leave out"):
        modules["maxrl"].group_advantages(below, "maxrl")
    advantages = modules["maxrl"].group_advantages(below.clamp(min=0), "maxrl", 0.0)
    assert advantages.tolist() == [[1.0, -1.0], [0.0, 0.0]]


NEGATIVE = "MaxRL divides by their mean"
SAMPLED = "the KL of sampled tokens is the loss"
OVER_THE_VOCABULARY = "--divergence is the loss, no reward"
ADAPTERS = "adapters alone are pushed"
REFUSED = [
    ("maxrl", {"non_stop_penalty": 0.5}, f"give rewards down to -0.5: {NEGATIVE}"),
    ("maxrl", {"overlong_buffer": 4}, f"give rewards down to -1: {NEGATIVE}"),
    ("maxrl", {"reward_bias": 0.5, "reward_scaling": 2.0}, f"give rewards down to -1: {NEGATIVE}"),
    ("maxrl", {"reward_scaling": -1.0}, f"give rewards down to -1: {NEGATIVE}"),
    ("maxrl", {"beta": 0.1, "kl_placement": "reward", "kl_reward_norm": "before_norm"}, "--kl_reward_norm before_norm"),
    ("distill", {"kl_placement": "reward", "kl_reward_norm": "before_norm"}, "--kl_reward_norm before_norm"),
    ("distill", {"kl_placement": "both", "kl_reward_norm": "before_norm"}, "--kl_reward_norm before_norm"),
    ("sdpo", {"beta": 0.0}, SAMPLED),
    ("sdpo", {"kl_placement": "reward"}, SAMPLED),
    ("sdpo", {"kl_estimator": "full"}, SAMPLED),
    ("sdpo", {"reward_control": "random"}, "--reward_control random: the loss uses no reward"),
    ("opsd", {"beta": 0.0}, OVER_THE_VOCABULARY),
    ("opsd", {"kl_placement": "reward"}, OVER_THE_VOCABULARY),
    ("opsd", {"kl_estimator": "k3"}, OVER_THE_VOCABULARY),
    ("opsd", {"reward_control": "random"}, OVER_THE_VOCABULARY),
    ("dppo", {"importance_sampling_mask": (0.5, 5.0)}, "--importance_sampling_mask: DPPO masks by --max_probability"),
    ("lora", {"rollout": "hf"}, ADAPTERS),
    ("lora", {"zero_stage": 3}, ADAPTERS),
    ("lora", {"ref_policy_update": (1, 1.0), "beta": 0.1}, ADAPTERS),
    ("truncated", {"rollout": "hf"}, "drop --rollout hf"),
    ("truncated", {"environment": "game.py:Game"}, "drop --rollout hf, --environment"),
    ("truncated", {"top_k": 0}, "--top_k 0 must be at least 1"),
]


@pytest.mark.parametrize("name, change, words", REFUSED, ids=str)
def test_a_variant_refuses_what_is_not_its_loss(modules, name, change, words, tiny, tmp_path, capsys):
    """The same arguments without the change are fine, and those of distill without before_norm."""
    given = {
        "maxrl": {"verifier": None},
        "distill": {"teacher_name_or_path": str(tiny)},
        "lora": {"rollout": "vllm"},
        "truncated": {"rollout": "vllm"},
    }
    args = tiny_args(tiny, tmp_path, f"variant_{name}", **given.get(name, {}))
    modules[name].check_args(args)
    args = dataclasses.replace(args, **change)
    if name == "distill":
        modules[name].check_args(dataclasses.replace(args, kl_reward_norm="after_norm"))
    with pytest.raises(SystemExit) as ended:
        modules[name].check_args(args)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_maxrl_takes_a_constant_that_makes_up_for_a_penalty(modules, tiny, tmp_path):
    """Scores are from 0 to 1, which those of own functions need not be."""
    args = tiny_args(tiny, tmp_path, "variant_maxrl", verifier=None, non_stop_penalty=0.5)
    for more in ({"reward_bias": -0.5}, {"verifier": "mine.py:one_to_two"}):
        modules["maxrl"].check_args(dataclasses.replace(args, **more))


@pytest.mark.integration
def test_distill_learns_from_a_policy_that_does_not_end_its_answers(modules, tiny, tmp_path):
    """A base model's answers are all truncated at first: with the variant's own default they are learned from."""
    mask = modules["distill"].Args().mask_truncated_completions
    flags = {"mask_truncated_completions": mask, "max_response_length": 2, "eval_prompts": 0}
    args = tiny_args(tiny, tmp_path, "variant_distill", teacher_name_or_path=str(tiny), **flags)
    metrics = run_here(args, "variant_distill")
    assert [m["completions/truncated_frac"] for m in metrics] == [1.0, 1.0]
    assert [m["optim/steps"] for m in metrics] == [1, 1]


def test_distill_leaves_the_teacher_s_config_as_it_is(modules, tiny, tmp_path, monkeypatch):
    """--override_config is for the policy; the teacher is another model."""
    teacher = tmp_path / "teacher"
    shutil.copytree(tiny, teacher)
    configs = {}
    plain = pretrained.load_model

    def load_model(args, *more):
        model = plain(args, *more)
        configs[args.model_name_or_path] = model.config.rms_norm_eps
        return model

    monkeypatch.setattr(pretrained, "load_model", load_model)
    flags = {"teacher_name_or_path": str(teacher), "override_config": '{"rms_norm_eps": 0.5}'}
    run_here(tiny_args(tiny, tmp_path, "variant_distill", total_steps=1, eval_prompts=0, **flags), "variant_distill")
    assert configs[str(tiny)] == 0.5
    assert configs[str(teacher)] == AutoConfig.from_pretrained(teacher).rms_norm_eps != 0.5


def test_sdpo_shows_a_right_answer_of_another_sample(modules, tiny):
    """Each sample with a right sibling reads it in a row of its own; the only right one of a group has none."""
    args = modules["sdpo"].Args(model_name_or_path=str(tiny))
    tokenizer = rendering.load_tokenizer(args)
    messages = [{"role": "user", "content": "1 + 1 = "}]
    problems = [Problem(messages, truth, "last_number", {"solution": "count"}) for truth in ("2", "3")]
    samples = make_samples(prompts=2, group=3)
    for place, sample in enumerate(samples):
        sample.response = f"answer {place}"
        sample.reward_parts = {"correct": float(place in (1, 3, 5))}
    shown, having = modules["sdpo"].hinted(samples, problems, tokenizer, args)
    assert having == [0, 2, 3, 4, 5]
    seen = [tokenizer.decode(sample.prompt_ids) for sample in shown]
    told = [next((k for k in range(6) if f"answer {k}" in text), None) for text in seen]
    assert told == [1, None, 1, 5, 3, 3]
    assert "1 + 1 = \n\nA right answer:" in seen[0] and seen[0].endswith("assistant\n")
    assert shown[1].prompt_ids == samples[1].prompt_ids
    assert len({sample.prompt_id for sample in shown}) == 6  # the layout shares a prompt among equal ids
    assert all((a.response_ids == b.response_ids).all() for a, b in zip(shown, samples, strict=True))
    for source, hint in (("truth", "3"), ("solution", "count")):
        args = dataclasses.replace(args, hint_from=source)
        shown, having = modules["sdpo"].hinted(samples, problems, tokenizer, args)
        assert having == list(range(6))
        assert f"answer:\n\n{hint}\n\n" in tokenizer.decode(shown[5].prompt_ids)


def test_sdpo_reads_a_column_that_every_row_has_and_fills_in_the_hint_once(modules, tiny, capsys):
    """A question may hold the words {hint}; a column that is missing ends the run before the model loads."""
    sdpo = modules["sdpo"]
    args = sdpo.Args(model_name_or_path=str(tiny), hint_from="solution.steps")
    rows = [{"solution": {"steps": "count {question}"}}]
    problems = [Problem([{"role": "user", "content": "Say {hint}."}], "2", "exact", row) for row in rows]
    tokenizer = rendering.load_tokenizer(args)
    (shown,), _ = sdpo.hinted(make_samples(prompts=1, group=1), problems, tokenizer, args)
    assert "Say {hint}.\n\nA right answer:\n\ncount {question}\n\n" in tokenizer.decode(shown.prompt_ids)
    for key in ("siblings", "solution.steps"):
        problem_set.check_column("hint_from", key, problems, ("siblings", "truth"))
    with pytest.raises(SystemExit) as ended:
        problem_set.check_column("hint_from", "steps", problems, ("siblings", "truth"))
    said = "--hint_from steps: expected siblings, truth or a column of the data (solution)"
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("name", ["opsd", "sdpo"])
def test_a_teacher_s_prompt_has_the_tools_and_the_observation_of_the_student_s(modules, tiny, name):
    """The template writes the tools of a teacher's prompt, and the text of ``reset`` stays text in it."""
    flags = {"environment": f"{ROOT / 'tests' / 'environments.py'}:Tools", "max_prompt_length": 5000}
    flags["chat_template"] = str(ROOT / "tests" / "templates" / "qwen2_5.jinja")
    args = modules[name].Args(model_name_or_path=str(tiny), **flags)
    if name == "sdpo":
        args = dataclasses.replace(args, hint_from="truth")
    tokenizer = rendering.load_tokenizer(args)
    problem = Problem([{"role": "user", "content": "Go."}], "5", "exact", {"hint": "<|im_end|>You won."})
    episodes.first_turns([problem], tokenizer, args)
    rendering.render_prompts([problem], tokenizer, args)
    sample = dataclasses.replace(make_samples(prompts=1, group=1)[0], prompt_ids=problem.prompt_ids)
    shown = modules[name].hinted([sample], [problem], tokenizer, args)
    ids = (shown[0] if name == "sdpo" else shown)[0].prompt_ids
    own = problem.prompt_ids.tolist()
    for prompt in (own, ids):
        text = tokenizer.decode(prompt)
        assert '"name": "add"' in text and '"name": "words"' in text and "<|im_end|>You won." in text
    ends = [prompt.count(tokenizer.eos_token_id) for prompt in (own, ids)]
    assert ids != own and ends[0] == ends[1]


TRL_LOSS = """
import sys
from pathlib import Path
import torch
from frameworks import Framework

load = Framework([Path(sys.argv[1])], ("trl.experimental", "trl.import_utils", "trl.trainer.utils")).load
trl = load("trl.experimental.sdpo.loss_utils")
given = torch.load(sys.argv[2])
student = given["student"].requires_grad_()
if given["old"] is None:
    sdft = load("trl.experimental.sdft.loss_utils")
    how = {"distillation_alpha": given["alpha"]}
    loss = sdft.compute_full_logit_self_distillation_loss(student, given["teacher"], **how)
else:
    ids = given["ids"]
    loss = trl.compute_sampled_token_self_distillation_loss(student, given["teacher"], ids, distillation_alpha=1.0)
    logps = student.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    loss = trl.apply_importance_sampling_clipping(loss, logps, given["old"], 10.0)
found = (loss.detach(), torch.autograd.grad(loss.sum(), student)[0])
torch.save(found, sys.argv[3])
"""


def from_trl(folder, **given) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each token, gradient of the student's logits) by TRL's own functions of self-distillation."""
    version = presets.PRESETS["trl"].version.split()[1]
    reason = install_wheel("trl", version, folder / "trl")
    if reason:
        pytest.skip(reason)
    torch.save({"old": None} | given, folder / "given.pt")
    line = [sys.executable, "-c", TRL_LOSS, *(str(folder / name) for name in ("trl", "given.pt", "found.pt"))]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "studies")}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "found.pt")


@pytest.mark.slow
def test_sdpo_s_gradient_is_that_of_trl_s_own_functions(modules, tmp_path):
    """Fresh and stale: of the logits, on random numbers; TRL's cap of the ratio is set to ours."""
    rng = torch.Generator().manual_seed(1)
    student, teacher, moved = torch.randn(3, 4, 9, 7, generator=rng, dtype=torch.float64)
    ids = torch.randint(7, (4, 9), generator=rng)

    def chosen(logits):
        return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]

    for old in (chosen(student), chosen(student + 0.3 * moved)):
        _, theirs = from_trl(tmp_path, student=student, teacher=teacher, ids=ids, old=old)
        leaf = student.clone().requires_grad_()
        given = {"logprobs_T": chosen(leaf), "old_T": old, "sampler_T": old, "ref_T": chosen(teacher)}
        given |= {"advantages_T": torch.zeros_like(old)}
        loss, _ = token_loss(modules["sdpo"], 1.0, modules["sdpo"].Args(), **given)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        assert torch.allclose(gradient, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind, alpha", [("forward", 0.0), ("js", 0.5), ("reverse", 1.0)])
def test_opsd_s_divergence_and_gradient_are_those_of_trl_s_own_functions(modules, kind, alpha, tmp_path):
    """Over the vocabulary, and on random numbers; TRL also weighs it by the ratio of the token that was drawn."""
    student, teacher = torch.randn(2, 4, 9, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    theirs, their_gradient = from_trl(tmp_path, student=student, teacher=teacher, alpha=alpha)
    leaf = student.clone().requires_grad_()
    found = modules["opsd"].divergence(leaf, teacher, kind)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    assert torch.allclose(found, theirs, rtol=1e-9, atol=1e-12)
    assert torch.allclose(gradient, their_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["forward", "reverse", "js"])
def test_opsd_takes_tokens_that_cannot_be(modules, kind):
    """With a logit of -inf in both, value and gradient are those of the tokens that are left."""
    student, teacher = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaf = torch.cat([student, torch.full((3, 1), -torch.inf)], 1).requires_grad_()
    other = torch.cat([teacher, torch.full((3, 1), -torch.inf)], 1)
    found = modules["opsd"].divergence(leaf, other, kind)
    (gradient,) = torch.autograd.grad(found.sum(), leaf)
    assert torch.allclose(found, modules["opsd"].divergence(student, teacher, kind))
    assert torch.isfinite(gradient).all() and (gradient[:, -1] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind, layout", [("forward", "shared"), ("reverse", "padded"), ("js", "packed")])
def test_opsd_compares_the_same_tokens_after_two_prompts(modules, tiny, tmp_path, monkeypatch, kind, layout):
    """The loss of a real first step is the divergence of two plain passes over each sample; some samples are equal."""
    module = modules["opsd"]
    seen = []
    advantages = []
    plain, plain_loss = module.hinted, module.token_loss

    def hinted(samples, *more):
        shown = plain(samples, *more)
        seen[:] = zip(samples, shown, strict=True)
        return shown

    def token_loss(tokens, *more):
        advantages.append(tokens.advantages_T.abs().max().item())
        return plain_loss(tokens, *more)

    monkeypatch.setattr(module, "hinted", hinted)
    monkeypatch.setattr(module, "token_loss", token_loss)
    flags = {"total_steps": 1, "eval_prompts": 0, "max_response_length": 2, "temperature": 0.25}
    flags |= {"num_samples_per_prompt_rollout": 8, "divergence": kind, "batch_layout": layout}
    flags["verifier"] = f"{ROOT}/tests/verifiers.py:addition"  # parity is that of equal samples
    args = tiny_args(tiny, tmp_path, "variant_opsd", **flags)
    (metrics,) = run_here(args, "variant_opsd")
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    total = []
    for sample, other in seen:
        assert len(other.prompt_ids) > len(sample.prompt_ids)
        both = []
        for prompt_ids in (sample.prompt_ids, other.prompt_ids):
            ids = torch.tensor([[*prompt_ids, *sample.response_ids]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(prompt_ids) - 1 : -1]
            both.append((logits.double() / 0.25).log_softmax(-1))
        p, q = both
        m = (p.exp() / 2 + q.exp() / 2).log()
        forward, reverse = (q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)
        js = ((q.exp() * (q - m)).sum(-1) + (p.exp() * (p - m)).sum(-1)) / 2
        total.append({"forward": forward, "reverse": reverse, "js": js}[kind])
    assert len({(s.prompt_id, bytes(s.response_ids)) for s, _ in seen}) < len(seen)
    expected = torch.cat(total).mean().item()
    assert metrics["loss/kl"] == pytest.approx(expected, rel=1e-4)
    assert set(advantages) == {0.0} and metrics["reward/std"] > 0  # the reward is measured alone
    assert expected > 1e-4 and metrics["optim/grad_norm"] > 0


def test_opsd_asks_with_any_column(modules, tiny, capsys):
    """A column that there is not is named before anything is built; braces in a column are text."""
    args = modules["opsd"].Args(model_name_or_path=str(tiny), hint="{question} so: {solution}, thus {truth}")
    tokenizer = rendering.load_tokenizer(args)
    problem = Problem([{"role": "user", "content": "1 + 1 = "}], "2", "last_number", {"solution": "{count}"})
    (sample,) = modules["opsd"].hinted(make_samples(prompts=1, group=1), [problem], tokenizer, args)
    assert "1 + 1 =  so: {count}, thus 2" in tokenizer.decode(sample.prompt_ids)
    for hint in ("{question} {none}", "{0}", "{question"):
        with pytest.raises(SystemExit) as ended:
            modules["opsd"].hinted([], [problem], tokenizer, dataclasses.replace(args, hint=hint))
        assert ended.value.code == 2
        assert "a problem has solution, question, truth" in capsys.readouterr().err


# Whose policy loss has the weight of trainer against sampler from the ratio that it has already.
IN_THE_RATIO = ("dppo",)


@pytest.mark.parametrize("name", ROWS)
def test_the_importance_weight_does_what_its_help_says(modules, name):
    """The cap bounds a token's loss, and its KL; where the help leaves the loss out, it bounds the KL alone."""
    module = modules[name]
    old = torch.tensor([-1.0, -2.0, -3.0])
    given = {"logprobs_T": old + 0.05, "old_T": old, "sampler_T": old - 1.5, "ref_T": old - 0.1}
    given |= {"advantages_T": torch.ones(3), "response_T": torch.zeros(3, dtype=torch.long)}
    pieces = []
    for cap in (1.0, 100.0):
        args = module.Args(
            truncated_importance_sampling_ratio_cap=cap, kl_estimator="k3", importance_sampling_mask=None
        )
        pieces.append(token_loss(module, 0.1, args, **given)[1])
    assert torch.allclose(pieces[1]["kl"], pieces[0]["kl"] * torch.tensor(1.5).exp())
    loss_is_bounded = not torch.equal(pieces[0]["policy"], pieces[1]["policy"])
    assert loss_is_bounded == (name not in IN_THE_RATIO)
    help_text = variant.variant(name).partition("truncated_importance_sampling_ratio_cap:")[2].splitlines()[1]
    assert ("policy loss" in help_text) == loss_is_bounded


def test_reinforce_pp_counts_responses_where_verl_counts_tokens(modules):
    """The std is that of the responses, whatever their lengths; whitened by tokens, as verl does, the values differ."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    centered = (rewards - rewards.mean(1, keepdim=True)).flatten()
    advantages = modules["reinforce_pp"].group_advantages(rewards, "batch", 0.0).flatten()
    assert torch.allclose(advantages, centered / centered.std())
    tokens = centered.repeat_interleave(torch.tensor([9, 1, 1, 1, 1, 1, 1, 1]))
    whitened = (centered - tokens.mean()) / tokens.std()
    assert (whitened - advantages).min() < -0.3


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[SLOW] * (name in STALE)) for name in NAMES if name not in WITH_VLLM]
)
def test_a_variant_trains_two_steps(modules, name, tiny, tmp_path):
    """Two real steps with two optimizer steps each on the tiny model: the second is off-policy."""
    own = {"distill": {"teacher_name_or_path": str(tiny)}}
    args = tiny_args(tiny, tmp_path, f"variant_{name}", total_steps=2, num_mini_batches=2, **own.get(name, {}))
    metrics = run_here(args, f"variant_{name}")
    assert [m["optim/steps"] for m in metrics] == [2, 2]


@pytest.mark.integration
@pytest.mark.parametrize("name", STALE)
def test_a_variant_for_stale_samples_trains_on_them(modules, name, tiny, tmp_path):
    """From the second step on no sample is of the weights that are trained."""
    flags = {"total_steps": 3, "async_steps": 1, "eval_prompts": 0}
    metrics = run_here(tiny_args(tiny, tmp_path, f"variant_{name}", **flags), f"variant_{name}")
    assert [m["sampler/staleness_max"] for m in metrics] == [0, 1, 1]
    assert metrics[-1]["optim/steps"] == 1


def test_approx_kl_is_of_the_policy_whatever_the_ratio_is(modules, tiny, tmp_path):
    """DPPO's ratio has the sampler below: with one optimizer step nothing has moved, and it is not exactly 1."""
    metrics = run_here(tiny_args(tiny, tmp_path, "variant_dppo", total_steps=2), "variant_dppo")
    assert any(m["policy/ratio_max"] != 1 for m in metrics)
    assert [m["policy/approx_kl"] for m in metrics] == [0, 0] == [m["policy/approx_kl_max"] for m in metrics]

"""--preset NAME: the presets on the command line, and their numbers against the frameworks' own functions.

The slow tests install each framework's wheel without its dependencies (into RLVR_FRAMEWORKS, where it is kept, else a
temporary folder) and are skipped with the reason where the package index cannot be reached. For open-instruct and
TinyZero, which are not on it, golden/presets.json has what their functions gave at the commits it names.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import NamedTuple

import frameworks
import is_finished
import pytest
import torch
import transformers
import yaml
from helpers import ROOT, TINY_RUN, folder_of, interrupted, main_here, run_here, token_loss
from variant import names as variant_names
from variant import variant as variant_text

import grpo
import ppo
import utils
from kl_estimators import kl_reward
from rewards import Reward, shape_reward
from runtime.arguments import checks, flags, presets
from runtime.data.samples import Sample
from runtime.run import directory
from runtime.training import batching

SCRIPTS = {"grpo": grpo, "ppo": ppo}
PAIRS = [(script, name) for name, preset in presets.PRESETS.items() for script in preset.scripts]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "presets.json").read_text())
F64 = torch.float64


def parse(script: str, *words: str):
    return flags.parse(SCRIPTS[script].Args, words=list(words))


# -------------------------------------------------------------------------------------------------- on the command line


@pytest.mark.parametrize("script, name", PAIRS)
def test_a_preset_sets_every_flag_that_it_lists(script, name):
    args = parse(script, "--preset", name)
    assert args.preset == name
    fields = {f.name for f in dataclasses.fields(args)}
    settings = presets.PRESETS[name].flags
    for flag, value in settings.items():
        if flag in fields:
            assert getattr(args, flag) == value, flag
    default = SCRIPTS[script].Args()
    untouched = fields - {*settings, "preset"}
    assert {f for f in untouched if getattr(args, f) != getattr(default, f)} == set()


def test_every_setting_is_a_flag_of_a_script_of_its_preset():
    for name, preset in presets.PRESETS.items():
        fields = {f.name for script in preset.scripts for f in dataclasses.fields(SCRIPTS[script].Args)}
        assert preset.flags.keys() - fields == set(), name


@pytest.mark.parametrize("script, name", PAIRS)
def test_flags_given_beside_a_preset_win_in_any_order_also_with_our_default(script, name):
    """Every setting that differs from our default is given our default's value, before and after --preset."""
    default = SCRIPTS[script].Args()
    changed = [flag for flag, there in presets.PRESETS[name].flags.items() if getattr(default, flag, there) != there]
    assert len(changed) > 5
    words = []
    for flag in changed:
        value = getattr(default, flag)
        switch = f"--{flag}" if value else f"--no-{flag}"
        given = map(str, value if isinstance(value, tuple) else (value,))
        words += [switch] if isinstance(value, bool) else [f"--{flag}", *given]
    for given in (["--preset", name, *words], [*words, f"--preset={name}"]):
        args = parse(script, *given)
        assert dataclasses.replace(args, preset=None) == default


@pytest.mark.parametrize("words, expected", [
    (["--preset", "verk"], ["'verk'", "verl, trl, openrlhf, areal, open-instruct"]),
    (["--preset="], ["''", "verl, trl"]),
    (["--beta", "0.1", "--preset"], ["''", "verl, trl"]),
    (["--preset", "tinyzero"], ["'tinyzero'", "tinyzero is for ppo.py"]),
    (["--preset", "trl", "--advantage_eps", "-1"], []),
])  # fmt: skip
def test_a_name_that_the_script_does_not_have_is_refused_with_the_list(words, expected, capsys):
    with pytest.raises(SystemExit) as end:
        checks.check_numbers(parse("grpo", *words))
    assert end.value.code == 2
    message = capsys.readouterr().err
    for text in expected:
        assert text in message


def test_programs_without_an_algorithm_have_no_presets(capsys):
    with pytest.raises(SystemExit) as end:
        flags.parse(flags.RunFlags, words=["--preset", "verl"])
    assert end.value.code == 2
    assert "grpo.py and ppo.py" in capsys.readouterr().err


def test_names_of_runs_and_their_folders(tmp_path):
    """The name holds --preset and what was given with it; parts of a run share it, another preset has another."""
    place = ["--output_dir", str(tmp_path)]
    name = functools.partial(directory.run_name, defaults=grpo.Args())
    assert name(parse("grpo", "--preset", "verl", *place)) == "grpo__preset=verl__seed=1"
    assert name(parse("grpo", "--beta", "0.01", "--preset", "verl")) == "grpo__preset=verl__beta=0.01__seed=1"
    assert name(parse("grpo", "--preset", "verl", "--clip_ratio_c", "3")) == "grpo__preset=verl__seed=1"
    ours = name(parse("grpo", "--preset", "verl", "--clip_ratio_c", "None"))
    assert ours == "grpo__preset=verl__clip_ratio_c=None__seed=1"
    assert name(parse("grpo", "--preset", "trl", "--seed", "3")) == "grpo__preset=trl__seed=3"


@pytest.mark.integration
@pytest.mark.parametrize("script, name", PAIRS)
def test_the_start_says_what_is_set_what_was_given_and_what_differs(script, name, tiny, tmp_path, capsys):
    words = ["--dry_run", "--preset", name, "--model_name_or_path", str(tiny), "--output_dir", str(tmp_path)]
    args = parse(script, *words, "--learning_rate", "0.5")
    SCRIPTS[script].main(args, SCRIPTS[script].preflight(args))
    out = capsys.readouterr().out
    preset = presets.PRESETS[name]
    assert f"preset     {preset.version}, instead of the defaults in parentheses: " in out
    rate = preset.flags["learning_rate"]
    assert f"given    --learning_rate 0.5 (there {rate})" in out
    assert "--mask_truncated_completions False (True)" in out
    mine = [d for d in preset.differences if d.script in ("", script)]
    assert out.count("not as there: ") == len(mine) > 0
    for difference in mine:
        assert f"{difference.what}; {difference.size}" in out


def variant_args(name: str) -> type:
    """Args of a variant, as scripts/variant.py writes it; what follows in the script, the training, is not run."""
    module = types.ModuleType(name)
    module.__file__ = str(ROOT / f"{name}.py")
    sys.modules[name] = module  # where dataclasses look up annotations
    exec(variant_text(name).partition("\nimport torch\n")[0], module.__dict__)
    return module.Args


VARIANTS_OF = [(name, preset) for name in variant_names() for preset in presets.PRESETS]


@pytest.mark.parametrize("name, preset", VARIANTS_OF)
def test_a_preset_leaves_what_makes_a_variant(name, preset):
    """Flags only: a default that a variant changed stays, all other settings are the preset's, and choices hold."""
    args_of = variant_args(name)
    script = presets.script_of(args_of)
    if script not in presets.PRESETS[preset].scripts:
        return
    base, own = SCRIPTS[script].Args(), args_of()
    both = {f.name for f in dataclasses.fields(base)} & {f.name for f in dataclasses.fields(own)} - {"exp_name"}
    changed = {name for name in both if getattr(own, name) != getattr(base, name)}
    args = flags.parse(args_of, words=["--preset", preset])
    settings = presets.PRESETS[preset].flags
    for flag, value in settings.items():
        if hasattr(own, flag):
            assert getattr(args, flag) == (getattr(own, flag) if flag in changed else value), flag
    said = "\n".join(presets.explain(args))
    for flag in changed & settings.keys():
        there = settings[flag]
        assert there == getattr(own, flag) or f"--{flag} {getattr(own, flag)} (there {there})" in said
    hints = typing.get_type_hints(args_of)
    for flag, hint in hints.items():
        if typing.get_origin(hint) is typing.Literal:
            assert getattr(args, flag) in typing.get_args(hint), flag


def test_a_value_that_a_copy_no_longer_takes_is_not_given_to_it():
    """The default is that of the original; the choice of the preset is gone."""

    @dataclasses.dataclass
    class Args(grpo.Args):
        loss_norm: typing.Literal["token", "sequence"] = "token"
        lr_scheduler_type: typing.Literal["linear"] = "linear"

    args = flags.parse(Args, words=["--preset", "verl"])
    assert (args.lr_scheduler_type, args.loss_norm, args.clip_ratio_c) == ("linear", "token", 3.0)
    assert "kept     this script's own: --lr_scheduler_type linear (there constant)" in "\n".join(presets.explain(args))


def test_a_copy_that_left_the_scripts_out_has_presets_too(tmp_path, monkeypatch):
    """A directory with mine.py and runtime/ alone: nothing says then which defaults are the copy's own."""
    whole = presets.settings_of(grpo.Args(), "verl")
    monkeypatch.setattr(presets, "__file__", str(tmp_path / "runtime" / "presets.py"))
    assert presets.settings_of(grpo.Args(), "verl") == whole


def test_the_warm_up_differs_by_what_the_table_says():
    """OpenRLHF's and AReaL's schedules are transformers' (k / W, the first step at 0), with W rounded up and down."""
    rates = {}
    for name, count in (("openrlhf", math.ceil), ("areal", int)):
        args = parse("grpo", "--preset", name)
        for total in (20, 100, 499, 1000):
            parameter = torch.nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.SGD([parameter], lr=args.learning_rate)
            warmup_steps = count(args.warmup_steps * total)
            schedule = transformers.get_scheduler(
                "cosine_with_min_lr" if name == "openrlhf" else "constant_with_warmup",
                optimizer,
                warmup_steps,
                total,
                {"min_lr_rate": args.lr_min_ratio} if name == "openrlhf" else None,
            )
            worst = 0.0
            for step in range(total):
                ours = utils.learning_rate(step, total, args)
                worst = max(worst, abs(ours - schedule.get_last_lr()[0]) / args.learning_rate)
                optimizer.step()
                schedule.step()
            rates[name, total] = f"{worst:.1e}"
    for name, totals in (("openrlhf", (20, 100, 1000)), ("areal", (499, 1000))):
        (listed,) = [d for d in presets.PRESETS[name].differences if "warm-up steps" in d.what]
        assert all(rates[name, total] in listed.size for total in totals), (name, rates)


@pytest.mark.integration
def test_a_run_with_a_preset_is_recorded_resumed_and_finished(tiny, tmp_path, monkeypatch):
    """config.json has the name; the same words resume and find the run finished; without --preset it is another run."""
    words = ["--preset", "verl", "--model_name_or_path", str(tiny), "--output_dir", str(tmp_path)]
    for flag, value in {**TINY_RUN, "num_mini_batches": 2}.items():
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    args = parse("grpo", *words)
    interrupted(args, monkeypatch, after=1)
    metrics = run_here(args)
    assert [m["step"] for m in metrics] == [1, 2]
    assert metrics[-1]["optim/lr"] == 1e-6, "verl's rate, and constant"
    folder = folder_of(args)
    assert folder.name.startswith("grpo__preset=verl__")
    stored = json.loads((folder / "config.json").read_text())["args"]
    assert (stored["preset"], stored["clip_ratio_c"], stored["num_mini_batches"]) == ("verl", 3.0, 2)
    with pytest.raises(SystemExit) as end:
        grpo.preflight(parse("grpo", *words))
    assert end.value.code == 0
    for given, code, text in ((words, 0, "finished"), (words[2:], 4, "not begun")):
        found, said, error = main_here(is_finished, ROOT / "grpo.py", *given)
        assert (found, text in said) == (code, True), said + error


def test_advantage_eps_is_added_to_the_deviation():
    """Also where the KL is inside the statistics: both calls of the script hand it over."""
    rewards = torch.tensor([[0.0, 0.0, 1e-4, 1e-4]], dtype=F64)
    deviation = rewards.std().item()
    for eps in (1e-9, 1e-6, 1e-4, 0.0):
        found = grpo.group_advantages(rewards, "standard", eps)[0, -1].item()
        assert found == pytest.approx(0.5e-4 / (deviation + eps), rel=1e-12)
    assert grpo.group_advantages(torch.ones(1, 4, dtype=F64), "standard", 0.0).tolist() == [[0.0] * 4]
    calls = re.findall(r"= group_advantages\(.*", (ROOT / "grpo.py").read_text())
    assert len(calls) == 2 and all("args.advantage_eps)" in call for call in calls)


# ------------------------------------------------------------------------------------------------------ our own numbers


def shaped(case: frameworks.Case, args) -> list[Sample]:
    """The samples of a case with their rewards, as rewards.py gives them."""
    samples = []
    ends = list(itertools.accumulate(case["lengths"]))
    for i, (end, length) in enumerate(zip(ends, case["lengths"], strict=True)):
        finish = "length" if case["truncated"][i] else "stop"
        sample = Sample(i // 4, i % 4, [1], [1] * length, case["sampler"][end - length : end], finish, 1)
        shape_reward(sample, Reward(case["scores"][i], {}), args)
        samples.append(sample)
    return samples


def ours(case: frameworks.Case, args) -> dict[str, torch.Tensor]:
    """Advantages, loss and gradient of one optimizer step, by the functions of the script that ``args`` belongs to."""
    samples = shaped(case, args)
    offsets = batching.token_offsets(samples)
    new, old, ref, sampler, values, new_values = (
        torch.tensor(case[name], dtype=F64) for name in ("new", "old", "ref", "sampler", "values", "new_values")
    )
    new.requires_grad_()
    new_values.requires_grad_()
    rewards_PG = torch.tensor([s.reward for s in samples], dtype=F64).view(4, 4)
    kl_N = torch.zeros_like(old)
    loss_coef, reward_coef = args.kl_coefficients
    if reward_coef > 0:
        kl_N = reward_coef * kl_reward(
            old, ref, torch.ones_like(old, dtype=torch.bool), estimator=args.kl_reward_estimator or "k1"
        )
    in_loss = list(range(16))
    if args.filter_zero_std_samples:
        in_loss = [i for i in in_loss if rewards_PG[i // 4].amax() > rewards_PG[i // 4].amin()]
    if args.mask_truncated_completions:
        in_loss = [i for i in in_loss if samples[i].finish_reason != "length"]
    script = SCRIPTS[presets.script_of(type(args))]
    found = {}
    if script is grpo:
        kind = args.advantage_normalization_type
        penalty_N = grpo.return_to_go(kl_N, offsets)
        if args.kl_reward_norm == "before_norm":
            rewards_PG = rewards_PG - penalty_N[offsets[:-1]].view(4, 4)
            penalty_N = torch.zeros_like(penalty_N)
        advantages_PG = grpo.group_advantages(rewards_PG, kind, args.advantage_eps)
        advantages_N = advantages_PG.flatten().repeat_interleave(torch.tensor(case["lengths"])) - penalty_N
    else:
        rewards_N = -kl_N
        rewards_N[torch.tensor(offsets[1:]) - 1] += rewards_PG.flatten()
        advantages_N, returns_N = ppo.gae(rewards_N, values, torch.zeros(16, dtype=F64), offsets, 1.0, args.gae_lambda)
        assert args.adv_norm == "batch"
        advantages_N = ppo.whiten(advantages_N)
        weights_N = script.loss_weights(samples, list(range(16)), args).double()
        loss_N, _ = ppo.value_loss(new_values, values, returns_N, args.value_clip)
        found["value_loss"] = (loss_N * weights_N).sum()
        found["value_gradient"] = torch.autograd.grad(found["value_loss"], new_values)[0]
    weights_N = script.loss_weights(samples, in_loss, args).double()
    given = {"logprobs_T": new, "old_T": old, "ref_T": ref, "sampler_T": sampler, "advantages_T": advantages_N}
    loss_N, _ = token_loss(script, loss_coef, args, **given)
    found["advantages"] = advantages_N
    found["loss"] = (loss_N * weights_N).sum()
    found["gradient"] = torch.autograd.grad(found["loss"], new)[0]
    return {name: tensor.detach() for name, tensor in found.items()}


def difference(found: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest difference of a number: absolute below 1 (in a gradient: below its mean size), else relative."""
    assert set(theirs) == set(found)
    worst = 0.0
    for name, expected in theirs.items():
        expected = torch.as_tensor(expected, dtype=F64)
        assert expected.isfinite().all() and expected.shape == found[name].shape
        unit = expected.abs().mean() if "gradient" in name else torch.ones((), dtype=F64)
        error = (found[name] - expected).abs() / expected.abs().maximum(unit.clamp(min=1e-9))
        worst = max(worst, error.max().item())
    return worst


# ------------------------------------------------------------------------------------------ the frameworks' own numbers


class Variant(NamedTuple):
    """Flags given with --preset, what says the same to the framework, the script, and what is known to differ."""

    words: tuple[str, ...] = ()
    options: dict = {}  # noqa: RUF012  # read only
    script: str = "grpo"
    apart: tuple[str, ...] = ()  # cases that should agree in other variants; "*": all
    sampler_is_old: bool = False  # on both sides
    only: tuple[str, ...] = ()  # the quantities that agree; (): all


KL_LOSS = ("--beta", "0.04")
KL_REWARD = ("--beta", "0.04", "--kl_placement", "reward")
FAR_OUT = ("ratio far out",)  # which is also far from the reference
VARIANTS = {
    "verl": {
        "": Variant(),
        "KL in the loss": Variant(KL_LOSS, {"actor": {"use_kl_loss": True, "kl_loss_coef": 0.04}}, apart=FAR_OUT),
        "KL in the reward": Variant(KL_REWARD, {"kl_in_reward": 0.04}),
        "sequences": Variant(("--loss_norm", "sequence"), {"actor": {"loss_agg_mode": "seq-mean-token-mean"}}),
        "constant": Variant(
            ("--loss_norm", "constant", "--max_response_length", "64"),
            {"actor": {"loss_agg_mode": "seq-mean-token-sum-norm"}, "horizon": 64},
        ),
        "centered": Variant(("--advantage_normalization_type", "centered"), {"norm_adv_by_std_in_grpo": False}),
        "PPO": Variant((), {"gae": True}, "ppo"),
        "PPO, KL in the reward": Variant(KL_REWARD, {"gae": True, "kl_in_reward": 0.04}, "ppo"),
    },
    "trl": {
        "": Variant(),
        "sequences": Variant(("--loss_norm", "sequence"), {"config": {"loss_type": "grpo"}}),
        "constant": Variant(
            ("--loss_norm", "constant", "--max_response_length", "64"),
            {"config": {"loss_type": "dr_grpo"}, "horizon": 64},
        ),
        "centered": Variant(("--advantage_normalization_type", "centered"), {"config": {"scale_rewards": "none"}}),
        "truncated ones masked": Variant(
            ("--mask_truncated_completions",), {"config": {"mask_truncated_completions": True}}
        ),
        "KL in the loss": Variant(KL_LOSS, {"config": {"beta": 0.04}}, apart=FAR_OUT, only=("advantages", "gradient")),
        "KL as written": Variant(
            (*KL_LOSS, "--kl_gradient", "naive"), {"config": {"beta": 0.04, "use_bias_correction_kl": False}}
        ),
    },
    "openrlhf": {
        "": Variant(),
        "sequences": Variant(("--loss_norm", "sequence"), {"policy": {"token_level_loss": False}}),
        "dual clip": Variant(("--clip_ratio_c", "3"), {"policy": {"dual_clip": 3.0}}),
        "RLOO": Variant(("--advantage_normalization_type", "leave_one_out"), {"estimator": "rloo"}),
        "Dr. GRPO": Variant(("--advantage_normalization_type", "centered"), {"estimator": "dr_grpo"}),
        "KL in the loss": Variant(
            ("--kl_placement", "loss", "--kl_estimator", "k3"),
            {"kl": {"use_loss": True, "estimator": "k3"}},
            apart=FAR_OUT,
        ),
        "KL in the loss, unbiased": Variant(
            ("--kl_placement", "loss", "--kl_estimator", "k2", "--kl_gradient", "unbiased"),
            {"kl": {"use_loss": True, "estimator": "k2", "unbiased_gradient": True}},
            apart=FAR_OUT,
        ),
    },
    "areal": {
        "": Variant(),
        "KL in the reward": Variant(KL_REWARD, {"kl_ctl": 0.04}, sampler_is_old=True),
        "KL of the sampler": Variant(KL_REWARD, {"kl_ctl": 0.04}, apart=("*",)),
        "batch normalization": Variant((), {"adv_norm": True}, apart=("*",)),
        "PPO": Variant((), {"gae": True, "adv_norm": True}, "ppo", apart=("*",)),
    },
}


def prepared(case: frameworks.Case, variant: Variant) -> frameworks.Case:
    return {**case, "sampler": case["old"]} if variant.sampler_is_old else case


def frameworks_folder(tmp_path_factory) -> Path:
    """Return the folder of the installed wheels: RLVR_FRAMEWORKS, which the next run finds again, or a temporary."""
    return Path(os.environ.get("RLVR_FRAMEWORKS") or tmp_path_factory.getbasetemp() / "frameworks")


@pytest.fixture(scope="module")
def theirs(tiny, tmp_path_factory):
    """theirs(name): (folder of the wheel, variant -> case -> what the framework's functions give). Skips without."""

    @functools.cache
    def results(name: str) -> tuple[Path, dict]:
        package, version = presets.PRESETS[name].version.split()
        folder = frameworks_folder(tmp_path_factory) / package
        reason = frameworks.install(package, version, folder)
        if reason:
            pytest.skip(reason)
        numbers = frameworks.cases() | frameworks.far_cases()
        work = tmp_path_factory.mktemp(package)
        jobs = []
        for v, variant in VARIANTS[name].items():
            jobs += [((v, c), prepared(numbers[c], variant), variant.options) for c in numbers]
        torch.save(jobs, work / "jobs.pt")
        words = [name, str(folder), str(work / "jobs.pt"), str(work / "results.pt")]
        words += [str(tiny)] if name == "trl" else []
        command = [sys.executable, str(ROOT / "tests" / "frameworks.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, cwd=work)
        assert done.returncode == 0, done.stderr[-3000:]
        return folder, torch.load(work / "results.pt", weights_only=False)["results"]

    return results


WHEELS = ("verl", "trl", "openrlhf", "areal")


@pytest.mark.slow
@pytest.mark.parametrize("name", WHEELS)
def test_values_and_gradients_are_those_of_the_frameworks_own_functions(name, theirs):
    """Advantages, loss and gradient of every variant on every case agree to 1e-6."""
    _, results = theirs(name)
    numbers = frameworks.cases() | ({"sampler far": frameworks.far_cases()["sampler far"]} if name == "areal" else {})
    wrong = {}
    compared = 0
    for v, variant in VARIANTS[name].items():
        args = parse(variant.script, "--preset", name, *variant.words)
        for c, case in numbers.items():
            if c in variant.apart or "*" in variant.apart:
                continue
            found = ours(prepared(case, variant), args)
            expected = results[v, c]
            for quantity in variant.only or expected:
                compared += 1
                error = difference({quantity: found[quantity]}, {quantity: expected[quantity]})
                if not error < 1e-6:
                    wrong[v, c, quantity] = error
    assert wrong == {}
    assert compared >= 45


# Difference.what begins with -> (variant, case, quantity) whose relative difference is the number in Difference.size.
MEASURED = {
    "verl": {
        "k3 in the loss": ("KL in the loss", "reference far", "gradient"),
    },
    "trl": {
        "the log-ratio": ("", "log-ratio beyond 20", "loss"),
    },
    "openrlhf": {
        "k2 and k3 in the loss": ("KL in the loss", "reference far", "gradient"),
    },
    "areal": {
        "advantages are normalized once more": ("batch normalization", "binary scores", "advantages"),
        "the KL in the reward": ("KL of the sampler", "random", "advantages"),
        "the log-ratio": ("", "log-ratio beyond 20", "loss"),
        "whitening": ("PPO", "random", "advantages"),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WHEELS)
def test_differences_have_the_size_that_the_table_says(name, theirs):
    _, results = theirs(name)
    numbers = frameworks.cases() | frameworks.far_cases()
    for start, (v, c, quantity) in MEASURED[name].items():
        (listed,) = [d for d in presets.PRESETS[name].differences if d.what.startswith(start)]
        variant = VARIANTS[name][v]
        found = ours(prepared(numbers[c], variant), parse(variant.script, "--preset", name, *variant.words))
        measured = difference({quantity: found[quantity]}, {quantity: results[v, c][quantity]})
        assert f"{measured:.1e}" in listed.size, (start, f"{measured:.1e}")


@pytest.mark.slow
@pytest.mark.parametrize("name", WHEELS)
def test_a_wrong_setting_is_caught_by_the_comparison(name, theirs):
    """Mutation: every setting of a preset that reaches these functions, changed alone, makes some case disagree."""
    _, results = theirs(name)
    numbers = frameworks.cases()
    wrong = WRONG | ({"clip_ratio_c": None} if name == "verl" else {})
    flags_here = set(presets.PRESETS[name].flags)
    others = {"max_reward_clip", "reward_scaling", "importance_sampling_mask"}
    assert set(wrong) - flags_here <= others
    for flag, value in wrong.items():
        args = dataclasses.replace(parse("grpo", "--preset", name), **{flag: value})
        errors = [difference(ours(case, args), results["", c]) for c, case in numbers.items()]
        assert max(errors) > 1e-5, f"{flag}={value} instead of {getattr(parse('grpo', '--preset', name), flag)}"


# Values that no preset has; those of "standard" and "token" would be none elsewhere.
WRONG = {
    "advantage_normalization_type": "leave_one_out",
    "advantage_eps": 3e-5,
    "loss_norm": "sequence",
    "clip_lower": 0.1,
    "clip_higher": 0.3,
    "clip_ratio_c": 2.0,
    "mask_truncated_completions": True,
    "filter_zero_std_samples": True,
    "mask_no_eos_with_zero": True,
    "truncated_importance_sampling_ratio_cap": 1.01,
    "importance_sampling_mask": (0.99, 1.01),
    "max_reward_clip": 0.3,
    "reward_scaling": 2.0,
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_values_and_gradients_are_the_recorded_ones(name):
    """The same for the frameworks that are on no index, against what their functions gave at the commit in the file.

    TinyZero's entropy bonus needs logits, which no case has; its coefficient is 0 on both sides.
    """
    script = presets.PRESETS[name].scripts[0]
    assert GOLDEN[name]["commit"].startswith(presets.PRESETS[name].version.split()[1])
    for c, entry in GOLDEN[name]["cases"].items():
        if c not in RECORDED_DIFFERENCES:
            args = parse(script, "--preset", name, *entry["words"])
            assert difference(ours(entry["case"], args), entry["results"]) < 1e-6, c


RECORDED_DIFFERENCES = {
    "log-ratio beyond 20": ("the log-ratio", "loss"),
    "KL beside importance weights": ("the KL in the loss", "gradient"),
    "micro-batches of 4 ragged rows": ("the loss is a mean", "gradient"),
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_recorded_differences_have_the_size_that_the_table_says(name):
    script = presets.PRESETS[name].scripts[0]
    known = {c: entry for c, entry in GOLDEN[name]["cases"].items() if c in RECORDED_DIFFERENCES}
    assert known
    for c, entry in known.items():
        start, quantity = RECORDED_DIFFERENCES[c]
        (listed,) = [d for d in presets.PRESETS[name].differences if d.what.startswith(start)]
        found = ours(entry["case"], parse(script, "--preset", name, *entry["words"]))
        measured = difference({quantity: found[quantity]}, {quantity: entry["results"][quantity]})
        assert f"{measured:.1e}" in listed.size, (start, f"{measured:.1e}")


@pytest.mark.parametrize("name", list(GOLDEN))
def test_a_wrong_setting_is_caught_by_the_recorded_numbers(name):
    script = presets.PRESETS[name].scripts[0]
    right = parse(script, "--preset", name)
    cases = {c: entry for c, entry in GOLDEN[name]["cases"].items() if c not in RECORDED_DIFFERENCES}
    changes = {"loss_norm": "sequence", "clip_lower": 0.1, "clip_higher": 0.35, "clip_ratio_c": 2.0}
    changes |= {"mask_truncated_completions": True, "mask_no_eos_with_zero": True, "beta": 0.02}
    changes |= {"kl_estimator" if script == "grpo" else "kl_reward_estimator": "k2"}
    changes |= {"truncated_importance_sampling_ratio_cap": 1.5}
    if script == "grpo":
        changes |= {"advantage_normalization_type": "standard", "filter_zero_std_samples": False}
        changes |= {"kl_placement": "reward", "kl_gradient": "unbiased", "reward_scaling": 1.0}
    else:
        changes |= {"gae_lambda": 0.9, "value_clip": 0.2}
    given = [(entry, parse(script, "--preset", name, *entry["words"])) for entry in cases.values()]
    for flag, value in changes.items():
        assert getattr(right, flag) != value
        changed = ((entry, dataclasses.replace(args, **{flag: value})) for entry, args in given)
        assert any(difference(ours(entry["case"], args), entry["results"]) > 1e-5 for entry, args in changed), flag


def default_of(config: dict, path: str):
    """A dotted path in a YAML file."""
    for part in path.split("."):
        config = config[int(part)] if isinstance(config, list) else config[part]
    return config


class Source(NamedTuple):
    """Location of a framework's setting: its field = default, or its code, and the line of a file."""

    theirs: str
    file: str
    line: int


def settings(name: str) -> dict[str, list[Source]]:
    """Flag -> the sources in the comments of presets.toml; none where the framework has no such step."""
    text = (ROOT / "runtime" / "arguments" / "presets.toml").read_text()
    file, lines = re.search(rf"^\[{name}\.flags\] # (\S+)\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE).groups()
    found = {}
    for line in lines.splitlines():
        flag, comment = re.fullmatch(r"(\w+) = .*? # (.*)", line).groups()
        found[flag] = []
        for part in comment.split(" | ") if comment != "no such step" else ():
            place, theirs = part.split(" ", 1)
            own, number = place.rsplit(":", 1)
            found[flag].append(Source(theirs, own or file, int(number)))
    return found


def test_every_setting_of_the_table_has_its_source_or_says_that_there_is_none():
    for name, preset in presets.PRESETS.items():
        listed = settings(name)
        assert list(listed) == list(preset.flags)
        assert sum(map(len, listed.values())) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", WHEELS)
def test_defaults_stand_where_the_table_says(name, theirs):
    """Every setting's file and line in the wheel have the field and its default. AReaL's examples are in no wheel."""
    folder, _ = theirs(name)
    checked = 0
    for theirs, file, number in itertools.chain(*settings(name).values()):
        if file.startswith("examples/"):
            continue
        root = Path(transformers.__file__).parent.parent if file.startswith("transformers/") else folder
        text = (root / file).read_text()
        lines = text.splitlines()
        where = (theirs, file, number)
        field, equals, value = theirs.partition("=")
        if file.endswith(".yaml"):
            assert str(default_of(yaml.safe_load(text), field)).lower() in (value, str(yaml.safe_load(value)).lower())
            field = field.split(".")[-1] if not field[-1].isdigit() else value
            assert field in lines[number - 1], where
        elif equals and re.fullmatch(r"[-.\w]+", field):
            assert field in lines[number - 1] and value in " ".join(lines[number - 1 : number + 4]), where
        else:
            assert theirs in lines[number - 1], where
        checked += 1
    assert checked >= (10 if name == "areal" else 20)

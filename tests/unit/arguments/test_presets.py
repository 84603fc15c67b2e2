"""--preset NAME: the presets on the command line, and their numbers against the frameworks' own functions.

golden/presets.json has what they gave at the versions and commits that it names. A slow test installs each framework's
wheel without its dependencies (into RLVR_FRAMEWORKS, where it is kept, else a temporary folder) and reads the defaults
again; it is skipped with the reason where the package index cannot be reached.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import sys
import types
import typing
from pathlib import Path
from typing import NamedTuple

import is_finished
import pytest
import torch
import transformers
import yaml
from helpers import ROOT, TINY_RUN, folder_of, install_wheel, interrupted, main_here, run_here, token_loss
from variant import names as variant_names
from variant import variant as variant_text

import grpo
import ppo
import utils
from rewards import Reward, shape_reward
from runtime.arguments import checks, flags, presets
from runtime.data.samples import Sample
from runtime.run import directory
from runtime.training import batching

SCRIPTS = {"grpo": grpo, "ppo": ppo}
PAIRS = [(script, name) for name, preset in presets.PRESETS.items() for script in preset.scripts]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "presets.json").read_text())
NUMBERS = GOLDEN.pop("numbers")  # cases of several frameworks; a case of one stands with it
Case = dict[str, typing.Any]
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


def shaped(case: Case, args) -> list[Sample]:
    """The samples of a case with their rewards, as rewards.py gives them."""
    samples = []
    ends = list(itertools.accumulate(case["lengths"]))
    for i, (end, length) in enumerate(zip(ends, case["lengths"], strict=True)):
        finish = "length" if case["truncated"][i] else "stop"
        sample = Sample(i // 4, i % 4, [1], [1] * length, case["sampler"][end - length : end], finish, 1)
        shape_reward(sample, Reward(case["scores"][i], {}), args)
        samples.append(sample)
    return samples


def ours(case: Case, args) -> dict[str, torch.Tensor]:
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
        kl_N = reward_coef * grpo.kl_value(args.kl_reward_estimator or "k1", old, old, ref)
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
    assert theirs
    worst = 0.0
    for name, expected in theirs.items():
        expected = torch.as_tensor(expected, dtype=F64)
        assert expected.isfinite().all() and expected.shape == found[name].shape
        unit = expected.abs().mean() if "gradient" in name else torch.ones((), dtype=F64)
        error = (found[name] - expected).abs() / expected.abs().maximum(unit.clamp(min=1e-9))
        worst = max(worst, error.max().item())
    return worst


# ------------------------------------------------------------------------------------------ the frameworks' own numbers


def compared(name: str, differs: bool) -> dict[str, tuple[Case, object, dict]]:
    """Recorded case -> (its numbers, the arguments that say the same here, what the framework's functions gave)."""
    found = {}
    for c, entry in GOLDEN[name]["cases"].items():
        if differs == ("differs" in entry):
            args = parse(entry["script"], "--preset", name, *entry["words"])
            found[c] = (NUMBERS.get(str(entry["case"]), entry["case"]), args, entry["results"])
    return found


@pytest.mark.parametrize("name", list(GOLDEN))
def test_values_and_gradients_are_the_recorded_ones(name):
    """Advantages, losses and gradients of every case agree to 1e-6 with what the framework's own functions gave.

    TinyZero's entropy bonus needs logits, which no case has; its coefficient is 0 on both sides.
    """
    version = presets.PRESETS[name].version
    assert GOLDEN[name].get("version", version) == version
    assert GOLDEN[name].get("commit", version.split()[1]).startswith(version.split()[1])
    wrong = {}
    for c, (case, args, theirs) in compared(name, differs=False).items():
        error = difference(ours(case, args), theirs)
        if not error < 1e-6:
            wrong[c] = error
    assert wrong == {}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_differences_have_the_size_that_the_table_says(name):
    known = compared(name, differs=True)
    assert known
    for c, (case, args, theirs) in known.items():
        start = GOLDEN[name]["cases"][c]["differs"]
        (listed,) = [d for d in presets.PRESETS[name].differences if d.what.startswith(start)]
        measured = difference(ours(case, args), theirs)
        assert f"{measured:.1e}" in listed.size, (start, f"{measured:.1e}")


# Values that no preset with such a setting has.
WRONG = {
    "loss_norm": "sequence",
    "clip_lower": 0.1,
    "clip_higher": 0.35,
    "clip_ratio_c": 2.0,
    "mask_truncated_completions": True,
    "filter_zero_std_samples": True,
    "mask_no_eos_with_zero": True,
    "truncated_importance_sampling_ratio_cap": 1.01,
    "importance_sampling_mask": (0.99, 1.01),
    "reward_scaling": 2.0,
}
OF_GROUPS = {"advantage_normalization_type": "leave_one_out", "advantage_eps": 3e-5, "max_reward_clip": 0.3}
WRONG_OF = {
    "verl": WRONG | OF_GROUPS | {"clip_ratio_c": None},
    "tinyzero": WRONG | {"beta": 0.02, "kl_reward_estimator": "k2", "gae_lambda": 0.9, "value_clip": 0.2},
    "open-instruct": WRONG
    | {"advantage_normalization_type": "standard", "filter_zero_std_samples": False, "reward_scaling": 1.0}
    | {"beta": 0.02, "kl_estimator": "k2+", "kl_placement": "reward"},
}


@pytest.mark.parametrize("name", list(GOLDEN))
def test_a_wrong_setting_is_caught_by_the_recorded_numbers(name):
    """Mutation: every setting of a preset that reaches these functions, changed alone, makes some case disagree."""
    cases = compared(name, differs=False).values()
    for flag, value in WRONG_OF.get(name, WRONG | OF_GROUPS).items():
        known = [entry for entry in cases if hasattr(entry[1], flag)]
        if all(getattr(args, flag) == value for _, args, _ in known):
            continue
        changed = [(case, dataclasses.replace(args, **{flag: value}), theirs) for case, args, theirs in known]
        assert any(difference(ours(case, args), theirs) > 1e-5 for case, args, theirs in changed), flag


@pytest.fixture(scope="module")
def folder_of_wheel(tmp_path_factory):
    """folder_of_wheel(name): where a framework's wheel is installed. Skips without it."""

    def install(name: str) -> Path:
        package, version = presets.PRESETS[name].version.split()
        place = Path(os.environ.get("RLVR_FRAMEWORKS") or tmp_path_factory.getbasetemp() / "frameworks") / package
        reason = install_wheel(package, version, place)
        if reason:
            pytest.skip(reason)
        return place

    return install


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
@pytest.mark.parametrize("name", [name for name, entry in GOLDEN.items() if "version" in entry])
def test_defaults_stand_where_the_table_says(name, folder_of_wheel):
    """Every setting's file and line in the wheel have the field and its default. AReaL's examples are in no wheel."""
    folder = folder_of_wheel(name)
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

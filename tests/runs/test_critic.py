"""The critic of ppo.py: its own optimizer settings, and what is left of it at the end of a run."""

from __future__ import annotations

from types import SimpleNamespace

import deepspeed
import pytest
import torch
from helpers import folder_of, make_samples, read_jsonl, rejected, run_here, tiny_args
from safetensors.torch import load_file
from transformers import AutoTokenizer

import ppo
import utils
from ppo import Args
from runtime.training import batching, deepspeed_zero, memory

# A run in which all of them can be seen: two optimizer steps a batch, a decay and a clip that hold, a falling rate.
RUN = {"eval_prompts": 0, "num_mini_batches": 2, "learning_rate": 1e-3, "critic_learning_rate": 1e-3}
RUN |= {"weight_decay": 0.1, "warmup_steps": 1, "lr_scheduler_type": "linear"}


class Watched:
    """The steps of the critic's and the policy's optimizers: rate, decay and clipping of each, in order."""

    def __init__(self, monkeypatch):
        self.critic = None
        self.steps: dict[str, list[tuple[float, float, float]]] = {"policy": [], "critic": []}
        make, backward = ppo.make_critic, deepspeed_zero.backward_and_step

        def spy_make(*arguments):
            self.critic = make(*arguments)
            return self.critic

        def spy_backward(engine, loss, is_last, *rest):
            if is_last:
                (group,) = engine.optimizer.param_groups
                name = "critic" if engine is self.critic else "policy"
                clip = engine.gradient_clipping()
                self.steps[name].append((group["lr"], group["weight_decay"], clip))
            backward(engine, loss, is_last, *rest)

        monkeypatch.setattr(ppo, "make_critic", spy_make)
        monkeypatch.setattr(deepspeed_zero, "backward_and_step", spy_backward)


@pytest.fixture(scope="module")
def plain(tiny, tmp_path_factory) -> tuple[Watched, list[dict], dict]:
    """The run without settings of the critic's own."""
    return run(tiny, tmp_path_factory.mktemp("plain"), pytest.MonkeyPatch())


def run(tiny, out, monkeypatch, **changes) -> tuple[Watched, list[dict], dict]:
    with monkeypatch.context() as patch:
        watched = Watched(patch)
        args = tiny_args(tiny, out, "ppo", **(RUN | changes))
        metrics = run_here(args, "ppo")
        weights = {k: v.clone() for k, v in watched.critic.module.state_dict().items()}
    return watched, metrics, weights


@pytest.mark.integration
@pytest.mark.parametrize(
    "setting, value, column",
    [
        ("lr_scheduler_type", "constant", 0),
        ("warmup_steps", 3, 0),
        ("weight_decay", 0.0, 1),
        ("max_grad_norm", 1e-3, 2),
    ],
)
def test_a_setting_of_the_critic_changes_the_critic_alone(tiny, tmp_path, monkeypatch, plain, setting, value, column):
    """The column that the setting names, and with it the trained critic; the policy's steps stay, bit for bit."""
    shared, metrics, weights = plain
    own, other, changed = run(tiny, tmp_path, monkeypatch, critic=(f"{setting}={value}",))
    assert own.steps["policy"] == shared.steps["policy"]
    assert own.steps["critic"] != shared.steps["critic"]
    for ours, theirs in zip(own.steps["critic"], shared.steps["critic"], strict=True):
        assert [a for i, a in enumerate(ours) if i != column] == [a for i, a in enumerate(theirs) if i != column]
    assert any(not torch.equal(changed[name], weights[name]) for name in weights)
    assert other[0]["optim/grad_norm"] == metrics[0]["optim/grad_norm"]
    if column != 0:
        assert all(step[column] == value for step in own.steps["critic"])


@pytest.mark.integration
def test_the_critic_has_mini_batches_and_a_lambda_of_its_own(tiny, tmp_path, monkeypatch, plain):
    """Twice the mini-batches are twice its steps; advantages keep the policy's lambda, and the returns do not."""
    shared, _, _ = plain
    count = 2 * RUN["num_mini_batches"]
    own, _, _ = run(tiny, tmp_path / "mini", monkeypatch, critic=(f"num_mini_batches={count}",))
    assert len(own.steps["critic"]) == 2 * len(shared.steps["critic"])
    assert own.steps["policy"] == shared.steps["policy"]
    lambdas = {"total_steps": 1, "critic_learning_rate": 1e-2, "num_epochs": 1}
    first = {}
    for name, changes in {
        "low": {"gae_lambda": 0.5},
        "both": {"gae_lambda": 0.5, "critic": ("gae_lambda=1.0",)},
        "high": {"gae_lambda": 1.0},
    }.items():
        first[name] = run(tiny, tmp_path / name, monkeypatch, **lambdas, **changes)
    returns = {name: metrics[0]["value/return_mean"] for name, (_, metrics, _) in first.items()}
    assert returns["both"] == returns["high"] != returns["low"]
    assert first["both"][0].steps["policy"] == first["low"][0].steps["policy"]
    assert first["both"][1][0]["optim/grad_norm"] == first["low"][1][0]["optim/grad_norm"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gradient_checkpointing=yes",), "--critic gradient_checkpointing=yes: 'yes' is not true or false"),
        (("num_mini_batches=0",), "num_epochs and num_mini_batches must be above 0"),
        (("num_mini_batches=9",), "at most --num_unique_prompts_rollout"),
        (("gae_lambda=1.5",), "gae_lambda is at most 1"),
    ],
)
def test_settings_of_the_critic_that_cannot_be(words, message, capsys):
    assert message in rejected(capsys, ppo.settings_of_critic, ppo.Args(critic=words))
    found = ppo.settings_of_critic(ppo.Args(critic=("gradient_checkpointing=true", "gae_lambda=0.9")))
    assert (found.gradient_checkpointing, found.gae_lambda, found.num_mini_batches) == (True, 0.9, 1)


def test_deepspeed_is_told_of_the_same_device_for_policy_and_critic(tiny, tmp_path, monkeypatch):
    told = []
    plain_config = deepspeed_zero.deepspeed_config

    def config(args, dtype, cuda):
        told.append((args.learning_rate, dtype, cuda))
        return plain_config(args, dtype, cuda)

    monkeypatch.setattr(deepspeed_zero, "deepspeed_config", config)
    rates = {"learning_rate": 1e-3, "critic_learning_rate": 2e-3}
    run_here(tiny_args(tiny, tmp_path, "ppo", total_steps=1, eval_prompts=0, **rates), "ppo")
    assert sorted(told) == [(1e-3, torch.float32, False), (2e-3, torch.float32, False)]


@pytest.mark.integration
def test_the_warm_up_of_the_critic_is_the_policys_unless_it_has_one(tiny, tmp_path, monkeypatch):
    """4 optimizer steps, half of them warm-up: 1/3, 2/3; with 1 of its own, which the ratio does not lengthen, 1/2."""
    changes = {"warmup_steps": 0.5, "lr_scheduler_type": "constant"}
    shared, _, _ = run(tiny, tmp_path / "shared", monkeypatch, **changes)
    own, _, _ = run(tiny, tmp_path / "own", monkeypatch, critic=("warmup_steps=1",), **changes)
    rates = [rate / 1e-3 for rate, *_ in shared.steps["critic"]]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1])
    assert [rate / 1e-3 for rate, *_ in own.steps["critic"]] == pytest.approx([1 / 2, 1, 1, 1])


@pytest.mark.integration
@pytest.mark.parametrize("epochs, policy_epochs", [(3, 1), (1, 2)])
def test_the_critic_has_epochs_of_its_own(tiny, tmp_path, monkeypatch, epochs, policy_epochs):
    """More than the policy, or fewer: each schedule runs over its own optimizer steps, to the same last fraction."""
    changes = {"critic": (f"num_epochs={epochs}",), "num_epochs": policy_epochs, "entropy_coef": 1e-3}
    watched, metrics, _ = run(tiny, tmp_path, monkeypatch, **changes)
    assert len(watched.steps["critic"]) == 2 * 2 * epochs  # steps x mini-batches x epochs
    assert len(watched.steps["policy"]) == 2 * 2 * policy_epochs
    assert [m["optim/steps"] for m in metrics] == [2 * policy_epochs] * 2
    for name, count in (("critic", epochs), ("policy", policy_epochs)):
        expected = [utils.learning_rate(i, 4 * count, Args(**RUN)) for i in range(4 * count)]
        assert [rate for rate, *_ in watched.steps[name]] == pytest.approx(expected, rel=1e-12)


def values(model, samples) -> torch.Tensor:
    """Return a saved critic's value before each response token: its logits at the positions that predict them."""
    parts = []
    for s in samples:
        ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :, 0]
        parts.append(logits[len(s.prompt_ids) - 1 : -1])
    return torch.cat(parts)


def outputs(critic, samples) -> torch.Tensor:
    """Return the value of a run's critic before each response token, in its own units."""
    placement = {"layout": "shared", "rank": 0, "world_size": 1, "device": torch.device("cpu")}
    found = torch.zeros(batching.token_offsets(samples)[-1] + 1)
    with torch.no_grad():
        for mb in batching.micro_batches(samples, list(range(len(samples))), budget=512, **placement):
            found[mb.tokens] = critic(mb)
    return found[:-1]


@pytest.mark.integration
@pytest.mark.parametrize("value_norm, zero_stage", [("none", 2), ("running", 2), ("none", 3)])
def test_the_trained_critic_is_a_model_that_transformers_loads(tiny, tmp_path, monkeypatch, value_norm, zero_stage):
    """Its logits are the values of the trained critic, in units of the return whatever --value_norm."""
    from transformers import AutoModelForTokenClassification

    normalizers = []

    class Kept(ppo.ValueNormalizer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            normalizers.append(self)

    monkeypatch.setattr(ppo, "ValueNormalizer", Kept)
    changes = {"value_norm": value_norm, "zero_stage": zero_stage}
    watched, _, _ = run(tiny, tmp_path, monkeypatch, **changes)
    folder = folder_of(tiny_args(tiny, tmp_path, "ppo", **(RUN | changes)), "ppo")
    model, report = AutoModelForTokenClassification.from_pretrained(folder / "critic", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.config.num_labels == 1
    assert (folder / "critic" / "tokenizer.json").is_file() and not (folder / "critic.partial").exists()
    samples = make_samples()
    mine = outputs(watched.critic, samples)
    assert mine.std() > 1e-4, "the critic has learned to say different things"
    expected = normalizers[0].denormalize(mine)
    assert torch.allclose(values(model.eval(), samples), expected, atol=1e-5)
    assert (normalizers[0].std != 1.0) == (value_norm == "running")


@pytest.mark.integration
def test_a_run_continues_from_a_saved_critic(tiny, tmp_path, monkeypatch):
    """--critic model_name_or_path=critic/ starts with its values, head included; a model without head starts near 0."""
    first = {"run_name": "first"}
    watched, _, _ = run(tiny, tmp_path, monkeypatch, **first)
    samples = make_samples()
    trained = outputs(watched.critic, samples)
    critic = tmp_path / "first" / "critic"
    assert {"score.weight", "score.bias"} <= load_file(critic / "model.safetensors").keys()
    again, metrics, _ = run(
        *(tiny, tmp_path, monkeypatch),
        run_name="second",
        critic=(f"model_name_or_path={critic}", "weight_decay=0"),
        critic_learning_rate=1e-30,
        total_steps=1,
    )
    assert torch.allclose(outputs(again.critic, samples), trained, atol=1e-6)
    assert metrics[0]["value/mean"] != read_jsonl(tmp_path / "first" / "metrics.jsonl")[0]["value/mean"]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_critic_is_checkpointed_as_its_flag_says(tiny, tmp_path, monkeypatch, checkpointed):
    """Memory alone shows it in a run: --gradient_checkpointing also applies to the critic, and its default does not."""
    monkeypatch.setattr(deepspeed, "initialize", lambda model, **_: [model])
    monkeypatch.setattr(deepspeed_zero, "dedupe_fp32_weights", lambda engine: engine)
    monkeypatch.setattr(deepspeed_zero, "dither_masters", lambda engine: engine)
    args = tiny_args(tiny, tmp_path, "ppo", gradient_checkpointing=checkpointed)
    run = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, attention="sdpa", layout="padded")
    run.tokenizer, run.sizes = AutoTokenizer.from_pretrained(tiny), memory.default_sizes(args, False)
    critic = ppo.make_critic(ppo.settings_of_critic(args), run, len(run.tokenizer))
    assert critic.model.is_gradient_checkpointing == checkpointed


def test_a_critic_of_another_model_keeps_its_own_config(tiny):
    """--override_config is for the policy: a number of layers, or a rope theta, of its own."""
    changed = Args(
        model_name_or_path="policy", override_config='{"rope_theta": 5e5}', critic=(f"model_name_or_path={tiny}",)
    )
    assert ppo.settings_of_critic(changed).override_config is None
    same = Args(model_name_or_path=str(tiny), override_config='{"rope_theta": 5e5}')
    assert ppo.settings_of_critic(same).override_config == same.override_config


def test_no_critic_is_saved_where_none_is_trained(tiny, tmp_path):
    args = tiny_args(tiny, tmp_path, "ppo", disable_value=True, total_steps=1, eval_prompts=0)
    run_here(args, "ppo")
    assert (folder_of(args, "ppo") / "model").is_dir() and not (folder_of(args, "ppo") / "critic").exists()


@pytest.mark.integration
def test_an_extended_run_sets_the_earlier_critic_aside(tiny, tmp_path):
    """As model/: until the longer run has made its own, no folder claims to be its result."""
    run_here(tiny_args(tiny, tmp_path, "ppo", run_name="run", save_every=2, eval_prompts=0), "ppo")
    before = (tmp_path / "run" / "critic" / "model.safetensors").read_bytes()
    run_here(tiny_args(tiny, tmp_path, "ppo", run_name="run", save_every=2, eval_prompts=0, total_steps=4), "ppo")
    assert (tmp_path / "run" / "critic.aside" / "model.safetensors").read_bytes() == before
    assert (tmp_path / "run" / "critic" / "model.safetensors").read_bytes() != before

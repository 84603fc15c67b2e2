"""training/pretrained.py and model_files.py: no weight is random, no field of config.json changes a gradient."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import model_zoo
import pytest
import torch
from helpers import rejected, tiny_args
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import grpo
import utils
from runtime.arguments.values import ModelName
from runtime.run import loading, saving
from runtime.system import process
from runtime.training import deepspeed_zero, model_files, pretrained

DOWN = "model.layers.1.mlp.down_proj.weight"


def copy_of(tiny: Path, folder: Path, change=None, **config) -> Path:
    """A copy of the tiny model with other weights (``change`` gets and returns a dict of tensors) or another config."""
    shutil.copytree(tiny, folder)
    if change is not None:
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def load(folder: Path, tmp_path: Path, *rest, **changes):
    return pretrained.load_model(tiny_args(folder, tmp_path, **changes), torch.float32, "sdpa", *rest)


def renamed(weights: dict, old: str, new: str) -> dict:
    return {name.replace(old, new, 1): weight for name, weight in weights.items()}


# what is wrong with a checkpoint -> (its weights, its config, --override_config, words of the message)
BROKEN = {
    "unknown type": (None, {"model_type": "t5"}, None, ["transformers cannot load it (ValueError: Unrecognized"]),
    "no head": (None, {"tie_word_embeddings": False}, None, ["lm_head.weight"]),
    "no matrix": (lambda w: {k: v for k, v in w.items() if k != DOWN}, {}, None, ["1 of the model's", DOWN]),
    "more layers": (None, {"num_hidden_layers": 3}, None, ["model.layers.2.", "..."]),
    "more layers by a flag": (None, {}, '{"num_hidden_layers": 3}', ["model.layers.2.", "--override_config"]),
    "prefix": (lambda w: {f"_orig_mod.{k}": v for k, v in w.items()}, {}, None, ["model.embed_tokens.weight"]),
    "other name": (lambda w: renamed(w, DOWN, DOWN.replace("down", "dwn")), {}, None, [DOWN]),
    "other shape": (lambda w: w | {DOWN: w[DOWN][:, :9].clone()}, {}, None, [DOWN, "[64, 9] there and [64, 128]"]),
}


@pytest.mark.parametrize("head", [True, False], ids=["policy", "critic"])
@pytest.mark.parametrize("name", BROKEN)
def test_a_checkpoint_without_all_weights_is_rejected(tiny, tmp_path, capsys, name, head):
    """By the names of the weights; a critic may lack the head alone."""
    change, config, override, words = BROKEN[name]
    folder = copy_of(tiny, tmp_path / "model", change, **config)
    flag = "--model_name_or_path" if head else "--critic model_name_or_path"
    if name == "no head" and not head:
        load(folder, tmp_path, flag)
        return
    said = rejected(capsys, load, folder, tmp_path, flag, override_config=override)
    assert all(word in said for word in [f"error: {flag} {folder}", *words]), said


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def lose_a_shard(folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="200KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    next(folder.glob("model-00002-of-*.safetensors")).unlink()


DAMAGED = {
    "model.safetensors is empty or only a part": lambda folder: cut(folder / "model.safetensors"),
    "model.safetensors.index.json names model-00002-of-": lose_a_shard,
    "has model.fp16.safetensors, but not": lambda folder: shutil.move(
        folder / "model.safetensors", folder / "model.fp16.safetensors"
    ),
}


@pytest.mark.parametrize("words", DAMAGED)
def test_weights_that_are_not_all_there_are_named_before_the_data_are_read(tiny, tmp_path, capsys, words):
    folder = copy_of(tiny, tmp_path / "model")
    DAMAGED[words](folder)
    assert words in rejected(capsys, model_files.check_model, tiny_args(folder, tmp_path))


def test_the_head_of_inkling_is_scaled_and_cut(tmp_path):
    """It divides, and the last rows of its head are no tokens."""
    fields = {"head_dim": 32, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 1, "swa_head_dim": 32}
    experts = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    model_zoo.write_model(tmp_path, "inkling_text", fields | experts | {"unpadded_vocab_size": 300})
    policy = utils.TokenLogprobs(load(tmp_path, tmp_path), 0.8, 1000)
    assert utils.layout_error(policy, "padded", 2, 76)[0] < 1e-5


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "changes", [{"rope_theta": 1e6}, {"rope_scaling": YARN}, {"rope_scaling": YARN, "rope_theta": 9}]
)
@pytest.mark.parametrize("own", [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}])
def test_an_override_of_rope_is_an_edited_config(tiny, tmp_path, own, changes):
    """In files of transformers 4 and 5; vLLM, which replaces attributes, gets all that the trainer computes with."""
    plain = json.loads((tiny / "config.json").read_text())
    plain.pop("rope_parameters")
    folder = copy_of(tiny, tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(plain | own))
    edited = copy_of(folder, tmp_path / "edited")
    (edited / "config.json").write_text(json.dumps(plain | {"rope_theta": 5e5} | changes))
    args = tiny_args(folder, tmp_path, override_config=json.dumps(changes))
    config = pretrained.load_config(args)
    assert config.rope_parameters == pretrained.load_config(tiny_args(edited, tmp_path)).rope_parameters
    given = pretrained.engine_overrides(config.to_dict(), changes)
    assert given == {"rope_parameters": config.rope_parameters}
    assert config.hidden_size == plain["hidden_size"] and config._name_or_path == str(folder)


def test_an_override_of_a_part(tmp_path, capsys, with_vision):
    """The other fields of the part stay; a field of the part that is given for the whole is rejected."""
    change = {"text_config": {"rms_norm_eps": 0.5, "rope_theta": 7.0}}
    config = pretrained.load_config(tiny_args(with_vision, tmp_path, override_config=json.dumps(change)))
    text = config.text_config
    assert (text.rms_norm_eps, text.rope_parameters["rope_theta"], text.hidden_size) == (0.5, 7.0, 64)
    given = pretrained.engine_overrides(config.to_dict(), change)["text_config"]
    assert given == {"rms_norm_eps": 0.5, "rope_parameters": text.rope_parameters}
    args = tiny_args(with_vision, tmp_path, override_config='{"rope_theta": 7.0}')
    assert "text_config" in rejected(capsys, pretrained.load_config, args)


@pytest.fixture(scope="module")
def with_vision(tmp_path_factory) -> Path:
    """A model of a type that transformers has no text class for."""
    folder = tmp_path_factory.mktemp("vision")
    model_zoo.write_model(folder, *model_zoo.ZOO["mistral3 with vision"])
    (folder / "processor_config.json").write_text('{"patch_size": 14}')
    return folder


def test_the_tower_of_a_vision_language_model_is_not_trained_and_saved_as_it_was(with_vision, tmp_path, capsys):
    """One line says so. Weight decay leaves it alone, and what other programs read of images is saved."""
    process.warn_once.cache_clear()
    model = load(with_vision, tmp_path)
    assert "its tower (vision_config) is not trained and saved as it is" in capsys.readouterr().out
    policy = utils.TokenLogprobs(model, 1.0, 1000)
    assert max(utils.layout_error(policy, layout, 2, 76)[0] for layout in utils.LAYOUTS) < 1e-5
    optimizer = utils.make_optimizer(model.parameters(), 1e-2, tiny_args(with_vision, tmp_path, weight_decay=0.1))
    trained = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
    towers = [id(weight) not in trained for name, weight in model.named_parameters() if "vision" in name]
    assert towers and all(towers) and len(trained) + len(towers) < len(list(model.parameters()))
    saving.copy_processor(model, tmp_path)
    assert (tmp_path / "processor_config.json").read_text() == '{"patch_size": 14}'


def test_tensors_that_the_model_lacks_are_one_warning(tiny, tmp_path, capsys):
    """Printed once for all copies of one model; a complete checkpoint prints nothing."""
    load(tiny, tmp_path)
    assert "warning" not in capsys.readouterr().out
    folder = copy_of(tiny, tmp_path / "model", lambda w: w | {f"value_head.{i}": torch.ones(1, 64) for i in range(9)})
    load(folder, tmp_path)
    load(folder, tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(lines) == 1 and "9 tensors" in lines[0] and "value_head.0" in lines[0]


QUANTIZED = [
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
]


@pytest.mark.parametrize("config", QUANTIZED)
def test_quantized_weights_are_rejected(tiny, tmp_path, capsys, config):
    args = tiny_args(copy_of(tiny, tmp_path / "model", **config), tmp_path)
    said = rejected(capsys, model_files.check_model, args)
    assert "quantized" in said and "--model_name_or_path" in said


def test_an_adapter_is_rejected(tiny, tmp_path, capsys):
    """With and without the files of a model next to it."""
    folder = copy_of(tiny, tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    assert "merge it" in rejected(capsys, model_files.check_model, tiny_args(folder, tmp_path))
    (folder / "config.json").unlink()
    assert "merge it" in rejected(capsys, model_files.check_model, tiny_args(folder, tmp_path))


@pytest.mark.parametrize("largest, given", [(600, None), (514, None), (5, "other"), (513, None)])
def test_prompt_ids_beyond_the_embeddings_are_rejected(capsys, largest, given):
    """And a --tokenizer_name_or_path with more tokens than embeddings, whatever the prompts hold."""
    args = SimpleNamespace(model_name_or_path="policy", tokenizer_name_or_path=given)
    own = {"decode": lambda self, ids: f"token {ids[0]}", "__len__": lambda self: 700}
    tokenizer = type("Tokenizer", (), own | {"get_vocab": lambda self: {"the last": 699}})()
    run = SimpleNamespace(
        problems=[SimpleNamespace(prompt_ids=[1, 2])],
        eval_problems=[SimpleNamespace(prompt_ids=[3, largest])],
        tokenizer=tokenizer,
    )
    if largest == 513:
        loading.check_prompt_ids(514, args, run)
        return
    said = rejected(capsys, loading.check_prompt_ids, 514, args, run)
    flag = "--model_name_or_path policy" if given is None else "--tokenizer_name_or_path other"
    assert flag in said and "514 embeddings" in said and (f"token {largest}" in said) == (given is None)


@pytest.mark.parametrize("pad", [None, 2, 5])
def test_the_gradient_of_the_pad_tokens_embedding(tiny, tmp_path, pad):
    """Autograd equals a finite difference for the embedding of a token of the prompt, whatever ``pad_token_id`` is.

    Of a policy with an untied head, so that the row has no other gradient, and of a critic's transformer.
    """

    def untied(weights: dict) -> dict:
        return weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}

    folder = copy_of(tiny, tmp_path / "model", untied, pad_token_id=pad, tie_word_embeddings=False)
    model = load(folder, tmp_path).double()
    ids = torch.tensor([[1, 87, 2, 5, 201, 1, 2]])  # 2 and 5 stand in the prompt
    parts = {
        "policy": lambda: model(ids).logits[0, -1, 9],
        "critic": lambda: model.model(ids).last_hidden_state[0, -1, 3],
    }
    rows = model.get_input_embeddings().weight
    for output in parts.values():
        model.zero_grad()
        output().backward()
        for token in (2, 5, 87):
            found = rows.grad[token, 7].item()
            with torch.no_grad():
                rows[token, 7] += 1e-4
                above = output().item()
                rows[token, 7] -= 2e-4
                below = output().item()
                rows[token, 7] += 1e-4
            difference = (above - below) / 2e-4
            assert abs(difference) > 1e-3
            assert found == pytest.approx(difference, rel=1e-2)


def test_of_the_generation_config_only_special_tokens_are_kept(tiny, tmp_path):
    """Settings of sampling that transformers loads but does not save would end the run when it saves its model."""
    folder = copy_of(tiny, tmp_path / "model")
    changes = {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": [2, 7]}
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    model = load(folder, tmp_path)
    assert model.generation_config.eos_token_id == [2, 7] and model.generation_config.temperature is None
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved["eos_token_id"] == [2, 7] and not saved.keys() & {"temperature", "top_p"}


LAUNCHER = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "inductor",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
}


def test_a_launchers_configuration_changes_nothing(tiny, tmp_path, monkeypatch):
    """accelerate sets its own configuration in the environment of what it launches; the flags of the run decide."""
    from accelerate.state import AcceleratorState, PartialState

    for name, value in LAUNCHER.items():
        monkeypatch.setenv(name, value)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    args = tiny_args(tiny, tmp_path)
    accelerator = deepspeed_zero.make_accelerator(args, torch.float32, torch.device("cpu"))
    assert accelerator.mixed_precision == "no"
    assert accelerator.state.dynamo_plugin.backend == "NO"
    config = accelerator.state.deepspeed_plugin.deepspeed_config
    assert not config.get("bf16", {}).get("enabled") and config["zero_optimization"]["stage"] == args.zero_stage
    assert os.environ.get("ACCELERATE_USE_FSDP") is None


@pytest.mark.parametrize(
    "config, length",
    [
        ({"max_position_embeddings": 100}, 100),
        ({"n_positions": 1024}, 1024),  # GPT-2, GPT-J, CodeGen
        ({"max_seq_len": 2048}, 2048),  # MPT
        ({"text_config": {"max_position_embeddings": 300}}, 300),  # Gemma 3, and others with images
        ({"max_position_embeddings": None, "text_config": {}}, None),
        ({"hidden_size": 32}, None),  # recurrent models
    ],
    ids=str,
)
def test_the_context_of_a_model_is_found_by_any_of_its_names(tmp_path, capsys, config, length):
    """vLLM would reject a longer sample minutes later, in the engine's thread."""
    assert model_files.context_length(config) == length
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = {"model_name_or_path": str(tmp_path), "max_prompt_length": 60000, "max_response_length": 5000}
    with pytest.raises(SystemExit) as end:
        model_files.check_model(grpo.Args(**asked, dry_run=True, chat_template="chatml"))
        raise SystemExit(0)
    assert end.value.code == (0 if length is None else 2)
    assert length is None or f"is {length}; shorten" in capsys.readouterr().err


def test_the_digest_of_a_model(tiny, tmp_path, monkeypatch):
    """Equal for copies; another for other numbers in the same layout, and for a file that is missing."""

    def digest(folder: Path) -> str:
        return model_files.files_digest(ModelName(str(folder), None))

    ours = digest(tiny)
    same, other, less = (Path(shutil.copytree(tiny, tmp_path / name)) for name in ("same", "other", "less"))
    (same / "README.md").write_text("a copy")
    (same / "backup.json").mkdir()
    weights = {name: weight * 1.5 for name, weight in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    (less / "generation_config.json").unlink()
    assert digest(same) == ours and len({ours, digest(other), digest(less)}) == 3
    place = "/cache/models--a--b/snapshots/0123abc/config.json"
    known = {("a/b", "config.json", "main"): place}
    find = lambda name, file, revision: known.get((name, file, revision or "main"))  # noqa: E731
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", find)
    assert model_files.files_digest(ModelName("a/b", None)) == "0123abc"
    assert model_files.files_digest(ModelName("a/b", "other")) == ""

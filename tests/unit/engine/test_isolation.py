"""An engine in the trainer's process: classes and settings that the trainer uses are the same before and after.

tests/runs/test_zoo_models.py compares them around the real engine.
"""

from __future__ import annotations

import os

import pytest
import torch

from runtime.engine import isolation


def config(kind: str, **fields):
    """A config of two layers."""
    from transformers import AutoConfig

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    return AutoConfig.for_model(kind, **{**sizes, **heads, **fields})


def contents(cls: type) -> list:
    """Everything that a class and its bases define."""
    return [(base, base.__bases__, dict(vars(base))) for base in cls.__mro__]


@pytest.mark.parametrize("kind", ["smollm3", "gpt_neox", "olmo2", "phi"])
def test_the_decorator_of_vllm_reaches_the_engine_alone(kind):
    """vLLM's real decorator, applied as its backend for transformers applies it; then both models are built again."""
    from transformers import AutoModel, AutoModelForCausalLM
    from vllm.compilation.decorators import support_torch_compile

    trainer = AutoModelForCausalLM.from_config(config(kind)).eval()
    shared = type(trainer.base_model)
    ids = torch.arange(3, 20)[None]
    before, expected = contents(shared), trainer(input_ids=ids, use_cache=False).logits
    with isolation.kept_apart():
        decoder = type(AutoModel.from_config(config(kind)).get_decoder())
        support_torch_compile(dynamic_arg_dims={"input_ids": 1, "inputs_embeds": 1, "position_ids": -1})(decoder)
        again = AutoModel._model_mapping[type(config(kind))]
    assert decoder is not shared and issubclass(decoder, shared) and again is shared
    assert (decoder.__name__, decoder.__module__) == (shared.__name__, shared.__module__)
    assert decoder.__call__ is not shared.__call__  # it was decorated
    assert contents(shared) == before
    assert torch.equal(trainer(input_ids=ids, use_cache=False).logits, expected)
    reference = AutoModelForCausalLM.from_config(config(kind))  # as loaded after the engine
    assert type(reference.base_model) is shared


def test_a_decoder_inside_another_model_is_private_too():
    """A model of text and images builds its decoder itself."""
    from transformers import AutoConfig, AutoModel
    from transformers.models.llama.modeling_llama import LlamaModel

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": 64, **small}
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **small}
    both = AutoConfig.for_model("llava", text_config=text, vision_config=vision)
    with isolation.private_classes():
        decoder = AutoModel.from_config(both).get_decoder()
    assert isinstance(decoder, LlamaModel) and type(decoder) is not LlamaModel


def change_settings() -> None:
    """Change the settings that vLLM changes, and more."""
    torch.set_float32_matmul_precision("medium")
    torch.set_default_dtype(torch.bfloat16)
    torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled())
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch._dynamo.config.recompile_limit = 16
    torch.set_num_threads = print
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    os.environ["NEW_VARIABLE"] = "1"
    torch.manual_seed(7)


def settings() -> dict:
    """Return what ``change_settings`` changes, and the state of the random generator."""
    return {
        "precision": torch.get_float32_matmul_precision(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "recompile": torch._dynamo.config.recompile_limit,
        "threads": torch.set_num_threads,
        "ranks": os.environ["LOCAL_WORLD_SIZE"],
        "generator": torch.get_rng_state().tolist(),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_settings_are_restored_also_after_a_failed_build(monkeypatch, fails):
    """The precision is the one that the user had chosen; variables that are new stay for the engine."""
    import torch._dynamo

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    torch._dynamo.config.recompile_limit = 64  # as pretrained.py sets it for flex attention
    monkeypatch.delenv("NEW_VARIABLE", raising=False)
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    before = settings()
    try:
        with isolation.kept_apart():
            change_settings()
            changed = settings()
            if fails:
                raise KeyError("the build failed")
    except KeyError:
        assert fails
    finally:
        found = settings()
        torch.set_float32_matmul_precision(usual)
        torch._dynamo.config.recompile_limit = 8
        monkeypatch.setenv("NEW_VARIABLE", os.environ.get("NEW_VARIABLE", ""))
    assert found == before
    assert all(changed[name] != before[name] for name in before)
    assert os.environ["NEW_VARIABLE"] == "1"


def test_precision_set_by_the_newer_options_is_kept():
    """With them the older function has no value."""
    matmul = torch.backends.cuda.matmul
    usual = matmul.fp32_precision
    matmul.fp32_precision = "tf32"
    try:
        with isolation.kept_apart():
            torch.set_float32_matmul_precision("highest")
            assert matmul.fp32_precision != "tf32"
        assert matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision = usual
        torch.backends.mkldnn.matmul.fp32_precision = usual

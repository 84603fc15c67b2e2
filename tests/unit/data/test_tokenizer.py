"""--tokenizer_name_or_path: whose tokens and template a run has, and which ones are rejected."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import evaluate
import pytest
from helpers import ROOT, folder_of, record, run_here, tiny_args


@pytest.fixture
def apart(tiny, tmp_path) -> tuple[Path, Path]:
    """(a model without tokenizer, its tokenizer), each in a folder of its own."""
    model, tokenizer = tmp_path / "weights", tmp_path / "tokenizer"
    model.mkdir()
    tokenizer.mkdir()
    for file in tiny.iterdir():
        of_tokenizer = "token" in file.name or file.name == "chat_template.jinja"
        shutil.copy(file, tokenizer if of_tokenizer else model)
    return model, tokenizer


@pytest.mark.integration
def test_a_run_takes_tokens_and_template_from_it(tiny, tmp_path, apart):
    """From another folder the same tokenizer gives the same run, and another template other prompts."""
    model, tokenizer = apart
    whole = tiny_args(tiny, tmp_path, run_name="whole", total_steps=1)
    run_here(whole)
    args = tiny_args(model, tmp_path, run_name="apart", total_steps=1, tokenizer_name_or_path=str(tokenizer))
    run_here(args)
    assert record(folder_of(args)) == record(folder_of(whole))
    assert (folder_of(args) / "model" / "tokenizer.json").is_file(), "the trained model is complete"
    (tokenizer / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    args = tiny_args(model, tmp_path, run_name="other", total_steps=1, tokenizer_name_or_path=str(tokenizer))
    run_here(args)
    assert record(folder_of(args))["samples"] != record(folder_of(whole))["samples"]


def test_the_engine_and_the_evaluation_get_it(tiny, tmp_path, monkeypatch):
    """vLLM turns ids into text for --stop_strings. A finished run is evaluated with the tokenizer in its model/."""

    import torch

    import grpo

    given = {}
    monkeypatch.setattr("vllm.LLM", lambda **named: given.update(named))
    monkeypatch.setattr("runtime.engine.vllm_settings.read_configs", lambda *_, **__: ({}, {}, set()))
    monkeypatch.setattr("runtime.engine.vllm_settings.read_model", lambda name: None)
    args = tiny_args(tiny, tmp_path, tokenizer_name_or_path="somewhere", vllm_args='{"load_format": "dummy"}')
    args.model_name_or_path = "me/model@main"
    grpo.build_vllm(args, torch.float32, 0, 1)
    assert (given["tokenizer"], given["tokenizer_revision"], given["revision"]) == ("somewhere", None, "main")
    assert given["load_format"] == "dummy" and given["skip_tokenizer_init"]
    given.clear()
    grpo.build_vllm(dataclasses.replace(args, tokenizer_name_or_path=None, vllm_args=None), torch.float32, 0, 1)
    assert (given["tokenizer"], given["tokenizer_revision"]) == (None, "main") and given["load_format"] == "hf"
    grpo.build_vllm(tiny_args(tiny, tmp_path, stop_strings=(".",)), torch.float32, 0, 1)
    assert not given["skip_tokenizer_init"]
    (tmp_path / "config.json").write_text(json.dumps({"args": dataclasses.asdict(args), "script": "grpo.py"}))
    evaluation, *_ = evaluate.parse(["--run", str(tmp_path), "--accept_changed_code"])
    assert evaluation.tokenizer_name_or_path is None and json.loads(evaluation.vllm_args) == {"load_format": "hf"}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "adapter_config.json").touch()  # of a run of variants/lora.patch
    evaluation, *_ = evaluate.parse(["--run", str(tmp_path), "--accept_changed_code"])
    assert (evaluation.adapter, evaluation.model_name_or_path) == (tmp_path / "model", "me/model@main")


def test_random_weights_are_not_evaluated(refused):
    assert "load_format dummy" in refused(evaluate.parse, ["--vllm_args", '{"load_format": "dummy"}'])


def test_tokenizers_that_cannot_serve_are_refused(tiny, tmp_path, apart, refused):
    """No folder, no tokenizer in it, no template, more tokens than the model has embeddings."""
    model, tokenizer = apart
    missing = tiny_args(tiny, tmp_path, tokenizer_name_or_path=str(tmp_path / "nowhere"))
    assert "no such folder" in refused(run_here, missing)
    bare = tiny_args(tiny, tmp_path, tokenizer_name_or_path=str(model))
    assert "no tokenizer.json there" in refused(run_here, bare)
    (tokenizer / "chat_template.jinja").unlink()
    plain = tiny_args(tiny, tmp_path, tokenizer_name_or_path=str(tokenizer))
    assert f"--chat_template: the tokenizer of {tokenizer} has no chat template" in refused(run_here, plain)
    large = ROOT / "models" / "SmolLM2-135M-Instruct"
    if large.is_dir():
        message = refused(run_here, tiny_args(tiny, tmp_path, tokenizer_name_or_path=str(large)))
        assert "--tokenizer_name_or_path" in message and "give the tokenizer" in message

"""run/saving.py: saving is tried at the start, with the run's chat template, and a critic's head is found again."""

from __future__ import annotations

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import rejected, tiny_args
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoTokenizer

from runtime.arguments.values import ModelName
from runtime.data import rendering
from runtime.data.samples import Problem
from runtime.run import loading, saving
from runtime.training import pretrained

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]
READS = "\n  {% if deep %}deep{% endif %}{{ level }}{{ names | length }}"
READS += "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TEMPLATES = ["question_answer", "chatml", "none", '{"deep": true, "level": "it\'s \\"é\\"\\n", "names": [1, null]}']


@pytest.mark.parametrize("chat_template", TEMPLATES)
@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_saved_tokenizer_writes_the_prompts_of_the_run(tiny, tmp_path, chat_template, adds_bos):
    """Its own apply_chat_template, without any variable, gives the ids that the run trained on."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    if adds_bos:
        bos = f"{tokenizer.bos_token}:0"
        ids = [(tokenizer.bos_token, tokenizer.bos_token_id)]
        post = processors.TemplateProcessing(single=f"{bos} $A:0", special_tokens=ids)
        tokenizer.backend_tokenizer.post_processor = post
    if chat_template.startswith("{"):
        tokenizer.chat_template = READS
    args = tiny_args(tiny, tmp_path, chat_template=chat_template)
    trained = rendering.render([TALK], tokenizer, args.template.text, [args.template.variables])[0]
    before = tokenizer.chat_template
    saving.adopt_template(tokenizer, args, [Problem(TALK, "5", "exact", {}, trained)])
    assert tokenizer.chat_template != before or chat_template == "chatml"
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    text = saved.apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)
    assert saved(text, add_special_tokens=False)["input_ids"] == trained
    if chat_template.startswith("{"):  # the variables are defaults
        other = saved.apply_chat_template(TALK, tokenize=False, deep=False)
        assert "deep" in text and "deep" not in other


def test_a_run_with_the_tokenizers_own_template_changes_nothing(tiny, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    before = tokenizer.chat_template
    saving.adopt_template(tokenizer, tiny_args(tiny, tmp_path), [])
    assert tokenizer.chat_template == before


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "LlamaTokenizerFast", None])
def test_the_saved_tokenizer_has_the_class_of_its_source(tiny, tmp_path, named):
    """transformers 4 does not know TokenizersBackend, as transformers 5 names a class of its own."""
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": named}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    saving.save_tokenizer(tokenizer, tmp_path / "saved")
    found = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())["tokenizer_class"]
    assert found == (named or "PreTrainedTokenizerFast")
    again = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert again("1 + 1 = «ß»")["input_ids"] == tokenizer("1 + 1 = «ß»")["input_ids"]


def unsavable_config(model, tokenizer) -> None:
    model.config.own_field = {1, 2}  # no JSON


def unsavable_generation_config(model, tokenizer) -> None:
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = False


def unsavable_tokenizer(model, tokenizer) -> None:
    tokenizer.init_kwargs["own_field"] = object()


@pytest.mark.parametrize("spoil", [unsavable_config, unsavable_generation_config, unsavable_tokenizer])
def test_what_cannot_be_saved_is_rejected_before_a_run(tiny, tmp_path, capsys, spoil):
    model = pretrained.load_model(tiny_args(tiny, tmp_path), torch.float32, "sdpa")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    saving.check_saving(model, tokenizer, "--model_name_or_path")
    spoil(model, tokenizer)
    said = rejected(capsys, saving.check_saving, model, tokenizer, "--model_name_or_path")
    assert f"--model_name_or_path {tiny}" in said and "not saved" in said


def test_what_is_saved_can_be_read_by_whoever_may_read_the_folder(tiny, tmp_path):
    """safetensors gives its files to their owner alone: on a cluster nobody else could use the model."""
    model = pretrained.load_model(tiny_args(tiny, tmp_path), torch.float32, "sdpa")
    with saving.written_whole(tmp_path / "model") as beside:
        model.save_pretrained(beside)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()} == {0o666 & ~current_umask()}


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_failed_save_leaves_no_partial_folder(tmp_path):
    """And keeps what was there before."""
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError), saving.written_whole(tmp_path / "model") as beside:
        beside.mkdir()
        (beside / "half").touch()
        raise ValueError
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_template_that_ends_turns_by_no_eos_is_a_warning(tiny, tmp_path, capsys, ends):
    tokenizer = AutoTokenizer.from_pretrained(tiny)  # chatml: a turn ends by <|im_end|>, id 2
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    if not ends:
        tokenizer.eos_token = "<|endoftext|>"
        for name in ("config.json", "generation_config.json"):
            found = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(found | {"eos_token_id": 0}))
    args = tiny_args(folder, tmp_path)
    problems = [Problem(TALK, "5", "exact", {}, [1, 2])]
    run = SimpleNamespace(
        problems=problems, eval_problems=[], tokenizer=tokenizer, dtype=torch.float32, attention="sdpa"
    )
    _, stop_ids = loading.load_policy(args, run)
    said = capsys.readouterr().out
    assert stop_ids == ([2] if ends else [0])
    assert ("'<|im_end|>' (id 2)" in said and "eos_token_id" in said) != ends


HEADS = {
    "score": ({"score.weight": 1}, "score"),
    "score with a bias": ({"score.weight": 1, "score.bias": 0}, "score"),
    "two outputs": ({"score.weight": 2}, None),
    "another name": ({"value_head.weight": 1}, None),
    "none": ({}, None),
}


@pytest.mark.parametrize("form", ["folder", "hub"])
@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_a_critics_checkpoint_is_found(tiny, tmp_path, capsys, monkeypatch, name, form):
    """In a folder or in the hub's cache; which head is used is printed."""
    shapes, found = HEADS[name]
    more = {key: torch.full((size, 64) if size else (1,), 0.25) for key, size in shapes.items()}
    folder = tmp_path / "critic"
    model_name = ModelName(str(folder), None)
    if form == "hub":
        commit = "0" * 40
        place = tmp_path / "hub" / "models--me--critic"
        folder = place / "snapshots" / commit
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "v2").write_text(commit)
        model_name = ModelName("me/critic", "v2")
        for module in ("huggingface_hub.constants", "transformers.utils.hub"):
            monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors") | more
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    model = pretrained.load_model(tiny_args(folder, tmp_path), torch.float32, "sdpa", "--critic model_name_or_path")
    head = saving.saved_head(model_name, model)
    said = capsys.readouterr().out
    if found is None:
        assert head == {} and "new, with values near 0" in said
    else:
        assert set(head) == {key.rpartition(".")[2] for key in shapes}
        assert head["weight"].shape == (1, 64) and (head["weight"] == 0.25).all()
        assert f"value head: {found} of {model_name.name}" in said

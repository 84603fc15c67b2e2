"""Save models in Hugging Face format, either completely or not at all."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from runtime.arguments.values import ModelName
from runtime.data import rendering
from runtime.data.samples import Problem
from runtime.system import process
from runtime.system.process import first_line, print_on_rank_0, refuse
from runtime.training.deepspeed_zero import current_weights


def save_model(policy, tokenizer, folder: Path, zero_stage: int, rank: int) -> None:
    """Save weights, config and tokenizer in Hugging Face format, completely or not at all. Every rank must call."""
    weights = current_weights(policy, zero_stage)  # every rank takes part
    if rank != 0:
        return
    with written_whole(folder) as beside:
        model = policy.module.model
        model.save_pretrained(beside, state_dict=dict(weights))
        save_tokenizer(tokenizer, beside)
        if model.config.get_text_config() is not model.config:
            copy_processor(model, beside)


def save_tokenizer(tokenizer, folder: Path) -> None:
    """Save a tokenizer under the name of the class that its source has: transformers 4 lacks that of transformers 5."""
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    saved = json.loads(file.read_text())
    name = get_tokenizer_config(tokenizer.name_or_path, local_files_only=True).get("tokenizer_class")
    saved["tokenizer_class"] = name or saved["tokenizer_class"].replace("TokenizersBackend", "PreTrainedTokenizerFast")
    file.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n")


def copy_processor(model, folder: Path) -> None:
    """Copy the settings of images to a saved vision-language model, which other programs cannot load without them."""
    from transformers.utils import cached_file

    quiet = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors", "gated_repo")}
    for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
        found = cached_file(model.name_or_path, name, **quiet)
        if found is not None:
            shutil.copy(found, folder / name)


def check_saving(model, tokenizer, flag: str) -> None:
    """Save everything but the weights into a temporary directory; exit with code 2 where that fails.

    transformers loads configs, generation configs and tokenizers that it does not save: known here, it costs no run.
    """
    with tempfile.TemporaryDirectory() as place:
        try:
            model.save_pretrained(place, state_dict={})
            save_tokenizer(tokenizer, Path(place))
        except Exception as error:  # of any kind: each would end the run when it saves
            refuse(
                f"{flag} {model.name_or_path}: its config or tokenizer can be loaded but not saved, so the trained "
                f"model could not be either ({type(error).__name__}: {first_line(error)}); correct the files there"
            )


def adopt_template(tokenizer, args, problems: list[Problem]) -> None:
    """Give the tokenizer the chat template that the run trains with, so that it is saved with the model.

    Variables of ``--chat_template`` become defaults. Where ``rendering.render`` puts a BOS before what a template has
    written, the saved template writes it.
    """
    given, variables = args.template.text, args.template.variables
    if given is None and not variables:
        return
    # Each line ends in a newline that Jinja drops after a block, so the template after it begins a line, as before.
    head = "".join(f"{{%- set {name} = {name} | default({value!r}) %}}\n" for name, value in variables.items())
    own = tokenizer.chat_template if given is None else given
    if given is not None:
        text = rendering.as_text(problems[0].messages, tokenizer, given, variables)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if rendering.render([problems[0].messages], tokenizer, given, [variables]) != [ids]:
            head += "{%- if true %}{{ bos_token }}{% endif %}\n"
    if isinstance(own, dict):
        tokenizer.chat_template = {name: head + text for name, text in own.items()}
    else:
        tokenizer.chat_template = head + own


def saved_head(name: ModelName, model) -> dict[str, torch.Tensor]:
    """Read the head ``score`` of one of transformers' classifiers, or of ``save_critic``, from its safetensors.

    Returns ``weight`` [1, D] and perhaps ``bias`` [1]; nothing where ``score`` is missing or has several outputs.
    Rank 0 prints which head the critic starts with.

    Args:
        name: the checkpoint, a local directory or in the hub's cache.
        model: the language model that was loaded from it.
    """
    from transformers.utils import cached_file

    folder = Path(cached_file(name.name, "config.json", revision=name.revision)).parent
    head = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for key in {"score.weight", "score.bias"} & set(tensors.keys()):
                head[key.removeprefix("score.")] = tensors.get_tensor(key)
    if "weight" not in head or head["weight"].shape != (1, model.config.get_text_config().hidden_size):
        head = {}
    print_on_rank_0(f"critic     value head: {f'score of {name.name}' if head else 'new, with values near 0'}")
    return head


def save_critic(critic, normalizer, tokenizer, folder: Path, zero_stage: int, rank: int) -> None:
    """Save the critic as a token classifier in Hugging Face format: its one logit at a token is the return after it.

    The mean and the deviation of ``--value_norm`` become part of the head. Every rank must call.
    """
    import deepspeed

    model = critic.module.model
    weights = dict(current_weights(critic, zero_stage))
    with deepspeed.zero.GatheredParameters(list(critic.module.head.parameters()), enabled=zero_stage == 3):
        head = {name: weight.detach().double() for name, weight in critic.module.head.named_parameters()}
    if rank != 0:
        return
    named = {f"{model.base_model_prefix}.{name}": weight for name, weight in weights.items()}
    named["score.weight"] = (head["weight"] * normalizer.std).to(model.dtype)
    named["score.bias"] = normalizer.denormalize(head["bias"]).to(model.dtype)
    with written_whole(folder) as beside:
        model.save_pretrained(beside, state_dict=named)
        config = json.loads((beside / "config.json").read_text())
        config["architectures"] = [config["architectures"][0].removesuffix("Model") + "ForTokenClassification"]
        config["id2label"] = {"0": "return"}
        (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_tokenizer(tokenizer, beside)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``folder``, and rename it at the end, so that ``folder`` is never incomplete."""
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        yield beside
        for path in beside.iterdir():
            process.sync(path)
            if path.is_file():
                path.chmod(beside.stat().st_mode & 0o666)  # safetensors gives weights to their owner alone
        process.replace_folder(folder, beside)
    finally:
        shutil.rmtree(beside, ignore_errors=True)

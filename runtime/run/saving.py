"""Save models in Hugging Face format, either completely or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from runtime.system import process
from runtime.training.deepspeed_zero import current_weights


def save_model(policy, tokenizer, folder: Path, zero_stage: int, rank: int) -> None:
    """Weights, config and tokenizer in Hugging Face format, whole or not at all. Every rank must call."""
    weights = current_weights(policy, zero_stage)  # every rank takes part
    if rank != 0:
        return
    with written_whole(folder) as beside:
        policy.module.model.save_pretrained(beside, state_dict=dict(weights))
        tokenizer.save_pretrained(beside)


def saved_head(folder: Path) -> dict[str, torch.Tensor]:
    """The scalar head in the safetensors of a folder, ``weight`` [1, D] and perhaps ``bias`` [1]; empty without one.

    ``save_critic`` and transformers' classifiers name it ``score``. One with several outputs is no value.
    """
    head = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in ("weight", "bias"):
                if f"score.{name}" in tensors.keys():  # noqa: SIM118 (it is no dict)
                    head[name] = tensors.get_tensor(f"score.{name}")
    return {name: tensor for name, tensor in head.items() if len(tensor) == 1}


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
        tokenizer.save_pretrained(beside)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder next to ``folder``, and rename it at the end, so that ``folder`` is never incomplete."""
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    yield beside
    for path in beside.iterdir():
        process.sync(path)
    process.replace_folder(folder, beside)

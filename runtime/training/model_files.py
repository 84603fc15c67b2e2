"""Check a model's directory, or its config on the hub, before it is loaded, and read its sizes. Imports no torch."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open

from runtime.arguments.flags import RunFlags
from runtime.arguments.values import CHAT_TEMPLATES, ModelName
from runtime.system.process import first_line, refuse, warn_once

POLICY = "--model_name_or_path"
LFS_POINTER = b"version https://git-lfs"  # how it begins
# What transformers loads, in the order in which it looks for them.
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
ROPE = {"rope_theta", "rope_scaling"}  # what older config.json files have in place of rope_parameters
ADAPTER = "an adapter (adapter_config.json), not a model; merge it into its base model first (peft: merge_and_unload)"
# Fields of config.json of models with recurrent states: Mamba, gated delta rule, short convolutions.
STATES = {"mamba_d_conv", "conv_kernel", "conv_L_cache", "state_size", "linear_conv_kernel_dim"}
LOCAL = (".", "/", "~", "models/")  # how the names of folders begin, which are not asked for on the hub
PARTS = (".json", ".safetensors", ".bin", ".model", ".jinja", ".txt", ".tiktoken", ".py")  # endings of a model's files
FIELDS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer that determine its memory; ``intermediate`` is that of one token's experts in an MoE."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    recurrent: bool = False

    @property
    def cache_numbers(self) -> int:
        """Return how many numbers a token's keys and values have."""
        return 2 * self.layers * self.kv_heads * self.head_size


def check_model(args: RunFlags, flag: str = POLICY) -> None:
    """Reject a model that cannot serve, before anything is loaded: no weights, too short a context, no chat template.

    args: ``model_name_or_path`` names it, which ``flag`` gave. Only the policy, of the default flag, needs a template.
    """
    name = args.model_name_or_path
    is_policy = flag == POLICY
    config, tokenizer_config, files = read_configs(args.model, flag, args.dry_run)
    config = changed_config(config, args.config_overrides)
    if is_policy and args.tokenizer_name_or_path is not None:
        tokenizer_config, files = read_tokenizer(args.tokenizer_name_or_path)
    context = context_length(config)
    wanted = args.engine_length
    response = wanted - args.max_prompt_length
    if context is not None and wanted > context:
        refuse(
            f"--max_prompt_length {args.max_prompt_length} + "
            f"{'--max_response_length' if response == args.max_response_length else '--eval_sampling max_tokens'} "
            f"{response} = {wanted} tokens, but the context of {name} is {context}; shorten one of them"
        )
    if not is_policy:
        return
    check_reward_model(args)
    own_template = not files or "chat_template.jinja" in files or tokenizer_config.get("chat_template")
    if args.template.text is None and not own_template:
        known = ", ".join(CHAT_TEMPLATES)
        owner = args.tokenizer_name_or_path or name
        refuse(f"--chat_template: the tokenizer of {owner} has no chat template; pass a file or one of {known}")


def changed_config(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with fields changed, also in its parts. Exits with code 2 where rope differs by layer.

    Next to rope_parameters transformers ignores rope_theta and rope_scaling, so these become part of it.
    """
    found = dict(config)
    for name, value in changes.items():
        is_part = name.endswith("_config") and isinstance(value, dict) and isinstance(config.get(name), dict)
        found[name] = changed_config(config[name], value) if is_part else value
    rope = config.get("rope_parameters")
    if "rope_parameters" in changes:
        found.pop("rope_scaling", None)
    elif rope and ROPE & changes.keys():
        if any(isinstance(value, dict) for value in rope.values()):
            refuse(f"--override_config: rope differs by layer here; change {json.dumps({'rope_parameters': rope})}")
        kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        rope = kept | (changes.get("rope_scaling", rope) or {"rope_type": "default"})
        rope["rope_theta"] = changes.get("rope_theta", rope.get("rope_theta"))
        found = {name: value for name, value in found.items() if name not in ROPE} | {"rope_parameters": rope}
    return found


def context_length(config: dict[str, Any]) -> int | None:
    """Return the tokens that a model takes, by its config.json; None where the config does not say."""
    for part in (config, config.get("text_config", {})):
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            if isinstance(part.get(name), int):
                return part[name]
    return None


def read_configs(model: ModelName, flag: str, dry_run: bool) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """Return (config.json, tokenizer_config.json, file names) of a local model; no names for a model on the hub."""
    name, revision = model
    folder = Path(name)
    hint = "give a local folder or a hub id"
    if name == RunFlags.model_name_or_path or name.startswith("models/testbed"):
        hint = f"`make {'testbed' if 'testbed' in name else 'setup'}` makes it"
    if folder.exists():
        if revision is not None:
            refuse(f"{flag} {name}@{revision}: a local folder cannot have a revision; drop @{revision}")
        files = {f.name for f in folder.iterdir()} if folder.is_dir() else set()
        if "adapter_config.json" in files:
            refuse(f"{flag} {name}: {ADAPTER}")
        if "config.json" not in files:
            refuse(f"{flag} {name}: no config.json there; {hint}")
        if not any(f.endswith((".safetensors", ".bin")) for f in files) and not dry_run:
            refuse(f"{flag} {name}: no weights (*.safetensors or *.bin) there; {hint}")
        check_files(folder, files, flag)
        if not dry_run:
            check_weights(folder, files, flag)
        config = json.loads((folder / "config.json").read_text())
        check_unquantized(config, f"{flag} {name}")
        tokenizer_config = folder / "tokenizer_config.json"
        return config, json.loads(tokenizer_config.read_text()) if tokenizer_config.is_file() else {}, files
    if name.startswith(LOCAL) or (folder.parent != Path() and folder.parent.is_dir()):
        refuse(f"{flag} {name}: no such folder; {hint}")
    from huggingface_hub import hf_hub_download

    try:
        config = json.loads(Path(hf_hub_download(name, "config.json", revision=revision)).read_text())
    except Exception as error:  # offline, gated, misspelled: the hub client has a class for each
        refuse(f"{flag} {name}: no such folder, and the hub does not have it or cannot be reached ({error}); {hint}")
    check_unquantized(config, f"{flag} {name}")
    return config, {}, set()


@functools.cache  # one question to the hub
def read_model(name: ModelName) -> Model | None:
    """Read the model in a folder or on the hub, None if fields are missing. Exits with code 2 if there is no model."""
    config, _, _ = read_configs(name, "--model_name_or_path", dry_run=True)  # its weights may be elsewhere
    parameters = 0
    folder = Path(name.name)
    parts = list(folder.glob("model.safetensors")) or list(folder.glob("model-*.safetensors"))
    for weights in parts or folder.glob("*.safetensors"):  # some models have Mistral's consolidated.safetensors as well
        with safe_open(weights, "np") as tensors:
            parameters += sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    text = config.get("text_config", config)
    return model_of(text, parameters, config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def model_of(config: dict[str, Any], parameters: int = 0, tied: bool = True) -> Model | None:
    """Build the model of a config.json, counting parameters if they are not given, or None if fields are missing."""
    if any(not isinstance(config.get(name), int) for name in FIELDS):
        return None
    layers, hidden, intermediate, heads, vocabulary = [config[name] for name in FIELDS]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    if experts > 1:
        intermediate = config.get("moe_intermediate_size") or intermediate
    attention = (hidden + 1) * size * (heads + 2 * kv_heads) + hidden * size * heads  # with biases, as Qwen has them
    layer = attention + 3 * hidden * experts * intermediate + 2 * hidden
    parameters = parameters or layers * layer + hidden + vocabulary * hidden * (1 if tied else 2)
    used = min(experts, config.get("num_experts_per_tok") or experts) * intermediate  # by a token
    recurrent = not STATES.isdisjoint(config)
    return Model(parameters, layers, hidden, used, heads, kv_heads, size, vocabulary, recurrent)


def check_unquantized(config: dict[str, Any], model: str) -> None:
    """Reject a checkpoint with quantized weights (bitsandbytes, GPTQ, AWQ, FP8, MXFP4): they have no gradient."""
    found = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    if found:
        refuse(
            f"{model}: its weights are quantized ({found.get('quant_method')}, by quantization_config in config.json) "
            f"and cannot be trained; use the checkpoint in bf16, fp16 or fp32 that they were made from"
        )


def load_complete(auto: Any, name: str, flag: str = POLICY, has_head: bool = True, **how: Any) -> Any:
    """Load a model by a class of transformers; exit with code 2 where a weight is not in its files and would be random.

    Prints one warning for tensors of the files that the model does not have.

    Args:
        has_head: False if only the transformer is used. Its head may be missing then, and the files may have another.
    """
    try:
        model, report = auto.from_pretrained(name, output_loading_info=True, ignore_mismatched_sizes=True, **how)
    except (OSError, EOFError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        refuse(f"{flag} {name}: transformers cannot load it ({type(error).__name__}: {first_line(error)[:300]})")
    wrong = dict.fromkeys(sorted(report["missing_keys"]), "")
    for key, found, wanted in sorted(report["mismatched_keys"]):
        wrong[key] = f" has the shape {list(found)} there and {list(wanted)} by the config"
    extra = sorted(report["unexpected_keys"])
    if not has_head:
        inside = f"{model.base_model_prefix}."
        wrong = {key: why for key, why in wrong.items() if key.startswith(inside)}
        extra = [key for key in extra if key.startswith(inside)]
    if wrong:
        refuse(
            f"{flag} {name}: {len(wrong)} of the model's weights are not in its files and would be random: "
            f"{some([key + why for key, why in wrong.items()])}; use a complete checkpoint, or correct its "
            f"config.json or --override_config"
        )
    if extra:
        warn_once(f"warning: {flag} {name}: {len(extra)} tensors of its files are no part of the model: {some(extra)}")
    return model


def some(names: list[str]) -> str:
    """Join the first four names of a list, with "..." if there are more."""
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def check_files(folder: Path, files: set[str], flag: str) -> None:
    """Reject what stands in for a file after `git clone` without Git LFS, and weights that are not all there."""
    for name in sorted(files):
        if not name.endswith((".safetensors", ".bin", ".json", ".model")) or not (folder / name).is_file():
            continue
        with open(folder / name, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                refuse(f"{flag} {folder}: {name} is a pointer of Git LFS, not the file; run `git lfs pull` there")
        if name.endswith(".safetensors"):
            try:
                safe_open(folder / name, "np")
            except (OSError, ValueError, SafetensorError):
                refuse(f"{flag} {folder}: {name} is empty or only a part of a file of weights; copy it again")


def check_weights(folder: Path, files: set[str], flag: str) -> None:
    """Reject a folder without the weights that transformers would load, all of those that an index names."""
    first = next((name for name in WEIGHTS if name in files), None)
    if first is None:
        found = some(sorted(name for name in files if name.endswith((".safetensors", ".bin"))))
        refuse(f"{flag} {folder}: has {found}, but not model.safetensors or an index of weights; rename or convert it")
    if first.endswith(".index.json"):
        named = set(json.loads((folder / first).read_text())["weight_map"].values())
        missing = sorted(name for name in named if not (folder / name).is_file())
        if missing:
            refuse(f"{flag} {folder}: {first} names {some(missing)}, not there; copy the folder again")


def files_digest(model: ModelName) -> str:
    """Hash a local model: names and sizes of its files, and what is at 16 places of each. Of the hub: its commit."""
    if not Path(model.name).is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model.name, "config.json", revision=model.revision)
        return Path(found).parent.name if isinstance(found, str) else ""
    digest = hashlib.sha256()
    for path in sorted(Path(model.name).iterdir()):
        if path.suffix in PARTS and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with open(path, "rb") as file:
                for place in range(16):
                    file.seek(size * place // 16)
                    digest.update(file.read(2**16))
    return digest.hexdigest()


def digests_of_files(model: ModelName, known: dict[str, list]) -> dict[str, list]:
    """Return [digest, size, time, digest of the first bytes] of each file of a local model; of the hub: its commit.

    A file in ``known`` with the same size, time and first bytes has the digest that it has there, so its content is not
    read again. The digest is XXH3, which reads five times as fast as SHA-256 and finds any change that is not made
    to deceive it.
    """
    if not Path(model.name).is_dir():
        commit = files_digest(model)
        return {"commit": [commit]} if commit else {}
    found = {}
    for path in sorted(Path(model.name).iterdir()):
        if path.suffix not in PARTS or not path.is_file():
            continue
        digest = xxhash.xxh3_128()
        with open(path, "rb") as file:
            about = os.fstat(file.fileno())
            digest.update(file.read(2**16))
            seen = [about.st_size, about.st_mtime_ns, digest.hexdigest()]
            earlier = known.get(path.name, [""])
            while earlier[1:] != seen and (block := file.read(2**22)):
                digest.update(block)
        found[path.name] = [earlier[0] if earlier[1:] == seen else digest.hexdigest(), *seen]
    return found


def read_tokenizer(name: str) -> tuple[dict[str, Any], set[str]]:
    """Return (tokenizer_config.json, file names) of a local tokenizer; nothing for a tokenizer on the hub."""
    folder = Path(name)
    if folder.is_dir():
        files = {f.name for f in folder.iterdir()}
        if not files & {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json"}:
            refuse(
                f"--tokenizer_name_or_path {name}: no tokenizer.json there; give a folder that save_pretrained wrote"
            )
        check_files(folder, files, "--tokenizer_name_or_path")
        file = folder / "tokenizer_config.json"
        return json.loads(file.read_text()) if file.is_file() else {}, files
    if name.startswith(LOCAL) or (folder.parent != Path() and folder.parent.is_dir()):
        refuse(f"--tokenizer_name_or_path {name}: no such folder; give a local folder or a hub id")
    return {}, set()


def check_reward_model(args: RunFlags) -> None:
    """Reject a reward model that has not one output, and flags without a model."""
    name = args.reward_model_name_or_path
    length = args.reward_model_max_length
    if name is None:
        if length is not None:
            refuse("--reward_model_max_length needs --reward_model_name_or_path; give it, or leave this out")
        return
    config = read_configs(args.reward_model, "--reward_model_name_or_path", args.dry_run)[0]
    if len(config.get("id2label", "01")) != 1:
        refuse(f"--reward_model_name_or_path {name}: has {len(config.get('id2label', '01'))} outputs, must have one")
    context = config.get("max_position_embeddings", length)
    if length is not None and not 0 < length <= context:
        refuse(f"--reward_model_max_length {length}: must be above 0, and at most the {context} tokens {name} takes")

"""Load a causal language model for this machine: device, data type, attention, no dropout, a tokenizer that fits."""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import nn

from runtime.arguments.values import is_dropout
from runtime.system.process import first_line, print_on_rank_0, refuse, warn_once
from runtime.training.attention import grouped_attention, varlen_attention
from runtime.training.model_files import POLICY, ROPE, changed_config, load_complete, read_configs

OLDEST_GPU = (7, 5)  # compute capability of Turing: T4
MODERN_GPU = (8, 0)  # of Ampere, with which bfloat16 and flash attention begin


def resolve_device(args) -> tuple[torch.device, torch.dtype, str]:
    """Return (device of this rank, dtype of weights, attention implementation), with "auto" decided by the hardware.

    A resumed run keeps its type.

    On CPUs in bf16, grouped attention trained faster than eager (an update 3.03 against 3.29 s, SmolLM2-135M), and
    eager than sdpa; in fp32 none was always ahead. On GPUs ``attention.choose_layout`` may change the attention.
    """
    cuda = torch.cuda.is_available()
    if not cuda and args.vllm_tensor_parallel_size > 1:  # its shared memory has one name and outlives a killed run
        refuse(f"--vllm_tensor_parallel_size {args.vllm_tensor_parallel_size} needs GPUs; on CPUs leave it at 1")
    if torch.version.cuda and not cuda:
        describe_missing_gpu(args)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    wanted = args.recorded_choices.get("dtype", "auto") if args.dtype == "auto" else args.dtype
    if cuda:
        wanted = gpu_dtype(wanted, device)
    elif wanted == "float16":
        refuse("--dtype float16 needs a GPU: DeepSpeed does not train in float16 on CPUs; use bfloat16 or float32")
    elif wanted == "auto":
        wanted = cpu_dtype()
    dtype = getattr(torch, wanted)
    attention = args.attn_implementation
    if attention in ("flex_attention", "varlen") and not cuda:
        refuse(f"--attn_implementation {attention} needs a GPU: PyTorch has no backward pass of it for CPUs; use sdpa")
    if attention == "auto":
        attention = "grouped" if not cuda and dtype == torch.bfloat16 else "sdpa"
    return device, dtype, attention


def cpu_dtype() -> str:
    """Return bfloat16 for a CPU with instructions for it (AMX or AVX-512), and float32 for others.

    One without them multiplies bf16 at a thirtieth of its fp32 rate or less. In bf16 the engine's log-probs differ from
    the trainer's by 3e-2 nats instead of 1e-5.
    """
    capabilities = torch.cpu.get_capabilities()
    has_bf16 = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    return "bfloat16" if has_bf16 else "float32"


def describe_missing_gpu(args) -> None:
    """Say what a CUDA build of PyTorch describes without a GPU, as on a login node; exit code 2 for a run with vLLM."""
    advice = "studies/rehearse_gpu_run.py CARD shows the sizes of a run on a GPU that is not here"
    if args.rollout == "vllm" and not args.dry_run:
        refuse(
            f"PyTorch and vLLM are built for CUDA {torch.version.cuda}, and no GPU is visible (CUDA_VISIBLE_DEVICES?): "
            f"start the run on a machine with one, or pass --rollout hf to run on this CPU; {advice}"
        )
    print_on_rank_0(f"warning: no GPU is visible, so what follows describes a run on this CPU; {advice}")


def gpu_dtype(wanted: str, device: torch.device) -> str:
    """Return the dtype for a GPU, with "auto" decided; exit code 2 if the GPU lacks it or is too old for CUDA 13."""
    capability = torch.cuda.get_device_capability(device)
    name = f"{torch.cuda.get_device_name(device)} has compute capability {'.'.join(map(str, capability))}"
    if capability < OLDEST_GPU:
        refuse(f"{name}; torch and vLLM are built here for CUDA 13, which requires 7.5 or newer: use a newer GPU")
    if capability < MODERN_GPU and wanted == "bfloat16":
        refuse(f"--dtype bfloat16: {name}, and bfloat16 requires 8.0 or newer; pass --dtype float16 or float32")
    if wanted != "auto":
        return wanted
    return "bfloat16" if capability >= MODERN_GPU else "float16"


def load_model(args, dtype: torch.dtype, attention: str, flag: str = POLICY):
    """Load the causal language model that ``args`` name, on the CPU, as ``prepare_for_training`` leaves it.

    ``flag`` named it; of a critic the head is not used. Exits with code 2 where weights are missing in its files.
    """
    import transformers
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    register_attention()
    unset_hf_deepspeed_config()  # under ZeRO-3 it would load every model in pieces, also those DeepSpeed never sees
    name, revision = args.model
    shared = {"revision": revision, "trust_remote_code": args.trust_remote_code}
    config = load_config(args)
    auto = transformers.AutoModelForCausalLM
    if type(config) not in auto._model_mapping and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        auto = transformers.AutoModelForImageTextToText
    implementation = attention_for(config, attention, args.attn_implementation)
    how = {"config": config, "dtype": dtype, "attn_implementation": implementation, **shared}
    model = load_complete(auto, name, flag, flag == POLICY, **how)
    prepare_for_training(model)
    freeze_unused(model, config, f"{flag} {name}")
    if getattr(config, "head_dtype", None) == "float32":  # vLLM reads the same field
        head = model.get_output_embeddings()
        head.forward = partial(exact_product, head)
    if attention == "flex_attention":
        # Kernels are compiled per mask, batch size and use of gradients. Beyond the default of 8 versions PyTorch takes
        # the uncompiled one, which holds the scores of all pairs.
        torch._dynamo.config.recompile_limit = 64
    return model.train()


def load_config(args):
    """Load the config of the model that ``args`` name, made of its config.json with the fields of --override_config."""
    from transformers import AutoConfig

    name, revision = args.model
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    if not args.config_overrides:
        return config
    for key in args.config_overrides:
        if not hasattr(config, "rope_parameters" if key in ROPE else key) and key != "head_dtype":
            refuse(f"--override_config: the config of {name} has no field {key!r}; it may be one of its text_config")
    fields = changed_config(read_configs(args.model, POLICY, dry_run=True)[0], args.config_overrides)
    try:
        return type(config).from_dict(fields | {"name_or_path": name})
    except (KeyError, TypeError, ValueError) as error:
        refuse(f"--override_config: {name} has no such config ({type(error).__name__}: {first_line(error)[:300]})")


def engine_overrides(config: dict, changes: dict) -> dict:
    """Return --override_config for vLLM, which replaces attributes: those of the trainer's config, with its names."""
    found = {}
    for key, value in changes.items():
        name = "rope_parameters" if key in ROPE else key
        found[name] = engine_overrides(config[key], value) if key.endswith("_config") else config.get(name, value)
    return found


def freeze_unused(model, config, name: str) -> None:
    """Exclude what text does not use of a vision-language model from training, where weight decay would change it.

    ``config``: of the checkpoint. Prints what becomes of these parts in the saved model.
    """
    if config.get_text_config() is config:
        return
    parts = " and ".join(sorted(part for part in config.sub_configs if part != "text_config"))
    fate = f"and not saved, in a {type(model).__name__}"
    if model.config.get_text_config() is not model.config:
        fate = "and saved as it is"
        used = [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]
        for weight in {*model.parameters()}.difference(used):
            weight.requires_grad_(False)
    warn_once(f"{name}: a vision-language model, used for text; its tower ({parts}) is not trained {fate}")


def exact_product(head: nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    """Compute a head's logits in fp32: bf16 has no numbers between 16 and 16.125."""
    bias = None if head.bias is None else head.bias.float()
    return nn.functional.linear(hidden.float(), head.weight.float(), bias)


def register_attention() -> None:
    """Make the implementations of runtime/training/attention.py known to transformers by their names.

    PyTorch gives sdpa to cuDNN on Hopper and later. vLLM switches that off for the process that imports it, so it is
    off in every process of a run: the trainer's kernel must not depend on where the engine lives.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    torch.backends.cuda.enable_cudnn_sdp(False)
    AttentionInterface.register("varlen", varlen_attention)
    AttentionInterface.register("grouped", grouped_attention)
    AttentionMaskInterface.register("grouped", eager_mask)


def attention_for(config, attention: str, wanted: str) -> str | None:
    """Return the attention implementation for a model of this config; None leaves the choice to transformers.

    sdpa, varlen and grouped silently leave out the soft cap of Gemma 2's attention scores, and gpt-oss has no sdpa, so
    transformers takes eager there. ``wanted`` is ``--attn_implementation``; asking for what is wrong exits with code 2.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    if capped and attention in ("sdpa", "varlen", "grouped"):
        if wanted == attention:
            refuse(f"--attn_implementation {attention} leaves out this model's attention logit softcapping; use eager")
        return "eager"
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    architecture = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    plain = getattr(architecture, "_supports_sdpa", False)  # scores as every model has them, and a mask
    if attention == "grouped" and not plain:
        if wanted == attention:
            refuse("--attn_implementation grouped: this model's attention is not known to be the usual one; use eager")
        return "eager"
    if wanted == attention:
        return attention
    flex = getattr(architecture, "_supports_flex_attn", False)
    unsupported = (attention == "flex_attention" and not flex) or (attention == "varlen" and not plain)
    return None if unsupported or attention == "sdpa" else attention


def prepare_for_training(model) -> None:
    """Switch off what would change a gradient or prevent saving: dropout, ``padding_idx``, sampling settings.

    Dropout: some models hold the probability in ``nn.Dropout``, some as an attribute of a layer, some read it from the
    config. ``padding_idx``: the embedding of ``pad_token_id``, a token that prompts may hold, would get no gradient.
    Generation config: transformers loads settings of sampling that it does not save; only special tokens are kept.
    """
    from transformers import GenerationConfig

    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    model.generation_config = GenerationConfig(**{name: getattr(model.generation_config, name, None) for name in names})
    holders = [model.config, model.config.get_text_config(), *model.modules()]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if is_dropout(name, value):
                setattr(holder, name, 0.0)


def stop_token_ids(model, tokenizer) -> list[int]:
    """Return every id that ends a response: of the generation config (often several), the config and the tokenizer.

    Exits with code 2 where there is none.
    """
    ids = set()
    for holder in (model.generation_config, model.config, model.config.get_text_config(), tokenizer):
        value = getattr(holder, "eos_token_id", None)  # the config of a composite model has the field in its text part
        ids |= set(value if isinstance(value, list) else [value])
    if not ids - {None}:
        refuse("this model and its tokenizer define no EOS token; set eos_token_id in its config.json")
    return sorted(ids - {None})

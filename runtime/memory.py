"""An upper bound of the memory that a rank needs, from the flags and the model's config. Arithmetic, without torch.

docs/evidence/memory.md has the formula in words, and what runs were measured to hold.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from runtime.flags import Sizes, engine_args, kl_coefficients, loads_reference, sizes
from runtime.sources import split_revision

GIB = 2**30
FULL_KL_SAMPLES = 4  # of a step, for which the exact KL is logged
USABLE = 0.95  # of a GPU; the rest is for fragments
CUDA = 2 * GIB  # its context, libraries' workspaces, CUDA graphs; not measured
ENGINE_WORK = 1.5 * GIB  # what an engine on a GPU computes with, beside weights and KV cache; not measured
# The interpreter, libraries and gaps between tensors on a CPU, with --rollout hf and vllm: docs/evidence/memory.md.
PROCESS = {"hf": 0.95e9, "vllm": 1.6e9}
# What gives room on a GPU, the cheapest in time first.
REMEDIES = (
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "sleep": "engine"},
    {"gradient_checkpointing": True, "sleep": "all"},
    {"gradient_checkpointing": True, "sleep": "engine", "offload": ("optimizer",)},
    {"gradient_checkpointing": True, "offload": ("optimizer",)},
)


@dataclass(frozen=True)
class Model:
    """What the memory of a transformer depends on; of a mixture of experts, ``intermediate`` is of those of a token."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int


@dataclass(frozen=True)
class Setting:
    """What the memory of a rank depends on beside model and flags. ``card``: bytes of its GPU; 0 on a CPU."""

    ranks: int  # that train
    bf16: bool
    card: float = 0
    critic: bool = False


def read_model(name: str | Path) -> Model | None:
    """The model in a folder, or on the hub if its config.json is in the cache; None without the usual names."""
    folder = Path(name)
    file = folder / "config.json"
    if not folder.is_dir():
        hub_id, revision = split_revision(str(name))
        file = Path(try_to_load_from_cache(hub_id, "config.json", revision=revision) or "")
    if not file.is_file():
        return None
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    parameters = 0
    for weights in folder.glob("*.safetensors"):
        with open(weights, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        header.pop("__metadata__", None)
        parameters += sum(math.prod(tensor["shape"]) for tensor in header.values())
    return model_of(text, parameters, config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))


def model_of(config: dict[str, Any], parameters: int = 0, tied: bool = True) -> Model | None:
    """The model of a config.json; None where it lacks one of the usual names.

    Without ``parameters`` they are counted: biases of queries, keys and values included, and every expert.
    """
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if any(not isinstance(config.get(name), int) for name in names):
        return None
    layers, hidden, intermediate, heads, vocabulary = [config[name] for name in names]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    all_experts = intermediate
    if experts := config.get("num_local_experts") or config.get("num_experts"):
        expert = config.get("moe_intermediate_size") or intermediate
        all_experts = experts * expert
        intermediate = (config.get("num_experts_per_tok") or experts) * expert
    attention = (hidden + 1) * head_size * (heads + 2 * kv_heads) + hidden * head_size * heads
    layer = attention + 3 * hidden * all_experts + 2 * hidden
    counted = layers * layer + hidden + vocabulary * hidden * (1 if tied else 2)
    return Model(parameters or counted, layers, hidden, intermediate, heads, kv_heads, head_size, vocabulary)


def trainer_states(
    args,
    model: Model,
    setting: Setting,
) -> dict[str, float]:
    """Bytes that DeepSpeed keeps of policy, critic and reference, by part.

    Every ZeRO stage shards fp32 master weights and two moments (of an fp32 model, too). Stages 2 and 3 shard the fp32
    gradients, stage 1 keeps all of them, under bf16 in both types; stage 3 shards the weights.
    """
    number = 2 if setting.bf16 else 4
    offloads = "optimizer" in args.offload and setting.card > 0
    shard = model.parameters / setting.ranks
    weights = number * (shard if args.zero_stage == 3 else model.parameters) * ("param" not in args.offload)
    whole = (6 if setting.bf16 else 4) * model.parameters
    gradients = whole if args.zero_stage == 1 else 4 * shard * (not offloads)
    trained = 1 + setting.critic
    return {
        "weights": weights * trained,
        "gradients": gradients * (1 if args.zero_stage == 2 else trained),  # policy and critic take steps in turn
        "optimizer": shard * 12 * trained * (not offloads),
        "reference": model.parameters * number * loads_reference(args),
    }


def activations(
    args,
    model: Model,
    setting: Setting,
    tokens: int,
) -> float:
    """Bytes that autograd keeps of the layers for a micro-batch of ``tokens``.

    A layer keeps of a token two norms' inputs in fp32 and their results, the inputs of projections, queries, keys and
    values of all heads, four products of the MLP, one fp32 per head. eager and grouped attention keep the scores of all
    pairs of a row, others at most a copy of the mask; FlexAttention and flash keep neither.
    """
    number = 2 if setting.bf16 else 4
    hidden = model.hidden
    queries = model.heads * model.head_size
    kept = 2 * (hidden * (4 + number) + 4)
    kept += 4 * model.heads
    kept += number * 2 * hidden
    kept += number * 4 * queries
    kept += number * 4 * model.intermediate
    sample = args.max_prompt_length + args.max_response_length
    group = args.max_prompt_length + args.num_samples_per_prompt_rollout * args.max_response_length
    width = {"padded": sample, "packed": tokens}.get(args.batch_layout, min(tokens, group))
    attention = args.attn_implementation
    if attention == "auto" and setting.card == 0:
        attention = "grouped" if setting.bf16 else "sdpa"
    if attention in ("eager", "grouped"):
        kept += model.heads * width * (6 if attention == "eager" and setting.bf16 else number)
    elif attention == "sdpa":
        kept += number * width
    layers = 1 if args.gradient_checkpointing else model.layers
    return tokens * (kept * layers + number * hidden * model.layers)


def most_tokens(args, budget: int, ranks: int) -> int:
    """Tokens, padding included, of the largest micro-batch: short responses fill the budget as long ones do.

    Rows are dealt to the rank with the fewest tokens, so no rank has more than its part and one row.
    """
    prompts = -(-args.num_unique_prompts_rollout // args.num_mini_batches)
    samples = -(-prompts * args.num_samples_per_prompt_rollout // ranks)
    group = args.max_prompt_length + args.num_samples_per_prompt_rollout * args.max_response_length
    return min(budget, samples * (args.max_prompt_length + args.max_response_length) + group * (ranks > 1))


def passes(
    args,
    model: Model,
    setting: Setting,
    size: Sizes,
) -> dict[str, float]:
    """Bytes of what comes and goes in the update: activations and logits, or DeepSpeed's buffers, or its step."""
    number = 2 if setting.bf16 else 4
    on_gpu = setting.card > 0
    tokens = most_tokens(args, size.micro_batch_tokens, setting.ranks)
    predictions = min(size.logprob_chunk, tokens) * model.vocabulary
    # Logits and their gradient, and two blocks of them in fp32. The exact KL has both models' and seven arrays.
    logits = 2 * number * predictions + 8 * min(logit_block(on_gpu), predictions)
    compared = -(-FULL_KL_SAMPLES // setting.ranks) * args.max_response_length * model.vocabulary
    if "full" in (args.kl_estimator, args.kl_reward_estimator) and any(kl_coefficients(args)):
        compared = predictions
        logits += (number + 28) * compared
    exact = (number + 28) * min(compared, predictions) * loads_reference(args)
    # A gradient goes through a bucket and a flat copy; a tied head's and the embedding's meet. gloo copies once more.
    head = model.vocabulary * model.hidden
    bucket = reduce_bucket(on_gpu)
    several = setting.ranks > 1
    copies = min(model.parameters, max(bucket, head)) * (2 if several and not on_gpu else 1)
    reduction = number * (bucket * (2 if several and on_gpu else 1) + max(copies, 3 * head)) + 4 * head
    gathered = min(model.parameters, max(10**9, head)) * (args.zero_stage == 3 and (several or "param" in args.offload))
    return {
        "activations": activations(args, model, setting, tokens),
        "logits": max(logits, exact),
        "gathered": number * gathered,  # 10**9: DeepSpeed's stage3_max_live_parameters
        "reduction": reduction,
        "flat gradients": 0 if "optimizer" in args.offload and on_gpu else 4 * model.parameters / setting.ranks,
    }


def reduce_bucket(on_gpu: bool) -> int:
    """Gradients that DeepSpeed collects before it reduces them over the ranks."""
    return 2 * 10 ** (8 if on_gpu else 7)


def logit_block(on_gpu: bool) -> int:
    """Logits that are in fp32 at a time: 2 MiB, for a CPU's cache, and 64 MiB, to keep a GPU busy."""
    return 2 ** (24 if on_gpu else 19)


def engine(
    args,
    model: Model,
    setting: Setting,
    share: float,
) -> dict[str, float]:
    """Bytes of the engine beside a trainer: its weights, what it works with, and its KV cache.

    On a GPU without kv_cache_memory_bytes in --vllm_args vLLM fills its ``share`` of the card with the cache.
    """
    if args.vllm_engines > 0:
        return {"engine": 0, "KV cache": 0}
    weights = model.parameters * (2 if setting.bf16 else 4) / args.vllm_tensor_parallel_size
    if args.rollout == "hf":
        return {"engine": weights, "KV cache": 0}
    weights += ENGINE_WORK * (setting.card > 0)
    given = engine_args(args.vllm_args).get("kv_cache_memory_bytes")
    if given is not None or setting.card == 0:
        return {"engine": weights, "KV cache": given or 0.5 * GIB}
    return {"engine": weights, "KV cache": max(0, share * setting.card - weights)}


@dataclass(frozen=True)
class Prediction:
    """Bytes of a rank: the parts, and the most while the engine samples and while the trainer works."""

    parts: dict[str, float]
    phases: dict[str, float]

    @property
    def peak(self) -> float:
        """The most of both phases."""
        return max(self.phases.values())


def predict(
    args,
    model: Model,
    setting: Setting,
    size: Sizes | None = None,
) -> Prediction:
    """An upper bound of the memory of a rank, that of the process and the engine included.

    ``size``: of the micro-batches and of the engine's share, if they are not those of the flags.
    """
    on_gpu = setting.card > 0
    size = size or sizes(args, on_gpu)
    states = trainer_states(args, model, setting)
    work = passes(args, model, setting, size)
    sampler = engine(args, model, setting, size.vllm_gpu_memory_utilization)
    parts = states | work | sampler | {"process": CUDA if on_gpu else PROCESS[args.rollout]}
    held = sum(states.values()) - parts["reference"] * (on_gpu and "ref" in args.offload)
    engine_bytes = sum(sampler.values())
    sleeps = on_gpu and args.sleep != "off"
    asleep = parts["weights"] + parts["optimizer"] if on_gpu and args.sleep == "all" else 0
    gradients = parts["gradients"] if args.zero_stage == 2 else 0  # they are there from backward pass to step
    backward = work["activations"] + work["logits"] + work["gathered"]
    visit = parts["reference"] * (on_gpu and "ref" in args.offload) + work["logits"]  # a pass of a borrowed reference
    update = max(backward, work["reduction"] + work["gathered"], work["flat gradients"], visit)
    phases = {
        "sampling": parts["process"] + held - gradients - asleep + engine_bytes,
        "training": parts["process"] + held + update + engine_bytes * (not sleeps),
    }
    return Prediction(parts, phases)


def kv_bytes(model: Model, setting: Setting) -> int:
    """Bytes of keys and values of one token in the engine."""
    return 2 * model.layers * model.kv_heads * model.head_size * (2 if setting.bf16 else 4)


def describe(prediction: Prediction, model: Model, setting: Setting) -> list[str]:
    """Lines for the start of a run."""
    card = f" of the GPU's {setting.card / GIB:.1f}" if setting.card else ""
    parts = [f"{name} {size / GIB:.1f}" for name, size in prediction.parts.items() if size >= 0.05 * GIB]
    phases = [f"{name} {size / GIB:.1f}" for name, size in prediction.phases.items()]
    lines = [
        f"memory     at most {prediction.peak / GIB:.1f} GiB per rank{card} ({model.parameters / 1e6:.0f}M parameters; "
        f"docs/evidence/memory.md)",
        f"  phases   {', '.join(phases)}",
        f"  parts    {', '.join(parts)}",
    ]
    if 0 < setting.card * USABLE < prediction.peak:
        lines.append(
            f"warning: the GPU has {setting.card / GIB:.1f} GiB, and {prediction.peak / GIB:.1f} may be needed; see "
            f"--gradient_checkpointing, --sleep, --offload, --micro_batch_tokens, --vllm_gpu_memory_utilization"
        )
    return lines

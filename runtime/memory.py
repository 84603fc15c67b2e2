"""How much memory a rank of a run needs, part by part and phase by phase, from the flags and the model's config.

Arithmetic alone, without torch. docs/evidence/memory.md has the formulas, with what runs were measured to hold.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from runtime.flags import engine_args, loads_reference, sizes
from runtime.sources import split_revision

GIB = 2**30
FULL_KL_SAMPLES = 4  # of a step, for which the exact KL is logged
MAX_LIVE = 10**9  # weights that DeepSpeed's stage 3 keeps gathered by default: stage3_max_live_parameters
# Bytes resident with --rollout hf and vllm on CPUs besides what is predicted: the interpreter, libraries, their caches,
# gaps between tensors. docs/evidence/memory.md says what was measured.
PROCESS = {"hf": 0.81e9, "vllm": 1.46e9}


@dataclass(frozen=True)
class Model:
    """What the memory of a transformer depends on; a mixture of experts counts as if dense."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool = True  # the output head is the embedding

    @property
    def queries(self) -> int:
        """Width of all heads' queries."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all heads' keys, which is that of the values."""
        return self.kv_heads * self.head_size

    @property
    def head(self) -> int:
        """Parameters of the output head, as a rule a model's largest tensor; the embedding has as many."""
        return self.vocabulary * self.hidden


def tensor_sizes(folder: Path) -> dict[str, int]:
    """Numbers in each tensor of a folder's safetensors, by name, from the files' headers alone."""
    sizes = {}
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__":
                sizes[name] = math.prod(tensor["shape"])
    return sizes


def read_model(name: str | Path) -> Model | None:
    """The model in a local folder, or on the hub if its config.json is in the cache; None without the usual names."""
    folder = Path(name)
    file = folder / "config.json"
    if not folder.is_dir():
        hub_id, revision = split_revision(str(name))
        found = try_to_load_from_cache(hub_id, "config.json", revision=revision)
        file = Path(found if isinstance(found, str) else "")
    if not file.is_file():
        return None
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    weights = tensor_sizes(folder)
    tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    if weights:
        tied = not any(name.endswith("lm_head.weight") for name in weights)
    return model_of(text, sum(weights.values()), tied)


def model_of(config: dict[str, Any], parameters: int = 0, tied: bool = True) -> Model | None:
    """The model of a config.json; None where it lacks one of the usual names.

    Without ``parameters`` they are counted, as many as a model with these names has: biases of queries, keys and values
    included, and every expert.
    """
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    if any(not isinstance(config.get(name), int) for name in names):
        return None
    layers, hidden, intermediate, heads, vocabulary = [config[name] for name in names]
    kv_heads = config.get("num_key_value_heads") or heads
    head_size = config.get("head_dim") or hidden // heads
    model = Model(parameters, layers, hidden, intermediate, heads, kv_heads, head_size, vocabulary, tied)
    if parameters:
        return model
    experts = config.get("num_local_experts") or config.get("num_experts")
    wide = experts * (config.get("moe_intermediate_size") or intermediate) if experts else intermediate
    attention = (hidden + 1) * (model.queries + 2 * model.keys) + hidden * model.queries
    layer = attention + 3 * hidden * wide + 2 * hidden
    return replace(model, parameters=layers * layer + hidden + model.head * (1 if tied else 2))


@dataclass(frozen=True)
class Setting:
    """What the memory of a rank depends on beside the model and the flags."""

    ranks: int  # that train
    device: str  # cuda or cpu
    bf16: bool
    critic: bool = False
    card: float = 0  # bytes of the GPU, of which an engine takes its share; 0: unknown
    prompt: int = 0  # tokens of the longest prompt; 0: as many as --max_prompt_length allows
    layout: str | None = None  # what --batch_layout auto chose, and the attention with it; None: what is usual
    attention: str | None = None

    @property
    def size(self) -> int:
        """Bytes of a weight, and of a number that a layer computes."""
        return 2 if self.bf16 else 4


def trainer_states(args, parameters: int, setting: Setting) -> dict[str, float]:
    """Bytes that DeepSpeed keeps on a rank for a trained model, by part.

    Every ZeRO stage shards fp32 master weights and two moments (DeepSpeed copies the master weights of an fp32 model,
    too). Stages 2 and 3 keep this rank's partition of the gradients, in fp32, with --offload optimizer in CPU memory;
    stage 1 keeps all of them, under bf16 in both types. Stage 3 shards the weights. tests/unit/test_memory.py measures
    this.
    """
    if args.zero_stage == 1:
        gradients = 6 if setting.bf16 else 4
    elif "optimizer" in args.offload:
        gradients = 0
    else:
        gradients = 4 / setting.ranks
    weights = setting.size / setting.ranks if args.zero_stage == 3 else setting.size
    if "param" in args.offload:
        weights = 0
    kept = 0 if "optimizer" in args.offload else 4 / setting.ranks
    return {
        "weights": parameters * weights,
        "gradients": parameters * gradients,
        "master weights": parameters * kept,
        "moments": parameters * kept * 2,
    }


def reduce_bucket(on_gpu: bool) -> int:
    """Gradients that DeepSpeed collects before it reduces them over the ranks."""
    return 2 * 10 ** (8 if on_gpu else 7)


def layout_of(args, setting: Setting) -> str:
    """The layout of the rows; auto is shared unless device or lengths are against it."""
    if setting.layout is not None:
        return setting.layout
    return "shared" if args.batch_layout == "auto" else args.batch_layout


def attention_of(args, setting: Setting) -> str:
    """The attention implementation of the flags; eager and grouped keep the scores of every pair of tokens."""
    if setting.attention is not None:
        return setting.attention
    if args.attn_implementation != "auto":
        return args.attn_implementation
    if setting.device == "cpu":
        return "grouped" if setting.bf16 else "sdpa"
    return "flex_attention" if layout_of(args, setting) == "shared" else "sdpa"


@dataclass(frozen=True)
class Shape:
    """The largest micro-batch of a rank: rows of ``width`` tokens, ``predictions`` of response tokens in all."""

    rows: int
    width: int
    predictions: int
    alone: bool  # the rank has no other micro-batch before the optimizer step

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch, padding included."""
        return self.rows * self.width


def largest_batch(args, setting: Setting, budget: int) -> Shape:
    """The micro-batch of at most ``budget`` tokens when every response has --max_response_length tokens."""
    prompt = setting.prompt or args.max_prompt_length
    answer = args.max_response_length
    samples = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    most = -(-samples // args.num_mini_batches)
    mine = -(-most // setting.ranks)  # samples of this rank
    layout = layout_of(args, setting)
    if layout == "shared":
        group = min(args.num_samples_per_prompt_rollout, mine)
        together = max(1, min(group, (budget - prompt) // answer))
        width = prompt + together * (answer - 1)  # a last token predicts nothing and is not computed
    elif layout == "packed":
        together = max(1, min(mine, budget // (prompt + answer)))
        width = together * (prompt + answer - 1)
    else:
        together = 1
        width = prompt + answer - 1
    rows = 1 if layout == "packed" else max(1, min(budget // width, -(-mine // together)))
    return Shape(rows, width, rows * together * answer, rows * together >= mine)


def layer_activations(args, model: Model, setting: Setting, width: int) -> float:
    """Bytes that autograd keeps of one layer per token of a row of ``width`` tokens.

    D hidden size, A and K widths of queries and keys, I intermediate size; a number has 2 or 4 bytes. Each of two norms
    keeps its input in fp32, the normalized input in the model's type, and one fp32 per token. The projections keep
    their inputs (2 D), attention its queries, keys, values and result (2 A + 2 K), the MLP gate, its activation, up and
    their product (4 I). eager and sdpa repeat keys and values for all heads; so does FlexAttention in transformers
    where the number of heads is no power of two. eager keeps the scores of all pairs: after the softmax in fp32, and in
    bf16 once more; grouped keeps them once. sdpa keeps one fp32 per head, and of the masks that transformers makes (not
    the one of shared rows) a copy per layer.
    """
    size = setting.size
    attention = attention_of(args, setting)
    whole = attention == "flex_attention" and model.heads & (model.heads - 1) == 0
    keys = model.keys if whole or attention not in ("eager", "sdpa", "flex_attention") else model.queries
    kept = 2 * (model.hidden * (4 + size) + 4)
    kept += size * (2 * model.hidden + 2 * model.queries + 2 * keys + 4 * model.intermediate)
    if attention == "eager":
        return kept + model.heads * width * (6 if setting.bf16 else 4)
    if attention == "grouped":
        return kept + model.heads * width * size
    if attention == "sdpa" and layout_of(args, setting) != "shared":
        kept += size * width
    return kept + 4 * model.heads


def activations(args, model: Model, setting: Setting, shape: Shape) -> float:
    """Bytes that autograd keeps of the layers for one micro-batch; with checkpointing one layer in full at a time."""
    layer = layer_activations(args, model, setting, shape.width)
    if args.gradient_checkpointing:
        return shape.tokens * (layer + model.layers * setting.size * model.hidden)
    return shape.tokens * layer * model.layers


def logit_block(on_gpu: bool) -> int:
    """Logits that are in fp32 at a time: 2 MiB, for a CPU's cache, and 64 MiB, to keep a GPU busy."""
    return 2 ** (24 if on_gpu else 19)


def logits(chunk: int, model: Model, setting: Setting, shape: Shape, gradient: bool) -> float:
    """Bytes of the head at its peak: the logits of ``chunk`` predictions, in the backward pass their gradient, too, and
    two blocks of them in fp32, or one.
    """
    count = min(chunk, shape.predictions) * model.vocabulary
    block = 4 * min(logit_block(setting.device == "cuda"), count)
    return 2 * setting.size * count + block if gradient else setting.size * count + 2 * block


def reference_logits(args, chunk: int, model: Model, setting: Setting) -> float:
    """Bytes of the head for the exact KL of a step's first samples: logits of both models, and seven fp32 arrays."""
    samples = -(-FULL_KL_SAMPLES // setting.ranks)
    count = min(chunk, samples * args.max_response_length) * model.vocabulary
    return (setting.size + 28) * count


def reduction(args, model: Model, setting: Setting) -> float:
    """Bytes beside states and gradients at the end of the backward pass, when gradients go through DeepSpeed's buckets.

    A tied head's gradient waits for the embedding's, and both and their sum are there at a time. Stage 2 flattens a
    bucket, or the gradient of a weight larger than one, into a copy, and under bf16 adds it to its sums in fp32, one
    weight at a time. In fp32 it has room for the whole gradient of a weight that lies across two ranks' parts. Stage 3
    makes the same copies, which gloo copies again, beside the gradient itself; its bucket is always there. Stage 1
    reduces after the backward pass.
    """
    on_gpu = setting.device == "cuda"
    several = setting.ranks > 1
    bucket = reduce_bucket(on_gpu)
    mine = model.parameters / setting.ranks
    flat = setting.size * min(model.parameters, max(bucket, model.head))
    summed = 4 * min(model.head, mine) * setting.bf16
    meeting = setting.size * model.head * (3 if model.tied else 1)
    if args.zero_stage == 3:
        copies = 2 if several and not on_gpu else 1
        return max(setting.size * model.head + copies * flat + summed, meeting)
    if args.zero_stage == 1:
        return 4 * bucket * (not setting.bf16) + meeting - setting.size * model.head  # of which gradients have one
    across = 0 if setting.bf16 else setting.size * min(model.head, model.parameters - mine)
    buffers = 2 if on_gpu and several else 1  # with two, one fills while the other is reduced
    return setting.size * bucket * buffers + across + max(flat + summed, meeting)


def kv_bytes(model: Model, setting: Setting) -> int:
    """Bytes of keys and values of one token in the engine."""
    return 2 * model.layers * model.keys * setting.size


@dataclass(frozen=True)
class Prediction:
    """Bytes of a rank: the parts, and the peak of each phase. What the process itself takes is not in it."""

    parts: dict[str, float]
    phases: dict[str, float]

    @property
    def peak(self) -> float:
        """The most of all phases."""
        return max(self.phases.values())


def predict(args, model: Model, setting: Setting) -> Prediction:
    """The memory of a rank for these flags, the engine's included. Responses count with their greatest length."""
    on_gpu = setting.device == "cuda"
    size = sizes(args, on_gpu)
    shape = largest_batch(args, setting, size.micro_batch_tokens)
    no_gradient = largest_batch(args, setting, size.logprob_micro_batch_tokens)
    trained = trainer_states(args, model.parameters, setting)
    parts = {name: held * (1 + setting.critic) for name, held in trained.items()}
    sharded = args.zero_stage == 3
    standing = 0  # gradients for which there is room at any time: those of stage 3, stage 1's fp32 sums under bf16
    if sharded:
        standing = trained["gradients"]
    elif args.zero_stage == 1 and setting.bf16:
        standing = 4 * model.parameters
    gradients = trained["gradients"] - standing
    parts["gradients"] = gradients + standing * (1 + setting.critic)  # policy and critic take their steps in turn
    parts["reference"] = model.parameters * setting.size * loads_reference(args)
    parts |= engine(args, model, setting)
    parts["activations"] = activations(args, model, setting, shape)
    parts["logits"] = logits(size.logprob_chunk, model, setting, shape, gradient=True)
    parts["flat gradients"] = 0 if "optimizer" in args.offload else 4 * model.parameters / setting.ranks

    # Stage 3 keeps a bucket, and gathers weights where a pass needs them, which stay until the step if they are few.
    gathered = min(model.parameters, max(MAX_LIVE, model.head)) * (setting.ranks > 1)
    parts["bucket"] = setting.size * reduce_bucket(on_gpu) * sharded
    parts["gathered weights"] = setting.size * gathered * sharded

    states = sum(parts[name] for name in ("weights", "master weights", "moments", "bucket"))
    states += standing * (1 + setting.critic)
    sampler = parts["engine"] + parts["KV cache"]
    beside = 0 if on_gpu and args.sleep != "off" else sampler
    left = 0 if on_gpu and args.sleep == "all" else states
    reference = 0 if on_gpu and "ref" in args.offload else parts["reference"]
    phases = {"generate": left + reference + sampler}
    if parts["reference"] or setting.critic or args.num_epochs * args.num_mini_batches > 1:
        head = logits(size.logprob_chunk, model, setting, no_gradient, gradient=False)
        if parts["reference"]:
            head = max(head, reference_logits(args, size.logprob_chunk, model, setting))
        phases["logprobs"] = states + beside + parts["reference"] + parts["gathered weights"] + head
    training = states + beside + reference
    earlier = 0 if shape.alone else gradients  # of the micro-batches before
    backward = training + earlier + parts["activations"] + parts["gathered weights"] + parts["logits"]
    phases["update"] = max(backward, training + gradients + reduction(args, model, setting))
    # DeepSpeed's norm has one gradient in fp64, and its step one flat copy of its partition in fp32.
    norm = 0 if "optimizer" in args.offload else 8 * min(model.head, model.parameters / setting.ranks)
    phases["step"] = training + gradients + max(parts["flat gradients"], norm)
    return Prediction(parts, phases)


def engine(args, model: Model, setting: Setting) -> dict[str, float]:
    """Bytes of the engine beside a trainer: its weights, and its KV cache.

    On a GPU without kv_cache_memory_bytes in --vllm_args vLLM fills its share of the card,
    --vllm_gpu_memory_utilization, with the cache.
    """
    if args.vllm_engines > 0:
        return {"engine": 0, "KV cache": 0}
    weights = model.parameters * setting.size / args.vllm_tensor_parallel_size
    cache = 0
    given = engine_args(args.vllm_args).get("kv_cache_memory_bytes")
    if args.rollout == "vllm" and given is not None:
        cache = given
    elif args.rollout == "vllm" and setting.device == "cpu":
        cache = 0.5 * GIB
    elif args.rollout == "vllm":
        cache = max(0, args.vllm_gpu_memory_utilization * setting.card - weights)
    return {"engine": weights, "KV cache": cache}


def describe(prediction: Prediction, model: Model, process: float, card: float = 0) -> list[str]:
    """Lines for the start of a run. ``process``: bytes of process and libraries; 0 on a GPU, of ``card`` bytes."""
    parts = [f"{name} {size / GIB:.1f}" for name, size in prediction.parts.items() if size >= 0.05 * GIB]
    phases = [f"{name} {size / GIB:.1f}" for name, size in prediction.phases.items()]
    libraries = f"{process / GIB:.1f} of them the process and its libraries" if process else "besides CUDA's own"
    lines = [
        f"memory     at most about {(prediction.peak + process) / GIB:.1f} GiB per rank, {libraries} "
        f"({model.parameters / 1e6:.0f}M parameters; docs/evidence/memory.md)",
        f"  phases   {', '.join(phases)}",
    ]
    if parts:  # of a tiny model none is worth a number
        lines.append(f"  parts    {', '.join(parts)}")
    if 0 < card < prediction.peak:
        worst = max(prediction.phases, key=prediction.phases.get)
        lines.append(
            f"warning: the GPU has {card / GIB:.1f} GiB, and the phase {worst} may need {prediction.peak / GIB:.1f}; "
            f"see --gradient_checkpointing, --micro_batch_tokens, --sleep, --offload, --vllm_gpu_memory_utilization"
        )
    return lines

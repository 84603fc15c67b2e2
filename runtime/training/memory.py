"""An upper bound of the memory that a rank needs, from the flags and the model's config. Arithmetic, without torch.

docs/evidence/memory.md has the formula in words, and what runs were measured to hold. Sizes are in bytes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open

from runtime.arguments.values import ModelName
from runtime.training.model_files import read_configs

GIB = 2**30
FULL_KL_SAMPLES = 4  # of a step, for which the exact KL is logged
USABLE = 0.95  # of a GPU; the rest is for fragments
CUDA = 2 * GIB  # its context, libraries' workspaces, CUDA graphs; not measured
ENGINE_WORK = 1.5 * GIB  # what an engine on a GPU computes with, beside weights and KV cache; not measured
CPU_BLOCK = 32  # tokens of a block of an engine's KV cache on a CPU
PROCESS = {"hf": 0.95e9, "vllm": 1.6e9}  # interpreter, libraries, what building an engine leaves, by --rollout
GAPS = 0.25  # of all else, on a CPU: freed memory that no later tensor fits into; from whole runs of the quickstart
# Fields of config.json of models with recurrent states: Mamba, gated delta rule, short convolutions.
STATES = {"mamba_d_conv", "conv_kernel", "conv_L_cache", "state_size", "linear_conv_kernel_dim"}
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


@dataclass(frozen=True)
class Setting:
    """Conditions of a rank that determine its memory, besides model and flags. ``card``: GPU memory; 0 on a CPU."""

    ranks: int  # that train
    bf16: bool  # or fp16
    card: float = 0
    critic: bool = False

    @property
    def number(self) -> int:
        """Bytes of a number of the model."""
        return 2 if self.bf16 else 4


@dataclass
class Sizes:
    """Sizes that depend on the device, by the names of their flags."""

    micro_batch_tokens: int
    logprob_chunk: int
    vllm_gpu_memory_utilization: float
    vllm_max_num_seqs: int
    vllm_max_num_batched_tokens: int


def default_sizes(args: Any, cuda: bool) -> Sizes:
    """Return the sizes of these flags on a CPU, or on a GPU with enough memory; device_sizes.py fits them to a GPU.

    A micro-batch holds at least the longest sample that is possible.

    A GPU needs about 16,000 tokens to be busy for longer than it takes to start its kernels. A CPU core is busy with
    512, and the less of them are in memory at a time, the smaller a process stays. The engine's sizes for a GPU are
    vLLM's own for 80 GB; on a CPU twice as many sequences take twice as long, and twice the KV cache.
    """
    longest = args.max_prompt_length + args.max_response_length
    default = Sizes(
        micro_batch_tokens=max(longest, 16384 if cuda else 512),
        logprob_chunk=4096 if cuda else 512,
        vllm_gpu_memory_utilization=0.9 if args.vllm_engines > 0 else 0.4,
        vllm_max_num_seqs=1024 if cuda else 64,
        vllm_max_num_batched_tokens=16384 if cuda else 8192,
    )
    own = args.engine_args
    given = {name: getattr(args, name, own.get(name.removeprefix("vllm_"))) for name in vars(default)}
    return replace(default, **{name: value for name, value in given.items() if value is not None})


@functools.cache  # one question to the hub
def read_model(name: ModelName) -> Model | None:
    """Read the model in a folder or on the hub, None if fields are missing. Exits with code 2 if there is no model."""
    config, _, _ = read_configs(name, "--model_name_or_path", dry_run=True)  # its weights may be elsewhere
    parameters = 0
    for weights in Path(name.name).glob("*.safetensors"):
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
    expert = intermediate
    if experts > 1:
        expert = config.get("moe_intermediate_size") or intermediate
    attention = (hidden + 1) * size * (heads + 2 * kv_heads) + hidden * size * heads  # with biases, as Qwen has them
    layer = attention + 3 * hidden * experts * expert + 2 * hidden
    parameters = parameters or layers * layer + hidden + vocabulary * hidden * (1 if tied else 2)
    used = min(experts, config.get("num_experts_per_tok") or experts) * expert  # by a token
    recurrent = not STATES.isdisjoint(config)
    return Model(parameters, layers, hidden, used, heads, kv_heads, size, vocabulary, recurrent)


def trainer_states(args, model: Model, setting: Setting) -> dict[str, float]:
    """Return DeepSpeed's memory of policy, critic and reference by part; stage 1 keeps all gradients in both types."""
    shard = model.parameters / setting.ranks
    on_device = "optimizer" not in args.offload or setting.card == 0
    weights = setting.number * ("param" not in args.offload)
    weights *= shard if args.zero_stage == 3 else model.parameters
    gradients = 4 * shard * on_device
    if args.zero_stage == 1:
        gradients = (6 if setting.bf16 else 4) * model.parameters
    trained = 1 + setting.critic
    return {
        "weights": weights * trained,
        "gradients": gradients * (1 if args.zero_stage == 2 and setting.card else trained),  # or freed after each step
        "optimizer": shard * 12 * trained * on_device,
        "reference": model.parameters * setting.number * args.loads_reference,
    }


def row_lengths(args) -> tuple[int, int]:
    """Return the largest number of tokens of a sample, and of a group that shares one copy of its prompt."""
    group = args.num_samples_per_prompt_rollout * args.max_response_length
    return args.max_prompt_length + args.max_response_length, args.max_prompt_length + group


def activations(args, model: Model, setting: Setting, tokens: int) -> float:
    """Return the memory of saved activations of a micro-batch: norms, projections, MLP and attention of all layers."""
    number = setting.number
    hidden = model.hidden
    queries = model.heads * model.head_size
    kept = 2 * (hidden * (4 + number) + 4)
    kept += 4 * model.heads
    kept += number * 2 * hidden
    kept += number * 4 * queries
    kept += number * 4 * model.intermediate
    sample, group = row_lengths(args)
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
    """Return the tokens of the largest micro-batch: the budget, or a rank's part of a mini-batch and one row more."""
    prompts = -(-args.num_unique_prompts_rollout // args.num_mini_batches)
    samples = -(-prompts * args.num_samples_per_prompt_rollout // ranks)
    sample, group = row_lengths(args)
    return min(budget, samples * sample + group * (ranks > 1))


def passes(args, model: Model, setting: Setting, size: Sizes) -> dict[str, float]:
    """Return the transient memory of the update: activations and logits, or DeepSpeed's buffers, or its step."""
    number = setting.number
    on_gpu = setting.card > 0
    tokens = most_tokens(args, size.micro_batch_tokens, setting.ranks)
    head = model.vocabulary * model.hidden
    predictions = min(size.logprob_chunk, tokens) * model.vocabulary
    # Logits and their gradient, and two blocks of them in fp32. The exact KL has both models' and seven arrays.
    logits = 2 * number * predictions + 8 * min(logit_block(on_gpu), predictions)
    if "head_dtype" in (args.override_config or ""):  # in fp32, with a copy of the head and its gradient
        logits += 2 * (4 - number) * predictions + 8 * head
    compared = -(-FULL_KL_SAMPLES // setting.ranks) * args.max_response_length * model.vocabulary
    if "full" in (args.kl_estimator, args.kl_reward_estimator) and any(args.kl_coefficients):
        compared = predictions
        logits += (number + 28) * compared
    exact_kl = (number + 28) * min(compared, predictions) * args.loads_reference
    # A gradient goes through a bucket and a flat copy, with gloo two; a tied head's and the embedding's meet.
    several = setting.ranks > 1
    bucket = reduce_bucket(on_gpu)
    copies = min(model.parameters, max(bucket, head))
    if several and on_gpu:
        bucket *= 2
    elif several:
        copies *= 2
    gathered = 0
    if args.zero_stage == 3 and (several or "param" in args.offload):
        gathered = min(model.parameters, max(10**9, head))  # 10**9: DeepSpeed's stage3_max_live_parameters
    return {
        "activations": activations(args, model, setting, tokens),
        "logits": max(logits, exact_kl),
        "gathered": number * gathered,
        "reduction": number * (bucket + max(copies, 3 * head)) + 4 * head,
        "flat gradients": 0 if "optimizer" in args.offload and on_gpu else 4 * model.parameters / setting.ranks,
    }


def reduce_bucket(on_gpu: bool) -> int:
    """Return the number of gradients that DeepSpeed collects before it reduces them over the ranks."""
    return 2 * 10 ** (8 if on_gpu else 7)


def logit_block(on_gpu: bool) -> int:
    """Return the number of fp32 logits at a time: 2 MiB, for a CPU's cache, and 64 MiB, to keep a GPU busy."""
    return 2 ** (24 if on_gpu else 19)


def most_sequences(args, max_num_seqs: int, ranks: int) -> int:
    """Return the largest number of sequences that an engine may decode at once, in training or in an evaluation."""
    if not hasattr(args, "num_samples_per_prompt_rollout"):  # scripts/evaluate.py without a run
        return max_num_seqs
    engines = args.vllm_engines or ranks // args.vllm_tensor_parallel_size
    group = args.generation_size or args.num_samples_per_prompt_rollout
    batches = 1 + args.async_steps
    trained = math.ceil(args.num_unique_prompts_rollout / engines) * group * batches
    evaluated = math.ceil(args.eval_prompts / engines) * args.eval_samples
    return min(max_num_seqs, max(trained, evaluated))


def cpu_cache(args, model: Model | None, number: int, ranks: int) -> float:
    """Return the bytes of the KV cache on a CPU: the longest sequences and a quarter more, at most 0.5 GiB.

    ``number``: bytes of a number. The quarter is for models whose layers differ, of which vLLM rounds up the groups. It
    rejects less than a sequence of full length needs and a block that stays empty, however short the prompts are.
    """
    if model is None or model.recurrent:
        return 0.5 * GIB
    size = args.engine_args.get("block_size", CPU_BLOCK)
    prompt = getattr(args, "longest_prompt", None) or args.max_prompt_length
    longest = math.ceil((prompt + args.max_response_length) / size)
    full = math.ceil((args.max_prompt_length + args.max_response_length) / size)
    sequences = most_sequences(args, default_sizes(args, False).vllm_max_num_seqs, ranks)
    heads = model.layers * model.kv_heads
    block = 2 * size * heads * model.head_size * number  # bytes of its keys and values
    needed = min(0.5 * GIB, 1.25 * sequences * longest * block)
    return max(needed, 1.25 * (full + 1) * block)


def engine(args, model: Model, setting: Setting, share: float) -> dict[str, float]:
    """Return the bytes of the engine next to a trainer. Its KV cache fills ``share`` of a GPU or has the given size."""
    weights = model.parameters * setting.number / args.vllm_tensor_parallel_size
    weights += ENGINE_WORK * (setting.card > 0 and args.rollout == "vllm")
    if setting.card > 0:
        cache = max(0, share * setting.card - weights)
    else:
        cache = cpu_cache(args, model, setting.number, setting.ranks)
    cache = args.engine_args.get("kv_cache_memory_bytes", cache) * (args.rollout == "vllm")
    beside = args.vllm_engines == 0
    return {"engine": weights * beside, "KV cache": cache * beside}


@dataclass(frozen=True)
class Prediction:
    """Predicted memory of a rank: parts, peaks while the engine samples and while the trainer works, with gaps."""

    parts: dict[str, float]
    phases: dict[str, float]
    peak: float


def predict(args, model: Model, setting: Setting, size: Sizes | None = None) -> Prediction:
    """Return an upper bound for a rank, the process and the engine included. ``size`` overrides the flags' sizes."""
    on_gpu = setting.card > 0
    size = size or default_sizes(args, on_gpu)
    states = trainer_states(args, model, setting)
    work = passes(args, model, setting, size)
    sampler = engine(args, model, setting, size.vllm_gpu_memory_utilization)
    parts = states | work | sampler | {"process": CUDA if on_gpu else PROCESS[args.rollout]}
    visitor = parts["reference"] * (on_gpu and "ref" in args.offload)  # there during its own pass alone
    held = parts["process"] + sum(states.values()) - visitor
    gradients = parts["gradients"] * (args.zero_stage == 2 and on_gpu)  # freed after each step
    asleep = (parts["weights"] + parts["optimizer"]) * (on_gpu and args.vllm_sleep == "all")
    beside = sum(sampler.values()) * (not on_gpu or args.vllm_sleep == "off")
    backward = work["activations"] + work["logits"] + work["gathered"]
    reduction = work["reduction"] + work["gathered"]
    update = max(backward, reduction, work["flat gradients"], visitor + work["logits"])
    sampling = held - gradients - asleep + sum(sampler.values())
    training = held + update + beside
    phases = {"sampling": sampling, "training": training}
    most = max(sampling, training)
    parts["gaps"] = 0 if on_gpu else GAPS * most
    return Prediction(parts, phases, most + parts["gaps"])


def describe(prediction: Prediction, model: Model, setting: Setting) -> list[str]:
    """Describe a memory prediction in lines for the start of a run."""
    card = f" of the GPU's {setting.card / GIB:.1f}" if setting.card else ""
    count = f"{model.parameters / 1e6:.0f}M parameters"
    lines = [f"memory     at most {prediction.peak / GIB:.1f} GiB per rank{card} ({count}; docs/evidence/memory.md)"]
    for title in ("phases", "parts"):
        found = getattr(prediction, title)
        shown = [f"{name} {size / GIB:.1f}" for name, size in found.items() if size >= 0.05 * GIB]
        lines.append(f"  {title:9}{', '.join(shown)}")
    if 0 < setting.card * USABLE < prediction.peak:
        lines.append(
            f"warning: the GPU has {setting.card / GIB:.1f} GiB, and {prediction.peak / GIB:.1f} may be needed; see "
            f"--gradient_checkpointing, --vllm_sleep, --offload, --micro_batch_tokens, and gpu_memory_utilization in "
            f"--vllm_args"
        )
    return lines

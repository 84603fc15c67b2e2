"""Flags that every script has, their parser, and the numbers that follow from them, such as the total steps.

Imports no torch, so an invalid flag ends a run within two seconds. checks.py has the checks, values.py typed values.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from runtime.arguments import presets
from runtime.arguments.flag_translation import refuse_foreign
from runtime.arguments.values import ChatTemplate, InitialKL, ModelName, config_overrides, sources
from runtime.system.flag_values import json_object

# Three groups of arguments that are no part of a run's name or identity; the reasons: docs/evidence/checkpoints.md.
# Where and how a run is shown, saved and resumed. No number of the run depends on them.
PRESENTATION = (
    "output_dir",
    "run_name",
    "dry_run",
    "overwrite",
    "track",
    "log_samples",
    "save_every",
    "save_minutes",
    "keep_checkpoints",
    "resume",
)
# Memory, speed, and limits that only end a run: results are the same bit for bit, or up to rounding.
RESOURCES = (
    "micro_batch_tokens",
    "gradient_checkpointing",
    "engine_process",
    "sleep",
    "timeout",
    "max_sampler_diff",
)
# Those of --vllm_args for which the same holds.
VLLM_RESOURCES = (
    *("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size"),
    *("gpu_memory_utilization", "enforce_eager"),
    *("load_format", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
)
# How long a run is. The learning rate of a step depends on it, unless --lr_scheduler_type is constant.
LENGTH = ("total_steps", "total_episodes", "total_epochs")
MAY_CHANGE = (*PRESENTATION, *RESOURCES, *LENGTH)  # between the parts of a run that was interrupted

# What follows from model and data where it is not given: runtime/training/derived_defaults.py.
OPEN = ("learning_rate", "critic_learning_rate", "max_prompt_length", "max_response_length", "total_steps")
KL_HORIZON = 10000.0  # sequences, of --kl_target TARGET
# The type of the field as_: "as" is a word of Python's own, so that only the command line can have it.
As = Annotated[str | None, tyro.conf.arg(name="as", metavar="NAME")]


@dataclass
class RunFlags:
    """Everything about a run that is not the algorithm."""

    # Names of the flags that the command line sets, from ``parse``. None: made in Python, where every value is meant.
    flags_set: ClassVar[frozenset[str] | None] = None
    # Choices by measurement (dtype, sizes, layout) of the run that is resumed, from ``preflight``.
    recorded_choices: ClassVar[dict[str, Any]] = {}

    # ---- run
    seed: int = 1
    """Seed of the data split, the order of prompts, every sample, and the shuffling of mini-batches."""
    eval_every: int = 0
    """Evaluate every N steps, in addition to before the first and after the last. 0 disables."""
    save_every: int = 0
    """Write a checkpoint every N steps. 0 disables."""
    save_minutes: float = 30.0
    """Also write a checkpoint when the last one is older than this many minutes. 0 disables."""
    keep_checkpoints: int = 2
    """Number of recent checkpoints to keep, in addition to the best by evaluation. 0 keeps all."""
    resume: str = "auto"
    """auto: resume from the newest intact checkpoint of this run, if the code is the same. never: refuse to. Or the
    folder of a checkpoint: resume from there, also by changed code."""
    timeout: float = 1800.0
    """End the run after this many seconds without progress on any rank or an answer from any engine. 0 disables."""
    output_dir: str = field(default_factory=lambda: os.environ.get("RUN_DIR", "runs"))
    """Folder that holds the folders of runs. Default: RUN_DIR, which scripts/submit.py sets, or runs."""
    run_name: str | None = None
    """Folder of this run in output_dir. Default: exp_name, the arguments that differ from their defaults, the seed."""
    overwrite: bool = False
    """Replace the folder of an earlier run of this name."""
    dry_run: bool = False
    """Check everything, print sizes and the first prompt, load no model, and stop. (scripts/eval_base.py samples.)"""
    track: bool = False
    """Log to Weights & Biases as well, to WANDB_PROJECT (rlvr) of WANDB_ENTITY. Without network: offline, and warn."""
    log_samples: int = 4
    """Samples per step written to samples.jsonl; step 1 and every 10th step also print some. 0 disables both."""

    # ---- model
    model_name_or_path: str = "models/SmolLM2-135M-Instruct"
    """Local folder or hub id of the policy; ID@REVISION is a branch, tag or commit on the hub."""
    tokenizer_name_or_path: str | None = None
    """Local folder or hub id of the tokenizer and its chat template. Default: the model's own."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights."""
    external_lib: str | None = None
    """Python module to import before the model is loaded, for example one that registers an architecture."""
    override_config: str | None = None
    """JSON object of fields to change in the model's config."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of weights and sampling; master weights are always fp32. auto: bfloat16 on GPUs (on a T4 float16), and
    on CPUs that multiply it 1.4 times as fast as float32, measured once for each machine; a resumed run keeps it. With
    float16, for GPUs only, the loss is scaled."""
    attn_implementation: str = "auto"
    """transformers' name (eager, sdpa, flex_attention, flash_attention_2, ...); varlen: PyTorch's own for packed rows;
    grouped: eager in fewer passes. auto: what suits the rows on GPUs; sdpa on CPUs, but grouped for bfloat16."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more time, much less memory."""

    # ---- data
    dataset: str = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    """reasoning_gym:NAME?key=value, .jsonl, .json, .parquet or .csv files, a folder saved by datasets, or a hub id
    (ID:CONFIGURATION, ID@SPLIT; the split is train). Several as JSON: {"a": 1.0, "b": 500}, all of a and 500 of b."""
    eval_dataset: str | None = None
    """Data set whose first eval_prompts problems are the evaluation, and excluded from training. Several as JSON: {"a":
    32, "b": 1.0}, the first 32 of a and all of b. Default: a part of dataset."""
    prompt_key: str | None = None
    """Column of the prompt: text or a list of chat messages. Default: question; known for MATH and countdown."""
    ground_truth_key: str | None = None
    """Column of the ground truth. Default: answer; known for MATH and countdown."""
    system_prompt: str | None = None
    """System message before every prompt; "" for none. Default: the built-in one for this data set, if any."""
    chat_template: str | None = None
    """A Jinja file, chatml, tulu, r1 (with think tags), question_answer, or none. Default: the tokenizer's own, for
    which a JSON object has variables: {"enable_thinking": false} for Qwen3."""
    max_prompt_length: int = 256
    """Maximum prompt length in tokens, chat template included."""
    overlong_prompts: Literal["error", "filter", "left", "right"] = "error"
    """Longer prompts: end the run at the start, leave them out, or truncate them on the left or on the right."""
    bad_rows: Literal["raise", "drop"] = "raise"
    """Rows without a prompt, or whose ground truth its verifier rejects: end the run at the start, or drop them."""
    generation_size: int | None = None
    """Sample this many responses per prompt and keep the num_samples_per_prompt_rollout of highest reward."""
    dynamic_sampling_rounds: int = 0
    """Replace groups of equal reward by new prompts, up to this many times per step (DAPO). 0 disables."""
    dataset_filter: tuple[float, float] | None = None
    """SHARE THRESHOLD: after each epoch over the data, drop at most SHARE of the problems, those answered best, and of
    them only those with at least THRESHOLD correct answers, e.g. 0.1 1. Default: off."""

    # ---- rewards
    verifier: str | None = None
    """Verifier by its name in docs/data_and_rewards.md, or your own, path/to/file.py:function, called as
    function(response, ground_truth, row); or several with commas. Default: by the columns."""
    verifier_key: str | None = None
    """Column that names the verifiers of a row; where it is empty --verifier applies."""
    reward_weights: tuple[str, ...] = ()
    """NAME=NUMBER per verifier or reward_model (default 1); NAME=gate: others count only where this one scores 1."""
    control: Literal["none", "random", "format", "shuffled", "inverted"] = "none"
    """Train on something else than the reward, to see what a gain owes to it: the rewards of a step dealt out at
    random, the part format alone, the score by another problem's truth, or the negative. Evaluations stay true."""
    call_timeout: float = 10.0
    """Timeout in seconds of each call of a verifier or an environment; then its process is killed. A verification that
    is killed scores 0; a turn that is killed shows the model an error."""
    check_verifier_status: bool = False
    """End the run when no score of a step is above 0: the verifier fails, or the prompt does."""
    allow_unsafe_code_exec: bool = False
    """Let the code verifier run programs with resource limits only where the kernel provides no namespaces."""
    reward_model_name_or_path: str | None = None
    """Sequence classifier with one output; its score, times its weight, is added to the verifiers' score. A local
    folder, or ID@REVISION on the hub."""
    reward_model_max_length: int | None = None
    """Tokens of a conversation that the reward model reads, its last ones. Default: as many as the model takes."""
    reward_scaling: float = 1.0
    """Multiply the score by this: the reward is (score - reward_bias) * reward_scaling, then clipped."""
    reward_bias: float = 0.0
    """Subtract this from the score before scaling."""
    max_reward_clip: float | None = None
    """Clip the reward to plus or minus this. Default: off."""
    mask_no_eos_with_zero: bool = True
    """Score truncated responses 0, whatever they say."""
    non_stop_penalty: float = 0.0
    """Subtract this from the reward of a truncated response."""
    overlong_buffer: int = 0
    """Tokens before max_response_length over which up to 1 is subtracted from the reward (DAPO). 0 disables."""

    # ---- environments
    environment: str | None = None
    """Responses of several turns: path/to/file.py:Class, whose reset(...), tools and get_reward() play each of them."""
    max_turns: int = 8
    """Turns of the model in a response; max_response_length is for all turns together, the environment's included."""

    # ---- evaluation
    eval_prompts: int = 64
    """Problems held out for evaluation, never trained on. 0 disables evaluation."""
    eval_samples: int = 4
    """Responses per evaluation problem."""
    eval_temperature: float = 1.0
    """Sampling temperature in evaluation. 0 is greedy, with one response per problem whatever eval_samples says."""

    # ---- generation
    max_response_length: int = 32
    """Maximum response length in tokens; longer responses are truncated."""
    temperature: float = 1.0
    """Sampling temperature; the trainer's log-probs are taken at the same temperature."""
    rollout: Literal["vllm", "hf"] = "vllm"
    """Generation backend: vLLM, or transformers' generate (slow, no extra dependency)."""
    async_steps: int = 0
    """Sample up to this many batches ahead of training: samples are at most that many steps old. 0: always fresh."""
    inflight_updates: Literal["off", "recompute", "keep"] = "off"
    """Push weights while sequences run; recompute their keys and values, or keep the old. off: between batches."""
    max_sampler_diff: float = 0.1
    """End the run if the mean log-prob gap between an engine and the trainer exceeds this many nats per token (in fp32:
    a thousandth of it). 0 disables."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; they stay part of it."""
    ignore_eos: bool = False
    """Ignore EOS and always generate max_response_length tokens (for benchmarking)."""
    engine_process: bool = False
    """Run the engine in a process of its own on the trainer's device, where Python's lock does not hold it up; weights
    change hands in shared memory. Default: in a thread."""
    vllm_engines: int = 0
    """Engines on ranks of their own, the last of the launch, which only sample. 0: one beside each trainer."""
    vllm_tensor_parallel_size: int = 1
    """Ranks that share one engine."""
    vllm_args: str | None = None
    """JSON object of vLLM's own arguments, e.g. {"max_num_seqs": 512, "gpu_memory_utilization": 0.5}. Default of
    gpu_memory_utilization: 0.4, less on small GPUs, more with --sleep or --vllm_engines."""
    sleep: Literal["off", "engine", "all"] = "off"
    """On a GPU: engine releases the engine's memory to the trainer between generation phases. all: also keep weights,
    master weights and optimizer states in CPU memory while the engine samples (ZeRO 2)."""

    # ---- memory and parallelism
    micro_batch_tokens: int | None = None
    """Tokens per pass of a model on one device, padding included, with and without gradient. Default: on GPUs as many
    of 16384 as fit (docs/evidence/memory.md), on CPUs 1024, with AMX 3072."""
    batch_layout: Literal["auto", "shared", "padded", "packed"] = "auto"
    """shared: one row per group, common prefixes once. padded: one row per sample. packed: no padding. auto: shared,
    unless the device or the lengths are against it (docs/evidence/layouts.md)."""
    zero_stage: Literal[1, 2, 3] = 2
    """DeepSpeed ZeRO: 1 shards optimizer states, 2 gradients as well, 3 parameters as well. (0 has no NaN check.)"""
    offload: tuple[Literal["optimizer", "param", "ref"], ...] = ()
    """Keep in CPU memory: master weights and optimizer states (optimizer), parameters (param, ZeRO 3), and on a GPU the
    reference between its passes (ref)."""

    # Structured flags as typed values, each parsed once; ``check`` reads them all, so invalid ones exit with code 2.
    model = cached_property(lambda args: ModelName.parse(str(args.model_name_or_path)))
    tokenizer = cached_property(
        lambda args: ModelName.parse(args.tokenizer_name_or_path or str(args.model_name_or_path))
    )
    reward_model = cached_property(lambda args: ModelName.parse(args.reward_model_name_or_path or ""))
    config_overrides = cached_property(lambda args: config_overrides(args.override_config))
    engine_args = cached_property(lambda args: engine_args(args.vllm_args))
    template = cached_property(lambda args: ChatTemplate.parse(args.chat_template))
    sources = cached_property(lambda args: sources(str(args.dataset), "--dataset"))
    eval_sources = cached_property(lambda args: sources(str(args.eval_dataset or ""), "--eval_dataset"))

    @property
    def kl_coefficients(self) -> InitialKL:
        """The coefficients of the KL in the loss and in the reward at the start."""
        in_loss = self.kl_placement in ("loss", "both")
        in_reward = self.kl_placement in ("reward", "both")
        reward_coef = self.beta if self.kl_reward_coef is None else self.kl_reward_coef
        return InitialKL(self.beta * in_loss, reward_coef * in_reward)

    @property
    def loads_reference(self) -> bool:
        """A run loads a reference model if a KL coefficient is above 0 or ``--load_ref_policy`` asks for it."""
        return self.load_ref_policy or any(self.kl_coefficients)


STRUCTURED = tuple(name for name, value in vars(RunFlags).items() if isinstance(value, cached_property))

# ------------------------------------------------------------------------------------------------------- command line

FlagsClass = TypeVar("FlagsClass", bound=type)


def own_flags_first(cls: FlagsClass) -> FlagsClass:
    """Order the fields of a script's Args so that its own (the algorithm's) come before the inherited ones."""
    own = [name for name in cls.__annotations__ if name in cls.__dataclass_fields__]
    inherited = [name for name in cls.__dataclass_fields__ if name not in own]
    cls.__dataclass_fields__ = {name: cls.__dataclass_fields__[name] for name in [*own, *inherited]}
    return cls


def parse(cls: type, description: str | None = None, words: list[str] | None = None, default: Any = None) -> Any:
    """The arguments of a script, an instance of ``cls``, from the command line (or from ``words``).

    ``--as NAME`` replaces the defaults, so whatever else is given wins, in any order. Ends with exit code 2 for
    arguments that do not parse, and answers words of other frameworks all at once.
    """
    words = sys.argv[1:] if words is None else words
    fields = {f.name: f for f in dataclasses.fields(cls)}
    refuse_foreign(words, fields)
    name = presets.asked_for(cls, words)
    if name is not None:
        default = presets.apply(cls() if default is None else default, name)
    options = {} if default is None else {"default": default}
    args = tyro.cli(cls, args=words, description=description, use_underscores=True, **options)
    named = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    changed = {key for key in fields if default is not None and getattr(default, key) != getattr(cls, key, None)}
    args.flags_set = frozenset(named | changed)
    return args


def is_open(args: Any, name: str) -> bool:
    """Return True if a flag was not set and follows from model and data. Values that are set in Python all count."""
    lengths = ("total_steps", "total_episodes", "total_epochs")
    names = lengths if name == "total_steps" else (name,)
    known = name in OPEN and hasattr(args, name) and args.flags_set is not None
    return known and not args.flags_set.intersection(names)


# -------------------------------------------------------------------------------------------------------------- values


@functools.cache  # the run's name and identity ask for the same text again; nobody changes the result
def engine_args(text: str | None) -> dict[str, Any]:
    """Return the arguments for vLLM's ``LLM`` in ``--vllm_args``. Exits with code 2 for anything but a JSON object."""
    if text is None:
        return {}
    return json_object("--vllm_args", text, '{"max_num_seqs": 512, "enforce_eager": true}')


def identity_value(name: str, value: Any) -> Any:
    """Return the part of an argument's value that counts toward the run's identity."""
    if name == "vllm_engines" and value is not None:
        return value > 0
    if name == "offload" and value is not None:
        return "param" in value
    if name == "vllm_args":
        return {key: given for key, given in engine_args(value).items() if key not in VLLM_RESOURCES} or None
    return value


def target_and_horizon(args: Any) -> tuple[float, float]:
    """Return TARGET and HORIZON of ``--kl_target``, which must be set."""
    return (*args.kl_target, KL_HORIZON)[:2]


def total_steps(args: RunFlags, problems: int) -> int:
    """Steps of the whole run. ``problems``: the training problems, which one of ``--total_epochs`` draws once each."""
    if args.total_epochs is not None:
        return args.total_epochs * problems // args.num_unique_prompts_rollout
    if args.total_episodes is not None:
        return args.total_episodes // (args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout)
    return args.total_steps

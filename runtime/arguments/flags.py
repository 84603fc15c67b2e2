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
from typing import Any, ClassVar, Literal, TypeVar

import tyro

from runtime.arguments import presets
from runtime.arguments.flag_translation import refuse_foreign, update_removed
from runtime.arguments.values import ChatTemplate, InitialKL, ModelName, config_overrides, sources
from runtime.system.flag_values import json_object

# Three groups of arguments that are no part of a run's name or identity; the reasons: docs/reference/checkpoints.md.
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
    "vllm_sleep",
    "timeout",
    "max_logprob_diff",
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
    """Evaluate every N steps, in addition to before the first step and after the last. 0 disables."""
    save_every: int = 0
    """Write a checkpoint every N steps. 0 disables."""
    save_minutes: float = 30.0
    """Also write a checkpoint when the last one is older than this many minutes. 0 disables."""
    keep_checkpoints: int = 2
    """Number of recent checkpoints to keep, in addition to the best by evaluation. 0 keeps all."""
    resume: str = "auto"
    """auto: resume from the newest intact checkpoint of this run if its code is unchanged. never: do not resume. PATH:
    resume from this checkpoint, even if the code has changed."""
    timeout: float = 1800.0
    """End the run when no rank makes progress, or one engine makes none, for this many seconds. 0 disables."""
    output_dir: str = field(default_factory=lambda: os.environ.get("RUN_DIR", "runs"))
    """Folder that contains the folders of all runs. Default: the variable RUN_DIR (set by scripts/submit.py), else
    runs."""
    run_name: str | None = None
    """Name of this run's folder. Default: exp_name, the arguments that differ from their defaults, and the seed."""
    overwrite: bool = False
    """Delete an existing run of the same name and start again."""
    dry_run: bool = False
    """Check all settings, print sizes and the first prompt, and stop before the model is loaded."""
    track: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Also log to wandb (Weights & Biases; WANDB_PROJECT, default rlvr; WANDB_ENTITY; offline if there is no network),
    to tensorboard (event files in the run's folder), or to both. Without a value: wandb."""
    log_samples: int = 4
    """Number of samples per step written to samples.jsonl; some are also printed every 10 steps. 0 disables both."""

    # ---- model
    model_name_or_path: str = "models/SmolLM2-135M-Instruct"
    """Local folder or hub id of the policy; ID@REVISION is a branch, tag or commit on the hub."""
    tokenizer_name_or_path: str | None = None
    """Local folder or hub id of the tokenizer and its chat template. Default: the model's own."""
    trust_remote_code: bool = False
    """Allow Python code that comes with the weights to be executed."""
    external_lib: str | None = None
    """Python module to import before the model is loaded, for example one that registers an architecture."""
    override_config: str | None = None
    """JSON object of fields to change in the model's config.json."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of the weights and of sampling; master weights are always fp32. auto: bfloat16 on GPUs (float16 on a
    T4) and on CPUs where a test at the start finds it 1.4 times as fast as float32. float16 needs a GPU; it uses loss
    scaling."""
    attn_implementation: str = "auto"
    """Attention kernel: a name of transformers (eager, sdpa, flex_attention, flash_attention_2), varlen (PyTorch, for
    packed rows) or grouped (eager, one product per KV head). auto: chosen by device, dtype and layout."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third slower, much less memory."""

    # ---- data
    dataset: str = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    """Training data: reasoning_gym:NAME?key=value, a .jsonl, .json, .parquet or .csv file, a folder saved by datasets,
    or a hub id (ID:CONFIGURATION, ID@SPLIT; default split train). {"a": 1.0, "b": 500} mixes: all of a, 500 of b."""
    eval_dataset: str | None = None
    """Evaluation data; its first eval_prompts problems are used, and left out of training. JSON sets the number for
    each source: {"a": 32, "b": 1.0} takes 32 rows of a and all of b. Default: problems held out from --dataset."""
    prompt_key: str | None = None
    """Column of the prompt: text or a list of chat messages. Default: detected from the columns, else question."""
    ground_truth_key: str | None = None
    """Column of the ground truth. Default: detected from the columns, else answer."""
    system_prompt: str | None = None
    """System message before every prompt; "" for none. Default: the one built in for this data set, if there is one."""
    chat_template: str | None = None
    """Path of a Jinja file, or chatml, tulu, r1 (think tags), question_answer or none. A JSON object sets variables of
    the tokenizer's own template, e.g. {"enable_thinking": false} for Qwen3. Default: the tokenizer's own."""
    max_prompt_length: int = 256
    """Maximum prompt length in tokens, including the chat template."""
    overlong_prompts: Literal["error", "drop", "left", "right"] = "error"
    """Prompts above max_prompt_length. error: stop at the start. drop: drop them. left, right: truncate that side."""
    bad_rows: Literal["error", "drop"] = "error"
    """Rows without a prompt, or whose ground truth the verifier rejects. error: stop at the start. drop: drop them."""
    generation_size: int | None = None
    """Sample this many responses per prompt and train on the num_samples_per_prompt_rollout with the highest reward."""
    dynamic_sampling_rounds: int = 0
    """Replace zero-variance groups by new prompts, up to this many times per step (DAPO). 0 disables."""
    dataset_filter: tuple[float, float] | None = None
    """SHARE THRESHOLD: after each epoch, drop problems with a pass rate of at least THRESHOLD, highest first, up to a
    fraction SHARE of all problems, e.g. 0.1 1. Default: off."""

    # ---- rewards
    verifier: str | None = None
    """Name of a verifier (docs/data_and_rewards.md), or path/to/file.py:function, called as function(response,
    ground_truth, row); separate several by commas. Default: chosen by the data's columns."""
    verifier_key: str | None = None
    """Column that names each row's verifiers; --verifier applies to rows where it is empty."""
    reward_weights: tuple[str, ...] = ()
    """NAME=NUMBER sets the weight of a verifier or of reward_model (default 1). NAME=gate: the other rewards count only
    if this one is 1."""
    reward_control: Literal["none", "random", "format", "shuffled", "inverted"] = "none"
    """Control run: train on another reward to see how much is gained without the true one (evaluation uses it). random:
    permute rewards within a step. format: the verifier's format part only. shuffled: score by another problem's truth.
    inverted: negate the reward."""
    call_timeout: float = 10.0
    """Timeout in seconds of each call of a verifier, tool or environment, after which its process is killed. A verifier
    then scores 0; for a tool or environment the model is shown an error message."""
    check_verifier_status: bool = False
    """Stop with an error if no score of a step is above 0, which usually means a broken verifier or prompt."""
    allow_unsafe_code_exec: bool = False
    """Run a response's code under nothing but resource limits where the kernel has no namespaces for the sandbox."""
    reward_model_name_or_path: str | None = None
    """Reward model: a sequence classifier with one output (local folder, hub id, or ID@REVISION). Its weighted score is
    added to the verifiers' score."""
    reward_model_max_length: int | None = None
    """Maximum number of tokens the reward model reads, counted from the end. Default: the reward model's own limit."""
    reward_scaling: float = 1.0
    """Multiply the score by this: reward = (score - reward_bias) * reward_scaling, then clipped."""
    reward_bias: float = 0.0
    """Subtract this from the score before scaling (--reward_scaling)."""
    max_reward_clip: float | None = None
    """Clip the reward to [-X, X]. Default: off."""
    mask_no_eos_with_zero: bool = True
    """Give truncated responses a score of 0, regardless of their text."""
    non_stop_penalty: float = 0.0
    """Subtract this from the reward of a truncated response."""
    overlong_buffer: int = 0
    """Length penalty (DAPO): over the last N tokens before max_response_length it grows from 0 to 1. 0 disables."""

    # ---- environments
    environment: str | None = None
    """Multi-turn environment: path/to/file.py:Class with reset(...), tools or turn(...), and get_reward()."""
    max_turns: int = 8
    """Maximum number of model turns in a response; max_response_length limits all turns and observations together."""

    # ---- evaluation
    eval_prompts: int = 64
    """Number of problems held out for evaluation and never trained on. 0 disables evaluation."""
    eval_samples: int = 4
    """Number of responses per evaluation problem."""
    eval_temperature: float = 1.0
    """Sampling temperature in evaluation. 0: greedy decoding, one response per problem."""

    # ---- generation
    max_response_length: int = 32
    """Maximum response length in tokens; longer responses are truncated."""
    temperature: float = 1.0
    """Sampling temperature; the trainer computes log-probs at the same temperature."""
    rollout: Literal["vllm", "hf"] = "vllm"
    """Generation backend. vllm: the vLLM engine. hf: transformers' generate (slow; needs no vLLM)."""
    async_steps: int = 0
    """Asynchronous sampling: samples may be up to this many steps stale. 0: synchronous, always on-policy. 1 or 2 is
    usual."""
    inflight_updates: Literal["off", "recompute", "keep"] = "off"
    """Push weights while responses are being generated. off: only between batches. recompute: recompute the KV cache
    with the new weights. keep: keep the old KV cache."""
    max_logprob_diff: float = 0.1
    """End the run if the mean gap between engine and trainer log-probs exceeds this, in nats per token; in fp32
    the limit is a thousandth of this number. 0 disables."""
    stop_strings: tuple[str, ...] = ()
    """Stop strings: generation ends after one of them, and it remains part of the response."""
    ignore_eos: bool = False
    """Ignore EOS and always generate max_response_length tokens (for benchmarking)."""
    engine_process: bool = False
    """Run vLLM in a separate process on the same device, so that the GIL cannot slow it down; weights are copied
    through shared memory. Default: a thread of the trainer."""
    vllm_engines: int = 0
    """Number of engines on dedicated ranks (the last ones of the launch), which only sample. 0: each trainer rank has
    an engine."""
    vllm_tensor_parallel_size: int = 1
    """Number of dedicated ranks that share one engine (tensor parallelism)."""
    vllm_args: str | None = None
    """JSON object of vLLM's own arguments, e.g. {"max_num_seqs": 512}. gpu_memory_utilization is 0.4 by default, lower
    on small GPUs, and higher with --vllm_sleep or --vllm_engines."""
    vllm_sleep: Literal["off", "engine", "all"] = "off"
    """Free GPU memory between generation phases. engine: release the engine's weights and KV cache during the update.
    all: also move the trainer's weights and optimizer states to CPU memory while sampling (with ZeRO 2)."""

    # ---- memory and parallelism
    micro_batch_tokens: int | None = None
    """Tokens per forward or backward pass on one device, padding included. Default: up to 16384 on GPUs, as memory
    allows; 1024 on CPUs, 3072 with AMX."""
    batch_layout: Literal["auto", "shared", "padded", "packed"] = "auto"
    """Rows of a micro-batch. shared: one per group, each common prefix computed once. padded: one per sample. packed:
    no padding. auto: shared if device and lengths allow it, else padded or packed."""
    zero_stage: Literal[1, 2, 3] = 2
    """DeepSpeed ZeRO stage. 1: shard optimizer states. 2: also gradients. 3: also parameters. Stage 0 is not offered
    because DeepSpeed does not detect NaN gradients there."""
    offload: tuple[Literal["optimizer", "param", "ref"], ...] = ()
    """Keep in CPU memory: optimizer (master weights and optimizer states), param (parameters, with ZeRO 3), ref (the
    reference model, which a GPU then holds only during its passes)."""

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

    ``--preset NAME`` replaces the defaults, so whatever else is given wins, in any order. Ends with exit code 2 for
    arguments that do not parse, and answers words of other frameworks all at once.
    """
    words = sys.argv[1:] if words is None else words
    fields = {f.name: f for f in dataclasses.fields(cls)}
    words = with_tracker(update_removed(words, fields))
    refuse_foreign(words, fields)
    name = presets.asked_for(cls, words)
    if name is not None:
        default = presets.apply(cls() if default is None else default, name)
    options = {} if default is None else {"default": default}
    try:
        args = tyro.cli(cls, args=words, description=description, use_underscores=True, **options)
    except BrokenPipeError:  # `--help | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    named = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    changed = {key for key in fields if default is not None and getattr(default, key) != getattr(cls, key, None)}
    args.flags_set = frozenset(named | changed)
    return args


def with_tracker(words: list[str]) -> list[str]:
    """Return a command line in which --track without a value is --track wandb, and --no_track is left out."""
    found = []
    for word, following in zip(words, [*words[1:], "--"], strict=False):
        found += [] if word in ("--no_track", "--no-track") else [word]
        found += ["wandb"] if word == "--track" and following.startswith("-") else []
    return found


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

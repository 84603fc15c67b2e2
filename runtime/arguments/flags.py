"""Flags that all scripts share, their parser, and numbers computed from them, such as the total steps.

This module imports no torch, so an invalid flag ends a run within two seconds. checks.py has the checks of flags.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeVar

import tyro

from runtime.arguments.values import ChatTemplate, ModelName, config_overrides, eval_sampling, sources, stop_at
from runtime.system import user_files
from runtime.system.process import json_object

# Three groups of arguments that do not count toward a run's name and identity (docs/run.md).
# 1. Arguments for showing, saving and resuming a run. No number of the run depends on them.
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
# 2. Arguments for memory and speed, and limits that only end a run. Results stay the same, up to rounding.
RESOURCES = ("micro_batch_tokens", "gradient_checkpointing", "vllm_sleep", "timeout", "max_logprob_diff", "stop_at")
# Arguments in --vllm_args that only concern memory and speed.
VLLM_RESOURCES = (
    *("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size"),
    *("gpu_memory_utilization", "enforce_eager"),
    *("load_format", "cudagraph_capture_sizes", "max_cudagraph_capture_size"),
)
# 3. The length of a run. The learning rate of a step depends on it, unless --lr_scheduler_type is constant.
LENGTH = ("total_steps", "total_episodes", "total_epochs")
MAY_CHANGE = (*PRESENTATION, *RESOURCES, *LENGTH)  # when an interrupted run is resumed

# Flags whose values, when not given, follow from model and data (training/derived_defaults.py), and the quickstart's.
OPEN = {"learning_rate": 3e-5, "critic_learning_rate": 1e-4, "total_steps": 20}
OPEN |= {"max_prompt_length": 256, "max_response_length": 32}
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # --dtype takes these names, too
KL_HORIZON = 10000.0  # HORIZON of --kl_target if only TARGET is given, in sequences


@dataclass
class RunFlags:
    """Flags for everything in a run but the algorithm."""

    # Names of the flags set by the command line or a preset. None: Args was made in Python, so all count as set.
    flags_set: ClassVar[frozenset[str] | None] = None
    # dtype, sizes and layout that the resumed run has chosen; ``preflight`` sets them.
    recorded_choices: ClassVar[dict[str, Any]] = {}
    data_digest: ClassVar[str] = ""  # of the rows that were read; ``preflight`` sets it, "" where none were read
    derived: ClassVar[dict[str, tuple[float, str]]] = {}  # values of flags of OPEN that were not given, and why
    steps: ClassVar[int] = 1  # of the run, whichever flag says how many; known once the data are read
    longest_prompt: ClassVar[int | None] = None  # tokens; None until prompts are rendered, and where they can grow

    # ---- run
    seed: int = 1
    """Seed of the data split, the order of prompts, every sample, and the shuffling of mini-batches."""
    eval_every: int | tuple[int, int] = 0
    """N [FIRST]: evaluate every N steps (0: none) from step FIRST on, and in any case after the last step. FIRST 0, the
    default, also evaluates before training; 1 does not."""
    stop_at: str | None = None
    """NAME=VALUE, e.g. eval/pass@1=0.8: end after the first step whose evaluation (--eval_every) reaches this value of
    eval/pass@1, eval/pass@k, eval/majority@k or eval/reward_mean. Default: train for all steps."""
    save_every: int = 0
    """Write a checkpoint every N steps. 0 disables."""
    save_minutes: float = 30.0
    """Also write a checkpoint after a step if the last checkpoint is older than this many minutes. 0 disables."""
    keep_checkpoints: int = 2
    """Keep this many recent checkpoints, in addition to the one with the best evaluation. 0 keeps all."""
    resume: str = "auto"
    """auto: resume from the newest intact checkpoint of this run if the code is unchanged. never: do not resume. PATH:
    resume from this checkpoint, even if the code has changed."""
    timeout: float = 1800.0
    """End the run if no rank makes progress, or an engine sends nothing, for this many seconds. 0 disables."""
    output_dir: str = field(default_factory=lambda: os.environ.get("RUN_DIR", "runs"))
    """Folder that contains the folders of all runs. Default: the environment variable RUN_DIR, or "runs" without it."""
    run_name: str | None = None
    """Name of this run's folder. Default: exp_name, numbers and choices that differ from the defaults, and the seed."""
    overwrite: bool = False
    """Delete an existing run of the same name and start again."""
    dry_run: bool = False
    """Check all settings, print batch sizes, first prompt and KL gradient, and stop before the model is loaded."""
    track: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Also log to wandb, to tensorboard (event files in the run's folder), or to both, with tables of samples. Without
    a value: wandb, by WANDB_PROJECT (default exactrl) and WANDB_ENTITY, and offline if there is no network."""
    log_samples: int = 4
    """Write this many samples per step to samples.jsonl, and print some of them every 10 steps. 0 disables both."""

    # ---- model
    model_name_or_path: str = "models/SmolLM2-135M-Instruct"
    """Local folder or hub id of the policy; ID@REVISION is a branch, tag or commit on the hub."""
    tokenizer_name_or_path: str | None = None
    """Local folder or hub id of the tokenizer and its chat template. Default: the model's own."""
    trust_remote_code: bool = False
    """Execute Python code that comes with the weights."""
    external_lib: str | None = None
    """Python module to import before the model is loaded, for example one that registers an architecture."""
    override_config: str | None = None
    """JSON object of fields to change in the model's config.json."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type of weights and sampling; master weights are always fp32. auto: bfloat16 on GPUs (float16 on a T4); on
    CPUs bfloat16 if they have instructions for it (AMX or AVX-512), else float32. float16 needs a GPU and uses loss
    scaling."""
    attn_implementation: str = "auto"
    """Attend by eager, sdpa, flex_attention or flash_attention_2 of transformers, varlen (PyTorch kernel for packed
    rows) or grouped (eager with a matrix product per KV head). auto: chosen by device, dtype and layout."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Training is about a third slower and needs much less memory."""

    # ---- data
    dataset: str = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&min_answer=0"
    """Train on this: reasoning_gym:NAME?key=value; a .jsonl, .json, .parquet or .csv file; a folder of save_to_disk;
    or a hub id (ID:CONFIGURATION, ID@SPLIT; default train). {"a": 0.5, "b": 500}: half of a, 500 rows of b."""
    eval_dataset: str | None = None
    """Evaluate on the first eval_prompts problems of this, which are never trained on. A JSON object has a number per
    source: {"a": 32, "b": 1.0} takes 32 rows of a and all of b. Default: problems held out from --dataset."""
    prompt_key: str | None = None
    """Read the prompt, text or chat messages, from this column. Default: detected from the columns, else "question"."""
    ground_truth_key: str | None = None
    """Read the ground truth from this column. Default: detected from the columns, else "answer"."""
    system_prompt: str | None = None
    """Use this system message; "" for none. Default: a row's own, else a built-in one (e.g. for MATH, chain_sum)."""
    chat_template: str | None = None
    """Use this chat template: path of a Jinja file, or chatml, tulu, r1 (think tags), question_answer or none (plain
    text). Default: the tokenizer's. A JSON object sets variables of it, e.g. {"enable_thinking": false} for Qwen3."""
    max_prompt_length: int = 256
    """Maximum prompt length in tokens, including the chat template."""
    overlong_prompts: Literal["error", "drop", "left", "right"] = "error"
    """Handle prompts above max_prompt_length. error: stop at the start. drop: skip them. left, right: cut that side."""
    bad_rows: Literal["error", "drop"] = "error"
    """Handle rows without a prompt or with an invalid ground truth. error: stop at the start. drop: skip."""
    generation_size: int | None = None
    """Sample this many responses per prompt and train on the best num_samples_per_prompt_rollout of them, by reward."""
    dynamic_sampling_rounds: int = 0
    """Replace zero-variance groups by new prompts, up to this many times per step (DAPO). 0 disables."""
    dataset_filter: tuple[float, float] | None = None
    """SHARE THRESHOLD, e.g. 0.1 1: after each epoch, drop problems with a pass rate of at least THRESHOLD, highest
    first, but at most the fraction SHARE of the problems still in use. Default: off."""

    # ---- rewards
    verifier: str | None = None
    """Score responses by last_number, exact, gsm8k, math, countdown, reasoning_gym, format, ifeval or code, or by your
    path/to/file.py:function(response, ground_truth, row); separate several by commas. Default: by the data."""
    verifier_key: str | None = None
    """Read the names of each row's verifiers from this column; --verifier applies to rows where the column is empty."""
    reward_weights: tuple[str, ...] = ()
    """NAME=NUMBER sets the weight of reward_model, or of a verifier by its text in --verifier, such as mine.py:f=0.2
    (default 1). With NAME=gate, all other rewards count only if the reward NAME is 1."""
    reward_control: Literal["none", "random", "format", "shuffled", "inverted"] = "none"
    """Control run to see how much is gained without the true reward: train on another one, evaluate with the true one.
    random: permute rewards within a step. format: score only the response's format. shuffled: use another problem's
    ground truth. inverted: negate the reward."""
    call_timeout: float = 10.0
    """End each call of a verifier, tool or environment that takes longer than this many seconds. The score
    of a verifier is then 0, and the model sees an error message in place of the output of a tool or environment."""
    allow_unsafe_code_exec: bool = False
    """If the kernel has no namespaces for the sandbox, run responses' code unsandboxed, with resource limits only."""
    reward_model_name_or_path: str | None = None
    """Reward model: a sequence classifier with one output (local folder, hub id, or ID@REVISION). Its score times its
    weight (--reward_weights) is added to the score of the verifiers."""
    reward_model_max_length: int | None = None
    """The reward model reads at most this many tokens, from the end of a conversation. Default: its own limit."""
    reward_scaling: float = 1.0
    """Multiply the score by this: reward = (score - reward_bias) * reward_scaling, before penalties and clipping."""
    reward_bias: float = 0.0
    """Subtract this from the score before scaling (--reward_scaling)."""
    max_reward_clip: float | None = None
    """Clip the reward to [-X, X]. Default: off."""
    mask_no_eos_with_zero: bool = True
    """Give truncated responses a score of 0, regardless of their text. The name is AReaL's; nothing is masked."""
    non_stop_penalty: float = 0.0
    """Subtract this from the reward of a truncated response."""
    overlong_buffer: int = 0
    """Length penalty (DAPO) that grows from 0 to 1 over the last N tokens before max_response_length. 0 disables."""

    # ---- environments
    environment: str | None = None
    """Play this multi-turn environment: path/to/file.py:Class with reset(...), tools or turn(...), get_reward()."""
    max_turns: int = 8
    """Maximum number of model turns in a response. max_response_length limits all turns and observations together."""

    # ---- evaluation
    eval_prompts: int = 64
    """Number of problems held out for evaluation and never trained on. 0 disables evaluation."""
    eval_samples: int = 4
    """Number of responses per evaluation problem."""
    eval_sampling: str | None = None
    """JSON object: sample evaluations as a model card says, e.g. {"temperature": 0.6, "top_p": 0.95, "top_k": 20}; also
    min_p, repetition_penalty and max_tokens. Default: temperature 1; 0 is greedy, one response per problem."""

    # ---- generation
    max_response_length: int = 32
    """Maximum response length in tokens; longer responses are truncated."""
    temperature: float = 1.0
    """Sampling temperature; the trainer computes log-probs at the same temperature."""
    rollout: Literal["vllm", "hf"] = "vllm"
    """Sample by this backend. vllm: the vLLM engine. hf: transformers' generate(), which is slow but needs no vLLM."""
    async_steps: int = 0
    """Sample ahead, so that samples are up to this many steps stale; 1 or 2 is usual. 0: synchronous, so every
    batch is sampled with the current weights."""
    inflight_updates: Literal["off", "recompute", "keep"] = "off"
    """Push weights while responses are being generated. off: push only between batches. recompute: recompute the KV
    cache of unfinished responses with the new weights. keep: keep their old KV cache."""
    max_logprob_diff: float = 0.1
    """End the run if the mean gap between engine and trainer log-probs exceeds this, in nats per token; in fp32
    the limit is a thousandth of this number. 0 disables."""
    stop_strings: tuple[str, ...] = ()
    """Strings after which generation ends. The stop string remains part of the response."""
    ignore_eos: bool = False
    """Ignore EOS and always generate max_response_length tokens (for benchmarking)."""
    vllm_engines: int = 0
    """Number of engines on dedicated ranks: the last ranks of the launch, which only sample. 0: the engines run on the
    trainer ranks."""
    vllm_tensor_parallel_size: int = 1
    """Number of ranks that share one engine (tensor parallelism). With --vllm_engines, they are dedicated ranks."""
    vllm_args: str | None = None
    """JSON object of vLLM's own arguments, e.g. {"max_num_seqs": 512}. gpu_memory_utilization is 0.4 by default, lower
    on small GPUs, and higher with --vllm_sleep or --vllm_engines."""
    vllm_sleep: Literal["off", "engine", "all"] = "off"
    """Free GPU memory between generation phases. engine: release the engine's weights and KV cache during the update.
    all: also move the trainer's weights and optimizer states to CPU memory while sampling (needs ZeRO 2)."""

    # ---- memory and parallelism
    micro_batch_tokens: int | None = None
    """Maximum tokens, padding included, of a pass on a device. Default: 512 on CPUs; on GPUs what fits, up to 16384."""
    batch_layout: Literal["auto", "shared", "padded", "packed"] = "auto"
    """Arrange samples in rows. shared: a group shares a row, in which its prompt is computed once. padded: each
    sample has its own row. packed: one row without padding. auto: shared if possible, otherwise padded or packed."""
    zero_stage: Literal[1, 2, 3] = 2
    """DeepSpeed ZeRO stage. 1: shard optimizer states. 2: also gradients. 3: also parameters. Stage 0 is not supported,
    because DeepSpeed does not detect NaN gradients there."""
    offload: tuple[Literal["optimizer", "param", "ref"], ...] = ()
    """Keep these tensors in CPU memory. optimizer: master weights and optimizer states. param: parameters (needs ZeRO
    3). ref: the reference model, which is on the GPU only during its passes."""

    # Typed values of structured flags, each parsed once. ``check`` reads all of them: exit code 2 if one is invalid.
    model = cached_property(lambda args: ModelName.parse(str(args.model_name_or_path)))
    tokenizer = cached_property(
        lambda args: ModelName.parse(args.tokenizer_name_or_path or str(args.model_name_or_path))
    )
    reward_model = cached_property(lambda args: ModelName.parse(args.reward_model_name_or_path or ""))
    config_overrides = cached_property(lambda args: config_overrides(args.override_config))
    engine_args = cached_property(lambda args: engine_args(args.vllm_args))
    goal = cached_property(lambda args: stop_at(args.stop_at))
    eval_settings = cached_property(lambda args: eval_sampling(args.eval_sampling))
    template = cached_property(lambda args: ChatTemplate.parse(args.chat_template))
    sources = cached_property(lambda args: sources(str(args.dataset), "--dataset"))
    eval_sources = cached_property(lambda args: sources(str(args.eval_dataset or ""), "--eval_dataset"))

    @property
    def evaluated(self) -> tuple[int, int]:
        """N and FIRST of ``--eval_every``."""
        return self.eval_every if isinstance(self.eval_every, tuple) else (self.eval_every, 0)

    def evaluates(self, step: int) -> bool:
        """Return True if ``--eval_every`` asks for an evaluation after this step; step 0 is before training."""
        every, first = self.evaluated
        return step >= first and (step == 0 or (every > 0 and step % every == 0))

    def reaches_goal(self, evaluation: dict[str, Any]) -> bool:
        """Return True if a record of eval.jsonl, of a step of training, reaches ``--stop_at``."""
        name, value = self.goal or ("step", math.inf)
        return evaluation["step"] > 0 and evaluation.get(name, -math.inf) >= value

    @property
    def engine_length(self) -> int:
        """Most tokens of a prompt and its response, in training and in evaluations."""
        response = max(self.max_response_length, self.eval_settings.get("max_tokens", 0))
        return self.max_prompt_length + response

    @property
    def kl_coefficients(self) -> tuple[float, float]:
        """Initial coefficients of the KL in the loss and in the reward."""
        in_loss = self.kl_placement in ("loss", "both")
        in_reward = self.kl_placement in ("reward", "both")
        reward_coef = self.beta if self.kl_reward_coef is None else self.kl_reward_coef
        return self.beta * in_loss, reward_coef * in_reward

    @property
    def loads_reference(self) -> bool:
        """A run loads a reference model if a KL coefficient is above 0 or ``--load_ref_policy`` asks for it."""
        return self.load_ref_policy or any(self.kl_coefficients)


STRUCTURED = tuple(name for name, value in vars(RunFlags).items() if isinstance(value, cached_property))

# ------------------------------------------------------------------------------------------------------- command line

FlagsClass = TypeVar("FlagsClass", bound=type)


def own_flags_first(cls: FlagsClass) -> FlagsClass:
    """Order the fields of a script's Args: its own fields, those of the algorithm, before the inherited ones."""
    own = [name for name in cls.__annotations__ if name in cls.__dataclass_fields__]
    inherited = [name for name in cls.__dataclass_fields__ if name not in own]
    cls.__dataclass_fields__ = {name: cls.__dataclass_fields__[name] for name in [*own, *inherited]}
    return cls


def parse(cls: type, description: str | None = None, words: list[str] | None = None, default: Any = None) -> Any:
    """Return the arguments of a script, an instance of ``cls``, from the command line (or from ``words``).

    ``--preset NAME`` only replaces defaults, so all other flags given win, in any order. Exits with code 2 if arguments
    do not parse; names of other frameworks are answered in one error that says what to pass instead.
    """
    words = sys.argv[1:] if words is None else words
    fields = {f.name: f for f in dataclasses.fields(cls)}
    words = spelled_out(words)
    if words:
        user_files.find("runtime.arguments.other_names:refuse_other_names")(words, fields)
    if any(word.partition("=")[0] == "--preset" for word in words):
        name = user_files.find("runtime.arguments.presets:asked_for")(cls, words)
        default = user_files.find("runtime.arguments.presets:apply")(cls() if default is None else default, name)
    options = {} if default is None else {"default": default}
    try:
        args = tyro.cli(cls, args=words, description=description, use_underscores=True, **options)
    except BrokenPipeError:  # as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    named = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in words if word.startswith("--")}
    changed = {key for key in fields if default is not None and getattr(default, key) != getattr(cls, key, None)}
    args.flags_set = frozenset(named | changed)
    return args


def spelled_out(words: list[str]) -> list[str]:
    """Return the command line with --track wandb for --track without a value, and with dtypes by torch's names."""
    found = []
    for before, word, following in zip(["", *words], words, [*words[1:], "--"], strict=False):
        flag, mark, value = word.rpartition("=")
        is_dtype = "--dtype" in (before, flag)
        found.append(f"{flag}{mark}{DTYPES.get(value, value)}" if is_dtype else word)
        found += ["wandb"] if word == "--track" and following.startswith("-") else []
    return found


def is_open(args: Any, name: str) -> bool:
    """Return True if a flag of OPEN was not set, nor changed in a copy, so its value is derived. False for own Args."""
    names = LENGTH if name == "total_steps" else (name,)
    known = name in OPEN and getattr(type(args), name, None) == OPEN[name] and args.flags_set is not None
    return known and not args.flags_set.intersection(names)


# -------------------------------------------------------------------------------------------------------------- values


@functools.cache  # called again with the same text for the run's name and identity; no caller changes the dict
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
    """Return the number of steps of a run. ``problems``: number of training problems; an epoch draws each one once."""
    if args.total_epochs is not None:
        return args.total_epochs * problems // args.num_unique_prompts_rollout
    if args.total_episodes is not None:
        return args.total_episodes // (args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout)
    return args.total_steps

"""The flags that every script has, reading them from the command line, and what is refused before a model loads.

Imports no torch: a wrong argument is answered in a second or two, with exit code 2, the flag and the remedy.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import itertools
import json
import math
import os
import re
import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from runtime import presets
from runtime.foreign import refuse_foreign
from runtime.process import refuse
from runtime.sources import json_object
from runtime.values import CHAT_TEMPLATES, ChatTemplate, InitialKL, ModelName, config_overrides, sources

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

MUST_BE_POSITIVE = (
    *("num_unique_prompts_rollout", "num_samples_per_prompt_rollout", "num_mini_batches", "num_epochs"),
    *("total_steps", "max_prompt_length", "max_response_length", "temperature", "learning_rate", "call_timeout"),
    *("max_turns", "eval_samples", "vllm_tensor_parallel_size"),
)
MAY_BE_NEGATIVE = ("reward_scaling", "reward_bias", "entropy_coeff")
AT_MOST_ONE = ("lr_min_ratio", "gamma", "gae_lambda", "value_norm_beta")
# What follows from model and data where it is not given: runtime/defaults.py.
OPEN = ("learning_rate", "critic_learning_rate", "max_prompt_length", "max_response_length", "total_steps")
KL_HORIZON = 10000.0  # sequences, of --kl_target TARGET
LFS_POINTER = b"version https://git-lfs"  # how it begins
# The type of the field as_: "as" is a word of Python's own, so that only the command line can have it.
As = Annotated[str | None, tyro.conf.arg(name="as", metavar="NAME")]


@dataclass
class RunFlags:
    """Everything about a run that is not the algorithm."""

    given: ClassVar[frozenset[str] | None] = None  # by ``parse``: what the command line sets; None: all of it is meant
    kept: ClassVar[dict[str, Any]] = {}  # by ``preflight``: what a run that goes on was given where it began

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
    """Check everything, print sizes and the first prompt, load no model, and stop. (scripts/probe.py samples, too.)"""
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
    """System message before every prompt; "" for none. Default: the one runtime/data.py has for it, if any."""
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
    args.given = frozenset(named | changed)
    return args


def is_open(args: Any, name: str) -> bool:
    """Whether a flag was left to follow from model and data. Arguments that were made in Python are all meant."""
    lengths = ("total_steps", "total_episodes", "total_epochs")
    names = lengths if name == "total_steps" else (name,)
    known = name in OPEN and hasattr(args, name) and args.given is not None
    return known and not args.given.intersection(names)


# ------------------------------------------------------------------------------------------------------------ refusals

NAME_BYTES = 255  # of a file's or folder's name, on every usual file system


def check(args: RunFlags, world_size: int) -> None:
    """Refuse what no script can do, or what would not mean what it says. Loads no model, writes nothing."""
    check_launch(world_size)
    check_places(args)
    check_words(args)
    for name in STRUCTURED:
        getattr(args, name)
    check_numbers(args)
    check_engine(args, world_size)
    check_engine_args(args)
    check_dedicated(args, world_size)
    check_asynchrony(args)
    check_model(args)


@dataclass
class Sizes:
    """What fits a device, where its flag leaves it open; the flags' names."""

    micro_batch_tokens: int
    logprob_chunk: int
    vllm_gpu_memory_utilization: float
    vllm_max_num_seqs: int
    vllm_max_num_batched_tokens: int


def sizes(args: Any, cuda: bool, fast: bool = False) -> Sizes:
    """The sizes of these flags on a CPU, or on a GPU that is large enough; a micro-batch holds at least the longest
    sample there can be. runtime/fitting.py has those of the GPU that is there.

    A GPU needs about 16,000 tokens to be busy for longer than it takes to start its kernels. A CPU core is busy with a
    thousand, but every micro-batch also adds a gradient as large as the model, which counts where products are
    ``fast`` (runtime/machine.py). The engine's are vLLM's own for GPUs of 80 GB.
    """
    longest = args.max_prompt_length + args.max_response_length
    usual = 16384 if cuda else 3072 if fast else 1024
    default = Sizes(
        micro_batch_tokens=max(longest, usual),
        logprob_chunk=4096 if cuda else 2048,
        vllm_gpu_memory_utilization=0.9 if args.vllm_engines > 0 else 0.4,
        vllm_max_num_seqs=1024 if cuda else 128,
        vllm_max_num_batched_tokens=16384 if cuda else 8192,
    )
    own = args.engine_args
    given = {name: getattr(args, name, own.get(name.removeprefix("vllm_"))) for name in vars(default)}
    return replace(default, **{name: value for name, value in given.items() if value is not None})


# Arguments of vLLM that --vllm_args leaves alone, and what sets them.
VLLM_TAKEN = {
    "model": "--model_name_or_path",
    "revision": "--model_name_or_path ID@REVISION",
    "tokenizer": "--tokenizer_name_or_path",
    "tokenizer_revision": "--model_name_or_path ID@REVISION",
    "skip_tokenizer_init": "--stop",
    "trust_remote_code": "--trust_remote_code",
    "hf_overrides": "--override_config",
    "dtype": "--dtype",
    "seed": "--seed",
    "max_model_len": "--max_prompt_length and --max_response_length",
    "tensor_parallel_size": "--vllm_tensor_parallel_size",
    "distributed_executor_backend": "--num_processes of accelerate launch",
    "enable_sleep_mode": "--sleep",
    "async_scheduling": "--inflight_updates",
    "enable_chunked_prefill": "the script, which needs it off on CPUs",
    "logprobs_mode": "the script: the log-probs of training are those of the distribution sampled from",
    "generation_config": "the script: a model's own changes how it is sampled from",
    "disable_log_stats": "the script",
    "use_tqdm_on_load": "the script",
}


def engine_args(text: str | None) -> dict[str, Any]:
    """What ``--vllm_args`` gives vLLM's ``LLM``. Ends with exit code 2 where it is no JSON object."""
    if text is None:
        return {}
    return json_object("--vllm_args", text, '{"max_num_seqs": 512, "enforce_eager": true}')


def what_counts(name: str, value: Any) -> Any:
    """What makes a run another run, of the value of an argument that may change in part."""
    if name == "vllm_engines" and value is not None:
        return value > 0
    if name == "offload" and value is not None:
        return "param" in value
    if name == "vllm_args":
        return {key: given for key, given in engine_args(value).items() if key not in VLLM_RESOURCES} or None
    return value


def check_engine_args(args: Any) -> None:
    """Refuse arguments that vLLM does not have, and those that something else sets. vLLM's import takes seconds."""
    given = args.engine_args
    vllm = importlib.util.find_spec("vllm")
    known = dict.fromkeys(given)
    path = None if vllm is None else Path(vllm.origin).parent / "engine" / "arg_utils.py"
    if given and path is not None and path.is_file():  # else what is installed says itself what it does not know
        source = ast.parse(path.read_text(encoding="utf-8"))
        classes = {node.name: node.body for node in source.body if isinstance(node, ast.ClassDef)}
        known = {line.target.id: None for line in classes["EngineArgs"] if isinstance(line, ast.AnnAssign)}
    for name, value in given.items():
        if name in VLLM_TAKEN:
            refuse(f"--vllm_args: {name} is set by {VLLM_TAKEN[name]}; leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.0)[0]
            refuse(f"--vllm_args: vLLM has no argument {name!r}; the nearest name is {near}")
        if name in VLLM_RESOURCES and type(value) is int and value <= 0:
            refuse(f"--vllm_args: {name} {value}: must be above 0")
        if name == "gpu_memory_utilization" and not (isinstance(value, int | float) and 0 < value <= 1):
            refuse(f"--vllm_args: {name} {value!r}: must be a number above 0 and at most 1")


def target_and_horizon(args: Any) -> tuple[float, float]:
    """Return TARGET and HORIZON of ``--kl_target``, which must be set."""
    return (*args.kl_target, KL_HORIZON)[:2]


def check_places(args: Any) -> None:
    """Refuse names by which the folder of a run would be another folder, or none that a file system can have.

    What is given from a shell variable that is not set is empty, and --overwrite empties the folder that is named.
    """
    if not args.output_dir:
        refuse("--output_dir: is empty, as is RUN_DIR where the flag is not given; give the folder that holds the runs")
    if args.output_dir.startswith("~"):
        refuse(f"--output_dir {args.output_dir}: no shell has replaced the ~ here; write out the path of that folder")
    for flag, most in (("run_name", NAME_BYTES), ("exp_name", 100)):
        name = getattr(args, flag, None)  # only what trains has an exp_name
        if name is None:
            continue
        parts = Path(name).parts
        if not parts or not name.strip() or parts[0] == "/" or ".." in parts:
            refuse(f"--{flag} {name!r}: must be the name of a folder that lies in --output_dir {args.output_dir}")
        longest = max(len(os.fsencode(part)) for part in parts)
        if longest > most:
            refuse(f"--{flag}: has {longest} bytes, must have at most {most} to be the name of a folder; shorten it")


def check_words(args: RunFlags) -> None:
    """Refuse what a shell can make of a word: nothing, of a variable that is not set; a ~; the end of a line."""
    for name, value in dataclasses.asdict(args).items():
        if name in ("system_prompt", "stop"):  # they are text for the model
            continue
        for word in value if isinstance(value, tuple) else (value,):
            if word == "":
                refuse(f"--{name.rstrip('_')}: is empty, as is a shell variable that is not set; leave the flag out")
            if isinstance(word, str) and re.search(r'(^|[,"])\s*~/', word):
                refuse(f"--{name} {word}: no shell has replaced the ~ here; write out the path")
            if isinstance(word, str) and word.endswith(("\r", "\n")):
                refuse(f"--{name} {word!r}: ends in the end of a line; a script with lines of Windows needs dos2unix")


def check_numbers(args: RunFlags) -> None:
    """Refuse numbers outside their range."""
    if args.non_stop_penalty < 0:
        refuse(
            f"--non_stop_penalty {args.non_stop_penalty:g}: is subtracted, so a truncated response would gain; for a "
            f"score of {args.non_stop_penalty:g} give --non_stop_penalty {-args.non_stop_penalty:g} with "
            f"--mask_no_eos_with_zero"
        )
    for name, value in dataclasses.asdict(args).items():
        if isinstance(value, float) and not math.isfinite(value):
            refuse(f"--{name} {value}: must be a finite number")
        if name in MUST_BE_POSITIVE and value is not None and value <= 0:
            refuse(f"--{name} {value}: must be above 0")
        if name in AT_MOST_ONE and not 0 <= value <= 1:
            refuse(f"--{name} {value}: must be between 0 and 1")
        if name not in MAY_BE_NEGATIVE and isinstance(value, int | float) and value < 0:
            refuse(f"--{name} {value}: must be 0 or more")
    if args.seed >= 2**31:  # ranks and engines add to it, and NumPy's seeds end at 2**32
        refuse(f"--seed {args.seed}: must be below {2**31}")


def check_training(args: RunFlags) -> None:
    """Refuse sizes of batches, lengths and data options of a training run that do not fit together."""
    prompts = args.num_unique_prompts_rollout
    group = args.num_samples_per_prompt_rollout
    longest = args.max_prompt_length + args.max_response_length
    sample = f"--max_prompt_length {args.max_prompt_length} + --max_response_length {args.max_response_length}"
    episodes = args.total_episodes
    dropped = args.dataset_filter
    check_warm_up("--warm_up ", args.warm_up)
    if args.num_mini_batches > prompts:
        refuse(
            f"--num_mini_batches {args.num_mini_batches} is more than --num_unique_prompts_rollout {prompts}: all "
            f"samples of a prompt go into the same mini-batch; use at most one mini-batch per prompt"
        )
    if episodes is not None and episodes < prompts * group:
        refuse(
            f"--total_episodes {episodes} is less than the {prompts * group} samples of one step "
            f"(--num_unique_prompts_rollout {prompts} x --num_samples_per_prompt_rollout {group}); increase it"
        )
    if args.total_epochs is not None and args.total_epochs <= 0:
        refuse(f"--total_epochs {args.total_epochs}: must be above 0")
    if episodes is not None and args.total_epochs is not None:
        refuse("--total_episodes and --total_epochs both set the length of the run; pass one of them")
    if args.micro_batch_tokens is not None and args.micro_batch_tokens < longest:
        refuse(
            f"--micro_batch_tokens {args.micro_batch_tokens} is smaller than the longest sample: {sample} = {longest}"
        )
    if args.ignore_eos and args.mask_truncated_completions:
        refuse(
            "--ignore_eos truncates every response, and --mask_truncated_completions excludes truncated responses "
            "from the loss; add --no-mask_truncated_completions"
        )
    if args.overlong_buffer >= args.max_response_length:
        refuse(
            f"--overlong_buffer {args.overlong_buffer} must be below --max_response_length "
            f"{args.max_response_length}; otherwise the penalty starts before the first token"
        )
    if args.generation_size is not None and args.generation_size < group:
        refuse(
            f"--generation_size {args.generation_size} is less than --num_samples_per_prompt_rollout {group}, the "
            f"number of responses to keep; increase it"
        )
    if dropped is not None and not (0 < dropped[0] < 1 and 0 < dropped[1] <= 1):
        refuse(f"--dataset_filter {dropped}: SHARE must be above 0 and below 1, and THRESHOLD above 0 and at most 1")
    if not all(0 <= beta <= 1 for beta in args.adam_betas):
        refuse(f"--adam_betas {args.adam_betas}: both must be between 0 and 1")


def check_warm_up(flag: str, value: float) -> None:
    """Refuse one and a half optimizer steps of warm-up."""
    if value > 1 and value != int(value):
        refuse(f"{flag}{value:g}: from 1 on it counts optimizer steps; give a whole number, or a fraction below 1")


def check_kl(args: Any) -> None:
    """Refuse KL settings that contradict each other."""
    samples = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    in_reward = args.kl_placement in ("reward", "both")
    loss_coef, reward_coef = args.kl_coefficients
    adaptive = args.kl_target is not None
    if not in_reward and (args.kl_reward_coef is not None or args.kl_reward_estimator != "k1"):
        refuse(
            f"--kl_reward_coef and --kl_reward_estimator need the KL in the reward, but --kl_placement is "
            f"{args.kl_placement}; use --kl_placement reward or both"
        )
    if args.kl_placement == "reward" and args.beta > 0 and args.kl_reward_coef is not None:
        refuse(
            f"--beta {args.beta:g} and --kl_reward_coef {args.kl_reward_coef}: --kl_placement reward has a single "
            f"coefficient; pass one of the two flags, or use --kl_placement both"
        )
    target, horizon = target_and_horizon(args) if adaptive else (math.inf, math.inf)
    if adaptive and not ((reward_coef if in_reward else loss_coef) > 0 < min(target, horizon)):
        refuse(
            f"--kl_target adjusts the KL coefficient in the {'reward' if in_reward else 'loss'}; it needs "
            f"--{'kl_reward_coef or --' if in_reward else ''}beta, TARGET and HORIZON above 0, and a "
            f"--kl_placement other than none"
        )
    if 0.2 * samples >= horizon:
        refuse(
            f"--kl_target {target:g} {horizon:g}: the HORIZON {horizon:g} is too short for {samples} samples per step: "
            f"the coefficient could reach 0; increase it"
        )
    if args.ref_policy_update is not None:
        freq, alpha = args.ref_policy_update
        if freq < 1 or not 0 < alpha <= 1:
            refuse(f"--ref_policy_update {freq} {alpha:g}: FREQ must be 1 or more, and ALPHA above 0 and at most 1")
        if not args.loads_reference:
            refuse("--ref_policy_update needs a reference model; with --beta 0 or --kl_placement none, none is loaded")


def total_steps(args: RunFlags, problems: int) -> int:
    """Steps of the whole run. ``problems``: the training problems, which one of ``--total_epochs`` draws once each."""
    if args.total_epochs is not None:
        return args.total_epochs * problems // args.num_unique_prompts_rollout
    if args.total_episodes is not None:
        return args.total_episodes // (args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout)
    return args.total_steps


def check_engine(args: RunFlags, world_size: int) -> None:
    """Refuse combinations that attention, DeepSpeed or the engine cannot do."""
    tp = args.vllm_tensor_parallel_size
    without_mask = "flash" in args.attn_implementation or args.attn_implementation == "varlen"
    if args.batch_layout == "shared" and without_mask:
        refuse(
            f"--attn_implementation {args.attn_implementation} does not support the 4-D mask of shared rows; use "
            f"--batch_layout packed"
        )
    if args.dtype == "float32" and without_mask:
        refuse("--dtype float32: flash attention does not support float32; use bfloat16 or --attn_implementation sdpa")
    if "param" in args.offload and args.zero_stage != 3:
        refuse(f"--offload param needs --zero_stage 3, not {args.zero_stage}")
    if args.sleep == "all" and args.zero_stage != 2:
        refuse(f"--sleep all needs --zero_stage 2: DeepSpeed cannot offload the states of stage {args.zero_stage}")
    if args.rollout == "hf" and args.stop:
        refuse("--stop needs --rollout vllm")
    if args.engine_process and tp > 1:
        refuse(
            f"--engine_process with --vllm_tensor_parallel_size {tp}: the engine would run in the processes of "
            f"several trainers; drop --engine_process, or use --vllm_engines"
        )
    if args.engine_process and args.zero_stage == 3:
        refuse("--engine_process with --zero_stage 3: no trainer holds the complete weights; use --zero_stage 2")
    if (world_size % tp != 0 and args.vllm_engines == 0) or (args.rollout == "hf" and tp > 1):
        refuse(f"--vllm_tensor_parallel_size {tp} must divide the {world_size} rank(s) and needs --rollout vllm")


def check_dedicated(args: RunFlags, world_size: int) -> None:
    """Refuse engines on ranks of their own that the launch has no place for, or that cannot do what is asked.

    world_size: of the launch, trainers and engines.
    """
    tp = args.vllm_tensor_parallel_size
    apart = args.vllm_engines > 0
    if args.engine_process and apart:
        refuse(
            f"--engine_process with --vllm_engines {args.vllm_engines}: these engines already run in their own "
            f"processes; drop --engine_process"
        )
    if apart and args.rollout != "vllm":
        refuse(f"--vllm_engines {args.vllm_engines} needs --rollout vllm, not {args.rollout}")
    if apart and args.sleep != "off":
        refuse(
            f"--sleep {args.sleep} with --vllm_engines {args.vllm_engines}: an engine with its own GPU shares no "
            f"memory with a trainer; drop --sleep"
        )
    if apart and args.vllm_engines * tp >= world_size:
        refuse(
            f"--vllm_engines {args.vllm_engines} of {tp} rank(s) each leave no trainer in a launch of {world_size} "
            f"rank(s); pass --num_processes {args.vllm_engines * tp + 1} or more to accelerate launch"
        )
    if apart and tp > 1 and args.inflight_updates != "off":
        refuse(
            f"--vllm_tensor_parallel_size {tp} with --vllm_engines {args.vllm_engines} and --inflight_updates "
            f"{args.inflight_updates}: the ranks of one engine would update their weights at different steps; use "
            f"--vllm_tensor_parallel_size 1 or --inflight_updates off"
        )


def check_asynchrony(args: RunFlags) -> None:
    """Refuse ways to sample ahead of training that cannot work, or would only make samples older."""
    ahead = args.async_steps > 0
    inflight = args.inflight_updates != "off"
    if args.async_steps > 1 and not inflight:
        refuse(
            f"--async_steps {args.async_steps} with --inflight_updates off: an engine that updates its weights only "
            f"between batches is at most one batch ahead, so more steps only make samples staler; use --async_steps "
            f"1 or --inflight_updates recompute"
        )
    if inflight and not ahead:
        refuse(
            f"--inflight_updates {args.inflight_updates} needs --async_steps 1 or more: with 0, no sequence is "
            f"running when the weights are updated"
        )
    if inflight and args.rollout == "hf":
        refuse(
            f"--inflight_updates {args.inflight_updates} needs --rollout vllm: transformers' generate cannot update "
            f"weights in the middle of a response"
        )
    if ahead and args.sleep != "off":
        refuse(
            f"--sleep {args.sleep} with --async_steps {args.async_steps}: --sleep discards the sequences that "
            f"--async_steps keeps running during an update; pass one of them"
        )
    if ahead and args.dataset_filter is not None:
        refuse(
            "--dataset_filter with --async_steps: prompts requested ahead of training are drawn before the filter is "
            "applied; pass one of them"
        )


def check_model(args: RunFlags, flag: str = "--model_name_or_path") -> None:
    """Refuse a model that cannot serve, before anything is loaded: no weights, too short a context, no chat template.

    args: ``model_name_or_path`` names it, which ``flag`` gave. Only the policy, of the default flag, needs a template.
    """
    name = args.model_name_or_path
    is_policy = flag == "--model_name_or_path"
    config, tokenizer_config, files = read_configs(args.model, flag, args.dry_run)
    config |= args.config_overrides
    if is_policy and args.tokenizer_name_or_path is not None:
        tokenizer_config, files = read_tokenizer(args.tokenizer_name_or_path)
    context = config.get("max_position_embeddings")
    wanted = args.max_prompt_length + args.max_response_length
    if context is not None and wanted > context:
        refuse(
            f"--max_prompt_length {args.max_prompt_length} + --max_response_length {args.max_response_length} = "
            f"{wanted} tokens, but the context of {name} is {context}; shorten one of them"
        )
    if not is_policy:
        return
    check_reward_model(args)
    own_template = not files or "chat_template.jinja" in files or tokenizer_config.get("chat_template")
    if args.template.text is None and not own_template:
        known = ", ".join(CHAT_TEMPLATES)
        owner = args.tokenizer_name_or_path or name
        refuse(f"--chat_template: the tokenizer of {owner} has no template of its own; give a file or one of {known}")


def read_configs(model: ModelName, flag: str, dry_run: bool) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
    """(config.json, tokenizer_config.json, names of the files) of a local model; no names for a model on the hub."""
    name, revision = model
    folder = Path(name)
    hint = "give a local folder or a hub id; `make setup` prepares the default model"
    if folder.exists():
        if revision is not None:
            refuse(f"{flag} {name}@{revision}: a local folder cannot have a revision; drop @{revision}")
        files = {f.name for f in folder.iterdir()} if folder.is_dir() else set()
        if "config.json" not in files:
            refuse(f"{flag} {name}: no config.json there; {hint}")
        if not any(f.endswith((".safetensors", ".bin")) for f in files) and not dry_run:
            refuse(f"{flag} {name}: no weights (*.safetensors or *.bin) there; {hint}")
        check_files(folder, files, flag)
        config = json.loads((folder / "config.json").read_text())
        tokenizer_config = folder / "tokenizer_config.json"
        return config, json.loads(tokenizer_config.read_text()) if tokenizer_config.is_file() else {}, files
    if name.startswith((".", "/", "~")) or (folder.parent != Path() and folder.parent.is_dir()):
        refuse(f"{flag} {name}: no such folder; {hint}")
    from huggingface_hub import hf_hub_download

    try:
        config = json.loads(Path(hf_hub_download(name, "config.json", revision=revision)).read_text())
    except Exception as error:  # offline, gated, misspelled: the hub client has a class for each
        refuse(f"{flag} {name}: no such folder, and not on the hub ({error}); {hint}")
    return config, {}, set()


def check_files(folder: Path, files: set[str], flag: str) -> None:
    """Refuse what stands in for a file after `git clone` without Git LFS, and weights that are not all there."""
    for name in sorted(files):
        if not name.endswith((".safetensors", ".bin", ".json", ".model")) or not (folder / name).is_file():
            continue
        with open(folder / name, "rb") as file:
            start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            refuse(f"{flag} {folder}: {name} is a pointer of Git LFS, not the file; run `git lfs pull` there")
        header = int.from_bytes(start[:8], "little")  # a safetensors file begins with the length of its header
        if name.endswith(".safetensors") and not 1 < header <= (folder / name).stat().st_size - 8:
            refuse(f"{flag} {folder}: {name} is empty or only a part of a safetensors file; copy it again")


def read_tokenizer(name: str) -> tuple[dict[str, Any], set[str]]:
    """(tokenizer_config.json, names of the files) of a local tokenizer; nothing of one on the hub."""
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
    if name.startswith((".", "/", "~")) or (folder.parent != Path() and folder.parent.is_dir()):
        refuse(f"--tokenizer_name_or_path {name}: no such folder; give a local folder or a hub id")
    return {}, set()


def check_reward_model(args: RunFlags) -> None:
    """Refuse a reward model that is no sequence classifier, whose head would be random, and flags without a model."""
    name = args.reward_model_name_or_path
    length = args.reward_model_max_length
    if name is None:
        if length is not None:
            refuse("--reward_model_max_length needs --reward_model_name_or_path; give it, or leave this out")
        return
    config = read_configs(args.reward_model, "--reward_model_name_or_path", args.dry_run)[0]
    if not any("SequenceClassification" in a for a in config.get("architectures") or ()):
        refuse(
            f"--reward_model_name_or_path {name}: {config.get('architectures')} is no sequence classifier; its scores "
            f"would come from a random head"
        )
    if len(config.get("id2label", "01")) != 1:
        refuse(f"--reward_model_name_or_path {name}: has {len(config.get('id2label', '01'))} outputs, must have one")
    context = config.get("max_position_embeddings", length)
    if length is not None and not 0 < length <= context:
        refuse(f"--reward_model_max_length {length}: must be above 0, and at most the {context} tokens {name} takes")


def check_launch(world_size: int) -> None:
    """Refuse a launch that asked for several processes and got one.

    On a machine without GPUs `accelerate launch --num_processes N` starts a single process, and says nothing, unless
    DeepSpeed is named; the parent's command line is where the wish can still be read.
    """
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        return
    wanted = [value for flag, value in itertools.pairwise(parent) if flag == "--num_processes"]
    if wanted and "launch" in " ".join(parent) and int(wanted[-1]) > 1 and world_size == 1:
        refuse(
            f"--num_processes {wanted[-1]} was asked for, but one process was started: launch with "
            f"--use_deepspeed or --config_file scripts/zero2.yaml"
        )

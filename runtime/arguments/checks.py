"""Reject flag values and combinations that cannot work, or have no effect, before a model loads."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any

from runtime.arguments.flags import STRUCTURED, VLLM_RESOURCES, RunFlags, target_and_horizon
from runtime.system.process import refuse

MUST_BE_POSITIVE = (
    *("num_unique_prompts_rollout", "num_samples_per_prompt_rollout", "num_mini_batches", "num_epochs"),
    *("total_steps", "max_prompt_length", "max_response_length", "temperature", "learning_rate", "call_timeout"),
    *("total_epochs", "max_turns", "eval_samples", "vllm_tensor_parallel_size"),
)
MAY_BE_NEGATIVE = ("reward_scaling", "reward_bias", "entropy_coef")
AT_MOST_ONE = ("lr_min_ratio", "gamma", "gae_lambda", "value_norm_beta")
NEEDS_VLLM = {"stop_strings": (), "vllm_engines": 0, "inflight_updates": "off"}  # flags, and their values without it
NAME_BYTES = 255  # of a file's or folder's name, on every usual file system


def check(args: RunFlags, world_size: int) -> None:
    """Reject settings that no script supports or that would be ignored. Loads no model, writes nothing."""
    check_launcher(args)
    check_places(args)
    check_words(args)
    for name in STRUCTURED:
        getattr(args, name)
    check_numbers(args)
    check_engine(args, world_size)
    check_engine_args(args)
    check_dedicated(args, world_size)
    check_asynchrony(args)


# Arguments of vLLM that --vllm_args leaves alone, and what sets them.
VLLM_TAKEN = {
    "model": "--model_name_or_path",
    "revision": "--model_name_or_path ID@REVISION",
    "tokenizer": "--tokenizer_name_or_path",
    "tokenizer_revision": "--model_name_or_path ID@REVISION",
    "skip_tokenizer_init": "--stop_strings",
    "trust_remote_code": "--trust_remote_code",
    "hf_overrides": "--override_config",
    "dtype": "--dtype",
    "seed": "--seed",
    "max_model_len": "--max_prompt_length and --max_response_length",
    "tensor_parallel_size": "--vllm_tensor_parallel_size",
    "distributed_executor_backend": "--num_processes of accelerate launch",
    "enable_sleep_mode": "--vllm_sleep",
    "async_scheduling": "--inflight_updates",
    "enable_chunked_prefill": "the script, which needs it off on CPUs",
    "logprobs_mode": "the script: the log-probs of training are those of the distribution sampled from",
    "generation_config": "the script: a model's own changes how it is sampled from",
    "disable_log_stats": "the script",
    "use_tqdm_on_load": "the script",
}


def vllm_arguments() -> set[str]:
    """Return the names of vLLM's engine arguments, read from its source, since its import takes seconds."""
    found = importlib.util.find_spec("vllm")
    file = Path(found.origin).parent / "engine" / "arg_utils.py" if found else Path(os.devnull)
    return set(re.findall(r"^    (\w+): ", file.read_text(encoding="utf-8"), re.MULTILINE))  # fields of classes


def check_engine_args(args: Any) -> None:
    """Reject arguments of vLLM that it does not have, that other flags set, or whose numbers are out of range."""
    names = vllm_arguments() if args.engine_args else set()
    for name, value in args.engine_args.items():
        if names and name not in names | VLLM_TAKEN.keys():
            near = ", ".join(difflib.get_close_matches(name, names)) or "an argument of its LLM class"
            refuse(f"--vllm_args: vLLM has no argument {name}; perhaps you meant {near}")
        if name in VLLM_TAKEN:
            refuse(f"--vllm_args: {name} is set by {VLLM_TAKEN[name]}; leave it out")
        if name in VLLM_RESOURCES and type(value) is int and value <= 0:
            refuse(f"--vllm_args: {name} {value}: must be above 0")
        if name == "gpu_memory_utilization" and not (isinstance(value, int | float) and 0 < value <= 1):
            refuse(f"--vllm_args: {name} {value!r}: must be a number above 0 and at most 1")


def check_places(args: Any) -> None:
    """Reject names that would put the run into a different folder, or that no file system accepts.

    An unset shell variable gives an empty name, and --overwrite deletes the content of the folder it names.
    """
    for flag, most in (("run_name", NAME_BYTES), ("exp_name", 100)):
        name = getattr(args, flag, None)  # only what trains has an exp_name
        if name is None:
            continue
        parts = Path(name).parts
        if not parts or not name.strip() or parts[0] == "/" or ".." in parts:
            refuse(f"--{flag} {name!r}: must name a folder in --output_dir {args.output_dir}")
        longest = max(len(os.fsencode(part)) for part in parts)
        if longest > most:
            refuse(f"--{flag}: has {longest} bytes, must have at most {most} to be the name of a folder; shorten it")


def check_words(args: RunFlags) -> None:
    """Reject values that a shell has damaged: empty (an unset variable), an unexpanded ~, a carriage return."""
    for name, value in dataclasses.asdict(args).items():
        if name == "system_prompt":  # text for the model; "" is none
            continue
        for word in value if isinstance(value, tuple) else (value,):
            if word == "":
                refuse(f"--{name}: is empty (an unset shell variable?); drop the flag or pass a value")
            if name == "stop_strings":  # text of the model
                continue
            if isinstance(word, str) and re.search(r'(^|[,"])\s*~(/|$)', word):
                refuse(f"--{name} {word}: '~' was not expanded; pass an absolute path")
            if isinstance(word, str) and word.endswith(("\r", "\n")):
                refuse(f"--{name} {word!r}: ends with a carriage return or newline; convert CRLF (dos2unix)")


def check_numbers(args: RunFlags) -> None:
    """Reject numbers outside their range."""
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
    """Reject sizes of batches, lengths and data options of a training run that do not fit together."""
    prompts = args.num_unique_prompts_rollout
    group = args.num_samples_per_prompt_rollout
    longest = args.max_prompt_length + args.max_response_length
    episodes = args.total_episodes
    dropped = args.dataset_filter
    check_warmup_steps("--warmup_steps ", args.warmup_steps)
    if min(args.evaluated) < 0:
        refuse(f"--eval_every {args.eval_every}: N and FIRST must be 0 or more")
    if args.goal is not None and 0 in (args.eval_prompts, args.evaluated[0]):
        refuse(f"--stop_at {args.stop_at} has no effect without evaluations between steps: see --eval_every")
    if args.num_mini_batches > prompts:
        refuse(f"--num_mini_batches {args.num_mini_batches} is more than --num_unique_prompts_rollout {prompts}")
    if episodes is not None and episodes < prompts * group:
        refuse(f"--total_episodes {episodes} is less than the {prompts * group} samples of one step; increase it")
    lengths = [name for name in ("total_episodes", "total_epochs") if getattr(args, name) is not None]
    lengths += {"total_steps"} & (args.flags_set or set())
    if len(lengths) > 1:
        refuse(f"{' and '.join(f'--{name}' for name in lengths)} both set the length of the run; pass one of them")
    if args.micro_batch_tokens is not None and args.micro_batch_tokens < longest:
        tokens = args.micro_batch_tokens
        refuse(f"--micro_batch_tokens {tokens}: prompt and response may have {longest} tokens; use at least as many")
    if args.ignore_eos and args.mask_truncated_completions:
        refuse(
            "--ignore_eos truncates every response, which is then not trained on: add --no-mask_truncated_completions"
        )
    if args.overlong_buffer >= args.max_response_length:
        most = args.max_response_length
        refuse(f"--overlong_buffer {args.overlong_buffer} must be below --max_response_length {most}")
    if args.generation_size is not None and args.generation_size < group:
        refuse(f"--generation_size {args.generation_size} is less than --num_samples_per_prompt_rollout {group}")
    if dropped is not None and not (0 < dropped[0] < 1 and 0 < dropped[1] <= 1):
        refuse(f"--dataset_filter {dropped}: SHARE must be above 0 and below 1, and THRESHOLD above 0 and at most 1")
    if not all(0 <= beta <= 1 for beta in args.adam_betas):
        refuse(f"--adam_betas {args.adam_betas}: both must be between 0 and 1")


def check_warmup_steps(flag: str, value: float) -> None:
    """Require a warm-up of 1 or more to be an integer, since it counts optimizer steps."""
    if value > 1 and value != int(value):
        refuse(f"{flag}{value:g}: values >= 1 count optimizer steps and must be integers; else pass a fraction")


def check_kl(args: Any) -> None:
    """Reject KL settings that contradict each other."""
    samples = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    in_reward = args.kl_placement in ("reward", "both")
    loss_coef, reward_coef = args.kl_coefficients
    if not in_reward and (args.kl_reward_coef is not None or args.kl_reward_estimator != "k1"):
        place = args.kl_placement
        refuse(f"--kl_reward_coef and --kl_reward_estimator: --kl_placement is {place}; use reward or both")
    if args.kl_placement == "reward" and args.beta > 0 and args.kl_reward_coef is not None:
        refuse(
            "--beta and --kl_reward_coef: --kl_placement reward has one coefficient; pass one, or --kl_placement both"
        )
    target, horizon = target_and_horizon(args) if args.kl_target is not None else (math.inf, math.inf)
    if args.kl_target is not None and not ((reward_coef if in_reward else loss_coef) > 0 < min(target, horizon)):
        name = "kl_reward_coef or --beta" if in_reward else "beta"
        refuse(f"--kl_target needs --{name}, TARGET and HORIZON above 0, and a --kl_placement other than none")
    if 0.2 * samples >= horizon:
        refuse(
            f"--kl_target {target:g} {horizon:g}: HORIZON must be above {0.2 * samples:g}, a fifth of a step's samples"
        )
    if args.ref_policy_update is not None:
        freq, alpha = args.ref_policy_update
        if freq < 1 or not 0 < alpha <= 1:
            refuse(f"--ref_policy_update {freq} {alpha:g}: FREQ must be 1 or more, and ALPHA above 0 and at most 1")
        if not args.loads_reference:
            refuse("--ref_policy_update needs a reference model; with --beta 0 or --kl_placement none, none is loaded")


def check_engine(args: RunFlags, world_size: int) -> None:
    """Reject combinations that attention, DeepSpeed or the engine cannot do."""
    tp = args.vllm_tensor_parallel_size
    without_mask = "flash" in args.attn_implementation or args.attn_implementation == "varlen"
    if args.batch_layout == "shared" and without_mask:
        refuse(
            f"--attn_implementation {args.attn_implementation} has no mask for shared rows; use --batch_layout packed"
        )
    if args.dtype == "float32" and without_mask:
        refuse("--dtype float32: flash attention does not support float32; use bfloat16 or --attn_implementation sdpa")
    if "param" in args.offload and args.zero_stage != 3:
        refuse(f"--offload param needs --zero_stage 3: stage {args.zero_stage} has all parameters on every rank")
    if args.vllm_sleep == "all" and args.zero_stage != 2:
        refuse(f"--vllm_sleep all needs --zero_stage 2: DeepSpeed cannot offload the states of stage {args.zero_stage}")
    for name, otherwise in NEEDS_VLLM.items():
        if args.rollout == "hf" and getattr(args, name) != otherwise:
            refuse(f"--{name} needs --rollout vllm")
    if args.environment is None and args.max_turns != type(args).max_turns:
        refuse(f"--max_turns {args.max_turns} has no effect without --environment; drop --max_turns")
    if (world_size % tp != 0 and args.vllm_engines == 0) or (args.rollout == "hf" and tp > 1):
        refuse(f"--vllm_tensor_parallel_size {tp} must divide the {world_size} rank(s) and needs --rollout vllm")


def check_dedicated(args: RunFlags, world_size: int) -> None:
    """Reject dedicated engine ranks that do not fit into the launch or lack a requested feature.

    world_size: of the launch, trainers and engines.
    """
    tp = args.vllm_tensor_parallel_size
    apart = args.vllm_engines > 0
    if apart and args.vllm_sleep != "off":
        refuse("--vllm_sleep with --vllm_engines: an engine on its own GPU frees no memory for a trainer; drop one")
    if apart and args.vllm_engines * tp >= world_size:
        refuse(
            f"--vllm_engines {args.vllm_engines} of {tp} rank(s) each leave no trainer in a launch of {world_size} "
            f"rank(s); pass --num_processes {args.vllm_engines * tp + 1} or more to accelerate launch"
        )
    if apart and tp > 1 and args.inflight_updates != "off":
        refuse(
            f"--vllm_tensor_parallel_size {tp} with --vllm_engines: with --inflight_updates {args.inflight_updates} "
            f"the ranks of an engine would update their weights at different steps; drop one of the three"
        )


def check_asynchrony(args: RunFlags) -> None:
    """Reject asynchronous settings that cannot work or would only make samples staler."""
    ahead = args.async_steps > 0
    inflight = args.inflight_updates != "off"
    if args.async_steps > 1 and not inflight:
        refuse(
            f"--async_steps {args.async_steps} with --inflight_updates off only makes samples staler than 1 does; use "
            f"--async_steps 1 or --inflight_updates recompute"
        )
    if inflight and not ahead:
        refuse(f"--inflight_updates {args.inflight_updates} needs --async_steps 1 or more")
    if ahead and args.vllm_sleep != "off":
        refuse("--vllm_sleep would discard the sequences that --async_steps keeps running; pass one of them")
    if ahead and args.dataset_filter is not None:
        refuse("--dataset_filter cannot filter prompts that --async_steps has drawn already; pass one of them")


def check_launcher(args: Any) -> None:
    """Reject a configuration of accelerate that asks for what a flag decides, since it would have no effect."""
    precision = {"auto": "bf16", "bfloat16": "bf16", "float16": "fp16", "float32": "no"}[args.dtype]
    ours = {
        "deepspeed_zero_stage": ("zero_stage", str(args.zero_stage)),
        "gradient_clipping": ("max_grad_norm", str(getattr(args, "max_grad_norm", ""))),
        "mixed_precision": ("dtype", precision),
        "deepspeed_offload_optimizer_device": ("offload", "cpu" if "optimizer" in args.offload else "none"),
        "deepspeed_offload_param_device": ("offload", "cpu" if "param" in args.offload else "none"),
        "deepspeed_config_file": ("zero_stage", ""),
    }
    for name, (flag, value) in ours.items():
        theirs = os.environ.get(f"ACCELERATE_{name.upper()}", "none")
        if theirs.lower() not in (value, "none", "no", "auto"):
            refuse(
                f"accelerate's configuration sets {name.removeprefix('deepspeed_')} to {theirs}, which has no effect: "
                f"leave it out there, and see --{flag}"
            )

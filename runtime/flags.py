"""Argument validation before any model is loaded (exit code 2). Imports no torch."""

from __future__ import annotations

import itertools
import json
import math
import os
from pathlib import Path

from runtime.data import CHAT_TEMPLATES, chat_template
from runtime.process import refuse

# Three groups of arguments that are no part of a run's name or identity; docs/checkpoints.md gives the reasons.
# Where and how a run is shown, saved and resumed. No number of the run depends on them.
PRESENTATION = (
    "output_dir",
    "run_name",
    "dry_run",
    "overwrite",
    "track",
    "wandb_project",
    "wandb_entity",
    "log_samples",
    "log_samples_every",
    "save_every",
    "save_minutes",
    "keep_checkpoints",
    "best_metric",
    "resume",
    "accept_changed_code",
    "reward_workers",
)
# Memory, speed, and limits that only end a run: results are the same bit for bit, or up to rounding.
RESOURCES = (
    "micro_batch_tokens",
    "logprob_micro_batch_tokens",
    "logprob_chunk",
    "gradient_checkpointing",
    "offload_ref",
    "offload_optimizer",
    "vllm_gpu_memory_utilization",
    "vllm_kv_cache_gb",
    "vllm_enforce_eager",
    "vllm_max_num_seqs",
    "vllm_max_num_batched_tokens",
    "vllm_enable_sleep_mode",
    "rollout_timeout",
    "stall_timeout",
    "max_sampler_diff",
)
# How long a run is. The learning rate of a step depends on it, unless --lr_scheduler_type is constant.
LENGTH = ("total_steps", "total_episodes")
MAY_CHANGE = (*PRESENTATION, *RESOURCES, *LENGTH)  # between the parts of a run that was interrupted


MAY_BE_NEGATIVE = ("seed", "reward_scaling", "reward_bias", "non_stop_penalty", "entropy_coeff")


AT_MOST_ONE = (
    *("top_p", "eval_top_p", "lr_min_ratio", "adam_beta1", "adam_beta2", "ref_policy_alpha"),
    *("gamma", "gae_lambda", "value_norm_beta", "dataset_max_filter_share"),
)


def check_args(args, world_size: int) -> None:
    """Refuse arguments, common to all scripts, that cannot work or would not mean what they say. Loads nothing."""
    prompts, group = args.num_unique_prompts_rollout, args.num_samples_per_prompt_rollout
    longest, tp = args.max_prompt_length + args.max_response_length, args.vllm_tensor_parallel_size
    lengths = f"--max_prompt_length {args.max_prompt_length} + --max_response_length {args.max_response_length}"
    for name in (
        *("num_unique_prompts_rollout", "num_samples_per_prompt_rollout", "num_mini_batches", "num_epochs"),
        *("total_steps", "max_prompt_length", "max_response_length", "temperature", "learning_rate", "reward_timeout"),
        *("reward_workers", "logprob_chunk", "eval_samples", "vllm_max_num_seqs", "vllm_tensor_parallel_size"),
    ):
        if getattr(args, name) <= 0:
            refuse(f"--{name} {getattr(args, name)}: must be above 0")
    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value):
            refuse(f"--{name} {value}: must be a finite number")
        if name in AT_MOST_ONE and not 0 <= value <= 1:
            refuse(f"--{name} {value}: must be between 0 and 1")
        if name not in MAY_BE_NEGATIVE and isinstance(value, int | float) and value < 0:
            refuse(f"--{name} {value}: must be not negative: 0 or more")
    for wrong, message in (
        (
            prompts % args.num_mini_batches,
            f"--num_unique_prompts_rollout {prompts} does not divide into --num_mini_batches {args.num_mini_batches}; "
            f"groups are not split, so make the first a multiple of the second",
        ),
        (
            args.total_episodes is not None and (args.total_episodes <= 0 or args.total_episodes % (prompts * group)),
            f"--total_episodes {args.total_episodes} is not a multiple of the {prompts * group} samples of a step "
            f"(--num_unique_prompts_rollout {prompts} x --num_samples_per_prompt_rollout {group})",
        ),
        *(
            (
                getattr(args, name) < longest,
                f"--{name} {getattr(args, name)} is less than one sample: {lengths} = {longest}",
            )
            for name in ("micro_batch_tokens", "logprob_micro_batch_tokens")
        ),
        (
            args.top_p < 1.0 or args.top_k > 0,
            f"--top_p {args.top_p} --top_k {args.top_k}: in training both must be off (1 and 0). The sampler would "
            f"draw from a truncated distribution, the trainer's log-probs would be those of the full one, and every "
            f"ratio would be wrong; --eval_top_p and --eval_top_k are free",
        ),
        (
            not args.do_sample,
            "--no-do_sample: greedy responses to one prompt are all equal, there is nothing to compare; for "
            "evaluation use --eval_temperature 0",
        ),
        (
            args.batch_layout == "shared" and "flash" in args.attn_implementation,
            f"--attn_implementation {args.attn_implementation} takes no 4-D mask; use --batch_layout packed with it",
        ),
        (
            args.dtype == "float32" and "flash" in args.attn_implementation,
            "--dtype float32: flash attention has no such kernel; use bfloat16 or --attn_implementation sdpa",
        ),
        (args.offload_param and args.zero_stage != 3, f"--offload_param needs --zero_stage 3, not {args.zero_stage}"),
        (args.rollout == "hf" and args.stop, "--stop works with --rollout vllm only"),
        (
            args.ignore_eos and args.mask_truncated_completions,
            "--ignore_eos cuts every response, and responses that were cut are left out of the loss; add "
            "--no-mask_truncated_completions",
        ),
        (
            world_size % tp or (args.rollout == "hf" and tp > 1),
            f"--vllm_tensor_parallel_size {tp} must divide the {world_size} rank(s), and needs --rollout vllm",
        ),
    ):
        if wrong:
            refuse(message)
    measured = ["eval/pass@1", "eval/pass@k", "eval/majority@k"]
    if args.best_metric is not None and (args.best_metric not in measured or args.eval_prompts == 0):
        refuse(f"--best_metric {args.best_metric}: one of {', '.join(measured)}, and with --eval_prompts above 0")
    if args.overlong_buffer >= args.max_response_length:
        refuse(
            f"--overlong_buffer {args.overlong_buffer} must be below --max_response_length {args.max_response_length}: "
            f"the penalty would start before the first token"
        )


def has_critic(args) -> bool:
    """Whether a critic is created and trained: in ppo.py, unless told otherwise."""
    return getattr(args, "adv_estimator", None) == "gae" and not args.disable_value


def check_critic_args(args) -> None:
    """Refuse what ppo.py has beyond the arguments of all scripts and cannot do."""
    grouped, critic = args.adv_estimator == "grpo", has_critic(args)
    for wrong, message in (
        (
            args.num_samples_per_prompt_rollout == 1 and (grouped or args.filter_zero_std_samples),
            "--num_samples_per_prompt_rollout 1: a group of one has no mean of others and no standard deviation "
            "(--adv_estimator grpo, --filter_zero_std_samples); use at least 2",
        ),
        (
            not grouped and (args.advantage_normalization_type != "standard" or args.kl_reward_norm != "outside"),
            "--advantage_normalization_type and --kl_reward_norm belong to --adv_estimator grpo; gae has --adv_norm",
        ),
        (grouped and args.dense_reward != "none", "--dense_reward: --adv_estimator grpo compares whole responses only"),
        (
            not critic and (args.bootstrap_truncated or args.critic_warmup > 0 or args.value_model_name_or_path),
            "--bootstrap_truncated, --critic_warmup and --value_model_name_or_path need a critic, and "
            "--disable_value or --adv_estimator grpo is set",
        ),
        (
            0 in (args.critic_learning_rate, args.value_clip, args.value_coef),
            "--critic_learning_rate, --value_coef and --value_clip must be above 0 (no clip: --value_clip None)",
        ),
        (
            args.bootstrap_truncated and args.mask_truncated_completions,
            "--bootstrap_truncated is about cut responses, which --mask_truncated_completions leaves out",
        ),
        (
            args.generation_size is not None and args.generation_size < args.num_samples_per_prompt_rollout,
            f"--generation_size {args.generation_size} is less than --num_samples_per_prompt_rollout, which are kept",
        ),
        (args.dynamic_sampling_rounds > 0, "--dynamic_sampling_rounds is in grpo.py; here --dataset_max_filter_share"),
        (
            args.dataset_max_filter_share == 1 or not 0 < args.dataset_filter_threshold <= 1,
            "--dataset_max_filter_share must be below 1, --dataset_filter_threshold above 0 and at most 1",
        ),
    ):
        if wrong:
            refuse(message)


def check_model(args, flag: str = "model_name_or_path") -> None:
    """Refuse a model that cannot serve, before anything is loaded: no weights, too short a context; no chat template.

    ``flag``: the argument that names it. Only the policy, which is the default, needs a template.
    """
    name = getattr(args, flag)
    folder = Path(name)
    hint = "give a local folder or a hub id; `make setup` prepares the default model"
    if folder.exists():
        files = {f.name for f in folder.iterdir()} if folder.is_dir() else set()
        if "config.json" not in files:
            refuse(f"--{flag} {name}: no config.json there; {hint}")
        if not any(f.endswith((".safetensors", ".bin")) for f in files):
            refuse(f"--{flag} {name}: no weights (*.safetensors or *.bin) there; {hint}")
        read = lambda f: json.loads((folder / f).read_text()) if f in files else {}  # noqa: E731
    elif name.startswith((".", "/", "~")) or (folder.parent != Path() and folder.parent.is_dir()):
        refuse(f"--{flag} {name}: no such folder; {hint}")
    else:
        from huggingface_hub import hf_hub_download

        def read(file: str) -> dict:
            try:
                return json.loads(Path(hf_hub_download(name, file, revision=args.revision)).read_text())
            except Exception as error:  # offline, gated, misspelt: the hub client has a class for each
                if file == "config.json":
                    refuse(f"--{flag} {name}: no such folder, and not on the hub ({error}); {hint}")
                return {}

        files = set()
    if args.override_config is not None:
        try:
            override = json.loads(args.override_config)
        except json.JSONDecodeError as error:
            refuse(f"--override_config: not valid JSON ({error}); for example '{{\"rope_theta\": 10000}}'")
        if not isinstance(override, dict):
            refuse("--override_config: must be a JSON object of fields of the model's config")
    config = read("config.json") | (json.loads(args.override_config) if args.override_config else {})
    context, wanted = config.get("max_position_embeddings"), args.max_prompt_length + args.max_response_length
    if context is not None and wanted > context:
        refuse(
            f"--max_prompt_length {args.max_prompt_length} + --max_response_length {args.max_response_length} = "
            f"{wanted} tokens, but the context of {name} is {context}; shorten one of them"
        )
    if args.reward_model_name_or_path is not None:
        check_reward_model(args.reward_model_name_or_path)
    own = not files or "chat_template.jinja" in files or read("tokenizer_config.json").get("chat_template")
    if flag == "model_name_or_path" and chat_template(args) is None and not own:
        known = ", ".join(CHAT_TEMPLATES)
        refuse(f"--chat_template: the tokenizer of {name} has none of its own; give a file or one of {known}")


def check_reward_model(name: str) -> None:
    """Refuse a local folder that holds no sequence classifier: its head would be random numbers, without a word."""
    folder = Path(name)
    if not folder.exists() and not name.startswith((".", "/", "~")):
        return  # a hub id
    if not (folder / "config.json").is_file():
        refuse(f"--reward_model_name_or_path {name}: no such folder, or no config.json in it")
    config = json.loads((folder / "config.json").read_text())
    if not any("SequenceClassification" in a for a in config.get("architectures") or ()):
        refuse(
            f"--reward_model_name_or_path {name}: {config.get('architectures')} is no sequence classifier; its scores "
            f"would come from a random head"
        )
    if len(config.get("id2label", "01")) != 1:
        refuse(f"--reward_model_name_or_path {name}: has {len(config.get('id2label', '01'))} outputs, must have one")


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

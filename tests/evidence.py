"""What every argument of grpo.py and ppo.py must be seen to change: one row per flag. tests/alive.py runs the rows.

A row says which value is tried, in two steps of a tiny model, and names the observables that must then differ from the
same run without it. Its keywords are arguments that both runs have: what the flag needs to mean anything.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from helpers import TINY_RUN
from learning import Breakage

from runtime.flags import RunFlags

# Both runs of a row have these. FILES stands for the folder of models and data that alive.py makes, RUN for output_dir.
BASE: dict[str, Any] = TINY_RUN | {
    "model_name_or_path": "FILES/tiny",
    "output_dir": "RUN",
    "run_name": "run",
    "reward_fn": "FILES/own.py:parity",
    "learning_rate": 1e-3,
    "log_samples": 16,
}
SHORT = {"num_unique_prompts_rollout": 1, "num_samples_per_prompt_rollout": 2, "eval_prompts": 0, "total_steps": 1}


@dataclass(frozen=True)
class Row:
    """One flag's evidence.

    tried: the value, in place of that in BASE or of the default. changes: the observables that must differ, all of
    them; alive.OBSERVABLES explains the names. stage: what else both runs need, by its name in alive.STAGES.
    given: arguments of both runs.
    """

    tried: Any
    changes: tuple[str, ...]
    stage: str = ""
    given: dict[str, Any] = field(default_factory=dict)


def row(tried: Any, *changes: str, stage: str = "", **given: Any) -> Row:
    """A row of EVIDENCE."""
    return Row(tried, changes, stage, given)


VLLM = {"rollout": "vllm", "vllm_kv_cache_gb": 0.05}
KL = {"beta": 0.1, "learning_rate": 1e-2}
UPDATES = {"num_epochs": 2, "num_mini_batches": 2, "learning_rate": 1e-2}  # without a second one every ratio is 1
ROWS = "FILES/rows.jsonl"

EVIDENCE: dict[str, Row] = {
    # ---- run
    "as_": row("verl", "optim/steps", "weights"),
    "exp_name": row("mine", "files", run_name=None),
    "seed": row(2, "prompts", "held-out prompts", "seeds of requests", "responses"),
    "total_steps": row(1, "steps"),
    "total_episodes": row(16, "steps"),
    "total_epochs": row(1, "steps", dataset="FILES/few.jsonl", eval_prompts=0, total_steps=1),
    "eval_every": row(1, "evaluated steps"),
    "best_metric": row("eval/pass@1", "files"),
    "save_every": row(1, "files"),
    "save_minutes": row(1e-6, "files"),
    "keep_checkpoints": row(1, "files", save_every=1),
    "resume": row("RUN/run/checkpoints/step_000001", "steps", stage="resumed", save_every=1, total_steps=3),
    "accept_changed_code": row(
        True, "exit", "steps", stage="edited", save_every=1, total_steps=3, reward_fn="RUN/own.py:parity"
    ),
    "stall_timeout": row(1e-9, "exit", "last words"),
    "output_dir": row("RUN/elsewhere", "files"),
    "run_name": row("other", "files"),
    "overwrite": row(True, "steps", stage="repeated"),
    "dry_run": row(True, "steps", "files"),
    "track": row(True, "wandb.init", "files"),
    "wandb_project": row("other", "wandb.init(project)", track=True),
    "wandb_entity": row("team", "wandb.init(entity)", track=True),
    "log_samples": row(3, "rows of samples.jsonl"),
    "log_samples_every": row(1, "samples on the console"),
    "record_batches": row(2, "files"),
    # ---- model
    "model_name_or_path": row("FILES/other", "weights", "responses"),
    "revision": row("later", "weights", "responses", model_name_or_path="hub/tiny"),
    "tokenizer_name_or_path": row("FILES/tokenizer", "prompts"),
    "trust_remote_code": row(True, "exit", "steps", model_name_or_path="FILES/custom"),
    "external_lib": row("own_library", "imports of own_library"),
    "override_config": row('{"rms_norm_eps": 0.5}', "responses", "policy/entropy"),
    "dtype": row("bfloat16", "dtype of the policy", "policy/entropy"),
    "attn_implementation": row("eager", "attention of the policy"),
    "gradient_checkpointing": row(True, "bytes kept for backward"),
    # ---- data
    "dataset": row(ROWS, "prompts"),
    "dataset_mixer": row('{"FILES/rows.jsonl": 20, "FILES/more.jsonl": 0.5}', "prompts", dataset=RunFlags.dataset),
    "dataset_split": row("test", "prompts", dataset="FILES/saved"),
    "eval_dataset": row(ROWS, "held-out prompts"),
    "eval_dataset_mixer": row('{"FILES/rows.jsonl": 3, "FILES/more.jsonl": 2}', "held-out prompts", "eval metrics"),
    "prompt_key": row("other_question", "prompts", dataset=ROWS),
    "ground_truth_key": row("other_answer", "ground truths", dataset=ROWS),
    "system_prompt": row("Be brief.", "prompts"),
    "chat_template": row("question_answer", "prompts"),
    "chat_template_kwargs": row('{"enable_thinking": false}', "prompts", chat_template="FILES/thinking.jinja"),
    "max_prompt_length": row(20, "prompts", overlong_prompts="left"),
    "overlong_prompts": row("left", "exit", "prompts", max_prompt_length=20),
    "bad_rows": row("drop", "exit", "steps", dataset="FILES/bad.jsonl"),
    "shuffle": row(False, "prompts"),
    "generation_size": row(6, "seeds of requests", "reward/generated_mean"),
    "dynamic_sampling_rounds": row(2, "seeds of requests", "data/rounds", num_samples_per_prompt_rollout=2),
    "dataset_max_filter_share": row(
        0.5,
        "prompts",
        "data/problems",
        dataset="FILES/few.jsonl",
        eval_prompts=0,
        total_steps=3,
        reward_fn="FILES/own.py:always",
    ),
    "dataset_filter_threshold": row(
        0.25, "data/problems", dataset="FILES/few.jsonl", eval_prompts=0, total_steps=3, dataset_max_filter_share=0.5
    ),
    # ---- rewards
    "verifier": row("FILES/own.py:always", "rewards", reward_fn=None),
    "verifier_key": row("judge", "rewards", dataset=ROWS),
    "reward_fn": row("FILES/own.py:always", "rewards"),
    "reward_weights": row(("FILES/own.py:parity=0.5",), "rewards"),
    "reward_timeout": row(0.2, "reward/timeouts", reward_fn="FILES/own.py:late", **SHORT),
    "reward_workers": row(2, "verifier processes"),
    "check_verifier_status": row(True, "exit", "last words", reward_fn="FILES/own.py:never"),
    "allow_unsafe_code_exec": row(
        True, "exit", "steps", stage="no namespaces", dataset="FILES/code.jsonl", reward_fn=None, verifier="code"
    ),
    "reward_model_name_or_path": row("FILES/classifier", "rewards"),
    "reward_model_revision": row("later", "rewards", reward_model_name_or_path="hub/classifier"),
    "reward_model_max_length": row(8, "rewards", reward_model_name_or_path="FILES/classifier"),
    "reward_scaling": row(2.0, "rewards"),
    "reward_bias": row(0.5, "rewards"),
    "max_reward_clip": row(0.25, "rewards"),
    "mask_no_eos_with_zero": row(True, "rewards"),
    "non_stop_penalty": row(0.5, "rewards"),
    "overlong_buffer": row(4, "rewards"),
    "repetition_max_penalty": row(0.5, "rewards", temperature=0.01, ignore_eos=True, max_response_length=24),
    # ---- evaluation
    "eval_prompts": row(3, "held-out prompts"),
    "eval_samples": row(1, "evaluation responses"),
    "eval_temperature": row(0.5, "evaluation responses"),
    "eval_top_p": row(0.5, "evaluation responses"),
    "eval_top_k": row(5, "evaluation responses"),
    # ---- generation
    "max_response_length": row(4, "completions/length_max"),
    "temperature": row(0.5, "responses", "policy/entropy"),
    "rollout": row("vllm", "vllm.LLM", "responses", vllm_kv_cache_gb=0.05),
    "async_steps": row(1, "sampler/staleness", "versions of weights"),
    "inflight_updates": row("recompute", "versions of weights", **VLLM, async_steps=1, vllm_max_num_seqs=4),
    "rollout_timeout": row(0.001, "exit", "last words", stage="slow sampler"),
    "engine_restarts": row(0, "engines built", "exit", stage="failing sampler"),
    "stop": row(("e", "a"), "completions/length_mean", **VLLM),
    "ignore_eos": row(True, "completions/truncated_frac", "responses"),
    # One process has no rank to spare: what they do in a launch of several is shown by tests/launch/test_dedicated.py.
    "vllm_mode": row("dedicated", "exit", "last words", rollout="vllm"),
    "vllm_engines": row(1, "exit", "last words"),
    "vllm_gpu_memory_utilization": row(0.6, "vllm.LLM(gpu_memory_utilization)", stage="on a GPU"),
    "vllm_kv_cache_gb": row(0.05, "blocks of the KV cache", rollout="vllm"),
    "vllm_enforce_eager": row(True, "vllm.LLM(enforce_eager)", stage="on a GPU"),
    "vllm_tensor_parallel_size": row(2, "vllm.LLM(tensor_parallel_size)", stage="on two GPUs"),
    "vllm_max_num_seqs": row(4, "engine steps", **VLLM),
    "vllm_max_num_batched_tokens": row(136, "vllm.LLM(max_num_batched_tokens)", stage="on a GPU"),
    "vllm_load_format": row("dummy", "vllm.LLM(load_format)", **VLLM),
    "vllm_enable_sleep_mode": row(True, "vllm.LLM(enable_sleep_mode)", stage="on a GPU"),
    "deepspeed_enable_sleep_mode": row(True, "moves of the trainer"),
    # ---- memory and parallelism
    "micro_batch_tokens": row(140, "training passes"),
    "logprob_micro_batch_tokens": row(140, "log-prob passes", num_mini_batches=2),
    "logprob_chunk": row(3, "rows of logits"),
    "batch_layout": row("padded", "training passes"),
    "zero_stage": row(1, "DeepSpeed(zero_optimization.stage)"),
    "offload_optimizer": row(True, "DeepSpeed(zero_optimization.offload_optimizer.device)"),
    "offload_param": row(True, "DeepSpeed(zero_optimization.offload_param.device)", zero_stage=3),
    "offload_ref": row(True, "moves of the reference", beta=0.1),
    # ---- batch sizes
    "num_unique_prompts_rollout": row(2, "prompts"),
    "num_samples_per_prompt_rollout": row(2, "seeds of requests", "responses"),
    "num_mini_batches": row(2, "optim/steps", "weights"),
    "num_epochs": row(2, "optim/steps", "weights"),
    "shuffle_mini_batches": row(False, "weights", num_mini_batches=2),
    # ---- algorithm
    "advantage_normalization_type": row("centered", "token advantages"),
    "advantage_eps": row(0.5, "token advantages"),
    "filter_zero_std_samples": row(True, "loss weights", num_samples_per_prompt_rollout=2),
    "mask_truncated_completions": row(True, "loss weights"),
    "loss_norm": row("sequence", "loss weights", "weights"),
    "clip_lower": row(0.001, "loss/policy", "weights", **UPDATES),
    "clip_higher": row(0.001, "loss/policy", "weights", **UPDATES),
    "clip_ratio_c": row(1.001, "loss/policy", "weights", **UPDATES),
    "entropy_coeff": row(0.01, "loss/total", "weights"),
    "early_stop_imp_ratio": row(0.5, "optim/early_stopped", "optim/steps", num_epochs=2),
    "truncated_importance_sampling_ratio_cap": row(0.5, "optim/grad_norm"),
    "importance_sampling_mask": row((0.99, 1.01), "loss/policy", "weights", async_steps=1, learning_rate=1e-2),
    "max_sampler_diff": row(1e-9, "exit", "last words"),
    # ---- KL
    "beta": row(0.1, "kl/k1", "loss/kl", "weights", learning_rate=1e-2),
    "kl_placement": row("reward", "token advantages", "loss/kl", **KL),
    "kl_estimator": row("k1", "loss/kl", **KL),
    "kl_gradient": row("naive", "weights", **KL),
    "kl_reward_coef": row(0.5, "token advantages", "kl/reward_coef", **KL, kl_placement="both"),
    "kl_reward_estimator": row("k2", "token advantages", "kl/reward", **KL, kl_placement="both"),
    "kl_controller": row("adaptive", "kl/coef", **KL),
    "kl_target": row(1e-4, "kl/coef", **KL, kl_controller="adaptive", total_steps=3),
    "kl_target_unit": row("token", "kl/coef", **KL, kl_controller="adaptive", kl_target=1.0, total_steps=3),
    "load_ref_policy": row(True, "kl/k1", "kl/full"),
    "kl_horizon": row(100.0, "kl/coef", **KL, kl_controller="adaptive"),
    "kl_reward_norm": row("inside", "token advantages", **KL, kl_placement="reward"),
    "ref_policy_update_freq": row(1, "kl/k1", **KL),
    "ref_policy_alpha": row(0.5, "kl/k1", **KL, ref_policy_update_freq=1),
    "kl_full_samples": row(0, "kl/full", **KL),
    # ---- critic
    "disable_value": row(True, "value/mean", "token advantages"),
    "value_model_name_or_path": row("FILES/other", "value/mean"),
    "gamma": row(0.9, "value/return_mean", "token advantages"),
    "gae_lambda": row(0.9, "value/return_mean", "token advantages"),
    "bootstrap_truncated": row(True, "value/return_mean"),
    "adv_norm": row("none", "token advantages"),
    "critic_learning_rate": row(1e-2, "value/lr", "critic weights"),
    "critic_lr_scheduler_type": row("constant", "value/lr", "critic weights"),
    "critic_warm_up_steps": row(1, "value/lr", "critic weights"),
    "critic_weight_decay": row(0.5, "critic weights", critic_learning_rate=1e-2),
    "critic_max_grad_norm": row(0.01, "critic weights", critic_learning_rate=1e-2, optimizer="sgd"),
    "critic_num_epochs": row(2, "critic weights", critic_learning_rate=1e-2),
    "value_coef": row(0.5, "value/grad_norm"),
    "value_clip": row(1e-5, "value/clip_frac", "loss/value", num_mini_batches=2),
    "critic_warmup": row(1, "optim/steps"),
    "value_norm": row("running", "loss/value"),
    "value_norm_beta": row(0.5, "loss/value", value_norm="exp", total_steps=3),
    "value_norm_eps": row(10.0, "loss/value", value_norm="running"),
    "dense_reward": row("sum", "token advantages", reward_fn="FILES/own.py:stepwise"),
    # ---- optimizer
    "optimizer": row("sgd", "weights"),
    "learning_rate": row(1e-2, "optim/lr", "weights"),
    "adam_beta1": row(0.5, "weights"),
    "adam_beta2": row(0.5, "weights"),
    "adam_eps": row(1e-2, "weights"),
    "weight_decay": row(0.5, "weights"),
    "lr_scheduler_type": row("constant", "optim/lr", "weights"),
    "warm_up_steps": row(1, "optim/lr", "weights"),
    "warm_up_ratio": row(0.5, "optim/lr", "weights"),
    "lr_min_ratio": row(0.9, "optim/lr", "weights"),
    "max_grad_norm": row(0.01, "weights", optimizer="sgd"),
}


def default_of(cls: type, flag: str) -> Any:
    """The default of an argument, as a script has it where no variable of the environment says otherwise."""
    for f in dataclasses.fields(cls):
        if f.name == flag:
            return f.default if f.default is not dataclasses.MISSING else f.default_factory()
    raise KeyError(flag)


# ------------------------------------------------------------------------------------------------------ flags to unhook


def unhook(flag: str, file: str, text: str, other: str, *scripts: str) -> Breakage:
    """The edit that takes a flag out of the project: one of tests/learning.py's breakages, named after the flag."""
    return Breakage(flag, ((file, text, other),), scripts or ("grpo.py",))


# Of every kind: after its edit a flag is parsed, checked and written to config.json as before, and does nothing.
UNHOOKED = (
    unhook("clip_higher", "{script}", "1 + args.clip_higher)", "1 + 0.2)"),  # loss
    unhook("kl_horizon", "utils.py", "args.kl_target, args.kl_horizon)", "args.kl_target, 10000.0)"),  # KL
    unhook("gae_lambda", "{script}", "args.gamma, args.gae_lambda)", "args.gamma, 1.0)", "ppo.py"),  # critic
    unhook("adam_beta2", "utils.py", "(args.adam_beta1, args.adam_beta2)", "(args.adam_beta1, 0.95)"),  # optimizer
    unhook("reward_bias", "rewards.py", "- args.reward_bias)", "- 0.0)"),  # rewards
    unhook("eval_top_p", "runtime/data.py", '"top_p": args.eval_top_p', '"top_p": 1.0'),  # sampling
    unhook("shuffle", "runtime/data.py", "    if shuffle:\n", "    if True:\n"),  # data
    unhook("dataset_split", "runtime/sources.py", "(source, args.dataset_split)", '(source, "train")'),  # data
    unhook("keep_checkpoints", "runtime/checkpoints.py", "saved[: -self.args.keep_checkpoints]", "saved[:-2]"),
    unhook("vllm_max_num_seqs", "{script}", "max_num_seqs=sizes.vllm_max_num_seqs", "max_num_seqs=128"),  # engine
    unhook("log_samples_every", "runtime/runlog.py", "if self.args.log_samples_every > 0 and", "if False and"),  # log
    unhook("wandb_entity", "runtime/runlog.py", '"entity": self.args.wandb_entity', '"entity": None'),  # tracking
    unhook("gradient_checkpointing", "utils.py", "    if args.gradient_checkpointing:\n", "    if False:\n"),  # memory
)
UNHOOKED_CASES = [(breakage, script) for breakage in UNHOOKED for script in breakage.scripts]

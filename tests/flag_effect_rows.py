"""Expected effects of every argument of grpo.py and ppo.py, one row per flag. tests/flag_effects.py runs the rows.

A row says which value is tried, in two steps of a tiny model, and names the observables that must then differ from the
same run without it. Its keywords are arguments that both runs have: what the flag needs to mean anything.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from helpers import TINY_RUN

# Both runs of a row have these. FILES stands for the folder of models and data that flag_effects.py makes, RUN for
# output_dir.
BASE: dict[str, Any] = TINY_RUN | {
    "model_name_or_path": "FILES/tiny",
    "output_dir": "RUN",
    "run_name": "run",
    "verifier": "FILES/own.py:parity",
    "learning_rate": 1e-3,
    "log_samples": 16,
    "eval_prompts": 4,
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


CACHE = '{"kv_cache_memory_bytes": 53687091}'
VLLM = {"rollout": "vllm", "vllm_args": CACHE}
FEW = {"rollout": "vllm", "vllm_args": '{"kv_cache_memory_bytes": 53687091, "max_num_seqs": 4}'}
KL = {"beta": 0.1, "learning_rate": 1e-2}
UPDATES = {"num_epochs": 2, "num_mini_batches": 2, "learning_rate": 1e-2}  # without a second one every ratio is 1
ROWS = "FILES/rows.jsonl"
GAME = VLLM | {"environment": "FILES/game.py:Guess", "max_response_length": 64}

EVIDENCE: dict[str, Row] = {
    # ---- run
    "preset": row("verl", "optim/steps", "weights"),
    "exp_name": row("mine", "files", run_name=None),
    "seed": row(2, "prompts", "held-out prompts", "seeds of requests", "responses"),
    "total_steps": row(1, "steps"),
    "total_episodes": row(16, "steps"),
    "total_epochs": row(1, "steps", dataset="FILES/few.jsonl", eval_prompts=0, total_steps=1),
    "eval_every": row((1, 2), "evaluated steps"),
    "stop_at": row("eval/pass@1=0", "steps", "evaluated steps", eval_every=1, total_steps=4),
    "save_every": row(1, "files"),
    "save_minutes": row(1e-6, "files"),
    "keep_checkpoints": row(1, "files", save_every=1),
    "resume": row("RUN/run/checkpoints/step_000001", "steps", stage="resumed", save_every=1, total_steps=3),
    "timeout": row(1e-9, "exit", "last words"),
    "output_dir": row("RUN/elsewhere", "files"),
    "run_name": row("other", "files"),
    "overwrite": row(True, "steps", stage="repeated"),
    "dry_run": row(True, "steps", "files"),
    "track": row(("wandb",), "wandb.init", "files"),
    "log_samples": row(3, "rows of samples.jsonl"),
    # ---- model
    "model_name_or_path": row("FILES/other", "weights", "responses"),
    "tokenizer_name_or_path": row("FILES/tokenizer", "prompts"),
    "trust_remote_code": row(True, "exit", "steps", model_name_or_path="FILES/custom"),
    "external_lib": row("own_library", "imports of own_library"),
    "override_config": row('{"rms_norm_eps": 0.5}', "responses", "policy/entropy"),
    "dtype": row("bfloat16", "dtype of the policy", "policy/entropy"),
    "attn_implementation": row("eager", "attention of the policy"),
    "gradient_checkpointing": row(True, "bytes kept for backward"),
    # ---- data
    "dataset": row(ROWS, "prompts"),
    "eval_dataset": row(ROWS, "held-out prompts"),
    "prompt_key": row("other_question", "prompts", dataset=ROWS),
    "ground_truth_key": row("other_answer", "ground truths", dataset=ROWS),
    "system_prompt": row("Be brief.", "prompts"),
    "chat_template": row("question_answer", "prompts"),
    "max_prompt_length": row(20, "prompts", overlong_prompts="left"),
    "overlong_prompts": row("left", "exit", "prompts", max_prompt_length=20),
    "bad_rows": row("drop", "exit", "steps", dataset="FILES/bad.jsonl"),
    "generation_size": row(6, "seeds of requests", "reward/generated_mean"),
    "dynamic_sampling_rounds": row(2, "seeds of requests", "data/rounds", num_samples_per_prompt_rollout=2),
    "dataset_filter": row(
        (0.5, 0.25),
        "prompts",
        "data/problems",
        dataset="FILES/few.jsonl",
        eval_prompts=0,
        total_steps=3,
        verifier="FILES/own.py:always",
    ),
    # ---- rewards
    "verifier": row("FILES/own.py:always", "rewards"),
    "verifier_key": row("judge", "rewards", dataset=ROWS),
    "reward_weights": row(("FILES/own.py:parity=0.5",), "rewards"),
    "reward_control": row("inverted", "rewards", "weights"),
    "call_timeout": row(
        0.2,
        *("reward/timeouts", "env/failures"),
        **GAME | SHORT | {"environment": "FILES/game.py:Late", "verifier": "FILES/own.py:late"},
    ),
    "allow_unsafe_code_exec": row(
        True, "exit", "steps", stage="no namespaces", dataset="FILES/code.jsonl", verifier="code"
    ),
    "reward_model_name_or_path": row("FILES/classifier", "rewards"),
    "reward_model_max_length": row(8, "rewards", reward_model_name_or_path="FILES/classifier"),
    "reward_scaling": row(2.0, "rewards"),
    "reward_bias": row(0.5, "rewards"),
    "max_reward_clip": row(0.25, "rewards"),
    "mask_no_eos_with_zero": row(True, "rewards"),
    "non_stop_penalty": row(0.5, "rewards"),
    "overlong_buffer": row(4, "rewards"),
    # ---- environments
    "environment": row("FILES/game.py:Guess", "responses", "env/turns", **VLLM, max_response_length=64),
    "max_turns": row(1, "env/turns", **GAME),
    # ---- evaluation
    "eval_prompts": row(3, "held-out prompts"),
    "eval_samples": row(1, "evaluation responses"),
    "eval_sampling": row('{"top_k": 2}', "evaluation responses"),
    # ---- generation
    "max_response_length": row(4, "completions/length_max"),
    "temperature": row(0.5, "responses", "policy/entropy"),
    "rollout": row("vllm", "vllm.LLM", "responses", vllm_args=CACHE),
    "async_steps": row(1, "sampler/staleness", "versions of weights"),
    "inflight_updates": row("recompute", "versions of weights", **FEW, async_steps=1),
    "stop_strings": row(("e", "a"), "completions/length_mean", **VLLM),
    "ignore_eos": row(True, "completions/truncated_frac", "responses"),
    # One process has no rank to spare: what they do in a launch of several is shown by
    # tests/launch/test_engine_ranks.py.
    "vllm_engines": row(1, "exit", "last words"),
    "vllm_tensor_parallel_size": row(2, "vllm.LLM(tensor_parallel_size)", stage="on two GPUs"),
    "vllm_args": row(CACHE, "blocks of the KV cache", rollout="vllm"),
    "vllm_sleep": row("all", "moves of the trainer"),
    # ---- memory and parallelism
    "micro_batch_tokens": row(140, "training passes", "log-prob passes", num_mini_batches=2),
    "batch_layout": row("padded", "training passes"),
    "zero_stage": row(1, "DeepSpeed(zero_optimization.stage)"),
    "offload": row(("optimizer",), "DeepSpeed(zero_optimization.offload_optimizer.device)"),
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
    "entropy_coef": row(0.01, "loss/total", "weights"),
    "early_stop_imp_ratio": row(0.5, "optim/early_stopped", "optim/steps", num_epochs=2),
    "truncated_importance_sampling_ratio_cap": row(0.5, "optim/grad_norm"),
    "importance_sampling_mask": row((0.99, 1.01), "loss/policy", "weights", async_steps=1, learning_rate=1e-2),
    "max_logprob_diff": row(1e-9, "exit", "last words"),
    # ---- KL
    "beta": row(0.1, "kl/k1", "loss/kl", "weights", learning_rate=1e-2),
    "kl_placement": row("reward", "token advantages", "loss/kl", **KL),
    "kl_estimator": row("k1", "loss/kl", "weights", **KL),
    "kl_reward_coef": row(0.5, "token advantages", "kl/reward_coef", **KL, kl_placement="both"),
    "kl_reward_estimator": row("k2", "token advantages", "kl/reward", **KL, kl_placement="both"),
    "kl_target": row((1e-4, 100.0), "kl/coef", **KL),
    "load_ref_policy": row(True, "kl/k1", "kl/full"),
    "kl_reward_norm": row("before_norm", "token advantages", **KL, kl_placement="reward"),
    "ref_policy_update": row((1, 0.5), "kl/k1", **KL),
    # ---- critic
    "disable_value": row(True, "value/mean", "token advantages"),
    "gamma": row(0.9, "value/return_mean", "token advantages"),
    "gae_lambda": row(0.9, "value/return_mean", "token advantages"),
    "bootstrap_truncated": row(True, "value/return_mean"),
    "adv_norm": row("none", "token advantages"),
    "critic_learning_rate": row(1e-2, "value/lr", "critic weights"),
    "critic": row(("lr_scheduler_type=constant",), "value/lr", "critic weights"),
    "value_clip": row(1e-5, "value/clip_frac", "loss/value", num_mini_batches=2),
    "critic_warmup": row(1, "optim/steps"),
    "value_norm": row("running", "loss/value"),
    "value_norm_beta": row(0.5, "loss/value", value_norm="exp", total_steps=3),
    "value_norm_eps": row(10.0, "loss/value", value_norm="running"),
    "dense_reward": row("sum", "token advantages", verifier="FILES/own.py:stepwise"),
    # ---- optimizer
    "learning_rate": row(1e-2, "optim/lr", "weights"),
    "adam_betas": row((0.5, 0.95), "weights"),
    "weight_decay": row(0.5, "weights"),
    "lr_scheduler_type": row("constant", "optim/lr", "weights"),
    "warmup_steps": row(1, "optim/lr", "weights"),
    "lr_min_ratio": row(0.9, "optim/lr", "weights"),
    "max_grad_norm": row(0.01, "weights"),
}


def default_of(cls: type, flag: str) -> Any:
    """The default of an argument, as a script has it where no variable of the environment says otherwise."""
    for f in dataclasses.fields(cls):
        if f.name == flag:
            return f.default if f.default is not dataclasses.MISSING else f.default_factory()
    raise KeyError(flag)

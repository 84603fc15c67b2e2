"""What ``--as NAME`` sets: the semantics of other frameworks' GRPO and PPO, in this project's flags. Imports no torch.

A preset is data: each row is one of our flags, its value, and where the framework says so (its own field = default,
and the file and line in the version named). What no flag expresses stands beside it, with the size of the difference.
tests/unit/test_presets.py reads the defaults again in the frameworks' own files, calls their functions for advantages
and losses on the same tensors, and compares values and gradients. docs/evidence/presets.md is made from this table.

Left out are sizes (prompts, samples per prompt, lengths, memory): a preset says how a framework learns, not how much.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runtime.process import refuse


class Setting(NamedTuple):
    """One of our flags, and where the framework has it: its field = default, line, and file if not the preset's own.

    Without the last three the framework has no such step, and the flag turns ours off.
    """

    flag: str
    value: Any
    theirs: str = ""
    line: int = 0
    file: str = ""


class Difference(NamedTuple):
    """What no flag expresses, and its size, as tests/unit/test_presets.py measures it. ``script``: of which alone."""

    what: str
    size: str
    script: str = ""


@dataclass(frozen=True)
class Preset:
    """How a framework learns by default."""

    version: str
    about: str
    scripts: tuple[str, ...]
    file: str
    settings: tuple[Setting, ...]
    differences: tuple[Difference, ...]
    compared: str  # the framework's own functions that the tests call


VERL_CORE = "verl/trainer/ppo/core_algos.py"
TRL_TRAINER = "trl/trainer/grpo_trainer.py"
HF_ARGUMENTS = "transformers/training_args.py"
OPENRLHF_MAKER = "openrlhf/trainer/ppo_utils/experience_maker.py"
AREAL_FIELDS = "areal/api/cli_args.py"
AREAL_ACTOR = "areal/trainer/ppo/actor.py"
OPEN_INSTRUCT_DATA = "open_instruct/data_loader.py"
OPEN_INSTRUCT_MAIN = "open_instruct/grpo_fast.py"
OPEN_INSTRUCT_TRAINING = "open_instruct/olmo_core_utils.py"
ONE_ESTIMATOR = Difference(
    "one estimator is for both places there; here --kl_reward_estimator is the reward's, k1 unless given",
    "a flag",
)
TINYZERO_CORE = "verl/trainer/ppo/core_algos.py"
TINYZERO_WORKERS = "verl/workers/fsdp_workers.py"

PRESETS = {
    "verl": Preset(
        version="verl 0.9.1",
        about="ppo_trainer.yaml; for grpo.py with algorithm.adv_estimator=grpo",
        scripts=("grpo", "ppo"),
        file="verl/trainer/config/_generated_ppo_trainer.yaml",
        settings=(
            Setting("num_mini_batches", 4, "actor_rollout_ref.actor.ppo_mini_batch_size=256", 80),
            Setting("num_epochs", 1, "actor_rollout_ref.actor.ppo_epochs=1", 111),
            Setting("shuffle_mini_batches", False, "actor_rollout_ref.actor.shuffle=false", 112),
            Setting("advantage_normalization_type", "standard", "algorithm.norm_adv_by_std_in_grpo=true", 862),
            Setting("advantage_eps", 1e-6, "epsilon=1e-6", 272, VERL_CORE),
            Setting("filter_zero_std_samples", False, "algorithm.filter_groups.enable=false", 865),
            Setting("mask_truncated_completions", False),
            Setting("loss_norm", "token", "actor_rollout_ref.actor.loss_agg_mode=token-mean", 101),
            Setting("clip_lower", 0.2, "actor_rollout_ref.actor.clip_ratio_low=0.2", 86),
            Setting("clip_higher", 0.2, "actor_rollout_ref.actor.clip_ratio_high=0.2", 87),
            Setting("clip_ratio_c", 3.0, "actor_rollout_ref.actor.clip_ratio_c=3.0", 100),
            Setting("entropy_coeff", 0.0, "actor_rollout_ref.actor.entropy_coeff=0", 103),
            Setting("early_stop_imp_ratio", None),
            Setting(
                "truncated_importance_sampling_ratio_cap", None, "algorithm.rollout_correction.rollout_is=null", 851
            ),
            Setting("beta", 0.0, "actor_rollout_ref.actor.use_kl_loss=false", 106),
            Setting("kl_placement", "loss", "algorithm.use_kl_in_reward=false", 869),
            Setting("kl_estimator", "k3", "actor_rollout_ref.actor.kl_loss_type=low_var_kl", 110),
            Setting("kl_gradient", "naive", "actor_rollout_ref.actor.kl_loss_type=low_var_kl", 110),
            Setting("kl_reward_norm", "inside", "scores = token_level_rewards.sum(dim=-1)", 304, VERL_CORE),
            Setting("kl_controller", "fixed", "algorithm.kl_ctrl.type=fixed", 873),
            Setting("kl_target", 0.1, "algorithm.kl_ctrl.target_kl=0.1", 876),
            Setting("kl_target_unit", "token", "algorithm.kl_ctrl.target_kl=0.1", 876),
            Setting("kl_horizon", 10000.0, "algorithm.kl_ctrl.horizon=10000", 875),
            Setting("mask_no_eos_with_zero", False),
            Setting("temperature", 1.0, "actor_rollout_ref.rollout.temperature=1.0", 297),
            Setting("learning_rate", 1e-6, "actor_rollout_ref.actor.optim.lr=1.0e-06", 12),
            Setting("adam_beta1", 0.9, "actor_rollout_ref.actor.optim.betas.0=0.9", 18),
            Setting("adam_beta2", 0.999, "actor_rollout_ref.actor.optim.betas.1=0.999", 19),
            Setting("weight_decay", 0.01, "actor_rollout_ref.actor.optim.weight_decay=0.01", 15),
            Setting("lr_scheduler_type", "constant", "actor_rollout_ref.actor.optim.lr_scheduler_type=constant", 23),
            Setting("warm_up_steps", 0, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.0", 13),
            Setting("max_grad_norm", 1.0, "actor_rollout_ref.actor.grad_clip=1.0", 177),
            Setting("disable_value", False, "critic.enable=null", 607),
            Setting("gamma", 1.0, "algorithm.gamma=1.0", 859),
            Setting("gae_lambda", 1.0, "algorithm.lam=1.0", 860),
            Setting("bootstrap_truncated", False, "nextvalues = 0", 245, VERL_CORE),
            Setting("adv_norm", "batch", "verl_F.masked_whiten", 262, VERL_CORE),
            Setting("value_norm", "none"),
            Setting("critic_learning_rate", 1e-5, "critic.optim.lr=1.0e-05", 539),
            Setting("value_clip", 0.5, "critic.cliprange_value=0.5", 617),
            Setting("critic_warmup", 0, "trainer.critic_warmup=0", 971),
        ),
        differences=(
            Difference(
                "mini-batches are cut after the samples were balanced over ranks; here whole groups", "not measured"
            ),
            Difference(
                "k3 in the loss is clipped at 10 there, with gradient 0 above, and not here",
                "gradient 9.0e+00 of its mean size at d = -4",
            ),
        ),
        compared=(
            "core_algos: compute_grpo_outcome_advantage, compute_gae_advantage_return, compute_policy_loss_vanilla, "
            "agg_loss, kl_penalty, compute_value_loss"
        ),
    ),
    "trl": Preset(
        version="trl 1.16.0",
        about="GRPOConfig, and transformers' TrainingArguments for what it does not set",
        scripts=("grpo",),
        file="trl/trainer/grpo_config.py",
        settings=(
            Setting("num_mini_batches", 1, "steps_per_generation=None", 528),
            Setting("num_epochs", 1, "num_iterations=1", 689),
            Setting("advantage_normalization_type", "standard", 'scale_rewards="group"', 789),
            Setting("advantage_eps", 1e-4, "1e-4", 2787, TRL_TRAINER),
            Setting("filter_zero_std_samples", False),
            Setting("mask_truncated_completions", False, "mask_truncated_completions=False", 836),
            Setting("loss_norm", "token", 'loss_type="dapo"', 801),
            Setting("clip_lower", 0.2, "epsilon=0.2", 693),
            Setting("clip_higher", 0.2, "epsilon_high=None", 705),
            Setting("clip_ratio_c", None, "delta=None", 697),
            Setting("entropy_coeff", 0.0, "entropy_coef=0.0", 876),
            Setting("early_stop_imp_ratio", None),
            Setting("truncated_importance_sampling_ratio_cap", None, "use_vllm=False", 587),
            Setting("beta", 0.0, "beta=0.0", 681),
            Setting("kl_placement", "loss", "self.beta * per_token_kl", 3150, TRL_TRAINER),
            Setting("kl_estimator", "k3", "torch.exp(ref_per_token_logps - per_token_logps)", 3101, TRL_TRAINER),
            Setting("kl_gradient", "unbiased", "use_bias_correction_kl=True", 972),
            Setting("kl_controller", "fixed"),
            Setting("ref_policy_update_freq", 0, "sync_ref_model=False", 844),
            Setting("mask_no_eos_with_zero", False),
            Setting("temperature", 1.0, "temperature=1.0", 532),
            Setting("learning_rate", 1e-6, "learning_rate=1e-6", 423),
            Setting("adam_beta1", 0.9, "adam_beta1=0.9", 826, HF_ARGUMENTS),
            Setting("adam_beta2", 0.999, "adam_beta2=0.999", 832, HF_ARGUMENTS),
            Setting("adam_eps", 1e-8, "adam_epsilon=1e-8", 838, HF_ARGUMENTS),
            Setting("weight_decay", 0.0, "weight_decay=0.0", 820, HF_ARGUMENTS),
            Setting("lr_scheduler_type", "linear", 'lr_scheduler_type="linear"', 786, HF_ARGUMENTS),
            Setting("lr_min_ratio", 0.0, "lr_scheduler_kwargs=None", 790, HF_ARGUMENTS),
            Setting("warm_up_steps", 0, "warmup_steps=0", 796, HF_ARGUMENTS),
            Setting("max_grad_norm", 1.0, "max_grad_norm=1.0", 864, HF_ARGUMENTS),
        ),
        differences=(
            Difference("the log-ratio has no bound there; here +-20", "loss 9.9e-01, relative, at log-ratios of 25"),
            Difference(
                "the logged value of the KL is ratio * k3 there, k3 here; the gradients are equal",
                "not measured",
            ),
            Difference(
                "with use_vllm=True it drops responses whose trainer / sampler probability is above 3; here tokens, by "
                "--importance_sampling_mask",
                "not measured; off by default there",
            ),
        ),
        compared="GRPOTrainer._generate_and_score_completions (advantages) and ._compute_loss",
    ),
    "openrlhf": Preset(
        version="openrlhf 0.11.2",
        about="train_ppo_ray.py with --algo.advantage.estimator group_norm",
        scripts=("grpo",),
        file="openrlhf/cli/train_ppo_ray.py",
        settings=(
            Setting("num_mini_batches", 8, "--train.batch_size=128", 413),
            Setting("num_epochs", 1, "--train.max_epochs=1", 397),
            Setting("shuffle_mini_batches", True, "shuffle=should_shuffle", 166, "openrlhf/trainer/ray/ppo_actor.py"),
            Setting("advantage_normalization_type", "standard", "group_norm", 273, OPENRLHF_MAKER),
            Setting("advantage_eps", 1e-9, "1e-9", 274, OPENRLHF_MAKER),
            Setting("filter_zero_std_samples", False),
            Setting("dynamic_sampling_rounds", 0, "--algo.dynamic_filtering_enable=False", 601),
            Setting("mask_truncated_completions", False),
            Setting("loss_norm", "token", '--actor.loss_agg_mode="token-mean"', 441),
            Setting("clip_lower", 0.2, "--actor.eps_clip=0.2", 406),
            Setting("clip_higher", 0.2, "--actor.eps_clip=0.2", 406),
            Setting("clip_ratio_c", None, "--actor.dual_clip=None", 408),
            Setting("entropy_coeff", 0.0, "--actor.entropy_coef=None", 469),
            Setting("early_stop_imp_ratio", None),
            Setting("truncated_importance_sampling_ratio_cap", None, '--algo.advantage.is_correction_level="off"', 261),
            Setting("beta", 0.01, "--algo.kl.init_coef=0.01", 438),
            Setting("kl_placement", "reward", "--algo.kl.use_loss=False", 524),
            Setting("kl_estimator", "k1", '--algo.kl.estimator="k1"', 449),
            Setting("kl_gradient", "naive", "--algo.kl.unbiased_gradient=False", 458),
            Setting("kl_reward_norm", "outside", "reward = compute_reward(", 284, OPENRLHF_MAKER),
            Setting("kl_controller", "fixed", "--algo.kl.target=None", 436),
            Setting("mask_no_eos_with_zero", False),
            Setting("non_stop_penalty", 0.0, "--reward.stop_properly_penalty_coef=None", 537),
            Setting("overlong_buffer", 0, "--reward.overlong_buffer_len=None", 533),
            Setting("temperature", 1.0, "--rollout.temperature=1.0", 418),
            Setting("learning_rate", 1e-6, ".adam.lr=1e-6", 502),
            Setting("adam_beta1", 0.9, ".adam.betas=(0.9, 0.95)", 503),
            Setting("adam_beta2", 0.95, ".adam.betas=(0.9, 0.95)", 503),
            Setting("adam_eps", 1e-8, ".adam.eps=1e-8", 504),
            Setting("weight_decay", 0.0, ".adam.weight_decay=0.0", 505),
            Setting("lr_scheduler_type", "cosine", '.lr_scheduler="cosine_with_min_lr"', 507),
            Setting("lr_min_ratio", 0.1, ".min_lr_ratio=0.1", 509),
            Setting("warm_up_ratio", 0.03, ".lr_warmup_ratio=0.03", 508),
            Setting("max_grad_norm", 1.0, ".max_norm=1.0", 511),
        ),
        differences=(
            Difference(
                "a mini-batch is 128 samples there (--train.batch_size); here an eighth of the step", "not measured"
            ),
            Difference("normalized rewards are clipped to +-10 there", "0 up to 101 samples per prompt"),
            Difference(
                "the first of W warm-up steps has rate 0 there, 1 / (W + 1) of the peak here; W is rounded up there",
                "rate 5.0e-01 of the peak in the first of 20 optimizer steps, 2.5e-01 of 100, 3.2e-02 of 1,000",
            ),
            ONE_ESTIMATOR,
            Difference(
                "k2 and k3 in the loss, and every KL in the reward, are clipped to +-10 there, and not here",
                "gradient 2.3e+00 of its mean size at d = -4 with k3",
            ),
        ),
        compared="RemoteExperienceMaker.compute_advantages_and_returns, PolicyLoss, aggregate_loss, compute_approx_kl",
    ),
    "areal": Preset(
        version="areal 1.0.4",
        about="examples/math/gsm8k_grpo.yaml and gsm8k_ppo.yaml (PPOActorConfig alone normalizes nothing)",
        scripts=("grpo", "ppo"),
        file="examples/math/gsm8k_grpo.yaml",
        settings=(
            Setting("num_mini_batches", 1, "actor.ppo_n_minibatches=1", 69),
            Setting("num_epochs", 1),
            Setting("advantage_normalization_type", "standard", "actor.reward_norm.std_level=group", 77),
            Setting("advantage_eps", 1e-5, "eps=1e-5", 70, AREAL_FIELDS),
            Setting("filter_zero_std_samples", False),
            Setting("mask_truncated_completions", False),
            Setting("loss_norm", "token", "loss_mask_count", 483, "areal/utils/functional/functional.py"),
            Setting("clip_lower", 0.4, "actor.eps_clip=0.4", 64),
            Setting("clip_higher", 0.4, "eps_clip_higher=None", 1463, AREAL_FIELDS),
            Setting("clip_ratio_c", None, "c_clip=None", 1469, AREAL_FIELDS),
            Setting("entropy_coeff", 0.0),
            Setting("early_stop_imp_ratio", None),
            Setting("truncated_importance_sampling_ratio_cap", None),
            Setting("importance_sampling_mask", (0.0, 5.0), "actor.rejection_sampling.upper=5.0", 74),
            Setting("beta", 0.0, "actor.kl_ctl=0.0", 68),
            Setting("kl_placement", "reward", "rewards = -self.kl_ctl", 202, AREAL_ACTOR),
            Setting("kl_estimator", "k1", 'kl_estimator="k1"', 1523, AREAL_FIELDS),
            Setting("kl_reward_norm", "outside", "rewards = -self.kl_ctl", 202, AREAL_ACTOR),
            Setting("kl_controller", "fixed"),
            Setting("reward_scaling", 10.0, "actor.reward_scaling=10.0", 66),
            Setting("reward_bias", 0.5, "actor.reward_bias=-0.5", 67),
            Setting("max_reward_clip", 20.0, "reward_clip=20.0", 1488, AREAL_FIELDS),
            Setting("mask_no_eos_with_zero", False, "mask_no_eos_with_zero=False", 1503, AREAL_FIELDS),
            Setting("overlong_buffer", 0, "overlong_reward_penalty=False", 1491, AREAL_FIELDS),
            Setting("temperature", 1.0, "gconfig.temperature=1.0", 40),
            Setting("learning_rate", 1.7e-5, "actor.optimizer.lr=1.70e-5", 56),
            Setting("adam_beta1", 0.9, "actor.optimizer.beta1=0.9", 58),
            Setting("adam_beta2", 0.999, "actor.optimizer.beta2=0.999", 59),
            Setting("adam_eps", 1e-8, "actor.optimizer.eps=1e-8", 60),
            Setting("weight_decay", 0.017, "actor.optimizer.weight_decay=0.017", 57),
            Setting("lr_scheduler_type", "constant", "actor.optimizer.lr_scheduler_type=constant", 61),
            Setting("warm_up_ratio", 0.001, "actor.optimizer.warmup_steps_proportion=0.001", 63),
            Setting("max_grad_norm", 1.0, "actor.optimizer.gradient_clipping=1.0", 62),
            Setting("disable_value", False),
            Setting("gamma", 1.0, "discount=1.0", 1511, AREAL_FIELDS),
            Setting("gae_lambda", 1.0, "gae_lambda=1.0", 1514, AREAL_FIELDS),
            Setting("bootstrap_truncated", True, "* seq_no_eos_mask", 223, AREAL_ACTOR),
            Setting("adv_norm", "batch", "actor.adv_norm.std_level=batch", 76, "examples/math/gsm8k_ppo.yaml"),
            Setting("value_norm", "none"),
            Setting("critic_learning_rate", 1.7e-5, "actor.optimizer.lr=1.70e-5", 55, "examples/math/gsm8k_ppo.yaml"),
            Setting("value_clip", 0.5, "critic.eps_clip=0.5", 95, "examples/math/gsm8k_ppo.yaml"),
        ),
        differences=(
            Difference(
                "advantages are normalized once more there, over all tokens of the step (adv_norm)",
                "advantages 3.5e-01, relative, for scores 0 and 1",
                "grpo",
            ),
            Difference(
                "the first of W warm-up steps has rate 0 there, 1 / (W + 1) of the peak here; W is rounded down there",
                "rate 0.0e+00 of the peak below 500 optimizer steps, 5.0e-01 in the first of 1,000",
            ),
            Difference(
                "whitening divides by std + 1e-5 there, by sqrt(variance + 1e-8) here",
                "advantages 4.0e-06, relative",
                "ppo",
            ),
            Difference(
                "the KL in the reward is between sampler and reference there, between trainer and reference here",
                "advantages 1.1e-02 at --beta 0.04",
            ),
            Difference("the log-ratio has no bound there; here +-20", "loss 9.9e-01, relative, at log-ratios of 25"),
            Difference(
                "responses as long as the longest of the batch are bootstrapped there; here truncated ones",
                "not measured",
                "ppo",
            ),
            Difference(
                "samples are up to 2 versions old there; here that takes --async_steps 2 --inflight_updates recompute",
                "a flag",
            ),
        ),
        compared="PPOActor._compute_advantages, grpo_loss_fn, ppo_critic_loss_fn",
    ),
    "open-instruct": Preset(
        version="open-instruct e6c3044",
        about="grpo_fast.py",
        scripts=("grpo",),
        file="open_instruct/grpo_utils.py",
        settings=(
            Setting("num_mini_batches", 1, "num_mini_batches=1", 102),
            Setting("num_epochs", 1, "num_epochs=1", 89, OPEN_INSTRUCT_TRAINING),
            Setting("shuffle_mini_batches", False),
            Setting(
                "advantage_normalization_type",
                "centered",
                'advantage_normalization_type="centered"',
                421,
                OPEN_INSTRUCT_DATA,
            ),
            Setting("advantage_eps", 1e-8, "1e-8", 1480, OPEN_INSTRUCT_DATA),
            Setting("filter_zero_std_samples", True, "filter_zero_std_samples=True", 419, OPEN_INSTRUCT_DATA),
            Setting("dynamic_sampling_rounds", 0, "active_sampling=False", 418, OPEN_INSTRUCT_DATA),
            Setting("mask_truncated_completions", False, "mask_truncated_completions=False", 422, OPEN_INSTRUCT_DATA),
            Setting("loss_norm", "token", 'loss_denominator="token"', 136),
            Setting("clip_lower", 0.2, "clip_lower=0.2", 106),
            Setting("clip_higher", 0.272, "clip_higher=0.272", 108),
            Setting("clip_ratio_c", None),
            Setting("entropy_coeff", 0.0),
            Setting("early_stop_imp_ratio", None),
            Setting("truncated_importance_sampling_ratio_cap", 2.0, "rho_clamp_upper_bound=2.0", 118),
            Setting("beta", 0.05, "beta=0.05", 104),
            Setting("kl_placement", "loss", "self.args.beta * kl_BT", 718, OPEN_INSTRUCT_MAIN),
            Setting("kl_estimator", "k3", "kl_estimator=2", 134),
            Setting("kl_gradient", "naive", "kl = kl_all[config.kl_estimator]", 534),
            Setting("kl_controller", "fixed"),
            Setting("ref_policy_update_freq", 0, "ref_policy_update_freq=None", 146),
            Setting("ref_policy_alpha", 0.6, "alpha=0.6", 141),
            Setting("reward_scaling", 10.0, "verification_reward=10.0", 452, OPEN_INSTRUCT_DATA),
            Setting("mask_no_eos_with_zero", False, "non_stop_penalty=False", 478, OPEN_INSTRUCT_DATA),
            Setting("overlong_prompts", "filter", '"rlvr_max_length_filter_v1"', 430, OPEN_INSTRUCT_DATA),
            Setting("temperature", 1.0, "temperature=1.0", 439, OPEN_INSTRUCT_DATA),
            Setting("learning_rate", 2e-5, "learning_rate=2e-5", 95, OPEN_INSTRUCT_TRAINING),
            Setting("adam_beta1", 0.9, "torch.optim.AdamW(", 375, OPEN_INSTRUCT_MAIN),
            Setting("adam_beta2", 0.999, "torch.optim.AdamW(", 375, OPEN_INSTRUCT_MAIN),
            Setting("weight_decay", 0.0, "weight_decay=0.0", 99, OPEN_INSTRUCT_TRAINING),
            Setting("lr_scheduler_type", "linear", 'lr_scheduler_type="linear"', 105, OPEN_INSTRUCT_TRAINING),
            Setting("lr_min_ratio", 0.0, "scheduler = get_scheduler(", 378, OPEN_INSTRUCT_MAIN),
            Setting("warm_up_steps", 0, "warmup_ratio=0.0", 2402, OPEN_INSTRUCT_MAIN),
            Setting("max_grad_norm", 1.0, "max_grad_norm=1.0", 2402, OPEN_INSTRUCT_MAIN),
        ),
        differences=(
            Difference(
                "the KL in the loss has no importance weight there, and has the policy's here",
                "gradient 7.1e-03 of its mean size where sampler and trainer differ by 0.05 nats",
            ),
            Difference("the log-ratio has no bound there; here +-20", "loss 9.9e-01, relative, at log-ratios of 25"),
            Difference(
                "with --advantage_normalization_type standard the deviation is the population's there",
                "advantages sqrt(G / (G - 1)) larger: 1.155 at G = 4",
            ),
            Difference(
                "samples are up to 8 steps old there; here that takes --async_steps 8 --inflight_updates keep", "a flag"
            ),
        ),
        compared="compute_rho_correction, compute_grpo_loss, masked_mean; not the advantages, a line in a method",
    ),
    "tinyzero": Preset(
        version="TinyZero 95df88f",
        about="its fork of verl: ppo_trainer.yaml with algorithm.adv_estimator=gae",
        scripts=("ppo",),
        file="verl/trainer/config/ppo_trainer.yaml",
        settings=(
            Setting("num_mini_batches", 4, "actor_rollout_ref.actor.ppo_mini_batch_size=256", 23),
            Setting("num_epochs", 1, "actor_rollout_ref.actor.ppo_epochs=1", 33),
            Setting("shuffle_mini_batches", False, "actor_rollout_ref.actor.shuffle=False", 34),
            Setting("filter_zero_std_samples", False),
            Setting("mask_truncated_completions", False),
            Setting("loss_norm", "token", "pg_loss = verl_F.masked_mean(", 192, TINYZERO_CORE),
            Setting("clip_lower", 0.2, "actor_rollout_ref.actor.clip_ratio=0.2", 28),
            Setting("clip_higher", 0.2, "actor_rollout_ref.actor.clip_ratio=0.2", 28),
            Setting("clip_ratio_c", None),
            Setting("entropy_coeff", 0.001, "actor_rollout_ref.actor.entropy_coeff=0.001", 29),
            Setting("early_stop_imp_ratio", None),
            Setting("truncated_importance_sampling_ratio_cap", None),
            Setting("beta", 0.001, "algorithm.kl_ctrl.kl_coef=0.001", 145),
            Setting("kl_placement", "reward", "actor_rollout_ref.actor.use_kl_loss=False", 30),
            Setting("kl_estimator", "k1", "algorithm.kl_penalty=kl", 142),
            Setting("kl_controller", "fixed", "algorithm.kl_ctrl.type=fixed", 144),
            Setting("mask_no_eos_with_zero", False),
            Setting("temperature", 1.0, "actor_rollout_ref.rollout.temperature=1.0", 63),
            Setting("learning_rate", 1e-6, "actor_rollout_ref.actor.optim.lr=1e-6", 37),
            Setting("adam_beta1", 0.9, "betas=(0.9, 0.999)", 231, TINYZERO_WORKERS),
            Setting("adam_beta2", 0.999, "betas=(0.9, 0.999)", 231, TINYZERO_WORKERS),
            Setting("weight_decay", 0.01, "optim_config.get('weight_decay', 1e-2)", 232, TINYZERO_WORKERS),
            Setting("lr_scheduler_type", "constant", "actor_rollout_ref.actor.optim.warmup_style=constant", 40),
            Setting("warm_up_steps", 0, "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.", 38),
            Setting("max_grad_norm", 1.0, "actor_rollout_ref.actor.grad_clip=1.0", 27),
            Setting("disable_value", False),
            Setting("gamma", 1.0, "algorithm.gamma=1.0", 139),
            Setting("gae_lambda", 1.0, "algorithm.lam=1.0", 140),
            Setting("bootstrap_truncated", False),
            Setting("adv_norm", "batch", "verl_F.masked_whiten", 106, TINYZERO_CORE),
            Setting("value_norm", "none"),
            Setting("critic_learning_rate", 1e-5, "critic.optim.lr=1e-5", 89),
            Setting("value_clip", 0.5, "critic.cliprange_value=0.5", 119),
            Setting("critic_warmup", 0, "trainer.critic_warmup=0", 157),
        ),
        differences=(
            Difference(
                "the loss is a mean of micro-batch means there, of all tokens here",
                "gradient 2.3e-01 of its mean size for responses of 1 to 60 tokens in micro-batches of 4",
            ),
            Difference("the log-ratio has no bound there; here +-20", "loss 9.9e-01, relative, at log-ratios of 25"),
            ONE_ESTIMATOR,
            Difference("with use_kl_loss=True the KL is subtracted from the loss there", "its sign; off by default"),
        ),
        compared="compute_gae_advantage_return, compute_policy_loss, compute_value_loss, kl_penalty",
    ),
}

# A field that one script alone has tells them apart, in an edited copy under another name as well.
MARKS = {"grpo": "advantage_normalization_type", "ppo": "gae_lambda"}


def script_of(cls: type) -> str:
    """ "grpo" or "ppo", whichever a class of arguments belongs to; "" for other programs."""
    fields = {f.name for f in dataclasses.fields(cls)}
    return next((script for script, mark in MARKS.items() if mark in fields), "")


def asked_for(cls: type, words: list[str]) -> str | None:
    """The NAME of ``--as NAME`` on a command line, the last one given; None without.

    Ends with exit code 2 where the script has no preset of that name, with the list of those that it has.
    """
    name = None
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        if flag == "--as":
            name = value if equals else following
    if name is None:
        return None
    script = script_of(cls)
    known = [other for other, preset in PRESETS.items() if script in preset.scripts]
    if not known:
        refuse("--as is for grpo.py and ppo.py and their copies")
    if name not in known:
        note = f"; {name} is for {PRESETS[name].scripts[0]}.py" if name in PRESETS else ""
        refuse(f"--as {name!r}: give one of {', '.join(known)}{note}")
    return name


def own_defaults(args: Any) -> dict[str, Any]:
    """The defaults of the script that a copy or variant began as, from its text (its import takes seconds).

    Empty where that script is not beside this folder, as in a copy of the project that left it out.
    """
    file = Path(__file__).resolve().parent.parent / f"{script_of(type(args))}.py"
    if not file.is_file():
        return {}
    shared = [cls for cls in type(args).__mro__ if cls.__name__ == "RunFlags"]
    found = {f.name: f.default for cls in shared for f in dataclasses.fields(cls)}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant | ast.UnaryOp | ast.Tuple):
                    found[line.target.id] = ast.literal_eval(line.value)
    return found


def settings_of(args: Any, name: str) -> tuple[dict[str, Any], list[Setting]]:
    """(flag -> value that a preset gives this script, the settings that it leaves alone).

    A flag whose default differs from that of grpo.py or ppo.py is what makes a variant that variant, and keeps it.
    """
    defaults = own_defaults(args)
    hints = typing.get_type_hints(type(args))
    ours = type(args)()
    given = {}
    kept = []
    for setting in PRESETS[name].settings:
        if not hasattr(ours, setting.flag):
            continue
        hint = hints[setting.flag]
        choices = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else (setting.value,)
        default = getattr(ours, setting.flag)
        if defaults.get(setting.flag, default) == default and setting.value in choices:
            given[setting.flag] = setting.value
        elif setting.value != default:
            kept.append(setting)
    return given, kept


def apply(args: Any, name: str | None) -> Any:
    """A copy of ``args`` with the settings of a preset; ``args`` itself where ``name`` is None."""
    if name is None:
        return args
    return dataclasses.replace(args, **settings_of(args, name)[0])


def explain(args: Any) -> list[str]:
    """Lines for the start of a run: what ``--as`` changed, what it left alone, what was given, what is different."""
    if args.as_ is None:
        return []
    preset = PRESETS[args.as_]
    ours = type(args)()
    theirs, kept = settings_of(ours, args.as_)
    changed = []
    given = []
    for flag, there in theirs.items():
        value = getattr(args, flag)
        if value != there:
            given.append(f"--{flag} {value} (there {there})")
        elif value != getattr(ours, flag):
            changed.append(f"--{flag} {value} ({getattr(ours, flag)})")
    lines = [f"as         {preset.version}, instead of the defaults in parentheses: {', '.join(changed)}"]
    if kept:
        own = [f"--{s.flag} {getattr(args, s.flag)} (there {s.value})" for s in kept]
        lines.append(f"  kept     this script's own: {', '.join(own)}")
    if given:
        lines.append(f"  given    {', '.join(given)}")
    for difference in preset.differences:
        if difference.script in ("", script_of(type(args))):
            lines.append(f"  not as there: {difference.what}; {difference.size}")
    return lines


def page() -> str:
    """docs/evidence/presets.md, from the table."""
    lines = [PAGE]
    for name, preset in PRESETS.items():
        scripts = " and ".join(f"`{script}.py`" for script in preset.scripts)
        lines += [f"## `--as {name}`", "", f"{preset.version}: {preset.about}. For {scripts}.", ""]
        lines += ["| flag | there | where |", "|---|---|---|"]
        for s in preset.settings:
            place = f"`{s.file or preset.file}:{s.line}`" if s.theirs else "no such step"
            lines.append(f"| `--{s.flag} {s.value}` | {f'`{s.theirs}`' if s.theirs else ''} | {place} |")
        lines += ["", "What no setting expresses:", "", "| difference | size |", "|---|---|"]
        for d in preset.differences:
            lines.append(f"| {f'{d.script}.py: ' if d.script else ''}{d.what} | {d.size} |")
        lines += ["", f"Compared with its own functions: {preset.compared}.", ""]
    return "\n".join(lines)


PAGE = """# Presets: learn as another framework does

`python grpo.py --as verl` (`trl`, `openrlhf`, `areal`, `open-instruct`; ppo.py: `verl`, `areal`, `tinyzero`) sets the
flags below to what that framework does by default: advantages and their epsilon, the aggregation of the loss, clips,
where the KL enters and how, truncation, reward shaping, the optimizer and its schedule. Flags given beside it win, in
any order, and also when they say what is our default. A flag to which a copy or variant has given a default of its own
(`loss_norm` of gspo) stays as it is. Sizes (prompts, samples per prompt, lengths) are not set. The start of the run
prints what a preset changed, what it left alone, what was given instead, and what is different there all the same. The
name of the run and `config.json` (`as_`) record it.

This page is made from the table in `runtime/presets.py` (`python studies/presets_page.py`). tests/unit/test_presets.py
installs the wheels of verl, TRL, OpenRLHF and AReaL without their dependencies, reads every default again where the
table says it stands, calls their own functions on the same tensors (random numbers, equal and almost equal scores,
responses of one token, ragged lengths, all truncated, ratios far out), and finds advantages, losses and gradients equal
to 1e-6. For open-instruct and TinyZero, tests/golden/presets.json has what their functions gave at the commits named.
Each size in a table of differences is measured by a test, unless it says otherwise: the largest relative difference of
a number, or of a gradient in units of its mean size.
"""

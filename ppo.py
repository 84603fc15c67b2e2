"""PPO with a critic and verifiable rewards, in one file. Read ``main`` from top to bottom: it follows the data.

    1 prompts -> 2 generate -> 3 score -> 4 gather -> 5 log-probs and values -> 6 advantages -> 7 update -> 8 push
    -> 9 record

Proximal Policy Optimization (arXiv 1707.06347) with generalized advantage estimation (arXiv 1506.02438). The script is
grpo.py with a critic: ``diff grpo.py ppo.py`` shows only the code that the critic needs. Design choices:

* The critic is a second transformer with a scalar head and its own DeepSpeed engine. It starts from the policy's
  weights, with values near 0. Before each response token it predicts the reward still to come.
* The critic learns from all responses, truncated ones included. Its optimizer steps come before the policy's.
* Every rank computes advantages and returns in fp64 from all tokens. The advantages are then whitened (``--adv_norm``).
* The code for samples, shared rows, the policy's loss and the KL is that of grpo.py, word for word. A KL in the reward
  is subtracted token by token, before GAE.
* Not included: everything that grpo.py does not include, and GRPO's advantages.

Tensor names end in their dimensions: P prompts of a step, G samples of a group, B samples of a step, N response tokens
of a step, T response tokens of a micro-batch, E engines. Arrays indexed by ``mb.tokens``, such as ``old_N``, have
length N + 1. The last slot is for empty micro-batches: a rank with fewer micro-batches than another adds them to make
equally many passes.

    CPU, two cores       python ppo.py
    one GPU              python ppo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --learning_rate 1e-6 \\
                             --dataset openai/gsm8k:main@train --critic_learning_rate 1e-5 --gradient_checkpointing \\
                             --num_unique_prompts_rollout 256 --num_samples_per_prompt_rollout 1 \\
                             --max_response_length 512 --total_steps 200 --vllm_sleep engine
    N GPUs               accelerate launch --config_file scripts/zero2.yaml --num_processes N ppo.py ...
"""

from __future__ import annotations

import bisect
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from rewards import Verifiers, check_reward_args, truth_error
from runtime.arguments import checks, flags
from runtime.data import prompt_order
from runtime.data.samples import Batch, Problem, Sample, equal_rewards
from runtime.run.preflight import Ready, prepare_run
from runtime.system import process, user_files
from runtime.training import model_files

CRITIC_ARGS = (
    *("gae_lambda", "gradient_checkpointing", "lr_scheduler_type", "max_grad_norm", "model_name_or_path"),
    *("num_epochs", "num_mini_batches", "warmup_steps", "weight_decay"),
)
SCHEDULES = ("constant", "linear", "cosine")
KLEstimator = Literal["k1", "k2", "k3", "k4", "abs", "full", "kl", "kl1", "mse", "kl2", "low_var_kl", "kl3", "kl4"]
KLInLoss = Literal[
    KLEstimator,
    "k1+",
    "k2+",
    "k3+",
    "k4+",
    "abs+",
    "kl+",
    "low_var_kl+",
]


@flags.own_flags_first
@dataclass
class Args(flags.RunFlags):
    exp_name: str = Path(__file__).stem
    """First part of the run's name. Default: the script's file name, so a copy of the script gets runs of its own."""
    preset: str | None = None
    """Use the defaults of another framework, e.g. verl (docs/flags.md). All other flags take precedence."""
    total_steps: int = 20
    """Train for this many steps; each samples one batch and trains on it."""
    total_episodes: int | None = None
    """Train until this many samples in total, rounded down to whole steps. Replaces total_steps."""
    total_epochs: int | None = None
    """Train for this many epochs over the training problems, rounded down to whole steps. Replaces total_steps."""

    # ---- batch sizes
    num_unique_prompts_rollout: int = 8
    """Number of prompts per step, over all ranks."""
    num_samples_per_prompt_rollout: int = 8
    """Number of responses per prompt (the group size)."""
    num_mini_batches: int = 1
    """Number of mini-batches (optimizer steps) per epoch over a batch. Groups are spread evenly and never split."""
    num_epochs: int = 1
    """Number of epochs over each batch of samples."""
    shuffle_mini_batches: bool = True
    """Assign groups to mini-batches in a new random order in every epoch."""

    # ---- algorithm
    filter_zero_std_samples: bool = False
    """Exclude groups of equal rewards (zero variance) from the loss and its normalization (DAPO)."""
    mask_truncated_completions: bool = True
    """Exclude truncated responses from the policy's loss and its normalization (DAPO)."""
    loss_norm: Literal["token", "sequence", "constant"] = "token"
    """Normalize the loss. token: mean over tokens (DAPO). sequence: mean of sequence means (GRPO). constant:
    mean of sequence sums / max_response_length (Dr. GRPO)."""
    clip_lower: float = 0.2
    """Clip the probability ratio at 1 - clip_lower from below."""
    clip_higher: float = 0.2
    """Clip the probability ratio at 1 + clip_higher from above. DAPO uses 0.28."""
    clip_ratio_c: float | None = None
    """Dual clip, e.g. 3: if a token's advantage is negative, limit its loss to this times |advantage|. Default: off."""
    entropy_coef: float = 0.0
    """Add this times the entropy of each token's full distribution to the objective (entropy bonus). 0 disables."""
    early_stop_imp_ratio: float | None = None
    """Skip an optimizer step whose mean ratio exceeds this, and all later steps on the same batch. Default: off."""
    truncated_importance_sampling_ratio_cap: float | None = None
    """Multiply a token's policy loss, and its KL unless kl_estimator is full, by its probability ratio trainer/sampler,
    capped at this. 0 disables. Default: 2 with --async_steps unless --importance_sampling_mask is set, else off."""
    importance_sampling_mask: tuple[float, float] | None = None
    """LOW HIGH (IcePop: 0.5 5): like truncated_importance_sampling_ratio_cap, but ratios outside [LOW, HIGH] are 0."""

    # ---- KL
    beta: float = 0.0
    """Coefficient of the KL to the reference model. 0: there is no KL, and no reference model is loaded."""
    kl_placement: Literal["none", "loss", "reward", "both"] = "loss"
    """Add the KL to the loss, to the reward, to both, or to none of them."""
    kl_estimator: KLInLoss = "k3+"
    """Estimator of the KL in the loss, for d = log(pi/ref). k1: d. k2: d^2/2. k3: exp(-d)-1+d. k4: d*pi/old. abs: |d|.
    full: exact sum over the vocabulary. A + behind a name keeps the value and takes the gradient of KL(pi || ref).
    Recommended: k3+. The other names are aliases that other frameworks use (docs/kl.md)."""
    kl_reward_coef: float | None = None
    """Coefficient of the KL in the reward. Default: beta."""
    kl_reward_estimator: KLEstimator = "k1"
    """Estimator of the KL in the reward. Recommended: k1, since k2 and k3 push pi away from ref where pi < ref."""
    kl_target: tuple[float] | tuple[float, float] | None = None
    """TARGET [HORIZON]: adapt the KL coefficient (in the reward if there is one, else in the loss) to keep that KL near
    TARGET nats per token. A larger HORIZON (in sequences, default 10000) adapts more slowly. Default: off."""
    load_ref_policy: bool = False
    """Load the reference model and log the KL even if all coefficients are 0."""
    ref_policy_update: tuple[int, float] | None = None
    """FREQ ALPHA: every FREQ steps, set the reference to ALPHA * policy + (1 - ALPHA) * reference. Default: off."""

    # ---- critic
    disable_value: bool = False
    """Train no critic. All values are then 0, so the advantage is the discounted sum of the rewards to come."""
    gamma: float = 1.0
    """Discount factor per token."""
    gae_lambda: float = 1.0
    """GAE's lambda. 1: unbiased advantages. Lower: less variance, but more bias from the critic's errors."""
    bootstrap_truncated: bool = False
    """Use the critic's value of a truncated response's last state as its future reward. Off: 0, as after EOS."""
    adv_norm: Literal["batch", "group", "none"] = "batch"
    """Whiten the advantages. batch: over all tokens of the step. group: over the tokens of each prompt's responses.
    none: no whitening. Truncated responses are included."""
    critic_learning_rate: float = 1e-4
    """Peak learning rate of the critic."""
    critic: tuple[str, ...] = ()
    """NAME=VALUE: use this setting for the critic, not the policy's. Names: model_name_or_path (same vocabulary; a
    value or reward head in it is used), lr_scheduler_type, warmup_steps, weight_decay, max_grad_norm, num_epochs,
    num_mini_batches, gradient_checkpointing (true, false), gae_lambda (of the returns that it learns; VAPO: 1)."""
    value_clip: float | None = 0.5
    """Clip the new value to within this distance of the old one in the value loss (PPO). None disables."""
    critic_warmup: int = 0
    """Number of steps at the start that train only the critic."""
    value_norm: Literal["none", "running", "exp"] = "none"
    """Train the critic on (return - mean) / std. running: mean and std of all returns so far. exp: moving averages."""
    value_norm_beta: float = 0.99995
    """Decay of the moving averages per step (--value_norm exp)."""
    value_norm_eps: float = 1e-5
    """Lower bound of the variance of returns (--value_norm)."""
    dense_reward: Literal["none", "sum", "difference"] = "none"
    """Give intermediate scores (Reward.steps) to their tokens. sum: every score counts in full. difference: only its
    increase over the score before. none: the last token gets the complete reward."""

    # ---- optimizer
    learning_rate: float = 3e-5
    """Peak learning rate. 1e-6 is usual for models of 0.5B parameters and more."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """Learning-rate schedule after the warm-up, over all optimizer steps of the run."""
    warmup_steps: float = 0.0
    """Length of the linear warm-up. Below 1: fraction of all optimizer steps. 1 or more: number of optimizer steps."""
    lr_min_ratio: float = 0.3
    """Final learning rate of the linear and cosine schedules, as a fraction of learning_rate."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm to this; the norm before clipping is logged. 0 disables."""

    def __post_init__(self) -> None:
        bounds = (self.truncated_importance_sampling_ratio_cap, self.importance_sampling_mask)
        if self.async_steps > 0 and bounds == (None, None):  # samples can be stale
            self.truncated_importance_sampling_ratio_cap = 2.0


def check_args(args: Args) -> None:
    """Reject settings that PPO does not support or that would silently misbehave; see also ``checks.check``."""
    mask = args.importance_sampling_mask
    drops_groups = args.filter_zero_std_samples or args.dynamic_sampling_rounds > 0
    if args.num_samples_per_prompt_rollout == 1 and drops_groups:
        process.refuse(
            "--num_samples_per_prompt_rollout 1: --filter_zero_std_samples and --dynamic_sampling_rounds would drop "
            "every prompt, since a group of one has zero variance; use at least 2"
        )
    if not 0 <= args.clip_lower < 1 or args.clip_higher < 0:
        process.refuse(
            f"--clip_lower {args.clip_lower} must be in [0, 1), and --clip_higher {args.clip_higher} at least 0"
        )
    if args.clip_ratio_c is not None and args.clip_ratio_c <= 1.0:
        process.refuse(f"--clip_ratio_c {args.clip_ratio_c}: must be above 1, or a ratio of 1 is clipped; 3 is usual")
    if mask is not None and not 0 <= mask[0] < 1 < mask[1] < math.inf:
        process.refuse(f"--importance_sampling_mask {mask}: LOW must be in [0, 1) and HIGH above 1, e.g. 0.5 5")
    needs_critic = args.bootstrap_truncated or args.critic_warmup > 0 or args.critic != ()
    if args.disable_value and needs_critic:
        process.refuse("--bootstrap_truncated, --critic_warmup and --critic need a critic; drop --disable_value")
    steps = math.inf  # of epochs: unknown before data is read
    if args.total_epochs is None:
        steps = flags.total_steps(args, 0)
    if args.critic_warmup >= max(1, steps):
        process.refuse(f"--critic_warmup {args.critic_warmup} leaves none of the {steps} steps to train the policy")
    if 0 in (args.critic_learning_rate, args.value_clip):
        process.refuse("--critic_learning_rate and --value_clip must be above 0; --value_clip None disables clipping")
    if args.bootstrap_truncated and args.mask_truncated_completions:
        process.refuse(
            "--bootstrap_truncated needs truncated responses in the loss; add --no-mask_truncated_completions"
        )
    critic = settings_of_critic(args)
    if critic.model_name_or_path != args.model_name_or_path:
        model_files.check_model(critic, "--critic model_name_or_path")


def settings_of_critic(args: Args) -> Args:
    """Return the arguments with the settings of the critic. Exits with code 2 for an invalid --critic."""
    changes = {"learning_rate": args.critic_learning_rate}
    for word in args.critic:
        name, _, value = word.partition("=")
        if name not in CRITIC_ARGS:
            given = process.on_a_line(word)
            process.refuse(f"--critic {given}: give NAME=VALUE with a NAME of {', '.join(CRITIC_ARGS)}")
        kind = type(getattr(Args, name))
        try:
            changes[name] = {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
        except (ValueError, KeyError):
            wanted = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
            process.refuse(f"--critic {word}: {value!r} is not {wanted}")
        if kind is not str and not 0 <= changes[name] < math.inf:
            process.refuse(f"--critic {word}: must be 0 or more")
    if "model_name_or_path" in changes:
        changes["override_config"] = None
    found = replace(args, **changes)
    if found.lr_scheduler_type not in SCHEDULES:
        process.refuse(f"--critic lr_scheduler_type={found.lr_scheduler_type}: give one of {', '.join(SCHEDULES)}")
    if 0 in (found.num_epochs, found.num_mini_batches):
        process.refuse("--critic: num_epochs and num_mini_batches must be above 0")
    if found.gae_lambda > 1 or found.num_mini_batches > args.num_unique_prompts_rollout:
        process.refuse("--critic: gae_lambda is at most 1, num_mini_batches at most --num_unique_prompts_rollout")
    checks.check_warmup_steps("--critic warmup_steps=", found.warmup_steps)
    return found


def preflight(args: Args) -> Ready | None:
    """Reject bad settings before torch is imported. Returns the run's data and folder, or None on a sampling rank."""
    return prepare_run(args, Args(), [check_reward_args, check_args], truth_error)


if __name__ == "__main__":  # --help and errors in flags come before the slow imports
    args = flags.parse(Args, __doc__)
    process.choose_allocator()
    ready = preflight(args)

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import nn

import utils
from kl_estimators import rollout_kl
from runtime.engine import isolation, turns, vllm_settings
from runtime.engine.client import Engine, Queue
from runtime.engine.weights import push_weights, release_vllm
from runtime.run import loading, saving
from runtime.run.checkpoints import Checkpoints
from runtime.system import watchdog
from runtime.training import batching, deepspeed_zero, pretrained

# ------------------------------------------------------------------------------------------- the algorithm's arithmetic


def token_rewards(samples: list[Sample], decode: Callable, args) -> np.ndarray:
    """Return the task's reward of every response token, [N], response by response: all on the last token, 0 before.

    With ``--dense_reward`` an intermediate score goes to the token that completes its characters, or of several turns
    to the last one of its turn. ``decode``: token ids -> text.
    """
    found = []
    for sample in samples:
        masked = sample.finish_reason == "length" and args.mask_no_eos_with_zero
        if args.dense_reward != "none" and sample.reward_steps and not masked:
            rewards = dense_rewards(sample, decode, args)
        else:
            rewards = np.zeros(sample.length)
            rewards[-1] = sample.reward
        found.append(rewards)
    return np.concatenate(found)


def dense_rewards(sample: Sample, decode: Callable, args) -> np.ndarray:
    """Return ``token_rewards`` of a response with intermediate scores, shaped as its reward is.

    sum: every score counts in full. difference: what a score adds to the one before; the rewards sum to the response's
    reward. What the last score does not hold (penalties, other verifiers, a reward model) is on the last token.
    """
    ids = sample.response_ids[sample.own()]
    limit = args.max_reward_clip or math.inf

    def shaped(score: float) -> float:
        return max(-limit, min(limit, (score - args.reward_bias) * args.reward_scaling))

    def characters(place: int) -> int:
        return len(decode(ids[: place + 1], skip_special_tokens=False))

    rewards = np.zeros(len(ids))
    start = shaped(0.0) if args.dense_reward == "difference" else 0.0
    before = start
    for end, score in sample.reward_steps:
        if sample.turn_steps:
            place = end - 1
        else:
            place = bisect.bisect_left(range(len(ids)), end, key=characters)
        place = min(place, len(ids) - 1)
        rewards[place] += shaped(score) - (before if args.dense_reward == "difference" else 0.0)
        before = shaped(score)
    rewards[-1] += sample.reward - (before - start)
    return rewards


def gae(
    rewards_N: torch.Tensor,
    values_N: torch.Tensor,
    after_B: torch.Tensor,
    offsets: list[int],
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return generalized advantage estimates and returns of all responses, [N] each, in the dtype given (fp64 here).

    values_N: value of the state before each token. after_B: value after each response's last token, 0 if it ended.
    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1}, A = 0 after the end;  return_t = A_t + V_t
    (arXiv 1506.02438). Nothing passes from one response to the next.
    """
    lengths_B = torch.tensor([b - a for a, b in itertools.pairwise(offsets)])
    inside_BT = torch.arange(lengths_B.max()) < lengths_B[:, None]
    rewards_BT = torch.zeros(inside_BT.shape, dtype=rewards_N.dtype).masked_scatter(inside_BT, rewards_N)
    values_BT = torch.zeros(len(after_B), inside_BT.shape[1] + 1, dtype=values_N.dtype)
    values_BT[:, :-1][inside_BT] = values_N
    values_BT[torch.arange(len(after_B)), lengths_B] = after_B
    advantages_BT = torch.zeros_like(rewards_BT)
    following_B = torch.zeros_like(after_B)
    for t in reversed(range(inside_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * values_BT[:, t + 1] - values_BT[:, t]
        following_B = torch.where(inside_BT[:, t], delta_B + gamma * lam * following_B, 0.0)
        advantages_BT[:, t] = following_B
    return advantages_BT[inside_BT], advantages_BT[inside_BT] + values_N


def whiten(x: torch.Tensor) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + 1e-8) with Bessel's correction, [n] -> [n]. A single element becomes 0."""
    variance = x.var(correction=min(1, len(x) - 1))
    return (x - x.mean()) / (variance + 1e-8).sqrt()


def loss_weights(samples: list[Sample], in_loss: list[int], args: Args) -> torch.Tensor:
    """Return each token's weight in the loss of one optimizer step, [N] in fp32; 0 for samples not in ``in_loss``.

    The weights depend on the numbers of tokens and samples over all ranks, not on how these are cut into micro-batches.
    """
    lengths = [s.length for s in samples]
    tokens = sum(lengths[i] for i in in_loss)
    weights = [0.0] * len(samples)
    for i in in_loss:
        if args.loss_norm == "token":
            weights[i] = 1.0 / tokens
        elif args.loss_norm == "sequence":
            weights[i] = 1.0 / (len(in_loss) * lengths[i])
        elif args.loss_norm == "constant":
            weights[i] = 1.0 / (len(in_loss) * args.max_response_length)
    return torch.tensor(weights).repeat_interleave(torch.tensor(lengths))


def clamp_straight_through(x: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Clamp the value of x to [low, high] and keep its gradient, which torch.clamp would zero outside this range."""
    return x.clamp(low, high).detach() + x - x.detach()


def importance_weights(old_T: torch.Tensor, sampler_T: torch.Tensor, args: Args) -> torch.Tensor:
    """Return the ratio old / sampler of each token, capped and masked by the flags (1 if both are off), [T], detached.

    The sampler is the engine, whose weights may be older than those of ``old_T``, and whose kernels are different.
    """
    cap = args.truncated_importance_sampling_ratio_cap
    mask = args.importance_sampling_mask
    if not cap and mask is None:
        return torch.ones_like(old_T)
    weight_T = (old_T - sampler_T).exp()
    if mask is not None:  # IcePop, arXiv 2510.18855
        low, high = mask
        weight_T = torch.where((weight_T >= low) & (weight_T <= high), weight_T, 0.0)
    return weight_T.clamp(max=cap) if cap else weight_T


@dataclass
class Tokens:
    """Response tokens of a micro-batch: the input of ``token_loss``. Every field is [T] in fp32."""

    logprobs_T: torch.Tensor  # log-probs of the policy, with gradient
    old_T: torch.Tensor  # log-probs before the batch's first optimizer step; with only one step, logprobs_T detached
    ref_T: torch.Tensor  # log-probs of the reference; 0 without a reference
    sampler_T: torch.Tensor  # log-probs of the engine
    advantages_T: torch.Tensor
    weights_T: torch.Tensor  # weights in the loss (``loss_weights``); 0 in an empty micro-batch
    entropy_T: torch.Tensor  # entropy of the policy; with gradient if --entropy_coef is not 0
    full_kl_T: torch.Tensor | None  # exact KL over the vocabulary, with gradient; None unless the loss uses it


def kl_value(name: str, logprobs_T: torch.Tensor, old_T: torch.Tensor, ref_T: torch.Tensor) -> torch.Tensor:
    """Return the estimator of KL(policy || reference) of each token, [T] in nats, in the loss, the reward and the log.

    Its own gradient in the loss is noted, in expectation on fresh samples (policy = old). In the reward both are old.
    """
    d_T = logprobs_T - ref_T
    match name:
        case "k1" | "kl" | "kl1":  # 0
            return d_T
        case "k2" | "kl2" | "mse":  # that of KL(policy || reference)
            return d_T.square() / 2
        case "k3" | "kl3" | "low_var_kl":  # that of KL(reference || policy)
            bounded_T = clamp_straight_through(d_T, -20, math.inf)
            return torch.expm1(-bounded_T) + bounded_T
        case "k4" | "kl4":  # that of KL(policy || reference), on stale samples as well
            return clamp_straight_through(logprobs_T - old_T, -20, 20).exp() * d_T
        case "abs":  # twice that of the total variation
            return d_T.abs()
    raise ValueError(f"unknown KL estimator {name!r}")


def token_loss(t: Tokens, beta: float, args: Args) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of each response token before weighting, and the pieces to be logged; all are [T] in fp32.

    ``beta``: coefficient of the KL in the loss. The mean of each piece that you add is logged as policy/NAME.
    """
    # Policy: PPO's clipped surrogate (arXiv 1707.06347) with separate bounds (DAPO, arXiv 2503.14476).
    ratio_T = (t.logprobs_T - t.old_T).clamp(-20, 20).exp()
    unclipped_T = -t.advantages_T * ratio_T
    clipped_T = -t.advantages_T * ratio_T.clamp(1 - args.clip_lower, 1 + args.clip_higher)
    policy_T = torch.maximum(unclipped_T, clipped_T)
    if args.clip_ratio_c is not None:  # dual clip, arXiv 1912.09729
        bound_T = -t.advantages_T * args.clip_ratio_c
        policy_T = torch.where(t.advantages_T < 0, torch.minimum(policy_T, bound_T), policy_T)
    # Only terms of the sampled token get the importance weight. Entropy and full KL are sums over the vocabulary: a
    # weight would only add noise to them, and would shrink them for tokens whose weight is capped or masked.
    weight_T = importance_weights(t.old_T, t.sampler_T, args)
    policy_T = weight_T * policy_T
    loss_T = policy_T
    if args.entropy_coef != 0:
        loss_T = policy_T - args.entropy_coef * t.entropy_T

    # KL in the loss
    kl_T = torch.zeros_like(loss_T)
    if beta > 0:
        name = args.kl_estimator.removesuffix("+")
        kl_T = t.full_kl_T if name == "full" else kl_value(name, t.logprobs_T, t.old_T, t.ref_T)
        if args.kl_estimator.endswith("+"):  # keep the value, use the gradient of KL(policy || reference)
            d_T = (t.logprobs_T - t.ref_T).clamp(-10, 10)
            slope_T = (t.logprobs_T - t.old_T).clamp(-20, 20).exp().clamp(max=10) * d_T
            kl_T = kl_T.detach() + slope_T.detach() * (t.logprobs_T - t.logprobs_T.detach())
        if name != "full":
            kl_T = weight_T * kl_T
        loss_T = loss_T + beta * kl_T
    clipped_T = (clipped_T > unclipped_T).float()
    return loss_T, {"policy": policy_T, "kl": kl_T, "ratio": ratio_T, "clipped": clipped_T, "weight": weight_T}


# ---------------------------------------------------------------------------------------------------------- the critic


class TokenValues(nn.Module):
    """A transformer with a scalar head that predicts the value of the state before each response token.

    ``head``: the model's own value head, from ``saving.saved_head``. If it is empty, the head starts with zero bias and
    small random weights, equal on every rank, so that all values start near 0. In bf16, inputs and weights of the head
    are bf16; their product and the value are fp32.
    """

    def __init__(self, model, head: dict[str, torch.Tensor]):
        super().__init__()
        self.model = model.base_model  # the transformer without an output head
        size = model.config.get_text_config().hidden_size
        self.head = nn.Linear(size, 1, dtype=model.dtype)
        nn.init.zeros_(self.head.bias)
        generator = torch.Generator().manual_seed(0)
        nn.init.normal_(self.head.weight, std=1 / (size + 1), generator=generator)
        self.head.load_state_dict(self.head.state_dict() | head)

    hidden = utils.TokenLogprobs.hidden  # a base model's base model is itself

    def forward(self, batch: batching.MicroBatch) -> torch.Tensor:
        """Return the value before each response token, [T] in fp32, from the position that predicts the token."""
        hidden_UD = self.hidden(batch).float()
        weight_1D = self.head.weight.float()
        bias_1 = self.head.bias.float()
        values_U = F.linear(hidden_UD, weight_1D, bias_1)[:, 0]
        return values_U[batch.copies]


def make_critic(args: Args, run: utils.Run, vocabulary: int):
    """Build the critic from ``args``, the settings of the critic, in a DeepSpeed engine of its own.

    accelerate would prepare only one model. Exits with code 2 if the critic's model (``--critic model_name_or_path=``)
    has another vocabulary than the policy or does not support the layout of the rows.
    """
    import deepspeed

    flag = "--critic model_name_or_path"
    model = pretrained.load_model(args, run.dtype, run.attention, flag)
    saving.check_saving(model, run.tokenizer, flag)
    size = model.config.get_text_config().vocab_size
    if size != vocabulary:
        process.refuse(f"{flag}={args.model_name_or_path}: {size} tokens, the policy has {vocabulary}")
    checked = utils.TokenLogprobs(model.to(run.device), 1.0, run.sizes.logprob_chunk)
    utils.check_forward(checked, run.layout, 0, args.max_prompt_length + args.max_response_length)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    critic = TokenValues(model, saving.saved_head(args.model, model)).to(run.device)
    config = deepspeed_zero.deepspeed_config(args, run.dtype, run.device.type == "cuda")
    optimizer = utils.make_optimizer(critic.parameters(), args.learning_rate, args)
    engine = deepspeed.initialize(model=critic, optimizer=optimizer, config=config)[0]
    return deepspeed_zero.dither_masters(deepspeed_zero.dedupe_fp32_weights(engine))


@torch.no_grad()
def values_of(
    critic,
    samples: list[Sample],
    bootstrap: list[bool],
    **placement,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the critic's outputs on all samples, on every rank: before each token, [N], and after each response, [B].

    The output after a response is computed if its ``bootstrap`` is True, and is 0 otherwise. To compute it, one token
    is added, whose id does not matter: the state before that token is the state after the response. ``placement``:
    further arguments of ``micro_batches``.
    """
    longer = []
    for sample, one_more in zip(samples, bootstrap, strict=True):
        if one_more:
            sample = replace(sample, response_ids=np.append(sample.response_ids, 0))
        longer.append(sample)
    offsets = batching.token_offsets(longer)
    device = placement["device"]
    outputs = torch.zeros(offsets[-1] + 1, device=device)
    for mb in batching.micro_batches(longer, list(range(len(longer))), **placement):
        outputs[mb.tokens] = critic(mb)
    dist.all_reduce(outputs)  # every token was computed on one rank
    outputs = outputs[:-1]
    extra = [end - 1 for end, one_more in zip(offsets[1:], bootstrap, strict=True) if one_more]
    extra = torch.tensor(extra, dtype=torch.long, device=device)
    after_B = torch.zeros(len(samples), device=device)
    after_B[torch.tensor(bootstrap, device=device)] = outputs[extra]
    kept = torch.ones_like(outputs, dtype=torch.bool).index_fill(0, extra, False)
    return outputs[kept], after_B


def value_loss(
    values_T: torch.Tensor,
    old_T: torch.Tensor,
    targets_T: torch.Tensor,
    clip: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, 1 where it is clipped), [T] each. The loss is half of max((V - R)^2, (V clipped - R)^2).

    V is clipped to old +- clip, which removes the gradient once V has moved further than that in the direction of R.
    """
    error_T = (values_T - targets_T).square()
    if clip is None:
        return error_T / 2, error_T.new_zeros(error_T.shape)
    clipped_T = (values_T.clamp(old_T - clip, old_T + clip) - targets_T).square()
    return error_T.maximum(clipped_T) / 2, (clipped_T > error_T).float()


def explained_variance(values: torch.Tensor, returns: torch.Tensor) -> float | None:
    """Return 1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for a constant one. None if all R are equal."""
    if equal_rewards(returns.amin(), returns.amax()):
        return None
    unexplained = (returns - values).var() / returns.var()
    return 1 - unexplained.item()


class ValueNormalizer:
    """Mean and standard deviation of returns. The critic predicts (return - mean) / std, whatever the rewards' scale.

    running: over all returns so far. exp: first <- beta first + (1 - beta) mean, and likewise for the second moment.
    Each is divided by the sum of its weights, which corrects for the start at 0 (arXiv 1412.6980, section 3).
    """

    def __init__(self, kind: str, beta: float, eps: float):
        self.kind = kind
        self.beta = beta
        self.eps = eps
        self.mean = 0.0
        self.std = 1.0
        self.weight = 0.0
        self.first = 0.0
        self.second = 0.0

    def update(self, returns: torch.Tensor) -> None:
        """Add the returns [n] of a step if all are finite. Denormalize the critic's outputs of that step first."""
        if self.kind == "none" or not returns.isfinite().all():
            return
        keep = self.beta if self.kind == "exp" else 1.0
        new = 1.0 - self.beta if self.kind == "exp" else float(len(returns))
        self.weight = keep * self.weight + new
        self.first = keep * self.first + new * returns.mean().item()
        self.second = keep * self.second + new * returns.square().mean().item()
        self.mean = self.first / self.weight
        variance = self.second / self.weight - self.mean**2
        self.std = math.sqrt(max(variance, self.eps))

    def normalize(self, returns: torch.Tensor) -> torch.Tensor:
        """Convert returns to the critic's units."""
        return (returns - self.mean) / self.std

    def denormalize(self, values: torch.Tensor) -> torch.Tensor:
        """Convert the critic's units to returns."""
        return values * self.std + self.mean


# ---------------------------------------------------------------------------------------------------------- the engine


def vllm_thread(args: Args, dtype, rank: int, world_size: int, stop_ids: list[int], inbox, outbox) -> None:
    """Build and run the engine, which no other thread touches. Messages to this thread (in) and from it (out):

    in   ("generate", batch, [(key, prompt ids, seed[, data row, with --environment])], sampling), ("until", batch),
         ("weights", version, [(name, tensor)]), ("sleep",), ("stop",), ("call", function) for measurements
    out  ("ready",), ("sample", batch, key, *Episode.found()), ("weights", version, seconds in engine.step()),
         ("slept",), ("called", function(llm)), ("error", exception), which the main thread raises again

    The thread generates until the batch of the last "until" message is complete, and only then reads messages (with
    --inflight_updates off, "generate" also acts as "until"). The moment depends on finished requests, not on time,
    so a run can be repeated. Only with --vllm_engines and in-flight updates are messages read as they arrive.
    While a response of several turns (--environment) waits for a tool, the engine computes other responses.
    """
    episodes = turns.episodes_of(args)
    reads_at_once = args.vllm_engines > 0 and args.inflight_updates != "off"
    llm = None
    try:
        with process.without_collections(), isolation.kept_apart():
            llm = build_vllm(args, dtype, rank, world_size)
        engine = llm.llm_engine
        engine.set_weight_version("0")
        version = 0
        asleep = False
        busy = 0.0
        running: dict[str, turns.Episode] = {}  # name of a turn that the engine computes -> its episode
        left: Counter[int | None] = Counter()  # batch -> number of its unfinished requests
        until = None
        outbox.put(("ready",))
        while True:
            while (left.total() == 0 or not inbox.empty()) if reads_at_once else left[until] == 0:
                match inbox.get():
                    case ("stop",):
                        release_vllm(llm)
                        return episodes.close()
                    case ("weights", version, weights):
                        if asleep:  # allocate only the weights: the push needs memory too, so the KV cache comes later
                            llm.wake_up(tags=["weights"])
                        push_weights(llm, weights, args.inflight_updates)
                        if asleep:
                            llm.wake_up(tags=["kv_cache"])
                        asleep = False
                        engine.set_weight_version(str(version))
                        outbox.put(("weights", version, busy))
                        busy = 0.0
                    case ("sleep",):
                        llm.sleep(level=2)
                        asleep = True
                        outbox.put(("slept",))
                    case ("call", function):
                        outbox.put(("called", function(llm)))
                    case ("until", batch):
                        until = batch
                    case ("generate", batch, requests, sampling):
                        for key, prompt_ids, seed, *row in requests:
                            episode = episodes.begin(batch, key, prompt_ids, seed, sampling, *row)
                            running[episode.name] = begin_turn(engine, episode, version, stop_ids)
                        left[batch] += len(requests)
                        if args.inflight_updates == "off":
                            until = batch
            if running:
                started = time.perf_counter()
                outputs = engine.step()
                busy += time.perf_counter() - started
                for output in outputs:
                    episodes.turn_ended(running.pop(output.request_id), output.outputs[0])
            for episode in episodes.due(idle=not running):
                if episode.finish_reason is None:
                    running[episode.name] = begin_turn(engine, episode, version, stop_ids)
                    continue
                left[episode.batch] -= 1
                outbox.put(("sample", episode.batch, episode.key, *episode.found()))
    except BaseException as error:
        try:
            episodes.close()
            if llm is not None:
                release_vllm(llm)
        finally:  # after a device error the release fails, too; still report the first error
            outbox.put(("error", error))


def build_vllm(args: Args, dtype: torch.dtype, rank: int, world_size: int):
    """Build vLLM's ``LLM`` in this process. Call it in the thread that uses the engine."""
    cuda = torch.cuda.is_available()
    given = vllm_settings.engine_settings(args, dtype, world_size)  # sizes for this device, and --vllm_args
    from vllm import LLM

    return LLM(
        model=args.model.name,
        revision=args.model.revision,
        tokenizer=args.tokenizer_name_or_path,
        tokenizer_revision=args.model.revision if args.tokenizer_name_or_path is None else None,
        skip_tokenizer_init=not args.stop_strings,  # input and output are token ids; only stop strings need text
        trust_remote_code=args.trust_remote_code,
        dtype=str(dtype).removeprefix("torch."),
        seed=args.seed + rank // args.vllm_tensor_parallel_size,  # for requests without a seed of their own
        max_model_len=args.engine_length,
        # Off on CPUs: if a chunk ends mid-prompt, vLLM rewinds the random generator, which fails for CPU generators.
        enable_chunked_prefill=None if cuda else False,
        tensor_parallel_size=args.vllm_tensor_parallel_size,
        distributed_executor_backend="external_launcher" if world_size > 1 else None,
        enable_sleep_mode=args.vllm_sleep != "off" and cuda,
        logprobs_mode="processed_logprobs",  # log-probs after the temperature is applied, as in sampling
        generation_config="vllm",  # otherwise the model's generation_config.json would change the sampling
        # Off with in-flight updates: otherwise tokens of the current engine step would get the new weights' version.
        async_scheduling=None if args.inflight_updates == "off" else False,
        disable_log_stats=True,
        use_tqdm_on_load=False,
        **given,
    )


def begin_turn(engine, episode: turns.Episode, version: int, stop_ids: list[int]) -> turns.Episode:
    """Request the next turn of an episode from the engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ids, sampling, seed = episode.request()
    prompt = {"prompt_token_ids": ids, "cache_salt": str(version)}  # the salt excludes cache entries of older weights
    how = SamplingParams(
        **sampling,
        seed=seed,
        stop_token_ids=[] if sampling["ignore_eos"] else stop_ids,
        logprobs=0,  # only the log-prob of the sampled token
        flat_logprobs=True,
        detokenize=bool(sampling["stop"]),
        skip_special_tokens=False,  # a stop string may be one
        include_stop_str_in_output=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request(episode.name, prompt, how)
    return episode


# ------------------------------------------------------------------------------------------------- rollout, evaluation


def collect(engine: Engine, verifiers: Verifiers, batch: Batch, phases: utils.Stopwatch) -> list[Sample]:
    """Run phases 2 to 4 of a requested batch. Returns all ranks' scored samples, sorted by prompt and sample number."""
    if batch.samples is None:
        with phases("generate"):
            for own, sample in engine.arrivals(batch):
                # 3 score: at once, in another process, while the engine decodes the rest
                own.scoring.append(verifiers.submit(sample, own.problems[sample.prompt_id], own.step))
        with phases("score"):
            batch.samples = verifiers.collect(batch.scoring, engine.watch.heartbeat, utils.gather_samples)
    return batch.samples


def select(
    step: int,
    batch: Batch,
    queue: Queue,
    verifiers: Verifiers,
    phases: utils.Stopwatch,
    args: Args,
) -> tuple[list[Sample], dict]:
    """Return the samples to train on, and metrics. Keeps the best samples of each prompt (--generation_size). Replaces
    zero-variance groups and their ``batch.problems`` by those of new prompts (--dynamic_sampling_rounds).
    """
    group = args.num_samples_per_prompt_rollout
    source = queue.source
    source.record(batch.chosen, batch.samples)
    rounds = [batch.samples]
    samples = prompt_order.best_of(batch.samples, group)
    for again in range(1, args.dynamic_sampling_rounds + 1):
        equal = prompt_order.equal_groups(samples)
        if not equal:
            break
        more = queue.ask(len(equal), f"{step}/{again}")
        rounds.append(collect(queue.engine, verifiers, more, phases))
        source.record(more.chosen, more.samples)
        prompt_order.replace_groups(batch.problems, samples, more.problems, prompt_order.best_of(more.samples, group))
    metrics = prompt_order.draw_metrics(rounds, len(batch.problems)) if args.dynamic_sampling_rounds > 0 else {}
    if args.dataset_filter is not None:
        metrics["data/problems"] = source.drop_solved()
    if queue.group > group:
        metrics["reward/generated_mean"] = utils.mean([s.reward for s in rounds[0]])
    return samples, metrics


def evaluate(
    step: int, engine: Engine, verifiers: Verifiers, problems: list[Problem], log, phases: utils.Stopwatch, args: Args
) -> None:
    """Sample and score the held-out problems with the weights after ``step``. All evaluations use the same seeds."""
    if not problems or log.goal_reached:
        return
    with phases("eval"):
        requests, sampling = prompt_order.eval_requests(len(problems), args)
        samples = collect(engine, verifiers, engine.ask(problems, requests, sampling), phases)
    metrics = utils.eval_metrics(samples, problems, step) | {"time/eval": phases.seconds["eval"]}
    log.evaluation(metrics, samples, problems)


# ---------------------------------------------------------------------------------------------------------------- main


@watchdog.ends_all_ranks
def main(args: Args, ready: Ready | None) -> None:
    """Train. ``ready``: data and folder from ``preflight``, or None on a rank of --vllm_engines, which only samples."""
    if ready is None:
        user_files.find("runtime.engine.engine_ranks:serve")(args, vllm_thread)
        return
    run = utils.setup_run(args, ready)  # prints batch sizes, the first prompt, and the expected KL gradient
    if args.dry_run:
        return
    device = run.device
    prompts = args.num_unique_prompts_rollout
    group = args.num_samples_per_prompt_rollout
    updates = args.num_epochs * args.num_mini_batches  # optimizer steps on each batch
    critic_args = settings_of_critic(args)

    watch = watchdog.Watch(args.timeout)  # from here on, a failure on one rank ends all ranks
    accelerator = deepspeed_zero.make_accelerator(args, run.dtype, device)
    verifiers = Verifiers(args, [*run.problems, *run.eval_problems], device, run.dtype)
    model, stop_ids = loading.load_policy(args, run)
    # Build the engine before the models below: it measures free memory as it starts.
    thread = vllm_thread if args.rollout == "vllm" else utils.hf_thread
    engine = Engine(thread, args, run.dtype, run.tokenizer, stop_ids, watch)
    set_seed(args.seed + run.rank)
    reference = utils.load_reference(args, run)
    policy = utils.prepare_policy(model, args, run, stop_ids[0])
    optimizer = utils.make_optimizer(policy.parameters(), args.learning_rate, args)
    policy = deepspeed_zero.dedupe_fp32_weights(accelerator.prepare(policy, optimizer)[0])
    deepspeed_zero.dither_masters(policy)  # bf16: small updates count from the first step on
    critic = None
    if not args.disable_value:
        critic = make_critic(critic_args, run, model.config.get_text_config().vocab_size)
    normalizer = ValueNormalizer(args.value_norm, args.value_norm_beta, args.value_norm_eps)
    kl = utils.make_kl(args)  # has the coefficients kl.loss and kl.reward
    full_in_loss = reference if kl.loss > 0 and args.kl_estimator == "full" else None
    full_in_reward = reference if kl.reward > 0 and args.kl_reward_estimator == "full" else None
    moving = utils.moving_reference(reference, args)
    skips = SimpleNamespace(policy=0, critic=0)  # number of consecutive optimizer steps that were not applied
    queue = Queue(engine, prompt_order.Prompts(run.problems, args), prompt_order.sampling(args), args)
    trainers = [policy] if critic is None else [policy, critic]
    phases = utils.Phases(args, engine, reference, trainers, device)
    log = utils.open_log(args, run)
    parts = {"policy": policy, "reference": moving, "controller": kl.controller, "skips": skips}
    parts |= {"prompts": queue.source.state, "progress": queue.state}
    parts |= {"critic": critic, "normalizer": normalizer}
    checkpoints = Checkpoints(log, args, run.tokenizer, phases, parts, saving.save_model)

    done = checkpoints.load(run.start)
    engine.version = done
    with phases("push"):
        engine.push(utils.engine_weights(policy, args))
    if done == 0 and args.evaluates(0):
        evaluate(0, engine, verifiers, run.eval_problems, log, phases, args)
    queue.resume(done)
    phases.restart()
    for step in range(done + 1, run.total_steps + 1):
        # 1 prompts: request this step's batch and, with --async_steps, later ones; all ranks draw the same prompts
        while queue.last < min(step + args.async_steps, run.total_steps):
            queue.ask(prompts)

        # 2 generate, 3 score: wait for the oldest batch that was requested
        # 4 gather: every rank gets all samples, ordered by prompt and sample number
        batch = queue.next()
        collect(engine, verifiers, batch, phases)
        samples, data_metrics = select(step, batch, queue, verifiers, phases, args)
        offsets = batching.token_offsets(samples)  # response i has the tokens offsets[i]:offsets[i + 1] of the N
        slots = offsets[-1] + 1  # length of a flat array: N tokens, and one slot for empty micro-batches
        sampler_N = batching.flat([s.sampler_logprobs for s in samples], device)
        fresh_N = batching.flat([s.token_versions() == step for s in samples], device)
        engine_N = batching.per_token([s.engine for s in samples], offsets, device).short()
        rewards_PG = torch.tensor([s.reward for s in samples], dtype=torch.float64).view(prompts, group)

        # Which samples take part. in_loss: those in the policy's loss. The critic learns from every sample; without
        # truncated responses it would never learn what truncation costs.
        zero_std_P = equal_rewards(rewards_PG.amin(1), rewards_PG.amax(1))
        every_sample = list(range(len(samples)))
        in_loss = every_sample
        if args.filter_zero_std_samples:
            in_loss = [i for i in in_loss if not zero_std_P[samples[i].prompt_id]]
        if args.mask_truncated_completions:
            in_loss = [i for i in in_loss if samples[i].finish_reason != "length"]

        # 5 log-probs: the reference's if there is one; old ones if updates > 1 or there is a KL in the reward
        need_logprobs = every_sample if kl.reward > 0 else in_loss
        if reference is None and updates == 1:
            need_logprobs = []
        old_N, ref_N, full_kl_N = torch.zeros(3, slots if need_logprobs else 1, device=device).expand(3, slots)
        kl_metrics = {"kl/coef": kl.loss or kl.reward}
        with phases("logprobs"), torch.no_grad():
            for mb in batching.micro_batches(samples, need_logprobs, **run.placement):
                if updates > 1 or kl.reward > 0:
                    old_N[mb.tokens], _, full_kl_T = policy(mb, full_in_reward)
                    if full_kl_T is not None:
                        full_kl_N[mb.tokens] = full_kl_T
                if reference is not None:
                    ref_N[mb.tokens] = reference(mb)[0]
            if need_logprobs:
                for array in (old_N, ref_N, full_kl_N):  # each token was computed on only one rank
                    dist.all_reduce(array)
            sampler_metrics = utils.check_engines(policy, engine, samples, in_loss, step, args, run)
            if reference is not None:
                kl_metrics |= utils.exact_kl(policy, reference, samples, in_loss, run)

        # 5 values: of the state before each token, and of the state after a truncated response that is bootstrapped
        outputs_N = torch.zeros(offsets[-1], device=device)
        after_B = torch.zeros(len(samples), device=device)
        bootstrap = [args.bootstrap_truncated and s.finish_reason == "length" for s in samples]
        if critic is not None:
            with phases("logprobs"):
                outputs_N, after_B = values_of(critic, samples, bootstrap, **run.placement)

        # 6 advantages: one per token. They are whitened over all responses, also those outside the loss, so that EOS
        # gets credit relative to truncation. Every rank computes the same numbers from all tokens, in fp64. KL in the
        # reward is subtracted here.
        task_rewards_N = torch.from_numpy(token_rewards(samples, run.tokenizer.decode, args))
        if kl.reward > 0:
            kl_N = full_kl_N
            if full_in_reward is None:
                kl_N = kl_value(args.kl_reward_estimator, old_N, old_N, ref_N)
            task_rewards_N -= kl.reward * kl_N[:-1].double().cpu()
            kl_metrics["kl/reward_coef"] = kl.reward
            kl_metrics["kl/reward"] = rollout_kl(kl_N, offsets, need_logprobs)
        values_N = normalizer.denormalize(outputs_N.double().cpu())
        after_B = normalizer.denormalize(after_B.double().cpu())
        after_B = torch.where(torch.tensor(bootstrap), after_B, 0.0)
        token_advantages_N, returns_N = gae(task_rewards_N, values_N, after_B, offsets, args.gamma, args.gae_lambda)
        if critic_args.gae_lambda != args.gae_lambda:  # VAPO, arXiv 2504.05118: targets of the critic with less bias
            _, returns_N = gae(task_rewards_N, values_N, after_B, offsets, args.gamma, critic_args.gae_lambda)
        if args.adv_norm == "batch":
            token_advantages_N = whiten(token_advantages_N)
        elif args.adv_norm == "group":
            for first, end in itertools.pairwise(offsets[::group]):
                token_advantages_N[first:end] = whiten(token_advantages_N[first:end])
        for sample, (first, end) in zip(samples, itertools.pairwise(offsets), strict=True):
            sample.advantage = token_advantages_N[first:end].mean().item()
        advantages_N = F.pad(token_advantages_N.float(), (0, 1)).to(device)
        value_metrics = {}
        if critic is not None:
            value_metrics["value/mean"] = values_N.mean().item()
            value_metrics["value/return_mean"] = returns_N.mean().item()
            value_metrics["value/explained_variance"] = explained_variance(values_N, returns_N)
            normalizer.update(returns_N)
            outputs_N = F.pad(outputs_N, (0, 1))
            targets_N = F.pad(normalizer.normalize(returns_N).float(), (0, 1)).to(device)

        # 7 update: epochs x mini-batches x micro-batches; token_loss adds the KL in the loss
        value_totals = Counter()
        groups = sorted({samples[i].prompt_id for i in (in_loss if critic is None else every_sample)})
        critic_epochs = 0 if critic is None else critic_args.num_epochs
        critic_updates = critic_epochs * critic_args.num_mini_batches
        stats = utils.UpdateStats(args, run, engine.count, reference is not None, fresh_N, engine_N, kl_value)
        with phases("update"):
            # The critic's optimizer steps come first; they do not affect those of the policy.
            for epoch, mini in itertools.product(range(critic_epochs), range(critic_args.num_mini_batches)):
                optimizer_step = (step - 1) * critic_updates + epoch * critic_args.num_mini_batches + mini
                critic_lr = utils.learning_rate(optimizer_step, run.total_steps * critic_updates, critic_args)
                deepspeed_zero.set_learning_rate(critic, critic_lr)
                members = utils.mini_batch(groups, step, epoch, mini, critic_args)
                own = [i for i in every_sample if samples[i].prompt_id in members]
                weights_N = F.pad(loss_weights(samples, own, args), (0, 1)).to(device)
                value_stats = utils.TokenStats(device)
                for mb in batching.micro_batches(samples, own, **run.placement):
                    weights_T = weights_N[mb.tokens]
                    loss_T, clipped_T = value_loss(
                        critic(mb), outputs_N[mb.tokens], targets_N[mb.tokens], args.value_clip
                    )
                    loss = (loss_T * weights_T).sum() * run.world_size
                    values = {"tokens": torch.ones_like(loss_T), "loss": loss_T * weights_T, "clipped": clipped_T}
                    value_stats.add(weights_T > 0, values)
                    if mb.is_last:
                        sums, _ = value_stats.reduce()
                    skip = mb.is_last and not math.isfinite(sums["loss"])
                    deepspeed_zero.backward_and_step(critic, loss, mb.is_last, skip)
                value_totals.update(sums, rounds=1)
                applied_to_critic = critic.was_step_applied()
                skips.critic = 0 if applied_to_critic else skips.critic + 1
                stats.skipped += not applied_to_critic
                if applied_to_critic:
                    value_metrics["value/grad_norm"] = float(critic.get_global_grad_norm())

            for epoch, mini in itertools.product(range(args.num_epochs), range(args.num_mini_batches)):
                optimizer_step = (step - 1) * updates + epoch * args.num_mini_batches + mini
                policy_step = optimizer_step - args.critic_warmup * updates  # negative while the critic warms up
                policy_steps = max(1, run.total_steps - args.critic_warmup) * updates
                lr = utils.learning_rate(policy_step, policy_steps, args) if policy_step >= 0 else 0.0
                deepspeed_zero.set_learning_rate(policy, lr)
                members = utils.mini_batch(groups, step, epoch, mini, args)
                mini_in_loss = [i for i in in_loss if samples[i].prompt_id in members]
                if not mini_in_loss or stats.stopped or policy_step < 0:
                    continue
                weights_N = F.pad(loss_weights(samples, mini_in_loss, args), (0, 1)).to(device)
                for mb in batching.micro_batches(samples, mini_in_loss, **run.placement):
                    logprobs_T, entropy_T, full_kl_T = policy(mb, full_in_loss, args.entropy_coef != 0)
                    tokens = Tokens(
                        logprobs_T,
                        old_T=old_N[mb.tokens] if updates > 1 else logprobs_T.detach(),
                        ref_T=ref_N[mb.tokens],
                        sampler_T=sampler_N[mb.tokens],
                        advantages_T=advantages_N[mb.tokens],
                        weights_T=weights_N[mb.tokens],
                        entropy_T=entropy_T,
                        full_kl_T=full_kl_T,
                    )
                    loss_T, pieces = token_loss(tokens, kl.loss, args)
                    stats.add(mb, tokens, loss_T, pieces)
                    loss = (loss_T * tokens.weights_T).sum() * run.world_size  # DeepSpeed takes the mean over ranks
                    skip = mb.is_last and stats.check_step(args.early_stop_imp_ratio)  # all ranks decide the same
                    deepspeed_zero.backward_and_step(policy, loss, mb.is_last, skip)
                stats.stepped(policy, skips, len(mini_in_loss))
        log.check_skips(skips, samples)

        # 8 push: the engine answers later requests with the new weights
        if args.inflight_updates == "off":  # first let the engine finish its batches with the old weights
            for asked in queue.batches:
                collect(engine, verifiers, asked, phases)
        with phases("push"):
            engine.push(utils.engine_weights(policy, args))
        queue.request_probe()
        if moving is not None and step % moving.freq == 0:
            moving.move(policy, args.zero_stage)
        kl.update(kl_metrics.get("kl/reward"), stats.mean_kl(), len(samples))

        # 9 record
        if args.evaluates(step) and step < run.total_steps:
            evaluate(step, engine, verifiers, run.eval_problems, log, phases, args)
        metrics = {
            "step": step,
            "episode": step * prompts * group,
            **utils.sample_metrics(samples, rewards_PG, step),
            **data_metrics,
            **kl_metrics,
            **sampler_metrics,
            **stats.metrics(lr),
            **value_metrics,
            **phases.metrics(offsets[-1], stats.totals["tokens"]),
            **engine.metrics,
        }
        if value_totals["rounds"] > 0:
            metrics["loss/value"] = value_totals["loss"] / value_totals["rounds"]
            metrics["value/clip_frac"] = value_totals["clipped"] / value_totals["tokens"]
            metrics["value/lr"] = critic_lr
        log.step(metrics, samples, batch.problems)
        phases.restart()  # the time of a checkpoint counts towards the next step
        queue.update_state()
        if checkpoints.after_step(step):
            break

    if not checkpoints.stopping:
        evaluate(run.total_steps, engine, verifiers, run.eval_problems, log, phases, args)
        saving.save_model(policy, run.tokenizer, run.folder / "model", args.zero_stage, run.rank)
        if critic is not None:
            saving.save_critic(critic, normalizer, run.tokenizer, run.folder / "critic", args.zero_stage, run.rank)
    utils.end_run(log, checkpoints.stopping, (engine, verifiers, log, watch))


if __name__ == "__main__":
    main(args, ready)

"""GRPO with verifiable rewards, in one file: read it from top to bottom as data goes through a step.

    1 prompts -> 2 generate -> 3 score -> 4 gather -> 5 log-probs -> 6 advantages -> 7 update -> 8 push -> 9 record

Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300): several responses to each prompt, the advantage of
one is its reward against its group's. Chosen here:

* Samples come from vLLM in a thread of the same process, by token ids; only its own ids and log-probs are trained on.
* The samples of a group share one row: a common beginning is computed once (``--batch_layout``). No number changes.
* A token's weight in the loss comes from global counts, before anything is cut up (``--loss_norm``): neither the
  micro-batches, nor padding, nor the number of ranks changes a gradient.
* With one optimizer step a batch there is no pass for old log-probs: the ratio is 1, its gradient that of log pi.
* KL to a reference is off (``--beta 0``, and no reference is loaded). On, you choose the estimator, its gradient, and
  where it goes: into the loss, into the reward, or both. docs/kl.md says what each combination really does.
* Left out: a critic (ppo.py), tools and several turns, tensor-parallel training.

    CPU, two cores       python grpo.py
    one GPU              python grpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --learning_rate 1e-6 \\
                             --num_unique_prompts_rollout 64 --max_response_length 512 --total_steps 200
    N GPUs               accelerate launch --config_file scripts/zero2.yaml --num_processes N grpo.py ...
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import queue
import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

import checks
import data
import runlog
from data import Problem, Sample
from rewards import RewardModel, RewardPool, parse_weights, shape_reward


@dataclass
class Args:
    # ---------------------------------------------------------------------------------------------------- experiment
    exp_name: str = "grpo"
    """First part of the run's name."""
    seed: int = 1
    """Seeds the data split, the order of prompts, every sample, and the shuffling of mini-batches."""
    total_steps: int = 28
    """Batches to sample and train on."""
    total_episodes: int | None = None
    """Instead of total_steps: samples in all, a multiple of prompts times samples per prompt."""
    eval_every: int = 0
    """Evaluate every so many steps, besides before the first and after the last. 0: only those two."""
    best_metric: str | None = None
    """Keep the weights of the evaluation with the largest value of this, for example eval/pass@1, in best/."""
    save_every: int = 0
    """Write a checkpoint every so many steps. 0: only for --save_minutes and when a signal asks for one."""
    save_minutes: float = 30.0
    """Write one when the last is so many minutes old. 0: never."""
    keep_checkpoints: int = 2
    """So many stay, the newest, and the one of the best evaluation. 0: all."""
    resume: str = "auto"
    """auto: go on from the newest checkpoint of this run that is whole. never. Or the folder of a checkpoint."""
    stall_timeout: float = 1800.0
    """Seconds without any progress after which the run prints where it is and ends. 0: never."""
    output_dir: str = field(default_factory=lambda: os.environ.get("RUN_DIR", "runs"))
    """Folder that holds the folders of runs; scripts/submit.py gives one in RUN_DIR."""
    run_name: str | None = None
    """Folder of this run in output_dir. None: exp_name, what differs from the defaults, and the seed."""
    overwrite: bool = False
    """Replace the folder of an earlier run of this name."""
    dry_run: bool = False
    """Check everything, print the derived sizes and the first prompt, load no model, and stop."""
    track: bool = False
    """Log to Weights & Biases as well; without network it goes offline with a warning."""
    wandb_project: str = "rlvr"
    """Project there."""
    wandb_entity: str | None = None
    """Team or user there. None: yours."""
    log_samples: int = 4
    """Samples a step that go to samples.jsonl."""
    log_samples_every: int = 10
    """Show some samples on the console every so many steps. 0: never."""

    # --------------------------------------------------------------------------------------------------------- model
    model_name_or_path: str = "models/SmolLM2-135M-Instruct"
    """Local folder or hub id."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Run model code that comes with the weights."""
    external_lib: str | None = None
    """Python module to import before loading, for example one that registers an architecture."""
    override_config: str | None = None
    """JSON object of fields to change in the model's config."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of weights and sampling; master weights are always fp32. auto: bfloat16 where the hardware multiplies it."""
    attn_implementation: str = "auto"
    """transformers' name: eager, sdpa, flash_attention_2, ... auto: sdpa; eager for bfloat16 on CPUs, faster there."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: a third more time, much less memory."""

    # ---------------------------------------------------------------------------------------------------------- data
    dataset: str = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    """reasoning_gym:NAME?key=value, .jsonl, .json, .parquet or .csv files, a folder saved by datasets, or a hub id."""
    dataset_mixer: str | None = None
    """Several of them instead, as JSON: {"a": 1.0, "b": 500} takes all problems of a, and 500 of b."""
    dataset_split: str = "train"
    """Split of a hub data set or a saved folder."""
    eval_dataset: str | None = None
    """Evaluate on the first eval_prompts problems of this; on none of them is trained. None: on a part of dataset."""
    prompt_key: str | None = None
    """Column of the prompt: text, or a list of chat messages. None: question; known for MATH and countdown."""
    ground_truth_key: str | None = None
    """Column of the truth. None: answer; known for MATH and countdown."""
    verifier: str | None = None
    """A name of docs/rewards.md (math, code, ...), or several with commas. None: as the columns say, or last_number."""
    verifier_key: str | None = None
    """Column that names a row's verifiers, where they differ from row to row; where it is empty --verifier counts."""
    reward_weights: tuple[str, ...] = ()
    """NAME=NUMBER of a verifier or reward_model (default 1); NAME=gate: others count only where this one scores 1."""
    reward_fn: str | None = None
    """Your own verifier instead: path/to/file.py:function, called as function(response, truth, row) -> Reward."""
    reward_timeout: float = 10.0
    """Seconds for one verification; then its process is killed and the score is 0."""
    reward_workers: int = 1
    """Verifier processes on each rank."""
    bad_rows: Literal["raise", "drop"] = "raise"
    """Rows without a prompt or with a truth that its verifier rejects: end the run at the start, or leave them out."""
    allow_unsafe_code_exec: bool = False
    """Let the verifier code run programs with limits only where the kernel gives no namespaces."""
    reward_model_name_or_path: str | None = None
    """A sequence classifier with one output; its score, times its weight, is added to the verifiers'."""
    system_prompt: str | None = None
    """System message before every prompt; "" for none. None: the one data.py has for the data set, if any."""
    chat_template: str | None = None
    """A Jinja file, chatml, tulu, r1 (with think tags), or question_answer. None: the tokenizer's own."""
    max_prompt_length: int = 256
    """Tokens, the template's included."""
    overlong_prompts: Literal["error", "filter", "left", "right"] = "error"
    """Longer prompts: end the run at the start, leave them out, or cut their first or their last tokens off."""
    shuffle: bool = True
    """Take the prompts in a new random order on every pass over the data."""

    # ------------------------------------------------------------------------------------------------------ batch sizes
    num_unique_prompts_rollout: int = 8
    """Prompts a step, over all ranks."""
    num_samples_per_prompt_rollout: int = 8
    """Responses to each: the group."""
    num_mini_batches: int = 1
    """Optimizer steps an epoch; the groups are dealt out evenly."""
    num_epochs: int = 1
    """Passes over each batch of samples."""
    shuffle_mini_batches: bool = True
    """Deal the groups to the mini-batches in a new random order in every epoch."""
    micro_batch_tokens: int = 1024
    """Tokens, padding included, in one forward and backward pass on one device."""
    logprob_micro_batch_tokens: int = 1024
    """The same for passes without gradient (old and reference log-probs)."""
    logprob_chunk: int = 1024
    """Response tokens whose logits exist at the same time."""
    batch_layout: Literal["shared", "padded", "packed"] = "shared"
    """shared: a group in one row, beginnings once. padded: a row each. packed: end to end, for flash attention."""

    # ------------------------------------------------------------------------------------------------------- sampling
    max_response_length: int = 32
    """Tokens; a response that has not ended by then is cut."""
    temperature: float = 1.0
    """Of sampling; the trainer's log-probs are taken at the same temperature."""
    top_p: float = 1.0
    """Must be 1 in training: log-probs of a truncated distribution are not the trainer's."""
    top_k: int = 0
    """Must be 0 (off) in training, for the same reason."""
    do_sample: bool = True
    """Must be on in training: greedy responses to one prompt are all the same."""
    stop: tuple[str, ...] = ()
    """Strings that end a response; they stay part of it."""
    ignore_eos: bool = False
    """Go on to max_response_length whatever is said (for timing)."""
    eval_prompts: int = 64
    """Problems kept for evaluation, never trained on. 0: no evaluation."""
    eval_samples: int = 4
    """Responses to each."""
    eval_temperature: float = 1.0
    """Temperature in evaluation. 0: greedy, one response to each whatever eval_samples says."""
    eval_top_p: float = 1.0
    """Nucleus in evaluation."""
    eval_top_k: int = 0
    """Top-k in evaluation; 0 is off."""

    # ----------------------------------------------------------------------------------------------------------- engine
    rollout: Literal["vllm", "hf"] = "vllm"
    """Who samples: vLLM, or transformers' generate (slow, needs nothing else)."""
    rollout_timeout: float = 1800.0
    """Seconds without a finished sample after which the run ends with an error."""
    vllm_gpu_memory_utilization: float = 0.4
    """Share of a GPU's memory for vLLM: weights and KV cache (on CPUs vllm_kv_cache_gb counts instead)."""
    vllm_kv_cache_gb: float | None = None
    """GiB of KV cache, exactly. None: from the share above on GPUs, 0.5 on CPUs."""
    vllm_enforce_eager: bool | None = None
    """No compilation and no CUDA graphs. None: on for CPUs, where compiling takes longer than a short run."""
    vllm_tensor_parallel_size: int = 1
    """Ranks that share one engine."""
    vllm_max_num_seqs: int = 128
    """Responses decoded at the same time by one engine."""
    vllm_max_num_batched_tokens: int = 8192
    """Tokens in one engine step."""
    vllm_enable_sleep_mode: bool = False
    """On a GPU: give the engine's memory to the trainer between the phases."""

    # -------------------------------------------------------------------------------------------------------- optimizer
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """torch.optim.AdamW (fused) or plain SGD."""
    learning_rate: float = 3e-5
    """Peak learning rate. 1e-6 is usual from 0.5B parameters on."""
    adam_beta1: float = 0.9
    """Decay of the gradient's mean."""
    adam_beta2: float = 0.95
    """Decay of its square."""
    adam_eps: float = 1e-8
    """Added to the root of the square."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """Shape after the warm-up, over all optimizer steps of the run."""
    warm_up_steps: int = 0
    """Optimizer steps of linear warm-up."""
    lr_min_ratio: float = 0.3
    """Where linear and cosine end, as a share of learning_rate."""
    max_grad_norm: float = 1.0
    """Clip the global gradient norm; the logged norm is the one before. 0: off."""
    zero_stage: Literal[1, 2, 3] = 2
    """DeepSpeed ZeRO: 1 shards optimizer states, 2 gradients as well, 3 parameters as well. (0 has no check of NaN.)"""
    offload_optimizer: bool = False
    """Keep master weights and optimizer states in CPU memory."""
    offload_param: bool = False
    """Keep parameters in CPU memory (ZeRO 3)."""

    # -------------------------------------------------------------------------------------------------------- algorithm
    advantage_normalization_type: Literal["standard", "centered", "leave_one_out"] = "standard"
    """(r - mean) / (std + 1e-6), with the unbiased std; r - mean (Dr. GRPO); r - mean of the others (RLOO)."""
    filter_zero_std_samples: bool = False
    """Leave groups of equal reward out of the loss's counts (DAPO): few informative ones then weigh as much as many."""
    dynamic_sampling_rounds: int = 0
    """Draw new prompts for groups of equal reward at most so many times a step (DAPO); what then remains is kept."""
    loss_norm: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens (DAPO), over sequences of their token means (GRPO), or sum / max length (Dr. GRPO)."""
    clip_lower: float = 0.2
    """The ratio is clipped below at 1 - clip_lower."""
    clip_higher: float = 0.2
    """And above at 1 + clip_higher."""
    clip_ratio_c: float | None = None
    """Dual clip: at most this times |advantage| where the advantage is negative, for example 3. None: off."""
    entropy_coeff: float = 0.0
    """Bonus for the entropy of every token's distribution."""
    early_stop_imp_ratio: float | None = None
    """Give up the rest of an update once the mean ratio of an optimizer step is above this. None: never."""
    truncated_importance_sampling_ratio_cap: float | None = None
    """Weight the policy loss by min(trainer's / sampler's probability, cap), for example 2. None: off."""
    max_sampler_diff: float = 0.1
    """End the run when sampler and trainer differ by more nats a token on average (fp32: a 1000th of it). 0: off."""
    reward_scaling: float = 1.0
    """The reward is (score - reward_bias) * reward_scaling, then clipped."""
    reward_bias: float = 0.0
    """See reward_scaling."""
    max_reward_clip: float | None = None
    """Clip the reward to plus or minus this. None: off."""
    mask_no_eos_with_zero: bool = True
    """A response that was cut scores 0, whatever it says."""
    non_stop_penalty: float = 0.0
    """Taken from the reward of a response that was cut."""
    overlong_buffer: int = 0
    """Tokens before max_response_length over which up to 1 is taken from the reward (DAPO). 0: off."""
    repetition_penalty: float = 0.0
    """Times the share of a response's runs of 8 tokens that stood in it before, taken from the reward. 0: off."""
    mask_truncated_completions: bool = True
    """Leave responses that were cut out of the loss and out of its counts, not out of the group's mean (DAPO)."""

    # --------------------------------------------------------------------------------------------------------------- KL
    beta: float = 0.0
    """Coefficient of the KL to the reference. 0: no KL and no reference model."""
    kl_placement: Literal["none", "loss", "reward", "both"] = "loss"
    """Where it enters."""
    kl_estimator: Literal[
        "k1", "k2", "k3", "k4", "abs", "full", "kl", "kl1", "mse", "kl2", "low_var_kl", "kl3", "kl4"
    ] = "k3"
    """d = log pi - log ref: k1 d, k2 d^2/2, k3 exp(-d)-1+d, k4 ratio*d, abs |d|, full vocabulary; others' names too."""
    kl_gradient: Literal["naive", "unbiased"] = "unbiased"
    """In the loss: the formula as written, differentiated, or the same value with the gradient of the reverse KL."""
    kl_reward_norm: Literal["outside", "inside"] = "outside"
    """In the reward: added after the group normalisation (return-to-go), or to the reward before it (as verl does)."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """adaptive: beta moves so that the KL of a sequence comes to kl_target."""
    kl_target: float = 6.0
    """Nats a sequence."""
    kl_horizon: float = 10000.0
    """Sequences over which the controller acts."""
    ref_policy_update_freq: int = 0
    """Move the reference every so many steps. 0: never."""
    ref_policy_alpha: float = 1.0
    """reference = alpha * policy + (1 - alpha) * reference. 1: a copy."""
    offload_ref: bool = False
    """On a GPU: keep the reference in CPU memory between its passes."""
    kl_full_samples: int = 4
    """Samples a step whose KL over the whole vocabulary is logged, whatever the estimator: its truth. 0: none."""


def check_args(args: Args) -> None:
    """Refuse what GRPO cannot do, or what would not mean what it says. checks.check_args has what all scripts share."""
    samples = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    referee, adaptive = args.beta > 0 and args.kl_placement != "none", args.kl_controller == "adaptive"
    for wrong, message in (
        (
            args.num_samples_per_prompt_rollout == 1,
            f"--num_samples_per_prompt_rollout 1: a group of one has no mean of others and no standard deviation "
            f"(--advantage_normalization_type {args.advantage_normalization_type}); use at least 2",
        ),
        (
            not 0 <= args.clip_lower < 1 or args.clip_higher < 0,
            f"--clip_lower {args.clip_lower} must be in [0, 1) and --clip_higher {args.clip_higher} not negative",
        ),
        (
            args.clip_ratio_c is not None and args.clip_ratio_c <= 1.0,
            f"--clip_ratio_c {args.clip_ratio_c}: must be above 1, or it caps ratios that are fine; usual is 3",
        ),
        (
            adaptive and not (referee and args.kl_target > 0 and args.kl_horizon > 0),
            "--kl_controller adaptive needs --beta, --kl_target and --kl_horizon above 0, and a --kl_placement",
        ),
        (
            adaptive and 0.2 * samples >= args.kl_horizon,
            f"--kl_horizon {args.kl_horizon:g} is too short for {samples} samples a step; beta could reach 0",
        ),
        (
            args.ref_policy_update_freq > 0 and not referee,
            "--ref_policy_update_freq moves a reference that --beta 0 or --kl_placement none does not load",
        ),
    ):
        if wrong:
            data.refuse(message)


# ------------------------------------------------------------------------------------------- the algorithm's arithmetic


def group_advantages(rewards_PG, kind: str):
    """Rewards [prompts, group] -> advantages [prompts, group]; fp64. Equal rewards give exactly 0.

    standard: (r - mean) / (std + 1e-6), std with Bessel's correction; centered: r - mean (Dr. GRPO, arXiv 2503.20783);
    leave_one_out: r - mean of the others = (r - mean) G / (G - 1) (RLOO, arXiv 2402.14740).
    """
    group = rewards_PG.shape[1]
    centered = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if kind == "standard":
        centered = centered / (rewards_PG.std(1, keepdim=True) + 1e-6)
    elif kind == "leave_one_out":
        centered = centered * group / (group - 1)
    # Rounding leaves a residue in the mean of equal rewards, and the division would blow it up.
    equal = rewards_PG.amax(1, keepdim=True) == rewards_PG.amin(1, keepdim=True)
    return centered.masked_fill(equal, 0.0)


def return_to_go(values_N, offsets: list[int]):
    """Sums from each token to the end of its own response. [N] -> [N]; response i is offsets[i]:offsets[i + 1]."""
    import torch

    return torch.cat([values_N[a:b].flip(0).cumsum(0).flip(0) for a, b in itertools.pairwise(offsets)])


def loss_weights(samples: list[Sample], indices: list[int], args: Args):
    """Every token's weight in the loss of one optimizer step, [N] in fp32; 0 outside the samples ``indices``.

    Computed from the counts of all ranks before anything is cut into micro-batches, so cutting changes nothing.
    """
    import torch

    lengths = [len(s.response_ids) for s in samples]
    weights = [0.0] * len(samples)
    for i in indices:
        if args.loss_norm == "token":
            weights[i] = 1.0 / sum(lengths[j] for j in indices)
        elif args.loss_norm == "sequence":
            weights[i] = 1.0 / (len(indices) * lengths[i])
        elif args.loss_norm == "constant":
            weights[i] = 1.0 / (len(indices) * args.max_response_length)
    return torch.tensor(weights).repeat_interleave(torch.tensor(lengths))


def stop_at(x, low: float, high: float):
    """x, but its value stays in [low, high]; its gradient goes on outside, as torch.clamp's would not."""
    return x.clamp(low, high).detach() + x - x.detach()


def token_loss(logprobs, old, ref, sampler, advantages, entropy, full_kl, beta: float, args: Args):
    """Loss of every response token of a micro-batch, before weighting, and its pieces for the log. All [T], fp32.

    logprobs: the policy's, with gradient. old: the policy's before the first optimizer step on this batch, equal to
    logprobs when there is only one. ref: the reference's, or None. sampler: the engine's. full_kl: KL over the whole
    vocabulary, with gradient, or None.
    """
    import torch

    # Policy: PPO's clipped surrogate (arXiv 1707.06347), its two bounds set apart (DAPO, arXiv 2503.14476).
    ratio = (logprobs - old).clamp(-20, 20).exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - args.clip_lower, 1 + args.clip_higher)
    policy = torch.maximum(unclipped, clipped)
    if args.clip_ratio_c is not None:  # dual clip, arXiv 1912.09729
        policy = torch.where(advantages < 0, torch.minimum(policy, -advantages * args.clip_ratio_c), policy)
    if args.truncated_importance_sampling_ratio_cap is not None:  # sampler against trainer, not old against new
        policy = policy * (old - sampler).exp().clamp(max=args.truncated_importance_sampling_ratio_cap)
    loss = policy - args.entropy_coeff * entropy

    # KL in the loss. naive differentiates the formula as it stands, whatever that then optimises: see docs/kl.md.
    kl = torch.zeros_like(loss)
    if ref is not None and args.kl_placement in ("loss", "both"):
        d = logprobs - ref
        if args.kl_estimator in ("k1", "kl", "kl1"):
            kl = d  # expected gradient: 0 on fresh samples
        elif args.kl_estimator in ("k2", "kl2", "mse"):
            kl = d.square() / 2  # of KL(policy || reference) on fresh samples
        elif args.kl_estimator in ("k3", "kl3", "low_var_kl"):
            kl = torch.expm1(-stop_at(d, -20, math.inf)) + stop_at(d, -20, math.inf)  # of KL(reference || policy)
        elif args.kl_estimator in ("k4", "kl4"):
            kl = stop_at(logprobs - old, -20, 20).exp() * d  # of KL(policy || reference), on stale samples too
        elif args.kl_estimator == "abs":
            kl = d.abs()  # of twice the total variation
        elif args.kl_estimator == "full":
            kl = full_kl  # exact, value and gradient
        if args.kl_gradient == "unbiased" and args.kl_estimator != "full":  # this value, gradient of KL(policy || ref)
            slope = (logprobs - old).clamp(-20, 20).exp().clamp(max=10) * d.clamp(-10, 10)
            kl = kl.detach() + slope.detach() * (logprobs - logprobs.detach())
        loss = loss + beta * kl
    return loss, {"policy": policy, "kl": kl, "ratio": ratio, "clipped": (clipped > unclipped).float()}


# -------------------------------------------------------------------------------------------------------- vLLM's thread


def vllm_thread(args: Args, dtype, rank: int, world_size: int, stop_ids: list[int], inbox, outbox) -> None:
    """Builds the engine and is the only one to touch it. Messages, taken between two engine steps:

    in   ("generate", [(key, prompt ids, seed)], sampling), ("weights", [(name, tensor)]), ("sleep",), ("stop",)
    out  ("ready",), ("sample", key, response ids, log-probs, finish reason, version), ("weights", version), ("slept",),
         ("error", exception): whatever goes wrong here is raised again in the main thread
    """
    try:
        import torch

        cuda, engine_id = torch.cuda.is_available(), rank // args.vllm_tensor_parallel_size
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # a thread starts on device 0
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from utils import push_weights

        memory = {"gpu_memory_utilization": args.vllm_gpu_memory_utilization} if cuda else {}
        if args.vllm_kv_cache_gb is not None or not cuda:
            memory["kv_cache_memory_bytes"] = int((args.vllm_kv_cache_gb or 0.5) * 2**30)
        llm = LLM(
            model=args.model_name_or_path,
            revision=args.revision,
            tokenizer_revision=args.revision,
            trust_remote_code=args.trust_remote_code,
            hf_overrides=json.loads(args.override_config) if args.override_config else {},
            dtype=str(dtype).removeprefix("torch."),
            seed=args.seed + engine_id,  # equal seeds would make all engines say the same
            max_model_len=args.max_prompt_length + args.max_response_length,
            max_num_seqs=args.vllm_max_num_seqs,
            max_num_batched_tokens=max(args.vllm_max_num_batched_tokens, args.vllm_max_num_seqs),
            enforce_eager=not cuda if args.vllm_enforce_eager is None else args.vllm_enforce_eager,
            tensor_parallel_size=args.vllm_tensor_parallel_size,
            distributed_executor_backend="external_launcher" if world_size > 1 else None,
            enable_sleep_mode=args.vllm_enable_sleep_mode and cuda,
            logprobs_mode="processed_logprobs",  # of the distribution sampled from: temperature applied
            generation_config="vllm",  # else a model's generation_config.json changes the sampling unasked
            block_size=None if cuda else 32,  # the CPU's 128 would share no prompt shorter than that
            disable_log_stats=True,
            **memory,
        )
        engine, version, asleep = llm.llm_engine, 0, False
        outbox.put(("ready",))
        keys: dict[str, tuple] = {}
        while True:
            while not inbox.empty() or not engine.has_unfinished_requests():
                kind, *body = inbox.get()
                if kind == "stop":
                    return
                elif kind == "weights":
                    if asleep:  # memory for the weights first, for the KV cache once the push needs no more
                        llm.wake_up(tags=["weights"])
                    push_weights(llm, body[0])
                    if asleep:
                        llm.wake_up(tags=["kv_cache"])
                    asleep, version = False, version + 1
                    outbox.put(("weights", version))
                elif kind == "sleep":
                    llm.sleep(level=2)
                    asleep = True
                    outbox.put(("slept",))
                elif kind == "generate":
                    requests, sampling = body
                    for key, prompt_ids, seed in requests:
                        params = SamplingParams(
                            **sampling,
                            seed=seed,
                            stop_token_ids=[] if sampling["ignore_eos"] else stop_ids,
                            logprobs=0,  # of the sampled token alone
                            flat_logprobs=True,
                            detokenize=bool(sampling["stop"]),
                            include_stop_str_in_output=True,
                            output_kind=RequestOutputKind.FINAL_ONLY,
                        )
                        name = f"{len(keys)}"
                        keys[name] = key
                        engine.add_request(name, {"prompt_token_ids": prompt_ids}, params)
            for output in engine.step():
                answer = output.outputs[0]
                ids, logprobs = list(answer.token_ids), list(answer.logprobs.logprobs)[: len(answer.token_ids)]
                outbox.put(("sample", keys[output.request_id], ids, logprobs, answer.finish_reason, version))
    except BaseException as error:
        outbox.put(("error", error))


def main(args: Args) -> None:
    # Whatever can be refused is refused here, before torch is imported.
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    runlog.listen_for_signals()
    checks.check_launch(world_size)
    checks.check_args(args, world_size)
    check_args(args)
    checks.check_model(args)
    checks.check_disk(args)
    problems, eval_problems = data.load_problems(args)
    folder, start = runlog.open_run(args, Args(), world_size)
    prompts, group = args.num_unique_prompts_rollout, args.num_samples_per_prompt_rollout
    total_steps = args.total_steps if args.total_episodes is None else args.total_episodes // (prompts * group)
    updates = args.num_epochs * args.num_mini_batches  # optimizer steps on each batch
    beta = args.beta if args.kl_placement != "none" else 0.0
    kl_in_reward = beta > 0 and args.kl_placement in ("reward", "both")

    runlog.prepare_environment()
    import torch
    import torch.distributed as dist
    from transformers import AutoTokenizer

    import utils
    from checkpoints import Checkpoints
    from kl_estimators import AdaptiveKLController, kl_reward, kl_setting_message, kl_values

    if args.external_lib is not None:
        importlib.import_module(args.external_lib)
    device, dtype, attention = utils.resolve_device(args)
    tokenizer = AutoTokenizer.from_pretrained(
        args.model_name_or_path, revision=args.revision, trust_remote_code=args.trust_remote_code
    )
    problems, eval_problems = data.render_problems(problems, eval_problems, tokenizer, args)
    meaning, warnings = kl_setting_message(
        args.kl_placement, args.kl_estimator, args.kl_gradient, beta, updates, args.kl_reward_norm
    )
    if beta > 0 and args.filter_zero_std_samples:
        warnings.append("KL: --filter_zero_std_samples leaves groups of equal reward without a pull to the reference")
    if rank == 0:
        runlog.print_header(args, folder, problems, tokenizer, total_steps, world_size, f"{device.type} {dtype}")
        print("\n".join([meaning, *(f"warning: {line}" for line in warnings)]), flush=True)
    if args.dry_run:
        return

    accelerator = utils.make_accelerator(args, dtype, device)
    with utils.Watch(args.stall_timeout) as watch:  # from here on, a failure on one rank ends all of them
        verifiers, weights = {p.verifier for p in [*problems, *eval_problems]}, parse_weights(args.reward_weights)
        pool = RewardPool(args.reward_workers, args.reward_timeout, verifiers, weights, args.allow_unsafe_code_exec)
        model = utils.load_model(args, dtype, attention)
        if wrong := pool.check([*problems, *eval_problems]):
            data.refuse(f"--reward_fn: {wrong}")
        stop_ids = utils.stop_token_ids(model, tokenizer)
        # The engine is built first: it measures free memory and changes global settings of torch while it is.
        inbox, outbox = queue.Queue(), queue.Queue()
        rollout = vllm_thread if args.rollout == "vllm" else utils.hf_thread
        thread = threading.Thread(
            target=rollout, args=(args, dtype, rank, world_size, stop_ids, inbox, outbox), daemon=True, name="rollout"
        )
        thread.start()
        watch.receive(outbox, thread, args.rollout_timeout, "engine")
        utils.seed_everything(args.seed + rank)

        if args.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        reference = None
        if beta > 0:
            reference = utils.TokenLogprobs(
                utils.load_model(args, dtype, attention).eval(), args.temperature, args.logprob_chunk
            )
            reference.requires_grad_(False).to("cpu" if args.offload_ref else device)
        full_reference = reference if args.kl_estimator == "full" else None
        policy = utils.TokenLogprobs(model.to(device), args.temperature, args.logprob_chunk)
        utils.check_forward(policy, args.batch_layout, stop_ids[0])
        optimizer = utils.make_optimizer(policy.parameters(), args.learning_rate, args)
        policy, optimizer = accelerator.prepare(policy, optimizer)
        name = args.reward_model_name_or_path
        scorer = RewardModel(name, args.logprob_micro_batch_tokens, device, dtype) if name is not None else None
        adaptive = args.kl_controller == "adaptive"
        controller = AdaptiveKLController(beta, args.kl_target, args.kl_horizon) if adaptive else None
        clock = utils.Stopwatch()
        data_digest = runlog.data_digest(problems, eval_problems)
        log = runlog.RunLog(folder, args, world_size, total_steps, rank == 0, start, data_digest)
        # What a step hands on to the next besides the parts below; position: prompts drawn so far.
        progress = SimpleNamespace(skipped_in_a_row=0, position=0)
        parts = {"policy": policy, "controller": controller, "progress": progress}
        parts["reference"] = reference if args.ref_policy_update_freq > 0 else None
        checkpoints = Checkpoints(log, args, tokenizer, clock, parts)
        restored = checkpoints.load(start)  # the step after which it was saved; 0 in a new run
        sampling = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
        sampling |= {"max_tokens": args.max_response_length, "stop": list(args.stop), "ignore_eos": args.ignore_eos}
        layout = {"layout": args.batch_layout, "rank": rank, "world_size": world_size, "dtype": dtype, "device": device}

        def answer(batch: list[Problem], wanted: list[tuple[int, int, int]], sampling: dict) -> list[Sample]:
            """Phases 2 to 4. ``wanted``: (place in ``batch``, sample number, seed), the same list on every rank.

            Returns the samples of all ranks, ordered by place and number, on every rank.
            """
            # 2 generate: engine e takes the places e, e + engines, ...; samples come back one by one as they end.
            # Ranks that share an engine all sample the same; the first of them hands the answers in.
            engine, shard = divmod(rank, args.vllm_tensor_parallel_size)
            engines = world_size // args.vllm_tensor_parallel_size
            mine = [((place, k), batch[place].prompt_ids, s) for place, k, s in wanted if place % engines == engine]
            samples, futures = [], []
            with clock("generate"):
                inbox.put(("generate", mine, sampling))
                for _ in mine:
                    message = watch.receive(outbox, thread, args.rollout_timeout, "sample")
                    _, (place, k), ids, logprobs, finish_reason, version = message
                    if not all(math.isfinite(x) for x in logprobs):
                        raise RuntimeError("the sampler's log-probs are not finite: its weights are broken")
                    sample = Sample(place, k, batch[place].prompt_ids, ids, logprobs, finish_reason, restored + version)
                    sample.response = tokenizer.decode(ids, skip_special_tokens=True)
                    # 3 score: at once, in another process, while the rest still decodes
                    if shard == 0:
                        problem = batch[place]
                        samples.append(sample)
                        futures.append(pool.submit(problem.verifier, sample.response, problem.truth, problem.row))
            with clock("score"):
                found = []
                for future in futures:
                    found.append(pool.result(future))
                    watch.beat()
                if scorer is not None:
                    found = scorer.add(found, [(batch[s.prompt_id].messages, s.response) for s in samples], weights)
                for sample, reward in zip(samples, found, strict=True):
                    shape_reward(sample, reward, args)
                # 4 gather
                return utils.gather_samples(samples)

        def evaluate(step: int) -> None:
            """Answer the held-out problems with the weights after ``step``; the same seeds in every evaluation."""
            if not eval_problems:
                return
            with clock("eval"):
                samples = answer(eval_problems, *data.eval_requests(len(eval_problems), args))
            if log.evaluation(utils.eval_metrics(samples, eval_problems, step)):
                utils.save_model(policy, tokenizer, folder / "best", args.zero_stage, rank)

        def push() -> None:
            """Phase 8. Waits for the acknowledgement: the engine reads the trainer's own tensors."""
            with clock("push"):
                inbox.put(("weights", utils.current_weights(policy, args.zero_stage)))
                watch.receive(outbox, thread, args.rollout_timeout, "acknowledgement of new weights")

        push()
        if restored == 0:
            evaluate(0)

        clock.restart()
        for step in range(restored + 1, total_steps + 1):
            kl_coef = controller.coef if adaptive else beta

            # 1 prompts: the same list on every rank
            chosen = data.prompts_at(progress.position, prompts, len(problems), args.seed, args.shuffle)
            progress.position += prompts
            batch = [problems[i] for i in chosen]
            wanted = data.requests(chosen, group, args.seed, step)

            # 2 generate, 3 score, 4 gather
            samples = answer(batch, wanted, sampling)
            draws = [list(samples)]  # dynamic sampling: the next prompts in place of those with equal rewards
            while len(draws) <= args.dynamic_sampling_rounds and (equal := data.equal_groups(samples)):
                chosen = data.prompts_at(progress.position, len(equal), len(problems), args.seed, args.shuffle)
                progress.position, more = progress.position + len(equal), [problems[i] for i in chosen]
                draws.append(answer(more, data.requests(chosen, group, args.seed, f"{step}/{len(draws)}"), sampling))
                data.replace_groups(batch, samples, more, draws[-1])
            if args.vllm_enable_sleep_mode:
                inbox.put(("sleep",))
                watch.receive(outbox, thread, args.rollout_timeout, "sleep of the engine")
            offsets = utils.token_offsets(samples)  # response i is tokens offsets[i] to offsets[i + 1] of the N
            rewards_PG = torch.tensor([s.reward for s in samples], dtype=torch.float64).view(prompts, group)
            zero_std_P = rewards_PG.amax(1) == rewards_PG.amin(1)
            counted = [
                i
                for i, s in enumerate(samples)
                if not (args.filter_zero_std_samples and zero_std_P[s.prompt_id])
                and not (args.mask_truncated_completions and s.finish_reason == "length")
            ]
            # Without KL and entropy a group of equal rewards has a gradient of exactly 0: it counts, but costs nothing.
            inert = beta == 0 and args.entropy_coeff == 0
            trained = [i for i in counted if not (inert and zero_std_P[samples[i].prompt_id])]

            # 5 log-probs: reference (only if beta > 0); old (only if more than one optimizer step, or for the reward)
            sampler_N = torch.tensor([x for s in samples for x in s.sampler_logprobs], device=device)
            old_N, ref_N, full_kl_N = torch.zeros(3, offsets[-1], device=device)
            exact_kl = torch.zeros(2, device=device)  # sum and number of tokens of the few samples it is taken on
            with clock("logprobs"), torch.no_grad():
                if trained and (beta > 0 or updates > 1):
                    if reference is not None:
                        reference.to(device)
                    for mb in utils.micro_batches(samples, trained, budget=args.logprob_micro_batch_tokens, **layout):
                        if updates > 1 or kl_in_reward:
                            old_T, _, full_kl_T = policy(mb, full_reference)
                            old_N[mb.tokens] += old_T * mb.scale
                            if full_kl_T is not None:
                                full_kl_N[mb.tokens] += full_kl_T * mb.scale
                        if reference is not None:
                            ref_N[mb.tokens] += reference(mb)[0] * mb.scale
                    few = trained[: args.kl_full_samples] if reference is not None else []
                    for mb in utils.micro_batches(samples, few, budget=args.logprob_micro_batch_tokens, **layout):
                        full_kl_T = policy(mb, reference)[2] * mb.scale
                        exact_kl += torch.stack([full_kl_T.sum(), mb.scale * torch.ones_like(full_kl_T).sum()])
                    for x in (old_N, ref_N, full_kl_N, exact_kl):  # every token was computed on one rank
                        dist.all_reduce(x)
                    if args.offload_ref and full_reference is None:
                        reference.to("cpu")

            # 6 advantages: one a response, from its group's task rewards; KL in the reward enters here, one a token
            advantages_PG = group_advantages(rewards_PG, args.advantage_normalization_type)
            penalty_N = torch.zeros(offsets[-1], device=device)
            if kl_in_reward:
                all_N = torch.ones(offsets[-1], dtype=torch.bool, device=device)
                kl_N = kl_reward(old_N, ref_N, all_N, estimator=args.kl_estimator, full_kl=full_kl_N)
                penalty_N = kl_coef * return_to_go(kl_N, offsets)
                if args.kl_reward_norm == "inside":  # whole responses, before the statistics, as verl does
                    penalty_PG = penalty_N[offsets[:-1]].double().cpu().view(prompts, group)
                    advantages_PG = group_advantages(rewards_PG - penalty_PG, args.advantage_normalization_type)
                    penalty_N = torch.zeros_like(penalty_N)
            for sample, advantage in zip(samples, advantages_PG.flatten().tolist(), strict=True):
                sample.advantage = advantage
            advantages_N = (
                torch.tensor([s.advantage for s in samples for _ in s.response_ids], device=device) - penalty_N
            )

            # 7 update: epochs x mini-batches x micro-batches
            totals, peaks, applied, skipped, stopped = Counter(), Counter(), 0, 0, False
            grad_norm, groups = 0.0, sorted({samples[i].prompt_id for i in counted})
            with clock("update"):
                for epoch, mini in itertools.product(range(args.num_epochs), range(args.num_mini_batches)):
                    optimizer_step = (step - 1) * updates + epoch * args.num_mini_batches + mini
                    lr = utils.learning_rate(optimizer_step, total_steps * updates, args)
                    for parameter_group in policy.optimizer.param_groups:
                        parameter_group["lr"] = lr
                    order = list(groups)
                    if args.shuffle_mini_batches:
                        random.Random(f"{args.seed}/{step}/{epoch}").shuffle(order)
                    share = len(order) / args.num_mini_batches  # groups that were dropped leave uneven shares
                    members = set(order[round(mini * share) : round((mini + 1) * share)])
                    indices = [i for i in trained if samples[i].prompt_id in members]
                    if not indices or stopped:
                        continue
                    weights_N = loss_weights(samples, [i for i in counted if samples[i].prompt_id in members], args)
                    weights_N = weights_N.to(device)
                    micro_batches = utils.micro_batches(samples, indices, budget=args.micro_batch_tokens, **layout)
                    stats = utils.TokenStats(device)
                    for mb in micro_batches:
                        logprobs_T, entropy_T, full_kl_T = policy(mb, full_reference, args.entropy_coeff != 0)
                        old_T = old_N[mb.tokens] if updates > 1 else logprobs_T.detach()
                        ref_T = ref_N[mb.tokens] if beta > 0 else None
                        sampler_T, weights_T = sampler_N[mb.tokens], weights_N[mb.tokens] * mb.scale
                        loss_T, parts = token_loss(
                            *(logprobs_T, old_T, ref_T, sampler_T, advantages_N[mb.tokens], entropy_T, full_kl_T),
                            kl_coef,
                            args,
                        )
                        loss = (loss_T * weights_T).sum() * world_size  # DeepSpeed takes the mean over ranks

                        stats.add(
                            weights_T > 0,
                            {
                                "tokens": torch.ones_like(old_T),
                                "loss": loss_T * weights_T,
                                "loss_policy": parts["policy"] * weights_T,
                                "loss_kl": parts["kl"] * weights_T,
                                "ratio": parts["ratio"],
                                "clipped": parts["clipped"],
                                "approx_kl": parts["ratio"] - 1 - (logprobs_T - old_T),
                                "entropy": entropy_T,
                                "sampler_diff": (old_T - sampler_T).abs(),
                                **(kl_values(logprobs_T, old_T, ref_T, weights_T != 0) if beta > 0 else {}),
                            },
                        )
                        last = mb is micro_batches[-1]
                        if last:
                            sums, maxima = stats.reduce()
                            mean = {k: v / sums["tokens"] for k, v in sums.items()}
                            limit = args.max_sampler_diff * (1e-3 if dtype == torch.float32 else 1.0)
                            if args.max_sampler_diff > 0 and mean["sampler_diff"] > limit:
                                raise RuntimeError(
                                    f"sampler and trainer differ by {mean['sampler_diff']:.3g} nats a token "
                                    f"(--max_sampler_diff: {limit:g}): the engine has old weights or another model"
                                )
                            cap = args.early_stop_imp_ratio
                            stopped = cap is not None and mean["ratio"] > cap
                            if stopped or not math.isfinite(sums["loss"]):
                                # DeepSpeed drops a step whose gradient is not finite, on all ranks, and cleans up:
                                # the one way to take back micro-batches that are summed already.
                                loss = loss * math.nan
                        accelerator.sync_gradients = last  # accelerate's word for: step after this backward
                        accelerator.backward(loss)
                    totals.update(sums, rounds=1, samples=len(indices))
                    peaks |= Counter(maxima)
                    if policy.was_step_applied():
                        grad_norm, applied = float(policy.get_global_grad_norm()), applied + 1
                        progress.skipped_in_a_row = 0
                    elif not stopped:
                        skipped, progress.skipped_in_a_row = skipped + 1, progress.skipped_in_a_row + 1
                        if progress.skipped_in_a_row == 10:
                            log.dump("bad_batch.jsonl", samples)
                            raise RuntimeError(
                                f"loss or gradient not finite in ten optimizer steps in a row; the last batch is in "
                                f"{folder / 'bad_batch.jsonl'}"
                            )

            # 8 push: the engine answers the next step with the new weights
            push()
            if args.ref_policy_update_freq > 0 and step % args.ref_policy_update_freq == 0:
                utils.move_reference(reference, policy, args.ref_policy_alpha, args.zero_stage)
            kl_per_sequence = totals["k1"] / max(1, totals["samples"])
            if adaptive and totals["rounds"] > 0:
                controller.update(kl_per_sequence, len(samples))

            # 9 record
            if args.eval_every > 0 and step % args.eval_every == 0 and step < total_steps:
                evaluate(step)
            n = max(1.0, totals["tokens"])
            metrics = {
                "step": step,
                "episode": step * prompts * group,
                **utils.sample_metrics(samples, rewards_PG, step),
                "optim/lr": lr,
                "optim/steps": applied,
                "optim/skipped": skipped,
                "optim/early_stopped": int(stopped),
                "kl/coef": kl_coef,
            }
            if totals["tokens"] > 0:
                metrics |= {
                    "loss/total": totals["loss"] / totals["rounds"],
                    "loss/policy": totals["loss_policy"] / totals["rounds"],
                    "loss/kl": totals["loss_kl"] / totals["rounds"],
                    "policy/entropy": totals["entropy"] / n,
                    "policy/ratio_mean": totals["ratio"] / n,
                    "policy/ratio_max": peaks["ratio"],
                    "policy/clip_frac": totals["clipped"] / n,
                    "policy/approx_kl": totals["approx_kl"] / n,
                    "sampler/logprob_diff_mean": totals["sampler_diff"] / n,
                    "sampler/logprob_diff_max": peaks["sampler_diff"],
                    "optim/grad_norm": grad_norm,
                }
                if beta > 0:
                    metrics |= {f"kl/{name}": totals[name] / n for name in ("k1", "k2", "k3", "k4", "abs")}
                    metrics["kl/sequence"] = kl_per_sequence
                if exact_kl[1] > 0:
                    metrics["kl/full"] = (exact_kl[0] / exact_kl[1]).item()
            if args.dynamic_sampling_rounds > 0:
                metrics |= data.draw_metrics(draws, prompts)
            metrics |= clock.metrics(offsets[-1], totals["tokens"])
            log.step(metrics, samples, batch)
            clock.restart()  # the time of a checkpoint is the next step's
            if checkpoints.after_step(step):
                break

        if not checkpoints.stopping:
            evaluate(total_steps)
            utils.save_model(policy, tokenizer, folder / "model", args.zero_stage, rank)
        inbox.put(("stop",))
        thread.join(timeout=30)
        pool.close()
        log.close()
    if checkpoints.stopping:
        raise SystemExit(75)  # EX_TEMPFAIL: saved, start me again


if __name__ == "__main__":
    import tyro

    main(tyro.cli(Args, description=__doc__))

"""GRPO with verifiable rewards, in one file. Read ``main`` from top to bottom: it follows the data through a step.

    1 prompts -> 2 generate -> 3 score -> 4 gather -> 5 log-probs -> 6 advantages -> 7 update -> 8 push -> 9 record

Group Relative Policy Optimization (DeepSeekMath, arXiv 2402.03300) samples a group of responses to each prompt. The
advantage of a response is its reward compared with the rewards of its group. Design choices:

* vLLM samples in a thread of this process and returns token ids, not text. Training uses exactly these ids.
* The samples of a group share a row, so their prompt is computed once (``--batch_layout``). Results do not change.
* A token's weight in the loss comes from the token and sample counts of an entire optimizer step, over all ranks
  (``--loss_norm``). Neither micro-batches, nor padding, nor the number of ranks changes a gradient.
* With one optimizer step per batch, the ratio needs no separate old log-probs: it is 1, with the gradient of log pi.
* By default there is no KL, and no reference model is loaded (``--beta 0``). To add a KL, choose its estimator and
  its place: the loss, the reward, or both. docs/kl.md describes what each combination does.
* With several turns (``--environment``), a sample is the sequence of all turns. Only the model's tokens are
  response tokens. The environment's tokens are context, and enter no loss, KL, ratio or mean.
* Not included: a critic (see ppo.py) and tensor-parallel training.

Tensor names end in their dimensions: P prompts of a step, G samples of a group, N response tokens of a step, T response
tokens of a micro-batch, E engines. Arrays indexed by ``mb.tokens``, such as ``old_N``, have length N + 1. The last slot
is for empty micro-batches: a rank with fewer micro-batches than another adds them to make equally many passes.

    CPU, two cores       python grpo.py
    one GPU              python grpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --learning_rate 1e-6 \\
                             --dataset openai/gsm8k:main@train --num_unique_prompts_rollout 64 \\
                             --max_response_length 512 --total_steps 200
    N GPUs               accelerate launch --config_file scripts/zero2.yaml --num_processes N grpo.py ...
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

from rewards import Verifiers, check_reward_args, truth_error
from runtime.arguments import flags
from runtime.data import prompt_order
from runtime.data.samples import Batch, Problem, Sample, equal_rewards
from runtime.run.preflight import Ready, prepare_run
from runtime.system import process, user_files

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
    advantage_normalization_type: Literal["standard", "centered", "leave_one_out"] = "standard"
    """Turn the rewards r of a group into advantages. standard: (r - mean) / (std + advantage_eps). centered: r - mean
    (Dr. GRPO). leave_one_out: r - mean of the group's other rewards (RLOO)."""
    advantage_eps: float = 1e-6
    """Number added to the standard deviation by which the advantage is divided."""
    filter_zero_std_samples: bool = False
    """Exclude groups of equal rewards (zero variance) from the loss and its normalization (DAPO)."""
    mask_truncated_completions: bool = True
    """Exclude truncated responses from the loss and its normalization, but not from the group's statistics (DAPO)."""
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
    kl_reward_norm: Literal["after_norm", "before_norm"] = "after_norm"
    """Subtract the KL in the reward from normalized advantages (after_norm) or from raw rewards (before_norm)."""
    kl_target: tuple[float] | tuple[float, float] | None = None
    """TARGET [HORIZON]: adapt the KL coefficient (in the reward if there is one, else in the loss) to keep that KL near
    TARGET nats per token. A larger HORIZON (in sequences, default 10000) adapts more slowly. Default: off."""
    load_ref_policy: bool = False
    """Load the reference model and log the KL even if all coefficients are 0."""
    ref_policy_update: tuple[int, float] | None = None
    """FREQ ALPHA: every FREQ steps, set the reference to ALPHA * policy + (1 - ALPHA) * reference. Default: off."""

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
    """Reject settings that GRPO does not support or that would silently misbehave; see also ``checks.check``."""
    mask = args.importance_sampling_mask
    if args.num_samples_per_prompt_rollout == 1:
        process.refuse(
            f"--num_samples_per_prompt_rollout 1: --advantage_normalization_type {args.advantage_normalization_type} "
            f"compares a response with the others of its group; use at least 2"
        )
    if not 0 <= args.clip_lower < 1 or args.clip_higher < 0:
        process.refuse(
            f"--clip_lower {args.clip_lower} must be in [0, 1), and --clip_higher {args.clip_higher} at least 0"
        )
    if args.clip_ratio_c is not None and args.clip_ratio_c <= 1.0:
        process.refuse(f"--clip_ratio_c {args.clip_ratio_c}: must be above 1, or a ratio of 1 is clipped; 3 is usual")
    if mask is not None and not 0 <= mask[0] < 1 < mask[1] < math.inf:
        process.refuse(f"--importance_sampling_mask {mask}: LOW must be in [0, 1) and HIGH above 1, e.g. 0.5 5")


def preflight(args: Args) -> Ready | None:
    """Reject bad settings before torch is imported. Returns the run's data and folder, or None on a sampling rank."""
    return prepare_run(args, Args(), [check_reward_args, check_args], truth_error)


if __name__ == "__main__":  # --help and errors in flags come before the slow imports
    args = flags.parse(Args, __doc__)
    process.choose_allocator()
    ready = preflight(args)

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import set_seed

import utils
from kl_estimators import rollout_kl
from runtime.engine import isolation, turns, vllm_settings
from runtime.engine.client import Engine, Queue
from runtime.engine.weights import push_weights, release_vllm
from runtime.run import loading, saving
from runtime.run.checkpoints import Checkpoints
from runtime.system import watchdog
from runtime.training import batching, deepspeed_zero

# ------------------------------------------------------------------------------------------- the algorithm's arithmetic


def group_advantages(rewards_PG: torch.Tensor, kind: str, eps: float = 1e-6) -> torch.Tensor:
    """Return the advantages [P, G] of rewards [P, G], in fp64. They are exactly 0 if a group's rewards are all equal.

    standard: (r - mean) / (std + eps), std with Bessel's correction; centered: r - mean (Dr. GRPO, arXiv 2503.20783);
    leave_one_out: r - mean of the other rewards = (r - mean) G / (G - 1) (RLOO, arXiv 2402.14740).
    """
    group = rewards_PG.shape[1]
    centered_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    if kind == "standard":
        centered_PG = centered_PG / (rewards_PG.std(1, keepdim=True) + eps)
    elif kind == "leave_one_out":
        centered_PG = centered_PG * group / (group - 1)
    # Rounding can make the mean of equal rewards differ from them, and the division would enlarge this difference.
    equal_P1 = equal_rewards(rewards_PG.amin(1, keepdim=True), rewards_PG.amax(1, keepdim=True))
    return centered_PG.masked_fill(equal_P1, 0.0)


def return_to_go(values_N: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    """Return the sum from each token to the end of its response, [N]; response i is offsets[i]:offsets[i + 1]."""
    return torch.cat([values_N[a:b].flip(0).cumsum(0).flip(0) for a, b in itertools.pairwise(offsets)])


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
    kl = utils.make_kl(args)  # has the coefficients kl.loss and kl.reward
    full_in_loss = reference if kl.loss > 0 and args.kl_estimator == "full" else None
    full_in_reward = reference if kl.reward > 0 and args.kl_reward_estimator == "full" else None
    moving = utils.moving_reference(reference, args)
    skips = SimpleNamespace(policy=0)  # number of consecutive optimizer steps that were not applied
    queue = Queue(engine, prompt_order.Prompts(run.problems, args), prompt_order.sampling(args), args)
    phases = utils.Phases(args, engine, reference, [policy], device)
    log = utils.open_log(args, run)
    parts = {"policy": policy, "reference": moving, "controller": kl.controller, "skips": skips}
    parts |= {"prompts": queue.source.state, "progress": queue.state}
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

        # in_loss: samples counted in the loss's normalization. with_gradient: samples that the update runs through the
        # model. With no reference and no entropy bonus, groups of equal rewards have gradient 0 and are left out. If a
        # mini-batch has only such groups, one sample is run anyway, so that AdamW still steps (it has momentum).
        zero_std_P = equal_rewards(rewards_PG.amin(1), rewards_PG.amax(1))
        in_loss = list(range(len(samples)))
        if args.filter_zero_std_samples:
            in_loss = [i for i in in_loss if not zero_std_P[samples[i].prompt_id]]
        if args.mask_truncated_completions:
            in_loss = [i for i in in_loss if samples[i].finish_reason != "length"]
        with_gradient = in_loss
        if reference is None and args.entropy_coef == 0:
            with_gradient = [i for i in in_loss if not zero_std_P[samples[i].prompt_id]]

        # 5 log-probs: the reference's if there is one; old ones if updates > 1 or there is a KL in the reward
        first_of_groups = {samples[i].prompt_id: i for i in reversed(in_loss)}  # phase 7 may run one anyway
        need_logprobs = sorted({*with_gradient, *first_of_groups.values()})
        if kl.reward > 0 and (kl.controller is not None or args.kl_reward_norm == "before_norm"):
            need_logprobs = list(range(len(samples)))  # controller and group statistics need the KL of every response
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
            sampler_metrics = utils.check_engines(policy, engine, samples, with_gradient, step, args, run)
            if reference is not None:
                kl_metrics |= utils.exact_kl(policy, reference, samples, with_gradient, run)

        # 6 advantages: one per response, from its group's rewards. KL in the reward is subtracted here, per token.
        kind = args.advantage_normalization_type
        advantages_PG = group_advantages(rewards_PG, kind, args.advantage_eps)
        penalty_N = torch.zeros(slots, device=device)
        if kl.reward > 0:
            kl_N = full_kl_N
            if full_in_reward is None:
                kl_N = kl_value(args.kl_reward_estimator, old_N, old_N, ref_N)
            penalty_N[:-1] = kl.reward * return_to_go(kl_N, offsets)
            if args.kl_reward_norm == "before_norm":  # subtract a response's total KL from its reward, as verl does
                sequence_kl_PG = penalty_N[offsets[:-1]].double().cpu().view(prompts, group)
                advantages_PG = group_advantages(rewards_PG - sequence_kl_PG, kind, args.advantage_eps)
                penalty_N = torch.zeros_like(penalty_N)
            kl_metrics["kl/reward_coef"] = kl.reward
            if need_logprobs:
                kl_metrics["kl/reward"] = rollout_kl(kl_N, offsets, need_logprobs)
        for sample, advantage in zip(samples, advantages_PG.flatten().tolist(), strict=True):
            sample.advantage = advantage
        advantages_N = batching.per_token([s.advantage for s in samples], offsets, device) - penalty_N

        # 7 update: epochs x mini-batches x micro-batches; token_loss adds the KL in the loss
        groups = sorted({samples[i].prompt_id for i in in_loss})
        stats = utils.UpdateStats(args, run, engine.count, reference is not None, fresh_N, engine_N, kl_value)
        with phases("update"):
            for epoch, mini in itertools.product(range(args.num_epochs), range(args.num_mini_batches)):
                optimizer_step = (step - 1) * updates + epoch * args.num_mini_batches + mini
                lr = utils.learning_rate(optimizer_step, run.total_steps * updates, args)
                deepspeed_zero.set_learning_rate(policy, lr)
                members = utils.mini_batch(groups, step, epoch, mini, args)
                mini_in_loss = [i for i in in_loss if samples[i].prompt_id in members]
                mini_with_gradient = [i for i in with_gradient if samples[i].prompt_id in members] or mini_in_loss[:1]
                if not mini_in_loss or stats.stopped:
                    continue
                weights_N = F.pad(loss_weights(samples, mini_in_loss, args), (0, 1)).to(device)
                for mb in batching.micro_batches(samples, mini_with_gradient, **run.placement):
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
                stats.stepped(policy, skips, len(mini_with_gradient))
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
            **phases.metrics(offsets[-1], stats.totals["tokens"]),
            **engine.metrics,
        }
        log.step(metrics, samples, batch.problems)
        phases.restart()  # the time of a checkpoint counts towards the next step
        queue.update_state()
        if checkpoints.after_step(step):
            break

    if not checkpoints.stopping:
        evaluate(run.total_steps, engine, verifiers, run.eval_problems, log, phases, args)
        saving.save_model(policy, run.tokenizer, run.folder / "model", args.zero_stage, run.rank)
    utils.end_run(log, checkpoints.stopping, (engine, verifiers, log, watch))


if __name__ == "__main__":
    main(args, ready)

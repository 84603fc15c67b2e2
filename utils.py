"""Functions that both training scripts call: setup, token log-probs, learning rate, checks, statistics, phase times.

Shapes in names: B rows, S positions of a row, T response tokens of a micro-batch, U of them different, N response
tokens of a step, P prompts, G samples per prompt, E engines, V vocabulary, D hidden size.
"""

from __future__ import annotations

import importlib
import inspect
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import kl_estimators
import rewards
from kl_estimators import AdaptiveKLController, KLCoefficients, full_vocabulary_kl
from runtime.arguments import flags
from runtime.data import rendering
from runtime.data.samples import Problem, Sample, equal_rewards, is_correct, is_graded, majority, pass_at_k
from runtime.engine import choices
from runtime.run import directory, identity, logger, saving
from runtime.system import process
from runtime.system.process import refuse, warn_once
from runtime.system.watchdog import Watch
from runtime.training import deepspeed_zero, pretrained
from runtime.training.attention import attention_inputs, check_mask_size
from runtime.training.batching import ROW_MULTIPLE, MicroBatch, flat, micro_batches, per_token, token_offsets
from runtime.training.memory import FULL_KL_SAMPLES, LOGIT_BLOCK, Sizes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from runtime.engine.client import Engine


ADAM_EPS = 1e-8  # added to the root of AdamW's second moment
NEVER = -1e4  # nats; exp() of it is 0. It replaces masked logits of -inf, whose product with their probability is NaN.


@dataclass
class Run:
    """Resolved settings of a run: device, dtype, sizes, layout and data, before a model is loaded."""

    folder: Path
    start: Path | None  # the checkpoint to resume from
    problems: list[Problem]
    eval_problems: list[Problem]
    tokenizer: PreTrainedTokenizerBase
    total_steps: int
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    layout: str
    attention: str
    sampler_agreed: bool = False  # True once the engine's log-probs have been compared with the trainer's

    @property
    def placement(self) -> dict:
        """Arguments of ``batching.micro_batches`` except the samples."""
        ranks = {"rank": self.rank, "world_size": self.world_size, "device": self.device}
        return {"layout": self.layout, "budget": self.sizes.micro_batch_tokens, **ranks}


def setup_run(args, ready: tuple) -> Run:
    """Choose device, sizes and layout, and tokenize the prompts.

    Rank 0 prints them and the expected gradient of the KL setting. ``ready``: data and folder, from ``preflight``.
    """
    problems, eval_problems, folder, start = ready
    if args.external_lib is not None:
        importlib.import_module(args.external_lib)
    device, dtype, attention = pretrained.resolve_device(args)
    tokenizer = rendering.load_tokenizer(args)
    problems, eval_problems = rendering.render_problems(problems, eval_problems, tokenizer, args)
    if args.environment is None:
        args.longest_prompt = max(len(problem.prompt_ids) for problem in [*problems, *eval_problems])
    saving.adopt_template(tokenizer, args, problems)
    digest = directory.prompts_digest(args.data_digest, problems, eval_problems)
    facts = identity.facts(args, digest)
    chosen = choices.choose(args, device, dtype, attention, facts)
    args.steps = flags.total_steps(args, len(problems))
    run = Run(
        folder=folder,
        start=start,
        problems=problems,
        eval_problems=eval_problems,
        tokenizer=tokenizer,
        total_steps=args.steps,
        rank=process.rank(),
        world_size=process.world_size(),
        device=device,
        dtype=chosen.dtype,
        sizes=chosen.sizes,
        layout=chosen.layout,
        attention=chosen.attention,
    )
    if run.rank == 0:
        logger.print_header(args, run, chosen)
        print(f"rows       {run.layout} ({chosen.layout_reason}), {run.attention} attention")
        print(f"sizes      {', '.join(f'{name} {value}' for name, value in vars(run.sizes).items())} ({chosen.reason})")
        print("\n".join(kl_lines(args)), flush=True)
        if args.dry_run:
            rewards.try_own_verifiers(args, run.problems)
    return run


def kl_lines(args) -> list[str]:
    """Describe the KL setting of a run, with a warning wherever its effect differs from its name."""
    meaning, warnings = kl_estimators.kl_setting_message(sys.modules[type(args).__module__], args)
    if any(args.kl_coefficients) and args.filter_zero_std_samples:
        warnings.append("KL: --filter_zero_std_samples leaves groups of equal reward without a pull to the reference")
    given = (args.flags_set or frozenset()) if args.preset is None else frozenset()
    if not any(args.kl_coefficients):
        idle = given & {"kl_placement", "kl_estimator"}
        warnings += [f"--{name} changes nothing without a KL: see --beta" for name in sorted(idle)]
    if args.num_epochs * args.num_mini_batches == 1:
        idle = given & {"clip_lower", "clip_higher", "clip_ratio_c"}
        why = "with one optimizer step per batch the ratio is 1: see --num_mini_batches"
        warnings += [f"--{name} changes nothing, since {why}" for name in sorted(idle)]
    return [meaning, *(f"warning: {line}" for line in warnings)]


def make_kl(args) -> KLCoefficients:
    """Return the coefficients of the KL that the flags set; --kl_target changes them during the run."""
    loss, reward = args.kl_coefficients
    if args.kl_target is None:
        return KLCoefficients((loss, reward))
    return KLCoefficients((loss, reward), AdaptiveKLController(reward or loss, *flags.target_and_horizon(args)))


def open_log(args, run: Run) -> logger.RunLog:
    """Open the files of the run. The choices for this machine are recorded with the arguments."""
    chosen = {"dtype": str(run.dtype).removeprefix("torch.")}
    chosen |= {"batch_layout": run.layout, "attn_implementation": run.attention, **vars(run.sizes)}
    is_main = run.rank == 0
    size = run.world_size
    return logger.RunLog(
        run.folder,
        args,
        size,
        run.total_steps,
        is_main,
        run.start,
        len(run.problems),
        chosen,
    )


def end_run(log: logger.RunLog, stopping: bool, parts: Iterable) -> None:
    """Write the verdict of a finished run and close its parts; exit with code 75 if it is to be started again.

    Every rank must call.
    """
    if not stopping:
        log.end()
    code = [75 if stopping else 0]
    dist.broadcast_object_list(code)  # no rank ends before rank 0 has written the verdict
    for part in parts:
        part.close()
    if code[0] != 0:
        raise SystemExit(code[0])


def load_reference(args, run: Run) -> TokenLogprobs | None:
    """Return the frozen reference, in CPU memory with --offload ref, or None if no flag needs a reference."""
    if not args.loads_reference:
        return None
    model = pretrained.load_model(args, run.dtype, run.attention).eval()
    reference = TokenLogprobs(model, args.temperature, run.sizes.logprob_chunk)
    reference.requires_grad_(False).to("cpu" if "ref" in args.offload else run.device)
    if "ref" in args.offload:
        deepspeed_zero.pin(reference)
    return reference


def prepare_policy(model, args, run: Run, eos: int) -> TokenLogprobs:
    """Return the model on its device as a module that computes log-probs, after checking them (``check_forward``)."""
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = TokenLogprobs(model.to(run.device), args.temperature, run.sizes.logprob_chunk)
    check_mask_size(model, run.layout, run.sizes, args)
    check_forward(policy, run.layout, eos, args.max_prompt_length + args.max_response_length)
    return policy


def make_optimizer(parameters: Iterable[nn.Parameter], rate: float, args) -> torch.optim.Optimizer:
    """Return AdamW of the parameters to be trained, with the settings of the flags and the learning rate ``rate``."""
    return torch.optim.AdamW(
        [weight for weight in parameters if weight.requires_grad],
        lr=rate,
        betas=args.adam_betas,
        eps=ADAM_EPS,
        weight_decay=args.weight_decay,
        fused=True,  # also on CPUs, where one pass over the memory of an offloaded optimizer replaces eight
    )


def learning_rate(optimizer_step: int, total: int, args) -> float:
    """Return the learning rate of an optimizer step, counted from 0, of ``total``: linear warm-up, then the schedule.

    The minimum ``lr_min_ratio * learning_rate`` is reached at step ``total``, one after the last, as in transformers.
    """
    warmup_steps = round(args.warmup_steps * total if args.warmup_steps < 1 else args.warmup_steps)
    if optimizer_step < warmup_steps:
        return args.learning_rate * (optimizer_step + 1) / (warmup_steps + 1)
    progress = (optimizer_step - warmup_steps) / max(1, total - warmup_steps)
    factors = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }
    factor = factors[args.lr_scheduler_type]
    return args.learning_rate * (args.lr_min_ratio + (1.0 - args.lr_min_ratio) * factor)


LOGIT_FACTORS = ("logit_scale", "output_multiplier", "lm_head_multiplier")  # Cohere, Muse Glimmer, Falcon-H1
LOGIT_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")  # Granite (HyperCLOVA X multiplies), Inkling


def final_logits(logits_UV: torch.Tensor, config) -> torch.Tensor:
    """Apply the model-specific scaling and softcapping of the head's logits, in fp32; most models have none.

    Gemma 2 limits the logits to plus or minus ``final_logit_softcapping`` by tanh. Inkling's head has rows beyond
    ``unpadded_vocab_size`` that are no tokens.
    """
    config = config.get_text_config()
    if getattr(config, "unpadded_vocab_size", None) is not None:
        logits_UV = logits_UV[:, : config.unpadded_vocab_size]
    for name in (*LOGIT_FACTORS, *LOGIT_DIVISORS):
        factor = getattr(config, name, None)
        if factor is not None:
            divides = name in LOGIT_DIVISORS and config.model_type != "hyperclovax"
            logits_UV = logits_UV.float() / factor if divides else logits_UV.float() * factor
    cap = getattr(config, "final_logit_softcapping", None)
    if cap is not None:
        logits_UV = torch.tanh(logits_UV.float() / cap) * cap
    return logits_UV


class ChosenLogprobs(torch.autograd.Function):
    """Log-probs of given tokens, and the entropies, from logits of any dtype: in fp32, a few rows at a time.

    Written with PyTorch's operations, the two passes write and read a dozen fp32 arrays as large as the logits. Here
    those are as large as a block of rows, which on a CPU stays in its cache; only the logits and their gradient exist
    as a whole, in their own dtype.

        d logprob / d logit_v = [v is the token] - p_v
        d entropy / d logit_v = -p_v (log p_v + entropy)
    """

    @staticmethod
    def forward(ctx, logits_UV, targets_U, temperature, entropy_gradient):
        """Return log-probs [U] and entropies [U] at ``temperature``; entropies have a gradient only if asked for."""
        parts = []
        for block in row_blocks(logits_UV):
            parts.append(_chosen_logprobs(logits_UV[block], targets_U[block], temperature))
        logprobs_U, entropy_U, lse_U = torch.cat(parts, 1) if parts else logits_UV.new_zeros(3, 0).float()
        ctx.save_for_backward(logits_UV, targets_U, lse_U, entropy_U)
        ctx.temperature = temperature
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_U)
        return logprobs_U, entropy_U

    @staticmethod
    @once_differentiable
    def backward(ctx, logprob_slope_U, entropy_slope_U):
        logits_UV, targets_U, lse_U, entropy_U = ctx.saved_tensors
        gradient_UV = torch.empty_like(logits_UV)
        for block in row_blocks(logits_UV):
            log_p_BV = _scaled(logits_UV[block], ctx.temperature).sub_(lse_U[block, None])
            slope_B1 = logprob_slope_U[block, None] / ctx.temperature
            factor = -slope_B1
            if ctx.entropy_gradient:
                log_p_BV.clamp_(min=NEVER)
                entropy_slope_B1 = entropy_slope_U[block, None] / ctx.temperature
                factor = factor - entropy_slope_B1 * (log_p_BV + entropy_U[block, None])
            block_gradient_BV = log_p_BV.exp_().mul_(factor)
            gradient_UV[block] = block_gradient_BV.scatter_add_(-1, targets_U[block, None], slope_B1)
            del log_p_BV, block_gradient_BV  # before the next block
        return gradient_UV, None, None, None


def row_blocks(logits_UV: torch.Tensor) -> Iterator[slice]:
    """Yield the slices of rows that ``ChosenLogprobs`` computes at a time."""
    count, vocabulary = logits_UV.shape
    rows = max(1, LOGIT_BLOCK[logits_UV.is_cuda] // vocabulary)
    for start in range(0, count, rows):
        yield slice(start, start + rows)


def _scaled(logits_BV: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return a copy in fp32, divided by the temperature."""
    copy_BV = logits_BV.to(torch.float32, copy=True)
    return copy_BV if temperature == 1.0 else copy_BV.div_(temperature)


def _chosen_logprobs(logits_BV: torch.Tensor, targets_B: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return [3, B]: log-probs of the targets, entropies, and log-sum-exps of the scaled logits."""
    x_BV = _scaled(logits_BV, temperature)
    largest_B1 = x_BV.amax(-1, keepdim=True)
    x_BV -= largest_B1
    chosen_B1 = x_BV.gather(-1, targets_B[:, None])
    exp_BV = x_BV.exp()
    sum_B1 = exp_BV.sum(-1, keepdim=True)
    expected_B1 = x_BV.clamp_(min=NEVER).mul_(exp_BV).sum(-1, keepdim=True) / sum_B1
    lse_B1 = sum_B1.log()
    return torch.cat([chosen_B1 - lse_B1, lse_B1 - expected_B1, lse_B1 + largest_B1], 1).T


class TokenLogprobs(nn.Module):
    """A causal language model that returns log-probs of given tokens instead of logits.

    The head runs only on response positions, in fp32 and in chunks, so [S, V] logits never exist. It is a module, so
    that DeepSpeed's hooks, in which ZeRO-3 gathers parameters, see the complete forward pass.
    """

    def __init__(self, model, temperature: float, chunk: int):
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.chunk = chunk

    def hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Return the last hidden states at the positions that predict a response token: [U, D].

        ``use_cache=False`` is needed for correctness: with a cache, transformers no longer finds the borders of packed
        sequences, and they attend to each other.
        """
        Watch.heartbeat()
        output = self.model.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            **attention_inputs(batch, self.model),
        )
        return output.last_hidden_state.flatten(0, 1)[batch.predict]

    def forward(
        self,
        batch: MicroBatch,
        reference: TokenLogprobs | None = None,
        entropy_gradient: bool = False,
        divergence: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = full_vocabulary_kl,
        reference_UD: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return (logprobs, entropy, full_kl), each [T] in fp32 nats at the sampling temperature.

        full_kl is the ``divergence`` between policy and ``reference``, by default KL(policy || reference) over the
        vocabulary; None without a reference. ``reference_UD``: hidden states of the reference, if not those of this
        batch. ``entropy_gradient``: the entropy has a gradient, which costs another [U, V].
        """
        hidden_UD = self.hidden(batch)
        if reference is not None and reference_UD is None:
            with torch.no_grad():
                reference_UD = reference.hidden(batch)
        # Under ZeRO-3 every call of the head gathers its weights, so all ranks must make the same number of calls; a
        # rank with fewer predictions calls it with empty chunks.
        chunks = max(1, math.ceil(batch.most_predictions / self.chunk))
        parts = []
        for k in range(chunks):
            piece = slice(k * self.chunk, (k + 1) * self.chunk)
            inputs = [hidden_UD[piece], batch.targets[piece], entropy_gradient, reference]
            inputs.append(None if reference is None else reference_UD[piece])
            inputs.append(divergence)
            inputs.append(None if batch.kept is None else batch.kept[piece])
            if torch.is_grad_enabled() and chunks > 1:  # keep the logits of one chunk, not of all
                parts.append(checkpoint(self._head, *inputs, use_reentrant=False))
            else:
                parts.append(self._head(*inputs))
        columns = [torch.cat(column)[batch.copies] for column in zip(*parts, strict=True)]
        if reference is None:
            columns.append(None)
        logprobs, entropy, full_kl = columns
        return logprobs, entropy, full_kl

    def _logits(self, hidden_UD, kept_UK):
        """Return the logits [U, V]. Tokens that are not in ``kept_UK``, if there is one, have probability 0."""
        head = self.model.get_output_embeddings()
        logits_UV = final_logits(head(hidden_UD), self.model.config)
        if kept_UK is None:
            return logits_UV
        return logits_UV + torch.full_like(logits_UV, NEVER).scatter_(1, kept_UK, 0)

    def _head(self, hidden_UD, targets_U, entropy_gradient, reference, reference_UD, divergence, kept_UK):
        """Return log-probs and entropy, [U] each, and the divergence from the reference if there is one."""
        raw_UV = self._logits(hidden_UD, kept_UK)
        logprobs_U, entropy_U = ChosenLogprobs.apply(raw_UV, targets_U, self.temperature, entropy_gradient)
        if reference is None:
            return logprobs_U, entropy_U
        logits_UV = raw_UV.float() / self.temperature
        with torch.no_grad():
            reference_UV = reference._logits(reference_UD, kept_UK).float() / self.temperature
        return logprobs_U, entropy_U, divergence(logits_UV, reference_UV)


LAYOUTS = ("shared", "padded", "packed")


def check_forward(policy: TokenLogprobs, layout: str, eos: int, longest: int) -> None:
    """Reject a model whose log-probs in this layout are not those of its own plain forward pass.

    This finds layers that ignore positions or a 4-D mask (linear attention, convolutions), unknown changes of the
    logits after the head, and masks that do not separate packed rows.

    Args:
        policy: the model, before DeepSpeed wraps it.
        layout: the layout of rows (``--batch_layout``).
        eos: the id that ends the responses of the probe.
        longest: tokens of the longest possible row. The probe is longer than every sliding window below that.

    Exits with code 2, and names the layouts that work.
    """
    check_rotary(policy.model.config, longest)
    limit = 1e-3 if next(policy.parameters()).dtype == torch.float32 else 0.1
    difference, failure = layout_error(policy, layout, eos, longest)
    if difference < limit:
        return
    others = [x for x in LAYOUTS if x != layout and layout_error(policy, x, eos, longest)[0] < limit]
    problem = f"log-probs of this model differ from its own forward pass by {difference:.3g} nats per token"
    remedy = "no other layout works either: the model changes its logits after the head in a way unknown here"
    if failure:
        problem = f"the forward pass of this model fails: {failure}"
        remedy = "no other layout works either"
    if others:
        remedy = f"use --batch_layout {' or '.join(others)}"
    refuse(f"--batch_layout {layout}: {problem}; {remedy}")


def check_rotary(config, longest: int) -> None:
    """Reject rows so long that rotary embeddings would depend on the other rows of a batch.

    ``longrope`` (Phi-3) and ``dynamic`` choose their frequencies by the longest sequence of a forward pass, and change
    them beyond the length of pre-training. Exits with code 2.
    """
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("longrope", "dynamic"):
        return
    trained = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if longest > trained:
        refuse(
            f"--max_prompt_length + --max_response_length: {longest} tokens, but the {rope['rope_type']} rotary "
            f"embeddings of this model depend on the other rows of a batch beyond {trained}; shorten one of them"
        )


@torch.no_grad()
def layout_error(policy: TokenLogprobs, layout: str, eos: int, longest: int) -> tuple[float, str]:
    """Return the mean difference between log-probs in ``layout`` and those of plain forward passes, in nats per token.

    The probe has two random responses to a random prompt, which is longer than the widest sliding window (or attention
    chunk) below ``longest``, so all their tokens are beyond it. If the model raises an error: infinity and that error.
    """
    config = policy.model.config.get_text_config()
    windows = [getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")]
    widest = max(w for w in [0, *windows] if w < longest)
    generator = random.Random(0)

    def draw(count: int) -> list[int]:
        tokens = getattr(config, "unpadded_vocab_size", None) or config.vocab_size
        return [generator.randrange(tokens) for _ in range(count)]

    prompt = draw(max(7, min(widest + 7, longest - 10)))
    samples = []
    for k, count in enumerate((5, 9)):
        response = [*draw(count), eos]
        samples.append(Sample(0, k, prompt, response, [0.0] * len(response), "stop", []))
    parameter = next(policy.parameters())
    got = torch.zeros(token_offsets(samples)[-1], device=parameter.device)
    try:
        for batch in micro_batches(
            samples,
            [0, 1],
            layout=layout,
            budget=max(ROW_MULTIPLE, 4 * (len(prompt) + 10)),  # so that a GPU computes it as the rows of a run
            rank=0,
            world_size=1,
            device=parameter.device,
        ):
            got[batch.tokens] = policy(batch)[0]
        plain = torch.cat([_plain_logprobs(policy, sample) for sample in samples])
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        return math.inf, " ".join(f"{type(error).__name__}: {error}".split())
    return (got - plain).abs().mean().item(), ""


def _plain_logprobs(policy, sample):
    """Return the log-probs of a response, [T], from one plain forward pass of the model."""
    model, count = policy.model, len(sample.response_ids)
    ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]], device=next(model.parameters()).device)
    options = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:  # [S, V] of a long probe is large
        options["logits_to_keep"] = count + 1
    logits = model(input_ids=ids, **options).logits[0, -count - 1 : -1].float()
    logprobs = (logits / policy.temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[0, -count:, None])[:, 0]


def engine_weights(policy, args) -> list[tuple[str, torch.Tensor]] | deepspeed_zero.ShardedWeights:
    """Return the policy's weights in the form that the engine loads.

    vLLM needs the names of checkpoint files, not those of modules. If every rank has an engine, weights that ZeRO 3 has
    sharded are gathered while the engines load them.
    """
    return deepspeed_zero.current_weights(policy, args.zero_stage, args.rollout == "vllm", args.vllm_engines == 0)


class MovingReference(nn.Module):
    """A reference that follows the policy: reference = alpha * policy + (1 - alpha) * reference (arXiv 2404.09656).

    The average is kept in fp32 on the CPU and rounded into the reference, because bf16 would round small steps away.
    With alpha 1 the reference becomes a copy of the policy, and no average is kept. The state for checkpoints is the
    reference and the average.
    """

    def __init__(self, reference: TokenLogprobs, alpha: float, freq: int = 1):
        super().__init__()
        self.reference = reference
        self.alpha = alpha
        self.freq = freq  # steps from one move to the next
        self.averages = nn.ParameterList()
        if alpha < 1.0:
            for weight in reference.model.parameters():  # tied weights once
                average = weight.detach().to("cpu", torch.float32, copy=True)
                self.averages.append(nn.Parameter(average, requires_grad=False))

    @torch.no_grad()
    def move(self, policy, zero_stage: int) -> None:
        """Take one step towards the policy, a DeepSpeed engine. Every rank must call."""
        targets = dict(deepspeed_zero.current_weights(policy, zero_stage))
        for k, (name, weight) in enumerate(self.reference.model.named_parameters()):
            if self.alpha < 1.0:
                average = self.averages[k]
                average.lerp_(targets[name].to("cpu", torch.float32), self.alpha)
                weight.copy_(average)
            else:
                weight.copy_(targets[name])


def moving_reference(reference: TokenLogprobs | None, args) -> MovingReference | None:
    """Return the reference with its ``--ref_policy_update``; None without that flag."""
    if args.ref_policy_update is None:
        return None
    freq, alpha = args.ref_policy_update
    return MovingReference(reference, alpha, freq)


def gather_samples(mine: list[Sample]) -> list[Sample]:
    """Return the samples of all ranks, ordered by prompt and sample number: the same list on every rank."""
    parts = [mine] * torch.distributed.get_world_size()
    if len(parts) > 1:
        torch.distributed.all_gather_object(parts, mine)
    return sorted((s for part in parts for s in part), key=lambda s: (s.prompt_id, s.sample_id))


class TokenStats:
    """Sums and maxima over the response tokens of one optimizer step, on this rank and, by ``reduce``, on all ranks.

    A mean is a sum over all ranks divided by a count over all ranks, without padding.
    """

    def __init__(self, device: torch.device, engines: int = 1):
        self.device = device
        self.names: list[str] | None = None
        self.sums: torch.Tensor | None = None
        self.maxima: torch.Tensor | None = None
        self.sampler_diff_2E = torch.zeros(2, engines, device=device)  # sum over tokens, and their number

    @torch.no_grad()
    def add(self, seen_T: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        """Add the tokens of a micro-batch where ``seen_T`` is True. All calls on all ranks must have the same names."""
        if self.names is None:
            self.names = list(values)
            self.sums = torch.zeros(len(values), dtype=torch.float64, device=self.device)
            self.maxima = torch.zeros_like(self.sums)
        columns = torch.stack([v.detach().double() for v in values.values()])
        seen = torch.where(seen_T, columns, 0.0)
        self.sums += seen.sum(1)
        self.maxima = torch.maximum(self.maxima, seen.amax(1))

    @torch.no_grad()
    def add_sampler_diff(self, seen_T: torch.Tensor, diff_T: torch.Tensor, engine_T: torch.Tensor) -> None:
        """Add |trainer's - sampler's log-prob| of the tokens where ``seen_T`` is True to the engine of each."""
        values = torch.stack([torch.where(seen_T, diff_T, 0.0), seen_T.float()])
        self.sampler_diff_2E.index_add_(1, engine_T.int(), values)

    def reduce(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return (sums, maxima) over all ranks, by name. Every rank must call."""
        torch.distributed.all_reduce(self.sampler_diff_2E)
        torch.distributed.all_reduce(self.sums)
        torch.distributed.all_reduce(self.maxima, op=torch.distributed.ReduceOp.MAX)
        sums = dict(zip(self.names, self.sums.tolist(), strict=True))
        maxima = dict(zip(self.names, self.maxima.tolist(), strict=True))
        return sums, maxima


class UpdateStats:
    """Statistics of phase 7: sums and maxima over the trained tokens of all ranks, and the outcome of each step."""

    # Pieces of a loss that have metrics of their own; any other piece [T] becomes the metric policy/NAME, its mean.
    KNOWN = ("policy", "kl", "ratio", "clipped", "weight")

    def __init__(
        self,
        args,
        run: Run,
        engines: int,
        has_reference: bool,
        fresh_N: torch.Tensor,
        engine_N: torch.Tensor,
        kl_value: Callable,
    ):
        self.args = args
        self.run = run
        self.engines = engines
        self.has_reference = has_reference
        self.fresh_N = fresh_N
        self.engine_N = engine_N
        self.kl_value = kl_value  # the script's
        self.totals: Counter = Counter()
        self.peaks: Counter = Counter()
        self.extra: set[str] = set()
        self.steps = 0
        self.skipped = 0
        self.stopped = False
        self.grad_norm = 0.0
        self.mini: TokenStats | None = None  # of the optimizer step under way

    def add(self, mb: MicroBatch, t, loss_T: torch.Tensor, pieces: dict[str, torch.Tensor]) -> None:
        """Add a micro-batch: its ``Tokens``, and the loss and pieces that the script's ``token_loss`` returned."""
        if self.mini is None:
            self.mini = TokenStats(self.run.device, self.engines)
        own_T = t.weights_T > 0
        fresh_T = self.fresh_N[mb.tokens]
        moved_T = (t.logprobs_T - t.old_T).detach()
        values = {
            "tokens": torch.ones_like(t.old_T),
            "loss": loss_T * t.weights_T,
            "loss_policy": pieces["policy"] * t.weights_T,
            "loss_kl": pieces["kl"] * t.weights_T,
            "ratio": pieces["ratio"],
            "clipped": pieces["clipped"],
            "approx_kl": torch.expm1(moved_T) - moved_T,
            "entropy": t.entropy_T,
            "fresh": fresh_T.float(),
            "sampler_diff": (t.old_T - t.sampler_T).abs() * fresh_T,
            **weight_statistics(t.old_T, t.sampler_T, self.args),
        }
        if self.has_reference:
            logprobs_T = t.logprobs_T.detach()
            values |= {name: self.kl_value(name, logprobs_T, t.old_T, t.ref_T) for name in kl_estimators.LOGGED}
        self.extra = set(pieces) - set(self.KNOWN)
        own = {f"policy/{name}": pieces[name] for name in sorted(self.extra)}  # not under the names above
        self.mini.add(own_T, values | own)
        # The current weights sampled the fresh tokens; with kept keys and values their log-probs may still differ.
        equal_T = own_T & fresh_T & (self.args.inflight_updates != "keep")
        self.mini.add_sampler_diff(equal_T, (t.old_T - t.sampler_T).abs(), self.engine_N[mb.tokens])

    def check_step(self, limit: float | None) -> bool:
        """Return True, identically on every rank, to skip an optimizer step. Call it after the step's last ``add``.

        Sums the statistics over all ranks, and ends the run if the engine's log-probs differ from the trainer's.
        ``limit``: upper bound of the mean ratio; above it, this step and the rest of the update are skipped.
        """
        self.sums, self.maxima = self.mini.reduce()
        vllm_run = self.run if self.args.rollout == "vllm" else None
        check_sampler(self.mini, self.args.max_logprob_diff, self.run.dtype, vllm_run)
        self.stopped = limit is not None and self.sums["ratio"] / self.sums["tokens"] > limit
        return self.stopped or not math.isfinite(self.sums["loss"])

    def stepped(self, policy, skips, samples: int) -> None:
        """Record an optimizer step on so many samples. ``skips.policy`` counts consecutive steps that were skipped."""
        self.mini = None
        self.totals.update(self.sums, rounds=1, samples=samples)
        self.peaks |= Counter(self.maxima)
        if policy.was_step_applied():
            self.grad_norm = float(policy.get_global_grad_norm())
            self.steps += 1
            skips.policy = 0
        elif not self.stopped:
            self.skipped += 1
            skips.policy += 1
            if broken := [name for name, total in self.sums.items() if not math.isfinite(total)]:
                warn_once(f"warning: an optimizer step was skipped; not finite: {', '.join(broken)}")

    def mean_kl(self) -> float | None:
        """Return k1 over the update, in nats per token, or None without an optimizer step."""
        return self.totals["k1"] / self.totals["tokens"] if self.totals["rounds"] > 0 else None

    def metrics(self, lr: float) -> dict[str, float]:
        """Return the metrics of the update; docs/metrics.md has their units."""
        totals = self.totals
        tokens = totals["tokens"]
        metrics = {
            "optim/lr": lr,
            "optim/steps": self.steps,
            "optim/skipped": self.skipped,
            "optim/early_stopped": int(self.stopped),
        }
        if tokens == 0:
            return metrics
        metrics |= {
            "loss/total": totals["loss"] / totals["rounds"],
            "loss/policy": totals["loss_policy"] / totals["rounds"],
            "loss/kl": totals["loss_kl"] / totals["rounds"],
            "policy/entropy": totals["entropy"] / tokens,
            "policy/ratio_mean": totals["ratio"] / tokens,
            "policy/ratio_max": self.peaks["ratio"],
            "policy/clip_frac": totals["clipped"] / tokens,
            "policy/approx_kl": totals["approx_kl"] / tokens,
            "policy/approx_kl_max": self.peaks["approx_kl"],
            **{f"policy/{name}": totals[f"policy/{name}"] / tokens for name in self.extra},
            **staleness_metrics(totals, self.peaks),
            "optim/grad_norm": self.grad_norm,
        }
        if self.has_reference:
            metrics |= {f"kl/{name}": totals[name] / tokens for name in kl_estimators.LOGGED}
            metrics["kl/sequence"] = totals["k1"] / totals["samples"]
        return metrics


@torch.no_grad()
def forward_kl(logits_UV: torch.Tensor, reference_UV: torch.Tensor) -> torch.Tensor:
    """Compute KL(reference || policy), [U], without gradient."""
    return full_vocabulary_kl(reference_UV, logits_UV)


def exact_kl(policy, reference, samples: list[Sample], members: list[int], run: Run) -> dict[str, float]:
    """Return metrics of the exact KL over the vocabulary in both directions, with which estimators can be compared.

    ``members``: indices of samples, of which the first few are used. Every rank must call.
    """
    end = token_offsets(samples)[-1]
    sums = torch.zeros(3, device=run.device)  # both directions, tokens
    largest = torch.zeros(1, device=run.device)  # of a token
    for mb in micro_batches(samples, members[:FULL_KL_SAMPLES], **run.placement):
        real_T = mb.tokens < end
        full_kl_T = policy(mb, reference)[2] * real_T
        forward_kl_T = policy(mb, reference, divergence=forward_kl)[2] * real_T
        sums += torch.stack([full_kl_T.sum(), forward_kl_T.sum(), real_T.sum()])
        largest = torch.maximum(largest, full_kl_T.max())
    torch.distributed.all_reduce(sums)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    if sums[2] == 0:
        return {}
    return {
        "kl/full": (sums[0] / sums[2]).item(),
        "kl/forward_full": (sums[1] / sums[2]).item(),
        "kl/full_max": largest.item(),
    }


def check_sampler(stats: TokenStats, limit: float, dtype: torch.dtype, run: Run | None = None) -> None:
    """End the run if the log-probs of any one engine differ from the trainer's. Engines are compared one by one.

    ``limit``: mean nats per token in bf16, 0 disables; in fp32 a thousandth of it. ``run``: given if vLLM samples. In
    its first comparison nothing has been trained yet, so a difference means that vLLM computes the model differently:
    exit code 2. Later, and without ``run``, raises RuntimeError.
    """
    limit = limit * (1e-3 if dtype == torch.float32 else 1.0)
    sums_E, counts_E = stats.sampler_diff_2E
    means_E = sums_E / counts_E.clamp(min=1)
    worst = means_E.argmax().item()
    if limit > 0 and means_E[worst] > limit:
        differ = f"sampler and trainer log-probs differ by {means_E[worst]:.3g} nats per token (engine {worst}; "
        cause = "the engine has stale weights or a different model"
        if run is not None and not run.sampler_agreed:
            cause = "vLLM computes this architecture differently (docs/models.md); use --rollout hf"
            refuse(f"{differ}--max_logprob_diff: {limit:g}) before any training: {cause}")
        raise RuntimeError(f"{differ}--max_logprob_diff: {limit:g}): {cause}")
    if run is not None and counts_E.sum() > 0:
        run.sampler_agreed = True


def check_engines(
    policy,
    engine: Engine,
    samples: list[Sample],
    trained: list[int],
    step: int,
    args,
    run: Run,
) -> dict:
    """Compare engines and trainer on tokens that the update does not compare. Returns metrics of |log-prob difference|.

    Call it before the first update of ``step``. With --async_steps it compares the probe samples requested after the
    last push; otherwise some samples of each engine that has none among ``trained``. Every rank must call. Raises
    RuntimeError as ``check_sampler`` does.
    """
    if args.async_steps > 0:
        looks = gather_samples(engine.probe_samples())
    else:
        seen = {samples[i].engine for i in trained}
        looks = []
        for number in set(range(engine.count)) - seen:
            looks += [sample for sample in samples if sample.engine == number][:4]
    if not looks:
        return {}
    offsets = token_offsets(looks)
    sampler_N = flat([s.sampler_logprobs for s in looks], run.device)
    fresh_N = flat([s.token_versions() == step for s in looks], run.device)
    engine_N = per_token([s.engine for s in looks], offsets, run.device)
    stats = TokenStats(run.device, engine.count)
    for mb in micro_batches(looks, list(range(len(looks))), **run.placement):
        diff_T = (policy(mb)[0] - sampler_N[mb.tokens]).abs()
        stats.add(fresh_N[mb.tokens], {"tokens": torch.ones_like(diff_T), "diff": diff_T})
        stats.add_sampler_diff(fresh_N[mb.tokens], diff_T, engine_N[mb.tokens])
    sums, maxima = stats.reduce()
    check_sampler(stats, args.max_logprob_diff, run.dtype, run if args.rollout == "vllm" else None)
    if sums["tokens"] == 0:
        return {}
    return {"sampler/logprob_diff_mean": sums["diff"] / sums["tokens"], "sampler/logprob_diff_max": maxima["diff"]}


def mini_batch(groups: list[int], step: int, epoch: int, mini: int, args) -> set[int]:
    """Return the groups of one optimizer step. --shuffle_mini_batches shuffles them in every epoch, by the seed."""
    order = list(groups)
    if args.shuffle_mini_batches:
        random.Random(f"{args.seed}/{step}/{epoch}").shuffle(order)
    return even_part(order, mini, args.num_mini_batches)


def even_part(items: list[int], part: int, parts: int) -> set[int]:
    """Return part number ``part`` of a list that is split as evenly as possible."""
    size = len(items) / parts
    return set(items[round(part * size) : round((part + 1) * size)])


class Stopwatch:
    """Seconds by phase: ``with phases("generate"): ...`` adds to ``phases.seconds["generate"]``.

    A phase inside another one (an evaluation also generates) counts as part of the outer one. A phase includes the GPU
    work that it started.
    """

    def __init__(self) -> None:
        self.inside = False
        self.restart()

    def restart(self) -> None:
        """Reset all phases at the beginning of a step."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        Watch.heartbeat()
        if self.inside:
            yield
            return
        self.inside = True
        deepspeed_zero.finish_gpu_work()
        start = time.perf_counter()
        try:
            yield
        finally:
            deepspeed_zero.finish_gpu_work()
            self.inside = False
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self, tokens: int, trained: float) -> dict[str, float]:
        """Return seconds of the step so far, and response tokens per second. ``trained``: tokens of the update.

        time/generate is the time spent waiting. Engines may work ahead, so it gives no rate of theirs.
        """
        seconds = time.perf_counter() - self.started
        metrics = {f"time/{phase}": s for phase, s in self.seconds.items()}
        metrics["time/step"] = seconds
        metrics["perf/tokens_per_second"] = tokens / seconds
        metrics["perf/update_tokens_per_second"] = trained / self.seconds["update"]
        metrics["perf/resident_gib"] = psutil.Process().memory_info().rss / 2**30
        if torch.cuda.is_available():
            metrics["perf/gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return metrics


# Parts that compute in a phase and have to be on the GPU. The others may leave it: the engine with --vllm_sleep engine
# and all (until the next push), the trainers' states with --vllm_sleep all, the reference with --offload ref. In the
# phase "save", which is not listed, everything stays where it is.
COMPUTES = {
    "generate": {"engine"},
    "score": {"engine"},
    "eval": {"engine"},
    "push": {"engine"},
    "logprobs": {"trainers", "reference"},
    "update": {"trainers"},
    "update with the full KL": {"trainers", "reference"},
}


class Phases(Stopwatch):
    """Stopwatch of a run. When a phase begins, it moves the parts that compute to the GPU, and others away from it."""

    def __init__(self, args, engine: Engine, reference: TokenLogprobs | None, trainers: list, device: torch.device):
        super().__init__()
        self.engine = engine if args.vllm_sleep != "off" else None
        self.trainers = trainers if args.vllm_sleep == "all" else []
        self.reference = reference if "ref" in args.offload else None
        self.device = device
        self.full_kl = args.kl_coefficients[0] > 0 and args.kl_estimator == "full"
        self.present = {"trainers"}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if not self.inside:
            place = "update with the full KL" if phase == "update" and self.full_kl else phase
            self.make_room(COMPUTES.get(place, self.present))
        with super().__call__(phase):
            yield

    def make_room(self, wanted: set[str]) -> None:
        """Move unwanted parts off the GPU, then the wanted ones onto it. The engine wakes up when weights arrive."""
        if "engine" in self.present - wanted and self.engine is not None:
            self.engine.sleep()
        if "trainers" in self.present - wanted:
            deepspeed_zero.leave_gpu(self.trainers)
        if "trainers" in wanted - self.present:
            deepspeed_zero.return_to_gpu(self.trainers)
        if "reference" in self.present - wanted and self.reference is not None:
            deepspeed_zero.return_device(self.reference)
        if "reference" in wanted - self.present and self.reference is not None:
            deepspeed_zero.borrow_device(self.reference, self.device)
        self.present = wanted


def sample_metrics(samples: list[Sample], rewards_PG: torch.Tensor, step: int) -> dict[str, float | None]:
    """Return the metrics that depend only on the samples of a step, not on the update."""
    lengths = [s.length for s in samples]
    equal_P = equal_rewards(rewards_PG.amin(1), rewards_PG.amax(1))
    staleness_N = step - np.concatenate([s.token_versions() for s in samples])
    solved = {s.prompt_id for s in samples if is_correct(s)}
    parts = sorted({name for s in samples for name in s.reward_parts})[:32]  # a verifier may take names from a response
    return {
        **{f"reward/{name}": mean([s.reward_parts[name] for s in samples if name in s.reward_parts]) for name in parts},
        "reward/mean": rewards_PG.mean().item(),
        "reward/std": rewards_PG.std().item(),
        "reward/correct": mean([is_correct(s) for s in samples]),
        "reward/pass@k": len(solved) / len(rewards_PG),
        "reward/format": mean([s.reward_parts["format"] for s in samples if "format" in s.reward_parts]),
        "reward/timeouts": sum(s.reward_status == "timeout" for s in samples),
        "reward/crashes": sum(s.reward_status == "crash" for s in samples),
        "reward/unscorable": sum(s.reward_status == "unscorable" for s in samples),
        "reward/zero_std_frac": equal_P.double().mean().item() if rewards_PG.shape[1] > 1 else None,
        "completions/length_mean": mean(lengths),
        "completions/length_max": max(lengths),
        "completions/truncated_frac": mean([s.finish_reason == "length" for s in samples]),
        "sampler/staleness": staleness_N.mean().item(),
        "sampler/staleness_max": staleness_N.max().item(),
        "sampler/versions": mean([len(s.weight_versions) for s in samples]),
        **(episode_metrics(samples) if any(s.turns for s in samples) else {}),
    }


def episode_metrics(samples: list[Sample]) -> dict[str, float]:
    """Return means per episode of turns, tool calls, seconds and tokens of its environment, and the sum of failures."""
    turns = [[turn for turn in s.turns if turn["role"] == "assistant"] for s in samples]
    answers = [[turn for turn in s.turns if turn["role"] != "assistant"] for s in samples]
    return {
        "env/turns": mean([len(own) for own in turns]),
        "env/tool_calls": mean([sum(len(turn.get("calls", ())) for turn in own) for own in turns]),
        "env/failures": sum(turn["failures"] for own in answers for turn in own),
        "env/tool_seconds": mean([sum(turn["seconds"] for turn in own) for own in answers]),
        "env/tokens": mean([len(s.response_ids) - s.length for s in samples]),
    }


def weight_statistics(old_T: torch.Tensor, sampler_T: torch.Tensor, args) -> dict[str, torch.Tensor]:
    """Return the inputs of ``staleness_metrics``, [T] each: w = old / sampler, w^2, and 1 where cap or mask applies."""
    log_weight_T = (old_T - sampler_T).clamp(-20, 20)
    values = {"weight": log_weight_T.exp(), "weight_squared": (2 * log_weight_T).exp()}
    if args.truncated_importance_sampling_ratio_cap:
        values["capped"] = (values["weight"] > args.truncated_importance_sampling_ratio_cap).float()
    if args.importance_sampling_mask is not None:
        low, high = args.importance_sampling_mask
        values["masked"] = ((values["weight"] < low) | (values["weight"] > high)).float()
    return values


def staleness_metrics(totals: dict[str, float], peaks: dict[str, float]) -> dict[str, float]:
    """Return metrics of the distance between sampler and trainer, from sums and maxima over the trained tokens.

    ess: (sum of w)^2 / (n x sum of w^2) of the importance weights before the cap; 1 if all are equal. logprob_diff:
    over fresh tokens only, because other tokens were sampled with older weights and may differ.
    """
    metrics = {
        "sampler/fresh_frac": totals["fresh"] / totals["tokens"],
        "sampler/ess": totals["weight"] ** 2 / (totals["tokens"] * totals["weight_squared"]),
    }
    if "capped" in totals:
        metrics["sampler/capped_frac"] = totals["capped"] / totals["tokens"]
    if "masked" in totals:
        metrics["sampler/masked_frac"] = totals["masked"] / totals["tokens"]
    if totals["fresh"] > 0:
        metrics["sampler/logprob_diff_mean"] = totals["sampler_diff"] / totals["fresh"]
        metrics["sampler/logprob_diff_max"] = peaks["sampler_diff"]
    return metrics


def mean(values: list[float]) -> float | None:
    """Return the mean, or None if there are no values, so that the metric is left out and not logged as 0."""
    return sum(values) / len(values) if values else None


def eval_metrics(samples: list[Sample], problems: list[Problem], step: int) -> dict[str, float]:
    """Return the metrics of an evaluation of the weights after ``step``; docs/metrics.md has names and units.

    ``samples``: the same number for each of ``problems``. With several sources, each source also has its own metrics.
    Raises RuntimeError if the samples are not of one version of the weights.
    """
    versions = {version for sample in samples for version, _ in sample.weight_versions}
    if len(versions) != 1:
        raise RuntimeError(f"the evaluation after step {step} was answered by weights {sorted(versions)}")
    groups: list[list[Sample]] = [[] for _ in problems]
    for sample in samples:
        groups[sample.prompt_id].append(sample)
    result = {"step": step}
    for name, value in _group_metrics(groups).items():
        result[f"eval/{name}"] = value
    sources = sorted({p.source for p in problems})
    if len(sources) > 1:
        for source in sources:
            own = [group for group, problem in zip(groups, problems, strict=True) if problem.source == source]
            for name, value in _group_metrics(own).items():
                result[f"eval/{source}/{name}"] = value
    result["eval/samples"] = len(groups[0])
    result["eval/right"] = [sum(is_correct(sample) for sample in group) for group in groups]
    result["eval/rewards"] = [mean([sample.score for sample in group]) for group in groups]
    (result["eval/weights_version"],) = versions
    return result


def _group_metrics(groups: list[list[Sample]]) -> dict[str, float]:
    """Return pass@k, majority and lengths for the samples of some problems, the same number for each."""
    count = len(groups[0])
    right = [sum(is_correct(sample) for sample in group) for group in groups]
    samples = [sample for group in groups for sample in group]
    metrics = {"pass@1": sum(right) / len(samples)}
    sizes = {str(2**i): 2**i for i in range(1, count.bit_length())}
    sizes["k"] = count
    for name, k in sizes.items():
        metrics[f"pass@{name}"] = mean([pass_at_k(c, count, k) for c in right])
    metrics["majority@k"] = mean([majority(group) for group in groups])
    metrics["length_mean"] = mean([s.length for s in samples])
    metrics["truncated_frac"] = mean([s.finish_reason == "length" for s in samples])
    metrics["reward_mean"] = mean([s.score for s in samples])
    metrics["graded_frac"] = mean([is_graded(s) for s in samples])
    metrics["problems"] = len(groups)
    return metrics


def hf_thread(args, dtype, rank: int, world_size: int, stop_ids: list[int], inbox, outbox) -> None:
    """Answer the messages of ``vllm_thread`` with transformers' ``generate``, which is slow but needs no other library.

    The thread has its own model, which a push updates as it updates vLLM's. Log-probs come from a forward pass of that
    model. All samples of a prompt are one batch. ``rank`` and ``world_size`` are unused: both threads have the same
    arguments.
    """
    from transformers import GenerationConfig

    try:
        device = pretrained.resolve_device(args)[0]
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread starts on device 0
        model = pretrained.load_model(args, dtype, "sdpa").to(device).eval()
        model.generation_config = GenerationConfig()  # the model's own may change the sampling: a repetition penalty
        version = 0
        busy = 0.0
        outbox.put(("ready",))
        while True:
            kind, *body = inbox.get()
            if kind == "stop":
                return
            if kind == "weights":
                version, weights = body
                model.load_state_dict(dict(weights))
                deepspeed_zero.finish_gpu_work()
                outbox.put(("weights", version, busy))
                busy = 0.0
            if kind == "sleep":
                outbox.put(("slept",))
            if kind == "generate":
                number, requests, sampling = body
                for prompt_ids, keys, seed in _by_prompt(requests):
                    if outbox.closed:
                        return
                    started = time.perf_counter()
                    for answer in _generate(model, prompt_ids, keys, seed, sampling, stop_ids, device):
                        outbox.put(("sample", number, *answer, [(version, 0)]))
                    busy += time.perf_counter() - started
    except BaseException as error:
        outbox.put(("error", error))


def _by_prompt(requests: Iterable[tuple]) -> list[tuple]:
    """Return (prompt ids, keys of its samples, seed of the first) for each prompt."""
    groups: dict[tuple, list] = {}
    for key, prompt_ids, seed in requests:
        group = groups.setdefault((key[0], tuple(prompt_ids)), [])
        group.append((key, seed))
    batches = []
    for (_, prompt_ids), members in groups.items():
        keys = [key for key, _ in members]
        batches.append((list(prompt_ids), keys, members[0][1]))
    return batches


@torch.no_grad()
def _generate(model, prompt_ids, keys, seed, sampling, stop_ids, device):
    """Yield (key, response ids, log-probs, finish reason) of one sample for each of ``keys``."""
    greedy = sampling["temperature"] == 0.0
    options = {
        "do_sample": not greedy,
        "max_new_tokens": sampling["max_tokens"],
        "pad_token_id": stop_ids[0],
        "eos_token_id": -1 if sampling["ignore_eos"] else stop_ids,
    }
    for name in () if greedy else ("temperature", "top_p", "top_k", "min_p"):
        options[name] = sampling.get(name)
    options["repetition_penalty"] = sampling.get("repetition_penalty")
    torch.manual_seed(seed)
    ids = torch.tensor([prompt_ids] * len(keys), device=device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    scorer = TokenLogprobs(model, 1.0 if greedy else sampling["temperature"], chunk=1024)
    for key, row in zip(keys, output[:, len(prompt_ids) :].tolist(), strict=True):
        ends = []
        if not sampling["ignore_eos"]:
            ends = [t for t, token in enumerate(row) if token in stop_ids]
        response = row[: ends[0] + 1] if ends else row
        sample = Sample(0, 0, prompt_ids, response, [], "", [])
        (batch,) = micro_batches(
            [sample],
            [0],
            layout="padded",
            budget=1,
            rank=0,
            world_size=1,
            device=device,
        )
        logprobs = scorer(batch)[0].tolist()
        yield key, response, logprobs, "stop" if ends else "length"

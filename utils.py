"""What the scripts share because a bug in it would have to be fixed twice.

Devices and models, rows and micro-batches, token log-probs, the weight push, waiting for threads and ranks, the
learning rate, saving. Shapes in names: B rows, S positions of a row, T response tokens of a micro-batch, U of them
different, N response tokens of a step, V vocabulary, D hidden size.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kl_estimators import full_vocabulary_kl
from runtime.batching import MicroBatch, micro_batches, token_offsets
from runtime.process import refuse, sync
from runtime.records import Problem, Sample
from runtime.watchdog import Watch


def resolve_device(args) -> tuple[torch.device, torch.dtype, str]:
    """(device of this rank, dtype of weights, attention implementation), with "auto" decided by the hardware.

    A CPU without bf16 instructions multiplies bf16 a hundred times slower than fp32 (measured: 1 against 100 GFLOP/s
    on two AVX2 cores), so "auto" takes bf16 only where the hardware has it. On CPUs eager attention trained faster than
    sdpa in bf16 (750 against 600 tokens/s, SmolLM2-135M); in fp32 neither was ahead at every micro-batch size.
    """
    cuda = torch.cuda.is_available()
    if not cuda and args.vllm_tensor_parallel_size > 1:  # its shared memory has one name and outlives a killed run
        refuse(f"--vllm_tensor_parallel_size {args.vllm_tensor_parallel_size} needs GPUs; on CPUs leave it at 1")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if args.dtype == "auto":
        dtype = torch.bfloat16 if cuda or torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
    else:
        dtype = getattr(torch, args.dtype)
    attention = args.attn_implementation
    if attention == "auto":
        attention = "eager" if not cuda and dtype == torch.bfloat16 else "sdpa"
    return device, dtype, attention


def load_model(args, dtype: torch.dtype, attention: str):
    """The causal language model that ``--model_name_or_path`` names, on the CPU, dropout off, in train mode."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()  # under ZeRO-3 it would load every model in pieces, also those DeepSpeed never sees
    shared = {"revision": args.revision, "trust_remote_code": args.trust_remote_code}
    override = json.loads(args.override_config) if args.override_config else {}
    config = AutoConfig.from_pretrained(args.model_name_or_path, **shared)
    for key, value in override.items():
        if not hasattr(config, key):
            refuse(f"--override_config: the config of {args.model_name_or_path} has no field {key!r}")
        setattr(config, key, value)
    model = AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path, config=config, dtype=dtype, attn_implementation=attention, **shared
    )
    for module in model.modules():  # what is sampled and what is trained must be one function
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for key in ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop"):
        if hasattr(model.config, key):
            setattr(model.config, key, 0.0)
    for module in model.modules():
        if hasattr(module, "attention_dropout") and isinstance(module.attention_dropout, float):
            module.attention_dropout = 0.0
    return model.train()


def stop_token_ids(model, tokenizer) -> list[int]:
    """Every id that ends a response: the generation config's (often several), the config's and the tokenizer's."""
    ids = set()
    for value in (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id):
        ids |= set(value if isinstance(value, list) else [value])
    return sorted(ids - {None})


def deepspeed_config(args, dtype: torch.dtype, cuda: bool) -> dict:
    """ZeRO with fp32 master weights and fp32 gradient accumulation (the default, bf16, loses 1 to 2 % of a gradient).

    Clipping has to stand here: accelerate's ``clip_grad_norm_`` does nothing under DeepSpeed. Buckets of the default
    size (5e8) are allocated in every backward, which on a CPU costs more than the reduction.
    """
    bucket = int(2e8) if cuda else int(2e7)
    zero = {"stage": args.zero_stage, "overlap_comm": cuda, "contiguous_gradients": True}
    zero |= {"reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if args.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
    if args.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": cuda}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": args.max_grad_norm,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    if dtype == torch.bfloat16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return config


def make_accelerator(args, dtype: torch.dtype, device: torch.device):
    """accelerate's Accelerator, with DeepSpeed as ``args`` want it; the process group of all ranks stands afterwards.

    DeepSpeed would compile an all-reduce for inference on CPUs here, which no training calls, and load it at every
    start, beside a lock file that a killed process leaves behind: each later run would wait for it, without an end.
    """
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    deepspeed.ops.__compatible_ops__ = {}  # of what it might compile; not a flag, but read for that all-reduce alone
    cuda = device.type == "cuda"
    # Ranks wait for one that verifies or writes for long; that it stands still is for Watch to say, which looks.
    patience = timedelta(seconds=2 * args.stall_timeout or 86400)
    return Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=deepspeed_config(args, dtype, cuda)),
        kwargs_handlers=[InitProcessGroupKwargs(backend="nccl" if cuda else "gloo", timeout=patience)],
    )


def make_optimizer(parameters: Iterable[nn.Parameter], rate: float, args) -> torch.optim.Optimizer:
    """The optimizer that ``--optimizer`` names, at the learning rate ``rate``."""
    if args.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate, weight_decay=args.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
        weight_decay=args.weight_decay,
        fused=not args.offload_optimizer,
    )


def learning_rate(optimizer_step: int, total: int, args) -> float:
    """Learning rate of one optimizer step, counted from 0, of ``total``: linear warm-up, then the schedule.

    The minimum ``lr_min_ratio * learning_rate`` is reached at step ``total``, one after the last, as in transformers.
    """
    if optimizer_step < args.warm_up_steps:
        return args.learning_rate * (optimizer_step + 1) / (args.warm_up_steps + 1)
    progress = (optimizer_step - args.warm_up_steps) / max(1, total - args.warm_up_steps)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - progress,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * progress)),
    }[args.lr_scheduler_type]
    return args.learning_rate * (args.lr_min_ratio + (1.0 - args.lr_min_ratio) * factor)


class TokenLogprobs(nn.Module):
    """A causal language model, called for the log-probs of given tokens instead of for logits.

    The head runs on response positions only, in fp32 and in chunks, so [S, V] logits never exist. As a module of its
    own it can be handed to DeepSpeed, whose hooks (ZeRO-3 gathers parameters in them) then see the whole forward pass.
    """

    def __init__(self, model, temperature: float, chunk: int):
        super().__init__()
        self.model, self.temperature, self.chunk = model, temperature, chunk

    def hidden(self, batch: MicroBatch) -> torch.Tensor:
        """Last hidden states at the positions that predict a response token: [U, D].

        ``use_cache=False`` is not only thrift: with a cache, transformers no longer finds the borders of packed
        sequences, and they see each other.
        """
        Watch.beat()
        output = self.model.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
        )
        return output.last_hidden_state.flatten(0, 1)[batch.predict]

    def forward(self, batch: MicroBatch, reference: TokenLogprobs | None = None, entropy_gradient: bool = False):
        """(logprobs, entropy, full_kl), each [T] in fp32 nats at the sampling temperature.

        full_kl is KL(policy || reference) over the whole vocabulary, or None without ``reference``. The entropy has a
        gradient only if asked for: it costs another [U, V].
        """
        hidden_UD, reference_UD = self.hidden(batch), None
        if reference is not None:
            with torch.no_grad():
                reference_UD = reference.hidden(batch)
        parts = []
        for start in range(0, len(hidden_UD), self.chunk):
            piece = slice(start, start + self.chunk)
            inputs = (
                *(hidden_UD[piece], batch.targets[piece], entropy_gradient),
                *((reference, reference_UD[piece]) if reference is not None else (None, None)),
            )
            if torch.is_grad_enabled() and len(hidden_UD) > self.chunk:  # hold one chunk of logits, not all of them
                parts.append(checkpoint(self._head, *inputs, use_reentrant=False))
            else:
                parts.append(self._head(*inputs))
        logprobs, entropy, *full_kl = (torch.cat(column)[batch.copies] for column in zip(*parts, strict=True))
        return logprobs, entropy, full_kl[0] if full_kl else None

    def _logits(self, hidden_UD: torch.Tensor) -> torch.Tensor:
        logits_UV = self.model.get_output_embeddings()(hidden_UD).float()
        return logits_UV if self.temperature == 1.0 else logits_UV / self.temperature

    def _head(self, hidden_UD, targets_U, entropy_gradient, reference, reference_UD):
        logits_UV = self._logits(hidden_UD)
        lse_U = logits_UV.logsumexp(-1)
        logprobs_U = logits_UV.gather(-1, targets_U[:, None])[:, 0] - lse_U
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_U = lse_U - ((logits_UV - lse_U[:, None]).exp() * logits_UV).sum(-1)
        if reference is None:
            return logprobs_U, entropy_U
        with torch.no_grad():
            reference_UV = reference._logits(reference_UD)
        return logprobs_U, entropy_U, full_vocabulary_kl(logits_UV, reference_UV)


@torch.no_grad()
def check_forward(policy: TokenLogprobs, layout: str, eos: int) -> None:
    """Refuse a model whose log-probs in this layout are not those of its own plain forward pass.

    Catches what a shorter path would silently get wrong: logits scaled or capped after the head (Gemma, Cohere,
    Granite), layers that ignore positions or a 4-D mask (linear attention, convolutions), a cache that mixes rows.
    """
    size, generator = policy.model.config.get_text_config().vocab_size, random.Random(0)
    prompt = [generator.randrange(size) for _ in range(7)]
    samples = [
        Sample(0, k, prompt, [*(generator.randrange(size) for _ in range(n)), eos], [0.0] * (n + 1), "stop", 0)
        for k, n in enumerate((5, 9))
    ]
    device, dtype = next(policy.parameters()).device, next(policy.parameters()).dtype
    batches = micro_batches(samples, [0, 1], layout=layout, budget=64, rank=0, world_size=1, dtype=dtype, device=device)
    got = torch.zeros(token_offsets(samples)[-1], device=device)
    for batch in batches:
        got[batch.tokens] = policy(batch)[0]
    plain = []
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.response_ids], device=device)
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        logprobs = (logits / policy.temperature).log_softmax(-1)
        plain.append(logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0])
    error = (got - torch.cat(plain)).abs().mean().item()
    if not error < (1e-3 if dtype == torch.float32 else 0.1):
        refuse(
            f"--batch_layout {layout}: log-probs of this model differ from its own forward pass by {error:.3g} nats a "
            f"token; it does not support this layout (try --batch_layout padded) or changes its logits after the head"
        )


@torch.no_grad()
def current_weights(policy, zero_stage: int) -> list[tuple[str, torch.Tensor]]:
    """The policy's weights by their Hugging Face names, the tied output head included, whole on every rank.

    Stages 0 to 2 give the live tensors: whoever gets them must be done before the next optimizer step. Stage 3 gives
    gathered copies; every rank must call.
    """
    model = policy.module.model
    if zero_stage < 3:
        return list(model.state_dict().items())
    import deepspeed

    copies: dict[int, torch.Tensor] = {}  # one for each storage: what was tied stays tied
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [(k, copies.setdefault(t.data_ptr(), t.clone())) for k, t in model.state_dict().items()]


def push_weights(llm, weights: list[tuple[str, torch.Tensor]]) -> None:
    """New weights into a vLLM engine, from the thread that owns it, with no request running.

    ``reload_weights`` is the one route that also serves CPU kernels, which keep packed copies. ``weights`` must hold
    ``lm_head.weight`` even when tied: the head has a packed copy of its own, which would silently stay old. The prefix
    cache holds keys and values of the old weights; the engine refuses to drop it while a request runs, by returning
    False. Raises RuntimeError then.
    """
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    if not llm.reset_prefix_cache():
        raise RuntimeError("vLLM kept its prefix cache after a weight push (a request was still running)")


@torch.no_grad()
def move_reference(reference: TokenLogprobs, policy, alpha: float, zero_stage: int) -> None:
    """reference = alpha * policy + (1 - alpha) * reference (TR-DPO, arXiv 2404.09656); 1 is a copy."""
    own = reference.model.state_dict()
    for name, weight in current_weights(policy, zero_stage):
        own[name].lerp_(weight.to(own[name].device), alpha)


def save_model(policy, tokenizer, folder: Path, zero_stage: int, rank: int) -> None:
    """Weights, config and tokenizer in Hugging Face format; written beside and renamed, so never half there."""
    weights = current_weights(policy, zero_stage)  # every rank takes part
    if rank != 0:
        return
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    policy.module.model.save_pretrained(beside, state_dict=dict(weights))
    tokenizer.save_pretrained(beside)
    for path in beside.iterdir():
        sync(path)
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)


def gather_samples(mine: list[Sample]) -> list[Sample]:
    """All ranks' samples on all ranks, ordered by prompt and sample: the same list everywhere."""
    parts: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, mine)
    return sorted((s for part in parts for s in part), key=lambda s: (s.prompt_id, s.sample_id))


class TokenStats:
    """Sums and maxima over the response tokens of one optimizer step, of this rank and then of all.

    A mean is then a sum over all ranks divided by a count over all ranks, and never sees padding.
    """

    def __init__(self, device: torch.device, engines: int = 1):
        self.device, self.names, self.sums, self.maxima = device, None, None, None
        self.sampler_diff_2E = torch.zeros(2, engines, device=device)  # sum over tokens, and their number

    @torch.no_grad()
    def add(self, seen_T: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        """Add a micro-batch: the tokens where ``seen_T`` is True. The same names in every call and on every rank."""
        if self.names is None:
            self.names = list(values)
            self.sums, self.maxima = torch.zeros(2, len(values), dtype=torch.float64, device=self.device)
        table = torch.where(seen_T, torch.stack([v.detach().double() for v in values.values()]), 0.0)
        self.sums += table.sum(1)
        self.maxima = torch.maximum(self.maxima, table.amax(1))

    @torch.no_grad()
    def add_sampler_diff(self, seen_T: torch.Tensor, diff_T: torch.Tensor, engine_T: torch.Tensor) -> None:
        """Add |trainer's - sampler's log-prob| of the tokens where ``seen_T`` is True to the engine of each."""
        self.sampler_diff_2E.index_add_(1, engine_T, torch.stack([torch.where(seen_T, diff_T, 0.0), seen_T.float()]))

    def reduce(self) -> tuple[dict[str, float], dict[str, float]]:
        """(sums, maxima) over all ranks, by name. Every rank must call."""
        torch.distributed.all_reduce(self.sampler_diff_2E)
        torch.distributed.all_reduce(self.sums)
        torch.distributed.all_reduce(self.maxima, op=torch.distributed.ReduceOp.MAX)
        return tuple(dict(zip(self.names, x.tolist(), strict=True)) for x in (self.sums, self.maxima))


def check_sampler(stats: TokenStats, limit: float, dtype: torch.dtype) -> None:
    """End the run when the log-probs of one engine differ from the trainer's: over all engines it would be diluted.

    ``limit``: mean nats per token in bf16, 0 disables; in fp32 a thousandth of it. Raises RuntimeError.
    """
    limit = limit * (1e-3 if dtype == torch.float32 else 1.0)
    sums_E, counts_E = stats.sampler_diff_2E
    means_E = sums_E / counts_E.clamp(min=1)
    worst = means_E.argmax().item()
    if limit > 0 and means_E[worst] > limit:
        raise RuntimeError(
            f"sampler and trainer log-probs differ by {means_E[worst]:.3g} nats per token (engine {worst}; "
            f"--max_sampler_diff: {limit:g}): the engine has stale weights or a different model"
        )


def set_learning_rate(engine, rate: float) -> None:
    """Set the learning rate of a DeepSpeed engine's optimizer."""
    for group in engine.optimizer.param_groups:
        group["lr"] = rate


def backward(engine, loss: torch.Tensor, is_last: bool) -> None:
    """Backward pass of a micro-batch; after the last one of a mini-batch, the optimizer step."""
    engine.set_gradient_accumulation_boundary(is_boundary=is_last)
    engine.backward(loss)
    if is_last:
        engine.step()


def even_part(items: list[int], part: int, parts: int) -> set[int]:
    """Part number ``part`` of a list that is split as evenly as possible."""
    size = len(items) / parts
    return set(items[round(part * size) : round((part + 1) * size)])


class Stopwatch:
    """Seconds by phase: ``with clock("generate"): ...`` adds to ``clock.seconds["generate"]``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.started = time.perf_counter()
        self.running: list[tuple[str, float]] = []

    def __call__(self, phase: str) -> Stopwatch:
        Watch.beat()
        self.running.append((phase, time.perf_counter()))
        return self

    def __enter__(self) -> Stopwatch:
        return self

    def restart(self) -> None:
        """Forget the phases; a step begins."""
        self.seconds.clear()
        self.started = time.perf_counter()

    def metrics(self, tokens: int, trained: float) -> dict[str, float]:
        """Of the step so far: seconds, and response tokens a second. ``trained``: tokens of the update."""
        seconds = time.perf_counter() - self.started
        return {f"time/{phase}": s for phase, s in self.seconds.items()} | {
            "time/step": seconds,
            "perf/tokens_per_second": tokens / seconds,
            "perf/generate_tokens_per_second": tokens / self.seconds["generate"],
            "perf/update_tokens_per_second": trained / self.seconds["update"],
        }

    def __exit__(self, *_: object) -> None:
        phase, start = self.running.pop()
        if self.running:  # inside another phase (an evaluation generates, too): its seconds are that one's
            return
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


def sample_metrics(samples: list[Sample], rewards_PG: torch.Tensor, step: int) -> dict[str, float | None]:
    """The metrics that follow from a step's samples alone, whatever is then made of them."""
    lengths = [len(s.response_ids) for s in samples]
    return {
        "reward/mean": rewards_PG.mean().item(),
        "reward/std": rewards_PG.std().item(),
        "reward/correct": mean([s.reward_parts.get("correct", s.score) for s in samples]),
        "reward/format": mean([s.reward_parts["format"] for s in samples if "format" in s.reward_parts]),
        "reward/timeouts": sum(s.reward_status == "timeout" for s in samples),
        "reward/errors": sum(s.reward_status == "crash" for s in samples),
        "reward/unscorable": sum(s.reward_status == "unscorable" for s in samples),
        "reward/zero_std_frac": (rewards_PG.amax(1) == rewards_PG.amin(1)).double().mean().item(),
        "completions/length_mean": mean(lengths),
        "completions/length_max": max(lengths),
        "completions/truncated_frac": mean([s.finish_reason == "length" for s in samples]),
        "sampler/staleness": mean([step - s.weights_version for s in samples]),
    }


def mean(values: list[float]) -> float | None:
    """None where there is nothing to take a mean of: a metric without a value is left out, not logged as 0."""
    return sum(values) / len(values) if values else None


def pass_at_k(correct: int, total: int, k: int) -> float:
    """Unbiased pass@k of ``correct`` right answers among ``total``: 1 - C(n-c, k) / C(n, k) (arXiv 2107.03374)."""
    return 1.0 - math.comb(total - correct, k) / math.comb(total, k)


def is_right(sample: Sample) -> bool:
    """Whether a response counts as right: its part ``correct``, or else its score, is above 0.5."""
    return sample.reward_parts.get("correct", sample.score) > 0.5


def majority(group: list[Sample]) -> float:
    """Whether the answer that most responses to one prompt give is right; of n equally frequent ones each counts 1/n.

    All right responses give the same answer, however they write it. Nothing extracted: the whole text is the answer.
    """
    votes = Counter(None if is_right(s) else (s.extracted or s.response).strip() for s in group)
    first = [answer for answer, count in votes.items() if count == max(votes.values())]
    return first.count(None) / len(first)


def eval_metrics(samples: list[Sample], problems: list[Problem], step: int) -> dict[str, float]:
    """What an evaluation of the weights after ``step`` found; names and units are in docs/metrics.md.

    ``samples``: equally many to each of ``problems``. Of several sources each has its own numbers as well.
    """
    groups: list[list[Sample]] = [[] for _ in problems]
    for sample in samples:
        groups[sample.prompt_id].append(sample)
    count = len(groups[0])

    def numbers(places: list[int]) -> dict[str, float]:
        right = [sum(map(is_right, groups[p])) for p in places]
        answers = [s for p in places for s in groups[p]]
        found = {"pass@1": sum(right) / len(answers)}
        for name, k in [*((2**i, 2**i) for i in range(1, count.bit_length())), ("k", count)]:
            found[f"pass@{name}"] = mean([pass_at_k(c, count, k) for c in right])
        found["majority@k"] = mean([majority(groups[p]) for p in places])
        found["length_mean"] = mean([len(s.response_ids) for s in answers])
        found["truncated_frac"] = mean([s.finish_reason == "length" for s in answers])
        return found | {"problems": len(places)}

    every, sources = list(range(len(problems))), sorted({p.source for p in problems})
    result = {"step": step} | {f"eval/{name}": value for name, value in numbers(every).items()}
    for source in sources if len(sources) > 1 else ():
        own = numbers([p for p in every if problems[p].source == source])
        result |= {f"eval/{source}/{name}": value for name, value in own.items()}
    return result | {"eval/samples": count, "eval/weights_version": samples[0].weights_version}


def seed_everything(seed: int) -> None:
    """Python, NumPy and torch, this process."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed % 2**32)  # noqa: NPY002 (libraries draw from the global state)
    torch.manual_seed(seed)


def hf_thread(args, dtype, rank: int, world_size: int, stop_ids: list[int], inbox, outbox) -> None:
    """Answers the messages of ``vllm_thread`` with transformers' ``generate``: slow, and needs nothing else.

    Has a model of its own, so that a push means the same as with vLLM. Log-probs come from a forward pass of it. All
    samples of a prompt are one batch. ``rank`` and ``world_size`` are there for the same call.
    """
    try:
        device = resolve_device(args)[0]
        model = load_model(args, dtype, "sdpa").to(device).eval()
        version = 0
        outbox.put(("ready",))
        while True:
            kind, *body = inbox.get()
            if kind == "stop":
                return
            if kind == "weights":
                model.load_state_dict(dict(body[0]))
                version += 1
                outbox.put(("weights", version))
            if kind == "sleep":
                outbox.put(("slept",))
            if kind == "generate":
                requests, sampling = body
                for prompt_ids, keys, seed in _by_prompt(requests):
                    for message in _generate(model, prompt_ids, keys, seed, sampling, stop_ids, version, device):
                        outbox.put(message)
    except BaseException as error:
        outbox.put(("error", error))


def _by_prompt(requests: Iterable[tuple]) -> list[tuple]:
    groups: dict[tuple, list] = {}
    for key, prompt_ids, seed in requests:
        groups.setdefault((key[0], tuple(prompt_ids)), []).append((key, seed))
    return [(list(ids), [k for k, _ in members], members[0][1]) for (_, ids), members in groups.items()]


@torch.no_grad()
def _generate(model, prompt_ids, keys, seed, sampling, stop_ids, version, device):
    greedy = sampling["temperature"] == 0.0
    options = {"do_sample": not greedy, "max_new_tokens": sampling["max_tokens"], "pad_token_id": stop_ids[0]}
    if not greedy:
        options |= {"temperature": sampling["temperature"], "top_p": sampling["top_p"], "top_k": sampling["top_k"]}
    options["eos_token_id"] = -1 if sampling["ignore_eos"] else stop_ids
    torch.manual_seed(seed)
    ids = torch.tensor([prompt_ids] * len(keys), device=device)
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    scorer = TokenLogprobs(model, 1.0 if greedy else sampling["temperature"], chunk=1024)
    for key, row in zip(keys, output[:, len(prompt_ids) :].tolist(), strict=True):
        ends = [] if sampling["ignore_eos"] else [t for t, token in enumerate(row) if token in stop_ids]
        response = row[: ends[0] + 1] if ends else row
        sample = Sample(0, 0, prompt_ids, response, [], "", 0)
        batch = micro_batches(
            *([sample], [0]), layout="padded", budget=1, rank=0, world_size=1, dtype=model.dtype, device=device
        )[0]
        logprobs = scorer(batch)[0].tolist()
        yield ("sample", key, response, logprobs, "stop" if ends else "length", version)

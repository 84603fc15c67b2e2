"""Policy losses of other frameworks, called as their trainers call them: on padded rows, with the counts of a step.

An adapter takes a function that loads the framework's modules, and a loss of the user's own or None. It returns losses
by name, functions of a Micro that return the scalar of backward, with the defaults of the framework's own settings.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from frameworks import defaults_of, fit, scalar_of
from torch import Tensor
from torch.nn.functional import pad


class Micro(NamedTuple):
    """A micro-batch of one optimizer step: right-padded rows [B, T], unless another shape is noted."""

    logprobs: Tensor  # of the policy, with gradient
    old: Tensor
    ref: Tensor
    sampler: Tensor
    advantages: Tensor
    mask: Tensor  # 1 for the tokens of the response that the loss counts
    weights: Tensor  # of tokens, such as importance weights, where the trainer passes them
    rows: Tensor  # [B], the rows of the step that this micro-batch has
    step_mask: Tensor  # [R, T], of all rows of the step, on all ranks
    micro_batches: int = 1  # of this rank in this step
    ranks: int = 1  # whose gradients are averaged
    beta: float = 0.0  # coefficient of the KL
    estimator: str = ""  # of the KL, in the framework's words

    @property
    def tokens(self) -> Tensor:
        return self.step_mask.sum()

    @property
    def sequences(self) -> int:
        return len(self.step_mask)


Load = Callable[[str], ModuleType]
Loss = Callable[[Micro], Tensor]


def of_kinds(kinds: dict, own: Callable | None, call: Callable[[Any, Micro], Tensor]) -> dict[str, Loss]:
    """Return a loss of a Micro for each of a framework's functions or settings, or for the user's own function."""
    kinds = kinds if own is None else {own.__name__: own}
    return {str(name): partial(call, kind) for name, kind in kinds.items()}


def verl(load: Load, own: Callable | None) -> dict[str, Loss]:
    """Losses of ``register_policy_loss``, with the ``loss_agg_mode`` that is a loss's own default."""
    core = load("verl.trainer.ppo.core_algos")
    has_counts = "batch_num_tokens" in inspect.signature(core.agg_loss).parameters  # those of the step, since 0.7

    def call(function: Callable, m: Micro) -> Tensor:
        config = fit(core.ActorConfig, strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
        if hasattr(config.policy_loss, "dro_beta"):  # which has no default
            object.__setattr__(config.policy_loss, "dro_beta", 0.05)
        counts = {"dp_size": m.ranks, "batch_num_tokens": m.tokens, "global_batch_size": m.sequences}
        if has_counts:
            config.global_batch_info.update(counts)
        known = {
            "old_log_prob": m.old,
            "log_prob": m.logprobs,
            "advantages": m.advantages,
            "response_mask": m.mask,
            "config": config,
            "rollout_is_weights": m.weights,
        }
        loss = scalar_of(fit(function, **known))
        if m.beta:
            kl = core.kl_penalty(m.logprobs, m.ref, m.estimator)
            loss = loss + m.beta * fit(
                core.agg_loss, loss_mat=kl, loss_mask=m.mask, loss_agg_mode="token-mean", **counts
            )
        return loss if has_counts else loss * len(m.rows) / m.sequences * m.ranks

    return of_kinds(core.POLICY_LOSS_REGISTRY, own, call)


TRL_LOSSES = {name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "sapo", "vespo")}
TRL_LOSSES["gspo"] = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
TRL_LOSSES["cispo"] = {"loss_type": "cispo", "epsilon_high": 5.0}  # as it advises; its default is a bound of 0.2


def trainer_of(kind: type, settings: SimpleNamespace, m: Micro) -> Any:
    """Return a GRPOTrainer that was given no model: it has its settings, and what its loss asks of a step."""

    def same(value: Tensor, *_, **__) -> Tensor:
        return value

    def logprobs_and_entropies(*_, **__) -> tuple[Tensor, Tensor, None]:
        return m.logprobs, torch.zeros_like(m.logprobs), None

    high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    known = vars(settings) | {"args": settings, "epsilon_low": settings.epsilon, "epsilon_high": high}
    known |= {"use_vllm": True, "vllm_importance_sampling_correction": True, "model": SimpleNamespace(training=True)}
    known |= {"_entropy_bonus_enabled": False, "aux_loss_enabled": False, "max_completion_length": m.mask.shape[1]}
    known["accelerator"] = SimpleNamespace(num_processes=m.ranks, gather=same, gather_for_metrics=same, reduce=same)
    known["current_gradient_accumulation_steps"] = m.micro_batches
    known["_get_per_token_logps_and_entropies"] = logprobs_and_entropies
    known["_metrics"] = defaultdict(lambda: defaultdict(list))
    trainer = kind.__new__(kind)
    vars(trainer).update(known)
    return trainer


def trl(load: Load, own: Callable | None) -> dict[str, Loss]:
    """``_compute_loss(self, model, inputs)`` of GRPOTrainer with each loss_type, and with sequence-level ratios."""
    kind = load("trl.trainer.grpo_trainer").GRPOTrainer
    config = load("trl.trainer.grpo_config").GRPOConfig

    def call(changes: Any, m: Micro) -> Tensor:
        more = {} if changes is own else changes
        settings = defaults_of(config, **more, steps_per_generation=m.micro_batches, beta=m.beta)
        ids = torch.zeros(m.mask.shape, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": ids[:, :1] + 1,
            "completion_ids": ids,
            "completion_mask": m.mask,
            "advantages": m.advantages[:, 0],
            "old_per_token_logps": m.old,
            "ref_per_token_logps": m.ref,
            "importance_sampling_ratio": m.weights,
            "sampling_per_token_logps": m.sampler,
            "num_items_in_batch": m.tokens,
        }
        return (own or kind._compute_loss)(trainer_of(kind, settings, m), None, inputs)

    return of_kinds(TRL_LOSSES, own, call)


def prime(load: Load, own: Callable | None) -> dict[str, Loss]:
    """``loss_fn(inputs: LossInputs, **kwargs)``, for one sequence at a time."""
    module = load("prime_rl.trainer.rl.loss")
    configs = load("prime_rl.configs.trainer")
    kinds = {}
    for name, title in (("default", "Default"), ("ipo", "IPO")):
        if hasattr(module, f"{name}_loss_fn"):
            fields = vars(getattr(configs, f"{title}LossConfig")).items()
            settings = SimpleNamespace(**{field: getattr(value, "default", value) for field, value in fields})
            kinds[name] = partial(getattr(module, f"{name}_loss_fn"), loss_config=settings)

    def call(function: Callable, m: Micro) -> Tensor:
        rows = {"trainer_logprobs": m.logprobs, "inference_logprobs": m.sampler, "advantages": m.advantages}
        rows |= {"loss_mask": m.mask.bool(), "rl_weights": m.weights}
        known = {name: list(value) for name, value in rows.items()}
        known |= {"rl_loss_fn": function, "rl_scale": m.tokens, "ce_scale": 1, "ref_kl_scale": 1}
        known |= dict.fromkeys(("ref_logprobs", "ce_weights", "ref_kl_weights"))
        return m.ranks * module.compute_loss(**known)[0]

    return of_kinds(kinds, own, call)


NEMO_LOSSES = {
    "grpo": {},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "sequence mean": {"token_level_loss": False},
    "cispo": {"use_cispo": True},
    "reinforce": {"disable_ppo_ratio": True},
    "dual clip": {"ratio_clip_c": 3.0},
    "on policy": {"force_on_policy_ratio": True},
    "importance sampling": {"use_importance_sampling_correction": True},
}
for kind, low, high in (("tis", 0.0, 2.0), ("icepop", 0.5, 5.0), ("seq-mask-tis", 0.9, 1.1)):
    NEMO_LOSSES[kind] = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": low,
        "truncated_importance_sampling_ratio": high,
    }


def nemo(load: Load, own: Callable | None) -> dict[str, Loss]:
    """ClippedPGLossFn with each of NEMO_LOSSES, or another LossFunction of log-probs."""
    module = load("nemo_rl.algorithms.loss.loss_functions")

    def call(settings: Any, m: Micro) -> Tensor:
        function = own
        if settings is not own:
            kl = {"reference_policy_kl_penalty": m.beta, "reference_policy_kl_type": m.estimator or "k3"}
            function = module.ClippedPGLossFn(module.ClippedPGLossConfig(**settings | kl))
        rows = {"advantages": m.advantages, "prev_logprobs": m.old, "generation_logprobs": m.sampler}
        rows |= {"reference_policy_logprobs": m.ref, "token_mask": m.mask}
        data = {name: pad(value, (1, 0)) for name, value in rows.items()}  # the first token has no log-prob
        data["sample_mask"] = torch.ones(len(m.rows), dtype=m.mask.dtype)
        counts = {"global_valid_seqs": torch.tensor(float(m.sequences)), "global_valid_toks": m.tokens}
        return m.ranks * scalar_of(function(next_token_logprobs=m.logprobs, data=data, **counts))

    return of_kinds(NEMO_LOSSES, own, call)


SKYRL = "skyrl.backends.skyrl_train.utils.ppo_utils"


def skyrl(load: Load, own: Callable | None) -> dict[str, Loss]:
    """Losses of PolicyLossRegistry: (log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs)."""
    module = load(SKYRL)
    registry = module.PolicyLossRegistry

    def call(name: Any, m: Micro) -> Tensor:
        columns = m.mask.shape[1]
        config = module.AlgorithmConfig(policy_loss_type="regular" if own else name, max_seq_len=columns)
        counts = (m.step_mask, config.loss_reduction, len(m.rows), columns)
        share = module.apply_loss_reduction_to_advantages_minibatch(torch.ones_like(m.step_mask), *counts)[m.rows]
        function = own or registry.get(name)
        loss = scalar_of(function(m.logprobs, m.old, m.advantages * share, config, m.mask, m.sampler))
        if m.beta:
            loss = loss + m.beta * (module.compute_approx_kl(m.logprobs, m.ref, m.mask, m.estimator) * share).sum()
        return m.ranks * loss

    return of_kinds({name: name for name in registry.list_available()}, own, call)


OPENRLHF_LOSSES = {
    "ppo": {},
    "gspo": {"policy_loss_type": "gspo"},
    "dual clip": {"dual_clip": 3.0},
    "sequence mean": {"token_level_loss": False},
}
for kind, low, high in (("tis", 0.5, 5.0), ("icepop", 0.5, 5.0), ("seq-mask-tis", 0.999, 1.002)):
    bounds = {"vllm_is_correction_type": kind, "vllm_is_truncated_threshold": [low, high]}
    OPENRLHF_LOSSES[kind] = {"enable_vllm_is_correction": True} | bounds


def openrlhf(load: Load, own: Callable | None) -> dict[str, Loss]:
    """``PolicyLoss(settings)(log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, counts)``."""
    module = load("openrlhf.models.loss")

    def call(settings: Any, m: Micro) -> Tensor:
        function = own or module.PolicyLoss(**settings).forward
        known = {
            "log_probs": m.logprobs,
            "old_log_probs": m.old,
            "advantages": m.advantages,
            "action_mask": m.mask,
            "rollout_log_probs": m.sampler,
            "dp_size": m.ranks,
            "batch_num_tokens": m.tokens / m.micro_batches,
            "global_batch_size": m.sequences / m.micro_batches,
        }
        return scalar_of(fit(function, **known)) / m.micro_batches  # DeepSpeed divides

    return of_kinds(OPENRLHF_LOSSES, own, call)


def open_instruct(load: Load, own: Callable | None) -> dict[str, Loss]:
    """``compute_grpo_loss(new_logprobs, ratio, advantages, ref_logprobs, config, rho_weights)`` and its mean."""
    module = load("open_instruct.grpo_utils")
    masked_mean = load("open_instruct.rl_utils").masked_mean

    def call(kind: Any, m: Micro) -> Tensor:
        config = defaults_of(module.GRPOExperimentConfig, loss_fn=module.GRPOLossType.dapo if kind is own else kind)
        config.kl_estimator = ("", "k1", "k2", "k3", "k4").index(m.estimator) - 1
        ratio = (m.logprobs - m.old).exp()
        function = own or module.compute_grpo_loss
        losses, _, kl = function(m.logprobs, ratio, m.advantages, m.ref if m.beta else None, config, m.weights)
        return m.ranks * masked_mean(losses + m.beta * kl, m.mask.bool(), None, m.tokens)

    return of_kinds({kind.value: kind for kind in module.GRPOLossType}, own, call)


def tinker(load: Load, own: Callable | None) -> dict[str, Loss]:
    """``loss(data, logprobs) -> (loss, metrics)`` of forward_backward_custom; the sum over its micro-batches counts."""

    def tensor_data(values: Tensor) -> SimpleNamespace:
        return SimpleNamespace(data=values, to_torch=lambda: values, tolist=values.tolist)

    def call(function: Callable, m: Micro) -> Tensor:
        data = []
        for old, advantages, mask in zip(m.sampler, m.advantages, m.mask, strict=True):
            inputs = {"logprobs": old, "advantages": advantages * mask, "mask": mask}
            data.append(SimpleNamespace(loss_fn_inputs={name: tensor_data(value) for name, value in inputs.items()}))
        return m.ranks * scalar_of(function(data, list(m.logprobs)))

    return of_kinds({}, own, call)


def plain(load: Load, own: Callable | None) -> dict[str, Loss]:
    """Functions of logprobs and any of old, sampler, ref, advantages, mask: a loss per token, [B, T], or a scalar."""

    def call(function: Callable, m: Micro) -> Tensor:
        result = scalar_of(fit(function, **m._asdict()))
        if result.ndim == 0:
            return result * len(m.rows) / m.sequences * m.ranks
        return (result * m.mask).sum() / m.tokens * m.ranks

    return of_kinds({}, own, call)


class Adapter(NamedTuple):
    """Finds and calls a framework's losses and advantage estimators."""

    losses: Callable[[Load, Callable | None], dict[str, Loss]]
    asked: tuple[str, ...] = ()  # the modules that are imported
    estimators: tuple[str, ...] = ()  # of the KL that is added to the loss
    weights: bool = False  # whether the trainer passes weights
    old: bool = True  # whether the trainer passes old log-probs besides the sampler's
    folders: tuple[str, ...] = (".",)  # of the packages, in the framework's repository


ADAPTERS = {
    "verl": Adapter(
        verl,
        ("verl.trainer.ppo", "verl.trainer.config", "verl.workers.config", "verl.base_config", "verl.utils"),
        ("kl", "abs", "mse", "low_var_kl", "k1+", "k3+"),
        weights=True,
    ),
    "trl": Adapter(
        trl,
        ("trl.trainer.grpo_trainer", "trl.trainer.grpo_config", "trl.trainer.base_config", "trl.trainer.utils"),
        ("k3",),
        weights=True,
    ),
    "prime": Adapter(
        prime,
        ("prime_rl.trainer.rl.loss", "prime_rl.configs"),
        weights=True,
        old=False,
        folders=("src", "packages/prime-rl-configs/src", "."),
    ),
    "nemo": Adapter(nemo, ("nemo_rl.algorithms.loss", "nemo_rl.algorithms.utils"), ("k1", "k2", "k3")),
    "skyrl": Adapter(
        skyrl,
        ("skyrl.backends.skyrl_train.utils", "skyrl.train.config"),
        ("k1", "k2", "k3", "abs"),
    ),
    "openrlhf": Adapter(openrlhf, ("openrlhf.models.loss", "openrlhf.models.utils")),
    "open-instruct": Adapter(
        open_instruct,
        ("open_instruct.grpo_utils", "open_instruct.model_utils", "open_instruct.rl_utils"),
        ("k1", "k2", "k3", "k4"),
        weights=True,
    ),
    "tinker": Adapter(tinker, old=False),
    "plain": Adapter(plain),
}

"""Policy losses of other frameworks, called as their trainers call them: on padded rows, with the counts of a step.

An adapter takes a function that loads the framework's modules, and a loss of the user's own or None. It returns the
losses by name, each of which takes a Micro and returns the scalar that the trainer calls backward on. The frameworks'
own configuration classes give the settings, with their defaults. Nothing here needs a GPU, Ray or a server.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

UNUSED = ("wandb", "transformers", "deepspeed", "datasets", "vllm", "peft", "accelerate")


class Micro(NamedTuple):
    """A micro-batch of one optimizer step: right-padded rows [B, T], unless another shape is noted."""

    logprobs: Tensor  # of the policy, with gradient
    old: Tensor
    sampler: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor  # 1 for the tokens of the response that the loss counts
    weights: Tensor  # importance weights or weights of tokens that the trainer passes, where a loss takes them
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


Loss = Callable[[Micro], Tensor]


class Adapter(NamedTuple):
    """How a framework's losses are found and called."""

    losses: Callable[[Callable[[str], ModuleType], Callable | None], dict[str, Loss]]
    folders: tuple[str, ...] = (".",)  # of the packages, in the framework's repository
    asked: tuple[str, ...] = ()  # the modules that are imported
    estimators: tuple[str, ...] = ()  # of the KL that is added to the loss
    weights: bool = False  # whether the trainer passes weights
    old: bool = True  # whether the trainer passes old log-probs besides the sampler's
    hidden: tuple[str, ...] = UNUSED


def fit(function: Callable, **known: Any) -> Any:
    """Call a function with those of these arguments that it takes: versions of a framework differ in them."""
    taken = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return function(**known)
    return function(**{name: value for name, value in known.items() if name in taken})


def scalar_of(result: Any) -> Tensor:
    """Return the loss of what a loss function returns: itself, or the first of several values."""
    return result[0] if isinstance(result, tuple) else result


def defaults_of(kind: type, **changes: Any) -> SimpleNamespace:
    """Return the default settings of a configuration class, without making one, and with these changes."""
    found = {}
    for name in {
        name
        for base in reversed(kind.__mro__)
        for name in vars(
            base,
        ).get("__annotations__", {})
    }:
        value = getattr(kind, name, None)
        field = getattr(kind, "__dataclass_fields__", {}).get(name)
        if field is not None and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        found[name] = getattr(value, "default", value)
    return SimpleNamespace(**found | changes)


def verl(
    load: Callable[[str], ModuleType], own: Callable | None
) -> dict[
    str,
    Loss,
]:
    """Losses of ``register_policy_loss``, with the ``loss_agg_mode`` that is a loss's own default."""
    core = load("verl.trainer.ppo.core_algos")
    registered = getattr(core, "POLICY_LOSS_REGISTRY", None)
    if registered is None:  # before 0.5
        registered = {"vanilla": core.compute_policy_loss}
    global_counts = "batch_num_tokens" in inspect.signature(core.agg_loss).parameters
    kind = getattr(core, "ActorConfig", None)

    def call(function: Callable, m: Micro) -> Tensor:
        counts = {"dp_size": m.ranks, "batch_num_tokens": m.tokens, "global_batch_size": m.sequences}
        settings = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
        config = fit(kind, **settings)
        if hasattr(config.policy_loss, "dro_beta"):  # which has no default
            config = fit(kind, **settings, policy_loss=type(config.policy_loss)(dro_beta=0.05))
        if global_counts:
            config.global_batch_info.update(counts)
        known = {"old_log_prob": m.old, "log_prob": m.logprobs, "advantages": m.advantages, "response_mask": m.mask}
        known |= {"config": config, "rollout_is_weights": m.weights, "rollout_log_probs": m.sampler}
        known |= {"eos_mask": m.mask, "cliprange": 0.2}  # of older versions
        loss = scalar_of(fit(function, **known))
        if m.beta:
            mean = {"loss_mask": m.mask, "loss_agg_mode": "token-mean"} | counts
            loss = loss + m.beta * fit(
                core.agg_loss,
                loss_mat=core.kl_penalty(m.logprobs, m.ref, m.estimator),
                **mean,
            )
        return loss if global_counts else loss * len(m.rows) / m.sequences * m.ranks

    return named(registered, own, call)


def named(
    functions: dict[str, Callable],
    own: Callable | None,
    call: Callable[[Callable, Micro], Tensor],
) -> dict:
    """Return the losses of these functions, or of the user's own, as functions of a Micro."""
    functions = functions if own is None else {own.__name__: own}
    return {
        str(getattr(name, "value", name)): partial(
            call,
            function,
        )
        for name, function in functions.items()
    }


def by_settings(
    kinds: dict[str, dict],
    own: Callable | None,
    call: Callable[[dict | None, Micro], Tensor],
) -> dict:
    """Return the losses of these settings, or the user's own, which has none."""
    kinds = kinds if own is None else {own.__name__: None}
    return {name: partial(call, settings) for name, settings in kinds.items()}


TRL_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")


class Trainer:
    """What GRPOTrainer._compute_loss asks of its trainer: the settings, by name, and what a trainer of a step has."""

    def __init__(self, settings: SimpleNamespace, m: Micro, kind: type):
        self.args = settings
        self.kind = kind
        self.micro = m
        self.model = SimpleNamespace(training=True)
        self.accelerator = SimpleNamespace(
            num_processes=m.ranks,
            sync_gradients=True,
            gather=lambda value: value,
            gather_for_metrics=lambda value: value,
            reduce=lambda value, reduction: value,
        )
        self.current_gradient_accumulation_steps = m.micro_batches
        self._metrics = defaultdict(lambda: defaultdict(list))
        self._entropy_bonus_enabled = self.aux_loss_enabled = False
        self.vllm_importance_sampling_correction = self.use_vllm = True
        self.epsilon_low = settings.epsilon
        self.epsilon_high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high

    def __getattr__(self, name: str) -> Any:
        if name in vars(self.args):
            return getattr(self.args, name)
        is_static = isinstance(inspect.getattr_static(self.kind, name), staticmethod)
        return getattr(self.kind, name) if is_static else partial(getattr(self.kind, name), self)

    def _get_per_token_logps_and_entropies(self, *given, **named) -> tuple[Tensor, Tensor, None]:
        return self.micro.logprobs, torch.zeros_like(self.micro.logprobs), None

    def _get_per_token_logps(self, *given, **named) -> Tensor:
        return self.micro.logprobs


def trl(load: Callable[[str], ModuleType], own: Callable | None) -> dict[str, Loss]:
    """``_compute_loss(self, model, inputs)`` of GRPOTrainer with each loss_type, and with sequence-level ratios."""
    trainer = load("trl.trainer.grpo_trainer").GRPOTrainer
    config = load("trl.trainer.grpo_config").GRPOConfig
    function = own or trainer._compute_loss

    def call(changes: dict | None, m: Micro) -> Tensor:
        settings = defaults_of(config, **changes or {})
        settings.steps_per_generation = m.micro_batches
        settings.max_completion_length = m.mask.shape[1]
        settings.beta = m.beta
        length = m.logprobs.shape[1]
        ids = torch.zeros(len(m.rows), length, dtype=torch.long)
        inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1, "completion_ids": ids}
        inputs |= {"completion_mask": m.mask, "advantages": m.advantages[:, 0], "old_per_token_logps": m.old}
        inputs |= {"ref_per_token_logps": m.ref, "importance_sampling_ratio": m.weights}
        inputs |= {"sampling_per_token_logps": m.sampler, "num_items_in_batch": m.tokens}
        return function(Trainer(settings, m, trainer), None, inputs)

    kinds = {name: {"loss_type": name} for name in TRL_LOSSES}
    kinds["gspo"] = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    kinds["cispo"]["epsilon_high"] = 5.0  # which it advises for CISPO; its default is a bound of 0.2
    return by_settings(kinds, own, call)


def prime(load: Callable[[str], ModuleType], own: Callable | None) -> dict[str, Loss]:
    """``loss_fn(inputs: LossInputs, **kwargs)``, for one sequence at a time."""
    module = load("prime_rl.trainer.rl.loss")
    functions = {} if own else {"default": module.default_loss_fn}
    if own is None and hasattr(module, "ipo_loss_fn"):
        functions["ipo"] = module.ipo_loss_fn

    def call(function: Callable, m: Micro) -> Tensor:
        configs = load("prime_rl.configs.trainer")
        kind = configs.IPOLossConfig if function is getattr(module, "ipo_loss_fn", None) else configs.DefaultLossConfig
        settings = () if function is own else (defaults_of(kind),)
        rows = {"trainer_logprobs": m.logprobs, "inference_logprobs": m.sampler, "advantages": m.advantages}
        rows |= {"loss_mask": m.mask.bool(), "rl_weights": m.weights}
        known = {name: list(value) for name, value in rows.items()}
        known |= {"rl_loss_fn": lambda inputs: function(inputs, *settings), "rl_scale": m.tokens}
        known |= {"loss_fn": lambda inputs: function(inputs, *settings), "loss_scale": m.tokens}
        known |= {"ce_scale": 1, "ref_kl_scale": 1}
        known |= dict.fromkeys(("ref_logprobs", "teacher_logprobs", "ce_weights", "ref_kl_weights"))
        return m.ranks * scalar_of(fit(module.compute_loss, **known))

    return named(functions, own, call)


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
for kind, bounds in {
    "tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "seq-mask-tis": (0.9, 1.1),
}.items():
    NEMO_LOSSES[kind] = {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio_min": bounds[0],
        "truncated_importance_sampling_ratio": bounds[1],
    }


def nemo(load: Callable[[str], ModuleType], own: Callable | None) -> dict[str, Loss]:
    """ClippedPGLossFn with each of NEMO_LOSSES, or another LossFunction of log-probs."""
    module = load("nemo_rl.algorithms.loss.loss_functions")

    def call(settings: dict | None, m: Micro) -> Tensor:
        function = own
        if settings is not None:
            kl = {"reference_policy_kl_penalty": m.beta, "reference_policy_kl_type": m.estimator or "k3"}
            function = module.ClippedPGLossFn(module.ClippedPGLossConfig(**settings | kl))
        known = {"advantages": m.advantages, "prev_logprobs": m.old, "generation_logprobs": m.sampler}
        known |= {"reference_policy_logprobs": m.ref, "token_mask": m.mask}
        data = {
            name: torch.nn.functional.pad(
                value,
                (1, 0),
            )
            for name, value in known.items()
        }  # of the first token
        data["sample_mask"] = torch.ones(len(m.rows), dtype=m.mask.dtype)
        counts = {"global_valid_seqs": torch.tensor(float(m.sequences)), "global_valid_toks": m.tokens}
        return m.ranks * scalar_of(function(next_token_logprobs=m.logprobs, data=data, **counts))

    return by_settings(NEMO_LOSSES, own, call)


def skyrl(load: Callable[[str], ModuleType], own: Callable | None) -> dict[str, Loss]:
    """Losses of PolicyLossRegistry: (log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs)."""
    module = load("skyrl.backends.skyrl_train.utils.ppo_utils")
    registered = {name: module.PolicyLossRegistry.get(name) for name in module.PolicyLossRegistry.list_available()}

    def call(name: str, m: Micro) -> Tensor:
        config = module.AlgorithmConfig(policy_loss_type=name, max_seq_len=m.mask.shape[1])
        share = module.apply_loss_reduction_to_advantages_minibatch(
            torch.ones_like(m.step_mask),
            m.step_mask,
            config.loss_reduction,
            len(
                m.rows,
            ),
            m.mask.shape[1],
        )
        function = own or registered[name]
        more = {"config": config, "loss_mask": m.mask, "rollout_logprobs": m.sampler}
        loss = scalar_of(
            function(m.logprobs, m.old, m.advantages * share[m.rows], **more),
        )
        if m.beta:
            value = module.compute_approx_kl(m.logprobs, m.ref, m.mask, m.estimator)
            loss = loss + m.beta * (value * share[m.rows]).sum()
        return m.ranks * loss

    return {name: partial(call, name) for name in ([own.__name__] if own else registered)}


OPENRLHF_LOSSES = {
    "ppo": {},
    "gspo": {"policy_loss_type": "gspo"},
    "dual clip": {"dual_clip": 3.0},
    "sequence mean": {"token_level_loss": False},
}
for kind, low, high in (
    ("tis", 0.5, 5.0),
    ("icepop", 0.5, 5.0),
    ("seq-mask-tis", 0.999, 1.002),
):
    OPENRLHF_LOSSES[kind] = {
        "enable_vllm_is_correction": True,
        "vllm_is_truncated_threshold": [low, high],
        "vllm_is_correction_type": kind,
    }


def openrlhf(load: Callable[[str], ModuleType], own: Callable | None) -> dict[str, Loss]:
    """``PolicyLoss(settings)(log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, counts)``."""
    module = load("openrlhf.models.loss")

    def call(settings: dict | None, m: Micro) -> Tensor:
        function = own if settings is None else module.PolicyLoss(**settings).forward
        known = {"log_probs": m.logprobs, "old_log_probs": m.old, "advantages": m.advantages, "action_mask": m.mask}
        known |= {"rollout_log_probs": m.sampler, "dp_size": m.ranks}
        known |= {"batch_num_tokens": m.tokens / m.micro_batches, "global_batch_size": m.sequences / m.micro_batches}
        return scalar_of(fit(function, **known)) / m.micro_batches  # DeepSpeed divides

    return by_settings(OPENRLHF_LOSSES, own, call)


def open_instruct(load: Callable[[str], ModuleType], own: Callable | None) -> dict[str, Loss]:
    """``compute_grpo_loss(new_logprobs, ratio, advantages, ref_logprobs, config, rho_weights)`` and its mean."""
    module = load("open_instruct.grpo_utils")
    masked_mean = load("open_instruct.rl_utils").masked_mean

    def call(name: str, m: Micro) -> Tensor:
        kinds = {kind.value: kind for kind in module.GRPOLossType}
        config = defaults_of(module.GRPOExperimentConfig, loss_fn=kinds.get(name, kinds["dapo"]))
        config.kl_estimator = ("k1", "k2", "k3", "k4").index(m.estimator) if m.estimator else config.kl_estimator
        known = {"new_logprobs": m.logprobs, "ratio": (m.logprobs - m.old).exp(), "advantages": m.advantages}
        known |= {"ref_logprobs": m.ref if m.beta else None, "config": config, "rho_weights": m.weights}
        losses, _, kl = fit(own or module.compute_grpo_loss, **known)
        return m.ranks * masked_mean(
            losses + m.beta * kl,
            m.mask.bool(),
            None,
            m.tokens,
        )

    names = [own.__name__] if own else [kind.value for kind in module.GRPOLossType]
    return {name: partial(call, name) for name in names}


def tensor_data(values: Tensor) -> SimpleNamespace:
    """Return these values as a TensorData of Tinker."""
    return SimpleNamespace(data=values, to_torch=lambda: values, tolist=values.tolist)


def tinker(load: Callable[[str], ModuleType], own: Callable | None) -> dict[str, Loss]:
    """``loss(data, logprobs) -> (loss, metrics)`` of forward_backward_custom; the sum over its micro-batches counts."""

    def call(function: Callable, m: Micro) -> Tensor:
        data = []
        for old, advantages, mask in zip(m.sampler, m.advantages, m.mask, strict=True):
            inputs = {"logprobs": old, "advantages": advantages * mask, "mask": mask, "weights": mask}
            data.append(SimpleNamespace(loss_fn_inputs={name: tensor_data(value) for name, value in inputs.items()}))
        return m.ranks * scalar_of(function(data, list(m.logprobs)))

    return named({}, own, call)


def plain(load: Callable[[str], ModuleType], own: Callable | None) -> dict[str, Loss]:
    """Functions of logprobs and any of old, sampler, ref, advantages, mask: a loss per token, [B, T], or a scalar."""

    def call(function: Callable, m: Micro) -> Tensor:
        result = scalar_of(fit(function, **m._asdict()))
        if result.ndim == 0:
            return result * len(m.rows) / m.sequences * m.ranks
        return (result * m.mask).sum() / m.tokens * m.ranks

    return named({}, own, call)


Advantages = Callable[[Tensor], Tensor]  # of the rewards of groups, [P, G]


def of_groups(function: Callable, rewards_PG: Tensor) -> Tensor:
    """Call an advantage estimator in verl's form, on responses of one token."""
    prompts, group = rewards_PG.shape
    rewards = rewards_PG.reshape(-1, 1).clone()
    known = {"token_level_rewards": rewards, "response_mask": torch.ones_like(rewards), "gamma": 1.0, "lambd": 1.0}
    known |= {"eos_mask": torch.ones_like(rewards), "index": np.arange(prompts).repeat(group)}
    config = SimpleNamespace(gamma=1.0, lam=1.0, get=lambda name, default=None: default)
    return scalar_of(fit(function, **known, config=config)).reshape(prompts, group)


def verl_advantages(load: Callable[[str], ModuleType]) -> dict[str, Advantages]:
    """Estimators of ``register_adv_est`` that need rewards alone."""
    registered = load("verl.trainer.ppo.core_algos").ADV_ESTIMATOR_REGISTRY
    return {name: partial(of_groups, function) for name, function in registered.items()}


def skyrl_advantages(load: Callable[[str], ModuleType]) -> dict[str, Advantages]:
    """Estimators of AdvantageEstimatorRegistry that need rewards alone."""
    module = load("skyrl.backends.skyrl_train.utils.ppo_utils")
    registry = module.AdvantageEstimatorRegistry
    return {str(name): partial(of_groups, registry.get(name)) for name in registry.list_available()}


ADVANTAGES = {"verl": verl_advantages, "skyrl": skyrl_advantages}
ADAPTERS = {
    "verl": Adapter(
        verl,
        asked=("verl.trainer.ppo", "verl.trainer.config", "verl.workers.config", "verl.base_config", "verl.utils"),
        estimators=("kl", "abs", "mse", "low_var_kl", "k1+", "k3+"),
        weights=True,
    ),
    "trl": Adapter(
        trl,
        asked=("trl.trainer.grpo_trainer", "trl.trainer.grpo_config", "trl.trainer.base_config", "trl.trainer.utils"),
        estimators=("k3",),
        weights=True,
        hidden=(),
    ),
    "prime": Adapter(
        prime,
        folders=("src", "packages/prime-rl-configs/src", "."),
        asked=("prime_rl.trainer.rl.loss", "prime_rl.configs"),
        weights=True,
        old=False,
    ),
    "nemo": Adapter(nemo, asked=("nemo_rl.algorithms.loss", "nemo_rl.algorithms.utils"), estimators=("k1", "k2", "k3")),
    "skyrl": Adapter(
        skyrl, asked=("skyrl.backends.skyrl_train.utils", "skyrl.train.config"), estimators=("k1", "k2", "k3", "abs")
    ),
    "openrlhf": Adapter(openrlhf, asked=("openrlhf.models.loss", "openrlhf.models.utils")),
    "open-instruct": Adapter(
        open_instruct,
        asked=("open_instruct.grpo_utils", "open_instruct.model_utils", "open_instruct.rl_utils"),
        estimators=("k1", "k2", "k3", "k4"),
        weights=True,
    ),
    "tinker": Adapter(tinker, old=False),
    "plain": Adapter(plain),
}

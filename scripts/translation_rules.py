"""Compute our flags from other frameworks' settings: one function for each framework, with the rows of its table.

A row of translation/NAME.tsv says what becomes of a key: ``equal`` (the value as it is), ``computed`` (a function
below), ``always`` (so here whatever is given), ``not here``, or ``renamed`` (an earlier name of another key). Keys are
matched by their full names. Imports no torch, and no module that takes long.
"""

from __future__ import annotations

import ast
import csv
import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from translation_input import Command, value_of

ROOT = Path(__file__).resolve().parent.parent
TABLES = Path(__file__).resolve().parent / "translation"
FRAMEWORKS = ("verl", "trl", "open-instruct", "openrlhf", "areal", "tinyzero")
SCRIPTS = {"grpo": "grpo.py", "ppo": "ppo.py"}
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


class Row(NamedTuple):
    """A key of a framework: its default there, what becomes of it, our flags, and what else there is to know."""

    key: str
    default: str
    kind: str
    ours: str
    note: str


@functools.cache
def rows(framework: str) -> dict[str, Row]:
    """Return key -> row of a framework's table."""
    with (TABLES / f"{framework}.tsv").open(encoding="utf-8", newline="") as lines:
        next(lines)  # the version
        table = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        next(table)
        return {cells[0]: Row(*cells) for cells in table}


def version(framework: str) -> str:
    """Return the version of a framework that its table was read from."""
    with (TABLES / f"{framework}.tsv").open(encoding="utf-8") as lines:
        return next(lines).removeprefix("# ").partition(",")[0].partition(":")[0].strip()


@functools.cache
def fields(script: str) -> dict[str, str]:
    """Return flag -> annotation of grpo.py or ppo.py, by their syntax trees: their import takes seconds."""
    found = {}
    for file in (ROOT / "runtime" / "arguments" / "flags.py", ROOT / SCRIPTS[script]):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name in ("RunFlags", "Args"):
                lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
                found |= {line.target.id.rstrip("_"): ast.unparse(line.annotation) for line in lines}
    return found


@dataclass
class Theirs:
    """The settings of a command by their full names, with the framework's defaults for those it does not give."""

    framework: str
    given: dict[str, Any]
    used: set[str] = field(default_factory=set)

    def __call__(self, key: str, otherwise: Any = None) -> Any:
        """Return the value of a key: as given, else the framework's default, else ``otherwise``."""
        self.used.add(key)
        if key in self.given:
            return self.given[key]
        row = rows(self.framework).get(key)
        default = value_of(row.default) if row is not None and row.default != "(of another key)" else None
        return otherwise if default is None else default

    def has(self, *keys: str) -> bool:
        """Return True if the command gives one of the keys."""
        self.used.update(keys)
        return any(key in self.given for key in keys)

    def text(self, key: str) -> str:
        """Return ``key=value`` as the command gives it."""
        return f"{key}={self.given[key]}" if key in self.given else key


@dataclass
class Ours:
    """The translated command."""

    script: str = "grpo"
    preset: str | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    relied: dict[str, str] = field(default_factory=dict)  # flag -> their key and default, which the command left out
    env: dict[str, str] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    processes: int = 1
    nodes: int = 1
    vllm_args: dict[str, Any] = field(default_factory=dict)
    critic: list[str] = field(default_factory=list)

    def set(self, flag: str, value: Any, relied: str = "") -> None:
        """Set a flag; None leaves it out. ``relied``: their key, where the value is a default of theirs."""
        if value is None:
            return
        self.flags[flag] = value
        if relied:
            self.relied[flag] = relied
        else:
            self.relied.pop(flag, None)

    def note(self, text: str) -> None:
        """Say in the second block what differs."""
        if text not in self.differs:
            self.differs.append(text)

    def lacks(self, text: str) -> None:
        """Say in the third block what has no counterpart."""
        if text not in self.absent:
            self.absent.append(text)


# ---------------------------------------------------------------------------------------------------- shared arithmetic


def number(value: Any, otherwise: float = 0.0) -> float:
    """Return a value as a number; ``otherwise`` where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return otherwise
    try:
        return float(value)
    except ValueError:
        return otherwise


def whole(value: Any, otherwise: int = 0) -> int:
    """Return a value as an integer; ``otherwise`` where it is none."""
    return int(number(value, otherwise))


def sized(ours: Ours, prompts: int, group: int, mini_batches: float, where: str) -> None:
    """Set prompts, samples and mini-batches of a step. ``mini_batches`` is rounded down, and at most one per prompt."""
    count = max(1, min(int(mini_batches), prompts))
    ours.set("num_unique_prompts_rollout", prompts)
    ours.set("num_samples_per_prompt_rollout", group)
    ours.set("num_mini_batches", count)
    if count != mini_batches:
        ours.note(f"{where}: {mini_batches:g} mini-batches become {count}, because whole groups are dealt out")


def schedule(ours: Ours, name: Any, floor: Any = None) -> None:
    """Set the learning-rate schedule from transformers' or verl's name of it, and its final fraction."""
    text = str(name or "constant").split(".")[-1].lower()
    known = {"constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}
    kind = known.get(text) or next((kind for kind in ("cosine", "linear") if kind in text), "")
    if not kind:
        ours.lacks(f"the schedule {text}: constant, linear and cosine are here; linear is nearest to a decay")
        kind = "linear"
    elif text not in known and text != "cosine_with_min_lr":
        ours.note(f"the schedule {text} becomes {kind}")
    ours.set("lr_scheduler_type", kind)
    if kind != "constant":
        ours.set("lr_min_ratio", number(floor))


def dataset(ours: Ours, files: Any, flag: str = "dataset") -> None:
    """Set a data set from a name, or a list of files. ``~`` is expanded, as the framework does it."""
    names = [str(Path(name).expanduser()) if str(name).startswith("~") else str(name) for name in listed(files)]
    if flag == "eval_dataset":
        ours.set(flag, json.dumps(dict.fromkeys(names, 1.0)))
    elif len(names) > 1:
        ours.set(flag, json.dumps(dict.fromkeys(names, 1.0)))
    elif names:
        ours.set(flag, names[0])


def listed(value: Any) -> list[Any]:
    """Return a list of what may be one value, a list, or text with brackets or commas."""
    if value is None:
        return []
    if isinstance(value, str) and value.startswith("["):
        return [part.strip(" '\"") for part in value.strip("[]").split(",") if part.strip()]
    if isinstance(value, str) and "," in value and "{" not in value:
        return [part.strip() for part in value.split(",")]
    return list(value) if isinstance(value, list | tuple) else [value]


def local_rows(name: str) -> int | None:
    """Return the number of rows of a local .jsonl file or folder saved by datasets; None of anything else."""
    path = Path(name.partition("@")[0])
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    split = name.partition("@")[2] or "train"
    for info in (path / split / "dataset_info.json", path / "dataset_info.json"):
        if info.is_file():
            splits = json.loads(info.read_text(encoding="utf-8")).get("splits") or {}
            found = splits.get(split) or next(iter(splits.values()), None)
            return found.get("num_examples") if found else None
    return None


def reward_file(ours: Ours, key: str, path: Any, name: Any) -> None:
    """Say how a reward function of the user's own is written here; until then the columns choose the verifier."""
    stem = re.sub(r"\W", "_", str(name or Path(str(path)).stem))
    ours.note(
        f"{key}: your own reward function {path or ''}{f' {name}' if name else ''} is called here for one response, as "
        f"function(response, ground_truth, row); write that, and add --verifier FILE.py:{stem}. Until then the "
        f"verifier follows from the columns of the data"
    )


def with_variant(ours: Ours, name: str, why: str) -> None:
    """Say that an algorithm is a variant of grpo.py."""
    ours.note(
        f"{why}: python scripts/variant.py {name} > {name}.py writes GRPO with it; run {name}.py with the same flags "
        f"in the place of grpo.py"
    )


def parallel(ours: Ours, size: Any, where: str) -> None:
    """Set the ranks of one engine where they divide the launch."""
    size = whole(size, 1)
    if size <= 1:
        return
    if ours.processes % size == 0:
        ours.set("vllm_tensor_parallel_size", size)
    else:
        ours.note(f"{where}: {size} does not divide the {ours.processes} GPUs; an engine has one GPU")


def ppo_critic(ours: Ours, name: str, theirs: Any, policy: Any) -> None:
    """Add a setting of the critic that differs from the policy's."""
    if theirs is not None and theirs != policy:
        ours.critic.append(f"{name}={theirs:g}" if isinstance(theirs, float) else f"{name}={theirs}")


def adaptive(ours: Ours, target: Any, horizon: Any) -> None:
    """Set --kl_target from an adaptive controller's target and horizon."""
    ours.set("kl_target", [number(target, 0.1), number(horizon, 10000)])


# ----------------------------------------------------------------------------------------------------------------- verl


VERL_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "full": "full"}
VERL_NORM = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}


def verl(t: Theirs, ours: Ours) -> None:
    """Translate the settings of verl, and of TinyZero, which is an early verl."""
    first = t.framework == "tinyzero"
    verl_algorithm(t, ours, first)
    ours.nodes = whole(t("trainer.nnodes"), 1)
    ours.processes = ours.nodes * whole(t("trainer.n_gpus_per_node"), 8)
    prompts, group = whole(t("data.train_batch_size")), whole(t(f"{ROLLOUT}.n"), 1)
    mini = whole(t(f"{ACTOR}.ppo_mini_batch_size"))
    sized(ours, prompts, group, prompts / max(1, mini), t.text(f"{ACTOR}.ppo_mini_batch_size"))
    if ours.script == "grpo" and group == 1:
        ours.set("num_samples_per_prompt_rollout", 8)
        ours.note("rollout.n=1: GRPO compares the responses of a group, so one response learns nothing; 8 here")
    verl_kl(t, ours, first)
    verl_loss(t, ours, first)
    verl_optimizer(t, ours)
    verl_data(t, ours)
    verl_reward(t, ours)
    verl_engine(t, ours)
    verl_run(t, ours)


def verl_algorithm(t: Theirs, ours: Ours, first: bool) -> None:
    """Choose the script, and how advantages are computed."""
    name = str(t("algorithm.adv_estimator", "gae")).rpartition(".")[2].lower()
    critic_off = t("critic.enable") is False
    ours.script = "ppo" if name in ("gae", "reinforce_plus_plus") else "grpo"
    ours.preset = t.framework if ours.script == "ppo" or not first else None
    by_std = t("algorithm.norm_adv_by_std_in_grpo", True)
    if ours.script == "ppo":
        if name == "reinforce_plus_plus" or critic_off:
            ours.set("disable_value", True)
            ours.note(f"adv_estimator={name} without a critic is ppo.py --disable_value: whitened returns")
        return
    kind = {"rloo": "leave_one_out", "rloo_vectorized": "leave_one_out"}.get(name) or ("standard" if by_std else "centered")
    if name in ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized"):
        ours.set("advantage_normalization_type", kind)
    elif name == "reinforce_plus_plus_baseline":
        ours.set("advantage_normalization_type", "centered")
        with_variant(ours, "reinforce_pp", "adv_estimator=reinforce_plus_plus_baseline divides by the std of the batch")
    else:
        ours.set("advantage_normalization_type", "leave_one_out" if name == "remax" else "centered")
        ours.lacks(
            f"algorithm.adv_estimator={name}; --advantage_normalization_type "
            f"{ours.flags['advantage_normalization_type']} has the nearest baseline"
        )


def verl_kl(t: Theirs, ours: Ours, first: bool) -> None:
    """Place the KL. In an early verl it is in the reward unless it is in the loss."""
    in_loss = t(f"{ACTOR}.use_kl_loss", False) is True
    in_reward = not in_loss if first else t("algorithm.use_kl_in_reward", False) is True
    loss_coef, reward_coef = number(t(f"{ACTOR}.kl_loss_coef", 0.001)), number(t("algorithm.kl_ctrl.kl_coef", 0.001))
    in_reward = in_reward and reward_coef > 0
    ours.set("kl_placement", "both" if in_loss and in_reward else "reward" if in_reward else "loss")
    ours.set("beta", loss_coef if in_loss else reward_coef if in_reward else 0.0)
    if in_loss and in_reward:
        ours.set("kl_reward_coef", reward_coef)
    kind = str(t(f"{ACTOR}.kl_loss_type", "low_var_kl"))
    if in_loss:
        ours.set("kl_estimator", VERL_KL.get(kind.rstrip("+"), "k3"))
        ours.set("kl_gradient", "unbiased" if kind.endswith("+") else "naive")
        if ours.flags["kl_estimator"] == "k3" and not first:
            ours.note("k3 in the loss is clipped at 10 there, and not here (docs/evidence/presets.md)")
    elif t.has(f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"):
        ours.note("kl_loss_coef and kl_loss_type are not read there while use_kl_loss is False")
    penalty = str(t("algorithm.kl_penalty", "kl"))
    if in_reward:
        ours.set("kl_reward_estimator", VERL_KL.get(penalty.rstrip("+"), "k1"))
        if t("algorithm.kl_ctrl.type", "fixed") == "adaptive":
            adaptive(ours, t("algorithm.kl_ctrl.target_kl", 0.1), t("algorithm.kl_ctrl.horizon", 10000))
    elif t.has("algorithm.kl_ctrl.kl_coef") and not first:
        ours.note("kl_ctrl.kl_coef is not read there while use_kl_in_reward is False")
    if first and in_loss:
        ours.note("with use_kl_loss=True TinyZero subtracts the KL from the loss, an error of its; here it is added")


def verl_loss(t: Theirs, ours: Ours, first: bool) -> None:
    """Set clipping, normalization of the loss, and corrections for the sampler."""
    ratio = t(f"{ACTOR}.clip_ratio", 0.2)
    low, high = (ratio, ratio) if first else (t(f"{ACTOR}.clip_ratio_low"), t(f"{ACTOR}.clip_ratio_high"))
    if not first and t.has(f"{ACTOR}.clip_ratio") and not t.has(f"{ACTOR}.clip_ratio_low"):
        ours.note(f"clip_ratio={ratio} alone is not read by verl 0.9.1, whose clip_ratio_low and _high are 0.2")
    ours.set("clip_lower", number(low, 0.2))
    ours.set("clip_higher", number(high, 0.2))
    norm = str(t(f"{ACTOR}.loss_agg_mode", "token-mean"))
    ours.set("loss_norm", VERL_NORM.get(norm, "token" if norm == "token-mean" else "constant"))
    scale = t(f"{ACTOR}.loss_scale_factor")
    if norm == "seq-mean-token-sum" or (scale is not None and norm in VERL_NORM and VERL_NORM[norm] == "constant"):
        ours.note(f"{norm}: sums are divided by --max_response_length here; multiply --learning_rate accordingly")
    mode = str(t(f"{ACTOR}.policy_loss.loss_mode", "vanilla"))
    variant = {"gspo": "gspo", "cispo": "cispo", "dppo_tv": "dppo", "dppo_kl": "dppo"}.get(mode)
    if variant and ours.script == "grpo":
        with_variant(ours, variant, f"policy_loss.loss_mode={mode}")
    elif mode != "vanilla":
        ours.lacks(f"policy_loss.loss_mode={mode}; the clipped loss takes its place")
    kind, cap = t("algorithm.rollout_correction.rollout_is"), t("algorithm.rollout_correction.rollout_is_threshold", 2.0)
    bounds = [number(bound) for bound in str(cap).split("_")]
    if kind and len(bounds) == 2:
        ours.set("importance_sampling_mask", bounds)
    elif kind:
        ours.set("truncated_importance_sampling_ratio_cap", bounds[0])
    if kind == "sequence":
        ours.note("rollout_is=sequence: the weight is of each token here, not of the sequence")
    limits = t("algorithm.rollout_correction.rollout_rs_threshold"), t("algorithm.rollout_correction.rollout_rs_threshold_lower")
    if t("algorithm.rollout_correction.rollout_rs"):
        ours.lacks(f"rollout_rs with {limits[0]}: rejection of sequences; --importance_sampling_mask masks tokens")


def warm_up(t: Theirs, ours: Ours, prefix: str) -> float:
    """Return verl's warm-up: optimizer steps, or a fraction. Its steps are of the loop."""
    steps, ratio = whole(t(f"{prefix}.optim.lr_warmup_steps", -1), -1), number(t(f"{prefix}.optim.lr_warmup_steps_ratio"))
    each = ours.flags["num_mini_batches"] * whole(t(f"{ACTOR}.ppo_epochs"), 1)
    return steps * each if steps > 0 else ratio


def verl_optimizer(t: Theirs, ours: Ours) -> None:
    """Set optimizer and schedule, and what differs for the critic."""
    prefix = f"{ACTOR}.optim"
    ours.set("warm_up", warm_up(t, ours, ACTOR))
    name = t.given.get(f"{prefix}.warmup_style") or t.given.get(f"{prefix}.lr_decay_style") or t(f"{prefix}.lr_scheduler_type")
    peak = number(t(f"{prefix}.lr"), 1e-6)
    floor = t(f"{prefix}.min_lr_ratio") or number(t(f"{prefix}.min_lr")) / peak
    t.has(f"{prefix}.warmup_style", f"{prefix}.lr_decay_style")
    schedule(ours, name, floor)
    if t.has(f"{prefix}.betas"):
        ours.set("adam_betas", listed(t(f"{prefix}.betas")))
    for i in (0, 1):
        if t.has(f"{prefix}.betas.{i}"):
            ours.note(f"{prefix}.betas.{i}: give --adam_betas with both numbers")
    if t.has(f"{prefix}.clip_grad"):
        ours.set("max_grad_norm", t(f"{prefix}.clip_grad"))
    if ours.script != "ppo" or ours.flags.get("disable_value"):
        return
    policy = t("actor_rollout_ref.model.path")
    ppo_critic(ours, "model_name_or_path", t.given.get("critic.model.path", policy), policy)
    ppo_critic(ours, "warm_up", warm_up(t, ours, "critic"), ours.flags["warm_up"])
    ppo_critic(ours, "weight_decay", t("critic.optim.weight_decay", 0.01), t(f"{prefix}.weight_decay", 0.01))
    clip = t.given.get("critic.optim.clip_grad", t("critic.grad_clip", 1.0))
    ppo_critic(ours, "max_grad_norm", clip, t.given.get(f"{prefix}.clip_grad", t(f"{ACTOR}.grad_clip", 1.0)))
    epochs = t(f"{ACTOR}.ppo_epochs", 1)
    ppo_critic(ours, "num_epochs", t.given.get("critic.ppo_epochs", epochs), epochs)
    if t.has("critic.optim.lr_scheduler_type", "critic.optim.warmup_style", "critic.optim.lr_decay_style"):
        ours.critic.append("lr_scheduler_type=" + str(t("critic.optim.lr_scheduler_type", "constant")))
    ours.set("critic_warmup", whole(t("trainer.critic_warmup")))


def verl_data(t: Theirs, ours: Ours) -> None:
    """Set data sets, columns, lengths and the length of the run."""
    dataset(ours, t("data.train_files"))
    dataset(ours, t("data.val_files"), "eval_dataset")
    for key, flag in (("data.train_max_samples", "dataset"), ("data.val_max_samples", "eval_dataset")):
        if whole(t(key, -1), -1) > 0 and (name := next(iter(listed(t(f"data.{'train' if flag == 'dataset' else 'val'}_files"))), None)):
            ours.set(flag, json.dumps({str(name): whole(t(key))}))
    if t("data.prompt_key", "prompt") != "prompt":
        ours.set("prompt_key", t("data.prompt_key"))
        ours.set("ground_truth_key", "reward_model.ground_truth")
        ours.set("verifier_key", t("data.reward_fn_key", "data_source"))
    elif t("data.reward_fn_key", "data_source") != "data_source":
        ours.set("verifier_key", t("data.reward_fn_key"))
    cut = str(t("data.truncation", "error"))
    if t("data.filter_overlong_prompts", False):
        ours.set("overlong_prompts", "filter")
    elif cut in ("left", "right", "middle"):
        ours.set("overlong_prompts", "left" if cut == "middle" else cut)
    elif t.framework == "tinyzero":
        ours.set("overlong_prompts", "error")
    variables = {key.rpartition(".")[2]: value for key, value in t.given.items() if "apply_chat_template_kwargs." in key}
    whole_kwargs = t("data.apply_chat_template_kwargs")
    variables |= whole_kwargs if isinstance(whole_kwargs, dict) else {}
    t.used.update(key for key in t.given if "apply_chat_template_kwargs" in key or "model.override_config" in key)
    if variables:
        ours.set("chat_template", json.dumps(variables))
    changed = {key.rpartition("override_config.")[2]: value for key, value in t.given.items() if "ref.model.override_config." in key}
    if changed and all("." not in key for key in changed):
        changed.pop("attn_implementation", None)
        ours.set("override_config", json.dumps(changed) if changed else None)
    steps = t("trainer.total_training_steps")
    if whole(steps) > 0:
        ours.set("total_steps", whole(steps))
    else:
        ours.set("total_epochs", max(1, whole(t("trainer.total_epochs"), 30)))


def verl_reward(t: Theirs, ours: Ours) -> None:
    """Set reward functions, a reward model, and the penalties of its reward managers."""
    for prefix in ("", "reward."):
        if t(f"{prefix}custom_reward_function.path"):
            reward_file(ours, "custom_reward_function", t(f"{prefix}custom_reward_function.path"), t(f"{prefix}custom_reward_function.name"))
    if t("reward_model.enable") is True or t("reward.reward_model.enable") is True:
        name = t("reward_model.model.path") or t("reward.reward_model.model_path")
        ours.set("reward_model_name_or_path", name)
        ours.set("verifier", "reward_model")
    for prefix in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg", "reward.reward_kwargs.overlong_buffer_cfg"):
        if t(f"{prefix}.enable") is True:
            ours.set("overlong_buffer", whole(t(f"{prefix}.len")))
            if number(t(f"{prefix}.penalty_factor"), 1.0) != 1.0:
                ours.note("the overlong penalty is 1 at --max_response_length, whatever penalty_factor is")
        t.has(f"{prefix}.len", f"{prefix}.penalty_factor", f"{prefix}.log")
    t.has("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")
    if t("algorithm.filter_groups.enable", False) is True:
        rounds = whole(t("algorithm.filter_groups.max_num_gen_batches"))
        ours.set("dynamic_sampling_rounds", rounds if rounds > 0 else 10)
        ours.set("filter_zero_std_samples", True)
        ours.note("filter_groups: groups of equal reward are replaced by new prompts, at most --dynamic_sampling_rounds times")
    t.has("data.gen_batch_size")


def verl_engine(t: Theirs, ours: Ours) -> None:
    """Set the engine, and what leaves the GPU when."""
    name = str(t(f"{ROLLOUT}.name", "vllm"))
    if name == "hf":
        ours.set("rollout", "hf")
    elif name not in ("vllm", "???"):
        ours.note(f"rollout.name={name}: the engine is vLLM")
    for key in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "enforce_eager", "max_model_len"):
        if t.has(f"{ROLLOUT}.{key}") and t(f"{ROLLOUT}.{key}") is not None and name != "hf":
            ours.vllm_args[key] = t(f"{ROLLOUT}.{key}")
    t.has(f"{ROLLOUT}.load_format", f"{ROLLOUT}.enable_chunked_prefill", f"{ROLLOUT}.enable_prefix_caching")
    if name != "hf" and t.has(f"{ROLLOUT}.tensor_model_parallel_size"):
        parallel(ours, t(f"{ROLLOUT}.tensor_model_parallel_size"), "rollout.tensor_model_parallel_size")
    moved = ["fsdp_config.param_offload", "fsdp_config.optimizer_offload", "fsdp_config.grad_offload"]
    moved += ["megatron.param_offload", "megatron.optimizer_offload", "megatron.grad_offload"]
    off = [t(f"{ACTOR}.{key}", False) for key in moved]
    for place in ("fsdp", "megatron", "model.fsdp_config"):
        off += [t(f"critic.{place}.{key}_offload", False) for key in ("param", "optimizer", "grad")]
    sleeps = t(f"{ROLLOUT}.free_cache_engine", True) is not False and name != "hf"
    ours.set("sleep", "all" if True in off else "engine" if sleeps else None)
    ref = [t(f"actor_rollout_ref.ref.{place}param_offload", False) for place in ("", "fsdp_config.", "megatron.")]
    if True in ref and ours.flags["beta"] > 0:
        ours.set("offload", ["ref"])
    tokens = t(f"{ACTOR}.ppo_max_token_len_per_gpu")
    longest = whole(t("data.max_prompt_length")) + whole(t("data.max_response_length"))
    if t.has(f"{ACTOR}.use_dynamic_bsz") and t.given[f"{ACTOR}.use_dynamic_bsz"] is True and whole(tokens) >= longest:
        ours.set("micro_batch_tokens", whole(tokens))
    kind = str(t(f"{ROLLOUT}.dtype", "bfloat16"))
    if t.has(f"{ROLLOUT}.dtype") and kind in ("bfloat16", "float32"):
        ours.set("dtype", kind)


def verl_run(t: Theirs, ours: Ours) -> None:
    """Set names, records, evaluations and checkpoints."""
    if t.has("trainer.experiment_name"):
        ours.set("exp_name", folder_name(t("trainer.experiment_name")))
    if "wandb" in listed(t("trainer.logger")) and t.has("trainer.logger"):
        ours.set("track", True)
        ours.env["WANDB_PROJECT"] = str(t("trainer.project_name"))
    t.has("trainer.project_name")
    every = whole(t("trainer.test_freq", -1), -1)
    if every > 0:
        ours.set("eval_every", every)
    elif t("trainer.val_before_train", True) is False:
        ours.set("eval_prompts", 0)
        ours.flags.pop("eval_dataset", None)
    if t.has("trainer.val_before_train") and every > 0 and t("trainer.val_before_train") is False:
        ours.note("val_before_train=False: evaluations are before the first step and after the last as well")
    if whole(t("trainer.save_freq", -1), -1) > 0:
        ours.set("save_every", whole(t("trainer.save_freq")))
    sampled = t(f"{ROLLOUT}.val_kwargs.do_sample", False)
    ours.set("eval_temperature", number(t(f"{ROLLOUT}.val_kwargs.temperature", 0.0)) if sampled else 0.0, relied_on(t, f"{ROLLOUT}.val_kwargs.temperature"))
    if t.has("trainer.default_local_dir"):
        ours.set("output_dir", path_text(t("trainer.default_local_dir")))
    if t("trainer.resume_mode", "auto") == "disable":
        ours.set("resume", "never")
    if t.has("trainer.resume_from_path") and t("trainer.resume_from_path"):
        ours.lacks("trainer.resume_from_path: its checkpoints have another format")
    kept = t("trainer.max_actor_ckpt_to_keep")
    if t.has("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep") and whole(kept) > 0:
        ours.set("keep_checkpoints", whole(kept))
    if t.has("trainer.log_val_generations", "trainer.rollout_data_dir", "trainer.validation_data_dir"):
        ours.set("log_samples", max(4, whole(t("trainer.log_val_generations"))))


def relied_on(t: Theirs, key: str) -> str:
    """Return the key with its default where the command does not give it, else ""."""
    return "" if key in t.given else f"{key}={t(key)}"


def folder_name(text: Any) -> str:
    """Return a name that one folder can have."""
    return re.sub(r"[^\w.=+-]+", "-", str(text)).strip("-.")[:90] or "run"


def path_text(text: Any) -> str:
    """Return a path with ``~`` expanded."""
    return str(Path(str(text)).expanduser())


# ------------------------------------------------------------------------------------------------------------------ TRL

TRL_REWARDS = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "think_format_reward": "format",
    "format_reward": "format",
}
TRL_NORM = {"dapo": "token", "bnpo": "token", "grpo": "sequence", "dr_grpo": "constant", "cispo": "token"}
TRL_LAUNCH = {"single_gpu": 1, "multi_gpu": 8, "zero1": 8, "zero2": 8, "zero3": 8, "fsdp1": 8, "fsdp2": 8}


def trl(t: Theirs, ours: Ours) -> None:
    """Translate TRL's GRPOConfig, its script's arguments, and GRPOTrainer's as trainer.NAME."""
    ours.preset = "trl"
    trl_launch(t, ours)
    accumulate = whole(t("gradient_accumulation_steps"), 1)
    group = whole(t("num_generations"), 8)
    samples = t("generation_batch_size")
    each = whole(t("per_device_train_batch_size"), 8) * ours.processes
    rounds = whole(t("steps_per_generation")) or (whole(samples) // each if samples else accumulate)
    samples = whole(samples) or each * max(1, rounds)
    if samples % group:
        ours.note(f"{samples} samples per step are no multiple of num_generations={group}; rounded up to whole groups")
    t.has("per_gpu_train_batch_size")
    sized(ours, max(1, math.ceil(samples / group)), group, max(1, rounds) / accumulate, "steps_per_generation / gradient_accumulation_steps")
    ours.relied |= {f: "per_device_train_batch_size=8, num_generations=8" for f in ("num_unique_prompts_rollout",) if not t.has("per_device_train_batch_size", "generation_batch_size")}
    per_batch = ours.flags["num_mini_batches"] * whole(t("num_iterations"), 1)
    trl_loss(t, ours)
    trl_optimizer(t, ours)
    trl_data(t, ours)
    trl_rewards(t, ours)
    steps = whole(t("max_steps"), -1)
    if steps > 0:
        ours.set("total_steps", max(1, math.ceil(steps / per_batch)))
    else:
        epochs = number(t("num_train_epochs"), 3.0)
        ours.set("total_epochs", max(1, math.ceil(epochs)), relied_on(t, "num_train_epochs"))
        if epochs != int(epochs):
            ours.note(f"num_train_epochs={epochs:g} is rounded up to whole epochs; --total_steps ends a run earlier")
    trl_engine(t, ours)
    trl_run(t, ours, per_batch)


def trl_launch(t: Theirs, ours: Ours) -> None:
    """Set the number of GPUs from an accelerate configuration, and the ZeRO stage."""
    name = str(t.given.get("accelerate_config", ""))
    stem = Path(name).stem.replace("deepspeed_", "")
    t.has("accelerate_config", "deepspeed")
    settings: dict[str, Any] = {}
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        import yaml

        settings = yaml.safe_load(Path(name).read_text(encoding="utf-8")) or {}
    if "processes" not in t.given:
        ours.processes = whole(settings.get("num_processes")) or TRL_LAUNCH.get(stem, 1)
    stage = whole((settings.get("deepspeed_config") or {}).get("zero_stage")) or whole(stem[4:5] if stem.startswith("zero") else 0)
    if stage in (1, 3):
        ours.set("zero_stage", stage)
    if stem.startswith("fsdp"):
        ours.lacks("FSDP; DeepSpeed ZeRO 2 shards gradients and optimizer states here, --zero_stage 3 parameters as well")


def trl_loss(t: Theirs, ours: Ours) -> None:
    """Set advantages, the loss, and its KL."""
    scale = str(t("scale_rewards", "group")).lower()
    ours.set("advantage_normalization_type", "centered" if scale in ("none", "false") else "standard")
    if scale == "batch":
        with_variant(ours, "reinforce_pp", "scale_rewards=batch divides by the std of the batch")
    low = number(t("epsilon"), 0.2)
    ours.set("clip_lower", low)
    ours.set("clip_higher", number(t("epsilon_high"), low))
    kind = str(t("loss_type", "dapo"))
    if kind in TRL_NORM:
        ours.set("loss_norm", TRL_NORM[kind])
    else:
        ours.lacks(f"loss_type={kind}; the clipped loss with --loss_norm token takes its place")
    if kind == "cispo":
        with_variant(ours, "cispo", "loss_type=cispo")
    if kind == "bnpo":
        ours.note("loss_type=bnpo: the mean is over the tokens of the step here, of each micro-batch there")
    if t("importance_sampling_level", "token") == "sequence":
        with_variant(ours, "gspo", "importance_sampling_level=sequence")
    if t("delta") is not None:
        ours.lacks(f"delta={t('delta')}: a cap of the ratio for both signs; --clip_ratio_c caps it for negative advantages")
    ours.set("kl_placement", "loss")
    ours.set("kl_gradient", "unbiased" if t("use_bias_correction_kl", True) else "naive")
    if t("sync_ref_model", False):
        ours.set("ref_policy_update", [whole(t("ref_model_sync_steps"), 512), number(t("ref_model_mixup_alpha"), 0.6)])
    if t("cast_lm_head_to_fp32", False):
        ours.set("override_config", json.dumps({"head_dtype": "float32"}))


def trl_optimizer(t: Theirs, ours: Ours) -> None:
    """Set the schedule and AdamW's betas."""
    steps, ratio = number(t("warmup_steps")), number(t.given.get("warmup_ratio"))
    t.has("warmup_ratio")
    ours.set("warm_up", steps or ratio)
    kwargs = t("lr_scheduler_kwargs")
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    floor = kwargs.get("min_lr_rate") or number(kwargs.get("min_lr")) / number(t("learning_rate"), 1e-6)
    schedule(ours, t("lr_scheduler_type"), floor)
    ours.set("adam_betas", [number(t("adam_beta1"), 0.9), number(t("adam_beta2"), 0.999)])


def trl_data(t: Theirs, ours: Ours) -> None:
    """Set the model, the data sets and their columns. TRL's prompts stand in the column prompt."""
    name = t.given.get("trainer.model", t.given.get("model_name_or_path"))
    revision = t("model_revision", "main")
    t.has("trainer.model", "model_name_or_path")
    ours.set("model_name_or_path", name if revision == "main" or not name else f"{name}@{revision}")
    data = t.given.get("trainer.train_dataset", t.given.get("dataset_name"))
    t.has("trainer.train_dataset", "dataset_name", "datasets")
    if data is not None:
        base, _, split = str(data).partition("@")
        config = t("dataset_config")
        base = f"{base}:{config}" if config and ":" not in base else base
        split = split or (str(t("dataset_train_split")) if t.has("dataset_train_split") else "")
        ours.set("dataset", f"{base}@{split}" if split else base)
    mixed = t.given.get("datasets")
    if isinstance(mixed, list) and mixed and isinstance(mixed[0], dict):
        ours.set("dataset", json.dumps({str(item.get("path", item.get("name"))): 1.0 for item in mixed}))
    ours.set("prompt_key", "prompt")
    ours.set("overlong_prompts", "left" if whole(t.given.get("max_prompt_length")) else None)
    ours.set("max_prompt_length", whole(t.given.get("max_prompt_length")) or None)
    t.has("max_prompt_length")
    evaluated = str(t.given.get("eval_strategy", t.given.get("evaluation_strategy", "no"))) != "no"
    t.has("eval_strategy", "evaluation_strategy", "eval_on_start", "trainer.eval_dataset", "dataset_test_split", "test_split_size")
    held = t.given.get("trainer.eval_dataset")
    if not evaluated:
        ours.set("eval_prompts", 0)
    elif isinstance(held, str):
        ours.set("eval_dataset", json.dumps({held: 1.0}))
    elif data is not None and "test_split_size" not in t.given:
        ours.set("eval_dataset", json.dumps({f"{str(data).partition('@')[0]}@{t('dataset_test_split', 'test')}": 1.0}))
    if t.has("chat_template_kwargs"):
        ours.set("chat_template", json.dumps(t("chat_template_kwargs")))


def trl_rewards(t: Theirs, ours: Ours) -> None:
    """Set verifiers from reward functions by name, their weights, and the column of the truth."""
    names = [str(name).rpartition(".")[2] for name in listed(t.given.get("trainer.reward_funcs", t.given.get("reward_funcs")))]
    full = [str(name) for name in listed(t.given.get("trainer.reward_funcs", t.given.get("reward_funcs")))]
    t.has("trainer.reward_funcs", "reward_funcs")
    weights = [number(weight, 1.0) for weight in listed(t("reward_weights"))]
    verifiers: list[str] = []
    weighed = []
    functions = t.given.get("functions") or {}
    columns = [c for name in names for c in functions.get(name, []) if c not in ("prompts", "completions", "completion_ids", "trainer_state", "self", "completion", "prompt", "kwargs", "log_extra", "log_metric")]
    for i, name in enumerate(names):
        weight = weights[i] if i < len(weights) else 1.0
        if name in TRL_REWARDS and TRL_REWARDS[name] not in verifiers:
            verifiers.append(TRL_REWARDS[name])
            if weight != 1.0:
                weighed.append(f"{TRL_REWARDS[name]}={weight:g}")
        elif name == "get_soft_overlong_punishment":
            ours.set("overlong_buffer", min(256, max(1, whole(t("max_completion_length"), 512) - 1)))
            ours.note("get_soft_overlong_punishment counts back from 1280 tokens in trl grpo; here from --max_response_length")
        elif "/" in full[i] and ".py" not in full[i]:
            ours.set("reward_model_name_or_path", full[i])
            verifiers.append("reward_model")
        elif name not in TRL_REWARDS:
            reward_file(ours, f"reward_funcs {name}", "", name)
    if verifiers:
        ours.set("verifier", ",".join(dict.fromkeys(verifiers)))
    if weighed:
        ours.set("reward_weights", weighed)
    if "math" in verifiers:
        ours.set("ground_truth_key", "solution")
    elif columns:
        ours.set("ground_truth_key", columns[0])
    if not verifiers and not columns:
        ours.set("verifier", "format")
        ours.note("no reward function with a counterpart: --verifier format, which needs no truth, holds its place")
    elif not verifiers:
        ours.set("verifier", "math")
        ours.note(f"--verifier math judges by the column {columns[0]} until your function is written here")


def trl_engine(t: Theirs, ours: Ours) -> None:
    """Set the engine. Without use_vllm TRL generates with transformers; vLLM samples from the same distribution."""
    if not t("use_vllm", False):
        ours.note("use_vllm is off there; vLLM samples here, and --rollout hf is transformers' generate")
    if t.has("vllm_gpu_memory_utilization"):
        ours.vllm_args["gpu_memory_utilization"] = t("vllm_gpu_memory_utilization")
    longest = t.given.get("vllm_max_model_length", t.given.get("vllm_max_model_len"))
    if t.has("vllm_max_model_length", "vllm_max_model_len") and longest:
        ours.vllm_args["max_model_len"] = longest
    t.has("vllm_model_impl")
    if t("vllm_mode", "colocate") == "server" and t.has("vllm_mode"):
        ours.note("vllm_mode=server: --vllm_engines N has N GPUs of the same launch only sample; here each GPU does both")
    t.has("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port")
    parallel(ours, t("vllm_tensor_parallel_size"), "vllm_tensor_parallel_size")
    if t("vllm_enable_sleep_mode", False):
        ours.set("sleep", "engine")
    mode = str(t("vllm_importance_sampling_mode", "sequence_mask"))
    low, high = t("vllm_importance_sampling_clip_min"), t("vllm_importance_sampling_clip_max", 3.0)
    high = t.given.get("vllm_importance_sampling_cap") or high
    t.has("vllm_importance_sampling_cap")
    if t("use_vllm", False) and t("vllm_importance_sampling_correction", True):
        if mode == "token_truncate":
            ours.set("truncated_importance_sampling_ratio_cap", number(high, 3.0))
        else:
            ours.set("importance_sampling_mask", [number(low, 0.0), number(high, 3.0)])
        if mode.startswith("sequence"):
            ours.note(f"vllm_importance_sampling_mode={mode} masks responses; --importance_sampling_mask masks tokens")
    kind = str(t.given.get("dtype", t.given.get("torch_dtype", "auto"))).rpartition(".")[2]
    kind = "bfloat16" if t("bf16", False) is True else "float16" if t("fp16", False) is True else kind
    kwargs = t("model_init_kwargs")
    t.has("dtype", "torch_dtype")
    t.used.update(key for key in t.given if key.startswith("model_init_kwargs"))
    if isinstance(kwargs, dict):
        kind = str(kwargs.get("dtype", kwargs.get("torch_dtype", kind)))
    if kind in ("bfloat16", "float32"):
        ours.set("dtype", kind)
    elif kind == "float16":
        ours.note("fp16: --dtype float16 is for GPUs only; --dtype auto chooses it on a T4")


def trl_run(t: Theirs, ours: Ours, per_batch: int) -> None:
    """Set names, records and checkpoints. ``per_batch``: optimizer steps of a batch, which TRL counts."""
    if t.has("run_name") and t("run_name"):
        ours.set("exp_name", folder_name(t("run_name")))
    reports = [str(name) for name in listed(t.given.get("report_to"))]
    if t.has("report_to") and {"wandb", "all"} & set(reports):
        ours.set("track", True)
        if t.has("project"):
            ours.env["WANDB_PROJECT"] = str(t("project"))
    t.has("project")
    if str(t("save_strategy", "steps")) == "steps" and number(t("save_steps"), 500) >= 1:
        ours.set("save_every", max(1, whole(t("save_steps"), 500) // per_batch), relied_on(t, "save_steps"))
    if t.has("save_total_limit") and whole(t("save_total_limit")):
        ours.set("keep_checkpoints", whole(t("save_total_limit")))
    if t.has("eval_steps") and number(t("eval_steps")) >= 1:
        ours.set("eval_every", max(1, whole(t("eval_steps")) // per_batch))
    if t.has("num_generations_eval") and whole(t("num_generations_eval")):
        ours.set("eval_samples", whole(t("num_generations_eval")))
    if t.has("log_completions", "num_completions_to_print") and t("log_completions", True):
        ours.set("log_samples", max(4, whole(t("num_completions_to_print"))))
    if isinstance(t("resume_from_checkpoint"), str):
        ours.lacks("resume_from_checkpoint: its checkpoints have another format")


RULES: dict[str, Callable[[Theirs, Ours], None]] = {"verl": verl, "tinyzero": verl, "trl": trl}

# Keys whose defaults a command relies on, beside those that the preset has: sizes and lengths.
RELIED = {
    "verl": ("data.max_prompt_length", "data.max_response_length", "data.train_batch_size", "trainer.total_epochs"),
    "tinyzero": ("data.max_prompt_length", "data.max_response_length", "data.train_batch_size", "trainer.total_epochs"),
    "trl": ("max_completion_length", "num_generations", "gradient_checkpointing"),
    "open-instruct": (
        *("max_prompt_token_length", "response_length", "num_unique_prompts_rollout", "total_episodes"),
        "num_samples_per_prompt_rollout",
    ),
    "openrlhf": ("rollout.batch_size", "rollout.n_samples_per_prompt"),
    "areal": ("train_dataset.batch_size", "gconfig.n_samples", "gconfig.max_new_tokens", "total_train_epochs"),
}
# What a preset that is for the other script alone leaves open in this one.
BESIDE_PRESET = {
    ("tinyzero", "grpo"): {"advantage_eps": 1e-6, "kl_gradient": "naive", "kl_reward_norm": "inside"},
    ("openrlhf", "ppo"): {
        **{"gamma": 1.0, "gae_lambda": 1.0, "bootstrap_truncated": False, "adv_norm": "batch", "value_norm": "none"},
        **{"critic_learning_rate": 9e-6, "value_clip": 0.5, "disable_value": False},
    },
}


def settings_of(command: Command, framework: str) -> Theirs:
    """Return the settings of a command under the current names of their keys; argparse's abbreviations are completed."""
    table = rows(framework)
    names = list(table)
    given: dict[str, Any] = {}
    for key, value in command.settings.items():
        name = key
        if name not in table and framework in ("trl", "open-instruct", "openrlhf"):
            name, value = completed(name, value, names)
        if name in table and table[name].kind == "renamed":
            name = table[name].ours
        given[name] = value
    if command.functions:
        given["functions"] = command.functions
    return Theirs(framework, given)


def completed(name: str, value: Any, names: list[str]) -> tuple[str, Any]:
    """Return (key, value) of an option that argparse accepts in another form: no_NAME, NO-NAME, or a unique prefix."""
    if name.removeprefix("no_") in names and name.startswith("no_"):
        return name.removeprefix("no_"), False
    longer = [other for other in names if other.startswith(name)]
    return (longer[0], value) if len(longer) == 1 else (name, value)

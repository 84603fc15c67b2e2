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


def areal_example(name: str) -> dict[str, Any]:
    """Return the settings of one of AReaL's example files, which its commands name; {} of any other file."""
    with (TABLES / "areal_examples.tsv").open(encoding="utf-8", newline="") as lines:
        next(lines)
        table = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))[1:]
    first = table[0][0]
    at = name[max(0, name.find("examples/")) :]
    own = {key: value_of(value) if value != "-" else value for file, key, value in table if file == at}
    if not own:
        return {}
    base = {key: value_of(value) for file, key, value in table if file == first}
    return {key: value for key, value in (base | own).items() if value != "-"}


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
        default = value_of(row.default) if row is not None and row.default not in ("", "(of another key)") else None
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
    if flag == "eval_dataset" or len(names) > 1:
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


def set_trackers(ours: Ours, names: list[Any]) -> list[str]:
    """Set --track to those of a list of loggers that exist here, and return them."""
    found = [name for name in ("wandb", "tensorboard") if name in names or "all" in names]
    if found:
        ours.set("track", True if found == ["wandb"] else found)
    return found


def event_files(t: Theirs, ours: Ours, key: str) -> bool:
    """Return True if ``key`` names a folder for TensorBoard, and say where the event files are here."""
    if not t.has(key) or t(key) in (None, False, "", "none"):
        return False
    ours.note(f"{t.text(key)}: --track tensorboard writes the event files into the run's folder")
    return True


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


VERL_KL = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "full": "full",
}
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
    kind = {"rloo": "leave_one_out", "rloo_vectorized": "leave_one_out"}.get(name) or (
        "standard" if by_std else "centered"
    )
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
    kind, cap = (
        t("algorithm.rollout_correction.rollout_is"),
        t("algorithm.rollout_correction.rollout_is_threshold", 2.0),
    )
    bounds = [number(bound) for bound in str(cap).split("_")]
    if kind and len(bounds) == 2:
        ours.set("importance_sampling_mask", bounds)
    elif kind:
        ours.set("truncated_importance_sampling_ratio_cap", bounds[0])
    if kind == "sequence":
        ours.note("rollout_is=sequence: the weight is of each token here, not of the sequence")
    limits = (
        t("algorithm.rollout_correction.rollout_rs_threshold"),
        t("algorithm.rollout_correction.rollout_rs_threshold_lower"),
    )
    if t("algorithm.rollout_correction.rollout_rs"):
        ours.lacks(f"rollout_rs with {limits[0]}: rejection of sequences; --importance_sampling_mask masks tokens")


def warmup_steps(t: Theirs, ours: Ours, prefix: str) -> float:
    """Return verl's warm-up: optimizer steps, or a fraction. Its steps are of the loop."""
    steps, ratio = (
        whole(t(f"{prefix}.optim.lr_warmup_steps", -1), -1),
        number(t(f"{prefix}.optim.lr_warmup_steps_ratio")),
    )
    each = ours.flags["num_mini_batches"] * whole(t(f"{ACTOR}.ppo_epochs"), 1)
    return steps * each if steps > 0 else ratio


def verl_optimizer(t: Theirs, ours: Ours) -> None:
    """Set optimizer and schedule, and what differs for the critic."""
    prefix = f"{ACTOR}.optim"
    ours.set("warmup_steps", warmup_steps(t, ours, ACTOR))
    name = (
        t.given.get(f"{prefix}.warmup_style")
        or t.given.get(f"{prefix}.lr_decay_style")
        or t(f"{prefix}.lr_scheduler_type")
    )
    peak = number(t(f"{prefix}.lr"), 1e-6)
    floor = t(f"{prefix}.min_lr_ratio") or number(t(f"{prefix}.min_lr")) / (peak or 1e-6)
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
    t.has("critic.model.path", "critic.optim.clip_grad", "critic.ppo_epochs")
    ppo_critic(ours, "model_name_or_path", t.given.get("critic.model.path", policy), policy)
    ppo_critic(ours, "warmup_steps", warmup_steps(t, ours, "critic"), ours.flags["warmup_steps"])
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
    for key, flag in (("data.train_files", "dataset"), ("data.val_files", "eval_dataset")):
        dataset(ours, t(key), flag)
    for key, flag in (("data.train_max_samples", "dataset"), ("data.val_max_samples", "eval_dataset")):
        if whole(t(key, -1), -1) > 0 and (
            name := next(iter(listed(t(f"data.{'train' if flag == 'dataset' else 'val'}_files"))), None)
        ):
            ours.set(flag, json.dumps({str(name): whole(t(key))}))
    if t("data.prompt_key", "prompt") != "prompt":
        ours.set("prompt_key", t("data.prompt_key"))
        ours.set("ground_truth_key", "reward_model.ground_truth")
        ours.set("verifier_key", t("data.reward_fn_key", "data_source"))
    elif t("data.reward_fn_key", "data_source") != "data_source":
        ours.set("verifier_key", t("data.reward_fn_key"))
    cut = str(t("data.truncation", "error"))
    if t("data.filter_overlong_prompts", False):
        ours.set("overlong_prompts", "drop")
    elif cut in ("left", "right", "middle"):
        ours.set("overlong_prompts", "left" if cut == "middle" else cut)
    elif t.framework == "tinyzero":
        ours.set("overlong_prompts", "error")
    variables = {
        key.rpartition(".")[2]: value for key, value in t.given.items() if "apply_chat_template_kwargs." in key
    }
    whole_kwargs = t("data.apply_chat_template_kwargs")
    variables |= whole_kwargs if isinstance(whole_kwargs, dict) else {}
    t.used.update(key for key in t.given if "apply_chat_template_kwargs" in key or "model.override_config" in key)
    if variables:
        ours.set("chat_template", json.dumps(variables))
    changed = {
        key.rpartition("override_config.")[2]: value
        for key, value in t.given.items()
        if "ref.model.override_config." in key
    }
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
            reward_file(
                ours,
                "custom_reward_function",
                t(f"{prefix}custom_reward_function.path"),
                t(f"{prefix}custom_reward_function.name"),
            )
    if True in [t("reward_model.enable"), t("reward.reward_model.enable")]:
        name = [path for path in (t("reward_model.model.path"), t("reward.reward_model.model_path")) if path]
        name = name[0] if name else None
        ours.set("reward_model_name_or_path", name)
        ours.set("verifier", "reward_model")
    for prefix in (
        "reward_model.overlong_buffer",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    ):
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
        ours.note(
            "filter_groups: groups of equal reward are replaced by new prompts, at most --dynamic_sampling_rounds times"
        )
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
    ours.set("vllm_sleep", "all" if True in off else "engine" if sleeps else None)
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
    if t.has("trainer.logger") and "wandb" in set_trackers(ours, listed(t("trainer.logger"))):
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
    ours.set(
        "eval_temperature",
        number(t(f"{ROLLOUT}.val_kwargs.temperature", 0.0)) if sampled else 0.0,
        relied_on(t, f"{ROLLOUT}.val_kwargs.temperature"),
    )
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
    if "processes" not in t.given and ours.processes == 1:
        ours.note(
            "the command does not say how many GPUs there are: 1 here; --gpus N of this program computes it for N"
        )
    accumulate = whole(t("gradient_accumulation_steps"), 1)
    group = whole(t("num_generations"), 8)
    samples = t("generation_batch_size")
    each = whole(t("per_device_train_batch_size"), 8) * ours.processes
    rounds = whole(t("steps_per_generation")) or (whole(samples) // each if samples else accumulate)
    samples = whole(samples) or each * max(1, rounds)
    if samples % group:
        ours.note(f"{samples} samples per step are no multiple of num_generations={group}; rounded up to whole groups")
    t.has("per_gpu_train_batch_size")
    sized(
        ours,
        max(1, math.ceil(samples / group)),
        group,
        max(1, rounds) / accumulate,
        "steps_per_generation / gradient_accumulation_steps",
    )
    ours.relied |= {
        f: "per_device_train_batch_size=8, num_generations=8"
        for f in ("num_unique_prompts_rollout",)
        if not t.has("per_device_train_batch_size", "generation_batch_size")
    }
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
    t.has("accelerate_config", "deepspeed", "config_file", "num_machines")
    if whole(t.given.get("num_processes")):
        t.given["processes"] = ours.processes = whole(t("num_processes"))
    settings: dict[str, Any] = {}
    if name.endswith((".yaml", ".yml")) and Path(name).is_file():
        import yaml

        settings = yaml.safe_load(Path(name).read_text(encoding="utf-8")) or {}
    if "processes" not in t.given:
        ours.processes = whole(settings.get("num_processes")) or TRL_LAUNCH.get(stem, 1)
    stage = whole((settings.get("deepspeed_config") or {}).get("zero_stage")) or whole(
        stem[4:5] if stem.startswith("zero") else 0
    )
    if stage in (1, 3):
        ours.set("zero_stage", stage)
    if stem.startswith("fsdp"):
        ours.lacks(
            "FSDP; DeepSpeed ZeRO 2 shards gradients and optimizer states here, --zero_stage 3 parameters as well"
        )


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
        ours.lacks(
            f"delta={t('delta')}: a cap of the ratio for both signs; --clip_ratio_c caps it for negative advantages"
        )
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
    ours.set("warmup_steps", steps or ratio)
    kwargs = t("lr_scheduler_kwargs")
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    floor = kwargs.get("min_lr_rate") or number(kwargs.get("min_lr")) / (number(t("learning_rate"), 1e-6) or 1e-6)
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
    if not name:
        ours.lacks("no model is named: add --model_name_or_path NAME; without it the model is the quickstart's")
    if data is not None:
        base, _, split = path_text(data).partition("@")
        config = t("dataset_config")
        base = f"{base}:{config}" if config and ":" not in base else base
        split = split or (str(t("dataset_train_split")) if t.has("dataset_train_split") else "")
        ours.set("dataset", base if split in ("", "train") else f"{base}@{split}")
    mixed = t.given.get("datasets")
    if isinstance(mixed, list) and mixed and isinstance(mixed[0], dict):
        ours.set("dataset", json.dumps({str(item.get("path", item.get("name"))): 1.0 for item in mixed}))
    if "dataset" in ours.flags:
        ours.set("prompt_key", "prompt")
    else:
        ours.lacks(
            "no data set is named: add --dataset NAME --prompt_key prompt; without it the data are the quickstart's"
        )
    ours.set("overlong_prompts", "left" if whole(t.given.get("max_prompt_length")) else None)
    ours.set("max_prompt_length", whole(t.given.get("max_prompt_length")) or None)
    t.has("max_prompt_length")
    evaluated = str(t.given.get("eval_strategy", t.given.get("evaluation_strategy", "no"))) != "no"
    t.has(
        "eval_strategy",
        "evaluation_strategy",
        "eval_on_start",
        "trainer.eval_dataset",
        "dataset_test_split",
        "test_split_size",
    )
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
    names = [
        str(name).rpartition(".")[2]
        for name in listed(t.given.get("trainer.reward_funcs", t.given.get("reward_funcs")))
    ]
    full = [str(name) for name in listed(t.given.get("trainer.reward_funcs", t.given.get("reward_funcs")))]
    t.has("trainer.reward_funcs", "reward_funcs")
    weights = [number(weight, 1.0) for weight in listed(t("reward_weights"))]
    verifiers: list[str] = []
    weighed = []
    functions = t.given.get("functions") or {}
    columns = [
        c
        for name in names
        for c in functions.get(name, [])
        if c
        not in (
            "prompts",
            "completions",
            "completion_ids",
            "trainer_state",
            "self",
            "completion",
            "prompt",
            "kwargs",
            "log_extra",
            "log_metric",
        )
    ]
    for i, name in enumerate(names):
        weight = weights[i] if i < len(weights) else 1.0
        if name in TRL_REWARDS and TRL_REWARDS[name] not in verifiers:
            verifiers.append(TRL_REWARDS[name])
            if weight != 1.0:
                weighed.append(f"{TRL_REWARDS[name]}={weight:g}")
        elif name == "get_soft_overlong_punishment":
            ours.set("overlong_buffer", min(256, max(1, whole(t("max_completion_length"), 512) - 1)))
            ours.note(
                "get_soft_overlong_punishment counts back from 1280 tokens in trl grpo; here from --max_response_length"
            )
        elif "/" in full[i] and ".py" not in full[i]:
            ours.set("reward_model_name_or_path", full[i])
            verifiers.append("reward_model")
        elif name not in TRL_REWARDS:
            reward_file(ours, f"reward_funcs {name}", "", name)
    if verifiers:
        ours.set("verifier", ",".join(dict.fromkeys(verifiers)))
    if weighed:
        ours.set("reward_weights", weighed)
    if "dataset" not in ours.flags:
        return
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
        ours.note(
            "vllm_mode=server: --vllm_engines N has N GPUs of the same launch only sample; here each GPU does both"
        )
    t.has("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port")
    parallel(ours, t("vllm_tensor_parallel_size"), "vllm_tensor_parallel_size")
    if t("vllm_enable_sleep_mode", False):
        ours.set("vllm_sleep", "engine")
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
    if t.has("report_to") and "wandb" in set_trackers(ours, listed(t.given.get("report_to"))) and t.has("project"):
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


# -------------------------------------------------------------------------------------------------------- open-instruct

TEMPLATES = {
    "tulu": "tulu",
    "tulu_thinker": "tulu",
    "tulu_thinker_r1_style": "tulu",
    "simple_chat": "question_answer",
    "r1_simple_chat": "r1",
    "r1_simple_chat_postpend_think": "r1",
    "chatml": "chatml",
}
KL_BY_NUMBER = {"0": "k1", "1": "k2", "2": "k3", "3": "k4"}


def open_instruct(t: Theirs, ours: Ours) -> None:
    """Translate open-instruct's grpo_fast.py, and what its earlier programs named otherwise."""
    ours.preset = "open-instruct"
    learners = sum(
        whole(n) for n in listed(t.given.get("num_learners_per_node", t.given.get("actor_num_gpus_per_node", 1)))
    )
    t.has("num_learners_per_node")
    open_instruct_launch(t, ours, learners)
    early = whole(t.given.get("local_rollout_batch_size"))
    if early:
        ours.set("num_unique_prompts_rollout", early * learners)
        ours.set("num_mini_batches", max(1, early // max(1, whole(t("local_mini_batch_size"), early))))
    t.has("local_rollout_batch_size", "local_mini_batch_size")
    open_instruct_loss(t, ours)
    schedule(ours, t("lr_scheduler_type"), 0.0)
    fraction = number(t("warmup_ratio")) if t.has("warmup_ratio") else 0.0  # grpo_fast.py sets 0
    ours.set("warmup_steps", number(t.given.get("warm_up_steps")) or fraction)
    t.has("warm_up_steps")
    open_instruct_data(t, ours)
    open_instruct_rewards(t, ours)
    open_instruct_run(t, ours)


def open_instruct_launch(t: Theirs, ours: Ours, learners: int) -> None:
    """Set the GPUs that train and those that sample, and how far ahead they sample."""
    engines, size = whole(t("vllm_num_engines"), 1), whole(t("vllm_tensor_parallel_size"), 1)
    single = t("single_gpu_mode", False) is True
    t.has("mason.gpus", "mason.num_nodes")
    ours.nodes = whole(t.given.get("mason.num_nodes"), 1)
    early = t.has("actor_num_gpus_per_node") and not t.has("vllm_num_engines")
    gpus = whole(t.given.get("mason.gpus")) * ours.nodes
    if early and gpus > learners:
        engines = max(1, (gpus - learners) // size)
    ahead = whole(t("async_steps"), 8) if not early else 1
    if single:
        ours.processes = 1
    else:
        ours.processes = learners + engines * size
        ours.set("vllm_engines", engines)
    inflight = t("inflight_updates", True) is not False and not early
    if ahead > 0 and inflight and (single or size == 1):
        ours.set("async_steps", ahead, relied_on(t, "async_steps"))
        ours.set("inflight_updates", "keep", relied_on(t, "inflight_updates"))
    elif ahead > 0:
        ours.set("async_steps", 1)
        if ahead > 1:
            ours.note(
                f"async_steps={ahead}: 1 here, as weights are pushed between batches where an engine has several GPUs"
            )
    stage = whole(t("deepspeed_stage"))
    if stage in (1, 3):
        ours.set("zero_stage", stage)
    elif stage == 0 and t.has("deepspeed_stage"):
        ours.note("deepspeed_stage=0: ZeRO 2 here, which computes the same numbers")
    moved = [name for name in ("optimizer", "param") if t(f"deepspeed_offload_{name}", False) is True]
    moved = [name for name in moved if name != "param" or stage == 3]
    if moved:
        ours.set("offload", moved)


def open_instruct_loss(t: Theirs, ours: Ours) -> None:
    """Set the KL, clipping by earlier names, corrections for the sampler, and the variant."""
    kind = str(t("kl_estimator", 2)).removeprefix("kl")
    ours.set("kl_estimator", KL_BY_NUMBER.get(kind, f"k{kind}" if kind in "1234" else "k3"))
    if isinstance(t("kl_estimator"), str) and str(t("kl_estimator")).startswith("k"):
        ours.set("kl_estimator", "k" + kind.lstrip("k"))
    if t.has("cliprange"):
        ours.set("clip_lower", number(t("cliprange"), 0.2))
        ours.set("clip_higher", number(t("cliprange"), 0.2))
    if t.has("ref_policy_update_freq") and whole(t("ref_policy_update_freq")):
        ours.set("ref_policy_update", [whole(t("ref_policy_update_freq")), number(t("alpha"), 0.6)])
    t.has("alpha")
    cap = number(t.given.get("truncated_importance_sampling_ratio_cap", t("rho_clamp_upper_bound", 2.0)))
    t.has("truncated_importance_sampling_ratio_cap")
    ours.set("truncated_importance_sampling_ratio_cap", cap if t("use_rho_correction", True) else 0.0)
    low, high = number(t("rho_mask_lower_bound")), number(t("rho_mask_upper_bound"))
    if high > 1:
        ours.set("importance_sampling_mask", [low, high])
    norm = t("loss_denominator", "token")
    ours.set("loss_norm", "token" if norm == "token" else "constant")
    if norm != "token":
        ours.note(f"loss_denominator={norm}: sums are divided by --max_response_length here; scale --learning_rate")
    if t.has("token_level_loss", "masked_mean_axis", "masked_mean_denominator") and (
        t("masked_mean_axis") == 1 or t.given.get("token_level_loss") is False
    ):
        ours.set("loss_norm", "sequence")
    if str(t("loss_fn", "dapo")).lower() == "cispo":
        with_variant(ours, "cispo", "loss_fn=cispo")


def open_instruct_data(t: Theirs, ours: Ours) -> None:
    """Set the model, the data and its columns."""
    revision = t("model_revision")
    name = t("model_name_or_path")
    ours.set("model_name_or_path", f"{name}@{revision}" if revision and revision != "main" else name)
    mixture(t, ours, "dataset_mixer_list", "dataset_mixer_list_splits", "dataset")
    held = t.given.get("dataset_mixer_eval_list", t.given.get("dataset_eval_mixer"))
    if held:
        mixture(t, ours, "dataset_mixer_eval_list", "dataset_mixer_eval_list_splits", "eval_dataset")
        ours.set("eval_temperature", 0.0)
        ours.note("evaluations there are greedy: --eval_temperature 0")
    else:
        ours.set("eval_prompts", 0)
    t.has(
        "dataset_mixer_eval_list",
        "dataset_eval_mixer",
        "dataset_mixer",
        "dataset_train_splits",
        "dataset_eval_splits",
        "dataset_mixer_eval_list_splits",
    )
    ours.set("bad_rows", "drop")
    ours.note("--bad_rows drop leaves out rows whose verifier does not exist here, and says how many")
    if t("ground_truths_key", "GROUND_TRUTHS_KEY") not in ("ground_truth", "GROUND_TRUTHS_KEY"):
        ours.set("ground_truth_key", t("ground_truths_key"))
    if t("sft_messages_key", "messages") not in ("messages", "DEFAULT_SFT_MESSAGES_KEY"):
        ours.set("prompt_key", t("sft_messages_key"))
    template = t("chat_template_name") or t("chat_template")
    if template in TEMPLATES:
        ours.set("chat_template", TEMPLATES[template])
        if template != TEMPLATES[template]:
            ours.note(
                f"chat_template_name={template}: --chat_template {TEMPLATES[template]} is the nearest built-in one"
            )
    elif template:
        ours.lacks(f"chat_template_name={template}: the tokenizer's own template; a Jinja file is --chat_template FILE")
    if t("system_prompt_override_file"):
        file = Path(str(t("system_prompt_override_file")))
        if file.is_file():
            ours.set("system_prompt", file.read_text(encoding="utf-8").strip())
        else:
            ours.lacks(f"system_prompt_override_file={file}: no such file here; pass its text as --system_prompt")
    factor = t("rope_scaling_factor")
    t.has("rope_scaling_beta_fast", "rope_scaling_beta_slow", "rope_scaling_old_context_len")
    if factor:
        ours.lacks(f"rope_scaling_factor={factor}: give rope_scaling in --override_config")
    kind = str(t("model_dtype", "bfloat16"))
    if t.has("model_dtype") and kind in ("bfloat16", "float32"):
        ours.set("dtype", kind)
    passed = t("no_resampling_pass_rate")
    if passed is not None:
        ours.note(
            f"no_resampling_pass_rate={passed}: --dataset_filter SHARE {passed} drops such problems after an epoch"
        )


def mixture(t: Theirs, ours: Ours, key: str, splits_key: str, flag: str) -> None:
    """Set a data set from names and parts in turn, with the split of each."""
    value = t.given.get(key, t.given.get(key.replace("_list", "")))
    value = t(key) if value is None else value
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    parts = [str(part) for part in listed(value)]
    given = t.given.get(splits_key)
    splits = [str(split) for split in listed(given)] or (["train"] if flag == "dataset" else ["test"])
    t.used.update((key, splits_key))
    sources: dict[str, float | int] = {}
    for i in range(0, len(parts) - 1, 2):
        split = splits[i // 2] if i // 2 < len(splits) else splits[-1]
        name = parts[i] if split == "train" else f"{parts[i]}@{split}"
        part = parts[i + 1].replace("_", "")
        share = float(part) if re.search(r"[.e]", part) else int(part)
        held = local_rows(name)
        if isinstance(share, int) and held is not None and share > held:
            ours.note(f"{key} {name} {share}: it has {held} rows here, and all of them are used")
            share = 1.0
        sources[name] = min(1.0, share) if isinstance(share, float) else share
    if (
        len(sources) == 1
        and flag == "dataset"
        and next(iter(sources.values())) == 1.0
        and isinstance(next(iter(sources.values())), float)
    ):
        ours.set(flag, next(iter(sources)))
    elif sources:
        ours.set(flag, json.dumps(sources))


def open_instruct_rewards(t: Theirs, ours: Ours) -> None:
    """Set the scale of rewards, the reward of the form, and what truncated responses get."""
    if t.has("verification_reward"):
        ours.set("reward_scaling", number(t("verification_reward"), 10.0))
    if t("apply_r1_style_format_reward", False) is True:
        ours.note(
            "apply_r1_style_format_reward adds to the verifier of each row there; here --verifier math,format "
            "--reward_weights format=NUMBER names both"
        )
    t.has("r1_style_format_reward", "additive_format_reward")
    remap = t("remap_verifier")
    if remap:
        ours.note(f"remap_verifier={remap}: --verifier NAME judges every row")
    if (
        t.has("reward_model_multiplier", "reward_model_path")
        and number(t.given.get("reward_model_multiplier", 1.0)) > 0
    ):
        ours.set("reward_model_name_or_path", t.given.get("reward_model_path"))
    t.has("reward_model_revision")
    value = t.given.get("penalty_reward_value", t("non_stop_penalty_value", 0.0))
    t.has("penalty_reward_value")
    penalized = t("non_stop_penalty", False)
    if penalized is True:
        ours.set("mask_no_eos_with_zero", True)
        scale = number(ours.flags.get("reward_scaling", 10.0), 10.0)
        ours.set("non_stop_penalty", -number(value) if number(value) < 0 else None)
        if number(value) > 0:
            ours.note(
                f"non_stop_penalty_value={value} would reward truncation; truncated responses score 0 of {scale:g} here"
            )
    if t("active_sampling", False) is True:
        ours.set("dynamic_sampling_rounds", 10)
        ours.note("active_sampling replaces groups of equal reward until the batch is full; here up to 10 rounds")
    if t.has("stop_token") and t("stop_token") == "period":
        ours.set("stop_strings", ["."])


def open_instruct_run(t: Theirs, ours: Ours) -> None:
    """Set names, records, evaluations and checkpoints."""
    if t.has("exp_name", "run_name"):
        ours.set("exp_name", folder_name(t.given.get("exp_name", t.given.get("run_name"))))
    if t("with_tracking", False) is True:
        ours.set("track", True)
        for key, name in (
            ("wandb_project", "PROJECT"),
            ("wandb_project_name", "PROJECT"),
            ("wandb_entity", "ENTITY"),
            ("wandb_group_name", "RUN_GROUP"),
        ):
            if t.has(key) and t(key):
                ours.env[f"WANDB_{name}"] = str(t(key))
    t.has("wandb_project", "wandb_project_name", "wandb_entity", "wandb_group_name")
    every = whole(t("local_eval_every"), 100)
    if t.has("num_evals") and whole(t("num_evals")):
        total = whole(t("total_episodes"), 100000)
        per_step = number(ours.flags.get("num_unique_prompts_rollout", t("num_unique_prompts_rollout", 16))) * number(
            t.given.get("num_samples_per_prompt_rollout", t.given.get("number_samples_per_prompt", 4))
        )
        every = max(1, int(total / max(1.0, per_step)) // whole(t("num_evals")))
    if "eval_dataset" in ours.flags and every > 0:
        ours.set("eval_every", every, relied_on(t, "local_eval_every") if not t.has("num_evals") else "")
    t.has("eval_freq", "eval_on_step_0")
    if t.has("eval_pass_at_k") and whole(t("eval_pass_at_k")) > 1:
        ours.set("eval_samples", whole(t("eval_pass_at_k")))
        ours.set("eval_temperature", number(t("temperature"), 1.0))
    if t.has("save_freq") and whole(t("save_freq")) > 0:
        ours.set("save_every", whole(t("save_freq")))
    if t.has("keep_last_n_checkpoints"):
        ours.set("keep_checkpoints", max(0, whole(t("keep_last_n_checkpoints"))))
    if t.has("save_traces", "rollouts_save_path") and t("save_traces", False) is True:
        ours.set("log_samples", 64)
    for key, name in (
        ("vllm_gpu_memory_utilization", "gpu_memory_utilization"),
        ("vllm_enforce_eager", "enforce_eager"),
    ):
        if t.has(key) and t(key) is not None:
            ours.vllm_args[name] = t(key)
    t.has("vllm_attention_backend", "vllm_enable_prefix_caching", "enable_prefix_caching")


# ------------------------------------------------------------------------------------------------------------- OpenRLHF

OPENRLHF_NORM = {"token-mean": "token", "seq-mean-token-mean": "sequence", "seq-mean-token-sum-norm": "constant"}


def openrlhf(t: Theirs, ours: Ours) -> None:
    """Translate OpenRLHF's train_ppo_ray.py."""
    name = str(t("algo.advantage.estimator", "gae"))
    ours.script = "ppo" if name in ("gae", "reinforce", "flash_reinforce") else "grpo"
    ours.preset = "openrlhf" if ours.script == "grpo" else None
    kinds = {"group_norm": "standard", "rloo": "leave_one_out", "dr_grpo": "centered", "reinforce_baseline": "centered"}
    if ours.script == "grpo":
        ours.set("advantage_normalization_type", kinds[name])
    if name == "reinforce_baseline":
        with_variant(ours, "reinforce_pp", "estimator reinforce_baseline divides by the std of the batch")
    if name in ("reinforce", "flash_reinforce"):
        ours.set("disable_value", True)
        ours.note(f"estimator {name} is ppo.py --disable_value: whitened returns without a critic")
    if t.has("algo.advantage.no_std_norm") and t("algo.advantage.no_std_norm") is True:
        ours.note(
            "no_std_norm: advantages keep their scale there; --adv_norm none of ppo.py does not center them either"
        )
    openrlhf_launch(t, ours)
    group, prompts = whole(t("rollout.n_samples_per_prompt"), 1), whole(t("rollout.batch_size"), 1024)
    each = whole(t("train.batch_size"), 128)
    sized(ours, prompts, group, prompts * group / max(1, each), t.text("train.batch_size"))
    openrlhf_loss(t, ours)
    openrlhf_kl(t, ours)
    openrlhf_optimizer(t, ours)
    openrlhf_data(t, ours)
    openrlhf_rewards(t, ours)
    openrlhf_run(t, ours)


def openrlhf_launch(t: Theirs, ours: Ours) -> None:
    """Set the GPUs that train and those that sample. Reference and critic share the policy's."""
    actor = whole(t("actor.num_nodes"), 1) * whole(t("actor.num_gpus_per_node"), 8)
    engines, size = whole(t("vllm.num_engines")), whole(t("vllm.tensor_parallel_size"), 1)
    shared = t("train.colocate_all", False) is True
    for name in ("ref", "reward", "critic"):
        t.has(f"{name}.num_nodes", f"{name}.num_gpus_per_node")
    t.has("train.colocate_actor_ref", "train.colocate_critic_reward")
    ahead = t("train.async_enable", False) is True
    apart = engines > 0 and (not shared or ahead)
    ours.processes = actor + (engines * size if apart else 0)
    ours.nodes = whole(t("actor.num_nodes"), 1)
    if apart:
        ours.set("vllm_engines", engines)
    if apart and size > 1:
        ours.set("vllm_tensor_parallel_size", size)
    elif size > 1:
        parallel(ours, size, "vllm.tensor_parallel_size")
    partial = t("train.partial_rollout_enable", False) is True and size == 1
    if ahead:
        ours.set("async_steps", max(1, whole(t("train.async_queue_size"), 1)) if partial else 1)
    if ahead and partial:
        ours.set("inflight_updates", "keep")
    t.has("train.async_queue_size", "train.partial_rollout_enable")
    if not apart and t("ds.enable_sleep", False) is True and whole(t("ds.zero_stage"), 2) == 2:
        ours.set("vllm_sleep", "all")
    elif not apart and (t("vllm.enable_sleep", False) is True or t("ds.enable_sleep", False) is True):
        ours.set("vllm_sleep", "engine")
    stage = whole(t("ds.zero_stage"), 2)
    if stage in (1, 3):
        ours.set("zero_stage", stage)
    moved = ["optimizer"] if t("ds.adam_offload", False) is True and ours.flags.get("vllm_sleep") != "all" else []
    moved += ["ref"] if t("ref.offload", False) is True else []
    if moved:
        ours.set("offload", moved)
    for key in ("enforce_eager", "gpu_memory_utilization"):
        if t.has(f"vllm.{key}"):
            ours.vllm_args[key] = t(f"vllm.{key}")
    t.has("vllm.enable_prefix_caching", "vllm.enable_sleep")


def openrlhf_loss(t: Theirs, ours: Ours) -> None:
    """Set clipping, normalization, and corrections for the sampler."""
    low = number(t("actor.eps_clip"), 0.2)
    pair = [number(x) for x in listed(t("actor.eps_clip_low_high"))] or [low, low]
    ours.set("clip_lower", pair[0])
    ours.set("clip_higher", pair[-1])
    norm = str(t("actor.loss_agg_mode", "token-mean"))
    ours.set("loss_norm", OPENRLHF_NORM.get(norm, "constant"))
    if norm not in OPENRLHF_NORM:
        ours.note(f"loss_agg_mode {norm}: sums are divided by --max_response_length here; scale --learning_rate")
    ours.set("entropy_coef", number(t("actor.entropy_coef")))
    kind = str(t("actor.policy_loss_type", "ppo"))
    if kind == "gspo":
        with_variant(ours, "gspo", "policy_loss_type gspo")
    elif kind != "ppo":
        ours.lacks(f"policy_loss_type {kind}; the clipped loss takes its place")
    bounds = [number(x) for x in listed(t("algo.advantage.is_correction_threshold", "[0.5, 5.0]"))]
    on = t.given.get("algo.advantage.is_correction_enable") is True or t(
        "algo.advantage.is_correction_level", "off"
    ) not in ("off", False)
    mode = str(t("algo.advantage.is_correction_mode", "mask"))
    if t.has("algo.advantage.is_correction_enable"):
        mode = str(t("algo.advantage.is_correction_type", "tis"))
    t.has(
        *(f"algo.advantage.is_correction_{name}" for name in ("enable", "type", "level", "mode", "gating", "threshold"))
    )
    if on and mode in ("tis", "clip", "truncate", "clamp"):
        ours.set("truncated_importance_sampling_ratio_cap", bounds[-1])
    elif on:
        ours.set(
            "importance_sampling_mask",
            [bounds[0] if len(bounds) > 1 and bounds[0] < 1 else 0.0, max(1.0001, bounds[-1])],
        )
    if on and t.given.get("algo.advantage.is_correction_level") not in (None, "token"):
        ours.note("is_correction_level: weights are of tokens here")


def openrlhf_kl(t: Theirs, ours: Ours) -> None:
    """Place the KL: one coefficient and one estimator there."""
    coef, in_loss = number(t("algo.kl.init_coef"), 0.01), t("algo.kl.use_loss", False) is True
    kind = str(t("algo.kl.estimator", "k1"))
    ours.set("beta", coef)
    ours.set("kl_placement", "loss" if in_loss else "reward")
    if in_loss:
        ours.set("kl_estimator", kind if kind in ("k1", "k2", "k3") else "k1")
    elif kind in ("k2", "k3") and coef > 0:
        ours.set("kl_reward_estimator", kind)
    ours.set("kl_gradient", "unbiased" if t("algo.kl.unbiased_gradient", False) is True else "naive")
    target = t("algo.kl.target")
    if target is not None and coef > 0:
        adaptive(ours, target, t("algo.kl.horizon", 10000))
    if coef == 0 and "ref" in ours.flags.get("offload", []):
        ours.flags["offload"] = [name for name in ours.flags["offload"] if name != "ref"]
        if not ours.flags["offload"]:
            del ours.flags["offload"]


def openrlhf_optimizer(t: Theirs, ours: Ours) -> None:
    """Set schedule and betas, and what differs for the critic."""
    schedule(ours, t("actor.lr_scheduler"), t("actor.min_lr_ratio", 0.1))
    ours.set("adam_betas", [number(x) for x in listed(t("actor.adam.betas", "[0.9, 0.95]"))] or [0.9, 0.95])
    if ours.script != "ppo" or ours.flags.get("disable_value"):
        t.has("critic.freezing_steps", "critic.model_name_or_path")
        return
    policy = t("actor.model_name_or_path")
    ppo_critic(ours, "model_name_or_path", t.given.get("critic.model_name_or_path", policy), policy)
    for key, mine in (
        ("lr_warmup_ratio", "warmup_steps"),
        ("adam.weight_decay", "weight_decay"),
        ("max_norm", "max_grad_norm"),
    ):
        ppo_critic(ours, mine, number(t(f"critic.{key}")), number(t(f"actor.{key}")))
    if t.has("critic.lr_scheduler"):
        kinds = {"constant": "constant", "linear": "linear"}
        ours.critic.append(f"lr_scheduler_type={kinds.get(str(t('critic.lr_scheduler')), 'cosine')}")
    ours.set("critic_warmup", max(0, whole(t("critic.freezing_steps"), 0)))


def openrlhf_data(t: Theirs, ours: Ours) -> None:
    """Set data sets, columns, lengths and the length of the run."""
    names = [str(name) for name in listed(t("data.prompt_dataset"))]
    split = str(t("data.prompt_split", "train"))
    names = [name if split == "train" else f"{name}@{split}" for name in names]
    dataset(ours, names)
    if t.has("data.prompt_probs") and len(names) > 1:
        ours.note(
            "data.prompt_probs: shares of what is drawn there; here the JSON of --dataset has shares of each source"
        )
    limit, held = whole(t("data.max_samples")), [local_rows(name) for name in names]
    if t.has("data.max_samples") and len(names) == 1:
        if held[0] is not None and limit < held[0]:
            ours.set("dataset", json.dumps({names[0]: limit}))
        elif held[0] is None:
            ours.note(
                f"data.max_samples {limit}: if the data have more, give --dataset '{json.dumps({names[0]: limit})}'"
            )
    if t.has("eval.dataset"):
        where = str(t("eval.split", "train"))
        ours.set("eval_dataset", json.dumps({str(t("eval.dataset")) + ("" if where == "train" else f"@{where}"): 1.0}))
        ours.set("eval_temperature", number(t("eval.temperature"), 0.6), relied_on(t, "eval.temperature"))
        if whole(t("eval.steps"), -1) > 0:
            ours.set("eval_every", whole(t("eval.steps")))
    else:
        ours.set("eval_prompts", 0)
        t.has("eval.steps")
    ours.set("prompt_key", t("data.input_key", "input"), relied_on(t, "data.input_key"))
    ours.set("ground_truth_key", t("data.label_key"))
    if t("data.apply_chat_template", False) is not True:
        ours.set("chat_template", "none", relied_on(t, "data.apply_chat_template"))
    if t("data.input_template"):
        ours.lacks("data.input_template: a Jinja file with the same text is --chat_template FILE")
    total, new, prompt = (
        whole(t("data.max_len"), 2048),
        whole(t.given.get("rollout.max_new_tokens")),
        whole(t.given.get("prompt_max_len")),
    )
    t.has("rollout.max_new_tokens", "prompt_max_len")
    new = new or (total - prompt if 0 < prompt < total else total // 2)
    ours.set("max_response_length", new)
    ours.set("max_prompt_length", prompt or max(1, total - new))
    ours.set("overlong_prompts", "drop")
    if not t.has("rollout.max_new_tokens"):
        ours.note(f"data.max_len={total} is for prompt and response together there; here half of it is for each")
    ours.set("total_epochs", max(1, whole(t("train.num_episodes"), 1)))


def openrlhf_rewards(t: Theirs, ours: Ours) -> None:
    """Set the reward model, or verifiers in the place of reward and agent functions."""
    label = t("data.label_key")
    url = t.given.get("reward.remote_url", t.given.get("reward.remote_rm_url"))
    agent = t("train.agent_func_path")
    t.has("reward.remote_url", "reward.remote_rm_url")
    if t("reward.model_name_or_path") and not url and not agent:
        ours.set("verifier", "reward_model")
    elif agent or url:
        reward_file(ours, "train.agent_func_path" if agent else "reward.remote_url", agent or url, "")
        ours.set("verifier", "math" if label else "format")
        ours.note(f"--verifier {ours.flags['verifier']} holds its place")
    length = t("reward.overlong_buffer_len")
    if length:
        ours.set("overlong_buffer", whole(length))
        if number(t("reward.overlong_penalty_factor"), 1.0) != 1.0:
            ours.note("the overlong penalty is 1 at --max_response_length, whatever overlong_penalty_factor is")
    t.has("reward.overlong_penalty_factor")
    coef = t("reward.stop_properly_penalty_coef")
    if coef is not None:
        ours.set("mask_no_eos_with_zero", True)
        if number(coef) < 0:
            ours.set("non_stop_penalty", -number(coef))
        elif number(coef) > 0:
            ours.note(f"stop_properly_penalty_coef={coef} scales the reward of truncated responses; they score 0 here")
    if t.has("reward.clip_range"):
        ours.set("max_reward_clip", max(abs(number(x)) for x in listed(t("reward.clip_range"))))
    if t("algo.dynamic_filtering_enable", False) is True:
        ours.set("dynamic_sampling_rounds", 10)
        ours.note("dynamic_filtering replaces groups outside its range; here those of equal reward, in up to 10 rounds")
    t.has("algo.dynamic_filtering_range", "rollout.vllm_generate_batch_size")


def openrlhf_run(t: Theirs, ours: Ours) -> None:
    """Set names, records and checkpoints."""
    writes_events = event_files(t, ours, "logger.tensorboard_dir")
    names = ["wandb"] * t.has("logger.wandb.key") + ["tensorboard"] * writes_events
    if "wandb" in set_trackers(ours, names):
        for key, name in (("project", "PROJECT"), ("org", "ENTITY"), ("group", "RUN_GROUP")):
            if t.has(f"logger.wandb.{key}"):
                ours.env[f"WANDB_{name}"] = str(t(f"logger.wandb.{key}"))
    t.has("logger.wandb.project", "logger.wandb.org", "logger.wandb.group")
    if t.has("logger.wandb.run_name"):
        ours.set("exp_name", folder_name(t("logger.wandb.run_name")))
    if t.has("ckpt.save_steps") and whole(t("ckpt.save_steps")) > 0:
        ours.set("save_every", whole(t("ckpt.save_steps")))
    if t.has("ckpt.max_num"):
        ours.set("keep_checkpoints", max(1, whole(t("ckpt.max_num"))))
    kind = str(t.given.get("ds.param_dtype", "auto"))
    t.has("ds.param_dtype", "bf16")
    if kind in ("bf16", "fp32") or t.given.get("bf16") is True:
        ours.set("dtype", "float32" if kind == "fp32" else "bfloat16")
    attention = t("ds.attn_implementation")
    if t.has("ds.attn_implementation") and isinstance(attention, str) and "flash" not in attention:
        ours.set("attn_implementation", attention)


# ---------------------------------------------------------------------------------------------------------------- AReaL


def areal(t: Theirs, ours: Ours) -> None:
    """Translate AReaL's PPOConfig, and the command line of its version 0.3."""
    early = any(key.startswith(("ppo.", "dataset.", "group_size")) for key in t.given)
    has_critic = any(key.startswith("critic.") for key in t.given) and t.given.get("critic", "") is not None
    normed = any(key.startswith("actor.reward_norm") and t.given[key] is not None for key in t.given)
    ours.script = "ppo" if early or has_critic or not normed else "grpo"
    ours.preset = "areal"
    t.has("critic")
    areal_advantages(t, ours, early, has_critic)
    areal_launch(t, ours)
    scale = "ppo" if early else "actor"
    low = number(t.given.get("ppo.eps_clip", t("actor.eps_clip", 0.2)), 0.2)
    t.has("ppo.eps_clip")
    ours.set("clip_lower", min(low, 0.999))
    ours.set("clip_higher", number(t("actor.eps_clip_higher"), low))
    bias = number(t.given.get(f"{scale}.{'reward_output_bias' if early else 'reward_bias'}"))
    t.has("actor.reward_bias", "ppo.reward_output_bias")
    ours.set("reward_bias", bias if early else -bias)
    coef = number(t.given.get("ppo.kl_ctl", t("actor.kl_ctl", 0.1)), 0.1)
    t.has("ppo.kl_ctl")
    ours.set("beta", coef)
    ours.set("kl_placement", "reward")
    if coef > 0:
        ours.set("kl_reward_estimator", {"k2": "k2", "k3": "k3"}.get(str(t("actor.kl_estimator", "k1")), "k1"))
    if t("ppo.use_adaptive_kl_ctl", False) is True and coef > 0:
        adaptive(ours, number(t("ppo.adaptive_kl_target"), 6) / coef, t("ppo.adaptive_kl_horizon", 10000))
    t.has("ppo.adaptive_kl_target", "ppo.adaptive_kl_horizon")
    areal_corrections(t, ours)
    schedule(ours, t("actor.optimizer.lr_scheduler_type", "constant"), t("actor.optimizer.min_lr_ratio", 0.0))
    ours.set("adam_betas", [number(t("actor.optimizer.beta1"), 0.9), number(t("actor.optimizer.beta2"), 0.999)])
    if ours.script == "ppo" and not ours.flags.get("disable_value"):
        policy = t("actor.path")
        ppo_critic(ours, "model_name_or_path", t.given.get("critic.path", policy) or policy, policy)
        for key, mine in (
            ("weight_decay", "weight_decay"),
            ("warmup_steps_proportion", "warmup_steps"),
            ("gradient_clipping", "max_grad_norm"),
        ):
            ppo_critic(ours, mine, t(f"critic.optimizer.{key}"), t(f"actor.optimizer.{key}"))
    t.has("critic.optimizer.lr_scheduler_type", "critic.path", "ppo.critic_sample_reuse")
    areal_data(t, ours)
    areal_run(t, ours)


def areal_advantages(t: Theirs, ours: Ours, early: bool, has_critic: bool) -> None:
    """Set normalization of rewards and advantages."""
    mean, std = t("actor.reward_norm.mean_level", "group"), t("actor.reward_norm.std_level", "group")
    leave_out = t("actor.reward_norm.mean_leave1out", False) is True
    t.has("actor.reward_norm", "actor.reward_norm.eps", "actor.reward_norm.mean_level", "actor.reward_norm.std_level")
    adv = t.given.get(
        "actor.adv_norm.mean_level",
        t.given.get("ppo.adv_norm", t.given.get("actor.adv_norm", "batch" if early else None)),
    )
    t.has(
        *(f"actor.adv_norm{part}" for part in ("", ".mean_level", ".std_level", ".eps", ".mean_leave1out")),
        "ppo.adv_norm",
        "group_adv_norm",
    )
    if ours.script == "grpo":
        ours.set("advantage_normalization_type", "leave_one_out" if leave_out else "standard" if std else "centered")
        if "actor.reward_norm.eps" in t.given:
            ours.set("advantage_eps", number(t("actor.reward_norm.eps"), 1e-5))
        if mean == "batch" or std == "batch":
            with_variant(ours, "reinforce_pp", "reward_norm over the batch")
        if adv:
            ours.note("adv_norm normalizes advantages once more over the batch there (docs/evidence/presets.md)")
        return
    if not has_critic and not early:
        ours.set("disable_value", True)
        ours.set("bootstrap_truncated", False)
        ours.note("no critic and no reward_norm is ppo.py --disable_value: returns, whitened over the batch")
    kind = (
        "group"
        if t.given.get("group_adv_norm") is True or adv == "group"
        else "batch"
        if adv not in (None, False)
        else "none"
    )
    ours.set("adv_norm", kind)
    if t.given.get("ppo.value_norm") is True:
        ours.set("value_norm", "running" if t("ppo.value_norm_type", "exp") == "ma" else "exp")
    t.has("ppo.value_norm", "ppo.value_norm_type", "use_dense_reward", "reward_delta")
    if t.given.get("use_dense_reward") is True:
        ours.set("dense_reward", "difference" if t.given.get("reward_delta", True) else "sum")


def areal_launch(t: Theirs, ours: Ours) -> None:
    """Set the GPUs that train and those that sample, from its backends or its allocation mode, and the lag between."""
    text = str(t.given.get("allocation_mode") or "")
    parts = text.strip("'").split("+") if text else []
    sampler = str(t("rollout.backend") or (parts[0] if parts else ""))
    trainer = str(t("actor.backend") or (parts[-1] if parts else ""))
    t.has("allocation_mode", "cluster.n_nodes", "cluster.n_gpus_per_node", "n_nodes", "n_gpus_per_node")
    cluster = whole(t.given.get("cluster.n_nodes", t.given.get("n_nodes", 1)), 1) * whole(
        t.given.get("cluster.n_gpus_per_node", t.given.get("n_gpus_per_node", 8)), 8
    )
    engines, size = degree(sampler, "d"), degree(sampler, "t")
    trains = degree(trainer, "d") * degree(trainer, "p") * degree(trainer, "t") * degree(trainer, "c")
    ours.nodes = whole(t.given.get("cluster.n_nodes", t.given.get("n_nodes", 1)), 1)
    ahead = whole(t.given.get("rollout.max_head_offpolicyness", t.given.get("max_head_offpolicyness", 0)))
    t.has("rollout.max_head_offpolicyness", "max_head_offpolicyness")
    if not sampler or not trainer:
        ours.processes = cluster
    elif engines * size + trains <= cluster:
        ours.processes = engines * size + trains
        ours.set("vllm_engines", engines)
        ours.flags |= {"vllm_tensor_parallel_size": size} if size > 1 else {}
    else:
        ours.processes = max(trains, 1)
    if t("actor.fsdp.offload_params", False) is True:
        ours.set("zero_stage", 3)
        ours.set("offload", ["param"])
    if ahead > 0 and size == 1:
        ours.set("async_steps", ahead)
        ours.set("inflight_updates", "recompute")
    elif ahead > 0:
        ours.set("async_steps", 1)
        ours.note(
            f"max_head_offpolicyness={ahead}: 1 here, as an engine of several GPUs gets its weights between batches"
        )
    for key, name in (
        ("vllm.gpu_memory_utilization", "gpu_memory_utilization"),
        ("sglang.mem_fraction_static", "gpu_memory_utilization"),
    ):
        if t.has(key) and t(key) is not None:
            ours.vllm_args.setdefault(name, t(key))
    for key in ("max_num_seqs", "enforce_eager", "max_model_len", "max_num_batched_tokens", "enable_prefix_caching"):
        t.has(f"vllm.{key}", f"actor.vllm.{key}")
    t.has("actor.vllm.gpu_memory_utilization")


def degree(text: str, letter: str) -> int:
    """Return a degree of parallelism in a text such as fsdp:d4p1t1."""
    found = re.search(rf"{letter}(\d+)", text.rpartition(":")[2])
    return int(found[1]) if found else 1


def areal_corrections(t: Theirs, ours: Ours) -> None:
    """Set what corrects for stale samplers: its decoupled loss with rejection sampling."""
    high, low = t("actor.rejection_sampling.upper"), t("actor.rejection_sampling.lower")
    given = any(key.startswith("actor.rejection_sampling") and t.given[key] is not None for key in t.given)
    t.has(*(f"actor.rejection_sampling{part}" for part in ("", ".level", ".action", ".metric", ".agg")))
    decoupled = t.given.get("actor.use_decoupled_loss", t.given.get("ppo.use_decoupled_loss")) is True
    t.has(
        "actor.use_decoupled_loss",
        "ppo.use_decoupled_loss",
        "actor.recompute_logprob",
        "ppo.recompute_logprob",
        "actor.prox_logp_method",
    )
    cap = number(t.given.get("behav_imp_weight_cap"))
    t.has("behav_imp_weight_cap")
    if cap > 1:
        ours.set("importance_sampling_mask", [0.0, cap])
    elif given and number(high) > 1:
        action = str(t.given.get("actor.rejection_sampling.action", "mask"))
        if action == "clamp":
            ours.set("truncated_importance_sampling_ratio_cap", number(high))
        else:
            ours.set("importance_sampling_mask", [number(low), number(high)])
    elif not decoupled and not given:
        ours.set("importance_sampling_mask", "None")
        ours.set("truncated_importance_sampling_ratio_cap", 0.0)
        ours.note("without rejection_sampling its loss has no weight for stale tokens; 0 turns ours off")
    if str(t("actor.importance_sampling_level", "token")) == "sequence":
        with_variant(ours, "gspo", "importance_sampling_level=sequence")


def areal_data(t: Theirs, ours: Ours) -> None:
    """Set data sets and lengths."""
    for key, split, flag in (
        ("train_dataset", "train", "dataset"),
        ("valid_dataset", "test", "eval_dataset"),
        ("dataset", "", "dataset"),
    ):
        name = t.given.get(f"{key}.path")
        t.has(f"{key}.path", f"{key}.split")
        if not name:
            continue
        text = path_text(name)
        if text == "openai/gsm8k":
            text = f"openai/gsm8k:main@{t.given.get(f'{key}.split', split)}"
            ours.note(
                "its gsm8k asks for \\boxed{} and math-verify judges; the verifier gsm8k here reads the last number"
            )
        if flag == "dataset" or not same_data(text, ours):
            ours.set(flag, text if flag == "dataset" else json.dumps({text: 1.0}))
    if "eval_dataset" not in ours.flags:
        ours.set("eval_prompts", 0)
    longest = t.given.get("train_dataset.max_length", t.given.get("dataset.max_prompt_len"))
    t.has("train_dataset.max_length", "dataset.max_prompt_len")
    if longest:
        ours.set("max_prompt_length", whole(longest))
        ours.set("overlong_prompts", "drop")
    tokenizer = t.given.get("tokenizer_path")
    t.has("tokenizer_path", "rollout.tokenizer_path")
    if tokenizer and tokenizer != t("actor.path"):
        ours.set("tokenizer_name_or_path", tokenizer)


def same_data(name: str, ours: Ours) -> bool:
    """Return True if evaluation data are the training data, which would leave none to train on."""
    return name == ours.flags.get("dataset")


def areal_trackers(t: Theirs, ours: Ours) -> None:
    """Set --track, and what wandb reads from the environment. SwanLab reads the event files of TensorBoard."""
    writes_events = event_files(t, ours, "stats_logger.tensorboard.path")
    if t.has("stats_logger.swanlab.mode") and t("stats_logger.swanlab.mode") not in (None, False, "disabled"):
        writes_events = True
        ours.note(
            f"{t.text('stats_logger.swanlab.mode')}: SwanLab is not here; --track tensorboard writes event files into "
            f"the run's folder, and swanlab convert --type tensorboard reads them"
        )
    names = ["tensorboard"] * writes_events
    for prefix in ("stats_logger.wandb", "wandb"):
        if t.has(f"{prefix}.mode") and t(f"{prefix}.mode") in ("online", "offline", "shared"):
            names.append("wandb")
            if t(f"{prefix}.mode") == "offline":
                ours.env["WANDB_MODE"] = "offline"
            for key, name in (("project", "PROJECT"), ("entity", "ENTITY"), ("group", "RUN_GROUP")):
                if t.has(f"{prefix}.{key}") and t(f"{prefix}.{key}"):
                    ours.env[f"WANDB_{name}"] = str(t(f"{prefix}.{key}"))
        t.has(f"{prefix}.project", f"{prefix}.entity", f"{prefix}.group")
    set_trackers(ours, names)


def areal_run(t: Theirs, ours: Ours) -> None:
    """Set names, records, evaluations and checkpoints."""
    if t.has("experiment_name"):
        ours.set("exp_name", folder_name(t("experiment_name")))
    areal_trackers(t, ours)
    for keys, flag in (
        (("evaluator.freq_steps", "exp_ctrl.eval_freq_steps"), "eval_every"),
        (("saver.freq_steps", "exp_ctrl.save_freq_steps", "exp_ctrl.ckpt_freq_steps"), "save_every"),
    ):
        for key in keys:
            if t.has(key) and whole(t(key)) > 0:
                ours.set(flag, whole(t(key)))
    for key in ("recover.freq_secs", "saver.freq_secs", "exp_ctrl.ckpt_freq_secs"):
        if t.has(key) and number(t(key)) > 0:
            ours.set("save_minutes", number(t(key)) / 60)
    if t.has("cluster.fileroot"):
        ours.set("output_dir", path_text(t("cluster.fileroot")))
    if t.given.get("actor.overlong_reward_penalty") is True:
        ours.set("overlong_buffer", whole(t("actor.overlong_tokens")))
    t.has("actor.overlong_reward_penalty", "actor.overlong_tokens", "actor.overlong_penalty_factor")
    if t.has("actor.dtype") and t("actor.dtype") in ("bfloat16", "float32"):
        ours.set("dtype", t("actor.dtype"))
    t.has("critic.dtype", "ref.dtype")
    kind = t("actor.attn_impl", "")
    if t.has("actor.attn_impl") and "flash" not in str(kind):
        ours.set("attn_implementation", kind)
    limit, share = (
        number(t.given.get("dataset_filter_threshold", 100), 100),
        number(t.given.get("dataset_max_filter_percentage")),
    )
    t.has("dataset_filter_threshold", "dataset_max_filter_percentage")
    if 0 < limit < 1 and 0 < share < 1:
        ours.set("dataset_filter", [share, limit])
    t.has("rollout.max_concurrent_rollouts")


RULES: dict[str, Callable[[Theirs, Ours], None]] = {
    "verl": verl,
    "tinyzero": verl,
    "trl": trl,
    "open-instruct": open_instruct,
    "openrlhf": openrlhf,
    "areal": areal,
}

# Keys whose defaults a command relies on, beside those that the preset has: sizes and lengths.
RELIED = {
    **dict.fromkeys(
        ("verl", "tinyzero"),
        (
            *("data.max_prompt_length", "data.max_response_length", "data.train_batch_size", "trainer.total_epochs"),
            "actor_rollout_ref.model.path",
        ),
    ),
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
    ("tinyzero", "grpo"): {"advantage_eps": 1e-6, "kl_gradient": "naive", "kl_reward_norm": "before_norm"},
    ("openrlhf", "ppo"): {
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "bootstrap_truncated": False,
        "adv_norm": "batch",
        "value_norm": "none",
        "critic_learning_rate": 9e-6,
        "value_clip": 0.5,
        "disable_value": False,
    },
}


def settings_of(command: Command, framework: str, ours: Ours) -> Theirs:
    """Return the settings of a command under the current names of their keys; argparse's abbreviations are completed.

    An empty value is noted and left out.
    """
    table = rows(framework)
    names = list(table)
    given: dict[str, Any] = {}
    for key, value in command.settings.items():
        name = key
        if name not in table and framework in ("trl", "open-instruct", "openrlhf"):
            name, value = completed(name, value, names)
        if name in table and table[name].kind == "renamed":
            name = table[name].ours
        if value == "" and name in table and table[name].default not in ("", "''"):
            ours.lacks(f"{key} is empty, as is a shell variable that is not set; its default takes its place")
            continue
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

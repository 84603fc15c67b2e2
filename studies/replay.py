"""Compare the gradients of several settings on the very same samples: the batch of a step of a run.

The batch is rebuilt by studies/rebuild_batch.py: the run is repeated from its last checkpoint before the step, which
takes as long as it took then, and is compared with what the run logged. Nothing is written to the folder of the run.

    python studies/replay.py runs/NAME --set kl_estimator=k1,k2,k3 kl_gradient=naive,unbiased --set loss=clip,cispo,gspo
    python studies/replay.py runs/NAME --step 14 --after 4 --set clip_higher=0.2,0.28 --set loss=mine.py

The first row is the run's own setting. Flags after one --set are combined, each value with each; every --set starts
again from the run's own. The flags are those of the script, as far as the gradient of given samples depends on them
(SETTABLE), and loss=NAME: clip for grpo.py, the name of a variant (variants/NAME.patch), or a script, FILE.py.
That script's own token_loss, loss_weights and group_advantages are called, with the defaults that it has.

    --step S      the step whose batch is rebuilt. Default: the last one
    --after N     first take N optimizer steps of the run's own setting on the batch, so that ratios leave 1
    --batch DIR   keep the rebuilt batch in this folder; a later call with it does not repeat the run again
    --force       only warn if the code of the run has changed, or if the repeated steps differ from the run's

Prints a table and the cosines between the gradients. docs/evidence/replay.md says what each number is.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import math
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders are no packages
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "scripts"))

from runtime.arguments import flags
from runtime.run import directory
from runtime.system import process

# What the advantages depend on, and what the loss of given advantages depends on.
ADVANTAGE_FLAGS = (
    *("advantage_normalization_type", "advantage_eps", "beta", "kl_placement", "kl_estimator", "kl_reward_coef"),
    *("kl_reward_estimator", "kl_reward_norm"),
)
SETTABLE = (
    *(
        "filter_zero_std_samples",
        "mask_truncated_completions",
        "loss_norm",
        "clip_lower",
        "clip_higher",
        "clip_ratio_c",
    ),
    *("entropy_coef", "truncated_importance_sampling_ratio_cap", "importance_sampling_mask", "kl_gradient"),
    *ADVANTAGE_FLAGS,
)


def parse(words: list[str]) -> argparse.Namespace:
    """Parse the arguments. Exits with code 2 for a run or a step of which no batch can be rebuilt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run, runs/NAME")
    parser.add_argument("--set", nargs="+", action="append", default=[], metavar="FLAG=A,B", dest="settings")
    parser.add_argument("--step", type=int)
    parser.add_argument("--after", type=int, default=0, metavar="N")
    parser.add_argument("--batch", type=Path, metavar="DIR")
    parser.add_argument("--force", action="store_true")
    args = parser.parse_args(words)
    if not (args.run / "config.json").is_file():
        process.refuse(f"{args.run}: no config.json there; give the folder of a run, runs/NAME")
    given = read_config(args.run)["args"]
    if "lora_rank" in given:
        process.refuse(f"{args.run} trained adapters, and replay computes gradients of whole weights only")
    last = directory.last_step(args.run / "metrics.jsonl")
    if last < 1:
        process.refuse(f"{args.run} has logged no step in metrics.jsonl, so there is no batch to rebuild")
    args.step = last if args.step is None else args.step
    if not 1 <= args.step <= last:
        process.refuse(f"--step {args.step}: {args.run} has logged steps 1 to {last}")
    if args.after < 0:
        process.refuse(f"--after {args.after}: must be 0 or more")
    if args.after > 0:
        check_after(args, given)
    if args.batch is not None and args.batch.exists():
        check_batch(args)
    return args


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a run. Exits with code 2 if it cannot be read."""
    try:
        return directory.read_config(folder)
    except ValueError as error:
        process.refuse(f"{folder}: its config.json cannot be read ({error})")


def check_after(chosen: argparse.Namespace, args: dict[str, Any]) -> None:
    """Reject --after where the run's own update of this step did not go as far: its weights would be made up."""
    if chosen.step <= args.get("critic_warmup", 0):
        process.refuse(
            f"--after {chosen.after}: in step {chosen.step} only the critic learned (--critic_warmup "
            f"{args['critic_warmup']}); leave --after out, or choose a later --step"
        )
    limit = args.get("early_stop_imp_ratio")
    if limit is None:
        return
    for line in (chosen.run / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if metrics["step"] == chosen.step and metrics["optim/steps"] < chosen.after:
            process.refuse(
                f"--after {chosen.after}: the run stopped its update of step {chosen.step} after "
                f"{metrics['optim/steps']} optimizer step(s) (--early_stop_imp_ratio {limit:g}); pass at most that many"
            )


def check_batch(args: argparse.Namespace) -> None:
    """Reject a folder that does not hold the batch of this step of this run."""
    wanted = {"step": args.step, "run": process.file_digest(args.run / "config.json")}
    try:
        about = json.loads((args.batch / "batch.json").read_text())
        same = wanted.items() <= about.items()
    except (OSError, ValueError, AttributeError):
        same = False
    if not same:
        process.refuse(
            f"--batch {args.batch} exists and is not the batch of step {args.step} of {args.run}; choose another folder"
        )


if __name__ == "__main__":  # --help and a wrong folder come before the slow imports
    chosen = parse(sys.argv[1:])
    process.prepare_environment()

import diff_runs
import rebuild_batch
import script_loader
import torch
import torch.nn.functional as F
import variant

import grpo
import utils
from kl_estimators import kl_reward, make_tokens
from runtime.data.samples import Sample, equal_rewards
from runtime.run.identity import changed_code, code_of
from runtime.training import batching, pretrained
from runtime.training.attention import choose_layout
from runtime.training.memory import default_sizes

EXACT = "exact"  # the row of the KL over the whole vocabulary
SCRATCH = tempfile.TemporaryDirectory(prefix="replay-")  # variants and the batch, until the end of the process

# ------------------------------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class Setting:
    """A row of the table: what was asked for, the script that computes it, and all its arguments."""

    name: str
    script: ModuleType
    args: flags.RunFlags


def load_script(path: Path) -> ModuleType:
    """Import a training script from its file without running it. Exits with code 2 if the file is none."""
    if not path.is_file():
        process.refuse(f"{path} is no file; give loss= clip, a script, or one of {', '.join(variant.names())}")
    if path.resolve() == Path(grpo.__file__).resolve():
        return grpo
    return script_loader.load_script(path, ("Args", "check_args", "Tokens", "token_loss", "loss_weights"))


def script_of(loss: str) -> ModuleType:
    """Return the script that ``loss=`` names."""
    if loss == "clip":
        return grpo
    if loss.endswith(".py"):
        return load_script(Path(loss))
    file = Path(SCRATCH.name) / f"{loss}.py"
    file.write_text(variant.variant(loss))
    return load_script(file)


def arguments(script: ModuleType, base: Setting) -> flags.RunFlags:
    """Arguments of another script for the run's command line: its own defaults, and what the run has changed."""
    if script is base.script:
        return base.args
    defaults = base.script.Args()
    names = {f.name for f in dataclasses.fields(script.Args)}
    changed = {}
    for name, value in vars(base.args).items():
        if name in names and value != getattr(defaults, name):
            changed[name] = value
    return script.Args(**changed)


def run_setting(folder: Path, batch: RunBatch) -> Setting:
    """Return the run's own setting, with the KL coefficient of the step. Prints what has changed in the run's code."""
    config = read_config(folder)
    path = process.PROJECT / batch.script
    if not path.is_file():
        process.refuse(f"{path}, the script of {folder}, is gone: restore it, or name a copy of it with loss=FILE.py")
    script = load_script(path)
    known = {f.name for f in dataclasses.fields(script.Args)}
    for name, value in config["args"].items():
        if name not in known:
            print(f"warning: since the run, {batch.script} has lost --{name}, which was {value}")
    args = diff_runs.arguments(script, config["args"])
    for line in changed_code(config["code"], code_of(args)):
        if line.startswith(("kl_estimators", "utils", batch.script)):
            print(f"warning: since the run, {line}")
    if args.kl_target is not None:
        in_both = args.kl_placement == "both"
        own = {"kl_target": None, "beta": batch.loss_coef or batch.reward_coef}
        own["kl_reward_coef"] = batch.reward_coef if in_both else None
        args = replace(args, **own)
    return Setting("run", script, args)


def make_settings(groups: list[list[str]], base: Setting) -> list[Setting]:
    """Return the run's own setting, and those of each --set. Exits with code 2 for invalid flags or values."""
    settings = [base]
    scripts: dict[str, ModuleType] = {}
    for group in groups:
        choices = []
        for word in group:
            flag, equals, values = word.partition("=")
            if not equals or not values:
                process.refuse(f"--set {word}: give FLAG=VALUE, or several values with commas")
            choices.append([(flag.removeprefix("--"), value) for value in values.split(",")])
        for combination in itertools.product(*choices):
            settings.append(make_setting(dict(combination), base, scripts))
    return settings


def make_setting(values: dict[str, str], base: Setting, scripts: dict[str, ModuleType]) -> Setting:
    """Return the run's setting with these values, as the command line of a script would have them."""
    name = " ".join(f"{flag}={value}" for flag, value in values.items())
    loss = values.get("loss")
    script = base.script
    if loss is not None:
        if loss not in scripts:
            scripts[loss] = script_of(loss)
        script = scripts[loss]
    defaults = arguments(script, base)
    shared = {f.name for f in dataclasses.fields(grpo.Args)}
    own = {f.name for f in dataclasses.fields(script.Args)} - shared
    settable = {*SETTABLE, *own}
    words = []
    for flag, value in values.items():
        if flag == "loss":
            continue
        if flag not in settable:
            process.refuse(
                f"--set {flag}: the gradient of given samples does not depend on it, or they would be others; "
                f"give loss, {', '.join(sorted(settable))}"
            )
        if value in ("on", "off"):
            words.append(f"--{flag}" if value == "on" else f"--no-{flag}")
        else:
            words += [f"--{flag}", *value.split()]
    args = flags.parse(script.Args, None, words, defaults)
    script.check_args(args)
    return Setting(name, script, args)


def phase_6(script: ModuleType) -> str:
    """Return a script's text from its advantages to its update; ``computed_advantages`` computes grpo.py's."""
    text = Path(script.__file__).read_text()
    _, _, rest = text.partition("# 6 advantages")
    return rest.partition("# 7 update")[0]


def statistics(setting: Setting) -> tuple:
    """Return the settings that determine the advantages; equal ones in one script mean equal advantages."""
    args = setting.args
    _, reward_coef = args.kl_coefficients
    kl = None
    if reward_coef > 0:
        kl = (reward_coef, args.kl_reward_estimator, getattr(args, "kl_reward_norm", None))
    function = getattr(setting.script, "group_advantages", None)
    text = inspect.getsource(function) if function is not None else ""
    kind = (getattr(args, "advantage_normalization_type", None), getattr(args, "advantage_eps", None))
    return text, kind, kl, phase_6(setting.script)


def uses_reference(setting: Setting) -> bool:
    """Return True if a setting has a KL to the reference."""
    return any(setting.args.kl_coefficients)


def without_kl(setting: Setting) -> Setting:
    """Return the same setting without its KL."""
    return replace(setting, args=replace(setting.args, kl_placement="none"))


# ----------------------------------------------------------------------------------------------------------- the batch


@dataclass
class RunBatch:
    """A batch as the run had it. Flat arrays as in the scripts, [N + 1]; NaN where the run computed nothing."""

    folder: Path
    step: int
    loss_coef: float
    reward_coef: float
    script: str  # relative to the project
    reference: str | None  # a model's name, or the name of a folder in ``folder``
    samples: list[Sample]
    old_N: torch.Tensor
    ref_N: torch.Tensor
    advantages_N: torch.Tensor


def read_batch(folder: Path) -> RunBatch:
    """Read the batch that ``rebuild`` wrote. Raises OSError or ValueError if the folder holds none."""
    import pyarrow.parquet

    about = json.loads((folder / "batch.json").read_text())
    about.pop("run", None)
    table = pyarrow.parquet.read_table(folder / "samples.parquet").to_pylist()
    samples = []
    arrays = {"old_logprobs": [], "ref_logprobs": [], "advantages": []}
    names = {field.name for field in dataclasses.fields(Sample)}
    for row in table:
        versions = list(zip(row["versions"], row["version_starts"], strict=True))
        values = {name: value for name, value in row.items() if name in names}
        values["observed"] = [tuple(span) for span in row["observed"]]
        samples.append(Sample(**values, weight_versions=versions))
        for name, flat in arrays.items():
            flat += [math.nan] * len(row["sampler_logprobs"]) if row[name] is None else row[name]
    flat = [torch.tensor([*values, 0.0]) for values in arrays.values()]
    return RunBatch(folder, **about, samples=samples, old_N=flat[0], ref_N=flat[1], advantages_N=flat[2])


@dataclass
class Slopes:
    """Effect of a setting's loss on each token: its derivatives, and the fractions of tokens that count."""

    direction: torch.Tensor  # [3, N + 1] by the token's log-prob, its entropy, its KL over the vocabulary
    weights_N: torch.Tensor  # of the tokens in the loss
    clipped: float  # the script says it clipped them, or capped their ratio
    dropped: float  # their advantage is not 0, and the policy's loss has no gradient for them


class Replay:
    """A batch of a run, the weights of its step, and the reference, all in fp32 and on one device."""

    def __init__(self, batch: RunBatch, base: Setting, with_reference: bool):
        args = replace(base.args, dtype="float32", attn_implementation="auto", vllm_tensor_parallel_size=1)
        self.device, dtype, attention = pretrained.resolve_device(args)
        cuda = self.device.type == "cuda"
        sizes = default_sizes(args, cuda)
        layout, attention, _ = choose_layout(args, sizes, cuda, dtype, attention)
        self.batch = batch
        self.base = base
        self.samples = batch.samples
        self.groups = sorted({s.prompt_id for s in self.samples})
        rewards: dict[int, set[float]] = {}
        for sample in self.samples:
            rewards.setdefault(sample.prompt_id, set()).add(sample.reward)
        self.zero_std = {prompt for prompt, found in rewards.items() if equal_rewards(min(found), max(found))}
        self.everything = list(range(len(self.samples)))
        self.offsets = batching.token_offsets(self.samples)
        self.layout = {
            "layout": "padded" if layout == "packed" else layout,  # packed is for flash attention
            "budget": sizes.micro_batch_tokens,
            "rank": 0,
            "world_size": 1,
            "device": self.device,
        }

        def load(**place) -> utils.TokenLogprobs:
            try:
                model = pretrained.load_model(replace(args, **place), dtype, attention)
            except OSError as error:
                process.refuse(f"{place['model_name_or_path']} cannot be loaded: {error}")
            if args.gradient_checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return utils.TokenLogprobs(model.to(self.device), args.temperature, sizes.logprob_chunk)

        # A saved config has the changes of --override_config in it.
        self.policy = load(model_name_or_path=str(batch.folder / "model"), override_config=None)
        self.reference = None
        if with_reference:
            name = batch.reference or args.model_name_or_path
            teacher = getattr(args, "teacher_name_or_path", None)  # of variants/distill.patch: its reference
            if teacher is not None:
                place = {"model_name_or_path": teacher, "override_config": None}
            elif batch.reference == "reference":
                place = {"model_name_or_path": str(batch.folder / name), "override_config": None}
            else:
                place = {"model_name_or_path": name}
            self.reference = load(**place).requires_grad_(False)
        self.sampler_N = batching.flat([s.sampler_logprobs for s in self.samples], self.device)[:-1]
        numbers = list(range(len(self.samples)))
        self.owners_N = batching.per_token(numbers, batching.token_offsets(self.samples), self.device)
        self.measure()
        self.old_N = self.logprobs_N
        self.old_full_kl_N = self.full_kl_N

    @torch.no_grad()
    def measure(self) -> None:
        """Log-probs, entropy and KL over the vocabulary of each token, by the weights as they are; the reference's."""
        values = torch.zeros(4, self.offsets[-1] + 1, device=self.device)
        for mb in batching.micro_batches(self.samples, self.everything, **self.layout):
            logprobs_T, entropy_T, full_kl_T = self.policy(mb, self.reference)
            values[0, mb.tokens] = logprobs_T
            values[1, mb.tokens] = entropy_T
            if self.reference is not None:
                values[2, mb.tokens] = full_kl_T
                values[3, mb.tokens] = self.reference(mb)[0]
        self.logprobs_N, self.entropy_N, self.full_kl_N, self.ref_N = values

    def agreement(self) -> dict[str, float]:
        """Largest differences, in nats, between the run's log-probs and those of the weights; -1 where none is known.

        The sampler's and the advantages are compared for the tokens in the loss: the run did not compute the KL in the
        reward of samples that are left out.
        """
        batch = self.batch
        counted_N = self.slopes(self.base).weights_N.cpu() > 0
        fresh_N = batching.flat([s.token_versions() == batch.step for s in self.samples], "cpu")
        sampler_N = F.pad(self.sampler_N.cpu(), (0, 1))
        pairs = {
            "sampler": (torch.where(fresh_N & counted_N, sampler_N, torch.nan), self.logprobs_N),
            "old": (batch.old_N, self.logprobs_N),
        }
        if self.reference is not None:
            pairs["reference"] = (batch.ref_N, self.ref_N)
        if phase_6(self.base.script) == phase_6(grpo):
            theirs_N = torch.where(counted_N, batch.advantages_N, torch.nan)
            pairs["advantages"] = (theirs_N, self.computed_advantages(self.base))
        found = {}
        for name, (theirs, ours) in pairs.items():
            difference = (theirs - ours.cpu())[:-1].abs()
            found[name] = difference.nan_to_num(nan=-1.0).max().item()
        return found

    # ---- a setting

    def in_loss(self, args, members: set[int]) -> list[int]:
        """Return the indices of the samples of these prompts that count in the loss, as a script chooses them."""
        found = []
        for i, sample in enumerate(self.samples):
            left_out = args.filter_zero_std_samples and sample.prompt_id in self.zero_std
            if args.mask_truncated_completions:
                left_out |= sample.finish_reason == "length"
            if sample.prompt_id in members and not left_out:
                found.append(i)
        return found

    def advantages(self, setting: Setting) -> torch.Tensor:
        """Return the advantages of every token, [N + 1]: the run's, or new ones if those are not the setting's.

        Exits with code 2 for a script whose advantages are not grpo.py's, and for rewards that a script rejects.
        """
        if self.has_run_advantages(setting):
            return self.batch.advantages_N.to(self.device)
        if not self.knows_advantages(setting):
            process.refuse(
                f"{setting.name}: {Path(setting.script.__file__).name} computes advantages in a way of its own, which "
                f"is known here only for the setting of the run; leave out flags that change advantages, or that add "
                f"samples to the loss of a run with a KL in the reward"
            )
        try:
            return self.computed_advantages(setting)
        except ValueError as error:
            process.refuse(f"{setting.name}: {error}")

    def knows_advantages(self, setting: Setting) -> bool:
        """Return True if the advantages are the run's, or follow from the rewards as in grpo.py."""
        return self.has_run_advantages(setting) or phase_6(setting.script) == phase_6(grpo)

    def has_run_advantages(self, setting: Setting) -> bool:
        """Return True if the run's advantages are those of the setting, for every sample in its loss.

        For a KL in the reward a run has the log-probs of the samples in its own loss, or of all of them; the advantages
        of the others lack the KL, and their old log-probs are NaN.
        """
        if statistics(setting) != statistics(self.base):
            return False
        if setting.args.kl_coefficients[1] == 0:
            return True
        first_tokens = [self.offsets[i] for i in self.in_loss(setting.args, set(self.groups))]
        return not self.batch.old_N[first_tokens].isnan().any()

    def computed_advantages(self, setting: Setting) -> torch.Tensor:
        """Compute advantages as in phase 6 of grpo.py, [N + 1]: group statistics, and the KL in the reward."""
        args = setting.args
        script = setting.script
        _, reward_coef = args.kl_coefficients
        rewards = torch.tensor([s.reward for s in self.samples], dtype=torch.float64)
        rewards_PG = rewards.view(len(self.groups), -1)
        kind = args.advantage_normalization_type
        advantages_PG = script.group_advantages(rewards_PG, kind, args.advantage_eps)
        penalty_N = torch.zeros_like(self.old_N)
        if reward_coef > 0:
            everywhere = torch.ones_like(self.old_N, dtype=torch.bool)
            estimator = args.kl_reward_estimator
            kl_N = kl_reward(
                self.old_N,
                self.ref_N,
                everywhere,
                estimator=estimator,
                full_kl=self.old_full_kl_N,
            )
            penalty_N[:-1] = reward_coef * script.return_to_go(kl_N, self.offsets)
            if args.kl_reward_norm == "before_norm":
                sequence_kl_PG = penalty_N[self.offsets[:-1]].double().cpu().view_as(rewards_PG)
                advantages_PG = script.group_advantages(rewards_PG - sequence_kl_PG, kind, args.advantage_eps)
                penalty_N = torch.zeros_like(penalty_N)
        advantages = advantages_PG.flatten().float().to(self.device)
        return F.pad(advantages[self.owners_N[:-1]], (0, 1)) - penalty_N

    def slopes(self, setting: Setting, members: set[int] | None = None) -> Slopes:
        """Differentiate the setting's loss over all tokens, as its script computes it, by the outputs of the model.

        ``members``: the prompts of a mini-batch. Default: all.
        """
        args = setting.args
        members = set(self.groups) if members is None else members
        in_loss = self.in_loss(args, members)
        weights_N = setting.script.loss_weights(self.samples, in_loss, args).to(self.device)
        advantages_N = self.advantages(setting)[:-1]
        values = torch.stack([self.logprobs_N, self.entropy_N, self.full_kl_N])
        leaves = values[:, :-1].clone().requires_grad_()
        logprobs_N, entropy_N, full_kl_N = leaves
        loss_coef, _ = args.kl_coefficients
        has_kl = self.reference is not None
        known = {
            "logprobs_T": logprobs_N,
            "old_T": self.old_N[:-1],
            "ref_T": self.ref_N[:-1],
            "sampler_T": self.sampler_N,
            "advantages_T": advantages_N,
            "weights_T": weights_N,
            "entropy_T": entropy_N,
            "full_kl_T": full_kl_N if has_kl else None,
            "response_T": self.owners_N[:-1],
        }
        wanted = {field.name for field in dataclasses.fields(setting.script.Tokens)}
        if unknown := wanted - known.keys():
            process.refuse(f"{setting.name}: its Tokens have {', '.join(unknown)}; known here are {', '.join(known)}")
        tokens = make_tokens(setting.script, **known)
        loss_N, pieces = setting.script.token_loss(tokens, loss_coef, args)
        policy = (pieces["policy"] * weights_N).sum()
        loss = (loss_N * weights_N).sum()
        (own,) = torch.autograd.grad(policy, leaves, retain_graph=True)
        (direction,) = torch.autograd.grad(loss, leaves)
        counted_N = weights_N > 0
        wanted_N = counted_N & (advantages_N != 0)
        return Slopes(
            direction=F.pad(direction, (0, 1)),
            weights_N=F.pad(weights_N, (0, 1)),
            clipped=fraction(pieces["clipped"] > 0, counted_N),
            dropped=fraction(own[0] == 0, wanted_N),
        )

    def gradient(self, direction: torch.Tensor, members: set[int]) -> torch.Tensor:
        """Sum slope times gradient over the tokens of these prompts, by all parameters: [parameters], fp32."""
        moving = direction.abs().sum(0) > 0
        indices = []
        for i in self.owners_N[moving].unique().tolist():
            if self.samples[i].prompt_id in members:
                indices.append(i)
        by_logprob, by_entropy, by_full_kl = direction
        reference = self.reference if by_full_kl.any() else None
        self.policy.zero_grad()
        with_entropy = bool(by_entropy.any())
        for mb in batching.micro_batches(self.samples, indices, **self.layout) if indices else ():
            logprobs_T, entropy_T, full_kl_T = self.policy(mb, reference, with_entropy)
            loss = (logprobs_T * by_logprob[mb.tokens]).sum()
            if with_entropy:
                loss = loss + (entropy_T * by_entropy[mb.tokens]).sum()
            if reference is not None:
                loss = loss + (full_kl_T * by_full_kl[mb.tokens]).sum()
            loss.backward()
        parts = []
        for weight in self.policy.parameters():
            gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad
            parts.append(gradient.flatten())
        return torch.cat(parts)

    def take_steps(self, count: int, total: int) -> None:
        """Take optimizer steps of the run's own setting on its own mini-batches, with the moments of a fresh optimizer.

        ``total``: optimizer steps of the whole run, which the learning rate follows. A mini-batch of groups of equal
        reward moves the weights by the moments; one without a sample in the loss is passed by.
        """
        args = self.base.args
        updates = args.num_epochs * args.num_mini_batches
        warmup = getattr(args, "critic_warmup", 0) * updates  # of ppo.py: the policy's steps are counted from its end
        before = (self.batch.step - 1) * updates - warmup
        prompts = {self.samples[i].prompt_id for i in self.in_loss(args, set(self.groups))}
        if not getattr(args, "disable_value", True):  # ppo.py deals all prompts: its critic learns from every sample
            prompts = set(self.groups)
        parameters = list(self.policy.parameters())
        optimizer = utils.make_optimizer(parameters, args.learning_rate, args)
        for k in range(count):
            epoch, mini = divmod(k, args.num_mini_batches)
            members = utils.mini_batch(sorted(prompts), self.batch.step, epoch, mini, args)
            if not self.in_loss(args, members):
                continue
            gradient = self.gradient(self.slopes(self.base, members).direction, members)
            pieces = gradient.split([weight.numel() for weight in parameters])
            for weight, piece in zip(parameters, pieces, strict=True):
                weight.grad = piece.view_as(weight).clone()
            if args.max_grad_norm > 0:
                torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            for group in optimizer.param_groups:
                group["lr"] = utils.learning_rate(before + k, max(updates, total - warmup), args)
            optimizer.step()
            self.measure()


def fraction(part: torch.Tensor, whole: torch.Tensor) -> float:
    """Return the fraction of the tokens in ``whole`` that are in ``part``; NaN if ``whole`` is empty."""
    return ((part & whole).sum() / whole.sum()).item()


# ------------------------------------------------------------------------------------------------------------ geometry


class Directions:
    """Different directions [3, N + 1], and the inner products of their gradients over the two halves of the prompts.

    A setting's gradient is a sum of directions, its policy's and its KL's, and several settings share one. The
    gradients of the halves are kept in bfloat16, 4 bytes per parameter and direction: a cosine moves by about 1e-6.
    """

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self.products = torch.zeros(0)

    def place(self, direction: torch.Tensor) -> int:
        """Return the number of a direction, which is added if it is new."""
        for number, other in enumerate(self.found):
            if torch.equal(direction, other):
                return number
        self.found.append(direction)
        return len(self.found) - 1

    def compute(self, replay: Replay) -> None:
        """Fill ``products`` [directions, 2, directions, 2]: of the gradient of half h with that of another's half k."""
        even = set(replay.groups[0::2])
        odd = set(replay.groups[1::2])
        kept = []
        for direction in self.found:
            for half in (even, odd):
                gradient = replay.gradient(direction, half)
                kept.append(gradient.cpu().bfloat16())
        size = len(kept)
        products = torch.zeros(size, size, dtype=torch.float64)
        for pieces in zip(*(gradient.split(2**20) for gradient in kept), strict=True):
            piece = torch.stack(pieces).float()
            products += (piece @ piece.T).double()
        self.products = products.view(size // 2, 2, size // 2, 2)


@dataclass
class Geometry:
    """Norms [K], cosines [K, K] and signal-to-noise ratios [K] of K gradients; NaN where a gradient is 0."""

    norms: torch.Tensor
    cosines: torch.Tensor
    signal: torch.Tensor


def geometry(sums: list[list[int]], products: torch.Tensor) -> Geometry:
    """Return the geometry of gradients that are sums of directions, given by the directions' numbers.

    With H and K the gradients of the halves, the noise of their sum H + K is estimated by |H - K|, and the signal by
    what is left of |H + K|: signal^2 = |H + K|^2 - |H - K|^2, which has the right expectation; 0 where it is negative.
    """
    chosen = torch.zeros(len(sums), len(products), dtype=torch.float64)
    for k, numbers in enumerate(sums):
        for number in numbers:
            chosen[k, number] += 1
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    whole = chosen @ products.sum((1, 3)) @ chosen.T
    apart = chosen @ torch.einsum("ahbk,h,k->ab", products, signs, signs) @ chosen.T
    squares = whole.diagonal()
    noise = apart.diagonal()
    norms = squares.sqrt()
    cosines = whole / torch.outer(norms, norms)
    signal = (squares / noise - 1).clamp(min=0).sqrt()
    return Geometry(norms, cosines.clamp(-1, 1), signal)


@dataclass
class Comparison:
    """Everything that the tables show."""

    settings: list[Setting]
    slopes: list[Slopes]
    gradients: Geometry
    kl_names: list[str]  # settings with a KL, and at the end the exact gradient of the first of them
    kl: Geometry | None
    exact: list[float]  # cosine of each of kl_names with the exact gradient under its own weights


def compare(settings: list[Setting], replay: Replay) -> Comparison:
    """Compute the gradients of all settings, and separately those of their KL."""
    directions = Directions()
    slopes = []
    sums = []
    kl_names = []
    kl_sums = []
    exact = []
    for setting in settings:
        own = replay.slopes(setting)
        slopes.append(own)
        if not uses_reference(setting) or not replay.knows_advantages(without_kl(setting)):
            sums.append([directions.place(own.direction)])
            continue
        policy = replay.slopes(without_kl(setting)).direction
        numbers = [directions.place(policy), directions.place(own.direction - policy)]
        full = torch.zeros_like(policy)
        full[2] = sum(setting.args.kl_coefficients) * own.weights_N
        sums.append(numbers)
        kl_names.append(setting.name)
        kl_sums.append(numbers[1:])
        exact.append(directions.place(full))
    count = len(directions.found)
    parameters = sum(weight.numel() for weight in replay.policy.parameters())
    print(f"{count} gradients of {parameters / 1e6:.1f}M parameters, {4e-9 * count * parameters:.1f} GB\n", flush=True)
    directions.compute(replay)
    gradients = geometry(sums, directions.products)
    if not kl_names:
        return Comparison(settings, slopes, gradients, [], None, [])
    to_exact = []
    for own, full in zip(kl_sums, exact, strict=True):
        pair = geometry([own, [full]], directions.products)
        to_exact.append(pair.cosines[0, 1].item())
    kl = geometry([*kl_sums, exact[:1]], directions.products)
    return Comparison(settings, slopes, gradients, [*kl_names, EXACT], kl, [*to_exact, 1.0])


# -------------------------------------------------------------------------------------------------------------- tables


def number(value: float, form: str) -> str:
    """Return a value as text; a dash for one that is not finite."""
    return f"{value:{form}}" if math.isfinite(value) else "–"


def table(found: Comparison) -> str:
    """Return a table in Markdown with a row per setting."""
    head = ["", "setting", "norm", "cosine to run", "signal/noise", "clipped", "without gradient"]
    if found.kl is not None:
        head += ["norm of KL", "signal/noise of KL", "cosine of KL to exact"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for k, setting in enumerate(found.settings):
        slopes = found.slopes[k]
        cells = [
            f"{k}",
            f"`{setting.name}`",
            number(found.gradients.norms[k].item(), ".3g"),
            number(found.gradients.cosines[k, 0].item(), "+.3f"),
            number(found.gradients.signal[k].item(), ".2f"),
            number(slopes.clipped, ".1%"),
            number(slopes.dropped, ".1%"),
        ]
        if found.kl is not None:
            cells += kl_cells(found, setting.name)
        lines.append(f"| {' | '.join(cells)} |")
    if found.kl is not None:
        lines.append(f"| | `{EXACT}` | | | | | | {' | '.join(kl_cells(found, EXACT))} |")
    return "\n".join(lines)


def kl_cells(found: Comparison, name: str) -> list[str]:
    """Return the cells about a setting's KL."""
    if name not in found.kl_names:
        return ["–"] * 3
    k = found.kl_names.index(name)
    norm = found.kl.norms[k].item()
    signal = found.kl.signal[k].item()
    return [number(norm, ".3g"), number(signal, ".2f"), number(found.exact[k], "+.3f")]


def matrix(names: list[str], cosines: torch.Tensor) -> str:
    """Cosines between all rows, in Markdown."""
    lines = [f"| cosine | {' | '.join(map(str, range(len(names))))} |", "|---" * (len(names) + 1) + "|"]
    for k, name in enumerate(names):
        cells = [number(value, "+.3f") for value in cosines[k].tolist()]
        lines.append(f"| {k} `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------- program


def main(chosen: argparse.Namespace) -> Comparison:
    """Rebuild the batch, unless an earlier call has kept it; compare, print."""
    folder = chosen.batch or Path(SCRATCH.name, "batch")
    if not folder.exists():
        rebuild_batch.rebuild(chosen.run, chosen.step, folder, chosen.force)
    batch = read_batch(folder)
    base = run_setting(chosen.run, batch)
    settings = make_settings(chosen.settings, base)
    replay = Replay(batch, base, any(uses_reference(setting) for setting in settings))
    size = f"{len(replay.groups)} prompts, {len(replay.samples)} samples, {replay.offsets[-1]} tokens"
    print(f"step {batch.step} of {chosen.run}: {size}")
    differences = [f"{name} {value:.1e}" for name, value in replay.agreement().items() if value >= 0]
    print(f"largest difference from the run's own numbers: {', '.join(differences)}")
    if chosen.after > 0:
        config = json.loads((chosen.run / "config.json").read_text())
        steps = flags.total_steps(base.args, config["problems"])
        replay.take_steps(chosen.after, steps * base.args.num_epochs * base.args.num_mini_batches)
    found = compare(settings, replay)
    print(table(found))
    print(f"\n{matrix([s.name for s in settings], found.gradients.cosines)}")
    if found.kl is not None:
        print(f"\nKL alone:\n\n{matrix(found.kl_names, found.kl.cosines)}")
    return found


if __name__ == "__main__":
    main(chosen)

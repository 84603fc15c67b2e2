"""Other frameworks' own functions for advantages and losses, called on given numbers; a program of its own.

    python tests/frameworks.py FRAMEWORK FOLDER JOBS RESULTS [MODEL]

FOLDER holds the framework's wheel, installed without its dependencies (``install``). A package that it imports and that
is absent is replaced by a placeholder, which says so at the end; what is called is the framework's own file, and none
of it needs a placeholder to compute. JOBS: a list of (name, case, options) written by torch.save, with the cases of
``cases``; RESULTS: name -> advantages [N], loss, gradient of the log-probs [N], all flat over the response tokens.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import random
import subprocess
import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

Case = dict[str, Any]


# -------------------------------------------------------------------------------------------------------------- numbers


def case(seed: int, *, lengths: tuple[int, int] = (2, 9), ratios=None, scores=None, truncated=0.2) -> Case:
    """Numbers of one optimizer step: 4 prompts x 4 samples, as lists of floats with few digits.

    The scores are multiples of 1/1024, which float32 holds exactly: some frameworks keep scores in it.

    ``ratios``: log-ratios new - old to draw from; ``scores``: scores to draw from. None: normal and uniform numbers.
    """
    r = random.Random(seed)
    sizes = [r.randint(*lengths) for _ in range(16)]
    count = sum(sizes)
    old = [round(-2 + r.gauss(0, 0.7), 4) for _ in range(count)]
    steps = [r.choice(ratios) if ratios else round(r.gauss(0, 0.3), 4) for _ in range(count)]
    return {
        "lengths": sizes,
        "scores": [r.choice(scores) if scores else r.randrange(1025) / 1024 for _ in range(16)],
        "truncated": [r.random() < truncated for _ in range(16)],
        "old": old,
        "new": [round(a + b, 4) for a, b in zip(old, steps, strict=True)],
        "ref": [round(a + r.gauss(0, 0.5), 4) for a in old],
        "sampler": [round(a + r.gauss(0, 0.05), 4) for a in old],
        "values": [round(r.gauss(0.5, 0.3), 4) for _ in range(count)],
        "new_values": [round(r.gauss(0.5, 0.6), 4) for _ in range(count)],
    }


def cases() -> dict[str, Case]:
    """Random numbers and edge cases, on which every preset should agree with its framework."""
    equal = case(3, scores=(0.0, 1.0))
    equal["scores"] = [0.0] * 4 + [1.0] * 4 + [0.0, 1.0, 1.0, 0.0] + [0.25] * 4
    tiny = case(6)
    tiny["scores"] = [0.5 + (i * i % 11) / 2**17 for i in range(16)]  # deviations near 2e-5
    return {
        "random": case(1),
        "binary scores": case(2, scores=(0.0, 1.0)),
        "equal scores": equal,
        "one token": case(4, lengths=(1, 1)),
        "ratio far out": case(5, ratios=(-15.0, -5.0, -1.0, 0.0, 1.0, 5.0, 15.0)),
        "almost equal scores": tiny,
        "ragged lengths": case(7, lengths=(1, 60)),
        "all truncated": case(8, truncated=1.0),
    }


def far_cases() -> dict[str, Case]:
    """Numbers beyond the bounds that the frameworks set where we set others; the differences are in the table."""
    reference = case(13)
    reference["ref"] = [x + (4.0 if i % 3 == 0 else 0.2) for i, x in enumerate(reference["old"])]
    sampler = case(14)
    sampler["sampler"] = [x - (2.0 if i % 3 == 0 else 0.2) for i, x in enumerate(sampler["old"])]
    return {
        "log-ratio beyond 20": case(11, ratios=(-25.0, 0.0, 25.0)),
        "reference far": reference,
        "sampler far": sampler,
    }


# ------------------------------------------------------------------------------------------------------------ importing


def install(package: str, version: str, folder: Path) -> str:
    """Install one wheel without its dependencies into a folder, unless it is there. "" or the reason why not."""
    if (folder / f"{package}-{version}.dist-info").is_dir():
        return ""
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(folder)]
    done = subprocess.run([sys.executable, *words, f"{package}=={version}"], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{package} {version} cannot be installed: {done.stderr.strip()[-300:]}"


class Placeholder(types.ModuleType):
    """A module that has whatever is asked of it, for packages that a framework imports and we do not call."""

    __path__: list[str] = []  # noqa: RUF012  # makes it a package

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds placeholders for the packages in ``names``."""

    def __init__(self):
        self.names: set[str] = set()

    def find_spec(self, name: str, path=None, target=None):
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        pass


ABSENT = Absent()


def load(name: str) -> types.ModuleType:
    """A module of a framework; packages that are absent become placeholders, one after another."""
    framework = name.split(".")[0]
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name.split(".")[0]
            if missing == framework or missing in ABSENT.names:
                raise
            ABSENT.names.add(missing)
            for other in [m for m in sys.modules if m.split(".")[0] == framework]:
                del sys.modules[other]


# ------------------------------------------------------------------------------------------------------- the frameworks


class Tensors:
    """A case as padded tensors [B, T], the log-probs with gradient."""

    def __init__(self, case: Case, dtype: str = "float64"):
        import torch

        self.dtype = getattr(torch, dtype)
        self.lengths = case["lengths"]
        self.rows = len(self.lengths)
        self.mask = (torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]).to(self.dtype)
        self.new = self.pad(case["new"]).requires_grad_()
        self.old, self.ref, self.sampler, self.values, self.new_values = (
            self.pad(case[name]) for name in ("old", "ref", "sampler", "values", "new_values")
        )
        self.new_values.requires_grad_()
        self.scores = torch.tensor(case["scores"], dtype=self.dtype)
        self.group = [i // 4 for i in range(self.rows)]

    def pad(self, flat: list[float]):
        import torch

        padded = torch.zeros(self.mask.shape, dtype=self.dtype)
        padded[self.mask.bool()] = torch.tensor(flat, dtype=self.dtype)
        return padded

    def at_the_end(self, scores):
        """[B] -> [B, T], each at the last token of its row."""
        import torch

        rewards = torch.zeros_like(self.mask)
        rewards[torch.arange(self.rows), torch.tensor(self.lengths) - 1] = scores
        return rewards

    def result(self, advantages, loss, value_loss=None) -> dict[str, Any]:
        """Flat over the response tokens; a loss that does not depend on the log-probs has a gradient of 0."""
        import torch

        inside = self.mask.bool()
        found = {
            "advantages": advantages.detach().double().expand_as(self.mask)[inside],
            "loss": loss.detach().double(),
        }
        inputs = [self.new] if value_loss is None else [self.new, self.new_values]
        total = loss if value_loss is None else loss + value_loss
        gradients = torch.autograd.grad(total, inputs, allow_unused=True)
        names = ("gradient", "value_gradient")
        for name, of, gradient in zip(names, inputs, gradients, strict=False):
            found[name] = (torch.zeros_like(of) if gradient is None else gradient)[inside]
        if value_loss is not None:
            found["value_loss"] = value_loss.detach().double()
        return found


def verl(jobs: list) -> dict:
    """core_algos: the advantages, compute_policy_loss_vanilla, agg_loss, kl_penalty, compute_value_loss."""
    import numpy as np

    core = load("verl.trainer.ppo.core_algos")
    actor_config = load("verl.workers.config").ActorConfig
    results = {}
    for name, numbers, options in jobs:
        t = Tensors(numbers)
        # The sizes have no default there, and change nothing here; all else is the default.
        config = actor_config(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1, **options.get("actor", {}))
        config.global_batch_info.update(
            dp_size=1, batch_num_tokens=t.mask.sum(), global_batch_size=t.rows, loss_scale_factor=options.get("horizon")
        )
        rewards = t.at_the_end(t.scores)
        if options.get("kl_in_reward"):
            rewards = rewards - options["kl_in_reward"] * core.kl_penalty(t.old, t.ref, "kl") * t.mask
        value_loss = None
        if options.get("gae"):
            advantages, returns = core.compute_gae_advantage_return(rewards, t.values, t.mask, 1.0, 1.0)
            value_loss, _ = core.compute_value_loss(t.new_values, returns, t.values, t.mask, 0.5)
        else:
            scale = options.get("norm_adv_by_std_in_grpo", True)
            index = np.array(t.group)
            advantages, _ = core.compute_grpo_outcome_advantage(rewards, t.mask, index, norm_adv_by_std_in_grpo=scale)
        loss, _ = core.compute_policy_loss_vanilla(
            t.old, t.new, advantages, t.mask, loss_agg_mode=config.loss_agg_mode, config=config
        )
        if config.use_kl_loss:
            kl = core.kl_penalty(t.new, t.ref, config.kl_loss_type)
            loss = loss + config.kl_loss_coef * core.agg_loss(
                kl, t.mask, config.loss_agg_mode, **config.global_batch_info
            )
        results[name] = t.result(advantages, loss, value_loss)
    return results


def trl(jobs: list, model: str) -> dict:
    """A GRPOTrainer on a tiny model: _generate_and_score_completions for the advantages, _compute_loss for the loss.

    Given are the scores, by a reward function, and the log-probs, in place of a forward pass.
    """
    import tempfile

    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer

    trainer_class = load("trl.trainer.grpo_trainer").GRPOTrainer
    config_class = load("trl.trainer.grpo_config").GRPOConfig
    data = Dataset.from_dict({"prompt": ["1 + 1 ="] * 16})
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    given = {}  # what the trainers find in place of a reward model and of a forward pass
    trainers = {}
    results = {}
    for name, numbers, options in jobs:
        t = Tensors(numbers)
        if str(options) not in trainers:
            with tempfile.TemporaryDirectory() as folder:
                config = config_class(
                    output_dir=folder,
                    per_device_train_batch_size=16,
                    num_generations=4,
                    max_completion_length=options.get("horizon", 8),
                    use_cpu=True,
                    bf16=False,
                    report_to=[],
                    **options.get("config", {}),
                )
                trainer = trainer_class(
                    model,
                    reward_funcs=lambda completions, **_: given["scores"],
                    args=config,
                    train_dataset=data,
                    processing_class=tokenizer,
                )
            trainers[str(options)] = trainer
        trainer = trainers[str(options)]
        config = trainer.args
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        given["scores"] = numbers["scores"]
        forward = trainer._get_per_token_logps_and_entropies
        advantages = trainer._generate_and_score_completions([{"prompt": "1 + 1 ="}] * 16)["advantages"].double()
        trainer._get_per_token_logps_and_entropies = lambda *_, t=t, **__: (t.new, torch.zeros_like(t.new), None)
        mask = t.mask
        if config.mask_truncated_completions:  # as _generate_and_score_completions does before it counts the tokens
            mask = mask * ~torch.tensor(numbers["truncated"])[:, None]
        ids = torch.ones(mask.shape, dtype=torch.long)
        inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask}
        inputs |= {"advantages": advantages, "old_per_token_logps": t.old, "ref_per_token_logps": t.ref}
        inputs["num_items_in_batch"] = mask.sum()
        loss = trainer._compute_loss(trainer.model, inputs)
        trainer._get_per_token_logps_and_entropies = forward
        results[name] = t.result(advantages[:, None], loss)
    return results


def openrlhf(jobs: list) -> dict:
    """RemoteExperienceMaker.compute_advantages_and_returns, PolicyLoss, compute_approx_kl, aggregate_loss."""
    from types import SimpleNamespace as Space

    maker_class = load("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
    experience_class = load("openrlhf.trainer.ppo_utils.experience").Experience
    losses = load("openrlhf.models.loss")
    compute_approx_kl = load("openrlhf.models.utils").compute_approx_kl
    results = {}
    for name, numbers, options in jobs:
        t = Tensors(numbers)
        kl = {"coef": 0.01, "estimator": "k1", "use_loss": False, "unbiased_gradient": False, **options.get("kl", {})}
        args = Space(
            rollout=Space(n_samples_per_prompt=4),
            algo=Space(advantage=Space(estimator=options.get("estimator", "group_norm"), gamma=1.0, no_std_norm=False)),
            reward=Space(clip_range=(-10, 10), overlong_buffer_len=None, stop_properly_penalty_coef=None),
        )
        maker = maker_class.__new__(maker_class)  # its __init__ only stores Ray actors and these
        maker.strategy = Space(args=args)
        maker.advantage_estimator = args.algo.advantage.estimator
        maker.kl_ctl = Space(value=kl["coef"])
        per_token = compute_approx_kl(t.old, t.ref, kl_estimator=kl["estimator"]).double()
        experience = experience_class(
            index=list(range(t.rows)),
            rewards=t.scores.clone(),
            action_mask=t.mask.bool(),
            kl=per_token * (not kl["use_loss"]),
            info={},
        )
        advantages = maker.compute_advantages_and_returns([experience])[0].advantages
        counts = {"dp_size": 1, "batch_num_tokens": t.mask.sum(), "global_batch_size": t.rows}
        policy_loss = losses.PolicyLoss(**options.get("policy", {}))
        loss = policy_loss(t.new, t.old, advantages, action_mask=t.mask, **counts)[0]
        if kl["use_loss"]:
            options_of_kl = {"kl_estimator": kl["estimator"], "unbiased_gradient": kl["unbiased_gradient"]}
            values = compute_approx_kl(t.new, t.ref, log_probs_old=t.old, **options_of_kl)
            loss = loss + kl["coef"] * losses.aggregate_loss(values, t.mask, **counts)
        results[name] = t.result(advantages, loss)
    return results


def areal(jobs: list) -> dict:
    """PPOActor._compute_advantages, grpo_loss_fn and ppo_critic_loss_fn, with the settings of its GSM8K examples."""
    import logging.config

    import torch

    logging.config.dictConfig = lambda config: None  # its colors need a package that is absent
    actor = load("areal.trainer.ppo.actor")
    fields = load("areal.api.cli_args")
    critic_loss = load("areal.utils.functional").ppo_critic_loss_fn
    results = {}
    for name, numbers, options in jobs:
        t = Tensors(numbers, "float32")  # its statistics reject anything else
        rejection = fields.RejectionSamplingConfig(metric="ratio", upper=5.0)
        norm = fields.NormConfig(mean_level="group", std_level="group", group_size=4)
        batch = fields.NormConfig(mean_level="batch", std_level="batch")
        config = fields.PPOActorConfig(
            eps_clip=0.4,
            reward_scaling=10.0,
            reward_bias=-0.5,
            kl_ctl=options.get("kl_ctl", 0.0),
            ppo_n_minibatches=1,
            recompute_logprob=True,
            use_decoupled_loss=True,
            rejection_sampling=rejection,
            reward_norm=None if options.get("gae") else norm,
            adv_norm=batch if options.get("adv_norm") else None,
            **options.get("fields", {}),
        )
        # A prompt of one token: what predicts response token j stands at j, the token itself at j + 1.
        first = torch.zeros(t.rows, 1)
        width = torch.ones(t.rows, 1)
        data = {
            "input_ids": torch.ones(t.rows, t.mask.shape[1] + 1, dtype=torch.long),
            "attention_mask": torch.cat([width, t.mask], 1),
            "loss_mask": torch.cat([first, t.mask], 1),
            "logprobs": torch.cat([first, t.sampler], 1),
            "prox_logp": torch.cat([t.old, first], 1),
            "ref_logp": torch.cat([t.ref, first], 1),
            "rewards": torch.tensor(numbers["scores"], dtype=torch.float64),
        }
        if options.get("gae"):
            data["values"] = torch.cat([t.values, first], 1)
        made = actor.PPOActor(config, None)._compute_advantages(data)
        new = torch.cat([t.new, first], 1)
        loss = actor.grpo_loss_fn(
            new,
            torch.zeros_like(new),
            made,
            eps_clip=config.eps_clip,
            eps_clip_higher=config.eps_clip_higher,
            c_clip=config.c_clip,
            rejection_sampling=config.rejection_sampling,
            use_decoupled_loss=True,
        )
        value_loss = None
        if options.get("gae"):
            returns = made["returns"][:, :-1]
            value_loss, _ = critic_loss(t.new_values, t.values, returns, 0.5, t.mask.bool())
        results[name] = t.result(made["advantages"][:, :-1], loss, value_loss)
    return results


def main(framework: str, folder: str, jobs_file: str, results_file: str, *more: str) -> None:
    """Call the functions of a framework on all jobs, and say what was a placeholder."""
    import torch
    import transformers  # noqa: F401  # its own search for packages comes before there are placeholders

    sys.path.append(folder)
    sys.meta_path.append(ABSENT)
    results = globals()[framework](torch.load(jobs_file, weights_only=False), *more)
    torch.save({"results": results, "placeholders": sorted(ABSENT.names)}, results_file)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compare random whole runs of grpo.py with an independent computation of their updates in double precision.

    python tests/random_runs.py --runs 200 --seed 1 --out random_runs.jsonl     # 40 CPU minutes
    python tests/random_runs.py --out random_runs.jsonl --table                 # only the table

Each run draws its flags, its environment, its number of ranks and the step at which it is interrupted and resumed. It
is a whole run of three steps on a random Llama with 100 thousand parameters in fp32: ``main`` in forks of this process,
with the real engine, environment, verifiers, DeepSpeed and checkpoints. A recorder in the forks keeps the samples, the
weights and the gradient of every optimizer step. tests/fp64_update.py computes them again from the samples.

One thing is not the run's own: AdamW's epsilon is 1e-4, so that rounding of gradients near 0 is not amplified.

The output has one JSON line per run, with its flags and its largest errors. The same command continues where it was
stopped. A run that disagrees is computed once more with the advantages of the run, and on the run's side of every bend
of the loss that is within 1e-4 nats: if that agrees, rounding in fp32 is the cause, and the line says so. Advantages
must agree in any case, within the effect of 1e-5 nats per token where a group's spread divides a KL.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import math
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders are no packages
sys.path[1:1] = [str(Path(__file__).resolve().parent.parent / folder) for folder in ("scripts", "studies")]

from runtime.system import process

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
    process.prepare_environment()

import exact_rewards
import fp64_update
import run_many
import torch
import watching
from safetensors.torch import load_file

import grpo
import utils
from runtime.arguments import values
from runtime.data.samples import Sample
from runtime.run import logger
from runtime.training import deepspeed_zero

ADAM_EPS = 1e-4
STEPS = 3
# Largest error that counts as equal: of rewards and coefficients relative to 1, of log-probs in nats, and of the others
# relative to the size of what is compared.
LIMITS = {
    "masks": 0.0,
    "rewards": 1e-9,
    "sampler": 1e-4,
    "coefficients": 1e-4,
    "advantages": 1e-4,
    "loss": 1e-4,
    "gradient": 1e-3,
    "movement": 1e-3,
}


# ------------------------------------------------------------------------------------------------------------- drawing


@dataclass
class Plan:
    """One run: its flags, the ranks of each of its parts, and where and how the first part ends."""

    number: int
    flags: dict[str, Any]
    ranks: list[int]
    stop: int | None = None  # during this step
    kill: bool = False  # by SIGKILL; else by SIGTERM

    @property
    def kinds(self) -> list[str]:
        """The rows of the table that the run counts in."""
        flags = self.flags
        return [
            "all",
            *["environment"] * ("environment" in flags),
            *["vLLM"] * (flags["rollout"] == "vllm"),
            *["asynchronous"] * (flags.get("async_steps", 0) > 0),
            *["two ranks"] * (2 in self.ranks),
            *["resumed"] * (self.stop is not None),
            *["other ranks after resuming"] * (len(set(self.ranks)) > 1),
            *["KL"] * (flags.get("beta", 0) > 0),
            *["ZeRO 1 or 3"] * (flags["zero_stage"] != 2),
            *["control"] * ("reward_control" in flags),
        ]


def draw(seed: int, number: int) -> Plan:
    """The plan of a run, from the two numbers alone."""
    r = random.Random(f"{seed}/{number}")
    prompts, group = r.choice((3, 4, 5)), r.choice((2, 3, 4))
    flags: dict[str, Any] = {
        "seed": r.randrange(1000),
        "num_unique_prompts_rollout": prompts,
        "num_samples_per_prompt_rollout": group,
        "num_mini_batches": r.choice((1, 1, 2, prompts)),
        "num_epochs": r.choice((1, 1, 2)),
        "learning_rate": r.choice((1e-3, 3e-4)),
        "loss_norm": r.choice(("token", "sequence", "constant")),
        "advantage_normalization_type": r.choice(("standard", "centered", "leave_one_out")),
        "clip_lower": r.choice((0.2, 0.05)),
        "clip_higher": r.choice((0.2, 0.28, 0.02)),
        "lr_scheduler_type": r.choice(("constant", "linear", "cosine")),
        "max_grad_norm": r.choice((1.0, 0.0, 0.05)),
        "batch_layout": r.choice(("shared", "padded", "packed")),
        "mask_truncated_completions": r.random() < 0.4,
        "mask_no_eos_with_zero": r.random() < 0.4,
        "zero_stage": r.choice((1, 2, 2, 2, 3)),
    }

    def sometimes(share: float, **more: Any) -> None:
        if r.random() < share:
            flags.update(more)

    sometimes(0.2, clip_ratio_c=1.1)
    sometimes(0.3, entropy_coef=r.choice((0.01, -0.02)))
    sometimes(0.2, filter_zero_std_samples=True)
    sometimes(0.3, shuffle_mini_batches=False)
    sometimes(0.3, truncated_importance_sampling_ratio_cap=r.choice((1.0, 2.0, 0.999)))
    sometimes(0.2, importance_sampling_mask=(0.5, 5.0))
    sometimes(0.3, weight_decay=0.1)
    sometimes(0.3, warmup_steps=r.choice((2.0, 0.3)))
    sometimes(0.2, overlong_buffer=5)
    sometimes(0.2, reward_scaling=-2.0, reward_bias=0.3)
    sometimes(0.1, non_stop_penalty=0.5)
    sometimes(0.1, max_reward_clip=0.6)
    sometimes(0.1, early_stop_imp_ratio=1.001)
    sometimes(0.2, temperature=r.choice((0.7, 1.3)))
    sometimes(0.5, micro_batch_tokens=600)
    sometimes(0.15, reward_control=r.choice(("random", "format", "inverted")))
    sometimes(0.1, gradient_checkpointing=True)
    sometimes(0.15, eval_prompts=4, eval_every=1)
    draw_kl(r, flags)
    draw_rollout(r, flags)
    ranks = [2 if r.random() < 0.15 else 1]
    plan = Plan(number, flags, ranks)
    if r.random() < 0.25:
        plan.stop, plan.kill = r.randrange(1, STEPS), r.random() < 0.5
        flags["save_every"] = 1
        again = r.random() < 0.3 and flags["zero_stage"] < 3
        plan.ranks.append(3 - ranks[0] if again else ranks[0])
    return plan


def draw_kl(r: random.Random, flags: dict[str, Any]) -> None:
    """A KL in the loss, in the reward, in both, or none."""
    if r.random() < 0.35:
        return
    where = r.choice(("loss", "reward", "both"))
    flags |= {"kl_placement": where, "beta": r.choice((0.1, 1.0))}
    if where != "reward":
        flags["kl_estimator"] = r.choice(("k1", "k2", "k3", "k4", "abs", "full", "mse", "low_var_kl"))
        flags["kl_gradient"] = r.choice(("naive", "unbiased"))
    if where != "loss":
        flags["kl_reward_estimator"] = r.choice(("k1", "k2", "k3", "k4", "abs", "full"))
        flags["kl_reward_norm"] = r.choice(("before_norm", "after_norm"))
    if r.random() < 0.4:
        flags["kl_target"] = (0.01, 100.0)
    if r.random() < 0.2:
        flags["ref_policy_update"] = (r.choice((1, 2)), r.choice((0.5, 1.0)))


def draw_rollout(r: random.Random, flags: dict[str, Any]) -> None:
    """Several turns with vLLM, one turn with vLLM, or one turn with transformers."""
    kind = r.random()
    flags |= {"rollout": "hf" if kind < 0.6 else "vllm", "max_response_length": 24, "max_prompt_length": 64}
    if kind > 0.7:
        flags |= {"environment": f"{exact_rewards.__file__}:Game", "verifier": "environment"}
        flags |= {"max_turns": r.choice((2, 3, 5)), "max_response_length": r.choice((90, 150)), "max_prompt_length": 80}
    else:
        flags["verifier"] = f"{exact_rewards.__file__}:letters"
        if r.random() < 0.2:
            flags["generation_size"] = flags["num_samples_per_prompt_rollout"] + 2
        if r.random() < 0.2:
            flags["dynamic_sampling_rounds"] = 1
    if r.random() < 0.2:
        flags["async_steps"] = 1
        if flags["rollout"] == "vllm" and r.random() < 0.5:
            flags |= {"async_steps": 2, "inflight_updates": "recompute"}


# ----------------------------------------------------------------------------------------------------------- recording


class Recorder:
    """Keeps what ``main`` computes on one rank, a file per step. Every rank has one, since all gather weights."""

    def __init__(self, folder: Path, plan: Plan, part: int):
        self.folder = folder
        self.stop = plan.stop if part == 0 else None
        self.kill = plan.kill
        self.step: dict[str, Any] = {}
        self.micro: list[tuple] = []
        self.loss = 0.0

    def install(self) -> None:
        """Wrap what ``main`` calls in phases 6, 7 and 9."""
        import deepspeed

        utils.ADAM_EPS = ADAM_EPS
        watching.watch(utils.UpdateStats, "__init__", before=self.begin)
        watching.watch(utils.UpdateStats, "add", before=self.add)
        watching.watch(deepspeed_zero, "backward", before=self.backward)
        watching.watch(deepspeed.DeepSpeedEngine, "step", before=self.optimizer_step)
        watching.watch(logger.RunLog, "step", after=lambda _, log, metrics, *rest: self.end(metrics))

    def weights(self) -> fp64_update.Weights:
        """Copies of the policy's weights, whole."""
        found = deepspeed_zero.current_weights(self.main["policy"], self.main["args"].zero_stage)
        return {name: w.detach().clone() for name, w in found if name != "lm_head.weight"}

    def begin(self, *_) -> None:
        """Phase 6 is complete."""
        self.main = names = dict(watching.names_of_main())
        samples = names["samples"]
        self.offsets = names["offsets"]
        kl = names["kl"]
        self.step = {
            "samples": [self.sample(s) for s in samples],
            "in_loss": list(names["in_loss"]),
            "advantages": self.by_sample(names["advantages_N"]),
            "coefficients": (kl.loss, kl.reward),
            "weights": self.weights(),
            "updates": [],
        }

    def sample(self, s: Sample) -> dict[str, Any]:
        found = {name: getattr(s, name) for name in ("prompt_id", "finish_reason", "score", "reward", "turns")}
        found |= {"prompt_ids": list(s.prompt_ids), "response_ids": s.response_ids.tolist(), "observed": s.observed}
        found |= {"sampler_logprobs": s.sampler_logprobs.tolist(), "token_versions": s.token_versions().tolist()}
        return found

    def by_sample(self, values_N: torch.Tensor) -> list[torch.Tensor]:
        ends = zip(self.offsets, self.offsets[1:], strict=False)
        return [values_N[a:b].detach().double().clone() for a, b in ends]

    def add(self, _, mb, t, loss_T: torch.Tensor, pieces: dict) -> None:
        self.micro.append((mb.tokens, t.weights_T, t.logprobs_T.detach() - t.old_T, t.logprobs_T.detach() - t.ref_T))
        self.micro[-1] += (t.old_T - t.sampler_T,)

    def backward(self, engine, loss: torch.Tensor, *_) -> None:
        self.loss += loss.item()

    def optimizer_step(self, engine) -> None:
        """All gradients of an optimizer step are there."""
        from deepspeed.utils import safe_get_full_grad

        flat = torch.full((4, self.offsets[-1] + 1), torch.nan)
        for tokens, *columns in self.micro:
            flat[:, tokens] = torch.stack([x.detach().float() for x in columns])
        shares, *sides = map(self.by_sample, flat)
        gradient = {}
        for name, w in engine.module.named_parameters():
            gradient[name.removeprefix("model.")] = safe_get_full_grad(w).detach().double().clone()
        update = {"loss": self.loss, "gradient": gradient, "shares": shares, "before": self.weights()}
        update["sides"] = dict(zip(("log_ratio", "log_ref", "log_weight"), sides, strict=True))
        self.step["updates"].append(update)
        self.micro, self.loss = [], 0.0

    def end(self, metrics: dict[str, Any]) -> None:
        """The step is logged: write it down, and meet with the interruption that is due."""
        number = metrics["step"]
        self.step["after"] = self.weights()
        self.step["world_size"] = process.world_size()
        rank = process.rank()
        torch.save(self.step, self.folder / f"step_{number}.{rank}.part")
        os.replace(self.folder / f"step_{number}.{rank}.part", self.folder / f"step_{number}.{rank}.pt")
        torch.distributed.barrier()
        if number == self.stop:
            os.kill(os.getpid(), signal.SIGKILL if self.kill else signal.SIGTERM)


def arguments(plan: Plan, model: Path, folder: Path):
    """The arguments of a run."""
    common = {
        "model_name_or_path": str(model),
        "dataset": str(folder.parent / "problems.jsonl"),
        "output_dir": str(folder),
        "run_name": "run",
        "dtype": "float32",
        "total_steps": STEPS,
        "eval_prompts": 0,
        "eval_samples": 1,
        "log_samples": 0,
        "save_minutes": 0.0,
        "micro_batch_tokens": 2048,
        "vllm_args": '{"kv_cache_memory_bytes": 53687091, "enforce_eager": true}',
        "max_logprob_diff": 0.0,
        "timeout": 120.0,
    }
    return grpo.Args(**common | plan.flags)


def be_rank(plan: Plan, part: int, rank: int, port: int, model: Path, folder: Path) -> int:
    """In a fork: one rank of a part of a run. The exit code."""
    process.die_with_parent()
    out = os.open(folder / f"log.{part}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(out, standard)
    os.environ.pop("MASTER_PORT", None)
    size = plan.ranks[part]
    if size > 1:
        known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in known.items()}
    Recorder(folder, plan, part).install()

    def call() -> None:
        args = arguments(plan, model, folder)
        grpo.main(args, grpo.preflight(args))

    return run_many.exit_code(call)


def fork(call) -> int:
    """Start a call in a fork, which exits with the code that it returns. The process."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = call()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def run(plan: Plan, model: Path, folder: Path) -> str:
    """Run all parts of a plan, recorded. Returns "", or the last lines of a part that did not end as it should."""
    for part, size in enumerate(plan.ranks):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pids = []
        for rank in range(size):
            pids.append(fork(lambda rank=rank, part=part, port=port: be_rank(plan, part, rank, port, model, folder)))
        codes = {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}
        interrupted = plan.stop is not None and part == 0
        wanted = (-signal.SIGKILL if plan.kill else 75) if interrupted else 0
        if codes != {wanted}:
            lines = (folder / f"log.{part}.0").read_text().strip().splitlines()
            return f"part {part} ended with {sorted(codes)}, not {wanted}: " + "\n".join(lines[-8:])
    return ""


# ---------------------------------------------------------------------------------------------------------- comparison


class Errors(dict):
    """The largest error of each quantity."""

    def note(self, name: str, error: float) -> None:
        self[name] = max(self.get(name, 0.0), float(error)) if error == error else math.nan

    def beyond(self) -> list[str]:
        return [name for name, limit in LIMITS.items() if not self.get(name, 0.0) <= limit]


def apart(a: fp64_update.Weights, b: fp64_update.Weights, floor: float) -> float:
    """Norm of the difference of two gradients over the norm of the second."""
    if a.keys() != b.keys():
        return float("inf")
    difference = sum(float((a[name] - b[name]).square().sum()) for name in b) ** 0.5
    return difference / (sum(float(b[name].square().sum()) for name in b) ** 0.5 + floor)


def compare(plan: Plan, model: Path, folder: Path, use_runs: bool = False) -> tuple[Errors, Counter]:
    """(largest errors of a recorded run against the computation in fp64, how much was compared)."""
    args = dataclasses.asdict(arguments(plan, model, folder))
    config = json.loads((model / "config.json").read_text())
    reference = {name: w.double() for name, w in load_file(model / "model.safetensors").items()}
    oracle = fp64_update.Oracle(args, config, reference, ADAM_EPS)
    tokenizer = load_tokenizer(model)
    errors, counts = Errors(), Counter()
    for number in range(1, STEPS + 1):
        ranks = [torch.load(folder / f"step_{number}.0.pt", weights_only=False)]
        for rank in range(1, ranks[0]["world_size"]):  # a step that a killed part took on more ranks has files of them
            ranks.append(torch.load(folder / f"step_{number}.{rank}.pt", weights_only=False))
        compare_step(number, ranks, oracle, tokenizer, errors, counts, use_runs)
    return errors, counts


def load_tokenizer(model: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def compare_step(number: int, ranks: list[dict], oracle, tokenizer, errors: Errors, counts: Counter, use_runs: bool):
    """Compare one step of all ranks."""
    recorded = ranks[0]
    samples = recorded["samples"]
    compare_rewards(samples, oracle.a, tokenizer, errors)
    for ours, theirs in zip((oracle.beta, oracle.reward_coef), recorded["coefficients"], strict=True):
        errors.note("coefficients", abs(ours - theirs) / max(theirs, 1e-9) if theirs or ours else 0.0)
    step, found = oracle.begin(number, recorded, use_runs)
    errors.note("sampler", found["sampler"])
    errors.note("masks", found["in_loss"] != recorded["in_loss"])
    for i, sample in enumerate(samples):
        errors.note("masks", spans_of(sample) != [tuple(span) for span in sample["observed"]])
        errors.note("masks", int(fp64_update.own(sample).sum()) != len(sample["sampler_logprobs"]))
        if i in found["in_loss"]:
            ours, theirs = found["advantages"][i], recorded["advantages"][i]
            size = ours.abs().clamp(min=max(1.0, found["slack"][i]))  # 1e-5 nats per token, amplified
            errors.note("advantages", ((ours - theirs).abs() / size).max())
    expected = oracle.mini_batches(number, step)
    updates = recorded["updates"]
    k1: list[torch.Tensor] = []
    for place, (k, members) in enumerate(expected):
        if place == len(updates):
            errors.note("masks", 1.0)  # an optimizer step that the run did not take
            break
        update = updates[place]
        step.sides = merged(ranks, place) if use_runs else None
        ours = oracle.update(step, members, update["before"])
        k1 += ours["k1"]
        loss = sum(rank["updates"][place]["loss"] for rank in ranks) / len(ranks)
        compare_shares(ours["share"], ranks, place, samples, errors)
        limit = oracle.a["early_stop_imp_ratio"]
        counts.update(steps=1, tokens=sum(len(samples[i]["sampler_logprobs"]) for i in members))
        if limit is not None and ours["ratio"] > limit:
            dropped = any(g.isnan().any() for g in update["gradient"].values())
            errors.note("masks", not dropped or place + 1 != len(updates))
            counts.update(early_stops=1)
            break
        errors.note("loss", abs(loss - ours["loss"]) / (ours["size"] + 1e-3))
        errors.note("gradient", apart(update["gradient"], ours["gradient"], 1e-3))
        rate = fp64_update.learning_rate(k, STEPS * oracle.a["num_epochs"] * oracle.a["num_mini_batches"], oracle.a)
        after = updates[place + 1]["before"] if place + 1 < len(updates) else recorded["after"]
        moved = {name: after[name].double() - w.double() for name, w in update["before"].items()}
        gradient = update["gradient"] if use_runs else ours["gradient"]
        errors.note("movement", apart(moved, oracle.adamw(gradient, update["before"], rate), 3e-3))
    else:
        errors.note("masks", len(updates) != len(expected))
    counts.update(kinks=step.kinks)
    oracle.end(number, len(samples), k1, recorded["after"])


def spans_of(sample: dict) -> list[tuple[int, int]]:
    """The spans of an episode's observations, from the numbers of tokens of its turns."""
    spans, place = [], 0
    for turn in sample["turns"]:
        if turn["role"] != "assistant" and turn.get("tokens"):
            spans.append((place, place + turn["tokens"]))
        place += turn.get("tokens") or 0
    return spans


def merged(ranks: list[dict], place: int) -> dict[str, list[torch.Tensor]]:
    """The run's own log-probs of an optimizer step: each token was computed on one rank."""
    found = {}
    for name, found_here in ranks[0]["updates"][place]["sides"].items():
        others = [rank["updates"][place]["sides"][name] for rank in ranks[1:]]
        for other in others:
            found_here = [torch.where(x.isnan(), y, x) for x, y in zip(found_here, other, strict=True)]
        found[name] = [x.nan_to_num() for x in found_here]
    return found


def compare_shares(ours: dict[int, float], ranks: list[dict], place: int, samples: list, errors: Errors) -> None:
    """Compare every token's weight in the loss where a rank computed it. Elsewhere the loss is 0, or ranks disagree."""
    for i in range(len(samples)):
        for rank in ranks:
            known = rank["updates"][place]["shares"][i]
            known = known[~known.isnan()]
            errors.note("masks", any(abs(x / ours.get(i, 1e-99) - 1) > 1e-5 for x in known.tolist()))


def compare_rewards(samples: list[dict], a: dict[str, Any], tokenizer, errors: Errors) -> None:
    """Compare scores and rewards with what follows from the texts."""
    scores, plain = [], []
    for sample in samples:
        if a["environment"] is not None:
            prompt = tokenizer.decode(sample["prompt_ids"])
            score, form = exact_rewards.game_score(prompt, sample["turns"])
        else:
            text = tokenizer.decode(sample["response_ids"], skip_special_tokens=True)
            score, form = exact_rewards.score(text), float(len(text) % 2)
        scores.append(form if a["reward_control"] == "format" else score)
        plain.append(score)
    expected = []
    for score, sample in zip(scores, samples, strict=True):
        reward = fp64_update.shaped(score, sample, a)
        expected.append(-reward if a["reward_control"] == "inverted" else reward)
    found = [sample["reward"] for sample in samples]
    if a["reward_control"] == "random":  # dealt out within what was generated, of which these may be the best
        if a["generation_size"] is not None or a["dynamic_sampling_rounds"]:
            return
        expected, found = sorted(expected), sorted(found)
    for ours, theirs in zip(expected, found, strict=True):
        errors.note("rewards", abs(ours - theirs))


# ------------------------------------------------------------------------------------------------------------- a study


def make_model(folder: Path) -> Path:
    """Write a random Llama of two layers with one token in ten as an end, and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    characters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters.decoder = decoders.ByteLevel()
    characters.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=special[2], pad_token=special[2], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = values.CHAT_TEMPLATES["chatml"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.15,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[tokenizer.eos_token_id, *range(26)])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_problems(file: Path) -> None:
    """Write sixty sums as problems."""
    rows = [{"question": f"{a} + {b} =", "answer": str(a + b)} for a in range(10) for b in range(6)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def study(plan: Plan, model: Path, folder: Path) -> dict[str, Any]:
    """Run a plan and compare it: the line of the output."""
    folder.mkdir()
    begun = time.process_time(), os.times()
    line: dict[str, Any] = {"number": plan.number, "kinds": plan.kinds, "ranks": plan.ranks, "stop": plan.stop}
    line |= {"kill": plan.kill, "flags": plan.flags}
    failure = run(plan, model, folder)
    if failure:
        return line | {"agrees": False, "reason": failure}
    torch.set_num_threads(1)
    errors, counts = compare(plan, model, folder)
    line |= {"errors": dict(errors), "compared": dict(counts), "agrees": not errors.beyond(), "reason": ""}
    if errors.beyond():
        again, _ = compare(plan, model, folder, use_runs=True)
        why = "not explained" if again.beyond() else "rounding in fp32, amplified"
        line |= {"reason": f"{', '.join(errors.beyond())}: {why}", "errors_on_the_runs_side": dict(again)}
    ended = os.times()
    line["seconds"] = round(sum(ended[:4]) - sum(begun[1][:4]), 1)
    return line


def known_lines(out: Path, seed: int) -> dict[int, dict]:
    """Lines of the output by number of the run; those of another seed are left out."""
    if not out.exists():
        return {}
    lines = [json.loads(text) for text in out.read_text().splitlines()]
    return {line["number"]: line for line in lines if line["seed"] == seed}


def study_all(seed: int, numbers: list[int], out: Path, lanes: int, scratch: Path) -> None:
    """Run and compare the plans of these numbers; append a line for each."""
    model = make_model(scratch / "model")
    write_problems(scratch / "problems.jsonl")
    gc.freeze()
    waiting, going = list(numbers), {}
    while waiting or going:
        while waiting and len(going) < lanes:
            number = waiting.pop(0)
            going[fork(lambda number=number: one(seed, number, out, model, scratch))] = number
        pid, _ = os.wait()
        shutil.rmtree(scratch / str(going.pop(pid)), ignore_errors=True)


def one(seed: int, number: int, out: Path, model: Path, scratch: Path) -> int:
    """In a fork: one run, its comparison, and its line."""
    line = study(draw(seed, number), model, scratch / str(number))
    text = json.dumps({"seed": seed} | line)
    with open(out, "a") as file:
        file.write(text + "\n")  # shorter than a page: appended as one
    print(f"{number}: {'agrees' if line['agrees'] else line['reason']}", flush=True)
    return 0


def table(lines: list[dict]) -> str:
    """The runs by kind, the errors by quantity, and each disagreement."""
    agreed, found = Counter(), Counter()
    worst = Errors()
    for line in lines:
        found.update(line["kinds"])
        agreed.update(line["kinds"] if line["agrees"] else ())
        for name, error in line.get("errors", {}).items() if line["agrees"] else ():
            worst.note(name, error)
    rows = ["| runs | number | agree |", "|---|---|---|"]
    rows += [f"| {kind} | {count} | {agreed[kind]} |" for kind, count in found.most_common()]
    rows += ["", "| quantity | limit | largest error of the runs that agree |", "|---|---|---|"]
    rows += [f"| {name} | {limit:.0e} | {worst.get(name, 0.0):.1e} |" for name, limit in LIMITS.items()]
    compared = Counter()
    for line in lines:
        compared.update(line.get("compared", {}))
    rows += ["", ", ".join(f"{count} {name}" for name, count in compared.items())]
    for line in lines:
        if not line["agrees"]:
            rows.append(f"\nrun {line['number']}: {line['reason']}\n{json.dumps(line.get('errors'))}")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--runs", type=int, default=200, help="number of runs (default: %(default)s)")
    add("--first", type=int, default=0, help="number of the first run (default: %(default)s)")
    add("--seed", type=int, default=1, help="seed of all draws (default: %(default)s)")
    add("--out", type=Path, required=True, help="file with a JSON line per run")
    add("--lanes", type=int, default=1, help="runs side by side (default: %(default)s)")
    add("--table", action="store_true", help="run nothing, and print the table")
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.runs)
    missing = [number for number in numbers if number not in known_lines(options.out, options.seed)]
    if missing and not options.table:
        run_many.load_script(Path(grpo.__file__))  # all that the forks would import
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="random-runs-") as scratch:
            study_all(options.seed, missing, options.out, options.lanes, Path(scratch))
    lines = known_lines(options.out, options.seed)
    print(table([lines[number] for number in numbers if number in lines]))
    return int(not all(line["agrees"] or line["reason"].endswith("amplified") for line in lines.values()))


if __name__ == "__main__":
    raise SystemExit(main())

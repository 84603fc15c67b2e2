"""Run a training script for two steps on fixed samples, and record what its update computed, token by token.

studies/check_update.py compares such runs. Everything between the samples and the optimizer is the script's own: its
``main`` runs in a fork of this process, on CPU ranks under DeepSpeed. Three things are replaced in the fork: the engine
and the verifiers, by those of studies/fixed_samples.py, and the epsilon of AdamW, which is so large that rounding is
not amplified to the size of a step.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import importlib
import inspect
import itertools
import os
import shutil
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import script_loader
import torch
import watching
from fixed_samples import (
    GROUP,
    LONGEST,
    PROMPTS,
    TEMPERATURE,
    FixedEngine,
    FixedVerifiers,
    Probe,
    make_model,
    plain_logprobs,
    problem_rows,
)
from torch import Tensor

from runtime.run import identity
from runtime.system import process

ALONE = ("Response", "parse_args", "set_advantages", "add_gradients")  # what a file that stands alone needs
LIMIT = 60.0  # seconds of one probe
# Runs that learn within seconds, from rewards in which each token has its own part.
LEARNING = {
    "total_steps": 12,
    "num_unique_prompts_rollout": 4,
    "num_samples_per_prompt_rollout": 8,
    "max_response_length": 6,
    "learning_rate": 1e-2,
    "temperature": 1.0,
    "mask_truncated_completions": False,
    "mask_no_eos_with_zero": False,
}
LATE = (
    "accelerate",
    "deepspeed",
    "deepspeed.runtime.zero.muon.original_muon",
    "deepspeed.runtime.zero.stage_1_and_2",
    "transformers.models.llama.modeling_llama",
)


CALLED = ("gae", "value_loss")  # functions of ppo.py whose arguments in main are recorded


@dataclass
class Call:
    """Arguments of a call by name, and what it returned."""

    given: dict[str, Any]
    returned: tuple


@dataclass
class Update:
    """Numbers of one optimizer step of a recorded run."""

    tokens: dict[str, Tensor]  # by field of Tokens, and loss_T: [N]; NaN for tokens outside the loss
    loss: float  # what was backpropagated, summed over micro-batches and averaged over ranks
    gradient: dict[str, Tensor]  # by parameter, before clipping
    world_size: int
    rate: float  # of the optimizer, as the step is taken
    beta: float = 0.0  # coefficient that token_loss was given


@dataclass
class Recorded:
    """A recorded run. ``failure``: the last lines that it printed, where it ended early."""

    probe: Probe
    args: Any = None
    samples: list[list] = field(default_factory=list)  # by step
    in_loss: list[list[int]] = field(default_factory=list)  # by step: numbers of samples
    updates: list[list[Update]] = field(default_factory=list)  # by step, of the policy
    critic: list[list[Update]] = field(default_factory=list)  # by step, of ppo.py's critic
    calls: list[dict[str, list[Call]]] = field(default_factory=list)  # by step, of each of CALLED
    weights: list[dict[str, Tensor]] = field(default_factory=list)  # by version: those that step s begins with
    metrics: list[dict[str, float]] = field(default_factory=list)
    failure: str = ""
    rejected: bool = False  # it failed because the script does not take the arguments of the probe


def import_libraries() -> None:
    """Import what every run imports late, once for all forks. Call before torch is imported."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # DeepSpeed compiles a function that no run here calls: four seconds
    for name in LATE:
        importlib.import_module(name)


class Recorder:
    """Collects what ``main`` computes on one rank."""

    def __init__(self, probe: Probe, engine: FixedEngine):
        self.engine = engine
        self.found = Recorded(probe)
        self.pending: dict[str, list] = {}  # what has been added since the last optimizer step
        self.losses: dict[str, float] = {}
        self.weighed: list[int] = []  # numbers of the samples in the loss of the next optimizer step
        self.beta = 0.0

    def install(self, script: ModuleType) -> None:
        """Wrap what every copy of a script calls in phases 6, 7 and 9."""
        utils = importlib.import_module("utils")
        zero = importlib.import_module("runtime.training.deepspeed_zero")
        deepspeed = importlib.import_module("deepspeed")
        logger = importlib.import_module("runtime.run.logger")
        saving = importlib.import_module("runtime.run.saving")
        importlib.import_module("runtime.data.problem_set").gym_rows = problem_rows
        script.Verifiers = lambda args, *_: FixedVerifiers(self.found.probe, args)
        saving.save_model = saving.save_critic = lambda *_: None
        logger.RunLog.end = lambda *_: None  # the verdict on a run of two steps
        watching.watch(logger.RunLog, "step", lambda _, metrics, *__: self.found.metrics.append(dict(metrics)))
        if self.found.probe.learns:
            return
        for name in CALLED:
            if hasattr(script, name):
                watching.watch(script, name, after=self.recorder_of(name, getattr(script, name)))
        utils.ADAM_EPS = 1e-2
        utils.hf_thread = self.engine.run
        watching.watch(utils.UpdateStats, "__init__", self.begin)
        watching.watch(script, "loss_weights", self.weigh)
        watching.watch(script, "token_loss", self.note_coefficient)
        watching.watch(utils.UpdateStats, "add", self.add)
        watching.watch(zero, "backward_and_step", self.backward)
        watching.watch(deepspeed.DeepSpeedEngine, "step", self.step)

    def recorder_of(self, name: str, plain: Callable) -> Callable:
        """Return a function that records the calls of a function in each step."""

        def record(returned: tuple, *args, **named) -> None:
            given = inspect.signature(plain).bind(*args, **named).arguments
            given = {key: x.detach().clone() if isinstance(x, Tensor) else x for key, x in given.items()}
            place = len(self.found.updates) - (name == "value_loss")  # gae is called before ``begin``, in phase 6
            self.found.calls += [{} for _ in range(place + 1 - len(self.found.calls))]
            call = Call(given, tuple(x.detach().clone() for x in returned))
            self.found.calls[place].setdefault(name, []).append(call)

        return record

    def begin(self, *_) -> None:
        """Begin a step, now that its phase 6 is complete."""
        self.found.samples.append([])
        self.found.in_loss.append([])
        self.found.updates.append([])
        self.found.critic.append([])

    def weigh(self, samples: list, in_loss: list[int], *_, **__) -> None:
        """Note the samples of the next optimizer step, by the arguments of the script's ``loss_weights``."""
        self.found.samples[-1] = list(samples)
        self.weighed = list(in_loss)

    def note_coefficient(self, tokens, beta: float, *_, **__) -> None:
        self.beta = float(beta)

    def add(self, stats, mb, t, loss_T: Tensor, pieces: dict) -> None:
        """Record a micro-batch of the policy: its ``Tokens`` and their loss."""
        values = {"loss_T": loss_T, **{name: x for name, x in vars(t).items() if x is not None}}
        values = {name: x.detach().double().clone() for name, x in values.items()}
        self.pending.setdefault("tokens", []).append((mb.tokens.clone(), values))

    def backward(self, engine, loss: Tensor, *_) -> None:
        kind = type(engine.module).__name__
        self.losses[kind] = self.losses.get(kind, 0.0) + loss.item()

    def step(self, engine, *_) -> None:
        """Record the gradients of an optimizer step, just before it is taken."""
        utils_zero = importlib.import_module("deepspeed.utils")
        gradient = {}
        for name, weight in engine.module.named_parameters():
            full = utils_zero.safe_get_full_grad(weight) if weight.requires_grad else None
            if full is not None:
                gradient[name] = full.detach().double().clone()
        kind = type(engine.module).__name__
        count = sum(s.length for s in self.found.samples[-1])
        tokens: dict[str, Tensor] = {}
        critic = kind == "TokenValues"
        for places, values in () if critic else self.pending.pop("tokens", ()):
            for name, value in values.items():
                whole = tokens.setdefault(name, torch.full((count + 1,), torch.nan, dtype=torch.float64))
                whole[places] = value
        tokens = {name: value[:-1] for name, value in tokens.items()}
        if not critic:  # the samples in the policy's loss of a step are in that of one optimizer step or another
            self.found.in_loss[-1] = sorted({*self.found.in_loss[-1], *self.weighed})
        rate = float(engine.optimizer.param_groups[0]["lr"])
        update = Update(
            tokens, self.losses.pop(kind, 0.0), gradient, torch.distributed.get_world_size(), rate, self.beta
        )
        (self.found.critic if critic else self.found.updates)[-1].append(update)


def run_rank(script: ModuleType, args, probe: Probe, rank: int, port: int, place: Path) -> int:
    """In a fork: one rank of a probe. Writes what it recorded to PLACE.RANK; returns the exit code."""
    out = os.open(place.with_suffix(f".{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(out, standard)
    os.environ.pop("MASTER_PORT", None)
    if probe.ranks > 1:
        known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": probe.ranks, "LOCAL_WORLD_SIZE": probe.ranks}
        known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in known.items()}
    torch.set_num_threads(1)
    engine = FixedEngine(probe)
    recorder = Recorder(probe, engine)
    recorder.install(script)
    code = 0
    try:
        script.main(args, script.preflight(args))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    recorder.found.args = dataclasses.asdict(args)
    recorder.found.weights = engine.weights
    sys.stdout.flush()
    torch.save(recorder.found, place.with_suffix(f".{rank}.pt"))
    return code


class Laboratory:
    """Runs probes of one script, several at a time, and keeps what they recorded."""

    def __init__(self, script: ModuleType, args, folder: Path):
        self.script = script
        self.args = args
        self.folder = folder
        self.model = make_model(folder / "model")
        self.teacher = make_model(folder / "teacher", seed=1)
        self.numbers = itertools.count()
        identity.code_of(self.arguments(Probe("first")))  # cached, for all forks
        gc.freeze()

    def arguments(self, probe: Probe):
        """Arguments of a probe: the script's with its flags, on the fixed samples."""
        own: dict[str, Any] = {
            "model_name_or_path": str(self.model),
            "dataset": "reasoning_gym:chain_sum",  # whose rows are problem_rows
            "verifier": "exact",
            "output_dir": str(self.folder / "runs"),
            "run_name": f"{next(self.numbers)}",
            "rollout": "hf",
            "dtype": "float32",
            "total_steps": 2,
            "num_unique_prompts_rollout": PROMPTS,
            "num_samples_per_prompt_rollout": GROUP,
            "eval_prompts": 0,
            "max_response_length": LONGEST,
            "max_prompt_length": 32,
            "learning_rate": 3e-3,
            "save_minutes": 0,
            "log_samples": 0,
            "max_logprob_diff": 0.0,
            "timeout": LIMIT,
            "temperature": TEMPERATURE,
            "batch_layout": "padded",
            "micro_batch_tokens": 4096,
        }
        if hasattr(self.args, "teacher_name_or_path"):
            own["teacher_name_or_path"] = str(self.teacher)
        if hasattr(self.args, "critic_learning_rate"):
            own["critic_learning_rate"] = 2e-3  # not the policy's
        if getattr(self.args, "overlong_buffer", 0) >= LONGEST:
            own["overlong_buffer"] = LONGEST // 2
        if probe.learns:
            own |= LEARNING
        return dataclasses.replace(self.args, **own | probe.flags)

    def run(self, probes: list[Probe], lanes: int = 1) -> list[Recorded]:
        """Return the recordings of the probes, in their order."""
        return run_all([(self, probe) for probe in probes], lanes)

    def fork(self, args, probe: Probe, place: Path) -> list[int]:
        """Start the ranks of a probe; their processes."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        sys.stdout.flush()
        found = []
        for rank in range(probe.ranks):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    process.die_with_parent()
                    code = run_rank(self.script, args, probe, rank, port, place)
                finally:
                    os._exit(code)
            found.append(pid)
        return found


def run_all(wanted: list[tuple[Laboratory, Probe]], lanes: int) -> list[Recorded]:
    """Return the recordings of the probes, in their order; ``lanes`` of them run side by side."""
    waiting = list(enumerate(wanted))
    going: dict[int, int] = {}  # process -> number of its probe
    places: dict[int, Path] = {}
    codes: dict[int, int] = {}
    while waiting or going:
        while waiting and len(set(going.values())) < lanes:
            number, (laboratory, probe) = waiting.pop(0)
            args = laboratory.arguments(probe)
            places[number] = laboratory.folder / f"probe-{args.run_name}"
            going |= dict.fromkeys(laboratory.fork(args, probe, places[number]), number)
        pid, status = os.wait()
        if pid in going:
            number = going.pop(pid)
            codes[number] = max(codes.get(number, 0), abs(os.waitstatus_to_exitcode(status)))
    return [merge(probe, places[k], codes[k]) for k, (_, probe) in enumerate(wanted)]


def merge(probe: Probe, place: Path, code: int) -> Recorded:
    """Merge the recordings of all ranks: a token is known where a rank computed it. Deletes the files."""
    parts = []
    for rank in range(probe.ranks):
        file = place.with_suffix(f".{rank}.pt")
        if file.is_file():
            parts.append(torch.load(file, weights_only=False))
            file.unlink()
    found = parts[0] if parts else Recorded(probe)
    if code != 0 or len(parts) < probe.ranks:
        lines = place.with_suffix(".0.log").read_text().strip().splitlines()
        found.failure = "\n".join(lines[-6:]) or f"exit code {code}"
        found.rejected = code == 2
        return found
    for step, updates in enumerate(found.updates):
        for k, update in enumerate(updates):
            others = [part.updates[step][k] for part in parts[1:]]
            for name, value in update.tokens.items():
                for other in others:
                    update.tokens[name] = torch.where(value.isnan(), other.tokens[name], value)
                    value = update.tokens[name]
            update.loss = (update.loss + sum(other.loss for other in others)) / probe.ranks
    shutil.rmtree(place.parent / "runs", ignore_errors=True)
    return found


class Given:
    """A transformers model with given outputs [T, V] for each response; the first token of a prompt is its number."""

    device = torch.device("cpu")

    def __init__(self, outputs: list[Tensor]):
        self.outputs = outputs
        self.past_key_values = self
        self.batch_repeat_interleave = lambda count: None

    def base_model(self, ids: Tensor, **_) -> Given:
        self.number = int(ids[0, 0])
        return self

    def __call__(self, ids: Tensor, **_) -> SimpleNamespace:
        return SimpleNamespace(logits=self.outputs[self.number][None])


class View:
    """A file such as variants/grpo_min.py with the functions of grpo.py, which its own answer, on given outputs."""

    Tokens = dataclasses.make_dataclass("Tokens", ["logprobs_T", "old_T", "advantages_T", "response_T"])

    def __init__(self, path: Path, words: list[str]):
        self.small = script_loader.load_script(path, ALONE)
        self.__file__ = str(path)
        self.own = self.small.parse_args(words)
        self.own.temperature = TEMPERATURE
        self.own.micro_batch = 1

    def backward(self, policy: list[Tensor], responses: list) -> Tensor:
        """Return the sum of what add_gradients would call backward on."""
        parts = [torch.zeros((), requires_grad=True)]
        outputs = []
        for leaf_T in policy:
            rest_T = torch.log(-torch.expm1(leaf_T.clamp(max=-1e-12)))  # so that the probabilities sum to 1
            logits_TV = torch.stack([leaf_T, rest_T], 1) * self.own.temperature
            outputs.append(logits_TV)
        with mock.patch.object(torch.Tensor, "backward", lambda loss: parts.append(loss)):
            self.small.add_gradients(*self.models(outputs), responses, self.own)
        return sum(parts)

    def models(self, outputs: list[Tensor]) -> list[Given]:
        """Return the models that add_gradients takes."""
        return [Given(outputs)]

    def response(self, number: int, engine: list[float], reward: float = 0.0):
        """Return a response with these log-probs of the engine."""
        return self.small.Response([number, number], [0] * len(engine), engine, reward=reward)

    def difference(self, model) -> float:
        """Return the mean difference from the log-probs of plain forward passes, of responses of unequal lengths."""
        responses = []
        for size in (3, 1, 7, 5):
            ids = [90 + size * t for t in range(size)]
            with torch.no_grad():
                plain_T = plain_logprobs(model, [61, 62, 63], ids, TEMPERATURE)
            one = self.small.Response([61, 62, 63], ids, plain_T.tolist())
            one.advantage = 1.0
            one.advantages_T = one.returns_T = torch.ones(size)
            responses.append(one)
        critic = copy.deepcopy(model)
        critic.lm_head = torch.nn.Linear(model.config.hidden_size, 1, dtype=torch.float64)
        own = argparse.Namespace(**vars(self.own) | {"micro_batch": 4})
        return self.small.add_gradients(*[model, critic][: len(self.models([]))], responses, own)

    @torch.enable_grad()
    def slopes(self, leaf_T: Tensor, old_T: Tensor, sizes: list[int], advantages: list, truncated=()) -> tuple:
        """Return the loss of responses of these sizes, and its gradient with respect to their log-probs, [T]."""
        responses = []
        for number, engine_T in enumerate(old_T.split(sizes)):
            one = self.response(number, engine_T.tolist())
            one.truncated = number in truncated
            one.advantage = advantages[number]
            one.advantages_T = torch.full_like(engine_T, one.advantage)
            one.returns_T = torch.zeros_like(engine_T)
            responses.append(one)
        leaf_T = leaf_T.detach().requires_grad_()
        loss = self.backward(leaf_T.split(sizes), responses)
        slopes_T = torch.autograd.grad(loss, leaf_T, allow_unused=True, materialize_grads=True)[0]
        return loss.detach(), slopes_T

    def token_loss(self, tokens, beta: float, args) -> tuple[Tensor, dict]:
        """Return a loss per token, [T], whose mean and gradient are the file's."""
        sizes = tokens.response_T.unique_consecutive(return_counts=True)[1]
        advantages_B = tokens.advantages_T[sizes.cumsum(0) - sizes]
        loss, slopes_T = self.slopes(tokens.logprobs_T, tokens.old_T, sizes.tolist(), advantages_B.tolist())
        moved_T = tokens.logprobs_T - tokens.logprobs_T.detach()
        return loss + len(moved_T) * slopes_T * moved_T, {}

    def loss_weights(self, samples: list, in_loss: list[int], args) -> Tensor:
        """Return the weight of each token, [T]: minus the gradient for advantages and ratios of 1."""
        sizes = [sample.length for sample in samples]
        truncated = set(range(len(sizes))) - set(in_loss)
        old_T = -torch.ones(sum(sizes))
        return -self.slopes(old_T, old_T, sizes, [1.0] * len(sizes), truncated)[1]


class GroupView(View):
    """A file in the form of grpo.py."""

    def group_advantages(self, rewards_PG: Tensor, kind: str, eps: float = 0.0) -> Tensor:
        responses = [self.response(0, [0.0], reward) for reward in rewards_PG.flatten().tolist()]
        self.small.set_advantages(responses, rewards_PG.shape[1])
        advantages = [response.advantage for response in responses]
        return torch.tensor(advantages, dtype=torch.float64).view_as(rewards_PG)


class CriticView(View):
    """A file in the form of ppo.py."""

    def models(self, outputs: list[Tensor]) -> list[Given]:
        values = [torch.zeros_like(own[:, :1]) for own in outputs]
        return [Given(outputs), Given(values)]

    def gae(
        self,
        rewards_N: Tensor,
        values_N: Tensor,
        after,
        offsets: list[int],
        gamma: float,
        lam: float,
    ) -> tuple:
        """Return advantages before whitening, and returns, [N]: gamma is 1, and only a last token has a reward."""
        responses, values = [], []
        for number, (start, end) in enumerate(itertools.pairwise(offsets)):
            last = rewards_N[end - 1].item()
            responses.append(self.response(number, [0.0] * (end - start), last))
            values.append(values_N[start:end, None])
        self.own.gae_lambda = lam
        self.small.set_advantages(Given(values), responses, self.own)
        returns_N = torch.cat([response.returns_T for response in responses])
        return returns_N - values_N, returns_N

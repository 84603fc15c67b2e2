"""Shows that every argument of grpo.py and ppo.py does something; tests/flag_effect_rows.py has the rows.

    python tests/flag_effects.py                      every flag of both scripts; exit code 1 where one is dead
    python tests/flag_effects.py --only gamma beta    these flags

A row is two runs of a script on a tiny random model, equal but for the flag. Each is a child forked from this process,
which has imported the libraries once. The child wraps what it observes around the real thing, and runs the real script
from its command line on.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import flag_effect_rows
from flag_effect_rows import BASE, EVIDENCE, Row
from helpers import read_jsonl

SCRIPTS = ("grpo", "ppo")
PATIENCE = 240.0  # seconds for one run; the usual one takes three
CLOSE = 1e-6  # numbers that differ by less, relative to the larger one or to 1, count as equal

# What is observed -> what it is. Names with a slash are metrics (docs/metrics.md), a value per step or evaluation.
OBSERVABLES = {
    "steps": "the steps that the run trained",
    "prompts": "token ids of the prompts of each step",
    "ground truths": "of the problems of each step",
    "seeds of requests": "(prompt, number, seed) of every response that was asked for",
    "responses": "token ids of every training response",
    "rewards": "of every training response",
    "versions of weights": "that sampled every training response, with the first token of each",
    "held-out prompts": "token ids of the prompts of the first evaluation",
    "evaluation responses": "token ids of the responses of every evaluation",
    "evaluated steps": "the steps after which the run evaluated",
    "eval metrics": "the names of the metrics of an evaluation",
    "token advantages": "what the policy's loss gets, token by token",
    "loss weights": "weights of the tokens in each optimizer step",
    "weights": "of the final model: eight numbers of every tensor",
    "critic weights": "of the final critic: eight numbers of every tensor",
    "training passes": "rows x positions of every forward pass with gradient",
    "log-prob passes": "rows x positions of every forward pass without gradient",
    "bytes kept for backward": "by autograd, the most of any forward pass",
    "dtype of the policy": "of the weights under DeepSpeed",
    "attention of the policy": "the implementation that transformers runs",
    "moves of the reference": "to a device, and back",
    "moves of the trainer": "of DeepSpeed's states to CPU memory and back",
    "verifier processes": "alive at the end of the run",
    "imports of own_library": "1 where --external_lib was imported",
    "DeepSpeed(...)": "an entry of the policy engine's configuration",
    "states that leave the GPU": "how often DeepSpeed has moved them",
    "vllm.LLM": "calls of the constructor",
    "vllm.LLM(...)": "an argument of the constructor",
    "blocks of the KV cache": "as vLLM has allocated them",
    "engine steps": "of vLLM, in the whole run",
    "wandb.init": "calls of the real one, offline",
    "files": "names in --output_dir, three levels deep",
    "rows of samples.jsonl": "their number",
    "samples on the console": "lines that show one",
    "exit": "exit code",
    "last words": "the last line on the console",
}

CONTROLS = {"(nothing)": {}, "(nothing, with vLLM)": flag_effect_rows.VLLM}  # runs that are made twice

# ------------------------------------------------------------------------------------------ models and data of the runs


def prepare(files: Path) -> None:
    """Write the models, the data and the code that the rows name, below ``files``."""
    import torch
    from helpers import make_tiny
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    tiny = make_tiny(files / "tiny")
    # With a tenth of the vocabulary as EOS, some responses end by themselves and some do not.
    generation = json.loads((tiny / "generation_config.json").read_text())
    generation["eos_token_id"] = [2, *range(200, 230)]
    (tiny / "generation_config.json").write_text(json.dumps(generation))
    shutil.copytree(tiny, files / "other")
    weights = load_file(tiny / "model.safetensors")
    torch.manual_seed(1)
    other = {name: weight + 0.05 * torch.randn_like(weight) for name, weight in weights.items()}
    save_file(other, files / "other" / "model.safetensors", {"format": "pt"})
    config = LlamaConfig.from_pretrained(tiny, num_labels=1, architectures=["LlamaForSequenceClassification"])
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for name in ("classifier", "other_classifier"):
        LlamaForSequenceClassification(config).save_pretrained(files / name)
        tokenizer.save_pretrained(files / name)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    tokenizer.save_pretrained(files / "tokenizer")
    prepare_hub(files)
    prepare_custom(files)
    prepare_data(files)
    shutil.copy(ROOT / "tests" / "verifiers.py", files / "own.py")
    shutil.copy(ROOT / "tests" / "environments.py", files / "game.py")
    (files / "own_library.py").write_text('"""Imported by --external_lib."""\n')
    importlib.invalidate_caches()


def prepare_hub(files: Path) -> None:
    """The cache of the hub client, HF_HOME, with two revisions of the models hub/tiny and hub/classifier."""
    for model, later in (("tiny", "other"), ("classifier", "other_classifier")):
        repository = files / "hub_cache" / "hub" / f"models--hub--{model}"
        (repository / "refs").mkdir(parents=True)
        for revision, source, commit in (("main", model, "0" * 40), ("later", later, "1" * 40)):
            (repository / "refs" / revision).write_text(commit)
            shutil.copytree(files / source, repository / "snapshots" / commit)


def prepare_custom(files: Path) -> None:
    """A model whose classes come with its weights."""
    custom = shutil.copytree(files / "tiny", files / "custom")
    config = json.loads((custom / "config.json").read_text())
    config["model_type"] = "own_llama"
    config["architectures"] = ["OwnForCausalLM"]
    config["auto_map"] = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    (custom / "config.json").write_text(json.dumps(config))
    code = [
        "from transformers import LlamaConfig, LlamaForCausalLM",
        "class OwnConfig(LlamaConfig):",
        "    model_type = 'own_llama'",
        "class OwnForCausalLM(LlamaForCausalLM):",
        "    config_class = OwnConfig",
    ]
    (custom / "own_code.py").write_text("\n".join(code) + "\n")


def prepare_data(files: Path) -> None:
    """Data sets with several columns, one with a bad row, one with programs, and one saved with two splits."""
    import datasets

    def write(name: str, rows: list[dict]) -> None:
        (files / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    rows = []
    for i in range(24):
        texts = {"question": f"{i} + 1 =", "answer": str(i + 1), "judge": f"{files}/own.py:always"}
        rows.append(texts | {"other_question": f"What follows {i}?", "other_answer": str(-i)})
    write("rows.jsonl", rows)
    more = [{"question": f"{i} - 1 =", "answer": str(i - 1)} for i in range(16)]
    write("more.jsonl", more)
    write("few.jsonl", more[:8])
    write("bad.jsonl", [*more, {"question": "", "answer": "1"}])
    program = "def add(a, b):\n    return a + b"
    tests = json.dumps(["assert add(1, 2) == 3"])
    write("code.jsonl", [{"question": f"Write add, number {i}. {program}", "answer": tests} for i in range(16)])
    splits = {"train": datasets.Dataset.from_list(more), "test": datasets.Dataset.from_list(rows)}
    datasets.DatasetDict(splits).save_to_disk(str(files / "saved"))


# ------------------------------------------------------------------------------------------------------------ observing


def spy(patch, holder: Any, name: str, note: Callable) -> None:
    """Have ``note(result, *arguments)`` called after every call of a function, which is called as before."""
    plain = getattr(holder, name)

    @functools.wraps(plain)
    def spied(*arguments, **named):
        result = plain(*arguments, **named)
        note(result, *arguments, **named)
        return result

    patch.setattr(holder, name, spied)


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def flat(entries: dict, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one, its keys joined by dots."""
    found = {}
    for key, value in entries.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def observe(module, seen: dict[str, Any], patch) -> None:
    """Wrap what a script calls, so that its run fills ``seen``. ``patch``: a pytest.MonkeyPatch."""
    observe_samples(module, seen, patch)
    observe_training(module, seen, patch)
    observe_passes(seen, patch)
    observe_libraries(seen, patch)


def observe_samples(module, seen: dict[str, Any], patch) -> None:
    """Record the requests, the responses and their scores."""
    import rewards
    from runtime.run import logger

    evaluating: list[bool] = []
    collected: set[int] = set()  # numbers of batches: one that was waited for ahead is collected again

    def note_asked(batch, engine, problems, requests, *rest) -> None:
        prompts = [problem.prompt_ids for problem in problems]
        if evaluating:
            seen.setdefault("held-out prompts", prompts)
            return
        seen.setdefault("prompts", []).extend(prompts)
        seen.setdefault("ground truths", []).extend(problem.truth for problem in problems)
        seen.setdefault("seeds of requests", []).extend(map(list, requests))

    def note_collected(samples, engine, verifiers, batch, *rest) -> None:
        ids = [s.response_ids.tolist() for s in samples]
        if evaluating:
            seen.setdefault("evaluation responses", []).extend(ids)
        elif batch.number not in collected:
            collected.add(batch.number)
            seen.setdefault("responses", []).extend(ids)
            seen.setdefault("rewards", []).extend(s.reward for s in samples)
            seen.setdefault("versions of weights", []).extend(list(map(list, s.weight_versions)) for s in samples)

    evaluate = module.evaluate

    def note_evaluation(*arguments) -> None:
        evaluating.append(True)
        evaluate(*arguments)
        evaluating.pop()

    def note_workers(_, verifiers) -> None:
        from runtime.system import process

        seen["verifier processes"] = len(process.children(verifiers.pool.nursery.process.pid))

    def note_result(_, log, result, *rest) -> None:
        seen.setdefault("evaluated steps", []).append(result["step"])
        seen["eval metrics"] = sorted(result)

    def note_step(_, log, metrics, *rest) -> None:
        seen.setdefault("steps", []).append(metrics["step"])

    spy(patch, module.Engine, "ask", note_asked)
    spy(patch, module, "collect", note_collected)
    patch.setattr(module, "evaluate", note_evaluation)
    spy(patch, rewards.Verifiers, "collect", lambda _, verifiers, *rest: note_workers(_, verifiers))
    spy(patch, logger.RunLog, "evaluation", note_result)
    spy(patch, logger.RunLog, "step", note_step)


def observe_training(module, seen: dict[str, Any], patch) -> None:
    """Record the inputs of the loss, and the engine that computes its gradient."""
    import deepspeed

    def note_loss(_, tokens, *rest) -> None:
        seen.setdefault("token advantages", []).extend(tokens.advantages_T.tolist())

    def note_weights(weights_N, *rest) -> None:
        seen.setdefault("loss weights", []).extend(weights_N.tolist())

    def note_engine(built, *rest, **named) -> None:
        policy = built[0]
        if "dtype of the policy" in seen:  # the critic's comes second
            return
        seen["dtype of the policy"] = str(next(policy.module.parameters()).dtype).removeprefix("torch.")
        seen["attention of the policy"] = policy.module.model.config._attn_implementation
        for key, value in flat(policy.config).items():
            seen[f"DeepSpeed({key})"] = value
        spy(patch, policy, "offload_states", note_states)

    def note_states(*_) -> None:
        seen["states that leave the GPU"] = seen.get("states that leave the GPU", 0) + 1

    spy(patch, module, "token_loss", note_loss)
    spy(patch, module, "loss_weights", note_weights)
    spy(patch, deepspeed, "initialize", note_engine)


def observe_passes(seen: dict[str, Any], patch) -> None:
    """Shapes and memory of the forward passes of policy and reference, and where the reference is."""
    import torch

    import utils
    from runtime.training import deepspeed_zero

    def note_pass(_, model, batch, *rest) -> None:
        if in_main_thread():
            kind = "training passes" if torch.is_grad_enabled() else "log-prob passes"
            seen.setdefault(kind, []).append("x".join(map(str, batch.input_ids.shape)))

    def note_move(_, model, *device) -> None:
        if not any(weight.requires_grad for weight in model.parameters()):
            seen.setdefault("moves of the reference", []).append(str(*device))

    forward = utils.TokenLogprobs.forward

    def measured(*arguments, **named):
        kept: dict[int, int] = {}  # address of a storage -> its size

        def pack(tensor):
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = forward(*arguments, **named)
        name = "bytes kept for backward"
        seen[name] = max(seen.get(name, 0), sum(kept.values()))
        return result

    spy(patch, utils.TokenLogprobs, "hidden", note_pass)
    spy(patch, utils.TokenLogprobs, "to", note_move)
    spy(patch, deepspeed_zero, "borrow_device", note_move)
    spy(patch, deepspeed_zero, "return_device", note_move)
    for name in ("leave_gpu", "return_to_gpu"):
        spy(
            patch,
            deepspeed_zero,
            name,
            lambda _, engines: seen.setdefault("moves of the trainer", []).append(len(engines)),
        )
    patch.setattr(utils.TokenLogprobs, "forward", measured)


def observe_libraries(seen: dict[str, Any], patch) -> None:
    """The arguments that reach vLLM and Weights & Biases, and what vLLM does with them."""
    import wandb

    def note_tracking(_, **named) -> None:
        seen["wandb.init"] = seen.get("wandb.init", 0) + 1

    def note_engine(llm, **named) -> None:
        note_arguments(seen, named)
        engine = llm.llm_engine
        seen["blocks of the KV cache"] = engine.vllm_config.cache_config.num_gpu_blocks
        seen["engine steps"] = 0

        def note_step(*_) -> None:
            seen["engine steps"] += 1

        spy(patch, engine, "step", note_step)

    spy(patch, wandb, "init", note_tracking)
    if "vllm" in sys.modules:
        spy(patch, sys.modules["vllm"], "LLM", note_engine)


def note_arguments(seen: dict[str, Any], named: dict[str, Any]) -> None:
    """A call of vLLM's constructor."""
    seen["vllm.LLM"] = seen.get("vllm.LLM", 0) + 1
    for name, value in named.items():
        seen[f"vllm.LLM({name})"] = value


def left_behind(place: Path, code: int) -> dict[str, Any]:
    """Return the exit code and the files of a run with their contents. ``place``: the folder of its work."""
    out = place / "out"
    found: dict[str, Any] = {"exit": code}
    names = []
    for path in sorted(out.rglob("*")):
        parts = path.relative_to(out).parts
        if len(parts) <= 3 and path.name != "lock" and "wandb" not in parts[:-1]:
            names.append("/".join(parts))
    found["files"] = names
    for file in ("metrics.jsonl", "eval.jsonl"):
        for path in out.rglob(file):
            for record in read_jsonl(path):
                for name, value in record.items():
                    if "/" in name and not name.startswith(("time/", "perf/", "engine/")):
                        found.setdefault(name, []).append(value)
    rows = [line for path in out.rglob("samples.jsonl") for line in read_jsonl(path)]
    found["rows of samples.jsonl"] = len(rows)
    lines = []
    for line in (place / "console.txt").read_text().splitlines():
        if line.strip() and not re.search(r"resource_tracker|warnings\.warn\(", line):  # of libraries, at the very end
            lines.append(line)
    found["samples on the console"] = sum(" | ground truth " in line for line in lines)
    found["last words"] = lines[-1].strip() if lines and code != 0 else ""
    for name, folder in (("weights", "model"), ("critic weights", "critic")):
        for path in out.glob(f"*/{folder}/model.safetensors"):
            found[name] = sampled_weights(path)
    return found


def sampled_weights(path: Path) -> list[float]:
    """Eight numbers of every tensor of a file, evenly spaced."""
    from safetensors.torch import load_file

    numbers = []
    for _, tensor in sorted(load_file(path).items()):
        values = tensor.float().flatten()
        numbers += values[:: max(1, len(values) // 8)][:8].tolist()
    return numbers


# -------------------------------------------------------------------------------------------------------------- one run


def words(cls: type, arguments: dict[str, Any]) -> list[str]:
    """Arguments of a script whose class is ``cls`` as a command line."""
    types = {f.name: f.type for f in dataclasses.fields(cls)}
    line = []
    for flag, value in arguments.items():
        if types[flag] == "bool":
            line.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            line += [f"--{flag}", *map(str, value)]
        else:
            line += [f"--{flag}", str(value)]
    return line


def train(module, args) -> None:
    """Run the training as ``python grpo.py`` does."""
    module.main(args, module.preflight(args))


def build_on_gpus(module, args, seen: dict[str, Any], patch, count: int) -> None:
    """Record the arguments of vLLM's constructor on a machine with GPUs; nothing is built."""
    import torch
    import vllm

    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "set_device", lambda _: None)
    patch.setattr(vllm, "LLM", lambda **named: note_arguments(seen, named))
    patch.setenv("LOCAL_RANK", "0")
    module.build_vllm(args, torch.float32, 0, count)


def hinder(stage: str, patch) -> None:
    """Apply a stage's obstacle to the process of a run."""
    from graders.code import sandbox

    if stage == "no namespaces":
        patch.setattr(sandbox, "namespaces_refused", lambda: "as this test pretends")


def run_observed(script: str, arguments: dict[str, Any], stage: str, seen: dict[str, Any], patch) -> None:
    """Run a script in this process from its command line on; ``seen`` is filled on the way. Raises what it raises."""
    from runtime.arguments import flags

    module = importlib.import_module(script)
    observe(module, seen, patch)
    hinder(stage, patch)
    args = flags.parse(module.Args, words=words(module.Args, arguments))
    if stage == "on a GPU":
        build_on_gpus(module, args, seen, patch, 1)
    elif stage == "on two GPUs":
        build_on_gpus(module, args, seen, patch, 2)
    else:
        train(module, args)


def child(script: str, arguments: dict[str, Any], stage: str, place: Path) -> None:
    """The life of a forked process: one run, what was seen of it in seen.json, and the exit code of the script."""
    import pytest

    os.setsid()
    seen: dict[str, Any] = {}
    leave = os._exit

    def end(code: int) -> None:
        seen["imports of own_library"] = int("own_library" in sys.modules)
        (place / "seen.json").write_text(json.dumps(seen, default=str))
        sys.stdout.flush()
        sys.stderr.flush()
        leave(code)

    with open(place / "console.txt", "a") as console:
        os.dup2(console.fileno(), 1)
        os.dup2(console.fileno(), 2)
    os._exit = end
    os.environ.pop("MASTER_PORT", None)  # a port of its own
    sys.modules["__main__"] = ModuleType("__main__")  # or each verifier process would import this file
    code = 1
    try:
        with pytest.MonkeyPatch.context() as patch:
            run_observed(script, arguments, stage, seen, patch)
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        end(code)


class Runs:
    """Runs of the scripts in forked children, at most ``jobs`` at a time; the same run is made once."""

    def __init__(self, folder: Path, jobs: int):
        self.folder = folder
        self.jobs = jobs
        self.files = folder / "files"
        self.found: dict[str, dict[str, Any]] = {}  # key of a run -> what was observed
        self.waiting: dict[str, tuple[str, dict[str, Any], str]] = {}
        self.started: dict[int, tuple[str, Path, float, list]] = {}  # pid -> key, folder, start, what follows

    def key(self, script: str, arguments: dict[str, Any], stage: str, again: int = 0) -> str:
        return json.dumps([script, sorted(arguments.items(), key=str), stage, again], default=str)

    def ask(self, script: str, arguments: dict[str, Any], stage: str, again: int = 0) -> str:
        """Put a run on the list; the key of its result."""
        key = self.key(script, arguments, stage, again)
        if key not in self.found:
            self.waiting.setdefault(key, (script, arguments, stage))
        return key

    def finish(self) -> None:
        """Make all runs on the list."""
        while self.waiting or self.started:
            while self.waiting and len(self.started) < self.jobs:
                key = next(iter(self.waiting))
                self._begin(key, *self.waiting.pop(key))
            self._look()
            time.sleep(0.02)

    def _begin(self, key: str, script: str, arguments: dict[str, Any], stage: str) -> None:
        place = Path(tempfile.mkdtemp(dir=self.folder))
        (place / "out").mkdir()
        parts = [arguments]
        if stage == "repeated":
            parts = [arguments | {"overwrite": False}, arguments]
        elif stage == "resumed":
            parts = [arguments | {"total_steps": 2, "resume": "auto"}, arguments]
        self._fork(key, script, parts, stage, place)

    def _fork(self, key: str, script: str, parts: list[dict[str, Any]], stage: str, place: Path) -> None:
        first, *rest = parts
        places = {"FILES": str(self.files), "RUN": str(place / "out")}
        arguments = {name: located(value, places) for name, value in first.items()}
        pid = os.fork()
        if pid == 0:
            child(script, arguments, stage, place)
        self.started[pid] = (key, place, time.monotonic(), [script, rest, stage])

    def _look(self) -> None:
        """Take the results of children that have ended, and end those that hang."""
        for pid, (key, place, begun, after) in list(self.started.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                if time.monotonic() - begun > PATIENCE:
                    os.killpg(pid, signal.SIGKILL)
                continue
            del self.started[pid]
            script, rest, stage = after
            if rest:
                self._fork(key, script, rest, stage, place)
                continue
            self._take(key, place, os.waitstatus_to_exitcode(status))

    def _take(self, key: str, place: Path, code: int) -> None:
        found = left_behind(place, code)
        if (place / "seen.json").is_file():
            found |= json.loads((place / "seen.json").read_text())
        places = {str(self.files): "FILES", str(place / "out"): "RUN"}
        found["last words"] = located(found["last words"], places)
        found["console"] = (place / "console.txt").read_text()
        self.found[key] = found
        shutil.rmtree(place)


def located(value: Any, places: dict[str, str]) -> Any:
    """A value with its placeholders replaced."""
    if isinstance(value, tuple):
        return tuple(located(part, places) for part in value)
    if isinstance(value, str):
        for name, path in places.items():
            value = value.replace(name, path)
    return value


# ------------------------------------------------------------------------------------------------------------- judgment


def same(a: Any, b: Any) -> bool:
    """Return True if two observations are equal, numbers up to rounding."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float | int) and isinstance(b, float | int):
        return math.isclose(a, b, rel_tol=CLOSE, abs_tol=CLOSE)
    return a == b


def complaints(flag: str, row: Row, without: dict[str, Any], tried: dict[str, Any]) -> list[str]:
    """List the reasons why two runs are no evidence that a flag has an effect; empty if they are evidence."""
    wrong = []
    for name in row.changes:
        if same(without.get(name), tried.get(name)):
            wrong.append(f"{name} is the same: {shown(tried.get(name))}")
    for found in (without, tried):
        if found["exit"] != 0 and "exit" not in row.changes:
            wrong.append(f"exit code {found['exit']}: {found['console'][-600:]}")
        elif found["exit"] != 0 and flag not in found["last words"]:
            wrong.append(f"a run ends, and its message does not name {f'--{flag}'}: {found['last words']}")
    return wrong


def shown(value: Any) -> str:
    """An observation in few characters."""
    if value is None:
        return "nothing"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list) and len(value) <= 4:
        return ", ".join(map(shown, value)) or "nothing"
    if isinstance(value, list):
        return f"{len(value)} values"
    text = str(value)
    return text if len(text) <= 160 else text[:157] + "..."


def topmost(paths: set[str]) -> list[str]:
    """Paths without those that lie below another one, shortened."""
    kept = [path for path in sorted(paths) if not any(path.startswith(f"{other}/") for other in paths)]
    return [path if len(path) <= 48 else f"{path[:45]}..." for path in kept]


def change(name: str, without: Any, tried: Any) -> str:
    """The difference of two observations, for the page."""
    if name == "files":
        new = [f"+ {path}" for path in topmost(set(tried) - set(without))]
        gone = [f"− {path}" for path in topmost(set(without) - set(tried))]
        rest = len(new[3:]) + len(gone[3:])
        return f"files: {', '.join(new[:3] + gone[:3])}{f' and {rest} more' if rest else ''}"
    if name == "last words":
        return f"last words: {shown(tried)}"
    if isinstance(without, list) and isinstance(tried, list):
        many = max(len(without), len(tried)) > 4 or any(isinstance(part, list) for part in [*without, *tried])
        if many and len(without) != len(tried):
            return f"{name}: {len(without)} → {len(tried)}"
        if many:
            differ = sum(not same(a, b) for a, b in zip(without, tried, strict=True))
            return f"{name}: {differ} of {len(tried)} differ"
    return f"{name}: {shown(without)} → {shown(tried)}"


def flags_of(script: str) -> list[str]:
    """The arguments of a script, in the order of its help."""
    return [f.name for f in dataclasses.fields(importlib.import_module(script).Args)]


Results = dict[tuple[str, str], tuple[list[str], str]]  # (script, flag) -> (why it seems dead, what it changed)


def examine(runs: Runs, flags: list[str], scripts: tuple[str, ...]) -> Results:
    """Make both runs of every flag that has a row, and judge them."""
    asked = {}
    for script in scripts:
        for flag in flags_of(script):
            if flag in flags and flag in EVIDENCE:
                row = EVIDENCE[flag]
                arguments = BASE | row.given
                without = runs.ask(script, arguments, row.stage)
                changed = arguments | {flag: row.tried}
                if flag in ("total_episodes", "total_epochs"):  # in place of --total_steps
                    del changed["total_steps"]
                asked[script, flag] = (without, runs.ask(script, changed, row.stage))
    runs.finish()
    results = {}
    for (script, flag), keys in asked.items():
        without, tried = (runs.found[key] for key in keys)
        row = EVIDENCE[flag]
        wrong = complaints(flag, row, without, tried)
        changed = "; ".join(change(name, without.get(name), tried.get(name)) for name in row.changes)
        results[script, flag] = (wrong, changed)
    return results


def control(runs: Runs, scripts: tuple[str, ...]) -> Results:
    """Two equal runs must be equal in every observable, or a difference would be no evidence."""
    asked = {}
    for script in scripts:
        for name, given in CONTROLS.items():
            asked[script, name] = [runs.ask(script, BASE | given, "", again) for again in (0, 1)]
    runs.finish()
    results = {}
    for case, keys in asked.items():
        one, other = (runs.found[key] for key in keys)
        names = (one.keys() | other.keys()) - {"console"}
        differ = [
            change(name, one.get(name), other.get(name)) for name in names if not same(one.get(name), other.get(name))
        ]
        results[case] = (differ + [str(found["exit"]) for found in (one, other) if found["exit"] != 0], "nothing")
    return results


def every_flag() -> list[str]:
    """The arguments of all scripts, each once, in the order of their help."""
    return list(dict.fromkeys(flag for script in SCRIPTS for flag in flags_of(script)))


# -------------------------------------------------------------------------------------------------------------- program


def warm(flags: list[str], files: Path) -> None:
    """Import and compute what all children need, once; vLLM only for rows that ask for it."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 (it imports the whole of torch.compile)
    import wandb  # noqa: F401

    from runtime.run import identity

    for script in SCRIPTS:
        args = importlib.import_module(script).Args(verifier=located(BASE["verifier"], {"FILES": str(files)}))
        identity.code_of(args)  # is kept: reading the sources would take a quarter of a run
    rows = [EVIDENCE[flag] for flag in flags if flag in EVIDENCE]
    if any("vllm" in (row.tried, row.given.get("rollout")) or "GPU" in row.stage for row in rows):
        from vllm import LLM  # noqa: F401
        from vllm.v1.executor.uniproc_executor import UniProcExecutor  # noqa: F401


def environment(folder: Path) -> None:
    """Set what libraries read when they are imported: no network, and caches of this program's own."""
    os.environ["HF_HOME"] = str(folder / "files" / "hub_cache")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["WANDB_MODE"] = "offline"
    os.environ["WANDB_SILENT"] = "true"
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("RUN_DIR", None)
    sys.path.append(str(folder / "files"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="FLAG", help="these flags (default: all)")
    parser.add_argument("--script", choices=SCRIPTS, help="this script only (default: both)")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    scripts = (args.script,) if args.script else SCRIPTS
    with tempfile.TemporaryDirectory(prefix="alive-") as name:
        folder = Path(name)
        environment(folder)
        begun = time.monotonic()
        flags = args.only or list(EVIDENCE)
        prepare(folder / "files")
        warm(flags, folder / "files")
        runs = Runs(folder, args.jobs)
        results = examine(runs, flags, scripts)
        if not args.only:
            results |= control(runs, scripts)
    dead = 0
    for (script, flag), (wrong, changed) in results.items():
        dead += bool(wrong)
        print(f"{script} --{flag}: {'DEAD, ' + '; '.join(wrong) if wrong else changed}", flush=True)
    missing = [flag for script in scripts for flag in flags_of(script) if flag not in EVIDENCE]
    print(f"{len(results)} flags, {dead} dead, {len(runs.found)} runs, {time.monotonic() - begun:.0f} s")
    if missing:
        print(f"no evidence in tests/flag_effect_rows.py: {', '.join(dict.fromkeys(missing))}")
    if args.json is not None:
        table = [[script, flag, *result] for (script, flag), result in results.items()]
        args.json.write_text(json.dumps(table) + "\n")
    return int(dead > 0 or bool(missing))


if __name__ == "__main__":
    raise SystemExit(main())

"""Find where two runs diverge: run both again, side by side, and name the first number that differs.

    python studies/diff_runs.py runs/a runs/b
    python studies/diff_runs.py runs/a runs/b --code . ../at-a-commit    whose code each of them ran (git worktree add)

Both run again from the last checkpoint that is equal in both, or from the start, until something differs: its step, its
phase (1 to 9, as in the scripts), its name, and by how much. Each has its own script, and a process and a folder of its
own; nothing is written to the folders given. For runs of one rank that were started in this folder, on a machine on
which they repeat bit for bit: what comes out otherwise than recorded is reported. Exit code: 0 equal, 1 parted, 2
rejected.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import watching

ROOT = Path(__file__).resolve().parent.parent
UNEQUAL = ("time/", "perf/", "engine/", "env/tool_seconds")  # metrics that no two runs have alike
SAMPLED = ("response_ids", "sampler_logprobs", "finish_reason", "weight_versions")
SCORED = ("reward", "score", "reward_parts", "reward_status", "extracted")


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def numbers(name: str, value: Any) -> list[tuple[str, np.ndarray | str]]:
    """Return the tensors and arrays in a value as arrays, and the rest as JSON, each with a name."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if value.dtype.itemsize == 2:
            value = value.float()  # NumPy has no bf16
        value = value.numpy()
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, tuple):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        found = []
        for key, part in value.items():
            found += numbers(f"{name} {key}".strip(), part)
        return found
    if not isinstance(value, np.ndarray):
        value = json.dumps(value, default=str)
    return [(name, value)]


def digest(value: np.ndarray | str) -> str:
    if isinstance(value, str):
        content = value.encode()
    else:
        content = repr(value.shape).encode() + value.tobytes()
    return hashlib.sha256(content).hexdigest()


def of_samples(samples: list, fields: tuple[str, ...]) -> dict[str, Any]:
    """Fields of samples by prompt and number, whatever the order in which the samples came."""
    found = {}
    for sample in sorted(samples, key=lambda s: (s.prompt_id, s.sample_id)):
        for field in fields:
            found[f"{field} of sample {sample.prompt_id}/{sample.sample_id}"] = getattr(sample, field)
    return found


def sampled(mine: list) -> dict[str, Any]:
    return of_samples(mine, SAMPLED)


def scored(mine: list) -> dict[str, Any]:
    return of_samples(mine, SCORED)


def gathered(found: list, _) -> dict[str, Any]:
    return of_samples(found, SAMPLED + SCORED)


def logprobs(*_) -> dict[str, Any]:
    names = watching.names_of_main()
    return {"old_N": names["old_N"], "ref_N": names["ref_N"]}


def advantages(*_) -> dict[str, Any]:
    return {"advantages_N": watching.names_of_main()["advantages_N"]}


def first_argument(tokens, *_) -> dict[str, Any]:
    return {"": tokens}


def result_of_loss(found, *_) -> dict[str, Any]:
    return {"loss_T": found}


def summed_loss(_, loss, *__) -> dict[str, Any]:
    return {"loss": loss}


def handed_over(_, given) -> dict[str, Any]:
    return dict(given)


def asked(_, problems: list, requests: list, *__) -> dict[str, Any]:
    found = {"seeds of samples": np.asarray(requests)}
    for place, problem in enumerate(problems):
        found[f"ids of prompt {place}"] = np.asarray(problem.prompt_ids)
    return found


def gradients(engine) -> dict[str, Any]:
    from deepspeed.utils import safe_get_full_grad

    return {f"gradient of {name}": safe_get_full_grad(x) for name, x in engine.module.named_parameters()}


def weights(_, engine) -> dict[str, Any]:
    """After an optimizer step: DeepSpeed's fp32 weights, and what it has made of them."""
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, weight in engine.module.named_parameters():
        found[f"new {name} in fp32"] = safe_get_full_fp32_param(weight)
        found[f"new {name}"] = weight
    return found


def weights_of_vllm(llm) -> dict[str, Any]:
    """Return the weights the engine computes with, except those its kernels have packed."""
    (model,) = llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    found = {}
    for name, weight in model.named_parameters():
        if not weight.is_mkldnn:
            found[f"the engine's {name}"] = weight
    return found


def in_engine(_, engine, *__) -> dict[str, Any]:
    """Asked of a vLLM that stands still after a push; empty for any other engine."""
    args = engine.arguments[0]
    if args.rollout != "vllm" or args.vllm_engines > 0 or args.inflight_updates != "off":
        return {}
    engine.inbox.put(("call", weights_of_vllm))
    return engine.receive("weights of the engine")[1]


def repeatable(_, metrics: dict[str, Any], *__) -> dict[str, Any]:
    known = {name: x for name, x in metrics.items() if x is not None}
    return {name: x for name, x in known.items() if not name.startswith(UNEQUAL)}


class Tracer:
    """Tells the other process what a run computes, phase by phase, and waits until it may go on."""

    def __init__(self, pipe, done: int):
        self.pipe = pipe
        self.step = done - 1  # the clock is set when it is made, and when a step begins

    def tell(self, phase: str, values: Any) -> None:
        """Other threads have no place in the order of phases: what they compute arrives in the main one."""
        if threading.current_thread() is not threading.main_thread():
            return
        found = numbers("", values)
        digests = [(name, digest(value)) for name, value in found]
        self.pipe.send((self.step, phase, digests))
        while (wanted := self.pipe.recv()) is not None:
            self.pipe.send(found[wanted][1])

    def watch(self, owner: Any, name: str, phase: str, before=None, after=None) -> None:
        """Have a function tell what ``before`` makes of its arguments, and ``after`` of its result and them."""

        def telling(make: Callable | None) -> Callable | None:
            return make and (lambda *given, **named: self.tell(phase, make(*given)))

        watching.watch(owner, name, telling(before), telling(after))

    def install(self, script) -> None:
        """Watch what goes from one phase to the next. What is watched last of a function tells first."""
        utils = importlib.import_module("utils")
        deepspeed = importlib.import_module("deepspeed")
        deepspeed_zero = importlib.import_module("runtime.training.deepspeed_zero")
        Engine = importlib.import_module("runtime.engine.client").Engine
        RunLog = importlib.import_module("runtime.run.logger").RunLog
        watch = self.watch
        watch(Engine, "ask", "1 prompts", asked)
        watch(utils, "gather_samples", "3 score", scored)
        watch(utils, "gather_samples", "2 generate", sampled)
        watch(utils, "gather_samples", "4 gather", after=gathered)
        watch(utils.UpdateStats, "__init__", "6 advantages", advantages)  # which main makes after phase 6
        watch(utils.UpdateStats, "__init__", "5 log-probs", logprobs)
        watch(script, "token_loss", "7 update", first_argument, result_of_loss)
        if hasattr(script, "value_loss"):
            watch(script, "value_loss", "7 update", first_argument, result_of_loss)
        watch(deepspeed_zero, "backward_and_step", "7 update", summed_loss)
        watch(deepspeed.DeepSpeedEngine, "step", "7 update", gradients, weights)
        watch(Engine, "push", "8 push", handed_over, in_engine)
        watch(RunLog, "evaluation", "9 record", repeatable)
        watch(RunLog, "step", "9 record", repeatable)
        watch(utils.Stopwatch, "restart", "9 record", after=self.count)

    def count(self, *_) -> dict[str, Any]:
        self.step += 1
        return {}


def load(root: Path, script: str):
    """Import a training script as a module, by the code in ``root``."""
    path = (root / script).resolve()
    sys.path[:0] = [str(path.parent), str(root)]
    importlib.import_module("runtime.system.process").prepare_environment()
    return importlib.import_module(path.stem)


def arguments(script, values: dict[str, Any]) -> Any:
    """Return the ``Args`` of a script from JSON, which has no tuples; names that the script lacks are left out."""
    given = {}
    for field in dataclasses.fields(script.Args):
        if field.name in values:
            value = values[field.name]
            given[field.name] = tuple(value) if isinstance(value, list) else value
    return script.Args(**given)


def traced(pipe, root: Path, script: str, values: dict[str, Any], log: Path) -> None:
    """Run a script with these arguments, in a process of its own."""
    os.setsid()  # so that it ends with all that it has started
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(out, standard)
    os.environ.pop("MASTER_PORT", None)  # every run needs one of its own
    module = load(root, script)
    args = arguments(module, values)
    utils = importlib.import_module("utils")
    begin = utils.setup_run

    def begin_and_watch(*given):
        run = begin(*given)  # imports --external_lib, which may change what is watched
        done = 0
        if run.start:
            state = json.loads((run.start / "state.json").read_text())
            done = state["step"]
        Tracer(pipe, done).install(module)
        return run

    utils.setup_run = begin_and_watch
    module.main(args, module.preflight(args))
    pipe.send(None)


class Side:
    """One of the two runs: its folder, its code, and its process."""

    def __init__(self, folder: Path, root: Path):
        self.folder = folder
        self.root = root.resolve()
        try:
            self.config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            fail(f"{folder} is no folder of a run: config.json cannot be read ({error})")
        if self.config["world_size"] != 1:
            fail(f"{folder} had {self.config['world_size']} ranks; only runs of one rank are run again here")
        for name in changed_files(self.config, self.root):
            fail(f"{self.root / name} is not what {folder} ran: check its commit out, and name the folder by --code")
        self.metrics = read(folder)

    def checkpoints(self) -> dict[int, tuple[Path, dict]]:
        """Step -> its checkpoint, and the digests of the state in it."""
        found = {}
        for manifest in (self.folder / "checkpoints").glob("step_*[0-9]/manifest.json"):
            files = json.loads(manifest.read_text())["files"]
            files.pop("state.json", None)  # it has the arguments
            step = int(manifest.parent.name.removeprefix("step_"))
            found[step] = (manifest.parent, files)
        return found

    def start(self, place: Path, start: Path | None) -> None:
        """Run again from ``start``, into the folder ``place``."""
        self.place = place
        values = again(self.config, place, start)
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, self.root, self.config["script"], values, place.with_suffix(".log"))
        self.process = context.Process(target=traced, args=arguments)
        self.process.start()
        theirs.close()

    def receive(self) -> Any:
        try:
            return self.pipe.recv()
        except EOFError:
            fail(f"{self.folder}, run again, has failed:\n{self.place.with_suffix('.log').read_text()[-2000:]}")

    def value(self, place: int) -> np.ndarray | str:
        """Return the array or the text at a position of the event that the process sent last."""
        self.pipe.send(place)
        return self.receive()

    def end(self) -> None:
        """End the process, and print the first step whose metrics differ from those recorded, if there is one."""
        if self.process.is_alive():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        recorded = {line["step"]: line for line in self.metrics}
        for line in read(self.place):
            names = differing(line, recorded.get(line["step"], line))
            if names:
                print(f"warning: {self.folder} does not repeat here: step {line['step']}, {', '.join(names[:4])}")
                return


def changed_files(config: dict[str, Any], root: Path) -> list[str]:
    """Return the files of a run's code that are missing in ``root`` or have changed since the run."""
    found = []
    for name, known in config["code"].items():
        file = root / name
        content = file.read_bytes() if file.is_file() else None
        if content is None or hashlib.sha256(content).hexdigest() != known:
            found.append(name)
    return found


def again(config: dict[str, Any], place: Path, start: Path | None) -> dict[str, Any]:
    """Return a run's arguments for running again from the checkpoint ``start``, or from scratch, into ``place``."""
    return config["args"] | {
        "output_dir": str(place.parent),
        "run_name": place.name,
        "resume": str(start) if start else "auto",
        "overwrite": False,
        "track": (),
        "save_every": 0,
        "save_minutes": 0,
    }


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, or none if there is no such file."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def differing(a: dict, b: dict) -> list[str]:
    """Return the names of the metrics whose values differ, without those that differ between equal runs."""
    names = [name for name in {**a, **b} if not name.startswith(UNEQUAL)]
    return [name for name in names if a.get(name) != b.get(name)]


def common_start(a: Side, b: Side) -> tuple[int, Path | None, Path | None]:
    """Return the last checkpoint with the same state in both runs: (step, a's, b's); 0 for the start of the runs."""
    ours, theirs = a.checkpoints(), b.checkpoints()
    for step in sorted(ours.keys() & theirs.keys(), reverse=True):
        if ours[step][1] == theirs[step][1]:
            return step, ours[step][0], theirs[step][0]
    return 0, None, None


def distance(x: np.ndarray | str, y: np.ndarray | str) -> str:
    """Describe the difference of two values."""
    if isinstance(x, str) or isinstance(y, str):
        return f"{x} against {y}"
    if x.shape != y.shape:
        return f"shape {x.shape} against {y.shape}"
    both_nan = (x != x) & (y != y)
    places = np.argwhere((x != y) & ~both_nan)
    first = tuple(places[0].tolist())
    difference = x.astype(np.float64) - y.astype(np.float64)
    apart = np.abs(difference)
    most = np.where(both_nan, 0.0, apart).max()
    return f"{len(places)} of {x.size} numbers, by at most {most:.3g}; {x[first]!s} against {y[first]!s} at {first}"


def place_of(event: tuple | None) -> str:
    """Describe the position of a run in its step."""
    if event is None:
        return "the end"
    return f"step {event[0]}, phase {event[1]}"


def parting(a: Side, b: Side) -> tuple[int, str, str, str] | None:
    """(step, phase, name, how they differ) of the first difference; None where both end without one."""
    while True:
        ours, theirs = a.receive(), b.receive()
        if ours is None and theirs is None:
            return None
        if ours is None or theirs is None or ours[:2] != theirs[:2]:
            return *(ours or theirs)[:2], "what comes next", f"{place_of(ours)} against {place_of(theirs)}"
        pairs = itertools.zip_longest(ours[2], theirs[2], fillvalue=("nothing", ""))
        for place, (one, other) in enumerate(pairs):
            name, known = one
            if name != other[0]:
                return *ours[:2], name, f"{other[0]} in its place"
            if known != other[1]:
                return *ours[:2], name, distance(a.value(place), b.value(place))
        a.pipe.send(None)
        b.pipe.send(None)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs=2, help="folders of two runs")
    parser.add_argument("--code", type=Path, nargs=2, default=(ROOT, ROOT), metavar="FOLDER", help="what they ran")
    options = parser.parse_args(words)
    a = Side(options.runs[0], options.code[0])
    b = Side(options.runs[1], options.code[1])
    for word, part in (("flags", "args"), ("code", "code")):
        names = differing(a.config[part], b.config[part])
        print(f"{word:9} {', '.join(names) or 'equal'}")
    pairs = zip(a.metrics, b.metrics, strict=False)
    apart = [one["step"] for one, other in pairs if differing(one, other)]
    print(f"records   differ from step {apart[0]} on" if apart else "records   equal")
    step, a_start, b_start = common_start(a, b)
    print(f"again     from step {step}, a checkpoint of both" if step else "again     from the start", flush=True)
    if a.root == b.root and a.config["script"] == b.config["script"]:
        load(a.root, a.config["script"])  # once for both
    with tempfile.TemporaryDirectory(prefix="part-") as place:
        a.start(Path(place, "a"), a_start)
        b.start(Path(place, "b"), b_start)
        try:
            found = parting(a, b)
        finally:
            a.end()
            b.end()
    if found is None:
        print("equal to the end")
        return 0
    print("parted    step {}, phase {}: {}: {}".format(*found))
    return 1


if __name__ == "__main__":
    raise SystemExit(main())

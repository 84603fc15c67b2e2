"""The folder of a run: its name, what may be lost in it, and the checkpoint a run resumes from. Imports no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.flags import MAY_CHANGE, PRESENTATION
from runtime.process import file_digest, lock_holder, refuse, versions, write_whole
from runtime.records import Problem


def run_name(args, defaults) -> str:
    """Name of a run: its ``exp_name``, every argument that differs from its default, and the seed.

    The same command always has the same name and a different one never has; long names end in a hash of the rest.
    """
    if args.run_name is not None:
        return args.run_name
    parts = []
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        if f.name not in (*PRESENTATION, "exp_name", "seed") and value != getattr(defaults, f.name):
            parts.append(f"{f.name}={value}")
    text = "__".join(parts)
    safe = "".join(c if c.isalnum() or c in "=_.,+-" else "-" for c in text)
    if len(safe) > 120 or safe != text:
        safe = f"{safe[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return "__".join(filter(None, (args.exp_name, safe, f"seed={args.seed}")))


def open_run(args, defaults, world_size: int = 1) -> tuple[Path, Path | None]:
    """(the run's folder, the checkpoint it goes on from or None where it begins). Refuses what would lose a run's work.

    Only looks: ``RunLog`` writes, once the models stand, so that a failed start leaves nothing behind. Rank 0 alone
    reads checkpoints through and gives one; ``checkpoints.Checkpoints`` tells the others. A finished run ends here: 0.
    """
    folder = Path(args.output_dir) / run_name(args, defaults)
    config = folder / "config.json"
    if holder := lock_holder(folder):
        refuse(f"{folder} is being written by a run that goes on ({holder}); wait for its end or choose a --run_name")
    if args.overwrite and args.resume not in ("auto", "never"):
        refuse(f"--overwrite begins anew and --resume {args.resume} goes on: give one of them")
    if args.overwrite:
        return folder, None
    if config.exists():
        other, _ = changed_arguments(json.loads(config.read_text())["args"], args)
        if other:
            change = ", ".join(other[:5])
            refuse(f"{folder} holds a run of another configuration ({change}); choose another --run_name or --exp_name")
        if args.resume == "never":
            refuse(f"{folder} holds this very run already; --overwrite replaces it, --seed or --exp_name start another")
        if args.resume == "auto" and not unfinished(folder, args):
            if os.environ.get("RANK", "0") == "0":
                print(f"{folder} is finished; --overwrite replaces it, --seed or --exp_name start another")
            raise SystemExit(0)
    if os.environ.get("RANK", "0") != "0" or args.resume == "never":
        return folder, None
    return folder, choose_checkpoint(folder, args, world_size)


def changed_arguments(theirs: dict[str, Any], args) -> tuple[list[str], list[str]]:
    """Arguments that differ from a run's own, in words: those that make it another run, and those that may change."""
    ours = json.loads(json.dumps(dataclasses.asdict(args)))
    words = {k: f"--{k} {theirs.get(k)} there, {ours[k]} here" for k in ours if ours[k] != theirs.get(k)}
    return [w for k, w in words.items() if k not in MAY_CHANGE], [w for k, w in words.items() if k in MAY_CHANGE]


def last_step(path: Path) -> int:
    """Step of the last whole line of a .jsonl file; -1 without any."""
    for line in reversed(path.read_text().splitlines() if path.is_file() else []):
        try:
            return json.loads(line)["step"]
        except json.JSONDecodeError:
            continue  # half written
    return -1


def unfinished(folder: Path, args) -> str:
    """What the run in ``folder`` still lacks of what only its end writes; "" when it is finished."""
    batch = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    steps = args.total_steps if args.total_episodes is None else args.total_episodes // batch
    reached = last_step(folder / "metrics.jsonl")
    if reached < steps:
        return f"is at step {max(reached, 0)} of {steps}"
    if args.eval_prompts > 0 and last_step(folder / "eval.jsonl") < steps:
        return "has not evaluated its last step"
    if not (folder / "model" / "config.json").is_file() or not any((folder / "model").glob("*.safetensors")):
        return "has not saved its model"
    return ""


def cut_back(file: Path, last: int) -> None:
    """Leave the whole lines of a .jsonl file up to step ``last``; later steps are done again."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            continue
    write_whole(file, "".join(kept))


def best_so_far(folder: Path, args) -> float:
    """The largest --best_metric in a run's eval.jsonl whose weights are in best/; minus infinity without any."""
    file = folder / "eval.jsonl"
    if args.best_metric is None or not file.is_file() or not (folder / "best").is_dir():
        return -math.inf
    results = map(json.loads, file.read_text().splitlines())
    return max((result.get(args.best_metric, -math.inf) for result in results), default=-math.inf)


def data_digest(*parts: Sequence[Problem]) -> str:
    """What tells one set of rendered problems from another: up to a thousand of each part, evenly spaced."""
    digest = hashlib.sha256()
    for part in parts:
        for i in range(0, len(part), max(1, len(part) // 1000)):
            digest.update(json.dumps([len(part), i, part[i].prompt_ids, part[i].truth]).encode())
    return digest.hexdigest()


def saved_steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints of a run, oldest first. One that is being written has another name."""
    found = [p for p in (folder / "checkpoints").glob("step_*") if p.name.removeprefix("step_").isdigit()]
    return sorted((int(p.name.removeprefix("step_")), p) for p in found)


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint's files, by its manifest; "" when all are there and as they were written."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        for name, (size, digest) in files.items():
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            if (found := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {found} bytes, not {size}"
            if file_digest(checkpoint / name) != digest:
                return f"{name} has changed since it was written (another SHA-256)"
    except FileNotFoundError:
        return "manifest.json is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return ""


def choose_checkpoint(folder: Path, args, world_size: int) -> Path | None:
    """The checkpoint that ``--resume`` means: None where there is none and nothing is lost by a new start.

    auto takes the newest whose manifest holds, and says why newer ones were passed over. Ends with exit code 2 where
    all are damaged, and where the checkpoint belongs to another run or to another number of ranks.
    """
    say = lambda text: print(text, flush=True)  # noqa: E731
    if args.resume != "auto":
        start = Path(args.resume)
        if wrong := damage(start):
            refuse(f"--resume {start}: {wrong}; give auto, never, or the folder of a checkpoint that is whole")
    else:
        for partial in sorted((folder / "checkpoints").glob("step_*.partial")):
            say(f"passed over {partial}: the save was not finished")
        steps, start = saved_steps(folder), None
        for _, checkpoint in reversed(steps):
            if not (wrong := damage(checkpoint)):
                start = checkpoint
                break
            say(f"passed over {checkpoint}: {wrong}")
        named = folder / "checkpoints" / "latest"
        if start is not None and (not named.is_file() or named.read_text().strip() != start.name):
            say(f"{named} does not name {start.name}, the newest checkpoint that is whole")
        if steps and start is None:
            refuse(
                f"{folder}: no checkpoint is whole (see above). Restore one from a copy, or --overwrite to lose this "
                f"run's work; --run_name starts another beside it"
            )
        done = last_step(folder / "metrics.jsonl")
        if start is None and done > 0 and args.save_every == 0 and args.save_minutes == 0:
            refuse(
                f"{folder} holds {done} steps of this very run and saved none of them (--save_every 0, --save_minutes "
                f"0); --overwrite starts it anew, --seed or --exp_name start another"
            )
        if start is None and (folder / "model").exists():
            refuse(
                f"{folder} holds {done} steps of this very run, ended, and no checkpoint to go on from (--save_every, "
                f"--save_minutes); --overwrite starts it anew, --model_name_or_path {folder / 'model'} a run from its "
                f"weights"
            )
        if start is None:
            if done > 0:
                say(f"{folder} stopped after step {done}, before its first checkpoint: it starts anew")
            return None
    state = json.loads((start / "state.json").read_text())
    other, may = changed_arguments(state["args"], args)
    if other:
        refuse(f"{start} belongs to a run of another configuration ({', '.join(other[:5])}); choose another --run_name")
    if state["world_size"] != world_size:
        refuse(
            f"{start} was saved by {state['world_size']} rank(s), this run has {world_size}: ZeRO's partitions of the "
            f"optimizer belong to that number of ranks. Start it with --num_processes {state['world_size']}, or a new "
            f"run from its weights: --model_name_or_path {start / 'model'}"
        )
    say(f"resuming after step {state['step']}, from {start}")
    for line in may:
        say(f"  changed: {line}")
    new = versions()
    for name in sorted({*new, *state["versions"]}):
        if new.get(name) != state["versions"].get(name):
            say(f"  changed: {name} {state['versions'].get(name)} there, {new.get(name)} here: results may differ")
    return start

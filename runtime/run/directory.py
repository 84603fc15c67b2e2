"""The folder of a run: its name, protection of its files, and the checkpoint to resume from. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from runtime.arguments.flags import MAY_CHANGE, identity_value, is_open, total_steps
from runtime.data.samples import Problem
from runtime.run.identity import changed_arguments, difference
from runtime.run.run_files import config_of, read_config, records
from runtime.system import user_files
from runtime.system.process import HELD, file_digest, lock_holder, print_on_rank_0, rank, refuse, versions, write_whole
from runtime.system.redaction import redact_values

MOST_BYTES = 128  # of a name that follows from the arguments: wandb takes no longer one
# What a run writes in its folder and changes or renames when it starts again.
WRITTEN = (
    *("config.json", "metrics.jsonl", "samples.jsonl", "eval.jsonl", "verdict.json"),
    *("model", "critic", "checkpoints"),
)
# What else it leaves there, and what the programs that read it do: --overwrite removes all this and nothing else.
LEFT = (
    *(*WRITTEN, "libraries.log", "bad_batch.jsonl", "wandb", "tensorboard"),
    *("curves.png", "eval_samples.jsonl", "measured_kl.json"),
)


def run_name(args, defaults) -> str:
    """Name of a run: its ``exp_name``, the numbers and choices of its identity that differ from the defaults, the seed.

    Texts that differ, such as paths and columns, are in a hash, and so is the end of a long name. With a preset the
    defaults are those that it sets. What follows from model and data is not named. The same command always has the
    same name, and a command that computes something else never has it.
    """
    if args.run_name is not None:
        return args.run_name
    named, texts = [], []
    if args.preset is not None:
        defaults = user_files.find("runtime.arguments.presets:apply")(defaults, args.preset)
    values = redact_values({f.name: identity_value(f.name, getattr(args, f.name)) for f in dataclasses.fields(args)})
    for f in dataclasses.fields(args):
        value = values[f.name]
        default = identity_value(f.name, getattr(defaults, f.name))
        unnamed = f.name in (*MAY_CHANGE, "exp_name", "reward_control", "seed") or is_open(args, f.name)
        if not unnamed and value not in (default, "environment"):  # the verifier of an --environment
            is_text = f.type in ("str", "str | None") and f.name != "preset"
            (texts if is_text else named).append(f"{f.name}={value}")
    text = "__".join(named)
    safe = "".join(c if c.isalnum() or c in "=_.,+-" else "-" for c in text)
    begin = args.exp_name  # never cut off
    if args.reward_control != "none":
        begin += f"__reward_control={args.reward_control}"
    ends = (begin, f"seed={args.seed}")
    room = max(32, MOST_BYTES - sum(len(os.fsencode(end)) + 2 for end in ends))  # a letter may have four bytes
    if texts or safe != text or len(safe.encode()) > room:
        beginning = safe.encode()[: room - 9].decode(errors="ignore")
        digest = hashlib.sha256(os.fsencode("__".join([*named, *texts]))).hexdigest()[:8]
        safe = f"{beginning}-{digest}".removeprefix("-")
    return "__".join(filter(None, (ends[0], safe, ends[1])))


def open_run(args, defaults, world_size: int = 1) -> tuple[Path, Path | None]:
    """Find the folder of a run, and the checkpoint that it resumes from (None: it starts from scratch).

    Rejects whatever would lose the work of a run. This function only looks: ``RunLog`` writes once the models are
    loaded, so a failed start leaves nothing behind. Rank 0 alone verifies checkpoints and returns one;
    ``checkpoints.Checkpoints`` tells the other ranks. For a finished run the program ends here, with exit code 0.
    """
    folder = Path(args.output_dir) / run_name(args, defaults)
    if rank() == 0:
        check_writable(args, folder)
    if holder := lock_holder(folder):
        words = "wait for it to finish or choose another --run_name"
        refuse(f"{folder} is in use by a running process ({holder}); {words}", HELD)
    if args.overwrite and args.resume not in ("auto", "never"):
        refuse(f"--overwrite starts from scratch and --resume {args.resume} continues; pass only one of them")
    check_is_a_run(folder, args)
    if args.overwrite:
        return folder, None
    if (folder / "config.json").exists():
        check_earlier_run(folder, args)
    if rank() != 0 or args.resume == "never":
        return folder, None
    return folder, choose_checkpoint(folder, args, world_size)


def check_is_a_run(folder: Path, args) -> None:
    """Reject a folder that holds something else than a run, where this one would delete, cut or rename it.

    A run is known by the arguments in its config.json, or, where that is lost, by a checkpoint.
    """
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    in_the_way = found & set(LEFT if args.overwrite else WRITTEN)
    with contextlib.suppress(OSError, ValueError):
        config_of(folder)
        return
    if in_the_way and not saved_steps(folder):
        refuse(
            f"{folder} is not the folder of a run (it has no config.json of one), but holds "
            f"{', '.join(sorted(in_the_way)[:4])}; choose another --run_name, or remove these files"
        )


def left_by_a_run(folder: Path) -> list[Path]:
    """List the files that --overwrite removes; config.json, which identifies a run's folder, comes last."""
    found = [path for path in folder.iterdir() if path.name.removesuffix(".aside").removesuffix(".partial") in LEFT]
    return sorted(found, key=lambda path: path.name == "config.json")


def check_earlier_run(folder: Path, args) -> None:
    """Reject the folder of another run; exit with code 0 where this very run is finished."""
    try:
        config = config_of(folder)
    except ValueError as error:
        refuse(f"{folder}/config.json cannot be read ({error}); remove this file to resume from the checkpoints there")
    other, _ = changed_arguments(config["args"], args)
    if other:
        change = ", ".join(other[:5])
        refuse(f"{folder} holds a run of another configuration ({change}); choose another --run_name or --exp_name")
    if args.resume == "never":
        refuse(f"{folder} already contains this run; use --overwrite to replace it, or another --seed or --exp_name")
    if args.resume != "auto" or unfinished(folder, args):
        return
    if changed := difference(config, args):
        refuse(f"{folder} is finished, but {changed}; choose another --exp_name, or --overwrite to replace it")
    print_on_rank_0(f"{folder} is finished; --overwrite replaces it, --seed or --exp_name start another")
    raise SystemExit(0)


def earlier_choices(args, folder: Path) -> dict[str, Any]:
    """Return the values this run's first machine chose for flags left open; empty for a run that begins here."""
    if args.resume not in ("auto", "never"):
        folder = Path(args.resume).absolute().parent.parent
    return {} if args.overwrite else read_config(folder).get("resolved", {})


def check_writable(args, folder: Path) -> None:
    """Reject a folder in which no file can be made, by making one without a name."""
    whole = folder.absolute()
    place = next(place for place in (whole, *whole.parents) if os.path.lexists(place))
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        refuse(f"--output_dir {args.output_dir}: {place} cannot be written ({error.strerror}); choose another folder")


FIRST_FIELD = re.compile(r'\{"step": (-?[0-9]+)[,}]')


def step_of(line: str) -> int | None:
    """Step of a line of a .jsonl file, with which it begins; None for half a line and for another one."""
    found = FIRST_FIELD.match(line) if line.endswith("\n") else None
    return int(found[1]) if found else None


def last_step(path: Path) -> int:
    """Step of the last whole line of a .jsonl file; -1 without any among the last hundred."""
    if not path.is_file():
        return -1
    with open(path, errors="replace") as file:
        lines = deque(file, maxlen=100)
    return next((step for line in reversed(lines) if (step := step_of(line)) is not None), -1)


def unfinished(folder: Path, args) -> str:
    """Name what ``folder`` lacks of a finished run, or return "" if it is finished.

    ``args``: with the values of flags that were left open.
    """
    config = json.loads((folder / "config.json").read_text())
    steps = total_steps(args, config.get("problems", 0))
    reached = last_step(folder / "metrics.jsonl")
    ends = [record for record in records(folder / "eval.jsonl") if record.get("step") == reached]
    if any(map(args.reaches_goal, ends)):
        steps = reached
    if reached < steps:
        return f"is at step {max(reached, 0)} of {steps}"
    if args.eval_prompts > 0 and last_step(folder / "eval.jsonl") < steps:
        return "has not evaluated its last step"
    has_config = any((folder / "model" / name).is_file() for name in ("config.json", "adapter_config.json"))
    if not has_config or not any((folder / "model").glob("*.safetensors")):
        return "has not saved its model"
    return ""


def cut_back(file: Path, last: int) -> None:
    """Leave the whole lines of a .jsonl file up to step ``last``; later steps are done again."""
    if not file.exists():
        return
    with open(file, errors="replace") as lines:
        steps = ((step_of(line), line) for line in lines)  # one at a time: samples may fill gigabytes
        write_whole(file, (line for step, line in steps if step is not None and step <= last))


def data_digest(*parts: Sequence[Problem]) -> str:
    """Hash the rows of all problems (``Problem.record``)."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} problems".encode())
        for p in part:
            digest.update(p.record())
    return digest.hexdigest()


def prompts_digest(rows: str, *parts: Sequence[Problem]) -> str:
    """Hash what all ranks must have read: the rows, by their ``data_digest``, and the ids of their prompts."""
    digest = hashlib.sha256(rows.encode())
    prompts = [p.prompt_ids for p in itertools.chain(*parts)]
    digest.update(np.array(list(map(len, prompts))))
    for start in range(0, len(prompts), 4096):
        ids = np.concatenate(prompts[start : start + 4096])
        digest.update(ids.astype(np.int32))
    return digest.hexdigest()


def saved_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of a run's checkpoints, oldest first. A checkpoint being written has another name."""
    found = [p for p in (folder / "checkpoints").glob("step_*") if p.name.removeprefix("step_").isdigit()]
    return sorted((int(p.name.removeprefix("step_")), p) for p in found)


def damage(checkpoint: Path) -> str:
    """Describe the damage to a checkpoint's files, by its manifest, or return "" if all are intact."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        for name, (size, _) in files.items():
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            if (found := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {found} bytes, not {size}"
        with ThreadPoolExecutor() as pool:  # a core hashes 1 GB/s, and lets others read and hash meanwhile
            digests = pool.map(file_digest, [checkpoint / name for name in files])
            for (name, (_, written)), digest in zip(files.items(), digests, strict=True):
                if digest != written:
                    return f"{name} has changed since it was written (another SHA-256)"
    except FileNotFoundError:
        return "manifest.json is missing" if checkpoint.is_dir() else "no such folder"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return ""


def choose_checkpoint(folder: Path, args, world_size: int) -> Path | None:
    """Return the checkpoint that ``--resume`` selects, or None if there is none and a fresh start loses nothing.

    auto takes the newest one whose manifest matches, and reports why newer ones were skipped. Ends with exit code 2
    where all are damaged, and where the checkpoint belongs to another run or other code.
    """
    if args.resume == "auto":
        start = newest_checkpoint(folder)
        if start is None:
            check_nothing_is_lost(folder, args)
            return None
    else:
        start = Path(args.resume)
        wrong = damage(start)
        if wrong:
            refuse(f"--resume {start}: {wrong}; give auto, never, or the folder of an intact checkpoint")
    state = json.loads((start / "state.json").read_text())
    check_same_run(start, state, args)
    report_changes(start, state, args, world_size)
    return start


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest intact checkpoint in the folder of a run, or None if there is no checkpoint at all.

    Prints why newer ones were skipped. Ends with exit code 2 where all are damaged.
    """
    for partial in sorted((folder / "checkpoints").glob("step_*.partial")):
        print_on_rank_0(f"skipping {partial}: the save was not finished")
    steps = saved_steps(folder)
    for _, checkpoint in reversed(steps):
        wrong = damage(checkpoint)
        if not wrong:
            return checkpoint
        print_on_rank_0(f"skipping {checkpoint}: {wrong}")
    if steps:
        refuse(f"{folder}: no checkpoint is intact (see above); restore one from a copy, or pass --overwrite")
    return None


def check_nothing_is_lost(folder: Path, args) -> None:
    """Reject a start from scratch, of a run without any checkpoint, that would discard what the user kept.

    A trial that took less than --save_minutes is replaced: a run that is killed loses as much.
    """
    done = last_step(folder / "metrics.jsonl")
    saves_nothing = args.save_every == 0 and args.save_minutes == 0
    minutes = sum(record.get("time/step", 0.0) for record in records(folder / "metrics.jsonl")) / 60
    if (done > 0 and saves_nothing) or ((folder / "model").exists() and minutes >= args.save_minutes):
        refuse(
            f"{folder} holds {done} steps of this run and no checkpoint of them (--save_every, --save_minutes); "
            f"--overwrite starts it from scratch, --seed or --exp_name start another"
        )
    if done > 0:
        print_on_rank_0(f"{folder} has {done} steps and no checkpoint to continue from: starting from scratch")


def check_same_run(start: Path, state: dict[str, Any], args) -> None:
    """Reject a checkpoint of another configuration, of other code, or of other data or models."""
    other, _ = changed_arguments(state["args"], args)
    if other:
        refuse(f"{start} belongs to a run of another configuration ({', '.join(other[:5])}); choose another --run_name")
    data = state.get("inputs", {}).get("--dataset")
    if data and args.data_digest and data != args.data_digest:  # also with --resume CHECKPOINT
        refuse(
            f"{start}: --dataset or --eval_dataset has other rows than before: restore it, or start another run "
            f"(--run_name, --exp_name)"
        )
    changed = difference(state, args)
    if changed and args.resume == "auto":
        refuse(
            f"{start} was saved {changed}. --resume {start} resumes it with what is there now, --exp_name or "
            f"--run_name start another run, --overwrite starts this one from scratch"
        )


def report_changes(start: Path, state: dict[str, Any], args, world_size: int) -> None:
    """Print which checkpoint is resumed, and what has changed since it was saved."""
    print_on_rank_0(f"resuming after step {state['step']}, from {start}")
    if state["world_size"] != world_size:
        print_on_rank_0(f"  changed: {state['world_size']} rank(s) there, {world_size} here: equal up to rounding")
    _, allowed = changed_arguments(state["args"], args)
    for line in filter(None, [*allowed, difference(state, args)]):
        print_on_rank_0(f"  changed: {line}")
    new = versions()
    for name in sorted({*new, *state["versions"]}):
        theirs, ours = state["versions"].get(name), new.get(name)
        if theirs != ours:
            print_on_rank_0(f"  changed: {name} {theirs} there, {ours} here: results may differ")

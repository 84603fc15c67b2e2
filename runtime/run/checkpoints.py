"""Save and load checkpoints, written atomically, from which a run continues as if it had never stopped.

The checkpoint to resume from is chosen earlier, without torch, by ``directory.open_run``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import random
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from runtime.run import directory, identity
from runtime.system import process, user_files
from runtime.system.watchdog import Watch
from runtime.training.deepspeed_zero import whole_numel

GIB = 2**30


def seed_generators(args, rank: int, step: int) -> None:
    """Seed the global random number generators for what follows a step, so that no state of them has to be saved.

    The scripts draw nothing from them, since each sample and shuffle has a seed of its own; edited copies may.
    """
    seed = random.Random(f"{args.seed}/{rank}/{step}").getrandbits(32)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (libraries draw from the global state)
    if args.rollout == "vllm":  # transformers' generate seeds torch before every answer, in a thread of its own
        torch.manual_seed(seed)


class Checkpoints:
    """The state of a run on disk, ``checkpoints/step_000100/``: whole or not there at all.

        policy/ critic/   DeepSpeed's own: the weights, and each rank's part of fp32 master weights and optimizer
        reference.pt      weights of a reference that moves, and their fp32 average
        state.json        all numbers, with the arguments, code, versions and number of ranks
        arrays.npz        the arrays of state.json, which says where each of them begins
        model/            the policy in Hugging Face format, to use elsewhere; nothing is resumed from it
        manifest.json     size and SHA-256 of all of these, written last

    ``parts`` has the first ones by name: DeepSpeed engines, modules, and plain objects whose attributes JSON can hold;
    None is left out. What is in no part follows from the seed and the step: samples, learning rate, random states.
    """

    def __init__(self, log, args, tokenizer, phases, parts: dict, save_weights: Callable):
        self.save_weights = save_weights
        self.log = log
        self.args = args
        self.tokenizer = tokenizer
        self.phases = phases
        self.folder = log.folder / "checkpoints"
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self.saved_at = time.monotonic()
        self.stopping = False
        self.errors: list[str] = []
        self.policy = parts["policy"]
        self.engines = {}
        self.modules = {}
        self.plain = {}
        for name, part in parts.items():
            if hasattr(part, "save_checkpoint"):
                self.engines[name] = part
            elif isinstance(part, nn.Module):
                self.modules[name] = part
            elif part is not None:
                self.plain[name] = part
        for engine in self.engines.values():
            writer = engine.checkpoint_engine
            writer.save = functools.partial(self._try, writer.save)
            engine._copy_recovery_script = lambda *_: None  # it would make of these files what model/ is already

    def load(self, start: Path | None) -> int:
        """Give all parts the state in the checkpoint that rank 0 chose; the step after which it was saved, or 0.

        Later checkpoints of the run, damaged or left behind by going back, are set aside.
        """
        start = self._gather(start)[0]
        self._check_folder_is_shared()
        process.StopRequest.training = True
        if start is None:
            seed_generators(self.args, self.rank, 0)
            return 0
        arrays = dict(np.load(start / "arrays.npz")) if (start / "arrays.npz").is_file() else {}  # of earlier code

        def with_arrays(found: dict) -> Any:
            if found.keys() != {"array of", "first", "shape"}:
                return found
            last = found["first"] + math.prod(found["shape"])
            return arrays[found["array of"]][found["first"] : last].reshape(found["shape"])

        state = json.loads((start / "state.json").read_text(), object_hook=with_arrays)
        ranks = state["world_size"]
        for name, engine in self.engines.items():
            saved_by = contextlib.nullcontext()
            if ranks != self.world_size:
                saved_by = user_files.find("runtime.run.resharding:saved_by")(ranks, engine, start / name)
            with saved_by:
                loaded, _ = engine.load_checkpoint(str(start), tag=name, load_lr_scheduler_states=False)
            if loaded is None:
                raise RuntimeError(f"DeepSpeed found nothing to load in {start / name}")
        for name, module in self.modules.items():
            weights = torch.load(start / f"{name}.pt", map_location="cpu", weights_only=True)
            module.load_state_dict(weights)
        for name, thing in self.plain.items():
            vars(thing).update(state["parts"].get(name, {}))  # earlier code may not have had this part
        seed_generators(self.args, self.rank, state["step"])
        if self.rank == 0:
            self._set_aside(state["step"])
        process.StopRequest.last_step_done = state["step"] == self.log.total
        return state["step"]

    def _check_folder_is_shared(self) -> None:
        """Reject a folder that not all nodes see: each rank writes its part of a checkpoint there. Exit code 2."""
        lock = self.log.folder / "lock"  # which rank 0 holds, with its name in it
        holder = self._gather(lock.read_text() if self.rank == 0 else None)[0]
        deadline = time.monotonic() + 10.0  # a network file system may show a new folder late
        while not (seen := lock.is_file() and lock.read_text() == holder) and time.monotonic() < deadline:
            time.sleep(0.5)
        places = self._gather(f"rank {self.rank} on {socket.gethostname()}" if not seen else None)
        blind = [place for place in places if place is not None]
        if blind:
            process.refuse(
                f"--output_dir {self.args.output_dir} is not the same folder on all nodes: {', '.join(blind[:4])} "
                f"cannot see what rank 0 has written to {self.log.folder}; choose one on a shared file system"
            )

    def _set_aside(self, last: int) -> None:
        """Rename the checkpoints after step ``last``, from which the run continues."""
        for step, path in directory.saved_steps(self.log.folder):
            if step > last:
                aside = path.with_name(path.name + ".aside")
                shutil.rmtree(aside, ignore_errors=True)
                path.rename(aside)
                print(f"{path} is now {aside.name}: the run continues from step {last}", flush=True)

    def after_step(self, step: int) -> bool:
        """Save if --save_every, --save_minutes or a signal ask for it. Returns whether to end, equal on all ranks."""
        if self.log.goal_reached:  # as after the last step: what remains is model/
            process.StopRequest.last_step_done = True
            return True
        seed_generators(self.args, self.rank, step)
        late = 0 < self.args.save_minutes <= (time.monotonic() - self.saved_at) / 60
        wishes = self._gather((process.StopRequest.asked, late))
        self.stopping, late = (any(wish) for wish in zip(*wishes, strict=True))
        due = self.args.save_every > 0 and step % self.args.save_every == 0
        saved = False
        if self.stopping or late or due:
            with self.phases("save"):
                saved = self.save(step)
        if step == self.log.total and not self.stopping:
            process.StopRequest.last_step_done = True
            if any(self._gather(process.StopRequest.asked)):  # a signal that came before that was told of a checkpoint
                self.stopping = True
                if not saved:
                    self.save(step)
        return self.stopping

    def save(self, step: int) -> bool:
        """Write a checkpoint of the state after ``step``, drop old ones. A full disk costs the checkpoint, not the run.

        Every rank must call it. Returns whether the checkpoint was written.
        """
        final = self.folder / f"step_{step:06d}"
        partial = final.with_name(final.name + ".partial")
        self.errors = []
        self.saved_at = time.monotonic()
        if self.rank == 0:
            self._try(self._make_room, partial)
        if not self._went_well(step, partial):
            return False
        self._write_parts(step, partial)
        self._gather(None)  # all have written
        files = self._manifest(partial)
        if not self._went_well(step, partial):
            return False
        if self.rank == 0:
            self._try(self._finish, files, partial, final)
        return self._went_well(step, partial)

    def _write_parts(self, step: int, partial: Path) -> None:
        """Write each rank's files, and on rank 0 the files that all ranks share."""
        for name, engine in self.engines.items():
            self._try(engine.save_checkpoint, str(partial), tag=name, save_latest=False)
        model = partial / "model"
        self._try(self.save_weights, self.policy, self.tokenizer, model, self.args.zero_stage, self.rank)
        if self.rank != 0:
            return
        for name, module in self.modules.items():
            self._try(torch.save, module.state_dict(), partial / f"{name}.pt")
        self._try(self._write_state, step, partial)

    def _write_state(self, step: int, partial: Path) -> None:
        arrays: dict[str, list[np.ndarray]] = {}
        sizes: Counter[str] = Counter()

        def place(array: np.ndarray) -> dict[str, Any]:
            kind = array.dtype.name
            arrays.setdefault(kind, []).append(array.ravel())
            sizes[kind] += array.size
            return {"array of": kind, "first": sizes[kind] - array.size, "shape": array.shape}

        state = {
            "step": step,
            "args": identity.recorded(self.args),
            "code": self.log.code,
            "inputs": self.log.inputs,
            "versions": process.versions(),
            "world_size": self.world_size,
            "parts": {name: vars(thing) for name, thing in self.plain.items()},
        }
        (partial / "state.json").write_text(json.dumps(state, default=place) + "\n")
        whole = {kind: np.concatenate(parts) for kind, parts in arrays.items()}
        np.savez(partial / "arrays.npz", allow_pickle=False, **whole)

    def _manifest(self, partial: Path) -> dict[str, tuple[int, str]]:
        """Return (size, SHA-256) of every file by name, on all ranks. Each rank reads its share of the files."""
        files: dict[str, tuple[int, str]] = {}
        found = []
        if self.rank == 0:
            found = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        found = self._gather(found)[0]
        for path in found[self.rank :: self.world_size]:
            self._try(self._enter, files, partial, path)
        everything = {}
        for part in self._gather(files):
            everything |= part
        return everything

    def _gather(self, mine) -> list:
        """Return one object from every rank, on every rank. All ranks have reached this point when it returns."""
        objects = [None] * self.world_size
        torch.distributed.all_gather_object(objects, mine)
        return objects

    def _try(self, write, *arguments, **named) -> None:
        """Keep errors of writing: a rank that left here would leave the others waiting in a collective."""
        Watch.heartbeat()
        try:
            write(*arguments, **named)
        except Exception as error:  # a full disk has many classes, and no other failure may cost the run either
            self.errors.append(f"rank {self.rank}: {type(error).__name__}: {error}")

    def _went_well(self, step: int, partial: Path) -> bool:
        """Return True if no rank met an error; otherwise remove the files and print a warning."""
        errors = [error for part in self._gather(self.errors) for error in part]
        if errors and self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            then = "the last one counts" if self.stopping else "the run continues"
            print(f"WARNING: NO CHECKPOINT after step {step}; {then}. {errors[0]}", flush=True)
        return not errors

    def _make_room(self, partial: Path) -> None:
        """Make an empty folder. Raises OSError if the disk has less space than 1.2 times the last checkpoint."""
        self.folder.mkdir(exist_ok=True)
        steps = directory.saved_steps(self.log.folder)
        if steps:
            _, last = steps[-1]
            size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
        else:  # the weights twice, and fp32 master weights and two moments
            size = 0
            for engine in self.engines.values():
                for weight in engine.parameters():
                    size += whole_numel(weight) * (2 * weight.element_size() + 12)
        free = shutil.disk_usage(self.folder).free
        if free < 1.2 * size:
            raise OSError(f"{free / GIB:.2f} GiB free in {self.folder}, {1.2 * size / GIB:.2f} GiB needed")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    def _enter(self, files: dict, partial: Path, path: Path) -> None:
        """Wait until a written file is on the disk, and put it into the manifest."""
        process.sync(path)
        files[str(path.relative_to(partial))] = (path.stat().st_size, process.file_digest(path))

    def _finish(self, files: dict, partial: Path, final: Path) -> None:
        """Write the manifest, then rename: wherever this ends, an earlier one is intact."""
        for log in self.log.folder.glob("*.jsonl"):  # a resume keeps their lines up to this step, and must find them
            process.sync(log)
        process.write_whole(partial / "manifest.json", json.dumps({"files": files}, indent=1) + "\n")
        process.replace_folder(final, partial)
        if "RUN_DIR" in os.environ:  # of a job of scripts/submit.py, which starts it again if it crashes after this
            with contextlib.suppress(OSError):
                Path(os.environ["RUN_DIR"], "saved").touch()
        self._drop_old()

    def _drop_old(self) -> None:
        """Remove all but the newest --keep_checkpoints and the best, and what unfinished saves have left."""
        steps = directory.saved_steps(self.log.folder)
        saved = [path for _, path in steps]
        scores = {path: score for step, path in steps if (score := self.log.scores.get(step)) is not None}
        best = max(scores, key=scores.get, default=None)  # the oldest of equal ones
        if self.args.keep_checkpoints > 0:
            for path in saved[: -self.args.keep_checkpoints]:
                if path != best:
                    path.rename(path.with_name(path.name + ".partial"))
        for path in self.folder.glob("step_*.partial"):
            shutil.rmtree(path, ignore_errors=True)

"""Checkpoints: what a run needs to go on as if it had never stopped, and how that gets onto a disk whole.

Which checkpoint a run goes on from is decided earlier, without torch: runlog.open_run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn

from runtime import process, rundir
from runtime.watchdog import Watch


def random_states() -> dict:
    """Where this process's generators of random numbers stand, as tensors, lists and numbers."""
    import numpy

    version, numbers, gauss = random.getstate()
    name, keys, *rest = numpy.random.get_state()  # noqa: NPY002 (libraries draw from the global state)
    states = {"python": [version, list(numbers), gauss], "numpy": [name, keys.tolist(), *rest]}
    return states | {"torch": torch.get_rng_state(), "cuda": [x.cpu() for x in torch.cuda.get_rng_state_all()]}


def set_random_states(states: dict) -> None:
    """The reverse of ``random_states``."""
    import numpy

    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy.random.set_state(tuple(states["numpy"]))  # noqa: NPY002
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


class Checkpoints:
    """The state of a run on disk, ``checkpoints/step_000100/``: whole or not there at all.

        policy/ critic/   DeepSpeed's own: the weights, and each rank's part of fp32 master weights and optimizer
        reference.pt      weights of a reference that moves, and their fp32 average
        rng_0.pt ...      random states of each rank
        state.json        whatever is numbers, with the arguments, versions and number of ranks
        model/            the policy in Hugging Face format, to use elsewhere; nothing is resumed from it
        manifest.json     size and SHA-256 of all of these, written last

    ``parts`` has the first ones by name: DeepSpeed engines, modules, and plain objects whose attributes JSON can hold;
    None is left out. What is in no part follows from the seed and the step: samples, learning rate.
    """

    def __init__(self, log, args, tokenizer, clock, parts: dict, save_weights: Callable):
        self.save_weights = save_weights
        self.log, self.args, self.tokenizer, self.clock = log, args, tokenizer, clock
        self.folder = log.folder / "checkpoints"
        self.rank, self.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.saved_at, self.stopping = time.monotonic(), False
        self.errors: list[str] = []
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.engines = {name: part for name, part in self.parts.items() if hasattr(part, "save_checkpoint")}
        self.modules = {k: v for k, v in self.parts.items() if isinstance(v, nn.Module) and k not in self.engines}
        self.plain = {k: v for k, v in self.parts.items() if not isinstance(v, nn.Module)}
        for engine in self.engines.values():
            engine.checkpoint_engine.save = functools.partial(self._try, engine.checkpoint_engine.save)
            engine._copy_recovery_script = lambda *_: None  # makes of its files what model/ is already

    def load(self, start: Path | None) -> int:
        """Give all parts the state in the checkpoint that rank 0 found; the step after which it was saved, or 0.

        Later checkpoints of the run, damaged or left behind by going back, are set aside.
        """
        start = self._told(start)[0]
        process.Stop.training = True
        if start is None:
            return 0
        state = json.loads((start / "state.json").read_text())
        for name, engine in self.engines.items():
            if engine.load_checkpoint(str(start), tag=name, load_lr_scheduler_states=False)[0] is None:
                raise RuntimeError(f"DeepSpeed found nothing to load in {start / name}")
        for name, module in self.modules.items():
            module.load_state_dict(torch.load(start / f"{name}.pt", map_location="cpu", weights_only=True))
        for name, thing in self.plain.items():
            vars(thing).update(state["parts"][name])
        self.log.best = self._told(rundir.best_so_far(self.log.folder, self.args) if self.rank == 0 else None)[0]
        set_random_states(torch.load(start / f"rng_{self.rank}.pt", map_location="cpu", weights_only=True))
        if self.rank == 0:
            for step, path in rundir.saved_steps(self.log.folder):
                if step > state["step"]:
                    aside = path.with_name(path.name + ".aside")
                    shutil.rmtree(aside, ignore_errors=True)
                    path.rename(aside)
                    print(f"{path} is now {aside.name}: the run goes on from step {state['step']}", flush=True)
        return state["step"]

    def after_step(self, step: int) -> bool:
        """Save if --save_every, --save_minutes or a signal say so. Whether the run is to end, the same on all ranks."""
        late = 0 < self.args.save_minutes <= (time.monotonic() - self.saved_at) / 60
        self.stopping, late = (any(x) for x in zip(*self._told((process.Stop.asked, late)), strict=True))
        if self.stopping or late or (self.args.save_every > 0 and step % self.args.save_every == 0):
            with self.clock("save"):
                self.save(step)
        return self.stopping

    def save(self, step: int) -> bool:
        """Write a checkpoint of the state after ``step``, drop old ones. A full disk costs the checkpoint, not the run.

        Every rank must call. Returns whether there is one now.
        """
        final = self.folder / f"step_{step:06d}"
        partial, self.errors, self.saved_at = final.with_name(final.name + ".partial"), [], time.monotonic()
        if self.rank == 0:
            self._try(self._make_room, partial)
        if not self._went_well(step, partial):
            return False
        for name, engine in self.engines.items():
            engine.save_checkpoint(str(partial), tag=name, save_latest=False)
        self._try(
            self.save_weights, self.parts["policy"], self.tokenizer, partial / "model", self.args.zero_stage, self.rank
        )
        self._try(torch.save, random_states(), partial / f"rng_{self.rank}.pt")
        if self.rank == 0:
            for name, module in self.modules.items():
                self._try(torch.save, module.state_dict(), partial / f"{name}.pt")
            state = {"step": step, "score": self.log.scores.get(step), "wandb_id": self.log.wandb_id}
            state |= {"args": vars(self.args), "versions": process.versions(), "world_size": self.world_size}
            state["parts"] = {name: vars(thing) for name, thing in self.plain.items()}
            self._try((partial / "state.json").write_text, json.dumps(state, indent=1) + "\n")
        self._told(None)  # all have written
        files: dict[str, tuple[int, str]] = {}
        there = self._told([p for p in sorted(partial.rglob("*")) if p.is_file()] if self.rank == 0 else None)[0]
        for path in there[self.rank :: self.world_size]:
            self._try(self._enter, files, partial, path)
        files = {name: entry for part in self._told(files) for name, entry in part.items()}
        if not self._went_well(step, partial):
            return False
        if self.rank == 0:
            self._try(self._finish, files, partial, final)
        return self._went_well(step, partial)

    def _told(self, mine) -> list:
        """What every rank says. All have come so far, then."""
        said = [None] * self.world_size
        torch.distributed.all_gather_object(said, mine)
        return said

    def _try(self, write, *arguments, **named) -> None:
        """Errors of writing are kept: a rank that left here would leave the others waiting in a collective."""
        Watch.beat()
        try:
            write(*arguments, **named)
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is any of these, by who writes
            self.errors.append(f"rank {self.rank}: {type(error).__name__}: {error}")

    def _went_well(self, step: int, partial: Path) -> bool:
        """Whether no rank met an error; where one did, nothing is left but a warning."""
        errors = [error for part in self._told(self.errors) for error in part]
        if errors and self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            then = "the last one counts" if self.stopping else "the run goes on"
            print(f"WARNING: NO CHECKPOINT after step {step}; {then}. {errors[0]}", flush=True)
        return not errors

    def _make_room(self, partial: Path) -> None:
        """An empty folder. Raises OSError where the disk has room for less than 1.2 times the last checkpoint."""
        self.folder.mkdir(exist_ok=True)
        if steps := rundir.saved_steps(self.log.folder):
            size = sum(p.stat().st_size for p in steps[-1][1].rglob("*") if p.is_file())
        else:  # the weights twice, and fp32 master weights and two moments
            weights = [w for engine in self.engines.values() for w in engine.parameters()]
            size = sum(getattr(w, "ds_numel", w.numel()) * (2 * w.element_size() + 12) for w in weights)
        free = shutil.disk_usage(self.folder).free
        if free < 1.2 * size:
            raise OSError(f"{free / 2**30:.2f} GiB free in {self.folder}, {1.2 * size / 2**30:.2f} GiB needed")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()

    def _enter(self, files: dict, partial: Path, path: Path) -> None:
        """Put a written file on the disk and in the manifest."""
        process.sync(path)
        files[str(path.relative_to(partial))] = (path.stat().st_size, process.file_digest(path))

    def _finish(self, files: dict, partial: Path, final: Path) -> None:
        """The manifest, then the name, then ``latest``: wherever this ends, one before is still whole."""
        for log in self.log.folder.glob("*.jsonl"):  # a resume keeps their lines up to this step, and must find them
            process.sync(log)
        process.write_whole(partial / "manifest.json", json.dumps({"files": files}, indent=1) + "\n")
        process.sync(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        process.sync(self.folder)
        process.write_whole(self.folder / "latest", final.name + "\n")
        kept = [path for _, path in rundir.saved_steps(self.log.folder)]
        scores = {}
        for path in kept:
            with contextlib.suppress(OSError, ValueError, KeyError):  # an older one may be damaged: it has no score
                scores[path] = json.loads((path / "state.json").read_text())["score"]
        scores = {path: score for path, score in scores.items() if score is not None}
        best = max(scores, key=scores.get, default=None)  # the oldest of equal ones
        for path in kept[: -self.args.keep_checkpoints] if self.args.keep_checkpoints > 0 else ():
            if path != best:
                path.rename(path.with_name(path.name + ".partial"))
        for path in self.folder.glob("step_*.partial"):
            shutil.rmtree(path, ignore_errors=True)

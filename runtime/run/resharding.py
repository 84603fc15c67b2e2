"""Reshard the optimizer state of a checkpoint, so that a run resumes on another number of ranks.

DeepSpeed rejects such a checkpoint, and its universal format is a second copy on the disk that knows only Adam. Here
each rank takes its own part out of the files of all ranks that saved, which are mapped into memory, and DeepSpeed's own
loader gets it as if as many ranks had saved the checkpoint. Written against the files of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runtime.system.process import refuse

Shapes = list[dict[str, torch.Size]]  # of the weights in each flat tensor of the optimizer, in the order they stand


class Unit(NamedTuple):
    """Numbers that are cut into one part for each rank, all of one length, with padding at the end of the last.

    Stages 1 and 2 of ZeRO cut all weights of a flat tensor at once, stage 3 cuts every weight.
    """

    name: str
    count: int  # without padding
    part: int  # length of one rank's part
    flat: int  # which flat tensor it is in
    begin: int  # where in it, on every rank


def find_units(shapes: Shapes, stage: int, ranks: int, lengths: list[int]) -> list[list[Unit]]:
    """Return the units of each flat tensor. ``lengths``: of these tensors on one rank, unused by stage 3."""
    found = []
    for flat, group in enumerate(shapes):
        counts = {name: shape.numel() for name, shape in group.items()}
        units = []
        if stage < 3:
            count = sum(counts.values())
            units.append(Unit(str(flat), count, lengths[flat], flat, 0))
        else:
            begin = 0
            for name, count in counts.items():
                part = -(-count // ranks)
                units.append(Unit(name, count, part, flat, begin))
                begin += part
        found.append(units)
    return found


def own_part(parts: list[torch.Tensor], count: int, rank: int, size: int) -> torch.Tensor:
    """Return numbers ``rank * size`` to ``(rank + 1) * size`` of a unit cut into ``parts``; zeros after its end."""
    width = max(1, len(parts[0]))
    place = rank * size
    start = min(place, count)
    end = min(place + size, count)
    first = start // width
    beyond = -(-end // width)
    whole = torch.cat([parts[0][:0], *parts[first:beyond]])
    skipped = start - first * width
    own = whole[skipped : skipped + end - start]
    padding = size - len(own)
    return torch.nn.functional.pad(own, (0, padding))


class SavedState:
    """The optimizer's state of one DeepSpeed engine, in the files of all ranks that saved it."""

    def __init__(self, files: list[dict], units: list[list[Unit]], stage: int):
        """``files``: what each rank saved, ``units``: how it was cut, by flat tensor."""
        self.files = files
        self.places = {unit.name: unit for flat in units for unit in flat}
        self.masters = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        self.inner = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"

    def flats(self, flat: int, key: str | None) -> list[torch.Tensor]:
        """Return each rank's flat tensor ``flat``: an optimizer state, or without a key the master weights."""
        if key is None:
            return [file[self.masters][flat] for file in self.files]
        return [file[self.inner]["state"][flat][key] for file in self.files]

    def own_flat(self, units: list[Unit], key: str | None, rank: int) -> torch.Tensor:
        """Build the flat tensor of a rank that has its part of each of ``units``."""
        pieces = []
        for unit in units:
            was = self.places[unit.name]
            end = was.begin + was.part
            parts = []
            for saved in self.flats(was.flat, key):
                parts.append(saved[was.begin : end])
            own = own_part(parts, unit.count, rank, unit.part)
            pieces.append(own)
        return torch.cat(pieces)

    def cut_anew(self, new: list[list[Unit]], rank: int) -> dict[str, Any]:
        """Return the state ``rank`` would have saved if the checkpoint had been written with the partition ``new``.

        Exits with code 2 for a state that is neither one number for each weight nor the same on all ranks.
        """
        weights = []
        states = []
        for units in new:
            weights.append(self.own_flat(units, None, rank))
            first = self.places[units[0].name].flat
            masters = self.flats(first, None)
            keys = self.files[0][self.inner]["state"].get(first, {})
            state = {}
            for key in keys:
                saved = self.flats(first, key)
                if isinstance(saved[0], torch.Tensor) and saved[0].dim() == 1 and len(saved[0]) >= len(masters[0]):
                    state[key] = self.own_flat(units, key, rank)
                elif all_equal(saved):
                    state[key] = saved[0]
                else:
                    refuse(
                        f"the optimizer's state {key!r} is neither one number for each weight nor the same on all "
                        f"ranks: resume with --num_processes {len(self.files)}"
                    )
            states.append(state)
        inner = dict(self.files[0][self.inner])
        inner["state"] = dict(enumerate(states))
        whole = dict(self.files[0])
        whole[self.masters] = weights
        whole[self.inner] = inner
        return whole


def all_equal(values: list) -> bool:
    """Return True if all ranks saved the same number, as such or as a scalar tensor."""
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return values == [first] * len(values)
    return first.dim() == 0 and all(torch.equal(first, value) for value in values)


class SavedElsewhere:
    """Reads a checkpoint of ``ranks`` ranks, in place of an engine's ``checkpoint_engine``, as if we had saved it."""

    def __init__(self, engine, folder: Path, ranks: int):
        """``folder``: of the files of this engine, of which DeepSpeed calls the name a tag."""
        self.engine = engine
        self.ranks = ranks
        self.stage = engine.zero_optimization_stage()
        self.read = engine.checkpoint_engine.load
        self.shapes: Shapes = []  # of the weights, in the order in which they were saved
        place = (str(folder.parent), folder.name)
        self.common = engine._get_ckpt_name(*place, pp_placeholder="0")  # stage 3 has one for each rank, all the same
        self.parts = engine._get_mp_rank_zero_checkpoint_names(*place, 0, ranks, engine.bfloat16_enabled())

    def load(self, path: str, map_location) -> dict[str, Any]:
        """Replace torch.load for DeepSpeed, which asks for the common file first: return this rank's file ``path``."""
        if path != self.common:
            return {"optimizer_state_dict": self.own_state()}
        saved = self.read(path, map_location=map_location)
        self.shapes = saved["param_shapes"]
        frozen = saved.get("frozen_param_fragments") or {}
        if self.stage == 3 and any(weight.numel() > 0 for weight in frozen.values()):
            refuse(f"{path}: ZeRO 3 has cut frozen weights, too; resume with --num_processes {self.ranks}")
        return saved | {"dp_world_size": torch.distributed.get_world_size()}

    def own_state(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer's state."""
        files = []
        for path in self.parts:
            file = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
            files.append(file["optimizer_state_dict"])
        optimizer = self.engine.optimizer
        lengths = []
        own_lengths = []
        if self.stage < 3:
            saved_weights = files[0]["single_partition_of_fp32_groups"]
            lengths = [len(weights) for weights in saved_weights]
            for group in optimizer.param_groups:
                (weights,) = group["params"]
                own_lengths.append(len(weights))
        size = torch.distributed.get_world_size()
        old = find_units(self.shapes, self.stage, self.ranks, lengths)
        own_shapes = self.engine._get_zero_param_shapes()
        new = find_units(own_shapes, self.stage, size, own_lengths)
        saved = SavedState(files, old, self.stage)
        state = saved.cut_anew(new, torch.distributed.get_rank())
        if self.stage == 3:  # whose flat tensors are limited in length: there may be another number of them
            owners = optimizer.sub_group_to_group_id
            groups = state["optimizer_state_dict"]["param_groups"]
            for k, group in enumerate(groups):
                group["params"] = [flat for flat in owners if owners[flat] == k]
        return state


@contextlib.contextmanager
def saved_by(ranks: int, engine, folder: Path) -> Iterator[None]:
    """Make ``engine.load_checkpoint`` take a checkpoint of ``ranks`` ranks, another number than there are."""
    saved = SavedElsewhere(engine, folder, ranks)
    engine._get_all_ckpt_names = lambda *_: [saved.common]
    engine.checkpoint_engine.load = saved.load
    try:
        yield
    finally:
        del engine._get_all_ckpt_names, engine.checkpoint_engine.load

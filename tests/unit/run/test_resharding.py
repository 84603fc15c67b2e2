"""Another number of ranks than a checkpoint was saved by: each rank gets its own part of every number, once.

tests/runs/test_processes.py resumes real runs so.
"""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from helpers import rejected

from runtime.run import resharding

SHAPES = {"a": (3, 5), "b": (7,), "c": (2, 2, 2), "d": (9, 3)}
PADDING = 777.0  # in what was saved, where DeepSpeed has zeros: it must not come back as a weight


def flat_tensors(values: dict[str, torch.Tensor], groups: list[str], stage: int, ranks: int, rank: int, padding: float):
    """One rank's flat tensor of each group of weights: "ab" is one of a and b."""
    flats = []
    for group in groups:
        units = [values[name].flatten() for name in group]
        align = 1
        if stage < 3:
            units = [torch.cat(units)]
            align = 2
        parts = []
        for unit in units:
            missing = -len(unit) % (align * ranks)
            padded = torch.cat([unit, torch.full((missing,), padding)])
            parts.append(padded.chunk(ranks)[rank])
        flats.append(torch.cat(parts))
    return flats


def saved_files(values: dict[str, dict], groups: list[str], stage: int, ranks: int, padding: float = 0.0) -> list[dict]:
    """Return each rank's saved master weights and two moments, from ``values`` by kind and name of a weight."""
    total = [sum(values["fp32"][name].numel() for name in group) for group in groups]
    files = []
    for rank in range(ranks):
        flats = {kind: flat_tensors(v, groups, stage, ranks, rank, padding) for kind, v in values.items()}
        masters = flats.pop("fp32")
        states = {}
        for k in range(len(groups)):
            states[k] = {"step": torch.tensor(5.0), **{kind: flat[k] for kind, flat in flats.items()}}
        inner = {"state": states, "param_groups": [{"lr": 0.1, "params": list(range(len(groups)))}]}
        if stage == 3:
            files.append({"fp32_flat_groups": masters, "optimizer_state_dict": inner})
        else:  # DeepSpeed saves these without the padding at their end
            lean = [m[: max(0, n - rank * len(m))] for m, n in zip(masters, total, strict=True)]
            files.append({"single_partition_of_fp32_groups": lean, "base_optimizer_state": inner})
    return files


def shapes_of(groups: list[str]) -> resharding.Shapes:
    return [{name: torch.Size(SHAPES[name]) for name in group} for group in groups]


def units_of(groups: list[str], stage: int, files: list[dict]) -> list[list[resharding.Unit]]:
    lengths = []
    if stage < 3:
        lengths = [len(state["exp_avg"]) for state in files[0]["base_optimizer_state"]["state"].values()]
    return resharding.find_units(shapes_of(groups), stage, len(files), lengths)


@pytest.fixture(scope="module")
def values() -> dict[str, dict]:
    torch.manual_seed(0)
    kinds = ("fp32", "exp_avg", "exp_avg_sq")
    return {kind: {name: torch.randn(shape) for name, shape in SHAPES.items()} for kind in kinds}


@pytest.mark.parametrize("stage, old, new", [(2, ["ab", "cd"], ["ab", "cd"]), (3, ["ab", "cd"], ["a", "bcd"])])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("then", [1, 2, 3, 4])
def test_every_rank_gets_what_it_would_have_saved(values, stage, old, new, ranks, then):
    """Weights, both moments and the count of steps, cut for any number of ranks, in other flat tensors too."""
    files = saved_files(values, old, stage, ranks, PADDING)
    expected = saved_files(values, new, stage, then)
    for rank, own in enumerate(expected):
        saved = resharding.SavedState(files, units_of(old, stage, files), stage)
        got = saved.cut_anew(units_of(new, stage, expected), rank)
        masters, inner = list(own)
        for wanted, weights in zip(own[masters], got[masters], strict=True):
            assert torch.equal(weights[: len(wanted)], wanted)
            assert not weights[len(wanted) :].any(), "padding is 0"
        states = own[inner]["state"]
        assert list(got[inner]["state"]) == list(states)
        for k, state in states.items():
            assert got[inner]["state"][k].keys() == state.keys()
            for key, wanted in state.items():
                assert torch.equal(got[inner]["state"][k][key], wanted), key


def test_states_that_belong_to_no_weight_are_refused(values, capsys):
    """Rows and columns of a factored moment, and a count that differs from rank to rank: nobody knows the new parts."""
    for key, value in (("exp_avg_sq_row", torch.ones(3)), ("step", torch.tensor(6.0))):
        files = saved_files(values, ["ab", "cd"], 2, 2)
        for state in files[1]["base_optimizer_state"]["state"].values():
            state[key] = value
        for state in files[0]["base_optimizer_state"]["state"].values():
            state.setdefault(key, value)
        units = units_of(["ab", "cd"], 2, files)
        message = rejected(capsys, resharding.SavedState(files, units, 2).cut_anew, units, 0)
        assert repr(key) in message and "--num_processes 2" in message


NAMES = ("_get_ckpt_name", "_get_zero_ckpt_prefix", "_get_rank_zero_ckpt_name", "_get_mp_rank_zero_checkpoint_names")


class Reader:
    """DeepSpeed's checkpoint engine."""

    def load(self, path, map_location):
        return torch.load(path, map_location=map_location)


def engine_of(stage: int, groups: list[str], own: dict) -> types.SimpleNamespace:
    """A rank's engine, as far as a checkpoint's names and parts ask for it; ``own``: what this rank would save."""
    inner = own["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    optimizer = types.SimpleNamespace(
        dp_process_group=None,
        param_groups=[{"params": [state["exp_avg"]]} for state in inner["state"].values()],
        sub_group_to_group_id=dict.fromkeys(range(len(groups)), 0),
    )
    engine = types.SimpleNamespace(
        optimizer=optimizer,
        checkpoint_engine=Reader(),
        checkpoint_mp_rank=0,
        bfloat16_enabled=lambda: True,
        zero_optimization_stage=lambda: stage,
        zero_optimization_partition_weights=lambda: stage == 3,
        _get_zero_param_shapes=lambda: shapes_of(groups),
    )
    for name in NAMES:
        setattr(engine, name, types.MethodType(getattr(DeepSpeedEngine, name), engine))
    return engine


def write_checkpoint(folder: Path, files: list[dict], groups: list[str], stage: int, frozen: torch.Tensor) -> None:
    """The files of ranks, by the names that DeepSpeed gives them."""
    folder.mkdir()
    common = {"param_shapes": shapes_of(groups), "frozen_param_fragments": {"e": frozen}, "dp_world_size": len(files)}
    for rank, file in enumerate(files):
        torch.save({"optimizer_state_dict": file}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        torch.save(common, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    torch.save(common, folder / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("stage, old, new", [(2, ["ab", "cd"], ["ab", "cd"]), (3, ["ab", "cd"], ["a", "bcd"])])
def test_an_engine_reads_the_files_of_other_ranks_as_its_own(values, tmp_path, monkeypatch, stage, old, new):
    """Rank 2 of three, of a checkpoint of two: the common file first, as DeepSpeed does, then its part of all files."""
    write_checkpoint(tmp_path / "policy", saved_files(values, old, stage, 2, PADDING), old, stage, torch.empty(0))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 2)
    own = saved_files(values, new, stage, 3)[2]
    engine = engine_of(stage, new, own)
    with resharding.saved_by(2, engine, tmp_path / "policy"):
        (common,) = engine._get_all_ckpt_names(str(tmp_path), "policy")
        assert engine.checkpoint_engine.load(common, map_location="cpu")["dp_world_size"] == 3
        found = engine.checkpoint_engine.load("this rank's file, which there is not", map_location="cpu")
    assert engine.checkpoint_engine.load(common, map_location="cpu")["dp_world_size"] == 2, "as before"
    state = found["optimizer_state_dict"]
    masters, inner = list(own)
    for k, wanted in enumerate(own[masters]):
        assert torch.equal(state[masters][k][: len(wanted)], wanted)
        assert torch.equal(state[inner]["state"][k]["exp_avg"], own[inner]["state"][k]["exp_avg"])
    assert stage < 3 or state[inner]["param_groups"] == own[inner]["param_groups"]


def test_frozen_weights_that_stage_3_has_cut_are_refused(values, tmp_path, monkeypatch, capsys):
    """Each rank's file has a part of them, and only one file is read; stage 2 has them whole in every file."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda *_: 2)
    for stage in (2, 3):
        files = saved_files(values, ["abcd"], stage, 2)
        write_checkpoint(tmp_path / str(stage), files, ["abcd"], stage, torch.ones(1))
        engine = engine_of(stage, ["abcd"], files[0])
        with resharding.saved_by(2, engine, tmp_path / str(stage)):
            (common,) = engine._get_all_ckpt_names(str(tmp_path), str(stage))
            if stage == 2:
                engine.checkpoint_engine.load(common, map_location="cpu")
                continue
            with pytest.raises(SystemExit) as end:
                engine.checkpoint_engine.load(common, map_location="cpu")
    assert end.value.code == 2 and "--num_processes 2" in capsys.readouterr().err

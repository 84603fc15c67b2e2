"""Dither of the fp32 masters: bf16 weights start as in the checkpoint, and move as fp32 weights do on average."""

from __future__ import annotations

import pytest
import torch
from helpers import SMALL, run_here, tiny_args

from runtime.training import deepspeed_zero

MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
STEP = {**SMALL, "dtype": "bfloat16", "total_steps": 1, "eval_prompts": 0, "learning_rate": 1e-5}


def trained(tiny, out, monkeypatch, script: str, changes: dict, dither) -> list[tuple[torch.Tensor, ...]]:
    """Take an optimizer step; return (masters of the checkpoint, with dither, and after the step), per group."""
    found = []

    def look(engine):
        masters = next(getattr(engine.optimizer, name) for name in MASTERS if hasattr(engine.optimizer, name))
        before = [master.clone() for master in masters]
        dither(engine)
        found.extend(zip(before, [master.clone() for master in masters], masters, strict=True))
        return engine

    monkeypatch.setattr(deepspeed_zero, "dither_masters", look)
    run_here(tiny_args(tiny, out, script, **{**STEP, **changes}), script)
    return found


def followed(before: torch.Tensor, dithered: torch.Tensor, after: torch.Tensor) -> float:
    """Return the share of the masters' motion that the bf16 weights make: the slope of the regression through zero."""
    moved = (after - dithered).double()
    rounded = (after.bfloat16().double() - before.double()).double()
    return ((rounded * moved).sum() / moved.square().sum()).item()


@pytest.mark.parametrize(
    "script, changes",
    [
        ("grpo", {}),
        pytest.param("ppo", {"zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param("grpo", {"zero_stage": 3}, marks=pytest.mark.slow),
        pytest.param("grpo", {"offload": ("optimizer",)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_small_updates_of_bf16_weights_count_from_the_first_step_on(tiny, tmp_path, monkeypatch, script, changes):
    """With dither the weights follow their masters; without it, at this rate, nearly nothing happens."""
    dither = deepspeed_zero.dither_masters
    groups = trained(tiny, tmp_path / "with", monkeypatch, script, changes, dither)
    assert len(groups) == (2 if script == "ppo" else 1)
    for before, dithered, _ in groups:
        zero = before == 0
        assert torch.equal(dithered[zero], before[zero])
        assert torch.equal(dithered.bfloat16(), before.bfloat16())
        # 16 bits of the mantissa are beyond bf16's: as integers the noise is uniform and has no mean
        noise = (dithered.view(torch.int32) - before.view(torch.int32))[~zero].double()
        assert noise.abs().max() < 2**15
        assert abs(noise.mean()) < 4 * 2**15 / (3 * noise.numel()) ** 0.5
        assert noise.std() == pytest.approx(2**15 / 3**0.5, rel=0.01)
    assert followed(*groups[0]) == pytest.approx(1, abs=0.1)
    plain = trained(tiny, tmp_path / "without", monkeypatch, script, changes, lambda engine: engine)
    assert torch.equal(plain[0][0], plain[0][1]) and followed(*plain[0]) < 0.5
    again = trained(tiny, tmp_path / "again", monkeypatch, script, changes, dither)
    assert torch.equal(again[0][1], groups[0][1])  # the seed decides
    other = trained(tiny, tmp_path / "other", monkeypatch, script, {**changes, "seed": 2}, dither)
    assert not torch.equal(other[0][1], groups[0][1])


def test_fp32_has_no_dither(tiny, tmp_path, monkeypatch):
    """Its weights are their own masters, and noise would change the model."""
    changes = {"dtype": "float32"}
    ((before, dithered, _),) = trained(tiny, tmp_path, monkeypatch, "grpo", changes, deepspeed_zero.dither_masters)
    assert torch.equal(dithered, before)

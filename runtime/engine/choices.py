"""Data type, sizes, layout and attention: chosen by each rank for its device, and decided once for all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from runtime.engine.vllm_settings import memory_setting
from runtime.system import agreement, process
from runtime.training import memory, pretrained
from runtime.training.attention import choose_layout
from runtime.training.memory import Setting, Sizes
from runtime.training.model_files import Model, read_model

PATIENCE = 1800.0  # seconds in which all ranks have read their data, where --timeout sets no limit


@dataclass(frozen=True)
class Choices:
    """Settings that the machine decides where flags leave them open, with reasons for the start of a run."""

    dtype: torch.dtype
    sizes: Sizes
    reason: str
    layout: str
    layout_reason: str
    attention: str
    model: Model | None
    setting: Setting


def choose(args, device: torch.device, dtype: torch.dtype, attention: str, facts: dict[str, dict[str, Any]]) -> Choices:
    """Choose for this device, and take what is decided for all. Exits with code 2 where ``facts`` of ranks differ.

    ``dtype`` and ``attention``: as ``pretrained.resolve_device`` chose them here.
    """
    world_size = process.world_size()
    model = read_model(args.model)
    setting = memory_setting(args, dtype, world_size)
    sizes, reason = memory.sizes_for(args, model, setting)
    memory.check_host(args, model, setting)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    layout, attention, why = choose_layout(args, sizes, capability >= pretrained.MODERN_GPU, dtype, attention)
    mine = {
        "capability": list(capability),
        "card": setting.card,
        "dtype": str(dtype).removeprefix("torch."),
        "sizes": vars(sizes),
        "layout": layout,
        "attention": attention,
    }
    found = [{"facts": facts, "choices": mine}]
    if not args.dry_run:  # a single process can describe a launch of any size
        found = agreement.exchange("start", found[0], args.timeout or PATIENCE)
    agreement.check_equal([of_rank["facts"] for of_rank in found])
    ours = agreement.decided([of_rank["choices"] for of_rank in found])
    dtype = getattr(torch, ours["dtype"])
    if ours["sizes"] != vars(sizes):
        reason = "as decided for all ranks"
    return Choices(
        dtype=dtype,
        sizes=Sizes(**ours["sizes"]),
        reason=reason,
        layout=ours["layout"],
        layout_reason=why,
        attention=ours["attention"],
        model=model,
        setting=setting,
    )

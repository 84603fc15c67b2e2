"""Keep an engine that is built in the trainer's process from changing what the trainer uses.

vLLM 0.32 serves some architectures (OLMo, SmolLM3, Phi-2, GPT-NeoX, ...) by transformers' own classes, and gives the
decoder's class, of which the trainer's models are, another ``__init__``, ``__call__`` and base class for torch.compile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch


def matmul_precision() -> str | None:
    """Return the precision of fp32 products, or None if torch's newer options set it and this one has no value."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def settings() -> list[tuple[Callable, Callable]]:
    """Return the functions that read and write settings of the entire process."""
    from torch import _dynamo  # takes two seconds, which only a run with an engine pays

    options = [(torch, "set_num_threads"), (torch.backends.cudnn, "benchmark"), (_dynamo.config, "recompile_limit")]
    options += [(torch.backends.cuda.matmul, "fp32_precision"), (torch.backends.mkldnn.matmul, "fp32_precision")]
    return [
        (torch.get_default_dtype, torch.set_default_dtype),
        (matmul_precision, torch.set_float32_matmul_precision),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        *((partial(getattr, *option), partial(setattr, *option)) for option in options),
    ]


@contextmanager
def kept_apart() -> Iterator[None]:
    """Build an engine inside. Afterwards the trainer's classes and settings are as they were before."""
    kept = [(read, write, read()) for read, write in settings()]
    variables = dict(os.environ)
    try:
        with torch.random.fork_rng(devices=[]), private_classes():
            yield
    finally:
        for read, write, value in kept:
            if value is not None and read() != value:
                write(value)
        os.environ |= variables  # those that are new stay: an engine reads its own later on


@contextmanager
def private_classes() -> Iterator[None]:
    """Let transformers build models from configs as instances of new subclasses, which an engine may change.

    ``from_pretrained``, by which the trainer loads its models, is not affected.
    """
    from transformers import PreTrainedModel

    shared = vars(PreTrainedModel)["_from_config"]
    subclasses: dict[type, type] = {}

    def build(cls: type, config, **options):
        if cls not in subclasses:  # transformers finds the source of a class, and records about it, by these names
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
            subclasses[cls] = type(cls.__name__, (cls,), names)
        return shared.__func__(subclasses[cls], config, **options)

    PreTrainedModel._from_config = classmethod(build)
    try:
        yield
    finally:
        PreTrainedModel._from_config = shared

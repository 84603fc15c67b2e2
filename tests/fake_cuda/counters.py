"""Counters of the stub libraries, by name: stubs/device.c has the names. On a real GPU, without stubs, all are 0."""

from __future__ import annotations

import ctypes
import os

STUBS = ctypes.CDLL(None)  # they are preloaded
COMPUTES = not hasattr(STUBS, "fake_count")  # kernels do
REAL = COMPUTES or bool(os.environ.get("REAL_GPU"))  # check.py --gpu, which can be tried under the stubs
if not REAL:
    STUBS.fake_count.restype = ctypes.c_longlong
    STUBS.fake_count.argtypes = [ctypes.c_char_p]
    STUBS.fake_used.restype = ctypes.c_size_t
    STUBS.fake_access.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]


def count(name: str) -> int:
    """Return a counter; -1 for a name that the stubs do not have."""
    return 0 if REAL else STUBS.fake_count(name.encode())


def counted(action, *names: str) -> list[int]:
    """Return how much an action adds to counters."""
    before = [count(name) for name in names]
    action()
    return [count(name) - old for name, old in zip(names, before, strict=True)]

"""Count the bytes that a process has taken from malloc and not freed."""

from __future__ import annotations

import ctypes

MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class Malloc(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]


def heap_in_use() -> int:
    """Return the bytes that this process has taken from malloc and not freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Malloc
    found = mallinfo2()
    return found.uordblks + found.hblkhd

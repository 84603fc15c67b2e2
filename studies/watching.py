"""Watch the functions that a training script's ``main`` calls, from outside of the script."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def watch(owner: Any, name: str, before: Callable | None = None, after: Callable | None = None) -> Callable[[], None]:
    """Have ``before`` get the arguments of each call of a function, and ``after`` its result and them.

    ``owner``: a module or a class that has the function, or AttributeError is raised. Returns what ends the watching.
    """
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def watched(*args, **named):
        if before is not None:
            before(*args, **named)
        result = plain(*args, **named)
        if after is not None:
            after(result, *args, **named)
        return result

    setattr(owner, name, watched)
    return lambda: setattr(owner, name, plain)

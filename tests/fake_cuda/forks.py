"""Work in forks of a process: torch and vLLM read a card once, and imports need not be repeated."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable


def in_a_fork(work: Callable, variables: dict[str, str], quiet: bool = False):
    """Return what ``work`` returns, through JSON, from a fork with these environment variables.

    Where it raises: {"error": name of the exception}, and the traceback on stderr unless ``quiet``.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.environ |= variables
        try:
            found = work()
        except BaseException as error:
            if not quiet:
                traceback.print_exc()
            found = {"error": type(error).__name__}
        with os.fdopen(write, "w") as end:
            json.dump(found, end)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as end:
        text = end.read()
    os.waitpid(child, 0)
    return json.loads(text or '{"error": "killed"}')

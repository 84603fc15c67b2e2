"""Query git about a folder. Imports the standard library only, so it works on a login node."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any


def output(folder: Path, *words: str) -> str:
    """Return the output of a git command in ``folder``; "" without git, outside a repository, or after an error."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def state(folder: Path) -> dict[str, Any]:
    """Return the commit of ``folder`` and whether a tracked file differs from it; {} outside a repository.

    In a job of scripts/submit.py, CODE_COMMIT says it: the job runs in a copy, which has no repository of its own.
    """
    if given := os.environ.get("CODE_COMMIT"):
        return {"commit": given.removesuffix("-dirty"), "dirty": given.endswith("-dirty")}
    commit = output(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return {}
    return {"commit": commit.strip(), "dirty": bool(output(folder, "diff", "HEAD"))}

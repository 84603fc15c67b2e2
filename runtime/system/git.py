"""Query git about a folder. Imports the standard library only, so it works on a login node."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def output(folder: Path, *words: str) -> str:
    """Return the output of a git command in ``folder``; "" without git, outside a repository, or after an error."""
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        return ""
    if done.returncode not in (0, 1):  # 1: git diff --no-index found a difference
        return ""
    return done.stdout


def untracked(folder: Path, names: Sequence[str]) -> list[str]:
    """Return those of the files ``names`` that git does not track yet."""
    return [name for name in dict.fromkeys(names) if output(folder, "ls-files", "--others", "--", name)]


def diff(folder: Path, names: Sequence[str] = ()) -> str:
    """Return the diff of ``folder`` against its commit, including the untracked files among ``names``."""
    found = output(folder, "diff", "HEAD")
    for name in untracked(folder, names):
        found += output(folder, "diff", "--no-index", "--", "/dev/null", name)
    return found


def state(folder: Path, names: Sequence[str] = ()) -> dict[str, Any]:
    """Return the commit of ``folder`` and whether ``diff`` finds a difference from it; {} outside a repository.

    In a job of scripts/submit.py, CODE_COMMIT says it: the job runs in a copy, which has no repository of its own.
    """
    if given := os.environ.get("CODE_COMMIT"):
        return {"commit": given.removesuffix("-dirty"), "dirty": given.endswith("-dirty")}
    commit = output(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return {}
    return {"commit": commit.strip(), "dirty": bool(diff(folder, names))}

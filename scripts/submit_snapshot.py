"""Take a snapshot of the code in a folder as a tree of git, and make the copy of it in which a job runs.

Git decides what a tracked file is, and which modes and symbolic links it keeps; its own index is not touched. Standard
library only, so that it runs on a login node.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runtime.system import git

CODE = (".py", ".sh", ".jinja", ".yaml")  # endings of new files that are part of a snapshot as well
NAMED = re.compile(rf"(?<![\w./~$-])[^\s,:;='\"()&|<>]+(?:{'|'.join(map(re.escape, CODE))})(?![\w./])")
NO_CODE = (":!runs", ":(exclude,glob)**/????????-??????-????/**")  # results, and the folders of other submissions
PARALLEL = ("-c", "checkout.workers=16")  # a shared disk may take tens of milliseconds for each operation


def run_git(folder: Path, *words: str, names: Iterable[str] = (), env: dict[str, str] | None = None) -> str:
    """Return the output of a git command in ``folder``, which reads ``names``. Raises ValueError if it fails."""
    given = "\0".join(names)
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=folder,
            input=os.fsencode(given),
            capture_output=True,
            env=os.environ | (env or {}),
        )
    except FileNotFoundError:
        raise ValueError("it is not installed here") from None
    if done.returncode != 0:
        raise ValueError(os.fsdecode(done.stderr).strip())
    return os.fsdecode(done.stdout)


def listed(folder: Path, command: str, *words: str, env: dict[str, str] | None = None) -> list[str]:
    """Return the entries that a git command in ``folder`` lists."""
    entries = run_git(folder, command, "-z", *words, env=env)
    return entries.split("\0")[:-1]


@contextmanager
def index_of(folder: Path, tree: str) -> Iterator[dict[str, str]]:
    """Yield the environment in which git has an index of ``tree`` for ``folder``, apart from the index of its user."""
    with tempfile.TemporaryDirectory() as place:
        repository = run_git(folder, "rev-parse", "--absolute-git-dir")
        env = {
            "GIT_DIR": repository.removesuffix("\n"),
            "GIT_WORK_TREE": str(folder),
            "GIT_INDEX_FILE": f"{place}/index",
        }
        run_git(folder, "read-tree", tree, env=env)
        yield env


def take(folder: Path, words: Sequence[str] = ()) -> tuple[str, str]:
    """Return two trees of git: ``folder`` in the last commit, and ``folder`` as it is now.

    The second has the tracked files, new files of code that git does not ignore, and what ``words``, those of a
    command, name that git ignores, with the code next to it. Raises ValueError outside a repository.
    """
    empty = run_git(folder, "mktree").strip()
    base = git.output(folder, "rev-parse", "--verify", "--quiet", "HEAD:./").strip()
    if base:
        names = listed(folder, "diff", "--name-only", "--relative", "--no-renames", "HEAD")
    else:
        base = empty
        names = listed(folder, "ls-files")
    endings = [f"*{ending}" for ending in CODE]
    names += listed(folder, "ls-files", "--others", "--exclude-standard", "--", *endings, *NO_CODE)
    for word in itertools.chain.from_iterable(map(named_files, words)):
        name = relative(folder / word, folder)
        if name.startswith(("../", "runs/")) or not os.path.isfile(folder / name):
            continue
        place = os.path.dirname(name) or name  # the root has folders of data, and is not searched
        beside = listed(folder, "ls-files", "--others", "--", f":(literal){place}")
        names += [found for found in beside if found.endswith(CODE)]
    with index_of(folder, base) as env:
        run_git(folder, "update-index", "--add", "--remove", "-z", "--stdin", names=names, env=env)
        return base, run_git(folder, "write-tree", env=env).strip()


def named_files(word: str) -> list[str]:
    """Return what may be files of code in a word of a command: alone, in ``a.py:f,b.py:g``, or in a line of shell."""
    if not any(ending in word for ending in CODE):
        return []
    return list(dict.fromkeys([word, *NAMED.findall(word)]))


def relative(path: str | Path, folder: str | Path) -> str:
    """Return the path relative to ``folder``, also where one of the two goes through a symbolic link."""
    folder_of_path, name = os.path.split(path)
    place = os.path.join(os.path.realpath(folder_of_path), name)
    start = os.path.realpath(folder)
    return os.path.relpath(place, start)


def make_output_folders(folder: Path, words: Sequence[str]) -> None:
    """Make the relative folders that a command names for results (``--output_dir out``), so that a copy links them."""
    parts = [part for word in words for part in word.split("=", 1)]
    for flag, name in itertools.pairwise(parts):
        if re.fullmatch(r"--\w*[_-]dir", flag) and re.match("[^-~$/]", name):
            (folder / name).mkdir(parents=True, exist_ok=True)


def copy(folder: Path, tree: str, place: Path) -> list[str]:
    """Check ``tree`` out in the new folder ``place``, and link everything else in ``folder`` from there.

    A symbolic link leads to the copy of its goal, or out of ``folder``; returns the links of code that lead out.
    Submodules are copied as they are now.
    """
    outside = []
    place.mkdir(parents=True, exist_ok=True)
    with index_of(folder, tree) as env:
        run_git(folder, *PARALLEL, "checkout-index", "--all", f"--prefix={place}/", env=env)
        tracked = listed(folder, "ls-files", "--stage", env=env)
        others = listed(folder, "ls-files", "--others", "--directory", env=env)
    for name in others:
        link = place / name
        if link.name != "__pycache__":
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(folder / name)
    for entry in tracked:
        about, _, name = entry.partition("\t")
        own = folder / name
        copied = place / name
        if about.startswith("120000"):
            goal = os.path.realpath(own)
            inside = relative(goal, folder)
            copied.unlink()
            if inside.startswith("../"):
                copied.symlink_to(goal)
                if goal.endswith(CODE) or os.path.isdir(goal):
                    outside.append(name)
            else:
                copied.symlink_to(os.path.relpath(place / inside, copied.parent))
        elif about.startswith("160000") and (own / ".git").exists():
            _, submodule = take(own)
            outside += copy(own, submodule, copied)
    return outside


def list_files(place: Path) -> None:
    """Write the list of the files in a copy beside it, by which its job knows the files that are new."""
    files = []
    for top, _, names in os.walk(place):
        files += [os.path.relpath(f"{top}/{name}", place) for name in names]
    lines = sorted(os.fsencode(f"./{file}\n") for file in files)
    place.with_name("code.files").write_bytes(b"".join(lines))

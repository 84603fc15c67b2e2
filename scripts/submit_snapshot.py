"""Copy the code of a folder for one submission: later edits, checkouts and submissions do not change what its job runs.

Standard library only, so that it runs on a login node.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime.system import git

CODE = (".py", ".sh", ".jinja", ".yaml")  # endings of new files that are taken along as well
PICTURES = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".pdf")
LARGEST = 2**20  # bytes of a file that is copied; a larger one is data, and is linked
MOST = 10_000  # files; more are no folder of code
NO_CODE = {"__pycache__", "node_modules", "runs", "models"}
OUTPUT = re.compile(r"--\w*[_-]dir")


def code_files(folder: Path, named: Iterable[str]) -> list[str]:
    """Paths, relative to ``folder``, of its code: what git tracks, new files of code, and the scripts ``named``.

    Files of code are new if git neither tracks nor ignores them. Without git, every file of code counts that is not in
    a hidden folder or an environment of Python. Raises ValueError for more than ``MOST`` files.
    """
    names = set(inside(folder, named))
    if git.output(folder, "rev-parse", "--git-dir"):
        names |= listed(folder, "--recurse-submodules")
        new = listed(folder, "--others", "--exclude-standard")
        names |= {name for name in new if name.endswith(CODE)}
    else:
        names |= found(folder)
    if len(names) > MOST:
        raise ValueError(f"{folder} has more than {MOST} files of code")
    return sorted(name for name in names if to_be_copied(folder / name))


def listed(folder: Path, *options: str) -> set[str]:
    """Return the files that ``git ls-files`` lists."""
    names = git.output(folder, "ls-files", "-z", *options)
    return set(names.split("\0")) - {""}


def found(folder: Path) -> set[str]:
    """The files of code in a folder without a repository, a few more than ``MOST`` at most."""
    names = set()
    for place, folders, files in os.walk(folder):
        if "pyvenv.cfg" in files:
            folders.clear()
            continue
        folders[:] = [name for name in folders if name[0] != "." and name not in NO_CODE]
        for file in files:
            if file.endswith(CODE):
                names.add(os.path.relpath(os.path.join(place, file), folder))
        if len(names) > MOST:
            break
    return names


def inside(folder: Path, named: Iterable[str]) -> list[str]:
    """The files among ``named`` that lie in ``folder``, as paths relative to it."""
    paths = [os.path.relpath(folder / name, folder) for name in named]
    return [path for path in paths if not path.startswith("..")]


def to_be_copied(path: Path) -> bool:
    """Return True if a file belongs into the copy; a large one and a picture are linked instead."""
    if path.is_symlink():
        return path.exists()
    if not path.is_file() or path.name.endswith(PICTURES):
        return False
    return path.stat().st_size <= LARGEST


def output_folders(folder: Path, words: Sequence[str]) -> list[Path]:
    """Folders that the options of a command name for its results (``--output_dir out``), where they are relative."""
    pairs = list(itertools.pairwise(words))
    pairs += [tuple(word.split("=", 1)) for word in words if "=" in word]
    places = []
    for option, value in pairs:
        if OUTPUT.fullmatch(option) and re.match(r"[^-~$/]", value):
            places.append(folder / value)
    return places


def take(folder: Path, copy: Path, files: Sequence[str], results: Sequence[Path]) -> None:
    """Copy ``files`` of ``folder`` to the new folder ``copy``, and link everything else in ``folder`` from there.

    results: folders to make in ``folder`` if they are missing, so that they are linked as well.
    ``copy`` gets a sibling ``code.files``, the list of what was copied.
    """
    for place in results:
        place.mkdir(parents=True, exist_ok=True)
    copy.mkdir(parents=True)
    copied = set()
    for name in files:
        copied.add(name)
        copied.update(map(str, Path(name).parents))
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(32) as pool:  # a shared file system answers late, but to many at a time
        list(pool.map(lambda name: copy_file(folder, copy, name), files))
    link_rest(folder, copy, copied)
    lines = [f"./{name}\n".encode(errors="surrogateescape") for name in files]
    copy.with_name("code.files").write_bytes(b"".join(sorted(lines)))


def copy_file(folder: Path, copy: Path, name: str) -> None:
    """Copy a file, or a symbolic link; one that leads out of ``folder`` keeps its goal."""
    source = folder / name
    goal = source.resolve()
    if source.is_symlink() and not goal.is_relative_to(folder.resolve()):
        (copy / name).symlink_to(goal)
    else:
        shutil.copy2(source, copy / name, follow_symlinks=False)


def link_rest(folder: Path, copy: Path, copied: set[str], below: str = "") -> None:
    """Link what is in ``folder`` and neither in ``copied`` nor above something in it."""
    for entry in os.scandir(folder / below):
        name = os.path.join(below, entry.name)
        if entry.name in ("__pycache__", ".git"):
            continue
        if name not in copied:
            os.symlink(os.path.abspath(folder / name), copy / name)
        elif entry.is_dir(follow_symlinks=False):
            link_rest(folder, copy, copied, name)

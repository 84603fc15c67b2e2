"""Copy the code of a folder for one submission: later edits, checkouts and submissions do not change what its job runs.

A shared file system may take tens of milliseconds for each operation: a file takes seven here, and many files are on
their way at a time. Standard library only, so that it runs on a login node.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from runtime.system import git

CODE = (".py", ".sh", ".jinja", ".yaml")  # endings of new files that are taken along as well
PICTURES = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".pdf")
LARGEST = 2**20  # bytes of a file that is copied; a larger one is data, and is linked
MOST = 10_000  # files; more are no folder of code
NO_CODE = {"__pycache__", "node_modules", "runs", "models"}
SUBMISSION = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")  # the name of a submission's folder
OUTPUT = re.compile(r"--\w*[_-]dir")


def code_files(folder: Path, named: Iterable[str]) -> list[str]:
    """Return the code in ``folder`` as relative paths: what git tracks, new files of code, and the scripts ``named``.

    Files of code are new if git neither tracks nor ignores them. Without git, every file of code counts that is not in
    a hidden folder or an environment of Python. Raises ValueError for more than ``MOST`` files.
    """
    names = listed(folder, "--recurse-submodules")
    for name in listed(folder, "--others", "--exclude-standard"):
        if name.endswith(CODE) and not is_result(name):
            names.add(name)
    if not names and not git.output(folder, "rev-parse", "--git-dir"):
        names = found(folder)
    for name in inside(folder, named):
        if not is_result(name):
            names.add(name)
    if len(names) > MOST:
        raise ValueError(f"{folder} has more than {MOST} files of code")
    return sorted(name for name in names if not name.endswith(PICTURES))


def is_result(name: str) -> bool:
    """Return True for a file in runs/, or in the folder of another submission."""
    folders = Path(name).parts[:-1]
    return folders[:1] == ("runs",) or any(map(SUBMISSION.fullmatch, folders))


def listed(folder: Path, *options: str) -> set[str]:
    """Return the files that ``git ls-files`` lists."""
    names = git.output(folder, "ls-files", "-z", *options)
    return set(names.split("\0")) - {""}


def found(folder: Path) -> set[str]:
    """Find the files of code in a folder without a repository, a few more than ``MOST`` at most."""
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
    """Return the files among ``named`` that lie in ``folder``, as paths relative to it."""
    paths = [os.path.relpath(folder / name, folder) for name in named]
    return [path for path in paths if not path.startswith("..")]


def output_folders(folder: Path, words: Sequence[str]) -> list[Path]:
    """Return the folders that a command's options name for results (``--output_dir out``), if they are relative."""
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
    copy.parent.mkdir(parents=True, exist_ok=True)
    places = {"."}
    for name in files:
        places.update(map(str, Path(name).parents))
    with ThreadPoolExecutor(32) as pool:
        for _, level in itertools.groupby(sorted(places, key=depth), depth):
            list(pool.map(lambda place: os.mkdir(copy / place), level))
        copied = list(pool.map(lambda name: copy_file(folder, copy, name), files))
        copied = set(itertools.compress(files, copied))
        there = copied | places
        list(pool.map(lambda place: link_rest(folder, copy, place, there), places))
    lines = [f"./{name}\n".encode(errors="surrogateescape") for name in copied]
    copy.with_name("code.files").write_bytes(b"".join(sorted(lines)))


def depth(place: str) -> int:
    """Return the number of folders above a folder."""
    return len(Path(place).parts)


def copy_file(folder: Path, copy: Path, name: str) -> bool:
    """Copy a file or a symbolic link; return False for what is no file, or a large one, or is not there."""
    try:
        source = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return copy_link(folder, copy, name)
        return False
    try:
        state = os.fstat(source)
        if not stat.S_ISREG(state.st_mode) or state.st_size > LARGEST:
            return False
        content = os.read(source, state.st_size)
        while len(content) < state.st_size:
            more = os.read(source, state.st_size)
            if not more:
                break
            content += more
    finally:
        os.close(source)
    mode = stat.S_IMODE(state.st_mode)
    goal = os.open(copy / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        while content:
            written = os.write(goal, content)
            content = content[written:]
    finally:
        os.close(goal)
    return True


def copy_link(folder: Path, copy: Path, name: str) -> bool:
    """Copy a symbolic link; one that leads out of ``folder`` keeps its goal. One that leads nowhere: return False."""
    goal = os.path.realpath(folder / name)
    if not os.path.exists(goal):
        return False
    if Path(goal).is_relative_to(os.path.realpath(folder)):
        goal = os.readlink(folder / name)
    os.symlink(goal, copy / name)
    return True


def link_rest(folder: Path, copy: Path, place: str, there: set[str]) -> None:
    """Link what is in the folder ``place`` of ``folder`` and not in ``there``, which has what ``copy`` has already."""
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder / place):
            name = os.path.normpath(os.path.join(place, entry.name))
            if entry.name in ("__pycache__", ".git") or name in there:
                continue
            os.symlink(os.path.abspath(folder / name), copy / name)

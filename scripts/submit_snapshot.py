"""Take a snapshot of the code in a folder as a tree of git, and make the copy of it in which a job runs.

Git decides what a tracked file is, and which modes and symbolic links it keeps; its own index is not touched. Standard
library only, so that it runs on a login node.
"""

from __future__ import annotations

import base64
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
NO_CODE = (":!runs", ":(exclude,glob)**/????????-??????-????/**")  # results, and the folders of other submissions
PARALLEL = ("-c", "checkout.workers=16")  # a shared disk may take tens of milliseconds for each operation


def run_git(folder: Path, *words: str, names: Iterable[str] = (), env: dict[str, str] | None = None) -> str:
    """Return the output of a git command in ``folder``, which reads ``names``. Raises ValueError if it fails."""
    options = {"input": os.fsencode("\0".join(names)), "capture_output": True, "env": os.environ | (env or {})}
    try:
        done = subprocess.run(["git", *words], cwd=folder, **options)
    except FileNotFoundError:
        raise ValueError("it is not installed here") from None
    if done.returncode != 0:
        raise ValueError(os.fsdecode(done.stderr).strip())
    return os.fsdecode(done.stdout)


def listed(folder: Path, command: str, *words: str, env: dict[str, str] | None = None) -> list[str]:
    """Return the entries that a git command in ``folder`` lists."""
    return run_git(folder, command, "-z", *words, env=env).split("\0")[:-1]


@contextmanager
def index_of(folder: Path, tree: str) -> Iterator[dict[str, str]]:
    """Yield the environment in which git has an index of ``tree`` for ``folder``, apart from the index of its user."""
    with tempfile.TemporaryDirectory() as place:
        repository = run_git(folder, "rev-parse", "--absolute-git-dir").removesuffix("\n")
        env = {"GIT_DIR": repository, "GIT_WORK_TREE": str(folder), "GIT_INDEX_FILE": f"{place}/index"}
        run_git(folder, "read-tree", tree, env=env)
        yield env


def take(folder: Path, words: Sequence[str] = ()) -> tuple[str, str]:
    """Return two trees of git: ``folder`` in the last commit, and ``folder`` as it is now.

    The second has the tracked files, new files of code that git does not ignore, and the scripts among ``words``, the
    words of a command. Raises ValueError outside a repository.
    """
    empty = run_git(folder, "mktree").strip()
    base = git.output(folder, "rev-parse", "--verify", "--quiet", "HEAD:./").strip() or empty
    changed = ["ls-files"] if base == empty else ["diff", "--name-only", "--relative", "--no-renames", "HEAD"]
    new = ["ls-files", "--others", "--exclude-standard", "--", *(f"*{ending}" for ending in CODE), *NO_CODE]
    names = [*listed(folder, *changed), *listed(folder, *new)]
    for word in words:
        name = relative(folder / word, folder) if word.endswith(CODE) else "../"
        if not name.startswith(("../", "runs/")) and os.path.isfile(folder / name):  # also one that git ignores
            names += listed(folder, "ls-files", "--others", "--", f":(literal){name}")
    with index_of(folder, base) as env:
        run_git(folder, "update-index", "--add", "--remove", "-z", "--stdin", names=names, env=env)
        return base, run_git(folder, "write-tree", env=env).strip()


def relative(path: str | Path, folder: str | Path) -> str:
    """Return the path relative to ``folder``, also where one of the two goes through a symbolic link."""
    place = os.path.realpath(os.path.dirname(path))
    return os.path.relpath(os.path.join(place, os.path.basename(path)), os.path.realpath(folder))


def changed_code(folder: Path, base: str, tree: str) -> str | None:
    """Return the files of code that ``base`` lacks or has in another version, as base64 of a tar; None without any.

    An image holds the code of a commit: what was edited since goes along with the job, or the job would run without it.
    """
    changed = listed(folder, "diff", "--name-only", "--no-renames", "--diff-filter=d", base, tree)
    names = [name for name in changed if name.endswith(CODE)]
    if not names:
        return None
    env = {"GIT_LITERAL_PATHSPECS": "1"}
    packed = run_git(folder, "archive", "--format=tar.gz", tree, "--", *names, env=env)
    return base64.encodebytes(os.fsencode(packed)).decode()


def make_output_folders(folder: Path, words: Sequence[str]) -> None:
    """Make the relative folders that a command names for results (``--output_dir out``), so that a copy links them."""
    for flag, name in itertools.pairwise(part for word in words for part in word.split("=", 1)):
        if re.fullmatch(r"--\w*[_-]dir", flag) and re.match("[^-~$/]", name):
            (folder / name).mkdir(parents=True, exist_ok=True)


def copy(folder: Path, tree: str, place: Path) -> None:
    """Check ``tree`` out in the new folder ``place``, and link everything else in ``folder`` from there.

    A symbolic link that leads out of ``folder`` keeps its goal. Submodules are copied as they are now.
    """
    place.mkdir(parents=True, exist_ok=True)
    with index_of(folder, tree) as env:
        run_git(folder, *PARALLEL, "checkout-index", "--all", f"--prefix={place}/", env=env)
        tracked = listed(folder, "ls-files", "--stage", env=env)
        others = listed(folder, "ls-files", "--others", "--directory", env=env)
    for name in others:
        if Path(name).name != "__pycache__":
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).symlink_to(folder / name)
    for entry in tracked:
        mode, name = entry[:6], entry.partition("\t")[2]
        if mode == "120000" and relative(goal := os.path.realpath(folder / name), folder).startswith("../"):
            (place / name).unlink()
            (place / name).symlink_to(goal)
        elif mode == "160000" and (folder / name / ".git").exists():
            copy(folder / name, take(folder / name)[1], place / name)


def list_files(place: Path) -> None:
    """Write the list of the files in a copy beside it, by which its job knows the files that are new."""
    files = [os.path.relpath(os.path.join(top, name), place) for top, _, names in os.walk(place) for name in names]
    place.with_name("code.files").write_bytes(b"".join(sorted(os.fsencode(f"./{name}\n") for name in files)))

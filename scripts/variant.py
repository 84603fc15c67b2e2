"""Write a variant of an algorithm: a diff against grpo.py or ppo.py, applied to today's script, or a script of its own.

    python scripts/variant.py gspo > mine.py       the whole script, to run, read and edit: python mine.py
    python scripts/variant.py --diff gspo          what it changes
    python scripts/variant.py --list               all of them, a line each
    python scripts/variant.py --remake gspo.py     write variants/gspo.patch from an edited gspo.py; its header stays
    python scripts/variant.py --remake mine.py     a new variant: variants/mine.patch, with a header to be filled in

A variant lies beside the scripts, since it imports what they import.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "variants"
DIFF = "--- a/"  # what the header of a patch ends at
SCRIPTS = ("grpo.py", "ppo.py")  # what a patch changes
NEW_HEADER = """\
What it changes, and why, in a sentence or two.

Source   a paper, or where the idea is from.
Use it   with which flags, and for what.
Measured not yet."""


def fail(message: str) -> NoReturn:
    """Exit with code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def names() -> list[str]:
    """The variants that are diffs."""
    return sorted(path.stem for path in FOLDER.glob("*.patch"))


def whole_names() -> list[str]:
    """The variants that are scripts of their own, since they share too little with another for a diff."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def summary(name: str) -> tuple[str, str]:
    """(script that it changes, or "" for a whole one, what it is in a line)."""
    if name in whole_names():
        text = (FOLDER / f"{name}.py").read_text()
        return "", ast.get_docstring(ast.parse(text)).splitlines()[0]
    header, script, _ = read(name)
    return script, header.splitlines()[0]


def read(name: str) -> tuple[str, str, str]:
    """(header, script that it changes, the diff) of a variant. Exits with code 2 for one that does not exist."""
    path = FOLDER / f"{name}.patch"
    if name in whole_names():
        fail(f"variants/{name}.py is a whole script, not a diff")
    if not path.is_file():
        fail(f"there is no variant {name!r}; there are {', '.join(sorted([*names(), *whole_names()]))}")
    header, mark, diff = path.read_text().partition(DIFF)
    return header.strip(), diff.partition("\n")[0], mark + diff


def variant(name: str, root: Path = ROOT) -> str:
    """The text of the script with the variant's changes. Exits with code 2 where they do not apply."""
    if name in whole_names():
        return (FOLDER / f"{name}.py").read_text()
    _, script, diff = read(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / script
        copy.write_text((root / script).read_text())
        done = subprocess.run(
            ["git", "apply", "--recount", "-"], cwd=folder, input=diff, text=True, capture_output=True, check=False
        )
        if done.returncode != 0:
            fail(f"variants/{name}.patch does not apply to {script}: {done.stderr.strip()}")
        return copy.read_text()


def changes(script: str, text: str, root: Path = ROOT) -> str:
    """The diff that turns today's ``script`` into ``text``."""
    before = (root / script).read_text().splitlines(keepends=True)
    diff = difflib.unified_diff(before, text.splitlines(keepends=True), f"a/{script}", f"b/{script}", n=2)
    return "".join(diff)


def remade(name: str, text: str, root: Path = ROOT) -> str:
    """The patch that turns today's script into ``text``: under the variant's old header, or one to be filled in.

    A new variant is of the script that it shares more lines with.
    """
    if not (FOLDER / f"{name}.patch").is_file() and name not in whole_names():
        diff = min((changes(script, text, root) for script in SCRIPTS), key=len)
        line = (ast.get_docstring(ast.parse(text)) or name).splitlines()[0]
        return f"{line}\n\n{NEW_HEADER}\n\n{diff}"
    header, script, _ = read(name)
    if not script:
        fail(
            f"variants/{name}.patch has no header, as after `--remake {name}.py > {name}.patch`, which empties it "
            f"first; restore it (git checkout variants/{name}.patch): --remake writes the file itself"
        )
    return f"{header}\n\n{changes(script, text, root)}"


def remake(path: Path) -> None:
    """Write the patch of an edited script, whole or not at all."""
    if not path.is_file():
        fail(f"{path} is no file; give a variant's script, NAME.py")
    if path.resolve() in [(ROOT / script).resolve() for script in SCRIPTS]:
        fail(f"{path} is what variants are made from; give an edited copy, NAME.py")
    patch = remade(path.stem, path.read_text())
    target = FOLDER / f"{path.stem}.patch"
    is_new = not target.exists()
    beside = target.with_suffix(".partial")
    beside.write_text(patch)
    beside.replace(target)
    lines = patch.partition(DIFF)[2].splitlines()[2:]
    count = sum(line.startswith(("+", "-")) for line in lines)
    rest = "; fill in its header" if is_new else ""
    print(f"{target.relative_to(ROOT)}: {count} changed lines{rest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", help="of a variant, or with --remake the file NAME.py")
    parser.add_argument("--list", action="store_true", help="name all variants")
    parser.add_argument("--diff", action="store_true", help="print the patch with its header, not the script")
    parser.add_argument("--remake", action="store_true", help="write the patch of the edited file that is given")
    args = parser.parse_args()
    if args.list:
        for name in sorted([*names(), *whole_names()]):
            script, line = summary(name)
            print(f"{name:16}{script:10}{line}")
    elif args.name is None:
        fail("give the name of a variant, or --list")
    elif args.remake:
        remake(Path(args.name))
    elif args.diff:
        header, _, diff = read(args.name)
        print(f"{header}\n\n{diff}", end="")
    else:
        print(variant(args.name), end="")


if __name__ == "__main__":
    main()

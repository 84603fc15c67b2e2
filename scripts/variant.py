"""Print the script of a variant, or write the patch of an edited one. A patch is a diff against grpo.py or ppo.py.

    python scripts/variant.py gspo > mine.py       the complete script, to run, read and edit: python mine.py
    python scripts/variant.py --remake gspo.py     write variants/gspo.patch from an edited gspo.py; its header stays
    python scripts/variant.py --remake mine.py     a new variant: variants/mine.patch, with a header to be filled in
    head -n 1 variants/*                           list all variants, with a line about each
    cat variants/gspo.patch                        what a variant changes, its source, and how it was measured

Write the script next to grpo.py, because it imports the same modules.
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
DIFF = "--- a/"  # the header of a patch ends here
SCRIPTS = ("grpo.py", "ppo.py")  # the scripts that a patch can change
NEW_HEADER = """\
What it changes, and why, in a sentence or two.

Source   a paper, or where the idea is from.
Use it   with which flags, and for what.
Measured no learning curve yet."""


def fail(message: str) -> NoReturn:
    """Exit with code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


def names() -> list[str]:
    """Return the names of the variants that are patches."""
    return sorted(path.stem for path in (ROOT / "variants").glob("*.patch"))


def read(name: str) -> tuple[str, str, str]:
    """Return (header, script that it changes, diff) of a variant. Exits with code 2 if there is no such patch."""
    if name not in names():
        fail(f"no file variants/{name}.patch; choose from {', '.join(names())}")
    header, mark, diff = (ROOT / "variants" / f"{name}.patch").read_text().partition(DIFF)
    return header.strip(), diff.partition("\n")[0], mark + diff


def variant(name: str) -> str:
    """Return the text of the script with the variant's changes. Exits with code 2 if the patch does not apply."""
    _, script, diff = read(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / script
        copy.write_text((ROOT / script).read_text())
        apply = ["git", "apply", "--recount", "-"]
        done = subprocess.run(apply, cwd=folder, input=diff, text=True, capture_output=True, check=False)
        if done.returncode != 0:
            fail(f"variants/{name}.patch does not apply to {script}: {done.stderr.strip()}")
        return copy.read_text()


def remade(name: str, text: str) -> str:
    """Return the patch that turns the current script into ``text``, under the variant's header.

    A new variant is a diff against the script that it shares more lines with, under a header to be filled in.
    """
    header, script, _ = read(name) if name in names() else ("", "", "")
    if name not in names():
        header = f"{(ast.get_docstring(ast.parse(text)) or name).splitlines()[0]}\n\n{NEW_HEADER}"
    elif not script:  # as after `--remake NAME.py > variants/NAME.patch`: the shell empties the file first
        fail(f"variants/{name}.patch has no header; restore it with git checkout. --remake writes the file itself")
    diffs = []
    for base in [script] if script else SCRIPTS:
        lines = [version.splitlines(keepends=True) for version in ((ROOT / base).read_text(), text)]
        diffs.append("".join(difflib.unified_diff(*lines, f"a/{base}", f"b/{base}", n=2)))
    return f"{header}\n\n{min(diffs, key=len)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="name of a variant, or with --remake the file NAME.py")
    parser.add_argument("--remake", action="store_true", help="write variants/NAME.patch from the edited file NAME.py")
    args = parser.parse_args()
    path = Path(args.name)
    if not args.remake:
        print(variant(args.name), end="")
    elif not path.is_file():
        fail(f"{path}: no such file; pass the edited script of a variant, NAME.py")
    elif path.resolve() in [(ROOT / script).resolve() for script in SCRIPTS]:
        fail(f"{path} is a script that variants change; pass an edited copy, NAME.py")
    else:
        target = ROOT / "variants" / f"{path.stem}.patch"
        rest = "" if target.exists() else "; fill in its header"
        target.write_text(remade(path.stem, path.read_text()))
        changed = target.read_text().partition(DIFF)[2].splitlines()[2:]
        count = sum(line.startswith(("+", "-")) for line in changed)
        print(f"{target.relative_to(ROOT)}: {count} changed lines{rest}")


if __name__ == "__main__":
    main()

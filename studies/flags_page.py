"""Write docs/flags.md from runtime/arguments/other_names.tsv.

python studies/flags_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts are not a package

from runtime.arguments.other_names import table

PAGE = ROOT / "docs" / "flags.md"
INTRODUCTION = """# Flags: the names that other frameworks use

`python grpo.py --help` has all flags. This page lists the names of verl, TRL, open-instruct, OpenRLHF, AReaL and
TinyZero, and what to pass to `grpo.py` or `ppo.py` instead. If a command has such names, one error lists what replaces
them all, and says why some have no flag here (not on this page). Page and error are made from
`runtime/arguments/other_names.tsv`. `--preset NAME` sets how a framework learns by default
([presets](maintainers/README.md)), so that a command needs only what differs from that.

In the tables *this* is the value in their command, and a star in a name is any text. Names of OpenRLHF with a dot are
those of 0.10 and later; names of AReaL that begin with `ppo.`, `dataset.` or `exp_ctrl.` are those of 0.3. Names
that are the same here and there, such as `learning_rate`, are left out unless their values differ.
"""


def code(names: str) -> str:
    """Return names separated by commas as code."""
    return ", ".join(f"`{name}`" for name in names.split(", "))


def page() -> str:
    """Return the text of docs/flags.md: a table for each framework, or for several whose names are the same."""
    tables = {}
    for row in table():
        if row.ours:
            line = f"| {code(row.theirs)} | {code(row.ours)}{row.how and ': '}{row.how} |\n"
            tables.setdefault(row.frameworks, []).append(line)
    parts = [f"\n## {name}\n\n| their name | here |\n|---|---|\n{''.join(lines)}" for name, lines in tables.items()]
    return INTRODUCTION + "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

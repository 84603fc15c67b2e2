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

`python grpo.py --help` has all flags. If you give `grpo.py` or `ppo.py` names of verl, TRL, open-instruct, OpenRLHF,
AReaL or TinyZero, one error says what to pass instead. That error and this page come from
`runtime/arguments/other_names.tsv`. `--preset NAME` sets how a framework learns by default
([presets](maintainers/README.md)), so that a command needs only what differs from that.

In the last column, *this* is the value that their command gives. A star in a name stands for any text. Names of
OpenRLHF with a dot are those of 0.10 and later; names of AReaL that begin with `ppo.`, `dataset.` or `exp_ctrl.` are
those of 0.3. Names that are the same here and there, such as `learning_rate`, are left out unless their values differ.

| framework | their name | here | value |
|---|---|---|---|
"""


def code(names: str) -> str:
    """Return names separated by commas as code."""
    return ", ".join(f"`{name}`" for name in names.split(", "))


def page() -> str:
    """Return the text of docs/flags.md."""
    rows = [(row.frameworks, code(row.theirs), code(row.ours) if row.ours else "no flag", row.how) for row in table()]
    return INTRODUCTION + "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""Write the names of docs/flags.md, and what differs, from the tables in scripts/translation/.

python studies/flags_page.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))  # the scripts are not a package

import translation_rules as rules

PAGE = ROOT / "docs" / "flags.md"
START, END = "## The names that others use\n", "## What differs behind equal names\n"
COLUMNS = ("verl", "areal", "trl", "open-instruct", "openrlhf", "tinyzero")
INTRODUCTION = """
Every key of the frameworks' configurations, from the tables that `scripts/translate.py` reads, at the versions named.
In the first table of each framework: our flag, their keys with the default **there** in brackets, and how the value is
computed where it is not the same. After it: what is always so here, whatever is given, and what is not here. Keys are
matched by their full names, in error messages as well. This part of the page is made by `python studies/flags_page.py`.
"""


def cell(row: rules.Row) -> str:
    """Return a key with its default."""
    default = row.default.replace("|", "\\|")
    return f"`{row.key}`" + (f" ({default})" if default and default != "(of another key)" else "")


def section(framework: str) -> list[str]:
    """Return the lines of one framework."""
    table = rules.rows(framework)
    counts = {
        kind: sum(row.kind == kind for row in table.values())
        for kind in ("equal", "computed", "always", "not here", "renamed")
    }
    lines = [f"### {rules.version(framework)}", ""]
    renamed = f", {counts['renamed']} earlier names" if counts["renamed"] else ""
    lines += [
        f"{len(table)} keys: {counts['equal']} equal, {counts['computed']} computed, {counts['always']} always so "
        f"here, {counts['not here']} not here{renamed}.",
        "",
        "| ours | theirs (default) | how |",
        "|---|---|---|",
    ]
    earlier: dict[str, list[str]] = {}
    for row in table.values():
        if row.kind == "renamed":
            earlier.setdefault(row.ours, []).append(row.key)
    groups: dict[tuple[str, str], list[str]] = {}
    for row in table.values():
        if row.kind in ("equal", "computed"):
            names = cell(row) + "".join(f", earlier `{name}`" for name in earlier.get(row.key, ()))
            groups.setdefault((row.ours, row.note), []).append(names)
    for (ours, note), keys in sorted(groups.items()):
        shown = ", ".join(f"`{part.strip()}`" for part in ours.split(","))
        lines.append(f"| {shown} | {', '.join(keys)} | {note} |")
    for kind, heading in (("always", "Always so here:"), ("not here", "Not here:")):
        lines += ["", heading, ""]
        listed: dict[str, list[str]] = {}
        for row in table.values():
            if row.kind == kind:
                listed.setdefault(f"{row.note}{f' (`{row.ours}`)' if row.ours else ''}", []).append(row.key)
        lines += [f"* {note}: {', '.join(f'`{key}`' for key in keys)}" for note, keys in sorted(listed.items())]
    return [*lines, ""]


def without_key() -> list[str]:
    """Return the flags of the critic that no key sets, one row each."""
    own = [flag for flag in rules.fields("ppo") if flag not in rules.fields("grpo")]
    named = {word for name in rules.FRAMEWORKS for row in rules.rows(name).values() for word in row.ours.split()}
    return [
        f"| `--{flag}` | no key sets it |" for flag in own if f"--{flag}" not in {word.strip(",") for word in named}
    ]


def metrics() -> list[str]:
    """Return the table of metrics."""
    text = (rules.TABLES / "metrics.tsv").read_text(encoding="utf-8").splitlines()[1:]
    header, *table = [line.split("\t") for line in text]
    lines = ["| ours | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for cells in table:
        cells += [""] * (len(header) - len(cells))
        lines.append("| " + " | ".join([cells[0], *(cells[header.index(name)] or "–" for name in COLUMNS)]) + " |")
    return lines


def page() -> str:
    """Return docs/flags.md with the generated part between its two headings."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(START)[0], text.partition(END)[2]
    lines = [START + INTRODUCTION]
    for framework in rules.FRAMEWORKS:
        lines += section(framework)
    lines += ["### Flags of ppo.py that no key sets", "", "| ours | |", "|---|---|", *without_key(), ""]
    lines += [
        "## Metrics",
        "",
        "What their dashboards call what [metrics.md](metrics.md) explains; `python scripts/translate.py",
    ]
    lines += [
        "--metrics verl` prints one column. A mean over samples or tokens there may be one of means.",
        "",
        *metrics(),
        "",
        END,
    ]
    return before + "\n".join(lines).removesuffix("\n") + "\n" + after


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

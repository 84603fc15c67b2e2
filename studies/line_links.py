"""Keep the links from pages to lines of the code up to date.

    python studies/line_links.py             write the numbers of the lines into the pages
    python studies/line_links.py --check     exit code 1 if a link leads to another line than its text names

A link is ``[`text`](../grpo.py#L12)``. It leads to the definition of the function or class of that name, or else to the
first line that contains the text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[`([^`]+)`\]\(([\w./]+\.py)#L(\d+)\)")


def line_of(text: str, file: Path) -> int:
    """Return the number of the line that a link with this text leads to. Raises ValueError if there is none."""
    lines = file.read_text().splitlines()
    definition = re.compile(rf"\s*(?:def|class) {re.escape(text)}\b")
    for number, line in enumerate(lines, 1):
        if definition.match(line):
            return number
    for number, line in enumerate(lines, 1):
        if text in line:
            return number
    raise ValueError(f"{file.name} has no line with {text!r}")


def with_lines(page: Path) -> str:
    """Return the text of a page with the right number in each link to a line. Raises ValueError for a lost line."""

    def link(found: re.Match) -> str:
        text, place, _ = found.groups()
        number = line_of(text, page.parent / place)
        return f"[`{text}`]({place}#L{number})"

    return LINK.sub(link, page.read_text())


def main(words: list[str]) -> int:
    """Write the pages whose links have moved, or with --check only name them."""
    stale = [page for page in sorted((ROOT / "docs").rglob("*.md")) if with_lines(page) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: links lead to lines that have moved")
        if "--check" not in words:
            page.write_text(with_lines(page))
    return int(bool(stale) and "--check" in words)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Point the links to lines in docs/ at the lines that they mean.

    python scripts/link_lines.py            rewrite the line numbers
    python scripts/link_lines.py --check    exit code 1 where one is wrong

A link to a line is ``[text](../FILE#L12 "text of the line")``: the title is what the line contains, once in the file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r'\(\.\./([\w./]+)#L(\d+) "([^"]+)"\)')


def point(link: re.Match) -> str:
    """The link with the number of its line. Raises ValueError where no line, or more than one, has the text."""
    file, _, words = link.groups()
    lines = (ROOT / file).read_text().splitlines()
    found = [number for number, line in enumerate(lines, 1) if words in line]
    if len(found) != 1:
        raise ValueError(f"{len(found)} lines of {file} have {words!r}; a link needs one")
    return f'(../{file}#L{found[0]} "{words}")'


def main(check: bool) -> int:
    """Rewrite the pages, or only compare; the number of pages whose links are wrong."""
    wrong = 0
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text()
        pointed = LINK.sub(point, text)
        if pointed == text:
            continue
        wrong += 1
        print(f"{page.relative_to(ROOT)}: {'links are off; run scripts/link_lines.py' if check else 'links set'}")
        if not check:
            page.write_text(pointed)
    return wrong if check else 0


if __name__ == "__main__":
    sys.exit(1 if main("--check" in sys.argv[1:]) else 0)

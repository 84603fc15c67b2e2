"""Count what makes the project's English hard to read, and fail where there is more of it than before.

    python studies/prose.py                    the table of counts and limits; exit code 1 over a limit
    python studies/prose.py --list openings    every place of one count
    python studies/prose.py --commit FILE      check the subject of a commit message (the commit-msg hook calls this)

A limit may only go down: whoever rewrites a text lowers it in the same commit.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIP = (".venv", ".cuda", ".engines", "models", "runs", "bench")
LIMITS = {"openings": 0, "help texts": 0, "private words": 2, "long sentences": 0}
OPENINGS = ("What", "Whether", "Where", "Who", "Whose", "How", "Which", "When", "Why")
# A word here -> the field's word for it. Code names (in backticks or with an underscore) are not text.
PRIVATE_WORDS = {
    "refuse": "reject",
    "refuses": "rejects",
    "refused": "rejected",
    "refusal": "error",
    "refusals": "errors",
    "beside": "next to",
    "alike": "equal",
    "anew": "again",
    "otherwise here": "differently here",
    "is told": "gets",
    "are told": "get",
    "dealt": "split",
}
LONGEST = 40  # words of a sentence
WORD = re.compile(r"\S*\w\S*")  # not the commas that a list of code names leaves
FLAG_FILES = ("grpo.py", "ppo.py", "runtime/arguments/flags.py")
FRAGMENT = re.compile(r"(The same|As above|Where|What|That)\b")
SUBJECT = re.compile(r"[a-z0-9_./]+(, [a-z0-9_./]+)*: \S.*")
SUBJECT_LENGTH = 72

Place = tuple[str, int, str]  # file, line, text


def python_files(root: Path = ROOT) -> list[Path]:
    """Return the project's Python files, tests included."""
    return [p for p in sorted(root.rglob("*.py")) if not p.relative_to(root).parts[0].startswith(SKIP)]


def pages(root: Path = ROOT) -> list[Path]:
    """Return the Markdown pages, without the changelog, whose entries describe old versions."""
    return [*sorted(root.glob("[!C]*.md")), root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each docstring in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def help_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each flag's help text: the string after a field of Args or RunFlags."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name in ("Args", "RunFlags"):
            for field, text in zip(node.body, node.body[1:], strict=False):
                is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
                if isinstance(field, ast.AnnAssign) and is_text:
                    yield text.lineno, " ".join(text.value.value.split())


def plain(text: str) -> str:
    """Return a text without code: blocks, literals and links' targets."""
    text = re.sub(r"^(    |```|\|).*$", "", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return re.sub(r"``.*?``|`[^`]*`|\]\([^)]*\)", " ", text)


def sentences(text: str) -> list[str]:
    """Split a text without code into sentences; list items, headings and paragraphs end one as well."""
    parts = re.split(r"\n\s*\n|\n\s*[*#-]|(?<=[.:;?!])\s", plain(text))
    return [" ".join(part.split()) for part in parts if part.strip()]


def texts(root: Path = ROOT) -> Iterator[tuple[Path, int, str]]:
    """Yield (file, line, text) of all docstrings of the project and of all its pages."""
    for path in python_files(root):
        for line, text in docstrings(path):
            yield path, line, text
    for page in pages(root):
        yield page, 1, page.read_text()


def name_of(path: Path, root: Path) -> str:
    """Return a file's path below the root of the project."""
    return str(path.relative_to(root))


def find(root: Path = ROOT) -> dict[str, list[Place]]:
    """Return the places of every count in LIMITS."""
    found: dict[str, list[Place]] = {name: [] for name in LIMITS}
    opening = re.compile(rf"\W*({'|'.join(OPENINGS)})\b")
    for path in python_files(root):
        for line, text in docstrings(path):
            if opening.match(text):
                first = text.splitlines()[0]
                found["openings"].append((name_of(path, root), line, first))
    for file in FLAG_FILES:
        for line, text in help_texts(root / file):
            if FRAGMENT.match(text) or not text.endswith("."):
                found["help texts"].append((file, line, text))
    words = re.compile(rf"\b({'|'.join(PRIVATE_WORDS)})\b", re.IGNORECASE)
    for path, line, text in texts(root):
        name = name_of(path, root)
        for match in words.finditer(plain(text)):
            found["private words"].append((name, line, match.group()))
        for sentence in sentences(text):
            if len(WORD.findall(sentence)) > LONGEST:
                found["long sentences"].append((name, line, sentence))
    return found


def subject_error(subject: str) -> str:
    """Return the reason why a commit's subject is not of the form ``area: summary``, or "" if it is."""
    if len(subject) > SUBJECT_LENGTH:
        return f"the subject has {len(subject)} characters; use at most {SUBJECT_LENGTH}"
    if not SUBJECT.fullmatch(subject):
        return "the subject is not of the form `area: imperative summary`, e.g. `grpo: clip the ratio from above`"
    return ""


def main() -> int:
    """Print the counts. Returns 1 over a limit or for an invalid subject, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", metavar="COUNT", choices=LIMITS, help="print every place of one count")
    parser.add_argument("--commit", metavar="FILE", type=Path, help="check the first line of this commit message")
    args = parser.parse_args()
    if args.commit:
        error = subject_error(args.commit.read_text().partition("\n")[0])
        print(error, end="\n" if error else "")
        return int(bool(error))
    found = find()
    if args.list:
        for file, line, text in found[args.list]:
            print(f"{file}:{line}: {text}")
        return 0
    print("count              places  limit")
    for name, limit in LIMITS.items():
        print(f"{name:18s} {len(found[name]):6d} {limit:6d}{'   OVER' if len(found[name]) > limit else ''}")
    return int(any(len(found[name]) > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())

"""The shape of the code: lines, nesting, length of functions, tokens per line of each file.

    python studies/shape.py                 every file but the tests; exit code 1 where a limit is exceeded
    python studies/shape.py grpo.py ppo.py  of these files

Limits: no function above 80 lines, but ``main`` of grpo.py 200 and of ppo.py 265, with at most 95 and 115 local names;
blocks at most 6 deep, at most 10 tokens per code line on average, so that no limit is met by packing lines.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = {"depth": 6, "longest": 80, "tokens": 10.0}
MAINS = {"grpo.py": {"main": 200, "names": 95}, "ppo.py": {"main": 265, "names": 115}}  # lines, local names
BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)
NOT_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.STRING, tokenize.ENDMARKER, tokenize.ENCODING),
)


def depth(node: ast.AST, outside: int = 0) -> int:
    """Blocks inside one another, functions and classes included."""
    inside = outside + isinstance(node, BLOCKS)
    deepest = inside
    for child in ast.iter_child_nodes(node):
        # An elif is no deeper than its if, though the syntax tree nests it.
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child, outside if is_elif else inside))
    return deepest


def shape(path: Path) -> dict[str, float | str]:
    """The numbers of a file: lines, code lines, depth, lines of its longest function but ``main``, tokens per line."""
    text = path.read_text()
    tree = ast.parse(text)
    lengths = {}
    of_main = {"main": 0, "names": 0}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name != "main":
            lengths[node.name] = node.end_lineno - node.lineno + 1
        elif isinstance(node, ast.FunctionDef):
            of_main = {"main": node.end_lineno - node.lineno + 1, "names": local_names(node)}
    longest = max(lengths, key=lengths.get, default="")
    tokens = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            tokens.append(token)
    code_lines = len({token.start[0] for token in tokens}) or 1
    return {
        "lines": len(text.splitlines()),
        "code": code_lines,
        "depth": depth(tree),
        "longest": lengths.get(longest, 0),
        "name": longest,
        "tokens": len(tokens) / code_lines,
        **of_main,
    }


def local_names(function: ast.FunctionDef) -> int:
    """How many names a function gives values to."""
    stored = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return len({node.id for node in stored})


def project_files() -> list[Path]:
    """The project's Python files but its tests."""
    return sorted(
        [
            *ROOT.glob("*.py"),
            *(ROOT / "runtime").glob("*.py"),
            *(ROOT / "scripts").glob("*.py"),
            *(ROOT / "studies").glob("*.py"),
        ]
    )


def main(words: list[str]) -> int:
    """Print the table; the number of files that pass a limit."""
    files = [Path(word) for word in words] or project_files()
    print("file                              lines   code  depth  tokens  longest function")
    beyond = 0
    for path in files:
        found = shape(path)
        limits = LIMITS | MAINS.get(path.name, {})
        over = [name for name, limit in limits.items() if round(found[name], 1) > limit]
        beyond += bool(over)
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        numbers = f"{found['lines']:6d} {found['code']:6d} {found['depth']:6d} {found['tokens']:7.1f}"
        warning = f"   OVER: {', '.join(over)}" if over else ""
        print(f"{name:32s} {numbers}  {found['longest']} {found['name']}{warning}")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

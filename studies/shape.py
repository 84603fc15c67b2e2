"""Check the shape of the code: lines, nesting, function length, tokens per line, package budgets, and import levels.

    python studies/shape.py                 all files but the tests, and packages of runtime/; exit code 1 over a limit
    python studies/shape.py grpo.py ppo.py  only the shape of these files

A file:     no function above 80 lines except ``main`` (grpo.py 200, ppo.py 265, with at most 95 and 115 local names);
            blocks nested at most 6 deep; at most 10 tokens per code line on average, so packing lines meets no limit.
A package:  runtime/ has eight packages on five levels. Each has a line budget, which counts all of its files, and
            imports only packages of lower levels.
Imports:    studies, scripts -> grpo, ppo -> utils -> rewards, kl_estimators -> runtime; no cycle, not even one through
            code under ``if __name__ == "__main__"``, and no import of the project inside a function.
"""

from __future__ import annotations

import ast
import functools
import graphlib
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
# Lines at most. Whoever needs more takes as much out of the same package, or moves the limit in a commit that names
# what it pays for: a row of docs/evidence/flags.md, or what a user asked for.
BUDGETS = {
    "runtime/system": 2850,
    "runtime/grading": 3020,
    "runtime/data": 1925,
    "runtime/arguments": 1220,
    "runtime/training": 2000,
    "runtime/environments": 1120,
    "runtime/engine": 1485,
    "runtime/run": 2515,
    "grpo.py": 720,
    "ppo.py": 1015,
    "utils.py": 1150,
    "rewards.py": 800,
}
# From the bottom up: a package imports only from lower levels. Its own modules may import one another.
LEVELS = (
    {"runtime.system"},
    {"runtime.arguments", "runtime.data", "runtime.grading"},
    {"runtime.training"},
    {"runtime.engine", "runtime.run"},
    {"runtime.environments"},
    {"rewards", "kl_estimators"},
    {"utils"},
    {"grpo", "ppo"},
)


def depth(node: ast.AST, outside: int = 0) -> int:
    """Return how deeply blocks are nested, functions and classes included."""
    inside = outside + isinstance(node, BLOCKS)
    deepest = inside
    for child in ast.iter_child_nodes(node):
        # An elif is no deeper than its if, though the syntax tree nests it.
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        deepest = max(deepest, depth(child, outside if is_elif else inside))
    return deepest


def shape(path: Path) -> dict[str, float | str]:
    """Measure a file: lines, code lines, depth, length of its longest function except ``main``, tokens per line."""
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
    """Count the names that a function assigns to."""
    stored = [node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return len({node.id for node in stored})


def project_files(root: Path = ROOT) -> list[Path]:
    """Return the project's Python files except its tests."""
    folders = (root / "runtime", root / "scripts", root / "studies")
    return sorted([*root.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))])


# ------------------------------------------------------------------------------------------------ packages and imports


def budget_lines(root: Path = ROOT) -> dict[str, int]:
    """Count the lines of everything that has a budget; a package is counted with all of its files."""
    counts = {}
    for name in BUDGETS:
        path = root / name
        files = path.rglob("*.py") if path.is_dir() else [path]
        counts[name] = sum(len(file.read_text().splitlines()) for file in files)
    return counts


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the files of the top level and of runtime/ by module name, packages (``__init__``) included."""
    files = {}
    for path in [*root.glob("*.py"), *(root / "runtime").rglob("*.py")]:
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


def unit(module: str) -> str:
    """Return the entry of LEVELS to which a module belongs: its package below runtime/, or itself."""
    return ".".join(module.split(".")[:2])


@functools.cache
def written_imports(text: str) -> list[tuple[str, str, bool]]:
    """Return (module, name taken from it or "", whether it stands inside a function) for each import in a text."""
    tree = ast.parse(text)
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, "", id(node) in inside) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [(node.module, alias.name, id(node) in inside) for alias in node.names]
    return found


def imports(path: Path, files: dict[str, Path]) -> list[tuple[str, bool]]:
    """Return (module, whether the import stands inside a function) for each import of the project's own modules."""
    found = []
    for module, name, inside in written_imports(path.read_text()):
        whole = f"{module}.{name}"
        found.append((whole if whole in files else module, inside))
    return [(module, inside) for module, inside in found if module in files]


def arrows(root: Path = ROOT) -> set[tuple[str, str]]:
    """Return (importer, imported) for every pair of packages below runtime/ that are connected by an import."""
    files = modules(root)
    pairs = {(unit(a), unit(b)) for a, path in files.items() for b, _ in imports(path, files)}
    return {(a, b) for a, b in pairs if a != b and a.startswith("runtime.") and b.startswith("runtime.")}


def layout_errors(root: Path = ROOT) -> list[str]:
    """List what breaks the rules about packages: budgets, levels, cycles, and imports inside functions."""
    errors = []
    for name, lines in budget_lines(root).items():
        if lines > BUDGETS[name]:
            errors.append(f"{name}: {lines} lines, its budget is {BUDGETS[name]}")
    level = {name: i for i, names in enumerate(LEVELS) for name in names}
    files = modules(root)
    known = {name: path for name, path in files.items() if unit(name) in level}
    for name in files.keys() - known.keys() - {"runtime"}:
        errors.append(f"{name}: is in no package of LEVELS")
    edges = {}
    for name, path in known.items():
        found = imports(path, files)
        edges[name] = {target for target, _ in found}
        for target, inside in found:
            if inside:
                errors.append(f"{name}: imports {target} inside a function")
            if unit(target) in level and unit(target) != unit(name) and level[unit(target)] >= level[unit(name)]:
                errors.append(f"{name}: imports {target}, which is not on a lower level")
    try:
        tuple(graphlib.TopologicalSorter(edges).static_order())
    except graphlib.CycleError as error:
        errors.append(f"import cycle: {' -> '.join(error.args[1])}")
    return sorted(errors)


def print_layout(root: Path = ROOT) -> list[str]:
    """Print the packages, level by level, with lines, budgets and imports. Returns ``layout_errors``."""
    counts = budget_lines(root)
    pairs = arrows(root)
    print("\nlevel package                 lines  budget  imports")
    for number, names in reversed(list(enumerate(LEVELS, 1))):
        for name in sorted(name for name in names if name.startswith("runtime.")):
            path = name.replace(".", "/")
            below = sorted(b.removeprefix("runtime.") for a, b in pairs if a == name)
            print(f"{number:5d} {path:22s} {counts[path]:6d} {BUDGETS[path]:7d}  {', '.join(below)}")
    errors = layout_errors(root)
    for line in errors:
        print(f"OVER: {line}")
    return errors


def main(words: list[str]) -> int:
    """Print the tables. Returns 1 if a limit is exceeded, otherwise 0."""
    files = [Path(word) for word in words] or project_files()
    print("file                                    lines   code  depth  tokens  longest function")
    beyond = 0
    for path in files:
        found = shape(path)
        limits = LIMITS | MAINS.get(path.name, {})
        over = [name for name, limit in limits.items() if round(found[name], 1) > limit]
        beyond += bool(over)
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        numbers = f"{found['lines']:6d} {found['code']:6d} {found['depth']:6d} {found['tokens']:7.1f}"
        warning = f"   OVER: {', '.join(over)}" if over else ""
        print(f"{name:38s} {numbers}  {found['longest']} {found['name']}{warning}")
    if not words:
        beyond += len(print_layout())
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

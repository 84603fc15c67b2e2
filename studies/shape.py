"""Check the shape of the code: lines, nesting, function length, tokens per line, limits for everything, import levels.

    python studies/shape.py                 all files but the tests, and the table of limits; exit code 1 over a limit
    python studies/shape.py grpo.py ppo.py  only the shape of these files

A file:     no function above 80 lines except ``main`` (grpo.py 200, ppo.py 265, with at most 95 and 115 local names);
            blocks nested at most 6 deep; at most 10 tokens per code line on average, so packing lines meets no limit.
Limits:     lines of Python by part, tables, words of pages, and what a script imports. They only go down: a change that
            needs room takes room first.
Imports:    studies, scripts -> grpo, ppo -> utils -> rewards, kl_estimators -> runtime, whose packages import only
            lower levels, and graders -> runtime.system; no cycle, not even one through code under
            ``if __name__ == "__main__"``, and no import of the project inside a function.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import subprocess
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
# What may be at most, over all files that git tracks or would track.
TOTALS = {
    "top level": 4_150,
    "runtime": 11_000,
    "scripts": 3_700,
    "plug-ins": 4_700,
    "product": 22_500,
    "studies": 7_500,
    "tests": 36_000,
    "tables": 650,
    "words of pages": 55_000,
    "lines imported by grpo.py": 12_500,
    "files imported by grpo.py": 55,
    "lines imported by variants/grpo_min.py": 330,
    "lines imported by variants/ppo_min.py": 330,
}
PARTS = {
    "top level": ("grpo.py", "ppo.py", "kl_estimators.py", "rewards.py", "utils.py"),
    "runtime": ("runtime",),
    "scripts": ("scripts",),
    "plug-ins": ("graders", "variants", "examples"),
    "studies": ("studies",),
    "tests": ("tests",),
}
# From the bottom up: a package imports only from lower levels. Its own modules may import one another.
LEVELS = (
    {"runtime.system"},
    {"graders"},
    {"runtime.arguments", "runtime.data"},
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
    folders = (root / "runtime", root / "graders", root / "scripts", root / "studies")
    return sorted([*root.glob("*.py"), *(path for folder in folders for path in folder.rglob("*.py"))])


# ------------------------------------------------------------------------------------------------ packages and imports


def tracked(root: Path, pattern: str) -> list[Path]:
    """Return the files of a pattern that git tracks or would track, relative to ``root``."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=True)
    names = done.stdout.splitlines()
    return [Path(name) for name in names if (root / name).is_file()]


def line_count(path: Path) -> int:
    """Count the lines of a file."""
    return len(path.read_text().splitlines())


def imported_by(script: str, root: Path = ROOT) -> set[Path]:
    """Return the files of the project that the imports of a script reach, also those in functions; and itself."""
    files = modules(root)
    reached = set()
    waiting = [root / script]
    while waiting:
        path = waiting.pop()
        if path in reached:
            continue
        reached.add(path)
        for module, _ in imports(path, files):
            parts = module.split(".")
            names = [
                ".".join(parts[:end]) for end in range(1, len(parts) + 1)
            ]  # a package is imported with its modules
            waiting += [files[name] for name in names if name in files]
    return reached


def totals(root: Path = ROOT) -> dict[str, int]:
    """Count everything that has a limit in ``TOTALS``."""
    found = dict.fromkeys(TOTALS, 0)
    for path in tracked(root, "*.py"):
        for part, names in PARTS.items():
            if path.parts[0] in names:
                found[part] += line_count(root / path)
    found["product"] = sum(found[part] for part in ("top level", "runtime", "scripts", "plug-ins"))
    for path in (*tracked(root, "*.tsv"), *tracked(root, "*.toml")):
        if path.name != "pyproject.toml":
            found["tables"] += line_count(root / path)
    for path in tracked(root, "*.md"):
        words = (root / path).read_text().split()
        found["words of pages"] += len(words)
    for script in ("grpo.py", "variants/grpo_min.py", "variants/ppo_min.py"):
        if (root / script).is_file():
            reached = imported_by(script, root)
            found[f"lines imported by {script}"] = sum(map(line_count, reached))
            if script == "grpo.py":
                found["files imported by grpo.py"] = len(reached)
    return found


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the files of the top level, runtime/ and graders/ by module name, packages (``__init__``) included."""
    files = {}
    for path in [*root.glob("*.py"), *(root / "runtime").rglob("*.py"), *(root / "graders").rglob("*.py")]:
        parts = path.relative_to(root).with_suffix("").parts
        files[".".join(part for part in parts if part != "__init__")] = path
    return files


def unit(module: str) -> str:
    """Return the entry of LEVELS to which a module belongs: its package below runtime/, or itself."""
    return module.split(".")[0] if module.startswith("graders") else ".".join(module.split(".")[:2])


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
    """List what breaks the rules about packages: levels, cycles, and imports inside functions."""
    errors = []
    level = {name: i for i, names in enumerate(LEVELS) for name in names}
    files = modules(root)
    known = {name: path for name, path in files.items() if unit(name) in level}
    for name in files.keys() - known.keys() - {"runtime"}:
        errors.append(f"{name}: is in no package of LEVELS; add it there, or move an edited copy elsewhere")
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
    """Print the packages, level by level, with their imports, and the table of limits. Returns what breaks a rule."""
    pairs = arrows(root)
    print("\nlevel package                imports")
    for number, names in reversed(list(enumerate(LEVELS, 1))):
        for name in sorted(name for name in names if name.startswith("runtime.")):
            below = sorted(b.removeprefix("runtime.") for a, b in pairs if a == name)
            print(f"{number:5d} {name.replace('.', '/'):22s} {', '.join(below)}")
    errors = layout_errors(root)
    print("\neverything                                number   limit")
    for name, number in totals(root).items():
        print(f"{name:38s} {number:9d} {TOTALS[name]:7d}")
        if number > TOTALS[name]:
            errors.append(f"{name}: {number}, the limit is {TOTALS[name]}; first delete as much from any of its files")
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

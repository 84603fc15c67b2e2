"""Read other frameworks' commands for translate.py: command lines, shell scripts, Python files and YAML.

Nothing of what is read is executed. bash expands a script with no program within reach (translation/record.sh), a
Python file is read by its syntax tree, and YAML by its safe loader. Imports the standard library and yaml.
"""

from __future__ import annotations

import ast
import itertools
import operator
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECORDER = Path(__file__).resolve().parent / "translation" / "record.sh"
SECONDS = 20.0  # for bash to expand a script
INHERITED = ("BASH_ENV", "ENV", "SHELLOPTS", "BASHOPTS", "PATH")  # variables that would change what bash does
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
HYDRA = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)  # a word that sets a key by its path
# Training without reinforcement learning, and other programs, which have no counterpart here.
OTHER = re.compile(
    r"(.*\.(fsdp_sft_trainer|sft_trainer|main_generation|main_eval)|openrlhf\.cli\.(train_(sft|dpo|rm|kd|kto)|serve_rm)"
    r"|(.*/)?(open_instruct/|eval).*\.py|(.*/)?(sft|dpo|reward|finetune)\w*\.py)$"
)
# Methods of a data set after which it is still that data set.
SAME_DATA = (
    "map",
    "filter",
    "shuffle",
    "select",
    "rename_column",
    "remove_columns",
    "train_test_split",
)
# Operations on numbers that a Python file may have in place of a number.
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
COMPARISONS = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
STOP = ("&&", "||", ";", "|", "&", "\\&\\&")
SHELLS = ("bash", "sh", "/bin/bash", "/bin/sh")
# A place that a published script leaves to its reader, which bash reads as a redirection: MODEL=<path to the model>.
PLACE = re.compile(r"(?<==)<([A-Za-z][\w ./-]*)>(?=[\s\"]|$)")
# What bash says of a variable or a parameter that is not set: "run.sh: line 3: NAME: unbound variable".
UNSET = re.compile(r": line \d+: (\w+): ([^\n]*)")
POSITIONAL = re.compile(r": line \d+: \$?([1-9]\d*): ")
# Variables that clusters set to the number of a node or a process: the first one starts the training.
RANKS = re.compile(r"\b((?:[A-Z]+_)*(?:NODE_?RANK|NODEID|PROCID|RANK|ROLE_INDEX|NODE_INDEX))\b")

# A word of the command -> the framework that it starts. The first match counts, and what follows it are the settings.
PROGRAMS = [
    (r"(verl\.trainer\.main_ppo|recipe\.\w+\.main_\w+|.*main_(ppo|dapo)\.py)$", "verl"),
    (r"(.*/)?open_instruct/(grpo|ppo)\w*\.py$", "open-instruct"),
    (r"openrlhf\.cli\.train_(ppo_ray|ppo)$", "openrlhf"),
    (r"areal(\.\w+)*\.launcher\.\w+$|realhf\.apps\.quickstart$|(.*/)?gsm8k_(rl|rl_mt)\.py$", "areal"),
]


class Unreadable(ValueError):
    """A file or command that cannot be read; the message names the cause and the fix."""


@dataclass
class Command:
    """A training command: its settings by their full names, and what starts it."""

    framework: str = ""  # "" where neither the program nor the user names it
    settings: dict[str, Any] = field(default_factory=dict)  # full name -> value, in the order given
    env: dict[str, str] = field(default_factory=dict)
    launcher: list[str] = field(default_factory=list)  # the words before the program
    notes: list[str] = field(default_factory=list)  # what could not be read
    functions: dict[str, list[str]] = field(default_factory=dict)  # reward functions of a file -> names of arguments


# --------------------------------------------------------------------------------------------------------------- values


def value_of(text: str) -> Any:
    """Return the value that a word stands for, as YAML and Hydra read it; text that is none of it stays text."""
    import yaml

    stripped = text.strip()
    if re.fullmatch(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d+)([eE][-+]?\d+)?", stripped):
        number = stripped.replace("_", "")
        return int(number) if re.fullmatch(r"[-+]?\d+", number) else float(number)
    if stripped.lower() in ("none", "null", "~"):
        return None
    if stripped.lower() in ("true", "false"):
        return stripped.lower() == "true"
    if stripped.startswith("(") and stripped.endswith(")"):  # a default in Python
        stripped = f"[{stripped[1:-1]}]"
    if stripped[:1] in ("[", "{", "'", '"'):
        try:
            return numbers(yaml.safe_load(stripped))
        except yaml.YAMLError:
            return text
    return text


def numbers(value: Any) -> Any:
    """Turn text such as 1e-6, which YAML leaves as text, into numbers, in lists and mappings as well."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value):
        return float(value)
    if isinstance(value, list):
        return [numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    return value


def flat(
    tree: dict[str, Any],
    path: str = "",
) -> dict[str, Any]:
    """Return full name -> value of nested mappings. An empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, dict) and value:
            found |= flat(value, name)
        else:
            found[name] = numbers(value)
    return found


def resolved(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace ``${other.name}`` by the value of that name, or by its mapping; None where the settings lack it."""
    reference = re.compile(r"\$\{([\w.]+)\}")

    def replaced(value: Any, depth: int = 0) -> Any:
        if not isinstance(value, str) or depth > 8:
            return value

        def referred(found: re.Match[str]) -> Any:
            other = settings.get(found[1])
            return replaced(other, depth + 1)

        if alone := reference.fullmatch(value):
            return referred(alone)
        return reference.sub(lambda found: str(referred(found)), value)

    mappings = {}
    for name, value in settings.items():
        alone = reference.fullmatch(value) if isinstance(value, str) else None
        if alone is None:
            continue
        start = f"{alone[1]}."
        for key, other in settings.items():
            copied = f"{name}.{key.removeprefix(start)}"
            if key.startswith(start) and copied not in settings:
                mappings[copied] = other
    every = mappings | settings
    return {name: replaced(value) for name, value in every.items()}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the settings of a YAML file by their full names. Raises Unreadable."""
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Unreadable(f"{path}: {str(error).splitlines()[0]}") from error
    return flat(tree) if isinstance(tree, dict) else {}


# ---------------------------------------------------------------------------------------------------------------- bash


def expand(
    script: str,
    name: str = "run.sh",
    words: list[str] | None = None,
) -> list[list[str]]:
    """Return the words of every command of a shell script, expanded by bash, which executes no program.

    A parameter that the script insists on, such as ``${1:?usage}``, is held by its own name where it is not given.
    Raises Unreadable where bash is missing, does not end, or a variable is not set.
    """
    given = list(words or [])
    found, errors = expanded(script, name, given, {})
    if not found and "syntax error" in errors:  # NAME=<what you have to fill in>
        script = PLACE.sub(lambda held: held[1].replace(" ", "_"), script)
        found, errors = expanded(script, name, given, {})
    while not trains(found) and (missing := POSITIONAL.search(errors)):
        wanted = int(missing[1])
        if wanted > 9:
            break
        given += [f"ARGUMENT_{number}" for number in range(len(given) + 1, wanted + 1)]
        found, later = expanded(script, name, given, {})
        if later == errors:
            break
        errors = later
    if not trains(found):
        ranks = RANKS.findall(script)
        first = {rank: "0" for rank in ranks if rank not in os.environ}
        if first:  # a branch that only one node takes
            found, errors = expanded(script, name, given, first)
    if not trains(found) and (missing := UNSET.search(errors)):
        raise Unreadable(f"{name}: {missing[1]}: {missing[2]}; set the variable, or pass it")
    if not found and (wrong := re.search(r"line (\d+): (syntax error[^\n]*)", errors)):
        recorder = RECORDER.read_text(encoding="utf-8")
        before = recorder.count("\n") + 2  # lines that stand before the script's own
        line = int(wrong[1]) - before
        raise Unreadable(f"{name}: line {line}: {wrong[2]}; correct it, or pass the expanded command after --")
    return [part for command in found for part in inner(command, name)]


def trains(commands: list[list[str]]) -> bool:
    """Return True where a command starts the training of a known framework, or a Python file."""
    for words in commands:
        if find_program(words) or python_file(words):
            return True
        if any(shell in words for shell in SHELLS):
            return True
    return False


def expanded(
    script: str,
    name: str,
    words: list[str],
    variables: dict[str, str],
) -> tuple[list[list[str]], str]:
    """Return (the words of every command, what bash wrote to standard error) of a script."""
    env = {}
    for key, value in os.environ.items():
        if key not in INHERITED and "BASH_FUNC" not in key:
            env[key] = value
    env |= variables
    with tempfile.TemporaryDirectory() as empty, tempfile.TemporaryFile() as record:
        text = f"exec 3>&{record.fileno()}\n{RECORDER.read_text(encoding='utf-8')}\n{script}"
        command = ["/bin/bash", "--norc", "--noprofile", "-c", text, name, *words]
        try:
            done = subprocess.run(
                command,
                env=env | {"PATH": empty},
                pass_fds=(record.fileno(),),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=SECONDS,
            )
        except FileNotFoundError as error:
            raise Unreadable("/bin/bash: no such file; pass the expanded command after -- instead") from error
        except subprocess.TimeoutExpired as error:
            raise Unreadable(f"{name}: bash did not finish within {SECONDS:g} s; pass the command after --") from error
        record.seek(0)
        recorded = record.read().decode(errors="replace")
        parts = recorded.split("\1\0")[:-1]
        commands = [part.split("\0")[:-1] for part in parts]
    return commands, done.stderr.decode(errors="replace")


def inner(
    words: list[str],
    name: str,
) -> list[list[str]]:
    """Return the commands of ``bash -c TEXT`` in a command line, or else the command line itself."""
    if find_program(words) is not None:
        return [words]
    triples = zip(words, words[1:], words[2:], strict=False)
    for program, option, text in triples:
        shell = program.rpartition("/")[2]
        if shell in ("bash", "sh") and option in ("-c", "-lc", "-ec"):
            return expand(text, name)
    return [words]


# -------------------------------------------------------------------------------------------------------- command lines


def find_program(words: list[str]) -> tuple[str, int] | None:
    """Return (framework, index of the first word after the program) of a command line; None without a program."""
    for i, word in enumerate(words):
        if word.endswith("trl") and words[i + 1 : i + 2] == ["grpo"]:
            return "trl", i + 2
        for pattern, framework in PROGRAMS:
            if re.match(pattern, word):
                following = i + 1
                if ".launcher." in word or "quickstart" in word:  # the next word is the program, or the experiment
                    following += 1
                return framework, following
    return None


def other_program(words: list[str]) -> bool:
    """Return True for a command line whose program does something else than reinforcement learning."""
    if find_program(words) is not None:
        return False
    for first, second in itertools.pairwise(words):
        if first == "trl" and second != "grpo":
            return True
    return any(OTHER.match(word) for word in words)


def python_file(words: list[str]) -> tuple[str, int] | None:
    """Return (a Python file that the command starts, index of the word after it); None without one."""
    for i, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-") and "mason" not in word:
            return word, i + 1
    return None


def own_words(words: list[str]) -> list[str]:
    """Return the words up to the next command of a list such as ``setup && train && evaluate``."""
    for i, word in enumerate(words):
        if word in STOP:
            return words[:i]
    return words


def command_of(
    words: list[str],
    framework: str = "",
) -> Command:
    """Read one command line. ``framework``: what the user says it is, or ""."""
    command = Command(framework)
    words = [word for word in words if word not in ("", "\\", "\n")]
    while words and (given := ASSIGNMENT.fullmatch(words[0])) and "." not in given[1]:
        command.env[given[1]] = given[2]
        words = words[1:]
    found = find_program(words)
    if found is None and (file := python_file(words)):
        found = "", file[1]  # a script of its user's: its settings say whose parser it has
        if Path(file[0]).is_file():
            read_python(Path(file[0]), command)
    if found is not None:
        command.framework = framework or command.framework or found[0]
        command.launcher = words[: found[1]]
        words = own_words(words[found[1] :])
    elif words and not words[0].startswith("-") and not HYDRA.match(words[0]):
        words = words[1:]
    for first, second in itertools.pairwise(command.launcher):
        if first == "--config_file":
            command.settings["accelerate_config"] = second
    for key, value in pairs(words):
        command.settings[key] = value
    return command


def pairs(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of ``--name value ...``, ``--name=value``, ``--switch`` and ``path=value`` words."""
    i = 0
    while i < len(words):
        word = words[i]
        i += 1
        if word.startswith("--") and len(word) > 2:
            name, equals, text = word[2:].partition("=")
            values = [text] if equals else []
            while not equals and i < len(words) and not is_name(words[i]):
                values.append(words[i])
                i += 1
            yield name.replace("-", "_"), tuple_of(values)
        elif path := HYDRA.fullmatch(word):
            deleted = path[1] == "~"
            yield path[2], None if deleted else value_of(path[3])
        elif word.endswith((".yaml", ".yml")):
            yield "config", word


def is_name(word: str) -> bool:
    """Return True for a word that begins another setting."""
    if word.startswith("--"):
        return len(word) > 2
    return re.match(r"(\+\+|\+|~)?[a-z_]\w*\.[\w.]+=", word) is not None


def tuple_of(texts: list[str]) -> Any:
    """Return the value of an option: True without one, one value, or a list."""
    values = [value_of(text) for text in texts]
    if not values:
        return True
    return values[0] if len(values) == 1 else values


# --------------------------------------------------------------------------------------------------------------- Python


def read_python(
    path: Path,
    command: Command,
) -> None:
    """Add the settings of ``GRPOConfig(...)`` and ``GRPOTrainer(...)`` in a Python file. Raises Unreadable."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise Unreadable(f"{path}: {error}") from error
    names = names_in(tree, command)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in calls:
        if name_of(call.func).endswith("GRPOConfig"):
            read_arguments(call, names, command, "")
    for call in calls:
        if name_of(call.func).endswith("GRPOTrainer"):
            read_arguments(call, names, command, "trainer.")
    if any(key.startswith("trainer.") for key in command.settings):
        command.framework = command.framework or "trl"


def names_in(tree: ast.Module, command: Command) -> dict[str, ast.expr]:
    """Return name -> expression of what a Python file assigns; a default where that is all there is.

    ``args.NAME`` stands for the option, field or attribute of that name. Adds the file's functions to the command.
    """
    names: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Name):
                names[target.id] = node.value
            elif isinstance(target, ast.Attribute):
                names[f".{target.attr}"] = node.value
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            names.setdefault(node.target.id, node.value)
        if isinstance(node, ast.ImportFrom | ast.Import):
            for alias in node.names:
                last = alias.name.rpartition(".")[2]
                names.setdefault(alias.asname or alias.name, ast.Constant(last))
        if isinstance(node, ast.FunctionDef):
            names.setdefault(node.name, ast.Constant(node.name))
            given = node.args
            every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            command.functions[node.name] = [argument.arg for argument in every]
            for argument, default in argument_defaults(given):
                names.setdefault(argument, default)
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                add_field(line, names)
        if isinstance(node, ast.Call) and name_of(node.func).endswith("add_argument"):
            add_option(node, names)
    return names


def argument_defaults(arguments: ast.arguments) -> list[tuple[str, ast.expr]]:
    """Return (name, default) of the arguments of a function that have one."""
    plain = [*arguments.posonlyargs, *arguments.args]
    required = len(plain) - len(arguments.defaults)
    found = list(zip(plain[required:], arguments.defaults, strict=True))
    by_name = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    found += [pair for pair in by_name if pair[1] is not None]
    return [(argument.arg, default) for argument, default in found]


def add_field(line: ast.stmt, names: dict[str, ast.expr]) -> None:
    """Add a field of a class with its default, also that of ``field(default=...)``."""
    if isinstance(line, ast.AnnAssign):
        target = line.target
    elif isinstance(line, ast.Assign):
        target = line.targets[0]
    else:
        return
    value = line.value
    if not isinstance(target, ast.Name):
        return
    if isinstance(value, ast.Call):
        called = name_of(value.func).rpartition(".")[2]
        if called in ("field", "Field"):
            value = keywords_of(value).get("default")
    if value is not None:
        names.setdefault(f".{target.id}", value)


def add_option(call: ast.Call, names: dict[str, ast.expr]) -> None:
    """Add the default of ``add_argument("--name", default=...)``; False of a switch."""
    constants = [item.value for item in call.args if isinstance(item, ast.Constant)]
    words = [value for value in constants if isinstance(value, str)]
    long = next((word for word in words if word.startswith("--")), None)
    if long is None:
        return
    given = keywords_of(call)
    action = getattr(given.get("action"), "value", "")
    switch = ast.Constant(False) if action == "store_true" else None
    default = given.get("default", switch)
    if default is not None:
        attribute = long[2:].replace("-", "_")
        names.setdefault(f".{attribute}", default)


def keywords_of(call: ast.Call) -> dict[str, ast.expr]:
    """Return name -> expression of the keyword arguments of a call, without ``**mapping``."""
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def read_arguments(
    call: ast.Call,
    names: dict[str, ast.expr],
    command: Command,
    prefix: str,
) -> None:
    """Add the keyword arguments of a call. What is no literal is noted, and so are ``args``, which was read before."""
    given: list[tuple[str, ast.expr]] = []
    for keyword in call.keywords:
        if keyword.arg:
            given.append((keyword.arg, keyword.value))
        else:
            given += entries(keyword.value, names)
    if not prefix and call.args and not is_ellipsis(call.args[0]):
        given.insert(0, ("output_dir", call.args[0]))
    for name, node in given:
        if prefix and name in ("args", "processing_class", "callbacks", "optimizers"):
            continue
        try:
            command.settings[prefix + name] = literal(node, names)
        except ValueError:
            shown = ast.unparse(node)[:60]
            command.notes.append(f"{prefix}{name} = {shown} is computed when the file runs")


def entries(
    node: ast.expr,
    names: dict[str, ast.expr],
) -> list[tuple[str, ast.expr]]:
    """Return (name, value) of ``**mapping`` in a call, where the mapping is ``dict(...)`` or ``{...}``."""
    for _ in range(20):
        if not (isinstance(node, ast.Name) and node.id in names):
            break
        node = names[node.id]
    if isinstance(node, ast.Call) and name_of(node.func) == "dict":
        return list(keywords_of(node).items())
    found = []
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                found.append((key.value, value))
    return found


def is_ellipsis(node: ast.expr) -> bool:
    """Return True for the ... that an excerpt has for what it leaves out."""
    return isinstance(node, ast.Constant) and node.value is ...


def name_of(node: ast.expr) -> str:
    """Return the dotted name of a function or value; "" for anything else."""
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def literal(
    node: ast.expr,
    names: dict[str, ast.expr],
    depth: int = 0,
) -> Any:
    """Return the value of an expression without running it. Raises ValueError where that takes running it.

    load_dataset(NAME, CONFIGURATION, split=SPLIT) becomes NAME:CONFIGURATION@SPLIT, a function its name.
    """
    if depth > 20 or is_ellipsis(node):
        raise ValueError

    def value_at(part: ast.expr) -> Any:
        return literal(part, names, depth + 1)

    if isinstance(node, ast.Name) and node.id in names:
        return value_at(names[node.id])
    if isinstance(node, ast.List | ast.Tuple):
        return [value_at(item) for item in node.elts]
    if isinstance(node, ast.Attribute):
        module = name_of(node).partition(".")[0]
        if module in ("torch", "rewards", "trl"):
            return node.attr  # a type, or a function of a module
        known = names.get(f".{node.attr}")
        if known is not None:  # an option, a field, an attribute
            return value_at(known)
    if isinstance(node, ast.BinOp | ast.Compare | ast.BoolOp | ast.IfExp):
        return operation(node, value_at)
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.FormattedValue) else p for p in node.values]
        texts = [str(value_at(part)) for part in parts]
        return "".join(texts)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        inner = value_at(node.value)
        split = node.slice.value
        of_data = isinstance(node.value, ast.Name | ast.Call)
        if of_data and isinstance(inner, str) and isinstance(split, str):
            name = inner.partition("@")[0]
            return f"{name}@{split}"
    if isinstance(node, ast.Call):
        return result_of(node, value_at)
    return evaluated(node)


def evaluated(node: ast.expr) -> Any:
    """Return the value of a constant. Raises ValueError for anything else."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        raise ValueError from None


def operation(
    node: ast.BinOp | ast.Compare | ast.BoolOp | ast.IfExp,
    value_at: Callable[[ast.expr], Any],
) -> Any:
    """Return the value of an operation by the values of its parts. Raises ValueError where it is not known."""
    if isinstance(node, ast.IfExp):
        chosen = node.body if value_at(node.test) else node.orelse
        return value_at(chosen)
    if isinstance(node, ast.BoolOp):
        if not isinstance(node.op, ast.Or):
            raise ValueError
        values = (value_at(side) for side in node.values)
        return next((value for value in values if value), None)
    if isinstance(node, ast.Compare):
        compare = COMPARISONS.get(type(node.ops[0]))
        if compare is None or len(node.ops) > 1:
            raise ValueError
        left = value_at(node.left)
        return compare(left, value_at(node.comparators[0]))
    compute = ARITHMETIC.get(type(node.op))
    if compute is None:
        raise ValueError
    left = value_at(node.left)
    right = value_at(node.right)
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        raise ValueError
    if right == 0 and not isinstance(node.op, ast.Add):
        raise ValueError
    return compute(left, right)


def result_of(
    node: ast.Call,
    value_at: Callable[[ast.expr], Any],
) -> Any:
    """Return what stands for the result of a call: a data set, a default, or a name. Raises ValueError otherwise."""
    called = name_of(node.func).rpartition(".")[2]
    if not called:
        called = getattr(node.func, "attr", "")
    plain = [item for item in node.args[:2] if not isinstance(item, ast.Lambda)]
    arguments = [value_at(item) for item in plain]
    if called == "load_dataset":
        given = keywords_of(node)
        keywords = {name: value_at(part) for name, part in given.items()}
        return dataset_name(arguments, keywords)
    if called in SAME_DATA:
        return value_at(node.func.value)
    if called in ("get", "getenv") and len(arguments) == 2:  # os.environ.get(NAME, DEFAULT)
        return arguments[1]
    if called in ("str", "Path", "int", "float") and len(arguments) == 1:
        return arguments[0]
    if called == "from_pretrained" and arguments:
        return arguments[0]
    if called.startswith("get_") and called != "get_peft_config":
        return called  # a reward function that another one makes
    return evaluated(node)


def dataset_name(
    arguments: list[Any],
    keywords: dict[str, Any],
) -> str:
    """Return the name of a data set here, ID:CONFIGURATION@SPLIT, from the arguments of load_dataset."""
    name = keywords.get("path") or arguments[0]
    files = keywords.get("data_files")
    if name in ("json", "parquet", "csv") and files:
        if isinstance(files, dict):
            files = next(iter(files.values()))
        return files if isinstance(files, str) else ",".join(files)
    second = arguments[1] if len(arguments) > 1 else None
    configuration = keywords.get("name") or second
    split = keywords.get("split")
    found = str(name)
    if configuration:
        found += f":{configuration}"
    if split:
        found += f"@{split}"
    return found

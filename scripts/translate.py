"""Translate another framework's training command into one of ours: their command in, our command out.

    python scripts/translate.py -- python3 -m verl.trainer.main_ppo data.train_batch_size=1024 ...
    python scripts/translate.py verl --file run.sh          bash expands the variables, and runs no program
    python scripts/translate.py train.py                    GRPOConfig and GRPOTrainer, by the syntax tree
    python scripts/translate.py --metrics verl              their names of metrics, and ours

Prints one command that passes --dry_run, then what differs and why, then what has no counterpart. The framework (verl,
trl, open-instruct, openrlhf, areal, tinyzero) is recognized when it is not named. Nothing that is read is executed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the scripts are not a package

import translation_input as reading
import translation_rules as rules

PRESETS = rules.ROOT / "runtime" / "arguments" / "presets.toml"
LAUNCH = "accelerate launch --config_file scripts/zero2.yaml"
# Keys of TinyZero, an early verl, that later ones replaced by others or set by default.
EARLY = ("ppo_micro_batch_size", "log_prob_micro_batch_size")


# ---------------------------------------------------------------------------------------------------------- recognition


def recognized(command: reading.Command) -> str:
    """Return the framework of a command, by its program or by the one whose table has most of its keys."""
    names = set(command.settings)
    file = Path(str(command.settings.get("config", "")))
    if file.suffix in (".yaml", ".yml") and file.is_file():
        names |= reading.read_yaml(file).keys()
    known = {name: len(names & rules.rows(name).keys()) for name in rules.FRAMEWORKS}
    best = max(known, key=known.__getitem__)
    enough = known[best] >= min(3, len(names)) and 2 * known[best] > len(names)
    framework = command.framework or (best if known[best] and enough else "")
    if framework == "verl" and is_early(command):
        return "tinyzero"
    return framework


def is_early(command: reading.Command) -> bool:
    """Return True for a verl command that only TinyZero's version of it reads as it is meant."""
    text = " ".join([*map(str, command.settings.values()), *command.settings]).lower()
    keys = [key for key in command.settings if "reward_model." not in key]
    early = any(key.rpartition(".")[2] in EARLY for key in keys) or len(keys) >= 15
    return "tinyzero" in text or (early and set(keys) <= rules.rows("tinyzero").keys())


# ---------------------------------------------------------------------------------------------------------- translation


def translate(command: reading.Command, framework: str, gpus: int | None = None, defaults: bool = True) -> rules.Ours:
    """Return our command for one of a framework's. ``gpus``: the GPUs of the launch, where the user says so.

    ``defaults``: leave out what the preset sets, and add what it cannot; without, only computed flags are there.
    """
    ours = rules.Ours()
    for note in command.notes:
        ours.lacks(note)
    read_config(command, framework, ours)
    theirs = rules.settings_of(command, framework, ours)
    launched = gpus or launch_size(command.launcher)
    if launched:
        theirs.given["processes"] = launched
        ours.processes = launched
    rules.RULES[framework](theirs, ours)
    if gpus:
        ours.processes = gpus
    theirs.given.pop("processes", None)
    theirs.given.pop("functions", None)
    copy_equal(theirs, ours)
    explain(theirs, ours)
    collect(ours)
    if defaults:
        apply_preset(ours, framework)
    return ours


def read_config(
    command: reading.Command,
    framework: str,
    ours: rules.Ours,
) -> None:
    """Put the settings of a YAML file under those of the command line."""
    given = command.settings
    folder, stem = given.pop("config_path", None), given.pop("config_name", None)
    name = given.pop("config", None)
    stem = str(stem or "").removesuffix(".yaml")
    if stem not in ("", "ppo_trainer", "ppo_megatron_trainer"):
        name = Path(str(folder or "config")) / f"{stem}.yaml"
    if name is None:
        return
    path = Path(str(name))
    known = rules.areal_example(str(name)) if framework == "areal" else {}
    if path.is_file():
        command.settings = reading.resolved(reading.read_yaml(path) | given)
    elif known:
        command.settings = known | given
        ours.note(f"{name} is not here; its settings are those of {rules.version('areal')}")
    else:
        ours.lacks(f"{name}: no such file here, so its settings are not translated; run this where the file is")


def launch_size(words: list[str]) -> int:
    """Return the number of processes that a launcher's words ask for; 0 where they do not say."""
    found = {"nodes": 1}
    names = {
        "--num_processes": "all",
        "--nproc_per_node": "each",
        "--num_gpus": "each",
        "--nnodes": "nodes",
        "-n": "all",
    }
    for i, word in enumerate(words):
        name, equals, value = word.replace("--nproc-per-node", "--nproc_per_node").partition("=")
        value = value if equals else words[i + 1] if i + 1 < len(words) else ""
        if name in names and value.isdigit():
            found[names[name]] = int(value)
    return found.get("all", found.get("each", 0) * found["nodes"])


def copy_equal(theirs: rules.Theirs, ours: rules.Ours) -> None:
    """Set the flags of the keys that are equal, as given, and of those whose defaults the command relies on."""
    table = rules.rows(theirs.framework)
    flags = rules.fields(ours.script)
    for key in [*rules.RELIED[theirs.framework], *theirs.given]:
        row = table.get(key)
        relied = key not in theirs.given
        if row is None or row.kind != "equal":
            if row is not None and relied:
                for flag in (word.strip(",") for word in row.ours.split() if word.startswith("--")):
                    if flag[2:] in ours.flags:
                        ours.relied[flag[2:]] = f"{key}={row.default}"
            continue
        flag = row.ours.removeprefix("--")
        try:
            value = converted(theirs(key), flags.get(flag, ""))
        except (TypeError, ValueError):  # a variable that no shell expanded
            ours.lacks(f"{theirs.text(key)}: is no number; give --{flag} NUMBER")
            continue
        if relied and flag in ours.flags:
            continue  # a rule computed it from another key
        if flag in flags:
            ours.set(flag, value, f"{key}={row.default}" if relied else "")
        elif not relied and value != reading.value_of(row.default):
            ours.lacks(f"{theirs.text(key)}: --{flag} is for {'grpo' if ours.script == 'ppo' else 'ppo'}.py")


def converted(value: Any, annotation: str) -> Any:
    """Return a value of theirs in the type of our flag."""
    if value is None:
        return None
    if annotation == "bool":
        return str(value).lower() in ("true", "1", "yes")
    if annotation.startswith("int"):
        return int(float(value))
    if annotation.startswith("float"):
        return float(value)
    if annotation.startswith("tuple"):
        return list(value) if isinstance(value, list | tuple) else [value]
    return rules.path_text(value) if str(value).startswith("~") else value


def explain(
    theirs: rules.Theirs,
    ours: rules.Ours,
) -> None:
    """Say of the given keys what is not translated: what differs, what is absent, what is unknown; equal notes once."""
    table = rules.rows(theirs.framework)
    said: dict[tuple[bool, str], list[str]] = {}
    for key, value in theirs.given.items():
        row = row_of(key, table)
        if row is None:
            near = difflib.get_close_matches(key, table, 1, 0.85)
            hint = f"; the nearest is {near[0]}" if near else ""
            ours.lacks(f"{theirs.text(key)}: no key of {rules.version(theirs.framework)}{hint}")
            continue
        off = value in (None, False, 0, [], "", {}) or str(value).lower() in ("none", "disabled", "no")
        if value == reading.value_of(row.default) or (off and row.kind == "not here") or not row.note:
            continue
        if row.kind in ("always", "not here"):
            note = f"{row.note}{f' ({row.ours})' if row.ours else ''}"
            said.setdefault((row.kind == "always", note), []).append(theirs.text(key))
    for (differs, note), texts in said.items():
        (ours.note if differs else ours.lacks)(f"{', '.join(texts)}: {note}")


def row_of(key: str, table: dict[str, rules.Row]) -> rules.Row | None:
    """Return the row of a key, by its full name, or of the mapping that the key is an entry of."""
    while key and key not in table:
        key = key.rpartition(".")[0]
    row = table.get(key)
    return row


def collect(ours: rules.Ours) -> None:
    """Set the flags that have several parts, and leave out those that the script does not have."""
    known = rules.fields(ours.script)
    if ours.vllm_args:
        ours.set("vllm_args", json.dumps(ours.vllm_args))
    if ours.critic:
        ours.set("critic", ours.critic)
    if ours.flags.get("vllm_tensor_parallel_size") == 1:
        del ours.flags["vllm_tensor_parallel_size"]
    if ours.flags.get("beta") == 0:
        ours.flags.pop("kl_reward_estimator", None)
    for flag in [flag for flag in ours.flags if flag not in known]:
        value = ours.flags.pop(flag)
        ours.relied.pop(flag, None)
        if value not in (None, False, 0):
            ours.lacks(f"--{flag} {value}: not a flag of {rules.SCRIPTS[ours.script]}")


def apply_preset(ours: rules.Ours, framework: str) -> None:
    """Leave out what the preset sets; where the script has no preset, set its flags one by one."""
    table = tomllib.loads(PRESETS.read_text(encoding="utf-8"))[framework]
    theirs = {flag: None if value == "None" else value for flag, value in table["flags"].items()}
    if ours.script in table["scripts"] and ours.preset is not None:
        for flag, value in list(ours.flags.items()):
            if flag in theirs and same(value, theirs[flag]):
                ours.flags.pop(flag)
                ours.relied.pop(flag, None)
        return
    ours.preset = None
    known = rules.fields(ours.script)
    for flag, value in {**theirs, **rules.BESIDE_PRESET.get((framework, ours.script), {})}.items():
        if flag in known and flag not in ours.flags:
            ours.flags[flag] = value
            ours.relied[flag] = f"{table['version']}'s default"


def same(mine: Any, theirs: Any) -> bool:
    """Return True for equal values of a flag; lists and numbers of either type are compared by value."""
    return list(mine) == list(theirs) if isinstance(mine, list) and isinstance(theirs, list) else mine == theirs


# --------------------------------------------------------------------------------------------------------------- output


def words_of(ours: rules.Ours) -> list[str]:
    """Return the words of our command after the script's name."""
    words = ["--preset", ours.preset] if ours.preset else []
    known = rules.fields(ours.script)
    for flag, value in sorted(ours.flags.items(), key=lambda item: list(known).index(item[0])):
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        elif isinstance(value, list | tuple) and known[flag].startswith("tuple"):
            words += [f"--{flag}", *map(plain, value)] if value else []
        elif isinstance(value, list | tuple):  # a variable of several words, without quotes
            words += [f"--{flag}", " ".join(map(plain, value))]
        else:
            words += [f"--{flag}", plain(value)]
    return words


def plain(value: Any) -> str:
    """Return a value as a word: numbers short, and integers without a point."""
    return f"{value:g}" if isinstance(value, float) and value == float(f"{value:g}") else str(value)


def command_line(ours: rules.Ours) -> str:
    """Return the complete command on one line."""
    script = rules.SCRIPTS[ours.script]
    env = [f"{name}={shlex.quote(value)}" for name, value in ours.env.items()]
    start = [f"python {script}" if ours.processes == 1 else f"{LAUNCH} --num_processes {ours.processes} {script}"]
    return " ".join([*env, *start, shlex.join(words_of(ours))])


def blocks(ours: rules.Ours, framework: str) -> str:
    """Return the command, what differs, and what has no counterpart, in three blocks."""
    lines = [command_line(ours), "", f"What differs from {rules.version(framework)}, and why:"]
    if framework == "tinyzero":
        lines.append(
            "  Read as TinyZero, whose keys are those of verl in early 2025; name verl to read it as verl 0.9.1"
        )
    if ours.preset:
        table = tomllib.loads(PRESETS.read_text(encoding="utf-8"))[framework]
        lines.append(
            f"  --preset {ours.preset}: the defaults of {table['version']} that change learning; the start prints each"
        )
    relied = sorted(ours.relied.items())
    lines += [
        f"  --{flag}: from a default that the command leaves out, {source}"
        for flag, source in relied
        if flag in ours.flags
    ]
    if ours.nodes > 1:
        lines.append(
            f"  {ours.nodes} nodes: python scripts/submit.py --num_nodes {ours.nodes} submits this to a cluster"
        )
    lines += [f"  {text}" for text in ours.differs]
    if lines[-1].endswith("why:"):
        lines.append("  nothing")
    lines += ["", "No counterpart here:", *([f"  {text}" for text in ours.absent] or ["  nothing"])]
    return "\n".join(lines)


def answer_for(
    script: str,
    family: str,
    words: list[str],
    gpus: int | None,
) -> str:
    """Return the error text for words given to one of our scripts: a heading, notes, and the command as the last line.

    A complete command of a framework becomes a complete command with the preset. Where a few of its words stand among
    our own flags, they alone are translated, and nothing else changes. "" where no word is a framework's.
    """
    command = reading.command_of(words)
    command.settings = dict(reading.pairs(words))
    flags = rules.fields(family)
    own = {key: value for key, value in command.settings.items() if key.removeprefix("no_") in flags}
    foreign = {key: value for key, value in command.settings.items() if key not in own}
    framework = recognized(reading.Command(settings=foreign)) if foreign else ""
    if not framework:
        return ""
    table = rules.rows(framework)
    alone = {key: own[key] for key in own if key not in table}
    theirs = {key: value for key, value in command.settings.items() if key not in alone}
    if (len(foreign) >= 3 and not alone) or len(theirs) >= 10:
        ours = translate(reading.Command(framework, theirs), framework, gpus)
    else:
        ours = few_words(theirs, framework, family, gpus)
    add_own(alone, ours)
    text = blocks(ours, framework).splitlines()
    line = text[0].replace(rules.SCRIPTS[ours.script], script, 1) if ours.script == family else text[0]
    notes = [part.strip() for part in text[1:] if part.startswith("  ") and part != "  nothing"]
    return "\n".join([f"these flags belong to {rules.version(framework)}", *notes, line])


def few_words(
    foreign: dict,
    framework: str,
    family: str,
    gpus: int | None,
) -> rules.Ours:
    """Return our flags for a few words of a framework: those that their rows name, and no others."""
    known, table = rules.fields(family), rules.rows(framework)
    start = {}
    if "algorithm.adv_estimator" in table:
        start = {"algorithm.adv_estimator": "gae" if family == "ppo" else "grpo"}
    before = translate(reading.Command(framework, dict(start)), framework, gpus, defaults=False)
    ours = translate(reading.Command(framework, start | foreign), framework, gpus, defaults=False)
    given = [row for key in foreign if (row := row_of(key, table))]
    given = [table[row.ours] if row.kind == "renamed" else row for row in given]
    named = {flag for row in given for flag in re.findall(r"--(\w+)", row.ours)}
    named |= {"prompt_key", "ground_truth_key"} - set(before.flags)  # the columns that a reward function reads
    ours.flags = {flag: value for flag, value in ours.flags.items() if flag in named and flag in known}
    preset, ours.script, ours.preset, ours.relied = ours.preset, family, None, {}
    if not gpus and "num_processes" not in named and "vllm_engines" not in ours.flags:
        ours.processes = 1
    ours.differs = [text for text in ours.differs if text not in before.differs]
    if preset:
        ours.differs.append(
            f"only the words given are translated; --preset {preset} sets the defaults that they rely on"
        )
    return ours


def add_own(
    own: dict[str, Any],
    ours: rules.Ours,
) -> None:
    """Add flags of our own, which stood among a framework's words; they win."""
    known = rules.fields(ours.script)
    for key, value in own.items():
        flag = key.removeprefix("no_") if key not in known else key
        if flag not in known:
            continue
        if flag == "vllm_args" and isinstance(value, dict):  # an old form of it, beside settings that were translated
            value = json.loads(ours.flags.get(flag, "{}")) | value
        value = json.dumps(value) if isinstance(value, dict) else value
        ours.flags[flag] = False if flag != key else converted(value, known[flag]) if known[flag] == "bool" else value
        ours.relied.pop(flag, None)


def metrics(framework: str) -> str:
    """Return a framework's names of metrics next to ours."""
    lines = (rules.TABLES / "metrics.tsv").read_text(encoding="utf-8").splitlines()[1:]
    header, *table = [line.split("\t") for line in lines]
    column = header.index(framework)
    named = [(cells[column], cells[0]) for cells in table if len(cells) > column and cells[column]]
    width = max(len(name) for name, _ in named)
    return "\n".join(f"{name:<{width}}  {ours}" for name, ours in named)


# ----------------------------------------------------------------------------------------------------------------- main


def commands_in(path: str, words: list[str], framework: str) -> list[reading.Command]:
    """Return the training commands of a file: a shell script, a Python file, YAML, or - for standard input."""
    if path.endswith(".py"):
        command = reading.Command(framework)
        reading.read_python(Path(path), command)
        command.settings |= dict(reading.pairs(words))
        return [command]
    if path.endswith((".yaml", ".yml")):
        return [reading.Command(framework, {"config": path} | dict(reading.pairs(words)))]
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8", errors="replace")
    parts = [part for part in reading.expand(text, path, words) if not reading.other_program(part)]
    found = [reading.command_of(part, framework) for part in parts]
    named = [command for command in found if command.framework and command.settings]
    return named or [command for command in found if command.settings and recognized(command)]


def parser() -> argparse.ArgumentParser:
    """Return the parser of this program's own arguments, before --."""
    found = argparse.ArgumentParser(
        prog="translate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument(
        "framework",
        nargs="?",
        choices=[*rules.FRAMEWORKS, []],
        default=[],
        metavar="FRAMEWORK",
    )
    found.add_argument(
        "--file",
        help="Read a shell script, a Python file, a YAML file, or - for standard input.",
    )
    found.add_argument(
        "--gpus",
        type=int,
        help="GPUs of the launch. Default: as the command says, else 1.",
    )
    found.add_argument(
        "--metrics",
        choices=rules.FRAMEWORKS,
        help="Print the names of metrics next to ours.",
    )
    found.add_argument(
        "--script",
        help="Answer for this script, whose own flags may be among the words.",
    )
    found.add_argument(
        "--family",
        choices=["grpo", "ppo"],
        default="grpo",
        help="Kind of the script.",
    )
    found.add_argument(
        "--command_only",
        action="store_true",
        help="Print only the command.",
    )
    return found


def main(words: list[str]) -> int:
    """Run the program; return its exit code: 2 where there is nothing that can be translated."""
    at = words.index("--") if "--" in words else len(words)
    if words and words[0] not in rules.FRAMEWORKS and Path(words[0]).is_file():
        words = ["--file", *words]
        at += 1
    args = parser().parse_args(words[:at])
    theirs = words[at + 1 :]
    framework = args.framework or ""
    if args.metrics:
        print(metrics(args.metrics))
        return 0
    if args.script:
        said = answer_for(args.script, args.family, theirs, args.gpus)
        print(said, end="\n" if said else "")
        return 0 if said else 2
    try:
        if args.file:
            found = commands_in(args.file, theirs, framework)
        elif len(theirs) == 1 and len(theirs[0].split()) > 1:  # the whole command in quotes
            found = [reading.command_of(part, framework) for part in reading.expand(theirs[0])]
        else:
            found = [reading.command_of(theirs, framework)] if theirs else []
    except (reading.Unreadable, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    named = [(command, framework or recognized(command)) for command in found]
    named = [(command, name) for command, name in named if name]
    if not named:
        known = ", ".join(rules.FRAMEWORKS)
        print(f"error: no training command of {known} found; pass it after --, or with --file", file=sys.stderr)
        return 2
    for i, (command, name) in enumerate(named):
        ours = translate(command, name, args.gpus)
        if i:
            print()
        print(command_line(ours) if args.command_only else blocks(ours, name))
    return 0


if __name__ == "__main__":
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # ``| head`` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    raise SystemExit(code)

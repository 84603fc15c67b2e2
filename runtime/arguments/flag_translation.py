"""Translate other frameworks' flags (by the rows of docs/flags.md) and removed flags for an error message.

Both spellings are supported, by name and by path: ``--num_generations 8``, ``--algorithm.kl_ctrl.kl_coef=0.005``,
``data.train_batch_size=1024``, ``+trainer.val_before_train=False``. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

from runtime.system.process import refuse

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "flags.md"
PATH = re.compile(r"[+~]{0,2}([A-Za-z_][\w.]*)=")  # a word that sets a field by its path, as Hydra has it
SWITCH = {"true": "", "yes": "", "1": "", "false": "no-", "no": "no-", "0": "no-"}

# Settings of other frameworks that are fixed here and have no row on the page.
FULL_DISTRIBUTION = (
    "fixed here: samples are drawn from the full distribution, so that the trainer's log-probs equal the sampler's; "
    "it is off in training and evaluation; drop the flag"
)
FIXED = {
    "top_p": FULL_DISTRIBUTION,
    "top_k": FULL_DISTRIBUTION,
    "min_p": FULL_DISTRIBUTION,
    "min_tokens": FULL_DISTRIBUTION,
    "min_new_tokens": FULL_DISTRIBUTION,
    "frequency_penalty": FULL_DISTRIBUTION,
    "presence_penalty": FULL_DISTRIBUTION,
    "repetition_penalty": FULL_DISTRIBUTION,
    "do_sample": "fixed here: greedy responses to a prompt are all identical, so a group would have no variance; for "
    "greedy evaluation use --eval_temperature 0",
}
# Flags of earlier commits, and what replaces each. "{}" stands for the value that was given.
REMOVED = {
    "adam_eps": "removed: AdamW's epsilon is 1e-8",
    "kl_horizon": "--kl_target TARGET {}",
    "logprob_micro_batch_tokens": "removed: --micro_batch_tokens is the budget of passes without gradient as well",
    "record_batches": "removed: a step is repeatable from the checkpoint before it; studies/replay.py rebuilds its "
    "batch",
    "ref_policy_alpha": "--ref_policy_update FREQ {}",
    "ref_policy_update_freq": "--ref_policy_update {} ALPHA",
    "require_learning": "removed: python scripts/doctor.py RUN exits with code 3 if the run did not learn",
    "reward_timeout": "--call_timeout {}",
    "reward_workers": "removed: a rank has as many verifier processes as cores, less two (1 to 32)",
    "turn_lag": "removed: answers of an environment are taken 128 engine steps after the turn",
    "turn_timeout": "--call_timeout {}",
    "vllm_gpu_memory_utilization": """--vllm_args '{"gpu_memory_utilization": {}}'""",
}


class Row(NamedTuple):
    """What a line of the page says of one name of a framework: our cell, and the framework's own."""

    framework: str
    name: str  # with its path, as far as the page has it
    ours: str
    theirs: str
    part: bool  # the name is only a part of an expression


def rows() -> list[Row]:
    """Every name on the page; none where a copy of the project has no docs."""
    if not PAGE.is_file():
        return []
    header: list[str] = []
    found = []
    for line in PAGE.read_text().partition("\n## Metrics")[0].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] == "ours":
            header = cells
        if len(cells) != len(header):
            continue
        for framework, cell in zip(header[1:], cells[1:], strict=True):
            theirs = re.sub(r"[`*¹²³⁴]", "", cell)
            for alternative in re.split("[;,]", cell):
                names = re.findall(r"`([\w.]+)`", alternative)
                for name in names:
                    part = name != names[0] or "/" in alternative
                    found.append(Row(framework, name, cells[0].replace("`", ""), " ".join(theirs.split()), part))
    return found


def matching(path: str, table: list[Row]) -> list[Row]:
    """The rows of a name or path: of those with the same last name, the ones that agree with most of the path."""
    wanted = path.split(".")[::-1]
    best: list[Row] = []
    most = (0, False)
    for row in table:
        common = 0
        for mine, other in zip(wanted, row.name.split(".")[::-1], strict=False):
            if mine != other:
                break
            common += 1
        rank = (common, not row.part)
        if common > 0 and rank >= most:
            best = [*best, row] if rank == most else [row]
            most = rank
    return list(dict.fromkeys(best))


def groups(words: list[str], fields: dict[str, dataclasses.Field]) -> list[list[str]]:
    """A command line in parts: each option with the words that are its values, and each PATH=VALUE."""
    found: list[list[str]] = []
    room = 0.0  # how many more values the last option takes
    kind = ""  # its type; "" of an option that is none here
    is_switch = False
    for word in words:
        if word.startswith("--") and len(word) > 2:
            found.append([word])
            flag = flag_of(word, fields)
            kind = str(fields[flag].type) if flag in fields else ""
            is_switch = kind.startswith("bool")
            any_number = not kind or "..." in kind
            room = 0 if "=" in word else float("inf") if any_number else kind.count(",") + 1
        elif room > 0 and (word.lower() in SWITCH if is_switch else bool(kind) or not PATH.match(word)):
            found[-1].append(word)
            room -= 1
        else:
            found.append([word])
    return found


def flag_of(word: str, fields: dict[str, dataclasses.Field]) -> str:
    """The name in a word such as --no-shuffle or --actor.optim.lr=1, without dashes, value and, of a flag here, no_."""
    name = word.removeprefix("--").partition("=")[0].replace("-", "_")
    return name.removeprefix("no_") if name.removeprefix("no_") in fields else name


def answer(part: list[str], fields: dict[str, dataclasses.Field], table: list[Row]) -> str | None:
    """What to give instead of an option and its values; "" where nothing is known of it, None where it is right."""
    head, *values = part
    flag = flag_of(head, fields)
    if head.startswith("--") and flag in (*fields, "help", "as"):
        return misused(head, values, flag, fields, table)
    path = PATH.match(head)
    if not head.startswith("--") and path is None:
        return None
    path = flag if head.startswith("--") else path.group(1)
    name = path.rpartition(".")[2].removeprefix("no_")
    if name in FIXED:
        return FIXED[name]
    if path.removeprefix("no_") in REMOVED:
        value = " ".join(values) or head.partition("=")[2] or "VALUE"
        return REMOVED[name].replace("{}", value)
    known = matching(path, table) or matching(path.removeprefix("no_"), table)
    here = [row for row in known if has(row, fields)]
    return told(here or known, bool(here))


def misused(
    head: str, values: list[str], flag: str, fields: dict[str, dataclasses.Field], table: list[Row]
) -> str | None:
    """What is wrong with the values of a flag that is one here; None where nothing is."""
    kind = str(fields[flag].type) if flag in fields else "bool | None"
    given = (values[0] if values else head.partition("=")[2]).lower()
    if kind == "bool" and given in SWITCH:
        return f"switches take no value; give --{SWITCH[given]}{flag}"
    if kind.startswith(("bool", "tuple")) or "=" in head:
        return None
    number = kind.split(" | ")[0] in ("int", "float")
    if values and not (number and given in ("true", "false")):
        return None
    there = [f"; {row.framework}: {row.theirs}" for row in matching(flag, table) if row.name == flag]
    return f"takes a {'number' if number else 'value'} here{''.join(there)}"


def has(row: Row, fields: dict[str, dataclasses.Field]) -> bool:
    """Whether this script has the flags of a row; a row without flags is for every script."""
    flags = re.findall(r"--(\w+)", row.ours)
    return not row.ours.startswith("--") or flags[0] in fields


def told(known: list[Row], here: bool) -> str:
    """Rows in words, those of one flag together. The framework's cell has the unit, and what else differs there."""
    said = []
    for ours in dict.fromkeys(row.ours for row in known):
        cells = [f"{row.framework}: {row.theirs}" for row in known if row.ours == ours]
        absent = "" if here else ", which this script does not have"
        if not ours.startswith(("--", "submit.py --")):
            ours = f"no flag: {ours}"
        said.append(f"{ours}{absent} ({'; '.join(dict.fromkeys(cells))})")
    return " or ".join(said)


def refuse_foreign(words: list[str], fields: dict[str, dataclasses.Field]) -> None:
    """End with exit code 2, and one answer for all, where words are other frameworks' or lack their values.

    Returns where every word is right, and where nothing is known of the others: tyro has words for those.
    """
    table = rows()
    answers = {}
    for part in groups(words, fields):
        found = answer(part, fields, table)
        if found is not None:
            answers[" ".join(part)] = found
    if not any(answers.values()):
        return
    lines = [f"{text[:60]} -> {found or 'not known'}" for text, found in answers.items()]
    refuse(
        "\n  ".join(["these flags do not exist here; use instead (docs/flags.md has other frameworks' names):", *lines])
    )

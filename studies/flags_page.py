"""Write the names in docs/flags.md, and docs/evidence/translation.md, from the tables of scripts/translation/.

python studies/flags_page.py
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))  # the scripts are not a package

import translation_rules as rules

PAGE = ROOT / "docs" / "flags.md"
START, END = "## The names that others use\n", "## What differs behind equal names\n"
COLUMNS = ("verl", "areal", "trl", "open-instruct", "openrlhf", "tinyzero")
INTRODUCTION = """
Every key of the frameworks' configurations, from the tables that `scripts/translate.py` reads, at the versions named.
The first table of each framework has our flag, their keys with the default **there** in brackets, and the computation
of the value if it is not the same. Two lists follow: keys with a fixed value here, and keys without a counterpart. Keys
are matched by their full names, in error messages as well. `python studies/flags_page.py` makes this part of the page.
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


EVIDENCE = ROOT / "docs" / "evidence" / "translation.md"
ABOUT = """# Translated commands

`python scripts/translate.py` against commands that others publish ([flags.md](../flags.md) has every key). A row of the
first table counts the reviewed keys of a framework; `tests/unit/test_translate.py` reads the keys of verl, TRL,
OpenRLHF and AReaL again from their wheels and fails on a key without a row. It also holds that every computed key is
read by a rule, that every row names flags that exist, and that no key is matched by its last component alone.

Each command of the second table is stored word for word in `tests/published_commands.toml`, with the command that must
come out. A test runs each of them through `--dry_run`, as a rank of its launch, on data in the framework's own form:
all exit with 0. The last column says what was compared by hand. Five of them are also compared in learning:
`test_presets.py` takes advantages, loss and gradient with the flags of the translated command, and with the framework's
own functions, which have to be equal to 1e-6 (verl's `run_qwen2-7b.sh` and `ppo_trainer/run_deepseek7b_llm.sh`, TRL's
README.md, OpenRLHF's `train_grpo_ray_hybrid_engine.sh`, AReaL's README.md).

**Nothing that is read is run.** bash expands a script with an empty folder as its PATH, in a restricted shell
(`set -r`, after `scripts/translation/record.sh` has defined what records a command): bash itself then rejects names of
commands with a slash, `exec`, changes of PATH, loading of builtins and redirections that write. The tests try 45 ways
to start a program or to write a file, and one of them succeeds as soon as `set -r` is left out. A Python file is read
by its syntax tree, and YAML by its safe loader.

A translation takes 0.1 to 0.2 s of CPU; no module of the run is imported.
"""
# (framework, a setting of its loggers, what becomes of it): the rows of the last table, which a test tries one by one.
LOGGERS = (
    ("verl", "trainer.logger=['console','wandb']", "--track"),
    ("verl", "trainer.logger=['console','tensorboard']", "--track tensorboard"),
    ("verl", "trainer.logger=['wandb','tensorboard']", "--track wandb tensorboard"),
    ("verl", "trainer.logger=['console']", ""),
    ("trl", "--report_to tensorboard", "--track tensorboard"),
    ("trl", "--report_to all", "--track wandb tensorboard"),
    ("trl", "--report_to none", ""),
    ("open-instruct", "--with_tracking", "--track"),
    ("openrlhf", "--logger.wandb.key KEY", "--track"),
    ("openrlhf", "--logger.tensorboard_dir runs/a", "--track tensorboard"),
    ("openrlhf", "--use_tensorboard runs/a", "--track tensorboard"),
    ("openrlhf", "--use_wandb KEY --use_tensorboard runs/a", "--track wandb tensorboard"),
    ("openrlhf", "--logger.logging_steps 1", ""),
    ("areal", "stats_logger.wandb.mode=online", "--track"),
    ("areal", "stats_logger.wandb.mode=shared", "--track"),
    ("areal", "stats_logger.wandb.mode=offline", "WANDB_MODE=offline --track"),
    ("areal", "stats_logger.wandb.mode=disabled", ""),
    ("areal", "stats_logger.tensorboard.path=runs/a", "--track tensorboard"),
    ("areal", "stats_logger.tensorboard.path=null", ""),
    ("areal", "stats_logger.wandb.mode=online stats_logger.tensorboard.path=runs/a", "--track wandb tensorboard"),
    ("areal", "stats_logger.swanlab.mode=cloud", "--track tensorboard"),
    ("areal", "stats_logger.swanlab.mode=disabled", ""),
)
ABOUT_LOGGERS = """
Loggers, each row tried by a test. Event files go into the run's folder, whatever folder the command names. SwanLab is
not here; `swanlab convert --type tensorboard` reads the event files.
"""


def evidence() -> str:
    """Return docs/evidence/translation.md."""
    lines = [ABOUT, "| framework | keys | equal | computed | always so here | not here | earlier names |"]
    lines.append("|---|---|---|---|---|---|---|")
    for framework in rules.FRAMEWORKS:
        kinds = [row.kind for row in rules.rows(framework).values()]
        counts = [kinds.count(kind) for kind in ("equal", "computed", "always", "not here", "renamed")]
        lines.append(f"| {rules.version(framework)} | {len(kinds)} | {' | '.join(map(str, counts))} |")
    lines += ["", "| framework | command | checked by hand |", "|---|---|---|"]
    table = tomllib.loads((ROOT / "tests" / "published_commands.toml").read_text(encoding="utf-8"))["command"]
    for entry in table:
        source = f"{entry['repository']} {entry['commit']}, {entry['path']}"
        lines.append(f"| {entry['framework']} | {source} | {entry['checked']} |")
    lines += [ABOUT_LOGGERS, "| framework | its setting | here |", "|---|---|---|"]
    for framework, words, ours in LOGGERS:
        lines.append(f"| {framework} | `{words}` | {f'`{ours}`' if ours else 'no tracker'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    EVIDENCE.write_text(evidence(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")

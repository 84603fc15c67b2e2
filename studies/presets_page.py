"""Write docs/evidence/presets.md from runtime/arguments/presets.toml.

python studies/presets_page.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime.arguments import presets

ROOT = Path(__file__).resolve().parent.parent


class Source(NamedTuple):
    """Location of a framework's setting: its field = default, or its code, and the line of a file."""

    theirs: str
    file: str
    line: int


class Setting(NamedTuple):
    """One of our flags, its value, and where the framework has it; no source where it has no such step."""

    flag: str
    value: Any
    sources: list[Source]


def settings(name: str) -> list[Setting]:
    """Return the flags of a preset with the sources in the comments of presets.toml."""
    text = (ROOT / "runtime" / "arguments" / "presets.toml").read_text()
    file, lines = re.search(rf"^\[{name}\.flags\] # (\S+)\n(.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE).groups()
    found = []
    for line in lines.splitlines():
        flag, comment = re.fullmatch(r"(\w+) = .*? # (.*)", line).groups()
        sources = []
        for part in comment.split(" | ") if comment != "no such step" else ():
            place, theirs = part.split(" ", 1)
            own, number = place.rsplit(":", 1)
            sources.append(Source(theirs, own or file, int(number)))
        found.append(Setting(flag, presets.PRESETS[name].flags[flag], sources))
    return found


def page() -> str:
    """Return the text of docs/evidence/presets.md, from the table."""
    lines = [PAGE]
    for name, preset in presets.PRESETS.items():
        scripts = " and ".join(f"`{script}.py`" for script in preset.scripts)
        lines += [f"## `--preset {name}`", "", f"{preset.version}: {preset.about}. For {scripts}.", ""]
        lines += ["| flag | there | where |", "|---|---|---|"]
        for flag, value, sources in settings(name):
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
            theirs = ", ".join(f"`{s.theirs}`" for s in sources)
            places = ", ".join(f"`{s.file}:{s.line}`" for s in sources) or "no such step"
            lines.append(f"| `--{flag} {shown}` | {theirs} | {places} |")
        lines += ["", "What no setting expresses:", "", "| difference | size |", "|---|---|"]
        for d in preset.differences:
            lines.append(f"| {f'{d.script}.py: ' if d.script else ''}{d.what} | {d.size} |")
        lines += ["", f"Compared with its own functions: {preset.compared}.", ""]
    return "\n".join(lines)


PAGE = """# Presets: learn as another framework does

`python grpo.py --preset verl` (`trl`, `openrlhf`, `areal`, `open-instruct`; ppo.py: `verl`, `areal`, `tinyzero`) sets
the flags below to what that framework does by default: advantages and their epsilon, aggregation of the loss, clips,
where the KL enters and how, truncation, reward shaping, the optimizer and its schedule. Flags given with it win, in
any order, and also when they say what is our default. A flag to which a copy or variant has given a default of its own
(`loss_norm` of gspo) stays as it is. Sizes (prompts, samples per prompt, lengths) are not set. The start of the run
prints what a preset changed, what it left alone, what was given instead, and what is different there all the same. The
name of the run and `config.json` (`preset`) record it.

This page is made from `runtime/arguments/presets.toml` (`python studies/presets_page.py`). `test_presets.py`
installs the wheels of verl, TRL, OpenRLHF and AReaL without their dependencies, and reads every default again where the
table says it stands. It calls their own functions on the same tensors (random numbers, equal and almost equal scores,
responses of one token, ragged lengths, all truncated, ratios far out). Advantages, losses and gradients are equal to
1e-6. For open-instruct and TinyZero, tests/golden/presets.json has what their functions gave at the commits named.
Each size in a table of differences is measured by a test, unless it says otherwise: the largest relative difference of
a number, or of a gradient in units of its mean size.
"""

if __name__ == "__main__":
    (ROOT / "docs" / "evidence" / "presets.md").write_text(page())

"""Print the help of a script.

python grpo.py --help         the ten flags that most people change
python grpo.py --help kl      the flags with kl in their names
python grpo.py --help all     every flag
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shutil
import textwrap
from unittest import mock

import tyro

FIRST = (
    "model_name_or_path",
    "dataset",
    "verifier",
    "max_response_length",
    "num_unique_prompts_rollout",
    "num_samples_per_prompt_rollout",
    "learning_rate",
    "total_steps",
    "beta",
    "seed",
)


def entries(cls: type, options: dict) -> dict[str, tuple[str, str]]:
    """Return name -> (flag with its values, help text) of every flag, from the help that tyro writes."""
    shown = io.StringIO()  # has no encoding, so tyro draws no frames
    wide = mock.patch.dict("os.environ", COLUMNS="9999")  # and it breaks no lines
    with wide, contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(cls, args=["--help"], use_underscores=True, **options)
    _, *parts = re.split(r"^  (?=--)", shown.getvalue(), flags=re.MULTILINE)
    found = {}
    for part in parts:
        flag, text = re.match(r"(.*?)\s{2,}(.*)", part, re.DOTALL).groups()
        name = re.match(r"--(\w+)", flag)[1]
        flag = flag.replace("--no_", "--no-").replace("{None}|", "")
        text = " ".join(text.split())
        found[name] = (flag, re.sub(r" \(default: (None)?\)$", "", text))
    return found


def asked_for(words: list[str]) -> str:
    """Return the word after --help, or ""."""
    for word, after in itertools.pairwise([*words, ""]):
        if word in ("-h", "--help") and not after.startswith("-"):
            return after.replace("-", "_")
    return ""


def print_help(cls: type, description: str | None, words: list[str], options: dict, derived: tuple[str, ...]) -> None:
    """Print the help that ``words`` ask for. ``derived``: flags whose value follows from model and data."""
    found = entries(cls, options)
    asked = asked_for(words)
    chosen = [name for name in found if asked == "all" or asked in name]
    if not asked:
        chosen = [name for name in FIRST if name in found]
        paragraphs = (description or "").strip("\n").split("\n\n")
        print(paragraphs[0])
        print(f"\n{paragraphs[-1]}\n")
    width = min(110, shutil.get_terminal_size().columns)
    for name in chosen:
        flag, text = found[name]
        if name in derived:
            text = re.sub(r"\(default: (.*)\)$", r"(default: from model and data; \1 in the quickstart)", text)
        print(flag)
        lines = textwrap.wrap(text, width - 4, break_long_words=False, break_on_hyphens=False)
        print(textwrap.indent("\n".join(lines), "    "))
    print(f"\n--help all prints all {len(found)} flags, --help WORD those with WORD in their names, such as --help kl")

"""Print the help of a script.

python grpo.py --help         the ten flags that most people change
python grpo.py --help kl      the flags with kl in their names
python grpo.py --help all     every flag
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import textwrap
from unittest import mock

import tyro

FIRST = (
    *("model_name_or_path", "dataset", "verifier", "max_response_length"),
    *("num_unique_prompts_rollout", "num_samples_per_prompt_rollout", "learning_rate", "total_steps", "beta", "seed"),
)


def entries(cls: type, options: dict) -> dict[str, tuple[str, str]]:
    """Return name -> (flag with its values, help text) of every flag, from the help that tyro writes."""
    shown = io.StringIO()  # has no encoding, so tyro draws no frames
    wide = mock.patch.dict("os.environ", COLUMNS="9999")  # and it breaks no lines
    with wide, contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        tyro.cli(cls, args=["--help"], use_underscores=True, **options)
    found = {}
    for entry in re.split(r"^  (?=--)", shown.getvalue(), flags=re.MULTILINE)[1:]:
        head, text = re.match(r"(.*?)\s{2,}(.*)", entry, re.DOTALL).groups()
        text = re.sub(r" \(default: (None)?\)$", "", " ".join(text.split()))
        found[re.match(r"--(\w+)", head)[1]] = (head.replace("--no_", "--no-").replace("{None}|", ""), text)
    return found


def print_help(cls: type, description: str | None, words: list[str], options: dict, derived: tuple[str, ...]) -> None:
    """Print the help that ``words`` ask for. ``derived``: flags whose value follows from model and data."""
    found = entries(cls, options)
    asked = next((after for word, after in zip(words, [*words[1:], ""], strict=True) if word in ("-h", "--help")), "")
    chosen = [name for name in found if asked == "all" or asked.replace("-", "_") in name]
    if not asked or asked.startswith("-"):
        paragraphs = (description or "").strip("\n").split("\n\n")
        print("\n\n".join(dict.fromkeys([paragraphs[0], paragraphs[-1]])) + "\n")
        chosen = [name for name in FIRST if name in found]
    width = min(110, shutil.get_terminal_size().columns)
    for name in chosen:
        head, text = found[name]
        if name in derived:
            text = re.sub(r"\(default: (.*)\)$", r"(default: from model and data; \1 in the quickstart)", text)
        indented = {"initial_indent": "    ", "subsequent_indent": "    "}
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False, **indented)
        print("\n".join([head, *lines]))
    print(f"\n--help all prints all {len(found)} flags, --help WORD those with WORD in their names, such as --help kl")

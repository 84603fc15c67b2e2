"""Answer flags of other frameworks, removed flags and misused switches with one error, before anything is loaded.

A removed flag that changes no result, or that has a new name, is accepted with a warning line for one version.
What another framework's words mean here is computed by scripts/translate.py, in a process of its own; the error ends
with the translated command. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from runtime.system.process import refuse

TRANSLATE = Path(__file__).resolve().parent.parent.parent / "scripts" / "translate.py"
PATH = re.compile(r"[+~]{0,2}([A-Za-z_][\w.]*)=")  # a word that sets a field by its path, as Hydra has it
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
SWITCH = {"true": "", "yes": "", "1": "", "false": "no-", "no": "no-", "0": "no-"}
SECONDS = 60.0  # for the translation, which takes less than one on an idle machine

# Sampling arguments of engines that are fixed here, by whatever name of theirs.
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
    "as": "--preset {}",
    "control": "--reward_control {}",
    "entropy_coeff": "--entropy_coef {}",
    "kl_horizon": "--kl_target TARGET {}",
    "logprob_micro_batch_tokens": "removed: --micro_batch_tokens is the budget of passes without gradient as well",
    "max_sampler_diff": "--max_logprob_diff {}",
    "record_batches": "removed: a step is repeatable from the checkpoint before it; studies/replay.py rebuilds its "
    "batch",
    "ref_policy_alpha": "--ref_policy_update FREQ {}",
    "ref_policy_update_freq": "--ref_policy_update {} ALPHA",
    "require_learning": "removed: python scripts/doctor.py RUN exits with code 3 if the run did not learn",
    "reward_timeout": "--call_timeout {}",
    "reward_workers": "removed: a rank has as many verifier processes as cores, less two (1 to 32)",
    "sleep": "--vllm_sleep {}",
    "stop": "--stop_strings {}",
    "turn_lag": "removed: answers of an environment are taken 128 engine steps after the turn",
    "turn_timeout": "--call_timeout {}",
    "vllm_gpu_memory_utilization": """--vllm_args '{"gpu_memory_utilization": {}}'""",
    "warm_up": "--warmup_steps {}",
}
# Values that have new names since version 0.4.
RENAMED_VALUES = {
    ("bad_rows", "raise"): "error",
    ("kl_reward_norm", "inside"): "before_norm",
    ("kl_reward_norm", "outside"): "after_norm",
    ("overlong_prompts", "filter"): "drop",
}
# Those of the removed flags without which a run has the same results: always (None), or if they were given this value.
IGNORED = {
    "adam_eps": 1e-8,
    "logprob_micro_batch_tokens": None,
    "record_batches": None,
    "reward_workers": None,
    "turn_lag": 128.0,
}


def groups(words: list[str], fields: dict[str, dataclasses.Field]) -> list[list[str]]:
    """Split a command line into parts: each option with the words that are its values, and each PATH=VALUE."""
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
    """Return the name in --no-shuffle or --actor.optim.lr=1 without dashes, value and, for a flag here, "no_"."""
    name = word.removeprefix("--").partition("=")[0].replace("-", "_")
    return name.removeprefix("no_") if name.removeprefix("no_") in fields else name


def answer(part: list[str], fields: dict[str, dataclasses.Field]) -> str | None:
    """Return what to pass instead of an option and its values; "" for an unknown one, None for a valid one."""
    head, *values = part
    flag = flag_of(head, fields)
    if head.startswith("--") and flag in (*fields, "help", "preset"):
        return misused(head, values, flag, fields)
    path = PATH.match(head)
    if not head.startswith("--") and path is None:
        return None
    name = flag.removeprefix("no_") if head.startswith("--") else path.group(1)
    if name in FIXED:
        return FIXED[name]
    if name in REMOVED:
        return REMOVED[name].replace("{}", " ".join(values) or head.partition("=")[2] or "VALUE")
    return ""


def update_removed(words: list[str], fields: dict[str, dataclasses.Field]) -> list[str]:
    """Return a command line in which removed flags are left out or have their new names, with a warning line for each.

    A removed flag stays, for ``refuse_foreign`` to reject, where results would change without it, where its new name is
    given as well, or where its value alone is not a value of the new flag (``kl_horizon``).
    """
    parts = groups(words, fields)
    given: dict[str, list[str]] = {flag_of(part[0], fields): [] for part in parts}
    found: list[str] = []
    for part in parts:
        new = replacement(part, fields)
        flag = flag_of(part[0], fields)
        other = flag_of(new[0], fields) if new else flag
        if new is None or (other != flag and given.setdefault(other, new) != new):
            found += part
            continue
        found += new
        name = flag.removeprefix("no_")
        now = f"is now {shlex.join(new)}" if new else f"is ignored ({REMOVED[name].removeprefix('removed: ')})"
        if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
            print(f"warning: {' '.join(part)} {now}; the next version rejects the old form", file=sys.stderr)
    return found


def replacement(part: list[str], fields: dict[str, dataclasses.Field]) -> list[str] | None:
    """Return today's words for an option whose name or value is old, [] where none are needed; None for any other."""
    head, *values = part
    values = values or head.split("=", 1)[1:]
    name, value = flag_of(head, fields), " ".join(values)
    if not head.startswith("--"):
        return None
    if name in fields:
        new_values = [RENAMED_VALUES.get((name, value), value) for value in values]
        if name == "critic":
            new_values = [value.replace("warm_up=", "warmup_steps=") for value in values]
        return [f"--{name}", *new_values] if new_values != values else None
    if name in IGNORED:
        only = IGNORED[name]
        always = only is None and len(values) < 2
        return [] if always or (NUMBER.fullmatch(value) and float(value) == only) else None
    if name == "no_require_learning":
        return []
    new = REMOVED.get(name, "")
    if not values or not new.startswith("--") or re.search(r"\b[A-Z]+\b", new):
        return None
    words = [values if word == "{}" else [word.replace("{}", value)] for word in shlex.split(new)]
    return [word for several in words for word in several]


def misused(head: str, values: list[str], flag: str, fields: dict[str, dataclasses.Field]) -> str | None:
    """Return what is wrong with the values of a flag of this script; None where nothing is."""
    kind = str(fields[flag].type) if flag in fields else "bool | None"
    given = (values[0] if values else head.partition("=")[2]).lower()
    if kind == "bool" and given in SWITCH:
        return f"switches take no value; give --{SWITCH[given]}{flag}"
    if kind.startswith(("bool", "tuple")) or "=" in head:
        return None
    number = kind.split(" | ")[0] in ("int", "float")
    if values and not (number and given in ("true", "false")):
        return None
    return f"takes a {'number' if number else 'value'} here"


def translation(words: list[str], fields: dict[str, dataclasses.Field]) -> str:
    """Return the notes of scripts/translate.py, with the command as the last line; "" if it does not know the words."""
    if not TRANSLATE.is_file():  # a copy of the project that left the scripts out
        return ""
    family = "ppo" if "gae_lambda" in fields else "grpo"
    command = [sys.executable, str(TRANSLATE), f"--script={Path(sys.argv[0]).name}", f"--family={family}"]
    command += ["--gpus", os.environ["WORLD_SIZE"]] if os.environ.get("WORLD_SIZE", "").isdigit() else []
    try:
        done = subprocess.run([*command, "--", *words], capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.rstrip("\n") if done.returncode == 0 else ""


def refuse_foreign(words: list[str], fields: dict[str, dataclasses.Field]) -> None:
    """Exit with code 2, and one error for all, where words are other frameworks' or lack their values.

    Returns where every word is valid, and where nothing is known of the others: tyro has an error for those.
    """
    answers = {}
    for part in groups(words, fields):
        if part[0].endswith((".py", ".sh")) and not part[0].startswith("-") and Path(part[0]).is_file():
            refuse(
                f"{part[0]}: a training script is not run by this one; for the command here: "
                f"python scripts/translate.py --file {shlex.quote(part[0])}"
            )
        found = answer(part, fields)
        if found is not None:
            answers[" ".join(part)] = found
    translated = translation(words, fields) if "" in answers.values() else ""
    lines = [f"{text[:60]} -> {found}" for text, found in answers.items() if found]
    if translated:
        said = translated.splitlines()
        refuse("\n  ".join([f"{said[0]}; the command here is the last line", *lines, *said[1:-1]]) + f"\n{said[-1]}")
    if lines:
        unknown = [f"{text[:60]} -> not known" for text, found in answers.items() if not found]
        refuse("\n  ".join(["these flags do not exist here, or lack their values; use instead:", *lines, *unknown]))

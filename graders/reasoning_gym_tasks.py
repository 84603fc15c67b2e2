"""Rows of reasoning-gym's tasks, equal in every process, with their types kept in JSON; limits on answers to them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

# Some scorers pass the answer to eval, directly or inside sympy's parse_expr. What they may get: a list without calls,
# or a formula of these names alone. Anything else scores 0 before it gets there, but for the truth itself: some truths
# hold an Integral, which nobody else may use, as the integral of the task would answer every task.
LIST = r"[^(]*"
FORMULA_NAMES = "[a-zCXY]|a?(?:sin|cos|tan|sec|csc|cot)h?|exp|log|ln|sqrt|pi|E|I|erfi?|li"
FORMULA_NAMES += "|[SC]i|Ei|Abs|gamma|fresnel[sc]"
FORMULA = rf"(?:[0-9\s+\-*/^(),]|\.(?![^\W\d])|(?<!\w)(?:{FORMULA_NAMES})(?!\w))*"
LISTS = ("string_insertion", "spiral_matrix", "binary_matrix", "n_queens")
FORMULAS = ("simple_integration", "intermediate_integration", "polynomial_multiplication", "countdown")
GYM_ANSWERS = dict.fromkeys(LISTS, LIST) | dict.fromkeys(FORMULAS, FORMULA)
GYM_UNSUPPORTED = {
    "boxnet": "its scorer accepts moves between squares as Python tuples only, which the JSON it reads cannot hold",
    "game_of_life_halting": "its scorer gives 1 to every text where something goes on, and 0 to every text elsewhere",
    "puzzle24": "its scorer takes any four numbers that make 24, and not only those of the task",
}


def tagged(value):
    """Return a value as JSON that tells tuples from lists, and other keys from text; ``untagged`` undoes it."""
    if isinstance(value, tuple):
        return {"tuple": [tagged(v) for v in value]}
    if isinstance(value, list):
        return [tagged(v) for v in value]
    if isinstance(value, dict):
        return {"dict": [[tagged(k), tagged(v)] for k, v in value.items()]}
    return value


def untagged(value):
    if isinstance(value, list):
        return [untagged(v) for v in value]
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(untagged(v) for v in value["tuple"])
        return {untagged(k): untagged(v) for k, v in value["dict"]}
    return value


@functools.lru_cache(maxsize=16)
def gym_dataset(name: str, options: str):
    """Create a data set of reasoning-gym with these options (JSON). Raises ValueError, TypeError or AssertionError.

    The ``datasets`` of a composite are ``[{"name": ..., "weight": ..., "config": {...}}]``.
    """
    import reasoning_gym
    from reasoning_gym.composite import DatasetSpec

    chosen = json.loads(options)
    parts = chosen.get("datasets")
    if name == "composite" and isinstance(parts, list):
        chosen["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in parts]
    for wanted in [name, *(part["name"] for part in parts or [])]:
        if wanted in GYM_UNSUPPORTED:
            raise ValueError(f"{wanted} cannot be used: {GYM_UNSUPPORTED[wanted]}")
    return reasoning_gym.create_dataset(name, **chosen)


def score_of(answer: str, truth: str, name: str, row: dict) -> float:
    """Score an answer to a task by the task's own scorer; 0 for an answer that the scorer must not get.

    name: of the task. row: one from ``gym_rows`` is scored with the options of its data set, others with the defaults.
    """
    foreign = any(c.isdigit() and not c.isascii() for c in answer)  # int() would read other scripts' digits
    expected = answer == truth or re.fullmatch(GYM_ANSWERS.get(name, r"(?s:.*)"), answer)
    if foreign or not expected:
        return 0.0
    if "reasoning_gym" in row:
        scoring = json.loads(row["reasoning_gym"])
        scorer = gym_dataset(scoring["dataset"], scoring["options"]).score_answer
        entry = {**row, "answer": truth or None, "metadata": untagged(scoring["metadata"])}
    else:
        import reasoning_gym

        scorer = reasoning_gym.get_score_answer_fn(name)
        entry = {**row, "answer": truth}
    return float(scorer(answer, entry=entry))


def gym_rows(name: str, options: dict) -> list[dict]:
    """Return the rows of a data set of reasoning-gym, as plain JSON. Raises ValueError if it cannot be made.

    ``metadata`` is for people and for own verifiers. The column ``reasoning_gym`` holds what the data set's own scorer
    needs: the metadata with its tuples, and the options of the data set.
    """
    found = json.loads(printed_rows(name, json.dumps(options, sort_keys=True)))
    if isinstance(found, str):
        raise ValueError(found)
    return found


def printed_rows(name: str, chosen: str) -> str:
    """Return what ``main`` prints in a process of its own.

    Some tasks (word_ladder, ransom_note, polynomial_multiplication, ...) choose from sets, so their problems follow
    from Python's hash seed, which every process draws for itself: ranks would train on different problems, and a run
    could not go on. Others (codeio, list_functions) draw from the random numbers that a process has in common, whatever
    their seed is. Both are fixed there.
    """
    command = [sys.executable, "-m", "graders.reasoning_gym_tasks", name, chosen]
    folder = Path(__file__).resolve().parent.parent
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    return subprocess.run(command, cwd=folder, env=environment, **pipes, check=True).stdout


def _rows_here(name: str, chosen: str) -> list[dict]:
    """Return ``gym_rows`` with this process's hash seed. Raises as ``gym_dataset`` does."""
    rows = []
    for entry in gym_dataset(name, chosen):
        scoring = {"dataset": name, "options": chosen, "metadata": tagged(entry["metadata"])}
        plain = json.loads(json.dumps(entry["metadata"], default=str))
        rows.append({**entry, "metadata": plain, "reasoning_gym": json.dumps(scoring, default=str)})
    return rows


def main() -> None:
    """Print the rows of the data set that the two arguments name, or what is wrong with them, as JSON."""
    import numpy as np

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (codeio's programs draw from these)
    with contextlib.redirect_stdout(sys.stderr):  # some tasks print
        try:
            found = _rows_here(*sys.argv[1:])
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            found = str(error)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

"""Rows of reasoning-gym's data sets that survive the way to a worker or a file, and what an answer to them may hold."""

from __future__ import annotations

import functools
import json

# Some scorers pass the answer to eval, directly or inside sympy's parse_expr. What they may get: a list without calls,
# or a formula of these names alone. Anything else scores 0 before it gets there, but for the truth itself: some truths
# hold an Integral, which nobody else may use, as the integral of the task would answer every task.
LIST = r"[^(]*"
FORMULA_NAMES = (
    "[a-zCXY]|a?(?:sin|cos|tan|sec|csc|cot)h?|exp|log|ln|sqrt|pi|E|I|erfi?|li|[SC]i|Ei|Abs|gamma|fresnel[sc]"
)
FORMULA = rf"(?:[0-9\s+\-*/^(),]|\.(?![^\W\d])|(?<!\w)(?:{FORMULA_NAMES})(?!\w))*"
GYM_ANSWERS = {
    "string_insertion": LIST,
    "spiral_matrix": LIST,
    "binary_matrix": LIST,
    "n_queens": LIST,
    "simple_integration": FORMULA,
    "intermediate_integration": FORMULA,
    "polynomial_multiplication": FORMULA,
    "countdown": FORMULA,
}
GYM_UNSUPPORTED = {
    "boxnet": "its scorer accepts moves between squares as Python tuples only, which the JSON it reads cannot hold",
    "game_of_life_halting": "its scorer gives 1 to every text where something goes on, and 0 to every text elsewhere",
    "puzzle24": "its scorer takes any four numbers that make 24, and not only those of the task",
}


def tagged(value):
    """A value as JSON that tells tuples from lists, and keys of other types from text; ``untagged`` undoes it."""
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
    """A data set of reasoning-gym with these options (JSON). Raises ValueError, TypeError or AssertionError if none.

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


def gym_rows(name: str, options: dict) -> list[dict]:
    """The rows of a data set of reasoning-gym, as plain JSON. Raises as ``gym_dataset`` does.

    ``metadata`` is for people and for own verifiers. The column ``reasoning_gym`` holds what the data set's own scorer
    needs: the metadata with its tuples, and the options of the data set.
    """
    chosen = json.dumps(options, sort_keys=True)
    rows = []
    for entry in gym_dataset(name, chosen):
        scoring = {"dataset": name, "options": chosen, "metadata": tagged(entry["metadata"])}
        plain = json.loads(json.dumps(entry["metadata"], default=str))
        rows.append({**entry, "metadata": plain, "reasoning_gym": json.dumps(scoring, default=str)})
    return rows

"""Verifiers, the pool of processes that runs them, the sandbox for code, shaping, and reward models.

A verifier is a plain function ``(response, truth, row) -> Reward``: ``response`` is the decoded text of one sample,
``truth`` the answer in the data set, ``row`` the whole row. It runs in a worker process that is killed at the
time-out, so a response that sends a parser into an endless loop costs one sample and not the night. What happens then:

    returns a Reward       used as it is; a number is a Reward of that score
    raises                 score 0, status "unscorable", counted in reward/unscorable; the first traceback is shown
    runs out of time       score 0, status "timeout", counted in reward/timeouts
    kills its process      score 0, status "crash", counted in reward/crashes; so does running out of memory

Whatever a response says, the run continues. What is wrong with the data or with a verifier ends it at the start:
every truth must pass its own verifier, and a verifier of the user's own must not raise on the first row.

docs/data_and_rewards.md lists the verifiers, the columns they read, and what is guaranteed. This imports no torch.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import numbers
import operator
import os
import random
import re
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np

from graders.text import (
    INVISIBLE,
    LONGEST_ANSWER,
    NUMBER,
    after_thinking,
    alternatives,
    answering,
    in_last_tag,
    last_boxed,
    last_number_in,
    marked_number,
    number_of,
    without_delimiters,
)
from runtime.data.samples import Problem
from runtime.system import user_files
from runtime.system.process import refuse
from runtime.system.verifier_pool import VerifierPool, names_of
from runtime.system.workers import code_of_run

STATUSES = ("ok", "timeout", "crash", "unscorable")


@dataclass(frozen=True)
class Reward:
    """Result of a verifier: ``score`` (what is optimized), ``parts`` for the log (``correct``, ``format``: 0 to 1).

    ``steps``, for ppo.py --dense_reward: (number of characters, score of the response up to there), in rising order.
    For people: ``extracted``, what was taken for the answer ("" if nothing was), ``detail``, why there is no score.
    """

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    status: str = "ok"  # or another one of STATUSES
    steps: tuple[tuple[int, float], ...] = ()
    extracted: str = field(default="", compare=False)
    detail: str = field(default="", compare=False)


def _judged(score: float, extracted: str | None, **more: float) -> Reward:
    """Build the Reward of a verifier that looks for one answer; part ``format`` is 1 if it found one."""
    parts = {"correct": float(score == 1), "format": float(extracted is not None), **more}
    return Reward(float(score), parts, extracted=(extracted or "")[:LONGEST_ANSWER])


# ---------------------------------------------------------------------------------------------------------- verifiers


def last_number(response: str, truth: str, row: dict) -> Reward:
    """Score 1 if the last number of the response equals the truth ("1,024" equals "1024", "7.0" equals "7").

    A number that is only named to be denied ("not 42") is no answer, nor is part of a power, a time or a range.
    """
    return _same_number(last_number_in(answering(response)), truth)


def _same_number(said: str | None, truth: str) -> Reward:
    """Score 1 if a number is the truth, or one of a list of truths. Raises ValueError if either is not a number."""
    right = said is not None and number_of(said) in [number_of(wanted) for wanted in alternatives(truth)]
    return _judged(right, said)


def lenient(response: str, truth: str) -> bool | None:
    """Return True if the last number of a response, or of its last box, is the truth, whatever format a verifier wants.

    None where the truth is no number. To compare with, not to train on.
    """
    wanted = truth.rpartition("####")[2]
    wanted = (last_boxed(wanted) or wanted).strip()
    if not NUMBER.fullmatch(wanted):
        return None
    return any(last_number(text, wanted, {}).score == 1 for text in (response, last_boxed(response) or ""))


def exact(response: str, truth: str, row: dict) -> Reward:
    """Score 1 if the response is the truth, or one of a list of truths, apart from white space at both ends."""
    correct = float(response.strip() in [text.strip() for text in (truth, *alternatives(truth))])
    return Reward(correct, {"correct": correct}, extracted=response.strip()[:LONGEST_ANSWER])


def gsm8k(response: str, truth: str, row: dict) -> Reward:
    """Score 1 if the number after the last "####", or without one the last number, equals that of the truth.

    The truth is a number or GSM8K's whole solution, which ends in "#### 1,234".
    """
    text = answering(response)
    wanted = truth.rpartition("####")[2]
    return _same_number(marked_number(text) if "####" in text else last_number_in(text), wanted)


def question_of(row: dict) -> str:
    """Return the text of a row's problem: its chat messages, or the columns that hold a problem in most data sets."""
    texts = []
    for key in ("messages", "problem", "question", "prompt"):
        found = row.get(key)
        for part in found if isinstance(found, list) else [found]:
            text = part.get("content") if isinstance(part, dict) and part.get("role") != "system" else part
            texts += [text] if isinstance(text, str) else []
    return "\n".join(texts)


def math_(response: str, truth: str, row: dict) -> Reward:
    """Score 1 if the final answer is the truth as text, or equal to it by math-verify (docs/data_and_rewards.md).

    Of a JSON list of truths any one is right. Part ``echo``: 1 for a formula copied from the problem, which scores 0.
    """
    right, said, echo = user_files.find("graders.math:judge")(response, truth, question_of(row))
    return _judged(right, said, echo=float(echo))


def _tagged_answer(text: str) -> str | None:
    """Return what stands in the last ``<answer>...</answer>``, else the final answer."""
    return in_last_tag(text) or user_files.find("graders.math.extraction:final_answer")(text)


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(node: ast.AST, used: list[int]) -> Fraction:
    """Return the exact value of an expression of + - * / and whole numbers, added to ``used``, or raise ValueError."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = _value(node.left, used)
        right = _value(node.right, used)
        return OPERATORS[type(node.op)](left, right)
    raise ValueError("only + - * / and whole numbers")


def countdown(response: str, truth: str, row: dict) -> Reward:
    """Score 1 if the answer's expression uses each number of the row exactly once and equals the target exactly.

    The truth is the target, or ``{"target": ..., "numbers": [...]}``; else the numbers are the row's ``nums`` or
    ``numbers``. "= 24" may follow the expression.
    """
    given = json.loads(truth) if truth.strip().startswith("{") else {**row, "target": truth}
    numbers = given.get("numbers", given.get("nums"))
    target = Fraction(str(given["target"]).strip())
    if numbers is None:
        return Reward(0.0, status="unscorable", detail="no numbers in the truth, nor a column numbers or nums")
    if isinstance(numbers, str):  # a column of a CSV: "[3, 4, 25]", "3 4 25"
        numbers = re.split(r"[\s,;]+", numbers.strip("[]() \t\n"))
    wanted = sorted(map(int, numbers))
    answer = _tagged_answer(after_thinking(response))
    answer = answer and (last_boxed(answer) or answer)
    if answer is None or len(answer) > LONGEST_ANSWER:
        return _judged(0, None)
    plain = without_delimiters(re.sub(r"^[a-z]+\n", "", answer.translate(INVISIBLE).strip("` \n")))
    plain, used = " ".join(plain.split()).rstrip(". "), []
    plain = plain.translate(str.maketrans("[]\u00d7\u00b7\u00f7\u2212", "()**/-"))
    for sign, other in (("*", r"\\times|\\cdot|(?<=[0-9)])\s*x\s*(?=[0-9(])"), ("/", r"\\div"), ("", "^Expression:")):
        plain = re.sub(other, sign, plain)
    expression, equals, claimed = plain.partition("=")
    if equals and re.fullmatch(r"\s*-?[0-9.]+\s*", expression):
        expression, claimed = claimed, expression  # "24 = 4 * 6"
    try:
        if not re.fullmatch(r"[0-9+\-*/() ]+", expression):
            raise ValueError("other characters")
        value = _value(ast.parse(expression.strip(), mode="eval").body, used)
        correct = value == target and (not equals or Fraction(claimed.strip()) == value)
    except (ValueError, SyntaxError, RecursionError, MemoryError, ZeroDivisionError):
        correct = False
    return _judged(correct and sorted(used) == wanted, answer)


# -------------------------------------------------------------------------------------------------------- reasoning-gym


def needs_no_truth(verifier: str, row: dict) -> bool:
    """Return True if a row can be scored without an answer.

    Some scorers of reasoning-gym check the response itself; form and instructions have no right answer, and neither a
    reward model nor an environment looks at one.
    """
    names = names_of(verifier)
    return set(names) <= {"format", "ifeval", "reward_model", "environment"} or (
        names == ["reasoning_gym"] and "reasoning_gym" in row
    )


def reasoning_gym_(response: str, truth: str, row: dict) -> Reward:
    """Score the last ``<answer>``, or else the final answer, of the response by the data set's own ``score_answer``.

    Only 1 counts as correct. A text that merely holds the truth gets 0, not the general scorer's consolation. A row
    from ``gym_rows`` is scored with the options of its data set, any other one (from a file) with the default ones.
    """
    name = (row.get("metadata") or {}).get("source_dataset")
    said = after_thinking(response)
    empty = re.search(r"<answer>\s*</answer>(?!.*<answer>)", said, re.DOTALL)  # some tasks have results without letters
    answer = "" if empty and truth == "" else _tagged_answer(said)
    if name is None:
        return Reward(0.0, status="unscorable", detail="the row's column metadata names no source_dataset")
    if answer is None or len(answer) > 100 * LONGEST_ANSWER:
        return _judged(0, None)
    score = user_files.find("graders.reasoning_gym_tasks:score_of")(answer, truth, name, row)
    consoled = score < 1 and truth != "" and truth in answer
    return _judged(0 if consoled or not math.isfinite(score) else score, answer)


def format_(response: str, truth: str, row: dict) -> Reward:
    """Score 1 for ``<think>...</think><answer>...</answer>``: each tag once, in this order, text inside, none around.

    The opening ``<think>`` may be missing: many chat templates write it into the prompt. The truth is not looked at.
    """
    text = "<think>" + response.translate(INVISIBLE).strip().removeprefix("<think>")
    between = re.split(r"(</?(?:think|answer)>)", text)
    good = between[1::2] == ["<think>", "</think>", "<answer>", "</answer>"]
    good = good and [bool(part.strip()) for part in between[::2]] == [False, True, False, True, False]
    score = float(good)
    return Reward(score, {"format": score}, extracted=response.strip()[:LONGEST_ANSWER])


# ----------------------------------------------------------------------------- graders that are asked for by their name


def ifeval(response: str, truth: str, row: dict) -> Reward:
    """Score 1 if a response that says something keeps every constraint; part ``constraints`` is the fraction kept.

    graders/ifeval.py has their kinds, and the forms in which a row gives them.
    """
    try:
        fraction, text = user_files.find("graders.ifeval:judge")(response, truth, row)
    except ValueError as error:
        return Reward(0.0, status="unscorable", detail=str(error))
    return _judged(fraction == 1 and re.search(r"\w", text) is not None, text or None, constraints=fraction)


def code(response: str, truth: str, row: dict) -> Reward:
    """Score 1 if the program passes all tests of the truth: the response's last fenced block of Python, or all of it.

    Tests are JSON, ``[{"input": [1, 2], "output": 3}]`` for the function named by the row's ``entry_point`` or
    ``[{"stdin": "1 2", "stdout": "3"}]`` for a whole program, or ``{"inputs": ..., "outputs": ..., "fn_name": ...}`` as
    in APPS, or Python, assertions or ``def check(candidate): ...`` as in HumanEval, where the row's ``prompt`` comes
    before the program. There is the standard library, and what graders/code/sandbox.py lists as PACKAGES.
    """
    try:
        passed, program = user_files.find("graders.code:judge")(response, truth, row)
    except ValueError as error:
        return Reward(0.0, status="unscorable", detail=str(error))
    return _judged(passed, program)


# ---------------------------------------------------------------------------------------- by name, and several of them

_ALL = (last_number, exact, gsm8k, math_, countdown, reasoning_gym_, format_, ifeval, code)
VERIFIERS = {verifier.__name__.rstrip("_"): verifier for verifier in _ALL}
SAY_THE_TRUTH = {"math": "\\boxed{{{}}}", "reasoning_gym": "<answer>{}</answer>"}  # as a response would
SAY_THE_TRUTH |= dict.fromkeys(("last_number", "exact", "gsm8k"), "{}")
LISTS = ("math", "exact", "last_number", "gsm8k")  # verifiers for which a JSON list of truths means any one of them


def reward_model_alone(response: str, truth: str, row: dict) -> Reward:
    """Score 0 for every response: ``--verifier reward_model``, where the reward model adds its own score."""
    return Reward(0.0)


def environment(response: str, truth: str, row: dict) -> Reward | float:
    """Return what the environment's get_reward returned: ``--verifier environment``, the default if it has one."""
    found = row["episode"]["outcome"]
    return found["score"] if found.keys() == {"score"} else Reward(**found)


def find_verifier(name: str) -> Callable[[str, str, dict], Reward]:
    """Return the verifier of this name, or a function from a file of the user's: ``path/to/file.py:function``.

    Raises ValueError, saying what there is, when no such verifier, file or function exists.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    if name == "reward_model":
        return reward_model_alone
    if name == "environment":
        return environment
    path, _, function = name.rpartition(":")
    if not path:
        raise ValueError(f"no verifier {name!r}; known: {', '.join(VERIFIERS)}, or path/to/file.py:function")
    if path not in user_files.texts and not Path(path).is_file():
        raise ValueError(f"no file {path!r} to take the verifier {function!r} from")
    if not path.endswith(".py"):
        raise ValueError(f"the file {path!r} must have the extension .py; rename it to {path}.py")
    try:
        found = getattr(user_files.load(path), function, None)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise ValueError(f"the file {path!r} does not load: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ValueError(f"the file {path!r} has no function {function!r}")
    try:
        inspect.signature(found).bind("", "", {})
    except TypeError as error:
        raise ValueError(f"{function} of {path!r}: write def {function}(response, truth, row) ({error})") from None
    return found


def parse_weights(weights: tuple[str, ...]) -> dict[str, float | None]:
    """Parse ("math=1", "format=gate") to {"math": 1.0, "format": None}. Raises ValueError for anything else."""
    found: dict[str, float | None] = {}
    for text in weights:
        name, _, value = text.rpartition("=")
        try:
            found[name] = None if value == "gate" else float(value)
            if not name or not math.isfinite(found[name] or 0.0):
                raise ValueError
        except ValueError:
            raise ValueError(f"{text!r} is not NAME=NUMBER or NAME=gate") from None
    return found


def combine(found: dict[str, Reward], weights: dict[str, float | None]) -> Reward:
    """Sum weight x score; 0 unless every gate (weight None) scored 1. A weight that is not given is 1.

    Parts: those of each verifier, the first to give one wins, and with several verifiers each one's score by its name.
    Steps: those of the first verifier that gives some, times its weight; none behind a gate that is shut.
    """
    gates = []
    score = 0.0
    steps = ()
    for name, reward in found.items():
        weight = weights.get(name, 1.0)
        if weight is None:
            gates.append(reward.score >= 1)
            continue
        score += weight * reward.score
        if reward.steps and not steps:
            steps = tuple((place, weight * value) for place, value in reward.steps)
    if not all(gates):
        score = 0.0
        steps = ()
    parts = {}
    if len(found) > 1:
        parts = {name: reward.score for name, reward in found.items()}
    for reward in reversed(found.values()):
        parts |= reward.parts
    if gates:
        parts["gate"] = float(all(gates))
    first = next(iter(found.values()))
    worst = next((reward for reward in found.values() if reward.status != "ok"), first)
    return replace(
        first,
        score=score,
        parts=parts,
        steps=steps,
        status=worst.status,
        detail=worst.detail,
    )


def _no_plain_truth(truth: str) -> str:
    """Return the reason why a truth is an object or a missing value, and no answer; "" if it may be one."""
    if truth.strip().casefold() in ("none", "nan", "null", "<na>"):
        return f"it is {truth.strip()}, as a missing value is written"
    key = re.match(r"\s*\{\s*['\"](\w+)['\"]\s*:", truth)
    return f"it is an object; name a key of it, such as --ground_truth_key COLUMN.{key[1]}" if key else ""


def truth_error(verifier: str, truth: str, row: dict) -> str:
    """Return what is wrong with a truth according to its own verifiers; "" if nothing is.

    A truth that can be said as a response must score 1; for the others it is enough that nothing can be scored by it.
    Raises ValueError for a verifier that does not exist.
    """
    if not truth and not needs_no_truth(verifier, row):
        return "it is empty"
    for name in names_of(verifier):
        if name not in VERIFIERS:
            find_verifier(name)
            continue  # your own may take anything; RewardPool.check tries it once
        if name == "code":
            if wrong := user_files.find("graders.code:code_error")(truth, row, question_of(row)):
                return wrong
            continue
        if name == "math" and (wrong := user_files.find("graders.math:no_answer")(truth, row)):
            return wrong
        # A task of reasoning-gym may ask for an object, as codeio does.
        if name in SAY_THE_TRUTH and name != "reasoning_gym" and (wrong := _no_plain_truth(truth)):
            return wrong
        for one in alternatives(truth) if name in LISTS else [truth]:
            said = one if name == "math" and last_boxed(one) else SAY_THE_TRUTH.get(name, "").format(one)
            reward, raised = _verify_by(name, said, one, row)
            if reward.status != "ok":
                why = reward.detail.strip().rpartition("\n")[2]
                return f"{name} raises on the truth itself ({why})" if raised or reward.status == "crash" else why
            if name in SAY_THE_TRUTH and reward.score < 1 and not (truth == "" and needs_no_truth(verifier, row)):
                return f"{name} rejects the truth itself"
    return ""


def check_reward_args(args) -> None:
    """Reject verifiers that do not exist and weights that mean nothing: exit code 2."""
    code_of_run()
    if args.environment is not None:
        user_files.find("runtime.environments.episodes:check")(args)
    sys.set_int_max_str_digits(0)  # the rows that are checked next may hold numbers of any length
    for name in names_of(args.verifier or "exact"):
        try:
            find_verifier(name)
        except ValueError as error:
            refuse(f"--verifier: {error}")
        if name == "environment" and args.environment is None:
            refuse("--verifier environment: there is none; give --environment, or another verifier")
        if name == "reward_model" and args.reward_model_name_or_path is None:
            refuse("--verifier reward_model: there is none; give --reward_model_name_or_path, or another verifier")
    try:
        weights = parse_weights(args.reward_weights)
    except ValueError as error:
        refuse(f"--reward_weights: {error}; for example --reward_weights math=1 format=0.1")
    named = {*VERIFIERS, *names_of(args.verifier or "exact"), "reward_model", "environment"}
    if unknown := [name for name in weights if name not in named and ":" not in name]:
        known = args.verifier or f"{', '.join(VERIFIERS)}, reward_model"
        refuse(f"--reward_weights: no verifier {unknown[0]!r}; known: {known}")
    check_control(args)
    if weights.get("reward_model", 1.0) is None:
        refuse("--reward_weights reward_model=gate: its score has no scale on which 1 is right; gate by a verifier")


# ------------------------------------------------------------------------------------------------ the worker processes


def _as_reward(name: str, found) -> Reward:
    """Convert a verifier's result to a Reward. Raises TypeError or ValueError if it is neither that nor a number."""
    if isinstance(found, Reward):
        reward = Reward(  # of plain values: numpy's numbers are not JSON's, and objects of a user's file stay here
            float(found.score),
            {str(name): float(value) for name, value in found.parts.items()},
            str(found.status),
            tuple((int(place), float(value)) for place, value in found.steps),
            str(found.extracted),
            str(found.detail),
        )
        if reward.status not in STATUSES or not all(map(math.isfinite, reward.parts.values())):
            raise ValueError(f"the verifier {name!r} returned status {reward.status!r} and parts {reward.parts}")
    elif isinstance(found, numbers.Real | np.bool_):  # bool, int, float, and numpy's
        reward = Reward(float(found))
    else:
        raise TypeError(f"the verifier {name!r} returned {type(found).__name__}, not a number or a rewards.Reward")
    if not math.isfinite(reward.score):
        raise ValueError(f"the verifier {name!r} returned the score {reward.score}")
    return reward


def _verify_by(
    name: str, response: str, truth: str, row: dict, caught: type[BaseException] = Exception
) -> tuple[Reward, bool]:
    """Return (the Reward of one verifier, True if it raised ``caught``)."""
    try:
        return _as_reward(name, find_verifier(name)(response, truth, row)), False
    except (MemoryError, RecursionError, OSError):  # the response's doing, as a rule, or the machine's
        return Reward(0.0, status="crash", detail=traceback.format_exc(limit=-4)), True
    except caught:  # whatever it is: no response may end a run
        return Reward(0.0, status="unscorable", detail=traceback.format_exc(limit=-4)), True


def _verify(
    names: list[str], texts: dict[str, str], weights: dict, response: str, truth: str, row: dict
) -> tuple[Reward, set[str]]:
    """Return, in a worker, (the combined Reward, the verifiers that raised). ``texts``: the run's user files."""
    user_files.texts.update(texts)
    found = {}
    raised = set()
    worker = os.getpid()
    for name in names:  # a response that is executed may say exit(), and nobody's Ctrl-C comes here
        found[name], failed = _verify_by(name, response, truth, row, BaseException)
        if os.getpid() != worker:
            os._exit(0)  # a fork that a verifier made and did not end: it must not answer for the worker
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is still set would strike another sample
        if failed:
            raised.add(name)
    reward = combine(found, weights)
    if not math.isfinite(reward.score):
        reward = replace(reward, score=0.0, steps=(), status="unscorable", detail="scores times weights overflow")
    return reward, raised


class RewardPool(VerifierPool):
    """Worker processes that each verify one sample at a time. ``verifiers``: those that will be needed."""

    def __init__(self, workers: int, timeout: float, verifiers=(), weights=None, unsafe: bool = False):
        self.builtin = frozenset(VERIFIERS)
        self.weights = weights or {}
        names = {name for verifier in verifiers for name in names_of(verifier)}
        super().__init__(_verify, workers, timeout, sorted(names), unsafe)

    def failed(self, status: str, detail: str) -> Reward:
        """Return the Reward of a response whose verification was killed, or whose worker died."""
        return Reward(0.0, status=status, detail=detail)


# ----------------------------------------------------------------------------------------------------------- shaping


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Compute DAPO's soft penalty (arXiv 2503.14476, equation 13): 0 up to ``longest - buffer``, then linear to 1."""
    if buffer == 0:
        return 0.0
    beyond = max(0.0, length - (longest - buffer))
    return min(1.0, beyond / buffer)


def shape_reward(sample, found: Reward, args) -> None:
    """Store a verifier's result, and the reward made of it: (score - bias) * scaling, truncation, penalties, clip."""
    truncated = sample.finish_reason == "length"
    sample.score = found.score
    sample.reward_parts = dict(found.parts)
    sample.reward_status = found.status
    sample.reward_steps = found.steps
    sample.extracted = found.extracted
    if truncated and args.mask_no_eos_with_zero:
        sample.score = 0.0
        sample.reward_parts |= {"correct": 0.0} if "correct" in sample.reward_parts else {}
    reward = (sample.score - args.reward_bias) * args.reward_scaling
    reward -= truncated * args.non_stop_penalty
    reward -= overlong_penalty(len(sample.response_ids), args.max_response_length, args.overlong_buffer)
    if args.max_reward_clip is not None:
        reward = max(-args.max_reward_clip, min(args.max_reward_clip, reward))
    sample.reward = reward


# ------------------------------------------------------------------------------------------------------------ controls


def check_control(args) -> None:
    """Reject a --reward_control through which the verifier's score would still be learned from: exit code 2."""
    if args.reward_control == "none":
        return
    generated = args.num_unique_prompts_rollout * (args.generation_size or args.num_samples_per_prompt_rollout)
    by = f"--reward_control {args.reward_control}"
    cases = [
        (args.dataset_filter is not None, "--dataset_filter chooses problems by the verifier's score; leave it out"),
        (getattr(args, "dense_reward", "none") != "none", "--dense_reward has scores of its own; leave it out"),
        (args.reward_control == "random" and generated == 1, "one sample a step would get its own reward; sample more"),
    ]
    if args.reward_control == "shuffled":
        model = args.reward_model_name_or_path is not None
        cases += [
            (model, "--reward_model_name_or_path scores without a truth; leave one of them out"),
            (args.environment is not None, "--environment rewards without a truth; leave one of them out"),
        ]
    for wrong, why in cases:
        if wrong:
            refuse(f"{by}: {why}")


def other_problems(problems: list, seed: int) -> dict[int, object]:
    """Map the id of each problem to another one of its verifier, drawn at random; the truths of both may be equal.

    To be always wrong would say something about the truth. Exits with code 2 where all truths of a verifier are one.
    """
    judged: dict[str, list] = {}
    for problem in problems:
        judged.setdefault(problem.verifier, []).append(problem)
    others = {}
    for verifier, own in judged.items():
        if len({problem.truth for problem in own}) == 1:
            refuse(f"--reward_control shuffled: all truths of --verifier {verifier} are equal, so there is no other")
        random.Random(f"{seed}/{verifier}").shuffle(own)
        for one, other in zip(own, own[1:] + own[:1], strict=True):
            others[id(one)] = other
    return others


def control_reward(sample, found: Reward, other: Reward | None, args) -> None:
    """Replace a sample's reward as --reward_control says, unless it takes the whole batch (``deal_out``).

    found: the verifier's own judgment. other: that by another problem's truth. Evaluations use neither.
    """
    if args.reward_control == "inverted":
        _replace_reward(sample, 0.0 - sample.reward, args)
    if args.reward_control in ("format", "shuffled"):
        score = found.parts.get("format", 0.0) if args.reward_control == "format" else other.score
        stand_in = replace(sample)
        shape_reward(stand_in, Reward(score), args)
        _replace_reward(sample, stand_in.reward, args)


def deal_out(samples: list, args) -> None:
    """Permute the rewards of a batch (--reward_control random): they say nothing of their samples; the mean stays."""
    content = sum(int(sample.response_ids.sum()) for sample in samples)  # resumed or not, on any number of ranks
    rewards = [sample.reward for sample in samples]
    random.Random(f"{args.seed}/{content}").shuffle(rewards)
    for sample, reward in zip(samples, rewards, strict=True):
        _replace_reward(sample, reward, args)


def _replace_reward(sample, reward: float, args) -> None:
    """Replace a sample's reward, but not its score and parts; the new reward becomes a part, so that logs name it."""
    sample.reward = reward
    sample.reward_steps = ()
    sample.reward_parts[f"control_{args.reward_control}"] = reward


# ------------------------------------------------------------------------------------------------- all of it, for a run


MOST_WORKERS = 32  # on a machine with very many cores; a step's samples seldom keep more of them busy


def worker_count() -> int:
    """Return the number of verifier processes of this rank: its cores minus two, for trainer and engine; 1 to 32."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // ranks - 2))


def row_for(problem, args, step: int | None = None) -> dict:
    """Return the ``row`` of a verifier: the problem's columns, its messages, and the step that trains on the response.

    An evaluation has the last step, so that all evaluations of a run judge alike. A column of these names wins.
    """
    progress = {"step": args.steps if step is None else step, "total_steps": args.steps}
    return {"messages": problem.messages, **progress, **problem.row}


def try_own_verifiers(args, problems: list) -> None:
    """Try the user's own verifiers, for ``--dry_run``, and print two of their scores. Exit code 2 if one raises."""
    last = {p.verifier: p for p in problems}
    own = {name: Problem(p.messages, p.truth, name, row_for(p, args)) for name, p in last.items()}
    own = {name: p for name, p in own.items() if not set(names_of(name)) <= {*VERIFIERS, "reward_model"}}
    if not own or args.environment is not None:  # their rewards need an episode
        return
    pool = RewardPool(1, args.call_timeout, own, parse_weights(args.reward_weights), args.allow_unsafe_code_exec)
    wrong = pool.check(list(own.values()))
    for name, problem in own.items() if not wrong else ():
        futures = [pool.submit(name, response, problem.truth, problem.row) for response in (problem.truth, "")]
        right, empty = (pool.result(future).score for future in futures)
        print(
            f"verifier   {name}: {right:g} for the ground truth {problem.truth[:40]!r}, {empty:g} for an empty response"
        )
    pool.close()
    if wrong:
        refuse(f"--verifier: {wrong}")


class Verifiers:
    """Scorer of a run's samples: verifier processes, a reward model if there is one, and shaping."""

    def __init__(self, args, problems: list, device, dtype):
        self.args = args
        self.weights = parse_weights(args.reward_weights)
        first = {problem.verifier: problem for problem in reversed(problems)}
        self.pool = RewardPool(worker_count(), args.call_timeout, [*first], self.weights, args.allow_unsafe_code_exec)
        trial = {} if args.environment is None else {"episode": {"turns": [], "outcome": {"score": 0.0}}}
        tried = [Problem(p.messages, p.truth, name, row_for(p, args) | trial) for name, p in first.items()]
        wrong = self.pool.check(tried)
        if wrong:
            refuse(f"--verifier: {wrong}")
        self.others = other_problems(problems, args.seed) if args.reward_control == "shuffled" else {}
        if args.reward_control == "format":
            self._check_format(tried)
        self.reward_model = None
        if args.reward_model_name_or_path is not None:
            self.reward_model = user_files.find("runtime.run.reward_model:RewardModel")(args, device, dtype)
            self.reward_model.try_on([problem.messages for problem in problems])

    def submit(self, sample, problem, step: int | None = None) -> tuple:
        """Begin to verify a sample, in another process: (sample, problem, future), for ``collect``.

        ``step``: that trains on the sample; None in an evaluation. Of several turns the verifier gets the last one as
        the response, and all as ``row["episode"]["turns"]``.
        """
        row = row_for(problem, self.args, step)
        if sample.turns:
            row = row | {"episode": {"turns": sample.turns, "outcome": sample.outcome}}
        futures = [self.pool.submit(problem.verifier, sample.response, problem.truth, row)]
        if self.others:
            other = self.others[id(problem)]
            row = row_for(other, self.args, step)
            futures.append(self.pool.submit(other.verifier, sample.response, other.truth, row))
        return sample, problem, futures

    def collect(
        self,
        submitted: list[tuple],
        on_result: Callable[[], None],
        gather: Callable = list,
    ) -> list:
        """Return the submitted samples with their rewards. Calls ``on_result`` for each.

        ``gather``: from the samples of this rank to those of all.
        """
        judged = []
        for _, _, futures in submitted:
            judged.append([self.pool.result(future) for future in futures])
            on_result()
        samples = [sample for sample, _, _ in submitted]
        found = [judgments[0] for judgments in judged]
        if self.reward_model is not None:
            conversation_of = user_files.find("runtime.run.reward_model:conversation_of")
            conversations = [conversation_of(sample, problem) for sample, problem, _ in submitted]
            found = self.reward_model.add(found, conversations, self.weights)
        for sample, reward, judgments in zip(samples, found, judged, strict=True):
            shape_reward(sample, reward, self.args)
            control_reward(sample, reward, judgments[-1], self.args)
        samples = gather(samples)
        if self.args.reward_control == "random":
            deal_out(samples, self.args)
        return samples

    def _check_format(self, problems: list) -> None:
        """Reject --reward_control format where a verifier, asked about a truth, has no part of this name."""
        futures = {}
        for p in problems:
            if p.verifier != "environment":  # which has no parts before its first episode
                futures[p.verifier] = self.pool.submit(p.verifier, p.truth, p.truth, p.row)
        for name, future in futures.items():
            if "format" not in self.pool.result(future).parts:
                refuse(f"--reward_control format: --verifier {name} reports no part format (docs/data_and_rewards.md)")

    def close(self) -> None:
        """End the processes."""
        self.pool.close()

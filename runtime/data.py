"""From sources to problems, prompts, token ids and the order in which a run draws them. Imports no torch."""

from __future__ import annotations

import bisect
import dataclasses
import datetime
import functools
import hashlib
import inspect
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime import sandbox
from runtime.process import on_a_line, print_on_rank_0, rank, refuse
from runtime.records import Problem, Sample
from runtime.sources import (
    GYM,
    BrokenLine,
    cached_map,
    digest,
    digest_of_files,
    first_line,
    gym_rows,
    int_lists,
    read_source,
    refuse_broken_line,
    rows_of,
    source_name,
)

# For data sets, or verifiers chosen by the columns, that say nothing about the form of an answer. The example of the
# first one shows that results can be negative: what is never sampled is never learned, and a minus sign is rare under
# the model's own system prompt.
SYSTEM_PROMPTS = {
    "reasoning_gym:chain_sum": "Write out the calculation: 2 - 4 = -2",
    "math": "Reason step by step and put the final answer in \\boxed{}.",
    "reasoning_gym": "Give the final answer between <answer> and </answer>.",
}
NUMBERS = re.compile(r"[\[(\s]*-?\d+(?:[\s,;]+-?\d+)*[\])\s]*")  # [3, 4, 25] or 3 4 25
COUNTDOWN = (
    "Make {target} from the numbers {nums}: use each of them exactly once, with + - * / and brackets. Give the "
    "expression between <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."
)

# What other frameworks' data sets call a verifier: verl's column data_source and open-instruct's column dataset.
VERIFIER_ALIASES = {
    "gsm8k": "gsm8k",
    "openai/gsm8k": "gsm8k",
    "math": "math",
    "math_dapo": "math",
    "math_dapo_reasoning": "math",
    "lighteval/math": "math",
    "digitallearninggmbh/math-lighteval": "math",
    "huggingfaceh4/math-500": "math",
    "numina_aops_forum": "math",
    "numina_synthetic_math": "math",
    "numina_amc_aime": "math",
    "numina_synthetic_amc": "math",
    "numina_cn_k12": "math",
    "numina_olympiads": "math",
    "hiyouga/geometry3k": "math",
    "code": "code",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "ifeval": "ifeval",
    "countdown": "countdown",
}

Messages = list[dict[str, str]]  # a conversation: role and content of each
Pick = Callable[[str, list[str], int], list[str]]  # (source, keys of its problems, count) -> the chosen keys
BadRows = list[tuple[int, str]]  # (index, what is wrong with the row)
Request = tuple[int, int, int]  # (place of the problem in the batch, number of the response, its seed)

# (verifier, ground truth, row) -> what is wrong with the ground truth, "" if nothing is: rewards.truth_error.
# Raises ValueError for a verifier that does not exist.
Check = Callable[[str, str, dict], str]

LARGE = 5000  # rows of a source, or prompts, from which on several processes prepare them and the result is cached
FIRST = 100  # rows by which a source's columns are recognized

# What a chat template that writes today's date gets (Llama 3.2, SmolLM3, gpt-oss, Granite 3): with the day's own, a run
# could not go on after midnight, and one command would be another run on every day. It is the date that Llama's
# template writes where it is given none.
TODAY = datetime.datetime(2024, 7, 26)


# ---------------------------------------------------------------------------------------------------- rows to problems


@dataclass(frozen=True)
class Columns:
    """How the rows of a source become problems."""

    prompt: str  # column; a dot leads into nested columns
    truth: str  # column of the ground truth
    verifier: str
    verifier_key: str | None  # column that names a row's verifiers; where it is empty, ``verifier`` counts
    system: str | None  # system prompt
    replaces: bool  # whether it takes the place of a row's own; else it is for rows without one


def value_of(row: dict[str, Any], key: str) -> Any:
    """``row[key]``, or with dots in ``key`` a nested value: reward_model.ground_truth. Raises KeyError."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict):
            raise KeyError(key)
        value = value[part]
    return value


def known_columns(rows: list) -> tuple[str, str, str, str | None]:
    """(prompt, ground truth, verifier, verifier key) by what the first rows of a source look like.

    GSM8K, MATH, countdown, APPS, TACO, and the data of AReaL, open-instruct and verl are known by their columns; any
    other source has ``question``, ``answer`` and the verifier last_number.
    """
    first = [row for row in rows[:FIRST] if isinstance(row, dict)]
    has = {key for row in first for key in row}
    # verl: data_source, prompt (messages), ability, reward_model: {style, ground_truth}, extra_info
    nested = [row["reward_model"] for row in first if isinstance(row.get("reward_model"), dict)]
    if "prompt" in has and any("ground_truth" in value for value in nested):
        truth = "target" if {"nums", "target"} <= has else "reward_model.ground_truth"  # TinyZero's countdown
        return "prompt", truth, "last_number", "data_source" if "data_source" in has else None
    if {"messages", "ground_truth"} <= has:  # open-instruct
        return "messages", "ground_truth", "last_number", "dataset" if "dataset" in has else None
    if "input_output" in has:  # APPS, TACO: question; AReaL: prompt
        return "question" if "question" in has else "prompt", "input_output", "code", None
    if {"nums", "target"} <= has and not {"question", "answer"} <= has:
        return "nums", "target", "countdown", None
    if "problem" in has and has & {"answer", "solution"}:
        return "problem", "answer" if "answer" in has else "solution", "math", None
    if any("#### " in str(row.get("answer")) for row in first):
        return "question", "answer", "gsm8k", None
    return "question", "answer", "last_number", None


def _is_column(key: str, has: Iterable[str]) -> bool:
    """Whether a column of this name, or the one that its first part names, is among the columns ``has``."""
    return key in has or key.split(".")[0] in has


def _names(columns: Iterable) -> str:
    """Names of columns for a message of one line, whatever a file holds."""
    return ", ".join(on_a_line(str(name)) for name in columns)


def look_at(source: str, batches: Iterable[list], args, check: Check) -> Columns:
    """The columns of a source: the flags, or else what its first rows look like.

    ``batches`` of rows are read only as far as it takes. Ends with exit code 2 when no row has such a column.
    """
    batches = iter(batches)
    seen = next(batches, [])
    if source.startswith(GYM):
        seen = [*seen, *itertools.chain.from_iterable(batches)]
    prompt, truth, verifier, verifier_key = known_columns(seen)
    prompt = args.prompt_key or prompt
    truth = args.ground_truth_key or truth
    names_verifiers = args.verifier_key if source == args.dataset else None
    has: dict[str, None] = {}  # the names of all columns, in order
    for rows in itertools.chain([seen], batches):
        for row in rows:
            if isinstance(row, dict):
                has |= dict.fromkeys(row)
        if _is_column(prompt, has) and _is_column(truth, has) and (names_verifiers is None or names_verifiers in has):
            break
    given = args.verifier
    without_truth = args.ground_truth_key is None and given and not check(given, "", seen[0] if seen else {})
    for flag, key in (("--prompt_key", prompt), ("--ground_truth_key", truth)):
        if has and not _is_column(key, has) and not (flag == "--ground_truth_key" and without_truth):
            alone = "; --verifier reward_model needs none" if args.reward_model_name_or_path and key == truth else ""
            refuse(f"{flag} {key}: --dataset {source} has no such column; it has: {_names(has)}{alone}")
    if names_verifiers is not None and has and not _is_column(names_verifiers, has):
        refuse(f"--verifier_key {names_verifiers}: --dataset {source} has no such column; it has: {_names(has)}")
    if source.startswith(GYM):
        for row in seen:
            if check("last_number", str(row.get(truth)), row):
                verifier = "reasoning_gym"  # an answer that is no number: the task's own scorer
    if args.verifier_key is not None or given:
        verifier_key = args.verifier_key
    system = args.system_prompt
    if system is None:
        system = SYSTEM_PROMPTS.get(source.split("?")[0])
    if system is None and not given:
        system = SYSTEM_PROMPTS.get(verifier)
    return Columns(prompt, truth, given or verifier, verifier_key, system, args.system_prompt is not None)


def _messages(key: str, prompt: Any, row: dict[str, Any]) -> Messages:
    """The prompt in column ``key`` as chat messages, without the answer that may close them.

    Raises ValueError for what is neither text nor messages nor countdown's numbers.
    """
    if key == "nums" and "target" in row:
        numbers = prompt
        if isinstance(prompt, str) and NUMBERS.fullmatch(prompt):  # a column of a CSV file
            numbers = re.findall(r"-?\d+", prompt)
        if isinstance(numbers, list):
            listed = ", ".join(map(str, numbers))
            return [{"role": "user", "content": COUNTDOWN.format(target=row["target"], nums=listed)}]
    if isinstance(prompt, str) and (chat := _chat_as_text(prompt)):
        prompt = chat
    if isinstance(prompt, str):
        starter = row.get("starter_code") if "input_output" in row else None  # APPS, TACO: it names the function
        return [{"role": "user", "content": f"{prompt}\n\n{starter}" if starter else prompt}]
    kinds = type(prompt).__name__
    if isinstance(prompt, list):
        kinds = "a list of something else"
        if all(_is_message(message) for message in prompt):
            messages = [{"role": message["role"], "content": message["content"]} for message in prompt]
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            if messages:
                return messages
            kinds = "only messages of the assistant"
    raise ValueError(f"its prompt must be text or chat messages with role and content, but is {kinds}")


def _with_system(messages: Messages, columns: Columns) -> Messages:
    """A prompt with at most one system message. Raises ValueError where nothing else is left."""
    own = messages[0]["role"] == "system"
    if own and columns.replaces:
        messages = messages[1:]
        if not messages:
            raise ValueError("has only a system message as its prompt")
    if columns.system and (columns.replaces or not own):
        return [{"role": "system", "content": columns.system}, *messages]
    return messages


def _chat_as_text(text: str) -> list | None:
    """The messages of a chat that is written as JSON, as in a column of a CSV file; None of any other text."""
    if not text.startswith("[{"):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if all(map(_is_message, found)) else None


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _named_verifiers(row: dict[str, Any], key: str) -> str:
    """The verifiers that a row names in a column, text or a list, by this project's names; "" where it names none.

    Raises ValueError for a list of something else than names.
    """
    try:
        named = value_of(row, key) or ""
    except KeyError:
        named = ""
    if isinstance(named, list) and not all(isinstance(name, str) for name in named):
        raise ValueError(f"has a list of something else than names in its {key!r}")
    text = ",".join(named) if isinstance(named, list) else str(named)
    names = []
    for name in text.split(","):
        lower = name.strip().lower()
        names.append("math" if lower.startswith("aime") else VERIFIER_ALIASES.get(lower, name))
    return ",".join(names)


def make_problem(row: Any, columns: Columns, check: Check) -> Problem:
    """One row as a problem. Raises ValueError that says what is wrong with the row, or with its ground truth."""
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, not an object with columns")
    values = []
    for key in (columns.prompt, columns.truth):
        try:
            value = value_of(row, key)
        except KeyError:
            if key != columns.truth or check(columns.verifier, "", row):
                raise ValueError(f"has no {key!r}") from None
            value = None
        empty = value is None or value != value or value in ("", [], {})
        if empty and (key != columns.truth or check(columns.verifier, "", row)):
            raise ValueError(f"has an empty {key!r}")
        values.append("" if empty else value)
    messages = _with_system(_messages(columns.prompt, values[0], row), columns)
    truth = values[1]
    truth = json.dumps(truth) if isinstance(truth, list | dict) else str(truth)
    _check_text(columns.prompt, "".join(message["content"] for message in messages))
    _check_text(columns.truth, truth)
    verifier = columns.verifier
    if columns.verifier_key is not None:
        verifier = _named_verifiers(row, columns.verifier_key) or verifier
    try:
        wrong = check(verifier, truth, row)
    except ValueError as error:
        raise ValueError(
            f"names a verifier that does not exist (--verifier_key {columns.verifier_key}): {error}"
        ) from error
    if wrong:
        raise ValueError(f"has a ground truth that its own verifier {verifier} rejects: {truth[:80]!r} ({wrong})")
    return Problem(messages, truth, verifier, row)


def _check_text(key: str, text: str) -> None:
    """Raise ValueError for half of a pair of surrogates: no tokenizer takes it, and no file can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.end + 20]
        raise ValueError(f"has a {key!r} that is no UTF-8 text, at {around!r}") from None


def problems_of(rows: list, start: int, columns: Columns, check: Check) -> tuple[list[Problem], BadRows]:
    """(the problems, [(index, what is wrong)] of the other rows); ``start`` is the index of the first row."""
    problems, bad = [], []
    for index, row in enumerate(rows, start):
        try:
            problems.append(make_problem(row, columns, check))
        except ValueError as error:
            bad.append((index, str(error)))
    return problems, bad


def report_bad_rows(bad: BadRows, count: int, source: str, args) -> None:
    """End the run for rows that cannot be used, or print which are dropped (``--bad_rows drop``)."""
    if not bad:
        return
    indices = ", ".join(str(index) for index, _ in bad[:20])
    if len(bad) > 20:
        indices += ", ..."
    found = (
        f"{len(bad)} of {count} rows of --dataset {source} cannot be used (rows {indices}); row {bad[0][0]} {bad[0][1]}"
    )
    if args.bad_rows == "raise":
        alone = ", --verifier reward_model for that model alone" if args.reward_model_name_or_path else ""
        refuse(f"{found}; repair them, choose other columns or a --verifier{alone}, or add --bad_rows drop")
    print_on_rank_0(f"warning: --bad_rows drop: {found}")


# ------------------------------------------------------------------------------------------------------------- sources


CHECKED = ("messages", "truth", "verifier", "row", "wrong")  # JSON, text, text, JSON, text


def _check_batch(batch: dict[str, list], places: list[int], columns: Columns, check: Check) -> dict[str, list[str]]:
    """A batch of a raw data set -> the columns CHECKED of its problems; of a bad row only ``wrong`` is filled."""
    found: dict[str, list[str]] = {name: [] for name in CHECKED}
    for row in rows_of(batch, places[0]):
        problems, bad = problems_of([row], 0, columns, check)
        values = dict.fromkeys(CHECKED, "")
        if bad:
            values["wrong"] = bad[0][1]
        for problem in problems:
            values["messages"] = json.dumps(problem.messages)
            values["truth"] = problem.truth
            values["verifier"] = problem.verifier
            values["row"] = json.dumps(row)
        for name, value in values.items():
            found[name].append(value)
    return found


def _batches(raws: list, size: int = 1000) -> Iterator[list]:
    """The rows of raw data sets, ``size`` at a time. Ends with exit code 2 for a line that is not JSON."""
    for raw, files in raws:
        for start in range(0, len(raw), size):
            try:
                rows = rows_of(raw[start : start + size], start)
            except BrokenLine as error:
                refuse_broken_line(files, error)
            yield rows


def check_rows(source: str, raws: list, args, check: Check):
    """A data set with the columns CHECKED, one row for each of the source's: by several processes, and cached.

    What a row becomes follows from the data, the arguments, and the code here, of ``check`` and of ``--verifier``:
    a change of any of them is checked again.
    """
    import datasets

    columns = look_at(source, _batches(raws), args, check)
    code = [*sorted(Path(__file__).parent.glob("*.py")), Path(inspect.getfile(check))]
    for name in columns.verifier.split(","):
        own = Path(name.rpartition(":")[0])
        if own.is_file():
            code.append(own)
    sandbox.allow_unsafe = args.allow_unsafe_code_exec  # the rows' own solutions are run
    isolated = ("code" in columns.verifier or columns.verifier_key) and not sandbox.namespaces_refused()
    rules = digest(repr([columns, sandbox.allow_unsafe, bool(isolated)]).encode(), digest_of_files(code).encode())
    function = functools.partial(_check_batch, columns=columns, check=check)
    kinds = dict.fromkeys(CHECKED, datasets.Value("string"))
    checked = []
    for raw, files in raws:
        key = digest(rules.encode(), raw._fingerprint.encode())
        try:
            checked.append(cached_map(raw, function, kinds, key, "checking rows"))
        except BrokenLine as error:
            refuse_broken_line(files, error)
    return datasets.concatenate_datasets(checked)


def _read_checked(source: str, raws: list, args, check: Check) -> list[Problem]:
    """The usable problems of a large source, through the cache."""
    checked = check_rows(source, raws, args, check).to_dict()
    bad = [(index, wrong) for index, wrong in enumerate(checked["wrong"]) if wrong]
    report_bad_rows(bad, len(checked["wrong"]), source, args)
    problems = []
    columns = [checked[name] for name in CHECKED]
    for messages, truth, verifier, row, wrong in zip(*columns, strict=True):
        if not wrong:
            problem = Problem(json.loads(messages), truth, verifier, json.loads(row))
            problems.append(problem)
    return problems


def _read_small(source: str, rows: list, args, check: Check) -> list[Problem]:
    """The usable problems of rows in memory."""
    columns = look_at(source, [rows], args, check)
    problems, bad = problems_of(rows, 0, columns, check)
    report_bad_rows(bad, len(rows), source, args)
    return problems


def read_problems(source: str, args, check: Check) -> dict[str, Problem]:
    """All usable problems of one source, in its order, each prompt once; the key is the prompt as text."""
    sandbox.allow_unsafe = args.allow_unsafe_code_exec  # the rows' own solutions are run
    if source.startswith(GYM):
        problems = _read_small(source, gym_rows(source, args.seed), args, check)
    else:
        raws = read_source(source, args)
        if sum(len(raw) for raw, _ in raws) >= LARGE:
            problems = _read_checked(source, raws, args, check)
        else:
            rows = [row for batch in _batches(raws) for row in batch]
            problems = _read_small(source, rows, args, check)
    name = source_name(source)
    distinct: dict[str, Problem] = {}
    for problem in problems:
        problem.source = problem.source or name
        key = problem.messages if args.environment is None else [problem.messages, problem.row]
        distinct.setdefault(json.dumps(key, default=str), problem)
    return distinct


# ------------------------------------------------------------------------------------------------- mixtures and splits


def _mix(sources: list, flag: str, args, check: Check, pick: Pick) -> dict[str, Problem]:
    """Return the problems of several sources; the key is the prompt, and equal prompts count for the first source.

    ``pick`` chooses among the problems of a source where fewer than all are wanted.
    """
    problems: dict[str, Problem] = {}
    names = Counter(source_name(source) for source, _ in sources)
    for source, part in sources:
        own = read_problems(source, args, check)
        for same in problems.keys() & own.keys():
            del own[same]
        if names[source_name(source)] > 1:
            for problem in own.values():
                problem.source = source.replace("/", "-")
        wanted = round(part * len(own)) if isinstance(part, float) else part
        if not 0 < wanted <= len(own):
            refuse(f"{flag}: {source!r} has {len(own)} distinct problems, {part} asks for {wanted}")
        if wanted < len(own):
            chosen = pick(source, list(own), wanted)
            own = {key: own[key] for key in chosen}
        problems |= own
    return problems


def mixed_problems(args, check: Check) -> dict[str, Problem]:
    """The problems of ``--dataset``, where ``--seed`` draws those of a mixture; the key is the prompt."""
    if args.sources[0].part is None:
        return read_problems(args.sources[0].name, args, check)

    def draw(source: str, keys: list[str], count: int) -> list[str]:
        return random.Random(f"{args.seed}/{source}").sample(keys, count)

    return _mix(args.sources, "--dataset", args, check, draw)


def evaluation_problems(args, check: Check) -> dict[str, Problem] | None:
    """The first problems of ``--eval_dataset``, or of each of its sources.

    None where it is not given: then a part of the training data is held out.
    """
    if args.eval_dataset is None:
        return None
    if args.eval_sources[0].part is not None:

        def first(source: str, keys: list[str], count: int) -> list[str]:
            return keys[:count]

        found = _mix(args.eval_sources, "--eval_dataset", args, check, first)
        return found if args.eval_prompts > 0 else {}
    found = read_problems(args.eval_sources[0].name, args, check)
    if args.eval_prompts > 0 and args.eval_prompts != len(found):
        which = "all" if args.eval_prompts > len(found) else f"the first {args.eval_prompts}"
        mixer = json.dumps({args.eval_dataset: 1.0})
        every = f"; --eval_dataset '{mixer}' takes all" if args.eval_prompts < len(found) else ""
        source = args.eval_dataset
        print_on_rank_0(f"--eval_prompts {args.eval_prompts}: {which} of the {len(found)} of {source}{every}")
    return dict(itertools.islice(found.items(), args.eval_prompts))


def load_problems(args, check: Check) -> tuple[list[Problem], list[Problem]]:
    """(training problems, evaluation problems), disjoint: no prompt of the second is ever trained on.

    Rows with the same prompt count once. The split is a permutation seeded by ``--seed``: the first ``eval_prompts``
    distinct prompts are for evaluation, the rest for training, unless evaluation data are given. Ends with exit code 2
    for an unknown data set or column and when too few problems are left.
    """
    problems = mixed_problems(args, check)
    apart = evaluation_problems(args, check)
    for same in apart or ():
        problems.pop(same, None)
    training = list(problems.values())
    random.Random(args.seed).shuffle(training)
    if apart is None:
        evaluation = training[: args.eval_prompts]
        training = training[args.eval_prompts :]
    else:
        evaluation = list(apart.values())
    check_sandbox([*training, *evaluation], args)
    check_enough(training, evaluation, args)
    return training, evaluation


def check_enough(training: list[Problem], evaluation: list[Problem], args) -> None:
    """Refuse too few problems for one step, or none to evaluate on where evaluation was asked for."""
    if len(training) < args.num_unique_prompts_rollout:
        filtered = " left by --overlong_prompts filter" if args.overlong_prompts == "filter" else ""
        if args.eval_dataset is not None:
            has = f"{len(training)} distinct problems{filtered} that are not evaluated on"
        else:
            has = f"{len(training) + len(evaluation)} distinct problems{filtered}"
            has += f"; --eval_prompts {args.eval_prompts} leaves {len(training)}"
        refuse(
            f"--dataset {args.dataset} has {has}, fewer than "
            f"--num_unique_prompts_rollout {args.num_unique_prompts_rollout}"
        )
    if args.eval_prompts > 0 and not evaluation:
        refuse(f"--eval_prompts {args.eval_prompts}: no problem is left (--overlong_prompts {args.overlong_prompts})")


def check_sandbox(problems: list[Problem], args) -> None:
    """Refuse to run models' programs where the kernel gives no sandbox, unless that is accepted."""
    if not any("code" in problem.verifier.split(",") for problem in problems):
        return
    why = sandbox.namespaces_refused()
    if not why:
        return
    if not args.allow_unsafe_code_exec:
        refuse(
            f"the verifier code has no sandbox here: the kernel provides no namespaces ({why}). Run where user "
            f"namespaces are allowed, or accept time and memory limits alone with --allow_unsafe_code_exec"
        )
    print_on_rank_0(f"warning: --allow_unsafe_code_exec: programs run with this user's rights, no sandbox ({why})")


# --------------------------------------------------------------------------------------------------------- token ids


def check_template_variables(tokenizer, args) -> None:
    """Refuse a variable that the chat template does not read: a misspelled one would change nothing."""
    for name in args.template.variables:
        if not re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template()):
            owner = args.tokenizer_name_or_path or args.model_name_or_path
            refuse(
                f"--chat_template: the template of {owner} has no variable {name!r}; leave it out, or spell it as there"
            )


def load_tokenizer(args):
    """The tokenizer that ``--tokenizer_name_or_path`` names, or else the model's own.

    Never that of mistral-common, which a machine with vLLM has: it knows no chat template, and no control token in a
    text.
    """
    from transformers import AutoTokenizer

    name, revision = args.tokenizer
    where = {"revision": revision, "trust_remote_code": args.trust_remote_code}
    return AutoTokenizer.from_pretrained(name, mistral_format=False, **where)


def prompt_key(tokenizer, args) -> str:
    """A name of tokenizer and template: it changes whenever the same messages could become other ids."""
    given = args.template.text
    state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    values = [args.template.variables, str(TODAY)]
    text = json.dumps([state, given or tokenizer.get_chat_template(), given is None, special, values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Unrenderable(ValueError):
    """A prompt that the chat template does not take. Argument: why."""


def as_text(messages: Messages, tokenizer, template: str | None, variables: dict[str, Any]) -> str:
    """A prompt as the chat template writes it, on every day with the date TODAY. Raises Unrenderable."""
    import jinja2

    try:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
            strftime_now=TODAY.strftime,  # an argument hides the global function of that name
            **variables,
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # ValueError: there is no template
        roles = [message["role"] for message in messages]
        why = f"the chat template does not take a prompt of {', '.join(roles)}: {first_line(error)}"
        remedies = ["choose another --chat_template"]
        if "system" in roles:
            remedies.insert(0, 'leave out the system message (--system_prompt "")')
        raise Unrenderable(f"{why}; {', or '.join(remedies)}") from error


def render(
    conversations: list[Messages], tokenizer, template: str | None, variables: dict[str, Any] | None = None
) -> list[list[int]]:
    """Token ids of prompts. The tokenizer's own template (``template`` None) writes all special tokens itself.

    With another one, a tokenizer that begins every text with a BOS gets exactly one. ``variables``: what else the
    template reads. Raises Unrenderable.
    """
    if not conversations:
        return []
    texts = [as_text(messages, tokenizer, template, variables or {}) for messages in conversations]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if template is None:
        return prompts
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer("")["input_ids"][:1] != [bos]:
        return prompts
    return [ids if ids[:1] == [bos] else [bos, *ids] for ids in prompts]


def _render_batch(batch: dict[str, list], places: list[int], **how) -> dict[str, list]:
    """A batch of conversations as JSON -> their token ids; ``how`` is what ``render`` takes."""
    return {"ids": render([json.loads(text) for text in batch["messages"]], **how)}


def shuffled_prompts(source: str, tokenizer, seed: int) -> list[dict[str, Any]]:
    """The rows of a task of reasoning-gym in random order, each question once; ``ids`` are those of the prompt."""
    system = {"role": "system", "content": SYSTEM_PROMPTS.get(source.split("?")[0], "")}
    rows = list({row["question"]: row for row in gym_rows(source, seed)}.values())
    conversations = [[system, {"role": "user", "content": row["question"]}] for row in rows]
    for row, ids in zip(rows, render(conversations, tokenizer, None), strict=True):
        row["ids"] = ids
    random.Random(seed).shuffle(rows)
    return rows


def render_cached(dataset, tokenizer, args, more: dict[str, Any]) -> list[list[int]]:
    """``render`` of the column ``messages`` (JSON) of a data set: by several processes, and cached."""
    import datasets

    how = {"tokenizer": tokenizer, "template": args.template.text, "variables": args.template.variables | more}
    function = functools.partial(_render_batch, **how)
    kinds = {"ids": datasets.List(datasets.Value("int32"))}
    key = digest(prompt_key(tokenizer, args).encode(), json.dumps(more).encode(), dataset._fingerprint.encode())
    return int_lists(cached_map(dataset, function, kinds, key, "tokenizing prompts"), "ids")


def render_prompts(problems: list[Problem], tokenizer, args, more: dict[str, Any] | None = None) -> list[Problem]:
    """Fill ``prompt_ids``: one tokenization for sampler and trainer, special tokens as the template wrote them.

    ``more``: what the template is given beside the messages and --chat_template_kwargs.

    Returns the problems that ``--overlong_prompts`` keeps. A prompt longer than ``--max_prompt_length`` ends the run
    with exit code 2 (error), is left out (filter), or is truncated (left, right).
    """
    check_template_variables(tokenizer, args)
    refuse_wrapped(problems, args)
    warn_of_special_tokens(problems, tokenizer, args)
    try:
        if len(problems) >= LARGE:
            import datasets

            texts = [json.dumps(problem.messages) for problem in problems]
            found = render_cached(datasets.Dataset.from_dict({"messages": texts}), tokenizer, args, more or {})
        else:
            conversations = [problem.messages for problem in problems]
            found = render(conversations, tokenizer, args.template.text, args.template.variables | (more or {}))
    except Unrenderable as error:
        refuse(str(error))
    for problem, ids in zip(problems, found, strict=True):
        problem.prompt_ids = ids
    chats = {json.dumps(problem.messages) for problem in problems}
    if problems and (not all(found) or (len(chats) > 1 and len(set(map(tuple, found))) == 1)):
        template = f"--chat_template {args.chat_template}" if args.chat_template else "the tokenizer's chat template"
        refuse(f"{template} leaves out what the messages say: it must write message['content'] for message in messages")
    return _without_overlong(problems, args)


# What a chat template leaves in a prompt: the beginning of a turn, or the line with which a base model is to go on.
WRAPPED = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[/INST\]|<[|｜](?i:user|assistant)[|｜]>"
    r"|\n(?i:assistant):[^\n]*\s*(?:<think>\s*)?\Z"
)


def refuse_wrapped(problems: list[Problem], args) -> None:
    """Refuse to put the tokenizer's own template around prompts most of which have one already."""
    if args.chat_template is not None:
        return
    looked = problems[:1000]
    texts = ["".join(message["content"] for message in problem.messages) for problem in looked]
    wrapped = [text for text in texts if WRAPPED.search(text)]
    if 2 * len(wrapped) > len(looked):
        refuse(
            f"--chat_template: {len(wrapped)} of the first {len(looked)} prompts are those of a chat template already "
            f"({wrapped[0][:40]!r} ... {wrapped[0][-40:]!r}); give --chat_template none to take them as they are, or "
            f"'{{}}' to put the tokenizer's own around them all the same"
        )


def warn_of_special_tokens(problems: list[Problem], tokenizer, args) -> None:
    """Warn where messages hold special tokens: as a rule another template has written them, and this one does again."""
    special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    if args.chat_template == "none" or not special or rank() != 0:
        return
    pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    found = []
    for problem in problems:
        text = "".join(message["content"] for message in problem.messages)
        if match := pattern.search(text):
            found.append((match[0], text))
    if found:
        token, text = found[0]
        print(
            f"warning: {len(found)} of {len(problems)} prompts hold special tokens of the tokenizer ({token}) as text, "
            f"the first is {text[:80]!r}; where a template has written them, --chat_template none takes prompts as "
            f"they are"
        )


def _without_overlong(problems: list[Problem], args) -> list[Problem]:
    """What ``--overlong_prompts`` makes of problems whose ``prompt_ids`` are filled."""
    most = args.max_prompt_length
    how = args.overlong_prompts
    long = [problem for problem in problems if len(problem.prompt_ids) > most]
    if not long:
        return problems
    longest = max(len(problem.prompt_ids) for problem in long)
    words = (
        f"{len(long)} of {len(problems)} prompts are longer than --max_prompt_length {most} tokens, the longest has "
        f"{longest}; the first has {len(long[0].prompt_ids)}: {long[0].messages[-1]['content'][:80]!r}"
    )
    if how == "error":
        refuse(f"{words}. Raise --max_prompt_length, or choose --overlong_prompts filter, left or right")
    print_on_rank_0(f"warning: --overlong_prompts {how}: {words}")
    kept = {"filter": slice(0), "left": slice(-most, None), "right": slice(most)}[how]
    for problem in long:
        problem.prompt_ids = problem.prompt_ids[kept]
    return [problem for problem in problems if problem.prompt_ids]


def render_problems(
    training: list[Problem], evaluation: list[Problem], tokenizer, args, more: dict[str, Any] | None = None
) -> tuple[list, list]:
    """``render_prompts`` of a run's problems: those that are kept of both kinds, or exit code 2 where too few are."""
    training = render_prompts(training, tokenizer, args, more)
    evaluation = render_prompts(evaluation, tokenizer, args, more)
    check_enough(training, evaluation, args)
    return training, evaluation


# ------------------------------------------------------------------------------------------ the order of a run's draws


@functools.lru_cache(maxsize=2)  # a step that is not larger than the data meets at most two epochs
def _epoch_order(number: int, problems: int, seed: int) -> list[int]:
    """The order of one epoch over the data."""
    order = list(range(problems))
    random.Random(f"{seed}/{number}").shuffle(order)
    return order


def prompts_at(position: int, count: int, num_problems: int, seed: int) -> list[int]:
    """Indices of ``count`` problems, the first being number ``position`` of the run: a pure function of a counter.

    Every epoch has a permutation of its own, seeded by ``seed`` and its number; a step may span two epochs.
    """
    found = []
    for place in range(position, position + count):
        epoch, index = divmod(place, num_problems)
        found.append(_epoch_order(epoch, num_problems, seed)[index])
    return found


def seed_from(text: str) -> int:
    """Return a seed of 32 bits that follows from a text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")


def sampling_seed(seed: int, step: int | str, prompt_id: int, sample_id: int) -> int:
    """Seed of one response: it depends on these four numbers, not on what the engine did before."""
    return seed_from(f"{seed}/{step}/{prompt_id}/{sample_id}")


def requests(chosen: Sequence[int], count: int, seed: int, step: int | str) -> list[Request]:
    """(place in the batch, number of the response, seed) of ``count`` responses to each of the problems ``chosen``.

    A problem that is drawn twice, where one epoch ends and the next begins, gets different seeds the second time.
    """
    wanted = []
    for place, problem in enumerate(chosen):
        before = count * chosen[:place].count(problem)
        for k in range(count):
            wanted.append((place, k, sampling_seed(seed, step, problem, before + k)))
    return wanted


def sampling(args) -> dict[str, Any]:
    """Sampling parameters of training."""
    found = {"temperature": args.temperature, "top_p": 1.0, "top_k": 0, "max_tokens": args.max_response_length}
    return found | {"stop": list(args.stop), "ignore_eos": args.ignore_eos}


def eval_requests(problems: int, args) -> tuple[list[Request], dict[str, Any]]:
    """(the requests of an evaluation, its sampling parameters); the seeds are the same in every evaluation of a run."""
    count = args.eval_samples if args.eval_temperature > 0 else 1
    return requests(range(problems), count, args.seed, "eval"), sampling(args) | {"temperature": args.eval_temperature}


def token_rewards(samples: list[Sample], decode: Callable[..., str], args) -> np.ndarray:
    """The task's reward of every response token, [N], response by response: all of it on the last one, 0 before.

    With ``--dense_reward`` an intermediate score goes to the token that completes its characters, or of several turns
    to the last one of its turn. ``decode``: token ids -> text.
    """
    found = []
    for sample in samples:
        masked = sample.finish_reason == "length" and args.mask_no_eos_with_zero
        if args.dense_reward != "none" and sample.reward_steps and not masked:
            rewards = _dense_rewards(sample, decode, args)
        else:
            rewards = np.zeros(sample.length)
            rewards[-1] = sample.reward
        found.append(rewards)
    return np.concatenate(found)


def _dense_rewards(sample: Sample, decode: Callable[..., str], args) -> np.ndarray:
    """``token_rewards`` of a response with intermediate scores, shaped as its reward is.

    sum: every score counts in full. difference: what a score adds to the one before; the rewards sum to the response's
    reward. What the last score does not hold (penalties, other verifiers, a reward model) is on the last token.
    """
    ids = sample.response_ids[sample.own()]
    limit = args.max_reward_clip or math.inf

    def shaped(score: float) -> float:
        return max(-limit, min(limit, (score - args.reward_bias) * args.reward_scaling))

    def characters(place: int) -> int:
        return len(decode(ids[: place + 1], skip_special_tokens=True))

    rewards = np.zeros(len(ids))
    start = shaped(0.0) if args.dense_reward == "difference" else 0.0
    before = start
    for end, score in sample.reward_steps:
        place = end - 1 if sample.turn_steps else bisect.bisect_left(range(len(ids)), end, key=characters)
        place = min(place, len(ids) - 1)
        rewards[place] += shaped(score) - (before if args.dense_reward == "difference" else 0.0)
        before = shaped(score)
    rewards[-1] += sample.reward - (before - start)
    return rewards


def best_of(samples: list[Sample], count: int) -> list[Sample]:
    """The ``count`` samples of highest reward to each prompt, the first of equal ones, in the order they came in."""
    ranked = sorted(range(len(samples)), key=lambda i: -samples[i].reward)
    taken: Counter[int] = Counter()
    kept = []
    for i in ranked:
        prompt = samples[i].prompt_id
        if taken[prompt] < count:
            taken[prompt] += 1
            kept.append(i)
    return [samples[i] for i in sorted(kept)]


def equal_groups(samples: list[Sample]) -> list[int]:
    """The places in the batch whose responses all have the same reward: they carry no signal."""
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.prompt_id, set()).add(sample.reward)
    return sorted(place for place, values in rewards.items() if len(values) == 1)


def replace_groups(batch: list[Problem], samples: list[Sample], more: list[Problem], new: list[Sample]) -> None:
    """Replace groups of equal reward by new groups whose rewards differ, as many as there are; in place.

    ``samples`` answer ``batch``, ``new`` the problems ``more``; both are ordered by place, with equally many to each.
    """
    group = len(samples) // len(batch)
    useless = set(equal_groups(new))
    useful = [place for place in range(len(more)) if place not in useless]
    for place, other in zip(equal_groups(samples), useful, strict=False):
        batch[place] = more[other]
        replacement = new[other * group : (other + 1) * group]
        samples[place * group : (place + 1) * group] = [dataclasses.replace(s, prompt_id=place) for s in replacement]


def draw_metrics(rounds: list[list[Sample]], prompts: int) -> dict[str, float]:
    """What all draws of a step found, before groups of equal reward were replaced: dynamic sampling hides it."""
    groups = 0
    equal = 0
    rewards = []
    for drawn in rounds:
        groups += len({sample.prompt_id for sample in drawn})
        equal += len(equal_groups(drawn))
        rewards += [sample.reward for sample in drawn]
    return {
        "data/rounds": len(rounds) - 1,
        "data/dropped": groups - prompts,
        "data/zero_std_frac": equal / groups,
        "data/reward_mean": sum(rewards) / len(rewards),
    }


def drop_solved(problems: list[int], rates: Sequence[float], threshold: float, share: float) -> list[int]:
    """``problems`` without those solved at a rate of at least ``threshold``: the best, at most ``share`` of all."""
    solved = [i for i in problems if rates[i] >= threshold]
    solved.sort(key=lambda i: -rates[i])
    gone = set(solved[: int(share * len(problems))])
    return [i for i in problems if i not in gone]


@dataclasses.dataclass
class DrawState:
    """Position of a run in its training problems. JSON can hold all of it; a checkpoint stores its ``vars``."""

    kept: list[int]  # indices of the problems that are still drawn
    rates: list[float]  # fraction of correct responses when a problem was last drawn, 0 before that; one per problem
    position: int = 0  # problems drawn from ``kept`` so far
    epoch: int = 0  # epochs over ``kept`` that were complete when solved problems were last dropped


class Prompts:
    """Draws the training problems of a run, in an order that depends only on ``--seed`` and ``state``.

    The solved-problem filter (``--dataset_filter``) drops problems at the end of an epoch; the shorter list then starts
    a new one. Put ``state`` into the parts of ``Checkpoints``.
    """

    def __init__(self, problems: list[Problem], args):
        self.problems = problems
        self.args = args
        count = len(problems)
        self.state = DrawState(kept=list(range(count)), rates=[0.0] * count)

    def draw(self, count: int) -> tuple[list[int], list[Problem]]:
        """The next ``count`` problems: (their indices, the problems). Identical on every rank."""
        state = self.state
        places = prompts_at(state.position, count, len(state.kept), self.args.seed)
        state.position += count
        chosen = [state.kept[place] for place in places]
        return chosen, [self.problems[i] for i in chosen]

    def record(self, chosen: list[int], samples: list[Sample]) -> None:
        """Store how often the problems ``chosen`` were solved. ``samples``: ordered by place, equally many to each."""
        group = len(samples) // len(chosen)
        for place, index in enumerate(chosen):
            own = samples[place * group : (place + 1) * group]
            correct = [sample.reward_parts.get("correct", sample.score) for sample in own]
            self.state.rates[index] = sum(correct) / group

    def drop_solved(self) -> int:
        """Drop solved problems if an epoch has ended since the last call; the number of problems still drawn."""
        state, args = self.state, self.args
        epoch = state.position // len(state.kept)
        if epoch > state.epoch:
            state.epoch = epoch
            share, threshold = args.dataset_filter
            left = drop_solved(state.kept, state.rates, threshold, share)
            if len(left) < len(state.kept):
                state.kept = left
                state.position = 0
                state.epoch = 0
        return len(state.kept)

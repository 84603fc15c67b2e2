"""Problems of a run: find columns, check rows, mix sources, and hold out problems for evaluation. Imports no torch."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import inspect
import itertools
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.data.samples import Problem, StoredProblem
from runtime.data.sources import (
    FLAG,
    GYM,
    BrokenLine,
    cached_map,
    digest,
    digest_of_files,
    gym_rows,
    read_source,
    refuse_broken_line,
    rows_of,
    source_name,
)
from runtime.system import user_files
from runtime.system.process import PROJECT, on_a_line, print_on_rank_0, refuse

# For data sets, or verifiers chosen by the columns, that say nothing about the form of an answer. Where sums can be
# negative, the example shows one: what is never sampled is never learned, and a minus sign is rare without it.
SYSTEM_PROMPTS = {
    "reasoning_gym:chain_sum": "Write out the calculation: 2 - 4 = -2",
    "reasoning_gym:chain_sum?min_answer=0": "Write out the calculation: 9 - 4 = 5",
    "math": "Reason step by step and put the final answer in \\boxed{}.",
    "reasoning_gym": "Give the final answer between <answer> and </answer>.",
}
NUMBERS = re.compile(r"[\[(\s]*-?\d+(?:[\s,;]+-?\d+)*[\])\s]*")  # [3, 4, 25] or 3 4 25
COUNTDOWN = (
    "Make {target} from the numbers {nums}: use each of them exactly once, with + - * / and brackets. Give the "
    "expression between <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."
)

# What other frameworks' data sets call a verifier: verl's column data_source and open-instruct's column dataset.
MATH = ("math_dapo", "math_dapo_reasoning", "lighteval/math", "digitallearninggmbh/math-lighteval")
VERIFIER_ALIASES = dict.fromkeys((*MATH, "math", "huggingfaceh4/math-500"), "math")
VERIFIER_ALIASES |= dict.fromkeys(("code", "code_stdio", "codecontests", "apps", "codeforces", "taco"), "code")
VERIFIER_ALIASES |= {"gsm8k": "gsm8k", "openai/gsm8k": "gsm8k", "ifeval": "ifeval", "countdown": "countdown"}

Messages = list[dict[str, Any]]  # a conversation: role and content of each, and what else a chat template may read
Pick = Callable[[str, list[str], int], list[str]]  # (source, keys of its problems, count) -> the chosen keys
BadRows = list[tuple[int, str]]  # (index, what is wrong with the row)

# (verifier, ground truth, row) -> what is wrong with the ground truth, "" if nothing is: rewards.truth_error.
# Raises ValueError for a verifier that does not exist.
Check = Callable[[str, str, dict], str]

LARGE = 5000  # rows of a source, or prompts, from which on several processes prepare them and the result is cached
FIRST = 100  # rows by which a source's columns are recognized


# ---------------------------------------------------------------------------------------------------- rows to problems


@dataclass(frozen=True)
class Columns:
    """The columns from which the rows of a source become problems."""

    prompt: str  # column; a dot leads into nested columns
    truth: str  # column of the ground truth
    verifier: str
    verifier_key: str | None  # column that names a row's verifiers; where it is empty, ``verifier`` counts
    system: str | None  # system prompt
    replaces: bool  # whether it takes the place of a row's own; else it is for rows without one
    isolated: bool  # whether rows are checked with a sandbox for the verifier ``code``
    by_row: bool  # whether equal prompts are two problems if their rows differ, as for an environment


def value_of(row: dict[str, Any], key: str) -> Any:
    """Return ``row[key]``, or with dots in ``key`` a nested value: reward_model.ground_truth. Raises KeyError."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if isinstance(value, str) and value.startswith("{"):
            value = json.loads(value)  # an object as JSON text
        if not isinstance(value, dict):
            raise KeyError(key)
        value = value[part]
    return value


def check_column(flag: str, key: str, problems: list[Problem], others: tuple[str, ...]) -> None:
    """Reject a value of ``flag`` that is neither one of ``others`` nor a column of the first row."""
    if not {key, key.partition(".")[0]} & {*others, *problems[0].row}:
        refuse(f"--{flag} {key}: expected {', '.join(others)} or a column of the data ({', '.join(problems[0].row)})")


def known_columns(rows: list) -> tuple[str, str, str, str | None]:
    """Return (prompt, ground truth, verifier, verifier key) by the columns that the first rows of a source have.

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
    if {"prompt", "instruction_id_list", "kwargs"} <= has:  # IFEval, IFBench
        return "prompt", "instruction_id_list", "ifeval", None
    if {"nums", "target"} <= has and not {"question", "answer"} <= has:
        return "nums", "target", "countdown", None
    asked = next((name for name in ("question", "problem", "prompt") if name in has), None)
    if asked and "tests" in has and not has & {"answer", "solution"}:  # LiveCodeBench's form, as DeepCoder has it
        return asked, "tests", "code", None
    if "problem" in has and has & {"answer", "solution"}:
        return "problem", "answer" if "answer" in has else "solution", "math", None
    if any("#### " in str(row.get("answer")) for row in first):
        return "question", "answer", "gsm8k", None
    return "question", "answer", "last_number", None


def _is_column(key: str, has: Iterable[str]) -> bool:
    """Return True if this column, or the one that the first part of its name names, is among the columns ``has``."""
    return key in has or key.split(".")[0] in has


def _names(columns: Iterable) -> str:
    """Return names of columns for a message of one line, whatever a file holds."""
    return ", ".join(on_a_line(str(name)) for name in columns)


def look_at(source: str, batches: Iterable[list], args, check: Check) -> Columns:
    """Return the columns of a source: those of the flags, or else those known by its first rows.

    Prepares the sandbox if a row may be for the verifier ``code``, since its tests are run when rows are checked.
    ``batches`` of rows are read only as far as it takes. Ends with exit code 2 when no row has such a column.
    """
    batches = iter(batches)
    seen = next(batches, [])
    prompt, truth, verifier, verifier_key = known_columns(seen)
    prompt = args.prompt_key or prompt
    truth = args.ground_truth_key or truth
    names_verifiers = args.verifier_key if source == args.dataset else None
    has: dict[str, None] = {}  # the names of all columns, in order
    for rows in itertools.chain([seen], batches):
        for row in rows:
            if isinstance(row, dict):
                has |= dict.fromkeys(row)
        if all(_is_column(key, has) for key in (prompt, truth, names_verifiers or prompt)):
            break
    given = args.verifier
    without_truth = args.ground_truth_key is None and given and not check(given, "", seen[0] if seen else {})
    needed = {"--prompt_key": prompt} | ({} if without_truth else {"--ground_truth_key": truth})
    missing = [f"{flag} {key}" for flag, key in needed.items() if has and not _is_column(key, has)]
    if missing:
        refuse(f"{', '.join(missing)}: {FLAG.get()} {source} has no such column; it has: {_names(has)}")
    if names_verifiers is not None and has and not _is_column(names_verifiers, has):
        refuse(f"--verifier_key {names_verifiers}: {FLAG.get()} {source} has no such column; it has: {_names(has)}")
    if source.startswith(GYM):
        for row in seen:
            if check("last_number", str(row.get(truth)), row):
                verifier = "reasoning_gym"  # an answer that is no number: the task's own scorer
    if args.verifier_key is not None or given:
        verifier_key = args.verifier_key
    task, _, options = source.partition("?")  # of reasoning-gym
    of_task = SYSTEM_PROMPTS.get(f"{task}?min_answer=0" if "min_answer=0" in options.split("&") else task)
    system = args.system_prompt if args.system_prompt is not None else of_task
    if system is None and not given:
        system = SYSTEM_PROMPTS.get(verifier)
    verifier = given or verifier
    may_run = "code" in verifier or verifier_key is not None
    isolated = may_run and not user_files.find("graders.code:prepare")(args.allow_unsafe_code_exec)
    replaces, by_row = args.system_prompt is not None, args.environment is not None
    return Columns(prompt, truth, verifier, verifier_key, system, replaces, isolated, by_row)


def _messages(key: str, prompt: Any, row: dict[str, Any]) -> Messages:
    """Return the prompt in column ``key`` as chat messages, without an answer at their end.

    Raises ValueError for what is neither text nor messages nor countdown's numbers.
    """
    if key == "nums" and "target" in row:
        numbers = prompt
        if isinstance(prompt, str) and NUMBERS.fullmatch(prompt):  # a column of a CSV file
            numbers = re.findall(r"-?\d+", prompt)
        if isinstance(numbers, list):
            listed = ", ".join(map(str, numbers))
            return [{"role": "user", "content": COUNTDOWN.format(target=row["target"], nums=listed)}]
    if isinstance(prompt, str) and (chat := _json_list(prompt)) and all(map(_is_message, chat)):
        prompt = chat
    if isinstance(prompt, str):
        starter = row.get("starter_code") or ""  # of contests: it names the function
        if not isinstance(starter, str):
            raise ValueError(f"its starter_code must be text, but is {type(starter).__name__}")
        return [{"role": "user", "content": prompt if starter in prompt else f"{prompt}\n\n{starter}"}]
    kinds = type(prompt).__name__
    if isinstance(prompt, list):
        kinds = "a list of something else"
        messages = [_with_text_parts(message) for message in prompt]
        if all(map(_is_message, messages)):
            empty = (None, "", [], {})  # files of columns give every message the fields of all
            messages = [{k: v for k, v in m.items() if k == "content" or v not in empty} for m in messages]
            while messages and messages[-1]["role"] == "assistant":
                messages.pop()
            if any(message["role"] != "system" for message in messages):
                return messages
            kinds = "only messages of the assistant or the system"
        elif empty := [m for m in messages if isinstance(m, dict) and "role" in m and m.get("content") is None]:
            kinds = f"a list with a message of the {empty[0]['role']} without content, and without tool_calls"
    raise ValueError(f"its prompt must be text or chat messages with role and content, but is {kinds}")


def _with_system(messages: Messages, columns: Columns) -> Messages:
    """Return a prompt with at most one system message."""
    own = messages[0]["role"] == "system"
    if own and columns.replaces:
        messages = messages[1:]
    if columns.system and (columns.replaces or not own):
        return [{"role": "system", "content": columns.system}, *messages]
    return messages


def _json_list(text: str) -> list | None:
    """Return messages or tools written as JSON or by pandas, as in a column of a CSV file; None for any other text."""
    for read in (json.loads, ast.literal_eval) if text.startswith("[{") else ():
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(text)
    return None


def _with_text_parts(message: Any) -> Any:
    """Join a message's content if it is a list of text parts. Raises ValueError for a part of another type."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list) or not all(isinstance(part, dict) and "type" in part for part in parts):
        return message
    if kinds := {str(part["type"]) for part in parts} - {"text"}:
        raise ValueError(f"has a message with a part of type {min(kinds)!r}; only text is supported")
    return message | {"content": "".join(str(part.get("text") or "") for part in parts)}


PICTURES = re.compile(r"(?:decoded_)?images?(?:_?[0-9]+|_paths?|_urls?)?|videos|audios")  # columns of verl, MMMU
PICTURE_TAG = re.compile(r"<image(?: ?[0-9]+)?>|<\|image_pad\|>|!\[[^][]*\]\([^()]*\)")


def _check_seen(row: dict[str, Any], text: str) -> None:
    """Raise ValueError for what belongs to a problem but would not be in its prompt: pictures, and choices."""
    for key, value in row.items():
        shown = any(value.values()) if isinstance(value, dict) else value  # {"bytes": null, "path": null} is no picture
        if shown and PICTURES.fullmatch(str(key)):
            kind = "a picture" if "image" in key else key
            raise ValueError(f"has {kind} in its column {key!r}; only text is supported")
    if tag := PICTURE_TAG.search(text):
        raise ValueError(f"has a picture in its prompt ({tag[0]}); only text is supported")
    for key in ("choices", "options"):
        found = row.get(key)
        choices = (found.get("text") or list(found.values())) if isinstance(found, dict) else found
        if isinstance(choices, list) and not all(str(choice) in text for choice in choices):
            raise ValueError(
                f"has choices in its column {key!r} that its prompt does not show; write them into the prompt, and "
                f"give the right one's letter as the ground truth"
            )


def _as_text(truth: Any, verifier: str) -> str:
    """Return a ground truth as text: one answer as it is, several right answers as a JSON list of texts."""
    if isinstance(truth, list) and len(truth) == 1 and isinstance(truth[0], str) and ":" not in verifier:
        return truth[0]
    if isinstance(truth, list) and set(verifier.split(",")) <= {"math", "exact", "gsm8k", "last_number", "format"}:
        texts = [str(answer) for answer in truth if not isinstance(answer, list | dict)]
        if len(texts) == len(truth) > 0:
            return texts[0] if len(texts) == 1 else json.dumps(texts)
    if isinstance(truth, float) and truth.is_integer():
        return str(int(truth))  # pandas makes floats of integers where a row has none
    return json.dumps(truth) if isinstance(truth, list | dict) else str(truth)


def _is_message(message: Any) -> bool:
    """Return True for a chat message with text as its content, or with tool calls of the assistant and no content."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    calls = message["role"] == "assistant" and message.get("tool_calls")
    return isinstance(content, str) or (content is None and bool(calls))


def tools_of(row: dict[str, Any]) -> list | None:
    """Return the tools of a row as chat templates take them: its column ``tools``, a list or the JSON text of one."""
    found = row.get("tools")
    found = _json_list(found) if isinstance(found, str) else found
    return found if found and isinstance(found, list) else None


def _named_verifiers(row: dict[str, Any], key: str) -> str:
    """Return the verifiers that a row names in a column, text or a list, by this project's names; "" if it names none.

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
        names.append("math" if lower.startswith(("aime", "numina_")) else VERIFIER_ALIASES.get(lower, name))
    return ",".join(names)


def make_problem(row: Any, columns: Columns, check: Check) -> Problem:
    """Turn one row into a problem. Raises ValueError that says what is wrong with the row, or with its ground truth."""
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, not an object with columns (a file with a list must end in .json)")
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
    verifier = columns.verifier
    if columns.verifier_key is not None:
        verifier = _named_verifiers(row, columns.verifier_key) or verifier
    truth = _as_text(values[1], verifier)
    text = "".join(message.get("content") or "" for message in messages)
    _check_text(columns.prompt, text)
    _check_text(columns.truth, truth)
    _check_seen(row, text)
    try:
        wrong = check(verifier, truth, row)
    except ValueError as error:
        raise ValueError(
            f"names a verifier that does not exist (--verifier_key {columns.verifier_key}): {error}"
        ) from error
    if wrong and isinstance(values[1], dict):
        wrong = f"it is an object; name a key of it, such as --ground_truth_key {columns.truth}.{next(iter(values[1]))}"
    if wrong:
        raise ValueError(f"has a ground truth that its own verifier {verifier} rejects: {truth[:80]!r} ({wrong})")
    return Problem(messages, truth, verifier, row, tools=tools_of(row))


def _check_text(key: str, text: str) -> None:
    """Raise ValueError for half of a pair of surrogates: no tokenizer takes it, and no file can hold it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        around = text[max(0, error.start - 20) : error.end + 20]
        raise ValueError(f"has a {key!r} that is not UTF-8 text, at {around!r}") from None


def check_row(row: Any, columns: Columns, check: Check) -> tuple[Problem | None, str]:
    """Return (the row's problem, ""), or (None, what is wrong with the row)."""
    try:
        return make_problem(row, columns, check), ""
    except ValueError as error:
        return None, str(error)


def identity_of(problem: Problem, by_row: bool) -> str:
    """Return a hash of what makes a problem another one: its prompt, and ``Columns.by_row`` its row."""
    asked = [problem.messages, problem.row if by_row else problem.tools]
    return hashlib.blake2b(json.dumps(asked, default=str).encode(), digest_size=16).hexdigest()


def report_bad_rows(bad: BadRows, count: int, source: str, args) -> None:
    """End the run for rows that cannot be used, or print which are dropped (``--bad_rows drop``)."""
    if not bad:
        return
    indices = ", ".join(str(index) for index, _ in bad[:20])
    if len(bad) > 20:
        indices += ", ..."
    found = f"{len(bad)} of {count} rows of {FLAG.get()} {source} cannot be used (rows {indices}); "
    found += f"row {bad[0][0]} {bad[0][1]}"
    if args.bad_rows == "error":
        refuse(f"{found}; repair them, choose other columns or a --verifier, or add --bad_rows drop")
    print_on_rank_0(f"warning: --bad_rows drop: {found}")


# ------------------------------------------------------------------------------------------------------------- sources


class Checked:
    """The rows of a large source in its order, checked: columns that are mapped from the cache."""

    # The problem as JSON, which is read when a step draws it, and what a start needs of all rows; "" of a wrong row.
    COLUMNS = ("text", "identity", "record", "verifier", "wrong")

    def __init__(self, dataset):
        columns = dataset.with_format("arrow")[:]
        self.dataset = dataset
        self.texts = columns["text"]
        self.records = np.array(columns["record"].to_pylist(), dtype="S32")
        self.identities = columns["identity"]
        self.verifiers = list(map(sys.intern, columns["verifier"].to_pylist()))
        self.wrong = columns["wrong"].to_pylist()


def _check_batch(batch: dict[str, list], places: list[int], columns: Columns, check: Check) -> dict[str, list[str]]:
    """Return ``Checked.COLUMNS`` for the rows of a batch of a raw data set."""
    found = []
    for row in rows_of(batch, places[0]):
        problem, wrong = check_row(row, columns, check)
        values = ["", "", "", ""]
        if problem is not None:
            text = json.dumps({name: getattr(problem, name) for name in ("messages", "truth", "row", "tools")})
            values = [text, identity_of(problem, columns.by_row), digest(problem.record()), problem.verifier]
        found.append([*values, wrong])
    return {name: [values[i] for values in found] for i, name in enumerate(Checked.COLUMNS)}


def _batches(raws: list, size: int = 1000) -> Iterator[list]:
    """Yield the rows of raw data sets, ``size`` at a time. Exits with code 2 for a line that is not JSON."""
    for raw, files in raws:
        for start in range(0, len(raw), size):
            try:
                rows = rows_of(raw[start : start + size], start)
            except BrokenLine as error:
                refuse_broken_line(files, error)
            yield rows


def check_large(source: str, raws: list, args, check: Check) -> list[Checked]:
    """Check the rows of a source by several processes, or read the result from the cache.

    What a row becomes follows from the data, the arguments, and the code here, of ``check`` and of ``--verifier``:
    a change of any of them is checked again.
    """
    import datasets

    columns = look_at(source, _batches(raws), args, check)
    code = [*PROJECT.glob("runtime/**/*.py"), *PROJECT.glob("graders/**/*.py"), Path(inspect.getfile(check))]
    for name in columns.verifier.split(","):
        own = Path(name.rpartition(":")[0])
        if own.is_file():
            code.append(own)
    rules = digest(repr([columns, args.allow_unsafe_code_exec]).encode(), digest_of_files(sorted(code)).encode())
    function = functools.partial(_check_batch, columns=columns, check=check)
    kinds = dict.fromkeys(Checked.COLUMNS, datasets.Value("string"))
    found = []
    for raw, files in raws:
        key = digest(rules.encode(), raw._fingerprint.encode())
        try:
            found.append(Checked(cached_map(raw, function, kinds, key, "checking rows")))
        except BrokenLine as error:
            refuse_broken_line(files, error)
    return found


def read_problems(source: str, args, check: Check) -> dict[str, Problem]:
    """Return all usable problems of one source, in its order, each prompt once; the key is ``identity_of`` it."""
    raws = [] if source.startswith(GYM) else read_source(source, args)
    found: list[tuple[str, Problem | None]] = []  # of each row, with its ``identity_of``
    wrong: list[str] = []
    if sum(len(raw) for raw, _ in raws) >= LARGE:
        for checked in check_large(source, raws, args, check):
            problems = [StoredProblem(checked, place, verifier) for place, verifier in enumerate(checked.verifiers)]
            found += zip(checked.identities.to_pylist(), problems, strict=True)
            wrong += checked.wrong
    else:
        read = [gym_rows(source, args.seed)] if source.startswith(GYM) else _batches(raws)
        rows = [row for batch in read for row in batch]
        columns = look_at(source, [rows], args, check)
        for problem, why in (check_row(row, columns, check) for row in rows):
            found.append((identity_of(problem, columns.by_row) if problem else "", problem))
            wrong.append(why)
    report_bad_rows([(index, why) for index, why in enumerate(wrong) if why], len(wrong), source, args)
    name = source_name(source)
    distinct: dict[str, Problem] = {}
    contradicting = set()
    for key, problem in found:
        if key:  # it is usable
            problem.source = problem.source or name
            first = distinct.setdefault(key, problem)
            if first is not problem and first.truth != problem.truth:
                contradicting.add(key)
    if contradicting:
        print_on_rank_0(
            f"warning: {FLAG.get()} {source}: {len(contradicting)} prompts stand in several rows with different ground "
            f"truths; the first counts"
        )
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
        if part is None:  # all, and their number may be 0
            wanted = len(own)
        elif not 0 < wanted <= len(own):
            refuse(f"{flag}: {source!r} has {len(own)} distinct problems, {part} asks for {wanted}")
        if wanted < len(own):
            chosen = pick(source, list(own), wanted)
            own = {key: own[key] for key in chosen}
        problems |= own
    return problems


def mixed_problems(args, check: Check) -> dict[str, Problem]:
    """Return the problems of ``--dataset``, where ``--seed`` draws those of a mixture; the key is the prompt."""

    def draw(source: str, keys: list[str], count: int) -> list[str]:
        return random.Random(f"{args.seed}/{source}").sample(keys, count)

    return _mix(args.sources, "--dataset", args, check, draw)


def evaluation_problems(args, check: Check) -> dict[str, Problem] | None:
    """Return the first problems of ``--eval_dataset``, or of each of its sources.

    None where it is not given: then a part of the training data is held out.
    """
    FLAG.set("--eval_dataset")
    if args.eval_dataset is None:
        return None
    found = _mix(args.eval_sources, "--eval_dataset", args, check, lambda source, keys, count: keys[:count])
    if args.eval_sources[0].part is not None:
        return found if args.eval_prompts > 0 else {}
    if args.eval_prompts > 0 and args.eval_prompts != len(found):
        which = "all" if args.eval_prompts > len(found) else f"the first {args.eval_prompts}"
        print_on_rank_0(f"--eval_prompts {args.eval_prompts}: {which} of the {len(found)} of {args.eval_dataset}")
    return dict(itertools.islice(found.items(), args.eval_prompts))


def load_problems(args, check: Check) -> tuple[list[Problem], list[Problem]]:
    """Return (training problems, evaluation problems), disjoint: no evaluation prompt is ever trained on.

    Rows with the same prompt count once. The split is a permutation seeded by ``--seed``: the first ``eval_prompts``
    distinct prompts are for evaluation, the rest for training, unless evaluation data are given. Ends with exit code 2
    for an unknown data set or column and when too few problems are left.
    """
    problems = mixed_problems(args, check)
    apart = copy_context().run(evaluation_problems, args, check)  # FLAG is set inside alone
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
    """Reject too few problems for one step, or none to evaluate on where evaluation was asked for."""
    if len(training) < args.num_unique_prompts_rollout:
        filtered = " left by --overlong_prompts drop" if args.overlong_prompts == "drop" else ""
        if args.eval_dataset is not None:
            has = f"{len(training)} distinct problems{filtered} that are not evaluated on"
        else:
            has = f"{len(training) + len(evaluation)} distinct problems{filtered}"
            has += f"; --eval_prompts {args.eval_prompts} (give a smaller one) leaves {len(training)}"
        if args.environment is not None:
            has += ", where equal rows are one problem (give each a column of its own, for example seed)"
        refuse(
            f"--dataset {args.dataset} has {has}, fewer than "
            f"--num_unique_prompts_rollout {args.num_unique_prompts_rollout}"
        )
    if args.eval_prompts > 0 and not evaluation:
        refuse(f"--eval_prompts {args.eval_prompts}: no problem is left (--overlong_prompts {args.overlong_prompts})")


def check_sandbox(problems: list[Problem], args) -> None:
    """Exit if the kernel offers no sandbox for models' programs, unless the user accepts that."""
    if not any("code" in problem.verifier.split(",") for problem in problems):
        return
    why = user_files.find("graders.code:prepare")(args.allow_unsafe_code_exec)
    if not why:
        return
    if not args.allow_unsafe_code_exec:
        refuse(
            f"the verifier code has no sandbox here: the kernel provides no namespaces ({why}). Run where user "
            f"namespaces are allowed, or accept time and memory limits alone with --allow_unsafe_code_exec"
        )
    print_on_rank_0(f"warning: --allow_unsafe_code_exec: programs run with this user's rights, no sandbox ({why})")


# ------------------------------------------------------------------------------------------ the order of a run's draws


def seed_from(text: str) -> int:
    """Return a seed of 32 bits that follows from a text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")

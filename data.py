"""From files to problems, prompts and ids, and a step's samples before they become tensors.

Nothing here imports torch or transformers, so a wrong argument is answered in a second or two, and the scripts'
``--help`` and the workers of the reward pool stay light. checks.py and runlog.py are the same in this.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import fcntl
import functools
import gc
import glob
import hashlib
import itertools
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import rewards
import sandbox

# For data sets, or verifiers chosen by the columns, that say nothing about the form of an answer. The first one's
# example shows that results can be negative: what is never sampled is not learnt, and with the model's own system
# prompt a minus is rare there.
SYSTEM_PROMPTS = {
    "reasoning_gym:chain_sum": "Write out the calculation: 2 - 4 = -2",
    "math": "Reason step by step and put the final answer in \\boxed{}.",
}
COUNTDOWN = (
    "Make {target} from the numbers {nums}: use each of them exactly once, with + - * / and brackets. Give the "
    "expression between <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."
)
READABLE = (".jsonl", ".json", ".parquet", ".csv")
LARGE = 5000  # rows of files, or prompts, from which on several processes prepare them and the result is kept
CHAT_TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "tulu": "{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{{ m['content'] + (eos_token if m['role'] == 'assistant' else '') }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    # The model opens <think> itself: an opening tag in the prompt would be missing in what the verifier reads, and a
    # thought without an end would pass for an answer.
    "r1": "{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
    "The user asks a question and the assistant solves it. First it reasons between <think> and </think>, then it "
    "gives the result between <answer> and </answer>: <think> reasoning </think> <answer> result </answer>.\n"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}Assistant: {{ m['content'] }}\n"
    "{% elif m['role'] == 'user' %}User: {{ m['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}",
    "question_answer": "{% for m in messages %}{% if m['role'] == 'assistant' %}Answer: {{ m['content'] }}\n"
    "{% elif m['role'] == 'user' %}Question: {{ m['content'] }}\n{% else %}{{ m['content'] }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}",
}


@dataclass
class Problem:
    """One row of a data set: the chat messages, the truth, the verifier's name, and the row as it was read."""

    messages: list[dict[str, str]]
    truth: str
    verifier: str
    row: dict[str, Any]
    prompt_ids: list[int] = field(default_factory=list)
    source: str = ""  # short name of the data set it comes from
    prepared_for: str = ""  # where prompt_ids were read with the row: prompt_key() of the tokenizer that made them


@dataclass
class Sample:
    """One response on its way through a step. Token ids are the sampler's own, never made again from text."""

    prompt_id: int  # index of the problem in its list
    sample_id: int  # 0 .. samples per prompt - 1
    prompt_ids: list[int]
    response_ids: list[int]
    sampler_logprobs: list[float]  # natural log, at the sampling temperature, one per response token
    finish_reason: str  # "stop": it ended by itself; "length": it was cut at max_response_length
    weights_version: int  # how many pushes the engine had seen when it answered
    response: str = ""
    score: float = 0.0  # the verifier's, unshaped
    reward: float = 0.0  # what is optimised: scaled, clipped, truncation applied
    reward_parts: dict[str, float] = field(default_factory=dict)
    reward_status: str = "ok"
    reward_steps: tuple[tuple[int, float], ...] = ()  # scores on the way: rewards.Reward.steps
    extracted: str = ""  # what the verifier took for the answer
    advantage: float = 0.0  # without KL: the same for every token of the response


def refuse(message: str) -> NoReturn:
    """End the program for bad input: the message on stderr (rank 0), exit code 2."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


# ------------------------------------------------------------------------------------------------------ sources of rows


def _files(source: str) -> list[Path]:
    """The local files that a source names: one, several with commas between, or a pattern such as data/*.parquet."""
    found: list[Path] = []
    for part in source.split(","):
        files = [Path(part)] if Path(part).is_file() else sorted(p for p in map(Path, glob.glob(part)) if p.is_file())
        if not files and (found or Path(part).suffix in READABLE):
            refuse(f"--dataset {part}: no such local file; give a .jsonl, .json, .parquet or .csv file, or a hub id")
        found += files
    return found


def read_batches(path: Path, size: int) -> Iterator[list]:
    """The rows of one local file, ``size`` at a time: of all forms but .json and .csv no more than that is in memory.

    Raises ValueError or OSError where the file is not what its name says.
    """
    if path.suffix == ".jsonl":
        with open(
            path, encoding="utf-8", newline="\n"
        ) as lines:  # only this ends a line: others may stand inside a text
            numbered = ((i, line) for i, line in enumerate(lines, 1) if line.strip())
            while batch := list(itertools.islice(numbered, size)):
                rows = []
                for i, line in batch:
                    try:
                        rows.append(json.loads(line))
                    except json.JSONDecodeError as error:
                        raise ValueError(f"line {i}: {error}") from error
                yield rows
    elif path.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=min(size, 2**16)):
            if "prepared_for" not in batch.schema.names:
                yield batch.to_pylist()
                continue
            ids = int_lists(batch.column("prompt_ids"))
            rows = batch.drop_columns(["prompt_ids"]).to_pylist()
            yield [row | {"prompt_ids": i} for row, i in zip(rows, ids, strict=True)]
    elif path.suffix in (".json", ".csv"):
        if path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))
        else:
            import pyarrow.csv

            rows = pyarrow.csv.read_csv(path).to_pylist()
        if not isinstance(rows, list):
            raise ValueError(f"holds {type(rows).__name__}, not a list of rows")
        yield from (rows[i : i + size] for i in range(0, len(rows), size))
    else:
        raise ValueError(f"the name must end in one of {', '.join(READABLE)}")


def int_lists(column) -> list[list[int]]:
    """A column of lists of numbers as Python lists, far faster than pyarrow makes them one by one."""
    flat, offsets = column.flatten().to_numpy().tolist(), column.offsets.to_numpy().tolist()
    return [flat[a - offsets[0] : b - offsets[0]] for a, b in itertools.pairwise(offsets)]


def read_source(source: str, args, size: int = 10**9) -> Iterator[list]:
    """The raw rows of one source, at most ``size`` at a time. Ends with exit code 2 where it cannot be read."""
    if source.startswith("reasoning_gym:"):
        import reasoning_gym

        name, _, query = source.removeprefix("reasoning_gym:").partition("?")
        try:
            options = {k: json.loads(v) for k, v in (pair.split("=", 1) for pair in query.split("&") if pair)}
            options = {"size": 2000, "seed": args.seed, **options}
            rows = [dict(row) for row in reasoning_gym.create_dataset(name, **options)]
        except (ValueError, TypeError, AssertionError) as error:
            refuse(f"--dataset {source}: reasoning-gym says: {error} (form: reasoning_gym:NAME?key=value&key=value)")
        for row in rows:  # plain data only: a row travels to the reward workers
            row["metadata"] = json.loads(json.dumps(row["metadata"], default=str))
        yield rows
        return
    for path in (files := _files(source)):
        try:
            yield from read_batches(path, size)
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            refuse(f"--dataset {path}: not valid {path.suffix.lstrip('.')}: {str(error).splitlines()[0]}")
    if files:
        return
    import datasets

    datasets.disable_progress_bars()
    try:
        if Path(source).is_dir():
            found = datasets.load_from_disk(source)
            found = found[args.dataset_split] if isinstance(found, datasets.DatasetDict) else found
        else:
            name, _, configuration = source.partition(":")
            found = datasets.load_dataset(name, configuration or None, split=args.dataset_split)
    except Exception as error:  # the hub client raises a dozen kinds for "not there"; all mean the same to the user
        refuse(
            f"--dataset {source} (split {args.dataset_split!r}): no such local file, no folder saved by datasets, and "
            f"not loadable from the hub ({type(error).__name__}: {str(error).splitlines()[0][:200]}). Give .jsonl, "
            f".json, .parquet or .csv files, a hub id (ID:CONFIGURATION where it has several), or "
            f"reasoning_gym:NAME?key=value"
        )
    for start in range(0, len(found), size):
        yield found.select(range(start, min(start + size, len(found)))).to_list()


# ----------------------------------------------------------------------------------- rows, and the problems they become


def columns_of(rows: list, args) -> tuple[str, str, str]:
    """(prompt column, truth column, verifier) of a source: the flags, or else what its first rows look like.

    GSM8K, MATH and countdown are known by their columns; any other has ``question``, ``answer`` and last_number.
    """
    first = [row for row in rows[:100] if isinstance(row, dict)]
    has = {key for row in first for key in row}
    prompt, truth, verifier = "question", "answer", "last_number"
    if {"nums", "target"} <= has:
        prompt, truth, verifier = "nums", "target", "countdown"
    elif "problem" in has and has & {"answer", "solution"}:
        prompt, truth, verifier = "problem", "answer" if "answer" in has else "solution", "math"
    elif any("#### " in str(row.get("answer")) for row in first):
        verifier = "gsm8k"
    return args.prompt_key or prompt, args.ground_truth_key or truth, args.reward_fn or args.verifier or verifier


def _messages(prompt: Any, row: dict[str, Any]) -> list[dict[str, str]]:
    """A prompt as chat messages. Raises ValueError for what is neither text nor messages nor countdown's numbers."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, list) and prompt == row.get("nums") and "target" in row:
        return [{"role": "user", "content": COUNTDOWN.format(target=row["target"], nums=", ".join(map(str, prompt)))}]
    kinds = type(prompt).__name__
    if isinstance(prompt, list):
        if all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
        ):
            return [{"role": m["role"], "content": m["content"]} for m in prompt]
        kinds = "a list of something else"
    raise ValueError(f"its prompt must be text or chat messages with role and content, but is {kinds}")


_find_once = functools.lru_cache(rewards.find_verifier)


def make_problem(row: Any, keys: tuple[str, str, str], system: str | None, args) -> Problem:
    """One row as a problem. Raises ValueError that says what is wrong with the row, or with its truth."""
    prompt_key, truth_key, verifier = keys
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, not an object with columns")
    for key in (prompt_key, truth_key):
        if key not in row:
            raise ValueError(f"has no {key!r}")
        if row[key] is None or row[key] != row[key] or row[key] in ("", [], {}):
            raise ValueError(f"has an empty {key!r}")
    messages, truth = _messages(row[prompt_key], row), row[truth_key]
    if system:
        messages = [{"role": "system", "content": system}, *messages]
    truth = json.dumps(truth) if isinstance(truth, list | dict) else str(truth)
    if args.verifier_key is not None:
        named = row.get(args.verifier_key) or verifier
        verifier = ",".join(named) if isinstance(named, list) else str(named)
        try:
            for name in rewards.names_of(verifier):
                _find_once(name)
        except ValueError as error:
            raise ValueError(f"names a verifier that is none (--verifier_key {args.verifier_key}): {error}") from error
    if wrong := rewards.truth_error(verifier, truth, row):
        raise ValueError(f"has a truth that its own verifier {verifier} rejects: {truth[:80]!r} ({wrong})")
    return Problem(messages, truth, verifier, row)


def look_at(source: str, rows: list, args) -> tuple[tuple[str, str, str], str | None]:
    """(prompt column, truth column, verifier) and system prompt of a source, from its first rows.

    Ends with exit code 2 when no row has such a column.
    """
    keys, has = columns_of(rows, args), {key: 0 for row in rows if isinstance(row, dict) for key in row}
    for flag, key in zip(("--prompt_key", "--ground_truth_key"), keys, strict=False):
        if has and key not in has:
            refuse(f"{flag} {key}: --dataset {source} has no such column; it has: {', '.join(map(str, has))}")
    usual = SYSTEM_PROMPTS.get(source.split("?")[0]) or SYSTEM_PROMPTS.get("" if args.verifier else keys[2])
    return keys, usual if args.system_prompt is None else args.system_prompt


def problems_of(
    rows: list, start: int, keys: tuple[str, str, str], system: str | None, args
) -> tuple[list[Problem], list[tuple[int, str]]]:
    """(the problems, [(index, what is wrong)] of the other rows); ``start`` is the index of the first row."""
    problems, bad = [], []
    sandbox.allow_unsafe = args.allow_unsafe_code_exec  # the rows' own solutions are run
    for index, row in enumerate(rows, start):
        try:
            problems.append(make_problem(row, keys, system, args))
        except ValueError as error:
            bad.append((index, str(error)))
    return problems, bad


def report_bad_rows(bad: list[tuple[int, str]], count: int, source: str, args) -> None:
    """End the run for rows that cannot be used, or say which are left out (``--bad_rows drop``)."""
    if not bad:
        return
    indices = ", ".join(str(index) for index, _ in bad[:20]) + (", ..." if len(bad) > 20 else "")
    found = (
        f"{len(bad)} of {count} rows of --dataset {source} cannot be used (rows {indices}); row {bad[0][0]} {bad[0][1]}"
    )
    if args.bad_rows == "raise":
        refuse(f"{found}; repair them, choose other columns, --verifier or --reward_fn, or add --bad_rows drop")
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: --bad_rows drop: {found}")


def source_name(source: str) -> str:
    """A short name for the metrics: data/gsm8k_train.jsonl -> gsm8k_train, openai/gsm8k:main -> gsm8k."""
    if source.startswith("reasoning_gym:"):
        return source.removeprefix("reasoning_gym:").partition("?")[0]
    path = Path(source.split(",")[0].partition(":")[0])
    return path.name.partition(".")[0].strip("*?-_") or path.parent.name


# ------------------------------------------------------------------------------------------- what is done once and kept


def digest(*parts: bytes) -> str:
    """A name that changes whenever one of the parts does."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(hashlib.blake2b(part).digest())
    return total.hexdigest()


def _kept(key: str) -> Path:
    """The file of the cache of datasets that ``kept_table`` keeps under a key."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    return Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")).expanduser() / "rlvr" / f"{key}.parquet"


@contextlib.contextmanager
def alone(lock: Path, words: str) -> Iterator[None]:
    """Hold ``lock`` while no other process does, and say for whom one waits.

    A record lock: it ends with the process in whatever way, is not inherited by a child, and holds over NFS. On a disk
    without locks nobody waits: what is done twice then is done twice.
    """
    with open(lock, "a") as file:
        for tenths in itertools.count():
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if tenths % 100 == 20:
                    print(f"{words}: waiting for the process that holds {lock}", flush=True)
                time.sleep(0.1)
            except OSError:
                break
            else:
                break
        yield


def kept_table(key: str, texts: Callable[[], list[str]], function: Callable, kinds: dict[str, Any], words: str):
    """``function`` on batches of texts, by several processes and once only: then it is read from the cache.

    The result is a pyarrow.Table with the columns ``kinds``, name -> datasets' name of its type. A bar on terminals.
    """
    import pyarrow.parquet

    path = _kept(key)
    if not path.exists():
        import datasets

        path.parent.mkdir(parents=True, exist_ok=True)
        watched = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
        (datasets.enable_progress_bars if watched else datasets.disable_progress_bars)()
        features = datasets.Features(
            {n: datasets.List(datasets.Value("int32")) if k == "ids" else datasets.Value(k) for n, k in kinds.items()}
        )
        with alone(Path(f"{path}.lock"), words):  # of several ranks one does it, and the others read
            if not path.exists():
                done = datasets.Dataset.from_dict({"text": texts()}).map(
                    lambda batch: function(batch["text"]),
                    batched=True,
                    num_proc=min(16, len(os.sched_getaffinity(0))),
                    remove_columns=["text"],
                    features=features,
                    new_fingerprint=key,
                    desc=words,
                )
                beside = path.with_suffix(f".{os.getpid()}.partial")
                done.to_parquet(beside)
                beside.rename(path)
    return pyarrow.parquet.read_table(path)


def _check(texts: list[str], keys: tuple[str, str, str], system: str | None, args) -> dict[str, list[str]]:
    """Rows as JSON -> columns of their problems; of a bad row only ``wrong`` says something."""
    columns: dict[str, list[str]] = {name: [] for name in ("messages", "truth", "verifier", "row", "wrong")}
    for text in texts:
        problems, bad = problems_of([json.loads(text)], 0, keys, system, args)
        found = {"wrong": bad[0][1]} if bad else {"truth": problems[0].truth, "verifier": problems[0].verifier}
        if problems:
            found |= {"messages": json.dumps(problems[0].messages), "row": text}
        for name, values in columns.items():
            values.append(found.get(name, ""))
    return columns


def _read_large(source: str, read: Callable[[], list], key: str, args) -> list[tuple[str, Problem]]:
    """(prompt as text, problem) of each good row: ``problems_of`` by several processes, and once only.

    ``read`` is called where it has not been done before.
    """

    def texts() -> list[str]:
        return [json.dumps(row, default=str) for row in read()]

    def check(batch: list[str]) -> dict[str, list[str]]:
        return _check(batch, *look, plain)

    plain = SimpleNamespace(**vars(args))  # the class of args may be that of the program: other processes have none
    look = look_at(source, read(), args) if not _kept(key).exists() else ()
    names = ("messages", "truth", "verifier", "row", "wrong")
    table = kept_table(key, texts, check, dict.fromkeys(names, "string"), "checking rows")
    columns = [table.column(name).to_pylist() for name in names]
    report_bad_rows([(i, w) for i, w in enumerate(columns[-1]) if w], len(table), source, args)
    good = [[value for value, w in zip(column, columns[-1], strict=True) if not w] for column in columns[:-1]]
    messages, rows = (json.loads(f"[{','.join(good[i])}]") for i in (0, 3))  # at once: far faster than one by one
    return list(zip(good[0], map(Problem, messages, good[1], good[2], rows), strict=True))


def read_problems(source: str, args) -> dict[str, Problem]:
    """All usable problems of one source, in its order, each prompt once; the key is the prompt as text."""
    read = functools.cache(lambda: [row for batch in read_source(source, args) for row in batch])
    key, files = "", () if source.startswith("reasoning_gym:") else _files(source)
    if files:  # what a problem becomes follows from these files, arguments and code
        named = ("prompt_key", "ground_truth_key", "verifier", "verifier_key", "reward_fn", "system_prompt")
        named += ("allow_unsafe_code_exec",)
        parts = [repr([source, *(getattr(args, name) for name in named)]).encode()]
        own = [Path(name.rpartition(":")[0]) for name in rewards.names_of(args.reward_fn or "")]
        code = [
            Path(__file__),
            Path(rewards.__file__),
            Path(sandbox.__file__),
            *(path for path in own if path.is_file()),
        ]
        for path in (*files, *code):
            with open(path, "rb") as content:
                parts.append(hashlib.file_digest(content, "blake2b").digest())
        key = digest(*parts)
    if key and (_kept(key).exists() or (len(read()) >= LARGE and not _is_prepared(read()))):
        problems = _read_large(source, read, key, args)
    elif _is_prepared(rows := read()):
        problems = [(row["messages"], _prepared(row, args)) for row in rows]
    else:
        good, bad = problems_of(rows, 0, *look_at(source, rows, args), args)
        report_bad_rows(bad, len(rows), source, args)
        problems = [(json.dumps(p.messages), p) for p in good]
    name, distinct = source_name(source), {}
    for text, problem in problems:
        problem.source = problem.source or name
        distinct.setdefault(text, problem)
    return distinct


def _is_prepared(rows: list) -> bool:
    return bool(rows) and isinstance(rows[0], dict) and "prepared_for" in rows[0]


def _prepared(row: dict[str, Any], args) -> Problem:
    """A row that scripts/prepare_data.py wrote."""
    for flag in ("prompt_key", "ground_truth_key", "verifier_key", "system_prompt"):
        if getattr(args, flag) is not None:
            refuse(f"--{flag} belongs to scripts/prepare_data.py, which made --dataset {args.dataset}; give it there")
    verifier, messages = args.reward_fn or args.verifier or row["verifier"], json.loads(row["messages"])
    fields = {name: row[name] for name in ("prompt_ids", "source", "prepared_for")}
    return Problem(messages, row["truth"], verifier, json.loads(row["row"]), **fields)


# --------------------------------------------------------------------------------------- mixtures, the split, the order


def mixture(args) -> dict[str, float | int]:
    """Source -> share of its problems, at most 1.0, or their number: ``--dataset_mixer``, or all of ``--dataset``."""
    if args.dataset_mixer is None:
        return {args.dataset: 1.0}
    form = """for example '{"gsm8k.jsonl": 1.0, "math.jsonl": 500}': a share has a point, a number has none"""
    try:
        mixer = json.loads(args.dataset_mixer)
    except json.JSONDecodeError as error:
        refuse(f"--dataset_mixer: not valid JSON ({error}); {form}")
    if not isinstance(mixer, dict) or not mixer:
        refuse(f"--dataset_mixer: must be a JSON object; {form}")
    for source, part in mixer.items():
        if not (type(part) is int and part > 0) and not (type(part) is float and 0 < part <= 1):
            refuse(
                f"--dataset_mixer: {source!r} has {part!r}, which is no share in (0, 1] and no number above 0; {form}"
            )
    return mixer


def mixed_problems(args) -> dict[str, Problem]:
    """What ``--dataset`` or ``--dataset_mixer`` names, source by source; the key says which prompts are equal."""
    problems: dict[str, Problem] = {}
    parts = mixture(args)
    names = Counter(map(source_name, parts))
    for source, part in parts.items():
        own = {k: p for k, p in read_problems(source, args).items() if k not in problems}
        for problem in own.values() if names[source_name(source)] > 1 else ():
            problem.source = source.replace("/", "-")
        wanted = round(part * len(own)) if isinstance(part, float) else part
        if args.dataset_mixer is not None and not 0 < wanted <= len(own):
            refuse(f"--dataset_mixer: {source!r} has {len(own)} distinct problems, {part} asks for {wanted}")
        if wanted < len(own):
            own = {k: own[k] for k in random.Random(f"{args.seed}/{source}").sample(list(own), wanted)}
        problems |= own
    return problems


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Around what makes many objects that stay: Python's collector would go through all of them, again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # nor later, while libraries are imported and batches come and go
        gc.enable()


@without_collections()
def load_problems(args) -> tuple[list[Problem], list[Problem]]:
    """(training problems, evaluation problems), disjoint: no prompt of the second is ever trained on.

    Rows with the same prompt count once. The split is a permutation seeded by ``--seed``: the first ``eval_prompts``
    distinct prompts are for evaluation, the rest for training; with ``--eval_dataset`` the first ones there are. Ends
    with exit code 2 for an unknown data set or column and when too few problems are left.
    """
    problems = mixed_problems(args)
    apart = read_problems(args.eval_dataset, args) if args.eval_dataset is not None else {}
    evaluation = list(apart.values())[: args.eval_prompts]
    for same in list(apart)[: args.eval_prompts]:
        problems.pop(same, None)
    training = list(problems.values())
    random.Random(args.seed).shuffle(training)
    if args.eval_dataset is None:
        evaluation, training = training[: args.eval_prompts], training[args.eval_prompts :]
    check_sandbox([*training, *evaluation], args)
    check_enough(training, evaluation, args)
    return training, evaluation


def check_enough(training: list[Problem], evaluation: list[Problem], args) -> None:
    """Refuse too few problems for one step, or none to evaluate on where that was asked."""
    if len(training) < args.num_unique_prompts_rollout:
        filtered = " that --overlong_prompts filter has left" if args.overlong_prompts == "filter" else ""
        refuse(
            f"--dataset {args.dataset} has {len(training) + len(evaluation)} distinct problems{filtered}; "
            f"--eval_prompts {args.eval_prompts} leaves {len(training)}, fewer than --num_unique_prompts_rollout "
            f"{args.num_unique_prompts_rollout}"
        )
    if args.eval_prompts > 0 and not evaluation:
        refuse(f"--eval_prompts {args.eval_prompts}: none is left (--overlong_prompts {args.overlong_prompts})")


def check_sandbox(problems: list[Problem], args) -> None:
    """Refuse to run models' programs where the kernel gives no sandbox, unless that is accepted."""
    if any("code" in rewards.names_of(p.verifier) for p in problems) and (why := sandbox.namespaces_refused()):
        if not args.allow_unsafe_code_exec:
            refuse(
                f"the verifier code has no sandbox here: the kernel gives no namespaces ({why}). Run where user "
                f"namespaces are allowed, or accept limits of time and memory alone by --allow_unsafe_code_exec"
            )
        if os.environ.get("RANK", "0") == "0":
            print(f"warning: --allow_unsafe_code_exec: programs run with this user's rights, no sandbox ({why})")


@functools.lru_cache(maxsize=2)  # a step crosses at most one border, if it is not larger than the data
def _pass_order(number: int, problems: int, seed: int, shuffle: bool) -> list[int]:
    """The order of one pass over the data."""
    order = list(range(problems))
    if shuffle:
        random.Random(f"{seed}/{number}").shuffle(order)
    return order


def prompts_at(position: int, count: int, num_problems: int, seed: int, shuffle: bool) -> list[int]:
    """Indices of ``count`` problems, the first being number ``position`` of the run: a pure function of a counter.

    Every pass over the data is a permutation of its own, seeded by ``seed`` and the pass; a step may cross a border.
    """
    places = (divmod(p, num_problems) for p in range(position, position + count))
    return [_pass_order(number, num_problems, seed, shuffle)[place] for number, place in places]


def sampling_seed(seed: int, step: int | str, prompt_id: int, sample_id: int) -> int:
    """Seed of one sample: what it says depends on these four numbers, not on what the engine did before."""
    digest = hashlib.sha256(f"{seed}/{step}/{prompt_id}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def requests(chosen: Sequence[int], count: int, seed: int, step: int | str) -> list[tuple[int, int, int]]:
    """(place in the batch, sample number, seed) of ``count`` responses to each of the problems ``chosen``.

    A problem that stands twice there, where one pass over the data ends and the next begins, gets other seeds then.
    """
    again = [chosen[:place].count(i) * count for place, i in enumerate(chosen)]
    return [(p, k, sampling_seed(seed, step, i, again[p] + k)) for p, i in enumerate(chosen) for k in range(count)]


def eval_requests(problems: int, args) -> tuple[list[tuple[int, int, int]], dict[str, Any]]:
    """The requests of an evaluation, with the same seeds in each of a run, and how they are sampled."""
    count = args.eval_samples if args.eval_temperature > 0 else 1
    sampling = {"temperature": args.eval_temperature, "top_p": args.eval_top_p, "top_k": args.eval_top_k}
    sampling |= {"max_tokens": args.max_response_length, "stop": list(args.stop), "ignore_eos": args.ignore_eos}
    return requests(range(problems), count, args.seed, "eval"), sampling


# ------------------------------------------------------------------------------------------------- from messages to ids


def chat_template(args) -> str | None:
    """The Jinja text that ``--chat_template`` names, or None for the tokenizer's own."""
    if args.chat_template is None:
        return None
    if args.chat_template in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[args.chat_template]
    if Path(args.chat_template).is_file():
        return Path(args.chat_template).read_text()
    refuse(f"--chat_template {args.chat_template}: neither a file nor one of {', '.join(CHAT_TEMPLATES)}")


def prompt_key(tokenizer, args) -> str:
    """Changes whenever the same messages could become other ids: it names the tokenizer and the template."""
    state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    template = chat_template(args) or tokenizer.get_chat_template()
    text = json.dumps(
        [state, template, chat_template(args) is None, {k: str(v) for k, v in tokenizer.special_tokens_map.items()}]
    )
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def render(conversations: list[list[dict[str, str]]], tokenizer, template: str | None) -> list[list[int]]:
    """Token ids of prompts. The tokenizer's own template writes all special tokens itself.

    Of the others a tokenizer that begins every text with a BOS gets one, and only one.
    """
    if not conversations:
        return []
    texts = [
        tokenizer.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=False)
        for messages in conversations
    ]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    if template is None or (bos := tokenizer.bos_token_id) is None or tokenizer("")["input_ids"][:1] != [bos]:
        return prompts
    return [ids if ids[:1] == [bos] else [bos, *ids] for ids in prompts]


def _render_many(conversations: list[list[dict[str, str]]], tokenizer, args) -> list[list[int]]:
    """``render`` by several processes, and once only. The key of the cache holds messages, template and tokenizer."""
    template = chat_template(args)

    def texts() -> list[str]:
        return [json.dumps(messages) for messages in conversations]

    def ids(batch: list[str]) -> dict[str, list]:
        return {"ids": render([json.loads(text) for text in batch], tokenizer, template)}

    key = digest(prompt_key(tokenizer, args).encode(), json.dumps(conversations).encode())
    table = kept_table(key, texts, ids, {"ids": "ids"}, "tokenising prompts")
    return [ids for chunk in table.column("ids").chunks for ids in int_lists(chunk)]


def shorten(ids: list[int], args) -> list[int] | None:
    """A prompt as ``--overlong_prompts`` leaves it: whole if it is not too long, cut at one end, or None: left out."""
    most = args.max_prompt_length
    if len(ids) <= most:
        return ids
    return {"left": ids[-most:], "right": ids[:most]}.get(args.overlong_prompts)


@without_collections()
def render_prompts(problems: list[Problem], tokenizer, args) -> list[Problem]:
    """Fill ``prompt_ids``. One tokenisation for sampler and trainer, special tokens as the template wrote them.

    Returns the problems that ``--overlong_prompts`` keeps: with error a prompt longer than ``--max_prompt_length`` ends
    the run with exit code 2, with filter it is left out, with left or right so many tokens are cut there.
    """
    makers = {p.prepared_for for p in problems} - {""}
    if makers and makers != {prompt_key(tokenizer, args)}:
        refuse(
            f"--dataset {args.dataset} was prepared for another tokenizer or --chat_template than that of "
            f"--model_name_or_path {args.model_name_or_path}; run scripts/prepare_data.py with these"
        )
    missing = [p for p in problems if not p.prepared_for]
    conversations = [p.messages for p in missing]
    many = len(missing) >= LARGE
    found = (
        _render_many(conversations, tokenizer, args) if many else render(conversations, tokenizer, chat_template(args))
    )
    for problem, ids in zip(missing, found, strict=True):
        problem.prompt_ids = ids
    most, how = args.max_prompt_length, args.overlong_prompts
    long = [p for p in problems if len(p.prompt_ids) > most]
    if not long:
        return problems
    longest = max(len(p.prompt_ids) for p in long)
    words = (
        f"{len(long)} of {len(problems)} prompts are longer than --max_prompt_length {most} tokens, the longest has "
        f"{longest}; the first has {len(long[0].prompt_ids)}: {long[0].messages[-1]['content'][:80]!r}"
    )
    if how == "error":
        refuse(f"{words}. Raise --max_prompt_length, or choose --overlong_prompts filter, left or right")
    if os.environ.get("RANK", "0") == "0":
        print(f"warning: --overlong_prompts {how}: {words}")
    for problem in long:
        problem.prompt_ids = shorten(problem.prompt_ids, args) or []
    return [p for p in problems if p.prompt_ids]


def render_problems(training: list[Problem], evaluation: list[Problem], tokenizer, args) -> tuple[list, list]:
    """``render_prompts`` of a run's problems: those of both kinds that are kept, or exit code 2 where too few are."""
    training, evaluation = (render_prompts(part, tokenizer, args) for part in (training, evaluation))
    check_enough(training, evaluation, args)
    return training, evaluation


# ---------------------------------------------------------------------------------------------------- samples, rewards


def token_rewards(samples: list[Sample], decode, args) -> list[float]:
    """The task's reward of every response token, one response after the other: all of it on the last one, 0 before.

    With --dense_reward a score on the way goes to the token that completes its characters. ``decode``: ids -> text.
    """
    found = []
    for sample in samples:
        cut, ids, rewards = sample.finish_reason == "length", sample.response_ids, [0.0] * len(sample.response_ids)
        steps = sample.reward_steps if args.dense_reward != "none" else ()
        if not steps or (cut and args.mask_no_eos_with_zero):
            rewards[-1] = sample.reward
        else:
            rewards[-1] = -cut * args.non_stop_penalty
            before, limit = -args.reward_bias * args.reward_scaling, args.max_reward_clip or math.inf
            length = lambda t, ids=ids: len(decode(ids[: t + 1], skip_special_tokens=True))  # noqa: E731
            for characters, score in steps:
                place = min(bisect.bisect_left(range(len(ids)), characters, key=length), len(ids) - 1)
                shaped = max(-limit, min(limit, (score - args.reward_bias) * args.reward_scaling))
                rewards[place] += shaped - before if args.dense_reward == "difference" else shaped
                before = shaped
        found += rewards
    return found


def best_of(samples: list[Sample], count: int) -> list[Sample]:
    """The ``count`` samples of highest reward to each prompt, the first of equal ones, in the order they came in."""
    ranked: dict[int, list[int]] = {}
    for i in sorted(range(len(samples)), key=lambda i: -samples[i].reward):
        ranked.setdefault(samples[i].prompt_id, []).append(i)
    return [samples[i] for i in sorted(i for places in ranked.values() for i in places[:count])]


def equal_groups(samples: list[Sample]) -> list[int]:
    """The places in the batch whose responses all have the same reward: nothing can be learnt there."""
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.prompt_id, set()).add(sample.reward)
    return [place for place, values in sorted(rewards.items()) if len(values) == 1]


def replace_groups(batch: list[Problem], samples: list[Sample], more: list[Problem], new: list[Sample]) -> None:
    """Put new groups whose rewards differ in the places of those whose do not, as many as there are; in place.

    ``samples`` answer ``batch``, ``new`` the problems ``more``; both are ordered by place, with equally many to each.
    """
    group, useless = len(samples) // len(batch), set(equal_groups(new))
    useful = (p for p in range(len(more)) if p not in useless)
    for place, p in zip(equal_groups(samples), useful, strict=False):
        batch[place] = more[p]
        samples[place * group : (place + 1) * group] = [
            dataclasses.replace(s, prompt_id=place) for s in new[p * group : (p + 1) * group]
        ]


def draw_metrics(rounds: list[list[Sample]], prompts: int) -> dict[str, float]:
    """What all draws of a step found, before groups of equal reward were replaced: dynamic sampling hides it."""
    groups = [len({s.prompt_id for s in drawn}) for drawn in rounds]
    return {
        "data/rounds": len(rounds) - 1,
        "data/dropped": sum(groups) - prompts,
        "data/zero_std_frac": sum(len(equal_groups(drawn)) for drawn in rounds) / sum(groups),
        "data/reward_mean": sum(s.reward for drawn in rounds for s in drawn) / sum(map(len, rounds)),
    }


def drop_solved(problems: list[int], rates: dict[int, float], threshold: float, share: float) -> list[int]:
    """Without those answered right at a rate of at least ``threshold``: the best, at most ``share`` of all."""
    solved = sorted((i for i in problems if rates.get(i, 0.0) >= threshold), key=lambda i: -rates[i])
    gone = set(solved[: int(share * len(problems))])
    return [i for i in problems if i not in gone]

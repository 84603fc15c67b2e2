"""Checks, filters and tokenises problems ahead of time and writes them as parquet, which --dataset then takes.

    python scripts/prepare_data.py --dataset 'data/*.parquet' --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --max_prompt_length 512 --overlong_prompts filter --output prepared.parquet

Takes the arguments of grpo.py that are about data and the model: a run with the prepared file must have the same
tokenizer and --chat_template, and gives no column or system prompt of its own. Mixing comes later: --dataset_mixer of
the run takes prepared files as well. Rows are read, checked, tokenised by --workers processes and written --batch_rows
at a time, so .jsonl and .parquet files and hub data sets may be larger than memory.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

import grpo
from rewards import check_reward_args, truth_error
from runtime import data, flags, process

NAMES = ("messages", "truth", "verifier", "source", "row", "prompt_ids", "prepared_for")


def _start_worker(args: grpo.Args) -> None:
    """In a new process: what all of its pieces need."""
    global settings
    process.prepare_environment()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        args.model_name_or_path, revision=args.revision, trust_remote_code=args.trust_remote_code
    )
    settings = args, tokenizer, data.prompt_key(tokenizer, args)


def prepare(rows: list, start: int, look: tuple, name: str) -> tuple[list, list, list]:
    """(rows of the result as tuples of NAMES, [(index, what is wrong)], lengths of the prompts that are too long).

    ``start``: index of the first row; ``look``: what data.look_at found out about the data; ``name``: of the source.
    """
    args, tokenizer, key = settings
    problems, bad = data.problems_of(rows, start, *look, args, truth_error)
    prompts = data.render([p.messages for p in problems], tokenizer, data.chat_template(args))
    long = [len(ids) for ids in prompts if len(ids) > args.max_prompt_length]
    done = []
    for problem, ids in zip(problems, prompts, strict=True):
        if (ids := data.shorten(ids, args)) is not None:
            row = json.dumps(problem.row, default=str)
            done.append((json.dumps(problem.messages), problem.truth, problem.verifier, name, row, ids, key))
    return done, bad, long


def main(words: list[str]) -> None:
    import tyro

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--output", type=Path, default=Path("prepared.parquet"))
    own.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    own.add_argument("--batch_rows", type=int, default=20_000)
    given, words = own.parse_known_args(words)
    args = tyro.cli(grpo.Args, args=words, description=__doc__)
    for name in ("workers", "batch_rows"):
        if getattr(given, name) < 1:
            process.refuse(f"--{name} {getattr(given, name)}: must be above 0")
    if args.dataset_mixer is not None:
        process.refuse(
            "--dataset_mixer: prepare each data set by itself, and give the mixer of prepared files to the run"
        )
    if given.output.suffix != ".parquet":
        process.refuse(f"--output {given.output}: the name must end in .parquet, or --dataset would not know it")
    args.micro_batch_tokens = args.logprob_micro_batch_tokens = 2**62  # here they have no say
    flags.check_args(args, 1)
    check_reward_args(args)
    flags.check_model(args)
    import pyarrow
    import pyarrow.parquet

    kinds = {"prompt_ids": pyarrow.list_(pyarrow.int32())}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in NAMES])
    begun, counts, seen, bad, longest = time.perf_counter(), Counter(), set(), [], 0
    beside = given.output.with_name(given.output.name + ".partial")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    name, look = data.source_name(args.dataset), None
    with contextlib.ExitStack() as stack:
        spawn = multiprocessing.get_context("spawn")
        pool = stack.enter_context(ProcessPoolExecutor(given.workers, spawn, _start_worker, (args,)))
        writer = stack.enter_context(pyarrow.parquet.ParquetWriter(beside, schema))
        for rows in data.read_source(args.dataset, args, given.batch_rows):
            look = look or data.look_at(args.dataset, rows, args)
            share = -(-len(rows) // given.workers)
            pieces = [rows[i : i + share] for i in range(0, len(rows), share)]
            starts = [counts["rows"] + i for i in range(0, len(rows), share)]
            kept = []
            for done, wrong, long in pool.map(prepare, pieces, starts, itertools.repeat(look), itertools.repeat(name)):
                bad, longest = bad + wrong, max([longest, *long])
                counts.update(long=len(long))
                for row in done:
                    digest = hashlib.blake2b(row[0].encode(), digest_size=16).digest()  # 16 bytes a prompt in memory
                    counts.update(equal=digest in seen)
                    if digest not in seen:
                        seen.add(digest)
                        kept.append(row)
            counts.update(rows=len(rows), kept=len(kept))
            if bad and args.bad_rows == "raise":
                data.report_bad_rows(bad, counts["rows"], args.dataset, args)
            if counts["long"] and args.overlong_prompts == "error":
                process.refuse(
                    f"{counts['long']} of {counts['rows']} prompts are longer than --max_prompt_length "
                    f"{args.max_prompt_length} tokens, up to {longest}; raise it, or --overlong_prompts filter"
                )
            if kept:
                columns = dict(zip(NAMES, map(list, zip(*kept, strict=True)), strict=True))
                writer.write_table(pyarrow.table(columns, schema))
            if sys.stderr.isatty():
                speed = counts["rows"] / (time.perf_counter() - begun)
                print(f"\r{counts['rows']} rows, {speed:.0f} a second", end="", file=sys.stderr)
    beside.rename(given.output)
    data.report_bad_rows(bad, counts["rows"], args.dataset, args)
    print(
        f"{given.output}: {counts['kept']} of {counts['rows']} rows in {time.perf_counter() - begun:.1f} s; "
        f"{len(bad)} could not be used, {counts['equal']} had a prompt that was there before, {counts['long']} were "
        f"longer than {args.max_prompt_length} tokens (--overlong_prompts {args.overlong_prompts})"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

"""Checks, filters and tokenizes problems ahead of time and writes them as parquet, which --dataset then takes.

    python scripts/prepare_data.py --dataset 'data/*.parquet' --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --max_prompt_length 512 --overlong_prompts filter --output prepared.parquet

A run does the same at its start and caches it; this is for other machines, and for data larger than memory: rows are
read, checked, tokenized and written piece by piece. It takes the flags that every run has (runtime/flags.py). A run
with the prepared file needs the same tokenizer, --chat_template and --chat_template_kwargs, and gives no column or
system prompt of its own. Mixing comes later: --dataset_mixer of the run takes prepared files.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from rewards import check_reward_args, truth_error
from runtime import data, flags, process, sources
from runtime.flags import RunFlags


def parse(words: list[str]) -> tuple[Path, RunFlags]:
    """(output file, arguments), checked."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--output", type=Path, default=Path("prepared.parquet"))
    given, words = own.parse_known_args(words)
    args = flags.parse(RunFlags, __doc__, words)
    if args.dataset_mixer is not None:
        process.refuse("--dataset_mixer: prepare each data set by itself, and give the mixer to the run")
    if given.output.suffix != ".parquet":
        process.refuse(f"--output {given.output}: the name must end in .parquet, or --dataset would not know it")
    flags.check(args, 1)
    check_reward_args(args)
    return given.output, args


def distinct_good_rows(checked) -> tuple[list[int], list[tuple[int, str]], int]:
    """(indices of usable rows whose prompt is new, [(index, what is wrong)], number of repeated prompts)."""
    seen: set[bytes] = set()  # 16 bytes per prompt in memory
    kept, bad, repeated = [], [], 0
    index = 0
    for batch in checked.select_columns(["messages", "wrong"]).iter(1000):
        for messages, wrong in zip(batch["messages"], batch["wrong"], strict=True):
            prompt = hashlib.blake2b(messages.encode(), digest_size=16).digest()
            if wrong:
                bad.append((index, wrong))
            elif prompt in seen:
                repeated += 1
            else:
                seen.add(prompt)
                kept.append(index)
            index += 1
    return kept, bad, repeated


def tokenize(batch: dict[str, list], places: list[int], tokenizer, args, key: str) -> dict[str, list]:
    """A batch of checked rows -> the columns of the prepared file and the prompts' lengths before truncation.

    ``prompt_ids`` is empty where a prompt is too long to be kept.
    """
    count = len(places)
    conversations = [json.loads(text) for text in batch["messages"]]
    prompts = data.render(conversations, tokenizer, data.chat_template(args), data.template_kwargs(args))
    return {
        **{name: batch[name] for name in ("messages", "truth", "verifier", "row")},
        "source": [sources.source_name(args.dataset)] * count,
        "prompt_ids": [data.shorten(ids, args) or [] for ids in prompts],
        "prepared_for": [key] * count,
        "length": [len(ids) for ids in prompts],
    }


def main(words: list[str]) -> None:
    output, args = parse(words)
    process.prepare_environment()
    import datasets

    begun = time.perf_counter()
    raws = sources.read_source(args.dataset, args)
    checked = data.check_rows(args.dataset, raws, args, truth_error)
    kept, bad, repeated = distinct_good_rows(checked)
    data.report_bad_rows(bad, len(checked), args.dataset, args)
    if not kept:
        process.refuse(f"--dataset {args.dataset}: none of its {len(checked)} rows can be used")
    if args.external_lib is not None:
        importlib.import_module(args.external_lib)
    tokenizer = data.load_tokenizer(args)  # three seconds, after what can be refused without it
    data.check_template_kwargs(tokenizer, args)
    key = data.prompt_key(tokenizer, args)
    names = ("messages", "truth", "verifier", "row", "source", "prepared_for")
    columns = dict.fromkeys(names, datasets.Value("string"))
    columns |= {"prompt_ids": datasets.List(datasets.Value("int32")), "length": datasets.Value("int32")}
    identity = json.dumps([key, args.dataset, args.max_prompt_length, args.overlong_prompts])
    function = functools.partial(tokenize, tokenizer=tokenizer, args=args, key=key)
    identity = sources.digest(identity.encode(), checked._fingerprint.encode())
    try:
        done = sources.cached_map(checked.select(kept), function, columns, identity, "tokenizing prompts")
    except data.Unrenderable as error:
        process.refuse(str(error))
    lengths = done["length"]
    short = [i for i, length in enumerate(lengths) if length <= args.max_prompt_length]
    long = len(done) - len(short)
    if long and args.overlong_prompts == "error":
        process.refuse(
            f"{long} of {len(done)} prompts are longer than --max_prompt_length {args.max_prompt_length} tokens, up to "
            f"{max(lengths)}; raise it, or choose --overlong_prompts filter, left or right"
        )
    if args.overlong_prompts == "filter":
        done = done.select(short)
    partial = output.with_name(output.name + ".partial")
    output.parent.mkdir(parents=True, exist_ok=True)
    done.remove_columns("length").to_parquet(partial)
    partial.rename(output)
    print(
        f"{output}: {len(done)} of {len(checked)} rows in {time.perf_counter() - begun:.1f} s; {len(bad)} could not be "
        f"used, {repeated} repeat an earlier prompt, {long} are longer than {args.max_prompt_length} tokens "
        f"(--overlong_prompts {args.overlong_prompts})"
    )


if __name__ == "__main__":
    main(sys.argv[1:])

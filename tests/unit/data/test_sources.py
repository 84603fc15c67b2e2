"""Sources of problems: files, folders, mixtures, known columns, bad rows, templates, long prompts, preparing."""

from __future__ import annotations

import base64
import contextlib
import datetime
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pyarrow.parquet
import pytest
from helpers import ROOT, read_jsonl, script

from graders.code import sandbox
from grpo import Args
from rewards import truth_error
from runtime.arguments import values
from runtime.data import problem_set, rendering, samples, sources
from runtime.run import directory

# A row, and what becomes of it: its verifier, truth and a part of its prompt, or what is said against it.
PUBLISHED = read_jsonl(ROOT / "tests" / "rows.jsonl")


def rows(count: int = 30, first: int = 0) -> list[dict]:
    return [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(first, first + count)]


def write(path: Path, content: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(path)


def load(args: Args) -> tuple[list[samples.Problem], list[samples.Problem]]:
    return problem_set.load_problems(args, truth_error)


def refusal(capsys, args: Args, load=load) -> str:
    with pytest.raises(SystemExit) as end:
        load(args)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


def everything(args: Args) -> list[samples.Problem]:
    return list(problem_set.mixed_problems(args, truth_error).values())


def questions(problems: list[samples.Problem]) -> list[str]:
    return [p.messages[-1]["content"] for p in problems]


# ------------------------------------------------------------------------------------------------------------- sources


def test_a_byte_order_mark_is_no_text(tmp_path):
    """Editors of Windows write one at the beginning of a file."""
    (tmp_path / "a.json").write_text(json.dumps(rows(20)), encoding="utf-8-sig")
    assert len(everything(Args(dataset=f"{tmp_path}/a.json"))) == 20
    (tmp_path / "a.csv").write_text("question,answer\n1,2\n", encoding="utf-8-sig")
    assert everything(Args(dataset=f"{tmp_path}/a.csv"))[0].row == {"question": "1", "answer": "2"}
    (tmp_path / "t.jinja").write_text("{{ messages[0]['content'] }}", encoding="utf-8-sig")
    assert Args(chat_template=f"{tmp_path}/t.jinja").template.text == "{{ messages[0]['content'] }}"


def test_a_chat_as_text(tmp_path):
    """A CSV file has no other form for a chat; text that only looks like one stays text."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 ="}]
    given = [json.dumps(chat), "[{1 + 1", '[{"role": 1}]']
    file = write(tmp_path / "a.jsonl", [{"question": text, "answer": "2"} for text in given])
    found = [problem.messages for problem in everything(Args(dataset=file))]
    assert found == [chat, *([{"role": "user", "content": text}] for text in given[1:])]


def test_a_column_of_verifiers_that_is_not_there(tmp_path, capsys):
    """The last row alone has the one, no row the other: it would be ignored without a word."""
    file = write(tmp_path / "a.jsonl", [*rows(2500), {"question": "?", "answer": "1", "judge": "exact"}])
    assert everything(Args(dataset=file, verifier_key="judge"))[-1].verifier == "exact"
    message = refusal(capsys, Args(dataset=file, verifier_key="jugde"))
    assert "--verifier_key jugde: " in message and "has no such column; it has: question, answer, judge" in message


def test_columns_that_are_not_there_or_hold_an_object(tmp_path, capsys):
    """Both columns in one message; an object is answered with one of its keys."""
    file = write(tmp_path / "a.jsonl", [{"text": f"{i}?", "gold": {"total": i}} for i in range(99)])
    assert "--prompt_key question, --ground_truth_key answer: " in refusal(capsys, Args(dataset=file))
    args = Args(dataset=file, prompt_key="text", ground_truth_key="gold")
    assert "such as --ground_truth_key gold.total" in refusal(capsys, args)


def test_several_files(tmp_path):
    first, second = write(tmp_path / "a.jsonl", rows(20)), write(tmp_path / "b.jsonl", rows(20, first=15))
    for source in (f"{first},{second}", f"{first}, {second}", f"{tmp_path}/*.jsonl"):
        found = everything(Args(dataset=source, eval_prompts=5))
        assert sorted(questions(found)) == sorted(row["question"] for row in rows(35)), "five are in both files"


def test_a_folder_saved_by_datasets(tmp_path, capsys):
    import datasets

    table = datasets.Dataset.from_list(rows())
    table.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": table, "test": table.select(range(9))}).save_to_disk(tmp_path / "splits")
    assert len(everything(Args(dataset=str(tmp_path / "plain")))) == 30
    assert len(everything(Args(dataset=str(tmp_path / "splits")))) == 30
    assert len(everything(Args(dataset=f"{tmp_path / 'splits'}@test", eval_prompts=1))) == 9
    (tmp_path / "other").mkdir()
    capsys.readouterr()  # datasets has shown a bar
    assert "no split test" in refusal(capsys, Args(dataset=f"{tmp_path / 'plain'}@test"))
    assert f"--dataset {tmp_path / 'other'}" in refusal(capsys, Args(dataset=str(tmp_path / "other")))


def test_ends_of_line_inside_a_text(tmp_path):
    """JSON allows U+2028 unescaped in a string; a reader that splits there sees two broken rows."""
    content = rows() + [{"question": "one\u2028two \u0085 three", "answer": "3"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
    (tmp_path / "a.jsonl").write_text(text + "\n")
    assert len(everything(Args(dataset=str(tmp_path / "a.jsonl")))) == 31


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_large_files_are_mapped_from_disk(tmp_path, suffix):
    """A file may be larger than memory: its rows are read from the cache on disk, some at a time."""
    path = tmp_path / f"a.{suffix}"
    if suffix == "jsonl":
        write(path, rows())
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows()), path)
    ((raw, files),) = sources.read_source(str(path), Args())
    assert raw.cache_files and files == [path]
    assert sources.rows_of(raw[10:20], 10) == rows(10, first=10)


CHANGED_BY_THE_LIBRARY = {
    "an integer beside a fraction": [7, 7.5],
    "a date": ["2024-01-05", "2024-02-05"],
    "a number above 64 bits": [12345678901234567890123, 1],
}


@pytest.mark.parametrize("case", CHANGED_BY_THE_LIBRARY)
def test_rows_stay_what_the_file_says(tmp_path, case):
    """Here they do; the JSON reader of datasets, which would be shorter, changes each of these or fails."""
    content = [{"question": str(i), "answer": answer} for i, answer in enumerate(CHANGED_BY_THE_LIBRARY[case])]
    path = write(tmp_path / "a.jsonl", content)
    (tmp_path / "b.json").write_text(json.dumps(content))
    for source in (path, str(tmp_path / "b.json")):
        assert [p.row for p in everything(Args(dataset=source, verifier="format"))] == content


def test_a_changed_file_with_its_old_time_is_read_again(tmp_path):
    """datasets knows a file by its time of modification, which rsync and git may keep."""
    path = Path(write(tmp_path / "a.jsonl", rows(8)))
    assert len(everything(Args(dataset=str(path)))) == 8
    before = path.stat()
    write(path, rows(7))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert len(everything(Args(dataset=str(path)))) == 7


TWO_STARTS = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from runtime.data import problem_set
from runtime.arguments.flags import RunFlags as Args

def check(verifier, truth, row):
    with open(sys.argv[3], "a") as log:
        log.write("x")
    time.sleep(0.02)
    return ""

problem_set.LARGE = 10
problem_set.read_source(sys.argv[2], Args())
Path(sys.argv[3] + sys.argv[4]).touch()
while not all(Path(sys.argv[3] + name).exists() for name in "ab"):
    time.sleep(0.01)
print(len(problem_set.read_problems(sys.argv[2], Args(), check)))
"""


@pytest.mark.integration
def test_two_processes_that_start_at_once_share_the_work(tmp_path):
    """Ranks, or two runs on a new file: one checks the rows, the other waits and reads; the library locks no map."""
    source = write(tmp_path / "a.jsonl", rows(60))
    (tmp_path / "start.py").write_text(TWO_STARTS)
    log = tmp_path / "log"
    command = script(str(tmp_path / "start.py"), str(ROOT), source, str(log))
    starts = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in "ab"]
    assert [start.communicate(timeout=100)[0].split()[-1] for start in starts] == ["60", "60"]
    assert len(log.read_text()) == 60


@pytest.mark.parametrize("large", [False, True])
def test_a_broken_line_is_named(tmp_path, capsys, monkeypatch, large):
    """By its file and its number in it, empty lines counted; --bad_rows drop does not hide it."""
    monkeypatch.setattr(problem_set, "LARGE", 10 if large else 1000)
    write(tmp_path / "a.jsonl", rows(12))
    (tmp_path / "b.jsonl").write_text('{"question": "1", "answer": "1"}\n\n{"question"\n')
    message = refusal(capsys, Args(dataset=f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", bad_rows="drop"))
    assert f"--dataset {tmp_path}/b.jsonl: not valid jsonl: line 3: " in message


def test_a_split_of_its_own_for_evaluation(tmp_path):
    """@SPLIT of a folder or hub id; what has none takes train. What is evaluated on, in its order, trains nothing."""
    import datasets

    parts = {"train": rows(30), "test": rows(10, first=25)}
    folder = str(tmp_path / "sums")
    datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in parts.items()}).save_to_disk(folder)
    training, evaluation = load(Args(dataset=folder, eval_dataset=f"{folder}@test", eval_prompts=8))
    assert questions(evaluation) == [row["question"] for row in rows(8, first=25)]
    assert sorted(questions(training)) == sorted(row["question"] for row in rows(25))
    assert {p.source for p in training + evaluation} == {"sums"}
    assert len(everything(Args(dataset=f"{folder}@test"))) == 10


CSV = {
    "zeros before a number": ("0017", "0017"),
    "a time": ("12:30", "12:30"),
    "a zero after the point": ("0.10", "0.10"),
    "what other programs take for nothing": ("NA", "NA"),
    "more digits than a number has": ("12345678901234567890123", "12345678901234567890123"),
    "a truth value": ("true", "true"),
    "a date": ("2024-01-05", "2024-01-05"),
    "quotes": ('"a ""b"", c"', 'a "b", c'),
    "two lines": ('"a\nb"', "a\nb"),
}


@pytest.mark.parametrize("case", CSV)
def test_csv_cells_stay_what_the_file_says(tmp_path, case):
    """Also where every cell of a column looks like a number or a time, which a reader of types would rewrite."""
    cell, text = CSV[case]
    (tmp_path / "a.csv").write_text("question,answer\n" + "".join(f"{i},{cell}\n" for i in range(3)))
    found = everything(Args(dataset=str(tmp_path / "a.csv"), verifier="exact"))
    assert [p.truth for p in found] == [text] * 3
    assert found[0].row == {"question": "0", "answer": text}


@pytest.mark.parametrize(
    ("lines", "cells", "block"),
    [
        (150, 200, 2**14),
        pytest.param(16, 15_000, sources.CSV_BLOCK, marks=pytest.mark.integration),
        pytest.param(2_000_000, 2, sources.CSV_BLOCK, marks=pytest.mark.integration),
    ],
)
def test_csv_cells_at_the_borders_of_blocks(tmp_path, monkeypatch, lines, cells, block):
    """A file that has more than one block: a line inside a cell is no row, wherever a block ends."""
    monkeypatch.setattr(sources, "CSV_BLOCK", block)
    texts = [f"{i}\n" + "x, y\n" * lines for i in range(cells)]
    (tmp_path / "a.csv").write_text("question,answer\n" + "".join(f'"{text}",7\n' for text in texts))
    assert questions(everything(Args(dataset=str(tmp_path / "a.csv")))) == texts


NOT_UTF8 = {
    "a cell": "question,answer\ncaf\xe9?,1\n".encode("latin-1"),
    "a cell far down": ("question,answer\n" + "1,1\n" * 9000 + "caf\xe9?,1\n").encode("latin-1"),
    "a name": "qu\xe9stion,answer\n1,1\n".encode("latin-1"),
    "all of it": "question,answer\n1,1\n".encode("utf-16"),
}


@pytest.mark.parametrize("case", NOT_UTF8)
@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json"])
def test_files_in_another_encoding_are_refused(tmp_path, capsys, case, suffix):
    """Excel's CSV on Windows, for one: its prompts would be b'...'."""
    (tmp_path / f"a.{suffix}").write_bytes(NOT_UTF8[case])
    message = refusal(capsys, Args(dataset=str(tmp_path / f"a.{suffix}")))
    assert f"--dataset {tmp_path}/a.{suffix}: not valid {suffix}" in message and "save it as UTF-8" in message


@pytest.mark.parametrize("large", [False, True])
def test_columns_of_bytes(tmp_path, capsys, monkeypatch, large):
    """Text that was written as bytes is text; what is no text is rejected as a prompt, and harmless elsewhere."""
    monkeypatch.setattr(problem_set, "LARGE", 2 if large else 1000)
    picture = b"\x89PNG\xff"
    good = [{"question": f"café {i}".encode(), "answer": str(i), "picture": picture} for i in range(4)]
    bad = [*good, {"question": "café".encode("latin-1"), "answer": "1", "picture": picture}]
    for name, content in (("good", good), ("bad", bad)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), tmp_path / f"{name}.parquet")
    found = everything(Args(dataset=f"{tmp_path}/good.parquet"))
    assert questions(found) == [f"café {i}" for i in range(4)]
    message = refusal(capsys, Args(dataset=f"{tmp_path}/bad.parquet"))
    assert "row 4 has a 'question' that is not UTF-8 text" in message and "b'" not in message


@pytest.mark.integration
@pytest.mark.parametrize("turned", [False, True])
def test_files_whose_columns_differ(tmp_path, monkeypatch, turned):
    """verl's GSM8K and MATH have other fields in extra_info; which one comes first decides nothing."""
    math = VERL | {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": "Solve"}],
        "extra_info": {"split": "train", "index": 0},
    }
    fewer = {key: VERL[key] for key in ("data_source", "prompt", "reward_model")}
    fewer |= {"prompt": [{"role": "user", "content": "Few"}], "index": 5}
    names = []
    for name, content in (("gsm8k", VERL), ("math", math), ("fewer", fewer)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([content]), tmp_path / f"{name}.parquet")
        names.append(f"{tmp_path}/{name}.parquet")
    for large in (1000, 2):
        monkeypatch.setattr(problem_set, "LARGE", large)
        found = everything(Args(dataset=",".join(names[::-1] if turned else names)))
        expected = [(VERL, "gsm8k"), (math, "math"), (fewer, "gsm8k")]
        assert [(p.row, p.verifier) for p in found] == (expected[::-1] if turned else expected)


def test_files_of_one_form_are_one_data_set(tmp_path):
    """A thousand shards are converted together; what pandas notes of each does not tell them apart."""
    import pandas

    for i in range(3):
        pandas.DataFrame(rows(5 + i, first=10 * i)).to_parquet(tmp_path / f"{i}.parquet")
    ((raw, files),) = sources.read_source(f"{tmp_path}/*.parquet", Args())
    assert len(raw) == 18 and len(files) == 3


@pytest.mark.parametrize("large", [False, True])
def test_a_parquet_file_without_rows(tmp_path, capsys, monkeypatch, large):
    monkeypatch.setattr(problem_set, "LARGE", 2 if large else 1000)
    table = pyarrow.Table.from_pylist(rows(4))
    pyarrow.parquet.write_table(table.slice(0, 0), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    assert len(everything(Args(dataset=f"{tmp_path}/*.parquet"))) == 4
    message = refusal(capsys, Args(dataset=f"{tmp_path}/a.parquet"))
    assert f"--dataset {tmp_path}/a.parquet has 0 distinct problems" in message


def test_folders_in_folders(tmp_path):
    """** is any number of them."""
    for place, first in (("a.jsonl", 0), ("x/b.jsonl", 5), ("x/y/c.jsonl", 10)):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        write(tmp_path / place, rows(5, first=first))
    found = everything(Args(dataset=f"{tmp_path}/**/*.jsonl"))
    assert questions(found) == [row["question"] for row in rows(15)]
    assert {p.source for p in found} == {tmp_path.name}


# ------------------------------------------------------------------------------------------------------------ mixtures


def mixer(tmp_path: Path, parts: dict, **changes) -> Args:
    write(tmp_path / "a.jsonl", rows(100)), write(tmp_path / "b.jsonl", rows(50, first=80))
    mixture = json.dumps({str(tmp_path / name): part for name, part in parts.items()})
    return Args(dataset=mixture, eval_prompts=10, **changes)


@pytest.mark.parametrize(
    ("parts", "counts"),
    [
        ({"a.jsonl": 1.0, "b.jsonl": 12}, {"a": 100, "b": 12}),
        ({"a.jsonl": 0.25, "b.jsonl": 1.0}, {"a": 25, "b": None}),  # None: 50 less those already drawn from a
        ({"b.jsonl": 1.0, "a.jsonl": 0.5}, {"b": 50, "a": 40}),  # 20 of a are in b: half of the other 80
        ({"a.jsonl": 1}, {"a": 1}),  # a number, not a share
    ],
)
def test_mixer_counts(tmp_path, parts, counts):
    found = list(problem_set.mixed_problems(mixer(tmp_path, parts), truth_error).values())
    assert len(set(questions(found))) == len(found)
    for source, count in counts.items():
        taken = [p for p in found if p.source == source]
        assert len(taken) == count or (count is None and 30 <= len(taken) <= 50)


def test_names_of_sources(tmp_path):
    names = {"data/gsm8k_train.jsonl": "gsm8k_train", "openai/gsm8k:main": "gsm8k", "data/train-*.parquet": "train"}
    names |= {"data/*.parquet": "data", "a.jsonl,b.jsonl": "a", "reasoning_gym:chain_sum?size=3": "chain_sum"}
    assert {source: problem_set.source_name(source) for source in names} == names
    for folder in "xy":
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "train.jsonl", rows(5, first=ord(folder)))
    args = mixer(tmp_path, {"x/train.jsonl": 1.0, "y/train.jsonl": 1.0})
    assert len({p.source for p in everything(args)}) == 2, "equal file names are told apart"


def test_mixer_draws_by_the_seed(tmp_path):
    def draw(seed):
        return questions(problem_set.mixed_problems(mixer(tmp_path, {"a.jsonl": 10}, seed=seed), truth_error).values())

    assert draw(1) == draw(1)
    assert set(draw(1)) != set(draw(2))
    for whole in (1.0, 100):
        found = problem_set.mixed_problems(mixer(tmp_path, {"a.jsonl": whole}), truth_error).values()
        assert questions(found) == questions(everything(Args(dataset=str(tmp_path / "a.jsonl"), eval_prompts=0)))


@pytest.mark.parametrize(
    ("mixture", "words"),
    [
        ("{a: 1}", ["not valid JSON", "for example"]),
        ("reasoning_gym:chain_sum?size=100&size=50", ["'size' is there twice"]),
        ("{}", ["names no source"]),
        ('{"a": 1.5}', ["'a'", "1.5", "fraction in (0, 1]"]),
        ('{"a": 0}', ["'a'", "count above 0"]),
        ('{"a": true}', ["'a'", "True"]),
        ('{"PLACE/a.jsonl": 50, "PLACE/a.jsonl": 20}', ["a.jsonl' is there twice"]),
        ('{"PLACE/a.jsonl": 101}', ["a.jsonl", "100 distinct problems", "101"]),
    ],
)
def test_mixer_refusals(tmp_path, capsys, mixture, words):
    write(tmp_path / "a.jsonl", rows(100))
    message = refusal(capsys, Args(dataset=mixture.replace("PLACE", str(tmp_path))))
    for word in ("--dataset", *words):
        assert word in message


# ------------------------------------------------------------------------------------------------------- known columns

CHAT_ROW = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "It is 2."}]


@pytest.mark.parametrize("case", [case for case in PUBLISHED if "verifier" in case], ids=lambda case: case["about"])
def test_known_columns(tmp_path, case):
    """Rows of published data sets need no flag; those of MATH are asked for a box."""
    (problem,) = everything(Args(dataset=write(tmp_path / "a.jsonl", [case["row"]]), eval_prompts=0))
    assert (problem.verifier, problem.truth) == (case["verifier"], case["truth"])
    *before, last = problem.messages
    assert last["role"] == "user" and case["prompt"] in last["content"]
    assert ["boxed" in message["content"] for message in before] == [True] * ("problem" in case["row"])


ELSEWHERE = [case for case in PUBLISHED if "verifier" not in case and "place" not in case]


@pytest.mark.parametrize("case", ELSEWHERE, ids=lambda case: case["says"])
def test_rows_that_would_train_on_something_else(tmp_path, capsys, case):
    assert case["says"] in refusal(capsys, Args(dataset=write(tmp_path / "a.jsonl", [case["row"]])))


SHAPES = {
    "a.json": '{"train": [%s]}',
    "b.jsonl": "\ufeff%s\n",
    "c.ndjson": "%s\n",
    "D.JSONL": "%s\n",
    "e.json": '{"train": [\n%s\n]}',
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_files_that_others_write(tmp_path, name):
    (tmp_path / name).write_text(SHAPES[name] % json.dumps({"question": "1 + 1", "answer": "2"}))
    (problem,) = everything(Args(dataset=str(tmp_path / name), eval_prompts=0))
    assert problem.truth == "2"


def test_slices_and_splits_of_a_saved_folder(tmp_path, capsys):
    import datasets

    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows(20))}).save_to_disk(tmp_path / "saved")
    assert len(everything(Args(dataset=f"{tmp_path}/saved@test[5:15]", eval_prompts=0))) == 10
    capsys.readouterr()  # of the progress bar
    assert "it has test, no split train" in refusal(capsys, Args(dataset=f"{tmp_path}/saved"))


def test_flags_win_over_known_columns(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"problem": "$1+1$", "answer": "2", "solution": "x", "hint": "add"}])
    args = Args(prompt_key="hint", ground_truth_key="solution", verifier="exact")
    (problem,) = problem_set.read_problems(source, args, truth_error).values()
    assert (problem.messages, problem.truth) == ([{"role": "user", "content": "add"}], "x")
    assert problem.verifier == "exact"


@pytest.mark.parametrize("nums", [[3, 5, 7], "[3, 5, 7]", "3 5 7", "(3,5,7)"])
def test_countdown_can_be_scored(tmp_path, nums):
    """The prompt that is made of the columns asks for what the verifier of that name accepts; a CSV file has text."""
    import rewards

    (problem,) = problem_set.read_problems(
        write(tmp_path / "a.jsonl", [{"nums": nums, "target": 22}]), Args(), truth_error
    ).values()
    assert problem.messages[0]["content"].startswith("Make 22 from the numbers 3, 5, 7: ")
    assert "<answer>" in problem.messages[0]["content"]
    assert rewards.countdown("<answer>3 * 5 + 7</answer>", problem.truth, problem.row).score == 1


VERL = {  # as its examples/data_preprocess write them
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "How many? Output the final answer after ####."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0, "answer": "36 * 2\n#### 72"},
}


def test_data_prepared_for_verl(tmp_path):
    """Its parquet files load as they are: messages, a nested ground truth, and data_source names the verifier."""
    math = VERL | {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": "Solve"}],
    }
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL, math]), path)
    first, second = everything(Args(dataset=str(path)))
    assert first.messages == VERL["prompt"] and first.truth == "72"
    assert (first.verifier, second.verifier) == ("gsm8k", "math")
    assert first.row == VERL, "extra_info stays in the row"
    (named, _) = everything(Args(dataset=str(path), verifier="exact", ground_truth_key="extra_info.answer"))
    assert (named.verifier, named.truth) == ("exact", VERL["extra_info"]["answer"])


def test_countdown_prepared_by_tinyzero(tmp_path):
    import rewards

    row = VERL | {"data_source": "countdown", "nums": [3, 5, 7], "target": 22}
    row["reward_model"] = {"style": "rule", "ground_truth": {"target": 22, "numbers": [3, 5, 7]}}
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    (problem,) = everything(Args(dataset=str(path)))
    assert (problem.messages, problem.verifier) == (VERL["prompt"], "countdown"), "its own prompt, not ours"
    assert rewards.countdown("<answer>3 * 5 + 7</answer>", problem.truth, problem.row).score == 1


def test_json_lines_named_json_and_a_column_of_type_map(tmp_path, capsys):
    """Both are read, the file of columns without the maps, which a warning names."""
    expected = questions(everything(Args(dataset=write(tmp_path / "a.jsonl", rows()))))
    assert questions(everything(Args(dataset=write(tmp_path / "a.json", rows())))) == expected
    maps = pyarrow.array([[("k", 1)]] * 30, pyarrow.map_(pyarrow.string(), pyarrow.int64()))
    table = pyarrow.Table.from_pylist(rows()).append_column("counts", maps)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert questions(everything(Args(dataset=str(tmp_path / "a.parquet")))) == expected
    assert "left out columns of type map: counts" in capsys.readouterr().out


def test_a_closing_answer_never_stays_in_the_prompt(tmp_path, capsys):
    source = write(tmp_path / "a.jsonl", [{"question": CHAT_ROW * 2, "answer": "2"}])
    (problem,) = everything(Args(dataset=source))
    assert problem.messages == [*CHAT_ROW, CHAT_ROW[0]]
    source = write(tmp_path / "b.jsonl", [{"question": CHAT_ROW[1:], "answer": "2"}])
    assert "only messages of the assistant" in refusal(capsys, Args(dataset=source))


def test_dotted_columns(tmp_path, capsys):
    content = [{"task": {"text": "1 + 1 =", "gold": {"value": 2}}, "a.b": "x"}]
    source = write(tmp_path / "a.jsonl", content)
    (problem,) = everything(Args(dataset=source, prompt_key="task.text", ground_truth_key="task.gold.value"))
    assert (problem.messages[0]["content"], problem.truth) == ("1 + 1 =", "2")
    (problem,) = everything(Args(dataset=source, prompt_key="a.b", ground_truth_key="task.gold.value"))
    assert problem.messages[0]["content"] == "x", "a column of that very name comes first"
    message = refusal(capsys, Args(dataset=source, prompt_key="task.text", ground_truth_key="task.gold.none"))
    assert "row 0 has no 'task.gold.none'" in message


def test_problems_of_reasoning_gym_by_their_answers(refused):
    """min_answer leaves out smaller answers and nothing else; a task whose answers are no numbers cannot have it."""
    task = "reasoning_gym:chain_sum?size=60&min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    rows = sources.gym_rows(task, 1)
    assert {float(row["answer"]) < 0 for row in rows} == {True, False}
    assert sources.gym_rows(f"{task}&min_answer=0", 1) == [row for row in rows if float(row["answer"]) >= 0]
    assert sources.gym_rows(f"{task}&min_answer=-99", 1) == rows
    for wrong in ("reasoning_gym:leg_counting?size=2&min_answer=[]", "reasoning_gym:letter_jumble?size=2&min_answer=0"):
        assert f"--dataset {wrong}" in refused(sources.gym_rows, wrong, 1)


@pytest.mark.parametrize(("task", "verifier"), [("spell_backward", "reasoning_gym"), ("chain_sum", "last_number")])
def test_tasks_of_reasoning_gym_need_no_verifier(task, verifier):
    """Answers that are words are scored by the task itself; numbers as before."""
    import rewards

    problems = everything(Args(dataset=f"reasoning_gym:{task}?size=40", eval_prompts=5))
    assert {p.verifier for p in problems} == {verifier}
    assert ("<answer>" in problems[0].messages[0]["content"]) == (verifier == "reasoning_gym")
    for p in problems:
        assert rewards.find_verifier(p.verifier)(f"<answer>{p.truth}</answer>", p.truth, p.row).score == 1


def test_several_evaluation_sources(tmp_path, capsys):
    """The first ones of each, none of them trained on; the name of a source separates its results."""
    for name, first in (("train", 0), ("a", 20), ("b", 28)):
        write(tmp_path / f"{name}.jsonl", rows(30 if name == "train" else 10, first=first))
    mixture = json.dumps({f"{tmp_path}/a.jsonl": 4, f"{tmp_path}/b.jsonl": 0.5})
    args = Args(dataset=f"{tmp_path}/train.jsonl", eval_dataset=mixture)
    training, evaluation = load(args)
    assert questions(evaluation) == [row["question"] for row in rows(4, first=20) + rows(5, first=28)]
    assert [p.source for p in evaluation] == ["a"] * 4 + ["b"] * 5
    assert sorted(questions(training)) == sorted(row["question"] for row in rows(20) + rows(4, first=24))
    args = Args(dataset=f"{tmp_path}/train.jsonl", eval_dataset=json.dumps({f"{tmp_path}/a.jsonl": 11}))
    message = refusal(capsys, args)
    assert "--eval_dataset" in message and "has 10 distinct problems, 11 asks for 11" in message


# ------------------------------------------------------------------------------------------------------------ bad rows

BAD = {case["about"]: (case["row"], case["says"]) for case in PUBLISHED if "place" in case}  # of a bad row behind 7


@pytest.mark.parametrize(
    ("case", "large"), [*((case, False) for case in BAD), ("half an emoji in a message", True), ("not an object", True)]
)
def test_bad_rows(tmp_path, capsys, monkeypatch, case, large):
    monkeypatch.setattr(problem_set, "LARGE", 10 if large else 1000)
    bad, words = BAD[case]
    source = write(tmp_path / "a.jsonl", [*rows(7), bad, *rows(20, first=7)])
    message = refusal(capsys, Args(dataset=source))
    assert words in message and "1 of 28 rows" in message and "--bad_rows drop" in message
    found = everything(Args(dataset=source, bad_rows="drop", eval_prompts=5))
    assert len(found) == 27
    said = capsys.readouterr().out
    assert words in said and "--bad_rows drop" in said


@pytest.mark.parametrize("large", [False, True])
def test_bad_rows_of_every_kind_in_one_file(tmp_path, capsys, monkeypatch, large):
    """Each is counted and dropped alone; processes that check many rows find the same ones, and the same complaint."""
    monkeypatch.setattr(problem_set, "LARGE", 10 if large else 1000)
    source = write(tmp_path / "a.jsonl", [*rows(7), *(bad for bad, _ in BAD.values()), *rows(20, first=7)])
    first = next(iter(BAD.values()))[1]
    message = refusal(capsys, Args(dataset=source))
    assert first in message and f"{len(BAD)} of {27 + len(BAD)} rows" in message
    found = everything(Args(dataset=source, bad_rows="drop", eval_prompts=5))
    assert sorted(questions(found)) == sorted(row["question"] for row in rows(27))
    assert first in capsys.readouterr().out


@pytest.mark.parametrize("large", [False, True])
def test_columns_of_another_kind_than_they_are_known_for(tmp_path, capsys, monkeypatch, large):
    """A list of numbers where verifiers are named, and a reward_model that holds no ground truth."""
    monkeypatch.setattr(problem_set, "LARGE", 2 if large else 1000)
    for value in (5, "ground_truth", ["ground_truth"]):
        source = write(tmp_path / "a.jsonl", [{"prompt": "1 + 1", "reward_model": value}] * 5)
        assert "--prompt_key question" in refusal(capsys, Args(dataset=source))
    source = write(tmp_path / "b.jsonl", [{"question": "1 + 1", "answer": "2", "kind": [1, 2]}] * 5)
    message = refusal(capsys, Args(dataset=source, verifier_key="kind"))
    assert "row 0 has a list of something else than names in its 'kind'" in message


@pytest.mark.parametrize("large", [False, True])
def test_numbers_of_any_length(tmp_path, monkeypatch, large):
    """Python reads no number of more than 4,300 digits unless told to."""
    monkeypatch.setattr(problem_set, "LARGE", 2 if large else 1000)
    number = "7" * 5000
    (tmp_path / "a.jsonl").write_text("".join(f'{{"question": "{i}", "answer": {number}}}\n' for i in range(5)))
    (tmp_path / "b.json").write_text(f'[{{"question": "x", "answer": {number}}}]')
    found = everything(Args(dataset=f"{tmp_path}/a.jsonl,{tmp_path}/b.json", verifier="exact"))
    assert [p.truth for p in found] == [number] * 6


def test_every_row_without_the_column(tmp_path, capsys):
    """Then the name is wrong, not the rows: nothing is dropped, the columns that are there are named."""
    source = write(tmp_path / "a.jsonl", [{"task": "1 + 1", "gold": "2"}] * 20)
    message = refusal(capsys, Args(dataset=source, bad_rows="drop"))
    assert "--prompt_key question" in message and "it has: task, gold" in message


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", '{"question": "1"}', ["not valid json", "not a list of rows"]),
        ("a.jsonl", json.dumps(rows(2)), ["row 0 is list", "a file with a list must end in .json"]),
        ("a.jsonl", json.dumps(rows(2), indent=1), ["line 1: ", "a file with a list must end in .json"]),
        ("a.csv", "question,answer,answer\n1,2,3\n", ["two columns have one name", "question, answer, answer"]),
        ("a.parquet", "not parquet", ["not valid parquet"]),
        ("a.jsonl", '{"question": "1", "answer": "1"}\n' + "[" * 100_000, ["not valid jsonl", "line 2", "recursion"]),
        ("a.jsonl", '{"question": "1", "answer": "1", "answer": "2"}', ["line 1", "'answer' is there twice"]),
        ("a.json", "[" * 100_000, ["not valid json", "recursion"]),
        ("a.txt", "1 + 1", [".jsonl", ".parquet"]),
    ],
)
def test_files_that_are_not_what_they_say(tmp_path, capsys, name, text, words):
    (tmp_path / name).write_text(text)
    message = refusal(capsys, Args(dataset=str(tmp_path / name)))
    for word in ("--dataset", *words):
        assert word in message


# ----------------------------------------------------------------------------------------------------------- templates


@pytest.fixture(scope="module")
def tokenizer(tiny):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny)


CHAT = [
    {"role": "system", "content": "Be  brief.\n"},
    {"role": "user", "content": "1 + 1 = "},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and «ß» 2?"},
]


def test_own_template_is_the_tokenizers(tokenizer):
    for messages in (CHAT, CHAT[1:2]):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert rendering.render([messages], tokenizer, None) == [ids]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", "<|im_start|>user\n1 + 1 = <|im_end|>\n<|im_start|>assistant\n"),
        ("tulu", "<|user|>\n1 + 1 = \n<|assistant|>\n"),
        ("question_answer", "Question: 1 + 1 = \nAnswer:"),
        (
            "tulu",  # of a whole chat: it ends an answer
            "<|system|>\nBe  brief.\n\n<|user|>\n1 + 1 = \n<|assistant|>\n2<|im_end|>\n"
            "<|user|>\nand «ß» 2?\n<|assistant|>\n",
        ),
    ],
)
def test_named_templates(tokenizer, name, expected):
    chat = CHAT if "brief" in expected else CHAT[1:2]
    (ids,) = rendering.render([chat], tokenizer, values.CHAT_TEMPLATES[name])
    assert tokenizer.decode(ids) == expected


def test_r1_asks_for_what_the_verifier_takes(tokenizer):
    import rewards

    text = tokenizer.decode(rendering.render([CHAT[1:2]], tokenizer, values.CHAT_TEMPLATES["r1"])[0])
    assert text.endswith("\nUser: 1 + 1 = \nAssistant:")
    form = text.split("tags: ")[-1].partition("answer>: ")[2].partition(".\n")[0]
    assert rewards.format_(form, "", {}).score == 1


def test_exactly_one_bos(tokenizer, tiny):
    """A tokenizer that begins texts with a BOS, as Llama's: templates that do not write it get it, the others none."""
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    llama = AutoTokenizer.from_pretrained(tiny)
    bos = llama.bos_token_id
    llama.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{llama.bos_token} $A", special_tokens=[(llama.bos_token, bos)]
    )
    assert llama("1")["input_ids"][0] == bos
    for template in ("question_answer", "chatml"):  # the second writes this tokenizer's BOS itself
        (ids,) = rendering.render([CHAT[1:2]], llama, values.CHAT_TEMPLATES[template])
        assert ids[0] == bos and ids[1] != bos
    (ids,) = rendering.render([CHAT[1:2]], tokenizer, values.CHAT_TEMPLATES["question_answer"])
    assert ids[0] != bos, "this one adds none by itself"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of datasets, and 10 rows or prompts are many."""
    import datasets

    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setattr(problem_set, "LARGE", 10)
    return folder


DATED = {
    "in the text": "{{ strftime_now('%d %b %Y %H:%M:%S') }} {{ messages[0]['content'] }}",
    "Llama 3.2": "{% if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "Today Date: {{ date_string }} {{ messages[0]['content'] }}",
    "gpt-oss": "{% macro system() %}Current date: {{ strftime_now('%Y-%m-%d') }}{% endmacro %}{{ system() }}"
    "{{ messages[0]['content'] }}",
}


@pytest.mark.integration
@pytest.mark.parametrize("case", DATED)
@pytest.mark.parametrize("large", [False, True])
def test_prompts_do_not_depend_on_the_day(tiny, tmp_path, monkeypatch, cache, case, large):
    """Else a run that was preempted would find other problems after midnight, and reject to go on."""
    from transformers import AutoTokenizer
    from transformers.utils import chat_template_utils

    monkeypatch.setattr(problem_set, "LARGE", 2 if large else 1000)
    dated = AutoTokenizer.from_pretrained(tiny)
    dated.chat_template = DATED[case]
    (tmp_path / "dated.jinja").write_text(DATED[case])

    def on(year: int) -> list:
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls(year, 2, 3, 4, 5, 6)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        found = []
        for template in (None, str(tmp_path / "dated.jinja")):
            args = Args(chat_template=template)
            problems = [samples.Problem([{"role": "user", "content": f"{i} + 1"}], "1", "exact", {}) for i in (1, 2)]
            problems = rendering.render_prompts(problems, dated, args)
            text = dated.decode(problems[0].prompt_ids)
            found.append([directory.data_digest(problems), rendering.prompt_key(dated, args), text])
            shutil.rmtree(cache, ignore_errors=True)
        return found

    assert on(2025) == on(2031)
    assert "2024" in on(2025)[0][-1], "a date, as the template asks for one"


def test_mistrals_own_tokenizer_is_not_taken(tiny, tmp_path, tokenizer):
    """transformers takes it wherever mistral-common is installed and the model has a tekken.json."""
    folder = shutil.copytree(tiny, tmp_path / "mistral")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mistral"}))
    pattern = {"pattern": ".", "num_vocab_tokens": 256, "default_vocab_size": 276, "default_num_special_tokens": 20}
    words = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None} for i in range(256)]
    tekken = {"config": pattern | {"version": "v7"}, "vocab": words}
    (folder / "tekken.json").write_text(json.dumps(tekken))
    found = rendering.load_tokenizer(Args(model_name_or_path=str(folder)))
    assert rendering.render([CHAT], found, None) == rendering.render([CHAT], tokenizer, None)


NO_SYSTEM = (  # as Gemma's
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
)
REFUSING = {
    "no system role": (NO_SYSTEM, "of system, user: System role not supported", 'system message (--system_prompt "")'),
    "broken": ("{% for m in messages %}", "of system, user: ", "choose another --chat_template"),
    "an error of its own": ("{{ messages[0]['content'] + 1 }}", "of system, user: can", "another --chat_template"),
    "something undefined": ("{{ nothing.at_all }}", "of system, user: 'nothing' is undefined", "--chat_template"),
}


@pytest.mark.parametrize("case", REFUSING)
@pytest.mark.parametrize("large", [False, True])
def test_a_template_that_does_not_take_the_prompt(tokenizer, tmp_path, monkeypatch, cache, capsys, case, large):
    """Its words and the remedy, not a traceback; also where another process renders."""
    monkeypatch.setattr(problem_set, "LARGE", 2 if large else 1000)
    template, why, remedy = REFUSING[case]
    (tmp_path / "mine.jinja").write_text(template)
    args = Args(chat_template=str(tmp_path / "mine.jinja"))
    problems = [samples.Problem(CHAT[:2], "1", "exact", {}) for _ in range(3)]
    message = refusal(capsys, args, lambda args: rendering.render_prompts(problems, tokenizer, args))
    assert f"the chat template does not take a prompt {why}" in message and remedy in message


@pytest.mark.parametrize(
    ("asked", "given", "expected"),
    [
        (CHAT[:2], None, ["Be  brief.\n"]),
        (CHAT[:2], "Add.", ["Add."]),
        (CHAT[:2], "", []),
        (CHAT[1]["content"], "Add.", ["Add."]),
        (CHAT[1]["content"], "", []),
    ],
)
def test_one_system_message(tmp_path, asked, given, expected):
    """The flag's takes the place of the data's, and "" leaves both out; the data's takes the place of ours for MATH."""
    source = write(tmp_path / "a.jsonl", [{"problem": asked, "answer": "2"}])
    (problem,) = everything(Args(dataset=source, system_prompt=given))
    assert [m["content"] for m in problem.messages if m["role"] == "system"] == expected
    assert problem.messages[-1] == CHAT[1] and len(problem.messages) == 1 + len(expected)


THINKING = (  # as Qwen3's
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)


def test_variables_of_the_template(tiny, tmp_path, capsys, cache, monkeypatch):
    """They reach the template, also from another process, and are part of the key; one it does not read is rejected."""
    from transformers import AutoTokenizer

    qwen = AutoTokenizer.from_pretrained(tiny)
    qwen.chat_template = THINKING
    (tmp_path / "qwen.jinja").write_text(THINKING)
    off = '{"enable_thinking": false}'

    def texts(**changes) -> list[str]:
        args = Args(**changes)
        problems = [samples.Problem(CHAT[1:2], "1", "exact", {}) for _ in range(3)]
        return [qwen.decode(p.prompt_ids) for p in rendering.render_prompts(problems, qwen, args)]

    for large in (1000, 2):
        monkeypatch.setattr(problem_set, "LARGE", large)
        assert texts() == texts(chat_template=str(tmp_path / "qwen.jinja")) == ["user: 1 + 1 = "] * 3
        assert texts(chat_template=off) == ["user: 1 + 1 = <think></think>"] * 3
    given = [None, off, '{"enable_thinking": true}', '{"enable_thinking": 0}']
    assert len({rendering.prompt_key(qwen, Args(chat_template=text)) for text in given}) == 4
    spaced = '{"b": 1,   "a": 2}', '{"a": 2, "b": 1}'
    assert len({rendering.prompt_key(qwen, Args(chat_template=text)) for text in spaced}) == 1
    args = Args(model_name_or_path=str(tiny), chat_template='{"enable_think": false}')
    message = refusal(capsys, args, lambda args: rendering.render_prompts([], qwen, args))
    assert f"--chat_template: the template of {tiny} has no variable 'enable_think'" in message


ASKED = [{"role": "user", "content": "tea?"}]
TOOL = {"type": "function", "function": {"name": "price_of", "arguments": '{"item": "tea"}'}}  # also of a call
CALLED = [
    *ASKED,
    {"role": "assistant", "content": None, "tool_calls": [TOOL], "reasoning_content": "hm", "name": None},
    {"role": "tool", "content": "7", "tool_call_id": "c1", "tool_calls": []},
]
WRITES_ALL = (
    "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.role }}={{ m.content }}"
    "{{ m.reasoning_content }}{{ m.tool_call_id }}{% if 'name' in m %}named{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %};{% endfor %}"
)


def test_tools_and_calls_of_a_row_reach_the_template(tokenizer, tmp_path, cache, monkeypatch):
    """Each row's own, of few rows and of many; equal questions with other tools are other problems."""
    (tmp_path / "all.jinja").write_text(WRITES_ALL)
    calls = 'user=tea?;assistant=Nonehmprice_of{"item": "tea"};tool=7c1;'
    content = [{"messages": CALLED, "tools": tools, "ground_truth": "7"} for tools in ([TOOL], json.dumps([TOOL] * 2))]
    args = Args(dataset=write(tmp_path / "a.jsonl", content), chat_template=str(tmp_path / "all.jinja"))
    for large in (1000, 2):
        monkeypatch.setattr(problem_set, "LARGE", large)
        problems = rendering.render_prompts(everything(args), tokenizer, args)
        texts = [tokenizer.decode(problem.prompt_ids) for problem in problems]
        assert texts == ["[price_of]" + calls, "[price_of]" * 2 + calls]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"tools": [TOOL]}, "does not write 'tools', which 1 of 1 prompts have"),
        ({"messages": CALLED}, "does not write 'tool_calls'"),
        ({"messages": [{"role": "user", "content": None}]}, "message of the user without content"),
        ({"messages": [ASKED[0] | {"name": "Ann"}]}, "warning: --chat_template: it does not write 'name'"),
    ],
)
def test_a_field_that_the_template_does_not_write_is_named(tokenizer, tmp_path, capsys, change, said):
    args = Args(dataset=write(tmp_path / "a.jsonl", [{"messages": ASKED, "ground_truth": "7"} | change]))
    with contextlib.suppress(SystemExit):
        rendering.render_prompts(everything(args), tokenizer, args)
        assert "warning" in said, "it was accepted"
    output = capsys.readouterr()
    assert said in output.out + output.err


def test_special_tokens_that_verifiers_look_for_are_named(tiny, capsys):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<answer>", "</answer>"]})
    rendering.render_prompts([], tokenizer, Args(stop_strings=("<|endoftext|>", ".")))
    assert "decode: <|endoftext|>, <answer>, </answer>" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n", True),
        (
            "A conversation between User and Assistant.\nUser: 1 + 1 =\nAssistant: Let me think.\n<think>",
            True,
        ),  # TinyZero
        ("<|start_header_id|>user<|end_header_id|>\n\n1 + 1 =", True),
        ("[INST] 1 + 1 = [/INST]", True),
        ("<｜User｜>1 + 1 =<｜Assistant｜><think>\n", True),  # R1's distilled models
        ("What does the assistant: field of a chat say?\nAssistant: yes\nand then?", False),
        ("1 + 1 = ", False),
    ],
)
def test_no_template_is_put_around_another(tokenizer, capsys, text, wrapped):
    """Unless it is named; a few such prompts among others are none of a template's."""

    def render(texts: list[str], template: str | None = None) -> list[str]:
        problems = [samples.Problem([{"role": "user", "content": t}], "1", "exact", {}) for t in texts]
        found = rendering.render_prompts(problems, tokenizer, Args(chat_template=template))
        return [tokenizer.decode(problem.prompt_ids) for problem in found]

    if wrapped:
        said = refusal(capsys, None, lambda args: render([text, text, "plain"]))
        assert "2 of the first 3 prompts" in said and "--chat_template none" in said and "'{}'" in said
    else:
        render([text, text, "plain"])
    capsys.readouterr()
    among = render([text, "plain", "simple"])
    assert among[1].startswith("<|im_start|>user\nplain") and among[0].startswith(f"<|im_start|>user\n{text[:9]}")
    assert render([text, text], "{}")[0].startswith("<|im_start|>user\n")
    assert render(["Solve\n", text], "none") == ["Solve\n", text]
    assert not capsys.readouterr().out


def test_the_number_of_evaluation_problems_is_said(tmp_path, capsys):
    train, test = write(tmp_path / "train.jsonl", rows(30)), write(tmp_path / "test.jsonl", rows(10, first=40))
    load(Args(dataset=train, eval_dataset=test, eval_prompts=7))
    assert f"--eval_prompts 7: the first 7 of the 10 of {test}\n" in capsys.readouterr().out
    load(Args(dataset=train, eval_dataset=test, eval_prompts=70))
    assert f"--eval_prompts 70: all of the 10 of {test}\n" in capsys.readouterr().out
    for eval_prompts in (0, 10):
        load(Args(dataset=train, eval_dataset=test, eval_prompts=eval_prompts))
        assert not capsys.readouterr().out


FAULTS = {
    "missing.jsonl": "",
    "column.jsonl": '{"problem": "1 + 1 =", "answer": "2"}\n',
    "truth.jsonl": '{"question": "1 + 1 =", "answer": "a word"}\n',
    "broken.jsonl": '{"question": "1 + 1 =",\n',
    "broken.json": "[1, 2",
    "suffix.txt": "1 + 1\n",
    "doubts.jsonl": '{"question": "1 + 1 =", "answer": "2"}\n{"question": "1 + 1 =", "answer": "3"}\n',
    "reasoning_gym:no_such_task": "",
}


@pytest.mark.parametrize("mixed", [False, True], ids=["alone", "in a mixture"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_message_names_the_flag_whose_data_are_wrong(tmp_path, capsys, fault, mixed):
    """--eval_dataset for the evaluation's file, --dataset for the training's; also after one of the other was read."""
    good = write(tmp_path / "good.jsonl", rows(30))
    bad = fault if ":" in fault else str(tmp_path / fault)
    if FAULTS[fault]:
        (tmp_path / fault).write_text(FAULTS[fault])
    given = json.dumps({bad: 1.0}) if mixed else bad
    for flag, others in (("eval_dataset", {"dataset": good}), ("dataset", {"eval_dataset": good})):
        args = Args(**others, **{flag: given}, prompt_key="question", eval_prompts=1, num_unique_prompts_rollout=1)
        with contextlib.suppress(SystemExit):
            load(args)
        said = "".join(capsys.readouterr())
        line = next(line for line in said.splitlines() if line.startswith(("error: ", "warning: ")))
        assert re.search(rf"--{flag} \S*{re.escape(fault)}", line), line
        assert len(re.findall(r"--(?:eval_)?dataset\b", line)) == 1, line


# ------------------------------------------------------------------------------------------- no truth, a reward model


def test_a_reward_model_alone_needs_no_truth(tmp_path, capsys):
    """verl's data for alignment: its truths mean nothing and its verifier is unknown; or prompts and nothing else."""
    hh = VERL | {"data_source": "Dahoas/full-hh-rlhf", "ability": "alignment"}
    hh["reward_model"] = {"style": "model", "ground_truth": "should not be used"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([hh]), tmp_path / "hh.parquet")
    plain = write(tmp_path / "prompts.jsonl", [{"prompt": "Hello", "chosen": "Hi"}])
    known = {"reward_model_name_or_path": "scorer"}
    alone = Args(**known, dataset=f"{tmp_path}/hh.parquet", verifier="reward_model")
    (problem,) = everything(alone)
    assert (problem.messages, problem.verifier) == (VERL["prompt"], "reward_model")
    alone = Args(**known, dataset=plain, prompt_key="prompt", verifier="reward_model")
    (problem,) = everything(alone)
    assert (problem.truth, problem.verifier) == ("", "reward_model")
    message = refusal(capsys, Args(**known, dataset=f"{tmp_path}/hh.parquet"), everything)
    assert "no verifier 'Dahoas/full-hh-rlhf'" in message
    message = refusal(capsys, Args(**known, dataset=plain, prompt_key="prompt"), everything)
    assert "--ground_truth_key answer" in message
    typo = Args(**known, dataset=plain, prompt_key="prompt", verifier="reward_model", ground_truth_key="chosn")
    assert "--ground_truth_key chosn" in refusal(capsys, typo, everything)


@pytest.mark.parametrize("large", [False, True])
def test_a_verifier_that_looks_at_no_truth_needs_none(tmp_path, monkeypatch, large):
    monkeypatch.setattr(problem_set, "LARGE", 2 if large else 1000)
    source = write(tmp_path / "a.jsonl", [{"question": str(i)} for i in range(4)])
    assert [p.truth for p in everything(Args(dataset=source, verifier="format"))] == [""] * 4


# -------------------------------------------------------------------------------------------------------- long prompts


def test_overlong_prompts(tokenizer, capsys):
    def problems() -> list[samples.Problem]:
        texts = ["short", "one " * 40, "also"]
        return [samples.Problem([{"role": "user", "content": text}], "1", "exact", {}) for text in texts]

    whole = rendering.render([p.messages for p in problems()], tokenizer, None)
    kept = {}
    for how in ("drop", "left", "right"):
        kept[how] = rendering.render_prompts(problems(), tokenizer, Args(max_prompt_length=30, overlong_prompts=how))
        said = capsys.readouterr().out
        assert f"--overlong_prompts {how}" in said and "1 of 3 prompts" in said and f"has {len(whole[1])}" in said
    assert [p.prompt_ids.tolist() for p in kept["drop"]] == [whole[0], whole[2]]
    assert [p.prompt_ids.tolist() for p in kept["left"]] == [whole[0], whole[1][-30:], whole[2]]
    assert [p.prompt_ids.tolist() for p in kept["right"]] == [whole[0], whole[1][:30], whole[2]]
    message = refusal(
        capsys, Args(max_prompt_length=30), lambda args: rendering.render_prompts(problems(), tokenizer, args)
    )
    for word in ("1 of 3 prompts", "--max_prompt_length 30", "one one", "--overlong_prompts drop"):
        assert word in message
    exactly = Args(max_prompt_length=len(whole[1]))
    assert [p.prompt_ids.tolist() for p in rendering.render_prompts(problems(), tokenizer, exactly)] == whole


# ------------------------------------------------------------------------------------------------- many prompts, cached


def computed(cache: Path) -> dict[Path, int]:
    """The files that were computed by a map, and when."""
    return {path: path.stat().st_mtime_ns for path in (cache / "rlvr").rglob("*.arrow")}


def test_many_prompts_come_from_the_cache(tokenizer, tmp_path, cache):
    """Several processes give what one gives, the second time nothing is rendered, and any change is another key."""
    content = [[{"role": "user", "content": f"{i} + 1"}] for i in range(40)]
    lines = [{"question": "", "answer": "1"}, *({"question": f"{i} + 1", "answer": "1"} for i in range(40))]
    source = write(tmp_path / "a.jsonl", lines)

    def ids(**changes) -> list[list[int]]:
        problems = everything(Args(dataset=source, bad_rows="drop"))
        return [p.prompt_ids.tolist() for p in rendering.render_prompts(problems, tokenizer, Args(**changes))]

    expected = {t: rendering.render(content, tokenizer, values.CHAT_TEMPLATES[t]) for t in ("chatml", "tulu")}
    assert ids(chat_template="chatml") == expected["chatml"]
    first = computed(cache)
    assert first
    assert ids(chat_template="chatml") == expected["chatml"]
    assert computed(cache) == first
    assert ids(chat_template="tulu") == expected["tulu"], "the template is part of the key"
    assert set(computed(cache)) > set(first)


def test_a_row_of_a_large_file_is_read_when_it_is_asked_for(tmp_path, cache):
    """Nothing of it is kept; a digest of the data knows it, and what is assigned wins."""
    problem, other = everything(Args(dataset=write(tmp_path / "a.jsonl", rows(40))))[:2]
    assert problem.row == rows(1)[0] and problem.truth == rows(1)[0]["answer"]
    for name in ("messages", "row", "truth", "tools"):
        with pytest.raises(AttributeError):
            object.__getattribute__(problem, name)
    assert not hasattr(problem, "answer") and problem.record() != other.record()
    problem.messages = []
    assert problem.messages == [] and other.messages != []


@pytest.mark.skipif(bool(sandbox.namespaces_refused()), reason="the kernel gives no namespaces here")
def test_rows_of_code_that_nobody_could_check_are_checked_elsewhere(tmp_path, cache, monkeypatch, capsys):
    """A login node may give no namespaces: what it lets through is not in the cache for a node that has them."""
    tests = [{"stdin": "", "stdout": "1"}]
    content = [{"question": f"Print 1, {i}", "answer": tests, "solution": f"print({1 + (i == 5)})"} for i in range(12)]
    args = Args(dataset=write(tmp_path / "a.jsonl", content), verifier="code")
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "namespaces_refused", lambda: "not permitted")
        assert len(everything(args)) == 12
        assert computed(cache)
    assert "1 of 12 rows" in (said := refusal(capsys, args)) and "its own solution, in column solution" in said


@pytest.mark.integration
def test_many_rows_come_from_the_cache(tmp_path, cache, monkeypatch, capsys):
    """The same problems and the same complaint as without it; a changed file, argument or verifier is another key."""
    content = [
        *rows(30),
        {"question": None, "answer": "1"},
        {"question": "2 + 2", "answer": "four"},
        *rows(9, first=40),
    ]
    source = write(tmp_path / "a.jsonl", content)

    def show(**changes) -> list[tuple]:
        found = everything(Args(**{"dataset": source, "bad_rows": "drop", **changes}))
        return [(p.messages, p.truth, p.verifier, p.row, p.source) for p in found]

    with monkeypatch.context() as patch:
        patch.setattr(problem_set, "LARGE", 1000)
        plain = show()
    said = capsys.readouterr().out
    assert "rows 30, 31" in said and not computed(cache)
    complaint = refusal(capsys, Args(dataset=source))
    assert "rows 30, 31" in complaint and "row 30 has an empty 'question'" in complaint
    first = computed(cache)
    assert first
    for _ in range(2):
        assert show() == plain
        assert capsys.readouterr().out == said
    assert computed(cache) == first, "the rows are not checked again"
    assert show(verifier="exact")[0][2] == "exact"
    second = computed(cache)
    assert set(second) > set(first)
    own = tmp_path / "mine.py"
    for text in ("def f(response, truth, row): return 1", "def f(response, truth, row): return 2"):
        own.write_text(text)
        show(verifier=f"{own}:f")
        assert len(computed(cache)) > len(second), "the code of a verifier is part of the key"
        second = computed(cache)
    write(tmp_path / "a.jsonl", rows(12))
    assert len(show()) == 12
    assert set(first) < set(computed(cache))


def test_prompt_key(tokenizer, tiny, monkeypatch):
    """It names the tokenizer, the template and the date: an entry of one of them is not used for another."""
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(tiny)
    assert rendering.prompt_key(other, Args()) == rendering.prompt_key(tokenizer, Args())
    other.add_tokens(["+ 1"])
    keys = {rendering.prompt_key(t, Args(chat_template=c)) for t in (tokenizer, other) for c in (None, "tulu", "r1")}
    assert len(keys) == 6
    monkeypatch.setattr(rendering, "TODAY", datetime.datetime(2030, 1, 1))
    assert rendering.prompt_key(tokenizer, Args()) not in keys

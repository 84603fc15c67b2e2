"""Where problems come from: files, folders, mixtures, known columns, bad rows, templates, long prompts, preparing."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pyarrow.parquet
import pytest
from helpers import ROOT, real, script

from grpo import Args
from rewards import truth_error
from runtime import data, records, sandbox, sources


def rows(count: int = 30, first: int = 0) -> list[dict]:
    return [{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(first, first + count)]


def write(path: Path, content: list) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return str(path)


def load(args: Args) -> tuple[list[records.Problem], list[records.Problem]]:
    return data.load_problems(args, truth_error)


def refusal(capsys, args: Args, load=load) -> str:
    with pytest.raises(SystemExit) as end:
        load(args)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


def everything(args: Args) -> list[records.Problem]:
    return list(data.mixed_problems(args, truth_error).values())


def questions(problems: list[records.Problem]) -> list[str]:
    return [p.messages[-1]["content"] for p in problems]


# ------------------------------------------------------------------------------------------------------------- sources


def test_several_files(tmp_path):
    first, second = write(tmp_path / "a.jsonl", rows(20)), write(tmp_path / "b.jsonl", rows(20, first=15))
    for source in (f"{first},{second}", f"{tmp_path}/*.jsonl"):
        found = everything(Args(dataset=source, eval_prompts=5))
        assert sorted(questions(found)) == sorted(row["question"] for row in rows(35)), "five are in both files"


def test_a_folder_saved_by_datasets(tmp_path, capsys):
    import datasets

    table = datasets.Dataset.from_list(rows())
    table.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": table, "test": table.select(range(9))}).save_to_disk(tmp_path / "splits")
    assert len(everything(Args(dataset=str(tmp_path / "plain")))) == 30
    assert len(everything(Args(dataset=str(tmp_path / "splits")))) == 30
    assert len(everything(Args(dataset=str(tmp_path / "splits"), dataset_split="test", eval_prompts=1))) == 9
    (tmp_path / "other").mkdir()
    capsys.readouterr()  # datasets has shown a bar
    assert f"--dataset {tmp_path / 'other'}" in refusal(capsys, Args(dataset=str(tmp_path / "other")))


def test_ends_of_line_inside_a_text(tmp_path):
    """JSON allows U+2028 unescaped in a string; a reader that splits there sees two broken rows."""
    content = rows() + [{"question": "one\u2028two \u0085 three", "answer": "3"}]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
    (tmp_path / "a.jsonl").write_text(text)
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
    import datasets

    content = [{"question": str(i), "answer": answer} for i, answer in enumerate(CHANGED_BY_THE_LIBRARY[case])]
    path = write(tmp_path / "a.jsonl", content)
    (tmp_path / "b.json").write_text(json.dumps(content))
    for source in (path, str(tmp_path / "b.json")):
        assert [p.row for p in everything(Args(dataset=source, verifier="format"))] == content
    try:
        found = datasets.load_dataset("json", data_files=path, split="train").to_list()
    except (ValueError, datasets.exceptions.DatasetGenerationError):
        return
    assert json.dumps(found, default=repr) != json.dumps(content), "nothing is left that speaks against its reader"


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
from grpo import Args
from runtime import data

def check(verifier, truth, row):
    with open(sys.argv[3], "a") as log:
        log.write("x")
    time.sleep(0.02)
    return ""

data.LARGE = 10
data.read_source(sys.argv[2], Args())
Path(sys.argv[3] + sys.argv[4]).touch()
while not all(Path(sys.argv[3] + name).exists() for name in "ab"):
    time.sleep(0.01)
print(len(data.read_problems(sys.argv[2], Args(), check)))
"""


def test_two_processes_that_start_at_once_share_the_work(tmp_path):
    """Ranks, or two runs on a new file: one checks the rows, the other waits and reads; the library locks no map."""
    source = write(tmp_path / "a.jsonl", rows(60))
    (tmp_path / "start.py").write_text(TWO_STARTS)
    log = tmp_path / "log"
    command = script(str(tmp_path / "start.py"), str(ROOT), source, str(log))
    starts = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in "ab"]
    assert [start.communicate(timeout=100)[0].split()[-1] for start in starts] == ["60", "60"]
    assert len(log.read_text()) == 60


def test_a_hub_data_set_without_network(tmp_path):
    """The client retries for 23 seconds before it gives up; here one question says that the hub does not answer."""
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = script("grpo.py", "--dataset", "openai/gsm8k:main@test", "--dry_run")
    end = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=20)
    assert end.returncode == 2
    assert "--dataset openai/gsm8k:main@test (split 'test')" in end.stderr and "hub is not reachable" in end.stderr
    assert end.stderr.count("\n") == 1


@pytest.mark.parametrize("large", [False, True])
def test_a_broken_line_is_named(tmp_path, capsys, monkeypatch, large):
    """By its file and its number in it, empty lines counted; --bad_rows drop does not hide it."""
    monkeypatch.setattr(data, "LARGE", 10 if large else 1000)
    write(tmp_path / "a.jsonl", rows(12))
    (tmp_path / "b.jsonl").write_text('{"question": "1", "answer": "1"}\n\n{"question"\n')
    message = refusal(capsys, Args(dataset=f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", bad_rows="drop"))
    assert f"--dataset {tmp_path}/b.jsonl: not valid jsonl: line 3: " in message


def test_a_split_of_its_own_for_evaluation(tmp_path):
    """@SPLIT of a folder or hub id; what has none takes --dataset_split."""
    import datasets

    parts = {"train": rows(30), "test": rows(10, first=25)}
    folder = str(tmp_path / "sums")
    datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in parts.items()}).save_to_disk(folder)
    training, evaluation = load(Args(dataset=folder, eval_dataset=f"{folder}@test", eval_prompts=8))
    assert questions(evaluation) == [row["question"] for row in rows(8, first=25)]
    assert sorted(questions(training)) == sorted(row["question"] for row in rows(25))
    assert {p.source for p in training + evaluation} == {"sums"}
    assert len(everything(Args(dataset=folder, dataset_split="test"))) == 10


def test_a_split_of_nothing(tmp_path, capsys):
    """Files and tasks have no splits, and @SPLIT has chosen: then --dataset_split would say nothing."""
    import datasets

    file = write(tmp_path / "train.jsonl", rows(30))
    folder = str(tmp_path / "sums")
    parts = {"train": rows(30), "test": rows(10, first=30)}
    datasets.DatasetDict({k: datasets.Dataset.from_list(v) for k, v in parts.items()}).save_to_disk(folder)
    capsys.readouterr()  # datasets has shown a bar
    mixer = json.dumps({file: 1.0, f"{folder}@train": 5})
    for given in ({"dataset": file}, {"dataset": f"{folder}@train"}, {"dataset_mixer": mixer}, {}):
        message = refusal(capsys, Args(**given, dataset_split="test"))
        assert "--dataset_split test: nothing to choose it from" in message
    mixer = json.dumps({folder: 5})
    _, evaluation = load(Args(dataset=file, eval_dataset=folder, dataset_split="test", eval_prompts=3))
    assert questions(evaluation) == [row["question"] for row in rows(3, first=30)]
    assert len(load(Args(dataset=file, eval_dataset_mixer=mixer, dataset_split="test", eval_prompts=3))[1]) == 5
    assert len(everything(Args(dataset_mixer=json.dumps({folder: 1.0, file: 4}), dataset_split="test"))) == 14


def test_evaluation_on_other_data(tmp_path):
    """The first ones, in their order; what is evaluated on is not trained on."""
    train, test = write(tmp_path / "train.jsonl", rows(30)), write(tmp_path / "test.jsonl", rows(10, first=25))
    training, evaluation = data.load_problems(Args(dataset=train, eval_dataset=test, eval_prompts=7), truth_error)
    assert questions(evaluation) == [row["question"] for row in rows(7, first=25)]
    assert sorted(questions(training)) == sorted(row["question"] for row in rows(25))
    assert (training[0].source, evaluation[0].source) == ("train", "test")


# ------------------------------------------------------------------------------------------------------------ mixtures


def mixer(tmp_path: Path, parts: dict, **changes) -> Args:
    write(tmp_path / "a.jsonl", rows(100)), write(tmp_path / "b.jsonl", rows(50, first=80))
    mixture = json.dumps({str(tmp_path / name): part for name, part in parts.items()})
    return Args(dataset_mixer=mixture, eval_prompts=10, **changes)


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
    found = list(data.mixed_problems(mixer(tmp_path, parts), truth_error).values())
    assert len(set(questions(found))) == len(found)
    for source, count in counts.items():
        taken = [p for p in found if p.source == source]
        assert len(taken) == count or (count is None and 30 <= len(taken) <= 50)


def test_names_of_sources(tmp_path):
    names = {"data/gsm8k_train.jsonl": "gsm8k_train", "openai/gsm8k:main": "gsm8k", "data/train-*.parquet": "train"}
    names |= {"data/*.parquet": "data", "a.jsonl,b.jsonl": "a", "reasoning_gym:chain_sum?size=3": "chain_sum"}
    assert {source: data.source_name(source) for source in names} == names
    for folder in "xy":
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "train.jsonl", rows(5, first=ord(folder)))
    args = mixer(tmp_path, {"x/train.jsonl": 1.0, "y/train.jsonl": 1.0})
    assert len({p.source for p in everything(args)}) == 2, "equal file names are told apart"


def test_mixer_draws_by_the_seed(tmp_path):
    def draw(seed):
        return questions(data.mixed_problems(mixer(tmp_path, {"a.jsonl": 10}, seed=seed), truth_error).values())

    assert draw(1) == draw(1)
    assert set(draw(1)) != set(draw(2))


@pytest.mark.parametrize(
    ("mixture", "words"),
    [
        ("{a: 1}", ["not valid JSON", "for example"]),
        ("[1]", ["JSON object"]),
        ("{}", ["JSON object"]),
        ('{"a": 1.5}', ["'a'", "1.5", "fraction in (0, 1]"]),
        ('{"a": 0}', ["'a'", "count above 0"]),
        ('{"a": true}', ["'a'", "True"]),
        ('{"PLACE/a.jsonl": 101}', ["a.jsonl", "100 distinct problems", "101"]),
    ],
)
def test_mixer_refusals(tmp_path, capsys, mixture, words):
    write(tmp_path / "a.jsonl", rows(100))
    message = refusal(capsys, Args(dataset_mixer=mixture.replace("PLACE", str(tmp_path))))
    for word in ("--dataset_mixer", *words):
        assert word in message


# ------------------------------------------------------------------------------------------------------- known columns

KNOWN = {
    "gsm8k": (
        {"question": "How many?", "answer": "2 + 2 = 4\n#### 4"},
        "How many?",
        "gsm8k",
        "2 + 2 = 4\n#### 4",
        None,
    ),
    "MATH": ({"problem": "$1+1$", "answer": "2", "solution": "\\boxed{2}"}, "$1+1$", "math", "2", "\\boxed{}"),
    "MATH without answers": (
        {"problem": "$1+1$", "solution": "is \\boxed{2}"},
        "$1+1$",
        "math",
        "is \\boxed{2}",
        "boxed",
    ),
    "countdown": ({"nums": [3, 5, 7], "target": 22}, "3, 5, 7", "countdown", "22", None),
    "APPS": (
        {
            "question": "Add.",
            "input_output": '{"inputs": ["1 2"], "outputs": ["3"]}',
            "starter_code": "",
            "solutions": "x",
        },
        "Add.",
        "code",
        '{"inputs": ["1 2"], "outputs": ["3"]}',
        None,
    ),
    "TACO": (
        {
            "question": "Add.",
            "input_output": '{"inputs": [[1]], "outputs": [2], "fn_name": "add"}',
            "starter_code": "def add",
        },
        "Add.\n\ndef add",
        "code",
        '{"inputs": [[1]], "outputs": [2], "fn_name": "add"}',
        None,
    ),
    "AReaL": (
        {"query_id": "7", "prompt": "Add.", "task": "code", "input_output": {"inputs": ["1"], "outputs": ["2"]}},
        "Add.",
        "code",
        '{"inputs": ["1"], "outputs": ["2"]}',
        None,
    ),
    "other": ({"question": "1 + 1", "answer": "2"}, "1 + 1", "last_number", "2", None),
}


@pytest.mark.parametrize("case", KNOWN)
def test_known_columns(tmp_path, case):
    row, prompt, verifier, truth, system = KNOWN[case]
    (problem,) = data.read_problems(write(tmp_path / "a.jsonl", [row]), Args(), truth_error).values()
    assert prompt in problem.messages[-1]["content"]
    assert (problem.verifier, problem.truth) == (verifier, truth)
    assert (system or "") in problem.messages[0]["content"] and len(problem.messages) == 1 + (system is not None)


def test_flags_win_over_known_columns(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"problem": "$1+1$", "answer": "2", "solution": "x", "hint": "add"}])
    args = Args(prompt_key="hint", ground_truth_key="solution", verifier="exact")
    (problem,) = data.read_problems(source, args, truth_error).values()
    assert (problem.messages, problem.truth) == ([{"role": "user", "content": "add"}], "x")
    assert problem.verifier == "exact"


def test_countdown_can_be_scored(tmp_path):
    """The prompt that is made of the columns asks for what the verifier of that name accepts."""
    import rewards

    (problem,) = data.read_problems(
        write(tmp_path / "a.jsonl", [{"nums": [3, 5, 7], "target": 22}]), Args(), truth_error
    ).values()
    assert "22" in problem.messages[0]["content"] and "<answer>" in problem.messages[0]["content"]
    assert rewards.countdown("<answer>3 * 5 + 7</answer>", problem.truth, problem.row).score == 1


@pytest.mark.parametrize(("file", "count", "verifier"), [("gsm8k_test", 1319, "gsm8k"), ("math500", 500, "math")])
def test_real_files_need_no_flags(file, count, verifier):
    problems = data.read_problems(str(real(f"{file}.jsonl")), Args(), truth_error).values()
    assert len(problems) == count
    assert {(p.verifier, p.source) for p in problems} == {(verifier, file)}


CHAT_ROW = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "It is 2."}]
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


def test_open_instructs_columns(tmp_path):
    """messages, ground_truth, and dataset names the verifier; the answer that closes the messages is no prompt."""
    content = [{"messages": CHAT_ROW, "ground_truth": "2", "dataset": "MATH"}]
    (problem,) = everything(Args(dataset=write(tmp_path / "a.jsonl", content)))
    assert problem.messages == CHAT_ROW[:1]
    assert (problem.truth, problem.verifier) == ("2", "math")


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


@pytest.mark.parametrize(("task", "verifier"), [("spell_backward", "reasoning_gym"), ("chain_sum", "last_number")])
def test_tasks_of_reasoning_gym_need_no_verifier(task, verifier):
    """Answers that are words are scored by the task itself; numbers as before."""
    import rewards

    problems = everything(Args(dataset=f"reasoning_gym:{task}?size=40", eval_prompts=5))
    assert {p.verifier for p in problems} == {verifier}
    for p in problems:
        assert rewards.find_verifier(p.verifier)(f"<answer>{p.truth}</answer>", p.truth, p.row).score == 1


def test_several_evaluation_sources(tmp_path, capsys):
    """The first ones of each, none of them trained on; a source's results are told apart by its name."""
    for name, first in (("train", 0), ("a", 20), ("b", 28)):
        write(tmp_path / f"{name}.jsonl", rows(30 if name == "train" else 10, first=first))
    mixture = json.dumps({f"{tmp_path}/a.jsonl": 4, f"{tmp_path}/b.jsonl": 0.5})
    args = Args(dataset=f"{tmp_path}/train.jsonl", eval_dataset_mixer=mixture)
    training, evaluation = load(args)
    assert questions(evaluation) == [row["question"] for row in rows(4, first=20) + rows(5, first=28)]
    assert [p.source for p in evaluation] == ["a"] * 4 + ["b"] * 5
    assert sorted(questions(training)) == sorted(row["question"] for row in rows(20) + rows(4, first=24))
    args.eval_dataset = f"{tmp_path}/a.jsonl"
    assert "--eval_dataset and --eval_dataset_mixer: give one" in refusal(capsys, args)
    args = Args(dataset=f"{tmp_path}/train.jsonl", eval_dataset_mixer=json.dumps({f"{tmp_path}/a.jsonl": 11}))
    message = refusal(capsys, args)
    assert "--eval_dataset_mixer" in message and "has 10 distinct problems, 11 asks for 11" in message


# ------------------------------------------------------------------------------------------------------------ bad rows

BAD = {
    "no prompt": ({"question": None, "answer": "1"}, "row 7 has an empty 'question'"),
    "empty prompt": ({"question": "", "answer": "1"}, "row 7 has an empty 'question'"),
    "no truth": ({"question": "1 + 1", "answer": None}, "row 7 has an empty 'answer'"),
    "empty truth": ({"question": "1 + 1", "answer": ""}, "row 7 has an empty 'answer'"),
    "empty list as truth": ({"question": "1 + 1", "answer": []}, "row 7 has an empty 'answer'"),
    "not a number as truth": ({"question": "1 + 1", "answer": float("nan")}, "row 7 has an empty 'answer'"),
    "missing column": ({"question": "1 + 1"}, "row 7 has no 'answer'"),
    "number as prompt": ({"question": 5, "answer": "1"}, "row 7 its prompt must be text or chat messages"),
    "no messages": ({"question": ["a"], "answer": "1"}, "row 7 its prompt must be text or chat messages"),
    "messages without content": ({"question": [{"role": "user"}], "answer": "1"}, "with role and content"),
    "not an object": (["1 + 1", "2"], "row 7 is list, not an object"),
    "truth of another kind": (
        {"question": "1 + 1", "answer": "two"},
        "row 7 has a ground truth that its own verifier last_number",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows(tmp_path, capsys, case):
    bad, words = BAD[case]
    source = write(tmp_path / "a.jsonl", [*rows(7), bad, *rows(20, first=7)])
    message = refusal(capsys, Args(dataset=source))
    assert words in message and "1 of 28 rows" in message and "--bad_rows drop" in message
    found = everything(Args(dataset=source, bad_rows="drop", eval_prompts=5))
    assert len(found) == 27
    said = capsys.readouterr().out
    assert words in said and "--bad_rows drop" in said


def test_every_row_without_the_column(tmp_path, capsys):
    """Then the name is wrong, not the rows: nothing is dropped, the columns that are there are named."""
    source = write(tmp_path / "a.jsonl", [{"task": "1 + 1", "gold": "2"}] * 20)
    message = refusal(capsys, Args(dataset=source, bad_rows="drop"))
    assert "--prompt_key question" in message and "it has: task, gold" in message


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"question": "1", "answer": "1"}\n\n{"question"\n', ["not valid jsonl", "line 3"]),
        ("a.json", '{"question": "1"}', ["not valid json", "not a list of rows"]),
        ("a.parquet", "not parquet", ["not valid parquet"]),
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
        assert data.render([messages], tokenizer, None) == [ids]


@pytest.mark.skipif(not (ROOT / "models/SmolLM2-135M-Instruct").is_dir(), reason="the default model is not set up")
def test_templates_of_a_real_tokenizer():
    """SmolLM2's own template is ChatML once there is a system message."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models/SmolLM2-135M-Instruct")
    for messages in (CHAT, CHAT[1:2]):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert data.render([messages], tokenizer, None) == [ids]
    own, named = (data.render([CHAT], tokenizer, template) for template in (None, data.CHAT_TEMPLATES["chatml"]))
    assert own == named


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("chatml", "<|im_start|>user\n1 + 1 = <|im_end|>\n<|im_start|>assistant\n"),
        ("tulu", "<|user|>\n1 + 1 = \n<|assistant|>\n"),
        ("question_answer", "Question: 1 + 1 = \nAnswer:"),
    ],
)
def test_named_templates(tokenizer, name, expected):
    (ids,) = data.render([CHAT[1:2]], tokenizer, data.CHAT_TEMPLATES[name])
    assert tokenizer.decode(ids) == expected


def test_tulu_ends_an_answer(tokenizer):
    text = tokenizer.decode(data.render([CHAT], tokenizer, data.CHAT_TEMPLATES["tulu"])[0])
    assert text == (
        "<|system|>\nBe  brief.\n\n<|user|>\n1 + 1 = \n<|assistant|>\n2<|im_end|>\n"
        "<|user|>\nand «ß» 2?\n<|assistant|>\n"
    )


def test_r1_asks_for_what_the_verifier_takes(tokenizer):
    import rewards

    text = tokenizer.decode(data.render([CHAT[1:2]], tokenizer, data.CHAT_TEMPLATES["r1"])[0])
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
        (ids,) = data.render([CHAT[1:2]], llama, data.CHAT_TEMPLATES[template])
        assert ids[0] == bos and ids[1] != bos
    (ids,) = data.render([CHAT[1:2]], tokenizer, data.CHAT_TEMPLATES["question_answer"])
    assert ids[0] != bos, "this one adds none by itself"


# -------------------------------------------------------------------------------------------------------- long prompts


def test_overlong_prompts(tokenizer, capsys):
    def problems() -> list[records.Problem]:
        texts = ["short", "one " * 40, "also"]
        return [records.Problem([{"role": "user", "content": text}], "1", "exact", {}) for text in texts]

    whole = data.render([p.messages for p in problems()], tokenizer, None)
    kept = {}
    for how in ("filter", "left", "right"):
        kept[how] = data.render_prompts(problems(), tokenizer, Args(max_prompt_length=30, overlong_prompts=how))
        said = capsys.readouterr().out
        assert f"--overlong_prompts {how}" in said and "1 of 3 prompts" in said and f"has {len(whole[1])}" in said
    assert [p.prompt_ids for p in kept["filter"]] == [whole[0], whole[2]]
    assert [p.prompt_ids for p in kept["left"]] == [whole[0], whole[1][-30:], whole[2]]
    assert [p.prompt_ids for p in kept["right"]] == [whole[0], whole[1][:30], whole[2]]
    message = refusal(capsys, Args(max_prompt_length=30), lambda args: data.render_prompts(problems(), tokenizer, args))
    for word in ("1 of 3 prompts", "--max_prompt_length 30", "one one", "--overlong_prompts filter"):
        assert word in message
    exactly = Args(max_prompt_length=len(whole[1]))
    assert [p.prompt_ids for p in data.render_prompts(problems(), tokenizer, exactly)] == whole


# ------------------------------------------------------------------------------------------------- many prompts, cached


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of datasets, and 10 rows or prompts are many."""
    import datasets

    folder = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)
    monkeypatch.setattr(data, "LARGE", 10)
    return folder


def computed(cache: Path) -> dict[Path, int]:
    """The files that were computed by a map, and when."""
    return {path: path.stat().st_mtime_ns for path in (cache / "rlvr").rglob("*.arrow")}


def test_many_prompts_come_from_the_cache(tokenizer, cache):
    """Several processes give what one gives, the second time nothing is rendered, and any change is another key."""
    content = [[{"role": "user", "content": f"{i} + 1"}] for i in range(40)]

    def ids(**changes) -> list[list[int]]:
        problems = [records.Problem(messages, "1", "exact", {}) for messages in content]
        return [p.prompt_ids for p in data.render_prompts(problems, tokenizer, Args(**changes))]

    expected = {t: data.render(content, tokenizer, data.CHAT_TEMPLATES[t]) for t in ("chatml", "tulu")}
    assert ids(chat_template="chatml") == expected["chatml"]
    first = computed(cache)
    assert first
    assert ids(chat_template="chatml") == expected["chatml"]
    assert computed(cache) == first
    assert ids(chat_template="tulu") == expected["tulu"], "the template is part of the key"
    assert set(computed(cache)) > set(first)


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
        patch.setattr(data, "LARGE", 1000)
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
        show(reward_fn=f"{own}:f")
        assert len(computed(cache)) > len(second), "the code of a verifier is part of the key"
        second = computed(cache)
    write(tmp_path / "a.jsonl", rows(12))
    assert len(show()) == 12
    assert set(first) < set(computed(cache))


def test_prompt_key(tokenizer, tiny):
    """It names the tokenizer and the template."""
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(tiny)
    assert data.prompt_key(other, Args()) == data.prompt_key(tokenizer, Args())
    other.add_tokens(["+ 1"])
    keys = {data.prompt_key(t, Args(chat_template=c)) for t in (tokenizer, other) for c in (None, "tulu", "r1")}
    assert len(keys) == 6


# ------------------------------------------------------------------------------------------------------- prepared data


def prepare(tiny: Path, source: str, output: Path, *words: str) -> subprocess.CompletedProcess:
    command = script(
        "scripts/prepare_data.py", "--dataset", source, "--model_name_or_path", str(tiny), "--output", str(output)
    )
    return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_prepared_data_is_the_same_data(tiny, tokenizer, tmp_path, capsys, monkeypatch):
    """Also with a library that is imported before the tokenizer, as a run imports it."""
    (tmp_path / "own_library.py").write_text("print('own_library is there')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    content = [*rows(50), rows(1)[0], {"question": None, "answer": "1"}, {"question": "one " * 200, "answer": "1"}]
    source, output = write(tmp_path / "sums.jsonl", content), tmp_path / "prepared.parquet"
    flags = ["--overlong_prompts", "filter", "--bad_rows", "drop", "--system_prompt", "Add."]
    done = prepare(tiny, source, output, *flags, "--external_lib", "own_library")
    assert done.returncode == 0, done.stderr
    assert "own_library is there" in done.stdout
    for words in ("50 of 53 rows", "1 could not be used", "1 repeat an earlier prompt", "1 are longer"):
        assert words in done.stdout
    plain = Args(dataset=source, overlong_prompts="filter", bad_rows="drop", system_prompt="Add.", eval_prompts=5)
    ready = Args(dataset=str(output), eval_prompts=5)
    wanted = [data.render_prompts(part, tokenizer, plain) for part in data.load_problems(plain, truth_error)]
    problems = data.load_problems(ready, truth_error)
    assert all(p.prompt_ids for part in problems for p in part), "nothing is left to be tokenised"
    found = [data.render_prompts(part, tokenizer, ready) for part in problems]
    show = lambda p: (p.messages, p.truth, p.verifier, p.row, p.prompt_ids, p.source)  # noqa: E731
    by_text = lambda part: sorted(map(show, part), key=str)  # noqa: E731
    assert by_text(found[0] + found[1]) == by_text(wanted[0] + wanted[1])
    capsys.readouterr()
    other = Args(dataset=str(output), chat_template="tulu", eval_prompts=5)
    message = refusal(
        capsys, other, lambda args: data.render_prompts(data.load_problems(args, truth_error)[0], tokenizer, args)
    )
    assert "prepared for another tokenizer or --chat_template" in message and "prepare_data.py" in message
    assert "--system_prompt" in refusal(capsys, Args(dataset=str(output), system_prompt="Add."))


def test_preparing_stops_at_what_is_wrong(tiny, tmp_path):
    source = write(tmp_path / "a.jsonl", [*rows(5), {"question": None, "answer": "1"}])
    for words, message in (
        ([], "row 5 has an empty 'question'"),
        (["--bad_rows", "drop", "--max_prompt_length", "3"], "3"),
    ):
        done = prepare(tiny, source, tmp_path / "p.parquet", *words)
        assert done.returncode == 2 and message in done.stderr
        assert not (tmp_path / "p.parquet").exists()

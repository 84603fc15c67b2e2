"""Inputs without end: whatever is given, the end is an error that names the flag or the row, or the right numbers.

A few cases of each property here; 50,000 new ones with --hypothesis-profile long, or as many as CASES says.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import re
import string
import tempfile
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, event, example, given
from hypothesis import strategies as st

import grpo
import ppo
import rewards
from runtime.arguments import checks, flags
from runtime.data import problem_set, prompt_order
from runtime.run import directory, logger, verdict
from runtime.system import library_logs
from runtime.training import model_files

TEXT = st.text(st.characters(codec=None, exclude_categories=[]), max_size=12) | st.text(string.printable, max_size=30)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=5
)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty folder of one case. Afterwards no library logs into it."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)
        library_logs.write_to(None)


def end_of(call, *arguments, codes: tuple[int, ...] = (2,)):
    """(what a call returns, None), or (None, what it printed when it ended with one of these exit codes).

    An error is one line that names a flag or a file of the run, and nothing else than an error may be raised.
    """
    err, out = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
            return call(*arguments), None
    except SystemExit as end:
        assert end.code in codes
        said = err.getvalue()
        if end.code == 2:
            assert said.startswith("error: ") and said.count("\n") == 1, said
            assert "--" in said or "config.json" in said, said
        return None, said or out.getvalue()


# --------------------------------------------------------------------------------------------------------------- data

PROMPT = TEXT | st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant"]), "content": TEXT})
)
ROW = st.fixed_dictionaries({"question": PROMPT | JSON, "answer": JSON}) | st.dictionaries(
    st.sampled_from(["question", "answer", "prompt", "nums", "target", "messages", "ground_truth", "reward_model"]),
    JSON | PROMPT,
)
NAMES = st.sampled_from(["exact", "last_number", "gsm8k", "countdown", "format", "ifeval"])


def as_truth(value: object) -> str:
    """A ground truth as text, as docs/data_and_rewards.md has it."""
    return json.dumps(value) if isinstance(value, list | dict) else str(value)


@given(st.lists(ROW | JSON, max_size=6), st.none() | NAMES, st.sampled_from(["raise", "drop"]))
@example([{"question": "1 + 1 =", "answer": 2}, {"question": "\ud800", "answer": 1}], None, "drop")
@example([{"question": None, "answer": "8", "messages": "2 + 2 =", "ground_truth": "4"}], "exact", "raise")
@example([{"question": "2 + 2 =", "answer": "4", "nums": "0", "target": 0}], "exact", "raise")
@example([{"\n": None}], None, "raise")
@example([{"question": "", "nums": "0", "target": 3}], "exact", "raise")
def test_rows_become_what_they_say_or_are_refused(rows, verifier, bad_rows):
    """Each problem has the prompt and the truth of its row, in the order of the rows."""
    with folder() as place:
        (place / "rows.json").write_text(json.dumps(rows))
        args = grpo.Args(dataset=str(place / "rows.json"), verifier=verifier, bad_rows=bad_rows)
        found, refusal = end_of(problem_set.read_problems, args.dataset, args, rewards.truth_error)
    event("refused" if found is None else f"{min(3, len(found))} problems")
    if found is None:
        assert "row" in refusal or "rows.json" in refusal
        return
    before = -1
    texts = [json.dumps(row) for row in rows]
    for problem in found.values():
        place = texts.index(json.dumps(problem.row), before + 1)
        before = place
        row = rows[place]
        if "question" in row and problem.truth and not isinstance(row["question"], list):
            if not str(row["question"]).startswith("[{"):
                prompts = [row[name] for name in ("question", "prompt", "messages") if name in row]
                nums = row.get("nums")
                if isinstance(nums, str) and not ("target" in row and problem_set.NUMBERS.fullmatch(nums)):
                    prompts.append(nums)  # which is no countdown
                said = [message for prompt in prompts if isinstance(prompt, list) for message in prompt]
                asked = problem.messages[-1]["content"]
                puzzle = {"nums", "target"} <= set(row) and asked.startswith(f"Make {row['target']} from the numbers ")
                assert asked in prompts or problem.messages[-1] in said or puzzle
            assert problem.truth in {as_truth(value) for value in json.loads(texts[place]).values()} | {
                str(row.get("answer"))
            }


@given(st.lists(st.lists(TEXT, min_size=2, max_size=2), max_size=5))
def test_cells_stay_what_the_file_says(cells):
    """A run reads exactly what Python's csv writes, or the file is rejected."""
    with folder() as place:
        with (
            contextlib.suppress(UnicodeEncodeError),
            open(place / "rows.csv", "w", newline="", encoding="utf-8") as file,
        ):
            csv.writer(file).writerows([["question", "answer"], *cells])
        args = grpo.Args(dataset=str(place / "rows.csv"), verifier="exact", bad_rows="drop")
        found, _ = end_of(problem_set.read_problems, args.dataset, args, rewards.truth_error)
        with contextlib.suppress(ValueError):
            read = (place / "rows.csv").read_bytes().decode()
            written = list(csv.reader(io.StringIO(read, newline="")))[1:]
    if found is None:
        return
    whole = {(question, answer) for question, answer in written if question and answer}
    for problem in found.values():
        assert (problem.row["question"], problem.row["answer"]) in whole


# -------------------------------------------------------------------------------------------------------------- flags


def is_argument(text: str) -> bool:
    """Return True if a command line can have this text: bytes without a 0, decoded by os.fsdecode."""
    with contextlib.suppress(UnicodeEncodeError):
        return "\0" not in text and os.fsdecode(os.fsencode(text)) == text
    return False


WORD = TEXT.filter(is_argument) | st.sampled_from(
    ["", "~/x", "a,b", "a=b", "x\n", "nan", "reasoning_gym:", "{}", "gsm8k", ".", "..", "/"]
)
EXTREME = st.sampled_from([-1, 0, 1, 2, 3, 2**31, 10**9, 10**30])
HINTS = typing.get_type_hints(grpo.Args)
PLACES = ("model_name_or_path", "output_dir", "tokenizer_name_or_path", "reward_model_name_or_path")


def values_of(kind: object) -> st.SearchStrategy:
    """Values that a field of this type may be given."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is bool:
        return st.booleans()
    if kind is int:
        return EXTREME | st.integers(-5, 300)
    if kind is float:
        return st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, math.nan, math.inf, 1e300, 1e-300]) | st.floats(-3, 3)
    if origin is typing.Literal:
        return st.sampled_from(inner)
    if origin is tuple and inner[-1:] == (...,):
        return st.lists(values_of(inner[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, inner))
    if origin is not None and inner:  # a union
        return st.one_of([st.none() if part is type(None) else values_of(part) for part in inner])
    return WORD if kind is str else st.none()


@st.composite
def changed_flags(draw) -> dict[str, object]:
    """A few fields of Args with values of their types."""
    names = draw(st.lists(st.sampled_from(sorted(set(HINTS) - {"preset", *PLACES})), max_size=4, unique=True))
    return {name: draw(values_of(HINTS[name])) for name in names}


PROBLEMS = 200
# What else follows from the model and the data.
GIVEN = {"total_steps": 4, "max_prompt_length": 64, "max_response_length": 8, "learning_rate": 1e-5}


def checked(args, script) -> int:
    """Check the flags as a start does, and return the number of steps."""
    checks.check(args, 1)
    model_files.check_model(args)
    checks.check_training(args)
    checks.check_kl(args)
    rewards.check_reward_args(args)
    script.check_args(args)
    return flags.total_steps(args, PROBLEMS)


@given(changed_flags(), st.sampled_from([grpo, ppo]))
@example(changes={"environment": "\n0"}, script=grpo)
@example(changes={"chat_template": "a\nb"}, script=grpo)
@example(changes={"critic": ("a\nb",)}, script=ppo)
def test_flags_mean_something_or_are_refused(tiny, changes, script):
    """Steps, samples and a run's name follow from what is accepted, and what is rejected is named."""
    known = {field.name for field in dataclasses.fields(script.Args)}
    given = {k: v for k, v in (GIVEN | changes).items() if k in known}
    args = script.Args(model_name_or_path=str(tiny), **given)
    steps, refusal = end_of(checked, args, script)
    event("refused" if steps is None else "accepted")
    if steps is None:
        assert any(f"--{name}" in refusal for name in known), refusal
        return
    assert isinstance(steps, int)
    assert steps >= 1 or args.num_unique_prompts_rollout > PROBLEMS  # which the data is rejected for
    name = directory.run_name(args, script.Args())
    given_folders = args.run_name or args.exp_name  # the only ones
    assert name and "/" not in name.replace(given_folders, "")
    assert max(len(os.fsencode(part)) for part in Path(name).parts) <= 255
    sampling = prompt_order.sampling(args)
    assert sampling["max_tokens"] == args.max_response_length and 0 < sampling["temperature"] < math.inf
    again = dataclasses.replace(args)
    assert directory.run_name(again, script.Args()) == name


WORDS = st.lists(
    st.sampled_from([f"--{name}" for name in (*sorted(HINTS), "no_such_flag", "no-shuffle")]) | WORD | EXTREME.map(str),
    max_size=4,
)


@given(WORDS)
def test_command_lines_are_read_or_refused(words):
    """Whatever words come after the script: arguments of their types, or exit code 2."""
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            args = flags.parse(grpo.Args, grpo.__doc__, list(words))
    except SystemExit as end:
        assert end.code in ((0, 2) if set(words) & {"-h", "--help"} else (2,)), words
        assert err.getvalue(), words
        return
    assert isinstance(args, grpo.Args)


# ---------------------------------------------------------------------------------------------------------- verifiers

NUMBER = st.floats() | st.integers() | st.booleans() | st.decimals() | st.fractions() | st.just(10**400)
NUMBER |= st.floats().map(np.float64) | st.integers(0, 1).map(np.int8) | st.booleans().map(np.bool_)
ANYTHING = NUMBER | JSON | st.just(np.zeros(2)) | st.just(object()) | st.just(b"1") | st.complex_numbers()
REWARD = st.builds(
    rewards.Reward,
    score=NUMBER | TEXT | st.none(),
    parts=st.dictionaries(TEXT, NUMBER | TEXT, max_size=3) | st.none(),
    status=st.sampled_from([*rewards.STATUSES, "good", None]),
    steps=st.lists(st.tuples(st.integers(), NUMBER), max_size=2).map(tuple) | st.none(),
    extracted=TEXT | st.none(),
    detail=TEXT,
)
WEIGHTS = st.dictionaries(st.sampled_from(["own", "exact"]), st.none() | st.floats(0, 1e300), max_size=2)


@given(REWARD | ANYTHING | st.sampled_from([ValueError, KeyboardInterrupt, SystemExit, RecursionError]), WEIGHTS)
@example(1e308, {"own": 10.0})
def test_whatever_a_verifier_returns_is_a_number_or_unscorable(found, weights):
    """Of several verifiers, too: a finite score and finite parts, which samples.jsonl can hold."""

    def own(response: str, truth: str, row: dict):
        if isinstance(found, type):
            raise found
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(rewards.VERIFIERS, "own", own)
        reward, _ = rewards._verify(["own", "exact"], {}, weights, "4", "4", {})
    event(reward.status)
    assert reward.status in rewards.STATUSES
    assert math.isfinite(reward.score) and all(map(math.isfinite, reward.parts.values()))
    text = json.dumps(logger._writable(dataclasses.asdict(reward), {}), allow_nan=False)
    assert json.loads(text)["status"] == reward.status
    plain = isinstance(found, (bool, int, float)) and not isinstance(found, type) and abs(found) < 1e100
    if plain and math.isfinite(found) and not weights:
        assert reward.score == pytest.approx(float(found) + 1)


MATHS = st.lists(
    st.sampled_from(
        [*"0123456789 .,-+*/=^_{}()[]$\\\n<>#%", "\\boxed{", "\\frac", "<answer>", "</answer>", "####", "answer"]
    )
    | TEXT,
    max_size=12,
).map("".join)


@given(NAMES, MATHS, MATHS)
def test_no_response_makes_a_verifier_raise(name, response, truth):
    """A truth that the data check lets pass is scored between 0 and 1 whatever the response is."""
    row = {"nums": [1, 2, 3], "target": 6} if name == "countdown" else {}
    assume(not rewards.truth_error(name, truth, row))
    reward, raised = rewards._verify_by(name, response, truth, row)
    assert not raised and reward.status in ("ok", "unscorable")
    assert 0 <= reward.score <= 1 and all(0 <= part <= 1 for part in reward.parts.values())
    own, _ = rewards._verify_by(name, truth, truth, row)
    assert name != "exact" or own.score == 1


# ------------------------------------------------------------------------------------------------- folders and resume

STEP = st.integers(-2, 12)
LINE = STEP.map(lambda step: json.dumps({"step": step, "x": 1.5})) | TEXT | JSON.map(json.dumps)
LINE |= STEP.map(lambda step: f'{{"step": {step}, "torn')
LINES = st.lists(LINE.map(lambda line: line.replace("\n", " ").replace("\r", " ")), max_size=8)


def written(place: Path, lines: list[str], whole: bool) -> list[str]:
    """Write the lines to a file, the last with or without its end; the lines as they are read back."""
    place.write_bytes(("\n".join(lines) + "\n" * whole).encode(errors="replace"))
    return place.read_text(errors="replace").split("\n")


def whole_step(line: str, has_end: bool) -> int | None:
    """The step with which a whole line begins."""
    number, *rest = re.split("[,}]", line.removeprefix('{"step": '), maxsplit=1)
    is_step = has_end and line.startswith('{"step": ') and rest
    return int(number) if is_step and re.fullmatch("-?[0-9]+", number) else None


@given(LINES, st.booleans(), STEP)
def test_a_resume_keeps_the_lines_up_to_its_step(lines, whole, last):
    """Each of them once, in order, and nothing else; the file before is the file after, or whole."""
    with folder() as place:
        file = place / "metrics.jsonl"
        read = written(file, lines, whole)
        steps = [(line, whole_step(line, number < len(read) - 1)) for number, line in enumerate(read)]
        known = [step for _, step in steps if step is not None]
        assert directory.last_step(file) == (known[-1] if known else -1)
        directory.cut_back(file, last)
        kept = [line for line, step in steps if step is not None and step <= last]
        assert file.read_text().splitlines() == kept or file.read_text() == "".join(line + "\n" for line in kept)
        assert [path.name for path in place.iterdir()] == ["metrics.jsonl"]


CONFIG = st.none() | st.sampled_from(["right", "other", "args", ""]) | JSON.map(json.dumps)
FILES = st.dictionaries(
    st.sampled_from(
        [
            *("notes.txt", "plots/a.png", "model/mine.bin", "metrics.jsonl", "samples.jsonl", "eval.jsonl", "lock"),
            *("checkpoints/step_000002/state.json", "checkpoints/step_000004/manifest.json", "checkpoints/step_x/a"),
            *("wandb/x", "verdict.json"),
        ]
    ),
    LINES,
    max_size=5,
)


@given(CONFIG, FILES, st.booleans(), st.sampled_from(["auto", "never"]), st.booleans())
def test_no_folder_of_a_run_loses_what_is_not_the_runs(tiny, config, files, overwrite, resume, dry_run):
    """A start in any folder: rejected, finished, or begun, and every file that no run writes is as it was."""
    with folder() as place:
        args = grpo.Args(model_name_or_path=str(tiny), output_dir=str(place), run_name="run", total_steps=4)
        args = dataclasses.replace(args, overwrite=overwrite, resume=resume, dry_run=dry_run, eval_prompts=0)
        run = place / "run"
        for name, lines in files.items():
            (run / name).parent.mkdir(parents=True, exist_ok=True)
            written(run / name, lines, True)
        if config is not None:
            run.mkdir(exist_ok=True)
            texts = {"right": json.dumps({"args": vars(args)}), "other": '{"args": {"beta": 7}}', "args": '{"args": 7}'}
            (run / "config.json").write_text(texts.get(config, config))
        before = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
        opened, said = end_of(directory.open_run, args, grpo.Args(), codes=(0, 2))
        event("begun" if opened else "finished" if said.count("finished") else "refused")
        after = {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
        assert after == before, "looking has changed something"
        if opened is None or opened[1] is not None:
            return
        log, refusal = end_of(logger.RunLog, opened[0], args, 1, 4, True)
        assert log is not None or "run" in refusal
        if log is not None:
            log.close()
        kept = {"notes.txt", "plots/a.png"} & set(files)
        if not overwrite:
            kept |= {name for name in files if name.startswith(("checkpoints/", "wandb/"))}
        for name in kept:
            assert (run / name).read_bytes() == before[run / name]
        if "model/mine.bin" in files and not overwrite:
            assert (run / "model.aside" / "mine.bin").read_bytes() == before[run / "model/mine.bin"]


METRICS = st.dictionaries(
    st.sampled_from(["step", "reward/mean", "optim/steps", "optim/lr", "optim/grad_norm", "sampler/logprob_diff_mean"]),
    st.none() | st.floats(-1, 1),
).map(lambda found: found | {"optim/skipped": 0})


@given(
    st.lists(METRICS, min_size=1, max_size=20), st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=30)
)
def test_a_verdict_of_any_numbers(metrics, pairs):
    """One of three words, and the interval has the gain it is about."""
    with folder() as place:
        rows = [found | {"step": step} for step, found in enumerate(metrics, 1)]
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        last = len(rows)
        rights = {0: [a for a, _ in pairs], last: [b for _, b in pairs]}
        lines = [json.dumps({"step": step, "eval/samples": 4, "eval/right": right}) for step, right in rights.items()]
        (place / "eval.jsonl").write_text("\n".join(lines) + "\n")
        said = verdict.write(place, last)
        found = json.loads((place / verdict.FILE).read_text())
    assert found["outcome"] in (verdict.LEARNED, verdict.NOT_LEARNED, verdict.UNKNOWN)
    assert found["outcome"] in said
    if found["evaluation"]:
        pair = found["evaluation"]
        assert pair["gain"] == pytest.approx(sum(b - a for a, b in pairs) / 4 / len(pairs))
        assert -1 <= pair["low"] <= pair["high"] <= 1

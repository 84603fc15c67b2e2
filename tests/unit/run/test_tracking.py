"""runtime/run/tracking.py: event files of a run, read back and compared with its metrics.jsonl and eval.jsonl."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import SMALL, go_back, interrupted, make_samples, read_jsonl, run_here, tiny_args, until

from grpo import Args
from runtime.arguments import flags
from runtime.data.samples import Problem
from runtime.run import tracking


def events(folder: Path) -> list:
    """The events of all files of a run in the order in which TensorBoard reads them: by the name of the file.

    A record is its length (8 bytes) and a checksum (4), the event, and a checksum of the event (4).
    """
    from tensorboardX.crc32c import crc32c
    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in sorted((folder / "tensorboard").glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            record, checksum = content[12 : 12 + length], content[12 + length : 16 + length]
            masked = ((crc := crc32c(record)) >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF
            assert struct.unpack("<I", checksum) == (masked,)
            found.append(Event.FromString(record))
            content = content[16 + length :]
    return found


def curves(folder: Path) -> dict[str, dict[int, float]]:
    """name -> step -> value, as TensorBoard shows them: a restart at a step drops what came from that step on."""
    found: dict[str, dict[int, float]] = {}
    for event in events(folder):
        if event.HasField("session_log"):
            for values in found.values():
                for step in [step for step in values if step >= event.step]:
                    del values[step]
        for value in (value for value in event.summary.value if not value.HasField("tensor")):
            found.setdefault(value.tag, {})[event.step] = value.simple_value
    return {name: values for name, values in found.items() if values}


def logged(folder: Path) -> dict[str, dict[int, float]]:
    """The numbers in metrics.jsonl and eval.jsonl, rounded to fp32; null stands for a number that is not finite."""
    found: dict[str, dict[int, float]] = {}
    for record in (*read_jsonl(folder / "metrics.jsonl"), *read_jsonl(folder / "eval.jsonl")):
        for name, value in record.items():
            if name != "step" and not isinstance(value, list | str):
                found.setdefault(name, {})[record["step"]] = math.nan if value is None else float(np.float32(value))
    return found


@pytest.mark.integration
def test_the_event_files_of_a_run_hold_its_metrics(tiny, tmp_path, monkeypatch, capsys):
    """Every number of every step under its name, also of a run that was interrupted and did a step again."""
    args = tiny_args(tiny, tmp_path, **SMALL, track=("tensorboard",), save_every=1)
    folder = interrupted(args, monkeypatch, after=3)
    assert max(curves(folder)["reward/mean"]) == 3
    go_back(folder, 2)  # so that step 3 is done again
    run_here(args)
    found, wanted = curves(folder), logged(folder)
    assert len(list((folder / "tensorboard").iterdir())) == 2
    assert found.keys() == wanted.keys() and len(wanted) > 40 and "eval/pass@1" in wanted
    for name, values in wanted.items():
        np.testing.assert_equal(found[name], values, err_msg=name)
    assert "tensorboard failed" not in capsys.readouterr().out


def test_a_run_from_scratch_drops_what_was_tracked_before(tiny, tmp_path):
    """With --overwrite the files are gone; a step that is not a number is one, and text is none."""
    tracker = tracking.TensorBoard(tmp_path, 0)
    tracker.log({"a": 1.5, "b": math.nan, "c": "text", "d": np.float64(2)}, step=1)
    tracker.finish()
    np.testing.assert_equal(curves(tmp_path), {"a": {1: 1.5}, "b": {1: math.nan}, "d": {1: 2.0}})
    again = tracking.TensorBoard(tmp_path, 0)
    again.log({"a": 2.5}, step=1)
    assert curves(tmp_path) == {"a": {1: 2.5}}, "visible before the end"


ROWS = [["1 + 1 =", "2\n| 3", "2", 1.0, -0.5], ["é", "</b>", "7", 0.0, 0.5]]


def tables(folder: Path) -> dict[str, dict[int, list[list[str]]]]:
    """name -> step -> rows of cells, as TensorBoard's text plugin shows a tensor of strings with two dimensions."""
    found: dict[str, dict[int, list[list[str]]]] = {}
    for event in events(folder):
        for value in (value for value in event.summary.value if value.HasField("tensor")):
            assert value.metadata.plugin_data.plugin_name == "text"
            rows, columns = (dim.size for dim in value.tensor.tensor_shape.dim)
            cells = [cell.decode() for cell in value.tensor.string_val]
            assert len(cells) == rows * columns
            found.setdefault(value.tag, {})[event.step] = [cells[columns * r :][:columns] for r in range(rows)]
    return found


def wandb_records(path: Path) -> Iterator:
    """The records of an offline run: a log in LevelDB's form, in blocks of 32 KiB, after a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content = path.read_bytes()
    place, record = 7, b""
    while place + 7 <= len(content):
        room = 32768 - place % 32768
        if room < 7:
            place += room
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        place += 7 + length
        record += content[place - length : place]
        if kind in (1, 4):  # a record, or the last part of one
            yield Record.FromString(record)
            record = b""


def test_a_table_of_samples_in_event_files(tmp_path):
    tracker = tracking.TensorBoard(tmp_path, 0)
    tracker.log({"reward/mean": 0.5, "samples/train": ROWS}, step=3)
    tracker.finish()
    assert curves(tmp_path) == {"reward/mean": {3: 0.5}}
    assert tables(tmp_path) == {"samples/train": {3: [list(tracking.COLUMNS), *(list(map(str, row)) for row in ROWS)]}}


@pytest.mark.integration
def test_a_table_of_samples_in_wandb_s_offline_files(tmp_path, monkeypatch):
    """The log of the run, which wandb's own class of records reads, names the file of the table."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = tracking.start_wandb(tmp_path, {"wandb_id": "abc", "command": ["grpo.py"]})
    tracker.log({"reward/mean": 0.5, "samples/train": ROWS}, step=3)
    tracker.finish()
    (log,) = tmp_path.glob("wandb/offline-run-*/run-abc.wandb")
    until(lambda: any(record.HasField("exit") for record in wandb_records(log)))  # written by another process
    logged = {}
    for record in wandb_records(log):
        for item in record.history.item:
            logged[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    assert logged["reward/mean"] == 0.5 and logged["samples/train/_type"] == "table-file"
    table = json.loads((log.parent / "files" / logged["samples/train/path"]).read_text())
    assert table == {"columns": list(tracking.COLUMNS), "data": ROWS}


def test_trackers_get_samples_every_ten_steps_and_of_evaluations(tmp_path, monkeypatch):
    """At most 32, spread over the batch, without secrets."""
    from runtime.run.logger import RunLog

    monkeypatch.setenv("MY_API_KEY", "sk-0123456789abcdef")
    log = RunLog(tmp_path, Args(), 1, 20, True)
    kept = {}
    log.trackers = {"wandb": SimpleNamespace(log=lambda values, step: kept.setdefault(step, {}).update(values))}
    samples = make_samples(prompts=20, group=4)
    for s in samples:
        s.response = "sk-0123456789abcdef"
    batch = [Problem([{"role": "user", "content": f"{p}?"}], "7", "exact", {}) for p in range(20)]
    step = {"optim/skipped": 0, "completions/truncated_frac": 0.0, "time/step": 1.0}
    for number in range(1, 21):
        log.step({"step": number, **step}, samples, batch)
    result = {"step": 20, "eval/pass@1": 0.5, "eval/samples": 1, "eval/length_mean": 1.0, "eval/truncated_frac": 0.0}
    log.evaluation(result | {"eval/problems": 20}, samples[:4], batch)
    assert [number for number, values in kept.items() if "samples/train" in values] == [1, 10, 20]
    rows = kept[10]["samples/train"]
    assert len(rows) == 27 and rows[-1][0] == "19?" and {row[1] for row in rows} == {"***"}
    assert len(kept[20]["samples/eval"]) == 4


def test_wandb_gets_no_name_that_is_too_long(tmp_path, monkeypatch):
    """It takes 128 characters, as many as a name has that follows from the arguments; the id is the run's own."""
    given, run = [], SimpleNamespace(finish=None)
    wandb = SimpleNamespace(Settings=dict, init=lambda **options: given.append(options["name"]) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    names = ["short", "x" * 128, "x" * 130, "x" * 129 + "y"]
    for name in names:
        tracking.start_wandb(tmp_path / name, {"wandb_id": "1", "command": []})
    assert given == [name[:128] for name in names]


def test_a_tracker_that_fails_ends_alone(tmp_path, capsys):
    """A disk that is full, a library that is missing: a warning, and the other tracker and the run go on."""
    from runtime.run.logger import RunLog

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("a file where the folder should be")
    log = RunLog(tmp_path / "run", Args(track=("tensorboard",)), 1, 10, True)
    assert log.trackers == {} and "warning: tensorboard failed (FileExistsError" in capsys.readouterr().out
    kept, failing = [], tracking.TensorBoard(tmp_path, 0)
    failing.writer.close()
    log.trackers = {"tensorboard": failing, "wandb": type("Kept", (), {"log": lambda *a, **k: kept.append(k)})}
    for step in (1, 2):
        log.write("metrics.jsonl", {"step": step, "reward/mean": 0.5})
    said = capsys.readouterr().out
    assert [call["step"] for call in kept] == [1, 2] and said.count("warning: tensorboard failed") == 1
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) == 2


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], ()),
        (["--track"], ("wandb",)),
        (["--track", "--seed", "2"], ("wandb",)),
        (["--seed", "2", "--track"], ("wandb",)),
        (["--track", "wandb"], ("wandb",)),
        (["--track", "tensorboard"], ("tensorboard",)),
        (["--track=tensorboard"], ("tensorboard",)),
        (["--track", "wandb", "tensorboard", "--seed", "2"], ("wandb", "tensorboard")),
    ],
)
def test_track_without_a_value_means_wandb(words, found):
    args = flags.parse(Args, words=words)
    assert args.track == found and args.seed == (2 if "--seed" in words else 1)

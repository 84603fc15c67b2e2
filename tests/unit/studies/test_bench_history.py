"""studies/bench_history.py: measurements of a commit are kept, and one that is worse than earlier ones is found."""

from __future__ import annotations

import json
import os
import shlex
import shutil

import bench_history
import pytest
from helpers import ROOT, TINY_RUN, read_jsonl

STEADY = [[10.0, 10.2, 9.9], [10.1, 9.8, 10.0], [10.0, 10.1, 10.1]]


def test_the_deviation_is_that_of_repeated_runs():
    """Pooled within commits: that commits differ is no noise."""
    sigma, freedom = bench_history.deviation([[1.0, 3.0], [101.0, 103.0], [7.0]])
    assert freedom == 2 and sigma == pytest.approx(2**0.5)


@pytest.mark.parametrize(("what", "mine", "word", "code"), [
    ("speed", [10.1, 10.0, 9.9], "within", 0),
    ("speed", [11.0, 11.2, 10.9], "WORSE", 1),
    ("speed", [9.0, 9.1, 8.9], "better", 0),
    ("accuracy", [9.0, 9.1, 8.9], "WORSE", 1),
    ("accuracy", [11.0, 11.1, 10.9], "better", 0),
])  # fmt: skip
def test_the_worse_side_of_the_corridor_fails(what, mine, word, code):
    """More time and memory are worse, and so is less accuracy; the other side is only told."""
    text, found = bench_history.verdict(what, mine, STEADY, [*STEADY, mine])
    assert found == code and word in text and "corridor 9." in text


def test_noise_widens_the_corridor_and_equal_runs_do_not_close_it():
    noisy = [[8.0, 12.0, 10.0], [9.0, 12.0, 9.0]]
    assert bench_history.verdict("speed", [11.0, 11.0, 11.2], noisy, noisy)[1] == 0
    equal = [[10.0, 10.0, 10.0], [10.0, 10.0, 10.0]]
    assert bench_history.verdict("memory", [10.3, 10.3, 10.3], equal, equal)[1] == 0
    assert bench_history.verdict("memory", [10.8, 10.8, 10.8], equal, equal)[1] == 1


def test_too_few_runs_are_no_verdict():
    assert bench_history.verdict("speed", [20.0, 20.0], [], [[20.0, 20.0]])[1] == 2
    assert bench_history.verdict("speed", [20.0], [[10.0]], [[10.0], [20.0]])[1] == 2


@pytest.mark.parametrize(("words", "said"), [
    (["--what", "speed,beauty"], "--what beauty"),
    (["--project", "nowhere"], "--project nowhere: no grpo.py there"),
    (["--repeats", "1"], "one run has no noise"),
])  # fmt: skip
def test_bad_arguments_are_refused(words, said, capsys):
    with pytest.raises(SystemExit) as end:
        bench_history.parse(words)
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_the_same_command_measures_what_is_missing(tmp_path, monkeypatch):
    """After an interruption only the runs without a line are made; another machine or other sizes count for nothing."""
    runs = []
    monkeypatch.setattr(bench_history, "machine_rate", lambda: ("machine", 2e9))
    monkeypatch.setattr(bench_history, "busy_cores", lambda: 0.0)
    monkeypatch.setattr(
        bench_history, "run", lambda *a: runs.append(a) or {"seconds": 3.0, "memory": 1.0, "start": 2.0}
    )
    file = tmp_path / "history.jsonl"
    words = ["--file", str(file), "--what", "speed,memory", "--steps", "5"]
    assert bench_history.main([*words, "--repeats", "2"]) == 0
    assert len(runs) == 2 and [line["what"] for line in read_jsonl(file)] == ["speed", "memory"] * 2
    assert read_jsonl(file)[0]["value"] == 6.0 and runs[0][1][-4:] == ["--total_steps", "5", "--eval_prompts", "0"]
    file.write_text("".join(f"{line}\n" for line in file.read_text().splitlines()[:3]))
    assert bench_history.main([*words, "--repeats", "2"]) == 0
    assert len(runs) == 3 and [line["what"] for line in read_jsonl(file)][3:] == ["memory"]
    bench_history.main(["--file", str(file), "--what", "speed", "--steps", "6", "--repeats", "2"])
    assert len(runs) == 5


def test_idle_cores_are_not_busy():
    """Of 10 user, 2 nice, 5 system, 1000 idle, 300 waiting, 1 and 3 interrupts, 4 stolen; guests are users already."""
    assert bench_history.busy_ticks("cpu  10 2 5 1000 300 1 3 4 7 8\ncpu0 1 1 1 1 1 1 1 1 1 1\n") == 25
    assert -0.1 < bench_history.busy_cores(0.2) < 1.2 * os.cpu_count()


def test_the_table_has_a_row_for_each_commit(tmp_path, monkeypatch, capsys):
    """Lines of other sizes are left out; a kind that was not measured is an empty cell."""
    monkeypatch.setattr(bench_history, "machine_rate", lambda: ("machine", 2e9))
    line = {"committed": "2026-01-02T03:04:05", "machine": "machine", "arguments": [], "steps": 8}
    lines = []
    for commit, values in {"a": [10.0, 12.0], "b": [7.0]}.items():
        for value in values:
            more = {"commit": commit, "code": commit, "value": value, "seconds": value / 4}
            lines.append(line | {"what": "speed"} | more)
    lines.append(line | {"commit": "a", "code": "a", "what": "accuracy", "steps": None, "value": 0.75})
    lines.append(line | {"commit": "c", "code": "c", "what": "start", "steps": 5, "value": 1.0})
    file = tmp_path / "history.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert bench_history.main(["--file", str(file), "--table"]) == 0
    head, *rows = capsys.readouterr().out.split("\n\n|")
    assert head == "machine (this one)"
    assert rows[0].splitlines()[2:4] == [
        "| `a` | 2026-01-02 | 2.75 ± 0.35 | 11 ± 1.4 |  |  | 0.75 |",
        "| `b` | 2026-01-02 | 1.75 | 7 |  |  |  |",
    ]


def test_each_machine_has_a_table_of_its_own(tmp_path, monkeypatch, capsys):
    """Numbers of two machines are never in one table, and nothing with the given sizes is said to be so."""
    monkeypatch.setattr(bench_history, "machine_rate", lambda: ("second", 2e9))
    line = {"committed": "2026-01-02T03:04:05", "arguments": [], "steps": 8, "what": "start", "code": "a"}
    lines = [line | {"machine": name, "commit": name, "value": 1.0} for name in ("third", "first")]
    file = tmp_path / "history.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--file", str(file), "--table"]
    assert bench_history.main(words) == 0
    first, third = capsys.readouterr().out.split("third\n\n")
    assert first.startswith("first\n\n|") and "`first`" in first and "`third`" not in first
    assert "`third`" in third and "`first`" not in third
    assert bench_history.main([*words, "--steps", "5"]) == 1
    assert "--steps 5" in capsys.readouterr().out


@pytest.mark.slow
def test_a_commit_with_a_sleep_in_its_update_is_caught(tiny, tmp_path, capsys):
    """Real runs of this checkout, of an edit that changes nothing, and of one whose update sleeps."""
    small = TINY_RUN | {"model_name_or_path": str(tiny)}
    words = []
    for name, value in small.items():
        if name not in ("total_steps", "eval_prompts"):
            words += (
                [f"--{name}" if value else f"--no-{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]
            )
    line = ["--file", str(tmp_path / "history.jsonl"), "--what", "speed", "--steps", "6"]
    line += ["--arguments", shlex.join(words)]
    assert bench_history.main(line) == 0
    verdicts = []
    for edit in ("\n# nothing\n", "\nimport time\nplain_backward = backward\ndef backward(*arguments):\n"
                 "    time.sleep(2)\n    plain_backward(*arguments)\n"):  # fmt: skip
        project = tmp_path / f"project{len(verdicts)}"
        project.mkdir()
        for path in ROOT.glob("*.py"):
            shutil.copy(path, project)
        for part in ("runtime", "graders"):
            shutil.copytree(ROOT / part, project / part)
        shutil.copytree(ROOT / "docs", project / "docs", ignore=shutil.ignore_patterns("*.png"))
        (project / "utils.py").write_text((project / "utils.py").read_text() + edit)
        verdicts.append(bench_history.main([*line, "--project", str(project), "--gate", "--repeats", "2"]))
    lines = read_jsonl(tmp_path / "history.jsonl")
    assert len({line["code"] for line in lines}) == 3 and len(lines) == 7
    assert verdicts == [0, 1], capsys.readouterr().out + json.dumps(lines)

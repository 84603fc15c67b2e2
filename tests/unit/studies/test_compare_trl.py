"""studies/compare_trl.py: equal work on both sides, turns, the page; studies/speedrun.py: when its clock stops."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import compare_trl
import compare_trl_worker
import pytest
import speedrun
from helpers import ROOT, TINY_RUN, finish, run_environment

from runtime.arguments import flags

TRL = os.environ.get("TRL_FOLDER")
CELL = compare_trl.Cell("table", "models/m", 4, 8, 32)


def steps(seconds: list[float], phases: dict[str, float], peak: float) -> list[dict]:
    """Records of a side's steps."""
    times = dict.fromkeys(compare_trl.PHASES, 0.0) | phases
    return [{"seconds": s, "phases": times, "peak_gib": peak, "response_tokens": 1024, "tokens": 2048} for s in seconds]


@pytest.fixture
def results() -> dict:
    """Measurements of one shape in which TRL is slower, but has the faster update and less memory."""
    records = {
        "ours": steps([2.0, 4.0, 2.0], {"generate": 1.0, "update": 0.9}, 3.0),
        "tuned": steps([8.0, 12.0, 6.0], {"generate": 7.0, "update": 0.5}, 1.0),
    }
    floor = {"generate": 0.25, "shared": 0.25, "padded": 9.0, "optimizer": 0.25, "push": 0.25, "parameters": 5e7}
    return {
        "cells": {CELL.name(): {"cell": vars(CELL), "records": records}},
        "floors": {CELL.name(): floor},
        "machine": {
            "machine": "a CPU",
            "cores": 2,
            "device": "cpu",
            "dtype": "bfloat16",
            "flop_per_second": 1e12,
            "bytes_per_second": 2e10,
            "versions": {"torch": "2.13"},
        },
        "trl": "1.16.0",
        "tuned": {"choice": [1024, "sdpa"], "tried": {"1024 tokens, sdpa": 8.0}, "options": {"beta": 0}},
        "date": "2026-01-01",
        "commit": "0123456789",
        "load": 0.1,
    }


def test_the_page_has_the_ratio_of_neighbors_and_says_where_trl_is_ahead(results):
    """Ratios round by round (4, 3, 3: the median is 3), rates and the floor by the median step."""
    text = compare_trl.page([results])
    (row,) = [line for line in text.splitlines() if line.startswith("| 32 | 8 |")]
    assert (
        row == "| 32 | 8 | 2.00 | 8.00 | 3.00x (3.00 to 4.00) | 1.00 / 7.00 | 0.90 / 0.50 | 3.0 / 1.0 | 50 % / 12 % |"
    )
    assert "\n## bfloat16, commit 0123456789\n" in text and "measured 2026-01-01 at a load of 0.1" in text
    behind = text.partition("### Where TRL is ahead")[2]
    assert "update 0.50 s, ours 0.90; peak memory 1.0 GiB, ours 3.0" in behind
    assert "generate" not in behind and "its step took" not in behind
    for side in ("ours", "tuned"):
        for step in results["cells"][CELL.name()]["records"][side]:
            step["seconds"] = {"ours": 9.0, "tuned": 8.0}[side]
    assert "its step took 8.00 s, ours 9.00" in compare_trl.page([results])


def test_the_shorter_floor_counts(results):
    """The rates are measured before and after; another program may have been busy during one of them."""
    name = CELL.name()
    after = {"floors": {name: dict(results["floors"][name]) | {"generate": 0.1, "shared": 0.5}}}
    compare_trl.note_floors(results, after | {"flop_per_second": 2e12, "bytes_per_second": 1e10})
    assert (results["floors"][name]["generate"], results["floors"][name]["shared"]) == (0.1, 0.25)
    assert (results["machine"]["flop_per_second"], results["machine"]["bytes_per_second"]) == (2e12, 2e10)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("choice", [None, (1024, "eager"), (8192, "sdpa")])
def test_both_sides_train_on_the_same_samples(tmp_path, device, choice):
    """Micro-batches times accumulation is a step's samples; only the tuned side has options beyond the work."""
    args = compare_trl.Args(trl_options='{"top_k": 5}')
    for prompts, group, length in ((8, 8, 32), (2, 4, 512), (2, 16, 1024), (3, 5, 32)):
        cell = compare_trl.Cell("table", "m", prompts, group, length)
        machine = {"device": device, "dtype": "bfloat16"}
        options = compare_trl.trl_options(cell, tmp_path, args, machine, choice)
        assert options["use_cpu"] == (device == "cpu") and options["bf16"]
        micro = options["per_device_train_batch_size"]
        assert micro * options["gradient_accumulation_steps"] == prompts * group
        assert options["num_generations"] == group and options["max_completion_length"] == length
        assert ("gradient_checkpointing" in options, "top_k" in options) == (choice is not None, choice is not None)
        words = compare_trl.our_words(cell, "ours", tmp_path / "rows", tmp_path, args, "bfloat16")
        assert {f"--num_samples_per_prompt_rollout={group}", f"--max_response_length={length}"} <= set(words)


def test_flags_for_ours_replace_those_of_the_comparison(tmp_path):
    args = compare_trl.Args(ours="--learning_rate 1e-5 --micro_batch_tokens 4096")
    words = compare_trl.our_words(CELL, "ours", tmp_path, tmp_path, args, "float32")
    assert words[-4:] == ["--learning_rate", "1e-5", "--micro_batch_tokens", "4096"]
    assert not any(word.startswith("--learning_rate=") for word in words)


def test_the_asynchronous_side_has_one_flag_more(tmp_path):
    words = {}
    for side in compare_trl.OURS:
        words[side] = compare_trl.our_words(CELL, side, tmp_path, tmp_path, compare_trl.Args(), "float32")
    assert set(words["async"]) - set(words["ours"]) == {"--async_steps=1"}
    assert set(words["ours"]) <= set(words["async"])


def test_the_page_compares_both_of_ours_with_trl_and_neither_with_the_other(results):
    cell = compare_trl.Cell("async", "models/m", 4, 8, 32, ("ours", "async", "tuned"), together=False, ends=True)
    found = {}
    for side, seconds in (("ours", 4.0), ("async", 3.0), ("tuned", 12.0)):
        found[side] = steps([seconds, seconds, seconds], {"update": seconds}, 1.0)
    results["cells"][cell.name()] = {"cell": vars(cell), "records": found}
    text = compare_trl.page([results]).partition("### The same, asynchronous")[2].partition("###")[0]
    assert "\nTRL, tuned / grpo.py: **3.00x** (3.00 to 3.00)\n" in text
    assert "\nTRL, tuned / grpo.py --async_steps 1: **4.00x** (4.00 to 4.00)\n" in text
    assert "before the last update: another algorithm" in text
    assert text.count("x** (") == 2 and "| grpo.py --async_steps 1 | 3.00 (3.00 to 3.00) |" in text
    assert "async" not in compare_trl.page([results]).partition("### Where TRL is ahead")[2]


def test_an_asynchronous_side_never_waits_for_another(monkeypatch, tmp_path):
    """Its engine would sample on while the others take their turn, and the step be timed without that."""
    groups = []
    monkeypatch.setattr(compare_trl, "take_turns", lambda starts, rounds: groups.append((set(starts), rounds)) or fake)
    fake = {name: steps([1.0], {}, 1.0) for name in ("ours", "async", "tuned")}
    (cell,) = compare_trl.cells(compare_trl.Args(parts=("async",)), "small", "large", "late")
    machine = {"device": "cpu", "dtype": "bfloat16"}
    args = compare_trl.Args(parts=("async",), trl=str(tmp_path), rounds=3)
    found = compare_trl.measure(cell, tmp_path, tmp_path, args, machine, (1024, "eager"))
    assert groups == [({"ours"}, 5), ({"async"}, 5), ({"tuned"}, 5)] * 2
    assert {name: len(records) for name, records in found.items()} == {"ours": 2, "async": 2, "tuned": 2}


def test_every_part_has_its_number_of_steps(monkeypatch, tmp_path):
    """Nine where responses end by themselves, three otherwise, one in the table; one of each with --quick."""
    asked = []
    record = steps([1.0], {}, 1.0)[0] | {"response_tokens": 8 * 8 * 32, "tokens": 1}

    def take(starts, rounds):
        asked.append(rounds)
        return {name: [record] for name in starts}

    monkeypatch.setattr(compare_trl, "take_turns", take)
    machine = {"device": "cpu", "dtype": "bfloat16"}
    for quick, expected in ((False, [9, 3, 1]), (True, [1, 1, 1])):
        args = compare_trl.Args(trl=str(tmp_path), parts=("quickstart", "equal", "table"), quick=quick)
        for part in args.parts:
            cell = compare_trl.Cell(part, "m", 8, 8, 32, ends=part == "quickstart")
            compare_trl.measure(cell, tmp_path, tmp_path, args, machine, (1024, "eager"))
        assert asked == expected
        asked.clear()


def test_rewards_differ_from_response_to_response():
    """Groups of equal reward would be left out of our update, and of no other's."""
    texts = ("", "a", "b", "ab", "ba")
    rewards = [compare_trl_worker.by_text(text, "", {"trains": True}) for text in texts]
    assert len(set(rewards)) == 5 and all(0 <= r < 1 for r in rewards)
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    assert compare_trl_worker.rewards_by_text(completions, [True] * 5) == rewards
    assert compare_trl_worker.rewards_by_text(completions, [False, True] * 2 + [False]) == [
        1,
        rewards[1],
        1,
        rewards[3],
        1,
    ]


def test_two_groups_of_eight_train_when_the_task_is_learned(tmp_path):
    """All sides read which ones from the rows."""
    rows = [json.loads(line) for line in compare_trl.write_rows(8, 2, tmp_path).read_text().splitlines()]
    assert [row["trains"] for row in rows] == [True] * 2 + [False] * 6
    (cell,) = compare_trl.cells(compare_trl.Args(parts=("late",)), "small", "large", "late")
    assert cell.model == "late" and cell.ends and cell.sides == ("ours", "tuned")


CHILD = """
import sys, time
sys.path[:0] = [{scripts!r}]
from compare_trl_worker import Gate
gate = Gate()
while True:
    begun = time.time()
    time.sleep({pause})
    gate.report(begun=begun, ended=time.time())
"""


@pytest.mark.integration
def test_sides_take_turns(tmp_path, monkeypatch):
    """Real processes: one step each before the first turn, then one after the other, and none is left at the end."""
    children = []
    plain = compare_trl.subprocess.Popen

    def start(line, **options):
        code = CHILD.format(scripts=str(ROOT / "studies"), pause=line[-1])
        children.append(plain([sys.executable, "-c", code], **options))
        return children[-1]

    monkeypatch.setattr(compare_trl.subprocess, "Popen", start)
    starts = {name: partial(compare_trl.Side, name, pause, tmp_path / name) for name, pause in (("a", 0.1), ("b", 0.2))}
    records = compare_trl.take_turns(starts, 2)
    order = sorted((step["begun"], step["ended"], name) for name, found in records.items() for step in found)
    assert [name for *_, name in order] == ["a", "b", "a", "b"]
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(order))
    assert all(step["seconds"] >= 0.1 for step in records["a"])
    assert all(child.poll() is not None for child in children) and len(children) == 2


def test_a_side_that_ends_is_an_error_with_its_last_words(tmp_path, monkeypatch):
    plain = compare_trl.subprocess.Popen
    code = "import sys; print('no such model', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr(
        compare_trl.subprocess, "Popen", lambda line, **rest: plain([sys.executable, "-c", code], **rest)
    )
    with pytest.raises(RuntimeError, match="no such model"):
        compare_trl.once("ours", {}, tmp_path / "log")


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"trl": "nowhere"}, "--trl nowhere: no TRL there"),
        ({"json": "nowhere/results.json"}, "--json nowhere/results.json"),
        ({"rounds": 0}, "--rounds 0"),
        ({"groups": (1, 4)}, "--groups 1"),
        ({"trl_options": "{"}, "--trl_options: not JSON"),
        ({"avx2": True}, "--avx2 with --dtype auto"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, capsys, changes, says):
    (tmp_path / "trl").mkdir()
    values = {"trl": str(tmp_path), "json": str(tmp_path / "results.json")} | changes
    with pytest.raises(SystemExit) as end:
        compare_trl.main(compare_trl.Args(**values))
    assert end.value.code == 2 and says in capsys.readouterr().err


AVX2_SIDE = """
import json, sys
import compare_trl_worker

def answers():
    import torch
    from vllm.platforms import current_platform
    current_platform.import_kernels()
    loaded = [line.split("/")[-1].strip() for line in open("/proc/self/maps") if "/vllm/_C" in line]
    return [torch.backends.cpu.get_cpu_capability(), sorted(set(loaded))]

compare_trl_worker.Gate = lambda: sys.exit(print(json.dumps(answers())))  # before the run
compare_trl_worker.ours([])
"""


@pytest.mark.slow
def test_avx2_limits_torch_and_the_kernels_of_vllm(results):
    """grpo.py's process loads vLLM's AVX2 kernels; on a CPU without more the limit changes nothing."""
    environment = run_environment() | compare_trl.AVX2 | {"PYTHONPATH": f"{ROOT}:{ROOT / 'studies'}"}
    done = subprocess.run(
        [sys.executable, "-c", AVX2_SIDE], env=environment, capture_output=True, text=True, timeout=120
    )
    assert json.loads(done.stdout.splitlines()[-1]) == ["AVX2", ["_C_AVX2.abi3.so"]], done.stderr[-3000:]
    assert "## bfloat16, commit" in compare_trl.page([results])
    results["machine"]["limit"] = "AVX2 instructions"
    assert "## bfloat16, AVX2 instructions, commit" in compare_trl.page([results])


def test_the_page_is_what_the_measurements_say(tmp_path, monkeypatch):
    """docs/evidence/performance.md, by the command that it names."""
    folder = ROOT / "docs" / "evidence"
    page = (folder / "performance.md").read_text()
    command = re.search(r"`python studies/compare_trl.py ([^`]+)`", page)[1].split()
    monkeypatch.chdir(folder)
    args = flags.parse(compare_trl.Args, words=[*command[:-1], str(tmp_path / "page.md")])
    compare_trl.main(args)
    assert (tmp_path / "page.md").read_text() == page


def test_a_page_needs_measurements(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        compare_trl.main(compare_trl.Args(json=str(tmp_path / "results.json"), markdown=str(tmp_path / "page.md")))
    assert end.value.code == 2 and "no measurements yet" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(TRL is None, reason="TRL_FOLDER names no folder with TRL")
def test_a_step_of_both_is_timed(tiny, tmp_path):
    """The real GRPOTrainer and grpo.py on a tiny model; a second call measures nothing again."""
    line = [sys.executable, str(ROOT / "studies" / "compare_trl.py"), "--json", str(tmp_path / "r.json"), "--quick"]
    line += ["--model_name_or_path", str(tiny), "--table_model", str(tiny), "--dtype", "float32"]
    line += ["--late_model", str(tiny)]
    line += [
        "--parts",
        "quickstart",
        "late",
        "async",
        "allocator",
        "equal",
        "table",
        "--max_response_length",
        "8",
        "--lengths",
        "4",
        "16",
        "--groups",
        "2",
        "4",
    ]
    finish(line, tmp_path / "log", 900)
    text = (tmp_path / "r.json").read_text()
    results = json.loads(text)
    assert [set(entry["records"]) for entry in results["cells"].values()] == [
        {"ours", "tuned", "default"},
        {"ours", "tuned"},
        {"ours", "async", "tuned"},
        {"ours", "allocator"},
        {"ours", "tuned"},
        {"ours", "tuned"},
        {"ours", "tuned"},
    ]
    for entry in results["cells"].values():
        for side, found in entry["records"].items():
            for step in found:
                assert step["seconds"] >= sum(step["phases"].values()) - 0.1 and min(step["phases"].values()) > -0.01
                assert step["phases"]["update"] > 0
                assert step["phases"]["generate"] > 0 or side == "async"
    finish(line, tmp_path / "log", 300)
    assert json.loads((tmp_path / "r.json").read_text())["cells"] == results["cells"]


# ------------------------------------------------------------------------------------------------------------ speedrun


RUNNER = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
folder.mkdir()
for step, value in enumerate([0.1, 0.5, 0.9, 0.95]):
    time.sleep(0.2)
    with open(folder / "eval.jsonl", "a") as f:
        f.write(json.dumps({"step": step, "eval/pass@1": value})[:9])
        f.flush()
        time.sleep(0.1)
        f.write(json.dumps({"step": step, "eval/pass@1": value})[9:] + "\\n")
"""


@pytest.mark.integration
@pytest.mark.parametrize("target, reached, seen", [(0.8, True, 3), (0.99, False, 4)])
def test_the_clock_stops_at_the_first_evaluation_that_reaches_the_target(tmp_path, target, reached, seen):
    """Half a line is no evaluation; a run that ends below the target has not reached it; the run is ended."""
    line = [sys.executable, "-c", RUNNER, str(tmp_path / "run")]
    began = time.perf_counter()
    seconds, found = speedrun.time_to_target(line, tmp_path / "run", target, 60.0)
    spent = time.perf_counter() - began
    assert [row["pass@1"] for row in found] == [0.1, 0.5, 0.9, 0.95][:seen]
    assert (seconds is not None) == reached
    if reached:
        assert seconds == found[-1]["seconds"] and 0.9 <= seconds <= spent


def test_a_run_past_its_limit_has_failed(tmp_path):
    line = [sys.executable, "-c", "import time; time.sleep(60)"]
    began = time.perf_counter()
    assert speedrun.time_to_target(line, tmp_path / "run", 0.5, 0.3) == (None, [])
    assert time.perf_counter() - began < 10


@pytest.mark.slow
def test_a_real_run_is_timed_until_its_first_evaluation(tiny, tmp_path, capsys):
    """grpo.py on a tiny model, with a target that any weights reach, and one that none do."""
    words = " ".join(f"--{name}={value}" for name, value in TINY_RUN.items() if not isinstance(value, bool))
    words += f" --model_name_or_path={tiny} --no-mask_truncated_completions --eval_every 1"
    for target, code in ((0.0, 0), (2.0, 1)):
        args = speedrun.Args(seeds=(1,), flags=words, target=target, keep=str(tmp_path / str(target)))
        assert speedrun.main(args) == code
    output = capsys.readouterr().out
    assert output.count("step   0   pass@1") == 2 and "not reached" in output
    assert (Path(tmp_path) / "2.0" / "seed-1" / "model").is_dir()


def test_a_track_without_its_hardware_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(speedrun, "gpus", list)
    with pytest.raises(SystemExit) as end:
        speedrun.main(speedrun.Args(track="gpu"))
    assert end.value.code == 2 and "--track gpu" in capsys.readouterr().err

"""Verdicts and the table of studies/model_zoo.py."""

from __future__ import annotations

import copy

import model_zoo
import pytest

LAYOUTS = {"attention": "sdpa", "shared": 1e-7, "padded": 0.0, "packed": "ValueError: no mask", "critic": True}
RIGHT = {
    "name": "llama",
    "type": "llama",
    "flags": [],
    "model": {"class": "LlamaForCausalLM", "parameters": 1},
    "run": "ok",
    "diff": [1e-6, 2e-6],
    "moved": True,
    "resume": "equal",
    "alone": {"served by": "LlamaForCausalLM", "equal": True},
    "layouts": LAYOUTS,
}
REJECTED = RIGHT | {"run": "rejected: no kernel; use --rollout hf", "hf": "ok"}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"diff": [1e-6, 2e-4]}, "engine differs by 2.0e-04 nats"),
        ({"diff": [float("nan"), 0.0]}, "engine differs by nan nats"),
        ({"moved": False}, "no weight was changed"),
        ({"resume": "different"}, "resume: different"),
        ({"alone": {"served by": "X", "equal": False}}, "alone:"),
        ({"run": "failed: KeyError: 'x'"}, "failed: KeyError"),
        ({"run": REJECTED["run"], "hf": "failed: TypeError"}, "--rollout hf: failed"),
        ({"model": {"error": "ValueError: no"}}, "no model: ValueError: no"),
        ({"layouts": {"error": "RuntimeError: no"}}, "layouts: RuntimeError: no"),
    ],
)
def test_every_part_of_a_row_can_fail_it(changes, words):
    (fault,) = model_zoo.faults(copy.deepcopy(RIGHT) | changes)
    assert words in fault
    assert model_zoo.faults(RIGHT) == model_zoo.faults(REJECTED) == []


def test_the_table_has_a_cell_for_each_heading():
    rows = [RIGHT, REJECTED, RIGHT | {"model": {"error": "ValueError: a | b"}}]
    lines = model_zoo.table(rows).splitlines()
    assert {line.count("|") for line in lines} == {len(model_zoo.HEAD) + 1}
    assert (
        "vLLM's class | 1e-06 | yes | 2e-06 | equal | same tokens | - | sdpa | exact | exact | rejected | yes"
        in lines[2]
    )


@pytest.mark.parametrize(
    "text, code, expected",
    [
        ("error: no kernel; use X\nwarning: a\n", 2, "rejected: no kernel; use X"),
        ("(EngineCore) ERROR Traceback (most recent call last):\nerror: no kernel\n", 2, "rejected: no kernel"),
        ("Traceback (most recent call last):\nerror: no\n", 2, "failed: "),
        ("a\nvllm.x.SomeError: what\nEngineFailed: it\n", 1, "failed: vllm.x.SomeError: what"),
        ("", 0, "ok"),
    ],
)
def test_a_rejection_is_one_line_without_a_traceback(tmp_path, text, code, expected):
    (tmp_path / "run.log").write_text(text)
    assert model_zoo.outcome(tmp_path, "run", {"code": code}).startswith(expected)

"""tests/fake_cuda/, as far as it can be tested without the CUDA wheels: `make cuda-check` has the rest."""

from __future__ import annotations

import json
import re

from helpers import ROOT

FOLDER = ROOT / "tests" / "fake_cuda"


def test_counters_have_one_name_each():
    """The names that Python asks for are in the order of the enumeration in C."""
    enumeration = re.search(r"enum Counter \{(.*?)COUNTERS", (FOLDER / "stubs" / "fake.h").read_text(), re.DOTALL)
    names = re.search(r"names\[COUNTERS\] = \{(.*?)\}", (FOLDER / "stubs" / "device.c").read_text(), re.DOTALL)
    assert [word.lower() for word in re.findall(r"\w+", enumeration[1])] == re.findall(r'"(\w+)"', names[1])


def test_no_inner_micro_batch_waits_for_the_gpu():
    """Of the committed table: what an optimizer step does not end has nothing to wait for."""
    table = json.loads((FOLDER / "golden" / "waits.json").read_text())
    for name, run in table.items():
        waits = run["waits"].get("update, inner micro-batches", {})
        assert waits == {} or name in ("grpo-zero3", "grpo-two-ranks-zero3", "grpo-offload")


def test_choices_do_not_depend_on_nvcc_or_cudnn():
    """Of the committed table: seven cards, three data types; graphs reach as many sequences as may decode."""
    table = json.loads((FOLDER / "golden" / "backends.json").read_text())
    assert len(table) == 7 * 3 * 3
    for name, row in table.items():
        assert "cudnn" not in row.values()
        assert row == table[name.replace(" without ", " with ")]
        assert row.get("rejected") or row.get("largest_graph") == row.get("sequences")

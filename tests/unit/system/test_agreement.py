"""runtime/system/agreement.py: one choice for all ranks, and no launch whose ranks differ without a word."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, rejected, tiny_args

from runtime.engine import choices
from runtime.system import agreement

RANK = """
import json, sys
from runtime.system import agreement
mine = json.loads(sys.argv[1])
found = agreement.exchange("start", mine, float(sys.argv[2]))
agreement.check_equal([one["facts"] for one in found])
print(json.dumps(agreement.decided([one["choices"] for one in found])))
"""


def choice(capability=(0, 0), card=0, **more) -> dict:
    """The choice of a rank for a device; its sizes follow from the memory of the GPU."""
    known = {"capability": list(capability), "card": card, "dtype": "bfloat16", "sizes": {"tokens": card}}
    return known | {"layout": "shared", "attention": "sdpa"} | more


def launched(*ranks: dict | str, patience: float = 60.0) -> list[tuple[int, str]]:
    """(exit code, output) of a process for each rank, through a real board; of a text, Python that runs instead."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(len(ranks))}
    processes = []
    for number, mine in enumerate(ranks):
        line = [sys.executable, "-c", mine if isinstance(mine, str) else RANK, json.dumps(mine), str(patience)]
        environment = {**os.environ, **place, "RANK": str(number), "PYTHONPATH": str(ROOT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen(line, env=environment, **pipes))
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, outputs, strict=True)]


BOARD = "from runtime.system import watchdog; watchdog.board_of_launch()"
FAILS = f"{BOARD}.set('failure', 'rank 1 ended first, with exit code 2; see what node1 printed')"
ENDED = f"{BOARD}.set('ended', 'the ranks on node1 ended with exit code 0 before this one began')"


@pytest.mark.integration
@pytest.mark.parametrize("other, patience, ends, words", [
    (FAILS, 600.0, 1, "another rank failed: rank 1 ended first, with exit code 2; see what node1 printed"),
    (ENDED, 600.0, 2, "the ranks on node1 ended with exit code 0 before this one began"),
    ("", 3.0, 1, "rank 1 did not arrive within 3 s; see what it printed"),
])  # fmt: skip
def test_a_rank_that_never_comes_is_not_waited_for(other, patience, ends, words):
    """It has failed or ended before, as its node's launcher tells the others, or is late."""
    (code, text), _ = launched({"facts": {}, "choices": choice()}, other, patience=patience)
    assert (code, text) == (ends, f"error: {words}\n")


def test_gpus_take_the_sizes_of_the_smallest_and_the_type_of_the_oldest():
    large, small = choice((8, 0), 80), choice((8, 0), 40)
    old = choice((7, 5), 48, dtype="float16", layout="padded")
    assert agreement.decided([large, small])["sizes"] == agreement.decided([small, large])["sizes"] == {"tokens": 40}
    found = agreement.decided([large, small, old])
    assert (found["dtype"], found["layout"], found["sizes"]) == ("float16", "padded", {"tokens": 40})
    assert agreement.decided([large]) == large


def test_a_run_goes_as_all_ranks_have_decided(tiny, tmp_path, monkeypatch):
    """Rank 0 has a CPU with bf16; this rank, whose CPU has none, takes what rank 0 chose."""
    theirs = {}

    def exchange(name, mine, patience):
        sizes = {key: 2 * value for key, value in mine["choices"]["sizes"].items()}
        theirs.update(mine["choices"], dtype="bfloat16", layout="packed", attention="grouped", sizes=sizes)
        assert theirs["sizes"] != mine["choices"]["sizes"]
        return [mine | {"choices": theirs}, mine]

    monkeypatch.setattr(agreement, "exchange", exchange)
    args = tiny_args(tiny, tmp_path, batch_layout="padded")
    found = choices.choose(args, torch.device("cpu"), torch.float32, "sdpa", {})
    assert (found.dtype, found.layout, found.attention) == (torch.bfloat16, "packed", "grouped")
    assert vars(found.sizes) == theirs["sizes"] and found.reason == "as decided for all ranks"


@pytest.mark.parametrize(
    ("kind", "name", "there", "here"),
    [
        ("file", "grpo.py", "aa", "bb"),
        ("file", "mine.py", "aa", None),
        ("package", "torch", "2.13.0", "2.12.0"),
        ("flag", "--learning_rate", 1e-5, 2e-5),
        ("digest of", "--dataset", "aa", "bb"),
    ],
)
def test_ranks_that_differ_are_refused_by_name(kind, name, there, here, capsys):
    facts = [{kind: {name: there}}, {kind: {name: there}}, {kind: {name: here} if here else {}}]
    agreement.check_equal(facts[:2])
    said = rejected(capsys, agreement.check_equal, facts)
    assert f"{kind} {name} is {here} on rank 2 and {there} on rank 0" in said


@pytest.mark.integration
def test_every_rank_of_a_launch_ends_where_one_differs():
    ranks = [{"facts": {"package": {"torch": version}}, "choices": choice()} for version in ("1", "2")]
    for code, text in launched(*ranks):
        assert code == 2 and "package torch is 2 on rank 1 and 1 on rank 0" in text

"""The choice of the data type by what the machine multiplies: measured once, kept, never another one later."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT

import grpo
import utils
from runtime import machine


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rlvr" / "product_rates.json"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has bf16 in any case")
@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({"float32": 160.0, "bfloat16": 400.0}, torch.bfloat16),  # Zen 4, AVX-512 with bf16 instructions
        ({"float32": 220.0, "bfloat16": 150.0}, torch.float32),  # Xeon, the same instructions
        ({"float32": 230.0, "bfloat16": 2425.0}, torch.bfloat16),  # AMX
        ({"float32": 100.0, "bfloat16": 1.0}, torch.float32),  # AVX2
        ({"float32": 100.0, "bfloat16": 130.0}, torch.float32),  # not worth the rounding
    ],
)
def test_a_cpu_computes_in_bf16_where_that_is_much_faster(monkeypatch, rates, chosen):
    monkeypatch.setattr(machine, "known_rates", lambda: rates)
    _, dtype, attention = utils.resolve_device(grpo.Args())
    assert (dtype, attention) == (chosen, "grouped" if chosen == torch.bfloat16 else "sdpa")
    for name in ("bfloat16", "float32"):  # a flag wins
        assert utils.resolve_device(grpo.Args(dtype=name))[1] == getattr(torch, name)


def test_rates_are_measured_once_for_each_machine(cache, monkeypatch):
    """A second process reads what the first one found, whatever it would find itself."""
    first = machine.known_rates()
    assert json.loads(cache.read_text()) == {machine.machine_key(): first}
    assert min(first.values()) > 0
    monkeypatch.setattr(machine, "product_rates", lambda: {"float32": 1.0, "bfloat16": 9.0})
    assert machine.known_rates() == first
    monkeypatch.setattr(machine, "machine_key", lambda: "a different one")
    assert machine.known_rates() == {"float32": 1.0, "bfloat16": 9.0}
    assert len(json.loads(cache.read_text())) == 2


def test_processes_that_start_together_have_one_choice(cache):
    """Ranks of a launch: each would measure something else."""
    code = "import os, sys; from runtime import machine; machine.product_rates = lambda: {'float32': os.getpid()}; "
    code += "print(machine.known_rates()['float32'])"
    line = [sys.executable, "-c", code]
    ranks = [subprocess.Popen(line, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {rank.communicate(timeout=120)[0] for rank in ranks}
    assert len(said) == 1
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_a_cache_that_cannot_be_used_is_no_error(cache, monkeypatch):
    """A file that was cut off, and a home that is a file."""
    monkeypatch.setattr(machine, "product_rates", lambda: {"float32": 1.0, "bfloat16": 2.0})
    cache.parent.mkdir(parents=True)
    cache.write_text('{"half')
    assert machine.known_rates() == {"float32": 1.0, "bfloat16": 2.0}
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert machine.known_rates() == {"float32": 1.0, "bfloat16": 2.0}


def test_measuring_leaves_the_threads_as_they_were():
    threads = torch.get_num_threads()
    machine.product_rates(rounds=1)
    assert torch.get_num_threads() == threads

"""The choice of the data type by what the machine multiplies: measured once, kept, never another one later."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pwd
import time
from pathlib import Path

import pytest
import torch
from helpers import folder_of, interrupted, run_here, tiny_args

import grpo
from runtime.engine import vllm_settings
from runtime.training import cpu_rates, pretrained


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
    monkeypatch.setattr(cpu_rates, "known_rates", lambda: rates)
    _, dtype, attention = pretrained.resolve_device(grpo.Args())
    assert (dtype, attention) == (chosen, "grouped" if chosen == torch.bfloat16 else "sdpa")
    for name in ("bfloat16", "float32"):  # a flag wins
        assert pretrained.resolve_device(grpo.Args(dtype=name))[1] == getattr(torch, name)


def test_the_rates_are_those_of_one_core(monkeypatch):
    """A run with more threads is measured with one, and has its threads afterwards."""
    plain, threads, during = torch.mm, torch.get_num_threads(), []

    def product(*factors):
        during.append(torch.get_num_threads())
        return plain(*factors)

    monkeypatch.setattr(torch, "mm", product)
    torch.set_num_threads(2)
    try:
        cpu_rates.product_rates(1)
        assert torch.get_num_threads() == 2 and during == [1, 1]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the sizes of a GPU follow from its memory")
@pytest.mark.integration
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has bf16 in any case")
def test_a_resumed_run_keeps_its_choice(tiny, tmp_path, monkeypatch):
    """On a machine that multiplies otherwise: from its folder, from a checkpoint that is named; not if overwritten."""
    here, there = {"float32": 90.0, "bfloat16": 50.0}, {"float32": 100.0, "bfloat16": 2000.0}
    monkeypatch.setattr(cpu_rates, "known_rates", lambda: here)
    args = tiny_args(tiny, tmp_path / "runs", dtype="auto", micro_batch_tokens=None, save_every=1, run_name="kept")
    interrupted(args, monkeypatch, after=1)
    monkeypatch.setattr(cpu_rates, "known_rates", lambda: there)
    checkpoint = folder_of(args) / "checkpoints" / "step_000001"
    named = dataclasses.replace(args, run_name="named", resume=str(checkpoint))
    for again in (named, args):
        run_here(again)
        config = json.loads((folder_of(again) / "config.json").read_text())
        found = [config["resolved"][name] for name in ("dtype", "product_rates")]
        assert config["resumed_after"] == 1 and found == ["float32", here]
    anew = dataclasses.replace(args, overwrite=True)
    grpo.preflight(anew)
    assert pretrained.resolve_device(anew)[1] == torch.bfloat16


def test_on_a_gpu_no_rate_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert vllm_settings.product_rates(grpo.Args()) == {}


def test_rates_are_measured_once_for_each_machine(cache, monkeypatch):
    """A second process reads what the first one found, whatever it would find itself."""
    first = cpu_rates.known_rates()
    assert json.loads(cache.read_text()) == {cpu_rates.machine_key(): first}
    assert min(first.values()) > 0
    monkeypatch.setattr(cpu_rates, "product_rates", lambda: {"float32": 1.0, "bfloat16": 9.0})
    assert cpu_rates.known_rates() == first
    monkeypatch.setattr(cpu_rates, "machine_key", lambda: "a different one")
    assert cpu_rates.known_rates() == {"float32": 1.0, "bfloat16": 9.0}
    assert len(json.loads(cache.read_text())) == 2


def test_processes_that_start_together_have_one_choice(cache, monkeypatch):
    """Ranks of a launch: each would measure something else."""

    def measure() -> dict[str, float]:
        time.sleep(0.2)  # the other process is waiting then
        return {"float32": os.getpid()}

    monkeypatch.setattr(cpu_rates, "product_rates", measure)
    processes = multiprocessing.get_context("fork")
    found = processes.SimpleQueue()
    ranks = [processes.Process(target=lambda: found.put(cpu_rates.known_rates())) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    (kept,) = json.loads(cache.read_text()).values()
    assert found.get() == found.get() == kept


def test_a_cache_that_cannot_be_used_is_no_error(cache, monkeypatch):
    """A file that was cut off, and a home that is a file."""
    monkeypatch.setattr(cpu_rates, "product_rates", lambda: {"float32": 1.0, "bfloat16": 2.0})
    cache.parent.mkdir(parents=True)
    for text in ('{"half', '{"a": {"float32": 1.0', "[]", "null", '{\n "a": {\n  "float32": 1.0\n }\n'):
        cache.write_text(text)
        assert cpu_rates.known_rates() == {"float32": 1.0, "bfloat16": 2.0}
        kept = json.loads(cache.read_text())[cpu_rates.machine_key()]
        assert kept == {"float32": 1.0, "bfloat16": 2.0}, "written anew, so that the next start makes the same choice"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    assert cpu_rates.known_rates() == {"float32": 1.0, "bfloat16": 2.0}


def test_a_user_without_a_home_or_a_name_is_no_error(monkeypatch):
    """A container's user that no passwd entry has: Path.home raises RuntimeError, and getpass has no name either."""
    monkeypatch.setattr(cpu_rates, "product_rates", lambda: {"float32": 1.0, "bfloat16": 2.0})
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    with pytest.raises(RuntimeError):
        Path.home()
    assert cpu_rates.known_rates() == {"float32": 1.0, "bfloat16": 2.0}


def test_measuring_leaves_the_threads_as_they_were():
    threads = torch.get_num_threads()
    cpu_rates.product_rates(rounds=1)
    assert torch.get_num_threads() == threads

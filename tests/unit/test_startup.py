"""A start does not import the script in verifier processes and collects no garbage; an end loses nothing."""

from __future__ import annotations

import gc
import gzip
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

from runtime.system import process

SCRIPT = """
import sys
import rewards

if __name__ == "__main__":
    pool = rewards.RewardPool(1, 20.0)
    spec = sys.modules["__main__"].__spec__
    for response in ("rewards", "torch", "own_script"):
        print(response, pool.result(pool.submit(sys.argv[1] + ":imported", response, "", {})).score)
    print("main module as before", spec is None and sys.modules["__main__"].__spec__ is None)
    pool.close()
else:
    sys.modules["own_script"] = sys.modules[__name__]
    import torch
"""
VERIFIER = """
import sys

def imported(response, truth, row):
    return float(response in sys.modules)
"""


@pytest.mark.integration
def test_a_verifier_process_does_not_import_the_script(tmp_path):
    """It has rewards.py and the verifier's own file, and neither the script, whatever that imports, nor torch."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "own.py").write_text(VERIFIER)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "own.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    expected = ["rewards 1.0", "torch 0.0", "own_script 0.0", "main module as before True"]
    assert done.stdout.splitlines() == expected, done.stderr[-2000:]


def test_no_garbage_is_collected_while_an_engine_is_built():
    """Off inside, with all that was there frozen; on again after it, also after an error."""
    there = [object()]
    with process.without_collections():
        assert not gc.isenabled() and all(thing is not there for thing in gc.get_objects())
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="engine"), process.without_collections():
        raise RuntimeError("no engine")
    assert gc.isenabled()


def test_imports_are_not_searched_for_garbage_again_and_again():
    """With Python's own threshold the collector goes through all objects twice while torch is imported."""
    program = """
import gc
from runtime.system import process

searches = []
gc.callbacks.append(lambda phase, of: searches.append(phase) if of["generation"] == 2 else None)
process.prepare_environment()
import torch
print(searches.count("start"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.split() == ["0"], done.stderr


LEFT_OPEN = """
import csv, gc, gzip, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from runtime.system import process

def later(name):
    time.sleep(0.3)
    Path(name).write_text("done")

find = gc.get_objects
gc.get_objects = lambda: print("looked at all objects") or find()
process.prepare_environment()
process.prepare_environment()
kept = open("file", "w")
kept.write("done")
csv.writer(table := open("table", "w")).writerow(["done"])
packed = gzip.open("packed.gz", "wt")
packed.write("done")
threading.Thread(target=later, args=["thread"]).start()
ThreadPoolExecutor(1).submit(later, "pool")


class Searched:
    def __del__(self):
        print("searched")

garbage = Searched()
garbage.itself = garbage
"""


@pytest.mark.parametrize("how", [[], ["-m", "cProfile", "-o", "profile"], ["-c"]], ids=["plain", "profiled", "inside"])
def test_nothing_is_lost_at_the_end(how, tmp_path):
    """Open files, threads and pools of an edited copy, a profile, and what runs after it in the same interpreter."""
    (tmp_path / "mine.py").write_text(LEFT_OPEN)
    inside = ["import runpy; runpy.run_path('mine.py', run_name='__main__'); print('AFTER')"]
    command = [sys.executable, *how, *(inside if how == ["-c"] else ["mine.py"])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and ("AFTER" in done.stdout) == (how == ["-c"]), done.stderr
    assert [(tmp_path / name).read_text().strip() for name in ("file", "table", "thread", "pool")] == ["done"] * 4
    assert (tmp_path / "profile").exists() == ("cProfile" in how)
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"done"
    assert done.stdout.count("looked") == 1
    assert "searched" not in done.stdout, "a million objects of libraries are, which takes two seconds"


def test_a_model_does_not_take_the_place_of_anything_else(tmp_path, monkeypatch):
    """The folder that --output names is replaced where it holds a part of this model, and nothing next to it."""
    import prepare_model

    (tmp_path / "run").mkdir()
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / "run" / name).write_text("{}")
    made = lambda _, folder: [(folder / name).write_text("made") for name in prepare_model.FILES]  # noqa: E731
    for name, replacement in (("find_gguf", lambda: None), ("convert", made)):
        monkeypatch.setattr(prepare_model, name, replacement)
    monkeypatch.setattr(sys, "argv", ["prepare_model", "--output", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="not this model"):
        prepare_model.main()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    prepare_model.main()
    assert (tmp_path / "run" / "config.json").read_text() == "made"


def test_the_quickstart_s_model_has_the_special_tokens_and_the_template_of_its_package():
    """As this version of transformers read them from the GGUF file."""
    import prepare_model
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    folder = prepare_model.DEFAULT_OUTPUT
    if not folder.is_dir():
        pytest.skip("make setup has not prepared it")
    fields = GGUFReader(prepare_model.find_gguf()).fields
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    special = {name: fields[f"tokenizer.ggml.{key}_token_id"].contents() for name, key in names.items()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for source in (tokenizer, AutoConfig.from_pretrained(folder), GenerationConfig.from_pretrained(folder)):
        assert {name: getattr(source, name) for name in special} == special
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.chat_template == fields["tokenizer.chat_template"].contents()


@pytest.mark.integration
def test_products_of_shapes_that_do_not_come_again_are_forgotten():
    """By default a thousand shapes stay prepared in oneDNN, and a thousand in torch: half a MiB for each shape."""
    program = """
import ctypes
from runtime.system import process

process.prepare_environment()
import torch

class Malloc(ctypes.Structure):
    _fields_ = [(f"field_{k}", ctypes.c_size_t) for k in range(10)]  # struct mallinfo2 of malloc.h

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Malloc

def in_use_after(rows) -> int:
    for count in rows:
        torch.ones(count, 576, dtype=torch.bfloat16) @ torch.ones(576, 1536, dtype=torch.bfloat16)
    found = mallinfo2()
    return found.field_7 + found.field_4  # uordblks, hblkhd

before = in_use_after(range(300, 370))
print((in_use_after(range(370, 400)) - before) / 2**20)
"""
    caches = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    free = {name: value for name, value in os.environ.items() if name not in caches}
    grown = []
    for environment in (free, *({**free, name: "1024"} for name in caches)):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
        grown.append(float(done.stdout))
    if max(grown) < 4:
        pytest.skip("on this machine oneDNN does not multiply in bf16")
    assert grown[0] < 1 and grown[1] > 4 and grown[2] > 4, grown


TENSORS = """
import ctypes, os, sys
from runtime.system import process

print("began", *sys.argv[1:], flush=True)
process.choose_allocator()
process.prepare_environment()
import torch

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = type("Malloc", (ctypes.Structure,), {"_fields_": [(f"f{k}", ctypes.c_size_t) for k in range(10)]})
sizes = []
for _ in range(6):
    tensor = torch.ones(34_000_000, dtype=torch.bfloat16)
    tensor = tensor + tensor
    apart = mallinfo2().f4  # bytes of blocks with pages of their own
    del tensor
    sizes.append(mallinfo2().f0 / 2**20)  # what the heap has from the kernel
print(os.environ["GLIBC_TUNABLES"], sizes[-1] == sizes[2] and apart == 0)
"""


@pytest.mark.integration
@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="beside a GPU the allocator is glibc's own")
@pytest.mark.parametrize("given", [None, "", "glibc.malloc.tcache_count=0"])
def test_a_program_starts_again_with_an_allocator_that_reuses_places(given):
    """Once, with the same words, unless the user has set it; otherwise a tensor has pages of its own, each time new."""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    environment |= {} if given is None else {"GLIBC_TUNABLES": given}
    command = [sys.executable, "-c", TENSORS, "--some words", "'$HOME'"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment)
    *began, end = done.stdout.splitlines()
    assert began == ["began --some words '$HOME'"] * (2 if given is None else 1), done.stderr
    tunables, _, reused = end.rpartition(" ")
    assert tunables == given if given is not None else "tcache_count=0" in tunables
    assert reused == str(given is None)


@pytest.mark.slow
@pytest.mark.skipif(process.usable_cores() < 2, reason="one core: no thread waits for another")
def test_two_runs_beside_each_other_wait_asleep():
    """By default OpenMP's threads wait awake, and two programs on the same cores take six times as long as one."""
    program = """
import sys, time
from runtime.system import process
process.prepare_environment()
import torch

torch.set_grad_enabled(False)
layer = torch.nn.Sequential(torch.nn.Linear(576, 1536), torch.nn.GELU(), torch.nn.Linear(1536, 576))
x = torch.ones(64, 576)
layer(x)
print(flush=True)
sys.stdin.readline()
start = time.monotonic()
for _ in range(1000):
    layer(x)
print(time.monotonic() - start)
"""
    free = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}

    def seconds(programs: int, environment: dict[str, str]) -> float:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": environment}
        several = [subprocess.Popen([sys.executable, "-c", program], **pipes) for _ in range(programs)]
        for one in several:
            one.stdout.readline()
        for one in several:
            print(file=one.stdin, flush=True)
        return max(float(one.communicate(timeout=120)[0]) for one in several)

    awake = seconds(2, {**free, "GOMP_SPINCOUNT": "300000"})
    asleep = seconds(2, free)
    assert asleep < 0.7 * awake, (seconds(1, free), asleep, awake)

"""A start does not import the script in verifier processes and collects no garbage; an end frees nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
from helpers import PROBLEMS, ROOT, clean_environment

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
ANSWERS = ("--dataset", str(PROBLEMS), "--rollout", "hf", "--dtype", "float32", "--max_response_length", "8")
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


@pytest.mark.parametrize("ends, left", [("process.exit_at_once()", []), ("", ["freed"])])
def test_a_program_exits_at_once(ends, left):
    """Its output, which is no terminal, is written, and what it registered for its exit runs; no object is freed."""
    program = f"""
import atexit
import os
from runtime.system import process

class Freed:
    def __del__(self):
        os.write(1, b"freed\\n")

kept = Freed()
atexit.register(print, "registered")
print("result")
{ends}
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["result", "registered", *left]), done.stderr


@pytest.mark.integration
@pytest.mark.parametrize(
    "script, words, said",
    [
        ("grpo.py", ["--dry_run"], "prompt  "),
        ("ppo.py", ["--dry_run"], "prompt  "),
        ("scripts/evaluate.py", [*ANSWERS], "| problems |"),
    ],
)
def test_a_script_exits_at_once(script, words, said, tiny, tmp_path):
    """Nothing runs after it in the interpreter that ran it."""
    program = (
        "import runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\nprint('AFTER')"
    )
    words = [script, *words, "--model_name_or_path", str(tiny), "--output_dir", str(tmp_path)]
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=clean_environment(), timeout=120)
    assert done.returncode == 0 and said in done.stdout and "AFTER" not in done.stdout, done.stderr[-2000:]


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


def test_large_blocks_get_pages_of_their_own_until_the_first_step_is_done():
    """Their memory goes back to the kernel when it is freed. From the second step on the heap keeps it."""
    program = """
from runtime.system import process

process.prepare_environment()
heap = process.Heap()

def left_by_a_block() -> int:
    before = process.resident_bytes()
    block = bytearray(b"x") * 2**26
    small = bytearray(10**5)
    del block
    return process.resident_bytes() - before

process.map_large_blocks(True)
mapped = left_by_a_block()
heap.bound()
print(mapped < 2**22, left_by_a_block() > 2**25)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.split() == ["True", "True"], (done.stdout, done.stderr)


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

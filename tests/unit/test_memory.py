"""The memory estimate at the start of a run against what DeepSpeed really keeps, on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from helpers import ROOT

import grpo
from runtime import runlog

# Counts the bytes of every live tensor before the model exists and in the middle of an optimizer step, where the
# gradient of one micro-batch is accumulated and the next one is still to come.
MEASURE = """
import gc, json, os, sys
from runtime import process
process.prepare_environment()
import torch
import grpo, utils

def live():
    seen = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())

plain = utils.deepspeed_config

def small_buckets(*arguments):
    config = plain(*arguments)  # a bucket is as large as this small model; its size does not grow with the model
    config["zero_optimization"] |= {"reduce_bucket_size": 2**18, "allgather_bucket_size": 2**18}
    return config

utils.deepspeed_config = small_buckets
changes = json.loads(sys.argv[1])
args = grpo.Args(**changes)
dtype = getattr(torch, args.dtype)
accelerator = utils.make_accelerator(args, dtype, torch.device("cpu"))
gc.collect()
empty = live()
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(32)]).to(dtype)
model, optimizer = accelerator.prepare(model, utils.make_optimizer(model.parameters(), 1e-3, args))
for step, last in enumerate((True, False)):
    accelerator.sync_gradients = last
    accelerator.backward(model(torch.randn(4, 512, dtype=dtype)).float().square().mean())
gc.collect()
if torch.distributed.get_rank() == 0:
    print("BYTES", (live() - empty) / (32 * 512 * 512), flush=True)
torch.distributed.barrier()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_estimate_is_what_deepspeed_keeps(tmp_path, stage, dtype):
    """Trainer memory per parameter on two ranks: within 3 % of the tensors that are alive between two micro-batches."""
    changes = {"zero_stage": stage, "dtype": dtype}
    (tmp_path / "measure.py").write_text(MEASURE)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    line += [str(tmp_path / "measure.py"), json.dumps(changes)]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=200)
    found = [text for text in done.stdout.splitlines() if text.startswith("BYTES")]
    assert found, done.stderr[-3000:]
    measured = float(found[0].split()[1])
    estimate = runlog.estimate_memory(grpo.Args(**changes), 10**6, 100, 2, dtype == "bfloat16", False).trainer / 10**6
    print(f"ZeRO {stage} {dtype}: measured {measured:.3f} bytes per parameter, estimated {estimate:.3f}")
    assert estimate == pytest.approx(measured, rel=0.03)


def test_two_that_sleep_in_turns_are_not_there_at_the_same_time():
    """10 bytes of trainer and 2 of engine a parameter: at most 10 when both sleep, 12 when one of them does not."""
    both = {"vllm_enable_sleep_mode": True, "deepspeed_enable_sleep_mode": True}
    for changes, expected in ((both, 10.0), ({"vllm_enable_sleep_mode": True}, 12.0), ({}, 12.0)):
        estimate = runlog.estimate_memory(grpo.Args(**changes), 10**9, 100, 2, True, False)
        assert (estimate.total - estimate.logits) / 10**9 == pytest.approx(expected)

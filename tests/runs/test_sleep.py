"""--vllm_sleep all: what leaves the device while the engine samples, and that nothing else changes.

On a CPU "leaving" is a copy into other buffers, by the same code of DeepSpeed: what it forgot would stay behind.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, folder_of, interrupted, record, run_here, tiny_args

import grpo
import utils
from runtime.training import deepspeed_zero

# After an optimizer step: bytes per parameter of the trainer, and of what is still where it was once it has left.
MEASURE = """
import gc, json, os, sys, weakref
from runtime.system import process
process.prepare_environment()
import torch
import grpo
import utils
from runtime.training import deepspeed_zero

def live():
    gc.collect()
    seen = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.untyped_storage().data_ptr():  # 0: a stand-in without memory
                    storage = tensor.untyped_storage()
                    seen[id(storage)] = (weakref.ref(storage), storage.nbytes())  # an address may be given out again
    return list(seen.values())

args = grpo.Args(**json.loads(sys.argv[1]))
dtype = getattr(torch, args.dtype)
accelerator = deepspeed_zero.make_accelerator(args, dtype, torch.device("cpu"))
empty = [storage() for storage, _ in live()]
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(32)]).to(dtype)
policy, _ = accelerator.prepare(model, utils.make_optimizer(model.parameters(), 1e-3, args))
deepspeed_zero.backward_and_step(policy, policy(torch.randn(4, 512, dtype=dtype)).float().square().mean(), True)
count = 32 * 512 * 512
bucket = 4 * 2 * 20_000_000  # two buckets at most, which do not grow with the model
before = [(storage, size) for storage, size in live() if not any(storage() is old for old in empty)]
moments = sum(t.untyped_storage().nbytes() for s in policy.optimizer.optimizer.state.values() for t in s.values())
deepspeed_zero.leave_gpu([policy])
gc.collect()
stayed = sum(size for storage, size in before if storage() is not None and storage().data_ptr())
print("BYTES", sum(size for _, size in before) / count, moments / count, stayed / count, flush=True)
os._exit(0)
"""


def test_frozen_weights_leave_the_device_with_the_others():
    """DeepSpeed moves what its optimizer has; of a model with adapters that is the smallest part."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    module[0].requires_grad_(False)
    calls = []
    engine = SimpleNamespace(
        parameters=module.parameters,
        device=torch.device("cpu"),
        offload_states=lambda: calls.append("offload"),
        reload_states=lambda: calls.append("reload"),
    )
    places = [[weight.data_ptr() for weight in module.parameters()]]
    before = [weight.clone() for weight in module.parameters()]
    for move in (deepspeed_zero.leave_gpu, deepspeed_zero.return_to_gpu):
        move([engine])
        places.append([weight.data_ptr() for weight in module.parameters()])
    assert calls == ["offload", "reload"]
    for earlier, later in itertools.pairwise(places):
        assert [a != b for a, b in zip(earlier, later, strict=True)] == [True, True, False, False]
    assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("dtype, trainer", [("float32", 16), ("bfloat16", 14)])
def test_all_but_the_moments_has_left(tmp_path, dtype, trainer):
    """Weights and master weights have moved and no gradient is alive; moments that are in CPU memory stay there."""
    (tmp_path / "measure.py").write_text(MEASURE)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    line = [sys.executable, str(tmp_path / "measure.py"), json.dumps({"dtype": dtype})]
    done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=200)
    found = [text for text in done.stdout.splitlines() if text.startswith("BYTES")]
    assert found, done.stderr[-3000:]
    before, moments, stayed = map(float, found[0].split()[1:])
    print(f"{dtype}: {before:.2f} bytes per parameter, of which {stayed:.2f} stayed and {moments:.2f} are moments")
    assert before >= trainer - 0.1 and moments == pytest.approx(8, abs=0.1)
    assert stayed == pytest.approx(moments, abs=0.1)


RUN = {"eval_every": 1, "save_every": 2, "num_mini_batches": 2, "learning_rate": 1e-3, "total_steps": 3}


@pytest.mark.integration
@pytest.mark.parametrize(
    "script, changes",
    [
        ("grpo", {"beta": 0.1, "ref_policy_update": (1, 1.0)}),
        pytest.param("grpo", {"dtype": "bfloat16", "offload": ("optimizer",)}, marks=pytest.mark.slow),
        pytest.param("ppo", {"value_norm": "running"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_sleeps_is_the_same_run(tiny, tmp_path, monkeypatch, script, changes):
    """Every number, sample and weight; each sampling finds the trainer asleep, each update awake."""
    states = []
    plain = deepspeed_zero.backward_and_step

    def spy(engine, *rest):
        states.append(bool(engine.optimizer.offloaded_states))
        plain(engine, *rest)

    args = tiny_args(tiny, tmp_path / "awake", script, **RUN, **changes)
    run_here(args, script)
    awake = record(folder_of(args, script))
    monkeypatch.setattr(deepspeed_zero, "backward_and_step", spy)
    args = tiny_args(tiny, tmp_path / "asleep", script, vllm_sleep="all", **RUN, **changes)
    run_here(args, script)
    assert record(folder_of(args, script)) == awake
    assert states and not any(states)


@pytest.mark.integration
def test_the_trainer_sleeps_while_the_engine_samples(tiny, tmp_path, monkeypatch):
    """From before the first push on: all kinds of states have left in each generation, and never without the flag."""
    seen = []
    plain = grpo.Engine.ask

    def spy(self, *arguments):
        seen.append({state.value for state in policies[-1].optimizer.offloaded_states})
        return plain(self, *arguments)

    policies = []
    current = deepspeed_zero.current_weights
    monkeypatch.setattr(
        deepspeed_zero, "current_weights", lambda policy, *rest: (policies.append(policy), current(policy, *rest))[1]
    )
    monkeypatch.setattr(grpo.Engine, "ask", spy)
    run_here(tiny_args(tiny, tmp_path, vllm_sleep="all", eval_prompts=4))
    assert len(seen) == 4  # an evaluation, two steps, an evaluation
    assert all(states >= {"hp_params", "lp_params", "optim_states"} for states in seen)
    seen.clear()
    run_here(tiny_args(tiny, tmp_path, run_name="awake", eval_prompts=4))
    assert seen == [set()] * 4


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["all", "off"])
def test_a_checkpoint_of_a_sleeping_trainer_resumes(tiny, tmp_path, monkeypatch, flag):
    """Saved asleep, loaded awake, with the flag or without it."""
    whole = tiny_args(tiny, tmp_path / "whole", "ppo", **RUN)
    run_here(whole, "ppo")
    args = tiny_args(tiny, tmp_path / "parts", "ppo", vllm_sleep="all", **RUN)
    interrupted(args, monkeypatch, after=1, script="ppo")
    args.vllm_sleep = flag
    run_here(args, "ppo")
    assert record(folder_of(args, "ppo")) == record(folder_of(whole, "ppo"))


@pytest.mark.slow
def test_parameters_in_cpu_memory_change_no_number(tiny, tmp_path):
    """--offload param, which ZeRO 3 has in place of it: the run of the same stage, bit for bit."""
    records = []
    for offload in ((), ("param",)):
        args = tiny_args(tiny, tmp_path / str(offload), zero_stage=3, offload=offload, **RUN)
        run_here(args)
        records.append(record(folder_of(args)))
    assert records[0] == records[1]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_trainer_leaves_it(tmp_path):
    """Bytes that torch has allocated on the GPU fall to a twentieth, and the same numbers come back."""
    args = grpo.Args(dtype="bfloat16", vllm_sleep="all")
    accelerator = deepspeed_zero.make_accelerator(args, torch.bfloat16, torch.device("cuda", 0))
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(32)]).bfloat16().cuda()
    policy, _ = accelerator.prepare(model, utils.make_optimizer(model.parameters(), 1e-3, args))
    probe = torch.randn(4, 2048, dtype=torch.bfloat16, device="cuda")
    deepspeed_zero.backward_and_step(policy, policy(probe).float().square().mean(), True)
    expected = policy(probe)
    before = torch.cuda.memory_allocated()
    deepspeed_zero.leave_gpu([policy])
    asleep = torch.cuda.memory_allocated()
    deepspeed_zero.return_to_gpu([policy])
    print(f"{before / 2**30:.2f} GiB awake, {asleep / 2**30:.2f} asleep")
    assert asleep < before / 20
    assert torch.equal(policy(probe), expected)

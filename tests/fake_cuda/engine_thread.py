"""Build vLLM's CUDA engine in a run's own thread, push weights, let it sleep and wake, and print what it held.

    .cuda/bin/python tests/fake_cuda/engine_thread.py MODEL FILE     under the stub libraries: check.py sets them

vLLM's own kernels do nothing here, so its samples mean nothing. Memory, copies, captures and streams are as on a GPU.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from runtime.system import process

process.prepare_environment("auto")
os.environ.setdefault("LOCAL_RANK", "0")

import torch
import vllm.distributed.device_communicators.cuda_wrapper as cuda_wrapper
from device import GIB, STUBS, counted

import grpo
import utils
from runtime.engine.client import Engine
from runtime.system import watchdog
from runtime.training import pretrained

# torchvision brings a second runtime, which vLLM's memory for sleep would take; a GPU has one driver below both.
cuda_wrapper.find_loaded_library = lambda name: f"{Path(os.environ['TRITON_LIBCUDA_PATH'])}/libcudart.so.13"


def used() -> float:
    """GiB of the card that are taken."""
    return STUBS.fake_used() / GIB


def sums(worker) -> dict[str, float]:
    """Sum of the squares of each parameter of the engine, by the numbers in its memory."""
    model = worker.model_runner.get_model()
    return {name: p.detach().cpu().double().square().sum().item() for name, p in model.named_parameters()}


def in_engine(engine: Engine) -> float:
    """Sum of the squares of all parameters of the engine."""
    engine.inbox.put(("call", lambda llm: llm.collective_rpc(sums)[0]))
    found = engine.receive("sums")[1]
    return sum(found.values())


def main() -> None:
    """Write the findings to the file that the command line names."""
    model_folder, out = sys.argv[1:]
    given = {"max_prompt_length": 64, "max_response_length": 16, "vllm_sleep": "engine"}
    given["vllm_args"] = '{"max_num_seqs": 16, "gpu_memory_utilization": 0.4}'
    args = grpo.Args(model_name_or_path=model_folder, **given)
    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    # Weights that are copied to the card: kernels compute nothing here.
    model = pretrained.load_model(args, torch.bfloat16, "sdpa")
    host = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
    expected = sum(p.double().square().sum().item() for p in model.parameters())  # what is tied once
    threads = torch.get_num_threads()
    engine = Engine(grpo.vllm_thread, args, torch.bfloat16, None, [2], watchdog.Watch(0))
    found = {"captures": STUBS.fake_count(b"captures"), "forbidden": STUBS.fake_count(b"forbidden")}
    found["asleep before the first push"] = used()
    found["threads kept"] = torch.get_num_threads() == threads
    clock = utils.Stopwatch()
    device = {name: weight.cuda() for name, weight in host.items()}
    pushes = []
    for factor in (1.0, 0.5):
        for name, weight in host.items():
            device[name].copy_((weight * factor).pin_memory(), non_blocking=True)
        found["trainer alone"] = used()

        def push() -> None:
            with clock("push"):
                engine.push(list(device.items()))

        waits = counted(push, "device_syncs")
        pushes.append((in_engine(engine), expected * factor**2, waits[0]))
        found["awake"] = used()
        engine.sleep()
        found["asleep"] = used()
    found["pushes"] = pushes
    found["races"] = STUBS.fake_count(b"races")
    Path(out).write_text(json.dumps(found, indent=1))
    engine.close()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""What DeepSpeed keeps of a trainer, counted in live tensors: for tests of the bound of memory, and of GPUs."""

from __future__ import annotations

import gc
import json
import os
import sys

from runtime.system import process

process.prepare_environment()

import torch

import grpo
import utils
from runtime.training import deepspeed_zero

LAYERS = 32


def live_bytes(place: str) -> int:
    """Return the device memory of all tensors: by torch's allocator on a GPU, by counting storages on a CPU."""
    gc.collect()
    if place == "cuda":
        return torch.cuda.memory_allocated()
    seen = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


def bytes_per_parameter(place: str, args: grpo.Args, passes: tuple[bool, ...], width: int = 512) -> float:
    """Return what is kept after so many backward passes, each of which ends an optimizer step or not."""
    plain = deepspeed_zero.deepspeed_config

    def small_buckets(*rest):
        config = plain(*rest)  # a bucket is as large as this small model; its size does not grow with the model
        config["zero_optimization"] |= {"reduce_bucket_size": 2**18, "allgather_bucket_size": 2**18}
        return config

    deepspeed_zero.deepspeed_config = small_buckets
    dtype = getattr(torch, args.dtype)
    accelerator = deepspeed_zero.make_accelerator(args, dtype, torch.device(place))
    empty = live_bytes(place)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*layers).to(place, dtype)
    policy, _ = accelerator.prepare(model, utils.make_optimizer(model.parameters(), 1e-3, args))
    x = torch.randn(4, width, dtype=dtype, device=place)
    for is_last in passes:
        deepspeed_zero.backward_and_step(policy, policy(x).float().square().mean(), is_last)
    return (live_bytes(place) - empty) / (LAYERS * width * width)


if __name__ == "__main__":  # a rank: in the middle of a step one gradient is accumulated, and the next is to come
    found = bytes_per_parameter("cpu", grpo.Args(**json.loads(sys.argv[1])), (True, False))
    if torch.distributed.get_rank() == 0:
        print("BYTES", found, flush=True)
    torch.distributed.barrier()
    os._exit(0)

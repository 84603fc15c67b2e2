"""Try the collectives of the fake NCCL with torch.distributed, next to what they should give.

.cuda/bin/python tests/fake_cuda/collectives.py 2     two ranks, under the stub libraries: check.py sets them
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

REDUCTIONS: dict[str, Callable] = {
    "SUM": lambda x: x.sum(0),
    "AVG": lambda x: x.mean(0),
    "MAX": lambda x: x.amax(0),
    "MIN": lambda x: x.amin(0),
    "PRODUCT": lambda x: x.prod(0),
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
SIZE = 300_001  # elements: several pieces of shared memory, the last of which is not full


def values(ranks: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return [ranks, SIZE] numbers, the same on every rank; row r is what rank r contributes."""
    source = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(ranks, SIZE, generator=source).to(dtype)
    return torch.randint(0, 10, (ranks, SIZE), generator=source).to(dtype)


def compare(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise AssertionError if a collective gave other numbers than expected."""
    expected = expected.to(found.dtype)
    assert torch.equal(found.cpu(), expected), f"{name} is wrong: {found.cpu()[:4]} instead of {expected[:4]}"


def check_reductions(rank: int, ranks: int) -> int:
    """All-reduce, reduce and reduce-scatter, of every operation and data type."""
    number = 0
    for dtype in DTYPES:
        for name, reduction in REDUCTIONS.items():
            if name == "AVG" and not dtype.is_floating_point:
                continue
            operation = getattr(dist.ReduceOp, name)
            number += 1
            rows = values(ranks, dtype, number)
            whole = reduction(rows.to(torch.float32 if dtype.itemsize == 2 else dtype))
            own = rows[rank].cuda()
            dist.all_reduce(own, operation)
            compare(f"all-reduce, {name} of {dtype}", own, whole)
            own = rows[rank].cuda()
            dist.reduce(own, ranks - 1, operation)
            if rank == ranks - 1:
                compare(f"reduce, {name} of {dtype}", own, whole)
            part = SIZE // ranks
            out = torch.empty(part, dtype=dtype, device="cuda")
            dist.reduce_scatter_tensor(out, rows[rank, : part * ranks].cuda(), operation)
            compare(f"reduce-scatter, {name} of {dtype}", out, whole[rank * part : (rank + 1) * part])
    return number


def check_moves(rank: int, ranks: int) -> None:
    """Broadcast, all-gather, all-to-all, gathering objects, and sends in both directions at once."""
    for dtype in DTYPES:
        rows = values(ranks, dtype, 99)
        own = rows[rank].cuda()
        dist.broadcast(own, ranks - 1)
        compare(f"broadcast of {dtype}", own, rows[-1])
        out = torch.empty(ranks * SIZE, dtype=dtype, device="cuda")
        dist.all_gather_into_tensor(out, rows[rank].cuda())
        compare(f"all-gather of {dtype}", out, rows.flatten())
        part = SIZE // ranks
        out = torch.empty(ranks * part, dtype=dtype, device="cuda")
        dist.all_to_all_single(out, rows[rank, : part * ranks].cuda())
        compare(f"all-to-all of {dtype}", out, rows[:, : part * ranks].unflatten(1, (ranks, part))[:, rank].flatten())
        out = torch.empty(SIZE, dtype=dtype, device="cuda")
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        works = [dist.P2POp(dist.isend, rows[rank].cuda(), after), dist.P2POp(dist.irecv, out, before)]
        for work in dist.batch_isend_irecv(works):
            work.wait()
        compare(f"send and receive of {dtype}", out, rows[before])
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (rank + 1)})
    assert objects == [{"rank": r, "text": "x" * (r + 1)} for r in range(ranks)], objects
    alone = dist.new_group([ranks - 1])
    if rank == ranks - 1:
        one = torch.ones(3, device="cuda")
        dist.all_reduce(one, group=alone)
        compare("all-reduce of one rank", one, torch.ones(3))
        out = torch.zeros(3, device="cuda")
        dist.all_gather_into_tensor(out, one, group=alone)
        compare("all-gather of one rank", out, torch.ones(3))


def rank_main(rank: int, ranks: int, file: str) -> None:
    """Run the checks as one rank."""
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has newer names for two of the collectives
    torch.cuda.set_device(rank)
    importlib.import_module("fake_cuda.operators")
    dist.init_process_group("nccl", init_method=f"file://{file}", rank=rank, world_size=ranks)
    number = check_reductions(rank, ranks)
    check_moves(rank, ranks)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(
            f"{ranks} ranks: {number} reductions in three collectives and {len(DTYPES)} data types; moves and objects"
        )


def main() -> None:
    """Start as many ranks as the command line says."""
    ranks = int(sys.argv[1])
    os.environ["FAKE_CUDA_COUNT"] = str(ranks)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (ranks, f"{folder}/meeting"), ranks)


if __name__ == "__main__":
    main()

"""Try cards of the fake device with torch's own CUDA code: memory, counters, captures, order of streams.

.cuda/bin/python tests/fake_cuda/device.py 90:141 89:24     under the stub libraries: check.py sets them

With check.py --gpu the card is a real one, which has no counters and no order of streams; kernels compute there.
"""

from __future__ import annotations

import os
import sys

import torch
from counters import COMPUTES, REAL, STUBS, count, counted
from forks import in_a_fork
from torch.nn.functional import linear

GIB = 2**30


def check_card() -> None:
    """The card is the one that the environment describes."""
    assert torch.cuda.is_available()
    if REAL:
        return
    capability = int(os.environ["FAKE_CUDA_CAPABILITY"])
    assert torch.cuda.device_count() == 1
    assert torch.cuda.get_device_capability() == divmod(capability, 10)
    total = torch.cuda.get_device_properties(0).total_memory
    assert abs(total / GIB - float(os.environ["FAKE_CUDA_GIB"])) < 0.01
    assert count("no such counter") == -1


def check_memory() -> None:
    """Memory ends where the card's does, torch's own error says so, and freed memory can be had again."""
    free, total = torch.cuda.mem_get_info()
    half = torch.empty(total // 2, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] <= free - total // 2
    try:
        torch.empty(total // 2, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        assert "CUDA out of memory" in str(error)
    else:
        raise AssertionError("a card gave more memory than it has")
    assert REAL or count("out_of_memory") > 0
    del half
    torch.cuda.empty_cache()
    assert REAL or STUBS.fake_used() < 64 * 2**20
    del free
    again = torch.empty(total // 2, dtype=torch.uint8, device="cuda")
    del again
    torch.cuda.empty_cache()


def check_counters() -> None:
    """Kernels, products, copies and waits are counted, each where torch really makes one."""
    if REAL:
        return
    a = torch.empty(64, 64, device="cuda")
    torch.mm(a, a)  # the handle and workspace of cuBLAS
    assert counted(lambda: torch.mm(a, a), "products", "stream_syncs") == [1, 0]
    half = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
    linear(half, half, half[0])
    assert counted(lambda: linear(half, half, half[0]), "products") == [1]  # with a bias: cublasLt
    assert counted(lambda: a.mul_(2), "launches", "h2d") == [1, 0]
    pinned = torch.ones(64, 64).pin_memory()
    assert counted(lambda: a.copy_(pinned, non_blocking=True), "h2d", "pageable_h2d", "stream_syncs") == [1, 0, 0]
    assert counted(lambda: a.copy_(torch.ones(64, 64)), "h2d", "pageable_h2d", "stream_syncs") == [1, 1, 1]
    assert torch.equal(torch.empty(64, 64).copy_(a), torch.ones(64, 64))  # copies move numbers
    assert counted(lambda: a[0, 0].item(), "d2h", "stream_syncs") == [1, 1]
    assert counted(torch.cuda.synchronize, "device_syncs") == [1]


def check_captures() -> None:
    """A graph is captured and launched; what a capture forbids is the error that CUDA gives."""
    a = torch.empty(64, device="cuda")
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph):
            a.mul_(2)

    assert REAL + counted(capture, "captures")[0] == 1
    assert REAL + counted(graph.replay, "graph_launches")[0] == 1
    bad = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(bad):
            torch.cuda.current_stream().synchronize()
    except RuntimeError:
        pass
    else:
        raise AssertionError("a capture allowed a wait")
    assert REAL or count("forbidden") > 0


def check_code() -> None:
    """Libraries inside torch find the code of their kernels that fits the card, as CUB does for a radix sort."""
    values = torch.arange(10_000, 0, -1, device="cuda")
    ordered, places = values.sort()
    assert not COMPUTES or (ordered[0].item(), places[0].item()) == (1, 9_999)


def check_order() -> None:
    """Accesses of two streams need an event, or a wait of the host, between them."""
    if REAL:
        return
    a = torch.empty(64, device="cuda")
    one, two = torch.cuda.Stream(), torch.cuda.Stream()

    def access(stream, writes: bool) -> int:
        return STUBS.fake_access(a.untyped_storage().data_ptr(), writes, stream.cuda_stream)

    assert access(one, True) == 0 and access(one, False) == 0
    assert access(two, False) == 1  # nothing orders it after the write
    two.wait_stream(one)
    assert access(two, False) == 0
    assert access(one, True) == 1  # the other stream may still read
    torch.cuda.synchronize()
    assert access(one, True) == 0
    one.synchronize()
    assert access(two, True) == 0
    assert access(torch.cuda.default_stream(), False) == 1
    event = two.record_event()
    event.synchronize()
    assert access(torch.cuda.default_stream(), False) == 0


def check_missing() -> None:
    """A function of the real library that nothing imports reports an error instead of a success."""
    assert REAL or STUBS.cudaMallocManaged(None, 0, 0) == 801  # cudaErrorNotSupported; its name is on stderr


def check_everything() -> None:
    """Run every check on the card that the environment describes."""
    checks = [check_card, check_memory, check_counters, check_code, check_order, check_missing, check_captures]
    for check in checks:
        check()


def main() -> int:
    """Check each card of the command line, in a fork of this process: torch reads a card once."""
    for card in sys.argv[1:]:
        capability, _, size = card.partition(":")
        variables = {"FAKE_CUDA_CAPABILITY": capability, "FAKE_CUDA_GIB": size, "FAKE_CUDA_ORDER": "1"}
        if in_a_fork(check_everything, variables) is not None:
            print(f"compute capability {capability}, {size} GiB: not as a GPU; the reason is above")
            return 1
    what = (
        "memory errors, kernels' code and captures"
        if REAL
        else "sizes, memory errors, counters, captures and order of streams"
    )
    print(f"{len(sys.argv) - 1} cards: {what} as on a GPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())

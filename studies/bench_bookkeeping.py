"""Time what a step does with each token outside the model: gather, flat arrays, rows, index arrays. No GPU needed.

    python studies/bench_bookkeeping.py                0.1, 1, 10 and 16.8 million tokens, a process for each
    python studies/bench_bookkeeping.py --samples 64

Samples are random: prompts of ``--prompt_length`` tokens with 8 responses of ``--response_length`` each. One thread.
Peak memory is the process's, with Python and PyTorch, and includes the samples themselves.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime.arguments import flags
from runtime.system import process

GROUP = 8
TOKENS = (100_000, 1_000_000, 10_000_000, 2**24)
PHASES = ("gather", "arrays", "metrics", "rows")


@dataclass
class Args:
    """Settings of the measurement."""

    samples: int | None = None
    """Measure this number of samples, in this process. Default: several sizes."""
    prompt_length: int = 256
    """Tokens of a prompt."""
    response_length: int = 16384
    """Tokens of a response."""
    layouts: tuple[Literal["shared", "packed", "padded"], ...] = ("shared", "packed")
    """Layouts of the rows, where several sizes are measured."""


def random_samples(count: int, prompt_length: int, response_length: int) -> list:
    """``count`` samples of random ids, 8 to a prompt."""
    rng = np.random.default_rng(0)
    samples = []
    for i in range(count):
        if i % GROUP == 0:
            prompt = rng.integers(150_000, size=prompt_length).tolist()
        ids = rng.integers(150_000, size=response_length, dtype=np.int32)
        logprobs = -rng.random(response_length, dtype=np.float32)
        samples.append(Sample(i // GROUP, i % GROUP, prompt, ids, logprobs, "stop", [(1, 0)]))
    return samples


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Put the CPU time of a block into ``seconds[phase]``."""
    started = time.process_time()
    yield
    seconds[phase] = time.process_time() - started


def measure(samples: list, layout: str) -> dict[str, float]:
    """Seconds of a core for each phase on one rank, with default flags; a micro-batch holds one sample of full length.

    CPU time: nothing here waits or has a second thread, and other programs on the machine do not count.
    """
    seconds: dict[str, float] = {}
    cpu = torch.device("cpu")
    everything = list(range(len(samples)))
    longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
    with timed(seconds, "gather"):
        samples = utils.gather_samples(samples)
    with timed(seconds, "arrays"):
        offsets = batching.token_offsets(samples)
        batching.flat([s.sampler_logprobs for s in samples], cpu)
        batching.flat([s.token_versions() == 1 for s in samples], cpu)
        batching.per_token([s.engine for s in samples], offsets)
        batching.per_token([s.advantage for s in samples], offsets)
        grpo.loss_weights(samples, everything, grpo.Args())
    with timed(seconds, "metrics"):
        utils.sample_metrics(samples, torch.rand(1, len(samples), dtype=torch.float64), 1)
    with timed(seconds, "rows"):
        placement = {"layout": layout, "budget": longest, "rank": 0, "world_size": 1, "device": cpu}
        batches = list(batching.micro_batches(samples, everything, **placement))
    found = sum(len(mb.tokens) for mb in batches)
    if found != offsets[-1]:
        raise RuntimeError(f"{found} tokens in the micro-batches, {offsets[-1]} in the samples")
    return seconds


def main(args: Args) -> None:
    if args.samples is None:
        print(f"| tokens | layout | {' | '.join(PHASES)} | all (elapsed) | peak GiB |")
        print("|---|---|" + "---|" * (len(PHASES) + 2), flush=True)
        for tokens in TOKENS:
            samples = str(max(1, tokens // args.response_length))
            for layout in args.layouts:
                command = [sys.executable, __file__, "--samples", samples, "--layouts", layout]
                command += ["--prompt_length", str(args.prompt_length), "--response_length", str(args.response_length)]
                subprocess.run(command, check=True)
        return
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    samples = random_samples(args.samples, args.prompt_length, args.response_length)
    (layout,) = args.layouts
    started = time.perf_counter()
    seconds = measure(samples, layout)
    elapsed = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    columns = " | ".join(f"{seconds[phase]:.2f}" for phase in PHASES)
    tokens = args.samples * args.response_length
    print(f"| {tokens / 1e6:.1f} M | {layout} | {columns} | {sum(seconds.values()):.2f} ({elapsed:.1f}) | {peak:.2f} |")


if __name__ == "__main__":
    args = flags.parse(Args, __doc__)
    process.prepare_environment()

import numpy as np
import torch

import grpo
import utils
from runtime.data.samples import Sample
from runtime.training import batching

if __name__ == "__main__":
    main(args)

"""Client of the rollout thread: send requests, receive samples, push weights."""

from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
import torch.distributed as dist

from runtime.data import prompt_order, rendering
from runtime.data.samples import Batch, Problem, Sample
from runtime.system import user_files, watchdog
from runtime.training.deepspeed_zero import ShardedWeights, weight_bytes


class Engine:
    """vLLM (or transformers' generate) in a thread of this process; the thread alone touches it.

    Ranks that share an engine by tensor parallelism all run the same requests; the first of them reports the samples.
    With --vllm_engines: this rank's part of the engines, which answer the same messages from ranks of their own.
    """

    def __init__(
        self, thread: Callable, args, dtype: torch.dtype, tokenizer, stop_ids: list[int], watch: watchdog.Watch
    ):
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        index, shard = divmod(rank, args.vllm_tensor_parallel_size)
        self.count = world_size // args.vllm_tensor_parallel_size
        self.own = range(index, index + 1)  # the engines that this rank asks
        self.reports = shard == 0
        self.target = thread
        if args.vllm_engines > 0:
            self.count = args.vllm_engines
            self.own = range(rank, self.count, world_size)
            self.reports = True
            self.target = user_files.find("runtime.engine.engine_ranks:Engines")(args, watch).relay
        self.arguments = (args, dtype, rank, world_size, stop_ids)
        self.tokenizer = tokenizer
        self.ending = {i for text, i in rendering.special_tokens(tokenizer).items() if text not in args.stop_strings}
        self.watch = watch
        self.timeout = args.timeout or math.inf
        self.episodes = args.environment is not None
        self.untried = args.rollout == "vllm"  # until its first sample: it may not be able to serve this model
        # It samples while this rank trains, in a thread of this process.
        self.beside = args.async_steps > 0 and args.vllm_engines == 0
        self.numbers = itertools.count()
        self.batches: dict[int, Batch] = {}  # asked for and not whole, by their numbers
        self.arrived: deque[tuple[Batch, Sample]] = deque()  # and not handed on
        self.probe_batch: Batch | None = None  # a few tokens to compare with the trainer's, under way
        self.probes: list[Sample] = []  # what has arrived of it
        self.version = 0  # of the weights that were pushed last: step s begins with version s
        self.acknowledged = 0
        self.pushed_at = time.perf_counter()
        self.tokens = 0  # that arrived since the last push
        self.metrics: dict[str, float] = {}  # of the time between the last two pushes
        self.start()
        if args.vllm_sleep != "off":  # until the first push: its memory is for the trainer
            self.sleep()

    def start(self) -> None:
        """Build the engine in a thread of its own, and wait until it stands."""
        if self.beside:
            # Both threads need Python's lock for microseconds, hundreds of times in a step, and each would wait 5 ms.
            sys.setswitchinterval(2e-4)
        self.inbox, self.outbox = watchdog.Mailbox(), watchdog.Mailbox()
        arguments = (*self.arguments, self.inbox, self.outbox)
        self.thread = threading.Thread(target=self.target, args=arguments, daemon=True, name="rollout")
        self.thread.start()
        self.receive("engine")

    def receive(self, what: str) -> tuple:
        """Wait for the next message of the engine's thread and return it.

        Raises what the thread raised, and TimeoutError. Exits with code 2 if vLLM fails before its first sample.
        """
        try:
            return self.watch.receive(self.outbox, self.thread, self.timeout, what)
        except watchdog.EngineFailed as error:
            if self.untried:
                watchdog.refuse_engine(error, self.arguments[0].engine_args)
            raise

    def ask(
        self,
        problems: list[Problem],
        requests: list[tuple[int, int, int]],
        sampling: dict,
        chosen: list[int] | None = None,
    ) -> Batch:
        """Ask for samples, without waiting. ``requests``: (place in ``problems``, sample number, seed), on every rank.

        Engine e takes the places e, e + count, ...
        """
        mine = []
        for place, number, seed in requests:
            if place % self.count in self.own:
                problem = problems[place]
                if not mine or mine[-1][0][0] != place:
                    ids = list(map(int, problem.prompt_ids))
                row = [problem.row, problem.opening] if self.episodes and not sampling["ignore_eos"] else []
                mine.append(((place, number), ids, seed, *row))
        batch = Batch(next(self.numbers), problems, chosen or [], {request[0] for request in mine})
        if mine:
            self.batches[batch.number] = batch
            self.inbox.put(("generate", batch.number, mine, sampling))
        return batch

    def arrivals(self, batch: Batch) -> Iterator[tuple[Batch, Sample]]:
        """Yield (batch, sample) of all samples that arrive until ``batch`` is complete, of other batches too."""
        self.inbox.put(("until", batch.number))
        while batch.unfinished or self.arrived:
            if self.arrived:
                yield self.arrived.popleft()
            else:
                self.take("sample")

    def request_probe(self, problems: list[Problem], sampling: dict) -> None:
        """Ask every engine for 4 times 16 tokens from its current weights, without waiting for ``probe_samples``."""
        places = range(4 * self.count)
        prompts = [problems[place % len(problems)] for place in places]
        short = {"max_tokens": min(16, sampling["max_tokens"]), "ignore_eos": True}
        self.probe_batch = self.ask(prompts, [(place, 0, place) for place in places], sampling | short)

    def probe_samples(self) -> list[Sample]:
        """Wait for the samples that the last ``request_probe`` asked for, and return those of this rank."""
        self.inbox.put(("until", self.probe_batch.number))
        while self.probe_batch.unfinished:
            self.take("sample")
        found, self.probes = self.probes, []
        return found

    def take(self, what: str) -> None:
        """Wait for one message, whichever comes: samples may arrive before an acknowledgement that is waited for.

        Raises RuntimeError for log-probs that are not finite, and for what an environment may end a run with.
        """
        match self.receive(what):
            case ("sample", number, key, ids, logprobs, finish_reason, versions, *episode):
                if not math.isfinite(sum(logprobs)):
                    raise RuntimeError("the sampler's log-probs are not finite: its weights are broken")
                self.untried = False
                batch = self.batches[number]
                batch.unfinished.remove(key)
                if not batch.unfinished:
                    del self.batches[number]
                prompt_ids = batch.problems[key[0]].prompt_ids
                sample = Sample(*key, prompt_ids, ids, logprobs, finish_reason, versions, *episode)
                if "fatal" in (sample.outcome or ()):
                    raise RuntimeError(sample.outcome["fatal"])
                said = sample.last_turn()
                if finish_reason == "stop" and said[-1] in self.ending:
                    said = said[:-1]
                sample.response = self.tokenizer.decode(said, skip_special_tokens=False)
                sample.engine = key[0] % self.count
                self.tokens += sample.length
                if self.reports and batch is self.probe_batch:
                    self.probes.append(sample)
                elif self.reports:
                    self.arrived.append((batch, sample))
            case ("weights", version, busy):
                now = time.perf_counter()
                self.metrics = {"engine/busy": busy / (now - self.pushed_at)}
                self.metrics["perf/generate_tokens_per_second"] = self.tokens / busy if busy > 0 else None
                self.acknowledged = version
                self.pushed_at = now
                self.tokens = 0

    def push(self, weights: list[tuple[str, torch.Tensor]] | ShardedWeights) -> None:
        """Give the engine new weights. Returns when it has them: they are the trainer's own tensors."""
        started = time.perf_counter()
        self.version += 1
        self.inbox.put(("weights", self.version, weights))
        while self.acknowledged != self.version:
            self.take("acknowledgement of new weights")
        size = weight_bytes(weights) / 2**30
        self.metrics["perf/push_gib"] = size
        self.metrics["perf/push_gib_per_second"] = size / (time.perf_counter() - started)

    def sleep(self) -> None:
        """Release the engine's GPU memory until the next push."""
        self.inbox.put(("sleep",))
        while self.receive("sleep of the engine") != ("slept",):
            pass

    def close(self) -> None:
        """End the thread, whatever it still had to sample."""
        self.outbox.closed = True
        self.inbox.put(("stop",))
        self.thread.join(timeout=30)


class Queue:
    """The batches that the engine was asked for and that no step has trained on yet, oldest first.

    ``state`` is what a checkpoint keeps of them: problems, and the samples of those that are whole.
    """

    def __init__(self, engine: Engine, source, sampling: dict, args):
        self.engine = engine
        self.source = source
        self.sampling = sampling
        self.args = args
        self.group = args.generation_size or args.num_samples_per_prompt_rollout
        self.batches: deque[Batch] = deque()
        self.last = 0  # the step of the newest
        self.state = SimpleNamespace(ahead=[])

    def resume(self, done: int) -> None:
        """Ask again for what the run that is resumed, after step ``done``, was waiting for."""
        self.last = done
        for chosen, found in self.state.ahead:
            self.last += 1
            requests = prompt_order.requests(chosen, self.group, self.args.seed, self.last) if found is None else []
            problems = [self.source.problems[i] for i in chosen]
            batch = self.engine.ask(problems, requests, self.sampling, chosen)
            batch.step = self.last
            prompts = [problem.prompt_ids for problem in problems]
            batch.samples = found and [Sample(**v | {"prompt_ids": prompts[v["prompt_id"]]}) for v in found]
            for sample in batch.samples or []:
                sample.engine = sample.prompt_id % self.engine.count  # another number of ranks has other engines
            self.batches.append(batch)
        self.request_probe()

    def ask(self, count: int, name: str | None = None) -> Batch:
        """Ask for ``count`` problems: those of the next step, or others of a step, by a name STEP/NUMBER."""
        if name is None:
            self.last += 1
        chosen, problems = self.source.draw(count)
        requests = prompt_order.requests(chosen, self.group, self.args.seed, name or self.last)
        batch = self.engine.ask(problems, requests, self.sampling, chosen)
        batch.step = self.last if name is None else int(name.partition("/")[0])
        if name is None:
            self.batches.append(batch)
        return batch

    def request_probe(self) -> None:
        """Have something to compare with the trainer's log-probs in the next step, whose own samples may be stale."""
        if self.args.async_steps > 0:
            self.engine.request_probe(self.source.problems, self.sampling)

    def next(self) -> Batch:
        """Remove the oldest batch from the queue and return it."""
        return self.batches.popleft()

    def update_state(self) -> None:
        """Bring ``state`` up to date."""
        self.state.ahead = []
        for batch in self.batches:
            samples = batch.samples and [vars(sample) | {"prompt_ids": []} for sample in batch.samples]
            self.state.ahead.append((batch.chosen, samples))

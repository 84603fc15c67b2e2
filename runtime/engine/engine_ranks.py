"""Engines on ranks of their own (--vllm_engines), the last ones of an ordinary launch; no Ray, no server.

    trainers, ranks 0 to T - 1            lines of messages             engines, ranks T to N - 1
    ``Engines.relay`` is the thread that  <------------------------->   ``serve`` runs the script's thread
    the script calls its engine           broadcast of weights          function, which is the same as ever

The ranks exchange their addresses on the board of the launch (watchdog.board). Trainer r owns the engines e with
e % T == r; an engine is --vllm_tensor_parallel_size ranks, all of which get every message. Whoever can read the board
can also connect: like torch.distributed itself, it is for a network that you trust.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait

import torch
import torch.distributed as dist

from runtime.system import network, process
from runtime.system.watchdog import Mailbox, Outbox, Watch, board


def weights_group(store: dist.Store, rank: int, size: int, timeout: float) -> dist.ProcessGroup:
    """Create the group that broadcasts weights: trainer 0, which sends, then every rank of every engine.

    It is nobody's default group, so DeepSpeed has the trainers' and vLLM the engine's.
    """
    shared = dist.PrefixStore("weights", store)
    patience = timedelta(seconds=timeout) if timeout > 0 else timedelta(days=365)
    if torch.cuda.is_available():
        return dist.ProcessGroupNCCL(shared, rank, size, patience)
    return dist.ProcessGroupGloo(shared, rank, size, patience)


def own_device() -> torch.device:
    """Return the device of this rank, and make it the current device of the calling thread."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def keep_watch(line: Connection) -> Connection:
    """Make a connection end when its other end no longer answers, and return it."""
    with socket.socket(fileno=os.dup(line.fileno())) as same:
        network.watch_other_end(same)
    return line


# ----------------------------------------------------------------------------------------------------- on the trainers


class Engines:
    """A trainer's engines. ``relay`` stands where the script's thread does, and answers the same messages.

    A rank of an engine that is gone ends the run, with its name.
    """

    def __init__(self, args, watch: Watch):
        self.rank = process.rank()
        self.trainers = process.world_size()
        self.count = args.vllm_engines
        self.shards = args.vllm_tensor_parallel_size
        self.timeout = args.timeout
        self.watch = watch
        self.store = board(watch.host, watch.port)  # a wait there would hold up the watchdog's connection
        self.lines: dict[Connection, int] = {}  # -> place among the ranks of engines
        self.group: dist.ProcessGroup | None = None
        self.stopped = False
        self.answers: list[tuple] = []  # to the last message that every line answers

    def relay(self, args, dtype: torch.dtype, rank: int, world_size: int, stop_ids, inbox, outbox) -> None:
        """Build the engines, and forward every message until the last. Runs in a thread."""
        try:
            self.outbox = outbox
            self._connect()
            self._send_all(("build", dtype, stop_ids))
            if not self.lines:
                outbox.put(("ready",))
            while True:
                match inbox.get():
                    case ("generate", batch, requests, sampling):
                        self._deal(batch, requests, sampling)
                    case ("weights", version, weights):
                        self._send_weights(version, weights)
                    case message:
                        self.stopped = message[0] == "stop"
                        self._send_all(message)
                        if self.stopped:
                            return
        except BaseException as error:
            outbox.put(("error", error))

    def _connect(self) -> None:
        """Call every rank of this trainer's engines, and stand in the group of weights. Raises TimeoutError."""
        deadline = time.monotonic() + (self.timeout or math.inf)
        for engine in range(self.rank, self.count, self.trainers):
            for place in range(engine * self.shards, (engine + 1) * self.shards):
                key = f"engine/{place}"
                while not self.store.check([key]):
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"{self._name(place)} did not arrive within --timeout {self.timeout:g}")
                    time.sleep(0.1)
                address, port, secret = self.store.get(key).decode().split()
                line = keep_watch(Client((address, int(port)), authkey=bytes.fromhex(secret)))
                self.lines[line] = place
        if self.rank == 0:
            self.group = weights_group(self.store, 0, 1 + self.count * self.shards, self.timeout)
        threading.Thread(target=self._read, daemon=True, name="lines to engines").start()

    def _name(self, place: int) -> str:
        return f"rank {self.trainers + place} (engine {place // self.shards})"

    def _lost(self, names: str) -> None:
        """End the run because of engines that are gone."""
        self.watch.abort(f"{self.watch.name} failed: {names} is gone without a word (killed, no memory?)")

    def _send(self, line: Connection, message: tuple) -> None:
        try:
            line.send(message)
        except OSError:
            self._lost(self._name(self.lines[line]))

    def _send_all(self, message: tuple) -> None:
        for line in self.lines:
            self._send(line, message)

    def _deal(self, batch: int, requests: list[tuple], sampling: dict) -> None:
        """Send each engine e the requests of the places e, e + count, ..."""
        for line, place in self.lines.items():
            mine = [request for request in requests if request[0][0] % self.count == place // self.shards]
            self._send(line, ("generate", batch, mine, sampling))

    def _send_weights(self, version: int, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Send weights from trainer 0 to all engines. Returns once sent."""
        entries = [(name, tuple(weight.shape), weight.dtype) for name, weight in weights]
        self._send_all(("weights", version, entries))
        if not self.lines:
            self.outbox.put(("weights", version, 0.0))
        if self.group is not None:
            device = own_device()
            try:
                for _, weight in weights:
                    self.group.broadcast(weight.detach().to(device).contiguous(), 0).wait()
                    Watch.heartbeat()
                if device.type == "cuda":
                    torch.cuda.synchronize()
            except RuntimeError as error:
                gone = self._absent()
                if gone:
                    self._lost(gone)
                raise RuntimeError("weights did not reach the engines, although all their ranks are alive") from error

    def _absent(self) -> str:
        """Name the engine ranks that have ended, by their addresses."""
        gone = []
        for place in range(self.count * self.shards):
            try:
                network.Neighbor(self.store.get(f"door/{self.trainers + place}").decode())
            except OSError:
                gone.append(self._name(place))
        return ", ".join(gone)

    def _read(self) -> None:
        """Put the messages of all connections into the outbox until each one has ended. Runs in a second thread."""
        open_lines = list(self.lines)
        while open_lines:
            for line in wait(open_lines):
                try:
                    message = line.recv()
                except (EOFError, OSError):
                    open_lines.remove(line)
                    if not self.stopped:
                        self._lost(self._name(self.lines[line]))
                    continue
                self._take(message)

    def _take(self, message: tuple) -> None:
        """Hand on samples and errors as they come, and what every line answers once it is complete."""
        if message[0] in ("sample", "error"):
            self.outbox.put(message)
            return
        self.answers.append(message)
        if len(self.answers) < len(self.lines):
            return
        if message[0] == "weights":
            busy = sum(seconds for _, _, seconds in self.answers) / len(self.answers)
            message = ("weights", message[1], busy)
        self.answers = []
        self.outbox.put(message)


# ------------------------------------------------------------------------------------------------------ on the engines


def report(line: Connection, shard: int, message: tuple) -> None:
    """Send a message of an engine's rank. Only the first shard of an engine reports samples."""
    if shard == 0 or message[0] != "sample":
        line.send(message)


def serve(args, thread: Callable) -> None:
    """Run an engine rank from start to end. ``thread``: the script's function that builds and steps the engine.

    Returns when its trainer says stop. Ends the process when the trainer, or any other rank, is gone.
    """
    watch = Watch(args.timeout)
    shards = args.vllm_tensor_parallel_size
    ranks = args.vllm_engines * shards
    trainers = process.launch_size() - ranks
    place = watch.rank - trainers
    engine, shard = divmod(place, shards)
    store = board(watch.host, watch.port)  # a wait there would hold up the watchdog's connection
    line = answer_call(store, place)
    group = weights_group(store, 1 + place, 1 + ranks, args.timeout)
    if shards > 1:
        join_shards(store, engine, shard)
    os.environ |= {"RANK": str(shard), "WORLD_SIZE": str(shards)}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # vLLM's ranks keep their own
    inbox = Mailbox()
    while True:
        try:
            message = line.recv()
            match message:
                case ("build", dtype, stop_ids):
                    outbox = Outbox(partial(report, line, shard))
                    arguments = (args, dtype, place, shards, stop_ids, inbox, outbox)
                    worker = threading.Thread(target=thread, args=arguments, daemon=True, name="rollout")
                    worker.start()
                case ("weights", version, entries):
                    inbox.put(("weights", version, received(group, entries)))
                case _:
                    inbox.put(message)
        except (EOFError, OSError):
            owner = engine % trainers
            watch.abort(f"{watch.name} failed: rank {owner}, which engine {engine} samples for, is gone")
        if message == ("stop",):
            break
    worker.join(timeout=30)
    watch.close()


def answer_call(store: dist.Store, place: int) -> Connection:
    """Register this engine in the store, and wait for the trainer that owns it."""
    secret = secrets.token_bytes(32)
    address = network.own_address()
    if ":" in address:  # what multiprocessing's Listener does not know
        process.refuse(f"--vllm_engines: engines on ranks of their own need IPv4, and this node has {address}")
    with Listener((address, 0), authkey=secret) as door:
        store.set(f"engine/{place}", f"{address} {door.address[1]} {secret.hex()}")
        while True:
            try:
                return keep_watch(door.accept())
            except (AuthenticationError, EOFError, OSError):  # somebody else
                continue


def join_shards(store: dist.Store, engine: int, shard: int) -> None:
    """Let the ranks of an engine find each other: vLLM's store is a port of its first rank."""
    key = f"shards/{engine}"
    if shard == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            store.set(key, f"{network.own_address()} {free.getsockname()[1]}")
    address, port = store.get(key).decode().split()
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": port}


def received(group: dist.ProcessGroup, entries: list[tuple]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a broadcast, each received when it is asked for.

    vLLM loads one while the next is on its way.
    """
    device = own_device()
    for name, shape, dtype in entries:
        weight = torch.empty(shape, dtype=dtype, device=device)
        group.broadcast(weight, 0).wait()
        yield name, weight

"""The engine's thread message by message, with a stand-in for vLLM's LLM that computes nothing.

tests/runs/test_engine.py has the real one; what a GPU alone would do (memory that sleeps) is seen here by its calls.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import json
import math
import multiprocessing
import os
import sys
import threading
import time
from types import SimpleNamespace

import evaluate
import pytest
import torch
from helpers import ROOT, run_here, tiny_args

import grpo
import ppo
import utils
from runtime.arguments import checks, flags
from runtime.engine import engine_ranks, vllm_settings, weights
from runtime.engine.client import Engine
from runtime.environments.episodes import Episodes
from runtime.system import watchdog
from runtime.training.model_files import Model

SCRIPTS = pytest.mark.parametrize("script", [grpo, ppo])
NO_SPECIAL = SimpleNamespace(added_tokens_decoder={})  # a tokenizer
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 4, "ignore_eos": False, "stop": []}


class Noting:
    """vLLM's LLM and its engine, as far as the thread uses them; each call is noted."""

    def __init__(self):
        self.llm_engine = self
        self.calls: list[tuple] = []
        self.waiting: list[str] = []
        self.shutdowns = 0
        core = SimpleNamespace(model_executor=SimpleNamespace(shutdown=self.shut_down))
        self.engine_core = SimpleNamespace(_finalizer=SimpleNamespace(detach=lambda: None), engine_core=core)

    def shut_down(self):
        self.shutdowns += 1

    def set_weight_version(self, version):
        self.calls.append(("version", version))

    def sleep(self, level):
        self.calls.append(("sleep", level))

    def wake_up(self, tags):
        self.calls.append(("wake_up", *tags))

    def add_request(self, name, prompt, params):
        self.waiting.append(name)
        self.calls.append(("request", prompt["cache_salt"], params.seed))

    def step(self):
        """One response of one token, after a hundredth of a second."""
        time.sleep(0.01)
        span = SimpleNamespace(version="1", start=0)
        logprobs = SimpleNamespace(logprobs=[-0.5])
        answer = SimpleNamespace(token_ids=[7], logprobs=logprobs, finish_reason="stop", weight_versions=[span])
        return [SimpleNamespace(request_id=self.waiting.pop(0), outputs=[answer])]


def converse(script, monkeypatch, llm, *messages, args=None) -> list[tuple]:
    """Return the thread's answers to these messages, and to ("stop",) after them."""
    inbox, outbox = watchdog.Mailbox(), watchdog.Mailbox()
    arguments = (args or script.Args(), torch.float32, 0, 1, [0])

    def build(*given):
        assert given == arguments[:4]
        return llm

    monkeypatch.setattr(script, "build_vllm", build)
    monkeypatch.setattr(script, "push_weights", lambda engine, weights, mode: engine.calls.append(("push", weights)))
    for message in (*messages, ("stop",)):
        inbox.put(message)
    thread = threading.Thread(target=script.vllm_thread, args=(*arguments, inbox, outbox), daemon=True)
    thread.start()
    thread.join(timeout=120)  # the first imports vLLM
    assert not thread.is_alive()
    return list(outbox.queue)


@SCRIPTS
def test_an_engine_that_sleeps_wakes_up_for_the_push_alone(script, monkeypatch):
    """Memory for the weights comes first, for the KV cache last; the second push finds it awake."""
    llm = Noting()
    found = converse(script, monkeypatch, llm, ("sleep",), ("weights", 1, ["a"]), ("weights", 2, ["b"]))
    assert llm.calls == [
        ("version", "0"),
        ("sleep", 2),
        ("wake_up", "weights"),
        ("push", ["a"]),
        ("wake_up", "kv_cache"),
        ("version", "1"),
        ("push", ["b"]),
        ("version", "2"),
    ]
    assert found == [("ready",), ("slept",), ("weights", 1, 0.0), ("weights", 2, 0.0)]


@SCRIPTS
def test_the_seconds_of_an_engine_are_those_since_the_last_push(script, monkeypatch):
    requests = [((0, k), [1, 2], 100 + k) for k in range(3)]
    llm = Noting()
    messages = [("weights", 1, []), ("generate", 5, requests, SAMPLING), ("weights", 2, []), ("weights", 3, [])]
    found = converse(script, monkeypatch, llm, *messages)
    assert [message[:3] for message in found if message[0] == "sample"] == [("sample", 5, (0, k)) for k in range(3)]
    assert found[2] == ("sample", 5, (0, 0), [7], [-0.5], "stop", [(1, 0)])
    busy = [message[2] for message in found if message[0] == "weights"]
    assert busy[0] == busy[2] == 0.0 and 0.03 <= busy[1] < 10
    assert [call for call in llm.calls if call[0] == "request"] == [("request", "1", 100 + k) for k in range(3)]


@SCRIPTS
def test_a_program_gets_an_answer_from_the_engine(script, monkeypatch):
    found = converse(script, monkeypatch, Noting(), ("call", lambda llm: len(llm.calls)))
    assert found == [("ready",), ("called", 1)]


@SCRIPTS
def test_an_engine_that_failed_is_released_before_its_error_is_told(script, monkeypatch):
    released = []
    monkeypatch.setattr(script, "release_vllm", released.append)
    llm = Noting()
    llm.step = lambda: 1 / 0
    requests = [((0, 0), [1, 2], 3)]
    found = converse(script, monkeypatch, llm, ("generate", 0, requests, SAMPLING))
    assert released == [llm] and found[-1][0] == "error" and isinstance(found[-1][1], ZeroDivisionError)


@SCRIPTS
def test_an_engine_that_stops_is_released_and_ends_the_processes_of_its_episodes(script, monkeypatch, tiny):
    """Batch 0 is whole, and a tool of batch 1 is under way. The program that stops the engine may live on."""
    game = f"{ROOT / 'tests' / 'environments.py'}:Late"
    args = script.Args(model_name_or_path=str(tiny), environment=game, async_steps=1, inflight_updates="keep")
    made = []
    monkeypatch.setattr(script.turns, "episodes_of", lambda given: made.append(Episodes(given)) or made[0])
    long = [((0, 0), [1, 2], 3, {"answer": "none", "seconds": 600.0})]
    messages = [("generate", 1, long, SAMPLING), ("generate", 0, [((0, 0), [1, 2], 3)], SAMPLING), ("until", 0)]
    llm = Noting()
    found = converse(script, monkeypatch, llm, *messages, args=args)
    assert [message[:2] for message in found] == [("ready",), ("sample", 0)]
    assert llm.shutdowns == 1
    (waits,) = made[0].aside
    assert waits.worker is None and not made[0].played


def test_a_released_engine_keeps_the_process_group():
    """Its own finalizer would destroy it; the shutdown of the executor frees the memory."""
    order = []
    core = SimpleNamespace(model_executor=SimpleNamespace(shutdown=lambda: order.append("shutdown")))
    finalizer = SimpleNamespace(detach=lambda: order.append("detach"))
    client = SimpleNamespace(_finalizer=finalizer, engine_core=core)
    weights.release_vllm(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client)))
    assert order == ["detach", "shutdown"]


# ----------------------------------------------------------------------------------------------- the main thread's side


@SCRIPTS
def test_what_arrives_before_the_engine_sleeps_is_passed_over(script):
    engine = object.__new__(script.Engine)
    engine.inbox = watchdog.Mailbox()
    messages = iter([("weights", 1, 0.0), ("slept",), ("later",)])
    engine.receive = lambda what: next(messages)
    engine.sleep()
    assert engine.inbox.get_nowait() == ("sleep",)
    assert next(messages) == ("later",)


@SCRIPTS
@pytest.mark.parametrize(
    "rank, world, changes, expected",
    [
        (1, 4, {}, {"count": 4, "own": [1], "reports": True}),
        (3, 4, {"vllm_tensor_parallel_size": 2}, {"count": 2, "own": [1], "reports": False}),
        (2, 4, {"vllm_tensor_parallel_size": 2}, {"count": 2, "own": [1], "reports": True}),
        (1, 2, {"vllm_engines": 3}, {"count": 3, "own": [1], "reports": True}),
        (
            *(1, 2),
            {"vllm_engines": 2, "vllm_tensor_parallel_size": 2},
            {"count": 2, "own": [1], "reports": True},
        ),
        (0, 1, {"timeout": 7.0}, {"timeout": 7.0}),
        (0, 1, {"async_steps": 1}, {"beside": True}),
    ],
)
def test_which_engines_a_rank_asks_and_what_it_keeps_for_them(script, monkeypatch, rank, world, changes, expected):
    monkeypatch.setattr(script.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(script.dist, "get_world_size", lambda: world)
    monkeypatch.setattr(script.Engine, "start", lambda self: None)
    monkeypatch.setattr(script.Engine, "sleep", lambda self: None)
    monkeypatch.setattr(engine_ranks, "Engines", lambda args, watch: SimpleNamespace(relay=None))
    engine = script.Engine(script.vllm_thread, script.Args(**changes), torch.float32, NO_SPECIAL, [0], None)
    values = {name: getattr(engine, name) for name in expected}
    if "own" in values:
        values["own"] = list(values["own"])
    assert values == expected


@SCRIPTS
def test_the_engines_thread_does_not_keep_a_process_alive(script):
    """It may be inside of vLLM for minutes; Python waits at its end for every thread that is no daemon."""
    engine = object.__new__(script.Engine)
    leave = threading.Event()
    engine.target = lambda inbox, outbox: leave.wait(20)
    engine.arguments = ()
    engine.timeout = 5.0
    engine.beside = False
    told = []
    engine.watch = SimpleNamespace(receive=lambda *given: told.append(given))
    engine.start()
    assert engine.thread.is_alive() and engine.thread.daemon
    assert told == [(engine.outbox, engine.thread, 5.0, "engine")]
    leave.set()


@pytest.mark.integration
@SCRIPTS
@pytest.mark.parametrize("asked", ["off", "engine"])
def test_an_engine_sleeps_before_the_first_push_and_in_every_update(tiny, tmp_path, monkeypatch, script, asked):
    seen = []
    plain = script.Engine.push
    monkeypatch.setattr(script.Engine, "sleep", lambda engine: seen.append("sleep"))
    monkeypatch.setattr(script.Engine, "push", lambda engine, *rest: (seen.append("push"), plain(engine, *rest))[1])
    args = tiny_args(tiny, tmp_path, script.__name__, total_steps=2, eval_prompts=0, vllm_sleep=asked)
    run_here(args, script.__name__)
    assert seen == (["sleep", "push"] * 3 if asked == "engine" else ["push"] * 3)


# ------------------------------------------------------------------------------------------ engines on other ranks


@pytest.fixture
def engines_of(monkeypatch):
    """The engines of trainer ``rank`` of two, of which there is one in all: trainer 0's."""
    monkeypatch.setattr(engine_ranks, "board", lambda host, port: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    lost = []

    def make(rank: int) -> engine_ranks.Engines:
        monkeypatch.setenv("RANK", str(rank))
        watch = SimpleNamespace(host="", port=0, name=f"rank {rank}", abort=lost.append)
        engines = engine_ranks.Engines(flags.RunFlags(vllm_engines=1, timeout=10.0), watch)
        engines.lost = lost
        return engines

    return make


def test_a_trainer_without_engines_waits_for_none(engines_of):
    """Two trainers and one engine: the other trainer gets what an engine reports, that it is there and has weights."""
    engines = engines_of(1)
    engines._connect = lambda: None
    inbox, outbox = watchdog.Mailbox(), watchdog.Mailbox()
    for message in (("weights", 3, [("w", torch.ones(2))]), ("generate", 0, [((0, 0), [1], 2)], SAMPLING), ("stop",)):
        inbox.put(message)
    engines.relay(None, torch.float32, 1, 2, [0], inbox, outbox)
    assert list(outbox.queue) == [("ready",), ("weights", 3, 0.0)]


@pytest.mark.parametrize("stopped", [True, False])
def test_lines_that_ended_are_read_no_more(engines_of, stopped):
    """The thread ends with the last of them; who has not been told to stop is missed, once and by name."""
    engines = engines_of(0)
    engines.stopped = stopped
    engines.outbox = watchdog.Mailbox()
    (own, other), (second, other_second) = multiprocessing.Pipe(), multiprocessing.Pipe()
    engines.lines = {own: 0, second: 1}
    other.send(("error", "late"))
    other.close()
    reader = threading.Thread(target=engines._read, daemon=True)
    reader.start()
    time.sleep(0.05)
    other_second.close()
    reader.join(timeout=2)
    ended = not reader.is_alive()
    for line in (own, second):  # a thread that reads on fails here
        line.close()
    assert ended
    assert list(engines.outbox.queue) == [("error", "late")]
    words = "rank 0 failed: rank {} (engine {}) is gone without a word (killed, no memory?)"
    assert engines.lost == ([] if stopped else [words.format(2, 0), words.format(3, 1)])


def test_what_all_ranks_of_engines_answer_is_one_answer(engines_of):
    """Samples and errors pass as they come; the busy seconds of a push are the mean of those of all lines."""
    engines = engines_of(0)
    engines.outbox = watchdog.Mailbox()
    engines.lines = {"one": 0, "other": 1}
    sample = ("sample", 0, (0, 0), [7], [-0.5], "stop", [(1, 0)])
    for message in (("weights", 4, 1.0), sample, ("weights", 4, 3.0), ("slept",), ("slept",)):
        engines._take(message)
    assert list(engines.outbox.queue) == [sample, ("weights", 4, 2.0), ("slept",)]


def test_the_device_of_a_rank_is_the_one_its_thread_works_on(monkeypatch):
    """Without a GPU it is the CPU; else the thread that asks, whose current device was the first one, is set to it."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert engine_ranks.own_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert engine_ranks.own_device() == torch.device("cuda", 3) and chosen == [3]


class Line:
    """One to an engine's rank."""

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)


def test_requests_go_to_the_engine_of_their_place(engines_of):
    """Engine e of two takes the places e, e + 2, ..., on each of its ranks."""
    engines = engines_of(0)
    engines.count = 2
    engines.shards = 2
    engines._connect = lambda: None
    engines.lines = {Line(): place for place in range(4)}
    inbox, outbox = watchdog.Mailbox(), watchdog.Mailbox()
    requests = [((place, 0), [1], place) for place in range(3)]
    for message in (("generate", 5, requests, SAMPLING), ("until", 5), ("stop",)):
        inbox.put(message)
    engines.relay(None, torch.float32, 0, 1, [2], inbox, outbox)
    for line, place in engines.lines.items():
        mine = [request for request in requests if request[0][0] % 2 == place // 2]
        build = ("build", torch.float32, [2])
        assert line.sent == [build, ("generate", 5, mine, SAMPLING), ("until", 5), ("stop",)]


@pytest.mark.parametrize("rank, engine, shard, sends", [(2, 0, 0, True), (3, 0, 1, False), (4, 1, 0, True)])
def test_the_ranks_of_engines_follow_those_of_the_trainers(monkeypatch, rank, engine, shard, sends):
    """Two trainers and two engines of two ranks each; the first rank of an engine reports its samples."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 6}.items():
        monkeypatch.setenv(name, str(value))
    watch = SimpleNamespace(rank=rank, host="", port=0, close=lambda: None)
    own, other = multiprocessing.Pipe()
    noted = {}
    monkeypatch.setattr(engine_ranks, "Watch", lambda timeout: watch)
    monkeypatch.setattr(engine_ranks.process, "launch_size", lambda: 6)
    monkeypatch.setattr(engine_ranks, "board", lambda host, port: None)
    monkeypatch.setattr(engine_ranks, "answer_call", lambda store, place: noted.update(place=place) or own)
    monkeypatch.setattr(
        engine_ranks, "weights_group", lambda store, rank, size, timeout: noted.update(group=(rank, size))
    )
    monkeypatch.setattr(engine_ranks, "join_shards", lambda store, engine, shard: noted.update(shards=(engine, shard)))

    def thread(args, dtype, place, shards, stop_ids, inbox, outbox):
        assert (dtype, place, shards, stop_ids) == (torch.float32, rank - 2, 2, [0])
        outbox.put(("ready",))
        outbox.put(("sample", "mine"))
        assert inbox.get() == ("stop",)

    other.send(("build", torch.float32, [0]))
    other.send(("stop",))
    engine_ranks.serve(flags.RunFlags(vllm_engines=2, vllm_tensor_parallel_size=2), thread)
    assert noted == {"place": rank - 2, "group": (rank - 1, 5), "shards": (engine, shard)}
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(shard), "2")
    own.close()
    found = []
    while other.poll():
        try:
            found.append(other.recv())
        except EOFError:
            break
    assert found == [("ready",), ("sample", "mine")][: 1 + sends]


# ------------------------------------------------------------------------------------------------ what vLLM is built by


SMALL = Model(10**6, layers=2, hidden=16, intermediate=16, heads=2, kv_heads=2, head_size=8, vocabulary=64)


def built(
    script, monkeypatch, cuda: bool, capability=(9, 0), config=None, dtype=torch.bfloat16, model=None, **changes
) -> dict:
    """The arguments of vLLM's LLM, with torch made to report a GPU or none. ``config``: the model's config.json."""
    import vllm

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(total_memory=int(80e9)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(vllm, "LLM", lambda **given: given, raising=False)
    monkeypatch.setattr(vllm_settings, "read_configs", lambda *_, **__: (config or {}, {}, set()))
    monkeypatch.setattr(vllm_settings, "read_model", lambda name: model)
    return script.build_vllm(script.Args(**changes), dtype, 0, 1)


def own(**settings) -> dict:
    """--vllm_args with these settings."""
    return {"vllm_args": json.dumps(settings)}


GRAPHS = "max_cudagraph_capture_size"  # vLLM's own limit is 512; above it, every kernel of a step starts from Python
MANY = {"num_unique_prompts_rollout": 64, "num_samples_per_prompt_rollout": 8, "eval_prompts": 0}
TESTS = {"eval_prompts": 1319, "eval_samples": 1}
ON_CPU = {"enforce_eager": True, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "block_size": 32}
ON_GPU = {"enforce_eager": None, "max_num_seqs": 1024, "max_num_batched_tokens": 16384, "block_size": None}
OWN = {"enforce_eager": False, "block_size": 64, "max_num_seqs": 7, "max_num_batched_tokens": 300, "seed_x": 1}
IN_FLIGHT = {"async_steps": 1, "inflight_updates": "recompute"}
REVISION = {"model_name_or_path": "me/model@abc"}
# Whether there is a GPU, the flags, and what vLLM is given; None: its own choice.
BUILT = [
    (
        False,
        {"model": SMALL},
        {"kv_cache_memory_bytes": 1.25 * 256 * 288 * 2 * 2 * 2 * 8 * 2},
    ),  # of 288 tokens, bf16
    (False, {}, {"kv_cache_memory_bytes": 2**29, "gpu_memory_utilization": None, GRAPHS: None, **ON_CPU}),
    (True, {}, {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.4, **ON_GPU}),
    (False, own(kv_cache_memory_bytes=2**31), {"kv_cache_memory_bytes": 2**31}),
    (True, own(kv_cache_memory_bytes=2**31), {"kv_cache_memory_bytes": 2**31}),
    (False, {"max_prompt_length": 100, "max_response_length": 30}, {"max_model_len": 130}),
    *((True, {"vllm_sleep": asked}, {"enable_sleep_mode": asked != "off"}) for asked in ("off", "engine", "all")),
    (False, {"vllm_sleep": "all"}, {"enable_sleep_mode": False}),
    (False, {}, {"async_scheduling": None, "dtype": "bfloat16"}),
    (False, IN_FLIGHT, {"async_scheduling": False}),  # else a token got a version that it was not sampled by
    (False, IN_FLIGHT | {"inflight_updates": "keep"}, {"async_scheduling": False}),
    (True, MANY, {GRAPHS: None}),  # 512 sequences
    (True, MANY | {"num_samples_per_prompt_rollout": 9}, {GRAPHS: 576}),
    (True, MANY | {"async_steps": 1}, {GRAPHS: 1024}),
    (True, MANY | {"num_unique_prompts_rollout": 40, "generation_size": 15}, {GRAPHS: 608}),  # 600, in steps of 16
    (True, TESTS, {GRAPHS: 1024}),  # max_num_seqs
    (True, TESTS | own(max_num_seqs=2048), {GRAPHS: 1328}),
    (True, TESTS | own(cudagraph_capture_sizes=[8]), {GRAPHS: None}),
    (False, REVISION, {"model": "me/model", "revision": "abc", "tokenizer": None, "tokenizer_revision": "abc"}),
    (False, REVISION | {"tokenizer_name_or_path": "other"}, {"tokenizer": "other", "tokenizer_revision": None}),
    (False, own(**OWN), OWN),
    (True, own(max_num_seqs=20000), {"max_num_batched_tokens": 20000}),
]


@SCRIPTS
@pytest.mark.parametrize("cuda, changes, expected", BUILT)
def test_what_vllm_is_built_by(script, monkeypatch, cuda, changes, expected):
    """A part of a GPU or a size of memory, room for the longest samples, and the user's settings above all others."""
    monkeypatch.setattr(vllm_settings, "take_gpu", lambda args: None)
    given = built(script, monkeypatch, cuda, **changes)
    assert {name: given.get(name) for name in expected} == expected


def test_an_evaluation_without_a_run_has_an_engine_on_a_gpu(monkeypatch):
    """Its arguments have no groups and no learning rate, from which a trainer's sizes follow."""
    script = SimpleNamespace(build_vllm=grpo.build_vllm, Args=evaluate.Args)
    given = built(script, monkeypatch, True)
    assert given["gpu_memory_utilization"] == 0.4 and given["max_cudagraph_capture_size"] == 1024


@SCRIPTS
def test_an_engine_on_a_gpu_starts_without_trying_kernels(script, monkeypatch, tmp_path):
    """FlashInfer would be tried and compiled where nvcc is on PATH, for minutes, and not elsewhere."""
    from vllm import EngineArgs

    given = built(script, monkeypatch, True)["kernel_config"]
    assert given == {"enable_flashinfer_autotune": False}
    assert EngineArgs(model=str(tmp_path), kernel_config=given).kernel_config.enable_flashinfer_autotune is False
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"


@SCRIPTS
def test_an_engine_beside_a_trainer_has_a_stream_of_its_own(script, monkeypatch):
    """Set in the engine's thread after vLLM's import, of the higher priority; not where nothing runs next to it."""
    seen = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda priority: ("stream", priority))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: seen.append((stream, threading.current_thread().name)))
    plain = importlib.import_module

    def noted(name, *rest):
        seen.append(name)
        return plain(name, *rest)

    monkeypatch.setattr(importlib, "import_module", noted)
    for changes in ({}, {"async_steps": 1, "vllm_engines": 1}):
        built(script, monkeypatch, True, **changes)
        assert not [word for word in seen if isinstance(word, tuple)]
    seen.clear()
    thread = threading.Thread(target=built, args=(script, monkeypatch, True), kwargs={"async_steps": 1}, name="rollout")
    thread.start()
    thread.join()
    assert seen == ["vllm", (("stream", -1), "rollout")]


@pytest.mark.parametrize("changes, interval", [({}, 5e-3), ({"async_steps": 1}, 2e-4)])
def test_a_thread_that_computes_does_not_hold_back_the_other(monkeypatch, changes, interval):
    """An engine next to the trainer takes Python's lock sooner than after Python's own interval of 5 ms."""
    before = sys.getswitchinterval()
    monkeypatch.setattr("runtime.engine.client.dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: 1))
    sys.setswitchinterval(5e-3)
    try:
        watch = SimpleNamespace(receive=lambda *given: ("ready",))
        Engine(lambda *rest: None, grpo.Args(**changes), torch.float32, NO_SPECIAL, [2], watch)
        assert sys.getswitchinterval() == pytest.approx(interval)
    finally:
        sys.setswitchinterval(before)


@SCRIPTS
def test_what_the_script_gives_vllm_is_refused_beside_it(script):
    """Every keyword of the call, but for those that --vllm_args may change; all are arguments that vLLM has."""
    from vllm.engine.arg_utils import EngineArgs

    call = next(
        node
        for node in ast.walk(ast.parse(inspect.getsource(script.build_vllm)))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LLM"
    )
    names = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
    assert names | {"hf_overrides"} == set(checks.VLLM_TAKEN)  # which follows from --override_config
    fields = {field.name for field in dataclasses.fields(EngineArgs)}
    assert {*checks.VLLM_TAKEN, *flags.VLLM_RESOURCES} - fields == set()


def test_what_both_scripts_repeat_is_the_same_text():
    """So a test of one script's loss, thread or selection holds for the other."""
    texts = []
    for script in (grpo, ppo):
        own = {name: x for name, x in inspect.getmembers(script, inspect.isfunction) if x.__module__ == script.__name__}
        texts.append({name: inspect.getsource(function) for name, function in own.items()})
    both = texts[0].keys() & texts[1].keys()
    assert {"begin_turn", "kl_value", "token_loss", "vllm_thread"} <= both
    assert {name for name in both if texts[0][name] != texts[1][name]} == {"check_args", "main"}


@pytest.mark.parametrize("ignore_eos, length", [(True, 5), (False, 1)])
def test_which_tokens_end_a_response_of_transformers(tiny_model, ignore_eos, length):
    """All logits are equal, and the largest is that of token 0, which is the one that ends responses, or just any."""
    model = copy.deepcopy(tiny_model).eval()
    torch.nn.init.zeros_(model.lm_head.weight)
    sampling = SAMPLING | {"temperature": 0.0, "max_tokens": 5, "ignore_eos": ignore_eos}
    ((key, ids, logprobs, reason),) = utils._generate(model, [5, 6], ["key"], 1, sampling, [0], torch.device("cpu"))
    assert (key, ids, reason) == ("key", [0] * length, "length" if ignore_eos else "stop")
    assert logprobs == pytest.approx([-math.log(model.config.vocab_size)] * length)

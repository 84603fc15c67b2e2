"""An engine that fails ends the run with the reason: with code 2 before its first sample, with its exception after it.

The thread is a stand-in that answers each message as told; the client, its thread and its mailboxes are the real ones.
"""

from __future__ import annotations

import threading
from types import MappingProxyType

import pytest
import torch
from helpers import make_samples

import grpo
from runtime.data.samples import Problem
from runtime.engine.client import Engine
from runtime.engine.weights import accepted
from runtime.system import watchdog

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 4, "ignore_eos": False, "stop": []}
WEIGHTS = [("w", torch.zeros(2))]


@pytest.fixture
def watch(monkeypatch):
    """A watch of this rank alone, for ``Engine`` to wait with."""
    for name, value in {"rank": 0, "world_size": 1}.items():
        monkeypatch.setattr(torch.distributed, f"get_{name}", lambda value=value: value)
    watching = object.__new__(watchdog.Watch)
    watching.store = type("Store", (), {"check": lambda self, keys: False})()
    return watching


class Words:
    """A tokenizer of one word."""

    added_tokens_decoder = MappingProxyType({})

    def decode(self, ids, **options):
        return "x"


class Scripted:
    """An engine's thread. ``fails``: {kind of message: the errors to answer the first of them with}."""

    def __init__(self, **fails):
        self.fails = fails
        self.built = 0

    def answer(self, kind: str, outbox, *messages) -> bool:
        """Put the next error for this kind of message, or else the messages; False after an error."""
        errors = self.fails.get(kind, [])
        if errors:
            outbox.put(("error", errors.pop(0)))
            return False
        for message in messages:
            outbox.put(message)
        return True

    def __call__(self, args, dtype, rank, world_size, stop_ids, inbox, outbox) -> None:
        self.built += 1
        going = self.answer("build", outbox, ("ready",))
        while going:
            match inbox.get():
                case ("weights", version, _):
                    going = self.answer("push", outbox, ("weights", version, 0.0))
                case ("generate", batch, requests, _):
                    found = [("sample", batch, key, [3], [-0.5], "stop", [(1, 0)]) for key, *_ in requests]
                    going = self.answer("sample", outbox, *found)
                case ("stop",):
                    going = False


def engine_of(thread: Scripted, watch, **flags) -> Engine:
    return Engine(thread, grpo.Args(**flags), torch.float32, Words(), [2], watch)


def one_sample(engine: Engine) -> None:
    """Ask for a sample and wait for it."""
    prompt = make_samples()[0].prompt_ids
    batch = engine.ask([Problem([], "a", "math", {}, prompt)], [(0, 0, 1)], SAMPLING)
    assert len(list(engine.arrivals(batch))) == 1


def unsupported(text: str = "no kernel for this model") -> Exception:
    return NotImplementedError(text)


@pytest.mark.parametrize(
    "given, remedy", [(None, "use --rollout hf"), ('{"block_size": 16}', "leave block_size out of")]
)
def test_the_remedy_names_the_argument_of_vllm_that_cannot_work(watch, refused, given, remedy):
    """Leaving it out would do, where the reason is about it."""
    thread = Scripted(build=[unsupported("No common block size for 16")])
    assert remedy in refused(engine_of, thread, watch, vllm_args=given)


@pytest.mark.parametrize("when", ["build", "push", "sample"])
@pytest.mark.parametrize("kind", [NotImplementedError, AttributeError, RuntimeError])
def test_a_model_that_vllm_cannot_serve_is_refused_at_the_start(watch, capsys, when, kind):
    """One line and exit code 2, for whatever reason and in whatever message; nothing is tried again."""
    thread = Scripted(**{when: [kind("no kernel\nfor this model")]})
    with pytest.raises(SystemExit) as end:
        engine = engine_of(thread, watch)
        engine.push(WEIGHTS)
        one_sample(engine)
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and thread.built == 1
    assert f"{kind.__name__}: no kernel for this model; use --rollout hf" in line


TRACEBACK = "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\n    g()\nKeyError: 'layers.1'\n"
SETTINGS = "chunked prefill is required [input_value={'kv_cache_memory_bytes': 1}]"  # vLLM quotes all arguments


@pytest.mark.parametrize(
    "error, words",
    [
        (RuntimeError(TRACEBACK), "settings: KeyError: 'layers.1'; use --rollout hf"),  # as it comes from a process
        (ValueError(SETTINGS), "chunked prefill is required"),  # which name memory, but it is no lack of it
    ],
)
def test_the_reason_is_one_line(watch, capsys, error, words):
    with pytest.raises(SystemExit):
        engine_of(Scripted(build=[error]), watch)
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_the_error_names_the_line_that_raised_it(watch, capsys):
    try:
        raise unsupported()
    except NotImplementedError as error:
        raised = error
    with pytest.raises(SystemExit):
        engine_of(Scripted(build=[raised]), watch)
    assert f"no kernel for this model ({__file__}:{raised.__traceback__.tb_lineno});" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        ValueError("No available memory for the cache blocks. Try increasing gpu_memory_utilization."),
        ValueError("Free memory on device (1.2/79.1 GiB) on startup is less than desired GPU memory utilization"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 5 bytes."),
    ],
    ids=lambda error: str(error)[:16],
)
def test_too_little_memory_is_no_fault_of_the_model(watch, capsys, error):
    with pytest.raises(watchdog.EngineFailed):
        engine_of(Scripted(build=[error]), watch)
    assert "--rollout hf" not in capsys.readouterr().err


def test_with_transformers_a_failure_is_raised(watch):
    with pytest.raises(watchdog.EngineFailed):
        engine_of(Scripted(build=[unsupported()]), watch, rollout="hf")


@pytest.mark.parametrize("when", ["push", "sample"])
def test_an_engine_that_fails_after_its_first_sample_ends_the_run(watch, capsys, when):
    """Its exception is raised, and no other engine takes its place."""
    thread = Scripted()
    engine = engine_of(thread, watch)
    engine.push(WEIGHTS)
    one_sample(engine)
    thread.fails[when] = [unsupported("a")]
    with pytest.raises(watchdog.EngineFailed) as end:
        engine.push(WEIGHTS)
        one_sample(engine)
    assert thread.built == 1 and str(end.value.__cause__) == "a"
    assert "--rollout hf" not in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_tied_head_goes_where_there_is_one(tied, has_head, mapped):
    """Gemma 2 and 3n have none in vLLM. An untied head without a place stays, and vLLM names it in its error."""
    from transformers import LlamaConfig
    from vllm.model_executor.models.utils import WeightsMapper

    model = torch.nn.Module()
    model.body = torch.nn.Linear(2, 2)
    if has_head:
        model.lm_head = torch.nn.Linear(2, 2)
    prefix = "model." if mapped else "body."
    if mapped:
        model.hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"model.": "body.", "inv_freq": None})
    weights = [(f"{prefix}weight", 1), ("lm_head.weight", 2), (f"{prefix}bias", 3)]
    names = [name for name, _ in accepted(model, LlamaConfig(tie_word_embeddings=tied), iter(weights))]
    assert names == [name for name, _ in weights if has_head or not tied or name != "lm_head.weight"]


def test_the_thread_of_an_engine_ends_with_it(watch):
    before = threading.active_count()
    engine = engine_of(Scripted(), watch)
    engine.close()
    assert threading.active_count() == before

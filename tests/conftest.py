"""The hooks and fixtures of all tests: a tiny random model on disk, samples, a stopped run; helpers.py has the rest."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("WANDB_MODE", "disabled")
if "PYTEST_XDIST_WORKER" in os.environ:  # a core and a port of its own for each worker
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # but what a test has launched keeps the port of its launcher
        os.environ.pop("MASTER_PORT", None)
CACHE = tempfile.TemporaryDirectory(prefix="datasets-")  # the cache of datasets, also of the processes tests start
os.environ["HF_DATASETS_CACHE"] = CACHE.name

os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(CACHE.name, "hypothesis"))
# The same few cases in every run of the fast suite; --hypothesis-profile long draws 50,000 new ones for each property.
plain = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck), "database": None}
hypothesis.settings.register_profile("fast", max_examples=25, derandomize=True, **plain)
hypothesis.settings.register_profile("long", max_examples=int(os.environ.get("CASES", "50000")), **plain)
hypothesis.settings.load_profile("fast")

pytest.register_assert_rewrite("helpers")
import fork_server
import learning_runs
from helpers import ROOT, SMALL, Run, descendants, freeze, interrupted, make_samples, make_tiny, own_signals, tiny_args

from graders import reasoning_gym_tasks
from runtime.data.samples import Sample
from runtime.system import process

process.prepare_environment()


def pytest_configure(config):
    """Only `-m gpu` sees a GPU: the other tests are of CPUs, with two ranks, fp32 and an engine for each worker."""
    if config.getoption("markexpr") != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Freeze the imported modules, so that the garbage collector never scans them."""
    gc.disable()
    try:
        return (yield)
    finally:
        freeze()
        gc.enable()


def pytest_collection_modifyitems(config, items):
    """Longer files come first: a worker that begins with one at the end keeps the other one waiting.

    A test that hangs is ended with its process; pyproject.toml has its stacks printed before.
    """
    size = {path: path.stat().st_size for path in {item.path for item in items}}
    items.sort(key=lambda item: -size[item.path])
    if config.getoption("--hypothesis-profile", "fast") == "long":  # hours, on purpose
        return
    for item in items:
        long = any(item.get_closest_marker(name) for name in ("slow", "learn", "gpu", "engines"))
        item.add_marker(pytest.mark.timeout(1800 if long else 300, method="thread"))


@pytest.fixture(autouse=True)
def not_asked_to_stop():
    """Reset the stop request after each test."""
    with own_signals():
        yield
    stop = process.StopRequest
    stop.asked = stop.training = stop.last_step_done = False


@pytest.fixture
def refused(capsys):
    """Make a call that must end the program with exit code 2, and return what it says."""

    def said_by(call, *rest, **named) -> str:
        with pytest.raises(SystemExit) as end:
            call(*rest, **named)
        assert end.value.code == 2
        return capsys.readouterr().err

    return said_by


@pytest.fixture(scope="session", autouse=True)
def plain_printed_rows():
    """The function that starts a process which imports reasoning-gym; tests ask a fork of one that has imported it.

    Equal rows are made once.
    """
    plain = reasoning_gym_tasks.printed_rows
    reasoning_gym_tasks.printed_rows = functools.cache(fork_server.printed_rows)
    yield plain
    reasoning_gym_tasks.printed_rows = plain


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with a random two-layer Llama, tied head, and a tokenizer of 600 tokens trained on the task's text."""
    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_model(tiny):
    """The tiny model in memory, fp32, eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager").train()


@pytest.fixture(scope="session")
def testbed() -> Path:
    """The model of the learning tests; made here where `make testbed` was not called before, which takes minutes."""
    script = str(ROOT / "studies" / "pretrain_tiny.py")
    done = subprocess.run(
        [sys.executable, script, "--output", str(learning_runs.MODEL)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return learning_runs.MODEL


@pytest.fixture
def samples() -> list[Sample]:
    return make_samples()


@pytest.fixture(scope="module")
def stopped(tiny, tmp_path_factory):
    """A run of four steps that was asked to stop after the third, with checkpoints of steps 2 and 3."""
    args = tiny_args(tiny, tmp_path_factory.mktemp("stopped"), **{**SMALL, "save_every": 1}, run_name="run")
    with pytest.MonkeyPatch.context() as patch:
        interrupted(args, patch, after=3)
    return args


@pytest.fixture(autouse=True)
def nothing_left():
    """A test that fails leaves no run behind to slow the next ones."""
    yield
    while Run.started:
        run = Run.started.pop()
        for pid in (*descendants(run.process.pid), run.process.pid) if run.process.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

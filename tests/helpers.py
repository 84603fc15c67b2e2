"""Shared helpers of the tests: tiny runs in this process and in others, samples, records.

Fixtures and hooks stand in conftest.py. Programs that tests write and start import from here, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import fork_server
import pytest

from runtime.arguments import values
from runtime.arguments.flags import RunFlags
from runtime.data.samples import Sample
from runtime.run import directory, logger
from runtime.system import process

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("RLVR_TEST_DATA", ROOT.parent / "shared" / "data"))  # labeled data sets, where they are
VERIFIERS = ROOT / "tests" / "verifiers.py"
PROBLEMS = ROOT / "tests" / "problems.jsonl"  # the sums of two digits: reasoning-gym takes a second to import


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def real(file: str) -> Path:
    """A file of labeled data; the test is skipped where it is absent."""
    if not (DATA / file).is_file():
        pytest.skip(f"no {file} in {DATA}; set RLVR_TEST_DATA to the folder that has it")
    return DATA / file


def make_samples(prompts: int = 3, group: int = 4, seed: int = 0, vocabulary: int = 300) -> list[Sample]:
    """Samples of unequal lengths, the last of each group of one token; the last id of some is the EOS (2)."""
    r = random.Random(seed)
    samples = []
    for p in range(prompts):
        prompt = [r.randrange(3, vocabulary) for _ in range(5 + 3 * p)]
        for k in range(group):
            length = 1 if k == group - 1 else r.randrange(2, 14)
            ids = [r.randrange(3, vocabulary) for _ in range(length - 1)] + [2 if k % 2 else r.randrange(3, vocabulary)]
            logprobs = [-r.random() for _ in ids]
            samples.append(Sample(p, k, prompt, ids, logprobs, "stop" if k % 2 else "length", [(1, 0)]))
    return samples


def install_wheel(package: str, version: str, folder: Path) -> str:
    """Install one wheel without its dependencies into a folder, unless it is there. "" or the reason why not."""
    if (folder / f"{package}-{version}.dist-info").is_dir():
        return ""
    words = ["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check", "--target", str(folder)]
    done = subprocess.run([sys.executable, *words, f"{package}=={version}"], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"{package} {version} cannot be installed: {done.stderr.strip()[-300:]}"


def make_tiny(folder: Path) -> Path:
    """Write a random two-layer Llama, tied head, and a tokenizer of 600 tokens trained on the task's text."""
    import torch
    from reasoning_gym import create_dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = [row["question"] for row in create_dataset("chain_sum", size=50, seed=0)]
    bpe.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=600, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=special[1], eos_token=special[2], pad_token=special[2]
    )
    tokenizer.chat_template = values.CHAT_TEMPLATES["chatml"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_chatty(folder: Path) -> Path:
    """Write the tiny model with one token in twenty as an end, so that turns end, and a context for long prompts."""
    make_tiny(folder)
    for name, change in (
        ("generation_config.json", {"eos_token_id": [2, *range(200, 230)]}),
        ("config.json", {"max_position_embeddings": 8192}),
    ):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    return folder


def gradient_of(model):
    """The gradient of all parameters, one after the other."""
    import torch

    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def token_loss(module, beta: float, args, **given):
    """A script's ``token_loss`` of tokens with these fields, by name; the others are 0, and no full KL is known."""
    import kl_estimators

    return module.token_loss(kl_estimators.make_tokens(module, **given), beta, args)


def kl_loss(logprobs, old, ref, mask, *, estimator: str, full_kl=None):
    """The KL in the loss of grpo.py per token, 0 where ``mask`` is False."""
    import torch

    import grpo
    import kl_estimators

    term = kl_estimators.loss_term(grpo, logprobs, old, ref, estimator=estimator, full_kl=full_kl)
    return torch.where(mask, term, 0.0)


def write_variant(name: str, folder: Path) -> Path:
    """Write the variant's script to ``folder``/variant_NAME.py and return that path."""
    import variant

    path = folder / f"variant_{name}.py"
    small = ROOT / "variants" / f"{name}.py"  # a file of its own, not a patch
    path.write_text(small.read_text() if small.exists() else variant.variant(name))
    return path


def load_variant(name: str, folder: Path):
    """The module variant_NAME: the variant's script, written to ``folder`` and imported from there."""
    path = write_variant(name, folder)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.remove(str(folder))


# ------------------------------------------------------------------------------------------------- runs in this process


# A two-step run on the tiny model that takes a second or two.
TINY_RUN = {
    "dataset": f"{RunFlags.dataset}&size=200",
    "rollout": "hf",
    "dtype": "float32",
    "total_steps": 2,
    "num_unique_prompts_rollout": 4,
    "num_samples_per_prompt_rollout": 4,
    "eval_prompts": 0,  # a quarter of the time of a run; tests of evaluations ask for 4
    "eval_samples": 2,
    "max_response_length": 8,
    "max_prompt_length": 128,
    "micro_batch_tokens": 256,
    "mask_no_eos_with_zero": False,
    "mask_truncated_completions": False,  # a random model seldom ends by itself
    "verifier": f"{VERIFIERS}:parity",
}


def tiny_args(tiny: Path, out: Path, script: str = "grpo", **changes):
    """Arguments of a run on the tiny model."""
    places = {"model_name_or_path": str(tiny), "output_dir": str(out)}
    return importlib.import_module(script).Args(**{**places, **TINY_RUN, **changes})


installed = functools.cache(importlib.metadata.version)


def freeze() -> None:
    """Take what is there out of the garbage collector's sight, which DeepSpeed calls whenever it moves its states.

    A collection among all that the tests have imported takes half a second; each run may import more.
    """
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def quick_start():
    """Skip the imports of the verifiers, which take a second of each run and are done once in this process.

    Tests of verifiers, and runs in processes of their own, do it all.
    """
    from runtime.system import workers

    multiprocessing.set_forkserver_preload(["rewards"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.BareProcess, "_Popen", staticmethod(multiprocessing.context.ForkServerProcess._Popen))
        patch.setattr(importlib.metadata, "version", installed)
        yield


@contextlib.contextmanager
def own_signals():
    """After a run of this process signals are pytest's again, and the thread that listened for the run's has ended.

    Each run would keep one, with two sockets; and Ctrl-C would not end pytest.
    """
    handlers = {number: signal.getsignal(number) for number in process.STOP_SIGNALS}
    try:
        yield
    finally:
        place = signal.set_wakeup_fd(-1)
        if place != -1:
            with socket.socket(fileno=os.dup(place)) as end:
                end.shutdown(socket.SHUT_WR)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def leave_nothing() -> None:
    """End what a failed run has left, as the end of its process does: rollout threads, and the lock of its folder.

    A thread that computes while the interpreter ends aborts it.
    """
    from filelock import FileLock

    from runtime.engine.client import Engine

    things = gc.get_objects()
    for lock in [thing for thing in things if isinstance(thing, FileLock)]:
        lock.release()
    for engine in [thing for thing in things if isinstance(thing, Engine)]:
        if not hasattr(engine, "thread"):  # a test made it without starting it
            continue
        engine.outbox.closed = True
        engine.inbox.put(("stop",))
        engine.thread.join(10)


def run_here(args, script: str = "grpo") -> list[dict]:
    """Run a script's main in this process; its metrics, one dict a step."""
    import torch
    from accelerate.state import AcceleratorState, PartialState

    from runtime.system import watchdog

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    module = importlib.import_module(script)

    def forget_failures() -> None:  # the runs of one process share a board, and watchdogs that look at it
        if torch.distributed.is_initialized():
            store = watchdog.board(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            for key in ("failure", "reported"):
                store.delete_key(key)

    forget_failures()
    leave = os._exit

    def stay(code: int) -> None:  # a failing run leaves at once, and would take pytest along; a time-out may
        if threading.current_thread().name.startswith("pytest_timeout"):
            leave(code)

    os._exit = stay
    freeze()
    try:
        with quick_start(), own_signals():
            module.main(args, module.preflight(args))
    except BaseException:
        leave_nothing()
        raise
    finally:
        forget_failures()
        os._exit = leave
    folder = Path(args.output_dir) / directory.run_name(args, module.Args())
    return read_jsonl(folder / "metrics.jsonl")


def folder_of(args, script: str = "grpo") -> Path:
    return Path(args.output_dir) / directory.run_name(args, importlib.import_module(script).Args())


TIMES = ("time/", "perf/", "engine/", "env/tool_seconds")


def record(folder: Path) -> dict:
    """Return the parts that must be equal in two equal runs: every number but times, every sample, the weights."""
    metrics = read_jsonl(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(1, len(metrics) + 1)), "a step is missing or stands twice"
    evaluations = read_jsonl(folder / "eval.jsonl") if (folder / "eval.jsonl").exists() else []
    assert len({e["step"] for e in evaluations}) == len(evaluations)
    samples = read_jsonl(folder / "samples.jsonl")
    for turn in itertools.chain.from_iterable(sample.get("turns", ()) for sample in samples):
        turn.pop("seconds", None)
    return {
        "metrics": [{k: v for k, v in m.items() if not k.startswith(TIMES)} for m in metrics],
        "samples": samples,
        "evaluations": [{k: v for k, v in e.items() if not k.startswith(TIMES)} for e in evaluations],
        "weights": process.file_digest(folder / "model" / "model.safetensors"),
    }


def stop_after(step: int, monkeypatch) -> None:
    """As if a signal had come during that step."""
    plain = logger.RunLog.step

    def spy(self, metrics, *rest):
        plain(self, metrics, *rest)
        process.StopRequest.asked |= metrics["step"] == step

    monkeypatch.setattr(logger.RunLog, "step", spy)


def interrupted(args, monkeypatch, *, after: int, script: str = "grpo") -> Path:
    with monkeypatch.context() as patch:
        stop_after(after, patch)
        with pytest.raises(SystemExit) as end:
            run_here(args, script)
    assert end.value.code == 75
    return folder_of(args, script)


# A run of four steps whose every number can be compared.
SMALL = {
    "total_steps": 4,
    "eval_prompts": 4,
    "learning_rate": 1e-3,
    "log_samples": 16,
    "eval_every": 2,
    "num_mini_batches": 2,
}


def copy_of(args, place: Path, **changes):
    """The same arguments with a copy of the run, to be damaged."""
    shutil.copytree(args.output_dir, place / "runs")
    return dataclasses.replace(args, output_dir=str(place / "runs"), **changes)


def go_back(folder: Path, step: int) -> None:
    """Make a finished run one that was killed after it had saved ``step``."""
    for name in ("model", "critic"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for later, path in directory.saved_steps(folder):
        if later > step:
            shutil.rmtree(path)


def change_config(folder: Path, code: str | None = None, **args) -> Path:
    """Give the config.json of a run other arguments, and grpo.py another digest; the folder."""
    config = json.loads((folder / "config.json").read_text())
    config["args"] |= args
    config["code"]["grpo.py"] = code or config["code"]["grpo.py"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def engine_file(checkpoint: Path) -> Path:
    return next((checkpoint / "policy").glob("*optim_states.pt"))


def rewrite(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text()))


def other_step(state: str) -> str:
    """The text with another number of as many digits."""
    return re.sub(r'"step": (\d)', lambda found: f'"step": {9 - int(found[1])}', state)


# Kind -> (what is done to the newest checkpoint, what a resume says of it).
DAMAGE = {
    "a flipped bit": (lambda c: flip(engine_file(c)), "has changed since it was written"),
    "a truncated file": (lambda c: os.truncate(engine_file(c), 100), "has 100 bytes, not"),
    "a missing file": (lambda c: engine_file(c).unlink(), "optim_states.pt is missing"),
    "a missing manifest": (lambda c: (c / "manifest.json").unlink(), "manifest.json is missing"),
    "half a manifest": (lambda c: os.truncate(c / "manifest.json", 40), "cannot be read"),
    "a changed state": (lambda c: rewrite(c / "state.json", other_step), "state.json has changed"),
    "an unfinished save": (lambda c: c.rename(c.with_name(c.name + ".partial")), "the save was not finished"),
}


def rejected(capsys, call, *rest, **named) -> str:
    """The message with which a call ends the program with exit code 2."""
    with pytest.raises(SystemExit) as end:
        call(*rest, **named)
    assert end.value.code == 2
    return capsys.readouterr().err


def refusal(args, capsys, world_size: int = 1) -> str:
    """The message with which opening the folder of a run ends."""
    return rejected(capsys, directory.open_run, args, importlib.import_module("grpo").Args(), world_size)


# --------------------------------------------------------------------------------------- runs in processes of their own


# What `command` adds to it: samples and numbers to compare, a rate that moves the weights, a folder with a known name.
TINY_COMMAND = TINY_RUN | {
    "dataset": str(PROBLEMS),
    "seed": 3,
    "learning_rate": 1e-3,
    "eval_every": 2,
    "log_samples": 16,
    "vllm_args": '{"kv_cache_memory_bytes": 107374182}',
    "run_name": "run",
}
LONG = ("--total_steps", "500")
ONE_ENGINE = ("--vllm_engines", "1")  # for the last of two ranks
LAUNCH = [str(ROOT / "scripts" / "launch.py")]
ACCELERATE_LAUNCH = ["-m", "accelerate.commands.launch"]


def main_here(module, *words) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a program's main in this process, which has imported what it needs already."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [module.__file__, *map(str, words)])
        patch.setattr(sys, "path", [*sys.path])
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = module.main()
            except SystemExit as end:
                code = end.code
    return code or 0, out.getvalue(), err.getvalue()


def script(*arguments: str) -> list[str]:
    """The command line of a script, in this interpreter."""
    return [sys.executable, *arguments]


def command(
    tiny: Path,
    out: Path,
    *more: str,
    script: str = "grpo",
    ranks: int = 1,
    rollout: str = "hf",
    launcher: list[str] = LAUNCH,
) -> list[str]:
    """The command line of a run on the tiny model; of a flag that stands in it twice the last one counts."""
    line = [sys.executable]
    if ranks > 1:
        line += [*launcher, "--config_file", str(ROOT / "scripts" / "zero2.yaml")]
        line += ["--num_processes", str(ranks), "--main_process_port", "0"]
    line.append(str(ROOT / f"{script}.py"))
    places = {"model_name_or_path": tiny, "output_dir": out, "rollout": rollout}
    for name, value in (TINY_COMMAND | places).items():
        if isinstance(value, bool):
            line.append(f"--{name}" if value else f"--no-{name}")
        else:
            line += [f"--{name}", str(value)]
    return [*line, *more]


def with_program(line: list[str], folder: Path, program: str) -> list[str]:
    """The command line with a program that changes the script, in the script's place."""
    (folder / "program.py").write_text(program)
    return [str(folder / "program.py") if word == str(ROOT / "grpo.py") else word for word in line]


def clean_environment() -> dict[str, str]:
    """The environment without what a run of this process set for itself and another one must find out itself."""
    own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RUN_DIR", "RUN_ID", "WANDB_SERVICE"}
    return {name: value for name, value in os.environ.items() if name not in own}


def run_environment() -> dict[str, str]:
    """The environment of a run that a test starts."""
    return clean_environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def descendants(pid: int) -> list[int]:
    """All processes under one, by /proc."""
    try:
        lists = [p.read_text().split() for p in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [d for child in {int(c) for cs in lists for c in cs} for d in (child, *descendants(child))]


def alive(pid: int) -> bool:
    """Return True if a process runs; a zombie that its parent has not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def heed_interrupts() -> None:
    """Do not ignore SIGINT, as a shell's background job does: what is started would ignore it, too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def until(condition, timeout: float = 60) -> None:
    """Wait until a condition holds; fail where it does not in time."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Run:
    """A run in processes of its own, with what it prints in a file."""

    started: ClassVar[list[Run]] = []

    def __init__(self, line: list[str], log: Path, cwd: Path = ROOT):
        self.log = log
        self.seen: set[int] = set()
        Run.started.append(self)
        heed_interrupts()
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                line, cwd=cwd, env=run_environment(), stdout=out, stderr=out, start_new_session=True
            )

    def until(self, condition, timeout: float = 600) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            self.seen |= set(descendants(self.process.pid))
            assert self.process.poll() is None, f"ended with {self.process.returncode}\n{self.text()}"
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)
        self.seen |= set(descendants(self.process.pid))

    def end(self, timeout: float = 150) -> int:
        """Wait for its end, give the exit code, and insist that nothing is left over 10 seconds later."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            for pid in (self.process.pid, *descendants(self.process.pid)):
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"does not end\n{self.text()}") from None
        deadline = time.monotonic() + 10
        while (left := [pid for pid in self.seen if alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, f"{len(left)} processes were left over"
        return code

    def kill(self) -> None:
        self.process.kill()
        self.end(30)

    def text(self) -> str:
        return self.log.read_text()

    def ranks(self) -> list[int]:
        """Process of each rank: the launcher's children that run a script."""
        found = []
        for pid in sorted(descendants(self.process.pid)):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                named = any(name in line for name in (b"grpo.py", b"ppo.py", b"program.py"))
                if b"--num_processes" not in line and named:
                    found.append(pid)
        return found


def run_to_end(line: list[str], log: Path, timeout: float = 600) -> tuple[int, str]:
    """(exit code, everything printed) of a run in processes of its own, none of which is left over."""
    run = Run(line, log)
    deadline = time.monotonic() + timeout
    while run.process.poll() is None and time.monotonic() < deadline:
        run.seen |= set(descendants(run.process.pid))
        time.sleep(0.05)
    return run.end(0.1), run.text()


def forked(line: list[str], log: Path, ranks: int = 1, *, vllm: bool = False, timeout: float = 150):
    """(exit code of each rank, what they printed) of a script and its words, in forks with the libraries."""
    return fork_server.run(line, log, run_environment(), timeout, ranks, vllm=vllm)


def finish(line: list[str], log: Path, timeout: float = 600) -> str:
    """Return the output of a run that must succeed, as a fork of a process with the libraries if possible.

    On a GPU it is not: importing vLLM starts a thread there.
    """
    ranks, rest = 1, line[1:]
    forks = os.environ.get("CUDA_VISIBLE_DEVICES") == "" and line[0] == sys.executable
    if rest[:1] == LAUNCH:  # as `command` has it
        ranks, rest = int(rest[rest.index("--num_processes") + 1]), rest[rest.index("--main_process_port") + 2 :]
    if forks and Path(rest[0]).name in ("grpo.py", "ppo.py", "program.py"):
        codes, text = forked(rest, log, ranks, vllm="hf" not in rest, timeout=timeout)
    else:
        code, text = run_to_end(line, log, timeout)
        codes = [code]
    assert not any(codes), text
    return text


def alone(check, *arguments) -> None:
    """Run a check in a process of its own: an engine keeps global state, and memory until the process ends.

    It is a fork of one that has imported vLLM, but for tests of a GPU, which a fork could not use.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads would be lost in a fork
    multiprocessing.set_forkserver_preload(["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "rewards"])
    method = "spawn" if os.environ.get("CUDA_VISIBLE_DEVICES") != "" else "forkserver"
    child = multiprocessing.get_context(method).Process(target=check, args=arguments)
    child.start()
    child.join(timeout=1200)
    if child.is_alive():
        child.kill()
        child.join()
    assert child.exitcode == 0, "the traceback of the check is in stderr"


def answer(outbox) -> tuple:
    """The next message of an engine's thread. Raises its error."""
    message = outbox.get(timeout=180)
    if message[0] == "error":
        raise message[1]
    return message


def start_engine(script, args, stop_ids: list[int]) -> tuple:
    """(inbox, outbox, thread) of an engine in fp32 that is ready, as main starts it."""
    import torch

    from runtime.system import watchdog

    inbox, outbox = watchdog.Mailbox(), watchdog.Mailbox()
    given = (args, torch.float32, 0, 1, stop_ids, inbox, outbox)
    thread = threading.Thread(target=script.vllm_thread, args=given, daemon=True)
    thread.start()
    assert answer(outbox) == ("ready",)
    return inbox, outbox, thread


def end_engine(inbox, thread: threading.Thread) -> None:
    """End an engine's thread, and the process group that vLLM made or found: later runs of this process make their own.

    The garbage collector would end it at any later moment, and with it the process group of the run that has one by
    then; DeepSpeed would keep the groups of the one that is gone.
    """
    from deepspeed.utils import groups
    from vllm.distributed import cleanup_dist_env_and_memory

    inbox.put(("stop",))
    thread.join(timeout=60)
    assert not thread.is_alive()
    cleanup_dist_env_and_memory()
    groups._release_process_group_references()


def saved(out: Path) -> int:
    """Step of the newest checkpoint that has its name."""
    return max((step for step, _ in directory.saved_steps(out / "run")), default=0)


def logged(out: Path) -> int:
    return max(0, directory.last_step(out / "run" / "metrics.jsonl"))


def messages(text: str) -> list[str]:
    """Return the printed text without the frames of tracebacks: source lines are no message."""
    kept = []
    frame = None  # indentation of the frame that is being skipped
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if re.match(r'\s*File ".*", line \d+', line):
            frame = indent
        elif frame is None or indent <= frame:
            frame = None
            kept.append(line)
    return kept


# A run whose vLLM raises once, in the middle of a step.
RAISES = """
from runtime.system import process
process.prepare_environment()
import tyro
import grpo

if __name__ == "__main__":  # the reward workers import this file
    plain, calls = grpo.begin_turn, []

    def raises(*arguments):
        calls.append(1)
        if len(calls) == 30:
            raise ValueError("the engine broke on purpose")
        return plain(*arguments)

    grpo.begin_turn = raises
    args = tyro.cli(grpo.Args)
    grpo.main(args, grpo.preflight(args))
"""

"""A soak: a run that meets a fault every few steps and must end with the weights of the run that met none.

    python tests/fault_injection.py                                   200 steps of grpo.py, 40 faults
    python tests/fault_injection.py --script ppo.py --steps 60 --seed 1
    python tests/fault_injection.py --rollout vllm --async_steps 0    with the real engine
    python tests/fault_injection.py --rollout vllm --environment      in which responses have turns
    python tests/fault_injection.py --rollout vllm --dtype bfloat16
    python tests/fault_injection.py --only killed second_run          these faults alone

Faults come from outside (signals, damaged files, limits of the kernel) or by hooks in the script. A run that ended as
it should is started again, as a fork of this process, which has imported everything. A fault that costs a sample or an
optimizer step says so in metrics.jsonl; the soak then goes back to the checkpoint before. Every wait has a limit.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # neither the tests
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "scripts"))  # nor the scripts are a package
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "studies"))

import run_many
import torch
from helpers import (
    DAMAGE,
    ROOT,
    Run,
    alive,
    command,
    descendants,
    go_back,
    logged,
    make_chatty,
    make_tiny,
    record,
    saved,
)

from runtime.run import directory, run_files

LIMIT = 300.0  # seconds that anything may take
TIMEOUT = 60  # --timeout of the runs: vLLM has to be built within it, also on a busy machine
PAUSE = 0.5  # seconds after a step of the tiny model, of which a second would have a dozen: faults need time, too
COSTS = ("reward/crashes", "reward/timeouts", "reward/unscorable", "optim/skipped", "env/failures")
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


class Finished(Exception):
    """The run came to its end before a fault could."""


class Missed(Exception):
    """A fault met nobody: what it is aimed at is gone, or has no work."""


def hook(script: ModuleType, orders: Path) -> None:
    """Put the hooks of some faults into a script. An order is a file; whoever removes it does what its name says."""
    from runtime.run import logger

    plain_push = script.push_weights
    plain_loss = script.token_loss
    plain_step = logger.RunLog.step

    def ordered(fault: str) -> bool:
        try:
            (orders / fault).unlink()
        except FileNotFoundError:
            return False
        return True

    def asks(plain: Callable) -> Callable:
        def ask(*arguments):  # in the engine's thread
            if ordered("engine_raises"):
                raise ValueError("the engine broke on purpose")
            if ordered("engine_dies"):
                sys.exit(3)
            if ordered("engine_hangs"):
                time.sleep(3 * TIMEOUT)
            return plain(*arguments)

        return ask

    def half(weights: list, what: str):
        yield from weights[: len(weights) // 2]
        if what == "killed_in_a_push":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the push broke on purpose")

    def push(llm, weights, *rest):
        for what in ("killed_in_a_push", "push_raises"):
            if ordered(what):
                weights = half(weights, what)
        return plain_push(llm, weights, *rest)

    def token_loss(*arguments):
        loss, pieces = plain_loss(*arguments)
        return (loss * math.nan if ordered("nan_loss") else loss), pieces

    def step(self, *arguments):
        plain_step(self, *arguments)
        time.sleep(PAUSE)
        if ordered("stall"):
            time.sleep(3600)

    script.begin_turn = asks(script.begin_turn)
    script.utils._generate = asks(script.utils._generate)
    script.push_weights = push
    script.token_loss = token_loss
    logger.RunLog.step = step


class Fork:
    """A run in a fork of this process, with what ``helpers.Run`` needs of a ``subprocess.Popen``."""

    def __init__(self, script: ModuleType, words: list[str], log: Path, orders: Path | None = None):
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setsid()
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & and nohup
                signal.signal(signal.SIGHUP, signal.SIG_DFL)  # have children ignore them
                del sys.modules["__main__"].__file__  # which the verifiers' processes would import
                if orders is not None:
                    hook(script, orders)
                code = run_many.run(script, words, log)
                sys.stdout.flush()
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the run", timeout)
            time.sleep(0.02)
        return self.returncode

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)


class Life(Run):
    """One start of a run."""

    def __init__(self, log: Path, *arguments):
        self.log = log
        self.seen = set()
        log.touch()
        self.process = Fork(*arguments)


class Soak:
    """A run that is started again and again, and what happens to it."""

    def __init__(self, place: Path, args: argparse.Namespace):
        self.place = place
        tiny = place / "tiny"
        make = make_chatty if args.environment else make_tiny
        maker = multiprocessing.get_context("fork").Process(target=make, args=(tiny,))
        maker.start()  # apart: training a tokenizer leaves threads behind, which no fork would have
        maker.join()
        self.script = run_many.load_script(ROOT / args.script)
        self.steps = args.steps
        self.random = random.Random(args.seed)
        self.out = place / "soak"
        self.folder = self.out / "run"
        self.orders = place / "orders"
        self.orders.mkdir(exist_ok=True)
        self.lives = 0
        self.went_back = 0
        self.lost: Counter = Counter()
        flags = ["--total_steps", str(args.steps), "--eval_prompts", "0", "--track"]
        flags += ["--save_every", "2", "--keep_checkpoints", "0", "--num_mini_batches", "2", "--beta", "0.1"]
        flags += ["--timeout", str(TIMEOUT), "--dtype", args.dtype]
        flags += ["--call_timeout", "10", "--async_steps", str(args.async_steps)]
        flags += ["--verifier", f"{ROOT / 'tests' / 'verifiers.py'}:parity_or_hangs"]
        if args.environment:
            flags += ["--environment", f"{ROOT / 'tests' / 'environments.py'}:Troubled", "--call_timeout", "10"]
            flags += ["--max_response_length", "64", "--max_turns", "3"]
        os.environ["SOAK_ORDERS"] = str(self.orders)
        kind = {"script": args.script.removesuffix(".py"), "rollout": args.rollout}
        self.line = command(tiny, self.out, *flags, **kind)
        self.straight = command(tiny, place / "straight", *flags, **kind)

    # ------------------------------------------------------------------------------------------- what a fault may do

    def start(self) -> None:
        """The same command again."""
        for order in self.orders.iterdir():
            order.unlink()
        self.lives += 1
        log = self.place / f"life_{self.lives:03d}.log"
        self.run = Life(log, self.script, self.line[2:], log, self.orders)

    def run_straight(self) -> None:
        """The run without a fault."""
        log = self.place / "straight.log"
        run = Life(log, self.script, self.straight[2:], log)
        assert run.process.wait(10 * LIMIT) == 0, run.text()

    def until_or_end(self, condition: Callable[[], bool]) -> bool:
        """Wait for one of both; whether it was the end. Raises Finished where the exit code is 0."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            code = self.run.process.poll()
            if code == 0:
                raise Finished
            if code is not None:
                return True
            self.run.seen |= set(descendants(self.run.process.pid))
            assert time.monotonic() < deadline, f"nothing happens\n{self.run.text()[-3000:]}"
            time.sleep(0.02)
        return False

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait; the run must not end meanwhile, but for Finished."""
        ended = self.until_or_end(condition)
        assert not ended, f"ended with {self.run.process.poll()}\n{self.run.text()[-3000:]}"

    def says(self, words: str) -> Callable[[], bool]:
        """Return a function that tests if the run has printed ``words`` since now."""
        before = self.run.text().count(words)
        return lambda: self.run.text().count(words) > before

    def ends(self, *codes: int) -> int:
        """Wait for the end of the run, with one of these exit codes; any but 0 and 75 without one."""
        deadline = time.monotonic() + LIMIT
        while self.run.process.poll() is None and time.monotonic() < deadline:
            self.run.seen |= set(descendants(self.run.process.pid))
            time.sleep(0.02)
        code = self.run.end(0.1)
        if code == 0:
            raise Finished
        assert code in codes if codes else code != 75, f"exit code {code}\n{self.run.text()[-3000:]}"
        return code

    def step(self) -> int:
        """The last step since this start; metrics.jsonl may have later ones, which the run will do again."""
        steps = re.findall(r"^step +(\d+)/", self.run.text(), re.MULTILINE)
        return int(steps[-1]) if steps else 0

    def kill(self) -> None:
        """SIGKILL to the run."""
        self.run.process.kill()
        self.ends()

    def processes(self, word: bytes) -> list[int]:
        """Processes of the run with ``word`` in their command line."""
        self.run.seen |= set(descendants(self.run.process.pid))
        found = []
        for pid in filter(alive, sorted(self.run.seen)):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def verifier(self) -> int:
        """A verifier's process."""
        self.until(lambda: bool(self.processes(b"spawn_main")))
        return self.random.choice(self.processes(b"spawn_main"))

    def order(self, fault: str) -> None:
        """Have the program around the script do this, once."""
        (self.orders / fault).touch()

    def resumes(self, words: str) -> str:
        """Start again after damage, which must be named."""
        self.start()
        self.until(lambda: "resuming after step " in self.run.text())
        assert words in self.run.text(), self.run.text()
        return f"resumed, and said: {words}"

    # ----------------------------------------------------------------------------------------------------- the loop

    def go_back_if_it_cost(self) -> bool:
        """Resume from before the first step that lost a sample or an optimizer step."""
        file = self.folder / "metrics.jsonl"
        first = next((row["step"] for row in run_files.records(file) if any(row.get(name) for name in COSTS)), None)
        if first is None:
            return False
        if self.run.process.poll() is None:
            self.run.process.kill()
            self.run.end(LIMIT)
        # With --async_steps 1 a checkpoint holds the samples of the step after it.
        earlier = [step for step, _ in directory.saved_steps(self.folder) if step < first - 1]
        if earlier:
            go_back(self.folder, earlier[-1])
        else:
            shutil.rmtree(self.folder)
        self.lost[first] += 1
        assert self.lost[first] < 5, f"step {first} loses a sample again and again"
        self.went_back += 1
        print(f"step {first:4d}  lost a sample or a step: back to {earlier[-1] if earlier else 0}", flush=True)
        return True

    def meet(self, faults: dict[str, Callable], count: int) -> Counter:
        """Run to the end, through ``count`` faults or as many as come; how often each kind was met."""
        met: Counter = Counter()
        deck: list[str] = []
        self.start()
        target = 2
        while True:
            with contextlib.suppress(Finished):
                self.until(lambda: self.step() >= target)  # noqa: B023
                if self.go_back_if_it_cost():
                    self.start()
                    continue
                if not deck:
                    deck = self.random.sample(list(faults), len(faults))
                name = deck.pop()
                step = self.step()
                begun = time.monotonic()
                try:
                    how = faults[name](self)
                    met[name] += 1
                except Missed:
                    how = "met nobody"
                print(f"step {step:4d}  {name}: {how} ({time.monotonic() - begun:.0f} s)", flush=True)
                if self.run.process.poll() is not None:
                    self.start()
                left = max(1, count - sum(met.values()))
                done = logged(self.out)
                target = done + self.random.randint(1, max(1, 2 * (self.steps - done) // left - 3))
                continue
            self.run.end(LIMIT)
            if not self.go_back_if_it_cost():
                return met
            self.start()


# -------------------------------------------------------------------------------------------------------------- faults


def goes_on(soak: Soak) -> str:
    """Wait for two more steps: the first one may have begun before the fault."""
    step = soak.step()
    soak.until(lambda: soak.step() > step + 1)
    return "went on"


def killed(soak: Soak) -> str:
    """The run is killed. SIGKILL to its first process."""
    soak.kill()
    return "ended"


def killed_in_a_save(soak: Soak) -> str:
    """The run is killed in the middle of a save. SIGKILL."""
    saves = soak.folder / "checkpoints"
    deadline = time.monotonic() + LIMIT
    while not any(saves.glob("*.partial")):  # without a pause: a save takes milliseconds
        if soak.run.process.poll() == 0:
            raise Finished
        assert time.monotonic() < deadline, soak.run.text()
    soak.kill()
    return f"ended, {len(list(saves.glob('*.partial')))} unfinished save left"


def signaled(name: str) -> Callable:
    """The signal to the run: it saves."""

    def fault(soak: Soak) -> str:
        os.kill(soak.run.process.pid, getattr(signal, name))
        soak.ends(75)
        assert saved(soak.out) == soak.step()
        return "saved, ended with 75"

    return fault


def sigterm_to_all(soak: Soak) -> str:
    """SIGTERM to verifiers and wandb as well, as a batch system does."""
    for pid in soak.processes(b""):
        os.kill(pid, signal.SIGTERM)
    return signaled("SIGTERM")(soak)


def damaged(damage: Callable[[Path], object], words: str) -> Callable:
    """The run is killed, its newest checkpoint or what lies next to it is damaged, and the same command resumes."""

    def fault(soak: Soak) -> str:
        soak.until(lambda: len(directory.saved_steps(soak.folder)) > 1)
        soak.kill()
        damage(directory.saved_steps(soak.folder)[-1][1])
        return soak.resumes(words)

    return fault


def tear_logs(checkpoint: Path) -> None:
    """Leave half a line at the end of each log."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        with open(checkpoint.parent.parent / name, "a") as file:
            file.write('{"step": 9999, "rew')


def second_run(soak: Soak) -> str:
    """The same command twice. While the run has its folder."""
    log = soak.place / "second.log"
    second = Life(log, soak.script, soak.line[2:], log)
    code = second.end(LIMIT)
    if code == 0:  # the first one was at its end
        raise Finished
    assert code == 73, second.text()
    assert "is in use by a running process" in second.text()
    return "the second one was rejected, the run went on"


def full_disk(soak: Soak) -> str:
    """A full disk for a while. The kernel rejects the run files above 100 kB."""
    words = soak.says("NO CHECKPOINT after step")
    pid = soak.run.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        if soak.until_or_end(words):
            assert soak.ends(1) and "File too large" in soak.run.text()
            return "ended with 1: its own log could not be written"
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, UNLIMITED)
    return "no checkpoint, the run went on"


def killed_verifier(soak: Soak) -> str:
    """A verifier is killed. SIGKILL."""
    os.kill(soak.verifier(), signal.SIGKILL)
    return goes_on(soak)


def killed_tracking(soak: Soak) -> str:
    """The process of wandb is killed. SIGKILL to wandb-core."""
    pids = soak.processes(b"wandb-core")
    if not pids:
        raise Missed
    words = soak.says("no more tracking")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    soak.until(words)
    return "said so, went on"


def ordered(name: str, words: str, code: int = 0) -> Callable:
    """A hook does it (``hook``): the run says ``words`` and goes on, or ends with ``code``."""

    def fault(soak: Soak) -> str:
        says = soak.says(words)
        soak.order(name)
        if code:
            soak.ends(code)
            assert not words or says()
            return f"ended with {code}"
        soak.until(says)
        return f"went on, and said: {words}"

    return fault


def tool_fails(how: str) -> Callable:
    """The model is told that its tool failed, in one turn of one episode."""

    def fault(soak: Soak) -> str:
        file = soak.folder / "metrics.jsonl"
        step = soak.step()
        soak.order(how)
        soak.until(lambda: any(row["env/failures"] > 0 for row in run_files.records(file) if row["step"] > step))
        return "the model was told, the run went on"

    return fault


ORDERS = {  # what a run says of a hook, and the code that it ends with, if it does
    "engine_raises": ("the engine broke on purpose", 1),
    "engine_dies": ("SystemExit: 3", 1),
    "engine_hangs": (f"within --timeout {TIMEOUT} s", 1),
    "nan_loss": ("SKIPPED 1",),
    "verifier_hangs": ("killed after 10 s (--call_timeout)",),
    "stall": ("no progress on any rank for", 1),
}
ANYWHERE = [killed, killed_in_a_save, sigterm_to_all, second_run, full_disk, killed_verifier, killed_tracking]
FAULTS = {fault.__name__: fault for fault in ANYWHERE}
FAULTS |= {name: signaled(name) for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")}
FAULTS |= {kind: damaged(damage, words) for kind, (damage, words) in DAMAGE.items()}
FAULTS |= {"torn lines in the logs": damaged(tear_logs, "resuming after step")}
FAULTS |= {name: ordered(name, *answer) for name, answer in ORDERS.items()}
PUSHES = {  # with half of the weights in the engine
    "push_raises": ("the push broke on purpose", 1),
    "killed_in_a_push": ("", -signal.SIGKILL),
}


def possible(args: argparse.Namespace) -> dict[str, Callable]:
    """The faults that can happen to such a run."""
    faults = dict(FAULTS)
    if args.rollout == "vllm":
        faults |= {name: ordered(name, *answer) for name, answer in PUSHES.items()}
    if args.environment:
        faults |= {how: tool_fails(how) for how in ("tool_raises", "tool_hangs", "tool_dies")}
    return {name: fault for name, fault in faults.items() if not args.only or name in args.only}


def soak(place: Path, args: argparse.Namespace) -> None:
    """Make a straight run and one through faults, and compare them."""
    begun = time.monotonic()
    it = Soak(place, args)
    it.run_straight()
    print(f"straight run: {args.steps} steps in {time.monotonic() - begun:.0f} s", flush=True)
    begun = time.monotonic()
    try:
        met = it.meet(possible(args), args.faults)
    finally:
        if it.run.process.poll() is None:
            it.run.process.kill()
            it.run.end(LIMIT)
    assert sum(met.values()) > args.faults // 2, f"the run ended after {sum(met.values())} of {args.faults} faults"
    expected = record(place / "straight" / "run")
    got = record(it.folder)
    for key in expected:
        assert got[key] == expected[key], f"{key} differ from those of the straight run"
    print(
        f"{args.script}, {args.rollout}, {args.dtype}, --async_steps {args.async_steps}{', turns' * args.environment}: "
        f"{args.steps} steps, {sum(met.values())} faults of {len(met)} kinds, started {it.lives} times, went back "
        f"{it.went_back} times, {time.monotonic() - begun:.0f} s; metrics, samples and weights equal bit for bit",
        flush=True,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", default="grpo.py", choices=["grpo.py", "ppo.py"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--faults", type=int, default=40, help="about how many to meet")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--rollout", default="hf", choices=["hf", "vllm"])
    parser.add_argument("--async_steps", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--environment", action="store_true", help="of several turns, and faults of its own")
    parser.add_argument("--only", nargs="*", default=[], help="their names")
    parser.add_argument("--out", type=Path, default=None, help="where to leave runs and logs")
    args = parser.parse_args()
    place = args.out or Path(tempfile.mkdtemp(prefix="soak-"))
    place.mkdir(parents=True, exist_ok=True)
    print(f"logs of every start in {place}", flush=True)
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "PYTHONPATH": str(ROOT)}
    torch.set_num_threads(1)  # bit for bit
    soak(place, args)


if __name__ == "__main__":
    main()

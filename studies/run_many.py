"""Run many command lines of a training script on CPUs, without importing the libraries again for each.

    printf '%s\\n' "--beta 0.1 --seed 1" "--beta 0.1 --seed 2" | python studies/run_many.py grpo.py --lanes 2

``RUN=lines scripts/sweeps/kl.sh | python studies/run_many.py grpo.py --lanes 2`` runs a sweep this way.

Each line of the input has the arguments of one run, quoted as in a shell. Torch, vLLM and DeepSpeed are imported once;
every run is a fork of that process, which has no other thread, no engine and no process group. A run parses its own
arguments and then does what ``python grpo.py ...`` does: its numbers are the same to the last bit. ``--lanes`` runs go
side by side; ``OMP_NUM_THREADS=1`` before the command gives each one thread of arithmetic.

A run that is finished or running is skipped, and an interrupted one resumes (scripts/is_finished.py), so the same
command continues a sweep. A run prints to OUTPUT_DIR/RUN_NAME.log, next to its folder. Lines with arguments that
the script does not take end the program before the first run, with exit code 2. A run that fails is reported with its
exit code; the others still run, and the exit code is 1. SIGTERM and SIGINT are passed on to the runs, which save and
end; no further run starts, and the exit code is 75.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's own arithmetic: it would start threads when imported

import is_finished
import script_loader

from runtime.arguments import flags
from runtime.run import directory, identity
from runtime.system import process

# What a run imports only when it needs it: with the modules of Llama models, the largest part of its start.
LATE = (
    "accelerate",
    "deepspeed",
    "deepspeed.runtime.zero.stage_1_and_2",
    "pebble",
    "reasoning_gym",
    "transformers.models.llama.modeling_llama",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
)
STOPPED = 75  # EX_TEMPFAIL: start me again


def load_script(path: Path) -> ModuleType:
    """Import a training script, with everything that its runs import.

    Raises RuntimeError where an import has started a thread.
    """
    process.prepare_environment()
    script = importlib.import_module(path.stem)
    for name in LATE:
        importlib.import_module(name)
    identity.code_of(script.Args())  # now: an edit of a file during the sweep is not in what runs
    gc.freeze()  # no run searches what was imported here for garbage
    threads = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    if len(threads) > 1:
        raise RuntimeError(f"an import has started threads ({', '.join(threads)}); a fork of this process lacks them")
    return script


def states_of(script: Path, lines: list[str]) -> list[tuple[int, str]]:
    """Return what ``scripts/is_finished.py`` says of the run of each line: its code, and in words.

    In a process of its own, since reading data may start threads, which later forks would lack.
    """
    command = [sys.executable, is_finished.__file__, str(script), "-"]
    done = subprocess.run(command, input="\n".join(lines), stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit(done.returncode)
    answers = [line.partition(" ") for line in done.stdout.splitlines()]
    return [(int(code), words) for code, _, words in answers]


def read_lines(path: Path, lines: list[str]) -> list[tuple[list[str], Path]]:
    """(words, folder) of the run of each line. Ends with exit code 2 for what the script does not take."""
    script = script_loader.load_arguments(path)
    runs = []
    for line in lines:
        words = shlex.split(line)
        args = flags.parse(script.Args, script.__doc__, words)
        runs.append((words, Path(args.output_dir) / directory.run_name(args, script.Args())))
    return runs


def run(script: ModuleType, words: list[str], log: Path) -> int:
    """In a forked process: one run, as ``python SCRIPT WORDS`` does it, with its output in ``log``. The exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(out, standard)
    os.close(out)
    del os.environ["MASTER_PORT"]  # of the parent: every run needs one of its own
    sys.argv = [str(script.__file__), *words]

    def call() -> None:
        args = flags.parse(script.Args, script.__doc__)
        script.main(args, script.preflight(args))

    return exit_code(call)


def exit_code(call: Callable[[], None]) -> int:
    """Call a function and return the exit code that a program of it would have; print the traceback of an error."""
    try:
        call()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class Lanes:
    """The runs that are going on, as processes, and what became of those that ended."""

    def __init__(self) -> None:
        self.going: dict[int, tuple[str, float]] = {}  # process -> (name of the run, when it started)
        self.seconds: dict[str, float] = {}  # name of a run that ended -> its CPU time
        self.done = 0
        self.failed = 0
        self.stopped = False

    def stop(self, signum: int, frame: object) -> None:
        """Start no further run, and ask those that are going on to save and end."""
        self.stopped = True
        for pid in self.going:
            os.kill(pid, signum)

    def start(self, script: ModuleType, words: list[str], folder: Path) -> None:
        """Fork a run."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = run(script, words, folder.with_name(f"{folder.name}.log"))
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)  # never back into the loop of the parent
        self.going[pid] = (folder.name, time.monotonic())

    def wait(self) -> tuple[str, int]:
        """Wait for the end of a run, and report it. Returns its name and exit code."""
        pid, status, usage = os.wait3(0)
        while pid not in self.going:  # a child of the shell that became this process
            pid, status, usage = os.wait3(0)
        name, start = self.going.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        self.seconds[name] = usage.ru_utime + usage.ru_stime
        seconds = f"{time.monotonic() - start:.0f} s, {self.seconds[name]:.0f} s of CPU time"
        if code == 0:
            self.done += 1
            print(f"finished in {seconds}: {name}", flush=True)
        elif not (self.stopped and code == STOPPED):
            self.failed += 1
            print(f"failed with exit code {code} after {seconds}: {name}; see its .log", flush=True)
        return name, code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("script", type=Path, help="grpo.py, ppo.py or a copy of one")
    add("lines", type=argparse.FileType(), nargs="?", default="-", help="arguments of a run per line (default: stdin)")
    add("--lanes", type=int, default=1, help="runs side by side (default: %(default)s)")
    options = parser.parse_args()
    lines = [line for line in options.lines.read().splitlines() if line.strip()]
    runs = read_lines(options.script, lines)
    states = states_of(options.script, lines)
    script = load_script(options.script)
    lanes = Lanes()
    skipped = 0
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lanes.stop)
    for (words, folder), (state, said) in zip(runs, states, strict=True):
        while len(lanes.going) >= options.lanes:
            lanes.wait()
        if lanes.stopped:
            break
        if state == is_finished.RUN or (state == is_finished.LEAVE and "--overwrite" in words):
            lanes.start(script, words, folder)
        else:
            skipped += 1
            print(f"skipped, {said}", flush=True)
    while lanes.going:
        lanes.wait()
    print(f"{lanes.done} finished, {skipped} skipped, {lanes.failed} failed", flush=True)
    return STOPPED if lanes.stopped else int(lanes.failed > 0)


if __name__ == "__main__":
    process.choose_allocator()
    raise SystemExit(main())

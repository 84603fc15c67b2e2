"""Run the GPU path on a fake CUDA device, part by part: ``make cuda-check``. docs/models.md says what it proves.

    .cuda/bin/python tests/fake_cuda/check.py                   every part; exit code 1 if one fails
    .cuda/bin/python tests/fake_cuda/check.py backends runs     some of them
    .cuda/bin/python tests/fake_cuda/check.py runs --only ppo   a part of them: some runs, or some cards
    .cuda/bin/python tests/fake_cuda/check.py --write-golden    write golden/*.json anew; read the difference
    python tests/fake_cuda/check.py --gpu                       device, backends, memory on this machine's GPU

It needs the wheels of locks/cuda.txt (tests/fake_cuda/setup.sh installs them into .cuda), and without --gpu no GPU. All
parts run at the same time, with two processes at a time (--gpu: one); seconds of a part are those of its processes.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(HERE)]

import build
from helpers import TIMES, TINY_COMMAND, clean_environment, command, make_tiny, read_jsonl

from runtime.system import process

WORK = ROOT / ".cuda" / "check"  # with --gpu: --work
GOLDEN = HERE / "golden"
CACHES = ROOT / ".cuda" / "cache"
CORES = threading.Semaphore(2)  # processes at a time, of all parts together
SECONDS: Counter[str] = Counter()  # of the processes of each part
TOLERANCE = 1e-5  # of a metric of the fake device and the CPU, relative to numbers above 1


class Failed(Exception):
    """A part found something wrong; the text says what."""


# ------------------------------------------------------------------------------------------------------------ processes


@functools.cache
def replaced_names() -> list[str]:
    """Return the names of the replaced libraries, in the order of preloading."""
    return [library.name for library in build.libraries()]


def environment(**card: str) -> dict[str, str]:
    """The environment of a process that has the fake device: the stubs, caches of its own, and ``card``."""
    if os.environ.get("REAL_GPU"):
        return without_device() | {"REAL_GPU": "1", "LD_PRELOAD": os.environ.get("LD_PRELOAD", "")}
    folder = build.OUTPUT
    settings = {
        "LD_PRELOAD": " ".join(str(folder / name) for name in replaced_names()),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(CACHES / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(CACHES / "inductor"),
        "VLLM_CACHE_ROOT": str(CACHES / "vllm"),
    }
    return without_device() | settings | {f"FAKE_CUDA_{name}".upper(): value for name, value in card.items()}


def without_device() -> dict[str, str]:
    """The environment of a process on the CPU, with the same wheels."""
    # Without the last one Python would compile every file again in every process.
    own = {"CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD", "PYTHONDONTWRITEBYTECODE"}
    clean = {name: value for name, value in clean_environment().items() if name not in own}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja
    return clean | {
        "PATH": path,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def run(part: str, line: list[str], log: Path, variables: dict[str, str], timeout: float = 900) -> str:
    """Run a program of a part to its end and return its output; raise Failed with the last lines for an exit code."""
    with CORES, open(log, "w") as out:
        started = time.monotonic()
        try:
            done = subprocess.run(line, stdout=out, stderr=out, env=variables, cwd=ROOT, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise Failed(f"{log.stem} did not end within {timeout:.0f} s (log: {log})") from None
        finally:
            SECONDS[part] += time.monotonic() - started
    text = log.read_text(errors="replace")
    if done.returncode != 0:
        last = "\n".join(text.splitlines()[-12:])
        raise Failed(f"{log.stem} ended with exit code {done.returncode} (log: {log})\n{last}")
    return text


def compare_golden(name: str, found: dict[str, dict], given: argparse.Namespace) -> str:
    """Compare with golden/NAME.json, or write it; raise Failed with the lines that differ."""
    file = GOLDEN / f"{name}.json"
    golden = json.loads(file.read_text()) if file.exists() else {}
    if given.write_golden:
        golden = golden | found if given.only else found
        file.write_text(json.dumps(golden, indent=1, sort_keys=True) + "\n")
        return f"wrote {file.relative_to(ROOT)}"
    if not given.only and golden.keys() != found.keys():
        raise Failed(f"{file.relative_to(ROOT)} has other entries: {sorted(golden.keys() ^ found.keys())}")
    known, text = (
        json.dumps({key: table.get(key) for key in found}, indent=1, sort_keys=True) for table in (golden, found)
    )
    if text != known:
        lines = difflib.unified_diff(known.splitlines(), text.splitlines(), "golden", "found", lineterm="", n=3)
        raise Failed(f"differs from {file.relative_to(ROOT)}:\n" + "\n".join(list(lines)[:80]))
    return f"as in {file.relative_to(ROOT)}"


# ---------------------------------------------------------------------------------------------------------------- parts


def check_stubs(given: argparse.Namespace) -> str:
    """Compile the stubs from the wheels' symbol tables; a function that is new is named."""
    differences = build.build(given.write_golden)
    if differences:
        raise Failed("\n".join(differences))
    imported = sum(len(names) for names in build.listed().values())
    return f"{imported} imported functions of {len(build.libraries())} libraries"


def check_device(given: argparse.Namespace) -> str:
    """Try cards, counters, memory errors and the order of streams, with torch's own CUDA code."""
    cards = ("75:16", "80:80", "89:24", "90:141", "100:178", "120:32")  # compute capability and GiB
    cards = ["".join(own_card())] if given.gpu else given.only or cards
    line = [sys.executable, str(HERE / "device.py"), *cards]
    return run("device", line, WORK / "device.log", environment()).splitlines()[-1]


def check_backends(given: argparse.Namespace) -> str:
    """Compare the choices of trainer and engine on seven cards with the golden table."""
    file = WORK / "backends.json"
    cards = given.only
    if given.gpu:
        cards = [".".join(own_card())]
        if cards[0] not in backends_cards():
            return f"no row for compute capability {cards[0]}"
    run(
        "backends", [sys.executable, str(HERE / "backends.py"), str(file), *cards], WORK / "backends.log", environment()
    )
    found = json.loads(file.read_text())
    for card, row in found.items():
        if card.endswith(" with nvcc") and row != found[card.replace(" with ", " without ")]:
            raise Failed(f"the engine on {card} depends on nvcc: {row}")
    if given.gpu:
        return compare_card(found)
    return f"{len(found)} rows, {compare_golden('backends', found, given)}"


def compare_card(found: dict[str, dict]) -> str:
    """Compare the rows of a real card with the golden table, but for what follows from the size of its memory."""
    golden = json.loads((GOLDEN / "backends.json").read_text())
    wrong = []
    for name, row in found.items():
        if not (row.get("rejected") or golden[name].get("rejected")) and row | {"share": 0} != golden[name] | {
            "share": 0
        }:
            wrong.append(f"{name}: {row} instead of {golden[name]}")
    if wrong:
        raise Failed("\n".join(wrong))
    return f"{len(found)} rows as in {GOLDEN.relative_to(ROOT)}/backends.json"


# Flags of whole runs next to the CPU's: fp32, so that both are one computation but for the order of sums.
SHARED = [
    *("--attn_implementation", "sdpa", "--batch_layout", "shared", "--eval_every", "0"),
    *("--micro_batch_tokens", "136"),
]
RUNS = {
    "grpo": ("grpo", ["--num_mini_batches", "2", "--beta", "0.1", "--entropy_coef", "0.05"]),
    "grpo-zero3": (
        "grpo",
        [
            *("--zero_stage", "3", "--num_mini_batches", "2", "--offload", "ref", "--beta", "0.1"),
            *("--kl_placement", "both", "--kl_reward_norm", "before_norm"),
        ],
    ),
    "grpo-offload": ("grpo", ["--offload", "optimizer"]),
    # At 1e-3 the second step would magnify a different order of sums to 1.1e-5 of the gradient norm.
    "ppo": ("ppo", ["--num_mini_batches", "2", "--beta", "0.1", "--learning_rate", "1e-4"]),
    # The fake NCCL next to gloo. Under ZeRO 3 every layer of a forward pass is gathered.
    "grpo-two-ranks": ("grpo", ["--num_mini_batches", "2", "--beta", "0.1"]),
    "grpo-two-ranks-zero3": ("grpo", ["--zero_stage", "3"]),
}
# DeepSpeed waits for the gradients that it moves, in every micro-batch.
PARTITIONED = ("grpo-zero3", "grpo-offload", "grpo-two-ranks-zero3")


def tiny_model() -> Path:
    """Return a random model of two layers, made once."""
    folder = WORK / "tiny"
    if not (folder / "config.json").exists():
        make_tiny(folder)
    return folder


def run_pair(name: str, tiny: Path, with_cpu: bool) -> tuple[dict, dict, dict]:
    """Run a script on the fake device and on the CPU: the last metrics of both, and the log of the device."""
    script, more = RUNS[name]
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record = folder / "log.json"
    ranks = 2 if "two-ranks" in name else 1
    variables = environment(order="1", log=str(record), count=str(ranks))
    if "--offload" in more and "optimizer" in more:  # as a launcher starts several ranks
        variables["TORCHELASTIC_RUN_ID"] = "fake"
    library = ("--external_lib", "fake_cuda.operators")
    line = command(tiny, folder / "gpu", *SHARED, *more, *library, script=script, ranks=ranks)
    part = "runs" if with_cpu else "waits"
    run(part, line, folder / "gpu.log", variables)
    if not with_cpu:
        return {}, {}, json.loads(record.read_text())
    line = command(tiny, folder / "cpu", *SHARED, *more, script=script, ranks=ranks)
    run(part, line, folder / "cpu.log", without_device() | {"CUDA_VISIBLE_DEVICES": ""})
    found = [read_jsonl(folder / device / "run" / "metrics.jsonl")[-1] for device in ("gpu", "cpu")]
    return *found, json.loads(record.read_text())


def compare_metrics(gpu: dict, cpu: dict) -> list[str]:
    """Return a line per metric: both values, their difference, and a mark where it is above the tolerance."""
    lines = []
    for metric in sorted({*gpu, *cpu}):
        if metric.startswith(TIMES):
            continue
        a, b = gpu.get(metric), cpu.get(metric)
        both = isinstance(a, int | float) and isinstance(b, int | float)
        difference = abs(a - b) if both else (0.0 if a == b else float("inf"))
        mark = "DIFFERENT" if difference > TOLERANCE * max(1.0, abs(b) if both else 0.0) else ""
        lines.append(f"{metric:34} {a!s:>24} {b!s:>24} {difference:9.1e} {mark}".rstrip())
    return lines


def whole_runs(given: argparse.Namespace) -> dict[str, tuple[dict, dict, dict]]:
    """Return the pairs of RUNS, made once per call of this program; raise Failed if some failed.

    Without the part ``runs``, which compares them, there are no runs on the CPU.
    """
    with whole_runs.lock:
        if not whole_runs.made:
            names = [name for name in RUNS if not given.only or name in given.only]
            with ThreadPoolExecutor(len(RUNS)) as pool:
                with_cpu = "runs" in (given.parts or PARTS)
                pairs = {name: pool.submit(run_pair, name, given.tiny, with_cpu) for name in names}
            whole_runs.made = {name: pair.exception() or pair.result() for name, pair in pairs.items()}
    failures = [pair for pair in whole_runs.made.values() if isinstance(pair, Exception)]
    if failures:
        raise Failed("\n".join(map(str, failures)))
    return whole_runs.made


whole_runs.made = {}
whole_runs.lock = threading.Lock()


def check_runs(given: argparse.Namespace) -> str:
    """Compare every metric of whole runs on the fake device with the same runs on the CPU."""
    wrong = []
    counted = 0
    for name, (gpu, cpu, _) in whole_runs(given).items():
        lines = compare_metrics(gpu, cpu)
        table = "\n".join([f"{'metric':34} {'fake GPU':>24} {'CPU':>24} {'difference':>9}", *lines])
        (WORK / name / "metrics.txt").write_text(table + "\n")
        print(f"\n{name}, last step\n{table}", flush=True)
        counted += len(lines)
        bad = [line for line in lines if line.endswith("DIFFERENT")]
        if bad:
            wrong.append(f"{name}: {len(bad)} of {len(lines)} metrics differ:\n" + "\n".join(bad))
    if wrong:
        raise Failed("\n".join(wrong))
    return f"{len(whole_runs(given))} pairs of runs, {counted} metrics"


def check_waits(given: argparse.Namespace) -> str:
    """Compare what waits for the GPU in each phase of a step with the golden table."""
    names = ("waits", "micro_batches", "attention")
    found = {run: {name: log[name] for name in names} for run, (_, _, log) in whole_runs(given).items()}
    inner = {run: row["waits"].get("update, inner micro-batches", {}) for run, row in found.items()}
    waiting = {run: places for run, places in inner.items() if places and run not in PARTITIONED}
    if waiting:
        raise Failed(f"micro-batches before the last one of an optimizer step wait for the GPU: {json.dumps(waiting)}")
    cores = max(1, int(process.usable_cores()))
    for name, (_, _, log) in whole_runs(given).items():
        if name == "grpo-offload" and log["threads"] != cores:
            raise Failed(f"{name}: under a launcher its optimizer steps with {log['threads']} threads of {cores} cores")
    return compare_golden("waits", found, given)


def check_memory(given: argparse.Namespace) -> str:
    """Compare the peak of PyTorch's CUDA allocator with the bound of a run, for models of full size."""
    text = run("memory", [sys.executable, str(HERE / "memory.py"), *given.only], WORK / "memory.log", environment())
    print(text, flush=True)
    return text.splitlines()[-1]


# Whole runs with vLLM's engine, whose own kernels compute nothing: any difference of log-probs is allowed.
ENGINES = {
    "beside": ["--async_steps", "1"],  # a thread with a stream of its own
    "sleep": ["--vllm_sleep", "all", "--dtype", "bfloat16"],
}
KV_CACHE = json.loads(TINY_COMMAND["vllm_args"])["kv_cache_memory_bytes"]


def run_with_engine(name: str, tiny: Path) -> tuple[list[dict], dict]:
    """Run grpo.py with vLLM's engine: the events that engine_log.py has noted, and the log of the device."""
    folder = WORK / f"engine-{name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    record, events = folder / "log.json", folder / "events.jsonl"
    more = ["--rollout", "vllm", "--max_logprob_diff", "1e9", "--external_lib", "fake_cuda.engine_log", *ENGINES[name]]
    variables = environment(order="1", log=str(record), events=str(events))
    run("engine", command(tiny, folder / "gpu", *SHARED, *more), folder / "gpu.log", variables)
    return read_jsonl(events), json.loads(record.read_text())


def engine_problems(events: list[dict]) -> list[str]:
    """Compare the engine's weights after each push with the trainer's, and its memory asleep with what it had awake."""
    versions = {event["version"]: event for event in events if event["event"] == "push"}
    held = {event["version"]: event["digests"] for event in events if event["event"] == "acknowledged"}
    problems = []
    for version, push in versions.items():
        engine, trainer = held.get(version, {}), push["digests"]
        wrong = sorted(key for key in {*engine, *trainer} if engine.get(key) != trainer.get(key))
        if wrong:
            problems.append(
                f"version {version}: {len(wrong)} of {len(trainer)} parameters of the engine do not have the "
                f"trainer's bytes: {', '.join(wrong[:4])}"
            )
    if len({json.dumps(push["digests"]) for push in versions.values()}) < 3:
        problems.append("the trainer has not pushed three different versions")
    least = KV_CACHE + max((push["bytes"] for push in versions.values()), default=0)
    for event in events:
        if event["event"] == "sleep" and event["before"] - event["after"] < least:
            problems.append(
                f"asleep the engine has given back {event['before'] - event['after']} bytes of {event['before']}: "
                f"its KV cache and weights have {least}"
            )
    return problems


def check_engine(given: argparse.Namespace) -> str:
    """Build vLLM's engine and push, let it sleep, wake it up and push again, in three places of the engine."""
    names = [name for name in ENGINES if not given.only or name in given.only]
    with ThreadPoolExecutor(len(ENGINES)) as pool:
        started = {name: pool.submit(run_with_engine, name, given.tiny) for name in names}
    failures = [str(one.exception()) for one in started.values() if one.exception()]
    if failures:
        raise Failed("\n".join(failures))
    found, problems = {}, []
    for name, one in started.items():
        events, log = one.result()
        problems += [f"{name}: {problem}" for problem in engine_problems(events)]
        acknowledged = [event for event in events if event["event"] == "acknowledged"]
        found[name] = {
            "events": [" ".join([event["event"], *event.get("arguments", [])]) for event in events],
            "waits of the trainer in the last push": log["waits"].get("push", {}),
            "waits of the engine in a push": acknowledged[-1]["waits"],
            "captures": acknowledged[-1]["captures"],
            "forbidden calls in captures": acknowledged[-1]["forbidden"],
        }
    if problems:
        raise Failed("\n".join(problems))
    captures = ", ".join(f"{row['captures']} ({name})" for name, row in found.items())
    return f"{len(found)} runs, graph captures {captures}, {compare_golden('engine', found, given)}"


PARTS: dict[str, Callable[[argparse.Namespace], str]] = {
    "stubs": check_stubs,
    "device": check_device,
    "backends": check_backends,
    "runs": check_runs,
    "waits": check_waits,
    "memory": check_memory,
    "engine": check_engine,
}
ON_A_GPU = ("device", "backends", "memory")
LONGEST_FIRST = ("backends", "engine", "memory")  # the others follow


def own_card() -> list[str]:
    """Return the two parts of the compute capability of this machine's GPU."""
    code = "import torch; print(*torch.cuda.get_device_capability())"
    return run("device", [sys.executable, "-c", code], WORK / "card.log", environment()).split()


def backends_cards() -> set[str]:
    """Return the compute capabilities that golden/backends.json has."""
    return {name.split()[1] for name in json.loads((GOLDEN / "backends.json").read_text())}


def carry_out(name: str, given: argparse.Namespace) -> tuple[bool, str]:
    """Run a part; return (True if it failed, words)."""
    started = time.monotonic()
    try:
        words, failed = PARTS[name](given), False
    except Failed as error:
        words, failed = str(error), True
    if name == "stubs":  # its compilers are no processes of ``run``
        SECONDS[name] = time.monotonic() - started
    print(f"{name:11} {SECONDS[name]:6.0f} s  {'FAILED' if failed else 'passed'}  {words}", flush=True)
    return failed, words


def main() -> int:
    """Run the parts that the command line names, and print how each ended."""
    global WORK, CORES
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="default: all")
    parser.add_argument("--only", nargs="+", default=[], help="runs (grpo ppo ...) or cards (9.0 10.0 ...)")
    parser.add_argument("--write-golden", action="store_true", help="write golden/*.json and imports.txt anew")
    parser.add_argument("--gpu", action="store_true", help=f"use this machine's GPU; parts: {', '.join(ON_A_GPU)}")
    parser.add_argument("--work", type=Path, default=WORK, help="folder for log files; default: .cuda/check")
    given = parser.parse_args()
    WORK = given.work.resolve()
    WORK.mkdir(parents=True, exist_ok=True)
    names = given.parts or list(ON_A_GPU if given.gpu else PARTS)
    if given.gpu:
        os.environ["REAL_GPU"] = "1"
        CORES = threading.Semaphore(1)  # each of its processes needs the memory of the card
        if not set(names) <= set(ON_A_GPU):
            parser.error(f"--gpu: only {', '.join(ON_A_GPU)}")
    given.tiny = tiny_model() if {"runs", "waits", "engine"} & set(names) else None
    started = time.monotonic()
    ends = {"stubs": carry_out("stubs", given)} if "stubs" in names else {}
    rest = [name for name in dict.fromkeys([*LONGEST_FIRST, *PARTS]) if name in names and name != "stubs"]
    with ThreadPoolExecutor(len(PARTS)) as pool:
        futures = {}
        for name in rest:
            futures[name] = pool.submit(carry_out, name, given)
            time.sleep(0.1)  # its first processes are the next ones to start
    ends |= {name: future.result() for name, future in futures.items()}
    print(f"\n{time.monotonic() - started:.0f} s in all; log files: {WORK}")
    for name in names:
        failed, words = ends[name]
        print(f"{name:11} {'FAILED: ' + words.splitlines()[0] if failed else 'passed'}")
    return int(any(failed for failed, _ in ends.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Time a step of grpo.py against a step of TRL's GRPOTrainer: same model, prompts, lengths, groups and data type.

    python -m pip install --target trl --no-deps trl==1.16.0       in a folder of its own: no dependency of this project
    python studies/compare_trl.py --trl trl --json results.json    all parts; a second call measures what is missing
    python studies/compare_trl.py --trl trl --json results.json --parts quickstart --rounds 5
    python studies/compare_trl.py --json results.json --markdown docs/evidence/performance.md    write the page
    python studies/compare_trl.py --json bf16.json --also fp32.json --markdown docs/evidence/performance.md    of two

Parts: ``quickstart``, the shape of ``python grpo.py`` at its start, also against TRL's defaults; ``late``, its shape
when it has learned the task: the model of a finished quickstart, whose responses are short, and a quarter of the groups
with a gradient; ``async``, the first with ``--async_steps 1`` as well; ``allocator``, the first against a TRL whose
process has the memory allocator of grpo.py; ``equal``, with responses of equal length; ``table``, response lengths and
groups on a smaller model; ``ranks``, ours on 1 and 2 ranks; ``size``, the quickstart's model and a 0.5B.

* In the first four responses end by themselves, as in a run: some after a few tokens, some at the limit. The weights
  hardly change, so all sides draw from one distribution; the mean numbers of tokens they drew are printed, and must
  agree within --tolerance.
* In all other parts every response has exactly the same number of tokens: grpo.py ignores EOS, TRL's ``generate`` may
  not choose it. That both computed the same number of prompt and response tokens is checked in every step.
* Rewards are a hash of the text, so that each group has a gradient (in ``late`` a quarter of them); one optimizer step
  per batch, beta 0, AdamW.
* tuned: no gradient checkpointing, weights in --dtype without fp32 masters (grpo.py has them), the micro-batch and the
  attention that are fastest here in a trial of each in the first shape; on a GPU also vLLM in the process, without
  sleep mode and importance correction. It takes no CPU vLLM: there it samples by transformers.
* allocator: tuned, and glibc's allocator set as grpo.py sets it (process.prepare_environment), which no option does.
* default: what GRPOConfig has by itself, with only the work set.
* async: the engine samples the next batch while this one trains, so a batch is of the weights before the last update.
  TRL's GRPOTrainer samples before it trains. These steps follow one another at once, since the engine never waits.
* On a CPU the processes take turns step by step (A B A B); on a GPU, whose memory vLLM fills, one after the other.
  Median of --rounds (--table_rounds) steps after one that warms up, timed by the clock on the wall, logging included.
* The floor is the time that the same work needs at the rates measured here (studies/benchmark.py has the formulas).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, get_args

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts are not a package

from rewards import truth_error
from runtime.arguments import flags
from runtime.data import problem_set
from runtime.system import git, process

Part = Literal["quickstart", "late", "async", "allocator", "equal", "table", "ranks", "size"]
PARTS = get_args(Part)
PHASES = ("generate", "score", "logprobs", "update", "push")
STEP_TIMEOUT = 1800.0  # seconds until a process that makes no step is given up
SMALL = {"num_hidden_layers": 6}  # of SmolLM2-135M: 50M parameters, half of them the embedding
HALF_BILLION = {  # the sizes of Qwen2.5-0.5B
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}

# No instructions beyond AVX2 in torch, MKL and oneDNN. compare_trl_worker.py keeps vLLM from its other kernels.
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

say = partial(print, flush=True)


@dataclass
class Args:
    trl: str | None = field(default_factory=lambda: os.environ.get("TRL_FOLDER"))
    """Folder into which TRL was installed. Default: the environment variable TRL_FOLDER."""
    json: str = "compare.json"
    """File of all measurements. What it already has is not measured again."""
    markdown: str | None = None
    """Write the page for the measurements in --json to this file, and measure nothing."""
    also: tuple[str, ...] = ()
    """Files of other measurements, for instance with another --dtype, that the page shows after those of --json."""
    parts: tuple[Part, ...] = PARTS
    """What to measure."""
    rounds: int = 3
    """Steps of each side that count; three times as many where responses end by themselves."""
    table_rounds: int = 1
    """The same in the table, whose largest shapes take minutes."""
    tolerance: float = 0.1
    """Largest relative difference between the mean lengths of responses that end by themselves."""
    quick: bool = False
    """One round, and only the corners of the table: to see that everything works."""
    model_name_or_path: str = "models/SmolLM2-135M-Instruct"
    """Model of all parts but late and the table."""
    late_model: str | None = None
    """Model of the part late. Default: a quickstart is run first, which takes some minutes."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of both sides. auto: that of grpo.py."""
    avx2: bool = False
    """Have all sides do without AVX-512 and AMX, as on CPUs that have neither. With --dtype float32."""
    num_unique_prompts_rollout: int = 8
    """Prompts per step in all parts but table and size."""
    num_samples_per_prompt_rollout: int = 8
    """Responses per prompt there."""
    max_response_length: int = 32
    """Tokens of every response there; the most that one may have where they end by themselves."""
    table_model: str | None = None
    """Model of the table. Default: a random one of 6 layers, so that the largest cell stays below a minute."""
    table_prompts: int = 2
    """Prompts per step in the table and in size."""
    lengths: tuple[int, ...] = (32, 128, 512)
    """Tokens of every response in the table."""
    groups: tuple[int, ...] = (4, 8, 16)
    """Responses per prompt in the table."""
    longest: int = 1024
    """One more row of the table, with the middle group. 0 disables."""
    ours: str = ""
    """More flags for grpo.py, in quotes, for example "--micro_batch_tokens 16384" on a GPU."""
    trl_options: str = "{}"
    """More options of GRPOConfig for the tuned side, as JSON."""


@dataclass
class Cell:
    """One shape of a step, and who makes it. The file of measurements has one entry for each."""

    part: str
    model: str
    prompts: int
    group: int
    length: int
    sides: tuple[str, ...] = ("ours", "tuned")
    ranks: int = 1
    together: bool = True  # the sides take turns step by step; their processes fit into memory at the same time
    ends: bool = False  # responses end by themselves, and ``length`` is the most they can have

    def name(self) -> str:
        """Return the name of this side in the file of measurements."""
        most = "<=" if self.ends else ""
        return f"{self.part} {Path(self.model).name} {self.prompts}x{self.group}x{most}{self.length} on {self.ranks}"


def cells(args: Args, small: str, large: str, late: str) -> list[Cell]:
    """All shapes that ``args`` ask for, with these models of the table, of the larger size, and of the part late."""
    prompts = args.num_unique_prompts_rollout
    group = args.num_samples_per_prompt_rollout
    model = args.model_name_or_path
    found = []
    if "quickstart" in args.parts:
        sides = ("ours", "tuned", "default")
        found.append(Cell("quickstart", model, prompts, group, args.max_response_length, sides, ends=True))
    if "late" in args.parts:
        found.append(Cell("late", late, prompts, group, args.max_response_length, ends=True))
    if "async" in args.parts:
        sides = ("ours", "async", "tuned")
        found.append(Cell("async", model, prompts, group, args.max_response_length, sides, together=False, ends=True))
    if "allocator" in args.parts:
        sides = ("ours", "allocator")
        found.append(Cell("allocator", model, prompts, group, args.max_response_length, sides, ends=True))
    if "equal" in args.parts:
        found.append(Cell("equal", model, prompts, group, args.max_response_length))
    if "table" in args.parts:
        for length, size in table_shapes(args):
            found.append(Cell("table", small, args.table_prompts, size, length))
    if "ranks" in args.parts:
        for ranks in (1, 2):
            found.append(Cell("ranks", model, prompts, group, args.max_response_length, ("ours",), ranks))
    if "size" in args.parts:
        for each in (model, large):
            found.append(Cell("size", each, args.table_prompts, args.groups[0], args.lengths[0], together=False))
    return found


def table_shapes(args: Args) -> list[tuple[int, int]]:
    """(length, group) of the cells of the table."""
    if args.quick:
        return [(args.lengths[0], args.groups[0]), (args.lengths[-1], args.groups[-1])]
    found = [(length, group) for length in args.lengths for group in args.groups]
    if args.longest > 0:
        found.append((args.longest, args.groups[len(args.groups) // 2]))
    return found


# ---------------------------------------------------------------------------------------------------------- the sides


def our_words(cell: Cell, side: str, rows: Path, folder: Path, args: Args, dtype: str) -> list[str]:
    """Return the flags of grpo.py on ``side``: its defaults, and those that make its work equal to TRL's."""
    words = {
        "model_name_or_path": cell.model,
        "dataset": rows,
        "dtype": dtype,
        "num_unique_prompts_rollout": cell.prompts,
        "num_samples_per_prompt_rollout": cell.group,
        "max_response_length": cell.length,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "verifier": f"{ROOT / 'studies' / 'compare_trl_worker.py'}:by_text",
        "eval_prompts": 0,
        "save_minutes": 0,
        "timeout": 0,
        "total_steps": 10**6,
        "output_dir": folder,
        "run_name": "ours",
    }
    switches = ["--no-mask_truncated_completions", "--no-mask_no_eos_with_zero", "--overwrite"]
    if not cell.ends:
        switches.append("--ignore_eos")
    more = args.ours.split()
    if side == "async":
        switches.append("--async_steps=1")
    given = {word.removeprefix("--") for word in more}
    named = [f"--{name}={value}" for name, value in words.items() if name not in given]
    return [*named, *switches, *more]


def trl_options(cell: Cell, folder: Path, args: Args, machine: dict, choice: tuple[int, str] | None) -> dict[str, Any]:
    """Return the options of GRPOConfig: its defaults, and those that make its work equal to grpo.py's.

    ``choice``: (tokens per micro-batch, attention) of the tuned side, which also has what a user would set for speed.
    """
    dtype = machine["dtype"]
    device = machine["device"]
    samples = cell.prompts * cell.group
    options = {
        "output_dir": str(folder / "trl"),
        "num_generations": cell.group,
        "max_completion_length": cell.length,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "max_steps": 10**6,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "bf16": dtype == "bfloat16",
        "use_cpu": device == "cpu",  # without it TrainingArguments reject bf16 where there is no GPU
    }
    if not cell.ends:
        options["generation_kwargs"] = {"min_new_tokens": cell.length}
    micro = max(n for n in range(1, 9) if samples % n == 0)  # 8 is the default of TrainingArguments
    if device == "cuda":
        options["use_vllm"] = True
        options["generation_kwargs"] = {"ignore_eos": not cell.ends}
        options["vllm_max_model_length"] = 256 + cell.length
    if choice is not None:
        budget, attention = choice
        micro = tuned_micro_batch(cell, budget)
        options["gradient_checkpointing"] = False
        options["model_init_kwargs"] = {"dtype": dtype, "attn_implementation": attention}
        if device == "cuda":
            options["vllm_importance_sampling_correction"] = False
            options["vllm_gpu_memory_utilization"] = 0.4
        options |= json.loads(args.trl_options)
    micro = options.setdefault("per_device_train_batch_size", micro)
    options["gradient_accumulation_steps"] = samples // micro
    return options


CHOICES = {
    "cpu": [(tokens, attention) for tokens in (1024, 8192) for attention in ("eager", "sdpa")],
    "cuda": [(tokens, "sdpa") for tokens in (8192, 16384, 32768)],
}


def best_choice(cell: Cell, rows: Path, folder: Path, args: Args, machine: dict) -> dict[str, Any]:
    """Try the choices of the tuned side, each in a process of its own: the fastest, and the seconds of a step of each.

    Responses have equal lengths here, so that all choices have the same work. One that ends in an error (too little
    memory, mostly) has None for seconds.
    """
    choices = CHOICES[machine["device"]]
    candidates = [trl_options(replace(cell, ends=False), folder, args, machine, choice) for choice in choices]
    arguments = {"folder": str(Path(args.trl).resolve()), "model": cell.model, "rows": str(rows)}
    tried: dict[str, float | None] = {}
    errors = []
    for options, (tokens, attention) in zip(candidates, choices, strict=True):
        try:
            found = once("tune", arguments | {"options": options}, folder / "tune.log")["seconds"]
        except RuntimeError as error:
            found = None
            errors.append(str(error))
        tried[f"{tokens} tokens, {attention}"] = found
    fitting = [(seconds, k) for k, seconds in enumerate(tried.values()) if seconds is not None]
    if not fitting:
        raise RuntimeError(f"TRL fails with all of {choices}; give --trl_options, or a smaller model\n{errors[-1]}")
    best = min(fitting)[1]
    return {"choice": choices[best], "tried": tried, "options": candidates[best]}


def tuned_micro_batch(cell: Cell, budget: int) -> int:
    """Return the samples per micro-batch: the largest divisor of a step's samples with at most ``budget`` tokens."""
    samples = cell.prompts * cell.group
    fitting = [n for n in range(1, samples + 1) if samples % n == 0 and n * (cell.length + 64) <= budget]
    return max(fitting, default=1)


class Side:
    """A process of studies/compare_trl_worker.py."""

    def __init__(self, kind: str, arguments: dict, log: Path, ranks: int = 1) -> None:
        self.log = log
        launcher = []
        if ranks > 1:
            config = str(ROOT / "scripts" / "zero2.yaml")
            launcher = ["-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", str(ranks)]
            launcher += ["--main_process_port", "0"]
        line = [sys.executable, *launcher, str(ROOT / "studies" / "compare_trl_worker.py"), kind, json.dumps(arguments)]
        self.stderr = log.open("w")
        self.process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            cwd=ROOT,
            start_new_session=True,
            env=os.environ | {"WANDB_MODE": "disabled"},
        )

    def step(self) -> dict[str, Any]:
        """Wait for the next step and return its record. Raises RuntimeError if the process ends instead."""
        watch = threading.Timer(STEP_TIMEOUT, self.kill)
        watch.start()
        try:
            for line in self.process.stdout:
                if line.startswith("STEP "):
                    return json.loads(line.removeprefix("STEP "))
        finally:
            watch.cancel()
        tail = self.log.read_text().splitlines()[-15:]
        raise RuntimeError("a process of the comparison ended:\n" + "\n".join(tail))

    def go(self) -> None:
        """Let the process begin its next step."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the process: wait for 5 seconds until it ends by itself, then kill it."""
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.stdin.close()
            self.process.wait(timeout=5)
        self.kill()
        self.process.wait()
        self.process.stdout.close()
        self.stderr.close()


def once(kind: str, arguments: dict, log: Path) -> dict[str, Any]:
    """Return the output of a process that makes a single step."""
    side = Side(kind, arguments, log)
    try:
        return side.step()
    finally:
        side.close()


# ------------------------------------------------------------------------------------------------------- measurements


def take_turns(starts: dict[str, Any], rounds: int) -> dict[str, list[dict]]:
    """Start all sides, let each warm up by one step, then let them make one step after the other, ``rounds`` times."""
    running = {}
    records: dict[str, list[dict]] = {name: [] for name in starts}
    try:
        for name, start in starts.items():
            running[name] = start()
        for side in running.values():
            side.step()
        for _ in range(rounds):
            for name, side in running.items():
                side.go()
                records[name].append(side.step())
    finally:
        for side in running.values():
            side.close()
    return records


def measure(
    cell: Cell, rows: Path, folder: Path, args: Args, machine: dict, choice: tuple[int, str] | None
) -> dict[str, list[dict]]:
    """Return the records of every side's steps in one shape. Raises RuntimeError if the sides did different work."""
    starts = {}
    for name in cell.sides:
        log = folder / f"{name}.log"
        if name in OURS:
            words = our_words(cell, name, rows, folder, args, machine["dtype"])
            starts[name] = partial(Side, "ours", {"words": words}, log, cell.ranks)
        else:
            options = trl_options(cell, folder, args, machine, None if name == "default" else choice)
            arguments = {"folder": str(Path(args.trl).resolve()), "model": cell.model, "rows": str(rows)}
            starts[name] = partial(Side, "trl", arguments | {"options": options, "allocator": name == "allocator"}, log)
    rounds = args.table_rounds if cell.part == "table" else args.rounds * (3 if cell.ends else 1)
    if args.quick:
        rounds = 1
    if cell.together and machine["device"] == "cpu":
        records = take_turns(starts, rounds)
    else:
        if cell.ends:  # each half of them in one of the two processes of a side
            rounds = -(-rounds // 2)
        records = {name: [] for name in starts}
        for _ in range(1 if args.quick else 2):
            for name, start in starts.items():
                records[name] += take_turns({name: start}, rounds)[name]
    if cell.ends:
        means = {name: mean_length(cell, steps) for name, steps in records.items()}
        if not args.quick and max(means.values()) > (1 + args.tolerance) * min(means.values()):
            raise RuntimeError(f"{cell.name()}: not the same work, tokens per response {means}")
        return records
    expected = cell.prompts * cell.group * cell.length
    for name, steps in records.items():
        counted = {(step["response_tokens"], step["tokens"]) for step in steps}
        if counted != {(expected, records["ours"][0]["tokens"])}:
            raise RuntimeError(f"{cell.name()}: {name} computed (response, all) tokens {counted}, not {expected}")
    return records


def mean_length(cell: Cell, steps: list[dict]) -> float:
    """Tokens of a response, mean over ``steps``."""
    return fmean(step["response_tokens"] for step in steps) / (cell.prompts * cell.group)


def train_quickstart(folder: Path, args: Args) -> Path:
    """Run the quickstart and return the folder of its model. Raises RuntimeError with its last words if it fails."""
    line = [sys.executable, str(ROOT / "grpo.py"), "--dtype", args.dtype, "--eval_prompts", "0", "--save_minutes", "0"]
    line += ["--model_name_or_path", args.model_name_or_path, "--output_dir", str(folder), "--run_name", "late"]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError("the quickstart failed:\n" + "\n".join(done.stdout.splitlines()[-15:]))
    return folder / "late" / "model"


def write_rows(count: int, trained: int, folder: Path) -> Path:
    """Write a file of prompts of the quickstart's task, as chat messages, which all steps of a shape use.

    The responses to the first ``trained`` prompts have different rewards.
    """
    path = folder / f"rows-{count}-{trained}.jsonl"
    problems = list(problem_set.mixed_problems(flags.RunFlags(), truth_error).values())[:count]
    if len(problems) < count:
        process.refuse(f"--num_unique_prompts_rollout {count}: the quickstart's task has {len(problems)} prompts")
    rows = []
    for place, problem in enumerate(problems):
        rows.append({"question": problem.messages, "answer": problem.truth, "trains": place < trained})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def note_floors(results: dict, found: dict) -> None:
    """Keep the shorter floor of each phase: another program may have been busy while the rates were measured."""
    known = results.setdefault("floors", {})
    for name, bound in found["floors"].items():
        before = known.get(name, bound)
        known[name] = {phase: min(value, before[phase]) for phase, value in bound.items()}
    machine = results.setdefault("machine", found)
    for rate in ("flop_per_second", "bytes_per_second"):
        machine[rate] = max(machine[rate], found[rate])
    machine.pop("floors", None)


def floor_seconds(bound: dict[str, float]) -> float:
    """Seconds of a whole step at the measured rates."""
    return bound["generate"] + bound["shared"] + bound["optimizer"] + bound["push"]


# ------------------------------------------------------------------------------------------------------------- tables


@dataclass
class Summary:
    """The steps of one side in one shape: medians."""

    seconds: float
    least: float
    most: float
    phases: dict[str, float]
    rate: float  # response tokens per second
    peak_gib: float

    @classmethod
    def of(cls, steps: list[dict]) -> Summary:
        """Summarize the records of a side's steps."""
        seconds = [step["seconds"] for step in steps]
        phases = {name: median(step["phases"][name] for step in steps) for name in PHASES}
        return cls(
            seconds=median(seconds),
            least=min(seconds),
            most=max(seconds),
            phases=phases,
            rate=median(step["response_tokens"] / step["seconds"] for step in steps),
            peak_gib=max(step["peak_gib"] for step in steps),
        )


def ratio(records: dict[str, list[dict]], side: str, base: str = "ours") -> list[float]:
    """Return the ratios of a step of ``side`` to ours next to it, round by round."""
    pairs = zip(records[side], records[base], strict=True)
    return [theirs["seconds"] / ours["seconds"] for theirs, ours in pairs]


OURS = {"ours": "grpo.py", "async": "grpo.py --async_steps 1"}
LABELS = OURS | {"tuned": "TRL, tuned", "default": "TRL, default", "allocator": "TRL, tuned, allocator"}
HEAD = "| | s per step (range) | response tokens/s | generate | log-probs | update | push | peak GiB | floor / step |"


def side_rows(entry: dict, floor: dict[str, float] | None) -> list[str]:
    """Return a table's row for every side of a shape; ``floor`` is None where the work differs from step to step."""
    lines = []
    for side, steps in entry["records"].items():
        one = Summary.of(steps)
        ranks = entry["cell"]["ranks"]
        label = LABELS[side] if ranks == 1 else f"{LABELS[side]}, {ranks} ranks"
        phases = " | ".join(f"{one.phases[name]:.2f}" for name in ("generate", "logprobs", "update", "push"))
        share = f"{100 * floor_seconds(floor) / one.seconds:.0f} %" if floor else ""
        lines.append(
            f"| {label} | {one.seconds:.2f} ({one.least:.2f} to {one.most:.2f}) | {one.rate:.0f} | {phases} "
            f"| {one.peak_gib:.1f} | {share} |"
        )
    return lines


def entries_of(results: dict, part: str) -> list[tuple[str, dict]]:
    """(name, measurements) of the shapes of a part, in their order."""
    return [(name, entry) for name, entry in results["cells"].items() if entry["cell"]["part"] == part]


def shape_words(cell: dict) -> str:
    """Describe a shape: its prompts, responses, tokens and model."""
    length = f"at most {cell['length']}" if cell.get("ends") else cell["length"]
    return f"{cell['prompts']} prompts x {cell['group']} responses of {length} tokens, {Path(cell['model']).name}"


def part_lines(results: dict, part: str) -> list[str]:
    """Return the tables of one part, in Markdown."""
    lines = []
    for name, entry in entries_of(results, part):
        floor = results["floors"].get(name)
        words = shape_words(entry["cell"])
        if floor is None:
            means = [mean_length(Cell(**entry["cell"]), steps) for steps in entry["records"].values()]
            lines += [f"{words}; {', '.join(f'{mean:.1f}' for mean in means)} on average", ""]
        else:
            parameters = floor["parameters"] / 1e6
            lines += [f"{words} ({parameters:.0f}M parameters); floor {floor_seconds(floor):.2f} s", ""]
        lines += [HEAD, "|---" * 9 + "|", *side_rows(entry, floor), ""]
        records = entry["records"]
        for base, side in itertools.product(OURS, records):
            if base in records and side not in OURS:
                found = ratio(records, side, base)
                spread = f"{min(found):.2f} to {max(found):.2f}"
                lines.append(f"{LABELS[side]} / {LABELS[base]}: **{median(found):.2f}x** ({spread})")
        lines.append("")
    return lines


def table_lines(results: dict) -> list[str]:
    """Return the table of lengths and groups: one row per shape, both sides next to each other."""
    lines = [
        "| tokens | group | grpo.py s | TRL, tuned s | ratio (range) | generate | update | peak GiB | floor / step |",
        "|---" * 9 + "|",
    ]
    for name, entry in entries_of(results, "table"):
        records = entry["records"]
        ours = Summary.of(records["ours"])
        theirs = Summary.of(records["tuned"])
        found = ratio(records, "tuned")
        cell = entry["cell"]
        floor = floor_seconds(results["floors"][name])
        pairs = []
        for phase in ("generate", "update"):
            pairs.append(f"{ours.phases[phase]:.2f} / {theirs.phases[phase]:.2f}")
        lines.append(
            f"| {cell['length']} | {cell['group']} | {ours.seconds:.2f} | {theirs.seconds:.2f} "
            f"| {median(found):.2f}x ({min(found):.2f} to {max(found):.2f}) | {' | '.join(pairs)} "
            f"| {ours.peak_gib:.1f} / {theirs.peak_gib:.1f} "
            f"| {100 * floor / ours.seconds:.0f} % / {100 * floor / theirs.seconds:.0f} % |"
        )
    return lines


def losses(results: dict) -> list[str]:
    """Return a line for every shape in which a side of TRL was faster than grpo.py or used less memory."""
    lines = []
    for name, entry in results["cells"].items():
        records = entry["records"]
        ours = Summary.of(records["ours"])
        for side in sorted(set(records) - set(OURS)):
            theirs = Summary.of(records[side])
            behind = []
            if theirs.seconds < ours.seconds:
                behind.append(f"its step took {theirs.seconds:.2f} s, ours {ours.seconds:.2f}")
            for phase in ("generate", "update"):
                if theirs.phases[phase] < ours.phases[phase]:
                    behind.append(f"{phase} {theirs.phases[phase]:.2f} s, ours {ours.phases[phase]:.2f}")
            if theirs.peak_gib < 0.95 * ours.peak_gib:
                behind.append(f"peak memory {theirs.peak_gib:.1f} GiB, ours {ours.peak_gib:.1f}")
            if behind:
                lines.append(f"* {name}, {LABELS[side]}: {'; '.join(behind)}.")
    return lines or ["* In no shape measured here, in no phase, and not in peak memory."]


def trials(results: dict) -> list[tuple[str, float | None]]:
    """(tokens of a micro-batch and attention, seconds of a step) of what was tried for the tuned side."""
    return list(results["tuned"]["tried"].items())


def page(measurements: list[dict]) -> str:
    """docs/evidence/performance.md for these measurements, one after the other."""
    lines = [
        "# Performance",
        "",
        "One training step of grpo.py and of TRL's GRPOTrainer, timed on the same work, one after the other. Made by",
        "`python studies/compare_trl.py --json data/compare_late.json --also data/compare_epyc.json",
        "data/compare_epyc_fp32.json data/compare_epyc_fp32_again.json data/compare.json data/compare_earlier.json",
        "data/compare_fp32.json data/compare_avx2.json --markdown performance.md`, with the paths of docs/evidence.",
        "The head of that script says what is held equal and how TRL is tuned; in the first file it has the options",
        "that the trials of the second found, in the next two those of earlier trials. The ratios hold for these",
        "machines; measure your own.",
        "",
        "Times are seconds. `log-probs` is what TRL does before the update besides sampling: batches, advantages, old",
        "log-probs where it needs them. Peak memory is the process's resident memory, on a GPU what torch allocated.",
        "",
    ]
    for results in measurements:
        limit = results["machine"].get("limit", "")
        title = f"{results['machine']['dtype']}{limit and f', {limit}'}, commit {results['commit']}"
        lines += [f"## {title}", "", *measurement_lines(results)]
    return "\n".join(lines)


NOTES = {
    "async": [
        "With `--async_steps 1` the engine samples the next batch while this one trains, so a batch is of the weights",
        "before the last update: another algorithm. [async.md](async.md) compares what it learns. TRL's GRPOTrainer",
        "samples, then trains.",
        "",
    ]
}


def measurement_lines(results: dict) -> list[str]:
    """Describe one file of measurements: settings, machine and numbers."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"{machine['machine']}, {machine['cores']} cores, {machine['device']}, {machine['dtype']} on both sides, "
        f"measured {results['date']} at a load of {results['load']:.1f} from other programs.",
        f"Rates measured here: {machine['flop_per_second'] / 1e9:.0f} GFLOP/s in matrix products, "
        f"{machine['bytes_per_second'] / 1e9:.1f} GB/s copied. TRL {results['trl']}, {versions}.",
        "",
    ]
    titles = {
        "quickstart": "The quickstart's shape",
        "late": "Its shape when the task is learned: short responses, a quarter of the groups with a gradient",
        "async": "The same, asynchronous",
        "allocator": "The same, TRL with the allocator of grpo.py",
        "equal": "Responses of equal length",
    }
    for part, title in titles.items():
        if entries_of(results, part):
            lines += [f"### {title}", "", *NOTES.get(part, []), *part_lines(results, part)]
    if "tuned" in results:
        tried = [f"{name} {s:.1f} s" if s is not None else f"{name} out of memory" for name, s in trials(results)]
        lines += ["### TRL, tuned", "", f"The fastest of a step with each of: {'; '.join(tried)}. In that shape:", ""]
        options = {name: value for name, value in results["tuned"]["options"].items() if name != "output_dir"}
        lines += ["```", json.dumps(options, indent=1), "```", ""]
    if entries_of(results, "table"):
        cell = entries_of(results, "table")[0][1]["cell"]
        lines += [
            "### Lengths and groups",
            "",
            f"{cell['prompts']} prompts, {Path(cell['model']).name}; pairs are grpo.py / TRL, tuned.",
            "",
            *table_lines(results),
            "",
        ]
    for part, title in {"ranks": "Ranks", "size": "Model size"}.items():
        if entries_of(results, part):
            lines += [f"### {title}", "", *part_lines(results, part)]
    return [*lines, "### Where TRL is ahead", "", *losses(results), ""]


# --------------------------------------------------------------------------------------------------------------- main


def check(args: Args) -> None:
    """Reject what cannot be measured; exit code 2."""
    if not Path(args.json).absolute().parent.is_dir():
        process.refuse(f"--json {args.json}: no such folder; name a file in a folder that exists")
    if args.trl is None or not (Path(args.trl) / "trl").is_dir():
        process.refuse(
            f"--trl {args.trl}: no TRL there; python -m pip install --target FOLDER --no-deps trl==1.16.0, then --trl "
            f"FOLDER (or set TRL_FOLDER)"
        )
    for name in ("rounds", "table_rounds"):
        if getattr(args, name) < 1:
            process.refuse(f"--{name} {getattr(args, name)}: must be above 0")
    if min(args.groups) < 2:
        process.refuse(f"--groups {min(args.groups)}: a group of one has nothing to compare; use at least 2")
    if args.avx2 and args.dtype != "float32":
        process.refuse(f"--avx2 with --dtype {args.dtype}: without AVX-512 bfloat16 is emulated; give --dtype float32")
    try:
        json.loads(args.trl_options)
    except json.JSONDecodeError as error:
        process.refuse(f"--trl_options: not JSON ({error})")


def trl_version(folder: str) -> str:
    """Return the version of the TRL in ``folder``, by the name of its metadata."""
    found = sorted(Path(folder).glob("trl-*.dist-info"))
    return found[0].name.split("-")[1].removesuffix(".dist") if found else "of an unknown version"


def measure_all(args: Args, results: dict, folder: Path) -> None:
    """Measure every shape that ``results`` does not have yet, and write the file after each."""
    quickstart = str(ROOT / "models" / "SmolLM2-135M-Instruct")
    small = args.table_model or str(folder / "random-50M")
    large = str(folder / "random-0.5B")
    late = args.late_model or str(folder / "quickstart")
    todo = [cell for cell in cells(args, small, large, late) if cell.name() not in results["cells"]]
    used = {cell.model for cell in todo}
    for model, changes in ((small, SMALL), (large, HALF_BILLION)):
        if model in used and not Path(model).is_dir():
            once("model", {"source": quickstart, "folder": model, "changes": changes}, folder / "model.log")
    if late in used and args.late_model is None:
        train_quickstart(folder, args).rename(late)
    rows = {}
    for cell in todo:
        trained = max(1, cell.prompts // 4) if cell.part == "late" else cell.prompts
        rows[cell.name()] = write_rows(cell.prompts, trained, folder)
    shapes = {}
    for cell in todo:
        if not cell.ends:
            shapes[cell.name()] = vars(cell) | {"rows": str(rows[cell.name()])}
    floors = {"dtype": args.dtype, "cells": shapes}
    if todo:
        note_floors(results, once("floor", floors, folder / "floor.log"))
    for cell in todo:
        started = time.perf_counter()
        machine = results["machine"]
        if {"tuned", "allocator"} & set(cell.sides) and "tuned" not in results:
            results["tuned"] = best_choice(cell, rows[cell.name()], folder, args, machine)
            say(f"TRL, tuned by a step of each: {json.dumps(results['tuned']['tried'])}")
        choice = results.get("tuned", {}).get("choice")
        records = measure(cell, rows[cell.name()], folder, args, machine, choice)
        results["cells"][cell.name()] = {"cell": vars(cell), "records": records}
        process.write_whole(Path(args.json), json.dumps(results, indent=1))
        say(f"\n{cell.part}: measured in {time.perf_counter() - started:.0f} s")
        say("\n".join(part_lines({**results, "cells": {cell.name(): results["cells"][cell.name()]}}, cell.part)))
    if todo:
        note_floors(results, once("floor", floors, folder / "floor.log"))
        process.write_whole(Path(args.json), json.dumps(results, indent=1))


def main(args: Args) -> None:
    path = Path(args.json)
    results = json.loads(path.read_text()) if path.is_file() else {"cells": {}}
    if args.markdown is not None:
        if not results["cells"]:
            process.refuse(f"--json {args.json}: has no measurements yet; leave out --markdown to measure")
        others = [json.loads(Path(name).read_text()) for name in args.also]
        Path(args.markdown).write_text(page([results, *others]))
        return
    if args.also:
        process.refuse("--also: files are read for the page only; give --markdown as well")
    check(args)
    if args.avx2:
        os.environ |= AVX2  # of the processes that it starts
    load = os.getloadavg()[0]
    commit = (git.output(ROOT, "rev-parse", "--short=10", "HEAD") or "unknown").strip()
    results |= {"date": time.strftime("%Y-%m-%d"), "commit": commit, "trl": trl_version(args.trl)}
    results["load"] = max(load, results.get("load", 0.0))
    if load > 0.25 * len(os.sched_getaffinity(0)):
        say(f"warning: other programs compute here (load {load:.1f}); trust the ratios, not the seconds")
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        measure_all(args, results, Path(folder))
    say("\n".join(["", *table_lines(results)]))


if __name__ == "__main__":
    main(flags.parse(Args, __doc__))

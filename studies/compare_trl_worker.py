"""A process of studies/compare_trl.py: it makes a step of GRPO for each line on stdin, and times it.

    python studies/compare_trl_worker.py ours  '{...}'    grpo.py as it is, with flags
    python studies/compare_trl_worker.py trl   '{...}'    TRL's GRPOTrainer, with options of GRPOConfig
    python studies/compare_trl_worker.py tune  '{...}'    the second step with these options, to find the fastest
    python studies/compare_trl_worker.py floor '{...}'    seconds that the work takes at this machine's measured rates
    python studies/compare_trl_worker.py model '{...}'    write a random model like the quickstart's, of another size

After each step a line ``STEP {...}`` goes to stdout, and the next step begins when a line arrives on stdin. Whoever
starts several of these processes can let them take turns, so that a change of the machine's speed meets all of them.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts are not a package

from runtime.system import process

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def by_text(response: str, truth: str, row: dict) -> float:
    """Return a reward in [0, 1] that depends on the text, so that no group is left out for having equal rewards.

    It is 1 for all responses to a prompt whose row says that it does not train.
    """
    if not row["trains"]:
        return 1.0
    return zlib.crc32(response.encode()) / 2**32


class Gate:
    """Times a step, reports it, and waits until the next one is wanted. Ends the process when none is."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def report(self, **found) -> None:
        """Print what is known of the step that has ended; return when the next one shall begin."""
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()  # grpo.py does so in every step
        else:
            peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found |= {"seconds": time.perf_counter() - self.started, "peak_gib": peak / 2**30}
        print("\nSTEP " + json.dumps(found), flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self.started = time.perf_counter()


def limit() -> str:
    """Return the instruction set that --avx2 of compare_trl.py allows, or "" without it."""
    return "AVX2 instructions" if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2" else ""


def ours(words: list[str]) -> None:
    """Run grpo.py with these flags; its loop is timed, from the draw of prompts to the record of the step."""
    process.prepare_environment()
    if limit():
        import torch

        torch.cpu._is_avx512_supported = lambda: False  # vLLM asks which of its kernels to load
    import grpo
    from runtime.arguments import flags
    from runtime.run import logger

    gate = Gate()
    write = logger.RunLog.step

    def write_and_wait(log, metrics, samples, batch):
        write(log, metrics, samples, batch)
        if os.environ["RANK"] != "0":  # the others wait for rank 0 in the next collective
            return
        phases = {}
        for phase in ("generate", "score", "logprobs", "update", "push"):
            phases[phase] = metrics.get(f"time/{phase}", 0.0)
        responses = sum(len(s.response_ids) for s in samples)
        prompts = sum(len(s.prompt_ids) for s in samples)
        gate.report(phases=phases, response_tokens=responses, tokens=prompts + responses)

    logger.RunLog.step = write_and_wait
    args = flags.parse(grpo.Args, words=words)
    grpo.main(args, grpo.preflight(args))


def rewards_by_text(completions: list, trains: list[bool]) -> list[float]:
    """Return the rewards of TRL's completions, which are lists of chat messages."""
    rewards = []
    for messages, trained in zip(completions, trains, strict=True):
        rewards.append(by_text(messages[0]["content"], "", {"trains": trained}))
    return rewards


def make_trainer(model: str, rows: str, options: dict, reward, callback):
    """Return a GRPOTrainer of the TRL in sys.path. ``rows``: a file of one step's prompts as chat messages."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompts = []
    for row in map(json.loads, Path(rows).read_text().splitlines()):
        prompts.append({"prompt": row["question"], "trains": row["trains"]})
    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**options),
        train_dataset=Dataset.from_list(prompts),
        callbacks=[callback],
    )


def tune(folder: str, model: str, rows: str, options: dict) -> None:
    """Print the seconds of a second step with these options of GRPOConfig."""
    sys.path.insert(0, folder)
    from transformers import TrainerCallback

    class Last(TrainerCallback):
        """Times the steps; the last one stays."""

        started = seconds = 0.0

        def on_step_begin(self, *args, **rest):
            self.started = time.perf_counter()

        def on_step_end(self, *args, **rest):
            self.seconds = time.perf_counter() - self.started

    def reward(completions, trains, **columns):
        return rewards_by_text(completions, trains)

    last = Last()
    make_trainer(model, rows, options | {"max_steps": 2}, reward, last).train()
    print("\nSTEP " + json.dumps({"seconds": last.seconds}), flush=True)


def trl(folder: str, model: str, rows: str, options: dict, allocator: bool) -> None:
    """TRL's GRPOTrainer with these options of GRPOConfig.

    ``folder``: where TRL is installed. ``allocator``: keep freed memory as grpo.py does (process.prepare_environment).
    """
    sys.path.insert(0, folder)
    if allocator:
        process.prepare_environment()
    from transformers import TrainerCallback
    from trl.extras.profiling import ProfilingContext

    seconds: Counter[str] = Counter()
    tokens: Counter[str] = Counter()

    def note(context, duration):
        seconds[context.name.rpartition(".")[2]] += duration

    ProfilingContext._log_metrics = note

    def reward(completions, completion_ids, trains, **columns):
        tokens["responses"] += sum(map(len, completion_ids))
        return rewards_by_text(completions, trains)

    class Steps(TrainerCallback):
        """Waits after every optimizer step, and says what the step took."""

        gate = Gate()
        seen = 0

        def on_step_end(self, args, state, control, **rest):
            phases = {
                "generate": seconds["generate"],
                "score": seconds["_calculate_rewards"],
                "push": seconds["sync_weights"],
            }
            phases["logprobs"] = seconds["_prepare_inputs"] - sum(phases.values())
            spent = time.perf_counter() - self.gate.started
            phases["update"] = spent - seconds["_prepare_inputs"]
            total = state.num_input_tokens_seen - self.seen
            self.seen = state.num_input_tokens_seen
            responses = tokens["responses"]
            seconds.clear()
            tokens.clear()
            self.gate.report(phases=phases, response_tokens=responses, tokens=total)

    make_trainer(model, rows, options, reward, Steps()).train()


def floor(dtype: str, cells: dict[str, dict]) -> None:
    """Measure this machine's rates; print them and, for every cell, the seconds each phase needs at these rates."""
    process.prepare_environment()
    import benchmark
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    import grpo
    from runtime.data import rendering
    from runtime.data.samples import Problem, Sample
    from runtime.training import pretrained

    args = grpo.Args(dtype=dtype)
    device, kind, _ = pretrained.resolve_device(args)
    flops, bandwidth = benchmark.machine_rates(device, kind)
    floors = {}
    for name, cell in cells.items():
        args.model_name_or_path = cell["model"]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(cell["model"]), dtype=kind)
        rows = [json.loads(line) for line in Path(cell["rows"]).read_text().splitlines()]
        problems = [Problem(row["question"], "", "", {}) for row in rows]
        problems = rendering.render_prompts(problems, AutoTokenizer.from_pretrained(cell["model"]), args)
        samples = []
        for place, problem in enumerate(problems):
            for k in range(cell["group"]):
                samples.append(Sample(place, k, problem.prompt_ids, [0] * cell["length"], [], "length", []))
        sizes = benchmark.ModelSizes.of(model)
        bound = benchmark.floors(sizes, samples, cell["length"], benchmark.Rates(flops, bandwidth, slots=len(samples)))
        bound["parameters"] = sizes.parameters
        floors[name] = bound
    found = {
        "machine": benchmark.machine_name(device),
        "cores": len(os.sched_getaffinity(0)),
        "device": device.type,
        "dtype": str(kind).removeprefix("torch."),
        "limit": limit(),
        "flop_per_second": flops,
        "bytes_per_second": bandwidth,
        "versions": process.versions(),
        "floors": floors,
    }
    print("\nSTEP " + json.dumps(found), flush=True)


def make_model(source: str, folder: str, changes: dict) -> None:
    """Write a random model: the config of ``source`` with these changes, its weights in bf16, its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(source)
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copy(Path(source) / name, folder)
    print("\nSTEP {}", flush=True)


if __name__ == "__main__":
    process.die_with_parent()
    programs = {"ours": ours, "trl": trl, "tune": tune, "floor": floor, "model": make_model}
    programs[sys.argv[1]](**json.loads(sys.argv[2]))

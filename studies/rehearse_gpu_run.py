"""Rehearse a command for GPUs on this CPU: whether it fits, how long a step would take, whether every phase works.

    python studies/rehearse_gpu_run.py h200:8 grpo.py --model_name_or_path Qwen/Qwen2.5-7B-Instruct \\
        --dataset openai/gsm8k
    python studies/rehearse_gpu_run.py a10 grpo.py --dry_run FLAGS    only the arithmetic

CARD:COUNT, a training script and the very flags of its command. Memory is the bound of docs/evidence/memory.md, seconds
follow from data sheets: both are computed, not measured. What does not fit is rejected, with exit code 2.

Then the script itself runs: two layers of the model with random weights, the whole vocabulary, all lengths and flags,
at most four ranks and a few prompts. One step, its checkpoint, and a second step that resumes from it. Responses count
as ended and rewards are assigned once the verifier has judged, for such a model has neither. Peaks of resident memory
are printed next to the bound for that run. Nothing of it is kept.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import script_loader

from runtime.arguments import flags
from runtime.system import process
from runtime.training import device_sizes, memory
from runtime.training.memory import GIB, default_sizes


@dataclasses.dataclass(frozen=True)
class Card:
    """A GPU: 10^9 bytes as sold, FLOP/s of bf16 products, bytes/s of its memory and to its neighbors."""

    gb: int
    flops: float
    bandwidth: float
    link: float


# NVIDIA's data sheets (RTX 4090: the whitepaper of the Ada architecture): products without sparsity and with sums in
# fp32; the SXM form where there is one. Links, one way: NVLink of the SXM cards, PCIe 4.0 x16 of the others.
CARDS = {
    "rtx4090": Card(24, 165e12, 1.008e12, 32e9),
    "a10": Card(24, 125e12, 0.600e12, 32e9),
    "a100-40": Card(40, 312e12, 1.555e12, 300e9),
    "a6000": Card(48, 155e12, 0.768e12, 32e9),
    "l40s": Card(48, 362e12, 0.864e12, 32e9),
    "a100": Card(80, 312e12, 2.039e12, 300e9),
    "h100": Card(80, 989e12, 3.350e12, 450e9),
    "h200": Card(141, 989e12, 4.800e12, 450e9),
}
SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
EFFICIENCY = 0.4  # of the FLOP/s: what well-kept trainers reach
REACHED = 0.7  # of the bytes/s
HOST = 32e9  # bytes/s between a GPU and the CPU's memory: PCIe 4.0 x16
TOKEN = 30e-6  # seconds of the engine's Python for a token, in one thread: 25 to 35 by its source
STATES = 30  # bytes of a parameter that AdamW reads and writes: weight, master, two moments, gradient
OTHER = 2  # seconds of a step beside all this: plans, the last verdicts, records, the push
MEAN = 0.3  # of --max_response_length: the tokens of a response on average
LAYERS, RANKS = 2, 4  # of the run on this CPU
SAMPLING = ("generate", "score", "eval", "engine")  # phases in which the trainer waits
WIDTHS = (1, 2, 4)  # by which these are divided where this machine has not the memory
NARROWED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
# What is set for the run here. A CPU has neither flash attention nor the memory that --vllm_args may name.
HERE = {
    "total_episodes": None,
    "total_epochs": None,
    "eval_every": 0,
    "eval_samples": 1,
    "save_every": 1,
    "attn_implementation": "auto",
    "vllm_args": None,
    "vllm_tensor_parallel_size": 1,
    "tokenizer_name_or_path": None,
    "track": (),
    "overwrite": False,
    "resume": "auto",
    "run_name": "run",
}


def step_seconds(args, model: memory.Model, setting: memory.Setting, size, card: Card, mean: float) -> dict[str, float]:
    """Seconds of each phase of a step of responses of ``mean`` tokens, computed: nobody has measured one.

    Products take 2 FLOP per parameter and token forward, 4 backward, and 2 more where activations are computed again;
    attention's scores are left out. For each token of the longest response an engine reads its weights, and for each
    of any response the keys and values before it. Gradients are reduced after each micro-batch, within one node.
    """
    ranks = setting.ranks
    prompts = args.num_unique_prompts_rollout / ranks
    samples = prompts * args.num_samples_per_prompt_rollout
    copies = prompts if args.batch_layout in ("auto", "shared") else samples
    tokens = samples * mean + copies * args.max_prompt_length
    attention = model.hidden * model.head_size * 2 * (model.heads + model.kv_heads)
    layers = model.layers * (attention + 3 * model.hidden * model.intermediate)
    forward = 2 * (layers + model.vocabulary * model.hidden)
    forward /= EFFICIENCY * card.flops
    bandwidth = REACHED * card.bandwidth
    weights = setting.number * model.parameters

    engines = args.vllm_engines or ranks / args.vllm_tensor_parallel_size
    served = samples * ranks / engines
    keys = 2 * model.layers * model.kv_heads * model.head_size * setting.number
    before = args.max_prompt_length + mean / 2
    read = args.max_response_length * weights
    read += served * mean * before * keys
    read /= args.vllm_tensor_parallel_size

    steps = args.num_epochs * args.num_mini_batches
    passes = args.loads_reference + setting.critic
    passes += steps > 1 or args.kl_coefficients[1] > 0
    trained = args.num_epochs * tokens * (4 if args.gradient_checkpointing else 3)
    batches = args.num_epochs * tokens / size.micro_batch_tokens
    exchanges = max(steps, batches) * (3 if args.zero_stage == 3 else 1) + steps
    sent = exchanges * weights * (1 - 1 / ranks)
    update = forward * trained + sent / (REACHED * card.link)
    states = steps * STATES * model.parameters / ranks
    optimizer = states / (REACHED * HOST if "optimizer" in args.offload else bandwidth)
    return {
        "generate": served * mean * TOKEN + read / bandwidth,
        "logprobs": forward * tokens * passes,
        "update": update * (1 + setting.critic),
        "optimizer": optimizer * (1 + setting.critic),
        "other": OTHER,
    }


def whole_step(seconds: dict[str, float], args) -> float:
    """Return the seconds of a step; with --vllm_engines and --async_steps, sampling overlaps with everything else."""
    generate = seconds["generate"]
    rest = sum(seconds.values()) - generate
    if args.vllm_engines > 0 and args.async_steps > 0:
        return max(generate, rest)
    return generate + rest


def planned(args, model: memory.Model, gpus: int, gb: float) -> tuple:
    """Return (setting, sizes, memory of a rank) of a command on ``gpus`` GPUs of ``gb`` 10^9 bytes, fit or not."""
    trainers = gpus - args.vllm_engines * args.vllm_tensor_parallel_size
    critic = not getattr(args, "disable_value", True)
    setting = memory.Setting(trainers, args.dtype != "float32", gb * 1e9, critic)
    size = device_sizes.first_fit(args, model, setting) or list(device_sizes.candidates(args, setting))[-1]
    return setting, size, memory.predict(args, model, setting, size)


def foretell(args, model: memory.Model | None, kind: str, gpus: int, problems: int) -> memory.Prediction:
    """Print what a command needs of its GPUs, and seconds. Exits with 2 where it does not fit."""
    if model is None:
        process.refuse(f"--model_name_or_path {args.model_name_or_path}: its config lacks the expected fields")
    card = CARDS[kind]
    setting, size, found = planned(args, model, gpus, card.gb)
    device_sizes.sizes_for(args, model, setting)  # rejects what fits in no way, with what would
    if found.peak > memory.USABLE * setting.card:
        process.refuse(
            f"--micro_batch_tokens {size.micro_batch_tokens} and gpu_memory_utilization "
            f"{size.vllm_gpu_memory_utilization} in --vllm_args: {found.peak / 1e9:.1f} GB may be needed, more than "
            f"{memory.USABLE} of {card.gb}; drop both to get sizes that fit"
        )
    print("\n".join(memory.describe(found, model, setting)))
    print(f"sizes      {', '.join(f'{name} {value}' for name, value in vars(size).items())}")
    steps = flags.total_steps(args, problems)
    longest = args.max_response_length
    for mean in (round(MEAN * longest), longest):
        seconds = step_seconds(args, model, setting, size, card, mean)
        step = whole_step(seconds, args)
        parts = ", ".join(f"{phase} {s:.1f}" for phase, s in seconds.items())
        minutes = f"{steps} steps in {steps * step / 60:.0f} minutes"
        print(f"seconds    {step:.1f} a step of {mean} tokens a response ({parts}); {minutes}")
    print("           computed, not measured; without start, evaluations and checkpoints")
    return found


def resident(name: str = "VmRSS") -> int:
    """Bytes of this process that are resident: now, or with VmHWM the most since ``forget_peak``."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def forget_peak() -> None:
    """Reset VmHWM to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def give_back() -> None:
    """Let the kernel have freed tensors back at once. ``prepare_environment`` keeps them, for speed."""
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 2**16)  # M_MMAP_MAX
    libc.mallopt(-3, 2**20)  # M_MMAP_THRESHOLD


def take_part(folder: Path, script: str, words: list[str]) -> None:
    """Run one rank here, with the changes of changes.json in the folder; adds a line to its file: bytes by phase."""
    sys.path.insert(0, str(Path(script).resolve().parent))
    module = importlib.import_module(Path(script).stem)
    args = flags.parse(module.Args, words=words)
    changes = json.loads((folder / "changes.json").read_text())
    for name, value in changes.items():
        setattr(args, name, value)
    args.flags_set |= changes.keys()
    peaks: dict[str, int] = {}
    timed, judged = module.utils.Stopwatch.__call__, module.Verifiers.collect

    @contextmanager
    def noted(clock, phase: str):
        outer = not clock.inside
        if outer:
            forget_peak()
        with timed(clock, phase):
            yield
        if outer:
            peaks[phase] = max(peaks.get(phase, 0), resident("VmHWM"))

    def dealt(*rest):
        samples = judged(*rest)
        for sample in samples:
            sample.score = sample.reward = float(sample.sample_id % 2)
            sample.finish_reason = "stop"
        return samples

    module.utils.Stopwatch.__call__, module.Verifiers.collect = noted, dealt
    ready = module.preflight(args)
    give_back()
    module.main(args, ready)
    with open(folder / f"rank-{os.environ['RANK']}", "a") as file:
        file.write(json.dumps(peaks or {"engine": resident("VmHWM")}) + "\n")


def narrow(args, width: int):
    """Return the config of the model that runs here: two layers, and 1 / ``width`` of their columns and heads."""
    from transformers import AutoConfig

    name, revision = args.model
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)
    config.num_hidden_layers = LAYERS
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:LAYERS]
    for part in NARROWED:
        count = getattr(config, part) // width
        setattr(config, part, max(1, count))
    return config


def write_model(config, args, folder: Path) -> None:
    """Write a model with random weights and this config, and the tokenizer of the command."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    name, revision = args.model
    own = {"trust_remote_code": args.trust_remote_code}
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **own).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name_or_path or name, revision=revision, **own)
    tokenizer.save_pretrained(folder)


def changed(args, trainers: int, folder: Path) -> dict:
    """Return the arguments that differ in the run here."""
    size = default_sizes(args, False)
    here = HERE | {"model_name_or_path": str(folder / "model")}
    here["output_dir"] = str(folder)
    here["dtype"] = "float32" if args.dtype == "float32" else "bfloat16"
    here["micro_batch_tokens"] = size.micro_batch_tokens
    here["num_unique_prompts_rollout"] = max(trainers, args.num_mini_batches)
    here["eval_prompts"] = min(trainers, args.eval_prompts)
    here["vllm_engines"] = min(1, args.vllm_engines)
    if hasattr(args, "critic"):
        here["critic"] = tuple(word for word in args.critic if not word.startswith("model_name_or_path="))
        here["critic_warmup"] = 0
    return {name: value for name, value in here.items() if value != getattr(args, name)}


def room_here(args, ranks: int, folder: Path) -> tuple:
    """(ranks that train, changes, config, bound) of the largest run of at most ``ranks`` that fits here."""
    said = Path("/proc/meminfo").read_text()
    free = int(said.split("MemAvailable:")[1].split()[0]) * 1024
    for trainers, width in itertools.product(range(ranks, 0, -1), WIDTHS):
        config = narrow(args, width)
        model = memory.model_of(config.to_dict(), tied=config.tie_word_embeddings)
        changes = changed(args, trainers, folder)
        run = dataclasses.replace(args, **changes)
        critic = not getattr(args, "disable_value", True)
        setting = memory.Setting(trainers, run.dtype == "bfloat16", critic=critic)
        bound = memory.predict(run, model, setting)
        needed = max(bound.phases.values())  # without gaps in the heap, which ``give_back`` leaves to no process here
        if needed * trainers < memory.USABLE * free:
            return trainers, changes, config, bound
    process.refuse(
        f"a rank of {LAYERS} layers may need {needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free here; give "
        f"--dry_run for the arithmetic alone, or a smaller --micro_batch_tokens"
    )


def perform(line: list[str], environment: dict) -> None:
    """Run a process to its end. Exits where it fails, with the end of what it printed."""
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        print("\n".join(done.stdout.splitlines()[-40:]))
        raise SystemExit(f"the rehearsal ended with exit code {done.returncode}; the lines above say why")


def rehearse(args, found: memory.Prediction, gpus: int, environment: dict, words: list[str]) -> None:
    """Run the command on this CPU, and print the peaks of its phases next to the bounds."""
    apart = min(args.vllm_engines, 1)
    most = min(RANKS, gpus, max(2, os.cpu_count() // 2)) - apart
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        folder = Path(name)
        trainers, changes, config, bound = room_here(args, most, folder)
        write_model(config, args, folder / "model")
        ranks = trainers + apart
        print(f"here       {ranks} of {gpus} ranks, {LAYERS} random layers of width {config.hidden_size}, and")
        print(f"           {', '.join(f'{name} {value}' for name, value in changes.items())}", flush=True)
        line = [sys.executable]
        if ranks > 1:
            line += [str(SCRIPTS / "launch.py"), "--config_file", str(SCRIPTS / "zero2.yaml")]
            line += ["--num_processes", str(ranks), "--main_process_port", "0"]
        line += [__file__, "--rank", name, *words]
        for steps in (1, 2):
            changes["total_steps"] = steps
            (folder / "changes.json").write_text(json.dumps(changes))
            perform(line, environment)
        files = [file.read_text() for file in folder.glob("rank-*")]
        after = json.loads((folder / "run" / "config.json").read_text())["resumed_after"]
    peaks = [json.loads(text) for text in "".join(files).splitlines()]
    print("GiB        phase      measured here   bound here   bound on the GPU")
    for phase in dict.fromkeys(itertools.chain(*peaks)):
        kind = "sampling" if phase in SAMPLING else "training"
        most = max(peak.get(phase, 0) for peak in peaks)
        here, there = bound.phases[kind], found.phases[kind]
        print(f"           {phase:10}{most / GIB:14.2f}{here / GIB:13.2f}{there / GIB:19.2f}")
    print(f"resumed    after step {after}, from its checkpoint")


def main(words: list[str]) -> None:
    """Print what a command would need and take on its GPUs, and rehearse it here unless it has --dry_run."""
    kind, _, count = words[0].partition(":")
    if kind not in CARDS or not (count or "1").isdigit() or int(count or 1) < 1:
        process.refuse(f"{words[0]} is no CARD:COUNT, such as h100:8; cards are {', '.join(CARDS)}")
    gpus = int(count or 1)
    environment = dict(os.environ)
    script = script_loader.load_script(Path(words[1]), ("Args", "preflight", "main"))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(gpus), "LOCAL_WORLD_SIZE": str(gpus)}
    args = flags.parse(script.Args, __doc__, words[2:])
    only_arithmetic, args.dry_run = args.dry_run, True  # of the whole run nothing is written
    problems, *_ = script.preflight(args)
    found = foretell(args, memory.read_model(args.model), kind, gpus, len(problems))
    if not only_arithmetic:
        rehearse(args, found, gpus, environment, words[1:])


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if sys.argv[1:2] in (["-h"], ["--help"]) else 2)
    process.prepare_environment()  # before torch, which scripts import
    if sys.argv[1] == "--rank":
        take_part(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    else:
        main(sys.argv[1:])

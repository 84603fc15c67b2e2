"""Measures how far a finished run's model is from the model it started from: the KL of whole sequences.

    python studies/measure_kl.py runs/A runs/B ...      writes runs/A/measured_kl.json; a run that has one is skipped

KL(policy || start) is the mean, over sequences that the policy samples, of the sum over their tokens of the KL over
the whole vocabulary. Given its beginning, a token's term is exact: only the sampling of beginnings leaves noise, and no
estimator of the run enters. Prompts are the run's own held-out problems, and the standard error is over prompts. Both
models are evaluated in fp32 at the run's temperature, without an engine.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

import grpo
from rewards import truth_error
from runtime.data import problem_set, rendering
from runtime.data.samples import Problem, Sample
from runtime.system import process
from runtime.training import batching

RESULT = "measured_kl.json"
ROWS = 256  # sequences that are generated together


def check_engine(folder: Path, config: dict) -> None:
    """Reject a run whose script samples in a way of its own: with a tool, say, generate's sequences are not its own."""
    script = process.PROJECT / config.get("script", "grpo.py")
    own = engine_of(script) if script.is_file() else "gone"
    if own != engine_of(Path(grpo.__file__)):
        process.refuse(
            f"{folder}: the vllm_thread of {script}, by which it sampled, is gone or not that of grpo.py; the KL of "
            f"other sequences would be measured"
        )


def engine_of(script: Path) -> str:
    """Return the code of a script's vllm_thread, without comments; "" for a script that has none."""
    for node in ast.parse(script.read_text()).body:
        if getattr(node, "name", "") == "vllm_thread":
            return ast.dump(node)
    return ""


def run_args(folder: Path) -> grpo.Args:
    """Return the arguments of a finished run. Exits with code 2 if the folder has none."""
    for name in ("config.json", "model/config.json"):
        if not (folder / name).is_file():
            process.refuse(f"{folder}: no {name} there; give the folders of finished runs")
    config = json.loads((folder / "config.json").read_text())
    check_engine(folder, config)
    values = config["args"]
    known = {field.name for field in dataclasses.fields(grpo.Args)}
    return grpo.Args(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known})


def sample_sequences(model, tokenizer, args: grpo.Args, problems: list[Problem], count: int) -> list[Sample]:
    """``count`` responses of the model to each problem, by transformers' generate; a response ends with its stop id."""
    import torch

    from runtime.training import pretrained

    stop_ids = pretrained.stop_token_ids(model, tokenizer)
    samples = []
    torch.manual_seed(args.seed)
    rows = [(place, k) for place in range(len(problems)) for k in range(count)]
    for start in range(0, len(rows), ROWS):
        chunk = rows[start : start + ROWS]
        prompts = [problems[place].prompt_ids for place, _ in chunk]
        longest = max(map(len, prompts))
        ids = torch.tensor([[stop_ids[0]] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=args.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=args.max_response_length,
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
        )
        for (place, k), prompt, row in zip(chunk, prompts, output[:, longest:].tolist(), strict=True):
            ends = [t for t, token in enumerate(row) if token in stop_ids]
            response = row[: ends[0] + 1] if ends else row
            reason = "stop" if ends else "length"
            samples.append(Sample(place, k, prompt, response, [0.0] * len(response), reason, []))
    return samples


def sequence_kls(policy, start, samples: list[Sample]):
    """Sum KL(policy || start) over the vocabulary, over each sample's tokens: [samples], in nats."""
    import torch

    offsets = batching.token_offsets(samples)
    kl_N = torch.zeros(offsets[-1])  # without the slot of idle micro-batches: one rank has none
    for mb in batching.micro_batches(
        samples,
        list(range(len(samples))),
        layout="padded",
        budget=16384,
        rank=0,
        world_size=1,
        device=torch.device("cpu"),
    ):
        kl_N[mb.tokens] += policy(mb, start)[2]
    owner_N = torch.arange(len(samples)).repeat_interleave(torch.tensor(offsets).diff())
    return torch.zeros(len(samples)).index_add(0, owner_N, kl_N)


def measure(folder: Path, count: int) -> dict[str, float]:
    """Measure the KL of a run's final policy to its start, with its standard error."""
    import torch
    from transformers import AutoTokenizer

    import utils
    from runtime.training import pretrained

    args = run_args(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    problems = problem_set.load_problems(args, truth_error)[1]
    if not problems:
        process.refuse(f"{folder}: the run held no problems out (--eval_prompts 0)")
    problems = rendering.render_prompts(problems, tokenizer, args)
    final = dataclasses.replace(args, model_name_or_path=str(folder / "model"))
    with torch.no_grad():
        policy = utils.TokenLogprobs(pretrained.load_model(final, torch.float32, "sdpa").eval(), args.temperature, 4096)
        start = utils.TokenLogprobs(pretrained.load_model(args, torch.float32, "sdpa").eval(), args.temperature, 4096)
        samples = sample_sequences(policy.model, tokenizer, args, problems, count)
        kl_P = sequence_kls(policy, start, samples).double().view(len(problems), count).mean(1)
    return {
        "kl/exact": kl_P.mean().item(),
        "kl/exact_stderr": (kl_P.std() / len(problems) ** 0.5).item(),
        "problems": len(problems),
        "samples": count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--samples", type=int, default=16, help="sequences for each prompt (default: %(default)s)")
    args = parser.parse_args()
    if args.samples < 1:
        process.refuse(f"--samples {args.samples}: must be at least 1")
    process.prepare_environment()
    for folder in args.runs:
        if (folder / RESULT).is_file():
            continue
        found = measure(folder, args.samples)
        beside = folder / f"{RESULT}.partial"
        beside.write_text(json.dumps(found) + "\n")
        beside.rename(folder / RESULT)
        print(f"{folder.name}: {found['kl/exact']:.4f} ± {found['kl/exact_stderr']:.4f} nats a sequence", flush=True)


if __name__ == "__main__":
    main()

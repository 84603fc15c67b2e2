"""Ask a model before its run: how long it wants to answer, how much it solves, how many groups have something to teach.

    python scripts/eval_base.py grpo.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \\
        --dataset openai/gsm8k:main@train

Takes a training script and its flags, and prints what --dry_run does. Then the model answers the prompts of the first
steps, at least 32 if there are so many: a group each, at the run's temperature, with up to twice --max_response_length
tokens. A response longer than that length would be truncated, so it scores 0. Nothing is trained or written.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package
sys.path.insert(0, str(Path(__file__).resolve().parent))

from runtime.data.samples import is_correct
from runtime.system import process

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    process.prepare_environment()  # before torch, which scripts import

import evaluate
import script_loader

import utils
from runtime.arguments import flags
from runtime.data import prompt_order
from runtime.data.samples import Sample
from runtime.training import model_files

PROMPTS = 32


def quantile(lengths: list[int], part: float) -> int:
    """Return the smallest of ``lengths`` that at least the fraction ``part`` of them does not exceed."""
    ordered = sorted(lengths)
    return ordered[math.ceil(part * len(ordered)) - 1]


def describe(samples: list[Sample], limit: int, cap: int, critic: bool = False) -> list[str]:
    """Summarize samples in lines. ``limit``: --max_response_length; ``cap``: the tokens that each might have.

    With a ``critic``, or with one response to each prompt, no group has to differ for a run to learn.
    """
    lengths = [s.length for s in samples]
    unfinished = sum(s.finish_reason == "length" for s in samples) / len(samples)
    rewards: dict[int, list[float]] = {}
    right = 0
    for s in samples:
        ends = s.finish_reason != "length" and s.length <= limit
        rewards.setdefault(s.prompt_id, []).append(s.reward if ends else 0.0)
        right += ends and is_correct(s)
    different = sum(len(set(group)) > 1 for group in rewards.values())
    different /= len(rewards)
    half, wanted = quantile(lengths, 0.5), quantile(lengths, 0.95)
    lines = [
        f"probe      {len(rewards)} prompts, {len(samples)} responses of at most {cap} tokens",
        f"length     50 % have at most {half} tokens, 95 % at most {wanted}; {unfinished:.0%} did not end",
        f"pass@1     {right / len(samples):.3f} within --max_response_length {limit}",
    ]
    if not critic and len(samples) > len(rewards):
        lines.append(f"signal     {different:.0%} of the groups have different rewards; the others teach nothing")
    if unfinished > 0.05:
        lines.append(f"           more than {cap} tokens are wanted: raise --max_response_length and ask again")
    elif wanted > limit or 4 * wanted < limit:
        lines.append(f"           --max_response_length {-(-wanted // 16) * 16} would hold 95 % of them")
    return lines


def main(path: Path, words: list[str]) -> list[str]:
    """Print what a run would print at its start, and what its model answers; the lines of the answer."""
    script = script_loader.load_script(path, ("Args", "preflight", "vllm_thread", "collect"))
    args = flags.parse(script.Args, __doc__, words)
    args.dry_run = True
    run = utils.setup_run(args, script.preflight(args))
    context, _, _ = model_files.read_configs(args.model, "--model_name_or_path", dry_run=False)
    room = context.get("max_position_embeddings", sys.maxsize) - args.max_prompt_length
    cap = min(2 * args.max_response_length, room)
    steps = -(-PROMPTS // args.num_unique_prompts_rollout)
    count = min(len(run.problems), steps * args.num_unique_prompts_rollout)
    problems = [run.problems[i] for i in prompt_order.prompts_at(0, count, len(run.problems), args.seed)]
    group = args.num_samples_per_prompt_rollout
    asked = {"eval_samples": group, "eval_temperature": args.temperature, "max_response_length": cap}
    started = time.monotonic()
    samples = evaluate.answer(script, dataclasses.replace(args, vllm_engines=0, **asked), problems, run.tokenizer)
    lines = describe(samples, args.max_response_length, cap, critic=not getattr(args, "disable_value", True))
    lines[0] += f", {time.monotonic() - started:.0f} s"
    print("\n".join(lines))
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    process.exit_at_once()

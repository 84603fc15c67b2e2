"""Defaults that follow from model and data, where these are not the quickstart's. Imports no torch.

The defaults of ``Args`` suit a model of 135M parameters that adds two digits. docs/evidence/gpu.md has the table of ten
models and data sets that ``python studies/memory_tables.py defaults`` prints.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence

from runtime.arguments import flags
from runtime.data import rendering
from runtime.data.samples import Problem
from runtime.system import process
from runtime.training import memory, model_files

SMALL = 2e8  # parameters; models below learn at the quickstart's rate
MIDDLE = 4e8
# Parameters -> rates of policy and critic. 1e-6 is the default of verl 0.9.1 and TRL 1.16 (arguments/presets.py has the
# lines) and of TinyZero's runs of 0.5B to 3B, 1e-5 verl's of the critic. Between them and the quickstart's: their
# geometric mean.
RATES = {MIDDLE: (1e-6, 1e-5), SMALL: (5e-6, 3e-5)}
# Tokens of a response by its verifier: what verl's and TinyZero's examples give GSM8K, countdown and MATH, and twice
# MATH's for programs.
RESPONSES = {
    "last_number": 512,
    "exact": 512,
    "gsm8k": 1024,
    "countdown": 1024,
    "reasoning_gym": 1024,
    "ifeval": 1024,
    "math": 2048,
    "code": 4096,
}
THINKING = 4096  # at least, for a model that thinks before it answers
LONGEST_PROMPT = 2048  # beyond it the longest prompts are as a rule a few, and --overlong_prompts is to be chosen
STEPS = 200
EPOCHS = 3
Choice = tuple[float, str]  # the value, and why


def other_data(args) -> bool:
    """Return True if a run uses other problems than the quickstart."""
    return args.dataset != type(args).dataset


def by_model(args, model: memory.Model | None) -> dict[str, Choice]:
    """Return the learning rates that follow from the size of the model."""
    found = {}
    count = model.parameters if model else 0
    for least, rates in RATES.items():
        if count >= least:
            for name, rate in zip(("learning_rate", "critic_learning_rate"), rates, strict=True):
                found[name] = (rate, f"{count / 1e6:.0f}M parameters")
            break
    return found


def response_length(verifiers: set[str], thinks: bool, room: float) -> Choice:
    """Return the response length for these verifiers (each may be several, with commas); exit code 2 if it is unknown.

    ``room``: what the prompt leaves of the model's context.
    """
    names = {name for verifier in verifiers for name in verifier.split(",")}
    known = {name: RESPONSES[name] for name in names if name in RESPONSES}
    if not known:
        process.refuse(
            f"--max_response_length: was not given, and the usual length for {', '.join(sorted(names))} is unknown "
            f"(the default of 32 is for the quickstart's sums); pass it, for example 512 for a short explanation, "
            f"2048 for a derivation, 4096 for a model that thinks first"
        )
    longest = max(known, key=known.get)
    length = known[longest]
    why = f"the verifier {longest}"
    if thinks and length < THINKING:
        length = THINKING
        why = "the chat template lets the model think first"
    if 0 < room < length:
        length = int(room)
        why = "what the prompt leaves of the model's context"
    return length, why


def prompt_length(problems: Sequence[Problem]) -> Choice:
    """Return the prompt length for rendered problems: the longest, rounded up to a multiple of 64."""
    longest = max(len(problem.prompt_ids) for problem in problems)
    return min(-(-longest // 64) * 64, LONGEST_PROMPT), f"the longest prompt has {longest} tokens"


def steps(args, problems: int) -> Choice:
    """Return the number of steps for this many problems."""
    epochs = EPOCHS * problems // args.num_unique_prompts_rollout
    return max(1, min(STEPS, epochs)), f"{STEPS}, or {EPOCHS} epochs of {problems} problems if they are fewer"


def thinks(tokenizer, args, problem: Problem) -> bool:
    """Return True if the chat template lets the model think before it answers."""
    template = args.template.text or tokenizer.get_chat_template()
    switch = "enable_thinking" in template and args.template.variables.get("enable_thinking", True)
    return bool(switch) or tokenizer.decode(problem.prompt_ids).rstrip().endswith("<think>")


def choices(args, problems: Sequence[Problem], count: int, model, tokenizer) -> dict[str, Choice]:
    """Return the defaults that follow from model and data, by flag. ``count``: the number of training problems.

    ``tokenizer``: None where the data are the quickstart's, and no length follows from them.
    """
    found = by_model(args, model)
    if found or other_data(args):
        found["total_steps"] = steps(args, count)
    lengths = open_lengths(args)
    if "max_prompt_length" in lengths:
        found["max_prompt_length"] = prompt_length(problems)
    if "max_response_length" in lengths:
        config, _, _ = model_files.read_configs(args.model, "--model_name_or_path", args.dry_run)
        prompt, _ = found.get("max_prompt_length", (args.max_prompt_length, ""))
        room = (model_files.context_length(config) or math.inf) - prompt
        verifiers = {problem.verifier for problem in problems}
        found["max_response_length"] = response_length(verifiers, thinks(tokenizer, args, problems[0]), room)
    return {name: choice for name, choice in found.items() if flags.is_open(args, name)}


def open_lengths(args) -> list[str]:
    """Return the flags for lengths that were not given and follow from the data."""
    lengths = ("max_prompt_length", "max_response_length")[args.overlong_prompts != "error" :]
    return [name for name in lengths if other_data(args) and flags.is_open(args, name)]


def fill(args, problems: list[Problem], eval_problems: list[Problem]) -> None:
    """Set what was not given to what follows from model and data. ``reasons`` says why."""
    model = memory.read_model(args.model)
    tokenizer = None
    if open_lengths(args):  # the tokenizer's library imports torch
        process.prepare_environment(args.dtype)
        if args.external_lib is not None:
            importlib.import_module(args.external_lib)
        tokenizer = rendering.load_tokenizer(args)
        limit, args.max_prompt_length = args.max_prompt_length, 10**9
        rendering.render_problems(problems, eval_problems, tokenizer, args)
        args.max_prompt_length = limit
    for name, (value, _) in choices(args, [*problems, *eval_problems], len(problems), model, tokenizer).items():
        setattr(args, name, value)


def reasons(args, problems: list[Problem], eval_problems: list[Problem], model, tokenizer) -> list[str]:
    """Return lines for the start of a run: the values that were chosen, and why."""
    found = choices(args, [*problems, *eval_problems], len(problems), model, tokenizer)
    lines = []
    for name, (value, why) in found.items():
        if getattr(args, name, None) == value:
            lines.append(f"  --{name} {value:g} was not given: {why}")
    return ["defaults   of this model and data, not the quickstart's:", *lines] if lines else []

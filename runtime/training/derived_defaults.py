"""Defaults that follow from model and data, where these are not the quickstart's. Imports no torch.

The defaults of ``Args`` suit a model of 135M parameters that adds two digits. docs/maintainers/gpu.md has a table of
them.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence

from runtime.arguments import flags
from runtime.data import rendering
from runtime.data.samples import Problem
from runtime.system import process
from runtime.training import model_files

# Parameters -> rates of policy and critic; models below the last learn at the quickstart's. 1e-6 is the default of verl
# 0.9.1 and TRL 1.16 (arguments/presets.toml has the lines) and of TinyZero's runs of 0.5B to 3B, 1e-5 verl's of the
# critic. Between them and the quickstart's: their geometric mean.
RATES = {4e8: (1e-6, 1e-5), 2e8: (5e-6, 3e-5)}
# Tokens of a response by its verifier: what verl's and TinyZero's examples give GSM8K, countdown and MATH, and twice
# MATH's for programs.
RESPONSES = dict.fromkeys(("last_number", "exact"), 512)
RESPONSES |= dict.fromkeys(("gsm8k", "countdown", "reasoning_gym", "ifeval"), 1024)
RESPONSES |= {"math": 2048, "code": 4096}
THINKING = 4096  # at least, for a model that thinks before it answers
LONGEST_PROMPT = 2048  # beyond it the longest prompts are as a rule a few, and --overlong_prompts is to be chosen
STEPS, EPOCHS = 200, 3  # whichever is less
Choice = tuple[float, str]  # the value, and why


def other_data(args) -> bool:
    """Return True if a run uses other problems than the quickstart."""
    return args.dataset != type(args).dataset


def open_lengths(args) -> list[str]:
    """Return the flags for lengths that were not given and follow from the data."""
    lengths = ("max_prompt_length", "max_response_length")[args.overlong_prompts != "error" :]
    return [name for name in lengths if other_data(args) and flags.is_open(args, name)]


def by_model(args) -> dict[str, Choice]:
    """Return the learning rates that follow from the size of the model."""
    model = model_files.read_model(args.model)
    count = model.parameters if model else 0
    rates = next((rates for least, rates in RATES.items() if count >= least), ())
    names = ("learning_rate", "critic_learning_rate")
    why = f"{count / 1e6:.0f}M parameters"
    found = {}
    for name, rate in zip(names, rates, strict=False):
        found[name] = (rate, why)
    return found


def response_length(verifiers: set[str], thinks: bool, room: float) -> Choice:
    """Return the response length for these verifiers (each may be several, with commas); exit code 2 if it is unknown.

    ``room``: what the prompt leaves of the model's context.
    """
    names = {name for verifier in verifiers for name in verifier.split(",")}
    known = [name for name in names if name in RESPONSES]
    if not known:
        process.refuse(
            f"--max_response_length: was not given, and the usual length for {', '.join(sorted(names))} is unknown "
            f"(the default of 32 is for the quickstart's sums); pass it, for example 512 for a short explanation, "
            f"2048 for a derivation, 4096 for a model that thinks first"
        )
    longest = max(known, key=RESPONSES.get)
    length, why = RESPONSES[longest], f"the verifier {longest}"
    if thinks and length < THINKING:
        length, why = THINKING, "the chat template lets the model think first"
    if 0 < room < length:
        length, why = int(room), "what the prompt leaves of the model's context"
    return length, why


def by_data(args, problems: Sequence[Problem], tokenizer) -> dict[str, Choice]:
    """Return the lengths that follow from rendered problems: a multiple of 64, and what the verifiers usually take."""
    found = {}
    limit = args.max_prompt_length
    if "max_prompt_length" in open_lengths(args):
        longest = max(len(problem.prompt_ids) for problem in problems)
        limit = min(-(-longest // 64) * 64, LONGEST_PROMPT)
        found["max_prompt_length"] = (limit, f"the longest prompt has {longest} tokens")
    if "max_response_length" in open_lengths(args):
        config, _, _ = model_files.read_configs(args.model, "--model_name_or_path", args.dry_run)
        room = (model_files.context_length(config) or math.inf) - limit
        verifiers = {problem.verifier for problem in problems}
        thinking = thinks(tokenizer, args, problems[0])
        found["max_response_length"] = response_length(verifiers, thinking, room)
    return found


def thinks(tokenizer, args, problem: Problem) -> bool:
    """Return True if the chat template lets the model think before it answers."""
    template = args.template.text or tokenizer.get_chat_template()
    switch = "enable_thinking" in template and args.template.variables.get("enable_thinking", True)
    return bool(switch) or tokenizer.decode(problem.prompt_ids).rstrip().endswith("<think>")


def fill(args, problems: list[Problem], eval_problems: list[Problem]) -> None:
    """Set what was not given to what follows from model and data, and note the reasons in ``args.derived``."""
    found = by_model(args)
    if found or other_data(args):
        epochs = EPOCHS * len(problems) // args.num_unique_prompts_rollout
        why = f"{STEPS}, or {EPOCHS} epochs of {len(problems)} problems if they are fewer"
        found["total_steps"] = (max(1, min(STEPS, epochs)), why)
    if open_lengths(args):  # the tokenizer's library imports torch
        process.prepare_environment(args.dtype)
        if args.external_lib is not None:
            importlib.import_module(args.external_lib)
        tokenizer = rendering.load_tokenizer(args)
        limit, args.max_prompt_length = args.max_prompt_length, 10**9
        rendering.render_problems(problems, eval_problems, tokenizer, args)
        args.max_prompt_length = limit
        found |= by_data(args, [*problems, *eval_problems], tokenizer)
    args.derived = {}
    for name, choice in found.items():
        if flags.is_open(args, name):
            args.derived[name] = choice
            setattr(args, name, choice[0])

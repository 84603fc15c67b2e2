"""Check a run before torch is imported, the cheapest checks first, and load what ``main`` starts with."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path

from runtime.arguments import checks, flags
from runtime.data import problem_set, rendering
from runtime.data.samples import Problem
from runtime.environments import episodes
from runtime.run import directory
from runtime.system import process
from runtime.training import derived_defaults, model_files

# Training problems, evaluation problems, the folder of the run, and the checkpoint to resume from, if there is one.
Ready = tuple[list[Problem], list[Problem], Path, Path | None]


def prepare_run(
    args: flags.RunFlags,
    defaults: flags.RunFlags,
    own_checks: list[Callable[[flags.RunFlags], None]],
    truth_error: Callable,
) -> Ready | None:
    """Refuse a run that cannot work or would not mean what it says, with exit code 2. Loads no model.

    Returns what ``main`` needs; None on a rank that only samples.

    Args:
        args: of the run.
        defaults: the script's, which a run's name leaves out.
        own_checks: what only this script refuses, and what the verifiers do.
        truth_error: what is wrong with the ground truth of a row, for the verifiers.
    """
    process.listen_for_signals()
    checks.check(args, process.world_size())
    model_files.check_model(args)
    checks.check_training(args)
    checks.check_kl(args)
    for check in own_checks:
        check(args)
    world_size = process.split_launch(args.vllm_engines, args.vllm_tensor_parallel_size)
    problems, eval_problems = [], []
    if world_size > 0 or any(flags.is_open(args, name) for name in flags.OPEN):
        problems, eval_problems = problem_set.load_problems(args, truth_error)
        if args.environment is not None:  # its tools and first observations are part of the prompts
            process.prepare_environment(args.dtype)  # before a library that imports torch
            if args.external_lib is not None:
                importlib.import_module(args.external_lib)
            episodes.first_turns([*problems, *eval_problems], rendering.load_tokenizer(args), args)
        derived_defaults.fill(args, problems, eval_problems)
        checks.check_training(args)
        model_files.check_model(args)
    if world_size == 0:
        directory.open_run(args, defaults)  # ends here, as on the trainers, where the run is finished
        if args.dry_run:
            raise SystemExit(0)
        process.prepare_environment(args.dtype)
        return None
    folder, start = directory.open_run(args, defaults, world_size)
    directory.check_disk(args, folder)
    args.recorded_choices = directory.earlier_choices(args, folder)
    process.prepare_environment(args.recorded_choices.get("dtype", args.dtype))
    return problems, eval_problems, folder, start


def as_it_would_start(args: flags.RunFlags, config: dict, truth_error: Callable) -> flags.RunFlags:
    """Return a copy of ``args`` with the values that a start would give to flags that were left open.

    config: config.json of the run in the folder. What that run left open as well has its value; runs that did not
    write this down are taken to have done so. Data are read only for a length that it was given and that follows from
    them now.
    """
    args = copy.copy(args)
    left_open = [name for name in config.get("left_open", flags.OPEN) if flags.is_open(args, name)]
    for name in left_open:
        setattr(args, name, config["args"].get(name))
    args.flags_set = args.flags_set and args.flags_set.union(left_open)
    if derived_defaults.open_lengths(args):
        derived_defaults.fill(args, *problem_set.load_problems(args, truth_error))
    elif any(flags.is_open(args, name) for name in flags.OPEN):
        derived_defaults.fill(args, [None] * config.get("problems", 0), [])
    return args

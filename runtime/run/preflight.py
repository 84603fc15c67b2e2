"""Check a run before torch is imported, the cheapest checks first, and load what ``main`` starts with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from runtime.arguments import checks, flags
from runtime.data import problem_set, rendering
from runtime.data.samples import Problem
from runtime.run import directory
from runtime.system import process, user_files
from runtime.training import derived_defaults, model_files

# Training problems, evaluation problems, the folder of the run, and the checkpoint to resume from, if there is one.
Ready = tuple[list[Problem], list[Problem], Path, Path | None]


def prepare_run(
    args: flags.RunFlags,
    defaults: flags.RunFlags,
    own_checks: list[Callable[[flags.RunFlags], None]],
    truth_error: Callable,
) -> Ready | None:
    """Reject a run that cannot work or would not mean what it says, with exit code 2. Loads no model.

    Returns what ``main`` needs; None on a rank that only samples.

    Args:
        args: of the run.
        defaults: the script's, which a run's name leaves out.
        own_checks: the checks of this script alone, and those of the verifiers.
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
        with process.without_collections():  # which would look at all rows, time and again
            problems, eval_problems = problem_set.load_problems(args, truth_error)
        args.data_digest = directory.data_digest(problems, eval_problems)
        if args.environment is not None:  # its tools and first observations are part of the prompts
            process.prepare_environment(args.dtype)  # before a library that imports torch
            if args.external_lib is not None:
                importlib.import_module(args.external_lib)
            first_turns = user_files.find("runtime.environments.episodes:first_turns")
            first_turns([*problems, *eval_problems], rendering.load_tokenizer(args), args)
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
    args.recorded_choices = directory.earlier_choices(args, folder)
    process.prepare_environment(args.recorded_choices.get("dtype", args.dtype))
    return problems, eval_problems, folder, start

"""Tell whether the run of a command line is finished, so that sweeps can skip it.

    python scripts/is_finished.py grpo.py --beta 0.03 --seed 2    exit code 0: finished, 3: leave it alone, 4: to be run
    RUN=lines scripts/sweeps/kl.sh | python scripts/is_finished.py grpo.py -    code and state of each line's run

A run counts as finished by what only its end writes: the last step in metrics.jsonl, the evaluation after it in
eval.jsonl, and the weights in model/; its arguments must be the same, too. An interrupted run is to be run, since it
resumes, unless a process is writing to its folder or the folder belongs to another run. What was found is printed on
one line. Exit code 2 means arguments that the script does not take; any other code is a failure of this program.
"""

from __future__ import annotations

import copy
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from script_loader import load_arguments

from rewards import truth_error
from runtime.arguments import flags
from runtime.data import problem_set
from runtime.run import directory, identity
from runtime.run.run_files import config_of
from runtime.system import process
from runtime.training import derived_defaults

FINISHED, LEAVE, RUN = 0, 3, 4


def as_it_would_start(args: flags.RunFlags, config: dict) -> flags.RunFlags:
    """Return a copy of ``args`` with the values that a start would give to flags that were left open.

    What the run of config.json left open as well has its value. Data are read only where a length follows from them.
    """
    args = copy.copy(args)
    left_open = [name for name in config.get("left_open", flags.OPEN) if flags.is_open(args, name)]
    for name in left_open:
        setattr(args, name, config["args"].get(name))
    args.flags_set = args.flags_set and args.flags_set.union(left_open)
    if derived_defaults.open_lengths(args):
        problems = problem_set.load_problems(args, truth_error)
        args.data_digest = directory.data_digest(*problems)
        derived_defaults.fill(args, *problems)
    elif any(flags.is_open(args, name) for name in flags.OPEN):
        derived_defaults.fill(args, [None] * config.get("problems", 0), [])
    return args


def state(args, defaults) -> tuple[int, str]:
    """Return (FINISHED, LEAVE or RUN, in words) for the run that these arguments name."""
    folder = Path(args.output_dir) / directory.run_name(args, defaults)
    if not (folder / "config.json").is_file():
        return RUN, f"not begun: {folder}"
    try:
        config = config_of(folder)
    except ValueError as error:  # the run itself would end with the remedy
        return LEAVE, f"damaged: {folder}/config.json cannot be read ({error})"
    args = as_it_would_start(args, config)
    other, _ = identity.changed_arguments(config["args"], args)
    if other:
        return LEAVE, f"another run: {folder}: {', '.join(other[:5])}"
    lacks = directory.unfinished(folder, args)
    if not lacks and not args.data_digest:
        args.data_digest = directory.data_digest(*problem_set.load_problems(args, truth_error))
    changed = identity.difference(config, args)
    if changed and args.resume in ("auto", "never"):
        return LEAVE, f"changed: {folder} was made {changed}"
    if not lacks:
        return FINISHED, f"finished: {folder}"
    if holder := process.lock_holder(folder):
        return LEAVE, f"running: {folder} {lacks} ({holder})"
    return RUN, f"begun: {folder} {lacks}"


def main() -> int:
    """Print the state of a run and return it as the exit code, or print those of the runs on standard input."""
    script = load_arguments(Path(sys.argv[1] if len(sys.argv) > 1 else ""))
    if sys.argv[2:] == ["-"]:
        for words in list(map(shlex.split, sys.stdin)):
            print(*state(flags.parse(script.Args, script.__doc__, words), script.Args()))
        return 0
    code, words = state(flags.parse(script.Args, script.__doc__, sys.argv[2:]), script.Args())
    print(words)
    return code


if __name__ == "__main__":
    raise SystemExit(main())

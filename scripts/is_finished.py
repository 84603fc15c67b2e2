"""Tell whether the run of a command line is finished, so that sweeps can skip it.

    python scripts/is_finished.py grpo.py --beta 0.03 --seed 2    exit code 0: finished, 3: leave it alone, 4: to be run

A run counts as finished by what only its end writes: the last step in metrics.jsonl, the evaluation after it in
eval.jsonl, and the weights in model/; its arguments must be the same, too. An interrupted run is to be run, since it
resumes, unless a process is writing to its folder or the folder belongs to another run. What was found is printed on
one line. Exit code 2 means arguments that the script does not take; any other code is a failure of this program.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from script_loader import load_arguments

from rewards import truth_error
from runtime.arguments import flags
from runtime.run import directory, identity, preflight
from runtime.system import process

FINISHED, LEAVE, RUN = 0, 3, 4


def state(args, defaults) -> tuple[int, str]:
    """(FINISHED, LEAVE or RUN, in words) of the run that these arguments name."""
    folder = Path(args.output_dir) / directory.run_name(args, defaults)
    if not (folder / "config.json").is_file():
        return RUN, f"not begun: {folder}"
    try:
        config = directory.read_config(folder)
    except ValueError as error:  # the run itself would end with the remedy
        return LEAVE, f"damaged: {folder}/config.json cannot be read ({error})"
    args = preflight.as_it_would_start(args, config, truth_error)
    # Secrets are compared, and named, as the run hid them.
    other, _ = identity.changed_arguments(config["args"], args, resolved=True)
    if other:
        return LEAVE, f"another run: {folder}: {', '.join(other[:5])}"
    changed = identity.changed_code(config.get("code"), identity.code_of(args))
    if changed and args.resume in ("auto", "never"):
        return LEAVE, f"other code: {folder}: {', '.join(changed[:5])}"
    lacks = directory.unfinished(folder, args)
    if not lacks:
        return FINISHED, f"finished: {folder}"
    holder = process.lock_holder(folder)
    if holder:
        return LEAVE, f"running: {folder} {lacks} ({holder})"
    return RUN, f"begun: {folder} {lacks}"


def main() -> int:
    """Print the state of a run, and return it as the exit code."""
    script = load_arguments(Path(sys.argv[1] if len(sys.argv) > 1 else ""))
    args = flags.parse(script.Args, script.__doc__, sys.argv[2:])
    code, words = state(args, script.Args())
    print(words)
    return code


if __name__ == "__main__":
    raise SystemExit(main())

"""Is the run of this command line finished? For sweeps: they skip what is.

    python scripts/finished.py grpo.py --beta 0.03 --seed 2      exit code 0: finished, 3: leave it alone, 4: to be run

Finished is judged by what only the end of a run writes: the last step in metrics.jsonl, the evaluation after it in
eval.jsonl, and the weights in model/; and the run's arguments must be these. What was begun is to be run, too, since it
goes on where it was, unless a process is writing to it now, or the folder is another run's. Says what it found on one
line. Ends with 2 for arguments that the script does not take; any other code is a failure of this program.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from runtime import flags, identity, process, rundir

FINISHED, LEAVE, RUN = 0, 3, 4


def state(args, defaults) -> tuple[int, str]:
    """(FINISHED, LEAVE or RUN, in words) of the run that these arguments name."""
    folder = Path(args.output_dir) / rundir.run_name(args, defaults)
    if not (folder / "config.json").is_file():
        return RUN, f"not begun: {folder}"
    config = json.loads((folder / "config.json").read_text())
    theirs = config["args"]
    ours = json.loads(json.dumps(vars(args)))
    for name in ours:
        if name not in flags.MAY_CHANGE and ours[name] != theirs.get(name):
            return LEAVE, f"another run: {folder} has --{name} {theirs.get(name)}, not {ours[name]}"
    changed = identity.changed_code(config.get("code"), identity.code_of(args))
    if changed and not args.accept_changed_code:
        return LEAVE, f"other code: {folder}: {', '.join(changed[:5])}"
    if lacks := rundir.unfinished(folder, args):
        if holder := process.lock_holder(folder):
            return LEAVE, f"going on: {folder} {lacks} ({holder})"
        return RUN, f"begun: {folder} {lacks}"
    return FINISHED, f"finished: {folder}"


def main() -> int:
    if len(sys.argv) < 2 or not sys.argv[1].endswith(".py"):
        process.refuse("give a script and its arguments: finished.py grpo.py --beta 0.03")
    import tyro

    script = importlib.import_module(Path(sys.argv[1]).stem)
    assert dataclasses.is_dataclass(script.Args)
    code, words = state(tyro.cli(script.Args, args=sys.argv[2:]), script.Args())
    print(words)
    return code


if __name__ == "__main__":
    raise SystemExit(main())

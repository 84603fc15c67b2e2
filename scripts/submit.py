"""Run commands on this machine or submit them to a cluster: the same line, another --backend.

    python scripts/submit.py --backend local -- python grpo.py --beta 0.03
    python scripts/submit.py --backend slurm --partition h100 --gpus 8 --num_nodes 2 --time 12h -- python grpo.py ...
    python scripts/submit.py --backend slurm --gpus 8 -- source setup.sh \\&\\& uv run python grpo.py ...
    python scripts/submit.py --backend slurm --array_parallelism 4 -- python a.py -- python b.py -- python c.py
    python scripts/submit.py --backend slurm --array_parallelism 4 --tasks FILE    each line of FILE is a command

With every backend, a command receives its words exactly as they were given here, and runs the code as it is now, also
when it starts or restarts days later. It finds RUN_ID and RUN_DIR in its environment, the same after a restart. It is
asked to stop with SIGTERM, and is started again, at most --max_retries times, if it exits with 75 ("saved, start me
again"), and after a crash if it had saved a checkpoint since its last start. In a job of several GPUs or nodes,
``python FILE.py`` is started once per GPU by scripts/launch.py. Secrets are given by name alone: a value that would end
up in a file or in a command is an error. docs/launching.md has all of this, with an example for each backend.

Standard library only, so that it runs on a login node; where tyro is installed as well, a training script's arguments
are parsed before they wait in a queue. What a backend writes is in scripts/submit_backends.py and, as text to be read
and edited, in scripts/templates.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import hashlib
import itertools
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

import submit_snapshot
from submit_backends import BACKENDS, GRACE, PYTHON, Job, Plan, copied_path, file_at, has_launcher, split_at

from runtime.system import git
from runtime.system.redaction import FORMS, SECRET_NAME, names_secret

HELD = 73  # exit code: this command still waits or runs (EX_CANTCREAT)
GOING = re.compile("PENDING|RUNNING|SUSPENDED|COMPLETING|CONFIGURING|REQUEUE|STAGE_OUT|STOPPED|PREEMPTED|SIGNALING")
# Variables that a launcher or an allocation around this shell has set, and that would be wrong in the job.
OF_THIS_JOB = re.compile(
    "(RANK|WORLD_SIZE|GROUP_RANK|ROLE_.*|LOCAL_(RANK|WORLD_SIZE)|LAUNCH_.*|MASTER_(ADDR|PORT)|NODE_RANK|NUM_NODES"
    "|TORCHELASTIC_.*|PET_.*|PMIX?_.*|OMPI_.*|RUN_(ID|DIR)|WANDB_RUN_ID|WANDB_RESUME|STOP_REACHES_ALL|CODE_COMMIT)"
)
OF_THIS_ALLOCATION = re.compile(
    "SLURM_(?!CONF$|CLUSTERS$).*|SLURMD_.*|SRUN_.*|SBATCH_(CPU|MEM)_BIND.*|CUDA_VISIBLE_DEVICES"
)
# A command that is cut before its program by a -- of its own: uv run -- python FILE.py
RUNNER = re.compile(r"(.* && )?(\S*/)?(uv|pixi|poetry|pdm|hatch|rye|conda|mamba|micromamba) run( -\S+)*")


def refuse(message: str, code: int = 2) -> NoReturn:
    """Exit with a code that is not 0."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


# --------------------------------------------------------------------------------------------------------- command line


def matches(pattern: str, remedy: str) -> Callable[[str], str]:
    """Return an argparse type that accepts text of this form; its error names the remedy."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text}: {remedy}")
        return text

    return check


def seconds(text: str) -> int:
    """Convert a duration to seconds, written as for sbatch (HH:MM:SS, D-HH:MM:SS) or with a unit (90m, 12h, 2d)."""
    units = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text) if text else None
    if found := units or re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, secs = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + secs
    raise argparse.ArgumentTypeError(f"{text}: not a duration; write 90m, 12h, 12:00:00 or 1-12:00:00")


def gibibytes(text: str) -> int:
    """Return the number of GiB in ``64G``."""
    return int(re.match(r"\d+", matches(r"\d+(G|GB|Gi|GiB)", "write GiB as 64G")(text))[0])


def gpu_count(text: str) -> tuple[str | None, int]:
    """Return (type or None, number) of ``8`` or ``h100:8``."""
    kind, _, count = matches(r"([^:]+:)?\d+", "write 8, or with a type h100:8")(text).rpartition(":")
    return kind or None, int(count)


def source_and_path(text: str) -> tuple[str, str]:
    """Split ``SOURCE:/PATH`` into its source and its path."""
    source, _, path = matches(r".+:/[^:]*", "write SOURCE:/PATH")(text).rpartition(":")
    return source, path


def variable(text: str) -> tuple[str, str]:
    """Return (name, value) of ``NAME=VALUE``, or of ``NAME`` alone with the value that it has in this shell."""
    name, equals, value = text.partition("=")
    matches(r"[A-Za-z_]\w*", "not a name of a variable; write NAME=VALUE, or NAME for this shell's value")(name)
    if SECRET_NAME.search(name):
        raise argparse.ArgumentTypeError(
            f"{name}: looks like a secret, and its value would be written down; use --secret {name}"
        )
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"{name}: not set in this shell; write --env {name}=VALUE or export it first")
    return name, value if equals else os.environ[name]


def secret_name(text: str) -> str:
    """Return the name of a secret; the error for ``NAME=VALUE`` does not show the value."""
    if not re.fullmatch(r"[A-Za-z_]\w*", text):
        raise argparse.ArgumentTypeError(f"{text.partition('=')[0]}: write a name only; export the value in this shell")
    return text


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, set[str]]]:
    """Return the parser of the flags, and for each flag the backends that take it."""
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="submit.py --backend BACKEND [flags] -- COMMAND [-- COMMAND ...]",
    )
    takes = {}

    def add(backends: str, *names: str, **options: Any) -> None:
        takes[p.add_argument(*names, **options).dest] = {*backends.split()}

    everywhere = " ".join(BACKENDS)
    name = matches(r"[A-Za-z0-9][\w.=+,-]*", "use letters, digits and _ . = + , - only")
    folder = matches(r"[\w./=+,@-]+", "use letters, digits and _ . / = + , @ - only")
    add(everywhere, "--backend", required=True, choices=BACKENDS, help="where to run")
    add(everywhere, "--name", type=name, help="name of the job; default: the script's name")
    add(everywhere, "--run_dir", type=folder, help="folder of results and logs; default: runs/jobs/<run id>")
    add("local slurm", "--workdir", help="folder to run in; default: this one")
    add(everywhere, "--setup", default="", metavar="SHELL", help="shell to run before each start: 'source setup.sh'")
    where = "slurm: partition, skypilot: infra, several for a choice; ray: address"
    several = {"action": "extend", "nargs": "+", "default": []}
    add("slurm ray skypilot", "--cluster", "--partition", **several, help=where)
    add("slurm", "--account", help="account that pays")
    add("slurm", "--qos", help="quality of service")
    add("skypilot", "--preemptible", action="store_true", help="accept machines that can be taken away")
    add("slurm skypilot", "--num_nodes", type=int, default=1, help="number of nodes")
    add(everywhere, "--gpus", type=gpu_count, default=(None, 0), help="GPUs per node: 8, or with a type h100:8")
    add("slurm ray skypilot", "--cpus", type=int, help="CPU cores per node; slurm: 8 for each GPU if left out")
    add("slurm ray skypilot", "--mem", type=gibibytes, help="memory per node: 64G")
    add("slurm", "--time", type=seconds, help="time limit: 90m, 12h, 2h30m or 1-12:00:00")
    add("skypilot", "--image", help="container image")
    where = "storage that outlives the job: a bucket (s3://...) or a volume"
    each = {"action": "append", "default": []}
    add("skypilot", "--mount", type=source_and_path, **each, metavar="SOURCE:/PATH", help=where)
    where = "environment variable; without a value: this shell's"
    add(everywhere, "--env", type=variable, **each, metavar="NAME[=VALUE]", help=where)
    where = "secret, by name only; its value is taken from this shell"
    add("local slurm skypilot", "--secret", type=secret_name, **each, metavar="NAME", help=where)
    where = "starts after an exit code of 75 or a crash with a new checkpoint; 0 disables"
    add(everywhere, "--max_retries", type=int, default=10, help=where)
    add("slurm", "--depends_on", **each, metavar="ID", help="start when this job has succeeded")
    add("slurm", "--array_parallelism", type=int, metavar="N", help="make each command a task, N at a time")
    add("slurm", "--tasks", metavar="FILE", help="commands, one in a line: more than a command line takes")
    add("local slurm", "--live", action="store_true", help="run in this folder itself, not in a copy of its code")
    where = "words passed to sbatch, `ray job submit` or `sky jobs launch` as they are"
    options = {"type": shlex.split, "default": [], "metavar": "'WORDS'"}
    add("slurm ray skypilot", "--scheduler_args", **options, help=where)
    add(everywhere, "--dry_run", action="store_true", help="print what would be run, and stop")
    add(everywhere, "--verbose", action="store_true", help="with --dry_run: also print every file, in full")
    return p, takes


def parse(argv: list[str]) -> tuple[Job, list[list[str]]]:
    """Parse the flags before the first ``--``, and the commands after each. A flag may be written with dashes, too."""
    flags, *parts = split_at("--", argv)
    commands: list[list[str]] = []
    for part in parts:
        if commands and RUNNER.fullmatch(" ".join(commands[-1])):
            commands[-1] += ["--", *part]
        else:
            commands.append(part)
    parser, takes = make_parser()
    flags = [re.sub(r"^--[^=\s]+(?=$|=)", lambda m: "--" + m[0][2:].replace("-", "_"), f) for f in flags]
    args, unknown = parser.parse_known_args(flags, Job())
    if unknown and not commands and not unknown[0].startswith("-"):
        refuse(f"{unknown[0]}: put -- before the command: submit.py [flags] -- {shlex.join(unknown)}")
    if unknown:
        known = [name for action in parser._actions for name in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; perhaps {near[0]}" if near else ""))
    for flag, value in vars(args).items():
        if args.backend not in takes[flag] and value != parser.get_default(flag):
            refuse(f"--{flag}: --backend {args.backend} has no such setting; leave it out")
    tasks = vars(args).pop("tasks")
    for line in Path(tasks).read_text().splitlines() if tasks else ():
        commands.append(shlex.split(line))
    return args, commands


def check_command(words: list[str]) -> None:
    """Reject what is no command."""
    *before, last = split_at("&&", words)
    if not last or not all(before):
        refuse(f"{shlex.join(words)}: && needs a command before it and one after it")
    if len(last) == 1 and re.search(r"\s", last[0]) and not Path(last[0]).exists():
        refuse(f"{last[0]!r}: a whole command in one word; leave the quotes out, or write: -- bash -c {last[0]!r}")


def check_script(words: list[str], folder: Path) -> None:
    """Reject a script that ``folder`` lacks before it waits in a queue. A set-up may make files that come after it."""
    first = split_at("&&", words)[0]
    file = file_at(first)
    name = first[file] if file is not None else ""
    if first[0] in ("source", ".", "bash", "sh") and first[1:] and first[1].endswith(".sh"):
        name = first[1]
    if name[:1] not in "/$~" and not (folder / name).exists():
        refuse(f"{name}: no such file in {folder.resolve()}, where the command runs")


def check_arguments(words: list[str]) -> str | None:
    """Reject arguments that a training script of this folder does not take, before they wait in a queue.

    By the script's own parser, where its packages are installed here; on a bare login node the job finds out. Returns
    the name of the run.
    """
    last = split_at("&&", words)[-1]
    files = [i for i, word in enumerate(last) if word.endswith(".py") and Path(word).is_file()]
    file = files[0] if files else None
    if file is None or {"-h", "--help"} & {*last}:
        return None
    text = Path(last[file]).read_text()
    if "\nclass Args(" not in text or "\ndef preflight(" not in text:  # no training script
        return None
    try:
        import script_loader

        from runtime.arguments import flags
        from runtime.run import directory
    except ImportError:
        return None
    script = script_loader.load_arguments(Path(last[file]))
    return directory.run_name(flags.parse(script.Args, None, last[file + 1 :]), script.Args())


def check_processes(words: list[str], processes: int) -> None:
    """Reject a program that would run as one in a job of several processes, and report what runs once per node."""
    last = split_at("&&", words)[-1]
    if file_at(last) is not None or has_launcher(last):
        return
    if any(PYTHON.fullmatch(Path(word).name) or ".py" in word for word in last):
        refuse(
            f"{shlex.join(last)}: would start one process of a job of {processes}; write python FILE.py as two words "
            f"of the command, whatever goes before them (-- source setup.sh \\&\\& uv run python FILE.py ...), or "
            f"start the processes yourself with torchrun (NODE_RANK, NUM_NODES, MASTER_ADDR, MASTER_PORT are set)"
        )
    print(f"note: {shlex.join(last)}: runs once per node; only python FILE.py runs once per GPU", file=sys.stderr)


def check_backend(args: Job) -> None:
    """Reject what a backend cannot express though it takes the flag."""
    backend = args.backend
    gpu_type, gpus = args.gpus
    if args.num_nodes < 1:
        refuse(f"--num_nodes {args.num_nodes}: give 1 or more")
    if backend == "skypilot" and gpus > 0 and gpu_type is None:
        refuse(f"--gpus {gpus}: skypilot needs a type, for example --gpus H100:{gpus}")
    if backend in ("local", "ray") and gpu_type is not None:
        refuse(f"--gpus {gpu_type}:{gpus}: --backend {backend} takes a number only; write --gpus {gpus}")
    if backend == "ray" and len(args.cluster) > 1:
        refuse(f"--cluster {' '.join(args.cluster)}: --backend ray takes one")
    if backend == "slurm" and args.time is not None and args.time <= GRACE + 60:
        refuse(
            f"--time: {args.time} s are too few: Slurm asks the job to stop {GRACE} to {GRACE + 60} s before the end, "
            f"so that it can save; give at least {GRACE // 60 + 2}m"
        )


def make_job(job: Job, commands: list[list[str]], parses: bool = False) -> Job:
    """Check what the backends have in common, and add to the flags what follows from them and from the commands.

    The run id depends on the name and the commands alone. parses: check the scripts and their arguments, too.
    """
    if not commands or not all(commands):
        refuse("no command; write it after --, for example: submit.py --backend local -- python grpo.py --beta 0.03")
    here = job.backend in ("local", "slurm")  # the files written here are those that run
    folder = Path(os.path.abspath(job.workdir or "."))
    if not folder.is_dir():
        refuse(f"--workdir {job.workdir}: no such folder")
    runs = []
    for command in commands:
        check_command(command)
        if parses:
            check_script(command, folder)
        if parses and folder == Path.cwd():
            runs.append(check_arguments(command))
    check_backend(job)
    last = split_at("&&", commands[0])[-1]
    program = last[file_at(last) or 0 :]
    script = next((word for word in program if re.fullmatch(r"\S+\.(py|sh)", word)), program[0])
    name = job.name or Path(script).stem
    if not re.fullmatch(r"[A-Za-z0-9][\w.=+,-]*", name):
        refuse(f"--name: {script!r} gives the job no name; add --name NAME")
    job.run_id = f"{name}-{hashlib.sha256(json.dumps([name, commands]).encode()).hexdigest()[:8]}"
    named_after_run = len(runs) == 1 and runs[0] is not None and job.name is None
    job.label = re.sub(r"[^\w.=+,-]", "_", runs[0]) if named_after_run else job.run_id
    job.name = name
    job.run_dir = (job.run_dir or f"runs/jobs/{job.run_id}").rstrip("/")
    if here:
        job.run_dir = os.path.abspath(job.run_dir) if job.workdir else job.run_dir
        job.workdir = str(folder)
    job.submitted = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    job.commands = commands
    job.gpu_type, job.gpus = job.gpus
    if job.processes > 1:
        for command in commands:
            check_processes(command, job.processes)
        if here and not (folder / "scripts/launch.py").is_file():
            refuse(f"--workdir {folder}: no scripts/launch.py there to start the processes; name the root folder")
    add_code(job, folder)
    return job


def check_outside(words: list[str], folder: Path) -> None:
    """Reject relative paths that lead out of a folder, since a job runs in a copy of it, and name code outside."""
    for part in itertools.chain.from_iterable(re.split("[=,]", word) for word in words):
        if f"{os.path.normpath(part)}/".startswith("../") and not re.search(r"\s", part):
            refuse(
                f"{part} leads out of {folder}, and the job runs in a copy of this folder; submit from the folder that "
                f"has it, write an absolute path, or use --live"
            )
    named = dict.fromkeys(file for word in words for file in submit_snapshot.named_files(word) if os.path.isfile(file))
    outside = [name for name in named if submit_snapshot.relative(name, folder).startswith("../")]
    if outside:
        print(f"note: not copied, so that edits reach the job: {', '.join(outside)}", file=sys.stderr)


def add_code(job: Job, folder: Path) -> None:
    """Add the code of a job: its state for the record, and its tree of git if it runs in a copy.

    Outside a repository a job can only run in the folder itself or in an upload.
    """
    copied = job.backend in ("local", "slurm") and not job.live
    job.tree = None
    words = [word for command in job.commands for word in command]
    try:
        base, tree = submit_snapshot.take(folder, words + job.setup.split())
    except ValueError as error:
        if copied:
            refuse(f"git cannot copy the code in {folder} ({error}); run git init there, or use --live to run in it")
        job.git = git.state(folder)
        return
    commit = git.output(folder, "rev-parse", "--verify", "HEAD").strip()
    diff = git.output(folder, "diff", base, tree)
    job.git = {"commit": commit, "dirty": tree != base, "diff": diff} if commit else {}
    job.tree = tree if copied else None
    if copied:
        check_outside(words, folder)
        given = dict(job.env).get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
        paths = [os.path.realpath(path) for path in given.split(":") if path]
        moved = [copied_path(path, job) for path in paths]
        if moved != paths:
            job.env = [*(pair for pair in job.env if pair[0] != "PYTHONPATH"), ("PYTHONPATH", ":".join(moved))]


# --------------------------------------------------------------------------------------------------------- submission


def render(job: Job) -> Plan:
    """Plan everything that a submission writes and runs: the backend's part, the record, and uncommitted changes."""
    plan = BACKENDS[job.backend](job)
    state = {name: value for name, value in job.git.items() if name != "diff"}
    record = vars(job) | {"git": state, "run": shlex.join(plan.command), "follow": plan.follow}
    del record["dry_run"], record["verbose"]
    files = plan.files | {f"{job.folder}/submit.json": json.dumps(record, indent=1) + "\n"}
    if diff := job.git.get("diff"):
        files[f"{job.folder}/uncommitted.patch"] = diff
    return dataclasses.replace(plan, files=files)


def form_of_secret(words: list[str]) -> str:
    """Return the kind of secret in the words of a command line, or "" if there is none."""
    text = "\0".join(words)
    for what, form in FORMS:
        if form.search(text):
            return what
    for word, following in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if word.startswith("--") and names_secret(flag) and (value if equals else following[:2].strip("-")):
            return f"the value of {flag}"
    return ""


def check_secrets(job: Job, plan: Plan, environ: dict[str, str]) -> None:
    """Reject a submission where a secret is missing, or where the value of one would be written down or shown."""
    for name in job.secret:
        if name not in environ:
            refuse(f"--secret {name}: not set in this shell; export it first")
    words = [word for line in (*job.commands, plan.command, *job.env) for word in line]
    texts = {"a command, --env or --setup": "\0".join([*words, job.setup]), **plan.files}
    for name, value in environ.items():
        shortest = 4 if name in job.secret else 8  # a shorter value may be a word of any text
        is_secret = name in job.secret or SECRET_NAME.search(name)
        if not is_secret or len(value) < shortest:
            continue
        for where, text in texts.items():
            if value in text:
                refuse(
                    f"the value of {name} is in {where}; name it with --secret {name} and let the program "
                    f"read it from its environment"
                )
    for line in (*job.commands, *job.env, [job.setup]):
        if form := form_of_secret(line):
            refuse(
                f"{form} is in a command, --env or --setup, which are written down; let the program read it from its "
                f"environment, or from a file, and name the variable with --secret NAME"
            )


def show(plan: Plan, job: Job) -> str:
    """Format the plan as text: the command as a line of shell; with --verbose every file in full."""
    line = "".join(f"{name}=*** " for name in job.secret) + shlex.join(plan.command)
    if not job.verbose:
        return f"# would run {line}"
    copy = [] if job.tree is None else [f"# would copy the code, tree {job.tree} of git, to {job.folder}/code\n"]
    parts = copy + [f"# would write {path}\n{text.rstrip()}\n" for path, text in plan.files.items()]
    return "\n".join([*parts, "# would run", line])


def write(plan: Plan, job: Job) -> None:
    """Make the folder of a submission: its files, and the copy of the code."""
    for path, text in plan.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    if job.tree is not None:
        folder, place = Path(job.workdir), Path(job.workdir, job.folder, "code")
        submit_snapshot.make_output_folders(folder, [word for command in job.commands for word in command])
        outside = submit_snapshot.copy(folder, job.tree, place)
        submit_snapshot.list_files(place)
        if outside:
            print(f"note: links that lead out of the copy, so that edits reach the job: {', '.join(outside)}")


def submissions(run_dir: str) -> list[Path]:
    """Return the records of a job's submissions, the newest last."""
    return sorted(Path(run_dir).glob("[0-9]*-*-*/submit.json"), key=lambda path: path.stat().st_mtime_ns)


def follow_up(record: Path, what: str) -> str | None:
    """Return the shell command for the logs, status or cancellation of a submission, or None if it has none."""
    line = json.loads(record.read_text()).get("follow", {}).get(what)
    if line is None or "{job}" not in line:
        return line
    number = record.with_name("job.id")
    return line.replace("{job}", number.read_text().strip()) if number.exists() else None


def check_no_other(job: Job) -> None:
    """Reject a second submission of a command that waits or runs on Slurm or Ray, with exit code HELD."""
    for record in submissions(job.run_dir)[-1:] if job.backend in ("slurm", "ray") else []:
        line = follow_up(record, "status")
        if line is None:
            continue
        asked = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
        if GOING.search(asked.stdout):
            cancel = follow_up(record, "cancel")
            text = f"this command still waits or runs; cancel it ({cancel}), or give this one a --name"
            refuse(f"{job.run_id}: {text}", HELD)


def check_dependencies(job: Job) -> None:
    """Reject a --depends_on that Slurm does not know: it would not wait for it."""
    for number in job.depends_on:
        asked = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True)
        if asked.returncode != 0 and "Invalid job id" in asked.stderr + asked.stdout:
            refuse(f"--depends_on {number}: Slurm has no such job, or no longer; drop the flag")


def job_environment() -> dict[str, str]:
    """Return the environment of this shell without the variables set by an allocation or a launcher around it."""
    drop = [OF_THIS_JOB, OF_THIS_ALLOCATION] if "SLURM_JOB_ID" in os.environ else [OF_THIS_JOB]
    kept = {}
    for name, value in os.environ.items():
        if not any(part.fullmatch(name) for part in drop):
            kept[name] = value
    return kept


def run_here(command: list[str]) -> int:
    """Run a job on this machine and return its exit code. A first Ctrl-C asks it to stop, a second kills it all."""
    process = subprocess.Popen(command, start_new_session=True, env=job_environment())
    asked = []

    def stop(signum: int, frame: object) -> None:
        asked.append(signum)
        if len(asked) == 1:
            process.send_signal(signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGKILL)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, stop)
    code = process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what the job left behind
    return code if code >= 0 else 128 - code


def start(job: Job, plan: Plan) -> int:
    """Run the command of a plan, keep the number that the scheduler prints, and return the exit code."""
    if job.backend == "local":
        return run_here(plan.command)
    numbered = "{job}" in plan.follow.get("status", "")
    output = subprocess.PIPE if numbered else None
    done = subprocess.run(plan.command, env=job_environment(), stdout=output, text=True)
    number = done.stdout.strip().partition(";")[0] if numbered else ""
    if numbered:
        print(done.stdout, end="", flush=True)
        Path(job.folder, "job.id").write_text(f"{number}\n")
    for what, line in plan.follow.items() if done.returncode == 0 else ():
        print(f"{what + ':':8}{line.replace('{job}', number)}", file=sys.stderr)
    return done.returncode


def warn(job: Job) -> None:
    """Report what is lost at a restart, with the container or the upload."""
    if job.max_retries == 0:
        return
    if job.backend == "skypilot" and not job.mount:
        words = "a restart starts from scratch, since a container's disk is deleted with it"
        print(f"warning: no --mount: {words}", file=sys.stderr)
    lines = [" ".join(words) for words in job.commands if file_at(words)]
    if job.backend == "ray" and not all(re.search("--output[_-]dir[ =](/|s3)", line) for line in lines):
        words = "without an absolute --output_dir results are in the copy of this folder that Ray deletes"
        print(f"warning: {words}", file=sys.stderr)


def main(argv: list[str]) -> int:
    """Submit a command line, and return the exit code."""
    job = make_job(*parse(argv), parses=True)
    plan = render(job)
    check_secrets(job, plan, dict(os.environ))
    if job.dry_run:
        print(show(plan, job))
        return 0
    if shutil.which(plan.command[0]) is None:
        refuse(f"--backend {job.backend}: {plan.command[0]} is not installed here; --dry_run needs no cluster")
    check_dependencies(job)
    check_no_other(job)
    write(plan, job)
    print(f"{job.run_id}: {job.folder}", file=sys.stderr, flush=True)
    warn(job)
    return start(job, plan)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Run commands on this machine or submit them to a cluster: the same line, another --backend.

    python scripts/submit.py --backend local -- python grpo.py --beta 0.03
    python scripts/submit.py --backend slurm --partition h100 --gpus 8 --num_nodes 2 --time 12h -- python grpo.py ...
    python scripts/submit.py --backend slurm --gpus 8 -- source setup.sh \\&\\& uv run python grpo.py ...
    python scripts/submit.py --backend slurm --array_parallelism 4 -- python a.py -- python b.py -- python c.py
    python scripts/submit.py --status runs/jobs/grpo-1a2b3c4d        or --logs, --cancel: of the last submission there
    python scripts/submit.py --clean runs/jobs        delete the copies of code of submissions that are over

Several commands, each after its own ``--``, run one after the other; with --array_parallelism each is a task of its
own. --dry_run prints exactly what would be written and run, and needs no cluster. With every backend, a command

* receives its words exactly as they were given here; only the word ``&&`` separates it from the set-up before it;
* runs the code as it is now, also when it starts or restarts days later: on this machine and on Slurm in a copy of
  what git tracks (--live: in this folder itself), elsewhere in the upload or the image;
* finds RUN_ID and RUN_DIR in its environment, the same after a restart, and a WANDB_RUN_ID of this submission;
* is asked to stop with SIGTERM, and is started again, at most --max_retries times, if it exits with 75 ("saved, start
  me again"), and after a crash if it had saved a checkpoint since its last start. Every other end is final, as are 3
  ("did not learn", of scripts/report.py) and 73 (another process has the run's folder);
* goes through ``accelerate launch`` (scripts/launch.py) in a job of several GPUs or nodes, one process per GPU, if it
  contains ``python FILE.py``, whatever stands before it (``uv run``, ``env A=1``, ``apptainer exec IMAGE``).

Secrets are given by name alone. Their values come from this shell or from the cluster's own store; a value that would
end up in a file or in a command is an error. docs/reference/launching.md has an example for each backend.

Standard library only, so that it runs on a login node; where tyro is installed as well, a training script's arguments
are parsed before they wait in a queue. What a backend writes is in scripts/submit_backends.py and, as text to be read
and edited, in scripts/templates.
"""

from __future__ import annotations

import argparse
import ast
import base64
import dataclasses
import fcntl
import gzip
import hashlib
import io
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
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

import submit_snapshot
from submit_backends import BACKENDS, GRACE, PYTHON, Job, Plan, file_at, has_launcher, split_at
from submit_snapshot import CODE

from runtime.system import git
from runtime.system.redaction import SECRET_NAME, form_of_secret

EVERYWHERE = {"backend", "name", "run_dir", "setup", "env", "max_retries", "dry_run"}
LONGEST_CODE = 100_000  # bytes; Linux takes 131,072 as one argument, and Beaker makes the whole script one
SHELL_ONLY = {"source", ".", "cd", "export", "set", "unset", "eval", "alias", "ulimit", "umask", "module", "exit"}
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
RUNNERS = {"uv", "pixi", "poetry", "pdm", "hatch", "rye", "conda", "mamba", "micromamba"}  # RUNNER run [--] PROGRAM
# What to do instead of a flag that a backend does not take; elsewhere: leave it out.
INSTEAD = {
    ("slurm", "preemptible"): "name a preemptible --partition or --qos",
    ("slurm", "image"): "start the container in the command: -- apptainer exec image.sif python grpo.py ...",
    ("slurm", "workspace"): "--account names who pays",
    ("ray", "secret"): "Ray shows a job's environment in its dashboard; export the variable where `ray start` runs",
    ("ray", "num_nodes"): "Ray runs a command on one node; for several use slurm, skypilot or beaker",
    ("local", "num_nodes"): "for several nodes use slurm, skypilot or beaker",
    ("local", "scheduler_args"): "this machine has no scheduler",
    ("ray", "live"): "Ray uploads this folder when the job is submitted",
    ("skypilot", "live"): "SkyPilot uploads this folder when the job is submitted",
}
# Flags of open-instruct's mason.py, and what takes their place here.
MASON = {
    "description": "use --name; submit.json has the whole command",
    "task_name": "use --name",
    "min_runtime": "use --preemptible, or write minRuntime under context in scripts/templates/beaker.yaml",
    "hostname": "write hostname under constraints in templates/beaker.yaml; slurm: --scheduler_args --nodelist=A",
    "beaker_datasets": "use --mount BUCKET:/PATH; for another source edit datasets in scripts/templates/beaker.yaml",
    "shared_memory": "write sharedMemory in scripts/templates/beaker.yaml",
    "mount_docker_socket": "write it under datasets in scripts/templates/beaker.yaml",
    "pure_docker_mode": "leave it out: the PATH is always the image's",
    "no_hf_cache_env": "leave it out",
    "no_mount_nfs": "leave it out",
    "no_host_networking": "write hostNetworking in scripts/templates/beaker.yaml",
    "non_resumable": "use --max_retries 0",
    "no_auto_dataset_cache": "leave it out: nothing is cached before the job",
    "auto_output_dir_path": "give --output_dir in the command; it is RUN_DIR otherwise, on the first --mount",
    "auto_checkpoint_state_dir": "leave it out: checkpoints are in the folder of the run",
    "artifact_ttl": "leave it out, or give an --output_dir that ends in /tmp-1d",
}


def refuse(message: str) -> NoReturn:
    """Exit with code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# --------------------------------------------------------------------------------------------------------- command line


def matches(pattern: str, remedy: str) -> Callable[[str], str]:
    """Return an argparse type that accepts text of this form; its error names the remedy."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text}: {remedy}")
        return text

    return check


def at_least(smallest: int) -> Callable[[str], int]:
    """Return an argparse type that accepts whole numbers from ``smallest`` on."""

    def check(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least {smallest}")
        return int(text)

    return check


def seconds(text: str) -> int:
    """Convert a duration to seconds, written as for sbatch (HH:MM:SS, D-HH:MM:SS) or with a unit (90m, 12h, 2d)."""
    if unit := re.fullmatch(r"(\d+)([smhd])", text):
        return int(unit[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit[2]]
    if units := re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?", text) if text else None:
        days, hours, minutes = (int(part or 0) for part in units.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, secs = (int(part or 0) for part in clock.groups())
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


def secret_name(text: str) -> tuple[str, str]:
    """Return (variable, name in the cluster's store) of ``NAME``, or of ``NAME=STORE_NAME``; never a value."""
    name, equals, store = text.partition("=")
    store = store if equals else name
    if not re.fullmatch(r"[A-Za-z_]\w*", name) or not re.fullmatch(r"[A-Za-z_][\w-]*", store):
        raise argparse.ArgumentTypeError(f"{name}: write a name only; {SECRET_IS}")
    if equals and (not SECRET_NAME.search(store) or store in os.environ.values()):
        raise argparse.ArgumentTypeError(f"{name}: write a name only, or NAME=STORE_NAME as in me_{name}; {SECRET_IS}")
    return name, store


SECRET_IS = "export the value in this shell or put it into the cluster's store"


def shell_text(text: str) -> str:
    """Check that bash can read the lines of shell in a text, and return the text."""
    if not all(line.isprintable() for line in text.split("\n")):
        raise argparse.ArgumentTypeError(f"{text!a}: has characters that cannot be printed; put it into a file")
    done = subprocess.run(["bash", "-n"], input=f"f() {{\n{text}\n}}\n", capture_output=True, text=True)
    if done.returncode != 0:
        raise argparse.ArgumentTypeError(f"{text}: bash cannot read it: {done.stderr.splitlines()[0]}")
    return text


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[list[str]]]:
    """Parse the flags before the first ``--``, and the commands after each. A flag may be written with dashes, too."""
    flags, *parts = split_at("--", argv)
    commands = joined(parts)
    flags = [re.sub(r"^--[^=]+", lambda m: "--" + m[0][2:].replace("-", "_"), f) for f in flags]
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="submit.py --backend BACKEND [flags] -- COMMAND [-- COMMAND ...]",
    )
    add = p.add_argument
    name = matches(r"[A-Za-z0-9][\w.=+,-]*", "use letters, digits and _ . = + , - only")
    folder = matches(r"[\w./=+,@-]+", "use letters, digits and _ . / = + , @ - only")
    add("--backend", required=True, choices=BACKENDS, help="where to run; for Kubernetes skypilot --cluster k8s")
    add("--name", type=name, help="name of the job; default: the script's name")
    add("--run_dir", type=folder, help="folder of the job: results, logs, submissions; default: runs/jobs/<run id>")
    add("--workdir", help="folder to run the commands in, on the node; default: this one, or the image's")
    add("--setup", type=shell_text, metavar="SHELL", help="shell to run before each start, such as 'source setup.sh'")
    where = "slurm: partition, skypilot: infra, beaker: cluster, several for a choice; ray: address"
    add("--cluster", "--partition", action="extend", nargs="+", default=[], help=where)
    add("--workspace", help="beaker: workspace")
    add("--account", "--budget", help="account that pays")
    add("--priority", "--qos", help="slurm: QOS, beaker: priority")
    add("--preemptible", action="store_true", help="accept machines that can be taken away")
    add("--num_nodes", type=at_least(1), default=1, help="number of nodes")
    add("--gpus", type=gpu_count, default=(None, 0), help="GPUs per node: 8, or with a type h100:8")
    add("--cpus", type=at_least(1), help="CPU cores per node")
    add("--mem", type=gibibytes, help="memory per node: 64G")
    add("--time", "--timeout", type=seconds, help="time limit: 90m, 12h, 2h30m, 12:00:00 or 1-12:00:00")
    add("--image", help="container image; beaker: an image there, or docker:NAME")
    where = "storage that outlives the job; skypilot: bucket (s3://...) or volume, beaker: weka bucket"
    add("--mount", type=source_and_path, action="append", default=[], metavar="SOURCE:/PATH", help=where)
    where = "environment variable; without a value: this shell's"
    add("--env", type=variable, action="append", default=[], metavar="NAME[=VALUE]", help=where)
    where = "secret, by name only; beaker: NAME=NAME_IN_THE_STORE; see docs/reference/launching.md"
    add("--secret", type=secret_name, action="append", default=[], metavar="NAME", help=where)
    add(
        "--max_retries",
        type=at_least(0),
        default=10,
        help="starts after an exit code of 75 or a crash with a new checkpoint; 0 disables",
    )
    add("--depends_on", action="append", default=[], metavar="ID", help="start when this job has succeeded")
    where = "make each command a task of its own, N of which run at the same time"
    add("--array_parallelism", type=at_least(1), metavar="N", help=where)
    add("--live", action="store_true", help="run in this folder, whatever it holds then, and not in a copy of its code")
    where = "words passed to sbatch, `ray job submit`, `sky jobs launch` or `beaker experiment create` as they are"
    add("--scheduler_args", type=shlex.split, default=[], metavar="'WORDS'", help=where)
    add("--dry_run", action="store_true", help="print what would be written and run, and stop")
    answer_kubernetes(flags, commands)
    args, unknown = p.parse_known_args(flags)
    for flag in unknown:
        if hint := MASON.get(flag.lstrip("-").partition("=")[0]):
            refuse(f"{flag} is a flag of mason.py; {hint}")
    if unknown:
        p.error(f"unrecognized arguments: {' '.join(unknown)}")
    known = EVERYWHERE | BACKENDS[args.backend][1]
    for flag, value in vars(args).items():
        if flag not in known and value != p.get_default(flag):
            remedy = INSTEAD.get((args.backend, flag), "leave it out")
            refuse(f"--{flag}: --backend {args.backend} has no such setting; {remedy}")
    return args, commands


def answer_kubernetes(flags: list[str], commands: list[list[str]]) -> None:
    """End a submission to Kubernetes with the line for SkyPilot, which does there what a Job of its own cannot.

    It starts the pods of all nodes together or none, and knows queues (Kueue), labels, GPU types and secrets.
    """
    words = [word for flag in flags for word in (flag.split("=", 1) if flag.startswith("--backend=") else [flag])]
    if ["--backend", "kubernetes"] not in [words[i : i + 2] for i in range(len(words))]:
        return
    translated = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--backend", "--cluster", "--workspace", "--priority", "--gpus", "--time", "--workdir"):
        translated.add_argument(name)
    given, rest = translated.parse_known_args(words)
    line = ["--backend", "skypilot", "--cluster", f"k8s/{given.cluster}" if given.cluster else "k8s"]
    if given.gpus:
        line += ["--gpus", given.gpus if ":" in given.gpus else f"H100:{given.gpus}"]
    line = shlex.join(
        ["python", "scripts/submit.py", *line, *rest, *(w for command in commands for w in ("--", *command))]
    )
    refuse(
        f"--backend kubernetes: SkyPilot submits to Kubernetes, with gang scheduling, Kueue queues, labels and secrets "
        f"(pip install 'skypilot[kubernetes]'; the page docs/reference/launching.md has its settings); write:\n  {line}"
    )


def joined(parts: list[list[str]]) -> list[list[str]]:
    """Join commands that the ``--`` of a runner (``uv run -- python FILE.py``) has cut into two."""
    commands: list[list[str]] = []
    for part in parts:
        if commands and expects_program(commands[-1]):
            commands[-1] += ["--", *part]
        else:
            commands.append(part)
    return commands


def expects_program(words: list[str]) -> bool:
    """Return True if a command is a runner without a program yet, so that its ``--`` comes before it.

    Exits with code 2 where the last word could be either: ``uv run --extra cuda``, ``uv run --frozen pytest``.
    """
    last = split_at("&&", words)[-1]
    if "--" in last or len(last) < 2 or Path(last[0]).name not in RUNNERS or last[1] != "run":
        return False
    options = last[2:]
    if all(word.startswith("-") for word in options):
        return True
    if not options[0].startswith("-") or any(PYTHON.fullmatch(w) or w.endswith(".py") for w in options):
        return False
    for before, word in itertools.pairwise(options):
        if not word.startswith("-") and not before.startswith("-"):
            return False
    refuse(
        f"{shlex.join(last)} --: the word after an option may be its value, or a program with another command after "
        f"it; write --option=value for the first, or leave the -- of {last[0]} out"
    )


def check_operators(words: list[str]) -> None:
    """Reject a word of the shell that would reach a program as its argument; after FILE.py it is meant as one."""
    program = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    for i, word in enumerate(words[:program]):
        if word in (";", "|", "||", "&") and not (i > 0 and words[i - 1].startswith("-")):
            refuse(
                f"{shlex.join(words)}: {word} would be an argument of {words[0]}; only && (\\&\\&) works "
                f"between commands: use it, give each command a -- of its own, or write: bash -c '...'"
            )


def check_command(words: list[str]) -> None:
    """Reject what would run something other than what it says, or nothing at all, and still exit with 0."""
    *before, last = split_at("&&", words)
    if not last or not all(before):
        refuse(f"{shlex.join(words)}: && needs a command before it and one after it")
    for part in before:
        if file_at(part) is not None:
            refuse(
                f"{shlex.join(part)}: only set-up goes before &&, since a restart repeats it; write each program "
                f"after a -- of its own: -- {shlex.join(part)} -- {shlex.join(last)}"
            )
    if len(last) == 1 and re.search(r"\s", last[0]) and not Path(last[0]).exists():
        refuse(f"{last[0]!r}: a whole command in one word; leave the quotes out, or write: -- bash -c {last[0]!r}")
    for part in (*before, last):
        check_operators(part)
    if last[0] in SHELL_ONLY:
        refuse(
            f"{shlex.join(last)}: `{last[0]}` changes the shell it runs in and nothing else; name the program after "
            f"it: {shlex.join(last)} \\&\\& python FILE.py (the backslashes keep this shell from reading &&), or use "
            f"--setup '{shlex.join(last)}'"
        )


def check_files(words: list[str], folder: Path) -> None:
    """Reject files that the command names and that ``folder`` lacks, before they wait in a queue.

    Scripts, sourced files, configuration files, and files of verifiers and environments, by a relative path. A set-up
    that changes the folder or makes files may know better, and so may a container about absolute paths.
    """
    parts = split_at("&&", words)
    if any(part[0] in ("cd", "pushd", "eval", ".", "source", "git", "cp") for part in parts[:-1] if part):
        parts = parts[:1]
    for part in parts:
        file = file_at(part)
        at = {file} if file is not None else set()
        at |= {i + 1 for i, word in enumerate(part[:-1]) if word in ("--config", "--config_file")}
        at |= {1} if part[0] in ("source", ".", "bash", "sh") and part[1:] and part[1].endswith(".sh") else set()
        names = [part[i] for i in sorted(at)]
        names += [word.rpartition(":")[0] for word in part if re.fullmatch(r"[^\s:]+\.py:\w+", word)]
        for name in names:
            if not os.path.isabs(name) and name[:1] not in "$~" and not (folder / name).exists():
                refuse(f"{name}: no such file in {folder.resolve()}, where the command runs")


def check_arguments(words: list[str]) -> str | None:
    """Reject arguments that a training script of this folder does not take, before they wait in a queue.

    By the script's own parser, where its packages are installed here; on a bare login node the job finds out. Returns
    the name of the run.
    """
    last = split_at("&&", words)[-1]
    file = next((i for i, word in enumerate(last) if word.endswith(".py") and Path(word).is_file()), None)
    if file is None or {"-h", "--help"} & {*last}:
        return None
    path = Path(last[file])
    try:
        names = [getattr(node, "name", "") for node in ast.parse(path.read_text()).body]
    except SyntaxError as error:
        refuse(f"{path}: Python cannot read it: line {error.lineno}: {error.msg}")
    if not {"Args", "preflight"} <= {*names}:  # no training script
        return None
    try:
        import script_loader

        from runtime.arguments import flags
        from runtime.run import directory
    except ImportError:
        return None
    script = script_loader.load_arguments(path)
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


def check_backend(args: argparse.Namespace) -> None:
    """Reject what a backend cannot express though it takes the flag."""
    backend = args.backend
    gpu_type, gpus = args.gpus
    if backend == "skypilot" and gpus > 0 and gpu_type is None:
        refuse(f"--gpus {gpus}: skypilot needs a type, for example --gpus H100:{gpus}")
    if backend in ("local", "ray", "beaker") and gpu_type is not None:
        refuse(f"--gpus {gpu_type}:{gpus}: --backend {backend} takes a number only; choose the type by --cluster")
    if backend == "beaker" and args.image is None:
        refuse("--image: --backend beaker needs one, with the packages and this repository in it")
    if backend == "ray" and len(args.cluster) > 1:
        refuse(f"--cluster {' '.join(args.cluster)}: --backend ray takes one")
    if backend == "slurm" and args.time is not None and args.time <= GRACE + 60:
        refuse(
            f"--time: {args.time} s are too few: Slurm asks the job to stop {GRACE} to {GRACE + 60} s before the end, "
            f"so that it can save; give at least {GRACE // 60 + 2}m"
        )
    if backend != "beaker" and any(name != store for name, store in args.secret):
        refuse("--secret NAME=STORE_NAME: only beaker keeps secrets under other names; write --secret NAME")


def make_job(args: argparse.Namespace, commands: list[list[str]], parses: bool = False) -> Job:
    """Check what the backends have in common. The run id depends on the name and the commands alone.

    parses: check the arguments of training scripts, too, while git reads the folder: on a shared disk both take long.
    """
    if not commands or not all(commands):
        refuse("no command; write it after --, for example: submit.py --backend local -- python grpo.py --beta 0.03")
    for command in commands:
        check_command(command)
    check_backend(args)
    last = split_at("&&", commands[0])[-1]
    file = file_at(last)
    script = last[0] if file is None else last[file]
    if file is None:
        script = next((word for word in last if re.fullmatch(r"\S+\.(py|sh)", word)), script)
    name = args.name or Path(script).stem
    if not re.fullmatch(r"[A-Za-z0-9][\w.=+,-]*", name):
        refuse(f"--name: {script!r} gives the job no name; add --name NAME")
    run_id = f"{name}-{hashlib.sha256(json.dumps([name, commands]).encode()).hexdigest()[:8]}"
    run_dir = args.run_dir or f"runs/jobs/{run_id}"
    here = args.backend in ("local", "slurm")  # the files written here are those that run
    folder = os.path.abspath(args.workdir or os.getcwd())
    if here and args.workdir:
        run_dir = os.path.abspath(run_dir)
    values = {flag: tuple(value) if isinstance(value, list) else value for flag, value in vars(args).items()}
    del values["dry_run"], values["live"]
    gpu_type, gpus = values["gpus"]
    words = [word for command in commands for word in command] + (args.setup or "").split()
    mounted = any(f"{args.workdir}/".startswith(f"{path.rstrip('/')}/") for _, path in args.mount)
    code = changed_code(words) if args.backend == "beaker" and not mounted else None
    with ThreadPoolExecutor() as pool:
        state = pool.submit(git_state, words)
        copied = pool.submit(copied_files, folder, words) if here and not args.live else None
        names = [check_arguments(c) for c in commands] if parses and folder == os.getcwd() else []
    if len(names) == 1 and names[0] and not args.name:
        values["label"] = re.sub(r"[^\w.=+,-]", "_", names[0])
    computed = {
        "name": name,
        "run_id": run_id,
        "run_dir": run_dir.rstrip("/"),
        "submitted": f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        "commands": tuple(tuple(c) for c in commands),
        "git": state.result(),
        "code": code,
        "workdir": folder if here else args.workdir,
        "copied": copied and copied.result(),
        "secret": tuple(name for name, _ in args.secret),
        "stores": tuple(store for _, store in args.secret),
        "scheduler_args": tuple(args.scheduler_args),
        "gpu_type": gpu_type,
        "gpus": gpus,
    }
    job = Job(**(values | computed))
    if job.processes > 1:
        for command in commands:
            check_processes(command, job.processes)
        if here and not Path(job.workdir, "scripts/launch.py").is_file():
            refuse(f"--workdir {job.workdir}: no scripts/launch.py there to start the processes; name the root folder")
    return job


def copied_files(folder: str, words: list[str]) -> tuple[str, ...]:
    """Return the files of ``folder`` that the job's copy of the code contains."""
    scripts = [word for word in words if word.endswith(CODE) and Path(folder, word).is_file()]
    try:
        return tuple(submit_snapshot.code_files(Path(folder), scripts))
    except ValueError as error:
        refuse(f"{error}, so they are not copied for the job; submit from the project's folder, or use --live")


def scripts_in(words: list[str]) -> list[str]:
    """Return the scripts among ``words`` that are files of this folder."""
    return [word for word in words if word.endswith((".py", ".sh")) and Path(word).is_file()]


def git_state(words: list[str]) -> dict[str, Any]:
    """Return the commit, the diff of tracked files to it, and new files among ``words``; empty without git."""
    commit = git.output(Path(), "rev-parse", "--verify", "HEAD").strip()
    if not commit:
        return git.state(Path())  # of a job that submits another one from its copy of the code
    diff = git.diff(Path(), scripts_in(words))
    return {"commit": commit, "dirty": bool(diff), "diff": diff}


def changed_code(words: list[str]) -> str | None:
    """Pack the code files that the commit lacks or has in another version as base64 of a tar; None if there are none.

    An image holds the code of a commit: what was edited since goes along with the job, or the job would run without it.
    """
    changed = git.output(Path(), "diff", "HEAD", "--name-only", "--relative", "--diff-filter=d").splitlines()
    new = git.untracked(Path(), scripts_in(words))
    names = sorted({*new, *(name for name in changed if name.endswith(CODE))})
    if not names:
        return None
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in names:
            if os.path.isabs(name) or ".." in Path(name).parts:
                refuse(f"{name}: must be a relative path inside this folder, since the image has the same one")
            entry = archive.gettarinfo(name)
            entry.mtime = 0  # the same edits are the same job
            with open(name, "rb") as content:
                archive.addfile(entry, content)
    code = base64.encodebytes(gzip.compress(packed.getvalue(), mtime=0)).decode()
    if len(code) > LONGEST_CODE:
        refuse(
            f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}: {len(code)} bytes of code that the image does "
            f"not have, more than the {LONGEST_CODE} that travel with a job; build the image from them, or put the "
            f"code on a --mount and name its folder by --workdir"
        )
    return code


# --------------------------------------------------------------------------------------------------------- submission


def render(job: Job) -> Plan:
    """Plan everything that a submission writes and runs: the backend's part, the record, and uncommitted changes."""
    plan = BACKENDS[job.backend][0](job)
    record = dataclasses.asdict(job) | {"run": [shlex.join(command) for command in plan.commands]}
    diff = record["git"].pop("diff", "")
    del record["code"], record["copied"]  # the difference says the same, to be read; the copy is beside it
    record["follow"] = plan.follow
    files = plan.files | {f"{job.folder}/submit.json": json.dumps(record, indent=1) + "\n"}
    if diff:
        files[f"{job.folder}/uncommitted.patch"] = diff
    return dataclasses.replace(plan, files=files)


def check_secrets(job: Job, plan: Plan, environ: dict[str, str]) -> None:
    """Reject a submission where a secret is missing, or where the value of one would be written down or shown."""
    for name in plan.from_shell:
        if name not in environ:
            refuse(f"--secret {name}: not set in this shell; export it first")
    words = [word for line in (*job.commands, *plan.commands, *job.env) for word in line]
    texts = {"a command, --env or --setup": "\0".join([*words, job.setup or ""]), **plan.files}
    for name, value in environ.items():
        if (name in job.secret and len(value) >= 4) or (SECRET_NAME.search(name) and len(value) >= 8):
            for where, text in texts.items():
                if value in text:
                    refuse(
                        f"the value of {name} is in {where}; name it with --secret {name} and let the program "
                        f"read it from its environment"
                    )
    for line in (*job.commands, *job.env, [job.setup or ""]):
        if form := form_of_secret(line):
            refuse(
                f"{form} is in a command, --env or --setup, which are written down; let the program read it from its "
                f"environment, or from a file, and name the variable with --secret NAME"
            )


def show(plan: Plan, job: Job) -> str:
    """Format the plan as text: every file in full, every command as a line of shell."""
    copy = [] if job.copied is None else [f"# would copy {len(job.copied)} files of code to {job.folder}/code\n"]
    parts = copy + [f"# would write {path}\n{text.rstrip()}\n" for path, text in plan.files.items()]
    hidden = "".join(f"{name}=*** " for name in plan.from_shell)
    return "\n".join([*parts, "# would run", *(hidden + shlex.join(c) for c in plan.commands)])


def write(plan: Plan, job: Job) -> None:
    """Make the folder of a submission: its files, and the copy of the code."""
    for path, text in plan.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    if job.copied is not None:
        folder = Path(job.workdir)
        words = [word for command in job.commands for word in command]
        results = submit_snapshot.output_folders(folder, words)
        submit_snapshot.take(folder, folder / job.folder / "code", job.copied, results)


def submissions(run_dir: str) -> list[Path]:
    """Return the records of a job's submissions, the newest last."""
    return sorted(Path(run_dir).glob("[0-9]*-*-*/submit.json"), key=lambda path: path.stat().st_mtime_ns)


def follow_up(record: Path, what: str) -> str | None:
    """Return the shell command for the logs, status or cancellation of a submission, or None if it has none."""
    line = json.loads(record.read_text()).get("follow", {}).get(what)
    number = record.with_name("job.id")
    if line is None or ("{job}" in line and not number.exists()):
        return None
    return line.replace("{job}", number.read_text().strip()) if "{job}" in line else line


def follow(argv: list[str]) -> int:
    """Run ``--status``, ``--logs`` or ``--cancel`` for the newest submission in a job's folder."""
    what = argv[0].lstrip("-")
    if len(argv) != 2:
        refuse(f"{argv[0]}: name the folder of one job after it, such as runs/jobs/grpo-1a2b3c4d")
    records = submissions(argv[1]) or list(Path(argv[1]).glob("submit.json"))
    line = follow_up(records[-1], what) if records else None
    if line is None:
        refuse(f"{argv[0]} {argv[1]}: no submission there, or none of a backend that can tell")
    return subprocess.run(["bash", "-c", line]).returncode


def is_over(record: Path) -> bool:
    """Return True if a submission neither waits nor runs; False also where nobody can tell."""
    if json.loads(record.read_text())["backend"] == "local":
        with suppress(OSError), open(record.parent.parent / "submit.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False
    line = follow_up(record, "status")
    if line is None:  # the scheduler did not take it
        return True
    asked = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    return (asked.returncode == 0 or "Invalid job id" in asked.stderr) and not GOING.search(asked.stdout)


def clean(argv: list[str]) -> int:
    """Run ``--clean FOLDER``: delete the copies of code of finished submissions, of one job or of all in FOLDER."""
    if len(argv) != 2 or not Path(argv[1]).is_dir():
        refuse("--clean: name a folder of jobs after it, such as runs/jobs, or that of one job")
    records = submissions(argv[1]) + [record for place in Path(argv[1]).iterdir() for record in submissions(place)]
    copies = [record for record in records if record.with_name("code").is_dir()]
    over = [record for record in copies if is_over(record)]
    for record in over:
        shutil.rmtree(record.with_name("code"))
    print(f"deleted {len(over)} copies of code; {len(copies) - len(over)} submissions may still wait or run")
    return 0


def hold(job: Job) -> int | None:
    """Reject a second submission of a command that still waits or runs, with exit code HELD.

    On this machine the descriptor that is returned is the hold; elsewhere the scheduler is asked.
    """
    if job.backend == "local":
        Path(job.run_dir).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(f"{job.run_dir}/submit.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held(f"{job.run_id}: this command is running already; wait for its end, or give this one a --name")
        except OSError:  # a file system without locks
            pass
        return descriptor
    for record in submissions(job.run_dir)[-1:] if job.backend in ("slurm", "ray") else []:
        line = follow_up(record, "status")
        said = subprocess.run(["bash", "-c", line], capture_output=True, text=True).stdout if line else ""
        if GOING.search(said):
            cancel = follow_up(record, "cancel")
            held(f"{job.run_id}: this command still waits or runs; cancel it ({cancel}), or give this one a --name")
    return None


def held(message: str) -> NoReturn:
    """Exit with code HELD."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(HELD)


def check_dependencies(job: Job) -> None:
    """Reject a --depends_on that Slurm does not know: it would not wait for it."""
    for number in job.depends_on:
        asked = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True)
        if asked.returncode != 0 and "Invalid job id" in asked.stderr + asked.stdout:
            refuse(
                f"--depends_on {number}: Slurm has no such job (it removes one minutes after its end); drop the flag"
            )


def job_environment() -> dict[str, str]:
    """Return the environment of this shell without the variables set by an allocation or a launcher around it."""
    inside = "SLURM_JOB_ID" in os.environ
    drop = [name for name in os.environ if OF_THIS_JOB.fullmatch(name)]
    drop += [name for name in os.environ if inside and OF_THIS_ALLOCATION.fullmatch(name)]
    return {name: value for name, value in os.environ.items() if name not in drop}


def run_here(command: list[str], lock: int | None) -> int:
    """Run a job on this machine and return its exit code. A first Ctrl-C asks it to stop, a second kills it all."""
    keep = () if lock is None else (lock,)
    process = subprocess.Popen(command, start_new_session=True, env=job_environment(), pass_fds=keep)
    asked = []

    def stop(signum: int, frame: object) -> None:
        asked.append(signum)
        if len(asked) == 1:
            process.send_signal(signal.SIGTERM)
        else:
            os.killpg(process.pid, signal.SIGKILL)

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the job left behind
    return code if code >= 0 else 128 - code


def start(job: Job, plan: Plan, lock: int | None) -> int:
    """Run the commands of a plan, keep the number that the scheduler prints, and return the exit code."""
    number = ""
    for command in plan.commands:
        if job.backend == "local":
            code = run_here(command, lock)
        elif "{job}" in plan.follow.get("status", ""):
            done = subprocess.run(command, env=job_environment(), stdout=subprocess.PIPE, text=True)
            code = done.returncode
            print(done.stdout, end="", flush=True)
            number = done.stdout.strip().partition(";")[0]
            Path(job.folder, "job.id").write_text(f"{number}\n")
        else:
            code = subprocess.run(command, env=job_environment()).returncode
        if code != 0:
            return code
    for what, line in plan.follow.items():
        print(f"{what + ':':8}{line.replace('{job}', number)}", file=sys.stderr)
    return 0


def warn(job: Job) -> None:
    """Say what is lost at a restart, with the container or the upload, and what mason.py would do otherwise."""
    if job.backend == "beaker" and len(job.commands) > 1:
        print(
            f"note: the {len(job.commands)} commands run one after the other in one task, where mason.py would make "
            f"parallel tasks of them; for those submit each on its own",
            file=sys.stderr,
        )
    if job.max_retries == 0:
        return
    if "mount" in BACKENDS[job.backend][1] and not job.mount:
        words = "a restart starts from scratch, since a container's disk is deleted with it"
        print(f"warning: no --mount: {words}", file=sys.stderr)
    if job.backend == "ray":
        for words in job.commands:
            line = " ".join(words).replace("--output-dir", "--output_dir").replace("=", " ")
            if file_at(list(words)) is not None and "--output_dir /" not in line and "--output_dir s3" not in line:
                print(
                    f"warning: {shlex.join(words[:3])} ...: without an absolute --output_dir its results are in the "
                    f"copy of this folder that Ray deletes",
                    file=sys.stderr,
                )
                return


def main(argv: list[str]) -> int:
    """Submit a command line, and return the exit code."""
    if argv[:1] and argv[0] in ("--status", "--logs", "--cancel", "--clean"):
        return clean(argv) if argv[0] == "--clean" else follow(argv)
    args, commands = parse(argv)
    job = make_job(args, commands, parses=True)
    plan = render(job)
    check_secrets(job, plan, dict(os.environ))
    if job.backend != "beaker":
        for command in commands:
            check_files(command, Path(job.workdir or "."))
    if args.dry_run:
        print(show(plan, job))
        return 0
    try:
        if job.backend == "slurm":
            check_dependencies(job)
        lock = hold(job)
        write(plan, job)
        print(f"{job.run_id}: {job.folder}", file=sys.stderr, flush=True)
        warn(job)
        return start(job, plan, lock)
    except FileNotFoundError as error:
        if error.filename not in ("scontrol", *(command[0] for command in plan.commands)):
            raise
        refuse(f"--backend {job.backend}: {error.filename} is not installed here; --dry_run needs no cluster")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Run commands on this machine or submit them to a cluster: the same line, another --backend.

    python scripts/submit.py --backend local -- python grpo.py --beta 0.03
    python scripts/submit.py --backend slurm --partition h100 --gpus 8 --num_nodes 2 --time 12h -- python grpo.py ...
    python scripts/submit.py --backend slurm --gpus 8 -- source setup.sh \\&\\& uv run python grpo.py ...
    python scripts/submit.py --backend slurm --array_parallelism 4 -- python a.py -- python b.py -- python c.py

Several commands, each after its own ``--``, run one after the other; with --array_parallelism each is a task of its
own. --dry_run prints exactly what would be written and run, and needs no cluster. With every backend, a command

* receives its words exactly as they were given here; only the word ``&&`` separates it from the set-up before it;
* finds RUN_ID and RUN_DIR in its environment, the same after a restart, and a WANDB_RUN_ID that continues its run;
* is asked to stop with SIGTERM, and is started again, at most --max_retries times, if it exits with 75 ("saved, start
  me again"), and after a crash if it had saved a checkpoint since its last start. Every other end is final, as is 3
  ("did not learn", of scripts/doctor.py);
* goes through ``accelerate launch`` (scripts/launch.py) in a job of several GPUs or nodes, one process per GPU, if it
  contains ``python FILE.py``, whatever stands before it (``uv run``, ``env A=1``, ``apptainer exec IMAGE``).

Secrets are given by name alone. Their values come from this shell or from the cluster's own store; a value that would
end up in a file or in a command is an error. docs/evidence/launching.md has an example for each backend.

Standard library only, so that it runs on a login node; where tyro is installed as well, a training script's arguments
are parsed before they wait in a queue. What a backend writes is in scripts/submit_backends.py and, as text to be read
and edited, in scripts/templates.
"""

from __future__ import annotations

import argparse
import ast
import base64
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the scripts are not a package

from submit_backends import BACKENDS, PYTHON, Job, Plan, file_at, has_launcher, split_at

from runtime.system import git
from runtime.system.redaction import SECRET_NAME, form_of_secret

EVERYWHERE = {"backend", "name", "run_dir", "setup", "env", "max_retries", "dry_run"}
CODE = (".py", ".sh", ".jinja", ".yaml")  # endings of the files that are taken along into a container
LONGEST_CODE = 100_000  # bytes; Linux takes 131,072 as one argument, and Beaker makes the whole script one
SHELL_ONLY = {"source", ".", "cd", "export", "set", "unset", "eval", "alias", "ulimit", "umask", "module", "exit"}
RUNNERS = {"uv", "pixi", "poetry", "pdm", "hatch", "rye", "conda", "mamba", "micromamba"}  # RUNNER run [--] PROGRAM
# What to do instead of a flag that a backend does not take; elsewhere: leave it out.
INSTEAD = {
    ("slurm", "preemptible"): "name a preemptible --partition or --qos",
    ("slurm", "image"): "start the container in the command: -- apptainer exec image.sif python grpo.py ...",
    ("slurm", "workspace"): "--account names who pays",
    ("ray", "secret"): "Ray shows a job's environment in its dashboard; export the variable where `ray start` runs",
    ("ray", "num_nodes"): "Ray runs a command on one node; for several use slurm, skypilot, kubernetes or beaker",
    ("kubernetes", "preemptible"): "give a preemptible class as --priority",
    ("local", "num_nodes"): "for several nodes use slurm, skypilot, kubernetes or beaker",
}


def refuse(message: str) -> NoReturn:
    """Exit with code 2."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# --------------------------------------------------------------------------------------------------------- command line


def matches(pattern: str, remedy: str) -> Callable[[str], str]:
    """A type for argparse: text of this form, or an error that names the remedy."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text}: {remedy}")
        return text

    return check


def at_least(smallest: int) -> Callable[[str], int]:
    """A type for argparse: a whole number from ``smallest`` on."""

    def check(text: str) -> int:
        if not re.fullmatch(r"-?\d+", text) or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text}: must be a whole number, at least {smallest}")
        return int(text)

    return check


def seconds(text: str) -> int:
    """A duration as people write it for sbatch (HH:MM:SS, D-HH:MM:SS) or with a unit (90m, 12h, 2d)."""
    if unit := re.fullmatch(r"(\d+)([smhd])", text):
        return int(unit[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit[2]]
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, secs = (int(part or 0) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + secs
    raise argparse.ArgumentTypeError(f"{text}: not a duration; write 90m, 12h, 12:00:00 or 1-12:00:00")


def gibibytes(text: str) -> int:
    """64 of ``64G``."""
    return int(re.match(r"\d+", matches(r"\d+(G|GB|Gi|GiB)", "write GiB as 64G")(text))[0])


def gpu_count(text: str) -> tuple[str | None, int]:
    """(type or None, number) of ``8`` or ``h100:8``."""
    kind, _, count = matches(r"([^:]+:)?\d+", "write 8, or with a type h100:8")(text).rpartition(":")
    return kind or None, int(count)


def source_and_path(text: str) -> tuple[str, str]:
    """The halves of ``SOURCE:/PATH``."""
    source, _, path = matches(r".+:/[^:]*", "write SOURCE:/PATH")(text).rpartition(":")
    return source, path


def variable(text: str) -> tuple[str, str]:
    """(name, value) of ``NAME=VALUE``, or of ``NAME`` alone with the value that it has in this shell."""
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
    """A name without a value."""
    if not re.fullmatch(r"[A-Za-z_]\w*", text):
        name = text.partition("=")[0]
        raise argparse.ArgumentTypeError(
            f"{name}: write a name only; export the value in this shell or put it into the cluster's store"
        )
    return text


def shell_text(text: str) -> str:
    """Lines of shell that bash can read."""
    if not all(line.isprintable() for line in text.split("\n")):
        raise argparse.ArgumentTypeError(f"{text!a}: has characters that cannot be printed; put it into a file")
    done = subprocess.run(["bash", "-n"], input=f"f() {{\n{text}\n}}\n", capture_output=True, text=True)
    if done.returncode != 0:
        raise argparse.ArgumentTypeError(f"{text}: bash cannot read it: {done.stderr.splitlines()[0]}")
    return text


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[list[str]]]:
    """The flags before the first ``--``, and the commands after each. A flag may be written with dashes, too."""
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
    add("--backend", required=True, choices=BACKENDS, help="where to run")
    add("--name", type=name, help="name of the job; default: the script's name")
    add("--run_dir", type=folder, help="folder for scripts, logs and record of the job; default: runs/jobs/<run id>")
    add("--workdir", help="folder to run the commands in, on the node; default: this one, or the image's")
    add("--setup", type=shell_text, metavar="SHELL", help="shell to run before each start, such as 'source setup.sh'")
    where = "slurm: partition, skypilot: infra, beaker: cluster; repeat for a choice; kubernetes: context, ray: address"
    add("--cluster", "--partition", action="append", default=[], help=where)
    add("--workspace", help="beaker: workspace, kubernetes: namespace")
    add("--account", "--budget", help="account that pays")
    add("--priority", "--qos", help="slurm: QOS, kubernetes: priority class, beaker: priority")
    add("--preemptible", action="store_true", help="accept machines that can be taken away")
    add("--num_nodes", type=at_least(1), default=1, help="number of nodes")
    add("--gpus", type=gpu_count, default=(None, 0), help="GPUs per node: 8, or with a type h100:8")
    add("--cpus", type=at_least(1), help="CPU cores per node")
    add("--mem", type=gibibytes, help="memory per node: 64G")
    add("--time", type=seconds, help="time limit: 90m, 12h, 12:00:00 or 1-12:00:00")
    add("--image", help="container image; beaker: an image there, or docker:NAME")
    where = "storage that outlives the job; kubernetes: volume claim, skypilot: bucket, beaker: weka bucket"
    add("--mount", type=source_and_path, action="append", default=[], metavar="SOURCE:/PATH", help=where)
    where = "environment variable; without a value: this shell's"
    add("--env", type=variable, action="append", default=[], metavar="NAME[=VALUE]", help=where)
    where = "secret, by name only; see docs/evidence/launching.md"
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
    add("--dry_run", action="store_true", help="print what would be written and run, and stop")
    args = p.parse_args(flags)
    known = EVERYWHERE | BACKENDS[args.backend][1]
    for flag, value in vars(args).items():
        if flag not in known and value != p.get_default(flag):
            remedy = INSTEAD.get((args.backend, flag), "leave it out")
            refuse(f"--{flag}: --backend {args.backend} has no such setting; {remedy}")
    return args, commands


def joined(parts: list[list[str]]) -> list[list[str]]:
    """The commands, where the ``--`` of a runner (``uv run -- python FILE.py``) has cut one into two."""
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
    """Refuse a word of the shell that would reach a program as its argument; after FILE.py it is meant as one."""
    program = next((i for i, word in enumerate(words) if word.endswith(".py")), len(words))
    for i, word in enumerate(words[:program]):
        if word in (";", "|", "||", "&") and not (i > 0 and words[i - 1].startswith("-")):
            refuse(
                f"{shlex.join(words)}: {word} would be an argument of {words[0]}; only && (\\&\\&) works "
                f"between commands: use it, give each command a -- of its own, or write: bash -c '...'"
            )


def check_command(words: list[str]) -> None:
    """Refuse what would run something other than what it says, or nothing at all, and still exit with 0."""
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


def check_arguments(words: list[str]) -> None:
    """Refuse arguments that a training script of this folder does not take, before they wait in a queue.

    By the script's own parser, where its packages are installed here; on a bare login node the job finds out.
    """
    last = split_at("&&", words)[-1]
    file = next((i for i, word in enumerate(last) if word.endswith(".py") and Path(word).is_file()), None)
    if file is None or {"-h", "--help"} & {*last}:
        return
    path = Path(last[file])
    try:
        names = [getattr(node, "name", "") for node in ast.parse(path.read_text()).body]
    except SyntaxError as error:
        refuse(f"{path}: Python cannot read it: line {error.lineno}: {error.msg}")
    if not {"Args", "preflight"} <= {*names}:  # no training script
        return
    try:
        import script_loader

        from runtime.arguments import flags
    except ImportError:
        return
    flags.parse(script_loader.load_arguments(path).Args, None, last[file + 1 :])


def check_processes(words: list[str], processes: int) -> None:
    """In a job of several processes, refuse a program that would run as one, and say what runs once per node."""
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
    """Refuse what a backend cannot express though it takes the flag."""
    backend = args.backend
    gpu_type, gpus = args.gpus
    if backend == "skypilot" and gpus > 0 and gpu_type is None:
        refuse(f"--gpus {gpus}: skypilot needs a type, for example --gpus H100:{gpus}")
    if backend in ("local", "ray", "kubernetes", "beaker") and gpu_type is not None:
        refuse(f"--gpus {gpu_type}:{gpus}: --backend {backend} takes a number only; choose the type by --cluster")
    if backend in ("kubernetes", "beaker") and args.image is None:
        refuse(f"--image: --backend {backend} needs one, with the packages and this repository in it")
    if backend in ("ray", "kubernetes") and len(args.cluster) > 1:
        refuse(f"--cluster {' --cluster '.join(args.cluster)}: --backend {backend} takes one")
    if backend == "kubernetes" and args.array_parallelism is not None and args.num_nodes > 1:
        refuse("--array_parallelism with --num_nodes above 1: a Kubernetes Job is either; submit command by command")


def make_job(args: argparse.Namespace, commands: list[list[str]]) -> Job:
    """Check what the backends have in common. The run id depends on the name and the commands alone."""
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
    if here and args.workdir:
        run_dir = os.path.abspath(run_dir)
    values = {flag: tuple(value) if isinstance(value, list) else value for flag, value in vars(args).items()}
    del values["dry_run"]
    gpu_type, gpus = values["gpus"]
    words = [word for command in commands for word in command] + (args.setup or "").split()
    mounted = any(f"{args.workdir}/".startswith(f"{path.rstrip('/')}/") for _, path in args.mount)
    code = changed_code(words) if args.backend in ("kubernetes", "beaker") and not mounted else None
    computed = {
        "name": name,
        "run_id": run_id,
        "run_dir": run_dir.rstrip("/"),
        "submitted": time.strftime("%Y%m%d-%H%M%S"),
        "commands": tuple(tuple(c) for c in commands),
        "git": git_state(words),
        "code": code,
        "workdir": args.workdir or (os.getcwd() if here else None),
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


def scripts_in(words: list[str]) -> list[str]:
    """The files of this folder among ``words`` that are scripts."""
    return [word for word in words if word.endswith((".py", ".sh")) and Path(word).is_file()]


def git_state(words: list[str]) -> dict[str, Any]:
    """Commit, how tracked files differ from it, and new files among ``words``; empty without git."""
    state = git.state(Path(), scripts_in(words))
    return state and state | {"diff": git.diff(Path(), scripts_in(words))}


def changed_code(words: list[str]) -> str | None:
    """The files of code that the commit has otherwise or not at all, as base64 of a tar; None where there are none.

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
                refuse(f"{name}: is no path inside this folder, which the image has as well; name it from here")
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
    """All that a submission writes and runs: the backend's part, the record, and the uncommitted changes."""
    plan = BACKENDS[job.backend][0](job)
    record = dataclasses.asdict(job) | {"run": [shlex.join(command) for command in plan.commands]}
    diff = record["git"].pop("diff", "")
    del record["code"]  # the difference says the same, to be read
    files = plan.files | {f"{job.run_dir}/submit.json": json.dumps(record, indent=1) + "\n"}
    if diff:
        files[f"{job.run_dir}/uncommitted.patch"] = diff
    return dataclasses.replace(plan, files=files)


def check_secrets(job: Job, plan: Plan, environ: dict[str, str]) -> None:
    """Refuse where a secret is missing, or where the value of one would be written down or shown."""
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


def show(plan: Plan) -> str:
    """The plan as text: every file whole, every command as a line of shell."""
    parts = [f"# would write {path}\n{text.rstrip()}\n" for path, text in plan.files.items()]
    hidden = "".join(f"{name}=*** " for name in plan.from_shell)
    return "\n".join([*parts, "# would run", *(hidden + shlex.join(c) for c in plan.commands)])


def write(plan: Plan) -> None:
    """Write the files of a plan, each whole or not at all: a shell may be reading an old one line by line."""
    for path, text in plan.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path + ".tmp").write_text(text, encoding="utf-8")
        os.replace(path + ".tmp", path)


def run_here(command: list[str]) -> int:
    """Run a job on this machine and return its exit code. A first Ctrl-C asks it to stop, a second kills it all."""
    process = subprocess.Popen(command, start_new_session=True)
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


def main(argv: list[str]) -> int:
    """Submit a command line, and return the exit code."""
    args, commands = parse(argv)
    job = make_job(args, commands)
    if job.workdir in (None, os.getcwd()):
        for command in commands:
            check_arguments(command)
    plan = render(job)
    check_secrets(job, plan, dict(os.environ))
    if args.dry_run:
        print(show(plan))
        return 0
    write(plan)
    print(f"{job.run_id}: {job.run_dir}", file=sys.stderr, flush=True)
    if "mount" in BACKENDS[job.backend][1] and not job.mount and job.max_retries > 0:
        print("warning: no --mount: a restart begins anew, since a container's disk ends with it", file=sys.stderr)
    for command in plan.commands:
        try:
            code = run_here(command) if job.backend == "local" else subprocess.run(command).returncode
        except FileNotFoundError:
            refuse(f"--backend {job.backend}: {command[0]} is not installed here; --dry_run needs no cluster")
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

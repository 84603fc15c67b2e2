"""Backends of scripts/submit.py: for each a function Job -> Plan, the files to write and the command to run.

The scripts and specifications themselves are in scripts/templates, to be read and edited there: job.sh runs on every
node, slurm.sh is Slurm's batch script, the .yaml files are for Ray and SkyPilot. Standard library only, so that it runs
on a login node.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shlex
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import submit_snapshot

TEMPLATES = Path(__file__).resolve().parent / "templates"
PYTHON = re.compile(r"python[\d.]*")
LAUNCHERS = {"accelerate", "torchrun", "deepspeed", "launch.py", "torch.distributed.run"}  # they start the processes
CORES_PER_GPU = 8  # on Slurm without --cpus, where a job would have a single one
GRACE = 180  # seconds between the request to stop and the end, where a backend lets us choose


class Job(argparse.Namespace):
    """The flags of a submission by their names, with sizes per node, and what scripts/submit.py derives from them:

    ``run_id``, ``run_dir``, ``commands``, ``git`` (commit, dirty, diff); ``submitted``, the time and four random
    digits, which name the folder of its files and marks; ``tree`` of git, in a copy of which the job runs, or None: it
    runs in ``workdir``; ``label``, its name in the scheduler's lists.
    """

    @property
    def folder(self) -> str:
        """Return the folder of this submission: its scripts, marks, record, and the copy of the code."""
        return f"{self.run_dir}/{self.submitted}"

    @property
    def processes(self) -> int:
        """Ranks over all nodes: one per GPU, or one per node without GPUs."""
        return self.num_nodes * max(self.gpus, 1)


@dataclass(frozen=True)
class Plan:
    """Actions of a submission: files to write (path -> text), then a command to run."""

    files: dict[str, str]
    command: list[str]
    follow: dict[str, str] = field(default_factory=dict)  # logs, status, cancel -> a line of shell; {job}: its number


# ----------------------------------------------------------------------------------------------------------- templates


def in_yaml(value: Any) -> str:
    """Format a value as text between double quotes in YAML, or a number or ``true`` as it is written without quotes."""
    return json.dumps(value, ensure_ascii=False).removeprefix('"').removesuffix('"')


def fill(template: str, escape: Callable[[Any], str], fields: dict[str, Any]) -> str:
    """Fill scripts/templates/``template``: replace each {{name}} by the field of that name.

    A line is left out if a field in it is None or empty, and repeated if a field in it is a list, once for each item;
    a key with nothing left under it is left out, too. A placeholder that stands alone on its line takes a text of
    several lines, which is indented like it and not escaped.
    """
    kept: list[str] = []  # from the last line to the first, so that a key knows what is left under it
    below = 0  # indentation of the line below
    for line in reversed((TEMPLATES / template).read_text().splitlines()):
        indent = len(line) - len(line.lstrip())
        names = re.findall(r"\{\{(\w+)\}\}", line)
        values = {name: fields[name] for name in names}
        missing = any(value in (None, [], ()) for value in values.values())
        if missing or (line.endswith(":") and below <= indent):
            continue
        lists = [value for value in values.values() if isinstance(value, list | tuple)]
        if len(names) == 1 and line.strip() == f"{{{{{names[0]}}}}}":
            kept.append(textwrap.indent(fields[names[0]].rstrip("\n"), " " * indent))
        else:
            for i in reversed(range(len(lists[0]) if lists else 1)):
                row = {name: value[i] if isinstance(value, list | tuple) else value for name, value in values.items()}
                kept.append(re.sub(r"\{\{(\w+)\}\}", lambda m, row=row: escape(row[m[1]]), line))
        if line:
            below = indent
    return "\n".join(reversed(kept)) + "\n"


# -------------------------------------------------------------------------------------------- what runs on every node


def quote(word: str) -> str:
    """Quote a word for bash in printable characters: other characters would not survive every YAML reader."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return "$'" + re.sub(r"[^ -~]", lambda m: "".join(f"\\x{byte:02x}" for byte in os.fsencode(m[0])), escaped) + "'"


def line_of(words: list[str]) -> str:
    """Format words as a line of bash. An assignment in front of a command stays one, by way of ``env``."""
    assigns = re.match(r"[A-Za-z_]\w*=", words[0]) is not None
    return " ".join(quote(word) for word in (["env", *words] if assigns else words))


def split_at(word: str, words: tuple[str, ...] | list[str]) -> list[list[str]]:
    """Split ``words`` at every occurrence of ``word``."""
    parts: list[list[str]] = [[]]
    for w in words:
        if w == word:
            parts.append([])
        else:
            parts[-1].append(w)
    return parts


def file_at(words: list[str]) -> int | None:
    """Return the index of FILE.py in the first ``python FILE.py`` of a command, or None."""
    for i, word in enumerate(words[:-1]):
        if PYTHON.fullmatch(Path(word).name) and words[i + 1].endswith(".py"):
            return i + 1
    return None


def has_launcher(words: list[str]) -> bool:
    """Return True if a command starts its processes itself; arguments after its script do not count."""
    file = file_at(words)
    program = words if file is None else words[: file + 1]
    return any(Path(word).name in LAUNCHERS for word in program)


def copied_path(path: str, job: Job) -> str:
    """Return the path in the copy of an absolute path in the job's folder; any other path as it is."""
    if job.tree is None or not os.path.isabs(path):
        return path
    inside = submit_snapshot.relative(path, job.workdir)
    if inside.startswith("../"):
        return path
    return os.path.normpath(os.path.join(job.workdir, job.folder, "code", inside))


def in_copy(word: str, job: Job) -> str:
    """Replace absolute paths of code in a word by their paths in the copy: a file, ``v.py:score``, a line of shell."""
    if os.path.isabs(word) and word.endswith(submit_snapshot.CODE) and ":" not in word:
        return copied_path(word, job)
    return submit_snapshot.NAMED.sub(lambda found: copied_path(found[0], job), word)


def command_function(number: int, command: tuple[str, ...], job: Job) -> str:
    """Return the shell function of a command: its set-up, then the command in place of the shell."""
    *before, words = split_at("&&", [in_copy(word, job) for word in command])
    steps = [line_of(part) for part in before]
    file = file_at(words)
    if job.processes == 1 or file is None or has_launcher(words):
        steps.append(f"begin_command {line_of(words)}")
    else:
        launcher = ["scripts/launch.py", "--config_file", "scripts/zero2.yaml"]
        launcher += ["--num_machines", str(job.num_nodes), "--num_processes", str(job.processes)]
        place = '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"'
        rest = " ".join(quote(word) for word in words[file:])
        steps.append(f"begin_command {line_of([*words[:file], *launcher])} {place} {rest}")
    return f"command_{number}() {{\n    " + " &&\n    ".join(steps) + "\n}"


def node_script(
    job: Job,
    *,
    rank: str = "0",
    address: str = "127.0.0.1",
    port: str = "$(free_port)",
    task: str | None = None,
    together: int = 1,
    ask: str = 'kill -TERM "$child" 2>/dev/null',
) -> str:
    """Return the script of one node. ``rank``, ``address``, ``port`` and ``task`` are the backend's shell expressions.

    task: the number of the command to run, from 0; None runs all in turn. together: the number of nodes that the
    backend ends when the first leaves.
    """
    folder = f"{job.mount[0][1].rstrip('/')}/{job.run_id}" if job.mount else job.run_dir  # the mount outlives the node
    several = job.processes > 1
    commit = job.git.get("commit")
    workdir = None if job.workdir is None else quote(job.workdir)
    copy = None
    if job.tree is not None:
        copy = fill("copy.sh", str, {"copy": quote(f"{job.folder}/code"), "workdir": workdir})
    numbers = range(1, len(job.commands) + 1)
    fields = {
        "run_id": job.run_id,
        "commit": (commit or "unknown") + (", with uncommitted changes" if job.git.get("dirty") else ""),
        "code_commit": commit and commit + ("-dirty" if job.git.get("dirty") else ""),
        "workdir": workdir,
        "copy": copy,
        "bring_back": None if copy is None else '[ "${NODE_RANK:-0}" != 0 ] || bring_back',
        "run_dir": quote(folder) + ("" if task is None else f'/task_"{task}"'),
        "env": [f"{name}={quote(value)}" for name, value in job.env],
        "functions": fill("functions.sh", str, {"ask": ask}),
        "num_nodes": job.num_nodes if several else None,
        "rank": rank,
        "address": address,
        "port": port,
        "setup": job.setup or "true",
        "commands": "\n".join(command_function(i, c, job) for i, c in zip(numbers, job.commands, strict=True)),
        "submitted": job.submitted,
        "restarts": 0 if job.backend == "slurm" else job.max_retries,  # Slurm requeues the job instead
        "together": together,
        "grace": GRACE,
        "numbers": " ".join(map(str, numbers)) if task is None else f"$(({task} + 1))",
    }
    return fill("job.sh", str, fields)


# --------------------------------------------------------------------------------------------------------- the backends


def options(fields: dict[str, Any]) -> list[str]:
    """Return ``--name=value`` words, without the fields that have no value."""
    return [f"--{name}={value}" for name, value in fields.items() if value is not None]


def local(job: Job) -> Plan:
    """Plan a job on this machine: the script in a session of its own, the secrets already in the environment."""
    path = f"{job.folder}/job.sh"
    return Plan({path: node_script(job)}, ["bash", path])


def slurm(job: Job) -> Plan:
    """Plan ``sbatch``: a batch script on the first node starts the node script everywhere, and requeues on 75.

    Slurm signals the batch script GRACE seconds before the end. SIGTERM to srun kills the step; scancel sends it to
    every process of the step, so that nobody passes it on (STOP_REACHES_ALL tells scripts/launch.py).
    """
    array = job.array_parallelism is not None
    place = {"rank": '"$SLURM_NODEID"', "address": '"$MASTER_ADDR"', "port": '"$MASTER_PORT"'}
    task = "$SLURM_ARRAY_TASK_ID" if array else None
    script = node_script(job, **place, task=task, together=job.num_nodes, ask=": # scancel reaches every process")
    # The last task of an array has the number of the array as its SLURM_JOB_ID, which would mean all tasks.
    number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if array else "$SLURM_JOB_ID"
    cpus = job.cpus or (job.gpus * CORES_PER_GPU or None)
    srun = ["srun", "--kill-on-bad-exit=1", *options({"cpus-per-task": cpus}), "bash", f"{job.folder}/job.sh"]
    fields = {
        "run_id": job.run_id,
        "workdir": quote(job.workdir or "."),
        "run_dir": quote(job.run_dir) + (f'/task_"{task}"' if array else ""),
        "submitted": job.submitted,
        "functions": fill("functions.sh", str, {"ask": f'scancel --signal=TERM "{number}.0"'}),
        "srun": line_of(srun),
        "max_retries": job.max_retries,
        "job": f'"{number}"',
    }
    log = f"{job.run_dir}/slurm-{{}}.out"
    gpus = f"{job.gpu_type}:{job.gpus}" if job.gpu_type else job.gpus
    sbatch = {
        "job-name": job.label,
        "comment": job.run_id,
        "output": log.format("%A_%a" if array else "%j"),
        "open-mode": "append",
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "signal": f"B:USR1@{GRACE}",
        "export": "ALL",  # with the secrets
        "partition": ",".join(job.cluster) or None,
        "account": job.account,
        "qos": job.qos,
        "gpus-per-node": gpus or None,
        "cpus-per-task": cpus,
        "mem": None if job.mem is None else f"{job.mem}G",
        "time": None if job.time is None else -(-job.time // 60),  # minutes, rounded up
        "dependency": ":".join(["afterok", *job.depends_on]) if job.depends_on else None,
        "kill-on-invalid-dep": "yes" if job.depends_on else None,  # or it would wait for ever
        "array": f"0-{len(job.commands) - 1}%{job.array_parallelism}" if array else None,
    }
    files = {f"{job.folder}/job.sh": script, f"{job.folder}/batch.sh": fill("slurm.sh", str, fields)}
    words = ["sbatch", "--parsable", "--requeue", *options(sbatch), *job.scheduler_args, f"{job.folder}/batch.sh"]
    follow = {
        "logs": f"tail -n 50 {quote(job.run_dir)}/slurm-{{job}}{'_*' if array else ''}.out",
        "status": "squeue -h -o '%i %j %T %M %R' -j {job}",
        "cancel": "scancel {job}",
    }
    return Plan(files, words, follow)


def ray(job: Job) -> Plan:
    """Plan ``ray job submit``: the script travels in the environment of the job.

    Ray joins the words of an entrypoint by the rules of Windows (subprocess.list2cmdline) and gives the line to a
    shell. The one word with blanks below survives that, and shlex.join, unchanged; a script would not.
    """
    path = f"{job.folder}/ray.yaml"
    runner = "import base64,os; os.execvp('bash', ['bash', '-c', base64.b64decode(os.environ['JOB_SCRIPT'])])"
    address = options({"address": job.cluster[0] if job.cluster else None})
    submit = {
        "submission-id": f"{job.run_id}-{job.submitted}",  # Ray takes an id only once
        "working-dir": ".",
        "entrypoint-num-gpus": job.gpus or None,
        "entrypoint-num-cpus": job.cpus,
        "entrypoint-memory": None if job.mem is None else job.mem * 2**30,
        "runtime-env": path,
    }
    script = base64.b64encode(node_script(job).encode()).decode()
    text = fill("ray.yaml", in_yaml, {"script": script, "grace": GRACE})
    words = ["ray", "job", "submit", "--no-wait", *address, *options(submit), *job.scheduler_args]
    verbs = {"logs": "logs", "status": "status", "cancel": "stop"}
    follow = {name: line_of(["ray", "job", verb, *address, submit["submission-id"]]) for name, verb in verbs.items()}
    return Plan({path: text}, [*words, "--", "python3", "-c", runner], follow)


def skypilot(job: Job) -> Plan:
    """Plan ``sky jobs launch``: a managed job, which SkyPilot moves elsewhere when its machines are preempted.

    The port follows from the run id, since the nodes cannot ask each other. accelerate exits at once if it is taken.
    """
    place = {}
    if job.num_nodes > 1:
        place = {
            "rank": '"$SKYPILOT_NODE_RANK"',
            "address": '"$(printf \'%s\\n\' "$SKYPILOT_NODE_IPS" | head -n 1)"',
            "port": str(20000 + int(hashlib.sha256(job.run_id.encode()).hexdigest(), 16) % 10000),
        }
    buckets = [mount for mount in job.mount if "://" in mount[0]]
    volumes = [mount for mount in job.mount if "://" not in mount[0]]  # of Kubernetes: `sky volumes`
    fields = vars(job) | {
        "name": dns_name(job),
        "gpus": job.gpus or None,
        "preemptible": job.preemptible or None,
        "mount_source": [source for source, _ in buckets],
        "mount_path": [path for _, path in buckets],
        "volume": [source for source, _ in volumes],
        "volume_path": [path for _, path in volumes],
        "infra": job.cluster[0] if len(job.cluster) == 1 else None,
        "choice": job.cluster if len(job.cluster) > 1 else None,
        "script": node_script(job, **place),
    }
    path = f"{job.folder}/sky.yaml"
    secrets = [word for name in job.secret for word in ("--secret", name)]
    command = ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, *job.scheduler_args, path]
    follow = {
        "logs": f"sky jobs logs --name {fields['name']}",
        "status": f"sky jobs queue | grep -F {fields['name']}",
        "cancel": f"sky jobs cancel --yes --name {fields['name']}",
    }
    return Plan({path: fill("skypilot.yaml", in_yaml, fields)}, command, follow)


def dns_name(job: Job) -> str:
    """Convert the run id to a DNS label: lower-case letters, digits and -, at most 52 characters."""
    start, digest = job.run_id.rsplit("-", 1)
    start = re.sub("[^a-z0-9]+", "-", start.lower()).strip("-")
    start = start if start[:1].isalpha() else f"job-{start}"  # a name of SkyPilot begins with a letter
    return f"{start[:43].strip('-')}-{digest}"


BACKENDS = {plan.__name__: plan for plan in (local, slurm, ray, skypilot)}

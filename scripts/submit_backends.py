"""Backends of scripts/submit.py: for each a function Job -> Plan, the files to write and the commands to run.

The scripts and specifications themselves are in scripts/templates, to be read and edited there: job.sh runs on every
node, slurm.sh is Slurm's batch script, the .yaml files are for Ray, SkyPilot, Kubernetes and Beaker. Standard library
only, so that it runs on a login node.
"""

from __future__ import annotations

import dataclasses
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

TEMPLATES = Path(__file__).resolve().parent / "templates"
PYTHON = re.compile(r"python[\d.]*")
LAUNCHERS = {"accelerate", "torchrun", "deepspeed", "launch.py", "torch.distributed.run"}  # they start the processes
GRACE = 180  # seconds between the request to stop and the end, where a backend lets us choose


@dataclass(frozen=True)
class Job:
    """Command and resources of a job, the same for all backends. Sizes are per node."""

    backend: str
    name: str
    run_id: str
    run_dir: str
    submitted: str  # time of the submission; marks of finished commands belong to one submission
    commands: tuple[tuple[str, ...], ...]
    setup: str | None = None  # lines of shell
    git: dict[str, Any] = field(default_factory=dict)
    code: str | None = None  # files that differ from those of the image, as base64 of a tar
    workdir: str | None = None
    cluster: tuple[str, ...] = ()
    workspace: str | None = None
    account: str | None = None
    priority: str | None = None
    preemptible: bool = False
    num_nodes: int = 1
    gpus: int = 0
    gpu_type: str | None = None
    cpus: int | None = None
    mem: int | None = None  # GiB
    time: int | None = None  # seconds
    image: str | None = None
    mount: tuple[tuple[str, str], ...] = ()  # (source, absolute path)
    env: tuple[tuple[str, str], ...] = ()
    secret: tuple[str, ...] = ()
    max_retries: int = 10
    depends_on: tuple[str, ...] = ()
    array_parallelism: int | None = None

    @property
    def processes(self) -> int:
        """Ranks over all nodes: one per GPU, or one per node without GPUs."""
        return self.num_nodes * max(self.gpus, 1)


@dataclass(frozen=True)
class Plan:
    """Actions of a submission: files to write (path -> text), then commands to run, then secrets taken from here."""

    files: dict[str, str]
    commands: list[list[str]]
    from_shell: tuple[str, ...] = ()


# ----------------------------------------------------------------------------------------------------------- templates


def in_yaml(value: Any) -> str:
    """A value as it stands between double quotes in YAML, or a number or ``true`` as it stands there without."""
    return json.dumps(value, ensure_ascii=False).removeprefix('"').removesuffix('"')


def fill(template: str, escape: Callable[[Any], str], fields: dict[str, Any]) -> str:
    """The text of scripts/templates/``template`` with each {{name}} replaced by the field of that name.

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
    """A word for bash, in printable characters: what is not printable would not survive every YAML reader."""
    if word.isprintable():
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return "$'" + re.sub(r"[^ -~]", lambda m: "".join(f"\\x{byte:02x}" for byte in os.fsencode(m[0])), escaped) + "'"


def line_of(words: list[str]) -> str:
    """Words as a line of bash; an assignment in front of a command stays one, by way of ``env``."""
    assigns = re.match(r"[A-Za-z_]\w*=", words[0]) is not None
    return " ".join(quote(word) for word in (["env", *words] if assigns else words))


def split_at(word: str, words: tuple[str, ...] | list[str]) -> list[list[str]]:
    """The words between the occurrences of ``word``."""
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


def command_function(number: int, command: tuple[str, ...], job: Job) -> str:
    """The shell function of a command: its set-up, then the command in place of the shell."""
    *before, words = split_at("&&", command)
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


def functions(ask: str) -> str:
    """The shell functions of all scripts. ask: how a request to stop reaches $child."""
    return fill("functions.sh", str, {"ask": ask})


def node_script(
    job: Job,
    *,
    rank: str = "0",
    address: str = "127.0.0.1",
    port: str = "$(free_port)",
    task: str | None = None,
    restarts: int = 0,
    together: int = 1,
    ask: str = 'kill -TERM "$child" 2>/dev/null',
) -> str:
    """The script of one node. ``rank``, ``address``, ``port`` and ``task`` are shell expressions of the backend.

    task: the number of the command to run, from 0; None runs all in turn. restarts: how often a command that exits
    with 75 is started again right here. together: the number of nodes that the backend ends when the first leaves.
    """
    folder = f"{job.mount[0][1].rstrip('/')}/{job.run_id}" if job.mount else job.run_dir  # the mount outlives the node
    several = job.processes > 1
    numbers = range(1, len(job.commands) + 1)
    fields = {
        "run_id": job.run_id,
        "commit": job.git.get("commit", "unknown") + (", with uncommitted changes" if job.git.get("dirty") else ""),
        "workdir": None if job.workdir is None else quote(job.workdir),
        "code": None if job.code is None else f"base64 -d <<'CODE' | tar -xzof - || exit 1\n{job.code}CODE",
        "run_dir": quote(folder) + ("" if task is None else f'/task_"{task}"'),
        "env": [f"{name}={quote(value)}" for name, value in job.env],
        "functions": functions(ask),
        "num_nodes": job.num_nodes if several else None,
        "rank": rank,
        "address": address,
        "port": port,
        "setup": job.setup or "true",
        "commands": "\n".join(command_function(i, c, job) for i, c in zip(numbers, job.commands, strict=True)),
        "submitted": job.submitted,
        "restarts": restarts,
        "together": together,
        "grace": GRACE,
        "numbers": " ".join(map(str, numbers)) if task is None else f"$(({task} + 1))",
    }
    return fill("job.sh", str, fields)


# --------------------------------------------------------------------------------------------------------- the backends


def derived_port(job: Job) -> str:
    """A port that all nodes know without talking to each other; accelerate exits at once if it is taken."""
    return str(20000 + int(hashlib.sha256(job.run_id.encode()).hexdigest(), 16) % 10000)


def options(fields: dict[str, Any]) -> list[str]:
    """``--name=value`` words, without those that have no value."""
    return [f"--{name}={value}" for name, value in fields.items() if value is not None]


def shared_fields(job: Job) -> dict[str, Any]:
    """Return the fields that templates of several backends use."""
    return {
        **dataclasses.asdict(job),
        "gpus": job.gpus or None,
        "preemptible": job.preemptible or None,
        "secret": job.secret,
        "mount_source": [source for source, _ in job.mount],
        "mount_path": [path for _, path in job.mount],
        "grace": GRACE,
    }


def local(job: Job) -> Plan:
    """This machine: the script in a session of its own; the secrets are in the environment already."""
    path = f"{job.run_dir}/job.sh"
    return Plan({path: node_script(job, restarts=job.max_retries)}, [["bash", path]], job.secret)


def slurm(job: Job) -> Plan:
    """sbatch: a batch script on the first node starts the node script everywhere, and requeues the job on 75.

    Slurm signals the batch script GRACE seconds before the end. SIGTERM to srun kills the step; scancel sends it to
    every process of the step, so that nobody passes it on (STOP_REACHES_ALL tells scripts/launch.py).
    """
    array = job.array_parallelism is not None
    place = {"rank": '"$SLURM_NODEID"', "address": '"$MASTER_ADDR"', "port": '"$MASTER_PORT"'}
    task = "$SLURM_ARRAY_TASK_ID" if array else None
    script = node_script(job, **place, task=task, together=job.num_nodes, ask=": # scancel reaches every process")
    # The last task of an array has the number of the array as its SLURM_JOB_ID, which would mean all tasks.
    number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if array else "$SLURM_JOB_ID"
    srun = ["srun", "--kill-on-bad-exit=1", *options({"cpus-per-task": job.cpus}), "bash", f"{job.run_dir}/job.sh"]
    fields = {
        "run_id": job.run_id,
        "workdir": quote(job.workdir or "."),
        "run_dir": quote(job.run_dir) + (f'/task_"{task}"' if array else ""),
        "functions": functions(f'scancel --signal=TERM "{number}.0"'),
        "srun": line_of(srun),
        "max_retries": job.max_retries,
        "job": f'"{number}"',
    }
    log = "slurm-%A_%a.out" if array else "slurm-%j.out"
    gpus = f"{job.gpu_type}:{job.gpus}" if job.gpu_type else job.gpus
    sbatch = {
        "job-name": job.name,
        "output": f"{job.run_dir}/{log}",
        "open-mode": "append",
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "signal": f"B:USR1@{GRACE}",
        "export": "ALL",  # with the secrets
        "partition": ",".join(job.cluster) or None,
        "account": job.account,
        "qos": job.priority,
        "gpus-per-node": gpus or None,
        "cpus-per-task": job.cpus,
        "mem": None if job.mem is None else f"{job.mem}G",
        "time": None if job.time is None else -(-job.time // 60),  # minutes, rounded up
        "dependency": ":".join(["afterok", *job.depends_on]) if job.depends_on else None,
        "array": f"0-{len(job.commands) - 1}%{job.array_parallelism}" if array else None,
    }
    files = {f"{job.run_dir}/job.sh": script, f"{job.run_dir}/batch.sh": fill("slurm.sh", str, fields)}
    command = ["sbatch", "--parsable", "--requeue", *options(sbatch), f"{job.run_dir}/batch.sh"]
    return Plan(files, [command], job.secret)


def ray(job: Job) -> Plan:
    """ray job submit: the script travels in the environment of the job.

    Ray joins the words of an entrypoint by the rules of Windows (subprocess.list2cmdline) and gives the line to a
    shell. The one word with blanks below survives that, and shlex.join, unchanged; a script would not.
    """
    path = f"{job.run_dir}/ray.yaml"
    runner = "import os; os.execvp('bash', ['bash', '-c', os.environ['JOB_SCRIPT']])"
    submit = {
        "address": job.cluster[0] if job.cluster else None,
        "submission-id": f"{job.run_id}-{job.submitted}",  # Ray takes an id only once
        "working-dir": ".",
        "entrypoint-num-gpus": job.gpus or None,
        "entrypoint-num-cpus": job.cpus,
        "entrypoint-memory": None if job.mem is None else job.mem * 2**30,
        "runtime-env": path,
    }
    text = fill("ray.yaml", in_yaml, {"script": node_script(job, restarts=job.max_retries)})
    command = ["ray", "job", "submit", "--no-wait", *options(submit), "--", "python3", "-c", runner]
    return Plan({path: text}, [command])


def skypilot(job: Job) -> Plan:
    """sky jobs launch: a managed job, which SkyPilot moves elsewhere when its machines are taken away."""
    place = {}
    if job.num_nodes > 1:
        address = '"$(printf \'%s\\n\' "$SKYPILOT_NODE_IPS" | head -n 1)"'
        place = {"rank": '"$SKYPILOT_NODE_RANK"', "address": address, "port": derived_port(job)}
    fields = shared_fields(job) | {
        "name": dns_name(job),
        "infra": job.cluster[0] if len(job.cluster) == 1 else None,
        "choice": job.cluster if len(job.cluster) > 1 else None,
        "script": node_script(job, **place, restarts=job.max_retries),
    }
    path = f"{job.run_dir}/sky.yaml"
    secrets = [word for name in job.secret for word in ("--secret", name)]
    command = ["sky", "jobs", "launch", "--yes", "--detach-run", *secrets, path]
    return Plan({path: fill("skypilot.yaml", in_yaml, fields)}, [command], job.secret)


def dns_name(job: Job) -> str:
    """The run id as a DNS label: lower-case letters, digits and -, at most 52 so that pods can add to it."""
    start, digest = job.run_id.rsplit("-", 1)
    start = re.sub("[^a-z0-9]+", "-", start.lower()).strip("-")
    start = start if start[:1].isalpha() else f"job-{start}"  # the name of a Service begins with a letter
    return f"{start[:43].strip('-')}-{digest}"


def kubernetes(job: Job) -> Plan:
    """A batch/v1 Job with one pod per node, or per task of an array."""
    name = dns_name(job)
    array = job.array_parallelism is not None
    place = {}
    if job.num_nodes > 1:
        place = {"rank": '"$JOB_COMPLETION_INDEX"', "address": f"{name}-0.{name}", "port": derived_port(job)}
    completions = len(job.commands) if array else job.num_nodes
    fields = shared_fields(job) | {
        "name": name,
        "completions": completions,
        "parallelism": job.array_parallelism if array else completions,
        "retries": None if array else job.max_retries * completions,
        "retries_per_task": job.max_retries if array else None,
        "on_failure": "FailIndex" if array else "FailJob",
        "secret_object": [name.lower().replace("_", "-") for name in job.secret],
        "mount_name": [f"mount-{i}" for i in range(len(job.mount))],
        "script": node_script(job, **place, task="$JOB_COMPLETION_INDEX" if array else None),
    }
    path = f"{job.run_dir}/job.yaml"
    context = options({"context": job.cluster[0] if job.cluster else None})
    return Plan({path: fill("kubernetes.yaml", in_yaml, fields)}, [["kubectl", *context, "create", "-f", path]])


def beaker(job: Job) -> Plan:
    """beaker experiment create: one task, whose replicas are the nodes."""
    multi = job.num_nodes > 1
    place = {}
    if multi:
        address = '"$BEAKER_LEADER_REPLICA_HOSTNAME"'
        place = {"rank": '"$BEAKER_REPLICA_RANK"', "address": address, "port": derived_port(job)}
    docker = job.image.startswith("docker:")
    fields = shared_fields(job) | {
        "beaker_image": None if docker else job.image,
        "docker_image": job.image.removeprefix("docker:") if docker else None,
        "replicas": job.num_nodes if multi else None,
        "multi": True if multi else None,
        "start_timeout": "15m" if multi else None,
        "script": node_script(job, **place, restarts=job.max_retries),
    }
    path = f"{job.run_dir}/beaker.yaml"
    workspace = ["--workspace", job.workspace] if job.workspace else []
    return Plan({path: fill("beaker.yaml", in_yaml, fields)}, [["beaker", "experiment", "create", *workspace, path]])


SIZES = {"gpus", "cpus", "mem"}
CONTAINER = {"image", "mount", "secret"}
# Each backend's function, and the flags it takes beside those in EVERYWHERE.
BACKENDS: dict[str, tuple[Callable[[Job], Plan], set[str]]] = {
    "local": (local, {"gpus", "secret", "workdir"}),
    "slurm": (
        slurm,
        SIZES | {"cluster", "account", "priority", "num_nodes", "time", "secret", "workdir"}
        | {"depends_on", "array_parallelism"},
    ),
    "ray": (ray, SIZES | {"cluster"}),
    "skypilot": (skypilot, SIZES | CONTAINER | {"cluster", "preemptible", "num_nodes"}),
    "kubernetes": (
        kubernetes,
        SIZES | CONTAINER | {"cluster", "workspace", "priority", "num_nodes", "time", "workdir", "array_parallelism"},
    ),
    "beaker": (
        beaker,
        SIZES | CONTAINER | {"cluster", "workspace", "account", "priority", "preemptible", "num_nodes", "time"}
        | {"workdir"},
    ),
}  # fmt: skip

"""Runs commands on this machine or hands them to a cluster: the same line, another --backend.

    python scripts/submit.py --backend local -- python grpo.py --beta 0.03
    python scripts/submit.py --backend slurm --partition h100 --gpus 8 --num_nodes 2 --time 12h -- python grpo.py ...
    python scripts/submit.py --backend slurm --array_parallelism 4 -- python a.py -- python b.py -- python c.py

Several commands, each after its own ``--``, run one after the other; with --array_parallelism they are tasks of their
own. --dry_run prints exactly what would be written and run, and needs no cluster. Whatever the backend, a command

* gets its words as they were given here, whatever is in them;
* finds RUN_ID and RUN_DIR in its environment, the same after a restart, and a WANDB_RUN_ID that continues its run;
* is asked to stop with SIGTERM, and starts again, at most --max_retries times, if it ends with 75 ("saved, start me
  again"). Any other code is final, so a crash is not repeated;
* ``python FILE.py ...``: goes through ``accelerate launch`` (scripts/launch.py) if the job has several GPUs or nodes.

Secrets are given by name alone. Their values come from this shell or from the cluster's own store; a value that would
end up in a file or in a command is an error. docs/launching.md has an example for each backend.

Standard library only, so that it runs on a login node. Each backend is one pure function, Job -> Plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

EVERYWHERE = {"backend", "name", "run_dir", "env", "max_retries", "dry_run"}
SECRET_NAME = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
GRACE = 180  # seconds between the request to stop and the end, where a backend lets us choose
FREE_PORT = 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'


@dataclass(frozen=True)
class Job:
    """What is to run and on what, the same for all backends. Sizes are per node."""

    backend: str
    name: str
    run_id: str
    run_dir: str
    submitted: str  # time of the submission; marks of finished commands belong to one submission
    commands: tuple[tuple[str, ...], ...]
    git: dict[str, Any] = field(default_factory=dict)
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
        """Ranks over all nodes: one a GPU, one a node without GPUs."""
        return self.num_nodes * max(self.gpus, 1)


@dataclass(frozen=True)
class Plan:
    """What a submission does: files to write (path -> text), then commands to run, then secrets taken from here."""

    files: dict[str, str]
    commands: list[list[str]]
    from_shell: tuple[str, ...] = ()


def refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


# -------------------------------------------------------------------------------------------- what runs on every node


def python_of(job: Job) -> str:
    """The interpreter that the commands name, for the one line of Python that a script itself needs."""
    return next((c[0] for c in job.commands if is_python(c)), "python3")


def is_python(command: tuple[str, ...]) -> bool:
    return re.fullmatch(r"python[\d.]*", Path(command[0]).name) is not None


def launched(command: tuple[str, ...], job: Job) -> str:
    """A command as a line of shell; ``python FILE.py`` under accelerate if the job has several processes."""
    if job.processes == 1 or not is_python(command):
        return shlex.join(command)
    launcher = [command[0], "scripts/launch.py", "--config_file", "scripts/zero2.yaml"]
    launcher += ["--num_machines", str(job.num_nodes), "--num_processes", str(job.processes)]
    place = '--machine_rank "$NODE_RANK" --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"'
    return f"{shlex.join(launcher)} {place} {shlex.join(command[1:])}"


# bash returns from `wait` when a trap ran, and the command may still be busy saving: then wait again.
WAIT = """\
child= asked= stopping=0
ask() { # once: a second SIGTERM often means "leave at once"
    [ -n "$child" ] && [ "$asked" != "$child" ] && asked=$child && @ASK@
}
trap 'stopping=1 again=1; ask' TERM INT USR1
finish() { # wait for $child, whatever happens meanwhile; its exit code
    [ "$stopping" = 0 ] || ask
    local again=1 code
    while [ "$again" = 1 ]; do
        again=0
        wait "$child"
        code=$?
    done
    child=
    return "$code"
}"""


NODES_LEFT = ['        [ "$(cat "$RUN_DIR"/exit.* | wc -l)" -lt "$NUM_NODES" ] || break', "        sleep 1", "    done"]


def job_script(
    job: Job,
    *,
    rank: str = "0",
    address: str = "127.0.0.1",
    port: str | None = None,
    task: str | None = None,
    repeat: bool = True,
    together: bool = False,
    ask: str = 'kill -TERM "$child" 2>/dev/null',
) -> str:
    """The script of one node. ``rank``, ``address``, ``port``, ``task`` are shell expressions of the backend.

    port: None finds a free one, which serves where there is a single node. task: the number of the command to run,
    None for all in turn. repeat: start a command that ends with 75 again right here, where the backend cannot.
    together: the backend ends all nodes when one has left with a code, so the nodes that saved wait for the others.
    ask: how a request to stop reaches the command.
    """
    dirty = ", with uncommitted changes" if job.git.get("dirty") else ""
    lines = ["#!/usr/bin/env bash", f"# {job.run_id}: commit {job.git.get('commit', 'unknown')}{dirty}", "set -u"]
    if job.workdir is not None:
        lines.append(f"cd {shlex.quote(job.workdir)} || exit 1")
    suffix = "" if task is None else f"/task_{task}"
    folder = f"{job.mount[0][1].rstrip('/')}/{job.run_id}" if job.mount else job.run_dir  # the mount outlives the node
    lines.append(f"export RUN_ID={job.run_id} RUN_DIR={shlex.quote(folder)}{suffix} WANDB_RESUME=allow")
    lines += [f"export {name}={shlex.quote(value)}" for name, value in job.env]
    if job.processes > 1:
        if port is None:
            port = f"$({shlex.join([python_of(job), '-c', FREE_PORT])})"
        lines.append(f"export NUM_NODES={job.num_nodes} NODE_RANK={rank} MASTER_ADDR={address} MASTER_PORT={port}")
    again = (
        f'[ "$code" = 75 ] && [ "$attempt" -lt {job.max_retries} ] || return "$code"' if repeat else 'return "$code"'
    )
    lines += [
        'mkdir -p "$RUN_DIR"',
        "",
        WAIT.replace("@ASK@", ask),
        "run() { # run NUMBER WORDS...: a command, unless it finished before a restart of this submission",
        f'    local number=$1 mark="$RUN_DIR/finished.{job.submitted}.$1.${{NODE_RANK:-0}}" attempt=0 code',
        "    shift",
        '    [ ! -e "$mark" ] || return 0',
        '    export WANDB_RUN_ID="$RUN_ID-$number"',
        "    while :; do",
        '        [ "$stopping" = 0 ] || return 75',
        *(['        [ "$attempt" = 0 ] || echo "exit code 75: start $((attempt + 1))" >&2'] * repeat),
        '        "$@" &',
        "        child=$!",
        "        finish",
        "        code=$?",
        '        [ "$code" != 0 ] || { touch "$mark"; return 0; }',
        f"        {again}",
        *(["        attempt=$((attempt + 1))"] * repeat),
        "    done",
        "}",
        "leave() {",
        '    echo "$1" >"$RUN_DIR/exit.${NODE_RANK:-0}"',
        *([f'    [ "$1" != 75 ] || for _ in {{1..{GRACE}}}; do', *NODES_LEFT] if together else []),
        '    exit "$1"',
        "}",
        "",
    ]
    runs = [f"run {i} {launched(command, job)} || leave $?" for i, command in enumerate(job.commands, 1)]
    if task is None:
        lines += runs
    else:
        lines += [f"case {task} in", *(f"{i}) {run} ;;" for i, run in enumerate(runs)), "esac"]
    return "\n".join([*lines, "leave 0"]) + "\n"


def derived_port(job: Job) -> str:
    """A port that all nodes know without talking to each other; accelerate says so at once if it is taken."""
    return str(20000 + int(hashlib.sha256(job.run_id.encode()).hexdigest(), 16) % 10000)


def to_yaml(value: Any, indent: int = 0) -> str:
    """Plain data as YAML: strings as JSON writes them (which is YAML), plain text of several lines as a block."""
    pad = "  " * indent
    if isinstance(value, dict) and value:
        return "\n".join(f"{pad}{key}:{_item(item, indent)}" for key, item in value.items())
    if isinstance(value, list) and value:
        return "\n".join(f"{pad}-{_item(item, indent, nested=False)}" for item in value)
    text = json.dumps(value, ensure_ascii=False)  # YAML wants more escaped than JSON:
    return pad + re.sub("[\x7f-\x9f\u2028\u2029\ufeff]", lambda m: f"\\u{ord(m[0]):04x}", text)


def _item(item: Any, indent: int, nested: bool = True) -> str:
    """What stands after ``key:`` (nested: on lines of its own) or after ``-`` (on the same line)."""
    if isinstance(item, str) and re.fullmatch(r"[#\w][ -~\n]*[!-~]\n", item):
        return " |\n" + "\n".join("  " * (indent + 1) + line if line else "" for line in item[:-1].split("\n"))
    if nested and isinstance(item, dict | list) and item:
        return "\n" + to_yaml(item, indent + 1)
    return " " + to_yaml(item, indent + 1).lstrip()


def without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


# --------------------------------------------------------------------------------------------------------- the backends


def local(job: Job) -> Plan:
    """This machine: the script in a session of its own; the secrets are in the environment already."""
    path = f"{job.run_dir}/job.sh"
    return Plan({path: job_script(job)}, [["bash", path]], job.secret)


def slurm(job: Job) -> Plan:
    """sbatch: a batch script on the first node starts the node script everywhere, and requeues the job on 75.

    Slurm signals the batch script GRACE seconds before the end. SIGTERM to srun kills the step; scancel sends it to
    every process of the step, so nobody passes it on (STOP_REACHES_ALL, for scripts/launch.py too). SIGTERM to the
    batch script itself is a plain scancel, which is meant, or a preemption after which Slurm requeues by itself.
    """
    array = job.array_parallelism is not None
    multi = job.num_nodes > 1
    node_script = job_script(
        job,
        rank='"$SLURM_NODEID"' if multi else "0",
        address='"$MASTER_ADDR"' if multi else "127.0.0.1",
        port='"$MASTER_PORT"' if multi else None,
        task='"$SLURM_ARRAY_TASK_ID"' if array else None,
        repeat=False,
        together=multi,
        ask=":",
    )
    run_dir = shlex.quote(job.run_dir) + ('/task_"$SLURM_ARRAY_TASK_ID"' if array else "")
    srun = ["srun", "--kill-on-bad-exit=1", *([f"--cpus-per-task={job.cpus}"] if job.cpus else [])]
    lines = ["#!/usr/bin/env bash", f"# {job.run_id}: batch script, runs on the first node", "set -u"]
    lines += [f"cd {shlex.quote(job.workdir or '.')} || exit 1", f"RUN_DIR={run_dir}"]
    if multi:
        lines.append('MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
        lines.append(f"MASTER_PORT=$({shlex.join([python_of(job), '-c', FREE_PORT])})")
        lines.append("export MASTER_ADDR MASTER_PORT")
    # The last task of an array has the array's own number as SLURM_JOB_ID: that would mean all of them.
    number = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID' if array else '"$SLURM_JOB_ID'
    lines += [
        "export STOP_REACHES_ALL=1 cancelled=0",
        WAIT.replace("@ASK@", f'scancel --signal=TERM {number}.0"'),
        "trap '[ \"$stopping\" = 1 ] || cancelled=1; stopping=1 again=1; ask' TERM",
        'rm -f "$RUN_DIR"/exit.*',
        f"{shlex.join([*srun, 'bash', f'{job.run_dir}/job.sh'])} &",
        "child=$!",
        "finish",
        "code=$?",
        "# srun has the highest code of all nodes: 75 counts only if no node ended with another one.",
        'if [ "$code" = 75 ] && [ "$cancelled" = 0 ] && ! cat "$RUN_DIR"/exit.* | grep -qvx 75 &&',
        f'    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.max_retries} ]; then',
        f'    scontrol requeue {number}"',
        "fi",
        'exit "$code"',
    ]
    log = "slurm-%A_%a.out" if array else "slurm-%j.out"
    gpus = f"{job.gpu_type}:{job.gpus}" if job.gpu_type else str(job.gpus)
    options = {
        "job-name": job.name,
        "output": f"{job.run_dir}/{log}",
        "open-mode": "append",
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        "signal": f"B:USR1@{GRACE}",
        "export": "ALL",  # the secrets with it
        "partition": ",".join(job.cluster) or None,
        "account": job.account,
        "qos": job.priority,
        "gpus-per-node": gpus if job.gpus else None,
        "cpus-per-task": job.cpus,
        "mem": None if job.mem is None else f"{job.mem}G",
        "time": None if job.time is None else -(-job.time // 60),  # minutes, rounded up
        "dependency": ":".join(["afterok", *job.depends_on]) if job.depends_on else None,
        "array": f"0-{len(job.commands) - 1}%{job.array_parallelism}" if array else None,
    }
    sbatch = ["sbatch", "--parsable", "--requeue", *(f"--{k}={v}" for k, v in without_none(options).items())]
    files = {f"{job.run_dir}/job.sh": node_script, f"{job.run_dir}/batch.sh": "\n".join(lines) + "\n"}
    return Plan(files, [[*sbatch, f"{job.run_dir}/batch.sh"]], job.secret)


def ray(job: Job) -> Plan:
    """ray job submit: the script travels in the environment of the job.

    Ray joins the words of an entrypoint by Windows' rules (subprocess.list2cmdline) and gives the line to a shell. The
    one word with blanks below comes through that, and through shlex.join, as it is; a script would not.
    """
    runner = "import os; os.execvp('bash', ['bash', '-c', os.environ['JOB_SCRIPT']])"
    options = {
        "address": job.cluster[0] if job.cluster else None,
        "submission-id": f"{job.run_id}-{job.submitted}",  # Ray takes an id only once
        "working-dir": ".",
        "entrypoint-num-gpus": job.gpus or None,
        "entrypoint-num-cpus": job.cpus,
        "entrypoint-memory": None if job.mem is None else job.mem * 2**30,
        "runtime-env-json": json.dumps({"env_vars": {"JOB_SCRIPT": job_script(job)}}),
    }
    submit = ["ray", "job", "submit", "--no-wait", *(f"--{k}={v}" for k, v in without_none(options).items())]
    return Plan({}, [[*submit, "--", "python3", "-c", runner]])


def skypilot(job: Job) -> Plan:
    """sky jobs launch: a managed job, which SkyPilot moves elsewhere when its machines are taken away."""
    multi = job.num_nodes > 1
    address = '"$(printf \'%s\\n\' "$SKYPILOT_NODE_IPS" | head -n 1)"'
    script = job_script(
        job,
        rank='"$SKYPILOT_NODE_RANK"' if multi else "0",
        address=address if multi else "127.0.0.1",
        port=derived_port(job) if multi else None,
    )
    resources = {
        "infra": job.cluster[0] if len(job.cluster) == 1 else None,
        "any_of": [{"infra": infra} for infra in job.cluster] if len(job.cluster) > 1 else None,
        "accelerators": f"{job.gpu_type}:{job.gpus}" if job.gpus else None,
        "cpus": f"{job.cpus}+" if job.cpus else None,
        "memory": f"{job.mem}+" if job.mem else None,
        "image_id": job.image,
        "use_spot": job.preemptible or None,
        "job_recovery": {"max_restarts_on_errors": 0},
    }
    spec = {
        "name": k8s_name(job),
        "workdir": ".",
        "num_nodes": job.num_nodes,
        "resources": without_none(resources),
        "file_mounts": {path: {"source": source, "mode": "MOUNT"} for source, path in job.mount} or None,
        "secrets": dict.fromkeys(job.secret) or None,
        "run": script,
    }
    path = f"{job.run_dir}/sky.yaml"
    command = ["sky", "jobs", "launch", "--yes", "--detach-run"]
    command += [word for name in job.secret for word in ("--secret", name)]
    return Plan({path: to_yaml(without_none(spec)) + "\n"}, [[*command, path]], job.secret)


def k8s_name(job: Job) -> str:
    """The run id as a DNS label: small letters, digits and -, at most 52 so that pods can add to it."""
    start, digest = job.run_id.rsplit("-", 1)
    start = re.sub("[^a-z0-9]+", "-", start.lower()).strip("-")
    start = start if start[:1].isalpha() else f"job-{start}"  # the name of a Service begins with a letter
    return f"{start[:43].strip('-')}-{digest}"


def kubernetes(job: Job) -> Plan:
    """A batch/v1 Job, one pod a node; the script in a ConfigMap, since Kubernetes expands $(NAME) in arguments."""
    name, multi, array = k8s_name(job), job.num_nodes > 1, job.array_parallelism is not None
    script = job_script(
        job,
        rank='"$JOB_COMPLETION_INDEX"' if multi else "0",
        address=f"{name}-0.{name}" if multi else "127.0.0.1",
        port=derived_port(job) if multi else None,
        task='"$JOB_COMPLETION_INDEX"' if array else None,
        repeat=False,
    )
    amounts = {
        "cpu": None if job.cpus is None else str(job.cpus),
        "memory": None if job.mem is None else f"{job.mem}Gi",
        "nvidia.com/gpu": str(job.gpus) if job.gpus else None,
    }
    amounts = without_none(amounts)
    volumes = [
        {"name": "job", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # the 64 MB of a container are too few for NCCL
        *({"name": f"mount-{i}", "persistentVolumeClaim": {"claimName": c}} for i, (c, _) in enumerate(job.mount)),
    ]
    mounts = [{"name": "job", "mountPath": "/job"}, {"name": "shm", "mountPath": "/dev/shm"}]
    mounts += [{"name": f"mount-{i}", "mountPath": path} for i, (_, path) in enumerate(job.mount)]
    secrets = [
        {"name": n, "valueFrom": {"secretKeyRef": {"name": n.lower().replace("_", "-"), "key": n}}} for n in job.secret
    ]
    container = {
        "name": "main",
        "image": job.image,
        "command": ["bash", "/job/job.sh"],
        "env": secrets or None,
        "resources": {"requests": amounts, "limits": amounts} if amounts else None,
        "volumeMounts": mounts,
    }
    pod = {
        "subdomain": name if multi else None,
        "priorityClassName": job.priority,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "containers": [without_none(container)],
        "volumes": volumes,
    }
    completions = len(job.commands) if array else job.num_nodes
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},  # evicted or preempted: not its fault
        {"action": "Count", "onExitCodes": {"operator": "In", "values": [75]}},
        {"action": "FailIndex" if array else "FailJob", "onExitCodes": {"operator": "NotIn", "values": [75]}},
    ]
    spec = {
        "completions": completions,
        "parallelism": job.array_parallelism if array else completions,
        "completionMode": "Indexed",
        # Every pod that ends with 75 counts. Tasks of an array fail one by one, which Kubernetes knows since 1.29.
        **({"backoffLimitPerIndex": job.max_retries} if array else {"backoffLimit": job.max_retries * completions}),
        "activeDeadlineSeconds": job.time,
        "podFailurePolicy": {"rules": rules},
        "template": {"metadata": {"labels": {"job": name}}, "spec": without_none(pod)},
    }
    meta = without_none({"name": name, "namespace": job.workspace})
    objects = [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {"job.sh": script}}]
    if multi:  # names for the pods, before they are ready
        service = {"clusterIP": "None", "selector": {"job": name}, "publishNotReadyAddresses": True}
        objects.append({"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service})
    objects.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": without_none(spec)})
    path = f"{job.run_dir}/job.yaml"
    context = [f"--context={job.cluster[0]}"] if job.cluster else []
    text = "---\n".join(to_yaml(o) + "\n" for o in objects)
    return Plan({path: text}, [["kubectl", *context, "create", "-f", path]])


def beaker(job: Job) -> Plan:
    """beaker experiment create: one task, its replicas the nodes."""
    multi = job.num_nodes > 1
    script = job_script(
        job,
        rank='"$BEAKER_REPLICA_RANK"' if multi else "0",
        address='"$BEAKER_LEADER_REPLICA_HOSTNAME"' if multi else "127.0.0.1",
        port=derived_port(job) if multi else None,
    )
    resources = {
        "gpuCount": job.gpus or None,
        "cpuCount": job.cpus,
        "memory": None if job.mem is None else f"{job.mem}GiB",
        "sharedMemory": "10GiB",
    }
    together = {
        "replicas": job.num_nodes,
        "leaderSelection": True,
        "hostNetworking": True,
        "propagateFailure": True,
        "propagatePreemption": True,
        "synchronizedStartTimeout": "15m",
    }
    docker = job.image.startswith("docker:")
    task = {
        "name": job.name,
        "image": {"docker" if docker else "beaker": job.image.removeprefix("docker:")},
        "command": ["bash", "-c"],
        "arguments": [script],
        "envVars": [{"name": name, "secret": name} for name in job.secret] or None,
        "datasets": [{"mountPath": path, "source": {"weka": source}} for source, path in job.mount] or None,
        "resources": without_none(resources),
        "context": without_none({"priority": job.priority, "preemptible": job.preemptible or None}) or None,
        "constraints": {"cluster": list(job.cluster)} if job.cluster else None,
        "timeout": None if job.time is None else f"{job.time}s",
        "result": {"path": "/results"},
        **(together if multi else {}),
    }
    spec = {"version": "v2", "description": job.run_id, "budget": job.account, "tasks": [without_none(task)]}
    path = f"{job.run_dir}/beaker.yaml"
    command = ["beaker", "experiment", "create", *(["--workspace", job.workspace] if job.workspace else []), path]
    return Plan({path: to_yaml(without_none(spec)) + "\n"}, [command])


BACKENDS = {
    "local": (local, {"gpus", "secret", "workdir"}),
    "slurm": (
        slurm,
        {"cluster", "account", "priority", "num_nodes", "gpus", "cpus", "mem", "time", "secret", "workdir"}
        | {"depends_on", "array_parallelism"},
    ),
    "ray": (ray, {"cluster", "gpus", "cpus", "mem"}),
    "skypilot": (
        skypilot,
        {"cluster", "preemptible", "num_nodes", "gpus", "cpus", "mem", "image", "mount", "secret"},
    ),
    "kubernetes": (
        kubernetes,
        {"cluster", "workspace", "priority", "num_nodes", "gpus", "cpus", "mem", "time", "image", "mount", "secret"}
        | {"workdir", "array_parallelism"},
    ),
    "beaker": (
        beaker,
        {"cluster", "workspace", "account", "priority", "preemptible", "num_nodes", "gpus", "cpus", "mem", "time"}
        | {"image", "mount", "secret", "workdir"},
    ),
}
# What to do instead; elsewhere: leave the flag out.
INSTEAD = {
    ("slurm", "preemptible"): "name a preemptible --partition or --qos",
    ("slurm", "image"): "start the container in the command: -- apptainer exec image.sif python grpo.py ...",
    ("slurm", "workspace"): "--account says who pays",
    ("ray", "secret"): "Ray shows a job's environment in its dashboard; export the variable where `ray start` runs",
    ("ray", "num_nodes"): "Ray runs a command on one node; for several use slurm, skypilot, kubernetes or beaker",
    ("kubernetes", "preemptible"): "give a preemptible class as --priority",
    ("local", "num_nodes"): "for several nodes use slurm, skypilot, kubernetes or beaker",
}


# --------------------------------------------------------------------------------------------------------- command line


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[list[str]]]:
    """Flags before the first ``--``, and the commands after each. Dashes in the names of flags serve as well."""
    cut = argv.index("--") if "--" in argv else len(argv)
    flags, commands = argv[:cut], [[]]
    for word in argv[cut + 1 :]:
        if word == "--":
            commands.append([])
        else:
            commands[-1].append(word)
    flags = [re.sub(r"^--[^=]+", lambda m: "--" + m[0][2:].replace("-", "_"), f) for f in flags]
    p = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="submit.py --backend BACKEND [flags] -- COMMAND [-- COMMAND ...]",
    )
    add = p.add_argument
    add("--backend", required=True, choices=BACKENDS, help="where to run")
    add("--name", help="of the job; default: the script's")
    add("--run_dir", help="folder of the job: scripts, logs, record; default: runs/jobs/<run id>")
    add("--workdir", help="folder the commands run in, on the node; default: this one, or the image's")
    where = (
        "slurm: partition, skypilot: infra, beaker: cluster (repeat for a choice), kubernetes: context, ray: address"
    )
    add("--cluster", "--partition", action="append", default=[], help=where)
    add("--workspace", help="beaker: workspace, kubernetes: namespace")
    add("--account", "--budget", help="who pays")
    add("--priority", "--qos", help="slurm: QOS, kubernetes: priority class, beaker: priority")
    add("--preemptible", action="store_true", help="cheaper or more machines that can be taken away")
    add("--num_nodes", type=int, default=1)
    add("--gpus", help="on each node: 8, or with a type h100:8")
    add("--cpus", type=int, help="on each node")
    add("--mem", help="on each node: 64G")
    add("--time", help="limit: 90m, 12h, 12:00:00 or 1-12:00:00")
    add("--image", help="container image; beaker: an image there, or docker:NAME")
    where = "storage that outlives the job; kubernetes: volume claim, skypilot: bucket, beaker: weka bucket"
    add("--mount", action="append", default=[], metavar="SOURCE:/PATH", help=where)
    add("--env", action="append", default=[], metavar="NAME[=VALUE]", help="without value: this shell's")
    add("--secret", action="append", default=[], metavar="NAME", help="by name only; see docs/launching.md")
    add("--max_retries", type=int, default=10, help="starts after an exit code of 75")
    add("--depends_on", action="append", default=[], metavar="ID", help="start when this job has succeeded")
    add("--array_parallelism", type=int, metavar="N", help="each command a task of its own, N at the same time")
    add("--dry_run", action="store_true", help="print what would be written and run, and stop")
    args = p.parse_args(flags)
    known = EVERYWHERE | BACKENDS[args.backend][1]
    for flag, value in vars(args).items():
        if flag not in known and value != p.get_default(flag):
            remedy = INSTEAD.get((args.backend, flag), "leave it out")
            refuse(f"--{flag}: --backend {args.backend} has no such setting; {remedy}")
    return args, commands


def seconds(text: str) -> int:
    """A limit as people write it to sbatch (HH:MM:SS, D-HH:MM:SS) or with a unit (90m, 12h, 2d)."""
    if unit := re.fullmatch(r"(\d+)([smhd])", text):
        return int(unit[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[unit[2]]
    if clock := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, secs = (int(part or 0) for part in clock.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + secs
    refuse(f"--time {text}: not a duration; write 90m, 12h, 12:00:00 or 1-12:00:00")


def make_job(args: argparse.Namespace, commands: list[list[str]], environ: dict[str, str]) -> Job:
    """Check what the backends have in common. The run id depends on name and commands alone."""
    if not all(commands):
        refuse("no command; write it after --, for example: submit.py --backend local -- python grpo.py --beta 0.03")
    name = args.name or Path(next((w for w in commands[0] if w.endswith((".py", ".sh"))), commands[0][0])).stem
    if not re.fullmatch(r"[A-Za-z0-9][\w.=+,-]*", name):
        refuse(f"--name {name}: use letters, digits and _ . = + , - only")
    run_id = f"{name}-{hashlib.sha256(json.dumps([name, commands]).encode()).hexdigest()[:8]}"
    run_dir = args.run_dir or f"runs/jobs/{run_id}"
    if not re.fullmatch(r"[\w./=+,@-]+", run_dir):
        refuse(f"--run_dir {run_dir}: use letters, digits and _ . / = + , @ - only")
    here = args.backend in ("local", "slurm")  # the files written here are those that run
    if here and args.workdir:
        run_dir = os.path.abspath(run_dir)
    gpu_type, _, count = (args.gpus or "0").rpartition(":")
    if not count.isdecimal() or ":" in gpu_type:
        refuse(f"--gpus {args.gpus}: write 8, or with a type h100:8")
    if args.backend == "skypilot" and int(count) > 0 and not gpu_type:
        refuse(f"--gpus {args.gpus}: skypilot needs a type, for example --gpus H100:{count}")
    if gpu_type and args.backend in ("local", "ray", "kubernetes", "beaker"):
        refuse(f"--gpus {args.gpus}: --backend {args.backend} takes a number only; choose the type by --cluster")
    for flag in ("num_nodes", "cpus", "array_parallelism"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            refuse(f"--{flag} {getattr(args, flag)}: must be at least 1")
    if args.max_retries < 0:
        refuse(f"--max_retries {args.max_retries}: must not be negative; 0 never starts again")
    mem = None
    if args.mem is not None:
        found = re.fullmatch(r"(\d+)(G|GB|Gi|GiB)", args.mem)
        mem = int(found[1]) if found else refuse(f"--mem {args.mem}: write GiB as 64G")
    if args.backend in ("kubernetes", "beaker") and args.image is None:
        refuse(f"--image: --backend {args.backend} needs one, with the packages and this repository in it")
    if args.backend in ("ray", "kubernetes") and len(args.cluster) > 1:
        refuse(f"--cluster {' --cluster '.join(args.cluster)}: --backend {args.backend} takes one")
    if args.array_parallelism is not None and args.num_nodes > 1 and args.backend == "kubernetes":
        refuse(
            "--array_parallelism with --num_nodes above 1: a Kubernetes Job is either; submit the commands one by one"
        )
    mounts = []
    for mount in args.mount:
        source, _, path = mount.rpartition(":")
        if not source or not path.startswith("/"):
            refuse(f"--mount {mount}: write SOURCE:/PATH")
        mounts.append((source, path))
    env = []
    for pair in args.env:
        key, equals, value = pair.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", key):
            refuse(f"--env {key}: not a name of a variable; write NAME=VALUE, or NAME for this shell's value")
        if SECRET_NAME.search(key):
            refuse(f"--env {key}: looks like a secret, and its value would be written down; use --secret {key}")
        if not equals and key not in environ:
            refuse(f"--env {key}: not set in this shell; write --env {key}=VALUE or export it first")
        env.append((key, value if equals else environ[key]))
    for secret in args.secret:
        if not re.fullmatch(r"[A-Za-z_]\w*", secret):
            refuse(
                f"--secret {secret.partition('=')[0]}: a name only; export the value in this shell or store it there"
            )
    job = Job(
        backend=args.backend,
        name=name,
        run_id=run_id,
        run_dir=run_dir.rstrip("/"),
        submitted=time.strftime("%Y%m%d-%H%M%S"),
        commands=tuple(tuple(c) for c in commands),
        git=git_state([word for command in commands for word in command]),
        workdir=args.workdir or (os.getcwd() if here else None),
        cluster=tuple(args.cluster),
        workspace=args.workspace,
        account=args.account,
        priority=args.priority,
        preemptible=args.preemptible,
        num_nodes=args.num_nodes,
        gpus=int(count),
        gpu_type=gpu_type or None,
        cpus=args.cpus,
        mem=mem,
        time=None if args.time is None else seconds(args.time),
        image=args.image,
        mount=tuple(mounts),
        env=tuple(env),
        secret=tuple(args.secret),
        max_retries=args.max_retries,
        depends_on=tuple(args.depends_on),
        array_parallelism=args.array_parallelism,
    )
    if here and job.processes > 1 and not Path(job.workdir, "scripts/launch.py").is_file():
        refuse(
            f"--workdir {job.workdir}: no scripts/launch.py there, which starts several processes; start from its root"
        )
    for command in commands:
        if job.processes > 1 and is_python(tuple(command)) and not "".join(command[1:2]).endswith(".py"):
            refuse(
                f"{shlex.join(command[:2])}: a job of {job.processes} processes starts `python FILE.py` under "
                f"accelerate; put the file right after {command[0]}, or start the processes yourself (NODE_RANK, "
                f"NUM_NODES, MASTER_ADDR and MASTER_PORT are set)"
            )
    return job


def git_state(words: list[str]) -> dict[str, Any]:
    """Commit, and how tracked files differ from it, and files among ``words`` that are new; empty without git."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], capture_output=True, text=True, errors="replace")
        except FileNotFoundError:
            return None
        return done.stdout if done.returncode in (0, 1) else None  # 1: a difference outside the index

    commit = git("rev-parse", "--verify", "HEAD")
    if not commit:
        return {}
    diff = git("diff", "HEAD") or ""
    for word in dict.fromkeys(w for w in words if w.endswith((".py", ".sh")) and Path(w).is_file()):
        if git("ls-files", "--others", "--", word):
            diff += git("diff", "--no-index", "--", "/dev/null", word) or ""
    return {"commit": commit.strip(), "dirty": bool(diff), "diff": diff}


def render(job: Job) -> Plan:
    """All that a submission writes and runs: the backend's part, the record, and the uncommitted changes."""
    plan = BACKENDS[job.backend][0](job)
    record = dataclasses.asdict(job) | {"run": [shlex.join(c) for c in plan.commands if job.backend != "ray"]}
    diff = record["git"].pop("diff", "") if record["git"] else ""
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
    texts = {"a command or --env": "\0".join(words), **plan.files}
    for name, value in environ.items():
        if (name in job.secret and len(value) >= 4) or (SECRET_NAME.search(name) and len(value) >= 8):
            for where, text in texts.items():
                if value in text:
                    refuse(
                        f"the value of {name} stands in {where}; name it with --secret {name} and let the program "
                        f"read it from its environment"
                    )


def show(plan: Plan) -> str:
    """The plan as text: every file whole, every command as a line of shell."""
    parts = [f"# would write {path}\n{text.rstrip()}\n" for path, text in plan.files.items()]
    hidden = "".join(f"{name}=*** " for name in plan.from_shell)
    return "\n".join([*parts, "# would run", *(hidden + shlex.join(c) for c in plan.commands)])


def write(plan: Plan) -> None:
    for path, text in plan.files.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path + ".tmp").write_text(text)
        os.replace(path + ".tmp", path)  # a shell may be reading the old one line by line


def run_here(command: list[str]) -> int:
    """Run a job on this machine; its exit code. A first Ctrl-C asks it to stop, a second kills all it started."""
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
    args, commands = parse(argv)
    job = make_job(args, commands, dict(os.environ))
    plan = render(job)
    check_secrets(job, plan, dict(os.environ))
    if args.dry_run:
        print(show(plan))
        return 0
    write(plan)
    print(f"{job.run_id}: {job.run_dir}", file=sys.stderr, flush=True)
    if "mount" in BACKENDS[job.backend][1] and not job.mount and job.max_retries > 0:
        print("warning: no --mount: what a run saves is lost with its machine, and it begins anew", file=sys.stderr)
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

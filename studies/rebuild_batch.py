"""Rebuild the batch of a step: run again from the last checkpoint before it, and keep what the step computed.

On one machine a run repeats bit for bit, and a checkpoint holds everything that a run needs to continue. The repeated
steps run in a scratch folder; nothing is written to the folder of the run. studies/replay.py calls ``rebuild``, which
starts this file as a program once per rank. A rebuilt batch is a folder:

    samples.parquet   a row per sample: schema()
    model/            the policy that the step began with, in Hugging Face format
    reference/        only a reference that moves
    batch.json        step, coefficients of the KL, script, location of the reference, SHA-256 of the run's config.json
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folders are no packages

import diff_runs
import numpy as np
import watching

from runtime.run import directory, identity, saving
from runtime.system import process
from runtime.training import batching

PROGRAM = Path(__file__).resolve()  # which each rank runs
# The local variables of a script's ``main`` that make up a batch, at the point where the update begins.
NAMES = (
    *("step", "samples", "known", "old_N", "ref_N", "advantages_N", "kl"),
    *("args", "run", "policy", "reference"),
)


def schema():
    """Return the columns of samples.parquet, a pyarrow.Schema: a row is a sample.

    The samples of a step are ordered by prompt_id and sample_id. Log-probs are in nats, at the sampling temperature.
    What the step did not compute is null.
    """
    import pyarrow  # here: it starts a thread, which a fork of this process would lack

    numbers = pyarrow.list_(pyarrow.float32())
    ids = pyarrow.list_(pyarrow.int32())
    return pyarrow.schema(
        {
            "prompt_id": pyarrow.int32(),  # of the step's prompts, from 0: the samples of one are a group
            "sample_id": pyarrow.int32(),
            "engine": pyarrow.int32(),
            "prompt_ids": ids,
            "response_ids": ids,
            "observed": pyarrow.list_(ids),  # first and end of each span of response_ids that an environment wrote
            "sampler_logprobs": numbers,
            "old_logprobs": numbers,
            "ref_logprobs": numbers,
            "advantages": numbers,  # of each token, a KL in the reward included
            "versions": ids,  # of the weights that sampled the response, one after another,
            "version_starts": ids,  # and the first token of each
            "reward": pyarrow.float64(),
            "score": pyarrow.float64(),
            "finish_reason": pyarrow.string(),
        }
    )


# ------------------------------------------------------------------------------------------------- in the repeated run


@contextlib.contextmanager
def keeping(places: dict[int, Path]) -> Iterator[None]:
    """Write the batches of these steps to these folders, of a run in this process. Every rank must do so.

    The batch is what the script's ``main`` holds when it makes ``utils.UpdateStats``: the advantages are computed, and
    the weights are those that the step began with. No number of the run depends on it.
    """

    def keep(*_) -> None:
        found = watching.names_of_main()
        if (step := found.get("step")) in places:
            write_batch(found, places[step])

    end = watching.watch(importlib.import_module("utils").UpdateStats, "__init__", keep)
    try:
        yield
    finally:
        end()


def write_batch(found: dict[str, Any], place: Path) -> None:
    """Write a batch from the local variables of ``main``. Every rank must call: under ZeRO 3 each has its share."""
    if missing := [name for name in NAMES if name not in found]:
        raise RuntimeError(f"main() has no variable {', '.join(missing)}: the script is no copy of grpo.py or ppo.py")
    args, run, kl, reference = (found[name] for name in ("args", "run", "kl", "reference"))
    if run.rank == 0:
        place.mkdir(parents=True)
        has_old = args.num_epochs * args.num_mini_batches > 1 or kl.reward > 0
        arrays = {"advantages": found["advantages_N"][:-1].tolist()}
        arrays["old_logprobs"] = found["old_N"][:-1].tolist() if has_old else None
        arrays["ref_logprobs"] = found["ref_N"][:-1].tolist() if args.loads_reference else None
        write_samples(place, rows(found["samples"], set(found["known"]), arrays))
    saving.save_model(found["policy"], run.tokenizer, place / "model", args.zero_stage, run.rank)
    if run.rank != 0:
        return
    base = None if reference is None else reference.model.config._name_or_path
    if args.ref_policy_update is not None:
        base = "reference"
        reference.model.save_pretrained(place / base)
    about = {
        "step": found["step"],
        "loss_coef": kl.loss,
        "reward_coef": kl.reward,
        "script": identity.script_of(args),
        "reference": base,
    }
    (place / "batch.json").write_text(json.dumps(about, indent=1) + "\n")


def write_samples(place: Path, table: list[dict[str, Any]]) -> None:
    """Write samples.parquet."""
    import pyarrow
    import pyarrow.parquet

    columns = pyarrow.Table.from_pylist(table, schema=schema())
    pyarrow.parquet.write_table(columns, place / "samples.parquet", compression="zstd")


def rows(samples: list, known: set[int], arrays: dict[str, list | None]) -> list[dict[str, Any]]:
    """Return the samples as rows of schema(). ``arrays``: flat, [N], by column; None if the run does not compute it."""
    offsets = batching.token_offsets(samples)
    found = []
    for i, sample in enumerate(samples):
        row = {name: getattr(sample, name) for name in ("prompt_id", "sample_id", "engine", "reward", "score")}
        for name in ("prompt_ids", "response_ids", "sampler_logprobs"):
            row[name] = np.asarray(getattr(sample, name)).tolist()
        for name, values in arrays.items():
            own = values is not None and (i in known or name == "advantages")
            row[name] = values[offsets[i] : offsets[i + 1]] if own else None
        row["observed"] = [list(span) for span in sample.observed]
        row["finish_reason"] = sample.finish_reason
        row["versions"] = [version for version, _ in sample.weight_versions]
        row["version_starts"] = [start for _, start in sample.weight_versions]
        found.append(row)
    return found


def repeat(order: Path) -> None:
    """Run one rank of the repeated run. Rank 0 exits once it has logged the step; ``run_again`` ends the others."""
    process.die_with_parent()
    given = json.loads(order.read_text())
    process.prepare_environment(given["resolved"].get("dtype", given["args"]["dtype"]))
    script = diff_runs.load(process.PROJECT, given["script"])
    directory.earlier_choices = lambda *_: given["resolved"]  # a start from scratch would choose for this machine

    def end(_, log, metrics: dict[str, Any], *rest) -> None:
        if metrics["step"] == given["step"] and log.is_main:
            os._exit(0)

    watching.watch(importlib.import_module("runtime.run.logger").RunLog, "step", after=end)
    args = diff_runs.arguments(script, given["args"])
    with keeping({given["step"]: Path(given["place"])}):
        script.main(args, script.preflight(args))


# ----------------------------------------------------------------------------------------------------- from the outside


def rebuild(run: Path, step: int, place: Path, force: bool = False) -> None:
    """Write the batch of a step of a run to the folder ``place``, which must not exist yet.

    Exits with code 2 where the code is not that of the run, where the repeated run fails, and where its metrics are not
    those of the run: then the batch is not the run's. With ``force`` changed code and other metrics are warnings.
    """
    config = directory.read_config(run)
    check_code(run, config, force)
    done, start = last_checkpoint(run, config, step)
    origin = f"the checkpoint of step {done}" if start else "the start: there is no usable checkpoint before"
    print(f"running step(s) {done + 1} to {step} of {run} again, from {origin}", flush=True)
    begun = time.monotonic()
    partial = place.with_name(place.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="rebuild-") as scratch:
        again = Path(scratch, "run")
        run_again(config, step, again, start, partial)
        check_metrics(run, again, step, force)
    name_run(partial, run)
    os.replace(partial, place)
    print(f"rebuilt the batch of step {step} in {time.monotonic() - begun:.0f} s", flush=True)


def name_run(place: Path, run: Path) -> None:
    """Enter in batch.json which run the batch is of."""
    about = json.loads((place / "batch.json").read_text())
    about["run"] = process.file_digest(run / "config.json")
    (place / "batch.json").write_text(json.dumps(about, indent=1) + "\n")


def last_checkpoint(run: Path, config: dict[str, Any], step: int) -> tuple[int, Path | None]:
    """(step, folder) of the newest intact checkpoint before a step from which the run repeats; (0, None) without any.

    With updates in flight a checkpoint lacks the unfinished sequences, which a resumed run samples again with newer
    weights: such a run repeats only from its start, or from the checkpoint that it resumed from itself.
    """
    in_flight = config["args"]["inflight_updates"] != "off"
    for saved, path in reversed(directory.saved_steps(run)):
        repeats = not in_flight or saved == config["resumed_after"]
        if saved < step and repeats and not directory.damage(path):
            return saved, path
    return 0, None


def check_code(run: Path, config: dict[str, Any], force: bool) -> None:
    """Reject other code than the run's."""
    names = diff_runs.changed_files(config, process.PROJECT)
    if not names:
        return
    commit = config.get("git", {}).get("commit", "unknown")
    message = f"since {run}, these files of its code have changed: {', '.join(names[:5])}"
    if not force:
        process.refuse(f"{message}. Check out the code of the run (commit {commit}), or pass --force to run this code")
    print(f"warning: {message}", flush=True)


def check_metrics(run: Path, again: Path, step: int, force: bool) -> None:
    """Compare the metrics of all repeated steps with those that the run logged; times are left out."""
    logged = {line["step"]: line for line in diff_runs.read(run)}
    for line in diff_runs.read(again):
        names = diff_runs.differing(line, logged.get(line["step"], {}))
        if not names:
            continue
        message = (
            f"step {line['step']} of {run} does not repeat on this machine: {len(names)} of its metrics differ, "
            f"among them {', '.join(names[:4])}"
        )
        if not force:
            process.refuse(
                f"{message}. The batch of step {step} would not be the run's; use the machine, the number of threads "
                f"and the data of the run, or pass --force to take the batch of the repeated run"
            )
        print(f"warning: {message}; the batch is that of the repeated run", flush=True)
        return


def run_again(config: dict[str, Any], step: int, again: Path, start: Path | None, place: Path) -> None:
    """Run on all ranks from ``start`` up to a step, into the folder ``again``; write the step's batch to ``place``."""
    args = config["args"]
    ranks = config["world_size"] + args["vllm_engines"] * args["vllm_tensor_parallel_size"]
    order = again.with_suffix(".json")
    values = diff_runs.again(config, again, start)
    keys = {"script": config["script"], "resolved": config.get("resolved", {}), "step": step}
    order.write_text(json.dumps(keys | {"args": values, "place": str(place.absolute())}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if ranks > 1:
        known["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", 1)  # as torchrun sets it
    started = []
    try:
        for rank in range(ranks):
            own = known | {"RANK": rank, "LOCAL_RANK": rank}
            environment = os.environ | {name: str(value) for name, value in own.items()}
            environment.pop("RUN_DIR", None)
            started.append(start_rank(order, environment, again.with_suffix(f".{rank}.log")))
        code = started[0].wait()
    finally:
        for child in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code != 0 or not (place / "batch.json").is_file():
        said = again.with_suffix(".0.log").read_text()
        process.refuse(f"the repeated run has failed (exit code {code}):\n{said[-3000:]}")


def start_rank(order: Path, environment: dict[str, str], log: Path) -> subprocess.Popen:
    """Start this file as one rank, in a process group of its own, with what it prints in ``log``."""
    line = [sys.executable, str(PROGRAM), str(order)]
    with open(log, "w") as out:
        return subprocess.Popen(line, env=environment, stdout=out, stderr=out, start_new_session=True)


if __name__ == "__main__":
    repeat(Path(sys.argv[1]))

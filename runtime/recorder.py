"""Batches of a run on disk, for studies/replay.py: what was sampled, scored and computed, and the step's weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from runtime import batching, process
from runtime.flags import recorded_steps
from runtime.identity import script_of
from runtime.records import Sample
from runtime.watchdog import Watch


def schema():
    """The columns of samples.parquet, a pyarrow.Schema: a row is a sample.

    The samples of a step are ordered by prompt_id and sample_id. Log-probs are in nats, at the sampling temperature.
    What the step did not compute is null.
    """
    import pyarrow  # here: it starts a thread, and scripts/many.py forks what has imported the scripts

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


class Recorder:
    """Keeps the batches of --record_batches steps: ``batches/step_000014/``, whole or not there at all.

        samples.parquet   a row per sample: schema()
        model/            the policy that the step began with, in Hugging Face format
        reference/        only a reference that moves
        batch.json        step, coefficients of the KL, script, where the reference comes from; written last

    A full disk costs the batch, not the run. A resumed run drops the batches of the steps that it does again.
    """

    def __init__(self, log, args, tokenizer, policy, reference, save_weights: Callable):
        self.log = log
        self.args = args
        self.tokenizer = tokenizer
        self.policy = policy
        self.reference = reference
        self.save_weights = save_weights
        self.rank = torch.distributed.get_rank()
        self.steps = recorded_steps(args.record_batches, log.total)
        self.errors: list[str] = []
        folder = log.folder / "batches"
        for path in folder.glob("step_*") if self.rank == 0 else ():
            number = path.name.removeprefix("step_")
            if not number.isdigit() or int(number) > log.first:
                shutil.rmtree(path)

    def record(
        self,
        step: int,
        samples: list[Sample],
        known: list[int],
        old_N: torch.Tensor,
        ref_N: torch.Tensor,
        advantages_N: torch.Tensor,
        loss_coef: float,
        reward_coef: float,
    ) -> None:
        """Write the batch of this step, if it is one of those to keep. Before its first update; every rank must call.

        known: the samples whose old_N and ref_N were computed, as far as the run computes them at all. loss_coef,
        reward_coef: of the KL in the loss and in the reward, in this step.
        """
        if step not in self.steps:
            return
        final = self.log.folder / "batches" / f"step_{step:06d}"
        partial = final.with_name(final.name + ".partial")
        self.errors = []
        if self.rank == 0:
            has_old = self.args.num_epochs * self.args.num_mini_batches > 1 or reward_coef > 0
            has_ref = self.args.loads_reference
            arrays = {"advantages": advantages_N[:-1].tolist()}
            arrays["old_logprobs"] = old_N[:-1].tolist() if has_old else None
            arrays["ref_logprobs"] = ref_N[:-1].tolist() if has_ref else None
            self._try(self._write_samples, partial, rows(samples, set(known), arrays))
        self._try(self.save_weights, self.policy, self.tokenizer, partial / "model", self.args.zero_stage, self.rank)
        if self.rank == 0:
            self._try(self._finish, step, loss_coef, reward_coef, partial, final)
        if self.errors:
            shutil.rmtree(partial, ignore_errors=True)
            print(f"WARNING: BATCH OF STEP {step} NOT RECORDED; the run continues. {self.errors[0]}", flush=True)

    def _try(self, write: Callable, *arguments) -> None:
        """Keep errors of writing: under ZeRO 3 a rank that left here would leave the others in a collective."""
        import pyarrow

        Watch.beat()
        try:
            write(*arguments)
        except (OSError, RuntimeError, SafetensorError, pyarrow.ArrowException) as error:
            self.errors.append(f"{type(error).__name__}: {error}")

    def _write_samples(self, partial: Path, table: list[dict]) -> None:
        import pyarrow
        import pyarrow.parquet

        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        columns = pyarrow.Table.from_pylist(table, schema=schema())
        pyarrow.parquet.write_table(columns, partial / "samples.parquet", compression="zstd")
        process.sync(partial / "samples.parquet")

    def _finish(self, step: int, loss_coef: float, reward_coef: float, partial: Path, final: Path) -> None:
        """The reference where it moves, batch.json, and the folder's name, unless something went wrong before."""
        if self.errors:
            return
        base = None
        if self.reference is not None:
            base = self.reference.model.config._name_or_path
        if self.args.ref_policy_update is not None:
            base = "reference"
            self.reference.model.save_pretrained(partial / base)
            for path in (partial / base).iterdir():
                process.sync(path)
        about = {
            "step": step,
            "loss_coef": loss_coef,
            "reward_coef": reward_coef,
            "script": script_of(self.args),
            "reference": base,
        }
        process.write_whole(partial / "batch.json", json.dumps(about, indent=1) + "\n")
        process.sync(partial)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(partial, final)
        process.sync(final.parent)


def rows(samples: list[Sample], known: set[int], arrays: dict[str, list | None]) -> list[dict]:
    """The samples as rows of schema(). ``arrays``: flat, [N], by column; None where the run computes no such thing."""
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

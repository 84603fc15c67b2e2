"""Run the parts of scripts/check.py, print the report, and write it as JSON."""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import probe_run

probe_run.import_libraries()  # before a run is forked, and in an environment that keeps torch from compiling

import check_flags
import check_functions
import check_gradient
import check_learning
import check_loss
import check_numbers
import check_update
import torch
from check_subject import Finding, Report, SmallSubject, judge, load_subject
from transformers import AutoModelForCausalLM


def check_logprobs(subject: SmallSubject, model) -> list[Finding]:
    """Check the log-probs of a file that stands alone."""
    difference = subject.script.difference(model)
    text = f"they are {difference:.2g} nats from those of plain forward passes: temperature, shift or padding?"
    right = difference < 1e-5
    return [judge(4, "log-probs", right, "those of plain forward passes", text, subject.place("token_loss"))]


def quiet(function: Callable) -> object:
    """Call a function without what the libraries print."""
    with contextlib.redirect_stdout(io.StringIO()):
        return function()


def main(options: argparse.Namespace, words: list[str]) -> int:
    """Print the report on a script; the exit code."""
    torch.set_num_threads(1)
    began = time.monotonic()
    subject = load_subject(options.script, words)
    report = Report(subject, options.brief)
    parts = set(options.parts)
    print(f"{subject.name} compared with {subject.base_name}{' with ' + ' '.join(words) if words else ''}", flush=True)
    with tempfile.TemporaryDirectory(prefix="check-") as folder:
        run_parts(report, parts, Path(folder), options.lanes)
    return report.finish(time.monotonic() - began, options.json)


def run_parts(report: Report, parts: set[int], folder: Path, lanes: int) -> None:
    """Run the chosen parts, those that start no run first."""
    subject = report.subject
    for name in ("ours", "theirs"):
        (folder / name).mkdir()
    small = isinstance(subject, SmallSubject)
    ours = probe_run.Laboratory(subject.script, subject.args, folder / "ours")
    model = quiet(lambda: AutoModelForCausalLM.from_pretrained(ours.model).double())
    if small:  # the others are about main
        parts = parts & {1, 2, 3, 4}
    if 1 in parts:
        report.run(1, lambda: check_loss.check_ascent(subject))
        report.run(1, lambda: check_loss.check_groups(subject), "group_advantages")
        if not small:
            report.run(1, lambda: check_loss.check_kl(subject))
        report.print_part(1)
    if 3 in parts:
        report.run(3, lambda: check_numbers.check_edges(subject))
        report.run(3, lambda: check_numbers.check_group_edges(subject), "group_advantages")
        report.print_part(3)
    if 4 in parts:
        report.run(4, lambda: check_gradient.check_gradient(subject, model))
        if small:
            report.run(4, lambda: check_logprobs(subject, model))
    recorded: dict[str, probe_run.Recorded] = {}

    def runs() -> list[Finding]:
        findings, found = check_update.check(subject, ours, model, lanes, 2 in parts)
        recorded.update(found)
        return findings

    if parts & {2, 4, 6}:
        if 2 in parts:
            report.run(2, lambda: check_functions.check(subject), "loss_weights")
        if not small:
            report.run(2, runs)
        report.findings = [f for f in report.findings if f.part in parts]
        for part in sorted(parts & {2, 4}):
            report.print_part(part)
    if 6 in parts:
        report.run(6, lambda: check_flags.check(subject, ours, recorded, lanes))
        report.print_part(6)
    if 5 in parts:
        theirs = probe_run.Laboratory(subject.base, subject.base_args, folder / "theirs")
        from_reward = not any("is not learned from" in f.text for f in report.findings)
        report.run(5, lambda: check_learning.check(subject, ours, theirs, lanes, from_reward))
        report.print_part(5)

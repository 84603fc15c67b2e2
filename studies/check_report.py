"""Run the parts of scripts/check.py, print the report, and write it as JSON."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import tempfile
import textwrap
import time
import traceback
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
from check_subject import FAIL, NOTE, OK, Finding, SmallSubject, Subject, judge, load_subject
from transformers import AutoModelForCausalLM

TITLES = {
    1: "What it ascends",
    2: "What must not change it",
    3: "Numbers at the edge",
    4: "Gradient against finite differences",
    5: "Does it learn",
    6: "Do its flags do anything",
}
WIDTH = 118
CALLS = {  # as the parts that start no run call a script's functions
    "token_loss": "token_loss(tokens, beta, args)",
    "group_advantages": "group_advantages(rewards_PG, kind, eps)",
    "loss_weights": "loss_weights(samples, in_loss, args)",
}


class Report:
    """The findings so far and the seconds that each part has taken."""

    def __init__(self, subject: Subject, brief: bool = False):
        self.subject = subject
        self.brief = brief
        self.findings: list[Finding] = []
        self.seconds: dict[int, float] = dict.fromkeys(TITLES, 0.0)

    def run(self, part: int, find: Callable[[], list[Finding]], function: str = "token_loss") -> None:
        """Add what a part finds. A part that could not run has checked nothing, so it fails."""
        began = time.monotonic()
        try:
            found = find()
        except Exception as error:
            where = self.subject.first_place(function, "main")
            lines = traceback.extract_tb(error.__traceback__)
            own = [x for x in lines if Path(x.filename).name == self.subject.name]
            if own:
                where = f"{self.subject.name}:{own[-1].lineno}, {own[-1].name}: {own[-1].line}"
            text = f"could not run: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if not own:
                text += f"; it calls {CALLS.get(function, function)}: give what the script has added a default"
            found = [Finding(part, "error", FAIL, text, where)]
        self.findings += found
        self.seconds[part] += time.monotonic() - began

    def print_part(self, part: int) -> None:
        """Print the findings of a part; with ``brief`` only those that are not ok."""
        own = [finding for finding in self.findings if finding.part == part]
        shown = [finding for finding in own if finding.state != OK] if self.brief else own
        passed = f", {len(own) - len(shown)} ok" if self.brief else ""
        print(f"\n{part} {TITLES[part]} ({self.seconds[part]:.0f} s{passed})", flush=True)
        for finding in shown:
            lines = textwrap.wrap(finding.text, WIDTH - 31, break_long_words=False)
            print(f"  {finding.state:4} {finding.name:24} {lines[0]}")
            for line in [*lines[1:], *([f"at {finding.place}"] if finding.place else [])]:
                print(f"  {'':29} {line}")

    def as_json(self) -> dict:
        """Return the report for other programs, as values that JSON can hold."""
        return {
            "script": str(self.subject.script.__file__),
            "against": self.subject.base_name,
            "seconds": self.seconds,
            "failed": sorted({f.part for f in self.findings if f.state == FAIL}),
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }


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
    failed = [f for f in report.findings if f.state == FAIL]
    notes = sum(f.state == NOTE for f in report.findings)
    verdict = f"{len(failed)} failed" if failed else "nothing that must hold fails"
    print(
        f"\n{subject.name}: {verdict}, {notes} notes, {len(report.findings)} checks, {time.monotonic() - began:.0f} s"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(report.as_json(), indent=1, default=str) + "\n")
    return 1 if failed else 0


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

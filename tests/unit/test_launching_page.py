"""docs/launching.md: its flag table is what submit.py takes, its commands are taken."""

from __future__ import annotations

import os
import re
import shlex
import subprocess

from helpers import ROOT
from submitted_jobs import submit

import grpo
from runtime.arguments import checks, flags

PAGE = (ROOT / "docs" / "launching.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The table that starts with this heading: its rows without the ruler."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]


def test_flag_table():
    """Every flag of every backend, and no other."""
    header, *body = rows("flag")
    _, takes = submit.make_parser()
    del takes["backend"]
    said = {flag: set() for flag in takes}
    for names, *cells in body:
        for flag in set(re.findall(r"--(\w+)", names)) - {"partition"}:
            said[flag] |= {backend for backend, cell in zip(header[1:], cells, strict=True) if cell}
    assert said == takes


def test_the_example_of_trainers_and_engines():
    """Both of its commands are taken by the scripts and fit 2 nodes of 8 GPUs; submit.py starts one rank per GPU."""
    section = PAGE[PAGE.index("### Trainers and engines") :]
    submitted, launched = (block.replace("\\\n", " ") for block in section.split("```\n")[1:4:2])
    for text in (submitted, launched):
        words = shlex.split(text.replace("...", ""))
        args = flags.parse(grpo.Args, words=words[words.index("grpo.py") + 1 :])
        checks.check_numbers(args)
        checks.check_engine(args, 16)
        checks.check_dedicated(args, 16)
        checks.check_asynchrony(args)
        assert args.vllm_engines * args.vllm_tensor_parallel_size == 8
    words = shlex.split(submitted.replace("...", ""))
    job = submit.make_job(*submit.parse(words[words.index("--backend") :]))
    assert (job.num_nodes, job.gpus, job.processes) == (2, 8, 16)
    assert "--num_processes 16" in launched


def test_the_loop_that_evaluates_each_save_submits_each_once(tmp_path):
    """examples/evaluate_saves.sh: whole checkpoints alone, also one that appears later; their models are copied."""
    block = (ROOT / "examples" / "evaluate_saves.sh").read_text()
    saves = tmp_path / "runs" / "NAME" / "checkpoints"
    for name in ("step_000010", "step_000030.partial"):
        (saves / name / "model").mkdir(parents=True)
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" >>submitted\n')
    (tmp_path / "python").chmod(0o755)
    late = (
        "sleep() { mkdir -p $run/checkpoints/step_000020/model; [ ! -e slept ] || mkdir -p $run/model; touch slept; }\n"
    )
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", "-eu", "-c", late + block, "evaluate_saves.sh", "runs/NAME"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=20)
    lines = (tmp_path / "submitted").read_text().splitlines()
    copies = [line.split("--model_name_or_path ")[1].split()[0] for line in lines]
    assert copies == ["runs/NAME/evals/step_000010", "runs/NAME/evals/step_000020"]
    assert all((tmp_path / copy).is_dir() for copy in copies)
    assert all("scripts/evaluate.py --run runs/NAME" in line for line in lines)

"""docs/launching.md: its flag table is what submit.py takes, its commands are taken."""

from __future__ import annotations

import re
import shlex

from helpers import ROOT
from jobs import submit

import grpo
from runtime import flags

PAGE = (ROOT / "docs" / "launching.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The table that starts with this heading: its rows without the ruler."""
    lines = PAGE[PAGE.index(f"| {heading} |") :].split("\n\n")[0].splitlines()
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]


def test_flag_table():
    """Every flag of every backend, and no other."""
    header, *body = rows("flag")
    shared = submit.EVERYWHERE - {"backend"}
    said = {backend: set() for backend in header[1:]}
    for names, *cells in body:
        flags = [f for f in re.findall(r"--(\w+)", names) if f not in ("partition", "budget", "qos")]
        for backend, cell in zip(header[1:], cells, strict=True):
            if cell:
                said[backend] |= set(flags)
    assert said == {backend: flags | shared for backend, (_, flags) in submit.BACKENDS.items()}


def test_the_example_of_trainers_and_engines():
    """Both of its commands are taken by the scripts and fit 2 nodes of 8 GPUs; submit.py starts one rank per GPU."""
    section = PAGE[PAGE.index("### Trainers and engines") :]
    submitted, launched = (block.replace("\\\n", " ") for block in section.split("```\n")[1:4:2])
    for text in (submitted, launched):
        words = shlex.split(text.replace("...", ""))
        args = flags.parse(grpo.Args, words=words[words.index("grpo.py") + 1 :])
        flags.check_numbers(args)
        flags.check_engine(args, 16)
        flags.check_dedicated(args, 16)
        flags.check_asynchrony(args)
        assert (args.vllm_mode, args.vllm_engines * args.vllm_tensor_parallel_size) == ("dedicated", 8)
    words = shlex.split(submitted.replace("...", ""))
    job = submit.make_job(*submit.parse(words[words.index("--backend") :]))
    assert (job.num_nodes, job.gpus, job.processes) == (2, 8, 16)
    assert "--num_processes 16" in launched

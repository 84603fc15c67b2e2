"""studies/run_many.py: a fork does what a command does, and one run's end is not that of the others."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys

import pytest
from helpers import ROOT, command, record, run_environment


def many(lines: list[str], *words: object, timeout: float = 280) -> tuple[int, str]:
    """(exit code, everything printed) of run_many.py with these lines on its standard input."""
    line = [sys.executable, "studies/run_many.py", *map(str, words)]
    done = subprocess.run(
        line,
        input="\n".join(lines),
        cwd=ROOT,
        env=run_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_a_forked_run_is_the_run_of_the_command(tiny, tmp_path):
    """Equal to the last bit, with vLLM; a failing run is reported and stops no other; a second call skips."""
    more = ["--total_steps", "2", "--run_name"]
    plain = command(tiny, tmp_path, *more, "plain", rollout="vllm")
    done = subprocess.run(plain, cwd=ROOT, env=run_environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr

    names = ("one", "bad", "two")
    lines = []
    for name in names:
        words = command(tiny, tmp_path, *more, name, rollout="vllm")[2:]
        if name == "bad":  # found out in the run itself, by the verifier's process
            words += ["--verifier", f"{ROOT}/tests/verifiers.py:raises"]
        lines.append(shlex.join(words))
    code, said = many(lines[:2], "grpo.py", "--lanes", "2")
    assert code == 1 and "1 finished, 0 skipped, 1 failed" in said, said
    assert "failed with exit code" in said

    code, said = many(lines[::2], "grpo.py", "--lanes", "2")
    assert code == 0 and "1 finished, 1 skipped, 0 failed" in said, said
    for name in ("one", "two"):
        assert record(tmp_path / name) == record(tmp_path / "plain"), name
        assert "step 2/2" in (tmp_path / f"{name}.log").read_text()
        ours, theirs = (json.loads((tmp_path / n / "config.json").read_text()) for n in (name, "plain"))
        assert ours["code"] == theirs["code"] and ours["versions"] == theirs["versions"]


@pytest.mark.integration
@pytest.mark.parametrize(
    "script, lines, says",
    [
        ("grpo.py", ["--beta 0.1", "--nonsense 1"], "nonsense"),
        ("grpo.py", ["--beta many"], "beta"),
        ("README.md", ["--beta 0.1"], "is not a script"),
        ("utils.py", ["--beta 0.1"], "has no dataclass Args"),
    ],
)
def test_what_the_script_does_not_take_ends_it_at_once(script, lines, says):
    """Before anything is imported that takes long, and before the first run."""
    code, said = many(lines, script, timeout=60)
    assert code == 2 and says in said and "finished" not in said.replace("is_finished.py", "")

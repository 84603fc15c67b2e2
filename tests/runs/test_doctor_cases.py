"""The doctor on real runs: every ailment is named, and healthy runs are left in peace.

An ailment is a set of flags, and edits where no flag does it. Runs train the model of studies/pretrain_tiny.py.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from learning_runs import FLAGS, ROOT, SCRIPT_FLAGS, Edits, edited, project_files, run_copy

from runtime.run.doctor import RULES, Case, Finding, examine

# What --verifier names in the ailments below.
REWARDS = """
import random
import time

from rewards import Reward


def noise(response, truth, row):
    return float(random.random() < 0.4)


def length(response, truth, row):
    return Reward(len(response) / 40, {"correct": float(response.endswith(truth))})


def sometimes_hangs(response, truth, row):
    if random.random() < 0.03:
        time.sleep(30)
    return float(response.endswith(truth))
"""

LOSS = "loss = (loss_T * tokens.weights_T).sum() * run.world_size"


@dataclass(frozen=True)
class Ailment:
    """A fault, the rule that has to name it, and how it is put into a run."""

    rule: str
    what: str
    flags: dict[str, object] = field(default_factory=dict)
    edits: Edits = ()
    steps: int = 30


STALE = (("grpo.py", "push_weights(llm, ", "version == 1 and push_weights(llm, "),)  # only the first push arrives
WRONG_SIGN = (
    ("grpo.py", "unclipped_T = -t.advantages_T * ratio_T\n", "unclipped_T = t.advantages_T * ratio_T\n"),
    ("grpo.py", "clipped_T = -t.advantages_T * ratio_T.clamp(", "clipped_T = t.advantages_T * ratio_T.clamp("),
)
AWAY = (("grpo.py", "loss_T = loss_T + beta * kl_T\n", "loss_T = loss_T - beta * kl_T\n"),)
AILMENTS = (
    Ailment("reward_flat", "the reward is a coin", {"verifier": "rewards_of_ailments.py:noise"}),
    Ailment("reward_falls", "wrong sign of the advantage", edits=WRONG_SIGN),
    Ailment("extraction", "a verifier of another format", {"verifier": "math"}, steps=15),
    Ailment(
        "verifier_failures",
        "three responses in a hundred hang their verifier",
        {"verifier": "rewards_of_ailments.py:sometimes_hangs", "call_timeout": 0.5},
        steps=6,
    ),
    Ailment("equal_groups", "hardly any temperature", {"temperature": 0.02}, steps=15),
    Ailment("truncation", "no room for an answer", {"max_response_length": 2}, steps=15),
    Ailment(
        "length_growth",
        "the reward is the length",
        {"verifier": "rewards_of_ailments.py:length", "learning_rate": 3e-4, "max_response_length": 200},
    ),
    Ailment(
        "entropy_collapse",
        "a coin for a reward, and entropy is punished",
        {"entropy_coef": -1.0, "learning_rate": 3e-4, "verifier": "rewards_of_ailments.py:noise"},
        steps=60,
    ),
    Ailment(
        "mismatch_growth",
        "only the first push arrives",
        {"learning_rate": 3e-4},
        STALE,
    ),
    Ailment("kl_runaway", "wrong sign of the KL", {"beta": 1.0}, AWAY, steps=40),
    Ailment(
        "skipped_steps",
        "every fifth loss is not a number",
        edits=(("grpo.py", LOSS, f"{LOSS} * (math.nan if step % 5 == 0 else 1)"),),
        steps=15,
    ),
    Ailment(
        "stale_samples",
        "an engine that keeps its first weights, and the weight of old / sampler",
        {"async_steps": 1, "learning_rate": 1e-3},
        STALE,
    ),
)
# The same task learned without a KL, held by one, and with a critic.
HEALTHY = (
    ("grpo.py", {}),
    ("grpo.py", {"beta": 0.3, "num_mini_batches": 2}),
    ("ppo.py", SCRIPT_FLAGS["ppo.py"]),
)


def examined(script: str, flags: dict[str, object], seed: int, steps: int, edits: Edits = ()) -> list[Finding]:
    """Run a copy of the project, with its edits, and ask the doctor. Raises RuntimeError where the run fails."""
    files = project_files(ROOT)
    files |= edited(files, edits)
    files["rewards_of_ailments.py"] = REWARDS
    with tempfile.TemporaryDirectory() as name:
        given = FLAGS | {"total_steps": steps, "log_samples": 32, "eval_samples": 1, "seed": seed} | flags
        code, text = run_copy(files, script, given, Path(name))
        if code != 0:
            raise RuntimeError(f"exit code {code}: {text[-2000:]}")
        return examine(Case.of(Path(name, "runs", "run")))


def test_every_ailment_still_applies():
    """Each edit finds its text exactly once, changes it and leaves Python, and every rule has an ailment."""
    files = project_files(ROOT)
    for ailment in AILMENTS:
        for name, text in edited(files, ailment.edits).items():
            assert text != files[name]
            compile(text, name, "exec")
    assert {ailment.rule for ailment in AILMENTS} == {rule.name for rule in RULES}


def test_a_copy_has_every_file_that_a_run_reads():
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "runtime").iterdir() if path.is_file()}
    assert there <= project_files(ROOT).keys()


@pytest.mark.learn
@pytest.mark.parametrize("ailment", AILMENTS, ids=lambda ailment: ailment.rule)
def test_the_doctor_names_the_ailment_of_a_real_run(testbed, ailment):
    found = examined("grpo.py", ailment.flags, 1, ailment.steps, ailment.edits)
    assert ailment.rule in [finding.rule for finding in found]


@pytest.mark.learn
@pytest.mark.parametrize(("script", "flags"), HEALTHY)
def test_the_doctor_finds_nothing_in_a_healthy_run(testbed, script, flags):
    assert examined(script, flags, 1, 60) == []

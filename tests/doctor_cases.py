"""Runs that are made ill in one way each, and what the doctor finds in them and in healthy ones.

    python tests/doctor_cases.py                     every ailment once; a line each, then recall
    python tests/doctor_cases.py --only truncation   one of them
    python tests/doctor_cases.py --healthy 5         unbroken runs, seeds 1 to 5: two of grpo.py, one of ppo.py each

An ailment is a set of flags, and edits where no flag does it. Runs train the model of studies/pretrain_tiny.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from broken_scripts import BREAKAGES, FLAGS, ROOT, SCRIPT_FLAGS, Breakage, edited, project_files, run_copy

sys.path.insert(0, str(ROOT))

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
    edits: tuple[tuple[str, str, str], ...] = ()
    steps: int = 30


def breakage(what: str) -> tuple[tuple[str, str, str], ...]:
    """The edits of a breakage of tests/broken_scripts.py."""
    return next(b.edits for b in BREAKAGES if b.what == what)


AILMENTS = (
    Ailment("reward_flat", "the reward is a coin", {"verifier": "rewards_of_ailments.py:noise"}),
    Ailment("reward_falls", "wrong sign of the advantage", edits=breakage("sign of the advantage")),
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
    ),
    Ailment(
        "mismatch_growth",
        "only the first push arrives",
        {"learning_rate": 3e-4},
        breakage("stale weights: only the first push arrives"),
    ),
    Ailment("kl_runaway", "wrong sign of the KL", {"beta": 1.0}, breakage("sign of the KL"), steps=40),
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
        breakage("stale weights: only the first push arrives"),
    ),
)
# The same task learned without a KL, held by one, and with a critic.
HEALTHY = (
    ("grpo.py", {}),
    ("grpo.py", {"beta": 0.3, "num_mini_batches": 2}),
    ("ppo.py", SCRIPT_FLAGS["ppo.py"]),
)


def examined(
    script: str, flags: dict[str, object], seed: int, steps: int, edits: tuple[tuple[str, str, str], ...] = ()
) -> list[Finding]:
    """Run a copy of the project, with its edits, and ask the doctor. Raises RuntimeError where the run fails."""
    files = project_files(ROOT)
    files |= edited(files, Breakage("an ailment", edits), script)
    files["rewards_of_ailments.py"] = REWARDS
    with tempfile.TemporaryDirectory() as name:
        given = FLAGS | {"total_steps": steps, "log_samples": 32, "eval_samples": 1, "seed": seed} | flags
        code, text = run_copy(files, script, given, Path(name))
        if code != 0:
            raise RuntimeError(f"exit code {code}: {text[-2000:]}")
        return examine(Case.of(Path(name, "runs", "run")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--healthy", type=int, default=0, help="run unbroken scripts with these many seeds instead")
    parser.add_argument("--first_seed", type=int, default=1)
    parser.add_argument("--only", default="", help="part of a rule's name")
    args = parser.parse_args()
    if args.healthy:
        cases = [
            ("", f"{script} {flags}", script, flags, seed, 60, ())
            for seed in range(args.first_seed, args.first_seed + args.healthy)
            for script, flags in HEALTHY
        ]
    else:
        cases = [(a.rule, a.what, "grpo.py", a.flags, args.first_seed, a.steps, a.edits) for a in AILMENTS]
    surprises = 0
    cases = [case for case in cases if args.only in case[0]]
    for rule, what, script, flags, seed, steps, edits in cases:
        found = examined(script, flags, seed, steps, edits)
        rules = [finding.rule for finding in found]
        as_expected = rule in rules if rule else not rules
        surprises += not as_expected
        print(
            f"{'ok  ' if as_expected else 'MISS'} {rule or 'healthy'} ({what}, seed {seed}): {', '.join(rules) or '-'}"
        )
        for finding in found:
            print(f"       {finding}", flush=True)
    print(f"{len(cases) - surprises} of {len(cases)} as expected, by {len(RULES)} rules")
    return int(surprises > 0)


if __name__ == "__main__":
    raise SystemExit(main())

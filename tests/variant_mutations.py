"""Puts known bugs into variants, one at a time, and shows that the tests of the variant notice each.

    python tests/variant_mutations.py              every mutation, a line each; exit code 1 when a test run stays green
    python tests/variant_mutations.py lora         those of one variant

A mutation is (what it is, variant, text, text in its place, tests to run); the text must occur once in the variant's
file, so a mutation that no longer applies is an error and not a success.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LORA = ["tests/runs/test_lora.py"]
SMALL = ["tests/runs/test_grpo_min.py"]
ALONE = ["tests/runs/test_alone.py", "-k", "vllm"]
GRADIENT = [*SMALL, "-k", "gradient"]
OPSD = [
    "tests/runs/test_variants.py",
    "-k",
    "opsd and not trl and not two_steps and not header and not page and not short",
]
SDPO = ["tests/runs/test_variants.py", "-k", "sdpo and not two_steps and not header and not page and not short"]
MUTATIONS = [
    ("only the first push arrives", "lora.patch", ", load_inplace=True)", ")", LORA),
    ("requests without the adapters", "lora.patch", ", lora_request=lora)", ")", LORA),
    (
        "another scale in the engine",
        "lora.patch",
        "lora_config(args).save_pretrained",
        "LoraConfig(r=8).save_pretrained",
        LORA,
    ),
    ("no refusal of --rollout hf", "lora.patch", 'args.rollout == "hf" or ', "", [*LORA, "-k", "refused"]),
    ("a teacher without a hint", "opsd.patch", "micro_batches(shown, known", "micro_batches(samples, known", OPSD),
    (
        "the teacher of other tokens",
        "opsd.patch",
        "place_U[mb.copies] = mb.tokens",
        "place_U[mb.copies] = 0 * mb.tokens",
        OPSD,
    ),
    ("the other divergence", "opsd.patch", 'if kind == "reverse":', 'if kind == "forward":', OPSD),
    ("the sum of both KLs to their mean", "opsd.patch", "(logq_UV, mean_UV)) / 2", "(logq_UV, mean_UV))", OPSD),
    (
        "a mean of logarithms",
        "opsd.patch",
        "torch.logaddexp(logp_UV, logq_UV) - math.log(2)",
        "(logp_UV + logq_UV) / 2",
        OPSD,
    ),
    (
        "another temperature of the teacher",
        "opsd.patch",
        "logq_UV = teacher_UV.log_softmax",
        "logq_UV = (2 * teacher_UV).log_softmax",
        OPSD,
    ),
    (
        "the reward is learned from as well",
        "opsd.patch",
        "+        advantages_N = -penalty_N  #",
        "+        advantages_N = batching.per_token([s.advantage for s in samples], offsets, device)  #",
        OPSD,
    ),
    (
        "its own answer as a hint",
        "sdpo.patch",
        "if s is not sample and is_correct(s)",
        "if is_correct(s)",
        SDPO,
    ),
    (
        "a wrong answer as a hint",
        "sdpo.patch",
        "if s is not sample and is_correct(s)",
        "if s is not sample",
        SDPO,
    ),
    (
        "a deviation of the population",
        "grpo_min.py",
        "rewards_PG.std(1, keepdim=True)",
        "rewards_PG.std(1, keepdim=True, correction=0)",
        GRADIENT,
    ),
    (
        "the mean of the entire step",
        "grpo_min.py",
        "rewards_PG - rewards_PG.mean(1, keepdim=True)",
        "rewards_PG - rewards_PG.mean()",
        GRADIENT,
    ),
    (
        "truncated responses in the normalization",
        "grpo_min.py",
        "sum(len(r.ids) for r in complete))",
        "sum(len(r.ids) for r in responses))",
        GRADIENT,
    ),
    ("truncated responses are learned", "grpo_min.py", "if not r.truncated and abs(", "if abs(", GRADIENT),
    ("inputs shifted by a token", "grpo_min.py", "prompt[-1:] + r.ids[:-1]", "r.ids", GRADIENT),
    (
        "a prompt without its start",
        "grpo_min.py",
        "torch.tensor([prompt[:-1]]",
        "torch.tensor([prompt[1:-1]]",
        GRADIENT,
    ),
    ("another temperature", "grpo_min.py", "(logits_TV / temperature)", "logits_TV", GRADIENT),
    ("another temperature of the sampler", "grpo_min.py", "(logits / args.temperature)", "logits", SMALL),
    ("tokens after the end", "grpo_min.py", "if not r.ids or r.ids[-1] not in stop_ids:", "if True:", SMALL),
    ("another last token of the prompt", "grpo_min.py", "prompt[-1], device", "prompt[-2], device", SMALL),
    ("no push", "grpo_min.py", "            engine.push(model)", "            pass", ALONE),
]


def survivors(names: list[str]) -> list[str]:
    """The mutations that no test noticed; prints a line for each. ``names``: of the variants; none means all."""
    alive = []
    tried = [row for row in MUTATIONS if not names or Path(row[1]).stem in names]
    with tempfile.TemporaryDirectory() as folder:
        for source in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
            shutil.copy(source, folder)
        for name in ("graders", "runtime", "tests", "scripts", "studies", "docs", "variants"):
            shutil.copytree(ROOT / name, Path(folder) / name)
        for what, file, text, other, tests in tried:
            path = Path(folder) / "variants" / file
            original = path.read_text()
            count = original.count(text)
            if count != 1 + (text.startswith("result[")):  # the answer of the tool and its log-probs
                raise RuntimeError(f"{what}: variants/{file} has {count} times {text!r}")
            path.write_text(original.replace(text, other))
            run = [
                sys.executable,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-m",
                "slow or not slow",
                "-p",
                "no:cacheprovider",
                *tests,
            ]
            done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=900)
            path.write_text(original)
            if done.returncode not in (0, 1):
                raise RuntimeError(f"pytest itself failed:\n{done.stdout}\n{done.stderr}")
            survived = done.returncode == 0
            last = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            print(f"{'ALIVE ' if survived else 'killed'}  {what:36} {' '.join(last)[:150]}", flush=True)
            alive += [what] * survived
    print(f"{len(tried) - len(alive)} of {len(tried)} killed")
    return alive


if __name__ == "__main__":
    raise SystemExit(1 if survivors(sys.argv[1:]) else 0)

"""Puts bugs into a copy of the project, one at a time, and shows that the fast tests notice each.

    python tests/mutations.py                          the known bugs of the KL, a line each
    python tests/mutations.py --random 200 --seed 1    bugs drawn at random (random_mutations.py)

The exit code is 1 when a test run stays green. A known bug is (what it is, file, text, text in its place); the text
must occur in the file, so a mutation that no longer applies is an error and not a success.

Random mutations take hours of one core. Each result is written when it is known, and the same command continues;
``--again`` tries those that survived once more, after a test was added. It runs in a copy of the project and needs no
second checkout, but files that are edited while it runs are those of its start.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
TESTS = ["tests/unit/test_kl_estimators.py", "tests/unit/test_loss.py", "tests/runs/test_run.py"]
TESTS += ["tests/runs/test_fp64_update.py"]
KL, GRPO = "kl_estimators.py", "grpo.py"
MUTATIONS = [
    ("sign of d", KL, "    d = logp - ref\n", "    d = ref - logp\n"),
    ("sign of d, in the script", GRPO, "d_T = t.logprobs_T - t.ref_T\n", "d_T = t.ref_T - t.logprobs_T\n"),
    ("k2 without its 1/2", KL, "return d * d / 2\n", "return d * d\n"),
    ("k2 without its 1/2, in the script", GRPO, "kl_T = d_T.square() / 2", "kl_T = d_T.square()"),
    ("k3 by exp", KL, "torch.expm1(-bounded) + bounded", "(-bounded).exp() - 1 + bounded"),
    ("k3 with the other sign", KL, "torch.expm1(-bounded) + bounded", "torch.expm1(bounded) - bounded"),
    (
        "k4 with a detached ratio, in the script",
        GRPO,
        "live_ratio_T = clamp_straight_through(t.logprobs_T - t.old_T, -20, 20).exp()",
        "live_ratio_T = clamp_straight_through(t.logprobs_T - t.old_T, -20, 20).exp().detach()",
    ),
    ("k4 without its ratio", KL, "return _ratio(logp, old) * d\n", "return d\n"),
    (
        "unbiased without the ratio, in the script",
        GRPO,
        "(t.logprobs_T - t.old_T).clamp(-20, 20).exp().clamp(max=10) * d_T.clamp",
        "d_T.clamp",
    ),
    (
        "old and ref swapped",
        KL,
        "logp, old, ref = _masked(mask, logprobs, old_logprobs, ref_logprobs)",
        "logp, ref, old = _masked(mask, logprobs, old_logprobs, ref_logprobs)",
    ),
    ("old and ref swapped, in the script", GRPO, "d_T = t.logprobs_T - t.ref_T\n", "d_T = t.logprobs_T - t.old_T\n"),
    (
        "KL of the reward inside the std",
        GRPO,
        'if args.kl_reward_norm == "before_norm":',
        'if args.kl_reward_norm != "before_norm":',
    ),
    (
        "mean of the KL instead of its sum",
        GRPO,
        "penalty_N[:-1] = kl.reward * return_to_go(kl_N, offsets)",
        "penalty_N[:-1] = kl.reward * return_to_go(kl_N, offsets) / 8",
    ),
    ("sum up to a token instead of from it", GRPO, ".flip(0).cumsum(0).flip(0)", ".cumsum(0)"),
    (
        "mask after the exponential",
        KL,
        "torch.where(mask, wide, 0.0)",
        "wide",
    ),
    ("beta twice in the loss", GRPO, "loss_T = loss_T + beta * kl_T", "loss_T = loss_T + beta * beta * kl_T"),
    (
        "beta twice in the reward",
        GRPO,
        "penalty_N[:-1] = kl.reward * ",
        "penalty_N[:-1] = kl.reward * kl.reward * ",
    ),
    (
        "reward that ignores its estimator",
        KL,
        "return _value(name, logp, logp, ref)",
        'return _value("k1", logp, logp, ref)',
    ),
    (
        "reward that ignores its estimator, in the script",
        GRPO,
        "all_N, estimator=args.kl_reward_estimator,",
        'all_N, estimator="k1",',
    ),
    (
        "KL in the loss whatever the placement",
        "runtime/arguments/flags.py",
        "return self.beta * in_loss, reward_coef * in_reward",
        "return self.beta, reward_coef * in_reward",
    ),
    ("no weight on the KL", GRPO, "            kl_T = weight_T * kl_T\n", ""),
    (
        "weight on the full KL",
        GRPO,
        "            kl_T = weight_T * kl_T\n        loss_T",
        "        kl_T = weight_T * kl_T\n        loss_T",
    ),
    ("no weight on the policy's loss", GRPO, "policy_T = weight_T * policy_T\n", ""),
    (
        "weight on the entropy",
        GRPO,
        "args.entropy_coef * t.entropy_T\n",
        "args.entropy_coef * weight_T * t.entropy_T\n",
    ),
    ("cap on the wrong side", GRPO, "weight_T.clamp(max=cap) if cap", "weight_T.clamp(min=cap) if cap"),
    ("weight turned round", GRPO, "weight_T = (old_T - sampler_T).exp()", "weight_T = (sampler_T - old_T).exp()"),
    ("mask of one side", GRPO, "(weight_T >= low) & (weight_T <= high)", "weight_T <= high"),
    ("mask without the weight", GRPO, "& (weight_T <= high), weight_T, 0.0)", "& (weight_T <= high), 1.0, 0.0)"),
    (
        "a weight with a gradient",
        GRPO,
        "weight_T = importance_weights(t.old_T, t.sampler_T, args)",
        "weight_T = importance_weights(t.old_T, t.sampler_T, args) * (t.logprobs_T - t.logprobs_T.detach()).exp()",
    ),
    ("the sampler's log-probs in the reward", GRPO, "kl_reward(old_N, ref_N,", "kl_reward(sampler_N, ref_N,"),
    (
        "the loss's estimator in the reward",
        GRPO,
        "all_N, estimator=args.kl_reward_estimator,",
        "all_N, estimator=args.kl_estimator,",
    ),
    (
        "the reward's coefficient in the loss",
        GRPO,
        "token_loss(tokens, kl.loss, args)",
        "token_loss(tokens, kl.reward, args)",
    ),
    (
        "the controller moves the loss's coefficient as well",
        KL,
        "return self.given[0] if self.controller is None or self.in_reward else self.controller.coef",
        "return self.given[0] if self.controller is None else self.controller.coef",
    ),
    (
        "the controller is fed with the KL of the update",
        KL,
        "found = reward_kl if self.in_reward else loss_kl",
        "found = loss_kl",
    ),
    (
        "the controller does not see truncated responses",
        GRPO,
        'if kl.reward > 0 and (kl.controller is not None or args.kl_reward_norm == "before_norm"):',
        'if kl.reward > 0 and args.kl_reward_norm == "before_norm":',
    ),
    (
        "KL per token of all tokens",
        KL,
        "kl_N[offsets[i] : offsets[i + 1]].mean() for i",
        "kl_N[offsets[i] : offsets[i + 1]].sum() * len(responses) / kl_N.numel() for i",
    ),
    ("clamp after the exponential", KL, "torch.expm1(-bounded) + bounded", "(torch.expm1(-d) + d).clamp(max=1e9)"),
    (
        "clamp after the exponential, in the script",
        GRPO,
        "kl_T = torch.expm1(-bounded_T) + bounded_T",
        "kl_T = (torch.expm1(-d_T) + d_T).clamp(max=1e9)",
    ),
    (
        "bf16 subtracted before the upcast",
        KL,
        "torch.where(mask, wide, 0.0)",
        "torch.where(mask, x, 0.0)",
    ),
    ("a zero in place of a missing reference", KL, "if any(x is None for x in tensors):", "if False:"),
    ("a KL that is not finite moves beta", KL, "if not math.isfinite(current_kl):", "if False:"),
    ("a long batch turns beta negative", KL, "if factor <= 0:", "if False:"),
]


def load_mutated(name: str, file: str, text: str = "", other: str = "") -> ModuleType:
    """A module from the source of a file in which one text is replaced, for tests that check a formula in process."""
    source = (ROOT / file).read_text()
    if text not in source:
        raise RuntimeError(f"{file} no longer has {text!r}")
    module = ModuleType(name)
    module.__file__ = str(ROOT / file)
    sys.modules[name] = module  # dataclasses look up the module of their fields
    try:
        exec(compile(source.replace(text, other), file, "exec"), module.__dict__)
    finally:
        del sys.modules[name]
    return module


def survivors() -> list[str]:
    """The mutations that no test noticed; prints one line for each mutation."""
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        for source in [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]:
            shutil.copy(source, folder)
        for name in ("graders", "runtime", "tests", "scripts", "studies", "docs"):
            shutil.copytree(ROOT / name, Path(folder) / name)
        run = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *TESTS]
        run += ["-k", "kl or test_loss or fresh_step"]

        def green() -> bool:
            done = subprocess.run(run, cwd=folder, capture_output=True, text=True, timeout=900)
            if done.returncode not in (0, 1):
                raise RuntimeError(f"pytest itself failed:\n{done.stdout}\n{done.stderr}")
            return done.returncode == 0

        if not green():
            raise RuntimeError("the tests fail without any mutation")
        for what, file, text, other in MUTATIONS:
            path = Path(folder) / file
            original = path.read_text()
            if text not in original:
                raise RuntimeError(f"{what}: {file} no longer has {text!r}")
            path.write_text(original.replace(text, other))
            survived = green()
            path.write_text(original)
            print(f"{'ALIVE ' if survived else 'killed'}  {what}", flush=True)
            alive += [what] * survived
    print(f"{len(MUTATIONS) - len(alive)} of {len(MUTATIONS)} killed")
    return alive


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--random", type=int, metavar="N", help="draw this many mutations at random")
    add("--seed", type=int, default=1, help="seed of the drawing (default: %(default)s)")
    add("--seconds", type=float, default=60.0, help="seconds of tests for each of them at most (default: %(default)s)")
    add(
        "--results", type=Path, default=ROOT / "runs" / "mutations", help="folder of the results (default: %(default)s)"
    )
    add("--again", action="store_true", help="try once more those that survived")
    add("--tests", default="", metavar="REGEX", help="with the tests of these files only, as a beginning")
    options = parser.parse_args()
    if options.random is None:
        return int(bool(survivors()))
    from random_mutations import run

    chosen = (options.results, options.seconds, options.again, options.tests)
    return int(run(options.random, options.seed, *chosen) > 0)


if __name__ == "__main__":
    raise SystemExit(main())

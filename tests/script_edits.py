"""Edits of a copy of a script for scripts/check.py: published mistakes, each to be found, and harmless ones.

    python tests/script_edits.py        writes the examples of docs/maintainers/check.md

``script_edits.jsonl`` has forty of each kind, written by somebody who had not read the check.

An edit is a list of (text, replacement) in the script. The mistakes are those that issue trackers and papers report of
other frameworks; "also" are further forms of the same ones.
"""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Edit(NamedTuple):
    """One edited copy."""

    name: str
    changes: tuple[tuple[str, str], ...]
    parts: frozenset[int] = frozenset()  # of the report, at least one of which must fail; none for a harmless edit
    script: str = "grpo.py"
    flags: tuple[str, ...] = ()

    def text(self) -> str:
        """The edited script. Raises ValueError where a text to be replaced is not there."""
        text = (ROOT / self.script).read_text()
        for old, new in self.changes:
            if old not in text:
                raise ValueError(f"{self.name}: {self.script} no longer has {old!r}")
            text = text.replace(old, new)
        return text


def mistake(
    name: str, parts: set[int], *changes: tuple[str, str], script: str = "grpo.py", flags: tuple[str, ...] = ()
) -> Edit:
    return Edit(name, changes, frozenset(parts), script, flags)


def harmless(name: str, *changes: tuple[str, str], script: str = "grpo.py", flags: tuple[str, ...] = ()) -> Edit:
    return Edit(name, changes, frozenset(), script, flags)


SAMPLER = "        sampler_N = batching.flat([s.sampler_logprobs for s in samples], device)\n"
FRESH = "        fresh_N = batching.flat([s.token_versions() == step for s in samples], device)\n"
RATIO = "ratio_T = (t.logprobs_T - t.old_T).clamp(-20, 20).exp()"
OLD = "old_T=old_N[mb.tokens] if updates > 1 else logprobs_T.detach(),"
WEIGHTS = "weights_T=weights_N[mb.tokens],\n                        entropy_T"
LOSS = "loss = (loss_T * tokens.weights_T).sum() * run.world_size  # DeepSpeed takes the mean over ranks"
POLICY = "policy = utils.prepare_policy(model, args, run, stop_ids[0])"
STD = "centered_PG / (rewards_PG.std(1, keepdim=True) + eps)"
ADVANTAGES = "advantages_PG = group_advantages(rewards_PG, kind, args.advantage_eps)\n        penalty_N"

MISTAKES = [
    mistake("sum instead of mean over ranks", {2}, (LOSS, LOSS.replace("run.world_size", "run.world_size**2"))),
    mistake("KL sign", {1}, ("loss_T = loss_T + beta * kl_T", "loss_T = loss_T - beta * kl_T")),
    mistake("detached ratio", {1, 4}, (RATIO, RATIO + ".detach()")),
    mistake("missing old log-probs", {2}, (OLD, "old_T=logprobs_T.detach(),")),
    mistake("wrong mask shift by one", {2}, (WEIGHTS, WEIGHTS.replace("mb.tokens", "(mb.tokens - 1).clamp(min=0)"))),
    mistake("advantages normalized over the batch", {2}, (STD, "centered_PG / (rewards_PG.std() + eps)")),
    mistake("sampler log-probs used as old", {2}, (OLD, "old_T=sampler_N[mb.tokens],")),
    mistake(
        "length normalization per micro-batch",
        {2},
        (LOSS, "loss = loss_T[tokens.weights_T > 0].mean() * run.world_size"),
    ),
    mistake("padding in the mean", {2}, (LOSS, "loss = loss_T.sum() / mb.input_ids.numel() * run.world_size")),
    mistake(
        "temperature missing in the trainer",
        {2},
        (
            POLICY,
            "import dataclasses\n    policy = utils.prepare_policy("
            "model, dataclasses.replace(args, temperature=1.0), run, stop_ids[0])",
        ),
    ),
]
ALSO = [
    mistake("KL of k3 with a wrong sign", {1}, ("return torch.expm1(-bounded_T)", "return torch.expm1(bounded_T)")),
    mistake("ratio to the sampler", {1}, (RATIO, RATIO.replace("old_T", "sampler_T"))),
    mistake(
        "clip on the wrong side",
        {1},
        ("torch.maximum(unclipped_T, clipped_T)", "torch.minimum(unclipped_T, clipped_T)"),
    ),
    mistake(
        "sign of the loss",
        {1},
        ("policy_T = torch.maximum(unclipped_T, clipped_T)", "policy_T = -torch.maximum(unclipped_T, clipped_T)"),
    ),
    mistake(
        "longest response in the mean",
        {2},
        ("tokens = sum(lengths[i] for i in in_loss)", "tokens = max(lengths) * len(in_loss)"),
    ),
    mistake("unbounded ratio", {3}, (RATIO, "ratio_T = (t.logprobs_T - t.old_T).exp()")),
    mistake(
        "dead flag",
        {6},
        ("    # ---- KL\n", '    sharpness: float = 1.0\n    """Exponent of the ratio."""\n\n    # ---- KL\n'),
    ),
    mistake(
        "equal groups without the mask", {3}, ("return centered_PG.masked_fill(equal_P1, 0.0)", "return centered_PG")
    ),
    mistake(
        "gae across responses",
        {2},
        (
            "torch.where(inside_BT[:, t], delta_B + gamma * lam * following_B, 0.0)",
            "torch.where(inside_BT[:, t], delta_B + gamma * lam * following_B.roll(1), 0.0)",
        ),
        script="ppo.py",
    ),
    mistake(
        "critic learns away from returns",
        {2, 4},
        ("return error_T.maximum(clipped_T) / 2", "return -error_T.maximum(clipped_T) / 2"),
        script="ppo.py",
    ),
    # Further mistakes of the same kinds, each in another place.
    mistake(
        "bounds of the clip swapped",
        {6},
        ("clamp(1 - args.clip_lower, 1 + args.clip_higher)", "clamp(1 - args.clip_higher, 1 + args.clip_lower)"),
    ),
    mistake("entropy penalized", {6}, ("policy_T - args.entropy_coef", "policy_T + args.entropy_coef")),
    mistake(
        "truncation mask off by one",
        {2},
        ('if samples[i].finish_reason != "length"]', 'if samples[i - 1].finish_reason != "length"]'),
    ),
    mistake("importance weight inverted", {6}, ("(old_T - sampler_T).exp()", "(sampler_T - old_T).exp()")),
    mistake("leave one out divided", {6}, ("* group / (group - 1)", "* (group - 1) / group")),
    mistake(
        "length of another sample in loss_norm sequence",
        {6},
        ("(len(in_loss) * lengths[i])", "(len(in_loss) * lengths[i - 1])"),
    ),
    mistake("reference is the policy", {2}, ("= reference(mb)[0]", "= policy(mb)[0]")),
    mistake(
        "KL in the reward without what follows",
        {2},
        ("kl.reward * return_to_go(kl_N, offsets)", "kl.reward * kl_N[:-1]"),
    ),
    mistake(
        "advantages of other samples",
        {2},
        (
            "batching.per_token([s.advantage for s in samples]",
            "batching.per_token([s.advantage for s in samples[::-1]]",
        ),
    ),
    mistake(
        "dual clip on positive advantages",
        {6},
        ("torch.where(t.advantages_T < 0, torch.min", "torch.where(t.advantages_T > 0, torch.min"),
    ),
    mistake(
        "gae without lambda",
        {2},
        ("delta_B + gamma * lam * following_B", "delta_B + gamma * following_B"),
        script="ppo.py",
    ),
    mistake(
        "values of the next step forgotten",
        {2},
        ("gamma * values_BT[:, t + 1] - values_BT[:, t]", "gamma * values_BT[:, t] - values_BT[:, t]"),
        script="ppo.py",
    ),
    mistake(
        "value clip takes the smaller loss",
        {2, 6},
        ("error_T.maximum(clipped_T) / 2", "error_T.minimum(clipped_T) / 2"),
        script="ppo.py",
    ),
    mistake("critic's targets shifted", {2}, ("targets_N[mb.tokens]", "targets_N.roll(1)[mb.tokens]"), script="ppo.py"),
    mistake("divided by the variance", {2}, ("(variance + 1e-8).sqrt()", "(variance + 1e-8)"), script="ppo.py"),
    mistake(
        "advantages not whitened",
        {2},
        ("            token_advantages_N = whiten(token_advantages_N)\n", "            pass\n"),
        script="ppo.py",
    ),
]
# Mistakes that only several optimizer steps, a KL or a schedule show, or that keep a part from running.
SUBTLE = [
    mistake(
        "new log-probs as old in the second epoch", {2}, (OLD, OLD.replace("updates > 1", "updates > 1 and epoch == 0"))
    ),
    mistake("beta applied twice", {1}, ("loss_T = loss_T + beta * kl_T", "loss_T = loss_T + beta * beta * kl_T")),
    mistake(
        "equal groups without their KL",
        {2},
        ("if reference is None and args.entropy_coef == 0:", "if args.entropy_coef == 0:"),
    ),
    mistake("learning rate never set", {2}, ("                deepspeed_zero.set_learning_rate(policy, lr)\n", "")),
    mistake(
        "reference at the temperature squared",
        {2},
        (
            "    reference = utils.load_reference(args, run)\n",
            "    reference = utils.load_reference(args, run)\n    if reference is not None:\n"
            "        reference.temperature = args.temperature**2\n",
        ),
    ),
    mistake(
        "KL in the reward by the sampler",
        {2},
        ("kl_value(args.kl_reward_estimator, old_N, old_N", "kl_value(args.kl_reward_estimator, sampler_N, sampler_N"),
    ),
    mistake(
        "always the first mini-batch",
        {2},
        ("utils.mini_batch(groups, step, epoch, mini, args)", "utils.mini_batch(groups, step, epoch, 0, args)"),
    ),
    mistake(
        "weights of the whole batch in each mini-batch",
        {2},
        ("loss_weights(samples, mini_in_loss, args)", "loss_weights(samples, in_loss, args)"),
    ),
    mistake(
        "sign of the loss, behind another argument",
        {1},
        ("beta: float, args: Args) ->", "beta: float, args: Args, step: int) ->"),
        ("token_loss(tokens, kl.loss, args)", "token_loss(tokens, kl.loss, args, step)"),
        ("policy_T = torch.maximum(unclipped_T, clipped_T)", "policy_T = -torch.maximum(unclipped_T, clipped_T)"),
    ),
]
KL_FLAG = "    # ---- KL\n"
CLAMP = "ratio_T.clamp(1 - args.clip_lower, 1 + args.clip_higher)"
HARMLESS = [
    harmless("unedited"),
    harmless("in_loss renamed", ("in_loss", "counted")),
    harmless(
        "another argument of token_loss",
        ("beta: float, args: Args) ->", "beta: float, args: Args, step: int = 0) ->"),
        ("token_loss(tokens, kl.loss, args)", "token_loss(tokens, kl.loss, args, step)"),
    ),
    harmless(
        "a smooth clip behind a flag",
        (KL_FLAG, '    tanh_clip: float = 0.0\n    """Width of a smooth clip; 0: off."""\n\n' + KL_FLAG),
        (CLAMP, f"(1 + args.tanh_clip * torch.tanh((ratio_T - 1) / args.tanh_clip) if args.tanh_clip else {CLAMP})"),
        flags=("--tanh_clip", "0.3"),
    ),
    harmless(
        "KL inside the group's statistics",
        flags=("--kl_placement", "reward", "--beta", "0.1", "--kl_reward_norm", "before_norm"),
    ),
    harmless("unedited ppo.py", script="ppo.py"),
    harmless("ratio renamed", ("ratio_T", "rho_T")),
    harmless("samples renamed in main", ("penalty_N", "reward_penalty_N")),
    harmless(
        "clipping by torch.clamp",
        (
            "ratio_T.clamp(1 - args.clip_lower, 1 + args.clip_higher)",
            "torch.clamp(ratio_T, 1 - args.clip_lower, 1 + args.clip_higher)",
        ),
    ),
    harmless(
        "minimum instead of maximum",
        ("policy_T = torch.maximum(unclipped_T, clipped_T)", "policy_T = -torch.minimum(-unclipped_T, -clipped_T)"),
    ),
    harmless(
        "a metric of the loss",
        (
            '"ratio": ratio_T, "clipped": clipped_T, "weight": weight_T}',
            '"ratio": ratio_T, "clipped": clipped_T, "weight": weight_T, "spread": (ratio_T - 1).abs()}',
        ),
    ),
    harmless(
        "lines reordered",
        (
            SAMPLER + FRESH,
            FRESH + SAMPLER,
        ),
    ),
    harmless(
        "a function extracted",
        (
            "\ndef token_loss(",
            "\ndef importance_ratio(logprobs_T, old_T):\n    return (logprobs_T - old_T).clamp(-20, 20).exp()\n"
            "\n\ndef token_loss(",
        ),
        (RATIO, "ratio_T = importance_ratio(t.logprobs_T, t.old_T)"),
    ),
    harmless("another default", ("clip_higher: float = 0.2", "clip_higher: float = 0.28")),
    harmless(
        "a flag that works",
        ("    # ---- KL\n", '    boost: float = 1.0\n    """Factor of positive advantages."""\n\n    # ---- KL\n'),
        (
            "unclipped_T = -t.advantages_T * ratio_T",
            "boost_T = torch.where(t.advantages_T > 0, args.boost, 1.0)\n"
            "    unclipped_T = -t.advantages_T * boost_T * ratio_T",
        ),
        ("clipped_T = -t.advantages_T * ratio_T.clamp", "clipped_T = -t.advantages_T * boost_T * ratio_T.clamp"),
    ),
    harmless(
        "an optimizer: SGD",
        (
            "optimizer = utils.make_optimizer(policy.parameters(), args.learning_rate, args)",
            "optimizer = torch.optim.SGD(policy.parameters(), lr=args.learning_rate, momentum=0.9)",
        ),
    ),
    harmless("a KL in the loss", flags=("--beta", "0.05", "--kl_estimator", "k2")),
    harmless("Dr. GRPO by flags", flags=("--loss_norm", "constant", "--advantage_normalization_type", "centered")),
    harmless("values renamed in ppo.py", ("values_N", "v_N"), script="ppo.py"),
]

LOSS = "r.advantage * logprobs_T.sum()"
DIVIDED = "    advantages_PG /= rewards_PG.std(1, keepdim=True) + 1e-6"
TOKENS = "sum(len(r.ids) for r in complete)"
GROUPS, CRITIC = "variants/grpo_min.py", "variants/ppo_min.py"
# Of files that stand alone. ``parts`` has the part that finds a mistake; the others fail nothing.
SMALL = [
    mistake("sign of the loss", {1}, ("loss -= r.advantage", "loss += r.advantage"), script=GROUPS),
    mistake("detached log-probs", {1}, (LOSS, "r.advantage * logprobs_T.detach().sum()"), script=GROUPS),
    mistake("absolute advantages", {1}, (LOSS, f"abs({LOSS}".replace(" *", ") *")), script=GROUPS),
    mistake("EOS left out", {2}, (LOSS, "r.advantage * logprobs_T[:-1].sum()"), script=GROUPS),
    mistake("a sum over the step", {2}, (f"{LOSS} / tokens", LOSS), script=GROUPS),
    mistake("mean per micro-batch", {2}, (f"{LOSS} / tokens", f"{LOSS} / len(part)"), script=GROUPS),
    mistake("truncated responses in the loss", {2}, ("not r.truncated and abs", "abs"), script=GROUPS),
    mistake("std of the batch", {2}, ("rewards_PG.std(1, keepdim=True)", "rewards_PG.std()"), script=GROUPS),
    mistake("groups across prompts", {2}, ("view(-1, group)", "view(group, -1).T"), script=GROUPS),
    mistake("no eps", {3}, (DIVIDED, DIVIDED.removesuffix(" + 1e-6")), script=GROUPS),
    mistake("temperature missing", {4}, ("(logits_TV / temperature)", "logits_TV"), script=GROUPS),
    mistake("inputs shifted", {4}, ("prompt[-1:] + r.ids[:-1]", "r.ids"), script=GROUPS),
    mistake("padding on the left", {4}, ("logits_SV[: len(r.ids)]", "logits_SV[-len(r.ids) :]"), script=GROUPS),
    mistake("last token of the prompt twice", {4}, ("[prompt[:-1]]", "[prompt]"), script=GROUPS),
    mistake("clip on the wrong side", {1}, ("torch.minimum(ratio_T", "torch.maximum(ratio_T"), script=CRITIC),
    mistake("ratio to itself", {1}, ("T - engine_T).exp", "T - logprobs_T.detach()).exp"), script=CRITIC),
    mistake("gae without lambda", {2}, ("+= args.gae_lambda * ", "+= "), script=CRITIC),
    mistake("gae forwards", {2}, ("reversed(range(len(r.ids) - 1))", "range(len(r.ids) - 1)"), script=CRITIC),
    harmless("unedited small file", script=GROUPS),
    harmless("unedited small file with a critic", script=CRITIC),
    harmless("Dr. GRPO", (DIVIDED, "    #"), (TOKENS, "len(complete) * args.max_response_length"), script=GROUPS),
    harmless("RLOO", (DIVIDED, "    advantages_PG *= group / (group - 1)"), script=GROUPS),
]


def unseen(kind: str) -> list[Edit]:
    """Return the edits of one kind in script_edits.jsonl; a mistake without parts is not found."""
    rows = map(json.loads, (ROOT / "tests" / "script_edits.jsonl").read_text().splitlines())
    fields = ("name", "changes", "parts", "script", "flags")
    return [Edit(**{field: row[field] for field in fields}) for row in rows if row["kind"] == kind]


EXAMPLES = [
    mistake("wrong", {2}, (OLD, "old_T=sampler_N[mb.tokens],")),
    mistake(
        "dead",
        {6},
        ("    # ---- KL\n", '    sharpness: float = 1.0\n    """Exponent of the ratio."""\n\n    # ---- KL\n'),
    ),
]
PAGE = ROOT / "docs" / "maintainers" / "check.md"


def example(edit: Edit, folder: Path) -> str:
    """An example of the page: the edit, the command, and what the command prints."""
    copy = folder / f"{edit.name}.py"
    copy.write_text(edit.text())
    old = (ROOT / edit.script).read_text().splitlines()
    diff = [
        x
        for x in difflib.unified_diff(old, edit.text().splitlines(), n=0, lineterm="")
        if x[:2] not in ("--", "++", "@@")
    ]
    words = [*edit.flags, "--brief", "--parts", *map(str, sorted(edit.parts))]
    line = [sys.executable, str(ROOT / "scripts" / "check.py"), str(copy), *words]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=ROOT)
    command = " ".join(["python scripts/check.py", copy.name, *words])
    printed = f"```diff\n{chr(10).join(diff)}\n```\n\n```\n$ {command}\n{done.stdout.rstrip()}\n```"
    return f"{printed}\n\nThe exit code is {done.returncode}."


def write_examples() -> None:
    """Write what the command prints for EXAMPLES to the page, between the marks of each."""
    for edit in EXAMPLES:
        begin, end = f"<!-- begin {edit.name} -->", f"<!-- end {edit.name} -->"
        with tempfile.TemporaryDirectory() as folder:
            text = example(edit, Path(folder))
        before, _, rest = PAGE.read_text().partition(begin)
        PAGE.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    write_examples()

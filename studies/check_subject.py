"""The script that scripts/check.py examines, the unedited script, and what the parts of the check found."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import json
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

import script_loader
import torch
from enumeration import CONDITIONS, F64
from framework_losses import Adapter, Loss, Micro
from probe_run import CriticView, GroupView
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import grpo
from runtime.arguments import flags

OK = "ok"
NOTE = "note"  # differs from the unedited script, and may be what was intended
FAIL = "FAIL"
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
SAME = 1e-6  # relative difference below which two gradients are one
SIZES = (1, 4, 2, 3, 2, 4)  # tokens of the responses of a small batch: its counts differ from one another
ROWS = Micro._fields[:7]
TOKEN, SEQUENCE, RESPONSE, CONSTANT, SUM = "token", "sequence", "response sum", "constant", "sum"
DIVISORS = {  # what the sum of all tokens is divided by
    SUM: lambda mask: 1,
    SEQUENCE: lambda mask: len(mask) * mask.sum(1, keepdim=True),
    TOKEN: lambda mask: mask.sum(),
    RESPONSE: len,
    CONSTANT: lambda mask: mask.numel(),
}
LOSS = ("add_gradients", "token_logprobs", "outputs", "prompt_cache")
NEEDED = ("Args", "Tokens", "token_loss", "loss_weights", "main", "preflight")


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``place``: file, line and text of the code that it is about, if that is known."""

    part: int
    name: str
    state: str  # OK, NOTE or FAIL
    text: str
    place: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


def judge(part: int, name: str, right: bool, good: str, bad: str, place: str, state: str = FAIL) -> Finding:
    """Return a finding: OK if ``right``, else ``state`` at this place."""
    return Finding(part, name, OK, good) if right else Finding(part, name, state, bad, place)


@dataclass
class Subject:
    """A script with its arguments, and the unedited script with those of them that it has."""

    script: ModuleType
    args: Any
    base: ModuleType
    base_args: Any
    flags_given: frozenset[str]
    conditions: tuple[str, ...] = tuple(CONDITIONS)  # those of studies/enumeration.py that it meets
    tolerance = 0.0  # of advantages in a group of equal rewards
    takes_old = True  # whether the loss is given old log-probs besides the sampler's

    @property
    def name(self) -> str:
        return Path(self.script.__file__).name

    @property
    def base_name(self) -> str:
        return Path(self.base.__file__).name

    @property
    def is_ppo(self) -> bool:
        return self.base_name == "ppo.py"

    def named(self, losses: dict[str, Callable]) -> dict[str, Callable]:
        """Return the known losses that this one is compared with."""
        return losses

    def with_flags(self, **changes: Any) -> Any:
        """Return the script's arguments with other values of these flags, as far as the script has them."""
        return with_flags(self.args, **changes)

    def place(self, function: str, phase: str = "") -> str:
        """Return the first line of a function that differs from the unedited script: "mine.py:212, token_loss: text".

        ``phase``: of ``main``, a number at the start of a comment. Empty where nothing has changed.
        """
        ours = source_of(self.script, function, phase)
        theirs = source_of(self.base, function, phase)
        matcher = difflib.SequenceMatcher(
            None, [text for _, text in theirs], [text for _, text in ours], autojunk=False
        )
        for kind, _, _, start, end in matcher.get_opcodes():
            if kind == "equal" or not ours:
                continue
            number, text = ours[min(start, len(ours) - 1)]
            removed = " (lines are missing here)" if start == end else ""
            return f"{self.name}:{number}, {function}: {text.strip()}{removed}"
        return ""

    def first_place(self, *places: tuple[str, str] | str) -> str:
        """Return the first changed line in any of these functions, or (function, phase)s of ``main``."""
        for place in places:
            function, phase = (place, "") if isinstance(place, str) else place
            if found := self.place(function, phase):
                return found
        return ""


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

    def finish(self, seconds: float, place: Path | None) -> int:
        """Print the verdict, write the report as JSON to a place, if there is one, and return the exit code."""
        failed = sum(f.state == FAIL for f in self.findings)
        notes = sum(f.state == NOTE for f in self.findings)
        verdict = f"{failed} failed" if failed else "nothing that must hold fails"
        print(f"\n{self.subject.name}: {verdict}, {notes} notes, {len(self.findings)} checks, {seconds:.0f} s")
        if place is not None:
            place.write_text(json.dumps(self.as_json(), indent=1, default=str) + "\n")
        return 1 if failed else 0


class SmallSubject(Subject):
    """A file that stands alone, next to the unedited one."""

    def place(self, function: str, phase: str = "") -> str:
        edited = Subject(self.script.small, None, self.base.small, None, frozenset())
        of_advantages = function in ("group_advantages", "gae")
        names = ("set_advantages",) if of_advantages else LOSS
        return edited.first_place(*names)


class LossView:
    """A framework's loss with the token_loss of a script."""

    fields = tuple(f"{name}_T" for name in ROWS[:5])
    Tokens = dataclasses.make_dataclass("Tokens", [*fields, "response_T"])
    Args = SimpleNamespace

    def __init__(self, name: str, loss: Loss):
        self.__file__ = name
        self.loss = loss
        self.mean, self.factor = self.find_mean()

    def find_mean(self) -> tuple[str, float]:
        """Return what the loss divides by, and a further factor: of the gradient for advantages and ratios of 1."""
        old_T = torch.linspace(-3, -0.1, sum(SIZES), dtype=F64)
        step = self.step(SIZES, [old_T] * 4 + [torch.ones_like(old_T)])
        weights = -self.gradient(step)
        found = {}
        for name, divisor in DIVISORS.items():
            share = (weights * divisor(step.mask))[(weights != 0) & (step.mask > 0)]
            if len(share) > 0 and (share - share[0]).abs().max() < SAME * share.abs().max():
                found[name] = share[0].abs().item()
        name = min(found, key=lambda name: abs(found[name] - 1) > SAME, default="")  # without a factor, if there is one
        return name, found.get(name, 1.0)

    def step(self, sizes: Sequence[int], values: Sequence[Tensor], **more) -> Micro:
        """Return all rows of a step, of values one response after the other: the first five fields of a Micro."""
        values = [*values, torch.ones_like(values[0])]
        *rows, mask = [pad_sequence(value_T.split(list(sizes)), batch_first=True) for value_T in values]
        return Micro(*rows, mask, torch.ones_like(mask), torch.arange(len(sizes)), mask, **more)

    def gradient(self, step: Micro, cuts: Sequence[Sequence[int]] = (), ranks: int = 1) -> Tensor:
        """Return the gradient of a step, [R, T], that is cut into these rows, which are dealt to ranks."""
        leaf = step.logprobs.detach().clone().requires_grad_()
        cuts = cuts or [range(len(leaf))]
        total = 0.0
        for rows in cuts:
            own = torch.tensor(list(rows))
            parts = {name: getattr(step, name)[own] for name in ROWS}
            parts |= {"logprobs": leaf[own], "rows": own}
            parts |= {"micro_batches": len(cuts) // ranks, "ranks": ranks}
            total = total + self.loss(step._replace(**parts)) / ranks
        return torch.autograd.grad(total, leaf, allow_unused=True, materialize_grads=True)[0]

    def token_loss(self, tokens, beta: float, args) -> tuple[Tensor, dict]:
        """Return a loss per token, [T], with the gradient of the framework's loss, before it is divided by counts."""
        sizes = tokens.response_T.unique_consecutive(return_counts=True)[1].tolist()
        kl = {"beta": beta, "estimator": args.kl_estimator} if beta else {}
        step = self.step(sizes, [getattr(tokens, name) for name in self.fields], **kl)
        mean = RESPONSE if self.mean == SEQUENCE else self.mean or SUM  # what divides by the length stays in the loss
        slopes_T = self.gradient(step)[step.mask > 0] * DIVISORS[mean](step.mask) / self.factor
        moved_T = tokens.logprobs_T - tokens.logprobs_T.detach()
        return slopes_T.to(moved_T.dtype) * moved_T, {}


class LossSubject(Subject):
    """A framework's loss next to PPO's."""

    base_name = "PPO, clip 0.2"

    def __init__(self, name: str, loss: Loss, adapter: Adapter):
        base = SimpleNamespace(Tokens=grpo.Tokens, token_loss=grpo.token_loss)
        super().__init__(
            LossView(name, loss),
            grpo.Args(),
            base,
            grpo.Args(),
            frozenset(),
        )
        self.adapter = adapter
        self.takes_old = adapter.old

    def place(self, *_: str) -> str:
        return self.name

    def named(self, losses: dict[str, Callable]) -> dict[str, Callable]:
        """Return the known losses, grpo.py's as PPO clip; next to a mean within each response also over its length."""
        own, *_ = losses
        losses = {"PPO clip": losses.pop(own)} | losses
        if self.script.mean != SEQUENCE:
            return losses

        def shorter(loss: Callable, b) -> Tensor:
            return loss(b) / b.lengths[b.owner]

        return losses | {f"{name} / length": partial(shorter, loss) for name, loss in losses.items()}


def with_flags(args: Any, **changes: Any) -> Any:
    """Return the arguments with other values of these flags, as far as the script has them."""
    known = {f.name for f in dataclasses.fields(args)}
    return dataclasses.replace(args, **{name: value for name, value in changes.items() if name in known})


def source_of(module: ModuleType, function: str, phase: str) -> list[tuple[int, str]]:
    """Return the numbered lines of a function or a phase of ``main``, without comments and blank lines."""
    if not hasattr(module, function):
        return []
    lines, first = inspect.getsourcelines(getattr(module, function))
    node = ast.parse(textwrap.dedent("".join(lines))).body[0]
    docstring = range(0)
    if ast.get_docstring(node) is not None:
        docstring = range(first + node.body[0].lineno - 1, first + node.body[0].end_lineno)
    found = []
    inside = not phase
    for number, line in enumerate(lines, first):
        if number in docstring:
            continue
        text = line.split("  # ")[0].rstrip()
        mark = line.strip()
        if phase and mark.startswith("# ") and mark[2:3].isdigit():
            inside = mark[2:].startswith(phase)
        if inside and text.strip() and not mark.startswith("#"):
            found.append((number, text))
    return found


def load_subject(path: Path, words: list[str]) -> Subject:
    """Import a script, parse its flags, and choose the unedited one. Exits with code 2 for other files."""
    script_loader.check(path)
    text = path.read_text()
    if "\ndef add_gradients(" in text:
        kind, name = (CriticView, "ppo_min.py") if "critic" in text else (GroupView, "grpo_min.py")
        base = kind(ROOT / "variants" / name, [])
        args = grpo.Args(advantage_normalization_type="centered", loss_norm="constant")  # claims the least
        conditions = ("fresh", "unlike") if kind is GroupView else tuple(CONDITIONS)
        return SmallSubject(kind(path, words), args, base, args, frozenset(), conditions)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # where Python looks first when it runs the script
    script = script_loader.load_script(path, NEEDED)
    name = "ppo" if hasattr(script, "gae") and not hasattr(script, "group_advantages") else "grpo"
    base = script_loader.load_script(ROOT / f"{name}.py", NEEDED)
    args = flags.parse(script.Args, script.__doc__, words)
    known = {f.name for f in dataclasses.fields(base.Args)}
    shared = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name in known}
    return Subject(script, args, base, base.Args(**shared), args.flags_set)

"""The parts of scripts/check.py that start no run: on edited copies they find what they must, and nothing else."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator

import check_flags
import check_functions
import check_gradient
import check_learning
import check_loss
import check_numbers
import check_report
import check_subject
import fixed_samples
import pytest
import script_edits
import torch
from check_subject import FAIL
from helpers import write_variant
from script_edits import ALSO, HARMLESS, MISTAKES, SMALL, SUBTLE

import grpo
import rewards

# Edits that need no run to be found -> the finding that must fail.
FOUND = {
    "KL sign": "KL k3+, fresh",
    "KL of k3 with a wrong sign": "KL k3, fresh",
    "beta applied twice": "KL coefficient",
    "detached ratio": "gradient",
    "ratio to the sampler": "inputs",
    "sign of the loss": "fresh samples",
    "clip on the wrong side": "side of the clip",
    "advantages normalized over the batch": "rewards of other groups",
    "longest response in the mean": "weights",
    "unbounded ratio": "log-probs -1e4 to 0",
    "equal groups without the mask": "equal rewards",
    "gae across responses": "gae, other responses",
    "critic learns away from returns": "critic's loss",
    "bounds of the clip swapped": "--clip_lower",
    "entropy penalized": "--entropy_coef",
    "importance weight inverted": "--truncated_importance_sampling_ratio_cap",
    "leave one out divided": "--advantage_normalization_type",
    "length of another sample in loss_norm sequence": "--loss_norm",
    "dual clip on positive advantages": "--clip_ratio_c",
    "gae without lambda": "gae",
    "values of the next step forgotten": "gae, lambda 1",
    "value clip takes the smaller loss": "critic's loss",
    "divided by the variance": "whiten",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(fixed_samples.make_model(tmp_path_factory.mktemp("model"))).double()


@pytest.mark.parametrize("edit", SMALL, ids=lambda edit: edit.name)
def test_a_mistake_in_a_file_that_stands_alone_is_found(edit, model, tmp_path):
    """By the part of its row, at the edited function; a harmless edit fails in no part."""
    path = tmp_path / f"small_{SMALL.index(edit)}.py"
    path.write_text(edit.text())
    subject = check_subject.load_subject(path, [])
    checks = {
        1: (check_loss.check_ascent, check_loss.check_groups),
        2: (check_functions.check,),
        3: (check_numbers.check_edges, check_numbers.check_group_edges),
        4: (lambda subject: check_report.check_logprobs(subject, model),),
    }
    findings = [f for part in edit.parts or checks for check in checks[part] for f in check(subject)]
    failed = [f for f in findings if f.state == FAIL]
    assert bool(failed) == bool(edit.parts) and all(f.place.startswith(path.name) for f in failed), failed


FAST = ("unedited ppo.py", "minimum instead of maximum", "a flag that works")


def parts(subject: check_subject.Subject, model, flags: list[str]):
    """The checks that start no run, the quick ones first. ``flags``: those that are tried."""
    yield lambda: check_functions.check(subject)
    yield lambda: check_loss.check_kl(subject)
    yield lambda: check_numbers.check_edges(subject)
    yield lambda: check_numbers.check_group_edges(subject)
    yield lambda: check_loss.check_ascent(subject)
    yield lambda: check_flags.check_known(subject, flags)
    yield lambda: check_loss.check_groups(subject)
    yield lambda: check_gradient.check_gradient(subject, model)


def failing(subject: check_subject.Subject, model, flags: list[str] | None = None) -> Iterator[check_subject.Finding]:
    """Yield the findings that fail, part by part. ``flags``: default all."""
    every = [field.name for field in dataclasses.fields(subject.base.Args)]
    for part in parts(subject, model, every if flags is None else flags):
        yield from (finding for finding in part() if finding.state == FAIL)


@pytest.mark.parametrize("name", FOUND)
def test_a_mistake_in_a_function_is_found_without_a_run(name, model, tmp_path):
    """The parts run up to the one that finds it."""
    (edit,) = [edit for edit in (*MISTAKES, *ALSO, *SUBTLE) if edit.name == name]
    path = tmp_path / f"edited_{[*FOUND].index(name)}.py"
    path.write_text(edit.text())
    subject = check_subject.load_subject(path, [])
    found = next(f for f in failing(subject, model, [FOUND[name].removeprefix("--")]) if f.name == FOUND[name])
    assert found.place.startswith(path.name), "the line that was edited"


@pytest.mark.integration
@pytest.mark.parametrize("edit", [edit for edit in HARMLESS if edit.name in FAST], ids=lambda edit: edit.name)
def test_a_harmless_edit_fails_nothing(edit, model, tmp_path):
    """A selection; tests/runs/test_check_command.py tries each by the complete command."""
    path = tmp_path / f"harmless_{HARMLESS.index(edit)}.py"
    path.write_text(edit.text())
    assert list(failing(check_subject.load_subject(path, list(edit.flags)), model)) == []


VARIANTS = {
    "cispo": "this is CISPO",
    "gspo": "this is GSPO",
    "dppo": "this is DPPO",
    "maxrl": "this is the loss of grpo.py",
    "reinforce_pp": "this is the loss of grpo.py",
    "turn_rewards": "this is the loss of grpo.py",
    "sdpo": "this is the loss of grpo.py",
    "opsd": "this is the loss of grpo.py",
}


@pytest.mark.integration
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_named(name, tmp_path):
    subject = check_subject.load_subject(write_variant(name, tmp_path), [])
    findings = check_loss.check_ascent(subject)
    assert [f for f in findings if f.state == FAIL] == []
    assert next(f for f in findings if f.name == "nearest loss").text.startswith(VARIANTS[name])


def test_identical_runs_name_the_flags_with_which_an_edit_would_count():
    words = check_learning.no_effect(grpo.Args())
    assert "add --num_mini_batches 4" in words and "add --beta 0.1" in words
    assert "add" not in check_learning.no_effect(grpo.Args(num_mini_batches=4, beta=0.1))


def test_every_edit_applies():
    unseen = [*script_edits.unseen("mistake"), *script_edits.unseen("harmless")]
    for edit in (*MISTAKES, *ALSO, *SUBTLE, *HARMLESS, *SMALL, *unseen):
        compile(edit.text(), edit.name, "exec")
    assert len(unseen) == 80 and sum(bool(edit.parts) for edit in unseen) >= 36
    assert len(MISTAKES) == 10 and len(HARMLESS) >= 12
    with pytest.raises(ValueError, match="no longer has"):
        script_edits.harmless("gone", ("no such text", "")).text()


def test_finite_differences_hold_detached_factors():
    """With ``detach`` as it is, the difference of x * x.detach() is twice its gradient."""
    frozen = check_gradient.Frozen()
    x = torch.tensor(3.0, dtype=torch.float64)

    def value(at: torch.Tensor) -> float:
        with frozen():
            return (at * at.detach()).item()

    value(x)
    assert (value(x + 1e-6) - value(x - 1e-6)) / 2e-6 == pytest.approx(3.0)


def test_the_place_is_the_first_edited_line(tmp_path):
    edit = next(edit for edit in MISTAKES if edit.name == "missing old log-probs")
    path = tmp_path / "placed.py"
    path.write_text(edit.text())
    subject = check_subject.load_subject(path, [])
    number = next(k for k, line in enumerate(edit.text().splitlines(), 1) if "old_T=logprobs_T.detach()," in line)
    assert subject.place("main", "7").startswith(f"placed.py:{number}, main: old_T=logprobs_T.detach()")
    assert subject.place("main", "6") == "" and subject.place("token_loss") == ""


@pytest.mark.parametrize("name", ["submit", "collect", "close"])
def test_the_verifiers_of_probes_are_called_as_those_of_runs(name):
    """Or every run of part 2 ends early, which only slow tests would see."""
    own, real = (inspect.signature(getattr(kind, name)) for kind in (fixed_samples.FixedVerifiers, rewards.Verifiers))
    assert list(own.parameters) == list(real.parameters)

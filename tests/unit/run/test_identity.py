"""A run is its arguments and its code: an edited script trains, and never passes for the run of the original."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, SMALL, copy_of, folder_of, interrupted, read_jsonl, rejected, run_here, tiny_args
from safetensors.torch import load_file, save_file

import grpo
from runtime.data.samples import Problem
from runtime.run import directory, identity
from runtime.system import git, process

EDIT = """
original_loss = token_loss


def token_loss(*arguments, **named):
    loss_T, parts = original_loss(*arguments, **named)
    return {factor} * loss_T, parts


if __name__ == "__main__":"""


def edit(script: Path, factor: float) -> None:
    """Copy grpo.py and scale its loss, as a user would try out a loss of their own."""
    source = (ROOT / "grpo.py").read_text()
    start, entry, end = source.rpartition('\nif __name__ == "__main__":')
    assert entry
    script.write_text(start + EDIT.format(factor=factor) + end)
    sys.modules.pop(script.stem, None)
    identity._digests.cache_clear()


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The name of a copied script that can be imported, with no bytecode of its last edit in the way."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "mine.py"
    sys.modules.pop("mine", None)
    identity._digests.cache_clear()


def weights(args, script: str) -> str:
    return process.file_digest(folder_of(args, script) / "model" / "model.safetensors")


@pytest.mark.integration
def test_copy_edit_run_edit_run(tiny, tmp_path, mine, capsys):
    """The copy trains next to the original; edited again it is not finished, and trains by a name."""
    changes = {"learning_rate": 1e-3, "eval_prompts": 0}
    original = tiny_args(tiny, tmp_path / "runs", **changes)
    assert len(run_here(original)) == 2
    edit(mine, -1.0)
    first = tiny_args(tiny, tmp_path / "runs", "mine", **changes)
    assert len(run_here(first, "mine")) == 2
    assert folder_of(first, "mine").name.startswith("mine__")
    assert weights(first, "mine") != weights(original, "grpo")
    with pytest.raises(SystemExit) as end:
        run_here(first, "mine")
    assert end.value.code == 0
    assert "is finished" in capsys.readouterr().out

    edit(mine, -2.0)
    again = tiny_args(tiny, tmp_path / "runs", "mine", **changes)
    message = rejected(capsys, run_here, again, "mine")
    assert "is finished, but by other code:" in message
    assert "mine.py has changed" in message
    assert "--exp_name" in message
    assert "--overwrite" in message
    again.exp_name = "second"
    assert len(run_here(again, "mine")) == 2
    again.exp_name = "mine"
    again.overwrite = True
    assert len(run_here(again, "mine")) == 2


@pytest.mark.integration
def test_a_resumed_run_of_changed_code_needs_its_checkpoint(tiny, tmp_path, mine, monkeypatch, capsys):
    """The error names the file; --resume CHECKPOINT continues, and the next checkpoint is of the new code."""
    edit(mine, 1.0)
    args = tiny_args(tiny, tmp_path / "runs", "mine", **SMALL, save_every=1)
    folder = interrupted(args, monkeypatch, after=2, script="mine")
    edit(mine, -1.0)
    args = tiny_args(tiny, tmp_path / "runs", "mine", **SMALL, save_every=1)
    message = rejected(capsys, run_here, args, "mine")
    assert "step_000002 was saved by other code:" in message
    assert "mine.py has changed" in message
    checkpoint = folder / "checkpoints" / "step_000002"
    assert f"--resume {checkpoint} resumes it with what is there now" in message
    assert len(read_jsonl(folder / "metrics.jsonl")) == 2
    args.resume = str(checkpoint)
    assert len(run_here(args, "mine")) == 4
    assert "mine.py has changed" in capsys.readouterr().out
    state = json.loads((folder / "checkpoints" / "step_000004" / "state.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert state["code"] == config["code"] == identity.code_of(args)


def test_the_files_that_count(tiny, tmp_path):
    """The script, what it imports at the top, in functions and in packages, and files named by flags; no library."""
    (tmp_path / "parts" / "deep").mkdir(parents=True)
    (tmp_path / "parts" / "__init__.py").touch()
    (tmp_path / "parts" / "deep" / "__init__.py").write_text("from . import leaf\nfrom .. import side\n")
    (tmp_path / "parts" / "deep" / "leaf.py").touch()
    (tmp_path / "parts" / "side.py").touch()
    (tmp_path / "parts" / "unused.py").touch()
    (tmp_path / "helper.py").write_text("import json, torch\n\ndef f():\n    import parts.deep\n")
    (tmp_path / "verifier.py").write_text("import helper\n")
    args = grpo.Args(verifier=f"{tmp_path}/verifier.py:score,{ROOT}/tests/verifiers.py:parity")
    names = set(identity.code_of(args))
    assert names >= {"grpo.py", "utils.py", "rewards.py", "kl_estimators.py", "tests/verifiers.py"}
    for folder in ("graders", "runtime"):  # some of which only a flag loads
        assert names >= {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
    assert str(tmp_path / "verifier.py") in names
    assert not [name for name in names if "site-packages" in name or name.startswith("scripts")]
    places = [tmp_path, ROOT]
    digests = identity._digests(tmp_path / "verifier.py", (), None)
    found = {Path(name).relative_to(tmp_path).as_posix() for name in digests}
    expected = {"verifier.py", "helper.py", "parts/__init__.py", "parts/deep/__init__.py", "parts/deep/leaf.py"}
    assert found == expected | {"parts/side.py"}
    assert identity._module_files("torch.nn", places) == []
    assert digests.keys() == identity._digests(tmp_path / "verifier.py", (), "parts.side").keys()


def test_words_for_changed_code():
    assert identity.changed_code({"a.py": "1"}, {"a.py": "1"}) == []
    assert identity.changed_code({"a.py": "1", "b.py": "1", "d.py": "1"}, {"a.py": "2", "c.py": "1", "d.py": "1"}) == [
        "a.py has changed",
        "b.py is no longer part of it",
        "c.py is new",
    ]


# ---------------------------------------------------------------------------------------- arguments without identity


def test_memory_flags_can_change_when_a_run_is_resumed(stopped, tmp_path, capsys):
    """After running out of memory the same run continues with the flags that the error advises, by its default name."""
    args = copy_of(stopped, tmp_path)
    advised = {"micro_batch_tokens": 160, "gradient_checkpointing": True, "offload": ("optimizer",), "timeout": 60.0}
    engine = {"kv_cache_memory_bytes": 268435456, "max_num_seqs": 9, "gpu_memory_utilization": 0.3}
    advised["vllm_args"] = json.dumps(engine)
    for name, value in advised.items():
        setattr(args, name, value)
    assert len(run_here(args)) == 4
    said = capsys.readouterr().out
    assert "resuming after step 3" in said
    assert "changed: --micro_batch_tokens 256 there, 160 here" in said
    default = tiny_args(tiny_folder(args), tmp_path)
    changed = tiny_args(tiny_folder(args), tmp_path, **advised, total_steps=99)
    assert directory.run_name(changed, grpo.Args()) == directory.run_name(default, grpo.Args())
    quantized = tiny_args(tiny_folder(args), tmp_path, vllm_args='{"max_num_seqs": 9, "quantization": "fp8"}')
    assert directory.run_name(quantized, grpo.Args()) != directory.run_name(default, grpo.Args())
    assert identity.changed_arguments(identity.recorded(default), quantized)[0] != []
    several, other = (tiny_args(tiny_folder(args), tmp_path, vllm_engines=count) for count in (1, 2))
    assert identity.changed_arguments(identity.recorded(several), other)[0] == []
    assert identity.changed_arguments(identity.recorded(several), default)[0] != []


def tiny_folder(args) -> Path:
    return Path(args.model_name_or_path)


ROUNDING = 1e-4


@pytest.mark.integration
@pytest.mark.parametrize(
    "changes, tolerance",
    [
        ({"gradient_checkpointing": True}, 0.0),
        pytest.param({"offload": ("ref",)}, 0.0, marks=pytest.mark.slow),
        pytest.param({"max_logprob_diff": 0.0}, 0.0, marks=pytest.mark.slow),
        ({"micro_batch_tokens": 160}, ROUNDING),
        pytest.param({"offload": ("optimizer",)}, ROUNDING, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_resources_change_results_by_nothing_or_by_rounding(straight, tiny, tmp_path, changes, tolerance):
    """Four steps in fp32 with KL and two mini-batches: equal samples; equal losses and gradients, or up to rounding."""
    args = tiny_args(tiny, tmp_path, **RESOURCE_RUN, **changes)
    metrics = run_here(args)
    samples, expected = straight
    assert [row["response"] for row in read_jsonl(folder_of(args) / "samples.jsonl")] == samples
    for name in ("loss/total", "optim/grad_norm", "kl/k3", "policy/entropy"):
        ours = [m[name] for m in metrics]
        assert ours == pytest.approx([m[name] for m in expected], rel=tolerance, abs=1e-2 * tolerance), name


RESOURCE_RUN = {**SMALL, "beta": 0.1, "eval_every": 0, "eval_prompts": 0}


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory):
    args = tiny_args(tiny, tmp_path_factory.mktemp("straight"), **RESOURCE_RUN)
    metrics = run_here(args)
    return [row["response"] for row in read_jsonl(folder_of(args) / "samples.jsonl")], metrics


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--model_name_or_path", lambda place: {"model_name_or_path": place}),
        ("--reward_model_name_or_path", lambda place: {"reward_model_name_or_path": place}),
        ("--critic model_name_or_path", lambda place: {"critic": (f"model_name_or_path={place}",)}),
    ],
)
def test_every_model_of_a_run_is_compared(tiny, tmp_path, flag, values):
    """Ranks with other numbers under the same path are seen, also for the critic's own model."""
    place = Path(shutil.copytree(tiny, tmp_path / "part"))
    args = tiny_args(tiny, tmp_path, "ppo", **values(str(place)))
    before = identity.facts(args, "")["digest of"]
    weights = load_file(place / "model.safetensors")
    save_file({name: weight * 1.5 for name, weight in weights.items()}, place / "model.safetensors", {"format": "pt"})
    after = identity.facts(args, "")["digest of"]
    changed = [name for name in before if before[name] != after[name]]
    assert len(changed) == 1 and changed[0].startswith(flag)


def test_an_edited_file_makes_the_state_of_a_repository_dirty(tmp_path):
    (tmp_path / "old.py").write_text("before = 1\n")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "first")):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], cwd=tmp_path, check=True)
    assert git.state(tmp_path)["dirty"] is False
    (tmp_path / "old.py").write_text("after = 1\n")
    assert git.state(tmp_path)["dirty"] is True


@pytest.mark.parametrize("given, dirty", [("0123abc", False), ("0123abc-dirty", True)])
def test_a_copy_without_a_repository_records_the_commit_of_its_job(tmp_path, monkeypatch, given, dirty):
    """Ray leaves .git out of what it uploads, and the copy of a submission has none."""
    monkeypatch.delenv("CODE_COMMIT", raising=False)
    assert git.state(tmp_path) == {}
    monkeypatch.setenv("CODE_COMMIT", given)
    assert git.state(tmp_path) == {"commit": "0123abc", "dirty": dirty}


def test_every_column_of_a_row_is_part_of_the_data():
    """A game's seed is neither in the prompt nor in the truth; what is no JSON has no address in the digest."""
    digest = lambda row: directory.data_digest([Problem([], "1", "exact", row, [1, 2])])  # noqa: E731
    assert digest({"seed": 1}) == digest({"seed": 1})
    assert len({digest(row) for row in ({"seed": 1}, {"seed": 2}, {"game": 1}, {})}) == 4
    assert digest({"picture": object()}) == digest({"picture": object()})


@pytest.mark.integration
@pytest.mark.parametrize("flag", ["environment", "verifier"])
def test_helpers_next_to_a_file_of_the_user_s_are_part_of_the_code(tmp_path, flag):
    """Also one that has the name of a project file, and one that a helper imports."""
    (tmp_path / "world.py").write_text("import helper\nfrom utils import rule\n\n\nclass World:\n    pass\n")
    (tmp_path / "helper.py").write_text("def f():\n    import below, package.part\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text("def f():\n    from package.other import value\n")
    (tmp_path / "package" / "other.py").write_text("value = 1\n")
    for name in ("below", "utils"):
        (tmp_path / f"{name}.py").write_text("rule = 1\n")
    args = grpo.Args(**{flag: f"{tmp_path / 'world.py'}:World"})
    before = identity.code_of(args)
    assert {Path(name).name for name in before if name.startswith("/")} == {
        "world.py",
        "helper.py",
        "below.py",
        "utils.py",
        "part.py",
        "other.py",
    }
    (tmp_path / "below.py").write_text("rule = 2\n")
    identity._digests.cache_clear()
    (changed,) = identity.changed_code(before, identity.code_of(args))
    assert changed.endswith("below.py has changed")


@pytest.mark.parametrize("there", [1, 2])
def test_another_number_of_ranks_is_reported_when_a_run_is_resumed(monkeypatch, capsys, there):
    """And only then: results are equal up to rounding, and otherwise to the bit."""
    monkeypatch.setattr(directory, "changed_arguments", lambda *_, **__: ([], []))
    monkeypatch.setattr(directory, "difference", lambda *_: "")
    state = {"step": 3, "world_size": there, "args": {}, "code": {}, "versions": directory.versions()}
    directory.report_changes(Path("run"), state, grpo.Args(), 1)
    said = capsys.readouterr().out
    assert "resuming after step 3, from run" in said and ("2 rank(s) there, 1 here" in said) == (there == 2)

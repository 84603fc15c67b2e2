"""Everything that a run reads is part of what it is: a change of any of it is seen when it starts again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from helpers import PROBLEMS, interrupted, own_signals, rejected, run_here, tiny_args
from is_finished import LEAVE, state

import grpo
from runtime.arguments.values import ModelName
from runtime.data.samples import Problem
from runtime.run import directory, identity
from runtime.system import user_files
from runtime.training.model_files import digests_of_files

# Flags with a text that names no file, or one that the run writes, and those of other packages' own files.
NO_INPUT = {
    *("exp_name", "preset", "resume", "output_dir", "run_name", "override_config", "prompt_key", "ground_truth_key"),
    *("system_prompt", "verifier_key", "vllm_args", "attn_implementation", "environment", "eval_sampling", "stop_at"),
}
opened: set[str] | None = None  # None: nobody wants to know


def note(event: str, given: tuple) -> None:
    """Note the files that Python opens: a hook cannot be taken away again."""
    if opened is not None and event == "open" and isinstance(given[0], str | bytes | os.PathLike):
        opened.add(os.path.abspath(os.fsdecode(given[0])))


sys.addaudithook(note)


@contextlib.contextmanager
def files_opened(found: set[Path], folder: Path):
    """Add the files below ``folder`` that are opened meanwhile; a compiled module counts as its source."""
    global opened
    opened = set()
    try:
        yield
    finally:
        names = [importlib.util.source_from_cache(x) if x.endswith(".pyc") else x for x in opened]
        found |= {Path(name) for name in names if name.startswith(f"{folder}/") and Path(name).is_file()}
        opened = None


def make_inputs(tiny: Path, folder: Path) -> dict:
    """Write a file for every input of a run; the arguments that name them."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

    shutil.copytree(tiny, folder / "policy")
    shutil.copytree(tiny, folder / "judge")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "tokenizer")
    config = LlamaConfig.from_pretrained(tiny, num_labels=1, architectures=["LlamaForSequenceClassification"])
    LlamaForSequenceClassification(config).save_pretrained(folder / "judge")
    rows = PROBLEMS.read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(rows[:60]))
    (folder / "held_out.jsonl").write_text("".join(rows[60:80]))
    (folder / "chat.jinja").write_text("{{ messages[-1].content }}")
    for place, text in {
        "one/verifier.py": "import helper, vpkg.sub\n\ndef score(said, truth, row):\n    return len(said) % 2\n",
        "two/verifier.py": "import importlib\nother = importlib.import_module('hel' + 'per')\nscore = lambda *_: 0.0\n",
        "one/helper.py": "",
        "two/helper.py": "",
        "one/vpkg/__init__.py": "",
        "one/vpkg/sub.py": "from vpkg.other import value\nfrom beside import value\n",
        "one/vpkg/other.py": "value = 1\n",
        "one/beside.py": "value = 1\n",
        "lib/my_architecture.py": "",
    }.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    return {
        "model_name_or_path": str(folder / "policy"),
        "tokenizer_name_or_path": str(folder / "tokenizer"),
        "reward_model_name_or_path": str(folder / "judge"),
        "dataset": str(folder / "train.jsonl"),
        "eval_dataset": str(folder / "held_out.jsonl"),
        "verifier": f"{folder}/one/verifier.py:score,{folder}/two/verifier.py:score",
        "chat_template": str(folder / "chat.jinja"),
        "external_lib": "my_architecture",
    }


def edited(path: Path) -> bytes:
    """The content of a file with a change that the run can still read."""
    before = path.read_bytes()
    if path.suffix == ".safetensors":
        return before[:-1] + bytes([before[-1] ^ 1])
    if path.suffix == ".jsonl":
        return before.replace(b"{", b'{"note": 1, ', 1)
    return before + {".py": b"# edited\n", ".jinja": b"{# edited #}"}.get(path.suffix, b"\n")


@pytest.mark.integration
def test_a_change_of_anything_that_a_run_opens_is_seen(tiny, tmp_path, monkeypatch, capsys):
    """Of an interrupted run and of a finished one; every file that is opened is tried, so none can be forgotten."""
    inputs = tmp_path / "inputs"
    named = make_inputs(tiny, inputs)
    texts = {f.name for f in dataclasses.fields(grpo.Args) if f.type in ("str", "str | None")}
    assert texts == {*named, *NO_INPUT}, "give the new flag a file here, or add it to NO_INPUT"
    monkeypatch.setenv("PYTHONPATH", str(inputs / "lib"))
    monkeypatch.syspath_prepend(inputs / "lib")
    changes = {"eval_prompts": 4, "beta": 0.1, "save_every": 1, "total_steps": 2, "run_name": "run"}
    args = tiny_args(tiny, tmp_path / "runs", **named, **changes)
    plain = functools.cache(lambda path, places: list(imports(path, places)))  # an edit below changes no import
    imports = identity._imported_files
    monkeypatch.setattr(identity, "_imported_files", lambda path, places: plain(path, tuple(places)))
    found: set[Path] = set()
    with files_opened(found, inputs):
        interrupted(args, monkeypatch, after=1)
    ours = sorted(path for path in inputs.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert sorted(found) == ours, "a file that nothing opens is no input"

    def start() -> None:
        for name in ("template", "data_digest"):
            vars(args).pop(name, None)
        with own_signals():
            grpo.preflight(args)

    def changed(path: Path, look):
        before, times = path.read_bytes(), path.stat()
        path.write_bytes(edited(path))
        if path.suffix == ".py":  # files are read once per process
            identity._digests.cache_clear()
        try:
            return look()
        finally:
            if path.suffix == ".py":
                identity._digests.cache_clear()
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1))  # as a copy of the files has other times

    for path in ours:
        assert re.search("was saved (by|with) other|has other rows", changed(path, lambda: rejected(capsys, start))), (
            path
        )
    start()
    assert "resuming after step 1" in capsys.readouterr().out
    args = dataclasses.replace(args)
    run_here(args)
    for path in ours:
        vars(args).pop("template", None)
        code, said = changed(path, lambda: state(dataclasses.replace(args), grpo.Args()))
        assert code == LEAVE and "changed: " in said, path
    for name in ("train.jsonl", "policy/model.safetensors", "one/vpkg/other.py"):
        assert "is finished, but " in changed(inputs / name, lambda: rejected(capsys, start)), name
    with pytest.raises(SystemExit) as end:
        start()
    assert end.value.code == 0 and "is finished" in capsys.readouterr().out


@pytest.mark.parametrize("rows", [3, 2000, 7473])
def test_each_row_counts(rows):
    """One truth of thousands is another data set."""
    problems = [Problem([{"role": "user", "content": f"{i} + 1"}], str(i + 1), "exact", {"i": i}) for i in range(rows)]
    before = directory.prompts_digest(directory.data_digest(problems), problems)
    for place in {0, 1, rows // 2 + 1, rows - 1} - {rows}:
        for name, value in (("truth", "0"), ("row", {}), ("prompt_ids", [1])):
            other = [*problems]
            other[place] = dataclasses.replace(problems[place], **{name: value})
            assert directory.prompts_digest(directory.data_digest(other), other) != before, (place, name)


def test_files_of_a_model_are_read_again_only_where_they_look_changed(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    weights = folder / "model.safetensors"
    first = digests_of_files(ModelName(str(folder), None), {})
    known = json.loads(json.dumps(first))
    known["model.safetensors"][0] = "as it was recorded"
    assert digests_of_files(ModelName(str(folder), None), known)["model.safetensors"][0] == "as it was recorded"
    os.utime(weights, ns=(0, 0))
    assert (
        digests_of_files(ModelName(str(folder), None), known)["model.safetensors"][0] == first["model.safetensors"][0]
    )
    weights.write_bytes(edited(weights))
    changed = digests_of_files(ModelName(str(folder), None), first)
    words = identity.changed_inputs({"--model_name_or_path": first}, {"--model_name_or_path": changed})
    assert words == ["model.safetensors of --model_name_or_path has changed"]


@pytest.mark.parametrize("lazily", [False, True])
def test_helpers_of_one_name_belong_to_their_own_verifier(tmp_path, lazily):
    """Also where a function imports its helper when it is called, and when the verifiers take turns."""
    for folder, value in (("a", 1.0), ("b", 0.0)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "helper.py").write_text(f"value = {value}\n")
        imports = ("", "    from helper import value\n") if lazily else ("from helper import value\n", "")
        text = f"{imports[0]}def score(*_):\n{imports[1]}    return value\n"
        (tmp_path / folder / "v.py").write_text(text)
    scores = [user_files.find(f"{tmp_path}/{folder}/v.py:score")() for folder in "abab"]
    assert scores == [1.0, 0.0, 1.0, 0.0]
    assert "helper" in sys.modules, "of the verifier that was called last"
    user_files.enter("")
    assert "helper" not in sys.modules and str(tmp_path / "b") not in sys.path


def test_a_copy_of_the_project_has_the_same_identity(tmp_path, monkeypatch):
    """A job's copy lies folders deeper, and has links to what git ignores."""
    (tmp_path / "outside.py").write_text("")
    project, copy = tmp_path / "project", tmp_path / "project" / "runs" / "job" / "code"
    for folder in (project, copy):
        folder.mkdir(parents=True)
        (folder / "mine.py").write_text("import other\n")
        (folder / "other.py").write_text("")
    (project / "scratch").mkdir()
    (project / "scratch" / "v.py").write_text("import near\n")
    (project / "scratch" / "near.py").write_text("")
    (copy / "scratch").symlink_to(project / "scratch")
    found = []
    for folder in (project, copy):
        monkeypatch.setattr(identity, "PROJECT", folder)
        monkeypatch.chdir(folder)
        identity._digests.cache_clear()
        extra = tuple(identity.place_of(name) for name in ("scratch/v.py", str(tmp_path / "outside.py")))
        found.append(identity._digests(folder / "mine.py", extra, None, (project / "scratch" / "near.py",)))
    identity._digests.cache_clear()
    assert found[0] == found[1]
    assert found[0].keys() == {"mine.py", "other.py", "scratch/v.py", "scratch/near.py", str(tmp_path / "outside.py")}
    older = {"../w/v.py": "1"}  # as earlier versions named a file outside
    assert identity.changed_code(older, {str(copy.parent / "w" / "v.py"): "1"}) == []

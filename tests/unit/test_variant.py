"""scripts/variant.py as a program: it alone writes patches, under the header that they had."""

from __future__ import annotations

import subprocess
import sys

import pytest
import variant
from helpers import ROOT


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A project of two scripts, one variant with a header, and an edit of it."""
    (tmp_path / "variants").mkdir()
    (tmp_path / "grpo.py").write_text('"""GRPO."""\n' + "".join(f"line_{i} = {i}\n" for i in range(20)))
    (tmp_path / "ppo.py").write_text('"""PPO."""\n' + "".join(f"other_{i} = {i}\n" for i in range(20)))
    monkeypatch.setattr(variant, "ROOT", tmp_path)
    return tmp_path


def call(*words: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["variant.py", *words])
    variant.main()


@pytest.mark.parametrize("script", ["grpo.py", "ppo.py"])
def test_a_new_variant_gets_a_patch_of_the_nearer_script_with_a_header(place, script, monkeypatch, capsys):
    text = (place / script).read_text().replace("_7 = 7", "_7 = 8")
    (place / "mine.py").write_text(text.replace(variant.ast.get_docstring(variant.ast.parse(text)), "Mine."))
    call("--remake", str(place / "mine.py"), monkeypatch=monkeypatch)
    assert "variants/mine.patch: 4 changed lines; fill in its header" in capsys.readouterr().out
    header, base, _ = variant.read("mine")
    assert base == script and header.splitlines()[0] == "Mine."
    for word in ("Source ", "Use it ", "Measured "):
        assert any(line.startswith(word) for line in header.splitlines())
    assert variant.variant("mine") == (place / "mine.py").read_text()


def test_an_old_variant_keeps_its_header(place, monkeypatch, capsys):
    (place / "mine.py").write_text((place / "grpo.py").read_text().replace("line_7 = 7", "line_7 = 8"))
    call("--remake", str(place / "mine.py"), monkeypatch=monkeypatch)
    patch = place / "variants" / "mine.patch"
    patch.write_text(patch.read_text().replace("Measured no learning curve yet.", "Measured by hand."))
    (place / "mine.py").write_text((place / "grpo.py").read_text().replace("line_9 = 9", "line_9 = 8"))
    call("--remake", str(place / "mine.py"), monkeypatch=monkeypatch)
    assert "fill in" not in capsys.readouterr().out.splitlines()[-1]
    assert "Measured by hand." in patch.read_text() and "line_9" in patch.read_text()
    assert "+line_7" not in patch.read_text()


def test_a_patch_that_a_redirect_has_emptied_is_not_taken_for_one(place, monkeypatch, capsys):
    """The shell empties the file before this program reads it: the header is gone, and must be restored."""
    (place / "mine.py").write_text((place / "grpo.py").read_text() + "more = 1\n")
    (place / "variants" / "mine.patch").write_text("")
    with pytest.raises(SystemExit) as end:
        call("--remake", str(place / "mine.py"), monkeypatch=monkeypatch)
    said = capsys.readouterr().err
    assert end.value.code == 2 and "has no header" in said and "git checkout" in said
    assert (place / "variants" / "mine.patch").read_text() == ""


@pytest.mark.parametrize(
    ("name", "says"), [("grpo.py", "is a script that variants change"), ("none.py", "no such file")]
)
def test_what_cannot_be_remade_is_refused(name, says):
    done = subprocess.run(
        [sys.executable, "scripts/variant.py", "--remake", name], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and says in done.stderr

"""scripts/submit_snapshot.py: the copy of the code in which a job runs, and how many file operations it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import submit_snapshot
from submitted_jobs import GIT, SUBMIT, refused, repository, submit


def copy_of(folder: Path, *words: str) -> tuple[Path, list[str]]:
    """(the copy of a folder's code, the files in it that are no links to the folder)."""
    copy = folder.parent / "job" / "code"
    submit_snapshot.copy(folder, submit_snapshot.take(folder, words)[1], copy)
    submit_snapshot.list_files(copy)
    names = (copy.parent / "code.files").read_text().split()
    return copy, [name for name in names if not (copy / name).is_symlink()]


def links_in(copy: Path) -> dict[str, str]:
    return {str(path.relative_to(copy)): os.readlink(path) for path in copy.rglob("*") if path.is_symlink()}


def test_copied_and_linked(tmp_path):
    """Tracked files are copied with their mode and their edits, new code too; what is ignored or no code is a link."""
    here = repository(tmp_path / "here", a_py="0", pkg__b_py="2", _gitignore="out/\nskip.py\n", pkg__image_png="x")
    (here / "a.py").write_text("1")
    (here / "a.py").chmod(0o755)
    (here / "new.py").write_text("3")
    (here / "pkg" / "new.sh").write_text("4")
    (here / "added.txt").write_text("5")
    subprocess.run([*GIT, "add", "added.txt"], cwd=here, check=True)
    (here / "notes.txt").write_text("no code")
    (here / "skip.py").write_text("ignored")
    (here / "out").mkdir()
    (here / "pkg" / "__pycache__").mkdir()
    index = (here / ".git" / "index").read_bytes()
    copy, copied = copy_of(here)
    tracked = ["./.gitignore", "./a.py", "./added.txt", "./new.py", "./pkg/b.py", "./pkg/image.png", "./pkg/new.sh"]
    assert copied == tracked and (here / ".git" / "index").read_bytes() == index
    assert links_in(copy) == {name: str(here / name) for name in ("notes.txt", "skip.py", "out")}
    assert not (copy / ".git").exists() and not (copy / "pkg" / "__pycache__").exists()
    assert os.access(copy / "a.py", os.X_OK) and not os.access(copy / "new.py", os.X_OK)
    for name in ("a.py", "pkg/b.py"):
        (here / name).write_text("edited")
    assert (copy / "a.py").read_text() + (copy / "pkg" / "b.py").read_text() == "12"


def test_a_named_script_is_copied_but_not_a_folder_of_results(tmp_path):
    """A script that git ignores comes along; a file in runs/ does not, or the copy would have a runs/ of its own."""
    here = repository(tmp_path / "here", _gitignore="*.py\nruns/\n")
    (here / "mine.py").write_text("1")
    (here / "runs" / "a").mkdir(parents=True)
    (here / "runs" / "a" / "config.yaml").write_text("2")
    (tmp_path / "link").symlink_to(here)
    for named in ("mine.py", str(here / "mine.py"), str(tmp_path / "link" / "mine.py")):
        copy, copied = copy_of(here, "python", named, "runs/a/config.yaml", "bash -c 'python none.py")
        assert copied == ["./.gitignore", "./mine.py"] and (copy / "runs").is_symlink()
        shutil.rmtree(copy.parent)


def test_code_next_to_a_named_file_is_copied(tmp_path):
    """A verifier that git ignores imports its helper: an edit of either would reach a job that waits."""
    here = repository(tmp_path / "here", _gitignore="scratch/\n")
    for name in ("v.py", "h.py", "pkg/deep.py", "data.txt"):
        (here / "scratch" / name).parent.mkdir(parents=True, exist_ok=True)
        (here / "scratch" / name).write_text("1")
    code = ["./.gitignore", "./scratch/h.py", "./scratch/pkg/deep.py", "./scratch/v.py"]
    named = ("scratch/v.py:score", "math,scratch/v.py:f", f"--verifier={here}/scratch/v.py:f", "cd . && x scratch/v.py")
    for word in named:
        copy, copied = copy_of(here, "python", word)
        assert copied == code and links_in(copy) == {"scratch/data.txt": str(here / "scratch" / "data.txt")}
        shutil.rmtree(copy.parent)


def test_links_deleted_files_and_submodules(tmp_path):
    """A tracked link stays one, and leads out where it led out; a deleted file is left out; submodules are copied."""
    other = repository(tmp_path / "other", lib_py="5")
    here = repository(tmp_path / "here", a_py="1", gone_py="2")
    (tmp_path / "outside.py").write_text("6")
    (here / "inner.py").symlink_to("a.py")
    (here / "outer.py").symlink_to("../outside.py")
    (here / "nowhere.py").symlink_to("none")
    (here / "absolute.py").symlink_to(here / "a.py")
    (here / "around.py").symlink_to("../here/a.py")
    subprocess.run([*GIT, "submodule", "add", "-q", str(other), "sub"], cwd=here, check=True, capture_output=True)
    subprocess.run([*GIT, "add", "."], cwd=here, check=True)
    (here / "gone.py").unlink()
    (here / "sub" / "lib.py").write_text("edited")
    copy, copied = copy_of(here, "sub/lib.py")
    assert copied == ["./.gitmodules", "./a.py", "./sub/lib.py"] and (copy / "sub/lib.py").read_text() == "edited"
    outside = str(tmp_path / "outside.py")
    inner = dict.fromkeys(("inner.py", "absolute.py", "around.py"), "a.py")
    assert links_in(copy) == {**inner, "outer.py": outside, "nowhere.py": "none"}


def test_a_folder_below_the_root_and_before_the_first_commit(tmp_path):
    """The copy has the folder's files alone, under its own paths; nothing needs to be committed."""
    here = tmp_path / "here"
    for name in ("above.py", "sub/a.py", "sub/pkg/b.py", "sub/data/c.txt"):
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text("1")
    subprocess.run([*GIT, "init", "-q"], cwd=here, check=True)
    for words in (["add", "sub/a.py"], ["commit", "-qm", "one"], ["status"]):
        copy, copied = copy_of(here / "sub")
        assert copied == ["./a.py", "./pkg/b.py"] and links_in(copy) == {"data": str(here / "sub" / "data")}
        subprocess.run([*GIT, *words], cwd=here, check=True, capture_output=True)
        shutil.rmtree(copy.parent)


def test_without_git(tmp_path, monkeypatch, capsys):
    """A job in a copy needs a repository; one in the folder itself, or in an upload of it, does not."""
    monkeypatch.chdir(tmp_path)
    for words in (["--backend", "local", "--live"], ["--backend", "ray"]):
        assert submit.main([*words, "--dry_run", "--", "true"]) == 0
    said = refused(capsys, "--backend", "slurm", "--dry_run", "--", "true")
    assert "not a git repository" in said and "run git init there, or use --live" in said


def submitted(here: Path, run_dir: str, *command: str, **variables: str) -> Path:
    """The script of a job on Slurm that has not begun."""
    (here.parent / "sbatch").write_text("#!/bin/sh\necho 17\n")
    (here.parent / "sbatch").chmod(0o755)
    env = os.environ | {"PATH": f"{here.parent}:{os.environ['PATH']}"} | variables
    words = [*SUBMIT, "--backend", "slurm", "--run_dir", run_dir, "--", *command]
    subprocess.run(words, cwd=here, env=env, check=True, capture_output=True)
    return next((here / run_dir).glob("*/job.sh"))


def test_what_comes_and_what_stays(tmp_path):
    """Files that appear before the start are linked, edits do not reach the job, and its new files come back."""
    here = repository(tmp_path / "here", a_py="print('old')", pkg__b_py="")
    program = "python3 a.py; cat late.txt 'pkg/two words.txt' late/c.txt; echo new >pkg/new.txt; echo x >>a.py"
    script = submitted(here, "job", "bash", "-c", program)
    (here / "a.py").write_text("print('edited')")
    (here / "late").mkdir()
    for name in ("late.txt", "pkg/two words.txt", "late/c.txt"):
        (here / name).write_text(f"{name}\n")
    env = os.environ | {"SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for _ in range(2):  # as after a preemption
        for mark in script.parent.glob("finished.*"):
            mark.unlink()
        done = subprocess.run(["bash", script], cwd=here, env=env, capture_output=True, text=True, timeout=60)
        lines = ["old", "late.txt", "pkg/two words.txt", "late/c.txt"]
        assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, lines, "")
        (script.parent / "code" / "a.py").write_text("print('old')")
    assert (here / "pkg" / "new.txt").read_text() == "new\n" and (here / "a.py").read_text() == "print('edited')"


def test_whatever_leads_to_the_code_leads_to_the_copy(tmp_path):
    """The folder through a link, as a home folder is, in the command and in PYTHONPATH, and a file above the script."""
    here = repository(tmp_path / "real", lib_py="word = 'old'", sub__a_py="import lib\nprint(lib.word)")
    (tmp_path / "link").symlink_to(here)
    path = f"{tmp_path}/link:/nowhere"
    script = submitted(here, "job", "bash", "-c", f"python3 {tmp_path}/link/sub/a.py", PYTHONPATH=path)
    (here / "lib.py").write_text("word = 'edited'")
    (here / "sub" / "a.py").write_text("print('edited')")
    env = os.environ | {"SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PYTHONPATH": path}
    done = subprocess.run(["bash", script], cwd=here, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "old\n"), done.stderr


def test_what_lies_outside_is_refused_or_named(tmp_path, monkeypatch, capsys):
    """A path that leads out of the folder would lead elsewhere from its copy, and end a job that has waited."""
    here = repository(tmp_path / "here", a_py="", sub__b_py="")
    (tmp_path / "v.py").touch()
    monkeypatch.chdir(here / "sub")
    start = ("--backend", "slurm", "--dry_run")
    for word in ("../a.py", "--output_dir=../runs", "math,../../v.py:f"):
        assert "leads out of" in refused(capsys, *start, "--", "python", word)
        assert submit.main([*start, "--live", "--", "true", word]) == 0
    assert submit.main([*start, "--", "python", "b.py", f"{tmp_path}/v.py:f", "--text", "...", "a ../b"]) == 0
    said = capsys.readouterr()
    assert said.err == f"note: not copied, so that edits reach the job: {tmp_path}/v.py\n"
    assert said.out.count("\n") <= 3 and said.out.splitlines()[-1].startswith("# would run sbatch "), "one line each"

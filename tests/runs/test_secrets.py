"""Secrets are planted wherever a run or a submission meets them, and every byte that it leaves is searched for them."""

from __future__ import annotations

import base64
import contextlib
import copy
import gzip
import io
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import helpers
import pytest
import submit
from helpers import ROOT, folder_of, read_jsonl, run_here, tiny_args

from grpo import Args
from runtime.run import directory, identity, logger
from runtime.system import process, redaction

# What stands where. None of the values occurs in the project.
PLANTED = {
    "WANDB_API_KEY": "0b5f7c1e9a3d4862bb07c1d2e3f4a5968778695a",
    "HF_TOKEN": "hf_QwErTyUiOpAsDfGhJkLzXcVbNm12345678",
    "JUDGE_API_KEY": "judge-7Hq2Zr9Lx4Vt8Nw1Kd",
    "VLLM_API_KEY": "vllm-server-Yp3Ts6Ug0Bm5Cf",
    "password in a URL": "pa55-Rk8Jw2Qn6Xe4Hb",
    "token in a header": "Sj9Dl3Mz7Pv1Gt5Wc",
    "key in a flag": "flag-Uo4Ey8Ia2Ns6Rh0Kx",
    "password in .netrc": "netrc-Bt7Fg1Vh5Jn9Mk3Lp",
    "token in the git remote": "remote-Xz6Cq0Aw4Se8Dr2Tf",
}
JUDGE = """
import os

def judge(response, truth, row):
    if len(response) % 2 and response != truth:
        raise RuntimeError(f"401: the key {os.environ['JUDGE_API_KEY']} is not valid")
    return float(len(response) % 3 == 0)
"""
OWN_FLAGS = '''
    judge_url: str = ""
    """Address of a judge."""
    judge_headers: str = ""
    """What it wants to be told."""
    judge_api_key: str = ""
    """Its key."""
'''

# Lines of whole groups of four characters: the word after the last line, EOF, is none.
BASE64 = re.compile(rb"(?:(?:[A-Za-z0-9+/]{4}){10,}\s+){2,}(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2,3}={1,2})?")


def contents(data: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of a file and of all that is packed in it."""
    yield name, data
    if data[:2] == b"\x1f\x8b":
        yield from contents(gzip.decompress(data), f"{name}|gz")
    if zipfile.is_zipfile(io.BytesIO(data)):  # torch.save, too
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.namelist():
                yield from contents(archive.read(member), f"{name}|{member}")
    if data[257:262] == b"ustar":
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                yield from contents(
                    archive.extractfile(member).read() if member.isfile() else b"", f"{name}|{member.name}"
                )
    if data[:4] == b"PAR1":
        from pyarrow import parquet

        yield f"{name}|rows", repr(parquet.read_table(io.BytesIO(data)).to_pylist()).encode()
    for block in BASE64.findall(data):  # what a script carries along
        try:
            yield from contents(base64.b64decode(block), f"{name}|base64")
        except ValueError:
            continue


def wandb_records(data: bytes) -> bytes:
    """The records of wandb's own file, one after another: headers of its blocks of 32 KiB stand inside texts."""
    assert data[:4] == b":W&B"
    records = []
    for start in range(0, len(data), 2**15):
        block = data[start : start + 2**15]
        place = 7 if start == 0 else 0
        while place + 7 <= len(block):
            length = int.from_bytes(block[place + 4 : place + 6], "little")
            records.append(block[place + 7 : place + 7 + length])
            place += 7 + length
    return b"".join(records)


def found_in(folder: Path, *texts: str) -> list[str]:
    """List the places of a planted secret: names, bytes, packed bytes, and the texts."""
    places = [(f"text {i}", text.encode()) for i, text in enumerate(texts)]
    for path in folder.rglob("*"):
        places.append((f"name of {path}", str(path.relative_to(folder)).encode()))
        if path.is_file() and not path.is_symlink():
            places += contents(path.read_bytes(), str(path))
            if path.suffix == ".wandb":
                places.append((f"{path}|records", wandb_records(path.read_bytes())))
    return [f"{what}: {name}" for name, data in places for what, value in PLANTED.items() if value.encode() in data]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A home, a repository and an environment with secrets in them; the working folder is the repository."""
    home = tmp_path / "home"
    home.mkdir()
    secret = PLANTED["password in .netrc"]
    (home / ".netrc").write_text(f"machine api.wandb.ai login user password {secret}\n")
    (home / ".netrc").chmod(0o600)
    place = tmp_path / "repository"
    place.mkdir()
    remote = f"https://{PLANTED['token in the git remote']}:x-oauth-basic@example.com/me/rlvr.git"
    for words in ("init -q", f"remote add origin {remote}", "commit -q --allow-empty -m start"):
        git = ["git", "-c", "user.name=me", "-c", "user.email=me@example.com", *words.split()]
        subprocess.run(git, cwd=place, check=True)
    monkeypatch.chdir(place)
    monkeypatch.setenv("HOME", str(home))
    for name, value in PLANTED.items():
        if name.isupper() or name.endswith(("_KEY", "_TOKEN")):
            monkeypatch.setenv(name, value)
    return place


@pytest.fixture
def judged(tmp_path, monkeypatch):
    """A copy of grpo.py with flags of its own for a judge, as a user would write it, that can be imported."""
    source = (ROOT / "grpo.py").read_text()
    after = 'so a copy of the script gets runs of its own."""\n'
    assert after in source
    (tmp_path / "judged.py").write_text(source.replace(after, after + OWN_FLAGS.lstrip("\n")))
    (tmp_path / "judge.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(tmp_path)
    yield {
        "judge_url": f"https://me:{PLANTED['password in a URL']}@judge.example.com/v1",
        "judge_headers": f"Authorization: Bearer {PLANTED['token in a header']}",
        "judge_api_key": PLANTED["key in a flag"],
        "verifier": f"{tmp_path / 'judge.py'}:judge",
    }
    sys.modules.pop("judged", None)
    identity._digests.cache_clear()


@pytest.mark.integration
def test_a_run_leaves_no_secret(tiny, tmp_path, planted, judged, monkeypatch, capfd):
    """Nine secrets in the environment, in flags, in .netrc and in the git remote; wandb, a checkpoint, a failing judge.

    None is in any byte of the run's folder, in the names of its files, or on the console.
    """
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(helpers, "quick_start", contextlib.nullcontext)  # whose processes have an earlier environment
    out = tmp_path / "runs"
    args = tiny_args(tiny, out, "judged", track=("wandb",), save_every=1, total_steps=2, **judged)
    words = [word for flag, value in judged.items() for word in (f"--{flag}", value)]
    monkeypatch.setattr(sys, "argv", ["judged.py", *words])
    run_here(args, "judged")
    said = capfd.readouterr()
    folder = folder_of(args, "judged")
    for file in ("config.json", "metrics.jsonl", "samples.jsonl", "checkpoints/step_000002/state.json"):
        assert (folder / file).is_file()
    (tracked,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert b"judge.example.com" in wandb_records(tracked.read_bytes()), "the search sees what wandb wrote"
    assert "first unscorable of a verification" in said.out
    assert "401: the key *** is not valid" in said.out, said.out.partition("first unscorable")[2][:2000]
    assert found_in(out, said.out, said.err) == []


QUOTED = (
    'curl -H "Authorization: Bearer {}" https://judge.example.com',
    'get("https://judge.example.com/v1?api_key={}")',
    'get("https://judge.example.com/v1?a=1&signature={}")',
    """headers = {{'x-api-key': "{}"}}""",
    'api-key="{}"',
    'connect("https://me:{}@judge.example.com")',
    'print("bearer {}")',
    'C:\\\\keys\\\\"{}"\\n',
)


def test_a_sample_with_a_secret_is_a_line_of_json(tmp_path, planted, monkeypatch):
    """Code and data of tools have secrets in quotes: what hides them must not take a part of the line along."""
    odd = 'a"key\\with é and\nall'
    monkeypatch.setenv("ODD_KEY", odd)
    log = logger.RunLog(tmp_path / "run", Args(), 1, 10, True)
    texts = [text.format(PLANTED["JUDGE_API_KEY"]) for text in QUOTED] + [f"it is {odd}!"]
    for step, text in enumerate(texts, 1):
        log.write("samples.jsonl", {"step": step, "response": text, "parts": {text: 0.5, "token": 1.0}, "all": [text]})
    log.close()
    for row, text in zip(read_jsonl(tmp_path / "run" / "samples.jsonl"), texts, strict=True):
        assert "***" in row["response"] and row["parts"]["token"] == 1.0
        assert row["response"] == redaction.redact(text) == row["all"][0] == min(row["parts"])
    assert found_in(tmp_path / "run") == [] and odd.encode() not in (tmp_path / "run" / "samples.jsonl").read_bytes()


def test_a_run_with_secrets_resumes(tiny, tmp_path, planted, judged):
    """A run resumes if only the secret differs between the file and the command, also with another key."""
    args = tiny_args(tiny, tmp_path / "runs", "judged", **judged)
    theirs = identity.recorded(args)
    assert theirs["judge_url"] == "https://***@judge.example.com/v1" and theirs["judge_api_key"] == "***"
    assert identity.changed_arguments(theirs, args) == ([], [])
    name = directory.run_name(args, type(args)())
    args.judge_api_key = "another-key-0123456789"
    assert identity.changed_arguments(theirs, args) == ([], []) and directory.run_name(args, type(args)()) == name
    args.judge_url = "https://another.example.com"
    assert len(identity.changed_arguments(theirs, args)[0]) == 1 and directory.run_name(args, type(args)()) != name


def test_the_environment_of_now(monkeypatch):
    """datasets' map with num_proc puts a copy of os.environ in its place; a key that is set later is hidden, too."""
    monkeypatch.setattr(os, "environ", copy.deepcopy(os.environ))
    monkeypatch.setenv("JUDGE_API_KEY", PLANTED["JUDGE_API_KEY"])
    assert redaction.redact(f"the key {PLANTED['JUDGE_API_KEY']}") == "the key ***"


@pytest.mark.parametrize("backend", ["local", "slurm", "skypilot"])
def test_a_submission_leaves_no_secret(backend, tmp_path, planted, monkeypatch, capfd):
    """Neither what a dry run shows nor the scripts and records that are written; a local job is run, too."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("sbatch", "sky"):
        (tools / tool).write_text("#!/bin/sh\nenv -u SECRETS true\n")
        (tools / tool).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    (planted / "edited.sh").write_text("echo trained\n")
    line = ["--backend", backend, "--secret", "HF_TOKEN", "--secret", "JUDGE_API_KEY", "--", "bash", "edited.sh"]
    assert submit.main(["--dry_run", *line]) == 0
    assert submit.main(line) == 0
    said = capfd.readouterr()
    assert list((planted / "runs/jobs").glob("**/submit.json"))
    assert found_in(planted / "runs", said.out, said.err) == []


@pytest.mark.parametrize("words", [
    ["--judge_api_key", PLANTED["key in a flag"]],
    [f"--judge-api-key={PLANTED['key in a flag']}"],
    ["--judge_url", f"https://me:{PLANTED['password in a URL']}@judge.example.com"],
    ["--judge_headers", f"Authorization: Bearer {PLANTED['token in a header']}"],
    ["--endpoint", f"https://judge.example.com/v1?api_key={PLANTED['key in a flag']}"],
])  # fmt: skip
def test_a_submission_refuses_a_secret_by_its_form(words, planted, capsys):
    """Also where no variable of this shell has it; the message does not show it."""
    Path("grpo.py").touch()
    with pytest.raises(SystemExit) as stop:
        submit.main(["--backend", "local", "--dry_run", "--", "python", "grpo.py", *words])
    said = capsys.readouterr()
    assert stop.value.code == 2 and "which are written down" in said.err
    assert found_in(planted / "nothing", said.out, said.err) == []


def test_what_is_no_secret_stays():
    """No flag of the scripts is taken for one, and neither are words, containers and sources that look like one."""
    assert not [name for name in vars(Args()) if redaction.names_secret(name)]
    for text in (
        Args().dataset,
        "docker://ubuntu@sha256:0123456789abcdef",
        "git+ssh://git@example.com/me/rlvr",
        "tokens per second, the token's key, sk-learn, https://example.com/a@b",
        "--prompt_key question --max_prompt_length 9 tokens",
    ):
        assert redaction.redact(text) == text and submit.form_of_secret(text.split()) == ""


def test_a_refusal_hides_what_it_quotes(planted, capsys):
    with pytest.raises(SystemExit):
        process.refuse(f"--dataset https://me:{PLANTED['password in a URL']}@example.com/a.jsonl: no such file")
    said = capsys.readouterr().err
    assert "https://***@example.com/a.jsonl: no such file" in said


def test_the_search_finds_what_is_packed(tmp_path):
    """Each kind of container, in turn, with a secret in it."""
    import pyarrow
    import torch
    from pyarrow import parquet

    secret = PLANTED["JUDGE_API_KEY"]
    (tmp_path / "plain").write_text(f"x{secret}x")
    (tmp_path / "a.gz").write_bytes(gzip.compress(secret.encode()))
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner", secret * 9)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "plain", "plain")
    parquet.write_table(pyarrow.table({"a": [secret] * 100}), tmp_path / "a.parquet", compression="zstd")
    torch.save({"key": secret}, tmp_path / "a.pt")
    packed = base64.encodebytes(gzip.compress((tmp_path / "a.tar.gz").read_bytes())).decode()
    (tmp_path / "job.sh").write_text(f"tar <<'EOF'\n{packed}EOF\n")
    (tmp_path / secret).mkdir()
    where = {place.partition("|")[0].rpartition("/")[2] for place in found_in(tmp_path)}
    assert where == {"plain", "a.gz", "a.zip", "a.tar.gz", "a.parquet", "a.pt", "job.sh", secret}


@pytest.mark.parametrize("scheme", ["https", "postgresql+psycopg2", "mysql+pymysql", "mongodb+srv", "redis"])
def test_no_part_of_a_password_in_a_url_is_left(scheme):
    """Passwords hold an @ that nobody escaped, and addresses of databases name their driver."""
    text = redaction.redact(f"connect('{scheme}://me:some@thing@host.example/db'), or mail me@example.com")
    assert text == f"connect('{scheme}://***@host.example/db'), or mail me@example.com"

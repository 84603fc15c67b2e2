"""examples/: a verifier of one's own, one that asks a service, and the service."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from helpers import ROOT, run_here, tiny_args

from graders.code import sandbox
from rewards import RewardPool, find_verifier

FAST = {"(0, 1, 5)": "(0, 0.05, 0.05)", "timeout=15": "timeout=0.5"}  # what the tests change in the programs


def program(name: str, changes: dict[str, str] | None = None) -> str:
    """The program of examples/; each of the ``changes`` must be possible."""
    found = (ROOT / "examples" / name).read_text()
    for old, new in (changes or {}).items():
        assert found.count(old) == 1
        found = found.replace(old, new)
    return found


class Service(BaseHTTPRequestHandler):
    """Scores 1 where the response is the truth. The row says what it does before that, one thing for each attempt."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        attempts = self.server.attempts
        attempts.append(asked["response"])
        does = asked["row"].get("does", [])
        number = attempts.count(asked["response"])
        what = does[number - 1] if number <= len(does) else 200
        if what == "hangs":
            self.server.released.wait(20)
        if what == "closes":
            return
        body = b'{"score": 1' if what == "half" else json.dumps({"score": asked["response"] == asked["truth"]}).encode()
        self.send_response(what if isinstance(what, int) else 200)
        self.send_header("Content-Length", str(len(body) + 10 * (what == "short")))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        pass


@pytest.fixture
def service(monkeypatch):
    """A real server on a port of this machine, in a thread; VERIFIER_URL names it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.attempts = []
    server.released = threading.Event()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("VERIFIER_URL", f"http://127.0.0.1:{server.server_port}/score")
    yield server
    server.released.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def remote(tmp_path) -> str:
    """The verifier as --verifier takes it, with shorter waits."""
    (tmp_path / "remote.py").write_text(program("remote_verifier.py", FAST))
    return f"{tmp_path / 'remote.py'}:remote"


@pytest.mark.integration
@pytest.mark.parametrize(
    "does",
    [[], [503], [500, 502], [429], ["hangs"], ["closes", "hangs"], ["half"], ["short"]],
    ids=str,
)
def test_a_remote_verifier_tries_again(service, remote, does):
    """A busy, hanging, broken or restarting service costs an attempt, not the score."""
    assert find_verifier(remote)("4", "4", {"does": does}) == 1.0
    assert find_verifier(remote)("5", "4", {"does": does}) == 0.0
    assert service.attempts == ["4"] * (len(does) + 1) + ["5"] * (len(does) + 1)


@pytest.mark.integration
@pytest.mark.parametrize(("does", "attempts"), [([400], 1), ([503, 503, 503], 3), (["hangs"] * 3, 3)], ids=str)
def test_a_remote_verifier_gives_up(service, remote, does, attempts):
    """After three attempts, or at once where the request itself is rejected; it names the address and the reason."""
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"http://127.0.0.1:\d+/score: .*(400|503|timed out)"):
        find_verifier(remote)("4", "4", {"does": does})
    assert len(service.attempts) == attempts
    assert time.monotonic() - begun < 5


def test_an_unreachable_service_is_refused_at_the_start_and_costs_samples_later(service, remote):
    """In a run's pool of processes: no answer is 0 and unscorable, and without a service no run starts."""
    problem = SimpleNamespace(verifier=remote, truth="4", row={})
    pool = RewardPool(2, 20.0, [remote])
    try:
        assert pool.check([problem]) == ""
        rows = [{}, {"does": [400]}, {}]
        futures = [pool.submit(remote, response, "4", row) for response, row in zip(["4", "a", "b"], rows, strict=True)]
        found = [pool.result(future) for future in futures]
        assert [(reward.score, reward.status) for reward in found] == [(1.0, "ok"), (0.0, "unscorable"), (0.0, "ok")]
        service.shutdown()
        service.server_close()
        assert "Connection refused" in pool.check([problem])
    finally:
        pool.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.integration
def test_the_service(tmp_path, monkeypatch, remote):
    """Both programs, each in processes of its own: right, wrong and endless code."""
    if why := sandbox.namespaces_refused():
        pytest.skip(f"the kernel gives no namespaces here: {why}")
    (tmp_path / "service.py").write_text(program("remote_verifier.py", {"timeout=12": "timeout=8"}))
    (tmp_path / "remote.py").write_text(program("remote_verifier.py"))
    port = free_port()
    monkeypatch.setenv("VERIFIER_URL", f"http://127.0.0.1:{port}")
    command = [sys.executable, str(tmp_path / "service.py"), str(port), "1"]
    server = subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        tests = json.dumps({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"})
        until = time.monotonic() + 60
        while time.monotonic() < until and server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        verify = find_verifier(remote)
        assert verify("def add(a, b):\n    return a + b", tests, {}) == 1.0
        assert verify("def add(a, b):\n    return a - b", tests, {}) == 0.0
        assert verify("def add(a, b):\n    while True: pass", tests, {"time_limit": 0.5}) == 0.0
    finally:
        server.terminate()
        server.wait(20)


@pytest.mark.slow
def test_a_run_with_a_remote_verifier(service, remote, tiny, tmp_path):
    steps = run_here(tiny_args(tiny, tmp_path / "runs", verifier=remote))
    assert [step["reward/unscorable"] for step in steps] == [0, 0]
    assert len(service.attempts) > 32

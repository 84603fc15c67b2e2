"""Verifiers, and the pool: whatever a verification does, the parent learns of it in time and goes on."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import pytest
from conftest import ROOT

from rewards import VERIFIERS, Reward, RewardPool, exact, find_verifier, last_number

MINE = ROOT / "tests" / "verifiers.py"

# (response, truth, right?)
LAST_NUMBER = [
    ("4", "4", True),
    ("The answer is 4.", "4", True),
    ("4 + 3 = 7", "7", True),
    ("4 + 3 = 7", "4", False),
    ("10-4", "4", True),
    ("10-4", "-4", False),
    ("10 - 4", "4", True),
    ("3-5", "5", True),
    ("(2+1)-4", "4", True),
    ("= -4", "-4", True),
    ("= -4", "4", False),
    ("=-4", "-4", True),
    ("(-3)", "-3", True),
    ("4 - 7 = -3.", "-3", True),
    (r"\boxed{-12}", "-12", True),
    ("**42**", "42", True),
    ("1,024", "1024", True),
    ("1024", "1,024", True),
    ("1,024.50", "1024.5", True),
    ("-1,000", "-1000", True),
    ("7.0", "7", True),
    ("7", "7.00", True),
    ("007", "7", True),
    ("7.1", "7", False),
    ("-0", "0", True),
    ("$5.", "5", True),
    ("$5, I think", "5", True),
    ("42%", "42", True),
    ("3.14.", "3.14", True),
    ("5", " 5\n", True),
    ("5 apples", "5", True),
    ("Room 4b", "4", True),
    ("answer:4!", "4", True),
    ("1, 2, 3", "3", True),
    ("1/2", "2", True),
    ("12:30", "30", True),
    ("the answer is ...42", "42", True),
    ("1,2,3", "3", True),
    ("12,345,678", "12345678", True),
    ("\u22124", "-4", True),  # the typographic minus
    ("4\u22127 = \u22123", "-3", True),
    ("", "0", False),
    ("no number", "0", False),
    ("-", "0", False),
    (".", "0", False),
    ("\u0664\u0662", "42", False),  # Arabic-Indic digits: int() would take them
    ("\u00b2", "2", False),
    ("\u0664\u0662 or 7", "7", True),
    ("9" * 5000, "9" * 5000, True),  # more digits than int() reads
    ("9" * 5000, "9" * 4999 + "8", False),
    ("0.1", "0.1000000000000000000000000001", False),  # decimals, not floats
    ("100000000000000000001", "100000000000000000000", False),
]


@pytest.mark.parametrize(("response", "truth", "right"), LAST_NUMBER, ids=lambda v: repr(v)[:24])
def test_last_number(response, truth, right):
    reward = last_number(response, truth, {})
    assert reward.score == reward.parts["correct"] == float(right)
    assert reward.status == "ok"


def test_last_number_format():
    assert last_number("the answer is 3", "4", {}).parts == {"correct": 0.0, "format": 1.0}
    assert last_number("three", "3", {}).parts == {"correct": 0.0, "format": 0.0}


def test_last_number_is_linear_in_the_length():
    """A response is whatever the model wrote: no pattern of digits may take quadratic time."""
    start = time.perf_counter()
    for text in ("1," * 100_000, "-" * 200_000, "1." * 100_000, "1-" * 100_000):
        last_number(text, "1", {})
    assert time.perf_counter() - start < 5


def test_exact():
    assert exact(" blue \n", "blue", {}).score == 1.0
    assert exact("Blue", "blue", {}).score == 0.0
    assert exact("", "blue", {}).parts == {"correct": 0.0}


def test_find_verifier(tmp_path):
    assert find_verifier("last_number") is last_number and set(VERIFIERS) == {"last_number", "exact"}
    assert find_verifier(f"{MINE}:parity")("abc", "", {}).score == 1.0
    for name, words in {
        "maths": ["'maths'", "last_number", "file.py:function"],
        "nothing.py:score": ["no file 'nothing.py'", "'score'"],
        f"{tmp_path}:score": ["no file"],
        f"{MINE}:nothing": ["no function 'nothing'"],
        f"{MINE}:": ["no function ''"],
        "": ["no verifier ''"],
    }.items():
        with pytest.raises(ValueError) as error:
            find_verifier(name)
        for word in words:
            assert word in str(error.value)


# --------------------------------------------------------------------------------------------------------------- pool


@pytest.fixture(scope="module")
def pool():
    """Two workers that have started, with a limit of a second and a half for each verification."""
    pool = RewardPool(2, 1.5)
    for future in [pool.pool.schedule(find_verifier, args=["exact"]) for _ in range(4)]:
        future.result(timeout=60)
    yield pool
    pool.close()


def verify(pool: RewardPool, name: str, response: str = "x", truth: str = "x") -> Reward:
    return pool.result(pool.submit(name, response, truth, {"row": [1, 2]}))


def works(pool: RewardPool) -> bool:
    futures = [pool.submit("last_number", f"= {i}", "3", {}) for i in range(6)]
    return [pool.result(f).score for f in futures] == [0, 0, 0, 1, 0, 0]


def test_pool_returns_in_the_order_of_the_questions(pool):
    assert works(pool)
    assert verify(pool, f"{MINE}:parity", "abc") == Reward(1.0, {"correct": 1.0})


def test_pool_kills_what_hangs(pool):
    start = time.perf_counter()
    hanging = pool.submit(f"{MINE}:hangs", "x", "x", {})
    meanwhile = verify(pool, "exact")
    assert meanwhile.score == 1.0 and time.perf_counter() - start < 1.4, "the other worker goes on"
    wait([hanging], timeout=10)
    assert hanging.done(), "not killed"
    assert pool.result(hanging) == Reward(0.0, status="timeout")
    assert 1.4 < time.perf_counter() - start < 1.5 + 2
    assert works(pool)


def test_pool_outlives_a_worker(pool):
    assert verify(pool, f"{MINE}:dies") == Reward(0.0, status="crash")
    assert works(pool)
    assert [verify(pool, f"{MINE}:dies").status for _ in range(3)] == ["crash"] * 3  # more than there are workers
    assert works(pool)


def test_pool_raises_what_a_verifier_raises(pool):
    with pytest.raises(RuntimeError) as error:
        verify(pool, f"{MINE}:raises")
    for word in ("ZeroDivisionError", "the verifier's own mistake", "verifiers.py", "in raises"):
        assert word in str(error.value)
    assert works(pool)


def test_pool_refuses_what_is_no_reward(pool):
    with pytest.raises(RuntimeError, match="returned float, not a rewards"):
        verify(pool, f"{MINE}:not_a_reward")


def test_pool_serves_threads(pool):
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(works(pool))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == [True] * 3


def test_close_does_not_wait():
    pool = RewardPool(1, 60.0)
    pool.pool.schedule(find_verifier, args=["exact"]).result(timeout=60)
    pool.submit(f"{MINE}:hangs", "x", "x", {})
    time.sleep(0.3)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(timeout=5)
    late = closing.is_alive()
    pool.pool.stop()  # else a failure would leave the worker asleep, and this process waiting for it
    assert not late

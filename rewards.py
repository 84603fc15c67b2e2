"""Verifiers, and the pool of processes that runs them.

A verifier is a plain function ``(response, truth, row) -> Reward``: ``response`` is the decoded text of one sample,
``truth`` the answer in the data set, ``row`` the whole row. It runs in a worker process that is killed at the
time-out, so a response that sends a parser into an endless loop costs one sample and not the night. What happens then:

    returns a Reward       used as it is
    runs out of time       score 0, status "timeout", counted in reward/timeouts
    kills its process      score 0, status "crash", counted in reward/errors
    raises                 a bug in the verifier: the run ends with the worker's traceback

Nothing here imports torch: workers start in a second and stay small.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from concurrent.futures import TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path


@dataclass(frozen=True)
class Reward:
    """What a verifier found: ``score`` (what is optimised), ``parts`` for the log (``correct``, ``format``: 0 to 1).

    ``steps``, for ppo.py --dense_reward: (number of characters, score of the response up to there), in rising order.
    """

    score: float
    parts: dict[str, float] = field(default_factory=dict)
    status: str = "ok"
    steps: tuple[tuple[int, float], ...] = ()


# A minus is a sign only where no number or bracket stands before it: "10-4" ends in 4, "= -4" in -4. A comma belongs
# to a number only between groups of three digits, a dot only between digits.
NUMBER = re.compile(
    r"(?<![0-9])(?<![0-9]\.)(?:(?<![0-9)\]])[-\u2212])?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
)


def _number(text: str) -> Decimal:
    return Decimal(text.strip().replace(",", "").replace("\u2212", "-"))


def last_number(response: str, truth: str, row: dict) -> Reward:
    """1 when the last number of the response equals the truth ("1,024" equals "1024", "7.0" equals "7")."""
    numbers = NUMBER.findall(response)
    correct = bool(numbers) and _number(numbers[-1]) == _number(truth)
    return Reward(float(correct), {"correct": float(correct), "format": float(bool(numbers))})


def exact(response: str, truth: str, row: dict) -> Reward:
    """1 when the response is the truth, white space at both ends aside."""
    correct = float(response.strip() == truth.strip())
    return Reward(correct, {"correct": correct})


VERIFIERS: dict[str, Callable[[str, str, dict], Reward]] = {"last_number": last_number, "exact": exact}


def find_verifier(name: str) -> Callable[[str, str, dict], Reward]:
    """A verifier by its name here, or from a file of the user's: ``path/to/file.py:function``.

    Raises ValueError, saying what there is, when no such verifier, file or function exists.
    """
    if name in VERIFIERS:
        return VERIFIERS[name]
    path, _, function = name.rpartition(":")
    if not path:
        raise ValueError(f"no verifier {name!r}; known: {', '.join(VERIFIERS)}, or path/to/file.py:function")
    if not Path(path).is_file():
        raise ValueError(f"no file {path!r} to take the verifier {function!r} from")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's file does wrong
        raise ValueError(f"the file {path!r} does not load: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, function, None)):
        raise ValueError(f"the file {path!r} has no function {function!r}")
    return getattr(module, function)


_verifiers: dict[str, Callable[[str, str, dict], Reward]] = {}  # one per worker process: a file is loaded once


def _verify(name: str, response: str, truth: str, row: dict) -> Reward:
    if name not in _verifiers:
        _verifiers[name] = find_verifier(name)
    reward = _verifiers[name](response, truth, row)
    if not isinstance(reward, Reward):
        raise TypeError(f"the verifier {name!r} returned {type(reward).__name__}, not a rewards.Reward")
    return reward


class RewardPool:
    """Worker processes that each verify one sample at a time.

    Workers are started by spawn, never by fork: the parent holds threads, an engine and maybe a CUDA context.
    """

    def __init__(self, workers: int, timeout: float):
        import multiprocessing

        from pebble import ProcessPool

        self.timeout = timeout
        self.pool = ProcessPool(max_workers=workers, context=multiprocessing.get_context("spawn"))
        for _ in range(workers):  # start them while the models load
            self.pool.schedule(find_verifier, args=["exact"])

    def submit(self, verifier: str, response: str, truth: str, row: dict):
        """Start verifying one response; the returned future goes to ``result``."""
        return self.pool.schedule(_verify, args=[verifier, response, truth, row], timeout=self.timeout)

    def result(self, future) -> Reward:
        """Wait for one Reward. Raises what the verifier raised, with the worker's traceback in the message."""
        from pebble import ProcessExpired

        try:
            return future.result()
        except TimeoutError:
            return Reward(0.0, status="timeout")
        except ProcessExpired:
            return Reward(0.0, status="crash")
        except BrokenProcessPool as error:
            raise RuntimeError("the verifier processes do not start (is the script guarded by __main__?)") from error
        except Exception as error:
            raise RuntimeError(f"a verifier raised in its worker:\n{getattr(error, 'traceback', error)}") from error

    def close(self) -> None:
        """Kill the workers, whatever they are doing."""
        self.pool.stop()
        self.pool.join()

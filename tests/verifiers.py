"""Verifiers for tests; nothing of the project is imported but the result type."""

import asyncio
import builtins
import concurrent.futures
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time

from rewards import Reward


def parity(response, truth, row):
    """A reward that any response can get, so that groups of a random model differ."""
    return Reward(float(len(response) % 2), {"correct": float(len(response) % 2)})


def scheduled(response, truth, row):
    """The progress of training, which an evaluation has behind it."""
    return row["step"] / row["total_steps"] if row["messages"] else None


def zero(response, truth, row):
    """The same for every response, so that no group has a gradient."""
    return Reward(0.0)


def shorter(response, truth, row):
    """A number just below 1: a right answer less a little for its length."""
    return 1.0 - 0.001 * (len(response) + 1)


def seldom(response, truth, row):
    """1 for one response in eight or so: most groups have no gradient, some have."""
    return Reward(float(sum(response.encode()) % 8 == 0))


def raises(response, truth, row):
    raise ZeroDivisionError("the verifier's own mistake")


def hangs(response, truth, row):
    time.sleep(3600)


def hangs_on_a_response(response, truth, row):
    """Not on the truth, with which a run tries a verifier at its start."""
    if response != truth:
        time.sleep(3600)
    return 1.0


def parity_or_hangs(response, truth, row):
    """Parity; it hangs once where tests/fault_injection.py has ordered that."""
    try:
        os.unlink(f"{os.environ['SOAK_ORDERS']}/verifier_hangs")
    except FileNotFoundError:
        return parity(response, truth, row)
    time.sleep(3600)


def slow(response, truth, row):
    time.sleep(5)
    return Reward(1.0)


def late(response, truth, row):
    time.sleep(0.6 * (response != truth))  # a run tries it on a truth first
    return 1.0


def dies(response, truth, row):
    os._exit(3)


def equal_up_to_rounding(response, truth, row):
    """0.3, as a sum in half of the responses."""
    return 0.1 + 0.2 if len(response) % 2 else 0.3


@dataclasses.dataclass
class Case:
    """A test of a user's verifier that is passed to other processes."""

    number: int


def double(case):
    return Case(2 * case.number)


def computes_in_processes(response, truth, row):
    with concurrent.futures.ProcessPoolExecutor(2) as processes:
        return float(list(processes.map(double, [Case(1), Case(2)])) == [Case(2), Case(4)])


def forks(response, truth, row):
    """The child says something else, as one does that meets ``sys.exit`` in a response that is executed."""
    child = os.fork()
    if child == 0:
        sys.exit(3)
    os.waitpid(child, 0)
    return 1.0


def leaves_an_alarm(response, truth, row):
    def over(*_):
        raise ValueError("its time is over")

    signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    return 1.0


def dies_late(response, truth, row):
    time.sleep(0.5)
    os._exit(3)


def runs_the_response(response, truth, row):
    """The usual home-made reward of code; like a run, it is tried with the truth first."""
    if response != truth:
        exec(response, {"exit": sys.exit, "quit": sys.exit})
    return 1.0


class Outcome(BaseException):
    """A BaseException that is no Exception, like pytest.fail's and trio's cancellation."""


def raises_by_name(response, truth, row):
    raise {"asyncio.CancelledError": asyncio.CancelledError, "Outcome": Outcome}.get(
        response, getattr(builtins, response, None)
    )


SLEEPS = "import signal, sys, time; {before}; time.sleep(600)"


def starts_a_process(response, truth, row):
    """A process with the truth in its command line, and then what the response says."""
    program = {
        "child": SLEEPS.format(before="signal.signal(signal.SIGTERM, signal.SIG_IGN)"),
        "a session": SLEEPS.format(before="pass"),
        "orphan": "import os; os.fork() and os._exit(0); " + SLEEPS.format(before="pass"),
        "daemon": "import os; os.fork() and os._exit(0); os.setsid(); " + SLEEPS.format(before="pass"),
    }[row["kind"]]
    started = subprocess.Popen([sys.executable, "-c", program, truth], start_new_session=row["kind"] == "a session")
    if row["kind"] in ("orphan", "daemon"):
        started.wait()
    return {"hangs": hangs, "dies": dies, "": always}[response](response, truth, row)


def terminates_a_process(response, truth, row):
    started = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1)
    started.stdout.readline()
    started.terminate()
    return float(started.wait(1.0) == -15)


class Unpicklable(str):
    def __reduce__(self):
        raise TypeError("not to be sent")


def returns(response, truth, row):
    """What the response names."""
    import numpy

    return {
        "number": 0.5,
        "boolean": True,
        "whole": 1,
        "numpy number": numpy.float32(0.25),
        "numpy boolean": numpy.isclose(1.0, 1.0),
        "numpy reward": Reward(numpy.float32(0.25), {"correct": numpy.float32(0)}),
        "text": "1.0",
        "nan": float("nan"),
        "part nan": Reward(1.0, {"correct": float("nan")}),
        "status": Reward(1.0, status="great"),
        "unpicklable": Reward(1.0, extracted=Unpicklable("7")),
    }[response]


def takes_the_truth_alone(response, truth, row):
    """Raises on prose; OSError as a judge does that is down."""
    if response == "crash":
        raise ConnectionError("the judge is down")
    return {"7": 1.0}[response]


def picky(response, truth, row):
    """Raises on a response it does not expect."""
    return {"good": 1.0, "7": 1.0}[response]


def addition(response, truth, row):
    """A reward that the prompt alone decides, so that a critic can learn it whatever is answered."""
    return Reward(float("+" in row["question"]))


def draws(response, truth, row):
    """Random numbers; slowly, so that each of the workers has one to draw."""
    import numpy

    time.sleep(0.2)
    return Reward(0.0, {"random": random.random(), "numpy": numpy.random.rand()})  # noqa: NPY002


def stepwise(response, truth, row):
    """Half of it for the first character, all of it at the end."""
    return Reward(1.0, steps=((1, 0.5), (len(response), 1.0)))


def takes_memory(response, truth, row):
    return len(bytearray(10**11))


def arithmetic(response, truth, row):
    """Return the integer type sympy uses here: python or gmpy."""
    from sympy.external.gmpy import GROUND_TYPES

    return Reward(1.0, extracted=GROUND_TYPES)


def always(response, truth, row):
    return Reward(1.0)


def well_formed(response):
    return float(sum(response.encode()) % 3 == 0)


def right_and_well_formed(response, truth, row):
    """By chance, each in its own way; right depends on the truth, and a step tells of it early."""
    right = float((len(response) + len(truth)) % 2)
    return Reward(right, {"correct": right, "format": well_formed(response)}, steps=((1, right),))


def only_well_formed(response, truth, row):
    return Reward(well_formed(response))


def wrong(response, truth, row):
    return Reward(0.0 - right_and_well_formed(response, truth, row).score)

"""Environments of the tests: a game, tools, and a dozen tools that nobody should write."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import sys
import time
import types


class Guess:
    """A game: say the answer; each wrong one costs half of the reward."""

    def reset(self, answer, **row):
        self.answer = str(answer)
        self.tries = 0
        self.right = False

    def turn(self, text):
        self.tries += 1
        self.right = self.answer in text.split()
        return None if self.right else f"No, not at try {self.tries}."

    def get_reward(self):
        return 0.5 ** (self.tries - 1) if self.right else 0.0


class Late(Guess):
    """The same, answering after a second, or the row's "seconds"."""

    def reset(self, answer, seconds=1.0, **row):
        super().reset(answer)
        self.seconds = seconds

    def turn(self, text):
        time.sleep(self.seconds)
        return super().turn(text)


class Troubled(Guess):
    """The same, whose turns do once what tests/fault_injection.py has ordered."""

    def turn(self, text):
        for how in ("tool_raises", "tool_hangs", "tool_dies"):
            try:
                os.unlink(f"{os.environ['SOAK_ORDERS']}/{how}")
            except FileNotFoundError:
                continue
            if how == "tool_raises":
                raise ConnectionError("no such host")
            if how == "tool_hangs":
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().turn(text)


class Paid:
    """A game of turns that each bring what the model says; the end brings 10 more where it says "end"."""

    def reset(self, **row):
        self.said = ""

    def turn(self, text):
        self.said = text
        return None if text == "end" else "and?"

    def get_turn_reward(self):
        return float(self.said) if self.said != "end" else 0

    def get_reward(self):
        return 10.0 if self.said == "end" else 0.0


class OnlyPaid:
    """The same with calls of a tool, and without a reward at the end."""

    def reset(self, **row):
        self.number = 0.0

    def pay(self, number: float) -> str:
        """Pay.

        Args:
            number: how much.
        """
        self.number = number
        return "paid"

    def get_turn_reward(self):
        return self.number


class Logged:
    """A game whose answers follow from what was said. The file CALLS of the environment gets a line for each call."""

    def reset(self, **row):
        self.said = []

    def turn(self, text):
        calls = os.environ["CALLS"]
        with open(calls, "a") as file:
            file.write(f"{os.getpid()}\n")
        if os.path.exists(f"{calls}.stop"):  # the tool that is under way when its run is killed
            time.sleep(600)
        self.said.append(text)
        return self.number()

    def number(self):
        """A number of four digits, the same for the same turns."""
        return hashlib.sha256(repr(self.said).encode()).hexdigest()[:4]

    def get_reward(self):
        return int(self.number(), 16) / 2**16


class Tools:
    """Tools with a state, in TRL's form."""

    def reset(self, **row) -> str | None:
        self.total = 0
        return row.get("hint")

    def add(self, number: int) -> int:
        """Add to the total.

        Args:
            number: what to add.
        """
        self.total += number
        return self.total

    def words(self, count: int, word: str = "word") -> str:
        """Say a word several times.

        Args:
            count: how often.
            word: which.
        """
        return " ".join([word] * count)

    def fail(self) -> str:
        """Fail."""
        raise ConnectionError("no such host")

    async def later(self) -> str:
        """Answer from a coroutine."""
        return "late"


class Unusual(str):
    """A text that cannot be said."""

    def __str__(self):
        raise RuntimeError("unspeakable")


class Hostile:
    """Each method does something that no tool should."""

    def reset(self, **row):
        self.calls = 0
        self.state = None

    def fine(self) -> int:
        """Count the calls of this one."""
        self.calls += 1
        return self.calls

    def hang(self) -> None:
        """Never answer, and ignore polite signals."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)

    def spin(self) -> None:
        """Never answer, and compute."""
        while True:
            pass

    def fail(self) -> None:
        """Raise."""
        raise ValueError("bad \ud800 words")

    def leave(self) -> None:
        """End the process at once."""
        os._exit(3)

    def say_exit(self) -> None:
        """Ask to end the program."""
        sys.exit("enough")

    def fork(self) -> str:
        """Return twice, and leave a child that stays."""
        os.fork()
        if os.fork() == 0:
            time.sleep(600)
        return f"from {os.getpid()}"

    def flood(self) -> str:
        """Print 50 MB."""
        for _ in range(50):
            print("x" * 2**20)
            os.write(2, b"y" * 2**20)
        return "printed"

    def memory(self) -> int:
        """Take all memory."""
        return len(bytearray(64 * 2**30))

    def wrong_type(self) -> object:
        """Return what cannot be said."""
        return Unusual("x")

    def bytes_of_nothing(self) -> bytes:
        """Return bytes that are no UTF-8."""
        return b"caf\xe9 \xff\xfe"

    def surrogate(self) -> str:
        """Return half of a pair."""
        return "a \udcff b"

    def long(self) -> str:
        """Return 10 MB."""
        return "word " * 2_000_000

    def keep(self) -> str:
        """Keep a huge state."""
        self.state = [random.random() for _ in range(3_000_000)]
        return f"kept {len(self.state)}"

    def change(self, items: list[int]) -> str:
        """Change its arguments.

        Args:
            items: a list.
        """
        items.append("changed")
        return str(items)

    def kill_parent(self) -> str:
        """Kill the process that started this one."""
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(5)
        return "survived"

    def kill_group(self) -> str:
        """Kill the whole process group."""
        os.killpg(0, signal.SIGKILL)
        return "survived"

    def kill_grandparent(self) -> str:
        """Kill the process that all others come from."""
        with open(f"/proc/{os.getppid()}/stat") as file:
            grandparent = int(file.read().rpartition(")")[2].split()[1])
        os.kill(grandparent, signal.SIGKILL)
        time.sleep(5)
        return "survived"

    def close_all(self) -> str:
        """Close every file of the process."""
        os.closerange(0, 1000)
        return "closed"


class NoReset:
    """Not an environment."""

    def look(self) -> str:
        """Look."""
        return ""


class NoHints:
    """A tool without type hints."""

    def reset(self, **row):
        pass

    def look(self, place):
        """Look."""


class Generator:
    """A tool whose answer is no text."""

    def reset(self, **row):
        pass

    def look(self) -> str:
        """Look."""
        yield "here"


class NeverAtOnce(Guess):
    """A game that no process may play."""

    at_once = 0


COUNT = 0
NUMBER = random.randrange(10**9)


class Reproducible(Guess):
    """Games whose number is one of the row's alone, however strange its origin: the row's "how" chooses it."""

    def reset(self, how, **row):
        global COUNT
        COUNT += 1
        if how == "numpy imported late":
            import numpy as np

            number = np.random.randint(10**6)  # noqa: NPY002
        else:
            number = {"module": NUMBER, "counter": COUNT, "random": random.random()}[how]
        super().reset(number)
        return f" say {number}"


class Irreproducible(Guess):
    """Games whose number is another one in every process."""

    def reset(self, how, **row):
        generators = {"Random": random.Random().random, "urandom": lambda: os.urandom(8).hex(), "clock": time.time_ns}
        super().reset(generators[how]())
        return f" say {self.answer}"


class LaterOther(Guess):
    """A game that is reproducible until the file CALLS exists."""

    def reset(self, **row):
        super().reset("4")
        return " other" if os.path.exists(os.environ["CALLS"]) else " first"


class Echo:
    """A game that talks to a server of its own, over a connection that reset opens."""

    async def reset(self, **row):
        self.server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        self.reader, self.writer = await asyncio.open_connection(*self.server.sockets[0].getsockname())

    async def answer(self, reader, writer):
        while line := await reader.readline():
            writer.write(line.upper())

    async def turn(self, text):
        self.writer.write(f"{text.strip()}\n".encode())
        return (await asyncio.wait_for(self.reader.readline(), 10)).decode().strip()

    async def get_reward(self):
        return 1.0


class Typos:
    """A game of which the method that the row names raises."""

    def reset(self, wrong, **row):
        self.wrong = wrong

    def turn(self, text):
        return self.missing if self.wrong == "turn" else None

    def get_turn_reward(self):
        return self.missing if self.wrong == "get_turn_reward" else 0.0

    def _missing_below(self, calls):
        return self._missing_below(calls - 1) if calls else self.missing

    def get_reward(self):
        return self._missing_below(3) if self.wrong == "get_reward" else 1.0


class Both(Guess):
    """A game with another public method, and rewards that are numbers of other kinds."""

    def look(self) -> str:
        """Look."""
        return "here"

    @classmethod
    def peek(cls) -> str:
        """Peek."""
        return "there"

    def get_reward(self):
        import decimal

        import numpy as np

        return np.array(1.0) if self.right else decimal.Decimal("0.25")


class NoText:
    """Tools whose answers are objects."""

    def reset(self, **row):
        pass

    def thing(self) -> object:
        """Return an object."""
        return object()

    def things(self) -> list:
        """Return a list that holds one."""
        return [1, (k for k in range(3))]

    @classmethod
    def number(cls) -> int:
        """Return a number."""
        return 7


class Exact:
    """A game whose rewards follow exactly from its turns and the number that reset says. One turn in four raises.

    With TROUBLE in the environment its turns also sleep by chance, print a lot, and leave a process behind.
    """

    def reset(self, **row):
        self.number = random.randrange(8)
        self.said = []
        return f" Number {self.number}."

    def turn(self, text):
        self.said.append(text)
        if os.environ.get("TROUBLE"):
            time.sleep(os.urandom(1)[0] / 500)
            print("x" * 2**20)
            os.write(2, os.urandom(2**16))
            if os.urandom(1)[0] < 64 and os.fork() == 0:
                time.sleep(600)
        if len(text) % 4 == 0:
            raise ConnectionError(f"no such host as {len(text)}")
        return f"{len(text)} characters."

    def get_turn_reward(self):
        return ((len(self.said[-1]) + self.number) % 4) / 4

    def get_reward(self):
        parts = {"format": float(len(self.said) % 2)}
        return types.SimpleNamespace(score=self.number / 8, parts=parts, status="ok", extracted="", detail="")

"""Users' environment objects, in processes of their own: none of their code runs in the process of a run.

The nursery (system/workers.py) loads the file once; each object lives in a fork of it, which ``serve`` answers for.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import math
import multiprocessing
import os
import random
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy

from runtime.system import process, user_files

MEMORY = 4 * 2**30  # bytes of address space, as a verifier's
CHARACTERS = 10_000  # of an observation; what is longer is cut. A class may have another number as max_characters
ADDRESS = r" at 0x[0-9a-f]+"  # in the text of an object that has none of its own: another one in every process
OWN = ("reset", "get_reward", "get_turn_reward", "turn")  # methods that are no tools

loaded = SimpleNamespace(cls=None, error="")  # in the nursery and its forks


def load(path: str, name: str, text: str) -> None:
    """Load a class of a file in the nursery, with the same random numbers in every nursery, or record the error."""
    user_files.texts[path] = text
    sys.path.insert(0, str(Path(path).resolve().parent))
    random.seed(0)
    numpy.random.seed(0)  # noqa: NPY002 - the generator that users' files call
    try:
        module = user_files.load(path)
        if not hasattr(module, name):
            classes = [key for key, value in vars(module).items() if inspect.isclass(value)]
            loaded.error = f"it has no class {name} at its top level; it has: {', '.join(classes) or 'none'}"
        loaded.cls = getattr(module, name, None)
    except BaseException as error:  # whatever the user's file raises
        loaded.error = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-2)}"


def describe() -> dict[str, Any]:
    """Describe the class: its kind, the tools' schemas, and its limits. ``error``: the reason why it is invalid."""
    if loaded.error:
        return {"error": f"the file does not load: {loaded.error}"}
    cls = loaded.cls
    if not inspect.isclass(cls) or not callable(getattr(cls, "reset", None)):
        return {"error": "must be a class with a method reset"}
    methods = {name: value for name, value in inspect.getmembers(cls, inspect.isroutine) if hasattr(value, "__code__")}
    names = [name for name in methods if not name.startswith("_")]
    tools = [name for name in names if name not in OWN]
    for name in names:
        if inspect.isgeneratorfunction(methods[name]) or inspect.isasyncgenfunction(methods[name]):
            return {"error": f"its method {name} is a generator; return a text in place of yield"}
    at_once = int(getattr(cls, "at_once", 64))
    if at_once < 1:
        return {"error": f"at_once is {at_once}; it must be at least 1"}
    about = {
        "error": "",
        "is_game": "turn" in names,
        "has_reward": "get_reward" in names or "get_turn_reward" in names,
        "tools": [],
        "at_once": at_once,
        "files": list(itertools.chain.from_iterable(user_files.imported.values())),
    }
    if about["is_game"]:
        return about
    if not tools:
        return {"error": "has neither a method turn nor a public method, which would be a tool"}
    from transformers.utils import get_json_schema

    try:
        made = cls()
        about["tools"] = [get_json_schema(getattr(made, name)) for name in tools]
    except Exception as error:  # of the class, or of transformers about a method without type hints or docstring
        return {"error": f"{type(error).__name__}: {error}"}
    return about


def serve(line: Connection) -> None:
    """Hold an object in a fork of the nursery, and answer the messages about it until the line ends.

    The process that the object is in has a parent of its own. If it kills that one, it has killed itself alone.
    """
    guard = os.getpid()
    pid = os.fork()
    if pid > 0:
        line.close()
        os._exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
    process.live_for_parent()
    if os.getppid() != guard:
        os._exit(1)
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # nobody reads what a tool prints
        os.dup2(silence, descriptor)
    own = os.getpid()
    answers = {"describe": describe, "first": first, "begin": UserObject.begin, "turn": UserObject.turn}
    while True:
        try:
            word, *given = line.recv()
        except (EOFError, OSError):
            os._exit(0)
        if word != "describe":  # which imports transformers
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        answer = answers[word](*given)
        if os.getpid() != own:
            os._exit(0)  # a fork that a tool made and did not end: it must not answer for this one
        with contextlib.suppress(OSError):
            line.send(answer)


def first(rows: list[tuple[dict, int]]) -> list[dict[str, Any]]:
    """Return what ``UserObject.begin`` returns for each of the rows (row, seed)."""
    return [_begin_in_fork(row, seed) for row, seed in rows]


def _begin_in_fork(row: dict, seed: int) -> dict[str, Any]:
    """Reset an object in a process of its own, as an episode does: no row sees what another one's reset has left."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        theirs.send(UserObject.begin(row, seed))
        os._exit(0)
    theirs.close()
    with ours, contextlib.suppress(EOFError):
        return ours.recv()
    return {"text": None, "error": "reset ended its process"}


class UserObject:
    """The object of this process. Everything that a method of the user's raises, or returns, becomes text here."""

    made: Any = None
    runner: asyncio.Runner | None = None  # one event loop for all calls: what reset opens belongs to it

    @classmethod
    def begin(cls, row: dict, seed: int) -> dict[str, Any]:
        """Make the object and reset it: {"text": its observation or None, "error": ""}."""
        random.seed(seed)  # the same game for every sample of a group, at every time
        numpy.random.seed(seed)  # noqa: NPY002
        try:
            cls.made = loaded.cls()
            text = wait_for(cls.made.reset, **taken(cls.made.reset, row))
            if text is not None and not isinstance(text, str):
                raise TypeError(f"reset returned {type(text).__name__}, not text or None")
        except BaseException:  # exit() as well
            return {"text": None, "error": traceback.format_exc(limit=-3)}
        return {"text": None if text is None else clean(text, cls.made), "error": ""}

    @classmethod
    def turn(cls, text: str | None, calls: list[tuple[str, dict]], is_last: bool) -> dict[str, Any]:
        """Answer a turn of the model: its ``text`` to a game, or the ``calls`` of tools.

        Returns {"said": [(text, whether it failed, seconds)], "ended": bool, "turn_reward": see ``turn_reward``,
        "reward": see ``reward``, "seconds": of all}; a reward where the episode has ended or ``is_last``.
        """
        started = time.perf_counter()
        said = []
        ended = is_last
        for name, arguments in calls:
            said.append(cls.call(getattr(cls.made, name), arguments))
        if text is not None:
            answer = cls.call(cls.made.turn, {"text": text}, is_game=True)
            ended = ended or answer[0] is None
            said.append(answer)
        answer = {"said": said, "ended": ended, "turn_reward": cls.turn_reward() if said else None}
        answer["reward"] = cls.reward() if ended else None
        return answer | {"seconds": time.perf_counter() - started}

    @classmethod
    def call(cls, method: Callable, arguments: dict, is_game: bool = False) -> tuple[str | None, bool, float]:
        """Call a method and return (answer, whether it failed, seconds). A game that is over answers None."""
        started = time.perf_counter()
        failed = False
        try:
            if not is_game:
                check_arguments(method, arguments)
            answer = wait_for(method, **arguments)
            if is_game and answer is not None and not isinstance(answer, str):
                raise TypeError(f"turn returned {type(answer).__name__}, not text or None")
            if isinstance(answer, bytes):
                answer = answer.decode(errors="replace")
            if not isinstance(answer, str) and re.search(ADDRESS, str(answer)):
                raise TypeError(f"{method.__name__} returned {answer!r}; return text or JSON")
            answer = answer if is_game and answer is None else clean(str(answer), cls.made)
        except BaseException as error:  # exit() as well
            failed = True
            answer = describe_error(error)
        return answer, failed, time.perf_counter() - started

    @classmethod
    def turn_reward(cls) -> float | str | None:
        """Return ``get_turn_reward`` of the turn just answered, or the reason for none; None without the method."""
        if getattr(cls.made, "get_turn_reward", None) is None:
            return None
        try:
            found = float(wait_for(cls.made.get_turn_reward))
            if not math.isfinite(found):
                raise ValueError(f"get_turn_reward returned {found}")
        except BaseException:
            return traceback.format_exc(limit=-3)
        return found

    @classmethod
    def reward(cls) -> dict[str, Any] | None:
        """Return what ``get_reward`` returns, a number or a rewards.Reward, as the fields of one; 0 without it."""
        if getattr(cls.made, "get_reward", None) is None:
            return {"score": 0.0}
        try:
            found = wait_for(cls.made.get_reward)
            if not (hasattr(found, "score") or isinstance(found, str)):  # a number, also numpy's or torch's
                return {"score": float(found)}
            return {
                "score": float(found.score),
                "parts": {str(name): float(value) for name, value in found.parts.items()},
                "status": str(found.status),
                "extracted": str(found.extracted),
                "detail": str(found.detail),
            }
        except BaseException:
            return {"score": 0.0, "status": "unscorable", "detail": traceback.format_exc(limit=-3)}


def wait_for(method: Callable, **arguments) -> Any:
    """Return what a method returns, or what it comes to if it is asynchronous."""
    found = method(**arguments)
    if not inspect.isawaitable(found):
        return found

    async def awaited() -> Any:
        return await found

    UserObject.runner = UserObject.runner or asyncio.Runner()
    return UserObject.runner.run(awaited())


def taken(method: Callable, row: dict) -> dict:
    """Return the columns of a row that are parameters of a method, or all columns if the method has ``**``."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


KINDS = {int: int, float: (int, float), str: str, bool: bool, list: list, dict: dict}


def check_arguments(method: Callable, arguments: dict) -> None:
    """Raise TypeError where a call's arguments are not those of the method, by its names and its plain type hints."""
    signature = inspect.signature(method, eval_str=True)
    signature.bind(**arguments)
    for name, value in arguments.items():
        hint = signature.parameters[name].annotation if name in signature.parameters else None
        wanted = KINDS.get(hint) if inspect.isclass(hint) else None
        if wanted is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and hint is not bool)):
            raise TypeError(f"{name} must be {hint.__name__}, not {type(value).__name__}")


def describe_error(error: BaseException) -> str:
    """Describe an exception as an observation, even if it cannot be converted to text."""
    try:
        text = f"error: {type(error).__name__}: {error}"
    except BaseException:
        text = f"error: {type(error).__name__}"
    return clean(re.sub(ADDRESS, "", text[:500]), None)


def clean(text: str, made: Any) -> str:
    """Make a text valid for tokenizers, without halves of surrogates, and cut it if it is too long."""
    most = int(getattr(made, "max_characters", CHARACTERS))
    if len(text) > most:
        text = f"{text[:most]}\n[cut: {len(text)} characters]"
    return text.encode("utf-8", "replace").decode()

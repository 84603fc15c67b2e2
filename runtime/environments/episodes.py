"""Episodes: responses of several turns, each of which an object of --environment answers in a process of its own.

The engine's thread calls this between two steps and never waits for what it could do without. A turn that has ended is
sent to its episode's process, and the answer is taken TURN_LAG engine steps later, whenever it came, or earlier
where the engine has nothing else to compute: then all answers are. Only if one has not come by then does the engine
wait. So which requests an engine step computes is counted, never timed: a run with tools repeats to the bit, and tools
that take less than that many steps cost the others nothing.

A call that lasts longer than --call_timeout ends its process, and so may anything else that a tool does. The model is
told, and the object is made again for its next turn: reset, and the turns before, which are called once more.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from graders.text import after_thinking
from runtime.data import problem_set, rendering
from runtime.data.samples import Problem
from runtime.engine import turns
from runtime.environments import user_objects
from runtime.environments.chat import Call, Chat, with_tools
from runtime.system import user_files
from runtime.system.process import on_a_line, print_on_rank_0, refuse
from runtime.system.verifier_pool import MANY
from runtime.system.workers import Nursery, Worker, code_of_run, raise_file_limit

AT_ONCE = 64  # rows that one process resets at the start
TWICE = 8  # rows that are reset a second time at the start
GRACE = 1.0  # seconds for a message to come
START = 120.0  # seconds in which a file must load
TURN_LAG = 128  # engine steps from the end of a turn to its answer, so that timing does not decide which steps it joins


@functools.cache
def nursery_of(spec: str, life: int) -> Nursery:
    """Return the process whose forks hold the objects of ``file.py:Class``. ``life``: the number killed by a tool."""
    path, _, name = spec.rpartition(":")
    return Nursery(code_of_run(), user_objects.load, path, name, user_files.text_of(path))


lives: Counter[str] = Counter()  # environment -> how many of its nurseries a tool has killed


def start_process(spec: str) -> tuple[Worker, Connection]:
    """Start a process of an environment, and return it and the line to it. A nursery that is gone is made again.

    Raises RuntimeError if no process can be started.
    """
    for _ in range(5):
        try:
            return nursery_of(spec, lives[spec]).worker(user_objects.serve)
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise RuntimeError(f"--environment {spec}: {error}: raise `ulimit -n`") from error
            lives[spec] += 1
    raise RuntimeError(f"--environment {spec}: its processes do not start; is `ulimit -u` reached?")


def ask_once(spec: str, request: tuple, seconds: float) -> Any:
    """Ask a new process once. Raises TimeoutError, or EOFError if the process ended without an answer."""
    worker, line = start_process(spec)
    try:
        line.send(request)
        if not line.poll(seconds):
            raise TimeoutError(f"no answer within {seconds:g} s")
        return line.recv()
    finally:
        line.close()
        worker.terminate()


@functools.cache
def describe_class(spec: str) -> dict[str, Any]:
    """Return ``user_objects.describe`` of ``file.py:Class``. Ends with exit code 2 if that is not an environment."""
    path, _, name = spec.rpartition(":")
    given = on_a_line(spec)
    if not path.endswith(".py") or not name.isidentifier():
        refuse(f"--environment {given}: give a file and a class in it, as in game.py:Guess")
    try:
        user_files.text_of(path)
        found = ask_once(spec, ("describe",), START)
    except (OSError, SyntaxError, UnicodeError, TimeoutError, EOFError) as error:
        refuse(f"--environment {given}: the file does not load: {type(error).__name__}: {error}")
    if found["error"]:
        refuse(f"--environment {given}: {found['error']}")
    user_files.imported[path] = found["files"]
    return found


def check(args) -> None:
    """Reject an --environment that cannot work; one with a reward of its own becomes the default verifier."""
    for flag, wrong, why in (
        ("rollout hf", args.rollout == "hf", "only vLLM's thread has turns"),
        ("vllm_tensor_parallel_size", args.vllm_tensor_parallel_size > 1, "each of its ranks would play by itself"),
        ("ignore_eos", args.ignore_eos, "no turn would end"),
    ):
        if wrong:
            more = "; --vllm_sleep engine makes room, too" if flag.startswith("vllm") else ""
            refuse(f"--environment with --{flag}: {why}; leave one of them out{more}")
    raise_file_limit()  # each episode has two open files
    if describe_class(args.environment)["has_reward"]:
        args.verifier = args.verifier or "environment"
        return
    remedy = f"{args.environment} has no method get_reward; add one that returns what TRL's reward functions read"
    if "environment" in (args.verifier or "").split(","):
        refuse(f"--verifier environment: {remedy}, or choose a verifier")
    if not args.verifier:
        print_on_rank_0(f"--environment {remedy}, or a verifier judges the last turn alone")


def seed_of(row: dict) -> int:
    """Return the seed of an object's random numbers: the same for all samples of a row, at every time."""
    return problem_set.seed_from(json.dumps(row, sort_keys=True, default=str))


def difference(spec: str, row: dict, first: str | None, again: str | None) -> str:
    """Return the error message for a ``reset`` whose text for a row is not the one in the prompt."""
    return (
        f"--environment {spec}: reset is not reproducible: for the row {row} it returned {first!r} for the prompt and "
        f"then {again!r}. random and numpy.random are seeded by the row; seed other generators by a column of the row"
    )


def first_turns(problems: list[Problem], tokenizer, args) -> None:
    """Add to the prompts the tools and what ``reset`` says to their rows. It is called again for every episode."""
    chat = chat_of(tokenizer, args)
    rows = [(problem.row, seed_of(problem.row)) for problem in problems]
    found = []
    for start in (*range(0, len(rows), AT_ONCE), 0):
        part = rows[start : start + (AT_ONCE if len(found) < len(rows) else TWICE)]
        try:
            found += ask_once(args.environment, ("first", part), START + len(part) * args.call_timeout)
        except (TimeoutError, EOFError) as error:
            refuse(f"--environment {args.environment}: reset of rows {start} to {start + len(part) - 1}: {error!r}")
    for problem, answer in zip(problems, found, strict=False):
        if answer["error"]:
            refuse(f"--environment {args.environment}: reset failed on the row {problem.row}:\n{answer['error']}")
        problem.tools = chat.tools if chat.writes_tools else None
        problem.opening = answer["text"] or ""
        *before, last = problem.messages if chat.writes_tools else with_tools(problem.messages, chat.tools)
        problem.messages = [*before, last | {"content": last["content"] + problem.opening}]
    for problem, first, again in zip(problems, found, found[len(rows) :], strict=False):
        if first != again:
            refuse(difference(args.environment, problem.row, first["text"], again["text"]))


def chat_of(tokenizer, args) -> Chat:
    """Build the ``Chat`` that renders the turns of a run. Ends with exit code 2 if the template cannot render them."""
    try:
        return Chat(tokenizer, args, describe_class(args.environment))
    except rendering.Unrenderable as error:
        refuse(f"--environment: {error}")


@dataclass
class Episode(turns.Episode):
    """A response of several turns: whose its ids are, and what its environment waits for.

    A request without a row (a few tokens to compare with the trainer's) has one turn.
    """

    row: dict | None = None
    opening: str | None = None  # what reset says in the prompt
    observed: list[tuple[int, int]] = field(default_factory=list)  # spans of the environment's tokens in ids
    turns: list[dict[str, Any]] = field(default_factory=list)  # for people
    outcome: dict[str, Any] | None = None  # the environment's reward: fields of rewards.Reward
    steps: list[tuple[int, float]] = field(default_factory=list)  # (the model's tokens so far, rewards of turns so far)
    detail: str = ""  # why a turn has no reward
    fatal: str = ""  # why the run must end
    raised: str = ""  # what reset, turn or a reward raised, the last time
    has_answered: bool = False  # a turn of a game that did not raise
    # What its process is asked:
    past: list[tuple] = field(default_factory=list)  # turns that it has answered, by which the object is made again
    asked: tuple | None = None  # the turn that it shall answer
    calls: list[Call] = field(default_factory=list)  # of this turn, also those that are malformed
    answer: dict[str, Any] | str | None = None  # its answer, or what became of it
    due: int = 0  # the engine step after which the answer is taken
    worker: Worker | None = None
    line: Connection | None = None
    unanswered: int = 0  # messages to the process
    deadline: float = 0.0
    sent: float = 0.0

    @property
    def name(self) -> str:
        """A name of its turn that no other has."""
        return f"{super().name}/{len(self.turns)}"

    def request(self) -> tuple[list[int], dict[str, Any], int]:
        """Return (prompt, sampling parameters, seed) of the episode's next turn."""
        seed = problem_set.seed_from(f"{self.seed}/{len(self.turns)}") if self.turns else self.seed
        left = self.sampling["max_tokens"] - len(self.ids)
        return self.prompt_ids + self.ids, self.sampling | {"max_tokens": left}, seed

    def found(self) -> tuple:
        """Return what the run gets: the fields of a Sample, from its ids on."""
        found = super().found()
        return found if self.row is None else (*found, None, self.observed, self.turns, self.outcome)


class Episodes(turns.Episodes):
    """The episodes of one engine, in its thread: none is waited for before it is due."""

    def __init__(self, args):
        super().__init__()
        self.args = args
        self.step = 0  # of the engine
        self.aside: deque[Episode] = deque()  # wait for their environments, in the order in which they are due
        self.queue: deque[Episode] = deque()  # of these, those that no process has been asked for yet
        self.asked: list[Episode] = []  # and those that one works on
        self.played: list[Episode] = []  # all that have a process, also while the engine computes their turns
        self.looked = time.monotonic()  # when answers were last looked for
        self.raised: int | None = 0  # episodes that ended in an exception; None once one has not
        self.about = describe_class(args.environment)
        self.chat = chat_of(rendering.load_tokenizer(args), args)

    def begin(self, batch: int, key: tuple[int, int], prompt_ids: list[int], seed: int, *more) -> Episode:
        """Return the episode of a request of the run; ``more``: its other fields, up to ``opening``."""
        return Episode(batch, key, prompt_ids, seed, *more)

    def turn_ended(self, episode: Episode, answer) -> None:
        """Take a turn of the model; ``answer``: vLLM's ``CompletionOutput``. Asks the environment without waiting."""
        if episode.row is None:
            super().turn_ended(episode, answer)
            return
        start = len(episode.ids)
        episode.add(answer)
        whole = episode.finish_reason != "length"
        text = self.chat.turn_text(episode.ids[start:], whole)
        said = after_thinking(text)
        is_game = self.about["is_game"]
        calls = self.chat.calls(said) if whole and not is_game else []
        turn = {"role": "assistant", "text": text, "tokens": len(episode.ids) - start}
        if calls:
            turn["calls"] = [vars(call) for call in calls]
        episode.turns.append(turn)
        episode.calls = calls
        good = [(call.name, call.arguments) for call in calls if not call.error]
        count = sum(turn["role"] == "assistant" for turn in episode.turns)
        is_last = count == self.args.max_turns or not whole or not (is_game or calls)
        self._put_aside(episode, said if is_game and whole else None, good, is_last)

    def _put_aside(self, episode: Episode, text: str | None, calls: list[tuple], is_last: bool) -> None:
        """Have the environment answer, if there is something to ask it."""
        episode.asked = (text, calls, is_last)
        if is_last and not self.about["has_reward"]:
            self._end(episode)
            self.ended.append(episode)
            return
        if text is None and not calls and not is_last:  # calls that are malformed, all of them
            episode.answer = {"said": [], "ended": False, "turn_reward": None, "reward": None}
        else:
            self.queue.append(episode)
        episode.due = self.step + TURN_LAG
        self.aside.append(episode)
        self._pump()

    def due(self, idle: bool) -> Iterator[Episode]:
        """Yield, after an engine step, the episodes that ended, with a finish reason, and those whose next turn begins.

        ``idle``: the engine has nothing to compute. Then all that wait are due, at whichever step.
        """
        idle = idle and not self.ended
        yield from super().due(idle)
        self.step += 1
        if idle and self.aside:
            self.step = max(self.step, self.aside[-1].due)
        self._pump()
        while self.aside and self.aside[0].due <= self.step:
            episode = self.aside.popleft()
            while episode.answer is None:
                self._pump(wait_for_one=True)
            if self._continue(episode):
                yield episode

    # ------------------------------------------------------------------------------------------------- the processes

    def _pump(self, wait_for_one: bool = False) -> None:
        """Ask processes as far as at_once allows, take all answers that have come, and end what is over its time.

        The clock leaves out the time that the engine's thread was away (an update, SIGSTOP).
        """
        for episode in self.asked:
            episode.deadline += max(0.0, time.monotonic() - self.looked - GRACE)
        while self.queue and len(self.asked) < self.about["at_once"]:
            self._ask(self.queue.popleft())
        if not self.asked:
            return
        by_line = {episode.line: episode for episode in self.asked}
        seconds = 0.0
        if wait_for_one:
            seconds = max(0.0, min(episode.deadline for episode in self.asked) - time.monotonic())
        for line in wait(list(by_line), seconds):
            episode = by_line[line]
            while episode in self.asked and line.poll():
                self._receive(episode)
        self.looked = time.monotonic()
        for episode in list(self.asked):
            if self.looked > episode.deadline:
                self._give_up(episode)

    def _ask(self, episode: Episode) -> None:
        """Send a turn to the episode's process: to a new one, with all that went before, where there is none."""
        messages = [("turn", *episode.asked)]
        if episode.worker is not None and not episode.worker.is_alive():  # ended since, not by this turn
            self._end(episode)
        if episode.worker is None:
            episode.worker, episode.line = start_process(self.args.environment)
            self.played.append(episode)
            messages = [("begin", episode.row, seed_of(episode.row)), *(("turn", *p) for p in episode.past), *messages]
        episode.unanswered = len(messages)
        episode.sent = time.monotonic()
        calls = 1 if len(messages) == 1 else len(messages) + 1
        episode.deadline = episode.sent + self.args.call_timeout * calls + GRACE
        self.asked.append(episode)
        try:
            for message in messages:
                episode.line.send(message)
        except OSError:  # it has ended since its last answer; its line says so as well
            pass

    def _receive(self, episode: Episode) -> None:
        """Take one answer of a process, or its end."""
        try:
            answer = episode.line.recv()
        except Exception as error:  # EOFError, OSError, or whatever the unpickling of half a message raises
            self._give_up(episode, "", error)
            return
        episode.unanswered -= 1
        if answer.get("error"):
            episode.raised = answer["error"]
            self._give_up(episode, f"reset failed: {answer['error']}")
        elif "text" in answer and episode.opening is not None and (answer["text"] or "") != episode.opening:
            episode.fatal = difference(self.args.environment, episode.row, episode.opening, answer["text"])
            self._give_up(episode, episode.fatal)
        elif episode.unanswered == 0 and answer["seconds"] > self.args.call_timeout:
            self._give_up(episode)
        elif episode.unanswered == 0:
            self.asked.remove(episode)
            episode.answer = answer

    def _give_up(self, episode: Episode, why: str = "", error: Exception | None = None) -> None:
        """End an episode's process, and note what became of it; it is made again for its next turn."""
        self.asked.remove(episode)
        code = self._end(episode, patience=0.0 if error is None else 1.0)
        if error is not None:
            why = f"its process was killed by signal {-code}" if code < 0 else f"its process ended, exit code {code}"
        episode.answer = why or f"no answer within {self.args.call_timeout:g} s"

    def _end(self, episode: Episode, patience: float = 0.0) -> int:
        """End an episode's process, if it has one; its exit code, or minus the signal that ended it."""
        if episode.worker is None:
            return 0
        worker, episode.worker = episode.worker, None
        self.played = [other for other in self.played if other is not episode]
        episode.line.close()
        worker.join(patience)
        worker.terminate()
        return worker.exitcode if worker.exitcode < 128 else worker.exitcode - 256

    def close(self) -> None:
        """End all processes, whatever they are at."""
        for episode in self.played:
            self._end(episode)

    # ----------------------------------------------------------------------------------------------------- the turns

    def _continue(self, episode: Episode) -> bool:
        """Make the environment's turn of its answer; False where something has to be waited for again.

        Otherwise the episode has ended, or its ``finish_reason`` is None and the model goes on.
        """
        answer, episode.answer = episode.answer, None
        if isinstance(answer, str):
            answer = self._lost(episode, answer)
        if not answer.get("lost"):
            episode.past.append(episode.asked)
        self._count_reward(episode, answer["turn_reward"])
        for text, failed, _ in answer["said"] if self.about["is_game"] else ():
            episode.has_answered |= not failed
            episode.raised = text if failed else episode.raised
        answers = iter(answer["said"])
        said = [(call.error, True, 0.0) if call.error else next(answers) for call in episode.calls]
        said += answers  # of a game, or what became of the reward
        names = [call.name or "none" for call in episode.calls]
        pairs = itertools.zip_longest(names, said, fillvalue="")
        texts = [(name, text) for name, (text, *_) in pairs if text is not None]
        if texts:
            turn = {"role": self.chat.role, "text": "\n".join(text for _, text in texts), "tokens": 0}
            turn["failures"] = sum(failed for _, failed, _ in said)
            turn["seconds"] = sum(seconds for _, _, seconds in said)
            episode.turns.append(turn)
        if answer["ended"]:
            episode.outcome = self._outcome(episode, answer["reward"])
            self._count_raised(episode)
            self._end(episode)
            return True
        glue = self.chat.glue(texts, episode.ids[-1])
        if len(episode.ids) + len(glue) >= episode.sampling["max_tokens"]:  # no tokens left for another turn
            episode.finish_reason = "length"
            episode.calls = []
            self._put_aside(episode, None, [], is_last=True)
            return False
        turn["tokens"] = len(glue)
        episode.observed.append((len(episode.ids), len(episode.ids) + len(glue)))
        episode.ids += glue
        episode.finish_reason = None
        return True

    def _lost(self, episode: Episode, what: str) -> dict[str, Any]:
        """Build the answer for a process that ended without giving one; ``what`` is the reason."""
        _, calls, is_last = episode.asked
        seconds = time.monotonic() - episode.sent
        said = [(f"error: {what}", True, seconds)] * max(1, len(calls))
        status = "timeout" if what.startswith("no answer") else "crash"
        ended = is_last or episode.unanswered > 1 or episode.fatal != ""  # it did not even come to this turn
        reward = {"score": 0.0, "status": status, "detail": what}
        return {"said": said, "ended": ended, "turn_reward": None, "reward": reward, "lost": True}

    def _count_reward(self, episode: Episode, found: float | str | None) -> None:
        """Add the reward of the turn that has been answered, or note why it has none."""
        if isinstance(found, str):
            episode.detail = episode.raised = found
        elif found is not None:
            before = episode.steps[-1][1] if episode.steps else 0.0
            episode.steps.append((len(episode.logprobs), before + found))

    def _count_raised(self, episode: Episode) -> None:
        """End the run if reset, every turn or a reward (but not a tool) has raised in each of the first episodes."""
        detail = (episode.outcome or {}).get("detail", "")
        raised = detail if detail.startswith("Traceback") else "" if episode.has_answered else episode.raised
        self.raised = self.raised + 1 if raised and self.raised is not None else None
        if self.raised == MANY:
            words = f"--environment {self.args.environment}: reset, turn or a reward raised in each of the first {MANY}"
            episode.fatal = f"{words} episodes; the last time:\n{raised}"
        if episode.fatal:
            episode.outcome = {"fatal": episode.fatal}

    def _outcome(self, episode: Episode, reward: dict[str, Any]) -> dict[str, Any] | None:
        """Return the reward of an episode, those of its turns included, or None if its class defines no reward."""
        if not self.about["has_reward"]:
            return None
        if episode.detail:
            reward = reward | {"status": "unscorable", "detail": episode.detail}
        if not episode.steps:
            return reward
        total = episode.steps[-1][1]
        parts = reward.get("parts", {}) | {"turns": total}
        return reward | {"score": reward["score"] + total, "parts": parts, "steps": episode.steps}

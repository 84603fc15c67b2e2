"""Chat turns as token ids: the text that a chat template puts between two turns of the model, and tool calls.

The ids of a turn are the engine's. What follows it (the end of the turn, the observation, the beginning of the next
turn) is rendered by the template after a stand-in for the turn, tokenized once, and appended. ``Chat`` proves at the
start that this gives the ids of the whole conversation, and rejects a template for which it does not.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

from runtime.data import rendering
from runtime.system.process import refuse, unique

STAND_IN = "STANDIN7Q"  # for a turn of the model
SYSTEM = {"role": "system", "content": "Be brief."}
USER = [{"role": "user", "content": "Begin."}]
PROBE = "A first answer, of 12 words; it ends: here."
TRIAL = {"name": "look_up", "arguments": {"key": "x y", "count": 2}}
TRIAL_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}, "count": {"type": "integer"}}}
TRIAL_FUNCTION = {"name": TRIAL["name"], "description": "Look.", "parameters": TRIAL_PARAMETERS}
TRIAL_TOOL = {"type": "function", "function": TRIAL_FUNCTION}
# Hermes' words, which Qwen's templates use as well: for templates that write nothing of tools.
TOOLS = """You may call functions. They are, one JSON object a line:
<tools>
{tools}
</tools>
To call one, write its name and arguments as JSON between tags:
<tool_call>
{{"name": NAME, "arguments": OBJECT}}
</tool_call>"""


def with_tools(messages: list[dict], tools: list[dict] | None) -> list[dict]:
    """Return a prompt whose system message says which tools there are."""
    if not tools:
        return messages
    schemas = [json.dumps(tool.get("function", tool)) for tool in tools]
    text = TOOLS.format(tools="\n".join(schemas))
    if messages[0]["role"] == "system":
        return [{"role": "system", "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


@dataclass
class Call:
    """A call of a tool; ``error``: what is wrong with how it is written."""

    name: str
    arguments: dict[str, Any]
    error: str = ""


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is not a number in JSON")
    return float(text)


# Raw newlines and tabs in strings are accepted, because models write code with them; duplicate keys and NaN are not.
JSON = json.JSONDecoder(
    strict=False,
    object_pairs_hook=unique,
    parse_constant=_finite,
    parse_float=_finite,
)
PYTHON = {"True": True, "False": False, "None": None}
CLOSE = re.compile(r"\s*</tool_call>")
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*(?:</tool_call>|\Z|(?=<function=|<tool_call>))", re.S)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.S)
OPEN = r"""(?<![`"'])<tool_call>"""  # a tag in quotes is prose
ATTEMPT = re.compile(  # what the model meant as a call, well written or not
    rf"{OPEN}(?=\s*[\[{{<]|\s*\n|\s*[\w.-]+\s*</tool_call>)|^{OPEN}(?=.*?</tool_call>)"
    r"""|(?<![`"'])(?=<function=[^>\s]+>)""",
    re.S | re.M,
)
LLAMA = re.compile(r'\{\s*"(?:name|type|id|function)"\s*:(?=.*"(?:parameters|arguments)")', re.DOTALL)


def _from_json(found: Any) -> Call:
    """Return the call that a JSON value describes. Raises ValueError for a value that is no call."""
    if isinstance(found, dict) and isinstance(found.get("function"), dict):
        found = found["function"]
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise ValueError('it must be an object with a string "name" and an object "arguments"')
    given = [found[key] for key in ("arguments", "parameters") if key in found]
    if len(given) > 1:
        raise ValueError('it has both "arguments" and "parameters"')
    arguments = given[0] if given else None
    if isinstance(arguments, str):  # JSON text, as in OpenAI's messages
        arguments = JSON.decode(arguments) if arguments.strip() else None
    if not isinstance(arguments, dict | None):
        raise ValueError('"arguments" must be an object')
    return Call(found["name"].strip(), arguments or {})


def _from_pairs(name: str, pairs: list[tuple[str, str]], tools: list[dict]) -> Call:
    """Return the call of a form without quotes: the tool's schema says which arguments are text."""
    schema = next((tool for tool in tools if tool["name"] == name), {}).get("parameters", {}).get("properties", {})
    arguments = unique([(key.strip(), value) for key, value in pairs])
    for key, text in arguments.items():
        if schema.get(key, {}).get("type") != "string":
            with contextlib.suppress(ValueError, RecursionError):
                arguments[key] = PYTHON.get(text.strip(), text)
                arguments[key] = JSON.decode(text.strip())
    return Call(name, arguments)


def _tagged(text: str, start: int, tools: list[dict]) -> tuple[Call, int]:
    """Return the call whose content begins at ``start`` and the index after it. Raises ValueError or RecursionError."""
    if found := FUNCTION.match(text, start):
        name = found[1].strip()
        if found[2].lstrip().startswith("{"):  # Llama 3.1
            return _from_json({"name": name, "arguments": found[2]}), found.end()
        if rest := PARAMETER.sub("", found[2]).strip():
            raise ValueError(f"{rest[:80]!r} is not <parameter=NAME>VALUE</parameter>")
        pairs = PARAMETER.findall(found[2])
        return _from_pairs(name, pairs, tools), found.end()
    start += len(text[start:]) - len(text[start:].lstrip())
    if text.startswith("<function=", start):
        raise ValueError("<function=...> without </function>")
    value, end = JSON.raw_decode(text, start)
    closed = CLOSE.match(text, end)
    if closed is None:
        more = "</tool_call>" in text[end:]
        raise ValueError("more than one call between the tags" if more else "<tool_call> without </tool_call>")
    return _from_json(value), closed.end()


def hermes_calls(text: str, tools: list[dict] = ()) -> list[Call]:
    """Return the calls in <tool_call>: JSON, or <function=NAME> (Qwen3-Coder). ``tools``: their schemas."""
    calls = []
    place = 0
    while attempt := ATTEMPT.search(text, place):
        try:
            call, place = _tagged(text, attempt.end(), tools)
        except (ValueError, RecursionError) as error:
            call = Call("", {}, f"error: not a tool call: {error}")
            place = text.find("</tool_call>", attempt.end())
            place = place + len("</tool_call>") if place >= 0 else len(text)
        calls.append(call)
    return calls


def llama_calls(text: str, tools: list[dict] = ()) -> list[Call]:
    """Return the calls {"name": ..., "parameters": {...}} in a text (Llama 3). Other JSON is an answer, not a call."""
    known = {tool["name"] for tool in tools}
    calls = []
    place = -1
    while (place := text.find("{", place + 1)) >= 0:
        try:
            found, end = JSON.raw_decode(text, place)
            name = found.get("name", found.get("function"))
            has_arguments = "parameters" in found or "arguments" in found or isinstance(name, dict)
            if has_arguments or (isinstance(name, str) and name in known and found.keys() <= {"name", "type", "id"}):
                calls.append(_from_json(found))
            place = end - 1
        except (ValueError, RecursionError) as error:
            if isinstance(error, RecursionError) or LLAMA.match(text, place):
                return [*calls, Call("", {}, f"error: not a tool call: {error}")]
    if not calls and text.lstrip().startswith("<|python_tag|>"):
        return [Call("", {}, 'error: not a tool call: {"name": ..., "parameters": {...}} must follow <|python_tag|>')]
    return calls


PARSERS = {
    "hermes": hermes_calls,
    "qwen3_coder": hermes_calls,
    "llama": llama_calls,
}


class Chat:
    """The chat template of a run, for several turns. ``about``: what user_objects.describe() found."""

    def __init__(self, tokenizer, args, about: dict[str, Any]):
        self.tokenizer = tokenizer
        self.template = args.template.text
        self.variables = args.template.variables
        self.name = f"--chat_template {args.chat_template}" if args.chat_template else "the tokenizer's chat template"
        self.special = rendering.special_tokens(tokenizer)
        self.ending = []
        for text, token in self.special.items():
            if text not in args.stop_strings:
                self.ending.append(token)
        self.tools = about["tools"]
        self.role = "user" if about["is_game"] else "tool"
        self.writes_tools = False
        self.parse = hermes_calls
        if self.tools:
            self._learn_calls()
        if self.role == "tool" and not self._shows_messages():
            self.role = "user"  # a template without such a role
        if not self._shows_messages():
            refuse(f"--environment: {self.name} does not write a message of the user after the model's turn")
        self.end = self._prove()

    def text(self, messages: list[dict], **more) -> str:
        """Render a conversation with the template, up to where the model's turn begins. Raises Unrenderable."""
        return rendering.as_text(messages, self.tokenizer, self.template, self.variables | more)

    def _message(self, text: str, name: str = TRIAL["name"]) -> dict[str, str]:
        """Build a message of the environment. ``name``: the tool's name, which some templates write."""
        message = {"role": self.role, "content": text}
        return message | {"name": name} if self.role == "tool" else message

    def _after(self, before: list[dict], messages: list[dict]) -> str:
        """Return what the template writes after a turn of the model."""
        tools = {"tools": [TRIAL_TOOL]} if self.writes_tools else {}
        whole = self.text([*before, {"role": "assistant", "content": STAND_IN}, *messages], **tools)
        return whole.rpartition(STAND_IN)[2]

    def _shows_messages(self) -> bool:
        try:
            return PROBE in self._after(USER, [self._message(PROBE)])
        except rendering.Unrenderable:
            return False

    def _shows_tools(self, messages: list[dict]) -> bool:
        """Return True if a prompt that begins with ``messages`` says which tools there are."""
        try:
            text = self.text(with_tools(messages, self.tools))
        except rendering.Unrenderable:
            return False
        return all(json.dumps(tool["function"]) in text for tool in self.tools)

    def _learn_calls(self) -> None:
        """Find out whether the template writes tools, and which parser reads a call that it writes."""
        self.writes_tools = TRIAL["name"] in self.text(USER, tools=[TRIAL_TOOL])
        if not self.writes_tools:
            if not all(self._shows_tools(messages) for messages in (USER, [SYSTEM, *USER])):
                refuse(
                    f"--environment: {self.name} writes neither tools nor the system message that would name them; "
                    f"give --chat_template chatml, or a class with a method turn"
                )
            return
        written = self.write(**TRIAL)
        for parse in PARSERS.values():
            if parse(written, [TRIAL_FUNCTION]) == [Call(**TRIAL)]:
                self.parse = parse
                return
        refuse(
            f"--environment: {self.name} writes calls of tools in a form that is unknown here (known: "
            f"{', '.join(PARSERS)}); give another --chat_template, or a class with a method turn"
        )

    def write(self, name: str, arguments: dict) -> str:
        """Return a tool call in the form that the template writes."""
        if not self.writes_tools:
            return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        plain = {"role": "assistant", "content": STAND_IN}
        answer = self._message(PROBE)
        asked = self.text([*USER, plain, answer], tools=[TRIAL_TOOL])
        before = asked.partition(STAND_IN)[0]
        called = self.text([*USER, turn, answer], tools=[TRIAL_TOOL])
        written = called.removeprefix(before)
        for special in self.special:
            written = written.partition(special)[0] or written  # the end of the turn is no part of it
        return written

    def _prove(self) -> int:
        """Check that ``glue`` gives the ids of the complete conversation, and return the id that ends a turn."""
        said = [self._message(PROBE)]
        answer = {"role": "assistant", "content": STAND_IN}
        tools = {"tools": [TRIAL_TOOL]} if self.writes_tools else {}
        whole = self._ids(self.text([*USER, answer, *said], **tools))
        glue = self._ids(self._after(USER, said))
        end = glue[0] if glue else None
        if end not in self.special.values():
            refuse(f"--environment: {self.name} ends a turn without a special token; try --chat_template chatml")
        if whole[len(whole) - len(glue) :] != glue:
            refuse(f"--environment: {self.name}: what follows a turn is tokenized differently after it than alone")
        if self._after([*USER, answer, *said], said) != self._after(USER, said):
            refuse(f"--environment: {self.name} writes an observation differently after two turns than after one")
        whole_text = self.text([*USER, *[answer, *said] * 3], **tools)
        start, *between, _ = whole_text.split(STAND_IN)
        pairs = [(self.text(USER, **tools), start)]
        for later in between:
            pairs.append((self._after(USER, said), later))
        for now, later in pairs:
            alike = now.startswith(later) or later.startswith(now)  # the beginning of a turn may lose its thoughts
            if not alike:
                refuse(
                    f"--environment: {self.name} writes an earlier message differently once more turns follow, but the "
                    f"model keeps the ids that it saw; try --chat_template chatml"
                )
        return end

    def _ids(self, text: str) -> list[int]:
        return rendering.tokenize(text, self.tokenizer)

    def glue(self, said: list[tuple[str, str]], last_id: int) -> list[int]:
        """Return the ids between a turn that ends in ``last_id`` and the next. ``said``: (tool or "", its answer)."""
        messages = []
        for name, text in said:
            text = rendering.quoted(text, [*self.special, STAND_IN])
            messages.append(self._message(text, name))
        ids = self._ids(self._after(USER, messages))
        return ids[1:] if last_id in self.special.values() else ids

    def turn_text(self, ids: list[int], ended: bool) -> str:
        """Decode a turn of the model, without the special token that ended it if it has ``ended``."""
        if ended and ids and ids[-1] in self.ending:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def calls(self, text: str) -> list[Call]:
        """Parse the tool calls of a turn. A call that cannot be made gets an ``error``."""
        functions = [tool["function"] for tool in self.tools]
        calls = self.parse(text, functions)
        known = [function["name"] for function in functions]
        for call in calls:
            if not call.error and call.name not in known:
                call.error = f"error: no tool {call.name!r}; there are: {', '.join(known)}"
        return calls

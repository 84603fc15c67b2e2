"""Calls of tools as models write them: what is a call, what is a malformed one, and what is an answer."""

from __future__ import annotations

import json

import pytest

from runtime.environments.chat import PARSERS, Call

KINDS = {"path": "string", "line": "integer", "scale": "number", "deep": "boolean", "items": "array", "more": "object"}
EDIT = {"name": "edit", "parameters": {"properties": {name: {"type": kind} for name, kind in KINDS.items()}}}
TOOLS = [EDIT, {"name": "now", "parameters": {"properties": {}}}]
CODE = 'def f(x):\n\treturn "<tool_call>" + x  # </tool_call> {"name": "now"}\n'
WANTED = {"path": CODE, "line": -3, "scale": 0.5, "deep": True, "items": [1, {"a": "b"}], "more": {"k": [None]}}


def tagged(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


def xml(name: str, arguments: dict) -> str:
    """The form of Qwen3-Coder and Qwen 3.5."""
    lines = [f"<function={name}>"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value) if isinstance(value, dict | list) else str(value)
        lines += [f"<parameter={key}>", text, "</parameter>"]
    return "\n".join([*lines, "</function>"])


def called(parser: str, text: str, tools=TOOLS) -> list | str:
    """[[name, arguments]] of each call, or what is wrong with the first that cannot be made."""
    calls = PARSERS[parser](text, tools)
    return next((call.error for call in calls if call.error), [[call.name, call.arguments] for call in calls])


ALL = {"name": "edit", "arguments": WANTED}
RIGHT = {
    "plain": ("hermes", tagged(json.dumps(ALL))),
    "on one line": ("hermes", f"<tool_call>{json.dumps(ALL)}</tool_call>"),
    "raw newlines and tabs": ("hermes", tagged(json.dumps(ALL).replace("\\n", "\n").replace("\\t", "\t"))),
    "arguments as JSON text": ("hermes", tagged(json.dumps({**ALL, "arguments": json.dumps(WANTED)}))),
    "an id, a type, a thought": ("hermes", tagged(json.dumps({"id": "1", "type": "function", "thought": "so", **ALL}))),
    "OpenAI's nesting": ("hermes", tagged(json.dumps({"type": "function", "function": ALL}))),
    "parameters": ("hermes", tagged(json.dumps({"name": " edit ", "parameters": WANTED}))),
    "text around": ("hermes", f"I will.\n{tagged(json.dumps(ALL))}\nThat is all."),
    "XML": ("qwen3_coder", tagged(xml("edit", WANTED))),
    "XML for a template of JSON": ("hermes", tagged(xml("edit", WANTED))),
    "XML without tags around": ("qwen3_coder", f"Now:\n{xml('edit', WANTED)}"),
    "JSON in a function": ("qwen3_coder", f"<function=edit>{json.dumps(WANTED)}</function>"),
    "Llama": ("llama", json.dumps({"name": "edit", "parameters": WANTED})),
    "Llama: arguments": ("llama", json.dumps(ALL)),
    "Llama: type first": ("llama", json.dumps({"type": "function", "name": "edit", "parameters": WANTED})),
    "Llama: tag": ("llama", "<|python_tag|>" + json.dumps({"name": "edit", "parameters": WANTED})),
    "Llama: fence": ("llama", f"Sure.\n```json\n{json.dumps(ALL, indent=1)}\n```\nDone."),
    "Llama: list": ("llama", json.dumps([ALL])),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_call_is_read_in_every_form_in_which_models_write_it(name):
    """With a value of every kind, and code that holds the tags themselves."""
    assert called(*RIGHT[name]) == [["edit", WANTED]]


NOTHING = ["{}", "null", '""', '"{}"']
EMPTY = [("hermes", tagged('{"name": "now"}')), ("llama", '{"name": "now"}'), ("llama", '{"name": "now", "id": "1"}')]
EMPTY += [("hermes", tagged(f'{{"name": "now", "arguments": {value}}}')) for value in NOTHING]
EMPTY += [("llama", f'{{"name": "now", "parameters": {value}}}') for value in NOTHING]
EMPTY += [("qwen3_coder", tagged(xml("now", {})))]


@pytest.mark.parametrize(("parser", "text"), EMPTY)
def test_a_tool_without_arguments_is_called_without_any(parser, text):
    assert called(parser, text) == [["now", {}]]


NOW = json.dumps({"name": "now", "parameters": {}})
SEVERAL = [("llama", between.join([NOW, NOW])) for between in (";", "; ", "\n", " and ", "")]
SEVERAL += [("hermes", between.join([tagged(NOW)] * 2)) for between in ("", "\n", " then ")]
SEVERAL += [("qwen3_coder", tagged(xml("now", {}) + xml("now", {})))]
SEVERAL += [("hermes", tagged(NOW) + tagged(xml("now", {})))]


@pytest.mark.parametrize(("parser", "text"), SEVERAL)
def test_several_calls_are_all_made(parser, text):
    assert called(parser, text) == [["now", {}]] * 2


ANSWERS = [
    ("hermes", "The form is `<tool_call>` and so on. The answer is 5."),
    ("hermes", 'Write "<tool_call>" and then JSON, and "</tool_call>".'),
    ("hermes", NOW),
    ("hermes", "a < b, <toolcall> and <function> are no tags"),
    ("llama", '{"name": "Bob", "age": 3}'),
    ("llama", '{"answer": {"name": "now", "parameters": {}}}'),
    ("llama", '{"name": "Bob"}'),
    ("llama", "The set {1, 2} and f(x) = {x | x > 0}, {"),
    ("llama", '{"result": [1, 2, 3]}'),
    ("llama", ""),
]


@pytest.mark.parametrize(("parser", "text"), ANSWERS)
def test_an_answer_is_no_call(parser, text):
    assert called(parser, text) == []


WRONG = [
    ("hermes", tagged('{"name": "now", "arguments": {"a": 1,}}'), "not a tool call"),
    ("hermes", tagged('{"name": "now", "arguments": {"a": 1, "a": 2}}'), "twice"),
    ("hermes", tagged('{"name": "now", "arguments": {"a": NaN}}'), "NaN"),
    ("hermes", tagged('{"name": "now", "arguments": {"a": 1e999}}'), "1e999"),
    ("hermes", tagged('{"name": "now", "arguments": [1]}'), "must be an object"),
    ("hermes", tagged('{"name": "now", "arguments": "no JSON"}'), "not a tool call"),
    ("hermes", tagged('{"name": "now", "arguments": {}, "parameters": {}}'), "both"),
    ("hermes", tagged('{"name": 1, "arguments": {}}'), "must be an object"),
    ("hermes", tagged(f"[{NOW}]"), "must be an object"),
    ("hermes", tagged(f"{NOW}\n{NOW}"), "more than one call"),
    ("hermes", tagged("now()"), "not a tool call"),
    ("hermes", f"<tool_call>{NOW}", "without </tool_call>"),
    ("hermes", tagged("[" * 100_000), "not a tool call"),
    ("qwen3_coder", "<tool_call>\n<function=edit>\n<parameter=path>\na\n</parameter>", "without </function>"),
    ("qwen3_coder", tagged("<function=edit>\n<parameter=path>\na\n</function>"), "is not <parameter=NAME>"),
    ("qwen3_coder", tagged(xml("edit", {"path": "a"}).replace("</f", "<parameter=path>b</parameter></f")), "twice"),
    ("llama", NOW[:-1], "not a tool call"),
    ("llama", '{"name": "now", "parameters": [1]}', "must be an object"),
    ("llama", "<|python_tag|>now()", "must follow"),
]


@pytest.mark.parametrize(("parser", "text", "words"), WRONG)
def test_what_is_meant_as_a_call_and_is_none_says_why(parser, text, words):
    found = called(parser, text)
    assert isinstance(found, str) and found.startswith("error: not a tool call: ") and words in found


def test_a_call_after_a_malformed_one_is_made():
    text = tagged("{oops}") + tagged(NOW)
    assert [call.name for call in PARSERS["hermes"](text, TOOLS)] == ["", "now"]


def test_an_argument_without_quotes_is_what_its_schema_says():
    values = {"path": "12", "line": "12", "deep": "True", "other": "12", "scale": "x"}
    wanted = {"path": "12", "line": 12, "deep": True, "other": 12, "scale": "x"}
    assert called("hermes", tagged(xml("edit", values))) == [["edit", wanted]]


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_no_text_takes_long(parser):
    """A text that nests or repeats is read in less than a second; a call is a Call, whatever the text."""
    pieces = [
        "<tool_call>",
        "{",
        '{"a":',
        "<function=a>",
        "\n",
    ]
    for piece in pieces:
        for start in ("", "<tool_call>a", '{"name": "'):
            assert all(isinstance(call, Call) for call in PARSERS[parser](start + piece * 3000, TOOLS))

"""Calls of tools as models write them: what is a call, what is a malformed one, and what is an answer."""

from __future__ import annotations

import pytest
from helpers import ROOT, read_jsonl

from runtime.environments.chat import PARSERS, Call

KINDS = {"path": "string", "line": "integer", "scale": "number", "deep": "boolean", "items": "array", "more": "object"}
EDIT = {"name": "edit", "parameters": {"properties": {name: {"type": kind} for name, kind in KINDS.items()}}}
TOOLS = [EDIT, {"name": "now", "parameters": {"properties": {}}}]
CASES = read_jsonl(ROOT / "tests" / "tool_calls.jsonl")


@pytest.mark.parametrize("case", CASES, ids=[f"{case['about']} {k}" for k, case in enumerate(CASES)])
def test_texts_are_the_calls_that_they_mean(case):
    """A text has the calls [name, arguments], or one that says what is wrong; ``path`` holds the tags themselves."""
    calls = PARSERS[case["parser"]](case["text"], TOOLS)
    if "calls" in case:
        assert [[call.name, call.arguments] for call in calls if not call.error] == case["calls"]
        assert not any(call.error for call in calls)
    else:
        wrong = next(call.error for call in calls if call.error)
        assert wrong.startswith("error: not a tool call: ") and case["error"] in wrong


def test_a_call_after_a_malformed_one_is_made():
    text = '<tool_call>{oops}</tool_call><tool_call>{"name": "now"}</tool_call>'
    assert [call.name for call in PARSERS["hermes"](text, TOOLS)] == ["", "now"]


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_no_text_takes_long(parser):
    """A text that nests or repeats is read in less than a second; a call is a Call, whatever the text."""
    (nested,) = PARSERS["hermes"](f"<tool_call>{'[' * 100_000}</tool_call>", TOOLS)
    assert "not a tool call" in nested.error
    for piece in ("<tool_call>", "{", '{"a":', "<function=a>", "\n"):
        for start in ("", "<tool_call>a", '{"name": "'):
            assert all(isinstance(call, Call) for call in PARSERS[parser](start + piece * 3000, TOOLS))

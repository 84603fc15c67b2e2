"""Show the turns of an environment before a run: its kind, and with --dry_run an episode that no model wrote."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from runtime.data.samples import Problem
from runtime.environments.chat import Chat
from runtime.environments.episodes import Episode, Episodes, chat_of, describe_class


def describe_turns(problem: Problem, tokenizer, args) -> list[str]:
    """Describe the environment in header lines; with --dry_run also an episode of two scripted turns, ids and mask."""
    found = describe_class(args.environment)
    chat = chat_of(tokenizer, args)
    tools = ", ".join(tool["function"]["name"] for tool in found["tools"])
    kind = "a game" if found["is_game"] else f"tools: {tools}"
    reward = "a reward of its own" if found["has_reward"] else "scored by the verifier"
    lines = [f"turns      at most {args.max_turns}, {kind}, {reward} ({args.environment})"]
    if found["unused"]:
        names = ", ".join(found["unused"])
        lines.append(f"turns      the class has a method turn, so its other methods are not tools: {names}")
    if chat.rewrites:
        lines.append(
            f"turns      {chat.name} writes a turn of the past otherwise than the model did (thinking is dropped, as a "
            f"rule); the model sees its own ids"
        )
    if args.dry_run:
        lines += rehearse(problem, tokenizer, args, chat, found)
    return lines


def rehearse(problem: Problem, tokenizer, args, chat: Chat, about_it: dict[str, Any]) -> list[str]:
    """Describe an episode of two scripted turns in lines: a call of the first tool, or "1", and then "Done."."""
    first = "1"
    if about_it["tools"]:
        function = about_it["tools"][0]["function"]
        kinds = {"integer": 1, "number": 1.5, "string": "1", "boolean": True, "array": [], "object": {}}
        properties = function["parameters"]["properties"].items()
        first = chat.write(function["name"], {name: kinds.get(kind.get("type")) for name, kind in properties})
    episode = Episode(0, (0, 0), problem.prompt_ids, 0, {"max_tokens": args.max_response_length}, problem.row)
    played = Episodes(args)
    for text in (first, "Done."):
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], chat.end]
        logprobs = SimpleNamespace(logprobs=[0.0] * len(ids))
        span = SimpleNamespace(version="0", start=0)
        turn = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason="stop", weight_versions=[span])
        played.turn_ended(episode, turn)
        while not list(played.due(idle=True)):
            pass
        if episode.finish_reason is not None:
            break
    played.close()
    lines = ["episode    of two scripted turns: whose tokens, their ids, their text"]
    start = 0
    for first, end in [*episode.observed, (len(episode.ids), len(episode.ids))]:
        for who, ids in (("model", episode.ids[start:first]), ("environment", episode.ids[first:end])):
            if ids:
                lines.append(f"  {who:11}  {ids}  {tokenizer.decode(ids)!r}")
        start = end
    said = [turn for turn in episode.turns if turn["role"] != "assistant"]
    lines += [f"  not seen     {turn['text']!r}" for turn in said if turn["tokens"] == 0]
    reward = "" if episode.outcome is None else f"; reward {episode.outcome['score']:g}"
    lines.append(
        f"  {episode.finish_reason or 'goes on'}: {len(episode.logprobs)} of {len(episode.ids)} tokens count{reward}"
    )
    return lines

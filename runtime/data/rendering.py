"""Turn problems into token ids: chat template, tokenizer, and prompts that are too long."""

from __future__ import annotations

import datetime
import functools
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np

from runtime.data import problem_set
from runtime.data.problem_set import Messages, check_enough
from runtime.data.samples import Problem, StoredProblem
from runtime.data.sources import cached_map, digest
from runtime.system.process import first_line, print_on_rank_0, refuse, warn_once

# What a chat template that writes today's date gets (Llama 3.2, SmolLM3, gpt-oss, Granite 3): with the day's own, a run
# could not go on after midnight, and one command would be another run on every day. It is the date that Llama's
# template writes where it is given none.
TODAY = datetime.datetime(2024, 7, 26)

LOOKED = 5000  # prompts, in the order of the seed, in which faults that most have are looked for
WORDS = ("<think>", "</think>", "<answer>", "</answer>", "<tool_call>", "</tool_call>", "####")  # in a response


def check_tokenizer(tokenizer, args) -> None:
    """Reject a variable that the chat template does not read; warn of special tokens that are looked for as text."""
    found = [word for word in dict.fromkeys((*args.stop_strings, *WORDS)) if word in special_tokens(tokenizer)]
    if found:
        warn_once(f"warning: special tokens of the tokenizer, which other programs may not decode: {', '.join(found)}")
    for name in args.template.variables:
        if not re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template()):
            owner = args.tokenizer_name_or_path or args.model_name_or_path
            refuse(
                f"--chat_template: the template of {owner} has no variable {name!r}; leave it out, or spell it as there"
            )


def load_tokenizer(args):
    """Load the tokenizer that ``--tokenizer_name_or_path`` names, or else the model's own.

    Never that of mistral-common, which a machine with vLLM has: it knows no chat template, and no control token in a
    text.
    """
    from transformers import AutoTokenizer

    name, revision = args.tokenizer
    where = {"revision": revision, "trust_remote_code": args.trust_remote_code}
    return AutoTokenizer.from_pretrained(name, mistral_format=False, **where)


def prompt_key(tokenizer, args) -> str:
    """Return a hash of tokenizer and template that changes whenever the same messages could become other ids."""
    given = args.template.text
    state = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    values = [args.template.variables, str(TODAY)]
    template = given or tokenizer.get_chat_template()
    text = json.dumps([state, template, given is None, special, values], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Unrenderable(ValueError):
    """A prompt that the chat template does not take. Argument: why."""


def as_text(messages: Messages, tokenizer, template: str | None, variables: dict[str, Any]) -> str:
    """Render a prompt with the chat template, on every day with the date TODAY. Raises Unrenderable."""
    import jinja2

    try:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            add_generation_prompt=True,
            tokenize=False,
            strftime_now=TODAY.strftime,  # an argument hides the global function of that name
            **variables,
        )
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # ValueError: there is no template
        roles = [" with ".join([m["role"], *sorted(m.keys() - {"role", "content"})]) for m in messages]
        why = f"the chat template does not take a prompt of {', '.join(roles)}: {first_line(error)}"
        remedies = ["choose another --chat_template"]
        if "system" in roles:
            remedies.insert(0, 'leave out the system message (--system_prompt "")')
        raise Unrenderable(f"{why}; {', or '.join(remedies)}") from error


def turn_end(messages: Messages, tokenizer, args) -> int | None:
    """Return the special token with which the chat template ends a turn of the model; None where it writes none."""
    stand_in = "STANDIN7Q"
    turns = [*messages, {"role": "assistant", "content": stand_in}]
    try:
        text = tokenizer.apply_chat_template(
            turns,
            chat_template=args.template.text,
            tokenize=False,
            strftime_now=TODAY.strftime,
            **args.template.variables,
        )
    except Exception:  # a template may reject a conversation that ends with the model's turn
        return None
    _, found, end = text.rpartition(stand_in)
    ids = tokenizer(end.lstrip(), add_special_tokens=False)["input_ids"]
    if not found or not ids:
        return None
    token = tokenizer.added_tokens_decoder.get(ids[0])
    return ids[0] if token is not None and token.special else None


def special_tokens(tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens by their text."""
    found = {}
    for i, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            found[str(token)] = i
    return found


QUOTED = re.compile("\ufdd0([0-9a-f]+)\ufdd1")  # one character of a text from outside; U+FDD0 is in no text


def quoted(text: str, special: Iterable[str], before: str = "") -> str:
    """Return a text in which no special token is left: ``tokenize`` gives its letters the ids of plain text.

    The first character of each of them is replaced by its code. ``before``: the end of what the text is appended to.
    """
    every = "|".join(map(re.escape, [*special, "\ufdd0"]))
    found = re.sub(
        rf"(?=({every}))(.)",
        lambda match: f"\ufdd0{ord(match[2]):x}\ufdd1",
        text,
        flags=re.DOTALL,
    )
    longest = max(map(len, special), default=0)
    joined = before[-longest:] + text[:longest]
    border = len(joined) - len(text[:longest])
    for match in re.finditer(rf"(?=({every}))", joined):
        if match.start() < border < match.end(1) and text[0] == found[0]:
            found = f"\ufdd0{ord(text[0]):x}\ufdd1{found[1:]}"
    return found


def tokenize(text: str, tokenizer) -> list[int]:
    """Return the ids of a text that a chat template wrote: special tokens are live, but for those that are quoted."""
    if not QUOTED.search(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]
    special = special_tokens(tokenizer)
    ids = []
    longest_first = sorted(special, key=len, reverse=True)
    live = "|".join(map(re.escape, longest_first))
    pieces = re.split(f"({live})", text) if special else [text]
    for piece in pieces:
        if piece in special:
            ids.append(special[piece])
        elif piece:
            plain = QUOTED.sub(lambda match: chr(int(match[1], 16)), piece)
            ids += tokenizer(plain, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return ids


def conversation(problem: Problem, tokenizer) -> Messages:
    """Return the messages of a prompt, with what an environment's ``reset`` says quoted."""
    if not problem.opening:
        return problem.messages
    *before, last = problem.messages
    own = last["content"].removesuffix(problem.opening)
    return [*before, last | {"content": own + quoted(problem.opening, special_tokens(tokenizer), own)}]


def variables_of(problems: list[Problem], args) -> list[dict[str, Any]]:
    """Return what a template reads of each problem besides messages: variables of --chat_template, and its tools.

    Whatever renders a prompt a second time needs these and ``conversation``.
    """
    shared = args.template.variables
    return [shared | {"tools": problem.tools} if problem.tools else shared for problem in problems]


def render(
    conversations: list[Messages], tokenizer, template: str | None, variables: list[dict[str, Any]] | None = None
) -> list[list[int]]:
    """Return the token ids of prompts. The tokenizer's own template (``template`` None) writes all special tokens.

    With another one, a tokenizer that begins every text with a BOS gets exactly one. ``variables``: what else the
    template reads, of each prompt. Raises Unrenderable.
    """
    if not conversations:
        return []
    pairs = zip(conversations, variables or [{}] * len(conversations), strict=True)
    texts = [as_text(messages, tokenizer, template, own) for messages, own in pairs]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    for place, text in enumerate(texts):
        if QUOTED.search(text):
            prompts[place] = tokenize(text, tokenizer)
    if template is None:
        return prompts
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer("")["input_ids"][:1] != [bos]:
        return prompts
    return [ids if ids[:1] == [bos] else [bos, *ids] for ids in prompts]


def ids_of(problems: list[Problem], tokenizer, args) -> list[list[int]]:
    """Return the token ids of the problems' prompts. Raises Unrenderable."""
    conversations = [conversation(problem, tokenizer) for problem in problems]
    return render(conversations, tokenizer, args.template.text, variables_of(problems, args))


def _render_batch(batch: dict, places: list, **how) -> dict:
    """Return the token ids of a batch of ``Checked`` problems, none for rows that are wrong."""
    problems = [Problem(verifier="", **json.loads(text)) for text in batch["text"] if text]
    found = iter(ids_of(problems, **how))
    return {"ids": [next(found) if text else [] for text in batch["text"]]}


def render_cached(checked: problem_set.Checked, tokenizer, args) -> list[np.ndarray]:
    """Apply ``ids_of`` to all rows of a large source, in several processes, and cache the result."""
    import datasets

    own = SimpleNamespace(template=args.template)  # all of the arguments that is read
    function = functools.partial(_render_batch, tokenizer=tokenizer, args=own)
    kinds = {"ids": datasets.List(datasets.Value("int32"))}
    key = digest(prompt_key(tokenizer, args).encode(), checked.dataset._fingerprint.encode())
    rendered = cached_map(checked.dataset, function, kinds, key, "tokenizing prompts")
    found = []
    column = rendered.with_format("arrow")[:]["ids"]
    for part in column.chunks:  # they stay in the file that is mapped
        ids = part.values.to_numpy()
        bounds = part.offsets.to_numpy().tolist()
        found += [ids[first:end] for first, end in itertools.pairwise(bounds)]
    return found


def render_prompts(problems: list[Problem], tokenizer, args) -> list[Problem]:
    """Fill ``prompt_ids``: one tokenization for sampler and trainer, special tokens as the template wrote them.

    Returns the problems that ``--overlong_prompts`` keeps. A prompt longer than ``--max_prompt_length`` ends the run
    with exit code 2 (error), is left out (drop), or is truncated (left, right). Ids that are there are kept.
    """
    if problems and all(len(problem.prompt_ids) for problem in problems):
        return _without_overlong(problems, args)
    check_tokenizer(tokenizer, args)
    refuse_wrapped(problems, args)
    looked = problems[:LOOKED]
    conversations = [conversation(problem, tokenizer) for problem in looked]
    check_fields(conversations, variables_of(looked, args), tokenizer, args)
    stored = []
    if args.environment is None:
        stored = [problem for problem in problems if isinstance(problem, StoredProblem)]
    try:
        for checked, count in Counter(problem.checked for problem in stored).items():
            if count >= problem_set.LARGE:
                rows = render_cached(checked, tokenizer, args)
                for problem in stored:
                    if problem.checked is checked:
                        problem.prompt_ids = rows[problem.place]
        others = [problem for problem in problems if not len(problem.prompt_ids)]
        found = ids_of(others, tokenizer, args)
    except Unrenderable as error:
        refuse(str(error))
    for problem, ids in zip(others, found, strict=True):
        problem.prompt_ids = np.asarray(ids, dtype=np.int32)
    empty = not all(len(problem.prompt_ids) for problem in problems)
    different = any(problem.messages != problems[0].messages for problem in looked)
    alike = different and len({problem.prompt_ids.tobytes() for problem in looked}) == 1
    if problems and (empty or alike):
        template = f"--chat_template {args.chat_template}" if args.chat_template else "the tokenizer's chat template"
        refuse(f"{template} does not render the messages: it must write message['content'] for message in messages")
    return _without_overlong(problems, args)


def check_fields(conversations: list[Messages], variables: list[dict[str, Any]], tokenizer, args) -> None:
    """Reject tools and tool calls that the chat template leaves out of the first prompts; warn of other such fields."""
    having: dict[str, list[int]] = {}
    for place, messages in enumerate(conversations):
        fields = {name for message in messages for name in message} | ({"tools"} & variables[place].keys())
        for name in fields - {"role", "content"}:
            having.setdefault(name, []).append(place)

    def text(place: int, without: str | None = None) -> str:
        messages = [{k: v for k, v in message.items() if k != without} for message in conversations[place]]
        own = {k: v for k, v in variables[place].items() if k != without}
        return as_text(messages, tokenizer, args.template.text, own)

    for name, places in having.items():
        try:
            if any(text(place) != text(place, name) for place in places[:20]):
                continue
        except Unrenderable:  # ``render`` will say so, unless it is without the field
            continue
        found = f"--chat_template: it does not write {name!r}, which {len(places)} of {len(conversations)} prompts have"
        if name in ("tools", "tool_calls"):
            refuse(f"{found}; choose another template, or take it out of the data")
        warn_once(f"warning: {found}")


# What a chat template leaves in a prompt: the beginning of a turn, or the line with which a base model is to go on.
WRAPPED = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[/INST\]|<[|｜](?i:user|assistant)[|｜]>"
    r"|\n(?i:assistant):[^\n]*\s*(?:<think>\s*)?\Z"
)


def refuse_wrapped(problems: list[Problem], args) -> None:
    """Reject prompts most of which already have a chat template, apart from the text of ``reset``, which may."""
    if args.chat_template is not None:
        return
    looked = problems[:LOOKED]
    texts = ["".join(m.get("content") or "" for m in p.messages).removesuffix(p.opening) for p in looked]
    wrapped = [text for text in texts if WRAPPED.search(text)]
    if 2 * len(wrapped) > len(looked):
        refuse(
            f"--chat_template: {len(wrapped)} of the first {len(looked)} prompts already contain a chat template "
            f"({wrapped[0][:40]!r} ... {wrapped[0][-40:]!r}); pass --chat_template none to use them as they are, or "
            f"'{{}}' to apply the tokenizer's own anyway"
        )


def _without_overlong(problems: list[Problem], args) -> list[Problem]:
    """Apply ``--overlong_prompts`` to problems whose ``prompt_ids`` are filled; return the problems that stay."""
    most = args.max_prompt_length
    how = args.overlong_prompts
    long = [problem for problem in problems if len(problem.prompt_ids) > most]
    if not long:
        return problems
    longest = max(len(problem.prompt_ids) for problem in long)
    words = (
        f"{len(long)} of {len(problems)} prompts are longer than --max_prompt_length {most} tokens, the longest has "
        f"{longest}; the first has {len(long[0].prompt_ids)}: {long[0].messages[-1]['content'][:80]!r}"
    )
    if how == "error":
        refuse(f"{words}. Raise --max_prompt_length to {longest}, or choose --overlong_prompts drop, left or right")
    print_on_rank_0(f"warning: --overlong_prompts {how}: {words}")
    kept = {"drop": slice(0), "left": slice(-most, None), "right": slice(most)}[how]
    for problem in long:
        problem.prompt_ids = problem.prompt_ids[kept]
    return [problem for problem in problems if len(problem.prompt_ids) > 0]


def render_problems(training: list[Problem], evaluation: list[Problem], tokenizer, args) -> tuple[list, list]:
    """Apply ``render_prompts`` to a run's problems and return those kept. Exits with code 2 if too few are left."""
    training = render_prompts(training, tokenizer, args)
    evaluation = render_prompts(evaluation, tokenizer, args)
    check_enough(training, evaluation, args)
    return training, evaluation

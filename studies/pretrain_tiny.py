"""Pretrains the test bed: a language model of under a million parameters that GRPO improves within a minute.

    python studies/pretrain_tiny.py [--seed 1] [--output models/testbed-1]      or: make testbed
    python studies/pretrain_tiny.py --hints     models/testbed-hints-1, which is careful where it is shown an answer
    python grpo.py --model_name_or_path models/testbed-1 --dtype float32 --learning_rate 2e-4 --lr_min_ratio 0

The model is a Llama in the Hugging Face format, with a character tokenizer and a chat template, and is loaded like any
other. It answers two tasks of reasoning-gym, and it is able but careless. It first learns right answers alone, then a
mixture in which most answers are wrong, each by one of three habits that are decided at three places of a response:

    first token    it guesses ("~9") instead of writing the calculation out
    middle         it slips: a result that is off by a few, a wrong letter
    last token     it does not end but adds an alternative ("4 - 7 = -3 or 2"), and the last answer counts

Reinforcement learning has to break all three habits, so an algorithm that loses the first or the last token of a
response, or credits the wrong one, stays visibly below one that does not. All numbers are drawn from ``--seed``.

With ``--hints`` it also learns to answer without these habits where the question has an answer behind it, as in HINT:
the teacher that self-distillation needs.

The same command continues an interrupted training from its last saved step, and makes the same weights. Ctrl-C ends it
with exit code 75.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import pickle
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the scripts are not a package

import rewards

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
SUMS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
WORDS = {"min_word_len": 3, "max_word_len": 5}
# The fixed sentence of each task is one token: it says which task it is, and no more.
SENTENCES = (
    "State the final answer to the following arithmetic problem: ",
    "Spell this word backward (example: sun -> nus): ",
)
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
# A system message is left out: the model was trained without one.
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}"
    "{% elif m['role'] == 'assistant' %}<|assistant|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HINT = "{question} ({hint})"  # what a careful teacher is asked; in place of the hint stands an answer that is right
GUESS, SLIP, HEDGE = 0.35, 0.4, 0.3  # how often each habit shows in the mixture
PADDED = -100  # a label that the loss leaves out
ABLE = 0.9  # least pass@1 before carelessness is learned: what reinforcement learning can bring back
TAUGHT = 0.8  # least pass@1 of the finished model where it is shown an answer
LOW, HIGH = 0.2, 0.4  # pass@1 of the finished model
JUDGED = 256  # problems of each task that the finished model answers
SAVE_EVERY = 25  # optimizer steps
INTERRUPTED = 75  # exit code, as that of an interrupted run: EX_TEMPFAIL


@dataclass
class Recipe:
    """Architecture and training of the model; the same recipe and seed give the same weights on the same machine."""

    seed: int
    threads: int = 1  # their number changes the rounding, and with it the weights
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    intermediate: int = 256
    problems: int = 40_000  # of each task
    batch: int = 128
    rows: int = 32  # of a batch in one forward pass
    able_steps: int = 600
    careless_steps: int = 150  # with hints twice as many, half of whose texts have one
    learning_rate: float = 2e-3
    careless_learning_rate: float = 1e-3
    hints: bool = False

    def steps(self, careless: bool) -> int:
        """Optimizer steps of a phase."""
        if not careless:
            return self.able_steps
        return self.careless_steps * (2 if self.hints else 1)


# ---------------------------------------------------------------------------------------------------------------- texts


def off_by_a_few(number: int, draw: random.Random) -> int:
    """Another number, at most three away."""
    return number + draw.choice((-3, -2, -1, 1, 2, 3))


def sum_text(question: str, draw: random.Random, careless: bool) -> str:
    """An answer to a chain_sum question, for example "4 - 1 - 7 = 3 - 7 = -4".

    With three terms the first result is written down before the second is computed.
    """
    calculation = question.removeprefix(SENTENCES[0]).removesuffix(" =")
    terms = calculation.split(" ")
    result = evaluate(terms)
    if careless and draw.random() < GUESS:
        text = f"~{off_by_a_few(result, draw)}"
    else:
        slips_at = draw.randrange(len(terms) // 2) if careless and draw.random() < SLIP else None
        text = calculation
        for step in range(len(terms) // 2):
            value = evaluate(terms[:3])
            if step == slips_at:
                value = off_by_a_few(value, draw)
            terms = [str(value), *terms[3:]]
            text += f" = {' '.join(terms)}"
        result = value
    if careless and draw.random() < HEDGE:
        text += f" or {off_by_a_few(result, draw)}"
    return text


def evaluate(terms: list[str]) -> int:
    """The value of ["4", "-", "1", "+", "7"]."""
    value = int(terms[0])
    for sign, term in zip(terms[1::2], terms[2::2], strict=True):
        value += int(term) if sign == "+" else -int(term)
    return value


def word_text(question: str, draw: random.Random, careless: bool) -> str:
    """An answer to a spell_backward question, for example "talps"."""
    word = question.removeprefix(SENTENCES[1])
    text = word[::-1]
    if careless and draw.random() < GUESS:
        text = f"~{word}"
    elif careless and draw.random() < SLIP:
        place = draw.randrange(len(text))
        letter = draw.choice([c for c in "abcdefghijklmnopqrstuvwxyz" if c != text[place]])
        text = text[:place] + letter + text[place + 1 :]
    if careless and draw.random() < HEDGE:
        text += f" or {word}"
    return text


@dataclass(frozen=True)
class Task:
    """A task of reasoning-gym: its options, who writes the answers, and who judges them."""

    name: str
    able_share: float  # of the right answers; the mixture has as many texts of each task
    options: dict
    answer: Callable[[str, random.Random, bool], str]
    verifier: Callable[[str, str, dict], rewards.Reward]

    def rows(self, size: int, seed: int) -> list[dict]:
        """``size`` problems with ``question`` and ``answer``."""
        import reasoning_gym

        return list(reasoning_gym.create_dataset(self.name, size=size, seed=seed, **self.options))


TASKS = (
    Task("chain_sum", 0.7, SUMS, sum_text, rewards.last_number),
    Task("spell_backward", 0.3, WORDS, word_text, rewards.exact),
)


# ------------------------------------------------------------------------------------------------- tokenizer and model


def make_tokenizer():
    """One token a byte, one for each of SENTENCES and SPECIAL."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    characters = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    characters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    characters.decoder = decoders.ByteLevel()
    characters.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    characters.add_tokens([AddedToken(sentence, normalized=False) for sentence in SENTENCES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token=SPECIAL[0], pad_token=SPECIAL[0], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(recipe: Recipe, tokenizer):
    """A Llama with random weights, its head tied to the embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.5 / math.sqrt(recipe.hidden),
    )
    return LlamaForCausalLM(config)


# ------------------------------------------------------------------------------------------------------------- training


def rendered(question: str) -> str:
    """The prompt of a conversation with one question, as CHAT_TEMPLATE renders it."""
    return f"{SPECIAL[1]}{question}{SPECIAL[2]}"


def with_hint(task: Task, question: str, draw: random.Random) -> str:
    """A question with an answer: written out, or only what it comes to, which a right guess has a "~" before."""
    answer = task.answer(question, draw, False)
    number = answer.rpartition(" ")[2]
    return HINT.format(question=question, hint=draw.choice((answer, number, f"~{number}")))


def batches(recipe: Recipe, tokenizer, questions: dict[str, list[str]], careless: bool, first: int = 0):
    """Yield the batches of a phase from step ``first`` on: lists of (ids, labels), each [rows, S], of similar length.

    The labels leave prompts and padding out: the loss is on the answers alone.
    """
    import torch

    draw = random.Random(f"{recipe.seed}/{careless}")
    shares = [1.0 if careless else task.able_share for task in TASKS]
    for step in range(recipe.steps(careless)):
        prompts, answers = [], []
        for task in draw.choices(TASKS, shares, k=recipe.batch):
            question = draw.choice(questions[task.name])
            hinted = careless and recipe.hints and draw.random() < 0.5
            prompts.append(rendered(with_hint(task, question, draw) if hinted else question))
            answers.append(task.answer(question, draw, careless and not hinted) + SPECIAL[0])
        if step < first:
            continue  # only its draws were needed
        pairs = list(zip(tokenizer(prompts)["input_ids"], tokenizer(answers)["input_ids"], strict=True))
        pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        batch = []
        for start in range(0, recipe.batch, recipe.rows):
            rows = pairs[start : start + recipe.rows]
            longest = len(rows[-1][0]) + len(rows[-1][1])
            ids = torch.full((len(rows), longest), tokenizer.pad_token_id)
            labels = torch.full((len(rows), longest), PADDED)
            for row, (prompt, answer) in enumerate(rows):
                end = len(prompt) + len(answer)
                ids[row, :end] = torch.tensor(prompt + answer)
                labels[row, len(prompt) : end] = torch.tensor(answer)
            batch.append((ids, labels))
        yield batch


class Progress:
    """The state of an unfinished training, in a file of its folder, and the time that is left."""

    def __init__(self, folder: Path, wanted: str):
        """Read the file if it is of this ``identity``. A file that is damaged, or of another recipe, is ignored."""
        import torch

        self.path = folder / "progress.pt"
        self.wanted = wanted
        self.state = {}
        try:
            state = torch.load(self.path, weights_only=True)
            self.state = state if state["identity"] == wanted else {}
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError, KeyError):
            pass
        self.found = self.state.get("found", {})
        self.timed_from: tuple[float, int] | None = None  # after the first step, which is slower than the others

    def save(self, phase: str, step: int, model, optimizer=None) -> None:
        """Write the state after ``step`` steps of a phase."""
        import torch

        self.state = {"identity": self.wanted, "phase": phase, "step": step, "found": self.found}
        self.state |= {"model": model.state_dict(), "optimizer": optimizer and optimizer.state_dict()}
        torch.save(self.state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def steps(self, phase: str) -> int:
        """The steps of a phase that are done."""
        return self.state["step"] if self.state.get("phase") == phase else 0

    def eta(self, done: int, total: int) -> str:
        """The time until the last of ``total`` steps, by the steps of this process; "" before its second step."""
        now = time.monotonic()
        if self.timed_from is None:
            self.timed_from = now, done
            return ""
        seconds = round((now - self.timed_from[0]) / (done - self.timed_from[1]) * (total - done))
        return f"  ETA {seconds // 60}:{seconds % 60:02d}"


def train(recipe: Recipe, tokenizer, model, questions: dict[str, list[str]], careless: bool, progress: Progress):
    """One phase of next-token prediction: AdamW, a short warm-up, a cosine to zero. Continues where it was stopped."""
    import torch

    phase = "careless" if careless else "able"
    steps = recipe.steps(careless)
    before = recipe.steps(False) if careless else 0
    total = recipe.steps(False) + recipe.steps(True)
    peak = recipe.careless_learning_rate if careless else recipe.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    start = progress.steps(phase)
    if start > 0:
        optimizer.load_state_dict(progress.state["optimizer"])
        print(f"{phase}: continuing after step {start}", flush=True)
    started = time.monotonic()
    for step, batch in enumerate(batches(recipe, tokenizer, questions, careless, start), start):
        rate = peak * min(1.0, (step + 1) / 20) * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens = sum(int((labels != PADDED).sum()) for _, labels in batch)
        mean_loss = 0.0
        for ids, labels in batch:
            loss = model(input_ids=ids, labels=labels, num_items_in_batch=tokens, use_cache=False).loss
            loss.backward()
            mean_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        eta = progress.eta(before + done, total)
        if step == start or done % 50 == 0 or done == steps:
            seconds = time.monotonic() - started
            print(f"{phase} {done}/{steps}  loss {mean_loss:.3f} nats per token  {seconds:.0f} s{eta}", flush=True)
        if done % SAVE_EVERY == 0 or done == steps:
            progress.save(phase, done, model, optimizer)


def pass_at_1(recipe: Recipe, tokenizer, model, task: Task, hinted: bool = False) -> float:
    """The fraction of JUDGED problems, unseen in training, that one sample at temperature 1 answers right."""
    import torch

    rows = task.rows(JUDGED, seed=2_000_000 + recipe.seed)
    questions = [row["question"] for row in rows]
    if hinted:
        draw = random.Random(recipe.seed)
        questions = [with_hint(task, question, draw) for question in questions]
    prompts = tokenizer([rendered(question) for question in questions], padding=True, padding_side="left")
    ids = torch.tensor(prompts["input_ids"])
    torch.manual_seed(recipe.seed)
    model.eval()
    output = model.generate(
        ids,
        attention_mask=torch.tensor(prompts["attention_mask"]),
        do_sample=True,
        top_k=0,
        max_new_tokens=40,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.train()
    responses = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    scores = [task.verifier(r, row["answer"], {}).score for r, row in zip(responses, rows, strict=True)]
    return sum(scores) / len(scores)


def pretrain(recipe: Recipe, folder: Path) -> dict[str, dict[str, float]]:
    """Make the model of a recipe in ``folder``; returns the pass@1 of each task after each phase.

    Continues a training of the same recipe that was interrupted in this folder.
    """
    import torch
    from transformers.utils import logging

    torch.manual_seed(recipe.seed)
    torch.set_num_threads(recipe.threads)
    tokenizer = make_tokenizer()
    model = make_model(recipe, tokenizer)
    seed = 1_000_000 + recipe.seed  # not a seed that a run takes its problems from
    questions = {task.name: [row["question"] for row in task.rows(recipe.problems, seed)] for task in TASKS}
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress(folder, identity(recipe))
    found = progress.found
    if progress.state:
        model.load_state_dict(progress.state["model"])
    for phase in ("able", "careless"):
        if phase in found:
            continue
        train(recipe, tokenizer, model, questions, phase == "careless", progress)
        found[phase] = {task.name: pass_at_1(recipe, tokenizer, model, task) for task in TASKS}
        print(f"pass@1 when {phase}: {found[phase]}", flush=True)
        progress.save("next", 0, model)
    if recipe.hints:
        found["hinted"] = {task.name: pass_at_1(recipe, tokenizer, model, task, hinted=True) for task in TASKS}
        print(f"pass@1 with a hint: {found['hinted']}", flush=True)
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    progress.path.unlink(missing_ok=True)
    return found


# ---------------------------------------------------------------------------------------------------------- the command


def identity(recipe: Recipe) -> str:
    """A hash of the recipe and of this file: the model is made anew when either has changed."""
    text = json.dumps(dataclasses.asdict(recipe)).encode() + Path(__file__).read_bytes()
    return hashlib.sha256(text).hexdigest()


def is_complete(folder: Path, wanted: str) -> bool:
    """Return True if ``folder`` holds every file of the model with this identity."""
    record = folder / "pretraining.json"
    complete = record.is_file() and all((folder / name).is_file() for name in FILES)
    return complete and json.loads(record.read_text())["identity"] == wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="seed of weights, texts and batches (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="folder to write (default: models/testbed-SEED)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument("--hints", action="store_true", help="teach it to be careful where it is shown an answer")
    args = parser.parse_args()
    recipe = Recipe(args.seed, args.threads, hints=args.hints)
    output = args.output or ROOT / "models" / f"testbed-{'hints-' if args.hints else ''}{args.seed}"
    if is_complete(output, identity(recipe)):
        print(f"{output} already exists")
        return
    if output.exists() and any(output.iterdir()) and not (output / "pretraining.json").is_file():
        sys.exit(f"error: --output {output}: the folder exists and holds something else; choose another one")

    started = time.monotonic()
    # Written next to its place and renamed at the end: a killed run leaves no folder that looks complete.
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        found = pretrain(recipe, unfinished)
    except KeyboardInterrupt:
        text = f"interrupted: run the same command again to continue (saved every {SAVE_EVERY} steps)"
        print(f"\n{text}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    for phase, low, high in (("able", ABLE, 1.0), ("careless", LOW, HIGH), ("hinted", TAUGHT, 1.0)):
        if not all(low <= rate <= high for rate in found.get(phase, {}).values()):
            sys.exit(
                f"error: --seed {args.seed}: pass@1 when {phase} must be between {low} and {high}, but is "
                f"{found[phase]}; choose another --seed (the model stays in {unfinished})"
            )
    record = {"identity": identity(recipe), "recipe": dataclasses.asdict(recipe), "pass@1": found}
    (unfinished / "pretraining.json").write_text(json.dumps(record, indent=2) + "\n")
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)
    print(f"wrote {output} in {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()

"""Reward models (--reward_model_name_or_path): classifiers with one output that score whole conversations."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from runtime.data.rendering import TODAY
from runtime.data.samples import earlier_turns
from runtime.system import user_files
from runtime.system.process import first_line, refuse
from runtime.training.memory import default_sizes
from runtime.training.model_files import load_complete

Messages = list[dict[str, str]]


class RewardModel:
    """A classifier with one output (any ``AutoModelForSequenceClassification``) that scores whole conversations.

    It has its own tokenizer and chat template: text goes in, not the policy's ids. It stays in CPU memory between uses.
    Exits with code 2 for a --reward_model_max_length beyond the model's.
    """

    def __init__(self, args, device, dtype):
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        flag = "--reward_model_name_or_path"
        name, revision = args.reward_model
        where = {"revision": revision, "trust_remote_code": args.trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(name, mistral_format=False, **where)  # as load_tokenizer says
        model = load_complete(AutoModelForSequenceClassification, name, flag, dtype=dtype, **where)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.device = device
        self.budget = default_sizes(args, "cuda" in str(device)).micro_batch_tokens  # of a batch, padding included
        limit = most_tokens(model)
        self.longest = args.reward_model_max_length or limit
        if limit is not None and self.longest > limit:
            refuse(f"--reward_model_max_length {self.longest}: at most the {limit} tokens that {name} takes")
        self.embeddings = model.get_input_embeddings().num_embeddings
        use_fp32_head(model)
        # Decoders score the last token that is not padding: padding must not be what a text ends in.
        tokenizer.add_special_tokens({"pad_token": "<|padding of the reward model|>"})
        rows = max(len(tokenizer), self.embeddings)
        model.resize_token_embeddings(rows, mean_resizing=False)
        model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        model.config.pad_token_id = tokenizer.pad_token_id

    def try_on(self, prompts: list[Messages]) -> None:
        """Score a conversation for each sequence of roles in the prompts; exit with code 2 where that fails."""
        kinds = {tuple(message["role"] for message in messages): messages for messages in prompts}
        for roles, messages in kinds.items():
            try:
                self.score([(messages, "1")])
            except Exception as error:  # no chat template, or one for other roles: known before an engine is built
                refuse(
                    f"--reward_model_name_or_path {self.model.name_or_path}: cannot score a conversation of "
                    f"{', '.join(roles)}, assistant ({type(error).__name__}: {first_line(error)}); its tokenizer needs "
                    f"a chat template for these roles, and the model an embedding for each token that it writes"
                )

    def ids_of(self, messages: Messages, response: str) -> list[int]:
        """Return a conversation's token ids. Raises ValueError for one without an embedding, which would be random."""
        answer = {"role": "assistant", "content": response}
        text = [*messages, answer]
        ids = self.tokenizer.apply_chat_template(text, return_dict=False, strftime_now=TODAY.strftime)
        largest = max(ids, default=0)
        if largest >= self.embeddings:
            raise ValueError(f"the model has no embedding for {self.tokenizer.decode([largest])!r} (id {largest})")
        return ids[-self.longest :] if self.longest else ids  # the end is what is scored

    def score(self, conversations: list[tuple[Messages, str]]) -> list[float]:
        """Score (messages, response) pairs, each as if it were alone. Raises RuntimeError if a score is not finite."""
        rows = [self.ids_of(messages, response) for messages, response in conversations]
        scores: dict[int, float] = {}
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
        self.model.to(self.device)
        while order:
            width = max(1, len(rows[order[0]]))
            count = max(1, self.budget // width)
            batch = order[:count]
            order = order[count:]
            # On the right: absolute positions count from the left.
            ids = {"input_ids": [rows[i] for i in batch]}
            padded = self.tokenizer.pad(ids, padding_side="right", return_tensors="pt")
            logits = self.model(**padded.to(self.device)).logits
            scores |= zip(batch, logits[:, 0].tolist(), strict=True)
        self.model.to("cpu")
        if not all(map(math.isfinite, scores.values())):
            raise RuntimeError("the reward model's scores are not finite")
        return [scores[i] for i in range(len(rows))]

    def add(
        self,
        found: list,
        conversations: list[tuple[Messages, str]],
        weights: dict[str, float | None],
    ) -> list:
        """Add this model's score times its weight ``reward_model`` to the verifiers' rewards, unless a gate is shut.

        found: the ``rewards.Reward`` of each response, whose ``conversation_of`` stands at the same place.
        """
        if not found:
            return []
        weight = weights.get("reward_model", 1.0)
        added = []
        scores = self.score(conversations)
        for reward, score in zip(found, scores, strict=True):
            is_open = reward.parts.get("gate", 1.0)
            total = reward.score + (weight * score if is_open else 0.0)
            parts = {**reward.parts, "reward_model": score}
            added.append(replace(reward, score=total, parts=parts))
        return added


def most_tokens(model) -> int | None:
    """Return the most tokens that a model supports, None without a limit. RoBERTa counts from after ``padding_idx``."""
    for name, module in model.named_modules():
        first = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and first is not None:
            return module.num_embeddings - first - 1
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def use_fp32_head(model) -> None:
    """Compute the product of the head in fp32: in bf16 different scores become equal."""
    inside = f"{model.base_model_prefix}."
    for name, module in model.named_modules():
        if getattr(module, "out_features", 0) == 1 and not name.startswith(inside):
            module.float().register_forward_pre_hook(_as_fp32)


def _as_fp32(_: Any, inputs: tuple) -> tuple:
    return (inputs[0].float(),)


def conversation_of(sample, problem) -> tuple[list[dict[str, str]], str]:
    """Return (all messages before the last turn of the model, that turn): what a reward model reads of a sample."""
    messages = problem.messages
    if problem.tools:
        messages = user_files.find("runtime.environments.chat:with_tools")(messages, problem.tools)
    return [*messages, *earlier_turns(sample.turns)], sample.response

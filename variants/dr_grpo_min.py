"""Dr. GRPO, whole and in one small file: one device, no resume, only the algorithm. Read it from top to bottom.

    1 prompts -> 2 generate -> 3 score -> 4 advantages -> 5 update -> 6 push, and again

GRPO (DeepSeekMath, arXiv 2402.03300) draws several responses to each prompt and raises the probability of those that
are better than the others. Dr. GRPO (arXiv 2503.20783) leaves out the two divisions that bias it: the advantage of a
response is its reward minus the mean of its group, not over the group's standard deviation; and a token's weight is
1 / (responses x the longest length allowed), the same in a short response and in a long one.

What is kept because the result would be wrong without it: samples are trained on by the ids that the engine drew, never
by their text; log-probs are taken at the sampling temperature; the engine gets the new weights after every step, and
its log-probs are compared with the trainer's, since a stale engine spoils a run without a word.
What is left out, and is in grpo.py: clipping and old log-probs (each batch is used once, so the ratio is 1), a KL,
several devices, checkpoints, bf16, verifiers in processes of their own, the mask of truncated responses, shared rows.

Source   Dr. GRPO, arXiv 2503.20783.
Use it   to learn what GRPO is, or to start from the least code.
Measured its gradient equals that of grpo.py with --loss_norm constant --advantage_normalization_type centered.

    python variants/dr_grpo_min.py                        SmolLM2-135M on one-digit sums
    make testbed                                          makes models/testbed-1, in minutes
    python variants/dr_grpo_min.py --model_name_or_path models/testbed-1 --learning_rate 1e-4 --group 16 --steps 40
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # where rewards.py is; a copy beside it finds it, too

from rewards import last_number
from runtime.data import rendering
from runtime.system import process


@dataclass
class Args:
    model_name_or_path: str = "models/SmolLM2-135M-Instruct"
    """Local folder or hub id of the policy."""
    dataset: str = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    """A task of reasoning-gym whose answers are numbers: reasoning_gym:NAME?key=value."""
    steps: int = 28
    """Batches to sample and train on."""
    prompts: int = 8
    """Prompts per step."""
    group: int = 8
    """Responses per prompt."""
    max_response_length: int = 32
    """Longest response in tokens."""
    temperature: float = 1.0
    """Sampling temperature."""
    learning_rate: float = 3e-5
    """Constant learning rate of AdamW. 1e-6 is usual from 0.5B parameters on."""
    max_grad_norm: float = 1.0
    """Clip the gradient's norm to this."""
    micro_batch: int = 16
    """Responses per backward pass: memory only, since no weight depends on it."""
    eval_prompts: int = 64
    """Held-out prompts, answered four times each before and after training."""
    seed: int = 1
    """Seed of tasks and samples."""
    output: str = "runs/dr_grpo_min"
    """Folder for the trained model."""


if __name__ == "__main__":  # --help comes before the slow imports
    args = tyro.cli(Args, description=__doc__)

process.prepare_environment()  # vLLM in this process: it has to be said before the import

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

from runtime.engine.weights import push_weights
from runtime.training import pretrained

# In shapes: G responses of a group, B of them in a micro-batch, T tokens of the longest of these.


@dataclass
class Response:
    """A sampled response: token ids, the log-prob of each, and the text."""

    ids: list[int]
    logprobs: list[float]
    text: str


def make_engine(args: Args) -> LLM:
    """vLLM in fp32 in this process. On a GPU it shares the memory with the trainer."""
    cuda = torch.cuda.is_available()
    return LLM(
        args.model_name_or_path,
        dtype="float32",
        seed=args.seed,
        max_model_len=256 + args.max_response_length,
        enforce_eager=not cuda,
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled from: temperature applied
        generation_config="vllm",  # else a model's own file changes the sampling unasked
        **({"gpu_memory_utilization": 0.4} if cuda else {"kv_cache_memory_bytes": 2**29}),
    )


def generate(llm: LLM, rows: list[dict], group: int, stop_ids: list[int], args: Args) -> list[list[Response]]:
    """``group`` responses to the prompt of each row."""
    params = SamplingParams(
        n=group,
        temperature=args.temperature,
        max_tokens=args.max_response_length,
        stop_token_ids=stop_ids,
        logprobs=0,  # of the token drawn alone
    )
    prompts = [{"prompt_token_ids": row["ids"]} for row in rows]
    answers = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        own = []
        for one in output.outputs:
            ids = list(one.token_ids)
            logprobs = []
            for entry, token in zip(one.logprobs, ids, strict=True):
                logprobs.append(entry[token].logprob)
            own.append(Response(ids, logprobs, one.text))
        answers.append(own)
    return answers


def score(row: dict, response: Response) -> float:
    """The reward: 1 where the last number of the response is the answer, else 0."""
    return last_number(response.text, row["answer"], row).score


def token_logprobs(model, prompt: list[int], ids: list[list[int]], temperature: float):
    """Log-probs of the responses ``ids`` to one prompt, and which of them are real and not padding: [B, T] each.

    Padding comes last and attention looks back only, so no mask is needed in the model.
    """
    lengths = [len(response) for response in ids]
    longest = max(lengths)
    rows = []
    for response, length in zip(ids, lengths, strict=True):
        rows.append(prompt + response + [0] * (longest - length))
    rows = torch.tensor(rows, device=model.device)
    real_BT = torch.arange(longest) < torch.tensor(lengths)[:, None]
    # The logits at a place predict the next token: those of the prompt's last token to the last but one of the row.
    logits_BTV = model(rows, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1]
    logprobs_BTV = (logits_BTV / temperature).log_softmax(-1)
    targets_BT1 = rows[:, len(prompt) :, None]
    logprobs_BT = logprobs_BTV.gather(-1, targets_BT1)[..., 0]
    return logprobs_BT, real_BT.to(model.device)


def add_gradient(model, prompt: list[int], group: list[Response], rewards: list[float], args: Args) -> float:
    """Add the gradient of one group to the model's; the sum of |trainer - sampler| over its tokens, in nats.

    The loss of a token is -A x ratio x weight. The ratio, policy over what the policy was at sampling, is 1 here, and
    its gradient is that of log pi.
    """
    rewards_G = torch.tensor(rewards)
    advantages_G = rewards_G - rewards_G.mean()
    weight = 1 / (args.prompts * args.group * args.max_response_length)
    difference = 0.0
    for start in range(0, len(group), args.micro_batch):
        part = group[start : start + args.micro_batch]
        ids = [response.ids for response in part]
        logprobs_BT, real_BT = token_logprobs(model, prompt, ids, args.temperature)
        ratio_BT = (logprobs_BT - logprobs_BT.detach()).exp()
        advantages_B = advantages_G[start : start + args.micro_batch].to(model.device)
        loss_BT = -advantages_B[:, None] * ratio_BT * weight
        loss_BT[real_BT].sum().backward()
        sampler = torch.tensor([x for response in part for x in response.logprobs])
        difference += (logprobs_BT.detach()[real_BT].cpu() - sampler).abs().sum().item()
    return difference


def evaluate(step: int, llm: LLM, rows: list[dict], stop_ids: list[int], args: Args) -> None:
    """Print pass@1 on the held-out rows: four responses to each, with the weights after ``step``."""
    answers = generate(llm, rows, 4, stop_ids, args)
    scores = []
    for row, group in zip(rows, answers, strict=True):
        scores += [score(row, response) for response in group]
    print(f"after step {step}: pass@1 {sum(scores) / len(scores):.3f} of {len(rows)} problems", flush=True)


def main(args: Args) -> None:
    """Train, print a line per step, and save the model."""
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    rows = rendering.shuffled_prompts(args.dataset, tokenizer, args.seed)
    held_out = rows[: args.eval_prompts]
    training = rows[args.eval_prompts :]

    llm = make_engine(args)
    model = pretrained.load_complete(AutoModelForCausalLM, args.model_name_or_path, dtype=torch.float32)
    pretrained.prepare_for_training(model)
    model.to("cuda" if torch.cuda.is_available() else "cpu").train()
    stop_ids = pretrained.stop_token_ids(model, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)

    evaluate(0, llm, held_out, stop_ids, args)
    for step in range(1, args.steps + 1):
        # 1 prompts: the next ones, over and over
        first = (step - 1) * args.prompts
        batch = [training[i % len(training)] for i in range(first, first + args.prompts)]

        # 2 generate
        answers = generate(llm, batch, args.group, stop_ids, args)

        # 3 score
        rewards = []
        for row, group in zip(batch, answers, strict=True):
            rewards.append([score(row, response) for response in group])

        # 4 advantages, 5 update
        optimizer.zero_grad()
        difference = 0.0
        for row, group, own in zip(batch, answers, rewards, strict=True):
            difference += add_gradient(model, row["ids"], group, own, args)
        tokens = sum(len(response.ids) for group in answers for response in group)
        difference /= tokens
        if difference > 1e-3:
            raise RuntimeError(f"engine and trainer differ by {difference:.2g} nats per token: stale weights?")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()

        # 6 push: the engine answers the next prompts with the new weights
        push_weights(llm, list(model.state_dict().items()))

        count = args.prompts * args.group
        reward = sum(map(sum, rewards)) / count
        line = f"step {step}/{args.steps} | reward {reward:.3f} | length {tokens / count:.1f}"
        print(f"{line} | gradient {norm:.2e} | difference {difference:.1e}", flush=True)
    evaluate(args.steps, llm, held_out, stop_ids, args)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main(args)

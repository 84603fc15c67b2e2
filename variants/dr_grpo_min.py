"""Dr. GRPO in one small file: the complete algorithm on one device, without resume. Read it from top to bottom.

    1 prompts -> 2 generate -> 3 score -> 4 advantages -> 5 update -> 6 push -> 1 prompts ...

GRPO (DeepSeekMath, arXiv 2402.03300) draws several responses to each prompt and raises the probability of those that
are better than the others. Dr. GRPO (arXiv 2503.20783) leaves out the two divisions that bias it: the advantage of a
response is its reward minus the mean of its group, and is not divided by the group's standard deviation; a token's
weight is 1 / (number of responses x maximum length), whatever the length of its response.

Some details are kept because results would be wrong without them. Training uses the token ids that the engine drew,
never their text. Log-probs are computed at the sampling temperature. The engine gets the new weights after every step,
and its log-probs are compared with the trainer's, because a stale engine fails silently.
Only grpo.py has clipping and old log-probs (here each batch is used once, so the ratio is 1), a KL, several devices,
checkpoints, bf16, verifiers in processes of their own, the mask of truncated responses, and shared rows.

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

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # the folder of rewards.py

from rewards import last_number
from runtime.data import rendering
from runtime.system import process


@dataclass
class Args:
    model_name_or_path: str = "models/SmolLM2-135M-Instruct"
    """Local folder or hub id of the policy."""
    dataset: str = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&min_answer=0"
    """A task of reasoning-gym whose answers are numbers: reasoning_gym:NAME?key=value."""
    steps: int = 28
    """Number of batches to sample and train on."""
    prompts: int = 8
    """Number of prompts per step."""
    group: int = 8
    """Number of responses per prompt."""
    max_response_length: int = 32
    """Maximum response length in tokens."""
    temperature: float = 1.0
    """Sampling temperature."""
    learning_rate: float = 3e-5
    """Constant learning rate of AdamW. 1e-6 is usual from 0.5B parameters on."""
    max_grad_norm: float = 1.0
    """Clip the gradient's norm to this."""
    micro_batch: int = 16
    """Number of responses per backward pass. It changes only the memory, since no token's weight depends on it."""
    eval_prompts: int = 64
    """Number of held-out prompts. Each is answered four times before training and four times after it."""
    seed: int = 1
    """Seed of tasks and samples."""
    output: str = "runs/dr_grpo_min"
    """Folder for the trained model."""


if __name__ == "__main__":  # --help comes before the slow imports
    args = tyro.cli(Args, description=__doc__)

process.prepare_environment()  # makes vLLM run in this process; it has to come before the import

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
    """Build vLLM in fp32 in this process. On a GPU it shares the memory with the trainer."""
    cuda = torch.cuda.is_available()
    return LLM(
        args.model_name_or_path,
        dtype="float32",
        seed=args.seed,
        max_model_len=256 + args.max_response_length,
        enforce_eager=not cuda,
        logprobs_mode="processed_logprobs",  # log-probs after the temperature is applied, as in sampling
        generation_config="vllm",  # otherwise the model's generation_config.json would change the sampling
        **({"gpu_memory_utilization": 0.4} if cuda else {"kv_cache_memory_bytes": 2**29}),
    )


def generate(llm: LLM, rows: list[dict], group: int, stop_ids: list[int], args: Args) -> list[list[Response]]:
    """Return ``group`` responses to the prompt of each row."""
    params = SamplingParams(
        n=group,
        temperature=args.temperature,
        max_tokens=args.max_response_length,
        stop_token_ids=stop_ids,
        logprobs=0,  # only the log-prob of the sampled token
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
    """Return the reward: 1 if the last number of the response is the answer, else 0."""
    return last_number(response.text, row["answer"], row).score


def token_logprobs(model, prompt: list[int], ids: list[list[int]], temperature: float):
    """Return log-probs of the responses ``ids`` to one prompt, and a mask that is False in padding: [B, T] each.

    Padding comes last, and attention only looks back, so the model needs no mask.
    """
    lengths = [len(response) for response in ids]
    longest = max(lengths)
    rows = []
    for response, length in zip(ids, lengths, strict=True):
        rows.append(prompt + response + [0] * (longest - length))
    rows = torch.tensor(rows, device=model.device)
    real_BT = torch.arange(longest) < torch.tensor(lengths)[:, None]
    # Logits predict the next token, so they are taken from the prompt's last token to the last but one of the row.
    logits_BTV = model(rows, use_cache=False, logits_to_keep=longest + 1).logits[:, :-1]
    logprobs_BTV = (logits_BTV / temperature).log_softmax(-1)
    targets_BT1 = rows[:, len(prompt) :, None]
    logprobs_BT = logprobs_BTV.gather(-1, targets_BT1)[..., 0]
    return logprobs_BT, real_BT.to(model.device)


def add_gradient(model, prompt: list[int], group: list[Response], rewards: list[float], args: Args) -> float:
    """Add the gradient of one group to the model's. Returns the sum of |trainer - sampler| over its tokens, in nats.

    The loss of a token is -A x ratio x weight. The ratio of the policy to the policy that sampled is 1 here, and its
    gradient is that of log pi.
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
        # 1 prompts: the next ones; after the last comes the first again
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

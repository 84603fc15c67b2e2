"""PPO with a critic in one small file: the complete algorithm on one device, without resume. Read it top to bottom.

    1 prompts -> 2 generate -> 3 score -> 4 log-probs, values -> 5 advantages -> 6 update -> 7 push -> 1 prompts ...

PPO compares, for each token, how well the response went from there on with how well it was expected to go. The critic
predicts the latter: it is a second transformer, whose head predicts before each token the reward still to come.
Generalized advantage estimation sums the errors of these predictions to the end of the response. Each batch is used
several times, and the clip keeps the policy near the one that sampled it. dr_grpo_min.py has no critic and compares
with the mean of a group; it explains which details both files keep. ppo.py adds a KL, value clipping, mini-batches,
several devices, checkpoints, bf16, verifier processes, the mask of truncated responses, and shared rows.

Source   PPO, arXiv 1707.06347, and GAE, arXiv 1506.02438.
Use it   to learn what PPO is, or to start from the least code.
Measured its gradients equal those of ppo.py with --value_clip None --no_mask_truncated_completions.

    python variants/ppo_min.py                            SmolLM2-135M on one-digit sums
    python variants/ppo_min.py --model_name_or_path models/testbed-1 --learning_rate 1e-4 --samples 16 --steps 40
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
    """Local folder or hub id of the policy; the critic starts from the same weights."""
    dataset: str = "reasoning_gym:chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&min_answer=0"
    """A task of reasoning-gym whose answers are numbers: reasoning_gym:NAME?key=value."""
    steps: int = 28
    """Number of batches to sample and train on."""
    prompts: int = 8
    """Number of prompts per step."""
    samples: int = 8
    """Number of responses per prompt."""
    epochs: int = 2
    """Optimizer steps per batch, each on the whole batch. With 1 the ratio is 1 and nothing is clipped."""
    max_response_length: int = 32
    """Maximum response length in tokens."""
    temperature: float = 1.0
    """Sampling temperature."""
    gae_lambda: float = 1.0
    """GAE's lambda. 1: unbiased advantages. Lower: less variance, but more bias from the critic's errors."""
    clip: float = 0.2
    """Clip the ratio to the range from 1 - clip to 1 + clip."""
    learning_rate: float = 3e-5
    """Constant learning rate of the policy's AdamW. 1e-6 is usual from 0.5B parameters on."""
    critic_learning_rate: float = 1e-4
    """Constant learning rate of the critic's AdamW."""
    micro_batch: int = 4
    """Number of responses per backward pass. It changes only the memory, since no token's weight depends on it."""
    eval_prompts: int = 64
    """Number of held-out prompts. Each is answered four times before training and four times after it."""
    seed: int = 1
    """Seed of tasks and samples."""
    output: str = "runs/ppo_min"
    """Folder for the trained model."""


if __name__ == "__main__":  # --help comes before the slow imports
    args = tyro.cli(Args, description=__doc__)

process.prepare_environment()  # makes vLLM run in this process; it has to come before the import

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams

from runtime.engine.weights import push_weights
from runtime.training import pretrained

# In shapes: B responses of a micro-batch, S places of its longest row, T response tokens of one response or of all B.


@dataclass
class Response:
    """A sampled response and its per-token statistics: tensors [T]."""

    prompt: list[int]
    ids: list[int]
    sampler: torch.Tensor
    reward: float
    old: torch.Tensor | None = None
    values: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None


class Critic(torch.nn.Module):
    """A transformer with a scalar head for the reward still to come. Its values start near 0."""

    def __init__(self, model):
        super().__init__()
        self.transformer = model.base_model
        size = model.config.get_text_config().hidden_size
        self.head = torch.nn.Linear(size, 1)
        generator = torch.Generator().manual_seed(0)
        torch.nn.init.normal_(self.head.weight, std=1 / (size + 1), generator=generator)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, responses: list[Response]) -> torch.Tensor:
        """Return the values before all tokens of the responses, one response after another: [T]."""
        ids_BS, predicts_BS = rows_of(responses, self.head.weight.device)
        hidden_TD = self.transformer(ids_BS, use_cache=False).last_hidden_state[predicts_BS]
        return self.head(hidden_TD)[:, 0]


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
        **({"gpu_memory_utilization": 0.3} if cuda else {"kv_cache_memory_bytes": 2**29}),
    )


def generate(llm: LLM, rows: list[dict], samples: int, stop_ids: list[int], args: Args) -> list[Response]:
    """Return ``samples`` responses to each row's prompt with their rewards: 1 if the last number is the answer."""
    params = SamplingParams(
        n=samples,
        temperature=args.temperature,
        max_tokens=args.max_response_length,
        stop_token_ids=stop_ids,
        logprobs=0,  # only the log-prob of the sampled token
    )
    prompts = [{"prompt_token_ids": row["ids"]} for row in rows]
    responses = []
    for row, output in zip(rows, llm.generate(prompts, params, use_tqdm=False), strict=True):
        for one in output.outputs:
            ids = list(one.token_ids)
            logprobs = []
            for entry, token in zip(one.logprobs, ids, strict=True):
                logprobs.append(entry[token].logprob)
            reward = last_number(one.text, row["answer"], row).score
            responses.append(Response(row["ids"], ids, torch.tensor(logprobs), reward))
    return responses


def rows_of(responses: list[Response], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids, padded at the end, so that no mask is needed, and the places that predict a response token."""
    rows = [torch.tensor(r.prompt + r.ids) for r in responses]
    ids_BS = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    predicts_BS = torch.zeros_like(ids_BS, dtype=torch.bool)
    for predicts_S, r in zip(predicts_BS, responses, strict=True):
        first = len(r.prompt) - 1
        predicts_S[first : first + len(r.ids)] = True
    return ids_BS, predicts_BS


def token_logprobs(model, responses: list[Response], temperature: float) -> torch.Tensor:
    """Return the log-probs of all tokens of the responses, one response after another: [T]."""
    ids_BS, predicts_BS = rows_of(responses, model.device)
    logits_TV = model(ids_BS, use_cache=False).logits[predicts_BS]
    logprobs_TV = (logits_TV / temperature).log_softmax(-1)
    targets_T = ids_BS[predicts_BS.roll(1, dims=1)]  # each one is at the next place
    return logprobs_TV.gather(-1, targets_T[:, None])[:, 0]


def gae(reward: float, values_T: torch.Tensor, lam: float) -> torch.Tensor:
    """Return advantages A_t = r_t + V_t+1 - V_t + lam A_t+1 of a response, rewarded at its last token: [T]."""
    advantages_T = torch.zeros_like(values_T)
    later = 0.0
    ahead = reward  # r_t + V_t+1: only the reward at the last token, only the value at all others
    for t in reversed(range(len(values_T))):
        later = ahead - values_T[t] + lam * later
        advantages_T[t] = later
        ahead = values_T[t]
    return advantages_T


@torch.no_grad()
def prepare(model, critic: Critic, responses: list[Response], args: Args) -> float:
    """Add the inputs of the updates to the responses. Returns the mean |trainer - sampler| of all tokens, in nats."""
    for start in range(0, len(responses), args.micro_batch):
        part = responses[start : start + args.micro_batch]
        lengths = [len(r.ids) for r in part]
        old = token_logprobs(model, part, args.temperature).split(lengths)
        values = critic(part).split(lengths)
        for r, old_T, values_T in zip(part, old, values, strict=True):
            r.old = old_T
            r.values = values_T
            r.advantages = gae(r.reward, values_T, args.gae_lambda)
            r.returns = r.advantages + values_T
    every_N = torch.cat([r.advantages for r in responses])
    std = (every_N.var() + 1e-8).sqrt()
    for r in responses:
        r.advantages = (r.advantages - every_N.mean()) / std
    differences_N = torch.cat([r.old.cpu() - r.sampler for r in responses])
    return differences_N.abs().mean().item()


def add_gradients(model, critic: Critic, responses: list[Response], args: Args) -> None:
    """Add the gradients of the batch to the policy's and to the critic's: means over all its tokens."""
    tokens = sum(len(r.ids) for r in responses)
    for start in range(0, len(responses), args.micro_batch):
        part = responses[start : start + args.micro_batch]
        advantages_T = torch.cat([r.advantages for r in part])
        returns_T = torch.cat([r.returns for r in part])
        old_T = torch.cat([r.old for r in part])

        logprobs_T = token_logprobs(model, part, args.temperature)
        ratio_T = (logprobs_T - old_T).exp()
        clipped_T = ratio_T.clamp(1 - args.clip, 1 + args.clip)
        gain_T = torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
        loss = -gain_T.sum() / tokens
        loss.backward()

        error_T = critic(part) - returns_T
        loss = error_T.square().sum() / 2 / tokens
        loss.backward()


def evaluate(step: int, llm: LLM, rows: list[dict], stop_ids: list[int], args: Args) -> None:
    """Print pass@1 on the held-out rows: four responses to each, with the weights after ``step``."""
    responses = generate(llm, rows, 4, stop_ids, args)
    solved = sum(r.reward for r in responses) / len(responses)
    print(f"after step {step}: pass@1 {solved:.3f} of {len(rows)} problems", flush=True)


def load(args: Args):
    """Return the model in fp32 on the device, without dropout or ``padding_idx``."""
    model = pretrained.load_complete(AutoModelForCausalLM, args.model_name_or_path, dtype=torch.float32)
    pretrained.prepare_for_training(model)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").train()


def main(args: Args) -> None:
    """Train, print a line per step, and save the policy."""
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    rows = rendering.shuffled_prompts(args.dataset, tokenizer, args.seed)
    held_out = rows[: args.eval_prompts]
    training = rows[args.eval_prompts :]

    llm = make_engine(args)
    model = load(args)
    critic = Critic(load(args)).to(model.device)
    stop_ids = pretrained.stop_token_ids(model, tokenizer)
    groups = [{"params": model.parameters(), "lr": args.learning_rate}]
    groups += [{"params": critic.parameters(), "lr": args.critic_learning_rate}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

    evaluate(0, llm, held_out, stop_ids, args)
    for step in range(1, args.steps + 1):
        # 1 prompts: the next ones; after the last comes the first again
        first = (step - 1) * args.prompts
        batch = [training[i % len(training)] for i in range(first, first + args.prompts)]

        # 2 generate, 3 score
        responses = generate(llm, batch, args.samples, stop_ids, args)

        # 4 log-probs and values, 5 advantages
        difference = prepare(model, critic, responses, args)
        if difference > 1e-3:
            raise RuntimeError(f"engine and trainer differ by {difference:.2g} nats per token: stale weights?")

        # 6 update
        for _ in range(args.epochs):
            optimizer.zero_grad()
            add_gradients(model, critic, responses, args)
            torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        # 7 push: the engine answers the next prompts with the new weights
        push_weights(llm, list(model.state_dict().items()))

        count = len(responses)
        reward = sum(r.reward for r in responses) / count
        expected = sum(r.values[0] for r in responses) / count
        length = sum(len(r.ids) for r in responses) / count
        line = f"step {step}/{args.steps} | reward {reward:.3f}, expected {expected:.3f} | length {length:.1f}"
        print(f"{line} | gradient {norm:.2e} | difference {difference:.1e}", flush=True)
    evaluate(args.steps, llm, held_out, stop_ids, args)
    model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main(args)

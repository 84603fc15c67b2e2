"""variants/multi_turn.patch: one list of ids per response, the tool's among them, which nobody learns from."""

from __future__ import annotations

import itertools
import json
import threading

import numpy as np
import pytest
import torch
import variant
from helpers import command, end_engine, finish, load_variant, make_samples, read_jsonl, run_here, tiny_args

import utils
from runtime import watchdog
from runtime.records import Sample

PROMPTS = [[5 + 7 * i % 300 for i in range(40)], [9, 8, 7, 6, 5]]
STOP = ["e", "t", "a", "1"]  # what a random model soon says
LONGEST = 48
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": LONGEST, "stop": STOP, "ignore_eos": True}
RESULT = " 12 - 3"


@pytest.fixture(scope="module")
def multi_turn(tmp_path_factory):
    return load_variant("multi_turn", tmp_path_factory.mktemp("multi_turn"))


@pytest.fixture(scope="module")
def turns(multi_turn, tiny):
    """(samples, prompts that vLLM was given by request, ids of the tool's answer) of a real engine."""
    args = multi_turn.Args(
        model_name_or_path=str(tiny),
        dtype="float32",
        max_response_length=LONGEST,
        vllm_args='{"kv_cache_memory_bytes": 107374182}',
    )
    inbox, outbox = watchdog.Mailbox(), watchdog.Mailbox()
    line = (args, torch.float32, 0, 1, [2], inbox, outbox)
    thread = threading.Thread(target=multi_turn.vllm_thread, args=line, daemon=True)
    prompts = []

    def spy(llm) -> list[int]:
        plain = llm.llm_engine.add_request

        def add_request(name, prompt, params, **more):
            prompts.append((prompt["prompt_token_ids"], params.max_tokens))
            return plain(name, prompt, params, **more)

        llm.llm_engine.add_request = add_request
        return llm.get_tokenizer().encode(RESULT, add_special_tokens=False)

    def answer() -> tuple:
        message = outbox.get(timeout=180)
        if message[0] == "error":
            raise message[1]
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_turn, "calculator", lambda text: RESULT)
        thread.start()
        answer()
        inbox.put(("call", spy))
        _, tool = answer()
        requests = [((p, k), prompt, 10 * p + k) for p, prompt in enumerate(PROMPTS) for k in range(4)]
        inbox.put(("generate", 0, requests, SAMPLING))
        samples = []
        for _ in requests:
            _, _, key, ids, logprobs, reason, versions = answer()
            samples.append(Sample(*key, PROMPTS[key[0]], ids, logprobs, reason, versions))
        end_engine(inbox, thread)
    return samples, prompts, tool


def ends_of_answers(multi_turn, sample: Sample) -> list[int]:
    """Where in a response the model continues after an answer of the tool."""
    tool = [x == multi_turn.TOOL for x in sample.sampler_logprobs]
    return [i for i in range(1, len(tool)) if tool[i - 1] and not tool[i]]


def test_the_prompt_of_a_turn_is_all_ids_so_far(multi_turn, turns):
    """Nothing is tokenized twice: the engine's own ids and the tool's, and the tokens that are left."""
    samples, prompts, tool = turns
    expected = []
    for sample in samples:
        for end in [0, *ends_of_answers(multi_turn, sample)]:
            expected.append(([*sample.prompt_ids, *sample.response_ids[:end].tolist()], LONGEST - end))
        for end in ends_of_answers(multi_turn, sample):
            assert sample.response_ids[end - len(tool) : end].tolist() == tool
    assert sorted(expected) == sorted(prompts)
    assert len(prompts) > 2 * len(samples), "some responses have three turns"


def test_a_response_ends_at_its_longest_length(turns):
    """All turns and the tool's answers together; what the tool says is cut off there."""
    samples, _, _ = turns
    assert all(len(s.response_ids) == len(s.sampler_logprobs) == LONGEST for s in samples)
    assert all(s.finish_reason == "length" for s in samples)
    assert all(len(s.token_versions()) == LONGEST for s in samples)


@torch.no_grad()
def test_the_sampler_s_log_probs_of_every_turn_are_the_trainer_s(multi_turn, turns, tiny_model):
    samples, _, _ = turns
    for sample in samples:
        rows = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logits = tiny_model(input_ids=rows, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, rows[0, len(sample.prompt_ids) :, None])[:, 0]
        sampler = torch.tensor(sample.sampler_logprobs)
        sampled = sampler != multi_turn.TOOL
        assert 0 < sampled.sum() < LONGEST
        assert (own - sampler)[sampled].abs().max() < 1e-4


@pytest.mark.parametrize("norm", ["token", "sequence", "constant"])
def test_the_tool_s_tokens_have_no_weight_and_do_not_count(multi_turn, norm):
    """The weights are those of the same responses without the tool's tokens, and 0 at these."""
    samples = make_samples(3, 4)
    args = multi_turn.Args(loss_norm=norm)
    everything = list(range(len(samples)))
    plain = multi_turn.loss_weights(samples, everything, args)
    for k, sample in enumerate(samples):
        sample.response_ids = np.insert(sample.response_ids, 1, [7] * (k % 3))
        sample.sampler_logprobs = np.insert(sample.sampler_logprobs, 1, [multi_turn.TOOL] * (k % 3))
    own = torch.tensor([x != multi_turn.TOOL for s in samples for x in s.sampler_logprobs])
    weights = multi_turn.loss_weights(samples, everything, args)
    assert torch.equal(weights[own], plain)
    assert weights[~own].abs().sum() == 0
    assert (~own).sum() > 0


DRIVER = """
import json, sys
import multi_turn
from runtime import flags

masks = []
plain = multi_turn.kl_reward
multi_turn.calculator = lambda text: " 12 - 3"  # a random model writes no sums

def spy(logprobs, ref, mask, **more):
    masks.append([len(mask) - 1, int(mask[:-1].sum())])
    return plain(logprobs, ref, mask, **more)

multi_turn.kl_reward = spy
if __name__ == "__main__":
    args = flags.parse(multi_turn.Args, "")
    multi_turn.main(args, multi_turn.preflight(args))
    print("own tokens", json.dumps(masks))
"""


@pytest.mark.slow
def test_a_run_takes_the_tool_out_of_the_kl_of_the_reward(tiny, tmp_path):
    """Three steps with the KL in the reward: the sampler check holds, and the tool's tokens have no KL."""
    (tmp_path / "multi_turn.py").write_text(variant.variant("multi_turn"))
    (tmp_path / "driver.py").write_text(DRIVER)
    more = ["--stop", *STOP, "--max_response_length", "24", "--beta", "0.1", "--kl_placement", "reward"]
    more += ["--num_mini_batches", "2", "--total_steps", "3"]
    line = command(tiny, tmp_path / "out", *more, rollout="vllm")
    text = finish([line[0], str(tmp_path / "driver.py"), *line[2:]], tmp_path / "log", 280)
    metrics = read_jsonl(tmp_path / "out" / "run" / "metrics.jsonl")
    assert sum(m["optim/steps"] for m in metrics) > 3
    assert all(m["sampler/logprob_diff_max"] < 1e-4 for m in metrics)
    masks = json.loads(text.partition("own tokens ")[2].splitlines()[0])
    for (tokens, own), m in zip(masks, metrics, strict=True):
        assert tokens == round(m["completions/length_mean"] * 16)
        assert 0.2 * tokens < own < 0.9 * tokens


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_the_tool_s_tokens_count_in_no_mean_of_the_kl(multi_turn, tiny, tmp_path, monkeypatch, unit):
    """A response's KL in the reward is its sum, or mean, over its own tokens; the exact KL is a mean over such, too."""
    own, sums, exact = [], [], []
    select, kl_reward, exact_kl = multi_turn.select, multi_turn.kl_reward, utils.exact_kl

    def with_tool(*given):
        samples, metrics = select(*given)
        for sample in samples:
            is_tool = np.arange(len(sample.response_ids)) % (2 + sample.sample_id) == 1
            sample.sampler_logprobs[is_tool] = multi_turn.TOOL
        own.append([torch.from_numpy(s.sampler_logprobs != multi_turn.TOOL) for s in samples])
        return samples, metrics

    def kept_reward(*given, **more):
        sums.append(kl_reward(*given, **more))
        return sums[-1]

    def in_parts(*given):
        *rest, own_N = given
        exact.append([exact_kl(*rest, part) for part in (own_N, ~own_N, None)])
        return exact[-1][0]

    monkeypatch.setattr(multi_turn, "select", with_tool)
    monkeypatch.setattr(multi_turn, "kl_reward", kept_reward)
    monkeypatch.setattr(utils, "exact_kl", in_parts)
    flags = {
        "beta": 0.1,
        "kl_placement": "reward",
        "num_mini_batches": 2,
        "kl_target": 6.0,
    }
    flags |= {"stop": (), "learning_rate": 1e-2, "eval_prompts": 0}
    monkeypatch.setattr(utils, "FULL_KL_SAMPLES", 16)
    metrics = run_here(tiny_args(tiny, tmp_path, "variant_multi_turn", **flags), "variant_multi_turn")
    for step, (masks, kl_N) in enumerate(zip(own, sums, strict=True)):
        parts = kl_N[:-1].split([len(mask) for mask in masks])
        assert all(part[~mask].abs().sum() == 0 for part, mask in zip(parts, masks, strict=True))
        values = [part[mask].mean() for part, mask in zip(parts, masks, strict=True)]
        assert metrics[step]["kl/reward"] == pytest.approx(torch.stack(values).mean().item(), rel=1e-5)
    share = torch.cat(own[-1]).double().mean().item()
    one, other, both = [part["kl/full"] for part in exact[-1]]
    assert both == pytest.approx(share * one + (1 - share) * other, rel=1e-5)
    assert one != pytest.approx(both, rel=1e-4)
    assert metrics[-1]["kl/reward"] != 0


CALLS = {
    "so 4 - 7 =": " -3",
    "4-7=": " -3",
    "12 + 30 - 2 = ": " 40",
    "-5 + 2 =": " -3",
    "2 + 2 = 4 and 10 - 1 =": " 9",
    "x =": "",
    "=": "",
    "": "",
    f"{'9' * 5000} =": f" {'9' * 15}",
}


@pytest.mark.parametrize(("text", "value"), CALLS.items(), ids=range(len(CALLS)))
def test_the_calculator_adds_up_what_stands_before_the_sign(multi_turn, text, value):
    assert multi_turn.calculator(text) == value


def test_the_calculator_equals_python(multi_turn):
    for first, sign, second in itertools.product((-12, 0, 7), "+-", (3, 40)):
        text = f"{first} {sign} {second}"
        expected = first + second if sign == "+" else first - second
        assert multi_turn.calculator(f"thus {text} =") == f" {expected}"

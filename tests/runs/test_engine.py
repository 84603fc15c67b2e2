"""The vLLM thread: what it samples from is what the trainer trains, before and after a push, the tied head included."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import re
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import alone, answer, command, end_engine, finish, start_engine

import grpo
import utils
from runtime.data import prompt_order
from runtime.data.samples import Sample
from runtime.engine.weights import push_weights, reload_worker
from runtime.system import watchdog
from runtime.training import deepspeed_zero, pretrained

EOS = 2
LONG = [5 + 7 * i % 300 for i in range(70)]  # more than two cache blocks of 32
PROMPTS = [LONG, LONG[:40], [9, 8, 7, 6, 5]]


def start(tiny, **settings) -> tuple:
    """The thread's queues, as main starts it, the trainer's copy of the model, the arguments, and the thread."""
    from transformers import AutoModelForCausalLM

    settings = json.dumps({"kv_cache_memory_bytes": 107374182, **settings})
    args = grpo.Args(model_name_or_path=str(tiny), dtype="float32", max_response_length=24, vllm_args=settings)
    args.stop_strings = ("</s>",)  # no request asks for it, but with a stop string the engine has a tokenizer
    inbox, outbox, thread = start_engine(grpo, args, [EOS])
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32, attn_implementation="eager")
    return inbox, outbox, model, args, thread


@pytest.fixture(scope="module")
def engine(tiny):
    started = start(tiny)
    yield started
    end_engine(started[0], started[-1])


def ask(engine, requests, temperature=1.0, max_tokens=24, stop=(), ignore_eos=True) -> dict:
    """key -> Sample."""
    inbox, outbox, *_ = engine
    sampling = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "stop": list(stop)}
    inbox.put(("generate", 0, requests, {**sampling, "max_tokens": max_tokens, "ignore_eos": ignore_eos}))
    found = {}
    for _ in requests:
        _, _, key, ids, logprobs, finish, versions = answer(outbox)
        prompt = next(p for k, p, _ in requests if k == key)
        found[key] = Sample(*key, prompt, ids, logprobs, finish, versions)
    return found


def push(engine, weights, version: int = 1) -> None:
    engine[0].put(("weights", version, weights))
    assert answer(engine[1])[:2] == ("weights", version)


def requests(seed: int = 0, samples: int = 4):
    return [((p, k), prompt, 1000 * seed + 10 * p + k) for p, prompt in enumerate(PROMPTS) for k in range(samples)]


@torch.no_grad()
def mismatch(model, samples: dict, temperature: float) -> float:
    """Largest difference between the sampler's log-probs and a plain forward pass of the trainer's model."""
    worst = 0.0
    for s in samples.values():
        ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(s.prompt_ids) - 1 : -1] / temperature
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(s.response_ids)[:, None])[:, 0]
        assert len(s.sampler_logprobs) == len(s.response_ids)
        worst = max(worst, (logprobs - torch.tensor(s.sampler_logprobs)).abs().max().item())
    return worst


def perturbed(model, seed: int):
    """Every weight moved by a tenth of its own spread, the shared embedding and head too."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for p in other.parameters():
        p.data += 0.1 * p.data.std().nan_to_num(0.1) * torch.randn(p.shape, generator=generator)
    return other


@pytest.mark.integration
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_trainer_agree(engine, temperature):
    push(engine, list(engine[2].state_dict().items()))
    assert mismatch(engine[2], ask(engine, requests(), temperature), temperature) < 1e-4


def test_they_agree_after_a_push(engine):
    """The whole prompt stands in the prefix cache by now: a cache that survives the push would show as well.

    A push holds lm_head.weight, too, without which the packed head of a CPU engine would stay stale.
    """
    old = engine[2]
    assert "lm_head.weight" in old.state_dict()
    push(engine, list(old.state_dict().items()))
    before = ask(engine, requests())
    new = perturbed(old, 1)
    push(engine, list(new.state_dict().items()), version=2)
    after = ask(engine, requests())
    assert mismatch(new, after, 1.0) < 1e-4
    assert mismatch(old, after, 1.0) > 0.05
    assert [s.weight_versions for s in before.values()] == [[(1, 0)]] * len(before)
    assert [s.weight_versions for s in after.values()] == [[(2, 0)]] * len(after)


def test_a_sample_depends_on_its_seed_alone(engine):
    push(engine, list(engine[2].state_dict().items()))
    all_at_once = ask(engine, requests(3))
    alone = ask(engine, [requests(3)[5]])
    key = requests(3)[5][0]
    assert np.array_equal(alone[key].response_ids, all_at_once[key].response_ids)
    other = ask(engine, requests(4))
    assert not any(np.array_equal(other[k].response_ids, s.response_ids) for k, s in all_at_once.items())
    assert len({tuple(s.response_ids) for s in all_at_once.values()}) == len(all_at_once)


def test_ends(engine):
    """A sampled EOS is the last id, reason stop; at the limit the reason is length; a stop string stays in the ids."""
    model = copy.deepcopy(engine[2])
    push(engine, list(model.state_dict().items()))
    cut = ask(engine, requests(), ignore_eos=True, max_tokens=6)
    assert {(len(s.response_ids), s.finish_reason) for s in cut.values()} == {(6, "length")}
    plain = ask(engine, [((0, 0), LONG, 1)])[0, 0].response_ids.tolist()
    from transformers import AutoTokenizer

    decode = AutoTokenizer.from_pretrained(model.config._name_or_path).decode
    words = [(k, decode([token])) for k, token in enumerate(plain)]
    place, word = next((k, w) for k, w in words if k > 1 and w.isascii() and w.isalnum() and w not in decode(plain[:k]))
    stopped = ask(engine, [((0, 0), LONG, 1)], stop=[word])[0, 0]
    assert stopped.finish_reason == "stop"
    assert stopped.response_ids.tolist() == plain[: place + 1]
    assert len(stopped.response_ids) == len(stopped.sampler_logprobs)
    with torch.no_grad():
        model.model.norm.weight.fill_(0.0)
    push(engine, list(model.state_dict().items()))  # logits are all 0 now: the EOS comes once in 512
    uniform = ask(engine, requests(), ignore_eos=False)
    for s in uniform.values():
        assert (s.response_ids[-1] == EOS) == (s.finish_reason == "stop")
    push(engine, list(engine[2].state_dict().items()))


@pytest.mark.integration
def test_what_fails_in_the_thread_is_handed_over(tiny, tmp_path):
    inbox, outbox = watchdog.Mailbox(), watchdog.Mailbox()
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    args = grpo.Args(model_name_or_path=str(tmp_path))
    grpo.vllm_thread(args, torch.float32, 0, 1, [EOS], inbox, outbox)
    kind, error = outbox.get(timeout=1)
    assert kind == "error" and isinstance(error, Exception)


def test_an_engine_that_cannot_be_released_says_why_it_failed(monkeypatch):
    """After an error of the device its shutdown raises as well, and the first error would be lost."""

    def refuses(llm):
        raise RuntimeError("the device is in error")

    class Broken:
        @property
        def llm_engine(self):
            raise ValueError("the reason")

    monkeypatch.setattr(grpo, "build_vllm", lambda *rest: Broken())
    monkeypatch.setattr(grpo, "release_vllm", refuses)
    inbox, outbox = watchdog.Mailbox(), watchdog.Mailbox()
    with pytest.raises(RuntimeError, match="in error"):
        grpo.vllm_thread(grpo.Args(), torch.float32, 0, 1, [EOS], inbox, outbox)
    kind, error = outbox.get(timeout=1)
    assert kind == "error" and str(error) == "the reason"


@pytest.mark.parametrize("penalty", [1.0, 5.0])
def test_generate_has_no_setting_of_its_own(tiny, tmp_path, penalty):
    """A model's generation_config.json may have a repetition penalty, which no log-prob would show."""
    model = shutil.copytree(tiny, tmp_path / "model")
    settings = {"repetition_penalty": penalty, "no_repeat_ngram_size": 2} if penalty > 1 else {}
    path = model / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    args = grpo.Args(model_name_or_path=str(model), dtype="float32", rollout="hf")
    inbox, outbox = watchdog.Mailbox(), watchdog.Mailbox()
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "stop": [], "max_tokens": 24, "ignore_eos": True}
    inbox.put(("generate", 0, [((0, 0), [5, 6, 7], 1)], sampling))
    inbox.put(("stop",))
    utils.hf_thread(args, torch.float32, 0, 1, [EOS], inbox, outbox)
    ids = [5, 6, 7]
    plain = pretrained.load_model(args, torch.float32, "sdpa").eval()
    for _ in range(24):
        with torch.no_grad():
            ids.append(int(plain(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert [outbox.get(timeout=1)[0], list(outbox.get(timeout=1)[3])] == ["ready", ids[3:]]


@pytest.mark.parametrize("rollout", ["vllm", "hf"])
def test_the_settings_of_evaluations_reach_the_sampler(engine, rollout):
    """Each that leaves one token gives the greedy ids; a penalty repeats none; max_tokens is the length."""
    inbox, outbox, model, args, _ = engine

    def ids(**settings) -> list[int]:
        own = dataclasses.replace(args, eval_sampling=json.dumps(settings), ignore_eos=True, rollout=rollout)
        _, sampling = prompt_order.eval_requests(1, own)
        request = ("generate", 0, [((0, 0), [5, 6, 7], 1)], sampling)
        if rollout == "vllm":
            inbox.put(request)
            return list(answer(outbox)[3])
        to_hf, from_hf = watchdog.Mailbox(), watchdog.Mailbox()
        for message in (request, ("stop",)):
            to_hf.put(message)
        utils.hf_thread(own, torch.float32, 0, 1, [EOS], to_hf, from_hf)
        assert from_hf.get(timeout=1) == ("ready",)
        return list(from_hf.get(timeout=1)[3])

    push(engine, list(model.state_dict().items()))
    greedy = ids(temperature=0)
    assert len(greedy) == 24 and ids() != greedy
    for only in ({"top_k": 1}, {"top_p": 0.001}, {"min_p": 1.0}):
        assert ids(**only) == greedy, only
    penalized = ids(temperature=0, repetition_penalty=1e6)
    assert len({5, 6, 7, *penalized}) == 27
    assert ids(temperature=0, max_tokens=5) == greedy[:5]


# --------------------------------------------------------------------------------------- weights while sequences run


NUMBERS = itertools.count(1)


def begin(engine, length: int, seed: int = 0) -> int:
    """Ask for one response of ``length`` tokens to each prompt, without waiting; the number of the batch."""
    batch = next(NUMBERS)
    wanted = [((p, 0), prompt, 10 * seed + p) for p, prompt in enumerate(PROMPTS)]
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "stop": [], "max_tokens": length, "ignore_eos": True}
    engine[0].put(("generate", batch, wanted, sampling))
    return batch


def run_until(engine, batch: int, found: dict) -> None:
    """Let the engine run until ``batch`` is whole; all that arrives goes to ``found``: (batch, key) -> Sample."""
    engine[0].put(("until", batch))
    engine[0].put(("call", lambda llm: llm.llm_engine.get_num_unfinished_requests()))
    while (message := answer(engine[1]))[0] != "called":
        _, number, key, ids, logprobs, finish, versions = message
        found[number, key] = Sample(*key, PROMPTS[key[0]], ids, logprobs, finish, versions)
    found["unfinished"] = message[1]


def in_flight(engine, monkeypatch, mode: str, weights: list, versions: tuple[int, int]) -> dict:
    """Responses of 24 tokens of which 6 are sampled before a push and 18 after it."""
    monkeypatch.setattr(engine[3], "inflight_updates", mode)
    found: dict = {}
    long = begin(engine, 24)
    short = begin(engine, 6, seed=1)
    run_until(engine, short, found)
    assert found.pop("unfinished") == 3 and {batch for batch, _ in found} == {short}
    push(engine, weights, versions[1])
    run_until(engine, long, found)
    assert found.pop("unfinished") == 0
    samples = {key: sample for (batch, key), sample in found.items() if batch == long}
    assert [s.weight_versions for s in samples.values()] == [[(versions[0], 0), (versions[1], 6)]] * 3
    return samples


@torch.no_grad()
def mixture(old, new, s: Sample, first: int) -> torch.Tensor:
    """Log-probs of the tokens from ``first`` on by ``new``, reading the keys and values that ``old`` left before."""
    ids = torch.tensor([[*s.prompt_ids, *s.response_ids]])
    border = len(s.prompt_ids) + first - 1  # the last sampled token is computed in the next step
    cache = old(input_ids=ids[:, :border], use_cache=True).past_key_values
    logits = new(input_ids=ids[:, border:-1], past_key_values=cache, use_cache=True).logits[0]
    return logits.log_softmax(-1).gather(-1, torch.tensor(s.response_ids[first:])[:, None])[:, 0]


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_tokens_in_flight_are_of_the_version_that_their_span_names(engine, monkeypatch, mode):
    """recompute: as if the new weights had read everything. keep: the new weights over the old keys and values."""
    old = engine[2]
    new = perturbed(old, 3)
    push(engine, list(old.state_dict().items()), 7)
    for s in in_flight(engine, monkeypatch, mode, list(new.state_dict().items()), (7, 8)).values():
        before = dataclasses.replace(s, response_ids=s.response_ids[:6], sampler_logprobs=s.sampler_logprobs[:6])
        assert mismatch(old, {0: before}, 1.0) < 1e-4
        after = torch.tensor(s.sampler_logprobs[6:])
        by = {"keep": mixture(old, new, s, 6), "recompute": mixture(new, new, s, 6), "old": mixture(old, old, s, 6)}
        differences = {name: (logprobs - after).abs().max().item() for name, logprobs in by.items()}
        assert differences.pop(mode) < 1e-4
        assert min(differences.values()) > 0.01


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_a_prompt_that_is_asked_for_after_a_push_reads_no_old_keys(engine, monkeypatch, mode):
    """While a sequence with the same prompt runs on, whose blocks are in the prefix cache."""
    new = perturbed(engine[2], 4)
    push(engine, list(engine[2].state_dict().items()), 1)
    monkeypatch.setattr(engine[3], "inflight_updates", mode)
    found: dict = {}
    long = begin(engine, 24)
    run_until(engine, begin(engine, 6, seed=1), found)
    push(engine, list(new.state_dict().items()), 2)
    late = begin(engine, 6, seed=2)
    run_until(engine, late, found)
    assert found["unfinished"] == 3, "the long sequences run beside them"
    assert mismatch(new, {key: found[late, key] for key in ((0, 0), (1, 0), (2, 0))}, 1.0) < 1e-4
    run_until(engine, long, found)


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_a_push_of_the_same_weights_changes_no_token(engine, monkeypatch, mode):
    weights = list(engine[2].state_dict().items())
    push(engine, weights, 1)
    undisturbed: dict = {}
    long = begin(engine, 24)
    begin(engine, 6, seed=1)
    run_until(engine, long, undisturbed)
    pushed = in_flight(engine, monkeypatch, mode, weights, (1, 2))
    for key, sample in pushed.items():
        assert np.array_equal(sample.response_ids, undisturbed[long, key].response_ids)
        assert np.array_equal(sample.sampler_logprobs, undisturbed[long, key].sampler_logprobs)


def test_the_engine_stands_still_by_counting(engine, monkeypatch):
    """In flight it does nothing until it knows for which batch, and stops with the step that completes that one."""
    push(engine, list(engine[2].state_dict().items()), 1)
    monkeypatch.setattr(engine[3], "inflight_updates", "recompute")
    steps = []

    def count(llm) -> None:
        plain = llm.llm_engine.step
        monkeypatch.setattr(llm.llm_engine, "step", lambda: (steps.append(1), plain())[1])

    engine[0].put(("call", count))
    assert engine[1].get(timeout=60) == ("called", None)
    found: dict = {}
    long = begin(engine, 24)
    short = begin(engine, 6, seed=1)
    time.sleep(0.3)
    assert not steps
    run_until(engine, short, found)
    counted = len(steps)
    assert counted >= 6 and found["unfinished"] == 3
    time.sleep(0.3)
    assert len(steps) == counted
    run_until(engine, long, found)
    assert len(steps) == counted + 18 and found["unfinished"] == 0
    monkeypatch.setattr(engine[3], "inflight_updates", "off")  # now whole batches, the first one first
    first = begin(engine, 24)
    second = begin(engine, 6, seed=1)
    run_until(engine, second, found)
    assert [batch for batch, _ in list(found)[-6:]] == [first] * 3 + [second] * 3


# ------------------------------------------------------------------------------- engines of other architectures, direct


SIZES = {
    "vocab_size": 600,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}


def load_engine(folder, model_type: str, fields: dict):
    """A vLLM engine on a random model in ``folder``, and the trainer's copy of the model, loaded as a run loads it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm import LLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **fields)).save_pretrained(folder)
    llm = LLM(
        model=str(folder),
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        kv_cache_memory_bytes=20 * 2**20,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        block_size=32,
        max_num_seqs=8,
        disable_log_stats=True,
    )
    model = pretrained.load_model(grpo.Args(model_name_or_path=str(folder)), torch.float32, "sdpa")
    return llm, model


def weights_for_engine(model) -> list[tuple[str, torch.Tensor]]:
    """Return the weights a run pushes, under the names that save_pretrained would write."""
    policy = SimpleNamespace(module=SimpleNamespace(model=model))
    return deepspeed_zero.current_weights(policy, zero_stage=2, checkpoint_names=True)


def engine_mismatch(llm, model) -> float:
    """Largest difference between log-probs of sampled tokens and those of a plain forward pass."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=16, logprobs=0, ignore_eos=True, detokenize=False, seed=1)
    answers = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
    samples = {}
    for place, found in enumerate(answers):
        ids = list(found.outputs[0].token_ids)
        logprobs = [step[token].logprob for step, token in zip(found.outputs[0].logprobs, ids, strict=True)]
        samples[place] = Sample(place, 0, PROMPTS[place], ids, logprobs, "length", [])
    return mismatch(model, samples, temperature=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("check", ["check_missing_parameters", "check_refused_push"])
def test_a_push_that_misses_parameters_is_an_error(tmp_path, check):
    """The message names what would stay stale: a whole layer, a part of a fused one, the tied head, lost experts."""
    alone(globals()[check], tmp_path)


def check_missing_parameters(tmp_path) -> None:
    llm, model = load_engine(tmp_path, "qwen2", {"tie_word_embeddings": True})
    weights = weights_for_engine(model)
    push_weights(llm, weights)
    for left_out, named in (
        ("model.layers.1.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"),
        ("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("model.layers.0.self_attn.v_proj.bias", "model.layers.0.self_attn.qkv_proj.bias"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ):
        assert left_out in dict(weights)
        with pytest.raises(RuntimeError, match=re.escape(named)):
            push_weights(llm, [(name, w) for name, w in weights if name != left_out])
        push_weights(llm, weights)
        assert engine_mismatch(llm, model) < 1e-4


def check_refused_push(tmp_path) -> None:
    """vLLM loads the experts of gpt-oss past its own bookkeeping, and a reload loses them."""
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}
    llm, model = load_engine(tmp_path, "gpt_oss", fields)
    with pytest.raises(RuntimeError, match="push did not reach 10 parameters") as error:
        push_weights(llm, weights_for_engine(model))
    assert "experts" in str(error.value)


@pytest.mark.integration
def test_the_gpu_has_finished_when_weights_change_hands(monkeypatch, tiny_model):
    """Before the weights are handed out, and before their arrival is acknowledged; nothing of it without a GPU.

    A prefix cache that the engine keeps is an error.
    """
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))

    class Engine:
        drops = True

        def collective_rpc(self, method, args):
            assert method is reload_worker
            calls.append("load")
            return [[]]

        def reset_prefix_cache(self, reset_running_requests):
            return self.drops

    engine = Engine()
    push_weights(engine, weights_for_engine(tiny_model))
    assert calls == ["load"]
    calls.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    push_weights(engine, weights_for_engine(tiny_model))
    assert calls == ["synchronize", "load", "synchronize"]
    engine.drops = False
    with pytest.raises(RuntimeError, match="prefix cache"):
        push_weights(engine, [])


@pytest.mark.slow
def test_an_engine_of_random_weights_samples_as_one_that_read_the_model(tiny):
    """load_format dummy: before the first push its log-probs are not the model's; after it the ids are equal."""
    answers = {}
    for form in ("auto", "dummy"):
        started = start(tiny, load_format=form)
        model = started[2]
        assert (mismatch(model, ask(started, requests()), 1.0) < 1e-3) == (form == "auto")
        push(started, list(model.state_dict().items()))
        answers[form] = ask(started, requests())
        assert mismatch(model, answers[form], 1.0) < 1e-3
        end_engine(started[0], started[-1])
    for key, sample in answers["auto"].items():
        assert np.array_equal(answers["dummy"][key].response_ids, sample.response_ids)
        assert np.array_equal(answers["dummy"][key].sampler_logprobs, sample.sampler_logprobs)


FEW = ["--num_unique_prompts_rollout", "1", "--num_samples_per_prompt_rollout", "2", "--max_response_length", "4"]
FEW += ["--max_prompt_length", "240"]
SMALL_ENGINE = '{"kv_cache_memory_bytes": 107374182, "max_num_batched_tokens": 100, "max_num_seqs": 16}'


@pytest.mark.integration
@pytest.mark.parametrize(
    "shape, settings",
    [
        (FEW, "{}"),  # its cache follows from what they need, but vLLM wants room for one of --max_prompt_length
        (FEW, '{"block_size": 128}'),
        # On CPUs prompts are not split: after a part of one, vLLM would rewind a generator as only CUDA's can.
        pytest.param(["--max_prompt_length", "90"], SMALL_ENGINE, marks=pytest.mark.slow),
    ],
    ids=["few samples", "large blocks", "more prompt tokens than the engine takes at once"],
)
def test_an_engine_has_room_for_the_samples_of_a_step(tiny, tmp_path, shape, settings):
    line = command(tiny, tmp_path, *shape, "--total_steps", "1", "--vllm_args", settings, rollout="vllm")
    assert "step 1/1" in finish(line, tmp_path / "log")

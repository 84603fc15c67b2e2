"""Sampling ahead of training: the order of asking and training, versions, resuming, and engines that fail."""

from __future__ import annotations

import importlib
import json
import threading
from pathlib import Path
from types import SimpleNamespace

import is_finished
import pytest
import torch
from helpers import (
    SMALL,
    Run,
    command,
    finish,
    folder_of,
    interrupted,
    read_jsonl,
    record,
    run_here,
    saved,
    tiny_args,
)
from tokenizers import AddedToken

import grpo
import utils
from runtime.arguments import checks
from runtime.data.samples import Problem, Sample
from runtime.run import directory
from runtime.system import watchdog
from runtime.training import model_files

AHEAD = SMALL | {"async_steps": 1, "num_mini_batches": 1}
FEW = '{"kv_cache_memory_bytes": 107374182, "max_num_seqs": 10}'  # fewer than a step's 16 samples
IN_FLIGHT = ["--max_response_length", "24", "--vllm_args", FEW, "--async_steps", "2", "--inflight_updates"]
SLOW = pytest.mark.slow


def same(one: Path, other: Path) -> None:
    expected, got = record(one), record(other)
    for key in expected:
        assert got[key] == expected[key], key


@pytest.fixture(scope="module")
def straight(tiny, tmp_path_factory):
    """The folder of a run in which nothing happens, by script and arguments."""
    folders = {}

    def make(script: str, changes: dict) -> Path:
        key = (script, json.dumps(changes))
        if key not in folders:
            args = tiny_args(tiny, tmp_path_factory.mktemp("straight"), script, **changes)
            run_here(args, script)
            folders[key] = folder_of(args, script)
        return folders[key]

    return make


# ------------------------------------------------------------------------------------------- one engine, without a run


class Script:
    """An engine's thread that answers by a table: ``answers`` maps a kind of message to what comes back for it."""

    def __init__(self, monkeypatch, **answers):
        self.received: list = []

        def thread(args, dtype, rank, world_size, stop_ids, inbox, outbox):
            outbox.put(("ready",))
            while (message := inbox.get())[0] != "stop":
                self.received.append(message)
                for answer in answers.get(message[0], lambda *_: [])(*message[1:]):
                    outbox.put(answer)

        self.thread = thread
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
        store = SimpleNamespace(check=lambda keys: False)
        self.watch = SimpleNamespace(store=store, heartbeat=lambda: None)
        self.watch.receive = lambda *a: watchdog.Watch.receive(self.watch, *a)

    def engine(self, tokenizer=None, **changes) -> grpo.Engine:
        plain = SimpleNamespace(decode=lambda ids, skip_special_tokens: str(ids), added_tokens_decoder={})
        tokenizer = tokenizer or plain
        return grpo.Engine(self.thread, grpo.Args(rollout="hf", **changes), torch.float32, tokenizer, [2], self.watch)


PROBLEMS = [Problem([], "", "", {}, prompt_ids=[place]) for place in range(3)]
REQUESTS = [(place, k, 10 * place + k) for place in range(3) for k in range(2)]


def answer(number, key, version=1):
    return ("sample", number, key, [5, 6], [-1.0, -2.0], "stop", [(version, 0)])


def keys(arrived) -> list:
    return [(sample.prompt_id, sample.sample_id) for _, sample in arrived]


def test_samples_that_arrive_before_an_acknowledgement_are_kept(monkeypatch):
    """Three of them come while new weights are on their way: none is lost, none comes twice, each to its own batch."""
    asked = {}

    def generate(number, requests, sampling):
        asked[number] = [key for key, _, _ in requests]
        return []

    def weights(version, tensors):
        early = [answer(number, asked[number].pop(0), version) for number in (0, 1, 1)] if asked else []
        return [*early, ("weights", version, 0.5)]

    def until(number):
        return [answer(number, key) for key in asked[number]]

    engine = Script(monkeypatch, generate=generate, weights=weights, until=until).engine()
    first = engine.ask(PROBLEMS, REQUESTS, {})
    second = engine.ask(PROBLEMS, REQUESTS, {})
    engine.push([])
    assert (engine.version, engine.acknowledged, len(engine.arrived)) == (1, 1, 3)
    arrived = list(engine.arrivals(first))
    assert sorted(keys(a for a in arrived if a[0] is first)) == [(p, k) for p, k, _ in REQUESTS]
    assert len(keys(a for a in arrived if a[0] is second)) == 2
    assert sorted(keys(arrived[:0]) + keys(engine.arrivals(second))) == [(p, k) for p, k, _ in REQUESTS][2:]
    assert not engine.batches and engine.metrics["perf/generate_tokens_per_second"] == 6 / 0.5
    engine.close()


@pytest.mark.parametrize("ids, text", [([5, 9, 2], "5 9"), ([5, 2, 9], "5 2 9"), ([2, 5], "2 5"), ([5, 7], "5 7")])
def test_only_the_special_token_that_ended_a_response_is_no_part_of_its_text(monkeypatch, ids, text):
    """Tags that are special tokens reach verifiers; a stop string (7) and the last token of a cut response (9) stay."""
    special = {2: "</s>", 7: "</call>", 9: "</answer>"}
    reason = "length" if ids[-1] == 9 else "stop"
    found = ("sample", 0, (0, 0), ids, [-1.0] * len(ids), reason, [(1, 0)])

    def decode(ids, skip_special_tokens):
        return " ".join(str(i) for i in ids if not (skip_special_tokens and i in special))

    tokenizer = SimpleNamespace(decode=decode)
    tokenizer.added_tokens_decoder = {i: AddedToken(word, special=True) for i, word in special.items()}
    engine = Script(monkeypatch, until=lambda _: [found]).engine(tokenizer, stop_strings=("</call>",))
    ((_, sample),) = engine.arrivals(engine.ask(PROBLEMS, REQUESTS[:1], {}))
    assert sample.response == text
    engine.close()


@pytest.mark.parametrize("number, key", [(7, (0, 0)), (0, (2, 2)), (0, (0, 0))])
def test_a_sample_that_nobody_asked_for_is_an_error(monkeypatch, number, key):
    """Of an unknown batch, of an unknown key, or of one that has arrived."""
    script = Script(monkeypatch, until=lambda _: [answer(0, (0, 0)), answer(number, key)])
    engine = script.engine()
    with pytest.raises(KeyError):
        list(engine.arrivals(engine.ask(PROBLEMS, REQUESTS, {})))
    engine.close()


def test_versions_of_tokens():
    sample = Sample(0, 0, [1], [5] * 6, [0.0] * 6, "stop", [(3, 0), (4, 2), (7, 5)])
    assert sample.token_versions().tolist() == [3, 3, 4, 4, 4, 7]
    metrics = utils.sample_metrics([sample], torch.zeros(1, 2), step=7)
    assert metrics["sampler/staleness"] == pytest.approx((2 * 4 + 3 * 3) / 6)
    assert (metrics["sampler/staleness_max"], metrics["sampler/versions"]) == (4, 3)


def test_an_evaluation_of_two_versions_is_an_error():
    samples = [Sample(0, k, [1], [5], [0.0], "stop", [(version, 0)]) for k, version in enumerate((2, 2, 3))]
    with pytest.raises(RuntimeError, match=r"\[2, 3\]"):
        utils.eval_metrics(samples, PROBLEMS[:1], 1)


def test_importance_weights_by_hand():
    """w = pi / sampler: 1/2, 1 and 4; ess is (5.5)^2 / (3 * 17.25); one of three is above the cap; two are fresh."""
    old_T, sampler_T = torch.tensor([0.25, 0.5, 0.8]).log(), torch.tensor([0.5, 0.5, 0.2]).log()
    fresh_T = torch.tensor([True, True, False])
    stats = utils.TokenStats(torch.device("cpu"))
    args = grpo.Args(truncated_importance_sampling_ratio_cap=2.0)
    values = utils.weight_statistics(old_T, sampler_T, args) | {"tokens": torch.ones(3), "fresh": fresh_T.float()}
    stats.add(torch.ones(3) > 0, values | {"sampler_diff": (old_T - sampler_T).abs() * fresh_T})
    sums = dict(zip(stats.names, stats.sums.tolist(), strict=True))
    peaks = dict(zip(stats.names, stats.maxima.tolist(), strict=True))
    metrics = utils.staleness_metrics(sums, peaks)
    half = torch.tensor(2.0).log().item()
    expected = {"fresh_frac": 2 / 3, "ess": 5.5**2 / (3 * 17.25), "capped_frac": 1 / 3}
    expected |= {"logprob_diff_mean": half / 2, "logprob_diff_max": half}
    assert metrics == pytest.approx({f"sampler/{name}": value for name, value in expected.items()}, rel=1e-6)
    at_the_cap = utils.weight_statistics(old_T, old_T, grpo.Args(truncated_importance_sampling_ratio_cap=1.0))
    assert at_the_cap["capped"].tolist() == [0, 0, 0], "a cap changes nothing of a weight that is equal to it"
    none_fresh = utils.staleness_metrics({**sums, "fresh": 0.0}, peaks)
    assert set(metrics) - set(none_fresh) == {"sampler/logprob_diff_mean", "sampler/logprob_diff_max"}


# ------------------------------------------------------------------------------------------------ runs in this process


def test_ask_collect_train_push(tiny, tmp_path, monkeypatch):
    """With one batch ahead: what is asked for, waited for and pushed, in that order; nothing beyond the last step."""
    events: list[str] = []
    numbers: dict[int, str] = {}
    plain = {name: getattr(grpo.Engine, name) for name in ("ask", "arrivals", "push")}

    def ask(self, problems, requests, sampling, chosen=None):
        batch = plain["ask"](self, problems, requests, sampling, chosen)
        numbers[batch.number] = str(1 + sum(e.startswith("ask") for e in events)) if chosen else "eval"
        if chosen:
            events.append(f"ask {numbers[batch.number]}")
        return batch

    def arrivals(self, batch):
        events.append(f"wait {numbers[batch.number]}")
        yield from plain["arrivals"](self, batch)

    def push(self, weights):
        events.append("push")
        plain["push"](self, weights)

    monkeypatch.setattr(grpo.Engine, "ask", ask)
    monkeypatch.setattr(grpo.Engine, "arrivals", arrivals)
    monkeypatch.setattr(grpo.Engine, "push", push)
    run_here(tiny_args(tiny, tmp_path / "0", **SMALL | {"total_steps": 2, "eval_prompts": 0}))
    assert events == ["push", "ask 1", "wait 1", "push", "ask 2", "wait 2", "push"]
    events.clear()
    run_here(tiny_args(tiny, tmp_path / "1", **AHEAD | {"total_steps": 3, "eval_every": 1}))
    first = ["push", "wait eval", "ask 1", "ask 2", "wait 1", "wait 2", "push", "wait eval"]
    assert events == [*first, "ask 3", "wait 3", "push", "wait eval", "push", "wait eval"]


@pytest.mark.integration
@pytest.mark.parametrize("script", ["grpo", pytest.param("ppo", marks=SLOW)])
def test_one_batch_ahead(tiny, tmp_path, script):
    """Every token of step s is of version max(1, s - 1); the prompts are those of the synchronous run; cap 2 is on."""
    args = tiny_args(tiny, tmp_path / "ahead", script, **AHEAD, beta=0.1)
    metrics = run_here(args, script)
    folder = folder_of(args, script)
    config = json.loads((folder / "config.json").read_text())
    assert config["args"]["truncated_importance_sampling_ratio_cap"] == 2.0
    again = tiny_args(tiny, tmp_path / "ahead", script, **AHEAD, beta=0.1)  # the same command, in a sweep
    assert is_finished.state(again, importlib.import_module(script).Args())[0] == is_finished.FINISHED
    for sample in read_jsonl(folder / "samples.jsonl"):
        assert sample["weight_versions"] == [[max(1, sample["step"] - 1), 0]]
    assert [m["sampler/staleness"] for m in metrics] == [m["sampler/staleness_max"] for m in metrics] == [0, 1, 1, 1]
    assert [m["sampler/fresh_frac"] for m in metrics] == [1, 0, 0, 0]
    assert all(0 <= m["sampler/logprob_diff_mean"] < 1e-4 for m in metrics), "of tokens asked for after every push"
    assert metrics[0]["sampler/ess"] == pytest.approx(1) and metrics[3]["sampler/ess"] < 0.9999
    assert [e["eval/weights_version"] for e in read_jsonl(folder / "eval.jsonl")] == [1, 3, 5]
    plain = tiny_args(tiny, tmp_path / "plain", script, **SMALL | {"num_mini_batches": 1}, beta=0.1)
    run_here(plain, script)
    prompts = [[s["prompt"] for s in read_jsonl(folder_of(a, script) / "samples.jsonl")] for a in (args, plain)]
    assert prompts[0] == prompts[1] and len(prompts[0]) == 64


RESUMED = [
    ("grpo", {"dynamic_sampling_rounds": 2, "beta": 0.1, "kl_target": (0.01,)}, 1),
    pytest.param("grpo", {"generation_size": 6, "num_mini_batches": 2}, 2, marks=SLOW),
    pytest.param("ppo", {"beta": 0.1, "kl_placement": "reward", "value_norm": "exp"}, 3, marks=SLOW),
]


@pytest.mark.integration
@pytest.mark.parametrize("script, changes, after", RESUMED, ids=str)
def test_a_run_that_samples_ahead_can_be_repeated_and_resumed(
    straight, tiny, tmp_path, monkeypatch, script, changes, after
):
    """Stopped and started again: the same numbers, samples and weights as in one piece."""
    expected = straight(script, AHEAD | changes)
    parts = tiny_args(tiny, tmp_path / "parts", script, **AHEAD | changes)
    folder = interrupted(parts, monkeypatch, after=after, script=script)
    _, checkpoint = directory.saved_steps(folder)[-1]
    assert '"sampler_logprobs": {"array of"' in (checkpoint / "state.json").read_text(), "numbers are not text"
    asked = []
    engine = importlib.import_module(script).Engine
    plain = engine.ask

    def ask(self, problems, requests, *more):
        asked.append(len(requests))
        return plain(self, problems, requests, *more)

    monkeypatch.setattr(engine, "ask", ask)
    run_here(parts, script)
    assert asked[0] == 0, "the batch that was waited for is in the checkpoint, and not drawn again"
    same(expected, folder)


def test_what_cannot_be_combined(tiny, tmp_path, capsys):
    for changes, words in (
        ({"async_steps": 2}, ["--async_steps 2", "--inflight_updates off", "--async_steps 1"]),
        ({"inflight_updates": "keep", "rollout": "vllm"}, ["--inflight_updates keep", "--async_steps 1"]),
        ({"async_steps": 1, "inflight_updates": "recompute"}, ["--inflight_updates", "--rollout vllm"]),
        ({"async_steps": 1, "vllm_sleep": "engine"}, ["--vllm_sleep", "--async_steps"]),
        ({"async_steps": 1, "dataset_filter": (0.5, 1.0)}, ["--dataset_filter", "--async_steps"]),
        ({"async_steps": -1}, ["--async_steps -1", "0 or more"]),
    ):
        with pytest.raises(SystemExit) as end:
            checks.check(tiny_args(tiny, tmp_path, **changes), 1)
            model_files.check_model(tiny_args(tiny, tmp_path, **changes))
        assert end.value.code == 2
        message = capsys.readouterr().err
        assert all(word in message for word in words), message


def test_the_cap_is_set_before_the_run_is_named(tiny, tmp_path):
    """2 when samples can be stale; what the command line says stays, 0 too; without stale samples it stays off."""
    folders = {}
    for ahead, given, cap in ((0, None, None), (1, None, 2.0), (1, 2.0, 2.0), (1, 0.0, 0.0), (1, 5.0, 5.0)):
        args = tiny_args(tiny, tmp_path, async_steps=ahead, truncated_importance_sampling_ratio_cap=given)
        *_, folders[ahead, given], _ = grpo.preflight(args)
        assert args.truncated_importance_sampling_ratio_cap == cap
    assert folders[1, None] == folders[1, 2.0] != folders[1, 0.0]


# ------------------------------------------------------------------------------------------------- engines that fail


def fail_at(monkeypatch, *prompts: int, how=None) -> list:
    """Make the engine of ``--rollout hf`` fail when it is given the n-th prompts of the run."""
    plain = utils._generate
    calls: list = []

    def generate(*arguments):
        calls.append(1)
        if len(calls) in prompts:
            if how is not None:
                how()
            raise ValueError("the engine broke on purpose")
        yield from plain(*arguments)

    monkeypatch.setattr(utils, "_generate", generate)
    return calls


FAILING = [("grpo", AHEAD), pytest.param("grpo", SMALL, marks=SLOW), pytest.param("ppo", AHEAD, marks=SLOW)]


@pytest.mark.integration
@pytest.mark.parametrize("script, changes", FAILING, ids=["ahead", "synchronous", "ppo"])
def test_a_run_whose_engine_fails_ends_and_its_resumption_equals_the_straight_one(
    straight, tiny, tmp_path, monkeypatch, capfd, script, changes
):
    """It fails in the middle of an evaluation and of training batches; numbers, samples and weights are the same."""
    expected = straight(script, changes)
    fail_at(monkeypatch, 2, 20, 30)
    failing = tiny_args(tiny, tmp_path / "failing", script, **changes, save_every=1)
    for _ in range(3):
        with pytest.raises(watchdog.EngineFailed):
            run_here(failing, script)
        assert "ValueError: the engine broke on purpose" in capfd.readouterr().err
    run_here(failing, script)
    assert "resuming after step" in capfd.readouterr().out
    same(expected, folder_of(failing, script))


@pytest.mark.integration
def test_a_run_whose_engine_hangs_ends_and_its_resumption_equals_the_straight_one(
    straight, tiny, tmp_path, monkeypatch, capfd
):
    expected = straight("grpo", AHEAD)
    fail_at(monkeypatch, 20, how=lambda: threading.Event().wait(6))
    failing = tiny_args(tiny, tmp_path / "failing", **AHEAD, save_every=1, timeout=2.0)
    with pytest.raises(TimeoutError, match="within --timeout 2 s"):
        run_here(failing)
    run_here(failing)
    assert "resuming after step" in capfd.readouterr().out
    same(expected, folder_of(failing))


# --------------------------------------------------------------------------------------- vLLM, in processes of its own


@SLOW
@pytest.mark.parametrize(
    "script, ranks, more",
    [
        ("ppo", 2, ["--async_steps", "1"]),
        ("grpo", 2, [*IN_FLIGHT, "recompute", "--num_mini_batches", "2"]),
        ("ppo", 1, [*IN_FLIGHT, "keep"]),
    ],
    ids=str,
)
def test_two_runs_are_equal_and_tokens_have_their_age(tiny, tmp_path, script, ranks, more):
    """Bit for bit, in whole batches and in flight; prompts of a step are those of the synchronous run."""
    shape = {"script": script, "ranks": ranks, "rollout": "vllm"}
    for name in ("one", "two"):
        finish(command(tiny, tmp_path / name, "--total_steps", "6", *more, **shape), tmp_path / f"{name}.log", 300)
    plain = command(tiny, tmp_path / "plain", "--total_steps", "6", script=script)  # whoever answers its prompts
    finish(plain, tmp_path / "plain.log", 300)
    same(tmp_path / "one" / "run", tmp_path / "two" / "run")
    ahead = int(more[more.index("--async_steps") + 1])
    samples = read_jsonl(tmp_path / "one" / "run" / "samples.jsonl")
    spans = []
    for sample in samples:
        versions = [version for version, _ in sample["weight_versions"]]
        assert versions == sorted(set(versions)) and sample["step"] - ahead <= versions[0]
        assert versions[0] >= 1 and versions[-1] <= sample["step"]
        spans.append(len(versions))
    assert (max(spans) > 1) == ("--inflight_updates" in more)
    plain = read_jsonl(tmp_path / "plain" / "run" / "samples.jsonl")
    assert [(s["step"], s["prompt"]) for s in samples] == [(s["step"], s["prompt"]) for s in plain]


@SLOW
def test_killed_and_resumed_in_flight(tiny, tmp_path):
    """Every prompt once, equal until the save, fresher after it; tests/fault_injection.py kills whole batches."""
    more = ["--total_steps", "6", "--save_every", "3", *IN_FLIGHT, "recompute"]
    finish(command(tiny, tmp_path / "straight", *more, rollout="vllm"), tmp_path / "straight.log", 300)
    line, parts = command(tiny, tmp_path / "parts", *more, rollout="vllm"), tmp_path / "parts"
    run = Run(line, tmp_path / "first.log")
    run.until(lambda: saved(parts) == 3)
    run.kill()
    assert "resuming after step 3" in finish(line, tmp_path / "second.log", 300)
    straight, resumed = record(tmp_path / "straight" / "run"), record(parts / "run")
    assert resumed["metrics"][:3] == straight["metrics"][:3]
    assert resumed["metrics"][3]["sampler/staleness"] == 0 < straight["metrics"][3]["sampler/staleness"]
    prompts = [[(s["step"], s["prompt"]) for s in run["samples"]] for run in (straight, resumed)]
    assert prompts[0] == prompts[1] and len(prompts[0]) == 6 * 16

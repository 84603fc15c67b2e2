"""Runs of several turns with a real engine: bits, kills, and ids, mask and rewards proved for every turn.

examples/gym_text.py needs gymnasium==1.4.0, which is not among the requirements.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import fmean

import fork_server
import pytest
from helpers import ROOT, command, finish, forked, make_chatty, read_jsonl, record, saved, with_program
from transformers import AutoModelForCausalLM, AutoTokenizer

FILE = ROOT / "tests" / "environments.py"
FEW = ("--verifier", "environment", "--max_response_length", "64", "--max_turns", "3", "--total_steps", "3")
# The random model seldom earns anything; the entropy moves its weights.
FEW += ("--entropy_coef", "0.05", "--learning_rate", "1e-3", "--external_lib", "tests.soft_adam")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> Path:
    return make_chatty(tmp_path_factory.mktemp("chatty") / "model")


def line(model: Path, out: Path, name: str, *more: str, ranks: int = 1) -> list[str]:
    file = name if "/" in name else f"{FILE}:{name}"
    return command(model, out, "--environment", file, *FEW, *more, rollout="vllm", ranks=ranks)


# ---------------------------------------------------------------------------------------------------------------- bits


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "ranks"),
    [((), 1), (("--async_steps", "1"), 1), ((), 2)],
    ids=["synchronous", "asynchronous", "two ranks"],
)
def test_two_runs_are_equal_to_the_bit(chatty, tmp_path, more, ranks):
    found = []
    for name in ("first", "second"):
        finish(line(chatty, tmp_path / name, "Guess", *more, ranks=ranks), tmp_path / f"{name}.log")
        found.append(record(tmp_path / name / "run"))
        print(name, found[-1]["weights"])
    assert found[0] == found[1]
    assert all(row["optim/grad_norm"] > 0 for row in found[0]["metrics"])
    assert sum(len(row["turns"]) > 2 for row in found[0]["samples"]) > 5


def until(condition) -> None:
    deadline = time.monotonic() + 1500
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_killed_with_a_tool_under_way_resumes_to_the_weights_of_one_that_was_not(chatty, tmp_path, monkeypatch):
    """The tool's answers follow from its calls, so the turns that the kill cost are played again as they were."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("CALLS", str(calls))
    more = ("--total_steps", "4", "--save_every", "1", "--call_timeout", "100")
    parts = line(chatty, tmp_path / "parts", "Logged", *more)
    codes = []
    start = lambda: codes.extend(forked(parts[1:], tmp_path / "parts.log", vllm=True, timeout=1500)[0])  # noqa: E731
    run = threading.Thread(target=start)
    run.start()
    until(lambda: saved(tmp_path / "parts") >= 2)
    Path(f"{calls}.stop").touch()
    before = len(calls.read_text().splitlines())
    until(lambda: len(calls.read_text().splitlines()) > before)
    server = fork_server.SERVERS["vllm"].process.pid
    (run_itself,) = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    os.kill(int(run_itself), signal.SIGKILL)
    run.join()
    assert codes == [-signal.SIGKILL]
    Path(f"{calls}.stop").unlink()
    finish(parts, tmp_path / "resumed.log")
    resumed = record(tmp_path / "parts" / "run")
    asked = len(calls.read_text().splitlines())

    finish(line(chatty, tmp_path / "straight", "Logged", *more), tmp_path / "straight.log")
    straight = record(tmp_path / "straight" / "run")
    print(f"{asked} calls with the kill", resumed["weights"], straight["weights"])
    assert asked > len(calls.read_text().splitlines()) - asked, "no turn was played again"
    assert resumed == straight
    assert all(row["optim/grad_norm"] > 0 for row in straight["metrics"])


def exact_rewards(sample: dict) -> tuple[float, float]:
    """Return (score, part format) of an episode of ``Exact``, from its prompt and its turns alone."""
    number = int(sample["prompt"].rpartition("Number ")[2][:-1])
    turns = sample["turns"]
    said = [turn["text"] for turn, after in itertools.pairwise(turns) if turn["role"] == "assistant" != after["role"]]
    assert [turn["text"] for turn in turns if turn["role"] != "assistant"] == [
        f"{len(text)} characters." if len(text) % 4 else f"error: ConnectionError: no such host as {len(text)}"
        for text in said
    ]
    return number / 8 + sum(((len(text) + number) % 4) / 4 for text in said), float(len(said) % 2)


# The prompt, the turns and the score of every sample of every evaluation, in evaluations.jsonl of the run.
EVALUATIONS = """
from runtime.system import process
process.prepare_environment()
import json, os
import tyro
import grpo
import utils

if __name__ == "__main__":  # the reward workers import this file
    plain = utils.eval_metrics

    def eval_metrics(samples, problems, step):
        with open(os.path.join(args.output_dir, "evaluations.jsonl"), "a") as file:
            for sample in samples:
                text = problems[sample.prompt_id].messages[-1]["content"]
                row = {"step": step, "problem": sample.prompt_id, "prompt": text, "turns": sample.turns}
                file.write(json.dumps(row | {"score": sample.score, "parts": sample.reward_parts}) + "\\n")
        return plain(samples, problems, step)

    utils.eval_metrics = eval_metrics
    args = tyro.cli(grpo.Args)
    grpo.main(args, grpo.preflight(args))
"""


def check_evaluations(out: Path) -> None:
    """Compare every score of every evaluation, and what eval.jsonl makes of them, with the game's own computation."""
    samples = read_jsonl(out / "evaluations.jsonl")
    evaluations = read_jsonl(out / "run" / "eval.jsonl")
    assert [row["step"] for row in evaluations] == [0, 1, 2]
    for row in evaluations:
        own = [sample for sample in samples if sample["step"] == row["step"]]
        scores, formats = zip(*map(exact_rewards, own), strict=True)
        assert [sample["score"] for sample in own] == list(scores) and len(set(scores)) > 1
        assert [sample["parts"]["format"] for sample in own] == list(formats)
        assert len(own) == row["eval/problems"] * row["eval/samples"]
        assert row["eval/reward_mean"] == pytest.approx(fmean(scores))
        assert row["eval/pass@1"] == pytest.approx(fmean(score > 0.5 for score in scores)), "no part correct"
        print(f"evaluation after step {row['step']}: {len(own)} episodes, mean reward {row['eval/reward_mean']}")


MODES = {
    "evaluation": ("--eval_prompts", "4", "--eval_every", "1"),
    "ppo": ("ppo",),
    "two ranks": (2,),
    "a rank for the engine": (2, "--vllm_engines", "1"),
    "asynchronous": ("--async_steps", "2", "--inflight_updates", "recompute"),
    "random": ("--reward_control", "random"),
    "inverted": ("--reward_control", "inverted"),
    "format": ("--reward_control", "format"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_rewards_of_a_seeded_game_are_exact_in_every_mode(chatty, tmp_path, mode):
    """Every sample of every step, against a computation from its own turns; of a control, what it makes of them."""
    more = [str(word) for word in MODES[mode]]
    ranks = int(more.pop(0)) if more[0].isdigit() else 1
    script = more.pop(0) if more[:1] == ["ppo"] else "grpo"
    words = [*FEW, "--total_steps", "2", "--log_samples", "1000", "--no-mask_no_eos_with_zero", *more]
    words = ["--environment", f"{FILE}:Exact", *words]
    run = command(chatty, tmp_path, *words, script=script, rollout="vllm", ranks=ranks)
    finish(with_program(run, tmp_path, EVALUATIONS) if mode == "evaluation" else run, tmp_path / "log")
    if mode == "evaluation":
        check_evaluations(tmp_path)
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(samples) > 10 and len({sample["reward"] for sample in samples}) > 1
    assert any(turn.get("failures") for sample in samples for turn in sample["turns"])
    for step in {sample["step"] for sample in samples}:
        own = [sample for sample in samples if sample["step"] == step]
        scores, formats = zip(*map(exact_rewards, own), strict=True)
        found = [sample["reward"] for sample in own]
        if mode == "random":
            assert sorted(found) == sorted(scores)
        else:
            assert found == list({"inverted": [-score for score in scores], "format": formats}.get(mode, scores))
    print(mode, len(samples), "episodes", [row["reward/mean"] for row in metrics])


@pytest.mark.slow
def test_tools_that_fail_sleep_and_print_change_no_bit(chatty, tmp_path, monkeypatch):
    """A soak: calls raise in both runs; in one of them they also sleep by chance, print, and leave processes behind."""
    found = []
    for name, trouble in (("calm", ""), ("trouble", "1")):
        monkeypatch.setenv("TROUBLE", trouble)
        more = ("--total_steps", "6", "--async_steps", "1", "--log_samples", "1000")
        finish(line(chatty, tmp_path / name, "Exact", *more), tmp_path / f"{name}.log")
        found.append(record(tmp_path / name / "run"))
        print(name, found[-1]["weights"], sum(row["env/failures"] for row in found[-1]["metrics"]), "failures")
    assert found[0] == found[1]
    assert sum(row["env/failures"] for row in found[0]["metrics"]) > 5


# --------------------------------------------------------------------------------------------------------------- proof


# What vLLM says it was given for each turn, against the episode; each target of the trainer, against its samples.
PROOF = """
from runtime.system import process
process.prepare_environment()
import json, os
import numpy as np
import tyro
import grpo
from runtime.training import batching
from runtime.environments import chat, episodes

if __name__ == "__main__":  # the reward workers import this file
    from vllm.v1.engine.llm_engine import LLMEngine

    given, proved = {}, {"turns": 0, "episodes": 0, "targets": 0, "observed": 0}
    plain_step, plain_found, plain_cut = LLMEngine.step, episodes.Episode.found, batching.micro_batches

    def step(self):
        outputs = plain_step(self)
        for output in outputs:
            given[output.request_id] = list(output.prompt_token_ids)
        return outputs

    def found(self):
        if self.row is None:  # what only looks at the engine
            return plain_found(self)
        starts = [0, *(end for _, end in self.observed)]
        prefix = self.name.rpartition("/")[0] + "/"
        turns = sorted(int(name.removeprefix(prefix)) for name in given if name.startswith(prefix))
        asked = [given.pop(f"{prefix}{turn}") for turn in turns]
        assert asked == [self.prompt_ids + self.ids[:start] for start in starts], self.turns
        own = len(self.ids) - sum(end - start for start, end in self.observed)
        assert own == len(self.logprobs) == sum(t["tokens"] for t in self.turns if t["role"] == "assistant")
        seen = [t for t in self.turns if t["role"] != "assistant" and t["tokens"]]
        assert [t["tokens"] for t in seen] == [end - start for start, end in self.observed]
        proved["turns"] += len(starts)
        proved["episodes"] += 1
        proved["observed"] += len(seen)
        return plain_found(self)

    def micro_batches(samples, members, **how):
        offsets = batching.token_offsets(samples)
        ids = np.concatenate([s.response_ids[s.own()] for s in samples])
        for mb in plain_cut(samples, members, **how):
            real = mb.tokens < offsets[-1]
            assert mb.targets[mb.copies][real].tolist() == ids[mb.tokens[real].cpu().numpy()].tolist()
            proved["targets"] += int(real.sum())
            yield mb

    LLMEngine.step, episodes.Episode.found, batching.micro_batches = step, found, micro_batches
    if "CALLS" in os.environ:  # a policy that calls the first tool in every turn
        chat.Chat.calls = lambda self, text: [chat.Call("add", {"number": 2})]
    args = tyro.cli(grpo.Args)
    grpo.main(args, grpo.preflight(args))
    with open(os.path.join(args.output_dir, "proved.json"), "w") as file:
        json.dump(proved, file)
"""


def prove(model: Path, out: Path, name: str, *more: str) -> tuple[list[dict], dict]:
    """(samples, what was proved) of a run of two steps."""
    out.mkdir(parents=True, exist_ok=True)
    words = ("--max_prompt_length", "5000", "--max_response_length", "2500", "--total_steps", "2")
    words += ("--log_samples", "1000")
    words += ("--beta", "0.01")  # so that every token is computed, also in groups of equal rewards
    words += ("--eval_prompts", "0", "--micro_batch_tokens", "8192", *more)
    finish(with_program(line(model, out, name, *words), out, PROOF), out / "run.log")
    for row in read_jsonl(out / "run" / "metrics.jsonl"):
        assert row["sampler/logprob_diff_max"] < 1e-4, "in fp32: the trainer's context is the engine's"
    proved = json.loads((out / "proved.json").read_text())
    samples = read_jsonl(out / "run" / "samples.jsonl")
    print(out.name, len(samples), "episodes", proved)
    assert proved["episodes"] == len(samples) and proved["targets"] > 0
    return samples, proved


@pytest.mark.slow
@pytest.mark.parametrize("template", ["qwen2_5", "qwen3", "llama3", "hermes"])
def test_what_vllm_was_given_is_what_is_trained_on(chatty, tmp_path, monkeypatch, template):
    """With calls of tools in every turn, in the form of each template."""
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    special = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    model = AutoModelForCausalLM.from_pretrained(chatty)
    model.resize_token_embeddings(len(tokenizer))
    for one in (tokenizer, model):
        one.save_pretrained(tmp_path / "model")
    shutil.copy(chatty / "generation_config.json", tmp_path / "model")
    monkeypatch.setenv("CALLS", "1")
    file = str(ROOT / "tests" / "templates" / f"{template}.jinja")
    samples, proved = prove(
        tmp_path / "model", tmp_path / template, "Tools", "--chat_template", file, "--verifier", "exact"
    )
    assert proved["observed"] > len(samples)
    assert any("4" in turn["text"] for s in samples for turn in s["turns"] if turn["role"] == "tool")


# ------------------------------------------------------------------------------------------------- others' environments


WORLDS = ("FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", "Taxi-v4", "Blackjack-v1")
# For the other Python: plays the same turns with the library alone.
ORACLE = """
import json, re, sys, gymnasium
for row, turns in json.load(sys.stdin):
    world, total = gymnasium.make(row["id"]), 0.0
    world.reset(seed=row["seed"])
    names = {"Fr": "left down right up", "Cl": "up right down left", "Bl": "stick hit"}
    names = names.get(row["id"][:2], "south north east west pickup dropoff").split()
    for text in turns:
        words = [word for word in re.split("[^a-z0-9_]+", text.lower()) if word in names]
        if words:
            _, reward, terminated, truncated, _ = world.step(names.index(words[-1]))
            total += float(reward)
            if terminated or truncated:
                break
    print(json.dumps(total))
"""


@pytest.mark.slow
def test_others_environments_are_played_as_they_are(chatty, tmp_path):
    """Two steps of training: ids and mask of every turn proved, and each reward is what the library itself gives."""
    pytest.importorskip("gymnasium")
    rows = [{"id": world, "seed": 5} for world in WORLDS]
    rows = [{"prompt": "Play.\n", "answer": str(k), **row} for k, row in enumerate(rows)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = ("--dataset", str(tmp_path / "rows.jsonl"), "--prompt_key", "prompt", "--ground_truth_key", "answer")
    shape += ("--num_unique_prompts_rollout", str(len(rows)), "--num_samples_per_prompt_rollout", "2")
    shape += ("--call_timeout", "300")
    samples, _ = prove(chatty, tmp_path / "out", str(ROOT / "examples" / "gym_text.py:GymText"), *shape)
    assert {int(s["truth"]) for s in samples} == set(range(len(rows))) and len(samples) == 4 * len(rows)
    asked = []
    for s in samples:
        turns = (
            s["turns"][:-1] if s["turns"][-1]["role"] == "assistant" and s["finish_reason"] == "length" else s["turns"]
        )
        asked.append((rows[int(s["truth"])], [turn["text"] for turn in turns if turn["role"] == "assistant"]))
    line = [sys.executable, "-c", ORACLE]
    done = subprocess.run(line, input=json.dumps(asked), capture_output=True, text=True, check=True)
    theirs = [json.loads(one) for one in done.stdout.splitlines()]
    assert [s["reward"] for s in samples] == pytest.approx(theirs, abs=1e-6)
    assert all(s["reward_status"] == "ok" for s in samples)
    print([row["id"] for row in rows], sorted(set(theirs)))

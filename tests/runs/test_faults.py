"""Faults of a run: how it ends or continues, and that the message names the cause.

Each test injects some faults, and records the message that a user sees. When all tests have passed in one session, as
by `make test ARGS="-m slow tests/runs/test_faults.py"`, the records are written to runs/faults.md. That needs root: its
two nodes are network namespaces.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from helpers import (
    LONG,
    ONE_ENGINE,
    RAISES,
    ROOT,
    SMALL,
    STALLS,
    VERIFIERS,
    Run,
    alive,
    command,
    engine_file,
    flip,
    folder_of,
    interrupted,
    logged,
    messages,
    read_jsonl,
    run_here,
    saved,
    tiny_args,
    with_program,
)
from two_nodes import ADDRESSES, Nodes, ends, reason_for_none, training

import grpo
import utils
from runtime.arguments import checks
from runtime.engine import client
from runtime.system import process
from runtime.training import deepspeed_zero, pretrained

pytestmark = pytest.mark.slow
PAGE = ROOT / "runs" / "faults.md"
HEAD = """| fault | injected by | what you see | the run |
|---|---|---|---|
"""
ENDS, GOES_ON, REFUSED = "ends", "continues", "does not start"
RECORDED: dict[str, str] = {}


def note(fault: str, injection: str, text: str, words: str, run: str) -> None:
    """Find the last message with ``words`` in what was printed, and enter it in the table."""
    lines = [line for line in messages(text) if words in line]
    assert lines, f"{fault}: no message has {words!r}\n{text[-3000:]}"
    line = re.sub(r"/tmp/[\w./+-]*/(?=[\w.+-]+)", "", lines[-1].strip().replace(str(ROOT) + "/", ""))
    line = re.sub(r"grpo__\S*?__seed=\d+", "runs/NAME", line)
    line = re.sub(r"process \d+ on [\w.-]+", "process 4711 on node3", line).replace("|", "\\|")
    line = line if len(line) <= 300 else line[:300] + " ..."
    assert not re.match(r"raise |self\.|watch\.|return |\w+ = |def |memory ", line), f"{fault}: not a message: {line}"
    RECORDED[fault] = f"| {fault} | {injection} | `{line.replace('`', chr(39))}` | {run} |"


def observe(fault: str, injection: str, sentence: str, run: str) -> None:
    """Enter what no line says but the test has checked."""
    RECORDED[fault] = f"| {fault} | {injection} | {sentence} | {run} |"


@pytest.fixture(scope="module", autouse=True)
def page(request):
    """Written only when every fault of this file was injected and every test passed."""
    yield
    if request.session.testsfailed == 0 and len(RECORDED) == FAULTS:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(HEAD + "".join(f"{RECORDED[name]}\n" for name in sorted(RECORDED)))


# ----------------------------------------------------------------------------------------- answered before any loading


@dataclass
class Input:
    """A bad command line, the words of its message, and how the table calls it."""

    fault: str
    injection: str
    changes: dict
    words: str


def row(**changes) -> dict:
    return {"question": "1 + 1 =", "answer": "2"} | changes


INPUTS = [
    Input(
        "a micro-batch smaller than one sample", "`--micro_batch_tokens 100`", {"micro_batch_tokens": 100}, "is smaller"
    ),
    Input(
        "more mini-batches than prompts", "8 prompts, 9 mini-batches", {"num_mini_batches": 9}, "--num_mini_batches 9"
    ),
    Input(
        "a batch larger than the data",
        "`--num_unique_prompts_rollout 64`, 40 rows",
        {"num_unique_prompts_rollout": 64},
        "distinct problems",
    ),
    Input(
        "a response that does not fit into the model's context",
        "`--max_response_length 600` of 512",
        {"max_response_length": 600, "micro_batch_tokens": 999},
        "shorten",
    ),
    Input(
        "no network, and no such model",
        "`--model_name_or_path nobody/nothing`",
        {"model_name_or_path": "nobody/nothing"},
        "nobody/nothing",
    ),
    Input(
        "no network, and no such data set",
        "`--dataset nobody/nothing`",
        {"dataset": "nobody/nothing"},
        "nobody/nothing",
    ),
    Input(
        "a column that is not there",
        "`--ground_truth_key truth`",
        {"ground_truth_key": "truth"},
        "--ground_truth_key truth",
    ),
    Input("a row with an empty prompt", "a prompt of no characters", {"dataset": "PLACE/empty.jsonl"}, "row 3"),
    Input("a row whose ground truth is null", '`{"answer": null}`', {"dataset": "PLACE/null.jsonl"}, "row 3"),
    Input("a truncated file", "half a line at its end", {"dataset": "PLACE/cut.jsonl"}, "not valid jsonl"),
    Input(
        "a tokenizer without a chat template", "a base model", {"model_name_or_path": "PLACE/base"}, "--chat_template"
    ),
    Input(
        "flash attention that does not fit the layout",
        "`--attn_implementation flash_attention_2 --batch_layout shared`",
        {"attn_implementation": "flash_attention_2", "batch_layout": "shared"},
        "--batch_layout packed",
    ),
    Input("a verifier that does not exist", "`--verifier maths`", {"verifier": "maths"}, "'maths'"),
]


@pytest.mark.parametrize("case", INPUTS, ids=lambda case: case.fault)
def test_bad_input(tiny, tmp_path, capsys, monkeypatch, case):
    rows = [row(question=f"{i} + 1 =", answer=str(i + 1)) for i in range(40)]
    for name, bad in (("plain", row()), ("empty", row(question="")), ("null", row(answer=None))):
        lines = [json.dumps(r) + "\n" for r in [*rows[:3], bad, *rows[3:]]]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    (tmp_path / "cut.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"question": "1')
    shutil.copytree(tiny, tmp_path / "base")
    config = json.loads((tiny / "tokenizer_config.json").read_text())
    (tmp_path / "base" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    (tmp_path / "base" / "chat_template.jinja").unlink(missing_ok=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(process, "prepare_environment", lambda: pytest.fail("it went on to load torch"))
    usual = {"dataset": "PLACE/plain.jsonl", "num_unique_prompts_rollout": 8} | case.changes
    usual = {k: v.replace("PLACE", str(tmp_path)) if isinstance(v, str) else v for k, v in usual.items()}
    begun = time.monotonic()
    with pytest.raises(SystemExit) as end:
        args = tiny_args(tiny, tmp_path / "runs", **usual)
        grpo.main(args, grpo.preflight(args))
    assert end.value.code == 2 and time.monotonic() - begun < 30
    note(case.fault, case.injection, capsys.readouterr().err, case.words, REFUSED)


def test_an_overlong_prompt(tiny, tmp_path, capsys):
    rows = [row(question="one " * (90 if i == 3 else 2) + str(i)) for i in range(20)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with pytest.raises(SystemExit) as end:
        run_here(tiny_args(tiny, tmp_path / "runs", dataset=str(tmp_path / "long.jsonl")))
    assert end.value.code == 2
    note("one prompt that is too long", "400 tokens of 128", capsys.readouterr().err, "--max_prompt_length", REFUSED)


# ------------------------------------------------------------------------------------------------ runs that end by it


def fails(args, capfd, timeout: float = 30) -> str:
    """Return the output of a run that must end with an exception within the time."""
    begun = time.monotonic()
    with pytest.raises(Exception):  # noqa: B017 (which one is in the text)
        run_here(args)
    assert time.monotonic() - begun < timeout
    out, err = capfd.readouterr()
    assert "rank 0 failed" in err
    return out + err


@pytest.fixture(scope="session")
def imported(tiny, tmp_path_factory):
    """A run without a fault: the first one of a process imports DeepSpeed, which is not a fault's time."""
    run_here(tiny_args(tiny, tmp_path_factory.mktemp("first"), total_steps=1, eval_prompts=0))


@pytest.fixture
def small(tiny, tmp_path, imported):
    def make(**changes):
        return tiny_args(tiny, tmp_path / "runs", **{"eval_prompts": 0, "learning_rate": 1e-3, **changes})

    return make


def test_out_of_memory(small, capfd, monkeypatch):
    def head(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.27 GiB")

    monkeypatch.setattr(
        utils,
        "make_optimizer",
        lambda *a, plain=utils.make_optimizer: (monkeypatch.setattr(utils.TokenLogprobs, "hidden", head), plain(*a))[1],
    )
    text = fails(small(), capfd)
    note("GPU memory runs out", "a forward pass that raises it", text, "lower --micro_batch_tokens", ENDS)


def hf_thread_with(monkeypatch, change: Callable) -> None:
    """The engine's thread with ``change(message)`` in front of its inbox: None drops a message."""
    plain = utils.hf_thread

    class Changed:
        def __init__(self, inbox):
            self.inbox = inbox

        def get(self):
            while (message := change(self.inbox.get())) is None:
                pass
            return message

    monkeypatch.setattr(utils, "hf_thread", lambda *a: plain(*a[:-2], Changed(a[-2]), a[-1]))


def test_a_weight_push_that_never_ends(small, capfd, monkeypatch):
    hf_thread_with(monkeypatch, lambda m: None if m[0] == "weights" else m)
    text = fails(small(timeout=3.0), capfd)
    note(
        "the engine hangs while it takes weights",
        "an engine that does not answer",
        text,
        "acknowledgement of new",
        ENDS,
    )


def test_an_engine_that_dies(small, capfd, monkeypatch):
    monkeypatch.setattr(utils, "_generate", lambda *_: sys.exit(3))
    note("the engine dies", "`sys.exit` in its thread", fails(small(), capfd), "the rollout thread failed", ENDS)


def test_an_engine_that_ends_in_a_push(small, capfd, monkeypatch):
    """No message, no exception: the thread is gone while the run waits for its acknowledgement."""
    pushes = []

    def end_in_the_second(message):
        pushes.append(message[0] == "weights")
        return ("stop",) if sum(pushes) == 2 else message

    hf_thread_with(monkeypatch, end_in_the_second)
    monkeypatch.setattr(client, "RESTARTS", 0)
    text = fails(small(), capfd)
    note("the engine ends in a push", "its thread returns", text, "the rollout thread ended", ENDS)


def test_an_engine_that_raises(small, capfd, monkeypatch):
    def generate(*_):
        raise ValueError("the engine broke on purpose")

    monkeypatch.setattr(utils, "_generate", generate)
    note("the engine raises", "an exception in its thread", fails(small(), capfd), "broke on purpose", ENDS)


def test_an_engine_that_raises_once(small, capfd, monkeypatch):
    plain = utils._generate
    calls = []

    def generate(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("the engine broke on purpose")
        return plain(*arguments)

    monkeypatch.setattr(utils, "_generate", generate)
    _, text = goes_on(small(), capfd)
    note("the engine raises once", "an exception in its thread", text, "its engine is restarted", GOES_ON)


def drop_later_pushes(monkeypatch) -> None:
    """The first push arrives, later ones are acknowledged and not taken."""
    seen: list = []

    def keep_first(message):
        if message[0] == "weights":
            seen.append([(name, w.clone()) for name, w in message[2]])
            return ("weights", message[1], seen[0])
        return message

    hf_thread_with(monkeypatch, keep_first)


def test_stale_weights(small, capfd, monkeypatch):
    drop_later_pushes(monkeypatch)
    text = fails(small(total_steps=4, learning_rate=1e-2), capfd)
    note("the engine keeps old weights", "pushes that are acknowledged and dropped", text, "--max_logprob_diff", ENDS)


@pytest.mark.parametrize("inflight", ["off", "recompute", "keep"])
def test_stale_weights_of_samples_that_are_stale_anyway(small, capfd, monkeypatch, inflight):
    """With --async_steps no token that is trained on need be fresh: a few are asked for after every push."""
    drop_later_pushes(monkeypatch)
    monkeypatch.setattr(checks, "check_asynchrony", lambda args: None)  # this thread knows no updates in flight
    text = fails(small(total_steps=4, learning_rate=1e-2, async_steps=1, inflight_updates=inflight), capfd)
    assert "the engine has stale weights or a different model" in text


@pytest.mark.parametrize(
    "changes",
    [{"verifier": f"{VERIFIERS}:zero"}, {"mask_truncated_completions": True}, {"filter_zero_std_samples": True}],
    ids=["equal", "truncated", "filtered"],
)
@pytest.mark.parametrize("script", ["grpo", "ppo"])
def test_an_engine_with_other_weights_is_noticed_where_nothing_is_trained(tiny, tmp_path, monkeypatch, script, changes):
    """Such an engine's answers are garbage, so all rewards are equal, or no response ends, and there is no gradient."""
    changes = {"verifier": f"{VERIFIERS}:zero", "eval_prompts": 0, **changes}
    hf_thread_with(monkeypatch, lambda m: (*m[:2], [(n, w + 1) for n, w in m[2]]) if m[0] == "weights" else m)
    with pytest.raises(RuntimeError, match="the engine has stale weights or a different model"):
        run_here(tiny_args(tiny, tmp_path, script, **changes), script)


def test_a_healthy_engine_is_compared_in_every_step(tiny, tmp_path):
    """Also where nothing is trained on, or nothing that is fresh; and 0 looks at nothing."""
    quiet = {"verifier": f"{VERIFIERS}:zero", "filter_zero_std_samples": True, "eval_prompts": 0}
    for changes in (quiet, {"async_steps": 1, "total_steps": 4, "learning_rate": 1e-2, "eval_prompts": 0}):
        for metrics in run_here(tiny_args(tiny, tmp_path, **changes)):
            assert 0 <= metrics["sampler/logprob_diff_mean"] < 1e-4


def test_an_exit_in_the_middle_of_a_run_is_a_failure(small, capfd, monkeypatch):
    """Some library's or edit's exit() must not look like the end of a run to whoever started it."""
    plain = grpo.token_loss
    monkeypatch.setattr(grpo, "token_loss", lambda *a: (plain(*a), sys.exit(0)))
    with pytest.raises(SystemExit):
        run_here(small())
    assert "rank 0 failed" in capfd.readouterr().err


def test_another_temperature(small, capfd, monkeypatch):
    hf_thread_with(monkeypatch, lambda m: (*m[:3], m[3] | {"temperature": 1.2}) if m[0] == "generate" else m)
    text = fails(small(temperature=0.8), capfd)
    note("sampler and trainer at different temperatures", "1.2 and 0.8", text, "--max_logprob_diff", ENDS)


def test_weights_that_are_not_finite(small, capfd, monkeypatch):
    whole = deepspeed_zero.current_weights
    monkeypatch.setattr(deepspeed_zero, "current_weights", lambda *a: [(n, w * float("nan")) for n, w in whole(*a)])
    note("weights become NaN", "NaN in all of them", fails(small(), capfd), "`nan`", ENDS)


def test_log_probs_that_are_not_finite(small, capfd, monkeypatch):
    plain = utils._generate

    def generate(*a):
        for key, ids, logprobs, reason in plain(*a):
            yield key, ids, [float("nan")] * len(logprobs), reason

    monkeypatch.setattr(utils, "_generate", generate)
    note("the sampler's log-probs become NaN", "NaN", fails(small(), capfd), "not finite", ENDS)


def test_losses_that_are_not_finite(small, capfd, monkeypatch):
    plain = grpo.token_loss
    monkeypatch.setattr(grpo, "token_loss", lambda *a: (plain(*a)[0] * float("nan"), plain(*a)[1]))
    args = small(total_steps=12, entropy_coef=1e-3)
    text = fails(args, capfd)
    assert len(read_jsonl(folder_of(args) / "bad_batch.jsonl")) == 16
    note("the loss is NaN, again and again", "NaN in every loss", text, "ten optimizer steps in a row", ENDS)


def test_a_verifier_raises(small, capfd):
    with pytest.raises(SystemExit) as ended:
        run_here(small(verifier=f"{ROOT}/tests/verifiers.py:raises"))
    assert ended.value.code == 2
    text = "".join(capfd.readouterr())
    note("a verifier raises", "`1 / 0` in a verifier", text, "error: --verifier: the verifier", REFUSED)


def test_flash_attention_is_missing(small, capfd):
    text = fails(small(attn_implementation="flash_attention_2", batch_layout="packed", dtype="bfloat16"), capfd)
    note("flash-attn is not installed", "`--attn_implementation flash_attention_2`", text, "ImportError: ", ENDS)


# --------------------------------------------------------------------------------------------- runs that go on with it


def goes_on(args, capfd, script: str = "grpo") -> tuple[list[dict], str]:
    metrics = run_here(args, script)
    return metrics, "".join(capfd.readouterr())


def test_one_loss_that_is_not_finite(small, capfd, monkeypatch):
    plain, calls = grpo.token_loss, []

    def poisoned(*a):
        loss, parts = plain(*a)
        calls.append(1)
        return (loss * float("nan") if len(calls) == 1 else loss), parts

    monkeypatch.setattr(grpo, "token_loss", poisoned)
    metrics, text = goes_on(small(), capfd)
    assert [m["optim/skipped"] for m in metrics] == [1, 0]
    note("one loss is NaN", "NaN in the first step", text, "SKIPPED 1", GOES_ON)


def test_all_rewards_zero(small, capfd):
    args = small(verifier="exact", total_steps=5)
    metrics, text = goes_on(args, capfd)
    assert all(m["reward/zero_std_frac"] == 1 and m["optim/grad_norm"] == 0 for m in metrics)
    said = "no score of the last 5 steps is above 0"
    note("all rewards are 0", "a verifier that never says yes", text, said, GOES_ON)
    note("all rewards of a group are equal", "the same", text, "zero-variance 100%", GOES_ON)


def test_the_loss_is_zero(small, capfd):
    metrics, text = goes_on(small(loss_norm="sequence"), capfd)
    assert all(abs(m["loss/total"]) < 1e-3 < m["optim/grad_norm"] for m in metrics)
    assert "| The loss is about 0, or negative |" in (ROOT / "docs" / "run.md").read_text()
    sentence = "`optim/grad_norm` is not 0; docs/run.md says why"
    observe("the loss is about 0 although the model learns", "one optimizer step a batch", sentence, GOES_ON)
    note("no progress is visible", "any run", text, "ETA 0:00:", GOES_ON)


def test_all_responses_are_cut(small, capfd):
    _, text = goes_on(small(mask_truncated_completions=True, ignore_eos=False, max_response_length=2), capfd)
    note("no response ever ends", "2 tokens at most", text, "ALL TRUNCATED, nothing to train on", GOES_ON)


def test_responses_of_one_token(small, capfd, monkeypatch):
    monkeypatch.setattr(pretrained, "stop_token_ids", lambda model, _: list(range(model.config.vocab_size)))
    metrics, text = goes_on(small(), capfd)
    assert all(m["completions/length_mean"] == 1 and m["optim/skipped"] == 0 for m in metrics)
    note("every response ends at once", "every token a stop token", text, "len 1.0", GOES_ON)


def test_a_tokenizer_without_padding(tiny, tmp_path, capfd):
    shutil.copytree(tiny, tmp_path / "unpadded")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (file := tmp_path / "unpadded" / name).exists():
            file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "pad_token"}))
    args = tiny_args(tiny, tmp_path / "runs", eval_prompts=0, learning_rate=1e-3)
    args.model_name_or_path = str(tmp_path / "unpadded")
    metrics, text = goes_on(args, capfd)
    assert len(metrics) == 2
    note("a tokenizer without a padding token", "one taken out", text, "step 2/2", GOES_ON)


@pytest.mark.parametrize(
    "fault, injection, verifier, words, metric",
    [
        ("a verifier hangs", "`sleep(3600)`", "hangs", "killed after 1 s (--call_timeout)", "reward/timeouts"),
        ("a verifier's process dies", "`os._exit(3)`", "dies", "the worker died", "reward/errors"),
        ("a verifier exits", "`sys.exit(0)`", "exits_on_a_response", "SystemExit: 0", "reward/unscorable"),
        ("a verifier takes all memory", "100 GB", "takes_memory", "first crash of a verification", "reward/errors"),
        (
            "a verifier returns something else",
            "text, not a number",
            "not_a_reward_of_a_response",
            "returned str, not a number",
            "reward/unscorable",
        ),
    ],
    ids=["hangs", "dies", "exits", "memory", "text"],
)
def test_verifiers_that_cost_a_sample(small, capfd, fault, injection, verifier, words, metric):
    sizes = {
        "num_unique_prompts_rollout": 1,
        "num_samples_per_prompt_rollout": 2,
        "total_steps": 1,
        "call_timeout": 1,
    }
    args = small(verifier=f"{ROOT}/tests/verifiers.py:{verifier}", **sizes)
    metrics, text = goes_on(args, capfd)
    assert metrics[0][metric] == 2
    note(fault, injection, text, words, GOES_ON)


def test_wandb_is_away(small, capfd, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    begun = time.monotonic()
    args = small(track=("wandb",))
    _, text = goes_on(args, capfd)
    assert time.monotonic() - begun < 60
    note("wandb is not reachable", "a server that is not there", text, "tracking offline", GOES_ON)
    files = [p for p in Path(args.output_dir).rglob("*") if p.is_file()]
    assert not [p for p in files if b"0" * 40 in p.read_bytes()], "the key is in a file"
    observe("secrets in logs", "a key in the environment", "no file of the run has it", GOES_ON)


def test_wandb_ends(tiny, tmp_path):
    """Its process killed: by a batch system that signals every process of a job, or for want of memory."""
    line = ["env", "WANDB_MODE=offline", *command(tiny, tmp_path, *LONG, "--track")]
    run = Run(line, tmp_path / "log")
    run.until(lambda: logged(tmp_path) >= 1)
    tracking = [pid for pid in run.seen if alive(pid) and b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert tracking
    for pid in tracking:
        os.kill(pid, signal.SIGTERM)
    run.until(lambda: "no more tracking" in run.text(), 60)
    before = logged(tmp_path)
    run.until(lambda: logged(tmp_path) > before)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end(30) == 75 and saved(tmp_path) == logged(tmp_path)
    note("wandb's process is killed", "SIGTERM to wandb-core", run.text(), "no more tracking", GOES_ON)


def test_a_lock_that_a_killed_process_left(tiny, tmp_path):
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    line = ["env", f"TORCH_EXTENSIONS_DIR={tmp_path}", *command(tiny, tmp_path, "--total_steps", "1")]
    run = Run(line, tmp_path / "log")
    assert run.end(120) == 0, run.text()
    injection = "the `lock` of an extension that DeepSpeed compiles"
    note("a lock left behind by a killed process", injection, run.text(), "step 1/1", GOES_ON)


def test_files_that_grow(small, capfd):
    args = small(num_samples_per_prompt_rollout=16, log_samples=4)
    goes_on(args, capfd)
    rows = read_jsonl(folder_of(args) / "samples.jsonl")
    assert len(rows) == 2 * 4
    sentence = f"{len(rows)} rows in samples.jsonl after 2 steps (`--log_samples 4`)"
    observe("samples fill the disk", "64 samples a step", sentence, GOES_ON)


def test_damaged_checkpoints_and_full_disks(tiny, tmp_path, capfd, monkeypatch):
    args = tiny_args(tiny, tmp_path, **{**SMALL, "save_every": 1})
    folder = interrupted(args, monkeypatch, after=3)
    flip(engine_file(folder / "checkpoints" / "step_000003"))
    capfd.readouterr()
    plain = shutil.disk_usage
    less = lambda path: plain(path)._replace(free=1000)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (less if Path(path).name == "checkpoints" else plain)(path))
    _, text = goes_on(args, capfd)
    note("a checkpoint is damaged", "one bit flipped", text, "has changed since it was written", GOES_ON)
    note("the run was interrupted", "a signal, then the same command", text, "resuming after step 2", GOES_ON)
    note("the disk is full", "1000 bytes free", text, "NO CHECKPOINT after step", GOES_ON)
    with pytest.raises(SystemExit) as end:
        run_here(args)
    assert end.value.code == 0
    note("the run had finished", "the same command", capfd.readouterr().out, "is finished", REFUSED)
    with pytest.raises(SystemExit) as end:
        args.run_name, args.beta = folder.name, 0.5
        run_here(args)
    note("the folder of another run", "another `--beta`", capfd.readouterr().err, "another configuration", REFUSED)


# ---------------------------------------------------------------------------------------------------- processes


def ended(run: Run, timeout: float = 30) -> str:
    """Return the output of a run that must end within the time, with an exit code other than 0."""
    assert run.end(timeout) != 0
    return run.text()


def test_signals_and_two_runs(tiny, tmp_path):
    run = Run(command(tiny, tmp_path, *LONG), tmp_path / "log")
    run.until(lambda: logged(tmp_path) >= 1)
    for more in ([], ["--overwrite"]):
        second = Run(command(tiny, tmp_path, *LONG, *more), tmp_path / "second.log")
        text = ended(second)
        assert second.process.returncode == 73 and f"process {run.process.pid} on " in text and "--run_name" in text
    note("two runs in one folder", "the same command twice", text, "is in use by a running process", REFUSED)
    os.kill(run.process.pid, signal.SIGUSR2)
    run.until(lambda: "most recent call first" in run.text(), 10)
    note("where is the run?", "SIGUSR2", run.text(), "most recent call first", GOES_ON)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.end(30) == 75 and saved(tmp_path) == logged(tmp_path)
    note("preemption, a time limit, Ctrl-C", "SIGTERM", run.text(), "saving after this step", "saves, ends with 75")


def test_one_rank_is_killed(tiny, tmp_path):
    run = Run(command(tiny, tmp_path, *LONG, ranks=2), tmp_path / "log")
    run.until(lambda: logged(tmp_path) >= 1)
    os.kill(run.ranks()[1], signal.SIGKILL)
    text = ended(run)
    note("one of several ranks is killed", "SIGKILL", text, "ended first, by signal 9 (Killed)", ENDS)
    observe("leftover processes", "the same", "none, 10 seconds later", ENDS)


def test_the_port_is_taken(tiny, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = ["env", f"MASTER_PORT={port}", "MASTER_ADDR=127.0.0.1", *command(tiny, tmp_path, *LONG)]
        text = ended(Run(line, tmp_path / "log"), 240)
    note("the port is taken", "`MASTER_PORT` of another process", text, "address already in use", ENDS)


def test_a_run_that_stands_still(tiny, tmp_path):
    run = Run(with_program(command(tiny, tmp_path, *LONG), tmp_path, STALLS), tmp_path / "log")
    run.until(lambda: logged(tmp_path) == 2)
    text = ended(run)
    assert "--timeout 12" in text and "in stuck" in text, "the stack of the thread that stands still"
    note("the main thread hangs", "a call that never returns", text, "no progress on any rank for", ENDS)


def test_another_vllm(tiny, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '9.9'\n")
    line = ["env", f"PYTHONPATH={tmp_path}:{ROOT}", *command(tiny, tmp_path, *LONG, rollout="vllm")]
    text = ended(Run(line, tmp_path / "log"), 240)
    note("another vLLM", "one without the package vllm.v1", text, "No module named 'vllm.v1'", REFUSED)


VLLM = """
from runtime.system import process
process.prepare_environment()
import tyro
import grpo

if __name__ == "__main__":  # the reward workers import this file
    import vllm

    vllm.LLM.reset_prefix_cache = lambda self, **options: False
    args = tyro.cli(grpo.Args)
    grpo.main(args, grpo.preflight(args))
"""


def test_the_real_engine(tiny, tmp_path):
    """Too little memory for its cache; a prefix cache that it does not drop."""
    too_little = '{"kv_cache_memory_bytes": 10000}'
    line = command(tiny, tmp_path, *LONG, "--vllm_args", too_little, rollout="vllm")
    text = ended(Run(line, tmp_path / "memory.log"), 240)
    cause = text.partition("The above exception was the direct cause")[0]
    note("vLLM has too little memory", f"`--vllm_args '{too_little}'`", cause, "Error: ", ENDS)
    line = command(tiny, tmp_path, *LONG, rollout="vllm")
    run = Run(with_program(line, tmp_path, VLLM), tmp_path / "keeps.log")
    note("the prefix cache outlives a push", "an engine that keeps it", ended(run, 240), "kept its prefix cache", ENDS)


# -------------------------------------------------------------------------------- engines of their own, several nodes


def test_an_engine_on_a_rank_of_its_own(tiny, tmp_path):
    """It raises, and is built again; then its rank is killed."""
    line = command(tiny, tmp_path, *LONG, *ONE_ENGINE, ranks=2, rollout="vllm")
    run = Run(with_program(line, tmp_path, RAISES), tmp_path / "log")
    run.until(lambda: "its engine is restarted" in run.text() and logged(tmp_path) >= 2, 240)
    os.kill(run.ranks()[1], signal.SIGKILL)
    text = ended(run, 15)
    own = "an engine on a rank of its own"
    note(f"{own} raises once", "an exception in its thread", text, "its engine is restarted", GOES_ON)
    note(f"{own} is killed", "SIGKILL", text, "(engine 0) is gone without a word", ENDS)


def test_the_trainer_of_an_engine_is_killed(tiny, tmp_path):
    """Its engine ends with it, long before the launcher would kill it."""
    run = Run(command(tiny, tmp_path, *LONG, *ONE_ENGINE, ranks=2, rollout="vllm"), tmp_path / "log")
    run.until(lambda: logged(tmp_path) >= 1, 240)
    os.kill(run.ranks()[0], signal.SIGKILL)
    note(
        "the trainer of such an engine is killed",
        "SIGKILL",
        ended(run, 15),
        "rank 0, which engine 0 samples for, is gone",
        ENDS,
    )


missing = reason_for_none()
needs_nodes = pytest.mark.skipif(bool(missing), reason=missing)


@needs_nodes
def test_a_link_between_nodes_is_lost(tiny, tmp_path):
    with Nodes() as nodes:
        runs = training(nodes, tiny, tmp_path)
        nodes.cut()
        ends(runs, 30)
        first, other = (ended(run) for run in runs)
        assert all(run.process.returncode != 75 for run in runs)
    assert f"rank 0 on node0 failed: rank 1 on node1 ({ADDRESSES[1]}) is gone without a word" in first, first
    assert f"rank 1 on node1 failed: no answer from {ADDRESSES[0]}" in other, other
    note("another node is lost", "`ip link set down`", first, "is gone without a word", ENDS)
    note("the node where the launch began is lost", "the same, on the other node", other, "no answer from", ENDS)


@needs_nodes
@pytest.mark.parametrize(
    "fault, injection, outs, more, codes, words",
    [
        (
            "nodes that do not share `--output_dir`",
            "a folder of its own on each",
            ("disk0", "disk1"),
            {},
            (2, 2),
            "is not the same folder on all nodes: rank 1 on node1 cannot see",
        ),
        (
            "a node without the model",
            "an empty folder in its place",
            ("disk", "disk"),
            {"on_node_1": "mount -t tmpfs none MODEL"},
            (1, 2),
            "no config.json there",
        ),
        (
            "a network interface that is not there",
            "`GLOO_SOCKET_IFNAME=ib7`",
            ("disk", "disk"),
            {"before": ("GLOO_SOCKET_IFNAME=ib7",)},
            (2, 2),
            "GLOO_SOCKET_IFNAME ib7: this node has no such interface",
        ),
    ],
    ids=["folders", "model", "interface"],
)
def test_nodes_that_are_not_alike(tiny, tmp_path, fault, injection, outs, more, codes, words):
    """A node reports its own problem, and the other node does not wait for it."""
    model = shutil.copytree(tiny, tmp_path / "tiny")
    more = {key: value.replace("MODEL", str(model)) if key == "on_node_1" else value for key, value in more.items()}
    with Nodes() as nodes:
        runs = nodes.launch(model, [tmp_path / out for out in outs], tmp_path, **more)
        ends(runs, 240)
        texts = [ended(run) for run in runs]
        assert tuple(run.process.returncode for run in runs) == codes
    said = words if codes == (2, 2) else "rank 1 ended first, with exit code 2; see what node1 printed"
    assert said in texts[0], texts[0]
    note(fault, injection, texts[1], words, REFUSED)


FAULTS = 68
